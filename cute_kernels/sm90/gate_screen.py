"""The int8 gate GEMM that finds the neurons which any of 128 tokens may fire: a bit for each neuron and token tile.

The same as gate_pack.py up to the accumulators: persistent, clusters of two CTAs, a ring of stages. The CTAs share 256
tokens and have 128 neurons each: WGMMA of 256 tokens reads less shared memory per product than of 128. A gate may be
positive if its int32 product, less the neuron's offset, exceeds a threshold, which two fused multiplications and
additions, one without bias, make of three terms of the token and two of the neuron; docs/notes/screen.md derives them.
Three warp groups:

    terms     warps 0 to 2. Compute the terms of the tile's tokens and neurons while the mma groups work on it.
    load      warp 3. As in gate_pack.py.
    mma       groups 1 and 2, 64 neurons each: WGMMA 64 x 256 x 32 over the ring, then thresholds in registers. A lane
              has two neurons and a quarter of the tokens; ballots join four lanes. Sixteen bits are stored at a time.

Hand-over:

    ring          as in gate_pack.py.
    BEGUN         the first mma group arrives, the second one waits: two stages of the tile are issued. So each group
                  compares while the other one multiplies.
    TERMS_FULL    for each mma group. 96 threads arrive, 128 wait: the terms are written.
    TERMS_EMPTY   256 mma threads arrive, 96 threads wait: the terms may be overwritten.
"""

from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int8, Int16, Int32, Uint16, Uint32, const_expr, range_constexpr

from .. import geometry, screen
from ..common import operands
from ..common.copies import aligned
from ..specs import GateScreenSpec
from .gate_pack import MMA_THREADS, PACK_WARPS, TILE_N, GatePack

