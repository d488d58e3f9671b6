"""How ``down_proj.weight`` lies in memory: by rows of neurons for the kernels, as nn.Linear stores it for other code.

With ``down_layout="auto"`` a layer lays its weight by rows before an inference call on a GPU, if nothing but the layer
holds the Parameter and its memory, so that nothing else can notice, and puts it back before it hands it out: when it is
listed, saved, copied, moved, or trained.
"""

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.multiprocessing.reductions import shared_cache

from twell.base import memory
from twell.call.admission import sharded
from twell.call.plain import behaves
from twell.runtime import device, modes
from twell.runtime.log import warn_once

# Whether modules are listed for twell itself, which hands out no parameters.
_UNLISTED: ContextVar[bool] = ContextVar("unlisted", default=False)


@contextlib.contextmanager
def unlisted() -> Iterator[None]:
    """Walks through modules within this put no weight back."""
    token = _UNLISTED.set(True)
    try:
        yield
    finally:
        _UNLISTED.reset(token)


class Laid:
    """What a layer has laid by rows by itself.

    weight: the Parameter while it lies so. It is kept here, too, because a parametrization moves it to another place.
    """

    def __init__(self) -> None:
        # held for all of a call, so that no thread exchanges the memory that another one is about to read
        self.lock = threading.RLock()
        self.weight: nn.Parameter | None = None
        # whether no call has looked at the weight since it was made or put back
        self.fresh = True
        # (address, stream): what the allocator knows to be read there, which it then does not reuse too early
        self.reads: set[tuple[int, int]] = set()

    def put_back(self) -> None:
        """Store the weight as nn.Linear does."""
        # a compiler lists what it traces, to read it
        if modes.compiling() or self.weight is None or _UNLISTED.get() or TracingContext.try_get() is not None:
            return
        with self.lock:
            if self.weight is None:
                return
            captured = memory.is_captured(self.weight) or modes.capturing(self.weight)
            if captured or _uses(self.weight)[:2] != _USES_OF_ONE[:2]:
                reader = "a CUDA graph reads it" if captured else "another tensor has its memory"
                then = "capture again" if captured else "make that one again"
                warn_once(
                    "a down weight of a twell layer stays stored by rows although its layer was listed, saved, moved, "
                    f'copied or trained: {reader}; call twell.nn.set_down_layout(model, "linear") and {then}'
                )
                return
            self.note_reading(self.weight)
            store(self.weight, rows=False)
            _wait(self.weight)
            self.weight, self.fresh = None, True
            self.reads.clear()

    def note_reading(self, weight: Tensor) -> None:
        """Let the allocator know that the current stream reads the weight, or twell that a graph does."""
        if not weight.is_cuda:
            return
        read = weight.data_ptr(), torch._C._cuda_getCurrentRawStream(weight.device.index)
        if modes.capturing(weight):
            memory.note_capture(weight)
        elif read not in self.reads and modes.eager((weight,)):
            self.reads.add(read)
            weight.record_stream(torch.cuda.current_stream(weight.device))


def lock_of(layer: Any) -> contextlib.AbstractContextManager[Any] | None:
    """What an eager call of ``layer`` holds, and settles its down weight first; None where that stays as it lies."""
    weight = _parameters(layer).get("weight")
    layer._laid.fresh = False
    if type(weight) is nn.Parameter and is_on_gpu(weight):
        if layer._down_layout == "auto":
            return layer._laid.lock  # type: ignore[no-any-return]
        if modes.capturing(weight):
            memory.note_capture(weight)
    return None


def lay(layers: Iterable[Any]) -> None:
    """Lay the down weights of ``layers`` as inference wants them, for calls that are compiled before an eager one."""
    for layer in layers:
        if lock := lock_of(layer):
            with torch.no_grad(), lock:
                settle(layer)


def _parameters(layer: Any) -> Any:
    # a look-up of nn.Module costs a microsecond
    return (layer._modules.get("down_proj") or layer.down_proj)._parameters


