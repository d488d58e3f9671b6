"""``profiling.record``: files from which ``load_real`` reads the model's own pattern, and refusals."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import saved_models
from saved_models import parsed, run

import twell
from profiling import record
from profiling.bench import workloads
from twell import testing
from twell.commands import saved_model
from twell.commands.request import RequestError
from twell.integrations import sparsify
from twell.integrations.analyze import report as reports_of
from twell.integrations.analyze.layers import found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models.save(tmp_path_factory.mktemp("llama"))


def pattern_of(folder: Path, number: int, tokens: int, seed: int = 0) -> Tensor:
    """Return the gates of a recorded layer that fire, bool [tokens, N], as in a benchmark."""
    problem = testing.load_real(number, folder, tokens, seed=seed, device="cpu")
    return testing.float64_gate(problem) > 0


# The command


def test_command(llama: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recorded"
    options = ("--text", words, "--tokens", 700, "--sequence", 100)
    assert run(record, llama, *options, "--layers", 2, 0, 2, "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["layer0.npz", "layer2.npz"]
    assert list(tmp_path.iterdir()) == [out]
    assert testing.real_names(out) == ["real0", "real2"]
    rows = re.findall(r"(?m)^layer (\d): (\S+) non-zeros per token, \S+ neurons", capsys.readouterr().out)
    assert [number for number, _ in rows] == ["2", "0"]
    loaded = saved_model.load(parsed(record, llama, *options, "--layers", 0, "--out", out))
    sequences = saved_model.read(loaded, parsed(record, llama, *options, "--layers", 0, "--out", out), 700).sequences
    batches = saved_model.batches(sequences, 4)
    reports, _ = reports_of.count(loaded.model, batches, found(loaded.model)[0])
    for number, said in rows:
        fired = float(pattern_of(out, int(number), 700).sum(1).double().mean())
        # of bfloat16, as benches run
        assert fired == pytest.approx(reports[int(number)].mean, rel=0.01)
        assert fired == pytest.approx(float(said), rel=0.01)


def test_recorded_layers_are_workloads_of_the_benchmark(llama: Path, words: Path, tmp_path: Path) -> None:
    out = tmp_path / "recorded"
    run(record, llama, "--text", words, "--tokens", 300, "--layers", 1, "--out", out)
    assert [source.name for source in workloads.parse([f"real:{out}/1"])] == ["real1"]
    with pytest.raises(RequestError):
        workloads.parse([f"real:{out}/0"])
    assert testing.load_real(1, out, 1000, device="cpu").x.shape == (1000, 64)


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
    sparsify.sparsify_(model, strategy="dense")
    ids = torch.tensor(sequences)
    for report in twell.analyze(model, [ids]).layers:
        pattern = pattern_of(out, report.number, 512)
        assert float(pattern.sum(1).double().mean()) == pytest.approx(report.mean, rel=0.01)


# Files


def test_a_link_to_an_empty_folder_is_filled(llama: Path, words: Path, tmp_path: Path) -> None:
    """The folder replaced the link, after the whole run."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert run(record, llama, "--text", words, "--tokens", 300, "--layers", 0, "--out", tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["layer0.npz"]
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "link"}
