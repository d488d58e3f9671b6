"""Launches of twell's CUDA operators on the emulator, with tensors on a CPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cpu.fake_gpu import forget_programs
from tests.emulator import ptx
from twell.choose import tuning
from twell.runtime import device, host, resolve, specs

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = ("c++", "g++", "clang++")
# Sums must not be fused or reordered, and roundings change at run time.
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-frounding-math")
# of DLPack
_CUDA = 2


class EmulatorError(RuntimeError):
    """What a kernel did wrong, with the CTA, the warp and the line of PTX."""


class Schedule(NamedTuple):
    """How a launch runs. Seed 0: every warp in order until it waits; others: turns of random length in random order.

    ``late_wgmma``: WGMMA runs when a warp waits for it. ``delay``: the most rounds by which a copy is late.
    """

    seed: int = 0
    late_wgmma: bool = False
    delay: int = 0

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """One of the kinds of schedule, by ``seed``."""
        return cls(seed, seed % 2 == 0, (20, 200)[seed // 2 % 2]) if seed else cls()


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


class _OnGpu:
    """A tensor on a CPU that host wrappers take for one on a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **_: object) -> Any:
        capsule = self.tensor.detach().__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        shown = _DLTensor.from_address(pointer(capsule, b"dltensor"))
        shown.device_type = _CUDA
        # torch replaces those of dimensions of one element
        for i, stride in enumerate(self.tensor.stride()):
            shown.strides[i] = stride
        return capsule


def missing() -> str | None:
    """Return what the emulator lacks on this machine; None if it runs."""
    if not any(map(shutil.which, COMPILERS)):
        return f"the emulator needs a C++ compiler: none of {', '.join(COMPILERS)} was found"
    if importlib.util.find_spec("cutlass") is None:
        return "the emulator needs the compiler of kernels: nvidia-cutlass-dsl is not installed"
    return None


