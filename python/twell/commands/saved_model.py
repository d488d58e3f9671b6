"""A saved model and text for it: load both.

Shared by ``twell analyze`` and ``profiling.record``. Needs the extra ``hf``.
"""

import argparse
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from twell.base.activation import NAMES_OF_FAMILY, Activation
from twell.base.files import files_below
from twell.base.text import counted
from twell.commands.request import DEVICE_HELP, RequestError, at_least, pick_device
from twell.integrations import layouts, sparsify

DTYPES = ("auto", "bfloat16", "float16", "float32")

# Characters of a file that are read for each token, which bounds memory.
_CHARACTERS = 64

# What commands with the option advise for a model whose activation makes no zeros.
ACTIVATION_OPTION = "Here that is --activation relu"

# How a model whose activation makes no zeros gets some.
TRAINING = "examples/relufy.py of twell's repository trains the model to FATReLU or ReLU"

# Longest sequence by default, if the model allows it.
_SEQUENCE = 2048


class WithoutZeros(RequestError):
    """A model whose activation, ``was``, makes no zeros, or with experts alone that twell does not compute.

    shapes: (gated, K, N) of each layer; none of experts alone. left: as in ``Loaded``.
    """

    def __init__(self, message: str, folder: Path, was: str, shapes: list[tuple[bool, int, int]], left: str) -> None:
        super().__init__(message)
        self.folder, self.was, self.shapes, self.left = folder, was, shapes, left


class Loaded(NamedTuple):
    """A model in evaluation mode whose FFNs are twell layers, its tokenizer, and the folder of both.

    was: the activations that ReLU has replaced, in words; "" for a ReLU model. left: the experts that twell does not
    compute, and why. stored: how its files are quantised, from which weights were dequantised.
    """

    model: nn.Module
    tokenizer: Any
    folder: Path
    was: str
    left: str = ""
    stored: str = ""


class Text(NamedTuple):
    """Token ids, at most ``--sequence`` in a sequence, and the number of their files."""

    sequences: list[list[int]]
    files: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    def __str__(self) -> str:
        sequences = f"{counted(len(self.sequences), 'sequence')} of up to {max(map(len, self.sequences)):,}"
        return f"{counted(self.tokens, 'token')} of {counted(self.files, 'file')}, {sequences}"


def add_arguments(parser: argparse.ArgumentParser, tokens: int, *, text: bool = True) -> None:
    """Add the arguments of ``load``, ``read`` and ``batches``; without ``text`` the command has its own defaults."""
    add, own = parser.add_argument, {"tokens": tokens, "batch": 4} if text else {}
    said = "folder of a causal model and its tokenizer, or owner/name on the Hub"
    add("model", type=Path, metavar="MODEL", help=said)
    shuffled = "text files or folders; a fixed seed shuffles the files"
    add("--text", type=Path, nargs="+", action="extend", required=text, metavar="PATH", help=shuffled)
    for name, metavar, lowest, said in (
        ("tokens", "N", 1, f"tokens of the text to run ({tokens})"),
        ("sequence", "S", 2, f"tokens of a sequence (default: {_SEQUENCE}, or the model's limit if lower)"),
        ("batch", "B", 1, "sequences of a batch (4)"),
    ):
        add(f"--{name}", type=at_least(lowest), metavar=metavar, default=own.get(name), help=said)
    add("--device", help=DEVICE_HELP)
    add("--dtype", choices=DTYPES, default="auto", help="dtype of the model (default: that of its files)")
    instead = "put it in place of another activation; FATReLU is relu until training has found its threshold"
    add("--activation", choices=("relu", "relu2", "drelu"), help=instead)


