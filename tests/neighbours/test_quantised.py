"""bitsandbytes and torchao: layers whose weights they quantise, with adapters of peft and without."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

import bitsandbytes as bnb
import peft
import torch
import transformers
from neighbours import causal_model, logits, strategies
from torch import Tensor, nn
from torchao import quantization
from torchao.quantization.granularity import PerGroup

import twell
import twell.integrations.transformers as twell_hf
from twell.call import functional
from twell.nn.layers import SparseGatedMLP, SparseMLP

BF16 = torch.bfloat16
K, N = 64, 128
GATED = ["gate_proj", "up_proj", "down_proj"]
# The largest error of any output or gradient, as a multiple of that of the projections' own calls; 1.7 was seen.
FACTOR = 2.0


class Holder(nn.Module):
    # as transformers marks a model
    is_loaded_in_4bit = True

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x)


def in_4_bits(mlp: Any, **options: Any) -> None:
    for name in mlp._projections:
        linear = mlp.get_submodule(name)
        settings = {"compute_dtype": BF16, "quant_type": "nf4"} | options
        made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, **settings)
        made.load_state_dict(linear.state_dict())
        setattr(mlp, name, made.to("cpu"))
        # else a call without gradients packs the weight for this CPU
        made.support_avx512bf16_for_cpu = False


def in_nested_4_bits(mlp: Any) -> None:
    in_4_bits(mlp, compress_statistics=True, quant_type="fp4")


def of_torchao(config: Any) -> Callable[[Any], None]:
    return lambda mlp: quantization.quantize_(mlp, config)


READ: dict[str, Callable[[Any], None]] = {
    "nf4": in_4_bits,
    "fp4, nested": in_nested_4_bits,
    "int8": of_torchao(quantization.Int8WeightOnlyConfig()),
    "float8": of_torchao(quantization.Float8WeightOnlyConfig()),
    "int4": of_torchao(quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))),
}


def quantised(change: Callable[[Any], None], cls: Any = SparseGatedMLP, strategy: Any = "union") -> Any:
    torch.manual_seed(0)
    mlp = cls(K, N, True, dtype=BF16, strategy=strategy)
    first = mlp.gate_proj if cls is SparseGatedMLP else mlp.up_proj
    with torch.no_grad():
        # no gate is so near to 0 that its rounding decides whether it fires
        first.bias.copy_(torch.where(torch.rand(N) < 0.4, 5.0, -5.0))
    change(mlp)
    return mlp


def plain(mlp: Any) -> Any:
    made = type(mlp)(K, N, True, dtype=torch.float64, strategy="dense")
    for name in mlp._projections:
        linear, values = mlp.get_submodule(name), made.get_submodule(name)
        weight = linear.weight
        exact = bnb.functional.dequantize_4bit(weight, weight.quant_state) if hasattr(weight, "quant_state") else None
        if exact is None and not hasattr(weight, "dequantize"):
            exact = weight
        with torch.no_grad():
            values.weight.copy_(weight.dequantize() if exact is None else exact)
            values.bias.copy_(linear.bias)
    return made


def tokens(dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(2, 6, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def results(model: Any, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
    leaves = {"x": x, **{name: p for name, p in model.named_parameters() if p.requires_grad and "lora" in name}}
    return {"y": y.detach()} | dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The width of y in each call of ``sparse_up_down``."""
    seen: list[int] = []
    run = functional.run

    def record(function: Any, given: Any, *rest: Any, **options: Any) -> Any:
        if function is twell.sparse_up_down:
            seen.append(given.w_down.shape[0])
        return run(function, given, *rest, **options)

    monkeypatch.setattr(functional, "run", record)
    return seen


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
def test_weights_are_dequantised_in_each_call(kind: str, cls: Any, runs: list[int]) -> None:
    mlp = quantised(READ[kind], cls)
    exact = results(plain(mlp), tokens().double())
    ours = results(mlp, tokens())
    assert runs == [K]
    assert {row.strategy for row in twell.explain(mlp)} == {"union"}
    mlp.strategy = "dense"
    theirs = results(mlp, tokens())
    for name, right in exact.items():
        assert ours[name].dtype == theirs[name].dtype
        assert error(ours[name], right) <= FACTOR * error(theirs[name], right), name


def with_adapters(mlp: Any, **options: Any) -> Any:
    config = {"target_modules": list(mlp._projections), "r": 3, "lora_alpha": 5, "init_lora_weights": False} | options
    torch.manual_seed(1)
    return peft.get_peft_model(Holder(mlp), peft.LoraConfig(**config))


@pytest.mark.parametrize("kind", ["nf4", "fp4, nested", "int8", "int4"])
@pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
def test_adapters_on_quantised_weights(kind: str, cls: Any, runs: list[int]) -> None:
    """QLoRA; a layer of torchao's weights is peft's own class, too."""
    model = with_adapters(quantised(READ[kind], cls))
    mlp = model.get_base_model().mlp
    kinds = {type(mlp.get_submodule(name)).__name__ for name in mlp._projections}
    assert kinds == {"Linear4bit" if "4" in kind and kind != "int4" else "TorchaoLoraLinear"}
    exact = copy_of(model)
    right = results(exact, tokens().double())
    ours = results(model, tokens())
    assert runs == [K + 8]
    mlp.strategy = "dense"
    theirs = results(model, tokens())
    assert ours.keys() == theirs.keys() == right.keys()
    assert len(ours) == 2 + 2 * len(mlp._projections)
    for name, value in right.items():
        assert ours[name].dtype == theirs[name].dtype
        assert error(ours[name], value) <= FACTOR * error(theirs[name], value), name


