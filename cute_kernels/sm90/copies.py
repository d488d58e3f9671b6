"""Copies between global, shared and distributed shared memory that are no tiled copies."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr


@cute.jit
def bulk_copy(target: Any, source: Any, size: Int32, barrier: Any) -> None:
    """`size` bytes, a multiple of 16, from global to shared memory by one thread; they complete on the mbarrier."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, size, barrier],
    )


@cute.jit
def load_peer(source: Any, rank: Int32) -> Any:
    """Four fp32 values from the same place, 16-byte aligned, in the shared memory of CTA `rank` of the cluster."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[cute.arch.map_dsmem_ptr(source, rank).toint()],
    )


@cute.jit
def load_values(source: Any, quad: Any = None) -> Any:
    """16 bytes, four words or eight 16-bit values, from an aligned address to four registers: `quad`, or new ones."""
    if const_expr(quad is None):
        quad = cute.make_rmem_tensor((4,), Uint32)
    line = cute.make_tensor(cute.recast_ptr(source.align(16), dtype=Uint32), cute.make_layout(4))
    cute.autovec_copy(line, quad)
    return quad


@cute.jit
def store_values(target: Any, quad: Any) -> None:
    """Four registers to 16 bytes at an aligned address: the way back of `load_values`."""
    cute.autovec_copy(quad, cute.make_tensor(cute.recast_ptr(target.align(16), dtype=Uint32), cute.make_layout(4)))


@cute.jit
def load_peer_value(source: Any, rank: Int32) -> Float32:
    """One fp32 value from the same place in the shared memory of CTA `rank` of the cluster."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.f32 {$w0}, [{$r0}];",
        write_only_types=[Float32],
        read_only_args=[cute.arch.map_dsmem_ptr(source, rank).toint()],
    )


@cute.jit
def store_peer(target: Any, rank: Int32, value: Int32) -> None:
    """One word to the same place in the shared memory of CTA `rank` of the cluster."""
    cute.arch.inline_ptx(
        "st.shared::cluster.u32 [{$r0}], {$r1};",
        read_only_args=[cute.arch.map_dsmem_ptr(target, rank).toint(), value],
    )
