"""NVTX ranges around functions, operators and kernels, which ``TWELL_NVTX=1`` adds to a profiler's timeline.

All are in the domain "twell". The category is the phase (inference, training forward, backward). The payload has the
sizes: m tokens, hidden size k, n neurons, dtype, and strategy or compression where there is a choice. The names are
those of the functions (``sparse_gated_ffn``, ``sparse_gated_ffn.backward``), of their operators (``hybrid_forward``)
and of the kernels that these launch (``compact``, ``sampled_up``, ``gathered``). A kernel with its operator's name has
no second range.

The variable is read at import. Without it ``marked`` returns the function unchanged and ``range`` an empty context.
With it, the package nvtx from 0.2.14 on (structured payloads) and numpy are needed, else a warning says that nothing is
marked. Nothing is marked while torch.compile traces; graph capture sees no difference.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from types import TracebackType
from typing import Any, TypeVar

import torch

from twell import _modes
from twell._runtime import env
from twell._runtime.log import warn_once

Context = contextlib.AbstractContextManager[None]
Value = int | float | str
_F = TypeVar("_F", bound=Callable[..., Any])

INFERENCE, FORWARD, BACKWARD = "inference", "training forward", "backward"

# The first version of nvtx that takes numpy arrays, hence structures, as payloads.
_NEEDED = (0, 2, 14)


def _connect() -> Any:
    """nvtx's object for the domain "twell"; None if marking is off or impossible."""
    if not env.nvtx():
        return None
    try:
        import numpy  # noqa: F401
        import nvtx

        found = metadata.version("nvtx")
    except (ImportError, metadata.PackageNotFoundError) as error:
        reason = str(error)
    else:
        if tuple(map(int, re.findall(r"\d+", found)[:3])) >= _NEEDED:
            return nvtx.get_domain("twell")
        reason = f"got nvtx {found}"
    needed = ".".join(map(str, _NEEDED))
    warn_once(
        f'TWELL_NVTX=1 marks nothing: it needs nvtx {needed} or newer and numpy, pip install "twell[bench]" ({reason})'
    )
    return None


_DOMAIN = _connect()

# Whether ranges are marked; fixed at import.
ON = _DOMAIN is not None


class _Innermost(threading.local):
    """The range that the current thread is in."""

    name = ""
    category = INFERENCE


_INNERMOST = _Innermost()
_NOTHING: Context = contextlib.nullcontext()


@functools.lru_cache(4096)
def _attributes(name: str, category: str, payload: tuple[tuple[str, Value], ...]) -> Any:
    """The event attributes of a range. Calls of a layer repeat, so they are made once."""
    import numpy as np

    structure = None
    if payload:
        kinds: dict[type, str] = {int: "i8", float: "f8"}
        fields = [(key, kinds.get(type(value)) or f"U{max(len(str(value)), 1)}") for key, value in payload]
        structure = np.array(tuple(value for _, value in payload), dtype=fields)
    return _DOMAIN.get_event_attributes(message=name, category=category, payload=structure)


class _Range(contextlib.AbstractContextManager[None]):
    """A range of the current thread; none inside one of the same name."""

    def __init__(self, name: str, category: str | None, payload: tuple[tuple[str, Value], ...]) -> None:
        self._name, self._category, self._payload = name, category, payload

    def __enter__(self) -> None:
        self._outer = _INNERMOST.name, _INNERMOST.category
        if self._name != _INNERMOST.name:
            category = self._category or _INNERMOST.category
            _DOMAIN.push_range(_attributes(self._name, category, self._payload))
            _INNERMOST.name, _INNERMOST.category = self._name, category

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._name != self._outer[0]:
            _DOMAIN.pop_range()
            _INNERMOST.name, _INNERMOST.category = self._outer


def range(name: str, *, category: str | None = None, **payload: Any) -> Context:
    """A context that marks a range ``name``; the default category is that of the enclosing range.

    ``payload`` shows integers, floats, strings and dtypes and leaves out other values (a symbolic size, None).
    """
    if not ON or _modes.compiling():
        return _NOTHING
    shown = ((k, str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v) for k, v in payload.items())
    return _Range(name, category, tuple((k, v) for k, v in shown if type(v) in (int, float, str)))


def marked(describe: Callable[..., Context]) -> Callable[[_F], _F]:
    """Decorate a function so that its calls run in the context that ``describe`` makes of their arguments."""

    def decorate(function: _F) -> _F:
        if not ON:
            return function

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if _modes.compiling():
                return function(*arguments, **named)
            with describe(*arguments, **named):
                return function(*arguments, **named)

        return call  # type: ignore[return-value]

    return decorate


def sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """A payload from the named arguments of an operator or function: m, k, n, dtype, compression where known.

    Tensors may have any shape: the operator checks them.
    """
    weight = next((given[name] for name in ("w_gate", "w_up", "w_down") if given.get(name) is not None), None)
    tokens = next((given[name] for name in ("x", "words", "gate") if given.get(name) is not None), None)
    found: dict[str, Any] = {}
    if tokens is not None:
        found["m"] = tokens.shape[:-1].numel()
    if weight is not None and weight.dim() == 2:
        found["k"], found["n"] = weight.shape[1], weight.shape[0]
    elif "gate" in given and given["gate"].dim():
        found["n"] = given["gate"].shape[-1]
    elif "n" in given:
        found["n"] = given["n"]
    # words are integers, the spill beside them has the dtype of the gate
    values = given.get("spill", tokens)
    if values is not None:
        found["dtype"] = values.dtype
    if "compression" in given:
        found["compression"] = given["compression"]
    return found
