"""The demo: its text, training, output and checks, which must be able to fail."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from twell import pack, testing
from twell.commands import cli
from twell.commands.demo import compare, corpus, demo, model, plots
from twell.commands.request import RequestError
from twell.nn import SparseGatedMLP
from twell.packed import PackedTwell

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = "--device cpu --layers 2 --hidden 32 --intermediate 264 --context 32".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve small text files, and files that are not text."""
    root = tmp_path_factory.mktemp("text")
    (root / "below").mkdir()
    for i in range(12):
        (root / ("below" if i % 2 else ".") / f"{i}.txt").write_text(f"file {i}: the quick brown fox, {i * i}\n" * 60)
    (root / "binary.txt").write_bytes(b"\xff\xfe\x00" * 5000)
    (root / "nul.txt").write_bytes(b"a\0b")
    (root / ".hidden.txt").write_text("hidden" * 1000)
    return root


def run_demo(folder: Path, out: Path, *more: str) -> int:
    return cli.main(["demo", "--text", str(folder), "--out", str(out), *SMALL, *more])


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


def test_corpus_depends_on_the_seed_alone(folder: Path) -> None:
    first, again, other = (corpus.read_corpus(folder, seed, 264) for seed in (3, 3, 4))
    assert torch.equal(first.train, again.train)
    assert torch.equal(first.held, again.held)
    assert not torch.equal(first.train, other.train)


def test_standard_library_is_the_default_text() -> None:
    read = corpus.read_corpus(None, 0, 1000)
    assert read.root == Path(os.__file__).parent
    assert read.train_bytes > 5 * read.held_bytes > 0


def test_even_windows_do_not_overlap() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    assert corpus.even_windows(data, 3, 10).tolist() == [list(range(s, s + 10)) for s in (0, 45, 90)]
    assert corpus.even_windows(data, 1000, 10).shape == (10, 10)
    assert corpus.even_windows(data, 1, 100).tolist() == [list(range(100))]


# The command


