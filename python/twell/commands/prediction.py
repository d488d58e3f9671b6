"""The strategy and speed that measured times promise for layers of some sparsity: what ``twell analyze`` expects."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twell._runtime import geometry
from twell.choose import rates
from twell.choose.plan import Facts, unpackable
from twell.choose.rates import SCREENED, Table
from twell.commands.request import counted
from twell.commands.sparsity import LayerSparsity

# A layer is far from the nearest measured one if its K or K * N differs by more than the first factor, and beyond
# prediction by more than the second.
FAR, TOO_FAR = 2.0, 8.0

# An eager call of up to so many tokens may take as long as the host's work for it (`host.json`), of which times of
# CUDA graphs say nothing.
HOST_BOUND = 2048

# (gated, K, N) of a layer
Shape = tuple[bool, int, int]


class Call(NamedTuple):
    """A kind of call to predict: its tokens, and whether it is a training step."""

    tokens: int
    training: bool

    @property
    def key(self) -> str:
        return f"{'train' if self.training else 'm'}{self.tokens}"

    def __str__(self) -> str:
        return f"{'training on ' if self.training else ''}{counted(self.tokens, 'token')}"


@dataclass(frozen=True)
class Prediction:
    """The choice of "auto" for a kind of call once it has measured the layer.

    speedup: of ``strategy`` over the dense layer. measured: K and N of the measured layer behind it. far: whether that
    layer is very different.
    """

    call: Call
    strategy: str
    speedup: float
    reason: str
    measured: tuple[int, int]
    far: bool


def nearest(shape: Shape, call: Call, table: Table | None = None) -> tuple[tuple[int, int], bool]:
    """K and N of the measured layer nearest to a layer, and whether it is very different."""
    gated, k, n = shape
    _, gate, *measured = costs.nearest(rates.Problem(call.tokens, k, n, gated, call.training), table)
    found = measured[0], measured[1]
    return found, gate != gated or distance((k, n), found) > FAR


def _problem(shape: Shape, call: Call) -> rates.Problem:
    """The sizes of a call. Layers lay their down weight out by rows in inference; in training it is the user's."""
    gated, k, n = shape
    return rates.Problem(call.tokens, k, n, gated, call.training, down_copied=call.training)


def distance(size: tuple[int, int], measured: tuple[int, int]) -> float:
    """The factor between K, or K * N if that is larger, of two layers (K, N)."""
    return max(apart(size[0], measured[0]), apart(math.prod(size), math.prod(measured)))


def predict(report: LayerSparsity, call: Call, table: Table | None = None) -> Prediction:
    """Predict the strategy and speed of a call from a table of costs, by default the shipped one."""
    problem = _problem((report.gated, report.k, report.n), call)
    measured, far = nearest((report.gated, report.k, report.n), call, table)
    refusal = unpackable(Facts("sizes", n=report.n, k=report.k))
    if refusal:
        return Prediction(call, "dense", 1.0, refusal.message, measured, far)
    decision = rates.decide(problem, report.figures, None, table)
    sparse = {name: cost for name, cost in decision.costs.items() if name != "dense"}
    reason = decision.reason
    if not sparse:
        reason = f"no sparse kernel was measured for {call}"
    elif decision.strategy == "dense" and min(sparse.values()) >= 1:
        reason = ", ".join(f"{name} would take {cost:.2f}" for name, cost in sparse.items()) + " of dense's time"
    return Prediction(call, decision.strategy, 1 / decision.costs[decision.strategy], reason, measured, far)


# Layers that are less than this much faster do not pay: GPUs of one model differ by more.
PAYS = 1.05
# Share of neurons beyond which nothing is promised: tables have patterns of up to a fifth.
MOST_SHARE = 1 / 4


def most_nonzeros(shape: Shape, call: Call, table: Table | None = None) -> int:
    """The most non-zeros per token with which a layer (gated, K, N) pays if tokens fire independently, or 0.

    At most ``MOST_SHARE`` of its neurons.
    """
    n, problem = shape[2], _problem(shape, call)

    def pays(nonzeros: int) -> bool:
        share = nonzeros / n
        figures = rates.Figures(nonzeros, 1 - (1 - share) ** geometry.TOKEN_TILE)
        decision = rates.decide(problem, figures, None, table)
        return decision.costs[decision.strategy] * PAYS <= 1

    # from few to many in steps of 2 %, since a cost need not rise with them everywhere
    most, step = 0, 1
    while step <= n * MOST_SHARE and pays(step):
        most, step = step, max(step + 1, math.floor(step * 1.02))
    return most


