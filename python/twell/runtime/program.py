"""A pass of a layer as data: its launches in order, over operands and scratch that have no memory yet.

A launch is of a kernel or, where a library's product is used, a call of a Python function, which the C runner leaves to
Python.

Code of ``twell.ops`` describes a pass once per kind of call, as a ``Program``. ``Program.compiled`` makes it an
``Executable`` of the pass's tensors, which calls run. Two runners take the same data: the C function of
``host/program.c``, and Python, which launches kernel by kernel with a tensor for each scratch. The latter is for
TWELL_DEBUG and installs without the C library; see ``twell.runtime.host``.

The scratch of all launches is one piece of memory. Two scratches may lie at the same place if no launch comes between
the first and the last one of both: kernels wait for their predecessors before they touch memory.
"""

from __future__ import annotations

import array
import functools
import math
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from twell.runtime import device, env, host, modes, resolve, specs

# Bytes of which the places of scratch are multiples. Kernels load 16 bytes at a time; lines of the cache are of 128.
_PLACE = 256
ALIGNMENT = 16
# The base of memory that is zero before the first launch.
_CLEARED = 1 << 30

# as DLPack has them: the code of a kind of numbers, bits, and one lane
_DTYPES = {
    dtype: code | dtype.itemsize << 11 | 1 << 16
    for code, dtypes in (
        (0, (torch.int64, torch.int32, torch.int16, torch.int8)),
        (1, (torch.uint8,)),
        (2, (torch.float16, torch.float32)),
        (4, (torch.bfloat16,)),
    )
    for dtype in dtypes
}
_NONE, _INTEGER, _FLOAT, _GIVEN, _VIEW = range(5)

_DEBUG = env.debug()
# What inductor's code allocates with: 1.1 us against 2.6 for ``Tensor.new_empty`` (H200 host, torch 2.11).
_ALLOCATE: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Programs of each kind of pass that are kept: the latest, 5 to 20 KB each.
_KEPT = 256
_caches: list[Any] = []


