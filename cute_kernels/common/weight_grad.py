"""Weight gradients by tiles of 64 neurons of similar popularity: dw_gate = d_gate^T x, dw_up = d_up^T x,
dw_down = h^T dy, over the tokens that fire at least one of the tile's neurons: the operands, the units of work and the
coefficients, for the kernels of all families.

A unit of work is a piece of a neuron tile's list of tokens, and a slab of 256 columns of x or dy; its inner dimension
is the piece. With biases a piece has one more unit: their gradients are products with ones in place of rows. The
longest pieces come first. Popular neurons have long lists, which are cut into pieces of equal length. It follows from
all lists and from K, not from the GPU. The sums of such a piece are stored in fp32, and the last warp to store its part
of a list adds those of all pieces in their order: who is last makes no difference. Sums are flushed after `longest`
list positions.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, Uint64, const_expr, range_constexpr

from .. import geometry
from . import operands
from .copies import aligned
from .mma import clear
from .values import widen

TILE_M, TILE_N = geometry.NEURON_TILE, geometry.SLAB
# Most pieces that are sorted, else no list is cut. A piece is the tile of its list, and its index there times 1024.
PIECES, TILE_BITS = 768, 10
# pieces of a list
MOST_PIECES = 1 << (16 - TILE_BITS)
# positions of which a piece is a multiple, and its length if no list is cut
QUANTUM, WHOLE = 128, (1 << 31) - 1
# threads that hold sums
SUM_THREADS = 32 * geometry.UNIT_WARPS


class Operands(NamedTuple):
    """Operands in global memory, None if absent, and the number of slabs and units."""

    x: Any
    dy: Any
    order: Any
    sizes: Any
    tiles: Any
    starts: Any
    packed: Any
    tokens: Any
    dw_gate: Any
    dw_up: Any
    dw_down: Any
    db_gate: Any
    db_up: Any
    main_gate: Any  # fp32 sums that the gradients are added to; empty: they are stored instead
    main_up: Any
    main_down: Any
    flushed: Any  # partial sums of long lists
    partial: Any  # sums of pieces of lists, empty if none may be cut
    arrivals: Any  # zeros: pieces that are stored, by list, part and warp
    slabs: Any
    first_dy: Any  # the first part of dy: parts are the slabs of x, one of ones if there are biases, and those of dy
    units: Any
    pieces: Any = None  # in shared memory: list and index of each piece, the longest first
    piece: Any = None  # positions of a piece


class WeightGradForm:
    """For one dtype, gated or not; sizes stay symbolic. Empty gradients of biases stand for none."""

    products = 1
    # methods of a family's kernel
    launch: Any  # (data, capacity, max_ctas, stream)
    has_all_sums: Any  # (data, part): whether a thread has all of its sums in a unit of this part, else the first half

    def __init__(self, spec: Any):
        self.dtype = operands.DTYPES[spec.dtype]
        self.gated = spec.gated
        self.longest = geometry.LONGEST_SUM[spec.dtype]

    @cute.jit
    def __call__(self, *arguments: Any):
        """The operands up to the arrivals, the capacity, the number of CTAs and the stream."""
        *given, capacity, max_ctas, stream = arguments
        slabs = cute.ceil_div(given[0].shape[1], TILE_N)
        data = Operands(*[*given, slabs, slabs, Int32(0)])
        data = data._replace(first_dy=slabs + Int32(data.db_gate.shape[0] > 0))
        units = cute.ceil_div(data.order.shape[0], TILE_M) * self.parts(data)
        self.launch(data._replace(units=units), capacity, max_ctas, stream)

    def parts(self, data):
        """Units of a neuron tile."""
        return data.slabs + data.first_dy

    @cute.jit
    def tile_and_part(self, data: Operands, unit: Int32):
        """Neuron tile and part."""
        parts = self.parts(data)
        tile = unit // parts
        return tile, unit - tile * parts

    @cute.jit
    def list_extent(self, data: Operands, rank: Int32):
        tile, index = self.piece_at(data, rank)
        first = index * data.piece
        return cutlass.min(data.tiles[tile, 3] - first, data.piece), data.tiles[tile, 1] + first

    @cute.jit
    def chunk_start(self, data: Operands, rank: Int32, chunk: Int32):
        tile, index = self.piece_at(data, rank)
        return data.starts[tile, index * (data.piece // geometry.CHUNK) + chunk]

    @cute.jit
    def row_index(self, data: Operands, at: Int32):
        return data.tokens[at]

    @cute.jit
    def load_coefficient(self, data: Operands, at: Int32, product: Int32):
        word = Uint64(data.packed[at])
        return Uint32(word & Uint64(0xFFFFFFFF)), Uint32(word >> 32)

    # ---- pieces of lists ----

    @cute.jit
    def cut_lists(self, data: Operands, pieces: cute.Tensor, numbers, scratch, threads: cutlass.Constexpr, thread):
        """Cut long lists and sort the pieces by length; returns `data` with them, for the whole CTA.

        `pieces` and `numbers`, of a piece's positions and of pieces, stay in shared memory, `scratch` does not. Whole
        pieces come first, by tiles. What is left of each list, or a list that is not cut, follows: its rank is the
        number of longer ones.
        """
        tiles, lane = data.tiles.shape[0], thread & 31
        lists = cute.make_tensor(cute.recast_ptr(scratch, dtype=Int32), cute.make_layout((PIECES, 3)))
        if tiles <= PIECES:
            for i in cutlass.range(thread, tiles, threads, unroll=1):
                lists[i, 0] = data.tiles[i, 3]
        cute.arch.sync_threads()
        total, longest = Int32(0), Int32(0)
        wanted = cutlass.max(geometry.CUT_UNITS // (2 * data.slabs), 1)
        if tiles <= PIECES:
            for i in cutlass.range(lane, tiles, 32, unroll=1):
                total += lists[i, 0]
                longest = cutlass.max(longest, lists[i, 0])
        total = Int32(cute.arch.warp_redux_sync(total, "add"))
        longest = Int32(cute.arch.warp_redux_sync(longest, "max"))
        piece = cutlass.max(cute.ceil_div(total, wanted), cute.ceil_div(longest, MOST_PIECES))
        piece = cute.ceil_div(cutlass.max(piece, Int32(geometry.LEAST_PIECE)), QUANTUM) * QUANTUM
        if (data.partial.shape[0] == 0) | (tiles + 2 * wanted > PIECES):
            piece = Int32(WHOLE)
        if tiles <= PIECES:
            for i in cutlass.range(thread, tiles, threads, unroll=1):
                whole = lists[i, 0] // piece
                left = lists[i, 0] - whole * piece
                # an empty list has one piece
                lists[i, 1], lists[i, 2] = whole, left if left > 0 or whole == 0 else Int32(-1)
        cute.arch.sync_threads()
        if tiles <= PIECES:
            for i in cutlass.range(thread, tiles, threads, unroll=1):
                whole, left = lists[i, 1], lists[i, 2]
                before, all_whole, longer, others = Int32(0), Int32(0), Int32(0), Int32(0)
                for j in cutlass.range(tiles, unroll=4):
                    number, other = lists[j, 1], lists[j, 2]
                    before += number if j < i else 0
                    all_whole += number
                    longer += Int32((other > left) | ((other == left) & (j < i)))
                    others += Int32(other >= 0)
                for index in cutlass.range(whole, unroll=1):
                    pieces[before + index] = Uint16(i | index << TILE_BITS)
                if left >= 0:
                    pieces[all_whole + longer] = Uint16(i | whole << TILE_BITS)
                if i == 0:
                    numbers[0], numbers[1] = piece, all_whole + others
        elif thread == 0:
            numbers[0], numbers[1] = Int32(WHOLE), tiles
        cute.arch.sync_threads()
        piece, units = (cute.arch.make_warp_uniform(numbers[i]) for i in range(2))
        return data._replace(pieces=pieces, piece=piece, units=units * self.parts(data))

    @cute.jit
    def piece_at(self, data: Operands, rank: Int32):
        """The tile of the list of a piece, and the piece's index in it."""
        tile, index = rank, Int32(0)
        if data.tiles.shape[0] <= PIECES:
            word = cute.arch.make_warp_uniform(widen(data.pieces[rank]))
            tile, index = word & ((1 << TILE_BITS) - 1), word >> TILE_BITS
        return tile, index

    @cute.jit
    def is_cut(self, data: Operands, rank: Int32):
        """Whether the list of a piece has others."""
        tile, _ = self.piece_at(data, rank)
        return data.tiles[tile, 3] > data.piece

    @cute.jit
    def join(self, data: Operands, sums: cute.Tensor, rank: Int32, part: Int32, thread: Int32):
        """Store a thread's sums of a piece. The last warp to do so for its part of a list adds those of all pieces.

        Returns whether this is the last one. `thread` is the index among those that hold sums; all lanes of a warp must
        take part.
        """
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(thread // 32)
        tile, index = self.piece_at(data, rank)
        parts, first = self.parts(data), Int32(0)
        # pieces of the lists before that are cut
        for j in cutlass.range(lane, tile, 32, unroll=1):
            other = data.tiles[j, 3]
            first += cute.ceil_div(other, data.piece) if other > data.piece else 0
        first = Int32(cute.arch.warp_redux_sync(first, "add"))
        pieces = cute.ceil_div(data.tiles[tile, 3], data.piece)
        self.copy_sums(data, sums, (first + index) * parts, part, thread, False)
        cute.arch.sync_warp()
        arrived = Int32(0)
        if lane == 0:
            counter = data.arrivals.iterator + ((first * parts + part) * geometry.UNIT_WARPS + warp)
            arrived = Int32(cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu"))
        last = cute.arch.shuffle_sync(arrived, 0) == pieces - 1
        if last:
            cute.arch.fence_acq_rel_gpu()
            clear(sums)
            for p in cutlass.range(pieces, unroll=1):
                self.copy_sums(data, sums, (first + p) * parts, part, thread, True)
        return last

    @cute.jit
    def copy_sums(self, data: Operands, sums: cute.Tensor, unit: Int32, part, thread, add: cutlass.Constexpr):
        """Store a thread's sums in the memory of unit `unit` + `part`, or add those there to them."""
        base = data.partial.iterator + (Int64(unit + part) * geometry.UNIT_SUMS + thread * 4)
        half = cute.size(sums) // 2
        self.copy_values(base, sums, 0, half, add)
        if self.has_all_sums(data, part):
            self.copy_values(base, sums, half, 2 * half, add)

    @cute.jit
    def copy_values(self, base, sums, first: cutlass.Constexpr, last: cutlass.Constexpr, add: cutlass.Constexpr):
        """The same for some of them."""
        flat = cute.make_tensor(sums.iterator, cute.make_layout(cute.size(sums)))
        four = cute.make_rmem_tensor((4,), Float32)
        for i in range_constexpr(first, last, 4):
            memory = aligned(base + i * SUM_THREADS, 4)
            if const_expr(add):
                cute.autovec_copy(memory, four)
                for j in range_constexpr(4):
                    flat[i + j] += four[j]
            else:
                for j in range_constexpr(4):
                    four[j] = flat[i + j]
                cute.autovec_copy(four, memory)


def arguments(spec: Any) -> tuple[Any, ...]:
    """The fake arguments that stand for the operands."""
    dtype = operands.DTYPES[spec.dtype]
    m, n, k, p = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8), cute.sym_int32()
    r = cute.sym_int32()
    # either gradients or sums are empty
    stored, added = cute.sym_int32(), cute.sym_int32()
    return (
        operands.rows(dtype, m, k),
        operands.rows(dtype, m, k),
        operands.dense(Int32, n),
        operands.dense(Int32, cute.sym_int32(), align=4),
        operands.dense(Int32, r, 5, align=4),
        operands.dense(Int32, r, cute.sym_int32(), align=4),
        operands.dense(Int64, p),
        operands.dense(Int32, p),
        operands.rows(dtype, stored, k),
        operands.rows(dtype, stored, k) if spec.gated else None,
        operands.rows(dtype, stored, k),
        operands.bias(dtype),
        operands.bias(dtype) if spec.gated else None,
        operands.rows(Float32, added, k),
        operands.rows(Float32, added, k) if spec.gated else None,
        operands.rows(Float32, added, k),
        operands.dense(Float32, cute.sym_int32()),
        operands.dense(Float32, cute.sym_int32()),
        operands.dense(Int32, cute.sym_int32()),
        *(Int32(1),) * 2,
    )
