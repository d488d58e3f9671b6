"""The vLLM plug-in without vLLM: its registry is a stand-in with the methods that the plug-in calls.

tests/serving has the tests with the engine.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cpu import fake_gpu
from twell.base.activation import Activation
from twell.choose import cards
from twell.choose import site as sites
from twell.choose.plan import Facts, routed
from twell.choose.rates import Figures, Problem
from twell.integrations import _vllm_kernels, layouts
from twell.integrations import vllm as plugin
from twell.integrations._vllm_auto import ServedStrategy, watch
from twell.nn import configuration
from twell.ops.float8 import E4M3
from twell.ops.library import check_layer
from twell.ops.operands import Layer
from twell.runtime import device, host

transformers = pytest.importorskip("transformers")
CONFIG_MAPPING = transformers.models.auto.configuration_auto.CONFIG_MAPPING


class Registry:
    """vLLM's registry, as far as the plug-in uses it; its methods return what they are asked for."""

    def __init__(self) -> None:
        self.models: dict[str, str] = {}

    def register_model(self, model_arch: str, model_cls: str) -> None:
        self.models[model_arch] = model_cls

    def inspect_model_cls(self, architectures: Any, model_config: Any) -> Any:
        return "inspected", architectures

    def resolve_model_cls(self, architectures: Any, model_config: Any) -> Any:
        return "resolved", architectures


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    stand_in = ModuleType("vllm")
    stand_in.ModelRegistry = Registry()  # type: ignore[attr-defined]
    stand_in.__version__ = "0.32.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    # transformers would keep what is registered
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    monkeypatch.delenv("TWELL_VLLM", raising=False)
    return stand_in.ModelRegistry


def asked(registry: Registry, config: Any, architectures: Any, model_impl: str = "auto") -> list[str]:
    model = SimpleNamespace(model_impl=model_impl, hf_config=config)
    inspected = registry.inspect_model_cls(architectures, model)[1]
    assert registry.resolve_model_cls(architectures, model_config=model) == ("resolved", inspected)
    return inspected


def test_registers_names_alone_and_once(registry: Registry) -> None:
    plugin.register()
    before = dict(vars(registry))
    plugin.register()
    assert vars(registry) == before
    assert set(registry.models) == {*plugin.SPARSE, "TwellForCausalLM"}
    assert not set(registry.models) & set(plugin.LLAMA_LIKE)


def test_off_registers_nothing(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWELL_VLLM", "off")
    plugin.register()
    assert vars(registry) == {"models": {}}


def test_another_value_is_refused(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWELL_VLLM", "of")
    with pytest.raises(ValueError, match="TWELL_VLLM must be one of auto, off, got 'of'"):
        plugin.register()


@pytest.mark.parametrize("version", ["0.31.1", "0.9.2", "0.31.1rc2.dev3+g1234567"])
def test_an_older_vllm_is_left_as_it_is(
    version: str, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    plugin.register()
    assert vars(registry) == {"models": {}}
    line = f"twell: models run as without twell: vLLM must be 0.32 or newer, got {version}"
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("vllm.twell", line)]


def test_versions_of_checkouts_are_not_too_old() -> None:
    newer = ["0.32.0", "0.32.0rc1", "0.33.0", "1.0.0", "0.1.dev5+g1234567", "dev"]
    assert [version for version in newer if plugin.is_too_old(version)] == []


@pytest.mark.parametrize("architecture", plugin.LLAMA_LIKE)
def test_llama_like_model_is_twells_where_it_has_relu(architecture: str, registry: Registry) -> None:
    plugin.register()
    relu, square, own, silu = (transformers.LlamaConfig(hidden_act=act) for act in ("relu", "relu2", "fatrelu", "silu"))
    assert asked(registry, relu, [architecture]) == asked(registry, relu, architecture) == ["TwellForCausalLM"]
    assert asked(registry, square, [architecture]) == asked(registry, own, [architecture]) == ["TwellForCausalLM"]
    assert asked(registry, silu, [architecture]) == [architecture]
    assert asked(registry, relu, [architecture], "transformers") == asked(registry, relu, [architecture], "vllm")
    assert asked(registry, relu, [architecture], "vllm") == [architecture]


def test_keys_of_the_paper_do_not_make_a_stock_architecture_sparse(registry: Registry) -> None:
    plugin.register()
    config = transformers.LlamaConfig(hidden_act="silu", sparsity_gated_mlp=True)
    assert asked(registry, config, ["LlamaForCausalLM"]) == ["LlamaForCausalLM"]
    assert asked(registry, config, ["SparseLlamaForCausalLM"]) == ["SparseLlamaForCausalLM"]


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activation_of_a_sparse_architecture_alone_is_corrected(activation: str) -> None:
    llama = transformers.LlamaConfig(hidden_act=activation, architectures=["LlamaForCausalLM"])
    assert (plugin.correct(llama), llama.hidden_act) == ("", activation)
    sparse = transformers.LlamaConfig(hidden_act=activation, architectures=["SparseLlamaForCausalLM"])
    wrong = plugin.correct(sparse)
    assert sparse.hidden_act == "relu"
    assert (f"the configuration says {activation!r}" in wrong) == (activation != "relu")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "SparseLlamaForCausalLM"])
