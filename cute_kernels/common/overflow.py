"""Forward and backward of a batch whose non-zeros exceed the hybrid format's capacity: dense products of x, the weights
and dy. Nothing was stored, so gate and up are computed again. What both families of these kernels share.

Four kernels. Each returns at once unless the last of `sizes` exceeds `capacity`. One call from the host launches those
of a pass, slice by slice: hidden and token in forward; gradients, token and weight in backward. A slice has as many
tokens as the scratch `parts` [P, tokens, N].

    hidden      parts = h                   and sums of |h|      h = gate * up, rounded to 16 bits
    gradients   parts = d_gate, d_up, h     and sums of d_gate and d_up over 64 tokens each
    token       y = h w_down + b_down,  or  dx = d_gate w_gate + d_up w_up
    weight      dw_gate = d_gate^T x,  dw_up = d_up^T x,  dw_down = h^T dy,  and db_gate, db_up from the sums

    gate = relu(x . w_gate + b_gate) rounded, up = x . w_up + b_up, dh = dy . w_down + dl1 * sign(h),
    d_gate = dh * up, d_up = dh * gate; all zero where the gate is. An empty bias stands for none.

So it is for relu; for the other activations see activation.py. Without an up projection, up is 1 and there is no part
for d_up. Sums of |h| are those of 64 tokens and 128 neurons, in a row for each 128 tokens.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from .. import geometry
from ..specs import OverflowSpec
from . import operands
from .activation import add_l1, gradients, hidden
from .values import MAGNITUDE, high_to_float, low_to_float, pack

# tokens whose sums of |h| are in one row
ROW_TOKENS = geometry.TOKEN_TILE
GROUP_ROWS = geometry.OVERFLOW_SUM


class ScoreOperands(NamedTuple):
    """Operands of `hidden` and `gradients` besides matrices."""

    b_gate: Any
    b_up: Any
    dl1: Any  # None in forward
    sums: Any  # of |h| by tile and group, or of gradients [ceil(M / 64), 2 N], which may be empty
    tokens: Any
    neurons: Any
    gated: Any
    activation: Any  # and threshold: see common/activation.py
    threshold: Any


@cute.jit
def bias_pair(bias, at: Int32) -> Any:
    """Two elements of a bias; zeros beyond its end, where an empty one is at once."""
    low, high = Float32(0.0), Float32(0.0)
    if at < bias.shape[0]:
        low, high = bias[at].to(Float32), bias[at + 1].to(Float32)
    return low, high


@cute.jit
def pointwise(gates: Uint32, ups: Any, dhs: Any, o: Any, dtype: cutlass.Constexpr) -> Any:
    """h of two neurons and, unless `dhs` is None, d_gate and d_up, each a pair; and |h| of both before rounding.

    `dhs`: dy . w_down.
    """
    both, magnitudes = [], []
    for j in range_constexpr(2):
        gate = low_to_float(gates, dtype) if const_expr(j == 0) else high_to_float(gates, dtype)
        values = [hidden(gate, ups[j], o.activation)]
        if const_expr(dhs is not None):
            upstream = add_l1(dhs[j], o.dl1[0], values[0])
            values += gradients(upstream, gate, ups[j], o.activation)
        fires = gates & Uint32(MAGNITUDE << 16 * j) != 0
        values = [cutlass.select_(fires, value, Float32(0.0)) for value in values]
        magnitudes.append(cute.arch.fmax(values[0], -values[0]))
        both.append(values)
    return [pack(low, high, dtype) for low, high in zip(*both)], magnitudes


class HiddenForm:
    """h and the sums of |h|."""

    backward = False
    launch: Any

    @cute.jit
    def run(self, x, weights, b_gate, b_up, sizes, capacity, form, parts, sums, max_ctas, stream):
        """`weights`: w_gate, w_up. `form`: gated, activation, threshold."""
        o = ScoreOperands(b_gate, b_up, None, sums, x.shape[0], weights[0].shape[0], *form)
        self.launch((x,), weights, o, sizes, capacity, parts, max_ctas, stream)


class GradientsForm:
    """d_gate, d_up and h, and the sums of both gradients over 64 tokens each."""

    backward = True
    launch: Any

    @cute.jit
    def run(self, dy, x, weights, b_gate, b_up, dl1, sizes, capacity, form, parts, sums, max_ctas, stream):
        """`weights`: w_gate, w_up, w_down. `form`: gated, activation, threshold."""
        o = ScoreOperands(b_gate, b_up, dl1, sums, x.shape[0], weights[0].shape[0], *form)
        self.launch((x, dy), weights, o, sizes, capacity, parts, max_ctas, stream)


class ProductOperands(NamedTuple):
    """Operands of `token` and `weight` besides the factors; None if a kernel has none."""

    flushed: Any  # partial sums of many terms
    parts: Any  # their number
    second: Any  # the first part that is multiplied by the second operand
    bias: Any  # b_down, which may be empty; None in backward
    results: Any  # 16-bit dw_gate, dw_up, dw_down
    totals: Any  # fp32 sums of them
    add: Any  # whether the sums there are added
    last: Any  # whether results are stored, not sums
    done: Any  # whether the sums of the biases' gradients are complete
    sums: Any  # [ceil(M / 64), 2 N] of the gradients, which may be empty
    d_biases: Any  # db_gate and db_up, each empty if not wanted
    extents: Any  # neurons and columns


class TokenForm:
    """y from h, or dx from the gradients."""

    by_token = True
    launch: Any

    @cute.jit
    def run(self, parts, first, second, bias, sizes, capacity, out, flushed, max_ctas, stream):
        """The second weight is that of d_up, and not used if there is none."""
        o = ProductOperands(
            flushed, parts.shape[0], 1, bias, None, None, None, None, None, None, None, (parts.shape[2], out.shape[1])
        )
        self.launch(parts, (first, second), out, o, sizes, capacity, max_ctas, stream)


class WeightForm:
    """Gradients of weights and biases."""

    by_token = False
    launch: Any

    @cute.jit
    def run(
        self, parts, dy, x, results, totals, add, last, done, sums, d_biases, sizes, capacity, flushed, max_ctas, stream
    ):
        """With `last`, results are 16-bit, otherwise sums. With `done`, sums of the biases' gradients are complete."""
        p, _, n = parts.shape
        o = ProductOperands(flushed, p, p - 1, None, results, totals, add, last, done, sums, d_biases, (n, x.shape[1]))
        self.launch(parts, (x, dy), None, o, sizes, capacity, max_ctas, stream)


