"""The activation of dense layers, h = relu(gate) * up, in one pass, and its gradients in one pass.

    forward    gate, up -> h
    backward   dh, gate, up -> d_gate = dh * up where relu(gate) > 0 or NaN, else 0;  d_up = dh * relu(gate)

So it is for relu; for the other activations see common/activation.py. Tensors of any shape come as vectors of the same
length. In the forward pass gate and up may also be the halves of one product: rows of `width` values that are `stride`
values apart, both multiples of eight. ReLU gives +0 and keeps NaN; products of 16-bit values are computed in fp32 and
rounded once. So for relu and fatrelu results equal those of torch on a GPU bit by bit. A thread has several vectors of
eight values, a block apart, and loads all of them before it computes. Beyond the last vector it loads that one again.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr

from ..common import launch, operands
from ..common.activation import above, gradients, hidden
from ..common.values import MAGNITUDE, high_to_float, low_to_float, pack, relu_pair
from ..specs import RegluSpec

THREADS = 256
# values of a 16-byte vector
VECTOR = 8
# vectors of each source in flight: 128 and 96 bytes per thread
FORWARD_VECTORS, BACKWARD_VECTORS = 4, 2


class _Elementwise:
    """A pass over ``sources`` into ``targets``, vectors of one length; ``combine`` maps pairs of values."""

    vectors: int
    # (pairs, form): one pair of values per target from one per source; `form`: activation and threshold
    combine: Any

    def __init__(self, spec: RegluSpec):
        self.dtype = operands.DTYPES[spec.dtype]

    @cute.jit
    def launch(self, sources: Any, targets: Any, form: Any, rows: Any, stream: cuda.CUstream):
        size = Int64(targets[0].shape[0])
        # one block even for fewer than eight values: it handles the remainder
        blocks = cutlass.max(cute.ceil_div(size // VECTOR, THREADS * self.vectors), 1)
        if size > 0:
            launch.start(self.kernel(sources, targets, form, rows, size), Int32(blocks), THREADS, stream)

    @cute.kernel
    def kernel(self, sources: Any, targets: Any, form: Any, rows: Any, size: Int64):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        vectors = size >> 3
        first = Int64(block) * (THREADS * self.vectors) + thread
        last = cutlass.max(vectors - 1, 0)
        places = [self.place(cutlass.min(first + i * THREADS, last), rows) for i in range(self.vectors)]
        launch.wait()
        if vectors > 0:
            held = []
            for i in range_constexpr(self.vectors):
                held.append([self.load(source.iterator + places[i]) for source in sources])
            for i in range_constexpr(self.vectors):
                results = [self.combine([quad[pair] for quad in held[i]], form) for pair in range(4)]
                if first + i * THREADS < vectors:
                    at = cute.assume((first + i * THREADS) * VECTOR, divby=VECTOR)
                    for k in range_constexpr(len(targets)):
                        self.store(targets[k].iterator + at, [pair[k] for pair in results])
        if block == 0:
            at = vectors * VECTOR + thread
            if at < size:
                results = self.combine([self.load_one(source.iterator + at) for source in sources], form)
                for k in range_constexpr(len(targets)):
                    self.store_one(targets[k].iterator + at, results[k])

    @cute.jit
    def place(self, vector: Int64, rows: Any) -> Int64:
        """Where a vector of the sources begins; `rows`: width and stride, or None if they are contiguous."""
        at = vector * VECTOR
        if const_expr(rows is not None):
            # a launch has fewer than 2^31 values
            width, stride = rows
            row = Int32(at) // width
            at = Int64(row) * stride + (Int32(at) - row * width)
        return cute.assume(at, divby=VECTOR)

    def load(self, source: Any) -> Any:
        """Load eight values to four registers, from memory that is read once."""
        return cute.arch.inline_ptx(
            "ld.global.cs.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[source],
        )

    def store(self, target: Any, values: Any) -> None:
        quad = cute.make_rmem_tensor((4,), Uint32)
        for i in range(4):
            quad[i] = values[i]
        cute.autovec_copy(quad, cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(4)))

    def load_one(self, source: Any) -> Any:
        """Load one value to the low half of a register."""
        return cute.make_tensor(cute.recast_ptr(source, dtype=Uint16), cute.make_layout(1))[0].to(Uint32)

    def store_one(self, target: Any, pair: Any) -> None:
        value = cute.make_tensor(cute.recast_ptr(target, dtype=Uint16), cute.make_layout(1))
        value[0] = Uint16(pair & Uint32(0xFFFF))


class Reglu(_Elementwise):
    """``gate, up -> h`` for one dtype."""

    vectors = FORWARD_VECTORS

    @cute.jit
    def __call__(self, *arguments: Any):
        """gate, up and h, their width and stride, the activation, the threshold and the stream."""
        gate, up, h, width, stride, activation, threshold, stream = arguments
        self.launch((gate, up), (h,), (activation, threshold), (width, stride), stream)

    @cute.jit
    def combine(self, pairs: Any, form: Any) -> Any:
        activation, threshold = form
        gate, up = above(relu_pair(pairs[0], self.dtype), threshold, self.dtype), pairs[1]
        low = hidden(low_to_float(gate, self.dtype), low_to_float(up, self.dtype), activation)
        high = hidden(high_to_float(gate, self.dtype), high_to_float(up, self.dtype), activation)
        return [pack(low, high, self.dtype)]


class RegluBackward(_Elementwise):
    """``dh, gate, up -> d_gate, d_up`` for one dtype."""

    vectors = BACKWARD_VECTORS

    @cute.jit
    def __call__(self, *arguments: Any):
        """upstream, gate and up, d_gate and d_up, the activation, the threshold and the stream."""
        upstream, gate, up, d_gate, d_up, activation, threshold, stream = arguments
        self.launch((upstream, gate, up), (d_gate, d_up), (activation, threshold), None, stream)

    @cute.jit
    def combine(self, pairs: Any, form: Any) -> Any:
        activation, threshold = form
        gate = above(relu_pair(pairs[1], self.dtype), threshold, self.dtype)
        d_gate, d_up = [], []
        for to_float, bits in ((low_to_float, MAGNITUDE), (high_to_float, MAGNITUDE << 16)):
            dh, own, up = (to_float(pair, self.dtype) for pair in (pairs[0], gate, pairs[2]))
            by_gate, by_up = gradients(dh, own, up, activation)
            # NaN passes its gradient on. Comparing the gate as a float crashes the compiler for CUDA 12
            d_gate.append(cutlass.select_(gate & Uint32(bits) != 0, by_gate, Float32(0.0)))
            d_up.append(by_up)
        return [pack(*d_gate, self.dtype), pack(*d_up, self.dtype)]


def signature(spec: RegluSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype, size = operands.DTYPES[spec.dtype], cute.sym_int64()
    form = Int32(1), Int32(1)
    if spec.backward:
        return RegluBackward(spec), (*(operands.dense(dtype, size) for _ in range(5)), *form)
    # halves of one product have fewer values than lie between their ends
    gate, up = (operands.dense(dtype, cute.sym_int64()) for _ in range(2))
    return Reglu(spec), (gate, up, operands.dense(dtype, size), Int32(1), Int32(1), *form)
