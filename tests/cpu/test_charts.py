"""profiling/draw: the data of charts, their files and their check."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from profiling.draw import charts, style
from profiling.draw import kernels as of_kernels

MACHINE = "NVIDIA H200 (made up); torch 2.11.0; kernels 0123456789ab"
NONZEROS = (1, 2, 4, 8, 16, 29, 64, 128, 256, 512, 911, 2816, 5632)
DRAWN = ("speedup", "nnz", "tokens", "layers", "memory", "kernels", "roofline", "models", "paper", "training")
# Those whose data is in the repository.
TRACKED = tuple(name for name in (*DRAWN, "quality") if name != "nnz")


# Results as the sweeps write them


def row(variant: str, nnz: float, ms: float = 1.0, **fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"workload": f"nnz={nnz:g}", "variant": variant, "nnz": nnz, "ms": ms, "red": ""}
    known |= {"requested": "", "strategy": "", "tokens": 16384, "speedup_dense": None, "kept_bytes": None}
    return known | {"peak_bytes": None, "kernels": None} | fields


def write(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": MACHINE, "rows": rows, **more}))
    return path


def speed(strategy: str, nnz: float, pattern: str) -> float:
    """Speed-ups like those of an H200: "row" is 1 at 58.5 non-zeros, "union" at 180 or 540."""
    shared = {"uniform": 1.0, "topic": 3.0}[pattern]
    if strategy == "row":
        return 1.65 / (0.65 + nnz / 58.5)
    if strategy == "union":
        return 1.65 / (0.7 + 0.95 * nnz / (180 * shared))
    if strategy == "train":
        return 4.9 / (1.4 + 3.5 * nnz / (200 * shared))
    return 0.98 if strategy == "dense" else max(speed(each, nnz, pattern) for each in ("row", "union", "dense"))


def nnz_rows() -> list[dict[str, Any]]:
    rows = []
    for pattern, nnz in itertools.product(("uniform", "topic"), NONZEROS):
        for strategy in ("row", "union", "auto", "dense"):
            fields = {"requested": strategy, "strategy": strategy, "pattern": pattern}
            rows.append(row("ffn", nnz, speedup_dense=speed(strategy, nnz, pattern), **fields))
        if nnz < 1000:
            ratio = speed("train", nnz, pattern)
            rows.append(row("train", nnz, speedup_dense=ratio, requested="auto", strategy="union", pattern=pattern))
    return rows


def layers_rows() -> list[dict[str, Any]]:
    counts = [67.5, 11.1, 13.3, 31.0, 56.2, 96.1, 138.6, 272.7]
    rows = [row("ffn", 30, speedup_dense=2.0, requested="auto", layer=3, source="layers recorded in real")]
    for layer, nnz in enumerate(counts):
        for op, ratio in (("ffn", 2.5 - nnz / 300), ("train", 4 - nnz / 90)):
            fields = {"requested": "auto", "strategy": "union", "layer": layer, "source": "layers of a model"}
            if op == "ffn":
                fields |= {"m": 16384, "k": 2048, "n": 5632, "l2_gather_gbs": gathered(UNIONS[layer])}
            rows.append(row(op, nnz, speedup_dense=ratio + 0.02 * (layer % 3), **fields))
    return rows


UNIONS = (0.3, 0.08, 0.12, 0.2, 0.3, 0.36, 0.42, 0.61)


def gathered(share: float) -> float:
    """GB/s of up and down rows of 2,048 16-bit numbers for tiles of 128 tokens, all in a millisecond."""
    return share * 5632 * 128 * 2 * 2048 * 2 / 1e6


def memory_rows() -> list[dict[str, Any]]:
    rows = []
    for nnz in (1, 8, 29, 64, 128, 256, 512, 911):
        for kind, peak in (("eager", 1.01e9), ("compiled", 0.83e9)):
            rows.append(row(f"dense {kind} train", nnz, kept_bytes=553648128, peak_bytes=int(peak)))
            rows.append(row(f"dense {kind}", nnz, peak_bytes=int(peak / 3)))
        sparse = nnz < 400
        fields = {"requested": "auto", "strategy": "union" if sparse else "dense"}
        kept, peak = (16845828, 253987328) if sparse else (553648128, 1012924416)
        rows.append(row("train", nnz, kept_bytes=kept, peak_bytes=peak, **fields))
        rows.append(row("ffn", nnz, peak_bytes=peak // 4, **fields))
    return rows


def kernels_rows() -> list[dict[str, Any]]:
    rows = []
    for name, nnz in (("uniform29", 29.1), ("topic128", 129.7)):
        forward = {"gate_pack_bf16_t144": 0.47, "up_down_token_bf16_k2048_x1": 0.4, "torch": 0.01}
        step = {"gate_pack_bf16_t144": 0.48, "sampled_up_bf16": 0.15, "gathered_bf16_1": 0.14, "gathered_bf16_2": 0.26}
        step |= {"sampled_grad_bf16": 0.15, "weight_grad_bf16": 0.45, "rank": 0.02, "torch": 0.04}
        rows.append(row("dense compiled", nnz, ms=1.6, workload=name))
        rows.append(row("dense compiled train", nnz, ms=4.9, workload=name))
        rows.append(row("ffn", nnz, ms=0.85, workload=name, requested="auto", strategy="row", kernels=forward))
        rows.append(row("train", nnz, ms=1.65, workload=name, requested="auto", strategy="union", kernels=step))
    return rows


def write_sweeps(folder: Path) -> Path:
    """Every sweep in the format of its file."""
    sweeps = {"nnz": nnz_rows(), "layers": layers_rows()}
    sweeps |= {"memory": memory_rows(), "kernels": kernels_rows()}
    for name, rows in sweeps.items():
        write(folder, f"h200_sweep_{name}", rows, sweep=name)
    return folder


def run(*words: object) -> int:
    status: int = charts.main([str(word) for word in words])
    return status


# What charts show


def test_every_sweep_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweeps(tmp_path / "results")
    assert run("--results", tmp_path / "results", "--out", tmp_path / "charts") == 0
    names = {"nnz", "layers", "memory", "kernels"}
    wanted = {f"{name}-{theme}.svg" for name in names for theme in ("light", "dark")}
    assert {path.name for path in (tmp_path / "charts").iterdir()} == wanted
    assert {line.split(":")[0] for line in capsys.readouterr().out.splitlines()} == names
    for path in (tmp_path / "charts").glob("*.svg"):
        xml.etree.ElementTree.parse(path)


def test_crossovers_are_where_the_lines_cross(tmp_path: Path) -> None:
    write(tmp_path, "h200_sweep_nnz", nnz_rows())
    chart = charts.nnz(charts.Results(tmp_path))
    for pattern, limit in (("uniform", 180), ("topic", 540)):
        found = {mark["what"]: mark for mark in chart.data[pattern]["marks"]}
        assert set(found) == {"row = dense", "union = dense", "row = union", "train = dense"}
        # lines are straight between measured points; the made-up speed-ups are not
        assert found["row = dense"]["x"] == pytest.approx(58.5, rel=0.1)
        assert found["union = dense"]["x"] == pytest.approx(limit, rel=0.1)
        crossed = found["row = union"]
        assert speed("row", crossed["x"], pattern) == pytest.approx(speed("union", crossed["x"], pattern), rel=0.02)
        assert crossed["y"] == pytest.approx(speed("row", crossed["x"], pattern), rel=0.1)
    assert "(uniform)" in chart.title
    assert "(topic)" in chart.title


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


def test_correlation_is_pearsons(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    write(tmp_path, "h200_sweep_layers", layers_rows())
    chart = charts.layers(charts.Results(tmp_path))
    points = chart.data["points"]["ffn"]
    assert [point["layer"] for point in points] == list(range(8))
    counts = [point["nnz"] for point in points]
    for op in ("ffn", "train"):
        gains = [point["speedup"] for point in chart.data["points"][op]]
        fit = chart.data["fits"][op]
        assert fit["nnz"] == pytest.approx(numpy.corrcoef(counts, gains)[0, 1])
        # the forward pass's; the training step's rows have none
        assert [point["union"] for point in chart.data["points"][op]] == pytest.approx(UNIONS)
        assert fit["union"] == pytest.approx(numpy.corrcoef(UNIONS, gains)[0, 1])
    fit = chart.data["fits"]["ffn"]
    assert f"correlation {fit['nnz']:.3f}, {fit['union']:.3f} with the union" in chart.title
    # the source with eight layers, not that with one
    assert chart.machine.startswith("layers of a model; ")


def test_memory_is_shown_per_token(tmp_path: Path) -> None:
    rows = memory_rows()
    # a failed row does not improve dense's figure
    rows[0]["kept_bytes"] = 0
    write(tmp_path, "h200_sweep_memory", rows)
    chart = charts.memory(charts.Results(tmp_path))
    data = chart.data
    assert set(data) == {"kept", "peak", "forward"}
    assert data["kept"]["lines"]['"union"'][0] == [1, pytest.approx(16845828 / 16384 / 1000)]
    assert [x for x, _ in data["kept"]["lines"]['"auto" runs dense']] == [512, 911]
    assert data["kept"]["dense"] == {name: pytest.approx(33.792) for name in ("dense eager", "dense compiled")}
    assert data["forward"]["dense"]["dense eager"] == pytest.approx(1.01e9 / 3 / 16384 / 1000, rel=1e-6)
    assert "1.0 KB per token for backward instead of 34, its peak is 3.3 times lower" in chart.title
    # of 63 MB in place of 277
    assert "the peak of a forward pass 4.4 times lower" in chart.title


def test_kernels_add_up_to_the_whole(tmp_path: Path) -> None:
    write(tmp_path, "h200_sweep_kernels", kernels_rows())
    data = charts.kernels(charts.Results(tmp_path)).data
    assert [entry["workload"] for entry in data["train"]] == ["uniform29", "topic128"]
    assert sum(data["train"][0]["parts"].values()) == pytest.approx(1.69)
    assert data["train"][0]["parts"]["rest"] == pytest.approx(0.06)
    assert (data["ffn"][0]["dense"], data["train"][0]["dense"]) == (1.6, 4.9)


def test_every_kernel_of_a_step_has_a_part(root: Path) -> None:
    """A renamed kernel would vanish in "rest"."""
    result = json.loads((root / "profiling" / "results" / "h200_sweep_kernels.json").read_text())
    small = {symbol for each in result["rows"] for symbol, ms in (each.get("kernels") or {}).items() if ms < 0.08}
    for each in result["rows"]:
        for symbol in each.get("kernels") or {}:
            assert of_kernels.part_of(symbol) != of_kernels.REST or symbol in small


# files of the chart of speed-ups
SPEEDUPS = ("h200_auto", "h100_paper_code")


def test_wrong_results_of_the_papers_code_are_marked(root: Path, tmp_path: Path) -> None:
    found = {name: json.loads((root / f"profiling/results/{name}.json").read_text()) for name in SPEEDUPS}
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


def test_tracked_charts_show_the_results(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m profiling.draw`` makes this pass again."""
    assert run("--check") == 0, capsys.readouterr().err
    for name in TRACKED:
        assert (root / "profiling" / "charts" / f"{name}-light.svg").exists()


