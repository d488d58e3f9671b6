"""``twell.analyze`` and its command: figures against plain loops, times against the rates, verdicts, bad input."""

import copy
import dataclasses
import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

import saved_models
import transformers
from saved_models import parsed, run

import twell
from twell.choose import cards, rates
from twell.commands import analyze, saved_model
from twell.commands.request import RequestError
from twell.integrations import sparsify
from twell.integrations import transformers as integration
from twell.integrations.analyze import calls, figures, report
from twell.integrations.analyze.calls import Call
from twell.integrations.analyze.figures import LayerSparsity
from twell.integrations.analyze.layers import WatchedLayer
from twell.ops import screened

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models.save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    for seed in range(4):
        (folder / f"{seed}.txt").write_text(saved_models.text(400, seed))
    (folder / "image.png").write_bytes(b"\x89PNG\xff\x00")
    (folder / "empty.txt").write_text(" \n")
    (folder / ".hidden").write_text("hidden")
    return folder


# Figures


def slow(pattern: Tensor) -> dict[str, Any]:
    """By loops over a pattern, bool [tokens, N]."""
    counts = [int(row.sum()) for row in pattern]
    tiles = [int(pattern[i : i + 128].any(0).sum()) for i in range(0, len(pattern) - 127, 128)]
    groups = [sum(counts[i : i + 8]) / 8 for i in range(0, len(tiles) * 128, 8)]
    size = min(256, len(groups))
    windows = [max(groups[i : i + size]) for i in range(0, len(groups) - size + 1, size)] if groups else []
    return {
        "tokens": len(pattern),
        "mean": sum(counts) / len(counts),
        "most": max(counts),
        "dead": sum(not bool(column.any()) for column in pattern.T),
        "union": sum(tiles) / len(tiles) / pattern.shape[1] if tiles else None,
        "heaviest": sum(windows) / len(windows) if windows else None,
    }


def assert_figures(layer: LayerSparsity, pattern: Tensor) -> None:
    for name, value in slow(pattern).items():
        assert getattr(layer, name) == (value if value is None else pytest.approx(value, rel=1e-12)), name


def watched(n: int) -> WatchedLayer:
    return WatchedLayer("layers.5.mlp", 5, nn.Identity(), 16, n, True, lambda x, _: x)


@pytest.mark.parametrize(
    ("n", "sizes"), [(600, [1, 100, 300, 255, 7]), (8, [128, 129]), (64, [63]), (40, [3000, 2, 2500])]
)
def test_figures_equal_plain_loops(n: int, sizes: list[int]) -> None:
    """Calls have any number of tokens, some of which fire nothing or everything."""
    torch.manual_seed(n)
    popularity = torch.rand(n) ** 3 * (torch.rand(n) < 0.7)
    pattern = torch.rand(sum(sizes), n) < popularity * torch.rand(sum(sizes), 1)
    pattern[3], pattern[5] = False, popularity > 0
    tally = figures.Tally(n, CPU)
    for part in torch.split(pattern, sizes):
        tally.watch(watched(n), part.float(), part.float())
    assert_figures(tally.report(watched(n)), pattern)
    # tokens in no order fire as many neurons on average, in tiles as many or more
    mixed, union = tally.report(watched(n)).mixed, slow(pattern)["union"]
    assert (mixed is None) == (max(sizes) < 128)
    assert mixed is None or mixed == pytest.approx(union, abs=0.1)


def test_a_tally_counts_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first tokens, as the operators do, in 16 bits whatever the model's dtype, and for the union of all."""
    monkeypatch.setattr(figures, "SCREENED", 384)
    torch.manual_seed(0)
    gate, n = nn.Linear(64, 320), 320
    with torch.no_grad():
        gate.weight.mul_(torch.rand(n, 1) * 4)
        gate.bias.copy_(-4 * torch.rand(n))
    # the last tokens, which the screen does not see, fire many more neurons
    batches = [torch.randn(300, 64), torch.randn(200, 64), 5 * torch.randn(128, 64).abs()]
    at = WatchedLayer("mlp", 0, gate, 64, n, False, lambda x, _: gate(x), linear=gate)
    tally = figures.Tally(n, CPU)
    with torch.no_grad():
        for x in batches:
            tally.watch(at, x, x)
    layer = tally.report(at)
    w, b = gate.weight.detach().bfloat16(), gate.bias.detach().bfloat16()
    seen = [x[:m].bfloat16() for x, m in zip(batches, (256, 128))]
    listed = sum(int(screened.count(x, w, b).sum()) for x in seen)
    firing = int((F.linear(torch.cat(seen), w, b) > 0).view(3, 128, n).any(1).sum())
    assert 0 < firing < listed < 3 * n
    assert layer.union is not None
    expected = layer.union + (1 - layer.union) * (listed - firing) / (3 * n - firing)
    assert layer.candidates == pytest.approx(expected)
    assert firing / (3 * n) < layer.union < expected


