"""``profiling.record``: files from which ``load_real`` reads the model's own pattern, and refusals."""

from collections.abc import Callable
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
from profiling import record
from profiling.bench import workloads
from twell import _sparsify, testing
from twell._analyze import report as reports_of
from twell._analyze.layers import WatchedLayer, found
from twell.commands import saved_model
from twell.commands.request import RequestError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models.save(tmp_path_factory.mktemp("llama"))


def pattern_of(folder: Path, number: int, tokens: int, seed: int = 0) -> Tensor:
    """Return the gates of a recorded layer that fire, bool [tokens, N], as in a benchmark."""
    problem = testing.load_real(number, folder, tokens, seed=seed, device="cpu")
    return testing.float64_gate(problem) > 0


def layer_of(weight: Tensor, bias: Tensor | None = None, number: int = 3) -> WatchedLayer:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight.data = weight
    if bias is not None:
        linear.bias.data = bias
    return WatchedLayer(
        *(f"model.layers.{number}.mlp", number, nn.Identity(), linear.in_features, linear.out_features, True),
        lambda x, _: linear(x),
        linear=linear,
    )


def drawn(m: int, k: int, n: int, *, common: float = 0.4, scales: Callable[[int], Tensor] = torch.ones) -> Any:
    """Correlated tokens and neurons of which about a tenth fires and many are dead; bfloat16.

    ``scales`` makes features larger and their weights smaller.
    """
    torch.manual_seed(k)
    sizes = scales(k)
    mean = torch.randn(k)
    x = (torch.randn(m, k) + common * mean) * sizes
    threshold = 1.5 + 2.0 * torch.rand(n, 1)
    weight = (torch.randn(n, k) - threshold * mean / (common * mean.norm() ** 2 / k**0.5)) / k**0.5 / sizes
    return x.bfloat16(), weight.bfloat16()


def round_trip(x: Tensor, layer: WatchedLayer, folder: Path) -> tuple[record.Recording, record.Agreement]:
    recording = record.quantize(x, layer)
    path = folder / f"layer{layer.number}.npz"
    recording.save(path)
    return recording, record.check(path, recording, layer)


# The command


