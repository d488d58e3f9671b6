"""profiling/quality.py: a sweep shows the cost of sparsity and loses no finished run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from profiling import quality, quality_results, trained_runs
from profiling.draw.common import ResultError
from profiling.quality import train
from profiling.quality_results import Result, Run

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

SMALL = (
    "--layers 2 --hidden 32 --intermediate 64 --heads 2 --vocab 300 --sequence 32 --micro-batch 4 --device cpu "
    "--tokens-per-step 256 --steps 30 --lr 0.02 --warmup 3 --l1-warmup 0 --held-out 0.2 --eval-sequences 64 "
    "--log-every 10 --observe-every 2 --dtype float32"
).split()
COEFFICIENTS = (0.0, 0.001, 0.01)
PLAN = (
    "--coefficients 0 0.01 0.001 --repeat-at 0 0.01 --seeds 2 --reinitialize-at 0.01 --sparse-at 0.01 --share 0.1"
).split()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a small model on text that can be learnt."""
    root = tmp_path_factory.mktemp("quality")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijkl", k=5)) for _ in range(40)]
    lines = [" ".join(draw.choices(words, k=6)) for _ in range(20)]
    (root / "text").mkdir()
    for i in range(60):
        (root / "text" / f"{i}.txt").write_text("\n".join(draw.choices(lines, k=25)))
    return [*SMALL, "--text", str(root / "text"), "--cache", str(root / "cache")]


