"""int8 copies of gate weights for the screen of the gate, which modules may keep, and how operators find them.

``twell.nn.keep_gate_copies`` gives each module a ``GateCopy``. Operators find it by the memory of the weight, as they
find the layer's ``AutoStrategy``; so graphs do not know of it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from twell._auto import place

# what ``quantize_gate`` returns
Quantized = TypeVar("Quantized", bound=tuple[Tensor, ...])


class _Made(NamedTuple):
    """A copy. ``storage`` is that of its weight: while this reference exists, no other storage gets its address.

    state: what differs once the weight is written or replaced. sure: False if the graph that made it may have written
    the weight since. ready: of a GPU, when ``stream`` has made the copy.
    """

    quantized: tuple[Tensor, ...]
    state: tuple[Any, ...]
    storage: StorageWeakRef
    sure: bool
    stream: torch.cuda.Stream | None
    ready: torch.cuda.Event | None


class GateCopy:
    """The int8 copy of one gate weight, made when it is first wanted and again when the weight has changed.

    A step of any optimizer forgets it, since fused ones write parameters without counting it. Copies and pickles of it
    are empty.

    A compiled graph counts its writes of a weight before it runs. So a copy that an operator of a graph has made is
    made once more by the next call, unless that counts another write.
    """

    def __init__(self) -> None:
        # the strategy that screens few tokens, whatever strategy they run by; "" for none
        self.few = "screened"
        self._made: _Made | None = None
        self._captured: list[tuple[Tensor, ...]] = []
        hook = register_optimizer_step_post_hook(functools.partial(_forget, weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def __reduce__(self) -> tuple[Any, ...]:
        return GateCopy, ()

    def forget(self) -> None:
        """Make the next call make the copy again."""
        self._made = None

    @property
    def nbytes(self) -> int:
        """The memory of the copy, 0 before it is made."""
        return 0 if self._made is None else sum(t.untyped_storage().nbytes() for t in self._made.quantized)

    def of(self, weight: Tensor, screen: str, make: Callable[[], Quantized]) -> Quantized:
        """The copy of ``weight`` for the strategy ``screen``, by ``make`` if there is none.

        A captured graph keeps the copy that an earlier call has made, and so does this object: its memory stays.
        """
        # inference tensors do not count their writes
        if weight.is_inference():
            return make()
        state = _state(weight, screen)
        if _captures(weight):
            return self._for_graph(state) or make()
        stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
        made = self._made
        if made is None or made.state != state or not made.sure:
            sure = not _PLACE.in_graph or (made is not None and made.state == state)
            # the old one goes first
            self._made = made = None
            quantized = make()
            ready = None if stream is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
            if ready is not None:
                ready.record(stream)
            storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
            self._made = made = _Made(quantized, state, storage, sure, stream, ready)
        elif stream is not None and made.ready is not None and stream != made.stream:
            made.ready.wait(stream)
            for tensor in made.quantized:
                # its memory is not given to others before this stream has read it
                tensor.record_stream(stream)
        return cast(Quantized, made.quantized)

    def for_few(
        self, weight: Tensor, screen: str | None, make: Callable[[bool], Quantized]
    ) -> tuple[Quantized, bool] | None:
        """``of`` for few tokens, and whether it is rounded to nearest: None where each call would make its own.

        ``screen``: the strategy that screens them, None for ``few``.
        """
        screen = self.few if screen is None else screen
        nearest = screen == "proven"
        if not screen or weight.is_inference():
            return None
        if _captures(weight):
            found = self._for_graph(_state(weight, screen))
            return None if found is None else (found, nearest)
        return self.of(weight, screen, lambda: make(nearest)), nearest

    def _for_graph(self, state: tuple[Any, ...]) -> Quantized | None:
        """The copy that was made before a capture, if it is of this state."""
        made = self._made
        if made is None or made.state != state:
            return None
        if all(quantized is not made.quantized for quantized in self._captured):
            self._captured.append(made.quantized)
        return cast(Quantized, made.quantized)


def _forget(copy: weakref.ref[GateCopy], *_: Any) -> None:
    """What an optimizer calls after a step."""
    found = copy()
    if found is not None:
        found.forget()


def _captures(weight: Tensor) -> bool:
    """Whether a CUDA graph is captured now."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _state(weight: Tensor, screen: str) -> tuple[Any, ...]:
    """What differs once a weight is written or replaced."""
    return screen, place(weight), weight.data_ptr(), weight._version, weight.shape, weight.stride(), weight.dtype


class _Place(threading.local):
    """Where this thread is: in a function of twell that no graph has traced, or in an operator that a graph calls."""

    eager = in_graph = False


_PLACE = _Place()


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """For a function that calls an operator, and is not traced."""
    _PLACE.eager = True
    try:
        yield
    finally:
        _PLACE.eager = False


@contextlib.contextmanager
def in_graph() -> Iterator[None]:
    """For an operator: its caller may be a compiled graph."""
    _PLACE.in_graph = not _PLACE.eager
    try:
        yield
    finally:
        _PLACE.in_graph = False


_COPIES: weakref.WeakValueDictionary[tuple[int, int], GateCopy] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def enroll(weight: Tensor, copy: GateCopy, few: str = "screened") -> None:
    """Let the operators find ``copy`` by its weight, as long as its module keeps it; ``few`` is as in ``GateCopy``."""
    copy.few = few
    if _COPIES.get(place(weight)) is not copy:
        with _lock:
            # a copy is of one weight
            _remove(copy)
            _COPIES[place(weight)] = copy


def retire(copy: GateCopy) -> bool:
    """Let no operator find ``copy`` again. Returns whether captured graphs read it: then the object must stay."""
    copy.forget()
    with _lock:
        _remove(copy)
    return bool(copy._captured)


def _remove(copy: GateCopy) -> None:
    for at in [at for at, known in _COPIES.items() if known is copy]:
        del _COPIES[at]


def withdraw(weight: Tensor) -> None:
    """The inverse of ``enroll``."""
    with _lock:
        _COPIES.pop(place(weight), None)


def keeps(weight: Tensor) -> bool:
    """Whether a module keeps a copy of ``weight``, which may not have been made yet."""
    return bool(_COPIES) and place(weight) in _COPIES and not weight.is_inference()


def of(weight: Tensor, screen: str, make: Callable[[], Quantized]) -> Quantized:
    """What ``make`` returns for ``weight`` and the strategy ``screen``: a kept copy, if a module keeps one."""
    copy = _COPIES.get(place(weight)) if _COPIES else None
    return make() if copy is None else copy.of(weight, screen, make)


def for_few(weight: Tensor, screen: str | None, make: Callable[[bool], Quantized]) -> tuple[Quantized, bool] | None:
    """The copy that a module keeps of ``weight``, see ``GateCopy.for_few``; None if no module keeps one."""
    copy = _COPIES.get(place(weight)) if _COPIES else None
    return None if copy is None else copy.for_few(weight, screen, make)
