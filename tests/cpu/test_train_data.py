"""examples/train.py reads text: documents, tokens, datasets and sequences."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import train
from small_runs import SMALL
from training import RequestError, data, whole
from training.data import Sequences, Source

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


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
