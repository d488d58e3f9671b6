"""What sets or explains the layers of a whole model."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from twell.base.arguments import require
from twell.call import execution
from twell.call.functional import Strategy
from twell.choose.explanation import Choice, Explanation
from twell.choose.plan import Facts, Refusal, routed
from twell.choose.rates import Figures
from twell.choose.site import AutoStrategy, Screen, found, require_screen
from twell.nn import adapted, down_layout
from twell.nn.autoencoder import SparseAutoencoder
from twell.nn.float8 import Float8MLP
from twell.nn.layers import DownLayout, SparseFFN, require_layout
from twell.nn.settings import Configured, name_of
from twell.runtime import modes

_OTHERS = Float8MLP, SparseAutoencoder


def explain(layers: nn.Module | AutoStrategy) -> Explanation:
    """Return the strategy of each layer of ``layers``, the reason and the measured figures; ``print`` it for a table.

    ``layers`` is a module that is or contains layers of ``twell.nn``, or the ``AutoStrategy`` of a call site. The call
    neither waits nor changes anything: figures still on their way from the GPU are left out. Only "auto" measures, and
    only where it may choose; on a CPU the non-zeros are those of ``aux``, where the last call recorded it.
    """
    if isinstance(layers, AutoStrategy):
        none = Choice("", "any", "any", "", "auto", "no call has chosen yet: on a CPU all are dense")
        return Explanation(tuple(layers.explain()) or (none,))
    if not isinstance(layers, nn.Module):
        raise TypeError(f"layers must be an nn.Module or an AutoStrategy, got {type(layers).__name__}")
    rows = list[Choice]()
    for name, layer in (named_layers(layers, _OTHERS) | named_layers(layers)).items():
        # of a pair the module around both, where that is among the layers
        block_of: Any = getattr(layer, "block_of", None)
        block = layer if block_of is None else layers.get_submodule(block_of(name))
        own = _rows(name, layer, block) if isinstance(layer, SparseFFN) else layer.explain(name)
        rows += _bypassed(name, layer, block) or own
    return Explanation(tuple(rows))


def set_strategy(
    module: nn.Module, strategy: Strategy | AutoStrategy, *, screen: Screen | None = None, invariant: bool | None = None
) -> None:
    """Set ``strategy`` of every layer of ``twell.nn`` in ``module``; with "auto" each chooses for itself.

    ``screen`` and ``invariant`` are set, too, unless they are None. An ``AutoStrategy`` is for one layer: layers that
    share it share their figures and its ``screen``. Raises as the attributes do, and ValueError if ``module`` has no
    such layer; then nothing has changed.
    """
    layers = [*named_layers(module).values(), *named_layers(module, _OTHERS).values()]
    _require_any(module, layers)
    if screen is not None:
        require_screen(screen)
    for layer in layers:
        routed(Facts(strategy=name_of(strategy), invariant=layer.invariant if invariant is None else invariant))
    for layer in layers:
        if isinstance(layer, SparseAutoencoder):
            # raises if True
            layer.invariant = bool(invariant)
            layer.strategy = strategy
    for layer in layers:
        if isinstance(layer, Configured):
            # both at once: the one may not go with the other's old value
            layer._set(_strategy=strategy, **({} if invariant is None else {"_invariant": invariant}))
        if screen is not None and not isinstance(layer, Float8MLP):
            layer.screen = screen


def set_down_layout(module: nn.Module, layout: DownLayout) -> None:
    """Set the layout of ``down_proj.weight`` in every layer of ``twell.nn`` in ``module``. Shapes stay [K, N].

    "auto", the default: as nn.Linear stores it, for all code that sees the Parameter. In ``eval`` mode and without
    gradients a call on a GPU first stores it by rows, which the kernels read in place, if nothing else holds the
    Parameter or its memory. ``parameters()``, ``modules()``, ``state_dict``, ``train``, ``to``, copies, pickles, and
    calls that need its gradient put it back. Both wait for the GPU, once. A weight that a CUDA graph reads stays as it
    is. Only code that reads ``down_proj.weight`` itself sees the rows.

    "linear": contiguous, always. The sparse kernels then read a copy by rows, made at each forward and each backward
    pass: 23 MB at K = 2,048 and N = 5,632. "rows": the transposed view of a contiguous [N, K] tensor, always; also for
    training where nothing flattens parameters. FSDP2, flat optimizers such as LBFGS, ``parameters_to_vector`` and
    safetensors refuse such a weight or need ``.contiguous()``; ``set_down_layout(module, "auto")`` is the way back.

    Loading a state dict keeps each; moving, casting, copying and pickling keep "linear" and "rows". Call it before
    anything keeps views of the parameters; the Parameter objects stay, and their gradients change layout with them. The
    state of an optimizer does not, and fused optimizers read it in memory order: set the layout before the optimizer's
    first step, and use that of the run whose state is loaded. It also sets a replaced weight right.

    Raises ValueError for another name, and if ``module`` has no such layer.
    """
    require_layout("layout", layout)
    layers = named_layers(module)
    _require_any(module, layers)
    for layer in layers.values():
        layer.down_layout = layout
        with layer._laid.lock:
            layer._laid.weight = None
            down_layout.store(layer.down_proj.weight, layout == "rows")


def named_layers(module: nn.Module, kinds: Any = SparseFFN) -> dict[str, Any]:
    """The layers of ``module`` by qualified name, each by its first, or of other ``kinds``; hands out no parameters."""
    require("module", module, nn.Module, "an nn.Module")
    with down_layout.unlisted():
        return {name: layer for name, layer in module.named_modules() if isinstance(layer, kinds)}


def _require_any(module: nn.Module, layers: object) -> None:
    if not layers:
        raise ValueError(f"module must have layers of twell.nn, got none in {type(module).__name__}")


def _rows(name: str, layer: Any, block: Any) -> list[Choice]:
    """The rows of ``layer``, whose qualified name is ``name``. block: as in ``_bypassed``."""
    try:
        refusal, plain = layer._refusal(), layer._is_plain()
    except (AttributeError, NotImplementedError) as error:
        refusal, plain = str(error), False
    if refusal:
        return [Choice(name, "any", "any", "", "none", f"calls raise: {refusal}")]
    layout, advice = _laid_out(layer) if plain else ("", "")
    aux: Any = layer.aux
    # reading figures of a GPU would wait
    recorded = aux is not None and aux.l0.device.type == "cpu" and modes.eager((aux.l0,))
    kinds = ("any", "training" if recorded and aux.l1.requires_grad else "inference")
    shown = []
    for row in _choices(name, layer, plain):
        if recorded and row.kind in kinds and row.strategy != "none" and not row.graph:
            row = row._replace(figures=row.figures or Figures(float(aux.l0), None))
        copies = row.kind != "training" and row.strategy != "none"
        shown.append(row._replace(layout=layout, reason=row.reason + advice if copies else row.reason))
    if dropped := layer._dropped_by(block):
        reason = f"training drops values of the hidden state ({dropped})"
        inferred = [row._replace(kind="inference") for row in shown if row.kind != "training"]
        shown = [*inferred, Choice(name, "training", "any", "", "dense", reason, layout=layout)]
    return shown


def _bypassed(name: str, layer: Any, block: Any) -> list[Choice]:
    """The row of a layer that others bypass, by a ``forward`` of the layer or of a pair's ``block``; else none."""
    if used_by := getattr(getattr(layer, "up_proj", None), "used_by", ""):
        why = f"{used_by} used what the first of the pair {', '.join(layer.names)} returns, in its last call"
        return [Choice(name, "any", "any", "", "dense", why)]
    for what, module in (("layer", layer), ("block of the pair", block)):
        own = inspect.unwrap(type(module).forward)
        # wrappers of accelerate and torch.compile name what they call
        forward = inspect.unwrap(vars(module).get("forward", own))
        if getattr(forward, "__func__", forward) is not own:
            given = getattr(forward, "__qualname__", forward)
            why = f"{given} was set as the forward of the {what}: twell's code runs only if that calls it"
            return [Choice(name, "any", "any", "", "none", why)]
    return []


