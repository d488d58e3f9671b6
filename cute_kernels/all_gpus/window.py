"""Which gates [M, n] lie between two bounds of their neurons, and how many; gates up to a level become zero in place.

    near[m, n] = 1 where below[n] < gate[m, n] < above[n], else 0

Memory is the bound: 2 bytes are read and 3 written for each gate. A CTA has a block of `ROWS` tokens of a tile of 256
neurons, and a warp every eighth of these tokens. A lane has eight neurons, whose bounds stay in registers, and loads
their gates of `FLIGHT` tokens before it compares the first. It counts in bytes, which hold the counts of a whole block;
these are added over the warps, then to those of the other blocks. Comparisons are in fp32; NaN is not near, and stays.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, Uint32, range_constexpr
from cutlass.memory import SmemAllocator

from .. import geometry
from ..common import launch, operands
from ..common.copies import address, load_values_if, store_values
from ..common.values import high_to_float, low_to_float
from ..specs import WindowSpec

WARPS = 8
# tokens of a CTA, at most 255 and a multiple of the others' product; and those of a warp in flight
ROWS, FLIGHT = 128, 4
# near, near and above the level, above the level
KINDS = 3


class Window:
    """For one dtype."""

    def __init__(self, spec: WindowSpec):
        self.dtype = operands.DTYPES[spec.dtype]

    @cute.jit
    def __call__(self, *arguments: Any):
        """The operands of `kernel` without the tiles, and the stream; `counts` [KINDS, n] are zero before."""
        gate, *rest, stream = arguments
        tiles = cute.ceil_div(gate.shape[1], geometry.TILE)
        if gate.shape[0] > 0:
            ctas = cute.ceil_div(gate.shape[0], ROWS) * tiles
            launch.start(self.kernel(gate, *rest, tiles), ctas, 32 * WARPS, stream)

    @cute.kernel
    def kernel(self, gate, level, below, above, near, counts, tiles: Int32):
        thread, block, lane = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        first, tile = block // tiles * ROWS + warp, block % tiles * geometry.TILE
        neuron = tile + lane * 8
        sums = SmemAllocator().allocate_tensor(Uint32, cute.make_layout((32, WARPS, 2 * KINDS)))
        launch.wait()

        bounds = cute.make_rmem_tensor((4, 3), Uint32)
        for i, source in enumerate((level, below, above)):
            load_values_if(source.iterator + neuron, bounds[None, i], neuron < gate.shape[1])
        found = cute.make_rmem_tensor((2 * KINDS,), Uint32)
        found.fill(Uint32(0))
        quads = cute.make_rmem_tensor((4, FLIGHT), Uint32)
        for turn in cutlass.range(ROWS // (WARPS * FLIGHT), unroll=1):
            for i in range_constexpr(FLIGHT):
                m = first + (turn * FLIGHT + i) * WARPS
                exists = (m < gate.shape[0]) & (neuron < gate.shape[1])
                load_values_if(address(gate, m, neuron), quads[None, i], exists)
            for i in range_constexpr(FLIGHT):
                m = first + (turn * FLIGHT + i) * WARPS
                if (m < gate.shape[0]) & (neuron < gate.shape[1]):
                    self.compare(quads[None, i], bounds, address(gate, m, neuron), address(near, m, neuron), found)

        for j in range_constexpr(2 * KINDS):
            sums[lane, warp, j] = found[j]
        cute.arch.sync_threads()
        if tile + thread < gate.shape[1]:
            for kind in range_constexpr(KINDS):
                four = Uint32(0)
                for other in range_constexpr(WARPS):
                    four += sums[thread // 8, other, 2 * kind + thread // 4 % 2]
                count = Int32(four >> Uint32(thread % 4 * 8) & Uint32(0xFF))
                cute.arch.atomic_add(address(counts, kind, tile + thread), count, sem="relaxed", scope="gpu")

    @cute.jit
    def compare(self, quad: cute.Tensor, bounds: cute.Tensor, gate: Any, near: Any, found: cute.Tensor):
        """Store eight gates of `quad` and which are near, and add to what is `found`, in bytes."""
        bytes_near = cute.make_rmem_tensor((2,), Uint32)
        for half in range_constexpr(2):
            inside, fires = Uint32(0), Uint32(0)
            for j in range_constexpr(4):
                pair, to_float = 2 * half + j // 2, high_to_float if j % 2 else low_to_float
                value, level, below, above = (
                    to_float(word, self.dtype) for word in (quad[pair], *(bounds[pair, i] for i in range(3)))
                )
                one = Uint32(1 << 8 * j)
                inside |= cutlass.select_((value > below) & (value < above), one, Uint32(0))
                fires |= cutlass.select_(value <= level, Uint32(0), one)
            # each byte to the bits of a value
            kept = fires * Uint32(0xFF)
            for j in range_constexpr(2):
                quad[2 * half + j] &= Uint32(cute.arch.prmt(kept, kept, 0x3322 if j else 0x1100))
            bytes_near[half] = inside
            for kind, flags in enumerate((inside, inside & fires, fires)):
                found[2 * kind + half] += flags
        store_values(gate, quad)
        store_values(near, bytes_near)


def signature(spec: WindowSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype = operands.DTYPES[spec.dtype]
    m, n = cute.sym_int32(), cute.sym_int32(divisibility=8)
    return Window(spec), (
        operands.rows(dtype, m, n),
        *(operands.dense(dtype, n) for _ in range(3)),
        operands.rows(Uint8, m, n),
        operands.dense(Int32, KINDS, n, align=4),
    )
