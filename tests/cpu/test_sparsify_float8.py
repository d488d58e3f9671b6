"""Models with weights in e4m3: files of transformers, and what ``quantize_`` makes and ``save_pretrained`` writes."""

import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import twell
from tests.cpu import float8_models, saved_models, test_experts_transformers
from twell.commands import analyze
from twell.commands.served import require_e4m3
from twell.integrations import experts as stacked
from twell.integrations import transformers as twell_hf
from twell.nn.layers import Float8MLP
from twell.ops import float8

BF16 = torch.bfloat16


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers keep e4m3 weights, as it does on a GPU; it cannot run them here."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, **options).eval()


def dequantised(folder: Path) -> Any:
    return loaded(folder, quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=None))


def layers(model: Any) -> list[Float8MLP]:
    return [module for module in model.modules() if isinstance(module, Float8MLP)]


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def in_4_bits(model: Any) -> Any:
    class Linear4bit(nn.Linear):
        """A quantised layer as other libraries have them."""

        quant_state = None

    model.model.layers[0].mlp.up_proj = Linear4bit(float8_models.K, float8_models.N, False)
    return model


def without_scales(model: Any) -> Any:
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda folder: loaded(folder), "be an nn.Linear itself, got .*FP8Linear: .* with dequantize=True; twell"),
        (lambda folder: in_4_bits(dequantised(folder)), "be an nn.Linear itself, got .*Linear4bit: .* in 16 bits"),
        (lambda folder: without_scales(float8_models.build()), "have its weights on one dtype, got torch.bfloat16 and"),
    ],
)
def test_quantised_models_are_refused(made: Any, why: str, on_a_gpu: None, tmp_path: Path) -> None:
    model = made(float8_models.save(tmp_path / "model", "fp8"))
    before = dict(model.named_modules())
    with pytest.raises((ValueError, TypeError), match=why):
        twell_hf.sparsify(model)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("layout", ["fp8", "fp8 static", "fp8 block"])
@torch.no_grad()
def test_load_makes_16_bits_of_which_quantize_makes_e4m3(on_a_gpu: None, tmp_path: Path, layout: str) -> None:
    folder = float8_models.save(tmp_path / "model", layout)
    model = twell_hf.load(folder, dtype=BF16, strategy="row")
    assert {row.strategy for row in twell.explain(model) if row.kind == "inference"} == {"row"}
    x = torch.randn(9, float8_models.K, generator=torch.Generator().manual_seed(2)).to(BF16)
    wide = model.model.layers[0].mlp(x)
    assert off(wide, dequantised(folder).model.layers[0].mlp(x)) < 8e-3
    assert len(layers(twell.quantize_(model))) == float8_models.LAYERS
    assert 1e-3 < off(model.model.layers[0].mlp(x), wide) < 0.1


def test_files_of_modelopt_are_refused(tmp_path: Path) -> None:
    folder = float8_models.save(tmp_path / "model", "modelopt")
    with pytest.raises(ValueError, match=r"got model\.layers.*weight_scale and 13 more that transformers leaves out"):
        twell_hf.load(folder, dtype=BF16)


def test_pairs_are_not_quantised() -> None:
    model = twell_hf.sparsify(float8_models.build("opt"))
    before = dict(model.named_modules())
    with pytest.raises(TypeError, match=r"must be a layer of twell.nn .* got a SparseDown"):
        twell.quantize_(model)
    assert dict(model.named_modules()) == before


def test_experts_of_e4m3_stay_as_they_are() -> None:
    model = test_experts_transformers.model("Mixtral", BF16, hidden_act="relu")
    assert list(stacked.found(model))
    replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config(weight_block_size=None))
    assert "FP8Experts" in {type(module).__name__ for module in model.modules()}
    assert not list(stacked.found(model))
    assert "their weights must be in 16 or 32 bits, got torch.float8_e4m3fn" in stacked.left(model)


