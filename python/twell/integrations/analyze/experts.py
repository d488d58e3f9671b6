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


class Step(NamedTuple):
    """A step of decoding: how many experts are touched, and the mean share of their neurons that its tokens fire."""

    touched: float
    union: float


@dataclass(frozen=True)
class ExpertsSparsity:
    """The sparsity of a layer of experts. Shares are from 0 to 1.

    experts, top: how many there are, and of a token. zeros: share of the values after the activation, over all tokens
    and their experts. used: experts with tokens. steps: by number of sequences.
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


class ExpertsTally:
    """Counts of a layer of experts so far. Tokens of a step of decoding are taken to be independent of each other."""

    def __init__(self, watched: WatchedExperts) -> None:
        self.watched = watched
        (count, n, _), device = watched.weights.shape, watched.weights.device
        self._pairs = torch.zeros(count, dtype=torch.int64, device=device)
        self._fired = torch.zeros(count, n, dtype=torch.int64, device=device)
        self._tokens = self._top = 0

    def watch(self, x: Tensor, *given: Tensor) -> None:
        """Count tokens x [T, K]; ``given``: their routes."""
        # beside their weights, in whatever order a model passes them
        ids = next(t for t in given if not t.is_floating_point())
        for expert, weight in enumerate(self.watched.weights):
            tokens = x[(ids == expert).any(1)].to(weight.device)
            self._pairs[expert] += len(tokens)

            def gates(rows: slice, x: Tensor = tokens, weight: Tensor = weight) -> Tensor:
                return F.linear(x[rows], weight)

            for pattern in patterns(self.watched.activation, gates, len(tokens), len(weight)):
                self._fired[expert] += pattern.sum(0)
        self._tokens, self._top = self._tokens + len(x), ids.shape[1]

    def _step(self, size: int) -> Step:
        """What a step of so many tokens touches and fires on average."""
        touched, fired = (1 - (1 - t.double() / self._tokens) ** size for t in (self._pairs, self._fired))
        return Step(float(touched.sum()), float(fired.sum() / (touched.sum() * fired.shape[1]).clamp(min=1e-9)))

    def report(self) -> ExpertsSparsity | None:
        """The figures of all tokens; None without any."""
        at, (_, n, k) = self.watched, self.watched.weights.shape
        if not self._tokens:
            return None
        zeros = 1 - int(self._fired.sum()) / max(int(self._pairs.sum()) * n, 1)
        counts = len(self._pairs), self._top, self._tokens, zeros, int((self._pairs > 0).sum())
        steps = {size: self._step(size) for size in STEPS}
        return ExpertsSparsity(at.name, at.number, at.gated, at.activation, k, n, *counts, steps)


def speeds(reports: Sequence[ExpertsSparsity], card: Card | None = None) -> dict[int, tuple[str, float, float]]:
    """Of steps of decoding: routes in words, and seconds of these and of grouped products."""
    found = {}
    for size in STEPS:
        each = [report.seconds(size, card) for report in reports]
        names = " and ".join(dict.fromkeys(route for route, _ in each))
        found[size] = names, sum(s[route] for route, s in each), sum(s["dense"] for _, s in each)
    return found


def tables(reports: Sequence[ExpertsSparsity], card: Card | None = None) -> Iterator[str]:
    """The figures of layers of experts, one or more, and their times."""
    for what in dict.fromkeys(map(kind, reports)):
        yield f"Experts: {what}"
    lines = [["layer", "zeros", "used", *(f"{'touched by ' * (size == 1)}{size}" for size in STEPS)]]
    for each in reports:
        cells = [f"{step.touched:,.1f}: {as_percent(step.union)}" for step in each.steps.values()]
        lines.append([str(each.number), as_percent(each.zeros), f"{each.used:,} of {each.experts:,}", *cells])
    yield from aligned(lines)
    yield ""
    lines = [["decoding", "dense us", "route", "us", "ratio"]]
    for size, (routes, seconds, dense) in speeds(reports, card).items():
        lines.append([str(size), f"{dense * 1e6:,.1f}", routes, f"{seconds * 1e6:,.1f}", f"{seconds / dense:.2f}"])
    yield from aligned(lines)
    for each in reports:
        if each.refusal:
            yield f"layer {each.number} stays dense: {each.refusal}"


def kind(each: ExpertsSparsity) -> str:
    """What the experts of a layer are, in words."""
    gated, activation = "gated" if each.gated else "non-gated", NAMES_OF_FAMILY[each.activation.name]
    return f"{each.experts:,} {gated} {activation}, {each.top} per token, K = {each.k:,}, N = {each.n:,}"
