"""From a spec to a callable kernel: this process, the packaged library, the user cache, compiling."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from twell.runtime import cache, device, fingerprint, packaged, specs
from twell.runtime.log import logger

# Compiling is not thread-safe.
_lock = threading.Lock()
_kernels: dict[tuple[str, specs.Spec], packaged.Kernel] = {}
_missing: set[tuple[str, specs.Spec]] = set()


def resolve(spec: specs.Spec, arch: str = fingerprint.ARCH) -> packaged.Kernel:
    """The compiled function of ``spec``; RuntimeError, naming it, if there is no compiler or a graph is captured."""
    key = arch, spec
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _Loading(key, _find(spec, arch))
    return kernel


class _Loading:
    """A kernel whose first call loads its code onto the GPU."""

    def __init__(self, key: tuple[str, specs.Spec], kernel: packaged.Kernel) -> None:
        self.key, self.kernel = key, kernel

    def __call__(self, *arguments: Any) -> Any:
        with loading():
            result = self.kernel(*arguments)
        _kernels[self.key] = self.kernel
        return result


def loading() -> AbstractContextManager[None]:
    """A context for calls that load code onto the GPU: a capture neither records nor forbids that."""
    return device.relaxed_capture() if torch.cuda.is_initialized() else nullcontext()  # type: ignore[no-untyped-call]


def found(needed: Sequence[specs.Spec], arch: str) -> tuple[list[packaged.Kernel], bool]:
    """The kernels of ``needed``, and whether their code is loaded: call them in ``loading`` first if it is not."""
    kernels = [resolve(spec, arch) for spec in needed]
    ready = [kernel.kernel if isinstance(kernel, _Loading) else kernel for kernel in kernels]
    return ready, ready == kernels


def note_loaded(needed: Sequence[specs.Spec], arch: str) -> None:
    for spec in needed:
        kernel = _kernels.get((arch, spec))
        if isinstance(kernel, _Loading):
            _kernels[arch, spec] = kernel.kernel


def launchable(index: int, *needed: specs.Spec) -> bool:
    """Whether kernels can be launched on device ``index``, for callers that have an alternative."""
    try:
        arch = device.architecture(index)
        return arch is not None and all(obtainable(spec, arch) for spec in needed)
    except RuntimeError:
        # no cuda-python
        return False


def require_architecture(index: int) -> str:
    """The architecture of the kernels that device ``index`` runs; raises NotImplementedError if there are none."""
    arch = device.architecture(index)
    if arch is None:
        major, minor = device.capability(index)
        raise NotImplementedError(
            f"the sparse kernels need compute capability {device.SUPPORTED}, got {major}.{minor} on cuda:{index}; "
            'use strategy="dense"'
        )
    return arch


def obtainable(spec: specs.Spec, arch: str = fingerprint.ARCH) -> bool:
    """Whether the kernel of ``spec`` loads; a failure is logged and final, except in a capture."""
    if (arch, spec) in _kernels:
        return True
    if (arch, spec) in _missing:
        return False
    try:
        resolve(spec, arch)
    except RuntimeError as error:
        if not _capturing():
            _missing.add((arch, spec))
            logger.warning("continuing without kernel %s: %s", spec.symbol, error)
        return False
    return True


def _find(spec: specs.Spec, arch: str) -> packaged.Kernel:
    kernel = packaged.find(spec.symbol, arch)
    if kernel is not None:
        logger.debug("kernel %s is packaged", spec.symbol)
        return kernel
    if _capturing():
        raise RuntimeError(
            f"kernel {spec} is not loaded yet and a CUDA graph is being captured; make the call once before capturing"
        )
    return cache.load(spec, arch)


def _capturing() -> bool:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return device.is_capturing(torch.cuda.current_stream().cuda_stream)
