"""Gate GEMM that emits TwELL, for every GPU since sm_80: the operands, the results and their order are those of
sm90/gate_pack.py.

Persistent, one CTA per SM. A CTA's tile is `tokens` tokens and 256 neurons; product.py has its main loop. The last
steps of a tile are followed by the first ones of the CTA's next tile, which arrive while this one is packed.

    pack    from the registers. Four lanes share a row of a warp's sums. A bit per value, exchanged between them, gives
            the ranks; counts of the four warps that share a token go through shared memory.

So packing needs no shared memory for gates, and the ring keeps all of it.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible, geometry
from ..common import launch, operands
from ..common.activation import above_signs
from ..common.copies import address, store_values
from ..common.mma import clear
from ..common.rows import clear_arrivals
from ..common.values import byte_sum, lowest_bit, relu_pack
from ..specs import GatePackSpec
from .product import PASS, PIECE, PIECES, STAGES, THREADS, TILE_K, TILE_N, WARPS_N, Product, thread_index, tile_of

assert TILE_N == geometry.TILE


class Operands(NamedTuple):
    """Operands in global memory; an empty `bias` stands for none."""

    x: Any
    w: Any
    bias: Any
    words: Any
    spill: Any
    stats: Any
    arrivals: Any  # counters of the next kernel, which this one zeroes
    width: Any  # words per tile
    threshold: Any  # of fatrelu, see common/activation.py


class Extent(NamedTuple):
    """Tiles by tokens and neurons, and steps of K."""

    m_tiles: Int32
    n_tiles: Int32
    k_tiles: Int32


class Place(NamedTuple):
    """A tile by tokens and neurons, and what this thread loads of it, from its first rows of x and of w on."""

    row: Any
    column: Any
    x: Any  # offset of the first row
    w: Any
    tokens: Any  # rows from the first on
    neurons: Any


class GatePack(Product):
    """For one dtype and number of tokens per tile; sizes, strides and width stay symbolic. An empty bias is none."""

    def __init__(self, spec: GatePackSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.tokens = spec.tokens
        self.set_rows(self.tokens)
        # tiles of tokens in a band
        self.group = 1024 // self.tokens

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        bias: cute.Tensor,
        words: cute.Tensor,
        spill: cute.Tensor,
        stats: cute.Tensor,
        arrivals: cute.Tensor,
        words_per_tile: Int32,
        threshold: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        @cute.struct
        class Shared:
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, STAGES * self.stage_values], 128]
            counts: cute.struct.Align[cute.struct.MemRange[Uint8, WARPS_N * self.tokens], 16]

        self.shared = feasible.check_portable_memory(Shared)
        m_tiles, n_tiles = cute.ceil_div(x.shape[0], self.tokens), cute.ceil_div(w.shape[0], TILE_N)
        # at least as many as are loaded ahead: beyond K they are zeros
        k_tiles = cutlass.max(cute.ceil_div(x.shape[1], TILE_K), Int32(STAGES))
        extent = Extent(m_tiles, n_tiles, k_tiles)
        if m_tiles * n_tiles > 0:
            self.kernel(Operands(x, w, bias, words, spill, stats, arrivals, words_per_tile, threshold), extent).launch(
                grid=(cutlass.min(m_tiles * n_tiles, max_ctas), 1, 1),
                block=(THREADS, 1, 1),
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=launch.overlaps(),
            )

    @cute.kernel
    def kernel(self, o: Operands, extent: Extent):
        at = thread_index()
        shared = SmemAllocator().allocate(self.shared)
        ring, counts = shared.ring.data_ptr(), shared.counts.data_ptr()
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()

        tile, stage = cute.arch.block_idx()[0], Int32(0)
        if tile == 0:
            clear_arrivals(o.arrivals, at.thread, THREADS)
        place = self.place_of(o, tile, at, extent)
        f = self.fragments(ring, at)
        self.begin(o, ring, f, place, stage, at)
        while tile < extent.m_tiles * extent.n_tiles:
            tile += cute.arch.grid_dim()[0]
            following = self.place_of(o, tile, at, extent)
            clear(f.acc)
            stage = self.multiply_steps(o, ring, f, place, following, extent.k_tiles, stage, at, True)
            self.pack(o, f.acc, counts, place, at)
            place = following
        cute.arch.cp_async_wait_group(0)

    # ---- load ----

    @cute.jit
    def place_of(self, o: Operands, tile: Int32, at, extent: Extent):
        """The place of a tile; after the last one a place without rows."""
        row, column = tile_of(tile, extent.m_tiles, extent.n_tiles, self.group)
        row = row if tile < extent.m_tiles * extent.n_tiles else extent.m_tiles
        column = column if tile < extent.m_tiles * extent.n_tiles else extent.n_tiles
        token, neuron = row * self.tokens + at.thread // PIECES, column * TILE_N + at.thread // PIECES
        return Place(
            row,
            column,
            Int64(token) * o.x.stride[0],
            Int64(neuron) * o.w.stride[0],
            o.x.shape[0] - token,
            o.w.shape[0] - neuron,
        )

    @cute.jit
    def load_piece(self, o: Operands, ring, place: Place, step: Int32, stage: Int32, index: cutlass.Constexpr, thread):
        from_x = index * PASS < self.tokens
        first = index * PASS if const_expr(from_x) else index * PASS - self.tokens
        matrix = o.x if const_expr(from_x) else o.w
        offset, left = (place.x, place.tokens) if const_expr(from_x) else (place.w, place.neurons)
        column = step * TILE_K + thread % PIECES * PIECE
        source = matrix.iterator + (offset + column) + Int64(matrix.stride[0]) * first
        exists = (column < matrix.shape[1]) & (first < left)
        self.copy_piece(ring, source, stage, index, exists, thread)

    # ---- pack ----

    @cute.jit
    def pack(self, o: Operands, acc: cute.Tensor, counts, place: Place, at):
        """Write words, spill and statistics of a tile. Values outside the problem count as zeros.

        Lane 4 g + q holds neurons 8 v + 2 q and 8 v + 2 q + 1 of rows 16 i + 8 h + g of its warp's part of the tile.
        """
        row, column = place.row, place.column
        first = at.warp_m * (16 * self.m_frags) + (at.lane >> 2)
        token, neuron = row * self.tokens + first, column * TILE_N + at.warp_n * (8 * self.n_frags)
        if o.bias.shape[0] > 0:
            self.add_bias(acc, o.bias, neuron, at.lane)
        self.clear_words(o, row, column, at)
        pairs = cute.make_rmem_tensor((self.n_frags, 2, self.m_frags), Uint32)
        flags = cute.make_rmem_tensor((2, 2, self.m_frags), Uint32)
        left = (o.w.shape[0] - neuron) // 8
        for i in range_constexpr(self.m_frags):
            for h in range_constexpr(2):
                for v in range_constexpr(self.n_frags):
                    pairs[v, h, i] = relu_pack(acc[2 * h, v, i], acc[2 * h + 1, v, i], self.dtype)
                exists = token + 16 * i + 8 * h < o.x.shape[0]
                count = Int32(0)
                for half in range_constexpr(2):
                    own = self.flags_of([pairs[4 * half + v, h, i] for v in range(4)], o.threshold, at.lane)
                    own = own & self.first_eights(left - 4 * half) if exists else Uint32(0)
                    for d in range_constexpr(2):
                        own = own | Uint32(cute.arch.shuffle_sync_bfly(own, 1 << d))
                    flags[half, h, i] = own
                    count += Int32(cute.arch.popc(own))
                if at.lane & 3 == 0:
                    target = counts + ((first + 16 * i + 8 * h) * WARPS_N + at.warp_n)
                    cute.make_tensor(target, cute.make_layout(1))[0] = Uint8(count)
        # counts of all warps; and zeros before words
        cute.arch.sync_threads()
        for i in range_constexpr(self.m_frags):
            for h in range_constexpr(2):
                m = token + 16 * i + 8 * h
                four = cute.make_tensor(
                    cute.recast_ptr((counts + (first + 16 * i + 8 * h) * WARPS_N).align(4), dtype=Uint32),
                    cute.make_layout(1),
                )[0]
                count = byte_sum(four)
                before = byte_sum(four & ((Uint32(1) << Uint32(8 * at.warp_n)) - 1))
                low, high = flags[0, h, i], flags[1, h, i]
                own = [pairs[v, h, i] for v in range(self.n_frags)]
                self.store_words(o, own, low, high, before, m, column, neuron, at.lane)
                if count >= o.width and m < o.x.shape[0]:
                    self.store_spill(o, own, low, high, m, neuron, at.lane)
                if at.warp_n == i % WARPS_N:
                    self.store_counts(o, count, m, column, at.lane)

    @cute.jit
    def add_bias(self, acc: cute.Tensor, bias: cute.Tensor, neuron: Int32, lane: Int32):
        """acc += bias[neuron], except for the padding of the last tile."""
        for v in range_constexpr(self.n_frags):
            for j in range_constexpr(2):
                n = neuron + 8 * v + (lane & 3) * 2 + j
                b = bias[n].to(Float32) if n < bias.shape[0] else Float32(0.0)
                for i in range_constexpr(self.m_frags):
                    for h in range_constexpr(2):
                        acc[2 * h + j, v, i] += b

    @cute.jit
    def clear_words(self, o: Operands, row: Int32, column: Int32, at):
        """Zeros for all words of the tile, 16 bytes per lane."""
        zeros = cute.make_rmem_tensor((4,), Uint32)
        zeros.fill(0)
        per_row = o.width // 4
        for i in cutlass.range(at.thread, self.tokens * per_row, THREADS, unroll=1):
            own = i // per_row
            m = row * self.tokens + own
            if m < o.x.shape[0]:
                store_values(address(o.words, m, column * o.width + (i - own * per_row) * 4), zeros)

    @cute.jit
    def flags_of(self, pairs, threshold: Int32, lane: Int32) -> Uint32:
        """Bits 8 v + 2 q + j of a word: whether value j of the lane's pair v of four is above the threshold."""
        signs = [above_signs(pair, threshold) for pair in pairs]
        # bytes 0 and 1 have j = 0 of two pairs, bytes 2 and 3 j = 1
        two = [
            ((signs[2 * i] >> 15) & Uint32(0x00010001)) | ((signs[2 * i + 1] >> 7) & Uint32(0x01000100))
            for i in range(2)
        ]
        low, high = Uint32(cute.arch.prmt(*two, 0x5410)), Uint32(cute.arch.prmt(*two, 0x7632))
        return (low | (high << 1)) << Uint32((lane & 3) * 2)

    @cute.jit
    def first_eights(self, eights: Int32) -> Uint32:
        """A mask of the first so many bytes of a word."""
        # a shift of all ones to the right was compiled to all ones here
        some = (Uint32(1) << Uint32(8 * eights)) - 1 if eights > 0 else Uint32(0)
        return some if eights < 4 else Uint32(0xFFFFFFFF)

    @cute.jit
    def store_words(self, o: Operands, pairs, low, high, before, m: Int32, column: Int32, neuron: Int32, lane: Int32):
        """Store the words of this lane's non-zeros of a row, behind those of other warps and lanes."""
        mine = Uint32(0x03030303) << Uint32((lane & 3) * 2)
        own_low, own_high = low & mine, high & mine
        while (own_low | own_high) != 0:
            upper = own_low == 0
            flags = own_high if upper else own_low
            bit = lowest_bit(flags)
            flags = flags & (flags - 1)
            own_low, own_high = own_low if upper else flags, flags if upper else own_high
            whole = high if upper else low
            rank = before + Int32(cute.arch.popc(whole & ((Uint32(1) << Uint32(bit)) - 1)))
            rank += Int32(cute.arch.popc(low)) if upper else 0
            if rank + 1 < o.width:
                v = (bit >> 3) + (4 if upper else 0)
                pair = self.select(pairs, v)
                value = pair & Uint32(0xFFFF0000) if bit & 1 != 0 else pair << 16
                word = value | Uint32(neuron + 8 * v + (bit & 7))
                cute.make_tensor(address(o.words, m, column * o.width + 1 + rank), cute.make_layout(1))[0] = Int32(word)

    @cute.jit
    def select(self, pairs, v: Int32) -> Uint32:
        """Pair `v`, without an array in local memory."""
        chosen = pairs
        for bit in range_constexpr(3):
            odd = (v >> bit) & 1 != 0
            chosen = [cutlass.select_(odd, chosen[2 * i + 1], chosen[2 * i]) for i in range(len(chosen) // 2)]
        return Uint32(chosen[0])

    @cute.jit
    def store_spill(self, o: Operands, pairs, low: Uint32, high: Uint32, m: Int32, neuron: Int32, lane: Int32):
        """Store this lane's values of a row that overflows, zero where they are not flagged."""
        for v in range_constexpr(self.n_frags):
            flags = ((low, high)[v // 4] >> Uint32(8 * (v % 4) + (lane & 3) * 2)) & 3
            mask = (flags & 1) * Uint32(0xFFFF) + (flags >> 1) * Uint32(0xFFFF0000)
            target = address(o.spill, m, neuron + 8 * v + (lane & 3) * 2)
            cute.make_tensor(cute.recast_ptr(target.align(4), dtype=Uint32), cute.make_layout(1))[0] = pairs[v] & mask

    @cute.jit
    def store_counts(self, o: Operands, count: Int32, m: Int32, column: Int32, lane: Int32):
        """Store the counts of eight tokens, and their statistics; four lanes have the same count."""
        if lane & 3 == 0 and m < o.x.shape[0]:
            o.words[m, column * o.width] = count
        overflowing = Uint32(cute.arch.vote_ballot_sync(count >= o.width))
        nonzeros = count
        for d in range_constexpr(2, 5):
            nonzeros += cute.arch.shuffle_sync_bfly(nonzeros, 1 << d)
        group = m // geometry.STATS_ROWS
        if lane < 2 and group < o.stats.shape[0] and column < o.stats.shape[1]:
            o.stats[group, column, lane] = nonzeros if lane == 0 else Int32(cute.arch.popc(overflowing)) // 4


def signature(spec: GatePackSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return GatePack(spec), (*operands.gate_pack(spec.dtype), Int32(1))
