"""Tensors in memory: which overlap, have two elements in one place, or are read by a captured graph."""

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
    """The names of two tensors whose memory overlaps, the first of them ``written``; None if there are none.

    Memory is all from the first byte to the last. While torch.compile traces, and for tensors without values, only the
    same object counts.
    """
    tensors = [(name, tensor, *_extent(tensor)) for both in (written, read) for name, tensor in both.items()]
    for i, (name, tensor, first, last) in enumerate(tensors[: len(written)]):
        for other, second, begin, end in tensors[i + 1 :]:
            if tensor is second or (begin <= last and first <= end and tensor.device == second.device):
                return name, other
    return None


def folded(matrix: Tensor) -> bool:
    """Whether lines of ``matrix`` [R, C], rows or columns, begin within the one before, as where it is expanded."""
    if not _is_real(matrix):
        return False
    (step, length), (pitch, count) = sorted(zip(matrix.stride(), matrix.shape))
    return (length > 1 and not step) or (count > 1 and pitch <= (length - 1) * step)


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
