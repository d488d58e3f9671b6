"""Main loop of sparse times dense by mma.sync: rows named by a list, gathered into shared memory, times scattered
coefficients.

A unit of work is a tile of 128 sparse rows and 256 columns. Eight warps do everything, two by four on the tile, 64 x 64
sums each; a warp has 32 rows of each half of the tile, so a tile without a second half takes half the products. A turn
handles 64 positions of the unit's list, for one of `products` products, in two steps of 32:

    load        cp.async of 32 rows per step, one per warp at a time, into a ring of four stages, two turns ahead.
    scatter     the coefficients of the next turn, into the other of two tiles [128 rows, 64 positions]: it is cleared
                in the first step of a turn and filled in the second. They were loaded one turn before.
    mma         ldmatrix and mma.sync m16n8k16. Fragments of the next 16 positions are loaded before the products of
                these. One barrier per step: the next stage is complete, this one has been read and is filled again; in
                the second step also: the next tile is complete.

Everything ahead of the products goes on into the CTA's next unit, which so begins without a wait. For this a unit has
at least TURNS turns, the last of which may be empty.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from ..common.copies import copy_async, store_half, store_pairs
from ..common.lists import Lists
from ..common.mma import clear, load_matrices, load_matrices_transposed
from ..common.sums import add_flushed, flush_sums
from ..common.swizzle import swizzle_column, swizzle_piece
from ..common.values import pack
from .product import THREADS, WARPS_M, WARPS_N, multiply

TILE_M, TILE_N, TURN, STEP = 128, 256, 64, 32
STAGES, TURNS = 4, 3
WARPS = THREADS // 32
# fragments of 16 sparse rows and of 8 columns per warp
M_FRAGS, N_FRAGS = TILE_M // WARPS_M // 16, TILE_N // WARPS_N // 8
# coefficients that a thread loads one turn ahead
AHEAD = 4
# 16-bit values of a tile of coefficients, and of a stage
TILE_VALUES, STAGE_VALUES = TILE_M * TURN, STEP * TILE_N
SHARED_VALUES = 2 * TILE_VALUES + STAGES * STAGE_VALUES


class Unit(NamedTuple):
    """A unit of work and its list."""

    tile: Any
    part: Any
    length: Any
    base: Any  # where the list begins
    turns: Any


class Ahead(NamedTuple):
    """What a thread has loaded ahead of turn k."""

    rows: Any  # [2] the rows of this lane's position in each step of turn k + 2
    words: Any  # [2, AHEAD] coefficients of turn k + 1
    first: Any  # index of its first coefficient
    last: Any  # their end
    next_first: Any  # those of turn k + 2
    next_last: Any


class Source(NamedTuple):
    """A dense matrix: its address as an integer, its row pitch in units of 16 bytes and its columns."""

    address: Any
    pitch: Any
    columns: Any


class Fragments(NamedTuple):
    """A thread's fragments, two sets, and sums."""

    rA: Any
    rB: Any
    acc: Any


