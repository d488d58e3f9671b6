"""Figures for people come from data: the README's tables are what profiling/readme.py makes of profiling/results."""

import json
import re
import statistics
import sys
from pathlib import Path

import pytest

from profiling import everything, readme
from profiling import tune as shipped
from twell.choose import cards
from twell.commands import fitting


def test_readme_has_the_figures_of_the_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among them the list of all files of results."""
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
    (made,) = (each for each in everything.ALL if each.name == name)
    assert re.findall(r"--seed (\d+)", " ".join(made.commands)) == [str(run["seed"]) for run in runs]


# the largest error of a prediction in the median and at nine of ten, of routes that take at most 1.3 times the best; of
# points that the rates were not fitted to, 1.25 times that
WITHIN = {
    ("inference", "dense"): (0.04, 0.12),
    ("inference", "row"): (0.09, 0.21),
    ("inference", "union"): (0.06, 0.13),
    ("inference", "union+screen"): (0.07, 0.16),
    ("training", "dense"): (0.09, 0.20),
    ("training", "union"): (0.06, 0.16),
    ("training", "union+screen"): (0.06, 0.16),
    ("e4m3", "dense"): (0.04, 0.10),
    ("e4m3", "row"): (0.07, 0.18),
    ("e4m3", "union"): (0.06, 0.13),
}


@pytest.mark.parametrize("name", ["tuning", "held_out"])
def test_predictions_are_near_what_was_measured(name: str, root: Path) -> None:
    """By the card of the GPU; points that are held out tell where they are of the same kernels."""
    found = shipped.read(root / "profiling" / "results" / f"{name}.json")
    card = cards.shipped(found["machine"].split(" (")[0])
    if f"kernels {card.kernels[:12]}" not in found["machine"]:
        assert name == "held_out"
        pytest.skip("the points are of other kernels than the card")
    rows, errors = fitting.usable(found["rows"]), {}
    for row in rows:
        for route, us in fitting.predicted(row, card).items():
            if row.us[route] <= 1.3 * min(row.us.values()):
                errors.setdefault((fitting.part_of(row.problem), route), []).append(abs(us / row.us[route] - 1))
    for part, each in errors.items():
        median, most = (bound * (1 if name == "tuning" else 1.25) for bound in WITHIN[part])
        assert statistics.median(each) < median, part
        assert sorted(each)[int(0.9 * len(each))] < most, part
    for part in {fitting.part_of(row.problem) for row in rows}:
        losses = [fitting.loss_of(row, card) for row in rows if fitting.part_of(row.problem) == part]
        assert statistics.mean(loss for loss in losses if loss is not None) < 0.01, part
