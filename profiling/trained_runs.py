"""What profiling/quality.py and profiling/relufy.py share: the models, files of runs, differences, sentences."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from profiling.draw.common import ResultError, markdown

# 30 M parameters
MODEL = (
    "--layers 8 --hidden 512 --intermediate 1408 --heads 8 --vocab 8192 --sequence 1024 --micro-batch 32 "
    "--tokens-per-step 32768 --lr 1e-3 --min-lr 0"
).split()


def load(path: Path, what: str, results: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Read a file of runs. ResultError if it is another file, of which ``results`` makes nothing."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        results(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultError(f"expected the results of {what}, got {str(path)!r} ({error})") from error
    return found


def identity(choice: argparse.Namespace, names: Iterable[str], decided: Sequence[str]) -> dict[str, Any]:
    """The options that all runs of a file have in common: those of ``names`` that the program does not set."""
    names = [name for name in names if f"--{name.replace('_', '-')}" not in decided]
    return {name: getattr(choice, name) for name in (*names, "eval_sequences", "micro_batch")}


def given(name: str, arguments: Sequence[str]) -> bool:
    """Whether an option is among the arguments."""
    return any(each == name or each.startswith(f"{name}=") for each in arguments)


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation between seeds; None for one."""
    return statistics.stdev(values) if len(values) > 1 else None


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def added(blocks: Sequence[float], base_blocks: Sequence[float], base: float) -> tuple[float, float]:
    """The share by which the cross-entropy of micro-batches is above that of another model, and its standard error."""
    shares = [(mine - theirs) / base for mine, theirs in zip(blocks, base_blocks, strict=True)]
    return statistics.fmean(shares), standard_error(shares)


def models(document: dict[str, Any], parameters: Iterable[int]) -> str:
    """The size of the models."""
    arguments = document["arguments"]
    size = f"{max(parameters, default=0) / 1e6:.1f} M parameters"
    return f"{size}, {arguments['layers']} layers of {arguments['intermediate']:,} neurons"


def tokens(document: dict[str, Any]) -> int:
    """Those of a whole run."""
    count: int = document["arguments"]["steps"] * document["arguments"]["tokens_per_step"]
    return count


def note_of_errors(errors: Iterable[float | None]) -> list[str]:
    """A sentence on the noise of differences that the held-out text causes; none without errors."""
    known = [error for error in errors if error]
    text = "The choice of held-out text adds a standard error of up to {:.2f} % to differences."
    return [text.format(100 * max(known))] if known else []


def by_layer(header: Sequence[str], rows: Sequence[tuple[Sequence[str], Sequence[float]]]) -> str:
    """Markdown table of non-zeros by layer: the first cells of each row, and its layers."""
    count = max((len(layers) for _, layers in rows), default=0)
    cells = [[*first, *(f"{l0:.1f}" for l0 in layers)] for first, layers in rows]
    return markdown([*header, *(f"layer {i}" for i in range(count))], "l" + "r" * (len(header) - 1 + count), cells)
