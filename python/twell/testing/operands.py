"""The tensors of a case by the names of calls.

A gate's pattern comes from the first features of x: 0 is the popularity of neurons, 1 the load of tokens, then topics.
Integers are so small that fp32 holds every sum in any order, and 16 bits every gate, up projection and hidden state.
"""

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.choose import tuning
from twell.ops import float8
from twell.ops.float8 import E4M3, Float8
from twell.runtime import geometry, specs
from twell.testing.case import Case

# A sum of 2,048 products of x and w in 128 fp32 steps is off by up to 128 * 2^-23 of its size on the way, about
# |x| |w| / sqrt(2048): 3.4e-7 of |x| |w|. If it is nearer to 0 than three times that, rounding decides its sign.
ACCUMULATION = 2.0**-20

# how an adapter's product is scaled
LORA_SCALE = 2.0

Operands = dict[str, Any]


def wide(t: Any) -> Tensor:
    """A tensor or a record in float64."""
    return t.dequantize(torch.float64) if isinstance(t, Float8) else t.detach().double()


class Draw:
    """Numbers of one stream, on a device."""

    def __init__(self, seed: str, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(random.Random(seed).getrandbits(62))
        self.device = device

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator, device=self.device).float()

    def signs(self, *shape: int) -> Tensor:
        return 2 * self.integers(0, 1, *shape) - 1

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def chosen(self, size: int, share: float) -> Tensor:
        """A mask with at least one, if there is any."""
        scores = self.uniform(size)
        return scores <= torch.quantile(scores[: 1 << 20], share) if size else scores.bool()

    def spread(self, rows: int, columns: int, count: int, first: int = 0) -> Tensor:
        """[rows, columns] of zeros and, in each row, ``count`` signs at even distances from column ``first`` on."""
        others = columns - first
        start = torch.randint(others, (rows, 1), generator=self.generator, device=self.device)
        places = first + (start + torch.arange(count, device=self.device) * (others // count)) % others
        found: Tensor = torch.zeros(rows, columns, device=self.device)
        found.scatter_(1, places, self.signs(rows, count))
        return found


def quantile(share: Tensor) -> Tensor:
    """The value that a standard normal exceeds with this probability."""
    return -torch.special.ndtri(share.clamp(1e-9, 1 - 1e-9))  # type: ignore[no-any-return]


def features(
    case: Case, n: int, topics: int, unit: float, sure: float, weights: Draw, tokens: Draw
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The popularity of neurons [N], load and topic of tokens [M], and what a topic adds to a gate [N, topics].

    Random sums have the deviation ``unit``; ``sure`` outweighs everything random.
    """
    m, device = case.m, weights.device
    rng = random.Random(f"{case.seed}:pattern")
    usual = float(quantile(torch.tensor(case.density, device="cpu"))) * unit
    popularity = torch.full((n,), -usual, device=device)
    load = torch.zeros(m, device=device)
    topic = torch.randint(topics, (m,), generator=tokens.generator, device=device)
    boost = torch.zeros(n, topics, device=device)
    pattern = case.pattern
    if pattern == "tokens":
        popularity.zero_()
        load = -quantile(10 ** (-4 * tokens.uniform(m))) * unit
    elif pattern == "heavy-tokens":
        load = torch.where(tokens.chosen(m, rng.choice([0.0, 0.02, 0.1])), 2 * sure, load)
    elif pattern == "heavy-neurons":
        popularity = torch.where(weights.chosen(n, rng.choice([0.0, 0.02, 0.1])), sure, popularity)
    elif pattern in ("topics", "tiles", "band", "single"):
        popularity.fill_(-sure)
        if rng.random() < 0.5:
            topic = (torch.arange(m, device=device) // 128) % topics
        strength = rng.choice([1, 2]) * sure
        for t in range(topics):
            boost[:, t] = torch.where(members(case, t, topics, rng, weights.uniform(n)), 2 * sure, 0)
        if pattern == "topics":
            boost.clamp_(max=strength)
        elif pattern == "band":
            topic = torch.arange(m, device=device) * topics // max(m, 1)
        elif pattern == "single":
            topic.fill_(1)
            topic[rng.randrange(max(m, 1)) :][:1] = 0
    elif pattern == "none":
        # the largest sum is 0
        popularity.fill_(3 - sure - 2 * (case.first in case.biases or case.kind == "autoencoder"))
    elif pattern == "all":
        popularity.fill_(sure)
    return popularity.clamp(-sure, sure), load.clamp(-sure, 2 * sure), topic, boost


def members(case: Case, t: int, topics: int, rng: random.Random, scores: Tensor) -> Tensor:
    """The neurons of topic ``t``, a mask [N]."""
    n = len(scores)
    place = torch.arange(n, device=scores.device)
    if case.pattern == "topics":
        return scores < min(case.density * 4, 1)
    if case.pattern == "band":
        return place * topics // n == t
    if case.pattern == "single":
        return (place == rng.randrange(n)) & (t == 0)
    # about as many in one tile as its words hold
    words = 256 // case.compression
    count = rng.choice([0, 1, words - 2, words - 1, words, words + 1, 255, 256])
    inside = place // 256 == rng.randrange(-(-n // 256))
    return inside & (scores.masked_fill(~inside, 2).argsort().argsort() < count)


def build(case: Case, device: torch.device | str = "cpu", again: int = 0) -> Operands:
    """The operands of a case and dy, contiguous, drawn on the device; ``again``: other tokens for the same weights."""
    device = torch.device(device)
    m, k, n = case.m, case.k, case.n * case.experts
    weights, tokens = Draw(f"{case.seed}:weights", device), Draw(f"{case.seed}:tokens:{again}", device)
    topics = min(8, (k - 2) // 3)
    first = 2 + topics
    others = k - first
    small = case.activation == "relu2"
    if case.exact:
        count = min(4 if small else 15, others)
        unit, sure = math.sqrt(count), count + 3.0
        x, dy = tokens.signs(m, k), tokens.spread(m, k, 3)
        w_first, w_up = weights.spread(n, k, count, first), weights.spread(n, k, 2, first)
        w_down = weights.integers(-1, 1, n, k)
        biases = {"first": weights.integers(-2, 2, n), "up": weights.integers(-1, 1, n)}
        biases["down"] = weights.integers(-8, 8, k)
    else:
        unit, sure = 1.0, 8.0
        x, dy = tokens.normal(m, k), tokens.normal(m, k)
        w_first, w_up = weights.normal(n, k) / math.sqrt(others), weights.normal(n, k) / math.sqrt(k)
        w_down = 0.1 * weights.normal(n, k)
        biases = {"first": 0.25 * weights.normal(n), "up": weights.normal(n), "down": weights.normal(k)}
        if case.coherent:
            # x and dy alone have one sign, and up projections of near 1
            x, w_up, w_down, dy = x.abs(), 0.2 * w_up, w_down.abs(), dy.abs()
            w_up[:, 0] = 1
        if small and case.dtype == "fp16":
            # gradients of squares that leave the range of fp16 have no bound
            dy *= 2.0**-6
    popularity, load, topic, boost = features(case, n, topics, unit, sure, weights, tokens)
    if case.exact:
        popularity, load = popularity.round(), load.round()
        popularity = popularity.clamp(max=0) if small else popularity
        w_up[:, :first] = 0
    x[:, 0], x[:, 1] = 1, load
    x[:, 2:first] = F.one_hot(topic, topics).float() if m else 0
    w_first[:, 0], w_first[:, 1], w_first[:, 2:first] = popularity, 1, boost
    if case.x_layout == "expanded":
        x = x[:1].expand(m, k).contiguous()
    o: Operands = {"x": x, f"w_{case.first}": w_first, f"b_{case.first}": biases["first"], "dy": dy}
    if case.first == "gate":
        o |= {"w_up": w_up, "b_up": biases["up"]}
    o |= {"w_down": w_down, "b_down": biases["down"]}
    named = {"x", "dy", *case.weights, *case.operands, *(f"b_{case.first}" for _ in [0] if case.first in case.biases)}
    if case.kind == "given":
        named |= {"x", f"w_{case.first}"}
    o = {name: t.to(case.torch_dtype) for name, t in o.items() if name in named}
    return _of_kind(case, o, weights, tokens, topics)


def _of_kind(case: Case, o: Operands, weights: Draw, tokens: Draw, topics: int) -> Operands:
    """What a kind has besides the operands of a layer, without tokens near kinks."""
    if "w_down" in o:
        o["w_down"] = o["w_down"].t()
    if case.kind == "experts":
        o |= _routes(case, tokens)
        for name in case.weights:
            rows = o[name].t() if name == "w_down" else o[name]
            shaped = rows.reshape(case.experts, case.n, case.k)
            o[name] = shaped.transpose(1, 2) if name == "w_down" else shaped
    if case.rank:
        o |= _adapters(case, weights, 2 + topics)
    if case.kind == "autoencoder":
        if case.skip:
            o["w_skip"] = weights.spread(case.k, case.k, 2) if case.exact else weights.normal(case.k, case.k) * 0.1
            o["w_skip"] = o["w_skip"].to(case.torch_dtype)
        if case.activation == "jumprelu":
            o["threshold"] = level_of(case, o["x"].device).float()
        o["x"] = o["x"] + o["b_down"]
    if case.scales:
        o |= _records(case, o, weights)
    if not case.exact and case.m:
        o["x"] = _kept_tokens(case, o)
    if case.kind == "given":
        gate = F.linear(o["x"].float(), o.pop(f"w_{case.first}").float())
        bias = o.pop(f"b_{case.first}", None)
        o["gate"] = (gate if bias is None else gate + bias.float()).to(case.torch_dtype)
        if not case.gated:
            del o["x"]
    return o


def _routes(case: Case, tokens: Draw) -> Operands:
    """Experts of each token and their weights, powers of two."""
    shape = (case.m, case.slots)
    routed = case.experts - case.shared
    ids = tokens.integers(0, routed - 1, *shape).long()
    ids[:, 0] = torch.where(tokens.uniform(case.m) < case.hot, routed - 1, ids[:, 0])
    ids = torch.where(tokens.uniform(*shape) < case.absent, -1, ids)
    weights = 2.0 ** tokens.integers(-1, 1, *shape)
    if case.shared:
        ids[:, -1], weights[:, -1] = routed, 1
    ids, weights = (ids, weights) if case.wide else (ids.int(), weights.half())
    return {"expert_ids": ids, "weights": weights}


def _adapters(case: Case, weights: Draw, first: int) -> Operands:
    """A [r, in] and B [out, r] of each projection."""
    found: Operands = {}
    for name in case.weights:
        into, out = (case.n, case.k) if name == "w_down" else (case.k, case.n)
        if case.exact:
            a = weights.spread(case.rank, into, 1, 0 if name == "w_down" else first)
            b = weights.spread(out, case.rank, 1)
        else:
            a, b = weights.normal(case.rank, into) / math.sqrt(into), 0.25 * weights.normal(out, case.rank)
        found |= {f"{name}_a": a.to(case.torch_dtype), f"{name}_b": b.to(case.torch_dtype)}
    return found


def _records(case: Case, o: Operands, weights: Draw) -> Operands:
    """Weights in e4m3, down weights as they lay, and x if the case says so."""
    found: Operands = {}
    for name in case.weights:
        t = o[name]
        if not case.exact:
            record = float8.quantize(t, case.scales)  # type: ignore[arg-type]
        else:
            shape = t.shape[:-1] if case.scales == "row" else t.shape[:-2]
            record = float8.float8(t.to(E4M3), 2.0 ** weights.integers(-1, 1, *shape))
        if name == "w_down":
            rows = record.values.view(torch.uint8).transpose(-1, -2).contiguous().transpose(-1, -2)
            record = Float8(rows.view(E4M3), record.scale)
        found[name] = record
    if case.tokens == "e4m3":
        x = o["x"]
        if case.exact:
            found["x"] = Float8(x.to(E4M3), 2.0 ** weights.integers(-1, 1, case.m))
        else:
            found["x"] = float8.quantize_tokens(x) if case.m else Float8(x.to(E4M3), x.new_ones(0).float())
    return found


def in_e4m3(case: Case, x: Any) -> Float8:
    """The tokens that kernels see of a layer of e4m3 weights."""
    if isinstance(x, Float8):
        return x
    return float8.quantize_tokens(x, static_scale(case, x.device) if case.tokens == "static" else None)


def static_scale(case: Case, device: torch.device) -> Tensor:
    """A static scale of tokens [1]; by it the largest values saturate."""
    return torch.full((1,), 1.0 if case.exact else 2.0**-7, device=device)


def sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """``x weight^T + bias`` in float64, and how far fp32 may be off."""
    x, weight, bias = x.double(), weight.double(), None if bias is None else bias.double()
    reach = x.norm(dim=1)[:, None] * weight.norm(dim=1) + (0 if bias is None else bias.abs())
    return F.linear(x, weight, bias), ACCUMULATION * reach


def rounds_hidden(case: Case, device: torch.device) -> bool:
    """Whether the hidden state is rounded to 16 bits: always, except by rows that tokens read one by one.

    Then an expert's is, if one pass rounds it once it is weighted; see ``rounds_weighted``.
    """
    if rounds_weighted(case, device):
        return False
    if case.wants or case.strategy not in ("row", "row+invariant"):
        return True
    one_pass = case.kind in ("layer", "pair") and case.strategy == "row"
    one_pass = one_pass and not (case.top or case.rank) and (case.fast or not case.scales)
    return one_pass and _in_one_pass(case, device, "gated" if case.first == "gate" else "plain")


def rounds_weighted(case: Case, device: torch.device) -> bool:
    """Whether experts' hidden states are rounded once they are weighted, by all slots of a token together."""
    by_row = case.strategy == "row" or (case.strategy == "auto" and device.type == "cuda")
    may = case.kind == "experts" and by_row and not case.scales and case.first != "gate" and not case.wants
    return may and _in_one_pass(case, device, "experts")


def _in_one_pass(case: Case, device: torch.device, kind: str) -> bool:
    family = tuning.family(device.index) if device.type == "cuda" else specs.SM90
    sliced = kind != "experts" and case.n > geometry.MAX_NEURONS
    return not sliced and tuning.decode(case.torch_dtype, case.m, case.k, kind, family) is not None


def level_of(case: Case, device: torch.device | str = "cpu") -> Tensor:
    """The threshold as the layer has it, rounded to its dtype; one for each neuron [N], or a 0-d tensor."""
    return thresholds(case, device).to(case.torch_dtype)


def thresholds(case: Case, device: torch.device | str = "cpu") -> Tensor:
    """The same in float32, before it is rounded."""
    # made on the device, since a graph may be captured
    level = torch.full((), case.threshold, dtype=torch.float32, device=device)
    if case.by_neuron or case.activation == "jumprelu":
        # integers for integers
        level = level + torch.arange(case.n, device=device) % 5 * (1 if case.exact else 0.15)
    return level


def largest(gate: Tensor, k: int) -> Tensor:
    """Which of the rounded gates [M, N] topk keeps: of equal ones the first, and none that is not positive."""
    rank = gate.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (rank < k) & (gate > 0)


def tokens_of(case: Case, o: Operands) -> Tensor:
    """What the first projections take, in float64."""
    if case.scales:
        return wide(in_e4m3(case, o["x"]))
    return wide(o["x"] - o["b_down"] if case.kind == "autoencoder" else o["x"])


def _kept_tokens(case: Case, o: Operands) -> Any:
    """x without the tokens with a sum so near to a kink that rounding decides its side; zeros stand for them."""
    x = tokens_of(case, o)
    level = level_of(case, x.device).double()
    eps = torch.finfo(case.torch_dtype).eps
    near = torch.zeros(case.m, dtype=torch.bool, device=x.device)
    names = (case.first, "up")[: 1 + (case.first == "gate" and "w_up" in o)]
    weights = {name: wide(o[f"w_{name}"]) for name in names}
    for expert in range(case.experts):
        for name in names:
            weight = weights[name][expert] if weights[name].dim() == 3 else weights[name]
            s, reach = sums(x, weight, o.get(f"b_{name}"))
            if case.rank:
                lowered = x @ wide(o[f"w_{name}_a"]).t()
                raised = LORA_SCALE * wide(o[f"w_{name}_b"])
                s, reach = s + lowered @ raised.t(), 2 * reach + eps * (lowered.abs() @ raised.abs().t())
            if name == case.first and case.top:
                near |= undecided(s, reach, case.top, case.torch_dtype).any(1)
            elif name == case.first:
                near |= ((s - level).abs() < reach + level * eps).any(1)
                fires = s > level
            else:
                near |= ((s.abs() < reach) & fires).any(1)
    away, x = near[:, None], o["x"]
    if isinstance(x, Float8):
        return Float8(x.values.view(torch.uint8).masked_fill(away, 0).view(E4M3), x.scale)
    # centred tokens of an autoencoder are zeros then
    return torch.where(away, o["b_down"] if case.kind == "autoencoder" else 0, x)


def undecided(gate: Tensor, reach: Tensor, top: int, dtype: torch.dtype) -> Tensor:
    """The gates that fp32 may round to the other side of the k-th largest of a token, or of 0.

    Of such a token also those that may be kept, or dropped, in their place.
    """
    rounded = gate.to(dtype)
    least = torch.where(largest(rounded, top), rounded, math.inf).amin(1, keepdim=True)
    # with fewer than k positive gates, 0 is what they must exceed
    level = torch.where((rounded > 0).sum(1, keepdim=True) < top, 0, least)
    near = torch.zeros_like(gate, dtype=torch.bool)
    for step in (-1, 1):
        # halfway to the 16-bit number below or above
        beside = (level.contiguous().view(torch.int16) + step).clamp(min=0).view(level.dtype)
        near |= (gate - (level.double() + beside.double()) / 2).abs() < reach
    steps = rounded.view(torch.int16).int() - level.view(torch.int16)
    return near | (near.any(1, keepdim=True) & (steps.abs() <= 1))