# files


def by_hand(model: Any) -> Any:
    parts = copy.deepcopy(model.model.layers)
    twell.quantize_(parts)
    for block, other in zip(model.model.layers, parts):
        block.mlp = other.mlp
    return model


def of_part(part: str) -> Any:
    return lambda model: twell.quantize_(model.get_submodule(part)) and model


def in_another_process(model: Any) -> Any:
    twell.quantize_(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    PreTrainedModel.save_pretrained = PreTrainedModel.save_pretrained.__wrapped__
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("kind", "quantised"),
    [
        *((kind, of_part("")) for kind in ("llama", "nemotron")),
        *(("llama", of_part(part)) for part in ("model", "model.layers", "model.layers.1")),
        ("llama", by_hand),
        ("llama", in_another_process),
        ("llama", lambda model: twell.quantize_(torch.compile(model, backend="eager"))._orig_mod),
    ],
)
def test_a_model_that_was_quantised_is_saved_as_compressed_tensors(
    kind: str, quantised: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever quantised which part: the model that is saved tells. Its configuration, which others share, stays."""
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", PreTrainedModel.save_pretrained)
    model = quantised(twell_hf.sparsify(float8_models.build(kind)))
    model.save_pretrained(tmp_path / "model")
    assert not hasattr(model.config, "quantization_config")
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert layers(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) and not hasattr(module, "record"):
            continue
        targets = content["quantization_config"]["config_groups"]["group_0"]["targets"]
        meant = any(re.match(target.removeprefix("re:"), name) for target in targets)
        assert meant == hasattr(module, "record"), name
        if meant:
            found = float8.float8(files[f"{name}.weight"], files[f"{name}.weight_scale"], "row")
            assert torch.equal(found.dequantize(torch.float32), module.record().dequantize(torch.float32))


GROUP = float8_models.compressed("channel", {"strategy": "token", "dynamic": True})["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("weights", "inputs", "why"),
    [
        ({}, {}, ""),
        ({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}, ""),
        ({"strategy": "block"}, {"strategy": "group"}, ""),
        ({"num_bits": 4, "type": "int", "strategy": "group"}, {}, "weights of 4-bit int by group and"),
        ({"type": "int"}, {}, "weights of 8-bit int by channel"),
        ({"symmetric": False}, {}, "weights of 8-bit float with offsets by channel"),
        ({"strategy": "group"}, {}, "weights of 8-bit float by group"),
        ({"dynamic": True}, {}, "weights of 8-bit float by channel"),
        ({}, None, "static inputs of 16-bit float by None"),
        ({}, {"type": "int"}, "dynamic inputs of 8-bit int by token"),
        ({}, {"dynamic": "local"}, "inputs of 8-bit float by token"),
        ({}, {"dynamic": False}, "static inputs of 8-bit float by token"),
        ({"strategy": "block"}, {"strategy": "tensor", "dynamic": False}, "static inputs of 8-bit float by tensor"),
    ],
)
def test_groups_of_compressed_tensors(weights: Any, inputs: Any, why: str) -> None:
    given = None if inputs is None else GROUP["input_activations"] | inputs
    group = {"weights": GROUP["weights"] | weights, "input_activations": given}
    if not why:
        require_e4m3("up", group)
        return
    with pytest.raises(NotImplementedError, match=f"^up must be in bfloat16, or .* got .*{why}.*: take a checkpoint"):
        require_e4m3("up", group)


def test_analyze(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = float8_models.save(tmp_path / "model", "fp8")
    saved_models.save_tokenizer(folder)
    (tmp_path / "text.txt").write_text(saved_models.text(4000))
    assert saved_models.run(analyze, folder, "--text", tmp_path / "text.txt", "--tokens", 1024, "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "Files by fp8, whose weights were dequantised: figures and times are of 16 bits" in out
    assert "Verdict: " in out.splitlines()[-1]
