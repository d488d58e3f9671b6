"""The part of ``twell analyze`` about stacked experts: tables, verdict and rows of the CSV."""

from collections.abc import Iterator, Sequence
from typing import Any

from twell._activation import NAMES_OF_FAMILY
from twell.choose.rates import EXPERTS_GPU, EXPERTS_MEASURED
from twell.commands.experts import STEPS, ExpertsSparsity, speedups
from twell.commands.prediction import FAR, PAYS, TOO_FAR, distance
from twell.commands.request import aligned, as_percent, counted, listed

COLUMNS = {
    "experts": "experts of the layer",
    "top": "experts of a token",
    "zeros": "share of zeros after the activation, of all tokens and their experts",
    "zeros_least": "the least share of zeros of an expert with tokens",
    "zeros_mean": "mean share of zeros of the experts with tokens",
    "zeros_most": "the most of an expert with tokens",
    "used": "experts with tokens",
    "busiest": "tokens of the busiest expert, as a multiple of an even share",
    "effective": "experts that, with even shares, would have the entropy of the routes",
    "touched_S": "experts that a step of decoding S sequences touches: one token of each, at one position",
    "fired_S": "mean share of n that such a step fires in a touched expert",
    "speedup_S": 'predicted speed of such a step by "auto" over grouped products of PyTorch',
}


def header(reports: Sequence[ExpertsSparsity]) -> Iterator[str]:
    """Lines about kinds and sizes, for one layer or more."""
    kinds: dict[str, list[int]] = {}
    for each in reports:
        what = (
            f"{each.experts:,} {'gated' if each.gated else 'non-gated'} {NAMES_OF_FAMILY[each.activation.name]} "
            f"experts, {each.top} per token, K = {each.k:,}, N = {each.n:,}"
        )
        kinds.setdefault(what, []).append(each.number)
    for what, numbers in kinds.items():
        these = f" ({', '.join(map(str, numbers))})" if len(kinds) > 1 else ""
        yield f"{counted(len(numbers), 'layer')}{these} of experts: {what}"


def tables(reports: Sequence[ExpertsSparsity]) -> Iterator[str]:
    """The figures of layers of experts, one or more."""
    yield "Experts: values after the activation, and routes"
    yield from aligned([figures_header(), *map(figures_cells, reports)])
    yield "zeros: share over all tokens and their experts. least, mean, most: share of an expert with tokens. used:"
    yield "  experts with tokens. busiest: its tokens, as a multiple of an even share. effective: experts"
    yield "  that, with even shares, would have the entropy of the routes."
    yield ""
    yield "A step of decoding: experts touched, and the share of a touched expert's neurons that its tokens fire"
    lines = [["layer", "sequences 1", *map(str, STEPS[1:])]]
    for each in reports:
        found = [each.steps.get(size) for size in STEPS]
        cells = ["-" if step is None else f"{step.touched:,.1f}: {as_percent(step.union)}" for step in found]
        lines.append([str(each.number), *cells])
    yield from aligned(lines)
    yield "A step has one token of each sequence, all at one position."
    known = speedups(reports)
    if missing := [str(size) for size in STEPS if size not in known]:
        yield f"The text has too few sequences for steps of {listed(missing, 'and')}; --sequence makes them shorter."
    yield ""
    yield 'Experts: predicted speed of a step by "auto", grouped products of PyTorch are 1'
    lines = [["layer", *(counted(size, "sequence") for size in known)]]
    for each in reports:
        speeds = [each.seconds(size) for size in known]
        lines.append([str(each.number), *(f"{seconds['dense'] / seconds['auto']:.2f}x" for seconds in speeds)])
    yield from aligned(lines)
    for each in reports:
        if each.refusal:
            yield f"  layer {each.number} stays dense: {each.refusal}"


def figures_header() -> list[str]:
    """The header of ``figures_cells``."""
    return ["layer", "zeros", "least", "mean", "most", "used", "busiest", "effective"]


def figures_cells(report: ExpertsSparsity) -> list[str]:
    """One line of the table: a layer's figures."""
    return [
        *(str(report.number), *map(as_percent, (report.zeros, *report.zeros_of_experts))),
        *(f"{report.used:,} of {report.experts:,}", f"{report.busiest:.2f}x", f"{report.effective:,.1f}"),
    ]


def verdict(reports: Sequence[ExpertsSparsity], tokens: int) -> str:
    """Whether experts by "auto" pay in decoding, on which GPU and for how many sequences. ``tokens``: of the text."""
    farthest = max(reports, key=lambda each: distance((each.k, each.n), EXPERTS_MEASURED))
    factor = distance((farthest.k, farthest.n), EXPERTS_MEASURED)
    k, n = EXPERTS_MEASURED
    if factor > TOO_FAR:
        return (
            f"Verdict on experts: none, as experts with K = {farthest.k:,}, N = {farthest.n:,} are too far from the "
            f"measured ones with K = {k:,}, N = {n:,}"
        )
    speeds = speedups(reports)
    paying = [f"{size} ({speed:.2f}x as fast)" for size, speed in speeds.items() if speed >= PAYS]
    others = [str(size) for size, speed in speeds.items() if speed < PAYS]
    zeros = sum(report.zeros for report in reports) / len(reports)
    doubt = f"by measured experts that are far from this model's, K = {k:,}, N = {n:,}, " if factor > FAR else ""
    source = (
        f"sequences; predicted for a step in a CUDA graph, with down weights by rows, against grouped products of "
        f"PyTorch; from {as_percent(zeros)} zeros on {tokens:,} tokens"
    )
    start = f"Verdict on experts: {doubt}twell"
    if not paying:
        return f"{start} should not pay on {EXPERTS_GPU} in decoding {listed(others, 'or')} {source}"
    rest = f", not {listed(others, 'or')}" if others else ""
    return f"{start} should pay on {EXPERTS_GPU} in decoding {listed(paying, 'and')}{rest} {source}"


def rows(reports: Sequence[ExpertsSparsity]) -> list[dict[str, Any]]:
    """One row per layer, with the columns of ``COLUMNS`` and those that layers without experts have, too."""
    found = []
    for each in reports:
        row: dict[str, Any] = {
            "layer": each.number,
            "kind": f"{'gated' if each.gated else 'non-gated'} experts",
            "activation": each.activation.name,
            "threshold": each.activation.threshold,
            **{name: getattr(each, name) for name in ("name", "k", "n", "tokens", "mean")},
            **{name: getattr(each, name) for name in COLUMNS if hasattr(each, name)},
            **dict(zip(("zeros_least", "zeros_mean", "zeros_most"), each.zeros_of_experts)),
        }
        for size in STEPS:
            step = each.steps.get(size)
            seconds = each.seconds(size) if step else None
            row[f"touched_{size}"] = step and step.touched
            row[f"fired_{size}"] = step and step.union
            row[f"speedup_{size}"] = seconds and seconds["dense"] / seconds["auto"]
        found.append(row)
    return found
