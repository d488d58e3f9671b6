"""What commands are asked for: checking it, and what is raised where it cannot be met."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch


class RequestError(ValueError):
    """What the command line asks for cannot be met; the message says what was got and what expected."""


def at_least(low: int) -> Callable[[str], int]:
    """What argparse makes an integer of at least ``low`` with."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {low}, got {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {low}, got {value}")
        return value

    return parse


def exit_status(command: str, run: Callable[[], int]) -> int:
    """What ``run`` returns; 2 where the request cannot be met, 130 for Ctrl-C, after saying so on stderr.

    1, without a word, where nobody reads what is printed any more.
    """
    try:
        status = run()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # nor will what is left in the buffer be
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RequestError, ImportError) as error:
        print(f"{command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted", file=sys.stderr)
        return 130


def pick_device(name: str | None) -> torch.device:
    """The device of that name, by default a GPU where there is one.

    RequestError where torch cannot use it.
    """
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
        raise RequestError(f"--device: expected cpu, for there is no CUDA device that torch can use, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise RequestError(f"--device: expected one of {count} CUDA devices that torch can use, got {name!r}")
    return device
