"""peft: LoRA around gated layers runs sparse, around a pair it is refused, and merged adapters run sparse."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import peft
import torch
import transformers
from neighbours import causal_model, logits, sparse_model, strategies, token_ids
from torch import Tensor

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
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-5)
    assert strategies(model) == {"union"}
    torch.testing.assert_close(trained(model), trained(stock), rtol=1e-4, atol=1e-6)


def test_what_peft_does_to_its_adapters_is_seen(tmp_path: Path) -> None:
    """Disabling, merging, switching, saving and loading; each in a model that stays sparse."""
    stock, model = (adapted(causal_model("llama"), GATED) for _ in range(2))
    twell_hf.sparsify(model, strategy="union")

    def same() -> Tensor:
        found = logits(model)
        torch.testing.assert_close(found, logits(stock), rtol=1e-4, atol=1e-5)
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
    torch.testing.assert_close(logits(read), with_adapter, rtol=1e-4, atol=1e-5)
    assert strategies(read) == {"union"}
    read.load_adapter(tmp_path / "second", "second")
    read.set_adapter("second")
    for each in (model, stock):
        each.set_adapter("second")
    torch.testing.assert_close(logits(read), same(), rtol=1e-4, atol=1e-5)
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
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-5)
    assert strategies(model) == {"union"}
    model.disable_adapters()
    torch.testing.assert_close(logits(model), logits(causal_model("llama")), rtol=1e-4, atol=1e-5)


def test_an_activation_that_is_changed_beside_adapters_is_in_the_configuration() -> None:
    base = causal_model("llama")
    base.config.hidden_act = "silu"
    silu = transformers.LlamaForCausalLM(base.config).eval()
    model = twell_hf.sparsify(adapted(silu, GATED), activation="relu", strategy="union")
    assert model.get_base_model().config.hidden_act == "relu"
    assert strategies(model) == {"union"}
