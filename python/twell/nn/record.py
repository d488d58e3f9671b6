"""The record of a model's layers in config.json, which ``save_pretrained`` of transformers writes.

``config.twell`` is a list of entries like ::

    {"class": "SparseGatedMLP", "modules": ["model.layers.*.mlp"], "names": ["gate_proj", "up_proj", "down_proj"]}

modules: what ``sparsify`` took, where ``*`` stands for every number. names: of the projections. An entry has
"activation" and "threshold" where no key of the configuration can name them. Beside it the configuration says what
others read: the activation at the keys that make it, and weights in e4m3 as FP8_DYNAMIC of compressed-tensors. All of
that is what the layers are when the model is saved, wherever they come from.
"""

import contextlib
import copy
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twell.base.activation import Activation, activation_of
from twell.nn import configuration
from twell.nn.configuration import RECORD_KEY
from twell.runtime.log import logger

E4M3 = torch.float8_e4m3fn
_FORMAT = {"num_bits": 8, "type": "float", "symmetric": True}
# torch.compile, checkpoints and FSDP have the module that they wrap under these names
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# the class of entries of experts of transformers that are stacked in tensors
EXPERTS = "sparse_experts"


class Entry(NamedTuple):
    """Layers in a record; ``activation`` is None where the configuration has it."""

    kind: str
    modules: tuple[str, ...]
    names: tuple[str, ...] = ()
    activation: Activation | None = None

    def has(self, module: str) -> bool:
        return any(re.fullmatch(re.escape(each).replace(r"\*", r"\d+"), module) for each in self.modules)


def read(config: Any) -> list[Entry] | None:
    """Take the record out of a configuration; None without one. Raises ValueError for one that is broken."""
    stated = vars(config).pop(RECORD_KEY, None)
    if stated is None:
        return None
    try:
        return [
            Entry(
                str(each["class"]),
                tuple(map(str, each["modules"])),
                tuple(map(str, each.get("names", ()))),
                activation_of(each["activation"], each.get("threshold", 0)) if "activation" in each else None,
            )
            for each in stated
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f'"{RECORD_KEY}" of the configuration must be as save_pretrained wrote it: {error}') from error


def require_named(content: Mapping[str, Any]) -> None:
    """Raise ValueError if only the record of a configuration says what layers compute, for readers of keys alone."""
    for each in content.get(RECORD_KEY) or ():
        if "activation" in each:
            got = f"{each['modules'][0]} with {each['activation']} by its record alone"
            got += ", which twell.integrations.transformers.load reads"
            raise ValueError(f"keys of the configuration must name the activation of all layers, got {got}")


class Layer(NamedTuple):
    """A layer in a model: its class, the module that had its activation, its entry's module and names.

    activation: None where the model's own code applies it.
    """

    kind: str
    act: str
    module: str
    names: tuple[str, ...]
    activation: Activation | None


def unwrapped(name: str) -> str:
    """The name that a module has without wrappers of torch."""
    # without patterns, so that a graph can be traced
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((unwrapped(name), module) for name, module in model.named_modules())


def layer_of(name: str, layer: Any) -> Layer | None:
    """What a module of a model is, of this name; None unless a layer of twell."""
    names = getattr(layer, "_projections", None) or getattr(layer, "_names", None)
    if not names or not isinstance(layer.__dict__.get("_activation"), str):
        return None
    kind, act, module = type(layer).__name__, name, name
    # of two layers in a block
    if hasattr(layer, "attribute"):
        names, module = layer.names, layer.block_of(name)
        act = f"{module}.{layer.attribute or ''}".strip(".")
    activation = None if getattr(layer, "_fixed", False) else Activation(layer._activation, float(layer._threshold))
    return Layer(kind, act, module, tuple(names), activation)


def _layers(model: nn.Module) -> list[Layer]:
    return [layer for name, module in _named(model) if (layer := layer_of(name, module)) is not None]


