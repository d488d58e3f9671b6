"""Layers of experts on a GPU: ids of no expert."""

from typing import Any

import torch

import twell
from twell import testing
from twell.testing.case import Case
from twell.testing.operands import build, laid_out

BASE = Case.of("experts m=64 k=264 n=520 experts=9 slots=3 gated=False activation=relu2")


def operands(case: Case) -> dict[str, Any]:
    return {name: t for name, t in laid_out(case, build(case, "cuda")).items() if name != "dy"}


def call(case: Case, p: dict[str, Any]) -> Any:
    return twell.sparse_experts(**p, **case.asked, activation=case.activation)  # type: ignore[arg-type]


def test_ids_that_are_no_experts_read_nothing() -> None:
    p = operands(BASE)
    odd = p["expert_ids"].clone()
    odd[::3, 0] = torch.tensor([BASE.experts, -2, 1 << 40, -(1 << 40)], device="cuda").repeat(9)[: len(odd[::3])]
    gone = torch.where((odd < 0) | (odd >= BASE.experts), -1, odd)
    for strategy in ("row", "dense"):
        how = BASE.replace(strategy=strategy)
        testing.assert_same(call(how, p | {"expert_ids": odd}), call(how, p | {"expert_ids": gone}))


def test_a_weight_of_zero_hides_no_infinity() -> None:
    """Its token is routed all the same: h is 0 * inf."""
    x, ids = torch.ones(2, 64, dtype=torch.bfloat16, device="cuda"), torch.tensor([[0], [1]], device="cuda")
    x[0, 0] = torch.inf
    up, down = (torch.ones(2, 32, 64, dtype=torch.bfloat16, device="cuda") for _ in "ab")
    y = twell.sparse_experts(x, up, down.mT, ids, torch.tensor([[0.0], [1.0]], device="cuda"), strategy="row")
    assert bool(y[0].isnan().all())
    assert torch.equal(y[1], torch.full_like(y[1], 64 * 32))
