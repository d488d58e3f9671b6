"""The scripts of examples/: a run learns, goes on with the same bits, draws its chart and says what it cannot do."""

import functools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import nanochat
import relufy
import train
import transformers
from runs import Sequences, Text, new_tokenizer, tokenised

import twell
from twell import recipe

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")

SMALL = (
    "--max_steps 12 --logging_steps 2 --save_steps 4 --eval_steps 4 --per_device_train_batch_size 4 --sequence 32 "
    "--learning_rate 1e-2 --held_out 0.1 --disable_tqdm 1 --use_cpu 1 --bf16 0"
).split()
LLAMA = "--sizes 2 32 64 2 --vocab 300 --gradient_accumulation_steps 2".split()
# two thirds of the neurons are dead within a few steps, and some come back
# dead neurons are counted at each checkpoint, as at the first step of a run that goes on
SPARSE = "--l1 0.1 --reinitialize 0.1 --observe_every 2 --strategy union".split()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty files of text that can be learnt, in folders, and files that are not text."""
    root = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijkl", k=5)) for _ in range(40)]
    lines = [" ".join(draw.choices(words, k=6)) for _ in range(20)]
    for i in range(60):
        (folder := root / f"part{i % 3}").mkdir(exist_ok=True)
        (folder / f"{i}.txt").write_text("\n".join(draw.choices(lines, k=25)))
    (root / "image.txt").write_bytes(b"\x89PNG\0" * 1000)
    (root / "zeros.txt").write_bytes(b"\0" * 1000)
    (root / "latin.txt").write_bytes("é".encode("latin-1") * 100)
    (root / ".hidden.txt").write_text("hidden " * 100)
    return root


@pytest.fixture
def run(text: Path, tmp_path: Path) -> Callable[..., int]:
    def run(*more: object, out: str = "out") -> int:
        given = ["--text", str(text), "--output_dir", str(tmp_path / out), *SMALL, *LLAMA]
        return train.main([*given, *map(str, more)])

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return loaded


def same(a: Path, b: Path) -> bool:
    one, other = weights(a), weights(b)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def log(folder: Path) -> list[dict[str, Any]]:
    """The log without figures of time."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if "runtime" not in name and "per_second" not in name}
        for line in lines
        if "train_runtime" not in line
    ]


