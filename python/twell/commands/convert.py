"""``twell convert``: checkpoints with down projections as nn.Linear stores them, another dtype or model type."""

from __future__ import annotations

import argparse
import json
import mimetypes
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from twell import _configuration, _files
from twell.commands.checkpoint_files import (
    DTYPES,
    NAMES,
    WEIGHTS,
    Pickle,
    Source,
    WeightsFile,
    bytes_of,
    places_of,
    read_source,
)
from twell.integrations import layouts
from twell.integrations.layouts import (
    CONFIG,
    INDEX,
    LAYOUT_KEY,
    LAYOUTS,
    OWN_KEYS,
    SINGLE,
    DownLayout,
)

DESCRIPTION = """\
Convert a checkpoint of a ReLU language model to safetensors with down projections as nn.Linear stores them, [hidden,
intermediate] ("linear"), which every loader reads. Some checkpoints have them by rows, [intermediate, hidden], one row
per neuron. SRC is a Hugging Face folder (model.safetensors, or shards with their index, or pytorch_model.bin) or one
file of weights; DST is a new folder or .safetensors file. Other tensors and other files are copied unchanged; weights
in other formats and links to folders are left out; links to files are copied as files. Layouts are recognised by shape;
a square weight needs the marker that this command writes, or --source-layout. DST appears once it is complete. --force
replaces a DST that holds a checkpoint and nothing else, be it an original or a converted one; the replaced files are
printed.
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

# dtypes of down weights; --dtype converts these alone
_FLOATS = ("F64", "F32", "F16", "BF16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="folder of a model, or a file of weights")
    parser.add_argument("target", type=Path, metavar="DST", help="folder or .safetensors file to write")
    parser.add_argument(
        "--model-type",
        choices=("keep", *_ARCHITECTURES),
        default="keep",
        help="rewrite config.json with hidden_act relu: llama and qwen2 for transformers alone, sparse_* for "
        "twell.integrations.transformers (%(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("keep", "bfloat16", "float16", "float32"),
        default="keep",
        help="dtype of all floating point tensors of 16 bits or more (%(default)s)",
    )
    parser.add_argument(
        "--source-layout", choices=LAYOUTS, help="layout of SRC's square down weights, overriding any marker"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan and write nothing; with --dtype it reads all tensors"
    )
    parser.add_argument("--force", action="store_true", help="replace DST if it holds a checkpoint and nothing else")


def run(arguments: argparse.Namespace) -> int:
    convert(**{name: value for name, value in vars(arguments).items() if name != "command"})
    return 0


def convert(
    source: Path,
    target: Path,
    *,
    model_type: ModelType = "keep",
    dtype: Literal["keep", "bfloat16", "float16", "float32"] = "keep",
    source_layout: DownLayout | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> None:
    """Run ``twell convert``: print the plan to stdout, and progress to stderr if that is a terminal.

    At most one tensor and its copy are in memory. Raises ValueError if a checkpoint cannot be converted, OSError if
    reading or writing fails, ImportError without safetensors or tqdm; ``target`` is then as before.
    """
    target = Path(os.path.realpath(target))
    _require_apart(source, target)
    _files.require_apart(target)
    checkpoint = read_source(source)
    plan = _plan(checkpoint, model_type, dtype, source_layout)
    replaced = _replaced(checkpoint, plan, target, force)
    _print(checkpoint, plan, source, target, replaced)
    if checkpoint.config is not None and (activation := _activation(checkpoint.config)) != "relu":
        got = f"has the activation {activation!r}" if activation else "does not name its activation"
        print(f"warning: {CONFIG} {got}: twell's layers apply ReLU and load no other model", file=sys.stderr)
    for left in _files.leftovers(target):
        print(f"note: {left} was left by a conversion that was interrupted; remove it", file=sys.stderr)
    losses = _Losses()
    if dry_run:
        _dry_run(checkpoint, plan, losses)
    else:
        _write(checkpoint, plan, target, losses, lambda: _replaced(checkpoint, plan, target, force))
    losses.warn()


@dataclass(frozen=True)
class _Tensor:
    """The plan for a tensor. ``layout`` is its present layout, None if it is no down projection."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    layout: DownLayout | None
    transpose: bool
    cast: bool


@dataclass(frozen=True)
class _Target:
    """A file to write, its tensors in the order of their bytes; ``changed`` if it differs from its source."""

    name: str
    metadata: dict[str, str] | None
    tensors: list[_Tensor]
    changed: bool


