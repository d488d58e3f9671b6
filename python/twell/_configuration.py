"""The activation of feed-forward layers in a configuration of transformers: its keys, by ``KEYS``, and what they name.

Nothing here imports transformers: what has a ``config`` and ``save_pretrained`` is one of its models.
"""

import functools
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any, NamedTuple

from torch import nn

from twell import _sparsify
from twell._activation import RELU, Activation, activation_of
from twell._runtime.log import logger

# Keys of the activation of feed-forward layers: those of one line are set together, and the first line of which a
# configuration has a key counts. RT-DETR has "activation_function" for other layers.
KEYS = (
    ("hidden_activation", "hidden_act"),
    ("encoder_activation_function", "decoder_activation_function"),
    ("activation_function",),
    ("mlp_hidden_act",),
    ("activation",),
    ("ff_activation",),
    ("dense_act_fn", "feed_forward_proj"),
)
NAMES = tuple(name for names in KEYS for name in names)

# Prefix of T5's for layers with a gate.
_GATED = "gated-"

# Activations that no stock class of transformers has.
OWN = ("drelu", "fatrelu")

# What a configuration of a sparse model may name besides ReLU. It applies ReLU whatever other activation it names.
OF_SPARSE = ("relu2", *OWN)

# Key of configurations with the threshold of "fatrelu", as MiniCPM-S has it.
THRESHOLD_KEY = "hidden_act_param"


class Key(NamedTuple):
    """A key of a configuration of transformers: the attributes that lead to the part that has it, and its name."""

    path: tuple[str, ...]
    name: str

    def part(self, config: Any) -> Any:
        return functools.reduce(getattr, self.path, config)

    def read(self, config: Any) -> str:
        """The activation that it names, of T5's "gated-gelu" without the prefix."""
        return str(getattr(self.part(config), self.name)).removeprefix(_GATED)

    def write(self, config: Any, activation: str) -> None:
        part = self.part(config)
        prefix = _GATED if getattr(part, self.name).startswith(_GATED) else ""
        setattr(part, self.name, prefix + activation)

    def __str__(self) -> str:
        return ".".join((*self.path, self.name))


class Own(NamedTuple):
    """An activation that no stock class has, and the keys of a configuration that name it."""

    activation: Activation
    keys: list[Key]


def parts(config: Any) -> dict[tuple[str, ...], Any]:
    """A configuration of transformers and those within it, by the attributes that lead to each."""
    found, seen = dict[tuple[str, ...], Any](), set[int]()
    left: list[tuple[tuple[str, ...], Any]] = [((), config)]
    while left:
        path, part = left.pop(0)
        if id(part) not in seen:
            seen.add(id(part))
            found[path] = part
            left += [((*path, name), value) for name, value in vars(part).items() if hasattr(value, "get_text_config")]
    return found


def keys_naming(config: Any, activations: Container[str]) -> list[Key]:
    """The keys of a configuration of transformers that name one of ``activations``, whatever they are called."""
    return [
        Key(path, name)
        for path, part in parts(config).items()
        for name, value in vars(part).items()
        # the name of the model's folder may be that of an activation
        if isinstance(value, str) and not name.startswith("_") and value.removeprefix(_GATED) in activations
    ]


def as_stock(config: Any) -> Own | None:
    """Name ReLU in a configuration whose activation its class does not have; return what it named, or None.

    Raises ValueError for two such activations, and for FATReLU without a threshold.
    """
    found = keys_naming(config, OWN)
    if not found:
        return None
    named = {(key.read(config), getattr(key.part(config), THRESHOLD_KEY, None)) for key in found}
    if len(named) > 1:
        raise ValueError(f"a configuration must name one activation, got {' and '.join(sorted(map(str, named)))}")
    name, threshold = named.pop()
    if name == "fatrelu" and threshold is None:
        raise ValueError(
            f'a configuration with "fatrelu" must have its threshold, {THRESHOLD_KEY}. A model that was saved while '
            "twell.recipe.TargetThreshold moved the threshold has none: call its settle before save_pretrained or, "
            "to save the threshold of that step, twell.integrations.transformers.name_activation"
        )
    own = Own(activation_of(name, threshold if name == "fatrelu" else 0), found)
    write(config, found, RELU)
    return own


