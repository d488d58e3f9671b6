"""The gate GEMM of experts: words of TwELL of relu(x . w[expert]) for pairs of a token and an expert, in the order of
expert_pairs.py. It is gate_pack_few.py for each unit of pairs, of one expert; CTAs of units that there are not return.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32

from .. import geometry
from ..common import operands
from ..specs import ExpertPackSpec, GatePackFewSpec
from .gate_pack_few import TILE_K, Extent, GatePackFew, Operands


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
        words_per_tile: Int32,
        threshold: Int32,
        stream: cuda.CUstream,
    ):
        none = cute.make_tensor(words.iterator, cute.make_layout((Int32(0), Int32(1), 2), stride=(2, 2, 1)))
        bias = cute.make_tensor(x.iterator, cute.make_layout((Int32(0),)))
        o = Operands(bias, words, spill, none, none, words_per_tile, threshold, units, total)
        by_expert = cute.make_tensor(w.iterator, cute.select(w.layout, mode=[1, 2, 0]))
        extent = Extent(x.shape[0], Int32(0), w.shape[1], cute.ceil_div(x.shape[1], TILE_K), Int32(0))
        self.launch(x, by_expert, o, extent, units.shape[0], stream)


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
        Int32(geometry.words_per_tile(8)),
        Int32(0),
    )
