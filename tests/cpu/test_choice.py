"""Layers of whose pre-activations PyTorch chooses: thresholds that are trained, BatchTopK, and counts of neurons."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell.call import choice

M, K, N = 150, 24, 200
BANDWIDTH = 1.0
SPARSE = ("union", "dense", "auto")


def problem(dtype: torch.dtype, n: int = N, k: int = K, m: int = M, high: int = 3) -> dict[str, Tensor]:
    """Small integers, thresholds in steps of 1/4, so that all sums are exact."""
    generator = torch.Generator().manual_seed(5)

    def drawn(low: int, top: int, *shape: int) -> Tensor:
        return torch.randint(low, top + 1, shape, generator=generator).to(dtype)

    return {
        "x": drawn(-1, 1, m, k),
        "w_up": drawn(-1, 1, n, k),
        "w_down": drawn(-1, 1, n, k),
        "b_up": drawn(-7, -4, n),
        "b_down": drawn(-2, 2, k),
        "threshold": torch.arange(n) % (4 * high) / 4.0,
    }


def leaves(t: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone().requires_grad_() for name, value in t.items()}


def ours(t: dict[str, Tensor], **options: Any) -> Any:
    how: Any = {"activation": "fatrelu", "threshold": t["threshold"], "bandwidth": BANDWIDTH} | options
    return twell.sparse_ffn(t["x"], t["w_up"], t["w_down"].t(), b_up=t["b_up"], b_down=t["b_down"], **how)


def test_windows_reach_below_zero() -> None:
    """Negative pre-activations train a threshold near zero, and one below zero is zero and keeps its gradient."""
    t = problem(torch.float64, high=1)
    for shift in (0.0, -0.6):
        found = []
        for strategy in ("union", "dense"):
            mine = leaves(t | {"threshold": torch.full((N,), 0.125 + shift)})
            _, aux = ours(mine, strategy=strategy, return_aux=True, bandwidth=3.0)
            aux.l0.backward()
            found.append(mine["threshold"].grad)
        gate = F.linear(t["x"], t["w_up"], t["b_up"])
        level = max(0.125 + shift, 0.0)
        right = -((gate - level).abs() < 1.5).double().sum(0) / 3 / M
        for each in found:
            torch.testing.assert_close(each.double(), right, rtol=1e-6, atol=0)
        assert ((gate < 0) & (gate > level - 1.5)).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("most", [0, 1, 37, 900, 2000, 30000])
def test_largest(dtype: torch.dtype, most: int) -> None:
    """Against a stable sort, with many ties, fewer positive values than asked for, infinities and NaN."""
    gate = torch.randint(-30, 12, (40, 56), generator=torch.Generator().manual_seed(most)).to(dtype)
    gate[3, 5], gate[30, 1], gate[9] = torch.inf, torch.nan, -torch.inf
    order = gate.flatten().double().nan_to_num(nan=1e300, posinf=1e200).sort(descending=True, stable=True).indices
    right = torch.zeros(gate.numel(), dtype=torch.bool)
    right[order[:most]] = True
    right &= ~(gate.flatten() <= 0)
    assert torch.equal(choice.largest(gate, most), right.view(gate.shape))


@pytest.mark.parametrize("strategy", ["row", *SPARSE])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["relu", "fatrelu", "topk", "bandwidth"])
def test_counts(strategy: str, training: bool, kind: str) -> None:
    t = leaves(problem(torch.bfloat16))
    gate = F.linear(t["x"].double(), t["w_up"].double(), t["b_up"].double()).detach()
    counts = torch.arange(N)
    level = t["threshold"] if kind == "bandwidth" else t["threshold"].detach()
    how: dict[str, Any] = {"threshold": level if kind in ("fatrelu", "bandwidth") else 0}
    how |= {"activation": "fatrelu" if kind == "bandwidth" else kind, "bandwidth": 1 if kind == "bandwidth" else None}
    if kind == "topk":
        how["k"] = 3
        order = gate.sort(dim=1, descending=True, stable=True).indices[:, :3]
        fires = torch.zeros_like(gate, dtype=torch.bool).scatter_(1, order, True) & (gate > 0)
    else:
        fires = gate > (level.double() if kind != "relu" else 0)
    with torch.set_grad_enabled(training):
        for _ in range(2):
            ours(t, strategy=strategy, counts=counts, **how)
    assert torch.equal(counts, torch.arange(N) + 2 * fires.sum(0))


def test_counts_of_a_batch_that_exceeds_the_format() -> None:
    t = leaves(problem(torch.bfloat16, n=4096) | {"b_up": torch.full((4096,), 1.0, dtype=torch.bfloat16)})
    counts = torch.zeros(4096, dtype=torch.int64)
    ours(t, strategy="union", counts=counts, activation="relu", threshold=0, bandwidth=None)
    assert torch.equal(counts, (F.linear(t["x"], t["w_up"], t["b_up"]) > 0).sum(0))


def test_sums_of_windows_are_not_rounded() -> None:
    """Rows of the down weight may cancel what all tokens have in common."""
    generator = torch.Generator().manual_seed(1)
    m, k = 2048, 64
    x, w_up = torch.randn(m, k, generator=generator).bfloat16(), torch.randn(N, k, generator=generator).bfloat16() / 8
    w_down = torch.randn(N, k, generator=generator)
    w_down = ((w_down - w_down.mean(1, keepdim=True)) / 8).bfloat16()
    dy = (1 + 0.05 * torch.randn(m, k, generator=generator)).bfloat16()
    errors = {}
    for strategy in ("union", "dense"):
        level = torch.full((N,), 0.5, requires_grad=True)
        how: Any = {"activation": "fatrelu", "threshold": level, "bandwidth": 0.5, "strategy": strategy}
        twell.sparse_ffn(x, w_up, w_down.t(), **how).backward(dy)
        gate = (x.double() @ w_up.double().t()).bfloat16().double()
        right = -((gate - 0.5).abs() < 0.25).double().mul(dy.double() @ w_down.double().t()).sum(0)
        errors[strategy] = float((level.grad - right).norm() / right.norm())  # type: ignore[operator]
    assert errors["union"] < min(0.01, errors["dense"])


def test_transforms_are_refused() -> None:
    t = problem(torch.bfloat16)
    with pytest.raises(NotImplementedError, match="a trained threshold takes plain backward passes, got a transform"):
        torch.func.grad(lambda level: ours(t | {"threshold": level}).sum())(t["threshold"])
    with pytest.raises(NotImplementedError, match="forward-mode tangent"):
        torch.func.jvp(lambda level: ours(t | {"threshold": level}).sum(), (t["threshold"],), (t["threshold"],))


def test_more_nan_than_most_break_all_gradients() -> None:
    t = leaves(problem(torch.bfloat16))
    with torch.no_grad():
        t["x"][70:] = torch.nan
    y = ours(t, activation="batchtopk", k=3, threshold=0, bandwidth=None, strategy="union")
    (grad,) = torch.autograd.grad(y.sum(), t["x"])
    assert grad.isnan().all()
