"""Models with the ReLU family in place of their activation: replacing it, loading, compiling."""

from __future__ import annotations

import hashlib
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

# What of a model's folder is hashed, whole up to a megabyte, else in samples of so many bytes.
_FILES = ("config.json", "*.safetensors", "*.bin", "*.index.json")
_SAMPLES, _SAMPLE = 256, 4096


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


def content(model: str | Path) -> str:
    """What tells two models apart: figures and a hash of the files of a folder, wherever it is, or a commit of the Hub.

    Of large files the size and samples are hashed, which differ after any training; times are not.
    """
    folder = Path(model)
    if not folder.is_dir():
        commit = getattr(AutoConfig.from_pretrained(model), "_commit_hash", None)
        return f"{model} at {commit}" if commit else str(model)
    files = sorted({path for pattern in _FILES for path in folder.glob(pattern)})
    total, digest = 0, hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        total += size
        digest.update(f"{path.name} {size} ".encode())
        stride = max(_SAMPLE, (size - _SAMPLE) // _SAMPLES)
        with path.open("rb") as file:
            for start in range(0, size, stride):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return f"{len(files)} files of {total:,} bytes with hash {digest.hexdigest()[:16]}"


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
