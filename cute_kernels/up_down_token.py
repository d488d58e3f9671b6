"""Gated up and down projections on the pattern of a packed gate: y[m] = sum over non-zeros c of h[m, c] * w_down[c],
with h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]). Strategy "row": only the weight rows of non-zeros are read, anew
for each token. If not `gated`, the packed values are h: neither x nor up rows are read. So it is for relu; for the
other activations see common/activation.py.

A cluster of `cluster` CTAs, 1 to 8, computes a token at a time, each CTA a part of the columns. Few tokens take large
clusters, for latency. The portable family has clusters of one CTA.

Clusters share the work evenly, however uneven the tokens are. A token weighs its non-zeros and `OVERHEAD`. All tokens
form one line of weights, of which each cluster has an equal `Share`. What it has of a token is a piece, cut at multiples
of `turn`; small tokens are not cut. The sums of pieces go to `sums`, and the last to arrive adds them up, in the order
of the list. A cluster leaves at most two: of the token that began before its share, and of the one that goes on behind
it. It finds its share by the statistics of the gate, which count eight tokens at a time. Beyond `SLAB` tokens each slab
has clusters of its own. Without `clusters` each has one token, and tokens share nothing.

Each thread owns eight columns, 16 bytes, of every row, or several times that. So a row takes `span` warps of a CTA, and
its warps form `groups` of that size. The groups divide the non-zeros: `rows` at a time, with all their loads in flight.
A CTA handles up to `window` non-zeros at a time:

    list    a lane per tile of the gate, 32 tiles at a time; each warp lists every eighth word. Every CTA lists all. Of
            tokens with many non-zeros, a warp per tile and a lane per word.
    up      rows times the x that a thread holds. The sums over each warp go to `partial` of all CTAs.
    hidden  each thread takes a non-zero and adds the partial sums of all warps and CTAs in a fixed order; the loads of
            the first down rows are already in flight.
    down    adds h times rows to fp32 sums in registers, in ascending order of the group's neurons.

At the end the groups' sums are added in shared memory, and each CTA rounds and stores its columns. h stays fp32.

    COMPLETE  of each CTA of a larger cluster: 1 arrival + bytes, the partial sums of a window, sent by st.async.
    cluster   once at the start, so that COMPLETE exists; then before each further window, so that all CTAs have read
              the partial sums of the one before.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from . import feasible, geometry
from .common import launch, operands
from .common.activation import hidden, power
from .common.copies import address, load_values, load_values_if, store_values
from .common.rows import count_of, spilled_word
from .common.values import (
    count_flags,
    high_to_float,
    low_to_float,
    lowest_bit,
    nonzero_flags,
    pack,
    prefix_sum,
    warp_sum,
)
from .sm90.copies import send_float
from .specs import SM90, UpDownTokenSpec

WARPS = 8
THREADS = 32 * WARPS
# tiles that are listed at a time, one per lane
TILES = 32
# columns of a warp's load
STEP = 256
# pieces of a token whose sums a thread loads at a time
AT_ONCE = 16
# tokens of a row of statistics, and such rows of a slab
GROUP, SLAB = geometry.STATS_ROWS, geometry.TOKEN_SLAB
GROUPS = SLAB // GROUP
# non-zeros whose time a token takes without any: its x, its list and its y
OVERHEAD = 8


class Operands(NamedTuple):
    """Operands in global memory; None if absent. An empty bias stands for none."""

    x: Any
    words: Any
    spill: Any
    w_up: Any
    w_down: Any
    b_up: Any
    b_down: Any
    y: Any
    l1: Any
    width: Any  # words of a tile
    activation: Any  # see common/activation.py
    # of clusters that share tokens
    sums: Any  # fp32 [2 * clusters, K + 8]: y of each piece, and in column K its l1
    arrivals: Any  # int32 [tokens * cluster], zeros: CTAs that have stored their columns of `sums`
    clusters: Any  # their number; 0 for one per token
    stats: Any  # int32 [ceil(tokens / 8), tiles, 2]: non-zeros of eight tokens in a tile


class Share(NamedTuple):
    """The weights of a slab that a cluster computes: from `first` to `last`; it is number `index` of the slab's."""

    index: Any
    size: Any  # of each share but the last
    first: Any
    last: Any


