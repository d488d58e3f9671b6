"""Where the entries of each token tile lie in training, whose pool is small: the kernel `locate` of compact.py.

One cluster. Its warps add up the counts of a token tile each, and the first CTA makes prefix sums of the totals.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import geometry
from ..common import architecture, launch
from ..common.values import prefix_sum

TOKENS = geometry.TOKEN_TILE
WARPS = 32
THREADS = 32 * WARPS
# CTAs where there are clusters, and counts that a lane loads at a time: those of 5,632 neurons in one go
LOCATORS, COUNTS = 8, 12


class Ranges:
    """The kernel; `locators` are its CTAs."""

    locators: int

    def find_ranges(self, stats: Any, o: Any, stream: Any) -> None:
        """Launch the kernel for the `Operands` of compact.py."""
        self.locators = LOCATORS if architecture.at_least(90) else 1
        locate = self.locate(stats, o.chunks, o.sizes, o.popularity)
        launch.start(locate, self.locators, THREADS, stream, cluster=self.locators)

    @cute.kernel
    def locate(self, stats: cute.Tensor, chunks: cute.Tensor, sizes: cute.Tensor, popularity: cute.Tensor):
        """Compute where the entries of each token tile begin and end, and the number of non-zeros; clear `popularity`.

        They go to the first and last column of `chunks`, and to the last element of `sizes`.
        """
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, tiles = cute.arch.block_idx()[0], chunks.shape[0]
        sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS))
        launch.wait()
        for i in cutlass.range(cta * THREADS + thread, popularity.shape[0], self.locators * THREADS, unroll=1):
            popularity[i] = Int32(0)
        # neighbouring tiles go to different CTAs
        for tile in cutlass.range(warp * self.locators + cta, tiles, self.locators * WARPS, unroll=1):
            total = self.count_tile(stats, tile, lane)
            if lane == 0:
                # until the prefix sums
                chunks[tile, chunks.shape[1] - 1] = total
        if const_expr(self.locators > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if cta == 0:
            self.add_totals(sums, chunks, sizes, thread, warp, lane)

    @cute.jit
    def count_tile(self, stats, tile, lane):
        """The number of non-zeros of a token tile, in all lanes of the warp."""
        pairs = stats.shape[1] * (TOKENS // geometry.STATS_ROWS)
        first = Int64(tile) * pairs
        # the last tile may lack rows
        pairs = Int32(cutlass.min(Int64(stats.shape[0]) * stats.shape[1] - first, Int64(pairs)))
        counts = cute.make_tensor(stats.iterator + 2 * first, cute.make_layout(pairs, stride=2))
        total, own = Int32(0), cute.make_rmem_tensor((COUNTS,), Int32)
        for p in cutlass.range(lane, pairs, 32 * COUNTS, unroll=1):
            for i in range_constexpr(COUNTS):
                own[i] = counts[p + 32 * i] if p + 32 * i < pairs else 0
            for i in range_constexpr(COUNTS):
                total += own[i]
        return Int32(cute.arch.warp_redux_sync(total, "add"))

    @cute.jit
    def add_totals(self, sums, chunks, sizes, thread, warp, lane):
        """Replace the totals in the last column of `chunks` by their prefix sums, in one CTA."""
        tiles, last = chunks.shape[0], chunks.shape[1] - 1
        position = Int64(0)
        for first in cutlass.range(0, tiles, THREADS, unroll=1):
            # the counts of 32 token tiles of 128 x 65,536 fit in 32 bits, those of more may not
            tile = first + thread
            mine = chunks[tile, last] if tile < tiles else 0
            before = prefix_sum(mine, lane)
            if lane == 31:
                sums[warp] = before + mine
            cute.arch.sync_threads()
            begin = position + before
            for w in cutlass.range(cute.ceil_div(cutlass.min(tiles - first, Int32(THREADS)), 32), unroll=4):
                total = Int64(sums[w])
                position += total
                begin += total if w < warp else Int64(0)
            if tile < tiles:
                chunks[tile, 0] = self.saturate(begin)
                chunks[tile, last] = self.saturate(begin + mine)
            cute.arch.sync_threads()
        if thread == 0:
            sizes[tiles] = self.saturate(position)

    @cute.jit
    def saturate(self, value: Int64) -> Int32:
        return Int32(cutlass.min(value, Int64(geometry.MOST)))
