"""Ranges that TWELL_NVTX=1 marks, recorded by a stand-in for nvtx, and the operators in torch's profiler."""

import importlib.util
import inspect
import json
import logging
import os
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from twell import _execution, testing
from twell._runtime import nvtx, program

ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """A stand-in for a domain of nvtx; ``events`` are (depth, name, category, payload)."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, str, dict[str, Any]]] = []
        self.depth = 0
        self.made = 0

    def get_event_attributes(self, message: str, category: str, payload: Any) -> tuple[str, str, dict[str, Any]]:
        self.made += 1
        values = {} if payload is None else dict(zip(payload.dtype.names, payload.item()))
        return message, category, values

    def push_range(self, attributes: tuple[str, str, dict[str, Any]]) -> None:
        self.events.append((self.depth, *attributes))
        self.depth += 1

    def pop_range(self) -> None:
        self.depth -= 1


def load(monkeypatch: pytest.MonkeyPatch, package: ModuleType | None, version: str = "0.2.17") -> ModuleType:
    """Import a second copy of ``twell._runtime.nvtx`` with TWELL_NVTX=1 and ``package`` as nvtx."""
    monkeypatch.setenv("TWELL_NVTX", "1")
    monkeypatch.setitem(sys.modules, "nvtx", package)
    monkeypatch.setattr(metadata, "version", lambda name: version)
    spec = importlib.util.spec_from_file_location("copy_of_nvtx", nvtx.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(domain: Recorder) -> ModuleType:
    module = ModuleType("nvtx")
    module.get_domain = {"twell": domain}.__getitem__  # type: ignore[attr-defined]
    return module


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> ModuleType:
    return load(monkeypatch, package(recorder))


@pytest.mark.skipif(nvtx.ON, reason="TWELL_NVTX=1")
def test_off_is_as_if_it_were_not_there() -> None:
    def function() -> None: ...

    assert nvtx.marked(lambda: nvtx.range("x"))(function) is function
    for marked in (program.launch, _execution.run):
        assert not hasattr(marked, "__wrapped__")
    assert nvtx.range("a", category="b", m=1) is nvtx.range("c")


class TestRange:
    def test_threads_have_their_own_and_attributes_are_made_once(self, on: ModuleType, recorder: Recorder) -> None:
        def other() -> None:
            for m in (1, 2, 1, 2):
                with on.range("a", m=m):
                    pass

        with on.range("a", category=on.BACKWARD):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert [event[1:3] for event in recorder.events] == [("a", "backward"), *[("a", "inference")] * 4]
        assert recorder.made == 3


class TestWithoutPackage:
    @pytest.mark.parametrize(
        ("installed", "version", "reason"),
        [(False, "", "import of nvtx halted; None in sys.modules"), (True, "0.2.13", "got nvtx 0.2.13")],
    )
    def test_one_warning_and_nothing_marked(
        self,
        installed: bool,
        version: str,
        reason: str,
        monkeypatch: pytest.MonkeyPatch,
        recorder: Recorder,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        logger = logging.getLogger("twell")
        monkeypatch.setattr(logger, "propagate", True)
        with caplog.at_level(logging.WARNING, "twell"):
            copies = [load(monkeypatch, package(recorder) if installed else None, version) for _ in range(2)]
        assert [record.getMessage() for record in caplog.records] == [
            'TWELL_NVTX=1 marks nothing: it needs nvtx 0.2.14 or newer and numpy, pip install "twell[bench]" '
            f"({reason})"
        ]
        for module in copies:
            assert not module.ON
            with module.range("a"):
                pass
        assert recorder.events == []

    def test_newer_versions_are_taken(self, monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
        for version in ("0.2.14", "0.2.17rc1", "0.3", "1.0"):
            assert load(monkeypatch, package(recorder), version).ON


# The recorder as a package that all of twell imports.
PACKAGE = f"""
from __future__ import annotations
from typing import Any

{inspect.getsource(Recorder)}

domain = Recorder()

def get_domain(name):
    assert name == "twell"
    return domain
"""

CALLS = """
import contextlib, json, nvtx, torch, twell
from twell import ops, testing
from twell._runtime import program, resolve, specs

problem = testing.integer_problem(16, 8, 264)
leaves = problem.map(lambda t: t.clone().requires_grad_())
found = {}

@contextlib.contextmanager
def noted(name):
    del nvtx.domain.events[:]
    yield
    found[name] = list(nvtx.domain.events)
    assert nvtx.domain.depth == 0, name

def gated(p, **options):
    return twell.sparse_gated_ffn(p.x, p.w_gate, p.w_up, p.w_down.t(), **options)

def plain(p, **options):
    return twell.sparse_ffn(p.x, p.w_gate, p.w_down.t(), **options)

with noted("gated"):
    gated(problem, strategy="union", compression=4)
with noted("plain"):
    plain(problem, strategy="row")
with noted("dense"):
    gated(problem, strategy="dense")
with noted("train"):
    gated(leaves, strategy="union").sum().backward()
with noted("mains"):
    mains = [torch.zeros(t.shape) for t in (leaves.w_gate, leaves.w_down.t())]
    plain(leaves, strategy="union", main_grads=mains).sum().backward()
