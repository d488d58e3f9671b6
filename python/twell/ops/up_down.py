"""``up_down``: the up and down projections on the pattern of a packed gate.

h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]) for the non-zeros of the gate, y = h @ w_down + b_down,
l1[m] = sum of |h[m]|. With ``activation`` "relu2" h has the square of the gate, with "drelu" the ReLU of the up
projection. The hidden state h is never stored, and stays fp32 until y is rounded. Neurons whose gate is zero add
nothing. Each token reads two weight rows per non-zero again, so many tokens with many non-zeros take many times as long
as dense PyTorch.

Without ``w_up``, in a layer without a gate, the packed values are h, or h is their square; x and ``b_up`` are not read
and may be None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell import tuning
from twell._activation import Activation, activation_of
from twell._runtime import device, geometry
from twell.ops import hybrid
from twell.ops.library import (
    PACKED,
    bias_vector,
    check,
    check_layer,
    check_matrix,
    check_packed,
    check_rank,
    down_rows,
    empty,
    launch,
    packed_first,
    register,
    rows,
)
from twell.ops.operands import PackedOperands
from twell.ops.unpack import unpack


def outputs(packed: PackedOperands, compression: int) -> tuple[Tensor, Tensor]:
    """Uninitialised y [M, K] of the weights' dtype and l1 float32 [M]; raises unless packed for x and w_down."""
    x, words, spill, w_up, w_down, _, _ = packed
    if x is None and w_up is not None:
        raise ValueError("x must be given with w_up, got None")
    m, (n, k) = (words if x is None else x).shape[0], w_down.shape
    check_packed(words, spill, m, n, compression, w_down.dtype)
    return empty(spill, (m, k)), empty(spill, m, torch.float32)


@packed_first
def _fake(packed: PackedOperands, compression: int, activation: str = "relu") -> tuple[Tensor, Tensor]:
    x, words, _, w_up, w_down, b_up, b_down = packed
    activation_of(activation, gated=w_up is not None)
    if x is not None and w_up is not None:
        check_layer(x, w_up=w_up, w_down=w_down, b_up=b_up, b_down=b_down)
    else:
        check_rank("words", words)
        check_matrix("w_down", w_down)
        if x is not None:
            check("x", x, (words.shape[0], w_down.shape[1]), w_down.dtype)
        if b_down is not None:
            check("b_down", b_down, w_down.shape[1:], w_down.dtype)
    return outputs(packed, compression)


@packed_first
def on_cpu(packed: PackedOperands, compression: int, activation: str = "relu") -> tuple[Tensor, Tensor]:
    y, l1 = _fake(*packed, compression, activation)
    x, words, spill, w_up, w_down, b_up, b_down = packed
    gate = unpack(words, spill, w_down.shape[0], compression).float()
    up = None if x is None or w_up is None else hybrid.project(x, w_up, b_up)
    hidden = activation_of(activation).hidden(gate, up).masked_fill(gate == 0, 0)
    return y.copy_(hybrid.project(hidden, w_down.t(), b_down)), l1.copy_(hidden.abs().sum(1))


@packed_first
def _cuda(packed: PackedOperands, compression: int, activation: str = "relu") -> tuple[Tensor, Tensor]:
    y, l1 = outputs(packed, compression)
    multiply(packed, y, l1, compression, activation_of(activation, gated=packed.w_up is not None))
    return y, l1


def arrivals_for(x: Tensor) -> Tensor | None:
    """Uninitialised counters of the clusters that share a token of ``x`` [M, K]; None if no clusters do."""
    (m, k), index = x.shape, x.device.index
    if not m:
        return None
    spec = tuning.up_down_token(x.dtype, m, k, True, False, tuning.family(index))
    if tuning.token_pieces(m, spec, device.sm_count(index)) == 1:
        return None
    return empty(x, m * spec.cluster, torch.int32)


def multiply(
    packed: PackedOperands,
    y: Tensor,
    l1: Tensor,
    compression: int,
    activation: Activation,
    invariant: bool = False,
    arrivals: Tensor | None = None,
) -> None:
    """Launch what fills ``y`` and ``l1``; if ``invariant``, with bits that do not depend on other tokens.

    ``arrivals`` are those of ``arrivals_for``, zeroed; without them they are made here.
    """
    x, words, spill, w_up, w_down, b_up, b_down = packed
    m, k = y.shape
    if m:
        tokens, up, gated = None, None, False
        if x is not None and w_up is not None:
            tokens, up, gated = rows(x), rows(w_up), True
        operands = (tokens, words, spill, up, down_rows(w_down))
        form = geometry.words_per_tile(compression), activation.code()
        up_bias = bias_vector("b_up", b_up, w_down.shape[0], spill) if gated else None
        results = (up_bias, bias_vector("b_down", b_down, k, spill), y, l1)
        family = tuning.family(words.device.index)
        spec = tuning.up_down_token(spill.dtype, m, k, gated, invariant, family)
        pieces = 1 if invariant else tuning.token_pieces(m, spec, device.sm_count(words.device.index))
        if pieces == 1:
            arrivals = empty(words, 0)
        elif arrivals is None:
            arrivals = words.new_zeros(m * spec.cluster)
        # y of each piece, and behind it the sum of |h|
        sums = empty(words, (m * pieces if pieces > 1 else 0, k + 8), torch.float32)
        launch(spec, *operands, *results, sums, arrivals, pieces, *form)


up_down = register(
    f'up_down(Tensor? x, {PACKED}, int compression, str activation="relu") -> (Tensor y, Tensor l1)',
    fake=_fake,
    cpu=on_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
)
