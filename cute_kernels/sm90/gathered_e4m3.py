"""gathered.py of e4m3 rows with scales of columns: out[m] = sum over c of h[m, c] * w_q[c] * scale + bias.

The product is that of columns_e4m3.py. Each mma group has 128 columns and all 128 tokens, so that a value is converted
once. As that leaves its warps little time, the fill group makes the tiles of coefficients, too:

    fill    group 0. A stage has 64 positions of a list: cp.async of rows of w, 256 columns each, and h of 128 tokens,
            scattered into a panel that was cleared.
    mma     groups 1 and 2, by steps of 32 positions and 64 columns: a matrix load, conversions, and WGMMA 64x128x16,
            while that of the step before runs.

    FULL[s]    128 fill threads arrive when their copies of the stage are complete, and both parts are fenced.
    EMPTY[s]   8 mma warps arrive.
    PANEL      128 fill threads: the panel is clear.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..common.activation import power_pair
from ..common.copies import address, store_half, store_values
from ..common.gathered import TILE_M, TILE_N, Operands, arguments
from ..common.sums import add_flushed, flush_sums
from ..common.swizzle import swizzle_column
from ..common.values import pack
from ..specs import GatheredSpec
from .columns_e4m3 import BLOCKS, COLUMNS, ROWS, TILE_K, WIDTH, Columns, E4m3Columns
from .gathered import Gathered
from .ring import release
from .sparse_product import AHEAD, GROUP_THREADS, Turn, gather_columns

assert WIDTH == TILE_N
# values of h of a stage
PANEL = TILE_M * TILE_K
# named barrier of the fill group
PANEL_CLEAR = 1


class GatheredE4m3(E4m3Columns, Gathered):
    """The kernel."""

    stages, stage_values, tokens = 6, ROWS, TILE_M

    @cute.jit
    def __call__(self, *arguments: Any):
        """As there, with the scale of columns behind w."""
        first, w, scale, *rest, capacity, max_ctas, stream = arguments
        self.launch_units((first, cute.recast_tensor(w, Uint16), *rest), capacity, max_ctas, stream, scale)

    def products_of(self) -> Any:
        mma = self.products_of_columns()
        h_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (COLUMNS, TILE_M, TILE_K), self.dtype, self.stages)
        shape = (TILE_M, TILE_N // 2, TILE_K)
        return mma, h_layout, sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, shape, self.dtype, self.stages)

    # ---- the fill group ----

    @cute.jit
    def gather(self, data: Operands, stage, part: Int32, rows: cute.Tensor, product: Int32, thread: Int32):
        gather_columns(stage, data.w, rows, part * (TILE_N // 2), thread, 2)

    def make_ahead(self) -> Any:
        return cute.make_rmem_tensor((AHEAD,), Uint32)

    @cute.jit
    def load_ahead(self, data: Operands, ahead: cute.Tensor, turn: Turn, thread: Int32):
        """Load the first entries of a turn."""
        for j in range_constexpr(AHEAD):
            at = turn.first + thread + GROUP_THREADS * j
            if at < turn.last:
                ahead[j] = Uint32(data.entries[at])

    @cute.jit
    def fill_panel(self, data: Operands, panels, stage, ahead: cute.Tensor, turn: Turn, second, thread):
        """Clear a panel, and scatter the coefficients of one half of a turn's positions into it."""
        panel, zeros = panels + stage * PANEL, cute.make_rmem_tensor((4,), Uint32)
        zeros.fill(0)
        for i in range_constexpr(PANEL // (8 * GROUP_THREADS)):
            store_values(panel + (i * GROUP_THREADS + thread) * 8, zeros)
        cute.arch.barrier(barrier_id=PANEL_CLEAR, number_of_threads=GROUP_THREADS)
        begin, end = (turn.middle, turn.last) if const_expr(second == 1) else (turn.first, turn.middle)
        for j in range_constexpr(AHEAD):
            at = turn.first + thread + GROUP_THREADS * j
            self.scatter(data, panel, ahead[j], (at >= begin) & (at < end))
        # behind those that were loaded ahead
        behind = turn.first + GROUP_THREADS * AHEAD
        for at in cutlass.range(cutlass.max(begin, behind) + thread, end, GROUP_THREADS, unroll=4):
            self.scatter(data, panel, Uint32(data.entries[at]), at < end)

    @cute.jit
    def scatter(self, data: Operands, panel, entry: Uint32, valid: Boolean):
        """Store the coefficient of an entry at its token and position, without a branch."""
        bits = power_pair(entry, data.activation, self.dtype) >> 16
        store_half(panel + Int32(swizzle_column(entry >> 6, entry & Uint32(PANEL - 1))), bits, valid)

    # ---- the mma groups ----

    @cute.jit
    def fragments(self, mma: cute.TiledMma, sA: cute.Tensor, sB: cute.Tensor, thread: Int32):
        rows = cute.make_tensor(sB.iterator, cute.make_layout(self.stages * ROWS))
        return self.columns(mma, rows.iterator, sA, thread)

    @cute.jit
    def multiply_units(self, ring, tiles, data: Operands, f: Columns, thread: Int32, long: cutlass.Constexpr):
        lane, unit = cute.arch.lane_idx(), Int32(cute.arch.block_idx()[0])
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        read = full.clone()
        tile, part = self.tile_and_part(data, unit)
        length, _ = self.list_extent(data, tile)
        while unit < data.units:
            unit = self.unit_after(unit)
            next_tile, next_part = self.tile_and_part(data, unit) if unit < data.units else (tile, part)
            next_length, _ = self.list_extent(data, next_tile)
            f.acc.fill(0.0)
            steps, longest = cute.ceil_div(length, TILE_K), self.longest // TILE_K
            for k in cutlass.range(steps, unroll=1):
                if const_expr(long):
                    if k > 0 and k % longest == 0:
                        warpgroup.wait_group(0)
                        flush_sums(f.acc, data.flushed, k == longest)
                cute.arch.mbarrier_wait(ring.full + full.index, full.phase)
                self.multiply_stage(f, full.index)
                # the stage before has been multiplied
                if k > 0:
                    read = release(ring, read, lane)
                full.advance()
            warpgroup.wait_group(0)
            if steps > 0:
                read = release(ring, read, lane)
            if const_expr(long):
                if steps > longest:
                    add_flushed(f.acc, data.flushed)
            self.store_unit(data, f, tile, part, lane)
            tile, part, length = next_tile, next_part, next_length

    @cute.jit
    def store_unit(self, data: Operands, f: Columns, tile: Int32, slab: Int32, lane: Int32):
        """Scale, add the bias, round and store a unit's sums."""
        out, scale, bias = data.out, data.scale, data.bias
        first = tile * TILE_M + (lane & 3) * 2
        for block in range_constexpr(BLOCKS):
            sums, column = self.block_of(f.acc, block), slab * TILE_N + block * COLUMNS + f.first
            if column < out.shape[1]:
                own, added = [scale[column + i] for i in range(2)], [Float32(0.0)] * 2
                if bias.shape[0] > 0:
                    added = [bias[column + i].to(Float32) for i in range(2)]
                for v in range_constexpr(TILE_M // 8):
                    for j in range_constexpr(2):
                        token = first + 8 * v + j
                        if token < out.shape[0]:
                            pair = pack(*(sums[(j, i, v), 0, 0] * own[i] + added[i] for i in range(2)), self.dtype)
                            target = cute.recast_ptr(address(out, token, column).align(4), dtype=Uint32)
                            cute.make_tensor(target, cute.make_layout(1))[0] = pair


def signature(spec: GatheredSpec) -> tuple[Any, tuple[Any, ...]]:
    return GatheredE4m3(spec), arguments(spec)
