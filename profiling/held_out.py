"""Measure what the choices of "auto" lose to the best strategy, at points that its table was not fitted to.

    python -m profiling.held_out --out build/held_out.json
    python -m profiling.held_out --rows build/held_out.json --tuning build/tune.json        # needs no GPU

A point is a layer of other sizes than those of the table, with a number of tokens, a pattern and non-zeros of its own:
100 points by a fixed seed, 20 of them training steps. Each strategy is timed as ``twell tune`` does, and "auto" decides
by the measured figures of the layer, as ``twell.AutoStrategy`` does. The loss is the time of its choice over that of
the fastest strategy, minus one. Times and choices are of CUDA graphs; those of ``GRAPHS`` tokens have a line of their
own, beside the loss of graphs that are captured before any figure. ``profiling.host`` times eager calls.

Points go to --out after each one; --budget-s ends a run between points. --rows decides again at measured points.
"""

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiling.draw.common import loads
from profiling.tune import read, write_json
from twell import testing
from twell.choose import rates
from twell.choose.rates import Problem
from twell.commands import timing, tune
from twell.commands.request import RequestError
from twell.testing import Workload

POINTS, TRAINING_POINTS, SEED = 100, 20, 20261122
MOST_TOKENS, MOST_NONZEROS = 16384, 300

# (K, N) of models, none of them in the table; by gated or not
SHAPES = {
    True: (
        *((1024, 3072), (1280, 3456), (1152, 6912), (2048, 8192), (2048, 11008), (2304, 9216), (2560, 6912)),
        *((2560, 9728), (3072, 8192), (3200, 8640), (3584, 18944), (4096, 12288), (5120, 17408)),
    ),
    False: ((1024, 4096), (2048, 8192), (2560, 10240), (4096, 16384)),
}
GATED_SHARE = 0.85

# Tokens of the graphs that engines capture for batches that decode.
GRAPHS = range(16, 513)

# Of a point, where it has them.
MEASURED = (*tables.STRATEGIES, "dense")


class Point(NamedTuple):
    """A call, and a workload drawn with ``seed``."""

    problem: Problem
    workload: Workload
    seed: int = 0


def points(count: int = POINTS, training: int = TRAINING_POINTS, seed: int = SEED) -> list[Point]:
    """The points, training steps spread among them. They depend on the arguments alone."""
    draw = random.Random(seed)

    def between(low: float, high: float) -> float:
        return low + (high - low) * draw.random()

    found = []
    for i in range(count):
        is_training = i * training // count != (i + 1) * training // count
        gated = draw.random() < GATED_SHARE
        k, n = SHAPES[gated][int(between(0, len(SHAPES[gated])))]
        m = round(math.exp(between(0, math.log(MOST_TOKENS))))
        # half of the layers have fewer than a quarter of the most
        nonzeros = MOST_NONZEROS * draw.random() ** 2
        kind = int(between(0, 3))
        sigma, tokens, dead, rho = between(0.6, 1.3), between(0.2, 0.7), between(0, 0.6), between(0.25, 0.7)
        uneven = (sigma, tokens, dead, rho if kind == 2 else 0.0) if kind else ()
        found.append(Point(Problem(m, k, n, gated, is_training), Workload(nonzeros, *uneven), seed=i))
    return found


def measure(point: Point, device: timing.Device, seconds: float) -> dict[str, Any]:
    """The row of a point: its figures, and milliseconds and errors by strategy."""
    problem = point.problem
    m, k, n, *_ = problem
    drawn = tune.draw_workload(point.workload, m, k, n, device.torch_device, point.seed).rows(0, m)
    layer = tune.Layer(drawn, problem.gated, problem.training, device)
    strategies = tune.measured_strategies(problem, device)
    errors, red = layer.check(strategies)
    recordings = {name: layer.record(name) for name in ("dense", *errors) if name not in red}
    times = {name: timing.spread(each) for name, each in tune.times_of(recordings, seconds).items()}
    figures = tune.figures_of(drawn, rates.SCREENED in strategies)
    row = {**dict(zip(tune.SIZES, problem)), "pattern": vars(point.workload), **figures._asdict(), "red": red}
    return row | {f"{name}_ms": spread.median for name, spread in times.items()}


def decided(row: dict[str, Any], table: tables.Table) -> dict[str, Any]:
    """The row with the choice by ``table``, the predicted times over dense's, and the loss of the choice.

    Of ``GRAPHS`` also with the choice of a graph that knows no figures, and its loss beside the same strategies. A row
    that is red has no loss.
    """
    ms = {name: row[f"{name}_ms"] for name in MEASURED if f"{name}_ms" in row}
    fastest = min(ms.values(), default=math.nan)
    right = {} if row["red"] else {name: time / fastest - 1 for name, time in ms.items()}
    problem = Problem(*(row[name] for name in tune.SIZES))
    if is_graph(row):
        graph = rates.decide(problem, None, None, table).strategy
        row = row | {"graph": graph, "graph_loss": right.get(graph)}
    decision = rates.decide(problem, tune.measured_figures(row), None, table)
    loss = right.get(decision.strategy)
    return row | {"auto": decision.strategy, "costs": decision.costs, "loss": loss}


