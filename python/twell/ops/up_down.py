"""``up_down``: the gated up and down projections on the pattern of a packed gate.

h[m, c] = gate[m, c] * (x[m] . w_up[c] + up_bias[c]) for the non-zeros of the gate, y = h @ w_down + down_bias,
l1[m] = sum of |h[m]|. The hidden state h is never stored, and stays fp32 until y is rounded. Neurons whose gate
is zero add nothing, but a non-finite down row may make NaN of 0 * inf in tokens beside one that fires it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell import tuning
from twell._runtime import device, geometry
from twell.ops.library import check_layer, check_packed, down_rows, launch, register, rows, vector
from twell.ops.unpack import unpack


def outputs(x: Tensor, words: Tensor, spill: Tensor, w_up: Tensor, compression: int) -> tuple[Tensor, Tensor]:
    """Uninitialised y [M, K] of x's dtype and l1 float32 [M]; raises unless packed for x and w_up."""
    check_packed(words, spill, x.shape[0], w_up.shape[0], compression, x.dtype)
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


def _fake(
    x: Tensor,
    words: Tensor,
    spill: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    compression: int,
) -> tuple[Tensor, Tensor]:
    check_layer(x, {"w_up": w_up, "w_down": w_down}, {"up_bias": up_bias}, down_bias)
    return outputs(x, words, spill, w_up, compression)


def _cpu(
    x: Tensor,
    words: Tensor,
    spill: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    compression: int,
) -> tuple[Tensor, Tensor]:
    y, l1 = _fake(x, words, spill, w_up, w_down, up_bias, down_bias, compression)
    gate = unpack(words, spill, w_up.shape[0], compression).float()
    up = x.float() @ w_up.float().t()
    if up_bias is not None:
        up += up_bias.float()
    hidden = (gate * up).masked_fill_(gate == 0, 0)
    total = hidden @ w_down.float()
    if down_bias is not None:
        total += down_bias.float()
    return y.copy_(total), l1.copy_(hidden.abs().sum(1))


def _cuda(
    x: Tensor,
    words: Tensor,
    spill: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    compression: int,
) -> tuple[Tensor, Tensor]:
    y, l1 = outputs(x, words, spill, w_up, compression)
    m, k = x.shape
    if m:
        biased = up_bias is not None or down_bias is not None
        biases = (vector(up_bias, w_up.shape[0], x), vector(down_bias, k, x)) if biased else (None, None)
        width = geometry.words_per_tile(compression)
        operands = (rows(x), words, spill, rows(w_up), down_rows(w_down), *biases, y, l1)
        if m <= tuning.SKINNY_UP_DOWN:
            launch(tuning.up_down_skinny(x.dtype, m, k, biased), *operands, width)
        else:
            heavy = x.new_empty(-(-m // geometry.GROUP_ROWS), dtype=torch.int32)
            clusters = device.sm_count(x.device.index) // 8
            launch(tuning.up_down(x.dtype, k, biased), *operands, heavy, width, clusters)
    return y, l1


up_down = register(
    "up_down(Tensor x, Tensor words, Tensor spill, Tensor w_up, Tensor w_down, Tensor? up_bias, Tensor? down_bias, "
    "int compression) -> (Tensor y, Tensor l1)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn",
)
