"""A GPU that is not there: CPU tensors pass for CUDA ones, and kernels do nothing but record their arguments.

What is launched is checked against the signatures of the kernels, if their compiler is installed: dtypes, dimensions,
lengths that tensors share, multiples of lengths and strides, and alignment.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from twell.ops import library
from twell.runtime import device, host, kernel_module, modes, program, resolve, specs
from twell.runtime.program import Program, View

SM_COUNT = 132

try:
    import cutlass  # noqa: F401

    CHECKS = True
except ImportError:
    CHECKS = False


class FakeGpu:
    """What was made and launched since the last ``clear``.

    programs: in the order in which they were compiled; each is made once. launches: of all calls, one by one.
    """

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.launches: list[tuple[specs.Spec, tuple[Any, ...]]] = []

    def clear(self) -> None:
        self.launches.clear()
        self.programs.clear()

    def names(self) -> list[str]:
        return [spec.op for spec, _ in self.launches]

    def kernel(self, spec: specs.Spec, arch: str) -> Any:
        def run(*arguments: Any) -> None:
            check_arguments(spec, arguments)
            self.launches.append((spec, arguments))

        return run


forget_programs = program.forget


def install(monkeypatch: pytest.MonkeyPatch, family: str = specs.SM90) -> FakeGpu:
    """Let CPU tensors pass for those of the current GPU, one that runs the kernels of ``family``.

    Programs run launch by launch, and tensors of CPU operators are still those of a CPU for the dispatcher.
    """
    gpu = FakeGpu()
    capability = device.SM_90 if family == specs.SM90 else (8, 0)
    monkeypatch.setattr(device, "sm_count", lambda index: SM_COUNT)
    monkeypatch.setattr(device, "clusters", lambda index, ctas: SM_COUNT // ctas)
    monkeypatch.setattr(device, "capability", lambda index: capability)
    monkeypatch.setattr(resolve, "_find", gpu.kernel)
    monkeypatch.setattr(resolve, "_kernels", {})
    monkeypatch.setattr(resolve, "_missing", set())
    monkeypatch.setattr(host, "maker", lambda: None)
    monkeypatch.setattr(program, "_ALLOCATE", None)
    # the index of a CPU tensor's device
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(modes, "stream_captures", lambda: False)
    monkeypatch.setattr(device, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(torch, "mm", _mm)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    compiled = Program.compiled

    def recorded(self: Program) -> Any:
        check_program(self)
        gpu.programs.append(self)
        return compiled(self)

    monkeypatch.setattr(Program, "compiled", recorded)
    program.forget()
    return gpu


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, own: Any = torch.mm, **more: Any) -> Tensor:
    return own(a.to(out_dtype), b.to(out_dtype), **more)  # type: ignore[no-any-return]


@functools.cache
def signature(spec: specs.Spec) -> tuple[Any, ...]:
    fakes: tuple[Any, ...] = kernel_module(spec.module).signature(spec)[1]
    return fakes


@functools.cache
def _compiled() -> frozenset[specs.Spec]:
    return frozenset(specs.all_specs())


def check_arguments(spec: specs.Spec, arguments: tuple[Any, ...]) -> None:
    """Raise AssertionError unless the kernel of ``spec`` takes these tensors or views, numbers and Nones."""
    assert spec in _compiled(), spec
    if not CHECKS:
        return
    fakes = signature(spec)
    assert len(arguments) == len(fakes), (spec, len(arguments), len(fakes))
    # lengths by the identity of their symbols
    lengths: dict[int, int] = {}
    for place, (argument, fake) in enumerate(zip(arguments, fakes)):
        at = f"{spec.symbol}, argument {place}: {argument if isinstance(argument, View) else type(argument)}"
        assert (argument is None) == (fake is None), at
        if isinstance(argument, (Tensor, View)):
            _check_tensor(at, argument, fake, lengths)
        elif argument is not None:
            assert not hasattr(fake, "shape"), at
            assert isinstance(argument, float if type(fake).__name__ == "Float32" else int), at
            assert isinstance(argument, float) or -(2**31) <= argument < 2**31, at


def _check_tensor(at: str, tensor: Any, fake: Any, lengths: dict[int, int]) -> None:
    assert hasattr(fake, "shape"), at
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    strides = tensor.strides if isinstance(tensor, View) else tensor.stride()
    # a view's memory is aligned to 256 bytes, or to 16 of an operand
    first = tensor.offset if isinstance(tensor, View) else tensor.data_ptr()
    assert dtype == fake.element_type.__name__.lower(), (at, dtype)
    assert len(shape) == len(fake.shape), at
    for length, symbol in zip(shape, fake.shape):
        if isinstance(symbol, int):
            assert length == symbol, at
        else:
            assert lengths.setdefault(id(symbol), length) == length, (at, shape)
            assert length % symbol.divisibility == 0, (at, shape)
    for length, stride, symbol in zip(shape, strides, fake.stride):
        if length > 1:
            assert stride == symbol if isinstance(symbol, int) else stride % symbol.divisibility == 0, (at, strides)
    if 0 not in shape:
        assert first % fake._assumed_align == 0, (at, first)


def check_program(made: Program) -> None:
    """Raise AssertionError unless the launches fit their kernels, and no two scratches that live at once overlap."""
    for callee, arguments in made.launches:
        if isinstance(callee, specs.Spec):
            check_arguments(callee, arguments)
        for view in _views(arguments):
            _check_inside(made, view)
    lives, (offsets, total) = made.lives(), made.placed()
    assert offsets.keys() == lives.keys()
    places = [(*lives[own], offsets[own], offsets[own] + made._scratch[own]) for own in lives]
    for i, (first, last, begin, end) in enumerate(places):
        assert 0 <= begin <= end <= total
        for other_first, other_last, other_begin, other_end in places[:i]:
            apart = last < other_first or other_last < first
            assert apart or end <= other_begin or other_end <= begin


def _views(arguments: tuple[Any, ...]) -> Iterator[View]:
    return (argument for argument in arguments if isinstance(argument, View))


def _check_inside(made: Program, view: View) -> None:
    """Raise AssertionError unless all of ``view`` lies in its memory."""
    if 0 in view.shape:
        return
    end = view.offset + _reach(view)
    if view.base < 0:
        room = made._scratch[~view.base]
    elif view.base == program._CLEARED:
        room = made._cleared
    else:
        room = _reach(made.operands[view.base])
    assert 0 <= view.offset, view
    assert end <= room, (view, room)


def _reach(view: View) -> int:
    """Bytes from the first one of a view to behind the last one."""
    return (1 + sum((length - 1) * stride for length, stride in zip(view.shape, view.strides))) * view.dtype.itemsize


def room(made: Program, *operands: int) -> int:
    """Bytes of the scratch of a pass and of its operands of these numbers."""
    return made.placed()[1] + sum(_reach(made.operands[i]) for i in operands)


def on_cuda(op: str, *arguments: Any) -> Any:
    """Call the operator's code for a GPU, which takes the arguments with defaults, too."""
    schema = getattr(torch.ops.twell, op).default._schema
    left_out = [argument.default_value for argument in schema.arguments][len(arguments) :]
    file, name = ("hybrid_backward", "_add_on_cuda") if op == "hybrid_backward_accumulate" else (op, "_cuda")
    return getattr(sys.modules[f"twell.ops.{file}"], name)(*arguments, *left_out)


