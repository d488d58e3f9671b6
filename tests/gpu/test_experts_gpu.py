"""Layers of experts on a GPU: exact sums, bits of a token, graphs, no waits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import twell
from tests.fuzz import experts as fuzz
from twell import testing
from twell.testing.experts import draw_experts

BASE = fuzz.Case(
    7, 0, 64, 264, 520, 9, 3, "bf16", exact=True, gated=False, activation="relu2", density=0.1, strategy="row",
    invariant=False, compression=8, wide=True, hot=0.0, merged=False, down_rows=True, absent=0.0,
)  # fmt: skip
# sizes of Nemotron's experts, classes of K, tiles that spill, one expert for all, ids of nobody, most experts
CASES: dict[str, dict[str, Any]] = {
    "nano": {"t": 33, "k": 2688, "n": 1856, "experts": 16, "top": 6},
    "one token": {"t": 1, "k": 2688, "n": 1856, "experts": 16, "top": 6},
    "wide": {"t": 9, "k": 8192, "n": 72, "experts": 3},
    "long": {"t": 5, "k": 72, "n": 28672, "experts": 2, "top": 2, "density": 0.02},
    "spilling": {"t": 70, "density": 1.0, "compression": 8, "k": 72},
    "one expert": {"t": 300, "hot": 1.0, "experts": 40},
    "nobody": {"absent": 1.0},
    "some": {"absent": 0.5, "wide": False},
    "many": {"t": 40, "experts": 1024, "n": 40, "top": 32},
    "alike": {"experts": 1, "top": 8},
    "gated": {"gated": True, "merged": True, "activation": "drelu"},
    "fp16": {"gated": True, "dtype": "fp16", "activation": "relu"},
    "threshold": {"activation": "fatrelu", "compression": 2},
    "as stored": {"down_rows": False},
}


@pytest.mark.parametrize("change", CASES.values(), ids=CASES)
def test_sums_are_exact(change: dict[str, Any]) -> None:
    case = dataclasses.replace(BASE, **change)
    assert fuzz.attempt(case, torch.device("cuda")) == "ok"


@pytest.mark.parametrize("gated", [False, True])
def test_bits_do_not_depend_on_other_tokens(gated: bool) -> None:
    case = dataclasses.replace(BASE, t=200, k=1032, gated=gated, exact=False, invariant=True)
    p = fuzz.build(case, torch.device("cuda"))
    whole = fuzz.call(case, p)
    for t in (1, 2, 8, 31, 100):
        part = p._replace(x=p.x[-t:], expert_ids=p.expert_ids[-t:], weights=p.weights[-t:])
        testing.assert_same(fuzz.call(case, part), whole[-t:], f"{t} tokens")


def test_ids_that_are_no_experts_read_nothing() -> None:
    case = dataclasses.replace(BASE, absent=0.0)
    p = fuzz.build(case, torch.device("cuda"))
    odd = p.expert_ids.clone()
    odd[::3, 0] = torch.tensor([case.experts, -2, 1 << 40, -(1 << 40)], device="cuda").repeat(9)[: len(odd[::3])]
    gone = torch.where((odd < 0) | (odd >= case.experts), -1, odd)
    for strategy in ("row", "dense"):
        how = dataclasses.replace(case, strategy=strategy)
        testing.assert_same(fuzz.call(how, p._replace(expert_ids=odd)), fuzz.call(how, p._replace(expert_ids=gone)))


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
