"""``twell analyze`` on stacked experts: figures against plain loops, the verdict against the costs, refusals."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")

import saved_models
import transformers
from saved_models import run
from test_experts_transformers import model

import twell
from twell.base.activation import Activation
from twell.choose import cards, rates
from twell.commands import analyze
from twell.integrations import experts as stacked
from twell.integrations.analyze import experts, report
from twell.integrations.analyze.experts import STEPS, ExpertsSparsity, Step

TOKENS, LENGTH = 1000, 12


def saved(folder: Path, kind: str = "NemotronH", **changes: Any) -> Path:
    model(kind, vocab_size=288, max_position_embeddings=256, **changes).save_pretrained(folder)
    saved_models.save_tokenizer(folder)
    return folder


def calls_of(folder: Path, words: Path) -> list[tuple[Any, list[Tensor]]]:
    """Each layer of experts of the stock model with x, ids and weights of the text."""
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(words.read_text())["input_ids"][1:]
    sequences = [[0, *tokens[i : i + LENGTH - 1]] for i in range(0, TOKENS, LENGTH - 1)]
    whole, rest = divmod(TOKENS, LENGTH)
    sequences = [*sequences[:whole], sequences[whole][:rest]]
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found: dict[Any, list[list[Tensor]]] = {}
    for module in stock.modules():
        if stacked.is_experts(module):
            module.register_forward_pre_hook(lambda m, given: found.setdefault(m, []).append([*given]))
    with torch.no_grad():
        for sequence in sequences:
            stock(torch.tensor([sequence]))
    return [(m, [torch.cat(parts) for parts in zip(*calls)]) for m, calls in found.items()]


def slow(module: Any, x: Tensor, ids: Tensor) -> dict[str, Any]:
    gate, _ = stacked.projections(module)
    weight = module.up_proj if gate is None else gate
    count, n, _ = weight.shape
    fired = [{e: x[t] @ weight[e].T > 0 for e in ids[t].tolist()} for t in range(len(x))]
    of_expert: list[list[Tensor]] = [[each[e] for each in fired if e in each] for e in range(count)]
    used = [each for each in of_expert if each]
    every = torch.stack([row for each in used for row in each]).double()
    steps = {}
    for size in STEPS:
        # of independent tokens: those of an expert, and of each of its neurons, by their share
        touched = [1 - (1 - len(each) / len(x)) ** size for each in of_expert]
        fires = [1 - (1 - torch.stack(rows).sum(0).double() / len(x)) ** size for rows in used]
        steps[size] = sum(touched), float(torch.stack(fires).sum()) / n / sum(touched)
    return {
        "zeros": 1 - float(every.mean()),
        "used": len(used),
        "steps": steps,
        "sizes": (count, n, x.shape[1], ids.shape[1]),
    }


@pytest.mark.parametrize("kind", ["NemotronH", "Mixtral"])
def test_figures_are_those_of_plain_loops(
    kind: str, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nemotron = kind == "NemotronH"
    folder = saved(tmp_path / "model", kind, **({"moe_latent_size": 16} if nemotron else {"hidden_act": "relu"}))
    file = tmp_path / "a.json"
    options = ("--tokens", TOKENS, "--sequence", LENGTH, "--json", file)
    assert run(analyze, folder, "--text", words, *options) == 0
    printed = capsys.readouterr().out
    data = json.loads(file.read_text())
    # the shared experts of Nemotron are a dense layer
    assert [row["gated"] for row in data["layers"]] == [False] * nemotron
    calls = calls_of(folder, words)
    assert len(data["experts"]) == len(calls) == (1 if nemotron else 2)
    for row, (module, (x, ids, _)) in zip(data["experts"], calls, strict=True):
        expected = slow(module, x, ids)
        steps = expected.pop("steps")
        count, n, k, top = expected.pop("sizes")
        assert [row[name] for name in ("experts", "n", "k", "top", "tokens")] == [count, n, k, top, TOKENS]
        assert row["activation"] == ("squared ReLU" if nemotron else "ReLU")
        # a token near two experts may take another one in a batch
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=0.01), name
        assert {int(size) for size in row["steps"]} == set(steps)
        for size, (touched, union) in steps.items():
            assert list(row["steps"][str(size)].values()) == pytest.approx([touched, union], rel=0.01)
            fired = union if nemotron else 1 - expected["zeros"]
            chosen = "row" if size * top <= (40 if nemotron else 3) * count else "dense"
            seconds = rates.experts_seconds(size * top, touched, fired, n, k, not nemotron)
            (of_step,) = (each for each in row["rows"] if each["sequences"] == size)
            assert of_step["route"] == chosen
            assert of_step["seconds"] == pytest.approx(seconds, rel=0.02)
    *_, before, last = printed.splitlines()
    assert before.startswith("Verdict: ") == nemotron
    assert last.startswith("Verdict: none: experts are too far from what was measured")
    kinds = ("6 non-gated squared ReLU", 3) if nemotron else ("5 gated ReLU", 2)
    assert f"Experts: {kinds[0]}, {kinds[1]} per token, K = {k}, N = {n}\n" in printed


def test_other_experts_are_named_with_the_reason(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "silu", "Mixtral", hidden_act="silu")
    reason = "(MixtralExperts) and 1 more: their activation must be of the ReLU family, got SiLU"
    for option in ((), ("--activation", "relu")):
        assert run(analyze, folder, "--text", words, "--tokens", 300, "--json", tmp_path / "a.json", *option) == 0
        *first, last = capsys.readouterr().out.splitlines()
        assert f"experts that twell does not compute: model.layers.0.mlp.experts {reason}" in first[0]
        assert "No --json: there are no zeros" in first
        assert last == "Verdict: twell does not pay, as it computes no layer of the model"


def test_dense_layers_beside_other_experts(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = saved(tmp_path / "model")
    monkeypatch.setattr(stacked, "why_not", lambda _: "for a test")
    assert run(analyze, folder, "--text", words, "--tokens", 300) == 0
    printed = capsys.readouterr().out
    assert (
        "\nExperts that twell does not compute: model.layers.0.mixer.experts (NemotronHExperts): for a test" in printed
    )
    assert "1 non-gated squared ReLU layer," in printed
    assert "Verdict: none: FFNs" in printed.splitlines()[-1]


def test_experts_in_memory_need_no_layers() -> None:
    made = model("Mixtral", vocab_size=288, max_position_embeddings=256, hidden_act="relu")
    ids = torch.randint(288, (9, 20))
    # no token comes to it
    made.spare = copy.deepcopy(next(filter(stacked.is_experts, made.modules())))
    analysis = twell.analyze(made, [{"input_ids": ids}, {"input_ids": ids}])
    assert not analysis.layers
    assert [each.tokens for each in analysis.experts] == [360, 360]
    assert [set(each.steps) for each in analysis.experts] == [set(STEPS)] * 2
    assert "Experts: 5 gated ReLU, 2 per token" in str(analysis)


def report_of(zeros: float, n: int = 1856, count: int = 128) -> ExpertsSparsity:
    steps = {size: Step(count * (1 - (1 - 6 / count) ** size), 1 - zeros) for size in STEPS}
    sizes = (2688, n, count, 6, 4096)
    return ExpertsSparsity("a", 0, False, Activation("relu2"), *sizes, zeros, count, steps)


def test_the_verdict_follows_the_zeros() -> None:
    def verdict(*each: ExpertsSparsity) -> str:
        return report.predicted([], each, [], cards.SHIPPED).verdict

    sparse, dense, odd = report_of(0.907), dataclasses.replace(report_of(0.0), gated=True), report_of(0.907, 1852)
    line = verdict(sparse, sparse)
    assert line.startswith("Verdict: twell pays on NVIDIA H100 for experts in decoding 1 (0.5")
    assert line.endswith("9.3 % of their neurons fire")
    assert "not in decoding 8, decoding 32, decoding 64, decoding 128 or decoding 256" in verdict(dense)
    assert verdict(odd).startswith("Verdict: twell does not pay on NVIDIA H100 for experts in decoding 1, decoding 8")
    assert any("stays dense: sizes: N must be a" in part for part in experts.tables([odd]))
    assert verdict(dataclasses.replace(sparse, k=200)).startswith(
        "Verdict: far from what was measured (7 times beyond)"
    )
    assert verdict(dataclasses.replace(sparse, k=64)).startswith("Verdict: none: experts")
    # all layers together, by their times
    for size, (_, taken, of_dense) in experts.speeds([sparse, dense]).items():
        each = [one.seconds(size) for one in (sparse, dense)]
        assert taken == pytest.approx(sum(seconds[route] for route, seconds in each))
        assert of_dense == pytest.approx(sum(seconds["dense"] for _, seconds in each))