# of a CTA's tile
TOKENS, NEURONS = 2 * geometry.TOKEN_TILE, TILE_N // 2
TERM_THREADS = 32 * PACK_WARPS
# sets of sixteen neurons in a tile, whose bits are stored together
SIXTEENS = NEURONS // 16
# stages by which the second mma group is behind the first: each compares while the other multiplies
LAG = 2
# terms of a token that does not exist: below any product
NEVER = -3.0e38


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads."""

    TERMS_FULL = 1  # and 2, of the second mma group
    TERMS_EMPTY = 3
    BEGUN = 4  # and 5, of every second tile


class Constants(NamedTuple):
    """Of the bound, for a number of columns; see `screen.py`."""

    root: Any  # half of the columns' square root, the largest error of a row's dithers
    tail: Any  # of the dithers
    product: Any  # part of |x| |w| that roundings of the rotation and of the bf16 product may take
    x_part: Any  # parts of |x|, and of |w|
    w_part: Any
    slack: Any
    usual: Any  # usual spread^2
    block: Any  # columns that are rotated together
    dithers: Any  # the product of the dithers of x and w


class Operands(NamedTuple):
    """Operands in global memory that are accessed without TMA; an empty `bias` stands for none."""

    x_scale: Any
    x_spread: Any
    x_offset: Any
    w_scale: Any
    w_spread: Any
    w_offset: Any
    bias: Any
    candidates: Any
    constants: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    sW: Any  # weights
    sX: Any
    # a gate is a candidate unless its product, less the neuron's offset, is at most -(a + b spread^2 + i bias)
    tokens: Any  # [TOKENS, 4] a, b, i
    neurons: Any  # [NEURONS, 4] spread^2, bias in units of the scale, offset


class GateScreen(GatePack):
    """For one dtype of the bias; sizes and strides stay symbolic. An empty bias is none."""

    accumulator = Int32
    absent: ClassVar = {}

    def __init__(self, spec: GateScreenSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.set_sizes(TOKENS, Int8, Float32, 4 * TOKENS + 4 * NEURONS, True)

    @cute.jit
    def __call__(self, *arguments: Any):
        """x and its terms, w and its terms, bias and candidates, the `Constants`, the clusters and the stream."""
        x, x_scale, x_spread, x_offset, w, *rest, max_clusters, stream = arguments
        w_scale, w_spread, w_offset, bias, candidates, *constants = rest
        rows = (x_scale, x_spread, x_offset, w_scale, w_spread, w_offset)
        self.launch(x, w, Operands(*rows, bias, candidates, Constants(*constants)), max_clusters, stream)

    def views(self, sW: Any, sX: Any, epilogue: Any) -> Views:
        """The kernel's `Views`."""
        return Views(sW, sX, epilogue, epilogue + 4 * TOKENS)

    @cute.jit
    def first_group(self, ring, w, x, s, o, place, warp_index: Int32, extent):
        """Load, or compute terms; the first tile is at `place`."""
        if warp_index == PACK_WARPS:
            self.load(ring, w, x, s, place, extent)
        else:
            self.terms(s, o, cute.arch.thread_idx()[0], extent)
        cute.arch.cluster_arrive()

    @cute.jit
    def terms(self, s, o, thread: Int32, extent):
        """Compute the terms of all tiles of this CTA."""
        tile, step = cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        first = tile
        while tile < extent.m_tiles * extent.n_tiles:
            row, column = self.tile_of(tile, extent)
            if tile != first:
                cute.arch.barrier(barrier_id=Barrier.TERMS_EMPTY, number_of_threads=self.handover_threads())
            for i in cutlass.range(thread, TOKENS, TERM_THREADS, unroll=1):
                self.put(s.tokens, i, self.token_terms(o, self.token_operands(o, row * TOKENS + i, extent)))
            for i in cutlass.range(thread, NEURONS, TERM_THREADS, unroll=1):
                square, beta, offset = self.neuron_terms(o, self.neuron_operands(o, column * NEURONS + i, extent))
                # without a bias, beta is 0 except for zero rows, where it is below all products
                self.put(s.neurons, i, (square, beta, offset if o.bias.shape[0] > 0 else offset - beta))
            for half in range_constexpr(2):
                cute.arch.barrier_arrive(barrier_id=Barrier.TERMS_FULL + half, number_of_threads=128 + TERM_THREADS)
            tile += step

    def put(self, target, index, terms):
        """Store three terms."""
        four = aligned(target + 4 * index, 4)
        for j in range(3):
            four[j] = terms[j]

    @cute.jit
    def token_operands(self, o, token: Int32, extent):
        """Whether a token exists, and its scale, spread and offset."""
        exists, scale, spread, offset = token < extent.rows, Float32(1.0), Float32(0.0), Float32(0.0)
        if exists:
            scale, spread, offset = o.x_scale[token], o.x_spread[token], o.x_offset[token]
        return exists, scale, spread, offset

    @cute.jit
    def token_terms(self, o, given):
        """a, b and i of a token: NaN or infinite if it is not screened; of a zero token the neurons' biases decide."""
        c, (exists, scale, spread, offset) = o.constants, given
        # no token: not 0, whose product with an infinite bias is NaN
        a, b, i = Float32(NEVER), Float32(0.0), Float32(1.0)
        if exists:
            p = spread + c.root
            slope = c.product * spread + c.w_part
            square = c.tail * p * p
            r = cute.math.sqrt(c.usual + square / slope)
            a = (square / r + slope * r) * Float32(0.5) + c.x_part * spread + c.slack
            a = a * Float32(1 + screen.MARGIN) + (c.dithers - offset)
            b = slope / (r + r) * Float32(1 + screen.MARGIN)
            i = Float32(1.0) / scale
            if spread == 0.0:
                a, b, i = Float32(-screen.ABOVE_CORRECTIONS), Float32(0.0), Float32(screen.LIFT)
        return a, b, i

    @cute.jit
    def neuron_operands(self, o, neuron: Int32, extent):
        """Whether a neuron exists, and its scale, spread, offset and bias."""
        exists, scale, spread, offset = neuron < extent.neurons, Float32(1.0), Float32(0.0), Float32(0.0)
        bias = Float32(0.0)
        if exists:
            scale, spread, offset = o.w_scale[neuron], o.w_spread[neuron], o.w_offset[neuron]
            if o.bias.shape[0] > 0:
                bias = o.bias[neuron].to(Float32)
        return exists, scale, spread, offset, bias

    @cute.jit
    def neuron_terms(self, o, given):
        """The square of a neuron's spread, its bias in units of its scale, and its offset."""
        exists, scale, spread, offset, bias = given
        square, beta = spread * spread, Float32(0.0)
        if exists:
            beta = bias * o.constants.block / scale
            if bias > 0.0:
                beta = cute.arch.fmax(beta * Float32(1 + screen.BIAS_MARGIN), Float32(1 / screen.DECISIVE))
            else:
                beta = beta * Float32(1 - screen.BIAS_MARGIN)
            if spread == 0.0:
                # NaN stays
                beta = bias
                if bias > 0.0:
                    beta = Float32(screen.DECISIVE)
                if bias <= 0.0:
                    beta = Float32(-screen.DECISIVE)
        return square, beta, offset

    @cute.jit
    def mma(self, ring, mma: cute.TiledMma, s, o, thread: Int32, extent):
        """Main loop and epilogue for half of the tile's neurons."""
        half, warp_index, rW, rX, _, acc, full, release = self.fragments(mma, s, thread)
        tile, step, turn = cute.arch.block_idx()[2], cute.arch.grid_dim()[2], Int32(0)
        while tile < extent.m_tiles * extent.n_tiles:
            row, column = self.tile_of(tile, extent)
            begun = Barrier.BEGUN + turn
            if half == 1:
                cute.arch.barrier(barrier_id=begun, number_of_threads=MMA_THREADS)
                begun = Int32(0)
            full, release = self.multiply(ring, mma, acc, rW, rX, full, release, extent, begun)
            cute.arch.barrier(barrier_id=Barrier.TERMS_FULL + half, number_of_threads=128 + TERM_THREADS)
            if o.bias.shape[0] > 0:
                self.compare(s, o, acc, row, column, warp_index, extent, True)
            else:
                self.compare(s, o, acc, row, column, warp_index, extent, False)
            tile, turn = tile + step, turn ^ 1
            if tile < extent.m_tiles * extent.n_tiles:
                cute.arch.barrier_arrive(barrier_id=Barrier.TERMS_EMPTY, number_of_threads=self.handover_threads())
        # not relaxed: the last stages are released before
        cute.arch.cluster_arrive()

    @cute.jit
    def issued(self, k: Int32, begun: Int32, extent):
        """Let the second group begin the tile when the first one has issued some stages of it.

        Of short tiles the first group may begin the next one before the second has seen this: hence two barriers.
        """
        if begun > 0:
            if k == cutlass.min(LAG, extent.k_tiles) - 1:
                cute.arch.barrier_arrive(barrier_id=begun, number_of_threads=MMA_THREADS)

    @cute.jit
    def compare(self, s, o, acc, row: Int32, column: Int32, warp_index: Int32, extent, biased: cutlass.Constexpr):
        """Compare products with thresholds, and store which of the warp's neurons exceed that of any of 128 tokens.

        Lane 4 g + q has tokens 8 v + 2 q and 8 v + 2 q + 1 of neurons g + 8 i of its warp's 16.
        """
        lane = cute.arch.lane_idx()
        group, quarter = lane >> 2, lane & 3
        four = cute.make_rmem_tensor((4,), Float32)
        squares, betas, offsets = [], [], []
        for i in range_constexpr(2):
            neuron = warp_index * 16 + 8 * i + group
            cute.autovec_copy(aligned(s.neurons + 4 * neuron, 4), four)
            squares.append(four[0])
            betas.append(four[1])
            offsets.append(four[2])
        for part in range_constexpr(TOKENS // geometry.TOKEN_TILE):
            found = [Boolean(False), Boolean(False)]
            for v in range_constexpr(part * geometry.TOKEN_TILE // 8, (part + 1) * geometry.TOKEN_TILE // 8):
                for j in range_constexpr(2):
                    token = 8 * v + 2 * quarter + j
                    cute.autovec_copy(aligned(s.tokens + 4 * token, 4), four)
                    for i in range_constexpr(2):
                        reach = four[1] * squares[i] + four[0]
                        if const_expr(biased):
                            reach = four[2] * betas[i] + reach
                        # NaN exceeds, too
                        below = acc[(j, i, v), 0, 0].to(Float32) - offsets[i] <= -reach
                        found[i] = found[i] | (below == Boolean(False))
            bits = Uint32(0)
            for i in range_constexpr(2):
                neuron = column * NEURONS + warp_index * 16 + 8 * i + group
                mask = Uint32(cute.arch.vote_ballot_sync(found[i] & (neuron < extent.neurons)))
                bits = bits | self.join_quads(mask) << (8 * i)
            tile = row * (TOKENS // geometry.TOKEN_TILE) + part
            if lane == 0 and tile < o.candidates.shape[0]:
                o.candidates[tile, column * SIXTEENS + warp_index] = Int16(Uint16(bits))

    @cute.jit
    def join_quads(self, mask: Uint32) -> Uint32:
        """Eight bits: whether any of four neighbouring bits is set."""
        mask = mask | mask >> 1
        mask = (mask | mask >> 2) & Uint32(0x11111111)
        mask = (mask | mask >> 3) & Uint32(0x03030303)
        mask = (mask | mask >> 6) & Uint32(0x000F000F)
        return (mask | mask >> 12) & Uint32(0xFF)


def signature(spec: GateScreenSpec) -> tuple[Any, tuple[Any, ...]]:
    m, n, k = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    arguments = (
        operands.byte_rows(Int8, m, k),
        *(operands.dense(Float32, m) for _ in range(3)),
        operands.byte_rows(Int8, n, k),
        *(operands.dense(Float32, n) for _ in range(3)),
        operands.bias(operands.DTYPES[spec.dtype]),
        operands.dense(Int16, cute.sym_int32(), cute.sym_int32(divisibility=2 * SIXTEENS), align=4),
        *(Float32(1.0) for _ in Constants._fields),
        Int32(1),
    )
    return GateScreen(spec), arguments
