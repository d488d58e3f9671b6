"""The gated up and down projections of up_down.py for few tokens, bound by latency: y[m] = sum over non-zeros c of
h[m, c] * w_down[c], with h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]). If not `gated`, the packed values are h.

A cluster of four or eight CTAs computes a token, each CTA a part of the columns; tokens share nothing. The warps of a
CTA divide the non-zeros, up to WINDOW at a time:

    list     eight lanes per tile of the gate: counts and values of 32 tiles arrive in one load. Every CTA lists all.
    up       a warp takes four neurons at a time, fewer if rows are long: each lane loads 16 bytes of a row, or a few
             times that, and multiplies them by the x that it holds; sums over the warp go to `partial`.
    hidden   after a cluster barrier each thread takes a non-zero and adds the CTAs' partial sums in a fixed order; the
             loads of the first down rows are already in flight.
    down     a warp takes as many neurons at a time as in `up` and adds h times their rows to fp32 sums in registers.

At the end the warps' sums are added in shared memory, and each CTA rounds and stores its columns. h stays fp32. A CTA
arrives at the cluster barrier twice per WINDOW: when its partial sums are complete, and when it has read all others'.
It waits for the second only before it writes the next partial sums or the final sums.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from . import feasible, geometry
from .sm90 import operands
from .sm90.copies import address, load_peer_value, load_values
from .sm90.rows import spilled_word
from .sm90.values import count_flags, high_to_float, low_to_float, nonzero_flags, prefix_sum, warp_sum
from .specs import UpDownSkinnySpec, UpDownSpec

WARPS = 8
THREADS = 32 * WARPS
WINDOW = 2048
# tiles that are listed at a time, and lanes of each
TILES = 32
LANES = THREADS // TILES
# columns of a warp's load
STEP = 256


class Operands(NamedTuple):
    """Operands in global memory; None if absent."""

    x: Any
    words: Any
    spill: Any
    w_up: Any
    w_down: Any
    b_up: Any
    b_down: Any
    y: Any
    l1: Any
    width: Any  # words of a tile


class Thread(NamedTuple):
    """Indices of a thread, and the columns of its CTA."""

    rank: Any  # of the CTA in its cluster
    left: Any  # first column
    columns: Any  # number of columns
    thread: Any
    warp: Any
    lane: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    counts: Any  # [TILES] non-zeros of each tile
    totals: Any  # [warps] sums of |h| by warp
    nonzeros: Any  # [WINDOW] value bits << 16 | neuron
    hidden: Any  # [WINDOW] h
    partial: Any  # [WINDOW] dot products over the CTA's columns
    sums: Any  # [warps, columns] y by warp; overlays `nonzeros` and the following


class UpDownSkinny:
    """For one dtype and class of hidden sizes, gated or not."""

    def __init__(self, spec: UpDownSkinnySpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.gated = spec.gated
        self.has_bias = spec.bias
        self.cluster = spec.cluster
        # 16-byte loads per lane and row
        self.vectors = spec.k_max // (spec.cluster * STEP)
        self.columns = self.vectors * STEP
        # rows that a warp has in flight
        self.rows = {1: 4, 2: 4, 4: 2, 8: 1}[self.vectors]
        self.words = max(3 * WINDOW if self.gated else 2 * WINDOW, WARPS * self.columns)
        self.ctas_per_sm = {1: 3, 2: 2, 4: 1, 8: 1}[self.vectors]

        @cute.struct
        class Shared:
            counts: cute.struct.MemRange[Int32, TILES]
            totals: cute.struct.MemRange[Float32, WARPS]
            arena: cute.struct.Align[cute.struct.MemRange[Float32, self.words], 16]

        self.shared = feasible.check_shared_memory(Shared, self.ctas_per_sm)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor | None,
        words: cute.Tensor,
        spill: cute.Tensor,
        w_up: cute.Tensor | None,
        w_down: cute.Tensor,
        b_up: cute.Tensor | None,
        b_down: cute.Tensor | None,
        y: cute.Tensor,
        l1: cute.Tensor,
        words_per_tile: Int32,
        stream: cuda.CUstream,
    ):
        if y.shape[0] > 0:
            self.kernel(Operands(x, words, spill, w_up, w_down, b_up, b_down, y, l1, words_per_tile)).launch(
                grid=(self.cluster, y.shape[0], 1),
                block=(THREADS, 1, 1),
                cluster=(self.cluster, 1, 1),
                min_blocks_per_mp=self.ctas_per_sm,
                preferred_smem_carveout=100,
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(self, o: Operands):
        rank, m, _ = cute.arch.block_idx()
        s = self.views(SmemAllocator().allocate(self.shared))
        at = self.thread_index(o.y.shape[1], rank)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.compute_token(o, s, m, at)

    @cute.jit
    def thread_index(self, k, rank):
        """The thread's indices in CTA `rank` of a cluster; columns are divided in pieces of 16 bytes."""
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        share = cute.ceil_div(k, 8 * self.cluster) * 8
        left = rank * share
        return Thread(rank, left, cutlass.max(cutlass.min(k - left, share), Int32(0)), thread, warp, lane)

    @cute.jit
    def compute_token(self, o, s, m, at):
        """Compute token `m` by one cluster. Shared memory is free again at the first barrier of the next token."""
        x_lane = self.load_row(o.x, m, at) if const_expr(self.gated) else None
        acc = cute.make_rmem_tensor((8, self.vectors), Float32)
        acc.fill(0.0)
        tiles = o.words.shape[1] // o.width
        total, windows = Float32(0.0), Int32(0)
        for group in cutlass.range(0, tiles, TILES, unroll=1):
            slot = at.warp * (32 // LANES) + at.lane // LANES
            row = address(o.words, m, (group + slot) * o.width)
            quad = cute.make_rmem_tensor((4,), Uint32)
            listed = self.count_nonzeros(s, row, quad, slot, group + slot < tiles, at.lane)
            for base in cutlass.range(0, listed, WINDOW, unroll=1):
                size = cutlass.min(listed - base, Int32(WINDOW))
                self.list_nonzeros(o, s, row, quad, m, slot, group + slot, base, at.lane)
                cute.arch.sync_threads()
                rows = cute.make_rmem_tensor((4, self.vectors, self.rows), Uint32)
                if const_expr(self.gated):
                    if windows > 0:
                        cute.arch.cluster_wait()
                    self.up_products(s, x_lane, o.w_up, size, at)
                    cute.arch.cluster_arrive()
                # not before the arrival, which also waits for loads
                self.load_rows(s, rows, o.w_down, at.warp * self.rows, size, at)
                if const_expr(self.gated):
                    cute.arch.cluster_wait()
                total += self.hidden_state(s, o.b_up, size, at.thread)
                if const_expr(self.gated):
                    cute.arch.cluster_arrive()
                    windows += 1
                cute.arch.sync_threads()
                for first in cutlass.range(at.warp * self.rows, size, WARPS * self.rows, unroll=1):
                    if first != at.warp * self.rows:
                        self.load_rows(s, rows, o.w_down, first, size, at)
                    self.add_rows(s, acc, rows, first, size)
                # the list has been read
                cute.arch.sync_threads()
        if const_expr(self.gated):
            # the final sums overwrite partial sums, and no CTA may exit before its own are read
            if windows > 0:
                cute.arch.cluster_wait()
        self.store_token(o, s, acc, total, m, at)

    # ---- listing ----

    @cute.jit
    def count_nonzeros(self, s, row, quad, slot, exists, lane):
        """Load count and first words of each of 32 tiles, four per lane; return the number of their non-zeros."""
        quad.fill(0)
        # the previous counts may still be read
        cute.arch.sync_threads()
        if exists:
            load_values(row + lane % LANES * 4, quad)
        if lane % LANES == 0:
            s.counts[slot] = Int32(quad[0])
        cute.arch.sync_threads()
        return Int32(cute.arch.warp_redux_sync(s.counts[lane], "add"))

    @cute.jit
    def list_nonzeros(self, o, s, row, quad, m, slot, tile, base, lane):
        """List non-zeros `base` to `base + WINDOW` of 32 tiles, ascending; a lane has words of one of them."""
        piece = lane % LANES
        count = s.counts[slot]
        before = prefix_sum(s.counts[lane], lane)
        # position of the tile's first non-zero
        start = cute.arch.shuffle_sync(before, slot) - base
        if count < o.width:
            self.list_quad(s, quad, start, piece, count)
            more = cute.make_rmem_tensor((4,), Uint32)
            # words beyond the first load
            for q in cutlass.range(piece + LANES, count // 4 + 1, LANES, unroll=1):
                load_values(row + 4 * q, more)
                self.list_quad(s, more, start, q, count)
        if cute.arch.vote_any_sync(count >= o.width):
            self.list_spilled(s, o.spill, m, tile, start, count >= o.width, piece, lane)

    @cute.jit
    def list_spilled(self, s, spill, m, tile, start, spilled, piece, lane):
        """List the non-zeros of tiles that overflow, eight values per lane at a time."""
        for part in cutlass.range(geometry.TILE // (8 * LANES), unroll=1):
            quad = cute.make_rmem_tensor((4,), Uint32)
            quad.fill(0)
            neuron = tile * geometry.TILE + (part * LANES + piece) * 8
            if spilled:
                load_values(address(spill, m, neuron), quad)
            flags = nonzero_flags(quad)
            own = count_flags(flags)
            inclusive = own
            for d in (1, 2, 4):
                other = cute.arch.shuffle_sync_up(inclusive, d, mask_and_clamp=0)
                inclusive = inclusive + other if piece >= d else inclusive
            at = start + inclusive - own
            for i in range_constexpr(8):
                self.list_word(s, at, spilled_word(quad, i, neuron), flags[i])
                at += Int32(flags[i])
            start += cute.arch.shuffle_sync(inclusive, lane | (LANES - 1))

    @cute.jit
    def list_quad(self, s, quad, start, q, count):
        """List words 4 q to 4 q + 3 of a tile; word 0 is the count."""
        for i in range_constexpr(4):
            ordinal = 4 * q + i
            self.list_word(s, start + ordinal - 1, quad[i], ordinal > 0 and ordinal <= count)

    @cute.jit
    def list_word(self, s, at, word, valid):
        if valid and at >= 0 and at < WINDOW:
            s.nonzeros[at] = word

    # ---- rows ----

    @cute.jit
    def load_row(self, matrix, row, at):
        """Load a lane's pieces of this CTA's columns of a row, zeros beyond the last column."""
        values = cute.make_rmem_tensor((4, self.vectors), Uint32)
        values.fill(0)
        for v in range_constexpr(self.vectors):
            column = v * STEP + at.lane * 8
            if column < at.columns:
                load_values(address(matrix, row, at.left) + column, values[None, v])
        return values

    @cute.jit
    def load_rows(self, s, rows, matrix, first, size, at):
        """Load rows of the neurons from `first` of the list on; columns beyond the last stay as they are."""
        for j in range_constexpr(self.rows):
            if first + j < size:
                neuron = s.nonzeros[first + j] & Uint32(0xFFFF)
                base = address(matrix, neuron, at.left)
                for v in range_constexpr(self.vectors):
                    column = v * STEP + at.lane * 8
                    if column < at.columns:
                        load_values(base + column, rows[None, v, j])

    @cute.jit
    def up_products(self, s, x_lane, w_up, size, at):
        """Store dot products over this CTA's columns in `partial`."""
        rows = cute.make_rmem_tensor((4, self.vectors, self.rows), Uint32)
        for first in cutlass.range(at.warp * self.rows, size, WARPS * self.rows, unroll=1):
            # columns beyond the last are zero
            rows.fill(0)
            self.load_rows(s, rows, w_up, first, size, at)
            sums = [Float32(0.0)] * self.rows
            for v in range_constexpr(self.vectors):
                for i in range_constexpr(4):
                    low, high = low_to_float(x_lane[i, v], self.dtype), high_to_float(x_lane[i, v], self.dtype)
                    for j in range_constexpr(self.rows):
                        sums[j] += low * low_to_float(rows[i, v, j], self.dtype)
                        sums[j] += high * high_to_float(rows[i, v, j], self.dtype)
            for d in range_constexpr(5):
                for j in range_constexpr(self.rows):
                    sums[j] += cute.arch.shuffle_sync_bfly(sums[j], 1 << d)
            for j in range_constexpr(self.rows):
                if at.lane == j and first + j < size:
                    s.partial[first + j] = sums[j]

    @cute.jit
    def hidden_state(self, s, b_up, size, thread):
        """Compute the hidden state of the listed non-zeros; return the thread's sum of |h|."""
        total = Float32(0.0)
        for i in cutlass.range(thread, size, THREADS, unroll=1):
            word = s.nonzeros[i]
            h = high_to_float(word, self.dtype)
            if const_expr(self.gated):
                value = Float32(0.0)
                for r in range_constexpr(self.cluster):
                    value += load_peer_value(s.partial.iterator + i, Int32(r))
                if const_expr(self.has_bias):
                    value += b_up[Int32(word & Uint32(0xFFFF))].to(Float32)
                h = h * value
            s.hidden[i] = h
            total += cute.arch.fmax(h, -h)
        return total

    @cute.jit
    def add_rows(self, s, acc, rows, first, size):
        """acc += h times the rows."""
        for j in range_constexpr(self.rows):
            if first + j < size:
                h = s.hidden[first + j]
                for v in range_constexpr(self.vectors):
                    for i in range_constexpr(4):
                        acc[2 * i, v] += h * low_to_float(rows[i, v, j], self.dtype)
                        acc[2 * i + 1, v] += h * high_to_float(rows[i, v, j], self.dtype)

    # ---- the end ----

    @cute.jit
    def store_token(self, o, s, acc, total, m, at):
        """Add the warps' sums in a fixed order and store this CTA's columns."""
        total = warp_sum(total)
        if at.lane == 0:
            s.totals[at.warp] = total
        for v in range_constexpr(self.vectors):
            target = cute.make_tensor(
                (s.sums + (at.warp * self.columns + v * STEP + at.lane * 8)).align(16), cute.make_layout(8)
            )
            cute.autovec_copy(acc[None, v], target)
        cute.arch.sync_threads()
        sums = cute.make_tensor(s.sums, cute.make_layout(WARPS * self.columns))
        for column in cutlass.range(2 * at.thread, at.columns, 2 * THREADS, unroll=1):
            pair = cute.make_rmem_tensor((2,), self.dtype)
            for j in range_constexpr(2):
                value = Float32(0.0)
                for w in range_constexpr(WARPS):
                    value += sums[w * self.columns + column + j]
                if const_expr(self.has_bias):
                    value += o.b_down[at.left + column + j].to(Float32)
                pair[j] = value.to(self.dtype)
            line = address(o.y, m, at.left) + column
            cute.autovec_copy(pair, cute.make_tensor(line.align(4), cute.make_layout(2)))
        if at.rank == 0 and at.thread == 0:
            everything = Float32(0.0)
            for w in range_constexpr(WARPS):
                everything += s.totals[w]
            o.l1[m] = everything

    def views(self, shared):
        """Tensors over the shared struct."""
        arena = shared.arena.data_ptr()
        return Views(
            counts=shared.counts.get_tensor(cute.make_layout(TILES)),
            totals=shared.totals.get_tensor(cute.make_layout(WARPS)),
            nonzeros=cute.make_tensor(cute.recast_ptr(arena, dtype=Uint32), cute.make_layout(WINDOW)),
            hidden=cute.make_tensor(arena + WINDOW, cute.make_layout(WINDOW)),
            partial=cute.make_tensor(arena + 2 * WINDOW, cute.make_layout(WINDOW)),
            sums=arena,
        )


def fake_arguments(spec: UpDownSpec | UpDownSkinnySpec) -> tuple[Any, ...]:
    """Fake tensors of `Operands`, in the order of its fields."""
    dtype = operands.DTYPES[spec.dtype]
    m, n, k = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    return (
        operands.rows(dtype, m, k) if spec.gated else None,
        *operands.packed(dtype, m),
        operands.rows(dtype, n, k) if spec.gated else None,
        operands.rows(dtype, n, k),
        operands.vector(dtype, n) if spec.gated and spec.bias else None,
        operands.vector(dtype, k) if spec.bias else None,
        operands.rows(dtype, m, k),
        operands.vector(Float32, m),
    )


def signature(spec: UpDownSkinnySpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    return UpDownSkinny(spec), (*fake_arguments(spec), Int32(1))
