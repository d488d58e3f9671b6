"""Rows of x or w_gate for the int8 screen of the gate: rotated, scaled and rounded with a dither; see screen.py.

Persistent; a CTA has one row at a time, and a thread sixteen of its values. One pass over memory: the next row is
loaded while this one is rotated.

    load      two vectors of eight values per thread: signs, squares, and the levels of the transform of bits 0 to 2 of
              the column. Then to shared memory.
    rotate    sixteen values that differ in four bits of the column, four levels, until all bits of the block are done.
              The last pass takes the block's highest four bits, some of them done before. Its results stay in
              registers.
    reduce    the largest magnitude, of which the scale is made, and the sum of squares.
    round     a value times the levels, to a multiple of 2^-15; with the column's dither added its floor is the result.
              Bytes are put in order in shared memory.

Levels go from the lowest bit to the highest, as in `reference.rotate`, so the results have the same bits. The dithers
and signs of a thread's columns are the same for all rows, and stay in registers.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int8, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from . import feasible, screen
from .common import launch, operands
from .common.copies import address, load_values
from .common.philox import philox, pick
from .common.values import high_to_float, low_to_float, warp_sum
from .specs import QuantizeGateSpec

# values of a thread, and bits of the column in which they differ in a pass
VALUES, BITS = 16, 4
# values of a vector, and their bits
VECTOR, FIRST_BITS = 8, 3
# fp32 numbers near it are 1 apart; all values times the levels are less than 2^22
ROUNDER = 3 * 2.0**22
assert screen.LEVELS * 2**screen.FRACTION + 1 < 2**22
DITHER = 2**screen.FRACTION - 1
# threads of an SM, at 64 registers
THREADS_PER_SM = 1024


class Place(NamedTuple):
    """The columns of a thread in a pass: `base` plus the numbers below 16, shifted by `start`."""

    base: Any
    start: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    row: Any  # [k_max] values, padded, see `padded`
    bytes: Any  # [k_max] results
    largest: Any  # [warps]
    squares: Any  # [warps]


def padded(column: Any) -> Any:
    """Where a column is in shared memory: eight more per 128, so that passes hit different banks."""
    return column + ((column >> 7) << 3)


class QuantizeGate:
    """For one dtype and class of K; the number of columns is that of the rows."""

    def __init__(self, spec: QuantizeGateSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.k_max = spec.k_max
        self.threads = spec.k_max // VALUES
        self.warps = self.threads // 32
        self.ctas = THREADS_PER_SM // self.threads

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        q: cute.Tensor,
        scale: cute.Tensor,
        spread: cute.Tensor,
        shift: Int32,
        root: Float32,
        grid_error: Float32,
        multiprocessors: Int32,
        stream: cuda.CUstream,
    ):
        """`shift`: where the dither is in a column's word; `root`: of the columns that are rotated together."""

        @cute.struct
        class Shared:
            largest: cute.struct.MemRange[Float32, 32]
            squares: cute.struct.MemRange[Float32, 32]
            row: cute.struct.Align[cute.struct.MemRange[Float32, padded(self.k_max)], 16]
            bytes: cute.struct.Align[cute.struct.MemRange[Uint8, self.k_max], 16]

        self.shared = feasible.check_shared_memory(Shared, self.ctas)
        ctas = cutlass.min(rows.shape[0], multiprocessors * self.ctas)
        if rows.shape[0] > 0:
            # the usual sizes have constant places
            if rows.shape[1] == self.k_max:
                self.kernel(rows, q, scale, spread, shift, root, grid_error, True).launch(
                    grid=(ctas, 1, 1),
                    block=(self.threads, 1, 1),
                    min_blocks_per_mp=self.ctas,
                    preferred_smem_carveout=100,
                    stream=stream,
                    use_pdl=launch.overlaps(),
                )
            else:
                self.kernel(rows, q, scale, spread, shift, root, grid_error, False).launch(
                    grid=(ctas, 1, 1),
                    block=(self.threads, 1, 1),
                    min_blocks_per_mp=self.ctas,
                    preferred_smem_carveout=100,
                    stream=stream,
                    use_pdl=launch.overlaps(),
                )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Tensor,
        q: cute.Tensor,
        scale: cute.Tensor,
        spread: cute.Tensor,
        shift: Int32,
        root: Float32,
        grid_error: Float32,
        whole: cutlass.Constexpr,
    ):
        """`whole`: all columns of the class exist."""
        thread = cute.arch.thread_idx()[0]
        shared = SmemAllocator().allocate(self.shared)
        s = Views(
            row=shared.row.get_tensor(cute.make_layout(padded(self.k_max))),
            bytes=shared.bytes.get_tensor(cute.make_layout(self.k_max)),
            largest=shared.largest.get_tensor(cute.make_layout(32)),
            squares=shared.squares.get_tensor(cute.make_layout(32)),
        )
        # columns, and bits of the column that are rotated
        k, bits = self.k_max, self.k_max.bit_length() - 1
        if const_expr(not whole):
            k = rows.shape[1]
            bits = 31 - Int32(cute.arch.clz(k & (0 - k)))
        last = self.place(thread, bits - BITS if const_expr(whole) else cutlass.max(bits - BITS, Int32(0)))
        signs = self.draw_signs(thread)
        dithers = self.draw_dithers(s, last, k, shift, thread)
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()

        row, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        loaded = cute.make_rmem_tensor((4, 2), Uint32)
        values = cute.make_rmem_tensor((VALUES,), Float32)
        values.fill(0.0)
        self.load(rows, row, loaded, thread)
        while row < rows.shape[0]:
            squares = self.spread_row(s, loaded, signs, k, thread)
            self.load(rows, row + step, loaded, thread)
            cute.arch.sync_threads()
            self.rotate(s, values, last, bits, k, thread)
            largest, squares = self.reduce(s, values, squares, thread)
            # no NaN among the values if the sum of squares is a number
            screened = largest >= screen.SMALLEST and largest <= screen.LARGEST and squares < Float32.inf
            levels = self.divide(Float32(screen.LEVELS * 2**screen.FRACTION), largest)
            if screened == Boolean(False):
                values.fill(0.0)
                levels = Float32(0.0)
            if thread * VALUES < k:
                self.round(s, values, dithers, levels, last)
            if thread == 0:
                own = largest * Float32(1 / screen.LEVELS)
                norm = cute.math.sqrt(squares) * root
                wide = self.divide(norm, own) * Float32(1 + screen.SPREAD) + grid_error
                outside = Float32(0.0) if largest == 0.0 and squares == 0.0 else Float32.inf
                scale[row] = own if screened else Float32(1.0)
                spread[row] = wide if screened else outside
            cute.arch.sync_threads()
            self.store(s, q, row, k, thread)
            row += step

    @cute.jit
    def place(self, thread: Int32, start: Int32) -> Place:
        low = thread & ((1 << start) - 1)
        return Place(((thread - low) << BITS) + low, start)

    @cute.jit
    def divide(self, a: Float32, b: Float32) -> Float32:
        """a / b, rounded to nearest."""
        return cute.arch.inline_ptx(
            "div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
        )

    # ---- random numbers, once per CTA ----

    @cute.jit
    def draw_signs(self, thread: Int32):
        """Masks that change the signs of a thread's two vectors of 16-bit values."""
        masks = cute.make_rmem_tensor((4, 2), Uint32)
        for half in range_constexpr(2):
            column = (thread + half * self.threads) * VECTOR
            word = pick(philox(Uint32(column >> 7), screen.SIGNS), Uint32(column >> 5))
            bits = word >> Uint32(column & 31)
            for i in range_constexpr(4):
                masks[i, half] = (bits >> (2 * i) & 1) << 15 | (bits >> (2 * i + 1) & 1) << 31
        return masks

    @cute.jit
    def draw_dithers(self, s, last, k, shift, thread: Int32):
        """Dithers of a thread's columns in the last pass, two per register."""
        words = cute.make_tensor(cute.recast_ptr(s.row.iterator, dtype=Uint32), cute.make_layout(self.k_max))
        for block in cutlass.range(thread, (k + 3) // 4, self.threads, unroll=1):
            four = philox(Uint32(block), screen.DITHERS)
            for i in range_constexpr(4):
                words[4 * block + i] = four[i]
        cute.arch.sync_threads()
        pairs = cute.make_rmem_tensor((VALUES // 2,), Uint32)
        for i in range_constexpr(VALUES // 2):
            # columns beyond the last have any bits
            low, high = (
                (Uint32(words[last.base + ((2 * i + j) << last.start)]) >> Uint32(shift)) & Uint32(DITHER)
                for j in range(2)
            )
            pairs[i] = low | high << 16
        cute.arch.sync_threads()
        return pairs

    # ---- a row ----

    @cute.jit
    def load(self, rows, row, loaded, thread):
        """Load two vectors of a row; zeros beyond its end."""
        loaded.fill(0)
        for half in range_constexpr(2):
            column = (thread + half * self.threads) * VECTOR
            if row < rows.shape[0] and column < rows.shape[1]:
                load_values(address(rows, row, column), loaded[None, half])

    @cute.jit
    def spread_row(self, s, loaded, signs, k, thread):
        """Signs and the first three levels, to shared memory; returns the thread's sum of squares."""
        squares = Float32(0.0)
        values = cute.make_rmem_tensor((VECTOR,), Float32)
        for half in range_constexpr(2):
            column = (thread + half * self.threads) * VECTOR
            for i in range_constexpr(4):
                pair = loaded[i, half] ^ signs[i, half]
                values[2 * i], values[2 * i + 1] = low_to_float(pair, self.dtype), high_to_float(pair, self.dtype)
            for i in range_constexpr(VECTOR):
                squares += values[i] * values[i]
            for level in range_constexpr(FIRST_BITS):
                self.butterflies(values, level)
            # columns up to a multiple of sixteen are zeros
            if column < k + VECTOR:
                target = cute.make_tensor((s.row.iterator + padded(column)).align(16), cute.make_layout(VECTOR))
                cute.autovec_copy(values, target)
        return squares

    @cute.jit
    def butterflies(self, values, level: cutlass.Constexpr):
        """Sums and differences of the values whose indices differ in one bit."""
        for i in range_constexpr(cute.size(values)):
            if (i >> level) & 1 == 0:
                low, high = values[i], values[i + (1 << level)]
                values[i] = low + high
                values[i + (1 << level)] = low - high

    @cute.jit
    def rotate(self, s, values, last, bits, k, thread):
        """The levels from bit 3 on; the results are those of `last`, in registers, zeros in threads without columns."""
        for start in range_constexpr(FIRST_BITS, self.k_max.bit_length() - BITS - 1, BITS):
            if start < bits - BITS:
                if thread * VALUES < k:
                    at = self.place(thread, start)
                    base = s.row.iterator + padded(at.base)
                    self.load_values(base, values, start)
                    for level in range_constexpr(BITS):
                        self.butterflies(values, level)
                    for i in range_constexpr(VALUES):
                        cute.make_tensor(base + padded(i << start), cute.make_layout(1))[0] = values[i]
                cute.arch.sync_threads()
        if thread * VALUES < k:
            self.load_values(s.row.iterator + padded(last.base), values, last.start)
            # levels below are done
            passed = bits - FIRST_BITS - 1
            done = (
                FIRST_BITS
                + (max(passed, 0) if isinstance(passed, int) else cutlass.max(passed, Int32(0))) // BITS * BITS
            )
            for level in range_constexpr(BITS):
                if last.start + level >= done and last.start + level < bits:
                    self.butterflies(values, level)

    @cute.jit
    def load_values(self, base, values, start):
        """Load the values of a place from shared memory: bits of the base and of the offsets do not overlap."""
        for i in range_constexpr(VALUES):
            values[i] = cute.make_tensor(base + padded(i << start), cute.make_layout(1))[0]

    @cute.jit
    def reduce(self, s, values, squares, thread):
        """The row's largest magnitude, without NaN, and its sum of squares."""
        largest = Float32(0.0)
        for i in range_constexpr(VALUES):
            largest = cute.arch.inline_ptx(
                "{ .reg .f32 magnitude; abs.f32 magnitude, {$r0}; max.f32 {$w0}, magnitude, {$r1}; }",
                write_only_types=[Float32],
                read_only_args=[values[i], largest],
            )
        largest = Uint32(cute.arch.warp_redux_sync(largest.bitcast(Int32), "max")).bitcast(Float32)
        squares = warp_sum(squares)
        if thread & 31 == 0:
            s.largest[thread >> 5] = largest
            s.squares[thread >> 5] = squares
        cute.arch.sync_threads()
        largest, squares = Float32(0.0), Float32(0.0)
        for i in range_constexpr(self.warps):
            largest = cute.arch.fmax(largest, s.largest[i])
            squares += s.squares[i]
        return largest, squares

    @cute.jit
    def round(self, s, values, dithers, levels, last):
        """Put the results of a thread's columns into shared memory.

        The sum with `ROUNDER` is rounded to an integer, in the low bits of the result. The dither makes a byte of it.
        """
        base = s.bytes.iterator + last.base
        for i in range_constexpr(VALUES):
            fixed = cute.arch.inline_ptx(
                "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
                write_only_types=[Float32],
                read_only_args=[values[i], levels, Float32(ROUNDER)],
            )
            dither = (dithers[i // 2] >> 16) if i % 2 else (dithers[i // 2] & Uint32(DITHER))
            # the highest bit of the rounder's fraction is carried out of the byte
            sum = fixed.bitcast(Uint32) + dither + Uint32(1 << 22)
            byte = cute.make_tensor(base + (i << last.start), cute.make_layout(1))
            byte[0] = Uint8((sum >> screen.FRACTION) & Uint32(0xFF))

    @cute.jit
    def store(self, s, q, row, k, thread):
        """Copy the bytes of a row to memory, eight at a time."""
        for half in range_constexpr(2):
            column = (thread + half * self.threads) * VECTOR
            if column < k:
                source = cute.make_tensor(
                    cute.recast_ptr((s.bytes.iterator + column).align(8), dtype=Int64), cute.make_layout(1)
                )
                target = (q.iterator + (Int64(row) * q.stride[0] + column)).align(8)
                cute.make_tensor(cute.recast_ptr(target, dtype=Int64), cute.make_layout(1))[0] = source[0]


def signature(spec: QuantizeGateSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    m, k = cute.sym_int32(), cute.sym_int32(divisibility=8)
    arguments = (
        operands.rows(operands.DTYPES[spec.dtype], m, k),
        operands.bytes_by_rows(Int8, m, k),
        operands.vector(Float32, m),
        operands.vector(Float32, m),
        Int32(1),
        Float32(1.0),
        Float32(1.0),
        Int32(1),
    )
    return QuantizeGate(spec), arguments
