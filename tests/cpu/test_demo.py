"""The demo: its text, training, output and checks, which must be able to fail."""

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from twell import pack, sparse_gated_ffn
from twell.commands import cli
from twell.commands.demo import compare, corpus, demo, model
from twell.commands.request import RequestError
from twell.nn import SparseGatedMLP
from twell.packed import PackedTwell

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = "--device cpu --layers 2 --hidden 32 --intermediate 264 --context 32".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    (root / "below").mkdir()
    for i in range(12):
        (root / ("below" if i % 2 else ".") / f"{i}.txt").write_text(f"file {i}: the quick brown fox, {i * i}\n" * 60)
    (root / "binary.txt").write_bytes(b"\xff\xfe\x00" * 5000)
    (root / "nul.txt").write_bytes(b"a\0b")
    (root / ".hidden.txt").write_text("hidden" * 1000)
    return root


def run_demo(folder: Path, *more: str) -> int:
    return cli.main(["demo", "--text", str(folder), *SMALL, *more])


# The text


def test_corpus_holds_back_whole_files(folder: Path) -> None:
    read = corpus.read_corpus(folder, seed=0, minimum=264)
    assert read.train_files + read.held_files == 12
    everything = sum(p.stat().st_size for p in folder.rglob("*.txt") if p.stem.isdigit())
    assert read.train_bytes + read.held_bytes == everything
    assert 0.1 * everything <= read.held_bytes <= 0.2 * everything

    def files(data: torch.Tensor) -> set[bytes]:
        return set(bytes(data.tolist()).split(b"\0")) - {b""}

    train, held = files(read.train), files(read.held)
    assert not train & held
    assert train | held == {p.read_bytes() for p in folder.rglob("*.txt") if p.stem.isdigit()}


def test_standard_library_is_the_default_text() -> None:
    read = corpus.read_corpus(None, 0, 1000)
    assert read.root == Path(os.__file__).parent
    assert read.train_bytes > 5 * read.held_bytes > 0


# The command


def test_demo_end_to_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(folder, "--steps", "12", "--compression", "4") == 0
    printed = capsys.readouterr().out
    assert "Speed needs an sm_90 GPU" in printed
    agreed, following = printed.splitlines()[-2:]
    assert re.fullmatch(r"Agreed: TwELL skipped \d+ % of .* of 2 layers, and is as exact as dense .*", agreed)
    assert following.startswith("Next: `twell analyze MODEL")
    assert "100 %  step    12" in printed
    held = corpus.read_corpus(folder, 0, 264).held_bytes
    assert f"{held:,} bytes" in printed


def test_demo_repeats_for_steps_and_seed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, losses = [], []
    for seed in ("0", "0", "1"):
        # time does not bound it
        assert run_demo(folder, "--steps", "4", "--seconds", "900", "--seed", seed) == 0
        printed = capsys.readouterr().out
        start, end = printed.index("Sparsity of the gate"), printed.index("Errors of the output")
        tables.append([float(number) for number in re.findall(r"[\d.]+", printed[start:end])])
        loss = printed[printed.index("Held-back loss") : printed.index("Evaluation took")]
        losses.append([float(number) for number in re.findall(r"\d\.\d{4}", loss)])
    # of sums whose order on a CPU depends on where the memory lies, which few gates and the loss show; another seed is
    # much farther away
    assert len(tables[0]) == 12
    assert tables[0] == pytest.approx(tables[1], abs=0.15)
    assert max(abs(a - b) for a, b in zip(tables[0], tables[2])) > 2
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    assert min(abs(a - b) for a, b in zip(losses[0], losses[2])) > 2e-3


def one_row_lost(*arguments: Any, **keywords: Any) -> torch.Tensor:
    y = sparse_gated_ffn(*arguments, **keywords)
    assert isinstance(y, torch.Tensor)
    return y.index_fill(0, y.float().norm(dim=1).argmax(), 0)


def spilled_elsewhere(*arguments: Any, **keywords: Any) -> PackedTwell:
    packed = pack(*arguments, **keywords)
    # tiles of an untrained model overflow
    packed.spill.add_(1)
    return packed


