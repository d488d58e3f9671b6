"""Projections that stay the modules that they are: with adapters of peft, or quantised by others than e4m3."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from twell.nn import projections as _projections


def kept(where: str, projections: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """The dtypes of the products of those projections that a layer keeps as they are, by name.

    Those are wrappers of peft, whatever they do, around a plain ``nn.Linear`` or a weight that can be dequantised, and
    such a weight itself. Raises TypeError for a quantised one that no layer could read.
    """
    found = {name: _kept(f"{where}: {name}", projection) for name, projection in projections.items()}
    return {name: dtype for name, dtype in found.items() if dtype is not None}


def _kept(where: str, projection: Any) -> torch.dtype | None:
    linear = projection
    while type(linear).__module__.startswith("peft."):
        inner = linear._modules.get("base_layer") or linear._modules.get("original_module")
        if inner is None:
            return None
        linear = inner
    quantised = type(linear).__module__.startswith("bitsandbytes.") or (
        type(linear) is nn.Linear and type(linear.weight).__module__.startswith("torchao.")
    )
    if not quantised:
        plain = type(linear) is nn.Linear and type(linear.weight) is nn.Parameter
        return linear.weight.dtype if plain and linear is not projection else None
    reading = _projections.read(linear)
    if isinstance(reading, str):
        raise TypeError(
            f"{where} must have a weight that each call can dequantise, in 4 bits of bitsandbytes or weight-only of "
            f"torchao, got one that {reading}; to leave it as it is, have filter_fn return False for it"
        )
    return reading.own_dtype


def with_plain(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> nn.Module:
    """A shallow copy of ``module`` in which projections are plain ones without values, with weights of these dtypes."""
    made: nn.Module = _shallow(module)
    for name, dtype in dtypes.items():
        part, _, key = name.rpartition(".")
        holder = made
        if part:
            if made._modules[part] is module._modules[part]:
                made._modules[part] = _shallow(module._modules[part])
            holder = made.get_submodule(part)
        linear: Any = holder._modules[key]
        plain = nn.Linear(linear.in_features, linear.out_features, False, device="meta", dtype=dtype)
        if linear.bias is not None:
            # quantised projections cast their biases
            plain.bias = nn.Parameter(linear.bias.detach().to("meta", dtype))
        holder._modules[key] = plain
    return made


def _shallow(module: Any) -> Any:
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
