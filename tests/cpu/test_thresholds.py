"""A threshold for each neuron: every strategy, gradients, operators, graphs and errors, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jumps import N, problem, thresholds
from torch import Tensor

import twell
from twell import ops, testing

BF16 = torch.bfloat16
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


def test_packed_operators() -> None:
    p, level = problem(21), thresholds()
    gate = F.linear(p.x.float(), p.w_gate.float(), p.b_gate.float()).to(BF16)  # type: ignore[union-attr]
    both = torch.cat([p.b_gate, level])  # type: ignore[list-item]
    dense = torch.where(gate > level, gate, 0)
    words, spill, _ = ops.gate_pack(p.x, p.w_gate, both, 8)
    assert torch.equal(ops.unpack(words, spill, N, 8), dense)


def test_operators_take_thresholds_with_any_activation() -> None:
    """Kernels square what is left, so the CPU does."""
    p, level = problem(21), thresholds()
    both = torch.cat([p.b_gate, level])  # type: ignore[list-item]
    gate = F.linear(p.x.double(), p.w_gate.double(), p.b_gate.double())  # type: ignore[union-attr]
    right = torch.where(gate > level, gate, 0).square() @ p.w_down.double()
    y = ops.ffn(p.x, p.w_gate, None, p.w_down, both, None, None, 8, "union", None, "relu2")
    assert (y.double() - right).norm() <= 1e-2 * right.norm()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("strategy", ["union", "auto", "dense"])
def test_exported_layers(strategy: Any, strict: bool) -> None:
    """With thresholds and counts that the graph has as fake tensors."""
    p, level = problem(32), thresholds()

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
