"""Non-zeros of compact.py: what becomes of each, and those for which there is no room in shared memory.

A token's words and its spill are read again in each phase, by its own warp, 32 non-zeros at a time, ascending.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, Uint16, Uint32, const_expr, range_constexpr

from .. import geometry
from ..common.byte_counters import PITCH, Thread, count_token
from ..common.copies import address, load_values
from ..common.rows import count_of, nth_word, spilled_word
from ..common.values import MAGNITUDE, byte_sum, count_flags, lowest_bit, nonzero_flags, prefix_sum, widen
from .compact_ranges import TOKENS

CHUNK = geometry.CHUNK
# words of a bitmap per tile
TILE_BITS = geometry.TILE // 32

MARK, COUNT, WRITE = range(3)


class Operands(NamedTuple):
    """The arguments of the kernel `compact` in their order."""

    words: Any
    spill: Any
    entries: Any
    neurons: Any
    chunks: Any
    sizes: Any
    popularity: Any  # None unless in training
    l1: Any  # cleared; if `plain`, the sum of h of each token tile
    size: Any  # neurons
    width: Any  # words of a tile
    plain: Any  # 0 with an up projection, otherwise 1 plus the code of the activation
    capacity: Any  # most entries in training
    listed: Any  # neurons of each token tile, in whose places the gate is if `by_place`
    listed_sizes: Any
    by_place: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    bitmap: Any  # [N / 32] the union
    prefix: Any  # [N / 32] neurons of the union before each word of the bitmap
    bases: Any  # [C] entries of each chunk, then the entries before it
    kept: Any  # [TOKENS] index of a token's first non-zero in `words`; negative if they are not kept
    sums: Any  # [WARPS] sums by warp
    scalars: Any  # [3] words kept, or kept with more room; index of the first that did not fit; last neuron
    counters: Any  # [N / 4] bytes by neuron, then [C, PITCH] bytes by chunk and token
    before: Any  # [C, PITCH] entries of a chunk before each four tokens
    words: Any  # [room] non-zeros as in TwELL; from `count` on with ranks instead of neurons
    owners: Any  # [room] bytes: their tokens
    staged: Any  # [room] entries, if all of them fit


class Scan:
    """The phases of a non-zero, and of a token whose non-zeros are not kept."""

    @cute.jit
    def scan_token(self, s: Views, o: Operands, token: Int32, target: Int32, at: Thread, phase: cutlass.Constexpr):
        """Run one phase on the non-zeros of one token; MARK keeps them if there is room, WRITE writes to `target`."""
        m, lane = at.tile * TOKENS + token, at.lane
        tiles = o.words.shape[1] // o.width
        # position of the next kept entry; chunk of the last entry, and number of entries in it so far
        kept = s.kept[token]
        position, run = kept, (Int32(-1), Int32(0))
        for group in cutlass.range(0, tiles, 32, unroll=1):
            count = count_of(o.words, m, group + lane, o.width, m < o.words.shape[0] and group + lane < tiles)
            overflowing = Uint32(cute.arch.vote_ballot_sync(count >= o.width))
            # tiles of the group up to the next one that overflows, then that one
            low = Int32(0)
            while low < 32:
                rest = overflowing & (Uint32(0xFFFFFFFF) << Uint32(low))
                high = lowest_bit(rest) if rest != 0 else Int32(32)
                here = count if lane >= low and lane < high else 0
                before = prefix_sum(here, lane)
                size = cute.arch.shuffle_sync(before + here, 31)
                for first in cutlass.range(0, size, 32, unroll=1):
                    active = first + lane < size
                    word = nth_word(o.words, m, group, o.width, before, first + lane, active)
                    place = position + first + lane
                    run = self.process_words(s, o, token, word, active, place, kept >= 0, run, target, phase)
                position += size
                if high < 32:
                    neuron = (group + high) * geometry.TILE
                    if const_expr(phase == MARK):
                        position = self.mark_spilled(s, o, token, neuron + lane * 8, position, kept >= 0, at)
                    else:
                        values = [Uint32(0)] * TILE_BITS
                        for i in range_constexpr(TILE_BITS):
                            values[i] = Uint32(widen(o.spill[m, neuron + 32 * i + lane].bitcast(Uint16)))
                        for i in range_constexpr(TILE_BITS):
                            word = values[i] << 16 | Uint32(neuron + 32 * i + lane)
                            active = values[i] & MAGNITUDE != 0
                            run = self.process_words(s, o, token, word, active, position, False, run, target, phase)
                low = high + 1

    @cute.jit
    def mark_spilled(self, s: Views, o: Operands, token: Int32, neuron: Int32, position: Int32, keep, at: Thread):
        """`mark` for a tile that overflows, eight neurons per lane; return the position of the next kept entry."""
        values = load_values(address(o.spill, at.tile * TOKENS + token, neuron))
        flags = nonzero_flags(values)
        place = position + prefix_sum(count_flags(flags), at.lane)
        for i in range_constexpr(8):
            if flags[i]:
                self.mark_entry(s, spilled_word(values, i, neuron), place, token, keep)
            place += Int32(flags[i])
        return cute.arch.shuffle_sync(place, 31)

    @cute.jit
    def process_words(
        self, s: Views, o: Operands, token, word: Uint32, active, place, keep, run, target, phase: cutlass.Constexpr
    ):
        """Run one phase on a non-zero per active lane, ascending. All lanes of the warp must take part."""
        if const_expr(phase == MARK):
            if active:
                self.mark_entry(s, word, place, token, keep)
        else:
            rank = self.rank_of(s, word)
            if const_expr(phase == COUNT):
                if active:
                    count_token(s.counters, rank // CHUNK, token)
            else:
                ordinal, run = self.ordinal_in_chunk(rank // CHUNK, active, run)
                if active:
                    self.write_entry(s, o, word, rank, ordinal, token, target)
        return run

    @cute.jit
    def ordinal_in_chunk(self, chunk: Int32, active, run):
        """Ordinal of an entry in its chunk, and the next `run`; active lanes ascend by chunk and continue `run`."""
        flags = Uint32(cute.arch.vote_ballot_sync(active))
        earlier = flags & Uint32(cute.arch.lanemask_lt())
        last = 31 - Int32(cute.arch.clz(earlier))
        left = cute.arch.shuffle_sync(chunk, cutlass.max(last, Int32(0)))
        left = left if earlier != 0 else run[0]
        begins = Uint32(cute.arch.vote_ballot_sync(active and left != chunk)) & Uint32(cute.arch.lanemask_le())
        first = 31 - Int32(cute.arch.clz(begins))
        ordinal = run[1] + Int32(cute.arch.popc(earlier))
        if begins != 0:
            ordinal = Int32(cute.arch.popc(earlier >> Uint32(first)))
        end = cutlass.max(31 - Int32(cute.arch.clz(flags)), Int32(0))
        end_chunk, end_ordinal = cute.arch.shuffle_sync(chunk, end), cute.arch.shuffle_sync(ordinal, end)
        chunk_so_far = end_chunk if flags != 0 else run[0]
        entries_so_far = end_ordinal + 1 if flags != 0 else run[1]
        return ordinal, (chunk_so_far, entries_so_far)

    # ---- a non-zero ----

    @cute.jit
    def rank_of(self, s: Views, word: Uint32):
        """Rank in the union of a word's neuron."""
        at = Int32((word & Uint32(0xFFFF)) >> 5)
        below = (Uint32(1) << (word & 31)) - 1
        return widen(s.prefix[at]) + Int32(cute.arch.popc(Uint32(s.bitmap[at]) & below))

    @cute.jit
    def mark_entry(self, s: Views, word: Uint32, place: Int32, token: Int32, keep):
        """Count a non-zero by neuron, and `keep` it as number `place`."""
        neuron = word & Uint32(0xFFFF)
        one = Uint32(1) << ((neuron & 3) * 8)
        cute.arch.atomic_add(s.counters.iterator + Int32(neuron >> 2), one, scope="cta")
        if keep:
            s.words[place] = word
            s.owners[place] = Uint8(token)

    @cute.jit
    def write_entry(self, s: Views, o: Operands, word: Uint32, rank: Int32, ordinal: Int32, token: Int32, target):
        """Write an entry to the token tile's place in the pool, or to shared memory if that is negative."""
        chunk, shift = rank // CHUNK, Uint32((token & 3) * 8)
        counter = chunk * PITCH + (token >> 2)
        others = byte_sum(Uint32(s.counters[counter]) & ((Uint32(1) << shift) - 1))
        position = s.bases[chunk] + widen(s.before[counter]) + others + ordinal
        entry = (word & Uint32(0xFFFF0000)) | Uint32(token * CHUNK + rank % CHUNK)
        if target >= 0:
            o.entries[target + position] = Int32(entry)
        else:
            s.staged[position] = entry

    # ---- ordinals of kept non-zeros ----

    @cute.jit
    def ordinal(self, s: Views, first: Int32, kept: Int32, lane: Int32):
        """Ordinal of entry `first` + lane among those of its token and chunk."""
        begins = self.run_starts(s, first + lane, kept)
        ends = begins & Uint32(cute.arch.lanemask_le())
        ordinal = lane - 31 + Int32(cute.arch.clz(ends))
        if begins & 1 == 0:
            # a token has at most 64 entries in a chunk, so a run that continues here began at most 63 entries ago
            earlier = self.run_starts(s, first - 32 + lane, kept)
            earliest = self.run_starts(s, first - 64 + lane, kept)
            before = 1 + Int32(cute.arch.clz(earlier)) if earlier != 0 else 33 + Int32(cute.arch.clz(earliest))
            ordinal = ordinal if ends != 0 else lane + before
        return ordinal

    @cute.jit
    def run_starts(self, s: Views, at: Int32, kept: Int32):
        """Mask of lanes whose entry `at` is the first of its token and chunk; `at` may be negative."""
        begin = at <= 0
        if at > 0 and at < kept:
            key, last = self.key(s, at), self.key(s, at - 1)
            begin = key != last
        return Uint32(cute.arch.vote_ballot_sync(begin))

    def key(self, s, at):
        """Token and chunk of an entry whose rank is known."""
        return (self.owner(s, at) << 16) | Int32((Uint32(s.words[at]) & Uint32(0xFFFF)) >> 6)

    def owner(self, s, at):
        return Int32(s.owners[at].to(Uint32) & Uint32(0xFF))
