"""Gate GEMM that emits TwELL for up to 64 tokens, for every GPU since sm_80: the operands, the results and their order
are those of sm90/gate_pack_few.py.

Reading the weights once is the bound, so they are spread over many CTAs. Two kernels:

    multiply    a CTA for 64 neurons, all of K and all tokens. cp.async copies steps of 64 columns into a ring of
                stages, STAGES - 1 steps ahead. Eight warps: two by neurons, four by columns of a step. mma.sync
                m16n8k16 has neurons as rows and tokens as columns. The four add up in shared memory, which was the
                ring's, in a fixed order. The gates of all tokens, rounded, go to the spill.
    pack        a warp for a token's tile: reads its gates in the spill, and writes its words and, with the seven other
                tokens of its CTA, their statistics.

The spill of a tile that does not overflow means nothing, so it may hold gates in between.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible, geometry
from ..common import launch, operands
from ..common.activation import above
from ..common.copies import address, copy_async, load_quad, load_values, store_values
from ..common.mma import clear, load_matrices, mma_16x8x16
from ..common.rows import MAX_WIDTH, clear_arrivals, pack_words, store_words
from ..common.swizzle import swizzle_piece
from ..common.values import relu_pack
from ..specs import GatePackFewSpec

NEURONS, TILE_K = 64, 64
# 16-byte pieces of a row of a stage, and their values
PIECES, PIECE = TILE_K // 8, 8
WARPS_N, WARPS_K = 2, TILE_K // 16
WARPS = WARPS_N * WARPS_K
THREADS = 32 * WARPS
# fragments of 16 neurons of a warp
FRAGMENTS = NEURONS // WARPS_N // 16
RING = 96 * 1024
# a token's sums; the gap puts the lanes of a fragment, and those that add up, into different banks
PITCH = NEURONS + 4
assert WARPS == geometry.STATS_ROWS


class Operands(NamedTuple):
    """Operands of `multiply` in global memory; an empty `bias` stands for none."""

    x: Any
    w: Any
    bias: Any
    spill: Any
    threshold: Any


class Copy(NamedTuple):
    """What a thread copies of a step: pieces of x and of w."""

    x: Any
    w: Any


class GatePackFew:
    """For one dtype and number of tokens; the compression is the run-time words_per_tile."""

    def __init__(self, spec: GatePackFewSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.tokens = spec.tokens
        self.stage_values = (NEURONS + self.tokens) * TILE_K
        self.stages = RING // (2 * self.stage_values)
        # fragments of eight tokens, and pieces that a thread copies of them
        self.columns = self.tokens // 8
        # the sums of all splits take the ring's place
        assert 4 * WARPS_K * PITCH * self.tokens <= 2 * self.stages * self.stage_values

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        bias: cute.Tensor,
        words: cute.Tensor,
        spill: cute.Tensor,
        stats: cute.Tensor,
        arrivals: cute.Tensor,
        words_per_tile: Int32,
        threshold: Int32,
        stream: cuda.CUstream,
    ):
        @cute.struct
        class Ring:
            values: cute.struct.Align[cute.struct.MemRange[self.dtype, self.stages * self.stage_values], 128]

        @cute.struct
        class Rows:
            words: cute.struct.Align[cute.struct.MemRange[Uint32, WARPS * MAX_WIDTH], 16]
            counts: cute.struct.MemRange[Int32, WARPS]

        self.ring, self.rows = feasible.check_portable_memory(Ring), feasible.check_portable_memory(Rows)
        tiles = cute.ceil_div(w.shape[0], geometry.TILE)
        if x.shape[0] > 0:
            self.multiply(Operands(x, w, bias, spill, threshold)).launch(
                grid=(tiles * (geometry.TILE // NEURONS), 1, 1),
                block=(THREADS, 1, 1),
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=launch.overlaps(),
            )
            self.pack(words, spill, stats, arrivals, words_per_tile).launch(
                grid=(tiles, cute.ceil_div(x.shape[0], WARPS), 1),
                block=(THREADS, 1, 1),
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=launch.overlaps(),
            )

    # ---- multiply ----

    @cute.kernel
    def multiply(self, o: Operands):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        first = cute.arch.block_idx()[0] * NEURONS
        ring = SmemAllocator().allocate(self.ring).values.data_ptr()
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()
        acc = cute.make_rmem_tensor((4, self.columns, FRAGMENTS), Float32)
        clear(acc)
        steps = cute.ceil_div(o.x.shape[1], TILE_K)
        for step in range_constexpr(self.stages - 1):
            self.load(o, ring, first, Int32(step), Int32(step), thread)
        stage, free = Int32(0), Int32(self.stages - 1)
        for k in cutlass.range(steps, unroll=1):
            # this step has arrived, and all warps have read the one before, whose stage is filled again
            cute.arch.cp_async_wait_group(self.stages - 2)
            cute.arch.sync_threads()
            self.load(o, ring, first, k + (self.stages - 1), free, thread)
            self.multiply_step(acc, ring + stage * self.stage_values, warp, lane)
            free, stage = stage, stage + 1 if stage + 1 < self.stages else 0
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        sums = cute.make_tensor(cute.recast_ptr(ring, dtype=Float32), cute.make_layout(WARPS_K * PITCH * self.tokens))
        self.stage_sums(acc, sums, warp, lane)
        cute.arch.sync_threads()
        self.add_splits(o, sums, first, thread)

    @cute.jit
    def load(self, o: Operands, ring, first: Int32, step: Int32, stage: Int32, thread: Int32):
        """Start a thread's copies of a step; zeros outside the matrices."""
        piece = thread % PIECES
        column = step * TILE_K + piece * PIECE
        target = ring + stage * self.stage_values
        for j in range_constexpr(NEURONS * PIECES // THREADS):
            row = thread // PIECES + j * (THREADS // PIECES)
            exists = (column < o.w.shape[1]) & (first + row < o.w.shape[0])
            where = target + (row * TILE_K + swizzle_piece(row, piece))
            copy_async(where, address(o.w, first + row, column), Int32(16) if exists else Int32(0))
        for j in range_constexpr((self.tokens * PIECES + THREADS - 1) // THREADS):
            row = thread // PIECES + j * (THREADS // PIECES)
            if row < self.tokens:
                exists = (column < o.x.shape[1]) & (row < o.x.shape[0])
                where = target + ((NEURONS + row) * TILE_K + swizzle_piece(row, piece))
                copy_async(where, address(o.x, row, column), Int32(16) if exists else Int32(0))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def multiply_step(self, acc: cute.Tensor, stage, warp: Int32, lane: Int32):
        """Add the products of a warp's 16 columns of a step.

        Matrices of neurons: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15. Of tokens: columns 0-7 and 8-15 of
        rows 0-7, then of rows 8-15, which are rows 0-7 again if there are no more.
        """
        split, part = warp % WARPS_K, warp // WARPS_K
        row = part * (16 * FRAGMENTS) + (lane & 15)
        neurons = stage + (row * TILE_K + swizzle_piece(row, 2 * split + (lane >> 4)))
        own = (lane & 7) + (lane >> 4) * 8 if const_expr(self.tokens > 8) else lane & 7
        tokens = stage + ((NEURONS + own) * TILE_K + swizzle_piece(own, 2 * split + ((lane >> 3) & 1)))
        rows = [load_matrices(neurons + i * 16 * TILE_K) for i in range(FRAGMENTS)]
        for pair in range_constexpr((self.columns + 1) // 2):
            four = load_matrices(tokens + pair * 16 * TILE_K)
            for v in range_constexpr(min(2, self.columns)):
                for i in range_constexpr(FRAGMENTS):
                    sums = [acc[j, 2 * pair + v, i] for j in range(4)]
                    sums = mma_16x8x16(sums, *rows[i], four[2 * v], four[2 * v + 1], self.dtype)
                    for j in range_constexpr(4):
                        acc[j, 2 * pair + v, i] = sums[j]

    @cute.jit
    def stage_sums(self, acc: cute.Tensor, sums: cute.Tensor, warp: Int32, lane: Int32):
        """Store a warp's sums in shared memory, by split and token."""
        neuron = warp // WARPS_K * (16 * FRAGMENTS) + (lane >> 2)
        token = warp % WARPS_K * self.tokens + (lane & 3) * 2
        for v in range_constexpr(self.columns):
            for i in range_constexpr(FRAGMENTS):
                for h in range_constexpr(2):
                    for j in range_constexpr(2):
                        sums[(token + 8 * v + j) * PITCH + neuron + 16 * i + 8 * h] = acc[2 * h + j, v, i]

    @cute.jit
    def add_splits(self, o: Operands, sums: cute.Tensor, first: Int32, thread: Int32):
        """Add up the splits of eight neurons of a token; bias, ReLU, rounding and the threshold; store the gates."""
        eights = NEURONS // 8
        neuron = first + thread % eights * 8
        quad = cute.make_rmem_tensor((4,), Uint32)
        values = cute.make_rmem_tensor((8,), Float32)
        for j in range_constexpr((self.tokens * eights + THREADS - 1) // THREADS):
            token = thread // eights + j * (THREADS // eights)
            if token < self.tokens and token < o.x.shape[0]:
                clear(values)
                # an empty bias has no neurons
                if neuron < o.bias.shape[0]:
                    for i in range_constexpr(8):
                        values[i] = o.bias[neuron + i].to(Float32)
                for split in range_constexpr(WARPS_K):
                    source = sums.iterator + ((split * self.tokens + token) * PITCH + thread % eights * 8)
                    for half in range_constexpr(2):
                        four = load_quad(source + 4 * half)
                        for i in range_constexpr(4):
                            values[4 * half + i] += Uint32(four[i]).bitcast(Float32)
                for i in range_constexpr(4):
                    pair = above(relu_pack(values[2 * i], values[2 * i + 1], self.dtype), o.threshold, self.dtype)
                    quad[i] = pair if neuron < o.w.shape[0] else Uint32(0)
                store_values(address(o.spill, token, neuron), quad)

    # ---- pack ----

    @cute.kernel
    def pack(self, words: cute.Tensor, spill: cute.Tensor, stats: cute.Tensor, arrivals: cute.Tensor, width: Int32):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        column, group, _ = cute.arch.block_idx()
        shared = SmemAllocator().allocate(self.rows)
        counts = shared.counts.get_tensor(cute.make_layout(WARPS))
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()
        if column == 0 and group == 0:
            clear_arrivals(arrivals, thread, THREADS)
        m, count = group * WARPS + warp, Int32(0)
        if m < words.shape[0]:
            neuron = column * geometry.TILE + lane * 8
            buffer = cute.make_tensor(shared.words.data_ptr() + warp * MAX_WIDTH, cute.make_layout(MAX_WIDTH))
            count = pack_words(load_values(address(spill, m, neuron)), Uint32(neuron), buffer, width, lane)
            store_words(address(words, m, column * width), buffer, width, lane)
        if lane == 0:
            counts[warp] = count
        cute.arch.sync_threads()
        if thread == 0:
            nonzeros, overflows = Int32(0), Int32(0)
            for i in range_constexpr(WARPS):
                nonzeros += counts[i]
                overflows += Int32(counts[i] >= width)
            stats[group, column, 0] = nonzeros
            stats[group, column, 1] = overflows


def signature(spec: GatePackFewSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return GatePackFew(spec), operands.gate_pack(spec.dtype)
