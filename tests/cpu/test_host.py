"""The C runner of programs: what kernels get, what is refused, that nothing leaks. Needs a C compiler, no GPU."""

import ctypes
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import tvm_ffi

from twell.runtime import host
from twell.runtime.log import logger, warn_once

# kinds of arguments of a launch, and dtypes
INT, GIVEN, VIEW = 1, 3, 4
FLOAT32, INT32 = (code | 32 << 8 | 1 << 16 for code in (2, 0))

Declared = tuple[int, tuple[int, ...], tuple[int, ...]]
Launch = list[tuple[int, int]]

# A float32 operand of 3 x 4 and 256 bytes of scratch.
OPERAND: Declared = FLOAT32, (3, 4), (4, 1)
SCRATCH = 256


@pytest.fixture(scope="module")
def maker(host_library: Path) -> host.Maker:
    made, said = host.find(host_library)
    assert made is not None, said
    return made


def described(dtype: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return [dtype, len(shape), *shape, *strides]


def encoded(
    launches: list[Launch],
    views: Iterable[tuple[int, int, Declared]] = (),
    operands: Iterable[Declared] = (OPERAND,),
    scratch: int = SCRATCH,
) -> list[int]:
    """The code of a program; a view is the index of a tensor given, an offset in bytes, and the tensor."""
    operands, views = list(operands), list(views)
    arguments = [argument for launch in launches for argument in launch]
    dims = sum(len(view[2][1]) for view in views), sum(len(operand[1]) for operand in operands)
    code = [host.FORMAT, len(operands) + 1, len(arguments), len(views), len(launches), *dims]
    for operand in operands:
        code += described(*operand)
    code += [scratch, *map(len, launches)]
    for argument in arguments:
        code += argument
    for base, offset, view in views:
        code += [base, offset, *described(*view)]
    return code


def tensor(code: list[int]) -> torch.Tensor:
    return torch.tensor(code, dtype=torch.int64)


def given() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(3, 4), torch.zeros(SCRATCH, dtype=torch.uint8)


def seen(argument: Any) -> Any:
    if not isinstance(argument, tvm_ffi.Tensor):
        return argument
    return argument.data_ptr(), str(argument.dtype), tuple(argument.shape), tuple(argument.strides)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []

    def kernel(self, name: str = "kernel") -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self.calls.append((name, list(map(seen, arguments))))

        return call


def altered(x: torch.Tensor, **fields: int) -> Any:
    """A tensor of tvm-ffi over the memory of ``x``, with other values in these fields of its DLTensor."""
    places = {"device_type": (8, ctypes.c_int32), "device_id": (12, ctypes.c_int32), "strides": (32, ctypes.c_void_p)}
    places["byte_offset"] = 40, ctypes.c_uint64
    capsule = torch.utils.dlpack.to_dlpack(x)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    for name, value in fields.items():
        offset, kind = places[name]
        kind.from_address(pointer(capsule, b"dltensor") + offset).value = value
    return tvm_ffi.from_dlpack(capsule)


@pytest.mark.parametrize(
    ("index", "wrong"),
    [
        (0, lambda: torch.zeros(3, 4, dtype=torch.int32)),
        (0, lambda: torch.zeros(3, 4, dtype=torch.float64)),
        (0, lambda: torch.zeros(12)),
        (0, lambda: torch.zeros(4, 4)),
        (0, lambda: torch.zeros(0, 4)),
        (0, lambda: torch.zeros(4, 3).t()),
        (0, lambda: torch.zeros(3, 8)[:, :4]),
        # the stride of one dimension alone
        (0, lambda: torch.zeros(20).as_strided((3, 4), (4, 2))),
        (0, lambda: torch.zeros(20).as_strided((3, 4), (5, 1))),
        # 16 bytes behind an aligned address is aligned, 4 bytes behind is not
        (0, lambda: torch.zeros(13)[1:].view(3, 4)),
        (0, lambda: altered(torch.zeros(3, 4), byte_offset=8)),
        (2, lambda: torch.zeros(SCRATCH - 1, dtype=torch.uint8)),
        (2, lambda: torch.zeros(SCRATCH, dtype=torch.int8)),
        (2, lambda: torch.zeros(2 * SCRATCH, dtype=torch.uint8)[::2]),
        (2, lambda: torch.zeros(SCRATCH + 1, dtype=torch.uint8)[1:]),
        # the device is that of the first tensor
        (1, lambda: altered(torch.zeros(3, 4), device_type=2)),
        (1, lambda: altered(torch.zeros(3, 4), device_id=1)),
        (2, lambda: altered(torch.zeros(SCRATCH, dtype=torch.uint8), device_type=2)),
    ],
)
def test_a_tensor_that_is_not_as_declared_is_named_and_nothing_runs(
    index: int, wrong: Callable[[], Any], maker: host.Maker
) -> None:
    recorder = Recorder()
    program = maker(tensor(encoded([[(GIVEN, 0)]], operands=[OPERAND, OPERAND])), recorder.kernel())
    x, scratch = given()
    tensors: list[Any] = [x, x, scratch]
    assert program(*tensors) == 0
    assert recorder.calls
    recorder.calls.clear()
    tensors[index] = wrong()
    assert program(*tensors) == 1 + index
    # the first one is named
    if index:
        assert program(torch.zeros(3, 5), *tensors[1:]) == 1
    assert not recorder.calls


@pytest.mark.parametrize(
    ("declared", "tensor_like"),
    [
        ((FLOAT32, (3, 1), (7, 9)), lambda: torch.zeros(3, 7)[:, :1]),
        ((FLOAT32, (1, 4), (99, 1)), lambda: torch.zeros(1, 4)),
        ((FLOAT32, (1, 1), (5, 5)), lambda: torch.zeros(1, 1)),
        # 4 bytes behind an aligned address
        ((FLOAT32, (0, 4), (8, 2)), lambda: torch.zeros(13)[1:1].view(0, 4)),
        ((FLOAT32, (3, 0), (1, 1)), lambda: torch.zeros(3, 0)),
        ((FLOAT32, (), ()), lambda: torch.zeros(())),
        ((FLOAT32, (3, 4), (4, 1)), lambda: altered(torch.zeros(3, 4), strides=0)),
        ((FLOAT32, (3, 4), (8, 1)), lambda: torch.zeros(3, 8)[:, :4]),
    ],
)
def test_only_strides_that_reach_something_are_compared(
    declared: Declared, tensor_like: Callable[[], Any], maker: host.Maker
) -> None:
    recorder = Recorder()
    program = maker(tensor(encoded([[(GIVEN, 0)]], operands=[declared])), recorder.kernel())
    assert program(tensor_like(), given()[1]) == 0
    assert len(recorder.calls) == 1


def test_scratch_of_no_bytes_may_be_empty_or_unaligned(maker: host.Maker) -> None:
    program = maker(tensor(encoded([], scratch=0)))
    for scratch in (torch.empty(0, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)[1:]):
        assert program(torch.zeros(3, 4), scratch) == 0


def test_views_begin_behind_the_offset_of_their_tensor(maker: host.Maker) -> None:
    recorder = Recorder()
    operand: Declared = FLOAT32, (2, 4), (4, 1)
    program = maker(tensor(encoded([[(VIEW, 0)]], [(0, 16, (FLOAT32, (4,), (1,)))], [operand])), recorder.kernel())
    x = torch.zeros(4, 4)
    assert program(altered(x[:2], byte_offset=16), given()[1]) == 0
    assert recorder.calls == [("kernel", [(x.data_ptr() + 32, "float32", (4,), (1,))])]


def test_other_arguments_than_tensors_are_errors(maker: host.Maker) -> None:
    recorder = Recorder()
    program = maker(tensor(encoded([[(GIVEN, 0)]])), recorder.kernel())
    x, scratch = given()
    for count, tensors in enumerate([(), (x,), (x, scratch, scratch)]):
        with pytest.raises(ValueError, match=f"^expected 2 tensors, got {count + count // 2}"):
            program(*tensors)
    for index, tensors in enumerate([(None, scratch), (x, 7)]):
        with pytest.raises(TypeError, match=f"^argument {index} must be a tensor, got type index {index}"):
            program(*tensors)
    assert not recorder.calls


WHOLE = encoded([[(GIVEN, 0), (VIEW, 0)]], [(1, 0, (FLOAT32, (8, 8), (8, 1)))])
# places of numbers in it
OPERAND_AT, SCRATCH_AT, COUNT_AT, ARGUMENTS_AT, VIEW_AT = 7, 13, 14, 15, 19


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({0: 2}, "expected code of format 1, got format 2"),
        ({1: 0}, "expected 1 to 64 tensors given, got 0"),
        ({2: 1 << 62}, f"expected 0 to 27 in word 2 of code, got {1 << 62}"),
        ({4: 2}, "expected 2 kernels, got 1"),
        ({5: 1, 6: 3}, "expected 1 more dimensions of operands, got none"),
        ({OPERAND_AT: 1 << 32}, f"expected a dtype with bits and lanes, got {1 << 32}"),
        ({OPERAND_AT + 1: 1}, "expected 1 more dimensions of operands, got none"),
        ({OPERAND_AT + 2: -3}, "expected lengths and strides from 0 on, got -3"),
        ({OPERAND_AT + 2: 1 << 61}, f"expected a tensor of up to {2**63 - 1} bytes, got a larger one"),
        ({OPERAND_AT + 4: 1 << 62}, f"expected a tensor of up to {2**63 - 1} bytes, got a larger one"),
        ({SCRATCH_AT: -1}, "expected bytes of scratch, got -1"),
        ({COUNT_AT: 1}, "expected 1 more arguments of launches, got none"),
        ({COUNT_AT: 3}, "expected a launch of up to 2 arguments, got 3"),
        ({ARGUMENTS_AT: 5}, "expected a kind from 0 to 4, got 5"),
        ({ARGUMENTS_AT + 1: 2}, "expected the index of one of 2 tensors, got 2"),
        ({ARGUMENTS_AT + 3: 1}, "expected the index of one of 1 tensors, got 1"),
        ({VIEW_AT: 2}, "expected a view of one of 2 tensors, got 2"),
        ({VIEW_AT + 1: -4}, "expected a view within 256 bytes of tensor 1, got 256 at -4"),
        ({VIEW_AT + 5: 9}, "expected a view within 256 bytes of tensor 1, got 260 at 0"),
    ],
)
def test_code_that_does_not_hold_together_is_refused(changes: dict[int, int], said: str, maker: host.Maker) -> None:
    code = [changes.get(place, number) for place, number in enumerate(WHOLE)]
    assert len(code) == 27
    maker(tensor(WHOLE), print)
    with pytest.raises(ValueError, match=f"^{said}$"):
        maker(tensor(code), print)