def settle(layer: Any) -> None:
    """Lay the down weight of a layer as its next call wants it, with gradients or without."""
    # only the dictionary holds the weight here, so that other holders can be counted
    laid, parameters = layer._laid, _parameters(layer)
    trains = torch.is_grad_enabled() and parameters["weight"].requires_grad
    if laid.weight is parameters["weight"]:
        if trains:
            laid.put_back()
    elif not (trains or obstacle(layer)):
        # one that was replaced since
        laid.put_back()
        laid.note_reading(parameters["weight"])
        data = _copied(parameters["weight"], rows=True)
        _wait(data)
        # another thread may have listed it meanwhile
        if not obstacle(layer):
            parameters["weight"].data = data
            laid.weight = parameters["weight"]
            laid.reads.clear()
    laid.note_reading(parameters["weight"])


def obstacle(layer: Any) -> str:
    """What keeps a layer from laying its down weight by rows by itself; "" if nothing does."""
    parameters = layer.down_proj._parameters
    # before this function holds the Parameter itself
    alone = _references(parameters) == _ALONE if "weight" in parameters else False
    weight = parameters.get("weight")
    if layer._down_layout != "auto":
        return "it was set so"
    plain = type(weight) is nn.Parameter and is_on_gpu(weight) and not weight.is_inference()
    if not plain or not modes.is_in_memory(weight):
        return "it is no plain parameter on a GPU"
    if layer.training:
        return "the layer is in training mode"
    if not alone or weight.grad is not None or not _owns_memory(weight):
        return "other code holds it or its memory, as an optimizer, a state dict or a view does"
    if memory.is_captured(weight) or modes.capturing(weight):
        return "a CUDA graph reads it"
    if not modes.eager((weight,)):
        return "the call is traced or transformed"
    if layer._planned(weight, False).strategy in ("none", "dense"):
        return "inference runs dense"
    return ""


def note_capture(layer: Any) -> None:
    """Note that a graph which is captured now reads the down weight of ``layer``, if one is."""
    weight = layer.down_proj._parameters.get("weight") if isinstance(layer.down_proj, nn.Linear) else None
    if type(weight) is nn.Parameter and not modes.compiling() and modes.capturing(weight):
        memory.note_capture(weight)


def is_on_gpu(weight: Tensor | None) -> bool:
    """Whether kernels of a GPU read the weight; a CPU has no use for rows."""
    return weight is not None and weight.is_cuda


def _references(parameters: dict[str, Any]) -> int:
    return sys.getrefcount(parameters["weight"])


# of a value that the dictionary alone holds
_ALONE = _references({"weight": object()})


def _uses(tensor: Tensor) -> tuple[int, int, int]:
    """How often the storage of ``tensor`` is held, in C++ and in Python, and the tensor in C++."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage), tensor._use_count()  # type: ignore[attr-defined]


# of a tensor whose memory no other one has
_USES_OF_ONE = _uses(torch.empty(1, device="cpu"))


def _owns_memory(weight: Tensor) -> bool:
    """Whether all of the storage is the weight's, and no other tensor, export or process has it."""
    storage = weight.untyped_storage()
    whole = weight.storage_offset() == 0 and storage.nbytes() == weight.nbytes
    place = storage._cdata
    del storage
    sent = any(shared.cdata == place for shared in list(shared_cache.values()))
    return whole and not sent and _uses(weight) == _USES_OF_ONE


def store(weight: Tensor, rows: bool) -> None:
    """Store the Parameter ``weight`` [K, N] and its gradient by rows of neurons, or contiguous."""
    if sharded({"weight": weight}):
        from twell.call import sharding

        sharding.lay(weight, rows)  # type: ignore[arg-type]
    # a quantised one has a layout of its own
    elif behaves(weight):
        for tensor in (weight, weight.grad if weight.is_leaf else None):
            if tensor is not None and not (tensor.t() if rows else tensor).is_contiguous():
                # an inference tensor takes only inference data, a normal tensor only normal data
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.data = _copied(tensor, rows)


def _copied(tensor: Tensor, rows: bool) -> Tensor:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        return tensor.data.t().contiguous().t() if rows else tensor.data.contiguous()


def _wait(made: Tensor) -> None:
    """Wait for the current stream, which makes the tensor: other streams may read it next."""
    if made.is_cuda:
        with device.relaxed_capture():
            torch.cuda.current_stream(made.device).synchronize()
