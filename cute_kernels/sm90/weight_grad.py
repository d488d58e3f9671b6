"""Weight gradients by tiles of 64 neurons of similar popularity: dw_gate = d_gate^T x, dw_up = d_up^T x,
dw_down = h^T dy, over the tokens that fire at least one of the tile's neurons.

Persistent, one CTA per SM; common/weight_grad.py has the units of work, and how long lists are cut. The inner dimension
of a unit is a piece of a list of tokens, 128 per turn. Two kinds of warp groups, which share sm90/sparse_product.py
with gathered.py:

    fill    group 0. cp.async of rows of x or dy, 256 columns each, into MN-major swizzled stages of 64 rows.
    mma     groups 1 and 2. x: one takes d_gate, one d_up, WGMMA 64x256x16. dy (and x, if not gated): each takes half of
            the columns, WGMMA 64x128x16. Ones: the same with d_gate and d_up. Meanwhile the group fills the next turn's
            tile of coefficients. Then each row of sums is stored as the row of its neuron. Sums are flushed after
            `longest` list positions. The barriers are those of sm90/sparse_product.py.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common.copies import address, aligned, store_values
from ..common.weight_grad import PIECES, TILE_M, TILE_N, Operands, WeightGradForm, arguments
from ..specs import WeightGradSpec
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
    """A thread's MMA fragments and sums: for all columns of a stage, and for half of them."""

    wide: Any
    narrow: Any
    rA: Any
    rB: Any
    rHalf: Any
    acc: Any
    acc_half: Any


