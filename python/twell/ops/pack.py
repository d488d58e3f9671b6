"""A dense gate [M, N], before its activation, in TwELL; and which gates of a token are its largest.

gate is bfloat16 or float16. words, spill and stats are as in ``gate_pack``, and so are their values. A bias [2 N] has a
threshold for each neuron in its second half; the first is not read, as the gate has its biases.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.activation import Activation, threshold_pair
from twell.choose import tuning
from twell.ops.library import Shape, bias_view, blocks
from twell.runtime import geometry
from twell.runtime.program import Program, View

Packed = tuple[Tensor, Tensor, Tensor]


def shapes(dtype: torch.dtype, m: int, n: int, compression: int) -> tuple[Shape, Shape, Shape]:
    """Of words int32 [M, T*W], spill [M, T*256] of the gate's dtype and stats int32 [ceil(M/8), T, 2]."""
    tiles = geometry.tiles(n)
    words = torch.int32, m, tiles * geometry.words_per_tile(compression)
    return words, (dtype, m, tiles * geometry.TILE), stats_shape(m, n)


def stats_shape(m: int, n: int) -> Shape:
    """Of stats alone, which are the same at any compression."""
    return torch.int32, blocks(m, geometry.STATS_ROWS), geometry.tiles(n), 2


def fill_on_cpu(packed: Packed, gate: Tensor, compression: int) -> Packed:
    """Fill ``packed`` with ``gate`` [M, N] behind its activation, and return it."""
    words, spill, stats = packed
    gate = F.pad(gate, (0, spill.shape[1] - gate.shape[1]))

    m, tiles, _ = tiled = (gate.shape[0], stats.shape[1], geometry.TILE)
    nonzero = gate != 0
    counts = nonzero.view(tiled).sum(2, dtype=torch.int32)
    overflows = counts > geometry.capacity(compression)

    # Row-major order of `nonzero` is ascending neurons; a value's place is its rank within its row-tile.
    row, neuron = nonzero.nonzero(as_tuple=True)
    rowtile = row * tiles + neuron // geometry.TILE
    through = counts.view(-1).cumsum(0)
    place = 1 + torch.arange(row.numel(), device="cpu") - (through - counts.view(-1))[rowtile]
    kept = place <= geometry.capacity(compression)
    entries = gate.view(torch.int16)[row, neuron].int() << 16 | neuron.int()
    table = words.zero_().view(m * tiles, geometry.words_per_tile(compression))
    table[:, 0] = counts.view(-1)
    table[rowtile[kept], place[kept]] = entries[kept]

    spill.copy_(gate.view(tiled).masked_fill(~overflows[:, :, None], 0).view(spill.shape))
    padding = stats.shape[0] * geometry.STATS_ROWS - m
    for i, figure in enumerate((counts, overflows.int())):
        stats[:, :, i] = F.pad(figure, (0, 0, 0, padding)).view(-1, geometry.STATS_ROWS, tiles).sum(1)
    return packed


def pack_gate(
    p: Program,
    gate: View,
    words: View,
    spill: View,
    stats: View,
    compression: int,
    activation: Activation,
    counters: int = 0,
    bias: View | None = None,
    levels: View | None = None,
) -> View | None:
    """Launch what fills words, spill and stats; ``gate`` may be the first columns of the spill.

    ``bias`` is one that has been added, with thresholds behind it or not. With ``levels``, of ``find_levels``, the
    gates that these chose are kept, in place of those above a threshold. The kernel zeroes int32 [counters] for those
    of up_down, which are returned.
    """
    zeroed = p.scratch(torch.int32, counters)
    form = geometry.words_per_tile(compression), threshold_pair(activation, gate.dtype)
    levels = p.scratch(torch.int32, 0, 2) if levels is None else levels
    own = bias_view(p, bias, gate.dtype), levels
    p.launch(tuning.pack(gate.dtype), gate, words, spill, stats, zeroed, *own, *form)
    return zeroed if counters else None


def find_levels(p: Program, gate: View, levels: View, k: int) -> None:
    """Launch what fills ``levels`` int32 [M, 2], as ``reference.top_k`` defines them; k may be larger than N."""
    infinity = torch.tensor(torch.inf, dtype=gate.dtype, device="cpu").view(torch.int16)
    p.launch(tuning.top_k(gate.shape[1]), gate._replace(dtype=torch.int16), levels, k, int(infinity))
