"""Gate and up projection of 128 tokens at the neurons of a list, and the hidden state at the gate's non-zeros.

The gate has the bits of gate_pack.py: the same products in the same order, rounded once, with weights as the A operand.
Persistent, one CTA per SM. A unit of work is a tile of 128 tokens and up to 128 neurons of its list: 128 rows of w_gate
and the same rows of w_up, one product of 256 rows. Two kinds of warp groups:

    load    group 0. x by TMA, 64 columns per stage, and the same columns of 256 rows of weights by cp.async, swizzled.
    mma     groups 1 and 2, 64 neurons each: WGMMA 64x128x16 over the columns, for the gate and for up. So a thread has
            both of the same neurons and tokens. It counts its non-zeros, and stores them behind those of the lanes
            before it: a warp has 16 neurons, and its entries are in the order of its neurons.

    FULL[s]    128 load threads arrive through cp.async, + 1 arrival and the bytes of x.
    EMPTY[s]   8 mma warps arrive.
    TOTALS     256 mma threads: the sums of |h| may be overwritten, then they are complete.

An entry is the hidden state, the token and the neuron of 16; collect.py makes lists and entries of the hybrid format.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int16, Int32, Int64, Uint32, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import operands
from ..common.activation import above, hidden
from .ring import open_ring, release
from .sparse_product import GROUP_THREADS, REGISTERS_FILL, REGISTERS_MMA, THREADS, copy_async
from ..common.swizzle import swizzle_piece
from ..common.values import MAGNITUDE, high_to_float, low_to_float, pack, prefix_sum, relu_pack, warp_sum, widen
from ..specs import SampledGateSpec

TOKENS = geometry.TOKEN_TILE
# neurons of a unit, rows of both weights, columns of a stage
UNIT, ROWS, TILE_K = geometry.LISTED_UNIT, 2 * geometry.LISTED_UNIT, 64
STAGES = 4
MMA_THREADS = 2 * GROUP_THREADS
MMA_WARPS = MMA_THREADS // 32
# rows that the load threads copy at a time, and neurons of a warp
PASS = GROUP_THREADS // (TILE_K // 8)
SIXTEEN = UNIT // MMA_WARPS


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads."""

    TOTALS = 1


class Operands(NamedTuple):
    """Operands in global memory; empty biases stand for none."""

    w_gate: Any
    w_up: Any
    b_gate: Any
    b_up: Any
    neurons: Any
    sizes: Any
    counts: Any
    staged: Any
    l1: Any
    activation: Any
    threshold: Any  # of fatrelu, see sm90/activation.py
    tokens: Any  # their number


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    ring: Any
    sX: Any
    sW: Any
    totals: Any  # [mma warps] sums of |h|


