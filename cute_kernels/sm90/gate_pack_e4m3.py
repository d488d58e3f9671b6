"""gate_pack.py of e4m3 rows with scales: relu(x_q[m] . w_q[n] * w_scale[n] * x_scale[m] + bias[n]).

The scales of a thread's neurons go to registers before the main loop, those of the tile's tokens through shared memory.
A tensor core keeps about 14 bits of a sum of e4m3 products. Unless `fast`, sums of 128 columns are added in fp32. The
bits are those of torch._scaled_mm with `use_fast_accum` and without it.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from ..common import operands
from ..common.copies import aligned
from ..specs import GatePackSpec
from .gate_pack import TILE_N, Barrier, Extent, GatePack, Operands, Views

# first of the named barriers of the two mma groups
SCALES = max(Barrier) + 1


class Loaded(NamedTuple):
    """A thread's share of the scales of a tile."""

    tokens: Any  # every 128th token
    neurons: Any  # [2, 2], as `acc` has them


class GatePackE4m3(GatePack):
    """For one number of tokens per tile."""

    def __init__(self, spec: GatePackSpec):
        self.dtype, self.fast = operands.DTYPES[spec.dtype], spec.fast
        # behind the gate fp32 scales of the tokens, for two mma groups and two tiles
        self.set_sizes(spec.tokens, cutlass.Float8E4M3FN, self.dtype, spec.tokens * (TILE_N + 2 * 2 * 2))

    def views(self, sW: Any, sX: Any, epilogue: Any) -> Any:
        return Views(sW, sX, epilogue, cute.recast_ptr(epilogue + self.tokens * TILE_N, dtype=Float32))

    @cute.jit
    def multiply(self, ring, mma: cute.TiledMma, acc, rW, rX, full, release, extent: Extent):
        if const_expr(self.fast):
            full, release = GatePack.multiply(self, ring, mma, acc, rW, rX, full, release, extent)
        else:
            part = cute.make_rmem_tensor_like(acc)
            acc.fill(0.0)
            for _ in cutlass.range(extent.k_tiles, unroll=1):
                ring.consumer_wait(full)
                warpgroup.fence()
                mma.set(warpgroup.Field.ACCUMULATE, False)
                for block in range_constexpr(cute.size(rW, mode=[2])):
                    cute.gemm(mma, part, rW[None, None, block, full.index], rX[None, None, block, full.index], part)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                ring.consumer_release(release)
                release.advance()
                full.advance()
                for i in range_constexpr(cute.size(acc)):
                    acc[i] += part[i]
        return full, release

    @cute.jit
    def load_scales(self, o: Operands, row: Int32, column: Int32, coordinates, thread: Int32, extent: Extent):
        tokens = cute.make_rmem_tensor((-(-self.tokens // 128),), Float32)
        for i in range_constexpr(cute.size(tokens)):
            token = row * self.tokens + 128 * i + thread
            tokens[i] = o.scales.x[token] if token < extent.rows else Float32(0.0)
        neurons = cute.make_rmem_tensor((2, 2), Float32)
        for part in range_constexpr(2):
            for i in range_constexpr(2):
                neuron = column * TILE_N + coordinates[(0, i, 0), part, 0][0]
                neurons[i, part] = o.scales.w[neuron] if neuron < extent.neurons else Float32(0.0)
        return Loaded(tokens, neurons)

    @cute.jit
    def scale(self, s: Views, acc, scales: Loaded, turn: Int32, half: Int32, thread: Int32):
        """acc *= the scales of neurons, then those of tokens.

        A thread that is late reads the tokens' scales of one tile while others write those of the next.
        """
        buffer = s.scales + (2 * (turn & 1) + half) * self.tokens
        for i in range_constexpr(cute.size(scales.tokens)):
            if 128 * i + thread < self.tokens:
                cute.make_tensor(buffer + (128 * i + thread), cute.make_layout(1))[0] = scales.tokens[i]
        cute.arch.barrier(barrier_id=SCALES + half, number_of_threads=128)
        pair = cute.make_rmem_tensor((2,), Float32)
        for v in range_constexpr(self.tokens // 8):
            cute.autovec_copy(aligned(buffer + (8 * v + 2 * (thread & 3)), 2), pair)
            for part in range_constexpr(2):
                for i in range_constexpr(2):
                    for j in range_constexpr(2):
                        acc[(j, i, v), part, 0] = acc[(j, i, v), part, 0] * scales.neurons[i, part] * pair[j]


def signature(spec: GatePackSpec) -> tuple[Any, tuple[Any, ...]]:
    return GatePackE4m3(spec), (*operands.gate_pack(spec.dtype), Int32(1))
