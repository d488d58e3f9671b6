"""Gated up and down projections on the pattern of a packed gate: y[m] = sum over non-zeros c of h[m, c] * w_down[c],
with h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]). Strategy "row": only the weight rows of non-zeros are read, anew
for each token. If not `gated`, the packed values are h: neither x nor up rows are read. So it is for relu; for the
other activations see common/activation.py.

A cluster of `cluster` CTAs, 1 to 4, computes a token, each CTA a part of the columns. Few tokens take large clusters,
for latency; many take one CTA each, three or four on an SM: some list while others stream. The portable family always
has one CTA per token.

Each thread owns 16 bytes of every row, eight columns, or several times that. So a row takes `span` warps of a CTA, and
its warps form `groups` of that size. The groups divide the non-zeros: `rows` at a time, with all their loads in flight.
A CTA handles up to `window` non-zeros at a time:

    list    a lane per tile of the gate, 32 tiles at a time; each warp lists every eighth word. Every CTA lists all. Of
            tokens with many non-zeros, a warp per tile and a lane per word.
    up      rows times the x that a thread holds. The sums over each warp go to `partial` of all CTAs.
    hidden  each thread takes a non-zero and adds the partial sums of all warps and CTAs in a fixed order; the loads of
            the first down rows are already in flight.
    down    adds h times rows to fp32 sums in registers, in ascending order of the group's neurons.

At the end the groups' sums are added in shared memory, and each CTA rounds and stores its columns. h stays fp32.

Behind the clusters of tokens come `helpers`, as many as run at a time. They share the heavy tokens, those with more
than `limit` non-zeros, whose clusters leave at once. A heavy token is cut into pieces of one size, such that there are
about as many as helpers. The sums of a token's pieces go to `sums`, and the last to arrive adds them up, in the order
of the list.

With `stats` the CTAs that run first add up all non-zeros, and the first one writes their number for later ones. A token
is not heavy unless it has more than a helper's share of them.

    COMPLETE  of each CTA of a larger cluster: 1 arrival + bytes, the partial sums of a window, sent by st.async.
    cluster   once at the start, so that COMPLETE exists; then before each further window, so that all CTAs have read
              the partial sums of the one before.
    SEEN      a counter in global memory: each cluster of a token says whether it is heavy; helpers wait for all. They
              come last, so those they wait for have begun.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible, geometry
from ..common import launch, operands
from ..common.activation import hidden, power
from ..common.copies import address, aligned, load_values_if
from ..common.token_list import TokenList
from ..common.token_pieces import HEAVY, Pieces, TokenPieces
from ..common.token_sums import THREADS, WARPS
from ..common.values import high_to_float, low_to_float, warp_sum
from ..sm90.copies import send
from ..specs import E4M3, UpDownTokenSpec


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
    # of helpers, without which the first three are empty
    sums: Any  # fp32 [2 * helpers, K + 8]: y of each piece, and in column K its l1
    # int32 [geometry.TOKEN_COUNTERS + tokens * cluster], zeros: the last are of CTAs that have stored columns of `sums`
    counters: Any
    weights: Any  # int32 [tokens], zeros: non-zeros of each heavy token
    helpers: Any
    limit: Any
    # of all tokens, empty if a cluster looks at its own alone
    stats: Any  # int32 [ceil(tokens / 8), tiles, 2]: non-zeros of eight tokens in a tile
    experts: Any = None  # of expert_down.py
    scales: Any = None  # of up_down_token_e4m3.py


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
    before: Any  # [THREADS + 1] pieces before each thread's tokens, and in the upper half lines of `sums`
    experts: Any = None  # of expert_down.py


def shared_memory(words: int, ctas: int) -> Any:
    """The shared memory of a CTA, of which ``ctas`` fit on an SM."""

    @cute.struct
    class Shared:
        # the second one pads
        sums_complete: cute.struct.MemRange[Int64, 2]
        totals: cute.struct.MemRange[Float32, WARPS]
        before: cute.struct.MemRange[Int32, THREADS + 1]
        arena: cute.struct.Align[cute.struct.MemRange[Float32, words], 16]

    return feasible.check_shared_memory(Shared, ctas)


class TokenCluster(TokenList, TokenPieces):
    """A cluster of CTAs, 1 to 4, that computes one token at a time; for one dtype and class of hidden sizes."""

    def __init__(self, spec: UpDownTokenSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.gated = spec.gated
        self.cluster, self.columns = spec.cluster, spec.columns
        self.span, self.vectors, self.groups, self.rows = spec.span, spec.vectors, spec.groups, spec.rows
        # columns of a warp's load, and of a thread's
        self.step, self.width = spec.step, spec.step // 32
        # partial sums of a dot product
        self.parts = self.cluster * self.span
        self.window = min(1024, (4096 if self.cluster == 1 else 8192) // self.parts)
        self.lists = self.window * (2 + self.parts if self.gated else 2)
        # of shared memory
        # of one group's sums
        self.pitch = self.columns + (4 * 16 if spec.dtype == E4M3 else 0)
        self.words = max(self.lists, self.groups * self.pitch)
        # pieces are multiples of it
        self.turn = self.groups * self.rows

    @cute.jit
    def thread_index(self, k: Int32, rank):
        """The thread's indices in CTA `rank` of a cluster; columns are divided in pieces of 16 bytes."""
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        share = cute.ceil_div(k, self.width * self.cluster) * self.width
        left = rank * share
        columns = cutlass.max(cutlass.min(k - left, share), Int32(0))
        place = warp % self.span
        column = place * self.step + lane * self.width
        return Thread(rank, left, columns, column, warp // self.span, place, thread, warp, lane)

    @cute.jit
    def accumulate(self, o: Operands, s: Views, acc: cute.Tensor, m: Int32, listed, begin, end, windows, at: Thread):
        """acc = the sum over non-zeros `begin` to `end` of the `listed` ones of token `m`; `s.totals` of their |h|.

        Returns the cluster's number of windows so far.
        """
        # the previous token's sums may still be read
        cute.arch.sync_threads()
        self.enter(o, s, m, at)
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
            if listed > WARPS * self.tiles_of(o):
                self.list_tiles(o, s, m, base, size, at)
            else:
                self.list_nonzeros(o, s, m, base, at)
            cute.arch.sync_threads()
            if const_expr(self.gated):
                if const_expr(self.cluster > 1):
                    self.expect_sums(s, size, windows, at.thread)
                self.up_products(o, s, x_thread, size, at)
            rows = cute.make_rmem_tensor((4, self.vectors, self.rows), Uint32)
            self.load_rows(o, s, rows, False, first, size, at)
            if const_expr(self.gated):
                if const_expr(self.cluster > 1):
                    cute.arch.mbarrier_wait(s.complete, windows & 1)
                else:
                    cute.arch.sync_threads()
            self.hidden_state(o, s, m, size, at)
            windows += 1
            cute.arch.sync_threads()
            for other in cutlass.range(first, size, self.groups * self.rows, unroll=1):
                if other != first:
                    self.load_rows(o, s, rows, False, other, size, at)
                self.add_rows(s, acc, rows, other)
            # the list has been read
            cute.arch.sync_threads()
        return windows

    def enter(self, o: Operands, s: Views, m: Int32, at: Thread) -> None:
        """Prepare for token `m`; all threads meet before its list is read."""

    @cute.jit
    def compute(self, o: Operands, s: Views, index: Int32, limit: Int32, at: Thread):
        """Compute token `index`, unless it has more than `limit` non-zeros, or the pieces that belong to a helper."""
        tokens = o.y.shape[0]
        helping, listed, pieces = index >= tokens, Int32(0), Pieces(Int32(1 << 30), Int32(0), Int32(1))
        piece, step, windows = Int32(0), Int32(1), Int32(0)
        if helping:
            heavy = self.wait_for_tokens(o, s, at)
            piece, step = index - tokens, o.helpers
            if heavy > 0:
                pieces = self.cut_tokens(o, s, heavy, at)
        else:
            listed = self.count_nonzeros(o, index, at.lane)
            is_heavy = o.helpers > 0 and listed > limit
            if o.helpers > 0 and at.rank == 0 and at.thread == 0:
                if is_heavy:
                    o.weights[index] = listed
                    cute.arch.atomic_add(
                        o.counters.iterator + geometry.SEEN, Int32(HEAVY + 1), sem="release", scope="gpu"
                    )
                else:
                    # nothing to publish: a release would keep the cluster waiting
                    cute.arch.atomic_add(o.counters.iterator + geometry.SEEN, Int32(1), sem="relaxed", scope="gpu")
            pieces = Pieces(pieces.size, Int32(0) if is_heavy else Int32(1), pieces.each)
        acc = cute.make_rmem_tensor((self.width, self.vectors), Float32)
        while piece < pieces.total:
            m, first, line = index, Int32(0), Int32(0)
            if helping:
                m, listed, first, line = self.find_piece(o, s, pieces, piece, at.lane)
            begin = (piece - first) * pieces.size
            end = cutlass.min(listed - begin, pieces.size) + begin
            windows = self.accumulate(o, s, acc, m, listed, begin, end, windows, at)
            if listed <= pieces.size:
                self.store_token(o, s, acc, m, at)
            else:
                self.store_piece(o, s, acc, m, line + piece - first, line, cute.ceil_div(listed, pieces.size), at)
            piece += step

    # ---- the beginning ----

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

    # ---- rows ----

    @cute.jit
    def load_row(self, values: cute.Tensor, matrix: cute.Tensor, row: Uint32, at: Thread, exists: Boolean):
        """Load the thread's pieces of a row; zeros beyond the last column, or unless the row `exists`."""
        base = address(matrix, row, at.left) + at.column
        for v in range_constexpr(self.vectors):
            offset = v * self.span * self.step
            load_values_if(base + offset, values[None, v], exists and at.column + offset < at.columns)

    @cute.jit
    def load_rows(self, o, s: Views, rows: cute.Tensor, up: cutlass.Constexpr, first: Int32, size: Int32, at: Thread):
        """Load rows of the up or the down weights of the neurons from `first` of the list on; zeros beyond its end."""
        numbers, matrix = self.rows_of(o, s, first, up), o.w_up if const_expr(up) else o.w_down
        for j in range_constexpr(self.rows):
            self.load_row(rows[None, None, j], matrix, numbers[j], at, first + j < size)

    def rows_of(self, o: Operands, s: Views, first: Int32, up: bool) -> list[Uint32]:
        """The numbers of the rows of the up or the down weights of the neurons from `first` of the list on."""
        words = self.load_list(s.nonzeros, first)
        return [words[j] & Uint32(0xFFFF) for j in range(self.rows)]

    @cute.jit
    def load_list(self, values: cute.Tensor, first: Int32):
        """Load `rows` elements of a list in shared memory, `first` being a multiple of that."""
        loaded = cute.make_rmem_tensor((self.rows,), values.element_type)
        cute.autovec_copy(aligned(values.iterator + first, self.rows), loaded)
        return loaded

    def products(self, x_thread: cute.Tensor, rows: cute.Tensor) -> list[Float32]:
        """The dot products of a thread's columns of x and of each of its rows."""
        sums = [Float32(0.0)] * self.rows
        for v in range(self.vectors):
            for i in range(4):
                low, high = low_to_float(x_thread[i, v], self.dtype), high_to_float(x_thread[i, v], self.dtype)
                for j in range(self.rows):
                    sums[j] += low * low_to_float(rows[i, v, j], self.dtype)
                    sums[j] += high * high_to_float(rows[i, v, j], self.dtype)
        return sums

    @cute.jit
    def up_products(self, o, s, x_thread, size, at):
        """Store dot products over each warp's columns in `partial`."""
        # lanes that share a row at the end of the sums over the warp
        sharing = 32 // self.rows
        for first in cutlass.range(at.group * self.rows, size, self.groups * self.rows, unroll=1):
            rows = cute.make_rmem_tensor((4, self.vectors, self.rows), Uint32)
            self.load_rows(o, s, rows, True, first, size, at)
            value = self.sum_rows(self.products(x_thread, rows), at.lane)
            nonzero, copy = first + at.lane // sharing, at.lane % sharing
            if const_expr(self.cluster == 1):
                if copy == 0:
                    s.partial[nonzero * self.span + at.place] = value
            elif nonzero < size:
                target = s.partial.iterator + (nonzero * self.parts + at.rank * self.span + at.place)
                # a cluster has no more CTAs than lanes that share a row
                if copy < self.cluster:
                    send(target, s.complete, copy, value)

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
    def hidden_state(self, o: Operands, s: Views, m: Int32, size: Int32, at: Thread):
        """Compute the hidden state of the listed non-zeros, zeros up to full `rows`, and add to the sums of |h|."""
        total = Float32(0.0)
        for i in cutlass.range(at.thread, cute.ceil_div(size, self.rows) * self.rows, THREADS, unroll=1):
            h = Float32(0.0)
            if i < size:
                word = s.nonzeros[i]
                gate = high_to_float(word, self.dtype)
                if const_expr(self.gated):
                    value = self.scaled_up(o, s, m, i, self.sum_parts(s, i))
                    if o.b_up.shape[0] > 0:
                        value += o.b_up[Int32(word & Uint32(0xFFFF))].to(Float32)
                    h = hidden(gate, value, o.activation)
                else:
                    h = power(gate, o.activation)
                h = self.scaled(s, i, h)
            s.hidden[i] = h
            total += cute.arch.fmax(h, -h)
        total = warp_sum(total)
        if at.lane == 0:
            s.totals[at.warp] += total

    def scaled_up(self, o: Operands, s: Views, m: Int32, i: Int32, product: Float32) -> Float32:
        """The product of a row of x and the up weights of number `i` of the list."""
        return product

    def scaled(self, s: Views, i: Int32, h: Float32) -> Float32:
        """The hidden value of number `i` of the list."""
        return h

    @cute.jit
    def sum_parts(self, s, i):
        """The dot product of non-zero `i`: the sum of its parts, in a fixed order."""
        parts = cute.make_rmem_tensor((self.parts,), Float32)
        cute.autovec_copy(aligned(s.partial.iterator + i * self.parts, self.parts), parts)
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
            before=shared.before.get_tensor(cute.make_layout(THREADS + 1)),
        )


