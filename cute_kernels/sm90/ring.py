"""The ring of stages in shared memory between warps that fill it and warps that read it: two mbarriers a stage."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Ring(NamedTuple):
    """The first mbarrier of each kind; those of the other stages follow."""

    full: Any
    empty: Any


@cute.jit
def open_ring(
    shared: Any, stages: cutlass.Constexpr, fills: cutlass.Constexpr, reads: cutlass.Constexpr, thread: Int32
) -> Ring:
    """Initialise `shared.full`, which takes `fills` arrivals, and `shared.empty`, which takes `reads`.

    Nothing waits here: the caller has a barrier before a thread uses the ring.
    """
    ring = Ring(shared.full.data_ptr(), shared.empty.data_ptr())
    if thread < stages:
        cute.arch.mbarrier_init(ring.full + thread, fills)
        cute.arch.mbarrier_init(ring.empty + thread, reads)
        cute.arch.mbarrier_init_fence()
    return ring


@cute.jit
def release(ring: Ring, state: Any, lane: Int32) -> Any:
    """This warp has read the stage of `state`; returns the state of the next one."""
    if lane == 0:
        cute.arch.mbarrier_arrive(ring.empty + state.index)
    state.advance()
    return state
