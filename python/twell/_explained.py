"""The rows of ``twell.explain`` for a layer of ``twell.nn``."""

from __future__ import annotations

from typing import Any

from twell import _adapted, _down_layout, _execution, _modes
from twell.strategy.explanation import Choice
from twell.strategy.plan import Refusal
from twell.strategy.site import found


def rows(name: str, layer: Any) -> list[Choice]:
    """The rows of ``layer``, whose qualified name is ``name``."""
    if refusal := layer._refusal():
        return [Choice(name, "any", "any", "", "none", f"calls raise: {refusal}")]
    plain = layer._is_plain()
    layout, advice = _laid_out(layer) if plain else ("", "")
    shown = []
    for row in _choices(name, layer, plain):
        copies = row.kind != "training" and row.strategy != "none"
        shown.append(row._replace(layout=layout, reason=row.reason + advice if copies else row.reason))
    return shown


def _laid_out(layer: Any) -> tuple[str, str]:
    """How a layer's down weight is stored, and what to do if sparse inference on a GPU has to copy it."""
    why = _down_layout.obstacle(layer)
    weight = layer.down_proj.weight
    if not _execution.copies_down(weight):
        return "rows", ""
    if not _down_layout.is_on_gpu(weight) or layer._runs_dense(weight):
        return "linear", ""
    if not why:
        return "linear", "; the next call lays the down weight by rows"
    return "linear", f'; sparse calls copy the down weight ({why}): twell.nn.set_down_layout(model, "rows")'


def _choices(name: str, layer: Any, plain: bool) -> list[Choice]:
    answers, note = {}, ""
    for kind in ("inference", "training"):
        if plain:
            weight = layer.down_proj.weight
            dtype = _modes.product_dtype(weight.dtype, weight.device.type)
            sizes = weight.shape[1], weight.shape[0]
            answers[kind] = _adapted.planned(layer, *sizes, dtype, weight.device, kind == "training")
        else:
            answers[kind] = _adapted.foreseen(layer, kind == "training")
            note = f"; calls of fewer than {_adapted.FEWEST_TOKENS:,} tokens call the projections, and run dense"
    site = layer._site()
    if site:
        choices = site.explain(name)
        # graphs that ran before any call have a site of their own
        other = found(layer._first_weight())
        if other is not None and other is not site:
            choices += other.explain(name)
        if not choices and answers["inference"][0] == "auto":
            choices = [Choice(name, "any", "any", "", "auto", "not called yet")]
        # calls that ran count also where only the dtype now forbids one, as with fp32 weights outside of autocast
        if choices and (answers["inference"][0] == "auto" or answers["inference"][0] is TypeError):
            return [each._replace(reason=each.reason + note) for each in choices]
    told = {
        kind: ("none", answer.shown) if isinstance(answer, Refusal) else (answer.strategy, answer.reason)
        for kind, answer in answers.items()
    }
    if told["inference"] == told["training"]:
        told = {"any": told["inference"]}
    return [Choice(name, kind, "any", "", *shown) for kind, shown in told.items()]
