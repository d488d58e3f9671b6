"""Weights in e4m3 of vLLM's linear layers without vLLM: stand-ins with the parameters that its quant methods make.

tests/serving/test_e4m3.py has the tests with its own classes.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twell.choose import tuning
from twell.integrations import _vllm_float8
from twell.ops.float8 import E4M3, quantize
from twell.runtime import specs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
N, K = 24, 32
MISSING = torch.finfo(torch.float32).min


def linear(
    method: str = "Fp8LinearMethod",
    widths: tuple[int, ...] = (N,),
    columns: int = K,
    scale: Tensor | None = None,
    weight: Tensor | None = None,
    **more: Any,
) -> Any:
    """A layer before it is loaded; ``more`` are further attributes."""
    layer = nn.Module()
    weight = torch.zeros(sum(widths), columns, dtype=E4M3) if weight is None else weight
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.ones(len(widths)) if scale is None else scale, requires_grad=False)
    given = {"quant_method": type(method, (), {})(), "logical_widths": list(widths), "params_dtype": torch.bfloat16}
    for name, value in {**given, "prefix": "layers.0.up_proj", **more}.items():
        setattr(layer, name, value)
    return layer


def reason(first: Any, down: Any = None, on: torch.device = CPU) -> str:
    return _vllm_float8.why_not(first, linear(widths=(K,), columns=N) if down is None else down, on)


@pytest.mark.parametrize("scale", [torch.ones(1), torch.ones(N), torch.ones(N, 1)], ids=lambda t: str(list(t.shape)))
@pytest.mark.parametrize("method", _vllm_float8._STORED)
def test_formats_that_run(method: str, scale: Tensor) -> None:
    assert reason(linear(method, scale=scale)) == ""


def test_schemes_of_compressed_tensors_are_those_of_a_layer() -> None:
    scheme = type("CompressedTensorsW8A8Fp8", (), {})()
    assert reason(linear("CompressedTensorsLinearMethod", scheme=scheme)) == ""
    turned = "CompressedTensorsLinearTransformMethod"
    assert reason(linear(turned, scheme=scheme)).endswith(f"e4m3, got {turned}")
    other = type("CompressedTensorsW8A16Fp8", (), {})()
    assert reason(linear("CompressedTensorsLinearMethod", scheme=other)).endswith("e4m3, got CompressedTensorsW8A16Fp8")


def test_weights_that_vllm_is_to_quantise_stay_with_it() -> None:
    wide = torch.empty(N, K, dtype=torch.bfloat16, device="meta")
    said = reason(linear("Fp8PtpcOnlineLinearMethod", weight=wide))
    assert said == "all weights must be in 16 bits, or with their inputs in e4m3, got Fp8PtpcOnlineLinearMethod"


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ({"method": "UnquantizedLinearMethod"}, "all weights must be in 16 bits, or with their inputs in e4m3, got U"),
        ({"method": "AWQLinearMethod"}, "all weights must be in 16 bits, or with their inputs in e4m3, got AWQLinear"),
        # NVFP4
        (
            {"method": "ModelOptLinearMethod", "weight": torch.zeros(N, K // 2, dtype=torch.uint8)},
            "all weights must be in 16 bits, or with their inputs in e4m3, got ModelOptLinearMethod",
        ),
        (
            {"scale": torch.ones(1, 1)},
            "weights in e4m3 must have a scale for each row, or one in all, got Fp8LinearMethod with scales of blocks",
        ),
        # MXFP8
        ({"scale": torch.ones(N, 1, dtype=torch.uint8)}, "weights in e4m3 must have a scale for each row, or one in"),
        ({"params_dtype": torch.float16}, "the model must be in bfloat16 with weights in e4m3, got torch.float16"),
    ],
    ids=str,
)
def test_formats_that_run_as_without_twell(first: dict[str, Any], said: str) -> None:
    assert reason(linear(**first)).startswith(said)


def test_weights_of_another_name_are_of_another_format() -> None:
    layer = linear("AWQLinearMethod")
    del layer.weight
    assert reason(layer).endswith("got AWQLinearMethod")


def test_gpus_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "family", lambda index: specs.SM90)
    assert reason(linear(), on=GPU) == ""
    monkeypatch.setattr(tuning, "family", lambda index: specs.PORTABLE)
    assert reason(linear(), on=GPU) == "kernels for weights in e4m3 need compute capability 9.0"


def drawn(rows: int = N) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(0))


def test_rows_have_the_scales_of_their_projections() -> None:
    values = quantize(drawn(2 * N)).values
    scale, inputs = torch.tensor([0.5, 3.0]), nn.Parameter(torch.tensor([0.25, 0.75]), requires_grad=False)
    layer = linear(widths=(N, N), weight=values, scale=scale, input_scale=inputs)
    for _ in range(2):
        _vllm_float8.load(layer)
        assert torch.equal(layer.weight.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(layer.weight_scale, scale.repeat_interleave(N))
        assert layer.input_scale.tolist() == [0.75]


def test_scales_of_rows_stay() -> None:
    record = quantize(drawn())
    layer = linear(weight=record.values, scale=record.scale[:, None])
    _vllm_float8.load(layer)
    assert torch.equal(layer.weight_scale, record.scale)
    assert layer.input_scale is None
    # others would be read with the scales of these
    for parameter in (layer.weight, layer.weight_scale):
        with pytest.raises(
            NotImplementedError, match=r"must be loaded again by vLLM's reload_weights.* got load_weights"
        ):
            parameter.weight_loader(parameter, record.values)


@pytest.mark.parametrize("name", ["weight_scale", "input_scale"])
def test_a_scale_that_was_not_loaded_is_refused(name: str) -> None:
    layer = linear(widths=(N, N))
    setattr(layer, name, nn.Parameter(torch.tensor([1.0, MISSING]), requires_grad=False))
    with pytest.raises(ValueError, match=rf"layers.0.up_proj.{name} must be in the checkpoint, got none for a proj"):
        _vllm_float8.load(layer)
