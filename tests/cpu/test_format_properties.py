"""Properties of the TwELL format for any gate: geometry, words, round trips, what is undefined."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cases.formats import packed_words
from twell import ops
from twell.runtime import geometry

pytest.importorskip("hypothesis")


# The same examples in every run, however slow the machine.
FIXED: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
MANY = settings(max_examples=150, **FIXED)

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16 = torch.bfloat16, torch.float16
EVERY_N = range(8, geometry.MAX_NEURONS + 1, 8)
DTYPES = st.sampled_from([BF16, FP16])
COMPRESSIONS = st.sampled_from(geometry.COMPRESSIONS)


# Geometry, for every number of neurons


@pytest.mark.parametrize("m", [0, 7, 129, 1_000_000])
def test_hybrid_capacity_of_every_number_of_neurons(m: int) -> None:
    """A multiple of eight, at least 64 non-zeros per token, at most M * N rounded up, monotone."""
    last = 0
    for n in EVERY_N:
        capacity = geometry.hybrid_capacity(m, n)
        assert capacity % 8 == 0
        assert m * min(n, 64) <= capacity < m * n + 8
        assert capacity >= last
        last = capacity


# Packed gates


class Gates(NamedTuple):
    """A gate before ReLU, finite 16-bit values [M, N], with the compression to pack it with."""

    values: Tensor
    compression: int


def bits(draw: Callable[..., Any], m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Any finite values: subnormal, tiny, huge, zeros of both signs, with a drawn share of positive ones."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    drawn = torch.randint(-(1 << 15), 1 << 15, (m, n), generator=generator, dtype=torch.int32).to(torch.int16)
    values = drawn.view(dtype)
    values = torch.where(values.isfinite(), values, torch.ones((), dtype=dtype)).abs()
    share = draw(st.sampled_from([0.0, 0.01, 0.1, 0.125, 0.25, 0.5, 0.9, 1.0]))
    # by row and tile, so that spilled tiles stand beside empty ones
    shares = share * 2 * torch.rand(m, -(-n // 256), generator=generator)
    shares = shares.repeat_interleave(256, 1)[:, :n] if share < 1 else torch.ones(m, n)
    positive = torch.rand(m, n, generator=generator) < shares
    return torch.where(positive, values, -values)


@st.composite
def gates(draw: Callable[..., Any], most: int = 6) -> Gates:
    n = 8 * draw(st.one_of(st.integers(1, 100), st.sampled_from([32, 33, 64, 95, 96, 97, 161, 256])))
    return Gates(bits(draw, draw(st.integers(0, most)), n, draw(DTYPES)), draw(COMPRESSIONS))


def operands(values: Tensor) -> tuple[Tensor, Tensor]:
    """x and w_gate whose product is ``values`` [M, N], exactly: token m has a one in feature m."""
    m, n = values.shape
    k = max(8, -(-m // 8) * 8)
    x = torch.eye(m, k).to(values.dtype)
    w_gate = torch.zeros(n, k, dtype=values.dtype)
    w_gate[:, :m] = values.t()
    return x, w_gate


def pack(g: Gates) -> tuple[Tensor, Tensor, Tensor]:
    packed: tuple[Tensor, Tensor, Tensor] = ops.gate_pack(*operands(g.values), None, g.compression)
    return packed


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.int16), other.view(torch.int16))


@MANY
@given(gates())
def test_packing_is_as_the_page_of_the_format_says_and_loses_nothing(g: Gates) -> None:
    words, spill, stats = pack(g)
    gate = torch.where(g.values > 0, g.values, torch.zeros_like(g.values))
    for found, right in zip((words, stats), packed_words(gate, g.compression), strict=True):
        assert torch.equal(found, right)
    assert same_bits(ops.unpack(words, spill, g.values.shape[1], g.compression), gate)


@MANY
@given(gates(), st.integers(0, 1 << 30))
def test_what_is_undefined_is_not_read(g: Gates, seed: int) -> None:
    """Undefined are words past the count, words of spilled tiles and the spill of the others."""
    words, spill, _ = pack(g)
    (m, n), width = g.values.shape, geometry.words_per_tile(g.compression)
    tiles = geometry.tiles(n)
    clean = ops.unpack(words, spill, n, g.compression)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(-(1 << 31), (1 << 31) - 1, words.shape, generator=generator).int().view(m, tiles, width)
    table = words.view(m, tiles, width)
    counts = table[:, :, :1]
    place = torch.arange(width)
    defined = (place == 0) | ((place <= counts) & (counts < width))
    spoilt = torch.where(defined, table, noise)
    values = spill.view(m, tiles, 256).masked_fill(counts < width, float("nan"))
    assert same_bits(ops.unpack(spoilt.view(m, -1) if m else words, values.view(spill.shape), n, g.compression), clean)