@pytest.mark.parametrize("length", range(27))
def test_code_that_is_cut_short_is_refused(length: int, maker: host.Maker) -> None:
    said = f"expected {'7 to 16777216' if length < 7 else 27} numbers of code(?: by its header)?, got {length}$"
    with pytest.raises(ValueError, match=said):
        maker(tensor(WHOLE[:length]), print)


def test_any_number_in_any_place_is_refused_or_stays_in_the_tensors(maker: host.Maker) -> None:
    x, scratch = given()
    ranges = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in (x, scratch)]
    outside, ran = [], 0

    def kernel(*arguments: Any) -> None:
        for view in arguments:
            if isinstance(view, tvm_ffi.Tensor) and all(view.shape):
                last = view.data_ptr() + sum((n - 1) * stride for n, stride in zip(view.shape, view.strides))
                if not any(view.data_ptr() in memory and last in memory for memory in ranges):
                    outside.append(code)

    for place in range(len(WHOLE)):
        for number in (-(2**63), -1, 0, 1, 2, 3, 4, 63, 1 << 16, 1 << 24, 2**31, 2**32, 2**62, 2**63 - 1):
            code = [*WHOLE[:place], number, *WHOLE[place + 1 :]]
            try:
                program = maker(tensor(code), kernel)
            except ValueError:
                continue
            ran += program(x, scratch) == 0
    assert ran > 20
    assert not outside


