"""profiling/charts.py: what charts show, their files and their check; profiling/_style.py: colours and bytes."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

MACHINE = "NVIDIA H200 (made up); torch 2.11.0; kernels 0123456789ab"
NONZEROS = (1, 2, 4, 8, 16, 29, 64, 128, 256, 512, 911, 2816, 5632)
DRAWN = ("speedup", "nnz", "tokens", "layers", "memory", "kernels", "roofline", "models", "training")
# Those whose data is in the repository.
TRACKED = ("speedup", "tokens", "memory", "kernels", "roofline", "models", "training")


@pytest.fixture
def style(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(root / "profiling"))
    import _style

    # quick to draw
    monkeypatch.setattr(_style, "DPI", 30)
    return _style


@pytest.fixture
def charts(style: Any) -> Any:
    import charts

    return charts


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


def tokens_rows() -> list[dict[str, Any]]:
    rows = []
    for pattern, m in itertools.product(("uniform", "topic"), (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 16384, 131072)):
        for strategy in ("row", "union", "auto", "dense"):
            dip = abs(math.log2(m / 512)) / 9
            ratio = {"row": 0.8 + 1.6 * dip, "union": 0.5 + 2 * max(0, math.log2(m / 512)) / 9, "dense": 1.0}
            ratio["auto"] = max(ratio.values())
            fields = {"requested": strategy, "tokens": m, "pattern": pattern, "speedup_dense": ratio[strategy]}
            rows.append(row("decode" if m < 512 else "ffn", 29, speedup_compiled=1.0, **fields))
    return rows


def layers_rows() -> list[dict[str, Any]]:
    counts = [67.5, 11.1, 13.3, 31.0, 56.2, 96.1, 138.6, 272.7]
    rows = [row("ffn", 30, speedup_dense=2.0, requested="auto", layer=3, source="layers recorded in real")]
    for layer, nnz in enumerate(counts):
        for op, ratio in (("ffn", 2.5 - nnz / 300), ("train", 4 - nnz / 90)):
            fields = {"requested": "auto", "strategy": "union", "layer": layer, "source": "layers of a model"}
            rows.append(row(op, nnz, speedup_dense=ratio + 0.02 * (layer % 3), **fields))
    return rows


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
        forward = {"gate_pack_bf16_c8": 0.47, "up_down_bf16_k2048": 0.4, "torch": 0.01}
        step = {"gate_pack_bf16_c8": 0.48, "sampled_up_bf16": 0.15, "gathered_bf16_1": 0.14, "gathered_bf16_2": 0.26}
        step |= {"sampled_grad_bf16": 0.15, "weight_grad_bf16": 0.45, "rank": 0.02, "torch": 0.04}
        rows.append(row("dense compiled", nnz, ms=1.6, workload=name))
        rows.append(row("dense compiled train", nnz, ms=4.9, workload=name))
        rows.append(row("ffn", nnz, ms=0.85, workload=name, requested="auto", strategy="row", kernels=forward))
        rows.append(row("train", nnz, ms=1.65, workload=name, requested="auto", strategy="union", kernels=step))
    return rows


def write_sweeps(folder: Path) -> Path:
    """Every sweep in the format of its file."""
    sweeps = {"nnz": nnz_rows(), "m": tokens_rows(), "layers": layers_rows()}
    sweeps |= {"memory": memory_rows(), "kernels": kernels_rows()}
    for name, rows in sweeps.items():
        write(folder, f"h200_sweep_{name}", rows, sweep=name)
    return folder


def run(charts: Any, *words: object) -> int:
    status: int = charts.main([str(word) for word in words])
    return status


# What charts show


def test_every_sweep_is_drawn(charts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweeps(tmp_path / "results")
    assert run(charts, "--results", tmp_path / "results", "--out", tmp_path / "charts") == 0
    names = {"nnz", "tokens", "layers", "memory", "kernels"}
    wanted = {f"{name}-{theme}.{suffix}" for name in names for theme in ("light", "dark") for suffix in ("png", "svg")}
    assert {path.name for path in (tmp_path / "charts").iterdir()} == wanted
    assert {line.split(":")[0] for line in capsys.readouterr().out.splitlines()} == names
    for path in (tmp_path / "charts").glob("*.svg"):
        xml.etree.ElementTree.parse(path)


def test_crossings_are_where_straight_lines_in_logs_cross(charts: Any) -> None:
    xs = [1.0, 10.0, 100.0, 1000.0]
    assert charts.crossings(xs, [4.0, 2.0, 0.5, 0.25]) == pytest.approx([10**1.5])
    assert charts.crossings(xs, [4.0, 1.0, 0.5, 2.0]) == pytest.approx([10.0, 10**2.5])
    assert charts.crossings(xs, [2.0, 4.0, 2.0, 1.5]) == []
    assert charts.crossings(xs, [8.0, 4.0, 2.0, 1.0], level=4.0) == pytest.approx([10.0])
    assert charts.crossings(xs[:1], [1.0]) == []


def test_crossovers_of_strategies(charts: Any, tmp_path: Path) -> None:
    write(tmp_path, "h200_sweep_nnz", nnz_rows())
    chart = charts.nnz(charts.Results(tmp_path))
    for pattern, limit in (("uniform", 180), ("topic", 540)):
        found = {mark["what"]: mark for mark in chart.data[pattern]["marks"]}
        assert set(found) == {"row = dense", "union = dense", "row = union", "train = dense"}
        # between measured points the lines are straight, the made-up speed-ups are not
        assert found["row = dense"]["x"] == pytest.approx(58.5, rel=0.1)
        assert found["union = dense"]["x"] == pytest.approx(limit, rel=0.1)
        crossed = found["row = union"]
        assert speed("row", crossed["x"], pattern) == pytest.approx(speed("union", crossed["x"], pattern), rel=0.02)
        assert crossed["y"] == pytest.approx(speed("row", crossed["x"], pattern), rel=0.1)
    assert "(uniform)" in chart.title
    assert "(topic)" in chart.title


def test_red_and_untimed_rows_are_not_shown(charts: Any, tmp_path: Path) -> None:
    rows = nnz_rows()
    for each in rows:
        if each["requested"] == "row":
            each["red"] = "wrong"
        if each["requested"] == "dense":
            each["ms"] = None
    write(tmp_path, "h200_sweep_nnz", rows)
    lines = charts.nnz(charts.Results(tmp_path)).data["topic"]["lines"]
    assert set(lines) == {"union", "auto", "train"}
    for each in rows:
        each["red"] = "wrong"
    write(tmp_path / "red", "h200_sweep_nnz", rows)
    assert charts.nnz(charts.Results(tmp_path / "red")) is None


def test_correlation_is_pearsons(charts: Any, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    write(tmp_path, "h200_sweep_layers", layers_rows())
    chart = charts.layers(charts.Results(tmp_path))
    points = chart.data["points"]["ffn"]
    assert [point["layer"] for point in points] == list(range(8))
    counts, gains = ([point[name] for point in points] for name in ("nnz", "speedup"))
    fit = chart.data["fits"]["ffn"]
    assert fit["plain"] == pytest.approx(numpy.corrcoef(counts, gains)[0, 1])
    assert fit["log"] == pytest.approx(numpy.corrcoef(numpy.log(counts), gains)[0, 1])
    assert f"{fit['plain']:.3f}" in chart.title
    # the source with eight layers, not that with one
    assert chart.machine.startswith("layers of a model\n")


@pytest.mark.parametrize("gains", [[2.0], [2.0, 1.0], [1.5, 1.5, 1.5]], ids=["one", "two", "equal"])
def test_no_correlation_of_what_has_none(charts: Any, tmp_path: Path, gains: list[float]) -> None:
    rows = [
        row("ffn", 10.0 * (i + 1), speedup_dense=gain, requested="auto", layer=i, source="few")
        for i, gain in enumerate(gains)
    ]
    write(tmp_path, "h200_sweep_layers", rows)
    chart = charts.layers(charts.Results(tmp_path))
    assert chart.data["fits"] == {"ffn": None}
    assert "correlation" not in chart.title
    if len(gains) == 1:
        chart.save(tmp_path / "layers", ("svg",))


def test_memory_by_token(charts: Any, tmp_path: Path) -> None:
    write(tmp_path, "h200_sweep_memory", memory_rows())
    data = charts.memory(charts.Results(tmp_path)).data
    assert set(data) == {"kept", "peak", "forward"}
    assert data["kept"]["twell"][0] == [1, pytest.approx(16845828 / 16384 / 1000)]
    assert [x for x, _ in data["kept"]["twell, run densely"]] == [512, 911]
    assert data["forward"]["dense eager"][0][1] == pytest.approx(1.01e9 / 3 / 16384 / 1000)


def test_a_sweep_takes_the_place_of_older_files(charts: Any, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "profiling" / "results", tmp_path / "results")
    before = {name: charts.ALL[name](charts.Results(tmp_path / "results")) for name in ("tokens", "memory", "kernels")}
    assert all(MACHINE not in chart.machine for chart in before.values())
    write_sweeps(tmp_path / "results")
    for name, chart in before.items():
        swept = charts.ALL[name](charts.Results(tmp_path / "results"))
        assert swept.machine.endswith(MACHINE)
        assert swept.digest != chart.digest


def test_kernels_add_up_to_the_whole(charts: Any, tmp_path: Path) -> None:
    write(tmp_path, "h200_sweep_kernels", kernels_rows())
    data = charts.kernels(charts.Results(tmp_path)).data
    assert [entry["workload"] for entry in data["train"]] == ["uniform29", "topic128"]
    assert sum(data["train"][0]["parts"].values()) == pytest.approx(1.69)
    assert data["train"][0]["parts"]["rest"] == pytest.approx(0.06)
    assert (data["ffn"][0]["dense"], data["train"][0]["dense"]) == (1.6, 4.9)


@pytest.mark.parametrize(
    ("symbol", "part"),
    [
        ("gate_pack_bf16_c8", "gate GEMM + pack"),
        ("gate_pack_skinny_bf16", "gate GEMM + pack"),
        ("up_down_skinny_bf16", "up and down"),
        ("down_bf16_k2048", "down"),
        ("gathered_bf16_2", "dx"),
        ("torch", "rest"),
        ("transpose_bf16", "rest"),
    ],
)
def test_parts_of_kernels(charts: Any, symbol: str, part: str) -> None:
    assert charts.part_of(symbol) == part


def test_every_kernel_of_a_step_has_a_part(charts: Any, root: Path) -> None:
    """A kernel that is renamed would vanish in "rest"."""
    result = json.loads((root / "profiling" / "results" / "h200_training.json").read_text())
    small = {symbol for each in result["rows"] for symbol, ms in (each.get("kernels") or {}).items() if ms < 0.08}
    for each in result["rows"]:
        for symbol in each.get("kernels") or {}:
            assert charts.part_of(symbol) != charts.REST or symbol in small


def test_wrong_results_of_the_papers_code_are_marked(charts: Any, root: Path) -> None:
    data = charts.speedup(charts.Results(root / "profiling" / "results")).data
    forward = {bar["workload"]: bar for bar in data["forward"]}
    assert forward["real3"]["paper"] == pytest.approx(1.676 / 0.835)
    assert not forward["real3"]["wrong"]
    assert forward["topic128"]["wrong"]
    assert forward["dense911"]["failed"]
    assert forward["dense911"]["paper"] is None


def test_points_of_the_roofline_are_operations_over_bytes(charts: Any, root: Path) -> None:
    results = charts.Results(root / "profiling" / "results")
    rows = charts.good(results.get("h200_strategies"), workload="topic128", variant="ffn", requested="row")
    data = charts.roofline(results).data
    (point,) = [p for p in data["points"]["gather"] if (p["workload"], p["name"]) == ("topic128", "row")]
    assert point["intensity"] == pytest.approx(rows[0]["executed_tflops"] * 1e12 / (rows[0]["l2_gather_gbs"] * 1e9))
    assert point["tflops"] == rows[0]["executed_tflops"]


def test_models_of_one_file_are_told_apart(charts: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"op": op, "variant": variant, "ms": 1.0, "tokens_per_ms": rate, "peak_bytes": 1e9, "red": "", "config": config}
        for config, op in itertools.product(("0.5B", "2B"), ("forward", "train"))
        for variant, rate in (("dense compiled", 100.0), ("sparse compiled", 150.0 if config == "2B" else 120.0))
    ]
    for each in rows[:4]:
        each |= {"non_zeros": [20.0, 40.0], "mj_per_token": 1.5}
    rows[-1]["peak_bytes"] = None
    rows.append({"op": "forward", "variant": "sparse compiled", "ms": None, "red": "wrong", "config": "1B"})
    write(tmp_path, "h200_model_random", rows, arguments={})
    chart = charts.models(charts.Results(tmp_path))
    assert [(group["model"], group["op"]) for group in chart.data] == list(
        itertools.product(("0.5B", "2B"), ["forward"])
    ) + list(itertools.product(("0.5B", "2B"), ["train"]))
    assert "1.20 to 1.50" in chart.title
    assert [group["nnz"] for group in chart.data] == [30.0, None, 30.0, None]
    chart.save(tmp_path / "models", ("svg",))


# Files and their check


def test_tracked_charts_show_the_results(charts: Any, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``python profiling/charts.py`` makes this pass again."""
    assert run(charts, "--check") == 0, capsys.readouterr().err
    for name in TRACKED:
        assert (root / "profiling" / "charts" / f"{name}-light.svg").exists()


