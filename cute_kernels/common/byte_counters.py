"""Counters of one byte per row and token of a token tile; the counters of four tokens share a word."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint32

from .. import geometry

# words of a row, and one more: the counters of one token are in different banks
PITCH = geometry.TOKEN_TILE // 4 + 1


@cute.jit
def count_token(counters: Any, row: Int32, token: Int32) -> Uint32:
    """Add one to the counter of `row` and `token` in shared memory; return its word as it was before."""
    counter = counters.iterator + (row * PITCH + (token >> 2))
    return Uint32(cute.arch.atomic_add(counter, Uint32(1) << Uint32((token & 3) * 8), scope="cta"))
