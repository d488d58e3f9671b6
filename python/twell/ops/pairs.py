"""Pairs of a token and an expert, in the order of their experts: checks of routes, layouts and launches."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell import tuning
from twell._runtime import geometry, specs
from twell._runtime.log import warn_once
from twell._runtime.program import ALIGNMENT, Program, View
from twell.ops.library import REACH, check

# The grouped products of PyTorch take fewer groups than this.
GROUPS = 1024
# Units that a grid may have.
_MOST_UNITS = 65535


def check_routes(ids: Tensor, weights: Tensor, t: int, count: int) -> None:
    """Raise unless ids and weights of ``t`` tokens fit each other, and ``count`` experts are not too many."""
    if not 0 < count <= geometry.MAX_EXPERTS:
        raise ValueError(f"there must be 1 to {geometry.MAX_EXPERTS} experts, got {count}")
    if ids.dim() != 2 or ids.shape[0] != t or not 0 < ids.shape[1] <= geometry.MAX_EXPERTS_OF_TOKEN:
        most = geometry.MAX_EXPERTS_OF_TOKEN
        raise ValueError(f"ids must be [{t}, k] with k from 1 to {most}, got {list(ids.shape)}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be int32 or int64, got {ids.dtype}")
    check("weights", weights, tuple(ids.shape), torch.float32)


def check_ids(ids: Tensor, count: int, name: str = "ids") -> None:
    """Raise ValueError for an id beyond ``count`` experts; it waits for a GPU."""
    wrong = (ids < -1) | (ids >= count)
    if bool(wrong.any()):
        raise ValueError(f"{name} must be from -1 to {count - 1}, got {int(ids[wrong][0])}")


def aligned(small: Tensor) -> Tensor:
    """A contiguous tensor at an aligned address; a copy of one that is not."""
    small = small.contiguous()
    return small if small.data_ptr() % ALIGNMENT == 0 else small.clone()


def slabs(weight: Tensor) -> Tensor:
    """Experts' weights as kernels read them; a copy of those that lie otherwise."""
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


class Pairs(NamedTuple):
    """Pairs of a token and an expert, as kernels take them; see expert_pairs.py."""

    rows: View  # of x
    owners: View
    places: View
    units: View
    total: View


def in_order(p: Program, ids: View, x: View, count: int, most: int, counters: View) -> Pairs:
    """Launch what puts rows of x in the order of ``count`` experts, in units of up to ``most``, and clears counters."""
    number = math.prod(ids.shape)
    some = min(number, count + number // most)
    if some > _MOST_UNITS:
        raise NotImplementedError(f"expected at most {_MOST_UNITS} units of {most} pairs, got {number} pairs")
    owners, places = (p.scratch(torch.int32, number) for _ in range(2))
    rows = p.scratch(x.dtype, number, x.shape[1])
    units, total = p.scratch(torch.int32, some, 4), p.scratch(torch.int32, 4)
    results = owners, places, rows, units, total, counters, p.scratch(torch.int32, count)
    spec = specs.ExpertPairsSpec(tuning.dtype_name(x.dtype))
    p.launch(spec, _words(ids), x, *results, most, tuning.PAIR_CTAS * p.multiprocessors)
    return Pairs(rows, owners, places, units, total)


def hidden_states(
    p: Program, spec: specs.Spec, pairs: Pairs, rows: Any, weights: Any, n: int, how: tuple[int, int, int]
) -> View:
    """Launch what makes the hidden states of pairs, [pairs, n], from their rows and the experts' weights."""
    dtype, tiles = pairs.rows.dtype, geometry.tiles(n)
    hidden = p.scratch(dtype, pairs.places.shape[0], n)
    packed = p.scratch(torch.int32, 0, tiles * how[0]), p.scratch(dtype, 0, tiles * geometry.TILE)
    p.launch(spec, *rows, *weights, *packed, pairs.units, pairs.total, hidden, *how)
    return hidden


def by_units(
    p: Program,
    pairs: Pairs,
    hidden: View,
    most: int,
    spec: specs.Spec,
    w_down: View,
    scale: Any,
    weights: View,
    y: View,
) -> None:
    """Launch what fills ``y`` from hidden states: units of pairs read the union of their rows."""
    (number, n), (_, k), units, total = hidden.shape, y.shape, pairs.units, pairs.total
    neurons, z = p.scratch(torch.int32, units.shape[0], n), p.scratch(torch.float32, number, k)
    compact = p.scratch(hidden.dtype, number, -(-n // geometry.CHUNK) * geometry.CHUNK)
    name = tuning.dtype_name(hidden.dtype)
    p.launch(specs.ExpertUnionSpec(name), hidden, units, total, neurons, compact, most)
    second, down_rows = all_rows(w_down)
    p.launch(spec, compact, second, *scale, neurons, units, total, z, down_rows, p.multiprocessors)
    p.launch(specs.ExpertSumSpec(name, False), z, pairs.places, weights, y)


def _words(ids: View) -> View:
    """Contiguous ids [T, k] as the 32-bit words of each."""
    return ids.at(0, torch.int32, math.prod(ids.shape), ids.dtype.itemsize // 4)


def order(p: Program, x: View, ids: View, gathered: View, places: View, ends: View) -> None:
    """Launch what puts rows of x in the order of their experts."""
    number = math.prod(ids.shape)
    owners, units = p.scratch(torch.int32, number), p.scratch(torch.int32, number, 4)
    unused = units, p.scratch(torch.int32, 4), p.scratch(torch.int32, 0)
    pairs = _words(ids), x, owners, places, gathered, *unused, ends
    p.launch(specs.ExpertPairsSpec(tuning.dtype_name(x.dtype)), *pairs, 1 << 30, tuning.PAIR_CTAS * p.multiprocessors)


def add_up(p: Program, made: View, places: View, weights: View, y: View) -> None:
    """Launch what adds the products of each token's experts."""
    p.launch(specs.ExpertSumSpec(tuning.dtype_name(y.dtype), True), made, places, weights, y)


def all_rows(weights: View) -> tuple[View, int]:
    """All rows from the first expert's first to the last one's last, and those from one expert to the next."""
    (count, n, k), (between, pitch, _) = weights.shape, weights.strides
    step = between // pitch
    return View(weights.base, weights.offset, weights.dtype, ((count - 1) * step + n, k), (pitch, 1)), step
