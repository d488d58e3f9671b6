"""Fill the tables of README.md, docs/ and profiling/results/: ``python -m profiling.readme``; ``--check`` compares.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. NAME is a key of ``TABLES``, filled from
profiling/results/, or a block of ``profiling.reference``, filled from the code. The rest of a page stays as it is.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiling import everything, figures, float8, measurements, reference
from profiling.draw.common import ResultError, Results, machine, markdown, pivot
from profiling.figures import result

ROOT = Path(__file__).resolve().parents[1]
RESULTS = figures.RESULTS
PAGES = (ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


# Servers and `generate`


ENGINES = {"small": "2,048 / 5,632", "large": "4,096 / 14,336", "ten": "the same, 10 % fire", "experts": "experts"}


def engines() -> str:
    """Steps that decode and tokens per second of prompts in vLLM: stock, "auto", and the ratio to the faster dense.

    Rows that decode have rates, too, of short runs: they tell the host's speed of the moment, and are left out.
    """
    cells, machines = dict[tuple[str, str], str](), dict[str, None]()
    for name, said in ENGINES.items():
        found = result(f"engine_{name}")
        machines[machine(found)] = None
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for row in found["rows"]:
            rows.setdefault((row["prompt"], row["sequences"]), {})[row["engine"]] = row
        for (prompt, sequences), of in rows.items():
            if not {"stock", "auto"} <= of.keys():
                # the time was up
                continue
            stock, auto = of["stock"], of["auto"]
            if stock["step_ms"]:
                ratio = auto["step_ms"] / min(of[variant]["step_ms"] for variant in ("stock", "dense") if variant in of)
                what, both = f"{sequences} that decode, ms", f"{stock['step_ms']:.2f} / {auto['step_ms']:.2f}"
            elif prompt:
                ratio = auto["per_s"] / stock["per_s"]
                both = f"{stock['per_s'] / 1e3:.0f} / {auto['per_s'] / 1e3:.0f}"
                what = f"{sequences} prompts of {prompt:,}, 1,000 tokens/s"
            else:
                continue
            cells[what, said] = f"{both}, **{ratio:.2f}**"
    return f"{pivot('stock / twell, ratio', cells)}\n\n{'. And '.join(machines)}"


def autoencoders() -> str:
    """Autoencoders by "auto": speed-ups over the faster dense variant in graphs and in eager calls, and the peak."""
    found = result("sae")
    cells: dict[tuple[str, str], str] = {}
    peaks: dict[tuple[str, str], int] = {}
    for row in found["rows"]:
        codes, variant = f"{row['pattern']}, {row['n']:,}", row["variant"]
        if variant == '"auto"':
            cells[codes, row["op"]] = f"**{row['over_dense']:.2f}**, {row['queued_over_dense']:.2f}"
        if row["op"] == "training":
            peaks[codes, variant] = row["peak_bytes"]
    for codes in dict.fromkeys(codes for codes, _ in cells):
        both = (peaks[codes, variant] / 1e9 for variant in ("dense compiled", '"auto"'))
        cells[codes, "peak of training, GB: dense / twell"] = " / ".join(f"{each:.1f}" for each in both)
    return f"{pivot('codes, d_sae', cells)}\n\n{machine(found)}"


def generate() -> str:
    """Tokens per second of a prompt pass and of ``generate`` of transformers, stock and sparse."""
    found = result("generate")
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for row in found["rows"]:
        rates.setdefault((row["what"], row["sequences"]), {})[row["model"]] = row["tokens_per_s"]
    named = {"prompt": "prompt pass", "eager": "decoding, eager", "static": "decoding, static cache"}
    rows = []
    for (what, sequences), rate in rates.items():
        cells = [named[what], f"{sequences}", f"{rate['stock']:,.0f}", f"{rate['sparse']:,.0f}"]
        rows.append([*cells, f"**{rate['sparse'] / rate['stock']:.2f}**"])
    table = markdown(["tokens per second", "sequences", "stock", "twell", "ratio"], "lrrrr", rows)
    return f"{table}\n\n{machine(found)}"


def _experts(name: str) -> tuple[dict[str, Any], dict[tuple[Any, ...], dict[str, Any]]]:
    """The file of a bench of experts, and its rows by shape, firing, skew and sequences, and by variant."""
    found = result(name)
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in found["rows"]:
        case = row["shape"], row["firing"], row["skew"], row["sequences"]
        cases.setdefault(case, {})[row["variant"].strip('"')] = row
    return found, cases


def experts() -> str:
    """Layers of experts of one shape, by sequences that decode."""
    found, cases = _experts("experts")
    rows = []
    for (_, _, _, sequences), case in cases.items():
        times = [f"{case[variant]['us']:.0f}" for variant in ("grouped products", "dense", "auto")]
        gain = f"**{case['auto']['over_grouped']:.2f}**"
        rows.append([f"{sequences:,}", f"{case['auto']['touched']:.0f}", *times, gain])
    columns = [
        "sequences",
        "experts touched",
        "grouped products, us",
        '"dense", us',
        '"auto", us',
        "over grouped products",
    ]
    return f"{markdown(columns, 'r' * len(columns), rows)}\n\n{machine(found)}"


def experts_elsewhere() -> str:
    """How many times as fast "auto" is as grouped products, by zeros, routes, sizes and kind of experts."""
    rows, machines, sizes = [], set(), (1, 8, 64, 256, 1024)
    for name in ("firing", "skew", "large", "gated"):
        found, cases = _experts(f"experts_{name}")
        machines.add(machine(found))
        kinds: dict[tuple[Any, ...], dict[int, str]] = {}
        for (shape, firing, skew, sequences), case in cases.items():
            kinds.setdefault((shape, firing, skew), {})[sequences] = f"{case['auto']['over_grouped']:.2f}"
        for (shape, firing, skew), by_size in kinds.items():
            what = f"{shape.capitalize()}, {firing:.1%} fire, {f'skew {skew:g}' if skew else 'even routes'}"
            gated = ", with a gate" if name == "gated" else ""
            rows.append([what + gated, *(by_size.get(size, "") for size in sizes)])
    table = markdown(["layer", *(f"{size:,}" for size in sizes)], "l" + "r" * len(sizes), rows)
    return f"{table}\n\n{' '.join(sorted(machines))}"


def e4m3() -> str:
    """The section on figures of e4m3 weights; nothing before there are any."""
    ends = ("", "_large", "_few", "_experts")
    return "\n\n".join(float8.section({end: Results(RESULTS).get(f"float8{end}") for end in ends}))


def most_nonzeros() -> str:
    """How sparse layers of known models must be for each kind of call."""
    from twell.base.text import as_percent
    from twell.choose import cards
    from twell.integrations.analyze import calls

    known = {
        "SparseLM 2B": (True, 2048, 5632),
        "Llama 3.2 1B": (True, 2048, 8192),
        "Llama 3 8B, Mistral 7B": (True, 4096, 14336),
        "Qwen2.5 7B": (True, 3584, 18944),
        "OPT 6.7B": (False, 4096, 16384),
        "Nemotron-4 15B": (False, 6144, 24576),
    }
    kinds = [calls.Call("decoding", 64), calls.Call("prefill", 16384), calls.Call("training", 16384)]
    cells = []
    for name, shape in known.items():
        limits = [calls.most_nonzeros(shape, kind, cards.SHIPPED) for kind in kinds]
        found = [f"{most:,} ({as_percent(most / shape[2])})" if most else "never" for most in limits]
        cells.append([f"{name}: {shape[1]:,} to {shape[2]:,}{', a gate' if shape[0] else ''}", *found])
    return markdown(["layers like those of", *map(str, kinds)], "lrrr", cells)


def files() -> str:
    """What is in each file of results."""
    found = {each.name: (each.content, each.shown) for each in measurements.ALL}
    found |= {each.name: (each.content, each.shown) for each in measurements.FROZEN}
    rows = []
    for name, (content, shown) in found.items():
        if (RESULTS / f"{name}.json").exists():
            rows.append([f"`{name}`", content, shown])
    return markdown(["file", "content", "shown in"], "lll", rows)


def portable_calls() -> str:
    """Whole calls of the portable family beside Hopper's and dense."""
    found = result("portable")
    cells = {}
    for row in found["rows"]:
        us, call = row["us"], re.sub(r"\b1 tokens", "1 token", row["call"])
        dense = min((time for name, time in us.items() if name.startswith("dense")), default=None)
        times = f"{us['hopper']:,.1f} / {us['portable']:,.1f}, {us['portable'] / us['hopper']:.2f}"
        times += f", **{dense / us['portable']:.2f}**" if dense else ""
        cells[call, f"`{row['workload']}`"] = times
    return f"{pivot('Hopper / portable, us', cells)}\n\n{machine(found)}"


