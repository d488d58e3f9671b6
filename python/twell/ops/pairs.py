"""Pairs of a token and an expert, in the order of their experts: checks of routes, layouts and launches."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from twell.base.activation import Activation, threshold_pair
from twell.choose import tuning
from twell.ops.e4m3 import quantise
from twell.ops.float8 import E4M3
from twell.ops.library import REACH, aligned, rows
from twell.runtime import geometry, specs
from twell.runtime.log import warn_once
from twell.runtime.program import ALIGNMENT, Program, View

# Units that a grid may have.
_MOST_UNITS = 65535
# Bytes of a row behind its e4m3 values, of which a scale has four.
SCALE_BYTES = 16


def check_routes(name: str, ids: Tensor, tokens: Sequence[int], count: int) -> None:
    """Raise unless ids [..., k] are those of tokens [...], and ``count`` experts are not too many."""
    if not 0 < count <= geometry.MAX_EXPERTS:
        raise ValueError(f"{name} must be of 1 to {geometry.MAX_EXPERTS} experts, got {count}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {ids.dtype}")
    most = geometry.MAX_EXPERTS_OF_TOKEN
    if not ids.dim() or list(ids.shape[:-1]) != list(tokens) or not 0 < ids.shape[-1] <= most:
        wanted = f"[{', '.join(map(str, (*tokens, 'k')))}] with k to {most}"
        raise ValueError(f"{name} must be {wanted}, got {list(ids.shape)}")


def check_ids(name: str, ids: Tensor, count: int) -> None:
    """Raise ValueError for an id beyond ``count`` experts; it waits for a GPU."""
    wrong = (ids < -1) | (ids >= count)
    if bool(wrong.any()):
        raise ValueError(f"{name} must be from -1 to {count - 1}, got {int(ids[wrong][0])}")


def slabs(weight: Tensor) -> Tensor:
    """Experts' weights as kernels read them, e4m3 values as bytes; a copy of those that lie otherwise."""
    weight = weight.view(torch.uint8) if weight.dtype == E4M3 else weight
    if is_readable(weight):
        return weight
    warn_once(
        "weights of experts are copied at each call: expected matrices of aligned rows, and w_down [E, K, N] as the "
        "transposed view of [E, N, K]"
    )
    return weight.clone(memory_format=torch.contiguous_format)


def is_readable(weight: Tensor) -> bool:
    """Whether kernels read weights [E, N, K] in place."""
    between, pitch, unit = weight.stride()
    apart = unit == 1 and pitch * weight.itemsize % ALIGNMENT == 0 and weight.data_ptr() % ALIGNMENT == 0
    apart = apart and pitch >= weight.shape[2]
    near = between * len(weight) <= REACH
    return apart and near and between % pitch == 0 and between >= pitch * weight.shape[1]


def all_rows(weights: View) -> tuple[View, int]:
    """All rows from the first expert's first to the last one's last, and those from one expert to the next."""
    (count, n, k), (between, pitch, _) = weights.shape, weights.strides
    step = between // pitch
    return View(weights.base, weights.offset, weights.dtype, ((count - 1) * step + n, k), (pitch, 1)), step


