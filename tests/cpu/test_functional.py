"""The functions users call: results, limits, errors, autocast, strides and compiling."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import twell
from tests.habits.derivatives import Doubling
from tests.habits.entries import LAYOUTS, SMALLER
from twell import testing
from twell.call.admission import admitted
from twell.choose import tuning
from twell.ops.operands import Layer

BF16 = torch.bfloat16


def real_problem(m: int, n: int, k: int, dtype: torch.dtype, bias: bool = False) -> testing.FFN:
    w = [torch.randn(n, k) / k**0.5 for _ in range(3)]
    x = torch.randn(m, k)
    x[:, 0], w[0][:, 0] = 1.0, -1.3
    biases = (torch.randn(n) / 4, torch.randn(n), torch.randn(k)) if bias else (None, None, None)
    return testing.FFN(x, *w, *biases).map(lambda t: t.to(dtype))


@pytest.mark.parametrize(("n", "k"), [(24, 12), (12, 16), (0, 16), (8, 16392)])
def test_dense_takes_sizes_beyond_the_sparse_kernels(n: int, k: int) -> None:
    problem = testing.FFN(*(torch.zeros(rows, k, dtype=BF16) for rows in (2, n, n, n)))
    for gated in (True, False):
        assert testing.sparse_output(problem, gated=gated, strategy="dense").shape == (2, k)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("strategy", ["row", "union", "dense"])
@torch.no_grad()
def test_a_jit_trace_is_for_any_number_of_tokens(gated: bool, strategy: str) -> None:
    problem = real_problem(300, 264, 32, BF16, bias=True)

    def call(x: Tensor) -> Any:
        y, aux = testing.sparse_layer(problem._replace(x=x), gated=gated, strategy=strategy)
        return y, aux.l1, aux.l0

    traced = torch.jit.trace(call, (problem.x,), check_trace=False)
    for m in (300, 1, 7, 129):
        assert all(map(torch.equal, traced(problem.x[:m]), call(problem.x[:m])))


@torch.no_grad()
def test_invariant_runs_row_by_kernels_of_the_hidden_size_alone() -> None:
    x, weight = torch.randn(40, 16, dtype=BF16), torch.randn(8, 16, dtype=BF16)
    expected = twell.sparse_gated_ffn(x, weight, weight, weight.t(), strategy="row")
    for strategy in ("row", "auto", twell.AutoStrategy()):
        y = twell.sparse_gated_ffn(x, weight, weight, weight.t(), strategy=strategy, invariant=True)
        assert torch.equal(y, expected)
    with Doubling(), pytest.raises(NotImplementedError, match="with invariant=True, got the TorchFunctionMode"):
        twell.sparse_gated_ffn(x, weight, weight, weight.t(), invariant=True)
    for k in (8, 2048, 4096, 4104, 16384):
        chosen = {
            (tuning.gate_pack(BF16, m, 5632, 66).op, tuning.up_down_token(BF16, m, k, True, True))
            for m in (1, 8, 64, 65, 300, 2049, 100_000)
        }
        ((gate, token),) = chosen
        assert gate == "gate_pack"
        assert token.cluster > 1


@pytest.mark.parametrize("kind", [*LAYOUTS, *SMALLER])
def test_kernels_read_memory_that_holds_the_values_alone(kind: str) -> None:
    """Calls that bypass the dispatcher."""
    for name, value in operands(BF16).items():
        odd = (LAYOUTS | SMALLER)[kind](value)
        layer = Layer(*(operands(BF16) | {name: odd}).values())
        assert admitted(layer, True) == (
            kind not in ("negated", "zeros without memory", "a parameter of its own class")
        )


OPERANDS = ["x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"]


def operands(dtype: torch.dtype) -> dict[str, Tensor]:
    problem = real_problem(5, 264, 32, dtype, bias=True)
    return {**dict(zip(OPERANDS, problem)), "w_down": problem.w_down.t()}


@pytest.mark.parametrize("bias", ["b_gate", "b_up", "b_down"])
def test_biases_made_in_inference_mode_train_as_with_dense(bias: str) -> None:
    given = {name: t.requires_grad_() for name, t in operands(BF16).items()}
    with torch.inference_mode():
        given[bias] = given[bias].clone()
    assert torch.autograd.grad(twell.sparse_gated_ffn(**given, strategy="union").sum(), [given["w_gate"]])[0].any()


@pytest.mark.parametrize(("value", "strategy"), [(math.nan, "row"), (math.inf, "union"), (-math.inf, "row")])
@pytest.mark.parametrize("name", ["x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"])
def test_non_finite_values_reach_what_dense_lets_them_reach(name: str, value: float, strategy: Any) -> None:
    """Never more values than in dense PyTorch; all of them where a token or a neuron that it fires is not finite."""
    problem = testing.integer_problem(9, 24, 264, density=0.2, biases="gate up down")
    clean = testing.sparse_output(problem, strategy=strategy)
    spoilt = problem.map(Tensor.clone)
    tensor = getattr(spoilt, name)
    tensor[(3,) + (1,) * (tensor.dim() - 1)] = value
    y, dense = (testing.sparse_output(spoilt, strategy=s) for s in (strategy, "dense"))
    assert not bool((y.isfinite() < dense.isfinite()).any())
    assert torch.equal(y[y.isfinite() & clean.isfinite()], clean[y.isfinite() & clean.isfinite()]) or name in (
        "w_gate",
        "b_gate",
        "x",
    )
    gate = torch.relu(torch.nn.functional.linear(spoilt.x, spoilt.w_gate, spoilt.b_gate))
    fires = gate[:, 3] != 0
    if name in ("w_up", "b_up"):
        assert torch.equal(y.isfinite().all(1), ~fires)
    elif name == "w_down":
        assert not bool(y[fires, 1].isfinite().any())
    elif name == "b_down":
        assert not bool(y[:, 3].isfinite().any())
    elif name == "x":
        assert torch.equal(y.isnan(), dense.isnan())
