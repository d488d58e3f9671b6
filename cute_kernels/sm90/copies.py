"""Copies between registers, global, shared and distributed shared memory that are not tiled copies."""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr


def address(matrix: Any, row: Any, column: Any) -> Any:
    """Address of an element of a row-major matrix, from a 64-bit offset."""
    return matrix.iterator + (Int64(row) * matrix.stride[0] + column)


@cute.jit
def bulk_copy(target: Any, source: Any, size: Int32, barrier: Any) -> None:
    """Copy `size` bytes, a multiple of 16, from global to shared memory by one thread; completes on the mbarrier."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, size, barrier],
    )


@cute.jit
def load_values(source: Any, quad: Any = None) -> Any:
    """Load 16 bytes, eight 16-bit values, from an aligned address to four registers: `quad`, or new ones."""
    if const_expr(quad is None):
        quad = cute.make_rmem_tensor((4,), Uint32)
    line = cute.make_tensor(cute.recast_ptr(source.align(16), dtype=Uint32), cute.make_layout(4))
    cute.autovec_copy(line, quad)
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
    """Store four registers to 16 bytes at an aligned address, the inverse of `load_values`."""
    cute.autovec_copy(quad, cute.make_tensor(cute.recast_ptr(target.align(16), dtype=Uint32), cute.make_layout(4)))


@cute.jit
def load_quad(source: Any) -> Any:
    """Load four registers from sixteen bytes of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[source],
    )


@cute.jit
def load_pair(source: Any) -> Any:
    """Load two registers from eight bytes of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.b32 { {$w0}, {$w1} }, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[source]
    )


# Distributed shared memory: `source` and `target` are addresses in this CTA and name the same offset in CTA `rank`.


@cute.jit
def load_peer(source: Any, rank: Int32) -> Any:
    """Load four fp32 values, 16-byte aligned, from CTA `rank` of the cluster."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[cute.arch.map_dsmem_ptr(source, rank).toint()],
    )


@cute.jit
def load_peer_word(source: Any, rank: Int32) -> Uint32:
    """Load one word from CTA `rank` of the cluster."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.u32 {$w0}, [{$r0}];",
        write_only_types=[Uint32],
        read_only_args=[cute.arch.map_dsmem_ptr(source, rank).toint()],
    )


@cute.jit
def store_peer_half(target: Any, rank: Int32, value: Uint32) -> None:
    """Store the lower half of a word to CTA `rank` of the cluster."""
    cute.arch.inline_ptx(
        "st.shared::cluster.u16 [{$r0}], {$r1};",
        read_only_args=[cute.arch.map_dsmem_ptr(target, rank).toint(), Uint16(value & Uint32(0xFFFF))],
    )


@cute.jit
def store_peer(target: Any, rank: Int32, value: Int32) -> None:
    """Store one word to CTA `rank` of the cluster."""
    cute.arch.inline_ptx(
        "st.shared::cluster.u32 [{$r0}], {$r1};",
        read_only_args=[cute.arch.map_dsmem_ptr(target, rank).toint(), value],
    )


@cute.jit
def store_peer_pair(target: Any, rank: Int32, first: Uint32, second: Uint32) -> None:
    """Store two words, 8-byte aligned, to CTA `rank` of the cluster."""
    cute.arch.inline_ptx(
        "st.shared::cluster.v2.b32 [{$r0}], { {$r1}, {$r2} };",
        read_only_args=[cute.arch.map_dsmem_ptr(target, rank).toint(), first, second],
    )


@cute.jit
def store_peer_float(target: Any, rank: Int32, value: Float32) -> None:
    """Store one fp32 value to CTA `rank` of the cluster."""
    cute.arch.inline_ptx(
        "st.shared::cluster.f32 [{$r0}], {$r1};",
        read_only_args=[cute.arch.map_dsmem_ptr(target, rank).toint(), value],
    )


@cute.jit
def send_float(target: Any, barrier: Any, rank: Int32, value: Float32) -> None:
    """Store one fp32 value to CTA `rank` of the cluster, asynchronously; completes four bytes on its mbarrier."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[
            cute.arch.map_dsmem_ptr(target, rank).toint(),
            value,
            cute.arch.map_dsmem_ptr(barrier, rank).toint(),
        ],
    )


@cute.jit
def send_floats(target: Any, barrier: Any, rank: Int32, first: Float32, second: Float32) -> None:
    """Store two fp32 values, 8-byte aligned, as `send_float` stores one."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [{$r0}], { {$r1}, {$r2} }, [{$r3}];",
        read_only_args=[
            cute.arch.map_dsmem_ptr(target, rank).toint(),
            first,
            second,
            cute.arch.map_dsmem_ptr(barrier, rank).toint(),
        ],
    )


@cute.jit
def send_words(target: Any, barrier: Any, rank: Int32, first: Uint32, second: Uint32) -> None:
    """Store two words, 8-byte aligned, as `send_float` stores one value."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [{$r0}], { {$r1}, {$r2} }, [{$r3}];",
        read_only_args=[
            cute.arch.map_dsmem_ptr(target, rank).toint(),
            first,
            second,
            cute.arch.map_dsmem_ptr(barrier, rank).toint(),
        ],
    )
