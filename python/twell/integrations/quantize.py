"""``quantize_``: the layers of a model in e4m3, in place."""

from typing import Any, cast

import torch
from torch import nn

from twell.base.arguments import require
from twell.call.plain import HOOKS
from twell.integrations.sparsify import quantised
from twell.integrations.sparsify.replace import Model
from twell.nn.converted import NamedGatedMLP, NamedMLP
from twell.nn.float8 import Float8MLP
from twell.nn.layers import SparseFFN, SparseGatedMLP, SparseMLP
from twell.nn.pairs import SparseDown, put_pair
from twell.ops.float8 import Granularity, quantize


def quantize_(model: Model, *, granularity: Granularity = "row", fast_accum: bool = True) -> Model:
    """Replace the layers of ``twell.nn`` in a bfloat16 ``model`` by ``twell.nn.Float8MLP``, for inference.

    In place; returns ``model``. ``sparsify_`` makes such layers of a model of others; its pairs stay pairs. Weights get
    a scale per row, or one per tensor. Settings stay. ``save_pretrained`` of a model of transformers that holds them
    writes them as FP8_DYNAMIC of compressed-tensors, and names them in the configuration of the files.

    Nothing is changed, and ValueError or TypeError is raised, if there is none, if one cannot be replaced, or if its
    weights are not bfloat16.
    """
    require("model", model, nn.Module, "an nn.Module")
    # a layer that has several places is replaced in all of them, by one
    places = model.named_modules(remove_duplicate=False)
    layers = {name: layer for name, layer in places if isinstance(layer, SparseFFN)}
    if not layers:
        raise ValueError(f"model must have layers of twell.nn, got none in {type(model).__name__}; see twell.sparsify_")
    if "" in layers:
        raise ValueError(
            f"model must hold the layers to replace, got a {type(model).__name__} itself: call quantize_ on the module "
            "that holds it, or on nn.Sequential(layer)"
        )
    first = {id(layer): name for name, layer in reversed(layers.items())}
    made = {key: _quantised(model, name, layers[name], granularity, fast_accum) for key, name in first.items()}
    for name, layer in layers.items():
        if isinstance(layer, SparseDown):
            block = model.get_submodule(layer.block_of(name))
            put_pair(block, layer.names, layer.attribute, layer.dropouts, cast(Any, made[id(layer)]))
        else:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, made[id(layer)])
    return model


def _quantised(model: nn.Module, name: str, layer: SparseFFN, granularity: Granularity, fast_accum: bool) -> Float8MLP:
    if beyond := _beyond(model, name, layer):
        raise TypeError(f"{name} must be a layer of twell.nn that applies plain projections alone, got {beyond}")
    found = list(layer._operands())
    for operand in (operand for pair in found for operand in pair if operand is not None):
        if operand.dtype != torch.bfloat16 or operand.is_meta:
            got = f"{operand.dtype} on {operand.device}; model.bfloat16() makes them"
            raise TypeError(f"quantize_: layer {name!r} must have bfloat16 weights in memory, got {got}")
    stored = [
        quantised.Stored(quantize(weight.detach(), granularity), None if bias is None else bias.detach(), None)
        for weight, bias in found
    ]
    settings = "activation", "threshold", "strategy", "invariant", "compression"
    options = {"fast_accum": fast_accum, **{name: getattr(layer, name) for name in settings}}
    made: Float8MLP = quantised.layer(dict(zip(layer._projections, stored)), isinstance(layer, SparseDown), options)
    made.dropped = layer._dropped_by()
    return made.train(layer.training)


def _beyond(model: nn.Module, name: str, layer: SparseFFN) -> str:
    """What a layer is or does that a ``Float8MLP`` would not; "" if nothing."""
    if type(layer) not in (SparseGatedMLP, SparseMLP, NamedGatedMLP, NamedMLP, SparseDown):
        return f"a {type(layer).__name__}"
    # of a pair both are modules of a block
    up: Any = layer.up_proj if isinstance(layer, SparseDown) else None
    if isinstance(layer, SparseDown):
        block, parts = layer.block_of(name), filter(None, (*layer.names, layer.attribute))
        modules = dict(model.named_modules(remove_duplicate=False))
        first, second, *act = (modules.get(f"{block}.{part}".removeprefix(".")) for part in parts)
        if first is not up or second is not layer or any(getattr(each, "down", None) is not layer for each in act):
            return "the second half of a pair without the block around both, or in one with other modules"
    if not layer._is_plain() or (up is None and layer._dropout and not layer._dropped_by() and layer._drops()):
        return "others, or hooks on them"
    for module in (layer,) if up is None else (layer, up):
        if any(vars(module)[hooks] for hooks in HOOKS) or "forward" in vars(module) or module._compiled_call_impl:
            return "hooks, a forward of its own or a compiled one"
    own, children = ({"weight", "bias"}, set()) if up is not None else (set(), set(layer._projections))
    children |= {layer._dropout} - {""}
    if not set(layer._parameters) <= own or layer._buffers or set(layer._modules) != children:
        return "parameters, buffers or children beside them, as compacted layers have"
    if layer.record_aux or isinstance(layer.threshold, torch.Tensor):
        return "record_aux or a threshold that moves"
    return ""
