"""Rows of x or w_gate for the int8 screen of the gate: rotated, scaled and rounded with a dither; see screen.py.

Persistent; a warp has 2,048 columns of a row in registers, 64 per lane, and the warps of longer rows meet only for the
scale and the offset. Column 256 v + 8 l + i of them is in lane l from its load to its store.

    rotate    Eight levels of the transform by tensor cores, 256 columns at a time, in two products with Hadamard
              matrices of 16 x 16. The first takes 16-bit values; its result has the operands of the second in the
              right lanes. They are split into two bf16 values each. The last three levels, of v, in registers.
    reduce    the largest magnitude, of which the scale is made, and the sum of squares.
    round     a value times the levels plus the column's dither; its floor is the result. Its product with the dithers
              of the other side is the offset.

A row's vectors are loaded as soon as the row ahead has been multiplied. 16 warps share a multiprocessor: they hide each
other's waits. The dithers lie in shared memory, fp32 ones in the order in which lanes read them.

Bits of a column within 256 that are rows and columns of the two matrices, from the lowest on: 0, 3, 4, 1 and 5, 6, 7,
2. Bits 0 to 2 are i, bits 3 and 4 are l % 4, bits 5 to 7 are l / 4. A matrix is the identity in bits that are not
rotated, if K is not a multiple of 2,048.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Int16, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible, screen
from ..common import launch, operands
from ..common.copies import address, load_quad
from ..common.mma import mma_16x8x16
from ..common.philox import philox, pick
from ..common.values import high_to_float, low_to_float, pack, warp_sum
from ..specs import QuantizeGateSpec

# columns of a warp and of a lane; vectors of a lane and their values
COLUMNS, VALUES = screen.ROTATED, screen.ROTATED // 32
VECTORS, VECTOR = 8, 8
# bits of a column by bits of the rows and columns of both matrices
MATRICES = ((0, 3, 4, 1), (5, 6, 7, 2))
# of centred dithers
UNIT = 2.0 ** -(screen.FRACTION + 1)
# a sum with it that is rounded down is an integer, in the low bits
ROUNDER = 3 * 2.0**22
# Warps of a CTA for rows of all columns of the class, for shorter ones, and its CTAs on an SM, by the warps of a row.
# 16 warps of an SM have 128 registers; shorter rows need more.
WARPS = {1: (8, 6, 2), 2: (16, 12, 1), 4: (16, 12, 1), 8: (16, 8, 1)}


class Operands(NamedTuple):
    """Operands of the kernel."""

    rows: Any
    q: Any
    scale: Any
    spread: Any
    offset: Any
    grid_error: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    dithers: Any  # [k_max] by lane, see `draw_dithers`
    others: Any  # [k_max] of the other side, centred
    largest: Any  # [warps]
    squares: Any  # [warps]
    offsets: Any  # [warps]


class Signs(NamedTuple):
    """Signs of a lane's columns: the sign of column 256 v + 8 l + i is that of its i times that of its v."""

    own: Any  # [VECTOR / 2] masks of pairs
    vectors: Any  # a bit for each v, twice