def load(
    arguments: argparse.Namespace,
    remedy: str = "No option does that here: train the model; `twell analyze` says how sparse it must become",
    experts: bool = False,
) -> Loaded:
    """Load the model and tokenizer of ``arguments`` onto their device; the FFNs run as dense PyTorch.

    ``remedy`` is what the command advises for another activation, ``experts`` whether it takes a model with stacked
    experts alone. Raises RequestError, or WithoutZeros if another activation is the only reason.
    """
    folder = local(arguments.model)
    content = configuration(folder)
    device = pick_device(arguments.device)
    # before the slow part
    for path in arguments.text:
        if not path.is_dir():
            _text(path, _CHARACTERS * arguments.tokens)
    try:
        from transformers import AutoTokenizer

        from twell.integrations import experts as stacked
        from twell.integrations import transformers as integration
    except ImportError as error:
        raise ImportError(f"{error}. Reading models needs transformers: pip install 'twell[hf]'") from error
    with _reading(folder, "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with _reading(folder, "a model"):
        dtype = arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        opened = integration.open_saved(folder, dequantize=True, dtype=dtype, local_files_only=True)
    model, activation, was = opened.model, arguments.activation, ""
    left = stacked.left(model)
    served = [each for _, each in stacked.found(model)]
    try:
        if opened.own or activation is None or sparsify.layers(model):
            opened.with_layers(strategy="dense")
            layers = sparsify.layers(model).values()
            if activation is not None:
                own = {layer.activation for layer in layers} - {activation}
                was = " and ".join(sorted(NAMES_OF_FAMILY[name] for name in own))
                for layer in layers:
                    integration.give(layer, Activation(activation))
        else:
            was = _replaced(sparsify.plan(model, None, activation, "dense", served=served))
            integration.sparsify(model, activation=activation, strategy="dense")
    except (ValueError, TypeError) as error:
        if left and "stacked in one tensor" in str(error):
            raise WithoutZeros(f"MODEL: {left}", folder, "", [], left) from error
        if 'pass activation="relu"' not in str(error):
            raise RequestError(f"MODEL: {error}") from error
        message = f"MODEL: {error}. {remedy}"
        try:
            planned = sparsify.plan(model, None, "relu", "dense")
        except (ValueError, TypeError):
            raise RequestError(message) from error
        raise WithoutZeros(message, folder, _replaced(planned), [c.shape for c in planned.candidates], left) from error
    if not experts and not sparsify.layers(model):
        raise RequestError("MODEL: expected layers besides experts stacked in one tensor, got such experts alone")
    stored = (content.get("quantization_config") or {}).get("quant_method", "")
    return Loaded(model.to(device).eval(), tokenizer, folder, was, left, stored)


def _replaced(planned: sparsify.Plan) -> str:
    """The activations that a plan replaces, in words."""
    return " and ".join(sorted({c.was for c in planned.candidates if c.was is not None}))


# What the name of a model on the Hub looks like, and the files that are read.
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "tokenizer*", "vocab*", "*.model", "*.tiktoken")


def local(model: Path) -> Path:
    """The folder of a model: ``model`` itself or, if it is the name of one on the Hub, a download of that."""
    if model.exists() or not _HUB_NAME.fullmatch(model.as_posix()):
        return model
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return model
    try:
        name, ignored = model.as_posix(), ["*/*", "consolidated*"]
        folder = Path(snapshot_download(name, allow_patterns=list(_FILES), ignore_patterns=ignored))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["*.bin"], ignore_patterns=ignored)
        return folder
    except Exception as error:
        expected = "a folder, or a model of the Hugging Face Hub that can be downloaded"
        raise RequestError(f"MODEL: expected {expected}, got {str(model)!r}: {_line(error)}") from error


def configuration(folder: Path) -> dict[str, Any]:
    """The content of the folder's config.json. Raises RequestError without one."""
    path = folder / "config.json"
    if not path.is_file():
        got = "a folder without one" if folder.is_dir() else "no such folder; download a model of a hub first"
        raise RequestError(f"MODEL: expected a folder with a config.json, got {str(folder)!r} ({got})")
    try:
        content = layouts.read_json(path)
    except (OSError, ValueError) as error:
        raise RequestError(f"MODEL: {error}") from error
    if not isinstance(content.get("model_type"), str):
        raise RequestError(f"MODEL: expected a model_type in {str(path)!r}, got none")
    return content


@contextmanager
def _reading(folder: Path, what: str) -> Iterator[None]:
    """Turn any error of transformers about a folder into a RequestError of one line."""
    try:
        yield
    except Exception as error:
        raise RequestError(f"MODEL: expected {what} that can be read in {str(folder)!r}, got {_line(error)}") from error


