"""Units of work on the lists of tiles of 128 tokens, and how they are dealt to the persistent CTAs.

A chunk is 64 places of a list. A list is cut into units of four chunks and a last one of what is left, in whole chunks.
A unit reads a row of weights per place and 128 rows of tokens, so its cost is taken as its chunks + 2.

Units are ordered by length, the longest first, those of one length by tiles. Rounds of one unit per CTA are dealt like
the lines of a text that is read to and fro: CTA i has unit i of round 0, and the i-th from the end of round 1. So who
had a long unit gets a short one next: in two rounds no other pairs have a smaller largest sum.

Some problems need shorter units: 64 long ones leave half of 132 CTAs idle, and of 133 one takes a round for itself. So
long units beyond whole rounds, and last units of three chunks, may be cut behind their second chunk. They are if what
is left after the whole rounds of long units then fits in two rounds, and its largest sum is smaller.

The order has five runs of units: whole long ones, halves of long ones, and last ones of 3, 2 and 1 chunks. Without
halves the second is empty. With halves the third is: lists that end in three chunks have a unit in each of the others.

Each warp finds its units by itself, from the sizes alone. The arithmetic is that of integers and of Int32 alike, and so
has no branches: the tests run it.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from .. import geometry
from .values import lowest_bit, prefix_sum

# chunks of the longest unit
LONG = 4
# by runs, in hexadecimal digits from the last one on: chunks of a unit; none behind the last unit
CHUNKS_OF_RUN = 0x012324


class Counts(NamedTuple):
    """Numbers of long units, and of lists that end in a unit of 3, 2 and 1 chunks."""

    long: Any
    threes: Any
    twos: Any
    ones: Any


class Deal(NamedTuple):
    """The order of a problem's units: indices at which its runs end, of which the last is the number of units."""

    ctas: Any
    halved: Any  # 0 or 1
    ends: Any


class Slot(NamedTuple):
    """What the index of a unit says of it."""

    chunks: Any
    holders: Any  # lists with such units: bit r stands for those that end in r chunks, bit LONG for long units
    wanted: Any  # how many units of these lists come before
    half: Any  # 1 of the second half of a long unit, else 0


class Unit(NamedTuple):
    """A part of the list of a tile of tokens; no `chunks` behind the last unit."""

    tile: Any
    start: Any  # the first chunk, an even number
    chunks: Any
    length: Any  # places of the list in it, at most those of its chunks


class Cursor(NamedTuple):
    """Where the search for a unit ended, for that of a later one: its `holders`, 32 lists, and units before them."""

    holders: Any
    first: Any
    before: Any


# ---- arithmetic ----


def reaches(index: Any, bound: Any) -> Any:
    """1 if `index` >= `bound`, else 0."""
    return cutlass.min(cutlass.max(index - bound + 1, 0), 1)


def chunks_of(size: Any, quantum: int) -> Any:
    """Chunks of a list of `size` places, in multiples of `quantum`."""
    return (size + (quantum * geometry.CHUNK - 1)) // (quantum * geometry.CHUNK) * quantum