def interrupting(monkeypatch: pytest.MonkeyPatch, step: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    """Let the first run after this end in a micro-batch of ``step``."""
    plain = transformers.Trainer.training_step

    def training_step(self: Any, *given: Any, **more: Any) -> Any:
        if self.state.global_step == step:
            monkeypatch.setattr(transformers.Trainer, "training_step", plain)
            raise error
        return plain(self, *given, **more)

    monkeypatch.setattr(transformers.Trainer, "training_step", training_step)


def test_a_llama_learns_and_goes_on_with_the_same_bits(
    run: Callable[..., int], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run(*SPARSE, out="whole") == 0
    whole = tmp_path / "whole"
    assert "non-zeros of 64 in training; wrote" in capsys.readouterr().out
    lines = log(whole)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 1
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8, 12, 12]
    assert 0 < lines[0]["sparsity_l0"] < 64
    assert any(line["sparsity_dead"] for line in lines if "loss" in line)
    assert (whole / "chart.png").read_bytes()[1:4] == b"PNG"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(whole / "final")
    tokenizer = transformers.AutoTokenizer.from_pretrained(whole / "final")
    document = (text / "part0" / "0.txt").read_text()
    ids = tokenizer(document[:100], return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == document[:100]
    assert loaded(input_ids=ids[:, :32], labels=ids[:, :32]).loss < losses[0] - 1

    interrupting(monkeypatch, 6)
    assert run(*SPARSE) == 130
    out = tmp_path / "out"
    # as after a loss of power while one was written
    shutil.copytree(out / "checkpoint-4", out / "checkpoint-5")
    (out / "checkpoint-5" / "trainer_state.json").unlink()
    torch.rand(5)
    assert run(*SPARSE) == 0
    assert same(out / "final", whole / "final")
    assert log(out) == lines
    # Trainer takes one more step if it goes on from its last one, as after an end between that and the model
    shutil.rmtree(out / "final")
    assert run(*SPARSE) == 0
    assert same(out / "final", whole / "final")
    assert log(out) == lines
    # a run that has ended is not trained again
    interrupting(monkeypatch, 0, AssertionError)
    assert run(*SPARSE) == 0
    capsys.readouterr()
    assert run(*SPARSE, "--learning_rate", 1e-3, "--l1", 0) == 2
    differs = "has a run that differs in l1 (0.1 there, 0.0 here), learning_rate (0.01 there, 0.001 here)"
    assert differs in capsys.readouterr().err


def test_silu_is_a_stock_llama_and_a_seed_decides(run: Callable[..., int], tmp_path: Path) -> None:
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert run("--activation", "silu", "--max_steps", 2, "--seed", seed, out=out) == 0
    assert same(tmp_path / "a" / "final", tmp_path / "b" / "final")
    assert not same(tmp_path / "a" / "final", tmp_path / "c" / "final")
    assert not any(name.startswith("sparsity") for line in log(tmp_path / "a") for name in line)
    assert json.loads((tmp_path / "a" / "final" / "config.json").read_text())["hidden_act"] == "silu"


def test_a_loss_that_is_lost_ends_the_run_before_it_is_saved(
    run: Callable[..., int], tmp_path: Path, capsys: Any
) -> None:
    assert run("--learning_rate", 1e30, "--save_steps", 2) == 2
    assert "is not finite in step 2: a lower --learning_rate" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.nightly
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_are_as_one(
    run: Callable[..., int], text: Path, tmp_path: Path, root: Path, sharded: bool
) -> None:
    assert run() == 0
    given = ["--text", text, "--output_dir", tmp_path / "two", *SMALL, *LLAMA, "--gradient_accumulation_steps", 1]
    given += ["--fsdp", "full_shard"] if sharded else []
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(root / "python"), str(root)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, root / "examples" / "train.py", *map(str, given)], check=True, env=environment)
    one, two = ([line["loss"] for line in log(tmp_path / name) if "loss" in line] for name in ("out", "two"))
    assert one == pytest.approx(two, rel=1e-2)
    ours, theirs = (weights(tmp_path / name / "final") for name in ("out", "two"))
    for name, weight in ours.items():
        assert (weight - theirs[name]).norm() < 1e-2 * weight.norm(), name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--suffix", ".md"], "--text: expected files that end in .md, got none"),
        (["--max_mb", 1e-6], "--text: expected two documents of UTF-8 text, one of which is held out, got 1"),
        (["--sequence", 4096], "held-out text: expected 4,096 tokens, a sequence, or more, got "),
        (["--nnz", 64], "--nnz: expected above 0, below 64, got 64.0"),
        (["--vocab", 256], "--vocab: expected 257 or more, the bytes and the end of a document, got 256"),
    ],
)
def test_requests_that_cannot_be_met(run: Callable[..., int], capsys: Any, more: list[object], message: str) -> None:
    assert run(*more) == 2
    assert f"train.py: error: {message}" in capsys.readouterr().err


def test_tokens_stand_for_the_text(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.read_text() for path in text.rglob("*.txt") if path.stem.isdigit()}
    source = Text([str(text)], held_out=0.1)
    documents = list(source.documents(1e9))
    assert len(documents) == 60
    assert set(documents) == files
    tokenizer = new_tokenizer(source, 300)
    parts = [tokenizer.decode(part).split("<|endoftext|>")[:-1] for part in tokenised(source, tokenizer)]
    assert sorted(parts[0] + parts[1]) == sorted(documents)
    assert sum(map(len, parts[1])) / sum(map(len, documents)) == pytest.approx(0.1, abs=0.02)
    tokens = torch.arange(100, dtype=torch.int32)
    rows = Sequences("training", tokens, 32)
    assert len(rows) == 3
    assert rows[2]["input_ids"].tolist() == list(range(64, 96))
    source.without = str(text / "part0")
    assert len(list(source.documents(1e9))) == 40
    # long documents are cut, and the last one by the limit
    monkeypatch.setattr("runs.LONGEST", 100)
    whole = "".join(f"line {i}\n" for i in range(200))
    (tmp_path / "long.txt").write_text(whole)
    monkeypatch.chdir(tmp_path)
    documents = list(Text(["."]).documents(1050))
    assert "".join(documents) == whole[:1050]
    assert all(len(document) <= 100 for document in documents)


