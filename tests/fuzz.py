"""Random layers against float64 until the time is up: sizes, patterns, layouts, strategies, and how a call is made.

    python tests/fuzz.py --budget-s 300 --seed 1 --ledger fuzz.jsonl
    python tests/fuzz.py --replay 1:357

A case is a function of the seed, its number and the kind of device, and of nothing else. Half of the cases are integers
whose every sum fp32 holds in any order: each result has one right answer, float64's, rounded once, and bits must match.
The others are real numbers, and each result is held to two bounds against float64:

- in the Frobenius norm ``testing.BUDGET`` times dense PyTorch's error. Where few roundings make up the error, their
  number widens that, and what rounding costs on average takes the place of a dense result that was lucky;
- in every row what a gate, an up projection, a hidden state and a result, each rounded once, can be off at the worst.

What a call returns is filled with NaN before it is called again, which must give the same bits; so must a CUDA graph.
On a GPU free memory holds NaN. The reference is plain PyTorch in float64, and shares no code with the package.

A line of the ledger is a case: what it is, its verdict, seconds, and errors as shares of what is allowed. A mismatch
prints the command that repeats it, with as few tokens as still show it. Exit status 1 after mismatches, 3 after a hang.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

# before CUDA starts: what cuBLAS needs to be deterministic, in cases that have torch fill new memory with NaN
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell import testing
from twell._auto import AutoStrategy
from twell._runtime import format

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPS = {"pack": 3, "forward": 4, "aux": 3, "train": 6, "decode": 3, "overflow": 2, "compact": 1}
STRATEGIES = {"row": 6, "union": 6, "dense": 2, "auto": 2, "site": 1}
SPARSE = ("row", "union")
PATTERNS = {
    "uniform": 3,
    "tokens": 4,
    "topics": 3,
    "heavy tokens": 2,
    "heavy neurons": 2,
    "tiles": 3,
    "band": 1,
    "single": 1,
    "none": 1,
    "all": 1,
}
TOKENS = (0, 1, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 1000)
NEURONS = (8, 16, 56, 64, 72, 128, 248, 256, 264, 504, 512, 520, 776, 1024, 1032, 2048, 2056, 5632, 8192, 16384)
X_LAYOUTS = {"plain": 4, "padded": 2, "odd": 2, "columns": 1, "alternate": 1, "expanded": 1}
WEIGHT_LAYOUTS = {"plain": 5, "padded": 2, "odd": 1, "columns": 1}
DOWN_LAYOUTS = {"rows": 5, "linear": 2, "padded": 1, "odd": 1}
BIAS_LAYOUTS = {"plain": 3, "off": 1, "alternate": 1}
WEIGHTS = ("w_gate", "w_up", "w_down")
BIASES = ("gate_bias", "up_bias", "down_bias")
NAMES = ("x", *WEIGHTS, *BIASES)

# Classes of K that the packaged kernels have, and the one that is compiled when it is first asked for.
PACKAGED_K = (512, 1024, 2048, 4096, 8192)
COMPILED_K = 16384

# Tokens of exact training: a load of up to 36 in x times a gradient of up to 212 at each, summed, stays below 2^24.
EXACT_TRAINING = 2048

# Sums in fp32 are off by up to this share of |x| |w|; a sum so near to 0 may have either sign.
ACCUMULATION = 2.0**-20

# Root mean square of a rounding error as a share of the largest, and of three of them as a share of three of these.
RMS_ROUNDING = 0.425
RMS_ROUNDINGS = 0.25

# So many roundings leave nothing to luck.
MANY = 4096

MOST_MISMATCHES = 10
POISON = 0xFF


class Limits(NamedTuple):
    """What a case may cost: tokens, neurons, m * n, n * k, m * n * k, the largest class of K."""

    m: int
    n: int
    gates: int
    weights: int
    work: int
    classes: tuple[int, ...]

    @classmethod
    def of(cls, device: str, jit: bool) -> Limits:
        if device == "cpu":
            return cls(300, 2056, 1 << 17, 1 << 18, 1 << 22, (512, 1024))
        return cls(20_000, 16384, 1 << 27, 1 << 26, 1 << 37, (*PACKAGED_K, *([COMPILED_K] if jit else [])))


@dataclass(frozen=True)
class Case:
    """One problem and one way to call it. ``wanted`` names the tensors that require grad, in training."""

    seed: int
    number: int
    op: str
    m: int
    k: int
    n: int
    dtype: str
    exact: bool
    gated: bool
    biases: tuple[str, ...]
    pattern: str
    density: float
    strategy: str
    compression: int
    x_layout: str
    weight_layout: str
    down_layout: str
    bias_layout: str
    lead: int
    wanted: tuple[str, ...]
    l1: bool
    mains: bool
    graph: bool
    stream: bool
    autocast: bool
    filled: bool

    @property
    def training(self) -> bool:
        return bool(self.wanted)

    def __str__(self) -> str:
        flags = [name for name in ("l1", "mains", "graph", "stream", "autocast", "filled") if getattr(self, name)]
        parts = [
            f"{self.seed}:{self.number} {self.op} {self.m}x{self.k}x{self.n} {self.dtype}",
            "integers" if self.exact else "reals",
            "gated" if self.gated else "plain",
            f"{self.pattern} {self.density:.2g}, {self.strategy}, compression {self.compression}",
            f"layouts {self.x_layout}, {self.weight_layout}, {self.down_layout}, {self.bias_layout}, {self.lead}",
        ]
        return ", ".join([*parts, *(["biases " + " ".join(self.biases)] if self.biases else []), *flags])


def pick(rng: random.Random, weighted: dict[str, int]) -> str:
    return rng.choices(list(weighted), list(weighted.values()))[0]


def draw(seed: int, number: int, limits: Limits, graphs: bool) -> Case:
    """The case of this number. ``graphs``: whether the device has CUDA graphs and streams."""
    rng = random.Random(f"{seed}:{number}")

    def chance(share: float) -> bool:
        return rng.random() < share

    op = pick(rng, OPS)
    m, k, n = sizes(rng, op, number, limits)
    training = op in ("train", "overflow")
    exact = chance(0.5)
    if exact and training:
        m = min(m, EXACT_TRAINING)
    gated = op != "pack" and chance(0.7)
    every = tuple(b for b in BIASES if gated or b != "up_bias")
    biases = rng.choice([(), (), every, (rng.choice(every),), tuple(b for b in every if chance(0.5))])
    if op == "compact":
        biases = rng.choice([(), every])
    elif op == "pack":
        biases = tuple(b for b in biases if b == "gate_bias")
    strategy = pick(rng, STRATEGIES) if op != "pack" else "row"
    sparse = strategy in SPARSE
    if op == "overflow":
        strategy = "union"
    present = [name for name in NAMES if name in biases or (name == "w_up" and gated) or name in ("x", *WEIGHTS[::2])]
    wanted: tuple[str, ...] = ()
    if training:
        some = [name for name in present if chance(0.5)]
        wanted = tuple(rng.choice([present, present, ["x"], present[1:], some or ["w_down"]]))
    density = 10 ** -rng.uniform(0, 4)
    pattern = pick(rng, PATTERNS)
    if op == "overflow":
        pattern, density = rng.choice(["all", "uniform", "tokens"]), rng.uniform(0.2, 0.9)
    eager = op == "compact"
    graph = graphs and not eager and chance(0.2)
    x_layout = pick(rng, X_LAYOUTS)
    return Case(
        seed,
        number,
        op,
        m,
        k,
        n,
        rng.choice(list(DTYPES)),
        exact,
        gated,
        biases,
        pattern,
        density,
        strategy,
        rng.choice((2, 4, 8)),
        x_layout,
        pick(rng, WEIGHT_LAYOUTS),
        pick(rng, DOWN_LAYOUTS),
        pick(rng, BIAS_LAYOUTS),
        rng.randrange(5),
        wanted,
        l1=training and chance(0.5),
        mains=training and sparse and chance(0.3),
        graph=graph,
        stream=graphs and not eager and not graph and x_layout != "expanded" and chance(0.2),
        autocast=not eager and chance(0.15),
        filled=not eager and chance(0.2),
    )


def sizes(rng: random.Random, op: str, number: int, limits: Limits) -> tuple[int, int, int]:
    """M, K and N within ``limits``; cases go through the classes of K in turn."""
    at = number % len(limits.classes)
    largest, below = limits.classes[at], limits.classes[at - 1] if at else 0
    edges = [below + 8, largest, *((8, 16, 64, 72, 128, 136, 264) if not below else (below + 72, largest - 8))]
    k = rng.choice([*edges, rng.randrange(below + 8, largest + 1, 8)])
    if op == "decode":
        m = rng.choice([1, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64])
    else:
        m = rng.choice(TOKENS) if rng.random() < 0.75 else int(2 ** rng.uniform(0, math.log2(limits.m)))
    n = rng.choice(NEURONS) if rng.random() < 0.6 else 8 * int(2 ** rng.uniform(0, math.log2(limits.n / 8)))
    m = min(m, limits.m)
    n = min(n, limits.n, limits.gates // max(m, 1), limits.weights // k, max(limits.work // (max(m, 1) * k), 8))
    n = max(n // 8 * 8, 8)
    return min(m, limits.gates // n, limits.work // (n * k)), k, n


# The problem: a gate whose pattern comes from features 0 (popularity of neurons), 1 (load of tokens) and topics


class Layer(NamedTuple):
    """Logical operands: x [M, K], weights [N, K], biases, the gradient of y [M, K]; all contiguous, of one dtype."""

    x: Tensor
    w_gate: Tensor
    w_up: Tensor | None
    w_down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    dy: Tensor

    def present(self) -> dict[str, Tensor]:
        return {name: t for name in NAMES if (t := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Features:
    """Of each neuron and token what its gates have in common; ``sure`` outweighs all that is random."""

    popularity: Tensor
    load: Tensor
    topic: Tensor
    boost: Tensor


def quantile(share: Tensor) -> Tensor:
    """What a standard normal value exceeds with this probability."""
    return -torch.special.ndtri(share.clamp(1e-9, 1 - 1e-9))


def features(case: Case, topics: int, unit: float, sure: float, generator: torch.Generator) -> Features:
    """The pattern of a case; random sums have the deviation ``unit``."""
    m, n, device = case.m, case.n, generator.device
    rng = random.Random(f"{case.seed}:{case.number}:pattern")

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    def chosen(size: int, share: float) -> Tensor:
        """A mask with at least one, if there is any."""
        scores = uniform(size)
        return scores <= torch.quantile(scores[: 1 << 20], share) if size else scores.bool()

    usual = float(quantile(torch.tensor(case.density))) * unit
    popularity = torch.full((n,), -usual, device=device)
    load = torch.zeros(m, device=device)
    topic = torch.randint(topics, (m,), generator=generator, device=device)
    boost = torch.zeros(n, topics, device=device)
    pattern = case.pattern
    if pattern == "tokens":
        popularity.zero_()
        load = -quantile(10 ** (-4 * uniform(m))) * unit
    elif pattern == "heavy tokens":
        load = torch.where(chosen(m, rng.choice([0.0, 0.02, 0.1])), 2 * sure, load)
    elif pattern == "heavy neurons":
        popularity = torch.where(chosen(n, rng.choice([0.0, 0.02, 0.1])), sure, popularity)
    elif pattern in ("topics", "tiles", "band", "single"):
        popularity.fill_(-sure)
        if rng.random() < 0.5:
            topic = (torch.arange(m, device=device) // 128) % topics
        strength = rng.choice([1, 2]) * sure
        for t in range(topics):
            boost[:, t] = torch.where(members(case, t, topics, rng, uniform(n)), 2 * sure, 0)
        if pattern == "topics":
            boost.clamp_(max=strength)
        elif pattern == "band":
            topic = torch.arange(m, device=device) * topics // max(m, 1)
        elif pattern == "single":
            topic.fill_(1)
            topic[rng.randrange(max(m, 1)) :][:1] = 0
    elif pattern == "none":
        # the largest sum is 0
        popularity.fill_(3 - sure - 2 * ("gate_bias" in case.biases))
    elif pattern == "all":
        popularity.fill_(sure)
    return Features(popularity.clamp(-sure, sure), load.clamp(-sure, 2 * sure), topic, boost)


def members(case: Case, t: int, topics: int, rng: random.Random, scores: Tensor) -> Tensor:
    """The neurons of topic ``t``, a mask [N]."""
    place = torch.arange(case.n, device=scores.device)
    if case.pattern == "topics":
        return scores < min(case.density * 4, 1)
    if case.pattern == "band":
        return place * topics // case.n == t
    if case.pattern == "single":
        return (place == rng.randrange(case.n)) & (t == 0)
    # so many in one tile, which is about as many as its words hold
    words = 256 // case.compression
    count = rng.choice([0, 1, words - 2, words - 1, words, words + 1, 255, 256])
    inside = place // 256 == rng.randrange(-(-case.n // 256))
    return inside & (scores.masked_fill(~inside, 2).argsort().argsort() < count)


def build(case: Case, device: torch.device) -> Layer:
    """The operands, drawn on the device."""
    m, k, n = case.m, case.k, case.n
    generator = torch.Generator(device).manual_seed(random.Random(f"{case.seed}:{case.number}:tensors").getrandbits(62))
    topics = min(8, (k - 2) // 3)
    first = 2 + topics
    others = k - first

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, device=device).float()

    def signs(*shape: int) -> Tensor:
        return 2 * integers(0, 1, *shape) - 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def fan_in(count: int) -> Tensor:
        """[n, k] of zeros and, in each row, ``count`` signs in columns behind the features."""
        start = torch.randint(others, (n, 1), generator=generator, device=device)
        columns = first + (start + torch.arange(count, device=device) * (others // count)) % others
        return torch.zeros(n, k, device=device).scatter_(1, columns, signs(n, count))

    if case.exact:
        count = min(15, others)
        unit, sure = math.sqrt(count), count + 3.0
        x, w_gate, w_up, w_down = signs(m, k), fan_in(count), fan_in(2), integers(-1, 1, n, k)
        biases = {"gate_bias": integers(-2, 2, n), "up_bias": integers(-1, 1, n), "down_bias": integers(-8, 8, k)}
        dy = torch.zeros(m, k, device=device)
        start = torch.randint(k, (m, 1), generator=generator, device=device)
        dy.scatter_(1, (start + torch.arange(3, device=device) * (k // 3)) % k, signs(m, 3))
    else:
        unit, sure = 1.0, 8.0
        x, w_gate = normal(m, k), normal(n, k) / math.sqrt(others)
        w_up, w_down = normal(n, k) / math.sqrt(k), 0.1 * normal(n, k)
        biases = {"gate_bias": 0.25 * normal(n), "up_bias": normal(n), "down_bias": normal(k)}
        dy = normal(m, k)
    pattern = features(case, topics, unit, sure, generator)
    popularity, load, boost = pattern.popularity, pattern.load, pattern.boost
    if case.exact:
        popularity, load = popularity.round(), load.round()
    x[:, 0], x[:, 1] = 1, load
    x[:, 2:first] = F.one_hot(pattern.topic, topics).float() if m else 0
    w_gate[:, 0], w_gate[:, 1], w_gate[:, 2:first] = popularity, 1, boost
    if case.exact:
        w_up[:, :first] = 0
    if case.x_layout == "expanded":
        x = x[:1].expand(m, k)
    dtype = DTYPES[case.dtype]
    given = {name: b.to(dtype) if name in case.biases else None for name, b in biases.items()}
    up = w_up.to(dtype) if case.gated else None
    layer = Layer(x.to(dtype).contiguous(), w_gate.to(dtype), up, w_down.to(dtype), **given, dy=dy.to(dtype))
    return layer if case.exact else off_kinks(layer)


def sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """``x weight^T + bias`` in float64, and how far fp32 may be off."""
    x, weight, bias = x.double(), weight.double(), None if bias is None else bias.double()
    reach = x.norm(dim=1)[:, None] * weight.norm(dim=1) + (0 if bias is None else bias.abs())
    return F.linear(x, weight, bias), ACCUMULATION * reach


def off_kinks(layer: Layer) -> Layer:
    """Tokens become zero that have a sum so near to 0 that its sign is a matter of rounding."""
    gate, reach = sums(layer.x, layer.w_gate, layer.gate_bias)
    near = gate.abs() < reach
    if layer.w_up is not None:
        up, reach = sums(layer.x, layer.w_up, layer.up_bias)
        near |= (up.abs() < reach) & (gate > 0)
    return layer._replace(x=layer.x.masked_fill(near.any(1, keepdim=True), 0))


# The answer

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Product:
    """Coefficients [R, J], how far each may be off, and the rows [J, C] that they weigh. float64."""

    coefficients: Tensor
    uncertainty: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Answer:
    """A result [R, C] in float64, and what rounding may do to it.

    variance: of its elements' errors, on average. bound: of its rows' errors in norm, at the worst. count: how many
    roundings share most of the error.
    """

    value: Tensor
    variance: Tensor
    bound: Tensor
    count: Tensor

    @classmethod
    def of(cls, products: list[Product], dtype: torch.dtype, bias: Tensor | None = None) -> Answer:
        unit, smallest = rounding(dtype)
        value = sum(p.coefficients @ p.rows for p in products) + (0 if bias is None else bias.double())
        assert isinstance(value, Tensor)
        variance = (RMS_ROUNDING * unit * value).square() + smallest**2
        bound = unit * value.norm(dim=1) + smallest * math.sqrt(value.shape[1])
        total, squares = torch.zeros((), device=value.device), torch.zeros((), device=value.device)
        for p in products:
            lengths = p.rows.norm(dim=1)
            variance += (RMS_ROUNDINGS * p.uncertainty).square() @ p.rows.square()
            bound += (p.uncertainty + 2.0**-18 * p.coefficients.abs()) @ lengths
            share = (p.uncertainty * lengths).square()
            total, squares = total + share.sum(), squares + share.square().sum()
        energy = value.square()
        count = torch.minimum(energy.sum().square() / energy.square().sum(), total.square() / squares)
        return cls(value, variance, bound, count.nan_to_num(1.0, posinf=1.0).clamp_min(1))


def rounding(dtype: torch.dtype) -> tuple[float, float]:
    """Largest relative error of rounding to ``dtype``, and the largest absolute one near 0."""
    info = torch.finfo(dtype)
    return info.eps / 2, info.smallest_normal * info.eps / 2


@dataclass(frozen=True)
class Right:
    """All answers by name, the gate [M, N], and the figures: the sum of |h|, how far it may be off, the non-zeros."""

    answers: dict[str, Answer]
    gate: Tensor
    l1: Tensor
    l1_bound: Tensor
    nonzeros: Tensor


@torch.no_grad()
def solve(case: Case, layer: Layer) -> Right:
    """What the layer and its gradients are, in float64."""
    dtype = DTYPES[case.dtype]
    unit, smallest = rounding(dtype)
    x, w_gate, w_down = layer.x.double(), layer.w_gate.double(), layer.w_down.double()
    gate, gate_off = sums(layer.x, layer.w_gate, layer.gate_bias)
    gate_off += smallest
    gate = gate.relu()
    active = gate > 0
    if layer.w_up is None:
        up, up_off = torch.ones_like(gate), torch.zeros_like(gate)
    else:
        up, up_off = sums(layer.x, layer.w_up, layer.up_bias)
        up_off += smallest
    hidden = gate * up
    hidden_off = (3 * unit * hidden.abs() + gate_off * up.abs() + up_off * gate + smallest) * active
    answers = {"y": Answer.of([Product(hidden, hidden_off, w_down)], dtype, layer.down_bias)}
    if case.training:
        answers |= gradients(case, layer, x, w_gate, w_down, (gate, gate_off), (up, up_off), (hidden, hidden_off))
    return Right(answers, gate, hidden.abs().sum(), hidden_off.sum() + 2.0**-16 * hidden.abs().sum(), active.sum())


def gradients(
    case: Case,
    layer: Layer,
    x: Tensor,
    w_gate: Tensor,
    w_down: Tensor,
    gate: tuple[Tensor, Tensor],
    up: tuple[Tensor, Tensor],
    hidden: tuple[Tensor, Tensor],
) -> dict[str, Answer]:
    dtype = DTYPES[case.dtype]
    unit, smallest = rounding(dtype)
    dy, active = layer.dy.double(), gate[0] > 0
    dh, dh_off = sums(layer.dy, layer.w_down, None)
    if case.strategy not in SPARSE:
        # rounded before and after the gradient of |h| comes to it, which may leave little
        dh_off += 2 * unit * (dh.abs() + dl1_of(case))
    dh = dh + dl1_of(case) * hidden[0].sign()

    def coefficient(factor: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value, off = factor
        product = dh * value
        return product * active, (3 * unit * product.abs() + dh_off * value.abs() + off * dh.abs() + smallest) * active

    d_gate = coefficient(up)
    out = {"x": [Product(*d_gate, w_gate)]}
    by_neuron = {"gate": d_gate}
    if layer.w_up is not None:
        by_neuron["up"] = coefficient(gate)
        out["x"].append(Product(*by_neuron["up"], layer.w_up.double()))
    ones = torch.ones_like(x[:, :1])
    for name, (value, off) in by_neuron.items():
        out[f"w_{name}"] = [Product(value.t(), off.t(), x)]
        out[f"{name}_bias"] = [Product(value.t(), off.t(), ones)]
    out["w_down"] = [Product(hidden[0].t(), hidden[1].t(), dy)]
    out["down_bias"] = [Product(dy.t(), 0 * dy.t(), ones)]
    return {name: Answer.of(products, dtype) for name, products in out.items() if name in case.wanted}


def dl1_of(case: Case) -> float:
    """The gradient of the sum of |h|. None where that of its mean over tokens, divided again, would not be exact."""
    tokens = torch.tensor(float(max(case.m, 1)))
    # as a GPU divides by a number of the host
    whole = bool(tokens * (1 / tokens) == 1)
    return (1.0 if case.exact and whole else 0.0 if case.exact else 0.25) if case.l1 else 0.0


@torch.enable_grad()
def dense(case: Case, t: dict[str, Tensor], dy: Tensor) -> Outputs:
    """The same in plain PyTorch, of operands as the call gets them and with the names that its outputs have."""
    leaves = {name: operand.detach().requires_grad_(name in case.wanted) for name, operand in t.items()}
    gate = F.relu(F.linear(leaves["x"], leaves["w_gate"], leaves.get("gate_bias")))
    hidden = gate * F.linear(leaves["x"], leaves["w_up"], leaves.get("up_bias")) if case.gated else gate
    y = F.linear(hidden, leaves["w_down"], leaves.get("down_bias"))
    l1, l0 = hidden.abs().sum(dtype=torch.float32), (gate > 0).sum().float()
    out = {"y": y.detach(), "l1": l1.detach() / max(case.m, 1), "l0": l0 / max(case.m, 1)}
    if not case.training:
        return out
    with torch.autocast(dy.device.type, enabled=False):
        found = derive([y, l1], leaves, [dy.view(y.shape), torch.full_like(l1, dl1_of(case))])
    return out | {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in found.items()}


def derive(outputs: list[Tensor], leaves: dict[str, Tensor], upstream: list[Tensor]) -> dict[str, Tensor | None]:
    """Gradients of those leaves that require any; where only the down projection does, the sum of |h| has none."""
    inputs = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    pairs = [(y, dy) for y, dy in zip(outputs, upstream) if y.requires_grad]
    found = torch.autograd.grad(
        [y for y, _ in pairs], list(inputs.values()), [dy for _, dy in pairs], allow_unused=True
    )
    return dict(zip(inputs, found))


def packed_words(gate: Tensor, compression: int) -> tuple[Tensor, Tensor]:
    """words and stats of a gate [M, N] of 16 bits, as README has the format."""
    m, n = gate.shape
    tiles, width = -(-n // 256), 256 // compression
    values = F.pad(gate, (0, 256 * tiles - n)).view(m, tiles, 256)
    nonzero = values != 0
    counts = nonzero.sum(2)
    place = torch.where(nonzero, nonzero.cumsum(2), width).clamp(max=width)
    neurons = torch.arange(256 * tiles, device=gate.device, dtype=torch.int32).view(1, tiles, 256)
    entries = values.view(torch.int16).int() << 16 | neurons
    # the last column takes what no word does
    words = torch.zeros(m, tiles, width + 1, dtype=torch.int32, device=gate.device).scatter_(2, place, entries)
    words[:, :, 0] = counts
    figures = torch.stack((counts, (counts >= width).long()), 2)
    stats = F.pad(figures, (0, 0, 0, 0, 0, -m % 64)).view(-1, 64, tiles, 2).sum(1)
    return words[:, :, :width].reshape(m, tiles * width), stats.int()


# The call


def padded(t: Tensor, left: int, right: int) -> Tensor:
    """The same rows in a wider buffer that is NaN elsewhere."""
    return F.pad(t, (left, right), value=math.nan)[:, left : left + t.shape[1]]


def alternate(t: Tensor) -> Tensor:
    """Every second row, or element, of a buffer that is NaN between."""
    return torch.stack((t, torch.full_like(t, math.nan)), 1).flatten(0, 1)[::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "padded": lambda t: padded(t, 8, 16),
    "odd": lambda t: padded(t, 3, 5),
    "columns": lambda t: t.t().contiguous().t(),
    "alternate": alternate,
    "expanded": lambda t: t[:1].expand(t.shape),
    "off": lambda t: padded(t[None], 1, 0)[0],
    # of a down weight, which calls take as [K, N]
    "rows": lambda t: t,
    "linear": lambda t: t.t().contiguous().t(),
}


def laid_out(case: Case, layer: Layer) -> dict[str, Tensor]:
    """The operands as the call gets them: strides, leading dimensions, w_down [K, N], fp32 under autocast."""
    out = {}
    for name, t in layer.present().items():
        how = {"x": case.x_layout, "w_down": case.down_layout}.get(name)
        how = how or (case.bias_layout if name in BIASES else case.weight_layout)
        t = LAYOUTS[how](t.float() if case.autocast else t)
        out[name] = t.t() if name == "w_down" else t
    out["x"] = with_lead(case, out["x"])
    return out


def contiguous(layer: Layer) -> dict[str, Tensor]:
    """The operands with strides that dense PyTorch likes best."""
    return {name: t.t() if name == "w_down" else t for name, t in layer.present().items()}


def with_lead(case: Case, x: Tensor) -> Tensor:
    """``x`` [M, K] with other leading dimensions, without a copy."""
    m = x.shape[0]
    divisor = next((d for d in (4, 3, 2, 5, 7) if m % d == 0), 1)
    shapes: list[tuple[int, ...]] = [(m,), (1, m), (m, 1, 1), (divisor, m // divisor), ()]
    shape = shapes[case.lead]
    if shape == ():
        return x[0] if m == 1 else x
    return x.unflatten(0, shape) if m else x


def options_of(case: Case, t: dict[str, Tensor]) -> dict[str, Any]:
    biases = {
        "b_gate" if case.gated else "b_up": t.get("gate_bias"),
        "b_down": t.get("down_bias"),
        **({"b_up": t.get("up_bias")} if case.gated else {}),
    }
    return {**biases, "compression": case.compression}


def ffn(case: Case, t: dict[str, Tensor], **options: Any) -> Any:
    options |= options_of(case, t)
    if case.gated:
        return twell.sparse_gated_ffn(t["x"], t["w_gate"], t["w_up"], t["w_down"], **options)
    return twell.sparse_ffn(t["x"], t["w_gate"], t["w_down"], **options)


@contextlib.contextmanager
def surroundings(case: Case, device: torch.device) -> Iterator[None]:
    """Autocast, and new memory full of NaN, where the case has them."""
    torch.use_deterministic_algorithms(case.filled)
    try:
        with torch.autocast(device.type, DTYPES[case.dtype], enabled=case.autocast):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def caller(case: Case, t: dict[str, Tensor], dy: Tensor) -> Callable[[], Outputs]:
    """What makes the call: outputs by name, gradients by that of their tensor, main gradients with ``main`` before."""
    strategy: Any = AutoStrategy() if case.strategy == "site" else case.strategy
    dy = dy.view(t["x"].shape)

    def pack() -> Outputs:
        packed = twell.pack(t["x"], t["w_gate"], t.get("gate_bias"), compression=case.compression)
        return {"dense": packed.unpack(), "words": packed.words, "stats": packed.stats, "nnz": packed.nnz()}

    @torch.no_grad()
    def forward() -> Outputs:
        if case.op == "forward":
            return {"y": ffn(case, t, strategy=strategy)}
        y, aux = ffn(case, t, strategy=strategy, return_aux=True)
        return {"y": y, "l1": aux.l1, "l0": aux.l0}

    def step() -> Outputs:
        leaves = {name: operand.detach().requires_grad_(name in case.wanted) for name, operand in t.items()}
        mains: dict[str, Tensor | None] = {}
        if case.mains:
            weights = [name for name in WEIGHTS if name in t]
            mains = {
                name: torch.full_like(t[name], 3.0, dtype=torch.float32) if name in case.wanted else None
                for name in weights
            }
        y, aux = ffn(case, leaves, strategy=strategy, return_aux=True, main_grads=tuple(mains.values()) or None)
        upstream = [dy.to(y.dtype), torch.full_like(aux.l1, dl1_of(case) * case.m)]
        with torch.autocast(dy.device.type, enabled=False):
            found = derive([y, aux.l1], leaves, upstream)
        out = {"y": y.detach(), "l1": aux.l1.detach(), "l0": aux.l0}
        for name, gradient in found.items():
            main = mains.get(name)
            if main is not None:
                assert gradient is None, f"{name} has a main gradient and another one"
                out[f"main {name}"] = main
            elif gradient is not None:
                out[name] = gradient
        return out

    return pack if case.op == "pack" else step if case.training else forward


def compacted(case: Case, layer: Layer, x: Tensor) -> Outputs:
    """A module with the layer's weights, counted, compacted and put back: counts, and y before, after and restored."""
    kind = twell.nn.SparseGatedMLP if case.gated else twell.nn.SparseMLP
    strategy = "auto" if case.strategy == "site" else case.strategy
    options: dict[str, Any] = {"compression": case.compression, "strategy": strategy}
    module: Any = kind(case.k, case.n, bool(case.biases), **options, device=x.device, dtype=x.dtype)
    first = "gate_proj" if case.gated else "up_proj"
    names = {first: ("w_gate", "gate_bias"), "down_proj": ("w_down", "down_bias")}
    if case.gated:
        names["up_proj"] = ("w_up", "up_bias")
    with torch.no_grad():
        for name, (weight, bias) in names.items():
            given = getattr(layer, weight)
            getattr(module, name).weight.copy_(given.t() if name == "down_proj" else given)
            if case.biases:
                getattr(module, name).bias.copy_(getattr(layer, bias))
        with twell.count_firing(module) as counted:
            before = module(x)
        out = {"y": before, "counts": counted[""].counts.clone()}
        if bool(out["counts"].any()):
            smaller, _ = twell.compact(module, counted[""])
            out["y compacted"] = smaller(x)
            out["y restored"] = twell.restore(smaller)(x)
    return out


