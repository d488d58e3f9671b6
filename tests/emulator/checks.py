"""Kernels on the emulator against the operators on a CPU: each check runs one and raises AssertionError.

Operands have longer rows than columns, with NaN between. Integers are small, so that every sum is exact.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests import programs
from tests.quantized import assert_right, hostile
from twell import ops, testing
from twell.base.activation import RELU
from twell.choose import tuning
from twell.ops import hybrid, hybrid_cpu, reference
from twell.ops.library import launch
from twell.runtime import geometry, specs

BF16 = torch.bfloat16
NONE = torch.empty(0, dtype=BF16)
NONE_LEVELS, NO_COUNTERS = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
# what no kernel writes
POISON = 0x7F7F7F7F


def on_gpu(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """The CUDA implementation of an operator, which the emulator runs with tensors on a CPU."""
    function: Callable[..., tuple[Tensor, ...]] = importlib.import_module(f"twell.ops.{name}")._cuda
    return function


def strided(matrix: Tensor, more: int = 24) -> Tensor:
    wide = torch.empty(matrix.shape[0], matrix.shape[1] + more, dtype=matrix.dtype).fill_(101)
    if matrix.is_floating_point():
        wide.fill_(torch.nan)
    wide[:, : matrix.shape[1]] = matrix
    return wide[:, : matrix.shape[1]]


# ---- the screen ----


def quantize_gate(r: int, k: int, weights: bool, seed: int = 0) -> None:
    torch.manual_seed(seed)
    rows = hostile(r, k).to(BF16)
    assert_right(programs.quantised(strided(rows, 8), weights), rows, weights)


def gate_screen(m: int, n: int, k: int, biased: bool, seed: int = 0) -> None:
    torch.manual_seed(seed)
    rows, weights = torch.randn(m, k), torch.randn(n, k)
    # rows of zeros, which their bias decides; of other sizes; and of which nothing is known
    rows[3::50], rows[9::50], weights[5::50], weights[20::50] = 0, rows[9::50] * 1e-5, 0, weights[20::50] * 1e4
    rows[m // 2] *= 2.0 ** -torch.arange(k).clamp(max=60)
    if m > 2 * geometry.TOKEN_TILE:
        weights[7] = torch.nan
    x, w = (reference.quantize_gate(t.to(BF16), second) for t, second in ((rows, False), (weights, True)))
    bias = ((torch.randn(n) * 0.7 - 3.4) * math.sqrt(k)).to(BF16) if biased else NONE
    if biased:
        # in units of the scales these are infinite, NaN or tiny; some are those of rows of zeros
        extremes = [torch.inf, 3e38, 1e-40, torch.nan, -1e-40, -torch.inf, -3e38]
        bias[::5] = torch.tensor(extremes).repeat(n)[: len(bias[::5])]
    given = [(strided(side[0], -k % 16 + 16), *side[1:]) for side in (x, w)]
    found = programs.listed(programs.candidates(*given, bias), n)
    # no reach of these seeds is so near to 0 that fp32 could decide otherwise
    right = reference.gate_screen(x, w, bias if biased else None).split(geometry.TOKEN_TILE)
    testing.assert_same(found, torch.stack([tile.any(0) for tile in right]), "candidates")


# ---- the gate, the up projection and gradients at non-zeros ----


class Pattern(NamedTuple):
    """A layer whose tokens fire lists of neurons: ``gate`` [M, N], of which a tile of 128 tokens fires ``lists``."""

    gate: Tensor
    lists: list[Tensor]
    x: Tensor
    weight: Tensor
    bias: Tensor


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high + 1, shape).to(BF16)


def pattern(sizes: Sequence[int], k: int, seed: int) -> Pattern:
    """One tile per length in ``sizes``; the last tile lacks 28 tokens. A neuron in a list fires for some token."""
    torch.manual_seed(seed)
    n = 512 if max(sizes) <= 512 else 1024
    m = geometry.TOKEN_TILE * len(sizes) - 28
    gate, lists = torch.zeros(m, n, dtype=BF16), []
    for tile, size in enumerate(sizes):
        lists.append(torch.randperm(n)[:size].sort().values)
        tokens = gate[geometry.TOKEN_TILE * tile :][: geometry.TOKEN_TILE]
        values = integers(1, 3, len(tokens), size).where(torch.rand(len(tokens), size) < 0.04, 0)
        values[torch.randint(len(tokens), (size,)), torch.arange(size)] = 2
        tokens[:, lists[-1]] = values
    weight = torch.zeros(n, k, dtype=BF16).scatter_(1, torch.rand(n, k).argsort(1)[:, :16], integers(-1, 1, n, 16))
    return Pattern(gate, lists, integers(-2, 2, m, k), weight, integers(-3, 3, n))


def kept(given: Pattern, values: Tensor) -> tuple[hybrid.Kept, Tensor, int]:
    """The gate in the hybrid format, ``values`` [M, N] at its non-zeros in the format's order, and their number."""
    m, n = given.gate.shape
    whole = torch.empty(hybrid.words(given.x, n, gated=True), dtype=torch.int32)
    hybrid_cpu.encode(given.gate, values.to(BF16), whole)
    out = hybrid.parts(whole, m, n)
    capacity, total = hybrid.capacity_of(given.x, n, True, whole), int(out.sizes[-1])
    return out, hybrid.values(out.entries, capacity, BF16)[:total], total


