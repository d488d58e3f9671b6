"""Layers of e4m3 weights with scales: checks, how operands are laid, and products of ``torch._scaled_mm``.

x is bfloat16 and quantised per token by the first kernel, or by the one scale of a static ``x_scale`` [1]; or it is
e4m3 with a scale for each token. ``twell.ops.float8`` has the formula. "dense" has the hidden state quantised per
token between its products.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twell.base.activation import RELU, Activation, threshold_pair
from twell.choose import tuning
from twell.ops import float8
from twell.ops.float8 import E4M3, Float8
from twell.ops.library import REACH, aligned, check, check_rank, has_rows, transpose
from twell.ops.operands import Layer, Scaled, run
from twell.runtime import device, geometry, specs
from twell.runtime.log import warn_once
from twell.runtime.program import Program, View

# What values of rows, and products of ``torch._scaled_mm``, are multiples of.
MULTIPLE = 16
SCALES = ("x_scale", "gate_scale", "up_scale", "down_scale")


def check_layer(layer: Layer) -> None:
    """Raise unless the operands fit each other; w_down is [N, K]."""
    if layer.gate is not None:
        raise NotImplementedError("e4m3 weights go with a gate that the layer computes, got a given one")
    for name, needed in (("x", layer.x), ("w_gate", layer.w_gate), ("gate_scale", layer.gate_scale)):
        if needed is None:
            raise ValueError(f"{name} must be given with e4m3 weights, got None")
    for name, matrix in (("x", layer.x), ("w_gate", layer.w_gate), ("w_up", layer.w_up), ("w_down", layer.w_down)):
        if matrix is not None:
            check_rank(name, matrix)
    k, n = layer.x.shape[1], layer.w_gate.shape[0]
    check_scaled(layer, "e4m3 weights", geometry.MAX_NEURONS)
    for name, bias, length in (("b_gate", layer.b_gate, n), ("b_up", layer.b_up, n), ("b_down", layer.b_down, k)):
        if bias is not None:
            check(name, bias, (length,), torch.bfloat16)


def require_no_scales(given: Any) -> None:
    """Raise ValueError if a matrix of weights without ``down_scale`` has scales."""
    for name in SCALES[:3]:
        if getattr(given, name) is not None:
            raise ValueError(f"{name} must be None without down_scale, got a tensor")


def check_scaled(layer: Any, what: str, most: int) -> None:
    """Raise unless x, weights and scales of a ``Layer`` or experts, ``what``, fit each other and the kernels."""
    (m, k), (*lead, n, _) = layer.x.shape, layer.w_gate.shape
    if k % MULTIPLE or n % 8 or not 0 < k <= specs.K_CLASSES[-1] or not 0 < n <= most:
        limits = f"K a multiple of {MULTIPLE} up to {specs.K_CLASSES[-1]}, N one of 8 up to {most}"
        raise ValueError(f"{what} must have {limits}, got K = {k}, N = {n}")
    if layer.x.dtype == E4M3:
        if layer.x_scale is None:
            raise ValueError("x_scale must be given with an e4m3 x, got None")
        check("x_scale", layer.x_scale, (m,), torch.float32)
    elif layer.x.dtype != torch.bfloat16:
        raise TypeError(f"x must be bfloat16, or e4m3 with scales, got {layer.x.dtype}")
    elif layer.x_scale is not None:
        check("x_scale", layer.x_scale, (1,), torch.float32)
    if (layer.w_up is None) != (layer.up_scale is None):
        raise ValueError("w_up and up_scale must be given together, got one of them")
    for name, weight, scale, length in (
        ("gate", layer.w_gate, layer.gate_scale, n),
        ("up", layer.w_up, layer.up_scale, n),
        ("down", layer.w_down, layer.down_scale, k),
    ):
        if weight is not None and scale is not None:
            check(f"w_{name}", weight, (*lead, n, k), E4M3)
            check(f"{name}_scale", scale, (*lead, length), torch.float32)


def tokens_of(x: Tensor, scale: Tensor | None) -> Float8:
    """x in e4m3, by PyTorch's own operators: as it is, or quantised, by a static scale if one is given."""
    return Float8(x, scale) if x.dtype == E4M3 and scale is not None else float8.quantize_tokens(x, scale)


def layer_of(
    x: Any, weights: Sequence[Any], biases: Sequence[Tensor | None], input_scale: Tensor | None = None
) -> Layer:
    """The operands of records as they are; weights: gate, or up of a layer without one, up or None, and down [K, N]."""
    gate, up, down = weights
    values, scale = x if isinstance(x, Float8) else (x, input_scale)
    of_up = (None, None) if up is None else up
    rest: Any = *biases, None, scale, gate.scale, of_up[1], down.scale
    return Layer(values, gate.values, of_up[0], down.values, *rest)


def on_cpu(layer: Layer, activation: Activation, rounded: bool) -> Tensor:
    """y of a sparse strategy; ``rounded``: whether h is."""
    up = None if layer.w_up is None else Float8(layer.w_up, layer.up_scale)
    weights = Float8(layer.w_gate, layer.gate_scale), up, Float8(layer.w_down, layer.down_scale)
    tokens = tokens_of(layer.x, layer.x_scale)
    return float8.formula(tokens, *weights, layer[4:7], activation, torch.float32, rounded).bfloat16()


def laid(layer: Layer) -> Layer:
    """The operands, w_down [K, N], as programs take them: values as bytes, with rows that kernels read in place."""
    x, w_gate, w_up, w_down, *biases = layer[:7]
    if x.dim() > 2 and not x.is_contiguous():
        x = x.reshape(-1, x.shape[-1])
    rows = _readable("x", x), _readable("w_gate", w_gate), None if w_up is None else _readable("w_up", w_up)
    scales: Any = {name: aligned(getattr(layer, name)) for name in SCALES}
    return Layer(*rows, _readable("w_down", w_down.t()).t(), *map(aligned, biases), **scales)


