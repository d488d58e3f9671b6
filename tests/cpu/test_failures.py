"""Mistakes of users and faults of machines: arguments, kernel caches and libraries. A clear error, or none at all.

``test_functional`` and ``test_runtime`` have the common ones; the rare ones are here.
"""

import errno
import json
import math
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_kernels import Compiler, package_tiny
from torch import Tensor

from twell import testing
from twell.runtime import cache, packaged, resolve, specs

BF16 = torch.bfloat16


# Non-finite values, on the CPU: the same as dense PyTorch wherever a token fires the neuron


@pytest.mark.parametrize(("value", "strategy"), [(math.nan, "row"), (math.inf, "union"), (-math.inf, "row")])
@pytest.mark.parametrize("name", ["x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"])
def test_non_finite_values_reach_what_dense_lets_them_reach(name: str, value: float, strategy: Any) -> None:
    """Never more values than in dense PyTorch; all of them where a token or a neuron that it fires is not finite."""
    problem = testing.integer_problem(9, 24, 264, density=0.2, biases="gate up down")
    clean = testing.sparse_output(problem, strategy=strategy)
    spoilt = problem.map(Tensor.clone)
    tensor = getattr(spoilt, name)
    tensor[(3,) + (1,) * (tensor.dim() - 1)] = value
    y, dense = (testing.sparse_output(spoilt, strategy=s) for s in (strategy, "dense"))
    assert not bool((y.isfinite() < dense.isfinite()).any())
    assert torch.equal(y[y.isfinite() & clean.isfinite()], clean[y.isfinite() & clean.isfinite()]) or name in (
        "w_gate",
        "b_gate",
        "x",
    )
    gate = torch.relu(torch.nn.functional.linear(spoilt.x, spoilt.w_gate, spoilt.b_gate))
    fires = gate[:, 3] != 0
    if name in ("w_up", "b_up"):
        assert torch.equal(y.isfinite().all(1), ~fires)
    elif name == "w_down":
        assert not bool(y[fires, 1].isfinite().any())
    elif name == "b_down":
        assert not bool(y[:, 3].isfinite().any())
    elif name == "x":
        assert torch.equal(y.isnan(), dense.isnan())


# Kernels that cannot be loaded, with tiny libraries in their place

SPEC, OTHER = specs.UnpackSpec("bfloat16"), specs.UnpackSpec("float16")