@pytest.fixture(scope="module")
def swept(base: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a complete sweep."""
    out = tmp_path_factory.mktemp("swept") / "quality.json"
    assert quality.main([*base, *PLAN, "--out", str(out)]) == 0
    return out


def found(path: Path) -> dict[Run, Result]:
    return {result.run: result for result in quality_results.results(quality_results.load(path))}


def test_the_file_is_complete(swept: Path) -> None:
    document = json.loads(swept.read_text())
    assert document["machine"].startswith("CPU")
    assert document["arguments"]["steps"] == 30
    assert document["text"]["held_tokens"] > 2000
    # no folder of this machine
    assert str(swept.parent) not in swept.read_text()
    results = found(swept)
    assert set(results) == {
        *(Run(coefficient) for coefficient in COEFFICIENTS),
        Run(activation="silu"),
        Run(0.01, reinitialize=0.1),
        *(Run(coefficient, seed=1) for coefficient in (0.0, 0.01)),
        Run(0.01, ffn="sparse"),
    }
    for run, result in results.items():
        assert not result.red
        assert len(result.blocks) == 16
        assert result.ce == pytest.approx(sum(result.blocks) / 16, rel=1e-5)
        assert result.ce_error == pytest.approx(trained_runs.standard_error(result.blocks), rel=1e-3)
        assert [point["step"] for point in result.curve] == [10, 20, 30]
        # it learns: the first is the mean of ten steps
        assert result.curve[-1]["ce"] < result.curve[0]["ce"] - 0.5
        assert result.ce == pytest.approx(result.curve[-1]["ce"], abs=0.3)
        assert result.tokens_per_s > 0
        assert result.peak_bytes > 0
        assert result.parameters == results[Run()].parameters
        if run.activation == "silu":
            assert (result.l0, result.dead, result.layers) == (None, None, [])
            continue
        assert [layer.neurons for layer in result.layers] == [64, 64]
        assert result.l0 == pytest.approx(sum(layer.l0 for layer in result.layers) / 2, rel=1e-5)
        assert result.dead == pytest.approx(sum(layer.dead for layer in result.layers) / 128, abs=1e-5)
        assert all(layer.l0 <= 64 - layer.dead for layer in result.layers)


def test_non_zeros_fall_as_the_coefficient_rises(swept: Path) -> None:
    results = found(swept)
    l0 = [results[Run(coefficient)].l0 or 0 for coefficient in COEFFICIENTS]
    assert l0[0] > 1.5 * l0[1] > 2 * l0[2] > 0
    dead = [results[Run(coefficient)].dead or 0 for coefficient in COEFFICIENTS]
    assert dead[0] < dead[2]
    assert (results[Run(0.01, reinitialize=0.1)].dead or 0) < dead[2]


def test_held_out_figures_are_those_of_the_whole_text(base: list[str], swept: Path, monkeypatch: Any) -> None:
    """Compared with figures computed by hand for one layer."""
    kept: list[Any] = []
    measure = quality.held_out
    monkeypatch.setattr(quality, "held_out", lambda training: kept.append(training) or measure(training))
    out = swept.with_name("again.json")
    assert (
        quality.main(
            [*base, "--coefficients", "0", "--seeds", "1", "--reinitialize-at", "--sparse-at", "--out", str(out)]
        )
        == 0
    )
    training, result = kept[0], found(out)[Run()]
    assert result.blocks == found(swept)[Run()].blocks
    inputs: list[torch.Tensor] = []
    mlp = training.model.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    with torch.no_grad():
        losses = [training.forward(*training.held.batch(row, 4, training.here.device)) for row in range(0, 64, 4)]
    gates = torch.cat(inputs).flatten(0, -2) @ mlp.gate_proj.weight.t()
    assert result.blocks == pytest.approx([float(loss) for loss in losses], rel=1e-5)
    assert result.layers[1].l0 == pytest.approx(float((gates > 0).sum(1).double().mean()), rel=1e-5)
    assert result.layers[1].dead == int((~(gates > 0).any(0)).sum())


def test_an_interrupted_sweep_keeps_finished_runs(
    base: list[str], swept: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    step, left = train.Training.step, 30 + 10

    def interrupted(self: Any, stopping: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        step(self, stopping)

    command = [*base, "--coefficients", "0", "0.01", "--seeds", "1", "--reinitialize-at", "--sparse-at"]
    command += ["--out", str(tmp_path / "quality.json")]
    monkeypatch.setattr(train.Training, "step", interrupted)
    assert quality.main(command) == 130
    assert set(found(tmp_path / "quality.json")) == {Run()}
    assert quality.main(command) == 0
    results, whole = found(tmp_path / "quality.json"), found(swept)
    assert set(results) == {Run(), Run(0.01), Run(activation="silu")}
    # earlier runs in the process make no difference
    for run, result in results.items():
        assert result.blocks == whole[run].blocks, run
        assert result.layers == whole[run].layers, run


def test_runs_of_other_options_are_not_mixed(base: list[str], swept: Path, capsys: Any) -> None:
    before = swept.read_bytes()
    assert quality.main([*base, *PLAN, "--out", str(swept), "--steps", "31", "--lr", "0.5"]) == 2
    message = capsys.readouterr().err
    assert "differs in steps (30 there, 31 here), lr (0.02 there, 0.5 here)" in message
    assert swept.read_bytes() == before


def test_a_run_that_diverges_is_red_and_the_next_one_runs(base: list[str], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "quality.json"
    alone = ["--seeds", "1", "--reinitialize-at", "--sparse-at"]
    assert quality.main([*base, "--coefficients", "1e38", "0", *alone, "--out", str(out)]) == 0
    results = found(out)
    assert "the loss became" in results[Run(1e38)].red
    assert results[Run()].ce is not None
    document = quality_results.load(out)
    assert [point.name for point in quality_results.points(document)] == ["ReLU", "SiLU"]
    assert "L1 1e38, seed 0: the loss became" in quality_results.notes(document)
    with pytest.raises(ResultError, match="another coefficient"):
        quality_results.shown(document)


def test_table_and_notes(swept: Path, capsys: Any) -> None:
    assert quality.main(["--table", str(swept)]) == 0
    text = capsys.readouterr().out
    results = found(swept)
    seeds = [results[Run(0.01)], results[Run(0.01, seed=1)]]
    bases = [results[Run()], results[Run(seed=1)]]
    mean = sum(result.ce for result in seeds) / 2
    added = sum(mine.ce / theirs.ce - 1 for mine, theirs in zip(seeds, bases)) / 2
    (line,) = [line for line in text.splitlines() if line.startswith("| ReLU | 1e-2 | 2 |")]
    assert f"| {mean:.4f} ± " in line
    assert f"| {100 * added:+.2f} % ± " in line
    assert f"| {100 * sum(result.l0 for result in seeds) / 128:.1f} %" in line
    assert "| ReLU, reinitialised | 1e-2 | 1 |" in text
    assert "| SiLU |  | 1 |" in text
    assert "| the paper's 1.5B | 2e-5 |  |  | +1.9 % | 29 | 0.5 % | over 30 % |" in text
    assert "| non-zeros | L1 | layer 0 | layer 1 |" in text
    assert "L1 1e-2 with sparse kernels" in text
    assert json.loads(swept.read_text())["machine"] in text


def test_what_the_chart_shows(swept: Path) -> None:
    """The drawn numbers, read back from matplotlib's objects."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from profiling.draw.style import LIGHT

    figure = Figure()
    data = quality_results.shown(quality_results.load(swept))
    quality_results.draw(figure, LIGHT, json.loads(json.dumps(data)))
    quality_axes, layers, dead = [axes for part in figure.subfigs for axes in part.axes]
    points = {
        point.coefficient: point
        for point in quality_results.points(quality_results.load(swept))
        if point.name == "ReLU"
    }
    line = next(line for line in quality_axes.lines if len(line.get_xdata()) == 3)
    assert list(line.get_xdata()) == pytest.approx([100 * points[c].l0 / 64 for c in COEFFICIENTS])
    assert list(line.get_ydata()) == pytest.approx([100 * points[c].added for c in COEFFICIENTS])
    assert line.get_ydata()[0] == 0
    assert len(layers.lines) == 3
    assert len(dead.patches) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected --out, --list or --table"),
        (["--out", "x", "--coefficients", "0.1"], "expected 0 among them"),
        (["--out", "x", "--l1", "3"], "--l1: expected no such option, as each run sets it"),
        (["--out", "x", "--checkpoint-every=3"], "runs keep only figures"),
        (["--out", "x", "--coefficients", "-1"], "expected a number of 0 or more"),
        (["--out", "x", "--text", "x", "--no-such", "3"], "unrecognized arguments: --no-such 3"),
        (["--out", "x"], "expected either --text or --dataset"),
    ],
)
def test_options_are_checked(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        quality.main(arguments)
    assert message in capsys.readouterr().err
