"""Rows of x in e4m3: x_q[m] = e4m3(x[m] * (1 / scale[m])) with scale[m] = max|x[m]| / 448, but not below 2^-126.

If `given` is not empty, all rows have its scale, and values beyond 448 times that become the largest. A row with NaN
or an infinity has the scale NaN, and NaN alone: then all that depends on the row is NaN.

Of a `hidden` state x is relu(gate) * up, rounded as dense layers round it; of one without an up projection it is
relu(gate), and for the other activations see common/activation.py.

A warp has 2,048 columns of x in registers; up to eight warps share a longer row. A CTA has a row of a hidden state, and
computes one of more than 8,192 columns twice.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from ..common import launch, operands
from ..common.activation import DRELU, above, power_pair
from ..common.copies import address, load_values_if, store_values
from ..common.values import MAGNITUDE, high_to_float, low_to_float, ptx_type, relu_pair
from ..specs import QuantizeTokensSpec

THREADS = 256
WARPS = THREADS // 32
# pieces of 16 bytes of a thread: of x, and of a hidden state at a time
PIECES, BATCH = 8, 4
LARGEST, SMALLEST = 448.0, 2.0**-126


class Operands(NamedTuple):
    """Operands in global memory."""

    x: Any  # [M, K]
    given: Any  # fp32 [1], or empty
    q: Any  # e4m3 [M, K] as bytes
    scale: Any  # fp32 [M], of any stride


class Hidden(NamedTuple):
    """Those of a hidden state."""

    gate: Any  # [M, N] before its activation
    up: Any  # [M, N] or None
    q: Any
    scale: Any
    activation: Any
    threshold: Any


class QuantizeTokens:
    """For one dtype; sizes stay symbolic."""

    def __init__(self, spec: QuantizeTokensSpec):
        self.dtype = operands.DTYPES[spec.dtype]

    @cute.jit
    def __call__(self, x: cute.Tensor, given: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, stream: cuda.CUstream):
        o = Operands(x, given, q, scale)
        if x.shape[0] > 0:
            rows = WARPS // warps_of(x.shape[1])
            launch.start(self.kernel(o), cute.ceil_div(x.shape[0], rows), THREADS, stream)

    @cute.kernel
    def kernel(self, o: Operands):
        lane = cute.arch.lane_idx()
        warp, share = cute.arch.make_warp_uniform(cute.arch.warp_idx()), warps_of(o.x.shape[1])
        maxima = cute.make_tensor(SmemAllocator().allocate_array(Uint32, WARPS), cute.make_layout(WARPS))
        launch.wait()
        m = cute.arch.block_idx()[0] * (WARPS // share) + warp // share
        exists = m < o.x.shape[0]
        first, step = (warp % share * 32 + lane) * 8, share * 256
        row = cute.make_rmem_tensor((4, PIECES), Uint32)
        for i in range_constexpr(PIECES):
            column = first + i * step
            valid = exists & (column < o.x.shape[1])
            token, column = m if valid else 0, column if valid else 0
            load_values_if(address(o.x, token, column), row[None, i], valid)
        scale = Float32(1.0)
        if o.given.shape[0] > 0:
            scale = o.given[0]
        else:
            pair = Uint32(0)
            for i in range_constexpr(PIECES):
                pair = larger_pair(row[None, i], pair, self.dtype)
            largest = largest_of(pair)
            if lane == 0:
                maxima[warp] = largest
            cute.arch.sync_threads()
            for i in cutlass.range(share):
                largest = cutlass.max(largest, maxima[warp // share * share + i])
            scale = scale_of(largest, self.dtype)
        if exists & (first == 0):
            o.scale[m] = scale
        words, inverse = cute.make_rmem_tensor((2,), Uint32), Float32(1.0) / scale
        for i in range_constexpr(PIECES):
            column = first + i * step
            if exists & (column < o.x.shape[1]):
                store_quantized(o.q, m, column, row[None, i], inverse, words, self.dtype)


@cute.jit
def warps_of(k: Int32) -> Int32:
    """Warps that share a row."""
    warps = Int32(1)
    while warps * (256 * PIECES) < k:
        warps = warps * 2
    return warps


@cute.jit
def quantize(first: Uint32, second: Uint32, factor: Float32, dtype: cutlass.Constexpr) -> Uint32:
    """Four 16-bit values times a factor as e4m3: round to nearest even, saturating."""
    values = [half(pair, dtype) * factor for pair in (first, second) for half in (low_to_float, high_to_float)]
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};"
        " cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, { low, high }; }",
        write_only_types=[Uint32],
        read_only_args=values,
    )


class QuantizeHidden(QuantizeTokens):
    """For one dtype, with an up projection or without."""

    @cute.jit
    def __call__(self, *arguments: Any):
        """`Hidden` and the stream."""
        *given, stream = arguments
        o = Hidden(*given)
        if o.gate.shape[0] > 0:
            launch.start(self.kernel(o), o.gate.shape[0], THREADS, stream)

    @cute.kernel
    def kernel(self, o: Hidden):
        thread, m = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        maxima = cute.make_tensor(SmemAllocator().allocate_array(Uint32, WARPS), cute.make_layout(WARPS))
        launch.wait()
        values, pair = cute.make_rmem_tensor((4, BATCH), Uint32), Uint32(0)
        columns = o.gate.shape[1]
        for first in cutlass.range(8 * thread, columns, BATCH * 8 * THREADS, unroll=1):
            self.compute(o, m, first, values)
            for i in range_constexpr(BATCH):
                pair = larger_pair(values[None, i], pair, self.dtype)
        bits = largest_of(pair)
        if cute.arch.lane_idx() == 0:
            maxima[thread // 32] = bits
        cute.arch.sync_threads()
        for warp in range_constexpr(WARPS):
            bits = cutlass.max(bits, maxima[warp])
        scale = scale_of(bits, self.dtype)
        if thread == 0:
            o.scale[m] = scale
        words, inverse = cute.make_rmem_tensor((2,), Uint32), Float32(1.0) / scale
        for first in cutlass.range(8 * thread, columns, BATCH * 8 * THREADS, unroll=1):
            if columns > BATCH * 8 * THREADS:
                self.compute(o, m, first, values)
            for i in range_constexpr(BATCH):
                column = first + i * (8 * THREADS)
                if column < columns:
                    store_quantized(o.q, m, column, values[None, i], inverse, words, self.dtype)

    @cute.jit
    def compute(self, o: Hidden, m: Int32, first: Int32, values: cute.Tensor):
        """A thread's hidden values of a batch, eight from column `first` on and so on; zeros beyond the last column."""
        gates, ups = (cute.make_rmem_tensor((4, BATCH), Uint32) for _ in range(2))
        for i in range_constexpr(BATCH):
            column = first + i * (8 * THREADS)
            exists = column < o.gate.shape[1]
            load_values_if(address(o.gate, m, column if exists else 0), gates[None, i], exists)
            if const_expr(o.up is not None):
                load_values_if(address(o.up, m, column if exists else 0), ups[None, i], exists)
        values.fill(0)
        for i in range_constexpr(BATCH):
            if first + i * (8 * THREADS) < o.gate.shape[1]:
                for j in range_constexpr(4):
                    gate = above(relu_pair(gates[j, i], self.dtype), o.threshold, self.dtype)
                    h = power_pair(gate, o.activation, self.dtype)
                    if const_expr(o.up is not None):
                        h = product_pair(h, rectify_pair(ups[j, i], o.activation, self.dtype), self.dtype)
                    values[j, i] = h


