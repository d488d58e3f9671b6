"""``strategy="auto"``: the decision, the memory of a call site, what is measured, and ``explain``."""

import copy
import functools
import pickle
import re
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from auto_layers import BF16, DENSE, SPARSE, Arrivals, K, N, layer, strategies_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import twell
from twell import testing
from twell.choose import measurement, rates
from twell.choose import site as sites
from twell.choose.rates import Figures, Problem
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.runtime import device, geometry

MODULES = pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])


def problem(m: int = 16384, training: bool = False, gated: bool = True, k: int = 2048, n: int = 5632) -> Problem:
    return Problem(m, k, n, gated, training)


# The decision


def test_decides_by_the_cheapest_prediction() -> None:
    for figures in (SPARSE, Figures(30, 0.5), Figures(130, 0.26), DENSE, Figures(0, 0)):
        for training in (False, True):
            decision, times = rates.decide(call := problem(training=training), figures), rates.seconds(call, figures)
            assert decision.costs == {route: time / times["dense"] for route, time in times.items()}
            if "hold" not in decision.reason and "save" not in decision.reason:
                assert decision.costs[decision.strategy] == min(decision.costs.values())
    assert rates.decide(problem(), DENSE).strategy == "dense"
    assert rates.decide(problem(1), SPARSE).strategy == "row"
    assert rates.decide(problem(training=True), SPARSE).strategy == "union"
    # before any measurement
    assert rates.decide(problem(training=True), None)[::2] == ("dense", {})
    assert rates.decide(problem(16384), None).strategy == "union"
    assert rates.decide(problem(1), None).strategy == "row"
    assert rates.decide(problem(0), None).strategy in ("row", "union", "dense")
    assert "nothing measured" in rates.decide(problem(), None).reason
    # an unknown union is bounded from above, and so is one that more tokens had
    assert rates.shares(problem(), Figures(29, None))[0] == pytest.approx(1 - (1 - 29 / 5632) ** 128)
    assert rates.seconds(problem(), Figures(29, None))["union"] > rates.seconds(problem(), Figures(29, 0.1))["union"]
    assert rates.seconds(problem(1), Figures(29, 0.5)) == rates.seconds(problem(1), Figures(29, None))


def test_times_are_positive_and_grow() -> None:
    """With the tokens, the neurons that fire and those that are heavy; layers of slices take the sum of these."""
    for m in (1, 33, 128, 1000, 20000):
        for training in (False, True):
            call = problem(m, training)
            series = [
                rates.seconds(call, Figures(nonzeros, None, min(2 * nonzeros, 5632)))
                for nonzeros in (0, 1, 30, 300, 5632)
            ]
            for route in series[0]:
                times = [each[route] for each in series]
                assert 0 < times[0] < 1
                assert times == sorted(times)
            less, more = (rates.seconds(call._replace(m=tokens), Figures(30, None)) for tokens in (m, 3 * m))
            assert all(more[route] >= less[route] for route in less.keys() & more.keys())
    one, two = (rates.seconds(problem(n=n), Figures(n / 190, 0.1)) for n in (65536, 131072))
    assert {route: two[route] / time for route, time in one.items()} == pytest.approx(dict.fromkeys(one, 2.0))


def test_few_tokens_are_one_pass_where_it_runs() -> None:
    """Not of slices, nor beyond its columns, nor of whole sums in e4m3: graphs of these are dense without figures."""
    sliced, wide = problem(32, n=131072), problem(32, k=5120, n=13824)
    assert rates.in_one_pass(problem(32))
    assert not rates.in_one_pass(wide)
    assert rates.seconds(sliced, DENSE) == rates.seconds(sliced._replace(one_pass=False), DENSE)
    for call in (sliced, wide, problem(32)._replace(one_pass=False), problem(8)._replace(one_pass=False, float8=True)):
        decision = rates.decide(call, None)
        assert (decision.strategy, decision.final) == ("dense", False)


