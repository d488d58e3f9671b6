"""compressed-tensors: its checkpoints in e4m3, as transformers loads them, through ``sparsify`` and back."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("compressed_tensors")

import torch
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig

import twell
import twell.integrations.transformers as twell_hf
from tests.cpu import float8_models, saved_models
from tests.cpu.test_sparsify_float8 import KINDS, biases, layers, loaded, off, records, run, tokens
from twell.commands import analyze
from twell.ops import float8


def dequantised(folder: Path) -> Any:
    return loaded(folder, quantization_config=CompressedTensorsConfig(dequantize=True))


@KINDS
@pytest.mark.parametrize("layout", ["dynamic", "static"])
@torch.no_grad()
def test_layers_of_e4m3(tmp_path: Path, kind: str, layout: str) -> None:
    folder = float8_models.save(tmp_path / "model", layout, kind)
    stock, model = loaded(folder), twell_hf.sparsify(loaded(folder), strategy="row")
    # the stock model dequantises itself
    expected = stock(float8_models.ids()).logits
    found = model(float8_models.ids()).logits
    assert off(found, expected) < 0.1
    for place, layer in enumerate(layers(model)):
        x = float8.quantize_tokens(tokens(), layer.input_scale)
        y = run(model, tokens(), place)
        assert off(y, float8.formula(x, *records(layer), biases(layer), layer._how.activation)) < 4e-3
        # its roundings of x, and of the hidden state, which rows keep
        assert off(y, run(stock, tokens(), place)) < 0.1
        assert (layer.input_scale is not None) == (layout == "static")
    assert len(layers(model)) == float8_models.LAYERS
    # nothing is wrapped: a first call of the model would have done that
    assert not [name for name, module in model.named_modules() if hasattr(module, "_original_forward_func")]
    with pytest.raises(ValueError, match=r"must hold its weight in torch.float8_e4m3fn, got .*dequantize=True"):
        twell_hf.sparsify(stock)


@KINDS
@torch.no_grad()
def test_blocks_and_models_loaded_dequantised_run_in_16_bits(tmp_path: Path, kind: str) -> None:
    folder = float8_models.save(tmp_path / "model", "block", kind)
    stock = dequantised(folder)
    expected = run(stock, tokens())
    for model in (twell_hf.sparsify(loaded(folder), strategy="union"), twell_hf.sparsify(stock, strategy="union")):
        assert not layers(model)
        model(float8_models.ids())
        # compressed-tensors multiplies by scales in 16 bits
        assert off(run(model, tokens()), expected) < 2e-2
        assert {row.strategy for row in twell.explain(model)} == {"union"}


def test_load_and_analyze(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = float8_models.save(tmp_path / "model", "dynamic")
    assert len(layers(twell_hf.load(folder, dtype=torch.bfloat16))) == float8_models.LAYERS
    saved_models.save_tokenizer(folder)
    (tmp_path / "text.txt").write_text(saved_models.text(4000))
    assert saved_models.run(analyze, folder, "--text", tmp_path / "text.txt", "--tokens", 1024, "--device", "cpu") == 0
    assert "Files by compressed-tensors, whose weights were dequantised: figures and" in capsys.readouterr().out


@KINDS
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@torch.no_grad()
def test_a_quantised_model_is_read_back(tmp_path: Path, granularity: Any, kind: str) -> None:
    model = twell_hf.sparsify(float8_models.build(kind))
    # the model around this part knows nothing of it
    twell.quantize_(model.model, granularity=granularity)
    model.save_pretrained(tmp_path / "model")
    again = twell_hf.load(tmp_path / "model", dtype=torch.bfloat16)
    for ours, theirs in zip(layers(model), layers(again), strict=True):
        for mine, read in zip(filter(None, records(ours)), filter(None, records(theirs)), strict=True):
            assert torch.equal(mine.values.view(torch.uint8), read.values.view(torch.uint8))
            # transformers reads scales in the model's dtype
            assert torch.equal(mine.scale.bfloat16(), read.scale.bfloat16())
    assert off(again(float8_models.ids()).logits, model(float8_models.ids()).logits) < 0.1


@pytest.mark.parametrize(
    ("weights", "form", "why"),
    [
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized", "8-bit int by channel"),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "pack-quantized", "4-bit int by group"),
        (
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "nvfp4-pack-quantized",
            "4-bit float by tensor_group",
        ),
    ],
)
def test_other_weights_are_refused(weights: dict[str, Any], form: str, why: str) -> None:
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = float8_models.build()
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "format": form}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}
    apply_quantization_config(model, QuantizationConfig.model_validate(settings))
    for module in model.modules():
        compress_module(module)
    before = dict(model.named_modules())
    with pytest.raises(
        ValueError, match=rf"gate_proj must be in bfloat16, or .* e4m3 .*, got weights of {why} .*: take"
    ):
        twell_hf.sparsify(model)
    assert dict(model.named_modules()) == before


def test_scales_of_32_bits_are_read_as_transformers_does(tmp_path: Path) -> None:
    folder = float8_models.save(tmp_path / "model", "dynamic")
    file = folder / "model.safetensors"
    files = {name: t * 1.001 if name.endswith("_scale") else t for name, t in load_file(file).items()}
    save_file(files, file, metadata={"format": "pt"})
    (layer, *_) = layers(twell_hf.sparsify(loaded(folder)))
    scale = layer.up_proj.weight_scale
    assert scale.dtype == torch.float32
    assert torch.equal(scale, files["model.layers.0.mlp.up_proj.weight_scale"].bfloat16().float())
