"""``up_down_union``: ``up_down`` by tiles of 128 tokens, on tensor cores. Strategy "union".

Each tile gathers the weight rows in the union of its tokens' neurons once. Any pattern is exact. If the union is all
neurons, the products are those of dense PyTorch, and gathering rows is overhead.
h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]) for the non-zeros of the gate, without ``w_up`` h = gate;
y = h @ w_down + b_down. h is rounded to x's dtype, once, as in dense PyTorch. ``activation`` as in ``up_down``.

Operands are those of ``up_down``; without ``w_up`` only the shape of x is read. With T = ceil(N / 256) l1 is float32
[ceil(M / 128), max(128, T)], partial sums of |h| for each tile, and union int32 [ceil(M / 128)], the number of neurons
that each tile fires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from twell import tuning
from twell._activation import RELU, Activation, activation_of
from twell._runtime import geometry
from twell._runtime.program import Program, View
from twell.ops import hybrid
from twell.ops.library import (
    PACKED,
    Shape,
    bias_view,
    blocks,
    check_layer,
    check_packed,
    down_rows,
    grouped,
    laid_bias,
    new,
    readable_down,
    register,
    rows,
)
from twell.ops.operands import PackedOperands, Scaled, launched, run
from twell.ops.unpack import unpack

Outputs = tuple[Tensor, Tensor, Tensor]


def shapes(x: Tensor | View, n: int) -> tuple[Shape, Shape, Shape]:
    """Of y [M, K], l1 float32 [ceil(M/128), max(ceil(N/128), 128)] and sizes int32 [ceil(M/128) + 1].

    The operator returns all sizes but the last, which the kernels use.
    """
    tiles = blocks(x.shape[0], geometry.TOKEN_TILE)
    return (x.dtype, *x.shape), (torch.float32, tiles, geometry.sums_per_tile(n)), (torch.int32, tiles + 1)


def union(sizes: Tensor) -> Tensor:
    """All sizes but the last."""
    # indexing would touch the device, which a fake tensor need not have
    return sizes.narrow(0, 0, sizes.shape[0] - 1)


@grouped(PackedOperands)
def outputs(packed: PackedOperands, compression: int, activation: str = "relu") -> Outputs:
    """The same uninitialised; raises unless the operands fit each other."""
    x, words, spill, w_up, w_down, b_up, b_down = packed
    activation_of(activation, gated=w_up is not None)
    if x is None:
        raise TypeError("x must be a tensor, got None")
    check_packed(words, spill, x.shape[0], w_down.shape[0], compression, x.dtype)
    check_layer(x, w_up=w_up, w_down=w_down, b_up=b_up, b_down=b_down)
    y, l1, sizes = new(x, shapes(x, w_down.shape[0]))
    return y, l1, sizes


def _fake(*arguments: Any) -> Outputs:
    y, l1, sizes = outputs(*arguments)
    return y, l1, union(sizes)


@grouped(PackedOperands)
def on_cpu(packed: PackedOperands, compression: int, activation: str = "relu") -> Outputs:
    y, l1, found = _fake(*packed, compression, activation)
    x, words, spill, w_up, w_down, b_up, b_down = packed
    gate = unpack(words, spill, w_down.shape[0], compression)
    up = None if w_up is None else hybrid.project(x, w_up, b_up)
    hidden = activation_of(activation).hidden(gate.float(), up).masked_fill(gate == 0, 0)
    y.copy_(hybrid.project(hidden.to(x.dtype), w_down.t(), b_down))
    figures_on_cpu(gate, hidden, l1, found)
    return y, l1, found


def figures_on_cpu(gate: Tensor, hidden: Tensor, l1: Tensor, found: Tensor) -> None:
    """Write the sum of |h| and the number of neurons that fire of each tile of tokens."""
    l1.zero_()
    for tile in range(len(found)):
        tokens = slice(tile * geometry.TOKEN_TILE, (tile + 1) * geometry.TOKEN_TILE)
        l1[tile, 0] = hidden[tokens].abs().sum()
        found[tile] = (gate[tokens] != 0).any(0).sum()


@grouped(PackedOperands)
def _cuda(packed: PackedOperands, compression: int, activation: str = "relu") -> Outputs:
    y, l1, sizes = found = outputs(*packed, compression, activation)
    x, words, spill, w_up, w_down, b_up, b_down = packed
    if len(x):
        up = None if w_up is None else rows(w_up)
        given = rows(x), words, spill, up, readable_down(w_down.t()), laid_bias(b_up), laid_bias(b_down)
        run(_build, (*given, *found), activation_of(activation, gated=w_up is not None))
    return y, l1, union(sizes)


def _build(p: Program, x: View, words: View, spill: View, *others: Any) -> None:
    w_up, w_down, b_up, b_down, y, l1, sizes, activation = others
    by_slices(
        p,
        (x, w_up, w_down, b_up, b_down),
        lambda *part: (words.part(*part), spill.part(*part)),
        (y, l1, sizes),
        activation,
    )


def by_slices(
    p: Program,
    behind: tuple[View | Scaled, View | Scaled | None, View | Scaled, View | None, View | None],
    packed_of: Callable[[int, int], tuple[View, ...]],
    results: Sequence[View],
    activation: Activation,
) -> None:
    """Launch what fills ``results``: y, l1 and sizes, slice by slice.

    ``behind``: x, w_up, w_down [K, N], b_up and b_down. ``packed_of(first, last)`` launches what packs a slice,
    and gives its words and spill; also ``ops.screened.Lists`` if these have places in lists for neurons.
    """
    x, w_up, w_down, b_up, b_down = behind
    y, l1, sizes = results
    n, dtype, ctas = w_down.shape[1], y.dtype, p.multiprocessors
    slices, tiles = geometry.union_slices(x.shape[0], n), geometry.tiles(n)
    family = tuning.family(p.index)
    hybrid.require_neurons(n, family, 'strategy "union"')
    # without an up projection the gates in the entries become h as they are read
    code, of_entries = activation.code(), activation.code() if w_up is None else RELU.code()
    plain, most = 1 + code if w_up is None else 0, geometry.MOST
    aside = hybrid.room_aside(p, dtype, n)
    # the first slice is the longest; the others reuse its memory
    longest = slices[0][1]
    entries = p.scratch(torch.int32, longest * n)
    neurons = p.scratch(torch.int16, geometry.token_tiles(longest), geometry.CHUNK * geometry.chunks(n))
    chunks = p.scratch(torch.int32, geometry.token_tiles(longest), geometry.chunks(n) + 1)
    down: View | Scaled | None = None
    for first, last in slices:
        start, stop = first // geometry.TOKEN_TILE, geometry.token_tiles(last)
        # the element behind the sizes of a slice is zero until the next slice writes its first size there
        pattern = entries, neurons.part(0, stop - start), chunks.part(0, stop - start), sizes.part(start, stop + 1)
        words, spill, *lists = packed_of(first, last)
        sums, width = l1.part(start, stop), words.shape[1] // tiles
        # after a screen the words hold places in these lists, else neurons
        listed: tuple[Any, ...] = (*lists, 1) if lists else (pattern[1], pattern[3], 0)
        compact = tuning.compact(dtype, False, family=family)
        p.launch(compact, words, spill, None, *pattern, None, sums, n, width, plain, most, *listed)
        if w_up is not None:
            up = tuning.sampled_up(x.dtype, False, family=family)
            own, up_bias = launched(x.part(first, last)), bias_view(p, b_up, dtype)
            p.launch(up, *own, *launched(w_up), up_bias, *pattern, None, None, sums, code, most, ctas)
        # with an up projection h is now in the entries
        down = down_rows(p, w_down) if down is None else down
        down_bias, out = bias_view(p, b_down, dtype), (y.part(first, last), aside, of_entries, most, ctas)
        rows = launched(down)
        p.launch(tuning.gathered(down.dtype, 0, family=family), None, *rows, None, None, down_bias, *pattern, *out)


up_down_union = register(
    f'up_down_union(Tensor x, {PACKED}, int compression, str activation="relu") -> (Tensor y, Tensor l1, Tensor union)',
    fake=_fake,
    cpu=on_cpu,
    cuda=_cuda,
)
