"""Fill the tables of README.md, docs/ and profiling/results/: ``python -m profiling.readme``; ``--check`` compares.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. NAME is a key of ``TABLES``, filled from
profiling/results/, or a block of ``profiling.reference``, filled from the code. The rest of a page stays as it is.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from profiling import everything, figures, reference
from profiling.everything import RESULTS
from profiling.figures import Row, bold, by_case, good, gpu_of, machine, markdown, pivot, result
from twell.base import files
from twell.base.text import as_percent
from twell.choose import cards
from twell.integrations.analyze import calls

FP8 = "dense fp8"
ENGINES = {"engine_small": "2,048 / 5,632", "engine_large": "4,096 / 14,336"}
ENGINES |= {"engine_ten": "the same, 10 % fire", "engine_experts": "experts"}
ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def signed(table: str, *names: str, between: str = " ") -> str:
    """A table with the machine lines of its files."""
    return f"{table}\n\n{between.join(dict.fromkeys(machine(result(name)) for name in names))}"


def engines() -> str:
    """Steps that decode and tokens per second of prompts in vLLM: stock, "auto", and the ratio to the faster dense."""
    cells = dict[tuple[str, str], str]()
    for name, said in ENGINES.items():
        for (prompt, sequences), of in by_case(result(name)["rows"], "prompt", "sequences", each="engine").items():
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
            cells[what, said] = f"{both}, {bold(ratio)}"
    return signed(pivot("stock / twell, ratio", cells), *ENGINES, between=". And ")


def generate() -> str:
    """Tokens per second of a prompt pass and of ``generate`` of transformers, stock and sparse."""
    named = {"prompt": "prompt pass", "eager": "decoding, eager", "static": "decoding, static cache"}
    rows = []
    for (what, sequences), of in by_case(result("generate")["rows"], "what", "sequences", each="model").items():
        stock, sparse = of["stock"]["tokens_per_s"], of["sparse"]["tokens_per_s"]
        rows.append([named[what], f"{sequences}", f"{stock:,.0f}", f"{sparse:,.0f}", bold(sparse / stock)])
    header = ["tokens per second", "sequences", "stock", "twell", "ratio"]
    return signed(markdown(header, "lrrrr", rows), "generate")


def autoencoders() -> str:
    """Autoencoders by "auto": speed-ups over the faster dense variant in graphs and in eager calls, and the peak."""
    cells = {}
    found = by_case(result("sae")["rows"], "pattern", "n", "op")
    for (pattern, n, op), of in found.items():
        auto = of['"auto"']
        cells[f"{pattern}, {n:,}", op] = f"{bold(auto['over_dense'])}, {auto['queued_over_dense']:.2f}"
    for pattern, n in dict.fromkeys(case[:2] for case in found):
        of = found[pattern, n, "training"]
        both = (f"{of[variant]['peak_bytes'] / 1e9:.1f}" for variant in ("dense compiled", '"auto"'))
        cells[f"{pattern}, {n:,}", "peak of training, GB: dense / twell"] = " / ".join(both)
    return signed(pivot("codes, d_sae", cells), "sae")


def experts() -> str:
    """Layers of experts of one shape, by sequences that decode."""
    rows = []
    for (sequences,), of in by_case(result("experts")["rows"], "sequences").items():
        times = [f"{of[variant]['us']:.0f}" for variant in ("grouped products", '"auto"')]
        auto = of['"auto"']
        rows.append([f"{sequences:,}", f"{auto['touched']:.0f}", *times, bold(auto["over_grouped"])])
    header = ["sequences", "experts touched", "grouped products, us", '"auto", us', "over grouped products"]
    return signed(markdown(header, "r" * len(header), rows), "experts")


def experts_elsewhere() -> str:
    """How many times as fast "auto" is as grouped products, by zeros, routes, sizes and kind of experts."""
    rows, sizes = [], (1, 8, 64, 256, 1024)
    names = [f"experts_{name}" for name in ("firing", "skew", "large", "gated")]
    for name in names:
        own = [row for row in result(name)["rows"] if row["variant"] == '"auto"']
        for (shape, firing, skew), of in by_case(own, "shape", "firing", "skew", each="sequences").items():
            what = f"{shape.capitalize()}, {firing:.1%} fire, {f'skew {skew:g}' if skew else 'even routes'}"
            what += ", with a gate" if name == "experts_gated" else ""
            gains = {int(size): f"{row['over_grouped']:.2f}" for size, row in of.items()}
            rows.append([what, *(gains.get(size, "") for size in sizes)])
    header = ["layer", *(f"{size:,}" for size in sizes)]
    return signed(markdown(header, "l" + "r" * len(sizes), rows), *names, between=". And ")


def adapters() -> str:
    """Speed-ups of layers with adapters over dense ones, in graphs and in eager calls."""
    own = [row for row in result("adapters")["rows"] if row["adapters"] != "none"]
    cells = {}
    for (workload, op, dtype), of in by_case(own, "workload", "pass", "adapters", each="how").items():
        cells[f"`{workload}`, {dtype}", op] = ", ".join(f"{of[how]['gain']:.2f}" for how in ("graph", "queued"))
    return signed(pivot("workload, adapters", cells), "adapters")


def portable_calls() -> str:
    """How long calls of the portable family take beside Hopper's, and how fast its layers are beside dense."""
    slower: dict[bool, list[float]] = {}
    gains: dict[str, list[float]] = {}
    for row in result("portable")["rows"]:
        us, few = row["us"], "token" in row["call"]
        slower.setdefault(few, []).append(us["portable"] / us["hopper"])
        if dense := [time for name, time in us.items() if name.startswith("dense")]:
            gains.setdefault("few tokens" if few else row["call"], []).append(min(dense) / us["portable"])
    said = [f"{call} {figures.span(each)}" for call, each in gains.items()]
    return (
        f"Calls of 16,384 tokens take {figures.span(slower[False])} times as long as by Hopper's kernels, of 1 to 64 "
        f"tokens {figures.span(slower[True])} times. The portable layers' speed over the faster of eager and compiled "
        f"dense PyTorch: {', '.join(said)}. {machine(result('portable'))}"
    )


