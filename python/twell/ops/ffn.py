"""``ffn`` and ``ffn_aux``: a layer without gradients in one operator, which chooses its strategy when it runs.

"auto" chooses by the number of tokens and, with ``site``, by what calls of the layer have measured; such a call may
measure, too. ``site`` is the first weight as the caller holds it: the layer's ``AutoStrategy`` is found by its memory.
So one compiled or exported graph is for any number of tokens and for any layer of one kind, keeps choosing, and keeps
nothing of the process that made it. A CUDA graph keeps what ran when it was captured. ``ffn_aux`` also returns the sum
of |h| and the number of non-zeros.

With ``screen`` "union" computes gates only where an int8 product says that they may be non-zeros, and "auto" may choose
so. With ``invariant`` "row" gives a token the same bits whatever other tokens the call has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import _memory, _modes, tuning
from twell._activation import Activation
from twell._runtime import geometry, nvtx
from twell.ops import screened
from twell.ops.ffn_screened import on_cpu as screened_on_cpu
from twell.ops.ffn_screened import on_cuda as screened_on_cuda
from twell.ops.ffn_union import by_small_tiles
from twell.ops.ffn_union import on_cpu as union_on_cpu
from twell.ops.ffn_union import on_cuda as union_on_cuda
from twell.ops.gate_pack import on_cpu as pack_on_cpu
from twell.ops.gate_pack import outputs as packed_outputs
from twell.ops.gate_pack import pack
from twell.ops.library import (
    ACTIVATION,
    LAYER,
    Implementation,
    check_alike,
    check_layer,
    empty,
    has_row_strides,
    last_activation,
    register,
)
from twell.ops.operands import Operands, PackedOperands
from twell.ops.quantize_gate import on_cuda as quantize_on_cuda
from twell.ops.quantize_gate import quantize_gate, require
from twell.ops.reglu import on_cuda as reglu_on_cuda
from twell.ops.reglu import pays
from twell.ops.up_down import arrivals_for, multiply
from twell.ops.up_down import on_cpu as up_down_on_cpu
from twell.strategy.plan import Facts, Route, routed
from twell.strategy.site import Measurement, site_of, without_site
from twell.strategy.tables import imposed_on_call

Aux = tuple[Tensor, Tensor, Tensor]
_Totals = tuple[Tensor, Tensor | None, Tensor | None]
# y, parts of the sum of |h|, stats; for "union" the unions and, if it screens, the candidates, with more behind them
_Counted = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
_Sparse = Mapping[str, Callable[[Operands, int, Activation, Route], _Counted]]


def outputs(x: Tensor) -> Aux:
    """Uninitialised y [M, K], l1 float32 and nonzeros int64, both 0-d."""
    return x.new_empty(x.shape), x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.int64)


def _fake(
    layer: Operands, compression: int, route: Route, site: Tensor | None, activation: Activation, totals: bool
) -> Aux:
    check_layer(*layer)
    activation.level(layer.x.dtype)
    geometry.words_per_tile(compression)
    return outputs(layer.x)


def _run(
    sparse: _Sparse, layer: Operands, compression: int, activation: Activation, route: Route, totals: bool
) -> _Totals:
    """Compute the layer as ``route`` says, by the sparse strategies of its device."""
    if route.strategy == "dense":
        return _dense(layer, activation, route.measurement, totals)
    y, l1, stats, unions, candidates = sparse[route.strategy](layer, compression, activation, route)
    if not totals and route.measurement is None:
        return y, None, None
    counts = stats.select(2, 0)
    nonzeros = counts.sum()
    if route.measurement is not None:
        if candidates is None and route.measurement.screen:
            candidates = screened.count(layer.x, layer.w_gate, layer.b_gate, activation)
        # a row of stats has 8 tokens
        route.measurement.counts(nonzeros, unions, heaviest=counts.sum(1).amax(), candidates=candidates)
    return y, l1.sum() if totals else None, nonzeros


def _chosen(layer: Operands, route: Route, site: Tensor | None) -> Route:
    """The route of a call of the operators, by costs where it is "auto"."""
    if route.strategy != "auto":
        return route
    x, w_gate, w_up, w_down, b_gate, b_up, _ = layer
    n, gated, copied = w_gate.shape[0], w_up is not None, not has_row_strides(w_down)
    if site is None:
        return without_site(x, n, gated, False, copied)
    merged = _is_merged(x, w_gate, w_up, b_gate, b_up)
    return site_of(site, route.screen).begin(x, n, gated, False, copied, merged)


def _on_cpu(
    layer: Operands, compression: int, route: Route, site: Tensor | None, activation: Activation, totals: bool
) -> _Totals:
    check_layer(*layer)
    geometry.words_per_tile(compression)
    return _run(_SPARSE_ON_CPU, layer, compression, activation, _chosen(layer, route, site), totals)


def _on_cuda(
    layer: Operands, compression: int, route: Route, site: Tensor | None, activation: Activation, totals: bool
) -> _Totals:
    geometry.words_per_tile(compression)
    if _modes.capturing(layer.w_down):
        _memory.note_capture(layer.w_down)
    return _run(_SPARSE_ON_CUDA, layer, compression, activation, _chosen(layer, route, site), totals)


@nvtx.marked(
    lambda layer, compression, *_: nvtx.range("ffn", **nvtx.sizes(layer._asdict() | {"compression": compression}))
)
def on_cuda(layer: Operands, compression: int, activation: Activation, route: Route, totals: bool) -> _Totals:
    """The operators on the current device, for a call with a route; l1 and nonzeros are for ``totals``."""
    return _run(_SPARSE_ON_CUDA, layer, compression, activation, route, totals)


def _operators(implementation: Callable[..., _Totals]) -> list[Implementation]:
    """``ffn`` and ``ffn_aux`` as functions of the schema's arguments."""

    def run(totals: bool, *arguments: Any) -> _Totals:
        layer, (compression, strategy, site) = Operands(*arguments[:7]), arguments[7:10]
        activation = last_activation(arguments[10:12], layer.w_up is not None)
        route = _route(layer.x, strategy, *arguments[12:])
        return implementation(layer, compression, route, site, activation, totals)

    def ffn(*arguments: Any) -> Tensor:
        return run(False, *arguments)[0]

    def ffn_aux(*arguments: Any) -> _Totals:
        return run(True, *arguments)

    return [ffn, ffn_aux]


