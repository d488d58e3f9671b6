"""The gate GEMM of experts: words of TwELL of relu(x . w[expert]) for pairs of a token and an expert, in the order of
expert_pairs.py. For expert_union.py it writes the hidden states themselves, rounded, instead of words.

A cluster computes 256 neurons of a unit of pairs of one expert; two or four CTAs per SM. In units of up to eight pairs
it has eight CTAs, which divide the neurons into four parts, and two split the K of a part: each takes every second
block of 128 bytes. In larger ones pairs are as many bytes as weights: it has two CTAs, each with half of the neurons
and all of K, so that fewer read the pairs. Weights are the A operand of WGMMA, pairs the B operand, as few as eight.

    load        the last warp. TMA loads of w and x, 128 bytes of a row per stage, into a ring.
    mma         the other warps, four for each 64 neurons: WGMMA 64 x pairs x 16. Then the partial sums go to `sums`,
                which overlays the ring.
    epilogue    the mma warps again, after a cluster barrier. CTAs take pairs in turn: a warp per pair, eight neurons
                per lane. It adds the splits' sums from distributed shared memory in a fixed order, arrives at a second
                cluster barrier and writes its words before it waits there.

    FULL[s]    1 arrival + bytes.
    EMPTY[s]   mma warps arrive.
    MMA        mma threads: the ring has been read and may be overwritten.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import launch, operands
from ..common.activation import above, power
from ..common.copies import address, aligned, store_values
from ..common.rows import store_tile
from ..common.values import high_to_float, low_to_float, pack, relu_pack
from ..specs import E4M3, EXPERT_TOKENS, ExpertPackSpec
from .copies import Transfer, load_peer, partition, staged, tma_load
from .ring import open_ring, release

TILE_N, TILE_K_BYTES = geometry.TILE, 128
# bytes of K of a WGMMA
MMA_K_BYTES = 32
# bytes of a ring's stages if two CTAs share an SM
RING = 110 * 1024


class Operands(NamedTuple):
    """Operands in global memory that are accessed without TMA; see expert_pairs.py."""

    words: Any
    spill: Any
    units: Any  # int32 [U, 4]
    total: Any
    hidden: Any  # [pairs, N], or empty
    width: Any  # words per tile
    threshold: Any
    activation: Any
    scales: Any  # of rows of x and w if these are e4m3, else None


class Unit(NamedTuple):
    """Pairs, 0 if there is no such unit, the place of the first one, and the expert."""

    pairs: Any
    first: Any
    expert: Any


class Barrier(IntEnum):
    """Named barriers; 0 is __syncthreads."""

    MMA = 1


class ExpertPack:
    """For one dtype and number of pairs per unit; the compression is the run-time words_per_tile."""

    def __init__(self, spec: ExpertPackSpec):
        self.dtype, self.pairs = operands.DTYPES[spec.dtype], spec.tokens
        # the type of x and w, and columns of a stage
        self.value = cutlass.Float8E4M3FN if spec.dtype == E4M3 else self.dtype
        self.tile_k = TILE_K_BYTES * 8 // self.value.width
        # parts of a tile's neurons and splits of K, for a CTA of a cluster each; four CTAs of few pairs on a
        # multiprocessor, so that all CTAs of many neurons run at once
        self.parts, self.splits, self.ctas_per_sm = (4, 2, 4) if spec.tokens == EXPERT_TOKENS[0] else (2, 1, 2)
        self.cluster, self.neurons = self.parts * self.splits, TILE_N // self.parts
        self.groups = self.neurons // 64
        self.warps = 4 * self.groups
        self.stage_bytes = (self.neurons + self.pairs) * TILE_K_BYTES
        self.stages = min(5, RING // self.stage_bytes)
        # pairs of a warp in the epilogue
        self.rounds = max(1, self.pairs // (self.cluster * self.warps))
        # a pair's sums: neurons 0-3 of each eight, a gap of 4 words, then neurons 4-7. So the lanes of a fragment, and
        # lanes that read eight neurons each, hit different banks
        self.upper = self.neurons // 2 + 4
        self.pitch = self.neurons + 4

    @cute.jit
    def __call__(self, *arguments: Any):
        """x [M, K], w [E, N, K], the `Operands` and the stream."""
        x, w, others, scales = operands.factors(arguments)
        *given, stream = others
        o, stages = Operands(*[*given, scales]), self.stages
        shape = (self.neurons, self.pairs, self.tile_k)
        kinds = self.value, self.value, OperandMajorMode.K, OperandMajorMode.K, Float32
        mma = sm90.make_trivial_tiled_mma(*kinds, (self.groups, 1, 1), (64, self.pairs))
        w_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.value, stages)
        x_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.value, stages)
        by_expert = cute.make_tensor(w.iterator, cute.select(w.layout, mode=[1, 2, 0]))
        x_load = tma_load(x, x_layout, (self.pairs, self.tile_k))
        w_load = tma_load(by_expert, w_layout, (self.neurons, self.tile_k))
        ring = (cute.cosize(w_layout) + cute.cosize(x_layout)) * self.value.width // 8
        # the partial sums overlay the ring, which begins with the tiles of w
        assert 4 * self.pitch * self.pairs <= ring

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            sW: cute.struct.Align[cute.struct.MemRange[self.value, cute.cosize(w_layout)], 1024]
            sX: cute.struct.Align[cute.struct.MemRange[self.value, cute.cosize(x_layout)], 1024]

        self.shared = feasible.check_shared_memory(Shared, self.ctas_per_sm)
        if x.shape[0] > 0:
            kernel = self.kernel(x_load, w_load, o, mma, (x_layout, w_layout))
            grid = self.cluster, cute.ceil_div(w.shape[1], TILE_N), o.units.shape[0]
            limits = {"cluster": self.cluster, "ctas_per_sm": self.ctas_per_sm, "carveout": 100}
            launch.start(kernel, grid, 32 * self.warps + 32, stream, **limits)

    @cute.kernel
    def kernel(self, x: Transfer, w: Transfer, o: Operands, mma: cute.TiledMma, layouts: Any):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank, column, index = cute.arch.block_idx()
        shared = SmemAllocator().allocate(self.shared)
        if warp_index == self.warps:
            cpasync.prefetch_descriptor(x.atom)
            cpasync.prefetch_descriptor(w.atom)
        ring = open_ring(shared, self.stages, 1, self.warps, thread)
        sX, sW = staged((shared.sX, shared.sW), layouts)
        cute.arch.sync_threads()
        launch.wait()
        unit = Unit(Int32(0), Int32(0), Int32(0))
        if index < o.total[0]:
            expert, first, pairs = (o.units[index, i] for i in range(3))
            unit = Unit(pairs, first, expert)
        if unit.pairs > 0:
            part, split = rank % self.parts, rank // self.parts
            blocks = (cute.ceil_div(x.tensor.shape[1], self.tile_k) - split + self.splits - 1) // self.splits
            sums = cute.make_tensor(
                cute.recast_ptr(shared.sW.data_ptr(), dtype=Float32), cute.make_layout(self.pitch * self.pairs)
            )
            if warp_index == self.warps:
                self.load(ring, x, w, sX, sW, unit, column * self.parts + part, split, blocks)
            else:
                self.mma(ring, mma, sX, sW, sums, blocks, thread)
            self.epilogue(sums, o, unit, rank, column, warp_index)

    @cute.jit
    def load(self, ring, x: Transfer, w: Transfer, sX, sW, unit: Unit, column: Int32, split: Int32, blocks: Int32):
        """Load the CTA's blocks of K, one per stage."""
        lane = cute.arch.lane_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        x = Transfer(x.atom, cute.domain_offset((unit.first, 0), x.tensor))
        w = Transfer(w.atom, w.tensor[None, None, unit.expert])
        x_s, x_t = partition(x, sX, (self.pairs, self.tile_k))
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
        """Multiply the CTA's blocks of K, then store its partial sums by pair."""
        lane = cute.arch.lane_idx()
        leader = mma.get_slice(cute.make_layout(self.groups, stride=128)(cute.arch.make_warp_uniform(thread // 128)))
        rW = mma.make_fragment_A(leader.partition_A(sW))
        rX = mma.make_fragment_B(leader.partition_B(sX))
        coordinates = mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.neurons, self.pairs)))
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
            neuron, pair = coordinates[i]
            sums[pair * self.pitch + (neuron >> 3) * 4 + (neuron & 3) + ((neuron >> 2) & 1) * self.upper] = acc[i]

    @cute.jit
    def epilogue(self, sums: cute.Tensor, o: Operands, unit: Unit, rank: Int32, column: Int32, warp_index):
        """Make words and spill, or hidden states, of the cluster's partial sums: a warp takes `rounds` pairs.

        The last warp takes part only in the cluster barriers.
        """
        quads = cute.make_rmem_tensor((4, self.rounds), Uint32)
        # the warp's first pair, and the lane's first neuron
        first, neuron = rank + self.cluster * warp_index, column * TILE_N + cute.arch.lane_idx() * 8
        # every CTA's partial sums are written
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp_index < self.warps and first < unit.pairs:
            self.reduce_splits(sums, quads, first, o, unit, rank, neuron)
        # no CTA reads a peer's sums any more
        cute.arch.cluster_arrive()
        if warp_index < self.warps:
            for i in range_constexpr(self.rounds):
                pair = first + self.cluster * self.warps * i
                if pair < unit.pairs:
                    self.store(quads[None, i], unit.first + pair, column, o, neuron)
        cute.arch.cluster_wait()

    @cute.jit
    def reduce_splits(self, sums: cute.Tensor, quads: cute.Tensor, first: Int32, o: Operands, unit, rank, neuron):
        """Add the splits' sums of eight neurons for each pair of the warp; ReLU, rounding and the threshold."""
        lanes, lane = 32 // self.parts, cute.arch.lane_idx()
        values = cute.make_rmem_tensor((8,), Float32)
        for round in range_constexpr(self.rounds):
            values.fill(0.0)
            pair = first + self.cluster * self.warps * round
            source = sums.iterator + (pair * self.pitch + lane % lanes * 4)
            for s in range_constexpr(self.splits):
                # each CTA begins with another peer; a pair has the same CTA in every run
                split = (s + rank) % self.splits
                for i in range_constexpr(2):
                    four = load_peer(source + i * self.upper, split * self.parts + lane // lanes)
                    for j in range_constexpr(4):
                        values[4 * i + j] += four[j]
            if const_expr(o.scales is not None):
                self.scale(values, o, unit, pair, neuron)
            for i in range_constexpr(4):
                two = above(relu_pack(values[2 * i], values[2 * i + 1], self.dtype), o.threshold, self.dtype)
                quads[i, round] = two if neuron < o.hidden.shape[1] else Uint32(0)

    @cute.jit
    def scale(self, values: cute.Tensor, o: Operands, unit: Unit, pair: Int32, neuron: Int32):
        """Multiply the sums of a unit's pair by the scales of its row of x and of the rows of w."""
        if (pair < unit.pairs) & (neuron < o.hidden.shape[1]):
            scales, of_pair = cute.make_rmem_tensor((8,), Float32), o.scales.x[unit.first + pair]
            cute.autovec_copy(aligned(address(o.scales.w, unit.expert, neuron), 8), scales)
            for i in range_constexpr(8):
                values[i] = values[i] * scales[i] * of_pair

    @cute.jit
    def store(self, quad: cute.Tensor, m: Int32, column: Int32, o: Operands, neuron: Int32):
        """Write the words of one pair's tile, and its values if it overflows; or its hidden states."""
        if o.hidden.shape[0] == 0:
            target, spilled = address(o.words, m, column * o.width), address(o.spill, m, neuron)
            store_tile(quad, target, spilled, neuron, o.width, Boolean(True), cute.arch.lane_idx())
        elif neuron < o.hidden.shape[1]:
            rounded = cute.make_rmem_tensor((4,), Uint32)
            for i in range_constexpr(4):
                pair = (low_to_float(quad[i], self.dtype), high_to_float(quad[i], self.dtype))
                rounded[i] = pack(*(power(value, o.activation) for value in pair), self.dtype)
            store_values(address(o.hidden, m, neuron), rounded)


def signature(spec: ExpertPackSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype, fp8, rows, n = (
        operands.DTYPES[spec.dtype],
        spec.dtype == E4M3,
        cute.sym_int32(),
        cute.sym_int32(divisibility=8),
    )
    k, count = cute.sym_int32(divisibility=16 if fp8 else 8), cute.sym_int32()
    scaled = (
        *(operands.byte_rows(Uint8, rows, k), operands.strided(Float32, rows)),
        *(operands.byte_rows(Uint8, count, n, k), operands.dense(Float32, count, n, align=4)),
    )
    return ExpertPack(spec), (
        *(scaled if fp8 else (operands.rows(dtype, rows, k), operands.rows(dtype, count, n, k))),
        *operands.packed(dtype, cute.sym_int32()),
        operands.dense(Int32, cute.sym_int32(), 4),
        operands.dense(Int32, cute.sym_int32()),
        operands.rows(dtype, cute.sym_int32(), n),
        Int32(geometry.words_per_tile(8)),
        *(Int32(0),) * 2,
    )