# Running


def poison(device: torch.device) -> None:
    """Leave NaN in the free memory that torch holds and hands out next."""
    if device.type == "cuda":
        sizes = [1 << bits for bits in range(9, 21)] * 3 + [1 << bits for bits in range(21, 27)]
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        for block in blocks:
            block.fill_(POISON)


def spoil(outputs: Outputs, keep: list[Tensor]) -> None:
    """Fill the storage of outputs with NaN, but for what they share with ``keep``."""
    kept = {t.untyped_storage().data_ptr() for t in keep}
    for t in outputs.values():
        storage = t.untyped_storage()
        if storage.data_ptr() not in kept:
            torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage).fill_(POISON)


def run_on_side_stream(call: Callable[[], Outputs], x: Tensor) -> Outputs:
    """The call on a stream of its own, which writes ``x`` only after a while."""
    right = x.detach().clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.fill_(math.nan)
        torch.cuda._sleep(400_000)
        x.copy_(right)
        outputs = call()
    torch.cuda.current_stream().wait_stream(stream)
    return outputs


class Mismatch(Exception):
    """A result is not what it must be."""


def same_bits(found: Outputs, first: Outputs, what: str) -> None:
    differing = [
        name
        for name, t in found.items()
        if t.shape != first[name].shape
        or not torch.equal(t.reshape(-1).view(torch.uint8), first[name].reshape(-1).view(torch.uint8))
    ]
    if differing or found.keys() != first.keys():
        raise Mismatch(f"{what} has other bits in {', '.join(differing) or sorted(found)}")


