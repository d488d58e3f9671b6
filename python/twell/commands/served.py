"""A checkpoint as a server would load it: its gated layers by the headers of its files, and what it asks for."""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twell.base.activation import NAMES_OF_FAMILY, activation_of
from twell.choose.plan import PACKED_DTYPES, Facts, Route, unpackable
from twell.commands import saved_model
from twell.commands.request import RequestError
from twell.integrations import layouts, vllm
from twell.integrations.analyze.figures import LayerSparsity
from twell.integrations.sparsify.quantised import SCALES, require_e4m3
from twell.nn import configuration, record
from twell.ops.float8 import granularity_of

# Names in headers of safetensors files; vLLM turns weights of 32 bits to 16.
_DTYPES = ("BF16", "F16", "F32")
_E4M3 = "F8_E4M3"
# where ModelOpt says how weights are quantised, if config.json does not
_MODELOPT = "hf_quant_config.json"

_UP = re.compile(r"(?P<layer>(?:^|.*\.)(?P<number>\d+)\..*)up_proj\.weight$")


def read(folder: Path, content: dict[str, Any], ranks: int) -> tuple[list[LayerSparsity], Route, list[str]]:
    """The layers of a checkpoint without figures, what its configuration asks for, and lines about both."""
    lines = [_served(content)]
    try:
        record.require_named(content)
        # predictions know no candidates, and so no screen
        requested = layouts.route_of(content)._replace(screen=False)
        found, dtypes = layers_of(folder, content)
    except (FileNotFoundError, NotImplementedError, TypeError, ValueError) as error:
        raise error if isinstance(error, RequestError) else RequestError(f"MODEL: {error}") from error
    _require_stated(found, content)
    parts = {layer.n: "neurons" for layer in found}
    if isinstance(heads := content.get("num_attention_heads"), int):
        parts[heads] = "attention heads"
    for number, what in parts.items():
        if number % ranks:
            raise RequestError(f"--ranks: expected a divisor of the {number} {what}, got {ranks}")
    for i, layer in enumerate(found):
        facts = Facts("sizes of a rank", n=layer.n // ranks, k=layer.k, float8=layer.float8)
        if not layer.reason and (refusal := unpackable(facts, instead="")):
            found[i] = dataclasses.replace(layer, reason=refusal.message)
    lines[0] += "" if all(layer.reason for layer in found) else ", through twell"
    for reason, count in Counter(layer.reason for layer in found if layer.reason).items():
        lines.append(f"{count} of {len(found)} layers run as without twell: {reason}")
    if count := sum(layer.float8 for layer in found):
        lines.append(f"{count} of {len(found)} layers have weights in e4m3: so has their dense, which copies no weight")
    if "F32" in dtypes:
        lines.append("Its weights are 32-bit: vLLM turns them to 16; with --dtype float32 they run as without twell")
    if requested.invariant:
        lines.append('Strategy: "row" with sparsity_invariant of the configuration, with the times of "row" without')
    elif requested.strategy != "auto":
        lines.append(f'Strategy: "{requested.strategy}", sparsity_strategy of the configuration')
    return found, requested, lines


def _served(content: dict[str, Any]) -> str:
    """How vLLM serves a model of this configuration through twell, in words. Raises RequestError if it does not."""
    named = content.get("architectures") or []
    if not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise RequestError(f"MODEL: architectures must be a list of names, got {named!r}")
    activation, key = layouts.activation(content), configuration.THRESHOLD_KEY
    if activation == "fatrelu":
        if (threshold := content.get(key)) is None:
            raise RequestError(f'MODEL: a configuration with "fatrelu" must have its threshold, {key}')
        try:
            for dtype in PACKED_DTYPES:
                activation_of("fatrelu", threshold).level(dtype)
        except (TypeError, ValueError) as error:
            raise RequestError(f"MODEL: {key}: {error}") from error
    if sparse := [name for name in named if name in vllm.SPARSE]:
        if not content.get("sparsity_gated_mlp", True):
            raise RequestError("MODEL: expected layers with a gate, which vLLM serves through twell, got none")
        if activation in configuration.OF_SPARSE:
            return f"vLLM serves {sparse[0]} with {NAMES_OF_FAMILY[activation]}"
        lie = "" if activation == "relu" else f" (its configuration says {activation!r}, which is ignored)"
        return f"vLLM serves {sparse[0]} with ReLU{lie}"
    alike = [name for name in named if name in vllm.LLAMA_LIKE]
    if alike and activation in vllm.ACTIVATIONS:
        return f"vLLM serves {alike[0]} with {NAMES_OF_FAMILY[activation]}"
    said = f"vLLM serves it without twell{f'; {saved_model.TRAINING}' if alike else ''}"
    if activation in vllm.ACTIVATIONS:
        said = "vLLM may serve it through twell, but only layers with a gate of these models are predicted"
    expected = f"{', '.join(vllm.SPARSE)} or a Llama-like model with {', '.join(vllm.ACTIVATIONS)}"
    got = f"{', '.join(named) or 'no architectures'} with {activation!r}"
    raise RequestError(f"MODEL: expected {expected}, got {got}: {said}")


# Keys of a quantised checkpoint that name what is not.
_LEFT_OUT = ("ignore", "modules_to_not_convert", "exclude_modules")


def layers_of(folder: Path, content: dict[str, Any]) -> tuple[list[LayerSparsity], set[str]]:
    """The gated layers of a checkpoint with this configuration and their dtypes, from the headers of its files."""
    paths = layouts.weight_files(folder)
    tensors = {name: stored for path in paths for name, stored in layouts.read_header(path).items()}
    # files of other formats have other names and shapes
    quantised = content.get("quantization_config") or content.get("compression_config")
    if not quantised and (folder / _MODELOPT).is_file():
        quantised = layouts.read_json(folder / _MODELOPT).get("quantization")
    quantised = quantised if isinstance(quantised, dict) else {}
    for group in (quantised.get("config_groups") or {}).values():
        if isinstance(group, dict) and (group.get("weights") or {}).get("num_bits") == 8:
            require_e4m3("its layers", group)
    by = quantised.get("quant_algo") or quantised.get("quant_method")
    found, used = [], set()
    for name, up in tensors.items():
        match = _UP.match(name)
        if match is None:
            continue
        form = None
        for which in ("gate", "up", "down"):
            projection = f"{match['layer']}{which}_proj"
            weight, kind = tensors.get(f"{projection}.weight"), ""
            scale = next((tensors[key] for each in SCALES if (key := f"{projection}.{each}") in tensors), None)
            if quantised and weight is not None and weight[0] == _E4M3 and scale is not None:
                kind = granularity_of(weight[1], scale[1]) or "other shape"
            if weight is None or len(weight[1]) != 2 or 0 in weight[1]:
                got = "none" if weight is None else str(list(weight[1]))
                got += f" in a checkpoint by {by}" if by else ""
                said = f"{projection}.weight must be a matrix of at least one row and column, got {got}"
            elif weight[0] not in _DTYPES and not kind:
                expected = f"{' or '.join(_DTYPES)}, or {_E4M3} with a scale, for vLLM to serve it through twell"
                said = f"{projection}.weight must be {expected}, got {weight[0]}{f' by {by}' if by else ''}"
            elif by and not kind and not any(quantised.get(key) for key in _LEFT_OUT):
                said = f"{projection}.weight must be {_E4M3} for vLLM to serve it through twell, got {weight[0]}"
            elif form not in (None, kind):
                got = f"scales by {kind or 'none'} and by {form or 'none'}"
                said = f"{projection} must be quantised as the projections beside it, which vLLM merges, got {got}"
            else:
                form = kind
                continue
            raise RequestError(f"MODEL: {said}")
        reason = ""
        if form not in ("", "row", "tensor"):
            reason = f"weights in e4m3 must have a scale for each row, or one in all, got scales of {form}s"
        elif form and content.get("dtype", content.get("torch_dtype")) == "float16":
            reason = "the model must be in bfloat16 with weights in e4m3, got float16"
        dtype, (n, k) = up
        down = f"{match['layer']}down_proj.weight"
        either = bool(set(content.get("architectures") or ()) & set(vllm.SPARSE))
        # square files of stock classes have one layout
        rows = (either or list(tensors[down][1]) != [k, n]) and layouts.lies_by_rows(tensors[down][1], k, n)
        if rows and not either:
            expected = f"[hidden, intermediate], as nn.Linear stores them, except for {' and '.join(vllm.SPARSE)}"
            got = "[intermediate, hidden]; load and save_pretrained of twell.integrations.transformers turn them"
            raise RequestError(f"MODEL: {down}: vLLM reads down weights {expected}, got {got}")
        where = match["layer"].rstrip("."), int(match["number"])
        found.append(LayerSparsity(*where, True, k, n, float8=dtype == _E4M3, reason=reason))
        used.add(dtype)
    if by and not found:
        raise RequestError(f"MODEL: weights must be {' or '.join(_DTYPES)} or {_E4M3}, got a checkpoint by {by}")
    return sorted(found, key=lambda layer: layer.number), used


def _require_stated(found: Sequence[LayerSparsity], content: dict[str, Any]) -> None:
    """Raise RequestError unless the layers are those that the configuration states."""
    if not found:
        raise RequestError("MODEL: expected layers with gate_proj and up_proj, got none")
    for one, other in itertools.pairwise(found):
        if one.number == other.number:
            raise RequestError(f"MODEL: each layer must have a number of its own, got {one.name} and {other.name}")
    count = content.get("num_hidden_layers", len(found))
    numbers = [layer.number for layer in found]
    if count != len(found) or numbers != list(range(len(found))):
        expected = f"the layers of the configuration, num_hidden_layers = {count!r}"
        layers = f"{len(found)} layers from {numbers[0]} to {numbers[-1]}"
        raise RequestError(f"MODEL: files must have {expected}, got {layers}")
    stated = {"hidden_size": content.get("hidden_size"), "intermediate_size": layouts.intermediate_size(content)}
    for layer in found:
        for (key, value), got in zip(stated.items(), (layer.k, layer.n)):
            if value not in (None, got):
                raise RequestError(f"MODEL: {layer.name} must have the configuration's {key}, {value!r}, got {got}")