def test_check_notices_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, out = tmp_path / "results", tmp_path / "charts"
    words = ("memory", "--results", results, "--out", out)
    rows = memory_rows()
    write(results, "h200_sweep_memory", rows)
    assert run(*words, "--check") == 1
    assert "memory-light.svg: missing" in capsys.readouterr().err
    assert run(*words) == 0
    assert run(*words, "--check") == 0
    rows[-2]["kept_bytes"] += 10**6
    write(results, "h200_sweep_memory", rows)
    assert run(*words, "--check") == 1
    said = capsys.readouterr().err
    assert all(f"memory-{end}: shows other data" in said for end in ("light.svg", "dark.svg"))
    assert run(*words) == 0
    (out / "memory-dark.svg").write_text((out / "memory-dark.svg").read_text().replace("#0d1117", "#0d1118"))
    assert run(*words, "--check") == 1
    assert "memory-dark.svg: is drawn otherwise now" in capsys.readouterr().err
    (out / "memory-dark.svg").unlink()
    assert run(*words, "--check") == 1
    (results / "h200_sweep_memory.json").unlink()
    assert run("--results", results, "--out", out, "--check") == 1
    assert "memory-light.svg: there is no data for it" in capsys.readouterr().err


def test_missing_data_is_an_error_only_where_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").mkdir()
    where = ("--results", tmp_path / "results", "--out", tmp_path / "charts")
    assert run(*where) == 2
    assert f"expected results of some chart in {tmp_path / 'results'}, got none" in capsys.readouterr().err
    assert not (tmp_path / "charts").exists()
    write(tmp_path / "results", "h200_sweep_memory", memory_rows())
    assert run(*where) == 0
    assert run("nnz", *where) == 2
    assert "h200_sweep_nnz" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("pie",), ("--results", "/nowhere")])
def test_requests_that_make_no_sense(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*words)
    assert stopped.value.code == 2
    assert "got" in capsys.readouterr().err


# Style


def draw(figure: Any, theme: Any) -> None:
    axes = figure.subplots()
    axes.plot([1, 2, 3], color=theme.colours[0], label="line")
    axes.bar([0, 1], [1, 2], hatch="//")
    figure.legend(loc="outside upper left")


def test_files_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    first = style.save(draw, tmp_path / "a" / "x", title="Title", footer="machine", data="abc")
    again = style.save(draw, tmp_path / "b" / "x", title="Title", footer="machine", data="abc")
    assert [path.name for path in first] == ["x-light.svg", "x-dark.svg"]
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert style.data_of(one) == "abc"
    light, dark = (path.read_bytes() for path in first[:2])
    assert light != dark
    plain = style.save(draw, tmp_path / "c" / "x")
    assert [style.data_of(path) for path in plain] == [""] * 2
