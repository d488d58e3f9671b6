"""Layers of e4m3 weights on a GPU, by the bits of the gate and of what is quantised, and experts' odd operands."""

from typing import Any

import pytest
import torch
from torch import Tensor

import twell
from tests.cases.layouts import laid_out
from twell import testing
from twell.ops import float8
from twell.ops.e4m3 import hidden_in_float8, product, tokens_in_float8
from twell.ops.float8 import E4M3, Float8
from twell.testing.case import Case
from twell.testing.operands import build

CUDA = torch.device("cuda")


def hostile(m: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and weights [K, K] of many magnitudes, with rows of zeros."""
    g = torch.Generator(CUDA).manual_seed(seed)
    x = torch.randn(m, k, generator=g, device=CUDA) * torch.logspace(-30, 30, m, device=CUDA)[:, None]
    w = torch.randn(k, k, generator=g, device=CUDA) * torch.logspace(-6, 2, k, device=CUDA)[:, None]
    x[m // 2], w[k // 3] = 0, 0
    x[3] = x[3] * torch.logspace(0, -4, k, device=CUDA)
    return x.bfloat16(), w


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("k", [64, 144, 512, 1040, 2048, 4096])
def test_the_gate_has_the_bits_of_scaled_mm(k: int, fast: bool) -> None:
    """By an identity as the down weight."""
    one = Float8(torch.eye(k, device=CUDA).to(E4M3), torch.ones(k, device=CUDA))
    # more than one pass takes, unless sums are not fast
    for m in (33, 129, 700, *(() if fast else (1, 17))):
        x, w = hostile(max(m, 4), k, m)
        x, gate = x[-m:], twell.quantize(w)
        right = torch.relu(product(*tokens_in_float8(x), gate.values, gate.scale, fast=fast))
        for strategy in ("row", "union"):
            y = twell.sparse_ffn(x, gate, one, strategy=strategy, fast_accum=fast)  # type: ignore[arg-type]
            testing.assert_same(y, right, f"{m} tokens, {strategy}")


@pytest.mark.parametrize("k", [16, 2048, 2064, 16384])
def test_quantised_rows_are_those_of_the_formula(k: int) -> None:
    x, _ = hostile(40, 64, 1)
    x = x.repeat(1, -(-k // 64))[:, :k].contiguous()
    x[5, 2], x[6, 3] = torch.nan, torch.inf
    for given in (None, torch.tensor([0.01], device=CUDA)):
        values, scale = tokens_in_float8(x, given)
        right = float8.quantize_tokens(x.cpu(), None if given is None else given.cpu())
        assert torch.equal(values.view(torch.uint8).cpu(), right.values.view(torch.uint8))
        testing.assert_same(scale.cpu(), right.scale)


@pytest.mark.parametrize("n", [16, 5632, 8192, 8208, 28672])
@pytest.mark.parametrize("gated", [True, False])
def test_quantised_hidden_states_are_those_of_the_formula(n: int, gated: bool) -> None:
    torch.manual_seed(n)
    gate, up = (torch.randn(33, n, device=CUDA).bfloat16() for _ in range(2))
    values, scale = hidden_in_float8(gate, up if gated else None)
    h = torch.relu(gate) * up if gated else torch.relu(gate)
    right = float8.quantize_tokens(h.cpu())
    assert torch.equal(values.view(torch.uint8).cpu(), right.values.view(torch.uint8))
    testing.assert_same(scale.cpu(), right.scale)


# Experts

BASE = Case.of("experts m=64 k=264 n=520 experts=9 slots=3 gated=False activation=relu2")


def operands(case: Case) -> dict[str, Any]:
    return {name: t for name, t in laid_out(case, build(case, CUDA)).items() if name != "dy"}


def call(case: Case, p: dict[str, Any]) -> Any:
    return twell.sparse_experts(**p, **case.asked, activation=case.activation)  # type: ignore[arg-type]


def test_ids_that_are_no_experts_read_nothing() -> None:
    p = operands(BASE)
    odd = p["expert_ids"].clone()
    odd[::3, 0] = torch.tensor([BASE.experts, -2, 1 << 40, -(1 << 40)], device=CUDA).repeat(9)[: len(odd[::3])]
    gone = torch.where((odd < 0) | (odd >= BASE.experts), -1, odd)
    for strategy in ("row", "dense"):
        how = BASE.replace(strategy=strategy)
        testing.assert_same(call(how, p | {"expert_ids": odd}), call(how, p | {"expert_ids": gone}))


def test_a_weight_of_zero_hides_no_infinity() -> None:
    """Its token is routed all the same: h is 0 * inf."""
    x, ids = torch.ones(2, 64, dtype=torch.bfloat16, device=CUDA), torch.tensor([[0], [1]], device=CUDA)
    x[0, 0] = torch.inf
    up, down = (torch.ones(2, 32, 64, dtype=torch.bfloat16, device=CUDA) for _ in "ab")
    y = twell.sparse_experts(x, up, down.mT, ids, torch.tensor([[0.0], [1.0]], device=CUDA), strategy="row")
    assert bool(y[0].isnan().all())
    assert torch.equal(y[1], torch.full_like(y[1], 64 * 32))
