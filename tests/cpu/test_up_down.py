"""``twell.sparse_up_down`` on a CPU: it is ``sparse_gated_ffn`` behind the gate, forward and backward."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu import fake_gpu
from twell._runtime import specs

BF16 = torch.bfloat16
Named = dict[str, Any]


def integers(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Integers so small that every sum is exact."""
    return torch.randint(-2, 3, shape).to(dtype)


def operands(m: int, n: int, k: int, gated: bool = True, bias: bool = True, dtype: torch.dtype = BF16) -> Named:
    """Operands of ``sparse_up_down`` by name."""
    found: Named = {"x": None, "gate": integers(m, n, dtype=dtype), "w_up": None, "w_down": integers(k, n, dtype=dtype)}
    if gated:
        found |= {"x": integers(m, k, dtype=dtype), "w_up": integers(n, k, dtype=dtype)}
    if bias:
        found |= {"b_down": integers(k, dtype=dtype)} | ({"b_up": integers(n, dtype=dtype)} if gated else {})
    return found


@pytest.mark.parametrize("family", specs.FAMILIES)
@pytest.mark.parametrize("gated", [True, False])
def test_launches(family: str, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate's product is nowhere; few tokens have one kernel behind the packing where there is one."""
    gpu = fake_gpu.install(monkeypatch, family)
    t = operands(700, 264, 64, gated)
    given = t["gate"], t["x"], t["w_up"], integers(264, 64), t.get("b_up"), t["b_down"]
    up = ["sampled_up"] if gated else []

    def names(op: str, *arguments: Any) -> list[str]:
        gpu.clear()
        fake_gpu.on_cuda(op, *arguments)
        return gpu.names()

    few = gated and family == specs.SM90
    union = ["compact", *up, "gathered"]
    assert names("sparse_up_down", *given, 8, "row", None) == ["pack", "up_down_token"]
    assert names("sparse_up_down", *given, 8, "union", None) == ["pack", *(["up_down_tile"] if few else union)]
    gpu.clear()
    sys.modules["twell.ops.sparse_up_down"]._on_cuda[1](*given, 8, "union", None, "relu", 0.0)
    assert gpu.names() == ["pack", *union]
    assert names("sparse_up_down_forward", *given, 8) == ["pack", "compact", *up, "gathered", "overflow"]
    kept = fake_gpu.on_cuda("sparse_up_down_forward", *given, 8)[3]
    backward = (integers(700, 64), None, *given[:5], kept)
    weights = ["rank", "transpose", "weight_grad", "overflow"]
    dx = ["gathered"] if gated else []
    assert names("sparse_up_down_backward", *backward, gated, True, True) == ["sampled_grad", "scatter", *dx, *weights]
    assert names("sparse_up_down_backward", *backward, False, True, False) == ["sampled_grad", "scatter", "overflow"]
    assert names("sparse_up_down_backward", *backward, False, False, True) == ["sampled_grad", *weights]
