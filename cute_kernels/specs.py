"""Compile-time choices of each kernel: one frozen dataclass per kernel.

A spec holds everything that changes code and nothing else. It is the cache key, the request to compile and, through
``symbol``, the name of the exported function. ``spec_from_symbol`` is the way back. Pure Python.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
# e4m3 weights and rows of x with fp32 scales; all else is bfloat16.
E4M3 = "float8_e4m3fn"
WEIGHTS = {**DTYPES, E4M3: "e4m3"}

# Families of kernels, each in the folder of its name: sm_90a alone, and every GPU since sm_80.
FAMILIES = SM90, PORTABLE = ("sm90", "sm80")

# Architectures that kernels are compiled for, and their family. Code for sm_80 and sm_100 also runs on later GPUs of
# the same major version.
ARCHITECTURES = {"sm_80": PORTABLE, "sm_90a": SM90, "sm_100": PORTABLE, "sm_120": PORTABLE}

# Kernels of strategy "row" keep a row of x or y in registers, so its size is fixed at compile time: the smallest class
# >= K.
K_CLASSES = (1024, 2048, 4096, 8192, 16384)
# Those of each cluster, by the CTAs that share a row.
TOKEN_K_CLASSES: dict[int, tuple[int, ...]] = {
    1: K_CLASSES,
    4: (2048, 4096, 8192, 16384),
}
# The same of e4m3 weights: a CTA has 1,024 columns at least, and one alone 2,048, as few layers are narrower.
E4M3_TOKEN_K_CLASSES: dict[int, tuple[int, ...]] = {
    1: K_CLASSES[1:],
    4: (4096, 8192, 16384),
}
# Warps of a CTA of that kernel, and bytes that a warp loads at a time.
TOKEN_WARPS, TOKEN_STEP = 8, 512
# The portable family has no clusters.
PORTABLE_TOKEN_K_CLASSES: dict[int, tuple[int, ...]] = {1: K_CLASSES}

# K classes of the kernel that quantises rows for the screen of the gate.
QUANTIZE_K_CLASSES = (2048, 4096, 8192, 16384)

# What is quantised to e4m3 by rows.
QUANTIZED = ("tokens", "gated", "plain")

# Tokens of a tile of the gate GEMM, multiples of 16. Each is the fastest for some batches, see tuning.gate_pack.
GATE_TOKENS = (48, 64, 96, 128, 144)
# Those of e4m3 weights whose sums stay in the tensor cores, or not.
E4M3_GATE_TOKENS = {True: (64, 96, 144), False: (96,)}

# Of the kernel for whole layers of few tokens: its forms, and most tokens.
DECODE_KINDS = "plain", "gated", "experts"
DECODE_TOKENS = (8, 16, 32)
# Columns of a CTA, CTAs of a cluster and most tokens, of layers, of e4m3 weights and of experts: the first that takes a
# call is the fastest (NVIDIA H200, November 2026, K = 768 to 12,288). In clusters of 8 more than 16 tokens lose to
# dense products.
_LARGE = ((1024, 8, 16), (1024, 16, 16))
_DECODE_LAYERS = (
    *((512, 4, 8), (512, 4, 16), (512, 4, 32), (1024, 4, 16), (768, 4, 32), (1024, 4, 32)),
    *_LARGE,
)
_DECODE_E4M3 = (
    *((1024, 2, 16), (512, 4, 32), (2048, 2, 8), (1024, 4, 16), (1024, 4, 32)),
    *_LARGE,
)
_DECODE_EXPERTS = (
    *((512, 2, 8), (512, 2, 16), (512, 2, 32), (768, 4, 8), (768, 4, 16), (768, 4, 32), (1024, 4, 16)),
    *_LARGE,
)
# Pairs of a token and one expert that a unit of its gate GEMM has at most.
EXPERT_TOKENS = (8, 32, 64)
# K classes of the kernel that computes the tokens of experts, whose rows four CTAs share.
EXPERT_K_CLASSES = (4096, 8192, 16384)


def k_class(k: int, classes: tuple[int, ...] = K_CLASSES) -> int:
    """Smallest K class of at least ``k``; NotImplementedError beyond the largest."""
    for k_max in classes:
        if k <= k_max:
            return k_max
    raise NotImplementedError(f"hidden size must be at most {classes[-1]}, got {k}")


def token_k_classes(family: str, dtype: str = "") -> dict[int, tuple[int, ...]]:
    """``TOKEN_K_CLASSES`` of a family, for weights of ``dtype``."""
    if family != SM90:
        return PORTABLE_TOKEN_K_CLASSES
    return E4M3_TOKEN_K_CLASSES if dtype == E4M3 else TOKEN_K_CLASSES


def decode_shapes(dtype: str, kind: str) -> tuple[tuple[int, int, int], ...]:
    """Columns of a CTA, CTAs of a cluster and most tokens of the kernels for a kind of layers, the fastest first."""
    if kind == "experts":
        return _DECODE_EXPERTS if dtype == "bfloat16" else ()
    return _DECODE_E4M3 if dtype == E4M3 else _DECODE_LAYERS


# What fields add to the symbol: a text for any value, or texts for some.
Suffixes = Mapping[str, str | Mapping[Any, str]]


@dataclass(frozen=True)
class Spec:
    """A kernel."""

    op: ClassVar[str]
    suffixes: ClassVar[Suffixes] = {}

    def __post_init__(self) -> None:
        for name, choices in self.choices().items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """What fields may be; those before others are right when these are looked at."""
        return {}

    @property
    def suffix(self) -> str:
        """All fields but dtype and family."""
        given = ((getattr(self, name), adds) for name, adds in self.suffixes.items())
        return "".join(adds.format(value) if isinstance(adds, str) else adds.get(value, "") for value, adds in given)

    @property
    def symbol(self) -> str:
        return f"{self.op}{self.suffix}"

    @property
    def module(self) -> str:
        """The module with the kernel, inside this package."""
        return self.op


@dataclass(frozen=True)
class _Kernel(Spec):
    """A kernel for one dtype."""

    dtype: str
    # names of the dtypes that ``dtype`` may be, by those in symbols
    dtypes: ClassVar[dict[str, str]] = DTYPES

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"dtype": tuple(self.dtypes)}

    @property
    def symbol(self) -> str:
        return f"{self.op}_{self.dtypes[self.dtype]}{self.suffix}"

    @property
    def module(self) -> str:
        return f"{self.op}_e4m3" if self.dtype == E4M3 else self.op


@dataclass(frozen=True)
class _FamilyKernel(_Kernel):
    """A kernel whose code depends on the family."""

    family: str = field(default=SM90, kw_only=True)
    # whether one file has the kernels of all families
    one_file: ClassVar[bool] = False

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return super().choices() | {"family": (SM90,) if self.dtype == E4M3 else FAMILIES}

    @property
    def symbol(self) -> str:
        portable = "" if self.family == SM90 else "portable_"
        return f"{self.op}_{portable}{self.dtypes[self.dtype]}{self.suffix}"

    @property
    def module(self) -> str:
        module = super().module
        return module if self.one_file else f"{self.family}.{module}"


@dataclass(frozen=True)
class PackSpec(_Kernel):
    """``gate -> words, spill, stats``: a dense gate, packed, of any compression."""

    op: ClassVar[str] = "pack"


@dataclass(frozen=True)
class GatePackSpec(_FamilyKernel):
    """``x, w_gate -> words, spill, stats``: the gate GEMM of sm_90a with packed output, of any compression.

    A tile has 256 neurons and ``tokens`` tokens, one of ``GATE_TOKENS``.
    """

    tokens: int
    # whether the tensor cores hold the whole sum, of which they keep about 14 bits if the weights are e4m3
    fast: bool = field(default=True, kw_only=True)
    op: ClassVar[str] = "gate_pack"
    dtypes: ClassVar[dict[str, str]] = WEIGHTS
    suffixes: ClassVar[Suffixes] = {"tokens": "_t{}", "fast": {False: "_slow"}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        by_fast: dict[bool, tuple[int, ...]] = E4M3_GATE_TOKENS if self.dtype == E4M3 else {True: GATE_TOKENS}
        return super().choices() | {"fast": tuple(by_fast), "tokens": by_fast.get(self.fast, ())}


@dataclass(frozen=True)
class DecodeSpec(_FamilyKernel):
    """``x, weights -> y``: a whole layer of up to ``tokens`` tokens on sm_90a, or one of routed experts.

    kind: "plain", "gated" or "experts". cluster: the CTAs that have ``columns`` of K each.
    """

    kind: str
    columns: int
    cluster: int
    tokens: int
    op: ClassVar[str] = "decode"
    dtypes: ClassVar[dict[str, str]] = WEIGHTS
    suffixes: ClassVar[Suffixes] = {
        "kind": {"gated": "_gated", "experts": "_experts"},
        "cluster": "_c{}",
        "columns": "x{}",
        "tokens": "_m{}",
    }

    def choices(self) -> dict[str, tuple[Any, ...]]:
        shapes = decode_shapes(self.dtype, self.kind)
        clusters = sorted({shape[1] for shape in shapes if shape[0] == self.columns})
        tokens = tuple(shape[2] for shape in shapes if shape[:2] == (self.columns, self.cluster))
        kinds = tuple(kind for kind in DECODE_KINDS if decode_shapes(self.dtype, kind))
        own = {"kind": kinds, "columns": tuple(sorted({shape[0] for shape in shapes})), "cluster": tuple(clusters)}
        return super().choices() | {"family": (SM90,)} | own | {"tokens": tokens}

    @property
    def k_max(self) -> int:
        """The most columns that it takes."""
        return self.columns * self.cluster

    @property
    def module(self) -> str:
        return f"{super().module}{'_experts' if self.kind == 'experts' else ''}"


@dataclass(frozen=True)
class QuantizeGateSpec(_Kernel):
    """``rows -> q, scale, spread, offset``: int8 rows of x or w_gate for the screen of the gate.

    For hidden sizes up to ``k_max``, one of ``QUANTIZE_K_CLASSES``.
    """

    k_max: int
    op: ClassVar[str] = "quantize_gate"
    suffixes: ClassVar[Suffixes] = {"k_max": "_k{}"}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return super().choices() | {"k_max": QUANTIZE_K_CLASSES}


@dataclass(frozen=True)
class QuantizeTokensSpec(_Kernel):
    """``x -> q, scale``: rows of x in e4m3, each by its largest value, or all by one scale.

    ``source``: what is quantised, "tokens", or the hidden state of a dense layer, "gated" or "plain".
    """

    source: str
    op: ClassVar[str] = "quantize_tokens"
    suffixes: ClassVar[Suffixes] = {"source": "_{}"}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return super().choices() | {"source": QUANTIZED}


@dataclass(frozen=True)
class GateScreenSpec(_FamilyKernel):
    """``int8 rows of x and w_gate -> candidates``: bits of the neurons that any of 128 tokens may fire.

    ``dtype`` is that of the bias.
    """

    op: ClassVar[str] = "gate_screen"


@dataclass(frozen=True)
class UpDownTokenSpec(_FamilyKernel):
    """``x, packed gate, w_up, w_down -> y, l1``; if not ``gated``: ``packed activations, w_down -> y, l1``.

    Token by token: a ``cluster`` of CTAs for each. For hidden sizes up to ``k_max``, one of ``token_k_classes``.
    """

    k_max: int
    cluster: int
    gated: bool
    op: ClassVar[str] = "up_down_token"
    dtypes: ClassVar[dict[str, str]] = WEIGHTS
    one_file = True
    suffixes: ClassVar[Suffixes] = {"k_max": "_k{}", "cluster": "_x{}", "gated": {False: "_plain"}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        classes = token_k_classes(self.family, self.dtype)
        return super().choices() | {"cluster": tuple(classes), "k_max": classes.get(self.cluster, ())}

    @property
    def columns(self) -> int:
        """Most columns of a CTA."""
        return self.k_max // self.cluster

    @property
    def step(self) -> int:
        """Columns that a warp loads at a time."""
        return TOKEN_STEP // (1 if self.dtype == E4M3 else 2)

    @property
    def span(self) -> int:
        """Warps of a CTA that share a row."""
        return min(TOKEN_WARPS, self.columns // self.step)

    @property
    def vectors(self) -> int:
        """16-byte loads of a thread for a row."""
        return self.columns // (self.span * self.step)

    @property
    def groups(self) -> int:
        """Groups of warps, which divide the non-zeros."""
        return TOKEN_WARPS // self.span

    @property
    def rows(self) -> int:
        """Rows that a thread has in flight."""
        if self.span == 1:
            return 4 if self.family == SM90 else 8
        # of e4m3 rows fewer, as most of the rest are registers of sums; one CTA of a token hides the latency by itself
        return max(1, (16 if self.family != SM90 else 4 if self.dtype == E4M3 else 8) // self.vectors)

    @property
    def turn(self) -> int:
        """Non-zeros that a CTA computes at a time."""
        return self.groups * self.rows

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that a multiprocessor holds."""
        if self.family != SM90:
            return 2 if self.vectors < 4 else 1
        return {1: 4 if self.dtype == E4M3 and self.cluster == 1 else 3, 2: 2, 4: 1, 8: 1}[self.vectors]


