"""The fuzzer of ``sparse_experts``: ``python -m tests.fuzz.experts --budget-s 60 --ledger a.jsonl``.

A case draws sizes, routes, layouts and options. Half of the cases have small integers, whose sums are exact in fp32,
so each bit must be right by "row"; the others are real numbers, as close to float64 as dense products are. A call runs
twice, in memory that holds NaN, and then in a CUDA graph with other tokens and routes. With ``invariant`` some tokens
run again without the others, and must have the same bits. Weights of some are e4m3.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import twell
from tests.fuzz.loop import fuzz
from tests.fuzz.run import poison
from twell import float8, testing
from twell._activation import activation_of
from twell.float8 import Float8
from twell.testing.experts import Mixture, dense_experts, float64_experts

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem and one way to call it. hot: share of the tokens whose first expert is the same one."""

    seed: int
    number: int
    t: int
    k: int
    n: int
    experts: int
    top: int
    dtype: str
    exact: bool
    gated: bool
    activation: str
    density: float
    strategy: str
    invariant: bool
    compression: int
    wide: bool
    hot: float
    merged: bool
    down_rows: bool
    absent: float
    # "row" or "tensor", of e4m3 weights; "" of others
    scales: str = ""


def draw(seed: int, number: int, on_gpu: bool) -> Case:
    """The case of this number."""
    r = random.Random(f"{seed}:{number}")
    t = r.choice((0, 1, 1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 65, 100, 128, 256, 300) if on_gpu else (0, 1, 2, 5, 9))
    k = 8 * r.randint(1, r.choice((8, 16, 64, 336, 512)) if on_gpu else 9)
    n = 8 * r.randint(1, r.choice((8, 33, 64, 232)) if on_gpu else 40)
    experts = r.choice((1, 2, 3, 8, 17, 64, 128, 512, 1024) if on_gpu else (1, 2, 5, 9))
    while experts > 1 and experts * n * k > (1 << 28 if on_gpu else 1 << 16):
        experts //= 2
    top = r.choice((1, 2, 3, 6, 8, 22, 32))
    gated = r.random() < 0.4
    name = r.choice(("relu", "relu2", "relu2", "fatrelu", *(("drelu",) if gated else ())))
    invariant = r.random() < 0.25
    case = Case(
        seed, number, t, k, n, experts, top,
        r.choice(("bf16", "bf16", "fp16")),
        exact=r.random() < 0.5,
        gated=gated,
        activation=name,
        density=r.choice((0.02, 0.1, 0.1, 0.3, 1.0)),
        strategy="row" if invariant else r.choice(("row", "row", "row", "auto", "dense")),
        invariant=invariant,
        compression=r.choice((2, 4, 8, 8)),
        wide=r.random() < 0.5,
        hot=r.choice((0.0, 0.0, 0.5, 1.0)),
        merged=gated and r.random() < 0.5,
        down_rows=r.random() < 0.9,
        absent=r.choice((0.0, 0.0, 0.1, 1.0)),
    )  # fmt: skip
    if r.random() < 0.6:
        return case
    # dense products of other numbers of neurons are not those of torch._scaled_mm; a gate near a threshold is a matter
    # of its last bits
    strategy = "dense" if gated else "row" if case.strategy == "row" else r.choice(("auto", "dense"))
    changed = {"k": -(-k // 16) * 16, "n": n if case.exact else -(-n // 16) * 16, "dtype": "bf16", "invariant": False}
    if not case.exact and name == "fatrelu":
        changed["activation"] = "relu"
    return dataclasses.replace(case, scales=r.choice(("row", "tensor")), strategy=strategy, merged=False, **changed)


def build(case: Case, device: torch.device, again: int = 0) -> Mixture:
    """The operands of a case; ``again`` draws other tokens and routes for the same weights."""
    weights = torch.Generator(device).manual_seed(hash((case.seed, case.number)) % 2**31)
    routes = torch.Generator(device).manual_seed(hash((case.seed, case.number, again + 1)) % 2**31)
    dtype = DTYPES[case.dtype]

    def values(g: torch.Generator, *shape: int, least: int = -2) -> Tensor:
        if case.exact:
            return torch.randint(least, 3, shape, generator=g, device=device).to(dtype)
        return torch.randn(shape, generator=g, device=device).to(dtype)

    e, n, k = case.experts, case.n, case.k
    x = values(routes, case.t, k)
    if case.exact:
        # three terms, so that gates and their squares are exact in 16 bits
        ranks = torch.rand(case.t, k, generator=routes, device=device).argsort(1)
        x = x * (ranks < 3)
    # the share of neurons that may fire, with non-negative weights on few of them
    fires = (torch.rand(e, n, 1, generator=weights, device=device) < case.density).to(dtype)
    first = values(weights, e, n, k) * fires
    if not case.exact:
        first = first * k**-0.5
    if case.merged:
        both = torch.cat((first, values(weights, e, n, k, least=-1)), 1)
        gate, up = both[:, :n], both[:, n:]
    else:
        gate, up = first, values(weights, e, n, k, least=-1) if case.gated else first
    down = values(weights, e, n, k).transpose(1, 2)
    if not case.down_rows:
        down = down.contiguous()
    ids = torch.randint(0, e, (case.t, case.top), generator=routes, device=device)
    hot = torch.rand(case.t, generator=routes, device=device) < case.hot
    ids[:, 0] = torch.where(hot, e - 1, ids[:, 0])
    gone = torch.rand(ids.shape, generator=routes, device=device) < case.absent
    ids = torch.where(gone, -1, ids)
    scales = 2.0 ** torch.randint(-1, 2, ids.shape, generator=routes, device=device)
    made = Mixture(x, up, down, ids if case.wide else ids.int(), scales, gate if case.gated else None)
    return made if not case.scales else in_e4m3(case, made, weights)


def in_e4m3(case: Case, p: Mixture, g: torch.Generator) -> Any:
    """The operands with records of e4m3 weights, and of x in exact cases; down weights lie as they did."""

    def record(weight: Tensor | None) -> Any:
        if weight is None:
            return None
        if not case.exact:
            return twell.quantize(weight, case.scales)  # type: ignore[arg-type]
        shape = weight.shape[:2] if case.scales == "row" else weight.shape[:1]
        return float8.float8(weight.to(float8.E4M3), 2.0 ** torch.randint(-1, 2, shape, generator=g, device=p.x.device))

    down = record(p.w_down)
    if case.down_rows:
        down = Float8(down.values.transpose(1, 2).contiguous().transpose(1, 2), down.scale)
    made: Any = p._replace(w_up=record(p.w_up), w_down=down, w_gate=record(p.w_gate))
    if not case.exact:
        return made
    return made._replace(x=Float8(p.x.to(float8.E4M3), torch.full((case.t,), 0.5, device=p.x.device)))


def plain(p: Any) -> Mixture:
    """The operands that e4m3 ones stand for, in float32."""
    x = p.x if isinstance(p.x, Float8) else float8.quantize_tokens(p.x)
    matrices = {name: getattr(p, name) for name in ("w_up", "w_down", "w_gate")}
    found = {name: None if record is None else record.dequantize(torch.float32) for name, record in matrices.items()}
    return p._replace(x=x.dequantize(torch.float32), **found)  # type: ignore[no-any-return]


def dense_float8(p: Any, form: Any) -> Tensor:
    """y of e4m3 operands by dense products of each expert, added in float32."""
    x = p.x if isinstance(p.x, Float8) else float8.quantize_tokens(p.x)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(p.w_up.shape[0]):
        tokens, slots = (p.expert_ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            own = Float8(x.values.view(torch.uint8)[tokens].view(float8.E4M3), x.scale[tokens])
            up, down, gate = (
                None if w is None else Float8(w.values[expert], w.scale[expert]) for w in (p.w_up, p.w_down, p.w_gate)
            )
            layer = (up, None) if gate is None else (gate, up)
            made = float8.dense(own, *layer, down, activation=form).float()  # type: ignore[arg-type]
            y.index_put_((tokens,), made * p.weights[tokens, slots, None], accumulate=True)
    return y.bfloat16()


def call(case: Case, p: Mixture) -> Tensor:
    """y of a call as the case asks for it."""
    threshold = 1.0 if case.activation == "fatrelu" else 0.0
    options: dict[str, Any] = {"strategy": case.strategy, "compression": case.compression, "invariant": case.invariant}
    return twell.sparse_experts(**p._asdict(), activation=case.activation, threshold=threshold, **options)


def check(case: Case, p: Mixture, y: Tensor) -> str:
    """What is wrong with y; "" if nothing is."""
    form: Any = activation_of(case.activation, 1.0 if case.activation == "fatrelu" else 0.0, case.gated)
    right = float64_experts(plain(p) if case.scales else p, *form)
    if not y.numel():
        return "" if y.shape == right.shape else f"shape {list(y.shape)}"
    rounded = right.to(y.dtype)
    if case.exact and case.strategy == "row" and float(right.abs().max()) < 2**24:
        wrong = (y != rounded) & ~(y.isnan() & rounded.isnan())
        return f"{int(wrong.sum())} values differ, the first at {wrong.nonzero()[0].tolist()}" if wrong.any() else ""
    if not bool(rounded.isfinite().all()):
        return ""
    dense = testing.errors(dense_float8(p, form) if case.scales else dense_experts(p, *form), right)
    ours = testing.errors(y, right)
    # of few hidden values, chance decides
    budget = 1.1 * testing.allowance(case.t * case.top / 16)
    close = ours.frobenius < 2**-6 if case.scales else dense.frobenius < 2**-12 and ours.frobenius < 2**-8
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
    if not torch.equal(call(case, p).nan_to_num(), y.nan_to_num()):
        return "a second call has other bits"
    # products on a CPU have other bits for other numbers of rows
    if case.invariant and case.t > 1 and device.type == "cuda":
        some = slice(0, case.t, 3)
        part = p._replace(x=p.x[some], expert_ids=p.expert_ids[some], weights=p.weights[some])
        if not torch.equal(call(case, part), y[some]):
            return "other tokens change the bits of some"
    # these products wait for the GPU
    of_all = case.dtype == "fp16" or case.experts == 1024 or (case.scales and case.n % 16)
    waits = case.strategy != "row" and of_all
    waits = waits or isinstance(p.x, Float8)  # whose values are not copied
    if device.type == "cuda" and case.t and case.down_rows and not waits:
        graph, static = testing.captured(lambda: call(case, p))
        other = build(case, device, 1)
        for own, new in zip((p.x, p.expert_ids, p.weights), (other.x, other.expert_ids, other.weights)):
            own.copy_(new)
        static.fill_(torch.nan)
        graph.replay()
        if wrong := check(case, p, static):
            return f"a graph: {wrong}"
    return "ok"


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz; the exit status."""
    return fuzz("experts", __doc__ or "", draw, attempt, argv)


if __name__ == "__main__":
    raise SystemExit(main())