with noted("reglu"):
    ops.reglu_backward(problem.x, problem.x, ops.reglu(problem.x, problem.x))
with noted("unpack"):
    twell.pack(problem.x, problem.w_gate).unpack()
with noted("refused"), contextlib.suppress(NotImplementedError):
    ops.gate_pack(leaves.x, leaves.w_gate, None, 8)

# tracing marks nothing; what runs afterwards are the operators
compiled = torch.compile(gated, fullgraph=True, backend="eager")
with noted("compiled"):
    assert torch.equal(compiled(problem, strategy="row"), gated(problem, strategy="row"))
step = torch.compile(gated, fullgraph=True, backend="aot_eager")
with noted("compiled step"):
    step(leaves, strategy="union").sum().backward()

# a launch, without a GPU
resolve.require_architecture = lambda index: "sm_90a"
torch.cuda.current_device = lambda: 0
resolve.resolve = lambda spec, arch: lambda *arguments: None
with noted("launch"):
    with twell._runtime.nvtx.range("unpack"):
        program.launch(specs.UnpackSpec("bfloat16"))
        program.launch(specs.UpDownTokenSpec("bfloat16", 2048, 4, True))
print(json.dumps(found))
"""


def environment(**variables: str) -> dict[str, str]:
    paths = os.pathsep.join((str(ROOT / "python"), str(ROOT)))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str, str, dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("recording")
    (folder / "nvtx.py").write_text(PACKAGE)
    information = folder / "nvtx-0.2.17.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: nvtx\nVersion: 0.2.17\n")
    variables = environment(TWELL_NVTX="1")
    variables["PYTHONPATH"] = os.pathsep.join((str(folder), variables["PYTHONPATH"]))
    command = [sys.executable, "-c", CALLS]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {call: [tuple(e) for e in events] for call, events in json.loads(done.stdout.splitlines()[-1]).items()}  # type: ignore[misc]


SIZES = "m=16 k=8 n=264 dtype=bfloat16"
FORWARD = f"> hybrid_forward, training forward: {SIZES} compression=8"
# what each call marks, ">" inside another range: of kernels those that are not named as their operator
EVENTS = {
    "gated": [f"sparse_gated_ffn, inference: {SIZES} strategy=union", f"> ffn, inference: {SIZES} compression=4"],
    "plain": [f"sparse_ffn, inference: {SIZES} strategy=row", f"> ffn, inference: {SIZES} compression=8"],
    "dense": [f"sparse_gated_ffn, inference: {SIZES} strategy=dense"],
    "train": [
        f"sparse_gated_ffn, training forward: {SIZES} strategy=union",
        FORWARD,
        "sparse_gated_ffn.backward, backward: m=16",
        f"> hybrid_backward, backward: {SIZES}",
    ],
    "mains": [
        f"sparse_ffn, training forward: {SIZES} strategy=union",
        FORWARD,
        "sparse_ffn.backward, backward: m=16",
        f"> hybrid_backward_accumulate, backward: {SIZES}",
    ],
    "reglu": ["reglu, inference: m=16 n=8 dtype=bfloat16", "reglu_backward, backward: m=16 n=8 dtype=bfloat16"],
    "unpack": [
        f"gate_pack, inference: {SIZES} compression=8",
        "unpack, inference: m=16 n=264 dtype=bfloat16 compression=8",
    ],
    # an error leaves no range open
    "refused": [f"gate_pack, inference: {SIZES} compression=8"],
    # the compiled call shows its operators, the eager one the function too
    "compiled": [
        f"ffn, inference: {SIZES} compression=8",
        f"sparse_gated_ffn, inference: {SIZES} strategy=row",
        f"> ffn, inference: {SIZES} compression=8",
    ],
    "compiled step": [FORWARD[2:], f"hybrid_backward, backward: {SIZES}"],
    "launch": ["unpack, inference: ", "> up_down_token, inference: kernel=up_down_token_bf16_k2048_x4"],
}


@pytest.mark.parametrize("call", EVENTS)
def test_what_a_call_marks(marked: Any, call: str) -> None:
    told = []
    for depth, name, category, payload in marked[call]:
        values = " ".join(f"{key}={value}" for key, value in payload.items())
        told.append(f"{'> ' * depth}{name}, {category}: {values}")
    assert told == EVENTS[call]


def test_a_real_nvtx_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tool that listens, all calls still work."""
    real = pytest.importorskip("nvtx")
    module = load(monkeypatch, real, metadata.version("nvtx"))
    assert module.ON
    with module.range("a", m=1, dtype="x"):
        pass


def test_torchs_profiler_shows_operators_and_shapes() -> None:
    problem = testing.integer_problem(16, 8, 264)
    leaves = problem.map(lambda t: t.clone().requires_grad_())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        testing.sparse_output(problem, strategy="row")
        testing.sparse_layer(leaves, strategy="row")[0].sum().backward()
    shapes = {event.name: event.input_shapes for event in profile.events() if event.name.startswith("twell::")}
    assert shapes["twell::ffn"][:4] == [[16, 8], *[[264, 8]] * 3]
    assert shapes["twell::hybrid_forward"][:4] == [[16, 8], *[[264, 8]] * 3]
    assert shapes["twell::hybrid_backward"][0] == [16, 8]
