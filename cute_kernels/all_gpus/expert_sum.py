"""The sum over a token's experts: y[t] = sum over its slots s of scale[t, s] * z[pair of t and s], in their order."""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from ..common import launch, operands
from ..common.copies import address, load_values, store_values
from ..common.values import high_to_float, low_to_float, pack
from ..specs import ExpertSumSpec

THREADS = 256


class Operands(NamedTuple):
    """Operands in global memory."""

    z: Any  # [pairs, K], fp32 or rounded
    pairs: Any  # int32 [tokens * k]: rows of z, or -1
    scales: Any  # fp32 [tokens, k]
    y: Any  # [tokens, K]


class ExpertSum:
    """For one dtype; sizes stay symbolic."""

    def __init__(self, spec: ExpertSumSpec):
        self.dtype, self.rounded = operands.DTYPES[spec.dtype], spec.rounded

    @cute.jit
    def __call__(self, z: cute.Tensor, pairs: cute.Tensor, scales: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        pieces = y.shape[0] * (y.shape[1] // 8)
        if pieces > 0:
            launch.start(self.kernel(Operands(z, pairs, scales, y)), cute.ceil_div(pieces, THREADS), THREADS, stream)

    @cute.kernel
    def kernel(self, o: Operands):
        piece = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        pieces, top = o.y.shape[1] // 8, o.scales.shape[1]
        token, column = piece // pieces, piece % pieces * 8
        launch.wait()
        if token < o.y.shape[0]:
            sums, values = (cute.make_rmem_tensor((8,), Float32) for _ in range(2))
            sums.fill(0.0)
            for slot in cutlass.range(top, unroll=4):
                place = o.pairs[token * top + slot]
                if place >= 0:
                    scale = o.scales[token, slot]
                    if const_expr(self.rounded):
                        quad = load_values(address(o.z, place, column))
                        for i in range_constexpr(4):
                            values[2 * i] = low_to_float(quad[i], self.dtype)
                            values[2 * i + 1] = high_to_float(quad[i], self.dtype)
                    else:
                        source = address(o.z, place, column).align(16)
                        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), values)
                    for i in range_constexpr(8):
                        sums[i] += scale * values[i]
            packed = cute.make_rmem_tensor((4,), Uint32)
            for i in range_constexpr(4):
                packed[i] = pack(sums[2 * i], sums[2 * i + 1], self.dtype)
            store_values(address(o.y, token, column), packed)


def signature(spec: ExpertSumSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype, m, k = operands.DTYPES[spec.dtype], cute.sym_int32(), cute.sym_int32(divisibility=8)
    return ExpertSum(spec), (
        operands.rows(dtype if spec.rounded else Float32, cute.sym_int32(), k),
        operands.dense(Int32, cute.sym_int32()),
        operands.strided(Float32, m, cute.sym_int32()),
        operands.rows(dtype, m, k),
    )
