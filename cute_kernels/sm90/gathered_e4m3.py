"""gathered.py of e4m3 rows with scales of columns: out[m] = sum over c of h[m, c] * w_q[c] * scale + bias.

WGMMA takes 8-bit operands only along K in memory, and rows of w lie across it. So the product is transposed: w^T is the
A operand, from registers, h the B operand. Both are bfloat16, which holds all e4m3 values exactly. Two neighbouring
e4m3 columns are a 16-bit value to the copies and to the transposing matrix load.

Each mma group has 128 columns and all 128 tokens, so that a value is converted once. Both fill a tile of coefficients:

    TILE    256 threads, once per turn: its tile of coefficients is filled, the next tile is clear. One step of the turn
            before may still be multiplied, so there are four tiles.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..common.copies import address
from ..common.gathered import TILE_M, TILE_N, Operands, arguments
from ..common.mma import load_matrices_transposed
from ..common.swizzle import swizzle_piece
from ..common.values import high_to_float, low_to_float, pack, unpack_e4m3
from ..specs import GatheredSpec
from .gathered import TILE_K, Fragments, Gathered
from .sparse_product import GROUP_THREADS, STAGES, TILE_BARRIER, TURN, MmaGroup, gather_columns

# columns of a WGMMA, and how often a group has them
COLUMNS, BLOCKS = 64, TILE_N // 2 // 64
# list positions of a matrix load, and steps of A operands that are in registers
LOADED, STEPS = 32, 2


class GatheredE4m3(Gathered):
    """The kernel."""

    stage_values = TILE_N // 2 * TILE_K
    slots, panel = 4, TILE_M * 64

    @cute.jit
    def __call__(
        self,
        coefficients: None,
        w: cute.Tensor,
        scale: cute.Tensor,
        coefficients2: None,
        w2: None,
        bias: cute.Tensor,
        entries: cute.Tensor,
        neurons: cute.Tensor,
        chunks: cute.Tensor,
        sizes: cute.Tensor,
        out: cute.Tensor,
        flushed: cute.Tensor,
        activation: Int32,
        capacity: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        matrices = coefficients, cute.recast_tensor(w, cutlass.Uint16), coefficients2, w2, bias
        given = (*matrices, entries, neurons, chunks, sizes, out, flushed, activation)
        self.launch_units(given, capacity, max_ctas, stream, scale)

    def products_of(self) -> Any:
        mma = sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (COLUMNS, TILE_M),
            warpgroup.OperandSource.RMEM,
        )
        h_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (COLUMNS, TILE_M, TURN), self.dtype, self.slots)
        shape = (TILE_M, TILE_N // 2, TILE_K)
        return mma, h_layout, sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, shape, self.dtype, STAGES)

    def meet(self, g: MmaGroup) -> None:
        cute.arch.barrier(barrier_id=TILE_BARRIER, number_of_threads=2 * GROUP_THREADS)

    def tile_index(self, g: MmaGroup, slot: Int32) -> Int32:
        return slot

    def last_read(self, slot: Int32) -> Int32:
        return slot ^ 2

    def tile_address(self, g: MmaGroup, slot: Int32) -> Any:
        return g.tiles + (slot * (TILE_M * TURN) + g.half * (64 * 64))

    @cute.jit
    def gather(self, data: Operands, stage, part: Int32, rows: cute.Tensor, product: Int32, thread: Int32):
        gather_columns(stage, data.w, rows, part * (TILE_N // 2), thread, 2)

    @cute.jit
    def fragments(self, mma: cute.TiledMma, sA: cute.Tensor, sB: cute.Tensor, thread: Int32):
        """A thread's fragments and sums; of rows of w where the warp's own columns begin in a stage."""
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform((thread & 127) // 32)
        half = cute.arch.make_warp_uniform(thread // 128)
        h = mma.make_fragment_B(mma.get_slice(0).partition_B(sA))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((BLOCKS * COLUMNS, TILE_M)), Float32)
        values = cute.make_tensor(sB.iterator, cute.make_layout(STAGES * self.stage_values))
        # a row of w has eight pieces of 16 bytes in the group's panel; the warp has two
        row = half * (64 * 64) + lane * 64
        sources = [values.iterator + (row + swizzle_piece(lane, warp + 4 * block)) for block in range(BLOCKS)]
        return Fragments(mma, h, sources, acc, None, half * (BLOCKS * COLUMNS) + warp * 16 + (lane >> 2) * 2)

    @cute.jit
    def multiply(self, mma: cute.TiledMma, factors, tile: Int32, stage: Int32, second: cutlass.Constexpr):
        """Sums += columns of a stage of rows times half a tile of h.

        A step has 32 positions of 64 columns. Its operands are made while the step before is multiplied.
        """
        h, sources, acc = factors
        shape = mma.partition_shape_A((COLUMNS, 16))
        for block in range_constexpr(BLOCKS):
            sums = block_of(acc, block)
            for half in range_constexpr(TILE_K // LOADED):
                words = load_matrices_transposed(sources[block] + (stage * self.stage_values + half * (LOADED * 64)))
                if const_expr(block * 2 + half >= STEPS):
                    warpgroup.wait_group(STEPS - 1)
                operands = []
                for k in range_constexpr(LOADED // 16):
                    columns = cute.make_rmem_tensor(shape, self.dtype)
                    bits = cute.recast_tensor(columns, Uint32)
                    for i in range_constexpr(2):
                        bits[2 * i], bits[2 * i + 1] = self.columns_of(words[2 * k + i])
                    operands.append(columns)
                warpgroup.fence()
                for k in range_constexpr(LOADED // 16):
                    at_k = 4 * second + 2 * half + k
                    cute.gemm(mma, sums, operands[k][None, None, 0], h[None, None, at_k, tile], sums)
                warpgroup.commit_group()

    @cute.jit
    def columns_of(self, word: Uint32):
        """Two columns of two rows, by rows in a word, as a pair of rows for each column."""
        pairs = unpack_e4m3(Uint32(cute.arch.prmt(word, word, 0x3120)))
        f16 = cutlass.Float16
        return [pack(low_to_float(pair, f16), high_to_float(pair, f16), self.dtype) for pair in pairs]

    @cute.jit
    def store(self, g, f: Fragments, tile: Int32, slab: Int32):
        out, scale, bias = g.data.out, g.data.scale, g.data.bias
        first = tile * TILE_M + (g.lane & 3) * 2
        for block in range_constexpr(BLOCKS):
            sums, column = block_of(f.acc, block), slab * TILE_N + block * COLUMNS + f.row
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


def block_of(acc: Any, block: int) -> Any:
    """The sums of 64 of a thread's columns."""
    size = TILE_M // 2
    return cute.make_tensor(acc.iterator + block * size, cute.make_layout(((2, 2, TILE_M // 8), 1, 1)))


def signature(spec: GatheredSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return GatheredE4m3(spec), arguments(spec)
