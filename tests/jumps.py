"""Layers in which each neuron has a threshold, for tests on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from activations import BIASES
from torch import Tensor

import twell
from twell import functional, testing

K, N = 72, 264
STRATEGIES = ("row", "union", "union+screen", "row+invariant", "dense", "auto")


def problem(
    m: int = 140, dtype: torch.dtype = torch.bfloat16, density: float = 0.1, device: Any = "cpu", n: int = N
) -> testing.FFN:
    how: Any = {"density": density, "biases": BIASES, "dtype": dtype, "activation": "fatrelu", "device": device}
    return testing.integer_problem(m, K, n, **how)


def thresholds(dtype: torch.dtype = torch.bfloat16, device: Any = "cpu", n: int = N) -> Tensor:
    """Small integers, some of them zero, some above every gate."""
    found = torch.arange(n, device=device) % 5
    found[7::50] = 1000
    return found.to(dtype)


def plain(p: testing.FFN, level: Tensor, gated: bool, rounded: torch.dtype | None = None) -> Tensor:
    """The layer by PyTorch's operators, with a hidden state that is ``rounded``."""
    gate = F.linear(p.x, p.w_gate, p.b_gate)
    hidden = torch.where(gate > level, gate, 0)
    if gated:
        hidden = hidden * F.linear(p.x, p.w_up, p.b_up)
    if rounded is not None:
        hidden = hidden.to(rounded).to(p.x.dtype)
    return F.linear(hidden, p.w_down.t(), p.b_down)


def layer(p: testing.FFN, level: Tensor, gated: bool, **options: Any) -> Any:
    how: Any = {"activation": "fatrelu", "threshold": level} | options
    if gated:
        biases: Any = {"b_gate": p.b_gate, "b_up": p.b_up, "b_down": p.b_down}
        return twell.sparse_gated_ffn(p.x, p.w_gate, p.w_up, p.w_down.t(), **biases, **how)
    return twell.sparse_ffn(p.x, p.w_gate, p.w_down.t(), b_up=p.b_gate, b_down=p.b_down, **how)


def named(strategy: str) -> dict[str, Any]:
    """The options of a strategy as tests name them."""
    if strategy == "union+screen":
        return {"strategy": functional.route_of(strategy)}
    name, _, how = strategy.partition("+")
    return {"strategy": name, "invariant": bool(how)}
