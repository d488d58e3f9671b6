"""``profiling.held_out``: points and their measurement."""

import json
from pathlib import Path

import pytest

from profiling import held_out
from twell.commands import fitting, timing, tune


def test_held_out_points_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = held_out.points()
    assert [row["seed"] for row in known if row["points"] == "old"] == list(range(100))
    # layers whose sizes no rate was fitted to
    assert not {(row["k"], row["n"]) for row in known if row["gated"]} & set(tune.SHAPES)
    sizes = [(130, 32, 264, True, False), (130, 32, 264, False, True)]
    pattern = {"nnz": 9.0, "neuron_sigma": 1.0}
    few = [{**dict(zip(fitting.SIZES, each)), "points": "old", "pattern": pattern, "seed": 0} for each in sizes]
    monkeypatch.setattr(held_out, "points", lambda: few)
    monkeypatch.setattr(tune, "gpu", lambda name: timing.Device())
    monkeypatch.setattr(tune, "LEAST_SCREENED", 130)
    out = tmp_path / "out.json"
    assert held_out.main(["--out", str(out), "--seconds", "0"]) == 0
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
    assert held_out.main(["--budget-s", "0"]) == 0
    assert "out of time: 0 of 2 points" in capsys.readouterr().out
