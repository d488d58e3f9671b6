"""The index kernels of training, called directly: ``compact`` and ``rank``, bit by bit.

Gates are arbitrary 16-bit patterns, packed here; no other kernel is needed. Outputs hold 0x55 before each call.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cases import formats
from twell import tuning
from twell._runtime import device, geometry, specs
from twell.ops.gate_pack import fill_on_cpu, outputs
from twell.ops.hybrid import require_neurons
from twell.ops.library import launch

BF16, FP16 = torch.bfloat16, torch.float16
POISON = 0x55
POISON_INT = 0x55555555


class Hybrid(NamedTuple):
    entries: Tensor
    neurons: Tensor
    chunks: Tensor
    sizes: Tensor
    popularity: Tensor


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    out = torch.empty(shape, dtype=dtype, device="cuda")
    out.view(torch.uint8).fill_(POISON)
    return out


# ---- gates ----


def draw(m: int, n: int, density: float, seed: int, most: int = 0x7F00) -> Tensor:
    """Bits [m, n] of non-negative gates, non-zero for about the share ``density``, and then at most ``most``."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(1, most + 1, (m, n), generator=generator, dtype=torch.int16)
    return bits.masked_fill_(torch.rand(m, n, generator=generator) >= density, 0)


def pattern(name: str, m: int, n: int) -> Tensor:
    """Bits int16 [m, n]; finite bf16 values up to 2^15."""
    most = 0x4700
    if name == "empty":
        return torch.zeros(m, n, dtype=torch.int16)
    if name == "positive":
        return draw(m, n, 2.0, 1, most)
    if name == "same":
        bits = torch.zeros(m, n, dtype=torch.int16)
        bits[:, -1] = draw(m, 1, 2.0, 2, most)[:, 0]
        return bits
    if name == "dense rows":
        bits = draw(m, n, min(1.0, 20 / n), 3, most)
        rows = torch.arange(m) % 37 == 5 % m
        bits[rows] = draw(int(rows.sum()), n, 2.0, 4, most)
        bits[m // 2, : n // 2] = 0
        return bits
    if name == "around capacity":
        # full tiles among tiles that are nearly full
        bits = draw(m, n, 0.121, 5, most)
        bits[::3, : n // 3] = draw(m, n, 0.5, 6, most)[::3, : n // 3]
        return bits
    if name == "hot":
        # some neurons fire everywhere, most never
        share = torch.rand(n, generator=torch.Generator().manual_seed(7)) ** 12
        chosen = torch.rand(m, n, generator=torch.Generator().manual_seed(8)) < share
        return draw(m, n, 2.0, 9, most).masked_fill_(~chosen, 0)
    assert name == "random"
    return draw(m, n, min(0.5, 30 / n), 10, most)


def pack(bits: Tensor, compression: int) -> tuple[Tensor, Tensor, Tensor]:
    """TwELL of gates [m, n] on the GPU, as the gate GEMM writes it: the spill of intact row-tiles is not defined."""
    gate = bits.view(BF16)
    words, spill, stats = outputs(gate, gate.t(), compression)
    fill_on_cpu((words, spill, stats), gate, compression)
    tiled = words.view(len(gate), -1, geometry.words_per_tile(compression))
    intact = tiled[:, :, 0] < geometry.words_per_tile(compression)
    spill.view(torch.int16).view(len(gate), -1, geometry.TILE)[intact] = 0x5555
    return words.cuda(), spill.view(torch.int16).cuda(), stats.cuda()


# ---- the slow constructions ----


def expected_hybrid(bits: Tensor) -> Hybrid:
    """The format of gates [m, n] that fit; 0x55 where nothing is defined."""
    # minus zero is none, NaN is one
    gate = bits.view(BF16)
    m, n = bits.shape
    tiles, chunks = geometry.token_tiles(m), geometry.chunks(n)
    ranks, (token, neuron) = formats.ranks_of(gate), formats.in_order(gate)
    tile, rank = token // geometry.TOKEN_TILE, ranks[token // geometry.TOKEN_TILE, neuron]
    place = token % geometry.TOKEN_TILE << 6 | rank % geometry.CHUNK
    entries = bits[token, neuron].int() << 16 | place.int()
    lists = torch.full((tiles, geometry.CHUNK * chunks), 0x5555, dtype=torch.int16)
    for b in range(tiles):
        own = (ranks[b] >= 0).nonzero()[:, 0].int().short()
        padded = geometry.chunks(len(own)) * geometry.CHUNK
        lists[b, :padded] = own[torch.arange(padded).clamp(max=len(own) - 1)]
    counts = torch.bincount(tile * chunks + rank // geometry.CHUNK, minlength=tiles * chunks).view(tiles, chunks)
    ends = counts.flatten().cumsum(0).view(tiles, chunks)
    offsets = torch.cat([ends[:, :1] - counts[:, :1], ends], 1).int()
    sizes = torch.cat([(ranks >= 0).sum(1), ends[-1, -1:]]).int()
    return Hybrid(entries, lists, offsets, sizes, (gate != 0).sum(0).int())


def run_compact(bits: Tensor, compression: int, dtype: torch.dtype, capacity: int, training: bool = True) -> Hybrid:
    m, n = bits.shape
    require_neurons(n, tuning.family(0), "this")
    words, spill, stats = pack(bits, compression)
    tiles, chunks = geometry.token_tiles(m), geometry.chunks(n)
    out = Hybrid(
        poisoned(capacity + 64),
        poisoned(tiles, geometry.CHUNK * chunks, dtype=torch.int16),
        poisoned(tiles, chunks + 1),
        poisoned(tiles + 1),
        # cleared in training, else left alone
        poisoned(n) if training else torch.zeros(n, dtype=torch.int32, device="cuda"),
    )
    width = geometry.words_per_tile(compression)
    sums = poisoned(tiles, geometry.sums_per_tile(n), dtype=torch.float32)
    *pattern, popularity = out
    counted = popularity if training else None
    spec = tuning.compact(dtype, training, family=tuning.family(0))
    read = (words, spill.view(dtype), stats if training else None)
    # the gate names neurons, not places of a list
    lists = (pattern[1], pattern[3], 0)
    launch(spec, *read, *pattern, counted, sums, n, width, 0, capacity, *lists)
    # of a gated layer they are cleared
    assert not bool(sums.any())
    return out


def assert_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    wrong = actual.cpu() != expected
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        got, want = actual.cpu()[tuple(at)].item(), expected[tuple(at)].item()
        raise AssertionError(f"{what}: {int(wrong.sum())} differ, first at {at}: got {got:#x}, expected {want:#x}")


def check_compact(bits: Tensor, compression: int, dtype: torch.dtype = BF16, capacity: int | None = None) -> Hybrid:
    """Run ``compact`` and compare; a capacity of None is the format's own."""
    m, n = bits.shape
    if capacity is None:
        capacity = geometry.hybrid_capacity(m, n)
    out = run_compact(bits, compression, dtype, capacity)
    total = int((bits & 0x7FFF != 0).sum())
    if total > capacity:
        assert int(out.sizes[-1]) == total
        assert_bits(out.popularity, (bits & 0x7FFF != 0).sum(0).int(), "popularity")
        # backward takes its zero there
        assert int(out.chunks[0, 0]) == 0
        assert bool((out.entries.view(torch.uint8) == POISON).all())
        return out
    expected = expected_hybrid(bits)
    assert_bits(out.sizes, expected.sizes, "sizes")
    assert_bits(out.neurons, expected.neurons, "neurons")
    assert_bits(out.chunks, expected.chunks, "chunks")
    assert_bits(out.entries[:total], expected.entries, "entries")
    assert bool((out.entries[total:] == POISON_INT).all())
    assert_bits(out.popularity, expected.popularity, "popularity")
    return out


# ---- compact ----

SHAPES = [
    *((m, 264) for m in (1, 127, 128, 129, 1000)),
    *((m, 5632) for m in (1, 129, 1000)),
    (129, 8),
    (257, 5640),
    (130, 16384),
    (3, 65536),
    (129, 65536),
]
PATTERNS = ["empty", "random", "dense rows", "same", "hot", "around capacity", "positive"]
# three patterns at each shape, in turns
CASES = [(m, n, PATTERNS[(3 * i + j) % len(PATTERNS)]) for i, (m, n) in enumerate(SHAPES) for j in range(3)]


@pytest.mark.parametrize(("m", "n", "name"), CASES)
def test_compact(m: int, n: int, name: str) -> None:
    """With the format's capacity, which the denser patterns exceed, and with room for everything."""
    bits = pattern(name, m, n)
    compression = (8, 4, 2)[(m + n) % 3]
    check_compact(bits, compression, (BF16, FP16)[m % 2])
    if int((bits & 0x7FFF != 0).sum()) > geometry.hybrid_capacity(m, n):
        check_compact(bits, 8, capacity=m * n)


@pytest.mark.parametrize("compression", [2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_compact_any_bits(dtype: torch.dtype, compression: int) -> None:
    """NaN and infinity are non-zeros, minus zero is none; the capacity is met, then missed by one."""
    bits = draw(200, 1000, 0.2, 11, most=0x7FFF)
    bits[draw(200, 1000, 0.1, 12) != 0] |= -0x8000
    total = int((bits & 0x7FFF != 0).sum())
    for capacity in (total, total - 1):
        check_compact(bits, compression, dtype, capacity)


def test_compact_many_tokens() -> None:
    """More token tiles than one round of the sums over token tiles takes."""
    check_compact(draw(140_000, 8, 0.3, 13), 8, capacity=140_000 * 8)


def test_compact_counts_saturate() -> None:
    """Statistics that say more than 2^32 in all: the number of non-zeros is 2^31 - 1, and no entry is written."""
    bits = draw(140_000, 8, 0.3, 14)
    words, spill, stats = pack(bits, 8)
    stats[:, :, 0] = 1 << 19
    out = poisoned(140_000 * 8), poisoned(1094, 64, dtype=torch.int16), poisoned(1094, 2), poisoned(1095), poisoned(8)
    sums = poisoned(1094, 128, dtype=torch.float32)
    spec = tuning.compact(BF16, True, family=tuning.family(0))
    launch(spec, words, spill.view(BF16), stats, *out, sums, 8, 32, 0, 2**31 - 2, out[1], out[3], 0)
    assert int(out[3][-1]) == 2**31 - 1
    assert_bits(out[4], (bits & 0x7FFF != 0).sum(0).int(), "popularity")
    assert bool((out[0] == POISON_INT).all())


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", PATTERNS)
def test_compact_for_inference(name: str, dtype: torch.dtype) -> None:
    """As in training, but each token tile has room for all of its gates, and nothing is counted."""
    m, n = 300, 1544
    bits = pattern(name, m, n)
    out = run_compact(bits, 4, dtype, m * n, training=False)
    expected = expected_hybrid(bits)
    assert_bits(out.sizes[:-1], expected.sizes[:-1], "sizes")
    assert int(out.sizes[-1]) == 0
    assert_bits(out.neurons, expected.neurons, "neurons")
    begin = expected.chunks[:, :1]
    room = torch.arange(geometry.token_tiles(m), dtype=torch.int32)[:, None] * (geometry.TOKEN_TILE * n)
    assert_bits(out.chunks, expected.chunks - begin + room, "chunks")
    for tile, first in enumerate(room.flatten().tolist()):
        here = expected.entries[int(begin[tile]) : int(expected.chunks[tile, -1])]
        assert_bits(out.entries[first : first + len(here)], here, f"entries of tile {tile}")
    assert not bool(out.popularity.any())


# ---- rank ----


@pytest.mark.parametrize("most", [0, 1, 100, 1 << 27])
@pytest.mark.parametrize("n", [8, 64, 264, 5632, 11008, 16384, 16392, 28672, 65536])
def test_rank(n: int, most: int) -> None:
    """Neurons of equal popularity by index, from CTAs of few neurons to those of the most."""
    popularity = torch.randint(0, most + 1, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(n + most))
    right = popularity.sort(descending=True, stable=True).indices
    for ctas in (1, 7, device.sm_count(0), 1000):
        order, slot, arrivals = poisoned(n), poisoned(n), poisoned(5000)
        launch(specs.RankSpec(), popularity.cuda(), order, slot, arrivals, ctas)
        assert_bits(order, right.int(), "order")
        assert_bits(slot, right.argsort().int(), "slot")
        assert not bool(arrivals.any())