def most_nonzeros() -> str:
    """How sparse layers of known models must be for each kind of call."""
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


def e4m3_layers(name: str) -> Iterable[dict[str, Row]]:
    """The variants of each layer and number of tokens."""
    return by_case(good(name, "us"), "workload", "k", "n", "m").values()


def fastest(of: dict[str, Row], prefix: str) -> Row:
    """The fastest of the variants whose names begin so."""
    return min((row for name, row in of.items() if name.startswith(prefix)), key=lambda row: float(row["us"]))


def e4m3_speed(name: str, tokens: Sequence[int] = ()) -> str:
    """Layers beside dense fp8 and beside the fastest strategy in 16 bits; ``tokens``: which rows, all if none."""
    rows = []
    for of in e4m3_layers(name):
        auto, others = of['"auto"'], (fastest(of, FP8), fastest(of, 'bfloat16 "'))
        if not tokens or auto["m"] in tokens:
            cells = [f"`{auto['workload']}`", f"{auto['m']:,}", f"{auto['nonzeros']:.0f}"]
            cells += [*(f"{other['us']:.0f}" for other in others), f"**{auto['us']:.0f}** {auto['strategy']}"]
            rows.append([*cells, *(bold(other["us"] / auto["us"]) for other in others)])
    header = ["workload", "tokens", "non-zeros", f"{FP8}, us", "bf16 twell", '"auto"', f"over {FP8}", "over bf16 twell"]
    return markdown(header, "l" + "r" * 7, rows)


def e4m3_errors() -> str:
    """Errors beside float64 of the weights before they were quantised, and beside the formula; the range of layers."""
    names = {"bfloat16 dense": "bf16 dense", f"{FP8}, two products": FP8, '"row"': '"row"', '"union"': '"union"'}

    def said(kind: str) -> str:
        errors = {name: [of[name][kind] for of in e4m3_layers("float8") if name in of] for name in names}
        own = {names[name]: [error for error in of if error is not None] for name, of in errors.items()}
        return ", ".join(f"{name} {min(of):.4f} to {max(of):.4f}" for name, of in own.items() if of)

    return (
        "Relative errors of these layers over 1,024 tokens, the least and the most. From the layer in float64, with "
        f"the weights before they were quantised: {said('original')}. From the formula: {said('error')}."
    )


def e4m3_experts() -> str:
    """Layers of experts in 16 bits and in e4m3, and the machines of all results in e4m3."""
    rows, names = [], ("grouped products", '"row"', 'e4m3 "auto"')
    for (sequences,), of in by_case(result("float8_experts")["rows"], "sequences").items():
        times = [of[name]["us"] for name in names]
        if sequences not in (32, 128):
            gains = [bold(time / times[-1]) for time in times[:2]]
            rows.append([f"{sequences:,}", *(f"{time:.0f}" for time in times), *gains])
    header = ["sequences", "bf16 grouped products, us", 'bf16 "row"', names[-1], "over grouped", 'over bf16 "row"']
    return signed(markdown(header, "rrrrrr", rows), "float8", "float8_large", "float8_experts", between=". And ")


