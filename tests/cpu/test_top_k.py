"""The k largest pre-activations of each token: operators, every strategy, gradients, graphs and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activations import BIASES
from fake_gpu import install

import twell
from twell import testing

BF16 = torch.bfloat16
K, N, MOST = 72, 264, 16


def problem(m: int = 140, dtype: torch.dtype = BF16, density: float = 0.2, n: int = N) -> testing.FFN:
    """Small integers, so that many gates are equal."""
    return testing.integer_problem(m, K, n, density=density, biases=BIASES, dtype=dtype)


def layer(p: testing.FFN, k: int, **options: Any) -> Any:
    how: Any = {"activation": "topk", "k": k, "b_up": p.b_gate, "b_down": p.b_down} | options
    return twell.sparse_ffn(p.x, p.w_gate, p.w_down.t(), **how)


def test_kernels_find_the_gates_before_they_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    p = problem(300)
    with torch.no_grad():
        for strategy in ("row", "union"):
            gpu.clear()
            layer(p, 5, strategy=strategy)
            assert gpu.names()[:2] == ["top_k", "pack"]
    gpu.clear()
    leaf = p.x.clone().requires_grad_()
    layer(p._replace(x=leaf), 5, strategy="union").sum().backward()
    assert gpu.names()[:3] == ["top_k", "pack", "compact"]
    assert "weight_grad" not in gpu.names()