class SampledGate:
    """For one dtype; sizes and strides stay symbolic."""

    def __init__(self, spec: SampledGateSpec):
        self.dtype = operands.DTYPES[spec.dtype]

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w_gate: cute.Tensor,
        w_up: cute.Tensor,
        b_gate: cute.Tensor,
        b_up: cute.Tensor,
        neurons: cute.Tensor,
        sizes: cute.Tensor,
        counts: cute.Tensor,
        staged: cute.Tensor,
        l1: cute.Tensor,
        activation: Int32,
        threshold: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """`staged` has room for 128 entries of each place of `neurons`, and `counts` the number that are there."""
        shape = (ROWS, TOKENS, TILE_K)
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (2, 1, 1), (64, TOKENS)
        )
        w_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, STAGES)
        x_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.dtype, STAGES)
        x_tma, x_g = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), x, cute.slice_(x_layout, (None, None, 0)), (TOKENS, TILE_K)
        )

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, STAGES]
            empty: cute.struct.MemRange[Int64, STAGES]
            totals: cute.struct.MemRange[Float32, MMA_WARPS]
            sW: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]
            sX: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], 1024]

        self.shared = feasible.check_shared_memory(Shared)
        o = Operands(w_gate, w_up, b_gate, b_up, neurons, sizes, counts, staged, l1, activation, threshold, x.shape[0])
        if x.shape[0] > 0:
            self.kernel(x_tma, x_g, o, mma, w_layout, x_layout).launch(
                grid=(max_ctas, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream, use_pdl=True
            )

    @cute.kernel
    def kernel(
        self,
        x_tma: cute.CopyAtom,
        x_g: cute.Tensor,
        o: Operands,
        mma: cute.TiledMma,
        w_layout: cute.ComposedLayout,
        x_layout: cute.ComposedLayout,
    ):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)
        if warp_index == 0:
            cpasync.prefetch_descriptor(x_tma)
        shared = SmemAllocator().allocate(self.shared)
        ring = open_ring(shared, STAGES, GROUP_THREADS + 1, MMA_WARPS, thread)
        cute.arch.sync_threads()
        s = Views(
            ring=ring,
            sX=shared.sX.get_tensor(x_layout.outer, swizzle=x_layout.inner),
            sW=shared.sW.get_tensor(w_layout.outer, swizzle=w_layout.inner),
            totals=shared.totals.get_tensor(cute.make_layout(MMA_WARPS)),
        )
        columns = cute.ceil_div(x_g.shape[1], TILE_K)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if group == 0:
            cute.arch.setmaxregister_decrease(REGISTERS_FILL)
            self.load(s, shared.sW.data_ptr(), x_tma, x_g, o, columns, thread)
        else:
            cute.arch.setmaxregister_increase(REGISTERS_MMA)
            self.mma(s, mma, o, columns, thread - 128)

    @cute.jit
    def find_tile(self, sizes, unit, tile, before):
        """Return the tile that holds `unit`, searching from `tile` on, and the number of units before that tile."""
        tiles = sizes.shape[0] - 1
        searching = tile < tiles
        while searching:
            here = cute.ceil_div(sizes[tile], UNIT)
            if unit >= before + here:
                before += here
                tile += 1
                searching = tile < tiles
            else:
                searching = Boolean(False)
        return tile, before

    @cute.jit
    def load(self, s, sW, x_tma, x_g, o, columns, thread):
        """Load 64 columns of x and of the unit's rows of both weights per stage."""
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        tiles = cute.local_tile(x_g, (TOKENS, TILE_K), (None, None))
        x_s, x_t = cpasync.tma_partition(
            x_tma, 0, cute.make_layout(1), cute.group_modes(s.sX, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        first, piece = thread // 8, thread % 8
        gate_rows = cute.make_rmem_tensor((UNIT // PASS,), Int64)
        up_rows = cute.make_rmem_tensor((UNIT // PASS,), Int64)
        target = sW + (first * TILE_K + swizzle_piece(first, piece))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        unit, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        tile, before = self.find_tile(o.sizes, unit, Int32(0), Int32(0))
        while tile < o.sizes.shape[0] - 1:
            start = (unit - before) * UNIT
            length = cutlass.min(o.sizes[tile] - start, Int32(UNIT))
            for j in range_constexpr(UNIT // PASS):
                row = first + PASS * j
                neuron = widen(o.neurons[tile, start + row]) if row < length else 0
                gate_rows[j] = Int64(neuron) * o.w_gate.stride[0] + piece * 8
                up_rows[j] = Int64(neuron) * o.w_up.stride[0] + piece * 8
            for k in cutlass.range(columns, unroll=1):
                cute.arch.mbarrier_wait(s.ring.empty + state.index, state.phase)
                if warp_index == 0:
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(s.ring.full + state.index, TOKENS * TILE_K * 2)
                    cute.copy(x_tma, x_t[None, tile, k], x_s[None, state.index], tma_bar_ptr=s.ring.full + state.index)
                size = Int32(16) if k * TILE_K + piece * 8 < x_g.shape[1] else Int32(0)
                column = k * TILE_K if size > 0 else 0
                stage = target + state.index * (ROWS * TILE_K)
                for j in range_constexpr(UNIT // PASS):
                    if j * PASS < length:
                        place = stage + j * PASS * TILE_K
                        copy_async(place, o.w_gate.iterator + (gate_rows[j] + column), size)
                        copy_async(place + UNIT * TILE_K, o.w_up.iterator + (up_rows[j] + column), size)
                cute.arch.cp_async_mbarrier_arrive_noinc(s.ring.full + state.index)
                state.advance()
            unit += step
            tile, before = self.find_tile(o.sizes, unit, tile, before)

    @cute.jit
    def mma(self, s, mma: cute.TiledMma, o, columns, thread):
        """Compute all products of a unit, then store its non-zeros."""
        half = cute.arch.make_warp_uniform(thread // 128)
        lane = cute.arch.lane_idx()
        leader = mma.get_slice(cute.make_layout(2, stride=128)(half))
        rW = mma.make_fragment_A(leader.partition_A(s.sW))
        rX = mma.make_fragment_B(leader.partition_B(s.sX))
        acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((ROWS, TOKENS)), Float32)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        unit, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        tile, before = self.find_tile(o.sizes, unit, Int32(0), Int32(0))
        while tile < o.sizes.shape[0] - 1:
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(columns, unroll=1):
                cute.arch.mbarrier_wait(s.ring.full + state.index, state.phase)
                cute.arch.fence_proxy("async.shared", space="cta")
                warpgroup.fence()
                for block in range_constexpr(TILE_K // 16):
                    cute.gemm(mma, acc, rW[None, None, block, state.index], rX[None, None, block, state.index], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if k > 0:
                    read = release(s.ring, read, lane)
                state.advance()
            warpgroup.wait_group(0)
            read = release(s.ring, read, lane)
            total = self.store_entries(o, acc, tile, (unit - before) * UNIT, thread)
            self.store_total(o, s, total, tile, unit - before, thread)
            unit += step
            tile, before = self.find_tile(o.sizes, unit, tile, before)

    @cute.jit
    def store_entries(self, o, acc, tile, start, thread):
        """Store the non-zeros of a warp's 16 neurons behind each other; returns the thread's sum of |h|.

        Lane 4 g + q has tokens 8 v + 2 q and 8 v + 2 q + 1 of neurons g + 8 i: ascending lanes have ascending neurons.
        """
        lane = cute.arch.lane_idx()
        group, quarter = lane >> 2, lane & 3
        first = start + cute.arch.make_warp_uniform(thread // 32) * SIXTEEN
        size, left = o.sizes[tile], o.tokens - tile * TOKENS
        gates = cute.make_rmem_tensor((TOKENS // 8, 2), Uint32)
        up_bias = cute.make_rmem_tensor((2,), Float32)
        counts = Uint32(0)
        for i in range_constexpr(2):
            place = first + 8 * i + group
            exists = place < size
            neuron = widen(o.neurons[tile, place]) if exists else 0
            gate_bias, up_bias[i] = Float32(0.0), Float32(0.0)
            if o.b_gate.shape[0] > 0:
                gate_bias = o.b_gate[neuron].to(Float32)
            if o.b_up.shape[0] > 0:
                up_bias[i] = o.b_up[neuron].to(Float32)
            for v in range_constexpr(TOKENS // 8):
                low, high = acc[(0, i, v), 0, 0], acc[(1, i, v), 0, 0]
                if o.b_gate.shape[0] > 0:
                    low += gate_bias
                    high += gate_bias
                pair = above(relu_pack(low, high, self.dtype), o.threshold, self.dtype)
                # an even number of tokens is not promised
                token = 8 * v + 2 * quarter
                kept = Uint32(0xFFFFFFFF) if token + 1 < left else Uint32(0xFFFF)
                pair = pair & kept if exists & (token < left) else Uint32(0)
                gates[v, i] = pair
                counts += Uint32((pair & Uint32(MAGNITUDE)) != 0) << (16 * i)
                counts += Uint32((pair & Uint32(MAGNITUDE << 16)) != 0) << (16 * i)
        # sums over the lanes stay below 2^16
        before = Uint32(prefix_sum(Int32(counts), lane))
        lower = (Uint32(cute.arch.shuffle_sync(before + counts, 31))) & Uint32(0xFFFF)
        neighbours = counts + Uint32(cute.arch.shuffle_sync_bfly(counts, 1))
        neighbours += Uint32(cute.arch.shuffle_sync_bfly(neighbours, 2))
        base = Int64(tile) * o.neurons.shape[1] * TOKENS + first * TOKENS
        total = Float32(0.0)
        for i in range_constexpr(2):
            place = first + 8 * i + group
            if quarter == 0 and place < size:
                o.counts[tile, place] = Int16((neighbours >> (16 * i)) & Uint32(0xFFFF))
            at = Int32(before & Uint32(0xFFFF)) if i == 0 else Int32((before >> 16) + lower)
            for v in range_constexpr(TOKENS // 8):
                pair = gates[v, i]
                for j in range_constexpr(2):
                    if (pair & Uint32(MAGNITUDE << (16 * j))) != 0:
                        gate = high_to_float(pair, self.dtype) if j else low_to_float(pair, self.dtype)
                        up = acc[(j, i, v), 1, 0]
                        if o.b_up.shape[0] > 0:
                            up += up_bias[i]
                        h = hidden(gate, up, o.activation)
                        total += cute.arch.fmax(h, -h)
                        bits = pack(Float32(0.0), h, self.dtype) & Uint32(0xFFFF0000)
                        token = 8 * v + 2 * quarter + j
                        entry = bits | Uint32(token * SIXTEEN + 8 * i + group)
                        cute.make_tensor(o.staged.iterator + (base + at), cute.make_layout(1))[0] = Int32(entry)
                        at += 1
        return total

    @cute.jit
    def store_total(self, o, s, total, tile, part, thread):
        """Store the unit's sum of |h|, added in a fixed order."""
        total = warp_sum(total)
        cute.arch.barrier(barrier_id=Barrier.TOTALS, number_of_threads=MMA_THREADS)
        if thread & 31 == 0:
            s.totals[thread // 32] = total
        cute.arch.barrier(barrier_id=Barrier.TOTALS, number_of_threads=MMA_THREADS)
        if thread == 0:
            everything = Float32(0.0)
            for i in range_constexpr(MMA_WARPS):
                everything += s.totals[i]
            o.l1[tile, part] = everything


def signature(spec: SampledGateSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype = operands.DTYPES[spec.dtype]
    n, k, b = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8), cute.sym_int32()
    places = cute.sym_int32(divisibility=64)
    arguments = (
        operands.rows(dtype, cute.sym_int32(), k),
        operands.rows(dtype, n, k),
        operands.rows(dtype, n, k),
        operands.bias(dtype),
        operands.bias(dtype),
        operands.matrix(Int16, b, places),
        operands.vector(Int32, cute.sym_int32(), align=4),
        operands.matrix(Int16, b, places),
        operands.vector(Int32, cute.sym_int32()),
        operands.matrix(Float32, b, cute.sym_int32()),
        Int32(1),
        Int32(1),
        Int32(1),
    )
    return SampledGate(spec), arguments
