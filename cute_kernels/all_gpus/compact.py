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
again, see compact_scan.py.

In inference the pool of entries has room for all gates, with a fixed part for each token tile. In training the pool is
small: `locate` first computes the token tiles' ranges from the statistics, see compact_ranges.py. It also clears the
popularity, to which `compact` adds. If the ranges exceed the pool, `compact` only clears the sums of |h|.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible, geometry
from ..common import launch, operands
from ..common.activation import power
from ..common.byte_counters import PITCH, Thread, count_token, thread_index
from ..common.copies import address, load_values
from ..common.rows import count_of
from ..common.values import byte_sum, high_to_float, prefix_sum, warp_sum, widen
from ..specs import PORTABLE, SM90, CompactSpec
from .compact_ranges import THREADS, TOKENS, WARPS, Ranges
from .compact_scan import CHUNK, COUNT, MARK, WRITE, Operands, Scan, Views

# tokens of a warp; their byte counters share a word
OWN = TOKENS // WARPS
# by family: most neurons; words of shared memory for counters, non-zeros and entries: all that the other lists leave
SIZES = {SM90: (geometry.MAX_NEURONS, 53248), PORTABLE: (geometry.PORTABLE_UNION_NEURONS, 23040)}
# entries that a thread processes at a time
BATCHES = 4


