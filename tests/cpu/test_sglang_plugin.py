"""The SGLang plug-in without SGLang: stand-ins with the names, the signatures and the calls of SGLang 0.5.23."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell.integrations import sglang as plugin

transformers = pytest.importorskip("transformers")

K, N = 64, 96


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    """SGLang's registry, as far as the plug-in uses it: ``apply_hooks`` wraps what the dotted names mean."""

    hooks: list[tuple[str, Callable[..., Any]]]

    def __init__(self) -> None:
        self.hooks = []

    def register(self, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        assert hook_type is HookType.AROUND
        self.hooks.append((target, hook))

    def apply_hooks(self) -> None:
        for target, hook in self.hooks:
            parts = target.split(".")
            depth = next(i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in sys.modules)
            owner = functools.reduce(getattr, parts[depth:-1], sys.modules[".".join(parts[:depth])])
            original = getattr(owner, parts[-1])
            setattr(
                owner,
                parts[-1],
                functools.partialmethod(_around, hook, original)
                if isinstance(owner, type)
                else functools.partial(hook, original),
            )


def _around(self: Any, hook: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return hook(original, self, *args, **kwargs)


class UnquantizedLinearMethod:
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


class Linear(nn.Module):
    """A rank's linear layer: one product by its method; that of rows says so, where SGLang would add over ranks."""

    def __init__(self, outputs: int, inputs: int, quant_config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs).mul(0.1).to(dtype), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod() if quant_config is None else quant_config
        self.reduced = 0

    def forward(
        self, x: Tensor, skip_all_reduce: bool = False, forward_batch: Any = None, output_tensor: Any = None
    ) -> tuple[Tensor, None]:
        self.reduced += 1
        return self.quant_method.apply(self, x, bias=None), None


def mlp_class(name: str) -> type[nn.Module]:
    """A layer as LlamaMLP and Qwen2MLP are: gate and up in one, nothing but SiLU."""

    class MLP(nn.Module):
        def __init__(
            self, hidden_size: int, intermediate_size: int, hidden_act: str, quant_config: Any = None, prefix: str = ""
        ) -> None:
            super().__init__()
            dtype = torch.get_default_dtype()
            self.gate_up_proj = Linear(2 * intermediate_size, hidden_size, quant_config, dtype)
            self.down_proj = Linear(hidden_size, intermediate_size, quant_config, dtype)
            if hidden_act != "silu":
                raise ValueError(f"Unsupported activation: {hidden_act}. Only silu is supported for now.")

        def forward(self, x: Tensor, forward_batch: Any = None) -> Tensor:
            gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
            return self.down_proj(F.silu(gate) * up)[0]

    MLP.__name__ = name
    return MLP


def model_class(name: str) -> type:
    class Model:
        def __init__(self, config: Any) -> None:
            self.config, self.loaded = config, {}

        def load_weights(self, weights: Any) -> None:
            self.loaded = dict(weights)

    Model.__name__ = name
    return Model


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-ins, with the plug-in registered and its hooks applied."""
    registry = HookRegistry()
    arguments = SimpleNamespace(enable_lora=None, lora_paths=None)
    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": HookType},
        "sglang.srt.runtime_context": {"get_server_args": lambda: arguments},
        "sglang.srt.utils": {},
        "sglang.srt.utils.hf_transformers": {},
        "sglang.srt.utils.hf_transformers.config": {"get_config": lambda config, **_: config},
        "sglang.srt.models": {},
    }
    for module, name in (("llama", "Llama"), ("qwen2", "Qwen2")):
        contents[f"sglang.srt.models.{module}"] = {
            f"{name}MLP": mlp_class(f"{name}MLP"),
            f"{name}ForCausalLM": model_class(f"{name}ForCausalLM"),
        }
    for name, content in contents.items():
        module_object = ModuleType(name)
        vars(module_object).update(content)
        monkeypatch.setitem(sys.modules, name, module_object)
    # transformers would keep what is registered
    monkeypatch.setattr(transformers.AutoConfig, "register", lambda *_, **__: None)
    monkeypatch.delenv("TWELL_SGLANG", raising=False)
    plugin.register.cache_clear()
    plugin.register()
    registry.apply_hooks()
    yield SimpleNamespace(
        registry=registry,
        arguments=arguments,
        get_config=lambda config: sys.modules["sglang.srt.utils.hf_transformers.config"].get_config(config),  # type: ignore[attr-defined]
        llama=sys.modules["sglang.srt.models.llama"],
        qwen2=sys.modules["sglang.srt.models.qwen2"],
    )
    plugin.register.cache_clear()


def built(cls: Any, hidden_act: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return cls(
            hidden_size=options.pop("k", K), intermediate_size=options.pop("n", N), hidden_act=hidden_act, **options
        )
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_relu_layer_computes_relu_and_reduces_by_the_down_projection(name: str, sglang: Any) -> None:
    mlp = built(getattr(getattr(sglang, name.lower()), f"{name}MLP"), "relu")
    merged, down = mlp.gate_up_proj.weight.clone(), mlp.down_proj.weight.clone()
    for _ in range(2):
        # SGLang may do it twice
        mlp.down_proj.quant_method.process_weights_after_loading(mlp.down_proj)
    assert mlp.down_proj.weight.t().is_contiguous()
    x = torch.randn(5, K).bfloat16()
    gate, up = F.linear(x, merged).chunk(2, -1)
    expected = F.linear(F.relu(gate) * up, down)
    torch.testing.assert_close(mlp(x, SimpleNamespace()), expected)
    assert (mlp.down_proj.reduced, mlp.gate_up_proj.reduced) == (1, 0)


def test_silu_layer_is_untouched(sglang: Any) -> None:
    mlp = built(sglang.llama.LlamaMLP, "silu")
    assert type(mlp.down_proj.quant_method) is UnquantizedLinearMethod
    assert "forward" not in vars(mlp)


def test_other_activations_are_refused_as_without_twell(sglang: Any) -> None:
    with pytest.raises(ValueError, match="Unsupported activation: gelu"):
        built(sglang.llama.LlamaMLP, "gelu")


class Int8Method(UnquantizedLinearMethod):
    pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quant_config": Int8Method()}, "weights must not be quantised, got Int8Method"),
        ({"dtype": torch.float32}, "weights must be bfloat16 or float16, got torch.float32"),
        ({"n": 100}, "N must be a positive multiple of 8 for the sparse kernels, got 100"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(options: dict[str, Any], reason: str, sglang: Any) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        built(sglang.llama.LlamaMLP, "relu", **options)


def test_adapters_are_refused(sglang: Any) -> None:
    sglang.arguments.lora_paths = ["folder"]
    with pytest.raises(NotImplementedError, match="LoRA is enabled"):
        built(sglang.llama.LlamaMLP, "relu")
    sglang.arguments.enable_lora = False
    built(sglang.llama.LlamaMLP, "relu")


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_sparse_configuration_becomes_the_stock_ones_with_relu(name: str, sglang: Any) -> None:
    sizes = {"hidden_size": K, "intermediate_size": N, "num_hidden_layers": 1}
    stock = getattr(transformers, f"{name}Config")
    config = sglang.get_config(stock(**sizes, architectures=[f"Sparse{name}ForCausalLM"], hidden_act="silu"))
    assert (config.architectures, config.hidden_act) == ([f"{name}ForCausalLM"], "relu")
    model = getattr(getattr(sglang, name.lower()), f"{name}ForCausalLM")(config)
    weight = torch.randn(N, K)
    model.load_weights([("model.layers.0.mlp.down_proj.weight", weight), ("model.norm.weight", torch.ones(K))])
    assert torch.equal(model.loaded["model.layers.0.mlp.down_proj.weight"], weight.t())
    assert torch.equal(model.loaded["model.norm.weight"], torch.ones(K))


def test_stock_configuration_is_untouched(sglang: Any) -> None:
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], hidden_act="silu")
    before = config.to_dict()
    assert sglang.get_config(config).to_dict() == before
    weight = torch.randn(N, K)
    model = sglang.llama.LlamaForCausalLM(config)
    model.load_weights([("model.layers.0.mlp.down_proj.weight", weight)])
    assert model.loaded["model.layers.0.mlp.down_proj.weight"] is weight


def test_registering_twice_is_registering_once(sglang: Any) -> None:
    before = list(sglang.registry.hooks)
    plugin.register()
    assert sglang.registry.hooks == before


def test_off_registers_nothing(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang.registry.hooks.clear()
    plugin.register.cache_clear()
    monkeypatch.setenv("TWELL_SGLANG", "off")
    plugin.register()
    assert not sglang.registry.hooks
