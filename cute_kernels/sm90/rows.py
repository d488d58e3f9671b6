"""Where a token's packed non-zeros lie: the words of its tiles, and the spill of tiles that hold more than fit.

What kernels share is how a tile is found and read. How they walk many of them differs, because they deal tiles to
threads as their own work asks:

    up_down         a warp per token, a lane per tile. Ranks come from a bitmap, so that any order will do.
    up_down_skinny  all warps for one token, eight lanes per tile; places come from prefix sums over the lanes.
    compact         a warp for four tokens. Intact tiles side by side, a lane per tile of each token; else one token
                    after the other, 32 non-zeros at a time and ascending, by `nth_word`.
    unpack          a warp per tile, a word per lane.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from .values import value_bits


def words_of(words: Any, m: Any, tile: Any, width: Any) -> Any:
    """Address of a tile's words: its count, then the non-zeros if these are fewer than `width`."""
    return words.iterator + (Int64(m) * words.stride[0] + tile * width)


def spill_of(spill: Any, m: Any, neuron: Any) -> Any:
    """Address of the value of `neuron` in a tile that overflows."""
    return spill.iterator + (Int64(m) * spill.stride[0] + neuron)


def spilled_word(values: Any, i: int, neuron: Any) -> Any:
    """Value `i` of eight from the spill as a word, where the first of them is of `neuron`."""
    return value_bits(values, i) | Uint32(neuron + i)


@cute.jit
def count_of(words: Any, m: Int32, tile: Int32, width: Int32, exists: Boolean) -> Int32:
    """Non-zeros of a tile, 0 unless it `exists`."""
    return words[m, tile * width] if exists else 0


@cute.jit
def nth_word(words: Any, m: Int32, group: Int32, width: Int32, before: Int32, ordinal: Int32, exists: Boolean) -> Any:
    """Non-zero `ordinal` of the 32 tiles from `group` on, 0 unless it `exists`. All lanes of the warp take part.

    `before` is the lane's own: the non-zeros of the tiles before tile `group` + lane.
    """
    tile = Int32(0)
    for step in (16, 8, 4, 2, 1):
        skipped = cute.arch.shuffle_sync(before, tile + step)
        tile = tile + step if skipped <= ordinal else tile
    place = ordinal - cute.arch.shuffle_sync(before, tile)
    return Uint32(words[m, (group + tile) * width + 1 + place]) if exists else Uint32(0)
