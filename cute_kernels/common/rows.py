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

from .copies import store_values
from .values import join_bytes, lanes_before, lowest_bit, nonzero_bytes, value_bits


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
def store_tile(
    quad: Any, target: Any, spilled: Any, neuron: Int32, width: Int32, within: Boolean, lane: Int32
) -> Int32:
    """Store a tile of 256 values, eight per lane from `neuron` on, unless it is not `within` the problem.

    As words at `target`, and at `spilled` if they overflow: with `width` non-zeros or more. Returns their number. Words
    go straight to their place, behind the zeros that another lane of the same warp has stored there.
    """
    mask = join_bytes(*nonzero_bytes(quad))
    own = Int32(cute.arch.popc(mask))
    count = Int32(cute.arch.warp_redux_sync(own, "add"))
    place = 1 + lanes_before(own)
    if within:
        if 4 * lane < width:
            line = cute.make_rmem_tensor((4,), Uint32)
            for i in range_constexpr(4):
                line[i] = Uint32(0)
            line[0] = Uint32(count) if lane == 0 else Uint32(0)
            store_values(target + 4 * lane, line)
        # the zeros are stored: a word of another lane must not be overwritten by them
        cute.arch.sync_warp()
        while mask != 0:
            bit = lowest_bit(mask)
            mask = mask & (mask - 1)
            if place < width:
                word = nth_value(quad, bit) | Uint32(neuron + bit)
                cute.make_tensor(target + place, cute.make_layout(1))[0] = Int32(word)
            place += 1
        if count >= width:
            store_values(spilled, quad)
    return count


@cute.jit
def nth_value(quad: Any, i: Int32) -> Uint32:
    """Value `i` of eight in bits 16-31, without an array in local memory."""
    upper = i & 4 != 0
    first, second = (cutlass.select_(upper, quad[2 + j], quad[j]) for j in range(2))
    pair = Uint32(cutlass.select_(i & 2 != 0, second, first))
    return pair & Uint32(0xFFFF0000) if i & 1 != 0 else pair << 16
