"""Experts of e4m3 weights with scales, behind the operator ``experts``.

x is quantised per token by the first kernel, or by a static scale, unless it is e4m3 with a scale for each token. The
formula is that of ``twell.float8``, with hidden states rounded to bfloat16; a token's experts are added in fp32. By
"row", which is for experts without a gate, units of up to 8, 32 or 64 tokens of an expert read the rows that any of
them needs. "dense" is grouped products of PyTorch. K is a multiple of 16, and nothing is invariant.
"""

from typing import Any

import torch
from torch import Tensor

from twell import float8, tuning
from twell._activation import Activation, threshold_pair
from twell._runtime import geometry, specs
from twell._runtime.program import Program, View
from twell.float8 import E4M3, Float8
from twell.ops.e4m3 import MULTIPLE, check_scaled, dense, hidden_in_float8, layer_of, quantise, tokens_of
from twell.ops.library import check_rank, rows, transpose
from twell.ops.operands import run
from twell.ops.pairs import (
    GROUPS,
    add_up,
    aligned,
    by_units,
    check_routes,
    hidden_states,
    in_order,
    is_readable,
    order,
    slabs,
)


def check(given: Any, strategy: str, invariant: bool) -> None:
    """Raise unless the operands, ``ops.experts.Experts``, fit each other and a call may be asked to run so."""
    if invariant:
        raise NotImplementedError("experts of e4m3 weights have no invariant form, got invariant=True")
    if given.shared_up is not None or given.shared_down is not None:
        raise NotImplementedError("experts of e4m3 weights take no shared layer, got one")
    if given.gate_scale is None:
        raise ValueError("gate_scale must be given with down_scale, got None")
    check_rank("x", given.x)
    if given.w_gate.dim() != 3:
        raise ValueError(f"w_gate must have three dimensions, got {list(given.w_gate.shape)}")
    (count, n, _), (t, k) = given.w_gate.shape, given.x.shape
    most_k, most_n = specs.K_CLASSES[-1], geometry.LONGEST_SUM["bfloat16"]
    if n % 8 or k % MULTIPLE or not 0 < n <= most_n or not 0 < k <= most_k:
        limits = f"K a multiple of {MULTIPLE} up to {most_k}, N one of 8 up to {most_n}"
        raise ValueError(f"experts of e4m3 weights must have {limits}, got K = {k}, N = {n}")
    check_scaled(given)
    check_routes(given.ids, given.weights, t, count)
    if strategy == "row" and given.w_up is not None:
        raise NotImplementedError('"row" takes experts of e4m3 weights without a gate, got one; "dense" takes them')


def sums(given: Any, activation: Activation, by_row: bool) -> Tensor:
    """y in fp32 by PyTorch's own operators, expert by expert; a GPU is waited for. Autocast must be off."""
    y = torch.zeros(given.x.shape, dtype=torch.float32, device=given.x.device)
    x = tokens_of(given.x, given.x_scale)
    for expert in torch.unique(given.ids).tolist():
        if not 0 <= expert < len(given.w_gate):
            continue
        tokens, slots = (given.ids == expert).nonzero(as_tuple=True)
        own = Float8(x.values.view(torch.uint8)[tokens].view(E4M3), x.scale[tokens])
        gate = Float8(given.w_gate[expert], given.gate_scale[expert])
        up = None
        if given.w_up is not None and given.up_scale is not None:
            up = Float8(given.w_up[expert], given.up_scale[expert])
        down = Float8(given.w_down[expert].t(), given.down_scale[expert])
        if by_row:
            made = float8.formula(own, gate, up, down, activation=activation, dtype=torch.float32, rounded=True)
        else:
            made = dense(layer_of(own, (gate, up, down), float8.NO_BIASES), activation, True)[0].float()
        y.index_add_(0, tokens, made * given.weights[tokens, slots, None])
    return y


def on_cuda(given: Any, y: Tensor, compression: int, strategy: str, activation: Activation) -> Tensor:
    """Fill y and return it."""
    on_hopper = tuning.family(given.x.device.index) == specs.SM90
    if strategy == "auto":
        number, top = given.ids.shape
        few = given.w_up is None and tuning.experts_by_row(number, top, len(given.w_gate), gated=False, float8=True)
        # weights in another layout would be copied
        readable = all(is_readable(weight) for weight in (given.w_gate, given.w_down))
        strategy = "row" if on_hopper and few and readable else "dense"
    if strategy == "dense":
        count, n, _ = given.w_gate.shape
        if on_hopper and n % MULTIPLE == 0 and count < GROUPS:
            return _dense_on_hopper(given, activation, y)
        with torch.autocast("cuda", enabled=False):
            return y.copy_(sums(given, activation, False))
    if not on_hopper:
        raise NotImplementedError('experts have kernels for sm_90a alone; strategy="dense" runs everywhere')
    weights = (slabs(w.view(torch.uint8)) for w in (given.w_gate, given.w_down))
    of_scales = aligned(given.gate_scale), aligned(given.down_scale)
    routes = aligned(given.ids), aligned(given.weights)
    run(_launches, (*_rows(given), *weights, *of_scales, *routes, y), compression, activation)
    return y


