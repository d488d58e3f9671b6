"""The rows of ``twell.explain`` for a layer of ``twell.nn``."""

import inspect
from typing import Any

import torch

from twell.call import execution
from twell.choose.explanation import Choice
from twell.choose.plan import Refusal
from twell.choose.rates import Figures
from twell.choose.site import found
from twell.nn import adapted, down_layout
from twell.runtime import modes


def rows(name: str, layer: Any, block: Any) -> list[Choice]:
    """The rows of ``layer``, whose qualified name is ``name``. block: as in ``bypassed``."""
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


def bypassed(name: str, layer: Any, block: Any) -> list[Choice]:
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
    why = down_layout.obstacle(layer)
    weight = layer.down_proj.weight
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
    kinds = {"inference": False, "training": True}
    if not plain:
        return {kind: adapted.foreseen(layer, training) for kind, training in kinds.items()}
    return {kind: layer._planned(layer.down_proj.weight, training) for kind, training in kinds.items()}
