"""How lists are cut into units and dealt to CTAs, by the arithmetic of kernels; the search is written again here."""

import itertools
import random

import pytest

from twell.runtime import geometry

pytest.importorskip("cutlass")

from cute_kernels.common import units

CTAS = (1, 7, 132)


def counts_of(sizes: list[int], quantum: int) -> units.Counts:
    chunks = [units.chunks_of(size, quantum) for size in sizes]
    return units.Counts(*(sum(units.units_in(c, 1 << (units.LONG - i)) for c in chunks) for i in range(units.LONG)))


def halved(counts: units.Counts, ctas: int) -> int:
    return int(sum(units.left_halved(counts, ctas)) <= 2 * ctas and units.halving_pays(counts, ctas))


def find(sizes: list[int], deal: units.Deal, index: int, quantum: int) -> units.Unit:
    slot, before = units.slot_at(deal, index), 0
    for tile, size in enumerate(sizes):
        chunks = units.chunks_of(size, quantum)
        count = units.units_in(chunks, slot.holders)
        if slot.wanted < before + count:
            start = units.start_in(chunks, slot, slot.wanted - before)
            return units.Unit(tile, start, slot.chunks, units.length_at(size, start, slot.chunks))
        before += count
    raise AssertionError(f"unit {index} of {deal.ends[-1]} is in no list")


def dealt(deal: units.Deal) -> list[list[int]]:
    every: list[list[int]] = []
    for cta in range(deal.ctas):
        every.append([])
        index = cta
        while units.slot_at(deal, index).chunks > 0:
            every[-1].append(index)
            index = units.unit_after(index, deal.ctas)
    return every


def problems() -> list[list[int]]:
    """Sizes of lists: around the lengths of units, and those of many and of few tiles."""
    draw = random.Random(0)
    edges = [size + d for size in (0, 64, 128, 192, 256, 320, 448, 512, 1024) for d in (-1, 0, 1) if size + d >= 0]
    drawn = [[draw.randrange(most) for _ in range(tiles)] for tiles in (8, 64, 130) for most in (65, 260, 700)]
    return [[], [0], [0] * 40, edges, edges[::-1], *drawn]


@pytest.mark.parametrize("ctas", CTAS)
@pytest.mark.parametrize("quantum", [1, units.LONG])
def test_every_place_is_in_one_unit_and_every_unit_has_one_cta(quantum: int, ctas: int) -> None:
    for sizes in problems():
        counts = counts_of(sizes, quantum)
        # units that are all computed as long ones are not cut
        for cut in (0, 1) if quantum == 1 else (0,):
            deal = units.order(counts, ctas, cut)
            covered = [[0] * size for size in sizes]
            rounds = dealt(deal)
            assert sorted(index for own in rounds for index in own) == list(range(deal.ends[-1]))
            for index in range(deal.ends[-1]):
                unit = find(sizes, deal, index, quantum)
                assert unit.start % 2 == 0
                assert 0 < unit.length <= unit.chunks * geometry.CHUNK
                # none but a last one has more places than a list
                assert quantum > 1 or unit.length > (unit.chunks - 1) * geometry.CHUNK
                for place in range(unit.length):
                    covered[unit.tile][unit.start * geometry.CHUNK + place] += 1
            assert all(times == 1 for row in covered for times in row)


@pytest.mark.parametrize("ctas", CTAS)
def test_units_of_a_cta_become_shorter_and_the_search_never_turns_back(ctas: int) -> None:
    """A kernel has a loop for each length, and the cursor begins again only for other lists."""
    for sizes in problems():
        counts = counts_of(sizes, 1)
        for cut in (0, 1):
            deal = units.order(counts, ctas, cut)
            for own in dealt(deal):
                slots = [units.slot_at(deal, index) for index in own]
                for slot, later in itertools.pairwise(slots):
                    assert later.chunks <= slot.chunks
                    assert later.wanted >= slot.wanted or later.holders != slot.holders


def sums(deal: units.Deal) -> list[int]:
    return [sum(units.slot_at(deal, index).chunks + 2 for index in own) for own in dealt(deal)]


@pytest.mark.parametrize("ctas", CTAS)
def test_halves_are_made_where_they_make_the_largest_sum_smaller(ctas: int) -> None:
    draw, fit = random.Random(ctas), {True: 0, False: 0}
    for _ in range(60 if ctas < 100 else 20):
        counts = units.Counts(*(draw.randrange(1 + int(draw.random() * 1.5 * ctas)) for _ in range(units.LONG)))
        whole, cut = (units.order(counts, ctas, given) for given in (0, 1))
        # behind the whole rounds of long units
        if cut.ends[-1] - counts.long // ctas * ctas <= 2 * ctas:
            pays = max(sums(cut)) < max(sums(whole))
            assert halved(counts, ctas) == pays, counts
            fit[pays] += 1
        else:
            assert not halved(counts, ctas)
    # one CTA has nothing to balance
    assert fit[False]
    assert bool(fit[True]) == (ctas > 1)
