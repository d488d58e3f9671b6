"""The up and down projections of few tokens by dense products, where many neurons fire:
h = gate * up with up = x . w_up + b_up, y = h . w_down + b_down, with the gate from TwELL; h is rounded, and zero where
the gate is. So it is for relu; for the other activations see common/activation.py. Without an up projection, up is 1.

All CTAs return at once unless `up_down_token`, launched before, left the tokens to this kernel. So a CUDA graph can
hold both, and the device chooses. A phase begins when the one before has ended everywhere:

    up      units of 256 neurons and `tokens` tokens; h goes to `parts`.
    down    units of 256 columns and `tokens` tokens, and of a part of the neurons where there are too few units.
    add     all add up the sums of the parts, if there are several, in their order.

Persistent and warp-specialized, one CTA per SM, a cluster of two CTAs per unit, each with 128 rows of the weights; they
share the loads of tokens. Three warp groups:

    load     warp 0. TMA loads of weights [128, 64] and tokens [tokens, 64] into a ring of stages.
    expand   warps 1 to 3. The gates of a unit, from TwELL to a tile in shared memory, while the products are computed.
    mma      groups 1 and 2, 64 rows of the weights each: WGMMA 64 x tokens x 16 over the ring. h replaces the gates in
             their tile, and goes from there to memory, as y does.

As in overflow.py all who compute must run at the same time, and so enlist. Hand-over:

    ring           PipelineTmaAsync: full = 1 arrival + bytes, empty = 8 mma warps of each of the two CTAs.
    ALL            all threads of a CTA, before and after one of them waits for the other CTAs.
    EXPAND         96 expand threads: the tile is zero, and may be filled.
    GATES          expand and mma threads, twice for each unit: the tile has its gates; it has been read.
    GROUP          + 0 or 1: 128 threads of an mma group, before and after they write its part of the tile.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int16, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import operands
from ..common.activation import hidden, power
from ..common.copies import address, load_values, store_values
from ..common.mma import load_matrices_transposed
from ..common.overflow import arrive_and_wait, enlist
from ..common.swizzle import swizzle_column, swizzle_piece
from ..common.values import MAGNITUDE, high_to_float, low_to_float, pack
from ..specs import DenseHalvesSpec
from .copies import Transfer, partition, store_peer, tma_load
from .mma import accumulate, store_matrices_transposed

# rows of weights of a CTA, and of an mma group, the width of a panel of the tile
ROWS, PANEL = 128, 64
CLUSTER = 2
UNIT = CLUSTER * ROWS
assert UNIT == geometry.TILE
TILE_K = 64
THREADS = 384
MMA_THREADS, EXPAND_THREADS = 256, 96
REGISTERS = 88, 208
feasible.check_register_split((REGISTERS[0], REGISTERS[1], REGISTERS[1]))


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads."""

    ALL = 1
    EXPAND = 2
    GATES = 3
    GROUP = 4


class Operands(NamedTuple):
    """Operands in global memory that are accessed without TMA; an empty bias stands for none."""

    words: Any
    spill: Any
    b_up: Any
    b_down: Any
    y: Any
    parts: Any  # h [tokens, N]
    sums: Any  # fp32 [parts * tokens, K], or empty
    seen: Any  # int32 [geometry.TOKEN_COUNTERS], of `up_down_token`
    counters: Any  # int32 [geometry.OVERFLOW_COUNTERS], zeros
    gated: Any
    width: Any  # words of a tile of TwELL
    activation: Any  # see common/activation.py
    neurons: Any


class Extent(NamedTuple):
    """Units of a phase by rows of weights, tokens and parts, and steps of the sum of a part and of all."""

    columns: Int32
    rows: Int32
    parts: Int32
    steps: Int32
    all_steps: Int32


class Factors(NamedTuple):
    """What a phase loads and computes with."""

    a: Transfer
    b: Transfer
    mma: Any
    a_layout: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    sA: Any
    sB: Any
    tile: Any  # address of [2 panels, tokens, 64]: gates, h or y, swizzled