def test_code_and_kernels_of_other_types_are_refused(maker: host.Maker) -> None:
    code = tensor(WHOLE)
    with pytest.raises(TypeError, match=r"^expected a tensor of code and kernels, got none"):
        maker()
    with pytest.raises(TypeError, match=r"^kernel 0 must be a function, got type index 1"):
        maker(code, 5)
    for wrong in (code.int(), code.double(), code[None], torch.stack([code, code], 1)[:, 0]):
        with pytest.raises(ValueError, match=r"^expected code in a contiguous int64 tensor of one dimension"):
            maker(wrong, print)
    with pytest.raises(ValueError, match=r"^expected 1 kernels, got 2"):
        maker(code, print, print)


def test_the_code_may_change_or_go_once_the_program_is_made(maker: host.Maker) -> None:
    recorder = Recorder()
    code = tensor(encoded([[(INT, 41)]]))
    program = maker(code, recorder.kernel())
    code.fill_(-1)
    del code
    assert program(*given()) == 0
    assert recorder.calls == [("kernel", [41])]


def test_kernels_live_as_long_as_the_program(maker: host.Maker) -> None:
    class Kernel:
        def __call__(self, *arguments: Any) -> None:
            pass

    def refused(kernel: Kernel) -> None:
        # the launch is read before the view that is refused
        with pytest.raises(ValueError, match=r"^expected a view of one of 2 tensors"):
            maker(tensor([*WHOLE[:VIEW_AT], 9, *WHOLE[VIEW_AT + 1 :]]), kernel)

    for make in (lambda kernel: maker(tensor(WHOLE), kernel), refused):
        kernel = Kernel()
        reference = weakref.ref(kernel)
        program: Any = make(kernel)
        del kernel
        gc.collect()
        assert (reference() is None) == (program is None)
        if program is not None:
            assert program(*given()) == 0
        del program
        gc.collect()
        assert reference() is None


