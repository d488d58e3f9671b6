"""``up_down_union``: ``up_down`` by tiles of 128 tokens, on tensor cores. Strategy "union".

Each tile gathers the weight rows in the union of its tokens' neurons once. Any pattern is exact. If the union is all
neurons, the products are those of dense PyTorch, and gathering rows is overhead.
h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]) for the non-zeros of the gate, without ``w_up`` h = gate;
y = h @ w_down + b_down. h is rounded to x's dtype, once, as in dense PyTorch. ``activation`` as in ``up_down``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twell import tuning
from twell._activation import RELU, Activation, activation_of
from twell._runtime import device, geometry
from twell.ops import hybrid
from twell.ops.library import (
    PACKED,
    bias_vector,
    blocks,
    check_alike,
    check_layer,
    check_packed,
    down_rows,
    empty,
    launch,
    packed_first,
    part,
    register,
    rows,
)
from twell.ops.operands import PackedOperands
from twell.ops.unpack import unpack

Outputs = tuple[Tensor, Tensor, Tensor]


def outputs(packed: PackedOperands, compression: int) -> Outputs:
    """Uninitialised y [M, K], l1 float32 [ceil(M/128), max(ceil(N/128), 128)] and sizes int32 [ceil(M/128) + 1].

    The operator returns all sizes but the last, which the kernels use. Raises unless words and spill are packed for x
    and w_down.
    """
    x, n = packed.x, packed.w_down.shape[0]
    if x is None:
        raise TypeError("x must be a tensor, got None")
    check_packed(packed.words, packed.spill, x.shape[0], n, compression, x.dtype)
    return results(x, n)


def results(x: Tensor, n: int) -> Outputs:
    """The same for ``n`` neurons."""
    tiles = blocks(x.shape[0], geometry.TOKEN_TILE)
    l1 = empty(x, (tiles, geometry.sums_per_tile(n)), torch.float32)
    return empty(x, x.shape), l1, empty(x, (tiles + 1,), torch.int32)


def union(sizes: Tensor) -> Tensor:
    """All sizes but the last."""
    # indexing would touch the device, which a fake tensor need not have
    return sizes.narrow(0, 0, sizes.shape[0] - 1)


@packed_first
def _fake(packed: PackedOperands, compression: int, activation: str = "relu") -> Outputs:
    x, _, _, w_up, w_down, b_up, b_down = packed
    activation_of(activation, gated=w_up is not None)
    y, l1, sizes = outputs(packed, compression)
    check_layer(x, w_up=w_up, w_down=w_down, b_up=b_up, b_down=b_down)
    return y, l1, union(sizes)


@packed_first
def on_cpu(packed: PackedOperands, compression: int, activation: str = "relu") -> Outputs:
    y, l1, found = _fake(*packed, compression, activation)
    x, words, spill, w_up, w_down, b_up, b_down = packed
    gate = unpack(words, spill, w_down.shape[0], compression)
    up = None if w_up is None else hybrid.project(x, w_up, b_up)
    hidden = activation_of(activation).hidden(gate.float(), up).masked_fill(gate == 0, 0)
    y.copy_(hybrid.project(hidden.to(x.dtype), w_down.t(), b_down))
    l1.zero_()
    for tile in range(len(found)):
        tokens = slice(tile * geometry.TOKEN_TILE, (tile + 1) * geometry.TOKEN_TILE)
        l1[tile, 0] = hidden[tokens].abs().sum()
        found[tile] = (gate[tokens] != 0).any(0).sum()
    return y, l1, found


@packed_first
def _cuda(packed: PackedOperands, compression: int, activation: str = "relu") -> Outputs:
    y, l1, sizes = found = outputs(packed, compression)
    check_alike(packed.w_down, w_up=packed.w_up)
    slices = geometry.union_slices(packed.x.shape[0], packed.w_down.shape[0])
    form = activation_of(activation, gated=packed.w_up is not None)
    by_slices(
        packed, slices, lambda first, last: (packed.words[first:last], packed.spill[first:last]), lambda: found, form
    )
    return y, l1, union(sizes)


def by_slices(
    packed: PackedOperands,
    slices: Sequence[tuple[int, int]],
    packed_of: Callable[[int, int], tuple[Tensor, ...]],
    results_of: Callable[[], Outputs],
    activation: Activation,
) -> Outputs:
    """Launch the kernels that fill what ``results_of`` allocates, and return it.

    ``packed_of(first, last)`` gives words and spill of a slice when it is its turn; also ``ops.screened.Lists`` if
    these have places in lists for neurons. The first is packed before the host does anything else: the GPU has work
    meanwhile.
    """
    x, _, _, w_up, w_down, b_up, b_down = packed
    n, k, dtype = *w_down.shape, x.dtype
    ready = packed_of(*slices[0]) if slices else None
    y, l1, sizes = found = results_of()
    w_down = hybrid.near_rows(down_rows(w_down))
    if w_up is not None:
        x, w_up = rows(x), rows(w_up)
    multiprocessors, tiles = device.sm_count(x.device.index), geometry.tiles(n)
    family = tuning.family(x.device.index)
    hybrid.require_neurons(n, family, 'strategy "union"')
    compact = tuning.compact(dtype, False, family)
    up = tuning.sampled_up(dtype, False, family)
    down = tuning.gathered(dtype, 0, family)
    # without an up projection the gates in the entries become h as they are read
    code, of_entries = activation.code(), activation.code() if w_up is None else RELU.code()
    plain = 1 + code if w_up is None else 0
    b_up, b_down = bias_vector("b_up", b_up, n, x), bias_vector("b_down", b_down, k, x)
    aside = hybrid.room_aside(x, n, multiprocessors)
    # the first slice is the longest; the others reuse its memory
    entries, neurons, chunks = _empty_lists(x, slices[0][1] if slices else 0, n)
    for first, last in slices:
        start, stop = first // geometry.TOKEN_TILE, geometry.token_tiles(last)
        # the element behind the sizes of a slice is zero until the next slice writes its first size there
        pattern = (entries, part(neurons, 0, stop - start), part(chunks, 0, stop - start), part(sizes, start, stop + 1))
        words, spill, *lists = ready or packed_of(first, last)
        ready = None
        sums, width = part(l1, start, stop), words.shape[1] // tiles
        # after a screen the words hold places in these lists, else neurons
        listed = (*lists, 1) if lists else (pattern[1], pattern[3], 0)
        launch(compact, words, spill, None, *pattern, None, sums, n, width, plain, geometry.MOST, *listed)
        if w_up is not None:
            own = part(x, first, last)
            launch(up, own, w_up, b_up, *pattern, None, None, sums, code, geometry.MOST, multiprocessors)
        # with an up projection h is now in the entries
        out = (part(y, first, last), aside, of_entries, geometry.MOST, multiprocessors)
        launch(down, None, w_down, None, None, b_down, *pattern, *out)
    return found


def _empty_lists(x: Tensor, m: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised entries, neurons and chunks as ``hybrid`` has them, with room for any pattern."""
    tiles, chunks = geometry.token_tiles(m), geometry.chunks(n)
    return (
        empty(x, m * n, torch.int32),
        empty(x, (tiles, geometry.CHUNK * chunks), torch.int16),
        empty(x, (tiles, chunks + 1), torch.int32),
    )


up_down_union = register(
    f'up_down_union(Tensor x, {PACKED}, int compression, str activation="relu") -> (Tensor y, Tensor l1, Tensor union)',
    fake=_fake,
    cpu=on_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
)
