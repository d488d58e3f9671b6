"""Gate GEMM that emits TwELL: words[m, :] packs the non-zeros of relu(x[m, :] @ w^T + bias), 256 neurons per tile.
stats counts non-zeros and overflowing rows per 64 tokens and tile.

Persistent and warp-specialized, one CTA per SM, a cluster of two CTAs that share the weight tile. Three warp groups:

    load      warp 0. TMA loads of x [128, 64] and w [256, 64] into a ring of stages; half of w comes from the peer.
    pack      warps 1 to 3. Read gate tile `sG`, a row per warp, eight neurons per lane, and pack while the mma groups
              work on the next tile: words go to `sWords` and leave by TMA, an overflowing row goes to the spill.
    mma       groups 1 and 2, 64 rows each: WGMMA 64x256x16 over the ring, then ReLU, rounding and stmatrix into `sG`.

So the tensor cores wait only for the epilogue's register-to-shared copy. Hand-over:

    ring           PipelineTmaAsync: full = 1 arrival + bytes, empty = 8 mma warps of each CTA that reads the stage.
    GATE_FULL_h    128 mma threads of group h arrive, 96 pack threads wait: gate half h is written.
    GATE_EMPTY_h   96 pack threads arrive, 128 mma threads wait: gate half h may be overwritten.
    PACK           96 pack threads: a words buffer is free, then filled.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from . import feasible, geometry
from .sm90 import operands
from .sm90.copies import address, load_values, store_values
from .sm90.swizzle import swizzle_piece
from .sm90.values import count_flags, lanes_before, nonzero_flags, relu_pack, value_bits
from .specs import GatePackSkinnySpec, GatePackSpec

TILE_M, TILE_N = 128, geometry.TILE
HALF_M = TILE_M // 2
THREADS = 384
MMA_WARPS, PACK_WARPS = 8, 3
HANDOVER_THREADS = 128 + 32 * PACK_WARPS
# 384 threads start with 168 registers; the mma groups take what the other group gives up; more would hang
REGISTERS_LOAD_PACK, REGISTERS_MMA = 88, 208
feasible.check_register_split((REGISTERS_LOAD_PACK, REGISTERS_MMA, REGISTERS_MMA))


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads."""

    GATE_FULL_0 = 1
    GATE_FULL_1 = 2
    GATE_EMPTY_0 = 3
    GATE_EMPTY_1 = 4
    PACK = 5


class Transfer(NamedTuple):
    """A TMA copy and its tensor."""

    atom: Any
    tensor: Any


class Operands(NamedTuple):
    """Operands in global memory that are accessed without TMA; `bias` may be None."""

    bias: Any
    spill: Any
    stats: Any


class Extent(NamedTuple):
    """Cluster tiles by rows and columns, and steps of K; rows and neurons."""

    m_tiles: Any
    n_tiles: Any
    k_tiles: Any
    rows: Any
    neurons: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    sX: Any
    sW: Any  # weights
    sG: Any  # gate tile
    sWords: Any  # two buffers of words
    gate: Any  # the gate tile without its swizzle
    tally: Any  # [PACK_WARPS, 2] non-zeros and overflows