@dataclass(frozen=True)
class ExpertDownSpec(UpDownTokenSpec):
    """The same of the experts of each token."""

    op: ClassVar[str] = "expert_down"

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return super().choices() | {"cluster": (4,), "k_max": EXPERT_K_CLASSES}


@dataclass(frozen=True)
class UnpackSpec(_Kernel):
    """``packed -> dense``."""

    op: ClassVar[str] = "unpack"


@dataclass(frozen=True)
class RegluSpec(_Kernel):
    """``gate, up -> relu(gate) * up`` of dense layers; ``backward``: ``dh, gate, up -> d_gate, d_up``."""

    backward: bool
    op: ClassVar[str] = "reglu"
    suffixes: ClassVar[Suffixes] = {"backward": {True: "_backward"}}


@dataclass(frozen=True)
class CompactSpec(_FamilyKernel):
    """``words, spill, stats -> entries, neurons, chunks, sizes``: TwELL to the hybrid format.

    For ``training`` entries are contiguous, the non-zeros of each neuron are counted, and of a batch that exceeds the
    capacity nothing is kept. Otherwise each token tile has room for all of its gates.
    """

    training: bool
    op: ClassVar[str] = "compact"
    suffixes: ClassVar[Suffixes] = {"training": {True: "_training"}}
    one_file = True