def kept(builder: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that makes a program, or several, of hashable arguments: the latest results are kept."""
    cached = functools.lru_cache(_KEPT)(builder)
    _caches.append(cached)
    return cached  # type: ignore[return-value]


def forget() -> None:
    """Drop all programs that are kept, as tests do that change what a device is."""
    for cached in _caches:
        cached.cache_clear()


class View(NamedTuple):
    """A tensor of a program: part of an operand, or of scratch if ``base`` is negative. ``offset`` is in bytes."""

    base: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def t(self) -> View:
        return View(self.base, self.offset, self.dtype, self.shape[::-1], self.strides[::-1])

    def part(self, first: int, last: int) -> View:
        """Rows from ``first`` up to ``last``, or to the end if there are fewer."""
        if first == 0 and last >= self.shape[0]:
            return self
        rows = min(last, self.shape[0]) - first
        offset = self.offset + first * self.strides[0] * self.dtype.itemsize
        return View(self.base, offset, self.dtype, (rows, *self.shape[1:]), self.strides)

    def from_column(self, first: int) -> View:
        """The columns of a row-major matrix from ``first`` on."""
        if not first:
            return self
        shape = self.shape[0], self.shape[1] - first
        return View(self.base, self.offset + first * self.dtype.itemsize, self.dtype, shape, self.strides)

    def at(self, offset: int, dtype: torch.dtype, *shape: int) -> View:
        """A contiguous tensor that begins ``offset`` bytes behind the first element."""
        return View(self.base, self.offset + offset, dtype, shape, contiguous(shape))

    def matrix(self) -> View:
        """A matrix itself, a contiguous [..., K] as [M, K]."""
        if len(self.shape) == 2:
            return self
        return self.at(0, self.dtype, math.prod(self.shape[:-1]), self.shape[-1])


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    if len(shape) == 2:
        return max(shape[1], 1), 1
    if len(shape) == 1:
        return (1,)
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _room(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _PLACE) * _PLACE


class Program:
    """The operands, scratch and launches of a pass on device ``index``."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.operands: list[View] = []
        # kernels, or functions of tensors, and their arguments
        self.launches: list[tuple[specs.Spec | Callable[..., None], tuple[Any, ...]]] = []
        self._scratch: list[int] = []
        self._empty: dict[torch.dtype, View] = {}
        self._cleared = 0

    @property
    def multiprocessors(self) -> int:
        return device.sm_count(self.index)

    def clusters(self, ctas: int) -> int:
        """Clusters of so many CTAs, one per multiprocessor, that the device runs at a time."""
        return device.clusters(self.index, ctas)

    def operand(self, dtype: torch.dtype, *shape: int, strides: tuple[int, ...] | None = None) -> View:
        """The next tensor that calls give."""
        plain = contiguous(shape)
        # strides of a dimension of one element reach nothing, and may be anything
        if strides is None or all(a == b for a, b, length in zip(strides, plain, shape) if length > 1):
            strides = plain
        view = View(len(self.operands), 0, dtype, shape, strides)
        self.operands.append(view)
        return view

    def scratch(self, dtype: torch.dtype, *shape: int) -> View:
        """Memory between launches, uninitialised."""
        if shape == (0,) and dtype in self._empty:
            return self._empty[dtype]
        self._scratch.append(_room(dtype, shape))
        view = View(-len(self._scratch), 0, dtype, shape, contiguous(shape))
        if shape == (0,):
            # one stands for all that is not there
            self._empty[dtype] = view
        return view

    def cleared(self, dtype: torch.dtype, *shape: int) -> View:
        """Memory that is zero before the first launch; a call clears it by a kernel of its own."""
        view = View(_CLEARED, self._cleared, dtype, shape, contiguous(shape))
        self._cleared += _room(dtype, shape)
        return view

    def launch(self, spec: specs.Spec, *arguments: View | float | None) -> None:
        """Call the kernel of ``spec`` next, with views, integers, floats and None."""
        self.launches.append((spec, arguments))

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call ``function`` next, with views, and None; what it launches goes to the current stream."""
        self.launches.append((function, arguments))

    def kernels(self) -> list[specs.Spec]:
        return [callee for callee, _ in self.launches if isinstance(callee, specs.Spec)]

    def lives(self) -> dict[int, tuple[int, int]]:
        """The first and the last launch that each scratch is an argument of; none of a scratch without any."""
        lives = dict[int, tuple[int, int]]()
        for i, (_, arguments) in enumerate(self.launches):
            for view in arguments:
                if type(view) is View and view.base < 0:
                    own = ~view.base
                    lives[own] = (lives[own][0] if own in lives else i), i
        return lives

    def placed(self) -> tuple[dict[int, int], int]:
        """The byte offset of each scratch, and the bytes of all together."""
        lives, sizes = self.lives(), self._scratch
        offsets, total = dict.fromkeys(lives, 0), 0
        done: list[tuple[int, int, int, int]] = []
        # the largest first, each at the lowest place that is free while it lives
        for own in sorted([own for own in lives if sizes[own]], key=sizes.__getitem__, reverse=True):
            at, size, (first, last) = 0, sizes[own], lives[own]
            for begin, end, from_launch, to_launch in done:
                if from_launch <= last and first <= to_launch and begin < at + size:
                    at = max(at, end)
            offsets[own] = at
            total = max(total, at + size)
            done.append((at, at + size, first, last))
            done.sort()
        return offsets, total

    def caller(self, index: int, offsets: dict[int, int]) -> Callable[[Sequence[Tensor]], None]:
        """The call of the function that is launch ``index``, by the tensors of a call and, the last one, scratch."""
        function, arguments = self.launches[index]
        assert not isinstance(function, specs.Spec)
        declared = self.given()

        def reader(view: View | None) -> Callable[[Sequence[Tensor]], Tensor | None]:
            if view is None:
                return lambda given: None
            base, offset = view.base, view.offset
            if base < 0:
                base, offset = -1, offsets[~base] + offset
            elif view == declared[base] and 1 not in view.shape:
                return operator.itemgetter(base)
            return lambda given: _part(given[base], view, offset)

        readers = [reader(view) for view in arguments]
        return lambda given: function(*[read(given) for read in readers])

    def compiled(self) -> Executable:
        """What runs this program. Raises as ``resolve.resolve`` does if there is not each kernel."""
        return Executable(self)

    def given(self) -> list[View]:
        """The operands, and behind them the memory that is cleared, if there is any."""
        cleared = View(len(self.operands), 0, torch.uint8, (self._cleared,), (1,))
        return [*self.operands, cleared] if self._cleared else self.operands

    def runs(self) -> list[tuple[int, int]]:
        """The launches of kernels that no function interrupts, from the first up to the last; the first may be none."""
        calls = [i for i, (callee, _) in enumerate(self.launches) if not isinstance(callee, specs.Spec)]
        return [*zip([0, *(i + 1 for i in calls)], [*calls, len(self.launches)])]

    def code(self, first: int, last: int, offsets: dict[int, int], total: int) -> list[int]:
        """Launches ``first`` up to ``last``, as ``host/program.c`` reads them; the last tensor given is scratch."""
        given, places = self.given(), dict[int, int]()
        counts, arguments, views = [], list[int](), list[View]()
        for _, of_launch in self.launches[first:last]:
            counts.append(len(of_launch))
            for argument in of_launch:
                if type(argument) is View:
                    base, place = argument.base, places.get(id(argument))
                    if place is not None:
                        arguments += _VIEW, place
                    # an operand that may have other strides where they reach nothing is handed on as it was declared
                    elif 0 <= base < len(given) and argument == given[base] and 1 not in argument.shape:
                        arguments += _GIVEN, base
                    else:
                        arguments += _VIEW, len(views)
                        # launches name the same object again, and hold it
                        places[id(argument)] = len(views)
                        views.append(argument)
                elif argument is None:
                    arguments += _NONE, 0
                elif type(argument) is float:
                    arguments += _FLOAT, *struct.unpack("q", struct.pack("d", argument))
                else:
                    arguments += _INTEGER, argument
        declared, parts, dims, lengths = list[int](), list[int](), 0, 0
        for view in given:
            declared += _described(view)
            lengths += len(view.shape)
        for view in views:
            base, offset = view.base, view.offset
            if base < 0:
                base, offset = len(given), offset + offsets[~base]
            elif base == _CLEARED:
                base = len(given) - 1
            parts += base, offset, *_described(view)
            dims += len(view.shape)
        header = [host.FORMAT, len(given) + 1, len(arguments) // 2, len(views), len(counts), dims, lengths]
        return [*header, *declared, total, *counts, *arguments, *parts]


def _described(view: View) -> tuple[int, ...]:
    """dtype as DLPack has it, number of dimensions, shape and strides."""
    return _DTYPES[view.dtype], len(view.shape), *view.shape, *view.strides


class Executable:
    """All launches of a program, as a function of its operands."""

    __slots__ = ("_behind", "_cleared", "_loaded", "_program", "_run", "_size")

    def __init__(self, program: Program) -> None:
        self._program, self._cleared = program, program._cleared
        kernels, self._loaded = resolve.found(program.kernels(), resolve.require_architecture(program.index))
        maker = host.maker()
        self._run: Any = None
        # functions, and what runs the launches behind each
        self._behind: list[tuple[Callable[[Sequence[Tensor]], None], Any]] = []
        self._size: tuple[int, ...] = (1,)
        if maker is not None:
            offsets, total = program.placed()
            self._size, found = (max(total, 1),), iter(kernels)
            for first, last in program.runs():
                # half the time of torch.tensor
                code = torch.frombuffer(array.array("q", program.code(first, last, offsets, total)), dtype=torch.int64)
                run = maker(code, *(next(found) for _ in range(first, last)))
                if first == 0:
                    self._run = run
                else:
                    self._behind.append((program.caller(first - 1, offsets), run))

    def __call__(self, *operands: Tensor) -> None:
        """Run all launches on torch's current stream; ValueError, with none run, for operands laid out otherwise."""
        if not self.ran(*operands):
            got = [f"{t.dtype} {list(t.shape)} of strides {list(t.stride())} at {t.data_ptr()}" for t in operands]
            declared = [f"{v.dtype} {list(v.shape)} of strides {list(v.strides)}" for v in self._program.operands]
            raise ValueError(f"expected aligned operands {'; '.join(declared)}, got {'; '.join(got)}")

    def ran(self, *operands: Tensor) -> bool:
        """The same, but False for such operands, and for another number of them."""
        if len(operands) != len(self._program.operands):
            return False
        if self._cleared:
            operands = (*operands, torch.zeros(self._cleared, dtype=torch.uint8, device=operands[0].device))
        if self._run is None:
            return self._in_python(operands)
        given = *operands, allocate(operands[0], self._size, (1,), torch.uint8)
        if self._loaded:
            return not self._run(*given) and (not self._behind or self._ran_on(given))
        # the first run of a kernel loads its code onto the GPU
        with resolve.loading():
            self._loaded = not self._run(*given) and self._ran_on(given)
        if self._loaded:
            resolve.note_loaded(self._program.kernels(), resolve.require_architecture(self._program.index))
        return self._loaded

    def _ran_on(self, given: tuple[Tensor, ...]) -> bool:
        """Call the functions, and run what is behind each."""
        for call, run in self._behind:
            call(given)
            run(*given)
        return True

    def _in_python(self, operands: Sequence[Tensor]) -> bool:
        """The same launch by launch, with a tensor for each scratch while it lives."""
        program = self._program
        given = program.given()
        on = operands[0].device
        if not all(map(_is_as_declared, given, operands)) or any(operand.device != on for operand in operands):
            return False
        lives, alive = program.lives(), dict[int, Tensor]()

        def real(view: View) -> Tensor:
            if view.base < 0:
                own = ~view.base
                if own not in alive:
                    alive[own] = torch.empty(program._scratch[own], dtype=torch.uint8, device=on)
                memory = alive[own]
            elif view.base == _CLEARED:
                memory = operands[-1]
            elif view == given[view.base] and 1 not in view.shape:
                return operands[view.base]
            else:
                memory = operands[view.base]
            return _part(memory, view, view.offset)

        for i, (callee, arguments) in enumerate(program.launches):
            given_to = [real(each) if isinstance(each, View) else each for each in arguments]
            launch(callee, *given_to) if isinstance(callee, specs.Spec) else callee(*given_to)
            for own in [own for own in alive if lives[own][1] == i]:
                del alive[own]
        return True


def _part(memory: Tensor, view: View, offset: int) -> Tensor:
    """The tensor of a view that begins ``offset`` bytes behind the first element of ``memory``."""
    first = memory.storage_offset() * memory.dtype.itemsize + offset
    whole = torch.empty(0, dtype=view.dtype, device=memory.device)
    return whole.set_(memory.untyped_storage(), first // view.dtype.itemsize, view.shape, view.strides)


def _is_as_declared(view: View, tensor: Tensor) -> bool:
    """Whether ``tensor`` is the operand that ``view`` declares."""
    if tensor.dtype != view.dtype or tensor.shape != view.shape:
        return False
    if not tensor.numel():
        return True
    strides = zip(tensor.shape, tensor.stride(), view.strides)
    return tensor.data_ptr() % ALIGNMENT == 0 and all(own == other for length, own, other in strides if length > 1)


def allocate(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory on the device of ``like``, which is the current one."""
    if _ALLOCATE is None or not like.is_cuda:
        return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)
    # it takes no torch.Size
    return _ALLOCATE(tuple(shape), strides, dtype)  # type: ignore[no-any-return]


def launch(spec: specs.Spec, *arguments: Any) -> None:
    """Call the kernel of ``spec`` on the current device and stream; NotImplementedError or RuntimeError without one."""
    resolve.resolve(spec, resolve.require_architecture(torch.cuda.current_device()))(*arguments)
    if _DEBUG and not modes.stream_captures():
        torch.cuda.synchronize()
