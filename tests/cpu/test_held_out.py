"""``profiling.held_out``: points, their measurement, layers that are left out."""

import json
import re
from pathlib import Path

import pytest

from profiling import held_out
from profiling import tune as shipped
from profiling.figures import RESULTS
from twell import testing
from twell.choose.rates import Problem
from twell.commands import timing, tune


def test_points_are_drawn_once() -> None:
    old, new = held_out.points(), held_out.new_points()
    assert (len(old), sum(point.problem.training for point in old)) == (100, 20)
    assert old[0].problem == Problem(437, 2560, 10240, False, False)
    assert new == held_out.new_points()
    assert not set(old) & set(new)
    pairs = [point for point in new if not point.problem.gated]
    assert (len(pairs), len(new), sum(point.problem.training for point in new)) == (20, 60, 10)
    assert all(0.05 <= point.workload.nnz / point.problem.n <= 0.15 for point in pairs)
    assert not {tuple(point.problem[1:3]) for point in old + new if point.problem.gated} & set(tune.SHAPES)


def test_held_out_points_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = (Problem(130, 32, 264, True, False), Problem(130, 32, 264, False, True))
    few = [held_out.Point(call, testing.Workload(9.0, neuron_sigma=1.0)) for call in calls]
    monkeypatch.setattr(held_out, "points", lambda: few)
    monkeypatch.setattr(tune, "gpu", lambda name: timing.Device())
    monkeypatch.setattr(tune, "LEAST_SCREENED", 130)
    out, again = tmp_path / "out.json", tmp_path / "again.json"
    assert held_out.main(["--points", "old", "--out", str(out), "--seconds", "0"]) == 0
    printed = capsys.readouterr().out
    data = json.loads(out.read_text())
    assert data["complete"]
    gated, training = data["rows"]
    assert {"row_ms", "union_ms", "union+screen_ms", "dense_ms", "graph_loss"} <= gated.keys()
    assert "row_ms" not in training
    for row in data["rows"]:
        assert 0 < row["union"] <= row["candidates"] <= 1
        times = [value for name, value in row.items() if name.endswith("_ms")]
        assert row["loss"] == row[f"{row['auto']}_ms"] / min(times) - 1
        assert row["nonzeros"] == pytest.approx(9, rel=0.3)
    assert f"forward above 32 tokens, old: 1 points, mean {gated['loss']:.2%}, most {gated['loss']:.1%}\n" in printed
    assert held_out.main(["--rows", str(out), "--out", str(again)]) == 0
    assert json.loads(again.read_text()) == data
    assert held_out.main(["--points", "old", "--budget-s", "0"]) == 0
    assert "out of time: 0 of 2 points" in capsys.readouterr().out


def test_a_layer_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    found = shipped.read(RESULTS / "tuning.json")
    rows = [row for row in found["rows"] if not row["gated"] and row["k"] < 2049 and row["m"] > 32]
    shipped.write_rows(path, rows, machine=found["machine"], date="")
    assert held_out.main(["--left-out", str(path)]) == 0
    *layers, forward, training = capsys.readouterr().out.splitlines()
    assert len(layers) == len({(row["k"], row["n"], row["training"]) for row in rows})
    many = sum(not row["training"] for row in rows)
    said = re.match(rf"forward above 32 tokens, without its layer: {many} points, mean (\S+)%", forward)
    assert said is not None
    assert float(said[1]) < 3
    assert f"training, without its layer: {len(rows) - many} points" in training
