"""examples/train.py: it reads text and learns, and an interruption costs only steps."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from torch.distributed.checkpoint.api import CheckpointException

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train  # noqa: E402
from training import RequestError, checkpoint, data, model, options, parallel, report, whole  # noqa: E402
from training.data import Sequences, Source  # noqa: E402

from twell import _files  # noqa: E402

SMALL = (
    "--layers 2 --hidden 32 --intermediate 64 --heads 2 --vocab 300 --sequence 32 --micro-batch 2 "
    "--tokens-per-step 256 --held-out 0.1 --eval-sequences 4 --log-every 2 --device cpu --dtype float32"
).split()
# two thirds of the neurons are dead within a few steps, and some come back
SPARSE = "--l1 0.003 --l1-warmup 0 --lr 0.02 --warmup 0 --reinitialize 0.1 --observe-every 4".split()

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty files of text that can be learnt, and files that are not text."""
    root = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijkl", k=5)) for _ in range(40)]
    lines = [" ".join(draw.choices(words, k=6)) for _ in range(20)]
    for i in range(60):
        folder = root / f"part{i % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.txt").write_text("\n".join(draw.choices(lines, k=25)))
    (root / "image.txt").write_bytes(b"\x89PNG\0" * 1000)
    (root / "latin.txt").write_bytes("é".encode("latin-1") * 100)
    (root / ".hidden.txt").write_text("hidden " * 100)
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(text: Path, cache: Path, tmp_path: Path) -> Callable[..., int]:
    """train.main on the small model, its output under tmp_path."""

    def run(*more: object, out: str = "out") -> int:
        return train.main(command(text, cache, tmp_path / out, *more))

    return run


def command(text: Path, cache: Path, out: Path, *more: object) -> list[str]:
    return [*SMALL, "--text", str(text), "--cache", str(cache), "--out", str(out), *map(str, more)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, torch.Tensor] = load_file(out / "final" / "model.safetensors")
    return loaded


def same(a: Path, b: Path) -> bool:
    """Return whether two runs ended with the same bits."""
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def records(out: Path) -> list[dict[str, Any]]:
    """Return the records of steps, without figures that differ between runs."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("tokens_per_s", "peak_bytes")}
        for line in lines
        if "options" not in line
    ]


def steps(out: Path) -> list[int]:
    """The complete checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in checkpoint.complete(out / "checkpoints")]


# Text


def test_documents_are_the_text_files(text: Path) -> None:
    documents = list(Source((text,)).documents())
    files = {path.read_text() for path in text.rglob("*.txt") if path.stem.isdigit()}
    assert len(documents) == 60
    assert set(documents) == files
    # the order mixes the folders and is the same every time
    assert documents == list(Source((text,)).documents())
    assert documents != [path.read_text() for path in sorted(text.rglob("*.txt")) if path.stem.isdigit()]


def test_documents_of_several_roots_and_suffixes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.py").write_text("one")
    (tmp_path / "a" / "two.rst").write_text("two")
    (tmp_path / "three.log").write_text("three")
    source = Source((tmp_path / "a", tmp_path / "three.log"), suffixes=(".py",))
    # a file that was named is read whatever its name
    assert sorted(source.documents()) == ["one", "three"]


def test_long_documents_are_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LONGEST_DOCUMENT", 100)
    whole = "".join(f"line {i}\n" for i in range(100)) + "x" * 250 + "\n" * 150
    (tmp_path / "long.txt").write_text(whole)
    documents = list(Source((tmp_path,)).documents())
    assert "".join(documents) == whole[: len("".join(documents))]
    assert whole[len("".join(documents)) :].strip() == ""
    assert all(len(document) <= 100 for document in documents)
    assert all(document.endswith("\n") for document in documents[:5])


