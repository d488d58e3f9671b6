"""What each strategy costs a layer, in times of dense, and the choice by it: ``decide``. Nothing is measured here."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from twell._runtime import geometry, specs
from twell.strategy import tables
from twell.strategy.tables import SCREENED, Key, Table, Terms
from twell.tuning import decode

# A change of strategy must promise to save this share of the time, about the error of the predictions.
MARGIN = 0.02

# A training step with more non-zeros than the hybrid format holds takes 1.4 times as long as dense (H200, K = 2,048,
# N = 5,632). The sparse route starts below this share of the capacity, so that batches may vary by a sixth.
SAFE_SHARE = 0.85

# Inference of a layer not yet measured runs "union" if, with one non-zero in 190 neurons, it would take at most this
# multiple of the time of "row": the worst pattern makes it a few times slower than dense, and "row" thirty times.
WORST_CASE_PREMIUM = 1.25
ASSUMED_DENSITY = 1 / 190
# Tokens of CUDA graphs that are dense if nothing was measured before: sparse rows of a layer that is not sparse lose
# much: at 64 tokens, with 10 % of the neurons firing, a step of a served 8B model took 2.6 times stock's time (NVIDIA
# H200, `engine_ten.json`). Fewer tokens take one pass, which loses little, and more the bounded "union".
UNSURE_GRAPHS = range(specs.DECODE_TOKENS[-1] + 1, 513)
# The largest share of neurons that fire for a token of which times in e4m3 are known (`float8.json`).
FLOAT8_DENSITY = 0.0059

# Bytes per second, read and written, of `matrix_transpose` (NVIDIA H200, driver 580.159.04: 14.6 us for 5,632 x 2,048,
# 5.1 us for 2,816 x 1,024, 66 us for 14,336 x 4,096, weights from memory). The rates of dense layers are those of
# cuBLAS at M = 16,384 and of reading weights from memory there; clocks vary them by 8 %.
COPY_BYTES = 3.1e12
_DENSE_FLOP = 790e12
_DENSE_BYTES = 4.2e12
# Seconds of the host for a call without gradients and for a training step: three nn.Linear with their activation, and
# strategies chosen by "auto". Ratios are those of `host.json`, the time of dense that of the fastest host that was
# measured, since hosts differ by a factor of two: where the GPU is the limit on a fast host, its times decide. Of these
# seconds a share passes before the first kernel starts.
HOST_SECONDS = {
    False: {"dense": 60e-6, "row": 20e-6, "union": 25e-6, SCREENED: 32e-6},
    True: {"dense": 300e-6, "union": 190e-6, SCREENED: 210e-6},
}
_FIRST_LAUNCH = 0.3
# Of a dense layer of up to 512 tokens: the seconds that one product for gate and up saves, those beyond its products,
# and the time to read weights over that at the rate above (NVIDIA H200: 3 to 5 us saved; in two products 18, 34 and 118
# us predicted for K = 1,024, 2,048 and 4,096, and 20, 32 and 97 measured).
_MERGED_SAVES, _DENSE_STARTS, _FEW_TOKENS_READ = 3.5e-6, 13e-6, 1.25


# Most values of x for which "auto" takes "row". NVIDIA H100, ms of "row" and of "union" (`row.json`), "uniform29":
# K = 2,048 and N = 5,632 0.171 and 0.171 for 2,048 tokens, 1.25 and 1.10 for 16,384; K = 4,096 and N = 14,336 0.344
# and 0.344 for 1,024, 2.56 and 2.13 for 8,192. Other patterns favour "union" more, except `real3` at the limit: 0.119
# and 0.119 for 2,048 tokens, but 0.218 and 0.189 for 4,096.
ROW_VALUES = 1 << 22


class Problem(NamedTuple):
    """The sizes of a call: x [m, k], n neurons, with or without gate; ``training`` where a gradient is needed.

    ``down_copied``: whether the down weight is stored as in nn.Linear, so that sparse kernels read a copy by rows, made
    at each forward and each backward pass. ``merged``: whether a dense layer computes gate and up in one product.
    ``eager``: whether the host launches each kernel in the call, rather than before it in a CUDA graph. ``float8``:
    whether weights are e4m3 with scales. ``one_pass``: whether few tokens may take one pass over the weights: not of a
    given gate, and not if the largest gates of a token are kept.
    """

    m: int
    k: int
    n: int
    gated: bool
    training: bool
    down_copied: bool = False
    merged: bool = False
    eager: bool = False
    float8: bool = False
    one_pass: bool = True


class Figures(NamedTuple):
    """The sparsity of a layer.

    nonzeros: mean per token. union: mean share of the n neurons that a tile of 128 consecutive tokens fires; None if
    unknown. heaviest: non-zeros per token of the 8 consecutive tokens that have the most, or of all if there are fewer;
    None if unknown. candidates: mean share of the n neurons that the int8 screen lists for a tile; None if not counted.
    """

    nonzeros: float
    union: float | None
    heaviest: float | None = None
    candidates: float | None = None


# Training keeps room for this multiple of the most non-zeros per token in recent measurements. Batches of fewer tokens
# than this vary more and need less memory; they keep as much room as there may be.
ROOM = 1.5
_STEADY_TOKENS = 1024


def held(problem: Problem, recent: Sequence[float]) -> int:
    """Non-zeros per token for which a training call keeps room, by the means of ``recent`` calls; 0: the most."""
    if not problem.training or not recent or problem.m < _STEADY_TOKENS:
        return 0
    return max(8, math.ceil(ROOM * max(recent) / 8) * 8)


class Decision(NamedTuple):
    """A strategy, the reason, and the predicted time of each strategy as a multiple of dense's; {} if unknown.

    final: whether figures cannot change it.
    """

    strategy: str
    reason: str
    costs: dict[str, float]
    final: bool = False


# Tokens of the group of which ``Figures.heaviest`` is the mean.
HEAVY_GROUP = geometry.STATS_ROWS
# With few tokens "row" takes as long as the heaviest of them, as it computes them one by one. With more, others hide
# them, but up to here the term still helps.
MOST_WAITING = 4096


# Without it times of tokens whose non-zeros vary were predicted 19 % too short in the mean, with it 5 % (`tuning.json`,
# 64 tokens and more by "row").
ALIKE_VARY = 0.6


def waits(problem: Problem) -> bool:
    """Whether the cost has a term for the heaviest tokens. In one group they are all tokens."""
    return not problem.training and HEAVY_GROUP < problem.m <= MOST_WAITING


def shares(problem: Problem, figures: Figures) -> tuple[float, float, float]:
    """The shares of the n neurons that a tile of tokens, one token and one of the heaviest group fire.

    Costs are linear in them. Those of independent tokens stand in for unknown ones; the union is at most theirs, and
    tokens whose union is less vary more in their non-zeros. Raises
    ValueError for figures that are negative or not finite.
    """
    if not all(figure is None or 0 <= figure < math.inf for figure in figures):
        raise ValueError(f"figures must be finite and not negative, got {figures}")
    density = min(figures.nonzeros / problem.n, 1.0)
    independent = 1 - (1 - density) ** min(problem.m, geometry.TOKEN_TILE)
    union = independent if figures.union is None else min(independent, figures.union)
    if figures.heaviest is None:
        # about the largest of so many sums of a group
        deviation = math.sqrt(density * (1 - density) / (HEAVY_GROUP * problem.n))
        if union < independent:
            deviation += ALIKE_VARY * density * (1 - union / independent)
        heaviest = density + deviation * math.sqrt(2 * math.log(max(problem.m / HEAVY_GROUP, 1.0)))
    else:
        heaviest = figures.heaviest / problem.n
    return union, density, min(heaviest, 1.0)


def factors(problem: Problem, figures: Figures, strategy: str) -> tuple[float, float, float, float]:
    """What the terms of a cost are multiplied by; ``figures.candidates`` must be known for that of ``SCREENED``."""
    union, density, heaviest = shares(problem, figures)
    if strategy != SCREENED:
        return 1.0, union, density, heaviest
    if figures.candidates is None:
        raise ValueError(f"candidates must be known for the cost of {SCREENED}, got {figures}")
    # a neuron that fires is a candidate
    return 1.0, union, density, min(max(union, figures.candidates), 1.0)


def costs(problem: Problem, figures: Figures, table: Table | None = None, screen: bool = True) -> dict[str, float]:
    """Predicted time of each strategy that the table has for ``problem``, as a multiple of dense's.

    Of e4m3 weights that is dense as servers run it; the "dense" of twell also copies the down weight at each call.
    ``table`` is the shipped one by default. ``SCREENED`` has a time where ``figures.candidates`` are known, with
    ``screen``.
    """
    if in_one_pass(problem, table):
        # both are that pass
        time = _one_pass(problem, figures) + copy_cost(problem)
        predicted = {"row": time, "union": time, "dense": 1.0}
        return _eager(problem, predicted) if problem.eager else predicted
    copies, dense = copy_cost(problem), merged_cost(problem)
    predicted = {}
    for name, terms in coefficients(problem, table).items():
        if name == SCREENED and (figures.candidates is None or not screen):
            continue
        if problem.float8 and not problem.gated:
            terms = _without_gate(name, terms)
        time = sum(term * factor for term, factor in zip(terms, factors(problem, figures, name)))
        predicted[name] = (time + copies) / dense
    if SCREENED in predicted and "union" in predicted:
        # the terms are of few candidates: a screen saves at most the gates of all others, one of dense's products
        others = 1 - factors(problem, figures, SCREENED)[3]
        predicted[SCREENED] = max(predicted[SCREENED], predicted["union"] - others / (3 if problem.gated else 2))
    predicted.setdefault("dense", 1.0)
    return _eager(problem, predicted) if problem.eager else predicted


# Seconds of a layer in one pass over its weights: its start, another exchange with a gate, the sums of each token and
# 4,096 columns that clusters leave, and quantising tokens to e4m3. And what each product of a dense layer takes beyond
# reading weights. NVIDIA H200, CUDA graphs, November 2026: within 5 % of 40 measured cells of four layers.
_ONE_PASS, _EXCHANGE, _LEFT, _QUANTISED, _PRODUCT = 5.6e-6, 3e-6, 0.25e-6, 2.5e-6, 4.8e-6


def _one_pass(problem: Problem, figures: Figures) -> float:
    """The time of a layer of few tokens in one pass, as a multiple of dense's."""
    m, k, n, gated = problem[:4]
    union, _, _ = shares(problem, figures)
    read = (2.0 - problem.float8) * k * n * (1 + union * (2 if gated else 1))
    seconds = _ONE_PASS + _EXCHANGE * gated + _QUANTISED * problem.float8 + _LEFT * m * k / 4096
    return (seconds + read / _DENSE_BYTES) / (_PRODUCT * (3 if gated else 2) + _dense_seconds(problem))