def fragment_row(warp_m: Any, i: int) -> Any:
    """The first row of a warp's fragment `i` of 16 sparse rows."""
    return warp_m * (TILE_M // 2 // WARPS_M) + i % 2 * 16 + i // 2 * (TILE_M // 2)


class SparseProduct(Lists):
    """The main loop, for a kernel that defines the methods below.

    Its operands, `data`, include `units`, their number, and `flushed`, the memory of flushed sums. After `longest`
    positions the sums of a unit are flushed.
    """

    source: Any  # (data, part, product): the dense matrix, and the first of a unit's columns in it
    # (data, tile, part, low, high, valid): store what `load_coefficient` returned by `store_coefficient`, if `valid`
    scatter_coefficient: Any
    store_unit: Any  # (data, acc, unit, at)

    @cute.jit
    def multiply_part(self, data, f, part, buffer: cutlass.Constexpr, i: cutlass.Constexpr):
        """Add the products of 16 sparse rows, if a unit with this part has them."""
        multiply(f, buffer, i, self.dtype)

    @cute.jit
    def compute_units(self, data, shared, at, long: cutlass.Constexpr):
        """Compute all units of the CTA. `long`: lists may have more than `longest` positions."""
        tiles, ring = shared, shared + 2 * TILE_VALUES
        f = Fragments(
            cute.make_rmem_tensor((4, M_FRAGS, 2), Uint32),
            cute.make_rmem_tensor((2, N_FRAGS, 2), Uint32),
            cute.make_rmem_tensor((4, N_FRAGS, M_FRAGS), Float32),
        )
        number = Int32(cute.arch.block_idx()[0])
        current, following = self.unit_of(data, number), self.unit_of(data, self.unit_after(number))
        ahead = self.begin(data, tiles, ring, current, following, at)
        slot = Int32(0)
        self.load_fragments(f, tiles, ring, slot, 0, at)
        while number < data.units:
            clear(f.acc)
            for k in cutlass.range(current.turns, unroll=1):
                if const_expr(long):
                    if k > 0 and k % (self.longest // TURN) == 0:
                        flush_sums(f.acc, data.flushed, k == self.longest // TURN)
                ahead = self.take_turn(data, tiles, ring, f, k, slot, current, following, ahead, at)
                slot = slot ^ 1
            if const_expr(long):
                if current.turns > self.longest // TURN:
                    add_flushed(f.acc, data.flushed)
            self.store_unit(data, f.acc, current, at)
            number = self.unit_after(number)
            current, following = following, self.unit_of(data, self.unit_after(number))
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def take_turn(self, data, tiles, ring, f, k, slot, current, following, ahead, at):
        """The products of turn `k`, and everything for those after it; return what is loaded ahead."""
        rows, words, first, last, next_first, next_last = ahead
        for step in range_constexpr(2):
            for block in range_constexpr(2):
                if const_expr(block == 1):
                    cute.arch.cp_async_wait_group(STAGES - 2)
                    cute.arch.sync_threads()
                following_block = 2 * step + block + 1
                self.load_fragments(f, tiles, ring, slot ^ (following_block // 4), following_block % 4, at)
                for i in range_constexpr(M_FRAGS):
                    self.multiply_part(data, f, current.part, block, i)
                    # copies between products, which hide their instructions: of the stage that the last barrier freed
                    if const_expr(i % 2 == 1):
                        if const_expr(block == 1):
                            self.copy_row(data, ring, rows, k + 2, slot, step, i // 2, current, following, at)
                        elif const_expr(step == 1):
                            self.copy_row(data, ring, rows, k + 2, slot, 0, 2 + i // 2, current, following, at)
                        else:
                            self.copy_row(data, ring, rows, k + 1, slot ^ 1, 1, 2 + i // 2, current, following, at)
                if const_expr(block == 0):
                    cute.arch.cp_async_commit_group()
                    self.load_rows(data, rows, k + 3 - (1 - step), 1 - step, current, following, at)
                if const_expr(block == 0 and step == 0):
                    self.clear_tile(tiles, slot ^ 1, at)
                if const_expr(block == 0 and step == 1):
                    self.scatter(data, tiles, words, k + 1, slot ^ 1, first, last, current, following, at)
                    first, last = next_first, next_last
                    self.load_coefficients(data, words, k + 2, first, last, current, following, at)
                    next_first, next_last = self.bounds(data, k + 3, current, following)
        return Ahead(rows, words, first, last, next_first, next_last)

    @cute.jit
    def begin(self, data, tiles, ring, current, following, at):
        """Load what the first turns need, and fill the first turn's tile."""
        rows = cute.make_rmem_tensor((2,), Int32)
        words = cute.make_rmem_tensor((2, AHEAD), Uint32)
        for turn in range_constexpr(2):
            for step in range_constexpr(2):
                self.load_rows(data, rows, Int32(turn), step, current, following, at)
                # the first block copies the rest
                count = STEP // WARPS if turn + step < 2 else 2
                for i in range_constexpr(count):
                    self.copy_row(data, ring, rows, Int32(turn), Int32(turn), step, i, current, following, at)
                if const_expr(turn + step < 2):
                    cute.arch.cp_async_commit_group()
        self.load_rows(data, rows, Int32(2), 0, current, following, at)
        first, last = self.bounds(data, Int32(0), current, following)
        self.load_coefficients(data, words, Int32(0), first, last, current, following, at)
        self.clear_tile(tiles, Int32(0), at)
        cute.arch.sync_threads()
        self.scatter(data, tiles, words, Int32(0), Int32(0), first, last, current, following, at)
        first, last = self.bounds(data, Int32(1), current, following)
        self.load_coefficients(data, words, Int32(1), first, last, current, following, at)
        next_first, next_last = self.bounds(data, Int32(2), current, following)
        cute.arch.cp_async_wait_group(STAGES - 2)
        cute.arch.sync_threads()
        return Ahead(rows, words, first, last, next_first, next_last)

    # ---- the order of units and turns ----

    @cute.jit
    def unit_of(self, data, number):
        """A unit; after the last one a unit without positions."""
        tile, part, length, base = Int32(0), Int32(0), Int32(0), Int32(0)
        if number < data.units:
            tile, part = self.tile_and_part(data, number)
            length, base = self.list_extent(data, tile)
        turns = cutlass.max(cute.ceil_div(length, TURN) * self.products, Int32(TURNS))
        return Unit(tile, part, length, base, turns)

    @cute.jit
    def locate(self, turn, current, following):
        """The unit, chunk and product of a turn, which may be one of the `following` unit."""
        tile, part, length, base, _ = current
        if turn >= current.turns:
            turn -= current.turns
            tile, part, length, base, _ = following
        chunk = turn // self.products
        return Unit(tile, part, length, base, Int32(0)), chunk, turn - chunk * self.products

    @cute.jit
    def bounds(self, data, turn, current, following):
        """Where the coefficients of a turn begin and end; no bound is stored beyond the end of the list."""
        unit, chunk, _ = self.locate(turn, current, following)
        chunks = cute.ceil_div(unit.length, TURN)
        first = self.chunk_start(data, unit.tile, cutlass.min(chunk, chunks))
        return first, self.chunk_start(data, unit.tile, cutlass.min(chunk + 1, chunks))

    # ---- rows ----

    @cute.jit
    def load_rows(self, data, rows, turn, step: cutlass.Constexpr, current, following, at):
        """Load the row of this lane's position in a step; -1 beyond the list."""
        unit, chunk, _ = self.locate(turn, current, following)
        position = chunk * TURN + step * STEP + at.lane
        rows[step] = self.row_index(data, unit.base + position) if position < unit.length else -1

    @cute.jit
    def copy_row(
        self, data, ring, rows, turn, slot, step: cutlass.Constexpr, i: cutlass.Constexpr, current, following, at
    ):
        """Start the copy of a warp's row `i` of a step, 16 bytes per lane; zeros beyond the list and the columns.

        Row offsets are 32-bit, in units of 16 bytes: 64 GB.
        """
        unit, _, product = self.locate(turn, current, following)
        matrix, column = self.source(data, unit.part, product)
        warp = cute.arch.make_warp_uniform(at.thread // 32)
        row = cute.arch.shuffle_sync(rows[step], warp + WARPS * i)
        column += at.lane * 8
        offset = (Uint32(row) * matrix.pitch).to(Int64) * 16 + Int64(column) * 2
        target = ring + ((2 * slot + step) * STAGE_VALUES + (warp + WARPS * i) * TILE_N + (at.lane ^ warp) * 8)
        exists = (row >= 0) & (column < matrix.columns)
        copy_async(target, matrix.address + offset, Int32(16) if exists else Int32(0))

    # ---- coefficients ----

    @cute.jit
    def load_coefficients(self, data, words, turn, first, last, current, following, at):
        """Load a thread's first coefficients of a turn."""
        _, _, product = self.locate(turn, current, following)
        for j in range_constexpr(AHEAD):
            here = first + at.thread + THREADS * j
            if here < last:
                low, high = self.load_coefficient(data, here, product)
                words[0, j], words[1, j] = low, high

    @cute.jit
    def scatter(self, data, tiles, words, turn, slot, first, last, current, following, at):
        """Store the coefficients of a turn into their tile; those that were not loaded ahead are loaded now."""
        unit, _, product = self.locate(turn, current, following)
        tile = tiles + slot * TILE_VALUES
        for j in range_constexpr(AHEAD):
            # no branch: products stand between these instructions
            here = first + at.thread + THREADS * j
            self.scatter_coefficient(data, tile, unit.part, words[0, j], words[1, j], here < last)
        if first + THREADS * AHEAD < last:
            for here in cutlass.range(first + at.thread + THREADS * AHEAD, last, THREADS, unroll=1):
                low, high = self.load_coefficient(data, here, product)
                self.scatter_coefficient(data, tile, unit.part, low, high, here < last)

    @cute.jit
    def store_coefficient(self, tile, index: Uint32, bits: Uint32, valid: Boolean):
        """Store the low 16 bits at row `index` / 64, column `index` % 64, without a branch."""
        store_half(tile + Int32(swizzle_column(index >> 6, index)), bits, valid)

    @cute.jit
    def clear_tile(self, tiles, slot, at):
        """Fill a tile of coefficients with zeros."""
        zeros = cute.make_rmem_tensor((4,), Uint32)
        zeros.fill(0)
        line = cute.recast_ptr((tiles + (slot * TILE_VALUES + at.thread * 8)).align(16), dtype=Uint32)
        for i in range_constexpr(TILE_VALUES // (8 * THREADS)):
            cute.autovec_copy(zeros, cute.make_tensor(line + i * (4 * THREADS), cute.make_layout(4)))

    # ---- products ----

    @cute.jit
    def load_fragments(self, f, tiles, ring, slot, block: cutlass.Constexpr, at):
        """Load the fragments of 16 positions of a turn.

        Matrices of A: rows 0-7 and 8-15 of positions 0-7, then of positions 8-15. Of B, transposed: positions 0-7 and
        8-15 of columns 0-7, then of columns 8-15.
        """
        row = fragment_row(at.warp_m, 0) + (at.lane & 15)
        a = tiles + (slot * TILE_VALUES + row * TURN + swizzle_piece(row, 2 * block + (at.lane >> 4)))
        for i in range_constexpr(M_FRAGS):
            four = load_matrices(a + fragment_row(0, i) * TURN)
            for j in range_constexpr(4):
                f.rA[j, i, block % 2] = four[j]
        position, piece = at.lane & 15, at.lane >> 4
        b = ring + ((2 * slot + block // 2) * STAGE_VALUES + (block % 2 * 16 + position) * TILE_N)
        b = b + at.warp_n * (8 * N_FRAGS)
        for i in range_constexpr(N_FRAGS // 2):
            four = load_matrices_transposed(b + swizzle_piece(position, 2 * i + piece))
            for j in range_constexpr(4):
                f.rB[j % 2, 2 * i + j // 2, block % 2] = four[j]


@cute.jit
def store_rounded(
    acc: Any, i: cutlass.Constexpr, h: cutlass.Constexpr, row: Any, left: Int32, lane: Int32, dtype: cutlass.Constexpr
) -> None:
    """Round rows 16 i + 8 h + g of a warp's sums and store them at `row`, which has `left` columns."""
    store_pairs([pack(acc[2 * h, v, i], acc[2 * h + 1, v, i], dtype) for v in range(N_FRAGS)], row, left, lane)
