"""The gate GEMM of gate_pack_few.py for up to eight tokens, which reads a row of weights in bf16 only if a screen in
int8 says that its gate may be positive: half of the bytes, and some rows.

Clusters, their parts of a tile's neurons, the splits of K and the epilogue are those of gate_pack_few.py. A CTA works
in two steps, both in the memory of one ring:

    screen   Its 64 neurons and its columns in int8, 128 per stage, by WGMMA 64 x 8 x 32. The two splits of a part send
             each other their sums, and each compares the totals with the thresholds of gate_screen.py. A neuron that
             any token may fire is a candidate. Both splits find the same.
    gates    The rows of its candidates in bf16, 64 columns per stage, by WGMMA 64 x 8 x 16 with rows from registers.
             Candidates take the first places of the 64, so a stage is as small as their number allows, and the ring
             holds up to 22 of them. Sums of all other neurons are minus infinity: ReLU makes 0 of them.

A gate is the sum of the same products in the same order as in gate_pack_few.py, so it has the same bits.

    load     warp 4. The int8 weights of the first stages before the kernel ahead has ended: it is `quantize_gate` of x,
             and whatever wrote them ended before that one let this one start.
    mma      warps 0 to 3. Both products, terms of the bound while they wait, and the epilogue.

    SCREEN FULL[s]   1 arrival + bytes of w and x.
    SCREEN EMPTY[s]  4 mma warps arrive.
    EXCHANGED        1 arrival + the bytes that the other split sends.
    __syncthreads    the candidates are found, and the ring is free. Each warp lists them for itself.
    GATES FULL[s]    32 lanes when their copies of rows have arrived, 1 arrival + bytes of x.
    GATES EMPTY[s]   all lanes of 4 mma warps arrive: each has read rows.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int8, Int32, Int64, Uint32, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible
from ..common import operands
from ..common.copies import address, copy_async, load_quad
from ..common.mma import load_matrices
from ..common.rows import MAX_WIDTH, clear_arrivals
from ..common.swizzle import swizzle_piece
from ..specs import GatePackScreenedSpec
from .copies import Transfer, send_words, tma_load
from .gate_pack_few import CLUSTER, MMA_THREADS, NEURONS, PARTS, SPLITS, THREADS, TILE_K, TILE_N, WARPS, GatePackFew
from .gate_screen import Constants, GateScreen
from .ring import Ring, open_ring, release

# columns of a stage of the screen
SCREEN_K = 128
# The ring in units of 1,024 bytes: of eight rows of a stage of either step, and so of the tokens.
UNIT, ROWS = 1024, 8
STAGE_UNITS = NEURONS // ROWS + 1
# rows that the load warp copies at a time, 128 bytes each
PASS = 4


class Operands(NamedTuple):
    """Operands in global memory that are accessed without TMA; an empty `bias` stands for none."""

    w: Any
    bias: Any
    x_scale: Any
    x_spread: Any
    x_offset: Any
    w_scale: Any
    w_spread: Any
    w_offset: Any
    words: Any
    spill: Any
    stats: Any
    arrivals: Any
    constants: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory, and its two rings of mbarriers."""

    screen: Any
    gates: Any
    exchanged: Any  # mbarrier
    sW: Any  # int8 weights
    sQ: Any  # int8 tokens
    sX: Any  # tokens, one stage per unit of the ring
    units: Any  # the ring as 16-bit values
    found: Any  # [WARPS] a bit for each of a warp's 16 neurons
    places: Any  # [NEURONS] neuron of each place, of this warp
    received: Any  # [4 * MMA_THREADS] sums of the other split
    sums: Any


class Extent(NamedTuple):
    """Numbers of rows, neurons and columns."""

    rows: Int32
    neurons: Int32
    columns: Int32


class Part(NamedTuple):
    """The neurons of a CTA, in units of 64, and its split."""

    column: Int32
    split: Int32


class Candidates(NamedTuple):
    """Number of a CTA's candidates, groups of eight of them, and stages that the ring has for them."""

    count: Int32
    groups: Int32
    stages: Int32


