"""Products sampled at the non-zeros of a hybrid gate; common/sampled.py has their epilogue and what they are for.

Persistent, one CTA per SM. A unit of work is a tile of 128 tokens and 64, 128, 192 or 256 neurons of its list, see
common/units.py; each row of w in the union of 128 tokens' neurons is read once. A CTA's units are the longest first, so
that each length has a loop of its own. Two kinds of warp groups:

    load    group 0. x by TMA, 128 bytes of a row per stage, and the same columns of the unit's rows of w by cp.async,
            swizzled.
    mma     groups 1 and 2, 64 tokens each: WGMMA 64x256x16 over the columns, narrower of shorter units, then the
            epilogue.

    FULL[s]    128 load threads arrive through cp.async, + 1 arrival and the bytes of x.
    EMPTY[s]   8 mma warps arrive.
    SUMS       256 mma threads: the staged sums may be overwritten, then they are complete.

sampled_grad.py runs the same kernel on dy and w_down.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import launch
from ..common.copies import aligned
from ..common.sampled import CHUNKS, STAGED, TILE_M, TILE_N, Operands, SampledUpForm, Sampler, up_arguments
from ..common.swizzle import swizzle_column
from ..common.units import begin, deal_units, find_unit, unit_after
from ..specs import SampledUpSpec
from .copies import Transfer, staged, tma_load
from .listed_rows import TILE_K_BYTES, load_units, multiply_stages
from .ring import open_ring
from .sparse_product import GROUP_THREADS, REGISTERS_FILL, REGISTERS_MMA, THREADS

STAGES = 3
MMA_THREADS = 2 * GROUP_THREADS


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads."""

    SUMS = 1


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    ring: Any
    sX: Any
    sW: Any
    sums: Any  # [TILE_M, STAGED] staged for the entries
    totals: Any  # [TILE_N / STAGED, mma warps] sums of |hidden|


class SampledProduct(Sampler):
    """The kernel of both forms, see common/sampled.py."""

    def tile_k(self) -> int:
        """Columns of a stage."""
        return TILE_K_BYTES * 8 // int(self.value.width)

    @cute.jit
    def launch(self, o, capacity, max_ctas, stream):
        shape = (TILE_M, TILE_N, self.tile_k())
        x_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.value, STAGES)
        w_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.value, STAGES)
        x = tma_load(o.x, x_layout, (TILE_M, self.tile_k()))

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, STAGES]
            empty: cute.struct.MemRange[Int64, STAGES]
            totals: cute.struct.MemRange[Float32, TILE_N // STAGED * (MMA_THREADS // 32)]
            sX: cute.struct.Align[cute.struct.MemRange[self.value, cute.cosize(x_layout)], 1024]
            sW: cute.struct.Align[cute.struct.MemRange[self.value, cute.cosize(w_layout)], 1024]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, TILE_M * STAGED], 1024]

        self.shared = feasible.check_shared_memory(Shared)
        if o.x.shape[0] > 0:
            kernel = self.kernel(x, o, capacity, (x_layout, w_layout))
            launch.start(kernel, max_ctas, THREADS, stream, ctas_per_sm=1)

    @cute.kernel
    def kernel(self, x: Transfer, o: Operands, capacity: Int32, layouts: Any):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)
        if warp_index == 0:
            cpasync.prefetch_descriptor(x.atom)
        shared = SmemAllocator().allocate(self.shared)
        ring = open_ring(shared, STAGES, GROUP_THREADS + 1, MMA_THREADS // 32, thread)
        cute.arch.sync_threads()
        sX, sW = staged((shared.sX, shared.sW), layouts)
        sums = shared.sums.get_tensor(cute.make_layout(TILE_M * STAGED))
        totals = shared.totals.get_tensor(cute.make_layout(TILE_N // STAGED * (MMA_THREADS // 32)))
        s = Views(ring, sX, sW, sums, totals)
        columns = cute.ceil_div(o.w.shape[1], self.tile_k())
        launch.wait()
        if o.sizes[o.sizes.shape[0] - 1] <= capacity:
            deal = deal_units(o.sizes, cute.arch.grid_dim()[0], 1, True)
            if group == 0:
                cute.arch.setmaxregister_decrease(REGISTERS_FILL)
                load_units(ring, x, s.sX, shared.sW.data_ptr(), o, deal, columns, STAGES, GROUP_THREADS, thread)
            else:
                cute.arch.setmaxregister_increase(REGISTERS_MMA)
                self.mma(s, o, columns, deal, thread - 128)

    @cute.jit
    def mma(self, s: Views, o: Operands, columns: Int32, deal, thread: Int32):
        """Compute all products of each unit, then sample those of the pattern."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        index = cute.arch.block_idx()[0]
        unit, cursor = find_unit(o.sizes, deal, index, begin(), 1)
        for chunks in range_constexpr(CHUNKS, 0, -1):
            while unit.chunks == chunks:
                state = self.compute_unit(s, o, columns, unit, state, chunks, thread)
                index = unit_after(index, deal.ctas)
                unit, cursor = find_unit(o.sizes, deal, index, cursor, 1)

    @cute.jit
    def compute_unit(self, s: Views, o: Operands, columns: Int32, unit, state, chunks: cutlass.Constexpr, thread):
        """Multiply and sample a unit of so many chunks; returns the next state of the ring."""
        half = cute.arch.make_warp_uniform(thread // 128)
        places = chunks * geometry.CHUNK
        mma = sm90.make_trivial_tiled_mma(
            self.value, self.value, OperandMajorMode.K, OperandMajorMode.K, Float32, (2, 1, 1), (64, places)
        )
        leader = mma.get_slice(cute.make_layout(2, stride=128)(half))
        rX = mma.make_fragment_A(leader.partition_A(s.sX))
        rW = mma.make_fragment_B(leader.partition_B(cute.local_tile(s.sW, (places, self.tile_k()), (0, 0, None))))
        acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((TILE_M, places)), Float32)
        loaded = self.load_ahead(o, unit, chunks, thread)
        state = multiply_stages(s.ring, mma, acc, rX, rW, columns, state)
        self.sample_unit(s, o, acc, loaded, unit, chunks, thread)
        return state

    @cute.jit
    def sync_sums(self):
        cute.arch.barrier(barrier_id=Barrier.SUMS, number_of_threads=MMA_THREADS)

    @cute.jit
    def stage_sums(self, s: Views, acc: cute.Tensor, staged: cutlass.Constexpr, chunks: cutlass.Constexpr, thread):
        # the swizzle puts eight rows of a fragment in different banks
        row, column = (thread // 32) * 16 + ((thread & 31) >> 2), (thread & 3) * 2
        for v in range_constexpr(min(STAGED, chunks * geometry.CHUNK - staged * STAGED) // 8):
            for i in range_constexpr(2):
                at = (row + 8 * i) * STAGED + swizzle_column(row, 8 * v) + column
                pair = aligned(s.sums.iterator + at, 2)
                for j in range_constexpr(2):
                    pair[j] = acc[(j, i, v + staged * (STAGED // 8)), 0, 0]


class SampledUp(SampledProduct, SampledUpForm):
    """The up projection."""


def signature(spec: SampledUpSpec) -> tuple[Any, tuple[Any, ...]]:
    return SampledUp(spec), up_arguments(spec)
