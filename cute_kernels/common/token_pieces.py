"""Heavy tokens of up_down_token.py: who shares them, and how they are cut into pieces."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, range_constexpr

from .. import geometry
from ..specs import TOKEN_WARPS
from .values import prefix_sum

WARPS = TOKEN_WARPS
THREADS = 32 * WARPS
# what a heavy token adds to SEEN, besides one
HEAVY = 1 << 16


class Pieces(NamedTuple):
    """The pieces of heavy tokens: those before each thread's tokens, in `before`, and how they are cut."""

    size: Any  # of each piece but a token's last
    total: Any
    each: Any  # tokens of a thread


class TokenPieces:
    """What helpers ask. `o` has y, counters, weights and helpers; `s` has before [THREADS + 1]."""

    turn: int

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
