"""Main loop of a dense product by mma.sync: a tile of `rows` rows of A times 256 rows of B. Both are K-major, unless
the kernel says that one is stored as lines of the sum's index: A M-major, B N-major.

Eight warps do everything, two by four on the tile, 64 x 64 sums each with 128 rows; a step is 32 columns.

    load    cp.async, 16 bytes per thread, into a ring of stages, STAGES steps ahead.
    mma     ldmatrix and mma.sync m16n8k16. Fragments of the next 16 columns are loaded before the products of these.
            One barrier per step: the next stage is complete, this one has been read and is filled again.

Of 99 KB of shared memory the ring takes 96. A warp reads 4 KB of it for 65,536 products: 64 x 64 sums is the least that
keeps the reads behind the products.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from ..common.copies import address, copy_async
from ..common.mma import load_matrices, load_matrices_transposed, mma_16x8x16
from ..common.swizzle import swizzle_piece

TILE_N, TILE_K = 256, 32
# blocks of 16 columns of a step; 16-byte pieces of a row of a stage, and their values
BLOCKS, PIECES, PIECE = TILE_K // 16, TILE_K // 8, 8
STAGES = 4
WARPS_M, WARPS_N = 2, 4
THREADS = 32 * WARPS_M * WARPS_N
# rows that all threads together copy at a time
PASS = THREADS // PIECES


class Thread(NamedTuple):
    """Indices of a thread, and of its warp on the tile."""

    thread: Any
    lane: Any
    warp_m: Any
    warp_n: Any


class Fragments(NamedTuple):
    """A thread's fragments, two sets, and sums; where it loads them from, by blocks of 16 columns of the sum's index.

    Of an operand that is not K-major by its fragments.
    """

    rA: Any
    rB: Any
    acc: Any
    a_source: Any
    b_source: Any


def thread_index(again: bool = False) -> Thread:
    """The indices of this thread; `again`: of which the compiler does not know that it has them already."""
    thread = cute.arch.thread_idx()[0]
    if again:
        thread = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[thread])
    warp = cute.arch.make_warp_uniform(thread // 32)
    return Thread(thread, thread & 31, warp // WARPS_N, warp % WARPS_N)


def swizzle(row: Any, piece: Any) -> Any:
    """Offset, in values, of a piece in its row of 64 bytes: eight rows of one column hit different banks."""
    return (piece ^ ((row >> 1) & (PIECES - 1))) * PIECE


def lines_at_a_time(width: int) -> int:
    """Lines of so many values that all threads together copy at a time."""
    return THREADS * PIECE // width


class Product:
    """The main loop, for a kernel that sets `dtype` and, by `set_rows`, the tile."""

    dtype: Any
    rows: int
    # of a kernel, (o, ring, place, step, stage, index, thread): start copy `index` of a thread's copies for a step, by
    # `copy_piece`; zeros outside the matrix
    load_piece: Any
    a_k_major = b_k_major = True

    def set_rows(self, rows: int) -> None:
        """Set the rows of A in a tile."""
        self.rows = rows
        # fragments of 16 rows of A and of 8 rows of B per warp
        self.m_frags, self.n_frags = rows // WARPS_M // 16, TILE_N // WARPS_N // 8
        self.stage_values = (rows + TILE_N) * TILE_K
        # 16-byte copies of a thread per step, those of A first
        self.copies = self.stage_values // PIECE // THREADS

    @cute.jit
    def copy_piece(self, ring, source, stage: Int32, index: cutlass.Constexpr, exists: Boolean, thread: Int32):
        """Copy piece t % PIECES of row t / PIECES + PASS * `index`; zeros and no read unless it `exists`."""
        own, piece = thread // PIECES, thread % PIECES
        target = ring + (stage * self.stage_values + own * TILE_K + swizzle(own, piece) + index * PASS * TILE_K)
        copy_async(target, source, Int32(16) if exists else Int32(0))

    @cute.jit
    def copy_line_piece(
        self, ring, source, stage, from_a: cutlass.Constexpr, index: cutlass.Constexpr, exists: Boolean, thread: Int32
    ):
        """The same of a part of the stage that is not K-major: piece of a line, `index` of the part's copies."""
        width, before = (self.rows, 0) if const_expr(from_a) else (TILE_N, self.rows * TILE_K)
        line, piece = thread // (width // PIECE), thread % (width // PIECE)
        line = line + index * lines_at_a_time(width)
        target = ring + (stage * self.stage_values + before + line * width + swizzle_piece(line, piece))
        copy_async(target, source, Int32(16) if exists else Int32(0))

    @cute.jit
    def begin(self, o, ring, f: Fragments, place, stage: Int32, at: Thread):
        """Start the copies of a tile's first steps, wait for the first of them and load fragments of it.

        All threads must have read what the ring held before.
        """
        free = stage
        for step in range_constexpr(STAGES):
            for index in range_constexpr(self.copies):
                self.load_piece(o, ring, place, Int32(step), free, index, at.thread)
            cute.arch.cp_async_commit_group()
            free = free + 1 if free + 1 < STAGES else 0
        cute.arch.cp_async_wait_group(STAGES - 1)
        cute.arch.sync_threads()
        self.load_fragments(f, stage, 0)

    @cute.jit
    def multiply_steps(self, o, ring, f: Fragments, place, steps, stage, at):
        """Add the products of all steps of a tile; return the stage after them. Zeros are loaded past the last one."""
        for k in cutlass.range(steps, unroll=1):
            step, free = k + STAGES, stage
            for block in range_constexpr(BLOCKS):
                if const_expr(block == BLOCKS - 1):
                    # the next step has arrived; all warps have read this step's stage
                    cute.arch.cp_async_wait_group(STAGES - 2)
                    cute.arch.sync_threads()
                    stage = stage + 1 if stage + 1 < STAGES else 0
                self.load_fragments(f, stage, (block + 1) % BLOCKS)
                for i in range_constexpr(self.m_frags):
                    multiply(f, block % 2, i, self.dtype)
                    # copies between products, which hide their instructions
                    if const_expr(block == BLOCKS - 1):
                        for index in range_constexpr(i, self.copies, self.m_frags):
                            self.load_piece(o, ring, place, step, free, index, at.thread)
            cute.arch.cp_async_commit_group()
        return stage

    @cute.jit
    def fragments(self, ring, at: Thread):
        """The fragments of a thread. The sources are addresses in stage 0 that this lane passes to ldmatrix.

        Matrices of A: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15. Of B: columns 0-7 and 8-15 of rows
        0-7, then of rows 8-15. The same of lines, with columns and rows exchanged, and transposed as they are loaded.
        """
        a_row = at.warp_m * (16 * self.m_frags) + (at.lane & 15)
        b_row = at.warp_n * (8 * self.n_frags) + (at.lane & 7) + (at.lane >> 4) * 8
        a, b = [], []
        for block in range_constexpr(BLOCKS):
            if const_expr(self.a_k_major):
                a.append(ring + (a_row * TILE_K + swizzle(a_row, 2 * block + (at.lane >> 4))))
            if const_expr(self.b_k_major):
                b_at = b_row * TILE_K + swizzle(b_row, 2 * block + ((at.lane >> 3) & 1))
                b.append(ring + (self.rows * TILE_K + b_at))
        if const_expr(not self.a_k_major):
            line = (at.lane & 7) + (at.lane >> 4) * 8
            for i in range_constexpr(self.m_frags):
                piece = at.warp_m * (2 * self.m_frags) + 2 * i + ((at.lane >> 3) & 1)
                a.append(ring + (line * self.rows + swizzle_piece(line, piece)))
        if const_expr(not self.b_k_major):
            line = at.lane & 15
            for i in range_constexpr(self.n_frags // 2):
                piece = at.warp_n * self.n_frags + 2 * i + (at.lane >> 4)
                b.append(ring + (self.rows * TILE_K + line * TILE_N + swizzle_piece(line, piece)))
        return Fragments(
            cute.make_rmem_tensor((4, self.m_frags, 2), Uint32),
            cute.make_rmem_tensor((2, self.n_frags, 2), Uint32),
            cute.make_rmem_tensor((4, self.n_frags, self.m_frags), Float32),
            a,
            b,
        )

    @cute.jit
    def load_fragments(self, f: Fragments, stage: Int32, block: cutlass.Constexpr):
        """Load the fragments of 16 columns of a stage."""
        before = stage * self.stage_values
        for i in range_constexpr(self.m_frags):
            if const_expr(self.a_k_major):
                four = load_matrices(f.a_source[block] + before + i * 16 * TILE_K)
            else:
                four = load_matrices_transposed(f.a_source[i] + before + block * 16 * self.rows)
            for j in range_constexpr(4):
                f.rA[j, i, block % 2] = four[j]
        for i in range_constexpr(self.n_frags // 2):
            if const_expr(self.b_k_major):
                four = load_matrices(f.b_source[block] + before + i * 16 * TILE_K)
            else:
                four = load_matrices_transposed(f.b_source[i] + before + block * 16 * TILE_N)
            for j in range_constexpr(4):
                f.rB[j % 2, 2 * i + j // 2, block % 2] = four[j]


class Source(NamedTuple):
    """What a thread copies of an operand: address and pitch in bytes, and what there is from its first piece on."""

    first: Any
    pitch: Any
    rows: Any
    columns: Any


class Dense(Product):
    """Products of one dtype. An operand is K-major, or stored as lines of the sum's index."""

    def __init__(self, dtype: Any, rows: int, a_k_major: bool, b_k_major: bool):
        self.dtype, self.a_k_major, self.b_k_major = dtype, a_k_major, b_k_major
        self.set_rows(rows)

    @cute.jit
    def add(self, ring, acc, a: cute.Tensor, b: cute.Tensor, row: Int32, column: Int32, start: Int32, steps: Int32):
        """Add the products of so many `steps`, from term `start` on, to the sums of the tile at `row` and `column`."""
        at = thread_index()
        f = self.fragments(ring, at)._replace(acc=acc)
        place = (
            self.source(a, row, start, self.rows, self.a_k_major, at.thread),
            self.source(b, column, start, TILE_N, self.b_k_major, at.thread),
        )
        self.begin(None, ring, f, place, Int32(0), at)
        self.multiply_steps(None, ring, f, place, steps, Int32(0), at)
        # before anything else is copied to the ring
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def source(
        self, matrix, first: Int32, start: Int32, width: cutlass.Constexpr, k_major: cutlass.Constexpr, thread: Int32
    ) -> Any:
        """The source of an operand whose rows, or columns of lines, are `width` from `first` on in the tile."""
        pieces = PIECES if const_expr(k_major) else width // PIECE
        own, piece = thread // pieces, thread % pieces * PIECE
        row, column = (first + own, start + piece) if const_expr(k_major) else (start + own, first + piece)
        pitch = 2 * Int64(matrix.stride[0])
        return Source(address(matrix, row, column).toint(), pitch, matrix.shape[0] - row, matrix.shape[1] - column)

    @cute.jit
    def load_piece(self, o, ring, place, step: Int32, stage: Int32, index: cutlass.Constexpr, thread: Int32):
        from_a = index < self.rows // PASS
        source = place[0] if const_expr(from_a) else place[1]
        own = index if const_expr(from_a) else index - self.rows // PASS
        if const_expr(self.a_k_major if from_a else self.b_k_major):
            where = source.first + Int64(step) * (2 * TILE_K) + source.pitch * Int64(own * PASS)
            exists = (step * TILE_K < source.columns) & (own * PASS < source.rows)
            self.copy_piece(ring, where, stage, index, exists, thread)
        else:
            line = step * TILE_K + own * lines_at_a_time(self.rows if const_expr(from_a) else TILE_N)
            exists = (line < source.rows) & (source.columns > 0)
            self.copy_line_piece(ring, source.first + source.pitch * Int64(line), stage, from_a, own, exists, thread)


@cute.jit
def multiply(f: Any, buffer: cutlass.Constexpr, i: cutlass.Constexpr, dtype: cutlass.Constexpr) -> None:
    """Add the products of fragment `i` of A, 16 rows, by one of two sets of fragments."""
    n_frags = cute.size(f.rB, mode=[1])
    for k in range_constexpr(n_frags):
        # neighbours share an operand
        n = k if i % 2 == 0 else n_frags - 1 - k
        a = [f.rA[j, i, buffer] for j in range(4)]
        sums = [f.acc[j, n, i] for j in range(4)]
        sums = mma_16x8x16(sums, *a, f.rB[0, n, buffer], f.rB[1, n, buffer], dtype)
        for j in range_constexpr(4):
            f.acc[j, n, i] = sums[j]


@cute.jit
def either(first: Boolean, one: cute.Tensor, other: cute.Tensor) -> Any:
    """One of two row-major matrices, with the shape of `one`, which the caller knows to fit both."""
    where = cutlass.select_(first, one.iterator.toint(), other.iterator.toint())
    pointer = cute.make_ptr(one.element_type, where, cute.AddressSpace.gmem, assumed_align=16)
    stride = cutlass.select_(first, one.stride[0], other.stride[0])
    return cute.make_tensor(pointer, cute.make_layout(one.shape, stride=(stride, 1)))


@cute.jit
def rows_of(matrix: Any, first: Int32, count: Int32) -> Any:
    """`count` rows of a matrix, from `first` on."""
    start = (matrix.iterator + Int64(first) * matrix.stride[0]).align(16)
    return cute.make_tensor(start, cute.make_layout((count, matrix.shape[1]), stride=matrix.stride))
