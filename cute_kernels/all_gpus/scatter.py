"""16-bit values of the entries of the hybrid format to a matrix [M, N], zero elsewhere: the gradient of a gate.

The matrix is zero before. A CTA has a tile of 128 tokens and every `PARTS`-th of its chunks, a warp one at a time.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Uint32

from .. import geometry
from ..common import launch, operands
from ..common.copies import address
from ..common.values import widen
from ..specs import ScatterSpec

WARPS = 8
PARTS = 4


class Scatter:
    """For values of any 16-bit dtype."""

    @cute.jit
    def __call__(self, *arguments: Any):
        """The operands of `kernel` and the stream.

        `values`: by entry, in bits 0-15. Nothing is written if there are more entries than `capacity`.
        """
        values, entries, neurons, *rest, stream = arguments
        tiles = neurons.shape[0]
        if tiles > 0:
            launch.start(self.kernel(values, entries, neurons, *rest), (tiles, PARTS), 32 * WARPS, stream)

    @cute.kernel
    def kernel(self, values, entries, neurons, chunks, sizes, out, capacity: Int32):
        (tile, part, _), lane = cute.arch.block_idx(), cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        launch.wait()
        count = (sizes[tile] + geometry.CHUNK - 1) // geometry.CHUNK
        if sizes[sizes.shape[0] - 1] > capacity:
            count = Int32(0)
        for chunk in cutlass.range(part * WARPS + warp, count, PARTS * WARPS, unroll=1):
            for i in cutlass.range(chunks[tile, chunk] + lane, chunks[tile, chunk + 1], 32, unroll=1):
                entry = Uint32(entries[i])
                token = tile * geometry.TOKEN_TILE + Int32((entry >> 6) & Uint32(geometry.TOKEN_TILE - 1))
                rank = chunk * geometry.CHUNK + Int32(entry & Uint32(geometry.CHUNK - 1))
                target = address(out, token, widen(neurons[tile, rank]))
                cute.make_tensor(target, cute.make_layout(1))[0] = Int16(values[i])


def signature(spec: ScatterSpec) -> tuple[Any, tuple[Any, ...]]:
    tiles, n = cute.sym_int32(), cute.sym_int32(divisibility=8)
    neurons, chunks, sizes = operands.lists(tiles)
    return Scatter(), (
        operands.dense(Int32, cute.sym_int32()),
        operands.dense(Int32, cute.sym_int32()),
        neurons,
        chunks,
        sizes,
        operands.rows(Int16, cute.sym_int32(), n),
        Int32(1),
    )
