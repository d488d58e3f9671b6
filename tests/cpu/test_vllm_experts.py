"""Routed experts in vLLM without vLLM: its classes are stand-ins with the methods that the plug-in calls.

tests/serving/test_routed_experts.py has the tests with the engine.
"""

import abc
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twell.base.activation import Activation
from twell.choose import tuning
from twell.integrations import _vllm_kernels, layouts
from twell.ops.float8 import E4M3, Float8, formula, quantize, quantize_tokens
from twell.runtime import specs

NAME = "twell.integrations._vllm_experts"
LAYERS = "vllm.model_executor.layers"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
E, N, K, TOP = 6, 64, 32, 3
EACH = "each row, or one in all"


class RoutedExperts(nn.Module):
    """vLLM's container of the weights of experts."""


def make_method() -> Any:
    """vLLM's class for experts that are not quantised, with its registry."""

    class UnquantizedFusedMoEMethod(Base):
        replaced: Any = None

        def __new__(cls, *arguments: Any) -> Any:
            replaced, stock = UnquantizedFusedMoEMethod.replaced, cls is UnquantizedFusedMoEMethod
            return nn.Module.__new__(replaced if stock and replaced is not None else cls)

        def __init__(self, moe: Any) -> None:
            super().__init__(moe)
            self.unquantized_backend = "stock"

        @classmethod
        def register_oot(cls, kind: Any) -> None:
            assert UnquantizedFusedMoEMethod.replaced is None
            UnquantizedFusedMoEMethod.replaced = kind

    return UnquantizedFusedMoEMethod


class Base(nn.Module):
    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.moe = moe


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    layers = ModuleType(f"{LAYERS}.fused_moe")
    layers.UnquantizedFusedMoEMethod, layers.RoutedExperts = make_method(), RoutedExperts  # type: ignore[attr-defined]
    oracle = ModuleType(f"{LAYERS}.fused_moe.oracle.unquantized")
    oracle.UnquantizedMoeBackend = Enum("UnquantizedMoeBackend", {"OOT": "OOT"})  # type: ignore[attr-defined]
    packages = ("vllm", "vllm.model_executor", LAYERS, f"{LAYERS}.fused_moe.oracle")
    for module in (*map(ModuleType, packages), layers, oracle):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME)


@dataclasses.dataclass
class Config:
    activation: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(value="relu2_no_mul"))
    is_act_and_mul: bool = False
    is_lora_enabled: bool = False
    has_bias: bool = False
    moe_backend: str = "auto"
    moe_parallel_config: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(enable_eplb=False))
    dp_size: int = 1
    pcp_size: int = 1
    is_sequence_parallel: bool = False
    in_dtype: torch.dtype = torch.bfloat16
    num_local_experts: int = E
    experts_per_token: int = TOP
    intermediate_size_per_partition: int = N
    hidden_dim: int = K


def layers_of(experts: Any, strategy: str = "row", on: torch.device = CPU, **content: Any) -> Any:
    return experts.Layers(layouts.route_of({"sparsity_strategy": strategy} | content), 8, on)


def made(experts: Any, layers: Any, config: Config) -> Any:
    with experts.serving(layers):
        return experts.UnquantizedFusedMoEMethod(config)