@dataclass
class Result:
    """What a case came to.

    ratios: errors as shares of what is allowed. dense: errors as multiples of dense's. nonzeros: of a token.
    edges: what the pattern exceeds.
    """

    verdict: str = "ok"
    seconds: float = 0.0
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    dense: dict[str, float] = dataclasses.field(default_factory=dict)
    nonzeros: float = 0.0
    edges: list[str] = dataclasses.field(default_factory=list)


def run(case: Case, device: torch.device, result: Result) -> None:
    """Run a case; Mismatch, or whatever the call raises, if it fails."""
    layer = build(case, device)
    right = solve(case, layer)
    result.nonzeros, result.edges = float(right.nonzeros) / max(case.m, 1), edges(case, right)
    operands = laid_out(case, layer)
    if case.op == "compact":
        found = compacted(case, layer, layer.x)
        check_compacted(case, right, {} if case.exact else dense(case, operands, layer.dy), found, result)
        return
    call = caller(case, operands, layer.dy)
    keep = [layer.dy, *operands.values()]
    poison(device)
    with surroundings(case, device):
        first = run_on_side_stream(call, operands["x"]) if case.stream else call()
        outputs = {name: t.clone() for name, t in first.items()}
        spoil(first, keep)
        del first
        again = call()
        if case.strategy != "site":
            same_bits(again, outputs, "a second call")
        del again
        if case.graph:
            graph, static = testing.captured(call)
            spoil(static, keep)
            graph.replay()
            if case.strategy != "site":
                same_bits(static, outputs, "a graph")
            outputs = {name: t.clone() for name, t in static.items()}
    if case.op == "pack":
        check_packed(case, layer, right, outputs)
        return
    baseline: Outputs = {}
    plain: Outputs = {}
    if case.strategy not in SPARSE:
        with surroundings(case, device):
            plain = dense(case, operands, layer.dy)
    if case.strategy != "dense" and not case.exact:
        baseline = dense(dataclasses.replace(case, autocast=False), contiguous(layer), layer.dy)
    check(case, operands["x"].shape, right, baseline, plain, outputs, result)