class DenseHalves:
    """For one dtype and number of tokens per unit."""

    def __init__(self, spec: DenseHalvesSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.tokens = spec.tokens
        self.stage_bytes = (ROWS + self.tokens) * TILE_K * 2
        self.stages = (feasible.SMEM_PER_CTA - 2048 - ROWS * self.tokens * 2) // self.stage_bytes

    # ---- host ----

    def factors(self, weights: Any, a_layout: Any, mode: Any, tokens: Any, b_layout: Any) -> Factors:
        """`weights` [rows, terms] and `tokens` [tokens, terms]."""
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, mode, OperandMajorMode.K, Float32, (2, 1, 1), (64, self.tokens)
        )
        return Factors(
            tma_load(weights, a_layout, (ROWS, TILE_K)),
            tma_load(tokens, b_layout, (self.tokens, TILE_K), CLUSTER),
            mma,
            a_layout,
        )

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        words: cute.Tensor,
        spill: cute.Tensor,
        w_up: cute.Tensor,
        w_down: cute.Tensor,
        b_up: cute.Tensor,
        b_down: cute.Tensor,
        y: cute.Tensor,
        parts: cute.Tensor,
        sums: cute.Tensor,
        seen: cute.Tensor,
        counters: cute.Tensor,
        gated: Int32,
        words_per_tile: Int32,
        activation: Int32,
        max_clusters: Int32,
        stream: cuda.CUstream,
    ):
        shape, stages = (ROWS, self.tokens, TILE_K), self.stages
        up_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, stages)
        down_layout = sm90.make_smem_layout_a(LayoutEnum.COL_MAJOR, shape, self.dtype, stages)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.dtype, stages)
        by_column = cute.make_tensor(w_down.iterator, cute.select(w_down.layout, mode=[1, 0]))
        up = self.factors(w_up, up_layout, OperandMajorMode.K, x, b_layout)
        down = self.factors(by_column, down_layout, OperandMajorMode.MN, parts, b_layout)

        @cute.struct
        class Shared:
            ring: cute.struct.MemRange[Int64, stages * 2]
            team: cute.struct.MemRange[Int32, 2]
            sA: cute.struct.Align[cute.struct.MemRange[self.dtype, ROWS * TILE_K * stages], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, self.tokens * TILE_K * stages], 1024]
            tile: cute.struct.Align[cute.struct.MemRange[self.dtype, ROWS * self.tokens], 1024]

        self.shared = feasible.check_shared_memory(Shared)
        form = (gated, words_per_tile, activation, w_down.shape[0])
        o = Operands(words, spill, b_up, b_down, y, parts, sums, seen, counters, *form)
        if y.shape[0] > 0:
            self.kernel(up, down, b_layout, o).launch(
                grid=(CLUSTER * max_clusters, 1, 1),
                block=(THREADS, 1, 1),
                cluster=(CLUSTER, 1, 1),
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=True,
            )

    # ---- device ----

    @cute.kernel
    def kernel(self, up: Factors, down: Factors, b_layout: cute.ComposedLayout, o: Operands):
        shared = SmemAllocator().allocate(self.shared)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if o.seen[geometry.TOTAL] == geometry.BY_DENSE_HALVES:
            thread = cute.arch.thread_idx()[0]
            ring = self.make_ring(shared)
            pipeline.pipeline_init_arrive(cluster_shape_mn=(CLUSTER, 1), is_relaxed=True)
            pipeline.pipeline_init_wait(cluster_shape_mn=(CLUSTER, 1))
            self.enlist(shared, o, thread)
            team = shared.team.get_tensor(cute.make_layout(2))
            index, size = cute.arch.make_warp_uniform(team[0]), cute.arch.make_warp_uniform(team[1])
            if index < size:
                if cute.arch.make_warp_uniform(thread // 128) == 0:
                    cute.arch.setmaxregister_decrease(REGISTERS[0])
                    self.load_and_expand(ring, shared, up, down, b_layout, o, index, size, thread)
                else:
                    cute.arch.setmaxregister_increase(REGISTERS[1])
                    self.compute(ring, shared, up, down, b_layout, o, index, size, thread - 128)
            # the peer has released its last stage, and received its half of the tokens
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def make_ring(self, shared: Any) -> Any:
        """The ring of stages; clusters must synchronise before they use it."""
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=shared.ring.data_ptr(),
            num_stages=self.stages,
            tx_count=self.stage_bytes,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CLUSTER * 8),
            cta_layout_vmnk=cute.make_layout((1, 1, CLUSTER, 1)),
            defer_sync=True,
        )

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
    def meet(self, o: Operands, size: Int32, met: Int32, thread: Int32):
        """Wait for all CTAs, which have met `met` times with this one.

        TMA loads read h by the async proxy, while it is stored by the generic one.
        """
        cute.arch.fence_proxy("async")
        cute.arch.barrier(barrier_id=Barrier.ALL, number_of_threads=THREADS)
        if thread == 0:
            arrive_and_wait(o.counters, met * size * CLUSTER)
        cute.arch.barrier(barrier_id=Barrier.ALL, number_of_threads=THREADS)
        cute.arch.fence_proxy("async")

    def views(self, shared, a_layout, b_layout) -> Views:
        """Tensors over the shared struct."""
        return Views(
            sA=shared.sA.get_tensor(a_layout.outer, swizzle=a_layout.inner),
            sB=shared.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner),
            tile=shared.tile.data_ptr(),
        )

    @cute.jit
    def up_extent(self, o: Operands, terms: Int32) -> Extent:
        """The units of phase "up", whose sums have so many terms; no steps without an up projection."""
        rows, steps = cute.ceil_div(o.y.shape[0], self.tokens), cute.ceil_div(terms, TILE_K)
        steps = steps if o.gated != 0 else Int32(0)
        return Extent(cute.ceil_div(o.neurons, UNIT), rows, Int32(1), steps, steps)

    @cute.jit
    def down_extent(self, o: Operands, clusters: Int32) -> Extent:
        """The units of phase "down": as many parts as clusters can compute at a time, or as sums may be long."""
        columns, rows = cute.ceil_div(o.y.shape[1], UNIT), cute.ceil_div(o.y.shape[0], self.tokens)
        steps = cute.ceil_div(o.neurons, TILE_K)
        longest = geometry.LONGEST_SUM["bfloat16" if const_expr(self.dtype is cutlass.BFloat16) else "float16"]
        parts = cutlass.max(clusters // (columns * rows), cute.ceil_div(steps, longest // TILE_K))
        parts = cutlass.min(cutlass.max(parts, Int32(1)), cutlass.min(steps, Int32(geometry.MOST_PARTS)))
        each = cute.ceil_div(steps, parts)
        return Extent(columns, rows, cute.ceil_div(steps, each), each, steps)

    @cute.jit
    def unit_of(self, index: Int32, extent: Extent):
        """Column, row and part of a unit: tokens fastest, so that those who run at a time read few weights."""
        row, rest = index % extent.rows, index // extent.rows
        return rest // extent.parts, row, rest % extent.parts

    @cute.jit
    def load_and_expand(self, ring, shared, up: Factors, down: Factors, b_layout, o, index, size, thread: Int32):
        """The first group: loads by warp 0, gates by the others."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        extent = self.up_extent(o, up.a.tensor.shape[1])
        if warp == 0:
            state = self.load(ring, state, up, self.views(shared, up.a_layout, b_layout), extent, index, size)
        else:
            self.expand(shared.tile.data_ptr(), o, extent, index, size, thread - 32)
        self.meet(o, size, Int32(1), thread)
        extent = self.down_extent(o, size)
        if warp == 0:
            self.load(ring, state, down, self.views(shared, down.a_layout, b_layout), extent, index, size)
        if extent.parts > 1:
            self.meet(o, size, Int32(2), thread)

    @cute.jit
    def load(self, ring, state, f: Factors, s: Views, extent: Extent, index: Int32, size: Int32):
        """Keep the ring full: weights for this CTA, half of the tokens for both."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        a_s, a_t = partition(f.a, s.sA, (ROWS, TILE_K), 0, 1)
        b_s, b_t = partition(f.b, s.sB, (self.tokens, TILE_K), rank, CLUSTER)
        while index < extent.columns * extent.rows * extent.parts:
            column, row, part = self.unit_of(index, extent)
            first = part * extent.steps
            for k in cutlass.range(first, cutlass.min(first + extent.steps, extent.all_steps), unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                source = a_t[None, CLUSTER * column + rank, k]
                cute.copy(f.a.atom, source, a_s[None, state.index], tma_bar_ptr=barrier)
                cute.copy(
                    f.b.atom, b_t[None, row, k], b_s[None, state.index], tma_bar_ptr=barrier,
                    mcast_mask=Int16((1 << CLUSTER) - 1),
                )  # fmt: skip
                ring.producer_commit(state)
                state.advance()
            index += size
        return state

    # ---- gates ----

    @cute.jit
    def expand(self, tile, o: Operands, extent: Extent, index: Int32, size: Int32, thread: Int32):
        """Write the gates of this CTA's units to the tile, one after the other."""
        rank, lane = cute.arch.block_idx_in_cluster(), cute.arch.lane_idx()
        zeros, begun = cute.make_rmem_tensor((4,), Uint32), Int32(0)
        zeros.fill(0)
        while index < extent.columns * extent.rows:
            column, row, _ = self.unit_of(index, extent)
            if begun > 0:
                self.gates_sync()
            begun += 1
            for piece in cutlass.range(thread, ROWS * self.tokens // 8, EXPAND_THREADS, unroll=4):
                store_values(tile + piece * 8, zeros)
            cute.arch.barrier(barrier_id=Barrier.EXPAND, number_of_threads=EXPAND_THREADS)
            for t in cutlass.range(thread // 32, self.tokens, EXPAND_THREADS // 32, unroll=4):
                m = row * self.tokens + t
                if m < o.y.shape[0]:
                    self.expand_token(tile, o, m, t, column, rank, lane)
            self.gates_sync()
            index += size

    @cute.jit
    def gates_sync(self):
        """Barrier of all who write or read the gates' tile."""
        cute.arch.barrier(barrier_id=Barrier.GATES, number_of_threads=MMA_THREADS + EXPAND_THREADS)

    @cute.jit
    def expand_token(self, tile, o: Operands, m: Int32, t: Int32, column: Int32, rank: Int32, lane: Int32):
        """Write the gates of a token's tile of TwELL that belong to this CTA, half of it."""
        count = o.words[m, column * o.width]
        if count < o.width:
            for i in cutlass.range(lane, count, 32, unroll=1):
                word = Uint32(o.words[m, column * o.width + 1 + i])
                neuron = Int32(word & Uint32(0xFFFF)) - column * UNIT - rank * ROWS
                if neuron >= 0 and neuron < ROWS:
                    place = (neuron // PANEL * self.tokens + t) * PANEL + swizzle_column(t, neuron % PANEL)
                    target = cute.make_tensor(cute.recast_ptr(tile + place, dtype=Uint16), cute.make_layout(1))
                    target[0] = Uint16(word >> 16)
        elif lane < ROWS // 8:
            quad = load_values(address(o.spill, m, column * UNIT + rank * ROWS + lane * 8))
            place = (lane // 8 * self.tokens + t) * PANEL + swizzle_piece(t, lane % 8)
            store_values(tile + place, quad)

    # ---- products ----

    @cute.jit
    def compute(self, ring, shared, up: Factors, down: Factors, b_layout, o: Operands, index, size, thread: Int32):
        """The mma groups."""
        kind = pipeline.PipelineUserType.Consumer
        states = tuple(pipeline.make_pipeline_state(kind, self.stages) for _ in range(2))
        s, extent = self.views(shared, up.a_layout, b_layout), self.up_extent(o, up.a.tensor.shape[1])
        states = self.up_phase(ring, states, up.mma, s, o, extent, index, size, thread)
        self.meet(o, size, Int32(1), thread + 128)
        s, extent = self.views(shared, down.a_layout, b_layout), self.down_extent(o, size)
        self.down_phase(ring, states, down.mma, s, o, extent, index, size, thread)
        if extent.parts > 1:
            self.meet(o, size, Int32(2), thread + 128)
            own = (CLUSTER * index + cute.arch.block_idx_in_cluster()) * MMA_THREADS + thread
            self.add_parts(o, extent.parts, own, CLUSTER * MMA_THREADS * size)

    @cute.jit
    def up_phase(self, ring, states, mma, s: Views, o: Operands, extent: Extent, index, size, thread: Int32):
        """h of all units of this cluster; returns the states of the ring."""
        rA, rB, acc = self.fragments(mma, s, thread)
        rank, group = cute.arch.block_idx_in_cluster(), cute.arch.make_warp_uniform(thread // 128)
        while index < extent.columns * extent.rows:
            column, row, _ = self.unit_of(index, extent)
            acc.fill(0.0)
            if extent.steps > 0:
                states = accumulate(ring, mma, acc, rA, rB, 1, extent.steps, states)
            self.gates_sync()
            first = column * UNIT + rank * ROWS
            self.store_hidden(s, o, acc, first, thread)
            self.group_sync(group)
            self.store_tile(s, o.parts, row * self.tokens, first + group * PANEL, o.neurons, group, thread % 128)
            index += size
            if index < extent.columns * extent.rows:
                self.gates_sync()
        return states

    @cute.jit
    def down_phase(self, ring, states, mma, s: Views, o: Operands, extent: Extent, index, size, thread: Int32):
        """y of all units of this cluster, or the sums of parts of them."""
        rA, rB, acc = self.fragments(mma, s, thread)
        rank, group = cute.arch.block_idx_in_cluster(), cute.arch.make_warp_uniform(thread // 128)
        while index < extent.columns * extent.rows * extent.parts:
            column, row, part = self.unit_of(index, extent)
            first = part * extent.steps
            steps = cutlass.min(extent.steps, extent.all_steps - first)
            acc.fill(0.0)
            states = accumulate(ring, mma, acc, rA, rB, 1, steps, states)
            left = column * UNIT + rank * ROWS
            if extent.parts > 1:
                self.store_part(o, acc, part * o.y.shape[0], row * self.tokens, left, thread)
            else:
                # the tile may still be read
                self.group_sync(group)
                self.store_output(s, o, acc, left, thread)
                self.group_sync(group)
                columns = o.y.shape[1]
                self.store_tile(s, o.y, row * self.tokens, left + group * PANEL, columns, group, thread % 128)
            index += size

    def fragments(self, mma, s: Views, thread: Int32):
        """Descriptors of the stages, and the accumulator."""
        mma.set(warpgroup.Field.ACCUMULATE, True)
        leader = mma.get_slice(cute.make_layout(2, stride=128)(cute.arch.make_warp_uniform(thread // 128)))
        shape = mma.get_slice(thread).partition_shape_C((ROWS, self.tokens))
        return (
            mma.make_fragment_A(leader.partition_A(s.sA)),
            mma.make_fragment_B(leader.partition_B(s.sB)),
            cute.make_rmem_tensor(shape, Float32),
        )

    # ---- the ends ----

    @cute.jit
    def group_sync(self, group: Int32):
        """Barrier of an mma group."""
        cute.arch.barrier(barrier_id=Barrier.GROUP + group, number_of_threads=128)

    def place(self, s: Views, thread: Int32):
        """The address that this lane passes to load or store the fragments of its warp's 16 rows of weights.

        Lane 4 g + q holds tokens 8 v + 2 q and 8 v + 2 q + 1 of rows g + 8 i.
        """
        lane, warp = cute.arch.lane_idx(), thread // 32
        piece, token = warp % 4 * 2 + ((lane >> 3) & 1), (lane & 7) + 8 * (lane >> 4)
        return s.tile + ((warp // 4 * self.tokens + token) * PANEL + swizzle_piece(token, piece))

    @cute.jit
    def biases(self, bias: cute.Tensor, first: Int32, thread: Int32):
        """The bias of the two rows of this lane's fragments, of which the CTA's begin with `first`."""
        both, row = [], first + thread // 32 * 16 + (cute.arch.lane_idx() >> 2)
        for i in range_constexpr(2):
            value = Float32(0.0)
            if row + 8 * i < bias.shape[0]:
                value = bias[row + 8 * i].to(Float32)
            both.append(value)
        return both

    @cute.jit
    def store_hidden(self, s: Views, o: Operands, acc: cute.Tensor, first: Int32, thread: Int32):
        """Replace the gates in the tile by h of neurons from `first` on."""
        place, biases = self.place(s, thread), self.biases(o.b_up, first, thread)
        for v in range_constexpr(0, self.tokens // 8, 2):
            gates = load_matrices_transposed(place + v * (8 * PANEL))
            pairs = []
            for u in range_constexpr(2):
                for i in range_constexpr(2):
                    gate, values = gates[2 * u + i], []
                    for j in range_constexpr(2):
                        own = high_to_float(gate, self.dtype) if j else low_to_float(gate, self.dtype)
                        h = power(own, o.activation)
                        if o.gated != 0:
                            h = hidden(own, acc[(j, i, v + u), 0, 0] + biases[i], o.activation)
                        fires = gate & Uint32(MAGNITUDE << 16 * j) != 0
                        values.append(cutlass.select_(fires, h, Float32(0.0)))
                    pairs.append(pack(*values, self.dtype))
            store_matrices_transposed(place + v * (8 * PANEL), pairs)

    @cute.jit
    def store_output(self, s: Views, o: Operands, acc: cute.Tensor, first: Int32, thread: Int32):
        """Write y of columns from `first` on to the tile."""
        place, biases = self.place(s, thread), self.biases(o.b_down, first, thread)
        for v in range_constexpr(0, self.tokens // 8, 2):
            pairs = []
            for u in range_constexpr(2):
                for i in range_constexpr(2):
                    low, high = (acc[(j, i, v + u), 0, 0] + biases[i] for j in range(2))
                    pairs.append(pack(low, high, self.dtype))
            store_matrices_transposed(place + v * (8 * PANEL), pairs)

    @cute.jit
    def store_tile(self, s: Views, target: cute.Tensor, row: Int32, left: Int32, columns: Int32, group: Int32, thread):
        """Store a group's panel to rows from `row` and columns from `left` on of `target`."""
        piece = thread % 8
        for t in cutlass.range(thread // 8, self.tokens, 16, unroll=4):
            if row + t < target.shape[0] and left + piece * 8 < columns:
                quad = load_values(s.tile + ((group * self.tokens + t) * PANEL + swizzle_piece(t, piece)))
                store_values(address(target, row + t, left + piece * 8), quad)

    @cute.jit
    def store_part(self, o: Operands, acc: cute.Tensor, line: Int32, row: Int32, left: Int32, thread: Int32):
        """Store sums of tokens from `row` and columns from `left` on to rows of `sums` from `line` on."""
        lane = cute.arch.lane_idx()
        first = left + thread // 32 * 16 + (lane >> 2)
        for v in range_constexpr(self.tokens // 8):
            for j in range_constexpr(2):
                m = row + 8 * v + (lane & 3) * 2 + j
                for i in range_constexpr(2):
                    column = first + 8 * i
                    if m < o.y.shape[0] and column < o.y.shape[1]:
                        o.sums[line + m, column] = acc[(j, i, v), 0, 0]

    @cute.jit
    def add_parts(self, o: Operands, parts: Int32, own: Int32, threads: Int32):
        """Add up four columns of y per thread and time."""
        tokens, quads = o.y.shape[0], o.y.shape[1] // 4
        for at in cutlass.range(own, tokens * quads, threads, unroll=1):
            m, column = at // quads, at % quads * 4
            loaded = cute.make_rmem_tensor((4, geometry.MOST_PARTS), Float32)
            for p in range_constexpr(geometry.MOST_PARTS):
                # the last one again in place of those beyond
                source = address(o.sums, cutlass.min(Int32(p), parts - 1) * tokens + m, column).align(16)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), loaded[None, p])
            rounded = cute.make_rmem_tensor((4,), self.dtype)
            for i in range_constexpr(4):
                total = loaded[i, 0]
                for p in range_constexpr(1, geometry.MOST_PARTS):
                    total = total + loaded[i, p] if p < parts else total
                if o.b_down.shape[0] > 0:
                    total += o.b_down[column + i].to(Float32)
                rounded[i] = total.to(self.dtype)
            cute.autovec_copy(rounded, cute.make_tensor(address(o.y, m, column).align(8), cute.make_layout(4)))


def signature(spec: DenseHalvesSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype, m = operands.DTYPES[spec.dtype], cute.sym_int32()
    n, k = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    return DenseHalves(spec), (
        operands.rows(dtype, m, k),
        *operands.packed(dtype, m),
        operands.rows(dtype, n, k),
        operands.rows(dtype, n, k),
        operands.bias(dtype),
        operands.bias(dtype),
        operands.rows(dtype, m, k),
        operands.rows(dtype, m, n),
        operands.rows(Float32, cute.sym_int32(), k),
        operands.vector(Int32, cute.sym_int32(), 4),
        operands.vector(Int32, cute.sym_int32(), 4),
        *(Int32(1),) * 4,
    )
