"""Forward and backward of a batch whose non-zeros exceed the hybrid format's capacity, for every GPU since sm_80;
common/overflow.py says what is computed and how those who compute meet.

A persistent kernel, one CTA per SM. product.py has the main loop; each product fills the ring anew.

    Score         a tile is 64 tokens and 256 neurons. Three products in turn: gate, rounded at once, which halves its
                  registers; up, if there is one; and in backward dh. Then each thread has all that belongs to its
                  places, and stores the parts from registers.
    PartProduct   a tile is 128 rows and 256 columns. What is multiplied lies by lines of the sum's index: the weights,
                  x and dy, and in weight gradients the parts, too.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible, geometry
from ..common import launch, operands
from ..common.activation import above
from ..common.copies import address, store_pairs
from ..common.mma import clear
from ..common.overflow import (
    GROUP_ROWS,
    ROW_TOKENS,
    BackwardPass,
    ForwardPass,
    Operands,
    Slice,
    add_biases,
    arguments,
    arrive_and_wait,
    bias_pair,
    copy_gradients,
    enlist,
    gate_terms,
    given_pair,
    pointwise,
    slice_at,
    store_gradients,
    targets_of,
)
from ..common.sums import add_flushed, flush_sums
from ..common.values import high_to_float, low_to_float, pack, relu_pack, warp_sum
from ..specs import OverflowSpec
from .product import (
    PASS,
    PIECE,
    PIECES,
    STAGES,
    THREADS,
    TILE_K,
    TILE_N,
    WARPS_M,
    WARPS_N,
    Product,
    lines_at_a_time,
    thread_index,
    tile_of,
)

# tokens of a tile of `Score`: those of a sum
SCORE_TOKENS = GROUP_ROWS
# rows of a tile of `PartProduct`
ROWS = 128
# rows in a band of tiles, see `tile_of`
BAND_ROWS = 1024
# neurons of a sum of |h|, and sums in a tile of `Score`
SUM_NEURONS = geometry.OVERFLOW_NEURONS
TILE_SUMS = TILE_N // SUM_NEURONS
BYTES = 2


class Source(NamedTuple):
    """What a thread copies of an operand: addresses, and how much there is from its first piece on."""

    first: Any  # its first piece
    pitch: Any  # bytes from a line to the next
    second: Any  # both of the matrix whose lines follow, see Place; None if none does
    second_pitch: Any
    along: Any  # the sum's index
    across: Any  # the other one


class Place(NamedTuple):
    """What a thread copies of a product: both operands, the first step, and the step at which the second ones begin."""

    a: Any
    b: Any
    start: Any
    turn: Any


class Dense(Product):
    """What phases share, for one dtype and tiles of so many rows."""

    def __init__(self, spec: OverflowSpec, rows: int):
        self.dtype = operands.DTYPES[spec.dtype]
        self.backward = spec.mode == "backward"
        self.set_rows(rows)
        # steps before sums are flushed
        self.longest = geometry.LONGEST_SUM[spec.dtype] // TILE_K

    @cute.jit
    def by_rows(self, matrix: cute.Tensor, row: Int32, thread: Int32) -> Any:
        """The source of a K-major operand whose first row in the tile is `row`."""
        own, piece = row + thread // PIECES, thread % PIECES * PIECE
        first = address(matrix, own, piece).toint()
        pitch = Int64(matrix.stride[0]) * BYTES
        return Source(first, pitch, None, None, matrix.shape[1] - piece, matrix.shape[0] - own)

    @cute.jit
    def by_lines(self, matrix: cute.Tensor, column: Int32, width: cutlass.Constexpr, thread: Int32) -> Any:
        """The source of an operand by lines of the sum's index, from `column` on."""
        line, own = thread // (width // PIECE), column + thread % (width // PIECE) * PIECE
        first = address(matrix, line, own).toint()
        pitch = Int64(matrix.stride[0]) * BYTES
        return Source(first, pitch, None, None, matrix.shape[0] - line, matrix.shape[1] - own)

    @cute.jit
    def load_piece(self, o, ring, place: Place, step: Int32, stage: Int32, index: cutlass.Constexpr, thread: Int32):
        from_a = index * PASS < self.rows
        source = place.a if const_expr(from_a) else place.b
        k = place.start + step
        matrix, pitch = source.first, source.pitch
        if const_expr(source.second is not None):
            late = k >= place.turn
            matrix = cutlass.select_(late, source.second, matrix)
            pitch = cutlass.select_(late, source.second_pitch, pitch)
            k = cutlass.select_(late, k - place.turn, k)
        own = index if const_expr(from_a) else index - self.rows // PASS
        if const_expr(self.a_k_major if from_a else self.b_k_major):
            where = matrix + Int64(k) * (TILE_K * BYTES) + pitch * Int64(own * PASS)
            exists = (k * TILE_K < source.along) & (own * PASS < source.across)
            self.copy_piece(ring, where, stage, index, exists, thread)
        else:
            line = own * lines_at_a_time(self.rows if const_expr(from_a) else TILE_N)
            where = matrix + pitch * Int64(k * TILE_K + line)
            exists = (k * TILE_K + line < source.along) & (source.across > 0)
            self.copy_line_piece(ring, where, stage, from_a, own, exists, thread)

    @cute.jit
    def add_product(self, ring, f, place: Place, steps: Int32, at):
        """Add so many steps of a product to the sums."""
        self.begin(None, ring, f, place, Int32(0), at)
        self.multiply_steps(None, ring, f, place, steps, Int32(0), at)
        # before anything else is copied to the ring
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()