def _route(x: Tensor, strategy: str, screen: bool = False, invariant: bool = False) -> Route:
    """What the arguments of the schema ask for; ValueError if they contradict each other."""
    imposed = imposed_on_call(x.device.type, x.device.index) if strategy == "auto" else ""
    return routed(Facts("ffn", strategy, invariant, screen=screen, imposed=imposed))


def _row_on_cpu(layer: Operands, compression: int, activation: Activation, route: Route) -> _Counted:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    words, spill, stats = pack_on_cpu(x, w_gate, b_gate, compression, activation.threshold)
    y, l1 = up_down_on_cpu(x, words, spill, w_up, w_down, b_up, b_down, compression, activation.name)
    return y, l1, stats, None, None


def _row_on_cuda(layer: Operands, compression: int, activation: Activation, route: Route) -> _Counted:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    check_alike(w_gate, w_up=w_up, w_down=w_down)
    words, spill, stats = packed = packed_outputs(x, w_gate, compression)
    arrivals = None if route.invariant else arrivals_for(x)
    pack(x, w_gate, b_gate, packed, compression, activation, route.invariant, arrivals)
    y, l1 = empty(x, x.shape), empty(x, x.shape[0], torch.float32)
    behind = PackedOperands(x, words, spill, w_up, w_down, b_up, b_down)
    multiply(behind, y, l1, compression, activation, route.invariant, arrivals)
    return y, l1, stats, None, None


def _union_on_cpu(layer: Operands, compression: int, activation: Activation, route: Route) -> _Counted:
    if route.screen:
        return screened_on_cpu(layer, quantize_gate(layer.w_gate, True), compression, activation)
    return *union_on_cpu(*layer, compression, *activation), None