def _without_gate(name: str, terms: Terms) -> Terms:
    """Terms in e4m3 by those of a layer with a gate, which alone was measured.

    Dense has two of its three products, and behind the first one of two is left. The copy by "dense" stays.
    """
    base, per_union, per_density, per_last = (3 / 2 * term for term in terms)
    return base - (0.5 if name == "dense" else 0), per_union / 2, per_density / 2, per_last / 2


def _eager(problem: Problem, predicted: dict[str, float]) -> dict[str, float]:
    """Times of calls that the host launches: no less than its own, and as multiples of such a dense call's.

    The first kernel starts behind a share of the host's time.
    """
    # where the host may be the limit, products are small
    dense = (3 if problem.training else 1) * _dense_call_seconds(problem)
    host = HOST_SECONDS[problem.training]
    own = {name: host.get(name, 0.0) for name in predicted}
    seconds = {name: max(own[name], time * dense) + _FIRST_LAUNCH * own[name] for name, time in predicted.items()}
    return {name: time / seconds["dense"] for name, time in seconds.items()}


def worth_screening(problem: Problem, figures: Figures | None, table: Table | None = None) -> bool:
    """Whether a screen that listed nothing but the union would be the fastest: else none need be counted.

    By the times of the GPU: graphs decide by the figures of eager calls, in which the host may be the limit.
    """
    problem, figures = _of_slice(problem, figures)
    if figures is None:
        return False
    predicted = costs(problem._replace(eager=False), figures._replace(candidates=0.0), table)
    return SCREENED in predicted and predicted[SCREENED] <= min(predicted.values())


