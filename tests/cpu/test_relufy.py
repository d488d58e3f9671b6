"""examples/relufy.py and profiling/relufy.py: dense models become sparse, and the comparison with dense is fair."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import relufy  # noqa: E402
from profiling.relufy_results import Run  # noqa: E402
from small_runs import weights, write_text  # noqa: E402
from training import RequestError, checkpoint, data, model, options, relufied  # noqa: E402
from training import report as training_report  # noqa: E402
from training.data import Source  # noqa: E402

from profiling import relufy as evidence  # noqa: E402
from profiling import relufy_results  # noqa: E402
from profiling.bench import models as bench_models  # noqa: E402
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
    """The folder of a dense model by its kind."""
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
    def run(kind: str, *more: object, out: str = "out") -> int:
        arguments = [str(dense(kind)), *COMMON, "--text", str(text), "--cache", str(tmp_path / "cache")]
        return relufy.main([*arguments, "--out", str(tmp_path / out), *map(str, more)])

    return run


def report(out: Path) -> Any:
    return json.loads((out / "report.json").read_text())


# Making a model sparse


@pytest.mark.parametrize(
    ("kind", "activation", "more"),
    [
        ("llama", "fatrelu", ["--distill", "0.5", "--sharing", "0.5"]),
        ("llama", "drelu", []),
        ("phi", "fatrelu", []),
        ("gemma", "relu2", ["--distill", "0.5"]),
        ("phi", "relu", ["--strategy", "union"]),
        ("phi", "relu2", []),
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


def test_both_read_the_same_text_at_the_same_rates(run: Callable[..., int], tmp_path: Path, monkeypatch: Any) -> None:
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
    assert run("llama", "--steps", 8, "--lr", 1e-2, "--warmup", 2) == 0
    assert seen[True] == seen[False]
    assert sum(training for training, _, _ in seen[True]) == 8 * 2
    assert rates[:8] == rates[8:]
    assert rates[0] == pytest.approx(5e-3)
    assert max(rates) == pytest.approx(1e-2)
    assert rates[7] == pytest.approx(0, abs=1e-9)


def test_distillation_is_the_divergence_from_the_original() -> None:
    logits, theirs = torch.randn(2, 3, 5, 7).unbind()
    targets = torch.randint(0, 7, (3, 5))
    cross_entropy, divergence = relufy.losses(logits, targets, theirs)
    flat, wanted = logits.flatten(0, 1), theirs.flatten(0, 1)
    torch.testing.assert_close(cross_entropy, torch.nn.functional.cross_entropy(flat, targets.flatten()))
    p, q = wanted.softmax(-1), flat.softmax(-1)
    torch.testing.assert_close(divergence, (p * (p / q).log()).sum(-1).mean())
    assert relufy.losses(logits, targets, logits)[1].abs() < 1e-6


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
    dense: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def run(folder: Path) -> int:
        arguments = [str(folder), *COMMON, "--text", str(text), "--cache", str(tmp_path / "cache")]
        return relufy.main([*arguments, "--out", str(tmp_path / "out"), "--steps", "2", "--no-dense"])

    shutil.copytree(dense("llama"), tmp_path / "model")
    assert run(tmp_path / "model") == 0
    # a copy elsewhere, with other times
    shutil.copytree(tmp_path / "model", tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy" / "model.safetensors", (1, 1))
    with monkeypatch.context() as patched:
        patched.setattr(relufy.Further, "step", None)
        assert run(tmp_path / "copy") == 0
    # one weight differs
    changed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    changed.model.layers[0].mlp.up_proj.weight.data[3, 3] += 1
    changed.save_pretrained(tmp_path / "model")
    assert run(tmp_path / "model") == 2
    was, now = relufied.content(tmp_path / "copy"), relufied.content(tmp_path / "model")
    assert f"differs in content of MODEL ({was} there, {now} here)" in capsys.readouterr().err
    # and the configuration
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    assert run(tmp_path / "copy") == 2


def test_large_weight_files_are_known_by_samples(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    size = 3 << 20
    path.write_bytes(bytes(size))
    seen = {relufied.content(tmp_path)}
    # a change of any 12 KB, here at the ends and in the middle, is in a sample
    for place in (0, size // 2, size - 12288):
        changed = bytearray(size)
        changed[place : place + 12288] = b"1" * 12288
        path.write_bytes(changed)
        seen.add(relufied.content(tmp_path))
    path.write_bytes(bytes(size + 1))
    assert len(seen | {relufied.content(tmp_path)}) == 5
    # other files say nothing about the model
    (tmp_path / "README.md").write_text("x")
    assert relufied.content(tmp_path).startswith(f"1 files of {size + 1:,} bytes with hash ")


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


def test_without_dense_the_original_is_still_there(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("llama", "--steps", 4, "--no-dense") == 0
    assert run("llama", "--steps", 4, out="both") == 0
    assert report(tmp_path / "out")["original_ce"] == pytest.approx(report(tmp_path / "both")["original_ce"], abs=1e-5)
    assert "dense" not in report(tmp_path / "out")


def test_the_model_is_timed(run: Callable[..., int], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert run("llama", "--steps", 2, "--no-dense") == 0
    commands: list[list[str]] = []
    real = subprocess.run

    def called(command: list[str], **options: Any) -> Any:
        if command[1:3] != ["-m", "twell"]:
            return real(command, **options)
        commands.append(command)
        return types.SimpleNamespace(returncode=3)

    monkeypatch.setattr(relufy.subprocess, "run", called)
    assert "warning: the kernels need a GPU" not in capsys.readouterr().out
    assert run("llama", "--steps", 2, "--no-dense", "--bench") == 3
    assert "warning: the kernels need a GPU: times of a CPU say nothing" in capsys.readouterr().out
    parser = argparse.ArgumentParser()
    bench_models.add_arguments(parser)
    assert commands[0][1:5] == ["-m", "twell", "bench", "model"]
    given = parser.parse_args(commands[0][5:])
    assert given.model == tmp_path / "out" / "final"
    assert (given.sequence, given.device) == (32, "cpu")
    # refused before training, not after it
    with pytest.raises(SystemExit, match="2"):
        relufy.parse(["x", "--dataset", "x", "--out", "x", "--bench"])
    assert "--bench: expected --text, on which the model runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("positions", "sequence"), [({"n_positions": 48}, 48), ({"n_positions": 4096}, 1024), (None, 1024)]
)
def test_a_sequence_has_no_more_tokens_than_the_model_has_positions(
    dense: Callable[[str], Path], text: Path, tmp_path: Path, positions: dict[str, int] | None, sequence: int
) -> None:
    """Of learned positions under another key, and of a model without any."""
    shutil.copytree(dense("llama"), tmp_path / "model")
    config = transformers.GPTBigCodeConfig(**positions) if positions else transformers.BloomConfig()
    config.save_pretrained(tmp_path / "model")
    given = [str(tmp_path / "model"), "--text", str(text), "--out", str(tmp_path / "out")]
    choice = relufy.parse(given)
    relufy.check(choice)
    assert choice.sequence == sequence
    longer = relufy.parse([*given, "--sequence", "49"])
    if sequence == 48:
        with pytest.raises(RequestError, match="--sequence: expected at most the 48 positions of MODEL, got 49"):
            relufy.check(longer)
    else:
        relufy.check(longer)


def test_a_run_without_a_sequence_has_the_models(dense: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    given = [argument for argument in COMMON if argument not in ("--sequence", "32")]
    given += ["--text", str(text), "--out", str(tmp_path / "out"), "--steps", "2", "--no-dense"]
    assert relufy.main([str(dense("llama")), *given]) == 0
    assert report(tmp_path / "out")["sparse"]["identity"]["sequence"] == 64


@pytest.mark.parametrize("activation", ["fatrelu", "relu2"])
def test_targets_that_layers_cannot_have_are_refused(run: Callable[..., int], capsys: Any, activation: str) -> None:
    assert run("llama", "--activation", activation, "--target-nnz", 64, "--steps", 2) == 2
    assert "--target-nnz: expected less than the 64 neurons of a layer, got 64" in capsys.readouterr().err


def test_a_missed_target_and_text_read_often_are_warned_of(
    run: Callable[..., int], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    assert run("llama", "--steps", 2, "--no-dense", "--target-nnz", 8) == 0
    found, printed = report(tmp_path / "out"), capsys.readouterr().out
    warning = f"warning: the target of 8 non-zeros was missed: {found['sparse']['l0']:.1f} after 2 steps"
    assert warning in printed
    assert found["target_missed"]
    assert found["said"][-1].startswith(warning)
    assert "may be learnt by heart" not in printed
    monkeypatch.setattr(relufy, "MOST_READS", 0)
    assert run("llama", "--steps", 2, "--no-dense", "--target-nnz", 8) == 0
    assert "warning: text that is read more than 0 times may be learnt by heart" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reached", "missed"), [(26.9, True), (27.1, False), (32.9, False), (33.1, True), (float("nan"), True)]
)
def test_a_tenth_of_the_target_is_near_enough(reached: float, missed: bool) -> None:
    assert bool(training_report.missed_target(30, reached, 60)) == missed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--activation", "gelu"], "invalid choice: 'gelu'"),
        (["--target-nnz", "0"], "--target-nnz: expected a number above 0"),
        (["--distill", "1.5"], "--distill: expected a share of at most 1, got 1.5"),
        (["--sharing", "2"], "--sharing: expected a share of at most 1, got 2"),
        (["--strategy", "union"], "--strategy: expected dense with fatrelu, whose threshold changes, got union"),
        (["--attention", "slow"], "--attention: expected one of"),
        (["--dataset", "x"], "expected either --text or --dataset"),
    ],
)
def test_options_are_checked(tmp_path: Path, capsys: Any, more: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        relufy.main(["x", "--text", "x", "--out", str(tmp_path), *more])
    assert message in capsys.readouterr().err


def test_requests_that_cannot_be_met_are_one_sentence(
    run: Callable[..., int], dense: Callable[[str], Path], text: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run("phi", "--activation", "drelu") == 2
    assert 'must have a gate for activation="drelu"' in capsys.readouterr().err
    assert run("llama", "--tokens-per-step", 300) == 2
    assert "--tokens-per-step: expected a multiple of 128" in capsys.readouterr().err
    for wrong, message in (
        (
            [str(tmp_path / "no"), "--text", str(text)],
            f"MODEL: expected a folder or a Hub id, got '{tmp_path}/no' (no s",
        ),
        ([str(tmp_path), "--text", str(text)], "MODEL: expected a model with a tokenizer, got "),
        ([str(dense("llama")), "--text", str(tmp_path / "no")], "--text: expected a folder or a file, got "),
        ([str(dense("llama")), "--text", str(text), "--sequence", "65"], "expected at most the 64 positions of MODEL"),
    ):
        assert relufy.main([*wrong, "--out", str(tmp_path / "new")]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
    assert run("llama", "--eval-sequences", 7) == 2
    assert "a larger --held-out, a smaller --micro-batch or a shorter --sequence helps" in capsys.readouterr().err
    bare = shutil.copytree(dense("llama"), tmp_path / "bare")
    for path in bare.glob("*token*"):
        path.unlink()
    assert relufy.main([str(bare), *COMMON, "--text", str(text), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "MODEL: expected a model with a tokenizer, got " in said
    assert not said.strip().endswith(":")
    assert "slow tokenizer" in said
    damaged = shutil.copytree(dense("llama"), tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    given = [str(damaged), *COMMON, "--text", str(text), "--out", str(tmp_path / "out")]
    assert relufy.main(given) == 2
    said = capsys.readouterr().err
    assert "MODEL: expected a causal model of transformers, got SafetensorError: " in said


def test_blocks_are_compiled_together(dense: Callable[[str], Path]) -> None:
    network = relufied.load(dense("llama"))
    relufied.replace(network, "relu")
    blocks = relufied.compile_blocks(network)
    assert blocks == list(network.model.layers)
    assert all("forward" in vars(block) for block in blocks)


# The evidence


EVIDENCE = (
    "--layers 2 --hidden 32 --intermediate 64 --heads 2 --vocab 300 --sequence 32 --micro-batch 4 --device cpu "
    "--tokens-per-step 256 --steps 60 --lr 0.02 --warmup 3 --held-out 0.2 --eval-sequences 64 --log-every 10 "
    "--dtype float32 --further-lr 0.01 0.005 --shares 0.2 0.5 --targets 8 16"
).split()


@pytest.fixture(scope="module")
def measured(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Arguments, and the file of two seeds, made by two commands on machines that share nothing but the file."""
    root = tmp_path_factory.mktemp("evidence")
    given = [*EVIDENCE, "--text", str(text), "--out", str(root / "relufy.json")]
    for seed in ("0", "1"):
        assert evidence.main([*given, "--state", str(root / seed), "--seeds", seed]) == 0
    return given, root / "relufy.json"


