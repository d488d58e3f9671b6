"""Programs: the same launches by both runners, scratch by lifetimes, what is refused. No GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from torch import Tensor

from tests.cpu import fake_gpu
from tests.cpu.fake_gpu import FakeGpu
from twell.runtime import host, program, resolve, specs
from twell.runtime.program import Program, View

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
ONE, TWO = specs.UnpackSpec("bfloat16"), specs.UnpackSpec("float16")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    # the kernels of these programs are of no signature
    monkeypatch.setattr(fake_gpu, "CHECKS", False)
    yield fake_gpu.install(monkeypatch)
    program.forget()


Seen = list[tuple[str, list[Any]]]


@pytest.fixture(params=["python", "C"])
def seen(request: pytest.FixtureRequest, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What kernels got, by either runner: a tensor's address, dtype, shape and strides."""
    calls: Seen = []

    def kernel_of(spec: specs.Spec, arch: str) -> Any:
        def record(*arguments: Any) -> None:
            calls.append((spec.dtype, [_described(argument) for argument in arguments]))

        return record if request.param == "python" else tvm_ffi.convert(record)

    monkeypatch.setattr(resolve, "_find", kernel_of)
    if request.param == "C":
        maker, said = host.find(request.getfixturevalue("host_library"))
        assert maker is not None, said
        monkeypatch.setattr(host, "maker", lambda: maker)
    return calls


def _described(argument: Any) -> Any:
    if not hasattr(argument, "shape"):
        return argument
    strides = argument.stride() if isinstance(argument, Tensor) else argument.strides
    dtype = str(argument.dtype).removeprefix("torch.")
    return argument.data_ptr(), dtype, tuple(argument.shape), tuple(strides)


def test_kernels_get_operands_views_scratch_and_numbers(seen: Seen) -> None:
    p = Program(0)
    x = p.operand(BF16, 6, 16, strides=(24, 1))
    out = p.operand(F32, 2, 3, 8)
    aside = p.scratch(I32, 4, 8)
    p.launch(ONE, x, x.part(2, 5), x.t(), aside, aside.part(1, 3), -(2**62), None, -0.1)
    p.launch(TWO, aside, out.matrix(), out.at(32, torch.int16, 4, 8), aside._replace(dtype=F32), -1)
    ran = p.compiled()
    x_given, out_given = torch.zeros(6, 24, dtype=BF16)[:, :16], torch.zeros(2, 3, 8)
    for _ in range(2):
        seen.clear()
        ran(x_given, out_given)
        (first, one), (second, two) = seen
        assert (first, second) == ("bfloat16", "float16")
        at, to = x_given.data_ptr(), out_given.data_ptr()
        scratch = one[3][0]
        assert scratch % 16 == 0
        assert one == [
            (at, "bfloat16", (6, 16), (24, 1)),
            (at + 2 * 24 * 2, "bfloat16", (3, 16), (24, 1)),
            (at, "bfloat16", (16, 6), (1, 24)),
            (scratch, "int32", (4, 8), (8, 1)),
            (scratch + 32, "int32", (2, 8), (8, 1)),
            *(-(2**62), None, -0.1),
        ]
        assert two == [
            (scratch, "int32", (4, 8), (8, 1)),
            (to, "float32", (6, 8), (8, 1)),
            (to + 32, "int16", (4, 8), (8, 1)),
            (scratch, "float32", (4, 8), (8, 1)),
            -1,
        ]


