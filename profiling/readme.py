"""Fill the tables of README.md, docs/ and profiling/results/: ``python -m profiling.readme``; ``--check`` compares.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. NAME is a key of ``TABLES``, filled from
profiling/results/, or a block of ``profiling.reference``, filled from the code. The rest of a page stays as it is.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiling import everything, float8, host, measurements, reference
from profiling.draw.common import ResultError, Results, markdown
from profiling.nsight import summarize
from profiling.sweep import lasting
from twell.strategy.tables import SCREENED, STRATEGIES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
PAGES = (ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
# Eager calls, by what tables call them: prefixes of the fields of their milliseconds and speed-ups.
EAGER = {
    f"eager, {said}: dense / twell, speed-up": way for said, way in (("queued", "queued"), ("waited for", "waited"))
}
LAYERS = ("real3", "topic29", "skew29", "uniform29", "real6", "topic128", "dense911")
Row = dict[str, Any]


@functools.cache
def result(name: str) -> dict[str, Any]:
    """The content of a file of results."""
    found = Results(RESULTS).get(name)
    if found is None:
        raise ResultError(f"expected results in {RESULTS / name}.json, got no such file")
    return found


def measured(workload: str, variant: str, tokens: int = 16384, name: str = "h200_auto") -> Row:
    found = [
        row
        for row in result(name)["rows"]
        if (row["workload"], row["variant"], row["tokens"]) == (workload, variant, tokens) and row["ms"]
    ]
    if len(found) != 1:
        raise LookupError(f"expected one row of {workload}, {variant}, {tokens} tokens, got {len(found)}")
    return found[0]


def against_dense(row: Row, scale: float = 1, form: str = ".2f") -> list[str]:
    """Replays of graphs: the time of the faster dense, the row's, and the speed-up."""
    ours, gain = row["ms"], row["speedup_dense"]
    return [f"{ours * gain * scale:{form}}", f"**{ours * scale:{form}}**", f"**{gain:.2f}**"]


def eager(rows: Sequence[Row], scale: float = 1, form: str = ".2f") -> dict[str, list[str]]:
    """Columns of eager calls, if any row has them: dense's time, the row's, the speed-up, and another strategy."""
    columns = {}
    for said, way in EAGER.items():
        cells = []
        for row in rows:
            ours, gain = row.get(f"{way}_ms"), row.get(f"{way}_speedup")
            other = f" {row['eager_strategy']}" if ours and row["eager_strategy"] != row["strategy"] else ""
            times = f"{ours * gain * scale:{form}} / {ours * scale:{form}}, **{gain:.2f}**" if ours and gain else ""
            cells.append(times + other)
        if any(cells):
            columns[said] = cells
    return columns


def layers_beside_dense(op: str) -> str:
    """The layers by "auto" beside dense."""
    rows = [measured(name, op) for name in LAYERS]
    more = eager(rows)
    lines = [
        [f"`{row['workload']}`", f"{row['nnz']:.0f}", *against_dense(row), *cells, row["strategy"], *errors(row)]
        for row, *cells in zip(rows, *more.values())
    ]
    header = ["workload", "non-zeros per token", "graphs: dense", "twell", "speed-up", *more, "strategy"]
    return markdown([*header, "error over dense's", "worst row's"], "lrrrr" + "r" * len(more) + "lrr", lines)


def errors(row: Row) -> list[str]:
    return [f"{row[kind] / row[f'dense_{kind}']:.2f}" for kind in ("frobenius", "worst_row")]


def geometric(ratios: Sequence[float]) -> float:
    return math.prod(ratios) ** (1 / len(ratios))


def mean_speedups(name: str = "h200_auto", field: str = "speedup_dense") -> list[float]:
    """Geometric means over the first five layers, forward and in training; none of fields that were not measured."""
    gains = [[measured(each, op, name=name).get(field, 0.0) for each in LAYERS[:5]] for op in ("ffn", "train")]
    return [geometric(each) for each in gains] if all(map(all, gains)) else []


def mean_speedup() -> str:
    mean, _ = mean_speedups()
    of_model = {
        op: [row["speedup_dense"] for row in result("h200_sweep_layers")["rows"] if row["variant"] == op and row["ms"]]
        for op in ("ffn", "train")
    }
    forward, train = (geometric(of_model[op]) for op in ("ffn", "train"))
    return (
        f"The mean speed-up is {mean:.2f} over the first five workloads and {forward:.2f} over all "
        f"{len(of_model['ffn'])} layers of a model trained like the one below; in training these layers "
        f"gain {train:.2f} (geometric means)."
    )


def layers_on_h100() -> str:
    """Forward and training of the layers on an H100, beside the speed-up on an H200."""
    h100, rows = "h100_auto", []
    for name in LAYERS:
        cells = [f"`{name}`"]
        for op in ("ffn", "train"):
            row = measured(name, op, name=h100)
            cells += [*against_dense(row), f"{measured(name, op)['speedup_dense']:.2f}", row["strategy"]]
        rows.append(cells)
    call = ["twell", "speed-up", "on the H200", "strategy"]
    table = markdown(["workload", "forward: dense", *call, "training: dense", *call], "l" + "rrrrl" * 2, rows)
    forward, train = mean_speedups(h100)
    said = f"Geometric means of the first five: {forward:.2f} forward and {train:.2f} in training."
    return f"{table}\n\n{said} {result(h100)['machine']}"


