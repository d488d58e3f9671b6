"""Compile-time choices of each kernel: one frozen dataclass per kernel.

A spec holds everything that changes code and nothing else. It is the cache key, the request to compile and, through
``symbol``, the name of the exported function. ``spec_from_symbol`` is the way back. Pure Python.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
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

# Kernels of strategy "row" keep a row of x or y in registers, so they are compiled for the smallest class >= K.
K_CLASSES = (1024, 2048, 4096, 8192, 16384)
# Warps of a CTA of that kernel, and bytes that a warp loads at a time.
TOKEN_WARPS, TOKEN_STEP = 8, 512

# K classes of the kernel that quantises rows for the screen of the gate.
QUANTIZE_K_CLASSES = (2048, 4096, 8192, 16384)

# Tokens of a tile of the gate GEMM, multiples of 16. Each is the fastest for some batches, see tuning.gate_pack.
GATE_TOKENS = (48, 64, 96, 128, 144)
# Those of e4m3 weights whose sums stay in the tensor cores, or not.
E4M3_GATE_TOKENS = {True: (64, 96, 144), False: (96,)}

# Of the kernel for whole layers of few tokens: its forms, and most tokens.
DECODE_KINDS = "plain", "gated", "experts"
DECODE_TOKENS = (8, 16, 32)
# CTAs of a cluster, columns of each and most tokens, of layers, of e4m3 weights and of experts: the first that takes a
# call is the fastest (NVIDIA H200, November 2026, K = 768 to 12,288). In clusters of 8 more than 16 tokens lose to
# dense products.
_LARGE = ((8, 1024, 16), (16, 1024, 16))
_DECODE_LAYERS = ((4, 512, 8), (4, 512, 16), (4, 512, 32), (4, 1024, 16), (4, 768, 32), (4, 1024, 32), *_LARGE)
_DECODE_E4M3 = ((2, 1024, 16), (4, 512, 32), (2, 2048, 8), (4, 1024, 16), (4, 1024, 32), *_LARGE)
_DECODE_EXPERTS = (*((c, k, m) for c, k in ((2, 512), (4, 768)) for m in DECODE_TOKENS), (4, 1024, 16), *_LARGE)
# Pairs of a token and one expert that a unit of its gate GEMM has at most.
EXPERT_TOKENS = (8, 32, 64)
# K classes of the kernel that computes the tokens of experts, whose rows four CTAs share.
EXPERT_K_CLASSES = (4096, 8192, 16384)
# Quads of a thread of top_k.py, of 512 threads with eight neurons in each
TOP_K_QUADS = (4, 16)


def k_class(k: int, classes: tuple[int, ...] = K_CLASSES) -> int:
    """Smallest K class of at least ``k``; NotImplementedError beyond the largest."""
    for k_max in classes:
        if k <= k_max:
            return k_max
    raise NotImplementedError(f"hidden size must be at most {classes[-1]}, got {k}")


def token_k_classes(family: str, dtype: str = "") -> dict[int, tuple[int, ...]]:
    """K classes of strategy "row" by the CTAs of a cluster, which share a row; the portable family has no clusters."""
    if family != SM90:
        return {1: K_CLASSES}
    # a CTA of e4m3 weights has 1,024 columns at least, and one alone 2,048, as few layers are narrower
    narrow = int(dtype == E4M3)
    return {1: K_CLASSES[narrow:], 4: K_CLASSES[1 + narrow :]}


def decode_shapes(dtype: str, kind: str) -> tuple[tuple[int, int, int], ...]:
    """CTAs of a cluster, columns of each and most tokens of the kernels for a kind of layers, the fastest first."""
    if kind == "experts":
        return _DECODE_EXPERTS if dtype == "bfloat16" else ()
    return _DECODE_E4M3 if dtype == E4M3 else _DECODE_LAYERS


# ---- what a spec is ----

# What a field may be, or a function that says so of a spec whose earlier fields are known.
Choices = tuple[Any, ...] | Callable[[Any], tuple[Any, ...]]


def choice(choices: Choices, suffix: str | Mapping[Any, str] = "", default: Any = MISSING) -> Any:
    """A field, and what it adds to the symbol: a text for any value, or texts for some."""
    choices_of = choices if callable(choices) else lambda spec: choices
    return field(default=default, metadata={"choices": choices_of, "suffix": suffix})


def flag(**suffix: str) -> Any:
    """A field that is true or false, with a suffix if ``yes``, or if ``no``."""
    return choice((False, True), {name == "yes": text for name, text in suffix.items()})


@dataclass(frozen=True)
class Spec:
    """A kernel."""

    # the stem of the kernel's names, from that of its class: "gate_pack" of GatePackSpec
    op: ClassVar[str]
    kinds: ClassVar[list[type["Spec"]]] = []

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            cls.op = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Spec")).lower()
            Spec.kinds.append(cls)

    def __post_init__(self) -> None:
        for each in fields(self):
            choices, value = each.metadata["choices"](self), getattr(self, each.name)
            if value not in choices:
                raise ValueError(f"{each.name} must be one of {choices}, got {value!r}")

    @property
    def suffix(self) -> str:
        """All fields but dtype and family."""
        given = ((getattr(self, each.name), each.metadata["suffix"]) for each in fields(self))
        return "".join(adds.format(value) if isinstance(adds, str) else adds.get(value, "") for value, adds in given)

    @property
    def symbol(self) -> str:
        return f"{self.op}{self.suffix}"

    @property
    def module(self) -> str:
        """The module with the kernel, inside this package."""
        return f"all_gpus.{self.file}"

    @property
    def file(self) -> str:
        """The name of that module inside its folder."""
        return self.op


def _variants(kind: type[Spec], given: dict[str, Any]) -> list[Spec]:
    """All specs of a kernel with these values of its first fields."""
    if len(given) == len(fields(kind)):
        return [kind(**given)]
    following, so_far = fields(kind)[len(given)], object.__new__(kind)
    vars(so_far).update(given)
    values = following.metadata["choices"](so_far)
    return [spec for value in values for spec in _variants(kind, given | {following.name: value})]


@functools.cache
def all_specs() -> tuple[Spec, ...]:
    """Every spec that can be compiled; ``catalog.SHIPPED`` are those that ship."""
    return tuple(spec for kind in Spec.kinds for spec in _variants(kind, {}))


def spec_from_symbol(symbol: str) -> Spec:
    """The spec whose ``symbol`` this is; ValueError if there is none."""
    for spec in all_specs():
        if spec.symbol == symbol:
            return spec
    raise ValueError(f"no kernel is called {symbol!r}; `list --all` prints every name")


@dataclass(frozen=True)
class _Kernel(Spec):
    """A kernel for one dtype."""

    dtype: str = choice(lambda spec: tuple(spec.dtypes))
    # names of the dtypes that ``dtype`` may be, by those in symbols
    dtypes: ClassVar[dict[str, str]] = DTYPES
    # whether e4m3 weights have a kernel in a file of their own
    e4m3_file: ClassVar[bool] = True

    @property
    def symbol(self) -> str:
        return f"{self.op}_{self.dtypes[self.dtype]}{self.suffix}"

    @property
    def file(self) -> str:
        return f"{self.op}_e4m3" if self.dtype == E4M3 and self.e4m3_file else self.op


@dataclass(frozen=True)
class _FamilyKernel(_Kernel):
    """A kernel whose code depends on the family."""

    family: str = field(
        default=SM90,
        kw_only=True,
        metadata={"choices": lambda spec: (SM90,) if spec.dtype == E4M3 else spec.families, "suffix": ""},
    )
    families: ClassVar[tuple[str, ...]] = FAMILIES
    # whether one file has the kernels of all families
    one_file: ClassVar[bool] = False

    @property
    def symbol(self) -> str:
        portable = "" if self.family == SM90 else "portable_"
        return f"{self.op}_{portable}{self.dtypes[self.dtype]}{self.suffix}"

    @property
    def module(self) -> str:
        return super().module if self.one_file else f"{self.family}.{self.file}"


@dataclass(frozen=True)
class _HopperKernel(_FamilyKernel):
    """A kernel of sm_90a alone."""

    families = (SM90,)


# ---- the kernels ----


@dataclass(frozen=True)
class PackSpec(_Kernel):
    """``gate -> words, spill, stats``: a dense gate, packed, of any compression."""


@dataclass(frozen=True)
class TopKSpec(Spec):
    """``gate, k -> levels``: the k-th largest gate of each token, of at most 4,096 ``quads`` neurons of any dtype."""

    quads: int = choice(TOP_K_QUADS, {quads: f"_n{4096 * quads}" for quads in TOP_K_QUADS})


@dataclass(frozen=True)
class WindowSpec(_Kernel):
    """``gate, level, below, above -> near, counts``: gates near thresholds; those up to the level become zero."""


@dataclass(frozen=True)
class GatePackSpec(_HopperKernel):
    """``x, w_gate -> words, spill, stats``: the gate GEMM of sm_90a with packed output, of any compression.

    A tile has 256 neurons and ``tokens`` tokens, one of ``GATE_TOKENS``. ``fast``: whether the tensor cores hold the
    whole sum, of which they keep about 14 bits if the weights are e4m3.
    """

    dtypes = WEIGHTS
    tokens: int = choice(lambda spec: E4M3_GATE_TOKENS[True] if spec.dtype == E4M3 else GATE_TOKENS, "_t{}")
    fast: bool = choice(
        lambda spec: (True, False) if spec.dtype == E4M3 and spec.tokens in E4M3_GATE_TOKENS[False] else (True,),
        {False: "_slow"},
        default=True,
    )


@dataclass(frozen=True)
class DecodeSpec(_HopperKernel):
    """``x, weights -> y``: a whole layer of up to ``tokens`` tokens on sm_90a, or one of routed experts.

    kind: "plain", "gated" or "experts". cluster: the CTAs that have ``columns`` of K each.
    """

    dtypes = WEIGHTS
    kind: str = choice(
        lambda spec: tuple(kind for kind in DECODE_KINDS if decode_shapes(spec.dtype, kind)),
        {"gated": "_gated", "experts": "_experts"},
    )
    cluster: int = choice(lambda spec: spec.next_of_shapes(), "_c{}")
    columns: int = choice(lambda spec: spec.next_of_shapes(spec.cluster), "x{}")
    tokens: int = choice(lambda spec: spec.next_of_shapes(spec.cluster, spec.columns), "_m{}")

    def next_of_shapes(self, *given: int) -> tuple[int, ...]:
        """What follows the ``given`` numbers in the shapes of this kind."""
        shapes = decode_shapes(self.dtype, self.kind)
        return tuple(sorted({shape[len(given)] for shape in shapes if shape[: len(given)] == given}))

    @property
    def k_max(self) -> int:
        """The most columns that it takes."""
        return self.columns * self.cluster

    @property
    def module(self) -> str:
        return f"{super().module}{'_experts' if self.kind == 'experts' else ''}"


@dataclass(frozen=True)
class QuantizeGateSpec(_Kernel):
    """``rows -> q, scale, spread, offset``: int8 rows of x or w_gate of up to ``k_max`` columns, for the screen."""

    k_max: int = choice(QUANTIZE_K_CLASSES, "_k{}")


@dataclass(frozen=True)
class GateScreenSpec(_HopperKernel):
    """``int8 rows of x and w_gate -> candidates``: bits of the neurons that any of 128 tokens may fire.

    ``dtype`` is that of the bias.
    """


@dataclass(frozen=True)
class QuantizeTokensSpec(_Kernel):
    """``x -> q, scale``: rows of x in e4m3, each by its largest value, or all by one scale.

    ``source``: what is quantised, "tokens", or the hidden state of a dense layer, "gated" or "plain".
    """

    dtypes: ClassVar = {"bfloat16": DTYPES["bfloat16"]}
    source: str = choice(("tokens", "gated", "plain"), "_{}")


@dataclass(frozen=True)
class UpDownTokenSpec(_FamilyKernel):
    """``x, packed gate, w_up, w_down -> y, l1``; if not ``gated``: ``packed activations, w_down -> y, l1``.

    Token by token: a ``cluster`` of CTAs for each. For hidden sizes up to ``k_max``, one of ``token_k_classes``.
    """

    dtypes = WEIGHTS
    one_file = True
    k_max: int = choice(lambda spec: token_k_classes(spec.family, spec.dtype)[1], "_k{}")
    cluster: int = choice(
        lambda spec: tuple(c for c, ks in token_k_classes(spec.family, spec.dtype).items() if spec.k_max in ks), "_x{}"
    )
    gated: bool = flag(no="_plain")

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
    def ctas_per_sm(self) -> int:
        """CTAs that a multiprocessor holds."""
        if self.family != SM90:
            return 2 if self.vectors < 4 else 1
        return {1: 4 if self.dtype == E4M3 and self.cluster == 1 else 3, 2: 2, 4: 1, 8: 1}[self.vectors]


@dataclass(frozen=True)
class ExpertDownSpec(UpDownTokenSpec):
    """The same of the experts of each token."""

    dtypes, families = DTYPES, (SM90,)
    k_max: int = choice(EXPERT_K_CLASSES, "_k{}")
    cluster: int = choice((4,), "_x{}")


@dataclass(frozen=True)
class UnpackSpec(_Kernel):
    """``packed -> dense``."""


@dataclass(frozen=True)
class RegluSpec(_Kernel):
    """``gate, up -> relu(gate) * up`` of dense layers; ``backward``: ``dh, gate, up -> d_gate, d_up``."""

    backward: bool = flag(yes="_backward")


@dataclass(frozen=True)
class CompactSpec(_FamilyKernel):
    """``words, spill, stats -> entries, neurons, chunks, sizes``: TwELL to the hybrid format.

    For ``training`` entries are contiguous, the non-zeros of each neuron are counted, and of a batch that exceeds the
    capacity nothing is kept. Otherwise each token tile has room for all of its gates.
    """

    one_file = True
    training: bool = flag(yes="_training")


@dataclass(frozen=True)
class SampledUpSpec(_FamilyKernel):
    """``x, w_up, hybrid gate -> hidden, l1``: the up projection at the non-zeros.

    The hidden state replaces the gate in the entries. For ``training`` the hidden state and the up projection go to
    tensors of their own.
    """

    dtypes, e4m3_file = WEIGHTS, False
    training: bool = choice(lambda spec: (False,) if spec.dtype == E4M3 else (False, True), {True: "_training"})


@dataclass(frozen=True)
class ListCandidatesSpec(Spec):
    """``candidates -> neurons, sizes``: the lists of the neurons whose bits are set."""


@dataclass(frozen=True)
class SampledGateSpec(_HopperKernel):
    """``x, w_gate, listed neurons -> words, spill, stats``: the gate GEMM at the neurons of each token tile's list."""


