"""The gate at the candidates of the int8 screen, packed: where ``ffn_screened`` and ``hybrid_forward`` begin.

words, spill and stats are those of TwELL, but a value's neuron is its place in the list of its 128 tokens' candidates.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import tuning
from twell._activation import RELU, Activation, threshold_pair
from twell._runtime import device, geometry
from twell.ops.gate_pack import Packed
from twell.ops.gate_screen import gate_screen
from twell.ops.gate_screen import on_cuda as screen_on_cuda
from twell.ops.library import bias_vector, blocks, check, empty, launch, rows
from twell.ops.quantize_gate import Quantized, quantize_gate
from twell.ops.quantize_gate import on_cuda as quantize_on_cuda


class Lists(NamedTuple):
    """The candidates of each token tile: neurons int16 [B, 64 C], and sizes int32 [B + 1], the last one unused."""

    neurons: Tensor
    sizes: Tensor


def empty_lists(x: Tensor, m: int, n: int) -> Lists:
    """Uninitialised lists of ``m`` tokens."""
    tiles = blocks(m, geometry.TOKEN_TILE)
    neurons = empty(x, (tiles, geometry.CHUNK * geometry.chunks(n)), torch.int16)
    return Lists(neurons, empty(x, (tiles + 1,), torch.int32))


def check_quantized(w_gate: Tensor, quantized: Quantized) -> None:
    """Raise unless ``quantized`` has the shapes and dtypes of ``quantize_gate`` for ``w_gate``."""
    q, *vectors = quantized
    check("q", q, w_gate.shape, torch.int8)
    for name, vector in zip(("scale", "spread", "offset"), vectors):
        check(name, vector, w_gate.shape[:1], torch.float32)


def firing_bias(bias: Tensor, n: int, activation: Activation) -> Tensor:
    """The bias that the screen takes: with it a gate is above 0 if it is above the threshold with ``bias``.

    Both are vectors as kernels read them, empty or of ``n`` values. The difference is rounded up to 16 bits, so no gate
    that fires is missed; docs/notes/screen.md has the argument.
    """
    level = activation.level(bias.dtype)
    if not activation.moves and not level:
        return bias
    if not len(bias):
        return bias.new_zeros(n) - level if activation.moves else bias.new_full((n,), -level)
    info = torch.finfo(bias.dtype)
    # the difference, raised by more than it is rounded here; exact without a bias
    less = bias.double() - level
    least = torch.where(bias == 0, less, less + less.abs() * 2**-52)
    # by more than half a unit in the last place of 16 bits
    above = (least + least.abs() * info.eps + info.smallest_normal * info.eps).clamp(min=info.min)
    nearest = least.clamp(min=info.min).to(bias.dtype)
    return torch.where(nearest >= least, nearest, above.to(bias.dtype))


def candidates_on_cpu(
    x: Tensor, w_gate: Tensor, b_gate: Tensor | None, quantized: Quantized, activation: Activation = RELU
) -> Tensor:
    """Which neurons are candidates of each tile of 128 tokens: booleans [ceil(M/128), N]."""
    n = len(w_gate)
    bias = firing_bias(bias_vector("b_gate", b_gate, n, x), n, activation)
    bits = gate_screen(*quantize_gate(x, False), *quantized, bias)
    listed: Tensor = (bits[:, :, None] >> torch.arange(32, device="cpu", dtype=torch.int32) & 1).bool().flatten(1)
    return listed[:, : len(w_gate)]


@torch.no_grad()
def count(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, activation: Activation = RELU) -> Tensor:
    """How many neurons the screen lists for each tile of 128 tokens of x [M, K]: int64 [ceil(M/128)].

    For what calls measure where another strategy runs. Nothing waits.
    """
    # another thread may capture a graph meanwhile
    with device.relaxed_capture() if x.is_cuda else nullcontext():
        bias = firing_bias(bias_vector("b_gate", b_gate, len(w_gate), x), len(w_gate), activation)
        words = gate_screen(*quantize_gate(x, False), *quantize_gate(w_gate, True), bias)
        # the number of ones in two, four and eight bits
        ones = words.view(torch.uint8)
        ones = ones - (ones >> 1 & 0x55)
        ones = (ones & 0x33) + (ones >> 2 & 0x33)
        found: Tensor = (ones + (ones >> 4) & 0x0F).sum(1)
        return found


def masked(gate: Tensor, listed: Tensor) -> Tensor:
    """``gate`` [M, N] with zeros where a neuron is no candidate, in place."""
    return gate.masked_fill_(~listed.repeat_interleave(geometry.TOKEN_TILE, 0)[: len(gate)], 0)


def stats_on_cpu(gate: Tensor, listed: Tensor, stats: Tensor, compression: int) -> None:
    """Write the statistics of a gate that is packed by places."""
    for tile, neurons in enumerate(listed):
        tokens = gate[tile * geometry.TOKEN_TILE : (tile + 1) * geometry.TOKEN_TILE, neurons] != 0
        padding = (0, stats.shape[1] * geometry.TILE - tokens.shape[1], 0, -len(tokens) % geometry.STATS_ROWS)
        counts = F.pad(tokens, padding).view(-1, geometry.STATS_ROWS, stats.shape[1], geometry.TILE).sum(3)
        own = stats[tile * geometry.TOKEN_TILE // geometry.STATS_ROWS :][: len(counts)]
        own[:, :, 0] = counts.sum(1)
        own[:, :, 1] = (counts > geometry.capacity(compression)).sum(1)


def find(x: Tensor, b_gate: Tensor, quantized: Quantized, activation: Activation) -> Tensor:
    """The bits of ``gate_screen`` on the current device; an empty ``b_gate`` is none."""
    bias = firing_bias(b_gate, len(quantized[0]), activation)
    return screen_on_cuda(quantize_on_cuda(x, False), quantized, bias)


def pack(
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor,
    bits: Tensor,
    lists: Lists,
    packed: Packed,
    compression: int,
    activation: Activation,
) -> None:
    """Launch what fills ``lists`` and ``packed``, from the ``bits`` of ``find`` for the tokens of ``x``."""
    launch(tuning.list_candidates(), bits, *lists, packed[2])
    form = (geometry.words_per_tile(compression), threshold_pair(activation, x.dtype), device.sm_count(x.device.index))
    launch(tuning.sampled_gate(x.dtype), rows(x), w_gate, b_gate, *lists, *packed, *form)