def test_the_evidence_is_complete(measured: tuple[list[str], Path]) -> None:
    document = relufy_results.load(measured[1])
    assert str(measured[1].parent) not in measured[1].read_text()
    found = {result.run: result for result in relufy_results.results(document)}
    assert list(found) == [
        *evidence.plan([0], [0.2, 0.5], [8, 16], 0.5, 0.5, [0.01, 0.005]),
        *evidence.plan([1], [0.2, 0.5], [8, 16], 0.5, 0.5, [0.01, 0.005]),
    ]
    assert {run.activation for run in found} == {"base", "dense", "fatrelu"}
    for run, result in found.items():
        assert not result.red
        assert len(result.blocks) == 16
        assert result.tokens == round(run.share * 60) * 256
        base = found[Run("base", run.seed)]
        if run.activation == "dense":
            # the base before it is trained further
            assert result.first_ce == pytest.approx(base.ce, abs=1e-4)
        if run.sparse:
            dense = [found[Run("dense", run.seed, run.share, lr=lr)] for lr in (0.01, 0.005)]
            assert relufy_results.baseline(run, found.values()) == min(dense, key=lambda each: each.ce or 0)
            assert (result.threshold or 0) > 0
            assert len(result.layers) == 2
            assert result.l0 == pytest.approx(sum(layer["l0"] for layer in result.layers) / 2, abs=1e-3)
    # the sparser the target, the sparser the model
    for seed in (0, 1):
        l0 = [found[Run("fatrelu", seed, 0.5, target, lr=0.01)].l0 or 0 for target in (8, 16)]
        assert l0[0] < l0[1] < 32
    assert (measured[1].parent / "0" / evidence.SAVED / "final" / "config.json").exists()


