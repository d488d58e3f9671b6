"""The gate GEMM of experts: words of TwELL of relu(x . w[expert]) for pairs of a token and an expert, in the order of
expert_pairs.py. It is gate_pack_few.py for each unit of pairs, of one expert; CTAs of units that there are not return.

For experts whose down product will be dense, as expert_dense.py says, it also writes the hidden states, rounded, and
counts the non-zeros of each expert.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Uint32, range_constexpr

from .. import geometry
from ..common import operands
from ..common.activation import power
from ..common.copies import address, store_values
from ..common.values import high_to_float, low_to_float, pack
from ..specs import ExpertPackSpec, GatePackFewSpec
from .gate_pack_few import TILE_K, Extent, GatePackFew, Operands


class More(NamedTuple):
    """Operands in global memory besides those of layers."""

    hidden: Any  # [pairs, N], or empty
    nonzeros: Any  # int32 [E], zeros
    activation: Any


class ExpertPack(GatePackFew):
    """For one dtype and number of pairs per unit."""

    def __init__(self, spec: ExpertPackSpec):
        super().__init__(GatePackFewSpec(spec.dtype, spec.tokens))

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        words: cute.Tensor,
        spill: cute.Tensor,
        units: cute.Tensor,
        total: cute.Tensor,
        hidden: cute.Tensor,
        nonzeros: cute.Tensor,
        words_per_tile: Int32,
        threshold: Int32,
        activation: Int32,
        stream: cuda.CUstream,
    ):
        none = cute.make_tensor(words.iterator, cute.make_layout((Int32(0), Int32(1), 2), stride=(2, 2, 1)))
        bias = cute.make_tensor(x.iterator, cute.make_layout((Int32(0),)))
        o = Operands(
            bias, words, spill, none, none, words_per_tile, threshold, units, total, More(hidden, nonzeros, activation)
        )
        by_expert = cute.make_tensor(w.iterator, cute.select(w.layout, mode=[1, 2, 0]))
        extent = Extent(x.shape[0], Int32(0), w.shape[1], cute.ceil_div(x.shape[1], TILE_K), Int32(0))
        self.launch(x, by_expert, o, extent, units.shape[0], stream)

    @cute.jit
    def keep(self, quad: cute.Tensor, extent: Extent, m: Int32, neuron: Int32, count: Int32, o: Operands, lane: Int32):
        if o.more.hidden.shape[0] > 0:
            if lane == 0:
                nonzeros = o.more.nonzeros.iterator + extent.expert
                cute.arch.atomic_add(nonzeros, count, sem="relaxed", scope="gpu")
            if neuron < extent.neurons:
                rounded = cute.make_rmem_tensor((4,), Uint32)
                for i in range_constexpr(4):
                    pair = (low_to_float(quad[i], self.dtype), high_to_float(quad[i], self.dtype))
                    rounded[i] = pack(*(power(value, o.more.activation) for value in pair), self.dtype)
                store_values(address(o.more.hidden, m, neuron), rounded)


def signature(spec: ExpertPackSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype, pairs = operands.DTYPES[spec.dtype], cute.sym_int32()
    k, n = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    return ExpertPack(spec), (
        operands.rows(dtype, pairs, k),
        operands.slabs(dtype, cute.sym_int32(), n, k),
        *operands.packed(dtype, pairs),
        operands.quads(cute.sym_int32()),
        operands.vector(Int32, cute.sym_int32()),
        operands.rows(dtype, cute.sym_int32(), n),
        operands.vector(Int32, cute.sym_int32(), 4),
        Int32(geometry.words_per_tile(8)),
        *(Int32(0),) * 2,
    )
