"""Forward and backward of a batch whose non-zeros exceed the hybrid format's capacity; common/overflow.py says what is
computed and how those who compute meet.

A persistent, warp-specialized kernel, a cluster of two CTAs per pair of SMs. They have the same columns and share the
loads of B. Three warp groups, each of which goes through slices and phases:

    load   warp 0. TMA loads of A [128, 64] and B [256, 64] into a ring of stages; half of B comes from the peer. The
           other warps add up the gradients of the biases, and copy those of a given gate.
    mma    groups 1 and 2, 64 rows each: WGMMA 64 x 256 x 16 over the ring, then the epilogue. Values go to a buffer of
           [64, 128] in shared memory, which belongs to the group, and from there by TMA to global memory.

`Score` has tiles of 128 neurons, whose rows of w_gate and w_up are side by side in B: the 256 columns of one
accumulator are gate and up. A second one has dh. `Product` multiplies parts by other matrices. Hand-over:

    ring     PipelineTmaAsync: full = 1 arrival + bytes, empty = 8 mma warps of each of the two CTAs.
    ALL      all threads of a CTA, before and after one of them waits for the other CTAs.
    GROUP    + 0 or 1: 128 threads of an mma group, before and after they write its buffer.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int16, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import operands
from ..common.activation import above
from ..common.overflow import (
    GROUP_ROWS,
    ROW_TOKENS,
    BackwardPass,
    ForwardPass,
    Operands,
    Slice,
    Team,
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
from ..common.swizzle import swizzle_column, swizzle_piece
from ..common.values import pack, relu_pack, warp_sum
from ..specs import OverflowSpec
from .copies import Transfer, partition, store_peer, tma_load
from .mma import accumulate, store_matrices

TILE_M, TILE_N, TILE_K = 128, 256, 64
# neurons of a tile of `Score`, and columns of a group's buffer
HALF = TILE_N // 2
assert HALF == geometry.OVERFLOW_NEURONS
STAGES = 4
CLUSTER = 2
# tiles of a cluster, by rows, in a band, see `tile_of`
BAND = 8
THREADS = 384
assert TILE_M == ROW_TOKENS == 2 * GROUP_ROWS
# of the load group and of each mma group: three accumulators leave few for the loads
REGISTERS = 40, 232
feasible.check_register_split((REGISTERS[0], REGISTERS[1], REGISTERS[1]))
# threads that add up the gradients of the biases
ADDERS = 96


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads."""

    ALL = 1
    GROUP = 2


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    sA: Any  # [128, 64, stages]
    sB: Any  # [256, 64, stages]
    halves: Any  # the same memory as [128, 64, 2 * stages], K-major
    buffers: Any  # [2 groups][2 panels, 64 rows, 64 columns], swizzled
    totals: Any  # [mma warps]


class Factors(NamedTuple):
    """What a phase loads, computes with and stores, and the layouts of its stages."""

    a: Any  # transfers
    b: Any
    store: Any  # None if not by TMA
    mmas: Any
    layouts: Any


class Thread(NamedTuple):
    """Indices of a thread of the mma groups."""

    group: Any
    warp: Any  # in the group
    lane: Any


class Extent(NamedTuple):
    """Tiles of a cluster by rows and columns, and steps of K of one product."""

    m_tiles: Int32
    n_tiles: Int32
    k_tiles: Int32


