"""Thresholds that move, in compiled layers on a GPU."""

import pytest
import torch

from twell.nn.layers import SparseGatedMLP

CUDA = torch.device("cuda")


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
