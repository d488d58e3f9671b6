"""How eager calls are timed, with a GPU that records; steps of several GPUs."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from profiling import device
from profiling.bench import parallel
from profiling.device import Gpu
from twell.commands.timing import Recording


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a GPU: each call takes it 3 ms, and the host's clock goes on by 1 ms when it is read."""
    found: list[str] = []

    class Event:
        def record(self) -> None:
            found.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return 3.0 * found.count("call 1")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: found.append("wait"))
    monkeypatch.setattr(device, "events", lambda: (Event(), Event()))
    return found


def recording(log: list[str], way: str) -> Recording:
    def call(i: int) -> tuple[Tensor, ...]:
        log.append(f"call {i}")
        return ()

    made = Gpu(torch.device("cuda")).eager(way, call, 2)
    # each copy once, to load and allocate
    assert log == ["call 0", "call 1"]
    log.clear()
    return made


@pytest.mark.parametrize(
    ("way", "asked"),
    [
        # the GPU has a call when the host begins with the first one that counts
        ("queued", ["wait", "call 0", "event", "call 0", "call 1", "event"]),
        ("waited", ["wait", "call 0", "wait", "wait", "call 1", "wait"]),
        ("host", ["wait", "call 0", "call 1"]),
    ],
)
def test_eager_calls_on_a_gpu(log: list[str], way: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = recording(log, way)
    ticks = iter(range(100))
    monkeypatch.setattr(made, "_clock", lambda: next(ticks) / 1e3)
    span = made.replay()
    assert log == asked
    made.wait()
    # of both copies: by events, by the host for each call, by the host for all
    assert span() == pytest.approx({"queued": 3.0, "waited": 2.0, "host": 1.0}[way])


@pytest.mark.parametrize(
    ("loss", "norm", "red"), [(2.01, 1.04, ""), (2.03, 1.0, "loss"), (2.0, 1.06, "norm"), (2.0, math.nan, "norm")]
)
def test_a_step_of_several_gpus_with_another_loss_or_norm_is_red(loss: float, norm: float, red: str) -> None:
    dense, sparse = rows = [
        {"variant": f"{kind} eager", "ms": ms, "red": "", "loss": 2.0, "norm": 1.0}
        for kind, ms in (("dense", 3.0), ("sparse", 2.0))
    ]
    sparse |= {"loss": loss, "norm": norm}
    parallel.compare(rows)
    assert sparse["red"].startswith(red)
    assert bool(sparse["red"]) == bool(red)
    assert (dense["speedup"], sparse["speedup"]) == (1.0, None if red else 1.5)


@pytest.mark.nightly
def test_steps_on_two_processes(root: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = "profiling.bench parallel --config 2x32x64x2x64 --sequence 32 --micro-batch 1 --rounds 1 --device cpu --out"
    environment = {**os.environ, "PYTHONPATH": f"{root / 'python'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, *words.split(), str(tmp_path / "out.json")], check=True, env=environment)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {(row["mode"], row["variant"]) for row in rows if row["ms"] and not row["red"]} == {
        (mode, f"{kind} eager") for mode in parallel.MODES for kind in ("dense", "sparse")
    }