def _laid_out(layer: Any) -> tuple[str, str]:
    """How a layer's down weight is stored, and what to do if sparse inference on a GPU has to copy it."""
    why, weight = down_layout.obstacle(layer), layer.down_proj.weight
    if not execution.copies_down(weight):
        return "rows", ""
    if not down_layout.is_on_gpu(weight) or layer._planned(weight, False).strategy in ("none", "dense"):
        return "linear", ""
    if not why:
        return "linear", "; the next call lays the down weight by rows"
    return "linear", f'; sparse calls copy the down weight ({why}): twell.nn.set_down_layout(model, "rows")'


def _choices(name: str, layer: Any, plain: bool) -> list[Choice]:
    answers = _answers(layer, plain)
    note = f"; calls of fewer than {adapted.FEWEST_TOKENS:,} tokens call the projections, and run dense"
    site = layer._site()
    if site:
        choices = site.explain(name)
        # graphs that ran before any call have a site of their own
        other = found(layer._applied("gate_proj" if layer._gated else "up_proj")[0])
        if other is not None and other is not site:
            choices += other.explain(name)
        if not choices and answers["inference"][0] == "auto":
            choices = [Choice(name, "any", "any", "", "auto", "not called yet")]
        # calls that ran count also where only the dtype now forbids one, as with fp32 weights outside of autocast
        if choices and (answers["inference"][0] == "auto" or answers["inference"][0] is TypeError):
            return [each._replace(reason=each.reason + ("" if plain or layer._given else note)) for each in choices]
    told = {k: (each.strategy, each.shown if isinstance(each, Refusal) else each.reason) for k, each in answers.items()}
    weight = getattr(layer.down_proj, "weight", None)
    if weight is not None and weight.dtype is torch.float32 and weight.device.type in ("cpu", "cuda"):
        # calls may run under it though this is none
        with torch.autocast(weight.device.type):
            cast = {kind: each.strategy for kind, each in _answers(layer, plain).items()}
        when = "under autocast or with x in 16 bits" if layer._casts else "under autocast"
        for kind, (strategy, reason) in told.items():
            told[kind] = strategy, reason if cast[kind] == strategy else f"{reason}; {when}: {cast[kind]}"
    if told["inference"] == told["training"]:
        told = {"any": told["inference"]}
    return [Choice(name, kind, "any", "", *shown) for kind, shown in told.items()]


def _answers(layer: Any, plain: bool) -> dict[str, Any]:
    """How calls of each kind run, as ``plan`` says."""
    run = partial(layer._planned, layer.down_proj.weight) if plain else partial(adapted.foreseen, layer)
    return {"inference": run(False), "training": run(True)}