def test_sizes_are_those_of_their_names() -> None:
    for name, (layers, hidden, neurons, heads) in train.SIZES.items():
        config = transformers.LlamaConfig(
            vocab_size=49152, hidden_size=hidden, intermediate_size=neurons, num_hidden_layers=layers,
            num_attention_heads=heads, tie_word_embeddings=True,
        )  # fmt: skip
        with torch.device("meta"):
            size = sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters()) / 1e6
        assert size == pytest.approx(float(name[:-1]) * (1000 if name.endswith("B") else 1), rel=0.07), name


# relufy.py


@pytest.fixture(scope="session")
def tokenizer(text: Path) -> Any:
    return new_tokenizer(Text([str(text)]), 300)


@pytest.fixture
def dense(tokenizer: Any, tmp_path: Path) -> Callable[[str], Path]:
    """Folders of tiny dense models: gated with SiLU or GELU, or a pair with GELU."""

    def folder(kind: str) -> Path:
        torch.manual_seed(0)
        sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        more: dict[str, Any] = {"intermediate_size": 64, "max_position_embeddings": 64, "bos_token_id": None, **sizes}
        more |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
        if kind == "gemma":
            more |= {"num_key_value_heads": 1, "head_dim": 16}
        config = transformers.AutoConfig.for_model(kind, **more)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
        tokenizer.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return folder


@pytest.fixture
def relufied(text: Path, dense: Callable[[str], Path], tmp_path: Path) -> Callable[..., int]:
    def relufied(kind: str, *more: object, out: str = "out") -> int:
        given = ["--model", str(dense(kind)), "--text", str(text), "--output_dir", str(tmp_path / out), *SMALL]
        return relufy.main([*given, "--gradient_accumulation_steps", "2", *map(str, more)])

    return relufied


