"""Measure what the choices of "auto" lose to the best route, at points that its rates were not fitted to.

    python -m profiling.held_out --out build/held_out.json
    python -m profiling.held_out --rows build/held_out.json --tuning build/tune.json        # needs no GPU
    python -m profiling.held_out --left-out profiling/results/tuning.json                   # nor does this

A point is a layer of other sizes than those of ``twell tune``, with a number of tokens, a pattern and non-zeros of its
own. 100 points are drawn by one seed, 20 of them training steps; 60 by another: pairs of which 5 to 15 % fire, gated
layers on 33 to 512 tokens and training steps. Routes are timed as ``twell tune`` does, and "auto" decides by the
figures of the layer. The loss is the time of its choice over that of the fastest route, minus one. Times and choices
are of CUDA graphs; those of ``GRAPHS`` tokens have a line of their own, beside the loss of graphs that are captured
before any figure. ``profiling.bench host`` times eager calls.

Points go to --out after each one; --budget-s ends a run between points. --rows decides again at measured points.
--left-out fits without each layer of a file of ``profiling.tune`` in turn, from rates of one digit, and chooses for it.
"""

import argparse
import dataclasses
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from profiling.tune import card_of, read, write_rows
from twell import testing
from twell.choose import cards, rates
from twell.choose.cards import Card, Rates
from twell.choose.rates import Problem
from twell.commands import timing, tune
from twell.commands.request import exit_status
from twell.commands.tune import Row
from twell.testing import Workload

POINTS, TRAINING_POINTS, SEED = 100, 20, 20261122
NEW_POINTS, NEW_SEED = {"pair": 20, "small": 30, "training": 10}, 20261129
MOST_TOKENS, MOST_NONZEROS = 16384, 300

# (K, N) of models, by gated or not. ``twell tune`` measures two of the pairs, and none of the gated layers.
SHAPES = {
    True: (
        *((1024, 3072), (1280, 3456), (1152, 6912), (2048, 8192), (2048, 11008), (2304, 9216), (2560, 6912)),
        *((2560, 9728), (3072, 8192), (3200, 8640), (3584, 18944), (4096, 12288), (5120, 17408)),
    ),
    False: ((1024, 4096), (2048, 8192), (2560, 10240), (4096, 16384)),
}
GATED_SHARE = 0.85
PAIRS = ((768, 2048), (1024, 4096), (1280, 5120), (1536, 6144), (2560, 10240), (3072, 12288), (4096, 14336))

# Tokens of the graphs that engines capture for batches that decode.
GRAPHS = range(16, 513)
# one pass over the weights computes as many
FEW = 32


class Point(NamedTuple):
    """A call, and a workload drawn with ``seed``."""

    problem: Problem
    workload: Workload
    seed: int = 0


def points(count: int = POINTS, training: int = TRAINING_POINTS, seed: int = SEED) -> list[Point]:
    """The points, training steps spread among them. They depend on the arguments alone."""
    draw = random.Random(seed)
    found = []
    for i in range(count):
        is_training = i * training // count != (i + 1) * training // count
        gated = draw.random() < GATED_SHARE
        k, n = SHAPES[gated][int(draw.random() * len(SHAPES[gated]))]
        m = round(math.exp(draw.random() * math.log(MOST_TOKENS)))
        # half of the layers have fewer than a quarter of the most
        nonzeros = MOST_NONZEROS * draw.random() ** 2
        found.append(Point(Problem(m, k, n, gated, is_training), _workload(draw, nonzeros), seed=i))
    return found


def new_points() -> list[Point]:
    """Points of ``NEW_POINTS`` kinds, mixed, so that a run that ends early has some of each."""
    draw = random.Random(NEW_SEED)
    kinds = [kind for kind, count in NEW_POINTS.items() for _ in range(count)]
    draw.shuffle(kinds)
    found = []
    for i, kind in enumerate(kinds):
        gated = kind != "pair"
        k, n = draw.choice(SHAPES[True] if gated else PAIRS)
        low, high = {"pair": (33, 4096), "small": (33, 512), "training": (64, 8192)}[kind]
        m = round(low * (high / low) ** draw.random())
        nonzeros = n * draw.uniform(0.05, 0.15) if kind == "pair" else MOST_NONZEROS * draw.random() ** 2
        found.append(Point(Problem(m, k, n, gated, kind == "training"), _workload(draw, nonzeros), seed=1000 + i))
    return found


