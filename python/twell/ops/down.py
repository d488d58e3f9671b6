"""``down``: the down projection of packed activations. y = h @ w_down + down_bias, l1[m] = sum of h[m], fp32 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from twell import tuning
from twell._runtime import device, geometry
from twell.ops.library import check, check_matrix, check_packed, check_rank, down_rows, launch, register, vector
from twell.ops.unpack import unpack


def outputs(words: Tensor, spill: Tensor, w_down: Tensor, compression: int) -> tuple[Tensor, Tensor]:
    """Uninitialised y [M, K] of the spill's dtype and l1 float32 [M]; raises unless packed for w_down."""
    m, (n, k) = words.shape[0], w_down.shape
    check_packed(words, spill, m, n, compression, w_down.dtype)
    return spill.new_empty((m, k)), spill.new_empty(m, dtype=torch.float32)


def _fake(
    words: Tensor, spill: Tensor, w_down: Tensor, down_bias: Tensor | None, compression: int
) -> tuple[Tensor, Tensor]:
    check_rank("words", words)
    check_matrix("w_down", w_down)
    if down_bias is not None:
        check("down_bias", down_bias, w_down.shape[1:], w_down.dtype)
    return outputs(words, spill, w_down, compression)


def _cpu(
    words: Tensor, spill: Tensor, w_down: Tensor, down_bias: Tensor | None, compression: int
) -> tuple[Tensor, Tensor]:
    y, l1 = _fake(words, spill, w_down, down_bias, compression)
    hidden = unpack(words, spill, w_down.shape[0], compression).float()
    total = hidden @ w_down.float()
    if down_bias is not None:
        total += down_bias.float()
    return y.copy_(total), l1.copy_(hidden.sum(1))


def _cuda(
    words: Tensor, spill: Tensor, w_down: Tensor, down_bias: Tensor | None, compression: int
) -> tuple[Tensor, Tensor]:
    y, l1 = outputs(words, spill, w_down, compression)
    m, k = y.shape
    if m:
        dtype, biased = spill.dtype, down_bias is not None
        width = geometry.words_per_tile(compression)
        operands = (words, spill, down_rows(w_down), vector(down_bias, k, spill) if biased else None, y, l1)
        if m <= tuning.SKINNY_UP_DOWN:
            launch(tuning.down_skinny(dtype, m, k, biased), *operands, width)
        else:
            heavy = words.new_empty(-(-m // geometry.GROUP_ROWS))
            clusters = device.sm_count(words.device.index) // 8
            launch(tuning.down(dtype, k, biased), *operands, heavy, width, clusters)
    return y, l1


down = register(
    "down(Tensor words, Tensor spill, Tensor w_down, Tensor? down_bias, int compression) -> (Tensor y, Tensor l1)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_ffn",
)
