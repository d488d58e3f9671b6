"""Strategy "union": a layer on the tensor cores, by the neurons that any token of a tile fires.

Each tile of 128 tokens gathers the weight rows in the union of its tokens' neurons once. Any pattern is exact. If the
union is all neurons, the products are those of dense PyTorch, and gathering rows is overhead. h is rounded to x's
dtype, once, as in dense PyTorch. Slices of whole tiles run one after the other, so that the packed gate takes the
memory of one, and scratch holds at most 0.5 GB of entries.

With T = ceil(N / 256) l1 is float32 [ceil(M / 128), max(128, T)], partial sums of |h| for each tile, and sizes are
int32 [ceil(M / 128) + 1]: the number of neurons that each tile fires, and one more that the kernels use.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from twell.base.activation import RELU, Activation
from twell.choose import tuning
from twell.ops import hybrid
from twell.ops.gate_pack import pack
from twell.ops.library import Shape, bias_view, down_rows
from twell.ops.operands import Layer, Scaled, launched
from twell.ops.pack import pack_gate, stats_shape
from twell.ops.pack import shapes as packed_shapes
from twell.runtime import geometry
from twell.runtime.program import Program, View

# words, spill and stats
Packed = tuple[View, View, View]


def shapes(x: View, n: int) -> tuple[Shape, Shape, Shape, Shape]:
    """Of y [M, K], l1, stats and sizes."""
    m, tiles = x.shape[0], geometry.token_tiles(x.shape[0])
    sums = torch.float32, tiles, geometry.sums_per_tile(n)
    return (x.dtype, *x.shape), sums, stats_shape(m, n), (torch.int32, tiles + 1)


def by_slices(
    p: Program,
    layer: Layer,
    pack_slice: Callable[[int, int, Packed], Sequence[View] | None],
    results: Sequence[View],
    compression: int,
    activation: Activation,
) -> None:
    """Launch what fills ``results``: y, l1, stats and sizes, slice by slice.

    ``pack_slice(first, last, packed)`` launches what fills words, spill and stats of a slice; it returns
    ``ops.screened.Lists`` if words have places in lists for neurons.
    """
    x, _, w_up, w_down, _, b_up, b_down, _ = layer.unscaled
    y, l1, stats, sizes = results
    # without x, whose shape y has, nothing is read of it
    x = y if x is None else x
    n, dtype, ctas = w_down.shape[1], y.dtype, p.multiprocessors
    slices, width = geometry.union_slices(x.shape[0], n), geometry.words_per_tile(compression)
    family = tuning.family(p.index)
    hybrid.require_neurons(n, family, 'strategy "union"')
    # without an up projection the gates in the entries become h as they are read
    code, of_entries = activation.code(), activation.code() if w_up is None else RELU.code()
    plain, most = 1 + code if w_up is None else 0, geometry.MOST
    aside = hybrid.room_aside(p, dtype, n)
    # the first slice is the longest; the others reuse its memory
    longest = slices[0][1]
    words, spill = (p.scratch(*shape) for shape in packed_shapes(dtype, longest, n, compression)[:2])
    entries = p.scratch(torch.int32, longest * n)
    neurons = p.scratch(torch.int16, geometry.token_tiles(longest), geometry.CHUNK * geometry.chunks(n))
    chunks = p.scratch(torch.int32, geometry.token_tiles(longest), geometry.chunks(n) + 1)
    down: View | Scaled | None = None
    for first, last in slices:
        start, stop = first // geometry.TOKEN_TILE, geometry.token_tiles(last)
        # the element behind the sizes of a slice is zero until the next slice writes its first size there
        pattern = entries, neurons.part(0, stop - start), chunks.part(0, stop - start), sizes.part(start, stop + 1)
        own_stats = stats.part(first // geometry.STATS_ROWS, -(-last // geometry.STATS_ROWS))
        packed: Packed = words.part(0, last - first), spill.part(0, last - first), own_stats
        lists, sums = pack_slice(first, last, packed), l1.part(start, stop)
        # after a screen the words hold places in these lists, else neurons
        listed: tuple[Any, ...] = (*lists, 1) if lists else (pattern[1], pattern[3], 0)
        compact = tuning.compact(dtype, False, family=family)
        p.launch(compact, *packed[:2], None, *pattern, None, sums, n, width, plain, most, *listed)
        if w_up is not None:
            up = tuning.sampled_up(x.dtype, False, family=family)
            own, up_bias = launched(x.part(first, last)), bias_view(p, b_up, dtype)
            p.launch(up, *own, *launched(w_up), up_bias, *pattern, None, None, sums, code, most, ctas)
        # with an up projection h is now in the entries
        down = down_rows(p, w_down) if down is None else down
        down_bias, out = bias_view(p, b_down, dtype), (y.part(first, last), aside, of_entries, most, ctas)
        rows = launched(down)
        p.launch(tuning.gathered(down.dtype, 0, family=family), None, *rows, None, None, down_bias, *pattern, *out)


def launches(p: Program, layer: Layer, results: Sequence[View], compression: int, activation: Activation) -> None:
    """Launch the layer on slices of its tokens."""
    x, w_gate, _, _, b_gate, _, _, gate = layer.unscaled

    def pack_slice(first: int, last: int, packed: Packed) -> None:
        if gate is None:
            pack(p, x.part(first, last), w_gate, b_gate, *packed, compression, activation)
        else:
            pack_gate(p, gate.part(first, last), *packed, compression, activation)

    by_slices(p, layer, pack_slice, results, compression, activation)