class Targets(NamedTuple):
    """Where the gradients of a part go: addresses and row strides of 16-bit results and of fp32 sums."""

    result: Any
    result_stride: Any
    total: Any
    total_stride: Any


@cute.jit
def targets_of(o: Any, part: Int32) -> Any:
    """The targets of a part."""
    return Targets(*pick(o.results, part, o.parts), *pick(o.totals, part, o.parts))


@cute.jit
def pick(matrices: Any, part: Int32, parts: Int32) -> Any:
    """Address and row stride of the matrix of a part: gate, up if there is one, down."""
    gate, up, down = matrices
    where, stride = gate.iterator.toint(), gate.stride[0]
    if part > 0:
        where, stride = up.iterator.toint(), up.stride[0]
    if part == parts - 1:
        where, stride = down.iterator.toint(), down.stride[0]
    return where, stride


@cute.jit
def store_gradients(o: Any, targets: Any, neuron: Int32, column: Int32, sums: Any, dtype: cutlass.Constexpr) -> None:
    """Store two adjacent `sums`, rounded or as sums, unless they are outside the matrix."""
    neurons, k = o.extents
    if neuron < neurons and column < k:
        two = cute.make_rmem_tensor((2,), Float32)
        for j in range_constexpr(2):
            two[j] = sums[j]
        total = pair_at(Float32, targets.total, targets.total_stride, neuron, column)
        if o.add != 0:
            before = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(total, before)
            for j in range_constexpr(2):
                two[j] += before[j]
        if o.last != 0:
            rounded = cute.make_rmem_tensor((2,), dtype)
            rounded.store(two.load().to(dtype))
            cute.autovec_copy(rounded, pair_at(dtype, targets.result, targets.result_stride, neuron, column))
        else:
            cute.autovec_copy(two, total)


