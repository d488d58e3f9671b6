"""Forward and backward of a batch whose non-zeros exceed the hybrid format's capacity, from x, the weights and a bitmap
of the non-zeros. Nothing else was stored, so gate and up are computed again.

Three modes, one timeline. A row of the result belongs to an *owner*: a token (forward, input) or a neuron (weight). It
is a sum over the owner's *partners*, the neurons or tokens that its bits name, of coefficients times partner rows:

    forward   y[m]       = sum h * w_down[c] + b_down                      and l1[m] = sum |h|
    input     dx[m]      = sum d_gate * w_gate[c] + d_up * w_up[c]
    weight    dw_gate[c] = sum d_gate * x[m], dw_up[c] = sum d_up * x[m],     and db_gate[c] = sum d_gate,
              dw_down[c] = sum h * dy[m]                                          db_up[c] = sum d_up

    gate = relu(x . w_gate + b_gate) rounded, up = x . w_up + b_up, h = gate * up,
    dh = dy . w_down + dl1 * sign(h), d_gate = dh * up, d_up = dh * gate      (not gated: h = gate, d_gate = dh)

A cluster of CTAs takes 32 owners at a time; each CTA keeps the sums of a slab of the columns in registers. If the slabs
of a cluster do not span K, the owners are processed again for each further span, dot products included.

    list   the partners with a bit set for any of the owners, ascending, out of a window of up to WINDOW. Every CTA
           lists all of them.
    score  each CTA takes a share of a batch of partners: their dot products with the owners over all of K, by mma, rows
           through a ring of stages in shared memory. The coefficients, rounded to 16 bits and zero where the bit is not
           set, go to every CTA of the cluster.
    sync   one cluster barrier per batch: its coefficients are complete, and the stages may be overwritten. Coefficients
           are double-buffered: a CTA that is a batch ahead writes the other buffer.
    add    mma: coefficients times the rows of all partners of the batch, added to the warp's columns. Each lane has its
           own ring, in the memory of the stages.

The bound is L2: a partner's rows are read once per 32 owners.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from . import feasible, geometry
from .sampled_grad import gradients
from .sm90 import operands
from .sm90.copies import address, load_pair, load_quad, store_peer_float, store_peer_pair
from .sm90.mma import load_matrices, mma_16x8x16
from .sm90.sparse_product import copy_async
from .sm90.sums import add_flushed, flush_sums
from .sm90.swizzle import swizzle_piece
from .sm90.values import high_to_float, join_halves, low_to_float, lowest_bit, pack, prefix_sum, relu_pack
from .specs import OverflowSpec

WARPS = 8
THREADS = 32 * WARPS
# rows of an mma's A operand and result, and columns of a warp's block of the result: 16 bytes per lane
ROWS = 16
BLOCK = 64
# owners of a cluster, and mma tiles of them
OWNERS = 32
TILES = OWNERS // ROWS
# columns of a stage of the dot products, and lines that all threads copy at a time, 16 bytes each: the owners'
COLUMNS = 64
LINES = THREADS // 8
assert LINES == OWNERS
# most partners that are listed at a time: a word of 32 flags per thread
WINDOW = 32 * THREADS


class Operands(NamedTuple):
    """Operands in global memory; None if absent."""

    x: Any
    dy: Any
    w_gate: Any
    w_up: Any
    w_down: Any
    b_gate: Any
    b_up: Any
    b_down: Any
    dl1: Any
    bits: Any  # [M * ceil(N / 32)]
    results: Any  # each [owners, K]
    totals: Any  # l1, or the gradients of the biases
    flushed: Any  # partial sums over many partners


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    sums: Any  # [WARPS + 1] partners listed by each warp, and by all
    partners: Any  # [WINDOW] positions in the window, ascending
    coefficients: Any  # [2, batch / 8, coefficients, tiles, 32 lanes, 2] pairs as the mma takes them
    own: Any  # [totals, WARPS, owners] fp32
    totals: Any  # [totals, cluster, WARPS, owners] fp32: those of every CTA
    stages: Any  # [stages, lines, COLUMNS] rows for score, or the lanes' rings of rows for add


class Thread(NamedTuple):
    """Indices of a thread."""

    rank: Any  # of its CTA in the cluster
    thread: Any
    warp: Any
    lane: Any


class Overflow:
    """For one mode, dtype and kind of layer. Subclasses define the dot products and the products of coefficients."""

    by_token = True
    # CTAs of a cluster, a warp's blocks of columns in add, and its groups of eight partners in score
    cluster, blocks, eights = 2, 2, 2
    accumulate = False
    # numbers of coefficients, results and totals
    counts = (1, 1, 0)
    # most matrices of owners, and of partners, that are scored at a time
    sides = (1, 2)

    def __init__(self, spec: OverflowSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.gated = spec.gated
        self.has_bias = spec.bias
        self.share = 8 * self.eights
        self.batch = self.share * WARPS * self.cluster
        self.slab = BLOCK * self.blocks * WARPS
        # words of coefficients, and slots of the totals
        self.pairs = 2 * self.batch // 8 * self.counts[0] * TILES * 64
        self.slots = max(self.counts[2], 1) * self.cluster * WARPS * OWNERS
        # values of a stage; only one side has two matrices in any mode
        lefts, rights = self.sides
        self.stage = (lefts * OWNERS + rights * self.share * WARPS) * COLUMNS
        fixed = 4 * (self.pairs + self.slots + self.slots // self.cluster + WARPS) + 2 * WINDOW + 256
        self.stages = min(5, (feasible.SMEM_PER_CTA - fixed) // (2 * self.stage))
        # most partners before sums are flushed; dx of a gated layer has two products per partner
        terms = self.counts[0] - self.counts[1] + 1
        self.longest = geometry.LONGEST_SUM[spec.dtype] // terms
        # sums are flushed between two windows
        self.window = min(WINDOW, self.longest)
        assert self.longest % self.window == 0
        assert self.by_token or self.window == WINDOW
        self.ring = self.stages * self.stage // (4 * self.blocks * 256 * WARPS)

    def scored(self, o: Operands) -> Any:
        """Pairs of (owner matrices, partner matrices); every owner matrix is scored with every partner matrix.

        The products are those of gate, up and dh, in this order.
        """
        raise NotImplementedError

    def added(self, o: Operands) -> Any:
        """(partner matrix, [(coefficient, result), ...]) of each matrix whose rows are added."""
        raise NotImplementedError

    @cute.jit
    def launch(
        self, x, dy, w_gate, w_up, w_down, b_gate, b_up, b_down, dl1, bits, sizes, capacity, results, totals,
        flushed, max_ctas, stream,
    ):  # fmt: skip
        @cute.struct
        class Shared:
            sums: cute.struct.MemRange[Int32, WARPS + 1]
            partners: cute.struct.Align[cute.struct.MemRange[Uint16, WINDOW], 16]
            coefficients: cute.struct.Align[cute.struct.MemRange[Uint32, self.pairs], 16]
            own: cute.struct.Align[cute.struct.MemRange[Float32, self.slots // self.cluster], 16]
            totals: cute.struct.Align[cute.struct.MemRange[Float32, self.slots], 16]
            stages: cute.struct.Align[cute.struct.MemRange[self.dtype, self.stages * self.stage], 128]

        self.shared = feasible.check_shared_memory(Shared)
        owners = x.shape[0] if const_expr(self.by_token) else w_gate.shape[0]
        items = cute.ceil_div(owners, OWNERS) * self.passes(x.shape[1])
        # clusters of four leave some SMs idle; how many is unknown here, so the grid may exceed them. Clusters with
        # one item more than others start first
        most = max_ctas // self.cluster if const_expr(self.cluster == 2) else max_ctas
        if x.shape[0] > 0:
            self.kernel(
                x, dy, w_gate, w_up, w_down, b_gate, b_up, b_down, dl1, bits, sizes, capacity, results, totals,
                flushed,
            ).launch(
                grid=(self.cluster * cutlass.max(cutlass.min(items, most), Int32(1)), 1, 1),
                block=(THREADS, 1, 1),
                cluster=(self.cluster, 1, 1),
                stream=stream,
            )  # fmt: skip

    def passes(self, k):
        """Number of spans of columns."""
        return cute.ceil_div(k, self.slab * self.cluster)

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        dy: cute.Tensor | None,
        w_gate: cute.Tensor,
        w_up: cute.Tensor | None,
        w_down: cute.Tensor,
        b_gate: cute.Tensor | None,
        b_up: cute.Tensor | None,
        b_down: cute.Tensor | None,
        dl1: cute.Tensor | None,
        bits: cute.Tensor,
        sizes: cute.Tensor,
        capacity: Int32,
        results: Any,
        totals: Any,
        flushed: cute.Tensor,
    ):
        o = Operands(x, dy, w_gate, w_up, w_down, b_gate, b_up, b_down, dl1, bits, results, totals, flushed)
        s = self.views(SmemAllocator().allocate(self.shared))
        block = cute.arch.block_idx()[0]
        if sizes[sizes.shape[0] - 1] > capacity:
            owners = x.shape[0] if const_expr(self.by_token) else w_gate.shape[0]
            passes = self.passes(x.shape[1])
            turn = Int32(0)
            # coefficients are stored to peers, which must have started
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            for item in cutlass.range(
                block // self.cluster,
                cute.ceil_div(owners, OWNERS) * passes,
                cute.arch.grid_dim()[0] // self.cluster,
                unroll=1,
            ):
                turn = self.item(o, s, item // passes * OWNERS, owners, item % passes, turn)

    @cute.jit
    def item(self, o, s, first, owners, span, turn):
        """Compute one span of columns of the owners from `first` on; return the next buffer of coefficients."""
        _, results, sums = self.counts
        partners = o.w_gate.shape[0] if const_expr(self.by_token) else o.x.shape[0]
        at = self.thread_index()
        acc = cute.make_rmem_tensor((4, 8, self.blocks, TILES, results), Float32)
        acc.fill(0.0)
        for t in range_constexpr(sums):
            for tile in range_constexpr(TILES):
                for row in range_constexpr(2):
                    s.own[self.total_offset(at, t, tile, row)] = Float32(0.0)
        for window in cutlass.range(0, partners, self.window, unroll=1):
            if window > 0 and window % self.longest == 0:
                flush_sums(acc, o.flushed, 0, window == self.longest)
            self.list_partners(o, s, at, first, owners, window, partners)
            base = Int32(0)
            while base < s.sums[WARPS]:
                here = self.thread_index()
                self.score(o, s, here, first, owners, window, base, turn)
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
                column = self.first_column(here, span)
                if column < o.x.shape[1]:
                    count = cutlass.min(s.sums[WARPS] - base, Int32(self.batch))
                    self.add(o, s, here, window, base, count, column, turn, acc)
                turn = turn ^ 1
                base += self.batch
        if partners > self.longest:
            add_flushed(acc, o.flushed, 0)
        self.store(o, first, owners, self.first_column(self.thread_index(), span), acc)
        if const_expr(sums > 0):
            self.store_totals(o, s, self.thread_index(), first, owners, span)
        return turn

    def first_column(self, at, span):
        """First column of the warp's sums."""
        return (span * self.cluster + at.rank) * self.slab + at.warp * self.blocks * BLOCK

    # ---- list ----

    @cute.jit
    def list_partners(self, o, s, at, first, owners, window, partners):
        """List the partners of the window that any owner has; their number goes to `sums[WARPS]`."""
        flags = self.flags(o, at, first, owners, window, partners)
        own = Int32(cute.arch.popc(flags))
        before = prefix_sum(own, at.lane)
        # the previous list was read
        cute.arch.sync_threads()
        if at.lane == 31:
            s.sums[at.warp] = before + own
        cute.arch.sync_threads()
        position, size = before, Int32(0)
        for w in range_constexpr(WARPS):
            position += s.sums[w] if w < at.warp else 0
            size += s.sums[w]
        while flags != 0:
            s.partners[position] = Uint16(at.thread * 32 + lowest_bit(flags))
            flags = flags & (flags - 1)
            position += 1
        cute.arch.sync_threads()
        # the mma takes 16 at a time: pad with the last one, whose coefficients there are zero
        if size > 0 and at.thread < ROWS and size + at.thread < WINDOW:
            s.partners[size + at.thread] = s.partners[cutlass.max(size, Int32(1)) - 1]
        if at.thread == 0:
            s.sums[WARPS] = size
        cute.arch.sync_threads()

    @cute.jit
    def flags(self, o, at, first, owners, window, partners):
        """Bits of a thread's 32 partners of the window that any owner has."""
        words = (o.w_gate.shape[0] + 31) >> 5
        flags = Uint32(0)
        if const_expr(self.by_token):
            word, end = window // 32 + at.thread, words
            if const_expr(self.window < WINDOW):
                end = cutlass.min(words, (window + self.window) // 32)
            if word < end:
                for row in cutlass.range(first, cutlass.min(first + OWNERS, owners), unroll=8):
                    flags = flags | Uint32(o.bits[row * words + word])
        else:
            for j in cutlass.range(32, unroll=8):
                token = window + (at.warp * 32 + j) * 32 + at.lane
                word = Uint32(o.bits[token * words + first // 32]) if token < partners else Uint32(0)
                ballot = Uint32(cute.arch.vote_ballot_sync(Boolean(word != 0)))
                flags = ballot if at.lane == j else flags
        return flags

    # ---- score ----

    @cute.jit
    def score(self, o, s, at, first, owners, window, base, turn):
        """Store the coefficients of this CTA's share of a batch in every CTA of the cluster, and add to the totals."""
        share = at.warp * self.cluster + at.rank
        size = s.sums[WARPS]
        parts = []
        for lefts, rights in self.scored(o):
            parts += self.dots(s, at, lefts, rights, first, owners, window, base, size)
        for eight in range_constexpr(self.eights):
            for tile in range_constexpr(TILES):
                scores = [part[eight][tile] for part in parts]
                start = base + share * self.share + eight * 8
                rows = self.pack_coefficients(o, s, at, first + tile * ROWS, owners, window, start, size, scores)
                for c in range_constexpr(self.counts[0]):
                    offset = self.coefficient_offset(turn, share * self.eights + eight, c, tile, at.lane)
                    target = s.coefficients.iterator + offset
                    for rank in range_constexpr(self.cluster):
                        store_peer_pair(target, Int32(rank), rows[0][c], rows[1][c])
                for t in range_constexpr(self.counts[2]):
                    for row in range_constexpr(2):
                        value = rows[row][self.counts[0] + t]
                        value += cute.arch.shuffle_sync_bfly(value, 1)
                        value += cute.arch.shuffle_sync_bfly(value, 2)
                        if at.lane & 3 == 0:
                            s.own[self.total_offset(at, t, tile, row)] += value

    @cute.jit
    def dots(self, s, at, lefts, rights, first, owners, window, base, size):
        """Dot products of all left with all right matrices: sums [product][eight][tile][4] in the layout of an mma.

        A stage has 64 columns of the rows of the owners and of the CTA's partners, 128 bytes per line.
        """
        line, piece = at.thread >> 3, at.thread & 7
        # (address of this thread's 16 bytes of a row, first line in the stage); eight threads per row
        copies, lines = [], 0
        for matrix in lefts:
            source = row_of(matrix, cutlass.min(first + line, owners - 1)) + piece * 8
            copies.append((source.toint(), lines))
            lines += OWNERS
        partners = []
        for top in range_constexpr(0, self.share * WARPS, LINES):
            warp, inside = (top + line) // self.share, (top + line) % self.share
            position = cutlass.min(base + (warp * self.cluster + at.rank) * self.share + inside, size - 1)
            partners.append(window + Int32(s.partners[position]))
        for matrix in rights:
            for top in range_constexpr(len(partners)):
                copies.append(((row_of(matrix, partners[top]) + piece * 8).toint(), lines + top * LINES))
            lines += self.share * WARPS

        k = lefts[0].shape[1]
        columns = cute.ceil_div(k, COLUMNS)
        sums = cute.make_rmem_tensor((4, TILES, self.eights, len(lefts) * len(rights)), Float32)
        sums.fill(0.0)
        # the memory was read, as rings of `add` or as stages
        cute.arch.sync_threads()
        for stage in range_constexpr(self.stages - 1):
            self.fetch(s, at, copies, Int32(stage), Int32(stage), k)
        stage = Int32(0)
        for block in cutlass.range(columns, unroll=1):
            cute.arch.cp_async_wait_group(self.stages - 2)
            cute.arch.sync_threads()
            last = stage - 1 if stage > 0 else Int32(self.stages - 1)
            self.fetch(s, at, copies, block + self.stages - 1, last, k)
            self.multiply(s.stages.iterator + stage * self.stage, at, sums, len(lefts), len(rights))
            stage = stage + 1 if stage < self.stages - 1 else Int32(0)
        return [
            [[[sums[j, t, e, p] for j in range(4)] for t in range(TILES)] for e in range(self.eights)]
            for p in range(len(lefts) * len(rights))
        ]

    @cute.jit
    def fetch(self, s, at, copies, block, stage, k):
        """Start the copies of 64 columns, 16 bytes of each line by this thread; zeros beyond the last column."""
        line, piece = at.thread >> 3, at.thread & 7
        if block * COLUMNS < k:
            size = Int32(16) if block * COLUMNS + piece * 8 < k else Int32(0)
            target = s.stages.iterator + (stage * self.stage + line * COLUMNS + swizzle_piece(line, piece))
            for source, top in copies:
                copy_async(target + top * COLUMNS, source + Int64(block) * (2 * COLUMNS), size)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def multiply(self, stage, at, sums, lefts: cutlass.Constexpr, rights: cutlass.Constexpr):
        """sums += a stage's columns of each left row times those of each right row.

        Matrices q = lane / 8 of a load are, for A, rows 0-7 and 8-15 of eight columns, then both of the next eight
        columns. For B they are the two groups of eight columns of an mma for eight partners, then the same for the
        next eight partners; with eight partners per warp, for the next mma.
        """
        r, odd, upper = at.lane & 7, (at.lane >> 3) & 1, at.lane >> 4
        left_row = stage + (r + 8 * odd) * COLUMNS
        right_row = stage + (lefts * OWNERS + at.warp * self.share + r) * COLUMNS
        if const_expr(self.eights == 2):
            right_row += upper * (8 * COLUMNS)
        b = [[Uint32(0)] * 4] * rights
        for step in range_constexpr(COLUMNS // 16):
            left_piece = swizzle_piece(r, 2 * step + upper)
            right_piece = swizzle_piece(r, 2 * step + (odd if self.eights == 2 else odd + 2 * upper))
            if const_expr(self.eights == 2 or step % 2 == 0):
                b = [
                    load_matrices(right_row + (right * WARPS * self.share * COLUMNS + right_piece))
                    for right in range(rights)
                ]
            a = [load_matrices(left_row + (tile * ROWS * COLUMNS + left_piece)) for tile in range(lefts * TILES)]
            for right in range_constexpr(rights):
                for left in range_constexpr(lefts):
                    product = left * rights + right
                    for eight in range_constexpr(self.eights):
                        pair = 2 * (eight if self.eights == 2 else step % 2)
                        for tile in range_constexpr(TILES):
                            four = [sums[j, tile, eight, product] for j in range(4)]
                            four = mma_16x8x16(
                                four, *a[left * TILES + tile], b[right][pair], b[right][pair + 1], self.dtype
                            )
                            for j in range_constexpr(4):
                                sums[j, tile, eight, product] = four[j]

    @cute.jit
    def pack_coefficients(self, o, s, at, first, owners, window, start, size, scores):
        """Compute coefficients from dot products: for rows g and g + 8, pairs of two partners, then their totals."""
        words = (o.w_gate.shape[0] + 31) >> 5
        rows = []
        for row in range_constexpr(2):
            owner = cutlass.min(first + row * 8 + (at.lane >> 2), owners - 1)
            exists = first + row * 8 + (at.lane >> 2) < owners
            pairs = []
            for j in range_constexpr(2):
                position = start + (at.lane & 3) * 2 + j
                partner = window + Int32(s.partners[cutlass.min(position, size - 1)])
                token, neuron = (owner, partner) if const_expr(self.by_token) else (partner, owner)
                word = Uint32(o.bits[token * words + (neuron >> 5)])
                active = exists & (position < size) & ((word >> (neuron & 31)) & Uint32(1) != 0)
                pairs.append(self.coefficients(o, neuron, [score[2 * row + j] for score in scores], active))
            out = [pack(pairs[0][c], pairs[1][c], self.dtype) for c in range(self.counts[0])]
            for t in range_constexpr(self.counts[2]):
                if const_expr(self.by_token):
                    h0, h1 = pairs[0][t], pairs[1][t]
                    out.append(cute.arch.fmax(h0, -h0) + cute.arch.fmax(h1, -h1))
                else:
                    out.append(low_to_float(out[t], self.dtype) + high_to_float(out[t], self.dtype))
            rows.append(out)
        return rows

    @cute.jit
    def coefficients(self, o, neuron, scores, active):
        """Coefficients of one token and neuron, zero unless `active`: h, gradients, or for weights gradients and h."""
        gate, up = scores[0], Float32(1.0)
        if const_expr(self.has_bias):
            gate += o.b_gate[neuron].to(Float32)
        gate = low_to_float(relu_pack(gate, Float32(0.0), self.dtype), self.dtype)
        hidden = gate
        if const_expr(self.gated):
            up = scores[1]
            if const_expr(self.has_bias):
                up += o.b_up[neuron].to(Float32)
            hidden = gate * up
        out = [hidden]
        if const_expr(o.dl1 is not None):
            d_gate, d_up = gradients(scores[-1], o.dl1[0], gate, up)
            out = [d_gate, d_up] if const_expr(self.gated) else [d_gate]
            if const_expr(not self.by_token):
                out.append(hidden)
        return [cutlass.select_(active, value, Float32(0.0)) for value in out]

    # ---- add ----

    @cute.jit
    def add(self, o, s, at, window, base, count, column, turn, acc):
        """acc += coefficients times the rows of `count` partners, 16 at a time.

        A lane copies to its own ring in shared memory, so it waits for no other lane. With g = lane / 4 and
        i = lane % 4, it copies columns 8g to 8g + 7 of rows 2i, 2i + 1, 2i + 8 and 2i + 9. Two rows' values of a column
        side by side are its part of B; column g of mma j is column 8g + j of the block.
        """
        k = o.x.shape[1]
        terms = self.added(o)
        # columns beyond the last are not stored
        columns = [cutlass.min(column + b * BLOCK + (at.lane >> 2) * 8, k - 8) for b in range(self.blocks)]
        steps = cute.ceil_div(count, ROWS)
        for u in range_constexpr(self.ring - 1):
            step = Int32(u // len(terms))
            self.copy_rows(s, at, terms[u % len(terms)][0], window, base, step, steps, columns, Int32(u))
        slot = Int32(0)
        for step in cutlass.range(steps, unroll=1):
            for t in range_constexpr(len(terms)):
                u = t + self.ring - 1
                last = slot - 1 if slot > 0 else Int32(self.ring - 1)
                self.copy_rows(
                    s, at, terms[u % len(terms)][0], window, base, step + u // len(terms), steps, columns, last
                )
                cute.arch.cp_async_wait_group(self.ring - 1)
                for b in range_constexpr(self.blocks):
                    quads = [load_quad(self.ring_slot(s, at, slot, b, q)) for q in range(4)]
                    self.add_block(s, at, quads, terms[t][1], step, turn, acc, b)
                slot = slot + 1 if slot < self.ring - 1 else Int32(0)

    @cute.jit
    def copy_rows(self, s, at, matrix, window, base, step, steps, columns, slot):
        """Start the copies of 16 partners' rows to a slot of the lane's ring."""
        if step < steps:
            pairs = cute.recast_tensor(s.partners, Uint32)
            here = (base + step * ROWS) // 2 + (at.lane & 3)
            pair, other = pairs[here], pairs[here + 4]
            rows = [pair & Uint32(0xFFFF), pair >> 16, other & Uint32(0xFFFF), other >> 16]
            for q in range_constexpr(4):
                source = row_of(matrix, window + Int32(rows[q]))
                for b in range_constexpr(self.blocks):
                    copy_async(self.ring_slot(s, at, slot, b, q), source + columns[b], Int32(16))
        cute.arch.cp_async_commit_group()

    def ring_slot(self, s, at, slot, block, quad):
        """Address of a lane's 16 bytes of a slot."""
        return s.stages.iterator + ((((slot * WARPS + at.warp) * self.blocks + block) * 4 + quad) * 256 + at.lane * 8)

    @cute.jit
    def add_block(self, s, at, quads, uses, step, turn, acc, block: cutlass.Constexpr):
        """Multiply one block of columns of 16 rows by each of the matrix's coefficients."""
        b = cute.make_rmem_tensor((2, 8), Uint32)
        for j in range_constexpr(8):
            for half in range_constexpr(2):
                low, high = quads[2 * half][j // 2], quads[2 * half + 1][j // 2]
                b[half, j] = join_halves(low, high, j % 2)
        for c, result in uses:
            for tile in range_constexpr(TILES):
                a = []
                for half in range_constexpr(2):
                    offset = self.coefficient_offset(turn, step * 2 + half, c, tile, at.lane)
                    a += load_pair(s.coefficients.iterator + offset)
                for j in range_constexpr(8):
                    four = [acc[e, j, block, tile, result] for e in range(4)]
                    four = mma_16x8x16(four, *a, b[0, j], b[1, j], self.dtype)
                    for e in range_constexpr(4):
                        acc[e, j, block, tile, result] = four[e]

    # ---- store ----

    @cute.jit
    def store(self, o, first, owners, column, acc):
        """Store or add a lane's sums: rows g and g + 8, eight columns each from 16i and 16i + 8 on."""
        values = cute.make_rmem_tensor((8,), Float32)
        for result in range_constexpr(self.counts[1]):
            matrix = o.results[result]
            for tile in range_constexpr(TILES):
                at = self.thread_index()
                for b in range_constexpr(self.blocks):
                    for e in range_constexpr(4):
                        owner = first + tile * ROWS + e // 2 * 8 + (at.lane >> 2)
                        left = column + b * BLOCK + (at.lane & 3) * 16 + e % 2 * 8
                        if owner < owners and left < o.x.shape[1]:
                            for j in range_constexpr(8):
                                values[j] = acc[e, j, b, tile, result]
                                if const_expr(o.b_down is not None):
                                    values[j] += o.b_down[left + j].to(Float32)
                            source = address(matrix, owner, left).align(16)
                            target = cute.make_tensor(source, cute.make_layout(8))
                            if const_expr(self.accumulate):
                                for half in range_constexpr(2):
                                    four = cute.make_tensor((source + 4 * half).align(16), cute.make_layout(4))
                                    before = cute.make_rmem_tensor((4,), Float32)
                                    cute.autovec_copy(four, before)
                                    for j in range_constexpr(4):
                                        before[j] += values[4 * half + j]
                                    cute.autovec_copy(before, four)
                            else:
                                rounded = cute.make_rmem_tensor((8,), self.dtype)
                                rounded.store(values.load().to(self.dtype))
                                cute.autovec_copy(rounded, target)

    @cute.jit
    def store_totals(self, o, s, at, first, owners, span):
        """Add the totals of all warps and CTAs in a fixed order; the first CTA stores them."""
        sums = self.counts[2]
        slots = self.cluster * WARPS
        for t in range_constexpr(sums):
            for tile in range_constexpr(TILES):
                for row in range_constexpr(2):
                    # four lanes store the same value
                    slot = t * slots + at.rank * WARPS + at.warp
                    owner = tile * ROWS + row * 8 + (at.lane >> 2)
                    value = s.own[self.total_offset(at, t, tile, row)]
                    store_peer_float(s.totals.iterator + (slot * OWNERS + owner), Int32(0), value)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if at.rank == 0 and span == 0 and at.thread < OWNERS:
            owner = first + at.thread
            if owner < owners:
                for t in range_constexpr(sums):
                    value = Float32(0.0)
                    for slot in cutlass.range(slots, unroll=8):
                        value += s.totals[(t * slots + slot) * OWNERS + at.thread]
                    if const_expr(self.by_token):
                        o.totals[t][owner // geometry.TOKEN_TILE, owner % geometry.TOKEN_TILE] = value
                    else:
                        o.totals[t][owner] = value.to(self.dtype)
        # the totals were read
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    # ---- shared memory ----

    def coefficient_offset(self, turn, eight, coefficient, tile, lane):
        """Offset of a lane's two words of one coefficient of eight partners."""
        eight = turn * (self.batch // 8) + eight
        return ((eight * self.counts[0] + coefficient) * TILES + tile) * 64 + lane * 2

    def total_offset(self, at, t, tile, row):
        """Offset of a row's total over this warp's partners, which four lanes share."""
        return (t * WARPS + at.warp) * OWNERS + tile * ROWS + row * 8 + (at.lane >> 2)

    @cute.jit
    def thread_index(self):
        """A thread's indices, read again at each call so that derived values are not kept in registers."""
        lane = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[cute.arch.lane_idx()]
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return Thread(cute.arch.block_idx()[0] % self.cluster, warp * 32 + lane, warp, lane)

    def views(self, shared):
        """Tensors over the shared struct."""
        return Views(
            sums=shared.sums.get_tensor(cute.make_layout(WARPS + 1)),
            partners=shared.partners.get_tensor(cute.make_layout(WINDOW)),
            coefficients=shared.coefficients.get_tensor(cute.make_layout(self.pairs)),
            own=shared.own.get_tensor(cute.make_layout(self.slots // self.cluster)),
            totals=shared.totals.get_tensor(cute.make_layout(self.slots)),
            stages=shared.stages.get_tensor(cute.make_layout(self.stages * self.stage)),
        )


def row_of(matrix, row):
    """Address of a row; its offset is 32-bit, in units of eight values: 64 GB."""
    return matrix.iterator + (Uint32(row) * Uint32(matrix.stride[0] // 8)).to(Int64) * 8


class Forward(Overflow):
    """Computes y and l1."""

    counts = (1, 1, 1)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w_gate: cute.Tensor,
        w_up: cute.Tensor | None,
        w_down: cute.Tensor,
        b_gate: cute.Tensor | None,
        b_up: cute.Tensor | None,
        b_down: cute.Tensor | None,
        bits: cute.Tensor,
        sizes: cute.Tensor,
        capacity: Int32,
        y: cute.Tensor,
        l1: cute.Tensor,
        flushed: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        weights = (w_gate, w_up, w_down, b_gate, b_up, b_down)
        self.launch(x, None, *weights, None, bits, sizes, capacity, (y,), (l1,), flushed, max_ctas, stream)

    def scored(self, o: Operands) -> Any:
        return [([o.x], [o.w_gate, o.w_up] if self.gated else [o.w_gate])]

    def added(self, o: Operands) -> Any:
        return [(o.w_down, [(0, 0)])]


class Input(Overflow):
    """Computes dx."""

    def __init__(self, spec: OverflowSpec):
        self.counts = (2 if spec.gated else 1, 1, 0)
        super().__init__(spec)

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        x: cute.Tensor,
        w_gate: cute.Tensor,
        w_up: cute.Tensor | None,
        w_down: cute.Tensor,
        b_gate: cute.Tensor | None,
        b_up: cute.Tensor | None,
        dl1: cute.Tensor,
        bits: cute.Tensor,
        sizes: cute.Tensor,
        capacity: Int32,
        dx: cute.Tensor,
        flushed: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        weights = (w_gate, w_up, w_down, b_gate, b_up, None)
        self.launch(x, dy, *weights, dl1, bits, sizes, capacity, (dx,), (), flushed, max_ctas, stream)

    def scored(self, o: Operands) -> Any:
        return [([o.x], [o.w_gate, o.w_up] if self.gated else [o.w_gate]), ([o.dy], [o.w_down])]

    def added(self, o: Operands) -> Any:
        return [(o.w_gate, [(0, 0)])] + ([(o.w_up, [(1, 0)])] if self.gated else [])


class Weight(Overflow):
    """Computes dw_gate, dw_up and dw_down, stored or added to fp32, and the gradients of b_gate and b_up."""

    by_token = False
    cluster, blocks, eights = 4, 1, 1
    sides = (2, 1)

    def __init__(self, spec: OverflowSpec):
        inputs = 2 if spec.gated else 1
        self.counts = (inputs + 1, inputs + 1, inputs if spec.bias else 0)
        self.accumulate = spec.mode == "weight_add"
        super().__init__(spec)

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        x: cute.Tensor,
        w_gate: cute.Tensor,
        w_up: cute.Tensor | None,
        w_down: cute.Tensor,
        b_gate: cute.Tensor | None,
        b_up: cute.Tensor | None,
        dl1: cute.Tensor,
        bits: cute.Tensor,
        sizes: cute.Tensor,
        capacity: Int32,
        dw_gate: cute.Tensor,
        dw_up: cute.Tensor | None,
        dw_down: cute.Tensor,
        db_gate: cute.Tensor | None,
        db_up: cute.Tensor | None,
        flushed: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        weights = (w_gate, w_up, w_down, b_gate, b_up, None)
        results = (dw_gate, dw_up, dw_down) if const_expr(self.gated) else (dw_gate, dw_down)
        totals = (db_gate, db_up)[: self.counts[2]]
        self.launch(x, dy, *weights, dl1, bits, sizes, capacity, results, totals, flushed, max_ctas, stream)

    def scored(self, o: Operands) -> Any:
        return [([o.w_gate, o.w_up] if self.gated else [o.w_gate], [o.x]), ([o.w_down], [o.dy])]

    def added(self, o: Operands) -> Any:
        last = self.counts[0] - 1
        return [(o.x, [(c, c) for c in range(last)]), (o.dy, [(last, last)])]


def signature(spec: OverflowSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype = operands.DTYPES[spec.dtype]
    m, n, k = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    token_rows = operands.rows(dtype, m, k)
    b_gate = operands.vector(dtype, n) if spec.bias else None
    b_up = operands.vector(dtype, n) if spec.bias and spec.gated else None
    weights = (
        operands.rows(dtype, n, k),
        operands.rows(dtype, n, k) if spec.gated else None,
        operands.rows(dtype, n, k),
        b_gate,
        b_up,
    )
    bitmap = (*(operands.vector(Int32, cute.sym_int32(), align=4) for _ in range(2)), Int32(1))
    dl1 = operands.vector(Float32, 1, align=4)
    flushed = operands.vector(Float32, cute.sym_int32())
    if spec.mode == "forward":
        b_down = operands.vector(dtype, k) if spec.bias else None
        l1 = operands.matrix(Float32, cute.sym_int32(), cute.sym_int32())
        results = (token_rows, l1, flushed, Int32(1))
        return Forward(spec), (operands.rows(dtype, m, k), *weights, b_down, *bitmap, *results)
    inputs = (operands.rows(dtype, m, k), operands.rows(dtype, m, k), *weights, dl1, *bitmap)
    if spec.mode == "input":
        return Input(spec), (*inputs, token_rows, flushed, Int32(1))
    kind = Float32 if spec.mode == "weight_add" else dtype
    gate, up, down = (operands.rows(kind, n, k) for _ in range(3))
    outputs = (gate, up if spec.gated else None, down)
    return Weight(spec), (*inputs, *outputs, b_gate, b_up, flushed, Int32(1))
