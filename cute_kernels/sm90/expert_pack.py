"""The gate GEMM of experts: words of TwELL of relu(x . w[expert]) for pairs of a token and an expert, in the order of
expert_pairs.py. It is gate_pack_few.py for each unit of pairs, of one expert; CTAs of units that there are not return.

For expert_union.py it writes the hidden states themselves, rounded, instead of words.

Without units each pair is one, read from `ids`, and nothing runs before: a unit writes its owner and its place.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, range_constexpr

from .. import geometry
from ..common import operands
from ..common.activation import power
from ..common.copies import address, store_values
from ..common.experts import expert_of
from ..common.values import high_to_float, low_to_float, pack
from ..specs import EXPERT_TOKENS, ExpertPackSpec, GatePackFewSpec
from .gate_pack_few import TILE_N, Extent, GatePackFew, Operands


class Experts(NamedTuple):
    """Operands in global memory besides those of layers; see expert_pairs.py."""

    units: Any  # int32 [U, 4], or empty
    total: Any
    hidden: Any  # [pairs, N], or empty
    ids: Any
    owners: Any  # int32 [pairs]
    pairs: Any  # int32 [pairs]
    activation: Any
    number: Any  # of experts
    top: Any  # experts of a token


class ExpertPack(GatePackFew):
    """For one dtype and number of pairs per unit."""

    def __init__(self, spec: ExpertPackSpec):
        super().__init__(GatePackFewSpec(spec.dtype, spec.tokens))
        if spec.tokens > EXPERT_TOKENS[0]:
            # tokens are as many bytes as weights, so that fewer CTAs read them
            self.arrange(2, 1, 2)

    @cute.jit
    def __call__(self, *arguments: Any):
        """x, w, words and spill, `Experts` up to the pairs, arrivals, width, threshold, activation and the stream."""
        x, w, words, spill, *of_units, arrivals, words_per_tile, threshold, activation, stream = arguments
        of_words = words, spill, arrivals, words_per_tile, threshold
        self.launch_units(x, w, of_words, (*of_units, activation), stream)

    @cute.jit
    def launch_units(self, x: cute.Tensor, w: cute.Tensor, of_words, of_units, stream: cuda.CUstream, scales=None):
        """Launch the kernel."""
        (words, spill, arrivals, words_per_tile, threshold), (units, total, hidden, ids, owners, pairs, activation) = (
            of_words,
            of_units,
        )
        none = cute.make_tensor(words.iterator, cute.make_layout((Int32(0), Int32(1), 2), stride=(2, 2, 1)))
        bias = cute.make_tensor(spill.iterator, cute.make_layout((Int32(0),)))
        top = cute.ceil_div(pairs.shape[0], x.shape[0])
        experts = Experts(units, total, hidden, ids, owners, pairs, activation, w.shape[0], top)
        o = Operands(bias, words, spill, none, arrivals, words_per_tile, threshold, experts, scales)
        by_expert = cute.make_tensor(w.iterator, cute.select(w.layout, mode=[1, 2, 0]))
        blocks = cute.ceil_div(x.shape[1], self.tile_k)
        extent = Extent(x.shape[0], Int32(0), Int32(0), w.shape[1], blocks, Int32(0))
        self.launch(x, by_expert, o, extent, units.shape[0] if units.shape[0] > 0 else pairs.shape[0], stream)

    @cute.jit
    def part_of(self, o: Operands, extent: Extent, unit: Int32, leads: Boolean):
        e, exists = o.experts, Boolean(False)
        if e.units.shape[0] > 0:
            exists = unit < e.total[0]
            if exists:
                first = e.units[unit, 1]
                extent = extent._replace(tokens=e.units[unit, 2], first=first, source=first, expert=e.units[unit, 0])
        else:
            expert = expert_of(e.ids, unit, e.number)
            exists = expert >= 0
            extent = extent._replace(tokens=Int32(1), first=unit, source=unit // e.top, expert=expert)
            if leads:
                e.owners[unit] = expert
                e.pairs[unit] = unit if exists else Int32(-1)
        return extent, exists

    @cute.jit
    def pack(self, quad: cute.Tensor, m: Int32, column: Int32, o: Operands, buffer, lane: Int32):
        """Write the words of one pair's tile, or its hidden states."""
        neuron = column * TILE_N + lane * 8
        if o.experts.hidden.shape[0] == 0:
            GatePackFew.pack(self, quad, m, column, o, buffer, lane)
        elif neuron < o.experts.hidden.shape[1]:
            rounded = cute.make_rmem_tensor((4,), Uint32)
            for i in range_constexpr(4):
                pair = (low_to_float(quad[i], self.dtype), high_to_float(quad[i], self.dtype))
                rounded[i] = pack(*(power(value, o.experts.activation) for value in pair), self.dtype)
            store_values(address(o.experts.hidden, m, neuron), rounded)


def signature(spec: ExpertPackSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype, pairs = operands.DTYPES[spec.dtype], cute.sym_int32()
    k, n = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    return ExpertPack(spec), (
        operands.rows(dtype, cute.sym_int32(), k),
        operands.slabs(dtype, cute.sym_int32(), n, k),
        *operands.packed(dtype, cute.sym_int32()),
        operands.quads(cute.sym_int32()),
        operands.vector(Int32, cute.sym_int32()),
        operands.rows(dtype, cute.sym_int32(), n),
        operands.matrix(Int32, cute.sym_int32(), cute.sym_int32()),
        *(operands.vector(Int32, pairs) for _ in range(2)),
        operands.vector(Int32, cute.sym_int32(), 4),
        Int32(geometry.words_per_tile(8)),
        *(Int32(0),) * 2,
    )
