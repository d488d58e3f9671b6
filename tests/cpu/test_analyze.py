"""``twell analyze``: figures against a slow recomputation, strategies against the table, files, bad input."""

import csv
import dataclasses
import itertools
import math
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import saved_models
from saved_models import parsed, run

import twell
from twell import _sparsify
from twell.choose import rates
from twell.commands import analyze, analyze_plots, prediction, saved_model, sparsity
from twell.commands.analyze import COLUMNS
from twell.commands.prediction import Call, forecast
from twell.commands.request import RequestError
from twell.commands.saved_model import Batch, WatchedLayer
from twell.commands.sparsity import UNIONS, LayerSparsity, Tally
from twell.integrations import transformers as integration

CALLS = [Call(1, False), Call(64, False), Call(16384, False), Call(16384, True)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models.save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models.save(tmp_path_factory.mktemp("opt"), "opt")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    for seed in range(4):
        (folder / f"{seed}.txt").write_text(saved_models.text(400, seed))
    (folder / "image.png").write_bytes(b"\x89PNG\xff\x00")
    (folder / "empty.txt").write_text(" \n")
    (folder / ".hidden").write_text("hidden")
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# Figures


def slow(pattern: np.ndarray, starts: Sequence[int], compression: int) -> dict[str, Any]:
    tokens, n = pattern.shape
    counts = [int(row.sum()) for row in pattern]
    capacity = 256 // compression - 1
    tiles = [int(row[i : i + 256].sum()) for row in pattern for i in range(0, n, 256)]
    unions = {}
    for size in UNIONS:
        blocks = [pattern[i : i + size].any(0).sum() for i in range(0, tokens - size + 1, size)]
        if blocks:
            unions[size] = sum(map(int, blocks)) / (len(blocks) * n)
    popularity = sorted((int(column.sum()) for column in pattern.T), reverse=True)
    return {
        "tokens": tokens,
        "mean": sum(counts) / tokens,
        "p50": int(np.quantile(counts, 0.5, method="inverted_cdf")),
        "p99": int(np.quantile(counts, 0.99, method="inverted_cdf")),
        "most": max(counts),
        "first": sum(counts[i] for i in starts) / max(len(starts), 1),
        "heavy": sum(count > 128 for count in counts) / tokens,
        "heavy_share": sum(count > n / 36 for count in counts) / tokens,
        "overflowing": sum(tile > capacity for tile in tiles) / len(tiles),
        "dead": sum(count == 0 for count in popularity),
        "unions": unions,
        "hottest": {h: sum(popularity[:h]) / max(sum(popularity), 1) for h in (64, 256, 1024)},
    }


def layer_of(n: int, compression: int = 8, k: int = 16) -> WatchedLayer:
    linear = nn.Linear(k, n, device="meta")
    return WatchedLayer("layers.5.mlp", 5, nn.Identity(), linear, True, compression)


def assert_report(report: LayerSparsity, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert getattr(report, name) == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize(
    ("n", "sizes", "compression"),
    [(600, [1, 100, 300, 255, 7], 2), (256, [63], 4), (8, [128, 129], 8), (1280, [1024], 8)],
)
def test_figures_equal_plain_loops(n: int, sizes: list[int], compression: int) -> None:
    """Calls have any number of tokens, N is no multiple of a tile, some tokens fire nothing or everything."""
    torch.manual_seed(n)
    popularity = torch.rand(n) ** 3 * (torch.rand(n) < 0.7)
    pattern = torch.rand(sum(sizes), n) < popularity * torch.rand(sum(sizes), 1)
    pattern[3] = False
    pattern[min(5, len(pattern) - 1)] = popularity > 0
    first = torch.rand(sum(sizes)) < 0.05
    tally = Tally(n, compression, torch.device("cpu"))
    for part, starts in zip(torch.split(pattern, sizes), torch.split(first, sizes), strict=True):
        tally.add(part, starts)
    report = tally.report(layer_of(n, compression))
    assert_report(report, slow(pattern.numpy(), first.nonzero().flatten().tolist(), compression))
    assert (report.k, report.n, report.number, report.name) == (16, n, 5, "layers.5.mlp")


@pytest.mark.parametrize("value", [False, True])
def test_figures_hold_for_layers_that_fire_nothing_or_everything(value: bool) -> None:
    tally = Tally(300, 8, torch.device("cpu"))
    tally.add(torch.full((40, 300), value), torch.zeros(40, dtype=torch.bool))
    report = tally.report(layer_of(300))
    assert_report(report, slow(np.full((40, 300), value), [], 8))
    assert report.figures == rates.Figures(300.0 * value, None)


def recorded_inputs(model: nn.Module, ids: Tensor) -> list[Tensor]:
    inputs: list[Tensor] = []
    handles = [
        module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, -2)))
        for name, module in model.named_modules()
        if name.endswith((".mlp", ".fc1"))
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return inputs


