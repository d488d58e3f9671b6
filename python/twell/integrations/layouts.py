"""The layout of down projections in checkpoints, and the headers of safetensors files.

Two layouts exist: nn.Linear's, [hidden, intermediate], and its transpose, one row per neuron, in files of the paper's
code and of twell 0.3. The shape decides.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twell.choose.plan import Facts, Route, routed
from twell.choose.site import require_screen
from twell.nn import configuration
from twell.runtime import geometry
from twell.runtime.log import warn_once

# Key of config.json by which version 0.3 described files, "linear" or "rows": a loaded model must not save it. During
# loading it says that down weights may have either layout.
LAYOUT_KEY = "sparsity_down_layout"

# Key of config.json with the measured sparsity of each layer, see ``LayerFigures``.
FIGURES_KEY = "sparsity_figures"

# Attributes of layers that a configuration sets, with this prefix.
_SETTINGS = ("strategy", "screen", "invariant", "compression")
_PREFIX = "sparsity_"

# Keys of the paper's configurations: False for layers without a gate, and their neurons.
UNGATED_KEY, NEURONS_KEY = f"{_PREFIX}gated_mlp", f"{_PREFIX}new_intermediate_size"

# Architectures that always have ReLU, whatever stock activation the configuration names: the stock class of
# configuration, and the model types of twell 0.3 and of the paper's code.
SPARSE = {
    "SparseLlamaForCausalLM": ("LlamaConfig", ("sparse_llama", "llama_sparse_relu")),
    "SparseQwen2ForCausalLM": ("Qwen2Config", ("sparse_qwen2", "qwen2_sparse_relu")),
}

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DOWN = re.compile(r"(?:^|\.)down_proj\.weight$|(?:^|\.)decoder\.layers\.\d+\.fc2\.weight$")
_ARGUMENT = re.compile(r'\b(strategy|invariant|screen)=("\w+"|True)')


def stock_of_sparse(content: Mapping[str, Any]) -> str | None:
    """The class of configuration that reads files of twell 0.3 and of the paper's code; None of other models."""
    kind, named = content.get("model_type"), content.get("architectures") or ()
    theirs = UNGATED_KEY in content or NEURONS_KEY in content
    for architecture, (stock, (own, paper)) in SPARSE.items():
        if kind in (own, paper) or architecture in named or (theirs and kind == own.removeprefix("sparse_")):
            return stock
    return None


