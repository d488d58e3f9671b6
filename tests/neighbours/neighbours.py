"""Tiny models for the tests with other packages, and what a training step makes of them."""

from typing import Any

import torch
from torch import Tensor

import twell

VOCABULARY, LAYERS = 64, 2


def causal_model(kind: str) -> Any:
    """A ReLU "llama", gated, or an "opt", a pair; of random weights, for a kind the same.

    In 16 bits: others run dense on a CPU.
    """
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=64, hidden_act="relu", initializer_range=0.1)
        return transformers.LlamaForCausalLM(config).bfloat16().eval()
    # without padding, whose row of the embedding ZeRO-3 would have partitioned
    config = transformers.OPTConfig(
        **sizes, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, init_std=0.1, pad_token_id=None
    )
    return transformers.OPTForCausalLM(config).bfloat16().eval()


def sparse_model(kind: str) -> Any:
    """The same through twell, by a strategy that runs sparse on a CPU, too."""
    import twell.integrations.transformers as twell_hf

    return twell_hf.sparsify(causal_model(kind), strategy="union")


def token_ids() -> Tensor:
    return torch.arange(18).view(2, 9) * 5 % VOCABULARY


def logits(model: Any) -> Tensor:
    """The logits of ``token_ids``."""
    found: Tensor = model(input_ids=token_ids()).logits
    return found.detach()


def assert_near(found: Tensor, expected: Tensor, share: float = 0.02) -> None:
    """The difference is at most this share of what is expected, in norm: roundings to 16 bits take as much."""
    difference, size = (found.float() - expected.float()).norm(), expected.float().norm()
    assert difference <= share * size, f"off by {float(difference):.2g}, of {float(size):.2g}"


def strategies(model: Any) -> set[str]:
    return {row.strategy for row in twell.explain(model) if row.kind in ("training", "any")}


def after_step(model: Any, rate: float) -> dict[str, Tensor]:
    """The parameters after one step of plain SGD on ``token_ids``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model.train()(input_ids=token_ids(), labels=token_ids()).loss.backward()
    optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same_step(model: Any, expected: dict[str, Tensor], start: Any) -> None:
    """The parameters of ``model`` are the ``expected`` ones, and no longer those of ``start``."""
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    before = {name: parameter.detach() for name, parameter in start.named_parameters()}
    for name, parameter in found.items():
        # small changes of the parameters are a few steps of 16 bits
        assert_near(parameter.detach() - before[name], expected[name] - before[name], 0.25)
    assert any((expected[name] - before[name]).norm() > 1e-3 for name in expected if "fc1" in name or "up_proj" in name)
