"""The up projection at the non-zeros of a hybrid gate: up = x[m] . w_up[c] + bias[c], hidden = gate * up, and sums of
|hidden|. The hidden state replaces the gate in the entries; training stores hidden and up in tensors of their own. So
it is for relu; for the other activations see common/activation.py.

Persistent, one CTA per SM. A unit of work is a tile of 128 tokens and up to 256 neurons of its list; each row of w in
the union of 128 tokens' neurons is read once. Two kinds of warp groups:

    load    group 0. x by TMA, 64 columns per stage, and the same columns of 256 rows of w by cp.async, swizzled.
    mma     groups 1 and 2, 64 tokens each: WGMMA 64x256x16 over the columns. Then, 128 neurons at a time, sums go to
            shared memory and each entry reads its own; all other products are discarded. Entries are loaded before the
            sums are complete.

    FULL[s]    128 load threads arrive through cp.async, + 1 arrival and the bytes of x.
    EMPTY[s]   8 mma warps arrive.
    SUMS       256 mma threads: the staged sums may be overwritten, then they are complete.

sampled_grad.py runs the same kernel on dy and w_down.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import operands
from ..common.activation import hidden
from ..common.copies import copy_async
from ..common.swizzle import swizzle_column, swizzle_piece
from ..common.values import high_to_float, pack, warp_sum, widen
from ..specs import SampledUpSpec
from .ring import open_ring, release
from .sparse_product import GROUP_THREADS, REGISTERS_FILL, REGISTERS_MMA, THREADS

TILE_M, TILE_N, TILE_K = geometry.TOKEN_TILE, 256, 64
STAGES = 3
MMA_THREADS = 2 * GROUP_THREADS
# neurons whose sums are staged at a time, and rows of w that the load threads copy at a time
STAGED = 128
PASS = GROUP_THREADS // (TILE_K // 8)
# chunks of the list in a unit and in its staged part
CHUNKS, STAGED_CHUNKS = TILE_N // geometry.CHUNK, STAGED // geometry.CHUNK
# entries that a thread loads at a time
BATCH = 4


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads."""

    SUMS = 1


class Operands(NamedTuple):
    """Operands in global memory."""

    w: Any
    entries: Any
    neurons: Any
    chunks: Any
    sizes: Any
    pointwise: Any  # the kernel's own operands of the epilogue


class Pointwise(NamedTuple):
    """Operands of the epilogue, None if absent."""

    bias: Any
    up: Any
    hidden: Any
    l1: Any
    activation: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    ring: Any
    sX: Any
    sW: Any
    sums: Any  # [TILE_M, STAGED] staged for the entries
    totals: Any  # [mma warps] sums of |hidden|


class Loaded(NamedTuple):
    """Registers of a thread with data that it loads ahead of the sums."""

    entries: Any
    factors: Any  # one per entry, from `load_factor`
    bounds: Any  # where the entries of the unit's chunks begin, and their end


