"""What the main loops of sparse times dense, of both families, ask of their kernels' lists."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32


class Lists:
    """A unit of work is a sparse tile and a part of the columns. After `longest` positions its sums are flushed."""

    dtype: Any
    products: int
    longest: int

    def tile_and_part(self, data, unit):
        """Sparse tile and part of the columns of a unit."""
        raise NotImplementedError

    def list_extent(self, data, tile):
        """Length of a tile's list, and where it begins."""
        raise NotImplementedError

    def chunk_start(self, data, tile, chunk):
        """Index of the first coefficient of 64 list positions; of the chunk after the last: where they end."""
        raise NotImplementedError

    def row_index(self, data, at):
        """Row at position `at` of the lists."""
        raise NotImplementedError

    def load_coefficient(self, data, at, product):
        """Coefficient `at` and its position, in two registers."""
        raise NotImplementedError

    @cute.jit
    def unit_after(self, unit: Int32):
        """The next unit of this CTA; each round reverses the order of CTAs, so long units pair with short ones."""
        grid = Int32(cute.arch.grid_dim()[0])
        return unit + 2 * (grid - unit % grid) - 1