class GatePack:
    """For one dtype, compression and presence of a bias; sizes and strides stay symbolic."""

    def __init__(
        self, spec: GatePackSpec, tile_k: int = 64, stages: int = 3, cluster: tuple[int, int] = (2, 1), group: int = 8
    ):
        self.dtype = operands.DTYPES[spec.dtype]
        self.has_bias = spec.bias
        self.width = geometry.words_per_tile(spec.compression)
        self.tile_k, self.stages, self.cluster, self.group = tile_k, stages, cluster, group
        # a words buffer is 8 KB whatever the compression: 64, 32 or 16 rows at once
        self.chunk_rows = 2048 // self.width

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        bias: cute.Tensor | None,
        words: cute.Tensor,
        spill: cute.Tensor,
        stats: cute.Tensor,
        max_clusters: Int32,
        stream: cuda.CUstream,
    ):
        shape, stages, (cm, cn) = (TILE_M, TILE_N, self.tile_k), self.stages, self.cluster
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (2, 1, 1), (64, TILE_N)
        )
        x_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, stages)
        w_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.dtype, stages)
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        gate_layout = cute.tile_to_shape(atom, (TILE_M, TILE_N), order=(0, 1))
        words_layout = cute.make_layout(
            (self.chunk_rows, self.width, 2), stride=(self.width, 1, self.chunk_rows * self.width)
        )
        loads = (
            self.transfer(x, x_layout, (TILE_M, self.tile_k), cn),
            self.transfer(w, w_layout, (TILE_N, self.tile_k), cm),
        )
        one = cute.slice_(words_layout, (None, None, 0))
        box = (self.chunk_rows, self.width)
        store = Transfer(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), words, one, box))

        @cute.struct
        class Shared:
            ring: cute.struct.MemRange[Int64, stages * 2]
            tally: cute.struct.MemRange[Int32, 8]
            sX: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], 1024]
            sW: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]
            sG: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(gate_layout)], 1024]
            sWords: cute.struct.Align[cute.struct.MemRange[Uint32, cute.cosize(words_layout)], 1024]

        self.shared = feasible.check_shared_memory(Shared)
        m_tiles = cute.ceil_div(x.shape[0], TILE_M * cm)
        n_tiles = cute.ceil_div(w.shape[0], TILE_N * cn)
        total = m_tiles * n_tiles
        extent = Extent(m_tiles, n_tiles, cute.ceil_div(x.shape[1], self.tile_k), x.shape[0], w.shape[0])
        layouts = (x_layout, w_layout, gate_layout, words_layout)
        if total > 0:
            self.kernel(*loads, store, Operands(bias, spill, stats), mma, *layouts, extent).launch(
                grid=(cm, cn, cutlass.min(total, max_clusters)),
                block=(THREADS, 1, 1),
                cluster=(cm, cn, 1),
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=True,
            )

    def transfer(self, tensor: Any, layout: Any, box: tuple[int, int], peers: int) -> Transfer:
        """A TMA load of one stage's tile, split over the `peers` CTAs that share it."""
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if peers > 1 else cpasync.CopyBulkTensorTileG2SOp()
        stage = cute.slice_(layout, (None, None, 0))
        return Transfer(*cpasync.make_tiled_tma_atom(op, tensor, stage, box, num_multicast=peers))

    @cute.kernel
    def kernel(
        self,
        x: Transfer,
        w: Transfer,
        words: Transfer,
        o: Operands,
        mma: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
        gate_layout: cute.ComposedLayout,
        words_layout: cute.Layout,
        extent: Extent,
    ):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)
        if warp_index == 0:
            cpasync.prefetch_descriptor(x.atom)
            cpasync.prefetch_descriptor(w.atom)
            cpasync.prefetch_descriptor(words.atom)

        cm, cn = self.cluster
        shared = SmemAllocator().allocate(self.shared)
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=shared.ring.data_ptr(),
            num_stages=self.stages,
            tx_count=(TILE_M + TILE_N) * self.tile_k * 2,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, (cm + cn - 1) * MMA_WARPS),
            cta_layout_vmnk=cute.make_layout((1, cm, cn, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        s = Views(
            sX=shared.sX.get_tensor(x_layout.outer, swizzle=x_layout.inner),
            sW=shared.sW.get_tensor(w_layout.outer, swizzle=w_layout.inner),
            sG=shared.sG.get_tensor(gate_layout.outer, swizzle=gate_layout.inner),
            sWords=shared.sWords.get_tensor(words_layout),
            gate=shared.sG.get_tensor(cute.make_layout(TILE_M * TILE_N)),
            tally=shared.tally.get_tensor(cute.make_layout((PACK_WARPS, 2), stride=(2, 1))),
        )
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        if group == 0:
            cute.arch.setmaxregister_decrease(REGISTERS_LOAD_PACK)
            if warp_index == 0:
                self.load(ring, x, w, s, extent)
            else:
                self.pack(words, s, o, warp_index - 1, extent)
        else:
            cute.arch.setmaxregister_increase(REGISTERS_MMA)
            self.mma(ring, mma, s, o.bias, thread - 128, extent)

    @cute.jit
    def tile_of(self, index: Int32, extent: Extent) -> tuple[Int32, Int32]:
        """The (row, column) tile of this CTA in the cluster tile `index`: bands of `group` row tiles, rows fastest.

        A wave of 66 clusters then touches 8 row tiles of clusters and 8 or 9 column tiles, which fit in L2 together.
        """
        ci, cj, _ = cute.arch.block_idx()
        band = index // (self.group * extent.n_tiles)
        height = cutlass.min(extent.m_tiles - band * self.group, Int32(self.group))
        inside = index - band * self.group * extent.n_tiles
        column = inside // height
        row = band * self.group + inside - column * height
        return row * self.cluster[0] + ci, column * self.cluster[1] + cj

    @cute.jit
    def load(self, ring, x, w, s, extent):
        """Keep the ring full: one x tile and one w tile per stage."""
        cm, cn = self.cluster
        layout = cute.make_layout((cm, cn, 1))
        ci, cj, _ = layout.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        x_mask = cute.make_layout_image_mask(layout, (ci, cj, 0), mode=1) if const_expr(cn > 1) else 0
        w_mask = cute.make_layout_image_mask(layout, (ci, cj, 0), mode=0) if const_expr(cm > 1) else 0
        x_tiles = cute.local_tile(x.tensor, (TILE_M, self.tile_k), (None, None))
        w_tiles = cute.local_tile(w.tensor, (TILE_N, self.tile_k), (None, None))
        x_s, x_t = cpasync.tma_partition(
            x.atom, cj, cute.make_layout(cn), cute.group_modes(s.sX, 0, 2), cute.group_modes(x_tiles, 0, 2)
        )
        w_s, w_t = cpasync.tma_partition(
            w.atom, ci, cute.make_layout(cm), cute.group_modes(s.sW, 0, 2), cute.group_modes(w_tiles, 0, 2)
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        tile, step = cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        while tile < extent.m_tiles * extent.n_tiles:
            row, column = self.tile_of(tile, extent)
            state.reset_count()
            for _ in cutlass.range(extent.k_tiles, unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                x_tile, w_tile = x_t[None, row, state.count], w_t[None, column, state.count]
                cute.copy(x.atom, x_tile, x_s[None, state.index], tma_bar_ptr=barrier, mcast_mask=x_mask)
                cute.copy(w.atom, w_tile, w_s[None, state.index], tma_bar_ptr=barrier, mcast_mask=w_mask)
                ring.producer_commit(state)
                state.advance()
            tile += step
        ring.producer_tail(state)

    @cute.jit
    def mma(self, ring, mma: cute.TiledMma, s, bias, thread: Int32, extent):
        """Main loop and the register half of the epilogue, for 64 rows of the tile."""
        half = cute.arch.make_warp_uniform(thread // 128)
        leader = mma.get_slice(cute.make_layout(2, stride=128)(half))
        rX = mma.make_fragment_A(leader.partition_A(s.sX))
        rW = mma.make_fragment_B(leader.partition_B(s.sW))
        coordinates = mma.get_slice(thread).partition_C(cute.make_identity_tensor((TILE_M, TILE_N)))
        acc = cute.make_rmem_tensor(coordinates.shape[:3], Float32)
        store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma)
        tRS_sG = store.get_slice(thread).partition_D(s.sG)

        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        first, step = cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        tile = first
        while tile < extent.m_tiles * extent.n_tiles:
            _, column = self.tile_of(tile, extent)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(extent.k_tiles, unroll=1):
                ring.consumer_wait(full)
                warpgroup.fence()
                for block in range_constexpr(self.tile_k // 16):
                    cute.gemm(mma, acc, rX[None, None, block, full.index], rW[None, None, block, full.index], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                # at most one group of WGMMA is in flight: the previous stage has been read
                warpgroup.wait_group(1)
                if k > 0:
                    ring.consumer_release(release)
                    release.advance()
                full.advance()
            warpgroup.wait_group(0)
            ring.consumer_release(release)
            release.advance()

            if const_expr(self.has_bias):
                self.add_bias(acc, bias, coordinates, column, extent.neurons)
            gate = cute.make_rmem_tensor(acc.shape, self.dtype)
            pairs = cute.recast_tensor(gate, Uint32)
            for i in range_constexpr(cute.size(pairs)):
                pairs[i] = relu_pack(acc[2 * i], acc[2 * i + 1], self.dtype)
            if tile != first:
                cute.arch.barrier(barrier_id=Barrier.GATE_EMPTY_0 + half, number_of_threads=HANDOVER_THREADS)
            tRS_rG = store.retile(gate)
            cute.copy(store, tRS_rG, tRS_sG)
            cute.arch.barrier_arrive(barrier_id=Barrier.GATE_FULL_0 + half, number_of_threads=HANDOVER_THREADS)
            tile += step

    @cute.jit
    def add_bias(self, acc, bias, coordinates, column: Int32, neurons: Int32):
        """acc += bias[neuron], except for the padding of the last tile."""
        for v in range_constexpr(TILE_N // 8):
            neuron = column * TILE_N + coordinates[(0, 0, v), 0, 0][1]
            for j in range_constexpr(2):
                b = bias[neuron + j].to(Float32) if neuron < neurons else Float32(0.0)
                for i in range_constexpr(2):
                    acc[(j, i, v), 0, 0] += b

    @cute.jit
    def pack(self, words, s, o, warp_index: Int32, extent):
        """Pack gate halves into words: a warp takes a row at a time, `chunk_rows` rows are stored together."""
        lane = cute.arch.lane_idx()
        tiles = cute.local_tile(words.tensor, (self.chunk_rows, self.width), (None, None))
        words_s, words_t = cpasync.tma_partition(
            words.atom, 0, cute.make_layout(1), cute.group_modes(s.sWords, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        chunks = HALF_M // self.chunk_rows
        tile, step = cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        while tile < extent.m_tiles * extent.n_tiles:
            tile_row, column = self.tile_of(tile, extent)
            for half in range_constexpr(2):
                cute.arch.barrier(barrier_id=Barrier.GATE_FULL_0 + half, number_of_threads=HANDOVER_THREADS)
                nonzeros, overflows = Int32(0), Int32(0)
                for chunk in range_constexpr(chunks):
                    buffer = (half * chunks + chunk) & 1
                    # the store that read this buffer two chunks ago is complete
                    if warp_index == 0:
                        cute.arch.cp_async_bulk_wait_group(1, read=True)
                    cute.arch.barrier(barrier_id=Barrier.PACK, number_of_threads=32 * PACK_WARPS)
                    for inside in cutlass.range(warp_index, self.chunk_rows, PACK_WARPS, unroll=2):
                        row = half * HALF_M + chunk * self.chunk_rows + inside
                        m = tile_row * TILE_M + row
                        target = s.sWords[inside, None, buffer]
                        count, spilled = self.pack_row(s.gate, row, column, lane, target, o.spill, m, extent)
                        nonzeros += count
                        overflows += spilled
                    cute.arch.fence_proxy("async.shared", space="cta")
                    if const_expr(chunk == chunks - 1):
                        if tile + step < extent.m_tiles * extent.n_tiles:
                            cute.arch.barrier_arrive(
                                barrier_id=Barrier.GATE_EMPTY_0 + half, number_of_threads=HANDOVER_THREADS
                            )
                        if lane == 0:
                            s.tally[warp_index, 0] = nonzeros
                            s.tally[warp_index, 1] = overflows
                    cute.arch.barrier(barrier_id=Barrier.PACK, number_of_threads=32 * PACK_WARPS)
                    if warp_index == 0:
                        band = (tile_row * TILE_M + half * HALF_M) // self.chunk_rows + chunk
                        cute.copy(words.atom, words_s[None, buffer], words_t[None, band, column])
                        cute.arch.cp_async_bulk_commit_group()
                entry = tile_row * 2 + half
                if warp_index == 0 and lane < 2 and entry < o.stats.shape[0] and column < o.stats.shape[1]:
                    o.stats[entry, column, lane] = s.tally[0, lane] + s.tally[1, lane] + s.tally[2, lane]
            tile += step
        if warp_index == 0:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def pack_row(self, gate, row: Int32, column: Int32, lane: Int32, words, spill, m: Int32, extent):
        """Pack one row of a tile; return its count and whether it overflows. Values outside the problem are zero."""
        valid = m < extent.rows
        panel, piece = lane >> 3, lane & 7
        offset = panel * (TILE_M * 64) + row * 64 + swizzle_piece(row, piece)
        quad = load_values(gate.iterator + offset)
        neuron = Uint32(column * TILE_N + lane * 8)
        inside = valid and neuron < Uint32(extent.neurons)
        for i in range_constexpr(4):
            quad[i] = quad[i] if inside else Uint32(0)
        count = pack_words(quad, neuron, words, self.width, self.width, lane, True)
        overflow = Int32(0)
        if count >= self.width:
            overflow = Int32(1)
            if valid:
                store_values(address(spill, m, neuron), quad)
        return count, overflow


@cute.jit
def pack_words(
    quad: Any,
    neuron: Uint32,
    words: Any,
    room: cutlass.Constexpr,
    width: Any,
    lane: Int32,
    skip: cutlass.Constexpr,
) -> Int32:
    """Pack a tile's 256 values, eight per lane from `neuron` on, into `words` in shared memory.

    All `room` words are written: the count in the first, non-zeros up to word `width` - 1, zeros. Returns the number of
    non-zeros: with `width` or more the tile overflows. `skip`: lanes without a non-zero branch around the stores.
    """
    for i in range_constexpr(room // 32):
        words[lane + 32 * i] = Uint32(0)
    flags = nonzero_flags(quad)
    own = count_flags(flags)
    place = 1 + lanes_before(own)
    count = Int32(cute.arch.warp_redux_sync(own, "add"))
    # until all lanes have cleared their words
    cute.arch.sync_warp()
    busy = own > 0 if const_expr(skip) else Boolean(True)
    if busy:
        for i in range_constexpr(8):
            if flags[i] & (place < width):
                words[place] = value_bits(quad, i) | (neuron + i)
            place += Int32(flags[i])
    if lane == 0:
        words[0] = Uint32(count)
    return count


def fake_arguments(spec: GatePackSpec | GatePackSkinnySpec) -> tuple[Any, ...]:
    """Fake x, w, bias, words, spill and stats, and an integer."""
    dtype = operands.DTYPES[spec.dtype]
    m, n, k = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    return (
        operands.rows(dtype, m, k),
        operands.rows(dtype, n, k),
        operands.vector(dtype, n) if spec.bias else None,
        *operands.packed(dtype, m),
        operands.cube(Int32, cute.sym_int32(), cute.sym_int32(), 2),
        Int32(1),
    )


def signature(spec: GatePackSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return GatePack(spec), fake_arguments(spec)
