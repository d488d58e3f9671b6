"""Combine runs of examples/train.py into one file, for the table and the chart of the training run.

    python -m profiling.training_run dense=runs/dense sparse=runs/sparse --out profiling/results/training_run.json

Each run is a folder with metrics.jsonl and sparsity.csv. All runs must have the same kind of machine, model and text,
and log the same steps. The file keeps the options of the first run and the differences of the others.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiling.draw.common import lasting

# Options that name places of one machine, and options that must be equal.
PLACES = ("text", "dataset", "cache", "out", "resume", "implied")
COMMON = ("text", "dataset", "layers", "hidden", "intermediate", "vocab", "seed", "steps", "tokens_per_step")
LAYER = ("l0", "l1", "dead", "union")


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """A run's options and machine, its steps with all figures, and its layers at the end."""
    about, *records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        # a resumed run repeats its first record
        if "machine" in record:
            continue
        steps.setdefault(record["step"], {}).update(record)
    with (folder / "sparsity.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    layers = [
        # an empty cell was not observed
        {name: float(row[name]) if row[name] else None for name in LAYER} | {"strategy": row["strategy"]}
        for row in rows
        if row["step"] == rows[-1]["step"]
    ]
    return about, [steps[step] for step in sorted(steps)], layers


def combine(runs: dict[str, Path]) -> dict[str, Any]:
    """The content of the file; ValueError if the runs cannot be compared."""
    found = {name: read(folder) for name, folder in runs.items()}
    options = {name: about["options"] for name, (about, _, _) in found.items()}
    first = next(iter(options.values()))
    machines = {lasting(about["machine"]): about["machine"] for about, _, _ in found.values()}
    if len(machines) > 1:
        raise ValueError(f"expected runs of one kind of machine, got {' and '.join(machines)}")
    for key in COMMON:
        if len(values := {str(each.get(key)) for each in options.values()}) > 1:
            raise ValueError(f"expected runs of one --{key.replace('_', '-')}, got {', '.join(sorted(values))}")
    if len({tuple(step["step"] for step in steps) for _, steps, _ in found.values()}) > 1:
        raise ValueError("expected runs that logged the same steps")
    return {
        "machine": next(iter(machines.values())),
        "options": {key: value for key, value in first.items() if key not in PLACES},
        "differences": {
            name: {key: value for key, value in each.items() if value != first.get(key) and key not in PLACES}
            for name, each in options.items()
        },
        "runs": {name: steps for name, (_, steps, _) in found.items()},
        "layers": {name: layers for name, (_, _, layers) in found.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER", help="a run and its name")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args(argv)
    pairs = [text.partition("=") for text in arguments.runs]
    if wrong := [text for text, pair in zip(arguments.runs, pairs) if not all(pair)]:
        parser.error(f"expected NAME=FOLDER, got {', '.join(wrong)}")
    try:
        content = combine({name: Path(folder) for name, _, folder in pairs})
    except (OSError, ValueError) as error:
        parser.error(str(error))
    from twell import _files

    _files.write_text(arguments.out, json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
