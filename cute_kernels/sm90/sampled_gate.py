"""Gate GEMM of 128 tokens at the neurons of their list, packed as TwELL by places in the list.

gate_pack.py with gathered rows of weights: a tile of the words has 256 places of a list in place of 256 neurons.
compact.py, given the lists, brings them to the hybrid format; words, spill and stats of tiles behind the end of a list
are not written. The products of a gate have the same order as in gate_pack.py, so it has the same bits.

Persistent, one CTA per SM. A unit of work is a tile of 128 tokens and 64, 128, 192 or 256 places of its list, see
common/units.py; a CTA's units are the longest first. None is cut for balance: a tile of the words has a count, so one
CTA writes it. Three warp groups:

    pack      warps 0 and 1, as in gate_pack.py.
    load      warps 2 and 3. x by TMA, 64 columns per stage, and the same columns of the unit's rows of w by cp.async,
              swizzled.
    mma       groups 1 and 2: WGMMA 64x128x16, as in gate_pack.py. A unit has up to four chunks of 64 places: the first
              group computes the first and the third, the other the second and the fourth, as far as they exist. Gates
              of places behind the end of the list are set to 0.

    FULL[s]   64 load threads arrive through cp.async, + 1 arrival and the bytes of x.
    EMPTY[s]  8 mma warps arrive.
    GATE_...  as in gate_pack.py.
"""

from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .. import feasible, geometry
from ..common import launch, operands
from ..common.activation import level_of
from ..common.units import LONG, begin, deal_units, find_unit, unit_after
from ..common.values import widen
from ..specs import SampledGateSpec
from .copies import Transfer, staged, tma_load
from .gate_pack import (
    MMA_WARPS,
    REGISTERS_LOAD_PACK,
    REGISTERS_MMA,
    ROWS,
    THREADS,
    TILE_N,
    Barrier,
    Extent,
    GatePack,
    Views,
)
from .listed_rows import load_units, multiply_stages
from .ring import open_ring

TOKENS, TILE_K = geometry.TOKEN_TILE, 64
HALF = TILE_N // 2
# warps of the first group that pack and that load
PACK_WARPS, LOAD_WARPS = 2, 2
LOAD_THREADS = 32 * LOAD_WARPS


class Operands(NamedTuple):
    """Operands in global memory; an empty `bias` stands for none."""

    w: Any
    bias: Any  # [N], [2 N] with thresholds behind, or [0]
    neurons: Any  # int16 [ceil(M / 128), 64 C]: lists, by token tile
    sizes: Any  # int32 [ceil(M / 128) + 1]: their lengths
    words: Any  # int32 [M, tiles * width]
    spill: Any  # [M, tiles * 256]
    stats: Any  # int32 [ceil(M / 8), tiles, 2]
    width: Any  # words per tile
    threshold: Any  # of fatrelu, see common/activation.py


