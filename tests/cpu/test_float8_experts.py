"""Experts of e4m3 weights without a GPU: tokens and scales as callers may give them."""

from typing import Any

import torch

import twell
from twell.ops import float8
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
    layer = p["x"], up.values, None, down.values.transpose(1, 2), p["expert_ids"], p["weights"]
    how = 8, "row", "relu2", 0.0, False, None, None
    given = torch.ops.twell.experts(*layer, *how, scale, up.by_rows(), None, down.by_rows())
    assert_same(given, call(p, x=float8.quantize_tokens(p["x"], scale)))
