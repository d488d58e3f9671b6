"""Problems have the patterns they promise, and comparisons catch planted errors."""

import contextlib
import math
from typing import Any

import pytest
import torch

from twell import ops, testing
from twell.ops import hybrid
from twell.testing import FFN, WORKLOADS, Errors

BF16, FP16 = torch.bfloat16, torch.float16


def draw(name: str, **changes: int) -> FFN:
    return testing.make(name, **{"m": 512, "k": 256, "n": 2048, **changes}, device="cpu")


def counts(problem: FFN) -> torch.Tensor:
    return (problem.x.float() @ problem.w_gate.float().T > 0).sum(1).float()


# Workloads


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_has_its_sparsity(name: str) -> None:
    problem = draw(name, document=64)
    per_token = counts(problem)
    assert float(per_token.mean()) == pytest.approx(WORKLOADS[name].nnz, rel=0.02)
    assert {t.dtype for t in problem[:4]} == {BF16}
    assert [tuple(t.shape) for t in problem[:4]] == [(512, 256), *[(2048, 256)] * 3]
    assert torch.equal(draw(name, document=64).w_down, problem.w_down)
    assert not torch.equal(draw(name, document=64, seed=1).x, problem.x)


def test_drawing_is_that_of_the_recorded_figures() -> None:
    """Published figures depend on the order of draws: a few values of each tensor are pinned."""
    x, w_gate, w_up, w_down = testing.make("topic29", 4, 8, 16, seed=3, device="cpu", dtype=torch.float32, document=2)[
        :4
    ]
    pinned = torch.stack([x[3, 2], x[3, 1], w_gate[5, 0], w_gate[5, 3], w_up[7, 1], w_down[15, 7]])
    torch.testing.assert_close(
        pinned, torch.tensor([1.41335, 0.31839, 4.67778, -0.3469, 0.00511, -0.10623]), rtol=1e-4, atol=1e-4
    )


# Exact problems


@pytest.mark.parametrize(("k", "biases"), [(8, ""), (200, "gate up down")])
def test_integer_problem_density(k: int, biases: str) -> None:
    for density in (0, 0.05, 0.3, 1):
        problem = testing.integer_problem(64, k, 520, density=density, biases=biases, seed=1)
        share = float((testing.float64_gate(problem) > 0).double().mean())
        assert share == density if density in (0, 1) else 0.3 * density < share < 3 * density


def test_pattern_problem_has_the_gates_it_is_given() -> None:
    gates = torch.randint(-3, 9, (20, 264), generator=torch.Generator().manual_seed(0))
    for biases in ("", "gate up down"):
        problem = testing.pattern_problem(gates, 24, biases=biases)
        assert torch.equal(testing.float64_gate(problem), gates.double().relu())
    with pytest.raises(ValueError, match="M = 20, k = 16"):
        testing.pattern_problem(gates, 16)


def test_inexact_problems_are_refused() -> None:
    problem = testing.integer_problem(8, 64, 264, density=1)
    with pytest.raises(ValueError, match="2\\^24"):
        testing.exact.check_exact(problem._replace(w_down=problem.w_down * 4096))
    with pytest.raises(ValueError, match="gates"):
        testing.exact.check_exact(problem._replace(x=problem.x * 9))


# Errors


GATED = pytest.mark.parametrize("gated", [True, False])


def drop_neuron(problem: FFN) -> torch.Tensor:
    w_down = problem.w_down.clone()
    w_down[(problem.x.float() @ problem.w_gate.float().T > 0).sum(0).argmax()] = 0
    return testing.sparse_output(problem._replace(w_down=w_down))


def round_twice(problem: FFN) -> torch.Tensor:
    y = testing.sparse_output(problem)
    return (y.view(torch.int16) & ~3).view(BF16)


def nan(problem: FFN) -> torch.Tensor:
    y = testing.sparse_output(problem)
    y[5, 5] = math.nan
    return y


@pytest.mark.parametrize("planted", [drop_neuron, round_twice, nan])
def test_planted_errors_are_over_budget(planted: Any) -> None:
    problem = testing.make("skew29", 256, 128, 1024, device="cpu")
    assert not testing.compare(problem, planted(problem)).ok


