"""profiling/draw: the data of charts, their files and their check."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from profiling.draw import charts, common
from profiling.draw import kernels as of_kernels
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
        *("quality", "relufy"),
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


def test_titles_are_what_their_points_bear_out(tmp_path: Path) -> None:
    """A step that loses stood under "any number of tokens", and "1.5B" was not the table's model of that size."""
    speeds = {("ffn", 1): 2.4, ("ffn", 512): 1.1, ("train", 1024): 0.99, ("train", 4096): 1.4}
    rows = [
        row(op, 29, tokens=m, speedup_dense=gain, requested="auto", strategy="union", pattern="uniform")
        for (op, m), gain in speeds.items()
    ]
    write(tmp_path, "h200_sweep_m", rows)
    chart = charts.tokens(charts.Results(tmp_path))
    assert chart.title == "Forward passes beat dense with 1 to 512 tokens, training steps from 4,096"
    kinds = (("h200_model", "final", None), ("h200_model_hard", "", 0.0), ("h200_model_b", "", 0.5))
    for name, model, topic in kinds:
        config = "1.5B" if topic is not None else "final"
        bar = {
            "op": "train",
            "config": config,
            "ms": 1.0,
            "tokens_per_ms": 3.0,
            "peak_bytes": None,
            "mj_per_token": None,
        }
        rows = [bar | {"variant": each, "red": ""} for each in ("dense compiled", "sparse compiled")]
        models = [{"config": config, "parameters": 5e8}]
        write(tmp_path, name, rows, arguments={"model": model, "topic": topic}, models=models)
    groups = charts.models(charts.Results(tmp_path)).data
    assert {group["model"] for group in groups} == {"0.5B trained", "1.5B hardest pattern", "1.5B drawn"}


def test_the_chart_of_layers_has_their_correlation(root: Path, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    chart = charts.layers(real(root, tmp_path, "h200_sweep_layers"))
    for op, fit in chart.data["fits"].items():
        points = chart.data["points"][op]
        gains = [point["speedup"] for point in points]
        assert [point["layer"] for point in points] == list(range(8))
        assert fit["nnz"] == pytest.approx(numpy.corrcoef([point["nnz"] for point in points], gains)[0, 1])
    assert f"correlation {chart.data['fits']['ffn']['nnz']:.3f}" in chart.title


def test_memory_is_shown_per_token(root: Path, tmp_path: Path) -> None:
    results = real(root, tmp_path, "h200_sweep_memory")
    rows = {(row["variant"], row["nnz"]): row for row in results.get("h200_sweep_memory")["rows"]}
    data = charts.memory(results).data
    for panel, field in (("kept", "kept_bytes"), ("peak", "peak_bytes")):
        for nnz, kb in data[panel]["lines"]['"union"']:
            assert kb == pytest.approx(rows["train", nnz][field] / 16384 / 1000)


def test_every_kernel_of_a_step_has_a_part(root: Path) -> None:
    """A renamed kernel would vanish in "rest"."""
    result = json.loads((root / "profiling" / "results" / "h200_sweep_kernels.json").read_text())
    small = {symbol for each in result["rows"] for symbol, ms in (each.get("kernels") or {}).items() if ms < 0.08}
    for each in result["rows"]:
        for symbol in each.get("kernels") or {}:
            assert of_kernels.part_of(symbol) != of_kernels.REST or symbol in small


def test_wrong_results_of_the_papers_code_are_marked(root: Path, tmp_path: Path) -> None:
    found = {
        name: json.loads((root / f"profiling/results/{name}.json").read_text())
        for name in ("h200_auto", "h100_paper_code")
    }
    rows = {row["workload"]: row for row in found["h100_paper_code"]["rows"] if row["op"] == "forward"}
    rows["dense911"] |= {"ms": None, "wrong": "", "red": "illegal memory access"}
    for name, content in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    forward = {bar["workload"]: bar for bar in charts.speedup(charts.Results(tmp_path)).data["forward"]}
    assert forward["real3"]["paper"] == pytest.approx(rows["real3"]["dense_ms"] / rows["real3"]["ms"])
    assert not forward["real3"]["wrong"]
    assert forward["topic128"]["wrong"]
    assert forward["dense911"]["failed"]
    assert forward["dense911"]["paper"] is None


def configs_rows(config: str, op: str) -> list[dict[str, Any]]:
    figures = {"dense eager": (90, 3.0, 50e9), "dense compiled": (100, 2.0, 40e9), "sparse compiled": (150, 1.5, 30e9)}
    return [
        {"op": op, "config": config, "variant": variant, "ms": 1.0, "red": "", "non_zeros": [20.0, 40.0]}
        | {"tokens_per_ms": rate, "mj_per_token": energy, "peak_total_bytes": peak}
        for variant, (rate, energy, peak) in figures.items()
    ]


def test_the_papers_configurations_beside_its_figures(tmp_path: Path) -> None:
    rows = [each for op in ("forward", "logits", "train") for each in configs_rows("1.5B", op)]
    rows += configs_rows("2B", "forward")
    rows += [each | {"red": "wrong"} for each in configs_rows("0.5B", "forward")]
    write(tmp_path, "h200_paper_configs", rows)
    again = configs_rows("2B", "forward")
    again[-1]["tokens_per_ms"] = 160
    # without a row to compare with
    write(tmp_path, "h200_paper_configs_2b", [*again, *configs_rows("1.5B", "train")[:2]])
    chart = charts.paper(charts.Results(tmp_path))
    assert [(bar["config"], bar["op"]) for bar in chart.data] == [
        ("1.5B", "forward"),
        ("1.5B", "train"),
        ("2B", "forward"),
    ]
    forward, train, larger = chart.data
    # over the faster dense variant, in percent
    assert forward["ours"] == train["ours"] == {"rate": 50, "energy": -25, "peak": -25}
    assert larger["ours"]["rate"] == pytest.approx(60)
    assert forward["nnz"] == 30
    assert forward["paper"] == {"rate": 18.8, "energy": pytest.approx(-15.01, abs=0.01)}
    assert train["paper"] == {"rate": 11.6, "peak": pytest.approx(-28.18, abs=0.01)}
    assert "50 to 60 % faster forward, 50 % in training" in chart.title
    assert "at 1.5B energy -25 % (paper -15 %), training memory -25 % (paper -28 %)" in chart.title
    chart.save(tmp_path / "paper")


# Files and their check


def test_check_notices_what_changed(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, out = tmp_path / "results", tmp_path / "charts"
    real(root, results, "h200_sweep_memory")
    words = ("memory", "--results", results, "--out", out)

    def checked(said: str, *asked: object) -> None:
        assert run(*(asked or words), "--check") == 1
        assert said in capsys.readouterr().err

    checked("memory-light.svg: missing")
    assert run(*words) == 0
    # the same bytes each time
    assert run(*words, "--check") == 0
    path = results / "h200_sweep_memory.json"
    before = path.read_text()
    data = json.loads(before)
    for each in data["rows"]:
        each["kept_bytes"] = each["kept_bytes"] and each["kept_bytes"] + 10**6
    path.write_text(json.dumps(data))
    checked("memory-dark.svg: shows other data")
    path.write_text(before)
    (out / "memory-dark.svg").write_text((out / "memory-dark.svg").read_text().replace("#0d1117", "#0d1118"))
    checked("memory-dark.svg: is drawn otherwise now")
    path.unlink()
    checked("memory-light.svg: there is no data for it", "--results", results, "--out", out)
    assert run("nnz", "--results", results, "--out", out) == 2
    assert "h200_sweep_nnz" in capsys.readouterr().err