def edges(case: Case, right: Right) -> list[str]:
    """Whether the words of some tile are too few for its non-zeros, and the hybrid format for all."""
    found = []
    if case.m and case.strategy != "dense":
        tiles = F.pad(right.gate > 0, (0, -case.n % 256)).view(case.m, -1, 256).sum(2)
        if int(tiles.max()) >= 256 // case.compression:
            found.append("spill")
        if case.training and int(right.nonzeros) > format.hybrid_capacity(case.m, case.n):
            found.append("bitmap")
    return found


def check(
    case: Case,
    shape: torch.Size,
    right: Right,
    baseline: Outputs,
    plain: Outputs,
    found: Outputs,
    result: Result,
) -> None:
    if found["y"].shape != shape or found["y"].dtype != DTYPES[case.dtype]:
        raise Mismatch(f"y must be {list(shape)}, got {found['y'].dtype} {list(found['y'].shape)}")
    missing = {"y", *case.wanted} - {name.removeprefix("main ") for name in found}
    if missing:
        raise Mismatch(f"no {', '.join(sorted(missing))}")
    # what PyTorch makes of these very operands: it may round a product before it adds the bias, by their strides
    plainly = {name: t for name, t in plain.items() if name in found}
    if case.strategy == "dense":
        same_bits(found, plainly, "dense")
        return
    if case.strategy not in SPARSE:
        with contextlib.suppress(Mismatch):
            same_bits(found, plainly, "dense")
            return
    if "l1" in found:
        check_figures(case, right, found)
    for name, t in found.items():
        key = name.removeprefix("main ")
        if key in right.answers:
            check_answer(case, name, t, right.answers[key], baseline.get(key), result)


