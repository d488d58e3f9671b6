"""Measure routes and fit the rates that ship: ``twell tune``, which keeps its rows.

    python -m profiling.tune --out profiling/results/tuning.json --write
    python -m profiling.tune --from part.json other.json --write

The first command needs a GPU, the second fits to rows of earlier runs, of which the last one for a problem counts.
Rows go to --out after each step, those of earlier runs at the end. --portable measures the other family on a Hopper
GPU. --write puts the card of that GPU into ``cards.json``.
"""

import argparse
import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiling.bench.portable import kernels_of
from profiling.harness import write_json
from twell.base import files
from twell.choose import cards
from twell.choose.cards import Card
from twell.commands import fitting, tune
from twell.commands.request import exit_status
from twell.runtime import specs


def read(path: Path) -> dict[str, Any]:
    """The file of an earlier run; ValueError if it is another file."""
    try:
        run: dict[str, Any] = json.loads(path.read_text())
        run["machine"], run["date"], fitting.usable(run["rows"])
    except cards.UNUSABLE as error:
        raise ValueError(f"expected what --out wrote in {path}, got {type(error).__name__}: {error}") from error
    return run


def card_of(runs: Sequence[dict[str, Any]]) -> Card:
    """Rates fitted to runs on GPUs of one model, from those that ship; machine and date of the last run."""
    machine, family = runs[-1]["machine"], runs[-1].get("family", cards.SHIPPED.family)
    kernels, sms = (re.search(pattern, machine) for pattern in (r"kernels (\w+)", r"\((\d+) SMs"))
    if kernels is None or sms is None:
        raise ValueError(f"a machine line must have kernels and multiprocessors, got {machine}")
    about = {"machine": machine, "date": runs[-1]["date"], "kernels": kernels[1], "note": ""}
    card = dataclasses.replace(cards.shipped(machine.split(" (")[0], family, int(sms[1])), **about)
    if models := {run["machine"].split(" (")[0] for run in runs} - {card.gpu}:
        raise ValueError(f"rates are of one GPU, got rows of {card.gpu} and {', '.join(sorted(models))}")
    if any(not run.get("complete", True) for run in runs):
        raise ValueError("rates are of whole runs, got one that is not complete")
    rows = fitting.usable(row for run in runs for row in run["rows"])
    card = fitting.fitted(rows, card)
    print(fitting.report(rows, card), card.machine, sep="\n")
    return card


def ship(card: Card, path: Path = cards.PATH) -> Path:
    """Put a card in the place of the one of its GPU and family, or last."""
    ships = [cards.card_of(each) for each in json.loads(path.read_text())]
    own = [i for i, each in enumerate(ships) if (each.gpu, each.family) == (card.gpu, card.family)]
    at = own[0] if own else len(ships)
    ships[at : at + 1] = [card]
    files.write_text(path, json.dumps([cards.as_json(each) for each in ships], indent=1) + "\n")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tune.add_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    add("--from", dest="sources", nargs="+", type=Path, metavar="FILE", help="measure nothing, use these files")
    add("--write", action="store_true", help="write cards.json")
    add("--portable", action="store_true", help="measure the kernels of the portable family")
    arguments = parser.parse_args(argv)

    def keep(rows: list[fitting.Row], card: Card, complete: bool) -> None:
        about = {name: getattr(card, name) for name in ("machine", "date", "family")}
        if arguments.out is not None:
            write_json(arguments.out, rows, **about, complete=complete)

    def run() -> int:
        write = ship if arguments.write else None
        if not arguments.sources:
            with kernels_of(specs.PORTABLE) if arguments.portable else contextlib.nullcontext():
                return tune.tune(arguments, tune.gpu(arguments.device), keep, write)
        runs = [read(path) for path in arguments.sources]
        card = card_of(runs)
        last = {(fitting.problem_of(row), row["pattern"]): row for run in runs for row in run["rows"]}
        keep(list(last.values()), card, True)
        if write is not None:
            print(f"wrote {write(card)}")
        return 0

    return exit_status("tune", run)


if __name__ == "__main__":
    sys.exit(main())