# Layers of experts: seconds before and between kernels and bytes of weights per second, of grouped products of PyTorch,
# and of "row" with its rows: 128 experts of this K and N, 6 of a token, 9.3 % of neurons firing, 1 to 1,024 tokens
# (profiling/results/experts.json).
EXPERTS_GPU, EXPERTS_MEASURED = "NVIDIA H100", (2688, 1856)
_GROUPED_START, _GROUPED_BYTES = 29e-6, 2.6e12
_EXPERTS_START, _EXPERT_BYTES, _EXPERT_ROW_BYTES = 20e-6, 2.9e12, 2.6e12


def experts_seconds(pairs: int, touched: float, fired: float, n: int, k: int, gated: bool) -> dict[str, float]:
    """Predicted seconds of a layer of experts by "row" and, by grouped products of PyTorch, "dense".

    ``pairs`` of a token and an expert have ``touched`` experts in all. Of the ``n`` neurons of each the share ``fired``
    fires for any of its tokens or, with a gate, for one token.
    """
    products, weights = 3 if gated else 2, 2.0 * n * k
    flop = pairs * weights / _DENSE_FLOP
    rows = fired * weights * (2 * pairs if gated else touched)
    return {
        "row": _EXPERTS_START + max(touched * weights / _EXPERT_BYTES, flop) + rows / _EXPERT_ROW_BYTES,
        "dense": _GROUPED_START + products * max(touched * weights / _GROUPED_BYTES, flop),
    }