def check_answer(case: Case, name: str, found: Tensor, answer: Answer, baseline: Tensor | None, result: Result) -> None:
    """Bits of exact cases, both bounds of others."""
    if name in ("w_down", "main w_down"):
        found, baseline = found.t(), None if baseline is None else baseline.t()
    dtype, value = DTYPES[case.dtype], answer.value
    found = found.detach().reshape(value.shape)
    main = name.startswith("main ")
    # dense PyTorch adds two products to the gradient of x, each of them rounded
    exact = case.exact and not (name == "x" and case.gated and case.strategy not in SPARSE)
    if exact:
        expected = (value + 3).float() if main else value.float().to(dtype).to(found.dtype)
        if not torch.equal(found, expected):
            raise Mismatch(f"{name} {difference(found, expected)}")
        return
    if not value.numel():
        return
    error = found.double() - (value + 3 if main else value)
    # a main gradient was 3, to which fp32 adds
    bound = answer.bound + (2.0**-22 * math.sqrt(value.shape[1]) if main else 0)
    rows = float((error.norm(dim=1) / bound).max())
    model, count = float(answer.variance.sum().sqrt()), float(answer.count)
    if case.x_layout == "expanded":
        # all tokens are one: what is rounded is rounded alike
        count = max(count / max(case.m, 1), 1)
    theirs = model
    if baseline is not None:
        theirs = float((baseline.detach().reshape(value.shape).double() - value).norm())
        if count >= MANY and theirs:
            result.dense[name] = float(error.norm()) / theirs
        else:
            theirs = max(theirs, model)
    norm = 0.0 if case.exact else float(error.norm()) / (testing.BUDGET * (1 + 4 / math.sqrt(count)) * theirs)
    result.ratios[name] = max(rows, norm)
    if not rows <= 1:
        raise Mismatch(f"{name}: a row is off by {rows:.2f} times what rounding can explain")
    if not norm <= 1:
        raise Mismatch(f"{name}: the error is {norm:.2f} times what is allowed ({count:.0f} roundings)")


