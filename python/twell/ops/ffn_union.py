"""``ffn_union``: ``gate_pack`` and ``up_down_union`` in one, on slices of the tokens.

The packed gate takes the memory of one of ``geometry.union_slices``, whatever the number of tokens. Slices are whole
tiles of 128 tokens, so every bit is the same as with the two operators.

Operands, stats, y, l1 and union are those of ``gate_pack`` and ``up_down_union``. Scratch holds at most 0.5 GB of
entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from twell._activation import Activation, activation_of
from twell._runtime import geometry, specs
from twell._runtime.program import Program, View
from twell.ops.gate_pack import pack, pack_on_cpu, scratch
from twell.ops.library import (
    ACTIVATION,
    LAYER,
    Shape,
    bias_view,
    check_layer,
    down_rows,
    grouped,
    laid,
    new,
    register,
)
from twell.ops.operands import Operands, Views, run
from twell.ops.pack import stats_shape
from twell.ops.up_down_union import by_slices, union
from twell.ops.up_down_union import on_cpu as up_down_on_cpu
from twell.ops.up_down_union import shapes as shapes_behind

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def shapes(x: Tensor | View, w_gate: Tensor | View) -> tuple[Shape, Shape, Shape, Shape]:
    """Of y, l1, stats and sizes, as in the two operators."""
    y, l1, sizes = shapes_behind(x, w_gate.shape[0])
    return y, l1, stats_shape(x.shape[0], w_gate.shape[0]), sizes


@grouped(Operands)
def outputs(layer: Operands, compression: int, activation: str = "relu", threshold: float = 0.0) -> Outputs:
    """The same uninitialised; raises unless the operands fit each other."""
    check_layer(*layer)
    activation_of(activation, threshold, layer.w_up is not None, top_k=True).level(layer.x.dtype)
    geometry.words_per_tile(compression)
    y, l1, stats, sizes = new(layer.x, shapes(layer.x, layer.w_gate))
    return y, l1, stats, sizes


def _fake(*arguments: Any) -> Outputs:
    *found, sizes = outputs(*arguments)
    return *found, union(sizes)


@grouped(Operands)
def on_cpu(layer: Operands, compression: int, activation: str = "relu", threshold: float = 0.0) -> Outputs:
    _fake(*layer, compression, activation, threshold)
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    form = activation_of(activation, threshold, w_up is not None, top_k=True)
    words, spill, stats = pack_on_cpu(x, w_gate, b_gate, compression, form)
    y, l1, unions = up_down_on_cpu(x, words, spill, w_up, w_down, b_up, b_down, compression, form.packed().name)
    return y, l1, stats, unions


@grouped(Operands)
def _cuda(layer: Operands, compression: int, activation: str = "relu", threshold: float = 0.0) -> Outputs:
    *found, sizes = outputs(*layer, compression, activation, threshold)
    if len(layer.x):
        given = *laid(layer._replace(w_down=layer.w_down.t())), *found, sizes
        run(_build, given, compression, activation_of(activation, threshold, layer.w_up is not None, top_k=True))
    return *found, union(sizes)


def _build(p: Program, *given: Any) -> None:
    launches(p, Views(*given[:7]), given[7:11], *given[11:])


def launches(p: Program, layer: Views, results: Sequence[View], compression: int, activation: Activation) -> None:
    """Launch the layer on slices of its tokens."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    y, l1, stats, sizes = results
    (_, longest), *_ = geometry.union_slices(x.shape[0], w_gate.shape[0])
    words, spill = scratch(p, x, longest, w_gate, compression)

    def packed_of(first: int, last: int) -> tuple[View, View]:
        packed = words.part(0, last - first), spill.part(0, last - first)
        own = stats.part(first // geometry.STATS_ROWS, -(-last // geometry.STATS_ROWS))
        pack(p, x.part(first, last), w_gate, b_gate, *packed, own, compression, activation)
        return packed

    by_slices(p, (x, w_up, w_down, b_up, b_down), packed_of, (y, l1, sizes), activation)


def by_small_tiles(
    p: Program, layer: Views, results: Sequence[View], compression: int, activation: Activation, spec: specs.Spec
) -> None:
    """Launch a gated layer on few tokens, by ``gate_pack`` and the kernel of ``spec``, into y, l1 and stats."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    y, l1, stats = results
    words, spill = scratch(p, x, x.shape[0], w_gate, compression)
    pack(p, x, w_gate, b_gate, words, spill, stats, compression, activation)
    small_tiles(p, x, words, spill, w_up, w_down, b_up, b_down, y, l1, compression, activation, spec)


def small_tiles(
    p: Program,
    x: View,
    words: View,
    spill: View,
    w_up: View,
    w_down: View,
    b_up: View | None,
    b_down: View | None,
    y: View,
    l1: View,
    compression: int,
    activation: Activation,
    spec: specs.Spec,
) -> None:
    """Launch what is behind the packed gate of few tokens."""
    biases = bias_view(p, b_up, x.dtype), bias_view(p, b_down, x.dtype)
    form = geometry.words_per_tile(compression), activation.code()
    p.launch(spec, x, words, spill, w_up, down_rows(p, w_down), *biases, y, l1, *form)


ffn_union = register(
    f"ffn_union({LAYER}, int compression, {ACTIVATION}) -> (Tensor y, Tensor l1, Tensor stats, Tensor union)",
    fake=_fake,
    cpu=on_cpu,
    cuda=_cuda,
)
