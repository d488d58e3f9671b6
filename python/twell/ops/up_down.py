"""Strategy "row" behind the packed gate: the up and down projections of each token, at its non-zeros.

h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]) for the non-zeros of the gate, y = h @ w_down + b_down,
l1[m] = sum of |h[m]|. The hidden state h is never stored, and stays fp32 until y is rounded. Neurons whose gate is zero
add nothing. Each token reads two weight rows per non-zero again, so many tokens with many non-zeros take many times as
long as dense PyTorch. Without ``w_up`` the packed values are h, or h is their square; neither x nor ``b_up`` is read.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.activation import Activation
from twell.choose import tuning
from twell.ops import hybrid_cpu
from twell.ops.library import bias_view, down_rows
from twell.ops.operands import Layer, Scaled, launched
from twell.runtime import geometry
from twell.runtime.program import Program, View


def behind_on_cpu(gate: Tensor, layer: Layer, activation: Activation, rounded: bool) -> tuple[Tensor, ...]:
    """y, l1 [M], stats of 8 tokens and unions of tiles, w_down [K, N]; ``rounded``: whether h is, as by "union"."""
    up = None if layer.w_up is None else hybrid_cpu.project(layer.x, layer.w_up, layer.b_up)
    hidden = activation.hidden(gate.float(), up).masked_fill(gate == 0, 0)
    y = hybrid_cpu.project(hidden.to(gate.dtype) if rounded else hidden, layer.w_down, layer.b_down)
    fires = F.pad(gate != 0, (0, 0, 0, -len(gate) % geometry.TOKEN_TILE)).view(-1, geometry.TOKEN_TILE, gate.shape[1])
    counts = fires.sum(2).view(-1, geometry.STATS_ROWS).sum(1)
    return y.to(gate.dtype), hidden.abs().sum(1), counts.view(-1, 1, 1), fires.any(1).sum(1)


def _kernel(p: Program, m: int, k: int, dtype: torch.dtype, gated: bool, alone: bool) -> tuple[Any, int]:
    """The kernel of ``m`` tokens, and how many clusters help with heavy ones; none if each token is ``alone``."""
    spec = tuning.up_down_token(dtype, m, k, gated, alone, tuning.family(p.index))
    return spec, 0 if alone else tuning.token_helpers(m, spec, p.multiprocessors)


def counters(p: Program, x: View | Scaled, gated: bool, invariant: bool) -> int:
    """Counters of the clusters that share tokens of ``x`` [M, K]; 0 if none do."""
    m, k = x.shape
    spec, helpers = _kernel(p, m, k, x.dtype, gated, invariant)
    # those of the tokens' clusters, and the weights of heavy tokens
    return geometry.TOKEN_COUNTERS + m * (spec.cluster + 1) if helpers else 0


def multiply(
    p: Program,
    layer: Layer,
    packed: tuple[View, View, View],
    y: View,
    l1: View,
    compression: int,
    activation: Activation,
    zeroed: View | None,
) -> None:
    """Launch what fills ``y`` and ``l1``; without ``zeroed``, zeros for ``counters``, no clusters share a token."""
    (m, k), (words, spill, stats), gated = y.shape, packed, layer.w_up is not None
    spec, helpers = _kernel(p, m, k, layer.w_down.dtype, gated, zeroed is None)
    # y of each piece, and behind it the sum of |h|
    sums = p.scratch(torch.float32, 2 * helpers, k + 8)
    if zeroed is None:
        zeroed = p.scratch(torch.int32, 0)
    own, weights = zeroed, zeroed
    if helpers:
        first = geometry.TOKEN_COUNTERS + m * spec.cluster
        own, weights = zeroed.part(0, first), zeroed.part(first, first + m)
    if not helpers or m not in tuning.TOKENS_COUNTED:
        stats = p.scratch(torch.int32, 0, 1, 2)
    numbers = helpers, tuning.light_nonzeros(m, tuning.family(p.index))
    biases = bias_view(p, layer.b_up, y.dtype) if gated else None, bias_view(p, layer.b_down, y.dtype)
    form = geometry.words_per_tile(compression), activation.code()
    w_down = down_rows(p, layer.w_down)
    scaled = isinstance(w_down, Scaled)
    of_x, of_up = launched(layer.x if gated else None, scaled), launched(layer.w_up, scaled)
    p.launch(
        spec, *of_x, words, spill, *of_up, *launched(w_down), *biases, y, l1, sums, own, weights, stats, *numbers, *form
    )
