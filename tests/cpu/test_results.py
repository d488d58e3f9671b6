"""Figures for people come from data: the README's tables are what profiling/readme.py makes of profiling/results."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profiling import measurements
from profiling.draw.common import loads
from twell.commands import tune
from twell.strategy import costs, tables

MACHINE = "NVIDIA H200 (made up); SM 1980 MHz now, 1980 most; kernels 0123456789ab"


def test_readme_has_the_figures_of_the_results(root: Path) -> None:
    """Among them the list of all files of results."""
    checked = subprocess.run(
        [sys.executable, "profiling/readme.py", "--check"], cwd=root, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def test_every_result_has_its_machine_line(root: Path) -> None:
    files = sorted((root / "profiling" / "results").glob("*.json"))
    assert files
    for path in files:
        machine = json.loads(path.read_text())["machine"]
        assert "kernels" in machine, path
        assert path.stem.partition("_")[0].upper() in machine, path


@pytest.mark.parametrize("name", ["h200_fuzz", "h100_fuzz_portable"])
def test_the_seeds_of_a_result_are_those_of_its_commands(name: str, root: Path) -> None:
    runs = json.loads((root / "profiling" / "results" / f"{name}.json").read_text())["runs"]
    (made,) = (each for each in measurements.ALL if each.name == name)
    assert re.findall(r"--seed (\d+)", " ".join(made.commands)) == [str(run["seed"]) for run in runs]


# Tables of made-up results


@pytest.fixture
def readme(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """profiling/readme.py, which finds its results in tmp_path."""
    monkeypatch.syspath_prepend(str(root / "profiling"))
    import readme

    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    readme.result.cache_clear()
    yield readme
    readme.result.cache_clear()


def row(config: str, op: str, variant: str, ms: float, **more: Any) -> dict[str, Any]:
    """A row of bench model: 1,000 tokens, 0.1 mJ per token and millisecond."""
    known: dict[str, Any] = {"config": config, "op": op, "variant": variant, "ms": ms, "red": "", "micro_batch": 8}
    known |= {"tokens_per_ms": 1000 / ms, "speedup": 10 / ms, "p10_ms": ms - 1, "p90_ms": ms + 1, "error": 1.0}
    known |= {"mj_per_token": ms / 10, "mj_per_token_idle_corrected": ms / 20, "worst": 1.5}
    known |= {"peak_bytes": int(ms * 1e9), "peak_total_bytes": int((ms + 4) * 1e9), "kept_bytes_per_token": None}
    return known | {"strategies": {"union": 7, "dense": 1}} | more


def variants(config: str, op: str, *ms: float) -> list[dict[str, Any]]:
    names = ("dense eager", "dense compiled", "sparse eager", "sparse compiled")
    return [row(config, op, name, each) for name, each in zip(names, ms, strict=True)]


def write(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    models = [
        {"config": config, "non_zeros": [10.0, 30.0], "unions": [0.1, 0.2]}
        for config in dict.fromkeys(row["config"] for row in rows if "config" in row)
    ]
    content = {"machine": MACHINE, "models": models, "energy": {"method": "total_energy_counter", "idle_watts": 99.6}}
    (folder / f"{name}.json").write_text(json.dumps({**content, "rows": rows, **more}))


def cells(table: str) -> list[list[str]]:
    """The lines of a table below its head."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


class TestModels:
    def test_the_faster_of_each_side_by_side(self, readme: Any, tmp_path: Path) -> None:
        write(tmp_path, "h200_model", variants("final", "train", 20, 30, 16, 25))
        write(tmp_path, "h200_paper_configs", variants("1B", "forward", 20, 10, 9, 8))
        trained, drawn = cells(readme.models())
        assert trained[:5] == ["0.5B trained (20)", "training step", "20 / 16", "50 / 62", "**1.25**"]
        assert drawn[:5] == ["1B (20)", "forward, decoder", "10 / 8", "100 / 125", "**1.25**"]
        assert drawn[5:] == ["1.00 / 0.80", "-20.0 %", "10.0 / 8.0", "-20.0 %"]

    def test_beside_the_paper(self, readme: Any, tmp_path: Path) -> None:
        write(tmp_path, "h200_paper_configs", variants("1B", "forward", 20, 10, 10, 8))
        full = {(line[0], line[1]): line[2:] for line in cells(readme.beside_paper())}
        assert full["1B", "forward mJ/token"] == [
            "3.71 / 3.17",
            "-14.6 %",
            "2.00 / 1.00",
            "-50.0 %",
            "1.00 / 0.80",
            "-20.0 %",
        ]
        assert full["1B", "with weights"] == [""] * 6


