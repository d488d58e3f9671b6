"""accelerate: models spread over devices or offloaded, before and after ``sparsify``, and a step of ``Accelerator``."""

import pytest

pytest.importorskip("accelerate")

import accelerate
import torch
from neighbours import after_step, causal_model, same_step, sparse_model, token_ids

KINDS = pytest.mark.parametrize("kind", ["llama", "opt"])


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
