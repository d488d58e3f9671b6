"""Drawn cases: a function of a seed, a number, the limits of a place and the kinds that are asked for.

Each field has a stream of its own, so that a new field changes no earlier case.
"""

import importlib.util
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from twell.runtime import geometry
from twell.testing.case import KINDS, PATTERNS, Case

T = TypeVar("T")

OFTEN = {"layer": 12, "pair": 1, "given": 3, "experts": 3, "autoencoder": 2, "pack": 2, "kept": 1}
STRATEGIES = {
    "row": 6,
    "union": 5,
    "union+screen": 4,
    "row+invariant": 1,
    "dense": 2,
    "auto": 2,
    "site": 1,
}
PATTERN_WEIGHTS = dict(zip(PATTERNS, (3, 4, 3, 2, 2, 3, 1, 1, 1, 1), strict=True))
TOKENS = (0, 1, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 1000)
FEW_TOKENS = (1, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64)
NEURONS = (8, 16, 56, 64, 72, 128, 248, 256, 264, 504, 512, 520, 776, 1024, 1032, 2048, 2056, 5632, 8192, 16384)
ACTIVATIONS = {"relu": 6, "relu2": 3, "drelu": 2, "fatrelu": 3}
LAYOUTS = {
    "x_layout": {"plain": 4, "padded": 2, "odd": 2, "columns": 1, "alternate": 1, "expanded": 1},
    "weight_layout": {"plain": 5, "padded": 2, "odd": 1, "columns": 1},
    "down_layout": {"rows": 5, "linear": 2, "padded": 1, "odd": 1},
    "bias_layout": {"plain": 3, "off": 1, "alternate": 1},
}
# Sums of so many terms are computed in parts. The sizes are for GPUs.
MANY_NEURONS = (28_672, 32_776, 65_536)
MANY_TOKENS = (70_001, 131_200, 1 << 20)
# Ranges of K by their ends: small ones, the classes of the packaged kernels, and the one that is compiled when it is
# first asked for.
PACKAGED_K = (512, 1024, 2048, 4096, 8192)
COMPILED_K = 16384
# Tokens of exact training: a load of up to 36 in x times a gradient of up to 212 at each, summed, stays below 2^24.
EXACT_TRAINING = 2048
# of layers without kernels of long sums, and of modules whose gradients have no sharper bound
MOST_K = 1024


class Limits(NamedTuple):
    """Limits of a case: tokens, neurons, m * n, n * k, m * n * k, the classes of K, and neurons of very long sums.

    screens: whether there are kernels of the int8 screen. graphs: whether there are CUDA graphs and streams. adapters:
    whether there is peft. few: tokens of decoding alone.
    """

    m: int
    n: int
    gates: int
    weights: int
    work: int
    classes: tuple[int, ...]
    many: int = MANY_NEURONS[-1]
    screens: bool = True
    graphs: bool = False
    few: bool = False
    adapters: bool = importlib.util.find_spec("peft") is not None

    @classmethod
    def of(cls, device: str, jit: bool = False, portable: bool = False) -> "Limits":
        if device == "cpu":
            return cls(300, 2056, 1 << 17, 1 << 18, 1 << 22, (512, 1024))
        classes = (*PACKAGED_K, *([COMPILED_K] if jit else []))
        many = geometry.PORTABLE_UNION_NEURONS if portable else MANY_NEURONS[-1]
        return cls(20_000, 16384, 1 << 27, 1 << 26, 1 << 37, classes, many, screens=not portable, graphs=True)

    @property
    def large(self) -> bool:
        return self.m > max(TOKENS)

    def hold(self, case: Case) -> bool:
        """Whether a case that was not drawn is within them, in time and memory."""
        neurons = case.n * case.experts
        fits = case.m <= 8 * self.m and case.m * case.n <= 8 * self.gates and neurons * case.k <= 8 * self.weights
        return fits and max(case.m, 1) * case.n * case.k <= 16 * self.work