def test_a_change_must_promise_two_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    for row, union, current, expected in (
        (0.50, 0.492, "row", "row"),
        (0.50, 0.488, "row", "union"),
        (0.50, 0.492, "union", "union"),
        (0.50, 0.492, None, "union"),
        (0.985, 0.99, "dense", "dense"),
        (0.985, 0.99, None, "dense"),
        (0.975, 0.99, "dense", "row"),
        (1.015, 1.2, "row", "row"),
        (1.025, 1.2, "row", "dense"),
        (0.5, 0.5, "gone", "row"),
    ):
        monkeypatch.setattr(rates, "seconds", lambda *_, r=row, u=union: {"row": r, "union": u, "dense": 1.0})
        decision = rates.decide(problem(1024), SPARSE, current)
        assert decision.strategy == expected, (row, union, current)
        kept = min(row, union, 1.0) != decision.costs[expected]
        assert decision.reason.endswith("would save less than 2%") == kept


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
        decision = rates.decide(problem(training=True), Figures(share * held, 0.1), current)
        assert decision.strategy == expected, (share, current)
    assert "156" in decision.reason
    # a forward pass without gradients has no such limit
    assert rates.decide(problem(), Figures(0.75 * held, 0.1), "union").strategy == "union"


def test_training_keeps_room_for_what_recent_calls_needed() -> None:
    """It grows with the first larger one, and shrinks after eight smaller ones."""
    site, call, few = sites.AutoStrategy(period=1), problem(training=True), problem(512, training=True)

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
    # few tokens, no gradients: as much as there may be, and never more than without figures
    assert rates.held(few, (29.3,)) == rates.held(problem(), (29.3,)) == 0
    assert geometry.hybrid_capacity(16384, 5632, rates.held(call, (911.0,))) == geometry.hybrid_capacity(16384, 5632)


