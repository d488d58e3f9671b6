"""Heavy tokens of up_down_token.py: who shares them, how they are cut into pieces, and how these are added."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, range_constexpr

from .. import geometry
from .copies import address, aligned
from .token_sums import THREADS, WARPS, TokenSums
from .values import prefix_sum

# pieces of a token whose sums a thread loads at a time
AT_ONCE = 16
# what a heavy token adds to SEEN, besides one
HEAVY = 1 << 16


class Pieces(NamedTuple):
    """The pieces of heavy tokens: those before each thread's tokens, in `before`, and how they are cut."""

    size: Any  # of each piece but a token's last
    total: Any
    each: Any  # tokens of a thread


class TokenPieces(TokenSums):
    """What helpers ask. `o` has y, l1, stats, sums, counters, weights and helpers; `s` has before [THREADS + 1]."""

    turn: int
    cluster: int

    @cute.jit
    def wait_for_tokens(self, o: Any, s: Any, at: Any):
        """Wait for all tokens' clusters; return how many of them are heavy."""
        if at.thread == 0:
            seen = Int32(0)
            while seen & (HEAVY - 1) < o.y.shape[0]:
                seen = Int32(cute.arch.load(o.counters.iterator + geometry.SEEN, Int32, sem="acquire", scope="gpu"))
            s.before[0] = seen // HEAVY
        cute.arch.sync_threads()
        heavy = s.before[0]
        cute.arch.sync_threads()
        return heavy

    @cute.jit
    def cut_tokens(self, o: Any, s: Any, heavy: Int32, at: Any):
        """Choose the size of pieces of so many heavy tokens and write `s.before`."""
        each = cute.ceil_div(o.y.shape[0], THREADS)
        total, first = Int32(0), at.thread * each
        for m in cutlass.range(first, cutlass.min(first + each, o.y.shape[0]), unroll=1):
            total += o.weights[m]
        total = self.sum_of_all(s, total, at)
        # each heavy token may have a piece that is not full
        share = cute.ceil_div(total, cutlass.max(o.helpers - heavy, o.helpers // 2 + 1))
        size = cutlass.max(cute.ceil_div(share, self.turn), Int32(1)) * self.turn
        own = Int32(0)
        for m in cutlass.range(first, cutlass.min(first + each, o.y.shape[0]), unroll=1):
            own += self.cut(o.weights[m], size)
        before = prefix_sum(own, at.lane)
        if at.lane == 31:
            s.before[at.warp] = before + own
        cute.arch.sync_threads()
        all_before = Int32(0)
        for warp in range_constexpr(WARPS):
            all_before += s.before[warp] if warp < at.warp else Int32(0)
        cute.arch.sync_threads()
        s.before[at.thread] = all_before + before
        if at.thread == THREADS - 1:
            s.before[THREADS] = all_before + before + own
        cute.arch.sync_threads()
        return Pieces(size, s.before[THREADS] & 0xFFFF, each)

    @cute.jit
    def cut(self, listed: Int32, size: Int32):
        """The number of pieces of a token, and in the upper half that of its lines in `sums`; 0 unless it is heavy."""
        pieces = cute.ceil_div(listed, size)
        return pieces + (pieces << 16 if pieces > 1 else Int32(0))

    @cute.jit
    def sum_of_all(self, s: Any, value: Int32, at: Any):
        """The sum over all threads."""
        value = Int32(cute.arch.warp_redux_sync(value, "add"))
        if at.lane == 0:
            s.before[at.warp] = value
        cute.arch.sync_threads()
        total = Int32(0)
        for warp in range_constexpr(WARPS):
            total += s.before[warp]
        cute.arch.sync_threads()
        return total

    @cute.jit
    def find_piece(self, o: Any, s: Any, pieces: Any, piece: Int32, lane: Int32):
        """The token of a piece, its non-zeros, its first piece and that one's line in `sums`."""
        count = Int32(0)
        for i in range_constexpr(THREADS // 32):
            count += Int32((s.before[i * 32 + lane] & 0xFFFF) <= piece)
        thread = Int32(cute.arch.warp_redux_sync(count, "add")) - 1
        m, first, listed = thread * pieces.each, s.before[thread], Int32(0)
        own = Int32(0)
        searching = Boolean(True)
        while searching:
            first += own
            listed = o.weights[m]
            own = self.cut(listed, pieces.size)
            searching = (first & 0xFFFF) + (own & 0xFFFF) <= piece
            m += 1
        return m - 1, listed, first & 0xFFFF, first >> 16

    @cute.jit
    def find_total(self, o: Any, s: Any, at: Any):
        """The counter TOTAL: each of the CTAs that run first makes it, the first one writes it, later ones read it."""
        found = Int32(0)
        if cute.arch.block_idx()[0] < o.helpers * self.cluster:
            count, tiles = Int32(0), o.stats.shape[0] * o.stats.shape[1]
            figures = cute.make_tensor(o.stats.iterator, cute.make_layout((tiles, 2), stride=(2, 1)))
            for tile in cutlass.range(at.thread, tiles, THREADS, unroll=4):
                count += figures[tile, 0]
            found = self.sum_of_all(s, count, at) + 1
            if cute.arch.block_idx()[0] == 0 and at.thread == 0:
                o.counters[geometry.TOTAL] = found
        while found == 0:
            found = Int32(cute.arch.load(o.counters.iterator + geometry.TOTAL, Int32, sem="relaxed", scope="gpu"))
        return found

    @cute.jit
    def store_piece(self, o, s, acc, m, line, first, pieces, at):
        """Store the sums of one of several pieces; the last CTA to do so for these columns adds them and stores y.

        Its line in `sums` is `line`, that of the token's first piece is `first`.
        """
        self.share_sums(s, acc, at)
        for column in cutlass.range(2 * at.thread, at.columns, 2 * THREADS, unroll=1):
            cute.autovec_copy(self.add_groups(s, column), aligned(address(o.sums, line, at.left + column), 2))
        end = o.y.shape[1]
        if at.rank == 0 and at.thread == 0:
            o.sums[line, end] = self.total(s)
        # everything is stored, and `nonzeros` is free
        cute.arch.sync_threads()
        if at.thread == 0:
            arrived = o.counters.iterator + (geometry.TOKEN_COUNTERS + m * self.cluster + at.rank)
            s.nonzeros[0] = Uint32(cute.arch.atomic_add(arrived, Int32(1), sem="acq_rel", scope="gpu"))
        cute.arch.sync_threads()
        if Int32(s.nonzeros[0]) == pieces - 1:
            cute.arch.fence_acq_rel_gpu()
            # four columns of y per thread, and behind those of the first CTA l1
            for column in cutlass.range(4 * at.thread, at.columns + 4 * Int32(at.rank == 0), 4 * THREADS, unroll=1):
                mine = column < at.columns
                values = self.add_pieces(o, at.left + column if mine else end, first, pieces)
                if mine:
                    for i in range_constexpr(2):
                        self.store_pair(o, values[2 * i : 2 * i + 2], m, at.left + column + 2 * i)
                else:
                    o.l1[m] = values[0]

    @cute.jit
    def add_pieces(self, o, column, first, pieces):
        """The sums of four columns over the pieces, in their order; loads of `AT_ONCE` pieces are in flight."""
        values = [Float32(0.0)] * 4
        for base in cutlass.range(0, pieces, AT_ONCE, unroll=1):
            quads = cute.make_rmem_tensor((4, AT_ONCE), Float32)
            for p in range_constexpr(AT_ONCE):
                # the last one again in place of those beyond
                piece = cutlass.min(base + p, pieces - 1)
                cute.autovec_copy(aligned(address(o.sums, first + piece, column), 4), quads[None, p])
            for p in range_constexpr(AT_ONCE):
                for i in range_constexpr(4):
                    values[i] = values[i] + quads[i, p] if base + p < pieces else values[i]
        return values
