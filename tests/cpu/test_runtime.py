"""How kernels are found, with tiny libraries in their place, and what goes wrong; the environment; the driver.

Needs a C compiler only.
"""

import errno
import importlib
import json
import logging
import multiprocessing
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_kernels import Compiler, compile_tiny, package_tiny

import twell
from twell.runtime import cache, device, env, fingerprint, log, packaged, resolve, specs

SPEC = specs.UnpackSpec("bfloat16")
OTHER = specs.UnpackSpec("float16")


@pytest.fixture(autouse=True)
def folder(entries_folder: Path) -> Path:
    return entries_folder


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".so", ".o"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def refusing(
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    error: Exception,
    when: Callable[..., bool] = lambda *_, **__: True,
) -> None:
    """Make ``where.name`` raise ``error`` if ``when`` holds for its arguments."""
    real = getattr(where, name)

    def refuses(*arguments: Any, **named: Any) -> Any:
        if when(*arguments, **named):
            raise error
        return real(*arguments, **named)

    monkeypatch.setattr(where, name, refuses)


READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestCache:
    def test_compiles_once_then_loads(self, compiler: Compiler, folder: Path) -> None:
        # a symbol may begin with another one
        every = [SPEC, OTHER, *(specs.UpDownTokenSpec("bfloat16", 1024, 1, gated) for gated in (False, True))]
        for _ in range(2):
            assert [cache.load(spec)() for spec in every] == [42, 43, 44, 45]  # type: ignore[func-returns-value]
        assert compiler.compiled == [spec.symbol for spec in every]
        assert entries(folder) == sorted(folder / f"{spec.symbol}.so" for spec in every)

    def test_only_the_user_reads_and_writes(self, compiler: Compiler, folder: Path) -> None:
        before = os.umask(0)
        try:
            cache.load(SPEC)
        finally:
            os.umask(before)
        assert mode(folder) == mode(folder.parent) == 0o700
        assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]

    def test_an_entry_that_is_cut_short_is_built_again(
        self, compiler: Compiler, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        content = b""
        for size in (0, -1):
            packaged.require_whole.cache_clear()
            entry = cache.open_folder() / f"{SPEC.symbol}.so"
            entry.unlink(missing_ok=True)
            entry.write_bytes(content[:size])
            assert cache.load(SPEC)() == 42
            content = entry.read_bytes()
        assert len(compiler.compiled) == 2
        assert caplog.text.count("is cut short, and is built again") == 2

    def test_an_entry_that_this_process_cannot_load_is_named(self, compiler: Compiler, folder: Path) -> None:
        cache.load(SPEC)
        (entry,) = entries(folder)
        (folder / f"{OTHER.symbol}.so").write_bytes(entry.read_bytes())
        with pytest.raises(RuntimeError, match=f"cannot load kernel {OTHER.symbol} from {folder}"):
            cache.load(OTHER)

    @pytest.mark.parametrize(
        "fault",
        ["mode 777", "expected 12345", "is not a folder", "lock", "File exists", "Could not determine", "space"],
    )
    def test_a_folder_that_cannot_be_used(
        self, fault: str, compiler: Compiler, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is left, or written through a link."""
        trap, base = tmp_path / "trap", folder.parent
        if fault == "mode 777":
            base.mkdir()
            base.chmod(0o777)
        elif fault == "expected 12345":
            folder.mkdir(parents=True, mode=0o700)
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        elif fault == "is not a folder":
            trap.mkdir(mode=0o700)
            base.mkdir(mode=0o700)
            folder.symlink_to(trap)
        elif fault == "lock":
            (cache.open_folder() / f"{SPEC.symbol}.lock").symlink_to(trap)
        elif fault == "File exists":
            base.touch()
        elif fault == "Could not determine":
            monkeypatch.delenv("TWELL_CACHE_DIR")
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
            refusing(monkeypatch, Path, "expanduser", RuntimeError("Could not determine home directory."))
        else:
            refusing(monkeypatch, shutil, "copyfile", FULL)
        with pytest.raises(RuntimeError, match=rf"the cache cannot hold it: .*{fault}.*; TWELL_CACHE_DIR can name"):
            cache.load(SPEC)
        assert not list(tmp_path.glob("**/*.so"))
        assert not (list(trap.iterdir()) if fault == "is not a folder" else trap.exists())

    def test_the_user_may_link_the_cache_elsewhere(self, compiler: Compiler, folder: Path, tmp_path: Path) -> None:
        elsewhere = tmp_path / "scratch"
        elsewhere.mkdir(mode=0o700)
        folder.parent.symlink_to(elsewhere)
        cache.load(SPEC)
        assert len(entries(elsewhere / folder.name)) == 1

    def test_a_compiler_may_be_missing(self, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "which", lambda name: None)
            with pytest.raises(RuntimeError, match=r"UnpackSpec.*expected cc, gcc or clang, got none"):
                cache.load(SPEC)
        monkeypatch.undo()
        monkeypatch.setitem(sys.modules, "cutlass", None)
        for name in [name for name in sys.modules if name.endswith("cute_kernels.compile")]:
            monkeypatch.delitem(sys.modules, name)
        with pytest.raises(RuntimeError, match=r"UnpackSpec.*cannot be compiled.*pip install twell\[jit\]"):
            cache._build(SPEC, Path(), fingerprint.ARCH)

    def test_a_failing_linker_is_quoted(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        broken = SimpleNamespace(compile_object=lambda spec, out, arch: out.write_bytes(b"no object"))
        monkeypatch.setattr(cache, "kernel_module", lambda name: broken)
        with pytest.raises(RuntimeError, match=rf"(?s)linking kernel {SPEC.symbol} failed: .*-shared.*\n"):
            cache.load(SPEC)
        assert not entries(folder)

    def test_a_real_kernel(self, folder: Path) -> None:
        pytest.importorskip("cutlass")
        for _ in range(2):
            with pytest.raises(TypeError, match=r"Expects \d+ parameters when calling"):
                cache.load(SPEC)()
        assert len(entries(folder)) == 1

    def test_the_fingerprint_covers_what_an_entry_depends_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = cache.fingerprint.__wrapped__()
        assert plain == cache.fingerprint()
        changes: list[tuple[Any, str, Callable[..., Any]]] = [
            (fingerprint, "source_hash", lambda: "another"),
            (packaged, "version", lambda package: "0"),
            (packaged, "toolkits", lambda: iter([Path("cu99")])),
        ]
        for where, name, value in changes:
            with monkeypatch.context() as patch:
                patch.setattr(where, name, value)
                assert cache.fingerprint.__wrapped__() != plain


def test_a_read_only_folder_still_serves_what_it_holds(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.load(SPEC)
    refusing(monkeypatch, os, "open", READ_ONLY, lambda path, flags, *_, **__: bool(flags & os.O_CREAT))
    assert cache.load(SPEC)() == 42
    assert len(compiler.compiled) == 1


def test_a_compiler_that_fails_leaves_nothing(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is raised unchanged, and the next call tries again."""
    with monkeypatch.context() as patch:
        broken = SimpleNamespace(compile_object=lambda spec, out, arch: out.write_bytes(b"half") and 1 / 0)
        patch.setattr(cache, "kernel_module", lambda name: broken)
        with pytest.raises(ZeroDivisionError):
            resolve.resolve(SPEC)
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    assert resolve.resolve(SPEC)() == 42


def compile_slowly(marker: Path) -> None:
    def compile_object(spec: specs.Spec, out: Path, arch: str) -> None:
        marker.touch()
        time.sleep(600)

    cache.kernel_module = lambda name: SimpleNamespace(compile_object=compile_object)  # type: ignore[assignment]
    cache.load(SPEC)


def test_a_process_killed_while_it_compiles(compiler: Compiler, folder: Path, tmp_path: Path) -> None:
    """Its lock is released, and of those that wait one compiles."""
    begun = tmp_path / "begun"
    victim = multiprocessing.get_context("fork").Process(target=compile_slowly, args=(begun,))
    victim.start()
    try:
        deadline = time.monotonic() + 100
        while not begun.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with ThreadPoolExecutor(2) as threads:
            # each opens the lock for itself, as processes do
            waiting = [threads.submit(lambda: cache.load(SPEC)()) for _ in range(2)]
            time.sleep(0.3)
            assert not any(each.done() for each in waiting)
            victim.kill()
            assert [each.result(60) for each in waiting] == [42, 42]
        assert compiler.compiled == [SPEC.symbol]
        assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]
    finally:
        victim.kill()
        victim.join()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packaged library with the kernel of SPEC, which returns 100."""
    package_tiny(tmp_path / "_lib", SPEC, 100)
    monkeypatch.setattr(packaged, "FOLDER", tmp_path / "_lib")
    return packaged.FOLDER / packaged.LIBRARY


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda content: b"text, and enough of it" * 100, "is not a library"),
        (lambda content: content[:40], "is not a library"),
        (lambda content: content[:-1], "is cut short: expected at least"),
        (lambda content: content[:18] + b"\x00\x00" + content[20:], "cannot load kernel"),
    ],
    ids=["text", "part of a header", "all but a byte", "another machine"],
)
def test_a_damaged_library_is_reported_once_and_replaced(
    damage: Callable[[bytes], bytes], text: str, library: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(damage(whole))
    for _ in range(2):
        resolve._kernels.clear()
        assert resolve.resolve(SPEC)() == 42
    assert compiler.compiled == [SPEC.symbol]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a packaged kernel cannot be used, install twell again" in caplog.text
    assert text in caplog.text


def test_a_library_without_a_symbol_that_its_manifest_names(
    library: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = json.loads((library.parent / "manifest.json").read_text())
    (library.parent / "manifest.json").write_text(json.dumps(manifest | {"symbols": [SPEC.symbol, OTHER.symbol]}))
    assert resolve.resolve(SPEC)() == 100
    assert resolve.resolve(OTHER)() == 42
    assert f"cannot load kernel {OTHER.symbol}" in caplog.text


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"null", b'{"arch": 9}'], ids=range(3))
def test_a_garbled_manifest(
    content: bytes, library: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    (library.parent / "manifest.json").write_bytes(content)
    assert resolve.resolve(SPEC)() == 42
    assert "packaged kernels ignored: manifest.json" in caplog.text


class TestPackaged:
    def test_comes_first_and_imports_no_compiler(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Compiler
    ) -> None:
        package_tiny(tmp_path / "_lib", SPEC, 7)
        monkeypatch.setattr(packaged, "FOLDER", tmp_path / "_lib")
        assert resolve.resolve(SPEC)() == 7
        assert resolve.resolve(SPEC) is resolve.resolve(specs.UnpackSpec("bfloat16"))
        assert resolve.resolve(OTHER)() == 42
        assert compiler.compiled == [OTHER.symbol]

    def test_other_versions_are_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        versions = fingerprint.versions() | {fingerprint.DSL: "4.0.0"}
        package_tiny(tmp_path / "_lib", SPEC, 7, versions=versions)
        with caplog.at_level(logging.INFO, "twell"):
            manifest = packaged.read_manifest(tmp_path / "_lib")
        assert manifest is not None
        assert manifest.symbols == [SPEC.symbol]
        assert f"built with {fingerprint.DSL} 4.0.0" in caplog.text

    def test_a_missing_library_of_calls_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tvm_ffi", None)
        with pytest.raises(RuntimeError, match="pip install apache-tvm-ffi"):
            packaged.load_runtime.__wrapped__()

    @pytest.mark.parametrize(
        ("driver", "versions", "taken"),
        [
            (13, ("4.8.1", "4.8.0"), "/cu13/lib/"),
            (None, ("4.8.1", "4.8.0"), "/cu13/lib/"),
            (12, ("4.8.1", "4.8.0"), "/cu12/lib/"),
            # as beside an engine that pins another one
            (13, ("4.7.1", "4.8.0"), "/cu12/lib/"),
            (13, ("4.10.0", "4.8.0"), "/cu12/lib/"),
            (None, ("4.7.1", "4.9.0"), 'pip install "nvidia-cutlass-dsl-libs-cu12>=4.8,<4.9"'),
            (12, ("4.8.1", "4.7.1"), 'pip install "nvidia-cutlass-dsl-libs-cu12>=4.8,<4.9"'),
            # unpacked, without metadata
            (13, ("none", "none"), "/cu13/lib/"),
        ],
    )
    def test_the_runtime_suits_the_driver_and_the_kernels(
        self,
        driver: int | None,
        versions: tuple[str, str],
        taken: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def driver_version() -> tuple[int, int]:
            if driver is None:
                raise RuntimeError("no CUDA driver")
            return driver, 0

        location, said = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia_cutlass_dsl")]), ""
        monkeypatch.setattr(device, "driver_version", driver_version)
        monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: location)
        monkeypatch.setattr(packaged, "version", lambda package: "none")
        monkeypatch.setattr(packaged, "RUNTIME", "libtest_runtime.so")
        for name, version in zip(("cu13", "cu12"), versions):
            library = tmp_path / "nvidia_cutlass_dsl" / name / "lib" / packaged.RUNTIME
            library.parent.mkdir(parents=True)
            compile_tiny("of_" + name, library, 1, "-shared")
            if version != "none":
                metadata = tmp_path / f"nvidia_cutlass_dsl_libs_{name}-{version}.dist-info" / "METADATA"
                metadata.parent.mkdir()
                metadata.write_text(f"Name: nvidia-cutlass-dsl-libs-{name}\nVersion: {version}\n")
        caplog.set_level(logging.INFO, "twell")
        try:
            assert packaged.load_runtime.__wrapped__().parents[1] == next(packaged.toolkits())
        except RuntimeError as error:
            said = str(error)
        assert taken in (said or caplog.text)
        # the one that is taken, and those before it
        for name, version in list(zip(("cu13", "cu12"), versions))[: 1 if taken == "/cu13/lib/" else 2]:
            assert f"nvidia-cutlass-dsl-libs-{name} {version}" in (said or caplog.text)


class TestResolve:
    def test_a_miss_during_capture_names_the_spec(self, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resolve, "_capturing", lambda: True)
        with pytest.raises(RuntimeError, match=r"UnpackSpec\(dtype='bfloat16'\) is not loaded yet and a CUDA graph"):
            resolve.resolve(SPEC)
        assert not compiler.compiled
        monkeypatch.setattr(resolve, "_capturing", lambda: False)
        assert resolve.resolve(SPEC)() == 42
        monkeypatch.setattr(resolve, "_capturing", lambda: True)
        assert resolve.resolve(SPEC)() == 42

    def test_the_first_call_loads_whatever_other_threads_capture(
        self, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entered: list[str] = []

        @contextmanager
        def relaxed() -> Iterator[None]:
            entered.append("relaxed")
            yield

        monkeypatch.setattr(device, "relaxed_capture", relaxed)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(resolve, "_capturing", lambda: False)
        for _ in range(3):
            assert resolve.resolve(SPEC)() == 42
        assert entered == ["relaxed"]


def fake_driver(**functions: Callable[..., tuple[Any, ...]]) -> SimpleNamespace:
    ok = SimpleNamespace(name="CUDA_SUCCESS")
    attributes = {"sms": (132, 78), "major": (9, 8), "minor": (0, 6)}
    machine = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=ok, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT="implicit"),
        CUdevice_attribute=SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms",
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        ),
        CUstreamCaptureStatus=SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0),
        CUstream=lambda handle: handle,
        cuInit=lambda flags: (ok,),
        cuDriverGetVersion=lambda: (ok, 13010),
        cuDeviceGetCount=lambda: (ok, 2),
        cuDeviceGet=lambda index: (ok, index),
        cuDeviceGetAttribute=lambda name, handle: (ok, attributes[name][handle]),
        cuDeviceGetName=lambda length, handle: (ok, f"GPU {handle}".encode().ljust(length, b"\0")),
        cuDeviceTotalMem=lambda handle: (ok, 2**37),
        cuStreamIsCapturing=lambda stream: ("implicit", None) if stream == 0 else (ok, stream - 1),
    )
    vars(machine).update(functions)
    return machine


class TestDevice:
    @pytest.fixture(autouse=True)
    def uncached(self) -> Any:
        cached = (device._initialised, device._handle, device.sm_count, device.capability, device.driver_version)
        for function in cached:
            function.cache_clear()
        yield
        for function in cached:
            function.cache_clear()

    def test_describes_the_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "_bindings", fake_driver)
        first = device.Device(0, "GPU 0", (9, 0), 132, 2**37)
        second = device.Device(1, "GPU 1", (8, 6), 78, 2**37)
        assert device.describe() == device.Driver((13, 1), (first, second))
        assert (device.sm_count(0), device.capability(1)) == (132, (8, 6))

    def test_capture_states(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "_bindings", fake_driver)
        # the legacy stream refuses the question while another stream captures
        assert [device.is_capturing(stream) for stream in (0, 1, 2)] == [True, False, True]
        broken = fake_driver(
            cuStreamIsCapturing=lambda stream: (SimpleNamespace(name="CUDA_ERROR_INVALID_HANDLE"), None)
        )
        monkeypatch.setattr(device, "_bindings", lambda: broken)
        with pytest.raises(RuntimeError, match="cuStreamIsCapturing failed: CUDA_ERROR_INVALID_HANDLE"):
            device.is_capturing(1)

    def test_a_thread_is_relaxed_for_a_while(self, monkeypatch: pytest.MonkeyPatch) -> None:
        modes = ["global"]

        def exchange(mode: str) -> tuple[Any, str]:
            modes.append(mode)
            return driver.CUresult.CUDA_SUCCESS, modes[-2]

        driver = fake_driver(cuThreadExchangeStreamCaptureMode=exchange)
        driver.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
        monkeypatch.setattr(device, "_bindings", lambda: driver)
        with device.relaxed_capture():
            assert modes == ["global", "relaxed"]
            with device.relaxed_capture():
                assert modes[2:] == ["relaxed"]
        assert modes == ["global", "relaxed", "relaxed", "relaxed", "global"]
        with pytest.raises(ZeroDivisionError), device.relaxed_capture():
            1 / 0  # noqa: B018
        assert modes[-2:] == ["relaxed", "global"]

    def test_what_is_missing_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        no_device = SimpleNamespace(name="CUDA_ERROR_NO_DEVICE")
        monkeypatch.setattr(device, "_bindings", lambda: fake_driver(cuInit=lambda flags: (no_device,)))
        assert device.describe() == device.Driver((13, 1), (), "cuInit failed: CUDA_ERROR_NO_DEVICE")

        def missing() -> Any:
            raise RuntimeError("libcuda.so.1 not found")

        device.driver_version.cache_clear()
        monkeypatch.setattr(device, "_bindings", lambda: fake_driver(cuDriverGetVersion=missing))
        assert device.describe() == device.Driver(None, (), "no CUDA driver: libcuda.so.1 not found")
        monkeypatch.undo()
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        assert "pip install cuda-bindings" in str(device.describe().problem)
        with pytest.raises(RuntimeError, match="pip install cuda-bindings"):
            device.sm_count(0)


class TestEnvironment:
    @pytest.mark.parametrize(
        ("name", "read", "text"),
        [
            ("TWELL_LOG", env.log_level, "TWELL_LOG must be one of debug, info, .*got 'maybe'"),
            ("TWELL_DEBUG", env.debug, "TWELL_DEBUG must be one of 0, 1, got 'maybe'"),
            ("TWELL_CACHE_DIR", env.cache_dir, "TWELL_CACHE_DIR must be an absolute path, got 'maybe'"),
        ],
    )
    def test_nonsense_is_refused(
        self, name: str, read: Callable[[], Any], text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, "maybe")
        with pytest.raises(ValueError, match=text):
            read()

    def test_switches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert (env.debug(), env.vllm()) == (False, True)
        monkeypatch.setenv("TWELL_DEBUG", "1")
        assert env.debug()
        for value, allowed in (("", True), ("auto", True), ("AUTO", True), ("off", False)):
            monkeypatch.setenv("TWELL_VLLM", value)
            assert env.vllm() is allowed

    def test_the_cache_folder_follows_the_environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        monkeypatch.setenv("TWELL_CACHE_DIR", "~/kernels")
        assert env.cache_dir() == tmp_path / "kernels"
        monkeypatch.delenv("TWELL_CACHE_DIR")
        assert env.cache_dir() == Path("/xdg/twell")
        # the specification ignores relative paths
        for value in ("relative", ""):
            monkeypatch.setenv("XDG_CACHE_HOME", value)
            assert env.cache_dir() == tmp_path / ".cache" / "twell"

    def test_logging(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert env.log_level() is None
        before = (log.logger.handlers[:], log.logger.level, log.logger.propagate)
        monkeypatch.setenv("TWELL_LOG", "Info")
        try:
            log.configure()
            assert log.logger.level == logging.INFO
            assert len(log.logger.handlers) == len(before[0]) + 1
        finally:
            log.logger.handlers, log.logger.level, log.logger.propagate = before


def test_a_bad_variable_is_named_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWELL_LOG", "loud")
    with pytest.raises(ValueError, match="environment variable TWELL_LOG must be one of"):
        importlib.reload(twell)