@dataclass(frozen=True)
class SampledUpSpec(_FamilyKernel):
    """``x, w_up, hybrid gate -> hidden, l1``: the up projection at the non-zeros.

    The hidden state replaces the gate in the entries. For ``training`` the hidden state and the up projection go to
    tensors of their own.
    """

    training: bool
    op: ClassVar[str] = "sampled_up"
    suffixes: ClassVar[Suffixes] = {"training": {True: "_training"}}
    dtypes: ClassVar[dict[str, str]] = WEIGHTS

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return super().choices() | {"training": (False,) if self.dtype == E4M3 else (False, True)}


@dataclass(frozen=True)
class ListCandidatesSpec(Spec):
    """``candidates -> neurons, sizes``: the lists of the neurons whose bits are set."""

    op: ClassVar[str] = "list_candidates"


@dataclass(frozen=True)
class SampledGateSpec(_FamilyKernel):
    """``x, w_gate, listed neurons -> words, spill, stats``: the gate GEMM at the neurons of each token tile's list."""

    op: ClassVar[str] = "sampled_gate"


@dataclass(frozen=True)
class SampledGradSpec(_FamilyKernel):
    """``dy, w_down, hybrid gate, up -> d_gate, d_up`` at the non-zeros."""

    gated: bool
    op: ClassVar[str] = "sampled_grad"
    suffixes: ClassVar[Suffixes] = {"gated": {False: "_plain"}}
    one_file = True


