"""``strategy="auto"`` with the int8 screen: when it is chosen, what counts candidates, how its costs are measured."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import re
from typing import Any

import pytest
import torch
from auto_layers import BF16, COSTS, TABLE, Arrivals, K, N, layer
from torch._subclasses.fake_tensor import FakeTensorMode

import twell
from profiling import held_out
from twell import _auto, _tables, ops, testing, tuning
from twell._runtime import device, specs
from twell.commands import analyze, prediction, sparsity, timing, tune
from twell.commands.saved_model import WatchedLayer
from twell.nn import SparseGatedMLP, SparseMLP
from twell.ops import screened
from twell.tuning import Figures, Problem

MODULES = pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
# the fastest if the candidates are the union, and slower than "row" if they are all neurons
SCREENED = {
    key: {m: {**entry, "screened": (max(entry["union"][0] - 0.25, 0.0), 0.2, 1.0, 0.45)} for m, entry in nodes.items()}
    for key, nodes in COSTS.items()
}
SCREENS = _tables.Table(SCREENED, "a GPU", "2026-11-22")  # type: ignore[arg-type]


def problem(m: int = 256, training: bool = False) -> Problem:
    return Problem(m, K, N, True, training)


@pytest.fixture
def screens(chooses: Arrivals, monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    """ "auto" chooses on the CPU by a table that has times of "screened"."""
    monkeypatch.setattr(_tables, "SHIPPED", SCREENS)
    return chooses


# The decision


@pytest.mark.parametrize("training", [False, True])
def test_decides_by_the_candidates(training: bool) -> None:
    call, few, many = problem(training=training), Figures(8, 0.3, None, 0.31), Figures(8, 0.3, None, 0.9)
    assert tuning.decide(call, few, None, SCREENS).strategy == "screened"
    assert tuning.decide(call, many, None, SCREENS).strategy != "screened"
    costs = tuning.costs(call, few, SCREENS)
    base = SCREENED[training, True, K, N][1]["screened"][0]
    assert costs["screened"] == pytest.approx(base + 0.2 * 0.3 + 8 / N + 0.45 * 0.31)


def test_a_screen_that_lists_all_neurons_saves_nothing() -> None:
    every = Figures(1408, 1.0, None, 1.0)
    for (training, gated, k, n), nodes in _tables.SHIPPED.costs.items():
        for m in nodes:
            costs = tuning.costs(Problem(m, k, n, gated, training), every)
            assert costs.get("screened", math.inf) >= costs.get("union", 0)


@pytest.mark.parametrize("current", [None, "union", "screened"])
def test_never_screens_without_times_candidates_or_kernels(current: str | None) -> None:
    figures = Figures(8, 0.3, None, 0.3)
    for table, known, screen in (
        (TABLE, figures, True),
        (SCREENS, figures._replace(candidates=None), True),
        (SCREENS, None, True),
        (SCREENS, figures, False),
        (dataclasses.replace(SCREENS, screens=False), figures, True),
        (dataclasses.replace(SCREENS, union_neurons=N - 8), figures, True),
    ):
        for call in (problem(), problem(training=True)):
            decision = tuning.decide(call, known, current, table, screen)
            assert decision.strategy != "screened"
            assert "screened" not in decision.costs
            if screen and (known is None or known.candidates is not None):
                assert not tuning.worth_screening(call, known, table)


def test_other_gpus_have_no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "name", lambda index: "a GPU")
    monkeypatch.setattr(device, "capability", lambda index: (8, 0))
    monkeypatch.setattr(_tables, "_of_gpu", lambda name, fill: SCREENS)
    _tables._on.cache_clear()
    try:
        assert not _tables.in_use(torch.device("cuda", 0)).screens
    finally:
        _tables._on.cache_clear()


def test_explain_says_that_calls_raise_without_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "family", lambda index: specs.PORTABLE)
    monkeypatch.setattr(device, "capability", lambda index: (8, 0))
    with FakeTensorMode():
        mlp = SparseGatedMLP(K, N, dtype=BF16, device="meta")
        for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            linear.weight = torch.nn.Parameter(torch.empty_like(linear.weight, device="cuda"))
        mlp.strategy = "screened"
        (row,) = twell.explain(mlp)
        assert (row.kind, row.strategy) == ("any", "none")
        said = 'calls raise: strategy "screened" needs compute capability 9.0, got 8.0 on cuda:0; use "row"'
        assert row.reason.startswith(said)
        monkeypatch.setattr(tuning, "family", lambda index: specs.SM90)
        (row,) = twell.explain(mlp)
        assert row.strategy == "screened"
        assert row.reason.startswith("it was named")


def test_neurons_that_fire_are_candidates() -> None:
    call = problem()
    assert tuning.factors(call, Figures(8, 0.3, None, 0.1), "screened")[3] == 0.3
    assert tuning.factors(call, Figures(8, 0.3, None, 7.0), "screened")[3] == 1
    assert tuning.factors(call, Figures(8, 0.3, 9, 0.4), "union") == (1, *tuning.shares(call, Figures(8, 0.3, 9)))
    with pytest.raises(ValueError, match="candidates must be known for the cost of screened, got Figures"):
        tuning.factors(call, Figures(8, 0.3), "screened")
    with pytest.raises(ValueError, match="figures must be finite and not negative, got Figures"):
        tuning.costs(call, Figures(8, 0.3, None, -0.1), SCREENS)


def test_counts_where_the_screen_may_be_the_fastest() -> None:
    assert tuning.worth_screening(problem(), Figures(8, 0.3), SCREENS)
    assert not tuning.worth_screening(problem(), None, SCREENS)
    # nearly all neurons fire
    assert not tuning.worth_screening(problem(), Figures(200, 1.0), SCREENS)


# Candidates


@pytest.mark.parametrize("m", [0, 1, 128, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_the_count_is_that_of_the_bits(m: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(m, 72).to(BF16), torch.randn(520, 72).to(BF16)
    b = (torch.randn(520) * 12 - 30).to(BF16) if bias else None
    found = screened.count(x, w, b)
    expected = screened.candidates_on_cpu(x, w, b, ops.quantize_gate(w, True)).sum(1)
    assert found.tolist() == expected.tolist()
    assert m == 0 or not bias or 0 < found.min() <= found.max() < 520


def uneven(cls: Any, firing: int = 8) -> Any:
    """A module with ordinary weights, of which some neurons fire and others are far below zero or near to it."""
    torch.manual_seed(1)
    mlp = layer(cls, firing)
    gate = mlp.gate_proj if cls is SparseGatedMLP else mlp.up_proj
    with torch.no_grad():
        gate.weight.normal_(0, 0.1)
        gate.bias.copy_(torch.where(torch.arange(N) < firing, 1.0, torch.linspace(-0.5, -9, N)))
    return mlp


def first_of(mlp: Any) -> Any:
    return mlp.gate_proj if isinstance(mlp, SparseGatedMLP) else mlp.up_proj


@MODULES
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lead", [(256,), (3, 100)])
def test_a_layer_comes_to_screen(cls: Any, training: bool, lead: tuple[int, ...], screens: Arrivals) -> None:
    """Once it knows its figures it counts candidates, then it screens; y is that of "dense" all the time."""
    mlp, x = uneven(cls), torch.randn(*lead, K).to(BF16)
    dense = copy.deepcopy(mlp)
    dense.strategy = "dense"
    ran, m = [], x.shape[:-1].numel()
    with torch.set_grad_enabled(training):
        for _ in range(9):
            torch.testing.assert_close(mlp(x), dense(x), rtol=2e-2, atol=2e-2)
            ran.append(twell.explain(mlp).rows[0].strategy)
    # call 0 has no figures, call 1 no candidates yet
    assert "screened" not in ran[:2]
    assert set(ran[2:]) == {"screened"}
    (row,) = twell.explain(mlp)
    w, b = first_of(mlp).weight.detach(), first_of(mlp).bias.detach()
    listed = screened.count(x.view(m, K), w, b)
    assert row.figures is not None
    assert row.figures.candidates == listed[: m // 128].sum().item() / (m // 128 * N)
    assert row.figures.candidates > row.figures.union > 8 / N  # type: ignore[operator]
    assert "screened" in row.costs
    # with the other counts, one transfer for each call that measures
    assert len(screens.sent) == 5
    printed = str(twell.explain(mlp)).splitlines()[0].split("  ")
    assert {"candidates", "screened time"} <= {cell.strip() for cell in printed}


@MODULES
def test_screened_calls_pass_on_the_lists_of_their_own(
    cls: Any, screens: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inference that screens does not screen twice."""
    mlp, x = uneven(cls), torch.randn(256, K).to(BF16)
    with torch.no_grad():
        for _ in range(3):
            mlp(x)
        before = twell.explain(mlp).rows[0].figures
        monkeypatch.setattr(screened, "gate_screen", lambda *_: pytest.fail("screened twice"))
        monkeypatch.setattr(screened, "candidates_on_cpu", lambda *_: torch.ones(2, N, dtype=torch.bool))
        for _ in range(2):
            mlp(x)
    (row,) = twell.explain(mlp)
    assert before is not None
    assert before.candidates is not None
    assert before.candidates < 1
    assert row.figures is not None
    assert row.figures.candidates == 1


