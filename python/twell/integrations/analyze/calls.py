"""What a call of a layer would take by each route: predictions of ``twell.analyze``."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twell.choose import cards, rates
from twell.choose.cards import Card
from twell.choose.plan import Facts, Route, unpackable
from twell.choose.rates import Figures, Problem
from twell.choose.tuning import MERGED_TOKENS
from twell.integrations.analyze.figures import LayerSparsity
from twell.runtime import geometry

# Layers that are less than this much faster do not pay: GPUs of one model differ by more.
PAYS = 1.05
# Share of neurons beyond which nothing is promised.
MOST_SHARE = 1 / 4

# At its power limit a GPU takes so much longer for dense products of a millisecond or more in a steady run than in the
# short ones of `twell tune`, and no longer for those of a fifth (NVIDIA H200, 700 W: 16,384 tokens, in `auto.json`
# beside `tuning.json`).
SUSTAINED, SHORT, LONG = 1.13, 2e-4, 1e-3

# (gated, K, N) of a layer
Shape = tuple[bool, int, int]


class Call(NamedTuple):
    """A kind of call: "prefill" or "training" on tokens that follow each other, "decoding" of as many sequences.

    served: whether dense is that of servers, with gate and up in one product and no copies.
    """

    kind: str
    tokens: int
    served: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens:,}"


@dataclass(frozen=True)
class Prediction:
    """What a layer would run in a call, and why; seconds of each route in a CUDA graph, {} if they are not known."""

    layer: int
    call: Call
    route: str
    reason: str
    seconds: dict[str, float]

    @property
    def ratio(self) -> float | None:
        """The time of the route over that of dense; None if it is not known."""
        return self.seconds[self.route] / self.seconds["dense"] if self.route in self.seconds else None

    def as_json(self) -> dict[str, object]:
        """It in words and numbers."""
        call = {"call": self.call.kind, "tokens": self.call.tokens}
        return dataclasses.asdict(self) | call | {"ratio": self.ratio}


def predict(
    layer: LayerSparsity, call: Call, card: Card | None = None, ranks: int = 1, requested: Route | None = None
) -> Prediction:
    """Predict a call of a rank's part of a layer, by the ``requested`` route or by what "auto" chooses."""
    training, merged = call.kind == "training", call.served and call.tokens <= MERGED_TOKENS
    sizes = call.tokens, layer.k, layer.n // ranks, layer.gated, training
    # layers lay their down weight out by rows in inference; in training it is the user's
    problem = Problem(*sizes, down_copied=training, merged=merged, float8=layer.float8)
    heaviest = None if layer.heaviest is None else layer.heaviest / ranks
    figures = Figures(layer.mean / ranks, layer.union, heaviest, layer.candidates)
    if call.kind == "decoding":
        figures = Figures(layer.mean / ranks, layer.mixed)
    name, sliced = "sizes of a rank" if ranks > 1 else "sizes", not (layer.float8 or call.served)
    facts = Facts(name, n=problem.n, k=problem.k, float8=layer.float8, sliced=sliced)
    refusal = unpackable(facts, instead="")
    if refusal or layer.reason:
        dense = {"dense": _dense(problem, card)}
        return Prediction(layer.number, call, "dense", layer.reason or str(refusal and refusal.message), dense)
    seconds = rates.seconds(problem, figures, card)
    if layer.float8:
        # its own dense copies a weight, that of servers does not
        seconds["dense"] = _dense(problem, card)
    seconds["dense"] *= 1 + (SUSTAINED - 1) * min(max((seconds["dense"] - SHORT) / (LONG - SHORT), 0), 1)
    if requested is not None and requested.strategy != "auto":
        return Prediction(layer.number, call, requested.strategy, "named by the configuration", seconds)
    route, reason, _, _ = rates.decide(problem, figures, None, card)
    others = {name: time / seconds["dense"] for name, time in seconds.items() if name != "dense"}
    if route == "dense" and min(others.values(), default=0) >= 1:
        reason = f"{', '.join(f'{name} would take {share:.2f}' for name, share in others.items())} of dense's time"
    return Prediction(layer.number, call, route, reason, seconds)


def _dense(problem: Problem, card: Card | None) -> float:
    card = card or cards.SHIPPED
    own = card.float8 or card.rates if problem.float8 else card.rates
    return rates.dense_us(problem, own, card.sms) / 1e6


def apart(layers: Sequence[LayerSparsity], ranks: int = 1) -> float:
    """The factor by which layers, one or more, are beyond what was measured: half of the work is no further."""

    def beyond(each: LayerSparsity) -> float:
        return rates.MEASURED["e4m3" if each.float8 else "16 bits"].apart(each.k, each.n // ranks, each.mean / each.n)

    nearest = sorted(layers, key=beyond)
    done = list(itertools.accumulate(each.work for each in nearest))
    return next(beyond(each) for each, work in zip(nearest, done) if 2 * work >= done[-1])


def most_nonzeros(shape: Shape, call: Call, card: Card | None = None) -> int:
    """The most non-zeros per token, or 0, with which a layer pays if tokens fire up to ``MOST_SHARE`` independently."""
    n = shape[2]

    def pays(nonzeros: int) -> bool:
        union = 1 - (1 - nonzeros / n) ** geometry.TOKEN_TILE
        layer = LayerSparsity("", 0, *shape, mean=nonzeros, union=union, mixed=union)
        ratio = predict(layer, call, card).ratio
        return ratio is not None and ratio * PAYS <= 1

    # from few to many in steps of 2 %, since a time need not rise with them everywhere
    most, step = 0, 1
    while step <= n * MOST_SHARE and pays(step):
        most, step = step, max(step + 1, math.floor(step * 1.02))
    return most