def test_demo_end_to_end(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "picture.png"
    assert run_demo(folder, out, "--steps", "12", "--compression", "4") == 0
    printed = capsys.readouterr().out
    assert "Speed needs an sm_90 GPU" in printed
    assert "Agreed: 2 layers" in printed
    assert "100 %  step    12" in printed
    held = corpus.read_corpus(folder, 0, 264).held_bytes
    assert f"{held:,} bytes" in printed
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 50_000


def test_demo_repeats_for_steps_and_seed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for seed in ("0", "0", "1"):
        assert run_demo(folder, tmp_path / "a.png", "--steps", "4", "--seed", seed) == 0
        printed = capsys.readouterr().out
        tables.append(printed[printed.index("Sparsity of the gate") : printed.index("Picture")])
    assert tables[0] == tables[1]
    assert tables[0] != tables[2]


def test_demo_is_bounded_by_time(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(folder, tmp_path / "a.png", "--seconds", "0.3") == 0
    assert "Training done" in capsys.readouterr().out


def test_demo_without_matplotlib(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_demo(folder, tmp_path / "a.png", "--steps", "2") == 0
    printed = capsys.readouterr().out
    assert "pip install 'twell[plots]'" in printed
    assert "Agreed: 2 layers" in printed
    assert not (tmp_path / "a.png").exists()


def test_demo_fails_where_packing_is_wrong(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def corrupt(*arguments: object, **keywords: object) -> PackedTwell:
        packed = pack(*arguments, **keywords)  # type: ignore[arg-type]
        packed.words[:, 1] ^= 1 << 16
        return packed

    monkeypatch.setattr(compare, "pack", corrupt)
    assert run_demo(folder, tmp_path / "a.png", "--steps", "2") == 1
    assert "FAILED: sparse and dense disagree" in capsys.readouterr().out


def test_demo_fails_where_the_output_is_wrong(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = compare.sparse_gated_ffn

    def one_row_lost(*arguments: object, **keywords: object) -> torch.Tensor:
        y = right(*arguments, **keywords)  # type: ignore[arg-type]
        assert isinstance(y, torch.Tensor)
        return y.index_fill(0, y.float().norm(dim=1).argmax(), 0)

    monkeypatch.setattr(compare, "sparse_gated_ffn", one_row_lost)
    assert run_demo(folder, tmp_path / "a.png", "--steps", "2") == 1
    assert "layer 0: worst-row error against float64: expected at most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--text", "/no/such/folder"],
            "--text: expected a folder of text files, got '/no/such/folder' (no such folder)",
        ),
        (["--text", __file__], "(a file)"),
        (["--hidden", "40"], "--hidden: expected a multiple of 32 (the size of an attention head), got 40"),
        (["--intermediate", "12"], "--intermediate: expected a multiple of 8 up to 65536, got 12"),
        (["--intermediate", "65544"], "--intermediate: expected a multiple of 8 up to 65536, got 65544"),
        (["--out", "a.jpg"], "--out: expected a path that ends in .png, got 'a.jpg'"),
        (["--out", "/no/such/a.png"], "--out: expected an existing folder to write to, got '/no/such'"),
        (["--device", "tpu"], "--device: expected cpu, cuda or cuda:INDEX, got 'tpu'"),
        (["--device", "meta"], "--device: expected cpu, cuda or cuda:INDEX, got 'meta'"),
    ],
)
def test_bad_requests(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


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
    assert run_demo(tmp_path, tmp_path / "a.png") == 2
    assert "expected at least 2 UTF-8 text files (one to train on, one to hold back), got 0" in capsys.readouterr().err
    (tmp_path / "one.txt").write_text("x" * 5000)
    assert run_demo(tmp_path, tmp_path / "a.png") == 2
    assert "got 1 in" in capsys.readouterr().err
    (tmp_path / "two.txt").write_text("y" * 100)
    assert run_demo(tmp_path, tmp_path / "a.png") == 2
    assert "expected at least 264 bytes of text to train on and as many in other files" in capsys.readouterr().err
    (tmp_path / "two.txt").write_text("y" * 264)
    assert run_demo(tmp_path, tmp_path / "a.png", "--steps", "1") == 0


# Ctrl-C


def test_interrupt_finishes_with_what_was_trained(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    previous = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    assert run_demo(folder, tmp_path / "a.png", "--seconds", "60") == 0
    timer.join()
    printed = capsys.readouterr().out
    assert "Stopping after this step" in printed
    assert "Training interrupted" in printed
    assert "Agreed" in printed
    assert signal.getsignal(signal.SIGINT) is previous


def test_second_interrupt_quits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def impatient(*arguments: object) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(model, "windows", impatient)
    assert run_demo(folder, tmp_path / "a.png", "--seconds", "60") == 130
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


def gate_failures(packed: PackedTwell, x: torch.Tensor, mlp: SparseGatedMLP) -> str:
    gate = packed.unpack()
    return "\n".join(compare.check_packed(packed, gate) + compare.check_gate(gate, x, mlp.gate_proj.weight))


@torch.no_grad()
@pytest.mark.parametrize("compression", [2, 4, 8])
def test_a_right_layer_passes(layer: tuple[torch.Tensor, SparseGatedMLP], compression: int) -> None:
    x, mlp = layer
    report, packed = compare.compare_layer(0, x, mlp, compression)
    assert report.failures == []
    gate = packed.unpack()
    assert report.non_zeros.tolist() == (gate != 0).sum(1).tolist()
    assert report.row_tiles == 260
    if compression == 8:
        assert 0 < report.overflowing < 130
    counts = torch.stack([(gate[:, :256] != 0).sum(1), (gate[:, 256:] != 0).sum(1)], 1)
    capacity = 256 // compression - 1
    spilled = 2 * int((counts > capacity).sum(0) @ torch.tensor([256, 8]))
    assert report.packed_bytes == 4 * 260 + 4 * int(counts.clamp(max=capacity).sum()) + spilled
    assert report.dense_bytes == 2 * 130 * 264


@torch.no_grad()
def test_each_corruption_is_seen(layer: tuple[torch.Tensor, SparseGatedMLP]) -> None:
    x, mlp = layer
    packed = pack(x, mlp.gate_proj.weight)
    assert gate_failures(packed, x, mlp) == ""
    row = int(((packed.words[:, 0] >= 2) & (packed.words[:, 0] < 31)).nonzero()[0])

    def changed(word: int, value: int) -> str:
        words = packed.words.clone()
        words[row, word] = value
        return gate_failures(dataclasses.replace(packed, words=words), x, mlp)

    first, second = int(packed.words[row, 1]), int(packed.words[row, 2])
    # the lowest bit of a value: one step of bf16
    assert "unpacked gate values differ from relu(x Wg^T); first: token" in changed(1, first ^ (1 << 16))
    # another neuron's index, between its neighbours
    assert "unpacked gate values differ" in changed(1, first + 1 if (second - first) & 0xFFFF > 1 else first - 1)
    # a neuron of another tile, the same neuron twice, a value that is zero, a NaN
    assert "name a neuron outside their tile" in changed(1, first & ~0xFFFF | 260)
    assert changed(2, second & ~0xFFFF | first & 0xFFFF)
    assert "counts differ" in changed(1, first & 0xFFFF)
    assert "unpacked gate values differ" in changed(1, first & 0xFFFF | 0x7FC0 << 16)
    # a word of an overflowing tile, which nothing reads
    overflowing = packed.words.clone()
    overflowing[0, 3] ^= 1 << 16
    message = gate_failures(dataclasses.replace(packed, words=overflowing), x, mlp)
    assert message == "1 values read straight from the packed words differ from the unpacked gate"
    # the count, one too many and one too few
    assert "counts differ" in changed(0, int(packed.words[row, 0]) + 1)
    assert "the statistics" in changed(0, int(packed.words[row, 0]) - 1)

    spill = packed.spill.clone()
    spill[0, 0] += 1
    assert packed.words[0, 0] > 31
    assert "unpacked gate values differ" in gate_failures(dataclasses.replace(packed, spill=spill), x, mlp)
    for column, message in ((0, "nnz(): expected"), (1, "the statistics")):
        stats = packed.stats.clone()
        stats[0, 0, column] += 1
        assert message in gate_failures(dataclasses.replace(packed, stats=stats), x, mlp)


@torch.no_grad()
def test_gate_check_knows_a_step_of_bf16(layer: tuple[torch.Tensor, SparseGatedMLP]) -> None:
    """A value that moves by one step is seen wherever fp32 summation leaves one admissible value: nearly everywhere."""
    x, mlp = layer
    gate = pack(x, mlp.gate_proj.weight).unpack()
    moved = (gate.view(torch.int16) + 1).view(torch.bfloat16)
    (message,) = compare.check_gate(moved, x, mlp.gate_proj.weight)
    assert int(message.split()[0].replace(",", "")) > 0.97 * gate.numel()
    empty = torch.zeros_like(gate)
    assert compare.check_gate(empty, x, mlp.gate_proj.weight)
    assert compare.check_reference(gate, x, mlp.gate_proj.weight) == []
    assert compare.check_reference(moved, x, mlp.gate_proj.weight)


def test_error_bounds_can_fail() -> None:
    def failures(ours: testing.Errors, dense: testing.Errors, roundings: int = 1 << 20) -> list[str]:
        return compare.error_failures(testing.Comparison(ours, dense, roundings))

    dense, nan = testing.Errors(1e-3, 2e-3), float("nan")
    assert failures(testing.Errors(1.1e-3, 2.2e-3), dense) == []
    assert len(failures(testing.Errors(1.2e-3, 2e-3), dense)) == 1
    assert len(failures(testing.Errors(1e-3, 2.3e-3), dense)) == 1
    # few roundings are allowed more
    assert failures(testing.Errors(1.2e-3, 2.3e-3), dense, roundings=100) == []
    assert len(failures(testing.Errors(nan, nan), dense)) == 2
    assert len(failures(dense, testing.Errors(nan, nan))) == 2
    assert demo.model_failures(2.0, 2.005) == []
    assert demo.model_failures(2.0, 2.02)
    assert demo.model_failures(nan, nan)


# The model and the picture


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


def test_l1_makes_the_gate_sparse(folder: Path) -> None:
    text = corpus.read_corpus(folder, 0, 264).train
    last = []
    for l1 in (0.0, 0.1):
        torch.manual_seed(0)
        network = model.ByteModel(model.ModelShape(1, 32, 256, 32))
        schedule = model.Schedule(8, 3e-3, l1, None, 40, 1)
        readings: list[model.Reading] = []
        history = model.train(network, text, schedule, 0, readings.append, lambda: None)
        assert history.readings == readings
        assert readings[-1].loss < readings[0].loss - 1
        last.append(readings[-1].non_zeros)
    assert last[1] < 0.5 * last[0]


def test_tile_picture_shows_what_is_packed(layer: tuple[torch.Tensor, SparseGatedMLP]) -> None:
    x, mlp = layer
    with torch.no_grad():
        packed = pack(x, mlp.gate_proj.weight)
    picture = plots.choose_tile(packed, 3, torch.arange(130))
    gate = packed.unpack()[picture.first_token : picture.first_token + len(picture.labels)]
    low = 256 * picture.tile
    assert torch.equal(picture.values, gate[:, low : low + 256].float())
    assert int(picture.counts.max()) <= picture.capacity
    for row, count in enumerate(picture.counts.tolist()):
        neurons = picture.slot_neurons[row, :count].long()
        assert torch.equal(gate[row, neurons].float(), picture.slot_values[row, :count])
        assert neurons.tolist() == (low + gate[row, low : low + 256].nonzero().flatten()).tolist()
