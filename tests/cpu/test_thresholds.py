"""A threshold for each neuron: every strategy, gradients, operators, graphs and errors, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activations import DTYPES
from jumps import STRATEGIES, N, layer, named, plain, problem, thresholds
from torch import Tensor

import twell
from twell import ops, testing

BF16 = torch.bfloat16
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


@GATED
@DTYPES
@pytest.mark.parametrize("biased", [True, False])
def test_every_strategy_computes_the_only_right_integers(gated: bool, dtype: torch.dtype, biased: bool) -> None:
    p, level = problem(dtype=dtype), thresholds(dtype)
    if not biased:
        p = p._replace(b_gate=None, b_up=None, b_down=None)
    wide = p.map(Tensor.double)
    right = plain(wide, level.double(), gated).to(dtype)
    fired = F.linear(wide.x, wide.w_gate, wide.b_gate) > level
    # thresholds decide something
    assert fired.sum() < 0.8 * (F.linear(wide.x, wide.w_gate, wide.b_gate) > 0).sum()
    for strategy in STRATEGIES:
        with torch.no_grad():
            y, aux = layer(p, level, gated, return_aux=True, **named(strategy))
        testing.assert_same(y, right, strategy)
        assert float(aux.l0) == pytest.approx(float(fired.sum()) / len(p.x), rel=1e-6), strategy


@GATED
@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.parametrize("strategy", ["union", "dense"])
def test_gradients_are_those_of_pytorch(gated: bool, strategy: str, density: float) -> None:
    """With a density of 1 the non-zeros exceed the hybrid format, and backward computes everything again."""
    p, level = problem(64, torch.float64, density), thresholds(torch.float64)
    p = p.map(lambda t: t + 0.1 * torch.randn_like(t))
    dy, found = torch.randn_like(p.x), []
    for run in (plain, lambda *given: layer(*given, strategy=strategy)):
        leaves = p.map(lambda t: t.clone().requires_grad_())
        present = [t for name, t in leaves._asdict().items() if gated or name not in ("w_up", "b_up")]
        found.append(torch.autograd.grad(run(leaves, level, gated), present, dy))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_one_threshold_for_all_has_the_bits_of_a_number() -> None:
    p = problem()
    for strategy in STRATEGIES:
        with torch.no_grad():
            ours = layer(p, torch.full((N,), 2.0), True, **named(strategy))
            assert torch.equal(ours, layer(p, 2.0, True, **named(strategy))), strategy  # type: ignore[arg-type]


def test_thresholds_are_rounded_to_the_dtype_of_x() -> None:
    p, level = problem(), thresholds(torch.float32) + 1e-4
    with torch.no_grad():
        for strategy in STRATEGIES:
            assert torch.equal(layer(p, level, False, **named(strategy)), layer(p, level.to(BF16), False)), strategy


def test_packed_operators() -> None:
    p, level = problem(21), thresholds()
    gate = F.linear(p.x.float(), p.w_gate.float(), p.b_gate.float()).to(BF16)  # type: ignore[union-attr]
    both = torch.cat([p.b_gate, level])  # type: ignore[list-item]
    dense = torch.where(gate > level, gate, 0)
    for packed in (ops.gate_pack(p.x, p.w_gate, both, 8), ops.pack(gate, 8, 0.0, both)):
        assert torch.equal(ops.unpack(*packed[:2], N, 8), dense)


def test_operators_take_thresholds_with_any_activation() -> None:
    """Kernels square what is left, so the CPU does."""
    p, level = problem(21), thresholds()
    both = torch.cat([p.b_gate, level])  # type: ignore[list-item]
    gate = F.linear(p.x.double(), p.w_gate.double(), p.b_gate.double())  # type: ignore[union-attr]
    right = torch.where(gate > level, gate, 0).square() @ p.w_down.double()
    y, *_ = ops.ffn_union(p.x, p.w_gate, None, p.w_down, both, None, None, 8, "relu2")
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
