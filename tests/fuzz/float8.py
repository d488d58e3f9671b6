"""The fuzzer of layers of e4m3 weights: ``python -m tests.fuzz.float8 --budget-s 60 --ledger a.jsonl``.

A case draws sizes, scales, layouts and options. Half of the cases have small integers and scales that are powers of
two, so that all sums are exact and each bit must be right; the others are real numbers, as close to the formula in
float64 as dense fp8 products are. A call runs twice, in memory that holds NaN, and then in a CUDA graph with other
tokens. With ``invariant`` some tokens run again without the others, and must have the same bits.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import twell
from tests.fuzz.loop import fuzz
from tests.fuzz.run import poison
from twell import float8, testing
from twell._activation import activation_of
from twell.float8 import Float8


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem and one way to call it. x: "plain", bfloat16, or "e4m3", a record."""

    seed: int
    number: int
    m: int
    k: int
    n: int
    x: str
    exact: bool
    gated: bool
    bias: bool
    activation: str
    density: float
    granularity: str
    strategy: str
    invariant: bool
    fast: bool
    compression: int
    down_rows: bool
    strided: bool


def draw(seed: int, number: int, on_gpu: bool) -> Case:
    """The case of this number."""
    r = random.Random(f"{seed}:{number}")
    exact, gated, invariant = r.random() < 0.5, r.random() < 0.6, r.random() < 0.2
    return Case(
        seed, number,
        m=r.choice((0, 1, 1, 2, 7, 8, 9, 17, 33, 64, 65, 100, 128, 129, 300, 513, 1025) if on_gpu else (0, 1, 3, 9)),
        k=16 * r.randint(1, r.choice((4, 8, 33, 130, 300, 512)) if on_gpu else 5),
        # dense products of other numbers of neurons are not those of torch._scaled_mm
        n=(8 if exact else 16) * r.randint(1, r.choice((4, 33, 64, 130, 352)) if on_gpu else 20),
        x="e4m3" if exact else r.choice(("plain", "plain", "e4m3")),
        exact=exact,
        gated=gated,
        bias=r.random() < 0.4,
        # a gate near a threshold is a matter of its last bits
        activation=r.choice(("relu", "relu", "relu2", "fatrelu" if exact else "relu", "drelu" if gated else "relu")),
        density=r.choice((0.02, 0.1, 0.1, 0.3, 1.0)),
        granularity=r.choice(("row", "row", "tensor")),
        strategy="row" if invariant else r.choice(("row", "union", "row", "union", "auto", "dense")),
        invariant=invariant,
        fast=r.random() < 0.7,
        compression=r.choice((2, 4, 8, 8)),
        down_rows=r.random() < 0.9,
        strided=r.random() < 0.2,
    )  # fmt: skip


class Problem(NamedTuple):
    """The operands of a case, of one without a gate gate is None; down [K, N]."""

    x: Any
    gate: Float8 | None
    up: Float8
    down: Float8
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]


def build(case: Case, device: torch.device, again: int = 0) -> Problem:
    """The operands of a case; ``again`` draws other tokens for the same weights."""
    g = torch.Generator(device).manual_seed(hash((case.seed, case.number)) % 2**31)
    m, k, n = case.m, case.k, case.n

    def values(*shape: int, least: int = -2) -> Tensor:
        if case.exact:
            return torch.randint(least, 3, shape, generator=g, device=device).float()
        return torch.randn(shape, generator=g, device=device)

    def record(matrix: Tensor) -> Float8:
        if not case.exact:
            return twell.quantize(matrix, case.granularity)  # type: ignore[arg-type]
        shape = matrix.shape[:1] if case.granularity == "row" else ()
        scale = 2.0 ** torch.randint(-1, 2, shape, generator=g, device=device)
        return float8.float8(matrix.to(float8.E4M3), scale)

    fires = torch.rand(n, 1, generator=g, device=device) < case.density
    first = values(n, k) * fires * (1 if case.exact else k**-0.5)
    second = values(n, k, least=-1) * (1 if case.exact else k**-0.5)
    gate, up = (record(first), record(second)) if case.gated else (None, record(first))
    down = record(values(k, n))
    if case.down_rows:
        down = Float8(down.values.t().contiguous().t(), down.scale)
    biases: list[Tensor | None] = [None, None, None]
    if case.bias:
        biases = [values(length).bfloat16() for length in (n, n, k)]
    g.manual_seed(hash((case.seed, case.number, again + 1)) % 2**31)
    wide = values(m, 2 * k) if case.strided else values(m, k)
    if case.exact:
        # three terms, so that gates and their squares are exact in 16 bits
        wide = wide * (torch.rand(wide.shape, generator=g, device=device).argsort(1) < 3)
    if case.x == "plain":
        return Problem(wide.bfloat16()[:, :k], gate, up, down, tuple(biases))  # type: ignore[arg-type]
    if case.exact:
        x = Float8(wide.to(float8.E4M3), 2.0 ** torch.randint(-1, 2, (m,), generator=g, device=device))
    else:
        x = float8.quantize_tokens(wide.bfloat16()) if m else Float8(wide.to(float8.E4M3), wide.new_ones(0))
    return Problem(Float8(x.values[:, :k], x.scale), gate, up, down, tuple(biases))  # type: ignore[arg-type]


