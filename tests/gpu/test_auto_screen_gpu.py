"""``strategy="auto"`` and the int8 screen on a GPU: counts without waits, kept copies on streams and in graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_auto_gpu import backward, module, settle
from torch import Tensor

import twell
from twell import _tables, testing
from twell.nn import keep_gate_copies
from twell.ops import screened
from twell.ops.quantize_gate import require
from twell.testing import FFN

M = 4096
BOTH = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
# times of no machine: the screen is the fastest unless nearly all neurons are candidates
TERMS = {"union": (0.5, 0.5, 0.0, 0.0), "screened": (0.2, 0.1, 0.0, 0.6)}
TABLE = _tables.Table(
    {(training, gated, 2048, 5632): {1024: TERMS} for training in (False, True) for gated in (False, True)},
    "a GPU",
    "2026-11-22",
)


@pytest.fixture(scope="module")
def topic() -> FFN:
    return testing.make("topic29", M)


@pytest.fixture
def screens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tables, "in_use", lambda on: TABLE)
    # a GPU of another family refuses
    require(torch.empty(1, device="cuda"))


@pytest.mark.parametrize("screen", ["screened", "proven"])
@pytest.mark.parametrize("m", [0, 1, 128, 300, M])
def test_counts_are_those_of_the_operator(m: int, screen: str, topic: FFN) -> None:
    x = topic.x[:m]
    nearest = screen == "proven"
    of_w = twell.ops.quantize_gate(topic.w_gate, True, nearest)
    listed = twell.ops.ffn_screened(*topic._replace(x=x), *of_w, 8, "relu", 0.0, nearest)[4]
    found = screened.count(x, topic.w_gate, None, screen)
    assert found is not None
    testing.assert_same(found.int(), listed, "candidates")


@BOTH
@pytest.mark.parametrize("screen", ["auto", "proven"])
@pytest.mark.parametrize("training", [False, True])
def test_a_layer_comes_to_screen(gated: bool, training: bool, screen: Any, topic: FFN, screens: None) -> None:
    """Without a wait, by the candidates that the operator lists; y has the bits of "union"."""
    mlp = module(topic, gated)
    mlp.strategy = twell.AutoStrategy(screen=screen)
    with torch.set_grad_enabled(training):
        settle(mlp, topic.x, step=backward if training else lambda y: None)
    (row,) = twell.explain(mlp)
    name = "proven" if screen == "proven" else "screened"
    assert row.figures is not None
    found = screened.count(topic.x, topic.w_gate, None, name)
    assert found is not None
    assert row.figures.candidates == found.sum().item() / (M // 128 * topic.w_gate.shape[0])
    assert row.strategy == name
    named = copy.deepcopy(mlp)
    named.strategy = "union"
    with torch.no_grad():
        testing.assert_same(mlp(topic.x), named(topic.x), "y")


@pytest.fixture
def kept(topic: FFN) -> Any:
    mlp = module(topic).requires_grad_(False)
    mlp.strategy = "screened"
    keep_gate_copies(mlp)
    return mlp


def right(mlp: Any, x: Tensor) -> Tensor:
    other = copy.deepcopy(mlp)
    other.strategy = "union"
    y: Tensor = other(x)
    return y


def changed(weight: Tensor) -> None:
    weight.copy_(weight.roll(8, 0))


def test_a_kept_copy_is_made_once_and_after_a_write(kept: Any, topic: FFN, monkeypatch: pytest.MonkeyPatch) -> None:
    ffn: Any = __import__("importlib").import_module("twell.ops.ffn")
    made, quantize = [], ffn.quantize_on_cuda

    def spy(*arguments: Any) -> Any:
        made.append(arguments)
        return quantize(*arguments)

    monkeypatch.setattr(ffn, "quantize_on_cuda", spy)
    for _ in range(3):
        testing.assert_same(kept(topic.x), right(kept, topic.x), "y")
    assert len(made) == 1
    changed(kept.gate_proj.weight)
    for _ in range(3):
        testing.assert_same(kept(topic.x), right(kept, topic.x), "y after a write")
    assert len(made) == 2
    n, k = topic.w_gate.shape
    assert twell.explain(kept).rows[0].copy_bytes == n * (k + 12)


def test_other_streams_wait_for_a_copy(kept: Any, topic: FFN) -> None:
    """The stream that makes it is busy; another one reads it."""
    expected = right(kept, topic.x)
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(5):
        changed(kept.gate_proj.weight)
        expected = right(kept, topic.x)
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(50_000_000)
            kept(topic.x)
        with torch.cuda.stream(other):
            y = kept(topic.x)
        torch.cuda.synchronize()
        testing.assert_same(y, expected, "y")


def test_a_captured_graph_reads_the_copy_of_its_capture(kept: Any, topic: FFN) -> None:
    """Its memory stays when other calls have made a new one."""
    kept(topic.x)
    graph, (y,) = testing.captured(lambda: (kept(topic.x),))
    first, expected = kept._gate_copy._made.quantized, right(kept, topic.x)
    weight = kept.gate_proj.weight.clone()
    changed(kept.gate_proj.weight)
    kept(topic.x)
    assert kept._gate_copy._made.quantized is not first
    with torch.no_grad():
        kept.gate_proj.weight.copy_(weight)
    graph.replay()
    testing.assert_same(y, expected, "y of a replay")


def test_compiled_calls_read_the_copy(kept: Any, topic: FFN) -> None:
    compiled = torch.compile(kept, fullgraph=True)
    for _ in range(2):
        testing.assert_same(compiled(topic.x), right(kept, topic.x), "y")
        changed(kept.gate_proj.weight)
    before = kept._gate_copy._made
    testing.assert_same(compiled(topic.x), right(kept, topic.x), "y")
    assert kept._gate_copy._made is not before


@torch.no_grad()
def test_a_compiled_graph_may_write_the_weight_after_its_call(kept: Any, topic: FFN) -> None:
    """It counts the write before it runs, so its copy looked as if it were of the new weight."""

    def step(x: Tensor) -> Tensor:
        y: Tensor = kept(x)
        kept.gate_proj.weight.mul_(-1)
        return y

    compiled = torch.compile(step, fullgraph=True)
    for _ in range(3):
        expected = right(kept, topic.x)
        testing.assert_same(compiled(topic.x), expected, "y")
        testing.assert_same(kept(topic.x), right(kept, topic.x), "y after the write")
