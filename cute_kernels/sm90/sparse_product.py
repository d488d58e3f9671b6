"""Main loop of sparse times dense: rows named by a list, gathered into shared memory, times scattered coefficients.

Rows are copied by cp.async, 16 bytes per thread: listed rows are anywhere in memory, so no tensor copy covers two of
them, and a bulk copy of a row cannot apply the swizzle.

    FULL[s]    128 fill threads arrive when their copies of the stage are complete and fenced.
    EMPTY[s]   8 mma warps arrive.
    TILE + g   128 threads of group g, once per turn: its tile of coefficients is filled, the next tile is clear.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from .. import feasible
from ..common.copies import copy_async, store_half, store_pairs
from ..common.lists import Lists
from ..common.sums import add_flushed, flush_sums
from ..common.swizzle import swizzle_column, swizzle_piece
from ..common.values import pack
from .ring import release

# one warp group gathers, two multiply
THREADS, GROUP_THREADS, MMA_WARPS = 384, 128, 8
REGISTERS_FILL, REGISTERS_MMA = 88, 208
feasible.check_register_split((REGISTERS_FILL, REGISTERS_MMA, REGISTERS_MMA))
# list positions of a turn of the main loop, and stages of 64 rows in the ring
TURN, STAGES = 128, 4
# first of the named barriers of the two multiplying warp groups
TILE_BARRIER = 1
# coefficients that a thread loads one turn ahead, and the part of them that most turns need
AHEAD, FEW = 8, 4
# earlier stages whose copies may be in flight while those of a stage are issued
IN_FLIGHT = 1


@cute.jit
def gather_columns(
    stage: Any, matrix: Any, rows: Any, column: Int32, thread: Int32, panels: cutlass.Constexpr = 4
) -> None:
    """Copy 64 * `panels` columns from `column` on of 64 rows into swizzled panels of 64 columns, by 128 threads.

    A panel is an MN-major or a K-major operand. Eight threads share a row: thread t copies piece t % 8 of each panel of
    rows t / 8 + 16 j, whose indices are in `rows`. Columns beyond the last become zero. Row offsets are 32-bit, in
    units of 16 bytes: 64 GB.
    """
    slot, piece = thread // 8, thread % 8
    target = stage + (slot * 64 + swizzle_piece(slot, piece))
    pitch = Uint32(matrix.stride[0] // 8)
    sizes = [Int32(16) if column + 64 * i + piece * 8 < matrix.shape[1] else Int32(0) for i in range(panels)]
    # an address of which nothing is read need only be valid
    first = column if sizes[0] > 0 else 0
    base = matrix.iterator + Int64(first + piece * 8 if sizes[0] > 0 else 0)
    for j in range_constexpr(4):
        row = base + (Uint32(rows[j]) * pitch).to(Int64) * 8
        for i in range_constexpr(panels):
            copy_async(target + (i * (64 * 64) + j * (16 * 64)), row + 64 * i, sizes[i])


@cute.jit
def store_coefficient(tile: Any, index: Uint32, bits: Uint32, valid: Boolean) -> None:
    """Store the low 16 bits at row `index` / 64 % 64, column `index` % 64 of 64 K-major rows, without a branch."""
    store_half(tile + Int32(swizzle_column(index >> 6, index & Uint32(0xFFF))), bits, valid)


class Turn(NamedTuple):
    """One iteration of the main loop: one product at the 128 list positions from chunk `chunk` on."""

    unit: Any
    chunk: Any
    product: Any
    first: Any  # index of the first coefficient
    middle: Any  # that of the second chunk's first
    last: Any  # end of the second chunk's


class List(NamedTuple):
    """A unit's list; each lane holds the bounds of two chunks' coefficients."""

    tile: Any
    part: Any
    length: Any
    base: Any  # where the list begins
    begin: Any
    middle: Any
    end: Any


class MmaGroup(NamedTuple):
    """A thread of one of the two multiplying warp groups, and the buffers of its group."""

    ring: Any
    tiles: Any  # coefficients, in shared memory
    ahead: Any  # the next turn's coefficients, in registers
    data: Any
    half: Any  # index of the group
    thread: Any  # index in the group
    lane: Any


class Walk(NamedTuple):
    """State of an mma group's main loop."""

    state: Any  # stage of the ring
    slot: Any  # index of one of the three tiles
    ahead: Any  # the next turn


