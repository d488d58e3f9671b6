"""Experts of transformers through ``sparse_experts``: tiny models of random weights."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import twell
from twell.integrations import experts as stacked
from twell.integrations import transformers as twell_hf

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
NEMOTRON = {
    **SIZES,
    "head_dim": 8,
    "intermediate_size": 64,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "layers_block_type": ["moe", "attention"],
}
MIXTRAL = {**SIZES, "num_hidden_layers": 2, "intermediate_size": 48, "num_local_experts": 5, "num_experts_per_tok": 2}


def model(kind: str = "NemotronH", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(NEMOTRON if kind == "NemotronH" else MIXTRAL) | changes)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager").eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def ids() -> torch.Tensor:
    return torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("latent", [None, 16])
def test_nemotron(latent: int | None) -> None:
    stock = model(moe_latent_size=latent)
    expected = stock(ids()).logits
    sparse = twell_hf.sparsify(copy.deepcopy(stock))
    (experts,) = [each for _, each in stacked.found(sparse)]
    assert experts.down_proj.stride(1) == 1
    torch.testing.assert_close(sparse(ids()).logits, expected, rtol=1e-4, atol=1e-4)
    # with gradients
    sparse(ids()).logits.sum().backward()
    stock(ids()).logits.sum().backward()
    right = dict(stock.named_parameters())
    for name, parameter in sparse.named_parameters():
        if "experts" in name and parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, right[name].grad, rtol=1e-3, atol=1e-3)
            assert parameter.grad.any()


def test_experts_alone_with_a_gate(tmp_path: Path) -> None:
    stock = model("Mixtral", hidden_act="relu")
    expected = stock(ids()).logits
    sparse = twell_hf.sparsify(copy.deepcopy(stock))
    torch.testing.assert_close(sparse(ids()).logits, expected, rtol=1e-4, atol=1e-4)
    # files are those of the stock class
    sparse.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    torch.testing.assert_close(again(ids()).logits, expected, rtol=1e-4, atol=1e-4)
    named = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="twell")
    torch.testing.assert_close(named(ids()).logits, expected, rtol=1e-4, atol=1e-4)


def test_other_experts_are_left_alone_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    stock = model("Mixtral", hidden_act="silu")
    expected = stock(ids()).logits
    with pytest.raises(ValueError, match=r"experts whose weights are stacked.* be of the ReLU family, got SiLU"):
        twell_hf.sparsify(copy.deepcopy(stock))
    stock.set_experts_implementation("twell")
    with caplog.at_level(logging.WARNING, "twell"):
        found = stock(ids()).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert "activation must be of the ReLU family, got SiLU" in caplog.text


def test_an_activation_that_changes_is_seen() -> None:
    sparse = twell_hf.sparsify(model("Mixtral", hidden_act="relu"))
    (experts, _) = [each for _, each in stacked.found(sparse)]
    assert stacked.why_not(experts) == ""
    experts.act_fn = torch.nn.SiLU()
    assert "got SiLU" in stacked.why_not(experts)
    hidden, routes, weights = torch.randn(5, 32), torch.tensor([[0, 4]] * 5), torch.ones(5, 2)
    for act in (transformers.activations.ACT2FN["relu2"], torch.nn.Threshold(0.3, 0)):
        experts.act_fn = act
        assert stacked.why_not(experts) == ""
        right = stacked.moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden, routes, weights)
        torch.testing.assert_close(stacked.forward(experts, hidden, routes, weights), right, rtol=1e-4, atol=1e-4)
    # ids behind the own experts are of other ranks
    experts._is_expert_parallel, elsewhere = True, torch.tensor([[0, 5]] * 5)
    alone = stacked.forward(experts, hidden, elsewhere, weights)
    torch.testing.assert_close(alone, stacked.forward(experts, hidden, routes[:, :1], weights[:, :1]))


def test_a_filter_leaves_experts_out() -> None:
    sparse = twell_hf.sparsify(model(), filter_fn=lambda module, name: "shared" in name)
    assert all(each.config._experts_implementation == "eager" for _, each in stacked.found(sparse))


def test_experts_by_rows_and_then_the_rest() -> None:
    """As docs/experts.md has it."""
    how: Any = {"strategy": "row", "compression": 2}
    sparse = twell_hf.sparsify(model(), filter_fn=lambda _, name: name.endswith(".experts"), **how)
    (experts,) = [each for _, each in stacked.found(sparse)]
    twell_hf.sparsify(sparse, filter_fn=lambda _, name: not name.endswith(".experts"))
    assert experts.__dict__["_twell"][2:] == ("row", 2)
    assert experts.config._experts_implementation == "twell"
    assert len(twell.nn.explain(sparse).rows) == 1


def test_experts_of_odd_sizes_are_left() -> None:
    odd = model("Mixtral", hidden_act="relu", intermediate_size=44)
    with pytest.raises(ValueError, match=r"their sizes: N must be a positive multiple of 8 .*, got 44"):
        twell_hf.sparsify(odd)
