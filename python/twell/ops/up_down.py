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
from twell.ops.operands import Scaled, launched
from twell.runtime import geometry
from twell.runtime.program import Program, View


def behind_on_cpu(
    gate: Tensor,
    x: Tensor | None,
    w_up: Tensor | None,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation: Activation,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, l1 [M], stats of 8 tokens each and unions of tiles, behind a gate after its activation; w_down is [N, K].

    rounded: whether h is, as "union" does.
    """
    up = None if x is None or w_up is None else hybrid_cpu.project(x, w_up, b_up)
    hidden = activation.hidden(gate.float(), up).masked_fill(gate == 0, 0)
    y = hybrid_cpu.project(hidden.to(gate.dtype) if rounded else hidden, w_down.t(), b_down)
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
    x: View | Scaled | None,
    words: View,
    spill: View,
    w_up: Any,
    w_down: Any,
    b_up: View | None,
    b_down: View | None,
    y: View,
    l1: View,
    compression: int,
    activation: Activation,
    zeroed: View | None,
    stats: View,
) -> None:
    """Launch what fills ``y`` and ``l1``.

    ``zeroed`` are ``counters``, which another launch has zeroed; without them no clusters share a token.
    """
    (m, k), dtype, gated = y.shape, spill.dtype, w_up is not None
    spec, helpers = _kernel(p, m, k, w_down.dtype, gated, zeroed is None)
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
    biases = bias_view(p, b_up, dtype) if gated else None, bias_view(p, b_down, dtype)
    form = geometry.words_per_tile(compression), activation.code()
    w_down = down_rows(p, w_down)
    scaled = isinstance(w_down, Scaled)
    of_x, of_up = launched(x if gated else None, scaled), launched(w_up, scaled)
    p.launch(
        spec, *of_x, words, spill, *of_up, *launched(w_down), *biases, y, l1, sums, own, weights, stats, *numbers, *form
    )
