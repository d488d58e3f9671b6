"""The second half of layers of experts: y[t] = sum over the experts e of token t, and the non-zeros c of both, of
scale[t, e] * h[t, e, c] * w_down[e, c]. It is up_down_token.py, whose rows of weights are those of all experts.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from .common import operands
from .specs import ExpertDownSpec
from .up_down_token import Experts, Operands, UpDownToken


class ExpertDown(UpDownToken):
    """For one dtype, cluster size and class of hidden sizes, gated or not."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor | None,
        words: cute.Tensor,
        spill: cute.Tensor,
        w_up: cute.Tensor | None,
        w_down: cute.Tensor,
        y: cute.Tensor,
        l1: cute.Tensor,
        sums: cute.Tensor,
        counters: cute.Tensor,
        weights: cute.Tensor,
        pairs: cute.Tensor,
        ids: cute.Tensor,
        scales: cute.Tensor,
        neurons: Int32,
        helpers: Int32,
        limit: Int32,
        words_per_tile: Int32,
        activation: Int32,
        stream: cuda.CUstream,
    ):
        none = cute.make_tensor(y.iterator, cute.make_layout((Int32(0),)))
        stats = cute.make_tensor(words.iterator, cute.make_layout((Int32(0), Int32(1), 2), stride=(2, 2, 1)))
        layer = (x, words, spill, w_up, w_down, none, none, y, l1, words_per_tile, activation)
        experts = Experts(pairs, ids, scales, neurons)
        self.start(Operands(*layer, sums, counters, weights, helpers, limit, stats, Int32(0), experts), stream)


def signature(spec: ExpertDownSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype, m, pairs = operands.DTYPES[spec.dtype], cute.sym_int32(), cute.sym_int32()
    k, rows, top = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8), cute.sym_int32()
    return ExpertDown(spec), (
        operands.rows(dtype, m, k) if spec.gated else None,
        *operands.packed(dtype, pairs),
        operands.rows(dtype, rows, k) if spec.gated else None,
        operands.rows(dtype, rows, k),
        operands.rows(dtype, m, k),
        operands.vector(Float32, m),
        operands.rows(Float32, cute.sym_int32(), cute.sym_int32(divisibility=8)),
        *(operands.vector(Int32, cute.sym_int32(), 4) for _ in range(2)),
        operands.vector(Int32, pairs),
        operands.strided_matrix(Int32, m, top),
        operands.strided_matrix(Float32, m, top),
        *(Int32(1),) * 5,
    )