def test_padding_is_left_out() -> None:
    model = _sparsify.sparsify_(saved_models.build(), strategy="dense")
    ids = torch.randint(288, (3, 96))
    mask = torch.arange(96) < torch.tensor([[96], [40], [1]])
    reports = [sparsity.analyze(model, [Batch(ids.where(mask, fill), mask)]) for fill in (0, 7)]
    assert reports[0] == reports[1]
    assert {report.tokens for report in reports[0]} == {137}
    alone = [Batch(row[None, :length], mask[:1, :length]) for row, length in zip(ids, (96, 40, 1), strict=True)]
    for padded, single in zip(reports[0], sparsity.analyze(model, alone), strict=True):
        assert padded.mean == pytest.approx(single.mean, rel=1e-3)
        assert padded.first == pytest.approx(single.first, abs=0.5)
        assert padded.unions == pytest.approx(single.unions, rel=1e-2)
        assert set(padded.unions) == {16, 64, 128}
    # the first token with padding to the left
    mask = torch.arange(96) >= torch.tensor([[0], [12], [0]])
    seen: list[Tensor] = []
    watched = saved_model.layers(model)[:1]
    saved_model.observe(model, watched, [Batch(ids, mask)], lambda i, x, first: seen.append(first))
    assert seen[0].nonzero().flatten().tolist() == [0, 96, 180]


def test_what_cannot_be_reported_is_refused() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 16)
            self.mlp = twell.nn.SparseGatedMLP(16, 32, strategy="dense")

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.mlp(self.embed(ids)[:, ::2])
            return y

    ids = torch.zeros(2, 6, dtype=torch.long)
    batches = [Batch(ids, ids == 0)]
    with pytest.raises(ValueError, match="expected the batch's 12 tokens, got 6"):
        sparsity.analyze(Routed(), batches)
    model = saved_models.build()
    with pytest.raises(ValueError, match="0 layers"):
        sparsity.analyze(model, batches)
    _sparsify.sparsify_(model, strategy="dense")
    with pytest.raises(ValueError, match="0 tokens"):
        sparsity.analyze(model, [])
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.inf
    ids = torch.randint(288, (1, 256))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp: its input is not finite in torch.float32"):
        sparsity.analyze(model, [Batch(ids, ids >= 0)])
    assert all(not module._forward_pre_hooks for module in model.modules())


# Strategies


def report_of(mean: float, union: float | None, k: int = 2048, n: int = 5632, gated: bool = True, **more: Any) -> Any:
    figures: dict[str, Any] = {
        **dict.fromkeys(("p50", "p99", "most", "dead"), int(mean)),
        **dict.fromkeys(("first", "heavy", "heavy_share", "overflowing"), 0.0),
        "hottest": dict.fromkeys((64, 256, 1024), 0.5),
        "unions": {} if union is None else {64: union, 128: union},
        "name": "layers.0.mlp",
        "number": 0,
        "compression": 8,
        "tokens": 4096,
        **more,
    }
    return LayerSparsity(gated=gated, k=k, n=n, mean=mean, **figures)


@pytest.mark.parametrize(
    ("k", "n", "mean", "gated"),
    [(2048, 5632, 30.0, True), (896, 4864, 0.5, False), (4096, 14336, 900.0, True), (64, 320, 120.0, False)],
)
def test_strategies_are_those_of_the_table(k: int, n: int, mean: float, gated: bool) -> None:
    report = report_of(mean, min(1.0, 8 * mean / n), k, n, gated)
    for call in [*CALLS, Call(300, False), Call(1 << 20, True)]:
        # in training the layout is the user's, by default that of nn.Linear
        problem = rates.Problem(call.tokens, k, n, gated, call.training, down_copied=call.training)
        decision = rates.decide(problem, report.figures, None)
        strategy, share = decision.strategy, decision.costs[decision.strategy]
        each = prediction.predict(report, call)
        assert each.strategy == strategy
        assert each.speedup == pytest.approx(1 / share)
        assert each.speedup >= 1 or each.strategy == "dense"
        assert each.reason


