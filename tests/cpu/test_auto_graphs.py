"""``strategy="auto"`` in graphs, captured, compiled and exported, and under checkpointing."""

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch
from auto_layers import BF16, DECIDES, SPARSE, Arrivals, K, N, layer, set_firing, strategies_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import twell
from twell import testing
from twell.choose import cards, measurement, rates
from twell.choose import site as sites
from twell.choose.rates import Figures, Problem
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.nn.models import set_down_layout
from twell.runtime import modes

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
        monkeypatch.setattr(modes, "capturing", lambda _: capturing)
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


@pytest.mark.parametrize("firing", [8, 200])
def test_a_capture_knows_what_one_call_has_measured(
    firing: int, chooses: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where figures have arrived by then, though no call has taken them."""
    mlp, x = layer(firing=firing), torch.randn(128, K).to(BF16)
    with torch.no_grad():
        mlp(x)
        monkeypatch.setattr(modes, "capturing", lambda _: True)
        mlp(x)
    captured = twell.explain(mlp).rows[-1]
    assert (captured.graph, captured.strategy == "dense") == ("captured", firing == 200)


@pytest.mark.parametrize("nonzeros", [5.0, 29.0, 900.0])
@pytest.mark.parametrize("down_copied", [False, True])
def test_figures_decide_for_a_graph_by_the_time_of_the_gpu(nonzeros: float, down_copied: bool) -> None:
    """The host, which the eager calls before it may wait for, launches nothing in a replay."""
    figures, chosen = Figures(nonzeros, nonzeros / 5632, nonzeros), set()
    for m in (8, 16, 64, 128, 512, 600):
        site, problem = sites.AutoStrategy(), Problem(m, 2048, 5632, True, False, down_copied)
        site.observe(problem, figures)
        site.choose(problem._replace(eager=True))
        chosen.add(best := rates.decide(problem, figures).strategy)
        assert site._peek(problem, record=True)[0] == best
    assert "dense" in chosen if nonzeros > 100 or down_copied else chosen <= {"row", "union"}


@pytest.mark.parametrize(("k", "n"), [(2048, 5632), (4096, 14336)])
@pytest.mark.parametrize("float8", [False, True])
def test_a_graph_without_figures_is_sparse_where_that_loses_nothing(k: int, n: int, float8: bool) -> None:
    for m, strategies in ((8, "row"), (32, "row"), (33, "dense"), (512, "dense"), (513, "union row")):
        problem = Problem(m, k, n, True, False, float8=float8)
        chosen = sites.AutoStrategy()._peek(problem, record=True)[0]
        assert chosen in strategies.split()
        # a call without a site will know nothing, either
        assert rates.decide_once(problem, cards.SHIPPED) == chosen
        # it may be sparse where figures may still correct it
        assert rates.decide(problem._replace(eager=True, m=512), None, None).strategy != "dense"


class Compiles:
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
    assert [row.tokens for row in twell.explain(mlp)] == ["more than 256"]


# Checkpoints


def training(m: int = 256) -> Problem:
    return Problem(m, K, N, True, True)


def site_of(mlp: Any) -> twell.AutoStrategy:
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


def test_memory_of_figures_is_reused_and_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch records an event behind pinned memory that is freed, in a stream that may be capturing a graph."""
    done: set[Any] = set()

    class Event:
        def record(self, stream: Any) -> None: ...
        def query(self) -> bool:
            return self in done

    empty, made = torch.empty, []

    def pinned(*sizes: int, pin_memory: bool, **options: Any) -> Tensor:
        made.append(empty(*sizes, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(measurement.device, "relaxed_capture", contextlib.nullcontext)
    memory = measurement._MEMORY
    memory.clear()
    # an evaluation before training
    with torch.inference_mode():
        first = measurement.Transfer(torch.tensor([1, 2]))
    assert not first.arrived()
    done.add(first._event)
    assert first.arrived()
    assert first.read() == [1, 2]
    del first
    under_way = measurement.Transfer(torch.tensor([3, 4, 5, 6]))
    assert len(made) == 1
    assert under_way.read() == [3, 4, 5, 6]
    # dropped while a copy may still write to it
    del under_way
    measurement.Transfer(torch.tensor([7]))
    assert len(made) == len(memory) == 2
    memory.clear()