def waits_for_host(problem: Problem) -> bool:
    """Whether the host may take longer than the kernels of a dense call, on a host half as fast, too."""
    passes = 3 if problem.training else 1
    return problem.eager and passes * _dense_seconds(problem) < 2 * HOST_SECONDS[problem.training].get("dense", 0.0)


def copy_cost(problem: Problem) -> float:
    """The time that sparse strategies spend on copies of the down weight, as a multiple of dense's time."""
    if not problem.down_copied:
        return 0.0
    # backward makes one more copy and twice the products
    copies, passes = (2, 3) if problem.training else (1, 1)
    return copies * 4 * problem.k * problem.n / COPY_BYTES / (passes * _dense_seconds(problem))


def _dense_seconds(problem: Problem) -> float:
    """The least seconds of the dense forward pass."""
    weights, values = 3 if problem.gated else 2, problem.k * problem.n
    # e4m3 has half the bytes and twice the rate
    return (0.5 if problem.float8 else 1) * max(
        2 * problem.m * weights * values / _DENSE_FLOP, 2 * weights * values / _DENSE_BYTES
    )


def _dense_call_seconds(problem: Problem) -> float:
    """The seconds of a dense forward pass of few tokens by three products: more than the least."""
    return _DENSE_STARTS + _FEW_TOKENS_READ * _dense_seconds(problem)


def merged_cost(problem: Problem) -> float:
    """The time of a dense layer as a multiple of the table's, which in 16 bits computes gate and up in two products."""
    if not problem.merged or problem.float8:
        return 1.0
    values = problem.k * problem.n
    products = max(6 * problem.m * values / _DENSE_FLOP, _FEW_TOKENS_READ * 6 * values / _DENSE_BYTES)
    return 1 - _MERGED_SAVES / (_DENSE_STARTS + products)


