"""What tests of strategies "row" and "union" share: operands, the only right answers, checks of every output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import programs
from twell import ops, testing
from twell._activation import RELU
from twell._runtime import geometry
from twell.functional import Strategy
from twell.ops.up_down import behind_on_cpu
from twell.testing import FFN

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
BIASES = "gate up down"
BOTH = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
BUSY = pytest.mark.parametrize("busy", [False, True], ids=["alone", "busy"])
NON_FINITE = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
VARIANTS = [(BF16, 8), (FP16, 4), (BF16, 2), (FP16, 8), (BF16, 4), (FP16, 2)]


class Outputs(NamedTuple):
    """Outputs of what is behind a packed gate; l1 of the right answer is float64, by token or by tile of tokens."""

    y: Tensor
    l1: Tensor
    # of "union" alone
    union: Tensor | None = None


def label(value: object) -> str:
    """The name of a parameter of a test."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.") or "none"


def pack(problem: FFN, compression: int = 8) -> testing.Packed:
    """The packed gate, compared with the CPU operator's in every bit that the format defines."""
    x, w_gate, b_gate = problem.x, problem.w_gate, problem.b_gate
    packed = testing.poisoned(lambda: ops.gate_pack(x, w_gate, b_gate, compression))
    expected = ops.gate_pack(x.cpu(), w_gate.cpu(), None if b_gate is None else b_gate.cpu(), compression)
    testing.assert_packed_same(packed, expected, w_gate.shape[0], compression)
    return packed


def behind(problem: FFN, packed: tuple[Tensor, ...], gated: bool = True, compression: int = 8) -> tuple[Any, ...]:
    """The arguments of ``up_down`` behind a packed gate."""
    x, _, w_up, w_down, _, b_up, b_down = problem
    words, spill = packed[:2]
    if gated:
        return (x, words, spill, w_up, w_down, b_up, b_down, compression)
    return (None, words, spill, None, w_down, None, b_down, compression)


def written(
    problem: FFN, packed: tuple[Tensor, ...], strategy: Strategy, gated: bool = True, compression: int = 8
) -> Outputs:
    """The outputs behind a packed gate; "union" packs it again."""
    if strategy == "row":
        return Outputs(*ops.up_down(*behind(problem, packed, gated, compression)))
    layer = problem if gated else problem._replace(w_up=None, b_up=None)
    if problem.x.is_cuda:
        y, l1, _, union = programs.union_layer(layer, compression)
        return Outputs(y, l1, union)
    gate = ops.unpack(*packed[:2], len(problem.w_gate), compression)
    behind_gate = layer.x, layer.w_up, layer.w_down, layer.b_up, layer.b_down, RELU, True
    y, l1, _, union = behind_on_cpu(gate, *behind_gate)
    by_tile = F.pad(l1, (0, -len(l1) % geometry.TOKEN_TILE)).view(-1, geometry.TOKEN_TILE)
    return Outputs(y, by_tile, union.int())


def read(
    problem: FFN, packed: tuple[Tensor, ...], strategy: Strategy, gated: bool = True, compression: int = 8
) -> Outputs:
    """The same in memory that held NaN."""

    def present() -> tuple[Tensor, ...]:
        return tuple(t for t in written(problem, packed, strategy, gated, compression) if t is not None)

    return Outputs(*testing.poisoned(present))


def run(problem: FFN, strategy: Strategy, gated: bool = True, compression: int = 8) -> Outputs:
    """The same on a gate packed here."""
    packed = ops.gate_pack(problem.x, problem.w_gate, problem.b_gate, compression)
    return read(problem, packed, strategy, gated, compression)


def output(problem: FFN, strategy: Strategy, gated: bool = True, compression: int = 8) -> Tensor:
    """y of the whole layer, by the function."""
    return testing.sparse_output(problem, gated=gated, compression=compression, strategy=strategy)


