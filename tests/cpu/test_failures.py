"""Mistakes of users and faults of machines: arguments, kernel caches and libraries. A clear error, or none at all.

``test_functional`` and ``test_runtime`` have the common ones; the rare ones are here.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_kernels
import torch
from tiny_kernels import Compiler, compile_tiny
from torch import Tensor

import twell
from twell import testing
from twell._runtime import cache, fingerprint, log, packaged, resolve, specs
from twell.nn import SparseGatedMLP, SparseMLP

BF16 = torch.bfloat16
ROOT = Path(__file__).parents[2]
SPARSE = ("auto", "row", "union")
STRATEGIES = (*SPARSE, "dense")
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)


# Arguments


def shaped(**changes: Any) -> dict[str, Any]:
    """Arguments of the gated function: K = 16, N = 24."""
    shapes = {"x": (3, 16), "w_gate": (24, 16), "w_up": (24, 16), "w_down": (16, 24)}
    return {name: torch.ones(shape, dtype=BF16) for name, shape in shapes.items()} | changes


def gated(strategy: Any = "row", **changes: Any) -> Any:
    return twell.sparse_gated_ffn(**shaped(**changes), strategy=strategy)


def plain(strategy: Any = "row", **changes: Any) -> Any:
    arguments = shaped(**changes)
    return twell.sparse_ffn(arguments["x"], arguments["w_up"], arguments["w_down"], strategy=strategy)


@EVERY_STRATEGY
def test_bad_operands_are_refused_by_every_strategy(strategy: str) -> None:
    """Beside those of test_functional."""
    complex_weight, half = torch.ones(24, 16, dtype=torch.complex64), torch.ones(24, 16, dtype=torch.float16)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"x": torch.ones(3, 16).numpy()}, TypeError, "x must be a tensor, got ndarray"),
        ({"w_down": (1.0, 2.0)}, TypeError, "w_down must be a tensor, got tuple"),
        ({"x": torch.ones(3, 16, dtype=torch.bool)}, TypeError, "x must have a floating dtype, got torch.bool"),
        ({"w_up": complex_weight}, TypeError, "w_up must be .*bfloat16 as x is, got .*comp"),
        ({"w_gate": half}, TypeError, "w_gate must be .*bfloat16.*got torch.float16"),
        ({"b_down": torch.ones(16)}, TypeError, "b_down must be torch.bfloat16 as x is, got torch.float32"),
        ({"w_gate": torch.ones(1, 24, 16, dtype=BF16)}, ValueError, r"must be \[N, K\], got \[1, 24, 16\]"),
        ({"w_down": torch.ones((), dtype=BF16)}, ValueError, r"w_down must be \[16, 24\] .*got \[\]"),
        ({"b_up": torch.ones(24, 1, dtype=BF16)}, ValueError, r"b_up must be \[24\] .*got \[24, 1\]"),
        ({"x": torch.ones(0, 8, dtype=BF16)}, ValueError, r"x must be \[\.\.\., 16\] .*got \[0, 8\]"),
        ({"x": torch.ones(3, 16, dtype=BF16, device="meta")}, ValueError, "on cpu as the others are, got meta"),
    ]
    for changes, error, text in cases:
        with pytest.raises(error, match=text):
            gated(strategy, **changes)
    y = twell.sparse_gated_ffn(**{name: t.to("meta") for name, t in shaped().items()}, strategy=strategy)
    assert (y.shape, y.dtype, y.device.type) == ((3, 16), BF16, "meta")


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("strategy", ["row", "dense"])
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Tensor.to_sparse_csr, "torch.sparse_csr"),
        (lambda t: t.float().to_mkldnn(), "torch._mkldnn"),
        (lambda t: torch.nested.nested_tensor([t[:1], t[1:]], layout=torch.jagged), "a nested tensor"),
    ],
    ids=["csr", "mkldnn", "jagged"],
)
def test_other_layouts_are_refused_by_name(layout: Callable[[Tensor], Tensor], kind: str, strategy: str) -> None:
    for name in ("x", "w_gate", "w_up", "w_down"):
        changed = {name: layout(shaped()[name])}
        with pytest.raises(TypeError, match=f"sparse_gated_ffn: {name} must be a strided tensor, got {kind}"):
            gated(strategy, **changed)
    with pytest.raises(TypeError, match=f"sparse_ffn: w_down must be a strided tensor, got {kind}"):
        plain(strategy, w_down=layout(shaped()["w_down"]))
    with pytest.raises(TypeError, match=f"pack: x must be a strided tensor, got {kind}"):
        twell.pack(layout(shaped()["x"]), shaped()["w_gate"])


@pytest.mark.parametrize("compression", [-8, 3, "8", None, True, 8.0])
def test_other_compressions_are_refused(compression: Any) -> None:
    arguments = shaped()
    for call in (
        lambda: twell.sparse_gated_ffn(**arguments, strategy="row", compression=compression),
        lambda: twell.sparse_gated_ffn(**arguments, compression=compression),
        lambda: twell.sparse_gated_ffn(**arguments, strategy="dense", compression=compression),
        lambda: twell.pack(arguments["x"], arguments["w_gate"], compression=compression),
        lambda: SparseGatedMLP(16, 24, compression=compression, strategy="row", dtype=BF16)(arguments["x"]),
    ):
        with pytest.raises(ValueError, match=r"compression must be one of \(2, 4, 8\), got"):
            call()


@pytest.mark.parametrize("strategy", ["fast", "", None, ["row"]])
def test_other_strategies_are_refused(strategy: Any) -> None:
    for call in (lambda: gated(strategy), lambda: plain(strategy), lambda: SparseMLP(16, 24, strategy=strategy)):
        with pytest.raises(
            ValueError,
            match='strategy must be "auto", "dense", "row" or "union", got',
        ):
            call()


@EVERY_STRATEGY
@pytest.mark.parametrize(("shape", "training"), [((0, 16), True), ((3, 0, 16), False)])
def test_calls_without_tokens_return_empty_results(shape: tuple[int, ...], training: bool, strategy: str) -> None:
    x = torch.empty(shape, dtype=BF16, requires_grad=training)
    arguments = shaped(x=x) | {"w_up": shaped()["w_up"].requires_grad_(training)}
    y, aux = twell.sparse_gated_ffn(**arguments, strategy=strategy, return_aux=True)
    assert y.shape == shape
    assert (float(aux.l1.detach()), float(aux.l0)) == (0, 0)
    if training:
        (y.sum() + aux.l1).backward()
        assert x.grad is not None
        assert x.grad.shape == shape
        assert not arguments["w_up"].grad.any()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "column-major": lambda t: t.t().contiguous().t(),
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "every second column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "shifted": lambda t: torch.nn.functional.pad(t, (3, 5))[:, 3:-5],
    "flipped twice": lambda t: t.flip(0).flip(0),
    "negated twice": lambda t: torch._neg_view(-t),
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}


@EVERY_STRATEGY
@pytest.mark.parametrize("name", ["x", "w_gate", "w_up", "w_down"])
def test_strides_change_no_result(name: str, strategy: str) -> None:
    problem = testing.integer_problem(5, 24, 264, biases="gate")
    arguments = {"x": problem.x, "w_gate": problem.w_gate, "w_up": problem.w_up, "w_down": problem.w_down.t()}
    expected = testing.exact_output(problem)
    for view, change in VIEWS.items():
        changed = arguments | {name: change(arguments[name])}
        y = twell.sparse_gated_ffn(**changed, b_gate=problem.b_gate, strategy=strategy)
        assert torch.equal(y, expected), view


def test_a_refused_call_leaves_no_trace() -> None:
    """An AutoStrategy does not count a refused call, and main gradients stay unchanged."""
    site = twell.AutoStrategy()
    mains = [torch.full(shape, 3.0) for shape in ((24, 16), (24, 16), (16, 24))]
    for changes in ({"x": torch.ones(3, 8, dtype=BF16)}, {"w_down": torch.ones(24, 16, dtype=BF16)}):
        with pytest.raises(ValueError, match="must be"):
            twell.sparse_gated_ffn(**shaped(**changes), strategy=site, main_grads=mains)
    assert not site._buckets
    assert all(bool((main == 3).all()) for main in mains)


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


# A function by the calling convention of tvm-ffi that returns an integer.
@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return tiny_kernels.install(monkeypatch)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no loaded kernels and no packaged library; the folder of entries."""
    for name in ("TWELL_JIT", "TWELL_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged, "FOLDER", tmp_path / "nothing")
    monkeypatch.setattr(resolve, "_kernels", {})
    monkeypatch.setattr(resolve, "_missing", set())
    log.warn_once.cache_clear()
    return tmp_path / "cache" / cache.fingerprint()


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".so")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packaged library with the kernel of SPEC, which returns 100."""
    home = tmp_path / "_lib"
    home.mkdir()
    compile_tiny(SPEC.symbol, home / packaged.LIBRARY, 100, "-shared")
    manifest = {
        "arch": fingerprint.ARCH,
        "toolkit": "cu13",
        "versions": fingerprint.versions(),
        "source_hash": fingerprint.source_hash(),
        "symbols": [SPEC.symbol],
    }
    (home / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(packaged, "FOLDER", home)
    return home / packaged.LIBRARY


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


def test_an_entry_under_anothers_hash(compiler: Compiler, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A complete library, but of another hash than its name says."""
    cache.load(SPEC)
    (entry,) = entries(folder)
    entry.unlink()
    compile_tiny(SPEC.symbol, entry, 666, "-shared")
    entry.chmod(0o600)
    assert cache.load(SPEC)() == 43
    assert f"{entry} is discarded: its content has changed" in caplog.text


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


