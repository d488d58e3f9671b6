"""accelerate: models spread over devices or offloaded, before and after ``sparsify``, and a step of ``Accelerator``."""

from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate
import torch
from neighbours import after_step, causal_model, logits, same_step, sparse_model, strategies, token_ids

import twell.integrations.transformers as twell_hf

KINDS = pytest.mark.parametrize("kind", ["llama", "opt"])


def spread(model: Any) -> Any:
    """As ``device_map="auto"`` on several GPUs does it: hooks that move tensors, and no weight offloaded."""
    return accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


@KINDS
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_spread_model_runs_sparse(kind: str, before: bool) -> None:
    if before:
        model = twell_hf.sparsify(spread(causal_model(kind)), strategy="union")
    else:
        model = spread(sparse_model(kind))
    torch.testing.assert_close(logits(model), logits(causal_model(kind)))
    assert strategies(model) == {"union"}


@KINDS
def test_offloaded_weights_are_refused(kind: str) -> None:
    model = accelerate.cpu_offload(causal_model(kind), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"hook of accelerate that does more .*offloading.*keep it on a device"):
        twell_hf.sparsify(model)
    torch.testing.assert_close(logits(model), logits(causal_model(kind)))


@KINDS
def test_a_model_may_be_offloaded_afterwards(kind: str) -> None:
    model = accelerate.cpu_offload(sparse_model(kind), torch.device("cpu"))
    torch.testing.assert_close(logits(model), logits(causal_model(kind)))


@KINDS
def test_a_step_of_accelerator_is_the_plain_one(kind: str) -> None:
    expected = after_step(causal_model(kind), 0.1)
    accelerator = accelerate.Accelerator(cpu=True)
    model = sparse_model(kind).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(input_ids=token_ids(), labels=token_ids()).loss)
    optimizer.step()
    same_step(accelerator.unwrap_model(model), expected, causal_model(kind))
    accelerator.free_memory()
