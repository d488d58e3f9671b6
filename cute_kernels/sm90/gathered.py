"""Sparse times dense by token tile: out[m] = sum over non-zeros c of coefficient[m, c] * w[c], optionally plus the same
sum of a second pair, plus bias. Each row of w in the union of 128 tokens' neurons is read once; WGMMA does the rest.

Persistent, one CTA per SM. A unit of work is a token tile and a slab of 256 columns; its inner dimension is the list of
neurons, 128 per turn. Two kinds of warp groups, which share sm90/sparse_product.py with weight_grad.py:

    fill    group 0. cp.async of rows of w, 256 columns each, into MN-major swizzled stages of 64 rows.
    mma     groups 1 and 2, 64 tokens each: WGMMA 64x256x16 of the stages and the group's own tile of coefficients;
            meanwhile the group fills the next turn's tile. Then rounding and 16-byte stores. Sums are flushed after
            `longest` list positions.

    FULL[s]    128 fill threads arrive when their copies of the stage are complete and fenced.
    EMPTY[s]   8 mma warps arrive.
    TILE + g   128 threads of group g, once per turn: its tile of coefficients is filled, the next tile is clear.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import operands
from ..common.activation import power_pair
from ..common.copies import address
from ..common.values import widen
from ..specs import GatheredSpec
from .ring import open_ring
from .sparse_product import (
    GROUP_THREADS,
    MMA_WARPS,
    REGISTERS_FILL,
    REGISTERS_MMA,
    STAGES,
    THREADS,
    TURN,
    SparseProduct,
    gather_columns,
    store_coefficient,
    store_rounded,
)

TILE_M, TILE_N, TILE_K = geometry.TOKEN_TILE, 256, geometry.CHUNK
# most token tiles that are sorted: 131,072 tokens. With more, the load balances without it
SORTED = 1024


class Operands(NamedTuple):
    """Operands in global memory, None if absent, and the number of slabs and units."""

    coefficients: Any
    w: Any
    coefficients2: Any
    w2: Any
    bias: Any
    entries: Any
    neurons: Any
    chunks: Any
    sizes: Any
    out: Any
    flushed: Any  # partial sums of long lists
    activation: Any  # of the values in entries, see common/activation.py
    slabs: Any
    units: Any
    order: Any = None  # in shared memory: token tiles, longest list first


class Fragments(NamedTuple):
    """A thread's MMA fragments and sums."""

    mma: Any
    rA: Any
    rB: Any
    acc: Any
    coordinates: Any
    row: Any  # first of the thread's two rows in the token tile


