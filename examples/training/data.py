"""From text to batches: documents, their tokenizer, a file of tokens, and the tokens of each step.

Documents are tokenised once, each followed by an end-of-document token, into ``train.bin`` and ``held.bin`` of a folder
named after a hash of the inputs. A later run with the same inputs checks these files for damage and reads nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twell import _files

from . import RequestError
from .whole import damaged, manifest, seal

END = "<|endoftext|>"
# part of the cache's key: increase it with any change of the files' content
FORMAT = 2
# longer documents are cut at a line end, so that none is slow to tokenise or most of the held-out text
LONGEST_DOCUMENT = 256 << 10
TOKENIZER_TEXT = 32 << 20
BATCH_TEXT = 8 << 20
# order of files and choice of held-out documents, independent of the run's seed
SPLIT_SEED = 0
_SKIPPED_FOLDERS = {"__pycache__", "node_modules"}


@dataclass(frozen=True)
class Source:
    """The source of documents: text files (or folders of them), or a dataset on disk.

    ``suffixes`` selects text files by the end of their names; empty takes all UTF-8 files. ``without`` are folders to
    leave out, such as the output of runs. About ``max_bytes`` of text are read.
    """

    text: tuple[Path, ...] = ()
    dataset: Path | None = None
    column: str = "text"
    suffixes: tuple[str, ...] = ()
    max_bytes: int = 1 << 30
    without: tuple[Path, ...] = ()

    @classmethod
    def of(cls, choice: argparse.Namespace) -> Source:
        """The text that the options of a script name."""
        return cls(
            text=tuple(choice.text),
            dataset=choice.dataset,
            column=choice.column,
            suffixes=tuple(choice.suffix),
            max_bytes=choice.max_bytes,
            without=(choice.out, choice.cache),
        )

    def files(self) -> list[Path]:
        """The files to read, sorted by name, unopened. RequestError if there are none."""
        option, roots = ("--text", self.text) if self.dataset is None else ("--dataset", (self.dataset,))
        suffixes = self.suffixes if self.dataset is None else ()
        found: list[Path] = []
        without = {path.resolve() for path in self.without}
        for root in roots:
            if not root.exists():
                raise RequestError(f"{option}: expected a folder or a file, got {str(root)!r} (does not exist)")
            below = (
                [root]
                if root.is_file()
                else [path for path in _walk(root, without) if path.name.endswith(suffixes or "")]
            )
            if not below:
                kind = f"files that end in {' or '.join(suffixes)}" if suffixes else "files"
                raise RequestError(f"{option}: expected {kind} in {str(root)!r}, got none")
            found += below
        return found

    def key(self) -> str:
        """A hash of the source: its options, and the names, sizes and times of its files."""
        files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self.files()]
        options = (self.column if self.dataset else "", self.suffixes, self.max_bytes)
        return hashlib.sha256(repr((FORMAT, options, files)).encode()).hexdigest()

    def documents(self) -> Iterator[str]:
        """The documents, in the same order each time."""
        left = self.max_bytes
        for document in self._texts() if self.dataset is None else _rows(self.dataset, self.column, self.files()):
            document = document[:left]
            left -= len(document) if document.isascii() else len(document.encode())
            yield from _cut(document)
            if left <= 0:
                return

    def _texts(self) -> Iterator[str]:
        files = self.files()
        random.Random(SPLIT_SEED).shuffle(files)
        for path in files:
            text = _read(path, self.max_bytes)
            if text is not None:
                yield text


def _walk(root: Path, without: set[Path]) -> Iterator[Path]:
    """Regular files below ``root``, sorted by name, without hidden files and caches."""
    for folder, below, names in os.walk(root):
        visible = sorted(name for name in below if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
        below[:] = [name for name in visible if Path(folder, name).resolve() not in without]
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read(path: Path, limit: int) -> str | None:
    """The first ``limit`` bytes of a file as text, or None if they are not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(min(limit, 8192))
            if b"\0" in data:
                return None
            data += file.read(limit - len(data))
            whole = not file.read(1)
    except OSError:
        return None
    try:
        return data.decode() if b"\0" not in data else None
    except UnicodeDecodeError as error:
        # the limit may cut a character
        at_end = not whole and error.start >= len(data) - 3
        return data[: error.start].decode() if at_end else None


