"""Rows of x in e4m3: x_q[m] = e4m3(x[m] / scale[m]), scale[m] = max|x[m]| / 448, which is 1 for a row of zeros.

If `given` is not empty, all rows have its scale, and values beyond 448 times that become the largest. A row with NaN
has the scale NaN, one with an infinity an infinite scale: then all that depends on the row is NaN.

A CTA has a row. It reads it twice, the second time from L1.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32, range_constexpr
from cutlass.memory import SmemAllocator

from .common import launch, operands
from .common.copies import address, load_values
from .common.values import high_to_float, low_to_float
from .specs import QuantizeTokensSpec

THREADS = 256
WARPS = THREADS // 32
LARGEST = 448.0


class Operands(NamedTuple):
    """Operands in global memory."""

    x: Any  # [M, K]
    given: Any  # fp32 [1], or empty
    q: Any  # e4m3 [M, K] as bytes
    scale: Any  # fp32 [M]


class QuantizeTokens:
    """For one dtype; sizes stay symbolic."""

    def __init__(self, spec: QuantizeTokensSpec):
        self.dtype = operands.DTYPES[spec.dtype]

    @cute.jit
    def __call__(self, x: cute.Tensor, given: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, stream: cuda.CUstream):
        if x.shape[0] > 0:
            self.kernel(Operands(x, given, q, scale)).launch(
                grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=launch.overlaps()
            )

    @cute.kernel
    def kernel(self, o: Operands):
        m, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        maxima = SmemAllocator().allocate_array(Uint32, WARPS)
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()
        scale = Float32(0.0)
        if o.given.shape[0] > 0:
            scale = o.given[0]
        else:
            scale = self.largest(o, m, cute.make_tensor(maxima, cute.make_layout(WARPS)), thread) / Float32(LARGEST)
            scale = scale if scale != 0.0 else Float32(1.0)
        if thread == 0:
            o.scale[m] = scale
        for column in cutlass.range(8 * thread, o.x.shape[1], 8 * THREADS, unroll=2):
            quad = load_values(address(o.x, m, column))
            words = cute.make_rmem_tensor((2,), Uint32)
            for i in range_constexpr(2):
                words[i] = quantize(quad[2 * i], quad[2 * i + 1], scale, self.dtype)
            target = cute.recast_ptr(address(o.q, m, column).align(8), dtype=Uint32)
            cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(2)))

    @cute.jit
    def largest(self, o: Operands, m: Int32, maxima: cute.Tensor, thread: Int32):
        """The largest magnitude of a row. Without signs values are in the order of their bits, and NaN is above all."""
        bits = Uint32(0)
        for column in cutlass.range(8 * thread, o.x.shape[1], 8 * THREADS, unroll=2):
            quad = load_values(address(o.x, m, column))
            for i in range_constexpr(4):
                for half in range_constexpr(2):
                    magnitude = (quad[i] >> 16 if half == 1 else quad[i]) & Uint32(0x7FFF)
                    bits = cutlass.max(bits, magnitude)
        bits = Uint32(cute.arch.warp_redux_sync(Int32(bits), "max"))
        if thread & 31 == 0:
            maxima[thread // 32] = bits
        cute.arch.sync_threads()
        for warp in range_constexpr(WARPS):
            bits = cutlass.max(bits, maxima[warp])
        return low_to_float(bits, self.dtype)


@cute.jit
def quantize(first: Uint32, second: Uint32, scale: Float32, dtype: cutlass.Constexpr) -> Uint32:
    """Four 16-bit values over a scale as e4m3: round to nearest even, saturating."""
    values = [half(pair, dtype) / scale for pair in (first, second) for half in (low_to_float, high_to_float)]
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};"
        " cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, { low, high }; }",
        write_only_types=[Uint32],
        read_only_args=values,
    )


def signature(spec: QuantizeTokensSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    m, k = cute.sym_int32(), cute.sym_int32(divisibility=16)
    return QuantizeTokens(spec), (
        operands.rows(operands.DTYPES[spec.dtype], m, k),
        operands.vector(Float32, cute.sym_int32(), 4),
        operands.bytes_by_rows(Uint8, m, k),
        operands.vector(Float32, m),
    )
