"""TwELL to the hybrid format: for each tile of 128 tokens, a list of neurons and the entries that refer to it.

`compact`, one CTA per token tile, 32 warps with four tokens each:

    mark    count the non-zeros by neuron, in one byte each, as there are at most 128. Non-zeros are kept in shared
            memory, token by token and ascending, while there is room.
    list    non-zero bytes give the bitmap of the union, whose prefix sums are the ranks.
    count   count the entries by chunk of 64 ranks and token, in one byte each, as there are at most 64.
    write   prefix sums of these bytes over chunks and tokens are the positions; entries are staged in shared memory if
            there is room, then copied in one piece.

`count` and `write` distribute the kept non-zeros over all threads, so no heavy token occupies a single warp. An entry's
ordinal among those of its chunk and token is its distance from the first of them. Non-zeros that are not kept are read
again by the token's own warp, 32 at a time.

In inference the pool of entries has room for all gates, with a fixed part for each token tile. In training the pool is
small: `locate`, one cluster, first computes the token tiles' ranges from the statistics. Its warps add up the counts of
a token tile each, and the first CTA makes prefix sums of the totals. It also clears the popularity, to which `compact`
adds. If the ranges exceed the pool, `compact` only clears the sums of |h|.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from . import feasible, geometry
from .common import architecture, launch, operands
from .common.activation import power
from .common.byte_counters import PITCH, count_token
from .common.copies import address, load_values
from .common.rows import count_of, nth_word, spilled_word
from .common.values import (
    MAGNITUDE,
    byte_sum,
    count_flags,
    high_to_float,
    lowest_bit,
    nonzero_flags,
    prefix_sum,
    warp_sum,
    widen,
)
from .specs import PORTABLE, SM90, CompactSpec

TOKENS = geometry.TOKEN_TILE
CHUNK = geometry.CHUNK
WARPS = 32
THREADS = 32 * WARPS
# tokens of a warp; their byte counters share a word
OWN = TOKENS // WARPS
# words of a bitmap per tile
TILE_BITS = geometry.TILE // 32
# by family: most neurons; words of shared memory for counters, non-zeros and entries: all that the other lists leave
SIZES = {SM90: (geometry.MAX_NEURONS, 53248), PORTABLE: (geometry.PORTABLE_UNION_NEURONS, 23040)}
# entries that a thread processes at a time
BATCHES = 4
# CTAs of `locate` where there are clusters, and counts that a lane loads at a time: those of 5,632 neurons in one go
LOCATORS, COUNTS = 8, 12

MARK, COUNT, WRITE = range(3)


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    bitmap: Any  # [N / 32] the union
    prefix: Any  # [N / 32] neurons of the union before each word of the bitmap
    bases: Any  # [C] entries of each chunk, then the entries before it
    kept: Any  # [TOKENS] index of a token's first non-zero in `words`; negative if they are not kept
    sums: Any  # [WARPS] sums by warp
    scalars: Any  # [3] words kept, or kept with more room; index of the first that did not fit; last neuron
    counters: Any  # [N / 4] bytes by neuron, then [C, PITCH] bytes by chunk and token
    before: Any  # [C, PITCH] entries of a chunk before each four tokens
    words: Any  # [room] non-zeros as in TwELL; from `count` on with ranks instead of neurons
    owners: Any  # [room] bytes: their tokens
    staged: Any  # [room] entries, if all of them fit


class Compact:
    """For one dtype, for training or not; the compression is the run-time words_per_tile."""

    def __init__(self, spec: CompactSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.training = spec.training
        self.portable = spec.family == PORTABLE
        most, self.arena = SIZES[spec.family]
        self.chunks = most // CHUNK
        # words of the bitmap that a thread counts, and all of them
        self.own_words = -(-most // (32 * THREADS))
        self.bitmap = self.own_words * THREADS

    @cute.jit
    def __call__(self, *arguments: Any):
        """The operands of both kernels, and the stream.

        Also clear `l1`; if `plain`, without an up projection, set it to the sum of h of each token tile.

        `plain`: 0 with an up projection, otherwise 1 plus the code of the activation. If `by_place`, the gate has
        places in `listed`, which has `listed_sizes` neurons of each token tile, instead of neurons.
        """
        words, spill, stats, entries, neurons, chunks, sizes, popularity, l1, *more, stream = arguments

        @cute.struct
        class Shared:
            bitmap: cute.struct.MemRange[Uint32, self.bitmap]
            prefix: cute.struct.MemRange[Uint16, self.bitmap]
            bases: cute.struct.MemRange[Int32, self.chunks]
            kept: cute.struct.MemRange[Int32, TOKENS]
            sums: cute.struct.MemRange[Int32, WARPS]
            scalars: cute.struct.MemRange[Int32, 3]
            arena: cute.struct.Align[cute.struct.MemRange[Uint32, self.arena], 16]

        # counters and prefix sums of all chunks fit
        assert 6 * PITCH * self.chunks < 4 * self.arena
        self.shared = (feasible.check_portable_memory if self.portable else feasible.check_shared_memory)(Shared)
        if const_expr(self.training):
            self.locators = LOCATORS if architecture.at_least(90) else 1
            locate = self.locate(stats, chunks, sizes, popularity)
            launch.start(locate, self.locators, THREADS, stream, cluster=self.locators)
        if words.shape[0] > 0:
            compact = self.compact(words, spill, entries, neurons, chunks, sizes, popularity, l1, *more)
            launch.start(compact, chunks.shape[0], THREADS, stream, ctas_per_sm=1)

    # ---- the two kernels ----

    @cute.kernel
    def locate(self, stats: cute.Tensor, chunks: cute.Tensor, sizes: cute.Tensor, popularity: cute.Tensor):
        """Compute where the entries of each token tile begin and end, and the number of non-zeros; clear `popularity`.

        They go to the first and last column of `chunks`, and to the last element of `sizes`.
        """
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, tiles = cute.arch.block_idx()[0], chunks.shape[0]
        sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS))
        launch.wait()
        for i in cutlass.range(cta * THREADS + thread, popularity.shape[0], self.locators * THREADS, unroll=1):
            popularity[i] = Int32(0)
        # neighbouring tiles go to different CTAs
        for tile in cutlass.range(warp * self.locators + cta, tiles, self.locators * WARPS, unroll=1):
            total = self.count_tile(stats, tile, lane)
            if lane == 0:
                # until the prefix sums
                chunks[tile, chunks.shape[1] - 1] = total
        if const_expr(self.locators > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if cta == 0:
            self.add_totals(sums, chunks, sizes, thread, warp, lane)

    @cute.jit
    def count_tile(self, stats, tile, lane):
        """The number of non-zeros of a token tile, in all lanes of the warp."""
        pairs = stats.shape[1] * (TOKENS // geometry.STATS_ROWS)
        first = Int64(tile) * pairs
        # the last tile may lack rows
        pairs = Int32(cutlass.min(Int64(stats.shape[0]) * stats.shape[1] - first, Int64(pairs)))
        counts = cute.make_tensor(stats.iterator + 2 * first, cute.make_layout(pairs, stride=2))
        total, own = Int32(0), cute.make_rmem_tensor((COUNTS,), Int32)
        for p in cutlass.range(lane, pairs, 32 * COUNTS, unroll=1):
            for i in range_constexpr(COUNTS):
                own[i] = counts[p + 32 * i] if p + 32 * i < pairs else 0
            for i in range_constexpr(COUNTS):
                total += own[i]
        return Int32(cute.arch.warp_redux_sync(total, "add"))

    @cute.jit
    def add_totals(self, sums, chunks, sizes, thread, warp, lane):
        """Replace the totals in the last column of `chunks` by their prefix sums, in one CTA."""
        tiles, last = chunks.shape[0], chunks.shape[1] - 1
        position = Int64(0)
        for first in cutlass.range(0, tiles, THREADS, unroll=1):
            # the counts of 32 token tiles of 128 x 65,536 fit in 32 bits, those of more may not
            tile = first + thread
            mine = chunks[tile, last] if tile < tiles else 0
            before = prefix_sum(mine, lane)
            if lane == 31:
                sums[warp] = before + mine
            cute.arch.sync_threads()
            begin = position + before
            for w in cutlass.range(cute.ceil_div(cutlass.min(tiles - first, Int32(THREADS)), 32), unroll=4):
                total = Int64(sums[w])
                position += total
                begin += total if w < warp else Int64(0)
            if tile < tiles:
                chunks[tile, 0] = self.saturate(begin)
                chunks[tile, last] = self.saturate(begin + mine)
            cute.arch.sync_threads()
        if thread == 0:
            sizes[tiles] = self.saturate(position)

    @cute.jit
    def saturate(self, value: Int64) -> Int32:
        return Int32(cutlass.min(value, Int64(geometry.MOST)))

    @cute.kernel
    def compact(
        self,
        words: cute.Tensor,
        spill: cute.Tensor,
        entries: cute.Tensor,
        neurons: cute.Tensor,
        chunks: cute.Tensor,
        sizes: cute.Tensor,
        popularity: cute.Tensor | None,
        l1: cute.Tensor,
        size: Int32,
        width: Int32,
        plain: Int32,
        capacity: Int32,
        listed: cute.Tensor,
        listed_sizes: cute.Tensor,
        by_place: Int32,
    ):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = cute.arch.block_idx()[0]
        shared = SmemAllocator().allocate(self.shared)
        s = self.views(shared, chunks.shape[1] - 1, Int32(1))
        quads = cute.make_rmem_tensor((4, OWN), Uint32)
        launch.wait()
        count, columns = size, words.shape[1]
        if by_place != 0:
            # no words are written behind the end of the list
            count = cute.ceil_div(listed_sizes[tile], 8) * 8
            columns = cute.ceil_div(listed_sizes[tile], geometry.TILE) * width
        words = cute.make_tensor(words.iterator, cute.make_layout((words.shape[0], columns), stride=words.stride))
        gate = (words, spill, width, tile)
        own, most = self.count_tokens(s, gate, quads, count, thread, warp, lane)
        for i in cutlass.range(thread, l1.shape[1], THREADS, unroll=1):
            l1[tile, i] = Float32(0.0)
        results = (entries, neurons, chunks, sizes, popularity, l1, (listed, by_place))
        at = (thread, warp, lane)
        if const_expr(self.training):
            start, end = chunks[tile, 0], chunks[tile, chunks.shape[1] - 1]
            self.build(shared, gate, quads, own, most, results, count, plain, start, end - start, capacity, at)
        else:
            if tile == 0 and thread == 0:
                # readers of the pattern compare this with a capacity
                sizes[chunks.shape[0]] = Int32(0)
            total = self.total_nonzeros(s, own, warp, lane)
            start = tile * TOKENS * size
            self.build(shared, gate, quads, own, most, results, count, plain, start, total, capacity, at)

    @cute.jit
    def total_nonzeros(self, s: Views, own: cute.Tensor, warp: Int32, lane: Int32):
        """Number of non-zeros of the CTA's tokens."""
        if lane == 0:
            sums = own[0]
            for j in range_constexpr(1, OWN):
                sums += own[j]
            s.sums[warp] = sums
        cute.arch.sync_threads()
        total = Int32(cute.arch.warp_redux_sync(s.sums[lane], "add"))
        cute.arch.sync_threads()
        return total

    @cute.jit
    def build(self, shared, gate, quads, own: cute.Tensor, most, results, count, plain, start, total, capacity, at):
        """Write the list of the token tile and its `total` entries from `start` on.

        In training there is room for `capacity` of all tiles, and of more than that no entry is written.
        """
        _, neurons, chunks, sizes, popularity, _, listed = results
        thread, warp, lane = at
        tile = gate[3]
        room, fits = self.room(chunks.shape[1] - 1, total)
        s = self.views(shared, chunks.shape[1] - 1, room)
        kept = self.mark_neurons(s, gate, quads, own, most, room, warp, lane)
        size = self.list_union(s, neurons, popularity, listed, count, tile, thread, warp, lane)
        if thread == 0:
            sizes[tile] = size
        if const_expr(self.training):
            if sizes[chunks.shape[0]] <= capacity:
                self.write(s, gate, kept, results, size, plain, start, total, fits, at)
        else:
            self.write(s, gate, kept, results, size, plain, start, total, fits, at)

    @cute.jit
    def write(self, s: Views, gate, kept, results, size, plain, start, total, fits, at):
        """Write the entries of a token tile, and the sum of their h."""
        entries, neurons, chunks, _, _, l1, _ = results
        thread, warp, lane = at
        self.count_entries(s, gate, kept, neurons, chunks, size, start, thread, warp, lane)
        self.write_entries(s, gate, kept, entries, start, total, fits, thread, warp, lane)
        if plain != 0:
            self.sum_values(s, entries, start, start + total, plain - 1, l1, gate[3], thread, warp, lane)

    # ---- phases ----

    @cute.jit
    def count_tokens(self, s: Views, gate, quads: cute.Tensor, neurons: Int32, thread: Int32, warp: Int32, lane: Int32):
        """Load the first words of the first 32 tiles of each of the warp's tokens, a tile per lane; clear counters.

        Returns the number of non-zeros of each token, and the largest count of a tile that the lane has seen.
        """
        words, _, width, tile = gate
        self.load_quads(quads, gate, Int32(0), warp, lane)
        for i in cutlass.range(thread, neurons // 4, THREADS, unroll=1):
            s.counters[i] = Uint32(0)
        if thread == 0:
            s.scalars[0] = Int32(0)
            s.scalars[1] = Int32(geometry.MOST)
        own, most = cute.make_rmem_tensor((OWN,), Int32), Int32(0)
        for j in range_constexpr(OWN):
            own[j] = Int32(quads[0, j])
            most = cutlass.max(most, own[j])
        for t in cutlass.range(32 + lane, words.shape[1] // width, 32, unroll=1):
            for j in range_constexpr(OWN):
                m = tile * TOKENS + warp * OWN + j
                count = count_of(words, m, t, width, m < words.shape[0])
                own[j] += count
                most = cutlass.max(most, count)
        for j in range_constexpr(OWN):
            own[j] = Int32(cute.arch.warp_redux_sync(own[j], "add"))
        cute.arch.sync_threads()
        return own, most

    @cute.jit
    def load_quads(self, quads: cute.Tensor, gate, group: Int32, warp: Int32, lane: Int32):
        """Load count and first three non-zeros of a group of 32 tiles, a tile per lane; zeros if it does not exist."""
        words, _, width, tile = gate
        quads.fill(0)
        for j in range_constexpr(OWN):
            m = tile * TOKENS + warp * OWN + j
            if m < words.shape[0] and (group + lane) * width < words.shape[1]:
                load_values(address(words, m, (group + lane) * width), quads[None, j])

    @cute.jit
    def mark_neurons(self, s: Views, gate, quads: cute.Tensor, own: cute.Tensor, most: Int32, room: Int32, warp, lane):
        """Count the non-zeros by neuron; return how many are kept: those of the warps for which there was room."""
        total = own[0]
        for j in range_constexpr(1, OWN):
            total += own[j]
        kept = Int32(-1)
        # one heavy warp must not take all the room
        if total <= room // 2:
            if lane == 0:
                kept = cute.arch.atomic_add(s.scalars.iterator, total, scope="cta")
                if kept + total > room:
                    cute.arch.atomic_min(s.scalars.iterator + 1, kept, scope="cta")
                    kept = Int32(-1)
            kept = cute.arch.shuffle_sync(kept, 0)
        if lane < OWN:
            at = kept
            for j in range_constexpr(OWN - 1):
                at += own[j] if kept >= 0 and j < lane else 0
            s.kept[warp * OWN + lane] = at
        cute.arch.sync_warp()
        if kept < 0 or cute.arch.vote_any_sync(most >= gate[2]):
            for j in cutlass.range(OWN, unroll=1):
                self.scan_token(s, gate, warp * OWN + j, lane, MARK)
        else:
            self.mark_intact(s, gate, quads, own, kept, warp, lane)
        cute.arch.sync_threads()
        return cutlass.min(s.scalars[0], s.scalars[1])

    @cute.jit
    def mark_intact(self, s: Views, gate, quads: cute.Tensor, own: cute.Tensor, kept: Int32, warp: Int32, lane: Int32):
        """`mark` for a warp that keeps its non-zeros, if none of its tiles overflows.

        First each lane copies its own tile's non-zeros, for all tokens of the warp; few lanes are busy. Then they are
        contiguous, and all lanes count them by neuron.
        """
        words, _, width, tile = gate
        count, at = cute.make_rmem_tensor((OWN,), Int32), cute.make_rmem_tensor((OWN,), Int32)
        # position of the token's next entry, less one: the first word of a tile is its count
        for j in range_constexpr(OWN):
            at[j] = kept - 1 if const_expr(j == 0) else at[j - 1] + own[j - 1]
        for group in cutlass.range(0, words.shape[1] // width, 32, unroll=1):
            if group > 0:
                self.load_quads(quads, gate, group, warp, lane)
            most = Int32(0)
            for j in range_constexpr(OWN):
                count[j] = Int32(quads[0, j])
                most = cutlass.max(most, count[j])
                at[j] += prefix_sum(count[j], lane)
                for i in range_constexpr(1, 4):
                    if i <= count[j]:
                        s.words[at[j] + i] = quads[i, j]
            most = Int32(cute.arch.warp_redux_sync(most, "max"))
            for q in cutlass.range(4, most + 1, 4, unroll=1):
                for j in range_constexpr(OWN):
                    if q <= count[j]:
                        m = tile * TOKENS + warp * OWN + j
                        load_values(address(words, m, (group + lane) * width) + q, quads[None, j])
                for j in range_constexpr(OWN):
                    for i in range_constexpr(4):
                        if q + i <= count[j]:
                            s.words[at[j] + q + i] = quads[i, j]
            for j in range_constexpr(OWN):
                at[j] = cute.arch.shuffle_sync(at[j] + count[j], 31)
        cute.arch.sync_warp()
        # end of the last token's non-zeros
        end = at[OWN - 1] + 1
        loaded = cute.make_rmem_tensor((BATCHES,), Uint32)
        for first in cutlass.range(kept + lane, end, 32 * BATCHES, unroll=1):
            for i in range_constexpr(BATCHES):
                loaded[i] = Uint32(s.words[first + 32 * i]) if first + 32 * i < end else Uint32(0)
            for i in range_constexpr(BATCHES):
                if first + 32 * i < end:
                    token, before = warp * OWN, kept
                    for j in range_constexpr(OWN - 1):
                        before += own[j]
                        token += Int32(first + 32 * i >= before)
                    self.mark_entry(s, loaded[i], kept, token, False)
                    s.owners[first + 32 * i] = Uint8(token)

    @cute.jit
    def list_union(self, s: Views, neurons: cute.Tensor, popularity, listed, count: Int32, tile, thread, warp, lane):
        """Write popularity, bitmap, ranks and list of the union; return its size and clear the counters for `count`.

        Each warp has a range of the bitmap; a lane holds its words `lane` and 32 + `lane`.
        """
        bitmap_words = cute.ceil_div(count, 32)
        share = cute.ceil_div(bitmap_words, WARPS)
        first = warp * share
        share = cutlass.min(share, bitmap_words - first)
        own = cute.make_rmem_tensor((self.own_words,), Uint32)
        own.fill(0)
        for h in range_constexpr(self.own_words):
            for i in cutlass.range(cutlass.min(share - 32 * h, 32), unroll=2):
                neuron = (first + 32 * h + i) * 32 + lane
                tokens = Uint32(0)
                if neuron < count:
                    tokens = (Uint32(s.counters[neuron >> 2]) >> Uint32((neuron & 3) * 8)) & 0xFF
                word = Uint32(cute.arch.vote_ballot_sync(tokens != 0))
                own[h] = word if lane == i else own[h]
                if const_expr(popularity is not None):
                    if tokens != 0:
                        counter = popularity.iterator + self.neuron_of(listed, tile, neuron)
                        cute.arch.red(counter, Int32(tokens), op="add", dtype="s32", sem="relaxed", scope="gpu")
        before = cute.make_rmem_tensor((self.own_words,), Int32)
        position = Int32(0)
        for h in range_constexpr(self.own_words):
            marked = Int32(cute.arch.popc(own[h]))
            before[h] = position + prefix_sum(marked, lane)
            position = cute.arch.shuffle_sync(before[h] + marked, 31)
        if lane == 0:
            s.sums[warp] = position
        cute.arch.sync_threads()

        others = s.sums[lane]
        size = Int32(cute.arch.warp_redux_sync(others, "add"))
        position = Int32(cute.arch.warp_redux_sync(others if lane < warp else 0, "add"))
        for i in cutlass.range(thread, cute.ceil_div(size, CHUNK) * PITCH, THREADS, unroll=1):
            s.counters[i] = Uint32(0)
        below = Uint32(cute.arch.lanemask_lt())
        for h in range_constexpr(self.own_words):
            before[h] += position
            if 32 * h + lane < share:
                s.bitmap[first + 32 * h + lane] = own[h]
                s.prefix[first + 32 * h + lane] = Uint16(before[h])
            for i in cutlass.range(cutlass.min(share - 32 * h, 32), unroll=2):
                word = Uint32(cute.arch.shuffle_sync(own[h], i))
                rank = cute.arch.shuffle_sync(before[h], i) + Int32(cute.arch.popc(word & below))
                if (word >> Uint32(lane)) & 1 != 0:
                    neuron = self.neuron_of(listed, tile, (first + 32 * h + i) * 32 + lane)
                    neurons[tile, rank] = Int16(neuron)
                    if rank == size - 1:
                        s.scalars[2] = neuron
        cute.arch.sync_threads()
        return size

    @cute.jit
    def neuron_of(self, listed, tile: Int32, place: Int32):
        """The neuron at a place of the gate."""
        neurons, by_place = listed
        return widen(neurons[tile, place]) if by_place != 0 else place

    @cute.jit
    def count_entries(self, s: Views, gate, kept: Int32, neurons: cute.Tensor, chunks, size, start, thread, warp, lane):
        """Compute where the entries of each chunk, and of each four tokens in it, begin."""
        tile = gate[3]
        for first in cutlass.range(thread, kept, THREADS * BATCHES, unroll=1):
            loaded, ranks = [Uint32(0)] * BATCHES, [Int32(0)] * BATCHES
            for i in range_constexpr(BATCHES):
                if first + i * THREADS < kept:
                    loaded[i] = Uint32(s.words[first + i * THREADS])
            for i in range_constexpr(BATCHES):
                ranks[i] = self.rank_of(s, loaded[i])
            for i in range_constexpr(BATCHES):
                if first + i * THREADS < kept:
                    s.words[first + i * THREADS] = (loaded[i] & Uint32(0xFFFF0000)) | Uint32(ranks[i])
                    count_token(s.counters, ranks[i] // CHUNK, self.owner(s, first + i * THREADS))
        for j in cutlass.range(OWN, unroll=1):
            if s.kept[warp * OWN + j] < 0:
                self.scan_token(s, gate, warp * OWN + j, lane, COUNT)
        cute.arch.sync_threads()
        here = cute.ceil_div(size, CHUNK)
        if size + thread < here * CHUNK:
            neurons[tile, size + thread] = Int16(s.scalars[2])
        for i in cutlass.range(warp, here, WARPS, unroll=1):
            at = i * PITCH + lane
            own = byte_sum(Uint32(s.counters[at]))
            before = prefix_sum(own, lane)
            s.before[at] = Uint16(before)
            if lane == 31:
                s.bases[i] = before + own
        cute.arch.sync_threads()
        if warp == 0:
            # a lane has consecutive chunks; there is one more column than chunks
            columns = chunks.shape[1]
            share = cute.ceil_div(columns, 32)
            total = Int32(0)
            for i in cutlass.range(share, unroll=1):
                at = lane * share + i
                total += s.bases[at] if at < here else 0
            position = prefix_sum(total, lane)
            for i in cutlass.range(share, unroll=1):
                at = lane * share + i
                if at < columns:
                    chunks[tile, at] = start + position
                if at < here:
                    entries = s.bases[at]
                    s.bases[at] = position
                    position += entries
        cute.arch.sync_threads()

    @cute.jit
    def write_entries(self, s: Views, gate, kept: Int32, entries: cute.Tensor, start, total, fits, thread, warp, lane):
        """Write the entries, through shared memory if all of them fit."""
        target = Int32(-1) if fits else start
        gate = (*gate, entries, target)
        loaded, ordinals = cute.make_rmem_tensor((BATCHES,), Uint32), cute.make_rmem_tensor((BATCHES,), Int32)
        for first in cutlass.range(warp * 32, kept, THREADS * BATCHES, unroll=1):
            for i in range_constexpr(BATCHES):
                at = first + i * THREADS + lane
                loaded[i] = Uint32(s.words[at]) if at < kept else Uint32(0)
                ordinals[i] = self.ordinal(s, first + i * THREADS, kept, lane)
            for i in range_constexpr(BATCHES):
                at = first + i * THREADS + lane
                if at < kept:
                    rank = Int32(loaded[i] & Uint32(0xFFFF))
                    self.write_entry(s, gate, loaded[i], rank, ordinals[i], self.owner(s, at))
        for j in cutlass.range(OWN, unroll=1):
            if s.kept[warp * OWN + j] < 0:
                self.scan_token(s, gate, warp * OWN + j, lane, WRITE)
        if fits:
            cute.arch.sync_threads()
            for i in cutlass.range(thread, total, THREADS, unroll=4):
                entries[start + i] = Int32(s.staged[i])

    @cute.jit
    def sum_values(self, s: Views, entries: cute.Tensor, start: Int32, end, activation, l1, tile, thread, warp, lane):
        """Store the sum of h of all entries, added in a fixed order."""
        # wait for entries that other threads wrote
        cute.arch.sync_threads()
        sums = cute.make_tensor(cute.recast_ptr(s.sums.iterator, dtype=Float32), cute.make_layout(WARPS))
        total = Float32(0.0)
        for at in cutlass.range(start + thread, end, THREADS, unroll=4):
            total += power(high_to_float(Uint32(entries[at]), self.dtype), activation)
        total = warp_sum(total)
        if lane == 0:
            sums[warp] = total
        cute.arch.sync_threads()
        if thread == 0:
            total = Float32(0.0)
            for w in range_constexpr(WARPS):
                total += sums[w]
            l1[tile, 0] = total

    # ---- ordinals of kept non-zeros ----

    @cute.jit
    def ordinal(self, s: Views, first: Int32, kept: Int32, lane: Int32):
        """Ordinal of entry `first` + lane among those of its token and chunk."""
        begins = self.run_starts(s, first + lane, kept)
        ends = begins & Uint32(cute.arch.lanemask_le())
        ordinal = lane - 31 + Int32(cute.arch.clz(ends))
        if begins & 1 == 0:
            # a token has at most 64 entries in a chunk, so a run that continues here began at most 63 entries ago
            earlier = self.run_starts(s, first - 32 + lane, kept)
            earliest = self.run_starts(s, first - 64 + lane, kept)
            before = 1 + Int32(cute.arch.clz(earlier)) if earlier != 0 else 33 + Int32(cute.arch.clz(earliest))
            ordinal = ordinal if ends != 0 else lane + before
        return ordinal

    @cute.jit
    def run_starts(self, s: Views, at: Int32, kept: Int32):
        """Mask of lanes whose entry `at` is the first of its token and chunk; `at` may be negative."""
        begin = at <= 0
        if at > 0 and at < kept:
            key, last = self.key(s, at), self.key(s, at - 1)
            begin = key != last
        return Uint32(cute.arch.vote_ballot_sync(begin))

    def key(self, s, at):
        """Token and chunk of an entry whose rank is known."""
        return (self.owner(s, at) << 16) | Int32((Uint32(s.words[at]) & Uint32(0xFFFF)) >> 6)

    def owner(self, s, at):
        return Int32(s.owners[at].to(Uint32) & Uint32(0xFF))

    # ---- a token's non-zeros from its words and its spill, 32 at a time, ascending ----

    @cute.jit
    def scan_token(self, s: Views, gate, token: Int32, lane: Int32, phase: cutlass.Constexpr):
        """Run one phase on the non-zeros of one token; MARK keeps them if there is room."""
        words, spill, width, tile = gate[:4]
        m = tile * TOKENS + token
        tiles = words.shape[1] // width
        # position of the next kept entry; chunk of the last entry, and number of entries in it so far
        kept = s.kept[token]
        position, run = kept, (Int32(-1), Int32(0))
        for group in cutlass.range(0, tiles, 32, unroll=1):
            count = count_of(words, m, group + lane, width, m < words.shape[0] and group + lane < tiles)
            overflowing = Uint32(cute.arch.vote_ballot_sync(count >= width))
            # tiles of the group up to the next one that overflows, then that one
            low = Int32(0)
            while low < 32:
                rest = overflowing & (Uint32(0xFFFFFFFF) << Uint32(low))
                high = lowest_bit(rest) if rest != 0 else Int32(32)
                here = count if lane >= low and lane < high else 0
                before = prefix_sum(here, lane)
                size = cute.arch.shuffle_sync(before + here, 31)
                for first in cutlass.range(0, size, 32, unroll=1):
                    active = first + lane < size
                    word = nth_word(words, m, group, width, before, first + lane, active)
                    at = position + first + lane
                    run = self.process_words(s, gate, token, word, active, at, kept >= 0, run, lane, phase)
                position += size
                if high < 32:
                    neuron = (group + high) * geometry.TILE
                    if const_expr(phase == MARK):
                        position = self.mark_spilled(s, gate, token, neuron + lane * 8, position, kept >= 0, lane)
                    else:
                        values = [Uint32(0)] * TILE_BITS
                        for i in range_constexpr(TILE_BITS):
                            values[i] = Uint32(widen(spill[m, neuron + 32 * i + lane].bitcast(Uint16)))
                        for i in range_constexpr(TILE_BITS):
                            word = values[i] << 16 | Uint32(neuron + 32 * i + lane)
                            active = values[i] & MAGNITUDE != 0
                            run = self.process_words(s, gate, token, word, active, position, False, run, lane, phase)
                low = high + 1

    @cute.jit
    def mark_spilled(self, s: Views, gate, token: Int32, neuron: Int32, position: Int32, keep, lane: Int32):
        """`mark` for a tile that overflows, eight neurons per lane; return the position of the next kept entry."""
        _, spill, _, tile = gate
        values = load_values(address(spill, tile * TOKENS + token, neuron))
        flags = nonzero_flags(values)
        at = position + prefix_sum(count_flags(flags), lane)
        for i in range_constexpr(8):
            if flags[i]:
                word = spilled_word(values, i, neuron)
                self.mark_entry(s, word, at, token, keep)
            at += Int32(flags[i])
        return cute.arch.shuffle_sync(at, 31)

    @cute.jit
    def process_words(self, s: Views, gate, token, word: Uint32, active, at, keep, run, lane, phase: cutlass.Constexpr):
        """Run one phase on a non-zero per active lane, ascending. All lanes of the warp must take part."""
        if const_expr(phase == MARK):
            if active:
                self.mark_entry(s, word, at, token, keep)
        else:
            rank = self.rank_of(s, word)
            if const_expr(phase == COUNT):
                if active:
                    count_token(s.counters, rank // CHUNK, token)
            else:
                ordinal, run = self.ordinal_in_chunk(rank // CHUNK, active, run)
                if active:
                    self.write_entry(s, gate, word, rank, ordinal, token)
        return run

    @cute.jit
    def rank_of(self, s: Views, word: Uint32):
        """Rank in the union of a word's neuron."""
        at = Int32((word & Uint32(0xFFFF)) >> 5)
        below = (Uint32(1) << (word & 31)) - 1
        return widen(s.prefix[at]) + Int32(cute.arch.popc(Uint32(s.bitmap[at]) & below))

    @cute.jit
    def mark_entry(self, s: Views, word: Uint32, at: Int32, token: Int32, keep):
        """Count a non-zero by neuron, and `keep` it as number `at`."""
        neuron = word & Uint32(0xFFFF)
        one = Uint32(1) << ((neuron & 3) * 8)
        cute.arch.atomic_add(s.counters.iterator + Int32(neuron >> 2), one, scope="cta")
        if keep:
            s.words[at] = word
            s.owners[at] = Uint8(token)

    @cute.jit
    def write_entry(self, s: Views, gate, word: Uint32, rank: Int32, ordinal: Int32, token: Int32):
        _, _, _, _, entries, target = gate
        chunk, shift = rank // CHUNK, Uint32((token & 3) * 8)
        counter = chunk * PITCH + (token >> 2)
        others = byte_sum(Uint32(s.counters[counter]) & ((Uint32(1) << shift) - 1))
        position = s.bases[chunk] + widen(s.before[counter]) + others + ordinal
        entry = (word & Uint32(0xFFFF0000)) | Uint32(token * CHUNK + rank % CHUNK)
        if target >= 0:
            entries[target + position] = Int32(entry)
        else:
            s.staged[position] = entry

    @cute.jit
    def ordinal_in_chunk(self, chunk: Int32, active, run):
        """Ordinal of an entry in its chunk, and the next `run`; active lanes ascend by chunk and continue `run`."""
        flags = Uint32(cute.arch.vote_ballot_sync(active))
        earlier = flags & Uint32(cute.arch.lanemask_lt())
        last = 31 - Int32(cute.arch.clz(earlier))
        left = cute.arch.shuffle_sync(chunk, cutlass.max(last, Int32(0)))
        left = left if earlier != 0 else run[0]
        begins = Uint32(cute.arch.vote_ballot_sync(active and left != chunk)) & Uint32(cute.arch.lanemask_le())
        first = 31 - Int32(cute.arch.clz(begins))
        ordinal = run[1] + Int32(cute.arch.popc(earlier))
        if begins != 0:
            ordinal = Int32(cute.arch.popc(earlier >> Uint32(first)))
        end = cutlass.max(31 - Int32(cute.arch.clz(flags)), Int32(0))
        end_chunk, end_ordinal = cute.arch.shuffle_sync(chunk, end), cute.arch.shuffle_sync(ordinal, end)
        chunk_so_far = end_chunk if flags != 0 else run[0]
        entries_so_far = end_ordinal + 1 if flags != 0 else run[1]
        return ordinal, (chunk_so_far, entries_so_far)

    # ---- shared memory ----

    def counter_words(self, chunks):
        """Words of the arena for the counters, and for `before`."""
        return chunks * PITCH, (chunks * PITCH + 1) // 2

    @cute.jit
    def room(self, chunks: Int32, total: Int32):
        """Number of non-zeros that can be kept, and whether `total` entries can be staged; if not, more are kept."""
        counters, before = self.counter_words(chunks)
        left = self.arena - counters - before
        # a word and a byte per kept non-zero, and a word per staged entry
        fits = total <= left // 9 * 4
        return left // 9 * 4 if fits else left // 5 * 4, fits

    def views(self, shared, chunks, room):
        """Tensors over the shared struct."""
        arena = shared.arena.data_ptr()
        counters, before = self.counter_words(chunks)
        words = arena + (counters + before)
        owners = words + room
        return Views(
            bitmap=shared.bitmap.get_tensor(cute.make_layout(self.bitmap)),
            prefix=shared.prefix.get_tensor(cute.make_layout(self.bitmap)),
            bases=shared.bases.get_tensor(cute.make_layout(self.chunks)),
            kept=shared.kept.get_tensor(cute.make_layout(TOKENS)),
            sums=shared.sums.get_tensor(cute.make_layout(WARPS)),
            scalars=shared.scalars.get_tensor(cute.make_layout(3)),
            counters=cute.make_tensor(arena, cute.make_layout(self.arena)),
            before=cute.make_tensor(cute.recast_ptr(arena + counters, dtype=Uint16), cute.make_layout(self.arena)),
            words=cute.make_tensor(cute.recast_ptr(words, dtype=Uint32), cute.make_layout(self.arena)),
            owners=cute.make_tensor(cute.recast_ptr(owners, dtype=Uint8), cute.make_layout(4 * self.arena)),
            staged=cute.make_tensor(cute.recast_ptr(owners + room // 4, dtype=Uint32), cute.make_layout(self.arena)),
        )


def signature(spec: CompactSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype = operands.DTYPES[spec.dtype]
    m, b = cute.sym_int32(), cute.sym_int32()
    arguments = (
        *operands.packed(dtype, m),
        operands.cube(Int32, cute.sym_int32(), cute.sym_int32(), 2) if spec.training else None,
        operands.vector(Int32, cute.sym_int32()),
        *operands.lists(b),
        operands.vector(Int32, cute.sym_int32(divisibility=8)) if spec.training else None,
        operands.matrix(Float32, b, cute.sym_int32()),
        Int32(1),
        Int32(1),
        Int32(1),
        Int32(1),
        operands.matrix(Int16, b, cute.sym_int32(divisibility=64)),
        operands.vector(Int32, cute.sym_int32(), align=4),
        Int32(1),
    )
    return Compact(spec), arguments
