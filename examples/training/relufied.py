"""Models with the ReLU family in place of their activation: replacing it, saving, loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from twell import recipe
from twell.functional import Strategy
from twell.integrations import layouts
from twell.integrations import transformers as twell_hf

from . import model as _model  # noqa: F401  (registers the attention "causal")

# of those, transformers' own models compute the first two
FAMILY = ("relu", "relu2", "drelu", "fatrelu")


def replace(model: Any, activation: str, strategy: Strategy = "dense") -> None:
    """Make the FFNs of ``model`` layers of twell with ``activation``, in place; the weights stay.

    TypeError or ValueError, as ``twell.integrations.transformers.sparsify``, if that cannot be done.
    """
    if any(type(layer).__module__.startswith("twell") for layer in model.modules()):
        found = recipe.layers(model)
    else:
        twell_hf.sparsify(model, activation="relu", strategy=strategy)
        found = recipe.layers(model)
    for layer in found.values():
        layer.threshold = 0
        layer.activation = activation  # type: ignore[assignment]
        layer.strategy = strategy
    name(model, activation)


def name(model: Any, activation: str, threshold: float = 0.0) -> None:
    """Write the activation to the configuration of ``model``; "fatrelu" with its threshold, as MiniCPM-S has it."""
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        for key in layouts.ACTIVATIONS:
            if isinstance(getattr(config, key, None), str):
                setattr(config, key, activation)
        if activation == "fatrelu":
            config.hidden_act_param = threshold


def load(folder: str | Path, **options: Any) -> Any:
    """The causal model in ``folder`` or of the Hub, ``options`` for ``from_pretrained``.

    Where its configuration names one of ``FAMILY`` the FFNs are layers of twell with strategy "auto"; any other model
    is as ``from_pretrained`` makes it.
    """
    config = AutoConfig.from_pretrained(folder)
    activation = layouts.activation(config.get_text_config().to_dict())
    if activation not in FAMILY:
        return AutoModelForCausalLM.from_pretrained(folder, **options)
    threshold = float(getattr(config, "hidden_act_param", 0.0)) if activation == "fatrelu" else 0.0
    for part in (config, config.get_text_config()):
        for key in layouts.ACTIVATIONS:
            if isinstance(getattr(part, key, None), str):
                setattr(part, key, "relu")
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
    replace(model, activation, "auto")
    for layer in recipe.layers(model).values():
        layer.threshold = threshold
    name(model, activation, threshold)
    return model


def compile_blocks(model: nn.Module) -> list[nn.Module]:
    """Compile the forward of each block of ``model``, the elements of its outermost lists of modules; return them."""
    lists: list[str] = []
    blocks: list[nn.Module] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists.append(path)
            blocks += module
    for block in blocks:
        block.forward = torch.compile(block.forward)
    return blocks
