"""The gate at the candidates of the int8 screen, packed: where ``ffn_screened`` and ``hybrid_forward`` begin.

words, spill and stats are those of TwELL, but a value's neuron is its place in the list of its 128 tokens' candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import tuning
from twell._activation import RELU, Activation, threshold_pair
from twell._runtime import geometry, specs
from twell._runtime.program import Program, View
from twell.ops.gate_screen import gate_screen, screen_rows
from twell.ops.library import bias_view, check, laid_bias
from twell.ops.operands import Operands, opened
from twell.ops.quantize_gate import Quantized, QuantizedViews, quantize, quantize_gate
from twell.strategy.site import Measurement, beside_captures


class Lists(NamedTuple):
    """The candidates of each token tile: neurons int16 [B, 64 C], and sizes int32 [B + 1], the last one unused."""

    neurons: View
    sizes: View


def lists(p: Program, m: int, n: int) -> Lists:
    """Lists of ``m`` tokens as scratch."""
    tiles = geometry.token_tiles(m)
    neurons = p.scratch(torch.int16, tiles, geometry.CHUNK * geometry.chunks(n))
    return Lists(neurons, p.scratch(torch.int32, tiles + 1))


def check_quantized(w_gate: Tensor, quantized: Quantized) -> None:
    """Raise unless ``quantized`` has the shapes and dtypes of ``quantize_gate`` for ``w_gate``."""
    q, *vectors = quantized
    check("q", q, w_gate.shape, torch.int8)
    for name, vector in zip(("scale", "spread", "offset"), vectors):
        check(name, vector, w_gate.shape[:1], torch.float32)


def firing_bias(w_gate: Tensor, bias: Tensor | None, activation: Activation) -> Tensor | None:
    """The bias that the screen takes: with it a gate is above 0 if it is above the threshold with ``bias``.

    The difference is rounded up to 16 bits, so no gate that fires is missed; docs/notes/screen.md has the argument.
    """
    opened_layer, activation = opened(Operands(w_gate, w_gate, None, w_gate, bias), activation)
    bias, level = opened_layer.b_gate, activation.level(w_gate.dtype)
    if not isinstance(level, Tensor) and not level:
        return laid_bias(bias)
    if bias is None:
        lowered: Tensor = w_gate.new_zeros(len(w_gate)) - level
        return lowered
    info = torch.finfo(bias.dtype)
    # the difference, raised by more than it is rounded here; exact without a bias
    less = bias.double() - level
    least = torch.where(bias == 0, less, less + less.abs() * 2**-52)
    # by more than half a unit in the last place of 16 bits
    above = (least + least.abs() * info.eps + info.smallest_normal * info.eps).clamp(min=info.min)
    nearest = least.clamp(min=info.min).to(bias.dtype)
    return torch.where(nearest >= least, nearest, above.to(bias.dtype))


def _given_bias(w_gate: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """``firing_bias`` as the operator ``gate_screen`` takes it: an empty one is none."""
    firing = firing_bias(w_gate, bias, activation)
    return w_gate.new_empty(0) if firing is None else firing


def candidates_on_cpu(
    x: Tensor, w_gate: Tensor, b_gate: Tensor | None, quantized: Quantized, activation: Activation = RELU
) -> Tensor:
    """Which neurons are candidates of each tile of 128 tokens: booleans [ceil(M/128), N]."""
    bits = gate_screen(*quantize_gate(x, False), *quantized, _given_bias(w_gate, b_gate, activation))
    listed: Tensor = (bits[:, :, None] >> torch.arange(32, device="cpu", dtype=torch.int32) & 1).bool().flatten(1)
    return listed[:, : len(w_gate)]


@torch.no_grad()
def count(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, activation: Activation = RELU) -> Tensor:
    """How many neurons the screen lists for each tile of 128 tokens of x [M, K]: int64 [ceil(M/128)].

    For what calls measure where another strategy runs. Nothing waits.
    """
    with beside_captures(x):
        firing = _given_bias(w_gate, b_gate, activation)
        words = gate_screen(*quantize_gate(x, False), *quantize_gate(w_gate, True), firing)
        # the number of ones in two, four and eight bits
        ones = words.view(torch.uint8)
        ones = ones - (ones >> 1 & 0x55)
        ones = (ones & 0x33) + (ones >> 2 & 0x33)
        found: Tensor = (ones + (ones >> 4) & 0x0F).sum(1)
        return found


def wanted(measurement: Measurement, layer: Operands, activation: Activation) -> Tensor | None:
    """``count`` for x [..., K], of all slices, if the measurement wants it."""
    if not measurement.screen:
        return None
    x = layer.x.reshape(-1, layer.x.shape[-1])
    found, level = [], activation.threshold
    for first, last in geometry.neuron_slices(len(layer.w_gate)):
        own = layer.neurons(first, last)
        if isinstance(level, Tensor) and level.dim():
            activation = activation._replace(threshold=level[first:last])
        found.append(count(x, own.w_gate, own.b_gate, activation))
    return torch.stack(found).sum(0)


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


def find(p: Program, x: View, firing: View | None, quantized: QuantizedViews) -> View:
    """Launch the screen of all tokens: the bits of ``gate_screen``. ``firing`` is the bias of ``firing_bias``."""
    return screen_rows(p, quantize(p, x, False), quantized, bias_view(p, firing, x.dtype))


def pack(
    p: Program,
    x: View,
    w_gate: View,
    b_gate: View | None,
    bits: View,
    listed: Lists,
    packed: Sequence[View],
    compression: int,
    activation: Activation,
) -> None:
    """Launch what fills ``listed`` and ``packed``, from the ``bits`` of ``find`` for the tokens of ``x``."""
    p.launch(specs.ListCandidatesSpec(), bits, *listed, packed[2])
    form = (geometry.words_per_tile(compression), threshold_pair(activation, x.dtype), p.multiprocessors)
    p.launch(tuning.sampled_gate(x.dtype), x, w_gate, bias_view(p, b_gate, x.dtype), *listed, *packed, *form)
