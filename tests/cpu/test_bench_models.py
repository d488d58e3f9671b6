"""``profiling.bench model`` on the CPU: models with random weights and saved ones, checks and output."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import twell
from profiling.bench import main, models_random, models_run
from profiling.bench.models_random import Pattern, parse_sizes
from profiling.bench.models_run import Settings, Subject
from tests.cpu import saved_models
from twell import functional

TINY = "2x32x64x2x64"
SHAPE = parse_sizes(TINY)
SIZES = ["--sequence", "64", "--batch", "2", "--micro-batch", "1", "--accumulate", "2", "--rounds", "2"]
CPU = torch.device("cpu")


def bench(*arguments: object) -> int:
    return main(["model", *map(str, arguments)])


@pytest.fixture(scope="module")
def subject() -> Subject:
    """A tiny model with drawn weights; float32 once a test has trained it."""
    ids = models_random.draw_ids(SHAPE, 4, 64, 0.5)
    model = models_random.build(SHAPE, 64, CPU)
    models_random.draw(model, ids, Pattern(4.0))
    made = Subject(TINY, model, ids, "drawn")
    made.analyze()
    return made


# Random models


def test_layers_fire_as_many_neurons_as_wanted() -> None:
    """On tokens other than those that set the thresholds."""
    shape = parse_sizes("3x64x256x2x640")
    found = []
    for topic in (Pattern.topic, 0.0):
        model = models_random.build(shape, 256, CPU)
        ids = models_random.draw_ids(shape, 16, 256, topic)
        wanted = models_random.draw(model, ids, Pattern(8.0, topic=topic))
        found.append(twell.analyze(model, [ids]).layers)
        assert sum(wanted) / 3 == pytest.approx(8)
        assert [report.mean for report in found[-1]] == pytest.approx(wanted, rel=0.03)
    for together, alone in zip(*found, strict=True):
        assert together.dead > 0.2 * 256
        assert together.most > 3 * together.mean, "tokens differ"
        # documents share neurons; tokens without topics have larger unions
        assert 0 < together.union < 0.8 * alone.union
    # the paper's layers: no parameter but those of the stock model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2}
    with torch.device("meta"):
        stock = LlamaForCausalLM(LlamaConfig(vocab_size=640, tie_word_embeddings=True, **sizes))
    assert model.state_dict().keys() == stock.state_dict().keys()


# The command


def test_rows_of_configurations(tmp_path: Path) -> None:
    """Two configurations, compiled by the backend that runs eagerly."""
    path = tmp_path / "a.json"
    tiny = ["--config", TINY, "3x32x64x2x64", "--nnz", 4, 5, "--topic", 0.25, "--device", "cpu", "--compile", "eager"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert bench(*tiny, *SIZES, "--ops", "train", "forward", "--json", path) == 0
    # what is compiled serves all layers and configurations: dense and sparse, inference and training
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    torch._dynamo.reset()
    rows = json.loads(path.read_text())["rows"]
    kinds = [f"{kind} {how}" for kind in ("dense", "sparse") for how in ("eager", "compiled")]
    expected = [
        (config, op, kind) for config in (TINY, "3x32x64x2x64") for op in ("forward", "train") for kind in kinds
    ]
    assert [(row["config"], row["op"], row["variant"]) for row in rows] == expected
    for row in rows:
        training, layers = row["op"] == "train", 3 if row["config"].startswith("3") else 2
        assert (row["red"], row["tokens"], row["micro_batch"]) == ("", 128, 1 if training else 2)
        assert row["samples"] == 2
        assert row["p10_ms"] <= row["ms"] <= row["p90_ms"]
        assert row["tokens_per_ms"] == pytest.approx(128 / row["ms"])
        assert row["pattern"] == f"{layers + 2} non-zeros wanted, skew 1, dead 0.3, topic 0.25"
        assert len(row["non_zeros"]) == layers
        assert 0 < row["frobenius"] < (0.5 if training else 0.05)
        # "auto" is dense on a CPU
        assert row["strategies"] == {"dense": layers}
        assert row["mj_per_token"] is row["peak_bytes"] is None
        if row["variant"] == "dense eager":
            assert (row["error"], row["worst"]) == (1, 1)
    for first in range(0, len(rows), 4):
        fastest = min(row["ms"] for row in rows[first : first + 2])
        assert [row["speedup"] * row["ms"] for row in rows[first : first + 4]] == pytest.approx([fastest] * 4)


def test_a_saved_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved_models.save(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(saved_models.text(2000))
    out = tmp_path / "out.json"
    words = ["--text", text, *SIZES, "--ops", "logits", "--device", "cpu", "--json", out]
    assert bench(folder, *words) == 0
    data = json.loads(out.read_text())
    assert [(row["config"], row["op"], row["variant"]) for row in data["rows"]] == [
        ("model", "logits", "dense eager"),
        ("model", "logits", "sparse eager"),
    ]
    assert (data["arguments"]["model"], data["arguments"]["text"]) == ("model", ["text.txt"])
    (model,) = data["models"]
    assert (model["layers"], len(model["non_zeros"])) == (3, 3)
    assert str(tmp_path) not in out.read_text()
    printed = capsys.readouterr().out
    assert "sparse eager" in printed
    assert "non-zeros per token" in printed
    # one without zeros is sent to its training: there is no option --activation
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"relu"', '"silu"'))
    assert bench(folder, *words) == 2
    said = capsys.readouterr().err
    assert "examples/relufy.py" in said
    assert "`twell analyze` says how sparse it must become" in said
    assert "--activation" not in said


# Wrong results


def spoil(monkeypatch: pytest.MonkeyPatch, rows: slice) -> None:
    """Have sparse layers return zeros for some tokens, like an overflow that goes unnoticed."""
    original = functional.run

    def spoiled(function: Any, given: Any, how: Any, *rest: Any) -> Any:
        result: Any = original(function, given, how, *rest)
        if how.strategy == "dense":
            return result
        y, aux = result if isinstance(result, tuple) else (result, None)
        wrong = torch.zeros(y.shape[:-1], dtype=torch.bool).flatten()
        wrong[rows] = True
        y = y.masked_fill(wrong.view(*y.shape[:-1], 1), 0)
        return y if aux is None else (y, aux)

    monkeypatch.setattr(functional, "run", spoiled)


def test_no_speed_on_a_red_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spoil(monkeypatch, slice(0, 64))
    out = tmp_path / "out.json"
    code = bench("--config", TINY, "--nnz", 4, *SIZES, "--ops", "forward", "train", "--device", "cpu", "--json", out)
    assert code == 1
    for row in json.loads(out.read_text())["rows"]:
        assert row["error"] is not None
        if row["variant"].startswith("dense"):
            assert row["red"] == ""
            assert row["ms"] > 0
        else:
            assert "times that of dense eager" in row["red"]
            assert row["ms"] is row["tokens_per_ms"] is row["speedup"] is row["p10_ms"] is None


def test_a_single_wrong_token_is_noticed(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    monkeypatch.setattr(models_run, "TOLERANCE", 1e9)
    monkeypatch.setattr(models_run, "WORST_TOLERANCE", 3.0)
    spoil(monkeypatch, slice(100, 101))
    rows = models_run.run_op(subject, "forward", settings())
    assert [bool(row.red) for row in rows] == [False, True]
    assert rows[1].red.startswith("error of a token")


@pytest.mark.parametrize(("op", "length", "seed"), [("forward", 64, 7), ("train", 8, 4)])
def test_chance_makes_no_row_red(op: str, length: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few tokens that the error of sparse layers is 1.2 times dense's, although no more values are rounded."""
    monkeypatch.setattr(Settings, "kinds", lambda self: [("dense", "dense", False), ("sparse", "row", False)])
    ids = models_random.draw_ids(SHAPE, 4, length, 0.5)
    model = models_random.build(SHAPE, length, CPU)
    models_random.draw(model, ids, Pattern(4.0), seed)
    rows = models_run.run_op(Subject(TINY, model, ids), op, settings())
    # too large for many tokens
    assert rows[1].error is not None
    assert rows[1].error > models_run.TOLERANCE
    assert [row.red for row in rows] == ["", ""]


def settings(**changes: Any) -> Settings:
    given: dict[str, Any] = {"batch": 2, "micro_batch": 2, "accumulate": 1, "rounds": 1, "backend": ""}
    return Settings(**(given | changes))


def test_a_pass_too_large_for_memory_is_red(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    def run_pass(self: models_run.Forward, tokens: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(models_run.Forward, "run_pass", run_pass)
    said = "fewer sequences in a pass may fit in memory (--micro-batch, --batch): OutOfMemory"
    for row in models_run.run_op(subject, "forward", settings()):
        assert (row.red.startswith(said), row.ms) == (True, None)


# Energy and memory


def test_errors_of_gradients() -> None:
    # a large gradient hides no small one, and the vector of a norm is left out
    small, large, norm = torch.ones(2, 2), torch.full((2, 2), 1e6), torch.ones(3)
    found = models_run.errors_of([small * 1.5, large * 0.98, norm * 0], [small, large, norm])
    assert [each.frobenius for each in found] == pytest.approx([0.5, 0.02], rel=1e-4)
    assert models_run.geometric_mean(found) == pytest.approx(0.1, rel=1e-4)
    assert models_run.geometric_mean(models_run.errors_of([small * math.nan], [small])) == math.inf
