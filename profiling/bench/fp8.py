"""The dense layer with fp8 products, a baseline of --fp8: other results than in bf16, and less time.

Values are e4m3, each row with an fp32 scale that makes its largest value 448, the largest of e4m3. Weights are
quantised once, x and the hidden state in each call. Products are ``torch._scaled_mm``'s, with bf16 results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from twell._activation import Activation
from twell.testing import FFN

NAME = "dense fp8"

# Compute capability of the first GPUs with fp8 products, and what their sizes must be multiples of.
CAPABILITY = (8, 9)
MULTIPLE = 16
# Products in fp8 per product in bf16, by the data sheets of Hopper.
RATE = 2

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max
_LEAST = torch.finfo(torch.float32).tiny


class Quantised(NamedTuple):
    """Values [R, C] in e4m3 and the fp32 scales of their rows, [R, 1]."""

    values: Tensor
    scales: Tensor


def quantise(t: Tensor) -> Quantised:
    """Quantise each row of t [R, C]."""
    wide = t.float()
    scales = (wide.abs().amax(1, keepdim=True) / _LARGEST).clamp_min(_LEAST)
    return Quantised((wide / scales).to(_E4M3), scales)


class Weights(NamedTuple):
    """The weights of a layer, one row per output of each product: gate and up [N, K], down [K, N]; biases in bf16."""

    gate: Quantised
    up: Quantised
    down: Quantised
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None

    @classmethod
    def of(cls, problem: FFN) -> Weights:
        """Quantise the weights of a problem."""
        down = quantise(problem.w_down.T.contiguous())
        return cls(quantise(problem.w_gate), quantise(problem.w_up), down, *problem[4:])


def output(x: Tensor, weights: Weights, activation: Activation) -> Tensor:
    """y [M, K] of x [M, K], both in bf16."""
    tokens = quantise(x)
    gate = _product(tokens, weights.gate, weights.b_gate)
    up = _product(tokens, weights.up, weights.b_up)
    hidden = activation.hidden(activation.after(gate), up)
    return _product(quantise(hidden), weights.down, weights.b_down)


def _product(left: Quantised, right: Quantised, bias: Tensor | None) -> Tensor:
    return torch._scaled_mm(
        left.values,
        right.values.T,
        scale_a=left.scales,
        scale_b=right.scales.T,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
