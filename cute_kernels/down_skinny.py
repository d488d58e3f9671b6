"""The non-gated down projection for few tokens: y[m] = sum over non-zeros c of act[m, c] * w_down[c].

The kernel is that of up_down_skinny.py without x and the up rows: the activation itself is h.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from . import geometry
from .sm90 import operands
from .specs import DownSkinnySpec
from .up_down_skinny import UpDownSkinny


class DownSkinny(UpDownSkinny):
    """One dtype and class of hidden sizes."""

    gated = False

    @cute.jit
    def __call__(
        self,
        words: cute.Tensor,
        spill: cute.Tensor,
        w_down: cute.Tensor,
        down_bias: cute.Tensor | None,
        y: cute.Tensor,
        l1: cute.Tensor,
        words_per_tile: Int32,
        stream: cuda.CUstream,
    ):
        self.launch(None, words, spill, None, w_down, None, down_bias, y, l1, words_per_tile, stream)


def signature(spec: DownSkinnySpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype = operands.DTYPES[spec.dtype]
    m, n, k = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    arguments = (
        operands.rows(Int32, m, cute.sym_int32(divisibility=32)),
        operands.rows(dtype, m, cute.sym_int32(divisibility=geometry.TILE)),
        operands.rows(dtype, n, k),
        operands.vector(dtype, k) if spec.bias else None,
        operands.rows(dtype, m, k),
        operands.vector(Float32, m),
        Int32(1),
    )
    return DownSkinny(spec), arguments
