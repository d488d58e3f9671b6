"""Sums of more terms than tensor cores add up in one go: exact to the bit, and without drift."""

import math

import pytest
import torch
from torch import Tensor

import twell
from twell import testing
from twell._runtime import geometry
from twell.testing import FFN

DTYPES = [torch.bfloat16, torch.float16]
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


def longest(dtype: torch.dtype) -> int:
    return geometry.LONGEST_SUM[str(dtype).removeprefix("torch.")]


def by_turns(m: int, n: int, turns: int, dtype: torch.dtype, share: int = 1) -> FFN:
    """Token t fires ``share`` of every ``turns`` neurons, from t on; all operands are small integers.

    Tiles of tokens then list every neuron, and tiles of neurons every token, but few fire each other.
    """
    k = 2 * turns
    generator = torch.Generator("cuda").manual_seed(m + n)

    def signs(*shape: int) -> Tensor:
        return (2 * torch.randint(2, shape, generator=generator, device="cuda") - 1).to(dtype)

    x, w_gate = torch.zeros(m, k, dtype=dtype, device="cuda"), torch.zeros(n, k, dtype=dtype, device="cuda")
    x[torch.arange(m, device="cuda"), torch.arange(m, device="cuda") % turns] = 1
    for j in range(share):
        w_gate[torch.arange(n, device="cuda"), (torch.arange(n, device="cuda") + j) % turns] = 1
    w_up = torch.zeros(n, k, dtype=dtype, device="cuda")
    x[:, turns:] = signs(m, turns)
    w_up[:, turns] = signs(n)
    return FFN(x, w_gate, w_up, signs(n, k))


@GATED
@DTYPE
def test_lists_of_many_neurons(dtype: torch.dtype, gated: bool) -> None:
    problem = by_turns(257, 65_536, 64, dtype)
    right = testing.exact_output(problem, gated=gated)
    for strategy in ("row", "union"):
        out = testing.poisoned(lambda s=strategy: (testing.sparse_output(problem, gated=gated, strategy=s),))[0]
        testing.assert_same(out, right, strategy)


def check_gradients(problem: FFN, gated: bool) -> None:
    """A gradient of one column, alone and added to main gradients."""
    dy = torch.zeros_like(problem.x)
    dy[:, 3] = 1
    right = testing.exact_gradients(problem, dy, gated=gated)
    for name, gradient in testing.sparse_gradients(problem, dy, gated=gated, strategy="union").items():
        testing.assert_same(gradient, right[name].float().to(dy.dtype), f"gradient of {name}")
    names = ("w_gate", "w_up", "w_down") if gated else ("w_gate", "w_down")
    taken = [torch.full_like(getattr(problem, name), 3, dtype=torch.float32) for name in names]
    leaves = problem.map(lambda t: t.detach().requires_grad_())
    y, _ = testing.sparse_layer(leaves, gated=gated, strategy="union", main_grads=[*taken[:-1], taken[-1].t()])
    testing.assert_same(y.detach(), testing.exact_output(problem, gated=gated))
    y.backward(dy)
    for name, main in zip(names, taken, strict=True):
        testing.assert_same(main, (right[name] + 3).float(), f"main gradient of {name}")