@dataclass(frozen=True)
class GatheredSpec(_FamilyKernel):
    """``coefficients at the non-zeros, weight rows -> [M, K]``: the sum of ``products`` sparse products.

    0 products: one, whose coefficients are the values in the entries.
    """

    products: int
    op: ClassVar[str] = "gathered"
    dtypes: ClassVar[dict[str, str]] = WEIGHTS
    suffixes: ClassVar[Suffixes] = {"products": "_{}"}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return super().choices() | {"products": (0,) if self.dtype == E4M3 else (0, 1, 2)}


@dataclass(frozen=True)
class ExpertPairsSpec(_Kernel):
    """``ids, x -> owners, pairs, rows, units, total``: pairs of a token and an expert, in the order of the experts."""

    op: ClassVar[str] = "expert_pairs"


@dataclass(frozen=True)
class ExpertPackSpec(_FamilyKernel):
    """``rows of x, w_up of experts, units -> words, spill``: the gate GEMM of experts by units of ``tokens`` pairs."""

    tokens: int
    op: ClassVar[str] = "expert_pack"
    dtypes: ClassVar[dict[str, str]] = WEIGHTS
    suffixes: ClassVar[Suffixes] = {"tokens": "_m{}"}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return super().choices() | {"tokens": EXPERT_TOKENS}