def exact(problem: FFN, strategy: Strategy, gated: bool = True) -> Tensor:
    """The only right y of integers: "union" rounds the hidden state, "row" does not."""
    return testing.exact_output(problem, gated=gated, rounded=strategy == "union")


def right(problem: FFN, strategy: Strategy, gated: bool = True) -> Outputs:
    """The only right outputs of integers."""
    wide, m = problem.map(Tensor.double), problem.x.shape[0]
    gate = testing.float64_gate(problem)
    hidden = gate * F.linear(wide.x, wide.w_up, wide.b_up) if gated else gate
    y = exact(problem, strategy, gated)
    if strategy == "row":
        return Outputs(y, hidden.abs().sum(1))

    def by_tile(matrix: Tensor) -> Tensor:
        tiles = geometry.token_tiles(m)
        return F.pad(matrix, (0, 0, 0, -m % geometry.TOKEN_TILE)).view(tiles, geometry.TOKEN_TILE, gate.shape[1])

    return Outputs(y, by_tile(hidden).abs().sum((1, 2)), by_tile(gate != 0).any(1).sum(1, dtype=torch.int32))


def sums(outputs: Outputs) -> Tensor:
    """Sums of |h| in float64: a tile has several."""
    return outputs.l1.double() if outputs.l1.dim() == 1 else outputs.l1.sum(1, dtype=torch.float64)


def assert_right(outputs: Outputs, expected: Outputs, what: str = "") -> None:
    """Compare y and unions to the bit; sums of |h| too, if fp32 holds them."""
    testing.assert_same(outputs.y, expected.y, f"{what} y")
    if outputs.union is not None and expected.union is not None:
        testing.assert_same(outputs.union, expected.union, f"{what} union")
    exactly = expected.l1 < testing.EXACT_LIMIT
    testing.assert_same(sums(outputs).where(exactly, 0), expected.l1.where(exactly, 0), f"{what} l1")
    torch.testing.assert_close(sums(outputs), expected.l1, rtol=1e-6, atol=0)


def check(problem: FFN, strategy: Strategy, compression: int = 8) -> None:
    """Every operator of a strategy on an exact problem of the GPU: the only right bits."""
    packed = pack(problem, compression)
    gate = testing.float64_gate(problem)
    assert int(packed[2][:, :, 0].sum()) == int((gate != 0).sum())
    (dense,) = testing.poisoned(lambda: (ops.unpack(*packed[:2], gate.shape[1], compression),))
    testing.assert_same(dense, gate.to(problem.x.dtype), "unpack")
    for gated in (True, False):
        expected = right(problem, strategy, gated)
        assert_right(read(problem, packed, strategy, gated, compression), expected, f"gated={gated}")
        # it has other kernels for few tokens
        layer = problem if gated else problem._replace(w_up=None, b_up=None)
        y, l1, _ = testing.poisoned(lambda layer=layer: ops.ffn_aux(*layer, compression, strategy, None))
        testing.assert_same(y, expected.y, f"y of the layer, gated={gated}")
        total = expected.l1.sum()
        torch.testing.assert_close(l1.double(), total, rtol=0 if total < testing.EXACT_LIMIT else 1e-6, atol=0)


def assert_follows_cpu(problem: FFN, strategy: Strategy, row: int | None = None) -> None:
    """Every output equals the CPU operators'; if there is a ``row``, all others are finite."""
    on_cpu, packed = problem.to("cpu"), pack(problem)
    for gated in (True, False):
        found, expected = read(problem, packed, strategy, gated), run(on_cpu, strategy, gated)
        testing.assert_same(found.y, expected.y, f"y, gated={gated}")
        testing.assert_same(sums(found).float(), sums(expected).float(), f"l1, gated={gated}")
        if found.union is not None and expected.union is not None:
            testing.assert_same(found.union, expected.union, f"union, gated={gated}")
        if row is not None:
            assert bool(torch.cat([found.y[:row], found.y[row + 1 :]]).isfinite().all())


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
