"""How checkpoints store weights in e4m3: what their configuration says of a module, and its tensors as a ``Float8``.

The layouts, by the configuration's keys; each weight is ``weight`` [out, in], and each scale multiplies:

- compressed-tensors: FP8_DYNAMIC ("channel"), FP8 ("tensor", static inputs) and FP8_BLOCK, with ``weight_scale``
- ``quant_method: fp8``: one scale, or with ``weight_block_size`` blocks and ``weight_scale_inv``
- ModelOpt, in config.json or hf_quant_config.json: FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO, with ``weight_scale``

Lists of modules that stay in 16 bits are read as their writers mean them. All else is refused with what was found.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.float8 import BLOCK, Float8, Granularity, float8

# objects of a config.json or hf_quant_config.json that describe the weights; the second is an older name
_KEYS = ("quantization_config", "compression_config", "quantization")
_MARKS = ("quant_method", "quant_algo", "config_groups")
_STRATEGIES: dict[Any, Granularity] = {"channel": "row", "tensor": "tensor", "block": "block"}
_FORMATS = (None, "float-quantized", "naive-quantized", "mixed-precision")
# quantised when used, but not in files
_SIXTEEN = ("dense", "fakequant")
_INPUT = ("input_scale",)


class Scheme(NamedTuple):
    """A weight in e4m3 in a checkpoint, and the names that the tensor of its scales may have beside ``weight``.

    inputs: likewise of the static scale of the inputs; empty where these are quantised by token as they come.
    """

    granularity: Granularity
    scale: tuple[str, ...] = ("weight_scale",)
    inputs: tuple[str, ...] = ()


_MODELOPT = {"FP8": Scheme("tensor", inputs=_INPUT)}
_MODELOPT |= {"FP8_PER_CHANNEL_PER_TOKEN": Scheme("row"), "FP8_PB_WO": Scheme("block")}


def how(configuration: Mapping[str, Any] | None, name: str) -> Scheme | None:
    """How the checkpoint stores the weight of the linear module ``name``; None if in 16 bits.

    ``configuration``: the content of config.json or of ModelOpt's hf_quant_config.json, or its part on quantisation.
    ``name`` as in the files, such as "model.layers.0.mlp.up_proj". Raises NotImplementedError for weights that are
    neither, saying what they are, and ValueError for a broken configuration.
    """
    settings = _settings(configuration or {})
    method = settings.get("quant_method") or ""
    method = method.lower() if isinstance(method, str) else repr(method)
    if "quant_algo" in settings or method.startswith("modelopt"):
        return _of_modelopt(settings, name)
    if method == "compressed-tensors" or "config_groups" in settings:
        return _of_compressed_tensors(settings, name)
    skipped = _listed(settings, "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
    if not method or any(_is_skipped(name, pattern) for pattern in skipped):
        return None
    if method == "fp8":
        return _of_fp8(settings, name)
    raise _refused(name, f"quant_method {method}")


def weight_of(scheme: Scheme, tensors: Mapping[str, Tensor]) -> tuple[Float8, Tensor | None]:
    """The weight of a module, and the static scale of its inputs, float32 [] (experts [E]), where it has one.

    ``tensors``: those of the module by the last part of their names, "weight" among them. Raises ValueError and
    TypeError if they are not what ``scheme`` says, as ``float8``.
    """
    found = _record(tensors, scheme.scale, scheme.granularity)
    return found, _record(tensors, scheme.inputs, "tensor").scale if scheme.inputs else None


def _record(tensors: Mapping[str, Tensor], names: tuple[str, ...], kind: Granularity) -> Float8:
    """The weight with the scale of one of these names."""
    scale = next((tensors[name] for name in names if name in tensors), None)
    if scale is None or "weight" not in tensors:
        raise ValueError(f"a weight in e4m3 must be weight and {' or '.join(names)}, got {', '.join(sorted(tensors))}")
    if scale.dtype == torch.uint8:
        # exponents, from writers without the dtype
        scale = scale.view(torch.float8_e8m0fnu)
    try:
        return float8(tensors["weight"], scale, kind)
    except (TypeError, ValueError) as error:
        raise type(error)(f"weight with {' or '.join(names)}: {error}") from None


def _settings(configuration: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration on quantisation; empty if there is none."""
    if any(key in configuration for key in _MARKS):
        return configuration
    for key in _KEYS:
        if isinstance(found := configuration.get(key), Mapping):
            return found
    text = configuration.get("text_config")
    return _settings(text) if text else {}


