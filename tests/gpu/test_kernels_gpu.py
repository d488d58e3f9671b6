"""Kernels of formats on a GPU, called directly with what Cases do not have: gates of any bits, lists, transposes.

Gates have NaN and infinities among them, and are as on the CPU: packed, their largest, in windows.
"""

import math

import pytest
import torch
from torch import Tensor

from tests import programs
from tests.cases import formats
from tests.gpu.strategies import BF16, CUDA, DTYPES, FP16
from twell import ops, testing
from twell.base.activation import Activation
from twell.call import choice
from twell.choose import tuning
from twell.ops import library, reference
from twell.ops.library import launch
from twell.runtime import device, geometry, specs
from twell.testing.operands import LAYOUTS


def gates(m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Rare and frequent non-zeros, tiles that overflow, zeros of both signs, NaN and infinities."""
    generator = torch.Generator().manual_seed(m + n)
    gate = torch.randn(m, n, generator=generator)
    gate -= torch.tensor([3.0, 1.0, 0.0, -1.0])[torch.randint(4, (m, 1), generator=generator)]
    odd = torch.tensor([0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-8])
    places = torch.rand(m, n, generator=generator) < 0.01
    gate = torch.where(places, odd[torch.randint(len(odd), (m, n), generator=generator)], gate)
    return gate.to(dtype)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("compression", [2, 4, 8])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (8, 5632), (33, 264), (130, 520), (700, 1032), (2049, 2056)])
@DTYPES
def test_packed(dtype: torch.dtype, m: int, n: int, compression: int, threshold: float) -> None:
    gate, activation = gates(m, n, dtype), Activation("fatrelu", threshold)
    right = programs.packed_on_cpu(activation.after(gate), compression)
    for own in (gate.cuda(), LAYOUTS["padded"](gate.cuda())):
        found = testing.poisoned(lambda own=own: programs.packed(own, compression, activation))
        testing.assert_packed_same(found, right, n, compression)


@DTYPES
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 3), (70, 520, 9), (9, 16384, 64), (5, 16392, 500), (3, 65536, 512)])
def test_levels_are_those_of_a_stable_sort(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    # few values, so that many are equal
    gate = torch.randint(-20, 21, (m, n), generator=generator).to(dtype)
    gate[0, :2], gate[-1, -1] = torch.nan, torch.inf
    (levels,) = testing.poisoned(lambda: (programs.levels(gate.to(CUDA), k),))
    testing.assert_same(levels.cpu(), reference.top_k(gate, k))
    words, spill, _ = programs.packed(gate.to(CUDA), levels=levels)
    testing.assert_same(ops.unpack(words, spill, n, 8).cpu(), reference.largest(gate.relu(), k))


@DTYPES
def test_largest_of_a_batch(dtype: torch.dtype) -> None:
    gate = torch.randint(-30, 12, (300, 1000), device=CUDA).to(dtype)
    gate[3, 5], gate[30, 1], gate[9] = torch.inf, torch.nan, -torch.inf
    for most in (0, 1, 900, 30000, 90000, 300000):
        assert torch.equal(choice.largest(gate, most).cpu(), choice.largest(gate.cpu(), most))


@DTYPES
@pytest.mark.parametrize(("m", "n"), [(1, 8), (1000, 4104), (129, 65536)])
def test_window(m: int, n: int, dtype: torch.dtype) -> None:
    """Gates on levels and bounds; and a gate whose rows kernels do not read in place."""
    gate = (torch.randint(-9, 10, (m, n)) / 4).to(dtype)
    gate[0, 3], gate[-1, 5], gate[m // 2, 6], gate[0, 7] = torch.nan, torch.inf, -torch.inf, -0.0
    level = (torch.arange(n) % 5).to(dtype) / 4
    bounds = level, *choice.bounds(level, 1.0)
    right = gate.clone()
    expected = ops.window(right, *bounds)
    for more in (0, 3):
        ours = torch.empty(m, n + more, dtype=dtype, device=CUDA)[:, :n]
        given = [bound.cuda() for bound in bounds]
        found = testing.poisoned(lambda ours=ours, given=given: ops.window(ours.copy_(gate), *given))
        for one, other in zip((*found, ours), (*expected, right), strict=True):
            testing.assert_same(one.cpu(), other)


# the transposing copy of a matrix
SHAPES = [(8, 8), (8, 64), (64, 8), (72, 264), (136, 2056), (2048, 5632)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 8), (7, 9), (8, 12)])
def test_every_element_is_moved(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = shape
    # every value has different bits
    matrix = torch.arange(rows * columns, device="cuda").to(torch.int16).view(shape)
    matrix = matrix.float() if dtype == torch.float32 else matrix.view(dtype)
    (out,) = testing.poisoned(lambda: (ops.matrix_transpose(matrix),))
    assert out.is_contiguous()
    assert out.shape == (columns, rows)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(out.view(kind), matrix.t().contiguous().view(kind))


@pytest.mark.parametrize("shape", SHAPES)
def test_strides_and_addresses(shape: tuple[int, int]) -> None:
    rows, columns = shape
    wide = torch.randn(rows + 1, columns + 16, device="cuda").bfloat16()
    for matrix in (wide[1:, 8:-8], wide[1:, 3 : 3 + columns], wide[:-1, ::2][:, : columns // 16 * 8]):
        assert torch.equal(ops.matrix_transpose(matrix), matrix.t())
        assert torch.equal(library.rows(matrix.t()), matrix.t())
        assert library.has_rows(library.rows(matrix.t()))


def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[1] < 60e9:
        pytest.skip("needs a GPU with 60 GB")
    matrix = torch.randint(-(2**15), 2**15, (1 << 15, (1 << 16) + 64), dtype=torch.int16, device="cuda")
    out = ops.matrix_transpose(matrix)
    for start in range(0, matrix.shape[1], 8192):
        assert torch.equal(out[start : start + 8192], matrix[:, start : start + 8192].t())


# The index kernels of training

POISON = 0x55


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    out = torch.empty(shape, dtype=dtype, device="cuda")
    out.view(torch.uint8).fill_(POISON)
    return out


def draw(m: int, n: int, density: float, seed: int) -> Tensor:
    """Bits [m, n] of non-negative gates, NaN among them, non-zero for about the share ``density``."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(1, 0x8000, (m, n), generator=generator).short()
    return bits.masked_fill_(torch.rand(m, n, generator=generator) >= density, 0)


def compact(
    bits: Tensor, compression: int, dtype: torch.dtype, capacity: int, counts: int | None = None
) -> dict[str, Tensor]:
    """Run ``compact``; what the format leaves undefined is zero. ``counts``: all statistics, in place of the gate's."""
    m, n = bits.shape
    words, spill, stats = (t.cuda() for t in programs.packed_on_cpu(bits.view(BF16), compression))
    width = geometry.words_per_tile(compression)
    # that of intact row-tiles is not defined
    intact = words.view(m, -1, width)[:, :, 0] < width
    spill.view(torch.int16).view(m, -1, geometry.TILE)[intact] = 0x5555
    if counts is not None:
        stats[:, :, 0] = counts
    tiles, chunks = geometry.token_tiles(m), geometry.chunks(n)
    out = {
        "entries": torch.zeros(capacity, dtype=torch.int32, device="cuda"),
        "neurons": torch.zeros(tiles, geometry.CHUNK * chunks, dtype=torch.int16, device="cuda"),
        "chunks": poisoned(tiles, chunks + 1),
        "sizes": poisoned(tiles + 1),
        "popularity": poisoned(n),
    }
    sums = poisoned(tiles, geometry.sums_per_tile(n), dtype=torch.float32)
    spec = tuning.compact(dtype, True, family=tuning.family(0))
    # the gate names neurons, not places of a list
    lists = (out["neurons"], out["sizes"], 0)
    launch(spec, words, spill.view(dtype), stats, *out.values(), sums, n, width, 0, capacity, *lists)
    # of a gated layer they are cleared
    assert not bool(sums.any())
    testing.assert_same(out["popularity"].cpu(), (bits & 0x7FFF != 0).sum(0).int(), "popularity")
    return out


@pytest.mark.parametrize("compression", [2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gates_of_any_bits(dtype: torch.dtype, compression: int) -> None:
    """NaN and infinity are non-zeros, minus zero is none; the capacity is met, then missed by one."""
    bits = draw(200, 1000, 0.05, 11)
    bits[draw(200, 1000, 0.1, 12) != 0] |= -0x8000
    total = int((bits & 0x7FFF != 0).sum())
    right = formats.hybrid_parts(bits.view(BF16), None)
    for name, t in compact(bits, compression, dtype, total).items():
        expected = right[name][:total] if name == "entries" else right[name]
        testing.assert_same(t.cpu(), expected.to(t.dtype), name)
    found = compact(bits, compression, dtype, total - 1)
    assert int(found["sizes"][-1]) == total
    # backward takes its zero there
    assert int(found["chunks"][0, 0]) == 0
    assert not bool(found["entries"].any())


def test_counts_saturate() -> None:
    """Statistics that say more than 2^32 in all: the number of non-zeros is 2^31 - 1, and no entry is written."""
    found = compact(draw(140_000, 8, 0.3, 14), 8, BF16, 140_000 * 8, counts=1 << 19)
    assert int(found["sizes"][-1]) == 2**31 - 1
    assert not bool(found["entries"].any())


@pytest.mark.parametrize("most", [0, 1, 100, 1 << 27])
@pytest.mark.parametrize("n", [8, 64, 264, 5632, 11008, 16384, 16392, 28672, 65536])
def test_rank(n: int, most: int) -> None:
    """Neurons of equal popularity by index, from CTAs of few neurons to those of the most."""
    popularity = torch.randint(0, most + 1, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(n + most))
    right = popularity.sort(descending=True, stable=True).indices
    for ctas in (1, 7, device.sm_count(0), 1000):
        order, slot, arrivals = poisoned(n), poisoned(n), poisoned(5000)
        launch(specs.RankSpec(), popularity.cuda(), order, slot, arrivals, ctas)
        testing.assert_same(order.cpu(), right.int(), "order")
        testing.assert_same(slot.cpu(), right.argsort().int(), "slot")
        assert not bool(arrivals.any())