@pytest.mark.parametrize(
    ("kind", "activation", "more"),
    [
        ("llama", "fatrelu", ["--distill", 0.5]),
        pytest.param("gemma", "relu2", ["--distill", 0.5], marks=pytest.mark.nightly),
        pytest.param("phi", "relu", ["--strategy", "union"], marks=pytest.mark.nightly),
    ],
)
def test_dense_models_become_sparse(
    relufied: Callable[..., int], tmp_path: Path, capsys: Any, kind: str, activation: str, more: list[object]
) -> None:
    steps = ["--max_steps", 60, "--save_steps", 60, "--eval_steps", 30, "--logging_steps", 10]
    assert relufied(kind, *steps, "--activation", activation, "--nnz", 8, *more) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    sparse, long = found["sparse"], found["dense"]
    assert 5 < sparse["sparsity_l0"] < 13
    # both learn
    assert max(sparse["eval_loss"], long["eval_loss"]) < found["original_loss"] - 0.5
    printed = capsys.readouterr().out
    assert all(line in printed for line in found["said"])
    lines = log(tmp_path / "out" / "dense")
    assert (lines[0]["step"], lines[0]["eval_loss"]) == (0, found["original_loss"])

    # what is saved computes what was measured
    final = tmp_path / "out" / "sparse" / "final"
    config = json.loads((final / "config.json").read_text())
    assert next(config[key] for key in ("hidden_activation", "hidden_act") if config.get(key)) == activation
    loaded = relufy.load(final).eval()
    layers = recipe.layers(loaded)
    assert {layer.activation for layer in layers.values()} == {activation}
    assert {layer.threshold or None for layer in layers.values()} == {config.get("hidden_act_param")}
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = loaded(input_ids=ids).logits
        if activation in ("relu", "relu2"):
            stock = transformers.AutoModelForCausalLM.from_pretrained(final).eval()
            torch.testing.assert_close(logits, stock(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        else:
            for layer in layers.values():
                layer.threshold = 0
                layer.activation = "relu"
            assert not torch.equal(logits, loaded(input_ids=ids).logits)
    assert transformers.AutoTokenizer.from_pretrained(final).eos_token_id is not None


@pytest.mark.nightly
def test_a_moving_threshold_goes_on_and_dense_reads_the_same_text(
    relufied: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    plain = transformers.Trainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, *more: Any) -> Any:
        seen.append(inputs["input_ids"].flatten().tolist())
        return plain(self, model, inputs, *more)

    asked = ["--nnz", 10, "--distill", 0.3]
    with monkeypatch.context() as patch:
        patch.setattr(transformers.Trainer, "training_step", training_step)
        assert relufied("llama", *asked, out="whole") == 0
    assert len(seen) == 2 * 12 * 2
    assert seen[:24] == seen[24:]
    interrupting(monkeypatch, 6)
    assert relufied("llama", *asked) == 130
    assert relufied("llama", *asked) == 0
    for part in ("sparse", "dense"):
        out, whole = tmp_path / "out" / part, tmp_path / "whole" / part
        assert same(out / "final", whole / "final")
        # dead neurons are those of the first step after it
        logs = [[{**line, "sparsity_dead": 0} for line in log(each)] for each in (out, whole)]
        assert logs[0] == logs[1]
        assert (out / "final" / "config.json").read_text() == (whole / "final" / "config.json").read_text()


def test_distillation_is_a_share_of_the_loss(dense: Callable[[str], Path]) -> None:
    folder = dense("llama")
    original, model = relufy.load(folder).eval(), relufy.load(folder).train()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    ids = torch.randint(0, 300, (2, 16))
    plain = model(input_ids=ids, labels=ids)
    theirs, ours = (each.double().log_softmax(-1) for each in (original(input_ids=ids).logits, plain.logits))
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    model.register_forward_hook(relufy.distilling(original, 0.25), with_kwargs=True)
    for items in (None, torch.tensor(64)):
        plainly = plain.loss if items is None else plain.loss * 30 / 64
        expected = 0.75 * plainly + 0.25 * divergence * (1 if items is None else 32 / 64)
        more = {} if items is None else {"num_items_in_batch": items}
        found = model(input_ids=ids, labels=ids, **more).loss
        assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    assert model.eval()(input_ids=ids, labels=ids).loss.item() == pytest.approx(plain.loss.item())


def test_a_sparse_model_goes_on_from_its_threshold(dense: Callable[[str], Path]) -> None:
    """It began as ReLU again, and its sparsity was lost."""
    sparse = relufy.load(dense("llama"))
    relufy.replace(sparse, "fatrelu", "dense")
    assert {layer.activation for layer in recipe.layers(sparse).values()} == {"relu"}
    for layer in recipe.layers(sparse).values():
        layer.activation, layer.threshold = "fatrelu", 0.125
    relufy.replace(sparse, "fatrelu", "union")
    settings = {(layer.activation, layer.threshold, layer.strategy) for layer in recipe.layers(sparse).values()}
    assert settings == {("fatrelu", 0.125, "union")}
    relufy.replace(sparse, "relu2", "dense")
    assert {(layer.activation, layer.threshold) for layer in recipe.layers(sparse).values()} == {("relu2", 0)}


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("phi", ["--activation", "drelu"], 'must have a gate for activation="drelu"'),
        ("llama", ["--nnz", 64], "--nnz: expected less than the 64 neurons of a layer, got 64"),
        ("llama", ["--sequence", 65], "--sequence: expected at most the 64 positions of MODEL, got 65"),
    ],
)
def test_relufy_says_what_it_cannot_do(
    relufied: Callable[..., int], capsys: Any, kind: str, more: list[object], message: str
) -> None:
    assert relufied(kind, *more) == 2
    assert message in capsys.readouterr().err


# nanochat.py


@pytest.mark.parametrize("strategy", ["auto", "union"])
def test_a_loop_of_ones_own_goes_on_with_the_same_bits(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    def looped(out: str, *more: object) -> int:
        small = "--depth 2 --heads 1 --vocab 300 --sequence 32 --batch 4 --steps 24 --every 4 --nnz 12".split()
        return nanochat.main(["--text", str(text), "--out", str(tmp_path / out), *small, *map(str, more)])

    monkeypatch.setattr(twell, "sparsify_", functools.partial(twell.sparsify_, strategy=strategy))
    assert looped("whole") == 0
    lines = log(tmp_path / "whole")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert lines[-1]["sparsity_l0"] < lines[0]["sparsity_l0"]
    assert (tmp_path / "whole" / "chart.png").exists()
    plain, calls = torch.optim.Muon.step, [0]

    def step(self: Any, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 11:
            raise KeyboardInterrupt
        return plain(self, *given)

    monkeypatch.setattr(torch.optim.Muon, "step", step)
    assert looped("out") == 130
    assert looped("out") == 0
    assert calls[0] == 11 + 16
    assert log(tmp_path / "out") == lines
    assert looped("out", "--nnz", 20) == 2
    assert looped("none", "--text", "/nowhere") == 2
