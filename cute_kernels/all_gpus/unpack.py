"""TwELL to dense: out[m, c] = the packed gate value, zero elsewhere. One warp per row-tile, eight neurons per lane.

An intact row-tile is scattered into the warp's 512 bytes of shared memory; an overflowing one is copied from the spill.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32
from cutlass.memory import SmemAllocator

from .. import geometry
from ..common import operands
from ..common.copies import address, load_values, store_values
from ..specs import UnpackSpec

WARPS = 8
# consecutive tiles of one row: fewer CTAs, same coalescing
TILES_PER_WARP = 4


class Unpack:
    """For one dtype; the compression is the run-time words_per_tile."""

    def __init__(self, spec: UnpackSpec):
        self.dtype = operands.DTYPES[spec.dtype]

    @cute.jit
    def __call__(
        self, words: cute.Tensor, spill: cute.Tensor, out: cute.Tensor, words_per_tile: Int32, stream: cuda.CUstream
    ):
        tiles = words.shape[1] // words_per_tile
        columns = cute.ceil_div(tiles, TILES_PER_WARP)
        blocks = cute.ceil_div(Int64(out.shape[0]) * columns, WARPS)
        if out.shape[0] > 0:
            self.kernel(words, spill, out, words_per_tile, tiles, columns).launch(
                grid=(Int32(blocks), 1, 1), block=(32 * WARPS, 1, 1), stream=stream
            )

    @cute.kernel
    def kernel(
        self, words: cute.Tensor, spill: cute.Tensor, out: cute.Tensor, width: Int32, tiles: Int32, columns: Int32
    ):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        buffer = SmemAllocator().allocate_tensor(Uint16, cute.make_layout((geometry.TILE, WARPS)), byte_alignment=16)
        item = Int64(cute.arch.block_idx()[0]) * WARPS + warp
        m, column = Int32(item // columns), Int32(item % columns)
        if m < out.shape[0]:
            last = cutlass.min((column + 1) * TILES_PER_WARP, tiles)
            for tile in cutlass.range(column * TILES_PER_WARP, last, unroll=1):
                self.unpack_tile(words, spill, out, buffer[None, warp], m, tile, width, lane)

    @cute.jit
    def unpack_tile(self, words, spill, out, buffer, m, tile, width, lane):
        quad = cute.make_rmem_tensor((4,), Uint32)
        quad.fill(0)
        count = words[m, tile * width]
        if count >= width:
            load_values(address(spill, m, tile * geometry.TILE + lane * 8), quad)
        elif count > 0:
            store_values(buffer.iterator + lane * 8, quad)
            cute.arch.sync_warp()
            for i in cutlass.range(lane, count, 32, unroll=1):
                word = Uint32(words[m, tile * width + 1 + i])
                buffer[Int32(word & Uint32(geometry.TILE - 1))] = Uint16(word >> 16)
            cute.arch.sync_warp()
            load_values(buffer.iterator + lane * 8, quad)
            cute.arch.sync_warp()
        neuron = tile * geometry.TILE + lane * 8
        if neuron < out.shape[1]:
            store_values(address(out, m, neuron), quad)


def signature(spec: UnpackSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype = operands.DTYPES[spec.dtype]
    m, n = cute.sym_int32(), cute.sym_int32(divisibility=8)
    return Unpack(spec), (*operands.packed(dtype, m), operands.rows(dtype, m, n), Int32(1))