def layer(number: int, variant: str, nnz: float, ms: float, strategy: str = "union") -> dict[str, Any]:
    known: dict[str, Any] = {"layer": number, "variant": variant, "nnz": nnz, "ms": ms, "strategy": strategy, "red": ""}
    return known | {"requested": "auto", "speedup_dense": 2 / ms}


class TestLayers:
    def test_rows_and_correlation(self, readme: Any, tmp_path: Path) -> None:
        rows = [layer(i, op, 10 * (i + 1), 1.0 + i) for op in ("ffn", "train") for i in range(3)]
        rows[-1]["strategy"] = "dense"
        rows.append(rows[0] | {"variant": "dense eager", "requested": "", "speedup_dense": None})
        write(tmp_path, "h200_sweep_layers", rows)
        lines = cells(readme.layers())
        assert lines[0] == [
            "0",
            "10",
            *("2.00", "**1.00**", "**2.00**", "union"),
            *("2.00", "**1.00**", "**2.00**", "union"),
        ]
        assert lines[2][-1] == "dense"
        # times lie on a line; speed-ups of 2, 1 and 2/3 do not
        said = "forward -0.961, with the logarithm of the non-zeros -0.991, of the time 1.000"
        assert said in readme.layer_correlation()


def test_auto_misses(readme: Any, tmp_path: Path) -> None:
    def point(loss: float, **entries: Any) -> dict[str, Any]:
        known = {"m": 2048, "k": 896, "n": 4864, "gated": True, "training": False, "nonzeros": 29.2, "auto": "row"}
        return known | {"row_ms": 1 + loss, "union_ms": 1.0, "dense_ms": 2.0, "loss": loss} | entries

    rows = [point(0.0), point(0.02), point(0.1), point(1.0, gated=False, training=True, auto="dense", row_ms=None)]
    write(tmp_path, "h200_held_out", rows)
    expected = [["896 / 4,864", "non-gated, training", "29", "2,048", "dense 2000", "union 1000", "+100.0 %"]]
    expected += [["896 / 4,864", "gated", "29", "2,048", "row 1100", "union 1000", "+10.0 %"]]
    assert cells(readme.auto_misses()) == expected
    found = (
        'On 4 points "auto" loses 28.00 % in the mean: 4.00 % over 3 forward points and 100.00 % over 1 training points'
    )
    found += "; at most 100.0 %."
    assert readme.auto_losses().startswith(found)


def test_the_table_of_auto_at_points_that_it_is_not_fitted_to(root: Path) -> None:
    """The shipped table decides as it did when the points were published; docs/when-it-pays.md names the misses."""
    rows = loads((root / "profiling/results/h200_held_out.json").read_text())["rows"]
    assert len(rows) >= 100
    losses = []
    for row in rows:
        call = costs.Problem(*(row[name] for name in tune.SIZES))
        chosen = costs.decide(call, tune.measured_figures(row), None).strategy
        ms = {name: row[f"{name}_ms"] for name in (*tables.STRATEGIES, "dense") if row.get(f"{name}_ms")}
        losses.append(ms[chosen] / min(ms.values()) - 1)
        assert chosen == row["auto"]
        assert losses[-1] == pytest.approx(row["loss"], abs=1e-9)
    assert statistics.mean(losses) < 0.01
    assert sum(loss > 0.06 for loss in losses) <= 4
    assert max(losses) < 0.3


