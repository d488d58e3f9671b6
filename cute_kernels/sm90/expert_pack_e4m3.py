"""expert_pack.py of e4m3 rows with scales, see gate_pack_few_e4m3.py: words of TwELL, or hidden states, of
relu(x_q . w_q[expert] * w_scale[expert] * x_scale).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import geometry
from ..common import operands
from ..specs import ExpertPackSpec
from .expert_pack import ExpertPack
from .gate_pack_e4m3 import Scales
from .gate_pack_few_e4m3 import ScaledSums


class ExpertPackE4m3(ExpertPack, ScaledSums):
    """For one number of pairs per unit."""

    @cute.jit
    def __call__(self, *arguments: Any):
        """As there, with the scales of rows behind x and w."""
        x, x_scale, w, w_scale, words, spill, *of_units, arrivals, width, threshold, activation, stream = arguments
        # scales of all experts lie one behind the other
        scales = Scales(x_scale, cute.make_tensor(w_scale.iterator, cute.make_layout(cute.size(w_scale))))
        of_words = words, spill, arrivals, width, threshold
        self.launch_units(operands.e4m3(x), operands.e4m3(w), of_words, (*of_units, activation), stream, scales)


def signature(spec: ExpertPackSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype, pairs, rows, count = operands.DTYPES[spec.dtype], cute.sym_int32(), cute.sym_int32(), cute.sym_int32()
    k, n = cute.sym_int32(divisibility=16), cute.sym_int32(divisibility=8)
    return ExpertPackE4m3(spec), (
        operands.bytes_by_rows(cutlass.Uint8, rows, k),
        operands.strided(Float32, rows),
        operands.byte_slabs(count, n, k),
        operands.matrix(Float32, count, n),
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