def write(config: Any, keys: Iterable[Key], activation: Activation) -> None:
    """Name an activation at ``keys`` of a configuration of transformers, with the threshold of FATReLU.

    One that moves is not written: nothing reads a configuration that names FATReLU alone.
    """
    for key in keys:
        key.write(config, activation.name)
        _remove_threshold([part := key.part(config)])
        if activation.name == "fatrelu" and not activation.moves:
            setattr(part, THRESHOLD_KEY, float(activation.threshold))


def _remove_threshold(parts: Iterable[Any]) -> None:
    for part in parts:
        vars(part).pop(THRESHOLD_KEY, None)


# A model and the keys of its layers


def find(model: Any, blocks: Iterable[str], key: str | None = None, named: Container[str] = ()) -> list[Key]:
    """The keys of the activation of ``blocks``, names of modules of ``model``: those of ``KEYS``, or ``key``.

    A block has the configuration of the innermost module around it that has one. ``key`` names one of ``named`` and is
    that of all blocks. Raises ValueError if there is no such key, and TypeError unless ``key`` is a string.
    """
    places, config = _places(model), model.config
    if key is None:
        found = dict.fromkeys(each for block in blocks for each in _keys_at(config, places[block]))
        if not found:
            raise ValueError(
                f"{type(config).__name__} must have one of the keys {', '.join(NAMES)}, got none; name it, as in "
                'key="text_config.act"'
            )
        return list(found)
    if not isinstance(key, str):
        raise TypeError(f"key must be a string or None, got {key!r}")
    *before, name = key.split(".")
    path = tuple(before)
    line = next((names for names in KEYS if name in names), (name,))
    # not those of the class, which no file has
    part = vars(known[path]) if path in (known := parts(config)) else {}
    keys = [Key(path, each) for each in line if isinstance(part.get(each), str)]
    if name.startswith("_") or Key(path, name) not in keys or not any(each.read(config) in named for each in keys):
        got = f"{key!r}, which is {part[name]!r}" if name in part else repr(key)
        raise ValueError(f"key must lead to the activation of the layers in {type(config).__name__}, got {got}")
    for block in blocks:
        own = next((each.path for each in _keys_at(config, places[block])), ())
        if places[block][: len(path)] != path or len(own) > len(path):
            raise ValueError(
                f"key must be that of all changed layers, got {key!r}, which is not that of {block}; filter_fn leaves "
                "layers as they are"
            )
    return keys


def _keys_at(config: Any, path: tuple[str, ...]) -> list[Key]:
    """The keys of the part of a configuration at ``path`` or, without any there, of those around it."""
    part = vars(Key(path, "").part(config))
    for names in KEYS:
        if keys := [Key(path, name) for name in names if isinstance(part.get(name), str)]:
            return keys
    return _keys_at(config, path[:-1]) if path else []


def _places(model: Any) -> dict[str, tuple[str, ...]]:
    """The part of the configuration of each module by name: that of the innermost module around it that has one."""
    known = parts(model.config)
    of_object = {id(part): path for path, part in known.items()}
    # T5's halves have copies of the configuration
    of_kind = {type(part): path for path, part in reversed(known.items())}
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        place = found.get(name.rpartition(".")[0], ())
        if (config := _configuration(module)) is not None:
            place = of_object.get(id(config), of_kind.get(type(config), place))
        found[name] = place
    return found


def _configuration(module: nn.Module) -> Any:
    config = vars(module).get("config")
    return config if hasattr(config, "get_text_config") else None


