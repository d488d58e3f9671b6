"""Fill the tables of README.md from profiling/results/: ``python profiling/readme.py``. ``--check`` only compares.

Each stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; NAME is a function of this file. Nothing else of the
README is touched.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _quality

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
LAYERS = ("real3", "topic29", "skew29", "uniform29", "real6", "topic128", "dense911")
Row = dict[str, Any]


@functools.cache
def result(name: str) -> dict[str, Any]:
    """The file of that name."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def markdown(header: Sequence[str], align: str, rows: Sequence[Sequence[str]]) -> str:
    """A table; ``align`` has l or r for each column."""
    rule = ["--:" if side == "r" else "---" for side in align]
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])


def measured(workload: str, variant: str, tokens: int = 16384) -> Row:
    found = [
        row
        for row in result("h200_auto")["rows"]
        if (row["workload"], row["variant"], row["tokens"]) == (workload, variant, tokens) and row["ms"]
    ]
    if len(found) != 1:
        raise LookupError(f"expected one row of {workload}, {variant}, {tokens} tokens, got {len(found)}")
    return found[0]


def dense(workload: str, suffix: str, tokens: int = 16384) -> float:
    """Milliseconds of the faster dense variant."""
    return min(measured(workload, f"dense {kind}{suffix}", tokens)["ms"] for kind in ("eager", "compiled"))


def errors(row: Row) -> list[str]:
    return [f"{row[kind] / row[f'dense_{kind}']:.2f}" for kind in ("frobenius", "worst_row")]


def against_dense(workload: str, variant: str, suffix: str, tokens: int = 16384, scale: float = 1) -> list[str]:
    ours, theirs = measured(workload, variant, tokens)["ms"] * scale, dense(workload, suffix, tokens) * scale
    digits = 2 if scale == 1 else 1
    return [f"{theirs:.{digits}f}", f"**{ours:.{digits}f}**", f"**{theirs / ours:.2f}**"]


def forward() -> str:
    rows = []
    for name in LAYERS:
        row = measured(name, "ffn")
        rows.append([f"`{name}`", f"{row['nnz']:.0f}", *against_dense(name, "ffn", ""), row["strategy"], *errors(row)])
    header = ["workload", "non-zeros a token", "dense", "twell", "speed-up", "strategy", "error over dense's"]
    return markdown([*header, "worst row's"], "lrrrrlrr", rows)


def mean_speedup() -> str:
    ratios = [dense(name, "") / measured(name, "ffn")["ms"] for name in LAYERS[:5]]
    mean = math.prod(ratios) ** (1 / len(ratios))
    return f"Over the first five named, the mean speed-up is {mean:.2f} (geometric mean)."


def training() -> str:
    rows = []
    for name in LAYERS:
        row = measured(name, "train")
        kind = "dense" if row["strategy"] == "dense" else "sparse"
        rows.append([f"`{name}`", *against_dense(name, "train", " train"), kind, *errors(row)])
    header = ["workload", "dense", "twell", "speed-up", "strategy", "error over dense's", "worst row's"]
    return markdown(header, "lrrrlrr", rows)


def decode() -> str:
    counts = (1, 8, 64)
    rows = []
    for name in LAYERS:
        cells = [cell for tokens in counts for cell in against_dense(name, "decode", " decode", tokens, scale=1e3)]
        rows.append([f"`{name}`", *cells])
    header = ["workload"]
    for tokens in counts:
        header += [f"{tokens} token{'s' if tokens > 1 else ''}: dense", "twell", "speed-up"]
    return markdown(header, "l" + "r" * 9, rows)


def machine() -> str:
    return str(result("h200_auto")["machine"])


