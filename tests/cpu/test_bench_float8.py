"""``profiling.bench float8`` and what its results say, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiling import bench
from profiling.bench import float8_loss
from twell.commands.demo.demo import DemoRequest

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    sizes = ["--m", "3", "300", "--k", "64", "--n", "160", "--seconds", "0.01"]
    assert bench.main(["float8", *sizes, "--device", "cpu", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    rows = {(row["m"], row["variant"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 20
    assert found["complete"] and found["copy_tbs"] > 0
    for (m, variant), row in rows.items():
        wide, dense = variant.startswith("bfloat16"), "dense" in variant
        assert row["us"] > 0 and row["queued_us"] > 0 and not row["red"]
        assert (row["error"] is None) == wide
        # of the sparse formula, and of the layer before it was quantised
        assert wide or (0.015 < row["error"] < 0.03 if dense or row["strategy"] == "dense" else row["error"] < 0.004)
        assert row["original"] < 0.005 if wide else 0.04 < row["original"] < 0.08
        assert (row["strategy"] != "") == variant.endswith('"auto"')
        assert (row["union"] is None) == (m < 128) and 20 < row["nonzeros"] < row["heaviest"] + 1
    dense = [row for (m, variant), row in rows.items() if m == 300 and variant.startswith("dense fp8")]
    assert max(row["over_dense"] for row in dense) == 1
    assert "of original weights" in capsys.readouterr().out


def test_a_wrong_result_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from profiling.bench.float8 import Weights

    right = Weights.sparse
    monkeypatch.setattr(Weights, "sparse", lambda self, x, strategy: right(self, x, strategy) * 1.2)
    monkeypatch.setattr(Weights, "wide", lambda self, x, strategy: 1 / 0)
    out = tmp_path / "a.json"
    sizes = ["--m", "16", "--k", "64", "--n", "160", "--seconds", "0.01", "--no-eager"]
    assert bench.main(["float8", *sizes, "--device", "cpu", "--json", str(out)]) == 1
    rows = {row["variant"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows['"row"']["us"] is None and rows['"row"']["red"].startswith("error 2")
    assert rows['bfloat16 "row"']["red"].startswith("ZeroDivisionError")
    assert rows["bfloat16 dense"]["us"] > 0 and rows["bfloat16 dense"]["queued_us"] is None


def test_loss_of_a_trained_model(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"file {i}: the quick brown fox, {i * i}\n" * 60)
    request = DemoRequest(tmp_path, "cpu", steps=12, layers=2, hidden=32, intermediate=264, context=32)
    out = tmp_path / "out" / "a.json"
    assert float8_loss.run(request, out, windows=6) == 0
    found = json.loads(out.read_text())
    rows = {(row["layers"], row["strategy"]): row for row in found["rows"]}
    assert list(rows) == [(layers, by) for layers in ("bfloat16", "e4m3") for by in ("dense", "row", "union")]
    first = rows["bfloat16", "dense"]
    assert 0 < first["loss"] < 5.6 and first["change"] == first["deviation"] == 0
    # quantised layers did run, and to little harm
    assert 0 < abs(rows["e4m3", "row"]["change"]) < 0.01 and rows["e4m3", "row"]["deviation"] > 0
    assert found["held_bytes"] == 6 * 32 and found["trained"]["steps"] == 12 and len(found["non_zeros"]) == 2