@dataclass(frozen=True)
class SampledGradSpec(_FamilyKernel):
    """``dy, w_down, hybrid gate, up -> d_gate, d_up`` at the non-zeros."""

    one_file = True
    gated: bool = flag(no="_plain")


@dataclass(frozen=True)
class GatheredSpec(_FamilyKernel):
    """``coefficients at the non-zeros, weight rows -> [M, K]``: the sum of ``products`` sparse products.

    0 products: one, whose coefficients are the values in the entries.
    """

    dtypes = WEIGHTS
    products: int = choice(lambda spec: (0,) if spec.dtype == E4M3 else (0, 1, 2), "_{}")


@dataclass(frozen=True)
class ExpertPairsSpec(_Kernel):
    """``ids, x -> owners, pairs, rows, units, total``: pairs of a token and an expert, in the order of the experts."""


@dataclass(frozen=True)
class ExpertPackSpec(_HopperKernel):
    """``rows of x, w_up of experts, units -> words, spill``: the gate GEMM of experts by units of ``tokens`` pairs."""

    dtypes, e4m3_file = WEIGHTS, False
    tokens: int = choice(EXPERT_TOKENS, "_m{}")


@dataclass(frozen=True)
class ExpertUnionSpec(_Kernel):
    """``hidden states, units -> neurons, compact hidden states``: those that any pair of a unit fires."""


