"""``strategy="auto"`` and the int8 screen on a GPU: counts without waits."""

from __future__ import annotations

import copy

import pytest
import torch
from test_auto_gpu import backward, module, settle

import twell
from twell import _tables, testing
from twell.ops import screened
from twell.ops.quantize_gate import require
from twell.testing import FFN

M = 4096
BOTH = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
# times of no machine: the screen is the fastest unless nearly all neurons are candidates
TERMS = {"union": (0.5, 0.5, 0.0, 0.0), "union+screen": (0.2, 0.1, 0.0, 0.6)}
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
    require(torch.empty(1, device="cuda"), "gate_screen")


@pytest.mark.parametrize("m", [0, 1, 128, 300, M])
def test_counts_are_those_of_the_operator(m: int, topic: FFN) -> None:
    x = topic.x[:m]
    of_w = twell.ops.quantize_gate(topic.w_gate, True)
    listed = twell.ops.ffn_screened(*topic._replace(x=x), *of_w, 8)[4]
    found = screened.count(x, topic.w_gate, None)
    testing.assert_same(found.int(), listed, "candidates")


@BOTH
@pytest.mark.parametrize("training", [False, True])
def test_a_layer_comes_to_screen(gated: bool, training: bool, topic: FFN, screens: None) -> None:
    """Without a wait, by the candidates that the operator lists; y has the bits of "union"."""
    mlp = module(topic, gated)
    with torch.set_grad_enabled(training):
        settle(mlp, topic.x, step=backward if training else lambda y: None)
    (row,) = twell.explain(mlp)
    assert row.figures is not None
    found = screened.count(topic.x, topic.w_gate, None)
    assert row.figures.candidates == found.sum().item() / (M // 128 * topic.w_gate.shape[0])
    assert row.strategy == "union+screen"
    named = copy.deepcopy(mlp)
    named.strategy = "union"
    with torch.no_grad():
        testing.assert_same(mlp(topic.x), named(topic.x), "y")
