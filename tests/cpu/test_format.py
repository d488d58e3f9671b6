"""Tile geometry, and the shared-memory and register arithmetic of sm_90."""

import pytest

from cute_kernels import feasible, geometry


@pytest.mark.parametrize("n", [8, 264, 5632, 8192, 16392, 65528, 65536])
@pytest.mark.parametrize(
    "m", [0, 1, 127, 128, 129, 4096, 4097, 8192 + 130, 16384, 47616, 47617, 100_000, 1_000_000, 40_000_001]
)
def test_union_slices(m: int, n: int) -> None:
    """Slices are consecutive, of whole token tiles except for the last, fit, and are few and nearly equal."""
    slices = geometry.union_slices(m, n)
    assert [first for first, _ in slices] == [0, *(last for _, last in slices)][: len(slices)]
    assert (slices[-1][1] if slices else 0) == m
    assert all(first < last and first % geometry.TOKEN_TILE == 0 for first, last in slices)
    assert all((last - first) * n <= geometry.UNION_ENTRIES for first, last in slices)
    room = geometry.UNION_ENTRIES // n // geometry.TOKEN_TILE
    assert len(slices) <= -(-geometry.token_tiles(m) // room)
    lengths = [geometry.token_tiles(last - first) for first, last in slices]
    assert len(set(lengths[:-1])) <= 1
    assert lengths == sorted(lengths, reverse=True)


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