@cute.jit
def add_biases(o: Any, thread: Int32, threads: cutlass.Constexpr, dtype: cutlass.Constexpr) -> None:
    """Gradients of the biases, by so many `threads` of each CTA: add the sums over 64 tokens in a fixed order."""
    neurons = o.extents[0]
    for at in cutlass.range(
        cute.arch.block_idx()[0] * threads + thread, o.sums.shape[1], cute.arch.grid_dim()[0] * threads, unroll=1
    ):
        total = Float32(0.0)
        for line in cutlass.range(o.sums.shape[0], unroll=8):
            total += o.sums[line, at]
        gate, up = o.d_biases
        if at < gate.shape[0]:
            gate[at] = total.to(dtype)
        elif at >= neurons and at - neurons < up.shape[0]:
            up[at - neurons] = total.to(dtype)


@cute.jit
def pair_at(dtype: cutlass.Constexpr, matrix: Int64, stride: Int64, row: Int32, column: Int32) -> Any:
    """Two adjacent elements of a matrix whose address is `matrix`."""
    where = matrix + (Int64(row) * stride + column) * (dtype.width // 8)
    pointer = cute.make_ptr(dtype, where, cute.AddressSpace.gmem, assumed_align=2 * (dtype.width // 8))
    return cute.make_tensor(pointer, cute.make_layout(2))


@cute.jit
def rows_of(matrix: Any, first: Int32, count: Int32, align: cutlass.Constexpr = 16) -> Any:
    """`count` rows of a matrix, from `first` on."""
    start = (matrix.iterator + Int64(first) * matrix.stride[0]).align(align)
    return cute.make_tensor(start, cute.make_layout((count, matrix.shape[1]), stride=matrix.stride))


@cute.jit
def tokens_of(parts: Any, count: Int32) -> Any:
    """The first tokens of the scratch."""
    shape = (parts.shape[0], count, parts.shape[2])
    return cute.make_tensor(parts.iterator, cute.make_layout(shape, stride=parts.stride))


class ForwardPass:
    """The kernels of forward, for slices of as many tokens as the scratch has."""

    hidden: Any
    token: Any

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w_gate: cute.Tensor,
        w_up: cute.Tensor,
        w_down: cute.Tensor,
        b_gate: cute.Tensor,
        b_up: cute.Tensor,
        b_down: cute.Tensor,
        sizes: cute.Tensor,
        capacity: Int32,
        gated: Int32,
        activation: Int32,
        threshold: Int32,
        parts: cute.Tensor,
        y: cute.Tensor,
        sums: cute.Tensor,
        flushed: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """If not `gated`, any weight stands for w_up."""
        first = Int32(0)
        while first < x.shape[0]:
            count = cutlass.min(x.shape[0] - first, parts.shape[1])
            here, tiles = tokens_of(parts, count), first // ROW_TOKENS
            own_sums = rows_of(sums, tiles, sums.shape[0] - tiles, 4)
            tokens, weights, form = rows_of(x, first, count), (w_gate, w_up), (gated, activation, threshold)
            self.hidden.run(tokens, weights, b_gate, b_up, sizes, capacity, form, here, own_sums, max_ctas, stream)
            out = rows_of(y, first, count)
            self.token.run(here, w_down, w_down, b_down, sizes, capacity, out, flushed, max_ctas, stream)
            first += count


class BackwardPass:
    """The kernels of backward, for slices of as many tokens as the scratch has."""

    gradients: Any
    token: Any
    weight: Any

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        x: cute.Tensor,
        w_gate: cute.Tensor,
        w_up: cute.Tensor,
        w_down: cute.Tensor,
        b_gate: cute.Tensor,
        b_up: cute.Tensor,
        dl1: cute.Tensor,
        sizes: cute.Tensor,
        capacity: Int32,
        gated: Int32,
        activation: Int32,
        threshold: Int32,
        parts: cute.Tensor,
        dx: cute.Tensor,
        dw_gate: cute.Tensor,
        dw_up: cute.Tensor,
        dw_down: cute.Tensor,
        sum_gate: cute.Tensor,
        sum_up: cute.Tensor,
        sum_down: cute.Tensor,
        accumulate: Int32,
        sums: cute.Tensor,
        db_gate: cute.Tensor,
        db_up: cute.Tensor,
        flushed: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Gradients that are not wanted are empty. `accumulate`: those of weights are added to the fp32 sums; otherwise
        these hold what slices before the last have added up.
        """
        results, totals = (dw_gate, dw_up, dw_down), (sum_gate, sum_up, sum_down)
        first = Int32(0)
        while first < x.shape[0]:
            count = cutlass.min(x.shape[0] - first, parts.shape[1])
            here, lines = tokens_of(parts, count), first // GROUP_ROWS
            own_sums = rows_of(sums, lines, sums.shape[0] - lines, 4)
            own_dy, own_x = rows_of(dy, first, count), rows_of(x, first, count)
            self.gradients.run(
                own_dy, own_x, (w_gate, w_up, w_down), b_gate, b_up, dl1, sizes, capacity,
                (gated, activation, threshold), here, own_sums, max_ctas, stream,
            )  # fmt: skip
            if dx.shape[0] > 0:
                out = rows_of(dx, first, count)
                self.token.run(here, w_gate, w_up, None, sizes, capacity, out, flushed, max_ctas, stream)
            if dw_gate.shape[0] + sum_gate.shape[0] > 0:
                done = Int32(first + count == x.shape[0])
                add, last = Int32(1) if first > 0 else accumulate, done if accumulate == 0 else Int32(0)
                self.weight.run(
                    here, own_dy, own_x, results, totals, add, last, done, sums, (db_gate, db_up), sizes, capacity,
                    flushed, max_ctas, stream,
                )  # fmt: skip
            first += count


def arguments(spec: OverflowSpec) -> tuple[Any, ...]:
    """The fake arguments that stand for the operands of a pass."""
    dtype = operands.DTYPES[spec.dtype]
    m, n, k = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    weights = [operands.rows(dtype, n, k) for _ in range(3)]
    biases = [operands.bias(dtype) for _ in range(3)]
    over = (operands.vector(Int32, cute.sym_int32(), align=4), *[Int32(1)] * 4)
    parts = operands.slabs(dtype, cute.sym_int32(), cute.sym_int32(), n)
    sums = operands.matrix(Float32, cute.sym_int32(), cute.sym_int32())
    aside = (operands.vector(Float32, cute.sym_int32()), Int32(1))
    x = operands.rows(dtype, m, k)
    if spec.mode == "forward":
        return (x, *weights, *biases, *over, parts, operands.rows(dtype, m, k), sums, *aside)
    # empty where no gradient is wanted
    results = [operands.rows(dtype, cute.sym_int32(), k) for _ in range(4)]
    totals = [operands.rows(Float32, cute.sym_int32(), k) for _ in range(3)]
    dl1 = operands.vector(Float32, 1, align=4)
    d_biases = [operands.bias(dtype) for _ in range(2)]
    tokens = (operands.rows(dtype, m, k), x)
    return (
        *tokens, *weights, *biases[:2], dl1, *over, parts, *results, *totals, Int32(1), sums, *d_biases, *aside
    )  # fmt: skip