def laid_tokens(x: Tensor, x_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x, and a static scale; rows in e4m3 as bytes [T, K + 16], the scale of each behind its values."""
    if x.dtype != E4M3 or x_scale is None:
        return rows(x), aligned(x_scale)
    k = x.shape[1]
    packed = torch.empty(len(x), k + SCALE_BYTES, dtype=torch.uint8, device=x.device)
    packed[:, :k] = x.view(torch.uint8)
    packed[:, k : k + 4] = x_scale.contiguous().view(torch.uint8).view(-1, 4)
    return packed, None


def _quantised(p: Program, x: View, x_scale: View | None, k: int) -> View:
    """Rows of x in e4m3, their scales behind them, as 16-bit values; bfloat16 x is quantised."""
    t, width = x.shape[0], (k + SCALE_BYTES) // 2
    made = x if x.dtype == torch.uint8 else p.scratch(torch.uint8, t, k + SCALE_BYTES)
    as_pairs = made.at(0, torch.bfloat16, t, width)
    if x.dtype != torch.uint8:
        quantise(p, x, x_scale, *_split(as_pairs, k))
    return as_pairs


def _split(made: View, k: int) -> tuple[View, View]:
    """The values as bytes [T, K], and the scales [T]."""
    (t, width), (base, offset) = made.shape, made[:2]
    values = View(base, offset, torch.uint8, (t, k), (2 * width, 1))
    return values, View(base, offset + k, torch.float32, (t,), (width // 2,))


def _in_order(p: Program, ids: View, x: View, most: int, *results: View) -> None:
    """Launch what puts rows of x in the order of their experts, in units of up to ``most``; see expert_pairs.py."""
    # contiguous ids [T, k] as the 32-bit words of each
    words = ids.at(0, torch.int32, math.prod(ids.shape), ids.dtype.itemsize // 4)
    spec = specs.ExpertPairsSpec(tuning.dtype_name(x.dtype))
    p.launch(spec, words, x, *results, most, tuning.PAIR_CTAS * p.multiprocessors)


def launches(
    p: Program,
    x: View,
    x_scale: View | None,
    w_gate: View,
    gate_scale: View | None,
    w_up: View | None,
    w_down: View,
    down_scale: View | None,
    ids: View,
    weights: View,
    y: View,
    compression: int,
    activation: Activation,
    invariant: bool,
) -> None:
    """Launch what fills ``y``: by rows of each token or, of many tokens and e4m3 weights, by the union of a unit's."""
    (t, k), (count, n, _), top = y.shape, w_gate.shape, ids.shape[1]
    number, dtype, scaled, tiles = t * top, y.dtype, down_scale is not None, geometry.tiles(n)
    # squares of float16 may exceed it, so hidden states stay fp32
    overflows = dtype == torch.float16 and activation.name == "relu2"
    by_union = scaled or (tuning.by_union_of_experts(dtype, n, w_up is not None, invariant) and not overflows)
    most = tuning.expert_tokens(number, count, invariant)
    units = min(number, count + number // most)
    if units > _MOST_UNITS:
        raise NotImplementedError(f"expected at most {_MOST_UNITS} units of {most} pairs, got {number} pairs")
    if scaled:
        x = _quantised(p, x, x_scale, k)
    down = tuning.expert_down(dtype, k, w_up is not None)
    first = 0 if by_union else geometry.TOKEN_COUNTERS + t * down.cluster
    counters = p.scratch(torch.int32, first + t)
    owners, places = (p.scratch(torch.int32, number) for _ in range(2))
    routed = p.scratch(dtype, number, x.shape[1])
    listed = p.scratch(torch.int32, units, 4), p.scratch(torch.int32, 4)
    _in_order(p, ids, x, most, owners, places, routed, *listed, counters, p.scratch(torch.int32, count))

    name, width = specs.E4M3 if scaled else tuning.dtype_name(dtype), geometry.words_per_tile(compression)
    gates, kept = (0, number) if by_union else (number, 0)
    words, spill = p.scratch(torch.int32, gates, tiles * width), p.scratch(dtype, gates, tiles * geometry.TILE)
    hidden = p.scratch(dtype, kept, n)
    operands = (*_split(routed, k), w_gate, gate_scale) if scaled else (routed, w_gate)
    how = width, threshold_pair(activation, dtype), activation.code()
    p.launch(specs.ExpertPackSpec(name, most), *operands, words, spill, *listed, hidden, *how)

    second, down_rows = all_rows(w_down)
    if by_union:
        neurons, z = p.scratch(torch.int32, units, n), p.scratch(torch.float32, number, k)
        compact = p.scratch(dtype, number, -(-n // geometry.CHUNK) * geometry.CHUNK)
        p.launch(specs.ExpertUnionSpec(tuning.dtype_name(dtype)), hidden, *listed, neurons, compact, most)
        of_down = (second,) if down_scale is None else (second, down_scale)
        rest = neurons, *listed, z, down_rows, p.multiprocessors
        p.launch(specs.ExpertGatheredSpec(name, most), compact, *of_down, *rest)
        p.launch(specs.ExpertSumSpec(tuning.dtype_name(dtype), False), z, places, weights, y)
        return
    up, up_rows = (None, 0) if w_up is None else all_rows(w_up)
    # helpers add up the non-zeros of all tokens
    shared = not invariant and number * n < 1 << 31
    helpers = tuning.token_helpers(t, down, p.multiprocessors) if shared else 0
    sums = p.scratch(torch.float32, 2 * helpers, k + 8)
    layer = x if w_up is not None else None, words, spill, up, second, y, p.scratch(torch.float32, t), sums
    own, heavy = counters.part(0, first), counters.part(first, first + t)
    numbers = up_rows, down_rows, helpers, tuning.light_nonzeros(t), width, activation.code()
    p.launch(down, *layer, own, heavy, owners, places, weights, *numbers)


def order(p: Program, x: View, x_scale: View | None, ids: View, gathered: View, places: View, ends: View) -> None:
    """Launch what puts rows of x in the order of their experts; bytes of e4m3 with their scales behind."""
    number, width = gathered.shape
    if gathered.dtype == torch.uint8:
        x, gathered = _quantised(p, x, x_scale, width - SCALE_BYTES), gathered.at(0, torch.bfloat16, number, width // 2)
    owners, units = p.scratch(torch.int32, number), p.scratch(torch.int32, number, 4)
    unused = units, p.scratch(torch.int32, 4), p.scratch(torch.int32, 0)
    _in_order(p, ids, x, 1 << 30, owners, places, gathered, *unused, ends)


def add_up(p: Program, made: View, places: View, weights: View, y: View) -> None:
    """Launch what adds the products of each token's experts."""
    p.launch(specs.ExpertSumSpec(tuning.dtype_name(y.dtype), True), made, places, weights, y)
