"""Arithmetic on 16-bit values, two per 32-bit register, and sums and prefix sums over a warp."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint16, Uint32, const_expr

# bits of a 16-bit value without its sign: a value is a non-zero if any of them is set (so is NaN; -0 is not)
MAGNITUDE = 0x7FFF


def ptx_type(dtype: Any) -> str:
    """Name of a 16-bit type in PTX."""
    return "bf16" if dtype is cutlass.BFloat16 else "f16"


@cute.jit
def relu_pack(low: Float32, high: Float32, dtype: cutlass.Constexpr) -> Uint32:
    """Round two fp32 values to `dtype` with ReLU (NaN stays NaN): `low` in bits 0-15, `high` in bits 16-31."""
    return cute.arch.inline_ptx(
        f"cvt.rn.relu.{ptx_type(dtype)}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[high, low],
    )


@cute.jit
def pack(low: Float32, high: Float32, dtype: cutlass.Constexpr) -> Uint32:
    """Round two fp32 values to `dtype`: `low` in bits 0-15, `high` in bits 16-31."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{ptx_type(dtype)}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[high, low],
    )


@cute.jit
def relu_pair(pair: Uint32, dtype: cutlass.Constexpr) -> Uint32:
    """ReLU of both values: +0 for zeros of either sign, NaN stays NaN."""
    return cute.arch.inline_ptx(
        # max takes no immediate operand
        f"{{ .reg .b32 zero; mov.b32 zero, 0; max.NaN.{ptx_type(dtype)}x2 {{$w0}}, {{$r0}}, zero; }}",
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
def unpack_e4m3(word: Uint32) -> Any:
    """Four e4m3 values as two pairs of fp16, which hold all of them exactly: bytes 0 and 1, bytes 2 and 3."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 { low, high }, {$r0};"
        " cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[word],
    )


@cute.jit
def pairs_of_rows(word: Uint32, dtype: cutlass.Constexpr) -> Any:
    """Two e4m3 columns of two rows, by rows in a word, as a pair of rows for each column."""
    pairs, f16 = unpack_e4m3(Uint32(cute.arch.prmt(word, word, 0x3120))), cutlass.Float16
    return [pack(low_to_float(pair, f16), high_to_float(pair, f16), dtype) for pair in pairs]


@cute.jit
def split_value(value: Float32, dtype: cutlass.Constexpr) -> Uint32:
    """Split one fp32 value into two of `dtype`: rounded in bits 0-15, its rounding error in bits 16-31.

    The error of a result that is infinite is 0.
    """
    rounded = low_to_float(pack(value, Float32(0.0), dtype), dtype)
    error = value - rounded if cute.arch.fmax(rounded, -rounded) != Float32.inf else Float32(0.0)
    return pack(rounded, error, dtype)


@cute.jit
def join_halves(first: Uint32, second: Uint32, high: cutlass.Constexpr) -> Uint32:
    """The low halves of two registers side by side, or their `high` halves."""
    return Uint32(cute.arch.prmt(first, second, 0x7632 if const_expr(high) else 0x5410))


@cute.jit
def nonzero_flags(quad: Any) -> Any:
    """Eight booleans for eight values in four registers: whether each is a non-zero."""
    flags = []
    for i in cutlass.range_constexpr(4):
        flags.append((quad[i] & Uint32(MAGNITUDE)) != 0)
        flags.append((quad[i] & Uint32(MAGNITUDE << 16)) != 0)
    return flags


@cute.jit
def nonzero_bytes(quad: Any) -> Any:
    """Eight bytes, 1 or 0, in two registers: whether each of eight values without signs is a non-zero."""
    flags = []
    for i in cutlass.range_constexpr(2):
        # carries into bits 15 and 31
        carried = [quad[2 * i + j] + Uint32(0x7FFF7FFF) for j in range(2)]
        flags.append((Uint32(cute.arch.prmt(*carried, 0x7531)) >> 7) & Uint32(0x01010101))
    return flags


@cute.jit
def join_bytes(low: Uint32, high: Uint32) -> Uint32:
    """The low bits of eight bytes as one byte."""
    # moves the bits of the four bytes next to each other
    return (low * Uint32(0x01020408)) >> 24 | ((high * Uint32(0x01020408)) >> 20) & Uint32(0xF0)


@cute.jit
def bytes_before(counts: Uint32, lane: Int32) -> Uint32:
    """Exclusive prefix sums over the warp of four bytes, each of which must stay below 256."""
    total = Uint32(cute.arch.shuffle_sync_up(counts, 1, mask_and_clamp=0))
    total = total if lane >= 1 else Uint32(0)
    for d in cutlass.range_constexpr(5):
        other = Uint32(cute.arch.shuffle_sync_up(total, 1 << d, mask_and_clamp=0))
        total = total + other if lane >= (1 << d) else total
    return total


@cute.jit
def count_flags(flags: Any) -> Int32:
    """Number of true ones among eight booleans."""
    count = Int32(0)
    for i in cutlass.range_constexpr(8):
        count += Int32(flags[i])
    return count


@cute.jit
def value_bits(quad: Any, i: cutlass.Constexpr) -> Uint32:
    """Value `i` of eight in four registers, in bits 16-31 as in a word of TwELL; bits 0-15 are zero."""
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
def warp_sum(value: Float32) -> Float32:
    """Sum over the warp, in every lane."""
    for d in cutlass.range_constexpr(5):
        value += cute.arch.shuffle_sync_bfly(value, 1 << d)
    return value


@cute.jit
def lowest_bit(mask: Uint32) -> Int32:
    """Index of the lowest set bit; -1 for an empty mask."""
    return 31 - Int32(cute.arch.clz(mask & (Uint32(0) - mask)))


@cute.jit
def widen(value: Uint16) -> Int32:
    """Zero-extend a 16-bit count or index. `Int32(value)` extends the sign even of an unsigned type."""
    return Int32(value.to(Uint32) & Uint32(0xFFFF))


@cute.jit
def byte_sum(word: Uint32) -> Int32:
    """Sum of the four bytes of a register."""
    return cute.arch.inline_ptx(
        "dp4a.u32.u32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Int32],
        read_only_args=[word, Uint32(0x01010101), Int32(0)],
    )


@cute.jit
def transpose_quad(words: Any, lane: Int32) -> Any:
    """Transpose four registers of four neighbouring lanes: register j of lane i becomes register i of lane j."""
    a, b, c, d = words
    odd, upper = lane & 1 != 0, lane & 2 != 0
    one, two = cute.arch.shuffle_sync_bfly(a if odd else b, 1), cute.arch.shuffle_sync_bfly(c if odd else d, 1)
    a, b = one if odd else a, b if odd else one
    c, d = two if odd else c, d if odd else two
    one, two = cute.arch.shuffle_sync_bfly(a if upper else c, 2), cute.arch.shuffle_sync_bfly(b if upper else d, 2)
    a, c = one if upper else a, c if upper else one
    b, d = two if upper else b, d if upper else two
    return a, b, c, d
