"""compressed-tensors: its checkpoints in e4m3, as ``load`` reads them."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("compressed_tensors")

import torch

import twell
import twell.integrations.transformers as twell_hf
from tests.cpu import float8_models, saved_models
from tests.cpu.test_sparsify_float8 import layers, loaded, off
from twell.commands import analyze


@pytest.mark.parametrize("kind", float8_models.PROJECTIONS)
@pytest.mark.parametrize("layout", ["dynamic", "static", "block"])
@torch.no_grad()
def test_load_makes_16_bits(tmp_path: Path, kind: str, layout: str) -> None:
    folder = float8_models.save(tmp_path / "model", layout, kind)
    stock, model = loaded(folder), twell_hf.load(folder, dtype=torch.bfloat16, strategy="union")
    assert {row.strategy for row in twell.explain(model) if row.kind == "inference"} == {"union"}
    # the stock model dequantises itself, and rounds its inputs to e4m3
    assert off(model(float8_models.ids()).logits, stock(float8_models.ids()).logits) < 0.1
    with pytest.raises((TypeError, ValueError), match="must "):
        twell_hf.sparsify(loaded(folder))


def test_analyze(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = float8_models.save(tmp_path / "model", "dynamic")
    saved_models.save_tokenizer(folder)
    (tmp_path / "text.txt").write_text(saved_models.text(4000))
    assert saved_models.run(analyze, folder, "--text", tmp_path / "text.txt", "--tokens", 1024, "--device", "cpu") == 0
    assert "Files by compressed-tensors, whose weights were dequantised: figures and" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["llama", "nemotron"])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@torch.no_grad()
def test_a_quantised_model_is_read_back(tmp_path: Path, granularity: Any, kind: str) -> None:
    model = twell_hf.sparsify(float8_models.build(kind))
    # the model around this part knows nothing of it
    twell.quantize_(model.model, granularity=granularity)
    model.save_pretrained(tmp_path / "model")
    again = twell.quantize_(twell_hf.load(tmp_path / "model", dtype=torch.bfloat16))
    assert len(layers(again)) == float8_models.LAYERS
    assert off(again(float8_models.ids()).logits, model(float8_models.ids()).logits) < 0.1
