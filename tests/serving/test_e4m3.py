"""Feed-forward layers in e4m3 through twell in vLLM: what vLLM's quant methods load, and the engine's tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served import (
    COUNTED,
    DENSE,
    FLOAT8,
    HEADS,
    INPUT_SCALE,
    LAYERS,
    ON_GPU,
    ROW,
    TWO_RANKS,
    Serve,
    assert_alike,
    checkpoint,
    counted,
    in_float8,
)
from test_routed_experts import EXPERTS, SIZES

THROUGH = f"twell: {LAYERS} feed-forward layers of e4m3 weights run through torch.ops.twell.ffn"
HIDDEN, NEURONS = 64, 96


def model_of(tmp_path: Path, form: str, kind: str = "Llama") -> Path:
    model = checkpoint(tmp_path / "model", "relu" if kind == "Llama" else "relu2", kind=kind)
    in_float8(model, form)
    return model


@pytest.mark.parametrize(("form", "kind"), [("channel", "Llama"), ("modelopt-channel", "Nemotron")])
def test_dense_has_the_tokens_of_vllm(form: str, kind: str, tmp_path: Path, serve: Serve) -> None:
    """Its dense layers quantise h by token as twell's do, if weights have scales by rows."""
    model = model_of(tmp_path, form, kind)
    stock = serve(model, plugin=False, dtype="bfloat16", model_impl="auto" if kind == "Nemotron" else "transformers")
    served = serve(model, dtype="bfloat16", hf_overrides=DENSE)
    assert served.tokens == stock.tokens
    assert stock.layers == []
    assert served.rows == [True] * LAYERS
    assert f'{THROUGH}: strategy "dense"' in served.log


def test_formats_of_the_same_values_have_the_same_tokens(tmp_path: Path, serve: Serve) -> None:
    made = []
    for form in ("tensor", "fp8-static", "modelopt"):
        served = serve(model_of(tmp_path / form, form), dtype="bfloat16", hf_overrides=ROW)
        assert served.rows == [True] * LAYERS
        assert f'{THROUGH}: strategy "row"' in served.log
        made.append(served.tokens)
    assert made[0] == made[1] == made[2]


def test_compiled_and_counted_by_auto(tmp_path: Path, serve: Serve) -> None:
    model = model_of(tmp_path, "channel")
    served = serve(model, dtype="bfloat16", enforce_eager=False, request={"chooses": True})
    assert len(served.layers) == LAYERS
    assert served.started == [[]] * LAYERS
    assert counted(served) == COUNTED


def test_tensor_parallel(tmp_path: Path, serve: Serve) -> None:
    model = model_of(tmp_path, "tensor")
    alone = serve(model, dtype="bfloat16", hf_overrides=ROW)
    served = serve(model, dtype="bfloat16", hf_overrides=ROW, **TWO_RANKS)
    assert_alike(served, alone)
    assert served.rows == [True] * LAYERS


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_on_a_gpu(eager: bool, tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path, "relu", sizes=HEADS)
    in_float8(model, "channel")
    options = ON_GPU | {"enforce_eager": eager}
    stock = serve(model, plugin=False, model_impl="transformers", **options)
    for strategy in ("row", "auto"):
        served = serve(model, hf_overrides={"sparsity_strategy": strategy}, **options)
        assert_alike(served, stock)
        assert served.rows == [True] * LAYERS
        assert f'{THROUGH}: strategy "{strategy}"' in served.log


def test_weights_that_vllm_is_to_quantise(tmp_path: Path, serve: Serve) -> None:
    model = checkpoint(tmp_path, "relu")
    options = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    stock = serve(model, plugin=False, model_impl="transformers", **options)
    served = serve(model, hf_overrides=DENSE, **options)
    assert_alike(served, stock)
    assert f'{THROUGH}: strategy "dense"' in served.log


def test_tensors_that_are_loaded_into_others_are_refused(tmp_path: Path, run: Any) -> None:
    model = model_of(tmp_path, "tensor")
    refused = run(model, dtype="bfloat16", request={"then": str(model), "by": "load_weights"})
    assert refused.returncode != 0
    assert "must be loaded again by vLLM's reload_weights" in refused.stdout + refused.stderr


def test_experts_of_the_same_values_have_the_same_tokens(tmp_path: Path, serve: Serve) -> None:
    """Each format has a quant method and loaders of its own in vLLM, and shared experts in e4m3 beside."""
    made = []
    for form in ("modelopt", "fp8-static"):
        model = checkpoint(tmp_path / form, "relu2", kind="NemotronH", sizes=SIZES)
        in_float8(model, form)
        served = serve(model, dtype="bfloat16", hf_overrides=ROW, request=EXPERTS)
        assert served.experts_rows == [True] * LAYERS
        through = 'run through torch.ops.twell.experts: strategy "row"'
        assert f"{LAYERS} layers of experts of e4m3 weights {through}" in served.log
        assert f"{THROUGH}:" in served.log
        made.append(served.tokens)
    assert made[0] == made[1]


