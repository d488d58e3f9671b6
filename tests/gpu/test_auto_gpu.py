"""``strategy="auto"`` on a GPU: measurements without waits, and the choices in graphs and checkpoints."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import twell
from tests import programs
from tests.gpu.strategies import BOTH, module
from twell import testing
from twell.choose import rates, tuning
from twell.ops import screened
from twell.runtime import specs
from twell.testing import FFN

M = 4096


def screening(problem: rates.Problem, figures: rates.Figures, card: Any = None) -> dict[str, float]:
    """Times of no machine: the screen is the fastest unless nearly all neurons are candidates."""
    union = rates.shares(problem, figures)[0]
    found = {"dense": 1.0, "row": 2.0, "union": 0.5 + 0.5 * union}
    return found | (
        {} if figures.candidates is None else {"union+screen": 0.2 + 0.1 * union + 0.6 * figures.candidates}
    )


@pytest.fixture(scope="module", params=["uniform29", "topic29", "topic128", "dense911"])
def layer(request: pytest.FixtureRequest) -> tuple[str, FFN]:
    return request.param, testing.make(request.param, M)


@pytest.fixture(scope="module")
def topic() -> FFN:
    return testing.make("topic29", M)


@pytest.fixture(scope="module")
def dense() -> FFN:
    return testing.make("dense911", M)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def settle(mlp: Any, x: Tensor, calls: int = 9, step: Callable[[Tensor], Any] = lambda y: None) -> None:
    """Calls that must not wait for the GPU; the test waits between them until figures arrive."""
    for _ in range(calls):
        with no_synchronisation():
            step(mlp(x))
        torch.cuda.synchronize()


def backward(y: Tensor) -> None:
    y.backward(torch.ones_like(y))


def true_figures(problem: FFN) -> rates.Figures:
    active = torch.relu(problem.x @ problem.w_gate.T) != 0
    union = active.view(-1, 128, active.shape[1]).any(1).float().mean()
    return rates.Figures(active.sum().item() / len(problem.x), union.item())


@BOTH
@pytest.mark.parametrize("training", [False, True])
def test_chooses_by_what_it_measures(gated: bool, training: bool, layer: tuple[str, FFN]) -> None:
    """And results are right whatever runs."""
    name, problem = layer
    mlp, results = module(problem, gated), []

    def step(y: Tensor) -> None:
        results.append(y.detach())
        if training:
            backward(y)

    with torch.set_grad_enabled(training):
        settle(mlp, problem.x, step=step)
    for y in results:
        comparison = testing.compare(problem, y, gated=gated)
        assert comparison.ok, comparison
    (row,) = twell.explain(mlp)
    expected = true_figures(problem)
    assert row.figures is not None
    # the kernel's gate and PyTorch's may round differently
    assert row.figures.nonzeros == pytest.approx(expected.nonzeros, rel=2e-3)
    assert row.figures.union == pytest.approx(expected.union, rel=2e-3)
    assert row.costs["dense"] == 1
    assert row.strategy == min(row.costs, key=row.costs.get) or "hold" in row.reason or "would save" in row.reason
    if name == "dense911":
        assert row.strategy == "dense"
    elif name == "topic29" or (name == "uniform29" and (not training or tuning.family(0) == specs.SM90)):
        assert row.strategy == "union" if training else row.strategy in ("row", "union")


@pytest.mark.parametrize("m", [1, 7, 64])
def test_few_tokens(m: int, topic: FFN) -> None:
    mlp = module(topic).requires_grad_(False)
    settle(mlp, topic.x[:m])
    (row,) = twell.explain(mlp)
    if m <= specs.DECODE_TOKENS[-1] and tuning.family(0) == specs.SM90:
        assert (row.strategy, row.figures) == ("row", None)
        return
    assert row.strategy in ("row", "dense")
    assert row.figures.union is None
    active = torch.relu(topic.x[:m] @ topic.w_gate.T) != 0
    assert row.figures.nonzeros * m == pytest.approx(float(active.sum()), abs=2 + 0.002 * m * row.figures.nonzeros)
    assert row.figures.heaviest is not None
    groups = max(float(group.sum()) for group in active.split(8))
    assert row.figures.heaviest * min(m, 8) == pytest.approx(groups, abs=2 + 0.002 * groups)


def test_figures_come_when_the_gpu_is_done(topic: FFN, dense: FFN) -> None:
    """Calls queued behind a sleep run like the first one: no figure has arrived."""
    mlp = module(dense).requires_grad_(False)
    mlp(dense.x)
    mlp = copy.deepcopy(mlp)
    mlp._auto = twell.AutoStrategy(period=1)
    torch.cuda.synchronize()
    with no_synchronisation():
        torch.cuda._sleep(2_000_000_000)  # 1 s
        for _ in range(5):
            mlp(dense.x)
        before = twell.explain(mlp).rows[0]
    assert before.figures is None
    assert before.strategy in ("row", "union")
    torch.cuda.synchronize()
    assert twell.explain(mlp).rows[0].figures is not None
    mlp(dense.x)
    assert twell.explain(mlp).rows[0].strategy == "dense"


@pytest.mark.parametrize("m", [0, 1, 128, 300, M])
def test_counts_of_candidates_are_those_of_the_layer(m: int, topic: FFN) -> None:
    x = topic.x[:m]
    listed = programs.screened_layer(topic._replace(x=x))[4]
    testing.assert_same(screened.count(x, topic.w_gate, None).int(), listed, "candidates")


@BOTH
@pytest.mark.parametrize("training", [False, True])
def test_a_layer_comes_to_screen(gated: bool, training: bool, topic: FFN, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wait, by the candidates that the operator lists; y has the bits of "union"."""
    # a GPU of another family refuses
    screened.require(torch.device("cuda", 0), "the screen")
    monkeypatch.setattr(rates, "seconds", screening)
    mlp = module(topic, gated)
    with torch.set_grad_enabled(training):
        settle(mlp, topic.x, step=backward if training else lambda y: None)
    (row,) = twell.explain(mlp)
    found = screened.count(topic.x, topic.w_gate, None)
    assert row.figures.candidates == found.sum().item() / (M // 128 * topic.w_gate.shape[0])
    assert row.strategy == "union+screen"
    named = copy.deepcopy(mlp)
    named.strategy = "union"
    with torch.no_grad():
        testing.assert_same(mlp(topic.x), named(topic.x), "y")


def test_training_after_an_evaluation_in_inference_mode(topic: FFN) -> None:
    """What measures keeps no tensor of that mode, which training could not change."""
    mlp = module(topic, "auto")
    for _ in range(4):
        with torch.inference_mode():
            mlp(topic.x)
        torch.cuda.synchronize()
        mlp(topic.x).float().square().mean().backward()
    trained = {row.strategy for row in twell.explain(mlp).rows if row.kind == "training"}
    assert trained
    assert trained <= {"union", "union+screen"}


def test_figures_that_arrive_in_a_capture(topic: FFN) -> None:
    """The stream that measured captures a graph, which reads the figures; torch's pinned memory stays usable."""
    mlp, x, stream = module(topic, "auto"), topic.x[:256], torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        mlp(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = mlp(x)
        graph.replay()
    stream.synchronize()
    assert {row.graph for row in twell.explain(mlp).rows} == {"", "captured"}
    for _ in range(3):
        assert torch.empty(4, pin_memory=True).is_pinned()
        assert not y.isnan().any()
