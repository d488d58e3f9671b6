"""A case: one problem and one way to call it, on one line, for tests, the fuzzer and benches.

    layer m=128 n=136 density=1.0 wants=all l1=True mains=True

A line has the kind and what is not usual; ``Case.of(str(case)) == case``. All that a case computes follows from its
fields and the kind of device. ``operands`` draws its tensors, ``formula`` and ``bounds`` have its answers, and
``calls`` makes the call.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from twell.runtime import geometry

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
WEIGHTS = ("w_gate", "w_up", "w_down")
BIASES = ("b_gate", "b_up", "b_down")
# those that run dense nowhere; "row+invariant" is "row" with ``invariant``, the others with "+" are what "auto" may run
SPARSE = ("row", "union", "union+screen", "row+invariant")
STRATEGIES = (*SPARSE, "dense", "auto", "site")
PATTERNS = ("uniform", "tokens", "topics", "heavy-tokens", "heavy-neurons", "tiles", "band", "single", "none", "all")
X_LAYOUTS = ("plain", "padded", "odd", "columns", "alternate", "expanded")
WEIGHT_LAYOUTS = ("plain", "padded", "odd", "columns")
# a down weight [N, K], which calls take as [K, N]; "linear" is that of nn.Linear
DOWN_LAYOUTS = ("rows", "linear", "padded", "odd")
BIAS_LAYOUTS = ("plain", "off", "alternate")

_LAYER = (
    *("gated", "biases", "activation", "threshold", "coherent", "strategy", "compression", "wants", "aux"),
    *("l1", "x_layout", "weight_layout", "down_layout", "bias_layout", "lead", "autocast", "checkpointed"),
)
# what a kind has besides the fields of all
KINDS: dict[str, tuple[str, ...]] = {
    "layer": (*_LAYER, "by_neuron", "top", "scales", "tokens", "fast", "rank", "mains", "module"),
    "pair": ("biases", "coherent", "strategy", "wants", "x_layout", "lead", "autocast", "checkpointed"),
    "given": _LAYER,
    "experts": (
        *("gated", "activation", "threshold", "scales", "tokens", "experts", "slots", "hot", "absent", "merged"),
        *("shared", "wide", "strategy", "compression", "down_layout", "lead", "autocast"),
    ),
    "autoencoder": (
        *("activation", "threshold", "top", "bandwidth", "skip", "train", "strategy", "wants", "aux", "l1"),
        *("x_layout", "lead", "autocast", "checkpointed"),
    ),
    "pack": (
        *("biases", "activation", "threshold", "compression", "x_layout", "weight_layout", "bias_layout", "lead"),
        "autocast",
    ),
    "kept": ("gated", "biases", "activation", "threshold", "by_neuron", "top", "compression"),
}
_ALL = ("kind", "m", "k", "n", "dtype", "exact", "pattern", "density", "seed", "call", "filled", "device_set")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS),
    "dtype": tuple(DTYPES),
    "activation": (*geometry.ACTIVATIONS, "topk", "batchtopk", "jumprelu"),
    "pattern": PATTERNS,
    "scales": ("", "tensor", "row"),
    "tokens": ("", "e4m3", "static"),
    "strategy": STRATEGIES,
    "compression": geometry.COMPRESSIONS,
    "x_layout": X_LAYOUTS,
    "weight_layout": WEIGHT_LAYOUTS,
    "down_layout": DOWN_LAYOUTS,
    "bias_layout": BIAS_LAYOUTS,
    "lead": (0, 1, 2, 3, 4),
    "call": ("eager", "graph", "stream"),
}


@dataclass(frozen=True)
class Case:
    """One problem and one way to call it. Raises ValueError for what a kind does not have.

    kind: ``layer``; ``pair``, two linear layers of a block of which ``sparsify_`` makes one; ``given``, behind a gate
    that is an operand; ``experts``; ``autoencoder``; ``pack``, the TwELL format; ``kept``, the hybrid format.

    m, k, n: tokens, hidden size, neurons (of each expert). exact: small integers, with one right answer, or real
    numbers. biases: of "gate", "up" and "down", those that there are, joined by "+"; of a layer without a gate the
    first is "up". by_neuron: each neuron has a threshold, from ``threshold`` on. top: the k of topk and batchtopk.
    coherent: most terms of long sums have one sign.

    scales: of weights in e4m3. tokens: of these, "e4m3" or a "static" scale. fast: ``fast_accum``. rank: of a LoRA
    adapter of each projection. experts, slots: how many, and how many of them a token has; hot: share of the tokens
    whose first expert is the same one; absent: share of ids that are -1; merged: gate and up in one tensor; shared:
    the last expert is that of all tokens, in their last slot; wide: ids of 64 bits, and weights of 32. skip,
    bandwidth: of an autoencoder; train: it is in train mode.

    wants: the operands that get a gradient, by their names and joined by "+", or "all". l1: there is a gradient of the
    sum of |h|. mains: weights' gradients are added to main gradients. module: of ``twell.nn``, in place of a function.

    lead: a number of other leading dimensions. call: "eager", by a CUDA "graph", or on a side "stream". filled: torch
    fills new memory with NaN. device_set: another default device than the operands' is set, or theirs on a GPU.
    """

    kind: str
    m: int = 64
    k: int = 48
    n: int = 264
    dtype: str = "bf16"
    exact: bool = True
    gated: bool = True
    biases: str = ""
    activation: str = "relu"
    threshold: float = 0.0
    by_neuron: bool = False
    top: int = 0
    pattern: str = "uniform"
    density: float = 0.1
    coherent: bool = False
    scales: str = ""
    tokens: str = ""
    fast: bool = True
    rank: int = 0
    experts: int = 1
    slots: int = 1
    hot: float = 0.0
    absent: float = 0.0
    merged: bool = False
    shared: bool = False
    wide: bool = True
    skip: bool = False
    bandwidth: float = 0.0
    train: bool = False
    strategy: str = "row"
    compression: int = 8
    wants: str = ""
    aux: bool = False
    l1: bool = False
    mains: bool = False
    module: bool = False
    x_layout: str = "plain"
    weight_layout: str = "plain"
    down_layout: str = "rows"
    bias_layout: str = "plain"
    lead: int = 0
    call: str = "eager"
    autocast: bool = False
    filled: bool = False
    checkpointed: bool = False
    device_set: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, usual in _usual().items():
            value, kind = getattr(self, name), type(usual) if name != "kind" else str
            if kind is float and type(value) is int:
                object.__setattr__(self, name, float(value))
            elif type(value) is not kind:
                raise TypeError(f"{name} must be {kind.__name__}, got {value!r}")
            if name in _CHOICES and value not in _CHOICES[name]:
                raise ValueError(f"{name} must be one of {', '.join(map(str, _CHOICES[name]))}, got {value!r}")
            if value != usual and name not in _ALL and name not in KINDS[self.kind]:
                raise ValueError(f"{name} must be {usual!r} of {self.kind}, got {value!r}")
        if self.m < 0 or self.k < 8 or self.n < 8 or self.k % 8 or self.n % 8:
            sizes = f"m={self.m} k={self.k} n={self.n}"
            raise ValueError(f"m must be at least 0, k and n multiples of 8 of at least 8, got {sizes}")
        if self.experts < 1 or not 1 <= self.slots <= geometry.MAX_EXPERTS_OF_TOKEN or self.rank < 0 or self.top < 0:
            raise ValueError(f"experts, slots, rank or top are out of range, got {self}")
        named = {"gate", "up", "down"} if self.gated and "gated" in KINDS[self.kind] else {"up", "down"}
        named = {"gate"} if self.kind == "pack" else {"up", "down"} if self.kind == "pair" else named
        if unknown := set(self.biases.split("+")) - {"", *named}:
            raise ValueError(f"biases must be of {', '.join(sorted(named))}, got {', '.join(sorted(unknown))}")
        if self.wants not in ("", "all") and set(self.wants.split("+")) - {*self.operands}:
            what = f"all, or some of {', '.join(self.operands)} joined by +"
            raise ValueError(f"wants must be {what}, got {self.wants!r}")
        if not all(0 <= share <= 1 for share in (self.density, self.hot, self.absent)) or not self.bandwidth >= 0:
            raise ValueError(f"density, hot and absent must be shares, and bandwidth at least 0, got {self}")

    def __str__(self) -> str:
        own = {name: getattr(self, name) for name, usual in _usual().items() if name != "kind"}
        return " ".join([self.kind, *(f"{name}={value}" for name, value in own.items() if value != _usual()[name])])

    @classmethod
    def of(cls, line: str) -> Case:
        """The case of a line; what follows "#" says why it is there."""
        kind, *words = line.partition("#")[0].split() or [""]
        found: dict[str, Any] = {}
        for word in words:
            name, _, text = word.partition("=")
            if name not in _usual() or name == "kind" or not text or name in found:
                raise ValueError(f"a case has words such as m=128, each of a field of its own, got {word!r}")
            read = type(_usual()[name])
            try:
                found[name] = {"True": True, "False": False}[text] if read is bool else read(text)
            except (KeyError, ValueError):
                raise ValueError(f"{name} must be {read.__name__}, got {text!r}") from None
        return cls(kind, **found)

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def first(self) -> str:
        """The projection whose values the activation takes, "gate" or "up"."""
        return "gate" if self.kind == "pack" or (self.gated and self.kind not in ("pair", "autoencoder")) else "up"

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights in calls; of a given gate also that of the one behind it."""
        if self.kind == "pack":
            return WEIGHTS[:1]
        return WEIGHTS if self.first == "gate" else WEIGHTS[1:]

    @property
    def operands(self) -> tuple[str, ...]:
        """The floating operands by the names of calls, which may have gradients."""
        names = ["x", *self.weights, *(f"b_{name}" for name in ("gate", "up", "down") if name in self.biases)]
        if self.kind == "given":
            names = ["gate", *(name for name in names if not name.endswith(f"_{self.first}"))]
            return tuple(names if self.gated else names[:1] + names[2:])
        if self.kind == "autoencoder":
            names += ["b_up", "b_down", *(["threshold"] if self.activation == "jumprelu" else [])]
            names += ["w_skip"] * self.skip
        if self.rank:
            names += [f"{name}_{part}" for part in "ab" for name in self.weights]
        return tuple(names)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The operands that get a gradient, in order."""
        if self.wants == "all":
            return self.operands
        return tuple(name for name in self.operands if name in self.wants.split("+"))

    @property
    def is_sparse(self) -> bool:
        """Whether the strategy runs dense nowhere."""
        return self.strategy in SPARSE

    @property
    def asked(self) -> dict[str, Any]:
        """strategy and invariant of public calls."""
        return {"strategy": self.strategy.removesuffix("+invariant"), "invariant": self.strategy.endswith("+invariant")}

    @property
    def dl1(self) -> float:
        """The gradient of the sum of |h|; of integers 0 unless that of the mean over tokens is exact."""
        if not self.l1:
            return 0.0
        tokens = torch.tensor(float(max(self.m, 1)), device="cpu")
        # division by a host number, as on a GPU
        whole = bool(tokens * (1 / tokens) == 1)
        return (1.0 if whole else 0.0) if self.exact else 0.25


@functools.cache
def _usual() -> dict[str, Any]:
    """The fields and their usual values; that of the kind is ""."""
    missing = dataclasses.MISSING
    return {field.name: "" if field.default is missing else field.default for field in dataclasses.fields(Case)}
