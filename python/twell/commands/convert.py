"""``twell convert``: checkpoints with down projections as nn.Linear stores them, or of another model type."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from twell import _configuration, _files
from twell.commands.checkpoint_files import DTYPES, WEIGHTS, Source, WeightsFile, read_source
from twell.integrations import layouts
from twell.integrations.layouts import CONFIG, LAYOUT_KEY, LAYOUTS, OWN_KEYS, DownLayout

DESCRIPTION = """\
Convert the down projections of a ReLU checkpoint to the layout of nn.Linear, [hidden, intermediate], which every loader
reads; some checkpoints have [intermediate, hidden]. SRC is a Hugging Face folder or a .safetensors file. Other tensors
and files are copied unchanged, links to files as files; weights in other formats and links to folders are left out. The
shape tells the layout; a square weight needs the marker that this command writes, or --source-layout. DST appears once
it is complete.
"""

ModelType = Literal["keep", "llama", "sparse_llama", "qwen2", "sparse_qwen2"]
# the class of each model type to convert to, and the model types that share its tensor names
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "sparse_llama": "SparseLlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "sparse_qwen2": "SparseQwen2ForCausalLM",
}
_FAMILIES = {
    "llama": ("llama", "sparse_llama", "llama_sparse_relu"),
    "qwen2": ("qwen2", "sparse_qwen2", "qwen2_sparse_relu"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="folder of a model, or a file of weights")
    parser.add_argument("target", type=Path, metavar="DST", help="folder or .safetensors file to write")
    parser.add_argument(
        "--model-type",
        choices=("keep", *_ARCHITECTURES),
        default="keep",
        help="rewrite config.json with hidden_act relu; sparse_* need twell.integrations.transformers (%(default)s)",
    )
    parser.add_argument(
        "--source-layout", choices=LAYOUTS, help="layout of SRC's square down weights, overriding any marker"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")


def run(arguments: argparse.Namespace) -> int:
    convert(**{name: value for name, value in vars(arguments).items() if name != "command"})
    return 0


def convert(
    source: Path,
    target: Path,
    *,
    model_type: ModelType = "keep",
    source_layout: DownLayout | None = None,
    dry_run: bool = False,
) -> None:
    """Run ``twell convert``: print the plan to stdout, and progress to stderr if that is a terminal.

    At most one tensor and its copy are in memory. Raises ValueError if a checkpoint cannot be converted, OSError if
    reading or writing fails, ImportError without safetensors or tqdm; ``target`` is then as before.
    """
    target = Path(os.path.realpath(target))
    _require_apart(source, target)
    checkpoint = read_source(source)
    plan = _plan(checkpoint, model_type, source_layout)
    _require_new(target)
    _print(checkpoint, plan, source, target)
    if checkpoint.config is not None and (activation := _activation(checkpoint.config)) != "relu":
        got = f"has the activation {activation!r}" if activation else "does not name its activation"
        print(f"warning: {CONFIG} {got}: twell's layers apply ReLU and load no other model", file=sys.stderr)
    for left in _files.leftovers(target):
        print(f"note: {left} was left by a conversion that was interrupted; remove it", file=sys.stderr)
    if not dry_run:
        _write(checkpoint, plan, target)


@dataclass(frozen=True)
class _Target:
    """A file to write: its metadata, and the down weights of its source that are turned."""

    metadata: dict[str, str]
    turned: list[str]


@dataclass(frozen=True)
class _Plan:
    """``layouts``: of the down weights of SRC, by name."""

    files: list[_Target]
    config: dict[str, Any] | None
    layouts: dict[str, DownLayout]


def _plan(source: Source, model_type: ModelType, source_layout: DownLayout | None) -> _Plan:
    shapes = source.shapes()
    if source_layout is not None:
        try:
            stored = layouts.layouts(shapes, (source.config or {}) | {LAYOUT_KEY: source_layout})
        except ValueError as error:
            raise ValueError(f"--source-layout {source_layout}: {error}") from None
    else:
        metadata = {name: file.header.metadata for file in source.files for name in file.header.tensors}
        stored = layouts.layouts(shapes, source.config, metadata)
    if not stored:
        some = ", ".join(list(shapes)[:3]) or "no tensors at all"
        raise ValueError(f"SRC must have down projections (down_proj.weight, or fc2.weight of OPT), got {some}")
    # only square weights need a marker
    marker: DownLayout | None = "linear" if any(shapes[name][0] == shapes[name][1] for name in stored) else None
    config = None
    if source.config is not None:
        config = _config(source.config, model_type, _sizes(shapes, stored), shapes)
        # the sparse classes always have the marker
        config = _marked(config, "linear" if str(config.get("model_type")).startswith("sparse_") else marker)
    elif model_type != "keep":
        raise ValueError(f"--model-type {model_type} rewrites config.json: expected a folder, got a file of weights")
    return _Plan([_target(file, stored, marker) for file in source.files], config, stored)


def _target(file: WeightsFile, stored: Mapping[str, DownLayout], marker: DownLayout | None) -> _Target:
    turned = [name for name in file.header.tensors if stored.get(name) == "rows"]
    for name in turned:
        if (dtype := file.header.tensors[name].dtype) not in DTYPES:
            # a quantised weight has scales along one of its sides
            raise ValueError(f"{name} must be of {', '.join(DTYPES)} to be transposed, got {dtype}")
    holds_down = any(name in stored for name in file.header.tensors)
    return _Target(_marked(file.header.metadata or {}, marker if holds_down else None), turned)


def _marked(mapping: Mapping[str, Any], marker: DownLayout | None) -> dict[str, Any]:
    """``mapping`` with the marker, or without one, all other keys unchanged."""
    if marker is None:
        return {key: value for key, value in mapping.items() if key != LAYOUT_KEY}
    return {**mapping, LAYOUT_KEY: marker}


def _sizes(shapes: Mapping[str, Sequence[int]], stored: Mapping[str, DownLayout]) -> set[int]:
    """The numbers of neurons of the layers."""
    return {shapes[name][0 if layout == "rows" else 1] for name, layout in stored.items()}


def _config(
    config: Mapping[str, Any], model_type: ModelType, sizes: set[int], names: Mapping[str, object]
) -> dict[str, Any]:
    """The configuration of a model of ``model_type`` on tensors ``names``. Raises ValueError if there is none."""
    if model_type == "keep":
        return dict(config)
    if model_type.startswith("sparse_") and config.get("quantization_config") is not None:
        raise ValueError(f"--model-type {model_type}: expected weights of 16 or 32 bits, got a quantization_config")
    was = str(config.get("model_type"))
    (family,) = (known for known, types in _FAMILIES.items() if model_type in types)
    if was not in _FAMILIES[family]:
        expected = ", ".join(_FAMILIES[family])
        raise ValueError(f"--model-type {model_type}: expected a model of type {expected}, got {was!r}")
    if _activation(config) != "relu":
        raise ValueError(
            f'--model-type {model_type} means ReLU: expected a model trained with it (hidden_act "relu", or '
            f"sparsity_* keys), got hidden_act {config.get('hidden_act')!r}"
        )
    architectures = config.get("architectures") or []
    if any(not name.endswith("ForCausalLM") for name in architectures):
        raise ValueError(f"--model-type {model_type}: expected a model ...ForCausalLM, got {architectures}")
    gates = [name.replace("down_proj", "gate_proj") for name in names if layouts.is_down(name)]
    missing = [gate for gate in gates if gate not in names]
    gated = not missing
    if missing and (model_type == family or len(missing) < len(gates)):
        raise ValueError(f"--model-type {model_type} has gated layers: expected {missing[0]}, got none")
    if len(sizes) != 1:
        raise ValueError(f"--model-type {model_type} has one intermediate_size: got layers of {sorted(sizes)} neurons")
    biased = any(re.search(r"\.mlp\.\w+_proj\.bias$", name) for name in names)
    if family == "qwen2" and biased:
        raise ValueError(f"--model-type {model_type} has no biases in its FFN, got some")
    # auto_map names code of the checkpoint, which would take precedence over the class
    new = {key: value for key, value in config.items() if key != "auto_map"}
    new |= {"model_type": model_type, "architectures": [_ARCHITECTURES[model_type]], "hidden_act": "relu"}
    new["intermediate_size"] = next(iter(sizes))
    if family == "llama" and (biased or "mlp_bias" in new):
        new["mlp_bias"] = biased
    if "sparsity_gated_mlp" in new or not gated:
        new["sparsity_gated_mlp"] = gated
    return new


def _activation(config: Mapping[str, Any]) -> str | None:
    """The activation of the layers in a configuration, None if it names none."""
    # the paper's classes, known by their keys, run ReLU whatever stock activation hidden_act names
    if any(key.startswith("sparsity_") and key not in OWN_KEYS for key in config):
        own = layouts.activation(config)
        return own if own in _configuration.OF_SPARSE else "relu"
    for part in (config.get("text_config"), config):
        if isinstance(part, Mapping) and (named := layouts.activation(part)):
            return named
    return "relu" if str(config.get("model_type")).startswith("sparse_") else None


def _require_apart(source: Path, target: Path) -> None:
    """Raise ValueError if one of SRC and DST is in the other, or if one is a file and the other a folder."""
    start = Path(os.path.realpath(source))
    if _is_in(target, start) or _is_in(start, target):
        raise ValueError(f"DST must be apart from SRC, got {str(target)!r} and {str(start)!r}")
    if source.is_file():
        if target.suffix != ".safetensors":
            raise ValueError(f"DST must be a .safetensors file if SRC is a file, got {str(target)!r}")
        if target.exists() and not target.is_file():
            raise ValueError(f"DST must be a file to write, got {str(target)!r}, a folder or a device")
    elif target.exists() and not target.is_dir():
        raise ValueError(f"DST must be a folder if SRC is one, got {str(target)!r}")
    elif not target.exists() and target.suffix in WEIGHTS:
        raise ValueError(
            f"DST must be a folder if SRC is one, got {str(target)!r}, the name of a file; an existing folder may have "
            "any name"
        )


def _is_in(path: Path, folder: Path) -> bool:
    """Whether ``path`` is ``folder`` or in it; names do not count, since a folder may be mounted at several."""
    return folder.exists() and any(each.exists() and each.samefile(folder) for each in (path, *path.parents))


def _require_new(target: Path) -> None:
    """Raise ValueError if DST exists, except for an empty folder."""
    if target.is_dir() and any(target.iterdir()):
        raise ValueError(f"DST must be new or empty, got {str(target)!r} with {min(target.iterdir()).name!r}")
    if target.exists() and not target.is_dir():
        raise ValueError(f"DST must be a new file, got {str(target)!r}, a file that exists")


def _write(source: Source, plan: _Plan, target: Path) -> None:
    """Write all of ``plan`` beside ``target``, then rename it to ``target`` if that is still new."""
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError("twell convert needs tqdm: pip install 'twell[hf]'") from None
    total = source.nbytes()
    needed = total + sum(path.stat().st_size for path in source.others.values())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(target.parent).free) < needed:
            raise ValueError(f"DST needs {_size(needed)}, got {_size(free)} free in {str(target.parent)!r}")
        with (
            closing(tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="convert")) as bar,
            _files.replacing(target) as partial,
        ):
            if source.config is None:
                _write_file(source.files[0], plan.files[0], partial, bar.update)
            else:
                partial.mkdir()
                for file, new in zip(source.files, plan.files):
                    _write_file(file, new, partial / file.path.name, bar.update)
                _write_rest(source, plan, partial)
            # something may have appeared there in the meantime
            _require_new(target)
    except OSError as error:
        if _files.is_full(error):
            raise ValueError(
                f"no space left in {str(target.parent)!r}: DST needs {_size(needed)}; nothing there has changed"
            ) from error
        raise


def _write_file(file: WeightsFile, new: _Target, path: Path, advance: Callable[[int], object]) -> None:
    if new.turned or new.metadata != (file.header.metadata or {}):
        _write_changed(file, new, path, advance)
    else:
        shutil.copyfile(file.path, path)
        advance(sum(stored.nbytes for stored in file.header.tensors.values()))
    # the library's own checks of the new file
    layouts.read_header(path)


def _write_changed(file: WeightsFile, new: _Target, path: Path, advance: Callable[[int], object]) -> None:
    tensors = file.header.tensors
    begin = min((stored.start for stored in tensors.values()), default=0)
    entries = (
        (name, each.dtype, each.shape[:: -1 if name in new.turned else 1], each.start - begin, each.stop - begin)
        for name, each in tensors.items()
    )
    with path.open("xb") as out:
        out.write(layouts.header_bytes(new.metadata or None, entries))
        for name in sorted(tensors, key=lambda name: (tensors[name].start, tensors[name].stop)):
            for chunk in _converted(file, name, name in new.turned):
                out.write(chunk)
                advance(len(chunk))


def _converted(file: WeightsFile, name: str, turned: bool) -> Iterator[bytes | memoryview]:
    if turned:
        yield file.load(name).t().contiguous().reshape(-1).view(torch.uint8).numpy().data
    else:
        yield from file.chunks(name)


def _write_rest(source: Source, plan: _Plan, folder: Path) -> None:
    """Write the configuration and all other files."""
    assert plan.config is not None
    if plan.config == source.config and list(plan.config) == list(source.config):
        source.others[CONFIG] = source.files[0].path.parent / CONFIG
    else:
        (folder / CONFIG).write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
    for name, path in source.others.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
        shutil.copymode(path, folder / name)


def _print(source: Source, plan: _Plan, start: Path, target: Path) -> None:
    groups: Counter[tuple[str, ...]] = Counter()
    for file in source.files:
        for full, stored in file.header.tensors.items():
            name, layout = re.sub(r"\.\d+\.", ".*.", full), plan.layouts.get(full, "")
            becomes = f"linear {list(stored.shape[::-1])}" if layout == "rows" else "the same"
            groups[name, stored.dtype, str(list(stored.shape)), layout, becomes] += 1
    head = ("tensors", "count", "dtype", "shape", "layout", "becomes")
    rows = [head, *((row[0], str(count), *row[1:]) for row, count in groups.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    print(f"{start} -> {target}, {_size(source.nbytes())} in {len(plan.files)} file{'s' * (len(plan.files) != 1)}")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    if source.config is not None and plan.config is not None:
        for key in sorted({*source.config, *plan.config}):
            was, now = (json.dumps(config[key]) if key in config else "none" for config in (source.config, plan.config))
            if was != now:
                print(f"{CONFIG}: {key}: {was} -> {now}")
    if source.left_out:
        print(f"left out: {', '.join(source.left_out)}")
    if source.followed:
        print(f"copied as files: {', '.join(source.followed)}")


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
