"""The fuzzer's draws: cases, their operands, and the operands' strides.

A gate's pattern comes from the first features of x: 0 is the popularity of neurons, 1 the load of tokens, then topics.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell._runtime import geometry

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPS = {"pack": 3, "forward": 4, "aux": 3, "train": 6, "decode": 3, "overflow": 2}
STRATEGIES = {
    "row": 6,
    "union": 5,
    "union+screen": 4,
    "row+invariant": 1,
    "dense": 2,
    "auto": 2,
    "site": 1,
}
SPARSE = ("row", "union", "union+screen", "row+invariant")
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
# topk is drawn in place of the others
ACTIVATIONS = {"relu": 6, "relu2": 3, "drelu": 2, "fatrelu": 3, "topk": 0}
X_LAYOUTS = {"plain": 4, "padded": 2, "odd": 2, "columns": 1, "alternate": 1, "expanded": 1}
WEIGHT_LAYOUTS = {"plain": 5, "padded": 2, "odd": 1, "columns": 1}
DOWN_LAYOUTS = {"rows": 5, "linear": 2, "padded": 1, "odd": 1}
# Sums of so many terms are computed in parts. The sizes are for GPUs.
MANY_NEURONS = (28_672, 32_776, 65_536)
MANY_TOKENS = (70_001, 131_200, 1 << 20)
BIAS_LAYOUTS = {"plain": 3, "off": 1, "alternate": 1}
WEIGHTS = ("w_gate", "w_up", "w_down")
BIASES = ("b_gate", "b_up", "b_down")
NAMES = ("x", *WEIGHTS, *BIASES)

# Ranges of K by their ends: small ones, the classes of the packaged kernels, and the one that is compiled when it is
# first asked for.
PACKAGED_K = (512, 1024, 2048, 4096, 8192)
COMPILED_K = 16384

# Tokens of exact training: a load of up to 36 in x times a gradient of up to 212 at each, summed, stays below 2^24.
EXACT_TRAINING = 2048

# Sums in fp32 are off by up to this share of |x| |w|; a sum so near to 0 may have either sign.
ACCUMULATION = 2.0**-20


class Limits(NamedTuple):
    """Limits of a case: tokens, neurons, m * n, n * k, m * n * k, the classes of K, and neurons of very long sums.

    screens: whether there are kernels of the int8 screen.
    """

    m: int
    n: int
    gates: int
    weights: int
    work: int
    classes: tuple[int, ...]
    many: int = MANY_NEURONS[-1]
    screens: bool = True

    @classmethod
    def of(cls, device: str, jit: bool, portable: bool = False) -> Limits:
        if device == "cpu":
            return cls(300, 2056, 1 << 17, 1 << 18, 1 << 22, (512, 1024))
        classes = (*PACKAGED_K, *([COMPILED_K] if jit else []))
        many = geometry.PORTABLE_UNION_NEURONS if portable else MANY_NEURONS[-1]
        return cls(20_000, 16384, 1 << 27, 1 << 26, 1 << 37, classes, many, screens=not portable)


FLAGS = (
    "l1",
    "mains",
    "graph",
    "stream",
    "autocast",
    "filled",
    "coherent",
    "checkpointed",
    "device_set",
    "given",
)


@dataclass(frozen=True)
class Case:
    """One problem and one way to call it.

    wanted: the tensors that require grad, in training. coherent: most terms of long sums have one sign. checkpointed:
    the forward pass runs again in backward. device_set: another default device than the operands' is set, or theirs on
    a GPU. threshold: of fatrelu. given: PyTorch makes the gate, and ``sparse_up_down`` takes it. by_neuron: each
    neuron has a threshold, from ``threshold`` on. top: the k of topk.
    """

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
    coherent: bool
    checkpointed: bool
    device_set: bool
    activation: str = "relu"
    threshold: float = 0.0
    given: bool = False
    by_neuron: bool = False
    top: int = 0

    @property
    def form(self) -> dict[str, Any]:
        """The activation as arguments of calls."""
        if self.top:
            return {"activation": "topk", "k": self.top}
        return {"activation": self.activation, "threshold": self.threshold}

    @property
    def training(self) -> bool:
        return bool(self.wanted)

    def __str__(self) -> str:
        flags, number = [name for name in FLAGS if getattr(self, name)], self.top or self.threshold
        parts = [
            f"{self.seed}:{self.number} {self.op} {self.m}x{self.k}x{self.n} {self.dtype}",
            "integers" if self.exact else "reals",
            f"{'gated' if self.gated else 'plain'} {self.activation}{f' {number:g}' if number else ''}",
            f"{self.pattern} {self.density:.2g}, {self.strategy}, compression {self.compression}",
            f"layouts {self.x_layout}, {self.weight_layout}, {self.down_layout}, {self.bias_layout}, {self.lead}",
        ]
        return ", ".join([*parts, *(["biases " + " ".join(self.biases)] if self.biases else []), *flags])


def pick(rng: random.Random, weighted: dict[str, int]) -> str:
    return rng.choices(list(weighted), list(weighted.values()))[0]


def draw(seed: int, number: int, limits: Limits, graphs: bool) -> Case:
    """Return the case of this number. ``graphs``: whether the device has CUDA graphs and streams."""
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
    every = tuple(b for b in BIASES if gated or b != "b_up")
    biases = rng.choice([(), (), every, (rng.choice(every),), tuple(b for b in every if chance(0.5))])
    if op == "pack":
        biases = tuple(b for b in biases if b == "b_gate")
    strategy = pick(rng, STRATEGIES) if op != "pack" else "row"
    if op == "overflow" or (strategy == "union+screen" and not limits.screens):
        strategy = "union"
    elif training and strategy == "row+invariant":
        # for inference alone
        strategy = "row"
    sparse = strategy in SPARSE
    present = [name for name in NAMES if name in biases or (name == "w_up" and gated) or name in ("x", *WEIGHTS[::2])]
    wanted: tuple[str, ...] = ()
    if training:
        some = [name for name in present if chance(0.5)]
        wanted = tuple(rng.choice([present, present, ["x"], present[1:], some or ["w_down"]]))
    density = 10 ** -rng.uniform(0, 4)
    pattern = pick(rng, PATTERNS)
    if op == "overflow":
        pattern, density = rng.choice(["all", "uniform", "tokens"]), rng.uniform(0.2, 0.9)
    activation, threshold = draw_activation(seed, number, op, exact, gated)
    if exact and activation == "relu2" and pattern != "none":
        # squares fit in 8 bits where gates are small
        pattern, density = "uniform", max(density, 0.01)
    graph = graphs and chance(0.2)
    x_layout = pick(rng, X_LAYOUTS)
    # gradients through the product of a given gate have a rounding of their own
    may_give = op != "pack" and "+" not in strategy and not {"x", "w_gate", "b_gate"} & set(wanted)
    # calls that run dense are compared with PyTorch's own product, which may round before a bias
    may_give = may_give and (strategy in SPARSE or not biases)
    given = may_give and random.Random(f"{seed}:{number}:given").random() < (0.7 if training else 0.3)
    top = 0
    if not gated and op not in ("pack", "overflow") and not given:
        top = draw_top(seed, number, n, training)
        activation, threshold = ("topk", 0.0) if top else (activation, threshold)
    by_neuron = activation == "fatrelu" and op != "pack" and not given
    by_neuron = by_neuron and random.Random(f"{seed}:{number}:thresholds").random() < 0.6
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
        mains=training and sparse and chance(0.3) and not given,
        graph=graph,
        stream=graphs and not graph and x_layout != "expanded" and chance(0.2),
        autocast=chance(0.15),
        filled=chance(0.2),
        coherent=not exact and chance(0.25),
        checkpointed=training and chance(0.15),
        device_set=chance(0.15),
        activation=activation,
        threshold=threshold,
        given=given,
        by_neuron=by_neuron,
        top=top,
    )


def draw_activation(seed: int, number: int, op: str, exact: bool, gated: bool) -> tuple[str, float]:
    """The activation of a case and its threshold."""
    rng = random.Random(f"{seed}:{number}:activation")
    names = {"relu": 1, "fatrelu": 1} if op == "pack" else ACTIVATIONS if gated else {**ACTIVATIONS, "drelu": 0}
    name = pick(rng, names)
    threshold = rng.choice([1.0, 2.0, 3.0] if exact else [0.0, 0.25, 0.7, 1.3])
    return name, threshold if name == "fatrelu" else 0.0


def draw_top(seed: int, number: int, n: int, training: bool) -> int:
    """The k of topk; 0 in most cases. In training the hybrid format has room for it."""
    rng = random.Random(f"{seed}:{number}:top")
    if rng.random() > 0.4:
        return 0
    top = rng.choice([1, 2, 3, 8, 31, 32, 33, 64, n - 1, n, n + 1, rng.randint(1, n)])
    return min(top, geometry.hybrid_capacity(8, n) // 8) if training else top


def sizes(rng: random.Random, op: str, number: int, limits: Limits) -> tuple[int, int, int]:
    """M, K and N within ``limits``; cases go through the classes of K in turn, except for few with very long sums."""
    if limits.m > max(TOKENS) and op != "decode" and rng.random() < 0.03:
        k = rng.choice([8, 64, 128, 264, 512])
        if rng.random() < 0.6:
            return rng.choice([1, 8, 9, 127, 256, 300, 1000]), k, min(rng.choice(MANY_NEURONS), limits.many)
        return rng.choice(MANY_TOKENS), min(k, 128), rng.choice([8, 64, 72, 120])
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


class Layer(NamedTuple):
    """Logical operands: x [M, K], weights [N, K], biases, the gradient of y [M, K]; all contiguous, of one dtype."""

    x: Tensor
    w_gate: Tensor
    w_up: Tensor | None
    w_down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None
    dy: Tensor

    def present(self) -> dict[str, Tensor]:
        return {name: t for name in NAMES if (t := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Features:
    """The common part of each neuron's and token's gates; ``sure`` outweighs everything random."""

    popularity: Tensor
    load: Tensor
    topic: Tensor
    boost: Tensor


def quantile(share: Tensor) -> Tensor:
    """Return the value that a standard normal exceeds with this probability."""
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
        popularity.fill_(3 - sure - 2 * ("b_gate" in case.biases))
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
    # about as many in one tile as its words hold
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
        small = case.activation == "relu2"
        count = min(4 if small else 15, others)
        unit, sure = math.sqrt(count), count + 3.0
        x, w_gate, w_up, w_down = signs(m, k), fan_in(count), fan_in(2), integers(-1, 1, n, k)
        biases = {"b_gate": integers(-2, 2, n), "b_up": integers(-1, 1, n), "b_down": integers(-8, 8, k)}
        dy = torch.zeros(m, k, device=device)
        start = torch.randint(k, (m, 1), generator=generator, device=device)
        dy.scatter_(1, (start + torch.arange(3, device=device) * (k // 3)) % k, signs(m, 3))
    else:
        unit, sure = 1.0, 8.0
        x, w_gate = normal(m, k), normal(n, k) / math.sqrt(others)
        w_up, w_down = normal(n, k) / math.sqrt(k), 0.1 * normal(n, k)
        biases = {"b_gate": 0.25 * normal(n), "b_up": normal(n), "b_down": normal(k)}
        dy = normal(m, k)
        if case.coherent:
            # x and dy alone have one sign, and up projections of near 1
            x, w_up, w_down, dy = x.abs(), 0.2 * w_up, w_down.abs(), dy.abs()
            w_up[:, 0] = 1
        if case.activation == "relu2" and case.dtype == "fp16":
            # gradients of squares that leave the range of fp16 have no bound
            dy *= 2.0**-6
    pattern = features(case, topics, unit, sure, generator)
    popularity, load, boost = pattern.popularity, pattern.load, pattern.boost
    if case.exact:
        popularity, load = popularity.round(), load.round()
        if small:
            popularity = popularity.clamp(max=0)
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
    if case.exact:
        return layer
    return off_choices(layer, case.top) if case.top else off_kinks(layer, level_of(case, device))


def sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """``x weight^T + bias`` in float64, and how far fp32 may be off."""
    x, weight, bias = x.double(), weight.double(), None if bias is None else bias.double()
    reach = x.norm(dim=1)[:, None] * weight.norm(dim=1) + (0 if bias is None else bias.abs())
    return F.linear(x, weight, bias), ACCUMULATION * reach


def level_of(case: Case, device: torch.device | str = "cpu") -> Tensor:
    """The threshold as the layer has it, rounded to its dtype; one for each neuron [N], or a 0-d tensor."""
    # made on the device, since a graph may be captured
    level = torch.full((), case.threshold, dtype=torch.float32, device=device)
    if case.by_neuron:
        # integers for integers
        level = level + torch.arange(case.n, device=device) % 5 * (1 if case.exact else 0.15)
    return level.to(DTYPES[case.dtype])


def off_kinks(layer: Layer, level: Tensor) -> Layer:
    """Zero the tokens with a sum so near to 0, or a gate so near to the threshold, that rounding decides its side."""
    gate, reach = sums(layer.x, layer.w_gate, layer.b_gate)
    level = level.double()
    near = (gate - level).abs() < reach + level * torch.finfo(layer.x.dtype).eps
    if layer.w_up is not None:
        up, reach = sums(layer.x, layer.w_up, layer.b_up)
        near |= (up.abs() < reach) & (gate > 0)
    return layer._replace(x=layer.x.masked_fill(near.any(1, keepdim=True), 0))


def largest(gate: Tensor, k: int) -> Tensor:
    """Which of the rounded gates [M, N] topk keeps: of equal ones the first, and none that is not positive."""
    rank = gate.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (rank < k) & (gate > 0)


def off_choices(layer: Layer, k: int) -> Layer:
    """Zero the tokens with a gate that fp32 may round to the other side of the k-th largest, or of 0."""
    gate, reach = sums(layer.x, layer.w_gate, layer.b_gate)
    rounded = gate.to(layer.x.dtype)
    least = torch.where(largest(rounded, k), rounded, math.inf).amin(1, keepdim=True)
    # with fewer than k positive gates, 0 is what they must exceed
    level = torch.where((rounded > 0).sum(1, keepdim=True) < k, 0, least)
    near = torch.zeros_like(gate, dtype=torch.bool)
    for step in (-1, 1):
        beside = (level.view(torch.int16) + step).clamp(min=0).view(level.dtype)
        near |= (gate - (level.double() + beside.double()) / 2).abs() < reach
    return layer._replace(x=layer.x.masked_fill(near.any(1, keepdim=True), 0))


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
    # a down weight, which calls take as [K, N]
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