def _of_modelopt(settings: Mapping[str, Any], name: str) -> Scheme | None:
    for pattern in _listed(settings, "exclude_modules", "ignore"):
        # wildcards, or in older files the name of a module or of one around it
        if fnmatchcase(name, pattern) or name.startswith(pattern + "."):
            return None
    algorithm = settings.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        algorithm = settings.get("quantized_layers", {}).get(name, {}).get("quant_algo")
    if algorithm is None:
        return None
    if str(algorithm).upper() not in _MODELOPT:
        raise _refused(name, f"quant_algo {algorithm}")
    return _MODELOPT[str(algorithm).upper()]


def _of_compressed_tensors(settings: Mapping[str, Any], name: str) -> Scheme | None:
    groups = settings.get("config_groups") or {}
    if not all(isinstance(group, Mapping) for group in groups.values()):
        raise ValueError(f"config_groups must have an object for each group, got {groups!r}")
    closest = ((_closeness(name, target), group) for group in groups.values() for target in _listed(group, "targets"))
    closeness, group = max(closest, key=lambda each: each[0], default=(0, dict[str, Any]()))
    weights, inputs = group.get("weights"), group.get("input_activations")
    form = group.get("format") or settings.get("format")
    ignored = any(_closeness(name, pattern) for pattern in _listed(settings, "ignore"))
    if ignored or not closeness or weights is None or form in _SIXTEEN:
        return None
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    strategy, dynamic = weights.get("strategy"), (inputs or {}).get("dynamic", False)
    if not _is_e4m3(weights) or strategy not in _STRATEGIES or weights.get("dynamic") or form not in _FORMATS:
        raise _refused(name, f"weights of {_said(weights)} in format {form}")
    if sparse != "dense" or (settings.get("transform_config") or {}).get("config_groups"):
        raise _refused(name, "inputs rotated by transform_config" if sparse == "dense" else f"format {sparse}")
    if strategy == "block":
        _require_blocks(name, weights.get("block_structure"))
    if inputs is None or not _is_e4m3(inputs):
        raise _refused(name, f"inputs of {_said(inputs) if inputs else '16 bits'}")
    if dynamic is not True and (dynamic or strategy == "block" or inputs.get("strategy") != "tensor"):
        raise _refused(name, f"static inputs of {_said(inputs)} with weights by {strategy}")
    return Scheme(_STRATEGIES[strategy], inputs=() if dynamic else _INPUT)


def _of_fp8(settings: Mapping[str, Any], name: str) -> Scheme:
    static, size = settings.get("activation_scheme") == "static", settings.get("weight_block_size")
    if size is None:
        inputs = (*_INPUT, "activation_scale") if static else ()
        return Scheme("tensor", ("weight_scale", "weight_scale_inv"), inputs)
    _require_blocks(name, size)
    if static:
        raise _refused(name, "blocks with static inputs")
    return Scheme("block", ("weight_scale_inv",))


def _refused(name: str, found: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} must be in bfloat16, or weights and inputs in e4m3 with a scale by row, tensor or block of {BLOCK} x "
        f"{BLOCK}, got {found}: take a checkpoint in bfloat16 or in such a format, as FP8_DYNAMIC of compressed-tensors"
    )


def _require_blocks(name: str, size: Any) -> None:
    # older files have "128x128"
    if size not in ([BLOCK, BLOCK], (BLOCK, BLOCK), f"{BLOCK}x{BLOCK}"):
        raise _refused(name, f"blocks of {size}")


def _is_e4m3(numbers: Mapping[str, Any]) -> bool:
    """Whether an entry of compressed-tensors means e4m3 without an offset."""
    return (numbers.get("num_bits"), numbers.get("type"), numbers.get("symmetric", True)) == (8, "float", True)


def _said(numbers: Mapping[str, Any]) -> str:
    offset = "" if numbers.get("symmetric", True) else " with offsets"
    return f"{numbers.get('num_bits')}-bit {numbers.get('type')}{offset} by {numbers.get('strategy')}"


def _listed(settings: Mapping[str, Any], *keys: str) -> list[str]:
    """The names in lists under any of these keys. Raises ValueError for anything else there."""
    found: list[str] = []
    for key in keys:
        names = settings.get(key) or []
        if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) for each in names):
            raise ValueError(f"{key} must be a list of names, got {names!r}")
        found += names
    return found


def _is_skipped(name: str, pattern: str) -> bool:
    """Whether transformers takes a pattern for this module: as its end, or a regular expression of whole parts."""
    return name.endswith(pattern) or _begins(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name)


def _closeness(name: str, target: str) -> int:
    """How closely a target of compressed-tensors means this linear module: 3 by its name, 2, 1 by its class, or 0."""
    if target.startswith("re:"):
        return 2 if _begins(target[3:], name) else 0
    return 3 if target == name else int(target == "Linear")


def _begins(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"names of modules must be regular expressions, got {pattern!r}: {error}") from None