class UpDownToken:
    """For one dtype, cluster size and class of hidden sizes, gated or not."""

    Team: type[TokenCluster] = TokenCluster

    def __init__(self, spec: UpDownTokenSpec):
        self.cluster, self.ctas_per_sm = spec.cluster, spec.ctas_per_sm
        self.team = self.Team(spec)
        self.shared = shared_memory(self.team.words, self.ctas_per_sm)

    @cute.jit
    def __call__(self, *arguments: Any):
        """The layer, y and l1, memory of helpers and statistics, four numbers and the stream."""
        *layer, sums, counters, weights, stats, helpers, limit, words_per_tile, activation, stream = arguments
        numbers = [words_per_tile, activation, sums, counters, weights, helpers, limit, stats]
        self.launch(Operands(*[*layer, *numbers]), stream)

    @cute.jit
    def launch(self, o: Operands, stream: cuda.CUstream):
        """Launch the kernel."""
        tokens = o.y.shape[0]
        if tokens > 0:
            ctas, limits = self.cluster * (tokens + o.helpers), {"ctas_per_sm": self.ctas_per_sm, "carveout": 100}
            launch.start(self.kernel(o), ctas, THREADS, stream, cluster=self.cluster, **limits)

    @cute.kernel
    def kernel(self, o: Operands):
        block = cute.arch.block_idx()[0]
        rank, index = block % self.cluster, block // self.cluster
        s, k = self.team.views(SmemAllocator().allocate(self.shared)), o.y.shape[1]
        self.team.begin(s)
        launch.wait()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        at, limit = self.team.thread_index(k, rank), o.limit
        if o.stats.shape[0] > 0:
            limit = cutlass.max(limit, self.team.find_total(o, s, at) // o.helpers)
        self.team.compute(o, s, index, limit, at)


def arguments(spec: UpDownTokenSpec) -> tuple[Any, ...]:
    """The fake arguments that stand for the operands; scales follow e4m3 rows, of columns in w_down."""
    dtype, fp8, m, n = operands.DTYPES[spec.dtype], spec.dtype == E4M3, cute.sym_int32(), cute.sym_int32(divisibility=8)
    k = cute.sym_int32(divisibility=16 if fp8 else 8)
    absent = (None,) * (2 if fp8 else 1)
    return (
        *(operands.scaled_rows(spec.dtype, m, k) if spec.gated else absent),
        *operands.packed(dtype, m),
        *(operands.scaled_rows(spec.dtype, n, k) if spec.gated else absent),
        *((operands.byte_rows(Uint8, n, k), operands.dense(Float32, k)) if fp8 else (operands.rows(dtype, n, k),)),
        operands.bias(dtype) if spec.gated else None,
        operands.bias(dtype),
        *results(dtype, m, k),
        operands.dense(Int32, cute.sym_int32(), cute.sym_int32(), 2),
        *(Int32(1),) * 4,
    )


def results(dtype: Any, m: Any, k: Any) -> tuple[Any, ...]:
    """Those of y and l1, and of what helpers share."""
    return (
        operands.rows(dtype, m, k),
        operands.dense(Float32, m),
        operands.rows(Float32, cute.sym_int32(), cute.sym_int32(divisibility=8)),
        *(operands.dense(Int32, cute.sym_int32(), align=4) for _ in range(2)),
    )


def signature(spec: UpDownTokenSpec) -> tuple[Any, tuple[Any, ...]]:
    return UpDownToken(spec), arguments(spec)
