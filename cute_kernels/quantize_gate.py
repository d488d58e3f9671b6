"""Rows of x or w_gate for the int8 screen of the gate: rotated, scaled and rounded with a dither; see screen.py.

Persistent; a warp has 2,048 columns of a row in registers, 64 per lane, and the warps of longer rows meet only for the
scale and the offset. Column 256 v + 8 l + i of them is in lane l first, then in lane 4 v + i / 2:

    copy      cp.async, a vector of eight values per v, a row ahead, to where the same lane reads it.
    unpack    signs, squares, and the levels of the transform of i and v. A column's sign is that of its i times that of
              its v. Where all columns exist, neither takes an instruction: those of i change as bf16 becomes fp32, and
              those of v are factors, 1 or -1, of fused multiplications and additions in the levels of v.
    exchange  through the warp's own shared memory.
    rotate    the levels of l.
    reduce    the largest magnitude, of which the scale is made, and the sum of squares.
    round     a value times the levels plus the column's dither; its floor is the result. Bytes are put in order in
              shared memory. Their product with the dithers of the other side is the offset.

16 warps share a multiprocessor where rows have up to 4,096 columns: they hide each other's waits.

Levels are in the order of `screen.levels`, so `q` and `scale` have the same bits as on a CPU; sums of squares and of
the offset are in another order. The dithers lie in shared memory in the order in which lanes read them.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Int16, Int32, Int64, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from . import feasible, screen
from .common import launch, operands
from .common.copies import copy_async, load_quad
from .common.philox import philox, pick
from .common.values import high_to_float, low_to_float, warp_sum
from .specs import QuantizeGateSpec

# columns of a warp and of a lane; vectors of a lane and their values
COLUMNS, VALUES = screen.ROTATED, screen.ROTATED // 32
VECTORS, VECTOR = 8, 8
# floats, and then bytes, from one v to the next in shared memory: padding lets lanes of all v hit different banks
PITCH, BYTE_PITCH = 32 * VECTOR + 8, 32 * VECTOR + 16
# a sum with it that is rounded down is an integer, in the low bits
ROUNDER = 3 * 2.0**22
# warps of a CTA and its CTAs on an SM, by the warps of a row: as many as have room beside the dithers of both sides,
# which a CTA has once. 16 warps have 128 registers.
WARPS = {1: (8, 2), 2: (16, 1), 4: (12, 1), 8: (8, 1)}


class Operands(NamedTuple):
    """Operands of the kernel."""

    rows: Any
    q: Any
    scale: Any
    spread: Any
    offset: Any
    root: Any  # of the columns that are rotated together
    grid_error: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    dithers: Any  # [k_max] by lane, see `draw_dithers`
    others: Any  # [k_max] of the other side, centred, in the same order
    row: Any  # [COLUMNS / 2] pairs of this warp's next row
    line: Any  # [VECTORS * PITCH] of this warp
    bytes: Any  # [VECTORS * BYTE_PITCH] in the same place
    largest: Any  # [warps]
    squares: Any  # [warps]
    offsets: Any  # [warps]


class Signs(NamedTuple):
    """Signs of a lane's columns: those of i, which include that of the first v, and those of v relative to it."""

    own: Any  # [VECTOR / 2] masks of pairs
    low: Any  # [VECTOR / 2] masks of the first of them, as fp32
    vectors: Any  # a bit for each v, twice
    factors: Any  # [VECTORS] 1 or -1: of v and of v without its lowest bit