def difference(found: Tensor, expected: Tensor) -> str:
    wrong = ~((found == expected) | (found.isnan() & expected.isnan()))
    at = wrong.nonzero()[:1].flatten().tolist()
    place = tuple(at)
    return (
        f"differs in {int(wrong.sum())} of {wrong.numel()} elements, first at {at}: "
        f"{float(found[place])}, expected {float(expected[place])}"
    )


def check_figures(case: Case, right: Right, found: Outputs) -> None:
    tokens = max(case.m, 1)
    l0, l1, total = float(found["l0"]), float(found["l1"]), float(right.l1)
    if l0 != float(right.nonzeros.float() / tokens):
        raise Mismatch(f"l0 {l0}, expected {float(right.nonzeros) / tokens}")
    allowed = float(right.l1_bound) / tokens
    if case.exact:
        allowed = 0.0 if total < testing.EXACT_LIMIT else 1e-5 * total / tokens
    if not abs(l1 - float(right.l1.float() / tokens)) <= allowed:
        raise Mismatch(f"l1 {l1}, expected {total / tokens}, off by at most {allowed}")


def check_packed(case: Case, layer: Layer, right: Right, found: Outputs) -> None:
    dtype = DTYPES[case.dtype]
    values = found["dense"].reshape(case.m, case.n)
    if case.exact:
        expected = right.gate.float().to(dtype)
        if not torch.equal(values, expected):
            raise Mismatch(f"gate {difference(values, expected)}")
    else:
        unit, smallest = rounding(dtype)
        reach = sums(layer.x, layer.w_gate, layer.gate_bias)[1]
        off = (values.double() - right.gate).abs() > 1.01 * unit * right.gate + reach + smallest
        if bool((off | ((values > 0) != (right.gate > 0))).any()):
            raise Mismatch("a gate is not the nearest value to float64's")
    words, stats = packed_words(values, case.compression)
    for name, expected in (("words", words), ("stats", stats)):
        if not torch.equal(found[name].reshape(expected.shape), expected):
            raise Mismatch(f"{name} {difference(found[name].reshape(expected.shape), expected)}")
    if int(found["nnz"]) != int(right.nonzeros):
        raise Mismatch(f"nnz {int(found['nnz'])}, expected {int(right.nonzeros)}")


