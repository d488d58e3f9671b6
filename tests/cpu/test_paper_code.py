"""profiling/paper_code.py with a stand-in for the published code: what it compares, times, keeps and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from profiling import paper_code

INFERENCE = """
import gc
import torch

NUMBERS = set()

class TwELLGatedMLP(torch.nn.Module):
    def __init__(self, layer_number, GATE, UP, DOWN, ext=None):
        super().__init__()
        self.weights = GATE, UP, DOWN
        self.number, self.itself = layer_number, [self]
        NUMBERS.add(layer_number)

    def __del__(self):
        NUMBERS.discard(self.number)

    def forward(self, x):
        gc.collect()
        assert self.number in NUMBERS
        gate, up, down = self.weights
        FAULT
        return (x @ gate.T).relu() * (x @ up.T) @ down * SCALE
"""
TRAINING = """
import torch

KEPT = []

def layer(x, gate, up, down):
    assert x.size(0) * x.size(1) == x.numel() // gate.size(1)
    y = (x @ gate.T).relu() * (x @ up.T) @ down
    return y, y.new_zeros(()), y.new_zeros(()), y, y, y

def load_sparse_ops():
    if not hasattr(torch.ops.sparse_ops, "ff_forward_gated"):
        library = torch.library.Library("sparse_ops", "DEF")
        six = ", ".join(["Tensor"] * 6)
        library.define(f"ff_forward_gated(Tensor x, Tensor g, Tensor k, Tensor v) -> ({six})")
        library.impl("ff_forward_gated", layer, "CompositeImplicitAutograd")
        torch.stand_in = library