def test_check_notices_what_changed(charts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, out = tmp_path / "results", tmp_path / "charts"
    words = ("memory", "--results", results, "--out", out)
    rows = memory_rows()
    write(results, "h200_sweep_memory", rows)
    assert run(charts, *words, "--check") == 1
    assert "memory-light.png: missing" in capsys.readouterr().err
    assert run(charts, *words) == 0
    assert run(charts, *words, "--check") == 0
    rows[0]["kept_bytes"] += 10**6
    write(results, "h200_sweep_memory", rows)
    assert run(charts, *words, "--check") == 1
    said = capsys.readouterr().err
    assert all(f"memory-{end}: shows other data" in said for end in ("light.png", "dark.png", "light.svg", "dark.svg"))
    assert run(charts, *words) == 0
    (out / "memory-dark.svg").write_text((out / "memory-dark.svg").read_text().replace("#0d1117", "#0d1118"))
    assert run(charts, *words, "--check") == 1
    assert "memory-dark.svg: is drawn otherwise now" in capsys.readouterr().err
    (out / "memory-dark.svg").unlink()
    assert run(charts, *words, "--check") == 1
    (results / "h200_sweep_memory.json").unlink()
    assert run(charts, "--results", results, "--out", out, "--check") == 1
    assert "memory-light.png: there is no data for it" in capsys.readouterr().err


def test_another_matplotlib_is_no_difference(
    charts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "results", "h200_sweep_memory", memory_rows())
    words = ("memory", "--results", tmp_path / "results", "--out", tmp_path / "charts")
    assert run(charts, *words) == 0
    path = tmp_path / "charts" / "memory-light.svg"
    path.write_text(path.read_text().replace("<g ", "<g  ", 1))
    monkeypatch.setattr(charts, "matplotlib_version", lambda: "0.0")
    assert run(charts, *words, "--check") == 0, capsys.readouterr().err


def test_missing_data_is_an_error_only_where_named(
    charts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").mkdir()
    where = ("--results", tmp_path / "results", "--out", tmp_path / "charts")
    assert run(charts, *where) == 0
    assert not (tmp_path / "charts").exists()
    assert run(charts, "nnz", *where) == 2
    assert "h200_sweep_nnz" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '"x"', '{"rows": []}'], ids=["broken", "list", "text", "no machine"])