def test_activations_that_no_stock_class_has_stay(architecture: str) -> None:
    config = transformers.LlamaConfig(hidden_act="relu2", architectures=[architecture])
    assert plugin.correct(config) == ""
    # it has this one
    assert not configuration.as_stock(config)
    config = transformers.LlamaConfig(hidden_act="fatrelu", hidden_act_param=0.5, architectures=[architecture])
    assert plugin.correct(config) == ""
    found = configuration.as_stock(config)
    assert (list(found.values()), config.hidden_act) == ([Activation("fatrelu", 0.5)], "relu")
    for key, activation in found.items():
        key.write(config, activation)
    assert (config.hidden_act, config.hidden_act_param) == ("fatrelu", 0.5)


def test_other_models_are_left_alone(registry: Registry) -> None:
    plugin.register()
    entry = {"class": "SparseGatedMLP", "modules": ["model.layers.0.mlp"], "activation": "relu"}
    with pytest.raises(ValueError, match=r"the activation of all layers, got model\.layers\.0\.mlp with relu"):
        asked(registry, transformers.LlamaConfig(hidden_act="silu", twell=[entry]), ["LlamaForCausalLM"])
    opt = transformers.OPTConfig(activation_function="relu")
    assert asked(registry, opt, ["OPTForCausalLM"]) == ["OPTForCausalLM"]