def test_further_training_goes_on_in_the_text(measured: tuple[list[str], Path], monkeypatch: Any) -> None:
    rows: list[range] = []
    read = relufy.Sequences.rows

    def spied(self: Any, rows_: range) -> Any:
        if self.seed is not None:
            rows.append(rows_)
        return read(self, rows_)

    monkeypatch.setattr(relufy.Sequences, "rows", spied)
    out = measured[1].with_name("again.json")
    given = [*measured[0], "--out", str(out), "--state", str(measured[1].parent / "again"), "--seeds", "0"]
    assert evidence.main([*given, "--shares", "0.5", "--targets", "8"]) == 0
    ends = [each.stop for each in rows]
    # the base reads 480 sequences, each of the six others the next 240
    assert ends == [*range(4, 481, 4), *([*range(484, 721, 4)] * 6)]


def test_a_budget_ends_between_runs(measured: tuple[list[str], Path], tmp_path: Path, capsys: Any) -> None:
    given = [*measured[0], "--out", str(tmp_path / "relufy.json"), "--state", str(tmp_path / "state"), "--seeds", "0"]
    assert evidence.main([*given, "--budget-s", "0"]) == 3
    assert "runs are left after 0 of 0 s; the next: base, seed 0" in capsys.readouterr().out
    assert not (tmp_path / "relufy.json").exists()
    # results of other options are not mixed
    assert evidence.main([*measured[0], "--state", str(tmp_path / "state"), "--clip", "0.5"]) == 2
    assert "differs in clip" in capsys.readouterr().err
    other = tmp_path / "text"
    other.mkdir()
    for i in range(60):
        (other / f"{i}.txt").write_text(f"{i} another text\n" * 30)
    more = ["--text", str(other), "--state", str(tmp_path / "state"), "--seeds"]
    assert evidence.main([*measured[0], *more, "1", "--shares", "0.1", "0.5"]) == 2
    assert "--text: expected the text of the runs of seed 1" in capsys.readouterr().err
    # a finished file needs nothing
    assert evidence.main([*measured[0], "--state", str(tmp_path / "state")]) == 0
    assert "0 runs" in capsys.readouterr().out