@dataclass(frozen=True)
class ExpertUnionSpec(_Kernel):
    """``hidden states, units -> neurons, compact hidden states``: those that any pair of a unit fires."""

    op: ClassVar[str] = "expert_union"


@dataclass(frozen=True)
class ExpertGatheredSpec(ExpertPackSpec):
    """``compact hidden states, neurons, w_down of experts, units -> z``: the down product of each pair."""

    op: ClassVar[str] = "expert_gathered"


@dataclass(frozen=True)
class ExpertSumSpec(_Kernel):
    """``z, pairs, weights -> y``: the sum over the experts of each token; z is fp32, or of ``dtype`` if ``rounded``."""

    rounded: bool
    op: ClassVar[str] = "expert_sum"
    suffixes: ClassVar[Suffixes] = {"rounded": {True: "_rounded"}}


@dataclass(frozen=True)
class RankSpec(Spec):
    """``popularity -> order, slot``: neurons sorted by popularity."""

    op: ClassVar[str] = "rank"


@dataclass(frozen=True)
class ScatterSpec(Spec):
    """``values of the hybrid format's entries -> matrix``."""

    op: ClassVar[str] = "scatter"


# Quads of a thread of top_k.py, of 512 threads with eight neurons in each
TOP_K_QUADS = (4, 16)


@dataclass(frozen=True)
class TopKSpec(Spec):
    """``gate, k -> levels``: the k-th largest gate of each token, of at most 4,096 ``quads`` neurons of any dtype."""

    quads: int
    op: ClassVar[str] = "top_k"
    suffixes: ClassVar[Suffixes] = {"quads": {quads: f"_n{4096 * quads}" for quads in TOP_K_QUADS}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"quads": TOP_K_QUADS}


@dataclass(frozen=True)
class WindowSpec(_Kernel):
    """``gate, level, below, above -> near, counts``: gates near thresholds; those up to the level become zero."""

    op: ClassVar[str] = "window"


@dataclass(frozen=True)
class MatrixTransposeSpec(Spec):
    """``matrix -> matrix^T`` of values of so many ``bits``, 16 or 8."""

    bits: int = 16
    op: ClassVar[str] = "matrix_transpose"
    suffixes: ClassVar[Suffixes] = {"bits": {8: "_bytes"}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"bits": (16, 8)}


@dataclass(frozen=True)
class TransposeSpec(_FamilyKernel):
    """``hybrid gate, gradients -> lists of tokens and packed coefficients`` by neuron tile."""

    gated: bool
    op: ClassVar[str] = "transpose"
    suffixes: ClassVar[Suffixes] = {"gated": {False: "_plain"}}
    one_file = True


