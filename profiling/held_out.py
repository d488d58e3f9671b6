"""Measure what the choices of "auto" lose to the best route, at points that its rates were not fitted to.

    python -m profiling.held_out --out build/held_out.json

A point is a layer of other sizes than those of ``twell tune``, with a number of tokens, a pattern and non-zeros of its
own. The points are those of profiling/results/held_out.json: 100 drawn by one seed ("old"), 20 of them training steps,
and 60 by another ("new"): pairs of which 5 to 15 % fire, gated layers on 33 to 512 tokens and training steps. Routes
are timed as ``twell tune`` does; "auto" decides by the figures of the layer. The loss is the time of its choice over
that of the fastest route, minus one. Times and choices are of CUDA graphs; those of ``GRAPHS`` tokens have a line of
their own, beside the loss of graphs that are captured before any figure. ``profiling.bench host`` times eager calls.

Points go to --out after each one; --budget-s ends a run between points.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from profiling.everything import RESULTS
from profiling.harness import show, write_json
from profiling.tune import read
from twell import testing
from twell.choose import cards, rates
from twell.choose.cards import Card
from twell.commands import fitting, timing, tune
from twell.commands.fitting import Row
from twell.commands.request import exit_status
from twell.testing import Workload

# Tokens of the graphs that engines capture for batches that decode.
GRAPHS = range(16, 513)
# one pass over the weights computes as many
FEW = 32
SHOWN = (*fitting.SIZES, "nonzeros", "heaviest", "union", "candidates", "loss", "auto", "costs", "dense_ms")


def points() -> list[Row]:
    """The rows of the published points, each with the seed of its layer."""
    seeds = {"old": itertools.count(), "new": itertools.count(1000)}
    return [row | {"seed": next(seeds[row["points"]])} for row in read(RESULTS / "held_out.json")["rows"]]


def measure(point: Row, device: timing.Device, card: Card, seconds: float) -> Row:
    problem, workload = fitting.problem_of(point), Workload(**point["pattern"])
    m, k, n, *_ = problem
    drawn = testing.make(workload, max(m, 4096), k, n, seed=point["seed"], device=device.torch_device).rows(0, m)
    layer = tune.Layer(drawn, problem, device)
    figures = layer.figures(rates.SCREENED in tune.sparse_routes(problem, card))
    return {"points": point["points"], **tune.row_of(layer, figures, point["pattern"], card, seconds)}


def decided(row: Row, card: Card) -> Row:
    """The row with the choice, its loss and predicted times over dense's; of ``GRAPHS`` also without figures."""
    ms, problem = fitting.ms_of(row), fitting.problem_of(row)
    right = {} if row["red"] else {route: time / min(ms.values()) - 1 for route, time in ms.items()}
    if not row["training"] and row["m"] in GRAPHS:
        graph = rates.decide(problem, None, None, card).strategy
        row = row | {"graph": graph, "graph_loss": right.get(graph)}
    decision = rates.decide(problem, fitting.figures_in(row), None, card)
    costs = {route: float(f"{cost:.4g}") for route, cost in decision.costs.items()}
    return row | {"auto": decision.strategy, "costs": costs, "loss": right.get(decision.strategy)}


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Mean and maximum of the losses by kind of call."""
    known = [row for row in rows if row["loss"] is not None]
    kinds = {
        f"forward above {FEW} tokens": [row["loss"] for row in known if not row["training"] and row["m"] > FEW],
        f"forward up to {FEW} tokens": [row["loss"] for row in known if not row["training"] and row["m"] <= FEW],
        "training": [row["loss"] for row in known if row["training"]],
        # a choice that was not measured has no loss
        "graphs without figures": [row["graph_loss"] for row in known if row.get("graph_loss") is not None],
    }
    for name, losses in kinds.items():
        if losses:
            yield f"{name}: {len(losses)} points, mean {statistics.mean(losses):.2%}, most {max(losses):.1%}"


def run(arguments: argparse.Namespace) -> int:
    device = tune.gpu(None)
    card = cards.in_use(device.torch_device)
    started, rows, chosen = time.monotonic(), list[Row](), points()
    about = {"machine": testing.machine_line(device.torch_device), "date": tune.now(), "rates": card.machine}
    for point in chosen:
        if time.monotonic() - started > arguments.budget_s:
            print(f"out of time: {len(rows)} of {len(chosen)} points")
            break
        rows.append(decided(measure(point, device, card, arguments.seconds), card))
        print(f"{len(rows)} of {len(chosen)}", flush=True)
        if arguments.out is not None:
            write_json(arguments.out, rows, **about, complete=len(rows) == len(chosen))
    # red ones, then those that lose most
    show(sorted(rows, key=lambda row: (not row["red"], -(row["loss"] or 0)))[:10], SHOWN)
    print(*summary(rows), sep="\n")
    return 1 if any(row["red"] for row in rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="write the points as JSON")
    add("--seconds", type=float, default=0.05, help="GPU time for the samples of one point (default: %(default)s)")
    add("--budget-s", type=float, default=240.0, help="start no point after this many seconds (default: %(default)s)")
    arguments = parser.parse_args(argv)
    return exit_status("held_out", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
