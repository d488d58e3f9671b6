"""decode.py with e4m3 weights and tokens: sums are multiplied by scales of tokens and rows, y by those of its columns.

Tensor cores take 8-bit operands only along K. So products of the first projections are of e4m3 values, and down rows
become bfloat16 in registers. A transposed load moves two neighbouring columns of a row as one value: rows g and g + 8
of a fragment of y are columns 2 g and 2 g + 1.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from ..common import operands
from ..common.mma import load_matrices_transposed, mma_16x8x16
from ..common.values import pairs_of_rows
from ..specs import DecodeSpec
from . import decode
from .decode_list import Shared


class Operands(NamedTuple):
    """The kernel's arguments in their order: matrices are bytes; see decode.py for the others."""

    x: Any  # [M, K]
    x_scale: Any  # fp32 [M]
    w_first: Any
    first_scale: Any  # fp32 [N]
    w_up: Any
    up_scale: Any
    w_down: Any
    down_scale: Any  # fp32 [K]
    b_first: Any
    b_up: Any
    threshold: Any
    activation: Any
    b_down: Any
    parts: Any
    early: Any
    y: Any


class DecodeE4m3(decode.Decode):
    """For columns of a CTA, CTAs of a cluster, most tokens, and with or without a gate."""

    scaled = True
    operands: Any = Operands

    @cute.jit
    def mma(self, sums: Any, *fragments: Any) -> Any:
        """Products of eight words of x and of the first projection."""
        return list(
            cute.arch.inline_ptx(
                "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
                "{ {$w0}, {$w1}, {$w2}, {$w3} }, { {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, "
                "{ {$r6}, {$r7}, {$r8}, {$r9} };",
                write_only_types=[Float32] * 4,
                read_only_args=[*fragments, *sums],
            )
        )

    @cute.jit
    def add_down(self, source, queue, y: cute.Tensor, lane: Int32):
        """Add h of a group times its rows: 32 columns of 16 rows at a time."""
        b = self.load_hidden(queue, lane)
        for k in range_constexpr(self.k_frags // 2):
            words = load_matrices_transposed(source + 32 * k)
            for half in range_constexpr(2):
                # rows 0-7 and 8-15 of sixteen columns, each as pairs of rows of even and of odd columns
                low, high = (pairs_of_rows(words[half + 2 * i], self.dtype) for i in range(2))
                for t in range_constexpr(self.n_frags):
                    own = [y[j, t, 2 * k + half] for j in range(4)]
                    own = mma_16x8x16(own, *low, *high, b[0, t], b[1, t], self.dtype)
                    for j in range_constexpr(4):
                        y[j, t, 2 * k + half] = own[j]

    @cute.jit
    def scale(self, o: Any, s: Shared, sums: cute.Tensor, neuron: Int32, group: Int32, first: Int32, lane: Int32):
        """Multiply the sums by the scales of their tokens and rows, of a tile or of a group."""
        for r in range_constexpr(2):
            own = cutlass.min(neuron + 8 * r, o.w_down.shape[0] - 1)
            row = o.first_scale[own]
            if group >= 0:
                row = o.up_scale[self.listed_neuron(o, s, group % self.groups, (lane >> 2) + 8 * r)]
            for t in range_constexpr(self.share):
                for j in range_constexpr(2):
                    token = cutlass.min(8 * (first + t) + (lane & 3) * 2 + j, o.x.shape[0] - 1)
                    sums[2 * r + j, t] = sums[2 * r + j, t] * (row * o.x_scale[token])


def signature(spec: DecodeSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    m, n, k = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=16)
    matrices = [part for rows in (m, n, n) for part in operands.e4m3_rows(rows, k)]
    matrices += [operands.byte_rows(cutlass.Uint8, n, k), operands.dense(Float32, k)]
    biases = [operands.bias(cutlass.BFloat16) for _ in range(3)]
    last = *biases[:2], *[Int32(1)] * 2, biases[2], operands.dense(Float32, cute.sym_int32())
    return DecodeE4m3(spec), (*matrices, *last, Int32(1), operands.rows(cutlass.BFloat16, m, k), Int32(1))
