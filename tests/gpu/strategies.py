"""What GPU tests share: names, the packed gate beside the CPU's, repeats, calls that never wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twell import ops, testing
from twell.testing import FFN

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
BIASES = "gate up down"
BOTH = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
BUSY = pytest.mark.parametrize("busy", [False, True], ids=["alone", "busy"])
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


def assert_repeats(call: Callable[[], tuple[Tensor, ...]], runs: int, busy: bool) -> None:
    """All runs have the same bits. ``busy``: beside products on another stream, so that CTAs start unevenly."""
    first = call()
    different = torch.zeros(len(first), dtype=torch.int64, device=CUDA)
    other = torch.cuda.Stream()
    noise = torch.randn(1024, 1024, device=CUDA, dtype=BF16)
    torch.cuda.synchronize()

    def bits(t: Tensor) -> Tensor:
        return t.reshape(-1).view(torch.int16)

    for _ in range(runs):
        if busy:
            with torch.cuda.stream(other):
                torch.mm(noise, noise)
        different += torch.stack([(bits(a) != bits(b)).any().long() for a, b in zip(call(), first, strict=True)])
    assert different.tolist() == [0] * len(first)


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
