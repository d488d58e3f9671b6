"""Requests and tables of the command line: argument types, the device, errors, exit codes, columns of text."""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from twell.runtime.log import logger

# What a command may raise where it cannot do what was asked. Any other error is a fault of twell.
REFUSALS = (ValueError, NotImplementedError, OSError, ImportError)

DEVICE_HELP = "cpu, cuda or cuda:INDEX (default: cuda if there is one)"


class RequestError(ValueError):
    """A request that cannot be met; the message says "expected X, got Y"."""


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least ``low``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {low}, got {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {low}, got {value}")
        return value

    return parse


def number_from(low: float, high: float = math.inf) -> Callable[[str], float]:
    """An argparse type: a finite number from ``low`` to ``high``."""
    limits = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
    return _number(limits, lambda value: low <= value <= high)


def number_above(low: float) -> Callable[[str], float]:
    """An argparse type: a finite number above ``low``."""
    return _number(f"above {low:g}", lambda value: value > low)


def _number(limits: str, accept: Callable[[float], bool]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and accept(value)):
            raise argparse.ArgumentTypeError(f"expected a number {limits}, got {text!r}")
        return value

    return parse


def exit_status(command: str, run: Callable[[], int]) -> int:
    """Return the status of ``run``; 2 for a request that cannot be met and 130 for Ctrl-C, with a line on stderr."""
    try:
        status = run()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # the reader of stdout is gone, and the rest of the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except REFUSALS as error:
        logger.debug("where the error below comes from", exc_info=True)
        print(f"{command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted", file=sys.stderr)
        return 130


def pick_device(name: str | None) -> torch.device:
    """The device of that name, by default a GPU if there is one. Raises RequestError if torch cannot use it."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RequestError(f"--device: expected cpu, cuda or cuda:INDEX, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise RequestError(f"--device: expected cpu, cuda or cuda:INDEX, got {name!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and not count:
        raise RequestError(f"--device: expected cpu, as torch can use no CUDA device, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise RequestError(f"--device: expected one of {count} CUDA devices that torch can use, got {name!r}")
    return device


def check_json(option: str, path: Path | None) -> None:
    """Raise RequestError unless ``path`` is None or a file of JSON can be written there."""
    if path is None:
        return
    if path.suffix.lower() != ".json":
        raise RequestError(f"{option}: expected a path that ends in .json, got {str(path)!r}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise RequestError(f"{option}: expected an existing folder to write to, got {str(folder)!r}")
    try:
        if path.is_dir():
            raise IsADirectoryError
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError:
        raise RequestError(f"{option}: expected a file that can be written, got {str(path)!r}") from None
