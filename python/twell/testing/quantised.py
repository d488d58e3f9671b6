"""A layer in e4m3, as sparse kernels and as dense products of servers read it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import twell
from twell.base.activation import RELU
from twell.ops import e4m3, float8
from twell.ops.float8 import Float8
from twell.testing.workloads import FFN


class Quantised:
    """A gated layer of 16 bits with its weights in e4m3, a scale for each row."""

    def __init__(self, problem: FFN) -> None:
        self.problem = problem
        self.gate, self.up, down = map(twell.quantize, (problem.w_gate, problem.w_up, problem.w_down.t()))
        self.down = Float8(down.values.t().contiguous().t(), down.scale)
        # as torch._scaled_mm reads it: in another layout each call would copy it
        self.stored = Float8(down.values.contiguous(), down.scale)
        both = torch.cat((self.gate.values.view(torch.uint8), self.up.values.view(torch.uint8)))
        self.both = Float8(both.view(float8.E4M3), torch.cat((self.gate.scale, self.up.scale)))

    def dense(
        self,
        x: Tensor,
        strategy: object = "dense",
        merged: bool = True,
        quantise: Callable[..., tuple[Tensor, Tensor]] = e4m3.tokens_in_float8,
        hidden: Callable[..., tuple[Tensor, Tensor]] = e4m3.hidden_in_float8,
    ) -> Tensor:
        """y by products of ``torch._scaled_mm`` and fused passes; on a CPU by sums in float32."""
        if x.device.type != "cuda":
            return e4m3.dense(e4m3.layer_of(x, (self.gate, self.up, self.stored), float8.NO_BIASES), RELU, True)[0]
        tokens = quantise(x)
        if merged:
            gate, up = e4m3.product(*tokens, self.both.values, self.both.scale).chunk(2, 1)
        else:
            gate, up = (e4m3.product(*tokens, w.values, w.scale) for w in (self.gate, self.up))
        return e4m3.product(*hidden(gate, up), self.stored.values, self.stored.scale)

    def sparse(self, x: Tensor, strategy: Any) -> Tensor:
        """y by a strategy of twell."""
        return twell.sparse_gated_ffn(x, self.gate, self.up, self.down, strategy=strategy)  # type: ignore[no-any-return]

    def rounded(self, x: Tensor) -> FFN:
        """The layer on x with the gates of the quantised one."""
        tokens = float8.quantize_tokens(x).dequantize(torch.bfloat16)
        return self.problem._replace(x=tokens, w_gate=self.gate.dequantize(torch.bfloat16))