def layers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The modules of entries, and their classes, of all layers of ``model``."""
    yield from ((each.module, each.kind) for each in _layers(model))
    for name, module in _named(model):
        if "_twell" in vars(module) and getattr(module.config, "_experts_implementation", None) == "twell":
            yield name, EXPERTS


def activations(model: nn.Module) -> dict[str, Activation]:
    """The activations of the layers of ``model`` by the modules that had them."""
    return {each.act: each.activation for each in _layers(model) if each.activation is not None}


def _entries(model: nn.Module, left: Mapping[str, str]) -> list[dict[str, Any]]:
    """The record of a model; ``left`` has the layers whose activation the configuration does not name."""
    groups: dict[Entry, list[str]] = {}
    for each in _layers(model):
        own = each.activation if each.act in left else None
        groups.setdefault(Entry(each.kind, (), each.names, own), []).append(each.module)
    if experts := [name for name, kind in layers(model) if kind == EXPERTS]:
        groups[Entry(EXPERTS, ())] = experts
    everything = [name for name, _ in _named(model)]
    entries = []
    for entry, modules in groups.items():
        patterns = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in modules)
        listed: list[str] = []
        for pattern in patterns:
            every = [name for name in everything if Entry("", (pattern,)).has(name)]
            listed += [pattern] if set(every) <= set(modules) else [name for name in every if name in modules]
        made: dict[str, Any] = {"class": entry.kind, "modules": listed}
        made |= {"names": list(entry.names)} if entry.names else {}
        entries.append(made | (entry.activation.options() if entry.activation else {}))
    return entries


def watch() -> None:
    """Let ``save_pretrained`` of transformers, where it is imported, record the layers of twell."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None or hasattr(base.save_pretrained, "_of_twell"):
        return
    stock = base.save_pretrained

    @functools.wraps(stock)
    def save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
        with _recorded(self):
            return stock(self, *args, **options)

    save_pretrained._of_twell = True  # type: ignore[attr-defined]
    base.save_pretrained = save_pretrained


@contextlib.contextmanager
def _recorded(model: Any) -> Iterator[None]:
    """Let the configuration of a model say what its layers are. Raises NotImplementedError if it cannot."""
    found, config = activations(model), model.config
    quantised = _quantised(model, getattr(config, "quantization_config", None))
    # other models may share it
    model.config = copy.deepcopy(config)
    vars(model.config).pop(RECORD_KEY, None)
    try:
        left: dict[str, str] = {}
        every = (*configuration.OWN, *configuration.stock_activations())
        if found and not configuration.is_named(config, found.values(), every):
            left = _name(model, found)
        if entries := _entries(model, left):
            setattr(model.config, RECORD_KEY, entries)
        if quantised is not None:
            model.config.quantization_config = quantised
        yield
    finally:
        model.config = config


def _name(model: Any, found: Mapping[str, Activation]) -> dict[str, str]:
    """Name the activation of layers in the configuration; return those that it cannot name, and why."""
    try:
        named, left = configuration.keys_of(model, found)
    except ValueError as error:
        if configuration.is_named(model.config, found.values()):
            return {}
        named, left = {}, dict.fromkeys(found, str(error))
    for key, activation in named.items():
        key.write(model.config, activation)
    if left:
        reader = "twell.integrations.transformers.load"
        said = "the activation of %d layers is in the record of files alone, which %s reads: %s"
        logger.warning(said, len(left), reader, next(iter(left.values())))
    return left


def _quantised(model: nn.Module, stated: Any) -> dict[str, Any] | None:
    """The ``quantization_config`` of a model's layers in e4m3; None without. Raises NotImplementedError."""
    weights = {name: weight for name, weight in _weights(model).items() if weight.dtype == E4M3}
    if stated is not None and (weights or any("_dequantised" in vars(module) for module in model.modules())):
        raise NotImplementedError(
            "save_pretrained: weights must be stored as the configuration says, got layers of twell with others in "
            "place of quantised ones: the files that the model was loaded from hold the same values"
        )
    if not weights:
        return None
    targets = [rf"(.*\.)?{re.escape(name)}$" for name in weights]
    others = (name for name, module in _named(model) if isinstance(module, nn.Linear) and name not in weights)
    if alike := [name for name in others if any(re.match(target, name) for target in targets)]:
        raise NotImplementedError(
            "save_pretrained: names of layers in e4m3 must not end those of others, of which readers would take the "
            f"weights for e4m3, got {alike[0]}: quantise both, or rename one"
        )
    group = {
        "targets": [f"re:{target}" for target in targets],
        "weights": {**_FORMAT, "strategy": "channel", "dynamic": False},
        "input_activations": {**_FORMAT, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
    }


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of layers of twell, by the names of their projections."""
    return {
        inner: weight
        for name, layer in _named(model)
        if type(layer).__module__.startswith("twell.")
        for inner, projection in layer.named_modules(prefix=name)
        if (weight := projection._parameters.get("weight")) is not None
    }
