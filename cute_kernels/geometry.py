"""TwELL tile geometry and limits. Pure integers, shared by the kernels, the reference and the tests.

A row of N neurons is cut into tiles of 256. A tile takes W = 256 / C int32 words: word 0 is the true number of
non-zeros, words 1 to W-1 hold ``value bits << 16 | neuron``. A row-tile with more than W-1 non-zeros is spilled.
"""

TILE = 256
COMPRESSIONS = (2, 4, 8)

# The neuron index takes the low 16 bits of a word: a layer of more neurons runs as slices of at most so many.
MAX_NEURONS = 65536
MOST_NEURONS = 1 << 20

# Most experts of a layer.
MAX_EXPERTS = 1024
# Most of them that a token has.
MAX_EXPERTS_OF_TOKEN = 32
# Rows summed into one entry of the statistics that gate_pack writes.
STATS_ROWS = 8
# Counters of `up_down_token` before those of its tokens, padded: clusters that have seen their tokens; all non-zeros
# plus 1.
TOKEN_COUNTERS = 4
SEEN, TOTAL = 0, 1

# The hybrid format: tokens that share a list of neurons, neurons of a list that share a run of entries, and neurons (by
# rank of popularity) whose weight gradients are computed together.
TOKEN_TILE = 128
CHUNK = 64
NEURON_TILE = 64

# Neurons of a list that share a partial sum of |h|.
SUM_NEURONS = 128

# Most neurons of a layer whose pattern the portable family brings to the hybrid format and transposes: shared memory.
PORTABLE_UNION_NEURONS = 28672

# A neuron tile with at most this many non-zeros enters the weight gradients twice, the second time with the rounding
# errors of its 16-bit coefficients: the sum over a neuron's few tokens may be much smaller than its terms.
RARE_ENTRIES = 2048

# Most entries, 4 bytes each, of one slice of strategy "union".
UNION_ENTRIES = 1 << 27

# A batch that exceeds the capacity of the hybrid format: most tokens that forward and backward compute together, with
# one and three 16-bit values of scratch per token and neuron, and in backward most such values; tokens and neurons that
# share a sum of |h|, and tokens that share a sum for the gradients of the biases. A slice is whole tiles. Words, zero
# before, by which CTAs meet.
OVERFLOW_FORWARD, OVERFLOW_BACKWARD, OVERFLOW_VALUES = 16384, 3840, 1 << 27
OVERFLOW_SUM, OVERFLOW_NEURONS = 64, 128
OVERFLOW_COUNTERS = 3

# Codes of the activations in kernels, which say how a non-zero gate becomes h, see common/activation.py. fatrelu
# differs from relu only in the gates that are zero.
ACTIVATIONS = {"relu": 0, "relu2": 1, "drelu": 2, "fatrelu": 0}

# Counts and positions are 32-bit.
MOST = 2**31 - 1

# Most terms that tensor cores add to one sum, see common/sums.py. They truncate up to 5e-5 of the sum in float16 and
# 2e-4 in bfloat16: a quarter and an eighth of the average error of rounding to that dtype.
LONGEST_SUM = {"bfloat16": 1 << 15, "float16": 1 << 13}

# columns of a unit of work of weight_grad.py
SLAB = 256

# Long lists of weight_grad.py are cut, so that there are about so many units of work of equal length, but not into
# pieces of fewer tokens than this. fp32 sums of a unit, by 256 threads of up to 128; and counters, one per warp.
CUT_UNITS, LEAST_PIECE = 256, 1024
UNIT_SUMS, UNIT_WARPS = 256 * 128, 8

# Most fp32 sums that a CTA keeps in registers: 192 in each of 256 threads.
CTA_SUMS = 192 * 256