def _rows(dataset: Path, column: str, files: list[Path]) -> Iterator[str]:
    """The texts of a dataset from ``save_to_disk``, or of Parquet or JSON Lines files."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError("--dataset needs the package datasets: pip install 'twell[train]'") from error
    try:
        for row in _open_dataset(datasets, dataset, files):
            if not isinstance(row.get(column), str):
                got = f"{type(row[column]).__name__}" if column in row else f"only {sorted(row)}"
                raise RequestError(f"--column: expected text in column {column!r} of {str(dataset)!r}, got {got}")
            yield row[column]
    except RequestError:
        raise
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise RequestError(f"--dataset: expected files that can be read, got {str(dataset)!r}: {error}") from error


def _open_dataset(datasets: Any, dataset: Path, files: list[Path]) -> Any:
    if dataset.is_dir() and any((dataset / name).exists() for name in ("state.json", "dataset_dict.json")):
        rows = datasets.load_from_disk(str(dataset))
        if isinstance(rows, datasets.DatasetDict):
            if "train" not in rows:
                raise RequestError(
                    f"--dataset: expected a split named 'train', got {sorted(rows)}; name a split's folder"
                )
            rows = rows["train"]
        return rows
    kinds = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
    chosen = [path for path in files if path.suffix in kinds]
    names = {kinds[path.suffix] for path in chosen}
    if len(names) != 1:
        raise RequestError(
            f"--dataset: expected a folder that datasets.save_to_disk wrote, or Parquet or JSON Lines files of one "
            f"kind, got {sorted({path.suffix for path in files})} in {str(dataset)!r}"
        )
    paths = [str(path) for path in chosen]
    # streaming reads the files in place instead of a copy under ~/.cache
    return datasets.load_dataset(names.pop(), data_files=paths, split="train", streaming=True)


def _cut(document: str) -> Iterator[str]:
    start = 0
    while start < len(document):
        end = min(start + LONGEST_DOCUMENT, len(document))
        if end < len(document):
            end = document.rfind("\n", start + 1, end) + 1 or end
        if not document[start:end].isspace():
            yield document[start:end]
        start = end


@dataclass(frozen=True)
class Tokens:
    """A folder of tokenised text. ``fingerprint`` is a hash of the tokens; ``bytes`` counts the text they stand for."""

    folder: Path
    vocabulary: int
    dtype: str
    end: int
    documents: int
    bytes: int
    train_tokens: int
    held_tokens: int
    fingerprint: str

    @property
    def train(self) -> Any:
        return np.memmap(self.folder / "train.bin", self.dtype, "r")

    @property
    def held(self) -> Any:
        return np.memmap(self.folder / "held.bin", self.dtype, "r")

    def tokenizer(self) -> Any:
        """The tokenizer for Transformers."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_file=str(self.folder / "tokenizer.json"), eos_token=END)


def prepare(
    source: Source,
    cache: Path,
    vocabulary: int,
    held_out: float,
    first: bool = True,
    say: Callable[[str], None] = lambda line: None,
    barrier: Callable[[], None] = lambda: None,
    tokenizer: Any = None,
) -> Tokens:
    """The tokens of ``source``: read from ``cache`` if they are there and undamaged, else made and stored there.

    A tokenizer of ``vocabulary`` tokens is trained on them unless ``tokenizer``, one of transformers, is given.
    ``held_out`` is the share of the text in held-out documents. Of several processes one is ``first`` and does the
    work; the others wait for its files and then in ``barrier``.
    """
    text = f"{source.key()} {vocabulary} {held_out}"
    if tokenizer is not None:
        text += f" {tokenizer.backend_tokenizer.to_str()} {tokenizer.eos_token_id}"
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = cache / f"tokens-{key}"
    if first and (manifest(folder) is None or damaged(folder)):
        if folder.exists():
            say(f"{folder} is damaged: its text is tokenised again")
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"--cache: expected a folder to write to, got {str(cache)!r}: {error.strerror}"
            ) from error
        with _files.replacing(folder) as partial:
            partial.mkdir()
            seal(partial, _tokenise(source, partial, vocabulary, held_out, say, tokenizer))
    # if the first process fails, the launcher ends the others
    while (about := manifest(folder)) is None:
        time.sleep(0.1)
    barrier()
    # the first process may have replaced a damaged folder
    about = manifest(folder) or about
    return Tokens(folder, **{field.name: about[field.name] for field in fields(Tokens) if field.name != "folder"})


