"""profiling/draw: the data of charts, their files and their check."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from profiling.draw import charts


def run(*words: object) -> int:
    status: int = charts.main([str(word) for word in words])
    return status


# What charts show


@pytest.mark.nightly
def test_tracked_charts_show_the_results(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m profiling.draw`` makes this pass again."""
    assert run("--check") == 0, capsys.readouterr().err

    assert {path.name.rpartition("-")[0] for path in (root / "profiling" / "charts").glob("*.svg")} == {
        *charts.ALL,
        # frozen
        "relufy",
    }


# Files and their check


def test_check_notices_what_changed(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, out = tmp_path / "results", tmp_path / "charts"
    results.mkdir()
    shutil.copyfile(root / "profiling" / "results" / "auto.json", results / "auto.json")
    words = ("speedup", "--results", results, "--out", out)

    def checked(said: str, *asked: object) -> None:
        assert run(*(asked or words), "--check") == 1
        assert said in capsys.readouterr().err

    checked("speedup-light.svg: missing")
    assert run(*words) == 0
    # the same bytes each time
    assert run(*words, "--check") == 0
    path = results / "auto.json"
    before = path.read_text()
    data = json.loads(before)
    for each in data["rows"]:
        each["nnz"] += 1
    path.write_text(json.dumps(data))
    checked("speedup-dark.svg: is drawn otherwise now")
    path.write_text(before)
    (out / "speedup-dark.svg").write_text((out / "speedup-dark.svg").read_text().replace("#0d1117", "#0d1118"))
    checked("speedup-dark.svg: is drawn otherwise now")
    path.unlink()
    checked("speedup-light.svg: there is no data for it", "--results", results, "--out", out)
    assert run("nnz", "--results", results, "--out", out) == 2
    assert "sweep_nnz" in capsys.readouterr().err