class OwnMLP(nn.Module):
    """As nanochat's."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c_proj(F.relu(self.c_fc(x)).square())
        return y


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(64, 32), nn.ModuleList(OwnMLP() for _ in range(2))

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        x: Tensor = scale * self.wte(ids)
        for mlp in self.h:
            x = x + mlp(x)
        return x


class Routed(Own):
    """Its layers get some of the tokens, as experts do."""

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.h[0](self.wte(ids).flatten(0, 1)[::2])
        return y


def t5() -> Any:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def causal(kind: str, **sizes: Any) -> Any:
    common = {"vocab_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 512}
    config = transformers.AutoConfig.for_model(kind, **common, hidden_size=32, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


IDS = torch.randint(1, 64, (3, 90), generator=torch.Generator().manual_seed(1))
MASK = torch.arange(90) < torch.tensor([[90], [41], [1]])
OPT = {"ffn_dim": 128, "word_embed_proj_dim": 32}
PHI = {"intermediate_size": 128, "hidden_act": "relu", "num_key_value_heads": 4, "pad_token_id": 0}
PADDED = {"input_ids": IDS, "attention_mask": MASK.long()}
DECODED = {"input_ids": IDS, "decoder_input_ids": IDS, "decoder_attention_mask": MASK}
# a model, the end of the names of its gates, names=, a batch, and how many of its tokens count, in each layer
MODELS: dict[str, tuple[Any, str, Any, Any, list[int]]] = {
    "own": (Own, "c_fc", ("c_fc", "c_proj"), IDS, [270, 270]),
    "a tuple": (Own, "c_fc", [("c_fc", "c_proj")], (IDS, 0.5), [270, 270]),
    "T5": (t5, ".wi", None, PADDED | {"labels": IDS[:, :40].clone()}, [132, 132, 120, 120]),
    "a decoder's mask": (t5, ".wi", None, DECODED, [270, 270, 132, 132]),
    "OPT": (lambda: causal("opt", **OPT), ".fc1", None, PADDED, [132, 132]),
    "Phi 3": (lambda: causal("phi3", **PHI), "gate_up_proj", None, {"input_ids": IDS}, [270, 270]),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_in_memory(name: str) -> None:
    """Figures are those of gates in float64, before and after ``sparsify_``; the model stays as it is."""
    make, ends, names, batch, counts = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    gates: list[Tensor] = []

    def keep(module: Any, given: Any, _: Any) -> None:
        y = given[0].double() @ module.weight.double().T + (0 if module.bias is None else module.bias.double())
        y = y.chunk(2, -1)[0] if "gate_up" in ends else y
        gates.append((y > 0).flatten(0, -2))

    stock = copy.deepcopy(model).eval()
    for key, module in stock.named_modules():
        if key.endswith(ends):
            module.register_forward_hook(keep)
    with torch.no_grad():
        stock(**batch) if isinstance(batch, dict) else stock(*(batch if isinstance(batch, tuple) else (batch,)))
    modes = [m.training for m in model.modules()]
    analysis = twell.analyze(model, [batch], names=names)
    assert [m.training for m in model.modules()] == modes
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert [layer.tokens for layer in analysis.layers] == counts
    for layer, pattern, tokens in zip(analysis.layers, gates, counts, strict=True):
        assert_figures(layer, pattern[MASK.flatten()] if tokens == int(MASK.sum()) else pattern)
    sparse = twell.sparsify_(model, names=names).eval()
    again = twell.analyze(sparse, [batch])
    for one, other in zip(analysis.layers, again.layers, strict=True):
        assert (one.k, one.n, one.gated, one.activation) == (other.k, other.n, other.gated, other.activation)
        assert other.mean == pytest.approx(one.mean, rel=0.01)
    assert str(analysis).splitlines()[-1] == analysis.verdict


def test_layers_without_tokens_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """As experts that no token of the text is routed to; two stacks are told apart by whole names."""
    layers = {name: nn.ModuleList(twell.nn.SparseMLP(16, 32) for _ in range(2)) for name in ("one", "two")}
    stacks: Any = nn.ModuleDict(layers)
    stacks.forward = lambda x: stacks["one"][0](x) + stacks["two"][0](x) + stacks["two"][1](x)
    found = twell.analyze(stacks, [torch.randn(300, 16)])
    assert [each.name for each in found.layers] == ["one.0", "two.0", "two.1"]
    assert "1 layer got no tokens, the first one.1: left out" in caplog.text
    assert [line.split()[0] for line in str(found).splitlines()[4:7]] == ["one.0", "two.0", "two.1"]


def test_batches_and_layers_that_cannot_be_counted() -> None:
    model = Own()
    with pytest.raises(
        ValueError, match=r'analyze: model must have .*; analyze\(model, names=\("c_fc", "c_proj"\)\) tries'
    ):
        twell.analyze(model, [IDS])
    with pytest.raises(ValueError, match=r"analyze: .*must apply ReLU, got SiLU"):
        twell.analyze(saved_models.build(hidden_act="silu"), [IDS])
    names = ("c_fc", "c_proj")
    with pytest.raises(TypeError, match="a batch must be a tensor, a tuple or a dict, got str"):
        twell.analyze(model, ["text"], names=names)
    with pytest.raises(ValueError, match=r"h\.0 must be called with tokens, got none"):
        twell.analyze(model, [], names=names)
    with torch.no_grad():
        model.h[0].c_proj.weight[0, 0] = math.inf
    with pytest.raises(ValueError, match=r"h\.1: its input is not finite in torch.float32"):
        twell.analyze(model, [IDS], names=names)
    with pytest.raises(ValueError, match="expected the batch's 270 tokens, got 135"):
        twell.analyze(Routed(), [IDS], names=names)
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())


def test_layers_in_e4m3_are_counted_by_the_gates_that_they_compute() -> None:
    model = sparsify.sparsify_(saved_models.build().bfloat16(), strategy="dense")
    plain = twell.analyze(model, [IDS]).layers
    quantised = twell.analyze(twell.quantize_(model), [IDS])
    assert all(layer.float8 for layer in quantised.layers)
    assert [layer.mean for layer in quantised.layers] == pytest.approx([layer.mean for layer in plain], rel=0.05)
    assert not [call for call in quantised.calls if call.kind == "training"]


# Predictions


def layer_of(
    mean: float, union: float | None = None, k: int = 2048, n: int = 5632, gated: bool = True, **more: Any
) -> Any:
    return LayerSparsity("layers.0.mlp", 0, gated, k, n, mean=mean, union=union, mixed=union, **more)


@pytest.mark.parametrize(
    ("k", "n", "mean", "gated"),
    [(2048, 5632, 30.0, True), (896, 4864, 0.5, False), (4096, 14336, 900.0, True), (64, 320, 120.0, False)],
)
def test_times_are_those_of_the_rates(k: int, n: int, mean: float, gated: bool) -> None:
    layer = layer_of(mean, min(1.0, 8 * mean / n), k, n, gated, heaviest=2 * mean, candidates=min(1.0, 9 * mean / n))
    layer = dataclasses.replace(layer, mixed=min(1.0, 16 * mean / n))
    for call in report.calls_of((300, 16384), (1, 64), (16384, 1 << 20)):
        training = call.kind == "training"
        problem = rates.Problem(call.tokens, k, n, gated, training, down_copied=training)
        known = rates.Figures(mean, layer.union, layer.heaviest, layer.candidates)
        if call.kind == "decoding":
            known = rates.Figures(mean, layer.mixed)
        each = calls.predict(layer, call)
        found = rates.seconds(problem, known)
        assert each.seconds | {"dense": 0} == found | {"dense": 0}
        # a GPU at its power limit
        assert 1 <= each.seconds["dense"] / found["dense"] <= calls.SUSTAINED
        assert each.route == rates.decide(problem, known).strategy
        assert each.reason
        assert each.ratio == each.seconds[each.route] / each.seconds["dense"]


def test_reasons_for_dense() -> None:
    for layer, call, reason in (
        (layer_of(2000, 0.99), Call("prefill", 16384), "union would take"),
        (layer_of(140, 0.1), Call("training", 16384), "too near the sparse route's limit, 156"),
        (layer_of(3, 0.1, n=5630), Call("prefill", 16384), "multiple of 8"),
        (layer_of(3, 0.1, k=32768), Call("prefill", 16384), "16384"),
        (layer_of(3, 0.1, reason="not here"), Call("decoding", 1), "not here"),
    ):
        each = calls.predict(layer, call)
        assert (each.route, each.ratio) == ("dense", 1)
        assert reason in each.reason


def test_layers_together_take_the_sum_of_their_times() -> None:
    layers, call = (
        [layer_of(9, 0.1), layer_of(9, 0.1, 4096, 11008), layer_of(9, 0.1, gated=False)],
        Call("prefill", 16384),
    )
    each = [calls.predict(layer, call) for layer in layers]
    expected = sum(p.seconds[p.route] for p in each) / sum(p.seconds["dense"] for p in each)
    assert report.predicted(layers, [], [call], cards.SHIPPED).ratios == {call: pytest.approx(expected)}
    assert min(p.ratio or 1 for p in each) < expected < 1


# figures, and how the verdict begins
VERDICTS = {
    "sparse": ([layer_of(20, 0.05)], "Verdict: twell pays on NVIDIA H200 for FFNs in decoding 1 (0."),
    "dense": ([layer_of(1000, 0.99)], "Verdict: twell does not pay on NVIDIA H200 for FFNs in prefill 16,384"),
    "odd": ([layer_of(2, 0.05, 160, 2048)], "Verdict: far from what was measured (7 times beyond), twell "),
    "small": (
        [layer_of(2, 0.05, 64, 320)],
        "Verdict: none: FFNs are too far from what was measured",
    ),
    "in e4m3": ([layer_of(20, 0.05, float8=True)], "Verdict: twell pays on NVIDIA H200 for FFNs in decoding 1"),
    "small in e4m3": ([layer_of(2, 0.05, 64, 320, float8=True)], "Verdict: none: "),
    "many in e4m3": ([layer_of(2816, 0.99, float8=True)], "Verdict: far from what was measured (4 times beyond)"),
    # they have little of the work
    "one small": ([layer_of(20, 0.05), layer_of(2, 0.05, 64, 320)], "Verdict: twell pays"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict(name: str) -> None:
    layers, expected = VERDICTS[name]
    kinds = report.calls_of(decode=(1,) if name != "dense" else ())
    analysis = report.predicted(layers, [], kinds, cards.SHIPPED)
    assert analysis.verdict.startswith(expected), analysis.verdict
    assert "none" in expected or "predicted for CUDA graphs, where" in analysis.verdict


@pytest.mark.parametrize("call", [Call("decoding", 64), Call("prefill", 16384), Call("training", 16384)])
@pytest.mark.parametrize("shape", [(True, 2048, 5632), (False, 4096, 16384)])
def test_the_most_nonzeros_pay_and_more_do_not(shape: Any, call: Any) -> None:
    gated, k, n = shape
    most = calls.most_nonzeros(shape, call)
    assert 0 < most <= n / 4
    for nonzeros, pays in ((most, True), (2 * most, False)):
        union = 1 - (1 - nonzeros / n) ** 128
        ratio = calls.predict(layer_of(nonzeros, union, k, n, gated), call).ratio
        assert ratio is not None
        assert (ratio * calls.PAYS <= 1) == pays


@pytest.mark.parametrize("first", [True, False])
def test_the_requirement_is_of_the_layers_with_most_work(first: bool) -> None:
    large, small, call = [(True, 2048, 5632)] * 3, [(True, 64, 64)], Call("prefill", 16384)
    shapes = small + large if first else large + small
    *_, last = report.requirement("SiLU", shapes, [call], cards.SHIPPED)
    assert last.startswith("Verdict: twell does not pay on NVIDIA H200 as SiLU makes no zeros; it would with at most ")
    assert f"with at most {calls.most_nonzeros(large[0], call):,} (for prefill 16,384) non-zeros" in last


# The command


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_the_command_reports_the_figures_of_the_stock_model(kind: str, tmp_path: Path, capsys: Any) -> None:
    """Transformers alone runs one file of text, tokenized and cut by hand."""
    folder, document, file = saved_models.save(tmp_path / "model", kind), tmp_path / "document.txt", tmp_path / "a.json"
    document.write_text(saved_models.text(900))
    ids = transformers.AutoTokenizer.from_pretrained(folder)(document.read_text())["input_ids"][1:]
    sequences = torch.tensor([[0, *ids[i : i + 127]] for i in range(0, 5 * 127, 127)])
    model, fired = transformers.AutoModelForCausalLM.from_pretrained(folder), []
    for name, module in model.named_modules():
        if name.endswith(("gate_proj", "fc1")):
            module.register_forward_hook(lambda _, __, y: fired.append((y > 0).flatten(0, -2)))
    with torch.no_grad():
        model(sequences)
    options = ("--tokens", 640, "--sequence", 128, "--batch", 3, "--json", file, "--decode", 1, 64, 1)
    assert run(analyze, folder, "--text", document, *options) == 0
    printed, data = capsys.readouterr().out, json.loads(file.read_text())
    said = (
        f"{'gated' if kind == 'llama' else 'non-gated'} ReLU layers, K = 64, N = 320\nText: 640 tokens of 1 file, 5 seq"
    )
    assert said in printed
    assert printed.splitlines()[-1].startswith("Verdict: none: FFNs are too far from what was measured")
    # each layer's line says what its figures are, and each call's what its rows sum up to
    lines = {cells[0]: cells for line in printed.splitlines() if (cells := line.split())}
    for row, pattern in zip(data["layers"], fired, strict=True):
        expected = slow(pattern)
        assert [row["mean"], row["union"]] == pytest.approx([expected["mean"], expected["union"]], rel=1e-2)
        assert abs(row["dead"] - expected["dead"]) <= 2
        assert float(lines[str(row["number"])][1]) == pytest.approx(row["mean"], abs=0.06)
    kinds = [("decoding", 1), ("decoding", 64), ("prefill", 16384), ("training", 16384)]
    rows = [(i, *kind) for i in range(3) for kind in kinds]
    assert [(row["layer"], row["call"], row["tokens"]) for row in data["rows"]] == rows
    dense = sum(row["seconds"]["dense"] for row in data["rows"] if row["call"] == "training") * 1e6
    assert float(lines["training"][2].replace(",", "")) == pytest.approx(dense, abs=0.06)


def test_another_activation(words: Path, tmp_path: Path, capsys: Any) -> None:
    folder = saved_models.save(tmp_path / "silu", hidden_act="silu")
    assert run(analyze, folder, "--text", words, "--tokens", 300, "--json", tmp_path / "a.json") == 0
    printed = capsys.readouterr().out
    for part in ("No --json: there are no zeros", "layers with SiLU, which makes no zeros"):
        assert part in printed
    assert not list(tmp_path.glob("a.*"))
    assert printed.splitlines()[-1].startswith("Verdict: none: layers are too far from what was")
    for activation, named in (("relu", "ReLU"), ("relu2", "squared ReLU"), ("drelu", "dReLU")):
        assert run(analyze, folder, "--text", words, "--tokens", 300, "--activation", activation) == 0
        printed = capsys.readouterr().out
        assert f"gated {named} layers" in printed
        assert f"{activation} in place of SiLU: figures before any training" in printed


def test_activations_without_a_stock_class_are_read(words: Path, tmp_path: Path, capsys: Any) -> None:
    model = integration.sparsify(saved_models.build())
    for layer in sparsify.layers(model).values():
        layer.activation, layer.threshold = "fatrelu", 0.03125
    folder = tmp_path / "fatrelu"
    model.save_pretrained(folder)
    saved_models.save_tokenizer(folder)
    assert run(analyze, folder, "--text", words, "--tokens", 300) == 0
    assert "3 gated FATReLU (threshold 0.03125) layers" in capsys.readouterr().out
    assert run(analyze, folder, "--text", words, "--tokens", 300, "--activation", "relu") == 0
    assert "relu in place of FATReLU" in capsys.readouterr().out
    config = folder / "config.json"
    config.write_text(config.read_text().replace("hidden_act_param", "other").replace("twell", "others"))
    with pytest.raises(RequestError, match=r"MODEL: expected a model that can be read .* must have its threshold"):
        run(analyze, folder, "--text", words, "--tokens", 300)


def test_a_name_of_the_hub_is_downloaded(llama: Path, words: Path, monkeypatch: Any, capsys: Any) -> None:
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
    assert {name for name, _ in asked} == {"owner/llama"}
    assert "*.safetensors" in asked[0][1]
    assert "*.bin" not in asked[0][1]
    assert "Verdict: " in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(RequestError, match=r"got 'no/network': OSError: cannot reach the Hub"):
        run(analyze, "no/network", "--text", words)


# Text


def read(folder: Path, *options: object, least: int = 1) -> saved_model.Text:
    arguments = parsed(analyze, folder, *options)
    arguments.tokens = arguments.tokens or 65536
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
    assert read(llama, "--text", words) == read(llama, "--text", words)
    text = read(llama, "--text", words, *paths, "--tokens", 10**6)
    assert text.files == 6
    assert 3000 < text.tokens < 10**6


@pytest.mark.parametrize(("byte", "what"), [(b"\xe9", "invalid continuation byte"), (b"\0", "a zero byte")])
def test_text_that_ends_in_other_bytes(llama: Path, tmp_path: Path, byte: bytes, what: str) -> None:
    """An error where the file was named; within a folder other files count."""
    text = saved_models.text(2000).encode()
    file = tmp_path / "late.txt"
    file.write_bytes(text + byte + text)
    with pytest.raises(RequestError, match=rf"UTF-8 text, got '.*late.txt' \({what}\)"):
        run(analyze, llama, "--text", file, "--tokens", "9999999")
    (tmp_path / "more.txt").write_bytes(text)
    assert read(llama, "--text", tmp_path).files == 1


def test_models_that_cannot_be_read(words: Path, tmp_path: Path, llama: Path) -> None:
    from safetensors.torch import load_file, save_file

    gpt2, config = tmp_path / "gpt2", transformers.GPT2Config(vocab_size=288, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(gpt2)
    saved_models.save_tokenizer(gpt2)
    part = Path(shutil.copytree(llama, tmp_path / "part"))
    weights = load_file(part / "model.safetensors")
    del weights["model.layers.1.mlp.gate_proj.weight"]
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    small = saved_models.save(tmp_path / "small", vocab_size=64)
    said = {gpt2: "MODEL", part: r"none for model\.layers\.1\.mlp\.gate_proj", small: "its vocabulary has 64"}
    for folder, message in said.items():
        with pytest.raises(RequestError, match=message):
            run(analyze, folder, "--text", words, "--tokens", 300)


def test_a_missing_extra_is_named(llama: Path, words: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'twell\[hf\]'"):
        run(analyze, llama, "--text", words, "--tokens", 300)


class Masked(nn.Module):
    """A model of one layer, whose tokens may lie otherwise, and with a module that acts where its mode changes."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.embedding, self.mlp, self.swapped = nn.Embedding(9, 16), twell.nn.SparseMLP(16, 64), swapped
        self.changes: list[bool] = []

    def train(self, mode: bool = True) -> Any:
        self.changes.append(mode)
        return super().train(mode)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids)
        return self.mlp(x.transpose(0, 1) if self.swapped else x)


def test_padding_is_left_out_however_the_mask_is_given(caplog: pytest.LogCaptureFixture) -> None:
    ids, mask = torch.ones(4, 64, dtype=torch.long), torch.ones(4, 64, dtype=torch.long)
    mask[1:, 8:] = 0
    for batch in ((ids, mask), {"ids": ids, "attention_mask": mask}):
        model = Masked()
        assert twell.analyze(model, [batch]).layers[0].tokens == 88
        assert twell.analyze(torch.compile(model, backend="eager"), [batch]).layers[0].tokens == 88
        assert model.training
        # what a merged adapter undid, it does again
        assert model.changes[:2] == [False, True]

    class Wrapper(Masked):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return super().forward(*args)

    twell.analyze(Wrapper(), [(ids, mask)])
    assert "a mask of padding counts only where a batch is a dict" in caplog.text
    with pytest.raises(ValueError, match=r"sequences first, got \[64, 4\] tokens for a mask of \[4, 64\]"):
        twell.analyze(Masked(swapped=True), [(ids, mask)])
    with pytest.raises(ValueError, match="must be called with tokens, got none"):
        twell.analyze(Masked(), [(ids, 0 * mask)])
