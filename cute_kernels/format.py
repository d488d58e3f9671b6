"""TwELL tile geometry and limits. Pure integers, shared by the kernels, the reference and the tests.

A row of N neurons is cut into tiles of 256. A tile takes W = 256 / C int32 words: word 0 is the true number of
non-zeros, words 1 to W-1 hold ``value bits << 16 | neuron``. A row-tile with more than W-1 non-zeros is spilled.
"""

TILE = 256
COMPRESSIONS = (2, 4, 8)

# The neuron index takes the low 16 bits of a word.
MAX_NEURONS = 65536

# Rows summed into one entry of the statistics that gate_pack writes.
STATS_ROWS = 64

# Tokens that share one entry of the heavy-row scratch of up_down and down.
GROUP_ROWS = 8


def tiles(n: int) -> int:
    """Number of tiles in a row of ``n`` neurons; the last one may be partial."""
    return -(-n // TILE)


def words_per_tile(compression: int) -> int:
    """Words of one row-tile, W = 256 / C, the count included."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of {COMPRESSIONS}, got {compression}")
    return TILE // compression


def capacity(compression: int) -> int:
    """Most non-zeros that a row-tile holds in its words; one more spills it."""
    return words_per_tile(compression) - 1
