"""``ffn_screened``: ``ffn_union`` that computes the gate only where an int8 product says that it may fire.

``q``, ``scale``, ``spread`` and ``offset`` are those of ``quantize_gate`` for w_gate. x is quantised at each call.
Neurons that any of 128 tokens may fire are candidates of these tokens. Their gates are computed exactly, all others are
0, except with a probability of at most 2^-80 per gate: so y has the bits of ``ffn_union`` above 64 tokens. ``stats``
are by 256 candidates where those of ``ffn_union`` are by 256 neurons. ``candidates`` and ``union`` count the candidates
of each tile of 128 tokens, and those that fire.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twell._activation import Activation
from twell._runtime import geometry
from twell.ops import hybrid, screened
from twell.ops.gate_pack import figures, room
from twell.ops.library import ACTIVATION, LAYER, bias_vector, check_alike, check_layer, last_activation, part, register
from twell.ops.operands import Operands, PackedOperands
from twell.ops.quantize_gate import Quantized, require, require_pitch
from twell.ops.screened import Lists
from twell.ops.up_down_union import by_slices, results, union

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _split(arguments: tuple[Any, ...]) -> tuple[Operands, Quantized, int, Activation]:
    """The layer, its int8 gate weight, compression and activation, of the arguments of the schema."""
    layer, quantized, compression = Operands(*arguments[:7]), arguments[7:11], arguments[11]
    return layer, quantized, compression, last_activation(arguments[12:], layer.w_up is not None)


def _fake(*arguments: Any) -> Outputs:
    layer, quantized, compression, activation = _split(arguments)
    check_layer(*layer)
    screened.check_quantized(layer.w_gate, quantized)
    activation.level(layer.x.dtype)
    geometry.words_per_tile(compression)
    y, l1, sizes = results(layer.x, layer.w_gate.shape[0])
    return y, l1, figures(layer.x, layer.w_gate), union(sizes), union(torch.empty_like(sizes))


def _cpu(*arguments: Any) -> Outputs:
    return on_cpu(*_split(arguments))


def on_cpu(layer: Operands, quantized: Quantized, compression: int, activation: Activation) -> Outputs:
    """The operator on the CPU."""
    y, l1, stats, fired, candidates = _fake(*layer, *quantized, compression, *activation)
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    listed = screened.candidates_on_cpu(x, w_gate, b_gate, quantized, activation)
    gate = activation.after(hybrid.project(x, w_gate, b_gate).to(x.dtype), inplace=True)
    screened.masked(gate, listed)
    up = None if w_up is None else hybrid.project(x, w_up, b_up)
    hidden = activation.hidden(gate.float(), up).masked_fill(gate == 0, 0)
    y.copy_(hybrid.project(hidden.to(x.dtype), w_down.t(), b_down))
    candidates.copy_(listed.sum(1))
    l1.zero_()
    for tile in range(len(fired)):
        tokens = slice(tile * geometry.TOKEN_TILE, (tile + 1) * geometry.TOKEN_TILE)
        l1[tile, 0] = hidden[tokens].abs().sum()
        fired[tile] = (gate[tokens] != 0).any(0).sum()
    screened.stats_on_cpu(gate, listed, stats, compression)
    return y, l1, stats, fired, candidates


def _cuda(*arguments: Any) -> Outputs:
    layer, quantized, compression, activation = _split(arguments)
    screened.check_quantized(layer.w_gate, quantized)
    require_pitch("q", quantized[0])
    y, l1, stats, sizes, candidates = on_cuda(layer, quantized, compression, activation)
    return y, l1, stats, union(sizes), union(candidates)


def on_cuda(layer: Operands, quantized: Quantized, compression: int, activation: Activation) -> Outputs:
    """The operator on the current device, with all sizes."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    check_alike(w_gate, w_up=w_up, w_down=w_down)
    require(x, "ffn_screened")
    (m, _), n = x.shape, w_gate.shape[0]
    bias, laid, slices = bias_vector("b_gate", b_gate, n, x), hybrid.near_rows(w_gate), geometry.union_slices(m, n)
    bits, stats = screened.find(x, bias, quantized, activation), figures(x, w_gate)
    # the first slice is the longest; the others reuse its memory
    most = slices[0][1] if slices else 0
    words, spill = room(x, most, w_gate, compression)
    neurons, sizes = screened.empty_lists(x, m, n)

    def packed_of(first: int, last: int) -> tuple[Tensor, ...]:
        start, stop = first // geometry.TOKEN_TILE, geometry.token_tiles(last)
        # the element behind the sizes of a slice is not read
        lists = Lists(part(neurons, 0, stop - start), part(sizes, start, stop + 1))
        own = part(stats, first // geometry.STATS_ROWS, -(-last // geometry.STATS_ROWS))
        packed = part(words, 0, last - first), part(spill, 0, last - first), own
        tokens = part(bits, start, stop)
        screened.pack(part(x, first, last), laid, bias, tokens, lists, packed, compression, activation)
        return *packed[:2], *lists

    packed = PackedOperands(x, words, spill, w_up, w_down, b_up, b_down)
    y, l1, fired = by_slices(packed, slices, packed_of, lambda: results(x, n), activation)
    return y, l1, stats, fired, sizes


ffn_screened = register(
    f"ffn_screened({LAYER}, Tensor q, Tensor scale, Tensor spread, Tensor offset, int compression, {ACTIVATION}) "
    "-> (Tensor y, Tensor l1, Tensor stats, Tensor union, Tensor candidates)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
)