@contextmanager
def vllm_in_bfloat16() -> Iterator[Any]:
    """vLLM's configuration as its layers find it when they are made, with a model of ``ROW``."""
    import torch
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    settings = VllmConfig(device_config=DeviceConfig("cpu"))
    text = SimpleNamespace(num_hidden_layers=1, to_dict=dict, **ROW)
    config = SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace(get_text_config=lambda: text))
    # what a dataclass checks when it is made
    object.__setattr__(settings, "model_config", config)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(settings):
            yield settings
    finally:
        torch.set_default_dtype(torch.float32)


def configuration(form: str) -> Any:
    """vLLM's object for a format of ``FLOAT8``."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    settings = FLOAT8[form][0]
    found: Any = get_quantization_config(settings["quant_method"]).from_config(dict(settings))
    found.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    return found


def served_layer(settings: Any, quantised: Any, gated: bool, bias: bool) -> Any:
    """A layer of vLLM's linear layers, for a rank, that twell serves: a model with it as ``mlp``."""
    from torch import nn
    from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear

    from twell.base.activation import RELU
    from twell.integrations import _vllm_model

    layer = nn.Module()
    made = {"bias": bias, "quant_config": quantised}
    if gated:
        layer.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [NEURONS] * 2, prefix="mlp.gate_up_proj", **made)
    else:
        layer.up_proj = ColumnParallelLinear(HIDDEN, NEURONS, prefix="mlp.up_proj", **made)
    layer.act_fn = nn.ReLU()
    layer.down_proj = RowParallelLinear(NEURONS, HIDDEN, prefix="mlp.down_proj", **made)
    model = nn.ModuleDict({"mlp": layer})
    ffn = _vllm_model.FFN("" if gated else "up_proj", "act_fn", "down_proj", RELU)
    _vllm_model.serve(model, {"mlp": ffn}, settings)
    return layer


def load(layer: Any, tensors: dict[str, list[Any]]) -> None:
    """Load what a checkpoint has of a linear layer, for each of its projections, and process it as vLLM does."""
    merged = len(layer.logical_widths) > 1
    for name, shards in tensors.items():
        for number, shard in enumerate(shards):
            # a loader of weights that are quantised as they are loaded makes others
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, shard, *([number] if merged else []))
    layer.quant_method.process_weights_after_loading(layer)


def drawn(gated: bool, bias: bool) -> tuple[list[Any], list[Any]]:
    """Gate (if any), up and down weights, whose rows are unlike each other, and their biases."""
    import torch

    torch.manual_seed(0)
    shapes = [(NEURONS, HIDDEN)] * (2 if gated else 1) + [(HIDDEN, NEURONS)]
    weights = [torch.randn(shape) * torch.rand(shape[0], 1).mul(4).exp() for shape in shapes]
    return weights, [torch.randn(len(weight)).bfloat16() if bias else None for weight in weights]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "pair"])
@pytest.mark.parametrize("form", FLOAT8)
def test_values_and_scales_are_those_of_the_checkpoint(
    form: str, gated: bool, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, without requantising; together they are the layer."""
    import torch
    from vllm.model_executor.layers import linear

    from twell.ops import float8

    monkeypatch.setattr(linear, "tensor_model_parallel_all_reduce", lambda y: y)
    _, granularity, static = FLOAT8[form]
    bias = form == "channel"
    weights, biases = drawn(gated, bias)
    *first, down = records = [float8.quantize(weight, granularity) for weight in weights]
    inputs = torch.tensor([INPUT_SCALE]) if static else None

    def stored(records: list[Any], biases: list[Any]) -> dict[str, list[Any]]:
        # compressed-tensors has a dimension for columns
        scales = [record.scale[:, None] if form == "channel" else record.scale for record in records]
        tensors = {"weight": [record.values for record in records], "weight_scale": scales}
        if static:
            tensors["input_scale"] = [torch.tensor(INPUT_SCALE)] * len(records)
        return tensors | ({"bias": biases} if bias else {})

    x, parts = torch.randn(5, HIDDEN).bfloat16(), []
    for ranks[0] in range(2):
        with vllm_in_bfloat16() as settings:
            layer = served_layer(settings, configuration(form), gated, bias)
        up = layer.gate_up_proj if gated else layer.up_proj
        load(up, stored(first, biases[:-1]))
        load(layer.down_proj, stored([down], biases[-1:]))
        own = slice(ranks[0] * NEURONS // 2, (ranks[0] + 1) * NEURONS // 2)
        values = torch.cat([record.values[own].view(torch.uint8) for record in first])
        assert torch.equal(up.weight.view(torch.uint8), values)
        assert torch.equal(up.weight_scale, torch.cat([record.by_rows()[own] for record in first]))
        assert torch.equal(layer.down_proj.weight.view(torch.uint8), down.values[:, own].view(torch.uint8))
        assert torch.equal(layer.down_proj.weight_scale, down.by_rows())
        assert layer.down_proj.weight.t().is_contiguous()
        hidden = x if gated else layer.act_fn(up(x)[0])
        parts.append(layer.down_proj(hidden)[0].double())
    gate, up_record = (records[0], records[1]) if gated else (records[0], None)
    b_gate, b_up = (biases[0], biases[1]) if gated else (biases[0], None)
    expected = float8.formula(float8.quantize_tokens(x, inputs), gate, up_record, down, (b_gate, b_up, biases[-1]))
    torch.testing.assert_close(sum(parts), expected, rtol=0, atol=float(expected.abs().max()) * 1e-2)
