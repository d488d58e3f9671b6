"""The down product of experts for units of pairs: z[p] = sum over the neurons c that any pair of the unit fires of
h[p, c] * w_down[expert, c]. Units are those of expert_pairs.py, neurons and h those of expert_union.py. Each row of the
weights is read once for a unit; WGMMA does the rest.

Persistent, `ctas_per_sm` CTAs per SM. A CTA takes every so many-th tile: 128 columns of a unit. Neighbours read the
same rows.

    fill    four warps. cp.async of 64 rows of w_down, 128 columns each, into a swizzled MN-major stage of a ring, and
            TMA of h at the same 64 neurons.
    mma     eight warps, four for each 64 columns: WGMMA 64 x pairs x 16, weights as the A operand. Then they store
            their sums from registers.

    FULL[s]    128 fill threads when their copies are complete, and 1 arrival + bytes of TMA.
    EMPTY[s]   8 mma warps arrive.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, Uint8, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import launch, operands
from ..specs import E4M3, ExpertGatheredSpec
from .copies import Transfer, partition, staged, tma_load
from .ring import open_ring, release
from .sparse_product import gather_columns

# columns of a tile, and positions of a list in a stage
COLUMNS, TILE_K = 128, geometry.CHUNK
PANELS = COLUMNS // 64
MMA_WARPS, FILL_THREADS = 8, 128
THREADS = 32 * MMA_WARPS + FILL_THREADS
# bytes of the stages of all rings of an SM, and most stages of one
RINGS, STAGES = 220 * 1024, 6


class Operands(NamedTuple):
    """Operands in global memory that are accessed without TMA."""

    w: Any  # [rows of all experts, K]
    neurons: Any  # int32 [U, N]
    units: Any  # int32 [U, 4]
    total: Any
    z: Any  # fp32 [pairs, K]
    between: Any  # rows from one expert to the next
    scale: Any = None  # fp32 [E, K], of e4m3 rows


class Fragments(NamedTuple):
    """A thread's fragments and sums."""

    mma: Any
    rW: Any
    rH: Any
    acc: Any
    coordinates: Any


