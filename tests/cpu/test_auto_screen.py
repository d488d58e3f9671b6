"""``strategy="auto"`` with the int8 screen: when it is chosen, what counts candidates, how its costs are measured."""

import copy
import dataclasses
import sys
from typing import Any

import pytest
import torch
from auto_layers import BF16, Arrivals, K, N, layer, screened_seconds

import twell
from tests.cpu import fake_gpu
from twell import AutoStrategy, ops, testing
from twell.base.activation import RELU
from twell.choose import cards, rates
from twell.choose import site as sites
from twell.choose.measurement import Measurement
from twell.choose.plan import Route
from twell.choose.rates import Figures, Problem
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.ops import screened
from twell.ops.operands import Layer
from twell.runtime import program, specs

MODULES = pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])


def problem(m: int = 256, training: bool = False) -> Problem:
    return Problem(m, K, N, True, training)


@pytest.fixture
def screens(chooses: Arrivals, monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    """ "auto" chooses on the CPU by times that "union+screen" has, too."""
    monkeypatch.setattr(rates, "seconds", screened_seconds)
    return chooses


# The decision


@pytest.mark.parametrize("training", [False, True])
def test_decides_by_the_candidates(training: bool) -> None:
    call, few = Problem(12288, 2048, 5632, True, training), Figures(8, 0.1, None, 0.12)
    assert rates.decide(call, few).strategy == "union+screen"
    assert rates.decide(call, few._replace(candidates=0.9)).strategy == "union"
    # neurons that fire are candidates, and there are no more than neurons
    times = [rates.seconds(call, few._replace(candidates=each))["union+screen"] for each in (0.0, 0.1, 0.2, 1.0, 7.0)]
    assert times[0] == times[1] < times[2] < times[3] == times[4]
    assert times[-1] > rates.seconds(call, few)["union"]
    with pytest.raises(ValueError, match="figures must be finite and not negative, got Figures"):
        rates.seconds(call, few._replace(candidates=-0.1))
    # candidates are counted where the screen may be the fastest: not where nearly all neurons fire
    assert rates.worth_screening(call, few)
    assert not rates.worth_screening(call, Figures(2000, 1.0))
    assert not rates.worth_screening(call, None)


@pytest.mark.parametrize("current", [None, "union", "union+screen"])
def test_never_screens_without_candidates_or_kernels(current: str | None) -> None:
    figures, call = Figures(8, 0.1, None, 0.12), Problem(12288, 2048, 5632, True, False)
    portable = dataclasses.replace(cards.SHIPPED, family=specs.PORTABLE)
    for problem, known, card, screen in (
        (call, figures._replace(candidates=None), None, True),
        (call, None, None, True),
        (call, figures, None, False),
        (call._replace(training=True), figures, None, False),
        (call, figures, portable, True),
        (call._replace(float8=True), figures, None, True),
    ):
        decision = rates.decide(problem, known, current, card, screen)
        assert decision.strategy != "union+screen"
        assert "union+screen" not in decision.costs
        if screen and known is not None and known.candidates is not None:
            assert not rates.worth_screening(problem, known, card)


# Candidates


def test_a_screened_call_counts_the_lists_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, noted = fake_gpu.install(monkeypatch), []
    monkeypatch.setattr(Measurement, "counts", lambda self, *figures, **more: noted.append(more["candidates"]))
    measurement = Measurement(AutoStrategy(), problem(), 0, True)
    layer = Layer(*testing.integer_problem(300, 72, 264))
    for screen in (True, False):
        route = Route("union", screen=screen, measurement=measurement)
        sys.modules["twell.ops.ffn"].on_cuda(layer._replace(w_down=layer.w_down.t()), 8, RELU, route, False)
        assert len(noted.pop()) >= 3
        assert gpu.names().count("gate_screen") == 1
        gpu.clear()
    program.forget()


def uneven(cls: Any, firing: int = 8) -> Any:
    """A module with ordinary weights, of which some neurons fire and others are far below zero or near to it."""
    torch.manual_seed(1)
    mlp = layer(cls, firing)
    gate = mlp.gate_proj if cls is SparseGatedMLP else mlp.up_proj
    with torch.no_grad():
        gate.weight.normal_(0, 0.1)
        gate.bias.copy_(torch.where(torch.arange(N) < firing, 1.0, torch.linspace(-0.5, -9, N)))
    return mlp


@MODULES
@pytest.mark.parametrize("training", [False, True])
def test_a_layer_comes_to_screen(cls: Any, training: bool, screens: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it knows its figures it counts candidates, then it screens; y is that of "dense" all the time."""
    mlp, x = uneven(cls), torch.randn(3, 100, K).to(BF16)
    gate = mlp.gate_proj if cls is SparseGatedMLP else mlp.up_proj
    dense = copy.deepcopy(mlp)
    dense.strategy = "dense"
    ran = []
    with torch.set_grad_enabled(training):
        for _ in range(9):
            torch.testing.assert_close(mlp(x), dense(x), rtol=2e-2, atol=2e-2)
            ran.append(twell.explain(mlp).rows[0].strategy)
        # call 0 has no figures, call 1 no candidates yet
        assert "union+screen" not in ran[:2]
        assert set(ran[2:]) == {"union+screen"}
        (row,) = twell.explain(mlp)
        listed = screened.count(x.view(300, K), gate.weight.detach(), gate.bias.detach())
        assert row.figures is not None
        assert row.figures.candidates == listed[:2].sum().item() / (2 * N)
        assert row.figures.candidates > row.figures.union > 8 / N  # type: ignore[operator]
        # with the other counts, one transfer for each call that measures
        assert len(screens.sent) == 5
        # switched off, it forgets the choice at once
        mlp.screen = "off"
        for _ in range(9):
            mlp(x)
        assert twell.explain(mlp).rows[0].strategy in ("row", "union")


@pytest.mark.parametrize("screen", ["off", "auto"])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_counted_in_vain(
    screen: Any, training: bool, chooses: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the table has no times of the screen, or the layer may not screen."""
    if screen == "off":
        monkeypatch.setattr(rates, "seconds", screened_seconds)
    monkeypatch.setattr(screened, "count", lambda *_: pytest.fail("counted candidates"))
    mlp, x = uneven(SparseGatedMLP), torch.randn(256, K).to(BF16)
    mlp.screen = screen
    with torch.set_grad_enabled(training):
        for _ in range(9):
            mlp(x)
    (row,) = twell.explain(mlp)
    assert row.calls == 9
    assert row.figures is not None
    assert row.figures.candidates is None
    assert row.strategy in ("row", "union")


def test_compiled_training_screens_as_calls_did_until_that_is_off(screens: Arrivals, fresh_dynamo: None) -> None:
    mlp, x = uneven(SparseGatedMLP), torch.randn(512, K).to(BF16)
    for _ in range(3):
        mlp(x)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), mlp(x))
    for screen, expected in (("auto", "union+screen"), ("off", "union")):
        mlp.screen = screen
        compiled(x)
        assert [row.strategy for row in twell.explain(mlp) if row.graph == "compiled"] == [expected]


def test_a_loaded_program_screens_only_if_its_layer_might(screens: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no site is known, as in another process, the operator makes one."""
    p = testing.integer_problem(256, K, N)
    for screen, expected in ((False, "off"), (True, "auto")):
        monkeypatch.setattr(sites, "_SITES", {})
        ops.ffn(*p, 8, "auto", p.w_gate, screen=screen)
        assert sites.site_of(p.w_gate, True).screen == expected
