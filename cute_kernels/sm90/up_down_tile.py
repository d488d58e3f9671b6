"""The gated up and down projections on the union of a few tokens' neurons: y = h @ w_down + b_down with
h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]), rounded to 16 bits, from TwELL in one kernel. So it is for relu; for
the other activations see common/activation.py.

A cluster of CTAs, two per SM, computes a tile of 16 tokens. Each CTA owns a part of the columns of x, w_up,
w_down and y, so it reads its part of each row of the union once. All CTAs list the same union:

    mark      each CTA marks the non-zeros of its share of the tokens in a bitmap; `union` is the OR of all bitmaps.
    list      prefix sums of the union's bits are the ranks; up to `window` neurons are listed at a time.
    scatter   each CTA sends the gates of its tokens to the CTAs that own their ranks.

Then the list is processed in groups of `group` ranks, of which each CTA owns `block`. Two kinds of warp groups:

    fill      group 0. cp.async of 64 rows and 128 columns per stage of the ring: w_up for all chunks of 64 ranks of a
              group, then w_down for the same.
    mma       group 1. For each chunk of w_up WGMMA of 64 neurons by all tokens; the CTA's partial sums go to the owners
              of the ranks (st.async). Each owner adds the sums of all CTAs in a fixed order, multiplies by the gates,
              rounds, and sends h to all CTAs. Then, for each chunk of w_down, WGMMA of the CTA's columns by all tokens.

    FULL[s]   128 fill threads arrive through cp.async.
    EMPTY[s]  4 mma warps arrive.
    X         1 arrival + bytes: the CTA's columns of x.
    PARTS     1 arrival + bytes of all CTAs' partial sums of the CTA's own ranks, once per group that has any.
    HIDDEN[c] 1 arrival + bytes of h of chunk c, once per group that has the chunk.
    MMA       128 mma threads: h has been read; y is staged.
    cluster   twice per window: all bitmaps are complete, or all gates of the window before have been read and cleared;
              all gates of the window have been sent.

The buffers of partial sums and of h need no other synchronisation: a CTA sends partial sums of the next group after it
has received all of h, so after all owners have read those of this group.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import operands
from ..common.activation import hidden
from ..common.copies import address, load_values, store_values
from ..common.rows import spilled_word
from ..common.swizzle import swizzle_piece
from ..common.values import (
    MAGNITUDE,
    high_to_float,
    low_to_float,
    lowest_bit,
    nonzero_flags,
    pack,
    prefix_sum,
    warp_sum,
    widen,
)
from ..specs import UpDownTileSpec
from .copies import load_peer_word, send_floats, send_words, store_peer_half
from .ring import open_ring, release
from .sparse_product import GROUP_THREADS, gather_columns

CHUNK = geometry.CHUNK
# columns of a stage
SLAB = 128
PANELS = SLAB // 64
STAGES = 4
THREADS = 2 * GROUP_THREADS
WARPS, MMA_WARPS = THREADS // 32, GROUP_THREADS // 32
CTAS_PER_SM = 2
TOKENS = geometry.SMALL_TILE
# ranks of a window that a CTA owns
SHARE = 64
# values between the rows of y in shared memory, so that eight rows of one column hit different banks
PAD = 8


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads."""

    MMA = 1


class Operands(NamedTuple):
    """Operands in global memory; an empty bias stands for none."""

    words: Any
    spill: Any
    w_up: Any
    w_down: Any
    b_up: Any
    b_down: Any
    y: Any
    l1: Any
    width: Any  # words of a tile of TwELL
    activation: Any  # see common/activation.py


class Thread(NamedTuple):
    """Indices of a thread, and where its CTA's part begins."""

    first: Any  # token of the tile
    rank: Any  # of the CTA in its cluster
    left: Any  # first column
    thread: Any
    warp: Any
    lane: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    ring: Any
    x_full: Any
    parts_full: Any
    hidden_full: Any  # [chunks of a group]
    sums: Any  # [WARPS] sums by warp
    totals: Any  # [MMA_WARPS] sums of |h|
    marked: Any  # [N / 32] neurons of the CTA's own tokens; overlays `hidden`
    union: Any  # [N / 32] those of all tokens of the tile
    prefix: Any  # [N / 32] neurons of the union before each word of `union`
    neurons: Any  # [window] of the list
    gates: Any  # [tokens, window / CTAs] gates of the CTA's own ranks
    parts: Any  # [CTAs, block, tokens] partial sums of the CTA's own ranks
    sX: Any
    sW: Any  # the ring as rows of w_up
    sWd: Any  # the ring as columns of w_down
    sH: Any
    stages: Any  # the ring's address
    hidden: Any  # h's address