def test_each_strategy_has_its_reason() -> None:
    assert prediction.predict(report_of(30, 0.2), CALLS[3]).strategy == "union"
    losing = prediction.predict(report_of(900, 0.95), CALLS[2])
    assert (losing.strategy, losing.speedup) == ("dense", 1.0)
    assert "row would take" in losing.reason
    assert "union would take" in losing.reason
    full = prediction.predict(report_of(140, 0.1), CALLS[3])
    assert full.strategy == "dense"
    assert "too near the sparse route's limit, 156" in full.reason
    few = dataclasses.replace(rates.SHIPPED, costs={(True, False, 2048, 5632): {64: {"union": (0.5, 0.0, 0.0, 0.0)}}})
    unknown = prediction.predict(report_of(3, 0.1, gated=False), Call(40, True), few)
    assert unknown.reason == "no sparse kernel was measured for training on 40 tokens"
    odd = prediction.predict(report_of(3, 0.1, n=5630), CALLS[2])
    assert odd.strategy == "dense"
    assert "multiple of 8" in odd.reason
    assert "16384" in prediction.predict(report_of(3, 0.1, k=32768), CALLS[2]).reason
    # sizes far from measured ones, the last with as many weights as a measured layer, in another shape
    for k, n, far in ((1536, 4608, False), (256, 1024, True), (512, 22528, True)):
        assert prediction.predict(report_of(9, 0.1, k, n), CALLS[2]).far == far


def test_speed_of_all_layers_is_that_of_their_times() -> None:
    reports = [report_of(9, 0.1), report_of(9, 0.1, 4096, 11008), report_of(9, 0.1, gated=False)]
    predictions = [prediction.predict(report, CALLS[2]) for report in reports]
    times = [3 * 2048 * 5632, 3 * 4096 * 11008, 2 * 2048 * 5632]
    expected = sum(times) / sum(time / each.speedup for time, each in zip(times, predictions, strict=True))
    assert prediction.speedup(reports, predictions) == pytest.approx(expected)
    assert 1 < expected < max(each.speedup for each in predictions)


# The command


