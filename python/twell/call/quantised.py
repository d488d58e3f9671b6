"""Calls of the functions on e4m3 weights: checks of operands."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twell.base.arguments import require_flag
from twell.call.plain import behaves
from twell.ops.calls import How
from twell.ops.e4m3 import check_layer, layer_of
from twell.ops.float8 import NO_BIASES, Float8, checked
from twell.ops.operands import Layer
from twell.runtime import modes

_WHAT = "e4m3 weights are for inference alone"


def is_quantised(x: Any, weights: Sequence[Any]) -> bool:
    return isinstance(x, Float8) or any(isinstance(weight, Float8) for weight in weights)


def records(name: str, weights: Sequence[Any]) -> tuple[Any, ...]:
    """The weights of ``run``, with their records checked; NotImplementedError for scales of blocks."""
    found = []
    for argument, weight in _named(weights):
        if isinstance(weight, Float8):
            weight = checked(f"{name}: {argument}", weight)
            if weight.granularity == "block":
                expected = f"{argument} must have scales by row or tensor"
                raise NotImplementedError(f"{name}: {expected}, got blocks: give it dequantize(torch.bfloat16)")
        found.append(weight)
    return tuple(found)


def _tokens(name: str, x: Float8) -> Float8:
    """x [..., K] with a scale for each token, [...]."""
    values, scale = x
    tokens = values.shape[:-1]
    if scale.shape == (*tokens, 1):
        scale = scale.squeeze(-1)
    elif scale.shape == tokens[:-1]:
        scale = scale[..., None].expand(tokens)
    elif scale.shape != tokens:
        raise ValueError(f"{name}: scale of x must be {list(tokens)}, one for each token, got {list(x.scale.shape)}")
    return Float8(values, scale.float())


def admitted(
    name: str, x: Any, weights: Sequence[Any], biases: Sequence[Tensor | None], how: How, input_scale: Tensor | None
) -> Layer:
    """``scaled`` of a layer, whose operands fit each other."""
    if how.activation.moves:
        raise NotImplementedError(f"{name}: {_WHAT}: threshold must be a number, got a tensor")
    require_flag("fast_accum", how.fast)
    layer = scaled(name, x, weights, name != "sparse_ffn", biases, input_scale)
    check_layer(layer._replace(x=layer.x.reshape(-1, layer.x.shape[-1]), w_down=layer.w_down.t()))
    return layer


def scaled(
    name: str,
    x: Any,
    weights: Sequence[Any],
    gated: bool,
    biases: Sequence[Tensor | None] = NO_BIASES,
    input_scale: Tensor | None = None,
    routes: Sequence[Tensor] = (),
) -> Layer:
    """``layer_of`` with scales by rows, of experts with ``routes``; or TypeError, ValueError or NotImplementedError."""
    gate, up, down = (_record(name, argument, weight, 3 if routes else 2) for argument, weight in _named(weights))
    if gate is None or down is None or (up is None and gated):
        raise TypeError(f"{name}: weights must be given, got None")
    x = Float8(x.values, _tokens(name, x).scale.reshape(-1)) if isinstance(x, Float8) else _cast(name, x)
    layer = layer_of(x, (gate, up, down), biases, input_scale)
    _require_plain(name, layer.x, [*layer, *routes])
    of_up = None if up is None else up.by_rows()
    return layer._replace(gate_scale=gate.by_rows(), up_scale=of_up, down_scale=down.by_rows())


def _named(weights: Sequence[Any]) -> list[tuple[str, Any]]:
    names = ("w_gate", "w_up", "w_down") if weights[1] is not None else ("w_up", "", "w_down")
    return list(zip(names, weights))


def _record(name: str, argument: str, weight: Any, dimensions: int) -> Float8 | None:
    """A weight's record with scales by rows."""
    if weight is None:
        return None
    if not isinstance(weight, Float8):
        got = f"{type(weight).__name__}; twell.quantize makes it so"
        raise TypeError(f"{name}: {argument} must be a Float8 as other operands are, got {got}")
    if weight.values.dim() != dimensions:
        raise ValueError(f"{name}: {argument} must have {dimensions} dimensions, got {list(weight.shape)}")
    return weight


def _cast(name: str, x: object) -> Tensor:
    """x as the kernels take it, bfloat16."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: x must be a tensor or a Float8, got {type(x).__name__}")
    kind = x.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) and x.is_floating_point():
        x = x.to(torch.get_autocast_dtype(kind))
    if x.dtype != torch.bfloat16:
        raise TypeError(f"{name}: x must be bfloat16 with e4m3 weights, got {x.dtype}: run the model in bfloat16")
    return x


def _require_plain(name: str, x: Tensor, operands: Sequence[Tensor | None]) -> None:
    """Raise unless kernels may read the operands as they are."""
    if not x.dim():
        raise ValueError(f"{name}: x must have a dimension at least, got a number")
    present = {str(i): operand for i, operand in enumerate(operands) if operand is not None}
    for operand in present.values():
        if not behaves(operand):
            raise NotImplementedError(f"{name}: {_WHAT} and plain tensors, got a {type(operand).__name__}")
        if operand.device != x.device:
            raise ValueError(f"{name}: operands must be on {x.device} as x is, got one on {operand.device}")
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in present.values()):
        raise NotImplementedError(f"{name}: {_WHAT}, got an operand that requires grad: call it under torch.no_grad()")
    if got := modes.transform_of(present, False):
        raise NotImplementedError(f"{name}: {_WHAT}, without transforms, got {got}")