def decide(
    problem: Problem,
    figures: Figures | None,
    current: str | None,
    table: Table | None = None,
    screen: bool = True,
) -> Decision:
    """Choose the strategy for ``problem`` from measured ``figures`` and the ``current`` strategy; either may be None.

    A pure function of these, of the table of costs, by default the shipped one, and of ``screen``, as in ``costs``.
    Without figures inference takes a sparse strategy, except in ``UNSURE_GRAPHS``, and training the dense one. Calls of
    a kind for which the table must not stand in (``Table.lacks``) are dense.
    """
    if in_one_pass(problem, table) and not problem.down_copied:
        reason = "so few tokens take one pass over the weights, whatever share fires"
        return Decision("row", reason, {} if figures is None else costs(problem, figures, table), final=True)
    problem, figures = _of_slice(problem, figures)
    if lacks := _of_weights(problem, table).lacks(problem.training, problem.gated):
        return Decision("dense", lacks, {"dense": 1.0})
    decision = _fresh(problem, table) if figures is None else _measured(problem, figures, current, table, screen)
    if decision.strategy == "dense" and problem.down_copied:
        in_place = decide(problem._replace(down_copied=False), figures, current, table, screen).strategy
        if in_place != "dense":
            reason = f"copies of the down weight outweigh {in_place}, which needs none where it is stored by rows"
            decision = decision._replace(reason=f"{decision.reason}; {reason}")
    if decision.strategy == "dense" and problem.eager:
        replayed = decide(problem._replace(eager=False), figures, None, table, screen).strategy
        if replayed != "dense":
            decision = decision._replace(
                reason=f"{decision.reason}, since the host is the limit; {replayed} in a graph"
            )
    return decision


def in_one_pass(problem: Problem, table: Table | None = None) -> bool:
    """Whether a sparse call is of so few tokens that one kernel computes the layer, on the GPU of the table."""
    if problem.training or not problem.one_pass or problem.n > geometry.MAX_NEURONS:
        return False
    if not (tables.SHIPPED if table is None else table).screens:
        return False
    dtype = torch.float8_e4m3fn if problem.float8 else torch.bfloat16
    return decode(dtype, problem.m, problem.k, "gated" if problem.gated else "plain") is not None


def _of_slice(problem: Problem, figures: Figures | None) -> tuple[Problem, Figures | None]:
    """A layer as costs know it: one of the slices that it runs as, whose times are in proportion to the layer's."""
    slices = geometry.neuron_slices(problem.n)
    if len(slices) < 2:
        return problem, figures
    if figures is not None:
        heaviest = None if figures.heaviest is None else figures.heaviest / len(slices)
        figures = figures._replace(nonzeros=figures.nonzeros / len(slices), heaviest=heaviest)
    return problem._replace(n=slices[0][1]), figures


def decide_once(problem: Problem, table: Table) -> str:
    """The strategy of a call of which nothing will be known: a caller that wants a choice in training passes a site."""
    if problem.training:
        problem, _ = _of_slice(problem, None)
        return "union" if problem.n <= table.union_neurons and not table.lacks(True, problem.gated) else "dense"
    return decide(problem, None, None, table).strategy


def _measured(problem: Problem, figures: Figures, current: str | None, table: Table | None, screen: bool) -> Decision:
    predicted = costs(problem, figures, table, screen)
    if problem.training:
        held = geometry.hybrid_capacity(problem.m, problem.n) / max(problem.m, 1)
        limit = SAFE_SHARE * held * (1 if current in (None, "dense") else 1 + MARGIN)
        if figures.nonzeros > limit:
            reason = f"{figures.nonzeros:.0f} non-zeros per token are too near the sparse route's limit, {held:.0f}"
            return Decision("dense", reason, predicted)
    choices = {name: time for name, time in predicted.items() if name != "row" or _takes_row(problem)}
    best = min(choices, key=lambda name: choices[name])
    if current is None or current not in choices or current == best:
        return Decision(best, f"predicted at {predicted[best]:.2f} of dense's time", predicted)
    if predicted[best] > (1 - MARGIN) * predicted[current]:
        return Decision(current, f"kept: {best} would save less than {MARGIN:.0%}", predicted)
    saved = 1 - predicted[best] / predicted[current]
    return Decision(best, f"saves {saved:.0%} of the time of {current}", predicted)


def _takes_row(problem: Problem) -> bool:
    """Whether "auto" may take "row"."""
    return problem.float8 or problem.m * problem.k <= ROW_VALUES


UNTRAINED = Decision("dense", "nothing measured yet, and an untrained layer fires half of its neurons", {})