"""


@pytest.fixture
def package(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a stand-in for the checkout."""

    def make(scale: float = 1.0, fault: str = "pass") -> Path:
        for folder, name, text in (
            ("twell_modules", "twell.py", INFERENCE.replace("SCALE", str(scale)).replace("FAULT", fault)),
            ("hybrid_modules", "sparse_ops_loader.py", TRAINING),
        ):
            path = tmp_path / "checkout" / "custom_models" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "checkout"

    return make


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[dict[str, Any]], str]]:
    """A function that runs the command on tiny layers: its status, its rows and stderr."""

    def call(package: Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
        out = tmp_path / "out.json"
        sizes = ["-m", "256", "-k", "64", "-n", "264", "--rounds", "1", "--device", "cpu"]
        status = paper_code.main(["--package", str(package), "--workload", *words, *sizes, "--out", str(out)])
        rows = json.loads(out.read_text())["rows"] if out.exists() else []
        return status, rows, capsys.readouterr().err

    return call


def test_right_results_are_timed_in_every_way(package: Callable[..., Path], run: Callable[..., Any]) -> None:
    status, rows, _ = run(package(), "nnz=9")
    assert status == 0
    assert [(row["workload"], row["op"], row["m"]) for row in rows] == [
        ("nnz=9", op, 256) for op in ("forward", "train")
    ]
    for row in rows:
        assert (row["wrong"], row["red"], row["twell_wrong"]) == ("", "", "")
        assert row["nnz"] == pytest.approx(9, rel=0.2)
        assert row["errors"].keys() == row["worst_rows"].keys() == {"dense eager", "twell", "paper"}
        # a CPU replays nothing
        expected = {"queued", "eager", "waited"}
        if row["op"] == "train":
            expected |= {"eager, one thread", "waited, one thread"}
        assert row["modes"].keys() == expected
        assert all(times.keys() == {"dense", "twell", "paper"} for times in row["modes"].values())
        times = row["modes"]["queued"]
        assert (row["dense_ms"], row["ms"], row["twell_ms"]) == (times["dense"], times["paper"], times["twell"])


def test_one_thread_is_for_one_sample() -> None:
    threads = torch._C._is_multithreading_enabled
    assert threads()
    assert not paper_code.in_one_thread(threads)
    assert threads()


def test_means_are_of_the_layers_that_have_both() -> None:
    def row(op: str, **times: float) -> dict[str, Any]:
        return {"op": op, "modes": {"queued": times} if times else {}}

    rows = [row("forward", dense=2.0, twell=1.0, paper=1.5), row("forward", dense=8.0, twell=1.0), row("train")]
    assert paper_code.means(rows) == [
        "forward, queued: 4.00 times as fast as dense (geometric mean of 2 layers), "
        "1.50 to 1.50 times as fast as the paper's code"
    ]


def test_a_wrong_result_is_named_and_timed(package: Callable[..., Path], run: Callable[..., Any]) -> None:
    status, (forward, train), _ = run(package(scale=1.05), "nnz=9")
    assert status == 0
    assert forward["wrong"].startswith("y: error 5")
    assert forward["ms"] > 0
    assert train["wrong"] == ""


def test_more_roundings_are_not_called_wrong(package: Callable[..., Path], run: Callable[..., Any]) -> None:
    _, (forward, _), _ = run(package(scale=1.004), "nnz=9")
    assert 1.2 < forward["errors"]["paper"] / forward["errors"]["dense eager"] < 2
    assert forward["wrong"] == ""
    assert forward["worst_rows"]["paper"] > forward["worst_rows"]["dense eager"]


def test_a_lost_gpu_ends_the_run_and_the_next_goes_on(package: Callable[..., Path], run: Callable[..., Any]) -> None:
    broken = package(fault="raise RuntimeError('CUDA error: an illegal memory access was encountered')")
    status, rows, said = run(broken, "nnz=9", "nnz=5")
    assert status == 1
    assert "the same command goes on" in said
    (lost,) = rows
    assert "illegal memory access" in lost["red"]
    assert lost["ms"] is None
    assert run(broken, "nnz=9", "nnz=5")[0] == 1
    status, rows, _ = run(broken, "nnz=9", "nnz=5")
    assert status == 0
    assert [(row["workload"], row["op"], bool(row["red"])) for row in rows] == [
        ("nnz=9", "forward", True),
        ("nnz=9", "train", False),
        ("nnz=5", "forward", True),
        ("nnz=5", "train", False),
    ]


def test_other_errors_leave_the_others_their_times(package: Callable[..., Path], run: Callable[..., Any]) -> None:
    status, (forward, _), _ = run(package(fault="raise ValueError('no kernel')"), "nnz=9")
    assert status == 0
    assert forward["red"] == "ValueError: no kernel"
    assert forward["ms"] is None
    assert forward["twell_ms"] > 0


def test_a_wrong_result_of_twell_fails(
    package: Callable[..., Path], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = paper_code.testing.sparse_output
    monkeypatch.setattr(paper_code.testing, "sparse_output", lambda problem, **more: 1.1 * right(problem, **more))
    status, (forward, train), _ = run(package(), "nnz=9")
    assert status == 1
    assert forward["twell_wrong"].startswith("y: error 10")
    assert "w_gate" in train["twell_wrong"]


def test_what_is_not_installed_is_said(run: Callable[..., Any], package: Callable[..., Path], tmp_path: Path) -> None:
    status, rows, said = run(tmp_path / "nowhere", "nnz=9")
    assert (status, rows) == (2, [])
    assert "--package must be a checkout of sparser-faster-llms, got a folder without" in said
    status, _, said = run(package(), "nnz=9", "--extension", str(tmp_path / "missing.so"))
    assert status == 2
    assert f"--extension must be a compiled module, got {tmp_path / 'missing.so'}" in said


def test_a_file_of_another_program_is_left_alone(
    run: Callable[..., Any], package: Callable[..., Path], tmp_path: Path
) -> None:
    text = json.dumps({"machine": "", "rows": [{"workload": "nnz=9", "op": "forward", "ms": 1.0}]})
    (tmp_path / "out.json").write_text(text)
    status, _, said = run(package(), "nnz=9")
    assert status == 2
    assert "is not of this program" in said
    assert (tmp_path / "out.json").read_text() == text