def as_stock(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a sparse model's configuration for its stock class, which has ReLU; the marker stays, or is None.

    A stock activation that it names is ignored, which is logged once. Raises ValueError for layers without a gate.
    """
    if not content.get(UNGATED_KEY, True):
        raise ValueError(f"layers must have a gate, as stock classes do, got {UNGATED_KEY} = False")
    left_out = ("model_type", "auto_map", NEURONS_KEY, UNGATED_KEY)
    fields = {key: value for key, value in content.items() if key not in left_out}
    fields |= {LAYOUT_KEY: content.get(LAYOUT_KEY), "intermediate_size": intermediate_size(content)}
    if said := ignored(content):
        warn_once(said)
    if activation(content) not in configuration.OF_SPARSE:
        fields["hidden_act"] = "relu"
    return fields


def ignored(content: Mapping[str, Any]) -> str:
    """What is wrong with the activation that a sparse model's configuration names; "" if nothing."""
    stated = activation(content)
    known = stated in (None, "relu", *configuration.OF_SPARSE)
    return "" if known else f"the layers apply ReLU; the configuration says {stated!r}, which is ignored"


def settings_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of layers that a configuration sets. Raises TypeError or ValueError, by the names of its keys."""
    found = {name: content[_PREFIX + name] for name in _SETTINGS if _PREFIX + name in content}
    try:
        _routed(found)
        require_screen(found.get("screen", "auto"))
        geometry.words_per_tile(found.get("compression", 8))
    except (TypeError, ValueError) as error:
        said = _ARGUMENT.sub(lambda match: f'"{_PREFIX}{match[1]}": {match[2].lower()}', str(error))
        raise type(error)(_PREFIX + said) from error
    return found


def route_of(content: Mapping[str, Any]) -> Route:
    """What a configuration asks of its layers. Raises as ``settings_of``."""
    return _routed(settings_of(content))


def _routed(found: Mapping[str, Any]) -> Route:
    strategy, invariant = found.get("strategy", "auto"), found.get("invariant", False)
    screen = strategy == found.get("screen", "auto") == "auto" and not invariant
    return routed(Facts(strategy=strategy, invariant=invariant, screen=screen))


class LayerFigures(NamedTuple):
    """The sparsity of a layer in a configuration: an entry of ``FIGURES_KEY`` has these three numbers.

    nonzeros: mean per token. text, batch: mean shares of the neurons that 128 tokens fire which follow each other in a
    text, as in a prompt, and which come from many texts, as in a batch that decodes.
    """

    nonzeros: float
    text: float
    batch: float


def is_down(name: str) -> bool:
    """Whether ``name`` is a down projection's weight: any ``down_proj.weight``, or OPT's ``decoder.layers.N.fc2``."""
    return _DOWN.search(name) is not None


def lies_by_rows(shape: Sequence[int], hidden: int, intermediate: int, *, name: str = "") -> bool:
    """Whether a down weight of ``shape``, in a layer of these sizes, is [intermediate, hidden].

    Raises ValueError, with ``name``, for another shape, and for a square one, of which nothing is guessed.
    """
    linear, rows, where = [hidden, intermediate], [intermediate, hidden], f"{name}: " if name else ""
    if linear == rows or list(shape) not in (linear, rows):
        expected = f"the down weight must be {linear} or {rows}, whose order tells the layout"
        raise ValueError(f"{where}{expected}, got {list(shape)}")
    return list(shape) == rows


def intermediate_size(config: Mapping[str, Any]) -> int | None:
    """The neurons of an FFN from a configuration; the paper's own key comes before those of the base model."""
    for key in (NEURONS_KEY, "intermediate_size", "ffn_dim"):
        if isinstance(size := config.get(key), int):
            return size
    return None


def activation(config: Mapping[str, Any]) -> str | None:
    """The activation that a configuration names; None if it names none."""
    return next((name for key in configuration.NAMES if isinstance(name := config.get(key), str)), None)


def measured(config: Mapping[str, Any], layers: int) -> list[LayerFigures] | None:
    """The figures of each of ``layers`` layers that a configuration has; None without.

    Raises ValueError unless each layer has its three, with non-zeros from 0 to the neurons that the configuration
    names and shares from 0 to 1.
    """
    entries = config.get(FIGURES_KEY)
    if entries is None:
        return None
    if not isinstance(entries, list) or len(entries) != layers:
        got = f"{len(entries)} entries" if isinstance(entries, list) else repr(entries)
        raise ValueError(f"{FIGURES_KEY} must be a list with an entry for each of the {layers} layers, got {got}")
    neurons = intermediate_size(config)
    most = sys.float_info.max if neurons is None else neurons
    for entry in entries:
        if not (isinstance(entry, list) and len(entry) == 3 and all(map(_within, entry, (most, 1, 1)))):
            up_to = "" if neurons is None else f" of up to {neurons:,} non-zeros"
            raise ValueError(f"{FIGURES_KEY} must have [non-zeros, share, share]{up_to} for each layer, got {entry!r}")
    return [LayerFigures(*map(float, entry)) for entry in entries]


def _within(number: object, most: float) -> bool:
    """Whether this is a number from 0 to ``most``; NaN and booleans are not."""
    return isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number <= most


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder: the single one, or those in the index.

    Raises FileNotFoundError if there is neither or a file of the index is missing, and ValueError for a broken index.
    """
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not index.is_file():
        raise FileNotFoundError(f"expected {SINGLE} or {INDEX} in {str(folder)!r}, got neither")
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries or not all(isinstance(name, str) for name in entries.values()):
        raise ValueError(f'{str(index)!r} must have a "weight_map" of tensor names to files, got {entries!r}')
    files = [folder / name for name in sorted(set(entries.values()))]
    for path in files:
        # an index comes from elsewhere: its names must not lead out of its folder
        if path.parent != folder or path.name in ("", ".", ".."):
            raise ValueError(f"{str(index)!r} must name files beside it, got {str(path)!r}")
        if not path.is_file():
            raise FileNotFoundError(f"{str(index)!r} names {path.name!r}, which is not there")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, naming the file, if it has none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} must be a JSON object, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} must be a JSON object, got {type(content).__name__}")
    return content


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype, as safetensors names it, and the shape of each tensor of a safetensors file, without reading them.

    Raises ValueError if it is not a sound safetensors file, ImportError if safetensors is missing.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("reading checkpoints needs safetensors: pip install 'twell[hf]'") from None
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} must be a safetensors file, got {error}") from None
