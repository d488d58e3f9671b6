"""``profiling.bench model`` on the CPU: models with random weights and saved ones, checks and output."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import twell
from profiling.bench import main, model, models_random
from profiling.bench.models_random import Pattern, parse_sizes
from twell.call import functional

TINY = "2x32x64x2x64"
SIZES = ["--sequence", "64", "--batch", "2", "--micro-batch", "1", "--accumulate", "2", "--rounds", "4"]
CPU = torch.device("cpu")


def bench(out: Path, *words: object) -> tuple[int, dict[str, Any]]:
    code = main(["model", *map(str, words), *SIZES, "--device", "cpu", "--out", str(out)])
    return code, json.loads(out.read_text()) if out.exists() else {"rows": []}


def test_layers_fire_as_many_neurons_as_wanted() -> None:
    """On tokens other than those that set the thresholds."""
    shape = parse_sizes("3x64x256x2x640")
    found = []
    for topic in (Pattern.topic, 0.0):
        drawn = models_random.build(shape, 256, CPU)
        ids = models_random.draw_ids(shape, 16, 256, topic)
        wanted = models_random.draw(drawn, ids, Pattern(8.0, topic=topic))
        found.append(twell.analyze(drawn, [ids]).layers)
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
    assert drawn.state_dict().keys() == stock.state_dict().keys()


def test_rows_of_configurations(tmp_path: Path) -> None:
    """Two configurations, compiled by the backend that runs eagerly."""
    torch._dynamo.reset()
    tiny = ["--config", TINY, "3x32x64x2x64", "--nnz", 4, "--topic", 0.25, "--compile", "eager"]
    code, data = bench(tmp_path / "a.json", *tiny, "--ops", "train", "forward")
    torch._dynamo.reset()
    rows = data["rows"]
    assert code == 0
    expected = [
        (config, op, kind) for config in (TINY, "3x32x64x2x64") for op in ("forward", "train") for kind in model.KINDS
    ]
    assert [(row["config"], row["op"], row["variant"]) for row in rows] == expected
    for row in rows:
        training, layers = row["op"] == "train", 3 if row["config"].startswith("3") else 2
        assert (row["red"], row["tokens"], row["micro_batch"]) == ("", 128, 1 if training else 2)
        assert row["samples"] == 2
        assert row["p10_ms"] <= row["ms"] <= row["p90_ms"]
        assert row["tokens_per_ms"] == pytest.approx(128 / row["ms"])
        assert row["pattern"] == "4 non-zeros wanted, skew 1, dead 0.3, topic 0.25"
        assert len(row["non_zeros"]) == layers
        assert 0 < row["frobenius"] < (0.5 if training else 0.05)
        # "auto" is dense on a CPU
        assert row["strategies"] == {"dense": layers}
        assert row["peak_bytes"] is None
        if row["variant"] == "dense eager":
            assert (row["error"], row["worst"]) == (1, 1)
    assert [(each["config"], each["layers"]) for each in data["models"]] == [(TINY, 2), ("3x32x64x2x64", 3)]


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


@pytest.mark.parametrize(
    ("wrong", "tolerance", "said"),
    [(slice(0, 64), 1.1, "error against fp32 is"), (slice(100, 101), 1e9, "error of a token against fp32 is")],
)
def test_no_speed_on_a_red_row(
    wrong: slice, tolerance: float, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model, "TOLERANCE", tolerance)
    spoil(monkeypatch, wrong)
    code, data = bench(tmp_path / "out.json", "--config", TINY, "--nnz", 4, "--ops", "forward")
    assert code == 1
    dense, sparse = data["rows"]
    assert (dense["red"], dense["ms"] > 0) == ("", True)
    assert sparse["red"].startswith(said)
    assert sparse["ms"] is sparse["speedup"] is sparse["tokens_per_ms"] is None
    assert sparse["error"] > 1


def test_a_wrong_gradient_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spoil(monkeypatch, slice(0, 32))
    code, data = bench(tmp_path / "out.json", "--config", TINY, "--nnz", 4, "--ops", "train")
    assert (code, [bool(row["red"]) for row in data["rows"]]) == (1, [False, True])
