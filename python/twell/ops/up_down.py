"""``up_down``: the up and down projections on the pattern of a packed gate.

h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]) for the non-zeros of the gate, y = h @ w_down + b_down,
l1[m] = sum of |h[m]|. With ``activation`` "relu2" h has the square of the gate, with "drelu" the ReLU of the up
projection. The hidden state h is never stored, and stays fp32 until y is rounded. Neurons whose gate is zero add
nothing. Each token reads two weight rows per non-zero again, so many tokens with many non-zeros take many times as long
as dense PyTorch.

Without ``w_up``, in a layer without a gate, the packed values are h, or h is their square; x and ``b_up`` are not read
and may be None.

x is [M, K], words and spill are those of its gate, packed with this ``compression``; w_up and w_down are [N, K], b_up
[N] and b_down [K]. y is [M, K] of their dtype, l1 float32 [M].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import tuning
from twell._activation import Activation, activation_of
from twell._runtime import geometry
from twell._runtime.program import Program, View
from twell.ops import hybrid
from twell.ops.library import (
    PACKED,
    bias_view,
    check,
    check_layer,
    check_matrix,
    check_packed,
    check_rank,
    down_rows,
    grouped,
    laid_bias,
    readable_down,
    register,
    rows,
)
from twell.ops.operands import PackedOperands, Scaled, launched, run
from twell.ops.unpack import unpack


@grouped(PackedOperands)
def outputs(packed: PackedOperands, compression: int, activation: str = "relu") -> tuple[Tensor, Tensor]:
    """Uninitialised y [M, K] of the weights' dtype and l1 float32 [M]; raises unless the operands fit each other."""
    x, words, spill, w_up, w_down, b_up, b_down = packed
    activation_of(activation, gated=w_up is not None)
    if w_up is not None:
        if x is None:
            raise ValueError("x must be given with w_up, got None")
        check_layer(x, w_up=w_up, w_down=w_down, b_up=b_up, b_down=b_down)
    else:
        check_rank("words", words)
        check_matrix("w_down", w_down)
        if x is not None:
            check("x", x, (words.shape[0], w_down.shape[1]), w_down.dtype)
        if b_down is not None:
            check("b_down", b_down, w_down.shape[1:], w_down.dtype)
    m, (n, k) = (words if x is None else x).shape[0], w_down.shape
    check_packed(words, spill, m, n, compression, w_down.dtype)
    return spill.new_empty((m, k)), spill.new_empty(m, dtype=torch.float32)


@grouped(PackedOperands)
def _cpu(packed: PackedOperands, compression: int, activation: str = "relu") -> tuple[Tensor, Tensor]:
    y, l1 = outputs(*packed, compression, activation)
    x, words, spill, w_up, w_down, b_up, b_down = packed
    gate = unpack(words, spill, w_down.shape[0], compression)
    found = behind_on_cpu(gate, x, w_up, w_down, b_up, b_down, activation_of(activation), False)
    return y.copy_(found[0]), l1.copy_(found[1])


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
    up = None if x is None or w_up is None else hybrid.project(x, w_up, b_up)
    hidden = activation.hidden(gate.float(), up).masked_fill(gate == 0, 0)
    y = hybrid.project(hidden.to(gate.dtype) if rounded else hidden, w_down.t(), b_down)
    fires = F.pad(gate != 0, (0, 0, 0, -len(gate) % geometry.TOKEN_TILE)).view(-1, geometry.TOKEN_TILE, gate.shape[1])
    counts = fires.sum(2).view(-1, geometry.STATS_ROWS).sum(1)
    return y.to(gate.dtype), hidden.abs().sum(1), counts.view(-1, 1, 1), fires.any(1).sum(1)


@grouped(PackedOperands)
def _cuda(packed: PackedOperands, compression: int, activation: str = "relu") -> tuple[Tensor, Tensor]:
    y, l1 = outputs(*packed, compression, activation)
    x, words, spill, w_up, w_down, b_up, b_down = packed
    if len(y):
        # without an up projection neither x nor its bias is read
        up = (None, None, None) if w_up is None else (rows(x), rows(w_up), laid_bias(b_up))
        given = up[0], words, spill, up[1], readable_down(w_down.t()), up[2], laid_bias(b_down), y, l1
        run(multiply, given, compression, activation_of(activation, gated=w_up is not None))
    return y, l1


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
    zeroed: View | None = None,
    stats: View | None = None,
) -> None:
    """Launch what fills ``y`` and ``l1``.

    ``zeroed`` are ``counters``, which another launch has zeroed; without them and ``stats`` no clusters share a token.
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
    if stats is None or not helpers or m not in tuning.TOKENS_COUNTED:
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


up_down = register(
    f'up_down(Tensor? x, {PACKED}, int compression, str activation="relu") -> (Tensor y, Tensor l1)',
    fake=outputs,
    cpu=_cpu,
    cuda=_cuda,
)
