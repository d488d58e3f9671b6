"""A threshold for each neuron: operators and exported layers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell import ops, testing

N = 264


def problem(m: int) -> tuple[testing.FFN, Tensor]:
    p = testing.integer_problem(m, 72, N, density=0.1, biases="gate up down", activation="fatrelu")
    return p, (torch.arange(N) % 5).bfloat16()


def test_operators_take_thresholds_with_any_activation() -> None:
    """Kernels square what is left, so the CPU does."""
    p, level = problem(21)
    both = torch.cat([p.b_gate, level])  # type: ignore[list-item]
    gate = F.linear(p.x.double(), p.w_gate.double(), p.b_gate.double())  # type: ignore[union-attr]
    right = torch.where(gate > level, gate, 0).square() @ p.w_down.double()
    y = ops.ffn(p.x, p.w_gate, None, p.w_down, both, None, None, 8, "union", None, "relu2")
    assert (y.double() - right).norm() <= 1e-2 * right.norm()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("strategy", ["union", "auto", "dense"])
def test_exported_layers(strategy: Any, strict: bool) -> None:
    """With thresholds and counts that the graph has as fake tensors."""
    p, level = problem(32)

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, level: Tensor, counts: Tensor) -> Tensor:
            weights: Any = p.w_up, p.w_down.t()
            how: Any = {"activation": "fatrelu", "threshold": level, "strategy": strategy, "counts": counts}
            return twell.sparse_ffn(x, *weights, **how)

    counts, expected = (torch.zeros(N, dtype=torch.int64) for _ in range(2))
    with torch.no_grad():
        made = torch.export.export(Layer(), (p.x, level, counts.clone()), strict=strict).module()
        for each in (level, level.flip(0)):
            testing.assert_same(made(p.x, each, counts), Layer()(p.x, each, expected))
    assert torch.equal(counts, expected)