def decode() -> str:
    counts = (1, 8, 64)
    rows = []
    for name in LAYERS:
        cells = [cell for tokens in counts for cell in against_dense(measured(name, "decode", tokens), 1e3, ".1f")]
        rows.append([f"`{name}`", *cells])
    header = ["workload"]
    for tokens in counts:
        header += [f"{tokens} token{'s' if tokens > 1 else ''}: dense", "twell", "speed-up"]
    return markdown(header, "l" + "r" * 9, rows)


def machine() -> str:
    return str(result("h200_auto")["machine"])


SHAPES = ((1024, 2816), (896, 4864), (2048, 5632), (4096, 11008), (4096, 14336))


def shapes() -> str:
    best: dict[tuple[int, int, str, int], tuple[float, str]] = {}
    for row in result("h200_tuning")["rows"]:
        if not row["red"] and not row["training"] and row["gated"]:
            key = (row["k"], row["n"], row["pattern"], row["m"])
            best[key] = min(best.get(key, (math.inf, "")), (row["relative"], row["strategy"].rpartition("+")[2][0]))
    tokens = (1, 16, 64, 256, 512, 1024, 2048, 4096, 12288)
    rows = []
    for k, n in SHAPES:
        for pattern in ("topic", "uniform", "denser"):
            cells = []
            for m in tokens:
                time, strategy = best.get((k, n, pattern, m), (math.nan, ""))
                cells.append("" if math.isnan(time) else f"{time:.2f} {strategy}" if time < 1 else f"{time:.2f}")
            rows.append([f"{k:,} / {n:,}", pattern, *cells])
    return markdown(["K / N", "pattern", *(f"M = {m:,}" for m in tokens)], "ll" + "r" * len(tokens), rows)


# Whole models

SOME_MODELS = {
    *(("0.5B trained", "forward"), ("0.5B trained", "train")),
    *(("1.5B", "forward"), ("1.5B", "train"), ("2B", "train")),
}
OPS = {"forward": "forward, decoder", "logits": "forward, with LM head", "train": "training step"}
VARIANTS = ("dense eager", "dense compiled", "sparse eager", "sparse compiled")


class Paper(NamedTuple):
    """Figures of arXiv 2603.23198 for one size, dense and sparse.

    forward, training: tokens/ms, and the speed-up in percent. energy: mJ/token of a forward pass. peak: GB of a
    training step.
    """

    forward: tuple[float, float, float]
    energy: tuple[float, float]
    training: tuple[float, float, float]
    peak: tuple[float, float]


PAPER_CORRELATION = -0.996
PAPER = {
    "0.5B": Paper((410, 480, 17.0), (1.63, 1.43), (97.3, 95.9, -1.5), (26.2, 21.2)),
    "1B": Paper((185, 219, 18.1), (3.71, 3.17), (48.6, 52.1, 7.1), (44.5, 33.1)),
    "1.5B": Paper((119, 141, 18.8), (5.73, 4.87), (31.8, 35.5, 11.6), (62.8, 45.1)),
    "2B": Paper((87.8, 106, 20.5), (7.85, 6.51), (22.4, 27.3, 21.9), (46.7, 57.1)),
}


def configurations(gpu: str = "h200") -> list[dict[str, Any]]:
    """Results of the models of the paper's sizes on a GPU. LookupError if two files have the same row."""
    found = [result(path.stem) for path in sorted(RESULTS.glob(f"{gpu}_paper_configs*.json"))]
    counts = Counter((row["config"], row["op"], row["variant"]) for run in found for row in run["rows"])
    if twice := [" ".join(key) for key, count in counts.items() if count > 1]:
        raise LookupError(f"expected one row of each model, got more of {', '.join(twice)}")
    return found