def test_checkpoints_and_backward_passes_keep_no_routes(chooses: Arrivals) -> None:
    """Nor do they use one: the site must hold its choice for them, or give the one of the forward pass."""
    site, x = sites.AutoStrategy(period=64), torch.zeros(100, K, dtype=BF16)
    kept: list[bool] = []
    # no call before 64 is due after these
    for _ in range(33):
        site.choose(Problem(100, K, N, True, True, eager=True))

    def holders() -> list[Any]:
        routes = [site.begin(x, N, True, True, False) for _ in range(2)]
        kept.extend(route.until is not None for route in routes)
        return [route.holder for route in routes]

    def of_a_checkpoint() -> list[Any]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return holders()

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            holders()
            return gradient

    assert of_a_checkpoint() == [site, site]
    InBackward.apply(torch.zeros((), requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    assert kept == [False] * 4
    assert holders() == [None, None]
    assert kept[4:] == [True] * 2
    assert of_a_checkpoint() == [site, site]
    assert site.explain()[0].calls == 41


def test_explain_says_where_calls_raise() -> None:
    """Of 32-bit values on a device whose kernels take none, and of sizes that they do not take."""
    mlp = SparseGatedMLP(32, 264, device="meta", strategy="union")
    (row,) = twell.explain(mlp)
    said = (
        "calls raise: dtype must be bfloat16 or float16 (float32 and float64 on the CPU, float32 under autocast), got"
    )
    assert (row.kind, row.strategy) == ("any", "none")
    assert row.reason.startswith(said)
    with pytest.raises(TypeError, match="dtype must be bfloat16 or float16"):
        mlp(torch.zeros(3, 32, device="meta"))
    mlp = SparseGatedMLP(20, 264, dtype=BF16, strategy="dense")
    mlp.strategy = "row"
    (row,) = twell.explain(mlp)
    assert row.reason.startswith("calls raise: K must be a positive multiple of 8 for the sparse kernels, got 20")


def test_explain_shows_calls_that_ran_under_autocast() -> None:
    """Outside of it fp32 weights are refused, which says nothing of the training that ran."""
    mlp = SparseGatedMLP(K, N, device="meta")
    (row,) = twell.explain(mlp)
    assert (row.strategy, row.calls) == ("none", 0)
    mlp._auto.observe(Problem(256, K, N, True, True), SPARSE)
    mlp._auto.choose(Problem(256, K, N, True, True))
    (row,) = twell.explain(mlp)
    assert (row.kind, row.strategy, row.calls) == ("training", "dense", 1)


def test_a_dense_layer_of_one_product_is_harder_to_beat(chooses: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator sees which layers are."""
    seen: list[bool] = []
    begin = sites.AutoStrategy.begin
    monkeypatch.setattr(sites.AutoStrategy, "begin", lambda site, *a: (seen.append(a[5]), begin(site, *a))[1])
    w_gate, w_up = torch.randn(2 * N, K).to(BF16).chunk(2)
    w_down, bias = torch.randn(N, K).to(BF16), torch.zeros(N, dtype=BF16)
    for m, up, b_up in ((9, w_up, None), (9, w_up.clone(), None), (9, w_up, bias), (9, None, None), (513, w_up, None)):
        x = torch.randn(m, K).to(BF16)
        torch.ops.twell.ffn(x, w_gate, up, w_down, None, b_up, None, 8, "auto", w_gate)
    assert seen == [True, False, False, False, False]


# The memory of a call site


def test_calls_are_measured_on_schedule() -> None:
    few = problem(64)._replace(eager=True)
    for period, call, last, expected in (
        (64, problem(), 300, [0, 1, 2, 4, 8, 16, 32, 64, 128, 192, 256]),
        (4, problem(), 13, [0, 1, 2, 4, 8, 12]),
        (1, problem(), 4, [0, 1, 2, 3]),
        # they wait for the host
        (4, few, 100, [0, 1, 2, 4, 8, 16, 32, 64, 96]),
    ):
        site = twell.AutoStrategy(period=period)
        assert [i for i in range(last) if site._count(call)[2]] == expected
    # figures count from the next scheduled call on, for this layer
    site = twell.AutoStrategy()
    before = [site.choose(problem()).strategy for _ in range(5)]
    site.observe(problem(), DENSE)
    after = [site.choose(problem()).strategy for _ in range(5)]
    assert before == ["union"] * 5
    assert after == ["union"] * 3 + ["dense"] * 2
    assert site.choose(problem(n=4096)).strategy == "union"
    assert len(site.explain()) == 1


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


@pytest.mark.parametrize("through", [copy.deepcopy, copy.copy, lambda site: pickle.loads(pickle.dumps(site))])
def test_copies_start_anew(through: Callable[[Any], Any], chooses: Arrivals) -> None:
    mlp, x = layer(firing=200), torch.randn(256, K).to(BF16)
    mlp.screen = "off"
    with torch.no_grad():
        mlp(x)
    other, whole = through(mlp._auto), copy.deepcopy(mlp)
    for each in (other, whole._auto):
        assert each is not mlp._auto
        assert (each.period, each.screen, each.explain()) == (64, "off", [])
    assert not any("auto" in name for name in mlp.state_dict())


def test_threads_do_not_corrupt() -> None:
    site = twell.AutoStrategy(period=4)

    def work(m: int) -> None:
        for i in range(300):
            site.choose(problem(m + i % 3, training=i % 2 == 0))
            site.observe(problem(m), SPARSE if i % 5 else DENSE)
            site.explain()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, (100, 100, 5000)))
    assert sum(row.calls for row in site.explain()) == 900


# Copies of the down weight


def test_few_tokens_are_dense_where_the_down_weight_is_copied() -> None:
    for figures, tokens in ((None, (1, 16, 32)), (Figures(30, None), (32, 64))):
        for m in tokens:
            laid, copied = problem(m), problem(m)._replace(down_copied=True)
            assert rates.decide(laid, figures, None).strategy == "row"
            decision = rates.decide(copied, figures, None)
            assert decision.strategy == "dense"
            assert "copies of the down weight outweigh row" in decision.reason
    copied = problem(16384)._replace(down_copied=True)
    assert rates.decide(copied, SPARSE, None).strategy == "union"
    # a layer that is dense for another reason does not mention copies
    assert "copies" not in rates.decide(copied, DENSE, None).reason
    # of a step of training there are two copies
    added = {}
    for training in (False, True):
        call = problem(16384, training)
        added[training] = rates.seconds(call._replace(down_copied=True), SPARSE)["union"]
        added[training] -= rates.seconds(call, SPARSE)["union"]
    assert 0 < added[True] == pytest.approx(2 * added[False])
    # a site decides again where the layout changes
    site, laid = twell.AutoStrategy(), problem(16)
    calls = (laid, laid, laid, laid._replace(down_copied=True), laid)
    assert [site.choose(call).strategy for call in calls] == ["row", "row", "row", "dense", "row"]
    assert [row.calls for row in site.explain()] == [5]


# Calls of modules


def test_the_cpu_leaves_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "Transfer", lambda _: pytest.fail("measured on the CPU"))
    mlp, x = layer(firing=200), torch.randn(5, K).to(BF16)
    for _ in range(3):
        mlp(x)
    (row,) = twell.explain(mlp)
    assert (row.strategy, row.kind, row.figures) == ("dense", "any", None)
    assert "need a GPU" in row.reason
    assert not mlp._auto.explain()


@MODULES
@pytest.mark.parametrize("training", [False, True])
def test_measures_what_is_there(cls: Any, training: bool, chooses: Arrivals) -> None:
    """Every strategy measures; the choice follows, and results stay exact."""
    for firing, lead in ((0, (256,)), (8, (300,)), (200, (2, 128))):
        mlp, x = layer(cls, firing), torch.randn(*lead, K).to(BF16)
        reference = copy.deepcopy(mlp)
        reference.strategy = "dense"
        chooses.sent.clear()
        with torch.set_grad_enabled(training):
            for _ in range(9):
                torch.testing.assert_close(mlp(x), reference(x), rtol=2e-2, atol=2e-2)
                (row,) = twell.explain(mlp)
                # a sparse training step does not count by groups of tokens
                known = training and row.strategy == "union"
                assert row.figures == Figures(firing, firing / N, None if known else firing)
        assert row.kind == ("training" if training else "inference")
        assert row.tokens == "257 to 512" if lead == (300,) else "129 to 256"
        assert (row.calls, row.measured) == (9, 8)
        assert len(chooses.sent) == 5
        # 200 of 264 neurons fire: too many for a sparse strategy
        assert row.strategy == "dense" if firing == 200 else row.strategy in ("row", "union")
        expected = {"dense"} | ({"union"} if training else {"row", "union"})
        assert set(row.costs) == expected


@pytest.mark.parametrize("strategy", ["row", "union", "dense"])
def test_measures_the_heaviest_tokens(strategy: str, chooses: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every strategy the same, from counts of groups of 8 tokens."""
    monkeypatch.setattr(rates, "decide", lambda *_: rates.Decision(strategy, "so that it measures", {}))
    for m in (40, 100, 300):
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
        assert heaviest > row.figures.nonzeros


def test_each_kind_and_size_of_calls_has_its_own_choice(chooses: Arrivals) -> None:
    mlp = layer(firing=8)
    for m in (3, 40, 65, 66, 256):
        with torch.no_grad():
            mlp(torch.randn(m, K).to(BF16))
        mlp(torch.randn(m, K).to(BF16))
    rows = twell.explain(mlp).rows
    assert [(row.kind, row.tokens) for row in rows] == [
        (kind, tokens)
        for kind in ("inference", "training")
        for tokens in ("3 to 4", "33 to 64", "65 to 128", "129 to 256")
    ]
    assert all(row.calls == (2 if row.tokens == "65 to 128" else 1) for row in rows)
    # too few tokens for the union of 128; and up to 32 of inference have one strategy, so that nothing is measured
    assert [row.figures.union for row in rows if row.figures] == [None] * 2 + [8 / N] + [None] * 3 + [8 / N]
    assert rows[0].strategy == "row"
    assert rows[0].figures is None


def test_measures_row_by_running_union(chooses: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    ffn = sys.modules["twell.ops.ffn"]
    own = ffn.behind_on_cpu
    monkeypatch.setattr(ffn, "behind_on_cpu", lambda *a: (ran.append("union" if a[-1] else "row"), own(*a))[1])
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


def test_more_than_the_hybrid_format_holds_has_no_union(chooses: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_fresh", lambda *_: rates.Decision("union", "so that training overflows", {}))
    mlp, x = layer(firing=100), torch.randn(256, K).to(BF16)
    mlp(x)
    (row,) = twell.explain(mlp)
    assert (row.strategy, row.figures) == ("union", Figures(100, None))
    mlp(x)
    assert strategies_of(mlp) == [("training", "dense")]
    assert "too near the sparse route's limit, 64" in twell.explain(mlp).rows[0].reason


# Devices


def test_tensors_without_values_neither_measure_nor_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(index: int) -> tuple[int, int]:
        raise RuntimeError("no CUDA driver")

    monkeypatch.setattr(device, "capability", no_driver)
    monkeypatch.setattr(measurement, "Transfer", lambda _: pytest.fail("measured a fake tensor"))
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


# Telling people


def test_explain_is_a_table(chooses: Arrivals) -> None:
    model = nn.ModuleDict({"first": layer(firing=8), "second": layer(SparseMLP, 200), "head": nn.Linear(K, K)})
    model["third"], model["fourth"] = layer(), layer()
    model["third"].strategy = "union"
    x = torch.randn(256, K).to(BF16)
    with torch.no_grad():
        model["third"](x)
        # a named strategy measures nothing
        assert not chooses.sent
        for _ in range(3):
            model["second"](model["first"](x))
    pending = dict(model["first"]._auto._pending)
    explained = twell.explain(model)
    assert [row.layer for row in explained] == ["first", "second", "third", "fourth"]
    assert len(explained) == 4
    header, *lines = str(explained).splitlines()
    assert header.split() == ["layer", "calls", "tokens", "strategy", "non-zeros", "union", "layout"]
    for said in (r"^second .* dense .* 200.0 +75.8%", r"dense's time \(measured in call 2\)$", "it was named"):
        assert any(re.search(said, line) for line in lines)
    # explain changes nothing
    assert twell.explain(model).rows == explained.rows
    assert model["first"]._auto._pending == pending != {}
    assert str(twell.explain(nn.Linear(2, 2))) == "no layers of twell"
    (row,) = twell.explain(twell.AutoStrategy())
    assert (row.strategy, row.reason) == ("auto", "no call has chosen yet: on a CPU all are dense")


def test_layers_that_are_alike_share_the_rows_of_a_table() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"mlp": layer(SparseMLP)}) for _ in range(12))})
    model["layers"][7].mlp.strategy = "row"
    assert len(explained := twell.explain(model)) == 13
    names = ["layers.0-6.mlp (7)", *["layers.7.mlp"] * 2, "layers.8-11.mlp (4)"]
    assert re.findall(r"^layers.*?(?=  )", str(explained), re.MULTILINE) == names


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_explain_has_the_non_zeros_that_calls_on_a_cpu_recorded(kind: str) -> None:
    for strategy in ("union", "auto"):
        mlp, x = SparseMLP(K, N, dtype=BF16, strategy=strategy), torch.randn(9, K).to(BF16)
        mlp.record_aux = True
        with torch.set_grad_enabled(kind == "training"):
            mlp(x)
        assert [row.figures for row in twell.explain(mlp)] == [Figures(float(mlp.aux.l0), None)]  # type: ignore[union-attr]
        mlp.float()
        found = {row.kind: row.figures for row in twell.explain(mlp)}
        assert found.get(kind, found.get("any")) is not None
        assert sum(each is not None for each in found.values()) == 1


