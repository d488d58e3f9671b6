"""A checkpoint on disk: the tensors of its files and the other files of its folder."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twell.integrations import layouts
from twell.integrations.layouts import CONFIG, INDEX, SINGLE

# files of these kinds hold weights in the old layout, or an optimizer's state for them
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt")
_HIDDEN_FOLDERS = (".git", ".cache")
_CHUNK = 16 << 20
_HEAD = re.compile(r"(?:^|\.)lm_head\.weight$")

# of down weights that can be turned
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
class Source:
    files: list[WeightsFile]
    config: dict[str, Any] | None
    others: dict[str, Path]  # files to copy, by their name relative to the folder
    left_out: list[str]
    followed: list[str]  # links out of the folder, whose content is copied

    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(stored.nbytes for file in self.files for stored in file.header.tensors.values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for file in self.files for name, stored in file.header.tensors.items()}


def read_source(source: Path) -> Source:
    if source.is_file():
        if source.suffix == ".safetensors":
            return Source([WeightsFile(source, layouts.read_header(source))], None, {}, [], [])
        raise ValueError(f"SRC must be a folder or a .safetensors file, got {str(source)!r}")
    if not source.is_dir():
        raise FileNotFoundError(f"SRC must be a folder or a file of weights, got {str(source)!r} (no such file)")
    if not (source / CONFIG).is_file():
        raise FileNotFoundError(f"SRC must have a {CONFIG}, got {str(source)!r} without; or name a file of weights")
    config = layouts.read_json(source / CONFIG)
    if not (source / SINGLE).is_file() and not (source / INDEX).is_file():
        raise FileNotFoundError(
            f"SRC must have {SINGLE} or {INDEX}, got {str(source)!r} without: load it with transformers, and "
            "save_pretrained writes them"
        )
    files = [WeightsFile(path, layouts.read_header(path)) for path in layouts.weight_files(source)]
    counts = Counter(name for file in files for name in file.header.tensors)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"each tensor must be in one file, got several with {twice[0]!r}")
    others = _other_files(source, {file.path.name for file in files})
    named = {} if (source / SINGLE).is_file() else layouts.read_json(source / INDEX)
    for name, file in named.get("weight_map", {}).items():
        if name not in counts and not (config.get("tie_word_embeddings") and _HEAD.search(name)):
            raise ValueError(
                f"SRC must have each tensor that its index names, got none for {name!r} in {file!r}; is a download "
                "incomplete?"
            )
    if named:
        others[0][INDEX] = source / INDEX
    return Source(files, config, *others)


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
