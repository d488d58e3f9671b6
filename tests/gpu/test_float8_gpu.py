"""Layers of e4m3 weights on a GPU: the bits of the gate and of what is quantised."""

import pytest
import torch
from torch import Tensor

import twell
from twell import testing
from twell.ops import float8
from twell.ops.e4m3 import hidden_in_float8, product, tokens_in_float8
from twell.ops.float8 import E4M3, Float8

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
