"""The down product of experts with many non-zeros, dense: z[p] = h[p] . w_down[expert] for pairs of a token and an
expert, in the order of expert_pairs.py, with h of expert_pack.py.

It is gate_pack_few.py for each unit of pairs: a CTA computes 128 columns and all of N, and stores its sums. An expert
whose non-zeros are at most `limit` is left to expert_down.py, and its CTAs return.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.tensor_utils import LayoutEnum

from ..common import operands
from ..common.copies import address
from ..specs import ExpertDenseSpec, GatePackFewSpec
from .gate_pack_few import TILE_K, Extent, GatePackFew, Operands

COLUMNS = 128


class More(NamedTuple):
    """Operands in global memory."""

    z: Any  # fp32 [pairs, K]
    nonzeros: Any  # int32 [E]
    limit: Any


class ExpertDense(GatePackFew):
    """For one dtype and number of pairs per unit."""

    # by rows of neurons, which are the terms of the sums
    weights = LayoutEnum.COL_MAJOR, OperandMajorMode.MN

    def __init__(self, spec: ExpertDenseSpec):
        super().__init__(GatePackFewSpec(spec.dtype, spec.tokens))
        self.arrange(1, 1, COLUMNS, 2)

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,
        w: cute.Tensor,
        units: cute.Tensor,
        total: cute.Tensor,
        nonzeros: cute.Tensor,
        z: cute.Tensor,
        limit: Int32,
        stream: cuda.CUstream,
    ):
        none = cute.make_tensor(total.iterator, cute.make_layout((Int32(0),)))
        more = More(z, nonzeros, limit)
        o = Operands(none, None, None, None, none, Int32(1), Int32(0), units, total, more)
        by_expert = cute.make_tensor(w.iterator, cute.select(w.layout, mode=[2, 1, 0]))
        extent = Extent(hidden.shape[0], Int32(0), w.shape[2], cute.ceil_div(w.shape[1], TILE_K), Int32(0))
        self.launch(hidden, by_expert, o, extent, units.shape[0], stream)

    @cute.jit
    def wants(self, o: Operands, expert: Int32):
        return Boolean(o.more.nonzeros[expert] > o.more.limit)

    @cute.jit
    def epilogue(self, shared, sums: cute.Tensor, o: Operands, extent: Extent, first: Int32, at):
        """Store the sums: half a warp takes a token, and a lane eight of its columns."""
        _, column, thread, _, lane = at
        cute.arch.sync_threads()
        left = column * COLUMNS + lane % 16 * 8
        if left < extent.neurons:
            for token in cutlass.range(thread // 16, extent.tokens, 2 * self.warps + 2, unroll=1):
                source = sums.iterator + (token * self.pitch + lane % 16 * 4)
                for half in cutlass.range_constexpr(2):
                    quad = cute.make_rmem_tensor((4,), Float32)
                    part = (source + half * self.upper).align(16)
                    cute.autovec_copy(cute.make_tensor(part, cute.make_layout(4)), quad)
                    target = address(o.more.z, extent.first + token, left + 4 * half).align(16)
                    cute.autovec_copy(quad, cute.make_tensor(target, cute.make_layout(4)))


def signature(spec: ExpertDenseSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype, pairs = operands.DTYPES[spec.dtype], cute.sym_int32()
    k, n = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    return ExpertDense(spec), (
        operands.rows(dtype, pairs, n),
        operands.slabs(dtype, cute.sym_int32(), n, k),
        operands.quads(cute.sym_int32()),
        operands.vector(Int32, cute.sym_int32()),
        operands.vector(Int32, cute.sym_int32(), 4),
        operands.rows(Float32, pairs, k),
        Int32(1),
    )
