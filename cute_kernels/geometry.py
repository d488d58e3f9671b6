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

# Tokens that share one entry of the heavy-row scratch of up_down.
GROUP_ROWS = 8

# The hybrid format: tokens that share one list of neurons, places of a list that share one run of entries, and neurons
# (by rank of popularity) whose weight gradients are computed together.
TOKEN_TILE = 128
CHUNK = 64
NEURON_TILE = 64

# A neuron tile with at most this many non-zeros enters the weight gradients twice, the second time with what rounding
# its coefficients to 16 bits left: where a neuron has few tokens, their sum may be much smaller than they are.
RARE_ENTRIES = 2048

# Most entries, 4 bytes each, that strategy "union" has room for at a time.
UNION_ENTRIES = 1 << 27

# Counts and places are 32-bit.
MOST = 2**31 - 1

# Terms of a sum that tensor cores add in a row, see sm90/sums.py. What they cut off is up to 5e-5 of the sum in float16
# and 2e-4 in bfloat16, a quarter and an eighth of the average error of rounding to that dtype.
LONGEST_SUM = {"bfloat16": 1 << 15, "float16": 1 << 13}

# Most sums that a CTA keeps in registers: 192 in each of 256 threads.
CTA_SUMS = 192 * 256


def tiles(n: int) -> int:
    """Number of tiles in a row of ``n`` neurons; the last one may be partial."""
    return -(-n // TILE)


def words_per_tile(compression: int) -> int:
    """Words of one row-tile, W = 256 / C, the count included."""
    if not isinstance(compression, int) or compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of {COMPRESSIONS}, got {compression!r}")
    return TILE // compression


def capacity(compression: int) -> int:
    """Most non-zeros that a row-tile holds in its words; one more spills it."""
    return words_per_tile(compression) - 1


def sums_per_tile(n: int) -> int:
    """Sums of |h| that the kernels on token tiles write for each: of 256 listed neurons each, or of its tokens."""
    return max(TOKEN_TILE, tiles(n))


def union_slices(m: int, n: int) -> list[tuple[int, int]]:
    """(first, last) of the tokens that strategy "union" takes at a time: entries for all of their gates are 0.5 GB."""
    most = max(1, UNION_ENTRIES // n // TOKEN_TILE) * TOKEN_TILE
    slices = -(-m // most)
    length = -(-token_tiles(m) // max(slices, 1)) * TOKEN_TILE
    return [(first, min(m, first + length)) for first in range(0, m, length)] if m else []


def token_tiles(m: int) -> int:
    """Tiles of ``m`` tokens in the hybrid format."""
    return -(-m // TOKEN_TILE)


def chunks(length: int) -> int:
    """Chunks that ``length`` places of a list take."""
    return -(-length // CHUNK)


def hybrid_capacity(m: int, n: int) -> int:
    """Non-zeros of ``m`` rows of ``n`` neurons that the hybrid format holds, wherever they are; more makes a bitmap.

    156 a token at n = 5632: with their 16-bit up projections and the lists that is 1.0 KB a token. A multiple of eight,
    for what follows the entries is read in pieces of 16 bytes.
    """
    return -(-m * min(n, max(64, n // 36)) // 8) * 8


def hybrid_words(m: int, n: int, value_bytes: int) -> int:
    """Words of the entries with the ``value_bytes`` that go with each, or of the bitmap [m, ceil(n / 32)], if more."""
    capacity = hybrid_capacity(m, n)
    return max(capacity + capacity * value_bytes // 4, m * bitmap_words(n))


def bitmap_words(n: int) -> int:
    """Words of one row of a bitmap of ``n`` neurons."""
    return -(-n // 32)


def sums_aside(dtype: str, terms: int, ctas: int) -> int:
    """fp32 values that ``ctas`` CTAs need to set sums of up to ``terms`` terms aside; 0 where these are short."""
    return ctas * CTA_SUMS if terms > LONGEST_SUM[dtype] else 0
