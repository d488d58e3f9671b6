"""Counts of a layer of stacked experts, and the time of a step of decoding."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.activation import NAMES_OF_FAMILY, Activation
from twell.base.text import aligned, as_percent
from twell.choose import tuning
from twell.choose.cards import Card
from twell.choose.plan import Facts, unpackable
from twell.choose.rates import experts_seconds
from twell.integrations.analyze.layers import WatchedExperts, patterns
from twell.runtime import geometry

# Sequences of the steps of decoding.
STEPS = (1, 8, 32, 64, 128, 256)
# Positions of the sequences whose tokens form steps.
_POSITIONS = 8


class Step(NamedTuple):
    """A step of decoding: how many experts are touched, and the mean share of their neurons that its tokens fire."""

    touched: float
    union: float


@dataclass(frozen=True)
class ExpertsSparsity:
    """The sparsity of a layer of experts. Shares are from 0 to 1.

    experts, top: how many there are, and of a token. zeros: share of the values after the activation, over all tokens
    and their experts. used: experts with tokens. steps: by number of sequences, up to those of the text.
    """

    name: str
    number: int
    gated: bool
    activation: Activation
    k: int
    n: int
    experts: int
    top: int
    tokens: int
    zeros: float
    used: int
    steps: dict[int, Step]

    @property
    def refusal(self) -> str:
        """Why "row" does not take the layer; "" if it does."""
        if self.experts > geometry.MAX_EXPERTS:
            return f'"row" takes up to {geometry.MAX_EXPERTS} experts'
        refusal = unpackable(Facts("sizes", n=self.n, k=self.k))
        return refusal.message if refusal else ""

    def seconds(self, sequences: int, card: Card | None = None) -> tuple[str, dict[str, float]]:
        """The route that a step of decoding takes, and the predicted seconds of each."""
        touched, union = self.steps[sequences]
        fired = 1 - self.zeros if self.gated else union
        by_row = not self.refusal and tuning.experts_by_row(sequences, self.top, self.experts, self.gated)
        found = experts_seconds(sequences * self.top, touched, fired, self.n, self.k, self.gated, card)
        return "row" if by_row else "dense", found

    def as_json(self, card: Card | None = None) -> dict[str, object]:
        """It in words and numbers, with a row for each step."""
        steps = {size: step._asdict() for size, step in self.steps.items()}
        rows = [dict(zip(("sequences", "route", "seconds"), (size, *self.seconds(size, card)))) for size in steps]
        return dataclasses.asdict(self) | {
            "activation": NAMES_OF_FAMILY[self.activation.name],
            "steps": steps,
            "rows": rows,
        }


def routes(given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids of experts and weights [T, k], in whatever order a model passes them."""
    ids, weights = sorted(given, key=torch.is_floating_point)
    return ids, weights