@pytest.mark.parametrize(
    ("wrong", "name", "said"),
    [
        (spilled_elsewhere, "pack", "FAILED: sparse and dense disagree"),
        (one_row_lost, "sparse_gated_ffn", "layer 0: worst-row error against float64: expected at most"),
    ],
)
def test_demo_fails_where_something_is_wrong(
    wrong: Any, name: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(compare, name, wrong)
    assert run_demo(folder, "--steps", "2") == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "--device: expected cpu, as torch can use no CUDA device, got 'cuda:2'"),
        (2, "--device: expected one of 2 CUDA devices that torch can use, got 'cuda:2'"),
    ],
)
def test_a_device_that_is_not_there(count: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(count))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(RequestError, match=re.escape(text)):
        demo.pick_device("cuda:2")


def test_text_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("x" * 5000)
    (tmp_path / "two.txt").write_text("y" * 100)
    assert run_demo(tmp_path) == 2
    assert "expected at least 264 bytes of text to train on and as many in other files" in capsys.readouterr().err
    (tmp_path / "two.txt").write_text("y" * 264)
    assert run_demo(tmp_path, "--steps", "1") == 0


# Ctrl-C


def test_interrupt_finishes_with_what_was_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    previous = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    assert run_demo(folder, "--seconds", "60") == 0
    timer.join()
    printed = capsys.readouterr().out
    assert "Stopping after this step" in printed
    assert "Training interrupted" in printed
    assert "Agreed" in printed
    assert signal.getsignal(signal.SIGINT) is previous


def test_second_interrupt_quits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def impatient(*arguments: object) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(model, "windows", impatient)
    assert run_demo(folder, "--seconds", "60") == 130
    assert "twell demo: interrupted" in capsys.readouterr().err


# The checks


@pytest.fixture
def layer() -> tuple[torch.Tensor, SparseGatedMLP]:
    """bf16 x [130, 64] and an FFN of 264 neurons, sparse enough that most tiles fit and some overflow."""
    torch.manual_seed(0)
    mlp = SparseGatedMLP(64, 264).to(torch.bfloat16)
    x = torch.randn(130, 64)
    x[:, 0] = -9.0
    x[:5, 0] = 9.0
    with torch.no_grad():
        mlp.gate_proj.weight[:, 0] = 0.1
        mlp.gate_proj.weight[:, 1:] *= 0.9
    return x.to(torch.bfloat16), mlp


@torch.no_grad()
def test_a_right_layer_passes_and_a_wrong_gate_does_not(
    layer: tuple[torch.Tensor, SparseGatedMLP], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, mlp = layer
    report = compare.compare_layer(0, x, mlp, 8)
    assert report.failures == []
    gate = pack(x, mlp.gate_proj.weight).unpack()
    assert report.non_zeros.tolist() == (gate != 0).sum(1).tolist()
    tiles = torch.stack([(gate[:, :256] != 0).sum(1), (gate[:, 256:] != 0).sum(1)], 1)
    assert (report.row_tiles, report.overflowing) == (260, int((tiles > 31).sum()))
    assert 0 < report.overflowing < 130
    # one step of bf16 is seen wherever fp32 summation leaves one admissible value: nearly everywhere
    moved = (gate.view(torch.int16) + 1).view(torch.bfloat16)
    (message,) = compare.check_gate(moved, x, mlp.gate_proj.weight)
    assert int(message.split()[0].replace(",", "")) > 0.97 * gate.numel()
    assert compare.check_gate(torch.zeros_like(gate), x, mlp.gate_proj.weight)
    monkeypatch.setattr(PackedTwell, "nnz", lambda _: torch.tensor(1))
    assert compare.compare_layer(0, x, mlp, 8).failures == [f"nnz(): expected {int((gate != 0).sum()):,}, got 1"]


# The model


def test_model_is_causal() -> None:
    torch.manual_seed(0)
    network = model.ByteModel(model.ModelShape(2, 64, 128, 16)).eval()
    tokens = torch.randint(256, (1, 16))
    other = tokens.clone()
    other[0, 10:] = (other[0, 10:] + 1) % 256
    with torch.no_grad():
        a, b = network(tokens).logits, network(other).logits
    torch.testing.assert_close(a[0, :10], b[0, :10])
    assert not torch.allclose(a[0, 10:], b[0, 10:])
