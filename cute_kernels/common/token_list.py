"""The list of a token's non-zeros in shared memory, from the words of its gate: what a cluster of up_down_token.py does
first. All warps list; each has every eighth word of 32 tiles, or, of tokens with many non-zeros, whole tiles.

Where a token's tiles lie is asked of `locate`: those of a layer in its row of words, those of experts in several.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, range_constexpr

from .. import geometry
from ..specs import TOKEN_WARPS
from .copies import address, load_values
from .rows import count_of, spilled_word
from .values import count_flags, lowest_bit, nonzero_flags, prefix_sum

WARPS = TOKEN_WARPS
# tiles that are listed at a time, one per lane
TILES = 32


class TokenList:
    """Lists up to `window` non-zeros. `o` has words, spill and width; `s` has nonzeros [window]."""

    window: int

    def tiles_of(self, o: Any) -> Any:
        """The tiles of a token."""
        return o.words.shape[1] // o.width

    def locate(self, o: Any, m: Int32, tile: Int32, tiles: Int32) -> Any:
        """The row of words with tile `tile` of token `m`, its place there, whether it exists, and whose expert's it is.

        A token has `tiles`.
        """
        return m, tile, tile < tiles, Int32(0)

    def note(self, s: Any, at: Int32, word: Uint32, expert: Int32) -> None:
        s.nonzeros[at] = word

    @cute.jit
    def count_of(self, o: Any, m: Int32, tile: Int32, tiles: Int32):
        """The number of non-zeros in a tile, which there is."""
        return o.words[m, tile * o.width]

    @cute.jit
    def count_nonzeros(self, o: Any, m: Int32, lane: Int32):
        """The number of the token's non-zeros; every warp computes the same."""
        count, tiles = Int32(0), self.tiles_of(o)
        for tile in cutlass.range(lane, tiles, 32, unroll=4):
            count += self.count_of(o, m, tile, tiles)
        return Int32(cute.arch.warp_redux_sync(count, "add"))

    @cute.jit
    def list_nonzeros(self, o: Any, s: Any, m: Int32, base: Int32, at: Any):
        """List non-zeros `base` to `base + window`, ascending: a lane has a tile, and each warp every eighth word."""
        tiles = self.tiles_of(o)
        before = -base
        for group in cutlass.range(0, tiles, TILES, unroll=1):
            tile = group + at.lane
            row, column, exists, expert = self.locate(o, m, tile, tiles)
            count = count_of(o.words, row, column, o.width, exists)
            word = Uint32(o.words[row, column * o.width + at.warp]) if exists else Uint32(0)
            # position of the tile's first non-zero
            start = before + prefix_sum(count, at.lane)
            before += Int32(cute.arch.warp_redux_sync(count, "add"))
            spilled = count >= o.width
            last = 0 if spilled else count
            self.list_word(s, start + at.warp - 1, word, expert, at.warp > 0 and at.warp <= last)
            most = Int32(cute.arch.warp_redux_sync(last, "max"))
            for ordinal in cutlass.range(at.warp + WARPS, most + 1, WARPS, unroll=1):
                if ordinal <= last:
                    more = o.words[row, column * o.width + ordinal]
                    self.list_word(s, start + ordinal - 1, Uint32(more), expert, True)
            left = Uint32(cute.arch.vote_ballot_sync(spilled))
            while left != 0:
                slot = lowest_bit(left)
                left = left & (left - 1)
                first = cute.arch.shuffle_sync(start, slot)
                if slot % WARPS == at.warp:
                    self.list_spilled(o, s, m, group + slot, tiles, first, at.lane)

    @cute.jit
    def list_tiles(self, o: Any, s: Any, m: Int32, base: Int32, size: Int32, at: Any):
        """List `size` non-zeros from `base` on, ascending: a warp per tile that has any of them, a lane per word."""
        tiles = self.tiles_of(o)
        before = -base
        for group in cutlass.range(0, tiles, TILES, unroll=1):
            tile = group + at.lane
            row, column, exists, _ = self.locate(o, m, tile, tiles)
            count = count_of(o.words, row, column, o.width, exists)
            # position of the tile's first non-zero
            start = before + prefix_sum(count, at.lane)
            before += Int32(cute.arch.warp_redux_sync(count, "add"))
            needed = Uint32(cute.arch.vote_ballot_sync(start < size and start + count > 0))
            for j in range_constexpr(TILES // WARPS):
                slot = at.warp + WARPS * j
                first, last = cute.arch.shuffle_sync(start, slot), cute.arch.shuffle_sync(count, slot)
                if (needed >> slot) & 1 != 0:
                    if last >= o.width:
                        self.list_spilled(o, s, m, group + slot, tiles, first, at.lane)
                    else:
                        row, column, _, expert = self.locate(o, m, group + slot, tiles)
                        for ordinal in cutlass.range(at.lane, last, 32, unroll=1):
                            word = o.words[row, column * o.width + 1 + ordinal]
                            self.list_word(s, first + ordinal, Uint32(word), expert, True)

    @cute.jit
    def list_spilled(self, o: Any, s: Any, m: Int32, tile: Int32, tiles: Int32, start: Int32, lane: Int32):
        """List the non-zeros of a tile that overflows by one warp, eight values per lane."""
        row, column, _, expert = self.locate(o, m, tile, tiles)
        neuron = column * geometry.TILE + lane * 8
        quad = load_values(address(o.spill, row, neuron))
        flags = nonzero_flags(quad)
        own = count_flags(flags)
        at = start + prefix_sum(own, lane)
        for i in range_constexpr(8):
            self.list_word(s, at, spilled_word(quad, i, neuron), expert, flags[i])
            at += Int32(flags[i])

    @cute.jit
    def list_word(self, s: Any, at: Int32, word: Uint32, expert: Int32, valid: Any):
        """Note a word as number `at` of the window, if it is of the window."""
        if valid and at >= 0 and at < self.window:
            self.note(s, at, word, expert)