@pytest.mark.parametrize("screen", ["off", "auto"])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_counted_in_vain(
    screen: Any, training: bool, chooses: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the table has no times of the screen, or the site may not screen."""
    monkeypatch.setattr(_tables, "SHIPPED", SCREENS if screen == "off" else TABLE)
    monkeypatch.setattr(screened, "gate_screen", lambda *_: pytest.fail("counted candidates"))
    mlp, x = uneven(SparseGatedMLP), torch.randn(256, K).to(BF16)
    mlp.strategy = twell.AutoStrategy(screen=screen)
    with torch.set_grad_enabled(training):
        for _ in range(9):
            mlp(x)
    (row,) = twell.explain(mlp)
    assert row.calls == 9
    assert row.figures is not None
    assert row.figures.candidates is None
    assert row.strategy in ("row", "union")
    assert "candidates" not in str(twell.explain(mlp))
    assert "screened" not in str(twell.explain(mlp))


def test_compiled_training_screens_as_calls_did(screens: Arrivals, fresh_dynamo: None) -> None:
    mlp, x = uneven(SparseGatedMLP), torch.randn(256, K).to(BF16)
    for _ in range(3):
        mlp(x)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    seen = [row.strategy for row in twell.explain(mlp) if row.graph == "compiled"]
    assert seen == ["screened"]
    mlp.strategy = "screened"
    assert torch.equal(y, mlp(x))


# The argument


@pytest.mark.parametrize("screen", ["on", "", None, True, "screened", "proven"])
def test_the_screen_is_checked(screen: Any) -> None:
    with pytest.raises(ValueError, match=f'screen must be "auto" or "off", got {re.escape(repr(screen))}'):
        twell.AutoStrategy(screen=screen)


def test_copies_keep_the_screen() -> None:
    site = twell.AutoStrategy(period=4, screen="off")
    assert repr(site) == "AutoStrategy(period=4, screen='off')"
    assert repr(twell.AutoStrategy()) == "AutoStrategy(period=64)"
    for other in (copy.copy(site), copy.deepcopy(site), pickle.loads(pickle.dumps(site))):
        assert (other.period, other.screen) == (4, "off")
    # a pickle of an earlier version
    state = site.__getstate__()
    del state["screen"]
    old = _auto.AutoStrategy.__new__(_auto.AutoStrategy)
    old.__setstate__(state)
    assert old.screen == "auto"


def test_sites_that_might_choose_proven_never_screen() -> None:
    """Of pickles of version 0.2: that strategy missed no gate. Their choices are forgotten."""
    site, call = twell.AutoStrategy(period=4), problem()
    site.choose(call)
    old = _auto.AutoStrategy.__new__(_auto.AutoStrategy)
    old.__setstate__(site.__getstate__() | {"screen": "proven"})
    assert (old.period, old.screen, old.explain()) == (4, "off", [])
    assert site.explain()


# Its costs


TRUE = (0.3, 0.4, 5.0, 0.7)


def measured(training: bool = False, m: int = 4096) -> list[dict[str, Any]]:
    """Rows of tune.py whose times of "screened" have the terms ``TRUE``."""
    rows = []
    for i, (nonzeros, union, candidates) in enumerate(
        ((29, 0.48, 0.8), (29, 0.17, 0.25), (29, 0.1, 0.15), (128, 0.26, 0.32), (14, 0.07, 0.09), (8, 0.03, 0.05))
    ):
        call, figures = Problem(m, 2048, 5632, True, training), Figures(nonzeros, union, None, candidates)
        own = sum(a * b for a, b in zip(TRUE, (1, union, nonzeros / 5632, candidates), strict=True))
        row = {**call._asdict(), **figures._asdict(), "pattern": str(i), "red": "", "dense_ms": 2.0}
        rows += [row | {"strategy": name, "relative": time} for name, time in (("union", 0.9), ("screened", own))]
    return rows


@pytest.mark.parametrize("training", [False, True])
def test_the_fit_finds_the_terms(training: bool) -> None:
    ((key, by_tokens),) = tune.fit(measured(training)).items()
    assert key == (training, True, 2048, 5632)
    assert by_tokens[4096]["screened"] == pytest.approx(TRUE, abs=2e-4)
    assert by_tokens[4096]["union"] == pytest.approx((0.9, 0, 0, 0), abs=2e-4)
    assert "choices lose 0.0%" in tune.report(tune.fit(measured(training)), measured(training))


def test_rows_of_a_screen_have_candidates() -> None:
    rows = [row | {"candidates": None} for row in measured()]
    with pytest.raises(ValueError, match="candidates of screened must be a share of the neurons, got none"):
        tune.fit(rows)
    # a file of before has none, and no such strategy
    before = [row for row in rows if row["strategy"] == "union"]
    for row in before:
        del row["candidates"]
    assert tune.measured_figures(before[0]) == Figures(29, 0.48)
    assert set(tune.fit(before)[False, True, 2048, 5632][4096]) == {"union"}


def test_written_tables_keep_the_terms() -> None:
    costs = tune.fit(measured())
    written = _tables.text_of(_tables.Table(costs, "a GPU", "2026-11-22"))
    assert _tables.parse(written).costs == costs


def test_screens_are_measured_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = problem(tune.LEAST_SCREENED - 1), problem(tune.LEAST_SCREENED)
    cpu = timing.Cpu()
    assert tune.measured_strategies(few, cpu) == ("row", "union")
    assert tune.measured_strategies(many, cpu) == ("row", "union", "screened")
    assert tune.measured_strategies(many._replace(training=True), cpu) == ("union", "screened")

    class Gpu:
        torch_device = torch.device("cuda", 0)

    for capability, expected in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        monkeypatch.setattr(device, "capability", lambda index, is_of=capability: is_of)
        assert ("screened" in tune.measured_strategies(many, Gpu())) == expected  # type: ignore[arg-type]


def test_measures_points_of_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "LEAST_SCREENED", 130)
    for training in (False, True):
        kind = "training" if training else "gated"
        (step,) = tune.plan([(K, N)], [kind], [300], ["topic"])
        drawn = tune.draw("topic", 300, K, N, torch.device("cpu")).rows(0, 300)
        rows = tune.measure_step(step, {"topic": drawn}, timing.Cpu(), 0.0)
        names = [row["strategy"] for row in rows if not row["red"]]
        assert names == [*(() if training else ("row",)), "union", "screened"]
        listed = screened.count(drawn.x[:256], drawn.w_gate, None)
        assert {row["candidates"] for row in rows} == {listed.sum().item() / (2 * N)}
        assert json.loads(json.dumps(rows)) == rows


def test_held_out_points_count_the_screen() -> None:
    call = Problem(4096, 2048, 5632, True, False)
    row = {**call._asdict(), "nonzeros": 29.0, "union": 0.1, "heaviest": 60.0, "candidates": 0.15, "red": {}}
    row |= {"pattern": {}, "row_ms": 1.0, "union_ms": 1.0, "screened_ms": 0.5, "dense_ms": 1.0}
    table = _tables.Table(tune.fit(measured()), "a GPU", "2026-11-22")
    decided = held_out.decided(row, table)
    assert (decided["auto"], decided["loss"]) == ("screened", 0)
    assert "candidates 0.150" in held_out.line(decided)
    assert "screened 0.500" in held_out.line(decided)
    assert held_out.decided({**row, "candidates": None}, table)["auto"] == "union"


def test_held_out_points_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "LEAST_SCREENED", 130)
    point = held_out.Point(Problem(130, 32, 264, True, False), testing.Workload(9.0, neuron_sigma=1.0))
    row = held_out.measure(point, timing.Cpu(), 0.0)
    assert {"row_ms", "union_ms", "screened_ms", "dense_ms"} <= row.keys()
    assert 0 < row["union"] <= row["candidates"] <= 1


# twell analyze


def test_a_tally_counts_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first tokens, as the operators do, in 16 bits whatever the model's dtype, and for the union of all."""
    monkeypatch.setattr(sparsity, "SCREENED", 384)
    mlp = uneven(SparseGatedMLP).float()
    watched = WatchedLayer("mlp", 0, mlp, mlp.gate_proj, True, 8)
    # the last tokens, which the screen does not see, fire many more neurons
    batches = [torch.randn(300, K), torch.randn(200, K), 5 * torch.randn(128, K).abs()]
    counts = sparsity.Tally(N, 8, torch.device("cpu"))
    with torch.no_grad():
        for x in batches:
            counts.screen(x, mlp.gate_proj, watched.activation)
            for rows, pattern in sparsity.patterns(x, mlp.gate_proj):
                counts.add(pattern, torch.zeros(len(x), dtype=torch.bool)[rows])
    report = counts.report(watched)
    w, b = mlp.gate_proj.weight.detach().to(BF16), mlp.gate_proj.bias.detach().to(BF16)
    listed = sum(int(screened.count(x[:m].to(BF16), w, b).sum()) for x, m in zip(batches, (256, 128)))
    seen = torch.cat((batches[0][:256], batches[1][:128]))
    with torch.no_grad():
        firing = int((mlp.gate_proj(seen) > 0).view(3, 128, N).any(1).sum())
    assert 0 < firing < listed < 3 * N
    silent = (listed - firing) / (3 * N - firing)
    assert report.candidates == pytest.approx(report.unions[128] + (1 - report.unions[128]) * silent)
    assert firing / (3 * N) < report.unions[128] < report.candidates
    assert report.figures.candidates == report.candidates
    (row,) = analyze.rows([report], [[]])
    assert row["candidates"] == report.candidates
    assert "candidates" in analyze.COLUMNS


def test_predictions_say_where_the_screen_pays() -> None:
    report = sparsity.LayerSparsity(
        *("mlp", 0, True, K, N, 8, 512, 8.0, 8, 9, 9, 8.0, 0.0, 0.0, 0.0, 0),
        unions={128: 0.3},
        hottest={},
        candidates=0.31,
    )
    assert prediction.predict(report, prediction.Call(256, False), SCREENS).strategy == "screened"
    assert prediction.predict(report, prediction.Call(256, False), TABLE).strategy in ("row", "union")