class Thread(NamedTuple):
    """Indices of a thread, and the columns of its CTA."""

    rank: Any  # of the CTA in its cluster
    left: Any  # first column
    columns: Any  # number of columns
    column: Any  # the thread's first column of the CTA's
    group: Any  # of warps
    place: Any  # of the warp in its group
    thread: Any
    warp: Any
    lane: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    complete: Any  # mbarrier: the partial sums of all CTAs have arrived
    totals: Any  # [WARPS] sums of |h| by warp
    nonzeros: Any  # [window] value bits << 16 | neuron
    hidden: Any  # [window] h
    partial: Any  # [window, parts] dot products over the columns of each warp of each CTA
    sums: Any  # [groups, columns] y by group; overlays `nonzeros` and the following
    before: Any  # [GROUPS + 1] weights of the slab before each group of tokens


def shared_memory(words: int, ctas: int) -> Any:
    """The shared memory of a CTA, of which ``ctas`` fit on an SM."""

    @cute.struct
    class Shared:
        # the second one pads
        sums_complete: cute.struct.MemRange[Int64, 2]
        totals: cute.struct.MemRange[Float32, WARPS]
        before: cute.struct.MemRange[Int32, GROUPS + 1]
        arena: cute.struct.Align[cute.struct.MemRange[Float32, words], 16]

    return feasible.check_shared_memory(Shared, ctas)


