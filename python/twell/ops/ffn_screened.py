"""``ffn_screened``: ``ffn_union`` of a gated layer that computes the gate only where an int8 product says it may fire.

``q``, ``scale`` and ``spread`` are those of ``quantize_gate`` for w_gate. x is quantised at each call. Neurons that any
of 128 tokens may fire are candidates of these tokens. Their gates and up projections are computed exactly, all others
are 0, except with a probability of at most 2^-80 per gate: so y has the bits of ``ffn_union`` above 64 tokens.
``candidates`` and ``union`` count the candidates of each tile of 128 tokens, and those that fire.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twell import tuning
from twell._activation import RELU, Activation, threshold_pair
from twell._runtime import device, geometry
from twell.ops import hybrid
from twell.ops.gate_screen import gate_screen
from twell.ops.gate_screen import on_cuda as screen_on_cuda
from twell.ops.library import (
    ACTIVATION,
    LAYER,
    bias_vector,
    blocks,
    check,
    check_alike,
    check_layer,
    down_rows,
    empty,
    last_activation,
    launch,
    part,
    register,
    rows,
)
from twell.ops.operands import Operands
from twell.ops.quantize_gate import Quantized, quantize_gate
from twell.ops.quantize_gate import on_cuda as quantize_on_cuda

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def outputs(x: Tensor, n: int) -> Outputs:
    """Uninitialised y [M, K], l1 float32 [B, max(ceil(N/128), 128)], union, candidates int32 [B + 1]; B = ceil(M/128).

    The operator returns all sizes but the last, which the kernels use.
    """
    tiles = blocks(x.shape[0], geometry.TOKEN_TILE)
    l1 = empty(x, (tiles, geometry.listed_sums(n)), torch.float32)
    return empty(x, x.shape), l1, empty(x, (tiles + 1,), torch.int32), empty(x, (tiles + 1,), torch.int32)


def _but_last(found: Outputs) -> Outputs:
    y, l1, union, candidates = found
    return y, l1, union.narrow(0, 0, union.shape[0] - 1), candidates.narrow(0, 0, candidates.shape[0] - 1)


def _split(arguments: tuple[Any, ...]) -> tuple[Operands, Quantized, Activation]:
    """The layer, its int8 gate weight and its activation, of the arguments of the schema."""
    layer, quantized = Operands(*arguments[:7]), arguments[7:10]
    if layer.w_up is None:
        raise TypeError("w_up must be a tensor, got None")
    return layer, quantized, last_activation(arguments[10:], gated=True)


def _check_quantized(w_gate: Tensor, quantized: Quantized) -> None:
    """Raise unless ``quantized`` has the shapes and dtypes of ``quantize_gate`` for ``w_gate``."""
    q, scale, spread = quantized
    check("q", q, w_gate.shape, torch.int8)
    check("scale", scale, w_gate.shape[:1], torch.float32)
    check("spread", spread, w_gate.shape[:1], torch.float32)


def _fake(*arguments: Any) -> Outputs:
    layer, quantized, activation = _split(arguments)
    check_layer(*layer)
    _check_quantized(layer.w_gate, quantized)
    activation.level(layer.x.dtype)
    return _but_last(outputs(layer.x, layer.w_gate.shape[0]))


def _cpu(*arguments: Any) -> Outputs:
    y, l1, union, candidates = _fake(*arguments)
    layer, quantized, activation = _split(arguments)
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    bits = gate_screen(*quantize_gate(x, False), *quantized, bias_vector("b_gate", b_gate, len(w_gate), x))
    listed = (bits[:, :, None] >> torch.arange(32, device="cpu", dtype=torch.int32) & 1).bool().flatten(1)
    listed = listed[:, : len(w_gate)]
    gate = activation.after(hybrid.project(x, w_gate, b_gate).to(x.dtype), inplace=True)
    gate.masked_fill_(~listed.repeat_interleave(geometry.TOKEN_TILE, 0)[: len(x)], 0)
    hidden = activation.hidden(gate.float(), hybrid.project(x, w_up, b_up)).masked_fill(gate == 0, 0)  # type: ignore[arg-type]
    y.copy_(hybrid.project(hidden.to(x.dtype), w_down.t(), b_down))
    candidates.copy_(listed.sum(1))
    l1.zero_()
    for tile in range(len(union)):
        tokens = slice(tile * geometry.TOKEN_TILE, (tile + 1) * geometry.TOKEN_TILE)
        l1[tile, 0] = hidden[tokens].abs().sum()
        union[tile] = (gate[tokens] != 0).any(0).sum()
    return y, l1, union, candidates


def _cuda(*arguments: Any) -> Outputs:
    return _but_last(on_cuda(*_split(arguments)))


def on_cuda(layer: Operands, quantized: Quantized, activation: Activation) -> Outputs:
    """The operator on the current device, with all sizes."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    check_alike(w_gate, w_up=w_up, w_down=w_down)
    _check_quantized(w_gate, quantized)
    (m, k), n, dtype = x.shape, w_gate.shape[0], x.dtype
    slices, multiprocessors = geometry.union_slices(m, n), device.sm_count(x.device.index)
    b_gate, b_up, b_down = (
        bias_vector(name, bias, length, x)
        for name, bias, length in (("b_gate", b_gate, n), ("b_up", b_up, n), ("b_down", b_down, k))
    )
    bits = screen_on_cuda(quantize_on_cuda(x, False), quantized, b_gate)
    y, l1, union, candidates = found = outputs(x, n)
    x, w_gate, w_up, w_down = rows(x), rows(w_gate), rows(w_up), hybrid.near_rows(down_rows(w_down))  # type: ignore[arg-type]
    # the first slice is the longest; the others reuse its memory
    most, columns = slices[0][1] if slices else 0, geometry.chunks(n)
    tiles, places = geometry.token_tiles(most), geometry.CHUNK * columns
    listed, counts, neurons = (empty(x, (tiles, places), torch.int16) for _ in range(3))
    staged = empty(x, tiles * places * geometry.TOKEN_TILE, torch.int32)
    entries, chunks = empty(x, most * n, torch.int32), empty(x, (tiles, columns + 1), torch.int32)
    aside = hybrid.room_aside(x, n, multiprocessors)
    form = (activation.code(), threshold_pair(activation, dtype))
    for first, last in slices:
        start, stop = first // geometry.TOKEN_TILE, geometry.token_tiles(last)
        # the element behind the sizes of a slice is zero until the next slice writes its first size there
        sizes, listed_sizes = part(union, start, stop + 1), part(candidates, start, stop + 1)
        own, sums = part(x, first, last), part(l1, start, stop)
        here = [part(t, 0, stop - start) for t in (listed, counts, neurons, chunks)]
        launch(tuning.list_candidates(), part(bits, start, stop), here[0], listed_sizes, sums)
        weights = (w_gate, w_up, b_gate, b_up)
        found_here = (here[0], listed_sizes, here[1], staged)
        launch(tuning.sampled_gate(dtype), own, *weights, *found_here, sums, *form, multiprocessors)
        pattern = (entries, here[2], here[3], sizes)
        launch(tuning.collect(), *found_here, *pattern, n)
        # h is in the entries
        out = (part(y, first, last), aside, RELU.code(), geometry.MOST, multiprocessors)
        launch(tuning.gathered(dtype, 0), None, w_down, None, None, b_down, *pattern, *out)
    return found


ffn_screened = register(
    f"ffn_screened({LAYER}, Tensor q, Tensor scale, Tensor spread, {ACTIVATION}) "
    "-> (Tensor y, Tensor l1, Tensor union, Tensor candidates)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
)
