"""Gate GEMM that emits TwELL: words[m, :] packs the non-zeros of relu(x[m, :] @ w^T + bias), 256 neurons per tile, or
those above a threshold, of all or of each neuron. stats counts non-zeros and overflowing rows per 8 tokens and tile.

Persistent and warp-specialized, one CTA per SM, a cluster of two CTAs that share the weight tile. A CTA's tile is 256
neurons and `tokens` tokens. Weights are the A operand of WGMMA, so any multiple of 16 tokens is possible: `tuning`
takes the number whose tiles fill the last wave best. All give the same bits. Three warp groups:

    pack      warps 0 to 2. Pack the gate tile while the mma groups work on the next one: eight tokens per warp at a
              time, eight neurons per lane. An overflowing row goes to the spill.
    load      warp 3. TMA loads of w [256, 64] and x [tokens, 64] into a ring of stages; half of w comes from the peer.
    mma       groups 1 and 2: WGMMA 64 x tokens x 16 over the ring, then ReLU, rounding and a transposing stmatrix into
              the gate tile. The tile's 256 neurons are two parts of 128; of each, group 1 has the first 64, group 2
              the others.

The grid: clusters lie along x, two CTAs each, and persistent clusters along z. A cluster takes every gridDim.z-th of
the cluster tiles, in the order of `tile_of`.

So the tensor cores wait only for the epilogue's register-to-shared copy. All warps pack the CTA's last tile: with few
tiles per CTA nothing else would hide its packing. Hand-over:

    ring         PipelineTmaAsync: full = 1 arrival + bytes, empty = 8 mma warps of each CTA that reads the stage.
    GATE_FULL    256 mma threads arrive, 96 pack threads wait: the gate is written.
    GATE_EMPTY   96 pack threads arrive, 256 mma threads wait: the gate may be overwritten.
    GATE_LAST    all threads: the gate of the last tile is written.
    cluster      all threads of both CTAs, once, before they end: no CTA ends while its peer may still load into its
                 stages or arrive at its barriers. It replaces the tail of the ring's producer.
"""

from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int16, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import launch, operands
from ..common.activation import above, level_of
from ..common.copies import address, load_values, store_values
from ..common.rows import clear_arrivals
from ..common.swizzle import swizzle_piece
from ..common.values import byte_sum, bytes_before, join_bytes, lowest_bit, nonzero_bytes, relu_pack, widen
from ..specs import GatePackSpec
from .copies import Transfer, partition, staged, tma_load
from .mma import accumulate, store_matrices_transposed