class Streams:
    def __init__(self, seed: int, number: int) -> None:
        self.name = f"{seed}:{number}"

    def of(self, field: str) -> random.Random:
        return random.Random(f"{self.name}:{field}")

    def pick(self, field: str, weighted: Mapping[T, int]) -> T:
        return self.of(field).choices(list(weighted), list(weighted.values()))[0]

    def choice(self, field: str, values: Sequence[T]) -> T:
        return self.of(field).choice(values)

    def chance(self, field: str, share: float) -> bool:
        return self.of(field).random() < share


def draw(seed: int, number: int, limits: Limits, kinds: Sequence[str] = tuple(KINDS)) -> Case:
    """The case of this number, of one of ``kinds``."""
    s = Streams(seed, number)
    kind = s.pick("kind", {name: OFTEN[name] for name in kinds})
    given: dict[str, Any] = {"seed": s.of("tensors").getrandbits(31), "exact": s.chance("exact", 0.5)}
    given |= {"dtype": s.choice("dtype", ("bf16", "fp16")), "pattern": s.pick("pattern", PATTERN_WEIGHTS)}
    given |= {"density": float(f"{10 ** -s.of('density').uniform(0, 4):.3g}"), "filled": s.chance("filled", 0.2)}
    given |= {"device_set": s.chance("device_set", 0.15), "autocast": s.chance("autocast", 0.15)}
    given |= {"gated": kind == "pack" or s.chance("gated", 0.7), "compression": s.choice("compression", (2, 4, 8))}
    given |= {name: s.pick(name, layouts) for name, layouts in LAYOUTS.items()}
    given |= {"lead": s.of("lead").randrange(5), "coherent": not given["exact"] and s.chance("coherent", 0.25)}
    given |= {"strategy": s.pick("strategy", STRATEGIES)}
    own = {"layer": _layer, "given": _layer, "pair": _pair, "experts": _experts, "autoencoder": _autoencoder}
    given |= own.get(kind, _packed)(s, kind, number, limits, given)
    if given["exact"] and given.get("activation") == "relu2" and given["pattern"] != "none":
        # squares fit in 8 bits where gates are small
        given |= {"pattern": "uniform", "density": max(given["density"], 0.01)}
    if (kind == "experts" or given.get("scales")) and limits.large and not limits.screens:
        # the portable family has no kernels of these
        given["strategy"] = "dense"
    if limits.graphs and given["x_layout"] != "expanded":
        given["call"] = s.pick("call", {"eager": 13, "graph": 4, "stream": 3})
    own_fields = (*KINDS[kind], "m", "k", "n", "dtype", "exact", "pattern", "density", "seed")
    return Case(kind, **{name: t for name, t in given.items() if name in (*own_fields, "filled", "device_set", "call")})


def _layer(s: Streams, kind: str, number: int, limits: Limits, given: dict[str, Any]) -> dict[str, Any]:
    what = s.pick("what", {"aux": 4, "forward": 4, "train": 6, "decode": 3, "overflow": 2, "e4m3": 4, "rank": 1})
    if (kind == "given" and what in ("e4m3", "rank")) or (what == "rank" and not limits.adapters):
        what = "aux"
    if what == "e4m3":
        return _float8(s, limits, given)
    training = what in ("train", "overflow")
    m, k, n = sizes(s, number, limits, what == "decode")
    gated, strategy, exact = given["gated"], given["strategy"], given["exact"]
    if what == "rank":
        return _adapted(s, given, min(m, 300), min(k, MOST_K), n)
    m = min(m, EXACT_TRAINING) if exact and training else m
    if what == "overflow" or (strategy == "union+screen" and not limits.screens):
        strategy = "union"
    elif (training or kind == "given") and strategy == "row+invariant":
        # for inference alone, and of whole layers
        strategy = "row"
    elif kind == "given" and strategy == "union+screen":
        strategy = "union"
    found: dict[str, Any] = {"m": m, "k": k, "n": n, "strategy": strategy, "biases": _biases(s, gated, kind)}
    if what == "overflow":
        found |= {"pattern": s.choice("overflow", ("all", "uniform", "tokens"))}
        found |= {"density": round(s.of("overflow density").uniform(0.2, 0.9), 3)}
    found |= _activation(s, exact, gated)
    if not gated and kind == "layer" and what != "overflow":
        found |= _top(s, n, training)
    found["by_neuron"] = found["activation"] == "fatrelu" and kind == "layer" and s.chance("thresholds", 0.6)
    found["aux"] = training or what in ("aux", "decode")
    case = Case(kind, gated=gated, biases=found["biases"])
    if training:
        found |= _learns(s, case.operands)
        sparse = Case(kind, strategy=strategy).is_sparse
        found["mains"] = sparse and kind == "layer" and s.chance("mains", 0.3)
    if kind == "layer" and not found["by_neuron"] and "+" not in strategy and not found.get("top"):
        found["module"] = s.chance("module", 0.2)
    return found


