"""``ffn_union``: ``gate_pack`` and ``up_down_union`` in one, on slices of the tokens.

The packed gate takes the memory of one of ``geometry.union_slices``, whatever the number of tokens. Slices are whole
tiles of 128 tokens, so every bit is the same as with the two operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell._activation import Activation, activation_of
from twell._runtime import geometry, specs
from twell.ops.gate_pack import figures, pack, room
from twell.ops.gate_pack import on_cpu as pack_on_cpu
from twell.ops.gate_pack import outputs as packed_outputs
from twell.ops.hybrid import near_rows
from twell.ops.library import (
    ACTIVATION,
    LAYER,
    bias_vector,
    check_alike,
    check_layer,
    down_rows,
    empty,
    launch,
    layer_first,
    part,
    register,
    rows,
)
from twell.ops.operands import Operands, PackedOperands
from twell.ops.up_down_union import by_slices, results, union
from twell.ops.up_down_union import on_cpu as up_down_on_cpu

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def outputs(x: Tensor, w_gate: Tensor) -> Outputs:
    """Uninitialised y, l1, stats and sizes, as in the two operators."""
    y, l1, sizes = results(x, w_gate.shape[0])
    return y, l1, figures(x, w_gate), sizes


@layer_first
def _fake(layer: Operands, compression: int, activation: str = "relu", threshold: float = 0.0) -> Outputs:
    check_layer(*layer)
    activation_of(activation, threshold, layer.w_up is not None).level(layer.x.dtype)
    y, l1, stats, sizes = outputs(layer.x, layer.w_gate)
    return y, l1, stats, union(sizes)


@layer_first
def on_cpu(layer: Operands, compression: int, activation: str = "relu", threshold: float = 0.0) -> Outputs:
    _fake(*layer, compression, activation, threshold)
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    words, spill, stats = pack_on_cpu(x, w_gate, b_gate, compression, threshold)
    y, l1, unions = up_down_on_cpu(x, words, spill, w_up, w_down, b_up, b_down, compression, activation)
    return y, l1, stats, unions


@layer_first
def _cuda(layer: Operands, compression: int, activation: str = "relu", threshold: float = 0.0) -> Outputs:
    form = activation_of(activation, threshold, layer.w_up is not None)
    y, l1, stats, sizes = on_cuda(layer, compression, form)
    return y, l1, stats, union(sizes)


def on_cuda(layer: Operands, compression: int, activation: Activation) -> Outputs:
    """The operator on the current device, with all sizes."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    check_alike(w_gate, w_up=w_up, w_down=w_down)
    n, stats, laid = w_gate.shape[0], figures(x, w_gate), rows(w_gate)
    slices = geometry.union_slices(x.shape[0], n)
    # the first slice is the longest
    words, spill = room(x, slices[0][1] if slices else 0, w_gate, compression)

    def packed_of(first: int, last: int) -> tuple[Tensor, Tensor]:
        packed = part(words, 0, last - first), part(spill, 0, last - first)
        own = part(stats, first // geometry.STATS_ROWS, -(-last // geometry.STATS_ROWS))
        pack(part(x, first, last), laid, b_gate, (*packed, own), compression, activation)
        return packed

    packed = PackedOperands(x, words, spill, w_up, w_down, b_up, b_down)
    y, l1, sizes = by_slices(packed, slices, packed_of, lambda: results(x, n), activation)
    return y, l1, stats, sizes


def by_small_tiles(
    layer: Operands, compression: int, activation: Activation, spec: specs.UpDownTileSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """y, l1 and stats of few tokens of a gated layer, by ``gate_pack`` and the kernel of ``spec``: no unions."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    check_alike(w_gate, w_up=w_up, w_down=w_down)
    words, spill, stats = packed = packed_outputs(x, w_gate, compression)
    pack(x, w_gate, b_gate, packed, compression, activation)
    n, k = w_gate.shape
    y, l1 = empty(x, x.shape), empty(x, (-(-x.shape[0] // geometry.SMALL_TILE), spec.cluster), torch.float32)
    weights = near_rows(w_up), near_rows(down_rows(w_down))  # type: ignore[arg-type]
    biases = bias_vector("b_up", b_up, n, x), bias_vector("b_down", b_down, k, x)
    form = geometry.words_per_tile(compression), activation.code()
    launch(spec, rows(x), words, spill, *weights, *biases, y, l1, *form)
    return y, l1, stats


ffn_union = register(
    f"ffn_union({LAYER}, int compression, {ACTIVATION}) -> (Tensor y, Tensor l1, Tensor stats, Tensor union)",
    fake=_fake,
    cpu=on_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
)
