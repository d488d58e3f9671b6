"""Shared-memory and register arithmetic. Pure Python: a choice is refused before anything is compiled."""

from collections.abc import Sequence
from typing import Any

# CUDA programming guide, technical specifications of compute capability 9.0
SMEM_PER_CTA = 232448
SMEM_PER_SM = 233472
SMEM_RESERVED_PER_CTA = 1024
REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD = 255
# the same of compute capability 8.6, 8.9 and 12.0, the least since 8.0
PORTABLE_SMEM_PER_CTA = 99 * 1024


def registers_per_thread(threads: int, ctas_per_sm: int = 1) -> int:
    """Most registers a thread may use for that many CTAs of ``threads`` to share an SM; granted in eights."""
    return min(REGISTERS_PER_THREAD, REGISTERS_PER_SM // (threads * ctas_per_sm) // 8 * 8)


def ctas_per_sm(smem: int) -> int:
    """CTAs that fit on an SM when each takes ``smem`` bytes of shared memory; ValueError if not even one does."""
    if smem > SMEM_PER_CTA:
        raise ValueError(f"a CTA has at most {SMEM_PER_CTA} bytes of shared memory, got {smem}")
    return SMEM_PER_SM // (smem + SMEM_RESERVED_PER_CTA)


def check_shared_memory(shared: Any, ctas: int = 1) -> Any:
    """Return ``shared``, a ``cute.struct``, after checking that ``ctas`` CTAs of its size fit on an SM."""
    assert ctas_per_sm(shared.size_in_bytes()) >= ctas
    return shared


def check_portable_memory(shared: Any) -> Any:
    """Return ``shared``, a ``cute.struct``, after checking that a CTA of its size runs on every GPU since sm_80."""
    assert shared.size_in_bytes() <= PORTABLE_SMEM_PER_CTA
    return shared


def check_register_split(groups: Sequence[int]) -> None:
    """Check the registers that warp groups request by setmaxnreg against those granted at launch.

    Args:
        groups: registers per thread of each warp group, in a CTA that has the SM to itself.

    Raises:
        ValueError: setmaxnreg refuses a count, or the groups together request more than the CTA was granted, and the
            last warp group would wait for ever.
    """
    for registers in groups:
        if registers % 8 or not 24 <= registers <= 240:
            raise ValueError(f"setmaxnreg takes a multiple of 8 from 24 to 240, got {registers}")
    granted = registers_per_thread(128 * len(groups)) * len(groups)
    if sum(groups) > granted:
        raise ValueError(f"{len(groups)} warp groups share {granted} registers per lane, got {tuple(groups)}")