def _learns(s: Streams, operands: Sequence[str]) -> dict[str, Any]:
    some = [name for name in operands if s.chance(f"wants {name}", 0.5)]
    wants = s.choice("wants", ("all", "all", operands[0], "+".join(operands[1:]), "+".join(some) or "w_down"))
    return {"wants": wants, "l1": s.chance("l1", 0.5), "checkpointed": s.chance("checkpointed", 0.15)}


def _biases(s: Streams, gated: bool, kind: str = "layer") -> str:
    names = {"pack": ["gate"], "pair": ["up", "down"]}.get(kind, ["gate", "up", "down"] if gated else ["up", "down"])
    how = s.choice("biases", ("none", "none", "all", "one", "some"))
    if how == "some":
        return "+".join(name for name in names if s.chance(f"bias {name}", 0.5))
    return {"none": "", "all": "+".join(names), "one": s.choice("bias", names)}[how]


def _activation(s: Streams, exact: bool, gated: bool, names: Mapping[str, int] = ACTIVATIONS) -> dict[str, Any]:
    name = s.pick("activation", names if gated else {**names, "drelu": 0})
    threshold = s.choice("threshold", (1.0, 2.0, 3.0) if exact else (0.0, 0.25, 0.7, 1.3))
    return {"activation": name, "threshold": threshold if name == "fatrelu" else 0.0}


