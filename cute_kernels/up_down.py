"""Gated up and down projections on the pattern of a packed gate: y[m] = sum over non-zeros c of h[m, c] * w_down[c],
with h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]). Strategy `row`: only the weight rows of non-zeros are read.
If not `gated`, the packed values are h: neither x nor up rows are read, and there are no dot products. So it is for
relu; for the other activations see common/activation.py.

The bound is L2: two rows of K values per non-zero. Eight consecutive tokens share a CTA, and each weight row of the
union of their neurons is read once. Two launches:

    light   one CTA per group of eight tokens, two CTAs per SM up to K = 2048: one lists its neurons while the other
            streams. Beyond K = 4096 a cluster shares the group, each CTA a slab of 4096 columns.
    heavy   tokens with more than HEAVY_COUNT non-zeros and more than a quarter of their group's. `light` skips them and
            writes a mask of them. A cluster computes one at a time, as in up_down_token.py.

In `light` each of a CTA's eight warps owns an eighth of the columns, so all warps share the work of every token and
neuron. Up to WINDOW neurons of the union at a time:

    list    warp t marks token t's neurons in a bitmap, whose prefix sums are the neurons' ranks in the union; gate
            values go to `gates` by rank, zero where a token does not have the neuron.
    stream  four neurons per batch. Their rows arrive in two rings of buffers, for up and for down rows:
              dot    mma: [4 neurons x K/8] times x of the eight tokens, from registers; partial sums go to `partial`;
              sync   one barrier per batch: its sums are complete, the buffers just read are free and are refilled;
              add    mma: [K/8 columns x 4 neurons] times h of the eight tokens, added to fp32 sums in registers. h is
                     fp32: it enters as three 16-bit terms, two of them side by side in the eight k of one mma.
            The dot of the next batch overlaps with the add of this one.

On sm_90a they complete on barriers:

    FULL[b % buffers]  1 arrival + bytes: the down rows of batch b and the up rows of batch b + 1, one iteration's.
    FULL[buffers]      1 arrival + bytes: the up rows of batch 0.
    Every thread waits for every barrier, so one register of phase bits is enough.

The portable family copies by cp.async, a row per warp, up to K = 2048; the barrier of a batch is also for the copies of
the next one. A single CTA computes a heavy token.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint16, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from . import feasible, geometry, up_down_token
from .common import launch, operands
from .common.activation import hidden, power
from .common.copies import address, copy_async, load_values, store_values
from .common.mma import clear, load_matrices_transposed, mma_16x8x8, mma_16x8x16
from .common.rows import count_of, spilled_word
from .common.values import (
    MAGNITUDE,
    high_to_float,
    low_to_float,
    lowest_bit,
    nonzero_flags,
    pack,
    prefix_sum,
    split_pair,
    widen,
)
from .sm90.copies import bulk_copy, load_peer
from .specs import SM90, UpDownSpec
from .up_down_token import Operands

TOKENS = geometry.GROUP_ROWS
WARPS = 8
THREADS = 32 * WARPS
BATCH = 4
# columns of a block: one matrix load of up rows, two of down rows
BLOCK = 64
# neurons of a union that are listed and streamed at a time
WINDOW = 512
HEAVY_COUNT = 512
# most columns whose sums fit in a CTA's registers
SLAB = 4096
# index in `counts` of the mask of heavy tokens
HEAVY = TOKENS
# padding of down rows in columns: transposing matrix loads then hit different banks. A bulk copy to an address that is
# not a multiple of 128 bytes needs twice the look-ups in L2; with padded up rows as well, L2 was 89 % busy
PAD = 8


class Thread(NamedTuple):
    """Indices of a thread, and the work of its CTA."""

    first: Any  # token of the group
    slab: Any  # of columns
    thread: Any
    warp: Any
    lane: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    full: Any  # [buffers + 1] mbarriers
    counts: Any  # [16] non-zeros of each token, mask of heavy tokens
    sums: Any  # [WARPS] neurons marked in each warp's share of the bitmap
    union: Any  # [WINDOW] neurons, ascending
    biases: Any  # [WINDOW] up bias of each neuron of the union, zero if there is none
    gates: Any  # [WINDOW / BATCH, TOKENS, BATCH] gate values as bits
    partial: Any  # [2, WARPS, TOKENS, BATCH] dot products over a warp's columns
    up: Any  # [buffers, BATCH, slab]
    down: Any  # [buffers, BATCH, slab + PAD]
    bitmap: Any  # [N / 32] overlays the rings, before they are filled
    prefix: Any  # [N / 32] overlays the rings: neurons marked before each word of the bitmap
    staged: Any  # [TOKENS, slab + PAD] overlays the rings, after they are read: rounded rows of y


class UpDown:
    """For one dtype and class of hidden sizes, gated or not."""

    def __init__(self, spec: UpDownSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.gated = spec.gated
        self.bulk = spec.family == SM90
        self.per_token = up_down_token.TokenCluster(spec.heavy, spec.heavy.cluster)
        # most neurons whose products tensor cores add; an instruction with four truncates less than one with 16
        self.longest = geometry.LONGEST_SUM[spec.dtype] // 2
        self.slabs = max(1, spec.k_max // SLAB)
        self.slab = spec.k_max // self.slabs
        self.blocks = self.slab // (BLOCK * WARPS)
        self.ctas_per_sm = 2 if self.slab <= 2048 else 1
        self.pitch = self.slab + PAD
        # 16-bit values that fit beside the lists: 99 of 113 KB for each of two CTAs, 198 of 227 KB for one
        available = (99 if self.ctas_per_sm == 2 else 198) * 512 if self.bulk else 85 * 512
        turn = BATCH * (self.pitch + (self.slab if self.gated else 0))
        self.buffers = min(8, available // turn)
        self.up_values = self.buffers * BATCH * self.slab if self.gated else 0
        lists = geometry.MAX_NEURONS // 32 * 3
        self.arena = max(self.buffers * turn, lists, TOKENS * self.pitch)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor | None,
        words: cute.Tensor,
        spill: cute.Tensor,
        w_up: cute.Tensor | None,
        w_down: cute.Tensor,
        b_up: cute.Tensor | None,
        b_down: cute.Tensor | None,
        y: cute.Tensor,
        l1: cute.Tensor,
        heavy: cute.Tensor,
        words_per_tile: Int32,
        activation: Int32,
        max_clusters: Int32,
        stream: cuda.CUstream,
    ):
        @cute.struct
        class Shared:
            full: cute.struct.MemRange[cutlass.Int64, self.buffers + 1]
            counts: cute.struct.MemRange[Int32, 16]
            sums: cute.struct.MemRange[Int32, WARPS]
            union: cute.struct.MemRange[Uint16, WINDOW]
            biases: cute.struct.Align[cute.struct.MemRange[Float32, WINDOW + BATCH if self.gated else 2], 8]
            partial: cute.struct.Align[cute.struct.MemRange[Float32, 2 * WARPS * TOKENS * BATCH], 16]
            gates: cute.struct.Align[cute.struct.MemRange[Uint16, WINDOW * TOKENS], 16]
            arena: cute.struct.Align[cute.struct.MemRange[self.dtype, self.arena], 128]

        self.shared = feasible.check_shared_memory(Shared, self.ctas_per_sm)
        if const_expr(not self.bulk):
            feasible.check_portable_memory(Shared)
            assert self.buffers > 1
            assert self.slabs == 1
        o = Operands(x, words, spill, w_up, w_down, b_up, b_down, y, l1, words_per_tile, activation)
        groups = cute.ceil_div(y.shape[0], TOKENS)
        if y.shape[0] > 0:
            self.light(o, heavy).launch(
                grid=(groups * self.slabs, 1, 1),
                block=(THREADS, 1, 1),
                cluster=(self.slabs, 1, 1) if const_expr(self.slabs > 1) else None,
                min_blocks_per_mp=self.ctas_per_sm,
                preferred_smem_carveout=100,
                stream=stream,
                use_pdl=launch.overlaps(),
            )
            self.heavy(o, heavy).launch(
                grid=(self.per_token.cluster, cutlass.min(groups, max_clusters * self.per_token.ctas_per_sm), 1),
                block=(up_down_token.THREADS, 1, 1),
                cluster=(self.per_token.cluster, 1, 1) if const_expr(self.per_token.cluster > 1) else None,
                min_blocks_per_mp=self.per_token.ctas_per_sm,
                preferred_smem_carveout=100,
                stream=stream,
                use_pdl=launch.overlaps(),
            )

    # ---- the two kernels ----

    @cute.kernel
    def light(self, o: Operands, heavy: cute.Tensor):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block = cute.arch.block_idx()[0]
        group, slab = block // self.slabs, block % self.slabs
        s = self.views(SmemAllocator().allocate(self.shared))
        if const_expr(self.bulk):
            self.init_barriers(s, thread)
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()
        at = Thread(group * TOKENS, slab, thread, warp, lane)
        x_frag = self.load_x(o, at)
        self.find_heavy(o, s, at)
        skipped = s.counts[HEAVY]
        if thread == 0 and slab == 0:
            heavy[group] = skipped
        m = at.first + warp
        listed = m < o.y.shape[0] and (skipped >> warp) & 1 == 0
        acc = cute.make_rmem_tensor((4, 4, self.blocks), Float32)
        clear(acc)
        total = Float32(0.0)
        if o.w_down.shape[0] > self.longest:
            total = self.accumulate(o, s, x_frag, acc, listed, at, True)
        else:
            total = self.accumulate(o, s, x_frag, acc, listed, at, False)

        self.stage_rows(o, s, acc, at)
        cute.arch.sync_threads()
        if listed:
            columns = cutlass.min(o.y.shape[1] - slab * self.slab, Int32(self.slab))
            for column in cutlass.range(lane * 8, columns, 256, unroll=4):
                self.store_staged(s, o.y, m, slab * self.slab + column, warp, column)
        total += cute.arch.shuffle_sync_bfly(total, 1)
        g = lane >> 2
        if warp == 0 and slab == 0 and lane & 3 == 0 and at.first + g < o.y.shape[0] and (skipped >> g) & 1 == 0:
            o.l1[at.first + g] = total
        if const_expr(self.slabs > 1):
            # a peer may still read this CTA's last partial sums
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.kernel
    def heavy(self, o: Operands, heavy: cute.Tensor):
        rank, cluster, _ = cute.arch.block_idx()
        clusters = cute.arch.grid_dim()[1]
        s = self.per_token.views(SmemAllocator().allocate(self.per_token.shared))
        at = self.per_token.thread_index(o.y.shape[1], rank)
        self.per_token.begin(s)
        windows = Int32(0)
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()
        if const_expr(self.per_token.cluster > 1):
            cute.arch.cluster_wait()
        # clusters take groups round robin; which cluster computes a token does not change its result
        for base in cutlass.range(cluster, heavy.shape[0], 32 * clusters, unroll=1):
            # 32 groups, one per lane; every warp computes the same
            group = base + at.lane * clusters
            own = Uint32(heavy[group]) if group < heavy.shape[0] else Uint32(0)
            groups = Uint32(cute.arch.vote_ballot_sync(own != 0))
            while groups != 0:
                owner = lowest_bit(groups)
                groups = groups & (groups - 1)
                tokens = Uint32(cute.arch.shuffle_sync(own, owner))
                while tokens != 0:
                    m = (base + owner * clusters) * TOKENS + lowest_bit(tokens)
                    tokens = tokens & (tokens - 1)
                    windows = self.per_token.compute_token(o, s, m, at, windows)

    @cute.jit
    def accumulate(self, o, s, x_frag, acc, listed, at, long: cutlass.Constexpr):
        """List and stream the union, window by window; return each lane's sum of |h|.

        `long`: the layer has more than `longest` neurons, so sums may have more terms than that.
        """
        total, share, phases = Float32(0.0), Float32(0.0), Int32(0)
        start, size = Int32(0), Int32(1)
        while start < size:
            size = self.list_window(o, s, listed, start, at)
            if const_expr(self.bulk):
                self.clear_tails(s, o.w_down.shape[1] - at.slab * self.slab, at.thread)
                cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            here = cutlass.min(size - start, Int32(WINDOW))
            if const_expr(long):
                if start < self.longest:
                    share, phases = self.stream(o, s, x_frag, acc, here, phases, at, False)
                else:
                    share, phases = self.stream(o, s, x_frag, acc, here, phases, at, True)
            else:
                share, phases = self.stream(o, s, x_frag, acc, here, phases, at, False)
            total += share
            start += WINDOW
            cute.arch.sync_threads()
        return total

    # ---- list ----

    @cute.jit
    def find_heavy(self, o, s, at):
        """Count the tokens' non-zeros and choose the tokens for the heavy kernel."""
        m, tiles = at.first + at.warp, o.words.shape[1] // o.width
        count = Int32(0)
        for first in cutlass.range(0, tiles, 32, unroll=1):
            tile = first + at.lane
            count += count_of(o.words, m, tile, o.width, m < o.y.shape[0] and tile < tiles)
        count = Int32(cute.arch.warp_redux_sync(count, "add"))
        if at.lane == 0:
            s.counts[at.warp] = count
        cute.arch.sync_threads()
        if at.thread == 0:
            everything, skipped = Int32(0), Int32(0)
            for t in range_constexpr(TOKENS):
                everything += s.counts[t]
            for t in range_constexpr(TOKENS):
                if s.counts[t] > HEAVY_COUNT and 4 * s.counts[t] > everything:
                    skipped = skipped | (1 << t)
            s.counts[HEAVY] = skipped
        cute.arch.sync_threads()

    @cute.jit
    def list_window(self, o, s, listed, start, at):
        """Fill `union` and `gates` from rank `start` of the union on; return the union's size."""
        thread, warp, lane = at.thread, at.warp, at.lane
        bitmap_words = cute.ceil_div(o.w_down.shape[0], 32)
        for i in cutlass.range(thread, bitmap_words, THREADS, unroll=1):
            s.bitmap[i] = Uint32(0)
        pairs = cute.recast_tensor(s.gates, Uint32)
        for i in range_constexpr(0, WINDOW * TOKENS // 2, THREADS):
            pairs[i + thread] = Uint32(0)
        cute.arch.sync_threads()
        if listed:
            self.scan_token(o, s, start, at, False)
        cute.arch.sync_threads()

        share = cute.ceil_div(bitmap_words, THREADS)
        own = Int32(0)
        for i in cutlass.range(share, unroll=1):
            at_word = thread * share + i
            own += Int32(cute.arch.popc(s.bitmap[at_word])) if at_word < bitmap_words else 0
        before = prefix_sum(own, lane)
        if lane == 31:
            s.sums[warp] = before + own
        cute.arch.sync_threads()
        position, size = before, Int32(0)
        for w in range_constexpr(WARPS):
            position += s.sums[w] if w < warp else 0
            size += s.sums[w]
        for i in cutlass.range(share, unroll=1):
            at_word = thread * share + i
            if at_word < bitmap_words:
                s.prefix[at_word] = Uint16(position)
                word = s.bitmap[at_word]
                while word != 0:
                    rank = position - start
                    if rank >= 0 and rank < WINDOW:
                        neuron = at_word * 32 + lowest_bit(word)
                        s.union[rank] = Uint16(neuron)
                        if const_expr(self.gated):
                            s.biases[rank] = o.b_up[neuron].to(Float32) if o.b_up.shape[0] > 0 else Float32(0.0)
                    word = word & (word - 1)
                    position += 1
        cute.arch.sync_threads()
        if listed:
            self.scan_token(o, s, start, at, True)
        cute.arch.sync_threads()
        return size

    @cute.jit
    def scan_token(self, o, s, start, at, marked: cutlass.Constexpr):
        """Mark the non-zeros of a warp's token in the bitmap; if they are `marked`, store their values in `gates`."""
        m, tiles = at.first + at.warp, o.words.shape[1] // o.width
        quad = cute.make_rmem_tensor((4,), Uint32)
        for first in cutlass.range(0, tiles, 32, unroll=1):
            tile = first + at.lane
            count = count_of(o.words, m, tile, o.width, tile < tiles)
            # each lane reads its own tile, four words at a time; the first word of a tile is its count
            stored = count if count < o.width else 0
            quads = (stored + 4) // 4 if stored > 0 else 0
            line = address(o.words, m, tile * o.width)
            for q in cutlass.range(Int32(cute.arch.warp_redux_sync(quads, "max")), unroll=1):
                if q < quads:
                    load_values(line + q * 4, quad)
                    for i in range_constexpr(4):
                        ordinal = q * 4 + i - 1
                        if ordinal >= 0 and ordinal < stored:
                            self.process_word(s, quad[i], at.warp, start, marked)
            # the whole warp reads an overflowing tile from the spill, eight values per lane
            overflowing = Uint32(cute.arch.vote_ballot_sync(count >= o.width))
            while overflowing != 0:
                neuron = (first + lowest_bit(overflowing)) * geometry.TILE + at.lane * 8
                overflowing = overflowing & (overflowing - 1)
                values = load_values(address(o.spill, m, neuron))
                flags = nonzero_flags(values)
                for i in range_constexpr(8):
                    if flags[i]:
                        self.process_word(s, spilled_word(values, i, neuron), at.warp, start, marked)

    @cute.jit
    def process_word(self, s, word, token, start, marked: cutlass.Constexpr):
        """Mark one non-zero, or store its value."""
        at, bit = Int32((word >> 5) & Uint32(0x7FF)), Uint32(1) << (word & 31)
        if const_expr(marked):
            rank = widen(s.prefix[at]) + Int32(cute.arch.popc(s.bitmap[at] & (bit - 1))) - start
            if rank >= 0 and rank < WINDOW:
                s.gates[(rank // BATCH * TOKENS + token) * BATCH + rank % BATCH] = Uint16(word >> 16)
        else:
            cute.arch.atomic_or(s.bitmap.iterator + at, bit, scope="cta")

    # ---- stream ----

    @cute.jit
    def stream(self, o, s, x_frag, acc, neurons, phases, at, apart: cutlass.Constexpr):
        """Add h times the listed neurons' down rows to `acc`; return each lane's part of sum |h|, and the phases.

        `apart`: the sums are too long for tensor cores, see common/sums.py.
        """
        warp, lane = at.warp, at.lane
        batches = cute.ceil_div(neurons, BATCH)
        # up rows stay one iteration longer in the ring than down rows
        ahead = self.buffers - 1
        if const_expr(self.gated):
            self.fetch_rows(o, s, Int32(-1), self.buffers, Int32(0), Int32(0), neurons, at)
        for b in cutlass.range(cutlass.min(batches, Int32(ahead)) if const_expr(self.bulk) else ahead, unroll=1):
            self.fetch_rows(o, s, b, b, b, b + 1, neurons, at)
        if const_expr(self.gated and not self.bulk):
            cute.arch.cp_async_wait_group(ahead)
            cute.arch.sync_threads()
        total = Float32(0.0)
        g, pair = lane >> 2, (lane & 1) * 2
        up_source = s.up.iterator + (
            (lane >> 3) * self.slab + self.first_column(warp, 0) + ((lane & 3) << 3) + ((lane & 4) << 3)
        )
        down_source = s.down.iterator + ((lane & 3) * self.pitch + self.first_column(warp, 0) + ((lane >> 3) << 3))
        if const_expr(self.gated):
            if batches > 0:
                phases = self.wait(s, self.buffers, phases)
                self.dot(s, x_frag, up_source, 0, at)
        if const_expr(self.gated or not self.bulk):
            self.sync()
        buffer = Int32(0)
        for b in cutlass.range(batches, unroll=1):
            following = buffer + 1 if buffer < ahead else 0
            last = buffer - 1 if buffer > 0 else ahead
            # the previous iteration read batch b - 1's down rows and this batch's up rows
            self.fetch_rows(o, s, b + ahead, last, last, buffer, neurons, at)
            phases = self.wait(s, buffer, phases)
            # the next batch's dot products do not depend on this batch: their latencies overlap
            if const_expr(self.gated):
                self.dot(s, x_frag, up_source + following * (BATCH * self.slab), b + 1, at)
            gates = cute.recast_tensor(s.gates, Uint32)[(b * TOKENS + g) * (BATCH // 2) + pair // 2]
            h0, h1 = low_to_float(gates, self.dtype), high_to_float(gates, self.dtype)
            if const_expr(self.gated):
                up0, up1 = self.up_projections(s, b, g, pair)
                h0 = hidden(h0, up0, o.activation) if gates & Uint32(MAGNITUDE) != 0 else Float32(0.0)
                h1 = hidden(h1, up1, o.activation) if gates & Uint32(MAGNITUDE << 16) != 0 else Float32(0.0)
            else:
                h0, h1 = power(h0, o.activation), power(h1, o.activation)
            total += cute.arch.fmax(h0, -h0) + cute.arch.fmax(h1, -h1)
            self.add_rows(acc, down_source + buffer * (BATCH * self.pitch), h0, h1, lane, apart)
            self.sync()
            buffer = following
        return total, phases

    @cute.jit
    def wait(self, s, barrier, phases):
        """Wait for bulk copies; return the phases after it. Other copies have been waited for in `sync`."""
        if const_expr(self.bulk):
            cute.arch.mbarrier_wait(s.full + barrier, (phases >> barrier) & 1)
            phases = phases ^ (1 << barrier)
        return phases

    @cute.jit
    def fetch_rows(self, o, s, b, barrier, down_buffer, up_buffer, neurons, at):
        """Start the copies for iteration `b`: down rows of batch b by warps 0-3, up rows of b + 1 by warps 4-7.

        A partial last batch repeats its last row: gates are zero there, but their factors must be finite.
        """
        down = b >= 0 and b * BATCH < neurons
        up = Boolean(False)
        if const_expr(self.gated):
            up = (b + 1) * BATCH < neurons
        if const_expr(self.bulk):
            self.fetch_bulk(o, s, b, barrier, down, up, down_buffer, up_buffer, neurons, at)
        else:
            row = at.warp & (BATCH - 1)
            if at.warp < BATCH and down:
                neuron = widen(s.union[cutlass.min(b * BATCH + row, neurons - 1)])
                self.copy_row(s.down.iterator + (down_buffer * BATCH + row) * self.pitch, o.w_down, neuron, at.lane)
            if const_expr(self.gated):
                if at.warp >= BATCH and up:
                    neuron = widen(s.union[cutlass.min((b + 1) * BATCH + row, neurons - 1)])
                    self.copy_row(s.up.iterator + (up_buffer * BATCH + row) * self.slab, o.w_up, neuron, at.lane)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_row(self, target, matrix, neuron, lane):
        """Start the copies of a row, 16 bytes per lane at a time; zeros beyond its last column."""
        source = address(matrix, neuron, lane * 8)
        for i in range_constexpr(self.slab // 256):
            exists = lane * 8 + 256 * i < matrix.shape[1]
            copy_async(target + (lane * 8 + 256 * i), source + 256 * i, Int32(16) if exists else Int32(0))

    @cute.jit
    def fetch_bulk(self, o, s, b, barrier, down, up, down_buffer, up_buffer, neurons, at):
        """`fetch_rows` by bulk copies, which complete on a barrier."""
        warp, left = at.warp, at.slab * self.slab
        size = cutlass.max(cutlass.min(o.w_down.shape[1] - left, Int32(self.slab)) * 2, Int32(0))
        if at.lane == 0 and (down or up):
            row = warp & (BATCH - 1)
            if warp == 0:
                rows = Int32(BATCH) * (Int32(down) + Int32(up))
                cute.arch.mbarrier_arrive_and_expect_tx(s.full + barrier, rows * size)
            if size > 0:
                if warp < BATCH and down:
                    neuron = widen(s.union[cutlass.min(b * BATCH + row, neurons - 1)])
                    target = s.down.iterator + (down_buffer * BATCH + row) * self.pitch
                    bulk_copy(target, address(o.w_down, neuron, left), size, s.full + barrier)
                if const_expr(self.gated):
                    if warp >= BATCH and up:
                        neuron = widen(s.union[cutlass.min((b + 1) * BATCH + row, neurons - 1)])
                        target = s.up.iterator + (up_buffer * BATCH + row) * self.slab
                        bulk_copy(target, address(o.w_up, neuron, left), size, s.full + barrier)

    @cute.jit
    def sync(self):
        """One barrier per batch for the CTAs that share a group; the next batch has arrived."""
        if const_expr(not self.bulk):
            cute.arch.cp_async_wait_group(self.buffers - 2)
        if const_expr(self.slabs > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def dot(self, s, x_frag, source, b, at):
        """Store partial dot products of the up rows of batch `b` with eight tokens over this warp's columns.

        With g = lane / 4 and i = lane % 4, a lane's 16 bytes are eight columns of row g / 2, and a quarter of the warp
        reads 128 bytes of one row. They are column g of B: even g hold columns 0-31 of a block of 64, odd g 32-63. Rows
        g and g + 8 of A are the same two halves of token g, so sums 0 and 3 of a lane belong to token g and row i; the
        other half of the sums is not used.
        """
        sums = [Float32(0.0)] * 4
        for block in range_constexpr(self.blocks):
            w = load_values(source + BLOCK * block)
            for i in range_constexpr(2):
                x0, x1 = x_frag[2 * i, 0, block], x_frag[2 * i, 1, block]
                x2, x3 = x_frag[2 * i + 1, 0, block], x_frag[2 * i + 1, 1, block]
                sums = mma_16x8x16(sums, x0, x1, x2, x3, w[2 * i], w[2 * i + 1], self.dtype)
        value = sums[0] + sums[3]
        # added once, by the first warp of the first slab
        value += s.biases[b * BATCH + (at.lane & 3)] if at.warp == 0 and at.slab == 0 else Float32(0.0)
        s.partial[((b & 1) * WARPS + at.warp) * (TOKENS * BATCH) + at.lane] = value

    @cute.jit
    def add_rows(self, acc, source, h0, h1, lane, apart: cutlass.Constexpr):
        """acc += this warp's columns of four down rows times h; h0, h1 are those of neurons 2 (lane % 2) and the next.

        B operands: the first term of h in k = 0-3 and the second in k = 4-7, where A repeats the rows; then the third.
        If `apart`, one mma takes all terms, and fp32 additions add its products to the sums.
        """
        first, rest0, rest1 = split_pair(h0, h1, self.dtype)
        second, rest0, rest1 = split_pair(rest0, rest1, self.dtype)
        upper = lane & 2 != 0
        leading = second if upper else first
        third = Uint32(0) if upper else pack(rest0, rest1, self.dtype)
        for block in range_constexpr(self.blocks):
            for half in range_constexpr(2):
                a = load_matrices_transposed(source + (BLOCK * block + BLOCK // 2 * half))
                if const_expr(apart):
                    for i in range_constexpr(2):
                        rows = (a[2 * i], a[2 * i + 1]) * 2
                        sums = mma_16x8x16([Float32(0.0)] * 4, *rows, leading, third, self.dtype)
                        for j in range_constexpr(4):
                            acc[j, 2 * half + i, block] += sums[j]
                else:
                    # consecutive mma use different sums
                    for b in (leading, third):
                        for i in range_constexpr(2):
                            tile = 2 * half + i
                            sums = [acc[j, tile, block] for j in range(4)]
                            sums = mma_16x8x8(sums, a[2 * i], a[2 * i + 1], b, self.dtype)
                            for j in range_constexpr(4):
                                acc[j, tile, block] = sums[j]

    @cute.jit
    def up_projections(self, s, b, g, pair):
        """Up projections of neurons `pair` and `pair + 1` of batch `b` for token `g`: sums over warps and slabs."""
        up0, up1 = Float32(0.0), Float32(0.0)
        for w in range_constexpr(WARPS):
            at = (((b & 1) * WARPS + w) * TOKENS + g) * BATCH + pair
            if const_expr(self.slabs > 1):
                for r in range_constexpr(self.slabs):
                    # four values from an address that is a multiple of 16 bytes
                    quad = load_peer(s.partial.iterator + (at - pair), Int32(r))
                    up0 += quad[2] if pair > 0 else quad[0]
                    up1 += quad[3] if pair > 0 else quad[1]
            else:
                up0 += s.partial[at]
                up1 += s.partial[at + 1]
        return up0, up1

    # ---- x and y ----

    @cute.jit
    def load_x(self, o, at):
        """Load A operands of dot: pieces lane % 4 and lane % 4 + 4 of the warp's blocks of 64 columns, 0 outside x."""
        frag = cute.make_rmem_tensor((4, 2, self.blocks), Uint32)
        frag.fill(0)
        if const_expr(self.gated):
            # lane 4g + i holds x of token g
            m = at.first + (at.lane >> 2)
            if m < o.y.shape[0]:
                for block in range_constexpr(self.blocks):
                    for odd in range_constexpr(2):
                        column = at.slab * self.slab + self.first_column(at.warp, block) + 32 * odd + (at.lane & 3) * 8
                        if column < o.x.shape[1]:
                            values = load_values(address(o.x, m, column))
                            for i in range_constexpr(4):
                                frag[i, odd, block] = values[i]
        return frag

    @cute.jit
    def stage_rows(self, o, s, acc, at):
        """Round the sums into `staged`: register 2i + j is token 2 (lane % 4) + j, column lane / 4 + 8i."""
        for block in range_constexpr(self.blocks):
            for i in range_constexpr(8):
                column = self.first_column(at.warp, block) + 8 * i + (at.lane >> 2)
                # an empty bias has no columns
                whole = at.slab * self.slab + column
                bias = o.b_down[whole].to(Float32) if whole < o.b_down.shape[0] else Float32(0.0)
                for j in range_constexpr(2):
                    value = acc[2 * (i % 2) + j, i // 2, block] + bias
                    s.staged[((at.lane & 3) * 2 + j) * self.pitch + column] = value.to(self.dtype)

    @cute.jit
    def store_staged(self, s, y, m, column, token, staged_column):
        """Store eight columns of one row of y."""
        values = load_values(s.staged.iterator + (token * self.pitch + staged_column))
        store_values(address(y, m, column), values)

    def first_column(self, warp, block):
        """First column of a warp's block."""
        return (warp * self.blocks + block) * BLOCK

    # ---- shared memory ----

    def views(self, shared):
        """Tensors over the shared struct."""
        arena = shared.arena.data_ptr()
        bitmap_words = geometry.MAX_NEURONS // 32
        bitmap = cute.recast_ptr(arena, dtype=Uint32)
        return Views(
            full=shared.full.data_ptr(),
            counts=shared.counts.get_tensor(cute.make_layout(16)),
            sums=shared.sums.get_tensor(cute.make_layout(WARPS)),
            union=shared.union.get_tensor(cute.make_layout(WINDOW)),
            biases=shared.biases.get_tensor(cute.make_layout(WINDOW + BATCH if self.gated else 2)),
            gates=shared.gates.get_tensor(cute.make_layout(WINDOW * TOKENS)),
            partial=shared.partial.get_tensor(cute.make_layout(2 * WARPS * TOKENS * BATCH)),
            up=cute.make_tensor(arena, cute.make_layout(max(self.up_values, 8))),
            down=cute.make_tensor(arena + self.up_values, cute.make_layout(self.buffers * BATCH * self.pitch)),
            bitmap=cute.make_tensor(bitmap, cute.make_layout(bitmap_words)),
            prefix=cute.make_tensor(
                cute.recast_ptr(bitmap + bitmap_words, dtype=Uint16), cute.make_layout(bitmap_words)
            ),
            staged=cute.make_tensor(arena, cute.make_layout(TOKENS * self.pitch)),
        )

    @cute.jit
    def init_barriers(self, s, thread):
        if thread <= self.buffers:
            cute.arch.mbarrier_init(s.full + thread, 1)
            cute.arch.mbarrier_init_fence()

    @cute.jit
    def clear_tails(self, s, columns, thread):
        """Clear the rings: bulk copies write the columns that exist, and those beyond must be zero, not NaN."""
        if columns < self.slab:
            # `up` and `down` are contiguous
            pairs = cute.make_tensor(
                cute.recast_ptr(s.staged.iterator, dtype=Uint32), cute.make_layout(self.arena // 2)
            )
            for i in cutlass.range(thread, self.arena // 2, THREADS, unroll=4):
                pairs[i] = Uint32(0)


def signature(spec: UpDownSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    heavy = operands.vector(Int32, cute.sym_int32())
    return UpDown(spec), (*up_down_token.fake_arguments(spec), heavy, Int32(1), Int32(1), Int32(1))
