"""What commands are asked for: checking it, and what is raised where it cannot be met."""

from __future__ import annotations

import argparse
from collections.abc import Callable


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
