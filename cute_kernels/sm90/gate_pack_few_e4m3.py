"""gate_pack_few.py of e4m3 rows with scales: the formula of gate_pack_e4m3.py, with other bits, as K is split."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from ..common import operands
from ..specs import GatePackFewSpec
from .gate_pack_e4m3 import Scales
from .gate_pack_few import Extent, GatePackFew, Operands


class ScaledSums(GatePackFew):
    """The sums of e4m3 rows."""

    def start_sums(self, values: cute.Tensor, o: Operands, neuron: Int32) -> None:
        values.fill(0.0)

    @cute.jit
    def finish_sums(self, values: cute.Tensor, o: Operands, extent: Extent, token: Int32, neuron: Int32):
        if (token < extent.tokens) & (neuron < extent.neurons):
            scales, of_token = cute.make_rmem_tensor((8,), Float32), o.scales.x[extent.source + token]
            source = (o.scales.w.iterator + (extent.expert * extent.neurons + neuron)).align(16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), scales)
            for i in range_constexpr(8):
                values[i] = values[i] * scales[i] * of_token
            if neuron < o.bias.shape[0]:
                for i in range_constexpr(8):
                    values[i] += o.bias[neuron + i].to(Float32)


class GatePackFewE4m3(ScaledSums):
    """For one number of tokens."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        x_scale: cute.Tensor,
        w: cute.Tensor,
        w_scale: cute.Tensor,
        bias: cute.Tensor,
        words: cute.Tensor,
        spill: cute.Tensor,
        stats: cute.Tensor,
        arrivals: cute.Tensor,
        words_per_tile: Int32,
        threshold: Int32,
        stream: cuda.CUstream,
    ):
        scales = Scales(x_scale, w_scale)
        o = Operands(bias, words, spill, stats, arrivals, words_per_tile, threshold, None, scales)
        blocks = cute.ceil_div(x.shape[1], self.tile_k)
        extent = Extent(x.shape[0], Int32(0), Int32(0), w.shape[0], blocks, Int32(0))
        self.launch(operands.e4m3(x), operands.e4m3(w), o, extent, Int32(1), stream)


def signature(spec: GatePackFewSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return GatePackFewE4m3(spec), operands.gate_pack(spec.dtype)
