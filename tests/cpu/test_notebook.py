"""The notebook of the first hour runs from its first cell to its last, and shows what it says."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_hour.ipynb"


@pytest.mark.nightly
def test_the_first_hour_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [each for each in json.loads(NOTEBOOK.read_text())["cells"] if each["cell_type"] == "code"]
    seen: dict[str, Any] = {"__name__": "notebook"}
    for i, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {i}", "exec"), seen)
    l0 = [entry["sparsity_l0"] for entry in seen["trainer"].state.log_history if "sparsity_l0" in entry]
    assert l0[0] > 200
    assert 20 < l0[-1] < 36
    shown = capsys.readouterr().out
    for expected in ("must apply ReLU, got SiLU", "too far from what was measured", "(Halved) cannot be run sparse"):
        assert expected in shown
    # what readers see before they run it
    assert all(cell["outputs"] for cell in cells)
