"""Pairs of a token and one of its experts, in the order of the experts: where each is, the rows of x in that order,
and the units of pairs that the gate GEMM of expert_pack.py computes.

    owners [T, k]      the expert of each pair; -1 for an id that is no expert's
    pairs [T, k]       the place of each pair, by expert and then by token; -1 likewise
    rows [T * k, K]    x of the pair at each place
    units [U, 4]       expert, first place, number of pairs (up to `most`), 0
    total [4]          the number of units, and zeros
    ends [E]           the place behind the pairs of each expert

Every CTA counts the pairs of all experts, as there are few, and those before its own pairs, and adds the counts up.
Then its warps place its own pairs, which lie together: the pairs of the same expert before one say its place. So all
CTAs agree without a word, and the order does not depend on their speed.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr
from cutlass.memory import SmemAllocator

from .. import geometry
from ..common import launch, operands
from ..common.copies import address, aligned, load_values, store_values
from ..common.rows import clear_arrivals
from ..common.values import prefix_sum
from ..specs import ExpertPairsSpec

THREADS = 256
WARPS = THREADS // 32
# experts of a thread, when their counts are added up
OWN = geometry.MAX_EXPERTS // THREADS


class Operands(NamedTuple):
    """Operands in global memory."""

    ids: Any  # int32 [T * k, 1 or 2]: the words of each id, the lower one first
    x: Any  # [T, K]
    owners: Any  # int32 [T * k]
    pairs: Any  # int32 [T * k]
    rows: Any  # [T * k, K]
    units: Any  # int32 [U, 4]
    total: Any  # int32 [4]
    arrivals: Any  # int32 [any]: counters of a later kernel, which this one zeroes
    ends: Any  # int32 [E]
    most: Any


@cute.jit
def expert_of(ids: cute.Tensor, pair: Int32, experts: Int32) -> Int32:
    """The expert of a pair; -1 if its id is no expert's."""
    expert = ids[pair, 0]
    exists = expert >= 0 and expert < experts
    if ids.shape[1] > 1:
        exists = exists and ids[pair, 1] == 0
    return expert if exists else Int32(-1)


