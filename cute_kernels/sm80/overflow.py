"""Forward and backward of a batch whose non-zeros exceed the hybrid format's capacity, for every GPU since sm_80;
common/overflow.py says what the four kernels compute.

Persistent, one CTA per SM. product.py has the main loop; each product fills the ring anew.

    hidden, gradients   a tile is 64 tokens and 256 neurons. Three products in turn: gate, rounded at once, which halves
                        its registers; up, if there is one; and in backward dh. Then each thread has all that belongs
                        to its places, and stores the parts from registers.
    token, weight       a tile is 128 rows and 256 columns. What is multiplied lies by lines of the sum's index: the
                        weights, x and dy, and in `weight` the parts, too.
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
    GradientsForm,
    HiddenForm,
    ProductOperands,
    ScoreOperands,
    TokenForm,
    WeightForm,
    add_biases,
    arguments,
    bias_pair,
    pointwise,
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

# tokens of a tile of `hidden` and `gradients`: those of a sum
SCORE_TOKENS = GROUP_ROWS
# rows of a tile of `token` and `weight`
ROWS = 128
# rows in a band of tiles, see `tile_of`
BAND_ROWS = 1024
# neurons of a sum of |h|, and sums in a tile of `hidden`
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
    """What the four kernels share, for one dtype."""

    def __init__(self, spec: OverflowSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        # steps before sums are flushed
        self.longest = geometry.LONGEST_SUM[spec.dtype] // TILE_K

    @cute.jit
    def by_rows(self, matrix, row, thread) -> Any:
        """The source of a K-major operand whose first row in the tile is `row`."""
        own, piece = row + thread // PIECES, thread % PIECES * PIECE
        first = address(matrix, own, piece).toint()
        pitch = Int64(matrix.stride[0]) * BYTES
        return Source(first, pitch, None, None, matrix.shape[1] - piece, matrix.shape[0] - own)

    @cute.jit
    def by_lines(self, matrix, column, width: cutlass.Constexpr, thread) -> Any:
        """The source of an operand by lines of the sum's index, from `column` on."""
        line, own = thread // (width // PIECE), column + thread % (width // PIECE) * PIECE
        first = address(matrix, line, own).toint()
        pitch = Int64(matrix.stride[0]) * BYTES
        return Source(first, pitch, None, None, matrix.shape[0] - line, matrix.shape[1] - own)

    @cute.jit
    def load_piece(self, o, ring, place, step, stage, index: cutlass.Constexpr, thread):
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
    def add_product(self, ring, f, place, steps, at):
        """Add so many steps of a product to the sums."""
        self.begin(None, ring, f, place, Int32(0), at)
        self.multiply_steps(None, ring, f, place, place, steps, Int32(0), at, False)
        # before anything else is copied to the ring
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()


class ScoreExtent(NamedTuple):
    """Tiles by tokens and neurons, and steps of K."""

    m_tiles: Int32
    n_tiles: Int32
    k_tiles: Int32


