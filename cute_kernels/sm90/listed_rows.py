"""Products of tokens and the rows of w that their tile's list names: how sampled_up.py and sampled_gate.py fill their
stages, and the main loop.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64, Uint32, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from .. import geometry
from ..common.copies import copy_async
from ..common.swizzle import swizzle_piece
from ..common.units import begin, find_unit, unit_after
from ..common.values import widen
from .copies import Transfer, partition
from .ring import Ring, release

TILE_M, TILE_N = geometry.TOKEN_TILE, 256
# bytes of a row in a stage, and its pieces of 16
TILE_K_BYTES, PIECES = 128, 8


@cute.jit
def load_units(
    ring: Ring, x: Transfer, sX, weights, o, deal, steps, stages: cutlass.Constexpr, threads: cutlass.Constexpr, thread
) -> Any:
    """Load `steps` stages of each unit: columns of x by TMA, and of rows of w by cp.async into `weights`, swizzled.

    `o` has w, neurons and sizes. `threads` do this; `thread` is this one's index among them. Row offsets are 32-bit, in
    units of 16 bytes: 64 GB. Returns the index of the last unit.
    """
    values, rows_at_a_time = 128 // o.w.element_type.width, threads // PIECES
    tile_k, leads = values * PIECES, cute.arch.make_warp_uniform(thread // 32) == 0
    x_s, x_t = partition(x, sX, (TILE_M, tile_k))
    first, piece = thread // PIECES, thread % PIECES
    rows, pitch = cute.make_rmem_tensor((TILE_N // rows_at_a_time,), Uint32), Uint32(o.w.stride[0] // values)
    target = weights + (first * tile_k + swizzle_piece(first, piece) * values // 8)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
    index = last = cute.arch.block_idx()[0]
    unit, cursor = find_unit(o.sizes, deal, index, begin(), 1)
    while unit.chunks > 0:
        for j in range_constexpr(TILE_N // rows_at_a_time):
            row = first + rows_at_a_time * j
            neuron = widen(o.neurons[unit.tile, unit.start * geometry.CHUNK + row]) if row < unit.length else 0
            rows[j] = Uint32(neuron) * pitch + Uint32(piece)
        for k in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(ring.empty + state.index, state.phase)
            if leads:
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + state.index, TILE_M * TILE_K_BYTES)
                x_tile = x_t[None, unit.tile, k]
                cute.copy(x.atom, x_tile, x_s[None, state.index], tma_bar_ptr=ring.full + state.index)
            size = Int32(16) if k * tile_k + piece * values < o.w.shape[1] else Int32(0)
            source = o.w.iterator + (k * tile_k if size > 0 else 0)
            stage = target + state.index * (TILE_N * tile_k)
            for j in range_constexpr(TILE_N // rows_at_a_time):
                if j * rows_at_a_time < unit.length:
                    copy_async(stage + j * rows_at_a_time * tile_k, source + Int64(rows[j]) * values, size)
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + state.index)
            state.advance()
        last, index = index, unit_after(index, deal.ctas)
        unit, cursor = find_unit(o.sizes, deal, index, cursor, 1)
    return last


@cute.jit
def multiply_stages(ring: Ring, mma: cute.TiledMma, acc, rA, rB, steps: Int32, state):
    """acc = product over so many stages, at least one; returns the next state of the ring."""
    lane, read = cute.arch.lane_idx(), state.clone()
    mma.set(warpgroup.Field.ACCUMULATE, False)
    for k in cutlass.range(steps, unroll=1):
        cute.arch.mbarrier_wait(ring.full + state.index, state.phase)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.fence()
        for block in range_constexpr(cute.size(rA, mode=[2])):
            cute.gemm(mma, acc, rA[None, None, block, state.index], rB[None, None, block, state.index], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if k > 0:
            read = release(ring, read, lane)
        state.advance()
    warpgroup.wait_group(0)
    release(ring, read, lane)
    return state
