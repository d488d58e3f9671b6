"""Tile geometry, and the shared-memory and register arithmetic of sm_90."""

from __future__ import annotations

import pytest

from cute_kernels import feasible, format


@pytest.mark.parametrize(("n", "tiles"), [(0, 0), (8, 1), (255, 1), (256, 1), (257, 2), (5632, 22), (65536, 256)])
def test_tiles_round_up(n: int, tiles: int) -> None:
    assert format.tiles(n) == tiles


def test_words_and_capacity() -> None:
    assert [format.words_per_tile(c) for c in format.COMPRESSIONS] == [128, 64, 32]
    assert [format.capacity(c) for c in format.COMPRESSIONS] == [127, 63, 31]


@pytest.mark.parametrize("compression", [-2, 0, 1, 3, 16, 256])
def test_other_compressions_are_refused(compression: int) -> None:
    with pytest.raises(ValueError, match=f"got {compression}"):
        format.words_per_tile(compression)


def test_neuron_index_fits_its_bits() -> None:
    assert format.MAX_NEURONS - 1 == 0xFFFF
    assert format.tiles(format.MAX_NEURONS) * format.TILE == format.MAX_NEURONS


@pytest.mark.parametrize(
    ("threads", "ctas", "registers"), [(128, 1, 255), (256, 1, 255), (384, 1, 168), (384, 2, 80), (256, 2, 128)]
)
def test_registers_per_thread(threads: int, ctas: int, registers: int) -> None:
    assert feasible.registers_per_thread(threads, ctas) == registers


def test_ctas_per_sm() -> None:
    assert feasible.ctas_per_sm(feasible.SMEM_PER_CTA) == 1
    assert feasible.ctas_per_sm(feasible.SMEM_PER_SM // 2 - feasible.SMEM_RESERVED_PER_CTA) == 2
    with pytest.raises(ValueError, match="232449"):
        feasible.ctas_per_sm(feasible.SMEM_PER_CTA + 1)


def test_register_split() -> None:
    feasible.check_register_split((24, 240, 240))
    with pytest.raises(ValueError, match="multiple of 8"):
        feasible.check_register_split((24, 236, 240))
    with pytest.raises(ValueError, match="multiple of 8"):
        feasible.check_register_split((16, 240, 240))
    with pytest.raises(ValueError, match="504"):
        feasible.check_register_split((32, 240, 240))
