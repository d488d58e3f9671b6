"""sampled_up.py of e4m3 rows with scales: up = x_q[m] . w_q[c] * w_scale[c] * x_scale[m] + bias[c]."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..common import operands
from ..common.sampled import TILE_M, Operands, SampledUpForm, Up, up_arguments
from ..common.values import widen
from ..specs import SampledUpSpec
from .sampled_up import SampledProduct


class SampledUpE4m3(SampledProduct, SampledUpForm):
    """The up projection; hidden states are bfloat16."""

    @cute.jit
    def __call__(self, *arguments: Any):
        """As there, with the scales of rows behind x and w."""
        x, x_scale, w, w_scale, bias, *pattern_and_rest, capacity, max_ctas, stream = arguments
        entries, neurons, chunks, sizes, *rest = pattern_and_rest
        pointwise = Up(*[bias, *rest, operands.Scales(x_scale, w_scale)])
        pattern = entries, neurons, chunks, sizes
        self.launch(Operands(operands.e4m3(x), operands.e4m3(w), *pattern, pointwise), capacity, max_ctas, stream)

    @cute.jit
    def scaled(self, o: Operands, value: Float32, entry: Uint32, tile: Int32, position: Int32):
        token = tile * TILE_M + Int32((entry >> 6) & Uint32(127))
        scales = o.pointwise.scales
        return value * scales.w[widen(o.neurons[tile, position])] * scales.x[token]


def signature(spec: SampledUpSpec) -> tuple[Any, tuple[Any, ...]]:
    return SampledUpE4m3(spec), up_arguments(spec)
