"""Finding, loading and calling a kernel: packaged library, then user cache, then compiling.

``specs``, ``geometry``, ``screen`` and ``fingerprint`` are the pure-Python part of the kernel package, which is
``twell.cute_kernels`` when installed and the top-level ``cute_kernels`` in a source checkout. ``kernel_module`` imports
the rest, which needs cutlass.
"""

import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

_PACKAGE = "twell.cute_kernels" if importlib.util.find_spec("twell.cute_kernels") else "cute_kernels"

if TYPE_CHECKING:
    from cute_kernels import fingerprint, geometry, screen, specs
else:
    fingerprint = importlib.import_module(f"{_PACKAGE}.fingerprint")
    geometry = importlib.import_module(f"{_PACKAGE}.geometry")
    screen = importlib.import_module(f"{_PACKAGE}.screen")
    specs = importlib.import_module(f"{_PACKAGE}.specs")


def kernel_module(name: str) -> ModuleType:
    """Import a module of the kernel package by its name inside it."""
    return importlib.import_module(f"{_PACKAGE}.{name}")


__all__ = ["fingerprint", "geometry", "kernel_module", "screen", "specs"]
