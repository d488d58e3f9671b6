"""The demo's text: the files of a folder as bytes, split by whole files into a training and a held-back part."""

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from twell._files import files_below
from twell.commands.request import RequestError

HELD_BACK_SHARE = 0.1
MAX_BYTES = 64 << 20
SEPARATOR = 0  # marks the end of a file; no text file has this byte


@dataclass(frozen=True)
class Corpus:
    """Byte-level text. `train` and `held` are uint8 [bytes]; each file is followed by one zero byte."""

    root: Path
    train: Tensor
    held: Tensor
    train_files: int
    held_files: int
    truncated: bool  # whether text beyond MAX_BYTES was left out

    @property
    def train_bytes(self) -> int:
        return self.train.numel() - self.train_files

    @property
    def held_bytes(self) -> int:
        return self.held.numel() - self.held_files


def stdlib_folder() -> Path:
    """The folder of this interpreter's standard library source."""
    return Path(sysconfig.get_path("stdlib"))


def _text(path: Path) -> bytes | None:
    """The file's bytes if it is UTF-8 text that is not blank, else None."""
    try:
        data = path.read_bytes()
        data.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return data if data.strip() and SEPARATOR not in data else None


def _join(files: list[bytes]) -> Tensor:
    joined = bytearray()
    for data in files:
        joined += data
        joined.append(SEPARATOR)
    return torch.frombuffer(joined, dtype=torch.uint8)


def read_corpus(root: Path | None, seed: int, minimum: int) -> Corpus:
    """Read text files below `root` (None: the standard library's `*.py`), up to MAX_BYTES, and split them by `seed`.

    About a tenth of the bytes, in whole files, is held back. Both parts have at least `minimum` bytes. Raises
    RequestError if the folder has too little text for that.
    """
    name = "the standard library's source" if root is None else "--text"
    folder, suffix = (stdlib_folder(), ".py") if root is None else (root, "")
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise RequestError(f"{name}: expected a folder of text files, got {str(folder)!r} ({got})")
    files: list[bytes] = []
    total, truncated = 0, False
    for path in files_below(folder, suffix):
        data = _text(path)
        if data is None:
            continue
        if total + len(data) > MAX_BYTES:
            truncated = True
            break
        files.append(data)
        total += len(data)
    if len(files) < 2:
        raise RequestError(
            f"{name}: expected at least 2 UTF-8 text files (one to train on, one to hold back), "
            f"got {len(files)} in {str(folder)!r}"
        )
    random.Random(seed).shuffle(files)
    largest = max(range(len(files)), key=lambda i: len(files[i]))
    files[0], files[largest] = files[largest], files[0]  # the largest file is always trained on
    held: list[bytes] = []
    while len(files) > 1 and sum(map(len, held)) < max(minimum, HELD_BACK_SHARE * total):
        held.append(files.pop())
    sizes = sum(map(len, files)), sum(map(len, held))
    if min(sizes) < minimum:
        raise RequestError(
            f"{name}: expected at least {minimum:,} bytes of text to train on and as many in other files to hold back, "
            f"got {sizes[0]:,} and {sizes[1]:,} of {total:,} bytes in {len(files) + len(held)} files of {str(folder)!r}"
        )
    return Corpus(folder, _join(files), _join(held), len(files), len(held), truncated)


def windows(data: Tensor, starts: Tensor, length: int) -> Tensor:
    """Cut int64 [len(starts), length] windows out of uint8 `data`."""
    offsets = starts[:, None] + torch.arange(length, device=starts.device)
    return data[offsets].long()


def even_windows(data: Tensor, count: int, length: int) -> Tensor:
    """At most `count` non-overlapping windows, spread evenly over `data`: int64 [<= count, length]."""
    count = max(1, min(count, data.numel() // length))
    stride = (data.numel() - length) // max(1, count - 1) if count > 1 else 0
    return windows(data, torch.arange(count, device=data.device) * stride, length)
