"""The one call to ``cute.compile``: a spec becomes a callable, an object file or a report.

Needs no GPU. Each kernel module exposes ``signature(spec) -> (jit object, fake arguments)``; the stream is added
here, as torch's current stream, which tvm-ffi supplies at call time.
"""

import importlib
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import cutlass.cute as cute
    from cutlass.base_dsl.common import DSLRuntimeError
    from cutlass.cute.runtime import find_runtime_libraries, make_fake_stream
    from cutlass.cutlass_dsl import CuTeDSL
except ImportError as error:
    raise ImportError(f"no compiler of kernels ({error}); install it with `pip install twell[jit]`") from error

from .fingerprint import ARCH
from .sm90 import checks
from .specs import Spec

# the processor of this machine, which runs the host half of a kernel unless another is named
HOST = platform.machine()


def compile_spec(spec: Spec, options: str = "", arch: str = ARCH) -> Any:
    """Compile ``spec`` for ``arch`` and return the callable; ``options`` are added to the compiler's own."""
    module = importlib.import_module(f".{spec.module}", __package__)
    jit_object, fake_args = module.signature(spec)
    _name_kernels(jit_object, spec)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with _no_arguments(), _checked_barriers(jit_object):
        return cute.compile(
            jit_object, *fake_args, stream, options=f"--enable-tvm-ffi --gpu-arch {arch} {options}".rstrip()
        )


@contextmanager
def _checked_barriers(jit_object: Any) -> Iterator[None]:
    """Check the barriers of what is traced, before it is compiled."""
    absent = getattr(jit_object, "absent", {})
    with CuTeDSL._get_dsl().trace_finalize_hooks(lambda _, module, name: checks.check(module, absent)):
        try:
            yield
        except DSLRuntimeError as error:
            if isinstance(error.__cause__, checks.BarrierError):
                raise error.__cause__ from None
            raise


@contextmanager
def _no_arguments() -> Iterator[None]:
    """Hide the program's command line: the compiler reads it, takes -d for an option of its own, and exits."""
    given = sys.argv
    sys.argv = given[:1]
    try:
        yield
    finally:
        sys.argv = given


def _name_kernels(jit_object: Any, spec: Spec) -> None:
    """Name the device kernel twell_SYMBOL for profilers; where a spec has several, the method's name follows.

    The compiler's own names list the types of all arguments and stop at 180 characters: variants look alike.
    """
    for method in dir(type(jit_object)):
        rename = getattr(getattr(type(jit_object), method), "set_name_prefix", None)
        # the host function gets its name at export
        if rename is not None and method != "__call__":
            own = "" if method in ("kernel", spec.op) else f"_{method}"
            rename(f"twell_{spec.symbol}{own}", remove_cutlass_symbol=True, keep_mangled_name=False)


def compile_object(spec: Spec, out: Path, arch: str = ARCH, host: str = HOST, keep_ptx: bool = False) -> None:
    """Write the object file that exports ``spec.symbol`` for the processor ``host``; ``keep_ptx``: PTX beside it, too.

    Atomically: another process sees all of it or none.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    compiled = compile_spec(spec, "--keep-ptx" if keep_ptx else "", arch)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{spec.symbol}.") as scratch:
        part = Path(scratch) / out.name
        if host == HOST:
            compiled.export_to_c(str(part), function_name=spec.symbol)
        else:
            _export_for(host, compiled, part, spec.symbol)
        if keep_ptx:
            # where the folder of the compiler's own copy is missing, it is the path of that
            if ".entry" not in compiled.__ptx__:
                raise RuntimeError(f"no PTX of {spec.symbol} was kept: expected a folder for {compiled.__ptx__}")
            out.with_suffix(".ptx").write_text(compiled.__ptx__)
        os.replace(part, out)


def _export_for(host: str, compiled: Any, out: Path, symbol: str) -> None:
    """Write an object file for another processor.

    The option --host-target, which selects one, is refused by the export of tvm-ffi functions (4.8.1), not by the
    code generator below it.
    """
    # no part of the compiler's interface: other calls must do without
    from cutlass.base_dsl.export import get_export_module
    from cutlass.cutlass_dsl.tvm_ffi_provider import rename_tvm_ffi_function

    exported = f"__tvm_ffi_{compiled.function_name}"
    module = get_export_module(compiled.ir_module, f"__{symbol}", preserve_symbols={exported})
    rename_tvm_ffi_function(module, compiled.function_name, symbol)
    generator = compiled.export_provider.mlirExecutionEngine
    generator.dump_object_file_pic(module, str(out), f"__tvm_ffi_{symbol}", 3, f"{host}-unknown-linux-gnu")


def runtime_libraries() -> tuple[Path, Path]:
    """Libraries that a library of objects links to: the DSL runtime of the compiler's CUDA toolkit, and tvm-ffi."""
    dsl, ffi = (Path(path) for path in find_runtime_libraries(enable_tvm_ffi=True))
    return dsl, ffi


@dataclass(frozen=True)
class Report:
    """The ptxas report of one device kernel; ``wgmma`` holds warnings of serialised WGMMA (C7515, C7517)."""

    symbol: str
    kernel: str
    registers: int
    spill_bytes: int
    wgmma: tuple[str, ...]


def compile_and_report(spec: Spec, arch: str = ARCH) -> tuple[Any, list[Report]]:
    """Compile ``spec`` for ``arch``; return the callable and one ``Report`` per device kernel in it."""
    compiled, said = _with_output(lambda: compile_spec(spec, "remarks{ptx}", arch))
    reports = parse_remarks(spec.symbol, said)
    if not reports:
        raise RuntimeError(f"the compiler printed no ptxas report for {spec.symbol}")
    return compiled, reports


def parse_remarks(symbol: str, text: str) -> list[Report]:
    """Parse the ptxas output in the compiler's remarks, which may repeat it and wrap lines anywhere."""
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    # stops at the quote that opens the kernel's mangled name
    warnings = tuple(sorted({w.strip() for w in re.findall(r"\(C75\d\d\)[^()']*wgmma[^()']*", text)}))
    kernels: dict[str, Report] = {}
    for part in re.split(r"Compiling entry function ", text)[1:]:
        name = re.match(r"'([^']+)'", part)
        spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        if name is None or spill is None or used is None:
            raise RuntimeError(f"unknown form of ptxas report for {symbol}: {part[:400]}")
        kernel = name[1].replace(" ", "")
        kernels[kernel] = Report(symbol, kernel, int(used[1]), int(spill[1]) + int(spill[2]), warnings)
    return list(kernels.values())


def _with_output(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of ``call`` and all output of the process meanwhile.

    The compiler's native code writes past ``sys.stdout``. If ``call`` raises, the output goes to stderr.
    """
    streams = sys.stdout, sys.stderr
    with tempfile.TemporaryFile("w+", errors="replace") as sink:
        for stream in streams:
            stream.flush()
        saved, failed = [os.dup(fd) for fd in (1, 2)], False
        try:
            for fd in (1, 2):
                os.dup2(sink.fileno(), fd)
            result = call()
        except BaseException:
            failed = True
            raise
        finally:
            for stream in streams:
                stream.flush()
            for fd, original in zip((1, 2), saved):
                os.dup2(original, fd)
                os.close(original)
            sink.seek(0)
            if failed:
                sys.stderr.write(sink.read())
        return result, sink.read()
