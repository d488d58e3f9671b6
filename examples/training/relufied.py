"""Models with the ReLU family in place of their activation: replacing it, loading, compiling."""

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
from twell.nn import SparseFFN

from . import model as _model  # noqa: F401  (registers the attention "causal")

FAMILY = ("relu", "relu2", "drelu", "fatrelu")


def replace(model: Any, activation: Any, strategy: Strategy = "dense") -> None:
    """Make the FFNs of ``model`` layers of twell with ``activation``, in place; the weights stay.

    FATReLU begins as ReLU, or with the threshold that a model with FATReLU has. TypeError or ValueError, as
    ``twell.integrations.transformers.sparsify``, if that cannot be done.
    """
    begin: Any = "relu" if activation == "fatrelu" else activation
    if not any(isinstance(layer, SparseFFN) for layer in model.modules()):
        twell_hf.sparsify(model, activation=begin, strategy=strategy)
        return
    for layer in recipe.layers(model).values():
        layer.strategy = strategy
        if layer.activation != activation:
            layer.threshold = 0
            layer.activation = begin
    twell_hf.name_activation(model)


def load(folder: str | Path, **options: Any) -> Any:
    """The causal model in ``folder`` or of the Hub, ``options`` for ``from_pretrained``.

    Where its configuration names one of ``FAMILY`` the FFNs are layers of twell with strategy "auto"; any other
    model is as ``from_pretrained`` makes it.
    """
    named = layouts.activation(AutoConfig.from_pretrained(folder).get_text_config().to_dict())
    read = twell_hf.load if named in FAMILY else AutoModelForCausalLM.from_pretrained
    return read(folder, **options)


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
