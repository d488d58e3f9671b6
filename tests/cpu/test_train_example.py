"""examples/train.py: a run learns, exports what it learnt, and does what its options say; what it reads."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import train
from small_runs import SMALL, records, same, steps
from training import RequestError, data, model, options, parallel, whole
from training.data import Sequences, Source
from training.optimizer import learning_rate

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


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
    assert type(loaded).__name__ == "LlamaForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    document = next(Source((text,)).documents())
    ids = torch.tensor([tokenizer(document).input_ids[:32]])
    assert tokenizer.decode(ids[0]) == document[: len(tokenizer.decode(ids[0]))]
    assert loaded.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 34)
    # the text is what it was trained on
    loss = loaded(input_ids=ids, labels=ids).loss.item()
    assert loss < losses[0] - 1


@pytest.mark.nightly
def test_silu_is_a_stock_llama(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    silu = ["--activation", "silu", "--ffn", "dense", "--steps", 10, "--lr", 0.01, "--checkpoint-every", 5]
    assert run(*silu, out="whole") == 0
    assert "non-zeros" not in capsys.readouterr().out
    lines = [line for line in records(tmp_path / "whole") if "ce" in line]
    assert lines[-1]["ce"] < lines[0]["ce"] - 0.3
    assert {(line["l1"], line["non_zeros"], line["dead"]) for line in lines} == {(0.0, None, None)}
    assert all(line["loss"] == line["ce"] for line in lines)
    assert not (tmp_path / "whole" / "sparsity.csv").exists()

    folder = tmp_path / "whole" / "final"
    config = json.loads((folder / "config.json").read_text())
    kinds = (config["model_type"], config["architectures"], config["hidden_act"])
    assert kinds == ("llama", ["LlamaForCausalLM"], "silu")
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


def test_out_of_memory_is_said_with_advice(run: Callable[..., int], monkeypatch: Any, capsys: Any) -> None:
    def step(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(train.Training, "step", step)
    assert run("--steps", 1) == 2
    message = capsys.readouterr().err
    assert "a smaller --micro-batch" in message
    assert "Tried to allocate 2.00 GiB" in message


def test_what_does_not_change_results(run: Callable[..., int], tmp_path: Path) -> None:
    """Smaller micro-batches, checkpointed activations, a clip that nothing exceeds; dense begins and learns alike."""
    given: dict[str, list[object]] = {
        "plain": [],
        "micro": ["--micro-batch", 4],
        "unclipped": ["--clip", 0],
        "hardly clipped": ["--clip", 1e9],
        "clipped": ["--clip", 1e-3],
        "dense": ["--ffn", "dense"],
        "checkpointed": ["--ffn", "dense", "--checkpoint-activations"],
    }
    for name, more in given.items():
        assert run("--steps", 3, "--observe-every", 1, "--lr", 0.01, *more, out=name) == 0
    found = {name: records(tmp_path / name) for name in given}
    for a, b in zip(found["plain"], found["micro"], strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert found["dense"] == found["checkpointed"]
    losses = [[line["ce"] for line in found[name] if "ce" in line] for name in ("plain", "dense")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for one, other, equal in (
        ("dense", "checkpointed", True),
        ("unclipped", "hardly clipped", True),
        ("unclipped", "clipped", False),
    ):
        assert same(tmp_path / one, tmp_path / other) == equal


@pytest.mark.nightly
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


def test_tensor_parallel_is_not_compiled() -> None:
    here = parallel.World(0, 2, "tp", torch.device("cpu"))
    choice = options.parse("", ["--text", "x", "--out", "x", "--compile"])
    with pytest.raises(RequestError, match="--compile: expected another mode than --parallel tp"):
        train.compiles(choice, here)


def test_the_learning_rate_follows_its_schedule() -> None:
    rates = [learning_rate(step, 101, 10, 1e-3, 1e-4) for step in range(101)]
    assert rates[:10] == pytest.approx([1e-4 * i for i in range(1, 11)])
    assert rates[10] == max(rates) == 1e-3
    assert rates[55] == pytest.approx(5.5e-4, rel=0.01)
    assert rates[100] == pytest.approx(1e-4)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    # steps that were added
    for step in (101, 150, 300):
        assert learning_rate(step, 101, 10, 1e-3, 1e-4) == pytest.approx(1e-4)


def test_shapes_have_the_sizes_of_their_names() -> None:
    for name, shape in model.SHAPES.items():
        config = model.configuration(shape, 2048, 0)
        with torch.device("meta"):
            built = model.LlamaForCausalLM(config)
        size = sum(p.numel() for p in built.parameters()) / 1e6
        expected = float(name[:-1]) * (1000 if name.endswith("B") else 1)
        assert size == pytest.approx(expected, rel=0.07), name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tokens-per-step", 100], "--tokens-per-step: expected a multiple of 64 (--sequence 32 x --micro-batch 2"),
        (["--text", "/nowhere"], "--text: expected a folder or a file, got '/nowhere' (does not exist)"),
        (["--suffix", ".md"], "--text: expected files that end in .md"),
        (["--max-bytes", 10], "expected at least 2 documents"),
        (["--sequence", 4096, "--tokens-per-step", 8192, "--held-out", 0.01], "held-out text: expected 4,097 tokens"),
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


# Text


def test_documents_are_the_text_files(text: Path) -> None:
    documents = list(Source((text,)).documents())
    files = {path.read_text() for path in text.rglob("*.txt") if path.stem.isdigit()}
    assert len(documents) == 60
    assert set(documents) == files
    # the order mixes the folders and is the same every time
    assert documents == list(Source((text,)).documents())
    assert documents != [path.read_text() for path in sorted(text.rglob("*.txt")) if path.stem.isdigit()]


def test_long_documents_are_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LONGEST_DOCUMENT", 100)
    whole = "".join(f"line {i}\n" for i in range(100)) + "x" * 250 + "\n" * 150
    (tmp_path / "long.txt").write_text(whole)
    documents = list(Source((tmp_path,)).documents())
    assert "".join(documents) == whole[: len("".join(documents))]
    assert whole[len("".join(documents)) :].strip() == ""
    assert all(len(document) <= 100 for document in documents)
    assert all(document.endswith("\n") for document in documents[:5])
    # and between characters, by max_bytes
    (tmp_path / "euro").mkdir()
    (tmp_path / "euro" / "euro.txt").write_text("€" * 50)
    for limit, kept in ((1, []), (11, ["€" * 3]), (200, ["€" * 50])):
        assert list(Source((tmp_path / "euro",), max_bytes=limit).documents()) == kept


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
    # what ends a document is text in a text
    (tmp_path / "ends").mkdir()
    for i in range(2):
        (tmp_path / "ends" / f"{i}.txt").write_text(f"a{data.END}b{i}")
    tokens = data.prepare(Source((tmp_path / "ends",)), tmp_path, 300, 0.1)
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


@pytest.mark.parametrize(
    ("name", "damage"),
    [("train.bin", "bytes"), ("train.bin", "zeros"), ("tokenizer.json", "missing"), ("train.bin", "manifest")],
)
def test_damaged_tokens_are_made_again(text: Path, tmp_path: Path, damage: str, name: str) -> None:
    made = data.prepare(Source((text,)), tmp_path, 300, 0.1)
    tokens, tokenizer = np.array(made.train), (made.folder / "tokenizer.json").read_bytes()
    path = made.folder / (whole.MANIFEST if damage == "manifest" else name)
    content = path.read_bytes()
    # as after a loss of power before the file was on the disk
    changed = {"zeros": bytes(len(content)), "manifest": b""}
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


@pytest.mark.parametrize("form", ["splits", "parquet"])
def test_datasets(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [f"row {i} of them" for i in range(20)]
    dataset = datasets.Dataset.from_dict({"content": rows, "n": list(range(20))})
    where = tmp_path / "set"
    if form == "splits":
        datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(where)
    else:
        where.mkdir()
        dataset.to_parquet(where / "rows.parquet")
    assert list(Source(dataset=where, column="content").documents()) == rows
    for column, got in (("n", "got int"), ("text", "got only")):
        with pytest.raises(RequestError, match=got):
            list(Source(dataset=where, column=column).documents())


def test_datasets_that_cannot_be_read_are_refused(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "tw')
    with pytest.raises(RequestError, match="--dataset: expected files that can be read"):
        list(Source(dataset=tmp_path).documents())
    with pytest.raises(RequestError, match=r"Parquet or JSON Lines.*got \['.txt'\]"):
        list(Source(dataset=text).documents())


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
    with pytest.raises(RequestError, match="held-out text: expected 11 tokens, a sequence, or more, got 10"):
        Sequences("held-out", np.arange(10), 10)


def test_output_of_a_run_is_not_read_as_text(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "text")
    options = [*SMALL, "--steps", "2", "--text", str(tmp_path), "--out", str(tmp_path / "text" / "out")]
    assert train.main(options) == 0
    # the same text, so the same tokens and a run that is over
    assert train.main(options) == 0
    assert len(list((tmp_path / "text" / "out" / "cache").iterdir())) == 1
