"""What the main loops of sparse times dense, of both families, ask of their kernels' lists."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32


class Lists:
    """A unit of work is a sparse tile and a part of the columns. After `longest` positions its sums are flushed."""

    dtype: Any
    products: int
    longest: int
    # methods of a kernel
    tile_and_part: Any  # (data, unit): sparse tile and part of the columns
    list_extent: Any  # (data, tile): length of its list, and where it begins
    chunk_start: Any  # (data, tile, chunk): first coefficient of 64 positions; after the last chunk: where they end
    row_index: Any  # (data, at): row at position `at` of the lists
    load_coefficient: Any  # (data, at, product): coefficient `at` and its position, in two registers

    @cute.jit
    def unit_after(self, unit: Int32):
        """The next unit of this CTA; each round reverses the order of CTAs, so long units pair with short ones."""
        grid = Int32(cute.arch.grid_dim()[0])
        return unit + 2 * (grid - unit % grid) - 1
