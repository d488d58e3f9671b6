"""Checks of public arguments: TypeError and ValueError that say "must be X, got Y"."""

import math
import numbers
from typing import Any


def require(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise TypeError unless ``value`` is an instance of ``kinds``; ``expected`` names them in words."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {expected}, got {_describe(value)}")


def require_flag(name: str, value: object) -> None:
    require(name, value, bool, "True or False")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def require_integer(name: str, value: Any, low: int) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {low}, got {_describe(value)}")
    if value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value}")


def require_positive(name: str, value: Any, high: float = math.inf) -> None:
    expected = "a finite number above 0" if high == math.inf else f"a number above 0 and at most {high}"
    _require_real(name, value, expected)
    if not (math.isfinite(value) and 0 < value <= high):
        raise ValueError(f"{name} must be {expected}, got {value}")


def require_number(name: str, value: Any, low: float, high: float = math.inf) -> None:
    expected = f"a finite number of at least {low}" if high == math.inf else f"a number from {low} to {high}"
    _require_real(name, value, expected)
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} must be {expected}, got {value}")


def _require_real(name: str, value: object, expected: str) -> None:
    # numbers of NumPy of any width, too; torch.compile traces the first test alone
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or isinstance(value, numbers.Real)):
        raise TypeError(f"{name} must be {expected}, got {_describe(value)}")


def _describe(value: object) -> str:
    return repr(value) if isinstance(value, (str, bool, int, float, type(None))) else type(value).__name__
