"""The demo: its text, its output and its checks, which must be able to fail."""

import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from twell.commands import cli, demo
from twell.nn.layers import SparseGatedMLP

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs the command on a small model."""
    monkeypatch.setattr(demo, "CPU", demo.Preset(2, 32, 264, 32, 4, 3e-3, 3e-3, 60, 256))
    (tmp_path / "below").mkdir()
    for i in range(12):
        (tmp_path / ("below" if i % 2 else ".") / f"{i}.txt").write_text(
            f"file {i}: the quick brown fox, {i * i}\n" * 60
        )
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00" * 5000)
    (tmp_path / ".hidden.txt").write_text("hidden" * 1000)
    return lambda *words: cli.main(["demo", "--text", str(tmp_path), "--device", "cpu", *map(str, words)])


def test_the_text_is_the_files_of_a_folder(tmp_path: Path, run: Any) -> None:
    train, held = demo.read_text(tmp_path)
    files = sorted(path for path in tmp_path.rglob("*.txt") if path.stem.isdigit())
    assert len(train) + len(held) == sum(path.stat().st_size for path in files)
    assert 8 < len(train) / len(held) < 10
    assert sorted(bytes(torch.cat((train, held)).tolist()).split(b"file ")[1:])[0].startswith(b"0: the")
    train, _ = demo.read_text(None)
    assert len(train) > 1e6, sysconfig.get_path("stdlib")


def test_end_to_end(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for seed in (0, 0, 1):
        assert run("--steps", 12, "--seed", seed) == 0
        printed.append(capsys.readouterr().out)
    first, again, other = ([float(n) for n in re.findall(r"\d\.\d{4}", text)][:2] for text in printed)
    # of sums whose order on a CPU depends on where the memory lies
    assert first == pytest.approx(again, abs=2e-4)
    assert abs(first[0] - other[0]) > 2e-3
    assert "After 12 steps, on 256 bytes" in printed[0] or "After 12 steps, on 224 bytes" in printed[0]
    assert printed[0].splitlines()[-2] == "Agreed: sparse layers are as exact as dense PyTorch."
    assert printed[0].splitlines()[-1].startswith("Next: `twell analyze MODEL")


def test_a_wrong_layer_fails(run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    forward = SparseGatedMLP.forward

    def one_row_lost(layer: SparseGatedMLP, x: Any, *rest: Any) -> Any:
        y = forward(layer, x, *rest)
        return y.index_fill(0, torch.tensor(3), 0) if layer.strategy == "union" else y

    monkeypatch.setattr(SparseGatedMLP, "forward", one_row_lost)
    assert run("--steps", 2) == 1
    said = capsys.readouterr().out
    assert 'layer 0, "union": error' in said
    assert '"row": ' not in said


@pytest.mark.parametrize(("at", "status"), [(3, 0), (0, 130)])
def test_ctrl_c_ends_the_training(
    at: int, status: int, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    windows, calls = demo.windows, []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return windows(*given)

    monkeypatch.setattr(demo, "windows", interrupted)
    assert run() == status
    assert ("After 3 steps" in capsys.readouterr().out) == (status == 0)
