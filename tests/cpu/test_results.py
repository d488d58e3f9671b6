"""Figures for people come from data: the README's tables are what profiling/readme.py makes of profiling/results."""

import json
import re
import statistics
import sys
from pathlib import Path

import pytest
from twell.strategy import costs, tables

from profiling import figures, held_out, measurements, readme
from profiling.draw.common import loads
from twell.commands import tune


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


def test_the_table_of_auto_at_points_that_it_is_not_fitted_to(root: Path) -> None:
    """The shipped table decides as it did when the points were published; the table is of an H200."""
    rows = loads((root / "profiling/results/held_out.json").read_text())["rows"]
    assert len(rows) >= 100
    losses, graphs = [], []
    for row in rows:
        call = costs.Problem(*(row[name] for name in tune.SIZES))
        if costs.in_one_pass(call):
            # they were measured with the kernels before
            continue
        chosen = costs.decide(call, tune.measured_figures(row), None).strategy
        # of gated layers of up to 1,024 tokens "union" was another kernel, and the table has none
        few = call.gated and not call.training and call.m <= 1024
        names = ("row", "dense") if few else (*tables.STRATEGIES, "dense")
        ms = {name: row[f"{name}_ms"] for name in names if row.get(f"{name}_ms")}
        losses.append(ms[chosen] / min(ms.values()) - 1)
        if row["auto"] not in ms:
            continue
        assert chosen == row["auto"]
        assert losses[-1] <= row["loss"] + 1e-9 if few else losses[-1] == pytest.approx(row["loss"], abs=1e-9)
        if held_out.is_graph(row):
            graphs.append(losses[-1])
            if 33 <= call.m <= 64:
                # such graphs assumed a sparse layer when they were measured
                assert costs.decide_once(call, tables.SHIPPED) == "dense"
                continue
            assert row["graph"] == costs.decide_once(call, tables.SHIPPED)
            graph_loss = ms[row["graph"]] / min(ms.values()) - 1
            assert (
                graph_loss <= row["graph_loss"] + 1e-9
                if few
                else graph_loss == pytest.approx(row["graph_loss"], abs=1e-9)
            )
    assert len(graphs) == 24
    assert max(statistics.mean(losses), statistics.mean(graphs)) < 0.02
    assert sum(loss > 0.06 for loss in losses) <= 10
    assert max(losses) < 0.3