def unit_after(index: Any, ctas: Any) -> Any:
    """The unit that its CTA computes after `index`: as far behind the border of their rounds as this one before."""
    return 2 * ctas * (index // ctas + 1) - 1 - index


def cost_at(index: Any, ends: list[Any], costs: list[int]) -> Any:
    """The cost of a unit among units of falling costs, which end at `ends`; 0 behind the last one."""
    lower = [*costs[1:], 0]
    return sum((1 - reaches(index, end)) * (cost - less) for end, cost, less in zip(ends, costs, lower))


def largest_sum(numbers: list[Any], chunks: list[int], ctas: Any) -> Any:
    """The cost of the CTA with most of up to two rounds of units: so many of so many chunks, the longest first.

    In round 1 costs rise with the CTA. So of those with equal units in round 0, the last one has most.
    """
    ends, costs = [numbers[0]], [c + 2 for c in chunks]
    for number in numbers[1:]:
        ends.append(ends[-1] + number)
    largest = 0
    for end in ends:
        cta = cutlass.max(cutlass.min(end, ctas) - 1, 0)
        largest = cutlass.max(largest, cost_at(cta, ends, costs) + cost_at(2 * ctas - 1 - cta, ends, costs))
    return largest


def left_halved(counts: Counts, ctas: Any) -> list[Any]:
    """Numbers of units of 2 and of 1 chunks, halves among them, besides the whole rounds of long ones."""
    return [2 * (counts.long % ctas) + counts.threes + counts.twos, counts.threes + counts.ones]


def halving_pays(counts: Counts, ctas: Any) -> Any:
    """1 if halves make the largest sum smaller, else 0; for what fits, halved, in two rounds."""
    whole = largest_sum([counts.long % ctas, *counts[1:]], [4, 3, 2, 1], ctas)
    return reaches(whole - 1, largest_sum(left_halved(counts, ctas), [2, 1], ctas))


def order(counts: Counts, ctas: Any, halved: Any) -> Deal:
    """The order of all units, with halves or without."""
    ends = [counts.long - halved * (counts.long % ctas)]
    both = halved * counts.threes
    for number in (2 * (counts.long - ends[0]), counts.threes - both, counts.twos + both, counts.ones + both):
        ends.append(ends[-1] + number)
    return Deal(ctas, halved, tuple(ends))


def slot_at(deal: Deal, index: Any) -> Slot:
    """What there is at an index of the order."""
    run, first, begin = 0, 0, 0
    for end in deal.ends:
        behind = reaches(index, end)
        run, first, begin = run + behind, first + behind * (end - begin), end
    chunks = (CHUNKS_OF_RUN >> (4 * run)) & 15
    is_long = 1 - reaches(run, 2)
    pair = is_long * reaches(run, 1)
    nth = index - first
    # units of up to two chunks are also in lists that end in three, if these are cut
    holders = is_long * (1 << LONG) + (1 - is_long) * ((1 << chunks) + deal.halved * (1 << 3))
    return Slot(chunks, holders, nth + pair * (deal.ends[0] + nth // 2 - nth), pair * (nth % 2))


def units_in(chunks: Any, holders: Any) -> Any:
    """How many such units a list of so many chunks has."""
    return ((holders >> (chunks % LONG)) & 1) + (holders >> LONG) * (chunks // LONG)


def start_in(chunks: Any, slot: Slot, nth: Any) -> Any:
    """The first chunk of the `nth` such unit of a list of so many chunks."""
    of_long = LONG * nth + 2 * slot.half
    # 2 + 1 chunks if three are cut
    of_last = chunks // LONG * LONG + (chunks % LONG // cutlass.max(slot.chunks, 1) - 1) * slot.chunks
    return of_last + (slot.holders >> LONG) * (of_long - of_last)


def length_at(size: Any, start: Any, chunks: Any) -> Any:
    """Places, of a list of `size`, in a unit of `chunks` from chunk `start` on."""
    return cutlass.min(size - start * geometry.CHUNK, chunks * geometry.CHUNK)


# ---- by a warp ----


@cute.jit
def deal_units(sizes: Any, ctas: Int32, quantum: cutlass.Constexpr, halves: cutlass.Constexpr) -> Deal:
    """The order of the units of lists of `sizes` [lists + 1]. All lanes of a warp must take part.

    `quantum`: chunks of which a multiple is computed; with `halves`, long units may be cut.
    """
    own = [Int32(0)] * LONG
    for tile in cutlass.range(cute.arch.lane_idx(), sizes.shape[0] - 1, 32, unroll=1):
        chunks = chunks_of(sizes[tile], quantum)
        own = [own[i] + units_in(chunks, 1 << (LONG - i)) for i in range(LONG)]
    counts = Counts(*(Int32(cute.arch.warp_redux_sync(number, "add")) for number in own))
    halved = Int32(0)
    if const_expr(halves):
        if sum(left_halved(counts, ctas)) <= 2 * ctas:
            halved = Int32(halving_pays(counts, ctas))
    return order(counts, ctas, halved)


def begin() -> Cursor:
    """Where the search for a CTA's first unit begins."""
    return Cursor(Int32(0), Int32(0), Int32(0))


@cute.jit
def find_unit(sizes: Any, deal: Deal, index: Int32, cursor: Cursor, quantum: cutlass.Constexpr) -> Any:
    """The unit at an index of the order, and the cursor for later ones. All lanes of a warp must take part."""
    lane, lists = cute.arch.lane_idx(), sizes.shape[0] - 1
    slot = slot_at(deal, index)
    first, before = cursor.first, cursor.before
    if slot.holders != cursor.holders:
        first, before = Int32(0), Int32(0)
    tile, start, length = Int32(0), Int32(0), Int32(0)
    searching = slot.chunks > 0
    while searching:
        at = first + lane
        size = sizes[at] if at < lists else Int32(0)
        chunks = chunks_of(size, quantum)
        count = units_in(chunks, slot.holders)
        total = Int32(cute.arch.warp_redux_sync(count, "add"))
        if before + total > slot.wanted:
            nth = slot.wanted - before - prefix_sum(count, lane)
            source = lowest_bit(Uint32(cute.arch.vote_ballot_sync((nth >= 0) & (nth < count))))
            start = start_in(chunks, slot, nth)
            tile = first + source
            length = cute.arch.shuffle_sync(length_at(size, start, slot.chunks), source)
            start = cute.arch.shuffle_sync(start, source)
            searching = Boolean(False)
        else:
            first, before = first + 32, before + total
    return Unit(tile, start, slot.chunks, length), Cursor(slot.holders, first, before)
