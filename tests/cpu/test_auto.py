"""``strategy="auto"``: the decision, the memory of a call site, what graphs and checkpoints see of it, the table.

On the CPU there is no choice. ``chooses`` lets it pass for a GPU, with a transfer that arrives when the test says so.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import pickle
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import twell
from twell import _auto, _tables, testing, tuning
from twell._runtime import device, geometry, log
from twell.nn import SparseGatedMLP, SparseMLP, set_down_layout
from twell.tuning import Figures, Problem

BF16 = torch.bfloat16
K, N = 32, 264
MODULES = pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
SPARSE, DENSE = Figures(10, 0.05), Figures(3000, 1.0)


def problem(m: int = 16384, training: bool = False, gated: bool = True, k: int = 2048, n: int = 5632) -> Problem:
    return Problem(m, k, n, gated, training)


class Arrivals:
    """A stand-in for ``_auto.Transfer``: values arrive when ``open`` is true; it counts the queries."""

    open = True
    asked = 0
    sent: list[list[int]]

    def __init__(self) -> None:
        self.sent = []

    def __call__(self, values: Tensor) -> Any:
        arrivals, numbers = self, values.tolist()
        self.sent.append(numbers)

        class Sent:
            def arrived(self) -> bool:
                arrivals.asked += 1
                return arrivals.open

            def read(self) -> list[int]:
                assert arrivals.open, "read before arrival"
                return numbers

        return Sent()


@pytest.fixture
def chooses(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    """Let the CPU choose as a GPU does, from a table in which the sizes of these tests matter."""

    def free(kind: str, index: int | None) -> str:
        return ""

    free._dynamo_marked_constant = True  # type: ignore[attr-defined]
    arrivals = Arrivals()
    monkeypatch.setattr(_auto, "forced", free)
    monkeypatch.setattr(_auto, "Transfer", arrivals)
    table = {
        (False, True, K, N): {1: {"row": (0.3, 0.0, 4.0, 0.0), "union": (0.4, 0.5, 1.0, 0.0)}},
        (True, True, K, N): {1: {"union": (0.2, 0.6, 1.0, 0.0)}},
    }
    monkeypatch.setattr(_tables, "SHIPPED", _tables.Table(table, "a GPU", "2026-11-22"))
    return arrivals


def layer(cls: Any = SparseGatedMLP, firing: int = 8) -> Any:
    """A module whose biases make the first ``firing`` neurons fire for every token."""
    mlp = cls(K, N, bias=True, dtype=BF16)
    # as measured times are
    set_down_layout(mlp, "rows")
    set_firing(mlp, firing)
    return mlp


def set_firing(mlp: Any, firing: int) -> None:
    gate = mlp.gate_proj if isinstance(mlp, SparseGatedMLP) else mlp.up_proj
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.copy_(torch.where(torch.arange(N) < firing, 1.0, -1.0))


def strategies_of(mlp: Any) -> list[tuple[str, str]]:
    return [(row.kind, row.strategy) for row in twell.explain(mlp)]


# The decision


def test_decides_by_the_cheapest_prediction() -> None:
    for figures in (SPARSE, Figures(30, 0.5), Figures(130, 0.26), DENSE, Figures(0, 0)):
        for training in (False, True):
            decision = tuning.decide(problem(training=training), figures, None)
            assert decision.costs == tuning.costs(problem(training=training), figures)
            if "hold" not in decision.reason:
                assert decision.costs[decision.strategy] == min(decision.costs.values())
            assert decision.costs["dense"] == 1
    assert tuning.decide(problem(), DENSE, None).strategy == "dense"
    assert tuning.decide(problem(1), SPARSE, None).strategy == "row"
    assert tuning.decide(problem(training=True), SPARSE, None).strategy == "union"


def test_the_decision_is_a_pure_function() -> None:
    arguments = [
        (problem(m, training), figures, current)
        for m in (1, 300, 16384)
        for training in (False, True)
        for figures in (None, SPARSE, DENSE)
        for current in (None, "union", "dense")
    ]
    first = [tuning.decide(*each) for each in arguments]
    tuning._coefficients.cache_clear()
    assert [tuning.decide(*each) for each in reversed(arguments)] == first[::-1]


def test_a_change_must_promise_two_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    for row, union, current, expected in (
        (0.50, 0.492, "row", "row"),
        (0.50, 0.488, "row", "union"),
        (0.50, 0.492, "union", "union"),
        (0.50, 0.492, None, "union"),
        (0.985, 0.99, "dense", "dense"),
        (0.975, 0.99, "dense", "row"),
        (1.015, 1.2, "row", "row"),
        (1.025, 1.2, "row", "dense"),
        (0.5, 0.5, "gone", "row"),
    ):
        monkeypatch.setattr(tuning, "costs", lambda *_, r=row, u=union: {"row": r, "union": u, "dense": 1.0})
        decision = tuning.decide(problem(), SPARSE, current)
        assert decision.strategy == expected, (row, union, current)
        kept = current == expected and min(row, union, 1.0) != decision.costs[expected]
        assert decision.reason.startswith("kept") == kept


def test_the_default_holds_before_any_measurement() -> None:
    assert tuning.decide(problem(training=True), None, None)[::2] == ("dense", {})
    assert tuning.decide(problem(16384), None, None).strategy == "union"
    assert tuning.decide(problem(1), None, None).strategy == "row"
    assert tuning.decide(problem(0), None, None).strategy in ("row", "dense")
    assert "nothing measured" in tuning.decide(problem(), None, None).reason


def test_training_keeps_away_from_what_the_hybrid_format_holds() -> None:
    held = geometry.hybrid_capacity(16384, 5632) / 16384
    for share, current, expected in (
        (0.6, None, "union"),
        (0.84, "dense", "union"),
        (0.86, "dense", "dense"),
        (0.86, "union", "union"),
        (0.91, "union", "dense"),
        (3.0, "union", "dense"),
    ):
        decision = tuning.decide(problem(training=True), Figures(share * held, 0.1), current)
        assert decision.strategy == expected, (share, current)
    assert "156" in decision.reason
    # a forward pass without gradients has no such limit
    assert tuning.decide(problem(), Figures(0.75 * held, 0.1), "union").strategy == "union"


def test_training_keeps_room_for_what_recent_calls_needed() -> None:
    many, few = problem(training=True), problem(512, training=True)
    assert tuning.held(many, (29.3,)) == 48
    assert tuning.held(many, (29.3, 70.0, 12.0)) == 112
    assert tuning.held(many, (0.0,)) == 8
    # nothing measured, few tokens, no gradients: as much as there may be
    assert tuning.held(many, ()) == tuning.held(few, (29.3,)) == tuning.held(problem(), (29.3,)) == 0
    # never more than without figures
    assert geometry.hybrid_capacity(16384, 5632, tuning.held(many, (911.0,))) == geometry.hybrid_capacity(16384, 5632)


def test_room_follows_the_measurements() -> None:
    """It grows with the first larger one, and shrinks after eight smaller ones."""
    site, call = _auto.AutoStrategy(period=1), problem(training=True)

    def room_after(nonzeros: float) -> int:
        site.observe(call, Figures(nonzeros, 0.1))
        site.choose(call)
        return site._peek(call, record=False)[1]

    site.choose(call)
    assert site._peek(call, record=False)[1] == 0
    assert room_after(40) == 64
    assert room_after(80) == 120
    assert [room_after(20) for _ in range(8)] == 7 * [120] + [32]
    # the data of a captured graph may become denser
    assert site._peek(call, record=True)[1] == 0
    assert copy.deepcopy(site)._peek(call, record=False)[1] == 32


def test_few_tokens_have_a_choice_for_each_number_of_them() -> None:
    """Also between powers of two, where the figures are the same; graphs of many sizes are captured in a row."""
    site, figures = _auto.AutoStrategy(), Figures(34, None, 92)
    sizes = (72, 80, 96, 128)
    expected = {m: tuning.decide(problem(m), figures, "row").strategy for m in sizes}
    assert set(expected.values()) == {"row", "dense"}
    site.observe(problem(72), figures)
    # calls 0, 1 and 2 decide anew, the others do not
    for _ in range(3):
        assert site.choose(problem(72)).strategy == "row"
    for m in (*sizes, *reversed(sizes)):
        assert site.choose(problem(m)).strategy == expected[m]
        assert site._peek(problem(m), record=True)[0] == expected[m]
    rows = [row for row in site.explain() if row.graph]
    assert [(row.tokens, row.strategy) for row in rows] == [("72 to 96", "row"), ("128", "dense")]
    # new figures at the next decision, for all numbers of tokens
    site.observe(problem(72), Figures(2, None, 3))
    while site.explain()[0].calls != 17:
        site.choose(problem(72))
    assert {site.choose(problem(m)).strategy for m in sizes} == {"row"}


def test_many_tokens_share_a_choice() -> None:
    for training, low in ((False, 1025), (True, 65)):
        site = _auto.AutoStrategy()
        for _ in range(3):
            first = site.choose(problem(low, training))
        assert site.choose(problem(2 * low - 2, training)) is first


def test_a_dense_layer_of_one_product_is_harder_to_beat() -> None:
    """By a few microseconds: less of a larger layer, nothing for other strategies' ranks."""
    figures = Figures(29, None, 80)
    for k, n, most in ((1024, 2816, 0.26), (2048, 5632, 0.14), (4096, 14336, 0.06)):
        for m in (1, 64, 512):
            apart, merged = (
                tuning.costs(problem(m, k=k, n=n)._replace(merged=is_one), figures) for is_one in (False, True)
            )
            ratios = {name: merged[name] / apart[name] for name in ("row", "union")}
            assert merged["dense"] == 1
            assert ratios["row"] == pytest.approx(ratios["union"])
            assert 1.01 < ratios["row"] < 1 + most