class Score(Dense):
    """Gate and up at all places, in backward dh too, and what follows from them."""

    backward: bool

    @cute.jit
    def launch(self, tokens, weights, o, sizes, capacity, parts, max_ctas, stream):
        """`tokens`: x and, in backward, dy. `weights`: w_gate, w_up and, in backward, w_down."""
        self.set_rows(SCORE_TOKENS)

        @cute.struct
        class Shared:
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, STAGES * self.stage_values], 128]
            totals: cute.struct.MemRange[Float32, WARPS_M * WARPS_N]
            # of d_gate and d_up, by the warps that have the same columns
            lines: cute.struct.MemRange[Float32, 2 * WARPS_M * TILE_N]

        self.shared = feasible.check_portable_memory(Shared)
        extent = ScoreExtent(
            # both halves of a row of sums
            cute.ceil_div(o.tokens, ROW_TOKENS) * (ROW_TOKENS // SCORE_TOKENS),
            cute.ceil_div(o.neurons, TILE_N),
            cute.ceil_div(tokens[0].shape[1], TILE_K),
        )
        self.kernel(tokens, weights, o, sizes, capacity, parts, extent).launch(
            grid=(cutlass.min(extent.m_tiles * extent.n_tiles, max_ctas), 1, 1),
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
        o: ScoreOperands,
        sizes: cute.Tensor,
        capacity: Int32,
        parts: cute.Tensor,
        extent: ScoreExtent,
    ):
        at = thread_index()
        shared = SmemAllocator().allocate(self.shared)
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()
        if sizes[sizes.shape[0] - 1] > capacity:
            ring = shared.ring.data_ptr()
            f = self.fragments(ring, at)
            tile = cute.arch.block_idx()[0]
            while tile < extent.m_tiles * extent.n_tiles:
                row, column = tile_of(tile, extent.m_tiles, extent.n_tiles, BAND_ROWS // SCORE_TOKENS)
                self.compute_tile(shared, ring, f, tokens, weights, o, parts, row, column, extent.k_tiles, at)
                tile += cute.arch.grid_dim()[0]

    @cute.jit
    def compute_tile(self, shared, ring, f, tokens, weights, o, parts, row, column, steps, at):
        """All products of a tile, then what follows from them."""
        gates = cute.make_rmem_tensor((self.n_frags, 2, self.m_frags), Uint32)
        clear(f.acc)
        self.add_product(ring, f, self.place_of(tokens[0], weights[0], row, column, at), steps, at)
        self.round_gates(o, f.acc, gates, row, column)
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
        self.finish(shared, o, gates, f.acc, dh, parts, row, column)

    @cute.jit
    def place_of(self, tokens, weight, row, column, at) -> Any:
        """What a thread copies of a product of a tile."""
        a, b = self.by_rows(tokens, row * SCORE_TOKENS, at.thread), self.by_rows(weight, column * TILE_N, at.thread)
        return Place(a, b, Int32(0), None)

    @cute.jit
    def first_of(self, row, column) -> Any:
        """This thread's first token and neuron in a tile, and its indices, read again here.

        So they take no registers in the main loop.
        """
        at = thread_index(again=True)
        token = row * SCORE_TOKENS + at.warp_m * (16 * self.m_frags) + (at.lane >> 2)
        return token, column * TILE_N + at.warp_n * (8 * self.n_frags), at

    @cute.jit
    def round_gates(self, o, acc, gates, row, column):
        """Gates with bias, rounded, after ReLU and the threshold; zeros past the last token."""
        token, neuron, at = self.first_of(row, column)
        for v in range_constexpr(self.n_frags):
            bias = bias_pair(o.b_gate, neuron + 8 * v + (at.lane & 3) * 2)
            for i in range_constexpr(self.m_frags):
                for h in range_constexpr(2):
                    sums = [acc[2 * h + j, v, i] + bias[j] for j in range(2)]
                    pair = above(relu_pack(*sums, self.dtype), o.threshold, self.dtype)
                    gates[v, h, i] = Uint32(cutlass.select_(token + 16 * i + 8 * h < o.tokens, pair, Uint32(0)))

    @cute.jit
    def finish(self, shared, o, gates, up, dh, parts, row, column):
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
                left = o.neurons - neuron if m < o.tokens else 0
                if const_expr(self.backward):
                    self.store_part(parts, 0, values[1], m, neuron, left, at)
                    if o.gated != 0:
                        self.store_part(parts, 1, values[2], m, neuron, left, at)
                    self.store_part(parts, 1 + o.gated, values[0], m, neuron, left, at)
                else:
                    self.store_part(parts, 0, values[0], m, neuron, left, at)
        if const_expr(self.backward):
            self.store_lines(shared, o, by_neuron, row, column, at)
        else:
            self.store_total(shared, o, total, row, column, at)

    @cute.jit
    def store_part(self, parts, part, pairs, m, neuron, left, at):
        """Store a row of a warp's values of a part."""
        target = parts.iterator + (Int64(part) * parts.stride[0] + Int64(m) * parts.stride[1] + neuron)
        store_pairs(pairs, target, left, at.lane)

    @cute.jit
    def store_total(self, shared, o, total, row, column, at):
        """Store the sums of |h|: two warps beside each other, in both halves of the tokens, have a sum's neurons."""
        totals = shared.totals.get_tensor(cute.make_layout(WARPS_M * WARPS_N))
        total = warp_sum(total)
        if at.lane == 0:
            totals[at.warp_m * WARPS_N + at.warp_n] = total
        cute.arch.sync_threads()
        line, half = row // (ROW_TOKENS // SCORE_TOKENS), row % (ROW_TOKENS // SCORE_TOKENS)
        place = (column * TILE_SUMS + at.thread) * (ROW_TOKENS // SCORE_TOKENS) + half
        if at.thread < TILE_SUMS and line < o.sums.shape[0] and place < o.sums.shape[1]:
            total = Float32(0.0)
            for m in range_constexpr(WARPS_M):
                for n in range_constexpr(WARPS_N // TILE_SUMS):
                    total += totals[m * WARPS_N + at.thread * (WARPS_N // TILE_SUMS) + n]
            o.sums[line, place] = total

    @cute.jit
    def store_lines(self, shared, o, by_neuron, row, column, at):
        """Store the sums of both gradients over the tile's tokens."""
        if row < o.sums.shape[0]:
            lines = shared.lines.get_tensor(cute.make_layout(2 * WARPS_M * TILE_N))
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


class ProductExtent(NamedTuple):
    """Tiles by rows, of all parts, and columns; steps of the sum's index."""

    m_tiles: Int32
    n_tiles: Int32
    k_tiles: Int32


class PartProduct(Dense):
    """Parts times other matrices, which lie by lines of the sum's index."""

    by_token: bool
    b_k_major = False

    @cute.jit
    def launch(self, parts, b, out, o, sizes, capacity, max_ctas, stream):
        """`parts`: [P, tokens, N]; `b`: two matrices; `out`: of `token`, otherwise None."""
        self.a_k_major = self.by_token
        self.set_rows(ROWS)

        @cute.struct
        class Shared:
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, STAGES * self.stage_values], 128]

        self.shared = feasible.check_portable_memory(Shared)
        p, m, n = parts.shape
        slabs, rows, terms = (1, m, n) if const_expr(self.by_token) else (p, n, m)
        extent = ProductExtent(
            slabs * cute.ceil_div(rows, ROWS), cute.ceil_div(o.extents[1], TILE_N), cute.ceil_div(terms, TILE_K)
        )
        self.kernel(parts, b, out, o, sizes, capacity, extent).launch(
            grid=(cutlass.min(extent.m_tiles * extent.n_tiles, max_ctas), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=launch.overlaps(),
        )

    @cute.kernel
    def kernel(
        self,
        parts: cute.Tensor,
        b: Any,
        out: Any,
        o: ProductOperands,
        sizes: cute.Tensor,
        capacity: Int32,
        extent: ProductExtent,
    ):
        at = thread_index()
        shared = SmemAllocator().allocate(self.shared)
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()
        if sizes[sizes.shape[0] - 1] > capacity:
            if const_expr(not self.by_token):
                if o.done != 0:
                    add_biases(o, at.thread, THREADS, self.dtype)
            ring = shared.ring.data_ptr()
            f = self.fragments(ring, at)
            tile = cute.arch.block_idx()[0]
            while tile < extent.m_tiles * extent.n_tiles:
                row, column = tile_of(tile, extent.m_tiles, extent.n_tiles, BAND_ROWS // ROWS)
                if const_expr(self.by_token):
                    place, steps = self.place_by_token(parts, b, o, row, column, extent, at)
                    self.add_steps(ring, f, o, place, steps, at)
                    self.store_rounded(out, o, f.acc, row, column)
                else:
                    rows = extent.m_tiles // o.parts
                    part = row // rows
                    row = row - part * rows
                    place = self.place_by_neuron(parts, b, o, part, row, column, at)
                    self.add_steps(ring, f, o, place, extent.k_tiles, at)
                    self.store_sums(o, f.acc, part, row, column)
                tile += cute.arch.grid_dim()[0]

    @cute.jit
    def place_by_token(self, parts, b, o, row, column, extent, at) -> Any:
        """What a thread copies of a tile of `token`, and the steps: the second part follows the first."""
        left, (first, second) = slab(parts, Int32(0)), b
        rows = self.by_rows(left, row * ROWS, at.thread)
        rows = rows._replace(second=rows.first + Int64(parts.stride[0]) * BYTES, second_pitch=rows.pitch)
        lines, follow = (self.by_lines(w, column * TILE_N, TILE_N, at.thread) for w in (first, second))
        lines = lines._replace(second=follow.first, second_pitch=follow.pitch)
        # one or two; steps beyond the last, which are loaded ahead, must not turn to a second that is not there
        both = o.parts > 2
        turn = cutlass.select_(both, extent.k_tiles, Int32(0x7FFFFFFF))
        return Place(rows, lines, Int32(0), turn), cutlass.select_(both, 2 * extent.k_tiles, extent.k_tiles)

    @cute.jit
    def place_by_neuron(self, parts, b, o, part, row, column, at) -> Any:
        """What a thread copies of a tile of `weight`: dy for the last part."""
        x, dy = (self.by_lines(matrix, column * TILE_N, TILE_N, at.thread) for matrix in b)
        last = part >= o.second
        lines = x._replace(
            first=cutlass.select_(last, dy.first, x.first), pitch=cutlass.select_(last, dy.pitch, x.pitch)
        )
        return Place(self.by_lines(slab(parts, part), row * ROWS, ROWS, at.thread), lines, Int32(0), None)

    @cute.jit
    def add_steps(self, ring, f, o, place, steps, at):
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
    def first_of(self, row, column) -> Any:
        """This thread's first row and column in a tile, and its indices, read again here.

        So they take no registers in the main loop.
        """
        at = thread_index(again=True)
        first = row * ROWS + at.warp_m * (16 * self.m_frags) + (at.lane >> 2)
        return first, column * TILE_N + at.warp_n * (8 * self.n_frags), at

    @cute.jit
    def store_rounded(self, out, o, acc, row, column):
        """Add the bias, round, and store."""
        first, left, at = self.first_of(row, column)
        if const_expr(o.bias is not None):
            for v in range_constexpr(self.n_frags):
                bias = bias_pair(o.bias, left + 8 * v + (at.lane & 3) * 2)
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
    def store_sums(self, o, acc, part, row, column):
        """Store the sums, rounded or not, to the matrices of their part."""
        first, left, at = self.first_of(row, column)
        targets = targets_of(o, part)
        for i in range_constexpr(self.m_frags):
            for h in range_constexpr(2):
                for v in range_constexpr(self.n_frags):
                    two = [acc[2 * h + j, v, i] for j in range(2)]
                    column = left + 8 * v + (at.lane & 3) * 2
                    store_gradients(o, targets, first + 16 * i + 8 * h, column, two, self.dtype)


@cute.jit
def slab(parts: Any, part: Int32) -> Any:
    """A part as a matrix."""
    start = (parts.iterator + Int64(part) * parts.stride[0]).align(16)
    return cute.make_tensor(start, cute.make_layout((parts.shape[1], parts.shape[2]), stride=(parts.stride[1], 1)))


class Hidden(HiddenForm, Score):
    """The kernel `hidden`."""


class Gradients(GradientsForm, Score):
    """The kernel `gradients`."""


class Token(TokenForm, PartProduct):
    """The kernel `token`."""


class Weight(WeightForm, PartProduct):
    """The kernel `weight`."""


class Forward(ForwardPass):
    """Forward."""

    score, product = Score.kernel, PartProduct.kernel

    def __init__(self, spec: OverflowSpec):
        self.hidden, self.token = Hidden(spec), Token(spec)


class Backward(BackwardPass):
    """Backward."""

    score, product = Score.kernel, PartProduct.kernel

    def __init__(self, spec: OverflowSpec):
        self.gradients, self.token, self.weight = Gradients(spec), Token(spec), Weight(spec)


def signature(spec: OverflowSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return (Forward if spec.mode == "forward" else Backward)(spec), arguments(spec)
