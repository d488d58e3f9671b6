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


Spec = GatePackSpec | UpDownSpec | DownSpec | UnpackSpec


def all_specs() -> tuple[Spec, ...]:
    """Every spec that can be compiled; ``catalog.SHIPPED`` is the part that ships."""
    flags = (False, True)
    return (
        *(GatePackSpec(d, c, b) for d in DTYPES for c in (8, 4, 2) for b in flags),
        *(UpDownSpec(d, k, b) for d in DTYPES for k in K_CLASSES for b in flags),
        *(DownSpec(d, k, b) for d in DTYPES for k in K_CLASSES for b in flags),
        *(UnpackSpec(d) for d in DTYPES),
    )


def spec_from_symbol(symbol: str) -> Spec:
    """The spec whose ``symbol`` this is; ValueError if there is none."""
    for spec in all_specs():
        if spec.symbol == symbol:
            return spec
    raise ValueError(f"no kernel is called {symbol!r}; `list --all` prints every name")
