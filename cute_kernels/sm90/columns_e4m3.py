"""Columns of e4m3 rows times coefficients: out^T = w^T h^T, for gathered_e4m3.py and expert_gathered_e4m3.py.

WGMMA takes 8-bit operands only along K in memory, and rows of w lie across it. So the product is transposed: w^T is the
A operand, from registers, h the B operand. Both are bfloat16, which holds all e4m3 values exactly. Two neighbouring
e4m3 columns are a 16-bit value to the copies and to the transposing matrix load. A stage has 64 rows of w, 256 columns
of each in two panels, one for each of two mma groups.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Uint32, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .. import geometry
from ..common.mma import load_matrices_transposed
from ..common.swizzle import swizzle_piece
from ..common.values import pairs_of_rows

# columns of a WGMMA, and how often a group has them
COLUMNS, BLOCKS = 64, 2
# rows of a stage, of a matrix load, and steps whose A operands are in registers
TILE_K, LOADED, STEPS = geometry.CHUNK, 32, 2
# columns of a stage, and its 16-bit values
WIDTH = 2 * BLOCKS * COLUMNS
ROWS = WIDTH // 2 * TILE_K


class Columns(NamedTuple):
    """A thread's fragments and sums."""

    mma: Any
    rH: Any
    sources: Any  # of rows of w where the warp's own columns begin in a stage, for each block
    acc: Any
    first: Any  # the thread's first column of a tile; it has the next one, too


class E4m3Columns:
    """The product; h has ``tokens`` rows, and stages of it are ``sH``."""

    dtype: Any
    tokens: int

    def products_of_columns(self) -> Any:
        """The MMA of 64 columns."""
        return sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (COLUMNS, self.tokens),
            warpgroup.OperandSource.RMEM,
        )

    @cute.jit
    def columns(self, mma: cute.TiledMma, rows: Any, sH: cute.Tensor, thread: Int32):
        """A thread's part; stages begin at ``rows``."""
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform((thread & 127) // 32)
        half = cute.arch.make_warp_uniform(thread // 128)
        h = mma.make_fragment_B(mma.get_slice(0).partition_B(sH))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((BLOCKS * COLUMNS, self.tokens)), Float32)
        # a row of w has eight pieces of 16 bytes in the group's panel; the warp has two
        row = half * (64 * 64) + lane * 64
        sources = [rows + (row + swizzle_piece(lane, warp + 4 * block)) for block in range(BLOCKS)]
        return Columns(mma, h, sources, acc, half * (BLOCKS * COLUMNS) + warp * 16 + (lane >> 2) * 2)

    @cute.jit
    def multiply_stage(self, f: Columns, stage: Int32):
        """Sums += columns of a stage of rows times its panel of h.

        The operands of a step are made while the step before is multiplied. Of the stage before nothing is then.
        """
        shape = f.mma.partition_shape_A((COLUMNS, 16))
        for block in range_constexpr(BLOCKS):
            sums = self.block_of(f.acc, block)
            for half in range_constexpr(TILE_K // LOADED):
                words = load_matrices_transposed(f.sources[block] + (stage * ROWS + half * (LOADED * 64)))
                warpgroup.wait_group(STEPS - 1)
                operands = []
                for k in range_constexpr(LOADED // 16):
                    columns = cute.make_rmem_tensor(shape, self.dtype)
                    bits = cute.recast_tensor(columns, Uint32)
                    for i in range_constexpr(2):
                        bits[2 * i], bits[2 * i + 1] = pairs_of_rows(words[2 * k + i], self.dtype)
                    operands.append(columns)
                warpgroup.fence()
                for k in range_constexpr(LOADED // 16):
                    h = f.rH[None, None, LOADED // 16 * half + k, stage]
                    cute.gemm(f.mma, sums, operands[k][None, None, 0], h, sums)
                warpgroup.commit_group()

    def block_of(self, acc: Any, block: int) -> Any:
        """The sums of 64 of a thread's columns: [(token of two, column of two, every eighth token)]."""
        size = self.tokens // 2
        return cute.make_tensor(acc.iterator + block * size, cute.make_layout(((2, 2, self.tokens // 8), 1, 1)))
