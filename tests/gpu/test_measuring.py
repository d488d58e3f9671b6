"""What measures on a GPU, on small problems for seconds: fp8, the paper's code with a stand-in, a soak, repeats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from profiling import bench, paper_code
from tests import sanitize, soak
from twell import testing
from twell.testing import FFN


@pytest.mark.parametrize("compiled", ["none", "default"])
def test_dense_in_fp8_is_timed_beside_the_exact_layers(compiled: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = [
        "ffn,decode",
        "--fp8",
        "-m",
        "512",
        "-k",
        "512",
        "-n",
        "1024",
        "--workload",
        "nnz=29",
        "--m-decode",
        "1,8,64",
    ]
    assert bench.main([*words, "--compile", compiled, "--seconds", "0.01", "--json", str(out)]) == 0
    rows = {(row["variant"], row["tokens"]): row for row in json.loads(out.read_text())["rows"]}
    for key in [("dense fp8", 512), *(("dense fp8 decode", m) for m in (1, 8, 64))]:
        assert rows[key]["ms"] > 0
        assert rows[key]["dense_frobenius"] < rows[key]["frobenius"] < 0.5


class StandIn:
    """Dense PyTorch in place of the published code."""

    def __init__(self, *given: Any) -> None:
        pass

    def forward(self, problem: FFN) -> Callable[[Tensor], dict[str, Tensor]]:
        return lambda x: {"y": self.output(problem._replace(x=x))}

    def output(self, leaves: FFN) -> Tensor:
        return testing.dense_output(leaves)


def test_the_papers_code_is_timed_in_every_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paper_code, "Published", StandIn)
    out = tmp_path / "paper.json"
    words = ["--package", "none", "--workload", "nnz=29", "-m", "1024", "-k", "512", "-n", "1024", "--rounds", "3"]
    assert paper_code.main([*words, "--out", str(out)]) == 0
    for row in json.loads(out.read_text())["rows"]:
        assert (row["red"], row["wrong"], row["twell_wrong"]) == ("", "", "")
        # graphs are of all but the published code
        assert row["modes"].pop("replayed").keys() == {"dense", "twell"}
        of_steps = {"eager, one thread", "waited, one thread"} if row["op"] == "train" else set()
        assert row["modes"].keys() == {"queued", "eager", "waited"} | of_steps
        for times in row["modes"].values():
            assert times.keys() == {"dense", "paper", "twell"}
            assert min(times.values()) > 0


def test_a_soak_of_seconds(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    assert soak.main(["--minutes", "0.2", "--settle", "2", "--grow-mb", "1024", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["calls"] > 100
    assert found["gpu_mb"]["most"] > 0


def test_operators_repeat_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["--case", "light", "heavy rows", "few, overflow", "--repeats", "20"]) == 0
    assert "WRONG" not in capsys.readouterr().out
    torch.cuda.synchronize()
