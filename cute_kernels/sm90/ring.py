"""A ring of stages in shared memory between producer and consumer warps, with two mbarriers per stage."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Ring(NamedTuple):
    """Addresses of stage 0's mbarriers; those of the other stages follow."""

    full: Any
    empty: Any


@cute.jit
def open_ring(
    shared: Any, stages: cutlass.Constexpr, fills: cutlass.Constexpr, reads: cutlass.Constexpr, thread: Int32
) -> Ring:
    """Initialise `shared.full` with `fills` arrivals per stage and `shared.empty` with `reads`.

    The caller must synchronise the CTA before a thread uses the ring.
    """
    ring = Ring(shared.full.data_ptr(), shared.empty.data_ptr())
    if thread < stages:
        cute.arch.mbarrier_init(ring.full + thread, fills)
        cute.arch.mbarrier_init(ring.empty + thread, reads)
        cute.arch.mbarrier_init_fence()
    return ring


@cute.jit
def release(ring: Ring, state: Any, lane: Int32) -> Any:
    """Arrive at the empty barrier of the stage that this warp has read; return the state of the next stage."""
    if lane == 0:
        cute.arch.mbarrier_arrive(ring.empty + state.index)
    state.advance()
    return state