def _union_on_cuda(layer: Operands, compression: int, activation: Activation, route: Route) -> _Counted:
    if route.screen:
        require(layer.x, "ffn with screen=True")
        # made at each call: nothing tells every write of a weight
        return screened_on_cuda(layer, quantize_on_cuda(layer.w_gate, True), compression, activation)
    # the kernel for few tokens knows no unions
    (m, k), n, gated = layer.x.shape, layer.w_gate.shape[0], layer.w_up is not None
    spec = (
        None
        if route.measurement is not None or not m
        else tuning.up_down_tile(layer.x.dtype, m, k, n, gated, tuning.family(layer.x.device.index))
    )
    if spec is None:
        return *union_on_cuda(layer, compression, activation), None
    return *by_small_tiles(layer, compression, activation, spec), None, None


def _dense(layer: Operands, activation: Activation, measurement: Measurement | None, totals: bool) -> _Totals:
    """The layer by PyTorch's own operators."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    with _without_autocast(x):
        gate, up = _projected(x, w_gate, w_up, b_gate, b_up)
        if up is not None and pays(gate):
            hidden = reglu_on_cuda(gate, up, activation, inplace=True)
        else:
            gate = activation.after(gate, inplace=True)
            hidden = activation.hidden(gate, up)
        # what is left of the gate, so that its memory may be that of y
        level = activation.level(gate.dtype)
        nonzeros = gate.numel() - (gate <= level).sum() if totals else None
        if measurement is not None:
            candidates = screened.count(x, w_gate, b_gate, activation) if measurement.screen else None
            measurement.dense(gate, level, candidates)
        del gate, up
        y = F.linear(hidden, w_down.t(), b_down)
    return y, hidden.abs().sum(dtype=torch.float32) if totals else None, nonzeros


def _projected(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, b_gate: Tensor | None, b_up: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """gate and up: halves of one product where few tokens meet weights that lie one behind the other, as in engines."""
    if w_up is None:
        return F.linear(x, w_gate, b_gate), None
    if _is_merged(x, w_gate, w_up, b_gate, b_up):
        merged = w_gate.as_strided((2 * w_gate.shape[0], w_gate.shape[1]), w_gate.stride())
        gate, up = F.linear(x, merged).chunk(2, -1)
        return gate, up
    return F.linear(x, w_gate, b_gate), F.linear(x, w_up, b_up)


def _is_merged(x: Tensor, w_gate: Tensor, w_up: Tensor | None, b_gate: Tensor | None, b_up: Tensor | None) -> bool:
    """Whether a dense layer takes one product: few tokens, no bias, and w_up's memory right behind w_gate's."""
    return (
        w_up is not None
        and x.shape[0] <= tuning.MERGED_TOKENS
        and b_gate is b_up is None
        and w_up.data_ptr() == w_gate.data_ptr() + w_gate.nbytes
        and w_gate.is_contiguous()
        and w_up.is_contiguous()
        and w_gate.shape == w_up.shape
        and w_gate.untyped_storage().data_ptr() == w_up.untyped_storage().data_ptr()
    )


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


_SPARSE_ON_CPU: _Sparse = {"row": _row_on_cpu, "union": _union_on_cpu}
_SPARSE_ON_CUDA: _Sparse = {"row": _row_on_cuda, "union": _union_on_cuda}
_CHOICES = "bool screen=False, bool invariant=False"
_ARGUMENTS = f"{LAYER}, int compression, str strategy, Tensor? site, {ACTIVATION}, {_CHOICES}"

ffn, ffn_aux = (
    register(schema, fake=fake, cpu=cpu, cuda=cuda, instead="twell.sparse_gated_ffn or twell.sparse_ffn")
    for schema, fake, cpu, cuda in zip(
        (f"ffn({_ARGUMENTS}) -> Tensor", f"ffn_aux({_ARGUMENTS}) -> (Tensor y, Tensor l1, Tensor nonzeros)"),
        *map(_operators, (_fake, _on_cpu, _on_cuda)),
    )
)
