"""A dense gate [M, N], before its activation, to TwELL: the words, spill and statistics of gate_pack, and their bits.

It reads 2 bytes for each gate, and writes little if few of them are non-zeros: memory is the bound. A CTA has the eight
tokens whose statistics are one row, a warp for each, and `TILES` tiles of 256 neurons. A lane has eight neurons of each
tile, and loads those of all tiles before it packs the first. Ranks are prefix sums over the lanes; words go straight to
their place in global memory, behind the zeros that another lane of the same warp has stored there.

``levels`` of tokens, as `top_k` finds them, keep the k largest gates of each in place of those above a threshold. The
gate may lie in the spill, at its place: a lane has read what it overwrites.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, range_constexpr
from cutlass.memory import SmemAllocator

from .. import geometry
from ..common import launch, operands
from ..common.activation import above_bits, levels_of
from ..common.copies import address, load_values_if
from ..common.rows import clear_arrivals, store_tile
from ..common.values import relu_pair
from ..specs import PackSpec

WARPS = geometry.STATS_ROWS
TILES = 4


class Pack:
    """For one dtype; sizes, the compression and the threshold are values at run time."""

    def __init__(self, spec: PackSpec):
        self.dtype = operands.DTYPES[spec.dtype]

    @cute.jit
    def __call__(self, *arguments: Any):
        """The operands of `kernel` without the columns, and the stream.

        Of a `bias` the second half is read, the thresholds; the gate has the biases.
        """
        gate, words, spill, stats, *rest, stream = arguments
        groups, tiles = stats.shape[0], stats.shape[1]
        columns = cute.ceil_div(tiles, TILES)
        if groups > 0:
            launch.start(self.kernel(gate, words, spill, stats, *rest, columns), groups * columns, 32 * WARPS, stream)

    @cute.kernel
    def kernel(self, gate, words, spill, stats, arrivals, bias, levels, width: Int32, threshold: Int32, columns: Int32):
        thread, block, lane = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        # the last tokens first: PyTorch has just written their gates, which are in L2
        group, first = stats.shape[0] - 1 - block // columns, block % columns * TILES
        counts = SmemAllocator().allocate_tensor(Int32, cute.make_layout((WARPS, TILES)))
        m = group * WARPS + warp
        exists = m < gate.shape[0]
        launch.wait()

        if block == 0:
            clear_arrivals(arrivals, thread, 32 * WARPS)
        quads = cute.make_rmem_tensor((4, TILES), Uint32)
        for i in range_constexpr(TILES):
            neuron = (first + i) * geometry.TILE + lane * 8
            load_values_if(address(gate, m, neuron), quads[None, i], exists & (neuron < gate.shape[1]))
        for i in range_constexpr(TILES):
            within = exists & (first + i < stats.shape[1])
            neuron = (first + i) * geometry.TILE + lane * 8
            own = levels_of(bias, gate.shape[1], neuron, threshold)
            if exists & (levels.shape[0] > 0):
                for j in range_constexpr(4):
                    own[j] = self.level_of_token(levels, m, neuron + 2 * j)
            quad, target = quads[None, i], address(words, m, (first + i) * width)
            for j in range_constexpr(4):
                quad[j] = above_bits(relu_pair(quad[j], self.dtype), own[j])
            count = store_tile(quad, target, address(spill, m, neuron), neuron, width, within, lane)
            if lane == 0:
                counts[warp, i] = count
        cute.arch.sync_threads()
        if thread < TILES and first + thread < stats.shape[1]:
            nonzeros, overflows = Int32(0), Int32(0)
            for token in range_constexpr(WARPS):
                nonzeros += counts[token, thread]
                overflows += Int32(counts[token, thread] >= width)
            stats[group, first + thread, 0] = nonzeros
            stats[group, first + thread, 1] = overflows

    @cute.jit
    def level_of_token(self, levels: cute.Tensor, m: Int32, neuron: Int32) -> Uint32:
        """What two neurons' gates must exceed: the token's level, or less where an equal gate is kept."""
        level, last = levels[m, 0], levels[m, 1]
        low, high = (level - Int32(neuron + j <= last) for j in range(2))
        return Uint32(low) | Uint32(high) << 16


def signature(spec: PackSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype = operands.DTYPES[spec.dtype]
    m, n = cute.sym_int32(), cute.sym_int32(divisibility=8)
    return Pack(spec), (
        operands.rows(dtype, m, n),
        *operands.packed(dtype, m),
        operands.dense(cutlass.Int32, cute.sym_int32(), cute.sym_int32(), 2),
        operands.dense(cutlass.Int32, cute.sym_int32(), align=4),
        operands.bias(dtype),
        operands.dense(Int32, cute.sym_int32(), 2, align=4),
        *(Int32(1),) * 2,
    )
