"""The gate GEMM of gate_pack.py for few tokens, bound by memory: each weight is read once by the whole chip.

A cluster computes a tile of 256 neurons and all tokens, up to 128; two or four CTAs per SM. It has eight CTAs, which
divide the neurons into four parts, and two split the K of a part: each takes every second block of 128 bytes. If
`wide` it has two, each with half of the neurons and all of K. Weights are the A operand of WGMMA, tokens the B operand,
as few as eight.

    load        the last warp. TMA loads of w and x, 128 bytes of a row per stage, into a ring.
    mma         the other warps, four for each 64 neurons: WGMMA 64 x tokens x 16. Then the partial sums go to `sums`,
                which overlays the ring.
    epilogue    the mma warps again, after a cluster barrier. CTAs take tokens in turn: a warp per token, eight neurons
                per lane. It adds the splits' sums from distributed shared memory in a fixed order, sends counts to CTA
                0 and arrives at a second cluster barrier. It writes its words before it waits there; then CTA 0 writes
                the statistics.

    FULL[s]    1 arrival + bytes.
    EMPTY[s]   mma warps arrive.
    MMA        mma threads: the ring has been read and may be overwritten.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import operands
from ..common.activation import above, levels_of
from ..common.copies import address, store_values
from ..common.rows import MAX_WIDTH, clear_arrivals, pack_words, store_words
from ..common.values import count_flags, nonzero_flags, relu_pack
from ..specs import E4M3, GatePackFewSpec
from .copies import Transfer, load_peer, partition, store_peer, tma_load
from .ring import open_ring, release

TILE_N, TILE_K_BYTES = geometry.TILE, 128
# bytes of K of a WGMMA
MMA_K_BYTES = 32
# bytes of a ring's stages if two CTAs share an SM
RING = 110 * 1024


class Operands(NamedTuple):
    """Operands in global memory that are accessed without TMA; an empty `bias` stands for none."""

    bias: Any  # [N], [2 N] with thresholds behind, or [0]
    words: Any
    spill: Any
    stats: Any
    arrivals: Any  # int32 [any]: counters of the next kernel, which this one zeroes
    width: Any  # words per tile
    threshold: Any
    experts: Any = None  # of expert_pack.py
    scales: Any = None  # of x and w, see gate_pack_few_e4m3.py


class Extent(NamedTuple):
    """Tokens, the places of the first one in words and in x, neurons, blocks of K, and the expert."""

    tokens: Any
    first: Any
    source: Any
    neurons: Any
    blocks: Any
    expert: Any
    early: Any = None  # see gate_pack_few_e4m3.py


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads."""

    MMA = 1