@pytest.mark.parametrize("limit", [1, 10, 11, 12, 200])
def test_max_bytes_cuts_between_characters(tmp_path: Path, limit: int) -> None:
    (tmp_path / "euro.txt").write_text("€" * 50)
    assert list(Source((tmp_path,), max_bytes=limit).documents()) == (["€" * min(limit // 3, 50)] if limit > 2 else [])


def test_tokens_stand_for_the_text(text: Path, tmp_path: Path) -> None:
    said: list[str] = []
    tokens = data.prepare(Source((text,)), tmp_path, 300, 0.1, say=said.append)
    assert len(tokens.train) == tokens.train_tokens
    assert len(tokens.held) == tokens.held_tokens
    tokenizer = tokens.tokenizer()
    assert len(tokenizer) == tokens.vocabulary == 300
    parts = [tokenizer.decode(part).split(data.END)[:-1] for part in (tokens.train, tokens.held)]
    assert sorted(parts[0] + parts[1]) == sorted(Source((text,)).documents())
    assert sum(map(len, parts[1])) / sum(map(len, parts[0] + parts[1])) == pytest.approx(0.1, abs=0.02)
    assert tokens.documents == 60
    assert "60 documents" in said[-1]


def test_end_of_document_in_a_text_is_text(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text(f"a{data.END}b{i}")
    tokens = data.prepare(Source((tmp_path,), without=(tmp_path / "cache",)), tmp_path / "cache", 300, 0.1)
    for part in (tokens.train, tokens.held):
        assert [i for i, token in enumerate(part) if token == tokens.end] == [len(part) - 1]


def test_tokens_are_made_once(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "text"
    shutil.copytree(text, folder)
    made = data.prepare(Source((folder,)), tmp_path, 300, 0.1)

    def refuse(*_: object) -> None:
        raise AssertionError("tokenised again")

    with monkeypatch.context() as patch:
        patch.setattr(data, "_tokenise", refuse)
        assert data.prepare(Source((folder,)), tmp_path, 300, 0.1) == made
        for other in (Source((folder,), max_bytes=1000), Source((folder,), suffixes=(".txt",))):
            with pytest.raises(AssertionError, match="again"):
                data.prepare(other, tmp_path, 300, 0.1)
        with pytest.raises(AssertionError, match="again"):
            data.prepare(Source((folder,)), tmp_path, 301, 0.1)
    # a failure leaves nothing behind
    assert {path.name for path in tmp_path.iterdir()} == {"text", made.folder.name}
    (folder / "part0" / "0.txt").write_text("changed")
    assert data.prepare(Source((folder,)), tmp_path, 300, 0.1).fingerprint != made.fingerprint


@pytest.mark.parametrize("damage", ["bytes", "length", "zeros", "missing", "manifest"])
@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json"])
def test_damaged_tokens_are_made_again(text: Path, tmp_path: Path, damage: str, name: str) -> None:
    made = data.prepare(Source((text,)), tmp_path, 300, 0.1)
    tokens, tokenizer = np.array(made.train), (made.folder / "tokenizer.json").read_bytes()
    path = made.folder / (whole.MANIFEST if damage == "manifest" else name)
    content = path.read_bytes()
    # as after a loss of power before the file was on the disk
    changed = {"length": content[:-2], "zeros": bytes(len(content)), "manifest": b""}
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(changed.get(damage, content[:9] + bytes([content[9] ^ 1]) + content[10:]))
    said: list[str] = []
    assert data.prepare(Source((text,)), tmp_path, 300, 0.1, say=said.append) == made
    assert said[0] == f"{made.folder} is damaged: its text is tokenised again"
    assert np.array_equal(made.train, tokens)
    assert (made.folder / "tokenizer.json").read_bytes() == tokenizer
    assert [path.name for path in tmp_path.iterdir()] == [made.folder.name]
    # complete files are not touched
    said.clear()
    assert data.prepare(Source((text,)), tmp_path, 300, 0.1, say=said.append) == made
    assert not said


def test_tokens_are_on_the_disk_before_they_have_their_name(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, synced = _files.sync, set[str]()

    def noted(path: Path) -> None:
        assert not list(tmp_path.glob("tokens-*")) or Path(path) == tmp_path
        synced.add(Path(path).name)
        sync(path)

    monkeypatch.setattr(_files, "sync", noted)
    data.prepare(Source((text,)), tmp_path, 300, 0.1)
    assert synced >= {"train.bin", "held.bin", "tokenizer.json", whole.MANIFEST, tmp_path.name}


def test_other_ranks_wait_until_damaged_tokens_are_replaced(text: Path, tmp_path: Path) -> None:
    made = data.prepare(Source((text,)), tmp_path, 300, 0.1)
    content = (made.folder / "train.bin").read_bytes()
    (made.folder / "train.bin").write_bytes(bytes(len(content)))
    arguments = (Source((text,)), tmp_path, 300, 0.1)

    def barrier() -> None:
        data.prepare(*arguments, first=True)

    again = data.prepare(*arguments, first=False, barrier=barrier)
    assert again.train.tobytes() == content


def test_many_tokens_need_wider_integers(text: Path, tmp_path: Path) -> None:
    tokens = data.prepare(Source((text,)), tmp_path, 70_000, 0.1)
    assert tokens.dtype == "uint32"
    assert tokens.train.max() < tokens.vocabulary < 70_000


@pytest.mark.parametrize("form", ["disk", "splits", "parquet", "jsonl"])
def test_datasets(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [f"row {i} of them" for i in range(20)]
    dataset = datasets.Dataset.from_dict({"content": rows, "n": list(range(20))})
    where = tmp_path / "set"
    if form == "disk":
        dataset.save_to_disk(where)
    elif form == "splits":
        datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(where)
    elif form == "parquet":
        where.mkdir()
        dataset.to_parquet(where / "rows.parquet")
    else:
        where.mkdir()
        dataset.to_json(where / "rows.jsonl")
    assert list(Source(dataset=where, column="content").documents()) == rows
    for column, got in (("n", "got int"), ("text", "got only")):
        with pytest.raises(RequestError, match=got):
            list(Source(dataset=where, column=column).documents())


def test_datasets_of_no_known_form_are_refused(text: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(RequestError, match=r"Parquet or JSON Lines.*got \['.txt'\]"):
        list(Source(dataset=text).documents())


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", b'{"text": "one"}\n{"text": "tw'), ("a.parquet", b"PAR1 and no more")]
)
def test_damaged_datasets_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    pytest.importorskip("datasets")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match="--dataset: expected files that can be read"):
        list(Source(dataset=tmp_path).documents())


def test_sequences() -> None:
    sequences = Sequences("training", np.arange(101, dtype=np.uint16), 10, seed=3)
    assert len(sequences) == 10
    epochs = [sequences.rows(range(i * 10, i * 10 + 10)) for i in range(3)]
    for epoch in epochs:
        assert epoch.dtype == torch.int64
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 100, 10))
        assert torch.equal(epoch, epoch[:, :1] + torch.arange(11))
    assert not torch.equal(epochs[0], epochs[1])
    # any rows at any time, across epochs too
    again = Sequences("training", np.arange(101, dtype=np.uint16), 10, seed=3)
    assert torch.equal(again.rows(range(15, 25)), torch.cat([epochs[1][5:], epochs[2][:5]]))
    assert not torch.equal(Sequences("training", np.arange(101), 10, seed=4).rows(range(10)), epochs[0])
    in_place = Sequences("held-out", np.arange(101), 10)
    assert in_place.rows(range(10, 12))[:, 0].tolist() == [0, 10]


def test_too_little_text_for_a_sequence() -> None:
    with pytest.raises(RequestError, match="held-out text: expected 11 tokens, a sequence, or more, got 10"):
        Sequences("held-out", np.arange(10), 10)


def test_output_of_a_run_is_not_read_as_text(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "text")
    options = [*SMALL, "--steps", "2", "--text", str(tmp_path), "--out", str(tmp_path / "text" / "out")]
    assert train.main(options) == 0
    # the same text, so the same tokens and a run that is over
    assert train.main(options) == 0
    assert len(list((tmp_path / "text" / "out" / "cache").iterdir())) == 1


# Runs


def test_learns_and_exports(run: Callable[..., int], text: Path, tmp_path: Path, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert run("--steps", 40, "--lr", 0.01, "--eval-every", 20, "--checkpoint-every", 0, "--dtype", "bfloat16") == 0
    lines = records(tmp_path / "out")
    losses = [line["ce"] for line in lines if "ce" in line]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    held = {line["step"]: line["held_out_ce"] for line in lines if "held_out_ce" in line}
    assert held.keys() == {20, 40}
    assert held[40] < held[20]
    assert steps(tmp_path / "out") == []
    printed = capsys.readouterr().out
    assert "step     40  loss" in printed
    assert "tokens/s" in printed
    table = (tmp_path / "out" / "sparsity.csv").read_text().splitlines()
    assert len(table) == 1 + 20 * 2

    exported = tmp_path / "out" / "final"
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    assert type(loaded).__name__ == "SparseLlamaForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    document = next(Source((text,)).documents())
    ids = torch.tensor([tokenizer(document).input_ids[:32]])
    assert tokenizer.decode(ids[0]) == document[: len(tokenizer.decode(ids[0]))]
    assert loaded.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 34)
    # the text is what it was trained on
    loss = loaded(input_ids=ids, labels=ids).loss.item()
    assert loss < losses[0] - 1


def test_export_has_the_logits_of_the_model(run: Callable[..., int], tmp_path: Path, monkeypatch: Any) -> None:
    from transformers import AutoModelForCausalLM

    kept: list[Any] = []
    export = train.Training.export
    monkeypatch.setattr(train.Training, "export", lambda self: kept.append(self) or export(self))
    assert run("--steps", 2) == 0
    ids = torch.arange(32)[None] + 200
    with torch.no_grad():
        trained = kept[0].model(input_ids=ids).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final")(input_ids=ids).logits
    assert kept[0].model.training
    # attention of another implementation, the same sums otherwise
    torch.testing.assert_close(loaded, trained, rtol=1e-5, atol=1e-5)


def test_silu_is_a_stock_llama(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    silu = ["--activation", "silu", "--ffn", "dense", "--steps", 10, "--lr", 0.01, "--checkpoint-every", 5]
    assert run(*silu, out="whole") == 0
    assert "non-zeros" not in capsys.readouterr().out
    lines = [line for line in records(tmp_path / "whole") if "ce" in line]
    assert lines[-1]["ce"] < lines[0]["ce"] - 0.3
    assert {(line["l1"], line["non_zeros"], line["dead"]) for line in lines} == {(0.0, None, None)}
    assert all(line["loss"] == line["ce"] for line in lines)
    assert not (tmp_path / "whole" / "sparsity.csv").exists()

    # with the weights that ReLU begins with
    ends = json.loads((tmp_path / "whole" / "final" / "config.json").read_text())["eos_token_id"]
    shape = model.Shape(2, 32, 64, 2, 300)
    both = [model.build(shape, 32, ends, "dense", torch.device("cpu"), 0, kind) for kind in ("relu", "silu")]
    first, second = (each.state_dict() for each in both)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)

    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000010")
    assert run(*silu) == 0
    assert "resumed from" in capsys.readouterr().out
    assert same(tmp_path / "out", tmp_path / "whole")
    assert run("--steps", 10, "--lr", 0.01, "--ffn", "dense", "--l1", 0) == 2
    assert "activation (silu there, relu here)" in capsys.readouterr().err


def test_silu_is_saved_as_a_stock_llama(run: Callable[..., int], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    assert run("--activation", "silu", "--ffn", "dense", "--steps", 2) == 0
    folder = tmp_path / "out" / "final"
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"], config["hidden_act"]) == (
        "llama",
        ["LlamaForCausalLM"],
        "silu",
    )
    assert not [key for key in config if key.startswith("sparsity")]
    loaded, about = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is LlamaForCausalLM
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.generate(torch.arange(5)[None] + 200, max_new_tokens=2, do_sample=False).shape == (1, 7)


def test_a_seed_decides_weights_and_order(run: Callable[..., int], tmp_path: Path) -> None:
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        # each has another random state
        torch.rand(ord(out))
        assert run("--steps", 2, "--seed", seed, out=out) == 0
    assert same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c")


def test_without_l1_its_term_changes_nothing(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--steps", 4, "--l1", 0) == 0
    lines = [line for line in records(tmp_path / "out") if "ce" in line]
    assert all(line["loss"] == line["ce"] for line in lines)
    assert {line["l1"] for line in lines} == {0}


@pytest.mark.parametrize(("clip", "same_weights"), [(0, True), (1e-3, False)])
def test_gradients_are_clipped_unless_told_not_to(
    run: Callable[..., int], tmp_path: Path, clip: float, same_weights: bool
) -> None:
    # no gradient is this large
    assert run("--steps", 3, "--clip", 1e9, out="never") == 0
    assert run("--steps", 3, "--clip", clip) == 0
    assert same(tmp_path / "never", tmp_path / "out") == same_weights


def test_out_of_memory_is_said_with_advice(run: Callable[..., int], monkeypatch: Any, capsys: Any) -> None:
    def step(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(train.Training, "step", step)
    assert run("--steps", 1) == 2
    message = capsys.readouterr().err
    assert "a smaller --micro-batch" in message
    assert "Tried to allocate 2.00 GiB" in message


def test_dense_and_sparse_begin_alike_and_learn_alike(run: Callable[..., int], tmp_path: Path) -> None:
    for ffn in ("sparse", "dense"):
        assert run("--steps", 10, "--lr", 0.01, "--ffn", ffn, out=ffn) == 0
    pairs = [(a["ce"], b["ce"]) for a, b in zip(records(tmp_path / "sparse"), records(tmp_path / "dense")) if "ce" in a]
    assert len(pairs) == 5
    for a, b in pairs:
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize(
    "more", [["--checkpoint-activations"], ["--micro-batch", 4], ["--ffn", "dense", "--checkpoint-activations"]]
)
def test_memory_is_saved_without_other_results(run: Callable[..., int], tmp_path: Path, more: list[object]) -> None:
    base = ["--steps", 3, "--observe-every", 1, *(more[:2] if "dense" in more else [])]
    assert run(*base, out="base") == 0
    assert run(*base, *more, out="more") == 0
    for a, b in zip(records(tmp_path / "base"), records(tmp_path / "more")):
        assert a == pytest.approx(b, rel=1e-5)
    if "--checkpoint-activations" in more:
        assert same(tmp_path / "base", tmp_path / "more")


@pytest.mark.parametrize(("ffn", "graphs"), [("sparse", 4), ("dense", 5)])
def test_layers_share_what_is_compiled(run: Callable[..., int], tmp_path: Path, ffn: str, graphs: int) -> None:
    from torch._dynamo.utils import counters

    common = ["--steps", 3, "--layers", 3, "--ffn", ffn, "--observe-every", 2]
    assert run(*common, out="eager") == 0
    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        # code generation takes most of the time, and is not in question
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
        assert run(*common, "--compile", out="compiled") == 0
    # training and evaluation of a layer and of the loss; a dense layer's inputs are counted in every other step
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    for a, b in zip(records(tmp_path / "eager"), records(tmp_path / "compiled")):
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_threads_do_not_spin_unless_told_to(given: str | None, expected: str, root: Path) -> None:
    """OpenMP reads the environment as torch is imported."""
    code = """
import os, runpy, sys
class Seen:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            sys.exit()
sys.meta_path.insert(0, Seen())
runpy.run_path("examples/train.py", run_name="__main__")
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [expected], done.stderr


def test_tensor_parallel_is_not_compiled() -> None:
    here = parallel.World(0, 2, "tp", torch.device("cpu"))
    choice = options.parse("", ["--text", "x", "--out", "x", "--compile"])
    with pytest.raises(RequestError, match="--compile: expected another mode than --parallel tp"):
        train.compiles(choice, here)
    choice.compile = None
    on_gpu = {mode: dataclasses.replace(here, mode=mode, device=torch.device("cuda")) for mode in ("tp", "fsdp", "")}
    assert {mode: train.compiles(choice, world) for mode, world in on_gpu.items()} == {
        "tp": False,
        "fsdp": True,
        "": True,
    }


def test_the_learning_rate_follows_its_schedule() -> None:
    run: Any = object.__new__(train.Training)
    run.choice = options.parse("", ["--text", "x", "--out", "x", "--steps", "101", "--warmup", "10", "--l1", "4"])
    run.schedule = 101
    rates = []
    for run.done in range(101):
        rates.append(run.learning_rate())
    assert rates[:10] == pytest.approx([1e-4 * i for i in range(1, 11)])
    assert rates[10] == max(rates) == 1e-3
    assert rates[55] == pytest.approx(5.5e-4, rel=0.01)
    assert rates[100] == pytest.approx(1e-4)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert [run.coefficient(step) for step in (0, 5, 10, 50)] == [0, 2, 4, 4]
    # steps that were added
    for run.done in (101, 150, 300):
        assert run.learning_rate() == pytest.approx(1e-4)


def test_shapes_have_the_sizes_of_their_names() -> None:
    for name, shape in model.SHAPES.items():
        config = model.configuration(shape, 2048, 0)
        with torch.device("meta"):
            built = model.SparseLlamaForCausalLM(config)
        size = sum(p.numel() for p in built.parameters()) / 1e6
        expected = float(name[:-1]) * (1000 if name.endswith("B") else 1)
        assert size == pytest.approx(expected, rel=0.07), name


# Ending and going on


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    run: Callable[..., int], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    step, deaths = train.Training.step, {}

    def interrupted(self: Any, stopping: Any) -> bool:
        complete = step(self, stopping)
        # a model that draws random numbers
        self.parameters[0].data.add_(torch.randn(()), alpha=1e-3)
        if self.done in deaths:
            request(deaths[self.done])
        return bool(complete)

    monkeypatch.setattr(train.Training, "step", interrupted)
    arguments = ["--steps", 9, "--checkpoint-every", 3, "--eval-every", 3, *SPARSE]
    assert run(*arguments, out="whole") == 0
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    deaths |= {2: signal.SIGTERM, 6: signal.SIGINT}
    assert run(*arguments) == 128 + signal.SIGTERM
    printed = capsys.readouterr().out
    assert "SIGTERM: stopping after this micro-batch; one more stops at once" in printed
    assert "stopped; saved up to step 2; the same command goes on from there" in printed
    assert steps(tmp_path / "out") == [2]
    # with any global random state
    torch.manual_seed(99)
    assert run(*arguments) == 128 + signal.SIGINT
    assert steps(tmp_path / "out") == [3, 6]
    assert run(*arguments) == 0
    assert "step-00000006" in capsys.readouterr().out
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before

    assert same(tmp_path / "out", tmp_path / "whole")
    whole = records(tmp_path / "whole")
    assert [line for line in records(tmp_path / "out") if line in whole] == whole
    stats = [(tmp_path / out / "sparsity.csv").read_text().splitlines() for out in ("out", "whole")]
    assert stats[0][-2:] == stats[1][-2:]
    # noise was drawn for the neurons dead at step 4, before the run stopped
    assert 0.3 < next(line["dead"] for line in whole if line["step"] == 6) < 0.9


def test_a_target_is_reached_and_goes_on(run: Callable[..., int], tmp_path: Path, monkeypatch: Any) -> None:
    arguments = ["--steps", 60, "--target-nnz", 6, "--sharing", 0.5, "--lr", 0.02, "--checkpoint-every", 20]
    assert run(*arguments, out="whole") == 0
    whole = [line for line in records(tmp_path / "whole") if "non_zeros" in line]
    assert whole[0]["non_zeros"] > 20
    assert whole[-1]["non_zeros"] == pytest.approx(6, rel=0.25)
    # the logged coefficient is the controller's
    assert len({line["l1"] for line in whole}) > 20

    forward, read = train.Training.forward, 0

    def interrupted(self: Any, inputs: Any, targets: Any) -> torch.Tensor:
        nonlocal read
        read += self.model.training
        # within a step: the first, and one later
        if read in (3, 103) and self.model.training:
            request(signal.SIGTERM)
            read += 1
        loss: torch.Tensor = forward(self, inputs, targets)
        return loss

    monkeypatch.setattr(train.Training, "forward", interrupted)
    for _ in range(2):
        assert run(*arguments) == 128 + signal.SIGTERM
    assert run(*arguments) == 0
    assert same(tmp_path / "out", tmp_path / "whole")
    # added steps keep the last coefficient
    assert run(*arguments, "--steps", 64) == 0
    last = [line for line in records(tmp_path / "out") if "non_zeros" in line]
    assert last[-1]["non_zeros"] == pytest.approx(6, rel=0.25)


def request(number: int) -> None:
    """Send this process a signal and wait until a thread has received it."""
    os.kill(os.getpid(), number)
    time.sleep(0.2)


@pytest.mark.parametrize("begun", [0, 4, 5])
def test_a_step_that_is_stopped_has_changed_nothing(
    run: Callable[..., int], tmp_path: Path, monkeypatch: Any, capsys: Any, begun: int
) -> None:
    """Each step has four micro-batches; step 4 looks for dead neurons, step 5 does not."""
    forward, read, stops = train.Training.forward, 0, [4 * begun + 3]

    def interrupted(self: Any, inputs: Any, targets: Any) -> torch.Tensor:
        nonlocal read
        read += self.model.training
        if read in stops and self.model.training:
            stops.clear()
            request(signal.SIGTERM)
        # a model that draws random numbers
        return forward(self, inputs, targets) * (1 + 0.1 * torch.rand(()))

    monkeypatch.setattr(train.Training, "forward", interrupted)
    arguments = ["--steps", 8, "--checkpoint-every", 8, *SPARSE]
    assert run(*arguments, "--log-every", 3) == 128 + signal.SIGTERM
    assert read == 4 * begun + 3
    assert steps(tmp_path / "out") == ([begun] if begun else [])
    said = f"saved up to step {begun}" if begun else "no step was complete"
    assert f"stopped; {said}; the same command goes on" in capsys.readouterr().out
    stopped = records(tmp_path / "out")
    assert [line["step"] for line in stopped] == ([3, begun] if begun else [])

    assert run(*arguments, "--log-every", 1, out="whole") == 0
    assert run(*arguments, "--log-every", 1) == 0
    assert same(tmp_path / "out", tmp_path / "whole")
    expected = records(tmp_path / "whole")
    assert [line for line in records(tmp_path / "out") if line["step"] > begun] == expected[begun:]
    # only of complete steps
    for line in stopped[1:]:
        since = expected[3:begun]
        assert line["loss"] == pytest.approx(sum(each["loss"] for each in since) / len(since), rel=1e-5)
        for name in ("dead", "lr", "gradient"):
            assert line[name] == since[-1][name], name


def test_evaluation_is_stopped_and_made_up_for(run: Callable[..., int], tmp_path: Path, monkeypatch: Any) -> None:
    forward, asked = train.Training.forward, []

    def interrupted(self: Any, inputs: Any, targets: Any) -> torch.Tensor:
        if not self.model.training and self.done == 4 and len(asked) < 1:
            asked.append(self.done)
            request(signal.SIGINT)
        return forward(self, inputs, targets)

    arguments = ["--steps", 6, "--eval-every", 2, "--eval-sequences", 8, "--log-every", 3]
    assert run(*arguments, out="whole") == 0
    monkeypatch.setattr(train.Training, "forward", interrupted)
    assert run(*arguments) == 128 + signal.SIGINT
    assert steps(tmp_path / "out") == [4]
    assert [line["step"] for line in records(tmp_path / "out") if "held_out_ce" in line] == [2]
    assert run(*arguments) == 0
    assert records(tmp_path / "out") == records(tmp_path / "whole")


def test_slow_parts_report_progress(run: Callable[..., int], monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(report.Console.__init__, "__defaults__", (0.0,))
    assert run("--steps", 1, "--eval-sequences", 4) == 0
    printed = capsys.readouterr().out
    for i in range(1, 4):
        assert f"step      1  micro-batch {i} of 4" in printed
    assert "step      1  held-out micro-batch 1 of 2" in printed
    monkeypatch.setattr(report.Console.__init__, "__defaults__", (60.0,))
    assert run("--steps", 1, out="fast") == 0
    assert "micro-batch" not in capsys.readouterr().out


def test_finished_runs_are_extended(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    arguments = ["--checkpoint-every", 10, "--log-every", 1, "--lr", 0.01]
    assert run("--steps", 40, *arguments) == 0
    first = {line["step"]: line for line in records(tmp_path / "out") if "lr" in line}
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    capsys.readouterr()
    assert run("--steps", 60, *arguments) == 0
    printed = capsys.readouterr().out
    assert "extended from 40 to 60 steps: those after 40, where the learning rate was to end, have --min-lr 0.001" in (
        printed
    )
    lines = {line["step"]: line for line in records(tmp_path / "out") if "lr" in line}
    assert list(lines) == list(range(1, 61))
    assert {step: lines[step] for step in first} == first
    assert [lines[step]["lr"] for step in range(41, 61)] == pytest.approx([0.001] * 20)
    assert not same(tmp_path / "out", tmp_path / "other")
    # in two parts, or after a stop, the result is the same
    assert run("--steps", 50, *arguments, out="other") == 0
    assert run("--steps", 60, *arguments, out="other") == 0
    shutil.rmtree(tmp_path / "other" / "checkpoints" / "step-00000060")
    assert run("--steps", 60, *arguments, out="other") == 0
    assert same(tmp_path / "out", tmp_path / "other")
    assert run("--steps", 40, *arguments) == 2
    assert "steps (60 there, 40 here); repeat its options, of which --steps alone may grow" in capsys.readouterr().err
    # a named checkpoint must stay
    assert run("--steps", 80, "--warmup", 4, *arguments) == 2
    assert "differs in warmup (2 there, 4 here)" in capsys.readouterr().err


def test_the_old_model_stays_until_the_new_one_is_there(
    run: Callable[..., int], tmp_path: Path, monkeypatch: Any
) -> None:
    assert run("--steps", 2) == 0
    before = weights(tmp_path / "out")

    def export(*arguments: Any) -> None:
        folder = arguments[4]
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        assert all(torch.equal(before[name], value) for name, value in weights(tmp_path / "out").items())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "export", export)
        assert run("--steps", 4) == 128 + signal.SIGINT
    after = weights(tmp_path / "out")
    assert all(torch.equal(before[name], value) for name, value in after.items())
    (tmp_path / "out" / ".final.partial-killed").mkdir()
    assert run("--steps", 4) == 0
    assert not all(torch.equal(before[name], value) for name, value in weights(tmp_path / "out").items())
    assert not _files.leftovers(tmp_path / "out" / "final")


# the writer, and whether a whole checkpoint is left if it fails
WRITERS = {
    "tokens": (Path, "open", "train.bin", False),
    "tokenizer": (data, "_tokenise", "", False),
    "tensors": (checkpoint.dcp, "save", "", True),
    "state": (checkpoint, "_write", "state.pt", True),
    "metrics": (report.Metrics, "write", "", True),
    "model": (model, "export", "", True),
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_is_one_sentence(
    run: Callable[..., int], text: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, what: str
) -> None:
    where, name, file, kept = WRITERS[what]
    arguments = ["--steps", 4, "--checkpoint-every", 2, "--cache", tmp_path / "cache"]
    if kept:
        assert run(*arguments[:2], "--steps", 2, *arguments[2:]) == 0
    original, full = getattr(where, name), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*given: Any, **more: Any) -> Any:
        if file and not any(str(each).endswith(file) for each in given):
            return original(*given, **more)
        if what in ("tokenizer", "model"):
            raise ValueError(f"IoError(Os {{ code: 28, message: {os.strerror(errno.ENOSPC)!r} }})")
        try:
            try:
                raise full
            except OSError:
                raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904
        except RuntimeError as error:
            if what == "tensors":
                raise CheckpointException("save", {0: (error, None)}) from None  # type: ignore[dict-item]
            raise

    with monkeypatch.context() as patch:
        patch.setattr(where, name, refuse)
        capsys.readouterr()
        assert run(*arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"train.py: error: no space is left on the disk of {tmp_path}")
    assert "MB free)" in line
    last = tmp_path / "out" / "checkpoints" / f"step-0000000{4 if what == 'model' else 2}"
    assert (f"{last}, {tmp_path / 'out' / 'final'}; make room, and the same command goes on" in line) == kept
    assert ("kept: nothing; make room, and the same command begins again" in line) != kept
    # no partial file takes space
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob(".*partial*"))
    assert run(*arguments) == 0
    assert steps(tmp_path / "out") == [2, 4]


def test_finished_runs_stay_finished(run: Callable[..., int], tmp_path: Path, monkeypatch: Any) -> None:
    assert run("--steps", 2) == 0
    before = weights(tmp_path / "out")
    monkeypatch.setattr(train.Training, "step", None)
    shutil.rmtree(tmp_path / "out" / "final")
    assert run("--steps", 2) == 0
    assert all(torch.equal(before[name], value) for name, value in weights(tmp_path / "out").items())


def test_without_checkpoints_a_run_begins_again(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--steps", 2, "--checkpoint-every", 0) == 0
    first = records(tmp_path / "out")
    assert run("--steps", 2, "--checkpoint-every", 0) == 0
    assert records(tmp_path / "out") == first
    assert (tmp_path / "out" / "metrics.old.jsonl").exists()


def test_damaged_checkpoints_are_not_read(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--steps", 8, "--checkpoint-every", 1, "--keep", 8) == 0
    out = tmp_path / "out"
    saved = {step: out / "checkpoints" / f"step-{step:08d}" for step in range(1, 9)}
    assert steps(out) == list(saved)
    # cut short, missing, without a manifest, with half a manifest, under the name of an unfinished one
    (part,) = saved[8].glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    (saved[7] / "random-0.pt").unlink()
    (saved[6] / "manifest.json").unlink()
    (saved[5] / "manifest.json").write_text('{"step": 5, "fi')
    saved[4].rename(saved[4].with_suffix(".tmp"))
    assert steps(out) == [1, 2, 3]
    final = weights(out)
    assert run("--steps", 8, "--checkpoint-every", 1, "--resume", saved[8], out="other") == 2
    assert run("--steps", 8, "--checkpoint-every", 1, "--keep", 8) == 0
    assert steps(out) == list(range(1, 9))
    assert all(torch.equal(final[name], value) for name, value in weights(out).items())


def test_checkpoints_of_other_bytes_are_not_read(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    assert run("--steps", 2, "--checkpoint-every", 1) == 0
    folder = tmp_path / "out" / "checkpoints" / "step-00000002"
    (part,) = folder.glob("*.distcp")
    whole = part.read_bytes()
    part.write_bytes(whole[:9000] + bytes(64) + whole[9064:])
    assert part.read_bytes() != whole
    assert run("--steps", 2) == 2
    assert f"{folder} is damaged: expected other bytes in {part.name}; remove it" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert run("--steps", 2, "--checkpoint-every", 1) == 0
    assert (folder / part.name).stat().st_size == len(whole)


def test_two_runs_do_not_share_a_folder(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    here = parallel.World(0, 1, "", torch.device("cpu"))
    with checkpoint.alone(tmp_path / "out", here):
        assert run("--steps", 1) == 2
        assert "expected a folder of this run alone" in capsys.readouterr().err
    assert run("--steps", 1) == 0


def test_metrics_survive_a_kill_as_the_run_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    text = "".join(f'{{"step": {i}}}\n' for i in range(4))
    path.write_text(text)
    monkeypatch.setattr(os, "replace", lambda *_: sys.exit(9))
    with pytest.raises(SystemExit):
        report.Metrics(path, 2)
    assert path.read_text() == text
    monkeypatch.undo()
    report.Metrics(path, 2)
    assert path.read_text() == text[: text.index('{"step": 3')]


def test_a_clip_of_0_is_none() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert parallel.clip([weight], 0.0) == 5
    assert weight.grad.tolist() == [3, 4]
    assert parallel.clip([weight], 1.0) == 5
    assert weight.grad.norm() == pytest.approx(1)


def test_resume_says_what_differs(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    assert run("--steps", 2) == 0
    capsys.readouterr()
    assert run("--steps", 1, "--lr", 0.5) == 2
    message = capsys.readouterr().err
    assert "steps (2 there, 1 here), lr (0.001 there, 0.5 here), min_lr" in message
    assert "hidden" not in message
    assert run("--steps", 4, "--lr", 0.5) == 2
    assert "differs in lr (0.001 there, 0.5 here), min_lr" in capsys.readouterr().err
    # of another text
    other = tmp_path / "text"
    other.mkdir()
    for i in range(9):
        (other / f"{i}.txt").write_text(f"another {i} " * 50)
    assert run("--steps", 2, "--text", other) == 2
    assert "differs in text (" in capsys.readouterr().err
    # place, speed and order may change
    assert run("--steps", 2, "--ffn", "dense", "--micro-batch", 4, "--log-every", 1) == 0


def test_runs_are_not_mixed(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    assert run("--steps", 4, "--checkpoint-every", 1, "--keep", 9) == 0
    earlier = tmp_path / "out" / "checkpoints" / "step-00000002"
    for resume in ("never", earlier):
        assert run("--steps", 4, "--resume", resume) == 2
        assert "step-00000003, " in capsys.readouterr().err
    # from there into another folder
    assert run("--steps", 4, "--resume", earlier, out="other") == 0
    assert same(tmp_path / "out", tmp_path / "other")


def test_a_lost_loss_ends_the_run_before_it_is_saved(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    arguments = ["--steps", 8, "--checkpoint-every", 2, "--lr", 1e38, "--warmup", 0, "--log-every", 100]
    assert run(*arguments) == 2
    assert "the loss became nan by step 2" in capsys.readouterr().err
    assert steps(tmp_path / "out") == []


def test_a_lost_gradient_ends_the_run_before_it_is_saved(
    run: Callable[..., int], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    clip = parallel.clip

    def lost(parameters: list[Any], limit: float) -> torch.Tensor:
        if steps(tmp_path / "out") == [1]:
            parameters[0].grad[0, 0] = float("nan")
        return clip(parameters, limit)

    monkeypatch.setattr(parallel, "clip", lost)
    assert run("--steps", 4, "--checkpoint-every", 1) == 2
    assert "the gradient became nan by step 2" in capsys.readouterr().err
    assert steps(tmp_path / "out") == [1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--vocab", "256"], "expected 257 or more"),
        (["--intermediate", "100"], "multiple of 8"),
        (["--heads", "3"], "multiple of twice the 3 heads"),
        (["--dataset", "x"], "either --text or --dataset"),
        (["--held-out", "1.5"], "between 0 and 1"),
        (["--reinitialize", "2"], "between 0 and 1"),
        (["--max-bytes", "lots"], "--max-bytes"),
        (["--steps", "0"], "expected 1 or more, got 0"),
        (["--warmup", "-1"], "expected 0 or more, got -1"),
        (["--l1=-0.1"], "expected a number of 0 or more, got -0.1"),
        (["--lr", "nan"], "expected a number of 0 or more, got nan"),
        (["--clip", "inf"], "expected a number of 0 or more, got inf"),
        (["--seed", "-1"], "expected 0 or more, got -1"),
        (["--min-lr", "1"], "--min-lr: expected at most --lr 0.001, got 1"),
        (["--reinitialize", "0.1", "--observe-every", "0"], "--reinitialize: expected --observe-every of 1 or more"),
        (["--activation", "silu"], "--ffn: expected dense with --activation silu, which sets nothing to zero"),
        (["--activation", "silu", "--ffn", "dense", "--l1", "2e-5"], "--l1: expected 0 with --activation silu"),
        (["--activation", "silu", "--ffn", "dense", "--reinitialize", "0.1"], "--reinitialize: expected 0 with"),
        (["--activation", "silu", "--ffn", "dense", "--parallel", "tp"], "--parallel: expected ddp or fsdp with"),
        (["--activation", "gelu"], "invalid choice: 'gelu'"),
        (["--target-nnz", "0"], "--target-nnz: expected a number above 0, without --l1, got 0"),
        (["--target-nnz", "5", "--l1", "0.1"], "--target-nnz: expected a number above 0, without --l1, got 5 and --l1"),
        (["--sharing", "0.5"], "--sharing: expected a share of at most 1, with --target-nnz, got 0.5"),
        (["--sharing", "2", "--target-nnz", "5"], "--sharing: expected a share of at most 1"),
        (["--activation", "silu", "--ffn", "dense", "--target-nnz", "5"], "--target-nnz: expected None with"),
    ],
)
def test_options_are_checked(tmp_path: Path, capsys: Any, more: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        train.main(command(tmp_path, tmp_path, tmp_path / "out", *more))
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tokens-per-step", 100], "--tokens-per-step: expected a multiple of 64 (--sequence 32 x --micro-batch 2"),
        (["--text", "/nowhere"], "--text: expected a folder or a file, got '/nowhere' (does not exist)"),
        (["--suffix", ".md"], "--text: expected files that end in .md"),
        (["--max-bytes", 10], "expected at least 2 documents"),
        (["--sequence", 4096, "--tokens-per-step", 8192, "--held-out", 0.01], "held-out text: expected 4,097 tokens"),
        (["--parallel", "ddp"], "--parallel ddp: expected several processes"),
        (["--out", "/dev/null"], "--out: expected a folder to write to, got '/dev/null': File exists"),
        (["--out", "/dev/null/out"], "--out: expected a folder to write to, got '/dev/null/out': Not a directory"),
        (["--out", "x" * 300], "': File name too long"),
        (["--cache", "/dev/null/x"], "--cache: expected a folder to write to, got '/dev/null/x': Not a directory"),
        (["--resume", "/nowhere"], "--resume: expected a complete checkpoint, got '/nowhere'; there are none"),
        *([] if torch.cuda.is_available() else [(["--device", "cuda"], "--device: expected one of 0 GPUs")]),
    ],
)
def test_impossible_requests_are_refused(
    run: Callable[..., int], capsys: Any, more: list[object], message: str
) -> None:
    assert run("--steps", 1, *more) == 2
    assert message in capsys.readouterr().err


def test_sizes() -> None:
    assert [options.size(text) for text in ("4096", "1K", "1.5m", "2G")] == [4096, 1024, 3 << 19, 2 << 30]


# Other processes


def others(target: Callable[..., None], *arguments: tuple[Any, ...]) -> list[int | None]:
    """Run ``target`` in one process per tuple of arguments, all at once; return their exit codes."""
    context = ranks.forks()
    processes = [context.Process(target=target, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    return [process.exitcode for process in processes]


def train_until(command: list[str], where: tuple[str, int, bool]) -> None:
    """Train, and kill this process before or after the given call of a function that saving a checkpoint makes."""
    torch.set_num_threads(1)
    name, left, after = where
    owner, attribute = {
        "tensors": (checkpoint.dcp, "save"),
        "state": (torch, "save"),
        "seal": (checkpoint, "seal"),
        "rename": (Path, "rename"),
        "remove": (shutil, "rmtree"),
    }[name]
    original = getattr(owner, attribute)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if not left and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, attribute, deadly)
    sys.exit(train.main(command))


def test_killed_while_saving_loses_nothing(run: Callable[..., int], text: Path, cache: Path, tmp_path: Path) -> None:
    arguments = ["--steps", 8, "--checkpoint-every", 1, "--keep", 2, *SPARSE]
    assert run(*arguments, out="whole") == 0
    # the function, the call at which the process dies, whether after it, and whether the step has been saved by then
    deaths = [
        (("tensors", 1, False), False),
        (("tensors", 2, True), False),
        # in the middle of the tensors, and behind them
        (("state", 2, False), False),
        (("state", 7, True), False),
        (("seal", 1, False), False),
        (("seal", 2, True), False),
        # the first rename is of a file within
        (("rename", 1, True), False),
        (("rename", 2, False), False),
        (("rename", 2, True), True),
        # an older one is removed; the next run removes what is left of it
        (("remove", 1, False), True),
        (("remove", 1, True), False),
        (("remove", 1, True), True),
    ]
    for where, saved in deaths:
        assert others(train_until, (command(text, cache, tmp_path / "out", *arguments), where)) == [-signal.SIGKILL]
        # metrics are written before the checkpoint
        reached = records(tmp_path / "out")[-1]["step"]
        assert (steps(tmp_path / "out") or [0])[-1] == (reached if saved else reached - 1), where
    assert run(*arguments) == 0
    assert steps(tmp_path / "out") == [7, 8]
    assert same(tmp_path / "out", tmp_path / "whole")
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 2


def train_as_rank(rank: int, port: int, command: list[str], stop: bool) -> None:
    """Train as one rank of two; ``stop``: the second one gets SIGTERM in the first micro-batch of the second step."""
    torch.set_num_threads(1)
    forward = train.Training.forward

    def stopped(self: Any, inputs: Any, targets: Any) -> torch.Tensor:
        if self.done == 1 and rank == 1 and self.model.training:
            request(signal.SIGTERM)
        return forward(self, inputs, targets)

    if stop:
        setattr(train.Training, "forward", stopped)  # noqa: B010
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    sys.exit(train.main(command))


def two_ranks(command: list[str], stop: bool = False) -> list[int | None]:
    """Train in two processes; return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return others(train_as_rank, (0, port, command, stop), (1, port, command, stop))


def test_two_ranks_are_as_one(run: Callable[..., int], text: Path, cache: Path, tmp_path: Path) -> None:
    def two(mode: str, *more: object, stop: bool = False) -> list[int | None]:
        return two_ranks(command(text, cache, tmp_path / mode, "--parallel", mode, *arguments, *more), stop)

    arguments = ["--steps", 4, "--checkpoint-every", 2, "--keep", 9, "--log-every", 1]
    assert run(*arguments, out="one") == 0
    start, one = tmp_path / "one" / "checkpoints" / "step-00000002", weights(tmp_path / "one")
    for mode in ("ddp", "fsdp"):
        # both give up the step between the same micro-batches
        assert two(mode, stop=True) == [128 + signal.SIGTERM] * 2
        assert steps(tmp_path / mode) == [1]
        assert [line["step"] for line in records(tmp_path / mode)] == [1]
    assert two("ddp") == [0, 0]
    shutil.rmtree(tmp_path / "fsdp")
    # from what one process saved
    assert two("fsdp", "--resume", start) == [0, 0]
    assert two("tp", "--resume", start) == [0, 0]
    for mode in ("ddp", "fsdp", "tp"):
        for name, weight in weights(tmp_path / mode).items():
            # sums in another order: 4e-8 when this was written, and a step changes 1e-2
            assert (weight - one[name]).norm() < 1e-6 * one[name].norm(), (mode, name)
        lines = records(tmp_path / mode)
        for line, expected in zip(lines, records(tmp_path / "one")[-len(lines) :]):
            assert line == pytest.approx(expected, rel=1e-5)
        # and back, with what two saved
        saved = tmp_path / mode / "checkpoints" / "step-00000004"
        assert run(*arguments, "--resume", saved, out=f"{mode}-back") == 0
        assert same(tmp_path / mode, tmp_path / f"{mode}-back")


def train_and_signal(command: list[str], delays: tuple[float, ...]) -> None:
    """Train with a micro-batch that takes a minute; send it signals after these delays in seconds."""
    torch.set_num_threads(1)

    def slow(self: Any, inputs: Any, targets: Any) -> torch.Tensor:
        def send() -> None:
            for delay in delays:
                time.sleep(delay)
                os.kill(os.getpid(), signal.SIGTERM)

        if self.done < 1:
            return forward(self, inputs, targets)
        threading.Thread(target=send, daemon=True).start()
        # like a long call into C++, it keeps Python's handlers from running; other threads get the signals
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        ctypes.CDLL(None).usleep(60_000_000)
        raise AssertionError("unreachable")

    forward = train.Training.forward
    setattr(train.Training, "forward", slow)  # noqa: B010
    train.Stop.SAME = 0.5
    os.dup2(os.open(f"{command[command.index('--out') + 1]}.log", os.O_WRONLY | os.O_CREAT), 1)
    sys.exit(train.main(command))


def test_a_second_signal_stops_at_once(text: Path, cache: Path, tmp_path: Path) -> None:
    """It stops any computation; a signal that a launcher sends twice is one request."""
    began = time.monotonic()
    arguments = command(text, cache, tmp_path / "out", "--steps", 4, "--checkpoint-every", 1)
    assert others(train_and_signal, (arguments, (0.5, 0.1, 1.0))) == [128 + signal.SIGTERM]
    assert time.monotonic() - began < 50
    log = (tmp_path / "out.log").read_text()
    assert log.count("SIGTERM: stopping after this micro-batch") == 1
    assert log.count("SIGTERM: stopped at once") == 1
    assert steps(tmp_path / "out") == [1]


def test_silu_is_sharded(run: Callable[..., int], text: Path, cache: Path, tmp_path: Path) -> None:
    silu = ["--activation", "silu", "--ffn", "dense", "--steps", 2]
    assert run(*silu, out="one") == 0
    assert two_ranks(command(text, cache, tmp_path / "two", "--parallel", "fsdp", *silu)) == [0, 0]
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all((two[name] - one[name]).norm() < 1e-6 * one[name].norm() for name in one)


def test_indivisible_sizes_are_refused(monkeypatch: Any) -> None:
    def plan(_: Any) -> None:
        raise ValueError("the number of heads of q_proj must be a multiple of the 2 ranks, got 1")

    monkeypatch.setattr(parallel, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(parallel, "tensor_parallel_plan", plan)
    here = parallel.World(0, 2, "tp", torch.device("cpu"))
    with pytest.raises(RequestError, match="--parallel tp: the number of heads of q_proj must be a multiple"):
        parallel.spread(None, here, torch.float32)


def test_runs_are_put_beside_each_other(
    run: Callable[..., int], tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(str(root / "profiling"))
    training_run: Any = importlib.import_module("training_run")
    assert run("--steps", 4, "--eval-every", 2, out="sparse") == 0
    assert run("--steps", 4, "--eval-every", 2, "--ffn", "dense", out="dense") == 0
    assert run("--steps", 2, out="short") == 0
    names = [f"{name}={tmp_path / name}" for name in ("dense", "sparse", "short")]
    out = tmp_path / "runs.json"
    assert training_run.main([*names[:2], "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [[row["step"] for row in steps] for steps in written["runs"].values()] == [[2, 4], [2, 4]]
    assert all(row["held_out_ce"] > 0 and row["ce"] > 0 for steps in written["runs"].values() for row in steps)
    assert [len(layers) for layers in written["layers"].values()] == [2, 2]
    assert written["differences"] == {"dense": {}, "sparse": {"ffn": "sparse"}}
    assert str(tmp_path) not in out.read_text()
    with pytest.raises(SystemExit):
        training_run.main([names[0], names[2], "--out", str(out)])
    assert "expected runs of one --steps, got 2, 4" in capsys.readouterr().err