@cute.jit
def larger_pair(quad: cute.Tensor, pair: Uint32, dtype: cutlass.Constexpr) -> Uint32:
    """The larger ones of `pair` and the magnitudes of four pairs, NaN if one is NaN."""
    kind = f"{ptx_type(dtype)}x2"
    for i in range_constexpr(4):
        pair = cute.arch.inline_ptx(
            # max takes no immediate operand
            f"{{ .reg .b32 size, other; abs.{kind} size, {{$r0}}; mov.b32 other, {{$r1}};"
            f" max.NaN.{kind} {{$w0}}, size, other; }}",
            write_only_types=[Uint32],
            read_only_args=[quad[i], pair],
        )
    return pair


@cute.jit
def largest_of(pair: Uint32) -> Uint32:
    """The larger magnitude of the pairs of a warp; without sign, values are in the order of their bits."""
    larger = cutlass.max(pair & Uint32(MAGNITUDE), pair >> 16)
    return Uint32(cute.arch.warp_redux_sync(Int32(larger), "max"))


@cute.jit
def rectify_pair(up: Uint32, activation: Int32, dtype: cutlass.Constexpr) -> Uint32:
    """`rectify` of both values of a pair."""
    infinities = Uint32(0xFF80FF80 if const_expr(dtype is cutlass.BFloat16) else 0xFC00FC00)
    return cute.arch.inline_ptx(
        f"max.NaN.{ptx_type(dtype)}x2 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[up, Uint32(cutlass.select_(activation == DRELU, Uint32(0), infinities))],
    )


@cute.jit
def product_pair(a: Uint32, b: Uint32, dtype: cutlass.Constexpr) -> Uint32:
    """The products of two pairs, rounded."""
    return cute.arch.inline_ptx(
        f"mul.rn.{ptx_type(dtype)}x2 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[a, b]
    )


@cute.jit
def scale_of(largest: Uint32, dtype: cutlass.Constexpr) -> Float32:
    """The scale of a row with this largest magnitude."""
    scale = low_to_float(largest, dtype) / Float32(LARGEST)
    # NaN is not below it; of a smaller one the inverse would be infinite
    scale = Float32(SMALLEST) if scale < SMALLEST else scale
    return Float32.nan if scale == Float32.inf else scale


@cute.jit
def store_quantized(q, m: Int32, column: Int32, quad, inverse: Float32, words, dtype: cutlass.Constexpr):
    """Store eight values of a row in e4m3."""
    for j in range_constexpr(2):
        words[j] = quantize(quad[2 * j], quad[2 * j + 1], inverse, dtype)
    store_values(address(q, m, column), words)


def signature(spec: QuantizeTokensSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype, m, k = operands.DTYPES[spec.dtype], cute.sym_int32(), cute.sym_int32(divisibility=16)
    matrix = operands.rows(dtype, m, k)
    if spec.source == "tokens":
        given, q = operands.dense(Float32, cute.sym_int32(), align=4), operands.byte_rows(cutlass.Uint8, m, k)
        return QuantizeTokens(spec), (matrix, given, q, operands.strided(Float32, m))
    up = operands.rows(dtype, m, k) if spec.source == "gated" else None
    return QuantizeHidden(spec), (matrix, up, *operands.e4m3_rows(m, k), Int32(1), Int32(1))