def benched(**more: Any) -> dict[str, Any]:
    """A row of bench as files without eager calls have it."""
    known = {"workload": "topic29", "tokens": 512, "nnz": 29.4, "red": "", "faster_dense": "compiled"}
    known |= {"variant": "ffn", "requested": "auto", "strategy": "row", "ms": 0.5, "speedup_dense": 1.5}
    return known | {"frobenius": 1.0, "dense_frobenius": 2.0, "worst_row": 1.5, "dense_worst_row": 2.0} | more


EAGER = {"queued_ms": 0.6, "queued_speedup": 1.25, "waited_ms": 0.8, "waited_speedup": 1.0, "eager_strategy": "row"}


def test_layers_of_a_bench_stand_beside_the_faster_dense(readme: Any, tmp_path: Path) -> None:
    others = [{"requested": "row"}, {"red": "wrong"}, {"variant": "dense eager"}, {"variant": "train", "ms": None}]
    write(tmp_path, "h200_large_layer", [benched(), *(benched(**other) for other in others)])
    table = cells(readme.layer_calls("h200_large_layer").split("\n\n")[0])
    times = ["compiled", "750", "**500**", "**1.50**"]
    assert table == [["`topic29`", "512", "29", "forward", strategy, *times] for strategy in ("auto: row", "row")]


def test_tables_have_eager_calls_where_they_were_timed(readme: Any, tmp_path: Path) -> None:
    """Decode has graphs alone; an eager call of few tokens may have run another strategy."""
    rows = [benched(**EAGER), benched(variant="decode"), benched(**EAGER | {"eager_strategy": "dense"})]
    write(tmp_path, "h200_large_layer", rows)
    table = readme.layer_calls("h200_large_layer").split("\n\n")[0]
    ways = [f"eager, {way}: dense / twell, speed-up" for way in ("queued", "waited for")]
    assert table.splitlines()[0].endswith(f"| graphs, us: dense | twell | speed-up | {ways[0]} | {ways[1]} |")
    eager = ["750 / 600, **1.25**", "800 / 800, **1.00**"]
    assert [line[-2:] for line in cells(table)] == [eager, ["", ""], [f"{each} dense" for each in eager]]


@pytest.mark.parametrize("eager", [False, True])
def test_layers_and_headline_say_how_calls_were_timed(readme: Any, tmp_path: Path, eager: bool) -> None:
    rows = [
        benched(workload=name, variant=variant, tokens=16384, **EAGER if eager else {})
        for name in readme.LAYERS
        for variant in ("ffn", "train")
    ]
    for name in ("h200_auto", "h100_auto"):
        write(tmp_path, name, rows)
    write(tmp_path, "h200_model", variants("final", "train", 20, 30, 16, 25))
    table = readme.TABLES["training"]()
    first = ["`real3`", "29", "0.75", "**0.50**", "**1.50**"]
    times = ["0.75 / 0.60, **1.25**", "0.80 / 0.80, **1.00**"] if eager else []
    assert cells(table)[0] == [*first, *times, "row", "0.50", "0.75"]
    assert "| graphs: dense | twell | speed-up |" in table
    assert ("1.2x and 1.2x in eager calls, queued," in readme.headline()) == eager
    assert "; without graphs **1.2x to 1.2x for whole models**" in readme.headline()


def test_the_table_of_the_screen(readme: Any) -> None:
    def row(requested: str, ms: float, strategy: str = "", **more: Any) -> dict[str, Any]:
        known = {"workload": "w", "tokens": 16384, "variant": "ffn", "requested": requested, "strategy": strategy}
        return known | {"ms": ms, "red": "", "energy_mj": None, "peak_bytes": None} | more

    rows = [
        row("union", 0.5, peak_bytes=2e6),
        row("union+screen", 0.4, peak_bytes=3e6),
        row("auto", 0.45, "union+screen"),
    ]
    rows += [row("union", 1.0, variant="train"), row("union+screen", 0.9, variant="train", red="wrong")]
    header, _, *lines = readme.screen_table(rows, "union").splitlines()
    assert header == '| workload | tokens | call | "union", us | "union+screen" | over | "auto", over | MB |'
    assert lines == ["| `w` | 16,384 | forward | 500.0 | **400.0** | **0.800** | union+screen 0.900 | 2 / 3 |"]
