"""The down product of experts with many non-zeros, dense: z[p] = h[p] . w_down[expert] for pairs of a token and an
expert, in the order of expert_pairs.py, with h of expert_pack.py. An expert whose non-zeros are at most `limit` is left
to expert_down.py.

Persistent: each CTA finds the units of such experts, and takes every so many-th of their tiles, 128 columns of a unit
and all of N. Its last warp loads and the others multiply, as in gate_pack_few.py; they store their sums from registers
while the next tile is loaded.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Uint32, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import geometry
from ..common import operands
from ..common.values import lowest_bit
from ..specs import ExpertDenseSpec, GatePackFewSpec
from .copies import Transfer
from .gate_pack_few import TILE_K, Extent, GatePackFew
from .ring import open_ring, release

COLUMNS = 128
# units of a word of the list
UNITS = 32


class Operands(NamedTuple):
    """Operands in global memory; see expert_pairs.py."""

    units: Any  # int32 [U, 4], U up to geometry.MAX_UNITS
    total: Any
    nonzeros: Any  # int32 [E]
    z: Any  # fp32 [pairs, K]
    limit: Any


class ExpertDense(GatePackFew):
    """For one dtype and number of pairs per unit."""

    # by rows of neurons, which are the terms of the sums
    weights = LayoutEnum.COL_MAJOR, OperandMajorMode.MN

    def __init__(self, spec: ExpertDenseSpec):
        super().__init__(GatePackFewSpec(spec.dtype, spec.tokens))
        self.arrange(1, 1, COLUMNS, 2)
        self.threads = 32 * self.warps + 32

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,
        w: cute.Tensor,
        units: cute.Tensor,
        total: cute.Tensor,
        nonzeros: cute.Tensor,
        z: cute.Tensor,
        limit: Int32,
        multiprocessors: Int32,
        stream: cuda.CUstream,
    ):
        by_expert = cute.make_tensor(w.iterator, cute.select(w.layout, mode=[2, 1, 0]))
        mma, loads, layouts = self.prepare(hidden, by_expert)
        tiles = units.shape[0] * cute.ceil_div(z.shape[1], COLUMNS)
        if tiles > 0:
            o = Operands(units, total, nonzeros, z, limit)
            self.kernel(*loads, o, mma, *layouts, cute.ceil_div(w.shape[1], TILE_K)).launch(
                grid=(cutlass.min(tiles, self.ctas_per_sm * multiprocessors), 1, 1),
                block=(self.threads, 1, 1),
                min_blocks_per_mp=self.ctas_per_sm,
                preferred_smem_carveout=100,
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(
        self,
        hidden: Transfer,
        w: Transfer,
        o: Operands,
        mma: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
        blocks: Int32,
    ):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        shared = allocator.allocate(self.shared)
        wanted = allocator.allocate_tensor(Uint32, cute.make_layout(geometry.MAX_UNITS // UNITS), byte_alignment=16)
        if warp == self.warps:
            cpasync.prefetch_descriptor(hidden.atom)
            cpasync.prefetch_descriptor(w.atom)
        ring = open_ring(shared, self.stages, 1, self.warps, thread)
        sX = shared.sX.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        sW = shared.sW.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        total = o.total[0]
        self.find_units(o, wanted, total, warp, lane)
        cute.arch.sync_threads()
        columns, cta, ctas = cute.ceil_div(o.z.shape[1], COLUMNS), cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        rW, rX, coordinates, acc = self.fragments(mma, sX, sW, thread)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        # the CTA's next tile, from the first one of this unit on
        tile = cta
        for word in cutlass.range(cute.ceil_div(total, UNITS), unroll=1):
            left = wanted[word]
            while left != 0:
                unit = word * UNITS + lowest_bit(left)
                left = left & (left - 1)
                if tile < columns:
                    first = o.units[unit, 1]
                    extent = Extent(o.units[unit, 2], first, first, o.z.shape[1], blocks, o.units[unit, 0])
                    while tile < columns:
                        if warp == self.warps:
                            state = self.load(ring, state, hidden, w, sX, sW, extent, tile, Int32(0), blocks)
                        else:
                            full, read = self.multiply(ring, mma, rW, rX, acc, blocks, full, read)
                            read = release(ring, read, lane)
                            self.store(o, extent, coordinates, acc, tile)
                        tile += ctas
                tile -= columns

    @cute.jit
    def find_units(self, o: Operands, wanted: cute.Tensor, total: Int32, warp: Int32, lane: Int32):
        """Write a bit for each unit: whether it is of an expert with many non-zeros."""
        for word in cutlass.range(warp, cute.ceil_div(total, UNITS), self.warps + 1, unroll=1):
            unit = word * UNITS + lane
            many = False
            if unit < total:
                many = o.nonzeros[o.units[unit, 0]] > o.limit
            bits = cute.arch.vote_ballot_sync(many)
            if lane == 0:
                wanted[word] = Uint32(bits)

    @cute.jit
    def store(self, o: Operands, extent: Extent, coordinates: cute.Tensor, acc: cute.Tensor, tile: Int32):
        """Store the sums: eight threads have neighbouring columns of a token."""
        for i in range_constexpr(cute.size(acc)):
            column, token = coordinates[i]
            column += tile * COLUMNS
            if token < extent.tokens and column < extent.neurons:
                o.z[extent.first + token, column] = acc[i]


def signature(spec: ExpertDenseSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype, pairs = operands.DTYPES[spec.dtype], cute.sym_int32()
    k, n = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    return ExpertDense(spec), (
        operands.rows(dtype, pairs, n),
        operands.slabs(dtype, cute.sym_int32(), n, k),
        operands.quads(cute.sym_int32()),
        operands.vector(Int32, cute.sym_int32()),
        operands.vector(Int32, cute.sym_int32(), 4),
        operands.rows(Float32, pairs, k),
        *(Int32(1),) * 2,
    )
