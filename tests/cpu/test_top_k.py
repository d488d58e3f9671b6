"""The k largest pre-activations of each token: operators, every strategy, gradients, graphs and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activations import BIASES
from fake_gpu import install

import twell
from twell import ops, testing

BF16 = torch.bfloat16
K, N, MOST = 72, 264, 16


def problem(m: int = 140, dtype: torch.dtype = BF16, density: float = 0.2, n: int = N) -> testing.FFN:
    """Small integers, so that many gates are equal."""
    return testing.integer_problem(m, K, n, density=density, biases=BIASES, dtype=dtype)


def layer(p: testing.FFN, k: int, **options: Any) -> Any:
    how: Any = {"activation": "topk", "k": k, "b_up": p.b_gate, "b_down": p.b_down} | options
    return twell.sparse_ffn(p.x, p.w_gate, p.w_down.t(), **how)


def test_levels_and_what_is_packed() -> None:
    gate = torch.tensor(
        [[3, 1, 3, 3, 0, -1, 2, 3], [-1, -2, 0, -3, 0, 0, 0, 0], [torch.nan, 1, torch.nan, torch.inf, 2, 2, 2, 5]]
    ).to(BF16)
    three = int(torch.tensor(3.0).to(BF16).view(torch.int16))
    assert ops.top_k(gate, 3).tolist() == [[three, 3], [0, -1], [int(gate[2, 3].view(torch.int16)), 3]]
    assert ops.top_k(gate, 2)[0].tolist() == [three, 2]
    assert ops.top_k(gate, 2)[2].tolist() == [0x7FFF, 2]
    assert ops.top_k(gate, 9).tolist() == [[0, -1]] * 3
    words, spill, _ = ops.pack(gate, 8, 0.0, None, ops.top_k(gate, 3))
    right = torch.zeros_like(gate)
    right[0, [0, 2, 3]] = 3
    right[2, [0, 2, 3]] = gate[2, [0, 2, 3]]
    testing.assert_same(ops.unpack(words, spill, 8, 8), right)


def test_operators_keep_the_contract_of_operators() -> None:
    gate = problem(9).x
    torch.library.opcheck(torch.ops.twell.top_k, (gate, 3))
    torch.library.opcheck(torch.ops.twell.pack, (gate, 8, 0.0, None, ops.top_k(gate, 3)))
    torch.library.opcheck(torch.ops.twell.pack, (gate, 8, 0.0, torch.ones(2 * K, dtype=BF16)))


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
