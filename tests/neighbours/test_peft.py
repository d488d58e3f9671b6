"""peft: LoRA around a pair is refused, around gated layers it runs dense, and merged adapters run sparse."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("peft")

import peft
import torch
from neighbours import causal_model, logits, sparse_model, strategies, token_ids

import twell.integrations.transformers as twell_hf

TARGETS = pytest.mark.parametrize("target", [["fc1"], ["fc2"], ["fc1", "fc2"], "all-linear"], ids=str)
GATED = ["gate_proj", "up_proj", "down_proj"]


def adapted(model: Any, target: Any) -> Any:
    """``model`` with adapters that change its output; for a target the same."""
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=target, r=4, init_lora_weights=False)).eval()


@TARGETS
def test_lora_on_a_pair_has_the_sentence_of_pairs(target: Any) -> None:
    model = adapted(sparse_model("opt"), target)
    with pytest.raises(NotImplementedError, match=r"fc[12] of a twell pair must .*merge an adapter"):
        logits(model)


@TARGETS
def test_lora_on_a_pair_merged_before_sparsify_runs_sparse(target: Any) -> None:
    expected = logits(adapted(causal_model("opt"), target))
    assert (expected - logits(causal_model("opt"))).norm() > 0.1 * expected.norm()
    with pytest.raises((TypeError, ValueError), match="merge"):
        twell_hf.sparsify(adapted(causal_model("opt"), target))
    model = twell_hf.sparsify(adapted(causal_model("opt"), target).merge_and_unload(), strategy="union")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    assert strategies(model) == {"union"}


def test_lora_on_gated_layers_runs_dense_and_trains() -> None:
    stock, model = (adapted(make("llama"), GATED) for make in (causal_model, sparse_model))
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-5)
    assert strategies(model) == {"dense"}
    gradients = []
    for each in (stock, model):
        each(input_ids=token_ids(), labels=token_ids()).loss.backward()
        gradients.append({name: p.grad for name, p in each.named_parameters() if p.requires_grad})
    expected, found = gradients
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_lora_on_gated_layers_merged_afterwards_runs_sparse() -> None:
    model = adapted(sparse_model("llama"), GATED)
    logits(model)
    model = model.merge_and_unload()
    expected = logits(adapted(causal_model("llama"), GATED))
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    assert strategies(model) == {"union"}
