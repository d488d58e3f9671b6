"""Forward and backward of a batch whose non-zeros exceed the hybrid format's capacity, for every GPU since sm_80: dense
products of x, the weights and dy. Nothing was stored, so gate and up are computed again. Without dy it is forward.

The kernel returns at once unless the last of `sizes` exceeds `capacity`. It takes slices of as many tokens as the
scratch `parts` [P, tokens, N] has, each in two phases. A phase begins when the one before has ended everywhere.

    score       parts = h                        and sums of |h|     forward
                parts = d_gate, d_up, h          and sums of d_gate and d_up over 64 tokens each     backward
    products    y = h w_down + b_down                                forward
                dx = d_gate w_gate + d_up w_up                       backward, and
                dw_gate = d_gate^T x,  dw_up = d_up^T x,  dw_down = h^T dy,  and db_gate, db_up from the sums

    h = gate * up, gate = relu(x . w_gate + b_gate) rounded, up = x . w_up + b_up, dh = dy . w_down + dl1 * sign(h),
    d_gate = dh * up, d_up = dh * gate; all are rounded, and zero where the gate is. An empty operand stands for none.

So it is for relu; for the other activations see common/activation.py. Without an up projection, up is 1 and there is no
part for d_up. Sums of |h| are those of 64 tokens and 128 neurons, in a row for each 128 tokens. The gate before its
activation may be given, [M, N]. Then d_gate is in no product, but a result if it is not empty.

Persistent, one CTA per SM. Every product is one of tiles of 128 rows and 256 columns, with the main loop of
sm80/product.py, and a ring of its own. The score of a tile is two or three in turn. Its gates, and in backward the fp32
up, which do not fit in registers beside the next sums, wait in the tile's own place in the parts.

Who computes waits for all others, so all must run at the same time. A launch alone does not promise that: other kernels
may hold multiprocessors. So CTAs enlist when they begin. The first one closes the list, and who comes later returns.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible, geometry
from ..common import launch, operands
from ..common.activation import above, add_l1, gradients, hidden, level_of
from ..common.copies import address, aligned, load_pairs, store_pairs
from ..common.mma import clear
from ..common.sums import add_flushed, flush_sums
from ..common.values import MAGNITUDE, high_to_float, join_halves, low_to_float, pack, relu_pack, relu_pair, warp_sum
from ..sm80.product import STAGES, THREADS, TILE_K, TILE_N, WARPS_M, WARPS_N, Dense, either, rows_of, thread_index
from ..specs import OverflowSpec

TILE_M = 128
# the sums of |h| of a tile, and the warps beside each other that have one's neurons
TILE_SUMS = TILE_N // geometry.OVERFLOW_NEURONS
SUM_WARPS = WARPS_N // TILE_SUMS
assert TILE_M == geometry.TOKEN_TILE == WARPS_M * geometry.OVERFLOW_SUM
# looks, of half a microsecond or more each, for those who have not begun when the first one does
LOOKS = 64
# added to the number of those who have come when the list is closed
LATE = 1 << 30


class Operands(NamedTuple):
    """The kernel's arguments, in their order; an empty one stands for none.

    Without w_up any weight stands for it. With a given gate any does for w_gate, and any matrix for an absent x.
    """

    dy: Any  # empty in forward
    x: Any
    w_gate: Any
    w_up: Any
    w_down: Any  # [N, K]
    b_gate: Any  # of twice as many elements as neurons if thresholds lie behind the biases
    b_up: Any
    b_down: Any
    dl1: Any
    sizes: Any
    capacity: Any
    gated: Any
    activation: Any  # and threshold: see common/activation.py
    threshold: Any
    parts: Any
    out: Any  # y or dx
    dw_gate: Any
    dw_up: Any
    dw_down: Any
    sum_gate: Any  # fp32 sums of earlier slices, or those that the gradients are added to
    sum_up: Any
    sum_down: Any
    accumulate: Any  # whether gradients of weights are added to sums there, and not rounded
    magnitudes: Any  # sums of |h| by tile and group
    sums: Any  # of gradients [ceil(M / 64), 2 N]
    db_gate: Any
    db_up: Any
    flushed: Any  # partial sums of many terms
    counters: Any  # geometry.OVERFLOW_COUNTERS words, zero before
    gate: Any
    d_gate: Any

    @property
    def backward(self) -> Any:
        """Whether it is."""
        return self.dy.shape[0] > 0

    @property
    def neurons(self) -> Any:
        """Their number."""
        return self.w_down.shape[0]


class Slice(NamedTuple):
    """Tokens that are computed together."""

    first: Any
    count: Any


class Shared(NamedTuple):
    """Views of a CTA's shared memory."""

    ring: Any
    team: Any  # index of this CTA among those that compute, and their number
    totals: Any  # [warps]