def test_command_reports_every_layer(
    llama: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "layers.csv"
    options = ("--text", words, "--tokens", 600, "--sequence", 100, "--csv", table)
    assert run(analyze, llama, *options, "--tokens-per-call", 1, 64, 16384, 1) == 0
    printed = capsys.readouterr().out
    for part in ("3 ReLU FFN layers", "K = 64, N = 320", "600 tokens", "6 sequences", "union", "hottest", "tiles > 31"):
        assert part in printed
    assert "int8 screen: " in printed
    assert re.search(r"dense computes gate and up in two products; `twell\n  serve-check` takes", printed)
    for part in ("FFNs 1.", "Mean over layers:", "H200", "Far from all measured layers", "training on 16,384 tokens"):
        assert part in printed
    rows = rows_of(table)
    keys = ["m1", "m64", "m16384", "train16384"]
    expected = [name for name in COLUMNS if not name.endswith("_CALL")]
    per_call = [name for name in COLUMNS if name.endswith("_CALL")]
    expected += [name.replace("CALL", key) for key in keys for name in per_call]
    assert list(rows[0]) == expected
    assert [row["layer"] for row in rows] == ["0", "1", "2"]
    for row in rows:
        assert (row["name"], row["kind"]) == (f"model.layers.{row['layer']}.mlp", "gated")
        assert (row["k"], row["n"], row["tokens"], row["compression"]) == ("64", "320", "600", "8")
        assert 0 < float(row["union_64"]) <= float(row["union_128"]) <= 1 - int(row["dead"]) / 320
        assert int(row["p50"]) <= int(row["p99"]) <= int(row["max"])
        # each layer's line says what its row says
        lines = [line.split() for line in printed.splitlines() if line.split()[:1] == [row["layer"]]]
        assert [float(lines[0][1]), int(lines[0][2])] == [pytest.approx(float(row["mean"]), abs=0.06), int(row["p50"])]
        assert lines[1][1:3] == [row["strategy_m1"], f"{float(row['speedup_m1']):.2f}x"]
        figures = rates.Figures(float(row["mean"]), float(row["union_128"]), None, float(row["candidates"]))
        for key, call in zip(keys, CALLS, strict=True):
            decision = rates.decide(rates.Problem(call.tokens, 64, 320, True, call.training), figures, None)
            assert row[f"strategy_{key}"] == decision.strategy
            assert float(row[f"speedup_{key}"]) == pytest.approx(1 / decision.costs[decision.strategy])


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_figures_of_the_command_are_those_of_the_stock_model(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers alone runs one file of text, tokenized and cut by hand."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = request.getfixturevalue(kind)
    document = tmp_path / "document.txt"
    document.write_text(saved_models.text(900))
    ids = AutoTokenizer.from_pretrained(folder)(document.read_text())["input_ids"][1:]
    sequences = torch.tensor([[0, *ids[i : i + 127]] for i in range(0, 5 * 127, 127)])
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = recorded_inputs(model, sequences)
    projections = [module for name, module in model.named_modules() if name.endswith(("gate_proj", "fc1"))]
    table = tmp_path / "layers.csv"
    options = ("--tokens", 640, "--sequence", 128, "--batch", 3, "--compression", 2, "--csv", table)
    run(analyze, folder, "--text", document, *options)
    for row, x, projection in zip(rows_of(table), inputs, projections, strict=True):
        expected = slow((projection(x) > 0).numpy(force=True), range(0, 640, 128), 2)
        assert float(row["mean"]) == pytest.approx(expected["mean"], rel=1e-3)
        assert float(row["first_token"]) == pytest.approx(expected["first"], abs=0.5)
        assert abs(int(row["dead"]) - expected["dead"]) <= 2
        for size in UNIONS:
            assert float(row[f"union_{size}"]) == pytest.approx(expected["unions"][size], rel=1e-2)
        assert (row["n"], row["compression"]) == ("320", "2")
        assert row["kind"] == ("non-gated" if kind == "opt" else "gated")
        assert row["name"].startswith("model.decoder.layers." if kind == "opt" else "model.layers.")
        assert row["why_m1"].startswith("so few tokens take one pass over the weights")
    assert ("non-gated, K = 64, N = 320" in capsys.readouterr().out) == (kind == "opt")


def test_another_activation(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved_models.save(tmp_path / "silu", hidden_act="silu")
    # an error stood in place of the answer where a file was asked for
    files = ("--csv", tmp_path / "a.csv", "--plot", tmp_path / "a.png")
    assert run(analyze, folder, "--text", words, "--tokens", 300, *files) == 0
    printed = capsys.readouterr().out
    for part in (
        "No chart: there are no zeros",
        "No CSV: there are no zeros",
        "FFN layers with SiLU, which makes no zeros",
        "it takes FATReLU, ReLU",
        "`twell analyze --activation relu` shows",
        "Far from all measured layers: a gated layer with K = 64, N = 320; the nearest has",
    ):
        assert part in printed
    assert not list(tmp_path.glob("a.*"))
    assert printed.splitlines()[-1].startswith("Verdict: none, as layers with K = 64, N = 320 are too far from all ")
    for activation, named in (("relu", "ReLU"), ("relu2", "squared ReLU"), ("drelu", "dReLU")):
        assert run(analyze, folder, "--text", words, "--tokens", 300, "--activation", activation) == 0
        printed = capsys.readouterr().out
        assert f"\n{named} in place of SiLU" in printed
        assert f"figures before any training with {named}" in printed


def test_weights_that_are_missing_are_an_error(words: Path, tmp_path: Path, llama: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "part"
    shutil.copytree(llama, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.gate_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"none for model\.layers\.1\.mlp\.gate_proj\.weight"):
        run(analyze, folder, "--text", words, "--tokens", 300)


def test_activations_without_a_stock_class_are_read(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = integration.sparsify(saved_models.build())
    for layer in _sparsify.layers(model).values():
        layer.activation, layer.threshold = "fatrelu", 0.03125
    integration.name_activation(model)
    folder, file = tmp_path / "fatrelu", tmp_path / "a.csv"
    model.save_pretrained(folder)
    saved_models.save_tokenizer(folder)
    assert run(analyze, folder, "--text", words, "--tokens", 300, "--csv", file) == 0
    assert "3 FATReLU (threshold 0.03125) FFN layers" in capsys.readouterr().out
    assert {(row["activation"], row["threshold"]) for row in rows_of(file)} == {("fatrelu", "0.03125")}
    assert run(analyze, folder, "--text", words, "--tokens", 300, "--activation", "relu") == 0
    assert "ReLU in place of FATReLU" in capsys.readouterr().out
    config = folder / "config.json"
    config.write_text(config.read_text().replace("hidden_act_param", "other"))
    with pytest.raises(RequestError, match=r"MODEL: expected a model that can be read .* must have its threshold"):
        run(analyze, folder, "--text", words, "--tokens", 300)


def test_the_verdict_names_calls_gpu_and_figures() -> None:
    few, many = (report_of(mean, min(1.0, 8 * mean / 5632)) for mean in (20, 2000))
    odd, tiny = report_of(2, 0.05, 448, 2048), report_of(2, 0.05, 64, 320)
    calls = [Call(1, False), Call(16384, False), Call(16384, True)]

    def verdict(*reports: LayerSparsity, was: str = "") -> str:
        return analyze.verdict(reports, forecast(reports, calls, rates.SHIPPED), 65536, was)

    assert re.match(
        r"Verdict: twell pays on NVIDIA H200 for the FFNs with 1 token in CUDA graphs \(\d\.\d\dx as fast\), "
        r"16,384 tokens .* from 20.0 non-zeros per token \(.*\) on 65,536 tokens and layer times of 20",
        verdict(few),
    )
    line = verdict(many)
    assert re.match(
        r"Verdict: twell pays on NVIDIA H200 for the FFNs with 1 token in CUDA graphs \(1\.\d\dx as fast\), "
        r"not for 16,384 tokens or training",
        line,
    )
    assert "far" not in line
    assert verdict(odd).startswith("Verdict: by the nearest measured layer, which is far from this model's, twell ")
    assert verdict(tiny).startswith("Verdict: none, as layers with K = 64, N = 320 are too far from all measured ones")
    assert "; before any training with ReLU in place of SiLU, from 20.0 non-zeros" in verdict(few, was="SiLU")
    # they have little of the work
    assert "twell pays" in verdict(few, tiny)


@pytest.mark.parametrize("call", [Call(1, False), Call(16384, False), Call(16384, True)])
@pytest.mark.parametrize("shape", [(True, 2048, 5632), (False, 4096, 16384)])
def test_the_most_nonzeros_pay_and_more_do_not(shape: Any, call: Any) -> None:
    gated, k, n = shape
    most = prediction.most_nonzeros(shape, call)
    assert 0 < most <= n / 4
    # for one token the promise ends before the gain
    for nonzeros, pays in ((most, True), *(((2 * most, False),) if call.tokens > 1 else ())):
        figures = rates.Figures(nonzeros, 1 - (1 - nonzeros / n) ** 128)
        decision = rates.decide(rates.Problem(call.tokens, k, n, gated, call.training), figures, None)
        assert (decision.costs[decision.strategy] * prediction.PAYS <= 1) == pays


def test_a_name_of_the_hub_is_downloaded(
    llama: Path, words: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        assert "*/*" in ignore_patterns
        if name == "no/network":
            raise OSError("cannot reach the Hub")
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert run(analyze, "owner/llama", "--text", words, "--tokens", 300) == 0
    # pickled weights are downloaded only where there are no others
    assert [name for name, _ in asked] == ["owner/llama"]
    assert "*.safetensors" in asked[0][1]
    assert "Verdict: " in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(RequestError, match=r"got 'no/network': OSError: cannot reach the Hub"):
        run(analyze, "no/network", "--text", words)


# Text


def read(folder: Path, *options: object, least: int = 1) -> saved_model.Text:
    arguments = parsed(analyze, folder, *options)
    return saved_model.read(saved_model.load(arguments), arguments, least)


def test_sequences_begin_as_the_tokenizer_begins(llama: Path, words: Path, tmp_path: Path) -> None:
    text = read(llama, "--text", words, "--tokens", 1000, "--sequence", 64)
    assert text.tokens == 1000
    assert all(sequence[0] == 0 for sequence in text.sequences)
    assert {len(sequence) for sequence in text.sequences[:-1]} == {64}
    # a document begins with the token, too, once
    assert sum(sequence[1:].count(0) for sequence in text.sequences) == text.files - 1
    assert all(a or b for sequence in text.sequences for a, b in itertools.pairwise(sequence))
    plain = read(saved_models.save(tmp_path / "plain", bos=False), "--text", words, "--tokens", 1000).sequences
    assert 0 not in itertools.chain(*plain)
    # as long as the model allows
    assert len(plain[0]) == 256


def test_text_is_read_in_an_order_of_its_own_but_the_same(llama: Path, words: Path) -> None:
    paths = [words / "3.txt", words / "1.txt"]
    assert list(saved_model._files(paths)) == [(path, False) for path in paths]
    shuffled = list(saved_model._files([words]))
    assert shuffled == list(saved_model._files([words]))
    assert {path.name for path, within in shuffled if within} == {"0.txt", "1.txt", "2.txt", "3.txt"}
    text = read(llama, "--text", words, *paths, "--tokens", 10**6)
    assert text.files == 6
    assert 3000 < text.tokens < 10**6


def test_long_files_are_read_a_piece_at_a_time(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_model, "_PIECE", 64)
    path = tmp_path / "long.txt"
    path.write_text(saved_models.text(2000))
    text = read(llama, "--text", path, "--tokens", 10**6, "--sequence", 256)
    assert sum(sequence.count(0) for sequence in text.sequences) == len(text.sequences)
    tokenizer = saved_model.load(parsed(analyze, llama, "--text", path)).tokenizer
    assert tokenizer.decode([token for sequence in text.sequences for token in sequence[1:]]) == path.read_text()


# Bad input


@pytest.mark.parametrize(("byte", "what"), [(b"\xe9", "invalid continuation byte"), (b"\0", "a zero byte")])
def test_text_that_ends_in_other_bytes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte: bytes, what: str
) -> None:
    """An error where the file was named; within a folder a warning, and other files count."""
    monkeypatch.setattr(saved_model, "_PIECE", 1 << 14)
    words = saved_models.text(16000).encode()
    file = tmp_path / "late.txt"
    file.write_bytes(words + byte + words)
    whole = len(words) // (1 << 14) << 14
    with pytest.raises(RequestError, match=rf"UTF-8 text, got '.*late.txt' \({what} after {whole:,} characters"):
        run(analyze, llama, "--text", file, "--tokens", "9999999")
    (tmp_path / "more.txt").write_bytes(words)
    found = list(saved_model._files([tmp_path]))
    assert sorted(path.name for path, _ in found) == ["late.txt", "more.txt"]
    assert all(within for _, within in found)


@pytest.mark.parametrize("first", [True, False])
def test_the_verdict_on_other_activations_is_of_the_layers_with_most_work(first: bool, tmp_path: Path) -> None:
    large, small = [(True, 2048, 5632)] * 3, [(True, 64, 64)]
    model = saved_model.WithoutZeros("", tmp_path, "SiLU", small + large if first else large + small)
    table = rates.in_use(torch.device("cpu"))
    *_, last = analyze.without_zeros(model, prediction.requirement(model.shapes, [Call(1, False)], table))
    assert re.match(
        r"Verdict: twell does not pay on NVIDIA H200 as SiLU makes no zeros; .*; from layer times of 20", last
    )
    most = prediction.most_nonzeros(large[0], Call(1, False), table)
    assert f"of at most {most:,} (" in last
    assert "in the gated layers with K = 2,048, N = 5,632, which have most of the work" in last


def test_models_of_another_kind_or_tokenizer(words: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=288, n_embd=32, n_layer=1, n_head=2)).save_pretrained(folder)
    saved_models.save_tokenizer(folder)
    with pytest.raises(RequestError, match="MODEL"):
        run(analyze, folder, "--text", words, "--tokens", 300)
    folder = saved_models.save(tmp_path / "small", vocab_size=64)
    with pytest.raises(RequestError, match="its vocabulary has 64"):
        run(analyze, folder, "--text", words, "--tokens", 300)


@pytest.mark.parametrize(("missing", "extra"), [("transformers", "hf"), ("matplotlib.figure", "plots")])
def test_missing_extras_are_named(
    llama: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    chart = ("--plot", tmp_path / "a.png") if extra == "plots" else ()
    with pytest.raises(ImportError, match=rf"pip install 'twell\[{extra}\]'"):
        run(analyze, llama, "--text", words, "--tokens", 300, *chart)


def test_chart_shows_many_layers(tmp_path: Path) -> None:
    """Layers with an unknown union and layers that fire nothing have a place in it too."""
    pytest.importorskip("matplotlib")
    reports = [report_of(0 if i == 3 else i, None if i % 2 else 0.3, number=i) for i in range(40)]
    predictions = [[prediction.predict(report, call) for call in CALLS] for report in reports]
    analyze_plots.save(tmp_path / "a.PNG", reports, predictions, "forty")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")
