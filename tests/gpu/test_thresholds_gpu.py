"""A threshold for each neuron on the GPU: every strategy and gradients, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activations import DTYPES
from jumps import layer, named, plain, problem, thresholds
from torch import Tensor

from tests import programs
from twell import ops, testing

CUDA = torch.device("cuda")
N = 776
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own products with sums in fp32."""
    for dtype in ("bf16", "fp16"):
        monkeypatch.setattr(torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction", False)


@GATED
@DTYPES
@pytest.mark.parametrize("density", [0.05, 0.6])
@pytest.mark.parametrize("m", [1, 9, 60, 300, 2100])
def test_every_strategy(gated: bool, dtype: torch.dtype, m: int, density: float, request: Any) -> None:
    p, level = problem(m, dtype, density, CUDA, N), thresholds(dtype, CUDA, N)
    wide = p.map(Tensor.double)
    right = {rounded: plain(wide, level.double(), gated, rounded).to(dtype) for rounded in (None, dtype)}
    strategies = ["row", "union", "dense", "row+invariant"]
    if not request.config.getoption("--portable"):
        strategies.append("union+screen")
    for strategy in strategies:
        with torch.no_grad():
            (y,) = testing.poisoned(lambda s=strategy: (layer(p, level, gated, **named(s)),))
        # all but "row" round the hidden state
        testing.assert_same(y, right[None if "row" in strategy else dtype], strategy)


@GATED
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_gradients_have_the_bits_of_the_cpu(gated: bool, density: float) -> None:
    """With a density of 1 the non-zeros exceed the hybrid format, and its kernels read the thresholds again."""
    p, found = problem(130, density=density, n=N), []
    dy = testing.integer_upstream(p)
    for device in ("cpu", "cuda"):
        leaves = p.map(lambda t, device=device: t.to(device).requires_grad_())
        present = [t for name, t in leaves._asdict().items() if gated or name not in ("w_up", "b_up")]
        y = layer(leaves, thresholds(device=device, n=N), gated, strategy="union")
        found.append([y, *torch.autograd.grad(y, present, dy.to(device))])
    for right, ours in zip(*found, strict=True):
        testing.assert_same(ours.cpu(), right)


@DTYPES
def test_the_gate_packed(dtype: torch.dtype) -> None:
    for m in (1, 40, 200, 1500):
        p, level = problem(m, dtype, 0.3, CUDA, N), thresholds(dtype, CUDA, N)
        both = torch.cat([p.b_gate, level])  # type: ignore[list-item]
        gate = torch.addmm(p.b_gate.double(), p.x.double(), p.w_gate.double().t()).to(dtype)  # type: ignore[union-attr]
        right = torch.where(gate > level, gate, 0)
        for packed in (ops.gate_pack(p.x, p.w_gate, both, 8), programs.packed(gate, bias=both)):
            testing.assert_same(ops.unpack(*packed[:2], N, 8), right)