class Gathered(SparseProduct):
    """For one dtype and number of products; sizes and strides stay symbolic. An empty bias stands for none."""

    def __init__(self, spec: GatheredSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.from_entries = spec.products == 0
        self.products = max(1, spec.products)
        self.longest = geometry.LONGEST_SUM[spec.dtype]

    @cute.jit
    def __call__(
        self,
        coefficients: cute.Tensor | None,
        w: cute.Tensor,
        coefficients2: cute.Tensor | None,
        w2: cute.Tensor | None,
        bias: cute.Tensor,
        entries: cute.Tensor,
        neurons: cute.Tensor,
        chunks: cute.Tensor,
        sizes: cute.Tensor,
        out: cute.Tensor,
        flushed: cute.Tensor,
        activation: Int32,
        capacity: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        shape = (TILE_M, TILE_N, TILE_K)
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1), (64, TILE_N)
        )
        a_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE_M // 2, TILE_N, TURN), self.dtype, 6)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, shape, self.dtype, STAGES)

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, STAGES]
            empty: cute.struct.MemRange[Int64, STAGES]
            order: cute.struct.MemRange[Uint16, SORTED]
            sA: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(a_layout)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(b_layout)], 1024]

        self.shared = feasible.check_shared_memory(Shared)
        slabs = cute.ceil_div(out.shape[1], TILE_N)
        units = cute.ceil_div(out.shape[0], TILE_M) * slabs
        data = Operands(
            coefficients,
            w,
            coefficients2,
            w2,
            bias,
            entries,
            neurons,
            chunks,
            sizes,
            out,
            flushed,
            activation,
            slabs,
            units,
        )
        arguments = (data, mma, a_layout, b_layout, capacity)
        ctas = cutlass.min(units, max_ctas)
        if units > 0:
            # the kernel that can flush sums is a tenth slower
            if flushed.shape[0] > 0:
                self.kernel(*arguments, True).launch(
                    grid=(ctas, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream, use_pdl=True
                )
            else:
                self.kernel(*arguments, False).launch(
                    grid=(ctas, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream, use_pdl=True
                )

    @cute.kernel
    def kernel(
        self,
        data: Operands,
        mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        capacity: Int32,
        long: cutlass.Constexpr,
    ):
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // 128)
        shared = SmemAllocator().allocate(self.shared)
        ring = open_ring(shared, STAGES, GROUP_THREADS, MMA_WARPS, thread)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        data = data._replace(order=shared.order.get_tensor(cute.make_layout(SORTED)))
        if data.sizes[data.sizes.shape[0] - 1] <= capacity:
            self.sort_tiles(data, shared.sB.data_ptr(), thread)
            if group == 0:
                cute.arch.setmaxregister_decrease(REGISTERS_FILL)
                self.fill(ring, shared.sB.data_ptr(), data, thread)
            else:
                cute.arch.setmaxregister_increase(REGISTERS_MMA)
                sA = shared.sA.get_tensor(a_layout.outer, swizzle=a_layout.inner)
                sB = shared.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner)
                mma.set(warpgroup.Field.ACCUMULATE, True)
                fragments = self.fragments(mma, sA, sB, thread - 128)
                self.multiply_units(ring, shared.sA.data_ptr(), data, fragments, thread - 128, long)

    @cute.jit
    def sort_tiles(self, data, scratch, thread):
        """Sort token tiles by the length of their lists, descending: a tile's rank is the number of longer lists."""
        tiles = data.sizes.shape[0] - 1
        lengths = cute.make_tensor(cute.recast_ptr(scratch, dtype=Int32), cute.make_layout(SORTED))
        if tiles <= SORTED:
            for i in cutlass.range(thread, tiles, THREADS, unroll=1):
                lengths[i] = data.sizes[i]
        cute.arch.sync_threads()
        if tiles <= SORTED:
            for i in cutlass.range(thread, tiles, THREADS, unroll=1):
                own, rank = lengths[i], Int32(0)
                for j in cutlass.range(tiles, unroll=8):
                    other = lengths[j]
                    rank += Int32((other > own) | ((other == own) & (j < i)))
                data.order[rank] = Uint16(i)
        cute.arch.sync_threads()

    @cute.jit
    def tile_and_part(self, data, unit):
        rank = unit // data.slabs
        tile = widen(data.order[rank]) if data.sizes.shape[0] - 1 <= SORTED else rank
        return tile, unit - rank * data.slabs

    @cute.jit
    def list_extent(self, data, tile):
        return data.sizes[tile], tile * data.neurons.shape[1]

    @cute.jit
    def chunk_start(self, data, tile, chunk):
        return data.chunks[tile, chunk]

    @cute.jit
    def row_index(self, data, at):
        return widen(cute.make_tensor(data.neurons.iterator, cute.make_layout(1 << 30))[at])

    @cute.jit
    def gather(self, data, stage, part, rows, product, thread):
        if const_expr(self.products == 2):
            if product == 1:
                gather_columns(stage, data.w2, rows, part * TILE_N, thread)
            else:
                gather_columns(stage, data.w, rows, part * TILE_N, thread)
        else:
            gather_columns(stage, data.w, rows, part * TILE_N, thread)

    @cute.jit
    def load_coefficient(self, data, at, product):
        """The entry, and the bits of its coefficient or 0 if the entry holds them; nothing here waits for the loads."""
        word, bits = Uint32(data.entries[at]), Uint32(0)
        if const_expr(not self.from_entries):
            source = data.coefficients.iterator
            if const_expr(self.products == 2):
                source = data.coefficients2.iterator if product == 1 else source
            # in backward two 16-bit values share a word, see sampled_grad.py
            values = cute.recast_ptr(source, dtype=Uint16) + at * data.coefficients.stride[0]
            bits = cute.make_tensor(values, cute.make_layout(1))[0].to(Uint32)
        return word, bits

    @cute.jit
    def scatter_coefficient(self, data, tile, part, half, word, bits, valid):
        """Store a coefficient at (token, list position) in the tile of the group that owns the token."""
        if const_expr(self.from_entries):
            bits = power_pair(word, data.activation, self.dtype) >> 16
        mine = valid & (Int32((word >> 12) & Uint32(1)) == half)
        store_coefficient(tile, word, bits, mine)

    @cute.jit
    def fragments(self, mma: cute.TiledMma, sA, sB, thread):
        """A thread's fragments and sums."""
        leader = mma.get_slice(0)
        rA = mma.make_fragment_A(leader.partition_A(sA))
        rB = mma.make_fragment_B(leader.partition_B(sB))
        coordinates = mma.get_slice(thread & 127).partition_C(cute.make_identity_tensor((TILE_M // 2, TILE_N)))
        acc = cute.make_rmem_tensor(coordinates.shape[:3], Float32)
        row = cute.arch.make_warp_uniform(thread // 32) * 16 + (cute.arch.lane_idx() >> 2)
        return Fragments(mma, rA, rB, acc, coordinates, row)

    @cute.jit
    def multiply_unit(self, g, f, walk, tile, slab, length, long: cutlass.Constexpr):
        """Main loop over the list of a token tile, then 64 rows of `out`."""
        out = g.data.out
        f.acc.fill(0.0)
        walk = self.multiply_list(f.mma, (f.rA, f.rB, f.acc), g, walk, length, long)
        if g.data.bias.shape[0] > 0:
            self.add_bias(f, g.data.bias, slab)
        row = tile * TILE_M + f.row
        column = slab * TILE_N
        for i in range_constexpr(2):
            target = address(out, row + 8 * i, column)
            left = out.shape[1] - column if row + 8 * i < out.shape[0] else 0
            store_rounded(f.acc, i, TILE_N, target, left, g.lane, self.dtype)
        return walk

    @cute.jit
    def add_bias(self, f, bias, slab):
        """Add the bias of their columns to the sums."""
        for v in range_constexpr(TILE_N // 8):
            column = slab * TILE_N + f.coordinates[(0, 0, v), 0, 0][1]
            for j in range_constexpr(2):
                # columns beyond the last are not stored
                b = bias[cutlass.min(column + j, bias.shape[0] - 1)].to(Float32)
                for i in range_constexpr(2):
                    f.acc[(j, i, v), 0, 0] += b


def signature(spec: GatheredSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype = operands.DTYPES[spec.dtype]
    n, k, p = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8), cute.sym_int32()
    b = cute.sym_int32()
    second = spec.products == 2
    arguments = (
        operands.strided(dtype, p) if spec.products > 0 else None,
        operands.rows(dtype, n, k),
        operands.strided(dtype, p) if second else None,
        operands.rows(dtype, n, k) if second else None,
        operands.bias(dtype),
        operands.vector(Int32, cute.sym_int32()),
        *operands.lists(b),
        operands.rows(dtype, cute.sym_int32(), k),
        operands.vector(Float32, cute.sym_int32()),
        Int32(1),
        Int32(1),
        Int32(1),
    )
    return Gathered(spec), arguments