@GATED
@DTYPE
@pytest.mark.parametrize("over", [-8, 0, 8, 128])
def test_lists_about_as_long_as_one_go(dtype: torch.dtype, gated: bool, over: int) -> None:
    """The longest sum added up in one go, for one product and for the two of dx, and the next length."""
    for products in (1, 2):
        problem = by_turns(130, longest(dtype) // products + over, 64, dtype)
        y = testing.sparse_output(problem, gated=gated, strategy="union")
        testing.assert_same(y, testing.exact_output(problem, gated=gated))
        check_gradients(problem, gated)


@GATED
@DTYPE
@pytest.mark.parametrize(("tokens", "bias"), [(1.0, False), (1.01, True), (3.3, True)])
def test_gradients_of_many_tokens(dtype: torch.dtype, gated: bool, tokens: float, bias: bool) -> None:
    problem = by_turns(int(tokens * longest(dtype)) + 1, 136, 32, dtype)
    if bias:
        problem = problem._replace(b_gate=torch.zeros_like(problem.w_gate[:, 0]), b_up=problem.w_up[:, 32] * 0)
    check_gradients(problem, gated)


@GATED
@DTYPE
def test_batches_that_overflow(dtype: torch.dtype, gated: bool) -> None:
    """More non-zeros than the hybrid format holds, of many neurons and of many tokens."""
    most = longest(dtype)
    for m, n in ((130, most // 2 + 8), (130, min(2 * most + 8, geometry.MAX_NEURONS)), (most + 9000, 72)):
        check_gradients(by_turns(m, n, 4, dtype, share=4), gated)


def coherent(m: int, k: int, n: int, fires: float, dtype: torch.dtype) -> FFN:
    """Hidden state and down weights have one sign: nothing cancels in their sums."""
    generator = torch.Generator("cuda").manual_seed(n)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device="cuda")

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    x, w_gate, w_up = normal(m, k), normal(n, k) * 0.5 / math.sqrt(k), normal(n, k) * 0.1 / math.sqrt(k)
    biases = (torch.full((n,), fires, device="cuda"), torch.ones(n, device="cuda"))
    operands = (x, w_gate, w_up, (uniform(n, k) + 0.5) * 64 / n, *biases)
    return FFN(*(t.to(dtype) for t in operands))


@DTYPE
@pytest.mark.parametrize("strategy", ["row", "union", "training"])
@pytest.mark.parametrize(("n", "fires"), [(16_384, 4.0), (65_536, 4.0), (65_536, -0.5)])
def test_sums_over_neurons_do_not_drift(dtype: torch.dtype, strategy: str, n: int, fires: float) -> None:
    problem = coherent(384, 512, n, fires, dtype)
    if strategy == "training":
        out = testing.sparse_layer(problem.map(lambda t: t.detach().requires_grad_()), strategy="union")[0].detach()
    else:
        out = testing.sparse_output(problem, strategy=strategy)
    comparison = testing.compare(problem, out)
    assert comparison.ok, comparison


@DTYPE
@pytest.mark.parametrize("fires", [8, 72], ids=["fits", "overflows"])
@pytest.mark.parametrize("m", [1 << 17, 1 << 20])
def test_sums_over_tokens_do_not_drift(dtype: torch.dtype, m: int, fires: int) -> None:
    k, n = 128, 256
    problem = coherent(m, k, n, 0.0, dtype)
    x, b_gate = (problem.x * 0.25 + 1).to(dtype), torch.full((n,), -100.0, device="cuda", dtype=dtype)
    b_gate[:fires] = 4
    problem = problem._replace(x=x, w_gate=problem.w_gate * 0.2, b_gate=b_gate)
    dy = ((torch.rand(m, k, device="cuda") + 0.5) * (4e3 / m)).to(dtype)
    right = testing.float64_gradients(problem, dy)
    ours, dense = (
        {name: (g.double() - right[name]).norm() / right[name].norm() for name, g in gradients.items()}
        for gradients in (
            testing.sparse_gradients(problem, dy, strategy="union"),
            testing.dense_gradients(problem, dy),
        )
    )
    # few neurons fire, with similar sums: rounding to 16 bits is chance, and drift would be many times larger
    worse = {name: float(ours[name] / dense[name]) for name in ours if not ours[name] <= 1.25 * dense[name]}
    assert not worse


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["row", "union", "training"])
def test_weights_that_are_columns_of_a_buffer_beyond_64_gb(strategy: str) -> None:
    """Kernels that find rows by 32-bit offsets of 16 bytes would read other rows."""
    if torch.cuda.mem_get_info()[1] < 110e9:
        pytest.skip("needs a GPU with 110 GB")
    n, k = 65_536, 64
    problem = by_turns(130, n, 32, torch.bfloat16)
    buffer = torch.empty(n, 600_000, dtype=torch.bfloat16, device="cuda")
    w_up, w_down = (
        buffer[:, column : column + k].copy_(weight) for column, weight in ((0, problem.w_up), (128, problem.w_down))
    )
    assert w_up.stride(0) * 2 * n > 64 << 30
    gate = problem.w_gate.clone().requires_grad_() if strategy == "training" else problem.w_gate
    name = "union" if strategy == "training" else strategy
    y = twell.sparse_gated_ffn(problem.x, gate, w_up, w_down.t(), strategy=name)
    testing.assert_same(y.detach(), testing.exact_output(problem))
    if strategy == "training":
        (found,) = torch.autograd.grad(y, gate, torch.ones_like(y))
        right = testing.exact_gradients(problem, torch.ones_like(y))["w_gate"]
        testing.assert_same(found, right.float().to(found.dtype))
    del buffer, w_up, w_down
    torch.cuda.empty_cache()