def tiles(n: int) -> int:
    """Number of tiles in a row of ``n`` neurons; the last one may be partial."""
    return -(-n // TILE)


def words_per_tile(compression: int) -> int:
    """Words of one row-tile, W = 256 / C, including the count."""
    if not isinstance(compression, int) or compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of {COMPRESSIONS}, got {compression!r}")
    return TILE // compression


def capacity(compression: int) -> int:
    """Most non-zeros that fit in the words of a row-tile; one more spills it."""
    return words_per_tile(compression) - 1


def sums_per_tile(n: int) -> int:
    """Partial sums of |h| per token tile: one per SUM_NEURONS listed neurons, or one per token."""
    return max(TOKEN_TILE, -(-n // SUM_NEURONS))


def training_sums(n: int) -> int:
    """The same in training: one per SUM_NEURONS listed neurons, or by OVERFLOW_SUM tokens and OVERFLOW_NEURONS."""
    return TOKEN_TILE // OVERFLOW_SUM * -(-n // OVERFLOW_NEURONS)


def union_slices(m: int, n: int) -> list[tuple[int, int]]:
    """(first, end) of the token slices of strategy "union"; entries for all gates of one take 0.5 GB at most."""
    most = max(1, UNION_ENTRIES // n // TOKEN_TILE) * TOKEN_TILE
    slices = -(-m // most)
    length = -(-token_tiles(m) // max(slices, 1)) * TOKEN_TILE
    return [(first, min(m, first + length)) for first in range(0, m, length)] if m else []


def neuron_slices(n: int) -> list[tuple[int, int]]:
    """(first, end) of the slices of ``n`` neurons. All are whole tiles, except for the last one."""
    length = tiles(-(-n // max(-(-n // MAX_NEURONS), 1))) * TILE
    return [(first, min(n, first + length)) for first in range(0, n, length)] if n else []


def overflow_tokens(m: int, n: int, k: int, parts: int, sums: int) -> int:
    """Tokens that backward of such a batch computes together, with ``parts`` values per token and neuron.

    Slices of tokens add up ``sums`` fp32 matrices [n, k]. One slice of all tokens needs none: with many neurons it is
    taken where it needs less memory than a shorter slice and these.
    """
    if n <= PORTABLE_UNION_NEURONS:
        return min(m, OVERFLOW_BACKWARD)
    most = max(min(OVERFLOW_BACKWARD, OVERFLOW_VALUES // (parts * n) // TOKEN_TILE * TOKEN_TILE), TOKEN_TILE)
    whole = m * parts <= most * parts + 2 * sums * k and m * parts * n <= 8 * OVERFLOW_VALUES
    return m if whole else min(m, most)


def token_tiles(m: int) -> int:
    """Tiles of ``m`` tokens in the hybrid format."""
    return -(-m // TOKEN_TILE)


def chunks(length: int) -> int:
    """Chunks of a list of ``length`` neurons."""
    return -(-length // CHUNK)


def hybrid_capacity(m: int, n: int, held: int = 0) -> int:
    """Most non-zeros in ``m`` rows of ``n`` neurons that the hybrid format holds: ``held`` per row, 0 for the most.

    The most is 156 at n = 5632: 1.0 KB per token with their 16-bit up projections and the lists. A multiple of eight:
    the data behind the entries are read in pieces of 16 bytes.
    """
    most = min(n, max(64, n // 36))
    return -(-m * (min(held, most) if held else most) // 8) * 8


def hybrid_words(capacity: int, value_bytes: int) -> int:
    """Words of ``capacity`` entries and ``value_bytes`` more per entry."""
    return capacity + capacity * value_bytes // 4


def cut_units(m: int, k: int, bias: bool) -> int:
    """Most units of the pieces of lists that weight_grad.py cuts, for ``m`` tokens and ``k`` columns.

    A list is cut if it is longer than a piece, and a piece is at least 1 / w of all lists, w = CUT_UNITS / units of
    both matrices. So fewer than w lists are cut, into fewer than 2 w pieces.
    """
    units = 2 * -(-k // SLAB)
    return 2 * max(1, CUT_UNITS // units) * (units + bias) if m > LEAST_PIECE else 0


def sums_aside(dtype: str, terms: int, ctas: int) -> int:
    """fp32 values of memory to which ``ctas`` CTAs flush sums of up to ``terms`` terms; 0 if they never need to."""
    return ctas * CTA_SUMS if terms > LONGEST_SUM[dtype] else 0
