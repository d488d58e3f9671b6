"""Models that transformers loads in e4m3, through ``sparsify``; those of compressed-tensors are in tests/neighbours."""

import copy
import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel
from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import twell
from tests.cpu import float8_models, test_experts_transformers
from twell.integrations import experts as stacked
from twell.integrations import transformers as twell_hf
from twell.integrations.sparsify.quantised import Float8Down
from twell.nn.float8 import Float8MLP
from twell.ops import float8

BF16 = torch.bfloat16
KINDS = pytest.mark.parametrize("kind", ["llama", "opt", "nemotron"])


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


def records(layer: Float8MLP) -> list[Any]:
    found: list[Any] = [getattr(layer, name).record() for name in layer._names]
    return found if len(found) == 3 else [found[0], None, found[1]]


def biases(layer: Float8MLP) -> Any:
    found = [getattr(layer, name).bias for name in layer._names]
    return found if len(found) == 3 else [found[0], None, found[1]]


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def tokens() -> Tensor:
    return torch.randn(9, float8_models.K, generator=torch.Generator().manual_seed(2)).to(BF16)


def run(model: Any, x: Tensor, place: int = 0) -> Tensor:
    if model.config.model_type == "opt":
        block = model.model.decoder.layers[place]
        return block.fc2(block.activation_fn(block.fc1(x)))
    return model.model.layers[place].mlp(x)


@KINDS
@pytest.mark.parametrize("layout", ["fp8", "fp8 static"])
@torch.no_grad()
def test_projections_of_e4m3_become_layers(on_a_gpu: None, tmp_path: Path, kind: str, layout: str) -> None:
    folder = float8_models.save(tmp_path / "model", layout, kind)
    files = load_file(folder / "model.safetensors")
    model = loaded(folder)
    assert twell_hf.sparsify(model, strategy="row") is model
    found = layers(model)
    assert len(found) == float8_models.LAYERS
    assert not twell.integrations.sparsify.layers(model)
    for place, layer in enumerate(found):
        block = f"model.decoder.layers.{place}." if kind == "opt" else f"model.layers.{place}.mlp."
        own = records(layer)
        names = float8_models.PROJECTIONS[kind]
        for name, record in zip(names, filter(None, own), strict=True):
            assert torch.equal(record.values.view(torch.uint8), files[f"{block}{name}.weight"].view(torch.uint8))
            assert torch.equal(record.scale, files[f"{block}{name}.weight_scale_inv"].expand(len(record.scale)))
        if layout == "fp8 static":
            # the larger one, as in engines
            given = [files[f"{block}{name}.activation_scale"] for name in names[:-1]]
            assert torch.equal(layer.input_scale, torch.stack(given).amax().view(1))
        else:
            assert layer.input_scale is None
        x = float8.quantize_tokens(tokens(), layer.input_scale)
        assert off(run(model, tokens(), place), float8.formula(x, *own, biases(layer), layer._how.activation)) < 4e-3
    assert {row.strategy for row in twell.explain(model)} == {"row"}
    # the weights of the files with inputs in 16 bits, up to roundings to e4m3
    assert 1e-3 < off(run(model, tokens()), run(dequantised(folder), tokens())) < 0.08


BLOCKS = "scales are of blocks of 128 x 128"


