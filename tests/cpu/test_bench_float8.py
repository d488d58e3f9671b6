"""``profiling.bench float8`` and what its results say, on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from profiling import bench
from twell.testing import workloads

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    sizes = ["--m", "3", "130", "--k", "64", "--n", "160", "--seconds", "0.01"]
    assert bench.main(["float8", *sizes, "--device", "cpu", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    rows = {(row["m"], row["variant"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 20
    assert found["complete"]
    assert found["copy_tbs"] > 0
    for (m, variant), row in rows.items():
        wide, dense = variant.startswith("bfloat16"), "dense" in variant
        assert row["us"] > 0
        assert not row["red"]
        assert (row["error"] is None) == wide
        # of the sparse formula, and of the layer before it was quantised
        assert wide or (0.015 < row["error"] < 0.03 if dense or row["strategy"] == "dense" else row["error"] < 0.004)
        assert row["original"] < 0.005 if wide else 0.04 < row["original"] < 0.08
        assert (row["strategy"] != "") == variant.endswith('"auto"')
        assert (row["union"] is None) == (m < 128)
        assert 20 < row["nonzeros"] < row["heaviest"] + 1
    dense = [row for (m, variant), row in rows.items() if m == 130 and variant.startswith("dense fp8")]
    assert max(row["over_dense"] for row in dense) == 1
    assert "of original weights" in capsys.readouterr().out


def test_dense_products_copy_no_weight() -> None:
    """A copy at each call would make the baseline slow."""
    from profiling.bench.float8 import Weights

    layer = Weights(workloads.load("topic29", m=8, k=64, n=160, device=torch.device("cpu")))
    assert all(record.values.is_contiguous() for record in (layer.gate, layer.up, layer.stored))
    assert layer.both[0].is_contiguous()
    # as kernels read it
    assert layer.down.values.t().is_contiguous()


def test_a_wrong_result_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from profiling.bench.float8 import Weights

    right = Weights.sparse
    monkeypatch.setattr(Weights, "sparse", lambda self, x, strategy: right(self, x, strategy) * 1.2)
    monkeypatch.setattr(Weights, "wide", lambda self, x, strategy: 1 / 0)
    out = tmp_path / "a.json"
    sizes = ["--m", "16", "--k", "64", "--n", "160", "--seconds", "0.01"]
    assert bench.main(["float8", *sizes, "--device", "cpu", "--json", str(out)]) == 1
    rows = {row["variant"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows['"row"']["us"] is None
    assert rows['"row"']["red"].startswith("y: error 2")
    assert rows['bfloat16 "row"']["red"].startswith("ZeroDivisionError")
    assert rows["bfloat16 dense"]["us"] > 0