def apart(a: int, b: int) -> float:
    """The factor between two sizes, at least 1."""
    return max(a / b, b / a)


def speedup(reports: Sequence[LayerSparsity], predictions: Sequence[Prediction]) -> float:
    """Expected speed-up of all layers together over dense; each layer's time is proportional to its flops."""
    flops = [report.k * report.n * (3 if report.gated else 2) for report in reports]
    return sum(flops) / sum(flop / each.speedup for flop, each in zip(flops, predictions, strict=True))


def holds_for(calls: Sequence[Call]) -> str:
    """What times of these calls were measured with, in words."""
    layouts = ["by rows in inference"] if any(not call.training for call in calls) else []
    layouts += ["as nn.Linear stores them in training"] if any(call.training for call in calls) else []
    eager = f", as eager calls of up to {HOST_BOUND:,} tokens wait for the host"
    graphs = eager if any(call.tokens <= HOST_BOUND for call in calls) else ""
    return f"by times in CUDA graphs{graphs}, with down weights {' and '.join(layouts)}"


@dataclass(frozen=True)
class Basis:
    """What predictions for layers and calls come from, in words.

    gpu, date: of the table of times. holds: ``holds_for`` the calls. most_work: the shape of the layers with most of
    the work, whose speed is that of a model. far: a sentence for each shape and measured layer that are very different.
    unknown: why there is no verdict, "" if there is one. doubtful: whether those layers are far.
    """

    gpu: str
    machine: str
    date: str
    holds: str
    most_work: Shape
    far: list[str]
    unknown: str
    doubtful: bool


def basis(shapes: Sequence[Shape], calls: Sequence[Call], table: Table) -> Basis:
    """The basis of predictions for layers of these shapes, one or more."""
    found: dict[str, list[str]] = {}
    most_work = max(shapes, key=lambda shape: shapes.count(shape) * shape[1] * shape[2] * (2 + shape[0]))
    unknown, doubtful = "", False
    for shape, call in itertools.product(dict.fromkeys(shapes), calls):
        gated, k, n = shape
        measured, far = nearest(shape, call, table)
        if far:
            where = f"a {'gated' if gated else 'non-gated'} layer with K = {k:,}, N = {n:,}; the nearest has "
            found.setdefault(f"{where}K = {measured[0]:,}, N = {measured[1]:,}", []).append(str(call))
        doubtful |= far and shape == most_work
        if shape == most_work and not unknown and distance((k, n), measured) > TOO_FAR:
            unknown = (
                f"Verdict: none, as layers with K = {k:,}, N = {n:,} are too far from all measured ones, the nearest "
                f"with K = {measured[0]:,}, N = {measured[1]:,}; `twell tune --shape {k}x{n}` measures them on a GPU"
            )
    sentences = [f"Far from all measured layers: {where} ({'; '.join(named)})" for where, named in found.items()]
    machine = table.machine.split("; ")[0]
    return Basis(table.gpu, machine, table.date[:10], holds_for(calls), most_work, sentences, unknown, doubtful)


@dataclass(frozen=True)
class Forecast:
    """What "auto" would run in each layer, and how fast that is.

    layers: the predictions of each layer, one a call. speeds: of all layers together, by call. has_screen: whether the
    table has times of the screen.
    """

    basis: Basis
    layers: list[list[Prediction]]
    speeds: dict[Call, float]
    has_screen: bool


def forecast(reports: Sequence[LayerSparsity], calls: Sequence[Call], table: Table) -> Forecast:
    """Predict the calls of layers, one or more."""
    layers = [[predict(report, call, table) for call in calls] for report in reports]
    speeds = {call: speedup(reports, of_call) for call, of_call in zip(calls, zip(*layers), strict=True)}
    has_screen = any(SCREENED in entry for nodes in table.costs.values() for entry in nodes.values())
    return Forecast(basis([(r.gated, r.k, r.n) for r in reports], calls, table), layers, speeds, has_screen)


@dataclass(frozen=True)
class Requirement:
    """The most non-zeros per token with which layers pay: of each shape one number a call, 0 for never."""

    basis: Basis
    calls: Sequence[Call]
    limits: dict[Shape, list[int]]


def requirement(shapes: Sequence[Shape], calls: Sequence[Call], table: Table) -> Requirement:
    """What layers of these shapes, one or more, need to pay."""
    limits = {shape: [most_nonzeros(shape, call, table) for call in calls] for shape in dict.fromkeys(shapes)}
    return Requirement(basis(shapes, calls, table), calls, limits)