def sampled_up(sizes: Sequence[int], k: int, training: bool, biased: bool, ctas: int, seed: int = 0) -> None:
    given = pattern(sizes, k, seed)
    up = hybrid_cpu.project(given.x, given.weight, given.bias if biased else None)
    hidden = given.gate.float() * up
    _, right_hidden, _ = kept(given, hidden)
    format_, right_up, total = kept(given, up)
    entries = format_.entries[: max(total, 1)].clone()
    n = given.gate.shape[1]
    sums = torch.zeros(len(sizes), geometry.training_sums(n) if training else geometry.sums_per_tile(n))
    # eight places behind the last non-zero
    out_up, out_hidden = (torch.full((total + 8,), torch.nan, dtype=BF16) if training else None for _ in range(2))
    pattern_ = (entries, format_.neurons, format_.chunks, format_.sizes)
    bias = given.bias if biased else NONE
    outputs = (out_up, out_hidden, sums, RELU.code(), geometry.MOST, ctas)
    launch(tuning.sampled_up(BF16, training), strided(given.x), strided(given.weight), bias, *pattern_, *outputs)
    if out_up is None or out_hidden is None:
        testing.assert_same(entries[:total] & 0xFFFF, format_.entries[:total] & 0xFFFF, "places")
        testing.assert_same((entries[:total] >> 16).short().view(BF16), right_hidden, "hidden")
    else:
        for found, right, what in ((out_up, right_up, "up"), (out_hidden, right_hidden, "hidden")):
            testing.assert_same(found[:total], right, what)
            assert found[total:].isnan().all(), f"{what} is written behind the last non-zero"
    by_tile = torch.stack([t.abs().sum() for t in hidden.split(geometry.TOKEN_TILE)])
    testing.assert_same(sums.sum(1), by_tile, "sums of |hidden|")