def _workload(draw: random.Random, nonzeros: float) -> Workload:
    """A pattern: a third each are even, uneven and of topics."""
    kind, *drawn = [draw.random() for _ in range(5)]
    limits = (0.6, 1.3), (0.2, 0.7), (0, 0.6), (0.25, 0.7)
    sigma, tokens, dead, rho = (low + (high - low) * at for at, (low, high) in zip(drawn, limits))
    return (
        Workload(nonzeros, sigma, tokens, dead, rho if kind >= 2 / 3 else 0.0) if kind >= 1 / 3 else Workload(nonzeros)
    )


def measure(point: Point, device: timing.Device, card: Card, seconds: float) -> Row:
    """The row of a point."""
    m, k, n, *_ = point.problem
    drawn = tune.draw_workload(point.workload, m, k, n, device.torch_device, point.seed).rows(0, m)
    layer = tune.Layer(drawn, point.problem, device)
    figures = layer.figures(rates.SCREENED in tune.sparse_routes(point.problem, card))
    return tune.row_of(layer, figures, vars(point.workload), card, seconds)


def decided(row: Row, card: Card) -> Row:
    """The row with the choice by ``card``, the predicted times over dense's, and the loss of the choice.

    Of ``GRAPHS`` also with the choice of a graph that knows no figures, and its loss beside the same routes. A row that
    is red has no loss.
    """
    ms, problem = tune.ms_of(row), tune.problem_of(row)
    right = {} if row["red"] else {route: time / min(ms.values()) - 1 for route, time in ms.items()}
    if is_graph(row):
        graph = rates.decide(problem, None, None, card).strategy
        row = row | {"graph": graph, "graph_loss": right.get(graph)}
    decision = rates.decide(problem, tune.figures_in(row), None, card)
    costs = {route: float(f"{cost:.4g}") for route, cost in decision.costs.items()}
    return row | {"auto": decision.strategy, "costs": costs, "loss": right.get(decision.strategy)}


def is_graph(row: Row) -> bool:
    return not row["training"] and row["m"] in GRAPHS