def drawn(gated: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, w13, w2, ids and weights, small integers whose sums are exact."""
    torch.manual_seed(0)
    x, w13, w2 = (
        torch.randint(-1, 2, shape).bfloat16() for shape in ((5, K), (E, N * (2 if gated else 1), K), (E, K, N))
    )
    ids = torch.stack([torch.randperm(E)[:TOP] for _ in range(5)]).int()
    return x, w13, w2, ids, torch.randint(1, 3, (5, TOP)).float()


def loaded(method: Any, w13: Tensor, w2: Tensor, expert_map: Tensor | None = None, on_input: bool = False) -> Any:
    layer = RoutedExperts()
    layer.w13_weight, layer.w2_weight = (nn.Parameter(w.clone(), requires_grad=False) for w in (w13, w2))
    layer.expert_map, layer.apply_router_weight_on_input = expert_map, on_input
    method.process_weights_after_loading(layer)
    assert layer.w2_weight.shape == w2.shape
    assert layer.w2_weight.transpose(1, 2).is_contiguous()
    # vLLM does so again after an update of weights
    before = layer.w2_weight.data_ptr()
    method.process_weights_after_loading(layer)
    assert layer.w2_weight.data_ptr() == before
    return layer


def expected(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, gated: bool = False) -> Tensor:
    y = torch.zeros(len(x), K, dtype=torch.float64)
    for t in range(len(x)):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist()):
            products = w13[expert].double() @ x[t].double()
            gate, up = products.chunk(2) if gated else (products, 1.0)
            y[t] += weight * (w2[expert].double() @ (gate.relu().square() * up))
    return y.bfloat16()


def assert_near(y: Any, reference: Tensor) -> None:
    """Grouped products round hidden states, and ranks their sums."""
    torch.testing.assert_close(y.double(), reference.double(), rtol=0, atol=float(reference.abs().max()) * 1e-2)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("strategy", ["row", "auto", "union"])
def test_experts_run_through_the_operator(gated: bool, strategy: str, experts: Any) -> None:
    x, w13, w2, ids, weights = drawn(gated)
    layers = layers_of(experts, strategy)
    activation = SimpleNamespace(value="relu2" if gated else "relu2_no_mul")
    method = made(experts, layers, Config(activation=activation, is_act_and_mul=gated))
    assert type(method) is experts.RunsExperts
    assert method.unquantized_backend.name == "OOT"
    assert layers.route.strategy == {"union": "auto"}.get(strategy, strategy)
    y = method.forward_native(loaded(method, w13, w2), x, weights, ids)
    assert_near(y, expected(x, w13, w2, ids, weights, gated))


def test_ranks_add_their_experts(experts: Any) -> None:
    x, w13, w2, ids, weights = drawn()
    method = made(experts, layers_of(experts), Config())
    parts = []
    for first in (0, E // 2):
        own = slice(first, first + E // 2)
        expert_map = torch.full((E,), -1, dtype=torch.int32)
        expert_map[own] = torch.arange(E // 2, dtype=torch.int32)
        layer = loaded(method, w13[own], w2[own], expert_map)
        parts.append(method.forward_native(layer, x, weights, ids).double())
    assert_near(sum(parts), expected(x, w13, w2, ids, weights))


def test_weights_of_the_router_may_be_of_the_input(experts: Any) -> None:
    x, w13, w2, ids, weights = drawn()
    ids, weights = ids[:, :1], weights[:, :1]
    method = made(experts, layers_of(experts), Config(experts_per_token=1))
    y = method.forward_native(loaded(method, w13, w2, on_input=True), x, weights, ids)
    scaled = x * weights.bfloat16()
    assert torch.equal(y, expected(scaled, w13, w2, ids, torch.ones_like(weights)))
    assert not torch.equal(y, expected(x, w13, w2, ids, weights))


def test_other_layers_are_vllms_own(experts: Any) -> None:
    stock, silu = experts.UnquantizedFusedMoEMethod, Config(activation=SimpleNamespace(value="silu"))
    layers = layers_of(experts)
    assert type(made(experts, layers, Config())) is experts.RunsExperts
    others = made(experts, layers, silu), stock(Config()), made(experts, layers, Config(has_bias=True))
    # the second one is of a model that twell does not make
    assert [type(method) for method in others] == [stock] * 3
    assert [method.unquantized_backend for method in others] == ["stock"] * 3
    assert layers.served == 1
    assert layers.reasons == {
        "their activation must be one of relu2, relu2_no_mul, got silu": 1,
        "experts must have no bias": 1,
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"is_lora_enabled": True}, "LoRA is enabled"),
        ({"moe_backend": "triton"}, "another kernel was named, triton"),
        ({"moe_parallel_config": SimpleNamespace(enable_eplb=True)}, "EPLB, which moves experts between ranks"),
        ({"dp_size": 2}, "all tokens must be on every rank, got data, context or sequence parallelism"),
        ({"in_dtype": torch.float32}, "weights must be bfloat16 or float16, got torch.float32"),
        ({"num_local_experts": 1025}, "experts of a rank must be at most 1024, got 1025"),
        ({"experts_per_token": 33}, "experts of a token must be at most 32, got 33"),
        ({"intermediate_size_per_partition": 700}, "sizes of a rank: N must be a positive multiple of 8"),
    ],
    ids=str,
)
def test_layers_run_as_without_twell_for_a_reason(change: dict[str, Any], reason: str, experts: Any) -> None:
    got = experts.why_not(Config(**change), layouts.route_of({}), CPU)
    assert got.startswith(reason)
    assert bool(got) == bool(reason)


def test_what_a_gpu_runs(experts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(strategy: str, dtype: torch.dtype = torch.bfloat16) -> str:
        return str(experts.why_not(Config(in_dtype=dtype), layouts.route_of({"sparsity_strategy": strategy}), GPU))

    monkeypatch.setattr(tuning, "family", lambda index: specs.SM90)
    for strategy in ("auto", "dense", "row"):
        assert reason(strategy) == reason(strategy, torch.float16) == ""
    monkeypatch.setattr(tuning, "family", lambda index: specs.PORTABLE)
    assert reason("row") == "kernels for experts need compute capability 9.0"


def test_kernels_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, calls, real = torch.zeros, [], torch.ops.twell.experts

    def called(*arguments: Any) -> None:
        calls.append(arguments)
        if arguments[1].dtype == E4M3:
            real(*arguments)
        elif len(calls) > 4:
            raise RuntimeError("kernel expert_pack_bf16 cannot be compiled\nbecause of more")

    def tried(strategy: str, gated: bool = False, on: torch.device = GPU, dtype: Any = torch.bfloat16) -> str:
        route = layouts.route_of({"sparsity_strategy": strategy})
        return _vllm_kernels.trouble(route, 8, on, Activation("relu2"), gated, K, dtype, experts=True)

    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.ops.twell, "experts", called)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda on: None)
    assert tried("dense") == tried("row", on=CPU) == ""
    assert calls == []
    assert tried("auto") == tried("row", gated=True) == ""
    # with few tokens, and with more than one pass takes
    assert [call[2] is None for call in calls] == [True, True, False, False]
    assert [call[7] for call in calls] == ["row"] * 4
    said = "its kernels cannot be loaded (RuntimeError: kernel expert_pack_bf16 cannot be compiled); `twell info`"
    assert tried("row").startswith(said)
    # the operator checks its operands
    assert tried("auto", dtype=E4M3) == ""


class Fp8MoEMethod(abc.ABC):  # noqa: B024
    def __init__(self, moe: Any) -> None:
        self.moe = moe

    @property
    def is_monolithic(self) -> bool:
        raise AttributeError("no kernel")

    def process_weights_after_loading(self, layer: Any) -> None:
        raise NotImplementedError("vLLM's own")


def in_float8(by_rows: bool = False, static: bool = True, change: Any = None) -> tuple[Any, Float8, Float8]:
    """A layer of experts as vLLM makes it for a checkpoint in e4m3, and its weights."""
    torch.manual_seed(0)
    up, down = (quantize(torch.randn(shape), "row" if by_rows else "tensor") for shape in ((E, N, K), (E, K, N)))
    layer = RoutedExperts()
    layer.quant_method = Fp8MoEMethod(dataclasses.replace(Config(), **(change or {})))
    layer.w13_weight, layer.w2_weight = (nn.Parameter(r.values.clone(), requires_grad=False) for r in (up, down))
    # by tensor those of w13 have a place for each projection
    scales = (up.scale[..., None], down.scale[..., None] if by_rows else down.scale)
    layer.w13_weight_scale, layer.w2_weight_scale = (nn.Parameter(s.clone(), requires_grad=False) for s in scales)
    inputs = nn.Parameter(torch.linspace(0.01, 0.02, E), requires_grad=False)
    layer.w13_input_scale = inputs if static else None
    layer.expert_map, layer.apply_router_weight_on_input = None, False
    return layer, up, down


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of ``experts``, which is the formula here, expert by expert."""
    calls: list[tuple[Any, ...]] = []

    def experts(*given: Any) -> Tensor:
        calls.append(given)
        x, w_up, w_gate, w_down, ids, weights, _, _, name, threshold = given[:10]
        x_scale, up_scale, gate_scale, down_scale = given[13:]
        assert w_gate is gate_scale is None
        assert (w_up.shape, up_scale.shape) == ((E, N, K), (E, N))
        assert (w_down.shape, down_scale.shape) == ((E, N, K), (E, K))
        assert w_down.is_contiguous()
        assert x_scale is None or x_scale.shape == (1,)
        tokens, y = quantize_tokens(x, x_scale), torch.zeros(len(x), K, dtype=torch.float64)
        for expert in range(E):
            matrices = Float8(w_up[expert], up_scale[expert]), None, Float8(w_down[expert].t(), down_scale[expert])
            of = formula(tokens, *matrices, activation=Activation(name, threshold))
            y += of * (weights * (ids == expert)).sum(1, keepdim=True).double()
        return y.bfloat16()

    monkeypatch.setattr(torch.ops.twell, "experts", experts, raising=False)
    return calls


@pytest.mark.parametrize(("by_rows", "static"), [(False, True), (True, False)])
def test_experts_in_e4m3_run_through_their_operator(
    by_rows: bool, static: bool, experts: Any, operator: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.twell")
    layers = layers_of(experts, "row")
    layer, up, down = in_float8(by_rows, static)
    layers.take_float8(layer)
    layers.tell(layer)
    assert [record.getMessage() for record in caplog.records] == [
        'twell: 1 layers of experts of e4m3 weights run through torch.ops.twell.experts: strategy "row"'
    ]
    method = layer.quant_method
    assert type(method).__name__ == "Fp8MoEMethod"
    assert isinstance(method, (Fp8MoEMethod, experts.RunsFloat8Experts))
    assert not method.is_monolithic
    for _ in range(2):
        method.process_weights_after_loading(layer)
    for weight, record in ((layer.w13_weight, up), (layer.w2_weight, down)):
        assert torch.equal(weight.contiguous().view(torch.uint8), record.values.view(torch.uint8))
    assert torch.equal(layer.w13_weight_scale, up.by_rows())
    assert torch.equal(layer.w2_weight_scale, down.by_rows())
    x, _, _, ids, weights = drawn()
    layer.expert_map = torch.arange(E, dtype=torch.int32)
    # those of another rank
    layer.expert_map[0] = -1
    y = method.apply(layer, x, weights, ids, None, None)
    ((_, _, _, _, passed, _, compression, strategy, name, threshold, *_, x_scale, _, _, _),) = operator
    assert (x_scale is not None and x_scale.tolist()) == (static and [pytest.approx(0.02)])
    assert torch.equal(passed, torch.where(ids == 0, -1, ids))
    assert (compression, strategy, name, threshold) == (8, "row", "relu2", 0)
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "strategy", "reason"),
    [
        ({"in_dtype": torch.float16}, {}, "the model must be in bfloat16 with weights in e4m3, got torch.float16"),
        ({"is_act_and_mul": True}, {}, "experts with weights in e4m3 must have no gate"),
        ({}, {"sparsity_invariant": True}, "experts with weights in e4m3 have no invariant form"),
        ({"is_lora_enabled": True}, {}, "LoRA is enabled"),
        ({}, {}, f"weights in e4m3 must have a scale for {EACH}, got Fp8MoEMethod with scales of blocks"),
        ({"hidden_dim": 40}, {}, "sizes of a rank: K must be a positive multiple of 16 for the sparse kernels, got 40"),
    ],
    ids=str,
)
def test_experts_in_e4m3_that_are_left_to_vllm(
    change: dict[str, Any], strategy: dict[str, Any], reason: str, experts: Any
) -> None:
    layer, _, _ = in_float8(change=change)
    if reason.endswith("blocks"):
        layer.w2_weight_scale = nn.Parameter(torch.ones(E, 1, 1), requires_grad=False)
    layers = layers_of(experts, "auto", **strategy)
    layers.take_float8(layer)
    assert dict(layers.reasons) == {reason: 1}
    assert type(layer.quant_method) is Fp8MoEMethod


def test_reasons_are_told_where_vllm_refuses_a_layer(experts: Any, caplog: pytest.LogCaptureFixture) -> None:
    layers = layers_of(experts)

    def make() -> None:
        with experts.serving(layers):
            experts.UnquantizedFusedMoEMethod(Config(has_bias=True))
            raise NotImplementedError("vLLM has no kernel")

    with pytest.raises(NotImplementedError, match="no kernel"):
        make()
    assert [record.getMessage() for record in caplog.records] == [
        "twell: 1 layers of experts run as without twell: experts must have no bias"
    ]


def test_another_plug_in_keeps_its_experts(experts: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Theirs(experts.UnquantizedFusedMoEMethod):  # type: ignore[misc, name-defined]
        pass

    experts.UnquantizedFusedMoEMethod.register_oot(Theirs)
    layers, layer = layers_of(experts), RoutedExperts()
    layer.quant_method = made(experts, layers, Config())
    assert type(layer.quant_method) is Theirs
    layers.tell(layer)
    assert [record.getMessage() for record in caplog.records] == [
        "twell: 1 layers of experts run as without twell: another plug-in of vLLM runs experts"
    ]
