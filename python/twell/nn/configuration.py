"""The activation of feed-forward layers in a configuration of transformers: the keys that make it, and what they name.

What a key makes is found by building the model from its configuration twice, on ``meta``: what differs is the key's.
Nothing here imports transformers: what has a ``config`` and ``save_pretrained`` is one of its models.
"""

import copy
import functools
import sys
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from twell.base.activation import RELU, Activation, activation_of

# Keys with the activation of feed-forward layers in files; the first that a configuration has counts.
NAMES = (
    *("hidden_activation", "hidden_act", "encoder_activation_function", "decoder_activation_function"),
    *("activation_function", "mlp_hidden_act", "activation", "ff_activation", "dense_act_fn", "feed_forward_proj"),
)

# T5 has its activation twice, in the second with a prefix for layers with a gate.
_TWICE, _GATED = ("dense_act_fn", "feed_forward_proj"), "gated-"

# Activations that no stock class of transformers has.
OWN = ("drelu", "fatrelu")

# What a configuration of a sparse model may name besides ReLU. It applies ReLU whatever other activation it names.
OF_SPARSE = ("relu2", *OWN)
FAMILY = ("relu", *OF_SPARSE)

# Key of configurations with the threshold of "fatrelu", as MiniCPM-S has it.
THRESHOLD_KEY = "hidden_act_param"

# Key of configurations with the record of layers, see ``nn/record``.
RECORD_KEY = "twell"


class Key(NamedTuple):
    """A key of a configuration of transformers: the attributes that lead to the part that has it, and its name."""

    path: tuple[str, ...]
    name: str

    def part(self, config: Any) -> Any:
        return functools.reduce(getattr, self.path, config)

    def read(self, config: Any) -> str:
        """The activation that it names, of T5's "gated-gelu" without the prefix."""
        return str(getattr(self.part(config), self.name)).removeprefix(_GATED)

    def write(self, config: Any, activation: Activation) -> None:
        """Name an activation, with the threshold of FATReLU unless that is NaN."""
        part = self.part(config)
        for name in _TWICE if self.name in _TWICE else (self.name,):
            if hasattr(part, name):
                setattr(part, name, (_GATED if getattr(part, name).startswith(_GATED) else "") + activation.name)
        vars(part).pop(THRESHOLD_KEY, None)
        if activation.name == "fatrelu" and activation.threshold == activation.threshold:
            setattr(part, THRESHOLD_KEY, float(activation.threshold))

    def __str__(self) -> str:
        return ".".join((*self.path, self.name))


def _parts(config: Any) -> dict[tuple[str, ...], Any]:
    """A configuration of transformers and those within it, by the attributes that lead to each."""
    found = dict[tuple[str, ...], Any]()
    left: list[tuple[tuple[str, ...], Any]] = [((), config)]
    while left:
        path, part = left.pop(0)
        if all(part is not each for each in found.values()):
            found[path] = part
            left += [((*path, name), value) for name, value in vars(part).items() if hasattr(value, "get_text_config")]
    return found


def keys_naming(config: Any, activations: Container[str]) -> list[Key]:
    """The keys of a configuration of transformers that name one of ``activations``, whatever they are called."""
    return [
        Key(path, name)
        for path, part in _parts(config).items()
        for name, value in vars(part).items()
        # the name of the model's folder may be that of an activation
        if isinstance(value, str) and not name.startswith("_") and value.removeprefix(_GATED) in activations
    ]


def as_stock(config: Any) -> dict[Key, Activation]:
    """Name ReLU in a configuration at the keys with an activation that its class does not have; return what they named.

    Raises ValueError for FATReLU without a threshold, unless the configuration has a record.
    """
    found: dict[Key, Activation] = {}
    for key in keys_naming(config, OWN):
        name, threshold = key.read(config), getattr(key.part(config), THRESHOLD_KEY, None)
        if name == "fatrelu" and threshold is None and RECORD_KEY not in vars(config):
            raise ValueError(f'a configuration with "fatrelu" must have its threshold, {THRESHOLD_KEY}')
        found[key] = activation_of(name, (threshold or 0) if name == "fatrelu" else 0)
    for key in found:
        key.write(config, RELU)
    return found


