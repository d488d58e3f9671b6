"""NVTX ranges around functions, operators and kernels, which ``TWELL_NVTX=1`` adds to a profiler's timeline.

They are torch's own, named as the functions (``sparse_gated_ffn`` with its strategy and sizes behind it,
``sparse_gated_ffn.backward``), the operators and the kernels. The variable is read at import. Nothing is marked while
torch.compile traces; graph capture sees no difference.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from twell.runtime import env, modes
from twell.runtime.log import warn_once

Context = contextlib.AbstractContextManager[None]
_F = TypeVar("_F", bound=Callable[..., Any])

# Whether ranges are marked; fixed at import.
ON = env.nvtx() and hasattr(torch._C, "_nvtx")
if env.nvtx() and not ON:
    warn_once("TWELL_NVTX=1 marks nothing: it needs a torch for CUDA")


def range(name: str, **shown: object) -> Context:
    """A context that marks a range ``name``, with what is ``shown`` behind it."""
    if not ON or modes.compiling():
        return contextlib.nullcontext()
    return torch.cuda.nvtx.range(" ".join([name, *(f"{key}={value}" for key, value in shown.items())]))


def marked(describe: Callable[..., Context]) -> Callable[[_F], _F]:
    """Decorate a function so that its calls run in the context that ``describe`` makes of their arguments."""

    def decorate(function: _F) -> _F:
        if not ON:
            return function

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            with describe(*arguments, **named):
                return function(*arguments, **named)

        return call  # type: ignore[return-value]

    return decorate