class Score(Dense):
    """Gate and up at all places, in backward dh too, and what follows from them."""

    def __init__(self, spec: OverflowSpec):
        super().__init__(spec, SCORE_TOKENS)

    @cute.jit
    def run(self, ring, tokens, weights, parts: cute.Tensor, o: Operands, here: Slice, team: cute.Tensor):
        """`tokens`: x and, in backward, dy. `weights`: w_gate, w_up and, in backward, w_down. `team`: see `Pass`."""
        at = thread_index()
        f = self.fragments(ring, at)
        tokens = [rows_of(matrix, here.first, here.count) for matrix in tokens]
        # both halves of a row of sums
        m_tiles = cute.ceil_div(here.count, ROW_TOKENS) * (ROW_TOKENS // SCORE_TOKENS)
        n_tiles, steps = cute.ceil_div(o.neurons, TILE_N), cute.ceil_div(o.columns, TILE_K)
        tile = team[0]
        while tile < m_tiles * n_tiles:
            row, column = tile_of(tile, m_tiles, n_tiles, BAND_ROWS // SCORE_TOKENS)
            self.compute_tile(ring, f, tokens, weights, o, here, parts, row, column, steps, at)
            tile += team[1]

    @cute.jit
    def compute_tile(self, ring, f, tokens, weights, o: Operands, here: Slice, parts, row: Int32, column, steps, at):
        """All products of a tile, then what follows from them."""
        gates = cute.make_rmem_tensor((self.n_frags, 2, self.m_frags), Uint32)
        clear(f.acc)
        self.add_product(ring, f, self.place_of(tokens[0], weights[0], row, column, at), steps, at)
        if o.gate.shape[0] > 0:
            self.take_gates(o, here, f.acc, row, column)
        self.round_gates(o, here, f.acc, gates, row, column)
        clear(f.acc)
        if o.gated != 0:
            self.add_product(ring, f, self.place_of(tokens[0], weights[1], row, column, at), steps, at)
        else:
            for i in range_constexpr(cute.size(f.acc)):
                f.acc[i] = Float32(1.0)
        dh: Any = None
        if const_expr(self.backward):
            dh = cute.make_rmem_tensor(f.acc.shape, Float32)
            clear(dh)
            second = f._replace(acc=dh)
            self.add_product(ring, second, self.place_of(tokens[1], weights[2], row, column, at), steps, at)
        self.finish(ring, o, here, gates, f.acc, dh, parts, row, column)

    @cute.jit
    def place_of(self, tokens: cute.Tensor, weight: cute.Tensor, row: Int32, column: Int32, at) -> Any:
        """What a thread copies of a product of a tile."""
        a, b = self.by_rows(tokens, row * SCORE_TOKENS, at.thread), self.by_rows(weight, column * TILE_N, at.thread)
        return Place(a, b, Int32(0), None)

    @cute.jit
    def first_of(self, row: Int32, column: Int32) -> Any:
        """This thread's first token and neuron in a tile, and its indices, read again here.

        So they take no registers in the main loop.
        """
        at = thread_index(again=True)
        token = row * SCORE_TOKENS + at.warp_m * (16 * self.m_frags) + (at.lane >> 2)
        return token, column * TILE_N + at.warp_n * (8 * self.n_frags), at

    @cute.jit
    def take_gates(self, o: Operands, here: Slice, acc: cute.Tensor, row: Int32, column: Int32):
        """The given gates in place of sums."""
        token, neuron, at = self.first_of(row, column)
        for i in range_constexpr(self.m_frags):
            for h in range_constexpr(2):
                for v in range_constexpr(self.n_frags):
                    m, n = here.first + token + 16 * i + 8 * h, neuron + 8 * v + (at.lane & 3) * 2
                    acc[2 * h, v, i], acc[2 * h + 1, v, i] = given_pair(o.gate, m, n, self.dtype)

    @cute.jit
    def round_gates(self, o: Operands, here: Slice, acc: cute.Tensor, gates: cute.Tensor, row: Int32, column: Int32):
        """Gates with bias, rounded, after ReLU and the threshold; zeros past the last token."""
        token, neuron, at = self.first_of(row, column)
        for v in range_constexpr(self.n_frags):
            *bias, levels = gate_terms(o, neuron + 8 * v + (at.lane & 3) * 2)
            for i in range_constexpr(self.m_frags):
                for h in range_constexpr(2):
                    sums = [acc[2 * h + j, v, i] + bias[j] for j in range(2)]
                    pair = above(relu_pack(*sums, self.dtype), levels, self.dtype)
                    gates[v, h, i] = Uint32(cutlass.select_(token + 16 * i + 8 * h < here.count, pair, Uint32(0)))

    @cute.jit
    def finish(self, ring, o: Operands, here: Slice, gates: cute.Tensor, up: cute.Tensor, dh, parts, row, column):
        """Compute and store the parts and the sums of a tile."""
        token, neuron, at = self.first_of(row, column)
        for v in range_constexpr(self.n_frags):
            bias = bias_pair(o.b_up, neuron + 8 * v + (at.lane & 3) * 2)
            for e in range_constexpr(4):
                for i in range_constexpr(self.m_frags):
                    up[e, v, i] += bias[e % 2]
        total = Float32(0.0)
        # by gradient, neurons of a pair and pairs
        by_neuron: Any = None
        if const_expr(self.backward):
            by_neuron = cute.make_rmem_tensor((2, 2, self.n_frags), Float32)
            clear(by_neuron)
        for i in range_constexpr(self.m_frags):
            for h in range_constexpr(2):
                m = token + 16 * i + 8 * h
                values: list[list[Any]] = [[], [], []]
                for v in range_constexpr(self.n_frags):
                    dhs: Any = None
                    if const_expr(self.backward):
                        dhs = [dh[2 * h + j, v, i] for j in range(2)]
                    packed, magnitudes = pointwise(
                        gates[v, h, i], [up[2 * h + j, v, i] for j in range(2)], dhs, o, self.dtype
                    )
                    for j in range_constexpr(2):
                        total += magnitudes[j]
                    for part in range_constexpr(len(packed)):
                        values[part].append(packed[part])
                        if const_expr(part > 0):
                            by_neuron[part - 1, 0, v] += low_to_float(packed[part], self.dtype)
                            by_neuron[part - 1, 1, v] += high_to_float(packed[part], self.dtype)
                left = o.neurons - neuron if m < here.count else 0
                if const_expr(self.backward):
                    self.store_part(parts, 0, values[1], m, neuron, left, at)
                    if o.gated != 0:
                        self.store_part(parts, 1, values[2], m, neuron, left, at)
                    self.store_part(parts, 1 + o.gated, values[0], m, neuron, left, at)
                else:
                    self.store_part(parts, 0, values[0], m, neuron, left, at)
        if const_expr(self.backward):
            self.store_lines(ring, o, here, by_neuron, row, column, at)
        else:
            self.store_total(ring, o, here, total, row, column, at)

    @cute.jit
    def aside(self, ring, count: cutlass.Constexpr):
        """So many fp32 values behind the stages of these tiles, which are smaller than those of `PartProduct`."""
        pointer = cute.recast_ptr(ring + STAGES * self.stage_values, dtype=Float32)
        return cute.make_tensor(pointer, cute.make_layout(count))

    @cute.jit
    def store_part(self, parts: cute.Tensor, part, pairs, m: Int32, neuron: Int32, left: Int32, at):
        """Store a row of a warp's values of a part."""
        target = parts.iterator + (Int64(part) * parts.stride[0] + Int64(m) * parts.stride[1] + neuron)
        store_pairs(pairs, target, left, at.lane)

    @cute.jit
    def store_total(self, ring, o: Operands, here: Slice, total: Float32, row: Int32, column: Int32, at):
        """Store the sums of |h|: two warps beside each other, in both halves of the tokens, have a sum's neurons."""
        totals = self.aside(ring, WARPS_M * WARPS_N)
        total = warp_sum(total)
        if at.lane == 0:
            totals[at.warp_m * WARPS_N + at.warp_n] = total
        cute.arch.sync_threads()
        line, half = row // (ROW_TOKENS // SCORE_TOKENS), row % (ROW_TOKENS // SCORE_TOKENS)
        line += here.first // ROW_TOKENS
        place = (column * TILE_SUMS + at.thread) * (ROW_TOKENS // SCORE_TOKENS) + half
        if at.thread < TILE_SUMS and line < o.sums.shape[0] and place < o.sums.shape[1]:
            total = Float32(0.0)
            for m in range_constexpr(WARPS_M):
                for n in range_constexpr(WARPS_N // TILE_SUMS):
                    total += totals[m * WARPS_N + at.thread * (WARPS_N // TILE_SUMS) + n]
            o.sums[line, place] = total

    @cute.jit
    def store_lines(self, ring, o, here, by_neuron, row, column, at):
        """Store the sums of both gradients over the tile's tokens."""
        row += here.first // SCORE_TOKENS
        if row < o.sums.shape[0]:
            # of d_gate and d_up, by the warps that have the same columns
            lines = self.aside(ring, 2 * WARPS_M * TILE_N)
            for part in range_constexpr(2):
                for v in range_constexpr(self.n_frags):
                    for j in range_constexpr(2):
                        total = by_neuron[part, j, v]
                        for d in range_constexpr(2, 5):
                            total += cute.arch.shuffle_sync_bfly(total, 1 << d)
                        if at.lane < 4:
                            own = at.warp_n * (8 * self.n_frags) + 8 * v + at.lane * 2 + j
                            lines[(part * WARPS_M + at.warp_m) * TILE_N + own] = total
            cute.arch.sync_threads()
            neuron = column * TILE_N + at.thread
            if neuron < o.neurons:
                for part in range_constexpr(2):
                    total = Float32(0.0)
                    for m in range_constexpr(WARPS_M):
                        total += lines[(part * WARPS_M + m) * TILE_N + at.thread]
                    o.sums[row, part * o.neurons + neuron] = total


class PartProduct(Dense):
    """Parts times other matrices, which lie by lines of the sum's index."""

    b_k_major = False

    def __init__(self, spec: OverflowSpec, by_token: bool):
        super().__init__(spec, ROWS)
        self.by_token = self.a_k_major = by_token

    @cute.jit
    def run(self, ring, parts: cute.Tensor, b, out: cute.Tensor, o: Operands, here: Slice, index: Int32, team) -> Int32:
        """`b`: two matrices; `out`: y or dx by token, otherwise None. Returns the index in tiles that follow."""
        at = thread_index()
        f = self.fragments(ring, at)
        parts = rows_of_slabs(parts, here.count)
        n_tiles = cute.ceil_div(o.columns, TILE_N)
        if const_expr(self.by_token):
            m_tiles, steps = o.by_token * cute.ceil_div(here.count, ROWS), cute.ceil_div(o.neurons, TILE_K)
            out = rows_of(out, here.first, here.count)
        else:
            rows, steps = cute.ceil_div(o.neurons, ROWS), cute.ceil_div(here.count, TILE_K)
            m_tiles = o.weights.wanted * o.parts * rows
            b = [rows_of(matrix, here.first, here.count) for matrix in b]
        while index < m_tiles * n_tiles:
            row, column = tile_of(index, m_tiles, n_tiles, BAND_ROWS // ROWS)
            if const_expr(self.by_token):
                place, all_steps = self.place_by_token(parts, b, o, row, column, steps, at)
                self.add_steps(ring, f, o, place, all_steps, at)
                self.store_rounded(out, o, f.acc, row, column)
            else:
                part = row // rows
                row = row - part * rows
                place = self.place_by_neuron(parts, b, o, part, row, column, at)
                self.add_steps(ring, f, o, place, steps, at)
                self.store_sums(o, here, f.acc, part, row, column)
            index += team[1]
        return index - m_tiles * n_tiles

    @cute.jit
    def place_by_token(self, parts: cute.Tensor, b, o: Operands, row: Int32, column: Int32, steps: Int32, at) -> Any:
        """What a thread copies of a tile of y or dx, and the steps: the second part follows the first."""
        left, (first, second) = slab(parts, Int32(0)), b
        rows = self.by_rows(left, row * ROWS, at.thread)
        rows = rows._replace(second=rows.first + Int64(parts.stride[0]) * BYTES, second_pitch=rows.pitch)
        lines, follow = (self.by_lines(w, column * TILE_N, TILE_N, at.thread) for w in (first, second))
        lines = lines._replace(second=follow.first, second_pitch=follow.pitch)
        # one or two; steps beyond the last, which are loaded ahead, must not turn to a second that is not there
        both = o.parts > 2
        turn = cutlass.select_(both, steps, Int32(0x7FFFFFFF))
        return Place(rows, lines, Int32(0), turn), cutlass.select_(both, 2 * steps, steps)

    @cute.jit
    def place_by_neuron(self, parts, b, o, part, row, column, at) -> Any:
        """What a thread copies of a tile of a weight's gradient: dy for the last part."""
        x, dy = (self.by_lines(matrix, column * TILE_N, TILE_N, at.thread) for matrix in b)
        last = part == o.parts - 1
        lines = x._replace(
            first=cutlass.select_(last, dy.first, x.first), pitch=cutlass.select_(last, dy.pitch, x.pitch)
        )
        return Place(self.by_lines(slab(parts, part), row * ROWS, ROWS, at.thread), lines, Int32(0), None)

    @cute.jit
    def add_steps(self, ring, f, o: Operands, place: Place, steps, at):
        """The sums of a tile; those of many terms are flushed to memory in between."""
        clear(f.acc)
        done = Int32(0)
        while done < steps:
            if done > 0:
                flush_sums(f.acc, o.flushed, 0, done == self.longest)
            now = cutlass.min(steps - done, Int32(self.longest))
            self.add_product(ring, f, place._replace(start=done), now, at)
            done += now
        if steps > self.longest:
            add_flushed(f.acc, o.flushed, 0)

    @cute.jit
    def first_of(self, row: Int32, column: Int32) -> Any:
        """This thread's first row and column in a tile, and its indices, read again here.

        So they take no registers in the main loop.
        """
        at = thread_index(again=True)
        first = row * ROWS + at.warp_m * (16 * self.m_frags) + (at.lane >> 2)
        return first, column * TILE_N + at.warp_n * (8 * self.n_frags), at

    @cute.jit
    def store_rounded(self, out: cute.Tensor, o: Operands, acc: cute.Tensor, row: Int32, column: Int32):
        """Add the bias, round, and store."""
        first, left, at = self.first_of(row, column)
        if const_expr(not self.backward):
            for v in range_constexpr(self.n_frags):
                bias = bias_pair(o.b_down, left + 8 * v + (at.lane & 3) * 2)
                for e in range_constexpr(4):
                    for i in range_constexpr(self.m_frags):
                        acc[e, v, i] += bias[e % 2]
        for i in range_constexpr(self.m_frags):
            for h in range_constexpr(2):
                m = first + 16 * i + 8 * h
                columns = out.shape[1] - left if m < out.shape[0] else 0
                pairs = [pack(acc[2 * h, v, i], acc[2 * h + 1, v, i], self.dtype) for v in range(self.n_frags)]
                store_pairs(pairs, address(out, m, left), columns, at.lane)

    @cute.jit
    def store_sums(self, o, here, acc, part, row, column):
        """Store the sums, rounded or not, to the matrices of their part."""
        first, left, at = self.first_of(row, column)
        targets = targets_of(o, part)
        for i in range_constexpr(self.m_frags):
            for h in range_constexpr(2):
                for v in range_constexpr(self.n_frags):
                    two = [acc[2 * h + j, v, i] for j in range(2)]
                    column = left + 8 * v + (at.lane & 3) * 2
                    store_gradients(o, here, targets, first + 16 * i + 8 * h, column, two, self.dtype)


@cute.jit
def slab(parts: Any, part: Int32) -> Any:
    """A part as a matrix."""
    start = (parts.iterator + Int64(part) * parts.stride[0]).align(16)
    return cute.make_tensor(start, cute.make_layout((parts.shape[1], parts.shape[2]), stride=(parts.stride[1], 1)))


@cute.jit
def rows_of(matrix: Any, first: Int32, count: Int32) -> Any:
    """`count` rows of a matrix, from `first` on."""
    start = (matrix.iterator + Int64(first) * matrix.stride[0]).align(16)
    return cute.make_tensor(start, cute.make_layout((count, matrix.shape[1]), stride=matrix.stride))


@cute.jit
def rows_of_slabs(parts: Any, count: Int32) -> Any:
    """The first tokens of the scratch."""
    shape = (parts.shape[0], count, parts.shape[2])
    return cute.make_tensor(parts.iterator, cute.make_layout(shape, stride=parts.stride))


class Pass:
    """The kernel of a pass. `team` in shared memory: index of this CTA among those that compute, and their number.

    It is read again where it is needed, so it takes no registers in the main loop.
    """

    backward: bool

    def __init__(self, spec: OverflowSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.score, self.by_token, self.by_neuron = Score(spec), PartProduct(spec, True), PartProduct(spec, False)
        left = STAGES * (self.by_token.stage_values - self.score.stage_values) * BYTES
        assert left >= 2 * WARPS_M * TILE_N * 4

    @cute.jit
    def launch(self, tokens, weights, rows, parts, factors, out, o, sizes, capacity, max_ctas, stream):
        """`tokens`, `weights`: see `Score.run`. `rows`: weights that `factors` are multiplied by; `out`: y or dx."""

        @cute.struct
        class Shared:
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, STAGES * self.by_token.stage_values], 128]
            team: cute.struct.MemRange[Int32, 2]

        self.shared = feasible.check_portable_memory(Shared)
        self.kernel(tokens, weights, rows, parts, factors, out, o, sizes, capacity).launch(
            grid=(max_ctas, 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=launch.overlaps(),
        )

    @cute.kernel
    def kernel(
        self,
        tokens: Any,
        weights: Any,
        rows: Any,
        parts: cute.Tensor,
        factors: cute.Tensor,
        out: cute.Tensor,
        o: Operands,
        sizes: cute.Tensor,
        capacity: Int32,
    ):
        shared = SmemAllocator().allocate(self.shared)
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()
        if sizes[sizes.shape[0] - 1] > capacity:
            thread, ring = cute.arch.thread_idx()[0], shared.ring.data_ptr()
            team = shared.team.get_tensor(cute.make_layout(2))
            if thread == 0:
                team[0], team[1] = enlist(o.counters, cute.arch.grid_dim()[0])
            cute.arch.sync_threads()
            first, met = Int32(0), Int32(0)
            if team[0] >= team[1]:
                first = o.tokens
            while first < o.tokens:
                here = slice_at(o, first)
                self.score.run(ring, tokens, weights, parts, o, here, team)
                met = self.meet(o, team, met)
                index = self.by_token.run(ring, factors, rows, out, o, here, team[0], team)
                if const_expr(self.backward):
                    self.by_neuron.run(ring, factors, tokens, None, o, here, index, team)
                    own, threads = team[0] * THREADS + cute.arch.thread_idx()[0], team[1] * THREADS
                    if o.d_gate.shape[0] > 0:
                        copy_gradients(o, parts, here, own, threads)
                    if here.is_last * o.weights.wanted != 0:
                        add_biases(o, own, threads, self.dtype)
                met = self.meet(o, team, met)
                first += here.count

    @cute.jit
    def meet(self, o: Operands, team: cute.Tensor, met: Int32):
        """Wait for all CTAs; return how often they have met."""
        met += 1
        cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] == 0:
            arrive_and_wait(o.counters, met * team[1])
        cute.arch.sync_threads()
        return met


class Forward(ForwardPass, Pass):
    """Forward."""


class Backward(BackwardPass, Pass):
    """Backward."""


def signature(spec: OverflowSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return (Forward if spec.mode == "forward" else Backward)(spec), arguments(spec)
