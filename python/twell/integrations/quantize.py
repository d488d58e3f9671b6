"""``quantize_``: the layers of a model in e4m3, in place."""

from typing import Any

import torch
from torch import nn

from twell.base.arguments import require
from twell.call.plain import HOOKS
from twell.integrations.sparsify.replace import Model
from twell.nn.converted import NamedGatedMLP, NamedMLP
from twell.nn.float8 import Float8MLP
from twell.nn.layers import SparseFFN, SparseGatedMLP, SparseMLP
from twell.ops.float8 import Granularity, quantize


def quantize_(model: Model, *, granularity: Granularity = "row", fast_accum: bool = True) -> Model:
    """Replace the layers of ``twell.nn`` in a bfloat16 ``model`` by ``twell.nn.Float8MLP``, for inference.

    In place; returns ``model``. ``sparsify_`` makes such layers of a model of others; its pairs, as of OPT, raise.
    Weights get a scale per row, or one per tensor. Settings stay. ``save_pretrained`` of a model of transformers that
    holds them writes them as FP8_DYNAMIC of compressed-tensors, and names them in the configuration of the files.

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
    made = {key: _quantised(name, layers[name], granularity, fast_accum) for key, name in first.items()}
    for name in layers:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[id(layers[name])])
    return model


def _quantised(name: str, layer: SparseFFN, granularity: Granularity, fast_accum: bool) -> Float8MLP:
    if beyond := _beyond(layer):
        raise TypeError(f"{name} must be a layer of twell.nn that applies plain projections alone, got {beyond}")
    found = list(layer._operands())
    for operand in (operand for pair in found for operand in pair if operand is not None):
        if operand.dtype != torch.bfloat16 or operand.is_meta:
            got = f"{operand.dtype} on {operand.device}; model.bfloat16() makes them"
            raise TypeError(f"quantize_: layer {name!r} must have bfloat16 weights in memory, got {got}")
    gate: list[Any] = [None] * (3 - len(found))
    records = [*gate, *(quantize(weight.detach(), granularity) for weight, _ in found)]
    biases = [*gate, *(None if bias is None else bias.detach() for _, bias in found)]
    settings = "activation", "threshold", "strategy", "invariant", "compression"
    options: dict[str, Any] = {name: getattr(layer, name) for name in settings}
    made = Float8MLP(*records, biases=biases, names=layer._projections, fast_accum=fast_accum, **options)
    made.dropped = layer._dropped_by()
    return made.train(layer.training)


def _beyond(layer: SparseFFN) -> str:
    """What a layer is or does that a ``Float8MLP`` would not; "" if nothing."""
    if type(layer) not in (SparseGatedMLP, SparseMLP, NamedGatedMLP, NamedMLP):
        return f"a {type(layer).__name__}"
    if not layer._is_plain() or (layer._dropout and not layer._dropped_by() and layer._drops()):
        return "others, or hooks on them"
    if any(vars(layer)[hooks] for hooks in HOOKS) or "forward" in vars(layer) or layer._compiled_call_impl:
        return "hooks, a forward of its own or a compiled one"
    if layer._parameters or layer._buffers or set(layer._modules) != {*layer._projections, layer._dropout} - {""}:
        return "parameters, buffers or children beside them, as compacted layers have"
    if layer.record_aux or isinstance(layer.threshold, torch.Tensor):
        return "record_aux or a threshold that moves"
    return ""