def _top(s: Streams, n: int, training: bool) -> dict[str, Any]:
    """topk in place of the activation, in some cases. In training the hybrid format has room for it."""
    r = s.of("top")
    if r.random() > 0.4:
        return {}
    top = r.choice([1, 2, 3, 8, 31, 32, 33, 64, n - 1, n, n + 1, r.randint(1, n)])
    top = min(top, geometry.hybrid_capacity(8, n) // 8) if training else top
    return {"activation": "topk", "threshold": 0.0, "top": max(top, 1)}


def _float8(s: Streams, limits: Limits, given: dict[str, Any]) -> dict[str, Any]:
    exact, gated, big = given["exact"], given["gated"], limits.large
    tokens = (0, 1, 1, 2, 7, 8, 9, 17, 33, 64, 65, 100, 128, 129, 300, 513, 1025) if big else (0, 1, 3, 9)
    # a gate near a threshold is a matter of its last bits
    names = {"relu": 3, "relu2": 1, "fatrelu": int(exact), "drelu": 1}
    strategy = {"union+screen": "union", "site": "auto"}.get(given["strategy"], given["strategy"])
    found: dict[str, Any] = {
        "m": s.choice("m", tokens),
        "k": 16 * s.of("k").randint(1, s.choice("most k", (4, 8, 33, 130, 300, 512)) if big else 5),
        # dense products of other numbers of neurons are not those of torch._scaled_mm
        "n": (8 if exact else 16) * s.of("n").randint(1, s.choice("most n", (4, 33, 64, 130, 352)) if big else 20),
        "tokens": "e4m3" if exact else s.choice("tokens", ("", "", "e4m3")),
        "scales": s.choice("scales", ("row", "row", "tensor")),
        "dtype": "bf16",
        "fast": s.chance("fast", 0.7),
        "biases": s.choice("biases", ("", "", "", "gate+up+down" if gated else "up+down")),
        "strategy": strategy,
        "coherent": False,
        "autocast": False,
        # a record's x is read in place
        "x_layout": s.choice("x layout", ("plain", "plain", "plain", "padded")),
        "weight_layout": "plain",
        "down_layout": s.pick("down layout", {"rows": 9, "linear": 1}),
        "bias_layout": "plain",
    }
    return found | _activation(s, exact, gated, names)


def _adapted(s: Streams, given: dict[str, Any], m: int, k: int, n: int) -> dict[str, Any]:
    strategy = "row" if given["strategy"].startswith("row") else "union"
    case = Case("layer", gated=given["gated"], rank=1, biases=(biases := _biases(s, given["gated"])))
    found = {"m": m, "k": k, "n": n, "rank": s.choice("rank", (1, 2, 3, 8)), "strategy": strategy, "module": True}
    found |= {"biases": biases, "coherent": False, "autocast": False, "x_layout": "plain"}
    found |= dict.fromkeys(("weight_layout", "bias_layout"), "plain") | {"down_layout": "linear"}
    if s.chance("trains", 0.6):
        wants = s.choice(
            "adapted wants", ("all", "+".join(name for name in case.operands if name[-2:] in ("_a", "_b")))
        )
        found |= {"wants": wants, "checkpointed": s.chance("checkpointed", 0.15)}
    return found | {"activation": "relu", "threshold": 0.0}


def _pair(s: Streams, kind: str, number: int, limits: Limits, given: dict[str, Any]) -> dict[str, Any]:
    m, k, n = sizes(s, number, limits, False)
    strategy = {"union+screen": "union", "row+invariant": "row", "site": "auto"}
    found: dict[str, Any] = {"m": min(m, EXACT_TRAINING), "k": k, "n": n, "biases": _biases(s, False, "pair")}
    found |= {"strategy": strategy.get(given["strategy"], given["strategy"])}
    if s.chance("trains", 0.5):
        found |= _learns(s, Case("pair", biases=found["biases"]).operands) | {"l1": False}
    return found | {"x_layout": "plain" if given["x_layout"] == "expanded" else given["x_layout"]}


def _experts(s: Streams, kind: str, number: int, limits: Limits, given: dict[str, Any]) -> dict[str, Any]:
    big = limits.large
    tokens = (0, 1, 1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 65, 100, 128, 256, 300) if big else (0, 1, 2, 5, 9)
    exact, gated = given["exact"], given["gated"] and s.chance("gated experts", 0.6)
    scales = s.pick("scales", {"": 6, "row": 2, "tensor": 2})
    k = 8 * s.of("k").randint(1, s.choice("most k", (8, 16, 64, 336, 512)) if big else 9)
    n = 8 * s.of("n").randint(1, s.choice("most n", (8, 33, 64, 232)) if big else 40)
    experts = s.choice("experts", (1, 2, 3, 8, 17, 64, 128, 512, 1024) if big else (1, 2, 5, 9))
    while experts > 1 and experts * n * k > (1 << 28 if big else 1 << 16):
        experts //= 2
    strategy = s.pick("by expert", {"row": 3, "auto": 1, "dense": 1, "row+invariant": 1})
    m = s.choice("m", FEW_TOKENS if limits.few else tokens)
    found: dict[str, Any] = {"m": m, "gated": gated, "experts": experts, "strategy": strategy}
    found |= {"slots": s.choice("slots", (1, 2, 3, 6, 8, 22, 32)), "hot": s.choice("hot", (0.0, 0.0, 0.5, 1.0))}
    found |= {"absent": s.choice("absent", (0.0, 0.0, 0.1, 1.0)), "wide": s.chance("wide", 0.5), "coherent": False}
    found |= {"down_layout": s.pick("down layout", {"rows": 9, "linear": 1}), "x_layout": "plain"}
    found |= {"merged": gated and not scales and s.chance("merged", 0.5), "density": max(given["density"], 0.01)}
    may_share = not gated and not scales and strategy != "row+invariant" and experts > 1 and found["slots"] > 1
    found["shared"] = may_share and s.chance("shared", 0.3)
    names: Mapping[str, int] = {"relu": 1, "relu2": 2, "fatrelu": 1, "drelu": 1}
    if scales:
        # dense products of other numbers of neurons are not those of torch._scaled_mm
        k, n = -(-k // 16) * 16, n if exact else -(-n // 16) * 16
        found |= {"scales": scales, "dtype": "bf16", "autocast": False, "tokens": "e4m3" if exact else ""}
        found["strategy"] = "dense" if gated else {"row+invariant": "row"}.get(strategy, strategy)
        names = {**names, "fatrelu": int(exact)}
    return found | {"k": k, "n": n, **_activation(s, exact, gated, names)}


def _autoencoder(s: Streams, kind: str, number: int, limits: Limits, given: dict[str, Any]) -> dict[str, Any]:
    m, k, n = sizes(s, number, limits, False)
    m, k, n = min(m, 300), min(k, MOST_K), min(n, 2056)
    exact, name = given["exact"], s.choice("codes", ("relu", "jumprelu", "topk", "batchtopk"))
    strategy = "row" if given["strategy"].startswith("row") else "dense" if given["strategy"] == "dense" else "union"
    found: dict[str, Any] = {"m": m, "k": k, "n": n, "activation": name, "strategy": strategy, "coherent": False}
    found |= {"skip": s.chance("skip", 0.3), "train": s.chance("train", 0.7)}
    if name in ("topk", "batchtopk"):
        found["top"] = min(s.choice("top", (1, 2, 5, 32, n)), geometry.hybrid_capacity(8, n) // 8, n)
    elif name == "jumprelu":
        found["threshold"] = s.choice("threshold", (0.0, 1.0, 3.0) if exact else (0.01, 0.25, 0.7))
        found["bandwidth"] = s.choice("bandwidth", (2.0, 8.0) if exact else (0.05, 0.5))
    found["x_layout"] = "plain" if given["x_layout"] == "expanded" else given["x_layout"]
    found["aux"] = s.chance("aux", 0.6)
    if s.chance("trains", 0.6):
        case = Case("autoencoder", skip=found["skip"], activation=name, top=found.get("top", 0))
        found |= _learns(s, case.operands) | {"train": True, "aux": True}
    return found


def _packed(s: Streams, kind: str, number: int, limits: Limits, given: dict[str, Any]) -> dict[str, Any]:
    m, k, n = sizes(s, number, limits, False)
    if kind == "kept":
        m, n = min(m, 1000), min(n, 1 << 16)
    names: Mapping[str, int] = {"relu": 1, "fatrelu": 1} if kind == "pack" else {**ACTIVATIONS, "drelu": 0}
    found: dict[str, Any] = {"m": m, "k": k, "n": n, "biases": _biases(s, given["gated"], kind)}
    found |= _activation(s, given["exact"], given["gated"], names)
    if kind == "kept":
        found["by_neuron"] = found["activation"] == "fatrelu" and s.chance("thresholds", 0.6)
        found |= _top(s, n, True) if not given["gated"] else {}
        found["by_neuron"] &= found["activation"] == "fatrelu"
    return found


def sizes(s: Streams, number: int, limits: Limits, few: bool) -> tuple[int, int, int]:
    """M, K and N within ``limits``; cases go through the classes of K in turn, except for few with very long sums."""
    r, few = s.of("sizes"), few or limits.few
    if limits.large and not few and r.random() < 0.03:
        k = r.choice([8, 64, 128, 264, 512])
        if r.random() < 0.6:
            return r.choice([1, 8, 9, 127, 256, 300, 1000]), k, min(r.choice(MANY_NEURONS), limits.many)
        return r.choice(MANY_TOKENS), min(k, 128), r.choice([8, 64, 72, 120])
    at = number % len(limits.classes)
    largest, below = limits.classes[at], limits.classes[at - 1] if at else 0
    edges = [below + 8, largest, *((8, 16, 64, 72, 128, 136, 264) if not below else (below + 72, largest - 8))]
    k = r.choice([*edges, r.randrange(below + 8, largest + 1, 8)])
    if few:
        m = r.choice(FEW_TOKENS)
    else:
        m = r.choice(TOKENS) if r.random() < 0.75 else int(2 ** r.uniform(0, math.log2(limits.m)))
    n = r.choice(NEURONS) if r.random() < 0.6 else 8 * int(2 ** r.uniform(0, math.log2(limits.n / 8)))
    m = min(m, limits.m)
    n = min(n, limits.n, limits.gates // max(m, 1), limits.weights // k, max(limits.work // (max(m, 1) * k), 8))
    n = max(n // 8 * 8, 8)
    return min(m, limits.gates // n, limits.work // (n * k)), k, n
