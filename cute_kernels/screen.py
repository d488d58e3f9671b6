"""Constants of the int8 screen of the gate, see docs/notes/screen.md, and its random numbers. Pure Python.

A row is rotated, scaled to ``LEVELS`` and rounded with a dither of 15 bits, which the product is corrected for. Signs
and dithers are words of Philox4x32-10 (Salmon et al., SC 2011) with a fixed key. The counter is (index of four words,
stream, 0, 0).
"""

import math
from typing import Any

# Largest magnitude before rounding: with a dither in [0, 1) no result exceeds 127.
LEVELS = 126.5

# The dither is a number of this many bits plus 1/2, divided by 2^FRACTION. Without its mean of 1/2 it is an odd
# number of 16 bits by 2^(FRACTION + 1).
FRACTION = 15

# Most columns that are rotated together: a warp has them in registers.
ROTATED = 2048

# Where the dither is in the word of a column: x has the lower half, w the upper one.
X_SHIFT, W_SHIFT = 0, 16

# Streams of words: one per column, and one per line of the rotation, see ``sign_bits``.
DITHERS, SIGNS = 0, 1

KEY = (0x5EED7E11, 0x0DD17E12)
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

# Probability 2^-FAILURE, at most, that the screen misses a given gate.
FAILURE = 80

# Rows are screened if their largest rotated magnitude is in this range. Of a row outside, all gates are candidates,
# unless the row is zero. What underflows in a product of rows in it is nothing.
SMALLEST, LARGEST = 2.0**-43, 2.0**54

# Relative error of a rotated and scaled row in norm: sums of 16 and 32 terms on tensor cores, two bf16 values for one
# of fp32, three levels of fp32 additions, and four roundings of the scale; and the part by which a spread is enlarged,
# which covers twice it and the fp32 sum of squares.
ROTATION = 11 * 2.0**-18
SPREAD = 6 * 2.0**-16

# spread^2 / K of a row whose rotated values are normal: its largest of thousands is near four standard deviations.
USUAL_SPREAD = 1024

# Part by which fp32 bounds are enlarged for their own roundings, and part of a bias.
MARGIN, BIAS_MARGIN = 2.0**-16, 2.0**-19

# Part of the bound for underflow, 1, and for fp32 roundings of the corrections for dithers, less than 3.
SLACK = 4.0

# What stands for a bias of a zero row of w, whose gate is the bias alone: decides against any product.
DECISIVE = 2.0**100

# Of a zero row of x, whose gates are the biases alone: more than any correction, and what lifts a bias of 1 / DECISIVE
# above it.
ABOVE_CORRECTIONS, LIFT = 2.0**21, 2.0**123


def rotation_block(k: int) -> int:
    """Columns that are rotated together: the largest power of two that divides ``k``, up to ``ROTATED``."""
    return min(k & -k, ROTATED)


def levels(k: int) -> range:
    """Bits of the column in which the values differ that the rotation adds and subtracts."""
    return range(rotation_block(k).bit_length() - 1)


def sign_bits(column: Any) -> tuple[Any, Any, Any]:
    """A column's word of ``SIGNS``, and two bits of it: the column's sign changes if they differ."""
    return column >> 11 << 5 | column >> 3 & 31, column & 7, 8 + (column >> 8 & 7)


def centred(word: Any, shift: int) -> Any:
    """The dither in a column's word at a place, without its mean of 1/2, in units of 2^-(FRACTION + 1)."""
    return 2 * (word >> shift & 2**FRACTION - 1) + 1 - 2**FRACTION


def dither_product(k: int) -> float:
    """The sum of products of the centred dithers of x and w over ``k`` columns, which is exact."""
    total = sum(centred(word, X_SHIFT) * centred(word, W_SHIFT) for word in words(k, DITHERS))
    return float(total) * 4.0 ** -(FRACTION + 1)


def dither_tail(failure: float = FAILURE) -> float:
    """c such that exp(-6 c^2) = 2^-failure, rounded up."""
    return math.sqrt(failure * math.log(2) / 6) * (1 + 2.0**-50)


def product_error(k: int) -> float:
    """Error of a product of ``k`` terms on tensor cores, as a part of |x| |w|: one fp32 truncation per term."""
    return k * 2.0**-23 * (1 + 2.0**-8)


def grid_error(k: int) -> float:
    """Norm of the difference of ``k`` values and the means of their results, each of at most 2^-FRACTION."""
    return math.sqrt(k) * 2.0**-FRACTION


def philox(block: int, stream: int) -> tuple[int, int, int, int]:
    """Four 32-bit words of Philox4x32-10."""
    counter, key = (block, stream, 0, 0), KEY
    for _ in range(ROUNDS):
        products = MULTIPLIERS[0] * counter[0], MULTIPLIERS[1] * counter[2]
        high, low = (p >> 32 for p in products), (p & 0xFFFFFFFF for p in products)
        (high0, high1), (low0, low1) = high, low
        counter = (high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0)
        key = ((key[0] + INCREMENTS[0]) & 0xFFFFFFFF, (key[1] + INCREMENTS[1]) & 0xFFFFFFFF)
    return counter


def words(count: int, stream: int) -> list[int]:
    """The first ``count`` words of a stream."""
    return [word for block in range(-(-count // 4)) for word in philox(block, stream)][:count]
