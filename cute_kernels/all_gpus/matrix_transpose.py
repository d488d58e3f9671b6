"""Transpose a matrix of 16-bit values, or of bytes: out[c, r] = matrix[r, c]. For down weights in nn.Linear's layout.

A thread transposes eight rows of eight columns in registers, so its loads and stores are 16 bytes. A warp has 64 rows
of 32 columns: it stores 128 contiguous bytes of four rows of the result at a time. Of bytes a thread has 16 rows of
eight columns, a warp 128 rows. The kernel is memory-bound.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, range_constexpr

from ..common import operands
from ..common.copies import address, aligned, load_values, store_values
from ..common.values import join_halves
from ..specs import MatrixTransposeSpec

WARPS = 8
# columns of a warp
COLUMNS = 32


class MatrixTranspose:
    """Of 16-bit values; sizes and strides stay symbolic."""

    # of a thread
    rows = 8

    @cute.jit
    def __call__(self, matrix: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        rows, columns = cute.ceil_div(matrix.shape[0], 8 * self.rows), cute.ceil_div(matrix.shape[1], COLUMNS * WARPS)
        if rows * columns > 0:
            self.kernel(matrix, out).launch(grid=(columns, rows, 1), block=(32 * WARPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, matrix: cute.Tensor, out: cute.Tensor):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        column_block, row_block, _ = cute.arch.block_idx()
        row = (row_block * 8 + (lane & 7)) * self.rows
        column = (column_block * WARPS + warp) * COLUMNS + (lane >> 3) * 8
        if row < matrix.shape[0] and column < matrix.shape[1]:
            self.transpose(matrix, out, row, column)

    @cute.jit
    def transpose(self, matrix: cute.Tensor, out: cute.Tensor, row: Int32, column: Int32):
        """Transpose a thread's rows of eight columns."""
        source = address(matrix, row, column)
        quads = [load_values(source + i * matrix.stride[0]) for i in range(8)]
        target = address(out, column, row)
        for i in range_constexpr(8):
            quad = cute.make_rmem_tensor((4,), Uint32)
            for j in range_constexpr(4):
                quad[j] = join_halves(quads[2 * j][i // 2], quads[2 * j + 1][i // 2], i % 2)
            store_values(target + i * out.stride[0], quad)


class ByteTranspose(MatrixTranspose):
    """Of bytes."""

    rows = 16

    @cute.jit
    def transpose(self, matrix: cute.Tensor, out: cute.Tensor, row: Int32, column: Int32):
        pairs = cute.make_rmem_tensor((2, 16), Uint32)
        for i in range_constexpr(16):
            source = cute.recast_ptr(address(matrix, row + i, column).align(8), dtype=Uint32)
            cute.autovec_copy(aligned(source, 2), pairs[None, i])
        for i in range_constexpr(8):
            quad = cute.make_rmem_tensor((4,), Uint32)
            for j in range_constexpr(4):
                # byte i % 4 of four rows
                halves = [
                    cute.arch.prmt(pairs[i // 4, first], pairs[i // 4, first + 1], 0x40 + 0x11 * (i % 4))
                    for first in (4 * j, 4 * j + 2)
                ]
                quad[j] = Uint32(cute.arch.prmt(*halves, 0x5410))
            store_values(address(out, column + i, row), quad)


def signature(spec: MatrixTransposeSpec) -> tuple[Any, tuple[Any, ...]]:
    if spec.bits == 8:
        r, c = cute.sym_int32(divisibility=16), cute.sym_int32(divisibility=16)
        return ByteTranspose(), (
            operands.byte_rows(cutlass.Uint8, r, c),
            operands.byte_rows(cutlass.Uint8, c, r),
        )
    r, c = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    return MatrixTranspose(), (operands.rows(cutlass.Int16, r, c), operands.rows(cutlass.Int16, c, r))