@pytest.fixture(autouse=True)
def folder(entries_folder: Path) -> Path:
    return entries_folder


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".so")


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


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"null", b"[" * 200_000, b'{"arch": 9}'], ids=range(4))
def test_a_garbled_manifest(
    content: bytes, library: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    (library.parent / "manifest.json").write_bytes(content)
    assert resolve.resolve(SPEC)() == 42
    assert "packaged kernels ignored: manifest.json" in caplog.text


def refusing(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, error: OSError, when: Callable[..., bool]) -> None:
    """Make ``where.name`` raise ``error`` if ``when`` holds for its arguments."""
    real = getattr(where, name)

    def refuses(*arguments: Any, **named: Any) -> Any:
        if when(*arguments, **named):
            raise error
        return real(*arguments, **named)

    monkeypatch.setattr(where, name, refuses)


def test_an_entry_that_cannot_be_read(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.load(SPEC)
    denied = PermissionError(errno.EACCES, "Permission denied")
    (old,) = entries(folder)
    refusing(monkeypatch, os, "open", denied, lambda path, *_, **__: path == old)
    assert cache.load(SPEC)() == 43
    assert f"{old} cannot be read: [Errno 13] Permission denied" in caplog.text
    # others may be able to
    assert old in entries(folder)
    assert len(entries(folder)) == 2
    assert cache.load(SPEC)() == 43


READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [READ_ONLY, FULL], ids=["read-only", "full"])
def test_a_folder_that_takes_no_lock(
    error: OSError, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing(monkeypatch, os, "open", error, lambda path, *_, **__: str(path).endswith(".lock"))
    assert cache.load(SPEC)() == 42
    assert f"kernel cache not used: {error}" in caplog.text


def test_a_read_only_folder_still_serves_what_it_holds(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.load(SPEC)
    refusing(monkeypatch, os, "open", READ_ONLY, lambda path, flags, *_, **__: bool(flags & os.O_CREAT))
    assert cache.load(SPEC)() == 42
    assert len(compiler.compiled) == 1


@pytest.mark.parametrize("at", ["scratch", "object", "link", "rename"])
def test_a_disk_that_fills_up(
    at: str, compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever it happens, the kernel is built elsewhere for this process, and no partial file is left."""
    inside = str(folder)
    if at == "scratch":
        refusing(monkeypatch, cache.tempfile, "TemporaryDirectory", FULL, lambda dir="", **_: str(dir) == inside)
    elif at == "object":
        refusing(monkeypatch, compiler, "compile_object", FULL, lambda spec, out, arch: str(out).startswith(inside))
    elif at == "link":
        stderr = "/usr/bin/ld: final link failed: No space left on device\ncollect2: error: ld returned 1 exit status"
        real = subprocess.run

        def run(command: list[str], **options: Any) -> Any:
            if any(part.startswith(inside) for part in map(str, command)) and "-shared" in command:
                return SimpleNamespace(returncode=1, stderr=stderr)
            return real(command, **options)

        monkeypatch.setattr(cache.subprocess, "run", run)
    else:
        refusing(monkeypatch, os, "replace", FULL, lambda source, target: str(target).startswith(inside))
    assert cache.load(SPEC)() >= 1
    assert "kernel cache not used: [Errno 28] No space left on device" in caplog.text
    assert not entries(folder)
    assert not list(folder.glob(".*"))


def test_no_place_at_all(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers with a fallback get the error they look for, and a later call may succeed."""
    with monkeypatch.context() as patch:
        refusing(patch, cache.tempfile, "TemporaryDirectory", FULL, lambda **_: True)
        with pytest.raises(RuntimeError, match=r"UnpackSpec.*cannot be compiled, no folder can hold it: .Errno 28"):
            resolve.resolve(SPEC)
    assert resolve.resolve(SPEC)() == 42


def test_a_user_without_a_home(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TWELL_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert cache.load(SPEC)() == 42
    assert "Could not determine home directory. TWELL_CACHE_DIR can name a folder instead" in caplog.text


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
        out.write_bytes(b"half of an object")
        marker.touch()
        time.sleep(600)

    cache.kernel_module = lambda name: SimpleNamespace(compile_object=compile_object)  # type: ignore[assignment]
    cache.load(SPEC)


def test_a_process_killed_while_it_compiles(compiler: Compiler, folder: Path, tmp_path: Path) -> None:
    """Its lock is released, its files are removed, and the waiting process goes on."""
    begun = tmp_path / "begun"
    victim = multiprocessing.get_context("fork").Process(target=compile_slowly, args=(begun,))
    victim.start()
    try:
        deadline = time.monotonic() + 100
        while not begun.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (scratch,) = folder.glob(f".{SPEC.symbol}.*")
        results: list[int] = []
        waiting = threading.Thread(target=lambda: results.append(cache.load(SPEC)()))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        victim.kill()
        waiting.join(60)
        assert results == [42]
        assert not scratch.exists()
        assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]
    finally:
        victim.kill()
        victim.join()


def test_an_entry_that_vanishes_while_it_is_looked_at(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process discarded it first."""
    cache.load(SPEC)
    assert len(entries(folder)) == 1
    damage = cache._damage

    def too_late(path: Path) -> str:
        path.unlink(missing_ok=True)
        return damage(path)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_damage", too_late)
        assert cache.load(SPEC)() == 43
    assert cache.load(SPEC)() == 43