@dataclass(frozen=True)
class ExpertGatheredSpec(ExpertPackSpec):
    """``compact hidden states, neurons, w_down of experts, units -> z``: the down product of each pair."""

    e4m3_file = True


@dataclass(frozen=True)
class ExpertSumSpec(_Kernel):
    """``z, pairs, weights -> y``: the sum over the experts of each token; z is fp32, or of ``dtype`` if ``rounded``."""

    rounded: bool = flag(yes="_rounded")


@dataclass(frozen=True)
class RankSpec(Spec):
    """``popularity -> order, slot``: neurons sorted by popularity."""


@dataclass(frozen=True)
class ScatterSpec(Spec):
    """``values of the hybrid format's entries -> matrix``."""


@dataclass(frozen=True)
class MatrixTransposeSpec(Spec):
    """``matrix -> matrix^T`` of values of so many ``bits``, 16 or 8."""

    bits: int = choice((16, 8), {8: "_bytes"}, default=16)


@dataclass(frozen=True)
class TransposeSpec(_FamilyKernel):
    """``hybrid gate, gradients -> lists of tokens and packed coefficients`` by neuron tile."""

    one_file = True
    gated: bool = flag(no="_plain")


@dataclass(frozen=True)
class WeightGradSpec(_FamilyKernel):
    """``x, dy, packed coefficients by neuron tile -> weight gradients``."""

    gated: bool = flag(no="_plain")


@dataclass(frozen=True)
class OverflowSpec(_Kernel):
    """A pass over a batch whose non-zeros exceed the hybrid format's capacity, by dense products."""
