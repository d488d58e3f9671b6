"""Transpose a matrix of 16-bit values: out[c, r] = matrix[r, c]. For down weights in the layout of nn.Linear.

A thread transposes eight rows of eight columns in registers, so its loads and stores are 16 bytes. A warp has 64 rows
of 32 columns: it stores 128 contiguous bytes of four rows of the result at a time. The kernel is memory-bound.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Uint32, range_constexpr

from .common import operands
from .common.copies import address, load_values, store_values
from .common.values import join_halves
from .specs import MatrixTransposeSpec

WARPS = 8
# rows of a CTA, and columns of a warp
ROWS, COLUMNS = 64, 32


class MatrixTranspose:
    """The only variant; sizes and strides stay symbolic."""

    @cute.jit
    def __call__(self, matrix: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        rows, columns = cute.ceil_div(matrix.shape[0], ROWS), cute.ceil_div(matrix.shape[1], COLUMNS * WARPS)
        if rows * columns > 0:
            self.kernel(matrix, out).launch(grid=(columns, rows, 1), block=(32 * WARPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, matrix: cute.Tensor, out: cute.Tensor):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        column_block, row_block, _ = cute.arch.block_idx()
        row = row_block * ROWS + (lane & 7) * 8
        column = (column_block * WARPS + warp) * COLUMNS + (lane >> 3) * 8
        if row < matrix.shape[0] and column < matrix.shape[1]:
            source = address(matrix, row, column)
            quads = [load_values(source + i * matrix.stride[0]) for i in range(8)]
            target = address(out, column, row)
            for i in range_constexpr(8):
                quad = cute.make_rmem_tensor((4,), Uint32)
                for j in range_constexpr(4):
                    quad[j] = join_halves(quads[2 * j][i // 2], quads[2 * j + 1][i // 2], i % 2)
                store_values(target + i * out.stride[0], quad)


def signature(spec: MatrixTransposeSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    r, c = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    return MatrixTranspose(), (operands.rows(cutlass.Int16, r, c), operands.rows(cutlass.Int16, c, r))
