"""Strategy "proven": rows rounded to nearest, and a bound that no data exceed, whatever the key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_screen import BF16, HOSTILE, SIZES, gaussian
from torch import Tensor

import twell
from twell import ops, reference, testing
from twell._runtime import screen

ROWS = pytest.mark.parametrize("rows", HOSTILE, ids=lambda f: f.__name__)


def quantized(x: Tensor, w: Tensor) -> tuple[reference.Quantized, reference.Quantized]:
    return reference.quantize_gate(x, False, True), reference.quantize_gate(w, True, True)


def errors(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """How far q_x . q_w is below the product in float64, in its units, and the bound, for rows that are screened."""
    of_x, of_w = quantized(x, w)
    x, *of_x = (t[of_x[2].isfinite() & (of_x[2] > 0)] for t in (x, *of_x))  # type: ignore[assignment]
    w, *of_w = (t[of_w[2].isfinite() & (of_w[2] > 0)] for t in (w, *of_w))  # type: ignore[assignment]
    k = x.shape[1]
    units = screen.rotation_block(k) / (of_x[1].double()[:, None] * of_w[1].double())
    error = (x.double() @ w.double().t()) * units - of_x[0].double() @ of_w[0].double().t()
    return error, reference.screen_bound(of_x[2], of_w[2], k, nearest=True)


def half_steps(r: int, k: int) -> Tensor:
    """Rows whose rotation is -126.5 steps in every column: each is rounded up, by a half."""
    rows = torch.zeros(r, k)
    _, own, whole = screen.sign_bits(0)
    sign = 1 - 2 * ((screen.words(1, screen.SIGNS)[0] >> own ^ screen.words(1, screen.SIGNS)[0] >> whole) & 1)
    rows[:, 0] = -sign * 2.0 ** torch.arange(r).float()
    return rows


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("weights", HOSTILE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("tokens", HOSTILE, ids=lambda f: f.__name__)
def test_the_bound_holds_on_hostile_data(tokens: Callable[..., Tensor], weights: Callable[..., Tensor], k: int) -> None:
    torch.manual_seed(k)
    error, bound = errors(tokens(24, k).to(BF16), weights(40, k).to(BF16))
    assert error.numel()
    assert (error.abs() / bound).max() <= 1


@pytest.mark.parametrize("k", [8, 64, 1024, 2048])
def test_the_bound_is_reached(k: int) -> None:
    """All errors are a half, and of one sign: dithers would make them small, and their bound is exceeded."""
    x = half_steps(4, k).to(BF16)
    (q, _, spread, _), _ = quantized(x, x)
    assert (q == -126).all()
    error, bound = errors(x, x)
    assert (error <= bound).all()
    # the rest is for roundings
    assert (error > 0.95 * bound).all() or k < 64
    assert (error > reference.screen_bound(spread, spread, k)).all() or k < 64


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("k", SIZES[:4])
@ROWS
def test_no_gate_is_missed(rows: Callable[..., Tensor], k: int, dtype: torch.dtype) -> None:
    """Gates of both signs, near to zero or not, with and without a bias that nearly cancels the product."""
    torch.manual_seed(k)
    x, w = rows(48, k).to(dtype), gaussian(96, k).to(dtype)
    product = (x.float() @ w.float().t()).nan_to_num(0, 0, 0)
    for bias in (None, (-product.median(0)[0]).to(dtype), torch.full((96,), 2.0**-24).to(dtype)):
        gate = reference.gate(x, w, bias)
        assert not ((gate != 0) & ~reference.gate_screen(*quantized(x, w), bias, nearest=True)).any()


def test_gates_that_dithers_would_miss_are_candidates() -> None:
    """The product in int8 is 1 % too small, which a bias nearly cancels: the gate is positive."""
    k = 2048
    x = half_steps(1, k).to(BF16)
    bias = (-(x.float() @ x.float().t())[0] * 0.997).to(BF16)
    assert (reference.gate(x, x, bias) > 0).all()
    of_x, of_w = quantized(x, x)
    assert reference.gate_screen(of_x, of_w, bias, nearest=True).all()
    # the other bound does not hold for rows without dithers
    assert not reference.gate_screen(of_x, (*of_w[:3], of_w[3] + screen.dither_product(k)), bias).any()


def test_gates_far_below_zero_are_no_candidates() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(128, 2048).to(BF16), torch.randn(512, 2048).to(BF16)
    bias = torch.full((512,), -110.0).to(BF16)
    gate = reference.gate(x, w, bias)
    proven = reference.gate_screen(*quantized(x, w), bias, nearest=True)
    dithered = reference.gate_screen(reference.quantize_gate(x, False), reference.quantize_gate(w, True), bias)
    assert 0 < (gate != 0).sum() <= dithered.sum() < proven.sum() < 0.5 * proven.numel()


def test_rows_that_are_not_screened() -> None:
    """Zero rows are decided by the bias alone; every gate of a row that is not finite, tiny or huge is a candidate."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 64).to(BF16), (torch.randn(16, 64) * 1e-3).to(BF16)
    x[1], w[1] = 0, 0
    x[2, 5], x[3, 0], x[4, 1], x[5] = torch.nan, -torch.inf, 3e38, 1e-30
    w[2, 5], w[3, 0], w[4, 1], w[5] = torch.nan, torch.inf, -3e38, -1e-38
    special, plain = [2, 3, 4, 5], [i for i in range(16) if i not in (2, 3, 4, 5)]
    for value, of_zero in ((-1e4, False), (0.0, False), (1e-40, True), (1.0, True), (torch.nan, True)):
        bias = torch.full((16,), value, dtype=BF16)
        candidates = reference.gate_screen(*quantized(x, w), bias, nearest=True)
        assert candidates[special].all()
        assert candidates[:, special].all()
        assert (candidates[1, plain] == of_zero).all()
        assert (candidates[[0, 1, 6, 7], 1] == of_zero).all()


