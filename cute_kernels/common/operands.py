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


def rows(dtype: Any, m: Any, k: Any) -> Any:
    """A row-major matrix [m, k]: inner stride 1, 64-bit row stride in multiples of 8, 16-byte aligned base."""
    return make_fake_tensor(dtype, (m, k), stride=(cute.sym_int64(divisibility=8), 1), assumed_align=16)


def bytes_by_rows(dtype: Any, m: Any, k: Any) -> Any:
    """A row-major matrix [m, k] of bytes: 64-bit row stride in multiples of 16, 16-byte aligned base."""
    return make_fake_tensor(dtype, (m, k), stride=(cute.sym_int64(divisibility=16), 1), assumed_align=16)


def e4m3_rows(m: Any, k: Any) -> tuple[Any, Any]:
    """A row-major matrix [m, k] of e4m3 values as bytes, and the fp32 scales of its rows."""
    return bytes_by_rows(cutlass.Uint8, m, k), vector(cutlass.Float32, m)


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


def vector(dtype: Any, n: Any, align: int = 16) -> Any:
    """A contiguous vector [n]."""
    return make_fake_compact_tensor(dtype, (n,), assumed_align=align)


def bias(dtype: Any) -> Any:
    """A bias of any length; an empty one stands for none. The caller checks that the length fits."""
    return vector(dtype, cute.sym_int32())


def strided(dtype: Any, n: Any) -> Any:
    """A vector [n] of any stride."""
    return make_fake_tensor(dtype, (n,), stride=(cute.sym_int32(),), assumed_align=4)


def strided_matrix(dtype: Any, m: Any, n: Any) -> Any:
    """A matrix [m, n] of any strides."""
    align = dtype.width // 8
    return make_fake_tensor(dtype, (m, n), stride=(cute.sym_int32(), cute.sym_int32()), assumed_align=align)


def quads(n: Any) -> Any:
    """A contiguous int32 matrix [n, 4]."""
    return make_fake_compact_tensor(cutlass.Int32, (n, 4), stride_order=(1, 0), assumed_align=16)


def cube(dtype: Any, a: Any, b: Any, c: int) -> Any:
    """A contiguous tensor [a, b, c]."""
    return make_fake_compact_tensor(dtype, (a, b, c), stride_order=(2, 1, 0), assumed_align=16)


def slabs(dtype: Any, p: Any, m: Any, n: Any) -> Any:
    """Row-major matrices [m, n] behind each other, [p, m, n], with 64-bit strides in multiples of 8."""
    strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
    return make_fake_tensor(dtype, (p, m, n), stride=strides, assumed_align=16)


def byte_slabs(p: Any, m: Any, n: Any) -> Any:
    """The same of bytes, with strides in multiples of 16."""
    strides = (cute.sym_int64(divisibility=16), cute.sym_int64(divisibility=16), 1)
    return make_fake_tensor(cutlass.Uint8, (p, m, n), stride=strides, assumed_align=16)


def packed(dtype: Any, m: Any) -> tuple[Any, Any]:
    """Words [m, tiles * W] and spill [m, tiles * 256] of TwELL."""
    words = rows(cutlass.Int32, m, cute.sym_int32(divisibility=32))
    return words, rows(dtype, m, cute.sym_int32(divisibility=geometry.TILE))


def lists(b: Any) -> tuple[Any, Any, Any]:
    """Neurons [b, 64 C], chunks [b, C + 1] and sizes [b + 1] of the hybrid format."""
    return (
        matrix(cutlass.Int16, b, cute.sym_int32(divisibility=64)),
        matrix(cutlass.Int32, b, cute.sym_int32()),
        vector(cutlass.Int32, cute.sym_int32(), align=4),
    )


def matrix(dtype: Any, a: Any, b: Any) -> Any:
    """A contiguous matrix [a, b], aligned to 4 bytes."""
    return make_fake_compact_tensor(dtype, (a, b), stride_order=(1, 0), assumed_align=4)


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
        cube(cutlass.Int32, cute.sym_int32(), cute.sym_int32(), 2),
        vector(cutlass.Int32, cute.sym_int32(), align=4),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )
