"""The hybrid format of a training step, and the launches of backward.

Each tile of 128 tokens has a list of the neurons that any of its tokens fires, ascending. A neuron's position in the
list is its rank, and 64 ranks are a chunk. For M tokens, N neurons, B token tiles and C = ceil(N / 64) chunks, the
parts of the format are:

- sizes int32 [B+1]: the length of every list, then the number of non-zeros of all tokens.
- chunks int32 [B, C+1]: the first entry of each chunk and, in the last column, the end of the last one.
- neurons int16 [B, 64*C]: the lists, as unsigned bits; the last neuron repeats up to a multiple of 64.
- popularity int32 [N]: the number of non-zeros of each neuron; and counters int32 [8], zero, by which the CTAs of a
  kernel meet.
- entries int32, one per non-zero: ``value bits << 16 | token in its tile << 6 | rank in its chunk``, ascending by token
  tile, chunk, token and rank. There is room for ``geometry.hybrid_capacity`` of them. The up projections of the same
  non-zeros follow; see ``values``.

They lie in this order in one tensor ``kept`` int32, each part from a multiple of 256 bytes on: see ``parts``.

If there are more non-zeros than that, only the total in ``sizes`` and the popularity are valid, beside the first chunk,
which begins at entry 0, and backward computes the gate and the up projection again.

A layer that runs as slices of neurons (``geometry.neuron_slices``) keeps that of each, one after the other, from
multiples of 256 bytes on.
"""

import bisect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.base.activation import RELU, Activation, threshold_pair
from twell.choose import tuning
from twell.ops.library import bias_view, check, check_operands, down_rows
from twell.ops.operands import Gradients, bias_alone
from twell.runtime import geometry, specs
from twell.runtime.program import Program, View


class Kept(NamedTuple):
    """The parts of the hybrid format: tensors, or views of a program."""

    entries: Any
    neurons: Any
    chunks: Any
    sizes: Any
    popularity: Any
    counters: Any


class Backward(NamedTuple):
    """Operands of backward, tensors or views: dy [M, K], dl1 (0-d or None), the layer without b_down, and ``kept``."""

    dy: Any
    dl1: Any
    layer: Any
    kept: Any
    activation: Activation


# Words of which the places of parts are multiples, and of counters behind the popularity.
_PLACE, _COUNTERS = 64, 8


