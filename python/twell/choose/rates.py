"""Seconds of each route of a layer, from its sizes and its sparsity by the rates of a card, and the choice by them.

A rate is of memory, of the L2 cache or of tensor cores, or the time of a start, a wave of tiles or an entry.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from twell.choose.cards import SHIPPED, Card, Rates
from twell.choose.tuning import decode, gate_pack
from twell.runtime import geometry, specs

# "union" with the int8 screen of the gate, which "auto" alone may choose
SCREENED = "union+screen"
ROUTES = ("dense", "row", "union", SCREENED)
TILE = geometry.TOKEN_TILE
# tokens of the group of which ``Figures.heaviest`` is the mean
HEAVY_GROUP = geometry.STATS_ROWS


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

    def checked(self) -> "Figures":
        """These; raises ValueError for any that are negative or not finite."""
        if not all(figure is None or 0 <= figure < math.inf for figure in self):
            raise ValueError(f"figures must be finite and not negative, got {self}")
        return self


class Measured(NamedTuple):
    """The layers that rates were fitted to.

    k, weights: the least and the most of K, and of K * N. share: the largest share of the neurons that fired for a
    token. gpu: the GPU, if it is another than the card's.
    """

    k: tuple[int, int]
    weights: tuple[int, int]
    share: float
    gpu: str = ""

    def apart(self, k: int, n: int, share: float = 0.0) -> float:
        """The largest factor by which a layer is beyond these; 1 within."""
        beyond = [share / self.share, self.k[0] / k, k / self.k[1], self.weights[0] / k / n, k * n / self.weights[1]]
        return max(1.0, *beyond)


# of cards that ship, by the width of weights: 16 bits, e4m3, and experts
MEASURED = {
    "16 bits": Measured((768, 5120), (768 * 3072, 5120 * 13824), 0.2),
    "e4m3": Measured((2048, 4096), (2048 * 5632, 4096 * 14336), 0.12),
    "experts": Measured((1024, 2688), (1024 * 2688, 2688 * 1856), 0.2, "NVIDIA H100"),
}

# products of cuBLAS: tiles of tokens and neurons, and parts of K
_TILES, _PARTS = ((64, 128), (128, 128), (128, 256), (256, 128)), (1, 2, 4)
# us and TB/s, read and written, of ``matrix_transpose`` of weights from memory: NVIDIA H200, 5.1 us for 2,816 x 1,024,
# 14.6 for 5,632 x 2,048, 66 for 14,336 x 4,096.
_COPY_START, _COPY_BYTES = 2.0, 3.67


def _norm(power: float, *times: float) -> float:
    """Between the larger and the sum: parts that overlap."""
    return math.pow(sum([max(time, 1e-9) ** power for time in times]), 1 / power)


@functools.lru_cache(4096)
def _product(m: int, n: int, k: int, sms: int) -> float:
    """Mflop of a multiprocessor in a product [m, k] x [k, n]: the best tile's waves."""

    def waves(bm: int, bn: int, parts: int) -> float:
        of_tiles = math.ceil(-(-m // bm) * -(-n // bn) * parts / sms)
        return of_tiles * (k / parts) * (1 + 0.02 * (parts > 1)) * 2 * bm * bn / 1e6

    return min(waves(*tile, parts) for tile in _TILES for parts in _PARTS)


@functools.lru_cache(4096)
def _gate_tiles(m: int, n: int, sms: int) -> tuple[int, int, float]:
    """Tokens of a tile of the gate GEMM, waves of clusters, each of two CTAs and tiles, and the busy share of them."""
    clusters = max(sms // 2, 1)
    tokens = gate_pack(torch.bfloat16, m, n, clusters).tokens
    tiles = -(-m // (2 * tokens)) * geometry.tiles(n)
    return tokens, -(-tiles // clusters), min(tiles / clusters, 1.0)


# us of the host for a call without gradients and for a training step, by the strategy that "auto" chose. Ratios are
# those of `host.json` to three nn.Linear with their activation, which take the fastest host that was measured 60 and
# 300 us, since hosts differ by a factor of two: where the GPU is the limit on a fast host, its times decide. Estimates:
# those of the screen, which has more launches, of dense, a third more than three nn.Linear (six calls, one H200) and
# the share that passes before the first kernel starts.
HOST = {
    False: {"dense": 80.0, "row": 23.0, "union": 32.0, SCREENED: 40.0},
    True: {"dense": 300.0, "union": 200.0, SCREENED: 220.0},
}
_FIRST_LAUNCH = 0.3
# The time of dense without a gate over that with one: two of three products.
_PAIR = 0.7


def in_one_pass(problem: Problem, card: Card | None = None) -> bool:
    """Whether a sparse call is of so few tokens that one kernel computes the layer, on the card."""
    if problem.training or not problem.one_pass or problem.n > geometry.MAX_NEURONS:
        return False
    if not (card or SHIPPED).screens:
        return False
    dtype = torch.float8_e4m3fn if problem.float8 else torch.bfloat16
    return decode(dtype, problem.m, problem.k, "gated" if problem.gated else "plain") is not None


def shares(problem: Problem, figures: Figures) -> tuple[float, float, float]:
    """The shares of the n neurons that a tile of tokens, one token and one of the heaviest group fire.

    Those of independent tokens stand in for unknown ones, and the union is at most theirs.
    """
    density = min(figures.nonzeros / problem.n, 1.0)
    independent = _grown(density, min(problem.m, TILE))
    union = independent if figures.union is None else min(independent, figures.union)
    heaviest = density if figures.heaviest is None else min(figures.heaviest / problem.n, 1.0)
    return union, density, heaviest


def _grown(share: float, tokens: float) -> float:
    """The share of neurons that so many independent tokens fire, if one fires ``share``."""
    return 1.0 if share >= 1 else -math.expm1(math.log1p(-share) * tokens)


def _alike(union: float, density: float, tokens: int) -> float:
    """The power of their number by which unions of tokens grow: 1 of independent ones, 0 of equal ones."""
    if tokens < 2 or not 0 < density < union < 1:
        return 0.0 if union <= density else 1.0
    ratio = math.log1p(-union) / math.log1p(-density)
    return min(max(math.log(ratio) / math.log(tokens), 0.0), 1.0)


def seconds(problem: Problem, figures: Figures, card: Card | None = None) -> dict[str, float]:
    """Seconds of each route that the card has for a call, by default the shipped card.

    ``SCREENED`` has a time where ``figures.candidates`` are known. Raises ValueError for figures that are negative or
    not finite.
    """
    card, figures = card or SHIPPED, figures.checked()
    part, figures, slices = of_slice(problem, figures)
    rates = card.float8 or card.rates if problem.float8 else card.rates
    found = (_training if problem.training else _inference)(part, figures, rates, card)
    if part.n > card.union_neurons:
        found = {route: us for route, us in found.items() if route in ("dense", "row")}
    found = {route: slices * us for route, us in found.items()}
    copies = copies_us(problem)
    for route in found:
        # e4m3 weights lie as sparse kernels read them, so dense products copy one
        if (route == "dense") == problem.float8:
            found[route] += copies
    if problem.eager:
        host = _host(problem)
        found = {r: max(host.get(r, 0.0), us) + _FIRST_LAUNCH * host.get(r, 0.0) for r, us in found.items()}
    return {route: us / 1e6 for route, us in found.items()}


def _host(problem: Problem) -> dict[str, float]:
    host = HOST[problem.training]
    return host if problem.gated else {**host, "dense": _PAIR * host.get("dense", 0.0)}


def of_slice(problem: Problem, figures: Figures) -> tuple[Problem, Figures, int]:
    """One of the slices that a layer runs as, its figures, and how many there are."""
    slices = geometry.neuron_slices(problem.n)
    if len(slices) < 2:
        return problem, figures, 1
    heaviest = None if figures.heaviest is None else figures.heaviest / len(slices)
    figures = figures._replace(nonzeros=figures.nonzeros / len(slices), heaviest=heaviest)
    # a cluster's sums would be longer than slices are
    return problem._replace(n=slices[0][1], one_pass=False), figures, len(slices)


def copies_us(problem: Problem) -> float:
    """us of copies of the down weight: backward makes one more."""
    if not (problem.down_copied or problem.float8):
        return 0.0
    read = (2 - problem.float8) * problem.k * problem.n / 1e6
    return (1 + problem.training) * (_COPY_START + 2 * read / _COPY_BYTES)


def dense_us(problem: Problem, rates: Rates, sms: int) -> float:
    """us of a dense call in a CUDA graph."""
    m, k, n, gated, training = problem[:5]
    up, read = 1 + gated, (2 - problem.float8) * n * k / 1e6
    if training:
        flop = (up + 1) * (_product(m, n, k, sms) + _product(m, k, n, sms) + _product(n, k, m, sms))
        products = _norm(4, flop / rates.dense_flop, 3 * (up + 1) * read / rates.dense_memory)
        return rates.step_launch * (3 * up + 2) + rates.step_pass * m * n * up / 1e6 + products
    merged = problem.merged and gated
    first = _product(m, 2 * n, k, sms) if merged else up * _product(m, n, k, sms)
    products = _norm(4, (first + _product(m, k, n, sms)) / rates.dense_flop, (up + 1) * read / rates.dense_memory)
    return rates.launch * (up + 2 - merged) + rates.dense_pass * m * n * up / 1e6 + products


def _gate(problem: Problem, rates: Rates, sms: int) -> float:
    """us of the gate GEMM."""
    m, k, n = problem[:3]
    tokens, waves, busy = _gate_tiles(m, n, sms)
    wave = _norm(4, tokens / 96 * rates.gate_flop, busy * rates.gate_read)
    read = (2 - problem.float8) * n * k / 1e6 / rates.gate_memory
    tokens_in_e4m3 = 3 * m * k / 1e6 / rates.quantise if problem.float8 else 0.0
    return rates.gate_start + tokens_in_e4m3 + _norm(4, waves * k * wave / 1e3, read)


def _inference(problem: Problem, figures: Figures, r: Rates, card: Card) -> dict[str, float]:
    """us of each route in a CUDA graph."""
    m, k, n, gated = problem[:4]
    sms, up, width = card.sms, 1 + gated, 2 - problem.float8
    union, density, heavy = shares(problem, figures)
    read, dense = width * n * k / 1e6, dense_us(problem, r, card.sms)
    if in_one_pass(problem, card):
        few = r.few_start + r.few_gate * gated + r.few_left * max(m - 8, 0) * k / 4096
        few += read * (1 + union * up) / r.dense_memory
        return {"row": few, "union": few, "dense": dense}
    gate, tiles, alpha = _gate(problem, r, sms), -(-m // TILE), _alike(union, density, min(m, TILE))
    # rows of neurons from L2, as far as those that fire stay there, and those of the heaviest token by its CTAs
    row_bytes, padded = width * up * k, specs.k_class(k) / k
    fired = n * row_bytes / 1e6 * _grown(union, max(m / TILE, 1.0) ** alpha)
    rows = m * density * n * row_bytes * padded / 1e6 / r.row_l2
    alone = heavy * n * row_bytes * padded / 1e5 / r.row_alone
    row = gate + r.row_pass * m * n / 1e6 + fired / r.row_memory + _norm(2, rows, alone)
    # products of tiles of tokens and the neurons that these fire
    flop = 2 * TILE / 1e6
    ups = _norm(4, tiles * (union * n + 32) * k / sms, 256 * k) * flop / r.up_flop * gated
    downs = _norm(4, tiles * math.ceil(k / 256) / sms, 1.0) * (union * n + 32) * 256 * flop / r.down_flop
    heavy_entries = r.heavy_entry / 1e4 * heavy * n * min(m, TILE)
    body = ups + downs + (r.lists + heavy_entries) * (1 + tiles / sms) + up * read * union / 4
    body += r.entry * m * density * n * k / 2048 / 1e6
    found = {"dense": dense, "row": row, "union": gate + body}
    if figures.candidates is not None and card.screens and not problem.float8:
        found[SCREENED] = _screen(problem, max(union, figures.candidates), r, sms) + body
    return found


def _screen(problem: Problem, listed: float, r: Rates, sms: int) -> float:
    """us of the int8 screen and the gates of the candidates that it lists."""
    m, k, n = problem[:3]
    waves = -(-(-(-m // 256) * -(-n // 256)) // (sms // 2))
    sampled = -(-m // TILE) * (min(listed, 1) * n + 32) * k * 2 * TILE / 1e6 / r.sampled_flop / sms
    return r.screen_start + 3 * (n + m) * k / 1e6 / r.quantise + waves * k * r.int8_wave / 1e3 + sampled


def _training(problem: Problem, figures: Figures, r: Rates, card: Card) -> dict[str, float]:
    """us of each route of a training step in a CUDA graph."""
    m, k, n, gated = problem[:4]
    up, read, sms = 1 + gated, 2 * n * k / 1e6, card.sms
    union, density, _ = shares(problem, figures)
    body = -(-m // TILE) * (union * n + 32) * k * 2 * TILE / 1e6 * (2 * up + 1) / r.step_flop / sms
    body += (up + 1) * read / r.step_memory + r.step_start + r.step_entry * m * density * n * k / 2048 / 1e6
    found = {"dense": dense_us(problem, r, sms), "union": _gate(problem, r, sms) + body}
    if figures.candidates is not None and card.screens:
        found[SCREENED] = _screen(problem, max(union, figures.candidates), r, sms) + body
    return found


def experts_seconds(
    pairs: int, touched: float, fired: float, n: int, k: int, gated: bool, card: Card | None = None
) -> dict[str, float]:
    """Seconds of a layer of experts by "row" and, by grouped products of PyTorch, "dense".

    ``pairs`` of a token and an expert have ``touched`` experts in all. Of the ``n`` neurons of each the share ``fired``
    fires for any of its tokens or, with a gate, for one token.
    """
    of = (card and card.experts) or SHIPPED.experts
    assert of is not None
    products, weights = 2 + gated, 2.0 * n * k / 1e6
    flop = pairs * weights / of.flop
    rows = fired * weights * (2 * pairs if gated else touched)
    row = of.start + max(touched * weights / of.memory, flop) + rows / of.row_memory
    dense = of.grouped_start + products * max(touched * weights / of.grouped_memory, flop)
    return {"row": row / 1e6, "dense": dense / 1e6}


# "auto" changes its mind, or leaves dense, for this share of the time, about the error of predictions.
MARGIN = 0.02
# A training step with more non-zeros than the hybrid format holds takes 1.4 times as long as dense (H200, K = 2,048,
# N = 5,632). The sparse route starts below this share of the capacity, so that batches may vary by a sixth.
SAFE_SHARE = 0.85
# Training keeps room for this multiple of the most non-zeros per token in recent measurements. Batches of fewer tokens
# than this vary more and need less memory; they keep as much room as there may be.
ROOM, _STEADY_TOKENS = 1.5, 1024
# Inference of a layer not yet measured runs "union" if, with one non-zero in 190 neurons, it would take at most this
# multiple of the time of "row": the worst pattern makes it a few times slower than dense, and "row" thirty times.
WORST_CASE_PREMIUM, ASSUMED_DENSITY = 1.25, 1 / 190
# Most tokens of CUDA graphs that are dense if nothing was measured before: sparse rows of a layer that is not sparse
# lose much: at 64 tokens, with 10 % of the neurons firing, a step of a served 8B model took 2.6 times stock's time
# (NVIDIA H200, `engine_ten.json`). Calls in one pass lose little, and more tokens take the bounded "union".
UNSURE_GRAPHS = 512


class Decision(NamedTuple):
    """A route, the reason, and the predicted time of each route as a multiple of dense's; {} if unknown.

    final: whether figures cannot change it.
    """

    strategy: str
    reason: str
    costs: dict[str, float]
    final: bool = False


UNTRAINED = Decision("dense", "nothing measured yet, and an untrained layer fires half of its neurons", {})


def held(problem: Problem, recent: Sequence[float]) -> int:
    """Non-zeros per token for which a training call keeps room, by the means of ``recent`` calls; 0: the most."""
    if not problem.training or not recent or problem.m < _STEADY_TOKENS:
        return 0
    return max(8, math.ceil(ROOM * max(recent) / 8) * 8)


def decide(
    problem: Problem, figures: Figures | None, current: str | None = None, card: Card | None = None, screen: bool = True
) -> Decision:
    """Choose the route of a call from measured ``figures`` and the ``current`` one; either may be None.

    A pure function of these, of the card, by default the shipped one, and of whether "union" may ``screen``. Without
    figures inference takes a sparse route, except in graphs of few tokens, and training the dense one.
    """
    if in_one_pass(problem, card) and not problem.down_copied:
        reason = "so few tokens take one pass over the weights, whatever share fires"
        return Decision("row", reason, {} if figures is None else _relative(problem, figures, card), final=True)
    decision = _fresh(problem, card) if figures is None else _measured(problem, figures, current, card, screen)
    for changed, says in (
        ({"down_copied": False}, "copies of the down weight outweigh {}, which needs none where it is stored by rows"),
        ({"eager": False}, "the host is the limit; {} in a graph"),
    ):
        other = problem._replace(**changed)
        if decision.strategy == "dense" and other != problem:
            instead = decide(other, figures, current, card, screen).strategy
            if instead != "dense":
                return decision._replace(reason=f"{decision.reason}; {says.format(instead)}")
    return decision


def _relative(problem: Problem, figures: Figures, card: Card | None) -> dict[str, float]:
    found = seconds(problem, figures, card)
    return {route: time / found["dense"] for route, time in found.items()}


def _measured(problem: Problem, figures: Figures, current: str | None, card: Card | None, screen: bool) -> Decision:
    predicted = _relative(problem, figures if screen else figures._replace(candidates=None), card)
    if problem.training:
        part, own, _ = of_slice(problem, figures)
        room = geometry.hybrid_capacity(part.m, part.n) / max(part.m, 1)
        if own.nonzeros > SAFE_SHARE * room * (1 if current in (None, "dense") else 1 + MARGIN):
            reason = f"{figures.nonzeros:.0f} non-zeros per token are too near the sparse route's limit, {room:.0f}"
            return Decision("dense", reason, predicted)
    best = min(predicted, key=lambda route: predicted[route])
    current = current if current in predicted else "dense"
    if best != current and predicted[best] > (1 - MARGIN) * predicted[current]:
        return Decision(current, f"{best} would save less than {MARGIN:.0%}", predicted)
    return Decision(best, f"predicted at {predicted[best]:.2f} of dense's time", predicted)


def _fresh(problem: Problem, card: Card | None) -> Decision:
    if problem.training:
        return UNTRAINED
    if not problem.eager and problem.m <= UNSURE_GRAPHS:
        return Decision("dense", "a graph keeps its choice, and nothing was measured before it", {})
    assumed = seconds(problem, Figures(ASSUMED_DENSITY * problem.n, None), card)
    if assumed.get("union", math.inf) <= min(WORST_CASE_PREMIUM * assumed["row"], assumed["dense"]):
        return Decision("union", "nothing measured yet, and its worst case is bounded", {})
    best = min(assumed, key=lambda route: assumed[route])
    return Decision(best, f"nothing measured yet, and the best for {problem.m} tokens of a sparse layer", {})


@functools.lru_cache(4096)
def decide_once(problem: Problem, card: Card) -> str:
    """The route of a call of which nothing will be known: a caller that wants a choice in training passes a site."""
    if problem.training:
        return "union" if of_slice(problem, Figures(0, None))[0].n <= card.union_neurons else "dense"
    return decide(problem, None, None, card).strategy


def worth_screening(problem: Problem, figures: Figures | None, card: Card | None = None) -> bool:
    """Whether a screen that listed nothing but the union would be the fastest: else none need be counted.

    By the times of the GPU: graphs decide by the figures of eager calls, in which the host may be the limit.
    """
    if figures is None:
        return False
    predicted = seconds(problem._replace(eager=False), figures._replace(candidates=0.0), card)
    return SCREENED in predicted and predicted[SCREENED] <= min(predicted.values())


@functools.lru_cache(4096)
def waits_for_host(problem: Problem) -> bool:
    """Whether the host may take longer than the kernels of a dense call, on a slower host, too."""
    return problem.eager and dense_us(problem, SHIPPED.rates, SHIPPED.sms) < 1.5 * _host(problem).get("dense", 0.0)