class QuantizeGate:
    """For one dtype and class of K; the number of columns is that of the rows."""

    def __init__(self, spec: QuantizeGateSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.k_max = spec.k_max
        # warps of a row, of a CTA, and its rows
        self.segments = spec.k_max // COLUMNS
        self.warps, self.ctas = WARPS[self.segments]
        self.rows = self.warps // self.segments

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        q: cute.Tensor,
        scale: cute.Tensor,
        spread: cute.Tensor,
        offset: cute.Tensor,
        shift: Int32,
        other_shift: Int32,
        unit: Float32,
        root: Float32,
        grid_error: Float32,
        multiprocessors: Int32,
        stream: cuda.CUstream,
    ):
        @cute.struct
        class Shared:
            largest: cute.struct.MemRange[Float32, self.warps]
            squares: cute.struct.MemRange[Float32, self.warps]
            offsets: cute.struct.MemRange[Float32, self.warps]
            dithers: cute.struct.Align[cute.struct.MemRange[Float32, self.k_max], 16]
            others: cute.struct.Align[cute.struct.MemRange[Int16, self.k_max], 16]
            rows: cute.struct.Align[cute.struct.MemRange[Uint32, self.warps * COLUMNS // 2], 16]
            lines: cute.struct.Align[cute.struct.MemRange[Float32, self.warps * VECTORS * PITCH], 16]

        self.shared = feasible.check_shared_memory(Shared, self.ctas)
        ctas = cutlass.min(cute.ceil_div(rows.shape[0], self.rows), multiprocessors * self.ctas)
        o = Operands(rows, q, scale, spread, offset, root, grid_error)
        of_dithers = (shift, other_shift, unit)
        if rows.shape[0] > 0:
            # the usual sizes have constant places
            if rows.shape[1] == self.k_max:
                self.launch(o, of_dithers, True, ctas, stream)
            else:
                self.launch(o, of_dithers, False, ctas, stream)

    def launch(self, o: Operands, of_dithers: tuple[Any, ...], whole: bool, ctas: Int32, stream: cuda.CUstream) -> None:
        """Launch the kernel for rows of all columns of the class, or of fewer."""
        self.kernel(o, *of_dithers, whole).launch(
            grid=(ctas, 1, 1),
            block=(32 * self.warps, 1, 1),
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=launch.overlaps(),
        )

    @cute.kernel
    def kernel(self, o: Operands, shift: Int32, other_shift: Int32, unit: Float32, whole: cutlass.Constexpr):
        """`shift`: where the dither is in a column's word, `other_shift`: that of the other side; `unit`: of centred
        dithers, 0 for none, so that values are rounded to nearest; `whole`: all columns of the class exist.
        """
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator().allocate(self.shared)
        line = shared.lines.data_ptr() + cute.assume(warp * (VECTORS * PITCH), divby=4)
        s = Views(
            dithers=shared.dithers.data_ptr(),
            others=shared.others.data_ptr(),
            row=shared.rows.data_ptr() + cute.assume(warp * (COLUMNS // 2) + lane * (VECTOR // 2), divby=4),
            line=line,
            bytes=cute.recast_ptr(line, dtype=Uint8),
            largest=shared.largest.get_tensor(cute.make_layout(self.warps)),
            squares=shared.squares.get_tensor(cute.make_layout(self.warps)),
            offsets=shared.offsets.get_tensor(cute.make_layout(self.warps)),
        )
        # bits of the column that are rotated, and the warp's first column
        bits, start = COLUMNS.bit_length() - 1, warp % self.segments * COLUMNS
        if const_expr(not whole):
            bits = 31 - Int32(cute.arch.clz(o.rows.shape[1] & (0 - o.rows.shape[1])))
        self.draw_dithers(s, (shift, other_shift), unit, thread)
        signs = self.draw_signs(start, lane)
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()

        first, step = cute.arch.block_idx()[0] * self.rows, cute.arch.grid_dim()[0] * self.rows
        own = warp // self.segments
        values = cute.make_rmem_tensor((VALUES,), Float32)
        self.copy(s, o.rows, first + own, start, whole, lane)
        while first < o.rows.shape[0]:
            row = first + own
            cute.arch.cp_async_wait_group(0)
            squares = self.unpack(s, signs, whole, values)
            self.copy(s, o.rows, row + step, start, whole, lane)
            for level in (0, 1, 2, 8, 9, 10):
                if level < bits:
                    self.butterflies(values, level if level < 3 else level - 5, signs, whole)
            self.exchange(s, values, lane)
            for level in range_constexpr(3, 7):
                if level < bits:
                    self.butterflies(values, level - 2, signs, False)
            largest = self.last_butterflies(values, bits)
            largest, squares = self.reduce(s, largest, squares, warp, lane)
            # no NaN among the values if the sum of squares is a number
            screened = largest >= screen.SMALLEST and largest <= screen.LARGEST and squares < Float32.inf
            levels = self.divide(Float32(screen.LEVELS), largest)
            offset = self.join(s, self.round(s, values, start, levels, lane), unit, warp, lane)
            if start == 0 and lane == 0 and row < o.rows.shape[0]:
                # `unit` would be the next row's, too: names that a loop assigns are carried through it
                own_scale = largest * Float32(1 / screen.LEVELS)
                wide = (
                    self.divide(cute.math.sqrt(squares) * o.root, own_scale) * Float32(1 + screen.SPREAD) + o.grid_error
                )
                outside = Float32(0.0) if largest == 0.0 and squares == 0.0 else Float32.inf
                o.scale[row] = own_scale if screened else Float32(1.0)
                o.spread[row] = wide if screened else outside
                o.offset[row] = offset if screened else Float32(0.0)
            self.store(s, o.q, row, start, whole, screened, lane)
            first += step

    @cute.jit
    def divide(self, a: Float32, b: Float32) -> Float32:
        """a / b, rounded to nearest."""
        return cute.arch.inline_ptx(
            "div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
        )

    # ---- random numbers, once per CTA ----

    @cute.jit
    def draw_signs(self, start, lane: Int32) -> Signs:
        """Those of the lane's columns."""
        line = Uint32(start // COLUMNS * 32 + lane)
        word = pick(philox(line >> 2, screen.SIGNS), line)
        vectors = word >> VECTOR & Uint32(0xFF)
        # of the first vector, and where two vectors differ
        first = (vectors & 1) * Uint32(0xFF)
        own, low = cute.make_rmem_tensor((VECTOR // 2,), Uint32), cute.make_rmem_tensor((VECTOR // 2,), Uint32)
        both = word ^ first
        factors = cute.make_rmem_tensor((VECTORS,), Float32)
        for i in range_constexpr(VECTOR // 2):
            own[i] = (both >> (2 * i) & 1) << 15 | (both >> (2 * i + 1) & 1) << 31
            low[i] = both >> (2 * i) << 31
        for v in range_constexpr(1, VECTORS):
            # the lowest bit of v cleared: with this one it is added
            differ = (vectors >> v ^ vectors >> (v & (v - 1))) & 1
            factors[v] = (Uint32(0x3F800000) | differ << 31).bitcast(Float32)
        return Signs(own, low, (vectors ^ first) * Uint32(0x10001), factors)

    @cute.jit
    def draw_dithers(self, s, shifts, unit: Float32, thread: Int32):
        """Dithers of all columns, where the lanes that round them find theirs, four at a time; eight of the others."""
        for block in cutlass.range(thread, self.k_max // 4, 32 * self.warps, unroll=1):
            four = philox(Uint32(block), screen.DITHERS)
            for j in range_constexpr(4):
                column = 4 * block + j
                line, i, v = column >> 3 & 31, column & 7, column >> 8 & 7
                # the lane that rounds it, and which of its values it is
                reader, value, segment = 4 * v + (i >> 1), 2 * line + (i & 1), column & ~(COLUMNS - 1)
                at = segment + (value >> 2) * 128 + reader * 4 + (value & 3)
                other_at = segment + (value >> 3) * 256 + reader * 8 + (value & 7)
                own, other = (Int32(screen.centred(four[j], Uint32(shift))) for shift in shifts)
                dither = own.to(Float32) * unit + Float32(0.5)
                cute.make_tensor(s.dithers + at, cute.make_layout(1))[0] = dither
                cute.make_tensor(s.others + other_at, cute.make_layout(1))[0] = other.to(Int16)

    # ---- a row ----

    @cute.jit
    def copy(self, s, rows, row, start, whole: cutlass.Constexpr, lane):
        """Start to copy a lane's vectors of a row, zeros beyond its end, to where `unpack` has read the last ones."""
        source = rows.iterator + cute.assume(Int64(row) * rows.stride[0] + (start + lane * VECTOR), divby=VECTOR)
        if row < rows.shape[0]:
            left = rows.shape[1] - start - lane * VECTOR
            for v in range_constexpr(VECTORS):
                column = v * (32 * VECTOR)
                exists = whole or column < left
                copy_async(s.row + column // 2, source + column, Int32(16) if exists else Int32(0))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def unpack(self, s, signs: Signs, whole: cutlass.Constexpr, values):
        """Values with signs, if `whole` without those of v; returns the lane's sum of squares."""
        even, odd = Float32(0.0), Float32(0.0)
        for v in range_constexpr(VECTORS):
            quad = load_quad(s.row + v * (16 * VECTOR))
            of_vector = Uint32(0) if const_expr(whole) else signs.vectors << (15 - v) & Uint32(0x80008000)
            for i in range_constexpr(VECTOR // 2):
                pair = quad[i] ^ of_vector ^ signs.own[i]
                low, high = low_to_float(pair, self.dtype), high_to_float(pair, self.dtype)
                if const_expr(whole and self.dtype is cutlass.BFloat16):
                    # one instruction: the sum changes the highest bit alone
                    low = ((quad[i] << 16) + signs.low[i]).bitcast(Float32)
                even += low * low
                odd += high * high
                values[VECTOR * v + 2 * i], values[VECTOR * v + 2 * i + 1] = low, high
        return even + odd

    @cute.jit
    def butterflies(self, values, level: cutlass.Constexpr, signs: Signs, signed: cutlass.Constexpr):
        """Sums and differences of the values whose indices differ in one bit, if `signed` times the signs of v.

        A sum then lacks the sign of the first v that is in it, and in the end that of the first v of all.
        """
        for i in range_constexpr(VALUES):
            if (i >> level) & 1 == 0:
                low, high = values[i], values[i + (1 << level)]
                if const_expr(signed and level >= 3):
                    # the lowest bit of this v is the level's, if the sign of a sum is that of its first v
                    factor = signs.factors[(i + (1 << level)) // VECTOR >> (level - 3) << (level - 3)]
                    values[i] = self.multiply_add(high, factor, low)
                    values[i + (1 << level)] = self.multiply_add(high, -factor, low)
                else:
                    values[i] = low + high
                    values[i + (1 << level)] = low - high

    @cute.jit
    def multiply_add(self, a: Float32, b: Float32, c: Float32) -> Float32:
        """a * b + c, rounded once."""
        return cute.arch.inline_ptx(
            "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
        )

    @cute.jit
    def exchange(self, s, values, lane):
        """Lane l has values 8 v + i; lane 4 v + i / 2 gets them as values 2 l + i % 2.

        Halves of a vector change places in every other four lanes, so that eight lanes hit different banks.
        """
        cute.arch.sync_warp()
        quad, pair = cute.make_rmem_tensor((4,), Float32), cute.make_rmem_tensor((2,), Float32)
        # what is assumed of offsets lets the compiler add constants to one address
        for half in range_constexpr(2):
            base = s.line + cute.assume(lane * VECTOR + ((lane & 4) ^ (4 * half)), divby=4)
            for v in range_constexpr(VECTORS):
                for i in range_constexpr(4):
                    quad[i] = values[VECTOR * v + 4 * half + i]
                cute.autovec_copy(quad, cute.make_tensor(base + v * PITCH, cute.make_layout(4)))
        cute.arch.sync_warp()
        place = (lane >> 2) * PITCH + (lane & 1) * 2
        for half in range_constexpr(2):
            base = s.line + cute.assume(place + (((lane & 2) * 2) ^ (4 * half)), divby=2)
            for i in range_constexpr(32):
                if const_expr(i & 4 == 4 * half):
                    cute.autovec_copy(cute.make_tensor(base + i * VECTOR, cute.make_layout(2)), pair)
                    values[2 * i], values[2 * i + 1] = pair[0], pair[1]

    @cute.jit
    def last_butterflies(self, values, bits) -> Int32:
        """Those of level 7 if it is among `bits`; returns the bits of the lane's largest magnitude, or of a NaN.

        |a| + |b| is the larger of |a + b| and |a - b|, after rounding, too. Magnitudes are ordered as their bits are.
        """
        half, largest, none = VALUES // 2, Int32(0), Float32(0.0)
        if 7 < bits:
            for i in range_constexpr(half):
                largest = self.larger(largest, self.add_magnitudes(values[i], values[i + half]))
            self.butterflies(values, 5, None, False)
        else:
            for i in range_constexpr(VALUES):
                largest = self.larger(largest, self.add_magnitudes(values[i], none))
        return largest

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
    def round(self, s, values, start, levels, lane):
        """Put the results of a lane's columns into shared memory; returns their product with the other dithers."""
        cute.arch.sync_warp()
        dithers, others = cute.make_rmem_tensor((8,), Float32), cute.make_rmem_tensor((4,), Uint32)
        source = s.dithers + cute.assume(start + lane * 4, divby=4)
        other_source = cute.recast_ptr(s.others + cute.assume(start + lane * 8, divby=8), dtype=Uint32)
        offset = Int32(0)
        target = s.bytes + cute.assume((lane >> 2) * BYTE_PITCH + (lane & 3) * 2, divby=2)
        for i in range_constexpr(0, VALUES, 8):
            eight = cute.make_tensor(source + i * 32, cute.make_layout((4, 2), stride=(1, 128)))
            for half in range_constexpr(2):
                cute.autovec_copy(eight[None, half], cute.make_tensor(dithers.iterator + 4 * half, cute.make_layout(4)))
            cute.autovec_copy(cute.make_tensor(other_source + i * 16, cute.make_layout(4)), others)
            bytes = [self.floor(values[i + j], levels, dithers[j]) for j in range(8)]
            for j in range_constexpr(4):
                pair = Uint32(cute.arch.prmt(bytes[2 * j], bytes[2 * j + 1], 0x0040))
                place = cute.recast_ptr(target + (i // 2 + j) * VECTOR, dtype=Uint16)
                cute.make_tensor(place, cute.make_layout(1))[0] = Uint16(pair)
                offset = self.add_products(others[j], pair, offset)
        cute.arch.sync_warp()
        return offset

    @cute.jit
    def add_products(self, dithers: Uint32, pair: Uint32, total: Int32) -> Int32:
        """`total` plus the products of two dithers of 16 bits and the two lowest bytes of `pair`."""
        return cute.arch.inline_ptx(
            "dp2a.lo.s32.s32 {$w0}, {$r0}, {$r1}, {$r2};",
            write_only_types=[Int32],
            read_only_args=[dithers, pair, total],
        )

    @cute.jit
    def join(self, s, offset: Int32, unit: Float32, warp, lane) -> Float32:
        """The row's sum of its lanes' `offset`, which are in units of dithers."""
        total = warp_sum(offset.to(Float32) * unit)
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

    @cute.jit
    def store(self, s, q, row, start, whole: cutlass.Constexpr, screened, lane):
        """Copy the results to memory, 16 or eight bytes per lane at a time; zeros if the row is not screened."""
        size = 16 if const_expr(whole) else VECTOR
        chunks = COLUMNS // (32 * size)
        line = cute.assume(lane * size // 256 * BYTE_PITCH + lane * size % 256, divby=size)
        target = q.iterator + cute.assume(Int64(row) * q.stride[0] + (start + lane * size), divby=size)
        words = cute.make_rmem_tensor((size // 4, chunks), Uint32)
        words.fill(0)
        if screened:
            for chunk in range_constexpr(chunks):
                source = cute.recast_ptr(s.bytes + line + chunk * (32 * size) // 256 * BYTE_PITCH, dtype=Uint32)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(size // 4)), words[None, chunk])
        if row < q.shape[0]:
            left = q.shape[1] - start - lane * size
            for chunk in range_constexpr(chunks):
                column = chunk * (32 * size)
                if whole or column < left:
                    place = cute.recast_ptr(target + column, dtype=Uint32)
                    cute.autovec_copy(words[None, chunk], cute.make_tensor(place, cute.make_layout(size // 4)))


def signature(spec: QuantizeGateSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    m, k = cute.sym_int32(), cute.sym_int32(divisibility=8)
    arguments = (
        operands.rows(operands.DTYPES[spec.dtype], m, k),
        operands.bytes_by_rows(Int8, m, k),
        operands.vector(Float32, m),
        operands.vector(Float32, m),
        operands.vector(Float32, m),
        Int32(1),
        Int32(1),
        Float32(1.0),
        Float32(1.0),
        Float32(1.0),
        Int32(1),
    )
    return QuantizeGate(spec), arguments
