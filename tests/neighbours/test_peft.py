"""peft: LoRA around gated layers runs sparse, around a pair it is refused, and merged adapters run sparse."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import peft
import torch
import transformers
from neighbours import assert_near, causal_model, logits, sparse_model, strategies, token_ids
from torch import Tensor

import twell
import twell.integrations.transformers as twell_hf

GATED = ["gate_proj", "up_proj", "down_proj"]


def adapted(model: Any, target: Any, **options: Any) -> Any:
    """``model`` with adapters that change its output; for a target the same."""
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=target, r=4, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).eval()


def modules(model: Any) -> list[str]:
    """The names of a model's modules without the activation, which a layer of twell has in its kernels."""
    return [name for name, _ in model.named_modules() if not name.endswith("act_fn")]


def trained(model: Any) -> dict[str, Any]:
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_trains_as(model: Any, stock: Any) -> None:
    """Sparse, with the logits and gradients of the stock model."""
    assert_near(logits(model), logits(stock))
    assert strategies(model) == {"union"}
    found, expected = trained(model), trained(stock)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # a gate next to 0 may have either sign: dense gradients are off by 6 % of float64's
        assert_near(found[name], gradient, 0.15)


@pytest.mark.parametrize("before", [False, True])
def test_lora_on_gated_layers_runs_sparse_and_trains(before: bool) -> None:
    """Whether the adapters are there before ``sparsify`` or come after it."""
    stock = adapted(causal_model("llama"), GATED)
    names = modules(stock)
    if before:
        model = adapted(causal_model("llama"), GATED)
        assert twell_hf.sparsify(model, strategy="union") is model
    else:
        model = adapted(sparse_model("llama"), GATED)
    assert modules(model) == names
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert_trains_as(model, stock)


def test_modules_to_save() -> None:
    stock, model = (adapted(causal_model("llama"), ["q_proj"], modules_to_save=["mlp"]) for _ in range(2))
    twell_hf.sparsify(model, strategy="union")
    assert_trains_as(model, stock)
    assert any("mlp" in name for name, p in model.named_parameters() if p.requires_grad)


def test_what_peft_does_to_its_adapters_is_seen(tmp_path: Path) -> None:
    """Disabling, merging, switching, saving and loading; each in a model that stays sparse."""
    stock, model = (adapted(causal_model("llama"), GATED) for _ in range(2))
    twell_hf.sparsify(model, strategy="union")

    def same() -> Tensor:
        found = logits(model)
        assert_near(found, logits(stock))
        assert strategies(model) == {"union"}
        return found

    with_adapter = same()
    with model.disable_adapter(), stock.disable_adapter():
        assert (same() - with_adapter).norm() > 0.1 * with_adapter.norm()
    for each in (model, stock):
        each.merge_adapter()
    same()
    for each in (model, stock):
        each.unmerge_adapter()
    for each in (model, stock):
        torch.manual_seed(2)
        each.add_adapter("second", peft.LoraConfig(target_modules=["up_proj"], r=3, init_lora_weights=False))
        each.set_adapter("second")
    assert (same() - with_adapter).norm() > 0.1 * with_adapter.norm()
    for each in (model, stock):
        each.base_model.set_adapter(["default", "second"])
    same()
    model.save_pretrained(tmp_path)
    read = peft.PeftModel.from_pretrained(sparse_model("llama"), tmp_path)
    assert_near(logits(read), with_adapter)
    assert strategies(read) == {"union"}
    read.load_adapter(tmp_path / "second", "second")
    read.set_adapter("second")
    for each in (model, stock):
        each.set_adapter("second")
    assert_near(logits(read), same())
    for each in (model, stock):
        each.base_model.set_adapter(["default", "second"])
    model, stock = model.merge_and_unload(), stock.merge_and_unload()
    same()
    assert modules(model) == modules(stock)


def test_adapters_of_transformers() -> None:
    stock, model = causal_model("llama"), causal_model("llama")
    for each in (stock, model):
        torch.manual_seed(1)
        each.add_adapter(peft.LoraConfig(target_modules=GATED, r=4, init_lora_weights=False))
    twell_hf.sparsify(model, strategy="union")
    assert_near(logits(model), logits(stock))
    assert strategies(model) == {"union"}
    model.disable_adapters()
    assert_near(logits(model), logits(causal_model("llama")))


def test_an_activation_that_is_changed_beside_adapters_is_in_the_configuration() -> None:
    base = causal_model("llama")
    base.config.hidden_act = "silu"
    silu = transformers.LlamaForCausalLM(base.config).bfloat16().eval()
    model = twell_hf.sparsify(adapted(silu, GATED), activation="relu", strategy="union")
    assert model.get_base_model().config.hidden_act == "relu"
    assert strategies(model) == {"union"}


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("how", ["merged", "disabled", "active"])
def test_what_a_layer_with_adapters_returns_may_change_in_place(how: str, tokens: int) -> None:
    layer = twell.nn.SparseGatedMLP(64, 128, strategy="row", dtype=torch.bfloat16)
    model = adapted(torch.nn.Sequential(layer), GATED).bfloat16().requires_grad_()
    if how == "merged":
        model.merge_adapter()
    elif how == "disabled":
        model.disable_adapter_layers()
    y = model(torch.randn(tokens, 64).bfloat16().requires_grad_())
    y.relu_()
    y.sum().backward()
    assert layer.down_proj.weight.grad is not None
