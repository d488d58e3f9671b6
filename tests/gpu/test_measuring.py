"""What measures on a GPU, on small problems for seconds: layers, cases in threads, the sanitizer's."""

import json
from pathlib import Path

import pytest
import torch

from profiling import bench
from tests import fuzz, sanitize


@pytest.mark.parametrize("compiled", ["none", "default"])
def test_layers_are_timed(compiled: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = "ffn,train -m 512 -k 512 -n 1024 --workload nnz=29".split()
    assert bench.main([*words, "--compile", compiled, "--seconds", "0.01", "--json", str(out)]) == 0
    rows = {(row["variant"], row["tokens"]): row for row in json.loads(out.read_text())["rows"]}
    for key in [("ffn", 512), ("train", 512)]:
        assert rows[key]["ms"] > 0


def test_cases_in_threads_for_seconds(tmp_path: Path) -> None:
    out = tmp_path / "threads.json"
    assert fuzz.main(["--threads", "4", "--budget-s", "12", "--json", str(out)]) == 0
    (found,) = json.loads(out.read_text())["runs"]
    assert found["cases"] > 10
    assert found["memory_mb"]["most"]["GPU"] > 0


def test_the_sanitizers_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["--case", "light", "heavy rows", "few, overflow"]) == 0
    assert "WRONG" not in capsys.readouterr().out
    torch.cuda.synchronize()
