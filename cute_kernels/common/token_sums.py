"""The end of a token of up_down_token.py: its groups' sums are added, rounded and stored."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from ..specs import TOKEN_WARPS
from .copies import address, aligned, load_values, store_values
from .values import high_to_float, low_to_float, pack

WARPS = TOKEN_WARPS
THREADS = 32 * WARPS


class TokenSums:
    """`o` has b_down, y and l1; `s` has totals [WARPS] and sums."""

    dtype: Any
    span: int
    step: int
    vectors: int
    groups: int
    columns: int
    pitch: int

    @cute.jit
    def store_token(self, o: Any, s: Any, acc: cute.Tensor, m: Int32, at: Any):
        """Add the groups' sums in a fixed order and store this CTA's columns."""
        if const_expr(self.groups > 1):
            self.store_sums(o, s, acc, m, at)
        else:
            cute.arch.sync_threads()
            for v in range_constexpr(self.vectors):
                column = at.column + v * self.span * self.step
                if column < at.columns:
                    self.store_columns(o, acc[None, v], m, at.left + column)
        if at.rank == 0 and at.thread == 0:
            o.l1[m] = self.total(s)

    @cute.jit
    def store_columns(self, o, values, m, column):
        """Add the bias to eight values of y, round and store them."""
        if o.b_down.shape[0] > 0:
            bias = load_values(o.b_down.iterator + column)
            for i in range_constexpr(4):
                values[2 * i] += low_to_float(bias[i], self.dtype)
                values[2 * i + 1] += high_to_float(bias[i], self.dtype)
        quad = cute.make_rmem_tensor((4,), Uint32)
        for i in range_constexpr(4):
            quad[i] = pack(values[2 * i], values[2 * i + 1], self.dtype)
        store_values(address(o.y, m, column), quad)

    @cute.jit
    def store_sums(self, o: Any, s: Any, acc: cute.Tensor, m: Int32, at: Any):
        """Add the groups' sums in shared memory and store y, a pair of columns per thread and time."""
        self.share_sums(s, acc, at)
        for column in cutlass.range(2 * at.thread, at.columns, 2 * THREADS, unroll=1):
            self.store_pair(o, self.add_groups(s, column), m, at.left + column)

    @cute.jit
    def share_sums(self, s: Any, acc: cute.Tensor, at: Any):
        """Write each group's sums to shared memory."""
        for v in range_constexpr(self.vectors):
            target = s.sums + (at.group * self.columns + at.column + v * self.span * self.step)
            cute.autovec_copy(acc[None, v], aligned(target, 8))
        cute.arch.sync_threads()

    def place_of(self, column: Int32) -> Int32:
        """Where the sum of a column is."""
        return column

    @cute.jit
    def add_groups(self, s: Any, column: Int32):
        """The sums of two columns over the groups, in a fixed order."""
        sums = cute.make_tensor(s.sums, cute.make_layout(self.groups * self.pitch))
        pair, place = cute.make_rmem_tensor((2,), Float32), self.place_of(column)
        for j in range_constexpr(2):
            value = Float32(0.0)
            for g in range_constexpr(self.groups):
                value += sums[g * self.pitch + place + j]
            pair[j] = value
        return pair

    @cute.jit
    def store_pair(self, o: Any, values: cute.Tensor, m: Int32, column: Int32):
        """Add the bias to two values of y, round and store them."""
        pair = cute.make_rmem_tensor((2,), self.dtype)
        for j in range_constexpr(2):
            value = values[j]
            if o.b_down.shape[0] > 0:
                value += o.b_down[column + j].to(Float32)
            pair[j] = value.to(self.dtype)
        cute.autovec_copy(pair, aligned(address(o.y, m, column), 2))

    @cute.jit
    def total(self, s: Any):
        """The sum of |h| over the warps."""
        everything = Float32(0.0)
        for w in range_constexpr(WARPS):
            everything += s.totals[w]
        return everything
