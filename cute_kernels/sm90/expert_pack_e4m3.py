"""expert_pack.py of e4m3 rows with scales: words of TwELL, or hidden states, of
relu(x_q . w_q[expert] * w_scale[expert] * x_scale).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from ..common import operands
from ..common.copies import address, aligned
from ..specs import ExpertPackSpec
from .expert_pack import ExpertPack, Operands, Unit, fields


class ExpertPackE4m3(ExpertPack):
    """For one number of pairs per unit."""

    @cute.jit
    def __call__(self, *arguments: Any):
        """As there, with the scales of rows behind x and w."""
        x, x_scale, w, w_scale, *given, stream = arguments
        o = Operands(*[*given, operands.Scales(x_scale, w_scale)])
        self.launch(operands.e4m3(x), operands.e4m3(w), o, stream)

    @cute.jit
    def scale(self, values: cute.Tensor, o: Operands, unit: Unit, pair: Int32, neuron: Int32):
        if (pair < unit.pairs) & (neuron < o.hidden.shape[1]):
            scales, of_pair = cute.make_rmem_tensor((8,), Float32), o.scales.x[unit.first + pair]
            cute.autovec_copy(aligned(address(o.scales.w, unit.expert, neuron), 8), scales)
            for i in range_constexpr(8):
                values[i] = values[i] * scales[i] * of_pair


def signature(spec: ExpertPackSpec) -> tuple[Any, tuple[Any, ...]]:
    rows, count = cute.sym_int32(), cute.sym_int32()
    k, n = cute.sym_int32(divisibility=16), cute.sym_int32(divisibility=8)
    return ExpertPackE4m3(spec), (
        operands.bytes_by_rows(cutlass.Uint8, rows, k),
        operands.strided(Float32, rows),
        operands.byte_slabs(count, n, k),
        operands.matrix(Float32, count, n),
        *fields(spec, n),
    )
