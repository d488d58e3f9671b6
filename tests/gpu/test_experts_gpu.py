"""Layers of experts on a GPU: bits of a token, no waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import twell
from twell import testing
from twell.testing.case import Case
from twell.testing.experts import draw_experts
from twell.testing.operands import build, laid_out

BASE = Case.of("experts m=64 k=264 n=520 experts=9 slots=3 gated=False activation=relu2")


def operands(case: Case) -> dict[str, Any]:
    return {name: t for name, t in laid_out(case, build(case, "cuda")).items() if name != "dy"}


def call(case: Case, p: dict[str, Any]) -> Any:
    return twell.sparse_experts(**p, **case.asked, activation=case.activation)  # type: ignore[arg-type]


@pytest.mark.parametrize("gated", [False, True])
def test_bits_do_not_depend_on_other_tokens(gated: bool) -> None:
    case = BASE.replace(m=200, k=1032, gated=gated, exact=False, strategy="row+invariant")
    p = operands(case)
    whole = call(case, p)
    for t in (1, 2, 8, 31, 100):
        part = p | {name: p[name][-t:] for name in ("x", "expert_ids", "weights")}
        testing.assert_same(call(case, part), whole[-t:], f"{t} tokens")


def test_ids_that_are_no_experts_read_nothing() -> None:
    p = operands(BASE)
    odd = p["expert_ids"].clone()
    odd[::3, 0] = torch.tensor([BASE.experts, -2, 1 << 40, -(1 << 40)], device="cuda").repeat(9)[: len(odd[::3])]
    gone = torch.where((odd < 0) | (odd >= BASE.experts), -1, odd)
    for strategy in ("row", "dense"):
        how = BASE.replace(strategy=strategy)
        testing.assert_same(call(how, p | {"expert_ids": odd}), call(how, p | {"expert_ids": gone}))


@pytest.mark.parametrize("strategy", ["row", "dense", "auto"])
def test_no_call_waits_for_the_gpu(strategy: Any) -> None:
    p = draw_experts(40, 256, 512, 16, 4, device="cuda")
    twell.sparse_experts(**p._asdict(), strategy=strategy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        twell.sparse_experts(**p._asdict(), strategy=strategy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled() -> None:
    p = draw_experts(40, 256, 512, 16, 4, device="cuda")
    run = torch.compile(lambda x, ids, weights: twell.sparse_experts(x, p.w_up, p.w_down, ids, weights, strategy="row"))
    for t in (40, 17):
        given = p.x[:t], p.expert_ids[:t], p.weights[:t]
        right = twell.sparse_experts(given[0], p.w_up, p.w_down, *given[1:], strategy="row")
        testing.assert_same(run(*given), right)