def check_compacted(case: Case, right: Right, baseline: Outputs, found: Outputs, result: Result) -> None:
    counts = (right.gate > 0).sum(0)
    if not torch.equal(found["counts"], counts):
        raise Mismatch(f"counts {difference(found['counts'], counts)}")
    for name in ("y", "y compacted", "y restored"):
        if name in found:
            check_answer(case, name, found[name], right.answers["y"], baseline.get("y"), result)


class Watchdog:
    """Ends the process where a case takes longer than its limit, as a kernel that hangs would."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.replay = ""
        self.deadline = math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def over(self, replay: str) -> Iterator[None]:
        self.replay, self.deadline = replay, time.monotonic() + self.limit_s
        try:
            yield
        finally:
            self.deadline = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(0.5)
            if time.monotonic() > self.deadline:
                print(f"HANGS for more than {self.limit_s:.0f} s: {self.replay}", flush=True)
                os._exit(3)


def attempt(case: Case, device: torch.device) -> Result:
    """The verdict on a case: "ok", or what is wrong."""
    result, start = Result(), time.perf_counter()
    try:
        run(case, device, result)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Mismatch as error:
        result.verdict = str(error)
    except Exception as error:
        # whatever it is, a legal call raised it
        result.verdict = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    result.seconds = time.perf_counter() - start
    return result


def usable(device: torch.device) -> bool:
    """Whether the device still answers; after a fault of a kernel it does not."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def give_back(device: torch.device) -> None:
    """Let go of torch's cached memory where it is half of what there is."""
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).total_memory // 2
        if torch.cuda.memory_reserved(device) > most:
            torch.cuda.empty_cache()


