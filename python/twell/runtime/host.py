"""The C runner of programs: ``libtwell_host.so``, which is built from ``host/program.c`` with a wheel's kernels.

Where it is not in use, Python runs programs launch by launch: with TWELL_DEBUG=1, which looks for faults behind each
launch, and in installs without the library.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from twell.runtime import env, packaged
from twell.runtime.log import logger, warn_once

LIBRARY = "libtwell_host.so"
# The first number of a program's code. host/program.c has the same one: change both where the code changes.
FORMAT = 1

# (code, kernel...) -> a program, which takes tensors and returns 0, or 1 + the index of one that is not as declared
Maker = Callable[..., Callable[..., int]]


def maker() -> Maker | None:
    """The C function that makes a program from its code, an int64 tensor, and its kernels; None if Python runs them."""
    return _in_use()[0]


def runner() -> str:
    """Which runner is in use, and why it is not the one in C."""
    return _in_use()[1]


@functools.cache
def _in_use() -> tuple[Maker | None, str]:
    maker, said = find(packaged.FOLDER / LIBRARY)
    logger.info("launches: %s", said)
    return maker, said


def find(library: Path) -> tuple[Maker | None, str]:
    """The maker in ``library``, None if Python runs programs, and what ``runner`` says; warns once if it fails."""
    if env.debug():
        return None, "Python (TWELL_DEBUG=1)"
    if not library.is_file():
        return None, f"Python (no {LIBRARY}: `pip install .` or `make wheel` in a checkout builds it)"
    try:
        packaged.require_whole(library)
        made: Maker = packaged.opened(library)["program"]
        # the smallest program: no operand, view or launch
        made(torch.tensor([FORMAT, 1, 0, 0, 0, 0, 0, 0], dtype=torch.int64, device="cpu"))
    except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as error:
        warn_once(f"{library} cannot be used, and launches take longer; install twell again: {error}")
        return None, f"Python ({LIBRARY} cannot be used: {error})"
    return made, f"C ({LIBRARY})"