class Overflow:
    """The kernel."""

    def __init__(self, spec: OverflowSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.score = Dense(self.dtype, TILE_M, True, True)
        self.by_token, self.by_neuron = (Dense(self.dtype, TILE_M, k_major, False) for k_major in (True, False))
        self.m_frags, self.n_frags = self.score.m_frags, self.score.n_frags
        # steps before sums are flushed
        self.longest = geometry.LONGEST_SUM[spec.dtype] // TILE_K

    @cute.jit
    def __call__(self, *arguments: Any):
        """The `Operands`, the number of CTAs and the stream."""

        @cute.struct
        class Memory:
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, STAGES * self.score.stage_values], 128]
            team: cute.struct.MemRange[Int32, 2]
            totals: cute.struct.MemRange[Float32, WARPS_M * WARPS_N]

        self.shared = feasible.check_portable_memory(Memory)
        *given, max_ctas, stream = arguments
        launch.start(self.kernel(Operands(*given)), max_ctas, THREADS, stream, ctas_per_sm=1)

    @cute.kernel
    def kernel(self, o: Operands):
        memory = SmemAllocator().allocate(self.shared)
        launch.wait()
        if o.sizes[o.sizes.shape[0] - 1] > o.capacity:
            # the team is read again where it is needed, so it takes no registers in the main loops
            s = Shared(
                memory.ring.data_ptr(),
                memory.team.get_tensor(cute.make_layout(2)),
                memory.totals.get_tensor(cute.make_layout(WARPS_M * WARPS_N)),
            )
            if cute.arch.thread_idx()[0] == 0:
                self.enlist(o, s)
            cute.arch.sync_threads()
            first, met = Int32(0), Int32(0)
            if s.team[0] >= s.team[1]:
                first = o.x.shape[0]
            while first < o.x.shape[0]:
                here = Slice(first, cutlass.min(o.x.shape[0] - first, o.parts.shape[1]))
                self.compute_score(o, s, here)
                met = self.meet(o, s, met)
                index = self.multiply(o, s, here, True, s.team[0])
                self.multiply(o, s, here, False, index)
                met = self.meet(o, s, met)
                first += here.count
            if s.team[0] < s.team[1]:
                self.add_biases(o, s)

    # ---- the CTAs ----

    @cute.jit
    def enlist(self, o: Operands, s: Shared):
        """Find the index of this CTA and the number of those who compute; late ones have no index below it."""
        come, closed = o.counters.iterator, o.counters.iterator + 1
        index = Int32(cute.arch.atomic_add(come, Int32(1), sem="relaxed", scope="gpu"))
        if index == 0:
            looks, ctas = Int32(0), cute.arch.grid_dim()[0]
            while looks < LOOKS:
                here = Int32(cute.arch.load(come, Int32, sem="relaxed", scope="gpu"))
                looks = looks + 1 if here < ctas else Int32(LOOKS)
            number = Int32(cute.arch.atomic_add(come, Int32(LATE), sem="relaxed", scope="gpu"))
            cute.arch.store(closed, number, sem="relaxed", scope="gpu")
        size = Int32(0)
        while size == 0:
            size = Int32(cute.arch.load(closed, Int32, sem="relaxed", scope="gpu"))
        s.team[0], s.team[1] = index, size

    @cute.jit
    def meet(self, o: Operands, s: Shared, met: Int32):
        """Wait for all CTAs; return how often they have met."""
        met += 1
        cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] == 0:
            arrived, waiting = o.counters.iterator + 2, Boolean(True)
            cute.arch.atomic_add(arrived, Int32(1), sem="release", scope="gpu")
            while waiting:
                waiting = Int32(cute.arch.load(arrived, Int32, sem="acquire", scope="gpu")) < met * s.team[1]
        cute.arch.sync_threads()
        return met

    # ---- the score ----

    @cute.jit
    def compute_score(self, o: Operands, s: Shared, here: Slice):
        """Gate and up at all places, in backward dh too, and what follows from them."""
        x, dy = (rows_of(matrix, here.first, here.count) for matrix in (o.x, o.dy))
        m_tiles, n_tiles = cute.ceil_div(here.count, TILE_M), cute.ceil_div(o.neurons, TILE_N)
        steps, tile = cute.ceil_div(o.w_down.shape[1], TILE_K), s.team[0]
        last = 2 if o.backward else 1
        acc = cute.make_rmem_tensor((4, self.n_frags, self.m_frags), Float32)
        while tile < m_tiles * n_tiles:
            row, column = tile // n_tiles * TILE_M, tile % n_tiles * TILE_N
            for product in cutlass.range(last + 1, unroll=1):
                clear(acc)
                if (product > 0) | (o.gate.shape[0] == 0) and (product != 1) | (o.gated != 0):
                    b = either(product == 2, o.w_down, either(product == 1, o.w_up, o.w_gate))
                    self.score.add(s.ring, acc, either(product == 2, dy, x), b, row, column, Int32(0), steps)
                if product == 0:
                    self.park_gates(o, here, acc, row, column)
                if product == 1:
                    self.add_bias(acc, o.b_up, column)
                    if o.backward & (o.gated != 0):
                        self.park_up(o, here, acc, row, column)
                if product == last:
                    self.finish(o, s, here, acc, row, column)
            tile += s.team[1]

    @cute.jit
    def place_of(self, row: Int32, column: Int32) -> Any:
        """This thread's first row and its warp's first column in a tile, and its indices, read again here.

        So they take no registers in the main loop.
        """
        at = thread_index(again=True)
        first = row + at.warp_m * (16 * self.m_frags) + (at.lane >> 2)
        return first, column + at.warp_n * (8 * self.n_frags), at

    @cute.jit
    def by_row(self, acc: cute.Tensor) -> Any:
        """A thread's sums [2, pairs, rows]: its rows are eight apart."""
        shape, stride = (2, self.n_frags, (2, self.m_frags)), (1, 4, (2, 4 * self.n_frags))
        return cute.make_tensor(acc.iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def park_gates(self, o: Operands, here: Slice, acc: cute.Tensor, row: Int32, column: Int32):
        """Store gates, the given ones or those with bias, rounded, after ReLU and the threshold."""
        self.add_bias(acc, o.b_gate, column)
        token, neuron, at = self.place_of(row, column)
        sums, levels = self.by_row(acc), []
        for v in range_constexpr(self.n_frags):
            own = neuron + 8 * v + (at.lane & 3) * 2
            two = [Uint32(level_of(o.b_gate, o.neurons, own + j, o.threshold)) for j in range(2)]
            levels.append(join_halves(*two, False))
        for r in range_constexpr(2 * self.m_frags):
            m = token + 8 * r
            left = o.neurons - neuron if here.first + m < o.gate.shape[0] else 0
            pairs = load_pairs(address(o.gate, here.first + m, neuron), self.n_frags, left, at.lane)
            for v in range_constexpr(self.n_frags):
                pair = relu_pack(sums[0, v, r], sums[1, v, r], self.dtype)
                pair = cutlass.select_(o.gate.shape[0] > 0, relu_pair(pairs[v], self.dtype), pair)
                pairs[v] = above(pair, levels[v], self.dtype)
            self.store_part(o, here, 0, pairs, m, neuron, at)

    @cute.jit
    def park_up(self, o: Operands, here: Slice, acc: cute.Tensor, row: Int32, column: Int32):
        """Store the upper and the lower halves of up."""
        token, neuron, at = self.place_of(row, column)
        sums = self.by_row(acc)
        for r in range_constexpr(2 * self.m_frags):
            for half in range_constexpr(2):
                bits = [[sums[j, v, r].bitcast(Uint32) for j in range(2)] for v in range(self.n_frags)]
                pairs = [join_halves(*two, half == 0) for two in bits]
                self.store_part(o, here, 1 + half, pairs, token + 8 * r, neuron, at)

    @cute.jit
    def finish(self, o: Operands, s: Shared, here: Slice, acc: cute.Tensor, row: Int32, column: Int32):
        """Compute and store the parts and the sums of a tile. `acc`: up in forward, dh in backward."""
        token, neuron, at = self.place_of(row, column)
        dl1, total, sums = Float32(0.0), Float32(0.0), self.by_row(acc)
        if o.backward:
            dl1 = o.dl1[0]
        # of d_gate and d_up, by neurons of a pair and pairs
        by_neuron = cute.make_rmem_tensor((2, 2, self.n_frags), Float32)
        clear(by_neuron)
        for r in range_constexpr(2 * self.m_frags):
            m = token + 8 * r
            gates = self.load_part(o, here, 0, m, neuron, Boolean(True), at)
            parked = [self.load_part(o, here, 1 + j, m, neuron, o.backward & (o.gated != 0), at) for j in range(2)]
            parts: list[list[Any]] = [[], [], []]
            for v in range_constexpr(self.n_frags):
                both = []
                for j in range_constexpr(2):
                    up = join_halves(parked[1][v], parked[0][v], j == 1).bitcast(Float32)
                    up = cutlass.select_(o.backward, up, sums[j, v, r])
                    up = cutlass.select_(o.gated != 0, up, Float32(1.0))
                    gate = low_to_float(gates[v], self.dtype) if j == 0 else high_to_float(gates[v], self.dtype)
                    h = hidden(gate, up, o.activation)
                    values = [*gradients(add_l1(sums[j, v, r], dl1, h), gate, up, o.activation), h]
                    fires = gates[v] & Uint32(MAGNITUDE << 16 * j) != 0
                    both.append([cutlass.select_(fires, value, Float32(0.0)) for value in values])
                    total += cute.arch.fmax(both[j][2], -both[j][2])
                for part in range_constexpr(3):
                    pair = pack(both[0][part], both[1][part], self.dtype)
                    parts[part].append(pair)
                    if const_expr(part < 2):
                        by_neuron[part, 0, v] += low_to_float(pair, self.dtype)
                        by_neuron[part, 1, v] += high_to_float(pair, self.dtype)
            if o.backward:
                self.store_part(o, here, 0, parts[0], m, neuron, at)
                if o.gated != 0:
                    self.store_part(o, here, 1, parts[1], m, neuron, at)
                if o.d_gate.shape[0] > 0:
                    left = o.neurons - neuron if m < here.count else 0
                    store_pairs(parts[0], address(o.d_gate, here.first + m, neuron), left, at.lane)
            self.store_part(o, here, o.parts.shape[0] - 1, parts[2], m, neuron, at)
        self.store_lines(o, by_neuron, here.first + row, neuron, at)
        self.store_total(o, s, total, here.first + row, column, at)

    @cute.jit
    def store_part(self, o: Operands, here: Slice, part, pairs, m: Int32, neuron: Int32, at):
        """Store a row of a warp's values of a part."""
        left = o.neurons - neuron if m < here.count else 0
        store_pairs(pairs, address(part_of(o, part, here.count), m, neuron), left, at.lane)

    @cute.jit
    def load_part(self, o: Operands, here: Slice, part, m: Int32, neuron: Int32, exists: Boolean, at):
        """Load what this lane and those beside it have stored; zeros if it does not exist."""
        left = o.neurons - neuron if (m < here.count) & exists else 0
        return load_pairs(address(part_of(o, part, here.count), m, neuron), self.n_frags, left, at.lane)

    @cute.jit
    def store_lines(self, o: Operands, by_neuron: cute.Tensor, token: Int32, neuron: Int32, at):
        """Store the sums of both gradients over a warp's tokens."""
        line = token // geometry.OVERFLOW_SUM + at.warp_m
        if line < o.sums.shape[0]:
            for part in range_constexpr(2):
                for v in range_constexpr(self.n_frags):
                    for j in range_constexpr(2):
                        total, own = by_neuron[part, j, v], neuron + 8 * v + at.lane * 2 + j
                        for d in range_constexpr(2, 5):
                            total += cute.arch.shuffle_sync_bfly(total, 1 << d)
                        if at.lane < 4 and own < o.neurons:
                            o.sums[line, part * o.neurons + own] = total

    @cute.jit
    def store_total(self, o: Operands, s: Shared, total: Float32, token: Int32, column: Int32, at):
        """Store the sums of |h|."""
        total = warp_sum(total)
        if at.lane == 0:
            s.totals[at.warp_m * WARPS_N + at.warp_n] = total
        cute.arch.sync_threads()
        line, place = token // TILE_M, column // geometry.OVERFLOW_NEURONS * WARPS_M + at.thread
        if at.thread < TILE_SUMS * WARPS_M and line < o.magnitudes.shape[0] and place < o.magnitudes.shape[1]:
            first = at.thread % WARPS_M * WARPS_N + at.thread // WARPS_M * SUM_WARPS
            total = Float32(0.0)
            for i in range_constexpr(SUM_WARPS):
                total += s.totals[first + i]
            o.magnitudes[line, place] = total

    # ---- the products ----

    @cute.jit
    def multiply(self, o: Operands, s: Shared, here: Slice, by_token: cutlass.Constexpr, tile: Int32) -> Int32:
        """Parts times other matrices: y or dx `by_token`, or gradients of weights, by tiles from `tile` on.

        Returns the index in tiles that follow.
        """
        # d_gate of a given gate, the first part, is in no product
        given = Int32(o.backward & (o.gate.shape[0] > 0))
        parts, n_tiles = o.parts.shape[0] - given, cute.ceil_div(o.w_down.shape[1], TILE_N)
        if const_expr(by_token):
            rows, steps = cute.ceil_div(here.count, TILE_M), cute.ceil_div(o.neurons, TILE_K)
            # those of h are for weights alone
            m_tiles, factors = rows if o.out.shape[0] > 0 else 0, cutlass.max(parts - 1, Int32(1))
        else:
            rows, steps = cute.ceil_div(o.neurons, TILE_M), cute.ceil_div(here.count, TILE_K)
            wanted = o.dw_down.shape[0] + o.sum_down.shape[0] > 0
            m_tiles, factors = parts * rows if wanted else 0, Int32(1)
        acc = cute.make_rmem_tensor((4, self.n_frags, self.m_frags), Float32)
        pieces = cute.ceil_div(steps, self.longest)
        while tile < m_tiles * n_tiles:
            row, column = tile // n_tiles, tile % n_tiles
            part = row // rows
            row, column = (row - part * rows) * TILE_M, column * TILE_N
            clear(acc)
            for index in cutlass.range(factors * pieces, unroll=1):
                if (index > 0) & (factors * steps > self.longest):
                    flush_sums(acc, o.flushed, index == 1)
                own, start = part + index // pieces, index % pieces * self.longest
                a, now = part_of(o, given + own, here.count), cutlass.min(steps - start, self.longest)
                if const_expr(by_token):
                    b = either(o.backward, either(own + given > 0, o.w_up, o.w_gate), o.w_down)
                    self.by_token.add(s.ring, acc, a, b, row, column, start * TILE_K, now)
                else:
                    b = rows_of(either(own == parts - 1, o.dy, o.x), here.first, here.count)
                    self.by_neuron.add(s.ring, acc, a, b, row, column, start * TILE_K, now)
            if factors * steps > self.longest:
                add_flushed(acc, o.flushed)
            if const_expr(by_token):
                self.store_rounded(o, here, acc, row, column)
            else:
                self.store_sums(o, here, acc, part + given, row, column)
            tile += s.team[1]
        return tile - m_tiles * n_tiles

    @cute.jit
    def add_bias(self, acc: cute.Tensor, bias: cute.Tensor, column: Int32):
        """Add a bias to the sums of a tile, nothing beyond its end, where an empty one is at once."""
        _, left, at = self.place_of(Int32(0), column)
        for v in range_constexpr(self.n_frags):
            first = left + 8 * v + (at.lane & 3) * 2
            if first < bias.shape[0]:
                for e in range_constexpr(4):
                    for i in range_constexpr(self.m_frags):
                        acc[e, v, i] += bias[first + e % 2].to(Float32)

    @cute.jit
    def store_rounded(self, o: Operands, here: Slice, acc: cute.Tensor, row: Int32, column: Int32):
        """Add the bias, round, and store."""
        self.add_bias(acc, o.b_down, column)
        first, left, at = self.place_of(row, column)
        sums = self.by_row(acc)
        for r in range_constexpr(2 * self.m_frags):
            m = first + 8 * r
            columns = o.out.shape[1] - left if m < here.count else 0
            pairs = [pack(sums[0, v, r], sums[1, v, r], self.dtype) for v in range(self.n_frags)]
            store_pairs(pairs, address(o.out, here.first + m, left), columns, at.lane)

    @cute.jit
    def store_sums(self, o: Operands, here: Slice, acc: cute.Tensor, part: Int32, row: Int32, column: Int32):
        """Add the sums to those of earlier slices and store them, rounded or not, in the matrix of their part."""
        first, left, at = self.place_of(row, column)
        result, total = (
            either(part == o.parts.shape[0] - 1, down, either(part > 0, up, gate))
            for gate, up, down in ((o.dw_gate, o.dw_up, o.dw_down), (o.sum_gate, o.sum_up, o.sum_down))
        )
        sums, accumulate = self.by_row(acc), o.accumulate != 0
        two, rounded = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), self.dtype)
        for r in range_constexpr(2 * self.m_frags):
            for v in range_constexpr(self.n_frags):
                neuron, column = first + 8 * r, left + 8 * v + (at.lane & 3) * 2
                if neuron < o.neurons and column < result.shape[1]:
                    two.fill(0.0)
                    if accumulate | (here.first > 0):
                        cute.autovec_copy(aligned(address(total, neuron, column), 2), two)
                    for j in range_constexpr(2):
                        two[j] += sums[j, v, r]
                    if accumulate | (here.first + here.count < o.x.shape[0]):
                        cute.autovec_copy(two, aligned(address(total, neuron, column), 2))
                    else:
                        rounded.store(two.load().to(self.dtype))
                        cute.autovec_copy(rounded, aligned(address(result, neuron, column), 2))

    @cute.jit
    def add_biases(self, o: Operands, s: Shared):
        """Gradients of the biases: add the sums over 64 tokens in a fixed order."""
        own = s.team[0] * THREADS + cute.arch.thread_idx()[0]
        lines = o.sums.shape[0]
        for at in cutlass.range(own, 2 * o.neurons if lines > 0 else 0, s.team[1] * THREADS, unroll=1):
            total = Float32(0.0)
            for line in cutlass.range(lines, unroll=8):
                total += o.sums[line, at]
            if at < o.db_gate.shape[0]:
                o.db_gate[at] = total.to(self.dtype)
            elif at >= o.neurons and at - o.neurons < o.db_up.shape[0]:
                o.db_up[at - o.neurons] = total.to(self.dtype)


