"""The 128-byte swizzle of shared memory in closed form.

A matrix of 16-bit values is stored in panels of 64 columns, 128 bytes per row. The 16-byte piece c of row r is at the
position of piece c ^ (r % 8), so eight rows of one column hit different banks. WGMMA and TMA use this layout. A tensor
with a swizzled layout gives the same addresses, but needs divisions of signed coordinates.
"""

from typing import Any


def swizzle_piece(row: Any, piece: Any) -> Any:
    """Offset, in values, of piece `piece` of 8 in its row of a panel."""
    return (piece ^ (row & 7)) << 3


def swizzle_column(row: Any, column: Any) -> Any:
    """Offset, in values, of one value. Bits of `column` above bit 5, an offset of row or panel, pass through."""
    return column ^ ((row & 7) << 3)
