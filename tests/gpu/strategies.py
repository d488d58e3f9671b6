"""What GPU tests share: names, modules of problems, the packed gate beside the CPU's, calls that never wait."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from twell import ops, testing
from twell.nn.layers import DownLayout, SparseGatedMLP, SparseMLP
from twell.nn.models import set_down_layout
from twell.testing import FFN

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
BIASES = "gate up down"
BOTH = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
BY_NAME = pytest.mark.parametrize("strategy", ["row", "union"])


def pack(problem: FFN, compression: int = 8) -> testing.Packed:
    """The packed gate, compared with the CPU operator's in every bit that the format defines."""
    x, w_gate, b_gate = problem.x, problem.w_gate, problem.b_gate
    packed = testing.poisoned(lambda: ops.gate_pack(x, w_gate, b_gate, compression))
    expected = ops.gate_pack(x.cpu(), w_gate.cpu(), None if b_gate is None else b_gate.cpu(), compression)
    testing.assert_packed_same(packed, expected, w_gate.shape[0], compression)
    return packed


def exact(problem: FFN, strategy: str, gated: bool = True) -> Tensor:
    """The only right y of integers: "union" rounds the hidden state, "row" does not."""
    return testing.exact_output(problem, gated=gated, rounded=strategy == "union")


def set_weights(mlp: Any, problem: FFN) -> None:
    gated = isinstance(mlp, SparseGatedMLP)
    given = {"gate" if gated else "up": (problem.w_gate, problem.b_gate), "down": (problem.w_down.t(), problem.b_down)}
    if gated:
        given["up"] = problem.w_up, problem.b_up
    with torch.no_grad():
        for name, (weight, bias) in given.items():
            projection = getattr(mlp, f"{name}_proj")
            projection.weight.copy_(weight)
            if bias is not None:
                projection.bias.copy_(bias)


def module(problem: FFN, gated: bool = True, layout: DownLayout = "rows", **options: Any) -> Any:
    (n, k), cls = problem.w_gate.shape, SparseGatedMLP if gated else SparseMLP
    mlp = cls(k, n, problem.b_gate is not None, device=problem.x.device, dtype=problem.x.dtype, **options)
    set_down_layout(mlp, layout)
    set_weights(mlp, problem)
    return mlp


def assert_nothing_waits(calls: Callable[[], None]) -> None:
    """Once kernels are loaded, no call makes the host wait."""
    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            torch.ones(2, device=CUDA).sum().item()  # the mode detects a wait
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