@dataclass(frozen=True)
class WeightGradSpec(_FamilyKernel):
    """``x, dy, packed coefficients by neuron tile -> weight gradients``."""

    gated: bool
    op: ClassVar[str] = "weight_grad"
    suffixes: ClassVar[Suffixes] = {"gated": {False: "_plain"}}


@dataclass(frozen=True)
class OverflowSpec(_Kernel):
    """A pass over a batch whose non-zeros exceed the hybrid format's capacity, by dense products."""

    op: ClassVar[str] = "overflow"


def all_specs() -> tuple[Spec, ...]:
    """Every spec that can be compiled; ``catalog.SHIPPED`` are those that ship."""
    flags = (False, True)
    return (
        *(PackSpec(d) for d in DTYPES),
        *(TopKSpec(q) for q in TOP_K_QUADS),
        *(WindowSpec(d) for d in DTYPES),
        *(GatePackSpec(d, t) for d in DTYPES for t in GATE_TOKENS),
        *(GatePackSpec(E4M3, t, fast=f) for f, choices in E4M3_GATE_TOKENS.items() for t in choices),
        *(DecodeSpec(d, kind, *shape) for d in WEIGHTS for kind in DECODE_KINDS for shape in decode_shapes(d, kind)),
        *(QuantizeGateSpec(d, k) for d in DTYPES for k in QUANTIZE_K_CLASSES),
        *(GateScreenSpec(d) for d in DTYPES),
        *(QuantizeTokensSpec("bfloat16", s) for s in QUANTIZED),
        *(
            UpDownTokenSpec(d, k, c, g, family=f)
            for f in FAMILIES
            for d in DTYPES
            for c, ks in token_k_classes(f).items()
            for k in ks
            for g in flags
        ),
        *(UpDownTokenSpec(E4M3, k, c, g) for c, ks in E4M3_TOKEN_K_CLASSES.items() for k in ks for g in flags),
        *(UnpackSpec(d) for d in DTYPES),
        *(RegluSpec(d, b) for d in DTYPES for b in flags),
        *(CompactSpec(d, t, family=f) for f in FAMILIES for d in DTYPES for t in flags),
        *(SampledUpSpec(d, t, family=f) for f in FAMILIES for d in DTYPES for t in flags),
        SampledUpSpec(E4M3, False),
        ListCandidatesSpec(),
        *(SampledGateSpec(d) for d in DTYPES),
        *(SampledGradSpec(d, g, family=f) for f in FAMILIES for d in DTYPES for g in flags),
        *(GatheredSpec(d, p, family=f) for f in FAMILIES for d in DTYPES for p in range(3)),
        GatheredSpec(E4M3, 0),
        *(ExpertPairsSpec(d) for d in DTYPES),
        *(ExpertPackSpec(d, t) for d in WEIGHTS for t in EXPERT_TOKENS),
        *(ExpertUnionSpec(d) for d in DTYPES),
        *(ExpertGatheredSpec(d, t) for d in WEIGHTS for t in EXPERT_TOKENS),
        *(ExpertSumSpec(d, r) for d in DTYPES for r in flags),
        *(ExpertDownSpec(d, k, 4, g) for d in DTYPES for k in EXPERT_K_CLASSES for g in flags),
        RankSpec(),
        ScatterSpec(),
        MatrixTransposeSpec(),
        MatrixTransposeSpec(8),
        *(TransposeSpec(d, g, family=f) for f in FAMILIES for d in DTYPES for g in flags),
        *(WeightGradSpec(d, g, family=f) for f in FAMILIES for d in DTYPES for g in flags),
        *(OverflowSpec(d) for d in DTYPES),
    )


def spec_from_symbol(symbol: str) -> Spec:
    """The spec whose ``symbol`` this is; ValueError if there is none."""
    for spec in all_specs():
        if spec.symbol == symbol:
            return spec
    raise ValueError(f"no kernel is called {symbol!r}; `list --all` prints every name")