class GatePackFew:
    """For one dtype, presence of a bias and number of tokens; the compression is the run-time words_per_tile."""

    def __init__(self, spec: GatePackFewSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        # the type of x and w, and columns of a stage
        self.value = cutlass.Float8E4M3FN if spec.dtype == E4M3 else self.dtype
        self.tile_k = TILE_K_BYTES * 8 // self.value.width
        self.tokens = spec.tokens
        # CTAs of a cluster: parts of a tile's neurons, and splits of K
        self.arrange(*((2, 1) if spec.wide else (4, 2)), 4 if self.tokens == 8 and not spec.wide else 2)

    def arrange(self, parts: int, splits: int, ctas_per_sm: int) -> None:
        """Divide a tile of neurons and K among the CTAs of a cluster."""
        self.parts, self.splits = parts, splits
        self.cluster, self.neurons = self.parts * self.splits, TILE_N // self.parts
        self.groups = self.neurons // 64
        self.warps = 4 * self.groups
        # four CTAs on a multiprocessor, so that all CTAs of many neurons run at once, or two
        self.ctas_per_sm = ctas_per_sm
        self.stage_bytes = (self.neurons + self.tokens) * TILE_K_BYTES
        self.stages = 5 if self.ctas_per_sm == 4 else min(6, RING // self.stage_bytes)
        # tokens of a warp in the epilogue
        self.rounds = max(1, self.tokens // (self.cluster * self.warps))
        # a token's sums: neurons 0-3 of each eight, a gap of 4 words, then neurons 4-7. So the lanes of a fragment, and
        # lanes that read eight neurons each, hit different banks
        self.upper = self.neurons // 2 + 4
        self.pitch = self.neurons + 4

    @cute.jit
    def __call__(self, *arguments: Any):
        """x, w, the `Operands` and the stream."""
        x, w, *given, stream = arguments
        extent = Extent(x.shape[0], Int32(0), Int32(0), w.shape[0], cute.ceil_div(x.shape[1], self.tile_k), Int32(0))
        self.launch(x, w, Operands(*given), extent, Int32(1), stream)

    @cute.jit
    def launch(self, x: cute.Tensor, w: cute.Tensor, o: Any, extent: Extent, units: Int32, stream: cuda.CUstream):
        """Launch the kernel for x [M, K] and w [N, K] or, of experts, [N, K, E]; so many `units` of tokens at most."""
        stages = self.stages
        shape = (self.neurons, self.tokens, self.tile_k)
        mma = sm90.make_trivial_tiled_mma(
            self.value,
            self.value,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (self.groups, 1, 1),
            (64, self.tokens),
        )
        w_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.value, stages)
        x_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.value, stages)
        loads = tma_load(x, x_layout, (self.tokens, self.tile_k)), tma_load(w, w_layout, (self.neurons, self.tile_k))
        ring = (cute.cosize(w_layout) + cute.cosize(x_layout)) * self.value.width // 8
        # the partial sums overlay the ring, which begins with the tiles of w
        assert 4 * self.pitch * self.tokens <= ring

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            counts: cute.struct.MemRange[Int32, self.cluster * self.warps * self.rounds]
            rows: cute.struct.Align[cute.struct.MemRange[Uint32, MAX_WIDTH * self.warps], 16]
            sW: cute.struct.Align[cute.struct.MemRange[self.value, cute.cosize(w_layout)], 1024]
            sX: cute.struct.Align[cute.struct.MemRange[self.value, cute.cosize(x_layout)], 1024]

        self.shared = feasible.check_shared_memory(Shared, self.ctas_per_sm)
        if extent.tokens > 0:
            self.kernel(*loads, o, mma, x_layout, w_layout, extent).launch(
                grid=(self.cluster, cute.ceil_div(extent.neurons, TILE_N), units),
                block=(32 * self.warps + 32, 1, 1),
                cluster=(self.cluster, 1, 1),
                min_blocks_per_mp=self.ctas_per_sm,
                preferred_smem_carveout=100,
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(
        self,
        x: Transfer,
        w: Transfer,
        o: Operands,
        mma: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
        extent: Extent,
    ):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank, column, unit = cute.arch.block_idx()
        shared = SmemAllocator().allocate(self.shared)
        if warp_index == self.warps:
            cpasync.prefetch_descriptor(x.atom)
            cpasync.prefetch_descriptor(w.atom)
        ring = open_ring(shared, self.stages, 1, self.warps, thread)
        sX = shared.sX.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        sW = shared.sW.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        cute.arch.sync_threads()
        if warp_index == self.warps:
            self.start(ring, w, sW, extent, column, rank)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if column == 0 and rank == 0 and unit == 0:
            clear_arrivals(o.arrivals, thread, 32 * self.warps + 32)
        extent, exists = self.part_of(o, extent, unit, column == 0 and rank == 0 and thread == 0)
        if exists:
            part, split = rank % self.parts, rank // self.parts
            blocks = self.blocks_of(extent, split)
            sums = cute.make_tensor(
                cute.recast_ptr(shared.sW.data_ptr(), dtype=Float32), cute.make_layout(self.pitch * self.tokens)
            )
            # the warp's first token in the epilogue
            first = rank + self.cluster * warp_index
            if warp_index == self.warps:
                self.load(ring, x, w, sX, sW, extent, column * self.parts + part, split, blocks)
            else:
                self.mma(ring, mma, sX, sW, sums, blocks, thread)
            self.epilogue(shared, sums, o, extent, first, (rank, column, thread, warp_index, lane))

    def blocks_of(self, extent: Extent, split: Int32) -> Int32:
        """The blocks of K of a split."""
        return (extent.blocks - split + self.splits - 1) // self.splits

    def start(self, ring, w: Transfer, sW: cute.Tensor, extent: Extent, column: Int32, rank: Int32) -> None:
        """Load what the kernels before do not write, by the load warp."""

    def part_of(self, o: Operands, extent: Extent, unit: Int32, leads: Boolean) -> Any:
        """The extent of a unit, and whether there is one; one thread of the unit's `leads`."""
        return extent, Boolean(True)

    @cute.jit
    def load(self, ring, x: Transfer, w: Transfer, sX, sW, extent: Extent, column, split, blocks):
        """Load the CTA's blocks of K, one per stage."""
        lane = cute.arch.lane_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        if const_expr(cute.rank(w.tensor) > 2):
            x = Transfer(x.atom, cute.domain_offset((extent.source, 0), x.tensor))
            w = Transfer(w.atom, w.tensor[None, None, extent.expert])
        x_s, x_t = partition(x, sX, (self.tokens, self.tile_k))
        w_s, w_t = partition(w, sW, (self.neurons, self.tile_k))
        for i in cutlass.range(blocks, unroll=1):
            cute.arch.mbarrier_wait(ring.empty + state.index, state.phase)
            barrier = ring.full + state.index
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.stage_bytes)
            block = split + i * self.splits
            cute.copy(w.atom, w_t[None, column, block], w_s[None, state.index], tma_bar_ptr=barrier)
            cute.copy(x.atom, x_t[None, 0, block], x_s[None, state.index], tma_bar_ptr=barrier)
            state.advance()

    @cute.jit
    def mma(self, ring, mma: cute.TiledMma, sX: cute.Tensor, sW: cute.Tensor, sums: cute.Tensor, blocks: Int32, thread):
        """Multiply the CTA's blocks of K, then store its partial sums by token."""
        lane = cute.arch.lane_idx()
        leader = mma.get_slice(cute.make_layout(self.groups, stride=128)(cute.arch.make_warp_uniform(thread // 128)))
        rW = mma.make_fragment_A(leader.partition_A(sW))
        rX = mma.make_fragment_B(leader.partition_B(sX))
        coordinates = mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.neurons, self.tokens)))
        acc = cute.make_rmem_tensor(coordinates.shape, Float32)
        acc.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        for i in cutlass.range(blocks, unroll=1):
            cute.arch.mbarrier_wait(ring.full + full.index, full.phase)
            warpgroup.fence()
            for k in range_constexpr(TILE_K_BYTES // MMA_K_BYTES):
                cute.gemm(mma, acc, rW[None, None, k, full.index], rX[None, None, k, full.index], acc)
            warpgroup.commit_group()
            # the products of the previous stage are complete
            warpgroup.wait_group(1)
            if i > 0:
                read = release(ring, read, lane)
            full.advance()
        warpgroup.wait_group(0)
        # another warp may still read the ring
        cute.arch.barrier(barrier_id=Barrier.MMA, number_of_threads=32 * self.warps)
        for i in range_constexpr(cute.size(acc)):
            neuron, token = coordinates[i]
            sums[token * self.pitch + (neuron >> 3) * 4 + (neuron & 3) + ((neuron >> 2) & 1) * self.upper] = acc[i]

    @cute.jit
    def epilogue(self, shared, sums: cute.Tensor, o: Operands, extent: Extent, first: Int32, at):
        """Make words, spill and statistics of the cluster's partial sums: a warp takes `rounds` tokens from `first` on.

        The last warp takes part only in the cluster barriers.
        """
        rank, column, thread, warp_index, lane = at
        counts = shared.counts.get_tensor(cute.make_layout(self.cluster * self.warps * self.rounds))
        quads = cute.make_rmem_tensor((4, self.rounds), Uint32)
        # every CTA's partial sums are written
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp_index < self.warps:
            quads.fill(0)
            if first < extent.tokens:
                self.reduce_splits(sums, quads, first, column, o, extent, rank, lane)
            self.send_counts(quads, counts, first, extent.tokens, rank, warp_index, lane)
        # the counts are complete, and no CTA reads a peer's sums any more
        cute.arch.cluster_arrive()
        if warp_index < self.warps:
            buffer = cute.make_tensor(shared.rows.data_ptr() + warp_index * MAX_WIDTH, cute.make_layout(MAX_WIDTH))
            for i in range_constexpr(self.rounds):
                m = first + self.cluster * self.warps * i
                if m < extent.tokens:
                    self.pack(quads[None, i], extent.first + m, column, o, buffer, lane)
        cute.arch.cluster_wait()
        if rank == 0 and thread < o.stats.shape[0]:
            nonzeros, overflows = Int32(0), Int32(0)
            for i in range_constexpr(geometry.STATS_ROWS):
                count = counts[thread * geometry.STATS_ROWS + i]
                nonzeros += count
                overflows += Int32(count >= o.width)
            o.stats[thread, column, 0] = nonzeros
            o.stats[thread, column, 1] = overflows

    @cute.jit
    def reduce_splits(self, sums: cute.Tensor, quads: cute.Tensor, first, column, o: Operands, extent, rank, lane):
        """Add the splits' sums of eight neurons for each token of the warp; ReLU, rounding and the thresholds."""
        part, at = lane // (32 // self.parts), (lane % (32 // self.parts)) * 4
        neuron = column * TILE_N + lane * 8
        values = cute.make_rmem_tensor((8,), Float32)
        levels = levels_of(o.bias, extent.neurons, neuron, o.threshold)
        for round in range_constexpr(self.rounds):
            self.start_sums(values, o, neuron)
            token = first + self.cluster * self.warps * round
            source = sums.iterator + (token * self.pitch + at)
            for s in range_constexpr(self.splits):
                # each CTA begins with another peer; a token has the same CTA in every run
                split = (s + rank) % self.splits
                for i in range_constexpr(2):
                    four = load_peer(source + i * self.upper, split * self.parts + part)
                    for j in range_constexpr(4):
                        values[4 * i + j] += four[j]
            self.finish_sums(values, o, extent, token, neuron)
            for i in range_constexpr(4):
                pair = above(relu_pack(values[2 * i], values[2 * i + 1], self.dtype), levels[i], self.dtype)
                quads[i, round] = pair if neuron < extent.neurons else Uint32(0)

    @cute.jit
    def start_sums(self, values: cute.Tensor, o: Operands, neuron: Int32):
        """The bias of eight neurons, to which the splits' sums are added."""
        values.fill(0.0)
        # an empty bias has no neurons
        if neuron < o.bias.shape[0]:
            for i in range_constexpr(8):
                values[i] = o.bias[neuron + i].to(Float32)

    def finish_sums(self, values: cute.Tensor, o: Operands, extent: Extent, token: Int32, neuron: Int32) -> None:
        """What becomes of the sums of a unit's token before the activation."""

    @cute.jit
    def send_counts(self, quads: cute.Tensor, counts: cute.Tensor, first: Int32, tokens: Int32, rank, warp_index, lane):
        """Store the number of non-zeros of each of the warp's tokens in CTA 0; zero the tokens beyond the last."""
        for i in range_constexpr(self.rounds):
            valid = first + self.cluster * self.warps * i < tokens
            for j in range_constexpr(4):
                quads[j, i] = quads[j, i] if valid else Uint32(0)
            count = Int32(cute.arch.warp_redux_sync(count_flags(nonzero_flags(quads[None, i])), "add"))
            if lane == i:
                store_peer(counts.iterator + (rank + self.cluster * (warp_index + self.warps * i)), Int32(0), count)

    @cute.jit
    def pack(self, quad: cute.Tensor, m: Int32, column, o: Operands, buffer, lane):
        """Write the words of one token's tile, and its values if it overflows."""
        neuron = column * TILE_N + lane * 8
        count = pack_words(quad, Uint32(neuron), buffer, o.width, lane)
        store_words(address(o.words, m, column * o.width), buffer, o.width, lane)
        if count >= o.width:
            store_values(address(o.spill, m, neuron), quad)


def signature(spec: GatePackFewSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return GatePackFew(spec), operands.gate_pack(spec.dtype)
