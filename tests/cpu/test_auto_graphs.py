"""``strategy="auto"`` in graphs, captured, compiled and exported, and under checkpointing."""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
from typing import Any

import fake_gpu
import pytest
import torch
from auto_layers import BF16, DECIDES, SPARSE, Arrivals, K, N, layer, set_firing, strategies_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import twell
from twell import _modes, testing, tuning
from twell._activation import RELU
from twell._runtime import geometry
from twell.nn import SparseGatedMLP, SparseMLP, set_down_layout
from twell.ops.operands import Operands
from twell.strategy import costs, tables
from twell.strategy import site as sites
from twell.strategy.costs import Figures, Problem
from twell.strategy.plan import Route

MODULES = pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])


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


# Graphs


def test_a_capture_of_many_tokens_takes_the_choice_and_leaves_nothing(
    chooses: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp, x = layer(firing=200), torch.randn(600, K).to(BF16)
    with torch.no_grad():
        capturing = True
        monkeypatch.setattr(_modes, "capturing", lambda _: capturing)
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


@pytest.mark.parametrize("nonzeros", [0.0, 5.0, 5000.0])
def test_no_figure_decides_for_a_graph_of_few_tokens(nonzeros: float) -> None:
    """Figures of requests that an engine makes up must not say what its graphs run."""
    site, figures = sites.AutoStrategy(), Figures(nonzeros, nonzeros / 5632, nonzeros)
    for m in (16, 64, 128, 512):
        problem = Problem(m, 2048, 5632, True, False)
        for _ in range(3):
            site.observe(problem, figures)
            site.choose(problem)
        expected = costs.captured(problem, tables.SHIPPED)
        assert expected is not None
        assert site._peek(problem, record=True)[0] == expected.strategy
        assert expected.strategy in (tables.GUARDED, "dense")
        assert m > 64 or expected.strategy == tables.GUARDED
    assert costs.captured(Problem(8, 2048, 5632, True, False), tables.SHIPPED) is None
    assert costs.captured(Problem(600, 2048, 5632, True, False), tables.SHIPPED) is None


@pytest.mark.parametrize("gated", [True, False])
def test_a_graph_of_few_tokens_holds_both_halves(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_gpu.install(monkeypatch)
    x, w_gate, w_up, w_down, *_ = testing.integer_problem(64, 256, 512, density=0.1)
    given = Operands(x, w_gate, w_up if gated else None, w_down.t(), None, None, None)
    route = Route("row", guarded=True)
    sys.modules["twell.ops.ffn"].on_cuda(given, 8, RELU, route, False)
    assert gpu.names() == ["gate_pack_few", "up_down_token", "dense_halves"]
    (*_, counters, weights, stats, helpers, _, most), form = gpu.launches[1][1][:-2], gpu.launches[1][1][-2:]
    assert counters.shape == (geometry.TOKEN_COUNTERS + 64 * gpu.launches[1][0].cluster,)
    assert (weights.shape, stats.shape, form) == ((64,), (8, 2, 2), (32, 0))
    assert helpers > 0
    assert most == tuning.most_by_row(64, 256, 512, gated)
    # a token alone looks at no others, and shares nothing
    gpu.clear()
    sys.modules["twell.ops.ffn"].on_cuda(given, 8, RELU, Route("row", invariant=True), False)
    (*_, counters, _, stats, helpers, _, _), name = gpu.launches[-1][1][:-2], gpu.names()[-1]
    assert (name, counters.shape, stats.shape[0], helpers) == ("up_down_token", (0,), 0, 0)
    # dense halves count nothing
    gpu.clear()
    sys.modules["twell.ops.ffn"].on_cuda(given, 8, RELU, route, True)
    assert "up_down_token" not in gpu.names()


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "pair"])
@pytest.mark.parametrize("totals", [True, False], ids=["totals", "y"])
def test_a_given_gate_in_a_graph_of_few_tokens(gated: bool, totals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense halves compute no totals, and nothing without x: both were garbage where the device chose them."""
    gpu = fake_gpu.install(monkeypatch)
    monkeypatch.setattr(_modes, "capturing", lambda x: True)
    monkeypatch.setattr(tables, "in_use", lambda on: tables.SHIPPED)
    p = testing.make("topic29", 64, 2048, 5632, device="cpu")
    up = (p.x, p.w_up) if gated else (None, None)
    module = sys.modules["twell.ops.sparse_up_down"]
    monkeypatch.setattr(module, "imposed_on_call", lambda *device: "")
    gate = torch.mm(p.x, p.w_gate.t())
    given = module.Given(gate, up[0], up[1], p.w_down, None, None)
    route = module._route(given, "auto", None, totals)
    assert route.guarded is (gated and not totals)
    module._run(module._sparse_on_cuda, given, 8, RELU, route, totals)
    kernels = [name for name in gpu.names() if name in ("up_down_token", "dense_halves")]
    assert kernels == (["up_down_token", "dense_halves"] if route.guarded else [])


def test_a_call_without_a_site_has_the_whole_choice_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else figures would be of a kernel that left, where dense halves compute y."""
    gpu = fake_gpu.install(monkeypatch)
    monkeypatch.setattr(_modes, "capturing", lambda x: True)
    monkeypatch.setattr(tables, "in_use", lambda on: tables.SHIPPED)
    p = testing.make("topic29", 64, 2048, 5632, device="cpu")
    route = sites.without_site(p.x, 5632, True, False, False)
    assert (route.strategy, route.guarded) == ("row", True)
    layer = Operands(p.x, p.w_gate, p.w_up, p.w_down.t())
    sys.modules["twell.ops.ffn"].on_cuda(layer, 8, RELU, route, True)
    assert "up_down_token" not in gpu.names()


def test_a_graph_that_cannot_choose_in_each_replay_is_dense() -> None:
    problem = Problem(64, 2048, 5632, True, False)
    without = dataclasses.replace(tables.SHIPPED, screens=False)
    # where rows gain little, the choice would cost more in a graph whose tokens fire much
    little = problem._replace(m=256)
    for table, size in ((without, problem), (tables.SHIPPED, little), (tables.SHIPPED, little._replace(merged=True))):
        decision = costs.captured(size, table)
        assert decision is not None
        assert decision.strategy == "dense"
    for size in (problem, problem._replace(merged=True), Problem(128, 4096, 14336, True, False)):
        decision = costs.captured(size, tables.SHIPPED)
        assert decision is not None
        assert decision.strategy == tables.GUARDED


def test_a_graph_that_would_copy_the_down_weight_says_so() -> None:
    problem = Problem(64, 2048, 5632, True, False)
    in_place, copied = (costs.captured(problem._replace(down_copied=each), tables.SHIPPED) for each in (False, True))
    assert in_place is not None
    assert copied is not None
    assert (in_place.strategy, copied.strategy) == (tables.GUARDED, "dense")
    assert "the down weight is copied" in copied.reason


@pytest.mark.parametrize(("nonzeros", "known"), [(29.0, True), (900.0, False)])
def test_what_a_graph_takes_for_known_figures(nonzeros: float, known: bool) -> None:
    """The time of dense products that the device chooses is not known."""
    for m in (8, 64, 256, 600):
        problem, figures = Problem(m, 2048, 5632, True, False), Figures(nonzeros, 0.5)
        choice, share = costs.replayed(problem, figures, tables.SHIPPED)
        decision, graph = costs.decide(problem, figures, None), costs.captured(problem, tables.SHIPPED)
        assert choice.strategy == (decision if graph is None else graph).strategy
        if m == 64:
            assert choice.strategy == tables.GUARDED
            assert (share is not None) == known
            assert share is None or share > decision.costs["row"]
        else:
            assert share == (1.0 if choice.strategy == "dense" else decision.costs[choice.strategy])


class Compiles:
    """A backend that counts graphs and runs them eagerly."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs += 1
        return graph.forward


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


def test_equal_layers_share_a_graph_and_choose_for_themselves(chooses: Arrivals, fresh_dynamo: None) -> None:
    backend, x = Compiles(), torch.randn(512, K).to(BF16)
    layers = [layer(firing=firing) for firing in (8, 200) * 6]
    with torch.no_grad():
        # as many turns as there are, and one more
        for _ in range(9):
            for mlp in layers:
                mlp.compile(fullgraph=True, backend=backend)
                mlp(x)
    assert backend.graphs == 1
    for mlp, firing in zip(layers, (8, 200) * 6, strict=True):
        (row,) = twell.explain(mlp)
        assert (row.calls, row.figures) == (9, Figures(firing, firing / N, firing))
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
            known = len(sites._SITES)
    assert known == len(sites._SITES) <= 2 + sum(not storage.expired() for storage, _ in sites._SITES.values())


def test_two_classes_of_symbolic_sizes(chooses: Arrivals, fresh_dynamo: None) -> None:
    backend = Compiles()
    mlp = layer(firing=8)
    compiled = torch.compile(mlp, fullgraph=True, backend=backend, dynamic=True)
    for m in (300, 1000, 5000, 7, 256, 257, 128):
        assert compiled(torch.randn(m, K).to(BF16)).shape == (m, K)
    assert backend.graphs <= 3
    assert [row.tokens for row in twell.explain(mlp)] == ["more than 256", "up to 256"]


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


def test_a_traced_module_keeps_choosing(chooses: Arrivals) -> None:
    mlp, x = layer(firing=200), torch.randn(256, K).to(BF16)
    with torch.no_grad():
        traced = torch.jit.trace(mlp, (x,), check_trace=False)
        for _ in range(3):
            torch.testing.assert_close(traced(x), mlp(x), rtol=2e-2, atol=2e-2)
    assert strategies_of(mlp) == [("inference", "dense")]


# Checkpoints


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


@pytest.mark.parametrize(
    ("way", "tail", "bias", "lead"),
    [
        (once, False, False, (256,)),
        (once, True, True, (2, 2, 64)),
        (nested, False, True, (2, 128)),
        (nested, True, False, (256,)),
    ],
)
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


def test_only_a_graph_of_a_checkpoint_holds_a_choice(chooses: Arrivals) -> None:
    mlp, x = layer(firing=8), torch.randn(256, K).to(BF16)
    site = mlp.strategy = twell.AutoStrategy()
    # the decision due at call 1 is made at the first call that allows one
    y = once(mlp, x)
    mlp(x)
    assert decided(site) == "dense"
    # inference is free meanwhile, and a graph that is dropped holds nothing
    with torch.no_grad():
        mlp(x)
    del y
    gc.collect()
    mlp(x)
    mlp(x)
    assert decided(site) == "union"
    assert not site._open

    site = site_of(mlp)
    kept = [mlp(x), mlp(x)]
    assert decided(site) == "union"
    assert all(y.grad_fn is not None for y in kept)
    # frozen parameters are as inference
    frozen = layer(firing=8).requires_grad_(False)
    assert not frozen(x).requires_grad
    assert strategies_of(frozen)[0][0] == "inference"
