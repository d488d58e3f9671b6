"""Fake tensors: shapes, strides and alignment that the generated wrapper checks at every call."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from .. import geometry
from ..specs import E4M3

# 16-bit values of layers whose weights have such a dtype
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, E4M3: cutlass.BFloat16}


class Scales(NamedTuple):
    """Scales of e4m3 rows, in global memory."""

    x: Any  # fp32 [M]
    w: Any  # fp32 [N], or of experts [E, N]


def rows(dtype: Any, *shape: Any, multiple: int = 8) -> Any:
    """Row-major matrices [..., m, k]: inner stride 1, other strides 64-bit in multiples of 8, 16-byte aligned base."""
    strides = (*(cute.sym_int64(divisibility=multiple) for _ in shape[1:]), 1)
    return make_fake_tensor(dtype, shape, stride=strides, assumed_align=16)


def byte_rows(dtype: Any, *shape: Any) -> Any:
    """The same of bytes, with strides in multiples of 16."""
    return rows(dtype, *shape, multiple=16)


def e4m3_rows(m: Any, k: Any) -> tuple[Any, Any]:
    """A row-major matrix [m, k] of e4m3 values as bytes, and the fp32 scales of its rows."""
    return byte_rows(cutlass.Uint8, m, k), dense(cutlass.Float32, m)


def scaled_rows(name: str, m: Any, k: Any) -> tuple[Any, ...]:
    """A row-major matrix [m, k] of a dtype of weights, and the scales of its rows if that is e4m3."""
    return e4m3_rows(m, k) if name == E4M3 else (rows(DTYPES[name], m, k),)


def e4m3(matrix: Any) -> Any:
    """A matrix of bytes as one of e4m3 values."""
    return cute.make_tensor(cute.recast_ptr(matrix.iterator, dtype=cutlass.Float8E4M3FN), matrix.layout)


def factors(arguments: Any) -> tuple[Any, ...]:
    """x and w of a product, its other operands, and `Scales`, which follow each if it is e4m3; else None."""
    x, w, *others = arguments
    if x.element_type is not cutlass.Uint8:
        return x, w, others, None
    x, x_scale, w, w_scale, *others = arguments
    return e4m3(x), e4m3(w), others, Scales(x_scale, w_scale)


def dense(dtype: Any, *shape: Any, align: int = 16) -> Any:
    """A contiguous tensor."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def bias(dtype: Any) -> Any:
    """A bias of any length; an empty one stands for none. The caller checks that the length fits."""
    return dense(dtype, cute.sym_int32())


def strided(dtype: Any, *shape: Any) -> Any:
    """A tensor of 32-bit values and any strides."""
    return make_fake_tensor(dtype, shape, stride=tuple(cute.sym_int32() for _ in shape), assumed_align=4)


def packed(dtype: Any, m: Any) -> tuple[Any, Any]:
    """Words [m, tiles * W] and spill [m, tiles * 256] of TwELL."""
    words = rows(cutlass.Int32, m, cute.sym_int32(divisibility=32))
    return words, rows(dtype, m, cute.sym_int32(divisibility=geometry.TILE))


def lists(b: Any) -> tuple[Any, Any, Any]:
    """Neurons [b, 64 C], chunks [b, C + 1] and sizes [b + 1] of the hybrid format."""
    return (
        dense(cutlass.Int16, b, cute.sym_int32(divisibility=64), align=4),
        dense(cutlass.Int32, b, cute.sym_int32(), align=4),
        dense(cutlass.Int32, cute.sym_int32(), align=4),
    )


def gate_pack(name: str) -> tuple[Any, ...]:
    """Operands of a gate GEMM: x, w, bias, words, spill and stats, arrivals, words per tile and threshold.

    Scales of rows follow x and w if these are e4m3.
    """
    dtype, m, n = DTYPES[name], cute.sym_int32(), cute.sym_int32(divisibility=8)
    k = cute.sym_int32(divisibility=16 if name == E4M3 else 8)
    return (
        *scaled_rows(name, m, k),
        *scaled_rows(name, n, k),
        bias(dtype),
        *packed(dtype, m),
        dense(cutlass.Int32, cute.sym_int32(), cute.sym_int32(), 2),
        dense(cutlass.Int32, cute.sym_int32(), align=4),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )
