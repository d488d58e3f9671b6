"""The hybrid format of a training step, its reader and writer on the CPU, and the launches of backward.

Each tile of 128 tokens has a list of the neurons that any of its tokens fires, ascending. A neuron's position in the
list is its rank, and 64 ranks are a chunk. For M tokens, N neurons, B token tiles and C = ceil(N / 64) chunks:

- sizes int32 [B+1]: the length of every list, then the number of non-zeros of all tokens.
- neurons int16 [B, 64*C]: the lists, as unsigned bits; the last neuron repeats up to a multiple of 64.
- chunks int32 [B, C+1]: the first entry of each chunk and, in the last column, the end of the last one.
- entries int32, one per non-zero: ``value bits << 16 | token in its tile << 6 | rank in its chunk``, ascending by token
  tile, chunk, token and rank. There is room for ``geometry.hybrid_capacity`` of them. The up projections of the same
  non-zeros follow; see ``values``.
- popularity int32 [N]: the number of non-zeros of each neuron.

If there are more non-zeros than that, only the total in ``sizes`` is valid, beside ``zero``, and backward computes the
gate and the up projection again.

On the CPU values may be wider than 16 bits. Then the entries hold none, and the values follow the up projections.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import tuning
from twell._activation import RELU, Activation, threshold_pair
from twell._runtime import device, geometry, specs
from twell._runtime.program import Program, View
from twell.ops.library import (
    bias_vector,
    check,
    check_alike,
    check_layer,
    down_rows,
    empty,
    launch,
    rows,
)
from twell.ops.operands import Gradients, Operands


class Kept(NamedTuple):
    """The gate in the hybrid format, with its up projections: kept for backward, beside the operands."""

    entries: Tensor
    neurons: Tensor
    chunks: Tensor
    sizes: Tensor
    popularity: Tensor


class Backward(NamedTuple):
    """The operands of both operators of backward: dy [M, K], dl1 (0-d), the layer without b_down and its gate."""

    dy: Tensor
    dl1: Tensor
    layer: Operands
    kept: Kept
    activation: Activation


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over operands of ``dtype``: float32, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def empty_kept(x: Tensor, n: int, gated: bool, held: int = 0) -> Kept:
    """Uninitialised tensors for the gate of ``x`` [M, K] with ``n`` neurons; ``held``: non-zeros per token, 0: most."""
    shapes = _kept_shapes(x, n, gated, geometry.hybrid_capacity(x.shape[0], n, held))
    return Kept(*(empty(x, shape, _KEPT_DTYPES.get(name, torch.int32)) for name, shape in shapes.items()))


_KEPT_DTYPES = {"neurons": torch.int16}


def capacity_of(x: Tensor, n: int, gated: bool, entries: Tensor) -> int:
    """The non-zeros for which ``entries`` of the gate of ``x`` with ``n`` neurons has room."""
    room = entries.shape[0] // geometry.hybrid_words(8, _value_bytes(x, gated)) * 8
    return min(room, geometry.hybrid_capacity(x.shape[0], n))


def _value_bytes(x: Tensor, gated: bool) -> int:
    return (gated + (x.dtype.itemsize > 2)) * x.dtype.itemsize


def _kept_shapes(x: Tensor, n: int, gated: bool, capacity: int) -> dict[str, tuple[int, ...]]:
    tiles, chunks = geometry.token_tiles(x.shape[0]), geometry.chunks(n)
    return {
        "entries": (geometry.hybrid_words(capacity, _value_bytes(x, gated)),),
        "neurons": (tiles, geometry.CHUNK * chunks),
        "chunks": (tiles, chunks + 1),
        "sizes": (tiles + 1,),
        "popularity": (n,),
    }


def zero(kept: Kept) -> Tensor:
    """A zero (0-d, float32) of the gate of one token or more, in memory: the first chunk begins at entry 0."""
    return kept.chunks.view(torch.float32)[0, 0]


def check_backward(given: Backward) -> None:
    """Raise unless the operands of backward fit each other."""
    dy, dl1, layer, kept, _ = given
    x, w_gate, w_up = layer[:3]
    check_layer(*layer, wide=True)
    check("dy", dy, x.shape, x.dtype)
    check("dl1", dl1, (), accumulator(x.dtype))
    about = x, w_gate.shape[0], w_up is not None
    for (name, shape), tensor in zip(_kept_shapes(*about, capacity_of(*about, kept.entries)).items(), kept):
        check(name, tensor, shape, _KEPT_DTYPES.get(name, torch.int32))


def require_offsets(m: int, n: int) -> None:
    """Raise NotImplementedError if places in the entries of ``m`` tokens and ``n`` neurons exceed 32 bits."""
    # backward has two values side by side for each place
    if 2 * geometry.hybrid_capacity(m, n) > geometry.MOST:
        most = geometry.MOST // (2 * geometry.hybrid_capacity(8, n)) * 8
        raise NotImplementedError(f"with {n} neurons a training step takes at most {most} tokens, got {m}")


def require_neurons(n: int, family: str, call: str) -> None:
    """Raise NotImplementedError if kernels of ``family`` cannot bring a pattern of ``n`` neurons to this format.

    The error names ``call``, which needs that.
    """
    most = geometry.PORTABLE_UNION_NEURONS
    if family == specs.PORTABLE and n > most:
        raise NotImplementedError(
            f"{call} takes at most {most} neurons on GPUs of other compute capability than 9.0, got {n}; "
            'use strategy "dense" or "auto"'
        )


def near_rows(matrix: Tensor) -> Tensor:
    """``rows`` that kernels find by 32-bit offsets of 16 bytes: a copy where they are spread over more than 64 GB.

    Raises NotImplementedError where even a copy is larger.
    """
    reach = 8 << 32
    laid = rows(matrix)
    if laid.shape[0] * laid.stride(0) > reach:
        if matrix.numel() > reach:
            raise NotImplementedError(f"a training step takes matrices of at most {reach} values, got {matrix.numel()}")
        laid = laid.clone(memory_format=torch.contiguous_format)
    return laid


def room_aside(p: Program, dtype: torch.dtype, terms: int) -> View:
    """Scratch to which CTAs flush sums of up to ``terms`` terms; empty if tensor cores sum these in one go."""
    return p.scratch(torch.float32, geometry.sums_aside(tuning.dtype_name(dtype), terms, p.multiprocessors))


def values(entries: Tensor, capacity: int, dtype: torch.dtype, count: int) -> Tensor:
    """A view of the ``count`` values of ``dtype`` per entry that follow the entries: [count, capacity]."""
    behind = entries[capacity : capacity + capacity * count * dtype.itemsize // 4]
    return behind.view(dtype).view(count, capacity)


# On the CPU


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight^T + bias`` [M, N], summed and returned in ``accumulator``'s dtype."""
    wide = accumulator(x.dtype)
    out = x.to(wide) @ weight.to(wide).t()
    return out if bias is None else out.add_(bias.to(wide))


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` rounded to ``dtype``, in their own."""
    return values.to(dtype).to(values.dtype)


def encode(gate: Tensor, up: Tensor | None, kept: Kept) -> None:
    """Write ``gate`` and ``up`` [M, N], both of the layer's dtype, into ``kept``; unused elements become 0."""
    m, n = gate.shape
    active = gate != 0
    for tensor in kept:
        tensor.zero_()
    kept.popularity.copy_(active.sum(0))
    total, stored = int(active.sum()), [] if up is None else [up]
    kept.sizes[-1] = min(total, geometry.MOST)
    capacity = capacity_of(gate, n, up is not None, kept.entries)
    if total > capacity:
        return

    tiles, chunks = geometry.token_tiles(m), geometry.chunks(n)
    union = F.pad(active, (0, 0, 0, -m % geometry.TOKEN_TILE)).view(tiles, geometry.TOKEN_TILE, n).any(1)
    lengths, ranks = union.sum(1), union.cumsum(1) - 1
    kept.sizes[:-1] = lengths
    tile, neuron = union.nonzero(as_tuple=True)
    kept.neurons[tile, ranks[tile, neuron]] = neuron.short()
    place = torch.arange(geometry.CHUNK * chunks, device="cpu")
    last = kept.neurons.gather(1, (lengths - 1).clamp(min=0)[:, None])
    repeats = (place >= lengths[:, None]) & (place < -(-lengths // geometry.CHUNK)[:, None] * geometry.CHUNK)
    kept.neurons.copy_(torch.where(repeats, last, kept.neurons))

    token, neuron = active.nonzero(as_tuple=True)
    rank = ranks[token // geometry.TOKEN_TILE, neuron]
    run = token // geometry.TOKEN_TILE * chunks + rank // geometry.CHUNK
    word = token % geometry.TOKEN_TILE << 6 | rank % geometry.CHUNK
    order = (run << 13 | word).argsort()
    token, neuron = token[order], neuron[order]
    starts = F.pad(run.bincount(minlength=tiles * chunks).cumsum(0), (1, 0)).int()
    if tiles:
        kept.chunks.copy_(starts.unfold(0, chunks + 1, chunks))
    if gate.dtype.itemsize > 2:
        kept.entries[:total] = word[order].int()
        stored.append(gate)
    else:
        kept.entries[:total] = gate.view(torch.int16)[token, neuron].int() << 16 | word[order].int()
    behind = values(kept.entries, capacity, gate.dtype, len(stored))
    for target, dense in zip(behind, stored):
        target[:total] = dense[token, neuron]


def decode(layer: Operands, kept: Kept, activation: Activation = RELU) -> tuple[Tensor, Tensor | None]:
    """The gate and the up projection, if there is one, at its non-zeros: dense [M, N] of ``accumulator``'s dtype."""
    x, w_gate, w_up, _, b_gate, b_up, _ = layer
    m, n, dtype = x.shape[0], w_gate.shape[0], x.dtype
    capacity, wide = capacity_of(x, n, w_up is not None, kept.entries), accumulator(dtype)
    total = int(kept.sizes[-1])
    if total > capacity:
        gate = activation.after(project(x, w_gate, b_gate).to(dtype)).to(wide)
        return gate, None if w_up is None else project(x, w_up, b_up).masked_fill_(gate == 0, 0)

    entries, chunks = kept.entries[:total], geometry.chunks(n)
    run = torch.arange(kept.neurons.shape[0] * chunks, device="cpu").repeat_interleave(
        kept.chunks.diff(dim=1).flatten()
    )
    tile = run // chunks
    token = tile * geometry.TOKEN_TILE + (entries >> 6 & geometry.TOKEN_TILE - 1)
    neuron = kept.neurons[tile, run % chunks * geometry.CHUNK + (entries & geometry.CHUNK - 1)].long() & 0xFFFF

    def dense(at_entries: Tensor) -> Tensor:
        return torch.zeros(m, n, dtype=wide, device="cpu").index_put_((token, neuron), at_entries[:total].to(wide))

    stored = (w_up is not None) + (dtype.itemsize > 2)
    behind = values(kept.entries, capacity, dtype, stored)
    gate = dense(behind[-1] if dtype.itemsize > 2 else (entries >> 16).short().view(dtype))
    return gate, None if w_up is None else dense(behind[0])


def rare(popularity: Tensor) -> Tensor:
    """Which neurons [N] are in a tile, by popularity, of at most ``geometry.RARE_ENTRIES`` non-zeros."""
    counts, order = popularity.sort(descending=True, stable=True)
    tiles = F.pad(counts, (0, -len(counts) % geometry.NEURON_TILE)).view(-1, geometry.NEURON_TILE).sum(1)
    few = (tiles <= geometry.RARE_ENTRIES).repeat_interleave(geometry.NEURON_TILE)[: len(counts)]
    return torch.empty_like(few).scatter_(0, order, few)


def backward_cpu(given: Backward, out: Gradients, accumulate: bool) -> None:
    """Fill ``out`` by dense matrix products of the decoded gate, rounded where the kernels round."""
    dy, dl1, layer, kept, activation = given
    dtype = layer.x.dtype
    gate, up = decode(layer, kept, activation)
    hidden = activation.hidden(gate, up).masked_fill(gate == 0, 0)
    dh = project(dy, layer.w_down, None).add_(dl1 * hidden.sign()).masked_fill_(gate == 0, 0)
    wide_gate, wide_up = activation.gradients(dh, gate, up)
    d_gate, d_up = rounded(wide_gate, dtype), None if wide_up is None else rounded(wide_up, dtype)

    # for rare neurons the weights' gradients add the rounding errors of their coefficients, too
    again = rare(kept.popularity) & (
        kept.sizes[-1] <= capacity_of(layer.x, gate.shape[1], up is not None, kept.entries)
    )

    def for_weights(values: Tensor) -> Tensor:
        first = rounded(values, dtype)
        return torch.where(again & first.isfinite(), first + rounded(values - first, dtype), first)

    def product(coefficients: Tensor, matrix: Tensor) -> Tensor:
        return coefficients @ matrix.to(coefficients.dtype)

    if out.x is not None:
        dx = product(d_gate, layer.w_gate)
        if d_up is not None and layer.w_up is not None:
            dx += product(d_up, layer.w_up)
        out.x.copy_(dx)
    for target, coefficients, matrix in (
        (out.w_gate, wide_gate, layer.x),
        (out.w_up, wide_up, layer.x),
        (out.w_down, hidden, dy),
    ):
        if target is not None and coefficients is not None:
            gradient = product(for_weights(coefficients).t(), matrix)
            target.add_(gradient) if accumulate else target.copy_(gradient)
    for target, coefficients in ((out.b_gate, wide_gate), (out.b_up, wide_up)):
        if target is not None and coefficients is not None:
            target.copy_(for_weights(coefficients).sum(0))


# On the GPU


_BIASES = Operands._fields[4:]


def overflow_forward(
    layer: Operands, kept: Kept, capacity: int, activation: Activation, y: Tensor, sums: Tensor, aside: Tensor
) -> None:
    """Launch the kernel that fills y and ``sums``, of |h|, densely if there are more non-zeros than ``capacity``.

    ``sums`` is [token tiles, ``geometry.training_sums``] and ``aside`` is ``room_aside`` for n terms. ``popularity``
    of so many non-zeros is zero, as nothing has counted them: the kernel's CTAs meet there.
    """
    x, w_gate, w_up, w_down, *given = layer
    (m, k), n = x.shape, len(w_gate)
    biases = (bias_vector(*each, x) for each in zip(_BIASES, given, (n, n, k)))
    scratch = x.new_empty((1, min(m, geometry.OVERFLOW_FORWARD), n))
    form = int(w_up is not None), activation.code(), threshold_pair(activation, x.dtype)
    over = (kept.sizes, capacity, *form, scratch)
    weights = (w_gate, w_gate if w_up is None else w_up, w_down)
    own = (y, sums, aside, kept.popularity, device.sm_count(x.device.index))
    spec = tuning.overflow(x.dtype, "forward", tuning.family(x.device.index))
    launch(spec, x, *weights, *biases, *over, *own)


def overflow_backward(
    given: Backward, capacity: int, out: Gradients, accumulate: bool, aside: Tensor, counters: Tensor
) -> Callable[[], None]:
    """A function that launches the kernel that fills ``out`` densely if there are more non-zeros than ``capacity``.

    ``aside`` is ``room_aside`` for m and for n terms, 2n of a layer with an up projection. ``counters`` is int32
    [``geometry.OVERFLOW_COUNTERS``], zero when the kernel begins.
    """
    dy, dl1, layer, kept, activation = given
    x, w_gate, w_up, w_down, b_gate, b_up, _ = layer
    (m, k), n, gated = x.shape, len(w_gate), int(w_up is not None)
    biases = (bias_vector(*each, n, x) for each in zip(_BIASES, (b_gate, b_up)))
    slice_size = min(m, geometry.OVERFLOW_BACKWARD)
    form = gated, activation.code(), threshold_pair(activation, x.dtype)
    over = (kept.sizes, capacity, *form, x.new_empty((2 + gated, slice_size, n)))
    none, wide = x.new_empty((0, k)), x.new_empty((0, k), dtype=torch.float32)
    dx, *weights = (none if g is None else g for g in out[:4])
    sums = [wide] * 3
    if accumulate:
        weights, sums = [none] * 3, [wide if g is None else g for g in out[1:4]]
    elif m > slice_size:
        # slices add up in fp32, and the last one rounds
        sums = [torch.empty_like(w, dtype=torch.float32) for w in weights]
    d_biases = [none.view(-1) if b is None else b for b in out[4:6]]
    lines = -(-m // geometry.OVERFLOW_SUM) if any(len(b) for b in d_biases) else 0
    by_token = x.new_empty((lines, 2 * n), dtype=torch.float32)
    ctas = device.sm_count(x.device.index)
    own = (dx, *weights, *sums, int(accumulate), by_token, *d_biases, aside, counters, ctas)
    operands = (w_gate, w_gate if w_up is None else w_up, w_down, *biases, dl1)
    spec = tuning.overflow(x.dtype, "backward", tuning.family(x.device.index))
    return functools.partial(launch, spec, dy, x, *operands, *over, *own)


def backward_cuda(
    given: Backward, dx: Tensor | None, weights: Callable[[], Gradients] | None, accumulate: bool
) -> Gradients:
    """Launch the kernels that fill ``dx`` and the gradients that ``weights`` allocates; return the gradients.

    ``weights`` returns tensors for all weights, with rows that kernels can write, and biases. It is called late, after
    most of the scratch memory has been given back.
    """
    none = Gradients(dx)
    if dx is None and weights is None:
        return none
    dy, dl1, layer, kept, activation = given
    x, w_gate, w_up, w_down = layer[:4]
    check_alike(w_gate, w_up=w_up, w_down=w_down)
    (m, k), n, dtype, gated = x.shape, w_gate.shape[0], x.dtype, w_up is not None
    multiprocessors = device.sm_count(x.device.index)
    capacity = capacity_of(x, n, gated, kept.entries)
    entries, neurons, chunks, sizes, popularity = kept
    pattern = (entries, neurons, chunks, sizes)
    x, dy, w_gate, w_down = near_rows(x), near_rows(dy), near_rows(w_gate), near_rows(down_rows(w_down))
    w_up = None if w_up is None else near_rows(w_up)
    up = values(entries, capacity, dtype, 1)[0] if gated else None
    dl1 = vector(dl1.reshape(1), 1, dl1)

    d_gate = empty(sizes, capacity)
    d_up = empty(sizes, capacity) if gated else None
    by_entry = (up, dl1, d_gate, d_up, activation.code())
    family = tuning.family(x.device.index)
    launch(tuning.sampled_grad(dtype, gated, family), dy, w_down, *pattern, *by_entry, multiprocessors)
    del by_entry
    if dx is not None:
        gathered = tuning.gathered(dtype, 2 if gated else 1, family)
        # the rounded ones of two values in each word
        gate_rounded, up_rounded = (None if d is None else d.view(dtype)[::2] for d in (d_gate, d_up))
        aside = room_aside(x, 2 * n if gated else n, multiprocessors)
        coefficients = (gate_rounded, w_gate, up_rounded, w_up, bias_vector("bias", None, 0, x))
        launch(gathered, *coefficients, *pattern, dx, aside, RELU.code(), capacity, multiprocessors)
        del gate_rounded, up_rounded, coefficients
        del aside
    laid = Backward(dy, dl1, layer._replace(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down), kept, activation)
    if weights is None:
        aside = room_aside(x, 2 * n if gated else n, multiprocessors)
        counters = popularity.new_zeros(geometry.OVERFLOW_COUNTERS)
        overflow_backward(laid, capacity, none, accumulate, aside, counters)()
        return none

    order, slot = empty(popularity, n), empty(popularity, n)
    # long lists of tokens are cut: their sums are joined in memory
    bias = layer.b_gate is not None or layer.b_up is not None
    # bias gradients are units of their own in the portable family
    parts = 2 * -(-k // geometry.SLAB) + int(bias and family != specs.SM90)
    units = geometry.cut_units(m, parts)
    # all counters of this pass, which are cleared here
    arrivals = empty(popularity, units * geometry.UNIT_WARPS + geometry.OVERFLOW_COUNTERS)
    launch(tuning.rank(), popularity, order, slot, arrivals, multiprocessors)
    neuron_tiles, token_tiles = -(-n // geometry.NEURON_TILE), geometry.token_tiles(m)
    groups = empty(sizes, (neuron_tiles, token_tiles, 2))
    tiles = empty(sizes, (neuron_tiles, 5))
    starts = empty(sizes, (neuron_tiles, geometry.chunks(2 * m) + 1))
    # entries of rare neuron tiles stand twice
    room = capacity + min(capacity, neuron_tiles * geometry.RARE_ENTRIES)
    packed = empty(sizes, room, torch.int64)
    tokens = empty(sizes, room)
    by_neuron = (groups, tiles, starts, packed, tokens)
    launch(tuning.transpose(dtype, gated, family), *pattern, up, d_gate, d_up, slot, *by_neuron, activation.code())

    del d_gate, d_up, groups, by_neuron
    out = weights()
    # a layer with one of two biases still needs memory for the other's gradient
    db_gate = (empty(x, n) if out.b_gate is None else out.b_gate) if bias else None
    db_up = (empty(x, n) if out.b_up is None else out.b_up) if bias and gated else None
    aside = room_aside(x, max(m, 2 * n if gated else n), multiprocessors)
    # the gradients are stored, or added to fp32 sums; the others are empty
    nothing = empty(x, (0, k), dtype if accumulate else torch.float32)
    nothings = [None if w is None else nothing for w in out[1:4]]
    stored, added = (nothings, out[1:4]) if accumulate else (out[1:4], nothings)
    partial = empty(x, units * geometry.UNIT_SUMS, torch.float32)
    gradients = (*stored, db_gate, db_up, *added, aside, partial, arrivals)
    weight_grad = tuning.weight_grad(dtype, gated, bias, family)
    operands = (x, dy, order, sizes, tiles, starts, packed, tokens)
    out = out._replace(x=dx)
    counters = arrivals[units * geometry.UNIT_WARPS :]
    dense = functools.partial(overflow_backward, laid, capacity, out, accumulate, aside, counters)
    # nothing may run out of memory once something has been added
    overflow = dense() if accumulate else None
    launch(weight_grad, *operands, *gradients, capacity, multiprocessors)
    del order, slot, tiles, starts, packed, tokens, operands, gradients, partial, arrivals
    (overflow or dense())()
    return out
