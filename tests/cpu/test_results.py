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
import torch

from profiling import measurements
from twell import _tables, tuning
from twell._runtime import specs
from twell.commands import tune

MACHINE = "NVIDIA H200 (made up); SM 1980 MHz now, 1980 most; kernels 0123456789ab"


def test_readme_has_the_figures_of_the_results(root: Path) -> None:
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


@pytest.mark.parametrize("name", ["h200_fuzz", "h200_fuzz_portable"])
def test_the_seeds_of_a_result_are_those_of_its_commands(name: str, root: Path) -> None:
    runs = json.loads((root / "profiling" / "results" / f"{name}.json").read_text())["runs"]
    (made,) = (each for each in measurements.ALL if each.name == name)
    assert re.findall(r"--seed (\d+)", " ".join(made.commands)) == [str(run["seed"]) for run in runs]


def test_every_result_is_described(root: Path) -> None:
    folder = root / "profiling" / "results"
    rows = re.findall(r"(?m)^\| ((?:`\w+`(?:, )?)+) \|", (folder / "README.md").read_text())
    described = [name.strip("`") for cell in rows for name in cell.split(", ")]
    assert len(described) == len(set(described))
    assert {path.stem for path in folder.glob("*.json")} <= set(described)


def test_the_gate_gemm_runs_with_nearly_the_best_tiles(root: Path) -> None:
    """``tuning.gate_pack`` against the measured times of all tile sizes: the mean loss, and the largest."""
    rows = json.loads((root / "profiling" / "results" / "h200_gate_tiles.json").read_text())["rows"]
    losses = []
    for row in rows:
        spec = tuning.gate_pack(torch.bfloat16, row["m"], row["n"], 66)
        chosen = str(spec.tokens) if isinstance(spec, specs.GatePackSpec) else "few"
        losses.append(row["us"][chosen] / min(us for name, us in row["us"].items() if name != "cublas") - 1)
    assert len(losses) >= 30
    assert sum(losses) / len(losses) < 0.005
    assert max(losses) < 0.03


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