@pytest.mark.parametrize("k", SIZES)
def test_the_kernels_form_of_the_bound_is_larger_but_little(k: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, k).to(BF16), torch.randn(64, k).to(BF16)
    x[:32, 0] *= 100
    (_, *of_x), (_, sw, uw, _) = quantized(x, w)
    a, b, _ = reference.token_terms(*of_x, k, nearest=True)  # type: ignore[misc]
    v, _ = reference.neuron_terms(sw, uw, None, k)
    ratio = (a[:, None] + b[:, None] * v) / reference.screen_bound(of_x[1], uw, k, nearest=True)
    assert ratio.min() > 1
    assert ratio.max() < 1.2
    # the largest of few columns is nearer than four deviations
    assert ratio[32:].mean() < (1.02 if k > 72 else 1.06)


@ROWS
def test_values_are_rounded_to_nearest(rows: Callable[..., Tensor]) -> None:
    torch.manual_seed(1)
    matrix = rows(64, 896).to(BF16)
    q, scale, spread, offset = reference.quantize_gate(matrix, True, True)
    ordinary = spread.isfinite() & (spread > 0)
    exact = reference.rotate(matrix).double() / scale.double()[:, None]
    assert ((q - exact).abs()[ordinary] <= 0.5 + 2.0**-16).all()
    assert q.abs().max() <= 127
    assert not offset.any()


def test_operators_take_the_flag() -> None:
    p = testing.integer_problem(130, 72, 520, density=0.02)
    of_x, of_w = ops.quantize_gate(p.x, False, True), ops.quantize_gate(p.w_gate, True, True)
    torch.library.opcheck(ops.quantize_gate, (p.x, False, True))
    torch.library.opcheck(ops.gate_screen, (*of_x, *of_w, torch.empty(0, dtype=BF16), True))
    torch.library.opcheck(ops.ffn_screened, (*p, *of_w, 8, "relu", 0.0, True))
    torch.library.opcheck(ops.hybrid_forward, (*p, 8, 0, "relu", 0.0, "proven"))


@pytest.mark.parametrize("activation", [("relu", 0.0), ("relu2", 0.0), ("drelu", 0.0), ("fatrelu", 0.75)])
@pytest.mark.parametrize("biases", ["", "gate up down"])
@pytest.mark.parametrize("m", [0, 1, 130])
def test_a_proven_layer_is_that_of_union(m: int, biases: str, activation: tuple[str, float]) -> None:
    p = testing.integer_problem(m, 72, 520, density=0.02, biases=biases)
    of_w = ops.quantize_gate(p.w_gate, True, True)
    y, l1, stats, union, candidates = ops.ffn_screened(*p, *of_w, 8, *activation, True)
    expected = ops.ffn_union(*p, 8, *activation)
    assert torch.equal(y, expected[0])
    assert torch.equal(l1.sum(1), expected[1].sum(1))
    assert torch.equal(union, expected[3])
    assert torch.equal(stats[:, :, 0].sum(1), expected[2][:, :, 0].sum(1))
    assert (candidates >= union).all()


@pytest.mark.parametrize("training", [False, True])
def test_the_strategy_of_functions(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p = testing.integer_problem(130, 72, 520, density=0.02, biases="gate up down")
    seen: list[tuple[Any, ...]] = []
    for file in ("ffn", "hybrid_forward", "screened"):
        module: Any = __import__("importlib").import_module(f"twell.ops.{file}")

        def spy(*arguments: Any) -> Any:
            seen.append(arguments[1:])
            return ops.quantize_gate(*arguments)

        monkeypatch.setattr(module, "quantize_gate", spy)
    leaves = p.map(lambda t: t.detach().requires_grad_(training))
    ys = [testing.sparse_output(leaves, strategy=name) for name in ("proven", "union")]  # type: ignore[arg-type]
    assert torch.equal(*ys)
    # rows of both sides, without dithers
    assert sorted(seen) == [(False, True), (True, True)]
    if training:
        dy = testing.real_upstream(p)
        gradients = [torch.autograd.grad(y, (leaves.x, leaves.w_gate), dy, retain_graph=True) for y in ys]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_site_may_choose_it(chooses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own candidates, which are more."""
    from auto_layers import K
    from test_auto_screen import SCREENS, uneven

    from twell import _tables
    from twell.nn import SparseGatedMLP

    monkeypatch.setattr(_tables, "SHIPPED", SCREENS)
    candidates = []
    for screen_of_site, name in (("auto", "screened"), ("proven", "proven")):
        mlp = uneven(SparseGatedMLP)
        mlp.strategy = twell.AutoStrategy(screen=screen_of_site)  # type: ignore[arg-type]
        x = torch.randn(256, K, generator=torch.Generator().manual_seed(0)).to(BF16)
        with torch.no_grad():
            for _ in range(4):
                mlp(x)
        (row,) = twell.explain(mlp)
        assert row.strategy == name
        assert f"{name} time" in str(twell.explain(mlp))
        assert row.figures is not None
        candidates.append(row.figures.candidates or math.nan)
    assert candidates[0] < candidates[1] < 1
