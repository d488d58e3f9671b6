"""A checkpoint on disk: the tensors of its files, safetensors or pickles, and the other files of its folder."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twell.integrations import layouts
from twell.integrations.layouts import CONFIG, INDEX, SINGLE

_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_PICKLES = (".bin", ".pt", ".pth")
# files of these kinds hold weights in the old layout, or an optimizer's state for them
WEIGHTS = (".safetensors", *_PICKLES, ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt")
_HIDDEN_FOLDERS = (".git", ".cache")
_CHUNK = 16 << 20
_HEAD = re.compile(r"(?:^|\.)lm_head\.weight$")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class WeightsFile:
    """A file of weights: ``header`` lists its tensors, ``chunks`` reads the bytes of one, ``load`` the whole tensor."""

    path: Path
    header: layouts.Header

    def chunks(self, name: str) -> Iterator[bytes]:
        stored = self.header.tensors[name]
        with self.path.open("rb") as file:
            file.seek(stored.start)
            left = stored.nbytes
            while left:
                chunk = file.read(min(left, _CHUNK))
                if not chunk:
                    raise ValueError(f"{str(self.path)!r} ended within {name!r}; was it written to meanwhile?")
                left -= len(chunk)
                yield chunk

    def load(self, name: str) -> Tensor:
        stored = self.header.tensors[name]
        data = bytearray(stored.nbytes)
        with self.path.open("rb") as file:
            file.seek(stored.start)
            if file.readinto(data) != len(data):
                raise ValueError(f"{str(self.path)!r} ended within {name!r}; was it written to meanwhile?")
        if not data:
            return torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="cpu")
        return torch.frombuffer(data, dtype=DTYPES[stored.dtype]).view(stored.shape)


@dataclass
class Pickle(WeightsFile):
    """A state dict from torch.save. Its tensors are views of the mapped file, which is read on use."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def chunks(self, name: str) -> Iterator[bytes]:
        data = bytes_of(self.tensors[name])
        for start in range(0, len(data), _CHUNK):
            yield bytes(data[start : start + _CHUNK])

    def load(self, name: str) -> Tensor:
        return self.tensors[name]


@dataclass
class Source:
    files: list[WeightsFile]
    config: dict[str, Any] | None
    index: dict[str, Any] | None  # the shards' index
    others: dict[str, Path]  # files to copy, by their name relative to the folder
    left_out: list[str]
    followed: list[str]  # links out of the folder, whose content is copied

    def paths(self) -> list[Path]:
        """All files to read."""
        folder = self.files[0].path.parent
        named = [] if self.config is None else [folder / CONFIG, folder / INDEX]
        return [*(file.path for file in self.files), *filter(Path.is_file, named), *self.others.values()]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for file in self.files for name, stored in file.header.tensors.items()}


def read_source(source: Path) -> Source:
    if source.is_file():
        if source.suffix == ".safetensors":
            return Source([WeightsFile(source, layouts.read_header(source))], None, None, {}, [], [])
        if source.suffix in _PICKLES:
            return Source([_read_pickle(source, None)], None, None, {}, [], [])
        raise ValueError(f"SRC must be a folder or a file of {', '.join(WEIGHTS[:4])}, got {str(source)!r}")
    if not source.is_dir():
        raise FileNotFoundError(f"SRC must be a folder or a file of weights, got {str(source)!r} (no such file)")
    if not (source / CONFIG).is_file():
        raise FileNotFoundError(f"SRC must have a {CONFIG}, got {str(source)!r} without; or name a file of weights")
    config = layouts.read_json(source / CONFIG)
    index: Path | None
    if (source / SINGLE).is_file() or (source / INDEX).is_file():
        index = None if (source / SINGLE).is_file() else source / INDEX
        files = [WeightsFile(path, layouts.read_header(path)) for path in layouts.weight_files(source)]
    elif (source / _BIN).is_file():
        index, files = None, [_read_pickle(source / _BIN, config)]
    elif (source / _BIN_INDEX).is_file():
        index = source / _BIN_INDEX
        files = [_read_pickle(path, config) for path in layouts.indexed_files(index)]
    else:
        raise FileNotFoundError(f"SRC must have {SINGLE}, {INDEX}, {_BIN} or {_BIN_INDEX}, got {str(source)!r} without")
    counts = Counter(name for file in files for name in file.header.tensors)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"each tensor must be in one file, got several with {twice[0]!r}")
    others = _other_files(source, {file.path.name for file in files})
    named = None if index is None else layouts.read_json(index)
    for name, file in (named or {}).get("weight_map", {}).items():
        if name not in counts and not (config.get("tie_word_embeddings") and _HEAD.search(name)):
            raise ValueError(
                f"SRC must have each tensor that its index names, got none for {name!r} in {file!r}; is a download "
                "incomplete?"
            )
    return Source(files, config, named, *others)