def sampled_gate(
    sizes: Sequence[int], k: int, biased: bool, compression: int, ctas: int, seed: int = 0, levels: bool = False
) -> None:
    given = pattern(sizes, k, seed)
    (m, n), width = given.gate.shape, geometry.words_per_tile(compression)
    # as `list_candidates` leaves them: anything behind the end, and the last size unused
    neurons = torch.full((len(sizes), geometry.CHUNK * geometry.chunks(n)), 0x7F7F, dtype=torch.int16)
    for row, listed in zip(neurons, given.lists):
        row[: len(listed)] = listed.short()
    lengths = torch.tensor([*sizes, POISON], dtype=torch.int32)
    words = torch.full((m, geometry.tiles(n) * width), POISON, dtype=torch.int32)
    spill = torch.full((m, geometry.tiles(n) * geometry.TILE), torch.nan, dtype=BF16)
    stats = torch.full((-(-m // geometry.STATS_ROWS), geometry.tiles(n), 2), POISON, dtype=torch.int32)
    bias = given.bias if biased else NONE
    if levels:
        bias = torch.cat([given.bias, (torch.arange(n) % 4).to(BF16)])
    operands = (strided(given.x), strided(given.weight), bias, neurons, lengths)
    launch(tuning.sampled_gate(BF16), *operands, words, spill, stats, width, 0, ctas)
    for tile, listed in enumerate(given.lists):
        rows = slice(geometry.TOKEN_TILE * tile, geometry.TOKEN_TILE * (tile + 1))
        lines = slice(rows.start // geometry.STATS_ROWS, -(-min(rows.stop, m) // geometry.STATS_ROWS))
        used = geometry.tiles(len(listed))
        assert (words[rows, used * width :] == POISON).all(), f"words behind the end of tile {tile}"
        assert (stats[lines, used:] == POISON).all(), f"statistics behind the end of tile {tile}"
        if used:
            # a gate has a multiple of 8 neurons
            padding = torch.zeros(-len(listed) % 8, k, dtype=BF16)
            weight, of_tile = torch.cat((given.weight[listed], padding)), torch.cat((given.bias[listed], padding[:, 0]))
            if levels:
                of_tile = torch.cat((of_tile, bias[n:][listed], padding[:, 0]))
            right = ops.gate_pack(given.x[rows], weight, of_tile if biased else None, compression)
            found = words[rows, : used * width], spill[rows, : used * geometry.TILE], stats[lines, :used]
            testing.assert_packed_same(tuple(t.contiguous() for t in found), right, len(weight), compression)


def window(m: int, n: int, dtype: torch.dtype, seed: int = 0) -> None:
    """Gates on bounds and on levels, and beside them; infinities, NaN, zeros and denormals of either sign."""
    torch.manual_seed(seed)
    gate, tiny = torch.randint(-9, 10, (m, n)).to(dtype) / 4, torch.tensor(1, dtype=torch.int16).view(dtype)
    level = (torch.arange(n) % 5).to(dtype) / 4
    below, above = level - 1.25, level + 0.75
    # no value lies between these, and all of them do
    below[::7], above[::7], below[3::7], above[3::7] = 0, tiny, -torch.inf, torch.inf
    below[5::7], above[5::7] = -tiny, tiny
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, tiny, -tiny, 2 * tiny, 0.0]).to(dtype)
    where = torch.rand(m, n) < 0.3
    gate[where] = special[torch.randint(0, len(special), (m, n))][where]
    # rows that a kernel reads in place, or a copy of them
    more = 24 if seed else 3
    ours, right = strided(gate, more), gate.clone()
    found, expected = on_gpu("window")(ours, level, below, above), ops.window(right, level, below, above)
    for name, one, other in zip(("near", "counts"), found, expected, strict=True):
        testing.assert_same(one, other, name)
    # NaN and zeros by their bits, too
    testing.assert_same(ours.contiguous().view(torch.int16), right.view(torch.int16), "gate")
    assert ours.as_strided((m - 1, more), ours.stride(), n).isnan().all(), "values between rows are written"


# ---- the hybrid format ----


def locate(rows: int, tiles: int, n: int, most: int, seed: int = 0) -> None:
    """The ranges of token tiles from statistics of [rows, tiles], in training; no tokens, so that nothing follows."""
    torch.manual_seed(seed)
    b = -(-rows * geometry.STATS_ROWS // geometry.TOKEN_TILE)
    stats = torch.randint(0, most + 1, (rows, tiles, 2), dtype=torch.int32)
    # sums of what is behind a count would show
    stats[:, :, 1] = POISON
    words, spill = torch.empty(0, 32, dtype=torch.int32), torch.empty(0, geometry.TILE, dtype=BF16)
    neurons = torch.full((b, 64), 0x7F7F, dtype=torch.int16)
    chunks, sizes, popularity = (torch.full(shape, POISON, dtype=torch.int32) for shape in ((b, 4), (b + 1,), (n,)))
    operands = (words, spill, stats, torch.empty(0, dtype=torch.int32), neurons, chunks, sizes, popularity)
    numbers = (n, 32, 0, 0, neurons, sizes, 0)
    launch(tuning.compact(BF16, True), *operands, torch.empty(b, 8), *numbers)
    lines = geometry.TOKEN_TILE // geometry.STATS_ROWS
    ends = torch.stack([part[:, :, 0].sum() for part in stats.split(lines)]).cumsum(0)
    places = torch.cat((torch.zeros(1, dtype=torch.int64), ends)).clamp(max=geometry.MOST).int()
    testing.assert_same(chunks[:, 0], places[:-1], "begins")
    testing.assert_same(chunks[:, 3], places[1:], "ends")
    testing.assert_same(sizes[-1], places[-1], "number of non-zeros")
    assert (chunks[:, 1:3] == POISON).all(), "chunks are written"
    assert (sizes[:-1] == POISON).all(), "sizes are written"
    assert not popularity.any(), "popularity is not cleared"


def rank(n: int, most: int, ctas: int, counters: int, seed: int = 0) -> None:
    """Neurons by popularity, from 0 to ``most``: many ties, if that is small."""
    torch.manual_seed(seed)
    popularity = torch.randint(0, most + 1, (n,), dtype=torch.int32)
    order, slot, arrivals = (torch.full((length,), POISON, dtype=torch.int32) for length in (n, n, counters))
    launch(specs.RankSpec(), popularity, order, slot, arrivals, ctas)
    right = popularity.sort(descending=True, stable=True).indices
    testing.assert_same(order, right.int(), "order")
    testing.assert_same(slot, right.argsort().int(), "slot")
    assert not arrivals.any(), "counters are not cleared"
