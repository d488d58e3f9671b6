"""Controllers of sparsity on a GPU: a state that comes from a file on the CPU goes on there, bit for bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from twell import recipe
from twell.nn import SparseGatedMLP

CUDA = torch.device("cuda")


@pytest.mark.parametrize("moving", [False, True])
def test_a_state_that_was_saved_goes_on(moving: bool) -> None:
    def train(steps: int, state: bytes = b"", first: int = 0) -> tuple[list[float], bytes]:
        torch.manual_seed(0)
        model = SparseGatedMLP(64, 256, dtype=torch.bfloat16, device=CUDA)
        recipe.record_aux(model, inputs=moving)
        target: Any = recipe.TargetThreshold(model, 8, 20) if moving else recipe.TargetSparsity(8, 20)
        if state:
            target.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
        found = []
        for step in range(first, steps):
            generator = torch.Generator(CUDA).manual_seed(step)
            x = torch.randn(256, 64, dtype=torch.bfloat16, device=CUDA, generator=generator)
            (model(x).square().mean() + target.term(model)).backward()
            target.update()
            found += target.read().values()
        file = io.BytesIO()
        torch.save(target.state_dict(), file)
        return found, file.getvalue()

    whole, _ = train(8)
    begun, state = train(4)
    rest, _ = train(8, state, 4)
    assert begun + rest == whole