class SampledGate(GatePack):
    """For one dtype; sizes, strides and width stay symbolic. An empty bias is none."""

    # of all units the warps that load pack only the last one
    absent: ClassVar = {
        barrier: range(PACK_WARPS, PACK_WARPS + LOAD_WARPS) for barrier in (Barrier.GATE_FULL, Barrier.GATE_EMPTY)
    }

    def __init__(self, spec: SampledGateSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.set_sizes(TOKENS, self.dtype, self.dtype, TOKENS * TILE_N)
        self.pack_warps = PACK_WARPS

    @cute.jit
    def __call__(self, *arguments: Any):
        """x, the `Operands`, the number of CTAs and the stream."""
        x, *given, max_ctas, stream = arguments
        shape, stages = (TILE_N, TOKENS, TILE_K), self.stages
        w_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, stages)
        x_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.dtype, stages)
        x_load = tma_load(x, x_layout, (TOKENS, TILE_K))

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            sW: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]
            sX: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], 1024]
            gate: cute.struct.Align[cute.struct.MemRange[self.dtype, TOKENS * TILE_N], 1024]

        self.shared = feasible.check_shared_memory(Shared)
        o = Operands(*given)
        if x.shape[0] > 0:
            kernel = self.kernel(x_load, o, (w_layout, x_layout))
            launch.start(kernel, max_ctas, THREADS, stream, ctas_per_sm=1)

    @cute.kernel
    def kernel(self, x: Transfer, o: Operands, layouts: Any):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)
        if warp_index == PACK_WARPS:
            cpasync.prefetch_descriptor(x.atom)
        shared = SmemAllocator().allocate(self.shared)
        ring = open_ring(shared, self.stages, LOAD_THREADS + 1, MMA_WARPS, thread)
        cute.arch.sync_threads()
        sW, sX = staged((shared.sW, shared.sX), layouts)
        s = Views(sW, sX, shared.gate.data_ptr())
        launch.wait()
        deal = deal_units(o.sizes, cute.arch.grid_dim()[0], 1, False)
        index, k_tiles = cute.arch.block_idx()[0], cute.ceil_div(x.tensor.shape[1], TILE_K)
        if index < deal.ends[-1]:
            if group == 0:
                cute.arch.setmaxregister_decrease(REGISTERS_LOAD_PACK)
                if warp_index >= PACK_WARPS:
                    own = thread - 32 * PACK_WARPS
                    index = load_units(
                        ring, x, s.sX, shared.sW.data_ptr(), o, deal, k_tiles, self.stages, LOAD_THREADS, own
                    )
                self.pack_units(s, o, index, warp_index, deal, x.tensor.shape[0])
            else:
                cute.arch.setmaxregister_increase(REGISTERS_MMA)
                self.mma(ring, s, o, thread - 128, deal, k_tiles, x.tensor.shape[0])

    # ---- roles ----

    @cute.jit
    def mma(self, ring, s: Views, o: Operands, thread: Int32, deal, k_tiles: Int32, tokens: Int32):
        """Main loop and the register half of the epilogue, for half of the unit's places."""
        half = cute.arch.make_warp_uniform(thread // 128)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        index = first = cute.arch.block_idx()[0]
        unit, cursor = find_unit(o.sizes, deal, index, begin(), 1)
        last = unit
        for places in (TILE_N, HALF):
            # a group has twice 64 places of units that reach its second ones; shorter units come later
            least = half + 2 if const_expr(places == TILE_N) else Int32(0)
            while unit.chunks > least:
                state = self.compute_gates(ring, s, o, unit, state, index != first, thread, k_tiles, places)
                index, last = unit_after(index, deal.ctas), unit
                if index < deal.ends[-1]:
                    cute.arch.barrier_arrive(barrier_id=Barrier.GATE_FULL, number_of_threads=self.handover_threads())
                unit, cursor = find_unit(o.sizes, deal, index, cursor, 1)
        cute.arch.barrier(barrier_id=Barrier.GATE_LAST, number_of_threads=THREADS)
        worker = cute.arch.make_warp_uniform(thread // 32) + THREADS // 32 - MMA_WARPS
        self.pack_unit(s, o, last, worker, Int32(THREADS // 32), tokens)

    @cute.jit
    def compute_gates(self, ring, s: Views, o, unit, state, wait: Boolean, thread, k_tiles, places: cutlass.Constexpr):
        """Multiply the first places of a unit and store its gates, after a `wait` for the gates before to be packed.

        Returns the next state of the ring.
        """
        half = cute.arch.make_warp_uniform(thread // 128)
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (2, 1, 1), (64, TOKENS)
        )
        leader = mma.get_slice(cute.make_layout(2, stride=128)(half))
        rW = mma.make_fragment_A(leader.partition_A(cute.local_tile(s.sW, (places, TILE_K), (0, 0, None))))
        rX = mma.make_fragment_B(leader.partition_B(s.sX))
        acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((places, TOKENS)), Float32)
        state = multiply_stages(ring, mma, acc, rW, rX, k_tiles, state)
        if (unit.length < places) | (o.bias.shape[0] > 0):
            self.finish_gates(o, acc, unit, warp_index)
        if wait:
            cute.arch.barrier(barrier_id=Barrier.GATE_EMPTY, number_of_threads=self.handover_threads())
        self.store_gate(acc, s.gate, self.levels_of_places(o, unit, warp_index), warp_index)
        return state

    @cute.jit
    def levels_of_places(self, o: Operands, unit, warp_index: Int32):
        """The thresholds of a thread's places, by i and part."""
        levels = cute.make_rmem_tensor((2, 2), Int32)
        for part in range_constexpr(2):
            for i in range_constexpr(2):
                place = part * HALF + warp_index * 16 + 8 * i + (cute.arch.lane_idx() >> 2)
                levels[i, part] = o.threshold
                if (place < unit.length) & (o.bias.shape[0] > o.w.shape[0]):
                    neuron = widen(o.neurons[unit.tile, unit.start * geometry.CHUNK + place])
                    levels[i, part] = level_of(o.bias, o.w.shape[0], neuron, o.threshold)
        return levels

    @cute.jit
    def finish_gates(self, o: Operands, acc: cute.Tensor, unit, warp_index: Int32):
        """Add the bias, and set the gates of places that do not exist to 0.

        Lane 4 g + q holds places g + 8 i of its warp's 16, in each part.
        """
        for part in range_constexpr(cute.size(acc, mode=[1])):
            for i in range_constexpr(2):
                place = part * HALF + warp_index * 16 + 8 * i + (cute.arch.lane_idx() >> 2)
                exists, bias = place < unit.length, Float32(0.0)
                if o.bias.shape[0] > 0:
                    if exists:
                        bias = o.bias[widen(o.neurons[unit.tile, unit.start * geometry.CHUNK + place])].to(Float32)
                for v in range_constexpr(TOKENS // 8):
                    for j in range_constexpr(2):
                        gate = acc[(j, i, v), part, 0] + bias
                        acc[(j, i, v), part, 0] = gate if exists else Float32(0.0)

    @cute.jit
    def pack_units(self, s: Views, o: Operands, index: Int32, warp_index: Int32, deal, tokens: Int32):
        """Pack the CTA's units from `index` on, the last one together with all of its warps."""
        unit, cursor = find_unit(o.sizes, deal, index, begin(), 1)
        while unit.chunks > 0:
            index = unit_after(index, deal.ctas)
            following, cursor = find_unit(o.sizes, deal, index, cursor, 1)
            last = following.chunks == 0
            if last:
                cute.arch.barrier(barrier_id=Barrier.GATE_LAST, number_of_threads=THREADS)
            else:
                cute.arch.barrier(barrier_id=Barrier.GATE_FULL, number_of_threads=self.handover_threads())
            self.pack_unit(s, o, unit, warp_index, Int32(THREADS // 32) if last else Int32(PACK_WARPS), tokens)
            if not last:
                cute.arch.barrier_arrive(barrier_id=Barrier.GATE_EMPTY, number_of_threads=self.handover_threads())
            unit = following

    @cute.jit
    def pack_unit(self, s: Views, o: Operands, unit, worker: Int32, workers: Int32, tokens: Int32):
        """Pack every `workers`-th eight tokens of a unit, from `worker` on."""
        # of the last eight places some may not exist: their gates are 0
        end = unit.start * geometry.CHUNK + unit.length
        extent = Extent(Int32(0), Int32(0), Int32(0), tokens, end)
        for eight in cutlass.range(worker, TOKENS // ROWS, workers, unroll=1):
            self.pack_rows(s, o, unit.tile * (TOKENS // ROWS) + eight, unit.start // LONG, eight, extent)


def signature(spec: SampledGateSpec) -> tuple[Any, tuple[Any, ...]]:
    x, w, bias, *packed, _, width, threshold = operands.gate_pack(spec.dtype)
    neurons, _, sizes = operands.lists(cute.sym_int32())
    return SampledGate(spec), (x, w, bias, neurons, sizes, *packed, width, threshold, Int32(1))