def _readable(name: str, matrix: Tensor) -> Tensor:
    """A matrix with aligned rows, e4m3 values as bytes; a copy of one that lies otherwise."""
    if matrix.dtype == E4M3:
        matrix = matrix.view(torch.uint8)
    flat = matrix if matrix.dim() == 2 else matrix.view(-1, matrix.shape[-1])
    # of values of two bytes as many
    near = flat.shape[0] * flat.stride(0) <= 2 * REACH
    if has_rows(flat) and flat.stride(0) * flat.itemsize % MULTIPLE == 0 and near:
        return matrix
    if name == "w_down":
        warn_once(
            "the e4m3 down weight is copied at each call: expected the transposed view of contiguous rows [N, K], as "
            "twell.nn.Float8MLP stores it"
        )
    return matrix.clone(memory_format=torch.contiguous_format)


def views(p: Program, given: Layer, fast: bool) -> Layer:
    """The layer in a program that begins with tokens in e4m3."""
    x, w_gate, w_up, w_down, *biases = given[:7]
    x = x.matrix()
    if x.dtype == torch.uint8:
        tokens = Scaled(x, given.x_scale, fast)
    else:
        tokens = Scaled(p.scratch(torch.uint8, *x.shape), p.scratch(torch.float32, x.shape[0]), fast)
        quantise(p, x, given.x_scale, tokens.values, tokens.scale)
    up = None if w_up is None else Scaled(w_up, given.up_scale)
    return Layer(tokens, Scaled(w_gate, given.gate_scale), up, Scaled(w_down, given.down_scale), *biases)


def dense(layer: Layer, activation: Activation, fast: bool) -> tuple[Tensor, Tensor | None]:
    """y as engines with dense fp8 layers compute it, and the gate before its activation; w_down is [K, N].

    The gate, the up projection and h are rounded to bfloat16, and h is quantised per token as x is.
    """
    kind = layer.x.device.type
    if not layer.x.numel():
        return layer.x.new_empty(layer.x.shape, dtype=torch.bfloat16), None
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
        return _dense(layer, activation, fast)


def _dense(layer: Layer, activation: Activation, fast: bool) -> tuple[Tensor, Tensor]:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, _ = layer.unscaled
    by_kernels = x.is_cuda and not len(w_gate) % MULTIPLE and device.capability(x.device.index) == device.SM_90
    scale = aligned(layer.x_scale)
    if not by_kernels:
        tokens: tuple[Tensor, Tensor] = tokens_of(x, scale)
    elif x.dtype == E4M3 and scale is not None:
        tokens = _readable("x", x).view(E4M3), scale
    else:
        tokens = tokens_in_float8(x, scale)
    gate = product(*tokens, w_gate, layer.gate_scale, b_gate, fast)
    up = None if w_up is None else product(*tokens, w_up, layer.up_scale, b_up, fast)
    if by_kernels:
        hidden = hidden_in_float8(gate, up, activation)
        # stored by rows of neurons, and read along neurons here
        w_down = w_down if w_down.is_contiguous() else transpose(w_down.t(), w_down.new_empty(w_down.shape))
    else:
        hidden = float8.quantize_tokens(activation.hidden(activation.after(gate), up))
    return product(*hidden, w_down, layer.down_scale, b_down, fast), gate


def product(
    x: Tensor, x_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None, fast: bool = True
) -> Tensor:
    """x @ w^T + bias in bfloat16, of e4m3 values and the scales of their rows.

    Where the GPU has ``torch._scaled_mm`` and takes the sizes, the product is rounded before the bias, as that takes
    none for some sizes; else sums are in float32.
    """
    if not x.is_cuda or x.shape[1] % MULTIPLE or len(w) % MULTIPLE or device.capability(x.device.index) < (8, 9):
        return float8.product(Float8(x, x_scale), Float8(w, scale), bias, torch.float32).bfloat16()
    matrices = x, w if w.is_contiguous() else w.contiguous()
    how: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
    made = torch._scaled_mm(matrices[0], matrices[1].t(), scale_a=x_scale[:, None], scale_b=scale[None], **how)
    return made if bias is None else made.add_(bias)


def hidden_in_float8(gate: Tensor, up: Tensor | None, activation: Activation = RELU) -> tuple[Tensor, Tensor]:
    """The hidden state of a dense layer in e4m3, and the scales of its rows, from a gate before its activation."""
    hidden, scale = gate.new_empty(gate.shape, dtype=E4M3), gate.new_empty(len(gate), dtype=torch.float32)
    run(_quantise_hidden, (gate, up, hidden.view(torch.uint8), scale), activation)
    return hidden, scale


def tokens_in_float8(x: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows of x in e4m3, and their scales; one that is ``given`` for all."""
    x = _readable("x", x)
    q, scale = x.new_empty(x.shape, dtype=E4M3), x.new_empty(len(x), dtype=torch.float32)
    run(quantise, (x, given, q.view(torch.uint8), scale))
    return q, scale


def quantise(p: Program, x: View, given: View | None, q: View, scale: View) -> None:
    given = p.scratch(torch.float32, 0) if given is None else given
    p.launch(tuning.quantize_tokens(x.dtype, "tokens"), x, given, q, scale)


def _quantise_hidden(p: Program, gate: View, up: View | None, q: View, scale: View, activation: Activation) -> None:
    spec = tuning.quantize_tokens(gate.dtype, "plain" if up is None else "gated")
    p.launch(spec, gate, up, q, scale, activation.code(), threshold_pair(activation, gate.dtype))