def _tokenise(
    source: Source, folder: Path, vocabulary: int, held_out: float, say: Callable[[str], None], given: Any
) -> dict[str, Any]:
    """Write tokenizer and tokens to ``folder``; return the fields of ``Tokens``."""
    from tokenizers import Tokenizer

    started = time.perf_counter()
    if given is None:
        tokenizer = _trained(source, vocabulary)
        end = tokenizer.token_to_id(END)
        say(f"trained a tokenizer of {tokenizer.get_vocab_size():,} tokens in {time.perf_counter() - started:.1f} s")
    else:
        tokenizer = Tokenizer.from_str(given.backend_tokenizer.to_str())
        tokenizer.no_truncation()
        end = given.eos_token_id
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    # a special token's name in the text is ordinary text
    tokenizer.encode_special_tokens = True
    dtype = "uint16" if max(vocabulary, size, end + 1) <= 1 << 16 else "uint32"

    documents, sizes, tokens, digest = 0, [0, 0], [0, 0], hashlib.sha256()
    said = time.perf_counter()
    with (folder / "train.bin").open("wb") as train, (folder / "held.bin").open("wb") as held:
        for texts in _batches(source.documents(), BATCH_TEXT):
            for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False)):
                # hold out a document while the share is too small: never the first, always the second
                hold = sizes[1] < held_out * sum(sizes)
                ids = np.array([*encoding.ids, end], dtype).tobytes()
                (held if hold else train).write(ids)
                digest.update(ids)
                documents += 1
                sizes[hold] += len(text)
                tokens[hold] += len(encoding.ids) + 1
            if time.perf_counter() > said + 10:
                said = time.perf_counter()
                say(f"tokenised {sum(sizes) / 1e6:,.0f} MB")
    if documents < 2:
        raise RequestError(
            "expected at least 2 documents of UTF-8 text, one to train on and one to hold out (a longer one counts as "
            f"several of {LONGEST_DOCUMENT >> 10} KiB), got {documents}"
        )
    seconds = time.perf_counter() - started
    say(
        f"tokenised {documents:,} documents, {sum(sizes) / 1e6:,.1f} MB, into {sum(tokens):,} tokens in {seconds:.1f} s"
    )
    return {
        "vocabulary": size,
        "dtype": dtype,
        "end": end,
        "documents": documents,
        "bytes": sum(sizes),
        "train_tokens": tokens[0],
        "held_tokens": tokens[1],
        "fingerprint": digest.hexdigest()[:16],
    }


def _trained(source: Source, vocabulary: int) -> Any:
    """A new tokenizer of bytes and pairs, trained on the beginning of ``source``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_first(source.documents(), TOKENIZER_TEXT), trainer)
    return tokenizer


def _first(documents: Iterator[str], size: int) -> Iterator[str]:
    for document in documents:
        yield document
        size -= len(document)
        if size <= 0:
            return


def _batches(documents: Iterator[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document)
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


class Sequences:
    """Sequences of tokens that overlap by one: the last token of each is the first of the next.

    Rows are numbered without end: epoch ``row // len(self)`` reads all sequences in its own order, from ``seed`` (None:
    in order). So one number says how far a run has read.
    """

    def __init__(self, part: str, tokens: Any, length: int, seed: int | None = None) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
        self._order: tuple[int, Any] | None = None
        if not len(self):
            raise RequestError(f"{part} text: expected {length + 1:,} tokens, a sequence, or more, got {len(tokens):,}")

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def rows(self, rows: range) -> Tensor:
        """int64 [len(rows), length + 1]."""
        starts = [self._place(row) * self.length for row in rows]
        return torch.from_numpy(np.stack([self.tokens[s : s + self.length + 1] for s in starts]).astype(np.int64))

    def batch(self, row: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """``count`` sequences from ``row`` on, and their next tokens: two int64 [count, length] on ``device``."""
        rows = self.rows(range(row, row + count))
        if device.type == "cuda":
            rows = rows.pin_memory()
        rows = rows.to(device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]

    def _place(self, row: int) -> int:
        epoch, index = divmod(row, len(self))
        if self.seed is None:
            return index
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng((self.seed, epoch))
            self._order = epoch, generator.permutation(len(self))
        return int(self._order[1][index])