def test_classes_that_vllm_serves_are_asked_for_by_its_own_names(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OPTForCausalLM:
        pass

    class Ours:
        @staticmethod
        def served(stock: Any) -> Any:
            return "twell's", stock

    def resolve_model_cls(names: list[str], model_config: Any) -> Any:
        return (Ours if names == ["TwellForCausalLM"] else OPTForCausalLM), names[0]

    monkeypatch.setattr(registry, "resolve_model_cls", resolve_model_cls)
    plugin.register()

    def resolved(model_impl: str = "auto", **config: Any) -> Any:
        model = SimpleNamespace(model_impl=model_impl, hf_config=transformers.OPTConfig(**config))
        return registry.resolve_model_cls(["OPTForCausalLM"], model)

    assert resolved(activation_function="relu") == (("twell's", OPTForCausalLM), "OPTForCausalLM")
    assert resolved(activation_function="gelu") == (OPTForCausalLM, "OPTForCausalLM")
    assert resolved("vllm", activation_function="relu") == (OPTForCausalLM, "OPTForCausalLM")


class Wrapper:
    """vLLM's wrapper of a worker, as far as steps go: ``calls`` are those of a layer in each."""

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def execute_model(self, planned: Any) -> None:
        self.calls.append(ServedStrategy(None).heeds(torch.empty(1, 8)))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """A class of wrappers such as Ray's, which vLLM up to 0.32 calls by another name."""

    class WorkerWrapperBase(Wrapper):
        execute_model = Wrapper.execute_model

    class RayWorkerWrapper(WorkerWrapperBase):
        def execute_model_ray(self, planned: Any) -> None:
            Wrapper.execute_model(self, planned)

    module = ModuleType("vllm.v1.worker.worker_base")
    module.WorkerWrapperBase = WorkerWrapperBase  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    watch.cache_clear()
    watch()
    watch()
    watch.cache_clear()
    return RayWorkerWrapper


def test_calls_within_a_step_of_the_scheduler_are_of_requests(steps: type[Any]) -> None:
    wrapper, plan, empty = steps(), *(SimpleNamespace(total_num_scheduled_tokens=n) for n in (3, 0))
    Wrapper.execute_model(wrapper, plan)
    wrapper.execute_model(plan)
    wrapper.execute_model(empty)
    wrapper.execute_model_ray((plan, None))
    wrapper.execute_model_ray((empty, None, None))
    Wrapper.execute_model(wrapper, plan)
    assert wrapper.calls == [False, True, False, True, False, False]
    # a step that fails ends
    wrapper.calls = None
    with pytest.raises(AttributeError):
        wrapper.execute_model(plan)
    assert not ServedStrategy(None).heeds(torch.empty(1, 8))


def test_weights_that_are_loaded_again_keep_what_was_measured() -> None:
    site, call = ServedStrategy(layouts.LayerFigures(30.0, 0.1, 0.4)), Problem(256, 64, 96, True, False)
    figures = []
    for _ in range(2):
        site.learn(torch.zeros(2 * 96, 64), 64, 96, True, 1)
        figures.append(site.choose(call) and site.explain()[0].figures)
        site.observe(call, Figures(5.0, 0.2))
    assert figures == [Figures(30.0, 0.4), Figures(5.0, 0.2)]


@pytest.mark.parametrize("gated", [True, False])
def test_a_rank_has_its_share_of_the_figures(gated: bool) -> None:
    site, weight = ServedStrategy(layouts.LayerFigures(30.0, 0.1, 0.4)), torch.zeros(96, 64)
    site.learn(weight, 64, 96, gated, 2)
    assert sites.site_of(weight, True) is site
    found = {bucket.problem[:4]: bucket.figures for bucket in site._buckets.values()}
    assert found == {(256, 64, 96, gated): Figures(15.0, 0.4), (8192, 64, 96, gated): Figures(15.0, 0.1)}


GPU = torch.device("cuda", 0)


def tried(
    strategy: str, on: torch.device = GPU, gated: bool = True, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> str:
    route = layouts.route_of({"sparsity_strategy": strategy} | more)
    return _vllm_kernels.trouble(route, 8, on, Activation("relu2"), gated, 128, dtype)


@pytest.mark.parametrize("gated", [True, False])
def test_kernels_are_tried_where_they_will_run(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, zeros = fake_gpu.install(monkeypatch), torch.zeros
    schema = torch.ops.twell.ffn.default._schema

    def ffn(*call: Any) -> Any:
        """As the dispatcher has it, which takes these for a CPU's tensors."""
        layer = Layer(*call[:7])
        check_layer(layer)
        given = dict(zip((argument.name for argument in schema.arguments), call))
        route = routed(Facts(**{name: given[name] for name in ("strategy", "screen", "invariant")}))
        layer = layer._replace(w_down=layer.w_down.t())
        return sys.modules["twell.ops.ffn"].on_cuda(layer, call[7], Activation(*call[10:12]), route, False)

    monkeypatch.setattr(cards, "imposed", lambda *_: "")
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.ops.twell, "ffn", ffn)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda on: None)
    launched = {}
    for strategy in ("auto", "row", "union", "dense"):
        gpu.clear()
        assert tried(strategy, gated=gated) == ""
        launched[strategy] = gpu.names()
    assert launched["row"][-1] == "up_down_token"
    # each size is tried by "row", and by "union" with what screens
    assert set(launched["row"]) | set(launched["union"]) < set(launched["auto"])
    assert any("screen" in kernel for kernel in launched["auto"])
    assert launched["union"]
    assert launched["dense"] == []

    def missing(*arguments: Any) -> Any:
        raise RuntimeError("kernel gate_pack_bf16 cannot be compiled\nbecause of more")

    monkeypatch.setattr(torch.ops.twell, "ffn", missing)
    said = tried("auto")
    assert said.startswith(
        "its kernels cannot be loaded (RuntimeError: kernel gate_pack_bf16 cannot be compiled); `twell"
    )
    assert "extra jit" in said
    assert "TWELL_VLLM=off" in said
    assert tried("dense") == tried("auto", torch.device("cpu")) == ""
    # where "auto" is dense no kernel runs
    monkeypatch.setattr(cards, "imposed", lambda *_: "costs are not known")
    assert tried("auto") == ""


@pytest.mark.parametrize("gated", [True, False])
def test_kernels_of_e4m3_weights_are_tried(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, calls = torch.zeros, []
    monkeypatch.setattr(cards, "imposed", lambda *_: "")
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda on: None)
    real = torch.ops.twell.ffn
    monkeypatch.setattr(torch.ops.twell, "ffn", lambda *call: calls.append(call) or real(*call))
    assert (
        tried("auto", gated=gated, dtype=E4M3) == tried("row", gated=gated, dtype=E4M3, sparsity_invariant=True) == ""
    )
    assert [(call[2] is not None, call[8], call[13]) for call in calls] == [
        (gated, "row", invariant) for invariant in (False, True) for _ in ("one token", "more than one pass takes")
    ]


def test_the_log_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(strategy: str) -> str:
        return _vllm_kernels.described(layouts.route_of({"sparsity_strategy": strategy}), GPU, False)

    monkeypatch.setattr(device, "name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(host, "runner", lambda: "C (libtwell_host.so)")
    monkeypatch.setattr(cards, "imposed", lambda *_: "")
    monkeypatch.setattr(cards, "in_use", lambda on: cards.SHIPPED)
    launches = "launches by C (libtwell_host.so)"
    assert said("auto") == f'strategy "auto", {launches}, rates of NVIDIA H200 (shipped) on NVIDIA H100'
    assert said("row") == f'strategy "row", {launches}'
    monkeypatch.setattr(cards, "imposed", lambda *_: "costs are not known")
    assert said("auto") == 'strategy "auto", which is "dense": costs are not known'


def test_sparse_model_types_are_read_as_stock_configurations(registry: Registry, tmp_path: Path) -> None:
    expected = {}
    for architecture, (stock, model_types) in plugin.SPARSE.items():
        for model_type in model_types:
            content = {"architectures": [architecture], "model_type": model_type, "sparsity_gated_mlp": True}
            (tmp_path / model_type).mkdir()
            (tmp_path / model_type / "config.json").write_text(json.dumps(content | {"hidden_size": 64}))
            expected[model_type] = [stock, architecture, True, 64]
    plugin.register()
    for name, right in expected.items():
        config = transformers.AutoConfig.from_pretrained(tmp_path / name)
        assert [type(config).__name__, *config.architectures, config.sparsity_gated_mlp, config.hidden_size] == right


def test_figures_of_a_configuration_are_read() -> None:
    assert layouts.measured({}, 2) is None
    for more in ({}, {"intermediate_size": 1}, {"sparsity_new_intermediate_size": 1}):
        assert layouts.measured({"sparsity_figures": [[1, 0.5, 0.75]]} | more, 1) == [(1, 0.5, 0.75)]
