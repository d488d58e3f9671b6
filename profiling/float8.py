"""What the results of ``profiling.bench float8`` say: tables of docs/float8.md, and how good the choices of "auto" are.

    python -m profiling.float8 profiling/results/float8*.json     # needs no GPU

prints what the choices lose to the fastest measured strategy and how far predicted times are off, with the constants of
``costs.FLOAT8`` and with others that are fitted to these rows, which take their place there by hand.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiling.draw.common import loads, machine, markdown
from twell.strategy import costs
from twell.strategy.costs import FLOAT8, Float8Rates

STRATEGIES = ("row", "union", "dense")
DENSE, BF16 = "dense fp8", "bfloat16"
Row = dict[str, Any]
# the variants of one layer and number of tokens, by name
Case = dict[str, Row]


def cases(rows: Iterable[Row]) -> list[Case]:
    """The timed rows by layer and tokens."""
    found: dict[tuple[Any, ...], Case] = {}
    for row in rows:
        if row["us"] and not row["red"]:
            found.setdefault((row["workload"], row["k"], row["n"], row["m"]), {})[row["variant"]] = row
    return list(found.values())


def fastest(case: Case, prefix: str, field: str = "us") -> Row:
    """The fastest of the variants whose names begin so."""
    return min((row for name, row in case.items() if name.startswith(prefix)), key=lambda row: row[field])


# The choices of "auto"


class Point(NamedTuple):
    """A layer with its measured seconds by strategy."""

    problem: costs.Problem
    figures: costs.Figures
    seconds: dict[str, float]

    def predicted(self, rates: Float8Rates) -> dict[str, float]:
        return costs.float8_seconds(self.problem, self.figures, rates)

    def loss(self, rates: Float8Rates) -> float:
        """What the choice of a graph by these rates loses to the fastest."""
        predicted = self.predicted(rates)
        chosen = min(self.seconds, key=lambda name: predicted[name])
        return self.seconds[chosen] / min(self.seconds.values()) - 1


def points(rows: Iterable[Row]) -> list[Point]:
    """The layers for which all strategies were measured."""
    found = []
    for case in cases(rows):
        seconds = {name: case[f'"{name}"']["us"] / 1e6 for name in STRATEGIES if f'"{name}"' in case}
        if len(seconds) == len(STRATEGIES):
            row = case['"row"']
            problem = costs.Problem(row["m"], row["k"], row["n"], True, False, float8=True)
            found.append(Point(problem, costs.Figures(row["nonzeros"], row["union"], row["heaviest"]), seconds))
    return found


def misfit(found: Sequence[Point], rates: Float8Rates) -> float:
    """The mean square of the logarithms of predicted over measured times."""
    each = [math.log(point.predicted(rates)[name] / point.seconds[name]) ** 2 for point in found for name in STRATEGIES]
    return statistics.fmean(each)


def fitted(found: Sequence[Point], rates: Float8Rates = FLOAT8) -> Float8Rates:
    """The rates of the least misfit: one after the other goes up and down, in ever smaller steps."""
    least, step = misfit(found, rates), 1.5
    while step > 1.002:
        before = least
        for name in Float8Rates._fields:
            for factor in (step, 1 / step):
                tried = rates._replace(**{name: getattr(rates, name) * factor})
                if (now := misfit(found, tried)) < least:
                    rates, least = tried, now
        if least > 0.999 * before:
            step = math.sqrt(step)
    return rates


def quality(found: Sequence[Point], rates: Float8Rates) -> str:
    """What choices lose and how far times are off, in one line."""
    losses = [point.loss(rates) for point in found]
    off = []
    for name in STRATEGIES:
        ratios = [point.predicted(rates)[name] / point.seconds[name] for point in found]
        off.append(f"{name} {min(ratios):.2f} to {max(ratios):.2f}")
    return (
        f"over {len(found)} layers choices lose {statistics.fmean(losses):.2%} in the mean and {max(losses):.1%} at "
        f"most; predicted times over measured ones: {', '.join(off)}"
    )


# Tables


def speed(found: Mapping[str, Any], tokens: Sequence[int] = ()) -> str:
    """Layers beside dense fp8 and beside the fastest strategy in 16 bits; ``tokens``: which rows, all if none."""
    rows = []
    for case in cases(found["rows"]):
        auto = case['"auto"']
        if tokens and auto["m"] not in tokens:
            continue
        dense, wide = fastest(case, DENSE), fastest(case, f'{BF16} "')
        cells = [f"`{auto['workload']}`", f"{auto['m']:,}", f"{auto['nonzeros']:.0f}", f"{dense['us']:.0f}"]
        cells += [f"{wide['us']:.0f}", f"**{auto['us']:.0f}** {auto['strategy']}"]
        rows.append([*cells, *(f"**{other['us'] / auto['us']:.2f}**" for other in (dense, wide))])
    header = ["workload", "tokens", "non-zeros", "dense fp8, us", "bf16 twell", '"auto"']
    return markdown([*header, "over dense fp8", "over bf16 twell"], "l" + "r" * 7, rows)


def accuracy(found: Mapping[str, Any]) -> str:
    """Errors beside float64 of the weights before they were quantised, and beside the formula; the range of layers."""
    each = cases(found["rows"])
    names = {"bfloat16 dense": "bf16 dense", 'bfloat16 "row"': 'bf16 "row"', f"{DENSE}, two products": "dense fp8"}
    names |= {'"row"': 'e4m3 "row"', '"union"': 'e4m3 "union"'}
    rows = []
    for name, said in names.items():
        own = [case[name] for case in each if name in case]
        errors = ([row[kind] for row in own if row[kind] is not None] for kind in ("original", "error"))
        rows.append([said, *(f"{min(of):.4f} to {max(of):.4f}" if of else "" for of in errors)])
    return markdown(["", "from the layer in float64", "from the formula"], "lrr", rows)


def experts(found: Mapping[str, Any]) -> str:
    """Layers of experts in 16 bits and in e4m3."""
    of_sequences: dict[int, dict[str, Any]] = {}
    for row in found["rows"]:
        if row["sequences"] not in (32, 128):
            of_sequences.setdefault(row["sequences"], {})[row["variant"]] = row["us"]
    names = "grouped products", '"row"', 'e4m3 "auto"'
    rows = []
    for sequences, times in of_sequences.items():
        gains = [f"**{times[name] / times[names[-1]]:.2f}**" for name in names[:2]]
        rows.append([f"{sequences:,}", *(f"{times[name]:.0f}" for name in names), *gains])
    header = ["sequences", "bf16 grouped products, us", 'bf16 "row"', names[-1], "over grouped", 'over bf16 "row"']
    return markdown(header, "r" * len(header), rows)


def losses(found: Mapping[str, Any]) -> str:
    """What e4m3 adds to the loss of a trained model."""
    parts = [
        f'{row["change"]:+.5f} ± {row["deviation"]:.5f} by "{row["strategy"]}"'
        for row in found["rows"]
        if row["layers"] == "e4m3"
    ]
    return ", ".join(parts)


def section(results: Mapping[str, Mapping[str, Any] | None]) -> Iterator[str]:
    """The section of docs/float8.md on figures, of the files of results that exist, by the ends of their names."""
    many, large, small, mixture, loss = (results.get(name) for name in ("", "_large", "_few", "_experts", "_loss"))
    if many or large or loss:
        yield "## What to expect"
    if many:
        size = f"K = {many['rows'][0]['k']:,}, N = {many['rows'][0]['n']:,}"
        yield (
            f"{size}: microseconds of a call in CUDA graphs, x quantised within. Dense fp8 is the fastest form of "
            "`torch._scaled_mm` with passes that quantise, bf16 twell the fastest strategy in 16 bits:"
        )
        yield speed(many)
    if large:
        size = f"K = {large['rows'][0]['k']:,}, N = {large['rows'][0]['n']:,}"
        yield f"Few tokens, {size}, with weights that are not in L2:"
        yield speed(large, tokens=(1, 64, 256))
    if mixture:
        yield (
            "Decoding by a layer of 128 experts, 6 for each token, of Nemotron 3 Nano's sizes (K = 2,688, N = 1,856), "
            "where 9.3 % of the neurons fire. Routes and zeros are drawn. Grouped products are PyTorch's:"
        )
        yield experts(mixture)
    if many:
        yield (
            "Relative errors over 1,024 tokens, the least and the most of the layers of the first table; the layer in "
            "float64 has the weights before they were quantised:"
        )
        yield accuracy(many)
    if loss:
        shape = loss["model"]
        yield (
            f"A model of `twell demo` ({shape['layers']} layers of {shape['hidden']:,} to {shape['intermediate']:,}, "
            f"trained for {loss['trained']['seconds']:.0f} s) on {loss['held_bytes']:,} bytes of held-back text: e4m3 "
            f"changes dense bfloat16's loss of {loss['rows'][0]['loss']:.4f} nats per byte by {losses(loss)} "
            "(± standard errors over windows of text)."
        )
    if rows := [row for file in (many, large, small) if file for row in file["rows"]]:
        said, _, _ = quality(points(rows), FLOAT8).partition(";")
        yield f'"auto" decides by `costs.float8_seconds`: {said}.'
    if machines := dict.fromkeys(machine(dict(file)) for file in (many, large, mixture, loss) if file):
        yield ". And ".join(machines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    rows = [row for path in arguments.files for row in loads(path.read_text())["rows"] if "us" in row]
    found = points(rows)
    if not found:
        parser.error("expected rows of all strategies, got none")
    print(f"now: {quality(found, FLOAT8)}")
    best = fitted(found)
    print(f"fitted: {quality(found, best)}")
    print(f"FLOAT8 = Float8Rates({', '.join(f'{name}={value:.3g}' for name, value in best._asdict().items())})")
    for point in sorted(found, key=lambda point: -point.loss(best))[:10]:
        times = ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in point.seconds.items())
        m, k, n = point.problem[:3]
        print(f"{point.loss(best):6.1%}  {k} x {n}, M = {m}, {point.figures.nonzeros:.0f} non-zeros: {times} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