@pytest.mark.parametrize("of", ["layer", "block of the pair"])
def test_a_layer_with_a_forward_of_others_is_not_said_to_run(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Liger-kernel patches instances."""
    pair = of != "layer"
    model: Any = twell.sparsify_(nn.TransformerEncoder(nn.TransformerEncoderLayer(K, 4, N, dropout=0.0), 1))
    owner = model.layers[0] if pair else layer()
    explained = model if pair else owner
    before = twell.explain(explained).rows
    # wrappers that say what they call, also around a method of a class that has a decorator
    monkeypatch.setattr(type(owner), "forward", functools.wraps(type(owner).forward)(lambda *_: None))
    for wrapped in (torch.compile(owner.forward), functools.wraps(owner.forward)(lambda x: x)):
        owner.forward = wrapped
        assert twell.explain(explained).rows == before
    owner.forward = types.MethodType(lambda self, x: x, owner)
    (row,) = twell.explain(explained)
    why = f"was set as the forward of the {of}: twell's code runs only if that calls it"
    assert (row.strategy, row.reason.partition("> ")[2]) == ("none", why)
    del owner.forward
    if pair:
        owner.linear1.forward = lambda x: x
        assert {
            (row.strategy, "of the pair linear1, linear2: one has hooks" in row.reason) for row in twell.explain(model)
        } == {("dense", True)}


def ran(mlp: Any, x: Tensor, training: bool) -> str:
    found = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.extend([args[8] if op._opname == "ffn" else "union"] if op.namespace == "twell" else [])
            return op(*args, **(kwargs or {}))

    with torch.set_grad_enabled(training), Calls():
        mlp(x)
    return found[0] if found else "dense"


@MODULES
@pytest.mark.parametrize("strategy", ["auto", "row", twell.AutoStrategy()])
def test_invariant_layers_run_row_whatever_was_measured(cls: Any, strategy: Any, chooses: Arrivals) -> None:
    mlp, x = cls(K, N, dtype=BF16, strategy=strategy, invariant=True), torch.randn(8, K, dtype=BF16)
    for _ in range(3):
        assert ran(mlp, x, False) == "row"
    assert not chooses.sent
    rows = {row.kind: (row.strategy, row.reason) for row in twell.explain(mlp)}
    assert rows["inference"][0] == "row"
    said = "invariant=True computes inference alone"
    assert rows["training"] == ("none", f"calls raise: {said}")
    with pytest.raises(NotImplementedError, match=said):
        mlp(x)
    # two settings that contradict each other are refused, whichever comes last
    mlp.invariant = False
    mlp.strategy = "union"
    with pytest.raises(ValueError, match='strategy must be "auto" or "row" with invariant=True, got "union"'):
        mlp.invariant = True
    assert "invariant" not in repr(mlp)
    twell.nn.set_strategy(mlp, "row", invariant=True)
    assert "invariant=True" in repr(mlp)


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


@pytest.mark.parametrize("training", [False, True])
def test_eager_calls_count_the_host(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of this package cost the host less than torch's, which counts in eager calls and not in CUDA graphs."""
    many = Figures(60.0, 0.99, 80.0) if training else Figures(450.0, None, 500.0)
    one = problem(512 if training else 64, training, k=1024, n=2816)
    assert rates.decide(one, many, None).strategy == "dense"
    assert rates.decide(one._replace(eager=True), many, None).strategy != "dense"
    # the GPU's times decide where they are longer than the host's
    assert rates.decide(one._replace(m=65536, eager=True), many, None).strategy == "dense"
    # on a host where they cost more, the reason says what a graph of the same call does
    monkeypatch.setattr(rates, "HOST", {t: {"dense": 1e3, "row": 2e3, "union": 2e3} for t in (False, True)})
    few, eager = Figures(8.0, 0.05, 12.0), problem(4096, training, k=1024, n=2816)._replace(eager=True)
    decision, in_a_graph = rates.decide(eager, few, None), rates.decide(eager._replace(eager=False), few, None).strategy
    assert decision.strategy == "dense" != in_a_graph
    assert f"the host is the limit; {in_a_graph} in a graph" in decision.reason
