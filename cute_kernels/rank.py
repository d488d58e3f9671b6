"""Rank neurons by descending popularity, then by index: order[rank] = neuron and slot[neuron] = rank.

A neuron's rank is the number of neurons before it. All pairs are compared: for thousands of neurons that takes a few
microseconds in one launch; a sort takes several launches. Counters of weight_grad.py are cleared, too.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr
from cutlass.memory import SmemAllocator

from .common import operands
from .specs import RankSpec

# a lane ranks one neuron; each warp compares it with a sixteenth of each block of the others
NEURONS, WARPS, BLOCK = 32, 16, 8192
THREADS = 32 * WARPS


class Rank:
    """The only variant; sizes stay symbolic."""

    @cute.jit
    def __call__(
        self,
        popularity: cute.Tensor,
        order: cute.Tensor,
        slot: cute.Tensor,
        arrivals: cute.Tensor,
        stream: cuda.CUstream,
    ):
        self.kernel(popularity, order, slot, arrivals).launch(
            grid=(cute.ceil_div(popularity.shape[0], NEURONS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, popularity: cute.Tensor, order: cute.Tensor, slot: cute.Tensor, arrivals: cute.Tensor):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator()
        block = shared.allocate_tensor(Int32, cute.make_layout(BLOCK), byte_alignment=16)
        counts = shared.allocate_tensor(Int32, cute.make_layout((NEURONS, WARPS)), byte_alignment=16)
        n, mine = popularity.shape[0], cute.arch.block_idx()[0] * NEURONS
        for i in cutlass.range(mine * WARPS + thread, arrivals.shape[0], cute.arch.grid_dim()[0] * THREADS, unroll=1):
            arrivals[i] = Int32(0)
        neuron = mine + lane
        own = popularity[neuron] if neuron < n else 0
        before = Int32(0)
        quad = cute.make_rmem_tensor((4,), Int32)
        for first in cutlass.range(0, n, BLOCK, unroll=1):
            length = cutlass.min(n - first, Int32(BLOCK))
            # four at a time: n is a multiple of eight
            quads = length // 4
            for q in cutlass.range(thread, quads, THREADS, unroll=4):
                four = cute.make_tensor((popularity.iterator + first + 4 * q).align(16), cute.make_layout(4))
                cute.autovec_copy(four, cute.make_tensor((block.iterator + 4 * q).align(16), cute.make_layout(4)))
            cute.arch.sync_threads()
            for q in cutlass.range(warp, quads, WARPS, unroll=4):
                cute.autovec_copy(cute.make_tensor((block.iterator + 4 * q).align(16), cute.make_layout(4)), quad)
                # equal ones count if their index is smaller; those of this CTA follow below
                least = own if first + 4 * q >= mine else own - 1
                for j in range_constexpr(4):
                    before += Int32(quad[j] > least)
            cute.arch.sync_threads()
        if warp == 0:
            for other in range_constexpr(NEURONS):
                before += Int32((cute.arch.shuffle_sync(own, other) == own) & (other < lane))
        counts[lane, warp] = before
        cute.arch.sync_threads()
        if warp == 0 and neuron < n:
            rank = Int32(0)
            for w in range_constexpr(WARPS):
                rank += counts[lane, w]
            slot[neuron] = rank
            order[rank] = neuron


def signature(spec: RankSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    n = cute.sym_int32(divisibility=8)
    return Rank(), (*(operands.vector(Int32, n) for _ in range(3)), operands.vector(Int32, cute.sym_int32()))
