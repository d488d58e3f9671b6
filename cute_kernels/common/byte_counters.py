"""What compact.py and transpose.py share: counters of one byte per row and token of a token tile, of which those of
four tokens share a word, and a thread of a CTA that has a token tile.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Uint32

from .. import geometry

# words of a row, and one more: the counters of one token are in different banks
PITCH = geometry.TOKEN_TILE // 4 + 1


class Thread(NamedTuple):
    """Indices of a thread, and the token tile of its CTA."""

    tile: Any
    thread: Any
    warp: Any
    lane: Any


def thread_index() -> Thread:
    thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return Thread(cute.arch.block_idx()[0], thread, warp, lane)


@cute.jit
def count_token(counters: Any, row: Int32, token: Int32) -> Uint32:
    """Add one to the counter of `row` and `token` in shared memory; return its word as it was before."""
    counter = counters.iterator + (row * PITCH + (token >> 2))
    return Uint32(cute.arch.atomic_add(counter, Uint32(1) << Uint32((token & 3) * 8), scope="cta"))