@contextlib.contextmanager
def dispatched() -> Iterator[None]:
    """Let operators that are called by the dispatcher run their code for a GPU, too."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    given = torch.library.Library("twell", "IMPL")  # type: ignore[no-untyped-call]
    for name in library._LIBRARY._op_defs:
        op = getattr(torch.ops.twell, name.removeprefix("twell::")).default
        call = functools.partial(op.redispatch, cuda)
        given.impl(op._opname, call, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        given._destroy()  # type: ignore[no-untyped-call]


# Who may: what has a tensor of the host, by its device.
_READERS = {"find_levels", "_level_of", "_require_value", "check_ids", "dl1"}


def refuse_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise AssertionError where a value of a tensor is read, for which the host would wait."""

    def refused(own: Any) -> Any:
        def read(*arguments: Any) -> Any:
            frames = [sys._getframe(depth).f_code.co_name for depth in (1, 2, 3, 4)]
            assert _READERS.intersection(frames), f"{own.__name__} in {frames}"
            return own(*arguments)

        return read

    names = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero")
    for name in names:
        monkeypatch.setattr(Tensor, name, refused(getattr(Tensor, name)))


class Arrived:
    """A transfer of figures that arrive at once, eight of each."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def arrived(self) -> bool:
        return True

    def read(self) -> list[int]:
        return [8] * self.values.numel()