def test_files_that_are_no_results(charts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "h200_sweep_nnz.json").write_text(text)
    assert run(charts, "--results", tmp_path, "--out", tmp_path) == 2
    assert "h200_sweep_nnz.json" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("pie",), ("--results", "/nowhere")])
def test_requests_that_make_no_sense(charts: Any, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(charts, *words)
    assert stopped.value.code == 2
    assert "got" in capsys.readouterr().err


def test_help_names_every_chart(charts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(charts, "--help")
    said = capsys.readouterr().out
    # test_quality draws the last one
    assert tuple(charts.ALL) == (*DRAWN, "quality")
    assert all(f"  {name} " in said for name in charts.ALL)


def test_without_matplotlib(
    charts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert run(charts, "--out", tmp_path) == 2
    assert "twell[plots]" in capsys.readouterr().err


# Style


def draw(figure: Any, theme: Any) -> None:
    axes = figure.subplots()
    axes.plot([1, 2, 3], color=theme.colours[0], label="line")
    axes.bar([0, 1], [1, 2], hatch="//")
    figure.legend(loc="outside upper left")


def test_files_are_the_same_bytes_each_time(style: Any, tmp_path: Path) -> None:
    first = style.save(draw, tmp_path / "a" / "x", title="Title", footer="machine", data="abc")
    again = style.save(draw, tmp_path / "b" / "x", title="Title", footer="machine", data="abc")
    assert [path.name for path in first] == ["x-light.png", "x-dark.png", "x-light.svg", "x-dark.svg"]
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert style.data_of(one) == "abc"
    light, dark = (path.read_bytes() for path in first[:2])
    assert light != dark
    plain = style.save(draw, tmp_path / "c" / "x")
    assert [style.data_of(path) for path in plain] == [""] * 4


def test_settings_of_the_caller_are_neither_used_nor_changed(style: Any, tmp_path: Path) -> None:
    import matplotlib

    expected = [path.read_bytes() for path in style.save(draw, tmp_path / "a")]
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        found = [path.read_bytes() for path in style.save(draw, tmp_path / "b")]
        assert matplotlib.rcParams["font.size"] == 30
    assert found == expected


def linear(colour: str) -> list[float]:
    """Linear red, green and blue of "#rrggbb"."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def contrast(one: str, other: str) -> float:
    """WCAG's ratio."""
    shades = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (one, other))]
    return (max(shades) + 0.05) / (min(shades) + 0.05)


# Linear RGB as protanopes and deuteranopes see it (Viénot, Brettel and Mollon, 1999).
SEEN = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
    "deutan": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
}


def lab(colour: str, vision: str) -> list[float]:
    """CIE L*a*b* of what is seen."""
    rgb = [max(0.0, sum(w * v for w, v in zip(weights, linear(colour)))) for weights in SEEN[vision]]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    scaled = [sum(w * v for w, v in zip(weights, rgb)) / top for weights, top in zip(to_xyz, white)]
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in scaled)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def test_colours_stand_out_and_apart(style: Any) -> None:
    for theme in style.THEMES:
        assert contrast(theme.text, theme.ground) >= 7
        for colour in (*theme.colours, theme.muted):
            assert contrast(colour, theme.ground) >= 3, (theme.name, colour)
        for vision, (one, other) in itertools.product(SEEN, itertools.combinations(theme.colours, 2)):
            assert math.dist(lab(one, vision), lab(other, vision)) >= 15, (theme.name, vision, one, other)
