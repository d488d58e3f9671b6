"""up_down_token.py of e4m3 rows with scales:

    h[m, c] = gate[m, c] * (x_q[m] . u_q[c] * u_scale[c] * x_scale[m] + b_up[c])
    y[m]    = sum over c of h[m, c] * d_q[c] * d_scale + b_down

Values are unpacked to fp16 pairs, which hold all of them exactly, then to fp32, in which all is multiplied and added. A
thread owns 16 columns of each 16 bytes.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, range_constexpr

from ..common.copies import aligned
from ..common.values import high_to_float, low_to_float, unpack_e4m3
from ..specs import UpDownTokenSpec
from .up_down_token import Operands, Thread, TokenCluster, UpDownToken, Views, arguments


class Scales(NamedTuple):
    """Operands in global memory, None if absent."""

    x: Any  # fp32 [M]
    up: Any  # fp32 [N]
    down: Any  # fp32 [K]


class E4m3Rows(TokenCluster):
    """What e4m3 rows are to a cluster."""

    def products(self, x_thread: cute.Tensor, rows: cute.Tensor) -> list[Float32]:
        sums = [Float32(0.0)] * self.rows
        for v in range(self.vectors):
            for i in range(4):
                own = values_of(x_thread[i, v])
                for j in range(self.rows):
                    for a, b in zip(own, values_of(rows[i, v, j])):
                        sums[j] += a * b
        return sums

    @cute.jit
    def add_rows(self, s: Views, acc: cute.Tensor, rows: cute.Tensor, first: Int32):
        hidden = self.load_list(s.hidden, first)
        for j in range_constexpr(self.rows):
            for v in range_constexpr(self.vectors):
                for i in range_constexpr(4):
                    values = values_of(rows[i, v, j])
                    for e in range_constexpr(4):
                        acc[4 * i + e, v] += hidden[j] * values[e]

    @cute.jit
    def scaled_up(self, o: Operands, s: Views, m: Int32, i: Int32, product: Float32):
        return product * o.scales.up[Int32(s.nonzeros[i] & Uint32(0xFFFF))] * o.scales.x[m]

    @cute.jit
    def store_columns(self, o: Operands, values: cute.Tensor, m: Int32, column: Int32):
        for half in range_constexpr(2):
            eight = cute.make_rmem_tensor((8,), Float32)
            for i in range_constexpr(8):
                eight[i] = values[8 * half + i] * o.scales.down[column + 8 * half + i]
            TokenCluster.store_columns(self, o, eight, m, column + 8 * half)

    @cute.jit
    def store_pair(self, o: Operands, values: Any, m: Int32, column: Int32):
        pair = cute.make_rmem_tensor((2,), Float32)
        for j in range_constexpr(2):
            pair[j] = values[j] * o.scales.down[column + j]
        TokenCluster.store_pair(self, o, pair, m, column)

    @cute.jit
    def share_sums(self, s: Views, acc: cute.Tensor, at: Thread):
        for v in range_constexpr(self.vectors):
            for i in range_constexpr(4):
                place = self.place_of(at.column + v * self.span * self.step + 4 * i)
                four = cute.make_tensor(acc[None, v].iterator + 4 * i, cute.make_layout(4))
                cute.autovec_copy(four, aligned(s.sums + (at.group * self.pitch + place), 4))
        cute.arch.sync_threads()

    def place_of(self, column: Int32) -> Int32:
        """Where the sum of a column is: every fourth quad of columns lies in a row of its own.

        So threads write to different banks.
        """
        return (column >> 4) * 4 + (column & 3) + ((column >> 2) & 3) * (self.pitch // 4)


def values_of(word: Uint32) -> list[Float32]:
    """Four e4m3 values."""
    return [half(pair, cutlass.Float16) for pair in unpack_e4m3(word) for half in (low_to_float, high_to_float)]


class UpDownTokenE4m3(UpDownToken):
    """For one cluster size and class of hidden sizes, gated or not."""

    Team = E4m3Rows

    @cute.jit
    def __call__(self, *given: Any):
        """As there, with scales behind x and each weight."""
        x, x_scale, words, spill, w_up, up_scale, w_down, down_scale, *rest, stream = given
        b_up, b_down, y, l1, sums, counters, weights, stats, helpers, limit, words_per_tile, activation = rest
        layer = (x, words, spill, w_up, w_down, b_up, b_down, y, l1, words_per_tile, activation)
        shared = (sums, counters, weights, helpers, limit, stats)
        self.launch(Operands(*layer, *shared, scales=Scales(x_scale, up_scale, down_scale)), stream)


def signature(spec: UpDownTokenSpec) -> tuple[Any, tuple[Any, ...]]:
    return UpDownTokenE4m3(spec), arguments(spec)