class GatePackScreened(GatePackFew):
    """For one dtype; an empty bias is none. The compression is the run-time words_per_tile."""

    def __init__(self, spec: GatePackScreenedSpec):
        super().__init__(spec)
        self.units = self.stages * STAGE_UNITS
        # with up to eight candidates
        self.most_stages = self.units // 2

    token_operands, token_terms = GateScreen.token_operands, GateScreen.token_terms
    neuron_operands, neuron_terms = GateScreen.neuron_operands, GateScreen.neuron_terms

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        bias: cute.Tensor,
        x_q: cute.Tensor,
        x_scale: cute.Tensor,
        x_spread: cute.Tensor,
        x_offset: cute.Tensor,
        w_q: cute.Tensor,
        w_scale: cute.Tensor,
        w_spread: cute.Tensor,
        w_offset: cute.Tensor,
        words: cute.Tensor,
        spill: cute.Tensor,
        stats: cute.Tensor,
        arrivals: cute.Tensor,
        words_per_tile: Int32,
        threshold: Int32,
        root: Float32,
        tail: Float32,
        product: Float32,
        x_part: Float32,
        w_part: Float32,
        slack: Float32,
        usual: Float32,
        block: Float32,
        dithers: Float32,
        stream: cuda.CUstream,
    ):
        stages, tokens, K = self.stages, self.tokens, OperandMajorMode.K
        screen = sm90.make_trivial_tiled_mma(Int8, Int8, K, K, Int32, (1, 1, 1), (64, tokens))
        gates = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, K, K, Float32, (1, 1, 1), (64, tokens), warpgroup.OperandSource.RMEM
        )
        shape = (NEURONS, tokens, SCREEN_K)
        w_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, Int8, stages)
        q_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, Int8, stages)
        x_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (NEURONS, tokens, TILE_K), self.dtype, self.units)
        transfers = [
            tma_load(tensor, layout, box)
            for tensor, layout, box in (
                (w_q, w_layout, (NEURONS, SCREEN_K)),
                (x_q, q_layout, (tokens, SCREEN_K)),
                (x, x_layout, (tokens, TILE_K)),
            )
        ]
        # the tokens of the screen lie behind its weights, both in the ring
        assert cute.cosize(w_layout) + cute.cosize(q_layout) == 2 * cute.cosize(x_layout) == UNIT * self.units

        @cute.struct
        class Shared:
            screen_full: cute.struct.MemRange[Int64, stages]
            screen_empty: cute.struct.MemRange[Int64, stages]
            gates_full: cute.struct.MemRange[Int64, self.most_stages]
            gates_empty: cute.struct.MemRange[Int64, self.most_stages]
            exchanged: cute.struct.MemRange[Int64, 1]
            counts: cute.struct.MemRange[Int32, CLUSTER * WARPS * self.rounds]
            found: cute.struct.MemRange[Uint32, WARPS]
            places: cute.struct.MemRange[Int32, (WARPS + 1) * NEURONS]
            rows: cute.struct.Align[cute.struct.MemRange[Uint32, MAX_WIDTH * WARPS], 16]
            received: cute.struct.Align[cute.struct.MemRange[Int32, 4 * MMA_THREADS], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.pitch * tokens], 16]
            sW: cute.struct.Align[cute.struct.MemRange[Int8, cute.cosize(w_layout)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[Int8, cute.cosize(q_layout)], 1024]

        self.shared = feasible.check_shared_memory(Shared, self.ctas_per_sm)
        constants = Constants(root, tail, product, x_part, w_part, slack, usual, block, dithers)
        vectors = (x_scale, x_spread, x_offset, w_scale, w_spread, w_offset)
        o = Operands(w, bias, *vectors, words, spill, stats, arrivals, constants)
        if x.shape[0] > 0:
            self.kernel(
                *transfers, o, screen, gates, w_layout, q_layout, x_layout, (words_per_tile, threshold),
                Extent(x.shape[0], w.shape[0], x.shape[1]),
            ).launch(
                grid=(CLUSTER, cute.ceil_div(w.shape[0], TILE_N), 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1),
                min_blocks_per_mp=self.ctas_per_sm, preferred_smem_carveout=100, stream=stream, use_pdl=True,
            )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        w_q: Transfer,
        x_q: Transfer,
        x: Transfer,
        o: Operands,
        screen: cute.TiledMma,
        gates: cute.TiledMma,
        w_layout: cute.ComposedLayout,
        q_layout: cute.ComposedLayout,
        x_layout: cute.ComposedLayout,
        format: tuple[Int32, Int32],
        extent: Extent,
    ):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank, column, _ = cute.arch.block_idx()
        shared = SmemAllocator().allocate(self.shared)
        if warp_index == WARPS:
            cpasync.prefetch_descriptor(w_q.atom)
            cpasync.prefetch_descriptor(x_q.atom)
            cpasync.prefetch_descriptor(x.atom)
        units = cute.recast_ptr(shared.sW.data_ptr(), x_layout.inner, self.dtype)
        s = Views(
            screen=open_ring(Ring(shared.screen_full, shared.screen_empty), self.stages, 1, WARPS, thread),
            gates=open_ring(Ring(shared.gates_full, shared.gates_empty), self.most_stages, 33, MMA_THREADS, thread),
            exchanged=shared.exchanged.data_ptr(),
            sW=shared.sW.get_tensor(w_layout.outer, swizzle=w_layout.inner),
            sQ=shared.sQ.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            sX=cute.make_tensor(units, x_layout.outer),
            units=cute.recast_ptr(shared.sW.data_ptr(), dtype=self.dtype),
            found=shared.found.get_tensor(cute.make_layout(WARPS)),
            places=cute.make_tensor(shared.places.data_ptr() + warp_index * NEURONS, cute.make_layout(NEURONS)),
            received=shared.received.data_ptr(),
            sums=shared.sums.get_tensor(cute.make_layout(self.pitch * self.tokens)),
        )
        self.open_exchange(s, thread)
        part = Part(column * PARTS + rank % PARTS, rank // PARTS)
        if warp_index == WARPS:
            self.load_ahead(s, w_q, part, extent)
        pipeline.pipeline_init_wait(cluster_shape_mn=(CLUSTER, 1))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if column == 0 and rank == 0:
            clear_arrivals(o.arrivals, thread, THREADS)
        if warp_index == WARPS:
            self.load(s, w_q, x_q, part, extent)
            self.list_candidates(s, lane)
            self.load_candidates(s, x, o.w, part, extent)
        else:
            for i in cutlass.range(thread, self.pitch * self.tokens, MMA_THREADS, unroll=1):
                s.sums[i] = -Float32.inf
            self.screen(s, o, screen, part, rank, thread, extent)
            self.list_candidates(s, lane)
            self.multiply_candidates(s, gates, part, thread, extent)
        at = (rank, column, thread, warp_index, lane)
        self.epilogue(
            shared, s.sums, o.bias, o.words, o.spill, o.stats, format, extent, rank + CLUSTER * warp_index, at
        )

    @cute.jit
    def open_exchange(self, s, thread):
        """Expect the sums of the other split; mbarriers are initialised for this CTA, and on the way to the cluster."""
        if thread == 0:
            cute.arch.mbarrier_init(s.exchanged, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(s.exchanged, 16 * MMA_THREADS)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(CLUSTER, 1), is_relaxed=True)

    @cute.jit
    def blocks(self, part, columns, width: cutlass.Constexpr) -> Int32:
        """Number of the split's blocks of so many columns: each split takes every second one."""
        return (cute.ceil_div(columns, width) - part.split + SPLITS - 1) // SPLITS

    @cute.jit
    def partition(self, transfer, target, box: cutlass.Constexpr):
        """Stages in shared memory and tiles in global memory of a TMA load."""
        tiles = cute.local_tile(transfer.tensor, box, (None, None))
        return cpasync.tma_partition(
            transfer.atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    # ---- screen ----

    @cute.jit
    def load_ahead(self, s, w_q, part, extent):
        """Load the weights of as many blocks as the ring holds."""
        lane, blocks = cute.arch.lane_idx(), self.blocks(part, extent.columns, SCREEN_K)
        w_s, w_t = self.partition(w_q, s.sW, (NEURONS, SCREEN_K))
        for i in cutlass.range(cutlass.min(blocks, self.stages), unroll=1):
            self.load_weights(s, w_q, w_s, w_t, part, i, i, lane)

    @cute.jit
    def load_weights(self, s, w_q, w_s, w_t, part, i, stage, lane):
        """Load the weights of the split's i-th block, and expect its tokens."""
        barrier = s.screen.full + stage
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, (NEURONS + self.tokens) * SCREEN_K)
        cute.copy(w_q.atom, w_t[None, part.column, part.split + i * SPLITS], w_s[None, stage], tma_bar_ptr=barrier)

    @cute.jit
    def load(self, s, w_q, x_q, part, extent):
        """Load the tokens of all blocks, and the weights of those that `load_ahead` has left."""
        lane, blocks = cute.arch.lane_idx(), self.blocks(part, extent.columns, SCREEN_K)
        w_s, w_t = self.partition(w_q, s.sW, (NEURONS, SCREEN_K))
        x_s, x_t = self.partition(x_q, s.sQ, (self.tokens, SCREEN_K))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for i in cutlass.range(blocks, unroll=1):
            if i >= self.stages:
                cute.arch.mbarrier_wait(s.screen.empty + state.index, state.phase)
                self.load_weights(s, w_q, w_s, w_t, part, i, state.index, lane)
            block, barrier = part.split + i * SPLITS, s.screen.full + state.index
            cute.copy(x_q.atom, x_t[None, 0, block], x_s[None, state.index], tma_bar_ptr=barrier)
            state.advance()

    @cute.jit
    def screen(self, s, o, mma: cute.TiledMma, part, rank, thread, extent):
        """Multiply the split's blocks in int8, add the other split's sums, and find the candidates.

        Lane 4 g + q has tokens 2 q and 2 q + 1 of neurons g and g + 8 of its warp's 16.
        """
        lane, warp_index = cute.arch.lane_idx(), cute.arch.make_warp_uniform(thread // 32)
        group, quarter = lane >> 2, lane & 3
        first = part.column * NEURONS + warp_index * 16 + group
        # read here and used late: they arrive behind the stages of the whole ring
        of_neurons = [self.neuron_operands(o, first + 8 * i, extent) for i in range(2)]
        tokens = [self.token_terms(o, self.token_operands(o, 2 * quarter + j, extent)) for j in range(2)]

        leader = mma.get_slice(0)
        rW = mma.make_fragment_A(leader.partition_A(s.sW))
        rX = mma.make_fragment_B(leader.partition_B(s.sQ))
        acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((NEURONS, self.tokens)), Int32)
        acc.fill(0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        for _ in cutlass.range(self.blocks(part, extent.columns, SCREEN_K), unroll=1):
            cute.arch.mbarrier_wait(s.screen.full + state.index, state.phase)
            warpgroup.fence()
            for k in range_constexpr(SCREEN_K // 32):
                cute.gemm(mma, acc, rW[None, None, k, state.index], rX[None, None, k, state.index], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            state = release(s.screen, state, lane)

        own = s.received + 4 * thread
        for i in range_constexpr(2):
            send_words(own + 2 * i, s.exchanged, rank ^ PARTS, Uint32(acc[2 * i]), Uint32(acc[2 * i + 1]))
        neurons = [self.neuron_terms(o, of_neuron) for of_neuron in of_neurons]
        cute.arch.mbarrier_wait(s.exchanged, 0)
        others = load_quad(own)
        bits = Uint32(0)
        for i in range_constexpr(2):
            found, (square, beta, offset) = Boolean(False), neurons[i]
            for j in range_constexpr(2):
                a, b, scale = tokens[j]
                total = acc[2 * i + j] + Int32(others[2 * i + j])
                # NaN exceeds, too
                below = total.to(Float32) - offset <= -(scale * beta + (b * square + a))
                found = found | (below == Boolean(False))
            exists = first + 8 * i < extent.neurons
            mask = Uint32(cute.arch.vote_ballot_sync(found & exists))
            bits = bits | self.join_quads(mask) << (8 * i)
        if lane == 0:
            s.found[warp_index] = bits

    join_quads = GateScreen.join_quads

    # ---- gates ----

    @cute.jit
    def list_candidates(self, s, lane):
        """When all warps are here, give candidates their places, in the order of neurons."""
        cute.arch.sync_threads()
        low, high = self.found_words(s)
        for i in range_constexpr(2):
            word, bit = high if i else low, Uint32(1) << Uint32(lane)
            place = Int32(cute.arch.popc(word & (bit - Uint32(1)))) + (Int32(cute.arch.popc(low)) if i else 0)
            if word & bit != 0:
                s.places[place] = 32 * i + lane
        cute.arch.sync_warp()

    @cute.jit
    def found_words(self, s):
        """The bits of the CTA's neurons in two words."""
        return s.found[0] | s.found[1] << 16, s.found[2] | s.found[3] << 16

    @cute.jit
    def candidates(self, s) -> Candidates:
        low, high = self.found_words(s)
        count = Int32(cute.arch.popc(low)) + Int32(cute.arch.popc(high))
        groups = (count + ROWS - 1) // ROWS
        return Candidates(count, groups, self.units // (groups + 1))

    @cute.jit
    def load_candidates(self, s, x, w, part, extent):
        """Load tokens and the candidates' rows, 64 columns per stage: one unit of tokens, then groups of rows."""
        lane, found = cute.arch.lane_idx(), self.candidates(s)
        x_s, x_t = self.partition(x, s.sX, (self.tokens, TILE_K))
        row, piece = lane // 8, lane % 8
        stage, phase = Int32(0), Int32(1)
        blocks = self.blocks(part, extent.columns, TILE_K) if found.count > 0 else 0
        for i in cutlass.range(blocks, unroll=1):
            block, unit, barrier = part.split + i * SPLITS, stage * (found.groups + 1), s.gates.full + stage
            cute.arch.mbarrier_wait(s.gates.empty + stage, phase)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.tokens * TILE_K * 2)
            cute.copy(x.atom, x_t[None, 0, block], x_s[None, unit], tma_bar_ptr=barrier)
            column = block * TILE_K + piece * 8
            size = Int32(16) if column < extent.columns else Int32(0)
            column = column if size > 0 else 0
            target = s.units + (unit + 1) * (UNIT // 2)
            for place in cutlass.range(row, found.count, PASS, unroll=1):
                neuron = part.column * NEURONS + s.places[place]
                copy_async(target + (place * TILE_K + swizzle_piece(place, piece)), address(w, neuron, column), size)
            cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
            stage, phase = self.advance(stage, phase, found.stages)

    @cute.jit
    def advance(self, stage, phase, stages):
        """The next stage and its phase."""
        last = stage + 1 == stages
        return (0 if last else stage + 1), (phase ^ 1 if last else phase)

    @cute.jit
    def multiply_candidates(self, s, mma: cute.TiledMma, part, thread, extent):
        """Multiply the candidates' rows by the tokens, and store the sums where their neurons have them."""
        found = self.candidates(s)
        if found.count > 0:
            lane, warp_index = cute.arch.lane_idx(), cute.arch.make_warp_uniform(thread // 32)
            rX = mma.make_fragment_B(mma.get_slice(0).partition_B(s.sX))
            rows = cute.make_rmem_tensor(mma.partition_shape_A((NEURONS, TILE_K)), self.dtype)
            acc = cute.make_rmem_tensor(mma.partition_shape_C((NEURONS, self.tokens)), Float32)
            words = cute.recast_tensor(rows, Uint32)
            words.fill(0)
            acc.fill(0.0)
            mma.set(warpgroup.Field.ACCUMULATE, True)
            # matrices of rows 0-7 and 8-15 of columns 0-7, then of columns 8-15; the last rows may not exist
            row = warp_index * 16 + (lane & 15)
            row = row if row < found.groups * ROWS else row - ROWS
            stage, phase = Int32(0), Int32(0)
            for _ in cutlass.range(self.blocks(part, extent.columns, TILE_K), unroll=1):
                unit = stage * (found.groups + 1)
                cute.arch.mbarrier_wait(s.gates.full + stage, phase)
                if warp_index * 16 < found.count:
                    source = s.units + ((unit + 1) * (UNIT // 2) + row * TILE_K)
                    for k in range_constexpr(TILE_K // 16):
                        four = load_matrices(source + swizzle_piece(row, 2 * k + (lane >> 4)))
                        for j in range_constexpr(4):
                            words[4 * k + j] = four[j]
                warpgroup.fence()
                for k in range_constexpr(TILE_K // 16):
                    cute.gemm(mma, acc, rows[None, None, k], rX[None, None, k, unit], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                cute.arch.mbarrier_arrive(s.gates.empty + stage)
                stage, phase = self.advance(stage, phase, found.stages)
            self.store_sums(s, acc, found, warp_index, lane)

    @cute.jit
    def store_sums(self, s, acc, found, warp_index, lane):
        """Store the sums of candidates, lanes as in `screen`."""
        for i in range_constexpr(2):
            place = warp_index * 16 + 8 * i + (lane >> 2)
            if place < found.count:
                neuron = s.places[place]
                at = (neuron >> 3) * 4 + (neuron & 3) + ((neuron >> 2) & 1) * self.upper
                for j in range_constexpr(2):
                    s.sums[(2 * (lane & 3) + j) * self.pitch + at] = acc[2 * i + j]


def signature(spec: GatePackScreenedSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    m, n, k = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    dtype = operands.DTYPES[spec.dtype]
    arguments = (
        operands.rows(dtype, m, k),
        operands.rows(dtype, n, k),
        operands.bias(dtype),
        operands.bytes_by_rows(Int8, m, k),
        *(operands.vector(Float32, m) for _ in range(3)),
        operands.bytes_by_rows(Int8, n, k),
        *(operands.vector(Float32, n) for _ in range(3)),
        *operands.packed(dtype, m),
        operands.cube(Int32, cute.sym_int32(), cute.sym_int32(), 2),
        operands.vector(Int32, cute.sym_int32(), align=4),
        Int32(1),
        Int32(1),
        *(Float32(1.0) for _ in Constants._fields),
    )
    return GatePackScreened(spec), arguments