class Emulator:
    """Compiles kernels into ``folder`` on first use, and stands in for a GPU; ``close`` ends the compiler's process.

    ``edit`` maps the PTX of a kernel to the text that runs: for tests of the emulator itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.schedule = Schedule()
        self.edit: Callable[[str], str] = str
        self._kernels: dict[tuple[str, Callable[[str], str]], Callable[..., None]] = {}
        self._compiler: subprocess.Popen[str] | None = None
        (folder / "names.h").write_text(ptx.header())
        self._cxx = next(name for name in COMPILERS if shutil.which(name))
        source = Path(__file__).with_name("emulator.cpp")
        self._run(*FLAGS, f"-I{folder}", "-c", source, "-o", folder / "emulator.o")

    def _run(self, *arguments: str | Path) -> None:
        done = subprocess.run([self._cxx, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{self._cxx} failed:\n{done.stderr[-4000:]}")

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.communicate()
            self._compiler = None

    def _compile(self, symbol: str) -> None:
        if self._compiler is None:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)])}
            environment.pop("CUTE_DSL_DUMP_DIR", None)
            self._compiler = subprocess.Popen(
                [sys.executable, "-m", "tests.emulator.compile"],
                **dict.fromkeys(("stdin", "stdout"), subprocess.PIPE),
                cwd=self.folder,
                env=environment,
                text=True,
            )
        assert self._compiler.stdin is not None
        assert self._compiler.stdout is not None
        print(symbol, file=self._compiler.stdin, flush=True)
        if self._compiler.stdout.readline().strip() != symbol:
            raise RuntimeError(f"the compiler of kernels failed with {symbol}")

    def kernel(self, spec: specs.Spec) -> Callable[..., None]:
        """The kernel of ``spec``, as ``resolve`` gives it, for tensors on a CPU; raises ``EmulatorError``."""
        key = spec.symbol, self.edit
        if key not in self._kernels:
            if not (self.folder / f"{spec.symbol}.o").exists():
                self._compile(spec.symbol)
            self._kernels[key] = self._load(spec.symbol, self.edit)
        return self._kernels[key]

    def _load(self, symbol: str, edit: Callable[[str], str]) -> Callable[..., None]:
        import tvm_ffi

        text = edit((self.folder / f"{symbol}.ptx").read_text())
        # every library has an emulator of its own, which -Bsymbolic binds its wrapper to, and not to a CUDA runtime
        library = self.folder / f"{symbol}.{len(self._kernels)}.so"
        ffi = Path(tvm_ffi.__file__).parent / "lib"
        parts = (self.folder / f"{symbol}.o", self.folder / "emulator.o")
        self._run("-shared", "-Wl,-Bsymbolic", *parts, f"-L{ffi}", "-ltvm_ffi", f"-Wl,-rpath,{ffi}", "-o", library)
        function, emulator = tvm_ffi.load_module(str(library))[symbol], ctypes.CDLL(str(library))
        emulator.emulator_failure.restype = ctypes.c_char_p
        for kernel in ptx.kernels(text):
            _give(emulator, kernel)

        def call(*arguments: Any) -> None:
            tensors = [a for a in arguments if isinstance(a, Tensor)]
            storages = [t.untyped_storage() for t in tensors]
            bounds = array("Q", [b for s in storages for b in (s.data_ptr(), s.data_ptr() + s.nbytes())])
            seed, late, delay = self.schedule
            emulator.emulator_prepare(
                ctypes.c_uint64(seed), int(late), delay, *_pointer(bounds), ctypes.c_int64(len(bounds) // 2)
            )
            raised: Exception | None = None
            try:
                function(*(tvm_ffi.from_dlpack(_OnGpu(a)) if isinstance(a, Tensor) else a for a in arguments))
            except Exception as error:
                raised = error
            said = emulator.emulator_failure().decode()
            if said:
                raise EmulatorError(_with_lines(said, text)) from raised
            if raised is not None:
                raise raised

        return call

    @contextmanager
    def stands_in(self, multiprocessors: int, schedule: Schedule, family: str = specs.SM90) -> Iterator[None]:
        """Let twell's CUDA operators launch kernels of ``family`` here, as on capability 9.0; new tensors hold NaN."""
        self.schedule = schedule
        deterministic = torch.are_deterministic_algorithms_enabled()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "sm_count", lambda index: multiprocessors)
            patch.setattr(device, "clusters", lambda index, ctas: max(multiprocessors // ctas, 1))
            patch.setattr(device, "capability", lambda index: device.SM_90)
            patch.setattr(tuning, "family", lambda index: family)
            patch.setattr(resolve, "resolve", lambda spec, arch: self.kernel(spec))
            patch.setattr(host, "maker", lambda: None)
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            torch.use_deterministic_algorithms(True)
            # others are for other numbers of multiprocessors
            forget_programs()
            try:
                yield
            finally:
                forget_programs()
                torch.use_deterministic_algorithms(deterministic)


def _pointer(values: array[int]) -> tuple[ctypes.c_void_p]:
    return (ctypes.c_void_p(values.buffer_info()[0]),)


def _give(emulator: ctypes.CDLL, kernel: ptx.Kernel) -> None:
    """Hand the instructions of ``kernel`` to its library, which copies them."""
    given: list[Any] = [kernel.name.encode()]
    parameters = array("I", [value for parameter in kernel.parameters for value in parameter])
    constants = kernel.constants
    lengths = (len(kernel.records) // len(ptx.FIELDS), len(kernel.operands), len(constants))
    for values, length in zip((kernel.records, kernel.operands, constants), lengths):
        given += [*_pointer(values), ctypes.c_int64(length)]
    given += [kernel.registers, *_pointer(parameters), ctypes.c_int64(len(kernel.parameters))]
    emulator.emulator_program(*given, ctypes.c_int64(kernel.bytes))


def _with_lines(said: str, text: str) -> str:
    """``said``, followed by the lines of PTX that it names."""
    lines = text.split("\n")
    named = dict.fromkeys(int(number) for number in re.findall(r"at line (\d+)", said))
    return "\n".join([said, *(f"    {number}: {lines[number - 1].strip()[:160]}" for number in named)])