TILE_N = geometry.TILE
# bytes of K of a stage, the width of the swizzle, and of a WGMMA
TILE_K_BYTES, MMA_K_BYTES = 128, 32
THREADS = 384
WARPS = THREADS // 32
MMA_WARPS, PACK_WARPS = 8, 3
MMA_THREADS = 32 * MMA_WARPS
# 384 threads start with 168 registers; the mma groups take what the other group gives up; more would hang
REGISTERS_LOAD_PACK, REGISTERS_MMA = 88, 208
feasible.check_register_split((REGISTERS_LOAD_PACK, REGISTERS_MMA, REGISTERS_MMA))
# tokens that a warp packs at a time
ROWS = geometry.STATS_ROWS


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads."""

    GATE_FULL = 1
    GATE_EMPTY = 2
    GATE_LAST = 3


class Operands(NamedTuple):
    """Operands in global memory that are accessed without TMA; an empty `bias` stands for none."""

    bias: Any  # [N], [2 N] with thresholds behind, or [0]
    words: Any  # int32 [M, tiles * width]
    spill: Any  # [M, tiles * 256], for tiles of more non-zeros than their words hold
    stats: Any  # int32 [ceil(M / 8), tiles, 2]: non-zeros, overflowing rows
    arrivals: Any  # int32 [any]: counters of the next kernel, which this one zeroes
    width: Any  # words per tile
    threshold: Any  # of fatrelu: the bits of a 16-bit value, twice, see common/activation.py
    scales: Any = None  # of x and w, see gate_pack_e4m3.py


class Extent(NamedTuple):
    """Cluster tiles by tokens and neurons, and steps of K; tokens and neurons."""

    m_tiles: Int32
    n_tiles: Int32
    k_tiles: Int32
    rows: Int32
    neurons: Int32


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    sW: Any  # weights
    sX: Any
    gate: Any  # [4 panels, tokens, 64 neurons], swizzled
    scales: Any = None  # see gate_pack_e4m3.py


class GatePack:
    """For one dtype and number of tokens per tile; sizes, strides and width stay symbolic. An empty bias is none.

    gate_screen.py is this kernel with another `first_group`, `mma` and memory of the epilogue.
    """

    accumulator = Float32
    # of all tiles the warp that loads packs only the last one, whose barrier is GATE_LAST
    absent: ClassVar[Mapping[int, Collection[int]]] = {
        Barrier.GATE_FULL: [PACK_WARPS],
        Barrier.GATE_EMPTY: [PACK_WARPS],
    }

    def __init__(self, spec: GatePackSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.set_sizes(spec.tokens, self.dtype, self.dtype, spec.tokens * TILE_N)

    def set_sizes(self, tokens: int, value: Any, epilogue: Any, count: int, splits_neurons: bool = False) -> None:
        """The type of x and w and that of the `count` values in the epilogue's shared memory, which stages leave free.

        Sizes of a tile follow. With `splits_neurons` the CTAs of a cluster share tokens instead of neurons.
        """
        self.tokens, self.value, self.epilogue, self.epilogue_count = tokens, value, epilogue, count
        # of the first group
        self.pack_warps = PACK_WARPS
        # of two CTAs: fewer clusters of four run at a time than a quarter of the number of SMs
        self.cluster = 2
        # what a cluster's CTAs have of their own: tokens, or neurons of a tile; they share the rest
        self.own_tokens, self.own_neurons = (1, self.cluster) if splits_neurons else (self.cluster, 1)
        self.neurons = TILE_N // self.own_neurons
        # clusters' tiles of tokens in a band, see `tile_of`
        self.group = 1024 // (self.tokens * self.own_tokens)
        self.tile_k, self.stage_bytes = TILE_K_BYTES * 8 // value.width, (self.neurons + tokens) * TILE_K_BYTES
        self.stages = (feasible.SMEM_PER_CTA - 2048 - count * epilogue.width // 8) // self.stage_bytes

    @cute.jit
    def __call__(self, *arguments: Any):
        """x, w, the `Operands` up to the threshold, the most clusters that run at a time, and the CUDA stream."""
        x, w, others, scales = operands.factors(arguments)
        *given, max_clusters, stream = others
        self.launch(x, w, Operands(*[*given, scales]), max_clusters, stream)

    @cute.jit
    def launch(self, x: cute.Tensor, w: cute.Tensor, o: Any, max_clusters: Int32, stream: cuda.CUstream):
        """Launch the kernel for a product; all that it accesses without TMA is in `o`."""
        shape, stages, value = (self.neurons, self.tokens, self.tile_k), self.stages, self.value
        mma = sm90.make_trivial_tiled_mma(
            value, value, OperandMajorMode.K, OperandMajorMode.K, self.accumulator, (2, 1, 1), (64, self.tokens)
        )
        w_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, value, stages)
        x_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, value, stages)
        loads = (
            tma_load(w, w_layout, (self.neurons, self.tile_k), self.own_tokens),
            tma_load(x, x_layout, (self.tokens, self.tile_k), self.own_neurons),
        )

        @cute.struct
        class Shared:
            ring: cute.struct.MemRange[Int64, stages * 2]
            sW: cute.struct.Align[cute.struct.MemRange[value, cute.cosize(w_layout)], 1024]
            sX: cute.struct.Align[cute.struct.MemRange[value, cute.cosize(x_layout)], 1024]
            epilogue: cute.struct.Align[cute.struct.MemRange[self.epilogue, self.epilogue_count], 1024]

        self.shared = feasible.check_shared_memory(Shared)
        m_tiles = cute.ceil_div(x.shape[0], self.tokens * self.own_tokens)
        n_tiles = cute.ceil_div(w.shape[0], TILE_N)
        total = m_tiles * n_tiles
        extent = Extent(m_tiles, n_tiles, cute.ceil_div(x.shape[1], self.tile_k), x.shape[0], w.shape[0])
        if total > 0:
            kernel = self.kernel(*loads, o, mma, (w_layout, x_layout), extent)
            grid = self.cluster, 1, cutlass.min(total, max_clusters)
            launch.start(kernel, grid, THREADS, stream, cluster=self.cluster, ctas_per_sm=1)

    @cute.kernel
    def kernel(self, w: Transfer, x: Transfer, o, mma: cute.TiledMma, layouts: Any, extent: Extent):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)
        if warp_index == PACK_WARPS:
            cpasync.prefetch_descriptor(w.atom)
            cpasync.prefetch_descriptor(x.atom)

        shared = SmemAllocator().allocate(self.shared)
        ring = self.make_ring(shared)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.cluster, 1), is_relaxed=True)
        sW, sX = staged((shared.sW, shared.sX), layouts)
        s = self.views(sW, sX, shared.epilogue.data_ptr())
        # the first loads must not wait for this division
        first = self.tile_of(cute.arch.block_idx()[2], extent)
        pipeline.pipeline_init_wait(cluster_shape_mn=(self.cluster, 1))
        launch.wait()

        if group == 0:
            cute.arch.setmaxregister_decrease(REGISTERS_LOAD_PACK)
            self.first_group(ring, w, x, s, o, first, warp_index, extent)
        else:
            cute.arch.setmaxregister_increase(REGISTERS_MMA)
            self.mma(ring, mma, s, o, thread - 128, extent)
        # the peer has released its last stage here
        cute.arch.cluster_wait()

    def views(self, sW: Any, sX: Any, epilogue: Any) -> Any:
        """The kernel's `Views`."""
        return Views(sW, sX, epilogue)

    @cute.jit
    def first_group(self, ring, w: Transfer, x: Transfer, s: Views, o: Operands, place, warp_index: Int32, extent):
        """Load, or pack, and then pack the last tile; the first tile is at `place`."""
        tile = cute.arch.block_idx()[2]
        if tile == 0 and warp_index < PACK_WARPS:
            clear_arrivals(o.arrivals, cute.arch.thread_idx()[0], 32 * PACK_WARPS)
        if warp_index == PACK_WARPS:
            self.load(ring, w, x, s, place, extent)
            tile = self.last_tile(extent)
        cute.arch.cluster_arrive_relaxed()
        self.pack(s, o, tile, warp_index, extent)

    def handover_threads(self) -> int:
        """Threads of the mma and pack warps."""
        return MMA_THREADS + 32 * self.pack_warps

    def make_ring(self, shared: Any) -> Any:
        """The ring of stages; clusters must synchronise before they use it."""
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=shared.ring.data_ptr(),
            num_stages=self.stages,
            tx_count=self.stage_bytes,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.cluster * MMA_WARPS),
            cta_layout_vmnk=cute.make_layout((1, 1, self.cluster, 1)),
            defer_sync=True,
        )

    @cute.jit
    def tile_of(self, index: Int32, extent: Extent) -> tuple[Int32, Int32]:
        """The tile of this CTA in the cluster tile `index`, by tokens and by neurons: bands of `group` tiles of tokens,
        tokens fastest.

        A wave of 66 clusters then touches few tiles of either, which fit in L2 together.
        """
        band = index // (self.group * extent.n_tiles)
        height = cutlass.min(extent.m_tiles - band * self.group, Int32(self.group))
        inside = index - band * self.group * extent.n_tiles
        column = inside // height
        row = band * self.group + inside - column * height
        rank = cute.arch.block_idx()[0]
        if const_expr(self.own_tokens > 1):
            return row * self.own_tokens + rank, column
        return row, column * self.own_neurons + rank

    @cute.jit
    def load(self, ring, w: Transfer, x: Transfer, s: Views, place, extent: Extent):
        """Keep the ring full: one w tile and one x tile per stage."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        w_s, w_t = partition(w, s.sW, (self.neurons, self.tile_k), rank, self.own_tokens)
        x_s, x_t = partition(x, s.sX, (self.tokens, self.tile_k), rank, self.own_neurons)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        tile, step = cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        row, column = place
        while tile < extent.m_tiles * extent.n_tiles:
            state.reset_count()
            for _ in cutlass.range(extent.k_tiles, unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                w_tile, x_tile = w_t[None, column, state.count], x_t[None, row, state.count]
                self.copy(w, w_tile, w_s[None, state.index], barrier, self.own_tokens)
                self.copy(x, x_tile, x_s[None, state.index], barrier, self.own_neurons)
                ring.producer_commit(state)
                state.advance()
            tile += step
            row, column = self.tile_of(tile, extent)

    def copy(self, transfer, source, target, barrier, peers: int) -> None:
        """Load a tile for all `peers` that share it."""
        mask = {"mcast_mask": Int16((1 << peers) - 1)} if peers > 1 else {}
        cute.copy(transfer.atom, source, target, tma_bar_ptr=barrier, **mask)

    @cute.jit
    def mma(self, ring, mma: cute.TiledMma, s: Views, o: Operands, thread: Int32, extent: Extent):
        """Main loop and the register half of the epilogue, for half of the tile's neurons."""
        half, warp_index, rW, rX, coordinates, acc, full, release = self.fragments(mma, s, thread)
        first, step = cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        tile = first
        while tile < extent.m_tiles * extent.n_tiles:
            row, column = self.tile_of(tile, extent)
            scales = self.load_scales(o, row, column, coordinates, thread & 127, extent)
            full, release = self.multiply(ring, mma, acc, rW, rX, full, release, extent)
            self.scale(s, acc, scales, (tile - first) // step, half, thread & 127)
            if o.bias.shape[0] > 0:
                self.add_bias(acc, o.bias, coordinates, column, extent.neurons)
            if tile != first:
                cute.arch.barrier(barrier_id=Barrier.GATE_EMPTY, number_of_threads=self.handover_threads())
            self.store_gate(acc, s.gate, self.levels(o, coordinates, column, extent), warp_index)
            tile += step
            if tile < extent.m_tiles * extent.n_tiles:
                cute.arch.barrier_arrive(barrier_id=Barrier.GATE_FULL, number_of_threads=self.handover_threads())
        # not relaxed: the last stages are released before
        cute.arch.cluster_arrive()
        cute.arch.barrier(barrier_id=Barrier.GATE_LAST, number_of_threads=THREADS)
        self.pack_tile(s, o, tile - step, warp_index + WARPS - MMA_WARPS, Int32(WARPS), extent)

    @cute.jit
    def fragments(self, mma: cute.TiledMma, s, thread: Int32):
        """The group, the warp, fragments, the coordinates of a thread's sums, the sums, and two states of the ring."""
        half, warp = (cute.arch.make_warp_uniform(thread // size) for size in (128, 32))
        leader = mma.get_slice(cute.make_layout(2, stride=128)(half))
        rW, rX = mma.make_fragment_A(leader.partition_A(s.sW)), mma.make_fragment_B(leader.partition_B(s.sX))
        coordinates = mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.neurons, self.tokens)))
        acc = cute.make_rmem_tensor(coordinates.shape[:3], self.accumulator)
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        return half, warp, rW, rX, coordinates, acc, full, full.clone()

    @cute.jit
    def multiply(self, ring, mma: cute.TiledMma, acc, rW, rX, full, release, extent: Extent, begun: Int32 | int = 0):
        """The main loop of a tile; returns the next states of the ring. `begun` is for `issued`."""
        states, issued = (full, release), lambda k: self.issued(k, begun, extent)
        return accumulate(ring, mma, acc, rW, rX, extent.k_tiles, states, issued)

    def issued(self, k: Int32, begun: Int32 | int, extent) -> None:
        """Called when the products of a stage are issued."""

    def load_scales(self, o: Operands, row: Int32, column: Int32, coordinates, thread: Int32, extent: Extent) -> Any:
        """What `scale` needs of a tile, in flight during its main loop."""

    def scale(self, s: Views, acc, scales: Any, turn: Int32, half: Int32, thread: Int32) -> None:
        """Multiply the sums of the CTA's tile number `turn` by scales."""

    @cute.jit
    def add_bias(self, acc: cute.Tensor, bias: cute.Tensor, coordinates: cute.Tensor, column: Int32, neurons: Int32):
        """acc += bias[neuron], except for the padding of the last tile."""
        for part in range_constexpr(2):
            for i in range_constexpr(2):
                neuron = column * TILE_N + coordinates[(0, i, 0), part, 0][0]
                b = bias[neuron].to(Float32) if neuron < neurons else Float32(0.0)
                for v in range_constexpr(self.tokens // 8):
                    for j in range_constexpr(2):
                        acc[(j, i, v), part, 0] += b

    @cute.jit
    def levels(self, o: Operands, coordinates: cute.Tensor, column: Int32, extent: Extent):
        """The thresholds of a thread's neurons, by i and part."""
        levels = cute.make_rmem_tensor((2, 2), Int32)
        for part in range_constexpr(2):
            for i in range_constexpr(2):
                neuron = column * TILE_N + coordinates[(0, i, 0), part, 0][0]
                levels[i, part] = level_of(o.bias, extent.neurons, neuron, o.threshold)
        return levels

    @cute.jit
    def store_gate(self, acc: cute.Tensor, gate, levels: cute.Tensor, warp_index: Int32):
        """ReLU, rounding, the thresholds, and the transposed store.

        Lane 4 g + q holds tokens 8 v + 2 q and 8 v + 2 q + 1 of neurons g + 8 i of its warp's 16, in each part.
        """
        lane = cute.arch.lane_idx()
        for part in range_constexpr(cute.size(acc, mode=[1])):
            # the row that this lane addresses: eight neurons, the lower or upper half of 16, of a token
            neuron = part * 128 + warp_index * 16
            panel, piece = neuron >> 6, ((neuron >> 3) & 7) + ((lane >> 3) & 1)
            token = (lane & 7) + 8 * (lane >> 4)
            target = gate + (panel * (self.tokens * 64) + token * 64 + swizzle_piece(token, piece))
            for v in range_constexpr(0, self.tokens // 8, 2):
                pairs = [
                    above(
                        relu_pack(acc[(0, i, v + u), part, 0], acc[(1, i, v + u), part, 0], self.dtype),
                        levels[i, part],
                        self.dtype,
                    )
                    for u in range(2)
                    for i in range(2)
                ]
                store_matrices_transposed(target + v * (8 * 64), pairs)

    @cute.jit
    def pack(self, s: Views, o: Operands, tile: Int32, warp_index: Int32, extent: Extent):
        """Pack the CTA's tiles from `tile` on, the last one together with all of its warps."""
        step = cute.arch.grid_dim()[2]
        while tile < extent.m_tiles * extent.n_tiles:
            last = tile + step >= extent.m_tiles * extent.n_tiles
            if last:
                cute.arch.barrier(barrier_id=Barrier.GATE_LAST, number_of_threads=THREADS)
            else:
                cute.arch.barrier(barrier_id=Barrier.GATE_FULL, number_of_threads=self.handover_threads())
            self.pack_tile(s, o, tile, warp_index, Int32(WARPS) if last else Int32(self.pack_warps), extent)
            if not last:
                cute.arch.barrier_arrive(barrier_id=Barrier.GATE_EMPTY, number_of_threads=self.handover_threads())
            tile += step

    @cute.jit
    def last_tile(self, extent: Extent):
        """The last tile of this CTA."""
        first, step = cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        return first + (extent.m_tiles * extent.n_tiles - 1 - first) // step * step

    @cute.jit
    def pack_tile(self, s: Views, o: Operands, tile: Int32, worker: Int32, workers: Int32, extent: Extent):
        """Pack every `workers`-th eight tokens of a tile, from `worker` on."""
        row, column = self.tile_of(tile, extent)
        for eight in cutlass.range(worker, self.tokens // ROWS, workers, unroll=1):
            self.pack_rows(s, o, row * (self.tokens // ROWS) + eight, column, eight, extent)

    @cute.jit
    def pack_rows(self, s, o, group: Int32, column: Int32, eight: Int32, extent: Extent):
        """Pack eight tokens of a tile, eight neurons per lane. Values outside the problem count as zeros.

        Four tokens share a register: a byte each for the flags of the lane's values, and for a count. No prefix sum
        over the lanes before a lane exceeds 248.
        """
        lane = cute.arch.lane_idx()
        first = group * ROWS
        neuron = column * TILE_N + lane * 8
        panel, piece = lane >> 3, lane & 7
        source = s.gate + (panel * (self.tokens * 64) + eight * (ROWS * 64))
        own, left = [], []
        for h in range_constexpr(2):
            counts, flags = Uint32(0), Uint32(0)
            for r in range_constexpr(4):
                quad = load_values(source + ((4 * h + r) * 64 + swizzle_piece(4 * h + r, piece)))
                low, high = nonzero_bytes(quad)
                counts = counts | ((low + high) * Uint32(0x01010101)) >> 24 << 8 * r
                flags = flags | join_bytes(low, high) << 8 * r
            rows = cutlass.min(extent.rows - first - 4 * h, Int32(4)) if neuron < extent.neurons else Int32(0)
            valid = Uint32(0xFFFFFFFF) >> Uint32(32 - 8 * rows) if rows > 0 else Uint32(0)
            own.append(counts & valid)
            left.append(flags & valid)
        before = [bytes_before(own[h], lane) for h in range(2)]

        nonzeros, overflows = Int32(0), Int32(0)
        shift = Uint32(panel * 8)
        quad = cute.make_rmem_tensor((4,), Uint32)
        for h in range_constexpr(2):
            quad.fill(0)
            last = [Uint32(cute.arch.shuffle_sync(x[h], 31)) for x in (before, own)]
            count = Int32(((last[0] >> shift) & Uint32(0xFF)) + ((last[1] >> shift) & Uint32(0xFF)))
            nonzeros += byte_sum(last[0]) + byte_sum(last[1])
            m = first + 4 * h + panel
            if m < extent.rows:
                for p in cutlass.range(o.width >> 5, unroll=1):
                    # word 0 is the count
                    quad[0] = Uint32(count) if piece == 0 and p == 0 else Uint32(0)
                    store_values(address(o.words, m, column * o.width + p * 32 + piece * 4), quad)
            spilled = Uint32(cute.arch.vote_ballot_sync(count >= o.width)) & Uint32(0x01010101)
            overflows += Int32(cute.arch.popc(spilled))
            while spilled != 0:
                r = 4 * h + (lowest_bit(spilled) >> 3)
                spilled = spilled & (spilled - 1)
                load_values(source + (r * 64 + swizzle_piece(r, piece)), quad)
                for i in range_constexpr(4):
                    quad[i] = quad[i] if neuron < extent.neurons else Uint32(0)
                store_values(address(o.spill, first + r, neuron), quad)
        # the zeros are stored: a word of another lane must not be overwritten by them
        cute.arch.sync_warp()
        self.store_words(o, source, left, before, first, column, neuron, piece)
        if lane < 2 and group < o.stats.shape[0] and column < o.stats.shape[1]:
            o.stats[group, column, lane] = nonzeros if lane == 0 else overflows

    @cute.jit
    def store_words(self, o, source, left, places, first: Int32, column: Int32, neuron: Int32, piece: Int32):
        """Store the words of this lane's non-zeros, flagged in `left`, behind `places` others of their tokens."""
        low, high = left
        low_places, high_places = places
        while (low | high) != 0:
            upper = low == 0
            flags = high if upper else low
            at = lowest_bit(flags)
            flags = flags & (flags - 1)
            low, high = low if upper else flags, flags if upper else high
            byte = Uint32(at & 24)
            counts = high_places if upper else low_places
            place = 1 + Int32((counts >> byte) & Uint32(0xFF))
            if place < o.width:
                counts += Uint32(1) << byte
                r, i = (at >> 3) + (4 if upper else 0), at & 7
                value = widen(
                    cute.make_tensor(
                        cute.recast_ptr(source + (r * 64 + swizzle_piece(r, piece) + i), dtype=Uint16),
                        cute.make_layout(1),
                    )[0]
                )
                cute.make_tensor(address(o.words, first + r, column * o.width + place), cute.make_layout(1))[0] = (
                    value << 16 | (neuron + i)
                )
            low_places, high_places = low_places if upper else counts, counts if upper else high_places


def signature(spec: GatePackSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments of `__call__`; compile.py adds the stream."""
    return GatePack(spec), (*operands.gate_pack(spec.dtype), Int32(1))
