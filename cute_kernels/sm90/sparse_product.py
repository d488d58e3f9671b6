"""Rows that a list names, brought into swizzled shared memory as WGMMA reads it, times scattered coefficients.

cp.async, 16 bytes a thread: rows of a list lie anywhere in memory, so no tensor copy covers two of them, and a copy of
a whole row could not apply the swizzle.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from .. import feasible
from .copies import store_values
from .ring import release
from .sums import set_aside, take_back
from .swizzle import swizzle_column, swizzle_piece
from .values import pack

# one group gathers, two multiply
THREADS, GROUP_THREADS, MMA_WARPS = 384, 128, 8
REGISTERS_FILL, REGISTERS_MMA = 88, 208
feasible.check_register_split((REGISTERS_FILL, REGISTERS_MMA, REGISTERS_MMA))
# places of a list in a turn, and stages of 64 rows in the ring
TURN, STAGES = 128, 4
# named barriers of the two warp groups
TILE_BARRIER = 1
# coefficients that a thread loads a turn ahead
AHEAD, FEW = 8, 4
# stages whose copies are under way while the next is started
FLYING = 1


@cute.jit
def copy_async(target: Any, source: Any, size: Int32) -> None:
    """16 bytes from global to shared memory, not through L1; `size` of them are read, the rest is zero."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, size]
    )


