"""Philox4x32-10 with the fixed key of `screen.py`: the random words of the int8 screen, as `screen.philox` has them."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Uint32, range_constexpr

from .. import screen


@cute.jit
def multiply_high(a: Uint32, b: cutlass.Constexpr) -> Uint32:
    """Upper half of a product."""
    return cute.arch.inline_ptx(
        "mul.hi.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, Uint32(b)]
    )


@cute.jit
def philox(block: Uint32, stream: cutlass.Constexpr) -> Any:
    """Four words of a stream."""
    c0, c1, c2, c3 = block, Uint32(stream), Uint32(0), Uint32(0)
    for i in range_constexpr(screen.ROUNDS):
        k0, k1 = ((key + i * step) & 0xFFFFFFFF for key, step in zip(screen.KEY, screen.INCREMENTS))
        high0, low0 = multiply_high(c0, screen.MULTIPLIERS[0]), c0 * Uint32(screen.MULTIPLIERS[0])
        high1, low1 = multiply_high(c2, screen.MULTIPLIERS[1]), c2 * Uint32(screen.MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ Uint32(k0), low1, high0 ^ c3 ^ Uint32(k1), low0
    return c0, c1, c2, c3


@cute.jit
def pick(words: Any, index: Uint32) -> Uint32:
    """One of four words."""
    low = words[1] if index & 1 != 0 else words[0]
    high = words[3] if index & 1 != 0 else words[2]
    return high if index & 2 != 0 else low
