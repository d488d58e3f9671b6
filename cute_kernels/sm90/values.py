"""Arithmetic on 16-bit values, two in a 32-bit register, and counts and prefix sums over a warp."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint16, Uint32, const_expr

# a 16-bit value without its sign: it is a non-zero exactly if one of these bits is set (NaN included, -0 not)
MAGNITUDE = 0x7FFF


@cute.jit
def relu_pack(low: Float32, high: Float32, dtype: cutlass.Constexpr) -> Uint32:
    """Round two fp32 values to `dtype` with ReLU (NaN stays NaN): `low` in bits 0-15, `high` in bits 16-31."""
    kind = "bf16x2" if const_expr(dtype is cutlass.BFloat16) else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.relu.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[high, low],
    )


@cute.jit
def pack(low: Float32, high: Float32, dtype: cutlass.Constexpr) -> Uint32:
    """Round two fp32 values to `dtype`: `low` in bits 0-15, `high` in bits 16-31."""
    kind = "bf16x2" if const_expr(dtype is cutlass.BFloat16) else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[high, low]
    )


@cute.jit
def relu_pair(pair: Uint32, dtype: cutlass.Constexpr) -> Uint32:
    """ReLU of both values: +0 for zeros of either sign, NaN stays NaN."""
    kind = "bf16x2" if const_expr(dtype is cutlass.BFloat16) else "f16x2"
    return cute.arch.inline_ptx(
        # a constant operand must be in a register
        f"{{ .reg .b32 zero; mov.b32 zero, 0; max.NaN.{kind} {{$w0}}, {{$r0}}, zero; }}",
        write_only_types=[Uint32],
        read_only_args=[pair],
    )


@cute.jit
def low_to_float(pair: Uint32, dtype: cutlass.Constexpr) -> Float32:
    """The value in bits 0-15 as fp32."""
    if const_expr(dtype is cutlass.BFloat16):
        return (pair << 16).bitcast(Float32)
    return Uint16(pair & Uint32(0xFFFF)).bitcast(cutlass.Float16).to(Float32)


@cute.jit
def high_to_float(pair: Uint32, dtype: cutlass.Constexpr) -> Float32:
    """The value in bits 16-31 as fp32."""
    if const_expr(dtype is cutlass.BFloat16):
        return (pair & Uint32(0xFFFF0000)).bitcast(Float32)
    return Uint16(pair >> 16).bitcast(cutlass.Float16).to(Float32)


@cute.jit
def split(low: Float32, high: Float32, dtype: cutlass.Constexpr) -> Any:
    """Two fp32 values rounded to `dtype`, side by side as `pack` has them, and what rounding left of each.

    An infinite value leaves nothing.
    """
    pair = pack(low, high, dtype)
    rests = []
    for value, rounded in ((low, low_to_float(pair, dtype)), (high, high_to_float(pair, dtype))):
        rests.append(value - rounded if cute.arch.fmax(rounded, -rounded) != Float32.inf else Float32(0.0))
    return pair, *rests


@cute.jit
def split_one(value: Float32, dtype: cutlass.Constexpr) -> Uint32:
    """One fp32 value as two of `dtype`: rounded in bits 0-15, and what that left in bits 16-31."""
    pair, rest, _ = split(value, Float32(0.0), dtype)
    return pack(low_to_float(pair, dtype), rest, dtype)


@cute.jit
def nonzero_flags(quad: Any) -> Any:
    """Eight booleans for eight values in four registers: is the value a non-zero?"""
    flags = []
    for i in cutlass.range_constexpr(4):
        flags.append((quad[i] & Uint32(MAGNITUDE)) != 0)
        flags.append((quad[i] & Uint32(MAGNITUDE << 16)) != 0)
    return flags


@cute.jit
def count_flags(flags: Any) -> Int32:
    """How many of eight booleans are true."""
    count = Int32(0)
    for i in cutlass.range_constexpr(8):
        count += Int32(flags[i])
    return count


@cute.jit
def value_bits(quad: Any, i: cutlass.Constexpr) -> Uint32:
    """Value `i` of eight in four registers, in bits 16-31 as in a word of TwELL; bits 0-15 are clear."""
    return quad[i // 2] & Uint32(0xFFFF0000) if const_expr(i % 2) else quad[i // 2] << 16


@cute.jit
def lanes_before(count: Int32) -> Int32:
    """Exclusive prefix sum over the warp of a count from 0 to 15: four ballots instead of a five-step shuffle chain."""
    below = cute.arch.lanemask_lt()
    total = Int32(0)
    for bit in cutlass.range_constexpr(4):
        plane = cute.arch.vote_ballot_sync(Boolean((count >> bit) & 1))
        total += Int32(cute.arch.popc(Uint32(plane) & below)) << bit
    return total


@cute.jit
def prefix_sum(value: Int32, lane: Int32) -> Int32:
    """Exclusive prefix sum over the warp."""
    inclusive = value
    for d in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(inclusive, 1 << d, mask_and_clamp=0)
        inclusive = inclusive + other if lane >= (1 << d) else inclusive
    return inclusive - value


@cute.jit
def lowest_bit(mask: Uint32) -> Int32:
    """Index of the lowest set bit; -1 for an empty mask."""
    return 31 - Int32(cute.arch.clz(mask & (Uint32(0) - mask)))


@cute.jit
def widen(value: Uint16) -> Int32:
    """A 16-bit count or index from 0 to 65,535. `Int32(value)` would extend its sign, unsigned type or not."""
    return Int32(value.to(Uint32) & Uint32(0xFFFF))


@cute.jit
def byte_sum(word: Uint32) -> Int32:
    """Sum of the four bytes of a register."""
    return cute.arch.inline_ptx(
        "dp4a.u32.u32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Int32],
        read_only_args=[word, Uint32(0x01010101), Int32(0)],
    )
