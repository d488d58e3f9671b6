"""Access to a token's packed non-zeros: the words of its tiles, and the spill of tiles that overflow.

Tile t of token m begins at words[m, t * width]: its count, then its non-zeros if fewer than `width`. The values
of a tile that overflows are at spill[m, neuron]. Kernels assign tiles to threads in different ways:

    up_down        a warp per token, a lane per tile. Ranks come from a bitmap, so any order works.
    up_down_token  all warps for one token, a lane per tile and every eighth word per warp. Positions come from prefix
                   sums over the lanes.
    compact        a warp for four tokens. If no tile overflows, a lane per tile of each of the four; otherwise one
                   token after another, 32 non-zeros at a time in ascending order, by `nth_word`.
    unpack         a warp per tile, a word per lane.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from .values import value_bits


def spilled_word(values: Any, i: int, neuron: Any) -> Any:
    """Value `i` of the spill's eight from `neuron` on, as a word."""
    return value_bits(values, i) | Uint32(neuron + i)


@cute.jit
def count_of(words: Any, m: Int32, tile: Int32, width: Int32, exists: Boolean) -> Int32:
    """Number of non-zeros of a tile; 0 unless it `exists`."""
    return words[m, tile * width] if exists else 0


@cute.jit
def nth_word(words: Any, m: Int32, group: Int32, width: Int32, before: Int32, ordinal: Int32, exists: Boolean) -> Any:
    """Word of non-zero `ordinal` of the 32 tiles from `group` on; 0 unless it `exists`. All lanes must take part.

    `before`: the number of non-zeros in the tiles before tile `group` + lane.
    """
    tile = Int32(0)
    for step in (16, 8, 4, 2, 1):
        skipped = cute.arch.shuffle_sync(before, tile + step)
        tile = tile + step if skipped <= ordinal else tile
    place = ordinal - cute.arch.shuffle_sync(before, tile)
    return Uint32(words[m, (group + tile) * width + 1 + place]) if exists else Uint32(0)