def stock_activations() -> list[str]:
    return list(sys.modules["transformers.activations"].ACT2FN)


def made_by(model: Any) -> tuple[dict[Key, list[str]], dict[str, Any]]:
    """For each key that names an activation, the modules of ``model``'s stock class, and attributes, that it makes.

    And what all of those modules are. Raises ValueError if the class cannot be built from the configuration alone.
    """
    config = copy.deepcopy(model.config)
    as_stock(config)
    before, found = _built(model, config), dict[Key, list[str]]()
    for key in keys_naming(config, stock_activations()):
        changed = copy.deepcopy(config)
        key.write(changed, Activation("relu2") if key.read(config) == "relu" else RELU)
        after = _built(model, changed)
        found[key] = [name for name, kind in before.items() if after.get(name) != kind]
    return found, before


def _built(model: Any, config: Any) -> dict[str, Any]:
    """What the modules of a model of this configuration are by name: classes, and words and functions they keep."""
    try:
        # as from a file
        config = type(config).from_dict(config.to_dict())
        with torch.device("meta"):
            made = type(model)(config)
    except Exception as error:
        raise ValueError(f"{type(model).__name__} must be made from its configuration alone, got {error}") from error
    found: dict[str, Any] = {}
    for name, module in made.named_modules():
        # a class may make layers of twell
        own = (module._activation, float(module._threshold)) if "_activation" in vars(module) else ()
        found[name] = (type(module), *own)
        for attribute, value in vars(module).items():
            if not attribute.startswith("_") and (isinstance(value, str) or hasattr(value, "__qualname__")):
                found[f"{name}.{attribute}"] = value if isinstance(value, str) else value.__qualname__
    return found


def keys_of(model: Any, layers: Mapping[str, Activation]) -> tuple[dict[Key, Activation], dict[str, str]]:
    """The keys that make the activation of ``layers``, with what they are to name, and layers that have none, and why.

    layers: the activation of each by the name of the module that has it, with all within it.
    """
    named, (made, stock) = dict[Key, Activation](), made_by(model)
    changed = [name for name, activation in layers.items() if stock.get(name, ())[1:] != tuple(activation)]
    left = dict.fromkeys(changed, "no key of the configuration makes it")
    for key, names in made.items():
        owners = {name: next((each for each in layers if is_within(name, each)), None) for name in names}
        mine = {owner: layers[owner] for owner in owners.values() if owner is not None}
        new, other = set(mine.values()), next((name for name, owner in owners.items() if owner is None), None)
        if not mine:
            continue
        if other is not None and {each.name for each in new} != {key.read(model.config)}:
            why = f"{key} must be the activation of layers of twell alone, got that of {other}, too"
        elif len({each.name for each in new}) > 1:
            why = f"{key} must be one activation, got {' and '.join(sorted(a.name for a in new))}"
        else:
            why = "" if len(new) == 1 else "layers have thresholds of their own"
            # readers of the key alone refuse it without a threshold
            named[key] = new.pop() if not why else Activation("fatrelu", float("nan"))
        left |= dict.fromkeys(mine, why)
    return named, {name: why for name, why in left.items() if why}


def is_within(name: str, outer: str) -> bool:
    return not outer or f"{name}.".startswith(f"{outer}.")


def is_named(config: Any, activations: Iterable[Activation], among: Container[str] = FAMILY) -> bool:
    """Whether all ``among`` some activations that a configuration names is the one that all layers have."""
    made, found = set(activations), keys_naming(config, among)
    if len(made) != 1 or not found:
        return False
    (one,) = made
    return all(
        key.read(config) == one.name and float(getattr(key.part(config), THRESHOLD_KEY, None) or 0) == one.threshold
        for key in found
    )