def test_text_is_read_four_times_at_most(measured: tuple[list[str], Path], tmp_path: Path, capsys: Any) -> None:
    given = [*measured[0], "--out", str(tmp_path / "relufy.json"), "--state", str(tmp_path / "state")]
    assert evidence.main([*given, "--steps", "6000"]) == 2
    assert "text is read 4 times at most" in capsys.readouterr().err


def test_tables_say_what_was_measured(measured: tuple[list[str], Path], capsys: Any) -> None:
    assert evidence.main(["--table", str(measured[1])]) == 0
    printed = capsys.readouterr().out
    found = {result.run: result for result in relufy_results.results(relufy_results.load(measured[1]))}
    mine = [found[Run("fatrelu", seed, 0.5, 8, lr=0.01)] for seed in (0, 1)]
    dense = [relufy_results.baseline(each, found.values()) or each for each in mine]
    added = sum((a.ce or 0) / (b.ce or 1) - 1 for a, b in zip(mine, dense)) / 2
    (line,) = [line for line in printed.splitlines() if line.startswith("| FATReLU to 8 | 50 % | 0.01 | 2 |")]
    assert f"| {100 * added:+.2f} % ± " in line
    assert f"| {sum(each.l0 or 0 for each in mine) / 2:.1f} |" in line
    for name in (
        "FATReLU to 8, distilled 0.5",
        "FATReLU to 8, sharing 0.5",
    ):
        assert f"| {name} | 50 % |" in printed
    assert "| SiLU | 0 % |  | 2 |" in printed
    assert json.loads(measured[1].read_text())["machine"] in printed


