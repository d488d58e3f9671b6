"""Experts of e4m3 weights without a GPU: the formula, what operands may be, and launches on a fake GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import twell
from twell import float8
from twell.testing.bits import assert_same
from twell.testing.case import Case
from twell.testing.operands import build, laid_out

CASE = Case.of(
    "experts m=9 k=48 n=80 experts=5 slots=2 exact=False gated=False activation=relu2 density=0.5 absent=0.1 scales=row"
)


def problem(**change: Any) -> dict[str, Any]:
    case = CASE.replace(**change)
    return {name: t for name, t in laid_out(case, build(case)).items() if name != "dy"}


def call(p: dict[str, Any], **options: Any) -> torch.Tensor:
    return twell.sparse_experts(**{"activation": "relu2", "strategy": "row", **p, **options})


def test_x_may_come_quantised_and_have_leading_dimensions() -> None:
    p = problem()
    assert_same(call(p), call(p, x=float8.quantize_tokens(p["x"])))
    three = {name: p[name].view(3, 3, -1) for name in ("x", "expert_ids", "weights")}
    assert_same(call(p, **three), call(p).view(3, 3, -1))


def test_a_static_scale_is_that_of_all_tokens() -> None:
    p = problem()
    scale = torch.tensor([0.03])
    up, down = p["w_up"], p["w_down"]
    layer = up.values, up.by_rows(), None, None, down.values.transpose(1, 2), down.by_rows()
    how = p["expert_ids"], p["weights"], 8, "row", "relu2"
    given = torch.ops.twell.experts_float8(p["x"], scale, *layer, *how)
    assert_same(given, call(p, x=float8.quantize_tokens(p["x"], scale)))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "fp16": ({"x": torch.ones(9, 48).half()}, TypeError, "x must be bfloat16 with e4m3 weights, got torch.float16"),
    "16 bits among them": ({"w_down": torch.ones(5, 48, 80)}, TypeError, "w_down must be a Float8 as other operands"),
    "down": ({"w_down": twell.quantize(torch.ones(5, 48, 88))}, ValueError, r"w_down must be \[5, 80, 48\]"),
    "two": ({"w_up": twell.quantize(torch.ones(80, 48))}, ValueError, "w_up must have 3 dimensions"),
    "ids": ({"expert_ids": torch.full((9, 2), 5)}, ValueError, "expert_ids must be from -1 to 4, got 5"),
    "routes": ({"weights": torch.ones(9, 3)}, ValueError, r"weights must be floating \[9, 2\]"),
    "K": (
        {
            "w_up": twell.quantize(torch.ones(5, 80, 16400)),
            "w_down": twell.quantize(torch.ones(5, 16400, 80)),
            "x": torch.ones(9, 16400, dtype=torch.bfloat16),
        },
        ValueError,
        "K a multiple of 16 up to 16384",
    ),
    "gate": ({"w_gate": twell.quantize(torch.ones(5, 80, 48))}, NotImplementedError, "without a gate, got one"),
    "invariant": ({"invariant": True}, NotImplementedError, "no invariant form"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        twell.sparse_experts(**{**problem(), "strategy": "row", **change})