def require_alone(model: Any, keys: Collection[Key], kinds: Collection[Any], is_ours: Callable[[str], bool]) -> None:
    """Raise ValueError if ``keys`` make the activation of a module that is none of those that ``is_ours`` names.

    kinds: the classes of modules, and functions, that ``keys`` make. A module may also keep the word for its forward.
    """
    places, paths = _places(model), {key.path for key in keys}
    words = {"relu" if (word := key.read(model.config)) in OWN else word for key in keys}
    for name, module in model.named_modules():
        if places[name] not in paths:
            continue
        found = [name] if type(module) in kinds else []
        for attribute, value in vars(module).items():
            is_word = isinstance(value, str) and value in words
            is_function = callable(value) and (
                getattr(value, "__name__", None) in words or any(value is each for each in kinds)
            )
            if (is_word or is_function) and not attribute.startswith("_"):
                found.append(f"{name}.{attribute}".removeprefix("."))
        if others := [each for each in found if not is_ours(each)]:
            raise ValueError(
                f"{', '.join(map(str, keys))} of the configuration must be the activation of layers of twell alone, "
                f"got that of {others[0]}, too"
            )


def of_layers(model: Any, key: str | None = None, named: Container[str] = ()) -> list[Key]:
    """The keys of the activation of the twell layers of ``model``. Raises as ``find``."""
    return find(model, [_sparsify.block_of(name, layer) for name, layer in _sparsify.layers(model).items()], key, named)


def is_in_layers(model: nn.Module) -> Callable[[str], bool]:
    """Whether a qualified name is in one of the twell layers of ``model``."""
    inside = tuple(f"{name}." for name in _sparsify.layers(model))
    return lambda name: name.startswith(inside)


def write_to_model(model: Any, keys: list[Key], activation: Activation) -> None:
    """``write`` to the configuration of ``model``, and to copies of it that parts of the model have."""
    for config, theirs in _configurations(model, keys):
        write(config, theirs, activation)


def _configurations(model: Any, keys: list[Key]) -> list[tuple[Any, list[Key]]]:
    """A model's configuration with ``keys``, and copies of it that parts of the model have, as T5's, with theirs."""
    found, known = [(model.config, keys)], parts(model.config)
    done = {id(part) for part in known.values()}
    for config in filter(None, map(_configuration, model.modules())):
        if id(config) not in done:
            done.add(id(config))
            found.append((config, [key._replace(path=()) for key in keys if type(known[key.path]) is type(config)]))
    return found


def layers_of_keys(model: Any, keys: Collection[Key]) -> dict[str, Any]:
    """The twell layers of ``model`` without those whose own keys are others than ``keys`` and name ReLU."""
    places, paths = _places(model), {key.path for key in keys}
    found = {}
    for name, layer in _sparsify.layers(model).items():
        mine = _keys_at(model.config, places[_sparsify.block_of(name, layer)])
        if any(key.path in paths for key in mine) or not any(key.read(model.config) == "relu" for key in mine):
            found[name] = layer
    return found


# Training


def follow(model: nn.Module, moving: bool = False) -> list[Callable[[], None]]:
    """Let the files of each model of transformers that ``model`` is or has name the activation of its twell layers.

    Where the configuration names ReLU or FATReLU; ``sparsify_`` leaves others alone. A threshold that moves is written,
    as it is now, if ``moving``. A model whose configuration cannot name it keeps its configuration, after a warning.
    Returns what takes a threshold out of the configurations again.
    """
    found, inside = list[nn.Module](), set[nn.Module]()
    for module in model.modules():
        is_model = _configuration(module) is not None and hasattr(module, "save_pretrained")
        if is_model and module not in inside:
            inside.update(module.modules())
            if _sparsify.layers(module):
                found.append(module)
    return [_follow(module, moving) for module in found]


def _follow(model: Any, moving: bool) -> Callable[[], None]:
    layer = next(iter(_sparsify.layers(model).values()))
    keys: list[Key] = []
    try:
        keys = of_layers(model)
        require_alone(model, keys, [nn.ReLU], is_in_layers(model))
    except ValueError as error:
        keys = []
        # said when the threshold began to move
        log = logger.debug if moving else logger.warning
        log(
            "the configuration does not name the new activation of layers, and files will not: %s; call "
            "twell.integrations.transformers.name_activation before save_pretrained",
            error,
        )
    if not {key.read(model.config) for key in keys} <= {"relu", "fatrelu"}:
        keys = []
    threshold = float(layer.threshold) if moving else layer.threshold
    write_to_model(model, keys, Activation(layer.activation, threshold))
    named = [key.part(config) for config, theirs in _configurations(model, keys) for key in theirs]
    return functools.partial(_remove_threshold, named)
