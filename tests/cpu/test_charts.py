"""profiling/draw: the data of charts, their files and their check."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from profiling.draw import charts, common
from profiling.draw import layers as of_layers

MACHINE = "NVIDIA H200 (made up); torch 2.11.0; kernels 0123456789ab"


def row(variant: str, nnz: float, ms: float = 1.0, **fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"workload": f"nnz={nnz:g}", "variant": variant, "nnz": nnz, "ms": ms, "red": ""}
    known |= {"requested": "", "strategy": "", "tokens": 16384, "speedup_dense": None, "kept_bytes": None}
    return known | {"peak_bytes": None, "kernels": None} | fields


def write(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": MACHINE, "rows": rows, **more}))
    return path


def run(*words: object) -> int:
    status: int = charts.main([str(word) for word in words])
    return status


def real(root: Path, folder: Path, *names: str) -> charts.Results:
    """These published results in a folder of their own."""
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(root / "profiling" / "results" / f"{name}.json", folder / f"{name}.json")
    return charts.Results(folder)


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


def test_crossovers_are_where_the_lines_cross() -> None:
    xs = [1.0, 4.0, 16.0, 64.0]
    # straight in log x and log y: from 2 to 1/2 it is 1 in the middle
    assert common.crossings(xs, [4.0, 2.0, 0.5, 0.5]) == [pytest.approx(8.0)]
    assert common.crossings(xs, [4.0, 2.0, 1.5, 1.1]) == []
    lines = {"row": [[x, 16 / x] for x in xs], "union": [[x, 8 / x**0.5] for x in xs]}
    found = {mark["what"]: mark for mark in of_layers.marks(lines)}
    assert found["row = dense"]["x"] == pytest.approx(16)
    assert found["union = dense"]["x"] == pytest.approx(64)
    assert (found["row = union"]["x"], found["row = union"]["y"]) == (pytest.approx(4), pytest.approx(4))


def test_lines_by_non_zeros_are_of_both_patterns(tmp_path: Path) -> None:
    """A step has the line of "auto" alone, which ends where it runs dense."""
    shared = "nnz=29,skew=1,tokens=0.5,topic=0.5"
    rows = [row("ffn", 29, requested=name, strategy=name, speedup_dense=2.0) for name in ("row", "union")]
    rows.append(row("ffn", 29, workload=shared, requested="auto", strategy="union", speedup_dense=2.5))
    rows += [row("train", 29, requested=name, strategy="union", speedup_dense=1.5) for name in ("union", "auto")]
    rows.append(row("train", 911, requested="auto", strategy="dense", speedup_dense=1.0))
    write(tmp_path, "sweep_nnz", rows)
    panels = of_layers.nnz(common.Results(tmp_path)).data
    assert panels["uniform"]["lines"] == {"row": [[29, 2.0]], "union": [[29, 2.0]], "train": [[29, 1.5]]}
    assert panels["topic"]["lines"] == {"auto": [[29, 2.5]]}


def test_wrong_results_of_the_papers_code_are_marked(root: Path, tmp_path: Path) -> None:
    found = {name: json.loads((root / f"profiling/results/{name}.json").read_text()) for name in ("auto", "paper_code")}
    rows = {row["workload"]: row for row in found["paper_code"]["rows"] if row["op"] == "forward"}
    rows["dense911"] |= {"ms": {}, "wrong": "", "red": "illegal memory access"}
    for name, content in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    forward = {bar["workload"]: bar for bar in charts.speedup(charts.Results(tmp_path)).data["forward"]}
    queued = rows["real3"]["ms"]["queued"]
    assert forward["real3"]["paper"] == pytest.approx(queued["dense"] / queued["paper"])
    assert not forward["real3"]["wrong"]
    assert forward["topic128"]["wrong"]
    assert forward["dense911"]["failed"]
    assert forward["dense911"]["paper"] is None


# Files and their check


def test_check_notices_what_changed(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, out = tmp_path / "results", tmp_path / "charts"
    real(root, results, "auto")
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
    checked("speedup-dark.svg: shows other data")
    path.write_text(before)
    (out / "speedup-dark.svg").write_text((out / "speedup-dark.svg").read_text().replace("#0d1117", "#0d1118"))
    checked("speedup-dark.svg: is drawn otherwise now")
    path.unlink()
    checked("speedup-light.svg: there is no data for it", "--results", results, "--out", out)
    assert run("nnz", "--results", results, "--out", out) == 2
    assert "sweep_nnz" in capsys.readouterr().err