def of_experts(ids: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Each expert with tokens, and the indices of its tokens, by ``ids`` [T, k]."""
    for expert in torch.unique(ids).tolist():
        if 0 <= expert < count:
            yield expert, (ids == expert).any(1).nonzero().flatten()


class ExpertsTally:
    """Counts of a layer of experts so far, and some of its tokens, from which steps of decoding are made.

    A step has one token of each of so many sequences, at one position; the first call has some of the longest.
    """

    def __init__(self, watched: WatchedExperts) -> None:
        self.watched = watched
        device = watched.linears[0].weight.device
        self._pairs = torch.zeros(len(watched.linears), dtype=torch.int64, device=device)
        self._nonzeros = torch.zeros((), dtype=torch.int64, device=device)
        self._positions: Tensor | None = None
        self._tokens = self._top = self._sequences = 0
        # x, ids and position
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def watch(self, x: Tensor, first: Tensor, *given: Tensor) -> None:
        """Count tokens x [T, K], of which ``first``, bool [T], begin sequences; ``given``: their routes."""
        ids, _ = routes(given)
        for expert, tokens in of_experts(ids, len(self._pairs)):
            self._pairs[expert] += len(tokens)
            for _, pattern in self._patterns(expert, x[tokens]):
                self._nonzeros += pattern.sum()
        self._tokens, self._top = self._tokens + len(x), ids.shape[1]
        sequence, starts = first.cumsum(0) - 1, first.nonzero().flatten()
        place = torch.arange(len(x), device=x.device) - starts[sequence]
        if self._positions is None:
            length = int(place.max()) + 1
            places = {max(length * (i + 1) // _POSITIONS - 1, 0) for i in range(_POSITIONS)}
            self._positions = torch.tensor(sorted(places), device=x.device)
        chosen = torch.isin(place, self._positions) & (sequence + self._sequences < STEPS[-1])
        # on the CPU, as all layers keep some
        self._kept.append((x[chosen].cpu(), ids[chosen].cpu(), place[chosen].cpu()))
        self._sequences += len(starts)

    def _patterns(self, expert: int, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        weight = self.watched.linears[expert].weight
        x = x.to(weight.device)
        return patterns(self.watched.activation, lambda rows: F.linear(x[rows], weight), len(x), len(weight))

    def _steps(self) -> dict[int, Step]:
        x, ids, place = (torch.cat(parts) for parts in zip(*self._kept))
        order = place.argsort(stable=True)
        x, ids, place = x[order], ids[order], place[order]
        _, position, lengths = torch.unique_consecutive(place, return_inverse=True, return_counts=True)
        rank = torch.arange(len(place), device="cpu") - (lengths.cumsum(0) - lengths)[position]
        steps = {size: int((lengths // size).sum()) for size in STEPS}
        touched, fired = dict.fromkeys(STEPS, 0), dict.fromkeys(STEPS, 0)
        for expert, tokens in of_experts(ids, len(self._pairs)):
            pattern = torch.cat([rows.cpu() for _, rows in self._patterns(expert, x[tokens])])
            at, place_of = position[tokens], rank[tokens]
            for size in STEPS:
                # the last sequences of a position may be too few for one more step
                whole = place_of < lengths[at] // size * size
                step = at[whole] * STEPS[-1] + place_of[whole] // size
                distinct, index = step.unique(return_inverse=True)
                counts = torch.zeros(len(distinct), pattern.shape[1], dtype=torch.int32, device="cpu")
                touched[size] += len(distinct)
                fired[size] += int((counts.index_add_(0, index, pattern[whole].int()) > 0).sum())
        n = self.watched.linears[0].out_features
        return {s: Step(touched[s] / steps[s], fired[s] / max(touched[s] * n, 1)) for s in STEPS if steps[s]}

    def report(self) -> ExpertsSparsity:
        """The figures of all tokens. Raises ValueError without any."""
        at, (n, k) = self.watched, self.watched.linears[0].weight.shape
        if not self._tokens:
            raise ValueError(f"analyze: {at.name} must be called with tokens, got none")
        zeros = 1 - int(self._nonzeros) / max(int(self._pairs.sum()) * n, 1)
        counts = len(self._pairs), self._top, self._tokens, zeros, int((self._pairs > 0).sum())
        return ExpertsSparsity(at.name, at.number, at.gated, at.activation, k, n, *counts, self._steps())


def speeds(reports: Sequence[ExpertsSparsity], card: Card | None = None) -> dict[int, tuple[str, float, float]]:
    """Of steps of decoding that all layers know: routes in words, and seconds of these and of grouped products."""
    found = {}
    for size in STEPS:
        if all(size in report.steps for report in reports):
            each = [report.seconds(size, card) for report in reports]
            routes = " and ".join(dict.fromkeys(route for route, _ in each))
            found[size] = routes, sum(s[route] for route, s in each), sum(s["dense"] for _, s in each)
    return found


def tables(reports: Sequence[ExpertsSparsity], card: Card | None = None) -> Iterator[str]:
    """The figures of layers of experts, one or more, and their times."""
    for what in dict.fromkeys(map(kind, reports)):
        yield f"Experts: {what}"
    lines = [["layer", "zeros", "used", *(f"{'touched by ' * (size == 1)}{size}" for size in STEPS)]]
    for each in reports:
        touched = [each.steps.get(size) for size in STEPS]
        cells = ["-" if step is None else f"{step.touched:,.1f}: {as_percent(step.union)}" for step in touched]
        lines.append([str(each.number), as_percent(each.zeros), f"{each.used:,} of {each.experts:,}", *cells])
    yield from aligned(lines)
    yield ""
    known = speeds(reports, card)
    lines = [["decoding", "dense us", "route", "us", "ratio"]]
    for size, (routes, seconds, dense) in known.items():
        lines.append([str(size), f"{dense * 1e6:,.1f}", routes, f"{seconds * 1e6:,.1f}", f"{seconds / dense:.2f}"])
    yield from aligned(lines)
    if len(known) < len(STEPS):
        yield f"The text has too few sequences for steps of {STEPS[len(known)]} or more; shorter ones are more."
    for each in reports:
        if each.refusal:
            yield f"layer {each.number} stays dense: {each.refusal}"


def kind(each: ExpertsSparsity) -> str:
    """What the experts of a layer are, in words."""
    gated, activation = "gated" if each.gated else "non-gated", NAMES_OF_FAMILY[each.activation.name]
    return f"{each.experts:,} {gated} {activation}, {each.top} per token, K = {each.k:,}, N = {each.n:,}"
