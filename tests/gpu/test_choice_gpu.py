"""Trained thresholds, BatchTopK, counts and slices of neurons on a GPU: the bits of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import twell
from twell import _choice, ops, testing

M, K = 260, 72
N, WIDE = 520, 2 * 65536 + 1000


def problem(n: int = N, bias: int = -6) -> dict[str, Tensor]:
    """Integers, few of which fire, and thresholds in steps of 1/4."""
    generator = torch.Generator().manual_seed(3)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).bfloat16()

    # of a few inputs alone, so that sums stay small
    x = drawn(-1, 1, M, K) * (torch.arange(K) % 4 == 0)
    t = {"x": x, "w_up": drawn(-1, 1, n, K), "w_down": drawn(-1, 1, n, K), "b_up": bias + drawn(-2, 0, n)}
    return t | {"b_down": drawn(-2, 2, K), "threshold": torch.arange(n) % 8 / 4.0}


def call(t: dict[str, Tensor], **options: Any) -> Any:
    return twell.sparse_ffn(t["x"], t["w_up"], t["w_down"].t(), b_up=t["b_up"], b_down=t["b_down"], **options)


def both(t: dict[str, Tensor], training: bool, **options: Any) -> list[list[Tensor]]:
    """y, figures, counts and gradients on the CPU and on the GPU."""
    found = []
    for device in ("cpu", "cuda"):
        own = {name: value.detach().clone().to(device).requires_grad_(training) for name, value in t.items()}
        how = dict(options)
        if how.pop("learned", False):
            how |= {"activation": "fatrelu", "threshold": own["threshold"]}
        counts = torch.zeros(len(t["w_up"]), dtype=torch.int64, device=device)
        with torch.set_grad_enabled(training):
            y, aux = call(own, counts=counts, return_aux=True, **how)
        results = [y, aux.l0, counts]
        if training:
            loss = (y * (torch.arange(K, device=device) % 3 - 1)).sum() + M * (aux.l1 + aux.l0)
            loss.backward()
            results += [value.grad for value in own.values() if value.grad is not None]
        found.append([result.detach().cpu() for result in results])
    return found


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("strategy", ["union", "dense"])
@pytest.mark.parametrize("n", [N, WIDE])
@pytest.mark.parametrize("kind", ["relu", "bandwidth", "batchtopk"])
def test_the_bits_of_the_cpu(kind: str, n: int, strategy: str, training: bool) -> None:
    if kind == "batchtopk" and n == WIDE:
        pytest.skip("of one slice alone")
    how: dict[str, Any] = {"relu": {}, "bandwidth": {"learned": True, "bandwidth": 1.0}}.get(
        kind, {"activation": kind, "k": 2.5}
    )
    for right, ours in zip(*both(problem(n, -6 if n == N else -12), training, strategy=strategy, **how), strict=True):
        if kind == "bandwidth":
            # windows times rows are summed in any order
            torch.testing.assert_close(ours, right, rtol=2e-5 if right.dtype == torch.float32 else 0, atol=0)
        else:
            testing.assert_same(ours, right)


def test_a_batch_that_exceeds_the_format_trains_thresholds() -> None:
    t = problem(4104, bias=2)
    for right, ours in zip(*both(t, True, strategy="union", learned=True, bandwidth=1.0), strict=True):
        torch.testing.assert_close(ours.double(), right.double(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_largest(dtype: torch.dtype) -> None:
    gate = torch.randint(-30, 12, (300, 1000), device="cuda").to(dtype)
    gate[3, 5], gate[30, 1], gate[9] = torch.inf, torch.nan, -torch.inf
    for most in (0, 1, 900, 30000, 90000, 300000):
        assert torch.equal(_choice.largest(gate, most).cpu(), _choice.largest(gate.cpu(), most))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (1000, 4104), (129, 65536)])
def test_window(m: int, n: int, dtype: torch.dtype) -> None:
    """Gates on levels and bounds, NaN and infinities; and a gate whose rows kernels do not read in place."""
    gate = (torch.randint(-9, 10, (m, n)) / 4).to(dtype)
    gate[0, 3], gate[-1, 5], gate[m // 2, 6], gate[0, 7] = torch.nan, torch.inf, -torch.inf, -0.0
    level = (torch.arange(n) % 5).to(dtype) / 4
    bounds = level, *_choice.bounds(level, 1.0)
    right = gate.clone()
    expected = ops.window(right, *bounds)
    for more in (0, 3):
        ours = torch.empty(m, n + more, dtype=dtype, device="cuda")[:, :n]
        given = [bound.cuda() for bound in bounds]
        found = testing.poisoned(lambda ours=ours, given=given: ops.window(ours.copy_(gate), *given))
        for one, other in zip((*found, ours), (*expected, right), strict=True):
            testing.assert_same(one.cpu(), other)


def test_in_a_graph() -> None:
    """Nothing waits for the device."""
    t = {name: value.cuda() for name, value in problem().items()}
    t["threshold"].requires_grad_()
    t["w_up"].requires_grad_()
    how: Any = {"strategy": "union", "activation": "fatrelu", "threshold": t["threshold"], "bandwidth": 1.0}

    def step() -> tuple[Tensor, ...]:
        y, aux = call(t, return_aux=True, **how)
        return y, *torch.autograd.grad(y.sum() + aux.l0, [t["threshold"], t["w_up"]])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        right = [result.clone() for result in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for one, other in zip(right, found, strict=True):
        testing.assert_same(other, one)