def timed(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """The timed rows of these runs, sorted by model and operation."""
    rows = [row for run in runs for row in run["rows"] if row["ms"] and not row["red"]]
    order = list(dict.fromkeys(row.get("config") for row in rows))
    return sorted(rows, key=lambda row: (order.index(row.get("config")), list(OPS).index(row["op"])))


def pairs(rows: Sequence[Row], kind: str = "") -> Iterator[tuple[Row, Row]]:
    """The dense and the sparse row of each model and operation: of ``kind`` (eager, compiled), or the faster."""
    for key in dict.fromkeys((row.get("config"), row["op"]) for row in rows):
        both = [
            [
                row
                for row in rows
                if (row.get("config"), row["op"]) == key and row["variant"].startswith(f"{what} {kind}")
            ]
            for what in ("dense", "sparse")
        ]
        if all(both):
            theirs, ours = (min(found, key=lambda row: float(row["ms"])) for found in both)
            yield theirs, ours


def percent(value: float) -> str:
    # no minus sign before 0.0
    return f"{round(value, 1) + 0.0:+.1f} %"


def change(before: float, now: float) -> str:
    return percent(100 * (now / before - 1))


def models(shown: Callable[[str, str], bool] = lambda model, op: True) -> str:
    """The faster dense and the faster sparse variant: the trained model, then the paper's sizes.

    ``shown`` selects rows by model and operation.
    """
    return faster_models([("0.5B trained", [result("h200_model")]), ("", configurations())], shown)


def faster_models(
    named: Sequence[tuple[str, list[dict[str, Any]]]], shown: Callable[[str, str], bool] = lambda model, op: True
) -> str:
    """The faster dense and the faster sparse variant of models: a label, or "" for their own names, and their runs."""
    rows = []
    for label, runs in named:
        counts = {each["config"]: statistics.fmean(each["non_zeros"]) for run in runs for each in run["models"]}
        for theirs, ours in pairs(timed(runs)):
            both = theirs, ours
            if not shown(label or ours["config"], ours["op"]):
                continue
            cells = [f"{label or ours['config']} ({counts[ours['config']]:.0f})", OPS[ours["op"]]]
            cells += [" / ".join(f"{row['ms']:.0f}" for row in both)]
            cells += [" / ".join(f"{row['tokens_per_ms']:.0f}" for row in both)]
            cells += [f"**{theirs['ms'] / ours['ms']:.2f}**"]
            for key, scale, form in (("mj_per_token", 1, ".2f"), ("peak_bytes", 1e9, ".1f")):
                before, now = (row[key] for row in both)
                cells += [f"{before / scale:{form}} / {now / scale:{form}}", change(before, now)]
            rows.append(cells)
    header = ["model (non-zeros)", "pass", "ms", "tokens/ms", "speed-up", "mJ/token", "change", "peak GB", "change"]
    return markdown(header, "llrrrrrrr", rows)


def models_on_h100() -> str:
    """The same for the paper's sizes on an H100, and the machine."""
    runs = configurations("h100")
    return f"{faster_models([('', runs)])}\n\n{machines(runs)}"


def headline() -> str:
    """One number each for inference, training and whole models."""
    (forward, train), h100 = mean_speedups(), mean_speedups("h100_auto")
    queued = mean_speedups(field="queued_speedup")
    eagerly = f", {queued[0]:.1f}x and {queued[1]:.1f}x in eager calls, queued," if queued else ""
    found = [*pairs(timed([result("h200_model")])), *pairs(timed(configurations()))]
    gains = [theirs["ms"] / ours["ms"] for theirs, ours in found]
    return (
        "On an H200, in CUDA graphs, against the faster of eager and compiled dense PyTorch: "
        f"**{forward:.1f}x forward and {train:.1f}x in training**{eagerly} for layers with 14 to 33 "
        "non-zeros of 5,632 per token (geometric means of five layers); without graphs "
        f"**{min(gains):.1f}x to {max(gains):.1f}x for whole models** of 0.5B to 2B. "
        f"[On an H100](docs/gpus.md#on-an-h100) they are {h100[0]:.1f}x and {h100[1]:.1f}x."
    )


def model_table(runs: Sequence[dict[str, Any]]) -> str:
    """All variants of the models; empty columns are left out."""
    found = timed(runs)
    several = len({row.get("config") for row in found}) > 1
    columns: list[tuple[str, str, Callable[[Row], str]]] = [
        ("", "l", lambda row: row["config"] if several else ""),
        ("", "l", lambda row: OPS[row["op"]]),
        ("variant", "l", lambda row: row["variant"]),
        ("pass", "r", lambda row: str(row.get("micro_batch", ""))),
        ("ms", "r", lambda row: f"{row['ms']:.1f}"),
        ("spread", "r", lambda row: f"{row['p10_ms']:.0f} to {row['p90_ms']:.0f}"),
        ("tokens/ms", "r", lambda row: f"{row['tokens_per_ms']:.0f}"),
        (
            "over dense",
            "r",
            lambda row: ("**{:.2f}**" if row["variant"] == VARIANTS[-1] else "{:.2f}").format(row["speedup"]),
        ),
        ("mJ/token", "r", lambda row: shown(row, "mj_per_token", ".2f")),
        ("net of idle", "r", lambda row: shown(row, "mj_per_token_idle_corrected", ".2f")),
        ("peak GB", "r", lambda row: shown(row, "peak_bytes", ".1f", 1e9)),
        ("with weights", "r", lambda row: shown(row, "peak_total_bytes", ".1f", 1e9)),
        ("kept KB/token", "r", lambda row: shown(row, "kept_bytes_per_token", ".0f", 1e3)),
        ("error", "r", lambda row: f"{row['error']:.2f}"),
        ("worst", "r", lambda row: shown(row, "worst", ".2f")),
        ("layers run", "l", lambda row: ", ".join(f"{n} {name}" for name, n in sorted(row["strategies"].items()))),
    ]
    used = [column for column in columns if any(column[2](row) for row in found)]
    return markdown([c[0] for c in used], "".join(c[1] for c in used), [[c[2](row) for c in used] for row in found])


def shown(row: Row, key: str, form: str, scale: float = 1) -> str:
    return "" if row.get(key) is None else f"{row[key] / scale:{form}}"


def machines(runs: Sequence[dict[str, Any]]) -> str:
    """The machine lines of runs; lines that differ only in clocks appear once."""
    lines = {lasting(run["machine"]): run["machine"] for run in reversed(runs)}
    return " And: ".join(reversed(lines.values()))


def model_machine(name: str, candidates: bool = False) -> str:
    """Non-zeros and unions of a model layer by layer, ``candidates`` too if wanted, and the machine."""
    run = result(name)
    counts = ", ".join(f"{value:.0f}" for value in run["non_zeros"])
    text = f"Non-zeros per token, layer by layer: {counts}."
    if any(run.get("unions", ())):
        text += f" Share of the neurons that 128 tokens fire: {', '.join(f'{u:.0%}' for u in run['unions'])}."
    if candidates:
        listed = [share for each in run["models"] for share in each["candidates"]]
        text += f" Share that the screen lists for them: {', '.join(f'{share:.0%}' for share in listed)}."
    return f"{text} {run['machine']}"


def configurations_machine() -> str:
    """Sparsity of the drawn models layer by layer, and the machine."""
    runs = configurations()
    subjects = {each["config"]: each for run in runs for each in run["models"]}
    lines = [
        f"- {config}, non-zeros per token layer by layer: {', '.join(f'{value:.0f}' for value in each['non_zeros'])}; "
        f"share of the neurons that 128 tokens fire: {', '.join(f'{value:.0%}' for value in each['unions'])}"
        for config, each in subjects.items()
    ]
    energy = runs[0]["energy"]
    counter = energy["method"].replace("_", " ")
    lines += ["", f"Energy by the board's {counter}; idle power is {energy['idle_watts']:.0f} W. {machines(runs)}"]
    return "\n".join(lines)


def beside_paper() -> str:
    """Dense and sparse figures of the paper, of eager and of compiled models."""
    ours = [of_kind(kind) for kind in ("eager", "compiled")]
    rows = []
    for config, paper in PAPER.items():
        for what, said, more, op, key, scale, form in (
            ("forward tokens/ms", paper.forward[:2], percent(paper.forward[2]), "forward", "tokens_per_ms", 1, ".0f"),
            ("forward mJ/token", paper.energy, change(*paper.energy), "forward", "mj_per_token", 1, ".2f"),
            ("training tokens/ms", paper.training[:2], percent(paper.training[2]), "train", "tokens_per_ms", 1, ".0f"),
            ("training peak GB", paper.peak, change(*paper.peak), "train", "peak_bytes", 1e9, ".1f"),
            ("with weights", (), "", "train", "peak_total_bytes", 1e9, ".1f"),
        ):
            cells = [config, what, " / ".join(f"{value:g}" for value in said), more]
            for found in ours:
                both = found[config, op][key] if (config, op) in found else ()
                cells += [" / ".join(f"{value / scale:{form}}" for value in both), change(*both) if both else ""]
            rows.append(cells)
    return markdown(["", "", "paper", "", "twell, eager", "", "twell, compiled", ""], "llrrrrrr", rows)


def of_kind(kind: str) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Dense and sparse figures of eager or compiled models of the paper's sizes, by model and operation."""
    return {
        (ours["config"], ours["op"]): {key: (theirs[key], value) for key, value in ours.items()}
        for theirs, ours in pairs(timed(configurations()), kind)
    }


def training_run() -> str:
    runs = result("h200_training_run")["runs"]
    sparse = [name for name in runs if name.startswith("sparse")]
    columns = {
        "cross-entropy": (list(runs), lambda row: f"{row['ce']:.3f}"),
        "non-zeros": (sparse, lambda row: f"{row['non_zeros']:.0f}"),
        "thousand tokens/s": (["dense", *sparse], lambda row: f"{row['tokens_per_s'] / 1e3:.0f}"),
        "peak GB": (["dense", *sparse], lambda row: f"{row['peak_bytes'] / 1e9:.1f}"),
    }
    header, rows = ["step"], []
    for quantity, (names, _) in columns.items():
        header += [f"{quantity}: {names[0]}", *names[1:]]
    for index, first in enumerate(runs["dense"]):
        if first["step"] % 50 == 0:
            cells = [show(runs[name][index]) for names, show in columns.values() for name in names]
            rows.append([str(first["step"]), *cells])
    table = markdown(header, "r" * len(header), rows)
    held_out = "; ".join(f"{name}: {steps[-1]['held_out_ce']:.3f}" for name, steps in runs.items())
    return f"{table}\n\nCross-entropy on held-out text after the last step: {held_out}."


# Layers of a trained model, and where "auto" errs


def layers() -> str:
    """Non-zeros and speed-up of the layers of a trained model."""
    rows: dict[int, dict[str, Row]] = {}
    for row in result("h200_sweep_layers")["rows"]:
        if row["requested"] == "auto" and row["ms"] and not row["red"]:
            rows.setdefault(row["layer"], {})[row["variant"]] = row
    cells = []
    for number, ops in sorted(rows.items()):
        line = [str(number), f"{ops['ffn']['nnz']:.0f}"]
        for op in ("ffn", "train"):
            row = ops[op]
            times = [
                f"{row['ms'] * row['speedup_dense']:.2f}",
                f"**{row['ms']:.2f}**",
                f"**{row['speedup_dense']:.2f}**",
            ]
            line += [*times, row["strategy"]]
        cells.append(line)
    header = ["layer", "non-zeros per token", "forward, ms: dense", "twell", "speed-up", "strategy"]
    return markdown([*header, "training: dense", "twell", "speed-up", "strategy"], "rrrrrlrrrl", cells)


def layer_correlation() -> str:
    parts = []
    for op, name in (("ffn", "forward"), ("train", "training")):
        rows = [row for row in result("h200_sweep_layers")["rows"] if row["variant"] == op and row["ms"]]
        counts, gains, times = ([row[key] for row in rows] for key in ("nnz", "speedup_dense", "ms"))
        plain, of_time = statistics.correlation(counts, gains), statistics.correlation(counts, times)
        of_log = statistics.correlation([math.log(count) for count in counts], gains)
        parts.append(f"{name} {plain:.3f}, with the logarithm of the non-zeros {of_log:.3f}, of the time {of_time:.3f}")
    text = f"Correlation of speed-up and non-zeros: {'; '.join(parts)}. The paper has {PAPER_CORRELATION}."
    return f"{text} {result('h200_sweep_layers')['machine']}"


def auto_misses() -> str:
    """Points outside of the table of "auto" where it took more than 2 % longer than the fastest strategy."""
    cells = []
    for row in sorted(result("h200_held_out")["rows"], key=lambda row: -float(row["loss"])):
        if row["loss"] > 0.02:
            ms = {name: row[f"{name}_ms"] for name in (*STRATEGIES, "dense") if row.get(f"{name}_ms")}
            times = [
                f"{name} {ms[name] * 1e3:.0f}" for name in (row["auto"], min(ms, key=lambda name: float(ms[name])))
            ]
            kind = f"{'gated' if row['gated'] else 'non-gated'}{', training' if row['training'] else ''}"
            layer = [f"{row['k']:,} / {row['n']:,}", kind, f"{row['nonzeros']:.0f}", f"{row['m']:,}"]
            cells.append([*layer, *times, percent(100 * row["loss"])])
    return markdown(["K / N", "", "non-zeros", "tokens", '"auto", microseconds', "the best", ""], "llrrllr", cells)


def auto_losses(name: str = "h200_held_out") -> str:
    """What "auto" loses at the points outside of its table."""
    found = result(name)
    losses = [row["loss"] for row in found["rows"]]
    parts = []
    for kind, training in (("forward", False), ("training", True)):
        own = [row["loss"] for row in found["rows"] if row["training"] == training]
        parts.append(f"{100 * statistics.mean(own):.2f} % over {len(own)} {kind} points")
    said = f'On {len(losses)} points "auto" loses {100 * statistics.mean(losses):.2f} % in the mean'
    return f"{said}: {' and '.join(parts)}; at most {100 * max(losses):.1f} %. {found['machine']}"


def fuzz(name: str) -> str:
    """Number of fuzz cases and their seeds, the largest error, and mismatches."""
    run = result(name)
    *others, last = (str(part["seed"]) for part in run["runs"])
    seeds = f"seeds {', '.join(others)} and {last}" if others else f"seed {last}"
    counts, wrong = run["counts"]["numbers"], run["mismatches"]
    largest, case = max(value for name, value in run["worst"].items() if name.endswith("allowed"))
    return (
        f"{run['cases']:,} cases in {run['seconds']:.0f} s, {seeds}: {counts['integers']:,} with integers, compared "
        f"bit by bit, and {counts['reals']:,} with real numbers, the largest error {largest:.2f} of the bound (case "
        f"{case}). Mismatches: {'; '.join(wrong) if wrong else 'none'}. {run['machine']}"
    )


def memory() -> str:
    """Memory kept for backward and peaks of a layer with 29 non-zeros; they do not depend on this number."""
    rows: dict[str, dict[str, Any]] = {}
    for row in result("h200_sweep_memory")["rows"]:
        if row["workload"].startswith("nnz=29,") and row["variant"] != "gate GEMM":
            name, training = row["variant"].removesuffix(" train"), row["variant"].endswith("train")
            name = name if name.startswith("dense") else f'twell, "{row["strategy"]}"'
            kept = {"kept": row["kept_bytes"], "training": row["peak_bytes"]} if training else {}
            rows.setdefault(name, {}).update(kept or {"forward": row["peak_bytes"]}, tokens=row["tokens"])
    cells = [
        [name, *(f"{row[key] / row['tokens'] / 1e3:.1f}" for key in ("kept", "training", "forward"))]
        for name, row in rows.items()
    ]
    header = ["KB per token", "kept for backward", "peak of a training step", "peak of a forward pass"]
    return markdown(header, "lrrr", cells)


def layer_calls(name: str) -> str:
    """Layers of a file of ``profiling.bench`` beside the faster dense, in microseconds."""
    calls = {"ffn": "forward", "decode": "forward, weights outside L2", "train": "training step"}
    calls["train_overflow"] = "training step, sparse"
    lines, found = [], result(name)
    rows = [row for row in found["rows"] if row["variant"] in calls and row["ms"] and not row["red"]]
    more = eager(rows, 1e3, ".0f")
    for row, *cells in zip(rows, *more.values()):
        asked = row["requested"] if row["requested"] in ("", row["strategy"]) else f"auto: {row['strategy']}"
        first = [f"`{row['workload']}`", f"{row['tokens']:,}", f"{row['nnz']:.0f}", calls[row["variant"]], asked]
        lines.append([*first, row["faster_dense"], *against_dense(row, 1e3, ".0f"), *cells])
    header = ["workload", "tokens", "non-zeros per token", "call", "strategy", "faster dense", "graphs, us: dense"]
    table = markdown([*header, "twell", "speed-up", *more], "lrrlllrrr" + "r" * len(more), lines)
    return f"{table}\n\n{found['machine']}"


def with_machine(name: str, table: Callable[[list[Row]], str]) -> str:
    """The table of a file's rows and its machine line."""
    found = result(name)
    return f"{table(found['rows'])}\n\n{found['machine']}"


CALLS = {"ffn": "forward", "train": "training step"}


def screen_table(rows: Sequence[dict[str, Any]], base: str) -> str:
    """Each call with the screen and by "auto" over ``base``, which has none; empty columns are left out."""
    calls: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["variant"] in CALLS and row["ms"] and not row["red"]:
            calls.setdefault((row["workload"], row["tokens"], row["variant"]), {})[row["requested"]] = row
    lines = []
    for (workload, tokens, variant), own in calls.items():
        if {base, SCREENED, "auto"} <= own.keys():
            theirs, ours, chosen = own[base], own[SCREENED], own["auto"]
            cells = [f"`{workload}`", f"{tokens:,}", CALLS[variant], f"{theirs['ms'] * 1e3:.1f}"]
            cells += [f"**{ours['ms'] * 1e3:.1f}**", f"**{ours['ms'] / theirs['ms']:.3f}**"]
            cells += [f"{chosen['strategy']} {chosen['ms'] / theirs['ms']:.3f}"]
            cells += [beside(theirs, ours, "energy_mj", 1, ".3f"), beside(theirs, ours, "peak_bytes", 1e6, ".0f")]
            lines.append(cells)
    over = [f'"{base}", us', f'"{SCREENED}"', "over", '"auto", over']
    header = ["workload", "tokens", "call", *over, "mJ per token", "MB"]
    kept = [place for place in range(len(header)) if any(line[place] for line in lines)]
    left = "".join("lrlrrrlrr"[place] for place in kept)
    return markdown([header[place] for place in kept], left, [[line[place] for place in kept] for line in lines])


def beside(theirs: dict[str, Any], ours: dict[str, Any], field: str, unit: float, form: str) -> str:
    """Both values of a field, or nothing if one was not measured."""
    if not (theirs[field] and ours[field]):
        return ""
    return f"{theirs[field] / unit:{form}} / {ours[field] / unit:{form}}"


def host_times() -> str:
    """Eager calls: their host time, beside graphs, and of few tokens."""
    found = result("h100_host")
    return f"{host.tables(found['rows'])}\n\n{found['machine']}"


def soak() -> str:
    """What a soak did."""
    run = result("h100_soak")
    memory = " and ".join(
        f"{seen['settled']:,.0f} MB {where} at first, {seen['most']:,.0f} at most"
        for where, seen in (("of the GPU", run["gpu_mb"]), ("of the host", run["host_mb"]))
    )
    wrong = "; ".join(run["wrong"]) or "none"
    return (
        f"{run['calls']:,} calls of {run['cases']:,} cases in {run['seconds'] / 60:.0f} minutes; memory: {memory}. "
        f"Faults: {wrong}. {run['machine']}"
    )


# Servers and `generate`


def engine(name: str) -> str:
    """Steps and tokens per second of an engine: stock, and the operator's "dense" and "auto"."""
    found = result(name)
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for row in found["rows"]:
        rows.setdefault((row["prompt"], row["sequences"]), {})[row["engine"]] = row
    lines = []
    for (prompt, sequences), of in rows.items():
        if not {"stock", "dense", "auto"} <= of.keys():
            # the time was up
            continue
        stock, dense, auto = (of[variant] for variant in ("stock", "dense", "auto"))
        what = f"{sequences} that decode" if stock["step_ms"] else f"{sequences} prompts of {prompt:,}"
        cells = [what if prompt else f"{sequences} requests, mixed"]
        if stock["step_ms"]:
            ratio = auto["step_ms"] / min(stock["step_ms"], dense["step_ms"])
            cells += [*(f"{row['step_ms']:.3f}" for row in (stock, dense, auto)), f"**{ratio:.2f}**"]
        else:
            cells += [""] * 4
        gain = auto["per_s"] / stock["per_s"]
        cells += [*(f"{row['per_s']:,.0f}" for row in (stock, auto)), f"{gain:.2f}"]
        lines.append([*cells, "" if auto["differ"] is None else f"{auto['differ']}, {auto['gap']:.3f}"])
    header = [
        "sequences",
        "step, ms: stock",
        '"dense"',
        '"auto"',
        "over the faster",
        "tokens per second: stock",
        '"auto"',
    ]
    return f"{markdown([*header, 'ratio', 'differ'], 'l' + 'r' * 8, lines)}\n\n{found['machine']}"


def engine_eager() -> str:
    """What a layer costs the host in an engine without graphs."""
    found = result("h100_engine_small")
    rows = []
    for row in found["rows"]:
        if row["host"]:
            twell, stock = row["host"]["twell"], row["host"]["stock"]
            rows.append([f"{row['sequences']}", f"{stock:.0f}", f"{twell:.0f}", f"**{twell / stock:.2f}**"])
    return markdown(["sequences", "stock, us", '"auto", us', "ratio"], "rrrr", rows)


def generate() -> str:
    """Tokens per second of a prompt pass and of ``generate`` of transformers, stock and sparse."""
    found = result("h100_generate")
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for row in found["rows"]:
        rates.setdefault((row["what"], row["sequences"]), {})[row["model"]] = row["tokens_per_s"]
    named = {"prompt": "prompt pass", "eager": "decoding, eager", "static": "decoding, static cache"}
    rows = []
    for (what, sequences), rate in rates.items():
        cells = [named[what], f"{sequences}", f"{rate['stock']:,.0f}", f"{rate['sparse']:,.0f}"]
        rows.append([*cells, f"**{rate['sparse'] / rate['stock']:.2f}**"])
    table = markdown(["tokens per second", "sequences", "stock", "twell", "ratio"], "lrrrr", rows)
    return f"{table}\n\n{found['machine']}"


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
    found, cases = _experts("h100_experts")
    rows = []
    for (_, _, _, sequences), case in cases.items():
        auto, grouped = case["auto"], case["grouped products"]
        cells = [
            f"{sequences:,}",
            f"{auto['touched']:.0f}",
            *(f"{case[n]['us']:.0f}" for n in ("grouped products", "dense")),
        ]
        cells += [f"{auto['us']:.0f}", f"**{auto['over_grouped']:.2f}**", f"{auto['over_copy']:.2f}"]
        gigabytes = auto["floor_us"] * found["copy_tbs"] / 1e3
        rows.append([*cells, f"{gigabytes:.2f}", f"{auto['floor_us'] / auto['us']:.0%}", f"{grouped['over_copy']:.2f}"])
    columns = [
        "sequences", "experts touched", "grouped products, us", '"dense", us', '"auto", us', "over grouped products",
        "over two copies", "GB to read", "share of their floor", "grouped products over two copies",
    ]  # fmt: skip
    return f"{markdown(columns, 'r' * len(columns), rows)}\n\n{found['machine']}"


def experts_elsewhere() -> str:
    """How many times as fast "auto" is as grouped products, by zeros, routes, sizes and kind of experts."""
    rows, machines, sizes = [], set(), (1, 8, 64, 256, 1024)
    for name in ("firing", "skew", "large", "gated"):
        found, cases = _experts(f"h100_experts_{name}")
        # clocks differ from run to run
        machines.add(re.sub(r"SM \d+ MHz now, ", "", found["machine"]))
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
    ends = ("", "_large", "_few", "_experts", "_loss")
    return "\n\n".join(float8.section({end: Results(RESULTS).get(f"h100_float8{end}") for end in ends}))


def ncu() -> str:
    """Measurements of each kernel by Nsight Compute."""
    found = result("h200_ncu")
    rows = [summarize.Row(**row) for row in found["rows"]]
    # the text says that each kernel has one launch
    columns = [column for column in summarize.COLUMNS if column.name != "launches"]
    align = "".join("l" if column.left else "r" for column in columns)
    cells = [[column.cell(row) for column in columns] for row in rows]
    rates = found["figures"]["ceilings"]
    flops, memory_, l2 = (rates[name] / 1e12 for name in ("flops", "memory", "l2"))
    floors = f"Floors at {flops:.0f} TFLOP/s, {memory_:.2f} TB/s of memory and {l2:.2f} TB/s of L2."
    return f"{markdown([c.name for c in columns], align, cells)}\n\n{floors} {found['machine']}\n"


def most_nonzeros() -> str:
    """How sparse layers of known models must be for each kind of call."""
    from twell.commands import prediction
    from twell.commands.request import as_percent
    from twell.strategy import tables

    known = {
        "SparseLM 2B": (True, 2048, 5632),
        "Llama 3.2 1B": (True, 2048, 8192),
        "Llama 3 8B, Mistral 7B": (True, 4096, 14336),
        "Qwen2.5 7B": (True, 3584, 18944),
        "OPT 6.7B": (False, 4096, 16384),
        "Nemotron-4 15B": (False, 6144, 24576),
    }
    calls = [
        prediction.Call(1, False),
        prediction.Call(64, False),
        prediction.Call(16384, False),
        prediction.Call(16384, True),
    ]
    cells = []
    for name, shape in known.items():
        limits = [prediction.most_nonzeros(shape, call, tables.SHIPPED) for call in calls]
        found = [f"{most:,} ({as_percent(most / shape[2])})" if most else "never" for most in limits]
        cells.append([f"{name}: {shape[1]:,} to {shape[2]:,}{', a gate' if shape[0] else ''}", *found])
    return markdown(["layers like those of", *map(str, calls)], "lrrrr", cells)


def commands() -> str:
    """The commands that make each file of results, and their seconds."""
    rows = []
    for each in measurements.ALL:
        said = "<br>".join(f"`{measurements.shown_command(command)}`" for command in each.commands)
        rows.append([f"`{each.name}`", each.shown, f"{sum(each.seconds):,}", said])
    return markdown(["file", "shown in", "seconds", "command"], "llrl", rows)


def files() -> str:
    """What is in each file of results."""
    rows = [[f"`{each.name}`", each.content, each.shown] for each in measurements.ALL]
    rows += [[f"`{name}`", content, "frozen"] for name, content in measurements.FROZEN.items()]
    return markdown(["file", "content", "shown in"], "lll", rows)


def portable_calls() -> str:
    """Whole calls of the portable family beside Hopper's."""
    rows = []
    for row in result("h100_portable")["rows"]:
        us = row["us"]
        alone = f"{us['product']:,.1f}" if "product" in us else ""
        times = [f"{us['hopper']:,.1f}", f"{us['portable']:,.1f}", f"{us['portable'] / us['hopper']:.2f}"]
        rows.append([row["call"], f"`{row['workload']}`", *times, alone])
    header = ["call", "workload", "Hopper, us", "portable, us", "ratio", "PyTorch's product alone, us"]
    return markdown(header, "llrrrr", rows) + f"\n\n{result('h100_portable')['machine']}"


def portable_kernels() -> str:
    """Their kernels in passes over many tokens."""
    rows = []
    for row in result("h100_portable")["rows"]:
        if row["call"] not in ("row", "union", "training"):
            continue
        kernels = dict(row["kernels"])
        # Hopper's gate is one kernel, that of others a product and another
        gate = {"hopper": kernels.pop("gate_pack")["hopper"]}
        gate["portable"] = kernels.pop("product")["portable"] + kernels.pop("pack")["portable"]
        for kernel, us in {"the gate, packed": gate, **{f"`{name}`": us for name, us in kernels.items()}}.items():
            ratio = f"{us['portable'] / us['hopper']:.2f}"
            rows.append([row["call"], kernel, f"`{row['workload']}`", *(f"{t:,.1f}" for t in us.values()), ratio])
    return markdown(["call", "kernel", "workload", "Hopper, us", "portable, us", "ratio"], "lllrrr", rows)


def adapted() -> str:
    """Speed-ups of layers with adapters over dense ones: a column for calls in graphs, and one for eager calls."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in result("h100_adapters")["rows"]:
        if row["adapters"] != "none":
            found.setdefault((f"`{row['workload']}`", row["pass"], row["adapters"]), {})[row["how"]] = row["gain"]
    rows = [[*which, f"{gain['graph']:.2f}", f"{gain['queued']:.2f}"] for which, gain in found.items()]
    header = ["workload", "pass", "adapters", "speed-up in graphs", "eager"]
    return markdown(header, "lllrr", rows) + f"\n\n{result('h100_adapters')['machine']}"


TABLES: dict[str, Callable[[], str]] = {
    "portable calls": portable_calls,
    "portable kernels": portable_kernels,
    "adapters": adapted,
    "most non-zeros": most_nonzeros,
    "commands": commands,
    "files": files,
    "forward": lambda: layers_beside_dense("ffn"),
    "mean speed-up": mean_speedup,
    "training": lambda: layers_beside_dense("train"),
    "layers on an H100": layers_on_h100,
    "models on an H100": models_on_h100,
    "large layer on an H100": lambda: layer_calls("h100_large_layer"),
    "auto losses on an H100": lambda: auto_losses("h100_held_out"),
    "decode": decode,
    "machine": machine,
    "shapes": shapes,
    "headline": headline,
    "models": models,
    "some models": lambda: models(lambda model, op: (model, op) in SOME_MODELS),
    "model": lambda: model_table([result("h200_model")]),
    "model machine": lambda: model_machine("h200_model", candidates=True),
    "configurations": lambda: model_table(configurations()),
    "configurations machine": configurations_machine,
    "beside the paper": beside_paper,
    "sparser model": lambda: model_table([result("h200_model_sparser")]),
    "sparser model machine": lambda: model_machine("h200_model_sparser", candidates=True),
    "training run": training_run,
    "layers": layers,
    "layer correlation": layer_correlation,
    "auto misses": auto_misses,
    "auto losses": auto_losses,
    "fuzz": lambda: fuzz("h200_fuzz"),
    "fuzz portable": lambda: fuzz("h100_fuzz_portable"),
    "decode autotuned": lambda: layer_calls("h200_decode_autotuned"),
    "large layer": lambda: layer_calls("h200_large_layer"),
    "few tokens": lambda: layer_calls("h200_few_ffn"),
    "over-full": lambda: layer_calls("h200_overfull"),
    "screen": lambda: with_machine("h200_screen", lambda rows: screen_table(rows, "union")),
    "screen model": lambda: with_machine("h200_screen_model", lambda rows: model_table([result("h200_screen_model")])),
    "host": host_times,
    "hard model": lambda: with_machine("h200_model_hard", lambda rows: model_table([result("h200_model_hard")])),
    "soak": soak,
    "memory": memory,
    "engine large": lambda: engine("h200_engine_large"),
    "engine small": lambda: engine("h100_engine_small"),
    "engine trained": lambda: engine("h100_engine_trained"),
    "engine eager": engine_eager,
    "engine experts": lambda: engine("h100_engine_experts"),
    "generate": generate,
    "experts": experts,
    "experts elsewhere": experts_elsewhere,
    "float8": e4m3,
    "ncu": ncu,
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
        if (found := everything.kernels_of(path)) and not everything.current(found):
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
            from twell import _files

            _files.write_text(path, filled)
    if arguments.check and (note := of_other_kernels()):
        print(note)
    if wrong:
        print(f"{', '.join(wrong)} and profiling/results/ differ: python -m profiling.readme", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