def test_what_is_not_as_declared_is_refused_and_launches_nothing(seen: Seen) -> None:
    p = Program(0)
    p.launch(ONE, p.operand(BF16, 4, 16), p.operand(F32, 3))
    run, vector = p.compiled(), torch.zeros(3)
    base = torch.zeros(4 * 16 + 1, dtype=BF16)
    odd = {
        "dtype": torch.zeros(4, 16, dtype=torch.float16),
        "shape": torch.zeros(5, 16, dtype=BF16),
        "dimensions": torch.zeros(1, 4, 16, dtype=BF16),
        "strides": torch.zeros(16, 4, dtype=BF16).t(),
        "alignment": base[1:].view(4, 16),
    }
    for what, matrix in odd.items():
        assert not run.ran(matrix, vector), what
        with pytest.raises(ValueError, match=r"expected aligned operands torch.bfloat16 \[4, 16\].* got "):
            run(matrix, vector)
    assert not seen
    assert run.ran(torch.zeros(4, 16, dtype=BF16), vector)
    assert len(seen) == 1
    # strides of a dimension of one element reach nothing
    q = Program(0)
    q.launch(ONE, q.operand(BF16, 1, 16))
    assert q.compiled().ran(torch.zeros(1, 32, dtype=BF16)[:, :16])
    # another number of tensors is another kind of call
    assert not run.ran(torch.zeros(4, 16, dtype=BF16))


def test_cleared_memory_is_zero_in_every_call(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []

    def kernel_of(spec: specs.Spec, arch: str) -> Any:
        def fill(*arguments: Tensor) -> None:
            found.extend(argument.clone() for argument in arguments[1:])
            for argument in arguments[1:]:
                argument.fill_(7)

        return fill

    monkeypatch.setattr(resolve, "_find", kernel_of)
    p = Program(0)
    x, first, second = p.operand(F32, 4), p.cleared(I32, 5), p.cleared(F32, 70, 2)
    p.launch(ONE, x, first, second)
    run = p.compiled()
    for _ in range(2):
        run(torch.zeros(4))
    assert [tuple(t.shape) for t in found] == [(5,), (70, 2)] * 2
    assert not any(t.any() for t in found)


def test_scratch_shares_memory_only_between_lives_that_do_not_meet(gpu: FakeGpu) -> None:
    p = Program(0)
    a, b, c, d = (p.scratch(torch.uint8, size) for size in (1024, 512, 1024, 256))
    p.launch(ONE, a, b)
    p.launch(ONE, b, c)
    p.launch(ONE, c, d)
    offsets, total = p.placed()
    assert offsets[~a.base] == offsets[~c.base] == 0
    assert offsets[~b.base] >= 1024
    assert total == 1536
    # none for what no launch has
    p.scratch(torch.uint8, 1 << 30)
    assert p.placed()[1] == 1536
    fake_gpu.check_program(p)


def test_kept_programs_are_bounded_and_forgotten(gpu: FakeGpu) -> None:
    made: list[int] = []

    @program.kept
    def build(i: int) -> int:
        made.append(i)
        return i

    for i in (*range(300), 299, 0):
        assert build(i) == i
    # the latest are kept, the first one was made again
    assert made == [*range(300), 0]
    program.forget()
    build(299)
    assert made[-1] == 299


@pytest.mark.parametrize("make", [lambda v: v.part(2, 9), lambda v: v.part(0, 4)])
def test_parts_end_where_the_tensor_does(make: Callable[[View], View]) -> None:
    view = Program(0).operand(F32, 4, 8)
    part = make(view)
    assert part.shape[0] + (part.offset - view.offset) // 32 == 4


def test_a_failed_kernel_ends_the_call(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, host_library: Path) -> None:
    ran: list[str] = []

    def kernel_of(spec: specs.Spec, arch: str) -> Any:
        def kernel(*arguments: Any) -> None:
            ran.append(spec.dtype)
            if spec is ONE:
                raise ValueError("x must be [4], got [5]")

        return tvm_ffi.convert(kernel)

    monkeypatch.setattr(resolve, "_find", kernel_of)
    for maker in (None, host.find(host_library)[0]):
        monkeypatch.setattr(host, "maker", lambda maker=maker: maker)
        resolve._kernels.clear()
        p = Program(0)
        x = p.operand(F32, 4)
        p.launch(ONE, x)
        p.launch(TWO, x)
        with pytest.raises(ValueError, match=r"x must be \[4\], got \[5\]"):
            p.compiled()(torch.zeros(4))
    assert ran == ["bfloat16"] * 2