def beside_others() -> str:
    """How many times as fast twell is as other ways, the least and the most of what was timed."""
    layers = [figures.measured(name, op) for op in figures.OPS for name in figures.LAYERS]
    few = [row["us"]["dense"] / row["us"]["auto"] for row in result("decode")["rows"] if row["m"] <= 16]
    fp8 = [(fastest(of, FP8), of['"auto"']) for of in e4m3_layers("float8")]
    named = by_case(result("paper_code")["rows"], "workload").values()
    pairs = [(of, op, of[op.strip() or "ffn"]) for of in named for op in ("", " train")]
    quack, paper = ([(of[f"{other}{op}"], own) for of, op, own in pairs] for other in ("quack", "paper"))
    own, mixture = ([r for r in result(name)["rows"] if r["variant"] == '"auto"'] for name in ("sae", "experts"))
    lora = [row for row in result("adapters")["rows"] if row["adapters"] != "none"]
    served = []
    for name in ("engine_small", "engine_large"):
        rows = [row for row in result(name)["rows"] if row["step_ms"] and row["sequences"] <= 64]
        steps = by_case(rows, "sequences", each="engine").values()
        served += [of["stock"]["step_ms"] / of["auto"]["step_ms"] for of in steps]
    # in graphs; eager, queued; waited for
    found: list[tuple[str, str, list[list[float]]]] = [
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
        (
            "`torch.nn.functional.grouped_mm`",
            "`experts`: drawn, 9.3 % fire, 1 to 1,024 sequences",
            [[row["over_grouped"] for row in mixture]],
        ),
        (
            "dense autoencoder, the faster of eager and compiled",
            "`sae`: drawn, 60 non-zeros of 16,384 to 262,144, forward and training",
            [[row[key] for row in own] for key in ("over_dense", "queued_over_dense")],
        ),
        (
            "LoRA of peft, the faster of eager and compiled",
            "`adapters`: drawn, 29 non-zeros of 5,632, 16,384 tokens, forward and training",
            [[row["gain"] for row in lora if row["how"] == kind] for kind in ("graph", "queued")],
        ),
        (
            "vLLM without twell, a whole step",
            "`engine_small`, `engine_large`: drawn, 0.5 % fire, 1 to 64 sequences, the GPU's time",
            [served],
        ),
        (
            "quack 0.6.5, a layer with a fused epilogue",
            "`paper_code`: the layers of the first row, forward and training",
            [[a[way] / b[way] for a, b in quack] for way in ("ms", "queued_ms", "waited_ms")],
        ),
        (
            "the paper's code, where it was right",
            "`paper_code`: the layers of the first row, forward and training",
            [[], *([a[way] / b[way] for a, b in paper if not a["red"]] for way in ("queued_ms", "waited_ms"))],
        ),
    ]
    cells = []
    for other, what, times in found:
        spans = [figures.span(each) if each else "" for each in (*times, [], [])]
        cells.append([other, what, *spans[:3]])
    table = markdown(["other way", "what was timed", "in graphs", "eager, queued", "waited for"], "llrrr", cells)
    elsewhere = " and ".join(f"`{name}`" for name in ("experts", "adapters") if gpu_of(name) != "H200")
    return f"{table}\n\nMeasured on an H200{f', {elsewhere} on an H100' if elsewhere else ''}."


def results() -> str:
    found = [each for each in everything.LISTED if (RESULTS / f"{each.name}.json").exists()]
    rows = [[f"`{each.name}`", each.content, each.shown] for each in found]
    return markdown(["file", "content", "shown in"], "lll", rows)


# By the name of a block: most functions have it.
TABLES: dict[str, Callable[[], str]] = {
    make.__name__.replace("_", " "): make
    for make in (
        *(figures.headline, figures.layers, figures.errors, figures.memory, figures.large_layer, figures.few_tokens),
        *(figures.few_by_share, figures.screen, figures.auto_losses, figures.shapes, figures.models),
        *(beside_others, portable_calls, adapters, engines, generate, autoencoders, experts, experts_elsewhere),
    )
}
TABLES |= {"layers on an H100": figures.layers_elsewhere, "over-full": figures.overfull, "host": figures.host_times}
TABLES |= {"several GPUs": figures.several_gpus, "most non-zeros": most_nonzeros, "files": results}
TABLES |= {"float8": lambda: e4m3_speed("float8"), "float8, few": lambda: e4m3_speed("float8_large", tokens=(1, 64))}
TABLES |= {"float8, errors": e4m3_errors, "float8, experts": e4m3_experts}
TABLES["machine"] = lambda: machine(result(figures.LAYER_FILE))
PLACE = re.compile(r"(<!-- table: ([^\n]*?) -->)\n.*?(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
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
        if (found := everything.named(path, "kernels")) and found != now:
            others.setdefault(found, []).append(path.stem)
    named = "; ".join(f"{hash_} {', '.join(names)}" for hash_, names in others.items())
    return f"note: results of other kernels than the sources, which are {now}: {named}" if named else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    said = "change nothing; exit with 1 if a page is out of date, and name results of other kernels"
    parser.add_argument("--check", action="store_true", help=said)
    check, wrong = parser.parse_args().check, []
    for path in PAGES:
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        try:
            made = fill(text)
        except (LookupError, OSError, ValueError) as error:
            print(f"readme: error: {name}: {error}", file=sys.stderr)
            return 2
        if made != text and check:
            wrong.append(name)
        elif made != text:
            files.write_text(path, made)
    if check and (note := of_other_kernels()):
        print(note)
    if wrong:
        print(f"{', '.join(wrong)} and profiling/results/ differ: python -m profiling.readme", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
