"""Products sampled at the non-zeros of a hybrid gate, for every GPU since sm_80; common/sampled.py has their epilogue
and what they are for.

Persistent, one CTA per SM. A unit of work is a tile of 128 tokens and up to 256 neurons of its list, see
common/units.py; each row of w in the union of 128 tokens' neurons is read once. All units have the main loop of
product.py, for 256 rows of w, so none is cut for balance; rows of w are those that the list names.
Then the ring holds the sums, and the next unit starts when their entries have been read.

sampled_grad.py runs the same kernel on dy and w_down.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible, geometry
from ..common import launch
from ..common.copies import aligned
from ..common.mma import clear
from ..common.sampled import CHUNKS, SAMPLERS, STAGED, TILE_M, TILE_N, Operands, SampledUpForm, Sampler, up_arguments
from ..common.swizzle import swizzle_column
from ..common.units import begin, deal_units, find_unit, unit_after
from ..common.values import widen
from ..specs import SampledUpSpec
from .product import PASS, PIECE, PIECES, STAGES, THREADS, TILE_K, Product, thread_index

assert THREADS == SAMPLERS


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    ring: Any
    sums: Any  # [TILE_M, STAGED] overlays the ring: staged for the entries
    totals: Any  # [TILE_N / STAGED, warps]


class Place(NamedTuple):
    """What a thread loads of a unit."""

    x: Any  # offset of its first row of x
    tokens: Any  # rows of x from there on
    rows: Any  # [4] offsets of its rows of w, in units of 16 bytes: 64 GB
    length: Any  # rows of w from its first on


class SampledProduct(Product, Sampler):
    """The kernel of both forms, see common/sampled.py."""

    @cute.jit
    def launch(self, o, capacity, max_ctas, stream):
        self.set_rows(TILE_M)

        @cute.struct
        class Shared:
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, STAGES * self.stage_values], 128]
            totals: cute.struct.MemRange[Float32, TILE_N // STAGED * (THREADS // 32)]

        assert TILE_M * STAGED * 2 <= STAGES * self.stage_values
        self.shared = feasible.check_portable_memory(Shared)
        if o.x.shape[0] > 0:
            launch.start(self.kernel(o, capacity), max_ctas, THREADS, stream, ctas_per_sm=1)

    @cute.kernel
    def kernel(self, o: Operands, capacity: Int32):
        at = thread_index()
        shared = SmemAllocator().allocate(self.shared)
        ring = shared.ring.data_ptr()
        s = Views(
            ring,
            cute.make_tensor(cute.recast_ptr(ring, dtype=Float32), cute.make_layout(TILE_M * STAGED)),
            shared.totals.get_tensor(cute.make_layout(TILE_N // STAGED * (THREADS // 32))),
        )
        launch.wait()
        if o.sizes[o.sizes.shape[0] - 1] <= capacity:
            self.compute_units(o, s, at)

    @cute.jit
    def compute_units(self, o, s, at):
        """Compute all products of each unit, then sample those of the pattern."""
        steps = cutlass.max(cute.ceil_div(o.w.shape[1], TILE_K), Int32(STAGES))
        f = self.fragments(s.ring, at)
        rows = cute.make_rmem_tensor((TILE_N // PASS,), Uint32)
        index, stage = cute.arch.block_idx()[0], Int32(0)
        deal = deal_units(o.sizes, cute.arch.grid_dim()[0], CHUNKS, False)
        unit, cursor = find_unit(o.sizes, deal, index, begin(), CHUNKS)
        while unit.chunks > 0:
            place = self.place_of(o, rows, unit, at)
            self.begin(o, s.ring, f, place, stage, at)
            clear(f.acc)
            stage = self.multiply_steps(o, s.ring, f, place, steps, stage, at)
            # not earlier: the main loop needs the registers
            loaded = self.load_ahead(o, unit, CHUNKS, at.thread)
            # before sums replace what the ring holds
            cute.arch.cp_async_wait_group(0)
            self.sample_unit(s, o, f.acc, loaded, unit, CHUNKS, at.thread)
            index = unit_after(index, deal.ctas)
            unit, cursor = find_unit(o.sizes, deal, index, cursor, CHUNKS)
            # before copies replace the sums
            self.sync_sums()

    # ---- load ----

    @cute.jit
    def place_of(self, o, rows, unit, at):
        """The place of a unit; fills `rows`."""
        token, own = unit.tile * TILE_M + at.thread // PIECES, at.thread // PIECES
        for j in range_constexpr(TILE_N // PASS):
            row = own + PASS * j
            neuron = widen(o.neurons[unit.tile, unit.start * geometry.CHUNK + row]) if row < unit.length else 0
            rows[j] = Uint32(neuron) * Uint32(o.w.stride[0] // PIECE)
        return Place(Int64(token) * o.x.stride[0], o.x.shape[0] - token, rows, unit.length - own)

    @cute.jit
    def load_piece(self, o, ring, place, step, stage, index: cutlass.Constexpr, thread):
        from_x = index * PASS < TILE_M
        column = step * TILE_K + thread % PIECES * PIECE
        if const_expr(from_x):
            source = o.x.iterator + (place.x + column) + Int64(o.x.stride[0]) * (index * PASS)
            exists = (column < o.x.shape[1]) & (index * PASS < place.tokens)
            self.copy_piece(ring, source, stage, index, exists, thread)
        else:
            first = index * PASS - TILE_M
            source = o.w.iterator + (place.rows[first // PASS].to(Int64) * PIECE + column)
            exists = (column < o.w.shape[1]) & (first < place.length)
            self.copy_piece(ring, source, stage, index, exists, thread)

    # ---- sample ----

    @cute.jit
    def sync_sums(self):
        cute.arch.sync_threads()

    @cute.jit
    def stage_sums(self, s, acc, staged: cutlass.Constexpr, chunks: cutlass.Constexpr, thread):
        # read again, so that addresses are computed here and take no registers in the main loop
        at = thread_index(again=True)
        # two of the four warps beside each other have these columns
        if at.warp_n // 2 == staged:
            row = at.warp_m * (16 * self.m_frags) + (at.lane >> 2)
            column = at.warp_n % 2 * (8 * self.n_frags) + (at.lane & 3) * 2
            for i in range_constexpr(self.m_frags):
                for h in range_constexpr(2):
                    for v in range_constexpr(self.n_frags):
                        place = (row + 16 * i + 8 * h) * STAGED + swizzle_column(row, 8 * v) + column
                        pair = aligned(s.sums.iterator + place, 2)
                        for j in range_constexpr(2):
                            pair[j] = acc[2 * h + j, v, i]


class SampledUp(SampledProduct, SampledUpForm):
    """The up projection."""


def signature(spec: SampledUpSpec) -> tuple[Any, tuple[Any, ...]]:
    return SampledUp(spec), up_arguments(spec)
