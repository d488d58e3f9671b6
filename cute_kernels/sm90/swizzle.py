"""The 128-byte swizzle of shared memory in closed form.

A matrix of 16-bit values lies in panels of 64 columns, 128 bytes a row. The sixteen-byte piece c of row r stands where
piece c ^ (r % 8) would, so that eight rows of one column hit different banks. WGMMA and TMA have it so. A tensor of a
swizzled layout gives the same addresses, by divisions of signed coordinates.
"""

from typing import Any


def swizzle_piece(row: Any, piece: Any) -> Any:
    """Offset, in values, of piece `piece` of 8 in its row of a panel."""
    return (piece ^ (row & 7)) << 3


def swizzle_column(row: Any, column: Any) -> Any:
    """Offset of a single value; what `column` holds beyond bit 5, an offset of the row or the panel, stays."""
    return column ^ ((row & 7) << 3)
