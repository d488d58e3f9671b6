"""Measure the cost of each strategy against dense, and generate the table of "auto" that ships.

    python -m profiling.tune --out profiling/results/tuning.json --write
    python -m profiling.tune --out part.json --shapes 2048x5632 --kinds gated --budget-s 60
    python -m profiling.tune --from part.json other.json --write

The first two commands need a Hopper GPU, the last does not. ``twell.commands.tune`` measures and fits, as it does for a
user's GPU. Rows go to --out after each step, so an interrupted run loses little; --budget-s ends a run between steps.
Several files are merged; the last row for a problem counts.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiling.draw.common import loads
from twell import _files, testing
from twell.choose import rates
from twell.commands import tune
from twell.commands.request import RequestError

# Beside the layers of the table: pairs of the share that published models fire, and small training steps.
MORE = [
    *(
        tune.Step(k, n, "non-gated", m, ("tenth", "wide", "dense"))
        for k, n in ((768, 3072), (2048, 8192), (4096, 16384))
        for m in (33, 64, 128, 256, 512, 1024, 4096)
    ),
    *(tune.Step(k, n, "training", m, ("topic", "uniform", "heavy")) for k, n in tune.SHAPES[:2] for m in (48, 128)),
]


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all steps and return the data, which is also written to --out after each step."""
    device = tune.gpu(None)
    data: dict[str, Any] = {
        "machine": testing.machine_line(device.torch_device),
        "date": tune.now(),
        "arguments": {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)},
        "complete": False,
        "rows": [],
    }
    chosen = arguments.shapes, arguments.kinds, arguments.m, arguments.patterns
    steps = tune.plan(*chosen, rates.in_use(device.torch_device))
    if arguments.shapes is arguments.m is None and arguments.kinds == list(tune.KINDS):
        steps += MORE
    found, options = 0, {"budget_s": arguments.budget_s, "seconds": arguments.seconds}
    for rows in tune.measure(steps, device, **options):
        found += 1
        data["rows"] += rows
        data["complete"] = found == len(steps)
        write_json(data, arguments.out)
    return data


def write_json(data: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _files.write_text(path, json.dumps(data, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read the file of an earlier run; ValueError if it is another file."""
    try:
        run = loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"expected what --out wrote in {path}, got {error}") from error
    needed = {*tune.SIZES, "nonzeros", "union", "pattern", "strategy", "relative", "red"}
    rows = run.get("rows") if isinstance(run, dict) else None
    if not isinstance(rows, list) or not {"machine", "date"} <= run.keys():
        raise ValueError(f"expected what --out wrote in {path}, got other JSON")
    for row in rows:
        if missing := needed - row.keys() - ({"relative"} if row.get("red") else set()):
            raise ValueError(f"expected what --out wrote in {path}, got a row without {', '.join(sorted(missing))}")
    return run


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """Merge runs on GPUs of one model: all rows, machine and date of the last run."""
    runs = [read(path) for path in paths]
    models = {tables.gpu_of(run["machine"]) for run in runs}
    if len(models) > 1:
        raise ValueError(f"a table is for one GPU, got measurements of {', '.join(sorted(models))}")
    return {**runs[-1], "rows": [row for run in runs for row in run["rows"]]}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", nargs="+", type=tune.shape, metavar="KxN", help="default: the layers of twell.commands.tune")
    add("--m", nargs="+", type=int, metavar="TOKENS", help="any numbers of tokens (default: by kind)")
    add("--kinds", nargs="+", choices=tune.KINDS, default=list(tune.KINDS))
    add("--patterns", nargs="+", choices=tune.PATTERNS, help="default: all but one")
    add("--seconds", type=float, default=0.05, help="GPU time for the samples of one problem (default: %(default)s)")
    add("--budget-s", type=float, default=450.0, help="start no step after this many seconds (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    add("--from", dest="sources", nargs="+", type=Path, metavar="FILE", help="measure nothing, use these files")
    add("--write", action="store_true", help="generate the table")
    add("--table", type=Path, default=tables.PATH, metavar="FILE", help="its file (default: that of the checkout)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        data = measure_all(arguments) if arguments.sources is None else merged(arguments.sources)
        table = tune.fit(data["rows"])
    except (RequestError, ValueError) as error:
        print(f"tune: error: {error}", file=sys.stderr)
        return 2
    print(tune.report(table, data["rows"]))
    print(data["machine"])
    if arguments.write:
        if not table:
            print("tune: no rows to make a table of", file=sys.stderr)
            return 1
        _files.write_text(arguments.table, tables.text_of(tables.Table(table, data["machine"], data["date"][:10])))
    return 1 if any(row["red"] for row in data["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