class Dense:
    """What phases share, for one dtype."""

    def __init__(self, spec: OverflowSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.backward = spec.mode == "backward"
        # steps of K before sums are flushed
        self.longest = geometry.LONGEST_SUM[spec.dtype] // TILE_K

    # ---- host ----

    def stages(self, a_major: LayoutEnum, b_major: LayoutEnum) -> tuple[Any, Any]:
        """The smem layouts of A and B."""
        shape = (TILE_M, TILE_N, TILE_K)
        return (
            sm90.make_smem_layout_a(a_major, shape, self.dtype, STAGES),
            sm90.make_smem_layout_b(b_major, shape, self.dtype, STAGES),
        )

    def tiled_mma(self, columns: int, a_mode: Any, b_mode: Any) -> Any:
        """WGMMA of 64 rows per group and so many columns, added to the accumulator."""
        mma = sm90.make_trivial_tiled_mma(self.dtype, self.dtype, a_mode, b_mode, Float32, (2, 1, 1), (64, columns))
        mma.set(warpgroup.Field.ACCUMULATE, True)
        return mma

    def store_of(self, tensor: Any) -> Transfer:
        """A TMA store of a group's buffer."""
        layout = self.buffer_layout()
        return Transfer(
            *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, (GROUP_ROWS, HALF))
        )

    def buffer_layout(self):
        """The layout of a group's buffer."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (GROUP_ROWS, HALF), order=(0, 1))

    # ---- device ----

    def views(self, shared, a_layout, b_layout, half_layout=None) -> Views:
        """Tensors over the shared struct."""
        halves = None
        if half_layout is not None:
            halves = shared.sB.get_tensor(half_layout.outer, swizzle=half_layout.inner)
        return Views(
            sA=shared.sA.get_tensor(a_layout.outer, swizzle=a_layout.inner),
            sB=shared.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner),
            halves=halves,
            buffers=shared.buffers.data_ptr(),
            totals=shared.totals.get_tensor(cute.make_layout(8)),
        )

    @cute.jit
    def tile_of(self, index: Int32, extent: Extent) -> tuple[Int32, Int32]:
        """Row and column of this CTA's tile in the cluster tile `index`: bands of `BAND` rows of them, rows fastest.

        Clusters that run at a time then read few rows and columns, which fit in L2 together.
        """
        band = index // (BAND * extent.n_tiles)
        height = cutlass.min(extent.m_tiles - band * BAND, Int32(BAND))
        inside = index - band * BAND * extent.n_tiles
        column = inside // height
        row = band * BAND + inside - column * height
        return row * CLUSTER + cute.arch.block_idx()[0] % CLUSTER, column

    @cute.jit
    def acquire(self, ring, state, columns: Int32) -> Any:
        """Wait until a stage may be overwritten, expect A and so many `columns` of B, and return its barrier."""
        ring.sync_object_empty.wait(state.index, state.phase)
        barrier = ring.producer_get_barrier(state)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, (TILE_M + columns) * (TILE_K * 2))
        return barrier

    @cute.jit
    def states(self):
        """A consumer's states of the stage that is filled next and of the one to be released next."""
        kind = pipeline.PipelineUserType.Consumer
        return pipeline.make_pipeline_state(kind, STAGES), pipeline.make_pipeline_state(kind, STAGES)

    @cute.jit
    def thread_of(self) -> Thread:
        """Indices of an mma thread."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        return Thread(warp >> 2, warp & 3, cute.arch.lane_idx())

    @cute.jit
    def group_sync(self, at: Thread):
        """Barrier of an mma group."""
        cute.arch.barrier(barrier_id=Barrier.GROUP + at.group, number_of_threads=128)

    @cute.jit
    def open_buffer(self, at: Thread):
        """Wait until the group's buffer may be overwritten."""
        if at.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.group_sync(at)

    @cute.jit
    def send_buffer(self, s: Views, store: Transfer, pairs: cute.Tensor, at: Thread, place):
        """Write `pairs` [2 rows, 16] of 16-bit values to the buffer and store it as tile `place` of the result."""
        row = at.warp * 16 + (at.lane & 15)
        target = s.buffers + (at.group * (GROUP_ROWS * HALF) + row * 64)
        for v in range_constexpr(0, HALF // 8, 2):
            piece = swizzle_piece(at.lane, v % 8 + (at.lane >> 4))
            store_matrices(
                target + (v // 8 * (GROUP_ROWS * 64) + piece), [pairs[i, v + u] for u in range(2) for i in range(2)]
            )
        cute.arch.fence_proxy("async.shared", space="cta")
        self.group_sync(at)
        if at.warp == 0:
            layout = self.buffer_layout()
            pointer = s.buffers + at.group * (GROUP_ROWS * HALF)
            buffer = cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.dtype), layout.outer)
            rest = (None,) * cute.rank(store.tensor)
            tiles = cute.local_tile(store.tensor, (GROUP_ROWS, HALF), rest)
            source, target_tiles = cpasync.tma_partition(
                store.atom, 0, cute.make_layout(1), cute.group_modes(buffer, 0, 2), cute.group_modes(tiles, 0, 2)
            )
            cute.copy(store.atom, source, target_tiles[place])
            cute.arch.cp_async_bulk_commit_group()