def _rows(given: Any) -> tuple[Tensor, Tensor | None]:
    """x, and a static scale; rows in e4m3 as bytes [T, K + 16], the scale of each behind its values."""
    x, x_scale = given.x, given.x_scale
    if x.dtype != E4M3 or x_scale is None:
        return rows(x), None if x_scale is None else aligned(x_scale)
    k = x.shape[1]
    packed = torch.empty(len(x), k + _SCALE_BYTES, dtype=torch.uint8, device=x.device)
    packed[:, :k] = x.view(torch.uint8)
    packed[:, k : k + 4] = x_scale.contiguous().view(torch.uint8).view(-1, 4)
    return packed, None


# bytes of a row behind its e4m3 values, of which a scale has four
_SCALE_BYTES = 16


def _launches(
    p: Program,
    x: View,
    x_scale: View | None,
    w_up: View,
    w_down: View,
    up_scale: View,
    down_scale: View,
    ids: View,
    weights: View,
    y: View,
    compression: int,
    activation: Activation,
) -> None:
    """Launch what fills ``y``."""
    (t, k), (count, n, _) = y.shape, w_up.shape
    most = tuning.expert_tokens(ids.shape[0] * ids.shape[1], count, False)
    pairs = in_order(p, ids, _quantised(p, x, x_scale, k), count, most, p.scratch(torch.int32, t))
    of_rows, of_weights = _split(pairs.rows, k), (w_up, up_scale)
    how = geometry.words_per_tile(compression), threshold_pair(activation, torch.bfloat16), activation.code()
    spec = specs.ExpertPackSpec(specs.E4M3, most)
    hidden = hidden_states(p, spec, pairs, of_rows, of_weights, n, how)
    second = specs.ExpertGatheredSpec(specs.E4M3, most)
    by_units(p, pairs, hidden, most, second, w_down, (down_scale,), weights, y)


def _quantised(p: Program, x: View, x_scale: View | None, k: int) -> View:
    """Rows of x in e4m3, their scales behind them, as 16-bit values; bfloat16 x is quantised."""
    t, width = x.shape[0], (k + _SCALE_BYTES) // 2
    made = x if x.dtype == torch.uint8 else p.scratch(torch.uint8, t, k + _SCALE_BYTES)
    as_pairs = made.at(0, torch.bfloat16, t, width)
    if x.dtype != torch.uint8:
        quantise(p, x, x_scale, *_split(as_pairs, k))
    return as_pairs


def _split(made: View, k: int) -> tuple[View, View]:
    """The values as bytes [T, K], and the scales [T]."""
    (t, width), (base, offset) = made.shape, made[:2]
    values = View(base, offset, torch.uint8, (t, k), (2 * width, 1))
    return values, View(base, offset + k, torch.float32, (t,), (width // 2,))


# Grouped products


def _dense_on_hopper(given: Any, activation: Activation, y: Tensor) -> Tensor:
    """y, filled by one grouped product for each projection and kernels around them, without a wait."""
    x, x_scale = _rows(given)
    ids, weights, k = aligned(given.ids), aligned(given.weights), given.x.shape[1]
    number, count = ids.numel(), len(given.w_gate)
    places, ends = (torch.empty(size, dtype=torch.int32, device=x.device) for size in (number, count))
    gathered = torch.empty(number, k + _SCALE_BYTES, dtype=torch.uint8, device=x.device)
    run(_order, (x, x_scale, ids, gathered, places, ends), k)
    values, scale = gathered[:, :k].view(E4M3), gathered[:, k : k + 4].contiguous().view(torch.float32)[:, 0]
    gate = _grouped(values, scale, given.w_gate.contiguous().transpose(1, 2), given.gate_scale, ends)
    up = None
    if given.w_up is not None and given.up_scale is not None:
        up = _grouped(values, scale, given.w_up.contiguous().transpose(1, 2), given.up_scale, ends)
    w_down = given.w_down
    if w_down.stride(1) != 1:
        # stored by rows of neurons, and read along neurons here
        w_down = w_down.contiguous().view(-1, k)
        turned = transpose(w_down, w_down.new_empty(w_down.shape[::-1]))
        w_down = turned.view(k, count, -1).permute(1, 2, 0)
    made = _grouped(*hidden_in_float8(gate, up, activation), w_down, given.down_scale, ends)
    run(add_up, (made, places, weights, y))
    return y


def _order(
    p: Program, x: View, x_scale: View | None, ids: View, gathered: View, places: View, ends: View, k: int
) -> None:
    """Launch what puts quantised rows of x in the order of their experts."""
    made = gathered.at(0, torch.bfloat16, gathered.shape[0], gathered.shape[1] // 2)
    order(p, _quantised(p, x, x_scale, k), ids, made, places, ends)


def _grouped(values: Tensor, scale: Tensor, weights: Tensor, of_weights: Tensor, ends: Tensor) -> Tensor:
    """values [P, C] of each expert, which end at ``ends`` [E], times weights [E, C, D] -> [P, D] in bfloat16."""
    how: Any = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    made: Tensor = torch._scaled_grouped_mm(values, weights, scale, of_weights.contiguous(), **how)
    return made
