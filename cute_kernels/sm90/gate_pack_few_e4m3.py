"""gate_pack_few.py of e4m3 rows with scales: the formula of gate_pack_e4m3.py, with other bits, as K is split.

Behind quantize_tokens.py it is `early`: the first stages of w are loaded while that kernel runs.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, range_constexpr

from ..common import operands
from ..specs import GatePackFewSpec
from .copies import Transfer, partition
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
    def __call__(self, *arguments: Any):
        """As there, with the scales of rows behind x and w, and whether it is `early`."""
        x, x_scale, w, w_scale, *given, early, stream = arguments
        o = Operands(*[*given, None, Scales(x_scale, w_scale)])
        blocks = cute.ceil_div(x.shape[1], self.tile_k)
        extent = Extent(x.shape[0], Int32(0), Int32(0), w.shape[0], blocks, Int32(0), early)
        self.launch(operands.e4m3(x), operands.e4m3(w), o, extent, Int32(1), stream)

    @cute.jit
    def start(self, ring, w: Transfer, sW: cute.Tensor, extent: Extent, column: Int32, rank: Int32):
        """Load the first stages of w, if no kernel that may still run writes it."""
        split = rank // self.parts
        for i in cutlass.range(self.started(extent, self.blocks_of(extent, split)), unroll=1):
            self.load_weights(ring, w, sW, column * self.parts + rank % self.parts, i, split + i * self.splits)

    @cute.jit
    def load(self, ring, x: Transfer, w: Transfer, sX, sW, extent: Extent, column, split, blocks):
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        x_s, x_t = partition(x, sX, (self.tokens, self.tile_k))
        for i in cutlass.range(blocks, unroll=1):
            block = split + i * self.splits
            if i >= self.started(extent, blocks):
                cute.arch.mbarrier_wait(ring.empty + state.index, state.phase)
                self.load_weights(ring, w, sW, column, state.index, block)
            barrier = ring.full + state.index
            cute.copy(x.atom, x_t[None, 0, block], x_s[None, state.index], tma_bar_ptr=barrier)
            state.advance()

    @cute.jit
    def load_weights(self, ring, w: Transfer, sW: cute.Tensor, column: Int32, stage: Int32, block: Int32):
        """Expect a stage, and load its block of w."""
        barrier = ring.full + stage
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.stage_bytes)
        w_s, w_t = partition(w, sW, (self.neurons, self.tile_k))
        cute.copy(w.atom, w_t[None, column, block], w_s[None, stage], tma_bar_ptr=barrier)

    @cute.jit
    def started(self, extent: Extent, blocks: Int32):
        """The number of a CTA's blocks that are loaded early."""
        return cutlass.min(blocks, self.stages) if extent.early > 0 else Int32(0)


def signature(spec: GatePackFewSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return GatePackFewE4m3(spec), (*operands.gate_pack(spec.dtype), Int32(1))