class TokenCluster:
    """A cluster of CTAs, 1 to 8, that computes one token at a time; for one dtype and class of hidden sizes."""

    def __init__(self, spec: UpDownTokenSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.gated = spec.gated
        self.cluster, self.columns = spec.cluster, spec.columns
        self.span, self.vectors = spec.span, spec.vectors
        self.groups = WARPS // self.span
        # rows that a thread has in flight
        self.rows = (8 if spec.deep else 4) if self.span == 1 else max(1, (16 if spec.deep else 8) // self.vectors)
        # partial sums of a dot product
        self.parts = self.cluster * self.span
        self.window = min(1024, (4096 if self.cluster == 1 else 8192) // self.parts)
        lists = self.window * (2 + self.parts if self.gated else 2)
        self.words = max(lists, self.groups * self.columns)
        # non-zeros of one turn; pieces are multiples of it
        self.turn = self.groups * self.rows
        # most non-zeros of a token that is not cut
        self.whole = self.turn * (2 if self.cluster == 1 else 1)

    @cute.jit
    def thread_index(self, k: Int32, rank):
        """The thread's indices in CTA `rank` of a cluster; columns are divided in pieces of 16 bytes."""
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        share = cute.ceil_div(k, 8 * self.cluster) * 8
        left = rank * share
        columns = cutlass.max(cutlass.min(k - left, share), Int32(0))
        place = warp % self.span
        return Thread(rank, left, columns, place * STEP + lane * 8, warp // self.span, place, thread, warp, lane)

    @cute.jit
    def accumulate(self, o: Operands, s: Views, acc: cute.Tensor, m: Int32, listed, begin, end, windows, at: Thread):
        """acc = the sum over non-zeros `begin` to `end` of the `listed` ones of token `m`; `s.totals` of their |h|.

        Returns the cluster's number of windows so far.
        """
        # the previous token's sums may still be read
        cute.arch.sync_threads()
        x_thread = cute.make_rmem_tensor((4, self.vectors), Uint32)
        if const_expr(self.gated):
            self.load_row(x_thread, o.x, m, at, True)
        if at.lane == 0:
            s.totals[at.warp] = Float32(0.0)
        acc.fill(0.0)
        first = at.group * self.rows
        for base in cutlass.range(begin, end, self.window, unroll=1):
            size = cutlass.min(end - base, Int32(self.window))
            # a token with many non-zeros has several words in each tile
            if listed > WARPS * (o.words.shape[1] // o.width):
                self.list_tiles(o, s, m, base, size, at)
            else:
                self.list_nonzeros(o, s, m, base, at)
            cute.arch.sync_threads()
            if const_expr(self.gated):
                if const_expr(self.cluster > 1):
                    self.expect_sums(s, size, windows, at.thread)
                self.up_products(s, x_thread, o.w_up, size, at)
            rows = cute.make_rmem_tensor((4, self.vectors, self.rows), Uint32)
            self.load_rows(s, rows, o.w_down, first, size, at)
            if const_expr(self.gated):
                if const_expr(self.cluster > 1):
                    cute.arch.mbarrier_wait(s.complete, windows & 1)
                else:
                    cute.arch.sync_threads()
            self.hidden_state(s, o.b_up, o.activation, size, at)
            windows += 1
            cute.arch.sync_threads()
            for other in cutlass.range(first, size, self.groups * self.rows, unroll=1):
                if other != first:
                    self.load_rows(s, rows, o.w_down, other, size, at)
                self.add_rows(s, acc, rows, other)
            # the list has been read
            cute.arch.sync_threads()
        return windows

    # ---- shares ----

    @cute.jit
    def compute_share(self, o: Operands, s: Views, index: Int32, at: Thread):
        """Compute the share of cluster `index`: tokens, and pieces of them; or token `index` alone."""
        tokens, alone = o.y.shape[0], o.clusters == 0
        slabs = cute.ceil_div(tokens, SLAB)
        clusters = o.clusters // slabs
        slab = index // SLAB if alone else index // clusters
        groups = cutlass.min(cute.ceil_div(tokens, GROUP) - slab * GROUPS, Int32(GROUPS))
        share, group = Share(Int32(0), Int32(1), Int32(0), Int32(1)), index % SLAB // GROUP
        weight, windows = Int32(0), Int32(0)
        if not alone:
            share = self.find_share(o, s, slab, groups, index - slab * clusters, clusters, at)
            group = self.group_at(s, share.first, groups, at.lane)
            weight = s.before[cutlass.min(group, groups)]
        acc = cute.make_rmem_tensor((8, self.vectors), Float32)
        while group < groups and weight < share.last:
            counts = self.count_group(o, slab * GROUPS + group, at.lane)
            for j in cutlass.range(GROUP, unroll=1):
                m, listed = (slab * GROUPS + group) * GROUP + j, Int32(cute.arch.shuffle_sync(counts, 4 * j))
                if m < tokens:
                    begin, end = self.cut(share.first - weight, listed), self.cut(share.last - weight, listed)
                    if alone:
                        begin, end = Int32(0), listed + OVERHEAD if m == index else Int32(0)
                    if begin < end:
                        stop = cutlass.min(end, listed)
                        windows = self.accumulate(o, s, acc, m, listed, begin, stop, windows, at)
                        if begin == 0 and end > listed:
                            self.store_token(o, s, acc, m, at)
                        else:
                            # of cluster i line 2 i is the piece that began before its share, 2 i + 1 the one that goes on
                            base, pieces = self.pieces_of(share, weight, listed)
                            line = 2 * slab * clusters
                            own = line + 2 * share.index + Int32(begin == 0)
                            self.store_piece(o, s, acc, m, own, line + 2 * base, pieces, at)
                    weight += listed + OVERHEAD
            # the only token has been in this group
            group = groups if alone else group + 1

    @cute.jit
    def find_share(self, o: Operands, s: Views, slab: Int32, groups: Int32, index: Int32, clusters: Int32, at: Thread):
        """Write `s.before` and return the cluster's `Share`."""
        tiles = o.stats.shape[1]
        for group in cutlass.range(at.warp, groups, WARPS, unroll=8):
            count = Int32(0)
            for tile in cutlass.range(at.lane, tiles, 32, unroll=1):
                count += o.stats[slab * GROUPS + group, tile, 0]
            count = Int32(cute.arch.warp_redux_sync(count, "add"))
            if at.lane == 0:
                present = cutlass.min(o.y.shape[0] - (slab * GROUPS + group) * GROUP, Int32(GROUP))
                s.before[group] = count + present * OVERHEAD
        cute.arch.sync_threads()
        each, own, total = GROUPS // 32, [], Int32(0)
        for i in range_constexpr(each):
            group = at.lane * each + i
            own.append(s.before[group] if group < groups else Int32(0))
            total += own[i]
        before = prefix_sum(total, at.lane)
        total = Int32(cute.arch.shuffle_sync(before + total, 31))
        cute.arch.sync_threads()
        if at.warp == 0:
            for i in range_constexpr(each):
                s.before[at.lane * each + i] = before
                before += own[i]
            if at.lane == 31:
                s.before[GROUPS] = before
        cute.arch.sync_threads()
        # of at least a turn, so that no piece is empty
        size = cutlass.max(cute.ceil_div(total, clusters), Int32(self.turn + OVERHEAD))
        first = cutlass.min(index * size, total)
        return Share(index, size, first, cutlass.min(first + size, total))

    @cute.jit
    def group_at(self, s: Views, weight: Int32, groups: Int32, lane: Int32):
        """The last group of tokens that begins at `weight` or before."""
        count = Int32(0)
        for i in range_constexpr(GROUPS // 32):
            group = lane * (GROUPS // 32) + i
            count += Int32(group < groups and s.before[group] <= weight)
        return Int32(cute.arch.warp_redux_sync(count, "add")) - 1

    @cute.jit
    def cut(self, distance: Int32, listed: Int32):
        """The non-zero before which a token is cut by a border of shares at this distance from its begin.

        0 if the border lies before, and more than `listed` if behind.
        """
        place = (distance + self.turn // 2) // self.turn * self.turn
        behind = listed + OVERHEAD
        if listed <= self.whole:
            place = Int32(0) if 2 * distance < behind else behind
        elif place >= listed or distance >= behind:
            place = behind
        return cutlass.max(place, Int32(0)) if distance > 0 else Int32(0)

    @cute.jit
    def pieces_of(self, share: Share, weight: Int32, listed: Int32):
        """Of a cut token that begins at `weight` the CTA of its first piece, and the number of its pieces."""
        # borders that `cut` puts before a non-zero: at half a turn, and up to half a turn before the last multiple
        low = self.turn - self.turn // 2
        high = cutlass.min(cute.ceil_div(listed, self.turn) * self.turn - self.turn // 2, listed + OVERHEAD)
        first = cute.ceil_div(weight + low, share.size)
        return first - 1, cute.ceil_div(weight + high, share.size) - first + 1

    @cute.jit
    def begin(self, s: Views):
        """Initialise the cluster's barriers; `cluster_wait` must follow."""
        if const_expr(self.cluster > 1):
            if cute.arch.thread_idx()[0] == 0:
                cute.arch.mbarrier_init(s.complete, 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def expect_sums(self, s, size, windows, thread):
        """Expect the partial sums of a window, once all CTAs have read those of the previous one."""
        if windows > 0:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(s.complete, 4 * self.parts * size)

    @cute.jit
    def count_group(self, o: Operands, group: Int32, lane: Int32):
        """The number of non-zeros of token lane / 4 of a group in each lane; every warp computes the same."""
        count, token, tiles = Int32(0), group * GROUP + lane // 4, o.words.shape[1] // o.width
        if token < o.y.shape[0]:
            for tile in cutlass.range(lane % 4, tiles, 4, unroll=4):
                count += o.words[token, tile * o.width]
        for d in (1, 2):
            count += cute.arch.shuffle_sync_bfly(count, d)
        return count

    # ---- listing ----

    @cute.jit
    def list_nonzeros(self, o: Operands, s: Views, m: Int32, base: Int32, at: Thread):
        """List non-zeros `base` to `base + window`, ascending: a lane has a tile, and each warp every eighth word."""
        tiles = o.words.shape[1] // o.width
        before = -base
        for group in cutlass.range(0, tiles, TILES, unroll=1):
            tile = group + at.lane
            exists = tile < tiles
            count = count_of(o.words, m, tile, o.width, exists)
            word = Uint32(o.words[m, tile * o.width + at.warp]) if exists else Uint32(0)
            # position of the tile's first non-zero
            start = before + prefix_sum(count, at.lane)
            before += Int32(cute.arch.warp_redux_sync(count, "add"))
            spilled = count >= o.width
            last = 0 if spilled else count
            self.list_word(s, start + at.warp - 1, word, at.warp > 0 and at.warp <= last)
            most = Int32(cute.arch.warp_redux_sync(last, "max"))
            for ordinal in cutlass.range(at.warp + WARPS, most + 1, WARPS, unroll=1):
                if ordinal <= last:
                    more = o.words[m, tile * o.width + ordinal]
                    self.list_word(s, start + ordinal - 1, Uint32(more), True)
            left = Uint32(cute.arch.vote_ballot_sync(spilled))
            while left != 0:
                slot = lowest_bit(left)
                left = left & (left - 1)
                first = cute.arch.shuffle_sync(start, slot)
                if slot % WARPS == at.warp:
                    self.list_spilled(o, s, m, group + slot, first, at.lane)

    @cute.jit
    def list_tiles(self, o: Operands, s: Views, m: Int32, base: Int32, size: Int32, at: Thread):
        """List `size` non-zeros from `base` on, ascending: a warp per tile that has any of them, a lane per word."""
        tiles = o.words.shape[1] // o.width
        before = -base
        for group in cutlass.range(0, tiles, TILES, unroll=1):
            tile = group + at.lane
            count = count_of(o.words, m, tile, o.width, tile < tiles)
            # position of the tile's first non-zero
            start = before + prefix_sum(count, at.lane)
            before += Int32(cute.arch.warp_redux_sync(count, "add"))
            needed = Uint32(cute.arch.vote_ballot_sync(start < size and start + count > 0))
            for j in range_constexpr(TILES // WARPS):
                slot = at.warp + WARPS * j
                first, last = cute.arch.shuffle_sync(start, slot), cute.arch.shuffle_sync(count, slot)
                if (needed >> slot) & 1 != 0:
                    if last >= o.width:
                        self.list_spilled(o, s, m, group + slot, first, at.lane)
                    else:
                        for ordinal in cutlass.range(at.lane, last, 32, unroll=1):
                            word = o.words[m, (group + slot) * o.width + 1 + ordinal]
                            self.list_word(s, first + ordinal, Uint32(word), True)

    @cute.jit
    def list_spilled(self, o: Operands, s: Views, m: Int32, tile: Int32, start: Int32, lane: Int32):
        """List the non-zeros of a tile that overflows by one warp, eight values per lane."""
        neuron = tile * geometry.TILE + lane * 8
        quad = load_values(address(o.spill, m, neuron))
        flags = nonzero_flags(quad)
        own = count_flags(flags)
        at = start + prefix_sum(own, lane)
        for i in range_constexpr(8):
            self.list_word(s, at, spilled_word(quad, i, neuron), flags[i])
            at += Int32(flags[i])

    @cute.jit
    def list_word(self, s: Views, at: Int32, word: Uint32, valid):
        if valid and at >= 0 and at < self.window:
            s.nonzeros[at] = word

    # ---- rows ----

    @cute.jit
    def load_row(self, values: cute.Tensor, matrix: cute.Tensor, row: Uint32, at: Thread, exists: Boolean):
        """Load the thread's pieces of a row; zeros beyond the last column, or unless the row `exists`."""
        base = address(matrix, row, at.left) + at.column
        for v in range_constexpr(self.vectors):
            offset = v * self.span * STEP
            load_values_if(base + offset, values[None, v], exists and at.column + offset < at.columns)

    @cute.jit
    def load_rows(self, s: Views, rows: cute.Tensor, matrix: cute.Tensor, first: Int32, size: Int32, at: Thread):
        """Load rows of the neurons from `first` of the list on; zeros beyond its end."""
        words = self.load_list(s.nonzeros, first)
        for j in range_constexpr(self.rows):
            neuron = words[j] & Uint32(0xFFFF)
            self.load_row(rows[None, None, j], matrix, neuron, at, first + j < size)

    @cute.jit
    def load_list(self, values: cute.Tensor, first: Int32):
        """Load `rows` elements of a list in shared memory, `first` being a multiple of that."""
        loaded = cute.make_rmem_tensor((self.rows,), values.element_type)
        source = (values.iterator + first).align(min(16, 4 * self.rows))
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(self.rows)), loaded)
        return loaded

    @cute.jit
    def up_products(self, s, x_thread, w_up, size, at):
        """Store dot products over each warp's columns in `partial`."""
        # lanes that share a row at the end of the sums over the warp
        sharing = 32 // self.rows
        for first in cutlass.range(at.group * self.rows, size, self.groups * self.rows, unroll=1):
            rows = cute.make_rmem_tensor((4, self.vectors, self.rows), Uint32)
            self.load_rows(s, rows, w_up, first, size, at)
            sums = [Float32(0.0)] * self.rows
            for v in range_constexpr(self.vectors):
                for i in range_constexpr(4):
                    low, high = low_to_float(x_thread[i, v], self.dtype), high_to_float(x_thread[i, v], self.dtype)
                    for j in range_constexpr(self.rows):
                        sums[j] += low * low_to_float(rows[i, v, j], self.dtype)
                        sums[j] += high * high_to_float(rows[i, v, j], self.dtype)
            value = self.sum_rows(sums, at.lane)
            nonzero, copy = first + at.lane // sharing, at.lane % sharing
            if const_expr(self.cluster == 1):
                if copy == 0:
                    s.partial[nonzero * self.span + at.place] = value
            elif nonzero < size:
                target = s.partial.iterator + (nonzero * self.parts + at.rank * self.span + at.place)
                for peer in range_constexpr(0, self.cluster, sharing):
                    if peer + copy < self.cluster:
                        send_float(target, s.complete, peer + copy, value)

    @cute.jit
    def sum_rows(self, sums, lane):
        """Sum `rows` values over the warp, each in 32 / rows lanes: those of row 0, then those of row 1 and so on.

        A lane gives half of its values away at each step.
        """
        for step in range_constexpr(5):
            distance = 16 >> step
            half = len(sums) // 2
            if const_expr(half > 0):
                upper = lane & distance != 0
                halves = []
                for j in range_constexpr(half):
                    kept = sums[j + half] if upper else sums[j]
                    given = sums[j] if upper else sums[j + half]
                    halves.append(kept + cute.arch.shuffle_sync_bfly(given, distance))
                sums = halves
            else:
                sums = [sums[0] + cute.arch.shuffle_sync_bfly(sums[0], distance)]
        return sums[0]

    @cute.jit
    def hidden_state(self, s: Views, b_up, activation: Int32, size: Int32, at: Thread):
        """Compute the hidden state of the listed non-zeros, zeros up to full `rows`, and add to the sums of |h|."""
        total = Float32(0.0)
        for i in cutlass.range(at.thread, cute.ceil_div(size, self.rows) * self.rows, THREADS, unroll=1):
            h = Float32(0.0)
            if i < size:
                word = s.nonzeros[i]
                gate = high_to_float(word, self.dtype)
                if const_expr(self.gated):
                    value = self.sum_parts(s, i)
                    if b_up.shape[0] > 0:
                        value += b_up[Int32(word & Uint32(0xFFFF))].to(Float32)
                    h = hidden(gate, value, activation)
                else:
                    h = power(gate, activation)
            s.hidden[i] = h
            total += cute.arch.fmax(h, -h)
        total = warp_sum(total)
        if at.lane == 0:
            s.totals[at.warp] += total

    @cute.jit
    def sum_parts(self, s, i):
        """The dot product of non-zero `i`: the sum of its parts, in a fixed order."""
        parts = cute.make_rmem_tensor((self.parts,), Float32)
        source = (s.partial.iterator + i * self.parts).align(min(16, 4 * self.parts))
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(self.parts)), parts)
        value = parts[0]
        for p in range_constexpr(1, self.parts):
            value += parts[p]
        return value

    @cute.jit
    def add_rows(self, s: Views, acc: cute.Tensor, rows: cute.Tensor, first: Int32):
        """acc += h times the rows, which with their h are zero beyond the list's end."""
        hidden = self.load_list(s.hidden, first)
        for j in range_constexpr(self.rows):
            for v in range_constexpr(self.vectors):
                for i in range_constexpr(4):
                    acc[2 * i, v] += hidden[j] * low_to_float(rows[i, v, j], self.dtype)
                    acc[2 * i + 1, v] += hidden[j] * high_to_float(rows[i, v, j], self.dtype)

    # ---- the end ----

    @cute.jit
    def store_token(self, o: Operands, s: Views, acc: cute.Tensor, m: Int32, at: Thread):
        """Add the groups' sums in a fixed order and store this CTA's columns."""
        if const_expr(self.groups > 1):
            self.store_sums(o, s, acc, m, at)
        else:
            cute.arch.sync_threads()
            for v in range_constexpr(self.vectors):
                column = at.column + v * self.span * STEP
                if column < at.columns:
                    self.store_columns(o, acc[None, v], m, at.left + column)
        if at.rank == 0 and at.thread == 0:
            o.l1[m] = self.total(s)

    @cute.jit
    def store_columns(self, o, values, m, column):
        """Add the bias to eight values of y, round and store them."""
        if o.b_down.shape[0] > 0:
            bias = load_values(o.b_down.iterator + column)
            for i in range_constexpr(4):
                values[2 * i] += low_to_float(bias[i], self.dtype)
                values[2 * i + 1] += high_to_float(bias[i], self.dtype)
        quad = cute.make_rmem_tensor((4,), Uint32)
        for i in range_constexpr(4):
            quad[i] = pack(values[2 * i], values[2 * i + 1], self.dtype)
        store_values(address(o.y, m, column), quad)

    @cute.jit
    def store_sums(self, o: Operands, s: Views, acc: cute.Tensor, m: Int32, at: Thread):
        """Add the groups' sums in shared memory and store y, a pair of columns per thread and time."""
        self.share_sums(s, acc, at)
        for column in cutlass.range(2 * at.thread, at.columns, 2 * THREADS, unroll=1):
            self.store_pair(o, self.add_groups(s, column), m, at.left + column)

    @cute.jit
    def share_sums(self, s: Views, acc: cute.Tensor, at: Thread):
        """Write each group's sums to shared memory."""
        for v in range_constexpr(self.vectors):
            target = s.sums + (at.group * self.columns + at.column + v * self.span * STEP)
            cute.autovec_copy(acc[None, v], cute.make_tensor(target.align(16), cute.make_layout(8)))
        cute.arch.sync_threads()

    @cute.jit
    def add_groups(self, s: Views, column: Int32):
        """The sums of two columns over the groups, in a fixed order."""
        sums = cute.make_tensor(s.sums, cute.make_layout(self.groups * self.columns))
        pair = cute.make_rmem_tensor((2,), Float32)
        for j in range_constexpr(2):
            value = Float32(0.0)
            for g in range_constexpr(self.groups):
                value += sums[g * self.columns + column + j]
            pair[j] = value
        return pair

    @cute.jit
    def store_pair(self, o: Operands, values: cute.Tensor, m: Int32, column: Int32):
        """Add the bias to two values of y, round and store them."""
        pair = cute.make_rmem_tensor((2,), self.dtype)
        for j in range_constexpr(2):
            value = values[j]
            if o.b_down.shape[0] > 0:
                value += o.b_down[column + j].to(Float32)
            pair[j] = value.to(self.dtype)
        cute.autovec_copy(pair, cute.make_tensor(address(o.y, m, column).align(4), cute.make_layout(2)))

    @cute.jit
    def store_piece(self, o, s, acc, m, line, first, pieces, at):
        """Store the sums of one of several pieces; the last CTA to do so for these columns adds them and stores y.

        Its line in `sums` is `line`. Piece i has line `first + 2 i`, piece 0 the one behind that.
        """
        self.share_sums(s, acc, at)
        for column in cutlass.range(2 * at.thread, at.columns, 2 * THREADS, unroll=1):
            target = address(o.sums, line, at.left + column).align(8)
            cute.autovec_copy(self.add_groups(s, column), cute.make_tensor(target, cute.make_layout(2)))
        end = o.y.shape[1]
        if at.rank == 0 and at.thread == 0:
            o.sums[line, end] = self.total(s)
        # everything is stored, and `nonzeros` is free
        cute.arch.sync_threads()
        if at.thread == 0:
            arrived = o.arrivals.iterator + (m * self.cluster + at.rank)
            s.nonzeros[0] = Uint32(cute.arch.atomic_add(arrived, Int32(1), sem="acq_rel", scope="gpu"))
        cute.arch.sync_threads()
        if Int32(s.nonzeros[0]) == pieces - 1:
            cute.arch.fence_acq_rel_gpu()
            # four columns of y per thread, and behind those of the first CTA l1
            for column in cutlass.range(4 * at.thread, at.columns + 4 * Int32(at.rank == 0), 4 * THREADS, unroll=1):
                mine = column < at.columns
                values = self.add_pieces(o, at.left + column if mine else end, first, pieces)
                if mine:
                    for i in range_constexpr(2):
                        self.store_pair(o, values[2 * i : 2 * i + 2], m, at.left + column + 2 * i)
                else:
                    o.l1[m] = values[0]

    @cute.jit
    def add_pieces(self, o, column, first, pieces):
        """The sums of four columns over the pieces, in their order; loads of `AT_ONCE` pieces are in flight."""
        values = [Float32(0.0)] * 4
        for base in cutlass.range(0, pieces, AT_ONCE, unroll=1):
            quads = cute.make_rmem_tensor((4, AT_ONCE), Float32)
            for p in range_constexpr(AT_ONCE):
                # the last one again in place of those beyond
                piece = cutlass.min(base + p, pieces - 1)
                source = address(o.sums, first + 2 * piece + Int32(piece == 0), column).align(16)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), quads[None, p])
            for p in range_constexpr(AT_ONCE):
                for i in range_constexpr(4):
                    values[i] = values[i] + quads[i, p] if base + p < pieces else values[i]
        return values

    @cute.jit
    def total(self, s: Views):
        """The sum of |h| over the warps."""
        everything = Float32(0.0)
        for w in range_constexpr(WARPS):
            everything += s.totals[w]
        return everything

    def views(self, shared):
        """Tensors over the shared struct."""
        arena, window = shared.arena.data_ptr(), self.window
        return Views(
            complete=shared.sums_complete.data_ptr(),
            totals=shared.totals.get_tensor(cute.make_layout(WARPS)),
            nonzeros=cute.make_tensor(cute.recast_ptr(arena, dtype=Uint32), cute.make_layout(window)),
            hidden=cute.make_tensor(arena + window, cute.make_layout(window)),
            partial=cute.make_tensor(arena + 2 * window, cute.make_layout(window * self.parts)),
            sums=arena,
            before=shared.before.get_tensor(cute.make_layout(GROUPS + 1)),
        )


class UpDownToken:
    """For one dtype, cluster size and class of hidden sizes, gated or not."""

    def __init__(self, spec: UpDownTokenSpec):
        self.cluster, self.ctas_per_sm = spec.cluster, spec.ctas_per_sm
        self.team = TokenCluster(spec)
        self.shared = shared_memory(self.team.words, self.ctas_per_sm)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor | None,
        words: cute.Tensor,
        spill: cute.Tensor,
        stats: cute.Tensor,
        w_up: cute.Tensor | None,
        w_down: cute.Tensor,
        b_up: cute.Tensor | None,
        b_down: cute.Tensor | None,
        y: cute.Tensor,
        l1: cute.Tensor,
        sums: cute.Tensor,
        arrivals: cute.Tensor,
        clusters: Int32,
        words_per_tile: Int32,
        activation: Int32,
        stream: cuda.CUstream,
    ):
        tokens = y.shape[0]
        if tokens > 0:
            layer = (x, words, spill, w_up, w_down, b_up, b_down, y, l1)
            self.kernel(Operands(*layer, words_per_tile, activation, sums, arrivals, clusters, stats)).launch(
                grid=(self.cluster * (tokens if clusters == 0 else clusters), 1, 1),
                block=(THREADS, 1, 1),
                cluster=(self.cluster, 1, 1) if const_expr(self.cluster > 1) else None,
                min_blocks_per_mp=self.ctas_per_sm,
                preferred_smem_carveout=100,
                stream=stream,
                use_pdl=launch.overlaps(),
            )

    @cute.kernel
    def kernel(self, o: Operands):
        block = cute.arch.block_idx()[0]
        rank, index = block % self.cluster, block // self.cluster
        s, k = self.team.views(SmemAllocator().allocate(self.shared)), o.y.shape[1]
        self.team.begin(s)
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        self.team.compute_share(o, s, index, self.team.thread_index(k, rank))


def signature(spec: UpDownTokenSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype, m = operands.DTYPES[spec.dtype], cute.sym_int32()
    n, k = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    return UpDownToken(spec), (
        operands.rows(dtype, m, k) if spec.gated else None,
        *operands.packed(dtype, m),
        operands.cube(Int32, cute.sym_int32(), cute.sym_int32(), 2),
        operands.rows(dtype, n, k) if spec.gated else None,
        operands.rows(dtype, n, k),
        operands.bias(dtype) if spec.gated else None,
        operands.bias(dtype),
        operands.rows(dtype, m, k),
        operands.vector(Float32, m),
        operands.rows(Float32, cute.sym_int32(), cute.sym_int32(divisibility=8)),
        operands.vector(Int32, cute.sym_int32(), 4),
        *(Int32(1), Int32(1), Int32(1)),
    )
