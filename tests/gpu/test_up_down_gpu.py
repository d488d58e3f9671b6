"""``pack`` and ``sparse_up_down`` on the GPU: the bits of the whole layer behind a gate that is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activations import EVERY, form
from torch import Tensor

import twell
from tests import programs
from tests.gpu.operands import padded
from tests.gpu.strategies import BF16, BIASES, BOTH, CUDA, DTYPES, FP16, label
from twell import ops, testing
from twell._activation import Activation, activation_of
from twell.testing import FFN

SIZES = [(1, 64, 8), (8, 2048, 5632), (33, 128, 264), (130, 64, 520), (700, 256, 1032), (2049, 1024, 2056)]


def gates(m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Gates of any kind: rare and frequent non-zeros, tiles that overflow, zeros of both signs, NaN and infinities."""
    generator = torch.Generator().manual_seed(m + n)
    gate = torch.randn(m, n, generator=generator)
    gate -= torch.tensor([3.0, 1.0, 0.0, -1.0])[torch.randint(4, (m, 1), generator=generator)]
    odd = torch.tensor([0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-8])
    places = torch.rand(m, n, generator=generator) < 0.01
    gate = torch.where(places, odd[torch.randint(len(odd), (m, n), generator=generator)], gate)
    return gate.to(dtype)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("compression", [2, 4, 8])
@pytest.mark.parametrize("size", SIZES, ids=label)
@DTYPES
def test_a_dense_gate_is_packed_as_on_the_cpu(
    dtype: torch.dtype, size: tuple[int, int, int], compression: int, threshold: float
) -> None:
    m, _, n = size
    gate = gates(m, n, dtype)
    activation = Activation("fatrelu", threshold)
    right = programs.packed_on_cpu(activation.after(gate), compression)
    for own in (gate.cuda(), padded(gate.cuda(), 8, 16)):
        packed = testing.poisoned(lambda own=own: programs.packed(own, compression, activation))
        testing.assert_packed_same(packed, right, n, compression)


@pytest.mark.parametrize("density", [0.02, 0.5])
@pytest.mark.parametrize("size", SIZES, ids=label)
@BOTH
@DTYPES
def test_inference_has_the_bits_of_the_layer(
    dtype: torch.dtype, gated: bool, size: tuple[int, int, int], density: float
) -> None:
    problem = testing.integer_problem(*size[:2], size[2], density=density, biases=BIASES, dtype=dtype).to(CUDA)
    given = behind(problem, gated)
    layer = problem if gated else problem._replace(w_up=None, b_up=None)
    for strategy in ("row", "union"):
        expected = testing.exact_output(problem, gated=gated, rounded=strategy == "union")
        (y,) = testing.poisoned(lambda strategy=strategy: (ops.sparse_up_down(*given, 8, strategy, None),))
        testing.assert_same(y, expected, strategy)
        found = testing.poisoned(lambda strategy=strategy: ops.sparse_up_down_aux(*given, 8, strategy, None))
        for own, other in zip(found, ops.ffn_aux(*layer, 8, strategy, None), strict=True):
            testing.assert_same(own, other, f"{strategy} and its sums")