class WeightGrad(WeightGradForm, SparseProduct):
    """The kernel, see common/weight_grad.py."""

    @cute.jit
    def launch(self, data, capacity, max_ctas, stream):
        a_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE_M, TILE_N, TURN), self.dtype, 6)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (2 * TILE_M, TILE_N, TILE_K), self.dtype, STAGES)
        kinds = self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1)
        wide, narrow = (sm90.make_trivial_tiled_mma(*kinds, (TILE_M, n)) for n in (TILE_N, TILE_N // 2))

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, STAGES]
            empty: cute.struct.MemRange[Int64, STAGES]
            pieces: cute.struct.MemRange[Uint16, PIECES]
            numbers: cute.struct.MemRange[Int32, 2]
            sA: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(a_layout)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(b_layout)], 1024]

        self.shared = feasible.check_shared_memory(Shared)
        arguments = (data, (wide, narrow), (a_layout, b_layout), capacity)
        ctas = cutlass.min(data.units, max_ctas)
        # the kernel that can flush sums is a tenth slower
        how = {"grid": (ctas, 1, 1), "block": (THREADS, 1, 1), "min_blocks_per_mp": 1}
        if data.flushed.shape[0] > 0:
            self.kernel(*arguments, True).launch(**how, stream=stream)
        else:
            self.kernel(*arguments, False).launch(**how, stream=stream)

    @cute.kernel
    def kernel(self, data: Operands, mmas: Any, layouts: Any, capacity: Int32, long: cutlass.Constexpr):
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // 128)
        shared = SmemAllocator().allocate(self.shared)
        ring = open_ring(shared, STAGES, GROUP_THREADS, MMA_WARPS, thread)
        cute.arch.sync_threads()
        if data.sizes[data.sizes.shape[0] - 1] <= capacity:
            pieces = shared.pieces.get_tensor(cute.make_layout(PIECES))
            numbers = shared.numbers.get_tensor(cute.make_layout(2))
            cut = self.cut_lists(data, pieces, numbers, shared.sB.data_ptr(), THREADS, thread)
            if group == 0:
                cute.arch.setmaxregister_decrease(REGISTERS_FILL)
                self.fill(ring, shared, cut, thread)
            else:
                cute.arch.setmaxregister_increase(REGISTERS_MMA)
                sA, sB = staged((shared.sA, shared.sB), layouts)
                for mma in mmas:
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                fragments = self.fragments(mmas, sA, sB, thread - 128)
                self.multiply_units(ring, shared.sA.data_ptr(), cut, fragments, thread - 128, long)

    def has_all_sums(self, data, part):
        return part < data.slabs if self.gated else True

    @cute.jit
    def gather(self, data: Operands, stage, part: Int32, rows: cute.Tensor, product: Int32, thread: Int32):
        if part >= data.first_dy:
            gather_columns(stage, data.dy, rows, (part - data.first_dy) * TILE_N, thread)
        elif part >= data.slabs:
            ones = cute.make_rmem_tensor((4,), Uint32)
            ones.fill(0x3F803F80 if const_expr(self.dtype is cutlass.BFloat16) else 0x3C003C00)
            for i in cutlass.range(self.stage_values // (8 * GROUP_THREADS), unroll=1):
                store_values(stage + (i * GROUP_THREADS + thread) * 8, ones)
        else:
            gather_columns(stage, data.x, rows, part * TILE_N, thread)

    @cute.jit
    def scatter_coefficient(self, data: Operands, tile, part: Int32, half, low: Uint32, high: Uint32, valid: Boolean):
        """Store a coefficient at (neuron, list position): of x the group's d_gate or d_up, of dy h in both groups."""
        bits = high & Uint32(0xFFFF)
        if const_expr(self.gated):
            bits = high >> 16 if half == 1 else bits
        bits = low >> 16 if part >= data.first_dy else bits
        store_coefficient(tile, low, bits, valid)

    @cute.jit
    def fragments(self, mmas, sA: cute.Tensor, sB: cute.Tensor, thread: Int32):
        """A thread's fragments and sums."""
        wide, narrow = mmas
        half, member = cute.arch.make_warp_uniform(thread // 128), thread & 127
        rA = wide.make_fragment_A(wide.get_slice(0).partition_A(sA))
        rB = wide.make_fragment_B(wide.get_slice(0).partition_B(sB))
        columns = cute.local_tile(sB, (TILE_N // 2, TILE_K), (half, 0, None))
        rHalf = narrow.make_fragment_B(narrow.get_slice(0).partition_B(columns))
        acc = cute.make_rmem_tensor(wide.get_slice(member).partition_shape_C((TILE_M, TILE_N)), Float32)
        # the narrow tile shares the first half of the wide tile's registers
        acc_half = cute.make_tensor(
            acc.iterator, cute.make_layout(narrow.get_slice(member).partition_shape_C((TILE_M, TILE_N // 2)))
        )
        return Fragments(wide, narrow, rA, rB, rHalf, acc, acc_half)

    @cute.jit
    def multiply_unit(self, g, f: Fragments, walk, rank: Int32, part: Int32, length: Int32, long: cutlass.Constexpr):
        """Main loop over a unit's tokens, then store the rows of its neurons."""
        data = g.data
        f.acc.fill(0.0)
        narrow = f.rA, f.rHalf, f.acc_half
        if const_expr(self.gated):
            if part >= data.slabs:
                walk = self.multiply_list(f.narrow, narrow, g, walk, length, long)
            else:
                walk = self.multiply_list(f.wide, (f.rA, f.rB, f.acc), g, walk, length, long)
        else:
            walk = self.multiply_list(f.narrow, narrow, g, walk, length, long)
        # what is needed below is looked up again there, so that it takes no registers meanwhile
        stores = Boolean(True)
        if self.is_cut(data, rank):
            # all parts of a layer without a gate have half of the columns per group
            sums = f.acc if self.gated else f.acc_half
            stores = self.join(data, sums, rank, part, g.half * GROUP_THREADS + g.thread)
        if stores:
            tile, _ = self.piece_at(data, rank)
            self.store_unit(g, f, tile, part, data.tiles[tile, 3])
        return walk

    @cute.jit
    def store_unit(self, g, f: Fragments, tile: Int32, part: Int32, length: Int32):
        """Store the sums of a list of `length` as the rows of its neurons."""
        data = g.data
        of_dy = part >= data.first_dy
        first = (part - data.first_dy if of_dy else part) * TILE_N
        middle = first + g.half * (TILE_N // 2)
        if of_dy:
            self.store(g, f.acc_half, data.dw_down, data.main_down, tile, middle, TILE_N // 2, length)
        elif part >= data.slabs:
            if g.half == 0:
                self.store_bias(f.acc_half, data.db_gate, data.order, tile, g.thread)
            elif const_expr(self.gated):
                self.store_bias(f.acc_half, data.db_up, data.order, tile, g.thread)
        elif const_expr(not self.gated):
            self.store(g, f.acc_half, data.dw_gate, data.main_gate, tile, middle, TILE_N // 2, length)
        elif g.half == 0:
            self.store(g, f.acc, data.dw_gate, data.main_gate, tile, first, TILE_N, length)
        else:
            self.store(g, f.acc, data.dw_up, data.main_up, tile, first, TILE_N, length)

    @cute.jit
    def store(self, g, acc: cute.Tensor, target, main, tile, column, columns: cutlass.Constexpr, length):
        """Store each row of sums as the row of its neuron, or add it to that of `main`."""
        lane, order = cute.arch.lane_idx(), g.data.order
        row = ((g.thread & 127) // 32) * 16 + (lane >> 2)
        for i in range_constexpr(2):
            rank = tile * TILE_M + row + 8 * i
            neuron = order[rank] if rank < order.shape[0] else 0
            left = main.shape[1] - column if rank < order.shape[0] else 0
            if main.shape[0] == 0:
                store_rounded(acc, i, columns, address(target, neuron, column), left, lane, self.dtype)
            elif length > 0:
                pair = (lane & 3) * 2
                self.add_row(acc, i, columns, address(main, neuron, column + pair), left - pair)

    @cute.jit
    def add_row(self, acc: cute.Tensor, i: cutlass.Constexpr, columns: cutlass.Constexpr, row, left: Int32):
        """Add two fp32 values per lane to a row: four lanes access one sector."""
        for v in range_constexpr(columns // 8):
            if 8 * v < left:
                pair = aligned(row + 8 * v, 2)
                for j in range_constexpr(2):
                    pair[j] = pair[j] + acc[(j, i, v), 0, 0]

    @cute.jit
    def store_bias(self, acc: cute.Tensor, target, order: cute.Tensor, tile: Int32, thread: Int32):
        """Store the first sum of each row as the element of its neuron."""
        row = ((thread & 127) // 32) * 16 + ((thread & 31) >> 2)
        if thread & 3 == 0:
            for i in range_constexpr(2):
                rank = tile * TILE_M + row + 8 * i
                if rank < order.shape[0]:
                    target[order[rank]] = acc[(0, i, 0), 0, 0].to(self.dtype)


def signature(spec: WeightGradSpec) -> tuple[Any, tuple[Any, ...]]:
    return WeightGrad(spec), arguments(spec)