def _line(error: Exception) -> str:
    """The type of an error and the first line of its text."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def read(loaded: Loaded, arguments: argparse.Namespace, least: int) -> Text:
    """Read the first ``--tokens`` of the text as sequences; RequestError for fewer than ``least`` tokens or no text.

    Documents follow each other with the special tokens that the tokenizer adds; if it begins texts with its BOS token,
    so does every sequence.
    """
    config: Any = loaded.model.config
    tokenizer = loaded.tokenizer
    longest = getattr(config, "max_position_embeddings", None) or _SEQUENCE
    length: int = arguments.sequence or min(_SEQUENCE, longest, max(2, arguments.tokens))
    if length > longest:
        raise RequestError(f"--sequence: expected at most the {longest} positions of the model, got {length}")
    if arguments.tokens < least:
        raise RequestError(f"--tokens: expected at least {least:,}, got {arguments.tokens:,}")
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("a")["input_ids"][:1] != [bos]:
        # it does not begin texts with that
        bos = None
    sequences: list[list[int]] = [[]]
    missing: int = arguments.tokens
    files = 0
    for document in _documents(arguments.text, _CHARACTERS * arguments.tokens):
        before = missing
        for token in tokenizer(document, verbose=False)["input_ids"]:
            if len(sequences[-1]) == length:
                sequences.append([])
            first = [bos] if not sequences[-1] and bos not in (None, token) and missing > 1 else []
            sequences[-1] += [*first, token]
            missing -= 1 + len(first)
            if not missing:
                break
        files += missing < before
        if not missing:
            break
    text = Text([sequence for sequence in sequences if sequence], files)
    if text.tokens < least:
        got = f"{text.tokens:,} in {counted(files, 'file')} of {', '.join(map(str, arguments.text))}"
        expected = f"text of at least {least:,} tokens"
        raise RequestError(f"--text: expected {expected}, got {got} (--tokens {arguments.tokens})")
    highest = max(map(max, text.sequences))
    if highest >= config.vocab_size:
        raise RequestError(f"MODEL: its tokenizer gives token {highest}, its vocabulary has {config.vocab_size} tokens")
    return text


def _documents(paths: Sequence[Path], most: int) -> Iterator[str]:
    """The texts of files, each of at most so many characters; files of a folder that are no text are left out."""
    for path in paths:
        if not path.is_dir():
            yield _text(path, most)
            continue
        files = list(files_below(path, ""))
        # neighbours by name would be alike
        random.Random(0).shuffle(files)
        for file in files:
            with suppress(RequestError):
                yield _text(file, most)


def _text(path: Path, most: int) -> str:
    """The first characters of a file of UTF-8; RequestError if it cannot be read, is blank or is no text."""
    try:
        if path.exists() and not path.is_file():
            raise RequestError(f"--text: expected a text file or a folder, got {str(path)!r} (neither)")
        with path.open(encoding="utf-8") as file:
            text = file.read(most)
        why = "a zero byte" if "\0" in text else "" if text.strip() else "it is blank"
    except FileNotFoundError:
        raise RequestError(f"--text: expected a text file or a folder, got {str(path)!r} (no such file)") from None
    except UnicodeDecodeError as error:
        why = error.reason
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise RequestError(f"--text: expected UTF-8 text, got {str(path)!r} ({why})")
    return text


def batches(
    sequences: Sequence[Sequence[int]], size: int, done: Callable[[int], object] | None = None
) -> Iterator[dict[str, Any]]:
    """What a body is called with for ``size`` sequences at a time, padded on the right; ``done`` gets their tokens."""
    for first in range(0, len(sequences), size):
        rows = sequences[first : first + size]
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device="cpu")
        lengths = torch.tensor([len(row) for row in rows], device="cpu")
        mask = torch.arange(longest, device="cpu") < lengths[:, None]
        yield {"input_ids": ids, "attention_mask": None if bool(mask.all()) else mask.long(), "use_cache": False}
        if done is not None:
            done(int(lengths.sum()))


@contextmanager
def progress(tokens: int, what: str) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr if that is a terminal; yield the function that takes the number of tokens done."""
    from tqdm import tqdm

    with tqdm(total=tokens, unit=" tokens", unit_scale=True, desc=what, disable=None) as bar:
        yield bar.update