class Score(Dense):
    """Gate and up at all places, in backward dh too, and what follows from them."""

    def factors(self, tokens, weights, parts) -> Factors:
        """`tokens`: x and, in backward, dy. `weights`: w_gate, w_up and, in backward, w_down."""
        mode, layout = OperandMajorMode.K, LayoutEnum.ROW_MAJOR
        a_layout, b_layout = self.stages(layout, layout)
        half_layout = sm90.make_smem_layout_b(layout, (TILE_M, HALF, TILE_K), self.dtype, 2 * STAGES)
        # [tokens, N, P]
        out = cute.make_tensor(parts.iterator, cute.select(parts.layout, mode=[1, 2, 0]))
        return Factors(
            a=tuple(tma_load(t, a_layout, (TILE_M, TILE_K)) for t in tokens),
            b=tuple(tma_load(w, half_layout, (HALF, TILE_K), CLUSTER) for w in weights),
            store=self.store_of(out),
            mmas=(self.tiled_mma(TILE_N, mode, mode), self.tiled_mma(HALF, mode, mode)),
            layouts=(a_layout, b_layout, half_layout),
        )

    @cute.jit
    def extent(self, o: Operands, here: Slice) -> Extent:
        """The tiles of a slice."""
        return Extent(
            cute.ceil_div(here.count, TILE_M * CLUSTER),
            cute.ceil_div(o.neurons, HALF),
            cute.ceil_div(o.columns, TILE_K),
        )

    @cute.jit
    def load(self, ring, state, f: Factors, s: Views, o: Operands, here: Slice, index: Int32, step: Int32):
        """Keep the ring full: x with w_gate and, if there is one, w_up; then, in backward, dy with w_down."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        mask = Int16((1 << CLUSTER) - 1)
        left = [partition(t, s.sA, (TILE_M, TILE_K), 0, 1) for t in f.a]
        right = [partition(t, s.halves, (HALF, TILE_K), rank, CLUSTER) for t in f.b]
        extent, before = self.extent(o, here), here.first // TILE_M
        while index < extent.m_tiles * extent.n_tiles:
            row, column = self.tile_of(index, extent)
            row += before
            for product in range_constexpr(len(f.a)):
                columns = Int32(HALF)
                if const_expr(product == 0):
                    columns = Int32(TILE_N) if o.gated != 0 else Int32(HALF)
                for k in cutlass.range(extent.k_tiles, unroll=1):
                    barrier = self.acquire(ring, state, columns)
                    into, source = left[product]
                    cute.copy(f.a[product].atom, source[None, row, k], into[None, state.index], tma_bar_ptr=barrier)
                    into, source = right[2 * product]
                    slot = into[None, 2 * state.index]
                    cute.copy(
                        f.b[2 * product].atom, source[None, column, k], slot, tma_bar_ptr=barrier, mcast_mask=mask
                    )
                    if const_expr(product == 0):
                        if o.gated != 0:
                            into, source = right[1]
                            slot = into[None, 2 * state.index + 1]
                            cute.copy(f.b[1].atom, source[None, column, k], slot, tma_bar_ptr=barrier, mcast_mask=mask)
                    state.advance()
            index += step
        return state, index - extent.m_tiles * extent.n_tiles

    @cute.jit
    def compute(self, ring, states, f: Factors, s: Views, o: Operands, here: Slice, index: Int32, step: Int32, thread):
        """Gate, up and, in backward, dh of the tiles, then the epilogue."""
        wide, narrow = f.mmas
        at = self.thread_of()
        leader = cute.make_layout(2, stride=128)(at.group)
        rA = wide.make_fragment_A(wide.get_slice(leader).partition_A(s.sA))
        rB = wide.make_fragment_B(wide.get_slice(leader).partition_B(s.sB))
        rHalf = narrow.make_fragment_B(narrow.get_slice(leader).partition_B(s.halves))
        shape = narrow.get_slice(thread).partition_shape_C((TILE_M, HALF))
        # gate, then up
        acc = cute.make_rmem_tensor(wide.get_slice(thread).partition_shape_C((TILE_M, TILE_N)), Float32)
        gate = cute.make_tensor(acc.iterator, cute.make_layout(shape))
        dh: Any = cute.make_rmem_tensor(shape, Float32) if const_expr(self.backward) else None
        extent = self.extent(o, here)
        while index < extent.m_tiles * extent.n_tiles:
            row, column = self.tile_of(index, extent)
            acc.fill(0.0)
            if o.gated != 0:
                states = accumulate(ring, wide, acc, rA, rB, 1, extent.k_tiles, states)
            else:
                states = accumulate(ring, narrow, gate, rA, rHalf, 2, extent.k_tiles, states)
                for e in range_constexpr(cute.size(gate)):
                    acc[cute.size(gate) + e] = Float32(1.0)
            if o.gate.shape[0] > 0:
                self.take_gates(o, here, acc, row, column, at)
            if const_expr(self.backward):
                dh.fill(0.0)
                states = accumulate(ring, narrow, dh, rA, rHalf, 2, extent.k_tiles, states)
            self.finish(f.store, s, o, here, acc, dh, row, column, at)
            index += step
        if at.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0)
        return states, index - extent.m_tiles * extent.n_tiles

    @cute.jit
    def take_gates(self, o: Operands, here: Slice, acc: cute.Tensor, row: Int32, column: Int32, at: Thread):
        """The given gates in place of sums."""
        token = here.first + row * TILE_M + at.group * GROUP_ROWS + at.warp * 16 + (at.lane >> 2)
        first = column * HALF + (at.lane & 3) * 2
        for v in range_constexpr(HALF // 8):
            for i in range_constexpr(2):
                pair = given_pair(o.gate, token + 8 * i, first + 8 * v, self.dtype)
                for j in range_constexpr(2):
                    acc[(j, i, v), 0, 0] = pair[j]

    @cute.jit
    def finish(self, store: Transfer, s: Views, o: Operands, here: Slice, acc: cute.Tensor, dh, row: Int32, column, at):
        """Compute and store the parts of 64 tokens and 128 neurons."""
        token = row * TILE_M + at.group * GROUP_ROWS + at.warp * 16 + (at.lane >> 2)
        first = column * HALF + (at.lane & 3) * 2
        gates, h, d_gate, d_up = (cute.make_rmem_tensor((2, HALF // 8), Uint32) for _ in range(4))
        total = Float32(0.0)
        # first of all, as sums take twice the registers
        for v in range_constexpr(HALF // 8):
            *bias, levels = gate_terms(o, first + 8 * v)
            for i in range_constexpr(2):
                sums = [acc[(j, i, v), 0, 0] + bias[j] for j in range(2)]
                # tokens past the last one would have the gates of the bias
                pair = above(relu_pack(*sums, self.dtype), levels, self.dtype)
                gates[i, v] = Uint32(cutlass.select_(token + 8 * i < here.count, pair, Uint32(0)))
        for v in range_constexpr(HALF // 8):
            bias = bias_pair(o.b_up, first + 8 * v)
            for i in range_constexpr(2):
                dhs: Any = None
                ups = [acc[(j, i, HALF // 8 + v), 0, 0] + bias[j] for j in range(2)]
                if const_expr(self.backward):
                    dhs = [dh[(j, i, v), 0, 0] for j in range(2)]
                packed, magnitudes = pointwise(gates[i, v], ups, dhs, o, self.dtype)
                for j in range_constexpr(2):
                    total += magnitudes[j]
                h[i, v] = packed[0]
                if const_expr(self.backward):
                    d_gate[i, v], d_up[i, v] = packed[1], packed[2]
        lines = 2 * row + at.group
        line, row = lines + here.first // GROUP_ROWS, row + here.first // ROW_TOKENS
        if const_expr(self.backward):
            self.open_buffer(at)
            self.send_buffer(s, store, d_gate, at, (None, lines, column, 0))
            self.add_columns(s, o, 0, line, column, at)
            if o.gated != 0:
                self.open_buffer(at)
                self.send_buffer(s, store, d_up, at, (None, lines, column, 1))
                self.add_columns(s, o, 1, line, column, at)
            self.open_buffer(at)
            self.send_buffer(s, store, h, at, (None, lines, column, 1 + o.gated))
        else:
            total = warp_sum(total)
            if at.lane == 0:
                s.totals[at.group * 4 + at.warp] = total
            self.open_buffer(at)
            if at.warp == 0:
                total = Float32(0.0)
                for warp in range_constexpr(4):
                    total += s.totals[at.group * 4 + warp]
                if at.lane == 0 and row < o.sums.shape[0]:
                    o.sums[row, 2 * column + at.group] = total
            self.send_buffer(s, store, h, at, (None, lines, column, 0))

    @cute.jit
    def add_columns(self, s, o, part: cutlass.Constexpr, line, column, at):
        """Store the sums over the 64 tokens of the group's buffer, a neuron per thread."""
        own = at.warp * 32 + at.lane
        neuron = column * HALF + own
        if line < o.sums.shape[0] and neuron < o.neurons:
            source = s.buffers + (at.group * (GROUP_ROWS * HALF) + (own >> 6) * (GROUP_ROWS * 64))
            total = Float32(0.0)
            for r in cutlass.range(GROUP_ROWS, unroll=8):
                value = cute.make_tensor(source + (r * 64 + swizzle_column(r, own & 63)), cute.make_layout(1))
                total += value[0].to(Float32)
            o.sums[line, part * o.neurons + neuron] = total


