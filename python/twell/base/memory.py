"""Tensors in memory: which share a byte, have two elements in one place, or are read by a captured graph."""

import functools
import math
from collections import Counter
from collections.abc import Mapping

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from twell.runtime import modes

# Storages that captured CUDA graphs read. While a weak reference exists, no other storage gets its address.
_CAPTURED: dict[int, StorageWeakRef] = {}


def note_capture(tensor: Tensor) -> None:
    """Remember that a CUDA graph reads the memory of ``tensor`` at its address."""
    storage = tensor.untyped_storage()
    if storage._cdata not in _CAPTURED:
        for gone in [at for at, known in list(_CAPTURED.items()) if known.expired()]:  # type: ignore[no-untyped-call]
            _CAPTURED.pop(gone, None)
        _CAPTURED[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def is_captured(tensor: Tensor) -> bool:
    """Whether ``note_capture`` was told of the memory of ``tensor``."""
    return bool(_CAPTURED) and tensor.untyped_storage()._cdata in _CAPTURED


def shared(written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The names of two tensors that share a byte, the first of them ``written``; None if there are none.

    While torch.compile traces, and for tensors without values, only the same object counts as sharing.
    """
    tensors = [(name, tensor, *_extent(tensor)) for both in (written, read) for name, tensor in both.items()]
    for i, (name, tensor, first, last) in enumerate(tensors[: len(written)]):
        for other, second, begin, end in tensors[i + 1 :]:
            near = begin <= last and first <= end and tensor.device == second.device
            if tensor is second or (near and _overlap(tensor, second)):
                return name, other
    return None


def folded(matrix: Tensor) -> bool:
    """Whether two elements of ``matrix`` [R, C] are in one place."""
    if not _is_real(matrix):
        return False
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    common = math.gcd(down, across)
    if not common:
        return bool(matrix.numel() > 1)
    # the shortest step back to the same address: so many rows one way, so many columns the other
    return across // common < rows and down // common < columns


def _is_real(tensor: Tensor) -> bool:
    """Whether ``tensor`` has elements in memory, unlike its stand-in in a trace or transform."""
    if modes.compiling() or modes.is_wrapped(tensor):
        return False
    return type(tensor) in modes.PLAIN_TENSORS and not tensor.is_meta and tensor.numel() > 0


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first and the last byte; an empty range where there are none."""
    if not _is_real(tensor):
        return 0, -1
    first, reach = tensor.data_ptr(), 1
    for length, stride in zip(tensor.shape, tensor.stride()):
        reach += (length - 1) * stride
    return first, first + reach * tensor.element_size() - 1


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether some byte belongs to both."""
    # a common byte is a sum of steps, forwards through a and backwards through b, from a's first byte to b's last
    steps = Counter[int]()
    for tensor in (a, b):
        size = tensor.element_size()
        steps[1] += size - 1
        for length, stride in zip(tensor.shape, tensor.stride()):
            steps[stride * size] += length - 1
    distance = _extent(b)[1] - a.data_ptr()
    return _reaches(distance, tuple(sorted(((s, n) for s, n in steps.items() if s and n), reverse=True)))


@functools.lru_cache(4096)
def _reaches(distance: int, steps: tuple[tuple[int, int], ...]) -> bool:
    """Whether ``distance`` is a sum of steps, each (length, largest count), the longest first."""
    if not steps or distance <= 0:
        return distance == 0
    if distance % math.gcd(*(length for length, _ in steps)):
        return False
    (length, most), rest = steps[0], steps[1:]
    fewest = -((sum(step * count for step, count in rest) - distance) // length)
    counts = range(max(fewest, 0), min(distance // length, most) + 1)
    return any(_reaches(distance - length * count, rest) for count in counts)
