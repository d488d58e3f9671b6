"""Figures for people come from data: the README's tables are what profiling/readme.py makes of profiling/results."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profiling import figures, held_out, measurements, readme
from profiling.draw.common import loads, machine
from twell.commands import tune
from twell.strategy import costs, tables

MACHINE = "NVIDIA H200 (made up); SM 1980 MHz now, 1980 most; twell 0.1.2; kernels 0123456789ab"


def test_readme_has_the_figures_of_the_results(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among them the list of all files of results."""
    monkeypatch.setattr(figures, "RESULTS", root / "profiling" / "results")
    figures.result.cache_clear()
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    assert readme.main() == 0, capsys.readouterr().err


def test_every_result_has_its_machine_line(root: Path) -> None:
    files = sorted((root / "profiling" / "results").glob("*.json"))
    assert files
    for path in files:
        machine = json.loads(path.read_text())["machine"]
        assert "NVIDIA " in machine, path
        assert "kernels" in machine, path


@pytest.mark.parametrize("name", ["fuzz", "fuzz_portable"])
def test_the_seeds_of_a_result_are_those_of_its_commands(name: str, root: Path) -> None:
    runs = json.loads((root / "profiling" / "results" / f"{name}.json").read_text())["runs"]
    (made,) = (each for each in measurements.ALL if each.name == name)
    assert re.findall(r"--seed (\d+)", " ".join(made.commands)) == [str(run["seed"]) for run in runs]


# Tables of made-up results


