"""Gated up and down projections on the pattern of a packed gate: y[m] = sum over non-zeros c of h[m, c] * w_down[c],
with h[m, c] = gate[m, c] * (x[m] . w_up[c] + up_bias[c]). Strategy `row`: only the weight rows of non-zeros are read.

The bound is L2: two rows of K values a non-zero. Tokens that stand side by side share neurons, so a CTA takes a group of
tokens and streams each weight row of their union once. Two launches, the second for what the first leaves:

    light   one CTA per group of tokens, one token a warp (K > 2048: 2, 4 or 8 warps share a token). Two CTAs per SM, so one
            builds its lists while the other streams.
    heavy   the tokens with more than LIST non-zeros. Up to CTA_LIMIT one CTA takes a token and deals its non-zeros to all
            warps; beyond, a cluster of eight CTAs does. Partial sums meet in a fixed order.

The eight warps of a CTA read the words and sort the union of neurons with a bitmap. The union's rows then stream through a
few stages of shared memory, one neuron a stage, while each warp walks its own non-zeros in ascending order: dot product with
the up row, times the gate, added to 64 fp32 sums a lane with the down row. There is no loading warp, it would cost every warp
32 of its 128 registers: the last warp to leave a stage refills it with the next neuron of the union, so a slow warp holds up
one stage and nothing else. Neurons are loaded in ascending order, so the lowest one not yet consumed is always loaded.

    FULL[r]     1 arrival + bytes: the rows of neuron r of the union have arrived in stage stage_of[r].
    union[r]    neuron | warps that have yet to use it << 16, counted down by acq_rel atomics.
    EPOCH       neurons between two __syncthreads; every FULL barrier completes once an epoch, so its parity is the epoch's.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync
from cutlass.memory import SmemAllocator, get_smem_capacity_in_bytes

from . import format as twell
from .sm90 import operands
from .sm90.values import high_to_float, lanes_before, low_to_float, nonzero_flags
from .specs import UpDownSpec

WARPS = 8
THREADS = 32 * WARPS
CLUSTER = 8
# most non-zeros of a token that its group's CTA takes; equals a tile, so that eight tiles of a heavy token fill the lists
LIST = twell.TILE
# most non-zeros that one CTA of the heavy kernel takes alone
CTA_LIMIT = 512
# larger than any position in a union
SENTINEL = 0xFFFF
EPOCH = 512
# places in `counts`, behind the lengths of the lists
HEAVY, SIZE, NEXT = WARPS, WARPS + 1, WARPS + 2


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads. TOKEN + t joins the warps that share token t."""

    TOKEN = 1


class Views(NamedTuple):
    """A CTA's shared memory by name."""

    full: Any  # [EPOCH] mbarriers
    stage_of: Any  # [EPOCH]
    counts: Any  # [16] non-zeros of each list; mask of heavy tokens; size of the union; next neuron to load
    sums: Any  # [8] bitmap population counts of the warps
    partial: Any  # [2, 8] dot products and sums of |h| that warps exchange
    union: Any  # [tokens * LIST] neuron | remaining users << 16, in the order of streaming
    lists: Any  # [tokens, LIST + 1] value bits << 16 | position in the union, ended by SENTINEL
    x: Any  # [tokens, k_max]
    ring: Any  # [stages, rows, k_max]
    scratch: Any  # [tokens, k_max] fp32 over x and ring: sums that meet after streaming


