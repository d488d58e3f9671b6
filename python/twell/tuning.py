"""From a problem to the spec of the kernel that runs it, and to the strategy."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from twell import _tables
from twell._arguments import require_flag
from twell._runtime import device, geometry, specs


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in specs: "bfloat16", "float16"."""
    return str(dtype).removeprefix("torch.")


def family(index: int) -> str:
    """The family of kernels that device ``index`` runs, which has compute capability 8.0 at least."""
    return specs.SM90 if device.capability(index) == device.SM_90 else specs.PORTABLE


# Time of a wave of tiles of the gate GEMM by their tokens, as a multiple of that of 96 (NVIDIA H200, K = 1,024 to
# 4,096; the choices from it are within 1 % of the best at 27 shapes of 256 to 4,096 tokens).
_WAVE = {48: 0.72, 64: 0.77, 96: 1.0, 128: 1.36, 144: 1.49}

# Most tokens of the gate GEMM for few tokens; with more than 8, most neurons, too, per cluster that the GPU runs at a
# time: beyond, the other one keeps every multiprocessor busy. NVIDIA H200: 11.3 us against 14 at 64 tokens, K = 2,048,
# N = 5,632; 36.5 against 40.2 at 1 and 39 against 36.2 at 64 tokens, K = 4,096, N = 14,336.
FEW_GATE_PACK = 64
_FEWEST = 8
_FEW_NEURONS = 2 / 3 * geometry.TILE


