"""Sparse times dense by token tile: out[m] = sum over non-zeros c of coefficient[m, c] * w[c], optionally plus the same
sum of a second pair, plus bias. Each row of w in the union of 128 tokens' neurons is read once; WGMMA does the rest.

Persistent, one CTA per SM. A unit of work is a token tile and a slab of 256 columns; its inner dimension is the list of
neurons, 128 per turn. Two kinds of warp groups, which share sm90/sparse_product.py with weight_grad.py:

    fill    group 0. cp.async of rows of w, 256 columns each, into MN-major swizzled stages of 64 rows.
    mma     groups 1 and 2, 64 tokens each: WGMMA 64x256x16 of the stages and the group's own tile of coefficients;
            meanwhile the group fills the next turn's tile. Then rounding and 16-byte stores. Sums are flushed after
            `longest` list positions. The barriers are those of sm90/sparse_product.py.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import launch
from ..common.activation import power_pair
from ..common.copies import address
from ..common.gathered import SORTED, TILE_M, TILE_N, GatheredForm, Operands, arguments
from ..specs import GatheredSpec
from .copies import staged
from .ring import open_ring
from .sparse_product import (
    GROUP_THREADS,
    MMA_WARPS,
    REGISTERS_FILL,
    REGISTERS_MMA,
    STAGES,
    THREADS,
    TURN,
    SparseProduct,
    gather_columns,
    store_coefficient,
    store_rounded,
)

TILE_K = geometry.CHUNK


class Fragments(NamedTuple):
    """A thread's MMA fragments and sums."""

    mma: Any
    rA: Any
    rB: Any
    acc: Any
    coordinates: Any
    row: Any  # first of the thread's two rows in the token tile


class Gathered(GatheredForm, SparseProduct):
    """The kernel, see common/gathered.py."""

    @cute.jit
    def launch(self, data, capacity, max_ctas, stream):
        mma, a_layout, b_layout = self.products_of()

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, self.stages]
            empty: cute.struct.MemRange[Int64, self.stages]
            order: cute.struct.MemRange[Uint16, SORTED]
            sA: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(a_layout)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(b_layout)], 1024]

        self.shared = feasible.check_shared_memory(Shared)
        arguments = (data, mma, (a_layout, b_layout), capacity)
        ctas = cutlass.min(data.units, max_ctas)
        if data.units > 0:
            # the kernel that can flush sums is a tenth slower
            if data.flushed.shape[0] > 0:
                launch.start(self.kernel(*arguments, True), ctas, THREADS, stream, ctas_per_sm=1)
            else:
                launch.start(self.kernel(*arguments, False), ctas, THREADS, stream, ctas_per_sm=1)

    def products_of(self) -> Any:
        """The MMA, and the layouts of coefficients and of stages of rows in shared memory."""
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1), (64, TILE_N)
        )
        a_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE_M // 2, TILE_N, TURN), self.dtype, 6)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (TILE_M, TILE_N, TILE_K), self.dtype, STAGES)
        return mma, a_layout, b_layout

    @cute.kernel
    def kernel(self, data: Operands, mma: cute.TiledMma, layouts: Any, capacity: Int32, long: cutlass.Constexpr):
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // 128)
        shared = SmemAllocator().allocate(self.shared)
        ring = open_ring(shared, self.stages, GROUP_THREADS, MMA_WARPS, thread)
        launch.wait()
        data = data._replace(order=shared.order.get_tensor(cute.make_layout(SORTED)))
        if data.sizes[data.sizes.shape[0] - 1] <= capacity:
            self.sort_tiles(data, shared.sB.data_ptr(), THREADS, thread)
            if group == 0:
                cute.arch.setmaxregister_decrease(REGISTERS_FILL)
                self.fill(ring, shared, data, thread)
            else:
                cute.arch.setmaxregister_increase(REGISTERS_MMA)
                sA, sB = staged((shared.sA, shared.sB), layouts)
                mma.set(warpgroup.Field.ACCUMULATE, True)
                fragments = self.fragments(mma, sA, sB, thread - 128)
                self.multiply_units(ring, shared.sA.data_ptr(), data, fragments, thread - 128, long)

    @cute.jit
    def gather(self, data: Operands, stage, part: Int32, rows: cute.Tensor, product: Int32, thread: Int32):
        if const_expr(self.products == 2):
            if product == 1:
                gather_columns(stage, data.w2, rows, part * TILE_N, thread)
            else:
                gather_columns(stage, data.w, rows, part * TILE_N, thread)
        else:
            gather_columns(stage, data.w, rows, part * TILE_N, thread)

    @cute.jit
    def scatter_coefficient(self, data: Operands, tile, part: Int32, half: Int32, word: Uint32, bits: Uint32, valid):
        """Store a coefficient at (token, list position) in the tile of the group that owns the token."""
        if const_expr(self.from_entries):
            bits = power_pair(word, data.activation, self.dtype) >> 16
        mine = valid & (Int32((word >> 12) & Uint32(1)) == half)
        store_coefficient(tile, word, bits, mine)

    @cute.jit
    def fragments(self, mma: cute.TiledMma, sA: cute.Tensor, sB: cute.Tensor, thread: Int32):
        """A thread's fragments and sums."""
        leader = mma.get_slice(0)
        rA = mma.make_fragment_A(leader.partition_A(sA))
        rB = mma.make_fragment_B(leader.partition_B(sB))
        coordinates = mma.get_slice(thread & 127).partition_C(cute.make_identity_tensor((TILE_M // 2, TILE_N)))
        acc = cute.make_rmem_tensor(coordinates.shape[:3], Float32)
        row = cute.arch.make_warp_uniform(thread // 32) * 16 + (cute.arch.lane_idx() >> 2)
        return Fragments(mma, rA, rB, acc, coordinates, row)

    @cute.jit
    def multiply_unit(self, g, f: Fragments, walk, tile: Int32, slab: Int32, length: Int32, long: cutlass.Constexpr):
        """Main loop over the list of a token tile, then 64 rows of `out`."""
        f.acc.fill(0.0)
        walk = self.multiply_list(f.mma, (f.rA, f.rB, f.acc), g, walk, length, long)
        self.store(g, f, tile, slab)
        return walk

    @cute.jit
    def store(self, g, f: Fragments, tile: Int32, slab: Int32):
        """Add the bias, round and store a unit's sums."""
        out = g.data.out
        if g.data.bias.shape[0] > 0:
            self.add_bias(f, g.data.bias, slab)
        row = tile * TILE_M + f.row
        column = slab * TILE_N
        for i in range_constexpr(2):
            target = address(out, row + 8 * i, column)
            left = out.shape[1] - column if row + 8 * i < out.shape[0] else 0
            store_rounded(f.acc, i, TILE_N, target, left, g.lane, self.dtype)

    @cute.jit
    def add_bias(self, f: Fragments, bias: cute.Tensor, slab: Int32):
        """Add the bias of their columns to the sums."""
        for v in range_constexpr(TILE_N // 8):
            column = slab * TILE_N + f.coordinates[(0, 0, v), 0, 0][1]
            for j in range_constexpr(2):
                # columns beyond the last are not stored
                b = bias[cutlass.min(column + j, bias.shape[0] - 1)].to(Float32)
                for i in range_constexpr(2):
                    f.acc[(j, i, v), 0, 0] += b


def signature(spec: GatheredSpec) -> tuple[Any, tuple[Any, ...]]:
    return Gathered(spec), arguments(spec)
