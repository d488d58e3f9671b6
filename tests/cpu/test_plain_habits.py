"""Plain PyTorch code that handles parameters works on twell's layers, in sparsified models too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ffns import BF16, Gated, K, Literal, N
from torch import Tensor, nn

import twell
from twell.nn import SparseGatedMLP, SparseMLP


def sparsified(kind: Callable[[], nn.Module]) -> nn.Module:
    model = nn.Sequential(nn.Linear(K, K), kind())
    names = [("gate_proj", "up_proj", "down_proj"), ("fc1", "fc2")]
    twell.sparsify_(model, strategy="union", names=names)
    return model.to(BF16)


def of_transformers(own: bool) -> nn.Module:
    pytest.importorskip("transformers")
    import transformers

    import twell.integrations.transformers as twell_hf

    sizes: Any = {"vocab_size": 40, "hidden_size": K, "intermediate_size": N, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "relu", "tie_word_embeddings": False}
    if own:
        model = twell_hf.SparseLlamaForCausalLM(twell_hf.SparseLlamaConfig(**sizes, sparsity_strategy="union"))
    else:
        model = twell_hf.sparsify(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), strategy="union")
    return model.to(BF16)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: SparseGatedMLP(K, N, bias=True, dtype=BF16, strategy="union"),
    "plain": lambda: SparseMLP(K, N, dtype=BF16, strategy="row"),
    "from_linear": lambda: SparseMLP.from_linear(
        nn.Linear(K, N, dtype=BF16), nn.Linear(N, K, dtype=BF16), strategy="union"
    ),
    "sparsify_": lambda: sparsified(lambda: Gated(bias=True)),
    "pair": lambda: sparsified(Literal),
    "transformers": lambda: of_transformers(own=False),
    "SparseLlama": lambda: of_transformers(own=True),
}
EACH = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def forward(model: nn.Module, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    if hasattr(model, "config"):
        return model(torch.randint(40, (2, 9)), use_cache=False).logits  # type: ignore[no-any-return]
    return model(torch.randn(2, 9, K).to(BF16))  # type: ignore[no-any-return]


def gradients(model: nn.Module) -> list[Tensor]:
    for p in model.parameters():
        p.grad = None
    forward(model).float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@EACH
def test_parameters_and_gradients_are_contiguous(make: Callable[[], nn.Module]) -> None:
    model = make()
    found = torch.autograd.grad(forward(model).float().square().sum(), list(model.parameters()))
    gradients(model)
    for p, g in zip(model.parameters(), found, strict=True):
        assert p.is_contiguous()
        assert g.is_contiguous()
        assert p.grad is not None
        assert p.grad.is_contiguous()
        assert p.view(-1).data_ptr() == p.data_ptr()


@EACH
def test_safetensors_save_and_load(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = make(), make()
    safetensors.save_file(model.state_dict(), tmp_path / "a.safetensors")
    other.load_state_dict(safetensors.load_file(tmp_path / "a.safetensors"))
    safetensors.save_model(other, str(tmp_path / "b.safetensors"))
    again = make()
    safetensors.load_model(again, str(tmp_path / "b.safetensors"))
    assert torch.equal(forward(again), forward(model))


@EACH
def test_flat_parameters_and_gradients(make: Callable[[], nn.Module]) -> None:
    """As in optimizers with one buffer: the next call sees updates through it."""
    model = make()
    expected = gradients(model)
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    flat, flat_grad, begin = torch.empty(total, dtype=BF16), torch.zeros(total, dtype=BF16), 0
    for p in parameters:
        part = slice(begin, begin + p.numel())
        flat[part] = p.detach().reshape(-1)
        p.data, p.grad = flat[part].view_as(p), flat_grad[part].view_as(p)
        begin += p.numel()
    forward(model).float().square().sum().backward()
    assert all(p.grad is not None and p.grad.untyped_storage().data_ptr() == flat_grad.data_ptr() for p in parameters)
    assert torch.equal(flat_grad, torch.cat([g.reshape(-1) for g in expected]))
    before = forward(model).detach().clone()
    # past autograd and its version counters
    flat.data.sub_(flat_grad, alpha=1e-3)
    changed = forward(model)
    assert not torch.equal(changed, before)
    fresh = make()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(forward(fresh), changed)


@EACH
def test_copies_and_averages(make: Callable[[], nn.Module]) -> None:
    model = make()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.data.mul_(2)
    average.update_parameters(model)
    average.update_parameters(twin)
    with torch.no_grad():
        for p, q in zip(average.module.parameters(), model.parameters(), strict=True):
            assert p.is_contiguous()
            torch.testing.assert_close(p, 1.5 * q, rtol=1e-2, atol=1e-2)
        for p in model.parameters():
            p.zero_()
    assert forward(twin).any()