def test_the_page_explains_what_its_tables_show(root: Path) -> None:
    """By the shipped results, as of one seed and of two."""
    document = relufy_results.load(root / "profiling" / "results" / f"{relufy_results.NAME}.json")
    one = [row for row in document["rows"] if row["seed"] == document["rows"][0]["seed"]]
    two = [*one, *({**row, "seed": row["seed"] + 1} for row in one)]
    for rows, shown in ((one, False), (two, True)):
        of_seeds = {**document, "rows": rows}
        assert ("±" in relufy_results.table(of_seeds)) == ("±" in relufy_results.notes(of_seeds)) == shown
    header, rule, *lines = relufy_results.layers(document).splitlines()
    assert {line.count("|") for line in (rule, *lines)} == {header.count("|")}


def test_what_the_chart_shows(measured: tuple[list[str], Path]) -> None:
    """The drawn numbers, read back from matplotlib's objects."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from profiling.draw.style import LIGHT

    document = relufy_results.load(measured[1])
    figure: Any = Figure()
    relufy_results.draw(figure, LIGHT, json.loads(json.dumps(relufy_results.shown(document))))
    by_tokens, by_non_zeros = figure.axes
    points = {(p.kind, p.share): p for p in relufy_results.points(document) if p.lr == 0.01}
    line = next(line for line in by_tokens.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-")
    assert list(line.get_xdata()) == [20, 50]
    assert list(line.get_ydata()) == pytest.approx(
        [100 * (points["FATReLU to 16", share].added or 0) for share in (0.2, 0.5)]
    )
    shown = sorted(line.get_ydata()[0] for line in by_non_zeros.lines if line.get_marker() == "o")
    kinds = {p.kind for p in relufy_results.points(document) if p.added}
    best = [min(p.added for p in relufy_results.points(document) if (p.kind, p.share) == (kind, 0.5)) for kind in kinds]
    assert shown == pytest.approx(sorted(100 * each for each in best))


def test_predicted_seconds_are_those_of_the_products(capsys: Any) -> None:
    assert evidence.main(["--list", "--tflops", "250", "--seeds", "0"]) == 0
    printed = capsys.readouterr().out
    choice = options.parse("", [*evidence.DEFAULTS, "--text", "-", "--out", "-", "--activation=silu", "--ffn=dense"])
    shape = model.Shape(choice.layers, choice.hidden, choice.intermediate, choice.heads, choice.vocab)
    config = model.configuration(shape, choice.sequence, 0, "silu")
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters())
    assert evidence.parameters_of(choice) == pytest.approx(size, rel=1e-3)
    seconds = choice.steps * choice.tokens_per_step * 6 * evidence.parameters_of(choice) / 250e12 + evidence.OVERHEAD
    assert f"{seconds:6.0f} s  {choice.steps * choice.tokens_per_step / 1e6:6.1f} M tokens  base, seed 0" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected --out, --list or --table"),
        (["--out", "x", "--l1", "3"], "--l1: expected no such option, as each run sets it"),
        (["--out", "x", "--targets", "0"], "expected numbers above 0, got 0"),
    ],
)
def test_options_of_the_evidence_are_checked(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        evidence.main(arguments)
    assert message in capsys.readouterr().err