class UpDown:
    """One dtype and class of hidden sizes; `gated = False` leaves out the up projection (see down.py)."""

    gated = True

    def __init__(self, spec: Any):
        self.dtype = operands.DTYPES[spec.dtype]
        self.k_max, self.has_bias = spec.k_max, spec.bias
        self.warps_per_token = max(1, spec.k_max // 2048)
        self.tokens = WARPS // self.warps_per_token
        assert self.tokens == twell.group_rows(spec.k_max)
        self.vectors = spec.k_max // (self.warps_per_token * 256)
        self.rows = 2 if self.gated else 1
        # two CTAs share an SM as long as a token fits a warp
        self.ctas_per_sm = 2 if self.warps_per_token == 1 else 1
        budget = (57344 if self.gated else 90112) if self.ctas_per_sm == 2 else 163840
        self.stages = min(64, max(2, budget // (self.rows * spec.k_max * 2)))
        self.x_values = self.tokens * spec.k_max if self.gated else 0
        self.ring_values = self.stages * self.rows * spec.k_max
        # the bitmap (8 KB), its prefix sums (4 KB) and the fp32 scratch borrow this memory in turn
        self.arena_values = max(self.x_values + self.ring_values, self.tokens * spec.k_max * 2, self.x_values + 6144)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        words: cute.Tensor,
        spill: cute.Tensor,
        w_up: cute.Tensor,
        w_down: cute.Tensor,
        up_bias: cute.Tensor | None,
        down_bias: cute.Tensor | None,
        y: cute.Tensor,
        l1: cute.Tensor,
        heavy: cute.Tensor,
        words_per_tile: Int32,
        max_clusters: Int32,
        stream: cuda.CUstream,
    ):
        self.launch(x, words, spill, w_up, w_down, up_bias, down_bias, y, l1, heavy, words_per_tile, max_clusters, stream)

    @cute.jit
    def launch(self, x, words, spill, w_up, w_down, up_bias, down_bias, y, l1, heavy, words_per_tile, max_clusters, stream):
        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, EPOCH]
            counts: cute.struct.MemRange[Int32, 16]
            sums: cute.struct.MemRange[Int32, WARPS]
            partial: cute.struct.Align[cute.struct.MemRange[Float32, 2 * WARPS], 16]
            union: cute.struct.MemRange[Uint32, self.tokens * LIST]
            lists: cute.struct.MemRange[Uint32, self.tokens * (LIST + 1)]
            stage_of: cute.struct.MemRange[Uint8, EPOCH]
            arena: cute.struct.Align[cute.struct.MemRange[self.dtype, self.arena_values], 128]

        # 1 KB of an SM's shared memory is reserved for each CTA
        assert Shared.size_in_bytes() <= (get_smem_capacity_in_bytes("sm_90") + 1024) // self.ctas_per_sm - 1024
        self.shared = Shared
        arguments = (x, words, spill, w_up, w_down, up_bias, down_bias, y, l1, heavy, words_per_tile)
        if y.shape[0] > 0:
            self.light(*arguments).launch(
                grid=(cute.ceil_div(y.shape[0], self.tokens), 1, 1),
                block=(THREADS, 1, 1),
                min_blocks_per_mp=self.ctas_per_sm,
                preferred_smem_carveout=100,
                stream=stream,
            )
            self.heavy(*arguments).launch(
                grid=(CLUSTER, cutlass.min(cute.ceil_div(y.shape[0], self.tokens), max_clusters * self.ctas_per_sm), 1),
                block=(THREADS, 1, 1),
                cluster=(CLUSTER, 1, 1),
                min_blocks_per_mp=self.ctas_per_sm,
                preferred_smem_carveout=100,
                stream=stream,
            )

    # ---- light: one CTA per group of tokens ----

    @cute.kernel
    def light(
        self,
        x: cute.Tensor | None,
        words: cute.Tensor,
        spill: cute.Tensor,
        w_up: cute.Tensor | None,
        w_down: cute.Tensor,
        up_bias: cute.Tensor | None,
        down_bias: cute.Tensor | None,
        y: cute.Tensor,
        l1: cute.Tensor,
        heavy: cute.Tensor,
        width: Int32,
    ):
        thread = cute.arch.thread_idx()[0]
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.block_idx()[0]
        shared = SmemAllocator().allocate(self.shared)
        s = self.views(shared)
        neurons, tiles = w_down.shape[0], words.shape[1] // width
        slot, part = warp // self.warps_per_token, warp % self.warps_per_token
        m = group * self.tokens + slot

        self.init_barriers(s, thread)
        bitmap, prefix = self.union_scratch(s)
        for i in cutlass.range(thread, cute.ceil_div(neurons, 32), THREADS, unroll=1):
            bitmap[i] = Uint32(0)
        if thread == 0:
            s.counts[HEAVY] = 0
        if const_expr(self.gated):
            self.load_x(x, s.x, m, slot, part, lane)
        cute.arch.sync_threads()
        if warp < self.tokens:
            self.list_token(words, spill, s, bitmap, group * self.tokens + warp, warp, lane, width, tiles)
        cute.arch.sync_threads()
        self.sort_union(s, bitmap, prefix, neurons, thread, warp, lane)
        cute.arch.sync_threads()
        size = s.counts[SIZE]
        if warp < self.tokens:
            self.rank_list(s, bitmap, prefix, warp, lane)
        if thread == 0:
            heavy[group] = s.counts[HEAVY]
        self.clear_tails(s, w_down.shape[1], thread)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()

        acc = cute.make_rmem_tensor((8, self.vectors), Float32)
        acc.fill(0.0)
        total = self.gather(s, w_up, w_down, up_bias, acc, slot, slot, part, warp, lane, size, Int32(0))
        is_heavy = (s.counts[HEAVY] >> slot) & 1
        if m < y.shape[0] and is_heavy == 0:
            if lane == 0 and part == 0:
                l1[m] = total
            for v in range_constexpr(self.vectors):
                column = ((part * self.vectors + v) * 32 + lane) * 8
                if column < y.shape[1]:
                    self.store_vector(y, down_bias, m, column, acc[None, v])

    # ---- heavy: one cluster per token ----

    @cute.kernel
    def heavy(
        self,
        x: cute.Tensor | None,
        words: cute.Tensor,
        spill: cute.Tensor,
        w_up: cute.Tensor | None,
        w_down: cute.Tensor,
        up_bias: cute.Tensor | None,
        down_bias: cute.Tensor | None,
        y: cute.Tensor,
        l1: cute.Tensor,
        heavy: cute.Tensor,
        width: Int32,
    ):
        thread = cute.arch.thread_idx()[0]
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank, cluster, _ = cute.arch.block_idx()
        clusters = cute.arch.grid_dim()[1]
        shared = SmemAllocator().allocate(self.shared)
        s = self.views(shared)
        self.init_barriers(s, thread)
        cute.arch.sync_threads()
        lap = Int32(0)
        # groups are dealt to clusters in turn, and a group's tokens to CTAs or to the whole cluster by their own non-zeros
        # alone: neither the batch nor the grid changes a token's result
        for together in range_constexpr(2):
            turn = Int32(0)
            for first in cutlass.range(0, heavy.shape[0], 32 * clusters, unroll=1):
                group = first + lane * clusters + cluster
                entry = heavy[group] if group < heavy.shape[0] else 0
                mask = entry >> WARPS if const_expr(together) else entry & ~(entry >> WARPS) & ((1 << WARPS) - 1)
                found = Uint32(cute.arch.vote_ballot_sync(mask != 0))
                while found != 0:
                    source = lowest_bit(found)
                    found = found & (found - 1)
                    tokens = Uint32(cute.arch.shuffle_sync(mask, source))
                    while tokens != 0:
                        m = (first + source * clusters + cluster) * self.tokens + lowest_bit(tokens)
                        tokens = tokens & (tokens - 1)
                        if const_expr(together):
                            lap = self.heavy_token(
                                s, x, words, spill, w_up, w_down, up_bias, down_bias, y, l1, width, m, rank, CLUSTER,
                                thread, warp, lane, lap,
                            )  # fmt: skip
                        else:
                            if turn % CLUSTER == rank:
                                lap = self.heavy_token(
                                    s, x, words, spill, w_up, w_down, up_bias, down_bias, y, l1, width, m, Int32(0), 1,
                                    thread, warp, lane, lap,
                                )  # fmt: skip
                            turn += 1

    @cute.jit
    def heavy_token(
        self, s, x, words, spill, w_up, w_down, up_bias, down_bias, y, l1, width, m, rank: Int32,
        ranks: cutlass.Constexpr, thread, warp, lane, lap,
    ):  # fmt: skip
        """One token by one CTA or by the CTAs of a cluster; returns the epochs streamed so far."""
        tiles = words.shape[1] // width
        slot, part = warp // self.warps_per_token, warp % self.warps_per_token
        if const_expr(self.gated):
            if warp < self.warps_per_token:
                self.load_x(x, s.x, m, Int32(0), warp, lane)
            cute.arch.cp_async_wait_group(0)
        self.clear_tails(s, w_down.shape[1], thread)
        acc = cute.make_rmem_tensor((8, self.vectors), Float32)
        acc.fill(0.0)
        total = Float32(0.0)
        # `tokens` tiles a round: at most tokens * LIST non-zeros, dealt evenly to the slots
        for first in cutlass.range(rank, tiles, ranks * self.tokens, unroll=1):
            tile = first + warp * ranks
            count = Int32(0)
            if warp < self.tokens:
                if tile < tiles:
                    count = words[m, tile * width]
                s.counts[warp] = count
            cute.arch.sync_threads()
            start, size = Int32(0), Int32(0)
            for w in range_constexpr(self.tokens):
                start += s.counts[w] if w < warp else 0
                size += s.counts[w]
            if count > 0:
                self.deal_tile(words, spill, s, m, tile, count, start, width, lane)
            if warp < self.tokens:
                if lane == 0:
                    s.lists[warp, (size - warp + self.tokens - 1) // self.tokens] = Uint32(SENTINEL)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            total += self.gather(s, w_up, w_down, up_bias, acc, slot, Int32(0), part, warp, lane, size, lap)
            lap += cute.ceil_div(size, EPOCH)
            cute.arch.sync_threads()

        # partial sums of the slots, then of the CTAs, each in a fixed order
        for v in range_constexpr(self.vectors):
            column = ((part * self.vectors + v) * 32 + lane) * 8
            for i in range_constexpr(8):
                s.scratch[column + i, slot] = acc[i, v]
        if lane == 0 and part == 0:
            s.partial[slot] = total
        cute.arch.sync_threads()
        for k in cutlass.range(thread, w_down.shape[1], THREADS, unroll=1):
            value = s.scratch[k, 0]
            for t in range_constexpr(1, self.tokens):
                value += s.scratch[k, t]
            s.scratch[k, 0] = value
        if thread == 0:
            for t in range_constexpr(1, self.tokens):
                s.partial[0] += s.partial[t]
        if const_expr(ranks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        out = cute.make_rmem_tensor((8,), Float32)
        for vector in cutlass.range(rank * THREADS + thread, y.shape[1] // 8, ranks * THREADS, unroll=1):
            out.fill(0.0)
            for r in range_constexpr(ranks):
                for i in range_constexpr(0, 8, 4):
                    quad = load_peer(s.scratch.iterator + (vector * 8 + i), Int32(r), ranks)
                    for j in range_constexpr(4):
                        out[i + j] += quad[j]
            self.store_vector(y, down_bias, m, vector * 8, out)
        if rank == 0 and thread == 0:
            sum_h = Float32(0.0)
            for r in range_constexpr(ranks):
                sum_h += load_peer(s.partial.iterator, Int32(r), ranks)[0]
            l1[m] = sum_h
        # this CTA's sums have been read: x and the ring may be overwritten
        cute.arch.fence_proxy("async.shared", space="cta")
        if const_expr(ranks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        return lap

    @cute.jit
    def deal_tile(self, words, spill, s, m, tile, count, start, width, lane):
        """Deal a tile's non-zeros, positions `start` and on of this round, to the slots in turn."""
        if count < width:
            for i in cutlass.range(lane, count, 32, unroll=1):
                self.deal(s, start + i, Uint32(words[m, tile * width + 1 + i]))
        else:
            quad, flags, place = self.spilled(spill, m, tile, lane)
            place += start
            for i in range_constexpr(8):
                bits = quad[i // 2] & Uint32(0xFFFF0000) if const_expr(i % 2) else quad[i // 2] << 16
                if flags[i]:
                    self.deal(s, place, bits | Uint32(tile * twell.TILE + lane * 8 + i))
                place += Int32(flags[i])

    @cute.jit
    def deal(self, s, position, word):
        s.union[position] = (word & Uint32(0xFFFF)) | Uint32(self.warps_per_token << 16)
        s.lists[position % self.tokens, position // self.tokens] = (word & Uint32(0xFFFF0000)) | Uint32(position)

    # ---- lists of a group ----

    @cute.jit
    def list_token(self, words, spill, s, bitmap, m, slot, lane, width, tiles):
        """List a token's non-zeros, ascending, and mark them in the group's bitmap; a heavy token leaves an empty list."""
        valid = m < words.shape[0]
        total = Int32(0)
        for first in cutlass.range(0, tiles, 32, unroll=1):
            tile = first + lane
            total += words[m, tile * width] if valid and tile < tiles else 0
        total = Int32(cute.arch.warp_redux_sync(total, "add"))
        if total > LIST:
            if lane == 0:
                bits = (1 << WARPS) + 1 if total > CTA_LIMIT else 1
                cute.arch.atomic_or(s.counts.iterator + HEAVY, Int32(bits) << slot, scope="cta")
            total = Int32(0)
        if total > 0:
            base = Int32(0)
            for first in cutlass.range(0, tiles, 32, unroll=1):
                tile = first + lane
                count = words[m, tile * width] if tile < tiles else 0
                inclusive = count
                for d in range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(inclusive, 1 << d, mask_and_clamp=0)
                    inclusive = inclusive + other if lane >= (1 << d) else inclusive
                start = base + inclusive - count
                stored = count if count < width else 0
                self.list_words(words, s, bitmap, m, slot, tile, stored, start, width)
                overflowing = Uint32(cute.arch.vote_ballot_sync(count >= width))
                while overflowing != 0:
                    source = lowest_bit(overflowing)
                    overflowing = overflowing & (overflowing - 1)
                    place = cute.arch.shuffle_sync(start, source)
                    self.list_spilled(spill, s, bitmap, m, slot, first + source, place, lane)
                base += cute.arch.shuffle_sync(inclusive, 31)
        if lane == 0:
            s.counts[slot] = total
            s.lists[slot, total] = Uint32(SENTINEL)

    @cute.jit
    def list_words(self, words, s, bitmap, m, slot, tile, stored, start, width):
        """Each lane lists its own tile, four words at a time (the first of a tile is its count)."""
        quads = (stored + 4) // 4 if stored > 0 else 0
        quad = cute.make_rmem_tensor((4,), Int32)
        line = words.iterator + (Int64(m) * words.stride[0] + tile * width)
        for q in cutlass.range(0, Int32(cute.arch.warp_redux_sync(quads, "max")), unroll=1):
            if q < quads:
                cute.autovec_copy(cute.make_tensor((line + q * 4).align(16), cute.make_layout(4)), quad)
                for j in range_constexpr(4):
                    i = q * 4 + j - 1
                    if i >= 0 and i < stored:
                        self.list_one(s, bitmap, slot, start + i, Uint32(quad[j]))

    @cute.jit
    def list_spilled(self, spill, s, bitmap, m, slot, tile, start, lane):
        """The warp lists one overflowing tile from its dense values."""
        quad, flags, place = self.spilled(spill, m, tile, lane)
        place += start
        for i in range_constexpr(8):
            bits = quad[i // 2] & Uint32(0xFFFF0000) if const_expr(i % 2) else quad[i // 2] << 16
            if flags[i]:
                self.list_one(s, bitmap, slot, place, bits | Uint32(tile * twell.TILE + lane * 8 + i))
            place += Int32(flags[i])

    @cute.jit
    def spilled(self, spill, m, tile, lane):
        """Eight values of a spilled tile a lane, which are non-zeros, and how many stand in the lanes before."""
        quad = cute.make_rmem_tensor((4,), Uint32)
        source = spill.iterator + (Int64(m) * spill.stride[0] + tile * twell.TILE + lane * 8)
        cute.autovec_copy(cute.make_tensor(cute.recast_ptr(source.align(16), dtype=Uint32), cute.make_layout(4)), quad)
        flags = nonzero_flags(quad)
        own = Int32(0)
        for i in range_constexpr(8):
            own += Int32(flags[i])
        return quad, flags, lanes_before(own)

    @cute.jit
    def list_one(self, s, bitmap, slot, place, word):
        neuron = word & Uint32(0xFFFF)
        s.lists[slot, place] = word
        cute.arch.atomic_or(bitmap.iterator + Int32(neuron >> 5), Uint32(1) << (neuron & 31), scope="cta")

    @cute.jit
    def sort_union(self, s, bitmap, prefix, neurons, thread, warp, lane):
        """From the bitmap: `union` = its neurons ascending, prefix[i] = how many stand before word i, and the size."""
        bitmap_words = cute.ceil_div(neurons, 32)
        share = cute.ceil_div(bitmap_words, THREADS)
        own = Int32(0)
        for i in cutlass.range(share, unroll=1):
            at = thread * share + i
            own += Int32(cute.arch.popc(bitmap[at])) if at < bitmap_words else 0
        inclusive = own
        for d in range_constexpr(5):
            other = cute.arch.shuffle_sync_up(inclusive, 1 << d, mask_and_clamp=0)
            inclusive = inclusive + other if lane >= (1 << d) else inclusive
        sums = s.sums
        if lane == 31:
            sums[warp] = inclusive
        cute.arch.sync_threads()
        position, size = inclusive - own, Int32(0)
        for w in range_constexpr(WARPS):
            position += sums[w] if w < warp else 0
            size += sums[w]
        for i in cutlass.range(share, unroll=1):
            at = thread * share + i
            if at < bitmap_words:
                prefix[at] = Uint16(position)
                word = bitmap[at]
                while word != 0:
                    bit = lowest_bit(word)
                    word = word & (word - 1)
                    s.union[position] = Uint32(at * 32 + bit)
                    position += 1
        if thread == 0:
            s.counts[SIZE] = size

    @cute.jit
    def rank_list(self, s, bitmap, prefix, slot, lane):
        """Replace the neuron in each listed word by its position in the union, and count its users."""
        for i in cutlass.range(lane, s.counts[slot], 32, unroll=1):
            word = s.lists[slot, i]
            neuron = word & Uint32(0xFFFF)
            below = bitmap[neuron >> 5] & ((Uint32(1) << (neuron & 31)) - 1)
            position = prefix[neuron >> 5].to(Uint32) + Uint32(cute.arch.popc(below))
            s.lists[slot, i] = (word & Uint32(0xFFFF0000)) | position
            users = Uint32(self.warps_per_token << 16)
            cute.arch.atomic_add(s.union.iterator + Int32(position), users, scope="cta")

    # ---- the ring ----

    @cute.jit
    def load(self, s, w_up, w_down, r, stage):
        """Copy the rows of neuron `r` of the union into a stage; one lane."""
        bytes_per_row = w_down.shape[1] * 2
        full = s.full + r % EPOCH
        s.stage_of[r % EPOCH] = Uint8(stage)
        cute.arch.mbarrier_arrive_and_expect_tx(full, self.rows * bytes_per_row)
        neuron = Int64(s.union[r] & Uint32(0xFFFF))
        target = s.ring.iterator + stage * (self.rows * self.k_max)
        if const_expr(self.gated):
            bulk_copy(target, w_up.iterator + neuron * w_up.stride[0], bytes_per_row, full)
            target = target + self.k_max
        bulk_copy(target, w_down.iterator + neuron * w_down.stride[0], bytes_per_row, full)

    @cute.jit
    def gather(self, s, w_up, w_down, up_bias, acc, slot, x_slot, part, warp, lane, size, lap):
        """Stream the union, walk list `slot` and add to `acc`; returns the sum of |h|, the same in every lane.

        `lap` counts the epochs that this CTA has streamed before.
        """
        total = Float32(0.0)
        cursor = Int32(0)
        word = s.lists[slot, 0]
        for first in cutlass.range(0, size, EPOCH, unroll=1):
            last = cutlass.min(first + EPOCH, size)
            primed = cutlass.min(first + self.stages, last)
            if first > 0:
                # the last warps of the epoch before still count NEXT up
                cute.arch.sync_threads()
            if warp == 0 and lane == 0:
                s.counts[NEXT] = primed
            cute.arch.sync_threads()
            if lane == 0:
                for r in cutlass.range(first + warp, primed, WARPS, unroll=1):
                    self.load(s, w_up, w_down, r, r - first)
            # barriers without a neuron complete too: every barrier has seen as many phases as there were epochs
            for i in cutlass.range(last - first + warp * 32 + lane, EPOCH, THREADS, unroll=1):
                cute.arch.mbarrier_arrive(s.full + i)
            parity = (lap + first // EPOCH) & 1
            while (word & Uint32(0xFFFF)) < Uint32(last):
                r = Int32(word & Uint32(0xFFFF))
                h = high_to_float(word, self.dtype)
                if const_expr(self.has_bias and self.gated):
                    b = up_bias[s.union[r] & Uint32(0xFFFF)].to(Float32)
                cute.arch.mbarrier_wait(s.full + r % EPOCH, parity)
                stage = Int32(s.stage_of[r % EPOCH])
                row = stage * (self.rows * self.k_max)
                if const_expr(self.gated):
                    up = self.dot(s, x_slot, row, slot, part, warp, lane, cursor)
                    if const_expr(self.has_bias):
                        up += b
                    h = h * up
                    row = row + self.k_max
                total += cute.arch.fmax(h, -h)
                for v in range_constexpr(self.vectors):
                    w = self.vector(s.ring, row, part, v, lane)
                    for i in range_constexpr(4):
                        acc[2 * i, v] += low_to_float(w[i], self.dtype) * h
                        acc[2 * i + 1, v] += high_to_float(w[i], self.dtype) * h
                cute.arch.sync_warp()
                if lane == 0:
                    self.leave(s, w_up, w_down, r, stage, last)
                cursor += 1
                word = s.lists[slot, cursor]
        return total

    @cute.jit
    def leave(self, s, w_up, w_down, r, stage, last):
        """One lane of a warp that is done with neuron `r`: the last one refills the stage."""
        before = cute.arch.atomic_add(s.union.iterator + r, Uint32(0xFFFF0000), sem="acq_rel", scope="cta")
        if before >> 16 == 1:
            following = Int32(cute.arch.atomic_add(s.counts.iterator + NEXT, Int32(1), scope="cta"))
            if following < last:
                self.load(s, w_up, w_down, following, stage)

    @cute.jit
    def dot(self, s, x_slot, row, slot, part, warp, lane, cursor):
        """x . w_up row, in every lane of the warps that share the token.

        Tensor cores do it: a lane's registers of x are row lane / 4 of A, those of w_up column lane / 4 of B, so the diagonal
        of the product holds the eight partial sums of the quads. That takes 2 instructions per 8 products instead of 24.
        """
        sums = [[Float32(0.0)] * 4 for _ in range(4)]
        pair = min(2, self.vectors)
        # a rolled loop keeps the compiler from holding all vectors at once, beside the 64 sums of y
        for v in cutlass.range(0, self.vectors, pair, unroll=1):
            for i in range_constexpr(pair):
                a = self.vector(s.x, x_slot * self.k_max, part, v + i, lane)
                w = self.vector(s.ring, row, part, v + i, lane)
                for j in range_constexpr(2):
                    sums[2 * i + j] = mma_rows(sums[2 * i + j], a[2 * j], a[2 * j + 1], w[2 * j], w[2 * j + 1], self.dtype)
        even = sums[0][0] + sums[1][0] + sums[2][0] + sums[3][0]
        odd = sums[0][1] + sums[1][1] + sums[2][1] + sums[3][1]
        diagonal = odd if (lane >> 2) & 1 else even
        value = cute.arch.warp_reduction_sum(diagonal if (lane & 3) == (lane >> 3) else Float32(0.0))
        if const_expr(self.warps_per_token > 1):
            # two sets of partial sums, so that one barrier a non-zero is enough
            bank = (cursor & 1) * WARPS
            if lane == 0:
                s.partial[bank + warp] = value
            cute.arch.barrier(barrier_id=Barrier.TOKEN + slot, number_of_threads=32 * self.warps_per_token)
            value = Float32(0.0)
            for p in range_constexpr(self.warps_per_token):
                value += s.partial[bank + slot * self.warps_per_token + p]
        return value

    @cute.jit
    def vector(self, buffer, row, part, v, lane):
        """Eight consecutive values of a row in shared memory, as four registers."""
        column = ((part * self.vectors + v) * 32 + lane) * 8
        out = cute.make_rmem_tensor((4,), Uint32)
        source = cute.recast_ptr((buffer.iterator + (row + column)).align(16), dtype=Uint32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), out)
        return out

    # ---- shared memory, x and y ----

    def views(self, shared):
        """Tensors over the shared struct, by name."""
        arena = shared.arena.data_ptr()
        return Views(
            full=shared.full.data_ptr(),
            stage_of=shared.stage_of.get_tensor(cute.make_layout(EPOCH)),
            counts=shared.counts.get_tensor(cute.make_layout(16)),
            partial=shared.partial.get_tensor(cute.make_layout(2 * WARPS)),
            sums=shared.sums.get_tensor(cute.make_layout(WARPS)),
            union=shared.union.get_tensor(cute.make_layout(self.tokens * LIST)),
            lists=shared.lists.get_tensor(cute.make_layout((self.tokens, LIST + 1), stride=(LIST + 1, 1))),
            x=cute.make_tensor(arena, cute.make_layout(max(self.x_values, 8))),
            ring=cute.make_tensor(arena + self.x_values, cute.make_layout(self.ring_values)),
            scratch=cute.make_tensor(
                cute.recast_ptr(arena, dtype=Float32), cute.make_layout((self.k_max, self.tokens))
            ),
        )

    def union_scratch(self, s):
        """The bitmap and its prefix sums; they are read before the ring, whose memory they borrow, is filled."""
        size = twell.MAX_NEURONS // 32
        bitmap = cute.recast_ptr(s.ring.iterator, dtype=Uint32)
        prefix = cute.recast_ptr(bitmap + size, dtype=Uint16)
        return cute.make_tensor(bitmap, cute.make_layout(size)), cute.make_tensor(prefix, cute.make_layout(size))

    @cute.jit
    def init_barriers(self, s, thread):
        for i in cutlass.range(thread, EPOCH, THREADS, unroll=1):
            cute.arch.mbarrier_init(s.full + i, 1)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def clear_tails(self, s, k, thread):
        """Bulk copies write the first K values of a row; what lies behind them must be zero, not NaN."""
        if k < self.k_max:
            cute.arch.sync_threads()
            pairs = cute.make_tensor(cute.recast_ptr(s.ring.iterator, dtype=Uint32), cute.make_layout(self.ring_values // 2))
            for i in cutlass.range(thread, self.ring_values // 2, THREADS, unroll=4):
                pairs[i] = Uint32(0)

    @cute.jit
    def load_x(self, x, sX, m, slot, part, lane):
        """One warp's share of a row of x, zeros beyond K and beyond the last token."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128)
        inside = cute.make_rmem_tensor((1,), Boolean)
        row = m if m < x.shape[0] else 0
        for v in range_constexpr(self.vectors):
            column = ((part * self.vectors + v) * 32 + lane) * 8
            inside[0] = m < x.shape[0] and column < x.shape[1]
            source = x.iterator + (Int64(row) * x.stride[0] + (column if column < x.shape[1] else 0))
            target = sX.iterator + (slot * self.k_max + column)
            line = cute.make_layout(((8, 1),))
            cute.copy(
                atom, cute.make_tensor(source.align(16), line), cute.make_tensor(target.align(16), line), pred=inside
            )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def store_vector(self, y, down_bias, m, column, values):
        """Eight columns of a row of y, rounded once."""
        out = cute.make_rmem_tensor((8,), self.dtype)
        for i in range_constexpr(8):
            value = values[i]
            if const_expr(self.has_bias):
                value += down_bias[column + i].to(Float32)
            out[i] = value.to(self.dtype)
        target = y.iterator + (Int64(m) * y.stride[0] + column)
        cute.autovec_copy(out, cute.make_tensor(target.align(16), cute.make_layout(8)))


@cute.jit
def bulk_copy(target, source, size: Int32, barrier):
    """One row from global to shared memory; its bytes complete on the mbarrier."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, size, barrier],
    )


@cute.jit
def mma_rows(sums, a_low: Uint32, a_high: Uint32, b_low: Uint32, b_high: Uint32, dtype: cutlass.Constexpr):
    """sums += A B for one m16n8k16 fragment whose rows 8 to 15 of A are zero."""
    kind = "bf16" if const_expr(dtype is cutlass.BFloat16) else "f16"
    return list(
        cute.arch.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{ {$w0}, {$w1}, {$w2}, {$w3} }, { {$r0}, {$r1}, {$r2}, {$r1} }, { {$r3}, {$r4} }, "
            "{ {$r5}, {$r6}, {$r7}, {$r8} };",
            write_only_types=[Float32] * 4,
            read_only_args=[a_low, Uint32(0), a_high, b_low, b_high, *sums],
        )
    )


@cute.jit
def load_peer(source, rank: Int32, ranks: cutlass.Constexpr):
    """Four fp32 values from the same place in the shared memory of CTA `rank` of the cluster."""
    if const_expr(ranks == 1):
        own = cute.make_tensor(source, cute.make_layout(4))
        return own[0], own[1], own[2], own[3]
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[cute.arch.map_dsmem_ptr(source, rank).toint()],
    )


@cute.jit
def lowest_bit(mask: Uint32) -> Int32:
    """Index of the lowest set bit; -1 for an empty mask."""
    return 31 - Int32(cute.arch.clz(mask & (Uint32(0) - mask)))


def signature(spec: UpDownSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype = operands.DTYPES[spec.dtype]
    m, n, k = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    arguments = (
        operands.rows(dtype, m, k),
        operands.rows(Int32, m, cute.sym_int32(divisibility=32)),
        operands.rows(dtype, m, cute.sym_int32(divisibility=twell.TILE)),
        operands.rows(dtype, n, k),
        operands.rows(dtype, n, k),
        operands.vector(dtype, n) if spec.bias else None,
        operands.vector(dtype, k) if spec.bias else None,
        operands.rows(dtype, m, k),
        operands.vector(cutlass.Float32, m),
        operands.vector(Int32, cute.sym_int32()),
        Int32(1),
        Int32(1),
    )
    return UpDown(spec), arguments