def test_results_that_are_missing(
    readme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    write(tmp_path, "h200_sweep_m", [])
    assert readme.main() == 2
    assert f"expected results in {tmp_path}" in capsys.readouterr().err


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
    rows = json.loads((root / "profiling/results/h200_held_out.json").read_text())["rows"]
    assert len(rows) >= 100
    losses = []
    for row in rows:
        call = tuning.Problem(*(row[name] for name in tune.SIZES))
        chosen = tuning.decide(call, tune.measured_figures(row), None).strategy
        ms = {name: row[f"{name}_ms"] for name in (*_tables.STRATEGIES, "dense") if row.get(f"{name}_ms")}
        losses.append(ms[chosen] / min(ms.values()) - 1)
        assert chosen == row["auto"]
        assert losses[-1] == pytest.approx(row["loss"], abs=1e-9)
    assert statistics.mean(losses) < 0.01
    assert sum(loss > 0.06 for loss in losses) <= 4
    assert max(losses) < 0.3


def test_the_papers_code_stands_beside_dense_and_twell(readme: Any, tmp_path: Path) -> None:
    modes = {
        mode: {"dense": 2.0 + i, "paper": 1.5 + i, "twell": 1.0 + i} for i, mode in enumerate(("queued", "waited"))
    }
    known = {"workload": "real6", "op": "train", "modes": modes, "wrong": "w_up: error 1 %", "red": ""}
    known |= {kind: {"dense eager": 0.01, "paper": 0.025, "twell": 0.01} for kind in ("errors", "worst_rows")}
    lost = {"workload": "dense911", "op": "forward", "modes": {}, "wrong": "", "red": "illegal memory access"}
    lost |= {"dense_ms": None, "ms": None, "errors": {}, "worst_rows": {}}
    write(tmp_path, "h100_paper_code", [known, lost])
    table = cells(readme.paper_code().split("\n\n")[0])
    wrong = ["wrong", "2.5", "2.5"]
    assert table[0] == ["`real6`", "training step", "2.00", "1.50", "1.00", "3.00", "2.50", "2.00", *wrong]
    assert table[1] == ["`dense911`", "forward", *[""] * 6, "illegal memory access", "", ""]
    assert readme.paper_code().split("\n\n")[1].splitlines() == [
        "- training step, queued: 2.00 times as fast as dense (geometric mean of 1 layers), "
        "1.50 to 1.50 times as fast as the paper's code",
        "- training step, waited: 1.50 times as fast as dense (geometric mean of 1 layers), "
        "1.25 to 1.25 times as fast as the paper's code",
    ]


def test_layers_of_a_bench_stand_beside_the_faster_dense(readme: Any, tmp_path: Path) -> None:
    assert "Not measured yet: `profiling.bench ffn`" in readme.layer_calls("h200_large_layer", "profiling.bench ffn")
    readme.result.cache_clear()
    known = {"workload": "topic29", "tokens": 512, "nnz": 29.4, "red": "", "faster_dense": "compiled"}
    known |= {"variant": "ffn", "requested": "auto", "strategy": "row", "ms": 0.5, "speedup_dense": 1.5}
    others = [{"requested": "row"}, {"red": "wrong"}, {"variant": "dense eager"}, {"variant": "train", "ms": None}]
    write(tmp_path, "h200_large_layer", [known, *(known | other for other in others)])
    table = cells(readme.layer_calls("h200_large_layer", "").split("\n\n")[0])
    times = ["compiled", "750", "**500**", "**1.50**"]
    assert table == [["`topic29`", "512", "29", "forward", strategy, *times] for strategy in ("auto: row", "row")]


def test_host_times_and_a_soak_in_words(readme: Any, tmp_path: Path) -> None:
    row = {"what": "forward", "layer": "twell auto", "m": 2048, "chosen": "row", "host_us": 77.4}
    write(tmp_path, "h100_host", [row | {"waited_ms": None, "replay_ms": 0.5}])
    assert cells(readme.host().split("\n\n")[0]) == [["forward", "2,048", "twell auto (row)", "77", "", "500"]]
    memory = {name: {"settled": 10.0, "now": 11.0, "most": 12.0} for name in ("gpu_mb", "host_mb")}
    run = {"calls": 3100, "cases": 100, "seconds": 540.0, "wrong": [], **memory}
    write(tmp_path, "h100_soak", [], **run)
    said = readme.soak()
    assert said.startswith("3,100 calls of 100 cases in 9 minutes; memory: 10 MB of the GPU at first, 12 at most")
    assert "Faults: none." in said


def test_batches_say_which_tokens_differ(readme: Any, tmp_path: Path) -> None:
    stock = {"model": "stock", "requests": 64, "tokens": 4096, "seconds": [2.0, 2.0], "tokens_per_s": 2048.0}
    stock |= {"differing": [0, 0], "ties": [0, 0], "worst": 0.0}
    sparse = stock | {"model": "sparse", "tokens_per_s": 4096.0, "differing": [5, 6], "ties": [4, 4], "worst": 7.0}
    write(tmp_path, "h100_batches", [stock, sparse])
    assert cells(readme.continuous_batching().split("\n\n")[0]) == [
        ["64", "stock", "4,096", "2.00, 2.00", "2,048", "1.00", "0", "0", "0"],
        ["64", "sparse", "4,096", "2.00, 2.00", "4,096", "2.00", "5, 6", "4", "7"],
    ]


def test_generate_stands_beside_stock(readme: Any, tmp_path: Path) -> None:
    """A row for each pass and number of sequences: rates of both models, and the sparse one over the stock one."""
    passes = [("prompt", 8), ("eager", 1), ("static", 16)]
    rows = [
        {"what": what, "sequences": sequences, "model": model, "tokens_per_s": rate}
        for what, sequences in passes
        for model, rate in (("stock", 1000.0), ("sparse", 1250.0))
    ]
    write(tmp_path, "h100_generate", rows)
    assert cells(readme.generate().split("\n\n")[0]) == [
        ["prompt pass", "8", "1,000", "1,250", "**1.25**"],
        ["decoding, eager", "1", "1,000", "1,250", "**1.25**"],
        ["decoding, static cache", "16", "1,000", "1,250", "**1.25**"],
    ]


def test_steps_on_several_gpus_are_shown_by_mode(readme: Any, tmp_path: Path) -> None:
    assert "Not measured yet" in readme.several_gpus()
    readme.result.cache_clear()
    row = {"mode": "fsdp", "variant": "sparse eager", "tokens": 32768, "ms": 100.0, "tokens_per_ms": 327.68, "red": ""}
    row |= {"host_ms": 60.0, "speedup": 1.25, "peak_bytes": 20_400_000_000, "strategies": {"union": 7, "dense": 1}}
    options = {"config": "1B", "micro_batch": 8, "sequence": 2048}
    write(tmp_path, "h200_parallel", [row, row | {"red": "wrong", "ms": None}], arguments=options)
    table, said = readme.several_gpus().split("\n\n")
    figures = ["32,768", "100.0", "60.0", "327.7", "1.25", "20.4", "1 dense, 7 union"]
    assert cells(table) == [["FSDP2", "sparse eager", *figures]]
    assert said.startswith("1B, 8 sequences of 2,048 tokens on each GPU.")


def test_fp8_stands_beside_the_faster_dense_and_the_sparse_layer(readme: Any, tmp_path: Path) -> None:
    assert "Not measured yet" in readme.beside_fp8()
    readme.result.cache_clear()

    def timed(variant: str, ms: float, error: float, **more: Any) -> dict[str, Any]:
        known = {"workload": "topic29", "tokens": 64, "variant": variant, "ms": ms, "red": "", "frobenius": error}
        return known | {"dense_frobenius": 0.002} | more

    rows = [timed("dense eager decode", 0.05, 0.0), timed("dense compiled decode", 0.04, 0.002)]
    rows += [
        timed("dense fp8 decode", 0.03, 0.09),
        timed("decode", 0.02, 0.001),
        timed("dense fp8", 9.0, 0.5, tokens=8),
    ]
    write(tmp_path, "h200_fp8", rows)
    table = readme.beside_fp8().split("\n\n")[0]
    errors = ["0.20 %", "9.00 %", "0.10 %"]
    assert cells(table) == [["`topic29`", "64", "40", "30", "**20**", "1.50", *errors]]


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (
            {1e-5: -0.01, 1e-4: 0.0, 1e-3: 0.05},
            "nothing here up to 1e-4, 50 non-zeros per token, and 5.0 % at 1e-3, 50 non",
        ),
        ({1e-5: -0.01, 1e-4: -0.02}, "L1 costs nothing here up to 1e-4, 50 non-zeros per token."),
        ({1e-5: 0.01, 1e-4: -0.02}, "1.0 % at 1e-5, 50 non-zeros per token."),
    ],
)
def test_where_sparsity_begins_to_cost(added: dict[float, float], said: str, readme: Any, tmp_path: Path) -> None:
    neurons = {"neurons": 100, "l0": 50.0, "l1": 1.0, "dead": 0, "union": None, "strategy": "dense"}
    rows = [
        {"coefficient": c, "ce": 2.0 * (1 + more), "blocks": [2.0 * (1 + more)] * 2, "l0": 50.0, "layers": [neurons]}
        for c, more in {0.0: 0.0, **added}.items()
    ]
    write(tmp_path, "h200_quality", rows)
    assert said in readme.quality_limit()


def test_less_than_seeds_differ_is_no_cost(readme: Any, tmp_path: Path) -> None:
    neurons = {"neurons": 100, "l0": 50.0, "l1": 1.0, "dead": 0, "union": None, "strategy": "dense"}
    added = {(0.0, 0): 0.0, (0.0, 1): 0.0, (1e-5, 0): 0.01, (1e-4, 0): 0.02, (1e-4, 1): -0.02, (1e-3, 0): 0.05}
    rows = [
        {
            "coefficient": c,
            "seed": seed,
            "ce": 2 + 2 * more,
            "blocks": [2 + 2 * more] * 2,
            "l0": 50.0,
            "layers": [neurons],
        }
        for (c, seed), more in added.items()
    ]
    write(tmp_path, "h200_quality", rows)
    assert readme.quality_limit() == (
        "L1 costs nothing here up to 1e-4, 50 non-zeros per token, and 5.0 % at 1e-3, 50 non-zeros per token. "
        "Such changes differ by 2.8 % between seeds: smaller ones mean nothing."
    )
