"""Lists of the neurons whose bits gate_screen.py has set: ascending, for each tile of 128 tokens.

One CTA per token tile; a thread has a word of 32 neurons at a time, and prefix sums give the places of its bits. The
statistics are cleared, too: sampled_gate.py writes those of the tiles that a list has.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Uint32, range_constexpr
from cutlass.memory import SmemAllocator

from .. import geometry
from ..common import launch, operands
from ..common.values import lowest_bit, prefix_sum
from ..specs import ListCandidatesSpec

# rows of statistics of a token tile
GROUPS = geometry.TOKEN_TILE // geometry.STATS_ROWS
WARPS = 8
THREADS = 32 * WARPS


class ListCandidates:
    """The only variant; sizes stay symbolic."""

    @cute.jit
    def __call__(self, *arguments: Any):
        """The operands of `kernel` and the stream."""
        candidates, *rest, stream = arguments
        if candidates.shape[0] > 0:
            launch.start(self.kernel(candidates, *rest), candidates.shape[0], THREADS, stream)

    @cute.kernel
    def kernel(self, candidates: cute.Tensor, neurons: cute.Tensor, sizes: cute.Tensor, stats: cute.Tensor):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = cute.arch.block_idx()[0]
        sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS))
        launch.wait()
        for group in cutlass.range(tile * GROUPS, cutlass.min((tile + 1) * GROUPS, stats.shape[0]), unroll=1):
            for i in cutlass.range(thread, stats.shape[1] * 2, THREADS, unroll=1):
                stats[group, i // 2, i % 2] = Int32(0)
        words, size = candidates.shape[1], Int32(0)
        for first in cutlass.range(0, words, THREADS, unroll=1):
            at = first + thread
            bits = Uint32(candidates[tile, at]) if at < words else Uint32(0)
            count = Int32(cute.arch.popc(bits))
            place = size + prefix_sum(count, lane)
            if lane == 31:
                sums[warp] = place + count - size
            cute.arch.sync_threads()
            for w in range_constexpr(WARPS):
                total = sums[w]
                place += total if w < warp else 0
                size += total
            while bits != 0:
                neurons[tile, place] = Int16(at * 32 + lowest_bit(bits))
                bits = bits & (bits - 1)
                place += 1
            cute.arch.sync_threads()
        if thread == 0:
            sizes[tile] = size


def signature(spec: ListCandidatesSpec) -> tuple[Any, tuple[Any, ...]]:
    b = cute.sym_int32()
    arguments = (
        operands.dense(Int32, b, cute.sym_int32(divisibility=8), align=4),
        operands.dense(Int16, b, cute.sym_int32(divisibility=64), align=4),
        operands.dense(Int32, cute.sym_int32(), align=4),
        operands.dense(Int32, cute.sym_int32(), cute.sym_int32(), 2),
    )
    return ListCandidates(), arguments