def test_command(llama: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recorded"
    options = ("--text", words, "--tokens", 700, "--sequence", 100)
    assert run(record, llama, *options, "--layers", 2, 0, 2, "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "layer0.npz", "layer2.npz"]
    assert list(tmp_path.iterdir()) == [out]
    assert testing.real_names(out) == ["real0", "real2"]
    printed, readme = capsys.readouterr().out, (out / "README.md").read_text()
    assert "int8" in readme
    assert "--workload real:FOLDER/2 real:FOLDER/0" in readme
    table = [line for line in readme.splitlines() if line.startswith("|")][2:]
    changed = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert [row[0] for row in changed] == ["layer 2", "layer 0"]
    loaded = saved_model.load(parsed(record, llama, *options, "--layers", 0, "--out", out))
    sequences = saved_model.read(loaded, parsed(record, llama, *options, "--layers", 0, "--out", out), 700).sequences
    batches = saved_model.batches(sequences, 4)
    reports, _ = reports_of.count(loaded.model, batches, found(loaded.model)[0])
    for row in changed:
        number = int(row[0].removeprefix("layer "))
        with np.load(out / f"layer{number}.npz") as arrays:
            alive = arrays["alive"]
            assert {arrays[name].dtype.name for name in ("x", "w")} == {"int8"}
        rows = len(alive)
        assert np.all(np.diff(alive) > 0)
        # the table describes the file, which is close to the model
        pattern = pattern_of(out, number, 700)
        assert f"{float(pattern.sum(1).double().mean()):.2f}" == row[2]
        report = reports[number]
        assert rows == 320 - report.dead
        assert float(pattern.sum(1).double().mean()) == pytest.approx(report.mean, rel=0.01)
        assert not pattern[:, ~torch.isin(torch.arange(320), torch.from_numpy(alive))].any()
        assert float(row[1]) == pytest.approx(report.mean, abs=0.006)
        assert f"layer {number}: {row[1]} non-zeros per token in the model, {row[2]} in the file" in printed


def test_recorded_layers_are_workloads_of_the_benchmark(llama: Path, words: Path, tmp_path: Path) -> None:
    out = tmp_path / "recorded"
    run(record, llama, "--text", words, "--tokens", 300, "--layers", 1, "--out", out)
    assert [source.name for source in workloads.parse([f"real:{out}/1"])] == ["real1"]
    with pytest.raises(RequestError):
        workloads.parse([f"real:{out}/0"])
    assert testing.load("real1", 1000, real_layers=out, device="cpu").x.shape == (1000, 64)


@pytest.mark.parametrize(("kind", "options"), [("opt", {}), ("llama", {"mlp_bias": True})])
def test_other_models(kind: str, options: dict[str, Any], words: Path, tmp_path: Path) -> None:
    """Non-gated layers, whose up projection takes the gate's place, and biases, which become part of the weight."""
    folder = saved_models.save(tmp_path / "model", kind, **options)
    out = tmp_path / "recorded"
    run(record, folder, "--text", words, "--tokens", 512, "--layers", 0, 1, 2, "--out", out)
    model = saved_models.build(kind, **options)
    arguments = parsed(record, folder, "--text", words, "--tokens", 512, "--layers", 0, "--out", out)
    loaded = saved_model.load(arguments)
    sequences = saved_model.read(loaded, arguments, 512).sequences
    _sparsify.sparsify_(model, strategy="dense")
    ids = torch.tensor(sequences)
    for report in twell.analyze(model, [ids]).layers:
        pattern = pattern_of(out, report.number, 512)
        assert float(pattern.sum(1).double().mean()) == pytest.approx(report.mean, rel=0.01)


# Quality of files


def test_drawn_rows_stay_silent(tmp_path: Path) -> None:
    """For any rows that ``load_real`` draws for neurons that are not stored."""
    x, weight = drawn(512, 128, 1024)
    recording, agreement = round_trip(x, layer_of(weight), tmp_path)
    assert 100 < len(recording.alive) < 1000
    assert agreement.stored == len(recording.alive)
    silent = torch.ones(1024, dtype=torch.bool)
    silent[recording.alive.long()] = False
    assert not any(bool(pattern_of(tmp_path, 3, 512, seed)[:, silent].any()) for seed in (0, 1, 2))
    product = (recording.x * recording.x_scale) @ recording.quiet
    assert 0.9 < float(product.min()) <= float(product.max()) < 3


def test_without_a_quiet_direction_all_rows_are_stored(tmp_path: Path) -> None:
    """Tokens and their opposites: no direction is above zero for both."""
    x, weight = drawn(256, 64, 512)
    x = torch.cat((x, -x))
    layer = layer_of(weight - 0.0)
    assert layer.linear is not None
    layer.linear.weight.data[::2] = 0
    recording, agreement = round_trip(x, layer, tmp_path)
    assert recording.alive.tolist() == list(range(512))
    assert not recording.quiet.any()
    assert not recording.fired[:, ::2].any()
    assert not pattern_of(tmp_path, 3, 512)[:, ::2].any()
    assert agreement.stored == 512


# Refusals


@pytest.mark.parametrize("spoil", ["lost", "added", "biased", "loud"])
def test_a_file_that_does_not_keep_the_pattern_is_an_error(spoil: str, tmp_path: Path) -> None:
    x, weight = drawn(512, 128, 1024)
    layer = layer_of(weight)
    recording = record.quantize(x, layer)
    changed: dict[str, Any] = {}
    if spoil == "lost":
        changed["w"] = torch.where(torch.arange(len(recording.w))[:, None] % 4 == 0, 0, recording.w)
        message = r"of the non-zeros are lost"
    elif spoil == "added":
        noise = torch.randint(-40, 41, recording.w.shape)
        changed["w"] = (recording.w + noise).clamp(-127, 127).to(torch.int8)
        message = r"are new, at most 5% may"
    elif spoil == "biased":
        changed["fired"] = recording.fired.clone()
        nonzeros = recording.fired.nonzero()
        chosen = nonzeros[:: len(nonzeros) // (len(nonzeros) // 40)]
        changed["fired"][chosen[:, 0], chosen[:, 1]] = False
        message = r"non-zeros per token in place of .*, 1% may differ"
    else:
        changed["quiet"] = -recording.quiet
        message = r"neurons fire that should be silent"
    spoilt = record.Recording(**{**vars(recording), **changed})
    spoilt.save(tmp_path / "layer3.npz")
    with pytest.raises(ValueError, match=rf"model\.layers\.3\.mlp: int8 does not keep its pattern: .*{message}"):
        record.check(tmp_path / "layer3.npz", spoilt, layer)


def test_nothing_is_left_behind_where_int8_does_not_do(
    llama: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "MOST_BIASED", -1.0)
    monkeypatch.setattr(record, "FEW", -1)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp: int8 does not keep its pattern"):
        run(record, llama, "--text", words, "--tokens", 300, "--layers", 0, "--out", tmp_path / "recorded")
    assert not list(tmp_path.iterdir())


def test_a_link_to_an_empty_folder_is_filled(llama: Path, words: Path, tmp_path: Path) -> None:
    """The folder replaced the link, after the whole run."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert run(record, llama, "--text", words, "--tokens", 300, "--layers", 0, "--out", tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink()
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"README.md", "layer0.npz"}
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "link"}