class ExpertGathered:
    """For one dtype and number of pairs per unit."""

    ctas_per_sm = 2

    def __init__(self, spec: ExpertGatheredSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.tokens = spec.tokens
        self.stages = min(2 * STAGES, RINGS // ((COLUMNS + self.tokens) * TILE_K * 2)) // self.ctas_per_sm

    @cute.jit
    def __call__(self, *arguments: Any):
        """The compact hidden states, the `Operands`, the number of multiprocessors and the stream."""
        compact, *given, multiprocessors, stream = arguments
        self.launch(compact, Operands(*given), multiprocessors, stream)

    def products(self) -> Any:
        """The MMA of a tile."""
        return sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.MN, OperandMajorMode.K, Float32, (PANELS, 1, 1), (64, self.tokens)
        )

    def columns_of(self, o: Operands) -> Any:
        """The number of columns, of which a tile has ``COLUMNS``."""
        return o.z.shape[1]

    @cute.jit
    def launch(self, compact: cute.Tensor, o: Operands, multiprocessors: Int32, stream: cuda.CUstream):
        """Launch the kernel."""
        stages, shape, mma = self.stages, (COLUMNS, self.tokens, TILE_K), self.products()
        w_layout = sm90.make_smem_layout_a(LayoutEnum.COL_MAJOR, shape, self.dtype, stages)
        h_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.dtype, stages)

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            sW: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]
            sH: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(h_layout)], 1024]

        self.shared = feasible.check_shared_memory(Shared, self.ctas_per_sm)
        h = tma_load(compact, h_layout, (self.tokens, TILE_K))
        tiles = o.units.shape[0] * cute.ceil_div(self.columns_of(o), COLUMNS)
        if tiles > 0:
            kernel = self.kernel(h, o, mma, (w_layout, h_layout))
            ctas = cutlass.min(tiles, self.ctas_per_sm * multiprocessors)
            launch.start(kernel, ctas, THREADS, stream, ctas_per_sm=self.ctas_per_sm, carveout=100)

    @cute.kernel
    def kernel(self, h: Transfer, o: Operands, mma: cute.TiledMma, layouts: Any):
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator().allocate(self.shared)
        if warp == MMA_WARPS:
            cpasync.prefetch_descriptor(h.atom)
        ring = open_ring(shared, self.stages, FILL_THREADS + 1, MMA_WARPS, thread)
        sW, sH = staged((shared.sW, shared.sH), layouts)
        cute.arch.sync_threads()
        launch.wait()
        tiles = o.total[0] * cute.ceil_div(self.columns_of(o), COLUMNS)
        if warp >= MMA_WARPS:
            self.fill(ring, h, shared.sW.data_ptr(), sH, o, tiles, thread - 32 * MMA_WARPS, warp)
        else:
            self.multiply(ring, mma, sW, sH, o, tiles, thread)

    @cute.jit
    def fill(self, ring, h: Transfer, weights, sH: cute.Tensor, o: Operands, tiles: Int32, thread: Int32, warp: Int32):
        """Load the stages of the CTA's tiles."""
        columns = cute.ceil_div(self.columns_of(o), COLUMNS)
        rows = cute.make_rmem_tensor((4,), Int32)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for tile in cutlass.range(cute.arch.block_idx()[0], tiles, cute.arch.grid_dim()[0], unroll=1):
            unit, column = tile // columns, tile % columns * COLUMNS
            size, base = o.units[unit, 3], o.units[unit, 0] * o.between
            own = Transfer(h.atom, cute.domain_offset((o.units[unit, 1], 0), h.tensor))
            h_s, h_t = partition(own, sH, (self.tokens, TILE_K))
            if size > 0:
                self.load_rows(rows, o, unit, base, Int32(0), size, thread)
            for block in cutlass.range(cute.ceil_div(size, TILE_K), unroll=1):
                cute.arch.mbarrier_wait(ring.empty + state.index, state.phase)
                barrier = ring.full + state.index
                if warp == MMA_WARPS:
                    if thread == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.tokens * TILE_K * 2)
                    cute.copy(own.atom, h_t[None, 0, block], h_s[None, state.index], tma_bar_ptr=barrier)
                stage = weights + state.index * (COLUMNS * TILE_K)
                gather_columns(stage, o.w, rows, column, thread, PANELS)
                cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
                self.load_rows(rows, o, unit, base, (block + 1) * TILE_K, size, thread)
                state.advance()

    @cute.jit
    def load_rows(self, rows: cute.Tensor, o: Operands, unit: Int32, base: Int32, first: Int32, size: Int32, thread):
        """Load the thread's rows of the stage that begins with neuron `first` of the list."""
        for j in range_constexpr(4):
            # beyond the list the last row again: h is zero there
            at = cutlass.min(first + thread // 8 + 16 * j, size - 1)
            rows[j] = base + o.neurons[unit, at]

    @cute.jit
    def multiply(self, ring, mma: cute.TiledMma, sW: cute.Tensor, sH: cute.Tensor, o: Operands, tiles, thread: Int32):
        """Multiply the CTA's tiles and store them."""
        columns, lane = cute.ceil_div(self.columns_of(o), COLUMNS), cute.arch.lane_idx()
        f = self.fragments(mma, sW, sH, thread)
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for tile in cutlass.range(cute.arch.block_idx()[0], tiles, cute.arch.grid_dim()[0], unroll=1):
            unit, column = tile // columns, tile % columns * COLUMNS
            first, pairs = o.units[unit, 1], o.units[unit, 2]
            blocks = cute.ceil_div(o.units[unit, 3], TILE_K)
            f.acc.fill(0.0)
            for i in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(ring.full + full.index, full.phase)
                # cp.async writes by the generic proxy, WGMMA reads by the async proxy
                cute.arch.fence_proxy("async.shared", space="cta")
                self.multiply_stage(f, full.index)
                # the products of the previous stage are complete
                if i > 0:
                    read = release(ring, read, lane)
                full.advance()
            warpgroup.wait_group(0)
            if blocks > 0:
                read = release(ring, read, lane)
            self.store(o, f, unit, (first, pairs), column)

    @cute.jit
    def fragments(self, mma: cute.TiledMma, sW: cute.Tensor, sH: cute.Tensor, thread: Int32):
        leader = mma.get_slice(cute.make_layout(PANELS, stride=128)(cute.arch.make_warp_uniform(thread // 128)))
        rW = mma.make_fragment_A(leader.partition_A(sW))
        rH = mma.make_fragment_B(leader.partition_B(sH))
        coordinates = mma.get_slice(thread).partition_C(cute.make_identity_tensor((COLUMNS, self.tokens)))
        return Fragments(mma, rW, rH, cute.make_rmem_tensor(coordinates.shape, Float32), coordinates)

    @cute.jit
    def multiply_stage(self, f: Fragments, stage: Int32):
        """Sums += rows of a stage times h. All stages before it have been multiplied then."""
        warpgroup.fence()
        for k in range_constexpr(TILE_K // 16):
            cute.gemm(f.mma, f.acc, f.rW[None, None, k, stage], f.rH[None, None, k, stage], f.acc)
        warpgroup.commit_group()
        warpgroup.wait_group(1)

    @cute.jit
    def store(self, o: Operands, f: Fragments, unit: Int32, own, column: Int32):
        """Store the sums of a unit's pairs, its `own` first one and their number."""
        first, pairs = own
        # eight threads have neighbouring columns of a pair
        for i in range_constexpr(cute.size(f.acc)):
            place, pair = f.coordinates[i]
            if pair < pairs and column + place < o.z.shape[1]:
                o.z[first + pair, column + place] = f.acc[i]


def arguments(spec: ExpertGatheredSpec) -> tuple[Any, ...]:
    """The fake arguments that stand for the operands; scales of columns follow e4m3 rows."""
    dtype, fp8, pairs, units = operands.DTYPES[spec.dtype], spec.dtype == E4M3, cute.sym_int32(), cute.sym_int32()
    n, k = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=16 if fp8 else 8)
    of_bytes = operands.byte_rows(Uint8, n, k), operands.rows(Float32, cute.sym_int32(), k)
    return (
        operands.rows(dtype, pairs, cute.sym_int32(divisibility=TILE_K)),
        *(of_bytes if fp8 else (operands.rows(dtype, n, k),)),
        operands.rows(Int32, units, cute.sym_int32(divisibility=8)),
        operands.dense(Int32, units, 4),
        operands.dense(Int32, cute.sym_int32()),
        operands.rows(Float32, pairs, k),
        *(Int32(1),) * 2,
    )


def signature(spec: ExpertGatheredSpec) -> tuple[Any, tuple[Any, ...]]:
    return ExpertGathered(spec), arguments(spec)
