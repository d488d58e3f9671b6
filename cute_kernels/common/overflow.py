"""Forward and backward of a batch whose non-zeros exceed the hybrid format's capacity: dense products of x, the weights
and dy. Nothing was stored, so gate and up are computed again. What both families of these kernels share.

A pass is one kernel, which returns at once unless the last of `sizes` exceeds `capacity`. It takes slices of as many
tokens as the scratch `parts` [P, tokens, N] has, each in two phases. A phase begins when the one before has ended
everywhere.

    score       parts = h                        and sums of |h|     forward
                parts = d_gate, d_up, h          and sums of d_gate and d_up over 64 tokens each     backward
    products    y = h w_down + b_down                                forward
                dx = d_gate w_gate + d_up w_up                       backward, and
                dw_gate = d_gate^T x,  dw_up = d_up^T x,  dw_down = h^T dy,  and db_gate, db_up from the sums

    h = gate * up, gate = relu(x . w_gate + b_gate) rounded, up = x . w_up + b_up, dh = dy . w_down + dl1 * sign(h),
    d_gate = dh * up, d_up = dh * gate; all are rounded, and zero where the gate is. An empty bias stands for none.

The gate before its activation may be given, [M, N]; an empty one stands for none. Then the product for it is made, as
it comes with that for up, and not read, and d_gate [M, N] is in no product, but a result if it is not empty.

So it is for relu; for the other activations see activation.py. Without an up projection, up is 1 and there is no part
for d_up. Sums of |h| are those of 64 tokens and 128 neurons, in a row for each 128 tokens.

Who computes waits for all others, so all must run at the same time. A launch alone does not promise that: other kernels
may hold multiprocessors. So CTAs, in clusters where there are any, enlist when they begin. The first one closes the
list, and who comes later returns.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from .. import geometry
from ..specs import OverflowSpec
from . import operands
from .activation import add_l1, gradients, hidden
from .copies import address, load_values, store_values
from .values import MAGNITUDE, high_to_float, low_to_float, pack

# tokens whose sums of |h| are in one row
ROW_TOKENS = geometry.TOKEN_TILE
GROUP_ROWS = geometry.OVERFLOW_SUM
# looks, of half a microsecond or more each, for those who have not begun when the first one does
LOOKS = 64
# added to the number of those who have come when the list is closed
LATE = 1 << 30


class Operands(NamedTuple):
    """Operands besides matrices; None if a pass has none."""

    b_gate: Any  # of twice as many elements as neurons if thresholds lie behind the biases
    b_up: Any
    b_down: Any  # None in backward
    dl1: Any  # None in forward
    gated: Any
    activation: Any  # and threshold: see common/activation.py
    threshold: Any
    sums: Any  # of |h| by tile and group, or of gradients [ceil(M / 64), 2 N], which may be empty
    flushed: Any  # partial sums of many terms
    by_token: Any  # whether y or dx is wanted
    weights: Any  # see WeightOperands; None in forward
    gate: Any  # given, or empty
    d_gate: Any  # its gradient, or empty; None in forward
    counters: Any  # geometry.OVERFLOW_COUNTERS words, zero before
    tokens: Any
    neurons: Any
    columns: Any
    parts: Any  # their number
    most: Any  # tokens of a slice


class WeightOperands(NamedTuple):
    """Operands of the gradients of weights and biases."""

    wanted: Any
    results: Any  # 16-bit dw_gate, dw_up, dw_down
    totals: Any  # fp32 sums of them
    accumulate: Any  # whether sums are added to those there, and no result is stored
    d_biases: Any  # db_gate and db_up, each empty if not wanted


class Slice(NamedTuple):
    """Tokens that are computed together; 0 or 1 whether they are the last ones."""

    first: Any
    count: Any
    is_last: Any


class Team(NamedTuple):
    """Those who compute, clusters or CTAs: index of this one, and their number."""

    index: Any
    size: Any


@cute.jit
def slice_at(o: Any, first: Int32) -> Slice:
    """The slice that begins with token `first`."""
    count = cutlass.min(o.tokens - first, o.most)
    return Slice(first, count, Int32(first + count == o.tokens))


@cute.jit
def enlist(counters: Any, units: Int32) -> tuple[Int32, Int32]:
    """Index of a cluster or CTA, one of so many `units`, and the number of those who compute. By one thread of it.

    The index of one that comes late is not below that number.
    """
    come, closed = counters.iterator, counters.iterator + 1
    index = Int32(cute.arch.atomic_add(come, Int32(1), sem="relaxed", scope="gpu"))
    if index == 0:
        looks = Int32(0)
        while looks < LOOKS:
            here = Int32(cute.arch.load(come, Int32, sem="relaxed", scope="gpu"))
            looks = looks + 1 if here < units else Int32(LOOKS)
        number = Int32(cute.arch.atomic_add(come, Int32(LATE), sem="relaxed", scope="gpu"))
        cute.arch.store(closed, number, sem="relaxed", scope="gpu")
    size = Int32(0)
    while size == 0:
        size = Int32(cute.arch.load(closed, Int32, sem="relaxed", scope="gpu"))
    return index, size


@cute.jit
def arrive_and_wait(counters: Any, arrivals: Int32) -> None:
    """Wait until there have been so many `arrivals` of CTAs, this one included. By one thread of each."""
    arrived = counters.iterator + 2
    cute.arch.atomic_add(arrived, Int32(1), sem="release", scope="gpu")
    waiting = Boolean(True)
    while waiting:
        waiting = Int32(cute.arch.load(arrived, Int32, sem="acquire", scope="gpu")) < arrivals


@cute.jit
def bias_pair(bias: cute.Tensor, at: Int32) -> Any:
    """Two elements of a bias; zeros beyond its end, where an empty one is at once."""
    low, high = Float32(0.0), Float32(0.0)
    if at < bias.shape[0]:
        low, high = bias[at].to(Float32), bias[at + 1].to(Float32)
    return low, high


@cute.jit
def gate_terms(o: Any, at: Int32) -> Any:
    """Of the gates of two neurons the biases, zeros beyond the last one, and thresholds as `above` takes them."""
    low, high, levels = Float32(0.0), Float32(0.0), Int32(o.threshold)
    if at < cutlass.min(o.neurons, o.b_gate.shape[0]):
        low, high = o.b_gate[at].to(Float32), o.b_gate[at + 1].to(Float32)
        if o.b_gate.shape[0] > o.neurons:
            pairs = cute.recast_ptr((o.b_gate.iterator + (o.neurons + at)).align(4), dtype=Uint32)
            levels = Int32(cute.make_tensor(pairs, cute.make_layout(1))[0])
    return low, high, levels


@cute.jit
def given_pair(gate: cute.Tensor, token: Int32, neuron: Int32, dtype: cutlass.Constexpr) -> Any:
    """The given gates of two neurons in fp32; zeros outside."""
    pair = Uint32(0)
    if (token < gate.shape[0]) & (neuron < gate.shape[1]):
        source = cute.recast_ptr(address(gate, token, neuron).align(4), dtype=Uint32)
        pair = Uint32(cute.make_tensor(source, cute.make_layout(1))[0])
    return low_to_float(pair, dtype), high_to_float(pair, dtype)


@cute.jit
def copy_gradients(o: Any, parts: cute.Tensor, here: Slice, own: Int32, threads: Int32) -> None:
    """Copy the first part of a slice to the gradient of a given gate, by so many `threads` in all."""
    pieces = o.neurons // 8
    for i in cutlass.range(own, here.count * pieces, threads, unroll=1):
        row = i // pieces
        column = (i - row * pieces) * 8
        source = parts.iterator + (Int64(row) * parts.stride[1] + column)
        store_values(address(o.d_gate, here.first + row, column), load_values(source))


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


class Targets(NamedTuple):
    """Where the gradients of a part go: addresses and row strides of 16-bit results and of fp32 sums."""

    result: Any
    result_stride: Any
    total: Any
    total_stride: Any


@cute.jit
def targets_of(o: Any, part: Int32) -> Any:
    """The targets of a part."""
    return Targets(*pick(o.weights.results, part, o.parts), *pick(o.weights.totals, part, o.parts))


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
def store_gradients(
    o: Any, here: Slice, targets: Any, neuron: Int32, column: Int32, sums: Any, dtype: cutlass.Constexpr
) -> None:
    """Add two adjacent `sums` to those of earlier slices and store them, rounded or not, unless they are outside."""
    if neuron < o.neurons and column < o.columns:
        two = cute.make_rmem_tensor((2,), Float32)
        for j in range_constexpr(2):
            two[j] = sums[j]
        total = pair_at(Float32, targets.total, targets.total_stride, neuron, column)
        if here.first + o.weights.accumulate > 0:
            before = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(total, before)
            for j in range_constexpr(2):
                two[j] += before[j]
        if here.is_last > o.weights.accumulate:
            rounded = cute.make_rmem_tensor((2,), dtype)
            rounded.store(two.load().to(dtype))
            cute.autovec_copy(rounded, pair_at(dtype, targets.result, targets.result_stride, neuron, column))
        else:
            cute.autovec_copy(two, total)


@cute.jit
def add_biases(o: Any, own: Int32, threads: Int32, dtype: cutlass.Constexpr) -> None:
    """Gradients of the biases, by so many `threads` in all: add the sums over 64 tokens in a fixed order."""
    for at in cutlass.range(own, o.sums.shape[1], threads, unroll=1):
        total = Float32(0.0)
        for line in cutlass.range(o.sums.shape[0], unroll=8):
            total += o.sums[line, at]
        gate, up = o.weights.d_biases
        if at < gate.shape[0]:
            gate[at] = total.to(dtype)
        elif at >= o.neurons and at - o.neurons < up.shape[0]:
            up[at - o.neurons] = total.to(dtype)


@cute.jit
def pair_at(dtype: cutlass.Constexpr, matrix: Int64, stride: Int64, row: Int32, column: Int32) -> Any:
    """Two adjacent elements of a matrix whose address is `matrix`."""
    where = matrix + (Int64(row) * stride + column) * (dtype.width // 8)
    pointer = cute.make_ptr(dtype, where, cute.AddressSpace.gmem, assumed_align=2 * (dtype.width // 8))
    return cute.make_tensor(pointer, cute.make_layout(2))


class ForwardPass:
    """The operands of forward."""

    backward = False
    launch: Any

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
        counters: cute.Tensor,
        gate: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """If not `gated`, any weight stands for w_up, and with a given `gate` for w_gate; then any matrix is x."""
        o = Operands(
            b_gate, b_up, b_down, None, gated, activation, threshold, sums, flushed, Int32(1), None, gate, None,
            counters, x.shape[0], *w_gate.shape, *parts.shape[:2],
        )  # fmt: skip
        # the second factor of the product is that of a second part, which there is not
        self.launch((x,), (w_gate, w_up), (w_down, w_down), parts, parts, y, o, sizes, capacity, max_ctas, stream)


class BackwardPass:
    """The operands of backward."""

    backward = True
    launch: Any

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
        counters: cute.Tensor,
        gate: cute.Tensor,
        d_gate: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Gradients that are not wanted are empty. `accumulate`: those of weights are added to the fp32 sums; otherwise
        these hold what slices before the last have added up. With a given `gate` w_up and dw_up stand for w_gate and
        dw_gate, too.
        """
        given, (count, *extents) = Int32(gate.shape[0] > 0), parts.shape
        # d_gate of a given gate, the first part, is in no product
        layout = cute.make_layout((count - given, *extents), stride=parts.stride)
        factors = cute.make_tensor(parts.iterator + given * parts.stride[0], layout)
        wanted = Int32(dw_down.shape[0] + sum_down.shape[0] > 0)
        results, totals = (dw_gate, dw_up, dw_down), (sum_gate, sum_up, sum_down)
        weights = WeightOperands(wanted, results, totals, accumulate, (db_gate, db_up))
        o = Operands(
            b_gate, b_up, None, dl1, gated, activation, threshold, sums, flushed, Int32(dx.shape[0] > 0), weights,
            gate, d_gate, counters, x.shape[0], *w_gate.shape, *factors.shape[:2],
        )  # fmt: skip
        tokens, weights_of = (x, dy), (w_gate, w_up, w_down)
        self.launch(tokens, weights_of, (w_gate, w_up), parts, factors, dx, o, sizes, capacity, max_ctas, stream)


