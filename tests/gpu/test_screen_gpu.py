"""The int8 screen on a GPU: kernels against the operators on a CPU, a screened layer against "union", bit by bit."""

import functools
import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import programs
from tests.quantized import assert_right, hostile
from twell import ops, testing
from twell.base.activation import Activation
from twell.runtime import screen
from twell.testing import FFN

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
# kernels of the largest hidden size do not ship
COMPILER = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="no compiler of kernels here")
WIDTHS = (8, 16, 24, 72, 128, 256, 512, 896, 1024, 2048, 2560, 3072, 4096, 5120, 8192)
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16])


@DTYPES
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("k", [*WIDTHS, pytest.param(16384, marks=COMPILER)])
def test_rows_are_quantised(k: int, weights: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(k)
    # the last is more than a row for each warp of the GPU
    for r in (1, 100, 300, 4096):
        rows = hostile(r, k).to(dtype)
        call = functools.partial(programs.quantised, rows.to(CUDA), weights)
        testing.poison_memory()
        found = call()
        assert_right(found, rows, weights)
        testing.poison_memory()
        again = call()
        for name, first, second in zip(("q", "scale", "spread", "offset"), found, again):
            testing.assert_same(first.contiguous(), second.contiguous(), name)


@DTYPES
@pytest.mark.parametrize("k", [16, 256, 2048, 8192])
@pytest.mark.parametrize("m", [5, 200])
def test_gates_lose_at_most_half_of_what_the_bound_allows(m: int, k: int, dtype: torch.dtype) -> None:
    """Sums of one and of terms around its last place in fp32: a bias of -1 shows what tensor cores cut off."""
    torch.manual_seed(k)
    draw = [
        torch.rand(r, k, device=CUDA).add_(1) * 2.0 ** -torch.randint(10, 14, (r, k), device=CUDA) for r in (m, 256)
    ]
    x, w = (t.to(dtype) for t in draw)
    # halves of both signs, and of one: cut-offs add up there
    w[::2] *= torch.randint(0, 2, (128, k), device=CUDA) * 2 - 1
    x[:, 0] = w[:, 0] = 1
    bias = torch.full((256,), -1.0, dtype=dtype, device=CUDA)
    gate = ops.unpack(*ops.gate_pack(x, w, bias, 8)[:2], 256, 8).double()
    exact = x.double() @ w.double().t() - 1
    allowed = screen.product_error(k) / 2 * x.double().norm(dim=1)[:, None] * w.double().norm(dim=1)
    rounding = exact.abs() * 2.0**-8 + 2.0**-25
    lost = (gate - exact.clamp(min=0)).abs() - rounding
    assert (exact > 0).any()
    assert (lost <= allowed).all(), f"lost: got {(lost / allowed).max():.2f} of half of what is allowed"


def screened(problem: FFN, *activation: Any) -> tuple[Tensor, ...]:
    return testing.poisoned(lambda: programs.screened_layer(problem, 8, Activation(*activation)))


def assert_as_union(problem: FFN, *activation: Any) -> None:
    """The layer, gated or not, and the forward pass of training, bit by bit."""
    for layer in (problem, problem._replace(w_up=None, b_up=None)):
        if layer.w_up is None and "drelu" in activation:
            continue
        expected = programs.union_layer(layer, 8, Activation(*activation))
        y, l1, stats, union, candidates = screened(layer, *activation)
        testing.assert_same(union, expected[3], "union")
        assert (candidates >= union).all()
        testing.assert_same(y, expected[0], "y")
        testing.assert_same(l1, expected[1], "l1")
        testing.assert_same(stats[:, :, 0].sum(1), expected[2][:, :, 0].sum(1), "non-zeros")
        form = activation or ("relu", 0.0)
        right = ops.hybrid_forward(*layer, 8, 0, *form)
        found = ops.hybrid_forward(*layer, 8, 0, *form, True)
        for name, a, b in zip(("y", "l1", "nonzeros"), found, right):
            testing.assert_same(a, b, f"{name} of training")
        sizes = len(problem.x), len(problem.w_gate), layer.w_up is not None
        testing.assert_hybrid_same(found[3], right[3], *sizes)


@DTYPES
@pytest.mark.parametrize(("k", "n"), [(1024, 2816), (2048, 5632), (4096, 1000), (896, 4864)])
def test_real_numbers_have_the_bits_of_union(k: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shift in (0.0, 2.0, 3.0):
        draw = [torch.randn(s, device=CUDA) for s in ((1000, k), (n, k), (n, k), (n, k), (n,), (n,), (k,))]
        bias, threshold = draw[4] * 0.1, shift * math.sqrt(k)
        problem = FFN(*(t.to(dtype) for t in (*draw[:4], bias - threshold, *draw[5:])))
        assert_as_union(problem)
        # the same neurons by a threshold, and about as many candidates
        by_threshold = problem._replace(b_gate=bias.to(dtype))
        assert_as_union(by_threshold, "fatrelu", threshold)
        assert_as_union(by_threshold._replace(b_gate=None), "fatrelu", threshold)
        few, same = screened(problem)[4], screened(by_threshold, "fatrelu", threshold)[4]
        assert same.sum() <= 1.05 * few.sum()


@pytest.mark.parametrize("workload", testing.WORKLOADS)
def test_workloads_have_the_bits_of_union(workload: str) -> None:
    assert_as_union(testing.make(workload, 4096, device=CUDA))


def test_rows_that_are_not_screened_have_the_bits_of_union() -> None:
    torch.manual_seed(0)
    draw = [torch.randn(s, device=CUDA) for s in ((300, 256), (520, 256), (520, 256), (520, 256))]
    draw[0][7], draw[0][100:140], draw[1][30:60], draw[0][250:252] = 0, 0, 0, 1e-30
    draw[1][99], draw[1][98] = 1e-35, 1e-36
    bias = torch.randn(520, device=CUDA) * 10 - 60
    bias[40], bias[50] = 1e-40, 1.0
    problem = FFN(*(t.to(BF16) for t in (*draw, bias)))
    assert_as_union(problem)
    x = problem.x.clone()
    x[3, 5], x[290] = torch.nan, torch.inf
    y, _, _, union, _ = screened(problem._replace(x=x))
    expected = programs.union_layer(problem._replace(x=x))
    testing.assert_same(union, expected[3], "union")
    testing.assert_same(y[128:256], expected[0][128:256], "y of the tile without them")


@torch.no_grad()
def test_no_write_of_a_weight_is_missed() -> None:
    """Not even one that torch does not count: near tokens fire other neurons once the weight is negated."""
    torch.manual_seed(0)
    p = FFN(*(torch.randn(264, 64).to(CUDA, BF16) for _ in range(4)), None, None, None)
    p = p._replace(x=(torch.randn(1, 64) + 0.05 * torch.randn(256, 64)).to(CUDA, BF16))
    testing.sparse_output(p, strategy="union+screen")
    with torch.autograd._unsafe_preserve_version_counter(p.w_gate):
        p.w_gate.neg_()
    screened, union = (testing.sparse_output(p, strategy=strategy) for strategy in ("union+screen", "union"))
    testing.assert_same(screened, union)