def copy_of(model: Any) -> Any:
    """An adapted model in float64, with the values of the quantised weights."""
    mlp = model.get_base_model().mlp
    bases = type(mlp)(K, N, True, dtype=BF16, strategy="dense")
    bases._modules.update({name: mlp.get_submodule(name).base_layer for name in mlp._projections})
    made = with_adapters(plain(bases), target_modules=list(mlp._projections))
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora" in name:
                parameter.data = own[name].double()
    return made


def test_float32_inputs_of_weights_in_4_bits(runs: list[int]) -> None:
    """As after ``prepare_model_for_kbit_training``: products are in ``compute_dtype``, and results as the inputs."""
    model = with_adapters(quantised(in_4_bits))
    right = results(copy_of(model), tokens().double())
    ours = results(model, tokens(torch.float32))
    assert runs == [K + 8]
    model.get_base_model().mlp.strategy = "dense"
    theirs = results(model, tokens(torch.float32))
    for name, value in right.items():
        assert ours[name].dtype == theirs[name].dtype
        assert error(ours[name], value) <= FACTOR * max(error(theirs[name], value), 2**-8), name
    with torch.autocast("cpu", BF16):
        dense = model(tokens(torch.float32))
        model.get_base_model().mlp.strategy = "union"
        sparse = model(tokens(torch.float32))
    assert sparse.dtype == dense.dtype
    assert error(sparse, dense.double()) <= 2e-2
    assert len(runs) == 2


def in_8_bits(mlp: Any) -> None:
    for name in mlp._projections:
        linear = mlp.get_submodule(name)
        made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, True, has_fp16_weights=False)
        made.load_state_dict(linear.state_dict())
        setattr(mlp, name, made.to("cpu"))


def not_yet_in_4_bits(mlp: Any) -> None:
    in_4_bits(mlp)
    mlp.up_proj.weight.quant_state.packing_format_for_cpu = True


def own_compute_dtypes(mlp: Any) -> None:
    in_4_bits(mlp)
    mlp.up_proj.compute_dtype = torch.float32


CALLED: dict[str, tuple[Callable[[Any], None], str]] = {
    "8 bits": (in_8_bits, "quantises its inputs, as weights in 8 bits of bitsandbytes do"),
    "int8 inputs": (
        of_torchao(quantization.Int8DynamicActivationInt8WeightConfig()),
        "quantises or scales its inputs, by a Int8Tensor of torchao",
    ),
    "dtypes": (own_compute_dtypes, "products in several dtypes"),
}


@pytest.mark.parametrize("kind", CALLED)
def test_what_is_more_than_its_weight_is_called(kind: str, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(twell.nn.layers, "warn_once", warnings.append)
    change, why = CALLED[kind]
    mlp = quantised(change)
    y = mlp(tokens())
    assert not runs
    (warning,) = warnings
    assert why in warning
    mlp.strategy = "dense"
    assert torch.equal(y, mlp(tokens()))


def test_a_weight_that_is_packed_for_a_cpu_is_called() -> None:
    mlp = quantised(not_yet_in_4_bits)
    (row,) = twell.explain(mlp).rows
    assert row.strategy == "dense"
    assert "packed for a CPU" in row.reason


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    causal_model("llama").to(BF16).save_pretrained(path)
    return path


def loaded(folder: Path, config: Any) -> Any:
    options = {"quantization_config": config, "dtype": BF16, "device_map": "cpu"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


CONFIGS: dict[str, Any] = {
    "4 bits": transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=BF16, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4"
    ),
    "torchao": transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig()),
}


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("adapted", [False, True])
def test_models_of_transformers(method: str, adapted: bool, folder: Path) -> None:
    model = loaded(folder, CONFIGS[method])
    if adapted:
        if method == "4 bits":
            model = peft.prepare_model_for_kbit_training(model)
        config = peft.LoraConfig(target_modules=GATED, r=4, init_lora_weights=False)
        model = peft.get_peft_model(model, config).train()
    expected = logits(model)
    keys = list(model.state_dict())
    assert twell_hf.sparsify(model, strategy="union") is model
    assert list(model.state_dict()) == keys
    assert strategies(model) == {"union"}
    assert error(logits(model), expected.double()) <= 2e-2


def test_models_that_quantise_their_inputs_are_refused(folder: Path) -> None:
    model = loaded(folder, transformers.BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(TypeError, match=r"gate_proj must have a weight that each call can dequantise.*quantises its"):
        twell_hf.sparsify(model)
    assert not any(isinstance(module, SparseGatedMLP) for module in copy.copy(model).modules())
