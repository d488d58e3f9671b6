"""Copies between registers, global and shared memory that are not tiled copies."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr

from .values import transpose_quad


def address(matrix: Any, row: Any, column: Any) -> Any:
    """Address of an element of a row-major matrix, from a 64-bit offset."""
    return matrix.iterator + (Int64(row) * matrix.stride[0] + column)


def aligned(pointer: Any, count: int) -> Any:
    """`count` elements from an address on, which is aligned to all of them, or to 16 bytes."""
    return cute.make_tensor(pointer.align(min(16, count * pointer.value_type.width // 8)), cute.make_layout(count))


@cute.jit
def load_values(source: Any, quad: Any = None) -> Any:
    """Load 16 bytes, eight 16-bit values, from an aligned address to four registers: `quad`, or new ones."""
    if const_expr(quad is None):
        quad = cute.make_rmem_tensor((4,), Uint32)
    cute.autovec_copy(aligned(cute.recast_ptr(source.align(16), dtype=Uint32), 4), quad)
    return quad


@cute.jit
def load_values_if(source: Any, quad: Any, exists: Boolean) -> None:
    """Load 16 bytes from an aligned address to four registers, or zeros unless they `exist`, without a branch."""
    loaded = cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0;"
        " mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0;"
        " @p ld.global.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}]; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[source, Int32(exists)],
    )
    for i in range_constexpr(4):
        quad[i] = loaded[i]


@cute.jit
def store_values(target: Any, quad: Any) -> None:
    """Store two or four registers to as many words at an aligned address, the inverse of `load_values`."""
    words = cute.size(quad)
    cute.autovec_copy(quad, aligned(cute.recast_ptr(target.align(4 * words), dtype=Uint32), words))


@cute.jit
def store_pairs(pairs: Any, row: Any, left: Int32, lane: Int32) -> None:
    """Store a row of pairs that a warp has by fragments, a multiple of four, at `row`, which has `left` columns.

    Lane 4 g + q has columns 8 v + 2 q and 8 v + 2 q + 1 of row g in `pairs[v]`. After a transpose it has all eight
    columns of v = 4 u + q, which are 16 bytes.
    """
    quad = cute.make_rmem_tensor((4,), Uint32)
    for u in range_constexpr(len(pairs) // 4):
        words = transpose_quad(pairs[4 * u : 4 * u + 4], lane)
        column = 32 * u + 8 * (lane & 3)
        if column < left:
            for v in range_constexpr(4):
                quad[v] = words[v]
            store_values(row + column, quad)


@cute.jit
def load_pairs(row: Any, count: cutlass.Constexpr, left: Int32, lane: Int32) -> Any:
    """Load `count` pairs of a row as `store_pairs` stores them; zeros beyond its `left` columns."""
    pairs, quad = [], cute.make_rmem_tensor((4,), Uint32)
    for u in range_constexpr(count // 4):
        column = 32 * u + 8 * (lane & 3)
        load_values_if(row + column, quad, column < left)
        pairs += transpose_quad([quad[v] for v in range(4)], lane)
    return pairs


@cute.jit
def load_quad(source: Any) -> Any:
    """Load four registers from sixteen bytes of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[source],
    )


@cute.jit
def store_half(target: Any, bits: Uint32, valid: Boolean) -> None:
    """Store the low 16 bits to shared memory if `valid`, without a branch."""
    cute.arch.inline_ptx(
        "st.shared.b16 [{$r0}], {$r1};", read_only_args=[target, Uint16(bits & Uint32(0xFFFF))], predicate=valid
    )


@cute.jit
def copy_async(target: Any, source: Any, size: Int32) -> None:
    """Copy 16 bytes from global to shared memory, bypassing L1; only `size` are read, the rest is zero."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, size]
    )