class QuantizeGate:
    """For one dtype and class of K; the number of columns is that of the rows."""

    def __init__(self, spec: QuantizeGateSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.k_max = spec.k_max
        # warps of a row, and most of a CTA
        self.segments = spec.k_max // COLUMNS
        self.warps, self.partial_warps, self.ctas = WARPS[self.segments]

    @cute.jit
    def __call__(self, *arguments: Any):
        """The `Operands` up to the offset, the shifts, the grid's error, the multiprocessors and the stream."""
        *given, shift, other_shift, grid_error, multiprocessors, stream = arguments

        @cute.struct
        class Shared:
            largest: cute.struct.MemRange[Float32, self.warps]
            squares: cute.struct.MemRange[Float32, self.warps]
            offsets: cute.struct.MemRange[Float32, self.warps]
            dithers: cute.struct.Align[cute.struct.MemRange[Float32, self.k_max], 16]
            others: cute.struct.Align[cute.struct.MemRange[Int16, self.k_max], 16]

        self.shared = feasible.check_shared_memory(Shared, self.ctas)
        o, shifts = Operands(*[*given, grid_error]), (shift, other_shift)
        if o.rows.shape[0] > 0:
            # the usual sizes have constant places
            if o.rows.shape[1] == self.k_max:
                self.launch(o, shifts, True, multiprocessors, stream)
            else:
                self.launch(o, shifts, False, multiprocessors, stream)

    def launch(
        self, o: Operands, shifts: tuple[Any, ...], whole: bool, multiprocessors: Int32, stream: cuda.CUstream
    ) -> None:
        """Launch the kernel for rows of all columns of the class, or of fewer."""
        warps = self.warps if whole else self.partial_warps
        ctas = cutlass.min(cute.ceil_div(o.rows.shape[0], warps // self.segments), multiprocessors * self.ctas)
        kernel = self.kernel(o, *shifts, whole)
        launch.start(kernel, ctas, 32 * warps, stream, ctas_per_sm=self.ctas, carveout=100)

    @cute.kernel
    def kernel(self, o: Operands, shift: Int32, other_shift: Int32, whole: cutlass.Constexpr):
        """`shift`: where the dither is in a column's word, `other_shift`: that of the other side; `whole`: all columns
        of the class exist.
        """
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp, warps = cute.arch.make_warp_uniform(cute.arch.warp_idx()), self.warps if whole else self.partial_warps
        shared = SmemAllocator().allocate(self.shared)
        s = Views(
            dithers=shared.dithers.data_ptr(),
            others=shared.others.data_ptr(),
            largest=shared.largest.get_tensor(cute.make_layout(self.warps)),
            squares=shared.squares.get_tensor(cute.make_layout(self.warps)),
            offsets=shared.offsets.get_tensor(cute.make_layout(self.warps)),
        )
        # the warp's first column, and bits of the column that are rotated
        start, power = warp % self.segments * COLUMNS, self.power(o.rows.shape[1])
        bits = COLUMNS.bit_length() - 1 if const_expr(whole) else power
        self.draw_dithers(s, (shift, other_shift), thread, 32 * warps)
        signs = self.draw_signs(start, lane)
        matrices = self.draw_matrices(power, whole, lane)
        launch.wait()
        cute.arch.sync_threads()

        rows = warps // self.segments
        first, step = cute.arch.block_idx()[0] * rows, cute.arch.grid_dim()[0] * rows
        own = warp // self.segments
        pieces = cute.make_rmem_tensor((VECTOR // 2, VECTORS), Uint32)
        values, results = cute.make_rmem_tensor((VALUES,), Float32), cute.make_rmem_tensor((2, VECTORS), Uint32)
        # addresses of the lane's columns, carried: the compiler would compute them again for each vector
        column = start + lane * VECTOR
        source = address(o.rows, first + own, column).toint()
        target = address(o.q, first + own, column).toint()
        self.load(o.rows, first + own, source, column, whole, pieces)
        while first < o.rows.shape[0]:
            row = first + own
            self.multiply(matrices, signs, pieces, values)
            source += 2 * Int64(step) * o.rows.stride[0]
            self.load(o.rows, row + step, source, column, whole, pieces)
            for level in (8, 9):
                if level < bits:
                    self.butterflies(values, level - 5)
            largest, squares = self.reduce(s, *self.last_butterflies(values, bits), warp, lane)
            screened, levels = self.judge(largest, squares)
            offset = self.round(s, values, start, levels, lane, results)
            self.store(o.q, results, row, target, column, whole, screened)
            offset = self.join(s, offset, warp, lane)
            if start == 0 and lane == 0 and row < o.rows.shape[0]:
                self.store_vectors(o, row, largest, squares, offset, screened, levels)
            target += Int64(step) * o.q.stride[0]
            first += step

    @cute.jit
    def power(self, columns: Int32) -> Int32:
        """The power of two that divides the number of columns."""
        return 31 - Int32(cute.arch.clz(columns & (0 - columns)))

    @cute.jit
    def judge(self, largest: Float32, squares: Float32):
        """Whether a row is screened, and the factor of its values."""
        # no NaN among the values if the sum of squares is a number
        screened = largest >= screen.SMALLEST and largest <= screen.LARGEST and squares < Float32.inf
        return screened, Float32(screen.LEVELS) * cute.arch.rcp_approx(largest)

    @cute.jit
    def store_vectors(self, o, row, largest, squares, offset, screened, levels):
        """Store a row's scale, spread and offset."""
        wide = cute.math.sqrt(squares, fastmath=True) * levels * Float32(1 + screen.SPREAD) + o.grid_error
        outside = Float32(0.0) if largest == 0.0 and squares == 0.0 else Float32.inf
        o.scale[row] = largest * Float32(1 / screen.LEVELS) if screened else Float32(1.0)
        o.spread[row] = wide if screened else outside
        o.offset[row] = offset if screened else Float32(0.0)

    # ---- random numbers, once per CTA ----

    @cute.jit
    def draw_signs(self, start, lane: Int32) -> Signs:
        """Those of the lane's columns."""
        line = Uint32(start // COLUMNS * 32 + lane)
        word = pick(philox(line >> 2, screen.SIGNS), line)
        own = cute.make_rmem_tensor((VECTOR // 2,), Uint32)
        for i in range_constexpr(VECTOR // 2):
            own[i] = (word >> (2 * i) & 1) << 15 | (word >> (2 * i + 1) & 1) << 31
        return Signs(own, (word >> VECTOR & Uint32(0xFF)) * Uint32(0x10001))

    @cute.jit
    def draw_matrices(self, power: Int32, whole: cutlass.Constexpr, lane: Int32):
        """A lane's parts of both matrices. Of parts that it knew to be equal the compiler would make copies for each
        product: hence `power`, even if all columns exist.
        """
        one = Uint32(0x3F80)
        of_values = one if self.dtype is cutlass.BFloat16 else Uint32(0x3C00)
        first = self.draw_matrix(power, MATRICES[0], of_values, lane)
        if const_expr(whole and self.dtype is cutlass.BFloat16):
            return first, first
        return first, self.draw_matrix(power, MATRICES[1], one, lane)

    @cute.jit
    def draw_matrix(self, bits, places: cutlass.Constexpr, one: Uint32, lane: Int32) -> list[Uint32]:
        """A lane's part of the Hadamard matrix of those of the column's bits at `places` that are below `bits`."""
        rotated = Int32(0)
        for i in range_constexpr(4):
            rotated = rotated | (Int32(1 << i) if places[i] < bits else Int32(0))
        parts = []
        for i in range_constexpr(4):
            row, column = lane // 4 + i % 2 * 8, lane % 4 * 2 + i // 2 * 8
            low, high = (self.entry(row, column + j, rotated, one) for j in range(2))
            parts.append(low | high << 16)
        return parts

    @cute.jit
    def entry(self, row: Int32, column: Int32, rotated: Int32, one: Uint32) -> Uint32:
        """An entry of this matrix: 1, -1 or 0."""
        negative = Uint32(cute.arch.popc(row & column & rotated)) & Uint32(1)
        return one | negative << 15 if (row ^ column) & (15 - rotated) == 0 else Uint32(0)

    @cute.jit
    def draw_dithers(self, s, shifts, thread: Int32, threads: cutlass.Constexpr):
        """Dithers of all columns, where the lanes that round with them find four at a time; eight of the others."""
        for block in cutlass.range(thread, self.k_max // 4, threads, unroll=1):
            four = philox(Uint32(block), screen.DITHERS)
            for j in range_constexpr(4):
                column = 4 * block + j
                line, i, v = column >> 3 & 31, column & 7, column >> 8
                at = v * 256 + (i >> 2) * 128 + line * 4 + (i & 3)
                own, other = (Int32(screen.centred(four[j], Uint32(shift))) for shift in shifts)
                dither = own.to(Float32) * Float32(UNIT) + Float32(0.5)
                cute.make_tensor(s.dithers + at, cute.make_layout(1))[0] = dither
                cute.make_tensor(s.others + column, cute.make_layout(1))[0] = other.to(Int16)

    # ---- a row ----

    @cute.jit
    def load(self, rows, row, source, column, whole: cutlass.Constexpr, pieces):
        """Load a lane's vectors of a row, zeros beyond its end."""
        exist, left = row < rows.shape[0], rows.shape[1] - column
        for v in range_constexpr(VECTORS):
            ahead = v * (32 * VECTOR)
            for i in range_constexpr(VECTOR // 2):
                pieces[i, v] = Uint32(0)
            if exist and (whole or ahead < left):
                self.copy(source + 2 * ahead, VECTOR // 2, pieces[None, v], True)

    @cute.jit
    def multiply(self, matrices, signs: Signs, pieces, values):
        """The levels of the transform of the lowest eight bits of columns."""
        for v in range_constexpr(VECTORS):
            rotated = self.multiply_vector(matrices, signs, v, [pieces[i, v] for i in range(VECTOR // 2)])
            for i in range_constexpr(VECTOR):
                values[VECTOR * v + i] = rotated[i]

    @cute.jit
    def multiply_vector(self, matrices, signs: Signs, v, pieces):
        """The same of eight of a lane's columns."""
        none, values = [Float32(0.0)] * 4, [None] * VECTOR
        of_vector = signs.vectors << (15 - v) & Uint32(0x80008000)
        pairs = [pieces[i] ^ of_vector ^ signs.own[i] for i in range(VECTOR // 2)]
        first = [mma_16x8x16(none, *matrices[0], *pairs[2 * i : 2 * i + 2], self.dtype) for i in range(2)]
        for half in range_constexpr(2):
            split = [self.split(*sums[2 * half : 2 * half + 2]) for sums in first]
            sums = mma_16x8x16(none, *matrices[1], split[0][1], split[1][1], cutlass.BFloat16)
            sums = mma_16x8x16(sums, *matrices[1], split[0][0], split[1][0], cutlass.BFloat16)
            for i in range_constexpr(4):
                values[i // 2 * 4 + half * 2 + i % 2] = sums[i]
        return values

    @cute.jit
    def split(self, low: Float32, high: Float32):
        """Both values rounded to bf16, and the errors of that rounded to bf16."""
        pair = pack(low, high, cutlass.BFloat16)
        of_low, of_high = low_to_float(pair, cutlass.BFloat16), high_to_float(pair, cutlass.BFloat16)
        return pair, pack(low - of_low, high - of_high, cutlass.BFloat16)

    @cute.jit
    def butterflies(self, values, level: cutlass.Constexpr):
        """Sums and differences of the values whose indices differ in one bit."""
        for i in range_constexpr(cute.size(values)):
            if (i >> level) & 1 == 0:
                low, high = values[i], values[i + (1 << level)]
                values[i] = low + high
                values[i + (1 << level)] = low - high

    @cute.jit
    def last_butterflies(self, values, bits):
        """Those of bit 10 if it is among `bits`; returns the bits of the lane's largest magnitude, or of a NaN, and its
        sum of squares.

        |a| + |b| is the larger of |a + b| and |a - b|, after rounding, too. Magnitudes are ordered as their bits are.
        """
        half, largest, none = VALUES // 2, Int32(0), Float32(0.0)
        if 10 < bits:
            for i in range_constexpr(half):
                largest = self.larger(largest, self.add_magnitudes(values[i], values[i + half]))
            self.butterflies(values, 5)
        else:
            for i in range_constexpr(VALUES):
                largest = self.larger(largest, self.add_magnitudes(values[i], none))
        even, odd = Float32(0.0), Float32(0.0)
        for i in range_constexpr(half):
            even += values[2 * i] * values[2 * i]
            odd += values[2 * i + 1] * values[2 * i + 1]
        return largest, even + odd

    @cute.jit
    def add_magnitudes(self, a: Float32, b: Float32) -> Int32:
        """Bits of |a| + |b|."""
        return cute.arch.inline_ptx(
            "{ .reg .f32 a, b; abs.f32 a, {$r0}; abs.f32 b, {$r1}; add.rn.f32 a, a, b; mov.b32 {$w0}, a; }",
            write_only_types=[Int32],
            read_only_args=[a, b],
        )

    @cute.jit
    def larger(self, a: Int32, b: Int32) -> Int32:
        """The larger of both; two of these in a row are one instruction on Hopper."""
        return cute.arch.inline_ptx("max.s32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])

    @cute.jit
    def reduce(self, s, largest: Int32, squares, warp, lane):
        """The row's largest magnitude and its sum of squares. If a value is NaN, the sum is, too; the former may be."""
        largest = Uint32(cute.arch.warp_redux_sync(largest, "max")).bitcast(Float32)
        squares = warp_sum(squares)
        if const_expr(self.segments > 1):
            if lane == 0:
                s.largest[warp] = largest
                s.squares[warp] = squares
            self.meet(warp)
            first = warp // self.segments * self.segments
            largest, squares = Float32(0.0), Float32(0.0)
            for i in range_constexpr(self.segments):
                largest = cute.arch.fmax(largest, s.largest[first + i])
                squares += s.squares[first + i]
            self.meet(warp)
        return largest, squares

    @cute.jit
    def round(self, s, values, start, levels, lane, results):
        """Round a lane's values to bytes; returns their product with the other dithers."""
        offset = Int32(0)
        for v in range_constexpr(VECTORS):
            column = v * (32 * VECTOR)
            others = load_quad(s.others + cute.assume(start + lane * VECTOR + column, divby=VECTOR))
            for half in range_constexpr(2):
                dithers = load_quad(s.dithers + cute.assume(start + lane * 4 + (column + half * 128), divby=4))
                at = VECTOR * v + 4 * half
                results[half, v], offset = self.round_four(
                    [values[at + j] for j in range(4)],
                    levels,
                    [dithers[j].bitcast(Float32) for j in range(4)],
                    others[2 * half : 2 * half + 2],
                    offset,
                )
        return offset

    @cute.jit
    def round_four(self, values, levels, dithers, others, offset: Int32):
        """Four results in a word, and `offset` with their products with the other dithers."""
        bytes = [self.floor(values[j], levels, dithers[j]) for j in range(4)]
        low, high = (Uint32(cute.arch.prmt(bytes[j], bytes[j + 1], 0x0040)) for j in (0, 2))
        word = Uint32(cute.arch.prmt(low, high, 0x5410))
        for j in range_constexpr(2):
            offset = self.add_products(others[j], word, offset, ("lo", "hi")[j])
        return word, offset

    @cute.jit
    def store(self, q, results, row, target, column, whole: cutlass.Constexpr, screened):
        """Store the results of a lane's columns, zeros if the row is not screened."""
        exist, left = row < q.shape[0], q.shape[1] - column
        for v in range_constexpr(VECTORS):
            ahead = v * (32 * VECTOR)
            if exist and (whole or ahead < left):
                self.copy(target + ahead, 2, results[None, v], False)
        if not screened:
            results.fill(0)
            for v in range_constexpr(VECTORS):
                if exist and (whole or v * (32 * VECTOR) < left):
                    self.copy(target + v * (32 * VECTOR), 2, results[None, v], False)

    @cute.jit
    def copy(self, place: Int64, words: cutlass.Constexpr, registers, load: cutlass.Constexpr):
        """Copy words between an address in global memory and registers."""
        memory = cute.make_ptr(Uint32, place, cute.AddressSpace.gmem, assumed_align=4 * words)
        line = cute.make_tensor(memory, cute.make_layout(words))
        if const_expr(load):
            cute.autovec_copy(line, registers)
        else:
            cute.autovec_copy(registers, line)

    @cute.jit
    def add_products(self, dithers: Uint32, word: Uint32, total: Int32, half: cutlass.Constexpr) -> Int32:
        """`total` plus the products of two dithers of 16 bits and the two bytes of this half of `word`."""
        return cute.arch.inline_ptx(
            f"dp2a.{half}.s32.s32 {{$w0}}, {{$r0}}, {{$r1}}, {{$r2}};",
            write_only_types=[Int32],
            read_only_args=[dithers, word, total],
        )

    @cute.jit
    def join(self, s, offset: Int32, warp, lane) -> Float32:
        """The row's sum of its lanes' `offset`, which are in units of dithers."""
        total = warp_sum(offset.to(Float32) * Float32(UNIT))
        if const_expr(self.segments > 1):
            if lane == 0:
                s.offsets[warp] = total
            self.meet(warp)
            # the barriers of `reduce` come before the next offsets
            first = warp // self.segments * self.segments
            total = Float32(0.0)
            for i in range_constexpr(self.segments):
                total += s.offsets[first + i]
        return total

    @cute.jit
    def meet(self, warp):
        """Wait for the other warps of the row. Barrier 0 is __syncthreads."""
        cute.arch.barrier(barrier_id=1 + warp // self.segments, number_of_threads=32 * self.segments)

    @cute.jit
    def floor(self, value: Float32, levels: Float32, dither: Float32) -> Uint32:
        """The floor of value * levels + dither, in the lowest byte."""
        return cute.arch.inline_ptx(
            "{ .reg .f32 sum; fma.rn.f32 sum, {$r0}, {$r1}, {$r2}; add.rm.f32 sum, sum, {$r3}; mov.b32 {$w0}, sum; }",
            write_only_types=[Uint32],
            read_only_args=[value, levels, dither, Float32(ROUNDER)],
        )


def signature(spec: QuantizeGateSpec) -> tuple[Any, tuple[Any, ...]]:
    m, k = cute.sym_int32(), cute.sym_int32(divisibility=8)
    arguments = (
        operands.rows(operands.DTYPES[spec.dtype], m, k),
        operands.byte_rows(Int8, m, k),
        operands.dense(Float32, m),
        operands.dense(Float32, m),
        operands.dense(Float32, m),
        *(Int32(1),) * 2,
        Float32(1.0),
        Int32(1),
    )
    return QuantizeGate(spec), arguments
