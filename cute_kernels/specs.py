"""What distinguishes one compiled kernel from another: one frozen dataclass per kernel.

A spec holds everything that changes code and nothing else, so it is the cache key, the request to compile and,
through ``symbol``, the name of the exported function. ``spec_from_symbol`` is the way back. Pure Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .format import words_per_tile

DTYPES = {"bfloat16": "bf16", "float16": "fp16"}

# The hidden size a row kernel keeps in registers is fixed when it is compiled: the smallest class that holds K.
K_CLASSES = (512, 1024, 2048, 4096, 8192, 16384)


def k_class(k: int) -> int:
    """Smallest K class that holds a hidden size of ``k``; NotImplementedError beyond the largest."""
    for k_max in K_CLASSES:
        if k <= k_max:
            return k_max
    raise NotImplementedError(f"hidden size must be at most {K_CLASSES[-1]}, got {k}")


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {dtype!r}")


def _check_k_max(k_max: int) -> None:
    if k_max not in K_CLASSES:
        raise ValueError(f"k_max must be one of {K_CLASSES}, got {k_max}")


@dataclass(frozen=True)
class GatePackSpec:
    """``x, w_gate -> words, spill, stats``: the gate GEMM that packs its result."""

    dtype: str
    compression: int
    bias: bool
    op: ClassVar[str] = "gate_pack"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        words_per_tile(self.compression)

    @property
    def symbol(self) -> str:
        return f"{self.op}_{DTYPES[self.dtype]}_c{self.compression}{'_bias' if self.bias else ''}"


@dataclass(frozen=True)
class UpDownSpec:
    """``x, packed gate, w_up, w_down -> y, l1`` for any hidden size up to ``k_max``."""

    dtype: str
    k_max: int
    bias: bool
    op: ClassVar[str] = "up_down"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        _check_k_max(self.k_max)

    @property
    def symbol(self) -> str:
        return f"{self.op}_{DTYPES[self.dtype]}_k{self.k_max}{'_bias' if self.bias else ''}"


@dataclass(frozen=True)
class DownSpec:
    """``packed activations, w_down -> y, l1`` for any hidden size up to ``k_max``."""

    dtype: str
    k_max: int
    bias: bool
    op: ClassVar[str] = "down"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        _check_k_max(self.k_max)

    @property
    def symbol(self) -> str:
        return f"{self.op}_{DTYPES[self.dtype]}_k{self.k_max}{'_bias' if self.bias else ''}"


@dataclass(frozen=True)
class UnpackSpec:
    """``packed -> dense``."""

    dtype: str
    op: ClassVar[str] = "unpack"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)

    @property
    def symbol(self) -> str:
        return f"{self.op}_{DTYPES[self.dtype]}"


@dataclass(frozen=True)
class CompactSpec:
    """``words, spill, stats -> entries, neurons, chunks, sizes, popularity``: TwELL to the hybrid format."""

    dtype: str
    op: ClassVar[str] = "compact"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)

    @property
    def symbol(self) -> str:
        return f"{self.op}_{DTYPES[self.dtype]}"


@dataclass(frozen=True)
class SampledUpSpec:
    """``x, w_up, hybrid gate -> up, hidden, l1``: the up projection at the non-zeros."""

    dtype: str
    bias: bool
    op: ClassVar[str] = "sampled_up"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)

    @property
    def symbol(self) -> str:
        return f"{self.op}_{DTYPES[self.dtype]}{'_bias' if self.bias else ''}"


@dataclass(frozen=True)
class SampledGradSpec:
    """``dy, w_down, hybrid gate, up -> d_gate, d_up`` at the non-zeros."""

    dtype: str
    gated: bool
    op: ClassVar[str] = "sampled_grad"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)

    @property
    def symbol(self) -> str:
        return f"{self.op}_{DTYPES[self.dtype]}{'' if self.gated else '_plain'}"


@dataclass(frozen=True)
class GatheredSpec:
    """``coefficients at the non-zeros, weight rows -> [M, K]``: the sum of ``products`` sparse products.

    With 0 the coefficients are the gate values that the entries hold.
    """

    dtype: str
    products: int
    bias: bool
    op: ClassVar[str] = "gathered"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        if self.products not in (0, 1, 2):
            raise ValueError(f"products must be 0, 1 or 2, got {self.products}")

    @property
    def symbol(self) -> str:
        return f"{self.op}_{DTYPES[self.dtype]}_{self.products}{'_bias' if self.bias else ''}"


@dataclass(frozen=True)
class RankSpec:
    """``popularity -> order, slot``: neurons by popularity."""

    op: ClassVar[str] = "rank"

    @property
    def symbol(self) -> str:
        return self.op


@dataclass(frozen=True)
class TransposeSpec:
    """``hybrid gate, gradients -> lists of tokens and packed coefficients``, a tile of neurons at a time."""

    dtype: str
    gated: bool
    op: ClassVar[str] = "transpose"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)

    @property
    def symbol(self) -> str:
        return f"{self.op}_{DTYPES[self.dtype]}{'' if self.gated else '_plain'}"


@dataclass(frozen=True)
class WeightGradSpec:
    """``x, dy, packed coefficients by neuron tile -> weight gradients``, stored or added to fp32 buffers."""

    dtype: str
    gated: bool
    bias: bool
    accumulate: bool
    op: ClassVar[str] = "weight_grad"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)

    @property
    def symbol(self) -> str:
        flags = f"{'' if self.gated else '_plain'}{'_bias' if self.bias else ''}{'_add' if self.accumulate else ''}"
        return f"{self.op}_{DTYPES[self.dtype]}{flags}"


OVERFLOW_MODES = ("forward", "input", "weight", "weight_add")


@dataclass(frozen=True)
class OverflowSpec:
    """What the training kernels leave when the non-zeros exceed the hybrid format's capacity, from its bitmap."""

    dtype: str
    mode: str
    gated: bool
    bias: bool
    op: ClassVar[str] = "overflow"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        if self.mode not in OVERFLOW_MODES:
            raise ValueError(f"mode must be one of {OVERFLOW_MODES}, got {self.mode!r}")

    @property
    def symbol(self) -> str:
        flags = f"{'' if self.gated else '_plain'}{'_bias' if self.bias else ''}"
        return f"{self.op}_{self.mode}_{DTYPES[self.dtype]}{flags}"