class UpDownTile:
    """For one dtype and class of hidden sizes."""

    def __init__(self, spec: UpDownTileSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.cluster = spec.cluster
        self.columns = spec.k_max // spec.cluster
        self.spans = self.columns // SLAB
        self.group = CHUNK * min(4, self.cluster)
        self.block = self.group // self.cluster
        self.chunks = self.group // CHUNK
        # ranks of a token that a thread turns into h
        self.own = self.block * TOKENS // GROUP_THREADS
        self.window = SHARE * self.cluster
        assert CHUNK % self.block == 0
        assert self.own in (4, 8)
        assert self.window % self.group == 0

    @cute.jit
    def __call__(self, *arguments: Any):
        """x, the `Operands` and the stream."""
        x, *given, stream = arguments
        dtype, k = self.dtype, OperandMajorMode.K
        up = sm90.make_trivial_tiled_mma(dtype, dtype, k, k, Float32, (1, 1, 1), (64, TOKENS))
        down = sm90.make_trivial_tiled_mma(dtype, dtype, OperandMajorMode.MN, k, Float32, (1, 1, 1), (64, TOKENS))
        layouts = (
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, TOKENS, 64), dtype, self.columns // 64),
            sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (CHUNK, TOKENS, 64), dtype, STAGES * PANELS),
            sm90.make_smem_layout_a(LayoutEnum.COL_MAJOR, (SLAB, TOKENS, CHUNK), dtype, STAGES),
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (SLAB, TOKENS, CHUNK), dtype, self.chunks),
        )
        x_tma, x_g = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), x, cute.slice_(layouts[0], (None, None, 0)), (TOKENS, 64)
        )
        bitmap = geometry.MAX_TILE_NEURONS // 32
        # `marked` overlays h
        assert 4 * bitmap <= 2 * self.group * TOKENS
        assert TOKENS * (self.columns + PAD) <= STAGES * CHUNK * SLAB

        @cute.struct
        class Shared:
            stages: cute.struct.Align[cute.struct.MemRange[dtype, STAGES * CHUNK * SLAB], 1024]
            x: cute.struct.Align[cute.struct.MemRange[dtype, self.columns * TOKENS], 1024]
            hidden: cute.struct.Align[cute.struct.MemRange[dtype, self.group * TOKENS], 1024]
            parts: cute.struct.Align[cute.struct.MemRange[Float32, self.group * TOKENS], 16]
            gates: cute.struct.Align[cute.struct.MemRange[Uint16, TOKENS * SHARE], 16]
            neurons: cute.struct.MemRange[Uint16, self.window]
            union: cute.struct.MemRange[Uint32, bitmap]
            prefix: cute.struct.MemRange[Uint16, bitmap]
            full: cute.struct.MemRange[Int64, STAGES]
            empty: cute.struct.MemRange[Int64, STAGES]
            once: cute.struct.MemRange[Int64, 2 + self.chunks]
            sums: cute.struct.MemRange[Int32, WARPS]
            totals: cute.struct.MemRange[Float32, MMA_WARPS]

        self.shared = feasible.check_shared_memory(Shared, CTAS_PER_SM)
        o = Operands(*given)
        if o.y.shape[0] > 0:
            self.kernel(x_tma, x_g, o, up, down, *layouts).launch(
                grid=(self.cluster, cute.ceil_div(o.y.shape[0], TOKENS), 1),
                block=(THREADS, 1, 1),
                cluster=(self.cluster, 1, 1),
                min_blocks_per_mp=CTAS_PER_SM,
                preferred_smem_carveout=100,
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(
        self,
        x_tma: cute.CopyAtom,
        x_g: cute.Tensor,
        o: Operands,
        up: cute.TiledMma,
        down: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        up_layout: cute.ComposedLayout,
        down_layout: cute.ComposedLayout,
        hidden_layout: cute.ComposedLayout,
    ):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank, tile, _ = cute.arch.block_idx()
        if warp == 0:
            cpasync.prefetch_descriptor(x_tma)
        shared = SmemAllocator().allocate(self.shared)
        ring = open_ring(shared, STAGES, GROUP_THREADS, MMA_WARPS, thread)
        s = self.views(shared, ring, x_layout, up_layout, down_layout, hidden_layout)
        if thread < 2 + self.chunks:
            cute.arch.mbarrier_init(s.x_full + thread, 1)
            cute.arch.mbarrier_init_fence()
        at = Thread(tile * TOKENS, rank, rank * self.columns, thread, warp, lane)
        words = cute.ceil_div(o.w_down.shape[0], 32)
        for i in cutlass.range(thread, words, THREADS, unroll=1):
            s.marked[i] = Uint32(0)
        self.clear_gates(s, thread)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            self.load_x(s, x_tma, x_g, at)
        self.scan_tokens(o, s, Int32(0), at, at.warp, WARPS, False)
        # the bitmaps are complete, the barriers initialised and the gates cleared in all CTAs
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        size = self.unite(s, words, at)
        if warp < WARPS - MMA_WARPS:
            self.fill(o, s, size, words, at)
        else:
            self.multiply(o, s, up, down, size, words, at)

    # ---- the union of the tile's neurons ----

    @cute.jit
    def scan_tokens(self, o: Operands, s: Views, start, at, warp, warps: cutlass.Constexpr, listed: cutlass.Constexpr):
        """Mark the non-zeros of the CTA's tokens, or send their gates if they are `listed`, a warp per token."""
        own = TOKENS // self.cluster
        for t in cutlass.range(warp, own, warps, unroll=1):
            token = at.rank * own + t
            if at.first + token < o.y.shape[0]:
                self.scan_token(o, s, token, start, at, listed)

    @cute.jit
    def scan_token(self, o: Operands, s: Views, token: Int32, start: Int32, at: Thread, listed: cutlass.Constexpr):
        """Process one token's non-zeros: a tile of TwELL per lane, four words at a time."""
        m, tiles = at.first + token, o.words.shape[1] // o.width
        quad = cute.make_rmem_tensor((4,), Uint32)
        for first in cutlass.range(0, tiles, 32, unroll=1):
            tile = first + at.lane
            quad.fill(0)
            line = address(o.words, m, tile * o.width)
            if tile < tiles:
                load_values(line, quad)
            # the first word of a tile is its count
            count = Int32(quad[0])
            stored = count if count < o.width else 0
            for i in range_constexpr(1, 4):
                if i <= stored:
                    self.process_word(s, quad[i], token, start, listed)
            for q in cutlass.range(4, Int32(cute.arch.warp_redux_sync(stored, "max")) + 1, 4, unroll=1):
                if q <= stored:
                    load_values(line + q, quad)
                    for i in range_constexpr(4):
                        if q + i <= stored:
                            self.process_word(s, quad[i], token, start, listed)
            # the whole warp reads an overflowing tile from the spill, eight values per lane
            overflowing = Uint32(cute.arch.vote_ballot_sync(count >= o.width))
            while overflowing != 0:
                neuron = (first + lowest_bit(overflowing)) * geometry.TILE + at.lane * 8
                overflowing = overflowing & (overflowing - 1)
                values = load_values(address(o.spill, m, neuron))
                flags = nonzero_flags(values)
                for i in range_constexpr(8):
                    if flags[i]:
                        self.process_word(s, spilled_word(values, i, neuron), token, start, listed)

    @cute.jit
    def process_word(self, s: Views, word: Uint32, token: Int32, start: Int32, listed: cutlass.Constexpr):
        """Mark one non-zero, or send its gate to the owner of its rank if that is in the window from `start` on."""
        at, bit = Int32((word >> 5) & Uint32(0x7FF)), Uint32(1) << (word & 31)
        if const_expr(listed):
            rank = widen(s.prefix[at]) + Int32(cute.arch.popc(s.union[at] & (bit - 1))) - start
            if rank >= 0 and rank < self.window:
                group, place = rank // self.group, rank % self.group
                slot = group * self.block + place % self.block
                store_peer_half(s.gates.iterator + (token * SHARE + slot), place // self.block, word >> 16)
        else:
            cute.arch.atomic_or(s.marked.iterator + at, bit, scope="cta")

    @cute.jit
    def unite(self, s: Views, words: Int32, at: Thread):
        """Fill `union` and `prefix` from the bitmaps of all CTAs; return the size of the union."""
        share = cute.ceil_div(words, THREADS)
        own = Int32(0)
        for i in cutlass.range(share, unroll=1):
            word = at.thread * share + i
            if word < words:
                bits = Uint32(0)
                for peer in range_constexpr(self.cluster):
                    bits = bits | load_peer_word(s.marked.iterator + word, Int32(peer))
                s.union[word] = bits
                own += Int32(cute.arch.popc(bits))
        before = prefix_sum(own, at.lane)
        if at.lane == 31:
            s.sums[at.warp] = before + own
        cute.arch.sync_threads()
        position, size = before, Int32(0)
        for w in range_constexpr(WARPS):
            position += s.sums[w] if w < at.warp else 0
            size += s.sums[w]
        for i in cutlass.range(share, unroll=1):
            word = at.thread * share + i
            if word < words:
                s.prefix[word] = Uint16(position)
                position += Int32(cute.arch.popc(s.union[word]))
        return size

    @cute.jit
    def open_window(self, s: Views, start: Int32, words: Int32, at: Thread):
        """List the neurons from rank `start` on. From the second window on, the gates are cleared again."""
        if start > 0:
            # all threads of the CTA have left the window before
            cute.arch.sync_threads()
            self.clear_gates(s, at.thread)
        share = cute.ceil_div(words, THREADS)
        for i in cutlass.range(share, unroll=1):
            word = at.thread * share + i
            if word < words:
                rank, bits = widen(s.prefix[word]) - start, Uint32(s.union[word])
                while bits != 0:
                    if rank >= 0 and rank < self.window:
                        s.neurons[rank] = Uint16(word * 32 + lowest_bit(bits))
                    bits = bits & (bits - 1)
                    rank += 1
        cute.arch.sync_threads()
        if start > 0:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def clear_gates(self, s: Views, thread: Int32):
        pairs = cute.recast_tensor(s.gates, Uint32)
        for i in cutlass.range(thread, TOKENS * SHARE // 2, THREADS, unroll=1):
            pairs[i] = Uint32(0)

    # ---- fill ----

    @cute.jit
    def load_x(self, s: Views, x_tma, x_g: cute.Tensor, at: Thread):
        """Load the CTA's columns of x by one warp; rows and columns beyond the last become zero."""
        tiles = cute.local_tile(x_g, (TOKENS, 64), (None, None))
        one = cute.make_layout(1)
        x_s, x_t = cpasync.tma_partition(x_tma, 0, one, cute.group_modes(s.sX, 0, 2), cute.group_modes(tiles, 0, 2))
        if at.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(s.x_full, TOKENS * self.columns * 2)
        panels = self.columns // 64
        for i in range_constexpr(panels):
            source = x_t[None, at.first // TOKENS, at.rank * panels + i]
            cute.copy(x_tma, source, x_s[None, i], tma_bar_ptr=s.x_full)

    @cute.jit
    def fill(self, o: Operands, s: Views, size: Int32, words: Int32, at: Thread):
        """Gather the listed rows of w_up and w_down, group by group."""
        rows = cute.make_rmem_tensor((4,), Int32)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        start, more = Int32(0), Boolean(True)
        while more:
            self.open_window(s, start, words, at)
            cute.arch.cluster_arrive()
            here = cutlass.min(size - start, Int32(self.window))
            for base in cutlass.range(0, here, self.group, unroll=1):
                state = self.fill_group(s, o.w_up, rows, state, base, here, at)
                state = self.fill_group(s, o.w_down, rows, state, base, here, at)
            cute.arch.cluster_wait()
            start += self.window
            more = start < size
        # copies that nobody waits for must not outlive the CTA
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def fill_group(self, s: Views, matrix: cute.Tensor, rows: cute.Tensor, state, base: Int32, size: Int32, at: Thread):
        """Gather the rows of one group's chunks; return the state of the ring."""
        for chunk in cutlass.range(base, cutlass.min(base + self.group, size), CHUNK, unroll=1):
            for j in range_constexpr(4):
                # beyond the list its last row again: gates are zero there
                rows[j] = widen(s.neurons[cutlass.min(chunk + at.thread // 8 + 16 * j, size - 1)])
            for span in range_constexpr(self.spans):
                cute.arch.mbarrier_wait(s.ring.empty + state.index, state.phase)
                stage = s.stages + state.index * (CHUNK * SLAB)
                gather_columns(stage, matrix, rows, at.left + span * SLAB, at.thread, PANELS)
                cute.arch.cp_async_mbarrier_arrive_noinc(s.ring.full + state.index)
                state.advance()
        return state

    # ---- mma ----

    @cute.jit
    def multiply(self, o: Operands, s: Views, up: cute.TiledMma, down: cute.TiledMma, size: Int32, words, at: Thread):
        """Compute the CTA's columns of y."""
        thread = at.thread - GROUP_THREADS
        up_leader, down_leader = up.get_slice(0), down.get_slice(0)
        rX, rW = up.make_fragment_B(up_leader.partition_B(s.sX)), up.make_fragment_A(up_leader.partition_A(s.sW))
        rH = down.make_fragment_B(down_leader.partition_B(s.sH))
        rWd = down.make_fragment_A(down_leader.partition_A(s.sWd))
        places = up.get_slice(thread).partition_C(cute.make_identity_tensor((CHUNK, TOKENS)))
        targets = down.get_slice(thread).partition_C(cute.make_identity_tensor((SLAB, TOKENS)))
        sums = cute.make_rmem_tensor(places.shape, Float32)
        acc = [cute.make_rmem_tensor(targets.shape, Float32) for _ in range(self.spans)]
        for span in range_constexpr(self.spans):
            acc[span].fill(0.0)
        up.set(warpgroup.Field.ACCUMULATE, True)
        down.set(warpgroup.Field.ACCUMULATE, True)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        # phases of PARTS, and of HIDDEN by chunk
        parts_phase, hidden_phases, total = Int32(0), Int32(0), Float32(0.0)
        start, more = Int32(0), Boolean(True)
        while more:
            self.open_window(s, start, words, at)
            self.scan_tokens(o, s, start, at, at.warp - (WARPS - MMA_WARPS), MMA_WARPS, True)
            cute.arch.cluster_arrive()
            if start == 0:
                cute.arch.mbarrier_wait(s.x_full, 0)
            here = cutlass.min(size - start, Int32(self.window))
            if here <= 0:
                cute.arch.cluster_wait()
            for base in cutlass.range(0, here, self.group, unroll=1):
                left = cutlass.min(here - base, Int32(self.group))
                chunks = cute.ceil_div(left, CHUNK)
                owns = at.rank * self.block < chunks * CHUNK
                if thread == 0:
                    self.expect(s, chunks, owns)
                for chunk in cutlass.range(chunks, unroll=1):
                    state = self.up_products(s, up, sums, rW, rX, state, at)
                    self.send_sums(s, sums, places, chunk, at)
                if base == 0:
                    # the gates of the window have arrived
                    cute.arch.cluster_wait()
                if owns:
                    cute.arch.mbarrier_wait(s.parts_full, parts_phase)
                    parts_phase = parts_phase ^ 1
                    total += self.send_hidden(o, s, base, here, thread, at)
                for chunk in cutlass.range(chunks, unroll=1):
                    cute.arch.mbarrier_wait(s.hidden_full + chunk, (hidden_phases >> chunk) & 1)
                    hidden_phases = hidden_phases ^ (1 << chunk)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    for span in range_constexpr(self.spans):
                        state = self.down_products(s, down, acc[span], rWd, rH, chunk, state, at.lane)
                # no warp reads h any more
                cute.arch.barrier(barrier_id=Barrier.MMA, number_of_threads=GROUP_THREADS)
            start += self.window
            more = start < size
        self.store_rows(o, s, acc, targets, thread, at)
        self.store_total(o, s, total, thread, at)

    @cute.jit
    def expect(self, s: Views, chunks: Int32, owns: Boolean):
        """Expect the group's partial sums of the CTA's own ranks, if it has any, and the group's h."""
        if owns:
            cute.arch.mbarrier_arrive_and_expect_tx(s.parts_full, 4 * self.group * TOKENS)
        for chunk in range_constexpr(self.chunks):
            if chunk < chunks:
                cute.arch.mbarrier_arrive_and_expect_tx(s.hidden_full + chunk, 2 * CHUNK * TOKENS)

    @cute.jit
    def up_products(self, s: Views, up: cute.TiledMma, sums: cute.Tensor, rW: cute.Tensor, rX: cute.Tensor, state, at):
        """Multiply a chunk's rows of w_up by the CTA's columns of x; return the state of the ring."""
        sums.fill(0.0)
        for span in range_constexpr(self.spans):
            cute.arch.mbarrier_wait(s.ring.full + state.index, state.phase)
            cute.arch.fence_proxy("async.shared", space="cta")
            warpgroup.fence()
            for panel in range_constexpr(PANELS):
                for k in range_constexpr(4):
                    a = rW[None, None, k, state.index * PANELS + panel]
                    cute.gemm(up, sums, a, rX[None, None, k, span * PANELS + panel], sums)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            state = release(s.ring, state, at.lane)
        return state

    @cute.jit
    def send_sums(self, s: Views, sums: cute.Tensor, places: cute.Tensor, chunk: Int32, at: Thread):
        """Send the partial sums of a chunk to the owners of its ranks.

        Columns of `parts` are permuted by row, so that neither writes nor reads conflict in banks.
        """
        for i in range_constexpr(2):
            neuron = chunk * CHUNK + places[(0, i, 0), 0, 0][0]
            # the eight rows have one owner
            owner, row = neuron // self.block, neuron % self.block
            line = s.parts.iterator + (at.rank * self.block + row) * TOKENS
            for v in range_constexpr(TOKENS // 8):
                token = self.permuted(places[(0, i, v), 0, 0][1], row)
                send_floats(line + token, s.parts_full, owner, sums[(0, i, v), 0, 0], sums[(1, i, v), 0, 0])

    def permuted(self, token, row):
        """Where a row of `parts` has a token."""
        return token ^ ((row & (TOKENS // 8 - 1)) << 3)

    @cute.jit
    def send_hidden(self, o: Operands, s: Views, base: Int32, size: Int32, thread: Int32, at: Thread):
        """Compute h of the CTA's own ranks, `own` of a token per thread, and send it to all CTAs; return sum |h|."""
        token, first = thread % TOKENS, thread // TOKENS * self.own
        values, total = [Float32(0.0)] * self.own, Float32(0.0)
        for peer in range_constexpr(self.cluster):
            for i in range_constexpr(self.own):
                row = first + i
                values[i] += s.parts[(peer * self.block + row) * TOKENS + self.permuted(token, row)]
        rank = at.rank * self.block + first
        if o.b_up.shape[0] > 0:
            for i in range_constexpr(self.own):
                neuron = widen(s.neurons[cutlass.min(base + rank + i, size - 1)])
                values[i] += o.b_up[neuron].to(Float32)
        gates = cute.recast_ptr(s.gates.iterator, dtype=Uint32)
        gates += (token * SHARE + base // self.group * self.block + first) // 2
        words = cute.make_rmem_tensor((self.own // 2,), Uint32)
        cute.autovec_copy(cute.make_tensor(gates.align(8), cute.make_layout(self.own // 2)), words)
        for i in range_constexpr(self.own // 2):
            low, high = low_to_float(words[i], self.dtype), high_to_float(words[i], self.dtype)
            h0 = hidden(low, values[2 * i], o.activation) if words[i] & Uint32(MAGNITUDE) != 0 else Float32(0.0)
            h1 = (
                hidden(high, values[2 * i + 1], o.activation)
                if words[i] & Uint32(MAGNITUDE << 16) != 0
                else Float32(0.0)
            )
            total += cute.arch.fmax(h0, -h0) + cute.arch.fmax(h1, -h1)
            words[i] = pack(h0, h1, self.dtype)
        chunk, piece = rank // CHUNK, rank % CHUNK // 8
        target = s.hidden + ((chunk * TOKENS + token) * CHUNK + swizzle_piece(token, piece) + rank % 8)
        for peer in range_constexpr(self.cluster):
            for i in range_constexpr(self.own // 4):
                send_words(target + 4 * i, s.hidden_full + chunk, Int32(peer), words[2 * i], words[2 * i + 1])
        return total

    @cute.jit
    def down_products(self, s: Views, down: cute.TiledMma, acc: cute.Tensor, rWd: cute.Tensor, rH, chunk, state, lane):
        """Add a stage's products to the sums of its columns; return the state of the ring."""
        cute.arch.mbarrier_wait(s.ring.full + state.index, state.phase)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.fence()
        for k in range_constexpr(CHUNK // 16):
            cute.gemm(down, acc, rWd[None, None, k, state.index], rH[None, None, k, chunk], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        return release(s.ring, state, lane)

    # ---- results ----

    @cute.jit
    def store_rows(self, o: Operands, s: Views, acc, targets: cute.Tensor, thread: Int32, at: Thread):
        """Add the bias, round, and store the CTA's columns of y through the ring's memory, which has been read."""
        pitch = self.columns + PAD
        staged = cute.make_tensor(s.stages, cute.make_layout(TOKENS * pitch))
        for span in range_constexpr(self.spans):
            for m in range_constexpr(SLAB // 64):
                for i in range_constexpr(2):
                    column = span * SLAB + targets[(0, i, 0), m, 0][0]
                    whole = at.left + column
                    # an empty bias has no columns
                    bias = o.b_down[whole].to(Float32) if whole < o.b_down.shape[0] else Float32(0.0)
                    for v in range_constexpr(TOKENS // 8):
                        for j in range_constexpr(2):
                            token = targets[(j, i, v), m, 0][1]
                            staged[token * pitch + column] = (acc[span][(j, i, v), m, 0] + bias).to(self.dtype)
        cute.arch.barrier(barrier_id=Barrier.MMA, number_of_threads=GROUP_THREADS)
        pieces = self.columns // 8
        for i in cutlass.range(thread, TOKENS * pieces, GROUP_THREADS, unroll=4):
            token, column = i // pieces, i % pieces * 8
            if at.first + token < o.y.shape[0] and at.left + column < o.y.shape[1]:
                values = load_values(s.stages + (token * pitch + column))
                store_values(address(o.y, at.first + token, at.left + column), values)

    @cute.jit
    def store_total(self, o: Operands, s: Views, total: Float32, thread: Int32, at: Thread):
        """Store the CTA's sum of |h|, added in a fixed order."""
        total = warp_sum(total)
        if at.lane == 0:
            s.totals[thread // 32] = total
        cute.arch.barrier(barrier_id=Barrier.MMA, number_of_threads=GROUP_THREADS)
        if thread == 0:
            everything = Float32(0.0)
            for w in range_constexpr(MMA_WARPS):
                everything += s.totals[w]
            o.l1[at.first // TOKENS, at.rank] = everything

    def views(self, shared, ring, x_layout, up_layout, down_layout, hidden_layout):
        """Tensors over the shared struct."""
        once, hidden = shared.once.data_ptr(), shared.hidden.data_ptr()
        bitmap = geometry.MAX_TILE_NEURONS // 32
        return Views(
            ring=ring,
            x_full=once,
            parts_full=once + 1,
            hidden_full=once + 2,
            sums=shared.sums.get_tensor(cute.make_layout(WARPS)),
            totals=shared.totals.get_tensor(cute.make_layout(MMA_WARPS)),
            marked=cute.make_tensor(cute.recast_ptr(hidden, dtype=Uint32), cute.make_layout(bitmap)),
            union=shared.union.get_tensor(cute.make_layout(bitmap)),
            prefix=shared.prefix.get_tensor(cute.make_layout(bitmap)),
            neurons=shared.neurons.get_tensor(cute.make_layout(self.window)),
            gates=shared.gates.get_tensor(cute.make_layout(TOKENS * SHARE)),
            parts=shared.parts.get_tensor(cute.make_layout(self.group * TOKENS)),
            sX=shared.x.get_tensor(x_layout.outer, swizzle=x_layout.inner),
            sW=shared.stages.get_tensor(up_layout.outer, swizzle=up_layout.inner),
            sWd=shared.stages.get_tensor(down_layout.outer, swizzle=down_layout.inner),
            sH=shared.hidden.get_tensor(hidden_layout.outer, swizzle=hidden_layout.inner),
            stages=shared.stages.data_ptr(),
            hidden=hidden,
        )


def signature(spec: UpDownTileSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype, m = operands.DTYPES[spec.dtype], cute.sym_int32()
    n, k = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    arguments = (
        operands.rows(dtype, m, k),
        *operands.packed(dtype, m),
        operands.rows(dtype, n, k),
        operands.rows(dtype, n, k),
        operands.bias(dtype),
        operands.bias(dtype),
        operands.rows(dtype, m, k),
        operands.matrix(Float32, cute.sym_int32(), spec.cluster),
        Int32(1),
        Int32(1),
    )
    return UpDownTile(spec), arguments
