"""Access to a token's packed non-zeros: the words of its tiles, and the spill of tiles that overflow.

Tile t of token m begins at words[m, t * width]: its count, then its non-zeros if fewer than `width`. The values
of a tile that overflows are at spill[m, neuron]. Kernels assign tiles to threads in different ways:

    up_down_token  all warps for one token, a lane per tile and every eighth word per warp. Positions come from prefix
                   sums over the lanes.
    compact        a warp for four tokens. If no tile overflows, a lane per tile of each of the four; otherwise one
                   token after another, 32 non-zeros at a time in ascending order, by `nth_word`.
    unpack         a warp per tile, a word per lane.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, range_constexpr

from .. import geometry
from .values import count_flags, lanes_before, nonzero_flags, value_bits

# most words of a tile
MAX_WIDTH = geometry.words_per_tile(min(geometry.COMPRESSIONS))


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


@cute.jit
def clear_arrivals(arrivals: Any, thread: Int32, threads: int) -> None:
    """Zero the counters by which CTAs of `up_down_token` that share a token find the last of them."""
    for i in cutlass.range(thread, arrivals.shape[0], threads, unroll=1):
        arrivals[i] = Int32(0)


@cute.jit
def pack_words(quad: Any, neuron: Uint32, words: Any, width: Int32, lane: Int32) -> Int32:
    """Pack a tile's 256 values, eight per lane from `neuron` on, into `words` in shared memory.

    All `MAX_WIDTH` words are written: the count in the first, non-zeros up to word `width` - 1, zeros. Returns the
    number of non-zeros: with `width` or more the tile overflows.
    """
    for i in range_constexpr(MAX_WIDTH // 32):
        words[lane + 32 * i] = Uint32(0)
    flags = nonzero_flags(quad)
    own = count_flags(flags)
    place = 1 + lanes_before(own)
    count = Int32(cute.arch.warp_redux_sync(own, "add"))
    # until all lanes have cleared their words
    cute.arch.sync_warp()
    for i in range_constexpr(8):
        if flags[i] & (place < width):
            words[place] = value_bits(quad, i) | (neuron + i)
        place += Int32(flags[i])
    if lane == 0:
        words[0] = Uint32(count)
    return count


@cute.jit
def store_words(target: Any, words: Any, width: Int32, lane: Int32) -> None:
    """Store the `width` words that `pack_words` has left in shared memory."""
    cute.arch.sync_warp()
    for i in range_constexpr(MAX_WIDTH // 32):
        if lane + 32 * i < width:
            cute.make_tensor(target, cute.make_layout(MAX_WIDTH))[lane + 32 * i] = Int32(words[lane + 32 * i])
    cute.arch.sync_warp()