class Product(Dense):
    """Parts times other matrices. B is stored by rows of the sum's index, so N-major."""

    def __init__(self, spec: OverflowSpec, by_token: bool):
        super().__init__(spec)
        self.by_token = by_token

    def factors(self, parts, b, out) -> Factors:
        """`parts`: [P, tokens, N]; `b`: two matrices by rows of the sum's index; `out`: None if not stored by TMA."""
        # [rows, terms, P]
        left = cute.make_tensor(
            parts.iterator, cute.select(parts.layout, mode=[1, 2, 0] if self.by_token else [2, 1, 0])
        )
        mode = OperandMajorMode.K if self.by_token else OperandMajorMode.MN
        major = LayoutEnum.ROW_MAJOR if self.by_token else LayoutEnum.COL_MAJOR
        a_layout, b_layout = self.stages(major, LayoutEnum.COL_MAJOR)
        return Factors(
            a=tma_load(left, a_layout, (TILE_M, TILE_K)),
            b=tuple(tma_load(transposed(t), b_layout, (TILE_N, TILE_K), CLUSTER) for t in b),
            store=None if out is None else self.store_of(out),
            mmas=self.tiled_mma(TILE_N, mode, OperandMajorMode.MN),
            layouts=(a_layout, b_layout),
        )

    @cute.jit
    def extent(self, o: Operands, here: Slice) -> Extent:
        """The tiles of a slice; none if no result is wanted."""
        n_tiles = cute.ceil_div(o.columns, TILE_N)
        if const_expr(self.by_token):
            m_tiles = o.by_token * cute.ceil_div(here.count, TILE_M * CLUSTER)
            return Extent(m_tiles, n_tiles, cute.ceil_div(o.neurons, TILE_K))
        m_tiles = o.weights.wanted * o.parts * cute.ceil_div(o.neurons, TILE_M * CLUSTER)
        return Extent(m_tiles, n_tiles, cute.ceil_div(here.count, TILE_K))

    @cute.jit
    def load(self, ring, state, f: Factors, s: Views, o: Operands, here: Slice, index: Int32, step: Int32):
        """Keep the ring full."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        mask = Int16((1 << CLUSTER) - 1)
        a_s, a_t = partition(f.a, s.sA, (TILE_M, TILE_K), 0, 1)
        (b_s, b_t), (_, c_t) = (partition(t, s.sB, (TILE_N, TILE_K), rank, CLUSTER) for t in f.b)
        extent, before, second = self.extent(o, here), Int32(0), Int32(1)
        if const_expr(not self.by_token):
            before, second = here.first // TILE_K, o.parts - 1
        while index < extent.m_tiles * extent.n_tiles:
            row, column = self.tile_of(index, extent)
            row, first, end = self.terms(row, o, extent)
            for part in cutlass.range(first, end, unroll=1):
                for k in cutlass.range(extent.k_tiles, unroll=1):
                    barrier = self.acquire(ring, state, Int32(TILE_N))
                    slot = b_s[None, state.index]
                    cute.copy(f.a.atom, a_t[None, row, k, part], a_s[None, state.index], tma_bar_ptr=barrier)
                    if part < second:
                        cute.copy(
                            f.b[0].atom, b_t[None, column, k + before], slot, tma_bar_ptr=barrier, mcast_mask=mask
                        )
                    else:
                        cute.copy(
                            f.b[1].atom, c_t[None, column, k + before], slot, tma_bar_ptr=barrier, mcast_mask=mask
                        )
                    state.advance()
            index += step
        return state, index - extent.m_tiles * extent.n_tiles

    @cute.jit
    def terms(self, row: Int32, o: Operands, extent: Extent):
        """Row of a tile in its part, and the first and the end of the parts that it is a sum over."""
        if const_expr(self.by_token):
            return row, Int32(0), cutlass.max(o.parts - 1, Int32(1))
        rows = CLUSTER * extent.m_tiles // o.parts
        part = row // rows
        return row - part * rows, part, part + 1

    @cute.jit
    def compute(self, ring, states, f: Factors, s: Views, o: Operands, here: Slice, index: Int32, step: Int32, thread):
        """Main loop and epilogue; sums of many terms are flushed to memory in between."""
        mma, at = f.mmas, self.thread_of()
        leader = mma.get_slice(cute.make_layout(2, stride=128)(at.group))
        rA = mma.make_fragment_A(leader.partition_A(s.sA))
        rB = mma.make_fragment_B(leader.partition_B(s.sB))
        acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((TILE_M, TILE_N)), Float32)
        extent = self.extent(o, here)
        while index < extent.m_tiles * extent.n_tiles:
            row, column = self.tile_of(index, extent)
            row, first, end = self.terms(row, o, extent)
            steps, done = (end - first) * extent.k_tiles, Int32(0)
            acc.fill(0.0)
            while steps - done > self.longest:
                states = accumulate(ring, mma, acc, rA, rB, 1, Int32(self.longest), states)
                flush_sums(acc, o.flushed, 0, done == 0)
                done += self.longest
            states = accumulate(ring, mma, acc, rA, rB, 1, steps - done, states)
            if done > 0:
                add_flushed(acc, o.flushed, 0)
            if const_expr(self.by_token):
                self.store_rounded(f.store, s, o, acc, row + here.first // TILE_M, column, at)
            else:
                self.store_sums(o, here, acc, first, row, column, at)
            index += step
        if const_expr(self.by_token):
            if at.warp == 0:
                cute.arch.cp_async_bulk_wait_group(0)
        return states, index - extent.m_tiles * extent.n_tiles

    @cute.jit
    def store_rounded(self, store: Transfer, s: Views, o: Operands, acc: cute.Tensor, row: Int32, column, at: Thread):
        """Add the bias, round, and store 64 rows."""
        for half in range_constexpr(2):
            pairs = cute.make_rmem_tensor((2, HALF // 8), Uint32)
            for v in range_constexpr(HALF // 8):
                bias = (Float32(0.0), Float32(0.0))
                if const_expr(not self.backward):
                    bias = bias_pair(o.b_down, column * TILE_N + half * HALF + 8 * v + (at.lane & 3) * 2)
                for i in range_constexpr(2):
                    low, high = (acc[(j, i, half * (HALF // 8) + v), 0, 0] + bias[j] for j in range(2))
                    pairs[i, v] = pack(low, high, self.dtype)
            self.open_buffer(at)
            self.send_buffer(s, store, pairs, at, (None, 2 * row + at.group, 2 * column + half))

    @cute.jit
    def store_sums(self, o, here, acc, part, row, column, at):
        """Store 64 rows, rounded or as sums, to the matrices of their part."""
        targets = targets_of(o, part)
        first = row * TILE_M + at.group * GROUP_ROWS + at.warp * 16 + (at.lane >> 2)
        left = column * TILE_N + (at.lane & 3) * 2
        for i in range_constexpr(2):
            for v in range_constexpr(TILE_N // 8):
                two = [acc[(j, i, v), 0, 0] for j in range(2)]
                store_gradients(o, here, targets, first + 8 * i, left + 8 * v, two, self.dtype)


class Pass(Dense):
    """The kernel of a pass."""

    def __init__(self, spec: OverflowSpec):
        super().__init__(spec)
        self.score, self.by_token, self.by_neuron = Score(spec), Product(spec, True), Product(spec, False)

    @cute.jit
    def launch(self, tokens, weights, rows, parts, factors, out, o, sizes, capacity, max_ctas, stream):
        """`tokens`, `weights`: see `Score.factors`. `rows`: what `factors` are multiplied by; `out`: y or dx."""

        @cute.struct
        class Shared:
            ring: cute.struct.MemRange[Int64, STAGES * 2]
            totals: cute.struct.MemRange[Float32, 8]
            team: cute.struct.MemRange[Int32, 2]
            sA: cute.struct.Align[cute.struct.MemRange[self.dtype, TILE_M * TILE_K * STAGES], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, TILE_N * TILE_K * STAGES], 1024]
            buffers: cute.struct.Align[cute.struct.MemRange[self.dtype, 2 * GROUP_ROWS * HALF], 1024]

        self.shared = feasible.check_shared_memory(Shared)
        score = self.score.factors(tokens, weights, parts)
        by_token = self.by_token.factors(factors, rows, out)
        by_neuron = self.by_neuron.factors(factors, tokens, None) if const_expr(self.backward) else None
        self.kernel(score, by_token, by_neuron, parts, o, sizes, capacity).launch(
            grid=(max_ctas // CLUSTER * CLUSTER, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(CLUSTER, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        score: Factors,
        by_token: Factors,
        by_neuron: Any,
        parts: cute.Tensor,
        o: Operands,
        sizes: cute.Tensor,
        capacity: Int32,
    ):
        shared = SmemAllocator().allocate(self.shared)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if sizes[sizes.shape[0] - 1] > capacity:
            thread, group, warp_index, ring = self.enter(shared)
            self.enlist(shared, o, thread)
            team, factors = self.team(shared), (score, by_token, by_neuron)
            if team.index < team.size:
                if group == 0:
                    cute.arch.setmaxregister_decrease(REGISTERS[0])
                    self.load(shared, ring, factors, parts, o, thread, warp_index)
                else:
                    cute.arch.setmaxregister_increase(REGISTERS[1])
                    self.compute(shared, ring, factors, o, thread)
            self.leave()

    @cute.jit
    def enter(self, shared):
        """This thread, its group and warp, and the ring of stages, ready in both CTAs."""
        thread = cute.arch.thread_idx()[0]
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=shared.ring.data_ptr(),
            num_stages=STAGES,
            # not used: products differ
            tx_count=(TILE_M + TILE_N) * TILE_K * 2,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CLUSTER * 8),
            cta_layout_vmnk=cute.make_layout((1, 1, CLUSTER, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(CLUSTER, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(CLUSTER, 1))
        group = cute.arch.make_warp_uniform(thread // 128)
        return thread, group, cute.arch.make_warp_uniform(cute.arch.warp_idx()), ring

    @cute.jit
    def enlist(self, shared, o: Operands, thread: Int32):
        """Find the index of this cluster among those that compute, and their number; the first CTA tells its peer."""
        team = shared.team.data_ptr()
        if thread == 0 and cute.arch.block_idx_in_cluster() == 0:
            found = enlist(o.counters, cute.arch.grid_dim()[0] // CLUSTER)
            for peer in range_constexpr(CLUSTER):
                for i in range_constexpr(2):
                    store_peer(team + i, Int32(peer), found[i])
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def team(self, shared) -> Team:
        """The same, read again where it is needed: so it takes no registers in the main loops."""
        told = shared.team.get_tensor(cute.make_layout(2))
        return Team(cute.arch.make_warp_uniform(told[0]), cute.arch.make_warp_uniform(told[1]))

    @cute.jit
    def meet(self, shared, o: Operands, met: Int32, thread: Int32):
        """Wait for all CTAs; return how often they have met.

        TMA stores and loads parts by the async proxy. Who has waited for a store sees it by the generic one, by which
        CTAs meet, and the fence behind makes loads that follow see it. That before is for reads of what is overwritten.
        """
        met += 1
        arrivals = met * self.team(shared).size * CLUSTER
        cute.arch.fence_proxy("async")
        cute.arch.barrier(barrier_id=Barrier.ALL, number_of_threads=THREADS)
        if thread == 0:
            arrive_and_wait(o.counters, arrivals)
        cute.arch.barrier(barrier_id=Barrier.ALL, number_of_threads=THREADS)
        cute.arch.fence_proxy("async")
        return met

    @cute.jit
    def load(self, shared, ring, factors, parts: cute.Tensor, o: Operands, thread: Int32, warp_index: Int32):
        """The load group."""
        score, by_token, by_neuron = factors
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        first, met = Int32(0), Int32(0)
        while first < o.tokens:
            here, team = slice_at(o, first), self.team(shared)
            if warp_index == 0:
                s = self.views(shared, *score.layouts)
                state, _ = self.score.load(ring, state, score, s, o, here, team.index, team.size)
            met, team = self.meet(shared, o, met, thread), self.team(shared)
            if warp_index == 0:
                s = self.views(shared, *by_token.layouts)
                state, index = self.by_token.load(ring, state, by_token, s, o, here, team.index, team.size)
                if const_expr(self.backward):
                    s = self.views(shared, *by_neuron.layouts)
                    state, _ = self.by_neuron.load(ring, state, by_neuron, s, o, here, index, team.size)
            elif const_expr(self.backward):
                own = (team.index * CLUSTER + cute.arch.block_idx()[0] % CLUSTER) * ADDERS + thread - 32
                threads = team.size * CLUSTER * ADDERS
                if o.d_gate.shape[0] > 0:
                    copy_gradients(o, parts, here, own, threads)
                if here.is_last * o.weights.wanted != 0:
                    add_biases(o, own, threads, self.dtype)
            met = self.meet(shared, o, met, thread)
            first += here.count

    @cute.jit
    def compute(self, shared, ring, factors, o: Operands, thread: Int32):
        """The mma groups."""
        score, by_token, by_neuron = factors
        states = self.states()
        first, met, own = Int32(0), Int32(0), thread - 128
        while first < o.tokens:
            here, team = slice_at(o, first), self.team(shared)
            s = self.views(shared, *score.layouts)
            states, _ = self.score.compute(ring, states, score, s, o, here, team.index, team.size, own)
            met, team = self.meet(shared, o, met, thread), self.team(shared)
            s = self.views(shared, *by_token.layouts)
            states, index = self.by_token.compute(ring, states, by_token, s, o, here, team.index, team.size, own)
            if const_expr(self.backward):
                s = self.views(shared, *by_neuron.layouts)
                states, _ = self.by_neuron.compute(ring, states, by_neuron, s, o, here, index, team.size, own)
            met = self.meet(shared, o, met, thread)
            first += here.count

    @cute.jit
    def leave(self):
        """Wait until the peer has released its last stage and received its half of B."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def transposed(matrix: Any) -> Any:
    """A matrix as its transpose."""
    return cute.make_tensor(matrix.iterator, cute.select(matrix.layout, mode=[1, 0]))


class Forward(ForwardPass, Pass):
    """Forward."""


class Backward(BackwardPass, Pass):
    """Backward."""


def signature(spec: OverflowSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return (Forward if spec.mode == "forward" else Backward)(spec), arguments(spec)
