"""Controllers of sparsity on a GPU: states that come from files go on bit for bit, moving thresholds are rounded."""

import io
from typing import Any

import pytest
import torch

from twell import recipe
from twell.nn.layers import SparseGatedMLP

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_layers_round_a_threshold_that_moves(dtype: torch.dtype) -> None:
    """The same neurons fire as eagerly, and as by the number: fp32 inside a fused kernel would keep it unrounded."""
    torch.manual_seed(0)
    mlp = SparseGatedMLP(64, 256, dtype=dtype, device=CUDA, activation="fatrelu", strategy="dense")
    with torch.no_grad():
        mlp.gate_proj.weight.normal_(std=64**-0.5)
    x, level = torch.randn(4096, 64, dtype=dtype, device=CUDA), torch.zeros((), device=CUDA)
    compiled = torch.compile(mlp)
    for value in (1.31, 1.028, 2.306, 0.7001):
        found = []
        for threshold, call in ((level.fill_(value), compiled), (level, mlp), (value, mlp)):
            mlp.threshold = threshold
            y, aux = call(x, return_aux=True)
            y.sum().backward()
            found.append(float(aux.l0))
        assert found[0] == found[1] == found[2]