def shapes() -> str:
    best: dict[tuple[int, int, str, int], tuple[float, str]] = {}
    for row in result("h200_tuning")["rows"]:
        if not row["red"] and not row["training"] and row["gated"]:
            key = (row["k"], row["n"], row["pattern"], row["m"])
            best[key] = min(best.get(key, (math.inf, "")), (row["relative"], row["strategy"][0]))
    tokens = (1, 16, 64, 256, 1024, 4096, 16384, 131072)
    rows = []
    for k, n in ((1024, 2816), (896, 4864), (2048, 5632), (4096, 11008), (4096, 14336)):
        for pattern in ("topic", "uniform", "denser"):
            cells = []
            for m in tokens:
                time, strategy = best.get((k, n, pattern, m), (math.nan, ""))
                cells.append("" if math.isnan(time) else f"{time:.2f} {strategy}" if time < 1 else f"{time:.2f}")
            rows.append([f"{k:,} / {n:,}", pattern, *cells])
    return markdown(["K / N", "pattern", *(f"M = {m:,}" for m in tokens)], "ll" + "r" * len(tokens), rows)


def model(name: str) -> str:
    names = {"forward": "forward, decoder", "logits": "forward, with LM head", "train": "training step"}
    rows = []
    for op in names:
        for row in (row for row in result(name)["rows"] if row["op"] == op):
            ran = ", ".join(f"{count} {strategy}" for strategy, count in sorted(row["strategies"].items()))
            spread = f"{row['p10_ms']:.0f} to {row['p90_ms']:.0f}"
            best = f"**{row['speedup']:.2f}**" if row["variant"] == "sparse compiled" else f"{row['speedup']:.2f}"
            times = [f"{row['ms']:.1f}", spread, f"{row['tokens_per_ms']:.0f}", best]
            rows.append(
                [names[op], row["variant"], *times, f"{row['peak_bytes'] / 1e9:.1f}", f"{row['error']:.2f}", ran]
            )
    header = ["", "variant", "ms", "10 to 90 %", "tokens/ms", "over dense", "peak GB", "error", "layers run"]
    return markdown(header, "llrrrrrrl", rows)


def model_machine(name: str) -> str:
    run = result(name)
    active = ", ".join(f"{value:.0f}" for value in run["non_zeros"])
    return f"Non-zeros a token, layer by layer: {active}. {run['machine']}"


def sparser_speedup() -> str:
    forward, train = (
        next(
            row["speedup"]
            for row in result("h200_model_sparser")["rows"]
            if (row["op"], row["variant"]) == (op, "sparse compiled")
        )
        for op in ("forward", "train")
    )
    return (
        f"With L1 of 3e-4 all layers run sparse: the decoder's forward pass is {forward:.2f} times, the training step "
        f"{train:.2f} times as fast as dense ([docs/when-it-pays.md](docs/when-it-pays.md))."
    )


def training_run() -> str:
    runs = result("h200_training_run")["runs"]
    sparse = [name for name in runs if name.startswith("sparse")]
    columns = {
        "cross-entropy": (list(runs), lambda row: f"{row['ce']:.3f}"),
        "held out": (list(runs), lambda row: f"{row['held_out_ce']:.3f}"),
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
    return markdown(header, "r" * len(header), rows)


TABLES: dict[str, Callable[[], str]] = {
    "forward": forward,
    "mean speed-up": mean_speedup,
    "training": training,
    "decode": decode,
    "machine": machine,
    "shapes": shapes,
    "model": lambda: model("h200_model"),
    "model machine": lambda: model_machine("h200_model"),
    "sparser model": lambda: model("h200_model_sparser"),
    "sparser model machine": lambda: model_machine("h200_model_sparser"),
    "sparser speed-up": sparser_speedup,
    "training run": training_run,
    "quality": lambda: _quality.table(result("h200_quality")),
    "quality layers": lambda: _quality.layers(result("h200_quality")),
    "quality notes": lambda: _quality.notes(result("h200_quality")),
}
PLACE = re.compile(r"(<!-- table: ([^\n]*?) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """The README with every table made anew."""

    def table(match: re.Match[str]) -> str:
        before, name, after = match.groups()
        if name not in TABLES:
            raise LookupError(f"table must be one of {', '.join(TABLES)}, got {name!r}")
        return f"{before}{TABLES[name]()}{after}"

    return PLACE.sub(table, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if README.md has other figures")
    arguments = parser.parse_args()
    path = ROOT / "README.md"
    text = path.read_text()
    filled = fill(text)
    if arguments.check:
        if filled != text:
            print("README.md and profiling/results/ differ: python profiling/readme.py", file=sys.stderr)
        return int(filled != text)
    path.write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