def test_threads_run_one_program_at_the_same_time(maker: host.Maker) -> None:
    """And a kernel may run the program that it is in."""
    calls, local, wrong = 300, threading.local(), []
    barrier = threading.Barrier(8)

    def kernel(*arguments: Any) -> None:
        at = [argument.data_ptr() for argument in arguments]
        local.calls += 1
        # lets another thread in between two launches
        if local.calls % 50 == 0:
            barrier.wait(60)
        if local.depth < 2 and local.calls % 7 == 0:
            local.depth += 1
            program(local.x, local.scratch)
            local.depth -= 1
        x, below = local.x.data_ptr(), local.scratch.data_ptr()
        if at not in ([x, below + 128], [x + 16, x]):
            wrong.append(at)

    views = [(1, 128, (INT32, (4,), (1,))), (0, 16, (FLOAT32, (4,), (1,)))]
    launches: list[Launch] = [[(GIVEN, 0), (VIEW, 0)], [(VIEW, 1), (GIVEN, 0)]]
    program = maker(tensor(encoded(launches, views)), kernel, kernel)

    def run() -> bool:
        local.x, local.scratch = given()
        local.calls = local.depth = 0
        return all(program(local.x, local.scratch) == 0 for _ in range(calls))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda _: run(), range(8)))
    assert not wrong


def test_programs_may_outlive_the_interpreter(host_library: Path) -> None:
    code = (
        "import sys, numpy, tvm_ffi\n"
        "maker = tvm_ffi.load_module(sys.argv[1])['program']\n"
        f"program = tvm_ffi.kept = maker(tvm_ffi.from_dlpack(numpy.array({WHOLE})), print)\n"
        "print('made')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(host_library)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr


class TestFind:
    @pytest.fixture(autouse=True)
    def said(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
        monkeypatch.delenv("TWELL_DEBUG", raising=False)
        monkeypatch.setattr(logger, "propagate", True)
        warn_once.cache_clear()
        caplog.set_level(logging.INFO, "twell")
        return caplog

    def test_the_library_is_used(self, host_library: Path, said: pytest.LogCaptureFixture) -> None:
        maker, why = host.find(host_library)
        assert maker is not None
        assert why == "C (libtwell_host.so)"
        assert not said.records

    def test_debugging_runs_in_python(self, host_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TWELL_DEBUG", "1")
        assert host.find(host_library) == (None, "Python (TWELL_DEBUG=1)")

    @pytest.mark.parametrize(
        ("damage", "problem"),
        [
            (lambda content: content[:-1], "is cut short: expected at least"),
            (lambda content: content.replace(b"__tvm_ffi_program", b"__tvm_ffi_pr0gram"), "program"),
        ],
    )
    def test_a_damaged_library_is_reported_once(
        self,
        damage: Callable[[bytes], bytes],
        problem: str,
        host_library: Path,
        tmp_path: Path,
        said: pytest.LogCaptureFixture,
    ) -> None:
        library = tmp_path / "libtwell_host.so"
        library.write_bytes(damage(host_library.read_bytes()))
        for _ in range(2):
            maker, why = host.find(library)
            assert maker is None
            assert why.startswith("Python (libtwell_host.so cannot be used: ")
            assert problem in why
        (record,) = said.records
        assert record.levelno == logging.WARNING
        assert f"{library} cannot be used, and launches take longer; install twell again" in record.getMessage()

    def test_the_choice_is_made_and_logged_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
    ) -> None:
        packaged: ModuleType = host.packaged
        monkeypatch.setattr(packaged, "FOLDER", tmp_path)
        host._in_use.cache_clear()
        try:
            assert host.maker() is None
            assert host.runner().startswith("Python (no libtwell_host.so")
            assert [record.getMessage() for record in said.records] == [f"launches: {host.runner()}"]
        finally:
            host._in_use.cache_clear()