def arguments(spec: OverflowSpec) -> tuple[Any, ...]:
    """The fake arguments that stand for the operands of a pass."""
    dtype = operands.DTYPES[spec.dtype]
    m, n, k = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    weights = [operands.rows(dtype, n, k) for _ in range(3)]
    biases = [operands.bias(dtype) for _ in range(3)]
    over = (operands.vector(Int32, cute.sym_int32(), align=4), *[Int32(1)] * 4)
    parts = operands.slabs(dtype, cute.sym_int32(), cute.sym_int32(), n)
    sums = operands.matrix(Float32, cute.sym_int32(), cute.sym_int32())
    aside = (
        operands.vector(Float32, cute.sym_int32()),
        operands.vector(Int32, cute.sym_int32(), align=4),
    )
    # empty, or that of all tokens
    given = operands.rows(dtype, cute.sym_int32(), n)
    x = operands.rows(dtype, m, k)
    if spec.mode == "forward":
        return (x, *weights, *biases, *over, parts, operands.rows(dtype, m, k), sums, *aside, given, Int32(1))
    # empty where no gradient is wanted
    results = [operands.rows(dtype, cute.sym_int32(), k) for _ in range(4)]
    totals = [operands.rows(Float32, cute.sym_int32(), k) for _ in range(3)]
    dl1 = operands.vector(Float32, 1, align=4)
    d_biases = [operands.bias(dtype) for _ in range(2)]
    tokens = (operands.rows(dtype, m, k), x)
    return (
        *tokens, *weights, *biases[:2], dl1, *over, parts, *results, *totals, Int32(1), sums, *d_biases, *aside,
        given, operands.rows(dtype, cute.sym_int32(), n), Int32(1),
    )  # fmt: skip