Spec = (
    GatePackSpec
    | UpDownSpec
    | DownSpec
    | UnpackSpec
    | CompactSpec
    | SampledUpSpec
    | SampledGradSpec
    | GatheredSpec
    | RankSpec
    | TransposeSpec
    | WeightGradSpec
    | OverflowSpec
)


def all_specs() -> tuple[Spec, ...]:
    """Every spec that can be compiled; ``catalog.SHIPPED`` is the part that ships."""
    flags = (False, True)
    return (
        *(GatePackSpec(d, c, b) for d in DTYPES for c in (8, 4, 2) for b in flags),
        *(UpDownSpec(d, k, b) for d in DTYPES for k in K_CLASSES for b in flags),
        *(DownSpec(d, k, b) for d in DTYPES for k in K_CLASSES for b in flags),
        *(UnpackSpec(d) for d in DTYPES),
        *(CompactSpec(d) for d in DTYPES),
        *(SampledUpSpec(d, b) for d in DTYPES for b in flags),
        *(SampledGradSpec(d, g) for d in DTYPES for g in flags),
        *(GatheredSpec(d, p, b) for d in DTYPES for p, b in ((0, False), (0, True), (1, False), (1, True), (2, False))),
        RankSpec(),
        *(TransposeSpec(d, g) for d in DTYPES for g in flags),
        *(WeightGradSpec(d, g, b, a) for d in DTYPES for g in flags for b in flags for a in flags),
        *(OverflowSpec(d, m, g, b) for d in DTYPES for m in OVERFLOW_MODES for g in flags for b in flags),
    )


def spec_from_symbol(symbol: str) -> Spec:
    """The spec whose ``symbol`` this is; ValueError if there is none."""
    for spec in all_specs():
        if spec.symbol == symbol:
            return spec
    raise ValueError(f"no kernel is called {symbol!r}; `list --all` prints every name")
