"""Sparse times dense by token tile, for every GPU since sm_80: the operands and units of work of common/gathered.py.

Persistent, one CTA per SM. Each row of w in the union of 128 tokens' neurons is read once per slab; sparse_product.py
has the main loop. Then rounding and 16-byte stores.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint16, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible
from ..common import launch
from ..common.activation import power_pair
from ..common.copies import address
from ..common.gathered import SORTED, TILE_M, TILE_N, GatheredForm, Operands, arguments
from ..specs import GatheredSpec
from .product import THREADS, thread_index
from .sparse_product import M_FRAGS, N_FRAGS, SHARED_VALUES, Source, SparseProduct, fragment_row, store_rounded


class Gathered(GatheredForm, SparseProduct):
    """The kernel, see common/gathered.py."""

    @cute.jit
    def launch(self, data, capacity, max_ctas, stream):
        @cute.struct
        class Shared:
            values: cute.struct.Align[cute.struct.MemRange[self.dtype, SHARED_VALUES], 128]
            order: cute.struct.MemRange[Uint16, SORTED]

        self.shared = feasible.check_portable_memory(Shared)
        ctas = cutlass.min(data.units, max_ctas)
        if data.units > 0:
            # the kernel that can flush sums needs more registers
            if data.flushed.shape[0] > 0:
                launch.start(self.kernel(data, capacity, True), ctas, THREADS, stream, ctas_per_sm=1)
            else:
                launch.start(self.kernel(data, capacity, False), ctas, THREADS, stream, ctas_per_sm=1)

    @cute.kernel
    def kernel(self, data: Operands, capacity: Int32, long: cutlass.Constexpr):
        at = thread_index()
        shared = SmemAllocator().allocate(self.shared)
        launch.wait()
        data = data._replace(order=shared.order.get_tensor(cute.make_layout(SORTED)))
        if data.sizes[data.sizes.shape[0] - 1] <= capacity:
            self.sort_tiles(data, shared.values.data_ptr(), THREADS, at.thread)
            self.compute_units(data, shared.values.data_ptr(), at, long)

    @cute.jit
    def source(self, data, slab, product):
        matrix, pitch = data.w.iterator.toint(), data.w.stride[0]
        if const_expr(self.products == 2):
            if product == 1:
                matrix, pitch = data.w2.iterator.toint(), data.w2.stride[0]
        return Source(matrix, Uint32(pitch // 8), data.w.shape[1]), slab * TILE_N

    @cute.jit
    def scatter_coefficient(self, data, tile, part, word, bits, valid):
        """Store a coefficient at (token, list position)."""
        if const_expr(self.from_entries):
            bits = power_pair(word, data.activation, self.dtype) >> 16
        self.store_coefficient(tile, word & Uint32(0x1FFF), bits, valid)

    @cute.jit
    def store_unit(self, data, acc, unit, at):
        """Round the sums and store them as rows of `out`."""
        at = thread_index(again=True)
        row = unit.tile * TILE_M + (at.lane >> 2)
        column = unit.part * TILE_N + at.warp_n * (8 * N_FRAGS)
        if data.bias.shape[0] > 0:
            self.add_bias(acc, data.bias, column, at.lane)
        for i in range_constexpr(M_FRAGS):
            for h in range_constexpr(2):
                m = row + fragment_row(at.warp_m, i) + 8 * h
                left = data.out.shape[1] - column if m < data.out.shape[0] else 0
                store_rounded(acc, i, h, address(data.out, m, column), left, at.lane, self.dtype)

    @cute.jit
    def add_bias(self, acc, bias, column, lane):
        """Add the bias of their columns to the sums."""
        for v in range_constexpr(N_FRAGS):
            for j in range_constexpr(2):
                # columns beyond the last are not stored
                b = bias[cutlass.min(column + 8 * v + (lane & 3) * 2 + j, bias.shape[0] - 1)].to(cutlass.Float32)
                for i in range_constexpr(M_FRAGS):
                    for h in range_constexpr(2):
                        acc[2 * h + j, v, i] += b


def signature(spec: GatheredSpec) -> tuple[Any, tuple[Any, ...]]:
    return Gathered(spec), arguments(spec)