def _read_pickle(path: Path, config: Mapping[str, Any] | None) -> Pickle:
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # files of torch before 1.6 cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{str(path)!r} must be a state dict that holds tensors alone, got {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{str(path)!r} must be a state dict that holds tensors alone, got something else")
    if unknown := {str(tensor.dtype) for tensor in state.values() if tensor.dtype not in NAMES}:
        raise ValueError(f"{str(path)!r}: expected dtypes {', '.join(DTYPES)}, got {', '.join(sorted(unknown))}")
    tensors = {name: tensor.detach() for name, tensor in state.items()}
    if config is not None and config.get("tie_word_embeddings"):
        tensors = _without_tied_head(tensors)
    # widest first, so that each tensor is aligned
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    stored = {
        name: layouts.Stored(NAMES[tensor.dtype], tuple(tensor.shape), place, place + tensor.nbytes)
        for place, (name, tensor) in zip(places_of([tensor.nbytes for tensor in tensors.values()]), tensors.items())
    }
    return Pickle(path, layouts.Header({"format": "pt"}, stored), tensors)


def _without_tied_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors except for a head tied to the embedding: a safetensors file cannot share tensors."""

    def place(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

    places = [place(tensor) for tensor in tensors.values()]
    return {
        name: tensor for name, tensor in tensors.items() if not (_HEAD.search(name) and places.count(place(tensor)) > 1)
    }


def _other_files(source: Path, weights: set[str]) -> tuple[dict[str, Path], list[str], list[str]]:
    """The files beside the weights: those to copy, those left out, and links out of the folder among the copied."""
    copied: dict[str, Path] = {}
    left_out: list[str] = []
    for path in sorted(source.iterdir()):
        if path.name in weights or path.name in (CONFIG, INDEX):
            continue
        if path.is_dir() and not path.is_symlink():
            inside, odd = _files_below(path)
            if path.name in _HIDDEN_FOLDERS or any(_is_weights(inner) for inner in inside):
                left_out.append(path.name + "/")
            else:
                copied |= {inner.relative_to(source).as_posix(): inner for inner in inside}
                left_out += [_name_of(inner, source) for inner in odd]
        elif not path.is_file():
            left_out.append(_name_of(path, source))
        elif _is_weights(path):
            left_out.append(path.name)
        else:
            copied[path.name] = path
    # a snapshot of a download cache has only links to the files beside it
    home = Path(os.path.realpath(source.parents[1] if source.absolute().parent.name == "snapshots" else source))
    followed = [_name_of(path, source) for path in copied.values() if home not in Path(os.path.realpath(path)).parents]
    return copied, left_out, followed


def _files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files in a folder at any depth, and entries that are neither file nor folder, such as links to folders."""
    files: list[Path] = []
    odd: list[Path] = []
    for at, folders, names in os.walk(folder):
        for path in (Path(at, name) for name in [*folders, *names]):
            if path.is_file():
                files.append(path)
            elif path.is_symlink() or not path.is_dir():
                odd.append(path)
    return sorted(files), sorted(odd)


def _name_of(path: Path, source: Path) -> str:
    name = path.relative_to(source).as_posix()
    return f"{name} -> {os.readlink(path)}" if path.is_symlink() else name


def _is_weights(path: Path) -> bool:
    return path.suffix in WEIGHTS or path.name.endswith(tuple(f"{suffix}.index.json" for suffix in WEIGHTS))


def places_of(sizes: Sequence[int]) -> list[int]:
    places, place = [], 0
    for size in sizes:
        places.append(place)
        place += size
    return places


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row by row."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
