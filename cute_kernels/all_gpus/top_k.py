"""The k largest gates of each token, as what `pack` needs to keep them: the k-th largest value, and the last neuron of
those with that value that is still one of the k. The first neurons of equal gates come first. Gates are those after
ReLU, so a token with fewer than k positive gates keeps all of these.

A CTA has a token, all of whose gates it holds in registers. Without sign the values are in the order of their 15 bits:
the k-th largest is found bit by bit, by counting the values that are at least as large as a trial.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Uint32, range_constexpr
from cutlass.memory import SmemAllocator

from ..common import launch, operands
from ..common.activation import above_signs
from ..common.copies import address, load_values_if
from ..common.values import prefix_sum
from ..specs import TopKSpec

# bits of a value without its sign
BITS = 15


class TopK:
    """For values of any 16-bit dtype, and most neurons: eight for each of a thread's quads."""

    def __init__(self, spec: TopKSpec):
        # more registers of data would be spilled
        self.threads = 1024 if spec.quads > 8 else 512
        self.quads, self.warps = spec.quads * 512 // self.threads, self.threads // 32

    @cute.jit
    def __call__(self, gate: cute.Tensor, levels: cute.Tensor, k: Int32, infinity: Int32, stream: cuda.CUstream):
        """`gate` as bits, with those of `infinity`. `levels` [M, 2]: the bits of the k-th largest gate, 0 if it is not
        positive, and the last neuron.
        """
        if gate.shape[0] > 0:
            launch.start(self.kernel(gate, levels, k, infinity), gate.shape[0], self.threads, stream)

    @cute.kernel
    def kernel(self, gate: cute.Tensor, levels: cute.Tensor, k: Int32, infinity: Int32):
        thread, token, lane = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = SmemAllocator()
        # of two trials in turn, so that one barrier for each is enough
        sums = shared.allocate_tensor(Int32, cute.make_layout((2, self.warps)))
        ties = shared.allocate_tensor(Int32, cute.make_layout(self.quads * self.warps))
        launch.wait()
        pairs = cute.make_rmem_tensor((4, self.quads), Uint32)
        for q in range_constexpr(self.quads):
            self.load(gate, token, self.neuron(q, thread), pairs[None, q], infinity)

        level = Uint32(0)
        for turn in cutlass.range(BITS, unroll=1):
            trial = level | (Uint32(1) << (BITS - 1 - turn))
            if self.count(pairs, trial, sums, turn & 1, warp, lane) >= k:
                level = trial
        # how many of those with this value are among the k
        more = self.count(pairs, level + 1, sums, Int32(BITS & 1), warp, lane)
        if thread == 0:
            levels[token, 0] = Int32(level)
            if level == 0:
                levels[token, 1] = Int32(-1)
        # read again: beside counts and sums they do not fit in registers
        eight = cute.make_rmem_tensor((4,), Uint32)
        for q in cutlass.range(self.quads, unroll=1):
            self.load(gate, token, self.neuron(q, thread), eight, infinity)
            found = Int32(cute.arch.warp_redux_sync(self.equal(eight, level), "add"))
            if lane == 0:
                ties[q * self.warps + warp] = found
        cute.arch.sync_threads()
        if warp == 0:
            self.add_before(ties, lane)
        cute.arch.sync_threads()
        for q in cutlass.range(self.quads, unroll=1):
            neuron = self.neuron(q, thread)
            self.load(gate, token, neuron, eight, infinity)
            before = ties[q * self.warps + warp] + prefix_sum(self.equal(eight, level), lane)
            left = k - more - before
            if (level > 0) & (left > 0):
                self.store_last(eight, level, left, levels, token, neuron)

    @cute.jit
    def load(self, gate: cute.Tensor, token: Int32, neuron: Int32, eight: cute.Tensor, infinity: Int32):
        """Eight gates after ReLU, or zeros beyond the last one; all bits but the sign for NaN."""
        load_values_if(address(gate, token, neuron), eight, neuron < gate.shape[1])
        most = Uint32(infinity) * Uint32(0x10001)
        for i in range_constexpr(4):
            value = eight[i] & Uint32(0x7FFF7FFF)
            # bits 15 and 31 to all bits of their halves
            over = above_signs(value, most)
            nan, negative = (Uint32(cute.arch.prmt(word, word, 0xBB99)) for word in (over, eight[i]))
            eight[i] = (value & ~negative) | (nan & Uint32(0x7FFF7FFF))

    @cute.jit
    def neuron(self, q: Int32 | int, thread: Int32):
        """The first of eight neurons."""
        return (q * self.threads + thread) * 8

    @cute.jit
    def count(self, pairs: cute.Tensor, trial: Uint32, sums: cute.Tensor, turn: Int32, warp: Int32, lane: Int32):
        """How many of the token's values are at least `trial`, which is positive."""
        own, both = Int32(0), trial | trial << 16
        for q in range_constexpr(self.quads):
            for i in range_constexpr(4):
                # no half borrows from the other
                at_least = ((pairs[i, q] | Uint32(0x80008000)) - both) & Uint32(0x80008000)
                own += Int32(cute.arch.popc(at_least))
        own = Int32(cute.arch.warp_redux_sync(own, "add"))
        if lane == 0:
            sums[turn, warp] = own
        cute.arch.sync_threads()
        part = Int32(0)
        if lane < self.warps:
            part = sums[turn, lane]
        return Int32(cute.arch.warp_redux_sync(part, "add"))

    @cute.jit
    def equal(self, eight: cute.Tensor, level: Uint32):
        """How many of eight values are `level`."""
        found = Int32(0)
        for i in range_constexpr(4):
            found += Int32((eight[i] & Uint32(0xFFFF)) == level) + Int32((eight[i] >> 16) == level)
        return found

    @cute.jit
    def add_before(self, ties: cute.Tensor, lane: Int32):
        """Sums of all elements before each, by a warp."""
        each = self.quads * self.warps // 32
        own = Int32(0)
        for j in range_constexpr(each):
            own += ties[lane * each + j]
        before = prefix_sum(own, lane)
        for j in range_constexpr(each):
            found = ties[lane * each + j]
            ties[lane * each + j] = before
            before += found

    @cute.jit
    def store_last(self, eight: cute.Tensor, level: Uint32, left: Int32, levels, token: Int32, neuron: Int32):
        """Store the last neuron that is kept, if it is one of these eight: the `left`-th of those with this value."""
        for i in range_constexpr(8):
            if ((eight[i // 2] >> (16 * (i % 2))) & Uint32(0xFFFF)) == level:
                left -= 1
                if left == 0:
                    levels[token, 1] = neuron + i


def signature(spec: TopKSpec) -> tuple[Any, tuple[Any, ...]]:
    m = cute.sym_int32()
    gate = operands.rows(Int16, m, cute.sym_int32(divisibility=8))
    return TopK(spec), (gate, operands.dense(Int32, m, 2, align=4), Int32(1), Int32(1))