def test_errors() -> None:
    """Values computed by hand, zero rows, empty tensors."""
    answer = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    measured = testing.errors(answer + torch.tensor([[0.0, 0.5], [0.0, 0.2]]), answer)
    assert measured.frobenius == pytest.approx(math.sqrt(0.29 / 26))
    assert measured.worst_row == pytest.approx(0.2)
    silent = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    floor = testing.ROW_FLOOR * 5 / math.sqrt(2)
    assert testing.errors(silent + torch.tensor([[0], [1e-3]]), silent).worst_row == pytest.approx(
        1e-3 * math.sqrt(2) / floor
    )
    # its terms are the measure of a row that cancels; otherwise the row itself is
    terms = torch.tensor([2.0, 10.0], dtype=torch.float64)
    cancelling = testing.errors(answer + torch.tensor([[0.0, 0.5], [0.0, 0.2]]), answer, terms)
    assert cancelling.worst_row == pytest.approx(0.1)
    assert cancelling.frobenius == measured.frobenius
    assert testing.errors(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float64)) == Errors(0, 0)
    assert testing.errors(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.float64)).frobenius == math.inf
    assert testing.errors(torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.float64)) == Errors(0, 0)
    assert testing.errors(torch.full((2, 2), math.inf), answer) == Errors(math.inf, math.inf)


def test_budget() -> None:
    dense = Errors(1e-3, 1e-2)
    assert Errors(1.09e-3, 1.09e-2).within(dense)
    assert not Errors(1.11e-3, 1e-2).within(dense)
    assert not Errors(1e-3, 1.11e-2).within(dense)
    assert not Errors(math.nan, 0).within(dense)
    assert not Errors(math.inf, math.inf).within(Errors(math.inf, math.inf))
    assert Errors(0, 0).within(Errors(0, 0))


# Gradients