def _fresh(problem: Problem, table: Table | None) -> Decision:
    if problem.training:
        return UNTRAINED
    if not problem.eager and problem.m in UNSURE_GRAPHS:
        return Decision("dense", "a graph keeps its choice, and nothing was measured before it", {})
    assumed = costs(problem, Figures(ASSUMED_DENSITY * problem.n, None), table)
    row, union = assumed.get("row", 1.0), assumed.get("union", math.inf)
    if not in_one_pass(problem, table) and union <= WORST_CASE_PREMIUM * row and union < 1:
        return Decision("union", "nothing measured yet, and its worst case is bounded", {})
    strategy = min((row if _takes_row(problem) else 1.0, "row"), (union, "union"), (assumed["dense"], "dense"))[1]
    return Decision(strategy, f"nothing measured yet, and the best for {problem.m} tokens of a sparse layer", {})


def nearest(problem: Problem, table: Table | None = None) -> Key:
    """(training, gated, K, N) of the measured layer nearest in kind, and then in log K and log N."""
    measured = _of_weights(problem, table).costs
    return min(measured, key=lambda key: (*_other_kind(problem, key), _distance(problem, key)))


def coefficients(problem: Problem, table: Table | None = None) -> dict[str, Terms]:
    """The terms of each sparse strategy's cost: base, then per share of the union, of non-zeros, of the heaviest group.

    The last one of ``SCREENED`` is per share of candidates instead. A table without it never has it chosen.

    They are those of the measured layers of this kind, weighted by 1 / distance^2 in log K and log N. Each layer's are
    interpolated in log M; fewer and more tokens than were measured have those of the fewest and of the most, but
    training on fewer has no sparse strategy. More neurons than ``Table.union_neurons`` have no "union". A kind of calls
    that the table lacks (``Table.lacks``) has no strategy.
    """
    problem = problem._replace(down_copied=False, merged=False, eager=False)
    return _coefficients(problem, _of_weights(problem, table))


def _of_weights(problem: Problem, table: Table | None) -> Table:
    """The table, or the shipped one where it is None or of other weights."""
    if table is not None and table.float8 == problem.float8:
        return table
    return tables.FLOAT8 if problem.float8 else tables.SHIPPED


@functools.lru_cache(1024)
def _coefficients(problem: Problem, table: Table) -> dict[str, Terms]:
    if table.lacks(problem.training, problem.gated):
        return {}
    kind = _other_kind(problem, nearest(problem, table))
    layers = {key: nodes for key, nodes in table.costs.items() if _other_kind(problem, key) == kind}
    weighted: dict[str, list[tuple[float, Terms]]] = {}
    for key, nodes in layers.items():
        if problem.m >= min(nodes) or not problem.training:
            weight = max(_distance(problem, key), 1e-3) ** -2
            for name, terms in _between(problem.m, nodes).items():
                if name != "row" and problem.n > table.union_neurons:
                    continue
                if name == SCREENED and not table.screens:
                    continue
                weighted.setdefault(name, []).append((weight, terms))
    return {name: _mean(found) for name, found in weighted.items()}


def _other_kind(problem: Problem, key: Key) -> tuple[bool, bool]:
    return key[0] != problem.training, key[1] != problem.gated


def _distance(problem: Problem, key: Key) -> float:
    return math.hypot(math.log(problem.k / key[2]), math.log(problem.n / key[3]))


_Nodes = dict[int, dict[str, Terms]]


def _between(m: int, nodes: _Nodes) -> dict[str, Terms]:
    """The terms for ``m`` tokens, interpolated in log m; beyond the nodes those of the nearest."""
    below = max((t for t in nodes if t <= m), default=min(nodes))
    above = min((t for t in nodes if t >= m), default=max(nodes))
    share = math.log(m / below) / math.log(above / below) if below < above else 0.0
    low, high = nodes[below], nodes[above]
    return {name: _mean([(1 - share, low[name]), (share, high[name])]) for name in low if name in high}


def _mean(weighted: Sequence[tuple[float, Terms]]) -> Terms:
    total = sum(weight for weight, _ in weighted)
    base, per_union, per_density, per_last = (sum(w * terms[i] for w, terms in weighted) / total for i in range(4))
    return base, per_union, per_density, per_last
