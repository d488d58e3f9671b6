"""Weights in e4m3 of vLLM's layers, as ``torch.ops.twell.ffn`` and ``experts`` read them.

vLLM's quant methods make the parameters, load and shard them: ``weight`` e4m3 [R, C], ``weight_scale`` float32, one for
each projection in the layer or for each row ([R] or [R, 1]), and ``input_scale``, one for each projection, if static.
Then they turn weights to what their kernels take, and quantise gate and up again, to the larger scale of both. Here
values stay those of the checkpoint, and each row has the scale of its projection. Experts have the same in a dimension
more, and one static scale each, of which all take the largest, as in vLLM.
"""

from typing import Any

import torch
from torch import nn

from twell.choose import tuning
from twell.ops.float8 import E4M3
from twell.runtime import specs

# vLLM's classes for checkpoints whose weights and inputs are both in e4m3.
_STORED = ("Fp8LinearMethod", "CompressedTensorsW8A8Fp8", "ModelOptLinearMethod")
_EXPERTS = ("Fp8MoEMethod", "CompressedTensorsW8A8Fp8MoEMethod", "ModelOptFp8MoEMethod")
# what vLLM's scales are before they are loaded
_MISSING = torch.finfo(torch.float32).min


def why_not(first: Any, down: Any, on: torch.device) -> str:
    """Why an FFN of these linear layers, one of them quantised at least, runs as without twell; "" if it need not."""
    for layer in (first, down):
        method = layer.quant_method
        # another one turns what goes in and comes out
        if type(method).__name__ == "CompressedTensorsLinearMethod":
            method = layer.scheme
        if reason := _other_format(layer, "", method, _STORED):
            return reason
    if first.params_dtype != torch.bfloat16:
        return f"the model must be in bfloat16 with weights in e4m3, got {first.params_dtype}"
    return _no_kernels(on)


def why_not_experts(layer: Any, dtype: torch.dtype, gated: bool, invariant: bool, on: torch.device) -> str:
    """Why quantised experts run as without twell, whose inputs are of this dtype; "" if they need not."""
    for name in ("w13_", "w2_"):
        if reason := _other_format(layer, name, layer.quant_method, _EXPERTS):
            return reason
    if dtype != torch.bfloat16:
        return f"the model must be in bfloat16 with weights in e4m3, got {dtype}"
    if gated:
        return "experts with weights in e4m3 must have no gate"
    if invariant:
        return "experts with weights in e4m3 have no invariant form"
    return _no_kernels(on)


def _other_format(layer: Any, prefix: str, method: Any, stored: tuple[str, ...]) -> str:
    """Why a weight, before it is loaded, is not in e4m3, or has other scales; "" if neither."""
    weight, scale = (getattr(layer, f"{prefix}{name}", None) for name in ("weight", "weight_scale"))
    name = type(method).__name__
    if weight is None or name not in stored or weight.dtype != E4M3:
        return f"all weights must be in 16 bits, or with their inputs in e4m3, got {name}"
    *experts, rows, _ = weight.shape
    shapes = experts, [*experts, len(getattr(layer, "logical_widths", (1,)))], [*experts, rows], [*experts, rows, 1]
    if scale is None or scale.dtype != torch.float32 or list(scale.shape) not in shapes:
        return f"weights in e4m3 must have a scale for each row, or one in all, got {name} with scales of blocks"
    return ""


def _no_kernels(on: torch.device) -> str:
    if on.type == "cuda" and tuning.family(on.index or 0) != specs.SM90:
        return "kernels for weights in e4m3 need compute capability 9.0"
    return ""


def load(layer: Any) -> None:
    """Turn what vLLM loaded: weight e4m3 [R, C], weight_scale float32 [R], input_scale float32 [1] or None.

    Again without effect. Raises ValueError where the checkpoint lacks a scale.
    """
    weight, given = layer.weight.data, getattr(layer, "input_scale", None)
    scale = layer.weight_scale.data.flatten()
    for name, of in (("weight_scale", scale), ("input_scale", given)):
        if of is not None and bool((of == _MISSING).any()):
            raise ValueError(f"{layer.prefix}.{name} must be in the checkpoint, got none for a projection")
    if len(scale) != len(weight):
        scale = torch.cat([of.expand(width) for of, width in zip(scale, layer.logical_widths, strict=True)])
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    layer.input_scale = _largest(given)
    _refuse_others(layer)


def load_experts(layer: Any) -> None:
    """As ``load``, of experts without a gate: w13_weight [E, N, K] and w2_weight [E, K, N], with scales of rows."""
    for name in ("w13", "w2"):
        weight, stored = (getattr(layer, f"{name}_{of}").data for of in ("weight", "weight_scale"))
        scale = stored.reshape(len(weight), -1).expand(weight.shape[:2]).contiguous()
        setattr(layer, f"{name}_weight_scale", nn.Parameter(scale, requires_grad=False))
    layer.w13_input_scale = _largest(getattr(layer, "w13_input_scale", None))
    _refuse_others(layer)


def _refuse_others(layer: Any) -> None:
    """Refuse tensors that are loaded into what ``load`` made, whose scales are others than a checkpoint's."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "weights in e4m3 must be loaded again by vLLM's reload_weights, as in "
            'llm.collective_rpc("reload_weights", kwargs={"weights_path": FOLDER}), got load_weights alone'
        )

    for name, parameter in layer.named_parameters(recurse=False):
        if name.endswith(("weight", "scale")):
            parameter.weight_loader = refuse


def _largest(given: Any) -> nn.Parameter | None:
    """One static scale of those of several inputs, float32 [1]."""
    return None if given is None else nn.Parameter(given.data.max().view(1), requires_grad=False)
