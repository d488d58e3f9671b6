"""Weights in e4m3 of vLLM's linear layers, as ``torch.ops.twell.ffn_float8`` reads them.

vLLM's quant methods make the parameters, load and shard them: ``weight`` e4m3 [R, C], ``weight_scale`` float32, one for
each projection in the layer or for each row ([R] or [R, 1]), and ``input_scale``, one for each projection, if static.
Then they turn weights to what their kernels take, and quantise gate and up again, to the larger scale of both. Here
values stay those of the checkpoint, and each row has the scale of its projection.

Weights that vLLM is asked to quantise as it loads them are quantised here, by rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from twell import tuning
from twell._runtime import specs
from twell.float8 import E4M3, quantize

# vLLM's classes for checkpoints whose weights and inputs are both in e4m3, and for those that it quantises so; before
# 0.32 ModelOpt's had two.
_STORED = (
    *("Fp8LinearMethod", "CompressedTensorsW8A8Fp8"),
    *("ModelOptLinearMethod", "ModelOptFp8LinearMethod", "ModelOptFp8PcPtLinearMethod"),
)
_ONLINE = ("Fp8PerTensorOnlineLinearMethod", "Fp8PtpcOnlineLinearMethod")
# what vLLM's scales are before they are loaded
_MISSING = torch.finfo(torch.float32).min


def why_not(first: Any, down: Any, on: torch.device) -> str:
    """Why an FFN of these linear layers, one of them quantised at least, runs as without twell; "" if it need not."""
    for layer in (first, down):
        method = layer.scheme if hasattr(layer, "scheme") else layer.quant_method
        name, weight, scale = type(method).__name__, layer.weight, getattr(layer, "weight_scale", None)
        if name in _ONLINE and weight.dtype.itemsize > 1:
            continue
        if name not in _STORED or weight.dtype != E4M3:
            return f"all weights must be in 16 bits, or with their inputs in e4m3, got {name}"
        shapes = [len(layer.logical_widths)], [len(weight)], [len(weight), 1]
        if scale is None or scale.dtype != torch.float32 or list(scale.shape) not in shapes:
            return f"weights in e4m3 must have a scale for each row, or one in all, got {name} with scales of blocks"
    if first.params_dtype != torch.bfloat16:
        return f"the model must be in bfloat16 with weights in e4m3, got {first.params_dtype}"
    if on.type == "cuda" and tuning.family(on.index or 0) != specs.SM90:
        return "kernels for weights in e4m3 need compute capability 9.0"
    return ""


def load(layer: Any) -> None:
    """Turn what vLLM loaded: weight e4m3 [R, C], weight_scale float32 [R], input_scale float32 [1] or None.

    Again without effect. Raises ValueError where the checkpoint lacks a scale.
    """
    weight, given = layer.weight.data, getattr(layer, "input_scale", None)
    if weight.dtype == E4M3:
        scale = layer.weight_scale.data.flatten()
        for name, of in (("weight_scale", scale), ("input_scale", given)):
            if of is not None and bool((of == _MISSING).any()):
                raise ValueError(f"{layer.prefix}.{name} must be in the checkpoint, got none for a projection")
        if len(scale) != len(weight):
            scale = torch.cat([of.expand(width) for of, width in zip(scale, layer.logical_widths, strict=True)])
    else:
        layer.weight.data, scale = quantize(weight)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    layer.input_scale = None if given is None else nn.Parameter(given.data.max().view(1), requires_grad=False)
