"""The index kernels of training, called directly with what Cases do not have: ``compact`` and ``rank``, bit by bit.

Gates are arbitrary 16-bit patterns, packed here; no other kernel is needed.
"""

import pytest
import torch
from torch import Tensor

from tests import programs
from tests.cases import formats
from twell import testing
from twell.choose import tuning
from twell.ops.library import launch
from twell.runtime import device, geometry, specs

BF16, FP16 = torch.bfloat16, torch.float16
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