@cute.jit
def part_of(o: Any, part: Int32, count: Int32) -> Any:
    """The first tokens of a part as a matrix."""
    start = (o.parts.iterator + Int64(part) * o.parts.stride[0]).align(16)
    return cute.make_tensor(start, cute.make_layout((count, o.neurons), stride=(o.parts.stride[1], 1)))


def signature(spec: OverflowSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype, n, k = operands.DTYPES[spec.dtype], cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)

    def matrices(count: int, columns: Any = k, dtype: Any = dtype) -> list[Any]:
        return [operands.rows(dtype, cute.sym_int32(), columns) for _ in range(count)]

    def vectors(dtype: Any, count: int = 1) -> list[Any]:
        return [operands.dense(dtype, cute.sym_int32(), align=4) for _ in range(count)]

    weights = [operands.rows(dtype, n, k) for _ in range(3)]
    biases = [operands.bias(dtype) for _ in range(5)]
    return Overflow(spec), (
        *(*matrices(2), *weights, *biases[:3], *vectors(Float32), *vectors(Int32), *[Int32(1)] * 4),
        *(operands.rows(dtype, cute.sym_int32(), cute.sym_int32(), n), *matrices(4), *matrices(3, dtype=Float32)),
        *(
            Int32(1),
            *(operands.dense(Float32, cute.sym_int32(), cute.sym_int32(), align=4) for _ in range(2)),
            *biases[3:],
        ),
        *(operands.dense(Float32, cute.sym_int32()), *vectors(Int32), *matrices(2, n), Int32(1)),
    )
