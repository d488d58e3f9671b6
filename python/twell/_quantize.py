"""``quantize_``: the layers of a model in e4m3, in place."""

from __future__ import annotations

import torch
from torch import nn

from twell._arguments import require
from twell._float8_mlp import Float8MLP
from twell._plain import HOOKS
from twell._sparsify.modules import NamedGatedMLP, NamedMLP
from twell._sparsify.quantised import name_in
from twell._sparsify.replace import Model
from twell.float8 import Granularity, quantize
from twell.nn import SparseFFN, SparseGatedMLP, SparseMLP


def quantize_(model: Model, *, granularity: Granularity = "row", fast_accum: bool = True) -> Model:
    """Replace the layers of ``twell.nn`` in a bfloat16 ``model`` by ``twell.nn.Float8MLP``, for inference.

    In place; returns ``model``. ``sparsify_`` makes such layers of a model of others. Weights get a scale per row, or
    one per tensor. Settings stay. ``save_pretrained`` of a model of transformers writes them as FP8_DYNAMIC of
    compressed-tensors, and names them in the configuration.

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
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[id(layer)])
    name_in(model)
    return model


def _quantised(name: str, layer: SparseFFN, granularity: Granularity, fast_accum: bool) -> Float8MLP:
    if beyond := _beyond(layer):
        raise TypeError(f"{name} must be a layer of twell.nn that applies plain projections alone, got {beyond}")
    found = list(layer._operands())
    for operand in (operand for pair in found for operand in pair if operand is not None):
        if operand.dtype != torch.bfloat16 or operand.is_meta:
            raise TypeError(f"{name} must have bfloat16 weights in memory, got {operand.dtype} on {operand.device}")
    records = [quantize(weight.detach(), granularity) for weight, _ in found]
    biases = [None if bias is None else bias.detach() for _, bias in found]
    if not layer._gated:
        records.insert(0, None)  # type: ignore[arg-type]
        biases.insert(0, None)
    made = Float8MLP(
        *records,
        biases=biases,
        activation=layer.activation,
        threshold=layer.threshold,  # type: ignore[arg-type]
        strategy=layer.strategy,
        invariant=layer.invariant,
        compression=layer.compression,
        fast_accum=fast_accum,
        names=tuple(layer._projections),
    )
    return made.train(layer.training)


def _beyond(layer: SparseFFN) -> str:
    """What a layer is or does that a ``Float8MLP`` would not; "" if nothing."""
    own = vars(layer)
    if type(layer) not in (SparseGatedMLP, SparseMLP, NamedGatedMLP, NamedMLP):
        return f"a {type(layer).__name__}"
    if not layer._is_plain():
        return "others, or hooks on them"
    if any(own[hooks] for hooks in HOOKS) or "forward" in own or layer._compiled_call_impl is not None:
        return "hooks, a forward of its own or a compiled one"
    if own["_parameters"] or own["_buffers"] or set(own["_modules"]) != set(layer._projections):
        return "parameters, buffers or children beside them, as compacted layers have"
    if layer.record_aux or isinstance(layer.threshold, torch.Tensor):
        return "record_aux or a threshold that moves"
    return ""
