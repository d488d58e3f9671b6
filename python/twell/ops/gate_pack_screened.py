"""``gate_pack_screened``: ``gate_pack`` of up to eight tokens that reads only some rows of w_gate.

``q``, ``scale``, ``spread`` and ``offset`` are those of ``quantize_gate`` for w_gate, and are read in its place. x is
quantised at each call. Neurons that any of the tokens may fire are candidates: their gates are computed exactly, with
the bits of ``gate_pack``. All others are 0, except with a probability of at most 2^-80 per gate. With ``nearest``, as q
must have been made, no gate is missed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twell import tuning
from twell._activation import Activation, activation_of, threshold_pair
from twell._runtime import geometry, specs
from twell.ops import screened
from twell.ops.gate_pack import Packed, fill_on_cpu, gate_on_cpu, outputs
from twell.ops.gate_screen import constants
from twell.ops.library import bias_vector, check_layer, empty, launch, register, rows
from twell.ops.quantize_gate import Quantized, require, require_pitch
from twell.ops.quantize_gate import on_cuda as quantize_on_cuda

_Layer = tuple[Tensor, Tensor, Tensor | None]


def _split(arguments: tuple[Any, ...]) -> tuple[_Layer, Quantized, int, float, bool]:
    """x, w_gate and b_gate, the int8 gate weight, compression, threshold and ``nearest``, of the schema's arguments."""
    layer, quantized, compression = arguments[:3], arguments[3:7], arguments[7]
    return layer, quantized, compression, (*arguments[8:9], 0.0)[0], any(arguments[9:])


def _check(layer: _Layer, quantized: Quantized) -> None:
    screened.check_quantized(layer[1], quantized)
    most = specs.GatePackScreenedSpec.tokens
    if layer[0].shape[0] > most:
        raise ValueError(f"x must have at most {most} rows, got {list(layer[0].shape)}")


def _fake(*arguments: Any) -> Packed:
    (x, w_gate, b_gate), quantized, compression, threshold, _ = _split(arguments)
    check_layer(x, w_gate, b_gate=b_gate)
    _check((x, w_gate, b_gate), quantized)
    activation_of("fatrelu", threshold).level(x.dtype)
    return outputs(x, w_gate, compression)


def _cpu(*arguments: Any) -> Packed:
    packed = _fake(*arguments)
    (x, w_gate, b_gate), quantized, compression, threshold, nearest = _split(arguments)
    listed = screened.candidates_on_cpu(x, w_gate, b_gate, quantized, nearest)
    gate = screened.masked(gate_on_cpu(x, w_gate, b_gate, threshold), listed)
    return fill_on_cpu(packed, gate, compression)


def _cuda(*arguments: Any) -> Packed:
    layer, quantized, compression, threshold, nearest = _split(arguments)
    require(layer[0], "gate_pack_screened")
    _check(layer, quantized)
    require_pitch("q", quantized[0])
    packed = outputs(*layer[:2], compression)
    pack(*layer, quantized, nearest, packed, compression, activation_of("fatrelu", threshold))
    return packed


def pack(
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor | None,
    quantized: Quantized,
    nearest: bool,
    packed: Packed,
    compression: int,
    activation: Activation,
    arrivals: Tensor | None = None,
) -> None:
    """``gate_pack.pack`` of up to eight tokens with ``quantized`` of w_gate, which is rounded to ``nearest`` or not."""
    if not x.shape[0]:
        return
    # the kernel reads `quantized` while the one before it runs: never what writes it, and that one has waited for it
    of_x = quantize_on_cuda(x, False, nearest)
    launch(
        tuning.gate_pack_screened(x.dtype),
        *(rows(x), rows(w_gate), bias_vector("b_gate", b_gate, w_gate.shape[0], x), *of_x, *quantized, *packed),
        empty(x, 0, torch.int32) if arrivals is None else arrivals,
        *(geometry.words_per_tile(compression), threshold_pair(activation, x.dtype), *constants(x.shape[1], nearest)),
    )


gate_pack_screened = register(
    "gate_pack_screened(Tensor x, Tensor w_gate, Tensor? b_gate, Tensor q, Tensor scale, Tensor spread, Tensor offset, "
    "int compression, float threshold=0.0, bool nearest=False) -> (Tensor words, Tensor spill, Tensor stats)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
)
