"""Gradients at the non-zeros of a hybrid gate: dh = dy[m] . w_down[c] + dl1 sign(h), d_gate = dh * up and
d_up = dh * gate, each as two 16-bit values: the rounded one and its rounding error.

So it is for relu; for the other activations see common/activation.py. The kernel is that of sampled_up.py with dy in
place of x and w_down in place of w_up. If not gated, up is 1 and only d_gate is computed.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common import operands
from ..common.activation import add_l1, gradients, hidden
from ..common.values import high_to_float, split_value
from ..specs import SampledGradSpec
from .sampled_up import Operands, SampledUp


class Pointwise(NamedTuple):
    """Operands of the epilogue; `up` and `d_up` are None if not gated."""

    up: Any
    dl1: Any
    d_gate: Any
    d_up: Any
    activation: Any


class SampledGrad(SampledUp):
    """For one dtype, gated or not."""

    def __init__(self, spec: SampledGradSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.gated = spec.gated

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        w_down: cute.Tensor,
        entries: cute.Tensor,
        neurons: cute.Tensor,
        chunks: cute.Tensor,
        sizes: cute.Tensor,
        up: cute.Tensor | None,
        dl1: cute.Tensor,
        d_gate: cute.Tensor,
        d_up: cute.Tensor | None,
        activation: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        o = Operands(w_down, entries, neurons, chunks, sizes, Pointwise(up, dl1, d_gate, d_up, activation))
        self.launch(dy, o, d_gate.shape[0], max_ctas, stream)

    @cute.jit
    def load_factor(self, o, at):
        """The up projection, 1 if not gated."""
        if const_expr(self.gated):
            return o.pointwise.up[at].to(Float32)
        return Float32(1.0)

    @cute.jit
    def apply_entry(self, o, at, value, entry, factor, tile, position):
        """Store the gradients of one entry."""
        own = o.pointwise
        gate = high_to_float(entry, self.dtype)
        dh = add_l1(value, own.dl1[0], hidden(gate, factor, own.activation))
        d_gate, d_up = gradients(dh, gate, factor, own.activation)
        own.d_gate[at] = Int32(split_value(d_gate, self.dtype))
        if const_expr(self.gated):
            own.d_up[at] = Int32(split_value(d_up, self.dtype))
        return Float32(0.0)

    @cute.jit
    def store_total(self, o, s, total, tile, part, thread):
        """Do nothing: gradients have no total."""


def signature(spec: SampledGradSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype = operands.DTYPES[spec.dtype]
    n, k, p = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8), cute.sym_int32()
    arguments = (
        operands.rows(dtype, cute.sym_int32(), k),
        operands.rows(dtype, n, k),
        operands.vector(Int32, cute.sym_int32()),
        *operands.lists(cute.sym_int32()),
        operands.vector(dtype, p) if spec.gated else None,
        operands.vector(Float32, 1, align=4),
        operands.vector(Int32, p),
        operands.vector(Int32, p) if spec.gated else None,
        Int32(1),
        Int32(1),
    )
    return SampledGrad(spec), arguments
