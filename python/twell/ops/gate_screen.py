"""``gate_screen``: which neurons any of 128 tokens may fire, from the int8 rows of ``quantize_gate``.

An empty ``b_gate`` is none. Bit n % 32 of candidates[t, n / 32] is set unless all gates of neuron n are 0 after ReLU
for the tokens of tile t: by a bound of the error of the int8 products that a gate exceeds with a probability of at most
2^-80.  Bits beyond the last neuron are 0.

x, x_scale, x_spread and x_offset are what ``quantize_gate`` returns for x; w_gate, w_scale, w_spread and w_offset what
it returns for the weight. b_gate [N] has the layer's dtype. candidates is int32 [ceil(M / 128), 8 * ceil(N / 256)].
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from twell import tuning
from twell._runtime import geometry, screen
from twell._runtime.program import Program, View
from twell.ops.library import blocks, check, check_rank, laid_bias, register
from twell.ops.operands import run
from twell.ops.quantize_gate import Quantized, QuantizedViews, require, require_pitch

# bits of a word
_WORD = 32


def _shape(x: Tensor | View, w_gate: Tensor | View) -> tuple[int, int]:
    words = geometry.tiles(w_gate.shape[0]) * geometry.TILE // _WORD
    return blocks(x.shape[0], geometry.TOKEN_TILE), words


def outputs(*arguments: Any) -> Tensor:
    """Uninitialised candidates int32 [ceil(M/128), 8 * T]; raises unless the operands fit each other."""
    x, w_gate, b_gate = _split(arguments)
    for name, (matrix, *vectors) in (("x", x), ("w_gate", w_gate)):
        check_rank(name, matrix)
        check(name, matrix, (matrix.shape[0], x[0].shape[1]), torch.int8)
        if matrix.shape[1] % 8:
            raise ValueError(f"{name} must have rows of a multiple of 8 values, got {list(matrix.shape)}")
        for part, vector in zip(("scale", "spread", "offset"), vectors):
            check(f"{name[0]}_{part}", vector, (matrix.shape[0],), torch.float32)
    if b_gate.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"b_gate must be bfloat16 or float16, got {b_gate.dtype}")
    if b_gate.shape != (0,):
        check("b_gate", b_gate, (w_gate[0].shape[0],), b_gate.dtype)
    return x[0].new_empty(_shape(x[0], w_gate[0]), dtype=torch.int32)


def _split(arguments: tuple[Any, ...]) -> tuple[Quantized, Quantized, Tensor]:
    """Rows of x and of w_gate as ``quantize_gate`` gives them, and the bias, of the schema's arguments."""
    return arguments[:4], arguments[4:8], arguments[8]


def _cpu(*arguments: Any) -> Tensor:
    candidates = outputs(*arguments)
    (x, x_scale, x_spread, x_offset), (w_gate, w_scale, w_spread, w_offset), b_gate = _split(arguments)
    (m, k), n = x.shape, w_gate.shape[0]
    root, tail, product, x_part, w_part, slack, usual, block, dithers = constants(k)
    u, v = x_spread.double(), w_spread.double().square()
    slope, p = product * u + w_part, u + root
    r = (usual + tail * p * p / slope).sqrt()
    a = (tail * p * p / r + slope * r) / 2 + x_part * u + slack
    a, b = a * (1 + screen.MARGIN) + (dithers - x_offset.double()), slope / (2 * r) * (1 + screen.MARGIN)
    terms = zip((a, b, 1 / x_scale.double()), (-screen.ABOVE_CORRECTIONS, 0.0, screen.LIFT))
    a, b, i = (term.masked_fill(u == 0, of_zero)[:, None] for term, of_zero in terms)
    bias = b_gate.double() if len(b_gate) else torch.zeros_like(v)
    beta = bias * block / w_scale.double()
    more = (beta * (1 + screen.BIAS_MARGIN)).clamp(min=1 / screen.DECISIVE)
    beta = torch.where(bias > 0, more, beta * (1 - screen.BIAS_MARGIN))
    decisive = torch.where(bias > 0, screen.DECISIVE, torch.where(bias <= 0, -screen.DECISIVE, bias))
    beta = torch.where(v == 0, decisive, beta)
    # sums of int8 products are exact in float64
    below = x.double() @ w_gate.double().t() - w_offset.double() <= -(i * beta + (b * v + a))
    shape = (candidates.shape[0], geometry.TOKEN_TILE, candidates.shape[1], _WORD)
    padded = below.new_zeros((shape[0] * shape[1], shape[2] * _WORD))
    padded[:m, :n] = ~below
    found = padded.view(shape).any(1)
    bits = (found.long() << torch.arange(_WORD, device="cpu")).sum(2)
    return candidates.copy_(bits.where(bits < 1 << _WORD - 1, bits - (1 << _WORD)))


@functools.cache
def constants(k: int) -> tuple[float, ...]:
    """What the kernel takes of ``k`` columns, in the order of its ``Constants``."""
    tail, grid = screen.dither_tail(), screen.grid_error(k)
    # root, tail, product, x_part, w_part, slack
    bound = (math.sqrt(k) / 2, tail, 2 * screen.ROTATION + screen.product_error(k), grid, tail + grid, screen.SLACK)
    # usual, block, dithers
    return *bound, float(screen.USUAL_SPREAD * k), float(screen.rotation_block(k)), screen.dither_product(k)


def _cuda(*arguments: Any) -> Tensor:
    x, w_gate, b_gate = _split(arguments)
    require(x[0].device, "gate_screen")
    for name, (q, *_) in (("x", x), ("w_gate", w_gate)):
        require_pitch(name, q)
    candidates = outputs(*arguments)
    if len(candidates):
        run(_launch, (*x, *w_gate, laid_bias(b_gate), candidates))
    return candidates


def screen_rows(p: Program, x: QuantizedViews, w_gate: QuantizedViews, b_gate: View) -> View:
    """Launch the operator, into scratch."""
    candidates = p.scratch(torch.int32, *_shape(x[0], w_gate[0]))
    _launch(p, *x, *w_gate, b_gate, candidates)
    return candidates


def _launch(p: Program, *views: View) -> None:
    *rows, b_gate, candidates = views
    blocks, words = candidates.shape
    halves = candidates.at(0, torch.int16, blocks, 2 * words)
    # a cluster is two CTAs, one per multiprocessor
    of_bound = (*constants(rows[0].shape[1]), p.multiprocessors // 2)
    p.launch(tuning.gate_screen(b_gate.dtype), *rows, b_gate, halves, *of_bound)


gate_screen = register(
    "gate_screen(Tensor x, Tensor x_scale, Tensor x_spread, Tensor x_offset, "
    "Tensor w_gate, Tensor w_scale, Tensor w_spread, Tensor w_offset, Tensor b_gate) -> Tensor",
    fake=outputs,
    cpu=_cpu,
    cuda=_cuda,
)
