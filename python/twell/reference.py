"""What every operator means, in the fewest words: slow, obvious, for tests and readers. CPU tensors, no gradients.

Shapes and dtypes are those of ``torch.ops.twell.*``: tokens [M, K], weights [N, K], bfloat16 or float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell._runtime import format


def gate(x: Tensor, w_gate: Tensor, bias: Tensor | None) -> Tensor:
    """relu(x @ w_gate^T + bias) [M, N], accumulated in fp32, rounded once to x's dtype. NaN stays NaN."""
    accumulator = x.float() @ w_gate.float().t()
    return (accumulator if bias is None else accumulator + bias.float()).to(x.dtype).relu()


def gate_pack(x: Tensor, w_gate: Tensor, bias: Tensor | None, compression: int) -> tuple[Tensor, Tensor, Tensor]:
    """words int32 [M, T*W], spill [M, T*256], stats int32 [ceil(M/64), T, 2]; unused words and spill are 0."""
    dense = gate(x, w_gate, bias)
    m, n = dense.shape
    tiles, width = format.tiles(n), format.words_per_tile(compression)
    words = torch.zeros(m, tiles * width, dtype=torch.int32)
    spill = torch.zeros(m, tiles * format.TILE, dtype=x.dtype)
    stats = torch.zeros(-(-m // format.STATS_ROWS), tiles, 2, dtype=torch.int32)
    for row in range(m):
        for tile in range(tiles):
            values = dense[row, tile * format.TILE : (tile + 1) * format.TILE]
            active = [i for i, value in enumerate(values.tolist()) if value != 0]
            words[row, tile * width] = len(active)
            for place, i in enumerate(active[: width - 1], start=1):
                bits = int(values[i].view(torch.int16))
                words[row, tile * width + place] = bits << 16 | tile * format.TILE + i
            if len(active) > width - 1:
                spill[row, tile * format.TILE :][: len(values)] = values
            stats[row // format.STATS_ROWS, tile, 0] += len(active)
            stats[row // format.STATS_ROWS, tile, 1] += len(active) > width - 1
    return words, spill, stats


def unpack(words: Tensor, spill: Tensor, n: int, compression: int) -> Tensor:
    """The dense values [M, n] of the spill's dtype."""
    m, width = words.shape[0], format.words_per_tile(compression)
    dense = torch.zeros(m, format.tiles(n) * format.TILE, dtype=spill.dtype)
    for row in range(m):
        for tile in range(format.tiles(n)):
            count, *entries = words[row, tile * width : (tile + 1) * width].tolist()
            if count > width - 1:
                here = slice(tile * format.TILE, (tile + 1) * format.TILE)
                dense[row, here] = spill[row, here]
                continue
            for word in entries[:count]:
                dense[row, word & 0xFFFF] = torch.tensor(word >> 16, dtype=torch.int16).view(spill.dtype)
    return dense[:, :n]


def up_down(
    x: Tensor,
    words: Tensor,
    spill: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    compression: int,
) -> tuple[Tensor, Tensor]:
    """y [M, K] of x's dtype, l1 float32 [M]: sums over the non-zeros of the gate alone, in fp32, y rounded once."""
    dense = unpack(words, spill, w_up.shape[0], compression)
    y, l1 = torch.zeros(x.shape, dtype=torch.float32), torch.zeros(x.shape[0])
    for row, neuron in (dense != 0).nonzero().tolist():
        up = x[row].float() @ w_up[neuron].float()
        hidden = dense[row, neuron].float() * (up if up_bias is None else up + up_bias[neuron].float())
        y[row] += hidden * w_down[neuron].float()
        l1[row] += hidden.abs()
    return (y if down_bias is None else y + down_bias.float()).to(x.dtype), l1


def down(
    words: Tensor, spill: Tensor, w_down: Tensor, down_bias: Tensor | None, compression: int
) -> tuple[Tensor, Tensor]:
    """y [M, K] of the spill's dtype, l1 float32 [M]: ``up_down`` with the packed values as hidden state."""
    dense = unpack(words, spill, w_down.shape[0], compression)
    y, l1 = torch.zeros(words.shape[0], w_down.shape[1]), torch.zeros(words.shape[0])
    for row, neuron in (dense != 0).nonzero().tolist():
        hidden = dense[row, neuron].float()
        y[row] += hidden * w_down[neuron].float()
        l1[row] += hidden.abs()
    return (y if down_bias is None else y + down_bias.float()).to(spill.dtype), l1