@pytest.fixture(autouse=True)
def made_up(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables find their results in tmp_path."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    # the layers, beside whose GPU those of other files are named
    (tmp_path / "auto.json").write_text(json.dumps({"machine": MACHINE.replace("H200", "H100"), "rows": []}))
    figures.result.cache_clear()
    yield
    figures.result.cache_clear()


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


def test_models_by_the_faster_of_each_side(tmp_path: Path) -> None:
    rows = [*variants("0.5B", "train", 20, 30, 16, 25), *variants("1B", "forward", 20, 10, 9, 8)]
    machine = MACHINE.replace("H200", "H100")
    write(tmp_path, "paper_configs", [*rows, *variants("1B", "logits", 20, 10, 9, 8)], machine=machine)
    large = [row | {"mj_per_token": None} for row in variants("2B", "train", 20, 30, 16, 25)]
    write(tmp_path, "paper_configs_large", large)
    first, second, third = cells(figures.models())
    assert first[:4] == ["0.5B (20)", "training step", "20 / 16", "**1.25**"]
    assert second == ["1B (20)", "forward, decoder", "10 / 8", "**1.25**", "1.00 / 0.80", "10.0 / 8.0"]
    assert third == ["2B (20)", "training step", "20 / 16", "**1.25**", "", "20.0 / 16.0"]
    assert cells(figures.some_models()) == [first, third]
    write(tmp_path, "paper_configs_more", variants("1B", "forward", 20, 10, 9, 8))
    with pytest.raises(LookupError, match="1B forward dense eager"):
        figures.models()


def test_beside_the_paper(tmp_path: Path) -> None:
    write(tmp_path, "paper_configs", variants("1B", "forward", 20, 10, 10, 8))
    assert cells(figures.beside_paper()) == [["1B", "185, +18.1 %", "50, +100.0 %"]]


def test_auto_losses(tmp_path: Path) -> None:
    points = [(0.0, False), (0.02, False), (0.1, False), (1.0, True)]
    write(tmp_path, "held_out", [{"loss": loss, "training": training} for loss, training in points])
    assert figures.auto_losses() == (
        'On 4 points "auto" loses 28.00 % in the mean: 4.00 % over 3 forward points and 100.00 % over 1 training points'
        f"; more than 6 % at 2, at most 100.0 %. {machine({'machine': MACHINE})}"
    )


def test_the_table_of_auto_at_points_that_it_is_not_fitted_to(root: Path) -> None:
    """The shipped table decides as it did when the points were published; the table is of an H200."""
    rows = loads((root / "profiling/results/held_out.json").read_text())["rows"]
    assert len(rows) >= 100
    losses, graphs = [], []
    for row in rows:
        call = costs.Problem(*(row[name] for name in tune.SIZES))
        chosen = costs.decide(call, tune.measured_figures(row), None).strategy
        ms = {name: row[f"{name}_ms"] for name in (*tables.STRATEGIES, "dense") if row.get(f"{name}_ms")}
        losses.append(ms[chosen] / min(ms.values()) - 1)
        assert chosen == row["auto"]
        assert losses[-1] == pytest.approx(row["loss"], abs=1e-9)
        if held_out.is_graph(row):
            graphs.append(losses[-1])
            assert row["graph"] == costs.decide_once(call, tables.SHIPPED)
            assert row["graph_loss"] == pytest.approx(ms[row["graph"]] / min(ms.values()) - 1, abs=1e-9)
    assert len(graphs) == 29
    assert max(statistics.mean(losses), statistics.mean(graphs)) < 0.02
    assert sum(loss > 0.06 for loss in losses) <= 10
    assert max(losses) < 0.3


def benched(**more: Any) -> dict[str, Any]:
    """A row of bench as files without eager calls have it."""
    known = {"workload": "topic29", "tokens": 512, "nnz": 29.4, "red": "", "faster_dense": "compiled"}
    known |= {"variant": "ffn", "requested": "auto", "strategy": "row", "ms": 0.5, "speedup_dense": 1.5}
    return known | {"frobenius": 1.0, "dense_frobenius": 2.0, "worst_row": 1.5, "dense_worst_row": 2.0} | more


EAGER = {"queued_ms": 0.6, "queued_speedup": 1.25, "waited_ms": 0.8, "waited_speedup": 1.0, "eager_strategy": "dense"}


def layers(**more: Any) -> list[dict[str, Any]]:
    return [benched(workload=name, variant=op, tokens=16384, **more) for name in figures.LAYERS for op in figures.OPS]


@pytest.mark.parametrize("eager", [False, True])
def test_layers_and_headline_say_how_calls_were_timed(tmp_path: Path, eager: bool) -> None:
    """An eager call may have run another strategy."""
    write(tmp_path, "auto", layers(**EAGER if eager else {}))
    write(tmp_path, "auto_h100", layers())
    write(tmp_path, "paper_configs", variants("1B", "train", 20, 30, 16, 25))
    table = figures.layers_of("train")
    times = ["1.25 (dense)", "1.00 (dense)"] if eager else []
    assert cells(table)[0] == ["`real3`", "29", "0.75", "0.50", "**1.50**", *times, "row"]
    assert ("| eager, queued | eager, waited for |" in table) == eager
    assert cells(figures.layers())[0] == ["`real3`", "29", *(["0.75 / 0.50", "**1.50**", *times[:1]] * 2)]
    assert ("; 1.2x and 1.2x in eager calls, queued" in figures.headline()) == eager
    assert (
        "- Models of 1B to 1B with random weights and such sparsity, without graphs: **1.2x to 1.2x**"
        in figures.headline()
    )
    assert (
        "- [Layers on an H200](docs/gpus.md#on-an-h200), version 0.1.2: 1.5x forward and 1.5x in training"
        in figures.headline()
    )
    assert figures.errors().startswith("Errors against float64 are 0.50 to 0.50 times")


def test_a_larger_layer(tmp_path: Path) -> None:
    others = [{"requested": "row"}, {"red": "wrong"}, {"variant": "dense eager"}, {"variant": "train", "ms": None}]
    few = benched(variant="decode", tokens=16)
    write(tmp_path, "large_layer", [*(benched(tokens=16384, **other) for other in [{}, *others]), few])
    table = figures.large_layer().split("\n\n")[0]
    assert table.splitlines()[0] == "| dense / twell, us | forward | 16 tokens |"
    assert cells(table) == [["`topic29`", "750 / 500, **1.50**", "750 / 500, **1.50**"]]


def test_training_steps_on_several_gpus(tmp_path: Path) -> None:
    """A mode that was not measured on four GPUs has empty cells."""

    def rows(modes: list[str], sparse: float) -> list[dict[str, Any]]:
        kinds = [(mode, kind) for mode in modes for kind in ("eager", "compiled")]
        times = {"dense": 300.0, "sparse": sparse}
        return [
            {"mode": mode, "variant": f"{side} {kind}", "red": "", "ms": ms}
            for mode, kind in kinds
            for side, ms in times.items()
        ]

    write(tmp_path, "parallel2", rows(["ddp", "tp"], 200))
    write(tmp_path, "parallel4", rows(["ddp"], 240))
    two, four = "300 / 200, **1.50**", "300 / 240, **1.25**"
    table = figures.several_gpus().split("\n\n")[0]
    assert cells(table) == [["DDP", two, two, four, four], ["tensor parallelism", two, two, "", ""]]


def test_few_tokens(tmp_path: Path) -> None:
    write(tmp_path, "few", [benched(requested="union"), benched()])
    assert cells(figures.few_tokens().split("\n\n")[0]) == [["`topic29`", "750 / 500, **1.50** row"]]


def test_steps_with_more_than_fits(tmp_path: Path) -> None:
    rows = [benched(variant="train"), benched(variant="train_overflow", nnz=919, speedup_dense=0.5)]
    write(tmp_path, "overfull", rows)
    said = "Training steps with 919 non-zeros per token take 2.00 times as long as eager dense ones on an H200."
    assert figures.overfull() == said


def test_the_table_of_the_screen(tmp_path: Path) -> None:
    def row(requested: str, ms: float, strategy: str = "", **more: Any) -> dict[str, Any]:
        return benched(requested=requested, strategy=strategy, ms=ms) | more

    rows = [row("union", 0.5), row("union+screen", 0.4), row("auto", 0.45, "union+screen")]
    # the other side is red
    rows += [row("union", 1.0, variant="train"), row("union+screen", 0.9, variant="train", red="wrong")]
    write(tmp_path, "screen", rows)
    # the machine is made up
    assert figures.screen().endswith("\n\nOn an H200.")
    assert cells(figures.screen().split("\n\n")[0]) == [["`topic29`", "0.50 / 0.40, **0.80** screen"]]