def test_the_operator_says_whether_a_dense_layer_is_one_product(
    chooses: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    begin = _auto.AutoStrategy.begin

    def spy(self: Any, *arguments: Any) -> Any:
        seen.append(arguments[-1])
        return begin(self, *arguments)

    monkeypatch.setattr(_auto.AutoStrategy, "begin", spy)
    w_gate, w_up = torch.randn(2 * N, K).to(BF16).chunk(2)
    w_down, bias = torch.randn(N, K).to(BF16), torch.zeros(N, dtype=BF16)
    for m, up, b_up in ((9, w_up, None), (9, w_up.clone(), None), (9, w_up, bias), (9, None, None), (513, w_up, None)):
        x = torch.randn(m, K).to(BF16)
        torch.ops.twell.ffn(x, w_gate, up, w_down, None, b_up, None, 8, "auto", w_gate)
    assert seen == [True, False, False, False, False]


def test_an_unknown_union_is_bounded_from_above() -> None:
    density = 29 / 5632
    bound = 1 - (1 - density) ** 128
    unknown = tuning.costs(problem(), Figures(29, None))
    assert unknown == tuning.costs(problem(), Figures(29, bound))
    assert unknown["union"] > tuning.costs(problem(), Figures(29, 0.1))["union"]
    # and so is one that more tokens had
    assert tuning.costs(problem(1), Figures(29, 0.5)) == tuning.costs(problem(1), Figures(29, None))


@pytest.mark.parametrize("name", ["fast", "", None, 3, ["row"]])
def test_names_are_checked(name: Any) -> None:
    names = '"auto", "row", "union", "screened", "invariant" or "dense"'
    with pytest.raises(ValueError, match=f"strategy must be {names}, got {re.escape(repr(name))}"):
        tuning.require_strategy(name)
    with pytest.raises(ValueError, match="strategy must be"):
        SparseMLP(K, N, strategy=name)


@pytest.mark.parametrize(
    ("period", "error", "expected"),
    [
        (0, ValueError, "an integer of at least 1"),
        (-1, ValueError, "an integer of at least 1"),
        (3, ValueError, "a power of two"),
        (2.0, TypeError, "an integer of at least 1"),
        ("64", TypeError, "an integer of at least 1"),
        (True, TypeError, "an integer of at least 1"),
    ],
)
def test_the_period_is_checked(period: Any, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=f"period must be {expected}, got {re.escape(repr(period))}"):
        twell.AutoStrategy(period=period)


# The memory of a call site


def test_calls_are_measured_on_schedule() -> None:
    for period, last, expected in (
        (64, 300, [0, 1, 2, 4, 8, 16, 32, 64, 128, 192, 256]),
        (4, 13, [0, 1, 2, 4, 8, 12]),
        (1, 4, [0, 1, 2, 3]),
    ):
        site = twell.AutoStrategy(period=period)
        assert [call for call in range(last) if site._count(problem())[2]] == expected


def test_figures_count_from_the_next_scheduled_call_on() -> None:
    site = twell.AutoStrategy()
    before = [site.choose(problem()).strategy for _ in range(5)]
    site.observe(problem(), DENSE)
    after = [site.choose(problem()).strategy for _ in range(5)]
    assert before == ["union"] * 5
    assert after == ["union"] * 3 + ["dense"] * 2


def test_the_same_history_gives_the_same_choices() -> None:
    generator = torch.Generator().manual_seed(0)
    events = []
    for _ in range(400):
        m = int(torch.randint(1, 30000, (), generator=generator))
        density, union = torch.rand(2, generator=generator).tolist()
        call = problem(m, training=density > 0.5)
        events.append((call, Figures(300 * density, union if union > 0.2 else None) if union < 0.5 else None))

    def replay(site: twell.AutoStrategy) -> list[str]:
        choices = []
        for call, figures in events:
            choices.append(site.choose(call).strategy)
            if figures is not None:
                site.observe(call, figures)
        return choices

    first = replay(twell.AutoStrategy(period=4))
    assert first == replay(twell.AutoStrategy(period=4))
    assert set(first) == {"row", "union", "dense"}


def test_a_new_bucket_starts_from_the_nearest_one() -> None:
    site = twell.AutoStrategy()
    site.choose(problem(16384))
    site.observe(problem(16384), DENSE)
    site.observe(problem(16), SPARSE)
    assert site.choose(problem(9000, training=True)).strategy == "dense"
    assert site.choose(problem(8000)).strategy == "dense"
    assert site.choose(problem(8)).strategy == "row"
    # figures of inference count for training, too
    site = twell.AutoStrategy()
    site.observe(problem(16384), SPARSE)
    assert site.choose(problem(16384, training=True)).strategy == "union"


def test_another_layer_at_the_site_is_a_new_one() -> None:
    site = twell.AutoStrategy()
    site.choose(problem())
    site.observe(problem(), DENSE)
    assert site.choose(problem()).strategy == "dense"
    assert site.choose(problem(n=4096)).strategy == "union"
    assert len(site.explain()) == 1


def test_changes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    site = twell.AutoStrategy(period=1)
    with caplog.at_level(logging.INFO, "twell"):
        for figures in (SPARSE, SPARSE, DENSE, DENSE):
            site.choose(problem())
            site.observe(problem(), figures)
        site.choose(problem())
    assert [record.levelname for record in caplog.records] == ["INFO"] * 2
    started, changed = (record.getMessage() for record in caplog.records)
    assert "gated layer, K = 2048, N = 5632, inference, 16384 tokens: strategy union, nothing measured yet" in started
    assert "strategy union -> dense, saves" in changed
    assert "measured 3000.0 non-zeros per token, a union of 100.0%" in changed


@pytest.mark.parametrize("through", [copy.deepcopy, copy.copy, lambda site: pickle.loads(pickle.dumps(site))])
def test_copies_remember(through: Callable[[Any], Any], chooses: Arrivals) -> None:
    mlp, x = layer(firing=200), torch.randn(256, K).to(BF16)
    with torch.no_grad():
        mlp(x)
        mlp(x)
        chooses.open = False
    site = mlp._auto
    other = through(site)
    assert other.period == site.period
    assert other._pending == {}
    assert [row.strategy for row in other.explain()] == [row.strategy for row in site.explain()] == ["dense"]
    with torch.no_grad():
        mlp(x)
    assert [row.calls for row in other.explain()] == [2]
    whole = copy.deepcopy(mlp)
    assert whole._auto is not site
    assert [row.figures for row in twell.explain(whole)] == [row.figures for row in twell.explain(mlp)]
    assert not any("auto" in name for name in mlp.state_dict())
    assert strategies_of(pickle.loads(pickle.dumps(mlp)).to("cpu")) == strategies_of(mlp)


def test_threads_do_not_corrupt() -> None:
    site, failures = twell.AutoStrategy(period=4), []

    def work(m: int) -> None:
        try:
            for i in range(300):
                site.choose(problem(m + i % 3, training=i % 2 == 0))
                site.observe(problem(m), SPARSE if i % 5 else DENSE)
                site.explain()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(m,)) for m in (100, 100, 5000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(row.calls for row in site.explain()) == 900


# Copies of the down weight


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("training", [False, True])
def test_a_copied_down_weight_costs_its_time(training: bool, gated: bool) -> None:
    figures = Figures(10, 0.02)
    for m in (1, 64, 4096, 16384):
        laid = problem(m, training, gated)
        copied = laid._replace(down_copied=True)
        before, after = tuning.costs(laid, figures), tuning.costs(copied, figures)
        assert after.keys() == before.keys()
        assert after["dense"] == 1
        # few tokens: the cost of the weights; many: of the products
        least = 2 * (3 if gated else 2) / 4.2e12 * (3 if training else 1)
        dense = max(least, 2 * m * (3 if gated else 2) / 790e12 * (3 if training else 1))
        extra = (2 if training else 1) * 4 / tuning.COPY_BYTES / dense
        for name in before.keys() - {"dense"}:
            assert after[name] - before[name] == pytest.approx(extra)


def test_few_tokens_are_dense_where_the_down_weight_is_copied() -> None:
    for figures in (None, Figures(10, None)):
        for m in (1, 16, 64):
            laid, copied = problem(m), problem(m)._replace(down_copied=True)
            assert tuning.decide(laid, figures, None).strategy == "row"
            decision = tuning.decide(copied, figures, None)
            assert decision.strategy == "dense"
            assert "copies of the down weight outweigh row" in decision.reason
    copied = problem(16384)._replace(down_copied=True)
    assert tuning.decide(copied, SPARSE, None).strategy == "union"
    # a layer that is dense for another reason does not mention copies
    assert "copies" not in tuning.decide(copied, DENSE, None).reason


def test_a_site_decides_again_where_the_layout_changes() -> None:
    site, laid = twell.AutoStrategy(), problem(16)
    copied = laid._replace(down_copied=True)
    for _ in range(3):
        assert site.choose(laid).strategy == "row"
    assert site.choose(copied).strategy == "dense"
    assert site.choose(laid).strategy == "row"
    (row,) = site.explain()
    assert row.calls == 5


def test_graphs_know_the_layout(chooses: Arrivals, fresh_dynamo: None) -> None:
    strategies = {}
    for layout in ("rows", "linear"):
        mlp = layer(firing=8)
        set_down_layout(mlp, layout)  # type: ignore[arg-type]
        with torch.no_grad():
            torch.compile(mlp, fullgraph=True, backend="aot_eager")(torch.randn(16, K).to(BF16))
        (row,) = twell.explain(mlp).rows
        assert (row.graph, row.calls) == ("", 1)
        strategies[layout] = row.strategy
    assert strategies == {"rows": "row", "linear": "dense"}


# Calls of modules


@MODULES
def test_the_cpu_leaves_no_choice(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_auto, "Transfer", lambda _: pytest.fail("measured on the CPU"))
    mlp, x = layer(cls, 200), torch.randn(5, K).to(BF16)
    for _ in range(3):
        y = mlp(x)
    named = copy.deepcopy(mlp)
    named.strategy = "dense"
    assert torch.equal(y, named(x))
    with torch.no_grad():
        assert torch.equal(mlp(x), named(x))
    (row,) = twell.explain(mlp)
    assert (row.strategy, row.kind, row.figures) == ("dense", "any", None)
    assert "need a GPU" in row.reason
    assert not mlp._auto.explain()


@MODULES
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("firing", [0, 8, 200])
@pytest.mark.parametrize("lead", [(256,), (2, 128), (300,)])
def test_measures_what_is_there(
    cls: Any, training: bool, firing: int, lead: tuple[int, ...], chooses: Arrivals
) -> None:
    """Every strategy measures; the choice follows, and results stay exact."""
    mlp, x = layer(cls, firing), torch.randn(*lead, K).to(BF16)
    m = x.shape[:-1].numel()
    reference = copy.deepcopy(mlp)
    reference.strategy = "dense"
    with torch.set_grad_enabled(training):
        for _ in range(9):
            torch.testing.assert_close(mlp(x), reference(x), rtol=2e-2, atol=2e-2)
            (row,) = twell.explain(mlp)
            # a sparse training step does not count by groups of tokens
            known = training and row.strategy == "union"
            assert row.figures == Figures(firing, firing / N, None if known else firing)
    assert row.kind == ("training" if training else "inference")
    assert row.tokens == "129 to 256" if m == 256 else "257 to 512"
    assert (row.calls, row.measured) == (9, 8)
    assert len(chooses.sent) == 5
    # 200 of 264 neurons fire: too many for a sparse strategy
    assert row.strategy == "dense" if firing == 200 else row.strategy in ("row", "union")
    expected = {"dense"} | ({"union"} if training else {"row", "union"})
    assert set(row.costs) == expected


@pytest.mark.parametrize("m", [1, 5, 100, 300])
@pytest.mark.parametrize("strategy", ["row", "union", "dense"])
def test_measures_the_heaviest_tokens(
    m: int, strategy: str, chooses: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every strategy the same, from counts of groups of 8 tokens."""
    monkeypatch.setattr(tuning, "decide", lambda *_: tuning.Decision(strategy, "so that it measures", {}))
    p, site = testing.integer_problem(m, 16, 264), twell.AutoStrategy()
    # one group has the most
    p.x[m // 2 // 8 * 8 :][:8] = p.x[m // 2]
    with torch.no_grad():
        twell.sparse_gated_ffn(p.x, p.w_gate, p.w_up, p.w_down.t(), strategy=site)
    counts = (testing.float64_gate(p) != 0).sum(1)
    (row,) = site.explain()
    assert (row.strategy, row.figures and row.figures.nonzeros) == (strategy, counts.sum().item() / m)
    heaviest = max(group.sum().item() for group in counts.split(8)) / min(m, 8)
    assert row.figures
    assert row.figures.heaviest == heaviest
    assert heaviest > row.figures.nonzeros or m <= 8


def test_figures_of_an_earlier_version_load() -> None:
    """Pickles of then have two values."""
    earlier = b"\x80\x02ctwell.tuning\nFigures\nG" + struct.pack(">d", 29.5) + b"N\x86\x81."
    assert pickle.loads(earlier) == Figures(29.5, None, None)


def test_each_kind_and_size_of_calls_has_its_own_choice(chooses: Arrivals) -> None:
    mlp = layer(firing=8)
    for m in (1, 2, 3, 4, 256):
        with torch.no_grad():
            mlp(torch.randn(m, K).to(BF16))
        mlp(torch.randn(m, K).to(BF16))
    rows = twell.explain(mlp).rows
    assert [(row.kind, row.tokens) for row in rows] == [
        (kind, tokens) for kind in ("inference", "training") for tokens in ("1", "2", "3 to 4", "129 to 256")
    ]
    assert all(row.calls == (2 if row.tokens == "3 to 4" else 1) for row in rows)
    # too few tokens for the union of 128
    assert [row.figures.union for row in rows if row.figures] == [None] * 3 + [8 / N] + [None] * 3 + [8 / N]


def test_measures_row_by_running_union(chooses: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    sparse = sys.modules["twell.ops.ffn"]._SPARSE_ON_CPU
    for name, original in list(sparse.items()):
        monkeypatch.setitem(sparse, name, lambda *a, o=original, n=name: (ran.append(n), o(*a))[1])
    mlp, x = layer(firing=2), torch.randn(128, K).to(BF16)
    with torch.no_grad():
        for _ in range(6):
            mlp(x)
        assert strategies_of(mlp) == [("inference", "row")]
        assert ran == ["union"] * 3 + ["row", "union", "row"]
        ran.clear()
        for _ in range(3):
            mlp(x[:127])
    assert ran == ["row"] * 3


def test_no_call_waits(chooses: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, x = layer(firing=200), torch.randn(256, K).to(BF16)
    chooses.open = False
    # the stand-in itself may read values
    monkeypatch.setattr(_auto, "Transfer", lambda values: chooses(torch.tensor([200 * 256, 400])))
    for owner, name in ((Tensor, "item"), (Tensor, "__bool__"), (Tensor, "cpu"), (Tensor, "__int__")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("a host synchronisation"))
    for name in ("synchronize", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a host synchronisation"))
    for _ in range(9):
        mlp.up_proj(x)
        mlp(x)
    assert strategies_of(mlp) == [("training", "dense")]
    # one on its way, and the scheduled calls asked for it: at 1, 2, 4, 8, and explain
    assert len(chooses.sent) == 1
    assert chooses.asked == 5


@contextmanager
def relaxed(calls: list[Any]) -> Iterator[None]:
    """A stand-in for ``device.relaxed_capture``."""
    calls.append("relaxed")
    yield
    calls.append("strict")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("strategy", ["dense", "union"])
def test_measurements_do_not_mind_captures_of_other_threads(
    training: bool, strategy: str, chooses: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocate memory, pinned or not, as the strategy itself does not."""
    calls: list[Any] = []
    monkeypatch.setattr(_auto, "_beside_captures", lambda tensor: relaxed(calls))
    transfer = _auto.Transfer
    monkeypatch.setattr(_auto, "Transfer", lambda values: (calls.append("transfer"), transfer(values))[1])
    mlp, x = layer(firing=8), torch.randn(256, K).to(BF16)
    mlp._auto.observe(Problem(256, K, N, True, training), DECIDES[strategy])
    with torch.set_grad_enabled(training):
        mlp(x)
    assert calls.count("transfer") == 1
    before = calls[: calls.index("transfer")]
    assert before.count("relaxed") - before.count("strict") == (2 if strategy == "dense" else 1)
    assert calls.count("relaxed") == calls.count("strict")


def test_a_transfer_is_one_copy_and_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA: one copy into pinned memory and one event, both on the computing stream."""
    calls: list[Any] = []

    class Event:
        def record(self, stream: Any) -> None:
            calls.append(("record", stream))

        def query(self) -> bool:
            assert calls[-1] == "relaxed"
            calls.append("query")
            return calls.count("query") > 2

        def synchronize(self) -> None:
            pytest.fail("a host synchronisation")

    original = torch.empty

    def empty(*shape: Any, dtype: Any, pin_memory: bool, device: str) -> Tensor:
        assert (pin_memory, device) == (True, "cpu")
        return original(*shape, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: f"stream of {where}")
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(device, "relaxed_capture", lambda: relaxed(calls))
    transfer = _auto.Transfer(torch.tensor([3, 1 << 40]))
    assert calls == [("record", "stream of cpu")]
    assert [transfer.arrived(), transfer.arrived(), transfer.arrived()] == [False, False, True]
    assert transfer.read() == [3, 1 << 40]


def test_more_than_the_hybrid_format_holds_has_no_union(chooses: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_fresh", lambda *_: tuning.Decision("union", "so that training overflows", {}))
    mlp, x = layer(firing=100), torch.randn(256, K).to(BF16)
    mlp(x)
    (row,) = twell.explain(mlp)
    assert (row.strategy, row.figures) == ("union", Figures(100, None))
    mlp(x)
    assert strategies_of(mlp) == [("training", "dense")]
    assert "too near the sparse route's limit, 64" in twell.explain(mlp).rows[0].reason


@pytest.mark.parametrize("strategy", ["row", "union", "dense"])
def test_a_named_strategy_stays(strategy: Any, chooses: Arrivals) -> None:
    mlp, x = layer(firing=8), torch.randn(256, K).to(BF16)
    mlp.strategy = strategy
    with torch.no_grad():
        mlp(x)
    mlp(x)
    assert not chooses.sent
    rows = twell.explain(mlp).rows
    if strategy == "row":
        assert [row[:5] for row in rows] == [("", "inference", "any", "", "row"), ("", "training", "any", "", "union")]
    else:
        assert [row[:6] for row in rows] == [("", "any", "any", "", strategy, "it was named")]
    mlp.strategy = "auto"
    mlp(x)
    assert chooses.sent


@pytest.mark.parametrize("gated", [False, True])
def test_functions_take_a_site(gated: bool, chooses: Arrivals) -> None:
    site, p = twell.AutoStrategy(), testing.integer_problem(256, 16, 264, density=0.9)
    call = twell.sparse_gated_ffn if gated else twell.sparse_ffn
    weights = (p.w_gate, p.w_up) if gated else (p.w_gate,)
    expected = testing.exact_output(p, gated=gated)
    with torch.no_grad():
        for _ in range(3):
            y, aux = call(p.x, *weights, p.w_down.t(), strategy=site, return_aux=True)
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=32)
            assert aux.l0 == (testing.float64_gate(p) != 0).sum() / 256
    (row,) = twell.explain(site)
    assert (row.layer, row.strategy, row.calls) == ("", "dense", 3)
    assert row.figures is not None
    assert row.figures.nonzeros == float(aux.l0)
    # a name has no memory
    for _ in range(2):
        call(p.x, *weights, p.w_down.t(), strategy="auto")
    assert len(chooses.sent) == 3


@pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
def test_modules_take_a_site(cls: Any, chooses: Arrivals) -> None:
    site = twell.AutoStrategy(period=2)
    mlp = cls(K, N, bias=True, dtype=BF16, strategy=site)
    set_firing(mlp, 200)
    with torch.no_grad():
        mlp(torch.randn(256, K).to(BF16))
    assert site.explain()[0].figures == Figures(200, 200 / N, 200)
    assert strategies_of(mlp) == [(row.kind, row.strategy) for row in site.explain()]
    assert "strategy=AutoStrategy(period=2)" in repr(mlp)


@pytest.mark.parametrize("strategy", ["row", "union"])
@pytest.mark.parametrize("gated", [False, True])
def test_strategies_agree(strategy: Any, gated: bool) -> None:
    p = testing.integer_problem(300, 16, 520, biases="gate up down")
    y, aux = testing.sparse_layer(p, gated=gated, strategy=strategy)
    expected, dense = testing.sparse_layer(p, gated=gated, strategy="dense")
    assert torch.equal(y, expected)
    assert aux.l0 == dense.l0
    torch.testing.assert_close(aux.l1, dense.l1)


def test_limits_are_those_of_the_sparse_path_whatever_was_chosen(chooses: Arrivals) -> None:
    site = twell.AutoStrategy()
    weights = [torch.zeros(12, 16, dtype=BF16) for _ in range(2)]
    with pytest.raises(ValueError, match="N must be a positive multiple of 8"):
        twell.sparse_gated_ffn(torch.zeros(3, 16, dtype=BF16), *weights, weights[0].t(), strategy=site)
    wide = [torch.zeros(24, 16, dtype=torch.float64) for _ in range(2)]
    x = torch.zeros(3, 16, dtype=torch.float64)
    assert twell.sparse_gated_ffn(x, *wide, wide[0].t(), strategy=site).dtype == torch.float64
    arguments = [t.to("meta") for t in (x, *wide, wide[0].t())]
    with pytest.raises(TypeError, match="dtype must be bfloat16 or float16"):
        twell.sparse_gated_ffn(*arguments, strategy=site)
    assert not site.explain()


def test_a_call_without_tokens_works(chooses: Arrivals) -> None:
    mlp = layer()
    with torch.no_grad():
        assert mlp(torch.zeros(0, K, dtype=BF16)).shape == (0, K)
    mlp(torch.zeros(0, K, dtype=BF16))
    assert not chooses.sent


# Devices


def test_other_gpus_are_dense(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without kernels, and without costs: those of a table that the user measured there are enough."""
    own = dataclasses.replace(_tables.SHIPPED, file=Path("own.json"))
    monkeypatch.setattr(device, "capability", {0: (9, 0), 1: (8, 6), 2: (7, 5), 3: (12, 0)}.__getitem__)
    monkeypatch.setattr(_tables, "in_use", lambda on: own if on.index == 3 else _tables.SHIPPED)
    log.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "twell"):
        found = [_auto.forced("cuda", index) for index in (0, None, 1, 1, 2, 3)]
    assert found == ["", "", "dense", "dense", "dense", ""]
    assert [record.getMessage() for record in caplog.records] == [
        'strategy="auto" is "dense" on compute capability 8.6: costs of the sparse kernels are not known there; '
        "`twell tune` measures them",
        'strategy="auto" is "dense" on compute capability 7.5: the sparse kernels need 8.0 or higher',
    ]
    assert _auto.forced("cpu", None) == _auto.forced("meta", None) == "dense"


def test_tensors_without_values_neither_measure_nor_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(index: int) -> tuple[int, int]:
        raise RuntimeError("no CUDA driver")

    monkeypatch.setattr(device, "capability", no_driver)
    monkeypatch.setattr(_auto, "Transfer", lambda _: pytest.fail("measured a fake tensor"))
    with FakeTensorMode():
        site = twell.AutoStrategy()
        weights = [torch.empty(N, K, device="cuda", dtype=BF16) for _ in range(3)]
        for m in (3, 5000):
            x = torch.empty(m, K, device="cuda", dtype=BF16)
            assert twell.sparse_gated_ffn(x, *weights[:2], weights[2].t(), strategy=site).shape == x.shape
    assert not site.explain()
    mlp = SparseMLP(K, N, device="meta", dtype=BF16)
    assert mlp(torch.empty(3, K, device="meta", dtype=BF16)).is_meta
    assert strategies_of(mlp) == [("any", "dense")]


def test_calls_that_a_site_does_not_heed_leave_nothing(chooses: Arrivals) -> None:
    class OfMany(twell.AutoStrategy):
        def heeds(self, x: Tensor) -> bool:
            return len(x) > 2

    site, weights = OfMany(), [torch.randn(N, K).to(BF16) for _ in range(3)]
    for m in (1, 2, 4):
        twell.sparse_gated_ffn(torch.randn(m, K).to(BF16), *weights[:2], weights[2].t(), strategy=site)
    assert [(choice.tokens, choice.calls) for choice in site.explain()] == [("3 to 4", 1)]
    assert len(chooses.sent) == 1


# Graphs


def test_a_capture_takes_the_choice_and_leaves_nothing(chooses: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, x = layer(firing=200), torch.randn(256, K).to(BF16)
    with torch.no_grad():
        capturing = True
        monkeypatch.setattr(_auto, "_capturing", lambda _: capturing)
        mlp(x)
        assert [(row.graph, row.calls) for row in twell.explain(mlp)] == [("captured", 0)]
        assert not chooses.sent
        capturing = False
        for _ in range(3):
            mlp(x)
        calls, captured = twell.explain(mlp)
    assert (calls.graph, calls.strategy, calls.calls) == ("", "dense", 3)
    assert captured.graph == "captured"
    assert captured.strategy in ("row", "union")
    assert "captured inference" in str(twell.explain(mlp))


def test_marked_as_dynamo_marks() -> None:
    @torch.compiler.assume_constant_result
    def constant() -> int:
        return 0

    assert vars(constant).items() <= vars(_auto.forced).items()
    assert vars(constant)


class Compiles:
    """A backend that counts graphs and runs them eagerly."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@MODULES
def test_a_compiled_training_graph_keeps_its_choice(cls: Any, chooses: Arrivals, fresh_dynamo: None) -> None:
    mlp, x = layer(cls, 200), torch.randn(512, K).to(BF16)
    backend = Compiles()
    compiled = torch.compile(mlp, fullgraph=True, backend=backend, dynamic=False)
    compiled(x)
    assert not chooses.sent
    (row,) = twell.explain(mlp)
    assert (row.graph, row.tokens, row.kind, row.strategy) == ("compiled", "more than 256", "training", "dense")
    # calls that count and choose again compile no further graph
    set_firing(mlp, 2)
    for _ in range(10):
        mlp(x)
        compiled(x)
    assert strategies_of(mlp) == [("training", "union"), ("training", "dense")]
    assert backend.graphs == 1


@MODULES
def test_a_compiled_graph_without_gradients_keeps_choosing(cls: Any, chooses: Arrivals, fresh_dynamo: None) -> None:
    mlp, x = layer(cls, 200), torch.randn(128, K).to(BF16)
    backend = Compiles()
    compiled = torch.compile(mlp, fullgraph=True, backend=backend, dynamic=False)
    seen = []
    with torch.no_grad():
        for firing in (200, 2, 200):
            set_firing(mlp, firing)
            # each 64th call measures, and the one after that decides
            for _ in range(130):
                y = compiled(x)
            seen.append(strategies_of(mlp)[0][1])
            named = copy.deepcopy(mlp)
            named.strategy = seen[-1]
            assert torch.equal(y, named(x))
    assert seen[0] == seen[2] == "dense"
    assert seen[1] in ("row", "union")
    assert backend.graphs == 1
    (row,) = twell.explain(mlp)
    assert (row.graph, row.calls) == ("", 390)


def test_calls_and_graphs_share_figures(chooses: Arrivals, fresh_dynamo: None) -> None:
    mlp, x = layer(firing=200), torch.randn(512, K).to(BF16)
    with torch.no_grad():
        for _ in range(3):
            mlp(x)
        torch.compile(mlp, fullgraph=True, backend="aot_eager")(x)
    (row,) = twell.explain(mlp)
    assert (row.kind, row.strategy, row.calls) == ("inference", "dense", 4)
    # figures of one kind serve the other if that has none
    set_firing(mlp, 4)
    with torch.no_grad():
        for _ in range(6):
            mlp(x)
    torch.compile(mlp, fullgraph=True, backend="aot_eager")(x).float().sum().backward()
    assert strategies_of(mlp)[-1] == ("training", "union")


def test_equal_layers_share_a_graph_and_choose_for_themselves(chooses: Arrivals, fresh_dynamo: None) -> None:
    backend, x = Compiles(), torch.randn(512, K).to(BF16)
    layers = [layer(firing=firing) for firing in (8, 200) * 6]
    with torch.no_grad():
        for _ in range(3):
            for mlp in layers:
                mlp.compile(fullgraph=True, backend=backend)
                mlp(x)
    assert backend.graphs == 1
    for mlp, firing in zip(layers, (8, 200) * 6, strict=True):
        (row,) = twell.explain(mlp)
        assert (row.calls, row.figures) == (3, Figures(firing, firing / N, firing))
        assert (row.strategy == "dense") == (firing == 200)


def test_a_layer_where_another_was_starts_anew(chooses: Arrivals, fresh_dynamo: None) -> None:
    """A site of graphs ends with its weight, and neither copies nor moved layers have it."""
    x = torch.randn(64, K).to(BF16)
    with torch.no_grad():
        for _ in range(4):
            mlp = layer(firing=8)
            torch.compile(mlp, backend="eager")(x)
            assert [row.calls for row in twell.explain(mlp)] == [1]
            assert not twell.explain(copy.deepcopy(mlp)).rows[0].calls
            known = len(_auto._SITES)
    assert known == len(_auto._SITES) <= 2 + sum(not storage.expired() for storage, _ in _auto._SITES.values())


def test_two_classes_of_symbolic_sizes(chooses: Arrivals, fresh_dynamo: None) -> None:
    backend = Compiles()
    mlp = layer(firing=8)
    compiled = torch.compile(mlp, fullgraph=True, backend=backend, dynamic=True)
    for m in (300, 1000, 5000, 7, 256, 257, 128):
        assert compiled(torch.randn(m, K).to(BF16)).shape == (m, K)
    assert backend.graphs <= 3
    assert [row.tokens for row in twell.explain(mlp)] == ["more than 256", "up to 256"]


def test_one_graph_without_gradients_for_any_size(chooses: Arrivals, fresh_dynamo: None) -> None:
    backend, mlp = Compiles(), layer(firing=8)
    compiled = torch.compile(mlp, fullgraph=True, backend=backend, dynamic=True)
    with torch.no_grad():
        for m in (300, 1000, 5000, 7, 2, 256, 257, 64, 128):
            x = torch.randn(m, K).to(BF16)
            torch.testing.assert_close(compiled(x), mlp(x), rtol=2e-2, atol=2e-2)
    assert backend.graphs == 1
    assert {row.tokens for row in twell.explain(mlp)} >= {"2", "5 to 8", "4097 to 8192"}


def test_functions_compile(chooses: Arrivals, fresh_dynamo: None) -> None:
    p = testing.integer_problem(65, 16, 264)
    site = twell.AutoStrategy()
    for strategy in ("auto", site, "union"):
        call = torch.compile(
            lambda q, s=strategy: testing.sparse_output(q, strategy=s), fullgraph=True, backend="aot_eager"
        )
        with torch.no_grad():
            assert torch.equal(call(p), testing.exact_output(p))
        leaves = p.map(lambda t: t.clone().requires_grad_())
        assert torch.equal(call(leaves), testing.exact_output(p))
    # without gradients a graph calls as eager mode does, and no weight is known before it runs
    assert [(row.kind, row.graph) for row in site.explain()] == [("training", "compiled")]


@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_any_number_of_tokens(strict: bool, chooses: Arrivals, fresh_dynamo: None) -> None:
    mlp, x = layer(firing=8), torch.randn(300, K).to(BF16)
    with torch.no_grad():
        sizes = {"x": {0: torch.export.Dim("m", min=1, max=4096)}}
        exported = torch.export.export(mlp, (x,), dynamic_shapes=sizes, strict=strict)
        for m in (300, 129, 1):
            torch.testing.assert_close(exported.module()(x[:m]), mlp(x[:m]), rtol=2e-2, atol=2e-2)


def test_a_traced_module_keeps_choosing(chooses: Arrivals) -> None:
    mlp, x = layer(firing=200), torch.randn(256, K).to(BF16)
    with torch.no_grad():
        traced = torch.jit.trace(mlp, (x,), check_trace=False)
        for _ in range(3):
            torch.testing.assert_close(traced(x), mlp(x), rtol=2e-2, atol=2e-2)
    assert strategies_of(mlp) == [("inference", "dense")]


# Checkpoints

DECIDES = {"union": SPARSE, "dense": DENSE}


def training(m: int = 256) -> Problem:
    return Problem(m, K, N, True, True)


def site_of(mlp: Any) -> twell.AutoStrategy:
    """A call site of ``mlp`` that measures every call."""
    mlp.strategy = twell.AutoStrategy(period=1)
    return mlp.strategy


def decided(site: twell.AutoStrategy) -> str:
    return next(row.strategy for row in site.explain() if row.kind == "training")


class Block(nn.Module):
    """A pre-norm residual block; ``tail`` saves tensors after the layer."""

    def __init__(self, bias: bool, tail: bool) -> None:
        super().__init__()
        self.norm, self.mlp, self.tail = nn.LayerNorm(K, dtype=BF16), layer(), tail
        if not bias:
            self.mlp.down_proj.bias = None
        self.site = site_of(self.mlp)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mlp(self.norm(x))
        return nn.functional.silu(y) if self.tail else y


def once(block: Any, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def nested(block: Any, x: Tensor) -> Tensor:
    return once(lambda x: once(block, x).sin(), x)


@pytest.mark.parametrize("lead", [(256,), (2, 128), (2, 2, 64)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("way", [once, nested])
def test_a_recomputation_runs_what_the_forward_pass_ran(
    way: Any, tail: bool, bias: bool, lead: tuple[int, ...], chooses: Arrivals
) -> None:
    """Figures that change the strategy arrive between the forward passes and their backward."""
    chooses.open = False
    block, x = Block(bias, tail), torch.randn(*lead, K).to(BF16).requires_grad_()
    for step, name in enumerate(("dense", "union", "dense", "union")):
        outputs = [way(block, x) for _ in range(2)]
        assert decided(block.site) == name
        block.site.observe(training(), DECIDES["union" if name == "dense" else "dense"])
        sum(y.float().sum() for y in outputs).backward()
        (row,) = twell.explain(block.mlp)
        assert (row.strategy, row.calls) == (name, 2 * step + 2)
        assert not block.site._open
        block.site.observe(training(), DECIDES["union" if name == "dense" else "dense"])


@MODULES
@pytest.mark.parametrize("reentrant", [False, True])
def test_choices_follow_the_sparsity_under_checkpointing(cls: Any, reentrant: bool, chooses: Arrivals) -> None:
    """Layers become sparse or dense during a run, with a call outside any checkpoint between the steps."""
    mlps, x = [layer(cls) for _ in range(3)], torch.randn(2, 128, K).to(BF16).requires_grad_()
    sites, seen = [site_of(mlp) for mlp in mlps], []
    for step in range(12):
        for mlp in mlps:
            set_firing(mlp, 8 if 3 <= step < 8 else 200)
        y = x
        for mlp in mlps:
            y = y + checkpoint(mlp, y, use_reentrant=reentrant)
        if step % 4 == 2:
            mlps[0](x.detach()).float().sum().backward()
        y.float().sum().backward()
        seen.append({decided(site) for site in sites})
        assert not any(site._open for site in sites)
    assert seen[2] == seen[11] == {"dense"}
    assert seen[7] == {"union"}


@pytest.mark.parametrize("segments", [2, 4])
def test_checkpoints_of_a_sequence_of_layers(segments: int, chooses: Arrivals) -> None:
    chooses.open = False
    model = nn.Sequential(*(Block(True, False) for _ in range(4)))
    expected = copy.deepcopy(model)
    x = torch.randn(2, 128, K).to(BF16)
    # the last segment is not checkpointed
    free = len(model) - len(model) // segments
    for name, other in (("dense", "union"), ("union", "dense")):
        # gradients accumulate over three passes; the backward of one comes late
        late = checkpoint_sequential(model, segments, x, use_reentrant=False)
        for _ in range(2):
            y = checkpoint_sequential(model, segments, x, use_reentrant=False)
            for block in model[:free]:
                block.site.observe(training(), DECIDES[other])
            y.float().sum().backward()
        late.float().sum().backward()
        assert {decided(block.site) for block in model} == {name}
        for block in expected:
            block.mlp.strategy = name
        for _ in range(3):
            expected(x).float().sum().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            testing.assert_same(ours.grad, theirs.grad)
            ours.grad = theirs.grad = None
        for block in model:
            block.site.observe(training(), DECIDES[other])


def test_a_second_backward_recomputes_the_same(chooses: Arrivals) -> None:
    block, x = Block(False, False), torch.randn(2, 128, K).to(BF16).requires_grad_()
    y = once(block, x)
    y.float().sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    for _ in range(2):
        block.site.observe(training(), SPARSE)
        block.mlp(x)
    y.float().sum().backward()
    testing.assert_same(x.grad, first)
    block.mlp(x)
    assert decided(block.site) == "union"


def test_a_call_in_a_hook_of_backward_decides_nothing(chooses: Arrivals) -> None:
    """The call comes between a checkpoint's forward pass and its recomputation."""
    block, x = Block(False, False), torch.randn(2, 128, K).to(BF16).requires_grad_()
    y = once(block, x)

    def call(gradient: Tensor) -> None:
        block.site.observe(training(), SPARSE)
        with torch.enable_grad():
            block.mlp(x.detach())

    y.register_hook(call)
    y.float().sum().backward()
    assert [(row.strategy, row.calls) for row in twell.explain(block.mlp)] == [("dense", 1)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_a_transformers_model(reentrant: bool, chooses: Arrivals) -> None:
    transformers = pytest.importorskip("transformers")
    from twell.integrations.transformers import sparsify

    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=K,
        intermediate_size=N,
        num_hidden_layers=2,
        hidden_act="relu",
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        mlp_bias=True,
    )
    model = sparsify(transformers.LlamaForCausalLM(config).to(BF16)).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    mlps = [each.mlp for each in model.model.layers]
    sites, seen = [site_of(mlp) for mlp in mlps], []
    ids = torch.randint(61, (2, 128))
    for step in range(8):
        for mlp in mlps:
            set_firing(mlp, 8 if step < 4 else 200)
        model(input_ids=ids, labels=ids).loss.backward()
        seen.append({decided(site) for site in sites})
    assert seen[3] == {"union"}
    assert seen[7] == {"dense"}


@pytest.mark.parametrize("strategy", ["dense", "union"])
def test_training_keeps_its_choice_until_backward(strategy: str, chooses: Arrivals) -> None:
    mlp, x = layer(firing=8 if strategy == "dense" else 200), torch.randn(256, K).to(BF16)
    site, other = site_of(mlp), {"dense": "union", "union": "dense"}[strategy]
    if strategy == "union":
        site.observe(training(), SPARSE)
    kept = once(mlp, x)
    for _ in range(3):
        mlp(x)
        assert decided(site) == strategy
    # inference is free meanwhile
    with torch.no_grad():
        mlp(x)
    kept.float().sum().backward()
    mlp(x)
    assert decided(site) == other


def test_a_graph_that_is_dropped_holds_nothing(chooses: Arrivals) -> None:
    site = twell.AutoStrategy()
    mlp, x = layer(firing=8), torch.randn(256, K).to(BF16)
    mlp.strategy = site
    # the decision due at call 1 is made at the first call that allows one
    y = once(mlp, x)
    mlp(x)
    assert decided(site) == "dense"
    del y
    gc.collect()
    mlp(x)
    mlp(x)
    assert decided(site) == "union"
    assert not site._open


def test_without_checkpoints_a_graph_holds_nothing(chooses: Arrivals) -> None:
    mlp, x = layer(firing=8), torch.randn(256, K).to(BF16)
    site = site_of(mlp)
    kept = [mlp(x), mlp(x)]
    assert decided(site) == "union"
    assert all(y.grad_fn is not None for y in kept)


def test_frozen_parameters_hold_nothing(chooses: Arrivals) -> None:
    mlp = layer(firing=8).requires_grad_(False)
    y = mlp(torch.randn(256, K).to(BF16))
    assert not y.requires_grad
    assert strategies_of(mlp)[0][0] == "inference"


# Telling people


def test_explain_is_a_table(chooses: Arrivals) -> None:
    model = nn.ModuleDict({"first": layer(firing=8), "second": layer(SparseMLP, 200), "head": nn.Linear(K, K)})
    model["third"] = layer()
    model["third"].strategy = "union"
    model["fourth"] = layer()
    x = torch.randn(256, K).to(BF16)
    with torch.no_grad():
        for _ in range(3):
            model["second"](model["first"](x))
    explained = twell.explain(model)
    assert [row.layer for row in explained] == ["first", "second", "third", "fourth"]
    assert len(explained) == 4
    lines = str(explained).splitlines()
    assert len(lines) == 5
    names = [
        "layer",
        "calls",
        "tokens",
        "strategy",
        "non-zeros",
        "union",
        "row time",
        "union time",
        "dense time",
        "why",
    ]
    assert re.split("  +", lines[0]) == names
    assert lines[1].startswith("first")
    assert "8.0   3.0%" in lines[1]
    assert "(measured in call 2)" in lines[1]
    assert "200.0  75.8%" in lines[2]
    assert " dense " in lines[2]
    assert lines[3].endswith("it was named")
    assert lines[4].endswith("not called yet")
    assert "auto" in lines[4]


def ran(mlp: Any, x: Tensor, training: bool) -> str:
    """Infer the strategy of a call from its operators."""
    found = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.extend([args[8] if op._opname == "ffn" else "union"] if op.namespace == "twell" else [])
            return op(*args, **(kwargs or {}))

    with torch.set_grad_enabled(training), Calls():
        mlp(x)
    return found[0] if found else "dense"


@MODULES
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
@pytest.mark.parametrize("strategy", ["auto", "row", "union", "dense", twell.AutoStrategy()])
def test_explain_names_what_runs(cls: Any, strategy: Any, dtype: torch.dtype, autocast: bool) -> None:
    mlp, x = cls(K, N, dtype=dtype, strategy=strategy), torch.randn(8, K, dtype=dtype)
    with torch.autocast("cpu", enabled=autocast):
        for training in (False, True):
            rows = {row.kind: row.strategy for row in twell.explain(mlp)}
            assert rows.get("training" if training else "inference", rows.get("any")) == ran(mlp, x, training)
    if not isinstance(strategy, str) or strategy == "auto":
        # the CPU's operators take several times as long as dense
        assert rows == {"any": "dense"}
    mlp.up_proj.register_forward_hook(lambda *_: None)
    assert [row.strategy for row in twell.explain(mlp)] == ["dense"] == [ran(mlp, x, False)]


def test_explain_changes_nothing(chooses: Arrivals) -> None:
    mlp, x = layer(firing=200), torch.randn(256, K).to(BF16)
    with torch.no_grad():
        mlp(x)
        pending = dict(mlp._auto._pending)
        assert twell.explain(mlp).rows == twell.explain(mlp).rows
        assert mlp._auto._pending == pending != {}
        chooses.open = False
        assert twell.explain(mlp).rows[0].figures is None


def test_figures_of_one_kind_do_not_hold_up_those_of_another(chooses: Arrivals) -> None:
    """A host that runs ahead: no figures of this step's forward passes have arrived when training wants to measure."""
    mlp, x = layer(firing=8), torch.randn(256, K).to(BF16)
    mlp.strategy = twell.AutoStrategy(period=1)
    for firing in (8, 8, N, N):
        with torch.no_grad():
            mlp.gate_proj.bias[:firing] = 100
            chooses.open = True
            mlp(x)
            chooses.open = False
        mlp(x)
    chooses.open = True
    figures = {row.kind: row.figures.nonzeros for row in twell.explain(mlp)}
    assert figures == {"inference": N, "training": N}


def test_explain_takes_modules_and_sites() -> None:
    assert str(twell.explain(nn.Linear(2, 2))) == "no layers of twell"
    assert not twell.explain(twell.AutoStrategy())
    with pytest.raises(TypeError, match=r"layers must be an nn.Module or an AutoStrategy, got str"):
        twell.explain("auto")  # type: ignore[call-overload]