@cute.jit
def gather_columns(stage: Any, matrix: Any, rows: Any, column: Int32, thread: Int32) -> None:
    """256 columns from `column` on of 64 rows into an MN-major stage [256, 64], by 128 threads.

    Eight threads share a row: thread t copies the sixteen bytes t % 8 of each panel of 64 columns of the rows
    t / 8 + 16 j, whose indices are `rows`. Columns that do not exist become zero. Rows are found by 32-bit offsets of
    16 bytes: 64 GB.
    """
    place, piece = thread // 8, thread % 8
    target = stage + (place * 64 + swizzle_piece(place, piece))
    pitch = Uint32(matrix.stride[0] // 8)
    sizes = [Int32(16) if column + 64 * i + piece * 8 < matrix.shape[1] else Int32(0) for i in range(4)]
    # what is not read need only be an address
    first = column if sizes[0] > 0 else 0
    base = matrix.iterator + Int64(first + piece * 8 if sizes[0] > 0 else 0)
    for j in range_constexpr(4):
        row = base + (Uint32(rows[j]) * pitch).to(Int64) * 8
        for i in range_constexpr(4):
            copy_async(target + (i * (64 * 64) + j * (16 * 64)), row + 64 * i, sizes[i])


@cute.jit
def store_coefficient(tile: Any, place: Uint32, bits: Uint32, valid: Boolean) -> None:
    """The low 16 bits to row `place` / 64 % 64 and column `place` % 64 of 64 K-major rows, without a branch."""
    target = tile + Int32(swizzle_column(place >> 6, place & Uint32(0xFFF)))
    cute.arch.inline_ptx(
        "st.shared.b16 [{$r0}], {$r1};", read_only_args=[target, Uint16(bits & Uint32(0xFFFF))], predicate=valid
    )


class Turn(NamedTuple):
    """128 places of a unit's list from chunk `chunk` on, and the range of their coefficients."""

    unit: Any
    chunk: Any
    product: Any
    first: Any
    middle: Any
    last: Any


class List(NamedTuple):
    """A unit's list, and bounds of coefficients, those of two chunks in each lane."""

    tile: Any
    part: Any
    length: Any
    base: Any
    begin: Any
    middle: Any
    end: Any


class MmaGroup(NamedTuple):
    """One of the two warp groups that multiply, and what it works with."""

    ring: Any
    tiles: Any  # coefficients, in shared memory
    words: Any  # coefficients that are loaded ahead, in registers
    data: Any
    half: Any  # which of the two
    thread: Any  # of its 128
    lane: Any


class Walk(NamedTuple):
    """Where an mma group is in its walk."""

    state: Any  # stage of the ring
    slot: Any  # of the three tiles
    ahead: Any  # the next turn


class SparseProduct:
    """A sparse tile times the rows that its list names: what the roles of such a kernel share.

    A unit of work is a tile of sparse rows and a part of the columns, the longest first. Its list is walked 128 places
    a turn, `products` turns for the same places. 128 threads gather rows into a ring of STAGES, 64 rows each, two to
    a turn. Each of two warp groups scatters its own 64 rows of coefficients into one of three tiles while the WGMMA of
    the turn before runs: a turn fills the tile of the next turn, and clears that of the turn after it. A kernel gives
    its operands, `data`, with the number of `units` and the memory where long sums are set `aside`, and

        split(data, unit)                     its tile and part
        open(data, tile)                      length of the tile's list, and where it begins
        bound(data, tile, chunk)              where those of 64 places begin; behind the last: where they end
        row(data, at)                         the list
        gather(data, stage, part, rows, product, thread)
        load(data, at, product)               a coefficient in two registers
        put(data, tile, part, half, low, high, valid)
        multiply_unit(g, fragments, walk, tile, part, length, long)

    What a unit needs is loaded while the one before it runs, rows and coefficients a turn before they are used. After
    `longest` places the sums of a unit are set aside.
    """

    products: int
    longest: int

    @cute.jit
    def fill(self, ring, sB, data, thread):
        """Gather 64 rows a stage; its full barrier takes 128 arrivals, when the copies of the stage are through.

        cp.async writes by the generic proxy and WGMMA reads by the other: the fence between them is here.
        """
        lane = thread & 31
        rows = cute.make_rmem_tensor((4, 2), Int32)
        turn, current, following = self.first_turn(data, lane)
        self.load_rows(data, rows, turn, current, thread)
        stage, phase, done, flying = Int32(0), Int32(1), Int32(0), Int32(0)
        while turn.unit < data.units:
            for second in range_constexpr(2):
                if turn.chunk * 64 + 64 * second < current.length:
                    cute.arch.mbarrier_wait(ring.empty + stage, phase)
                    target = sB + stage * (256 * 64)
                    self.gather(data, target, current.part, rows[None, second], turn.product, thread)
                    cute.arch.cp_async_commit_group()
                    stage += 1
                    if stage == STAGES:
                        stage = Int32(0)
                        phase = phase ^ 1
                    if flying == FLYING:
                        cute.arch.cp_async_wait_group(FLYING)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        cute.arch.mbarrier_arrive(ring.full + done)
                        done = done + 1 if done + 1 < STAGES else 0
                    else:
                        flying += 1
            turn, current, following = self.advance(data, turn, current, following, lane)
            self.load_rows(data, rows, turn, current, thread)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        while flying > 0:
            cute.arch.mbarrier_arrive(ring.full + done)
            done = done + 1 if done + 1 < STAGES else 0
            flying -= 1

    @cute.jit
    def load_rows(self, data, rows, turn, current, thread):
        if current.length > 0:
            for second in range_constexpr(2):
                for j in range_constexpr(4):
                    # beyond the list its last row again: the coefficients there are zero
                    at = turn.chunk * 64 + second * 64 + thread // 8 + 16 * j
                    rows[j, second] = self.row(data, current.base + cutlass.min(at, current.length - 1))

    # ---- the warp groups that multiply ----

    @cute.jit
    def multiply_units(self, ring, tiles, data, fragments, thread, long: cutlass.Constexpr):
        """What one of the 256 threads that multiply does with all units of its CTA; `fragments` are the kernel's."""
        half = cute.arch.make_warp_uniform(thread // 128)
        words = cute.make_rmem_tensor((2, AHEAD), Uint32)
        g = MmaGroup(ring, tiles, words, data, half, thread & 127, cute.arch.lane_idx())
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        unit = Int32(cute.arch.block_idx()[0])
        walk = Walk(state, Int32(0), self.first_tiles(g))
        tile, part = self.split(data, unit)
        length, _ = self.open(data, tile)
        while unit < data.units:
            unit = self.unit_after(unit)
            next_tile, next_part = self.split(data, unit) if unit < data.units else (tile, part)
            next_length, _ = self.open(data, next_tile)
            walk = self.multiply_unit(g, fragments, walk, tile, part, length, long)
            tile, part, length = next_tile, next_part, next_length

    @cute.jit
    def sum_list(self, mma: cute.TiledMma, factors, g, walk, length, long: cutlass.Constexpr):
        """Add the products of a unit's whole list to its sums; the walk goes on behind it.

        Without `long` no list has more than `longest` places. Where lists may, the compiler keeps counters of the loop
        no longer in uniform registers, and all of them take a tenth longer.
        """
        state, slot, ahead = walk
        read = state.clone()
        turns, longest = cute.ceil_div(length, TURN) * self.products, self.longest // TURN
        for k in cutlass.range(turns, unroll=1):
            left = length - k // self.products * TURN
            if const_expr(long):
                if k > 0 and k % longest == 0:
                    warpgroup.wait_group(0)
                    for i in range_constexpr(2, len(factors), 3):
                        set_aside(factors[i], g.data.aside, 128 * (i // 5), k == longest)
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
            # while the tensor cores work: the next turn's coefficients
            ahead = self.fill_tile(g, ahead)
            if left > 64:
                warpgroup.wait_group(1)
                read = release(g.ring, read, g.lane)
            self.clear(g, slot - 1 if slot > 0 else 2)
            slot = slot + 1 if slot < 2 else 0
        warpgroup.wait_group(0)
        if turns > 0:
            read = release(g.ring, read, g.lane)
        if const_expr(long):
            if turns > longest:
                for i in range_constexpr(2, len(factors), 3):
                    take_back(factors[i], g.data.aside, 128 * (i // 5))
        return Walk(state, slot, ahead)

    @cute.jit
    def multiply(self, mma: cute.TiledMma, factors, tile, stage, second: cutlass.Constexpr):
        """Sums += half a tile of coefficients times a stage of rows."""
        rA, rB, acc = factors
        warpgroup.fence()
        for i in range_constexpr(4):
            cute.gemm(mma, acc, rA[None, None, 4 * second + i, tile], rB[None, None, i, stage], acc)
        warpgroup.commit_group()

    # ---- an mma group's coefficients ----

    @cute.jit
    def first_tiles(self, g):
        """Before the first turn: its tile is filled, the next is clear, and the coefficients for that are loaded."""
        turn, current, following = self.first_turn(g.data, g.thread & 31)
        self.load_words(g, turn, turn.first)
        for slot in range_constexpr(3):
            self.clear(g, slot)
        cute.arch.barrier(barrier_id=TILE_BARRIER + g.half, number_of_threads=GROUP_THREADS)
        return self.fill_tile(g, (turn, current, following, Int32(0)))

    @cute.jit
    def fill_tile(self, g, ahead):
        """Scatter the coefficients of the turn that `ahead` is at, and load those of the turn after it."""
        turn, current, following, slot = ahead
        tile = self.tile_of(g, slot)
        at = turn.first
        self.put_words(g, tile, turn, current, at)
        while at + GROUP_THREADS * AHEAD < turn.last:
            at += GROUP_THREADS * AHEAD
            self.load_words(g, turn, at)
            self.put_words(g, tile, turn, current, at)
        cute.arch.fence_proxy("async.shared", space="cta")
        turn, current, following = self.advance(g.data, turn, current, following, g.thread & 31)
        self.load_words(g, turn, turn.first)
        slot = slot + 1 if slot < 2 else 0
        return turn, current, following, slot

    @cute.jit
    def put_words(self, g, tile, turn, current, at):
        for few in range_constexpr(AHEAD // FEW):
            # most turns have few
            if at + GROUP_THREADS * FEW * few < turn.last:
                for j in range_constexpr(FEW * few, FEW * few + FEW):
                    here = at + g.thread + GROUP_THREADS * j
                    panel = tile + (64 * 64 if here >= turn.middle else 0)
                    self.put(g.data, panel, current.part, g.half, g.words[0, j], g.words[1, j], here < turn.last)

    @cute.jit
    def load_words(self, g, turn, at):
        for few in range_constexpr(AHEAD // FEW):
            if at + GROUP_THREADS * FEW * few < turn.last:
                for j in range_constexpr(FEW * few, FEW * few + FEW):
                    here = at + g.thread + GROUP_THREADS * j
                    if here < turn.last:
                        low, high = self.load(g.data, here, turn.product)
                        g.words[0, j], g.words[1, j] = low, high

    def tile_of(self, g, slot):
        """64 rows of 128 places: two panels of 64."""
        return g.tiles + (slot * 2 + g.half) * (64 * 128)

    @cute.jit
    def clear(self, g, slot):
        """Zeros over a group's tile."""
        zeros = cute.make_rmem_tensor((4,), Uint32)
        zeros.fill(0)
        line = cute.recast_ptr((self.tile_of(g, slot) + g.thread * 8).align(16), dtype=Uint32)
        for i in range_constexpr(64 * 128 // (8 * GROUP_THREADS)):
            cute.autovec_copy(zeros, cute.make_tensor(line + i * (4 * GROUP_THREADS), cute.make_layout(4)))

    # ---- the order of turns ----

    @cute.jit
    def unit_after(self, unit):
        """The next unit of this CTA: units are dealt forth and back, so that who had the longest gets the shortest."""
        grid = Int32(cute.arch.grid_dim()[0])
        return unit + 2 * (grid - unit % grid) - 1

    @cute.jit
    def first_turn(self, data, lane):
        unit = Int32(cute.arch.block_idx()[0])
        turn = Turn(unit, Int32(-2), Int32(self.products - 1), Int32(0), Int32(0), Int32(0))
        current = self.look_up(data, unit, lane)
        following = self.look_up(data, self.unit_after(unit), lane)
        return self.advance(data, turn, current, following, lane)

    @cute.jit
    def look_up(self, data, unit, lane):
        """The list of a unit, and the bounds of the coefficients of its first 64 chunks, two a lane."""
        tile, part, length, base = Int32(0), Int32(0), Int32(0), Int32(0)
        begin, middle, end = Int32(0), Int32(0), Int32(0)
        if unit < data.units:
            tile, part = self.split(data, unit)
            length, base = self.open(data, tile)
            begin, middle, end = self.bounds(data, tile, length, 2 * lane)
        return List(tile, part, length, base, begin, middle, end)

    def bounds(self, data, tile, length, chunk):
        """Where the coefficients of two chunks begin and end. Behind the list's last chunk no bound was written."""
        chunks = (length + 63) >> 6
        return [self.bound(data, tile, cutlass.min(chunk + i, chunks)) for i in range(3)]

    @cute.jit
    def advance(self, data, turn, current, following, lane):
        """The next turn, the list of its unit, and that of the unit after."""
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
                following = self.look_up(data, self.unit_after(unit), lane)
            if chunk > 0 and chunk & 63 == 0:
                begin, middle, end = self.bounds(data, tile, length, chunk + 2 * lane)
        source = (chunk & 63) >> 1
        first, between = cute.arch.shuffle_sync(begin, source), cute.arch.shuffle_sync(middle, source)
        last = cute.arch.shuffle_sync(end, source)
        turn = Turn(unit, chunk, product, first, between, last)
        return turn, List(tile, part, length, base, begin, middle, end), following


@cute.jit
def transpose_quad(words: Any, lane: Int32) -> Any:
    """Four registers of four neighbouring lanes, transposed: register j of lane i becomes register i of lane j."""
    a, b, c, d = words
    odd, upper = lane & 1 != 0, lane & 2 != 0
    one, two = cute.arch.shuffle_sync_bfly(a if odd else b, 1), cute.arch.shuffle_sync_bfly(c if odd else d, 1)
    a, b = one if odd else a, b if odd else one
    c, d = two if odd else c, d if odd else two
    one, two = cute.arch.shuffle_sync_bfly(a if upper else c, 2), cute.arch.shuffle_sync_bfly(b if upper else d, 2)
    a, c = one if upper else a, c if upper else one
    b, d = two if upper else b, d if upper else two
    return a, b, c, d


@cute.jit
def store_rounded(
    acc: Any,
    i: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    row: Any,
    left: Int32,
    lane: Int32,
    dtype: cutlass.Constexpr,
) -> None:
    """Rows g + 8 i of a warp's WGMMA sums [16, columns], rounded, to `row`, of which `left` columns exist.

    16 bytes a lane: lane 4 g + q holds columns 8 v + 2 q and the next of row g; after a transpose it holds all eight of
    v = 4 u + q.
    """
    quad = cute.make_rmem_tensor((4,), Uint32)
    for u in range_constexpr(columns // 32):
        words = transpose_quad(
            [pack(acc[(0, i, 4 * u + v), 0, 0], acc[(1, i, 4 * u + v), 0, 0], dtype) for v in range(4)], lane
        )
        at = 32 * u + 8 * (lane & 3)
        if at < left:
            for v in range_constexpr(4):
                quad[v] = words[v]
            store_values(row + at, quad)