@pytest.mark.parametrize(
    ("kind", "layout", "kept", "why"),
    [
        *((kind, "fp8 block", [], BLOCKS) for kind in float8_models.PROJECTIONS),
        ("llama", "fp8", ["down_proj"], "a projection is in 16 bits"),
        ("llama", "fp8", ["gate_proj"], "a projection is in 16 bits"),
        ("phi3", "fp8", [], "gate and up are one projection"),
    ],
)
@torch.no_grad()
def test_other_layers_become_bfloat16(
    on_a_gpu: None, tmp_path: Path, kind: str, layout: str, kept: list[str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = float8_models.save(tmp_path / "model", layout, kind, kept)
    with caplog.at_level(logging.WARNING, "twell"):
        model = twell_hf.sparsify(loaded(folder), strategy="row")
    assert [record.message for record in caplog.records if record.name == "twell"] == [
        "layers in e4m3 whose weights were dequantised to bfloat16, in which they run: 2, the first "
        f"{next(iter(twell.integrations.sparsify.layers(model)))}, as {why}"
    ]
    assert not layers(model)
    assert {row.strategy for row in twell.explain(model) if row.kind == "inference"} == {"row"}
    stock = dequantised(folder)
    for name, weight in model.state_dict().items():
        # those of attention stay in e4m3
        assert torch.equal(weight, stock.state_dict()[name]) if weight.dtype == BF16 else "attn" in name
    assert off(run(model, tokens()), run(stock, tokens())) < 8e-3


def test_layers_left_out_stay_as_they_are(on_a_gpu: None, tmp_path: Path) -> None:
    model = loaded(float8_models.save(tmp_path / "model", "fp8"))
    twell_hf.sparsify(model, filter_fn=lambda _, name: "layers.1" in name)
    assert [isinstance(block.mlp, Float8MLP) for block in model.model.layers] == [False, True]
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "FP8Linear"
    # the others can be taken later
    assert isinstance(twell.sparsify_(model).model.layers[0].mlp, Float8MLP)


def test_linear_layers_of_scaled_products(on_a_gpu: None, tmp_path: Path) -> None:
    model = loaded(float8_models.save(tmp_path / "model", "dynamic"), quantization_config=None)
    files = load_file(tmp_path / "model" / "model.safetensors")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".mlp." in name:
            made = CompressedTensorsFP8Linear(module.in_features, module.out_features)
            made.weight = nn.Parameter(files[f"{name}.weight"], requires_grad=False)
            made.weight_scale = nn.Parameter(files[f"{name}.weight_scale"].t().contiguous())
            model.set_submodule(name, made)
    twell_hf.sparsify(model)
    for name, t in layers(model)[0].state_dict().items():
        assert torch.equal(t.float(), files[f"model.layers.0.mlp.{name}"].float())


class Linear4bit(nn.Linear):
    """A quantised layer as other libraries have them."""

    quant_state = None


def with_blocks(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.weight_scale_inv = nn.Parameter(torch.ones(float8_models.N, float8_models.K // 32))


def with_hook(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(print)


def without_scale(model: Any) -> None:
    del model.model.layers[0].mlp.up_proj.weight_scale_inv


def dequantised_in_place(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.to(BF16))


def in_4_bits(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = Linear4bit(float8_models.K, float8_models.N, False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            with_blocks,
            r"up_proj: scale must be .* or \[2, 1\] by block .* got \[256, 4\]",
        ),
        (with_hook, "has forward_hooks on up_proj"),
        (without_scale, "up_proj: a weight in e4m3 must be weight and weight_scale or weight_scale_inv, got weight"),
        (dequantised_in_place, r"up_proj must hold its weight in torch.float8_e4m3fn, got torch.bfloat16: sparsify"),
        (in_4_bits, r"up_proj must be an nn.Linear itself, got .*Linear4bit: .* in bfloat16"),
        (
            lambda model: model.model.embed_tokens.half(),
            "has weights in e4m3, so the model must be in bfloat16, got torch.float16",
        ),
    ],
)
def test_what_is_refused(on_a_gpu: None, tmp_path: Path, change: Any, why: str) -> None:
    model = loaded(float8_models.save(tmp_path / "model", "fp8"))
    change(model)
    before = dict(model.named_modules())
    with pytest.raises((ValueError, TypeError), match=why):
        twell_hf.sparsify(model)
    assert dict(model.named_modules()) == before


def test_another_activation_needs_16_bits(on_a_gpu: None, tmp_path: Path) -> None:
    model = loaded(float8_models.save(tmp_path / "model", "fp8"))
    with pytest.raises(ValueError, match="be in 16 bits, got weights in e4m3: load the model with dequantize=True"):
        twell_hf.sparsify(model, activation="relu2")


@pytest.mark.parametrize("by", ["loading", "quantize_"])
@torch.no_grad()
def test_a_pair_of_e4m3_stays_together(by: str, on_a_gpu: None, tmp_path: Path) -> None:
    if by == "loading":
        model = twell_hf.sparsify(loaded(float8_models.save(tmp_path / "model", "fp8", "opt")), strategy="row")
    else:
        model = float8_models.build("opt")
        model.model.decoder.layers[1].fc2.bias = None
        twell_hf.sparsify(model, strategy="row")
        wide = run(model, tokens())
        assert twell.quantize_(model) is model
        assert 1e-3 < off(run(model, tokens()), wide) < 0.1
    block = model.model.decoder.layers[0]
    expected = run(model, tokens())
    assert isinstance(block.fc2, Float8Down)
    assert "fc2.up_proj.weight" not in block.state_dict()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for made in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        again = made.model.decoder.layers[0]
        assert again.fc2.up_proj is again.fc1
        assert torch.equal(run(made, tokens()), expected)
        again.fc1.bias.zero_()
        assert not torch.equal(run(made, tokens()), expected)
    assert torch.equal(run(model, tokens()), expected)
    for change in (lambda h: h + 1, lambda h: h.relu_(), lambda h: torch.zeros(9, float8_models.N, dtype=BF16)):
        with pytest.raises(NotImplementedError, match="a pair in e4m3 must run as a whole, for inference"):
            block.fc2(change(block.activation_fn(block.fc1(tokens()))))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda block: block.fc1.register_forward_hook(print), "got others, or hooks on them"),
        (lambda block: block.fc2.register_forward_hook(print), "got hooks, a forward of its own"),
        (lambda block: setattr(block, "activation_fn", nn.Dropout()), "or in one with other modules"),
        (lambda block: setattr(block, "fc1", nn.Linear(1, 1)), "or in one with other modules"),
        (lambda block: None, "got the second half of a pair without the block around both"),
    ],
)
def test_pairs_that_cannot_be_quantised(change: Any, why: str) -> None:
    model = twell_hf.sparsify(float8_models.build("opt"))
    blocks = model.model.decoder.layers.train()
    change(blocks[1])
    part = nn.ModuleList([blocks[0], blocks[1].fc2]) if "block around" in why else model
    before = dict(model.named_modules())
    with pytest.raises(TypeError, match=why):
        twell.quantize_(part)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("kind", ["llama", "opt"])
@torch.no_grad()
def test_hooks_of_accelerate(on_a_gpu: None, tmp_path: Path, kind: str) -> None:
    folder = float8_models.save(tmp_path / "model", "fp8", kind)
    alone = twell_hf.sparsify(loaded(folder), strategy="row")
    spread = accelerate.dispatch_model(loaded(folder), {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert torch.equal(run(twell_hf.sparsify(spread, strategy="row"), tokens()), run(alone, tokens()))
    with pytest.raises(ValueError, match=r"hook of accelerate that does more .*offloading.*keep it on a device"):
        twell_hf.sparsify(accelerate.cpu_offload(loaded(folder), torch.device("cpu")))


def test_experts_of_e4m3_stay_as_they_are() -> None:
    model = test_experts_transformers.model("Mixtral", BF16, hidden_act="relu")
    assert list(stacked.found(model))
    replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config(weight_block_size=None))
    assert "FP8Experts" in {type(module).__name__ for module in model.modules()}
    assert not list(stacked.found(model))
    assert "their weights must be in 16 or 32 bits, got torch.float8_e4m3fn" in stacked.left(model)


# files


def of_files(layout: str, part: str, more: bool = False) -> Any:
    def made(folder: Path) -> Any:
        model = loaded(float8_models.save(folder, layout))
        twell.sparsify_(model.get_submodule(part))
        return twell.quantize_(model) and model if more else model

    return made


@pytest.mark.parametrize(
    ("build", "why"),
    [
        *((of_files(*which), "the files that the model was loaded from") for which in (("fp8", ""), ("fp8", "model"))),
        (of_files("fp8 block", "model"), "weights must be stored as the configuration says"),
        (of_files("fp8 block", "", True), "weights must be stored as the configuration says"),
    ],
)
def test_models_that_are_not_saved(build: Any, why: str, on_a_gpu: None, tmp_path: Path) -> None:
    model = build(tmp_path / "model")
    for made in (model, copy.deepcopy(model)):
        with pytest.raises(NotImplementedError, match=f"save_pretrained: .*{why}"):
            made.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()


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
        *((kind, of_part("")) for kind in ("llama", "opt", "nemotron")),
        *(("llama", of_part(part)) for part in ("model", "model.layers", "model.layers.1")),
        ("opt", of_part("model.decoder.layers.1")),
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


@pytest.mark.parametrize("activation", ["drelu", "fatrelu"])
def test_files_in_e4m3_with_activations_of_twell_are_refused(activation: Any, on_a_gpu: None, tmp_path: Path) -> None:
    folder = float8_models.save(tmp_path / "model", "fp8")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_act": activation, "hidden_act_param": 0.5 if activation == "fatrelu" else None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotImplementedError, match=f"layers in e4m3 must have ReLU or its square, got {activation}"):
        twell_hf.load(folder, dtype=BF16)


def test_e4m3_without_scales_is_refused() -> None:
    model = float8_models.build()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match="up_proj must have a scale beside its weight in e4m3, got none"):
        twell_hf.sparsify(model)


@pytest.mark.parametrize("layout", ["fp8", "modelopt"])
def test_load(on_a_gpu: None, tmp_path: Path, layout: str) -> None:
    folder = float8_models.save(tmp_path / "model", layout)
    if layout == "modelopt":
        with pytest.raises(
            ValueError, match=r"got model\.layers.*weight_scale and 13 more that transformers leaves out"
        ):
            twell_hf.load(folder, dtype=BF16)
        return
    model = twell_hf.load(folder, dtype=BF16, strategy="row")
    assert [layer.strategy for layer in layers(model)] == ["row"] * float8_models.LAYERS