class SampledUp:
    """For one dtype, for training or not; sizes and strides stay symbolic. An empty bias stands for none."""

    def __init__(self, spec: Any):
        self.dtype = operands.DTYPES[spec.dtype]
        self.training = spec.training

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w_up: cute.Tensor,
        b_up: cute.Tensor | None,
        entries: cute.Tensor,
        neurons: cute.Tensor,
        chunks: cute.Tensor,
        sizes: cute.Tensor,
        up: cute.Tensor | None,
        hidden: cute.Tensor | None,
        l1: cute.Tensor,
        activation: Int32,
        capacity: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        o = Operands(w_up, entries, neurons, chunks, sizes, Pointwise(b_up, up, hidden, l1, activation))
        self.launch(x, o, capacity, max_ctas, stream)

    @cute.jit
    def launch(self, x, o, capacity, max_ctas, stream):
        shape = (TILE_M, TILE_N, TILE_K)
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (2, 1, 1), (64, TILE_N)
        )
        x_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, STAGES)
        w_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.dtype, STAGES)
        x_tma, x_g = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), x, cute.slice_(x_layout, (None, None, 0)), (TILE_M, TILE_K)
        )

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, STAGES]
            empty: cute.struct.MemRange[Int64, STAGES]
            totals: cute.struct.MemRange[Float32, MMA_THREADS // 32]
            sX: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], 1024]
            sW: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, TILE_M * STAGED], 1024]

        self.shared = feasible.check_shared_memory(Shared)
        if x.shape[0] > 0:
            self.kernel(x_tma, x_g, o, capacity, mma, x_layout, w_layout).launch(
                grid=(max_ctas, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream, use_pdl=True
            )

    @cute.kernel
    def kernel(
        self,
        x_tma: cute.CopyAtom,
        x_g: cute.Tensor,
        o: Operands,
        capacity: Int32,
        mma: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
    ):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)
        if warp_index == 0:
            cpasync.prefetch_descriptor(x_tma)
        shared = SmemAllocator().allocate(self.shared)
        ring = open_ring(shared, STAGES, GROUP_THREADS + 1, MMA_THREADS // 32, thread)
        cute.arch.sync_threads()
        s = self.views(shared, ring, x_layout, w_layout)
        columns = cute.ceil_div(o.w.shape[1], TILE_K)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if o.sizes[o.sizes.shape[0] - 1] <= capacity:
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
            here = cute.ceil_div(sizes[tile], TILE_N)
            if unit >= before + here:
                before += here
                tile += 1
                searching = tile < tiles
            else:
                searching = Boolean(False)
        return tile, before

    @cute.jit
    def load(self, s, sW, x_tma, x_g, o, columns, thread):
        """Load 64 columns of x and of the unit's rows of w per stage."""
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        tiles = cute.local_tile(x_g, (TILE_M, TILE_K), (None, None))
        x_s, x_t = cpasync.tma_partition(
            x_tma, 0, cute.make_layout(1), cute.group_modes(s.sX, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        first, piece = thread // 8, thread % 8
        rows = cute.make_rmem_tensor((TILE_N // PASS,), Int64)
        target = sW + (first * TILE_K + swizzle_piece(first, piece))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        unit, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        tile, before = self.find_tile(o.sizes, unit, Int32(0), Int32(0))
        while tile < o.sizes.shape[0] - 1:
            start = (unit - before) * TILE_N
            length = cutlass.min(cute.ceil_div(o.sizes[tile] - start, geometry.CHUNK) * geometry.CHUNK, Int32(TILE_N))
            for j in range_constexpr(TILE_N // PASS):
                row = first + PASS * j
                neuron = widen(o.neurons[tile, start + row]) if row < length else 0
                rows[j] = Int64(neuron) * o.w.stride[0] + piece * 8
            for k in cutlass.range(columns, unroll=1):
                cute.arch.mbarrier_wait(s.ring.empty + state.index, state.phase)
                if warp_index == 0:
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(s.ring.full + state.index, TILE_M * TILE_K * 2)
                    cute.copy(x_tma, x_t[None, tile, k], x_s[None, state.index], tma_bar_ptr=s.ring.full + state.index)
                size = Int32(16) if k * TILE_K + piece * 8 < o.w.shape[1] else Int32(0)
                column = k * TILE_K if size > 0 else 0
                stage = target + state.index * (TILE_N * TILE_K)
                for j in range_constexpr(TILE_N // PASS):
                    if j * PASS < length:
                        copy_async(stage + j * PASS * TILE_K, o.w.iterator + (rows[j] + column), size)
                cute.arch.cp_async_mbarrier_arrive_noinc(s.ring.full + state.index)
                state.advance()
            unit += step
            tile, before = self.find_tile(o.sizes, unit, tile, before)

    @cute.jit
    def mma(self, s, mma: cute.TiledMma, o, columns, thread):
        """Compute all products of a unit, then sample those of the pattern."""
        half = cute.arch.make_warp_uniform(thread // 128)
        lane = cute.arch.lane_idx()
        leader = mma.get_slice(cute.make_layout(2, stride=128)(half))
        rX = mma.make_fragment_A(leader.partition_A(s.sX))
        rW = mma.make_fragment_B(leader.partition_B(s.sW))
        acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((TILE_M, TILE_N)), Float32)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        unit, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        tile, before = self.find_tile(o.sizes, unit, Int32(0), Int32(0))
        loaded = Loaded(
            entries=cute.make_rmem_tensor((BATCH,), Uint32),
            factors=cute.make_rmem_tensor((BATCH,), Float32),
            bounds=cute.make_rmem_tensor((CHUNKS + 1,), Int32),
        )
        while tile < o.sizes.shape[0] - 1:
            for i in range_constexpr(CHUNKS + 1):
                loaded.bounds[i] = o.chunks[tile, cutlass.min((unit - before) * CHUNKS + i, o.chunks.shape[1] - 1)]
            self.load_entries(o, loaded, loaded.bounds[0] + thread, loaded.bounds[STAGED_CHUNKS])
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(columns, unroll=1):
                cute.arch.mbarrier_wait(s.ring.full + state.index, state.phase)
                cute.arch.fence_proxy("async.shared", space="cta")
                warpgroup.fence()
                for block in range_constexpr(TILE_K // 16):
                    cute.gemm(mma, acc, rX[None, None, block, state.index], rW[None, None, block, state.index], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if k > 0:
                    read = release(s.ring, read, lane)
                state.advance()
            warpgroup.wait_group(0)
            read = release(s.ring, read, lane)
            total = Float32(0.0)
            for half_of_unit in range_constexpr(TILE_N // STAGED):
                total += self.sample(s, o, acc, loaded, tile, unit - before, half_of_unit, thread)
            self.store_total(o, s, total, tile, unit - before, thread)
            unit += step
            tile, before = self.find_tile(o.sizes, unit, tile, before)

    @cute.jit
    def sample(self, s, o, acc, loaded, tile, part, staged: cutlass.Constexpr, thread):
        """Stage 128 columns of the sums and apply each entry's own; the first entries are already loaded."""
        # the swizzle puts eight rows of a fragment in different banks
        row, column = (thread // 32) * 16 + ((thread & 31) >> 2), (thread & 3) * 2
        cute.arch.barrier(barrier_id=Barrier.SUMS, number_of_threads=MMA_THREADS)
        for v in range_constexpr(STAGED // 8):
            for i in range_constexpr(2):
                at = (row + 8 * i) * STAGED + swizzle_column(row, 8 * v) + column
                pair = cute.make_tensor((s.sums.iterator + at).align(8), cute.make_layout(2))
                for j in range_constexpr(2):
                    pair[j] = acc[(j, i, v + staged * (STAGED // 8)), 0, 0]
        cute.arch.barrier(barrier_id=Barrier.SUMS, number_of_threads=MMA_THREADS)
        first, middle, last = (loaded.bounds[staged * STAGED_CHUNKS + i] for i in range(3))
        total = Float32(0.0)
        at = first + thread
        while at < last:
            for j in range_constexpr(BATCH):
                here = at + j * MMA_THREADS
                if here < last:
                    entry = loaded.entries[j]
                    token, position = Int32((entry >> 6) & Uint32(127)), Int32(entry & Uint32(63))
                    position = position + geometry.CHUNK if here >= middle else position
                    value = s.sums[token * STAGED + swizzle_column(token, position)]
                    position += part * TILE_N + staged * STAGED
                    total += self.apply_entry(o, here, value, entry, loaded.factors[j], tile, position)
            at += BATCH * MMA_THREADS
            self.load_entries(o, loaded, at, last)
        if const_expr(staged == 0):
            self.load_entries(o, loaded, last + thread, loaded.bounds[CHUNKS])
        return total

    @cute.jit
    def load_entries(self, o, loaded, at, last):
        """Load a thread's next entries and their factors."""
        for j in range_constexpr(BATCH):
            here = at + j * MMA_THREADS
            if here < last:
                loaded.entries[j] = Uint32(o.entries[here])
                loaded.factors[j] = self.load_factor(o, here)

    @cute.jit
    def load_factor(self, o, at):
        """Load what `apply_entry` needs of entry `at`: nothing here."""
        return Float32(1.0)

    @cute.jit
    def apply_entry(self, o, at, value, entry, factor, tile, position):
        """Store the hidden state of one entry from its product `value`; returns |hidden|."""
        own = o.pointwise
        if own.bias.shape[0] > 0:
            value += own.bias[widen(o.neurons[tile, position])].to(Float32)
        h = hidden(high_to_float(entry, self.dtype), value, own.activation)
        if const_expr(self.training):
            own.up[at] = value.to(self.dtype)
            own.hidden[at] = h.to(self.dtype)
        else:
            o.entries[at] = Int32((pack(Float32(0.0), h, self.dtype) & Uint32(0xFFFF0000)) | (entry & Uint32(0xFFFF)))
        return cute.arch.fmax(h, -h)

    @cute.jit
    def store_total(self, o, s, total, tile, part, thread):
        """Store the unit's sum of |hidden|, added in a fixed order."""
        total = warp_sum(total)
        if thread & 31 == 0:
            s.totals[thread // 32] = total
        cute.arch.barrier(barrier_id=Barrier.SUMS, number_of_threads=MMA_THREADS)
        if thread == 0:
            everything = Float32(0.0)
            for i in range_constexpr(MMA_THREADS // 32):
                everything += s.totals[i]
            o.pointwise.l1[tile, part] = everything

    def views(self, shared, ring, x_layout, w_layout):
        """Tensors over the shared struct."""
        return Views(
            ring=ring,
            sX=shared.sX.get_tensor(x_layout.outer, swizzle=x_layout.inner),
            sW=shared.sW.get_tensor(w_layout.outer, swizzle=w_layout.inner),
            sums=shared.sums.get_tensor(cute.make_layout(TILE_M * STAGED)),
            totals=shared.totals.get_tensor(cute.make_layout(MMA_THREADS // 32)),
        )


def signature(spec: SampledUpSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype = operands.DTYPES[spec.dtype]
    n, k, p = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8), cute.sym_int32()
    b = cute.sym_int32()
    arguments = (
        operands.rows(dtype, cute.sym_int32(), k),
        operands.rows(dtype, n, k),
        operands.bias(dtype),
        operands.vector(Int32, cute.sym_int32()),
        *operands.lists(b),
        operands.vector(dtype, p) if spec.training else None,
        operands.vector(dtype, p) if spec.training else None,
        operands.matrix(Float32, b, cute.sym_int32()),
        Int32(1),
        Int32(1),
        Int32(1),
    )
    return SampledUp(spec), arguments
