"""Rank neurons by descending popularity, then by index: order[rank] = neuron and slot[neuron] = rank.

A neuron's rank is the number of neurons before it. All pairs are compared: for thousands of neurons that takes a few
microseconds in one launch; a sort takes several launches. Every CTA ranks the same number of neurons. A thread has four
of them and a slice of all neurons, which are staged in shared memory: with S slices every S-th four. Counters of
weight_grad.py are cleared, too.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr
from cutlass.memory import SmemAllocator

from ..common import launch, operands
from ..common.copies import aligned, copy_async
from ..specs import RankSpec

THREADS = 512
# neurons of a thread, and neurons that are staged at a time
OWN, BLOCK = 4, 16384
# fewest neurons of a CTA, because one thread adds what all slices have counted, and most
LEAST, MOST = 32, THREADS


class Rank:
    """The only variant; sizes stay symbolic."""

    @cute.jit
    def __call__(self, *arguments: Any):
        """The operands of `kernel` without the share, the number of CTAs and the stream."""
        popularity, *rest, max_ctas, stream = arguments
        n = popularity.shape[0]
        share = cute.ceil_div(cute.ceil_div(n, max_ctas), OWN) * OWN
        share = cutlass.min(cutlass.max(share, Int32(LEAST)), Int32(MOST))
        launch.start(self.kernel(popularity, *rest, share), cute.ceil_div(n, share), THREADS, stream)

    @cute.kernel
    def kernel(
        self, popularity: cute.Tensor, order: cute.Tensor, slot: cute.Tensor, arrivals: cute.Tensor, share: Int32
    ):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        n, mine, groups = popularity.shape[0], cta * share, share // OWN
        slices, part = THREADS // groups, thread // groups
        neuron = mine + thread % groups * OWN
        shared = SmemAllocator()
        block = shared.allocate_tensor(Int32, cute.make_layout(BLOCK), byte_alignment=16)
        counts = shared.allocate_tensor(Float32, cute.make_layout(THREADS * OWN), byte_alignment=16)
        own, before = cute.make_rmem_tensor((OWN,), Int32), cute.make_rmem_tensor((OWN,), Float32)
        before.fill(0.0)
        launch.wait()
        for i in cutlass.range(cta * THREADS + thread, arrivals.shape[0], cute.arch.grid_dim()[0] * THREADS, unroll=1):
            arrivals[i] = Int32(0)
        # some threads of the last slice, and of the last CTA, have nothing to do
        busy = part < slices and neuron < n
        if busy:
            cute.autovec_copy(aligned(popularity.iterator + neuron, 4), own)
        for first in cutlass.range(0, n, BLOCK, unroll=1):
            fours = cutlass.min(n - first, Int32(BLOCK)) // 4
            for q in cutlass.range(thread, fours, THREADS, unroll=1):
                copy_async(block.iterator + 4 * q, popularity.iterator + first + 4 * q, Int32(16))
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if busy:
                self.compare(block, own, before, part, slices, fours, (neuron - first) // 4)
            cute.arch.sync_threads()
        if part == 0:
            for k in range_constexpr(OWN):
                for j in range_constexpr(k):
                    before[k] += Float32(1.0) if own[j] == own[k] else Float32(0.0)
        cute.autovec_copy(before, aligned(counts.iterator + OWN * thread, 4))
        cute.arch.sync_threads()
        if thread < share and mine + thread < n:
            total = Float32(0.0)
            for i in cutlass.range(slices, unroll=8):
                total += counts[i * share + thread]
            slot[mine + thread] = Int32(total)
            order[Int32(total)] = mine + thread

    @cute.jit
    def compare(self, block, own, before, part, slices, fours, place):
        """Count the neurons of a slice of the block that are before each of the thread's, whose place is `place`.

        Equal ones count if they are in an earlier four.
        """
        least = cute.make_rmem_tensor((OWN,), Int32)
        for k in range_constexpr(OWN):
            least[k] = own[k] - 1
        at = part
        while at < cutlass.min(place, fours):
            self.count(block, at, least, before)
            at += slices
        while at < fours:
            self.count(block, at, own, before)
            at += slices

    @cute.jit
    def count(self, block, at, least, before):
        """Count those of four neurons that are more popular than `least`."""
        quad = cute.make_rmem_tensor((4,), Int32)
        cute.autovec_copy(aligned(block.iterator + 4 * at, 4), quad)
        for j in range_constexpr(4):
            for k in range_constexpr(OWN):
                before[k] = add_if_greater(before[k], quad[j], least[k])


@cute.jit
def add_if_greater(count: Float32, a: Int32, b: Int32) -> Float32:
    """Add one if a > b, in two instructions. The unit of fp32 sums has nothing else to do."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.gt.s32 p, {$r1}, {$r2}; mov.f32 {$w0}, {$r0}; @p add.f32 {$w0}, {$w0}, 0f3F800000; }",
        write_only_types=[Float32],
        read_only_args=[count, a, b],
    )


def signature(spec: RankSpec) -> tuple[Any, tuple[Any, ...]]:
    n = cute.sym_int32(divisibility=8)
    vectors = (operands.dense(Int32, n) for _ in range(3))
    return Rank(), (*vectors, operands.dense(Int32, cute.sym_int32()), Int32(1))