def is_graph(row: dict[str, Any]) -> bool:
    return not row["training"] and row["m"] in GRAPHS


def line(row: dict[str, Any]) -> str:
    kind = f"{'gated' if row['gated'] else 'non-gated'}{' training' if row['training'] else ''}"
    union = "-" if row["union"] is None else f"{row['union']:.3f}"
    heaviest = "-" if row.get("heaviest") is None else f"{row['heaviest']:.1f}"
    listed = "" if row.get("candidates") is None else f", candidates {row['candidates']:.3f}"
    times, dense = [], row.get("dense_ms", math.nan)
    for name in MEASURED:
        if f"{name}_ms" in row:
            measured = row[f"{name}_ms"] / dense
            guess = f" ({row['costs'][name]:.3f})" if name in row["costs"] else ""
            times.append(f"{name} {measured:.3f}{guess}")
    loss = "RED" if row["loss"] is None else f"{row['loss']:6.1%}"
    return (
        f"{loss}  {row['k']:5} x {row['n']:5} {kind:18} M = {row['m']:5} {row['nonzeros']:6.1f} nnz, heaviest "
        f"{heaviest:>5}, union {union:>5}{listed}: "
        f"{row['auto']}; {', '.join(times)}; dense {dense * 1e3:.0f} us"
    )


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Mean and maximum of the losses, of all points and by kind of call, and the ten worst points."""
    known = [row for row in rows if row["loss"] is not None]
    for name, training in (("forward", False), ("training", True)):
        losses = [row["loss"] for row in known if row["training"] == training]
        if losses:
            yield f"{name}: {len(losses)} points, mean {statistics.mean(losses):.2%}, most {max(losses):.1%}"
    if known:
        losses = [row["loss"] for row in known]
        yield f"all: {len(losses)} points, mean {statistics.mean(losses):.2%}, most {max(losses):.1%}"
    if graphs := [row for row in known if is_graph(row)]:
        named = f"graphs of {GRAPHS[0]} to {GRAPHS[-1]} tokens: {len(graphs)} points"
        for name, key in (("by figures", "loss"), ("without figures", "graph_loss")):
            losses = [row[key] for row in graphs]
            yield f"{named}, {name} mean {statistics.mean(losses):.2%}, most {max(losses):.1%}"
    yield from (line(row) for row in sorted(known, key=lambda row: -row["loss"])[:10])
    yield from (f"RED {line(row)} {row['red']}" for row in rows if row["red"])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="write the points as JSON")
    add("--tuning", nargs="+", type=Path, metavar="FILE", help="decide by a table fitted to these files of tune")
    add("--rows", type=Path, metavar="FILE", help="measure nothing, decide at the points of this file")
    add("--seconds", type=float, default=0.1, help="GPU time for the samples of one point (default: %(default)s)")
    add("--budget-s", type=float, default=240.0, help="start no point after this many seconds (default: %(default)s)")
    return parser.parse_args(argv)


def table_of(arguments: argparse.Namespace, device: timing.Device | None) -> tables.Table:
    """The table to decide by: fitted to --tuning, else the one in use on the device, else the shipped one."""
    if arguments.tuning:
        runs = [read(path) for path in arguments.tuning]
        costs = tune.fit(row for run in runs for row in run["rows"])
        return tables.Table(costs, runs[-1]["machine"], runs[-1]["date"])
    return rates.SHIPPED if device is None else rates.in_use(device.torch_device)


def measure_all(arguments: argparse.Namespace, device: timing.Device) -> dict[str, Any]:
    """Measure all points and return the data, which is also written to --out after each one."""
    started, table = time.monotonic(), table_of(arguments, device)
    data: dict[str, Any] = {
        "machine": testing.machine_line(device.torch_device),
        "date": tune.now(),
        "table": {"machine": table.machine, "date": table.date},
        "complete": False,
        "rows": [],
    }
    for point in points():
        if time.monotonic() - started > arguments.budget_s:
            print("held_out: out of time", file=sys.stderr)
            return data
        data["rows"].append(decided(measure(point, device, arguments.seconds), table))
        print(line(data["rows"][-1]), flush=True)
        write_json(data, arguments.out)
    data["complete"] = True
    write_json(data, arguments.out)
    return data


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        if arguments.rows is None:
            data = measure_all(arguments, tune.gpu(None))
        else:
            data, table = loads(arguments.rows.read_text()), table_of(arguments, None)
            data["rows"] = [decided(row, table) for row in data["rows"]]
            write_json(data, arguments.out)
    except (RequestError, OSError, ValueError) as error:
        print(f"held_out: error: {error}", file=sys.stderr)
        return 2
    print(*summary(data["rows"]), data["machine"], sep="\n")
    return 1 if any(row["red"] for row in data["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