def shrink(case: Case, device: torch.device) -> Case:
    """The case with as few tokens as halving leaves while it still fails."""
    while case.m > 1 and usable(device):
        smaller = dataclasses.replace(case, m=case.m // 2)
        if attempt(smaller, device).verdict == "ok":
            break
        case = smaller
    return case


class Fuzzer:
    """Draws, runs and records cases."""

    def __init__(self, device: torch.device, limits: Limits, flags: str, limit_s: float) -> None:
        self.device, self.limits, self.flags = device, limits, flags
        self.watchdog = Watchdog(limit_s)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.worst: dict[str, tuple[float, str]] = {}
        self.mismatches: list[str] = []
        self.cases = 0

    def command(self, case: Case, tokens: int | None = None) -> str:
        m = "" if tokens is None else f" --m {tokens}"
        return f"python tests/fuzz.py --replay {case.seed}:{case.number}{self.flags}{m}"

    def draw(self, seed: int, number: int) -> Case:
        return draw(seed, number, self.limits, self.device.type == "cuda")

    def take(self, case: Case, ledger: TextIO | None) -> Result:
        """Run a case, record it, and say so if it fails."""
        with self.watchdog.over(self.command(case, case.m)):
            result = attempt(case, self.device)
        self.cases += 1
        for kind in ("op", "dtype", "strategy", "pattern", "compression", "exact", "gated"):
            self.counts[kind, str(getattr(case, kind))] += 1
        self.counts["class of K", str(next(c for c in (*PACKAGED_K, COMPILED_K) if case.k <= c))] += 1
        for flag in ("mains", "graph", "stream", "autocast", "filled"):
            self.counts["with", flag] += getattr(case, flag)
        for edge in ("spill", "bitmap"):
            self.counts["with", edge] += edge in result.edges
        for kind, ratios in (("of what is allowed", result.ratios), ("times dense's", result.dense)):
            for name, ratio in ratios.items():
                key = f"{name.removeprefix('main ')}, {kind}"
                self.worst[key] = max(self.worst.get(key, (0.0, "")), (ratio, f"{case.seed}:{case.number}"))
        if ledger is not None:
            record = {**dataclasses.asdict(case), "verdict": result.verdict, "seconds": round(result.seconds, 4)}
            record |= {key: {k: round(v, 4) for k, v in getattr(result, key).items()} for key in ("ratios", "dense")}
            record |= {"nonzeros": round(result.nonzeros, 2), "edges": result.edges}
            print(json.dumps(record), file=ledger, flush=True)
        if result.verdict != "ok":
            self.mismatches.append(f"{case.seed}:{case.number} {result.verdict}")
            print(f"WRONG {case}\n  {result.verdict}", flush=True)
            with self.watchdog.over(self.command(case, case.m)):
                smallest = shrink(case, self.device)
            print(f"  {self.command(case, smallest.m)}", flush=True)
        return result

    def summary(self, seconds: float) -> dict[str, Any]:
        by_kind: dict[str, dict[str, int]] = {}
        for (kind, value), count in sorted(self.counts.items()):
            by_kind.setdefault(kind, {})[value] = count
        return {
            "cases": self.cases,
            "seconds": round(seconds, 1),
            "mismatches": self.mismatches,
            "counts": by_kind,
            "worst": {name: [round(ratio, 3), where] for name, (ratio, where) in sorted(self.worst.items())},
        }


def print_summary(summary: dict[str, Any]) -> None:
    for kind, counts in summary["counts"].items():
        print(f"{kind:12} " + ", ".join(f"{value} {count}" for value, count in counts.items()))
    print("largest errors, and the case that has each")
    for name, (ratio, where) in summary["worst"].items():
        print(f"  {name:34} {ratio:7.3f}  {where}")
    cases, seconds = summary["cases"], summary["seconds"]
    wrong = len(summary["mismatches"])
    print(f"{cases} cases in {seconds:.0f} s ({cases / max(seconds, 1e-9):.1f} a second), {wrong} mismatches")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=60, help="seconds after which no case begins (%(default)s)")
    parser.add_argument("--cases", type=int, help="most cases; default: as many as there is time for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ledger", type=Path, help="file that each case is appended to, as a line of JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jit", action="store_true", help="hidden sizes as well that no packaged kernel has")
    parser.add_argument("--limit-s", type=float, default=120, help="seconds after which a case hangs (%(default)s)")
    parser.add_argument("--replay", metavar="SEED:NUMBER", help="run this one case")
    parser.add_argument("--m", type=int, help="with --replay: this many tokens")
    arguments = parser.parse_args(argv)

    device = torch.device(arguments.device)
    # a product of integers is exact only where partial sums are not rounded to 16 bits
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    flags = f" --device {device.type}{' --jit' if arguments.jit else ''}"
    fuzzer = Fuzzer(device, Limits.of(device.type, arguments.jit), flags, arguments.limit_s)
    if arguments.replay:
        try:
            seed, number = map(int, arguments.replay.split(":"))
        except ValueError:
            parser.error(f"--replay must be SEED:NUMBER, got {arguments.replay!r}")
        case = fuzzer.draw(seed, number)
        case = case if arguments.m is None else dataclasses.replace(case, m=arguments.m)
        print(case, flush=True)
        result = attempt(case, device)
        print(f"{result.verdict} ({result.seconds:.2f} s)", *(f"{k} {v:.3f}" for k, v in result.ratios.items()))
        return int(result.verdict != "ok")

    start = time.monotonic()
    with open(arguments.ledger, "a") if arguments.ledger else contextlib.nullcontext() as ledger:
        if ledger is not None:
            options = {name: str(value) for name, value in vars(arguments).items()}
            print(json.dumps({"machine": testing.machine_line(device), "arguments": options}), file=ledger, flush=True)
        number = 0
        while number != arguments.cases and time.monotonic() - start < arguments.budget_s:
            fuzzer.take(fuzzer.draw(arguments.seed, number), ledger)
            number += 1
            if len(fuzzer.mismatches) >= MOST_MISMATCHES or (fuzzer.mismatches and not usable(device)):
                print("stopping here", flush=True)
                break
            give_back(device)
        summary = fuzzer.summary(time.monotonic() - start)
        if ledger is not None:
            print(json.dumps({"summary": summary}), file=ledger, flush=True)
    print_summary(summary)
    return int(bool(fuzzer.mismatches))


if __name__ == "__main__":
    sys.exit(main())