class ExpertPairs:
    """For one dtype; sizes stay symbolic."""

    @cute.jit
    def __call__(self, *arguments: Any):
        """The `Operands`, the number of CTAs and the stream."""
        *given, max_ctas, stream = arguments
        o = Operands(*given)
        count = o.pairs.shape[0]
        if count > 0:
            launch.start(self.kernel(o), cutlass.min(cute.ceil_div(count, WARPS), max_ctas), THREADS, stream)

    @cute.kernel
    def kernel(self, o: Operands):
        thread, lane, cta = cute.arch.thread_idx()[0], cute.arch.lane_idx(), cute.arch.block_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared, places = SmemAllocator(), cute.make_layout(geometry.MAX_EXPERTS + 1)
        # the pairs of each expert, of them those before the CTA's own; the pairs and the units of the experts before it
        counts, earlier, before, units = (shared.allocate_tensor(Int32, places, byte_alignment=16) for _ in range(4))
        sums = shared.allocate_tensor(Int32, cute.make_layout(2 * WARPS), byte_alignment=16)
        for expert in range_constexpr(OWN):
            counts[thread + expert * THREADS] = Int32(0)
            earlier[thread + expert * THREADS] = Int32(0)
        launch.wait()
        if cta == 0:
            clear_arrivals(o.arrivals, thread, THREADS)
        cute.arch.sync_threads()
        number = o.pairs.shape[0]
        share = cute.ceil_div(number, cute.arch.grid_dim()[0])
        first = cta * share
        for pair in cutlass.range(thread, number, THREADS, unroll=4):
            expert = expert_of(o.ids, pair, o.ends.shape[0])
            if expert >= 0:
                cute.arch.atomic_add(counts.iterator + expert, Int32(1), scope="cta")
                if pair < first:
                    cute.arch.atomic_add(earlier.iterator + expert, Int32(1), scope="cta")
        cute.arch.sync_threads()
        self.add_up(o, counts, before, units, sums, thread, lane, warp)
        if cta == 0:
            if thread < 4:
                o.total[thread] = units[geometry.MAX_EXPERTS] if thread == 0 else Int32(0)
            for expert in cutlass.range(thread, o.ends.shape[0], THREADS, unroll=1):
                o.ends[expert] = before[expert] + counts[expert]
        for pair in cutlass.range(first + warp, cutlass.min(first + share, number), WARPS, unroll=1):
            self.place_pair(o, counts, earlier, before, units, first, pair, lane)

    @cute.jit
    def add_up(self, o: Operands, counts, before, units, sums, thread: Int32, lane: Int32, warp: Int32):
        """The pairs and units before each expert, and behind the last one all of them."""
        pairs, blocks = Int32(0), Int32(0)
        for i in range_constexpr(OWN):
            count = counts[thread * OWN + i]
            pairs, blocks = pairs + count, blocks + cute.ceil_div(count, o.most)
        pairs_before, blocks_before = prefix_sum(pairs, lane), prefix_sum(blocks, lane)
        if lane == 31:
            sums[warp], sums[WARPS + warp] = pairs_before + pairs, blocks_before + blocks
        cute.arch.sync_threads()
        for other in range_constexpr(WARPS):
            pairs_before += sums[other] if other < warp else Int32(0)
            blocks_before += sums[WARPS + other] if other < warp else Int32(0)
        for i in range_constexpr(OWN):
            expert = thread * OWN + i
            before[expert], units[expert] = pairs_before, blocks_before
            pairs_before += counts[expert]
            blocks_before += cute.ceil_div(counts[expert], o.most)
        if thread == THREADS - 1:
            units[geometry.MAX_EXPERTS] = blocks_before
        cute.arch.sync_threads()

    @cute.jit
    def place_pair(self, o: Operands, counts, earlier, before, units, first: Int32, pair: Int32, lane: Int32):
        """Write the place of a pair, its unit if it is the first one there, and its row; `first` is the CTA's."""
        expert, place = expert_of(o.ids, pair, o.ends.shape[0]), Int32(-1)
        if expert >= 0:
            # pairs of the expert before this one
            rank = Int32(0)
            for other in cutlass.range(first + lane, pair, 32, unroll=1):
                rank += Int32(expert_of(o.ids, other, o.ends.shape[0]) == expert)
            rank = Int32(cute.arch.warp_redux_sync(rank, "add")) + earlier[expert]
            place = before[expert] + rank
            if rank % o.most == 0 and lane == 0:
                unit = units[expert] + rank // o.most
                quad = cute.make_rmem_tensor((4,), Int32)
                quad[0], quad[1], quad[3] = expert, place, Int32(0)
                quad[2] = cutlass.min(counts[expert] - rank, o.most)
                cute.autovec_copy(quad, aligned(address(o.units, unit, 0), 4))
            token = pair // (o.pairs.shape[0] // o.x.shape[0])
            for column in cutlass.range(lane * 8, o.x.shape[1], 256, unroll=4):
                store_values(address(o.rows, place, column), load_values(address(o.x, token, column)))
        if lane == 0:
            o.owners[pair], o.pairs[pair] = expert, place


def signature(spec: ExpertPairsSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype, k = operands.DTYPES[spec.dtype], cute.sym_int32(divisibility=8)
    return ExpertPairs(), (
        operands.dense(Int32, cute.sym_int32(), cute.sym_int32(), align=4),
        operands.rows(dtype, cute.sym_int32(), k),
        *(operands.dense(Int32, cute.sym_int32()) for _ in range(2)),
        operands.rows(dtype, cute.sym_int32(), k),
        operands.dense(Int32, cute.sym_int32(), 4),
        *(operands.dense(Int32, cute.sym_int32()) for _ in range(3)),
        *(Int32(1),) * 2,
    )
