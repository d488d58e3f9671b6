"""examples/relufy.py: dense models become sparse, and the comparison with dense is fair."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import relufy  # noqa: E402
from small_runs import weights, write_text  # noqa: E402
from training import RequestError, checkpoint, data, relufied  # noqa: E402
from training.data import Source  # noqa: E402

from twell import recipe  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

COMMON = "--sequence 32 --micro-batch 4 --tokens-per-step 256 --held-out 0.2 --eval-sequences 64 --device cpu".split()
COMMON += ["--dtype", "float32", "--log-every", "10"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def tokenizer(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return data.prepare(Source((text,)), tmp_path_factory.mktemp("cache"), 300, 0.2).tokenizer()


def small(kind: str, end: int) -> Any:
    """A tiny dense model: gated with SiLU or GELU, or a pair with GELU."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
    more = {"intermediate_size": 64, "max_position_embeddings": 64, **sizes, **ends}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **more))
    if kind == "gemma":
        return transformers.GemmaForCausalLM(transformers.GemmaConfig(num_key_value_heads=1, head_dim=16, **more))
    return transformers.PhiForCausalLM(transformers.PhiConfig(**more))


@pytest.fixture(scope="module")
def dense(text: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("dense")

    def folder(kind: str) -> Path:
        path: Path = root / kind
        if not path.exists():
            small(kind, tokenizer.eos_token_id).save_pretrained(path)
            tokenizer.save_pretrained(path)
        return path

    return folder


@pytest.fixture
def run(text: Path, dense: Callable[[str], Path], tmp_path: Path) -> Callable[..., int]:
    def run(kind: str | Path, *more: object, out: str = "out") -> int:
        model = dense(kind) if isinstance(kind, str) else kind
        arguments = [str(model), *COMMON, "--text", str(text), "--cache", str(tmp_path / "cache")]
        return relufy.main([*arguments, "--out", str(tmp_path / out), *map(str, more)])

    return run


def report(out: Path) -> Any:
    return json.loads((out / "report.json").read_text())


# Making a model sparse


@pytest.mark.parametrize(
    ("kind", "activation", "more"),
    [
        ("llama", "fatrelu", ["--distill", "0.5"]),
        ("gemma", "relu2", ["--distill", "0.5"]),
        ("phi", "relu", ["--strategy", "union"]),
    ],
)
def test_dense_models_become_sparse(
    run: Callable[..., int], tmp_path: Path, capsys: Any, kind: str, activation: str, more: list[str]
) -> None:
    arguments = ["--steps", 60, "--lr", 1e-2, "--activation", activation, "--target-nnz", 8, *more]
    assert run(kind, *arguments) == 0
    found = report(tmp_path / "out")
    sparse, long = found["sparse"], found["dense"]
    assert sparse["identity"]["activation"] == activation
    assert [layer["neurons"] for layer in sparse["layers"]] == [64, 64]
    assert 5 < sparse["l0"] < 13
    # both learn
    assert max(sparse["ce"], long["ce"]) < found["original_ce"] - 0.5
    assert long["first_ce"] == found["original_ce"] != sparse["first_ce"]
    assert len(sparse["blocks"]) == len(long["blocks"]) == 16
    printed = capsys.readouterr().out
    assert all(line in printed for line in found["said"])
    assert (activation == "fatrelu") == bool(sparse["threshold"])
    assert found["target_missed"] == (not 7.2 <= sparse["l0"] <= 8.8) == ("warning: the target of 8 non-z" in printed)
    # a divergence that nothing computes is not logged
    assert (" kl " in printed) == ("--distill" in more)
    assert f"dead neurons: {sum(layer['dead'] for layer in sparse['layers'])} of 128, by layer " in printed
    unions = ", ".join(f"{100 * layer['union']:.0f}" for layer in sparse["layers"])
    assert f" %, by layer {unions}\n" in printed

    # what is saved computes what was measured
    config = json.loads((tmp_path / "out" / "final" / "config.json").read_text())
    assert next(config[key] for key in ("hidden_activation", "hidden_act") if config.get(key)) == activation
    assert config.get("hidden_act_param") == sparse["threshold"]
    loaded = relufied.load(tmp_path / "out" / "final").eval()
    layers = recipe.layers(loaded)
    assert {(layer.activation, layer.threshold or None) for layer in layers.values()} == {
        (activation, sparse["threshold"])
    }
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = loaded(input_ids=ids).logits
        if activation in ("relu", "relu2"):
            stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final").eval()
            torch.testing.assert_close(logits, stock(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        else:
            for layer in layers.values():
                layer.threshold = 0
                layer.activation = "relu"
            assert not torch.equal(logits, loaded(input_ids=ids).logits)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "final").eos_token_id is not None


def test_both_read_the_same_text_at_the_same_rates(run: Callable[..., int], monkeypatch: Any, capsys: Any) -> None:
    seen: dict[bool, list[Any]] = {True: [], False: []}
    forward, step = relufy.Further.forward, torch.optim.AdamW.step
    rates: list[float] = []

    def spied(self: Any, inputs: Any, targets: Any) -> Any:
        # training alone in "train", held-out text in "eval"
        seen[self.activation is None].append((self.model.training, int(inputs.sum()), int(targets.sum())))
        return forward(self, inputs, targets)

    def stepped(self: Any, *more: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *more)

    monkeypatch.setattr(relufy.Further, "forward", spied)
    monkeypatch.setattr(torch.optim.AdamW, "step", stepped)
    monkeypatch.setattr(relufy, "MOST_READS", 0)
    assert run("llama", "--steps", 8, "--lr", 1e-2, "--warmup", 2) == 0
    assert "warning: text that is read more than 0 times may be learnt by heart" in capsys.readouterr().out
    assert seen[True] == seen[False]
    assert sum(training for training, _, _ in seen[True]) == 8 * 2
    assert rates[:8] == rates[8:]
    assert rates[0] == pytest.approx(5e-3)
    assert max(rates) == pytest.approx(1e-2)
    assert rates[7] == pytest.approx(0, abs=1e-9)


def test_a_run_that_stops_goes_on(run: Callable[..., int], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    arguments = ["--steps", 12, "--lr", 1e-2, "--target-nnz", 10, "--distill", 0.3, "--checkpoint-every", 5]
    assert run("llama", *arguments, out="whole") == 0
    step, deaths = relufy.Further.step, {("fatrelu", 4), ("fatrelu", 11), (None, 6)}

    def interrupted(self: Any) -> None:
        step(self)
        if (self.activation, self.done) in deaths:
            deaths.discard((self.activation, self.done))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    monkeypatch.setattr(relufy.Further, "step", interrupted)
    spent: dict[str, float] = {}
    for _ in range(3):
        assert run("llama", *arguments) == 128 + signal.SIGTERM
        for path in (tmp_path / "out").glob("*/checkpoints/step-*/state.pt"):
            spent[path.parents[2].name] = torch.load(path, weights_only=True)["spent"]
        # with any global random state
        torch.manual_seed(99)
    assert "dense: stopped at step 6; the same command goes on" in capsys.readouterr().out
    assert run("llama", *arguments) == 0
    mine, whole = weights(tmp_path / "out"), weights(tmp_path / "whole")
    assert all(torch.equal(mine[name], whole[name]) for name in whole)
    a, b = report(tmp_path / "out"), report(tmp_path / "whole")
    for part in ("sparse", "dense"):
        assert a[part]["blocks"] == b[part]["blocks"]
        assert a[part]["first_ce"] == b[part]["first_ce"]
        assert a[part]["threshold"] == b[part]["threshold"]
        curves = [[{**point, "tokens_per_s": 0} for point in each[part]["curve"]] for each in (a, b)]
        assert curves[0] == curves[1]
        assert [point["step"] for point in curves[0]] == [10, 12]
        # what a kept checkpoint counts is part of the whole
        assert all(point["tokens_per_s"] > 0 for point in a[part]["curve"])
        assert a[part]["seconds"] > spent[part] > 0.2
    assert not checkpoint.complete(tmp_path / "out" / "sparse" / "checkpoints")
    # what is finished stays, and is not mixed with another run
    monkeypatch.setattr(relufy.Further, "step", None)
    assert run("llama", *arguments) == 0
    assert run("llama", *arguments, "--distill", 0.5) == 2
    assert "differs in distill (0.3 there, 0.5 here)" in capsys.readouterr().err


def test_results_are_of_the_content_of_model(
    run: Callable[..., int], dense: Callable[[str], Path], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    more = ["--steps", 2, "--no-dense", "--target-nnz", 8]
    shutil.copytree(dense("llama"), tmp_path / "model")
    assert run(tmp_path / "model", *more) == 0
    found, printed = report(tmp_path / "out"), capsys.readouterr().out
    assert found["target_missed"]
    assert found["said"][-1].startswith("warning: the target of 8 non-zeros was missed: ")
    assert found["said"][-1] in printed
    assert "may be learnt by heart" not in printed
    # a copy elsewhere, with other times
    shutil.copytree(tmp_path / "model", tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy" / "model.safetensors", (1, 1))
    with monkeypatch.context() as patched:
        patched.setattr(relufy.Further, "step", None)
        assert run(tmp_path / "copy", *more) == 0
    # one weight differs
    changed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    changed.model.layers[0].mlp.up_proj.weight.data[3, 3] += 1
    changed.save_pretrained(tmp_path / "model")
    assert run(tmp_path / "model", *more) == 2
    was, now = relufied.content(tmp_path / "copy"), relufied.content(tmp_path / "model")
    assert f"differs in content of MODEL ({was} there, {now} here)" in capsys.readouterr().err
    # and the configuration
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    assert run(tmp_path / "copy", *more) == 2


def test_a_sparse_model_goes_on_from_its_threshold(dense: Callable[[str], Path]) -> None:
    """It began as ReLU again, and its sparsity was lost."""
    sparse = relufied.load(dense("llama"))
    relufied.replace(sparse, "fatrelu")
    assert {layer.activation for layer in recipe.layers(sparse).values()} == {"relu"}
    for layer in recipe.layers(sparse).values():
        layer.activation, layer.threshold = "fatrelu", 0.125
    relufied.replace(sparse, "fatrelu", "union")
    settings = {(layer.activation, layer.threshold, layer.strategy) for layer in recipe.layers(sparse).values()}
    assert settings == {("fatrelu", 0.125, "union")}
    relufied.replace(sparse, "relu2")
    assert {(layer.activation, layer.threshold) for layer in recipe.layers(sparse).values()} == {("relu2", 0)}


def test_a_sequence_has_no_more_tokens_than_the_model_has_positions(
    dense: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    """Of learned positions under another key, and of a model without any."""
    shutil.copytree(dense("llama"), tmp_path / "model")
    given = [str(tmp_path / "model"), "--text", str(text), "--out", str(tmp_path / "out")]
    code = transformers.GPTBigCodeConfig
    for config, sequence in (
        (transformers.BloomConfig(), 1024),
        (code(n_positions=4096), 1024),
        (code(n_positions=48), 48),
    ):
        config.save_pretrained(tmp_path / "model")
        choice = relufy.parse(given)
        relufy.check(choice)
        assert choice.sequence == sequence
    with pytest.raises(RequestError, match="--sequence: expected at most the 48 positions of MODEL, got 49"):
        relufy.check(relufy.parse([*given, "--sequence", "49"]))


def test_requests_that_cannot_be_met_are_one_sentence(
    run: Callable[..., int], dense: Callable[[str], Path], text: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run("phi", "--activation", "drelu") == 2
    assert 'must have a gate for activation="drelu"' in capsys.readouterr().err
    assert run("llama", "--target-nnz", 64, "--steps", 2) == 2
    assert "--target-nnz: expected less than the 64 neurons of a layer, got 64" in capsys.readouterr().err
    for wrong, message in (
        (
            [str(tmp_path / "no"), "--text", str(text)],
            f"MODEL: expected a folder or a Hub id, got '{tmp_path}/no' (no s",
        ),
        ([str(dense("llama")), "--text", str(text), "--sequence", "65"], "expected at most the 64 positions of MODEL"),
    ):
        assert relufy.main([*wrong, "--out", str(tmp_path / "new")]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
    bare = shutil.copytree(dense("llama"), tmp_path / "bare")
    for path in bare.glob("*token*"):
        path.unlink()
    assert run(bare) == 2
    said = capsys.readouterr().err
    assert "MODEL: expected a model with a tokenizer, got " in said
    assert not said.strip().endswith(":")
    assert "slow tokenizer" in said
    damaged = shutil.copytree(dense("llama"), tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    assert run(damaged) == 2
    said = capsys.readouterr().err
    assert "MODEL: expected a causal model of transformers, got SafetensorError: " in said