CHILD = """
import os, sys, time
from pathlib import Path
sys.path[:0] = [{python!r}, {root!r}, {here!r}]
import test_failures as t
class Slow(t.Compiler):
    def compile_object(self, spec, out, arch):
        out.write_bytes(b"half of an object")
        Path({marker!r}).touch()
        time.sleep({seconds})
        super().compile_object(spec, out, arch)
t.cache.kernel_module = lambda name: Slow()
print(t.cache.load(t.SPEC)())
"""


def child(marker: Path, seconds: float) -> subprocess.Popen[str]:
    script = CHILD.format(
        python=str(ROOT / "python"),
        root=str(ROOT),
        here=str(Path(__file__).parent),
        marker=str(marker),
        seconds=seconds,
    )
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_killed_while_it_compiles(compiler: Compiler, folder: Path, tmp_path: Path) -> None:
    """Its lock is released, its files are removed, and the waiting process goes on."""
    victim = child(tmp_path / "begun", 600)
    try:
        await_file(tmp_path / "begun")
        (scratch,) = folder.glob(f".{SPEC.symbol}.*")
        results: list[int] = []
        waiting = threading.Thread(target=lambda: results.append(cache.load(SPEC)()))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        victim.send_signal(signal.SIGKILL)
        waiting.join(60)
        assert results == [42]
        assert not scratch.exists()
        assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]
    finally:
        victim.kill()
        victim.communicate()


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