@pytest.fixture(scope="module")
def stepped() -> tuple[FFN, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    gate, up, down = (0.25 * torch.randn(size, generator=generator) for size in (512, 512, 128))
    problem = testing.make("skew29", 300, 128, 512, device="cpu")
    biases = {"b_gate": gate.to(BF16), "b_up": up.to(BF16), "b_down": down.to(BF16)}
    problem = testing.off_kinks(problem._replace(**biases))
    return problem, testing.real_upstream(problem)


@GATED
def test_gradients_of_the_layers(stepped: tuple[FFN, torch.Tensor], gated: bool) -> None:
    """They are within budget; dense PyTorch's own errors are reported right."""
    problem, dy = stepped
    for options in ({}, {"strategy": "union", "compression": 2}):
        found = testing.sparse_gradients(problem, dy, 0.25, gated=gated, **options)
        for name, comparison in testing.compare_gradients(problem, dy, found, 0.25, gated=gated).items():
            assert comparison.ok, f"{name}: {comparison}"
            assert 1e-4 < comparison.dense.frobenius < 1e-2
            assert (comparison.budget == testing.BUDGET) != name.startswith("b_")


def without_l1(problem: FFN, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    return testing.sparse_gradients(problem, dy)


def with_a_neuron_scaled(problem: FFN, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """One gradient is 4 % off for a neuron of few tokens: the worst row shows it."""
    gradients = testing.sparse_gradients(problem, dy, 0.25)
    sizes = gradients["w_up"].float().norm(dim=1)
    gradients["w_up"][sizes.where(sizes > 0.1 * sizes.mean(), math.inf).argmin()] *= 1.04
    return gradients


def with_a_nan(problem: FFN, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    gradients = testing.sparse_gradients(problem, dy, 0.25)
    gradients["b_gate"][3] = math.nan
    return gradients


@pytest.mark.parametrize("planted", [without_l1, with_a_neuron_scaled, with_a_nan])
def test_planted_errors_of_gradients_are_over_budget(stepped: tuple[FFN, torch.Tensor], planted: Any) -> None:
    problem, dy = stepped
    compared = testing.compare_gradients(problem, dy, planted(problem, dy), 0.25)
    assert not all(comparison.ok for comparison in compared.values())


@pytest.mark.parametrize(("gated", "density", "dtype"), [(True, 0.1, BF16), (False, 1, FP16)])
def test_exact_gradients(gated: bool, density: float, dtype: torch.dtype) -> None:
    """They equal the layers' bit by bit, and autograd's where nothing is rounded."""
    problem = testing.integer_problem(70, 24, 136, density=density, biases="gate up down", dtype=dtype)
    dy = testing.integer_upstream(problem)
    assert int((dy != 0).sum(1).max()) <= 6
    right = testing.exact_gradients(problem, dy, -2.0, gated=gated)
    found = testing.sparse_gradients(problem, dy, -2.0, gated=gated, strategy="union")
    assert found.keys() == right.keys()
    for name, gradient in found.items():
        testing.assert_same(gradient, right[name].float().to(dtype), name)
    wide = problem.map(torch.Tensor.double)
    for name, gradient in testing.exact_gradients(wide, dy.double(), -2.0, gated=gated).items():
        assert torch.equal(gradient, testing.float64_gradients(problem, dy, -2.0, gated=gated)[name])


def test_inexact_gradients_are_refused() -> None:
    problem = testing.integer_problem(70, 24, 136, density=1)
    dy = testing.integer_upstream(problem)
    with pytest.raises(ValueError, match="2\\^24"):
        testing.exact_gradients(problem, dy * 4096)
    with pytest.raises(ValueError, match="up projections"):
        testing.exact_gradients(problem._replace(w_up=problem.w_up * 33), dy)


# Bits


def test_assert_same() -> None:
    ours = torch.tensor([0.0, math.nan, 1.0])
    testing.assert_same(ours, torch.tensor([-0.0, math.nan, 1.0]))
    for other in ([0.0, 0.0, 1.0], [0.0, math.nan, 1.0000001]):
        with pytest.raises(AssertionError, match="things"):
            testing.assert_same(ours, torch.tensor(other), "things")
    with pytest.raises(AssertionError):
        testing.assert_same(ours, ours.double())


def test_assert_packed_same() -> None:
    """Every defined bit counts; undefined bits and the bits of a NaN do not."""
    problem = testing.integer_problem(66, 64, 264, density=0.12)
    problem.x[3] = math.nan
    n, cap = 264, 31
    expected = ops.gate_pack(problem.x, problem.w_gate, None, 8)
    table = expected[0].view(66, 2, 32)
    spilled = int((table[4:, 0, 0] > cap).nonzero()[0]) + 4
    kept = int((table[4:, 0, 0] <= cap).nonzero()[0]) + 4

    def damaged(which: int, index: tuple[int, ...], value: float) -> tuple[torch.Tensor, ...]:
        packed = tuple(t.clone() for t in expected)
        packed[which].view(*(66, 2, (32, 256)[which]) if which < 2 else (9, 2, 2))[index] = value
        return packed

    nan_word = int(table[3, 0, 1])
    for harmless in (
        damaged(0, (3, 0, 1), nan_word ^ 1 << 16),  # another NaN
        damaged(1, (kept, 0, 5), 77),  # a row-tile that is not spilled
        damaged(1, (3, 1, 9), 77),  # a neuron past the last
    ):
        testing.assert_packed_same(harmless, expected, n, 8)
    for harmful in (
        damaged(0, (kept, 0, 0), int(table[kept, 0, 0]) + 1),
        damaged(0, (kept, 0, 1), int(table[kept, 0, 1]) ^ 1),
        damaged(0, (kept, 0, 1), int(table[kept, 0, 1]) ^ 1 << 16),
        damaged(0, (kept, 1, 31), 1),
        damaged(0, (3, 0, 1), nan_word + 1),
        damaged(1, (spilled, 0, 5), 77),
        damaged(2, (1, 1, 0), 999),
        damaged(2, (0, 0, 1), 999),
    ):
        with pytest.raises(AssertionError):
            testing.assert_packed_same(harmful, expected, n, 8)


@GATED
def test_assert_hybrid_same(gated: bool) -> None:
    """Every defined part counts, by the comparison of Cases; what lies behind the entries does not."""
    problem = testing.integer_problem(130, 24, 264, density=0.1)
    expected = ops.hybrid_forward(*(problem if gated else problem._replace(w_up=None)), 8)[3]
    total = int(hybrid.sizes(expected, 130)[-1])
    for which, index, counts in ((0, total - 1, True), (0, total, False), (3, -1, True), (4, 5, True)):
        damaged = expected.clone()
        hybrid.parts(damaged, 130, 264)[which][index] += 1
        with pytest.raises(AssertionError) if counts else contextlib.nullcontext():
            testing.assert_hybrid_same(damaged, expected, 130, 264, gated)


def test_poisoned_fills_every_output() -> None:
    """Outputs of the first call are filled, scalars and empty ones too."""
    calls: list[tuple[torch.Tensor, ...]] = []

    def call() -> tuple[torch.Tensor, ...]:
        calls.append((torch.zeros(()), torch.zeros(2, 3, dtype=BF16), torch.zeros(0)))
        return calls[-1]

    assert testing.poisoned(call) is calls[1]
    assert all(bool(t.isnan().all()) for t in calls[0])
    assert not any(bool(t.any()) for t in calls[1])
