"""The keys of a model's configuration that name the activation of its feed-forward layers.

They are found by experiment, since names of keys differ and say little: the model's class makes the model again from
the configuration as its file would have it, without memory for weights, and once more for each key that names an
activation, with another one there. A key is that of the modules that then differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from twell._runtime.log import logger
from twell.integrations import layouts
from twell.integrations.layouts import Key


def find(model: Any, activation: str, is_ours: Callable[[str], bool], blocks: Collection[str]) -> list[Key]:
    """The keys of the activation of some layers in ``model.config``, and their synonyms that its class does not read.

    activation: one that stock classes have. is_ours: whether a qualified name is that of an activation of these layers.
    blocks: the names of modules, in each of which is one of them.

    Raises ValueError if the key of a layer is also that of another module, and if a layer has none.
    """
    try:
        config = _as_read(model.config)
        for key in layouts.keys_of(config, layouts.OWN):
            key.write(config, "relu")
        before = _callables(type(model), config)
    except Exception as error:
        raise ValueError(
            f"the configuration must make the model again, to find the key of the activation, got {_first(error)}"
        ) from error
    found, idle, failed = list[Key](), list[Key](), list[str]()
    ours: set[str] = set()
    for key in layouts.keys_of(config, ACT2FN):
        other = copy.deepcopy(config)
        key.write(other, "gelu" if key.read(config) == activation else activation)
        try:
            after = _callables(type(model), _as_read(other))
        except Exception as error:
            failed.append(f"{key} can be no other: {_first(error)}")
            continue
        others = _differing(before, after)
        mine = set(filter(is_ours, others))
        if mine and (strange := sorted(others - mine)):
            raise ValueError(
                f"{key} of the configuration must be the activation of layers of twell alone, got that of "
                f"{strange[0]}, too"
            )
        if mine:
            found.append(key)
            ours |= mine
        elif not others and key.name in layouts.SYNONYMS:
            idle.append(key)
    for block in blocks:
        if not any(name.startswith(f"{block}." if block else "") for name in ours):
            raise ValueError(
                f"the configuration must have a key for the activation of {block or 'the model'}, got none; "
                + "; ".join(failed or [f"keys of other activations are {_list(config)}"])
            )
    return found + [key for key in idle if key.path in {each.path for each in found}]


def differing(model: Any, keys: Collection[Key]) -> set[str]:
    """The names of what differs in the model that the class of ``model`` makes if another activation is at ``keys``.

    No names if the class makes no such model.
    """
    for other in ("gelu", "silu", "tanh"):
        try:
            config = _as_read(model.config)
            changed = copy.deepcopy(config)
            for key in keys:
                key.write(changed, other)
            return _differing(*(_callables(type(model), each) for each in (config, changed)))
        except Exception as error:
            logger.debug("the activation of %s cannot be %s: %s", ", ".join(map(str, keys)), other, _first(error))
    return set()


def _differing(before: dict[str, object], after: dict[str, object]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def _as_read(config: Any) -> Any:
    """The configuration as a class reads it from the file that ``config`` would write."""
    read = type(config).from_dict(config.to_dict())
    for part in layouts.parts(read).values():
        # its weights would be downloaded
        if getattr(part, "use_pretrained_backbone", False):
            part.use_pretrained_backbone = False
    return read


def _callables(kind: Any, config: Any) -> dict[str, object]:
    """What runs in the model that ``kind`` makes: the class of each module, its functions and its words, by name."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: nn.Module = kind(config)
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        found[name] = type(module)
        for key, value in vars(module).items():
            if not key.startswith("_") and (isinstance(value, str) or callable(value)):
                what = value if isinstance(value, str) else getattr(value, "__qualname__", type(value))
                found[f"{name}.{key}" if name else key] = what
    return found


def _list(config: Any) -> str:
    return ", ".join(f"{key} ({key.read(config)})" for key in layouts.keys_of(config, ACT2FN)) or "none"


def _first(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