class Compact(Ranges, Scan):
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
        """The `Operands`, with the statistics behind the spill, and the stream."""
        words, spill, stats, *given, stream = arguments
        o = Operands(*[words, spill, *given])

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
            self.find_ranges(stats, o, stream)
        if words.shape[0] > 0:
            launch.start(self.compact(o), o.chunks.shape[0], THREADS, stream, ctas_per_sm=1)

    @cute.kernel
    def compact(self, o: Operands):
        at = thread_index()
        shared = SmemAllocator().allocate(self.shared)
        s = self.views(shared, o.chunks.shape[1] - 1, Int32(1))
        quads = cute.make_rmem_tensor((4, OWN), Uint32)
        launch.wait()
        size, count, columns = o.size, o.size, o.words.shape[1]
        if o.by_place != 0:
            # no words are written behind the end of the list
            count = cute.ceil_div(o.listed_sizes[at.tile], 8) * 8
            columns = cute.ceil_div(o.listed_sizes[at.tile], geometry.TILE) * o.width
        words = cute.make_tensor(o.words.iterator, cute.make_layout((o.words.shape[0], columns), stride=o.words.stride))
        o = o._replace(words=words, size=count)
        own, most = self.count_tokens(s, o, quads, at)
        for i in cutlass.range(at.thread, o.l1.shape[1], THREADS, unroll=1):
            o.l1[at.tile, i] = Float32(0.0)
        if const_expr(self.training):
            start, end = o.chunks[at.tile, 0], o.chunks[at.tile, o.chunks.shape[1] - 1]
            self.build(shared, o, quads, own, most, start, end - start, at)
        else:
            if at.tile == 0 and at.thread == 0:
                # readers of the pattern compare this with a capacity
                o.sizes[o.chunks.shape[0]] = Int32(0)
            total = self.total_nonzeros(s, own, at)
            self.build(shared, o, quads, own, most, at.tile * TOKENS * size, total, at)

    @cute.jit
    def total_nonzeros(self, s: Views, own: cute.Tensor, at: Thread):
        """Number of non-zeros of the CTA's tokens."""
        if at.lane == 0:
            sums = own[0]
            for j in range_constexpr(1, OWN):
                sums += own[j]
            s.sums[at.warp] = sums
        cute.arch.sync_threads()
        total = Int32(cute.arch.warp_redux_sync(s.sums[at.lane], "add"))
        cute.arch.sync_threads()
        return total

    @cute.jit
    def build(self, shared, o: Operands, quads, own: cute.Tensor, most, start, total, at: Thread):
        """Write the list of the token tile and its `total` entries from `start` on.

        In training there is room for `capacity` of all tiles, and of more than that no entry is written.
        """
        room, fits = self.room(o.chunks.shape[1] - 1, total)
        s = self.views(shared, o.chunks.shape[1] - 1, room)
        kept = self.mark_neurons(s, o, quads, own, most, room, at)
        size = self.list_union(s, o, at)
        if at.thread == 0:
            o.sizes[at.tile] = size
        if const_expr(self.training):
            if o.sizes[o.chunks.shape[0]] <= o.capacity:
                self.write(s, o, kept, size, start, total, fits, at)
        else:
            self.write(s, o, kept, size, start, total, fits, at)

    @cute.jit
    def write(self, s: Views, o: Operands, kept, size, start, total, fits, at: Thread):
        """Write the entries of a token tile, and the sum of their h."""
        self.count_entries(s, o, kept, size, start, at)
        self.write_entries(s, o, kept, start, total, fits, at)
        if o.plain != 0:
            self.sum_values(s, o, start, start + total, at)

    # ---- phases ----

    @cute.jit
    def count_tokens(self, s: Views, o: Operands, quads: cute.Tensor, at: Thread):
        """Load the first words of the first 32 tiles of each of the warp's tokens, a tile per lane; clear counters.

        Returns the number of non-zeros of each token, and the largest count of a tile that the lane has seen.
        """
        self.load_quads(quads, o, Int32(0), at)
        for i in cutlass.range(at.thread, o.size // 4, THREADS, unroll=1):
            s.counters[i] = Uint32(0)
        if at.thread == 0:
            s.scalars[0] = Int32(0)
            s.scalars[1] = Int32(geometry.MOST)
        own, most = cute.make_rmem_tensor((OWN,), Int32), Int32(0)
        for j in range_constexpr(OWN):
            own[j] = Int32(quads[0, j])
            most = cutlass.max(most, own[j])
        for t in cutlass.range(32 + at.lane, o.words.shape[1] // o.width, 32, unroll=1):
            for j in range_constexpr(OWN):
                m = at.tile * TOKENS + at.warp * OWN + j
                count = count_of(o.words, m, t, o.width, m < o.words.shape[0])
                own[j] += count
                most = cutlass.max(most, count)
        for j in range_constexpr(OWN):
            own[j] = Int32(cute.arch.warp_redux_sync(own[j], "add"))
        cute.arch.sync_threads()
        return own, most

    @cute.jit
    def load_quads(self, quads: cute.Tensor, o: Operands, group: Int32, at: Thread):
        """Load count and first three non-zeros of a group of 32 tiles, a tile per lane; zeros if it does not exist."""
        quads.fill(0)
        for j in range_constexpr(OWN):
            m = at.tile * TOKENS + at.warp * OWN + j
            if m < o.words.shape[0] and (group + at.lane) * o.width < o.words.shape[1]:
                load_values(address(o.words, m, (group + at.lane) * o.width), quads[None, j])

    @cute.jit
    def mark_neurons(self, s: Views, o: Operands, quads: cute.Tensor, own: cute.Tensor, most, room: Int32, at: Thread):
        """Count the non-zeros by neuron; return how many are kept: those of the warps for which there was room."""
        lane, total = at.lane, own[0]
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
            place = kept
            for j in range_constexpr(OWN - 1):
                place += own[j] if kept >= 0 and j < lane else 0
            s.kept[at.warp * OWN + lane] = place
        cute.arch.sync_warp()
        if kept < 0 or cute.arch.vote_any_sync(most >= o.width):
            for j in cutlass.range(OWN, unroll=1):
                self.scan_token(s, o, at.warp * OWN + j, Int32(-1), at, MARK)
        else:
            self.mark_intact(s, o, quads, own, kept, at)
        cute.arch.sync_threads()
        return cutlass.min(s.scalars[0], s.scalars[1])

    @cute.jit
    def mark_intact(self, s: Views, o: Operands, quads: cute.Tensor, own: cute.Tensor, kept: Int32, at: Thread):
        """`mark` for a warp that keeps its non-zeros, if none of its tiles overflows.

        First each lane copies its own tile's non-zeros, for all tokens of the warp; few lanes are busy. Then they are
        contiguous, and all lanes count them by neuron.
        """
        count, place = cute.make_rmem_tensor((OWN,), Int32), cute.make_rmem_tensor((OWN,), Int32)
        # position of the token's next entry, less one: the first word of a tile is its count
        for j in range_constexpr(OWN):
            place[j] = kept - 1 if const_expr(j == 0) else place[j - 1] + own[j - 1]
        for group in cutlass.range(0, o.words.shape[1] // o.width, 32, unroll=1):
            if group > 0:
                self.load_quads(quads, o, group, at)
            most = Int32(0)
            for j in range_constexpr(OWN):
                count[j] = Int32(quads[0, j])
                most = cutlass.max(most, count[j])
                place[j] += prefix_sum(count[j], at.lane)
                for i in range_constexpr(1, 4):
                    if i <= count[j]:
                        s.words[place[j] + i] = quads[i, j]
            most = Int32(cute.arch.warp_redux_sync(most, "max"))
            for q in cutlass.range(4, most + 1, 4, unroll=1):
                for j in range_constexpr(OWN):
                    if q <= count[j]:
                        m = at.tile * TOKENS + at.warp * OWN + j
                        load_values(address(o.words, m, (group + at.lane) * o.width) + q, quads[None, j])
                for j in range_constexpr(OWN):
                    for i in range_constexpr(4):
                        if q + i <= count[j]:
                            s.words[place[j] + q + i] = quads[i, j]
            for j in range_constexpr(OWN):
                place[j] = cute.arch.shuffle_sync(place[j] + count[j], 31)
        cute.arch.sync_warp()
        # end of the last token's non-zeros
        end = place[OWN - 1] + 1
        loaded = cute.make_rmem_tensor((BATCHES,), Uint32)
        for first in cutlass.range(kept + at.lane, end, 32 * BATCHES, unroll=1):
            for i in range_constexpr(BATCHES):
                loaded[i] = Uint32(s.words[first + 32 * i]) if first + 32 * i < end else Uint32(0)
            for i in range_constexpr(BATCHES):
                if first + 32 * i < end:
                    token, before = at.warp * OWN, kept
                    for j in range_constexpr(OWN - 1):
                        before += own[j]
                        token += Int32(first + 32 * i >= before)
                    self.mark_entry(s, loaded[i], kept, token, False)
                    s.owners[first + 32 * i] = Uint8(token)

    @cute.jit
    def list_union(self, s: Views, o: Operands, at: Thread):
        """Write popularity, bitmap, ranks and list of the union; return its size and clear the counters for `count`.

        Each warp has a range of the bitmap; a lane holds its words `lane` and 32 + `lane`.
        """
        warp, lane = at.warp, at.lane
        bitmap_words = cute.ceil_div(o.size, 32)
        share = cute.ceil_div(bitmap_words, WARPS)
        first = warp * share
        share = cutlass.min(share, bitmap_words - first)
        own = cute.make_rmem_tensor((self.own_words,), Uint32)
        own.fill(0)
        for h in range_constexpr(self.own_words):
            for i in cutlass.range(cutlass.min(share - 32 * h, 32), unroll=2):
                neuron = (first + 32 * h + i) * 32 + lane
                tokens = Uint32(0)
                if neuron < o.size:
                    tokens = (Uint32(s.counters[neuron >> 2]) >> Uint32((neuron & 3) * 8)) & 0xFF
                word = Uint32(cute.arch.vote_ballot_sync(tokens != 0))
                own[h] = word if lane == i else own[h]
                if const_expr(o.popularity is not None):
                    if tokens != 0:
                        counter = o.popularity.iterator + self.neuron_of(o, at.tile, neuron)
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
        for i in cutlass.range(at.thread, cute.ceil_div(size, CHUNK) * PITCH, THREADS, unroll=1):
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
                    neuron = self.neuron_of(o, at.tile, (first + 32 * h + i) * 32 + lane)
                    o.neurons[at.tile, rank] = Int16(neuron)
                    if rank == size - 1:
                        s.scalars[2] = neuron
        cute.arch.sync_threads()
        return size

    @cute.jit
    def neuron_of(self, o: Operands, tile: Int32, place: Int32):
        """The neuron at a place of the gate."""
        return widen(o.listed[tile, place]) if o.by_place != 0 else place

    @cute.jit
    def count_entries(self, s: Views, o: Operands, kept: Int32, size: Int32, start: Int32, at: Thread):
        """Compute where the entries of each chunk, and of each four tokens in it, begin."""
        thread, warp, lane = at.thread, at.warp, at.lane
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
                self.scan_token(s, o, warp * OWN + j, Int32(-1), at, COUNT)
        cute.arch.sync_threads()
        here = cute.ceil_div(size, CHUNK)
        if size + thread < here * CHUNK:
            o.neurons[at.tile, size + thread] = Int16(s.scalars[2])
        for i in cutlass.range(warp, here, WARPS, unroll=1):
            four = i * PITCH + lane
            own = byte_sum(Uint32(s.counters[four]))
            before = prefix_sum(own, lane)
            s.before[four] = Uint16(before)
            if lane == 31:
                s.bases[i] = before + own
        cute.arch.sync_threads()
        if warp == 0:
            # a lane has consecutive chunks; there is one more column than chunks
            columns = o.chunks.shape[1]
            share = cute.ceil_div(columns, 32)
            total = Int32(0)
            for i in cutlass.range(share, unroll=1):
                chunk = lane * share + i
                total += s.bases[chunk] if chunk < here else 0
            position = prefix_sum(total, lane)
            for i in cutlass.range(share, unroll=1):
                chunk = lane * share + i
                if chunk < columns:
                    o.chunks[at.tile, chunk] = start + position
                if chunk < here:
                    entries = s.bases[chunk]
                    s.bases[chunk] = position
                    position += entries
        cute.arch.sync_threads()

    @cute.jit
    def write_entries(self, s: Views, o: Operands, kept: Int32, start, total, fits, at: Thread):
        """Write the entries, through shared memory if all of them fit."""
        warp, lane = at.warp, at.lane
        target = Int32(-1) if fits else start
        loaded, ordinals = cute.make_rmem_tensor((BATCHES,), Uint32), cute.make_rmem_tensor((BATCHES,), Int32)
        for first in cutlass.range(warp * 32, kept, THREADS * BATCHES, unroll=1):
            for i in range_constexpr(BATCHES):
                place = first + i * THREADS + lane
                loaded[i] = Uint32(s.words[place]) if place < kept else Uint32(0)
                ordinals[i] = self.ordinal(s, first + i * THREADS, kept, lane)
            for i in range_constexpr(BATCHES):
                place = first + i * THREADS + lane
                if place < kept:
                    rank = Int32(loaded[i] & Uint32(0xFFFF))
                    self.write_entry(s, o, loaded[i], rank, ordinals[i], self.owner(s, place), target)
        for j in cutlass.range(OWN, unroll=1):
            if s.kept[warp * OWN + j] < 0:
                self.scan_token(s, o, warp * OWN + j, target, at, WRITE)
        if fits:
            cute.arch.sync_threads()
            for i in cutlass.range(at.thread, total, THREADS, unroll=4):
                o.entries[start + i] = Int32(s.staged[i])

    @cute.jit
    def sum_values(self, s: Views, o: Operands, start: Int32, end: Int32, at: Thread):
        """Store the sum of h of all entries, added in a fixed order."""
        # wait for entries that other threads wrote
        cute.arch.sync_threads()
        sums = cute.make_tensor(cute.recast_ptr(s.sums.iterator, dtype=Float32), cute.make_layout(WARPS))
        total = Float32(0.0)
        for i in cutlass.range(start + at.thread, end, THREADS, unroll=4):
            total += power(high_to_float(Uint32(o.entries[i]), self.dtype), o.plain - 1)
        total = warp_sum(total)
        if at.lane == 0:
            sums[at.warp] = total
        cute.arch.sync_threads()
        if at.thread == 0:
            total = Float32(0.0)
            for w in range_constexpr(WARPS):
                total += sums[w]
            o.l1[at.tile, 0] = total

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
        operands.dense(Int32, cute.sym_int32(), cute.sym_int32(), 2) if spec.training else None,
        operands.dense(Int32, cute.sym_int32()),
        *operands.lists(b),
        operands.dense(Int32, cute.sym_int32(divisibility=8)) if spec.training else None,
        operands.dense(Float32, b, cute.sym_int32(), align=4),
        *(Int32(1),) * 4,
        operands.dense(Int16, b, cute.sym_int32(divisibility=64), align=4),
        operands.dense(Int32, cute.sym_int32(), align=4),
        Int32(1),
    )
    return Compact(spec), arguments
