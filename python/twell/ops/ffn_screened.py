"""``ffn_screened``: ``ffn_union`` that computes the gate only where an int8 product says that it may fire.

``q``, ``scale``, ``spread`` and ``offset`` are those of ``quantize_gate`` for w_gate. x is quantised at each call.
Neurons that any of 128 tokens may fire are candidates of these tokens. Their gates are computed exactly, all others are
0, except with a probability of at most 2^-80 per gate: so y has the bits of ``ffn_union`` above 64 tokens. ``stats``
are by 256 candidates where those of ``ffn_union`` are by 256 neurons. ``candidates`` and ``union`` count the candidates
of each tile of 128 tokens, and those that fire.

All other operands are those of ``ffn_union``, and y, l1, stats and union have the shapes that they have there;
candidates is int32 [ceil(M / 128)]. ``ffn`` with ``screen`` quantises w_gate at each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from twell._activation import Activation, activation_of
from twell._runtime import geometry
from twell._runtime.program import Program, View
from twell.ops import hybrid, screened
from twell.ops.ffn_union import shapes as shapes_of_union
from twell.ops.gate_pack import scratch
from twell.ops.library import ACTIVATION, LAYER, Shape, check_layer, laid, new, register
from twell.ops.operands import Operands, Views, opened, run
from twell.ops.quantize_gate import Quantized, QuantizedViews, require, require_pitch
from twell.ops.up_down_union import by_slices, figures_on_cpu, union

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _split(arguments: tuple[Any, ...]) -> tuple[Operands, Quantized, int, Activation]:
    """The layer, its int8 gate weight, compression and activation, of the arguments of the schema."""
    layer, quantized, (compression, name, threshold) = Operands(*arguments[:7]), arguments[7:11], arguments[11:]
    return layer, quantized, compression, activation_of(name, threshold, layer.w_up is not None)


def shapes(x: Tensor | View, w_gate: Tensor | View) -> tuple[Shape, ...]:
    """Of y, l1, stats, and the sizes of the lists of neurons that fire and of candidates."""
    found = shapes_of_union(x, w_gate)
    return *found, found[-1]


def outputs(layer: Operands, quantized: Quantized, compression: int, activation: Activation) -> Outputs:
    """The same uninitialised; raises unless the operands fit each other."""
    check_layer(*layer)
    screened.check_quantized(layer.w_gate, quantized)
    activation.level(layer.x.dtype)
    geometry.words_per_tile(compression)
    y, l1, stats, sizes, candidates = new(layer.x, shapes(layer.x, layer.w_gate))
    return y, l1, stats, sizes, candidates


def _fake(*arguments: Any) -> Outputs:
    y, l1, stats, sizes, candidates = outputs(*_split(arguments))
    return y, l1, stats, union(sizes), union(candidates)


def _cpu(*arguments: Any) -> Outputs:
    return on_cpu(*_split(arguments))


def on_cpu(layer: Operands, quantized: Quantized, compression: int, activation: Activation) -> Outputs:
    """The operator on the CPU."""
    y, l1, stats, fired, candidates = _fake(*layer, *quantized, compression, *activation)
    layer, activation = opened(layer, activation)
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    listed = screened.candidates_on_cpu(x, w_gate, b_gate, quantized, activation)
    gate = activation.after(hybrid.project(x, w_gate, b_gate).to(x.dtype), inplace=True)
    screened.masked(gate, listed)
    up = None if w_up is None else hybrid.project(x, w_up, b_up)
    hidden = activation.hidden(gate.float(), up).masked_fill(gate == 0, 0)
    y.copy_(hybrid.project(hidden.to(x.dtype), w_down.t(), b_down))
    candidates.copy_(listed.sum(1))
    figures_on_cpu(gate, hidden, l1, fired)
    screened.stats_on_cpu(gate, listed, stats, compression)
    return y, l1, stats, fired, candidates


def _cuda(*arguments: Any) -> Outputs:
    layer, quantized, compression, activation = _split(arguments)
    require(layer.x.device, "ffn_screened")
    y, l1, stats, sizes, candidates = found = outputs(layer, quantized, compression, activation)
    require_pitch("q", quantized[0])
    if len(layer.x):
        firing = screened.firing_bias(layer.w_gate, layer.b_gate, activation)
        given = *laid(layer._replace(w_down=layer.w_down.t())), firing, *quantized, *found
        run(_build, given, compression, activation)
    return y, l1, stats, union(sizes), union(candidates)


def _build(p: Program, *given: Any) -> None:
    launches(p, Views(*given[:7]), given[7], given[8:12], given[12:17], *given[17:])


def launches(
    p: Program,
    layer: Views,
    firing: View | None,
    quantized: QuantizedViews,
    results: Sequence[View],
    compression: int,
    activation: Activation,
) -> None:
    """Launch the layer on slices of its tokens. ``firing`` is the bias of ``ops.screened.firing_bias``."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    y, l1, stats, sizes, candidates = results
    (m, _), n = x.shape, w_gate.shape[0]
    (_, longest), *_ = geometry.union_slices(m, n)
    bits = screened.find(p, x, firing, quantized)
    words, spill = scratch(p, x, longest, w_gate, compression)
    neurons = screened.lists(p, m, n).neurons

    def packed_of(first: int, last: int) -> tuple[View, ...]:
        start, stop = first // geometry.TOKEN_TILE, geometry.token_tiles(last)
        # the element behind the sizes of a slice is not read
        listed = screened.Lists(neurons.part(0, stop - start), candidates.part(start, stop + 1))
        own = stats.part(first // geometry.STATS_ROWS, -(-last // geometry.STATS_ROWS))
        packed = words.part(0, last - first), spill.part(0, last - first), own
        tokens, tile_bits = x.part(first, last), bits.part(start, stop)
        screened.pack(p, tokens, w_gate, b_gate, tile_bits, listed, packed, compression, activation)
        return *packed[:2], *listed

    by_slices(p, (x, w_up, w_down, b_up, b_down), packed_of, (y, l1, sizes), activation)


ffn_screened = register(
    f"ffn_screened({LAYER}, Tensor q, Tensor scale, Tensor spread, Tensor offset, int compression, {ACTIVATION}) "
    "-> (Tensor y, Tensor l1, Tensor stats, Tensor union, Tensor candidates)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
)