def behind(problem: FFN, gated: bool) -> tuple[Any, ...]:
    """The gate of a layer of integers and what is behind it, as the operators take it."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = problem
    wide = F.linear(x.double(), w_gate.double(), None if b_gate is None else b_gate.double())
    up = (x, w_up, b_up) if gated else (None, None, None)
    return wide.to(x.dtype), *up[:2], w_down, up[2], b_down


def gradient_of_gate(problem: FFN, dy: Tensor, gated: bool, name: Any, threshold: float) -> Tensor:
    """By the definition in float64, for a gradient of 1 of the sum of |h|, rounded once."""
    activation, wide = activation_of(name, threshold, gated), problem.map(Tensor.double)
    gate = testing.float64_gate(problem, threshold)
    up = F.linear(wide.x, wide.w_up, wide.b_up) if gated else None
    dh = dy.double() @ wide.w_down.t() + activation.hidden(gate, up).sign()
    d_gate, _ = activation.gradients(dh, gate, up)
    return d_gate.masked_fill(gate == 0, 0).float().to(dy.dtype)


@EVERY
@pytest.mark.parametrize("density", [0.02, 0.6])
@pytest.mark.parametrize("size", [(1, 64, 8), (130, 64, 520), (900, 136, 1032)], ids=label)
@DTYPES
def test_gradients_are_the_only_right_ones(
    dtype: torch.dtype, size: tuple[int, int, int], density: float, name: Any, threshold: float, gated: bool
) -> None:
    """Also of batches with more non-zeros than the format holds."""
    m, k, n = size
    problem = testing.integer_problem(m, k, n, density=density, biases=BIASES, dtype=dtype, activation=name).to(CUDA)
    dy, dl1, how = testing.integer_upstream(problem), torch.tensor(1.0, device=CUDA), (name, threshold)
    right = testing.exact_gradients(problem, dy, 1.0, gated=gated, **form(*how))
    given = behind(problem, gated)
    y, l1, nonzeros, kept = testing.poisoned(lambda: ops.sparse_up_down_forward(*given, 8, 0, *how))
    testing.assert_same(y, testing.exact_output(problem, gated=gated, rounded=True, **form(*how)), "y")
    layer = problem if gated else problem._replace(w_up=None, b_up=None)
    whole = ops.hybrid_forward(*layer, 8, 0, *how)
    testing.assert_same(l1, whole[1], "l1")
    testing.assert_same(nonzeros, whole[2], "nonzeros")
    testing.assert_hybrid_same(kept, whole[3], m, n, gated)
    found = testing.poisoned(lambda: ops.sparse_up_down_backward(dy, dl1, *given[:5], kept, gated, True, True, *how))
    for operand, gradient in {"w_up": found[2], "w_down": found[3], "b_up": found[4]}.items():
        if operand in right:
            testing.assert_same(gradient, right[operand].float().to(dtype), f"gradient of {operand}")
        else:
            assert gradient.shape == (0,), operand
    d_gate = gradient_of_gate(problem, dy, gated, *how)
    testing.assert_same(found[1], d_gate, "gradient of the gate")
    if gated:
        through = right["x"] - d_gate.double() @ problem.w_gate.double()
        testing.assert_same(found[0], through.float().to(dtype), "gradient of x")
    only = ops.sparse_up_down_backward(dy, dl1, *given[:5], kept, False, True, False, *how)
    testing.assert_same(only[1], found[1], "gradient of the gate alone")
    others = testing.poisoned(lambda: ops.sparse_up_down_backward(dy, dl1, *given[:5], kept, False, False, True, *how))
    assert others[0].numel() == others[1].numel() == 0
    for own, other in zip(others[2:], found[2:], strict=True):
        testing.assert_same(own, other, "gradients without that of the gate")


@pytest.mark.parametrize("density", [0.02, 0.6])
@BOTH
def test_gradients_of_the_last_columns_are_those_of_all(gated: bool, density: float) -> None:
    """As layers with adapters want them; also of batches with more non-zeros than the format holds."""
    problem = testing.integer_problem(700, 136, 1032, density=density, biases=BIASES, dtype=BF16).to(CUDA)
    dy, layer = testing.integer_upstream(problem), problem if gated else problem._replace(w_up=None, b_up=None)
    kept = ops.hybrid_forward(*layer, 8)[3]
    given = behind(problem, gated)
    pairs = (
        (ops.hybrid_backward, (dy, None, *layer[:6], kept, True, True)),
        (ops.sparse_up_down_backward, (dy, None, *given[:5], kept, gated, True, True)),
    )
    for op, arguments in pairs:
        whole = op(*arguments)
        last = testing.poisoned(lambda op=op, arguments=arguments: op(*arguments, "relu", 0.0, 104))
        for own, other in zip(last, whole, strict=True):
            if other.shape == problem.w_gate.shape:
                own, other = own[:, 104:], other[:, 104:]
            testing.assert_same(own, other)


@BOTH
def test_functions_train_and_replay(gated: bool) -> None:
    """Forward and backward in a CUDA graph give the bits of eager calls, for new values at each replay."""
    m, k, n = 300, 128, 520
    problem = testing.integer_problem(m, k, n, density=0.1, biases="up down", dtype=BF16).to(CUDA)
    gate, x, w_up, w_down, b_up, b_down = behind(problem, gated)
    tensors = {"gate": gate, "w_down": w_down.t(), "b_down": b_down} | (
        {"x": x, "w_up": w_up, "b_up": b_up} if gated else {}
    )
    leaves = {a: t.detach().clone().requires_grad_() for a, t in tensors.items()}
    absent: dict[str, None] = {} if gated else {"x": None, "w_up": None}
    dy = testing.integer_upstream(problem)

    def step() -> tuple[Tensor, ...]:
        y = twell.sparse_up_down(**leaves, **absent, strategy="union")  # type: ignore[arg-type]
        return (y.detach(), *torch.autograd.grad(y, list(leaves.values()), dy))

    graph, outputs = testing.captured(step)
    for seed in range(2):
        other = testing.integer_problem(m, k, n, density=0.3, biases="up down", dtype=BF16, seed=seed).to(CUDA)
        with torch.no_grad():
            leaves["gate"].copy_(behind(other, gated)[0])
        expected = step()
        for output in outputs:
            output.fill_(torch.nan)
        graph.replay()
        for own, right in zip(outputs, expected, strict=True):
            testing.assert_same(own, right)


@pytest.mark.parametrize("strategy", ["row", "union"])
def test_real_gates_stay_within_a_rounding_of_the_formula(strategy: Any) -> None:
    """FP16 and BF16 at a real size, beside the error of dense PyTorch."""
    for dtype in (BF16, FP16):
        problem = testing.make("topic29", 4096, dtype=dtype)
        gate = F.linear(problem.x, problem.w_gate)
        wide = problem.map(Tensor.double)
        exact = (gate.double().relu() * F.linear(wide.x, wide.w_up)) @ wide.w_down
        layer = problem.x, gate, problem.w_up, problem.w_down.t()
        own, dense = (
            (twell.sparse_up_down(*layer, strategy=s).double() - exact).norm() / exact.norm()
            for s in (strategy, "dense")
        )
        assert own <= 1.1 * dense