class SparseProduct(Lists):
    """Warp roles of a kernel that multiplies sparse tiles by the rows that their lists name.

    A unit of work is a tile of sparse rows and a part of the columns; units with the longest lists come first. A turn
    of the main loop handles 128 positions of a list, for one of `products` products. 128 threads gather rows into a
    ring of STAGES of 64 rows, two stages per turn. Each of two warp groups scatters its own 64 rows of coefficients
    into one of three tiles while the previous WGMMA runs: a turn fills the tile of the next turn and clears that of the
    turn after it. The list of a unit is loaded during the unit before, rows and coefficients one turn before their use.
    After `longest` positions the sums of a unit are flushed.

    A kernel defines the methods below. Its operands, `data`, include `units`, their number, and `flushed`, the memory
    of flushed sums.
    """

    # of the ring, and 16-bit values of each
    stages, stage_values = STAGES, 256 * 64

    gather: Any  # (data, stage, part, rows, product, thread): copy a part of the columns of 64 rows into a stage
    # (data, tile, part, half, low, high, valid): store what `load_coefficient` returned into group `half`'s tile
    scatter_coefficient: Any
    multiply_unit: Any  # (g, fragments, walk, tile, part, length, long): main loop and epilogue; returns the walk

    def make_ahead(self) -> Any:
        """Registers of the group that gathers for `load_ahead`."""

    def load_ahead(self, data, ahead, turn, thread):
        """Load what else the group that gathers needs of a turn."""

    def fill_panel(self, data, panels, stage, ahead, turn, second, thread):
        """Fill the rest of a stage while its rows are copied."""

    @cute.jit
    def fill(self, ring, shared, data, thread: Int32):
        """Gather 64 rows per stage; 128 threads arrive at its full barrier when their copies are complete.

        cp.async writes by the generic proxy, WGMMA reads by the async proxy: the fence between them is here.
        """
        lane = thread & 31
        rows, ahead = cute.make_rmem_tensor((4, 2), Int32), self.make_ahead()
        turn, current, following = self.first_turn(data, lane)
        self.load_row_indices(data, rows, turn, current, thread)
        self.load_ahead(data, ahead, turn, thread)
        stage, phase, done, in_flight = Int32(0), Int32(1), Int32(0), Int32(0)
        while turn.unit < data.units:
            for second in range_constexpr(2):
                if turn.chunk * 64 + 64 * second < current.length:
                    cute.arch.mbarrier_wait(ring.empty + stage, phase)
                    target = shared.sB.data_ptr() + stage * self.stage_values
                    self.gather(data, target, current.part, rows[None, second], turn.product, thread)
                    cute.arch.cp_async_commit_group()
                    self.fill_panel(data, shared.sA.data_ptr(), stage, ahead, turn, second, thread)
                    stage += 1
                    if stage == self.stages:
                        stage = Int32(0)
                        phase = phase ^ 1
                    if in_flight == IN_FLIGHT:
                        cute.arch.cp_async_wait_group(IN_FLIGHT)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        cute.arch.mbarrier_arrive(ring.full + done)
                        done = done + 1 if done + 1 < self.stages else 0
                    else:
                        in_flight += 1
            turn, current, following = self.next_turn(data, turn, current, following, lane)
            self.load_row_indices(data, rows, turn, current, thread)
            self.load_ahead(data, ahead, turn, thread)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        while in_flight > 0:
            cute.arch.mbarrier_arrive(ring.full + done)
            done = done + 1 if done + 1 < self.stages else 0
            in_flight -= 1

    @cute.jit
    def load_row_indices(self, data, rows: cute.Tensor, turn: Turn, current: List, thread: Int32):
        if current.length > 0:
            for second in range_constexpr(2):
                for j in range_constexpr(4):
                    # beyond the list the last row again: its coefficients there are zero
                    at = turn.chunk * 64 + second * 64 + thread // 8 + 16 * j
                    rows[j, second] = self.row_index(data, current.base + cutlass.min(at, current.length - 1))

    # ---- the warp groups that multiply ----

    @cute.jit
    def multiply_units(self, ring, tiles, data, fragments, thread: Int32, long: cutlass.Constexpr):
        """Multiply all units of the CTA, by 256 threads; `fragments` are the kernel's."""
        half = cute.arch.make_warp_uniform(thread // 128)
        ahead = cute.make_rmem_tensor((2, AHEAD), Uint32)
        g = MmaGroup(ring, tiles, ahead, data, half, thread & 127, cute.arch.lane_idx())
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        unit = Int32(cute.arch.block_idx()[0])
        walk = Walk(state, Int32(0), self.prepare_tiles(g))
        tile, part = self.tile_and_part(data, unit)
        length, _ = self.list_extent(data, tile)
        while unit < data.units:
            unit = self.unit_after(unit)
            next_tile, next_part = self.tile_and_part(data, unit) if unit < data.units else (tile, part)
            next_length, _ = self.list_extent(data, next_tile)
            walk = self.multiply_unit(g, fragments, walk, tile, part, length, long)
            tile, part, length = next_tile, next_part, next_length

    @cute.jit
    def multiply_list(self, mma: cute.TiledMma, factors, g: MmaGroup, walk: Walk, length, long: cutlass.Constexpr):
        """Add the products of a unit's whole list to its sums; return the walk behind it.

        `factors`: fragments of A and B and the sums. `long`: lists may have more than `longest` positions. Then the
        compiler no longer keeps loop counters in uniform registers, and the kernel takes a tenth longer.
        """
        state, slot, ahead = walk
        read = state.clone()
        turns, longest = cute.ceil_div(length, TURN) * self.products, self.longest // TURN
        for k in cutlass.range(turns, unroll=1):
            left = length - k // self.products * TURN
            if const_expr(long):
                if k > 0 and k % longest == 0:
                    warpgroup.wait_group(0)
                    flush_sums(factors[2], g.data.flushed, k == longest)
            cute.arch.barrier(barrier_id=TILE_BARRIER + g.half, number_of_threads=GROUP_THREADS)
            cute.arch.mbarrier_wait(g.ring.full + state.index, state.phase)
            self.multiply(mma, factors, 2 * slot + g.half, state.index, 0)
            state.advance()
            warpgroup.wait_group(1)
            if k > 0:
                read = release(g.ring, read, g.lane)
            if left > 64:
                cute.arch.mbarrier_wait(g.ring.full + state.index, state.phase)
                self.multiply(mma, factors, 2 * slot + g.half, state.index, 1)
                state.advance()
            # while the tensor cores work
            ahead = self.fill_tile(g, ahead)
            if left > 64:
                warpgroup.wait_group(1)
                read = release(g.ring, read, g.lane)
            self.clear_tile(g, slot - 1 if slot > 0 else 2)
            slot = slot + 1 if slot < 2 else 0
        warpgroup.wait_group(0)
        if turns > 0:
            read = release(g.ring, read, g.lane)
        if const_expr(long):
            if turns > longest:
                add_flushed(factors[2], g.data.flushed)
        return Walk(state, slot, ahead)

    @cute.jit
    def multiply(self, mma: cute.TiledMma, factors, tile: Int32, stage: Int32, second: cutlass.Constexpr):
        """Sums += half a tile of coefficients times a stage of rows."""
        rA, rB, acc = factors
        warpgroup.fence()
        for i in range_constexpr(4):
            block = 4 * second + i
            cute.gemm(mma, acc, rA[None, None, block, tile], rB[None, None, i, stage], acc)
        warpgroup.commit_group()

    # ---- an mma group's coefficients ----

    @cute.jit
    def prepare_tiles(self, g: MmaGroup):
        """Fill the first turn's tile, clear the others, and load the second turn's coefficients."""
        turn, current, following = self.first_turn(g.data, g.thread & 31)
        self.load_coefficients(g, turn, turn.first)
        for slot in range_constexpr(3):
            self.clear_tile(g, slot)
        cute.arch.barrier(barrier_id=TILE_BARRIER + g.half, number_of_threads=GROUP_THREADS)
        return self.fill_tile(g, (turn, current, following, Int32(0)))

    @cute.jit
    def fill_tile(self, g: MmaGroup, ahead):
        """Scatter the coefficients of the turn `ahead`, and load those of the turn after it."""
        turn, current, following, slot = ahead
        tile = self.tile_address(g, slot)
        at = turn.first
        self.scatter_coefficients(g, tile, turn, current, at)
        while at + GROUP_THREADS * AHEAD < turn.last:
            at += GROUP_THREADS * AHEAD
            self.load_coefficients(g, turn, at)
            self.scatter_coefficients(g, tile, turn, current, at)
        cute.arch.fence_proxy("async.shared", space="cta")
        turn, current, following = self.next_turn(g.data, turn, current, following, g.thread & 31)
        self.load_coefficients(g, turn, turn.first)
        slot = slot + 1 if slot < 2 else 0
        return turn, current, following, slot

    @cute.jit
    def scatter_coefficients(self, g: MmaGroup, tile, turn: Turn, current: List, at: Int32):
        for few in range_constexpr(AHEAD // FEW):
            # most turns have few
            if at + GROUP_THREADS * FEW * few < turn.last:
                for j in range_constexpr(FEW * few, FEW * few + FEW):
                    here = at + g.thread + GROUP_THREADS * j
                    panel = tile + (64 * 64 if here >= turn.middle else 0)
                    low, high = g.ahead[0, j], g.ahead[1, j]
                    self.scatter_coefficient(g.data, panel, current.part, g.half, low, high, here < turn.last)

    @cute.jit
    def load_coefficients(self, g: MmaGroup, turn: Turn, at: Int32):
        for few in range_constexpr(AHEAD // FEW):
            if at + GROUP_THREADS * FEW * few < turn.last:
                for j in range_constexpr(FEW * few, FEW * few + FEW):
                    here = at + g.thread + GROUP_THREADS * j
                    if here < turn.last:
                        low, high = self.load_coefficient(g.data, here, turn.product)
                        g.ahead[0, j], g.ahead[1, j] = low, high

    def tile_address(self, g, slot):
        """Address of a group's tile, 64 rows of 128 list positions: two panels of 64."""
        return g.tiles + (slot * 2 + g.half) * (64 * 128)

    @cute.jit
    def clear_tile(self, g: MmaGroup, slot):
        """Fill a group's tile with zeros."""
        zeros = cute.make_rmem_tensor((4,), Uint32)
        zeros.fill(0)
        line = cute.recast_ptr((self.tile_address(g, slot) + g.thread * 8).align(16), dtype=Uint32)
        for i in range_constexpr(64 * 128 // (8 * GROUP_THREADS)):
            cute.autovec_copy(zeros, cute.make_tensor(line + i * (4 * GROUP_THREADS), cute.make_layout(4)))

    # ---- the order of turns ----

    @cute.jit
    def first_turn(self, data, lane: Int32):
        unit = Int32(cute.arch.block_idx()[0])
        turn = Turn(unit, Int32(-2), Int32(self.products - 1), Int32(0), Int32(0), Int32(0))
        current = self.load_list(data, unit, lane)
        following = self.load_list(data, self.unit_after(unit), lane)
        return self.next_turn(data, turn, current, following, lane)

    @cute.jit
    def load_list(self, data, unit: Int32, lane: Int32):
        """The list of a unit, with the bounds of the coefficients of its first 64 chunks, two per lane."""
        tile, part, length, base = Int32(0), Int32(0), Int32(0), Int32(0)
        begin, middle, end = Int32(0), Int32(0), Int32(0)
        if unit < data.units:
            tile, part = self.tile_and_part(data, unit)
            length, base = self.list_extent(data, tile)
            begin, middle, end = self.bounds(data, tile, length, 2 * lane)
        return List(tile, part, length, base, begin, middle, end)

    def bounds(self, data, tile, length, chunk):
        """Where the coefficients of two chunks begin and end; no bound is stored beyond the end of the list."""
        chunks = (length + 63) >> 6
        return [self.chunk_start(data, tile, cutlass.min(chunk + i, chunks)) for i in range(3)]

    @cute.jit
    def next_turn(self, data, turn: Turn, current: List, following: List, lane: Int32):
        """The next turn, the list of its unit, and the list of the unit after."""
        unit, chunk, product, _, _, _ = turn
        tile, part, length, base, begin, middle, end = current
        product += 1
        if product == self.products:
            product = Int32(0)
            chunk += 2
            while unit < data.units and chunk * 64 >= length:
                unit = self.unit_after(unit)
                chunk = Int32(0)
                tile, part, length, base, begin, middle, end = following
                following = self.load_list(data, self.unit_after(unit), lane)
            if chunk > 0 and chunk & 63 == 0:
                begin, middle, end = self.bounds(data, tile, length, chunk + 2 * lane)
        source = (chunk & 63) >> 1
        first, between = cute.arch.shuffle_sync(begin, source), cute.arch.shuffle_sync(middle, source)
        last = cute.arch.shuffle_sync(end, source)
        turn = Turn(unit, chunk, product, first, between, last)
        return turn, List(tile, part, length, base, begin, middle, end), following


@cute.jit
def store_rounded(
    acc, i: cutlass.Constexpr, columns: cutlass.Constexpr, row, left: Int32, lane: Int32, dtype: cutlass.Constexpr
) -> None:
    """Round rows g + 8 i of a warp's WGMMA sums [16, columns] and store them at `row`, which has `left` columns."""
    pairs = [pack(acc[(0, i, v), 0, 0], acc[(1, i, v), 0, 0], dtype) for v in range(columns // 8)]
    store_pairs(pairs, row, left, lane)