@dataclass(frozen=True)
class _Plan:
    files: list[_Target]
    config: dict[str, Any] | None
    index: dict[str, Any] | None


def _plan(source: Source, model_type: ModelType, dtype: str, source_layout: DownLayout | None) -> _Plan:
    shapes = source.shapes()
    if source_layout is not None:
        try:
            stored = layouts.layouts(shapes, (source.config or {}) | {LAYOUT_KEY: source_layout})
        except ValueError as error:
            raise ValueError(f"--source-layout {source_layout}: {error}") from None
    else:
        pickled = any(isinstance(file, Pickle) for file in source.files)
        metadata = {name: file.header.metadata for file in source.files for name in file.header.tensors}
        stored = layouts.layouts(shapes, source.config, None if pickled else metadata)
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
        if dtype != "keep":
            key = "torch_dtype" if "dtype" not in config else "dtype"
            config[key] = dtype
    elif model_type != "keep":
        raise ValueError(f"--model-type {model_type} rewrites config.json: expected a folder, got a file of weights")
    files = [_target(file, stored, marker, dtype) for file in source.files]
    return _Plan(files, config, _index(source, files, dtype))


def _target(file: WeightsFile, stored: Mapping[str, DownLayout], marker: DownLayout | None, dtype: str) -> _Target:
    wanted = None if dtype == "keep" else NAMES[getattr(torch, dtype)]
    tensors = []
    for name, old in sorted(file.header.tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        shape, transpose = old.shape, stored.get(name) == "rows"
        cast = wanted is not None and old.dtype in _FLOATS and old.dtype != wanted
        if transpose:
            if old.dtype not in _FLOATS:
                # a quantised weight has scales along one of its sides
                raise ValueError(f"{name} must be of {', '.join(_FLOATS)} to be transposed, got {old.dtype}")
            shape = shape[::-1]
        new = wanted if cast and wanted is not None else old.dtype
        nbytes = old.nbytes // DTYPES[old.dtype].itemsize * DTYPES[new].itemsize if cast else old.nbytes
        tensors.append(_Tensor(name, new, shape, nbytes, stored.get(name), transpose, cast))
    if any(tensor.cast for tensor in tensors):
        # widest first, so that each tensor is aligned; unknown ones are bytes
        tensors.sort(key=lambda tensor: -DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else 0)
    holds_down = any(tensor.layout for tensor in tensors)
    metadata = dict(_marked(file.header.metadata or {}, marker if holds_down else None)) or None
    changed = (
        isinstance(file, Pickle)
        or (metadata or None) != (file.header.metadata or None)
        or any(tensor.transpose or tensor.cast for tensor in tensors)
    )
    name = file.path.name
    if isinstance(file, Pickle):
        name = name.replace("pytorch_model", "model").removesuffix(file.path.suffix) + ".safetensors"
    return _Target(name, metadata, tensors, changed)


def _marked(mapping: Mapping[str, Any], marker: DownLayout | None) -> dict[str, Any]:
    """``mapping`` with the marker, or without one, all other keys unchanged."""
    if marker is None:
        return {key: value for key, value in mapping.items() if key != LAYOUT_KEY}
    return {**mapping, LAYOUT_KEY: marker}


def _index(source: Source, files: Sequence[_Target], dtype: str) -> dict[str, Any] | None:
    if source.index is None:
        return None
    index = dict(source.index)
    index["weight_map"] = {tensor.name: file.name for file in files for tensor in file.tensors}
    if list(source.index["weight_map"]) == sorted(source.index["weight_map"]):
        index["weight_map"] = dict(sorted(index["weight_map"].items()))
    if dtype != "keep" and "total_size" in index.get("metadata", {}):
        total = sum(tensor.nbytes for file in files for tensor in file.tensors)
        index["metadata"] = index["metadata"] | {"total_size": total}
    return source.index if index == source.index else index


def _sizes(shapes: Mapping[str, Sequence[int]], stored: Mapping[str, DownLayout]) -> set[int]:
    """The numbers of neurons of the layers."""
    return {shapes[name][0 if layout == "rows" else 1] for name, layout in stored.items()}


def _config(
    config: Mapping[str, Any], model_type: ModelType, sizes: set[int], names: Mapping[str, object]
) -> dict[str, Any]:
    """The configuration of a model of ``model_type`` on tensors ``names``. Raises ValueError if there is none."""
    if model_type == "keep":
        return dict(config)
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
    elif not target.exists() and (target.suffix in WEIGHTS or any(mimetypes.MimeTypes().guess_type(target.name))):
        # names of versions have a dot, too: "Qwen2.5-0.5B"
        raise ValueError(
            f"DST must be a folder if SRC is one, got {str(target)!r}, the name of a file; an existing folder may have "
            "any name"
        )


def _is_in(path: Path, folder: Path) -> bool:
    """Whether ``path`` is ``folder`` or in it; names do not count, since a folder may be mounted at several."""
    return folder.exists() and any(each.exists() and each.samefile(folder) for each in (path, *path.parents))


def _replaced(source: Source, plan: _Plan, target: Path, force: bool) -> list[str]:
    """The files of ``target`` to replace. Raises ValueError if it holds others, or if ``force`` is needed."""
    if not target.is_dir():
        if target.exists() and not force:
            raise ValueError(f"DST must be a new file, got {str(target)!r}, a file that exists (--force replaces it)")
        return [target.name] if target.exists() else []
    if not (held := _contents(target)):
        return []
    written = {CONFIG, SINGLE, INDEX, *source.others, *(file.name for file in plan.files)}
    if (target / INDEX).is_file():
        # weights of an earlier conversion may have other shards
        shards = layouts.indexed_files(target / INDEX, missing=True)
        written |= {path.name for path in shards if path.suffix == ".safetensors"}
    if foreign := sorted({name if "/" not in name else name.partition("/")[0] + "/" for name in held - written}):
        raise ValueError(
            f"DST must be new, or hold only files that this conversion writes, got {str(target)!r} with "
            f"{_list_first(foreign)}; move these elsewhere, or name another DST"
        )
    if not held & {SINGLE, INDEX}:
        raise ValueError(f"--force replaces checkpoints, got {str(target)!r} without weights")
    if not force:
        raise ValueError(
            f"DST must be new or empty, got {str(target)!r} with {_list_first(sorted(held))} (--force replaces it)"
        )
    linked = [path for path in source.paths() if _is_in(Path(os.path.realpath(path)), target)]
    if linked:
        raise ValueError(f"DST must be apart from SRC, got {str(target)!r}, into which {str(linked[0])!r} is a link")
    return sorted(held)


def _contents(folder: Path) -> set[str]:
    """The names of all files, links and empty folders in a folder, relative to it."""
    found = set()
    for at, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        found |= {Path(at, name).relative_to(folder).as_posix() for name in [*names, *links]}
        if not names and not folders and at != str(folder):
            found.add(Path(at).relative_to(folder).as_posix() + "/")
    return found


def _list_first(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


@dataclass
class _Losses:
    """Values lost by a change of dtype, by tensor: those that became zero, and those beyond its range."""

    dtype: str = ""
    zeros: Counter[str] = field(default_factory=Counter)
    beyond: Counter[str] = field(default_factory=Counter)
    values: int = 0
    largest: float = 0.0

    def count(self, name: str, wide: Tensor, narrow: Tensor) -> None:
        self.dtype, self.values = str(narrow.dtype).removeprefix("torch."), self.values + wide.numel()
        self.zeros[name] += int((narrow == 0).sum()) - int((wide == 0).sum())
        lost = wide.isfinite() & ~narrow.isfinite()
        if count := int(lost.sum()):
            self.beyond[name] += count
            self.largest = max(self.largest, float(wide[lost].abs().max()))

    def require_finite(self) -> None:
        if self.beyond:
            raise ValueError(
                f"all values must fit in {self.dtype}, got {self.beyond.total()} beyond "
                f"{torch.finfo(getattr(torch, self.dtype)).max:g}, the largest {self.largest:g}: {_counts(self.beyond)}"
            )

    def warn(self) -> None:
        if zeros := +self.zeros:
            print(
                f"warning: {zeros.total():,} of {self.values:,} values were too small for {self.dtype} and became 0: "
                f"{_counts(zeros)}",
                file=sys.stderr,
            )


def _counts(counter: Counter[str]) -> str:
    return _list_first([f"{name} {count:,}" for name, count in counter.most_common()])


def _dry_run(source: Source, plan: _Plan, losses: _Losses) -> None:
    """Convert the tensors that change their dtype, for ``losses``; write nothing."""
    for file, new in zip(source.files, plan.files):
        for tensor in new.tensors:
            if tensor.cast:
                for _ in _convert(file, tensor, losses):
                    pass
    losses.require_finite()


def _write(source: Source, plan: _Plan, target: Path, losses: _Losses, check: Callable[[], object]) -> None:
    """Write all of ``plan`` beside ``target``, ``check`` again, then rename it to ``target``."""
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError("twell convert needs tqdm: pip install 'twell[hf]'") from None
    total = sum(tensor.nbytes for file in plan.files for tensor in file.tensors)
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
                _write_file(source.files[0], plan.files[0], partial, losses, bar.update)
            else:
                partial.mkdir()
                for file, new in zip(source.files, plan.files):
                    _write_file(file, new, partial / new.name, losses, bar.update)
                _write_rest(source, plan, partial)
            losses.require_finite()
            # something may have appeared there in the meantime
            check()
    except OSError as error:
        if _files.is_full(error):
            raise ValueError(
                f"no space left in {str(target.parent)!r}: DST needs {_size(needed)}; nothing there has changed"
            ) from error
        raise


def _write_file(file: WeightsFile, new: _Target, path: Path, losses: _Losses, advance: Callable[[int], object]) -> None:
    if not new.changed:
        shutil.copyfile(file.path, path)
        advance(sum(tensor.nbytes for tensor in new.tensors))
    else:
        _write_changed(file, new, path, losses, advance)
    # the library's own checks of the new file
    layouts.read_header(path)


def _write_changed(
    file: WeightsFile, new: _Target, path: Path, losses: _Losses, advance: Callable[[int], object]
) -> None:
    places = dict(zip((tensor.name for tensor in new.tensors), places_of([tensor.nbytes for tensor in new.tensors])))
    by_name = {tensor.name: tensor for tensor in new.tensors}
    entries = (by_name[name] for name in file.header.tensors)
    header = layouts.header_bytes(
        new.metadata,
        ((each.name, each.dtype, each.shape, places[each.name], places[each.name] + each.nbytes) for each in entries),
    )
    with path.open("xb") as out:
        out.write(header)
        for tensor in new.tensors:
            for chunk in _convert(file, tensor, losses):
                out.write(chunk)
                advance(len(chunk))


def _convert(file: WeightsFile, tensor: _Tensor, losses: _Losses) -> Iterator[bytes | memoryview]:
    if not (tensor.transpose or tensor.cast):
        yield from file.chunks(tensor.name)
        return
    data = file.load(tensor.name)
    if tensor.cast:
        wide, data = data, data.to(DTYPES[tensor.dtype])
        losses.count(tensor.name, wide, data)
    yield bytes_of(data.t() if tensor.transpose else data)


def _write_rest(source: Source, plan: _Plan, folder: Path) -> None:
    """Write the configuration, the index and all other files."""
    old = source.files[0].path.parent
    assert plan.config is not None
    if plan.config == source.config and list(plan.config) == list(source.config):
        source.others[CONFIG] = old / CONFIG
    else:
        _write_json(folder / CONFIG, plan.config)
    if plan.index is not None:
        if plan.index is source.index:
            source.others[INDEX] = old / INDEX
        else:
            _write_json(folder / INDEX, plan.index)
    for name, path in source.others.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
        shutil.copymode(path, folder / name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _print(source: Source, plan: _Plan, start: Path, target: Path, replaced: Sequence[str]) -> None:
    old = {name: stored for file in source.files for name, stored in file.header.tensors.items()}
    groups: Counter[tuple[str, ...]] = Counter()
    for file in plan.files:
        for tensor in file.tensors:
            stored = old[tensor.name]
            name, layout = re.sub(r"\.\d+\.", ".*.", tensor.name), tensor.layout or ""
            groups[name, stored.dtype, str(list(stored.shape)), layout, _becomes(tensor)] += 1
    head = ("tensors", "count", "dtype", "shape", "layout", "becomes")
    rows = [head, *((row[0], str(count), *row[1:]) for row, count in groups.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    total = sum(tensor.nbytes for file in plan.files for tensor in file.tensors)
    print(f"{start} -> {target}, {_size(total)} in {len(plan.files)} file{'s' * (len(plan.files) != 1)}")
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
    if replaced:
        print(f"replaced in {target}: {', '.join(replaced)}")


def _becomes(tensor: _Tensor) -> str:
    words = [f"linear {list(tensor.shape)}"] if tensor.transpose else []
    if tensor.cast:
        words.append(tensor.dtype)
    return ", ".join(words) or "the same"


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