def call(case: Case, p: Problem) -> Tensor:
    """y of a call as the case asks for it."""
    options: dict[str, Any] = {"strategy": case.strategy, "compression": case.compression, "invariant": case.invariant}
    options |= {"activation": case.activation, "threshold": _threshold(case), "fast_accum": case.fast}
    b_gate, b_up, b_down = p.biases
    if p.gate is None:
        return twell.sparse_ffn(p.x, p.up, p.down, b_up=b_up, b_down=b_down, **options)
    return twell.sparse_gated_ffn(p.x, p.gate, p.up, p.down, b_gate=b_gate, b_up=b_up, b_down=b_down, **options)


def _threshold(case: Case) -> float:
    return 1.0 if case.activation == "fatrelu" else 0.0


def check(case: Case, p: Problem, y: Tensor) -> str:
    """What is wrong with y; "" if nothing is."""
    form: Any = activation_of(case.activation, _threshold(case), case.gated)
    tokens = p.x if isinstance(p.x, Float8) else float8.quantize_tokens(p.x)
    if not case.m:
        return "" if y.shape == tokens.shape else f"shape {list(y.shape)}"
    first, up = (p.up, None) if p.gate is None else (p.gate, p.up)
    biases = (p.biases[1], None, p.biases[2]) if p.gate is None else p.biases
    layer = first, up, p.down, biases, form
    right = float8.formula(tokens, *layer, rounded=case.exact and case.strategy == "union")
    if case.exact and case.strategy in ("row", "union") and float(right.abs().max()) < 2**20:
        wrong = y != right.to(y.dtype)
        return f"{int(wrong.sum())} values differ, the first at {wrong.nonzero()[0].tolist()}" if wrong.any() else ""
    dense = testing.errors(float8.dense(tokens, *layer, use_fast_accum=case.fast), right)
    ours = testing.errors(y, right)
    budget = 1.1 * testing.allowance(case.m / 16)
    # of few hidden values, chance decides
    close = ours.frobenius < 2**-7
    return "" if close or ours.within(dense, budget, 4 * budget) else f"error {ours}, dense {dense}"


@torch.no_grad()
def attempt(case: Case, device: torch.device) -> str:
    """The verdict on a case: "ok", or what is wrong."""
    p = build(case, device)
    poison(device)
    y = call(case, p)
    if wrong := check(case, p, y):
        return wrong
    poison(device)
    if not torch.equal(call(case, p), y):
        return "a second call has other bits"
    # products on a CPU have other bits for other numbers of rows
    if case.invariant and case.m > 1 and device.type == "cuda":
        part = p.x[::3] if case.x == "plain" else Float8(p.x.values[::3], p.x.scale[::3].contiguous())
        if not torch.equal(call(case, p._replace(x=part)), y[::3]):
            return "other tokens change the bits of some"
    if device.type == "cuda" and case.m and case.down_rows and case.x == "plain":
        graph, static = testing.captured(lambda: call(case, p))
        p.x.copy_(build(case, device, 1).x)
        static.fill_(torch.nan)
        graph.replay()
        if wrong := check(case, p, static):
            return f"a graph: {wrong}"
    return "ok"


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz; the exit status."""
    return fuzz("float8", __doc__ or "", draw, attempt, argv)


if __name__ == "__main__":
    raise SystemExit(main())
