"""Weight gradients, for every GPU since sm_80: the operands and units of work of common/weight_grad.py.

Persistent, one CTA per SM; sparse_product.py has the main loop. Of x a tile has d_gate of its neurons in the first half
of the rows and d_up in the second; of dy it has h in the first half alone. Then each row of sums is stored as the row
of its neuron. Products with ones are of a kernel of their own, and copy nothing.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint16, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible
from ..common.copies import address, aligned
from ..common.mma import mma_16x8x16
from ..common.weight_grad import PIECES, TILE_M, TILE_N, Operands, WeightGradForm, arguments
from ..specs import WeightGradSpec
from .product import THREADS, multiply, thread_index
from .sparse_product import M_FRAGS, N_FRAGS, SHARED_VALUES, TURN, Source, SparseProduct, fragment_row, store_rounded


class WeightGrad(WeightGradForm, SparseProduct):
    """The kernel, see common/weight_grad.py."""

    has_bias = False

    @cute.jit
    def launch(self, data, capacity, max_ctas, stream):
        @cute.struct
        class Shared:
            pieces: cute.struct.MemRange[Uint16, PIECES]
            numbers: cute.struct.MemRange[Int32, 2]
            values: cute.struct.Align[cute.struct.MemRange[self.dtype, SHARED_VALUES], 128]

        self.shared = feasible.check_portable_memory(Shared)
        ctas = cutlass.min(data.units, max_ctas)
        how = {"grid": (ctas, 1, 1), "block": (THREADS, 1, 1), "min_blocks_per_mp": 1, "stream": stream}
        # the kernels that can flush sums, or that have biases, need more registers
        for long in (True, False):
            for has_bias in (True, False):
                if ((data.flushed.shape[0] > 0) == long) & ((data.db_gate.shape[0] > 0) == has_bias):
                    self.kernel(data, capacity, long, has_bias).launch(**how)

    @cute.kernel
    def kernel(self, data: Operands, capacity: Int32, long: cutlass.Constexpr, has_bias: cutlass.Constexpr):
        self.has_bias = has_bias
        at = thread_index()
        shared = SmemAllocator().allocate(self.shared)
        if data.sizes[data.sizes.shape[0] - 1] <= capacity:
            pieces = shared.pieces.get_tensor(cute.make_layout(PIECES))
            numbers = shared.numbers.get_tensor(cute.make_layout(2))
            cut = self.cut_lists(data, pieces, numbers, shared.values.data_ptr(), THREADS, at.thread)
            self.compute_units(cut, shared.values.data_ptr(), at, long)

    def has_all_sums(self, data, part):
        return part < data.first_dy if self.gated else False

    @cute.jit
    def source(self, data, part, product):
        matrix, pitch, slab = data.x.iterator.toint(), data.x.stride[0], part
        if part >= data.first_dy:
            matrix, pitch, slab = data.dy.iterator.toint(), data.dy.stride[0], part - data.first_dy
        return Source(matrix, Uint32(pitch // 8), data.x.shape[1]), slab * TILE_N

    @cute.jit
    def scatter_coefficient(self, data, tile, part, low, high, valid):
        """Store a coefficient at (neuron, list position)."""
        of_dy = part >= data.first_dy
        index = low & Uint32(TILE_M * TURN - 1)
        self.store_coefficient(tile, index, low >> 16 if of_dy else high & Uint32(0xFFFF), valid)
        if const_expr(self.gated):
            # a multiple of eight rows further: the same swizzle
            self.store_coefficient(tile + TILE_M * TURN, index, high >> 16, valid & (not of_dy))

    def is_of_ones(self, data, part):
        """Whether a unit with this part has sums of coefficients."""
        return (part >= data.slabs) & (part < data.first_dy)

    @cute.jit
    def multiply_part(self, data, f, part, buffer: cutlass.Constexpr, i: cutlass.Constexpr):
        if const_expr(self.has_bias):
            if self.is_of_ones(data, part):
                self.add_row(f, buffer, i)
            elif i < M_FRAGS // 2 or part < data.slabs:
                multiply(f, buffer, i, self.dtype)
        elif const_expr(i < M_FRAGS // 2):
            multiply(f, buffer, i, self.dtype)
        elif const_expr(self.gated):
            if part < data.slabs:
                multiply(f, buffer, i, self.dtype)

    @cute.jit
    def add_row(self, f, buffer: cutlass.Constexpr, i: cutlass.Constexpr):
        """Add the coefficients of each row to its first sum, by a product with ones."""
        ones = 0x3F803F80 if const_expr(self.dtype is cutlass.BFloat16) else 0x3C003C00
        # mma takes no immediate operand
        one = cute.arch.inline_ptx(f"mov.b32 {{$w0}}, {ones};", write_only_types=[Uint32])
        a = [f.rA[j, i, buffer] for j in range(4)]
        sums = mma_16x8x16([f.acc[j, 0, i] for j in range(4)], *a, one, one, self.dtype)
        for j in range_constexpr(4):
            f.acc[j, 0, i] = sums[j]

    @cute.jit
    def store_unit(self, data, acc, unit, at):
        at = thread_index(again=True)
        stores = Boolean(True)
        if self.is_cut(data, unit.tile):
            stores = self.join(data, acc, unit.tile, unit.part, at.thread)
        if stores:
            tile, _ = self.piece_at(data, unit.tile)
            self.store_list(data, acc, unit._replace(tile=tile), at)

    @cute.jit
    def store_list(self, data, acc, unit, at):
        """Store the sums of a whole list as the rows of its neurons."""
        of_dy = unit.part >= data.first_dy
        slab = unit.part - data.first_dy if of_dy else unit.part
        column = slab * TILE_N + at.warp_n * (8 * N_FRAGS)
        for i in range_constexpr(M_FRAGS):
            for h in range_constexpr(2):
                rank = unit.tile * TILE_M + (fragment_row(at.warp_m, i) + 8 * h + (at.lane >> 2)) % TILE_M
                exists = rank < data.order.shape[0]
                neuron = data.order[rank] if exists else 0
                left = data.x.shape[1] - column if exists else 0
                first = const_expr(i < M_FRAGS // 2)
                if const_expr(self.has_bias):
                    if self.is_of_ones(data, unit.part):
                        left = Int32(0)
                        if exists and at.lane & 3 == 0 and at.warp_n == 0:
                            if const_expr(first):
                                data.db_gate[neuron] = acc[2 * h, 0, i].to(self.dtype)
                            elif const_expr(self.gated):
                                data.db_up[neuron] = acc[2 * h, 0, i].to(self.dtype)
                if of_dy:
                    if const_expr(first):
                        self.store_row(acc, i, h, data.dw_down, data.main_down, neuron, column, left, unit, at)
                elif const_expr(first):
                    self.store_row(acc, i, h, data.dw_gate, data.main_gate, neuron, column, left, unit, at)
                elif const_expr(self.gated):
                    self.store_row(acc, i, h, data.dw_up, data.main_up, neuron, column, left, unit, at)

    @cute.jit
    def store_row(self, acc, i: cutlass.Constexpr, h: cutlass.Constexpr, target, main, neuron, column, left, unit, at):
        """Store a row of sums as the row of its neuron, or add it to that of `main`."""
        if main.shape[0] == 0:
            store_rounded(acc, i, h, address(target, neuron, column), left, at.lane, self.dtype)
        elif unit.length > 0:
            pair = (at.lane & 3) * 2
            row = address(main, neuron, column + pair)
            for v in range_constexpr(N_FRAGS):
                # four lanes access one sector
                if 8 * v < left - pair:
                    own = aligned(row + 8 * v, 2)
                    for j in range_constexpr(2):
                        own[j] = own[j] + acc[2 * h + j, v, i]


def signature(spec: WeightGradSpec) -> tuple[Any, tuple[Any, ...]]:
    return WeightGrad(spec), arguments(spec)