@functools.lru_cache(4096)
def gate_pack(
    dtype: torch.dtype, m: int, n: int, clusters: int, invariant: bool = False, family: str = specs.SM90
) -> specs.GatePackSpec | specs.GatePackFewSpec:
    """The gate GEMM of ``m`` tokens and ``n`` neurons on a GPU that runs so many ``clusters`` of two CTAs at a time.

    ``invariant``: only kernels whose bits do not depend on m.
    """
    # the portable one has four times as many CTAs as `gate_pack`, for any number of neurons
    most = FEW_GATE_PACK if family == specs.PORTABLE or n <= _FEW_NEURONS * clusters else _FEWEST
    if not invariant and m <= most:
        tokens = next(t for t in specs.FEW_TOKENS if m <= t)
        return specs.GatePackFewSpec(dtype_name(dtype), tokens, family=family)
    if family == specs.PORTABLE:
        # all give the same bits
        small, large = specs.PORTABLE_GATE_TOKENS
        return specs.GatePackSpec(dtype_name(dtype), small if m <= small else large, family=family)

    def cost(tokens: int) -> float:
        # a cluster takes two tiles of tokens
        tiles = -(-m // (2 * tokens)) * geometry.tiles(n)
        return -(-tiles // clusters) * _WAVE[tokens]

    # all give the same bits
    return specs.GatePackSpec(dtype_name(dtype), min(specs.GATE_TOKENS, key=cost))


@functools.cache
def quantize_gate(dtype: torch.dtype, k: int) -> specs.QuantizeGateSpec:
    """Rows of ``k`` values in int8 for the screen of the gate; NotImplementedError beyond the largest class."""
    return specs.QuantizeGateSpec(dtype_name(dtype), specs.k_class(k, specs.QUANTIZE_K_CLASSES))


@functools.cache
def gate_screen(dtype: torch.dtype) -> specs.GateScreenSpec:
    """The int8 screen of the gate, for biases of a dtype."""
    return specs.GateScreenSpec(dtype_name(dtype))


@functools.cache
def list_candidates() -> specs.ListCandidatesSpec:
    """The lists of candidates by token tile."""
    return specs.ListCandidatesSpec()


@functools.cache
def sampled_gate(dtype: torch.dtype) -> specs.SampledGateSpec:
    """The gate GEMM at listed neurons."""
    return specs.SampledGateSpec(dtype_name(dtype))


# Most tokens at which this many CTAs share a token; with more as few do as hold the row. NVIDIA H200, K = 2,048,
# N = 5,632, 29 non-zeros per token, us of 4 and of 2 CTAs per token: "topic29" 19 and 24 at 128 tokens, 21 and 28 at
# 256, 33 and 31 at 512, where 1 takes 39; "uniform29" 13 and 11, 19 and 15, 33 and 25, where 1 takes 27.
TOKEN_CLUSTERS = {8: 32, 4: 256, 2: 512}


@functools.lru_cache(4096)
def up_down_token(
    dtype: torch.dtype, m: int, k: int, gated: bool, invariant: bool = False, family: str = specs.SM90
) -> specs.UpDownTokenSpec:
    """The up and down projections of ``m`` tokens, token by token: the fewer, the more CTAs share each.

    ``invariant``: the same number of CTAs, more than one, for any m: a launch with one CTA per token gives heavy tokens
    to clusters of two, and which are heavy depends on their neighbours. NotImplementedError for a hidden size beyond
    the largest class.
    """
    name, k_max = dtype_name(dtype), specs.k_class(k)
    if family == specs.PORTABLE:
        return specs.UpDownTokenSpec(name, k_max, 1, gated, family=family)
    fits = [c for c, classes in specs.TOKEN_K_CLASSES.items() if k <= classes[-1]]
    if invariant:
        cluster = min(c for c in fits if c > 1)
    else:
        cluster = max((c for c in fits if m <= TOKEN_CLUSTERS.get(c, 0)), default=min(fits))
    return specs.UpDownTokenSpec(name, specs.k_class(k, specs.TOKEN_K_CLASSES[cluster]), cluster, gated)


# Most clusters that share a token with many non-zeros: one adds up what they leave. Twice as many in a layer with a
# gate if all run at once, two CTAs per multiprocessor. NVIDIA H200, K = 4,096, N = 14,336, 1,720 non-zeros, us of 16
# and 32: 51.2 and 47.7 for one token, 52.5 and 58.0 for two, which do not; 1,966 of 16,384 without a gate 50.2 and
# 53.0.
MOST_PIECES = 16
# CTAs of such clusters per multiprocessor, where the largest clusters have short rows and elsewhere; most have nothing
# to do and leave at once. NVIDIA H200, us of 1 and 4: K = 2,048, 8 tokens of 29 non-zeros 12.4 and 13.2, 64 tokens of
# "topic29" 24.2 and 22.3; K = 4,096, 8 tokens of 1,720 non-zeros 108 and 88.
SHORT_ROWS, PIECE_CTAS = 2048, (1, 4)


def token_pieces(m: int, spec: specs.UpDownTokenSpec, multiprocessors: int) -> int:
    """Most clusters of ``up_down_token`` that share one of ``m`` tokens."""
    if not spec.shared:
        return 1
    short = spec.cluster == max(TOKEN_CLUSTERS) and spec.k_max <= SHORT_ROWS
    ctas, most = PIECE_CTAS[0 if short else 1] * multiprocessors, MOST_PIECES
    if spec.gated and spec.family == specs.SM90 and most * m * spec.cluster <= multiprocessors:
        most *= 2
    return max(1, min(most, ctas // (m * spec.cluster)))


# Most tokens of strategy "union" that one kernel computes by tiles of 16. NVIDIA H200, K = 2,048, N = 5,632, us of one
# kernel and of three: "topic29" 24 and 50 at 512 tokens, 41 and 53 at 1,024, 85 and 60 at 2,048; "uniform29" 40 and 74,
# 62 and 76, 104 and 100.
UNION_TILE_TOKENS = 1024


@functools.cache
def up_down_tile(
    dtype: torch.dtype, m: int, k: int, n: int, gated: bool, family: str = specs.SM90
) -> specs.UpDownTileSpec | None:
    """The up and down projections of strategy "union" for few tokens; None for sizes that three kernels compute."""
    name = dtype_name(dtype)
    if family != specs.SM90 or not gated or m > UNION_TILE_TOKENS or k > specs.TILE_K_CLASSES[-1]:
        return None
    # sums of more terms are in parts, which this kernel does not make
    if n > min(geometry.MAX_TILE_NEURONS, geometry.LONGEST_SUM[name]):
        return None
    return specs.UpDownTileSpec(name, specs.k_class(k, specs.TILE_K_CLASSES))


@functools.cache
def unpack(dtype: torch.dtype) -> specs.UnpackSpec:
    """TwELL to dense."""
    return specs.UnpackSpec(dtype_name(dtype))


# A gate with fewer values goes to torch's operators, unless a graph is captured: the host is the bound, and one
# operator of this package costs it as much time as two of torch's. An estimate.
FUSED_ELEMENTS = 1 << 20


# Most tokens for which dense layers compute gate and up in one product, if the weights lie one behind the other. It
# saves 6 to 14 % of the layer at 8 to 512 tokens, and nothing beyond (NVIDIA H200, K = 1,024, 2,048 and 4,096).
MERGED_TOKENS = 512


@functools.cache
def reglu(dtype: torch.dtype, backward: bool) -> specs.RegluSpec:
    """``relu(gate) * up`` of dense layers, or its gradients."""
    return specs.RegluSpec(dtype_name(dtype), backward)


@functools.cache
def compact(dtype: torch.dtype, training: bool, family: str = specs.SM90) -> specs.CompactSpec:
    """TwELL to the hybrid format."""
    return specs.CompactSpec(dtype_name(dtype), training, family=family)


@functools.cache
def sampled_up(dtype: torch.dtype, training: bool, family: str = specs.SM90) -> specs.SampledUpSpec:
    """The up projection at the non-zeros."""
    return specs.SampledUpSpec(dtype_name(dtype), training, family=family)


@functools.cache
def sampled_grad(dtype: torch.dtype, gated: bool, family: str = specs.SM90) -> specs.SampledGradSpec:
    """Gradients of the gate and the up projection at the non-zeros."""
    return specs.SampledGradSpec(dtype_name(dtype), gated, family=family)


@functools.cache
def gathered(dtype: torch.dtype, products: int, family: str = specs.SM90) -> specs.GatheredSpec:
    """The sum of ``products`` sparse matrices times weights; 0: one matrix, the gate values of the entries."""
    return specs.GatheredSpec(dtype_name(dtype), products, family=family)


@functools.cache
def rank() -> specs.RankSpec:
    """Neurons by popularity."""
    return specs.RankSpec()


@functools.cache
def matrix_transpose() -> specs.MatrixTransposeSpec:
    """A matrix of 16-bit values, transposed."""
    return specs.MatrixTransposeSpec()


@functools.cache
def transpose(dtype: torch.dtype, gated: bool, family: str = specs.SM90) -> specs.TransposeSpec:
    """The non-zeros by neuron."""
    return specs.TransposeSpec(dtype_name(dtype), gated, family=family)


@functools.cache
def weight_grad(dtype: torch.dtype, gated: bool, bias: bool, family: str = specs.SM90) -> specs.WeightGradSpec:
    """Gradients of all weights and biases."""
    return specs.WeightGradSpec(dtype_name(dtype), gated, bias, family=family)


@functools.cache
def overflow(dtype: torch.dtype, mode: str, family: str = specs.SM90) -> specs.OverflowSpec:
    """A pass (forward, backward) of a training step whose non-zeros exceed the hybrid format."""
    return specs.OverflowSpec(dtype_name(dtype), mode, family=family)


# Strategies


STRATEGIES = ("auto", "dense", "row", "union")
SCREENED = _tables.SCREENED
# names of version 0.2, and what a caller says for them
_GONE = {
    "screened": '"auto" screens where that was measured to pay, unless screen="off"',
    "proven": 'use "union", which never screens',
    "invariant": 'use strategy="row", invariant=True',
}

# A change of strategy must promise to save this share of the time, about the error of the predictions.
MARGIN = 0.02

# A training step with more non-zeros than the hybrid format holds takes 1.4 times as long as dense (H200, K = 2,048,
# N = 5,632). The sparse route starts below this share of the capacity, so that batches may vary by a sixth.
SAFE_SHARE = 0.85

# Inference of a layer not yet measured, with more tokens than one kernel of "union" takes, runs "union" if, with one
# non-zero in 190 neurons, it would take at most this multiple of the time of "row": the worst pattern makes it a few
# times slower than dense, and "row" thirty times. With fewer tokens neither is the safer one.
WORST_CASE_PREMIUM = 1.25
ASSUMED_DENSITY = 1 / 190

# Bytes per second, read and written, of `matrix_transpose` (NVIDIA H200, driver 580.159.04: 14.6 us for 5,632 x 2,048,
# 5.1 us for 2,816 x 1,024, 66 us for 14,336 x 4,096, weights from memory). The rates of dense layers are those of
# cuBLAS at M = 16,384 and of reading weights from memory there; clocks vary them by 8 %.
COPY_BYTES = 3.1e12
_DENSE_FLOP = 790e12
_DENSE_BYTES = 4.2e12
# Seconds of the host for a call without gradients and for a training step: three nn.Linear with their activation, and
# strategies chosen by "auto" (H100, 2026-11-25, `h100_host.json`, the slowest host measured, so that "auto" errs
# towards dense; the screen has four launches more).
HOST_SECONDS = {
    False: {"dense": 105e-6, "row": 155e-6, "union": 214e-6, SCREENED: 270e-6},
    True: {"dense": 630e-6, "union": 1280e-6, SCREENED: 1340e-6},
}
# Of a dense layer of up to 512 tokens: the seconds that one product for gate and up saves, those beyond its products,
# and the time to read weights over that at the rate above (NVIDIA H200: 3 to 5 us saved; in two products 18, 34 and 118
# us predicted for K = 1,024, 2,048 and 4,096, and 20, 32 and 97 measured).
_MERGED_SAVES, _DENSE_STARTS, _FEW_TOKENS_READ = 3.5e-6, 13e-6, 1.25


# Most values of x for which "auto" takes "row". NVIDIA H100, ms of "row" and of "union" (`h100_row.json`), "uniform29":
# K = 2,048 and N = 5,632 0.171 and 0.171 for 2,048 tokens, 1.25 and 1.10 for 16,384; K = 4,096 and N = 14,336 0.344
# and 0.344 for 1,024, 2.56 and 2.13 for 8,192. "union" is faster by more for every other pattern.
ROW_VALUES = 1 << 22


class Problem(NamedTuple):
    """The sizes of a call: x [m, k], n neurons, with or without gate; ``training`` where a gradient is needed.

    ``down_copied``: whether the down weight is stored as in nn.Linear, so that sparse kernels read a copy by rows, made
    at each forward and each backward pass. ``merged``: whether a dense layer computes gate and up in one product.
    ``eager``: whether the host launches each kernel in the call, rather than before it in a CUDA graph.
    """

    m: int
    k: int
    n: int
    gated: bool
    training: bool
    down_copied: bool = False
    merged: bool = False
    # pickles of version 0.2 have a bool of another meaning here; then the next call decides again
    eager: bool = False


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
    """A strategy, the reason, and the predicted time of each strategy as a multiple of dense's; {} if unknown."""

    strategy: str
    reason: str
    costs: dict[str, float]


def require_strategy(requested: object, invariant: object = False) -> None:
    """Raise ValueError unless ``requested`` is the name of a strategy, and one that may be ``invariant`` if it is."""
    if requested not in STRATEGIES:
        if isinstance(requested, str) and requested in _GONE:
            raise ValueError(f'strategy "{requested}" is gone: {_GONE[requested]}')
        *names, last = (f'"{name}"' for name in STRATEGIES)
        raise ValueError(f"strategy must be {', '.join(names)} or {last}, got {requested!r}")
    require_flag("invariant", invariant)
    if invariant and requested in ("dense", "union"):
        raise ValueError(f'strategy must be "auto" or "row" with invariant=True, got "{requested}"')


# Tokens of the group of which ``Figures.heaviest`` is the mean.
HEAVY_GROUP = geometry.STATS_ROWS
# With at most this many tokens a call takes as long as its heaviest tokens: "row" computes them one by one, and up to
# 1,024 "union" by tiles of 16. With more, others hide them, but up to here the term still helps.
# Leaving each layer out in turn, choices lost 4.75 % with the term for "row" alone, 1.88 and 1.74 % with it for both
# up to 1,024 and 4,096 tokens.
MOST_WAITING = 4096


def waits(problem: Problem) -> bool:
    """Whether the cost has a term for the heaviest tokens. In one group they are all tokens."""
    return not problem.training and HEAVY_GROUP < problem.m <= MOST_WAITING


def shares(problem: Problem, figures: Figures) -> tuple[float, float, float]:
    """The shares of the n neurons that a tile of tokens, one token and one of the heaviest group fire.

    Costs are linear in them. Those of independent tokens stand in for unknown ones; the union is at most theirs. Raises
    ValueError for figures that are negative or not finite.
    """
    if not all(figure is None or 0 <= figure < math.inf for figure in figures):
        raise ValueError(f"figures must be finite and not negative, got {figures}")
    density = min(figures.nonzeros / problem.n, 1.0)
    union = 1 - (1 - density) ** min(problem.m, geometry.TOKEN_TILE)
    if figures.heaviest is None:
        # about the largest of so many sums of a group
        deviation = math.sqrt(density * (1 - density) / (HEAVY_GROUP * problem.n))
        heaviest = density + deviation * math.sqrt(2 * math.log(max(problem.m / HEAVY_GROUP, 1.0)))
    else:
        heaviest = figures.heaviest / problem.n
    return union if figures.union is None else min(union, figures.union), density, min(heaviest, 1.0)


def factors(problem: Problem, figures: Figures, strategy: str) -> tuple[float, float, float, float]:
    """What the terms of a cost are multiplied by; ``figures.candidates`` must be known for that of ``SCREENED``."""
    union, density, heaviest = shares(problem, figures)
    if strategy != SCREENED:
        return 1.0, union, density, heaviest
    if figures.candidates is None:
        raise ValueError(f"candidates must be known for the cost of {SCREENED}, got {figures}")
    # a neuron that fires is a candidate
    return 1.0, union, density, min(max(union, figures.candidates), 1.0)


def costs(
    problem: Problem, figures: Figures, table: _tables.Table | None = None, screen: bool = True
) -> dict[str, float]:
    """Predicted time of each strategy that the table has for ``problem``, as a multiple of dense's.

    ``table`` is the shipped one by default. ``SCREENED`` has a time where ``figures.candidates`` are known, with
    ``screen``.
    """
    copies, dense = copy_cost(problem), merged_cost(problem)
    predicted = {}
    for name, terms in coefficients(problem, table).items():
        if name == SCREENED and (figures.candidates is None or not screen):
            continue
        time = sum(term * factor for term, factor in zip(terms, factors(problem, figures, name)))
        predicted[name] = (time + copies) / dense
    if SCREENED in predicted and "union" in predicted:
        # the terms are of few candidates: a screen saves at most the gates of all others, one of dense's products
        others = 1 - factors(problem, figures, SCREENED)[3]
        predicted[SCREENED] = max(predicted[SCREENED], predicted["union"] - others / (3 if problem.gated else 2))
    predicted["dense"] = 1.0
    return _eager(problem, predicted) if problem.eager else predicted


def _eager(problem: Problem, predicted: dict[str, float]) -> dict[str, float]:
    """Times of calls that the host launches: no less than its own, and as multiples of such a dense call's."""
    passes = 3 if problem.training else 1
    dense, host = passes * _dense_seconds(problem), HOST_SECONDS[problem.training]
    seconds = {name: max(host.get(name, 0.0), time * dense) for name, time in predicted.items()}
    return {name: time / seconds["dense"] for name, time in seconds.items()}


def worth_screening(problem: Problem, figures: Figures | None, table: _tables.Table | None = None) -> bool:
    """Whether a screen that listed nothing but the union would be the fastest: else none need be counted.

    By the times of the GPU: graphs decide by the figures of eager calls, in which the host may be the limit.
    """
    if figures is None:
        return False
    predicted = costs(problem._replace(eager=False), figures._replace(candidates=0.0), table)
    return SCREENED in predicted and predicted[SCREENED] <= min(predicted.values())


def waits_for_host(problem: Problem) -> bool:
    """Whether the host may take longer than the kernels of a dense call; calls of this package cost it up to twice."""
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
    return max(2 * problem.m * weights * values / _DENSE_FLOP, 2 * weights * values / _DENSE_BYTES)


def merged_cost(problem: Problem) -> float:
    """The time of a dense layer of this storage as a multiple of one that computes gate and up in two products."""
    if not problem.merged:
        return 1.0
    values = problem.k * problem.n
    products = max(6 * problem.m * values / _DENSE_FLOP, _FEW_TOKENS_READ * 6 * values / _DENSE_BYTES)
    return 1 - _MERGED_SAVES / (_DENSE_STARTS + products)


def decide(
    problem: Problem,
    figures: Figures | None,
    current: str | None,
    table: _tables.Table | None = None,
    screen: bool = True,
) -> Decision:
    """Choose the strategy for ``problem`` from measured ``figures`` and the ``current`` strategy; either may be None.

    A pure function of these, of the table of costs, by default the shipped one, and of ``screen``, as in ``costs``.
    Without figures inference takes a sparse strategy and training the dense one. Calls of a kind for which the table
    must not stand in (``Table.lacks``) are dense.
    """
    if table is not None and (lacks := table.lacks(problem.training, problem.gated)):
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


def _measured(
    problem: Problem, figures: Figures, current: str | None, table: _tables.Table | None, screen: bool
) -> Decision:
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
    return problem.m * problem.k <= ROW_VALUES


def _fresh(problem: Problem, table: _tables.Table | None) -> Decision:
    if problem.training:
        return Decision("dense", "nothing measured yet, and an untrained layer fires half of its neurons", {})
    assumed = costs(problem, Figures(ASSUMED_DENSITY * problem.n, None), table)
    row, union = assumed.get("row", 1.0), assumed.get("union", math.inf)
    if problem.m > UNION_TILE_TOKENS and union <= WORST_CASE_PREMIUM * row and union < 1:
        return Decision("union", "nothing measured yet, and its worst case is bounded", {})
    strategy = min((row if _takes_row(problem) else 1.0, "row"), (union, "union"), (1.0, "dense"))[1]
    return Decision(strategy, f"nothing measured yet, and the best for {problem.m} tokens of a sparse layer", {})


def nearest(problem: Problem, table: _tables.Table | None = None) -> _tables.Key:
    """(training, gated, K, N) of the measured layer nearest in kind, and then in log K and log N."""
    measured = (table or _tables.SHIPPED).costs
    return min(measured, key=lambda key: (*_other_kind(problem, key), _distance(problem, key)))


def coefficients(problem: Problem, table: _tables.Table | None = None) -> dict[str, _tables.Terms]:
    """The terms of each sparse strategy's cost: base, then per share of the union, of non-zeros, of the heaviest group.

    The last one of ``SCREENED`` is per share of candidates instead. A table without it never has it chosen.

    They are those of the measured layers of this kind that run the same kernels, weighted by 1 / distance^2 in log K
    and log N. Each layer's are interpolated in log M between numbers of tokens that run the same kernels, since costs
    jump where kernels change. Fewer tokens than were measured have no sparse strategy; more have the terms of the most.
    More neurons than ``Table.union_neurons`` have no "union". A kind of calls that the table lacks (``Table.lacks``)
    has no strategy.
    """
    return _coefficients(problem._replace(down_copied=False, merged=False, eager=False), table or _tables.SHIPPED)


@functools.lru_cache(1024)
def _coefficients(problem: Problem, table: _tables.Table) -> dict[str, _tables.Terms]:
    if table.lacks(problem.training, problem.gated):
        return {}
    kind = _other_kind(problem, nearest(problem, table))
    layers = {key: nodes for key, nodes in table.costs.items() if _other_kind(problem, key) == kind}
    alike = {key: _same_kernels(problem, key, nodes) for key, nodes in layers.items()}
    # best are layers that ran these kernels with fewer tokens, too; a layer of other kernels is better than none
    started = {key: nodes for key, nodes in alike.items() if nodes and min(nodes) <= problem.m}
    alike = started or {key: nodes for key, nodes in alike.items() if nodes} or layers
    weighted: dict[str, list[tuple[float, _tables.Terms]]] = {}
    for key, nodes in alike.items():
        if problem.m >= min(layers[key]):
            weight = max(_distance(problem, key), 1e-3) ** -2
            for name, terms in _between(problem.m, nodes).items():
                if name != "row" and problem.n > table.union_neurons:
                    continue
                if name == SCREENED and not table.screens:
                    continue
                weighted.setdefault(name, []).append((weight, terms))
    return {name: _mean(found) for name, found in weighted.items()}


def _other_kind(problem: Problem, key: _tables.Key) -> tuple[bool, bool]:
    return key[0] != problem.training, key[1] != problem.gated


def _distance(problem: Problem, key: _tables.Key) -> float:
    return math.hypot(math.log(problem.k / key[2]), math.log(problem.n / key[3]))


_Nodes = dict[int, dict[str, _tables.Terms]]


def _same_kernels(problem: Problem, key: _tables.Key, nodes: _Nodes) -> _Nodes:
    """The numbers of tokens at which a measured layer runs the kernels that ``problem`` does, as ``_kernels`` says."""
    _, gated, k, n = key
    wanted = _kernels(problem)
    return {m: entry for m, entry in nodes.items() if _kernels(Problem(m, k, n, gated, problem.training)) == wanted}


def _kernels(problem: Problem) -> tuple[bool, bool]:
    """Which kernels run, in two parts: whether ``m`` is at most 64, and whether "union" is one kernel.

    Other kernels change with ``m``, too, where the costs on both sides are near enough to interpolate.
    """
    m, k, n, gated, training = problem[:5]
    if training:
        return False, False
    return m <= FEW_GATE_PACK, up_down_tile(torch.bfloat16, m, k, n, gated) is not None


def _between(m: int, nodes: _Nodes) -> dict[str, _tables.Terms]:
    """The terms for ``m`` tokens, interpolated in log m; beyond the nodes those of the nearest."""
    below = max((t for t in nodes if t <= m), default=min(nodes))
    above = min((t for t in nodes if t >= m), default=max(nodes))
    share = math.log(m / below) / math.log(above / below) if below < above else 0.0
    low, high = nodes[below], nodes[above]
    return {name: _mean([(1 - share, low[name]), (share, high[name])]) for name in low if name in high}


def _mean(weighted: Sequence[tuple[float, _tables.Terms]]) -> _tables.Terms:
    total = sum(weight for weight, _ in weighted)
    base, per_union, per_density, per_last = (sum(w * terms[i] for w, terms in weighted) / total for i in range(4))
    return base, per_union, per_density, per_last