def line(row: Row) -> str:
    kind = f"{'gated' if row['gated'] else 'non-gated'}{' training' if row['training'] else ''}"
    shares = (f"{row[name]:.3f}" if row[name] is not None else "-" for name in ("union", "candidates"))
    times = []
    for route, ms in tune.ms_of(row).items():
        guess = f" ({row['costs'][route]:.3f})" if route in row["costs"] else ""
        times.append(f"{route} {ms / row['dense_ms']:.3f}{guess}")
    return (
        f"{'RED' if row['loss'] is None else format(row['loss'], '6.1%')}  {row['k']:5} x {row['n']:5} {kind:18} "
        f"M = {row['m']:5} {row['nonzeros']:6.1f} nnz, heaviest {row['heaviest']:5.1f}, {'; '.join(shares)}: "
        f"{row['auto']}; {', '.join(times)}; dense {row['dense_ms'] * 1e3:.0f} us"
    )


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Mean and maximum of the losses by kind of call and set of points, and the ten worst points."""
    known = [row for row in rows if row["loss"] is not None]
    kinds = {
        f"forward above {FEW} tokens": [row for row in known if not row["training"] and row["m"] > FEW],
        f"forward up to {FEW} tokens": [row for row in known if not row["training"] and row["m"] <= FEW],
        "training": [row for row in known if row["training"]],
    }
    for name, of_kind in kinds.items():
        sets = sorted({row["points"] for row in of_kind})
        for own in [sets, *([each] for each in sets if len(sets) > 1)]:
            if losses := [row["loss"] for row in of_kind if row["points"] in own]:
                yield f"{name}, {' and '.join(own)}: {_of(losses)}"
    if graphs := [row for row in known if is_graph(row)]:
        for name, key in (("by figures", "loss"), ("without figures", "graph_loss")):
            # a choice that was not measured has no loss
            losses = [row[key] for row in graphs if row[key] is not None]
            yield f"graphs of {GRAPHS[0]} to {GRAPHS[-1]} tokens, {name}: {_of(losses)}"
    yield from (line(row) for row in sorted(known, key=lambda row: -row["loss"])[:10])
    yield from (f"{line(row)} {row['red']}" for row in rows if row["red"])


def _of(losses: Sequence[float]) -> str:
    return f"{len(losses)} points, mean {statistics.mean(losses):.2%}, most {max(losses):.1%}"


def left_out(path: Path) -> Iterator[str]:
    """Losses of choices for each layer by rates fitted to the others. One digit of the shipped rates is their start."""
    rows = tune.usable(read(path)["rows"])
    start = Rates(*(float(f"{rate:.0e}") for rate in cards.SHIPPED.rates))
    losses: dict[bool, list[float]] = {False: [], True: []}
    for layer in sorted({each.problem[1:3] for each in rows if not each.problem.float8}):
        others = [each for each in rows if each.problem[1:3] != layer]
        card = tune.fitted(others, dataclasses.replace(cards.SHIPPED, rates=start))
        for training, every in losses.items():
            own = [
                loss
                for each in rows
                if each.problem[1:3] == layer and each.problem.training == training and each.problem.m > FEW
                if not each.problem.float8 and (loss := tune.loss_of(each, card)) is not None
            ]
            every += own
            if own:
                yield f"{layer[0]:5} x {layer[1]:5} {'training' if training else 'forward'}: {_of(own)}"
    for training, every in losses.items():
        if every:
            yield f"{'training' if training else f'forward above {FEW} tokens'}, without its layer: {_of(every)}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--points", nargs="+", choices=("old", "new"), default=["new", "old"], help="which points (both)")
    add("--out", type=Path, metavar="FILE", help="write the points as JSON")
    add("--tuning", nargs="+", type=Path, metavar="FILE", help="decide by rates fitted to these files of tune")
    add("--rows", type=Path, metavar="FILE", help="measure nothing, decide at the points of this file")
    add("--left-out", type=Path, metavar="FILE", help="measure nothing, fit to this file of tune without each layer")
    add("--seconds", type=float, default=0.05, help="GPU time for the samples of one point (default: %(default)s)")
    add("--budget-s", type=float, default=240.0, help="start no point after this many seconds (default: %(default)s)")
    return parser.parse_args(argv)


def measure_all(arguments: argparse.Namespace, device: timing.Device, card: Card) -> list[Row]:
    """Measure the points and return their rows, which are also written to --out after each one."""
    started = time.monotonic()
    rows: list[Row] = []
    drawn = {"old": points, "new": new_points}
    chosen = [(name, point) for name in arguments.points for point in drawn[name]()]
    about = {"machine": testing.machine_line(device.torch_device), "date": tune.now(), "rates": card.machine}
    for name, point in chosen:
        if time.monotonic() - started > arguments.budget_s:
            print(f"out of time: {len(rows)} of {len(chosen)} points")
            break
        rows.append(decided({"points": name, **measure(point, device, card, arguments.seconds)}, card))
        print(line(rows[-1]), flush=True)
        write_rows(arguments.out, rows, **about, complete=len(rows) == len(chosen))
    return rows


def run(arguments: argparse.Namespace) -> int:
    if arguments.left_out:
        print(*left_out(arguments.left_out), sep="\n")
        return 0
    device = None if arguments.rows else tune.gpu(None)
    card = cards.SHIPPED if device is None else cards.in_use(device.torch_device)
    if arguments.tuning:
        card = card_of([read(path) for path in arguments.tuning])
    if device is None:
        data = read(arguments.rows)
        rows = [decided({"points": "old", **row}, card) for row in data.pop("rows")]
        write_rows(arguments.out, rows, **data)
    else:
        rows = measure_all(arguments, device, card)
    print(*summary(rows), sep="\n")
    return 1 if any(row["red"] for row in rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    return exit_status("held_out", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