def _places(m: int, n: int) -> tuple[list[tuple[int, torch.dtype, tuple[int, ...]]], int]:
    """The first word, dtype and shape of each part before the entries, and the first word of those."""
    tiles, chunks = geometry.token_tiles(m), geometry.chunks(n)
    found: list[tuple[int, torch.dtype, tuple[int, ...]]] = []
    at = 0
    for dtype, shape in (
        (torch.int32, (tiles + 1,)),
        (torch.int32, (tiles, chunks + 1)),
        (torch.int16, (tiles, geometry.CHUNK * chunks)),
        (torch.int32, (n + _COUNTERS,)),
    ):
        found.append((at, dtype, shape))
        at += -(-_words(dtype, shape) // _PLACE) * _PLACE
    return found, at


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize // 4


def words(x: Tensor | View, n: int, gated: bool, held: int = 0) -> int:
    """Words of ``kept`` for the gate of ``x`` [M, ...] with ``n`` neurons; ``held``: non-zeros per token, 0: most."""
    at = 0
    for first, last in geometry.neuron_slices(n):
        at = -(-at // _PLACE) * _PLACE + words_of_slice(x, last - first, gated, held)
    return at


def words_of_slice(x: Tensor | View, n: int, gated: bool, held: int = 0) -> int:
    """The same of neurons that are one slice."""
    m = x.shape[0]
    return _places(m, n)[1] + geometry.hybrid_words(geometry.hybrid_capacity(m, n, held), 2 * gated)


def split(kept: Tensor, x: Tensor, n: int, gated: bool) -> list[tuple[int, int, Tensor, int]]:
    """(first, end, kept, held) of the slices of ``n`` neurons; a slice has room for ``held`` non-zeros per token."""
    if len(kept.shape) != 1:
        raise ValueError(f"kept must have one dimension, got {list(kept.shape)}")
    slices = geometry.neuron_slices(n)
    if len(slices) == 1:
        return [(0, n, kept, 0)]
    # the least for which it has this length, which may be a little less than what it was made for
    held = bisect.bisect_left(range(1, n), len(kept), key=lambda each: words(x, n, gated, each)) + 1
    expected = words(x, n, gated, held)
    if len(kept) != expected:
        raise ValueError(f"kept must be [{expected}] for {x.shape[0]} tokens of {n} neurons, got {list(kept.shape)}")
    found, at = [], 0
    for first, last in slices:
        at = -(-at // _PLACE) * _PLACE
        size = words_of_slice(x, last - first, gated, held)
        found.append((first, last, kept[at : at + size], held))
        at += size
    return found


def most_of_each(n: int) -> int:
    """How many of ``n`` neurons of every token the hybrid format holds."""
    return geometry.hybrid_capacity(8, n) // 8


def require_room(k: int, m: int, n: int, held: int, screen: bool) -> None:
    """NotImplementedError unless the hybrid format holds ``k`` of ``n`` neurons for each of ``m`` tokens.

    What is computed where it does not, and the int8 screen, choose no gates.
    """
    if screen or geometry.hybrid_capacity(m, n, held) < m * min(k, n):
        most = most_of_each(n)
        raise NotImplementedError(f'k must be at most {most} of {n} neurons in training, got {k}; "auto" is dense then')


def capacity_of(x: Tensor | View, n: int, gated: bool, kept: Tensor | View) -> int:
    """The non-zeros for which ``kept``, the gate of ``x`` with ``n`` neurons, has room."""
    m = x.shape[0]
    room = (kept.shape[0] - _places(m, n)[1]) // geometry.hybrid_words(8, 2 * gated) * 8
    return min(room, geometry.hybrid_capacity(m, n))


def parts(kept: Tensor | View, m: int, n: int) -> Kept:
    """The parts of ``kept``, the gate of ``m`` tokens with ``n`` neurons."""
    places, first = _places(m, n)
    places.append((first, torch.int32, (kept.shape[0] - first,)))
    found: Any
    if isinstance(kept, View):
        found = (kept.at(4 * at, dtype, *shape) for at, dtype, shape in places)
    else:
        found = (kept[at : at + _words(dtype, shape)].view(dtype).view(shape) for at, dtype, shape in places)
    sizes, chunks, neurons, popularity, entries = found
    own, counters = (
        popularity.part(*ends) if isinstance(kept, View) else popularity[slice(*ends)]
        for ends in ((0, n), (n, n + _COUNTERS))
    )
    return Kept(entries, neurons, chunks, sizes, own, counters)


def sizes(kept: Tensor, m: int) -> Tensor:
    """The first part: the length of the list of each tile of ``m`` tokens, then the number of non-zeros."""
    return kept[: geometry.token_tiles(m) + 1]


def unions(kept: Tensor, x: Tensor, n: int, gated: bool) -> Tensor:
    """How many of ``n`` neurons each tile of the tokens ``x`` [M, ...] fires; meaningless in over-full batches."""
    return torch.stack([sizes(own, x.shape[0])[:-1] for _, _, own, _ in split(kept, x, n, gated)]).sum(0)


def firing(kept: Tensor, x: Tensor, n: int, gated: bool) -> Tensor:
    """How many tokens of ``x`` [M, ...] fire each of ``n`` neurons, int32."""
    m = x.shape[0]
    found = [parts(own, m, last - first).popularity for first, last, own, _ in split(kept, x, n, gated)]
    return found[0] if len(found) == 1 else torch.cat(found)


def check_backward(given: Backward) -> None:
    """Raise unless the operands of backward fit each other."""
    dy, dl1, layer, kept, _ = given
    check_operands(layer)
    tokens, (n, k) = layer.tokens, layer.w_down.shape
    check("dy", dy, (tokens.shape[0], k), tokens.dtype)
    if dl1 is not None:
        check("dl1", dl1, (), torch.float32)
    m, gated = tokens.shape[0], layer.w_up is not None
    for first, last, own, _ in split(kept, tokens, n, gated) if layer.gate is None else [(0, n, kept, 0)]:
        held = geometry.hybrid_words(capacity_of(tokens, last - first, gated, own), 2 * gated)
        check("kept", own, (_places(m, last - first)[1] + held,), torch.int32)


def require_offsets(m: int, n: int) -> None:
    """Raise NotImplementedError if places in the entries of ``m`` tokens and ``n`` neurons exceed 32 bits."""
    # backward has two values side by side for each place
    if 2 * geometry.hybrid_capacity(m, n) > geometry.MOST:
        most = geometry.MOST // (2 * geometry.hybrid_capacity(8, n)) * 8
        raise NotImplementedError(f"with {n} neurons a training step takes at most {most} tokens, got {m}")


def require_neurons(n: int, family: str, call: str) -> None:
    """Raise NotImplementedError, naming ``call``, if kernels of ``family`` cannot list ``n`` neurons in this format."""
    most = geometry.PORTABLE_UNION_NEURONS
    if family == specs.PORTABLE and n > most:
        raise NotImplementedError(
            f"{call} takes at most {most} neurons on GPUs of other compute capability than 9.0, got {n}; "
            'use strategy "dense" or "auto"'
        )


def room_aside(p: Program, dtype: torch.dtype, terms: int) -> View:
    """Scratch to which CTAs flush sums of up to ``terms`` terms; empty if tensor cores sum these in one go."""
    return p.scratch(torch.float32, geometry.sums_aside(tuning.dtype_name(dtype), terms, p.multiprocessors))


def values(entries: Tensor, capacity: int, dtype: torch.dtype) -> Tensor:
    """A view of the up projections that follow the entries: [capacity]."""
    return entries[capacity : capacity + capacity * dtype.itemsize // 4].view(dtype)


def overflow(
    p: Program,
    given: Backward,
    w_down: View,
    capacity: int,
    out: Gradients,
    aside: View,
    counters: View,
    *,
    accumulate: bool = False,
    sums: View | None = None,
) -> None:
    """Launch the kernel that does a pass densely if there are more non-zeros than ``capacity``; w_down is [N, K].

    Without dy it is forward, ``out`` has y in place of dx, and ``sums`` [token tiles, ``geometry.training_sums``] are
    those of |h|. Backward fills ``out``, and takes dl1 [1]. ``aside`` is ``room_aside`` for n terms; in
    backward for m, too, and 2n of a layer with an up projection. ``counters``: ``geometry.OVERFLOW_COUNTERS`` of int32,
    zero when the kernel begins.
    """
    dy, dl1, layer, kept, activation = given
    x, w_gate, w_up, _, *biases, gate = layer.unscaled
    (n, k), dtype, gated = w_down.shape, w_down.dtype, int(w_up is not None)
    # any matrix of their shape stands for operands that there are not
    tokens = next(t for t in (x, dy, out.x) if t is not None)
    up = w_down if w_up is None else w_up
    m, weights = tokens.shape[0], (out.w_gate if gate is None else None, out.w_up, out.w_down)
    slabs, slice_size = 1, min(m, geometry.OVERFLOW_FORWARD)
    if dy is not None:
        slabs = 2 + gated
        slice_size = geometry.overflow_tokens(m, n, k, slabs, 0 if accumulate else slabs)

    def or_none(view: View | None, *shape: int, dtype: torch.dtype = dtype) -> View:
        return p.scratch(dtype, *shape) if view is None else view

    # slices add up in fp32, and the last one rounds
    rows = [n if w is not None and m > slice_size else 0 for w in weights]
    totals = weights if accumulate else [p.scratch(torch.float32, of_sums, k) for of_sums in rows]
    d_biases = [bias_alone(b, n) for b in out[4:6]]
    lines = -(-m // geometry.OVERFLOW_SUM) if any(b is not None for b in d_biases) else 0
    p.launch(
        tuning.overflow(dtype),
        *(or_none(dy, 0, k), tokens, up if w_gate is None else w_gate, up, w_down, *(or_none(b, 0) for b in biases)),
        *(or_none(dl1, 0, dtype=torch.float32), kept.sizes, capacity),
        *(gated, activation.code(), threshold_pair(activation, dtype), p.scratch(dtype, slabs, slice_size, n)),
        *(or_none(out.x, 0, k), *(or_none(None if accumulate else w, 0, k) for w in weights)),
        *(or_none(t, 0, k, dtype=torch.float32) for t in totals),
        int(accumulate),
        *(or_none(sums, 0, 0, dtype=torch.float32), p.scratch(torch.float32, lines, 2 * n)),
        *(*(or_none(b, 0) for b in d_biases), aside, counters, or_none(gate, 0, n), or_none(out.gate, 0, n)),
        p.multiprocessors,
    )


def launches(p: Program, given: Backward, out: Gradients, accumulate: bool, first: int = 0) -> None:
    """Launch backward, which fills the gradients of ``out``, those of weights and biases all or none.

    Gradients of weights have rows that kernels can write. They are added to if ``accumulate``, in float32. That
    of a given gate [M, N] is zero before. Of weights the columns from ``first`` on are filled, or more.
    """
    weight_grad = out.w_down is not None
    if out.x is None and out.gate is None and not weight_grad:
        return
    dy, dl1, layer, tensor, activation = given
    x, w_gate, w_up = layer[:3]
    (m, k), n, dtype, gated = dy.shape, layer.w_down.shape[1], dy.dtype, w_up is not None
    capacity, family = capacity_of(dy, n, gated, tensor), tuning.family(p.index)
    kept = parts(tensor, m, n)
    # without a gradient of l1 the first chunk's zero
    dl1 = kept.chunks.at(0, torch.float32, 1) if dl1 is None else dl1.at(0, torch.float32, 1)
    given = given._replace(dl1=dl1, kept=kept)
    entries, neurons, chunks, sizes, popularity, _ = kept
    pattern = (entries, neurons, chunks, sizes)
    w_down, up = down_rows(p, layer.w_down), entries.at(4 * capacity, dtype, capacity) if gated else None

    d_gate = p.scratch(torch.int32, capacity)
    d_up = p.scratch(torch.int32, capacity) if gated else None
    by_entry = (up, dl1, d_gate, d_up, activation.code())
    p.launch(tuning.sampled_grad(dtype, gated, family=family), dy, w_down, *pattern, *by_entry, p.multiprocessors)
    if out.gate is not None:
        p.launch(specs.ScatterSpec(), d_gate, *pattern, out.gate._replace(dtype=torch.int16), capacity)
    if out.x is not None:
        # the rounded ones of two values in each word
        rounded = (None if d is None else d._replace(dtype=dtype, strides=(2,)) for d in (d_gate, d_up))
        factors = [pair for pair in zip(rounded, (w_gate, w_up)) if None not in pair]
        absent = [(None, None)] * (2 - len(factors))
        coefficients = (*factors[0], *[*factors, *absent][1], bias_view(p, None, dtype))
        aside = room_aside(p, dtype, 2 * n if gated else n)
        last = (out.x, aside, RELU.code(), capacity, p.multiprocessors)
        p.launch(tuning.gathered(dtype, len(factors), family=family), *coefficients, *pattern, *last)
    if not weight_grad:
        aside = room_aside(p, dtype, 2 * n if gated else n)
        counters = p.cleared(torch.int32, geometry.OVERFLOW_COUNTERS)
        overflow(p, given, w_down, capacity, out, aside, counters, accumulate=accumulate)
        return

    order, slot = p.scratch(torch.int32, n), p.scratch(torch.int32, n)
    # long lists of tokens are cut: their sums are joined in memory
    bias = layer.b_gate is not None or layer.b_up is not None
    units = geometry.cut_units(m, k - first, bias)
    # all counters of this pass, which are cleared here
    arrivals = p.scratch(torch.int32, units * geometry.UNIT_WARPS + geometry.OVERFLOW_COUNTERS)
    p.launch(specs.RankSpec(), popularity, order, slot, arrivals, p.multiprocessors)
    neuron_tiles, token_tiles = -(-n // geometry.NEURON_TILE), geometry.token_tiles(m)
    groups = p.scratch(torch.int32, neuron_tiles, token_tiles, 2)
    tiles = p.scratch(torch.int32, neuron_tiles, 5)
    starts = p.scratch(torch.int32, neuron_tiles, geometry.chunks(2 * m) + 1)
    # entries of rare neuron tiles stand twice
    room = capacity + min(capacity, neuron_tiles * geometry.RARE_ENTRIES)
    packed, tokens = p.scratch(torch.int64, room), p.scratch(torch.int32, room)
    by_neuron = (groups, tiles, starts, packed, tokens)
    p.launch(
        tuning.transpose(dtype, gated, family=family), *pattern, up, d_gate, d_up, slot, *by_neuron, activation.code()
    )

    # a layer with one of two biases still needs memory for the other's gradient
    unasked = p.scratch(dtype, n if bias else 0)
    db_gate, db_up = (unasked if g is None else bias_alone(g, n) for g in (out.b_gate, out.b_up))
    db_up = db_up if gated else None
    aside = room_aside(p, dtype, max(m, 2 * n if gated else n))
    # the gradients are stored, or added to fp32 sums; the others are empty
    tokens_of = dy if x is None else x
    if layer.gate is not None:
        # the kernel computes it with that of w_up
        out = out._replace(w_gate=p.scratch(dtype, n, k))
    wanted = [None if w is None else w.from_column(first) for w in out[1:4]]
    nothing = p.scratch(dtype if accumulate else torch.float32, 0, k - first)
    nothings = [None if w is None else nothing for w in wanted]
    stored, added = (nothings, wanted) if accumulate else (wanted, nothings)
    partial = p.scratch(torch.float32, units * geometry.UNIT_SUMS)
    gradients = (*stored, db_gate, db_up, *added, aside, partial, arrivals)
    operands = (tokens_of.from_column(first), dy.from_column(first), order, sizes, tiles, starts, packed, tokens)
    p.launch(tuning.weight_grad(dtype, gated, family=family), *operands, *gradients, capacity, p.multiprocessors)
    counters = arrivals.part(units * geometry.UNIT_WARPS, arrivals.shape[0])
    overflow(p, given, w_down, capacity, out, aside, counters, accumulate=accumulate)
