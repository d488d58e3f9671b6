"""Experts of e4m3 weights without a GPU: the formula, what operands may be, and launches on a fake GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import twell
from tests.cpu import fake_gpu
from tests.fuzz import experts as fuzz
from twell import float8
from twell.testing.bits import assert_same

CPU = torch.device("cpu")
CASE = fuzz.Case(
    3, 0, 9, 48, 80, 5, 2, "bf16", exact=False, gated=False, activation="relu2", density=0.5, strategy="row",
    invariant=False, compression=8, wide=True, hot=0.0, merged=False, down_rows=True, absent=0.1, scales="row",
)  # fmt: skip


def problem(**change: Any) -> Any:
    return fuzz.build(fuzz.Case(**{**CASE.__dict__, **change}), CPU)


def call(p: Any, **options: Any) -> torch.Tensor:
    return twell.sparse_experts(**p._asdict(), **{"activation": "relu2", "strategy": "row", **options})


@pytest.mark.parametrize("seed", range(40))
def test_cases_of_the_fuzzer(seed: int) -> None:
    case = fuzz.draw(12, seed, False)
    if not case.scales:
        case = fuzz.Case(**{**CASE.__dict__, "number": seed, "t": case.t, "top": case.top, "exact": seed % 2 == 0})
    assert fuzz.attempt(case, CPU) == "ok"


def test_one_expert_is_a_layer() -> None:
    p = problem(experts=1, top=1, absent=0.0)
    ones = p._replace(weights=torch.ones_like(p.weights))
    layer = (float8.Float8(record.values[0], record.scale[0]) for record in (p.w_up, p.w_down))
    assert_same(call(ones), twell.sparse_ffn(p.x, *layer, activation="relu2", strategy="union"))


def test_x_may_come_quantised_and_have_leading_dimensions() -> None:
    p = problem()
    made = float8.quantize_tokens(p.x)
    assert_same(call(p), call(p._replace(x=made)))
    three = {name: getattr(p, name).view(3, 3, -1) for name in ("x", "expert_ids", "weights")}
    assert_same(call(p._replace(**three)), call(p).view(3, 3, -1))


def test_a_static_scale_is_that_of_all_tokens() -> None:
    p = problem()
    scale = torch.tensor([0.03])
    layer = p.w_up.values, p.w_up.by_rows(), None, None, p.w_down.values.transpose(1, 2), p.w_down.by_rows()
    how = p.expert_ids, p.weights, 8, "row", "relu2"
    given = torch.ops.twell.experts_float8(p.x, scale, *layer, *how)
    assert_same(given, call(p._replace(x=float8.quantize_tokens(p.x, scale))))


def test_blocks_run_in_16_bits() -> None:
    p = problem(n=264)
    records = [twell.quantize(record.dequantize(torch.float32), "block") for record in (p.w_up, p.w_down)]
    wide = [record.dequantize(torch.bfloat16) for record in records]
    assert_same(call(p._replace(w_up=records[0], w_down=records[1])), call(p._replace(w_up=wide[0], w_down=wide[1])))


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
        twell.sparse_experts(**{**problem()._asdict(), "strategy": "row", **change})


PAIRS = ["expert_pairs", "expert_pack", "expert_union", "expert_gathered", "expert_sum"]
DENSE = ["quantize_tokens", "expert_pairs", "matrix_transpose", "quantize_tokens", "expert_sum"]
CALLS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "one token": ({"t": 1}, "row", ["quantize_tokens", *PAIRS]),
    "many": ({"t": 60}, "auto", ["quantize_tokens", *PAIRS]),
    "x in e4m3": ({"exact": True}, "row", PAIRS),
    "strided": ({"down_rows": False}, "row", ["quantize_tokens", *PAIRS]),
    "dense": ({"t": 20}, "dense", DENSE),
    "gated": ({"gated": True}, "auto", DENSE),
    "dense, as stored": (
        {"down_rows": False},
        "dense",
        [kernel for kernel in DENSE if kernel != "matrix_transpose"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "strategy", "kernels"), CALLS.values(), ids=CALLS)
def test_launches(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], strategy: str, kernels: list[str]) -> None:
    p = problem(**change)
    gpu = fake_gpu.install(monkeypatch)
    monkeypatch.setattr(
        torch, "_scaled_grouped_mm", lambda a, b, *_, **__: torch.zeros(len(a), b.shape[2], dtype=torch.bfloat16)
    )
    x, scale = (p.x.values, p.x.by_rows()) if isinstance(p.x, float8.Float8) else (p.x, None)
    first, up = (p.w_up, (None, None)) if p.w_gate is None else (p.w_gate, (p.w_up.values, p.w_up.by_rows()))
    down = p.w_down.values.transpose(1, 2), p.w_down.by_rows()
    layer = x, scale, first.values, first.by_rows(), *up, *down, p.expert_ids, p.weights
    y = fake_gpu.on_cuda("experts_float8", *layer, 8, strategy, "relu2", 0.0, False)
    assert (y.shape, y.dtype) == ((*p.weights.shape[:1], 48), torch.bfloat16)
    assert gpu.names() == kernels
