"""The union of the neurons that the pairs of a unit fire, and their hidden states at those neurons alone. Units and
places are those of expert_pairs.py, hidden states those of expert_pack.py.

    neurons [U, N]     the neurons of each unit that fire for any of its pairs, ascending
    compact [pairs, N] the hidden states of each pair at the neurons of its unit, and zeros up to a multiple of 64
    units [u, 3]       the number of neurons

One CTA for each 16 pairs of a unit; the first one also writes the list. A thread has eight neurons at a time: it
adds up their bits over all pairs, and prefix sums give the places of those that fire.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint16, Uint32, range_constexpr
from cutlass.memory import SmemAllocator

from .. import geometry
from ..common import launch, operands
from ..common.copies import address, load_values
from ..common.values import count_flags, nonzero_flags, prefix_sum, value_bits
from ..specs import ExpertUnionSpec

THREADS = 256
WARPS = THREADS // 32
# pairs of a CTA
PAIRS = 16


class Operands(NamedTuple):
    """Operands in global memory."""

    hidden: Any  # [pairs, N]
    units: Any  # int32 [U, 4]
    total: Any
    neurons: Any  # int32 [U, N]
    compact: Any  # [pairs, N], N rounded up to a multiple of 64


class ExpertUnion:
    """For one dtype; sizes stay symbolic."""

    @cute.jit
    def __call__(self, *arguments: Any):
        """The `Operands`, the most pairs of a unit and the stream."""
        *given, most, stream = arguments
        o = Operands(*given)
        if o.units.shape[0] > 0:
            launch.start(self.kernel(o), (o.units.shape[0], cute.ceil_div(most, PAIRS)), THREADS, stream)

    @cute.kernel
    def kernel(self, o: Operands):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        unit, part, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
        launch.wait()
        pairs = o.units[unit, 2] if unit < o.total[0] else Int32(0)
        if part * PAIRS < pairs:
            first, size = o.units[unit, 1], Int32(0)
            own, end = first + part * PAIRS, first + cutlass.min((part + 1) * PAIRS, pairs)
            for base in cutlass.range(0, o.hidden.shape[1], 8 * THREADS, unroll=1):
                extent = first, first + pairs, own, end
                size = self.append(o, sums, unit, extent, base + 8 * thread, size, warp, lane)
            # up to full blocks
            left = cute.ceil_div(size, geometry.CHUNK) * geometry.CHUNK - size
            for i in cutlass.range(thread, left * (end - own), THREADS, unroll=1):
                row = self.bits(o, own + i // left)
                row[size + i % left] = Uint16(0)
            if part == 0 and thread == 0:
                o.units[unit, 3] = size

    def bits(self, o: Operands, pair: Int32) -> Any:
        """The row of a pair in `compact`, as bits."""
        row = cute.recast_ptr(address(o.compact, pair, 0), dtype=Uint16)
        return cute.make_tensor(row, cute.make_layout(o.compact.shape[1]))

    @cute.jit
    def append(self, o: Operands, sums: cute.Tensor, unit, extent, neuron: Int32, size: Int32, warp, lane):
        """Append those of the thread's eight neurons from `neuron` on that fire; return the size of the list.

        `extent`: the unit's first pair and its end, and those of the CTA's own pairs.
        """
        first, last, own, end = extent
        fired = cute.make_rmem_tensor((4,), Uint32)
        fired.fill(0)
        if neuron < o.hidden.shape[1]:
            for pair in cutlass.range(first, last, unroll=8):
                quad = load_values(address(o.hidden, pair, neuron))
                for i in range_constexpr(4):
                    fired[i] = fired[i] | quad[i]
        flags = nonzero_flags(fired)
        count = count_flags(flags)
        place = size + prefix_sum(count, lane)
        # the sums of the round before have been read
        cute.arch.sync_threads()
        if lane == 31:
            sums[warp] = place - size + count
        cute.arch.sync_threads()
        for other in range_constexpr(WARPS):
            place += sums[other] if other < warp else Int32(0)
            size += sums[other]
        places = []
        for i in range_constexpr(8):
            places.append(place)
            if flags[i] and own == first:
                o.neurons[unit, place] = neuron + i
            place += Int32(flags[i])
        if count > 0:
            for pair in cutlass.range(own, end, unroll=8):
                quad, row = load_values(address(o.hidden, pair, neuron)), self.bits(o, pair)
                for i in range_constexpr(8):
                    if flags[i]:
                        row[places[i]] = Uint16(value_bits(quad, i) >> 16)
        return size


def signature(spec: ExpertUnionSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype, pairs, units = operands.DTYPES[spec.dtype], cute.sym_int32(), cute.sym_int32()
    n = cute.sym_int32(divisibility=8)
    return ExpertUnion(), (
        operands.rows(dtype, pairs, n),
        operands.dense(Int32, units, 4),
        operands.dense(Int32, cute.sym_int32()),
        operands.rows(Int32, units, cute.sym_int32(divisibility=8)),
        operands.rows(dtype, pairs, cute.sym_int32(divisibility=geometry.CHUNK)),
        Int32(1),
    )