def adapted() -> str:
    """Speed-ups of layers with adapters over dense ones: a column for calls in graphs, and one for eager calls."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in result("adapters")["rows"]:
        if row["adapters"] != "none":
            found.setdefault((f"`{row['workload']}`", row["pass"], row["adapters"]), {})[row["how"]] = row["gain"]
    rows = [[*which, f"{gain['graph']:.2f}", f"{gain['queued']:.2f}"] for which, gain in found.items()]
    header = ["workload", "pass", "adapters", "speed-up in graphs", "eager"]
    return markdown(header, "lllrr", rows) + f"\n\n{machine(result('adapters'))}"


def beside_others() -> str:
    """How many times as fast twell is as other ways, the least and the most of what was timed."""
    layers = [figures.measured(name, op) for op in figures.OPS for name in figures.LAYERS]
    few = [row["us"]["dense"] / row["us"]["auto"] for row in result("decode")["rows"] if row["m"] <= 16]
    fp8 = [(float8.fastest(case, float8.DENSE), case['"auto"']) for case in float8.cases(result("float8")["rows"])]
    paper = [row["ms"] for row in result("paper_code")["rows"] if not row["wrong"]]
    own = [row for row in result("sae")["rows"] if row["variant"] == '"auto"']
    lora = [row for row in result("adapters")["rows"] if row["adapters"] != "none"]
    mixture = [row["over_grouped"] for row in result("experts")["rows"] if row["variant"] == '"auto"']
    steps: dict[tuple[str, int], dict[str, float]] = {}
    for name in ("engine_small", "engine_large"):
        for row in result(name)["rows"]:
            if row["step_ms"] and row["sequences"] <= 64:
                steps.setdefault((name, row["sequences"]), {})[row["engine"]] = row["step_ms"]
    served = [times["stock"] / times["auto"] for times in steps.values()]
    kinds = "graph", "queued"
    rows: list[tuple[str, str, list[list[float]]]] = [
        (
            "dense layer, the faster of eager and `torch.compile`",
            "`auto`: 2 recorded and 5 drawn layers, 14 to 919 non-zeros of 5,632, 16,384 tokens, forward and training",
            [[row[key] for row in layers] for key in ("speedup_dense", "queued_speedup", "waited_speedup")],
        ),
        ("the same, few tokens", "`decode`: drawn, 1 to 100 % fire, 1 to 16 tokens", [few]),
        (
            "dense fp8 layer, `torch._scaled_mm`",
            "`float8`: e4m3, the first five of these layers, 16,384 tokens",
            [[dense[key] / auto[key] for dense, auto in fp8] for key in ("us", "queued_us")],
        ),
        ("`torch.nn.functional.grouped_mm`", "`experts`: drawn, 9.3 % fire, 1 to 1,024 sequences", [mixture]),
        (
            "dense autoencoder, the faster of eager and compiled",
            "`sae`: drawn, 60 non-zeros of 16,384 to 262,144, forward and training",
            [[row[key] for row in own] for key in ("over_dense", "queued_over_dense")],
        ),
        (
            "LoRA of peft, the faster of eager and compiled",
            "`adapters`: drawn, 29 non-zeros of 5,632, 16,384 tokens, forward and training",
            [[row["gain"] for row in lora if row["how"] == kind] for kind in kinds],
        ),
        (
            "vLLM without twell, a whole step",
            "`engine_small`, `engine_large`: drawn, 0.5 % fire, 1 to 64 sequences, the GPU's time",
            [served],
        ),
        (
            "the paper's code, where it was right",
            "`paper_code`: the layers of the first row, forward and training",
            [[], *([ms[way]["paper"] / ms[way]["twell"] for ms in paper] for way in ("queued", "waited"))],
        ),
    ]
    cells = []
    for other, what, found in rows:
        spans = [f"{min(each):.2f} to {max(each):.2f}" if each else "" for each in found]
        cells.append([other, what, *spans, *[""] * (3 - len(spans))])
    table = markdown(["other way", "what was timed", "in graphs", "eager, queued", "waited for"], "llrrr", cells)
    elsewhere = ", ".join(f"`{name}`" for name in ("experts", "adapters") if figures.gpu_of(name) != "H200")
    return f"{table}\n\nOn an H200{f', {elsewhere} on an H100' if elsewhere else ''}."


TABLES: dict[str, Callable[[], str]] = {
    "headline": figures.headline,
    "layers": figures.layers,
    "errors": figures.errors,
    "machine": figures.machines,
    "layers on an H100": figures.layers_elsewhere,
    "memory": figures.memory,
    "large layer": figures.large_layer,
    "few tokens": figures.few_tokens,
    "few by share": figures.few_by_share,
    "over-full": figures.overfull,
    "screen": figures.screen,
    "host": figures.host_times,
    "auto losses": figures.auto_losses,
    "shapes": figures.shapes,
    "most non-zeros": most_nonzeros,
    "several GPUs": figures.several_gpus,
    "models": figures.models,
    "beside the paper": figures.beside_paper,
    "beside others": beside_others,
    "portable calls": portable_calls,
    "adapters": adapted,
    "engines": engines,
    "generate": generate,
    "autoencoders": autoencoders,
    "experts": experts,
    "experts elsewhere": experts_elsewhere,
    "float8": e4m3,
    "files": files,
}
PLACE = re.compile(r"(<!-- table: ([^\n]*?) -->)\n.*?(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """A page with all of its tables filled."""
    tables = {**TABLES, **reference.blocks()} if "<!-- table: " in text else {}

    def table(match: re.Match[str]) -> str:
        before, name, after = match.groups()
        if name not in tables:
            raise LookupError(f"table must be one of {', '.join(tables)}, got {name!r}")
        return f"{before}\n{tables[name]().strip()}\n{after}"

    return PLACE.sub(table, text)


def of_other_kernels() -> str:
    """One line that names results of other kernels than those of the sources; empty if there are none."""
    now, others = everything.present(), dict[str, list[str]]()
    for path in sorted(RESULTS.glob("*.json")):
        if (found := everything.kernels_of(path)) and found != everything.present():
            others.setdefault(found, []).append(path.stem)
    named = "; ".join(f"{hash_} {', '.join(names)}" for hash_, names in others.items())
    return f"note: results of other kernels than the sources, which are {now}: {named}" if named else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing; exit with 1 if a page is out of date, and name results of other kernels",
    )
    arguments = parser.parse_args()
    wrong = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        try:
            filled = fill(text)
        except (LookupError, ResultError) as error:
            print(f"readme: error: {path.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 2
        if filled != text and arguments.check:
            wrong.append(str(path.relative_to(ROOT)))
        elif filled != text:
            from twell.base import files as _files

            _files.write_text(path, filled)
    if arguments.check and (note := of_other_kernels()):
        print(note)
    if wrong:
        print(f"{', '.join(wrong)} and profiling/results/ differ: python -m profiling.readme", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
