"""examples/sae.py: a run learns, resumes with the same bits, and refuses what it cannot do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sae
import torch
from torch import Tensor
from training import activations

from twell.commands.demo.model import ModelShape

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    for module in (sae, activations):
        monkeypatch.setattr(module, "SHAPE", ModelShape(layers=2, hidden=32, intermediate=64, context=32))
    monkeypatch.setattr(sae, "LAYER", 1)
    tiny = ["--model-steps", "40", "--width", "64", "--batch", "8", "--device", "cpu"]

    def run_on(out: Path, *options: Any) -> int:
        return sae.main(["--out", str(out), *tiny, *map(str, options)])

    return run_on


@pytest.mark.parametrize("activation", sae.SPARSITY)
def test_learns(run: Callable[..., int], activation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    values = (2, 12) if "topk" in activation else (0.05, 3)
    asked = ("--activation", activation, "--steps", 120, "--dead-after", 8000, "--sparsity", *values)
    assert run(tmp_path, *asked) == 0
    rows = json.loads((tmp_path / "results.json").read_text())
    few, many = sorted(rows, key=lambda row: row["l0"])
    assert few["sparsity"] == (2 if "topk" in activation else 3)
    assert 0 < few["l0"] < many["l0"] < 64
    assert few["explained"] < many["explained"] < 1
    assert many["explained"] > 0.5
    assert many["loss"] > many["loss_without"] > 0
    assert 0 <= min(few["dead"], many["dead"]) <= max(few["dead"], many["dead"]) <= 1
    assert (tmp_path / "chart.png").read_bytes()[1:4] == b"PNG"
    said = capsys.readouterr().out
    assert "model  step    40/40" in said
    assert "    120/120  loss" in said
    # all is done: nothing is trained again
    assert run(tmp_path, *asked) == 0
    assert "step" not in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text()) == rows


def test_resumes_with_the_same_bits(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--steps", 12, "--sparsity", 1, "--checkpoint-every", 4)
    assert run(tmp_path / "whole", *asked) == 0
    plain = sae.Trial.step

    def dies(self: sae.Trial, x: Tensor) -> Any:
        if self.done == 6:
            raise MemoryError
        return plain(self, x)

    monkeypatch.setattr(sae.Trial, "step", dies)
    with pytest.raises(MemoryError):
        run(tmp_path / "parts", *asked)
    monkeypatch.setattr(sae.Trial, "step", plain)
    assert torch.load(tmp_path / "parts" / "sae-1.pt")["done"] == 4
    assert run(tmp_path / "parts", *asked) == 0
    whole, parts = (torch.load(tmp_path / name / "sae-1.pt") for name in ("whole", "parts"))
    for name, value in whole["sae"].items():
        assert torch.equal(parts["sae"][name], value), name
    assert run(tmp_path / "parts", *asked, "--lr", 0.1) == 2
    assert "is of a run with another lr" in capsys.readouterr().err


def test_what_is_refused(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--activation", "topk", "--sparsity", 2.5) == 2
    assert "expected whole numbers for topk" in capsys.readouterr().err
