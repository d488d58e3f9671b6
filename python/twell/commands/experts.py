"""The sparsity of a model's stacked experts on text, and the speed to expect of it: figures of ``twell analyze``."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from twell import tuning
from twell._activation import Activation
from twell._runtime import geometry
from twell.choose.plan import Facts, unpackable
from twell.choose.rates import experts_seconds
from twell.commands import saved_model
from twell.commands.saved_model import Watched
from twell.commands.sparsity import patterns

# Sequences of the steps of decoding.
STEPS = (1, 8, 32, 64, 128, 256)
# Positions of the sequences whose tokens form steps.
_POSITIONS = 8


@dataclass(frozen=True, eq=False)
class WatchedExperts(Watched):
    """A layer of experts. linears: of each expert the projection that its activation follows."""

    linears: Sequence[nn.Linear]
    gated: bool
    activation: Activation


class Step(NamedTuple):
    """A step of decoding: how many experts are touched, and the mean share of their neurons that its tokens fire."""

    touched: float
    union: float


@dataclass(frozen=True)
class ExpertsSparsity:
    """The sparsity of a layer of experts. Shares are from 0 to 1.

    experts, top: how many there are, and of a token. zeros: share of the values after the activation, over all tokens
    and their experts; zeros_of_experts: the least, mean and most of an expert with tokens. used: experts with tokens.
    busiest: tokens of the busiest expert, as a multiple of an even share. effective: experts that, with even shares,
    would have the entropy of the routes. steps: by number of sequences, up to those of the text.
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
    zeros_of_experts: tuple[float, float, float]
    used: int
    busiest: float
    effective: float
    steps: dict[int, Step]

    @property
    def mean(self) -> float:
        """Mean non-zeros of a token and one of its experts."""
        return (1 - self.zeros) * self.n

    @property
    def refusal(self) -> str:
        """Why "row" does not take the layer; "" if it does."""
        if self.experts > geometry.MAX_EXPERTS:
            return f'"row" takes up to {geometry.MAX_EXPERTS} experts'
        refusal = unpackable(Facts("sizes", n=self.n, k=self.k))
        return refusal.message if refusal else ""

    def seconds(self, sequences: int) -> dict[str, float]:
        """Predicted seconds of a step of decoding by "auto" and by grouped products, "dense"."""
        touched, union = self.steps[sequences]
        fired = 1 - self.zeros if self.gated else union
        found = experts_seconds(sequences * self.top, touched, fired, self.n, self.k, self.gated)
        by_row = not self.refusal and tuning.experts_by_row(sequences, self.top, self.experts, self.gated)
        return {"auto": found["row" if by_row else "dense"], "dense": found["dense"]}


def layers(model: nn.Module) -> list[WatchedExperts]:
    """The stacked experts of ``model`` that twell computes, numbered as ``saved_model.layers``."""
    # it loads much of transformers
    from twell.integrations import experts as stacked

    found, watched = dict(stacked.found(model)), []
    for (name, module), number in zip(found.items(), saved_model.numbers(found)):
        w_gate, w_up = stacked.projections(module)
        linears = [linear_of(weight) for weight in (w_up if w_gate is None else w_gate).detach()]
        watched.append(WatchedExperts(name, number, module, linears, module.has_gate, stacked.activation(module)))
    return watched


def linear_of(weight: Tensor) -> nn.Linear:
    """A linear layer of this weight [N, K], which is not copied."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


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

    A step has one token of each of so many sequences, at one position. ``length``: of the sequences.
    """

    def __init__(self, watched: WatchedExperts, length: int) -> None:
        self.watched = watched
        device = watched.linears[0].weight.device
        self._pairs, self._nonzeros = torch.zeros(2, len(watched.linears), dtype=torch.int64, device=device)
        places = {max(length * (i + 1) // _POSITIONS - 1, 0) for i in range(_POSITIONS)}
        self._positions = torch.tensor(sorted(places), device=device)
        self._tokens = self._top = self._sequences = 0
        # x, ids and position
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, x: Tensor, first: Tensor, *given: Tensor) -> None:
        """Count tokens x [T, K], of which ``first``, bool [T], begin sequences; ``given``: their routes."""
        ids, _ = routes(given)
        for expert, tokens in of_experts(ids, len(self._pairs)):
            self._pairs[expert] += len(tokens)
            for _, pattern in self._patterns(expert, x[tokens]):
                self._nonzeros[expert] += pattern.sum()
        self._tokens, self._top = self._tokens + len(x), ids.shape[1]
        sequence, starts = first.cumsum(0) - 1, first.nonzero().flatten()
        place = torch.arange(len(x), device=x.device) - starts[sequence]
        chosen = torch.isin(place, self._positions) & (sequence + self._sequences < STEPS[-1])
        # on the CPU, as all layers keep some
        self._kept.append((x[chosen].cpu(), ids[chosen].cpu(), place[chosen].cpu()))
        self._sequences += len(starts)

    def _patterns(self, expert: int, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        linear = self.watched.linears[expert]
        return patterns(x.to(linear.weight.device), linear, self.watched.activation)

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
        """The figures of all tokens, at least one."""
        watched, linear = self.watched, self.watched.linears[0]
        pairs, nonzeros = self._pairs.cpu().double(), self._nonzeros.cpu().double()
        total, used = max(float(pairs.sum()), 1.0), pairs > 0
        zeros = 1 - nonzeros[used] / (pairs[used] * linear.out_features)
        share = pairs[used] / total
        return ExpertsSparsity(
            name=watched.name,
            number=watched.number,
            gated=watched.gated,
            activation=watched.activation,
            k=linear.in_features,
            n=linear.out_features,
            experts=len(pairs),
            top=self._top,
            tokens=self._tokens,
            zeros=1 - float(nonzeros.sum()) / (total * linear.out_features),
            zeros_of_experts=(float(zeros.min()), float(zeros.mean()), float(zeros.max())),
            used=int(used.sum()),
            busiest=float(share.max()) * len(pairs),
            effective=math.exp(-float((share * share.log()).sum())),
            steps=self._steps(),
        )


def speedups(reports: Sequence[ExpertsSparsity]) -> dict[int, float]:
    """Predicted speed of all layers together by "auto" over grouped products, by sequences of a step of decoding."""
    found = {}
    for sequences in STEPS:
        if all(sequences in report.steps for report in reports):
            seconds = [report.seconds(sequences) for report in reports]
            found[sequences] = sum(each["dense"] for each in seconds) / sum(each["auto"] for each in seconds)
    return found
