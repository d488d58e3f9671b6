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
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import _memory, _modes, tuning
from twell._activation import Activation, activation_of
from twell._runtime import geometry, nvtx
from twell._runtime.program import Executable, Program, View, allocate, contiguous, kept
from twell.ops import screened
from twell.ops.ffn_screened import launches as screened_launches
from twell.ops.ffn_screened import on_cpu as screened_on_cpu
from twell.ops.ffn_screened import shapes as screened_shapes
from twell.ops.ffn_union import by_small_tiles
from twell.ops.ffn_union import launches as union_launches
from twell.ops.ffn_union import on_cpu as union_on_cpu
from twell.ops.ffn_union import shapes as union_shapes
from twell.ops.gate_pack import on_cpu as pack_on_cpu
from twell.ops.gate_pack import pack, scratch, stats_shape
from twell.ops.library import ACTIVATION, LAYER, Implementation, Shape, are_rows, check_layer, laid, new, register
from twell.ops.operands import Form, Operands, Views, present
from twell.ops.quantize_gate import quantize, quantize_gate, require
from twell.ops.reglu import on_cuda as reglu_on_cuda
from twell.ops.reglu import pays
from twell.ops.up_down import counters, multiply
from twell.ops.up_down import on_cpu as up_down_on_cpu
from twell.strategy.plan import Facts, Route, routed
from twell.strategy.site import Measurement, site_of, without_site
from twell.strategy.tables import GUARDED, SCREENED, imposed_on_call

_Totals = tuple[Tensor, Tensor | None, Tensor | None]
# y, parts of the sum of |h|, stats; for "union" the unions and, if it screens, the candidates, with more behind them
_Counted = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _run(
    sparse: Callable[..., _Counted],
    layer: Operands,
    compression: int,
    activation: Activation,
    route: Route,
    totals: bool,
) -> _Totals:
    """Compute the layer as ``route`` says; ``sparse`` is the sparse strategies of its device."""
    if route.strategy == "dense":
        return _dense(layer, activation, route.measurement, totals)
    y, l1, stats, unions, candidates = sparse(layer, compression, activation, route, totals)
    if not totals and route.measurement is None:
        return y, None, None
    counts = stats.select(2, 0)
    nonzeros = counts.sum()
    if route.measurement is not None:
        if candidates is None:
            candidates = screened.wanted(route.measurement, layer, activation)
        # a row of stats has 8 tokens
        route.measurement.counts(nonzeros, unions, heaviest=counts.sum(1).amax(), candidates=candidates)
    return y, l1.sum() if totals else None, nonzeros


def _chosen(layer: Operands, route: Route, site: Tensor | None) -> Route:
    """The route of a call of the operators, by costs where it is "auto"."""
    if route.strategy != "auto":
        return route
    x, w_gate, w_up, w_down, b_gate, b_up, _ = layer
    n, gated, copied = w_gate.shape[0], w_up is not None, not are_rows(w_down.shape, w_down.stride())
    if site is None:
        return without_site(x, n, gated, False, copied)
    merged = _is_merged(x, w_gate, w_up, b_gate, b_up)
    return site_of(site, route.screen).begin(x, n, gated, False, copied, merged)


@nvtx.marked(
    lambda layer, compression, *_: nvtx.range("ffn", **nvtx.sizes(layer._asdict() | {"compression": compression}))
)
def on_cuda(layer: Operands, compression: int, activation: Activation, route: Route, totals: bool) -> _Totals:
    """The operators on the current device, for a call with a route; l1 and nonzeros are for ``totals``.

    w_down is [K, N], and x may have any leading dimensions.
    """
    # dense halves have no totals, and sums over K in one piece
    if route.guarded and (totals or layer.x.shape[-1] > geometry.LONGEST_SUM[tuning.dtype_name(layer.x.dtype)]):
        route = Route("dense")
    return _run(_sparse_on_cuda, layer, compression, activation, route, totals)


@functools.lru_cache(256)
def _asked(
    gated: bool,
    dtype: torch.dtype,
    compression: int,
    strategy: str,
    imposed: str,
    name: str,
    threshold: float,
    screen: bool,
    invariant: bool,
) -> tuple[Activation, Route]:
    """The activation and the route that a call's arguments ask for; ValueError if they contradict each other."""
    activation = activation_of(name, threshold, gated)
    route = routed(Facts("ffn", strategy, invariant, screen=screen, imposed=imposed))
    activation.level(dtype)
    geometry.words_per_tile(compression)
    return activation, route


def _operators(compute: Callable[..., _Totals] | None) -> list[Implementation]:
    """``ffn`` and ``ffn_aux`` as functions of the schema's arguments; those of fake tensors have nothing to compute."""

    def run(totals: bool, *arguments: Any) -> _Totals:
        layer, (compression, strategy, site, *how) = Operands(*arguments[:7]), arguments[7:]
        on = layer.x.device
        imposed = imposed_on_call(on.type, on.index) if strategy == "auto" else ""
        activation, route = _asked(layer.w_up is not None, layer.x.dtype, compression, strategy, imposed, *how)
        check_layer(*layer)
        if compute is None:
            x = layer.x
            return x.new_empty(x.shape), x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.int64)
        if _modes.capturing(layer.w_down):
            _memory.note_capture(layer.w_down)
        route = _chosen(layer, route, site)
        return compute(layer._replace(w_down=layer.w_down.t()), compression, activation, route, totals)

    def ffn(*arguments: Any) -> Tensor:
        return run(False, *arguments)[0]

    def ffn_aux(*arguments: Any) -> _Totals:
        return run(True, *arguments)

    return [ffn, ffn_aux]


def _sparse_on_cpu(layer: Operands, compression: int, activation: Activation, route: Route, totals: bool) -> _Counted:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    layer = layer._replace(w_down=w_down.t())
    if route.screen:
        return screened_on_cpu(layer, quantize_gate(w_gate, True), compression, activation)
    if route.strategy == "union":
        return *union_on_cpu(*layer, compression, *activation), None
    words, spill, stats = pack_on_cpu(x, w_gate, b_gate, compression, activation.threshold)
    y, l1 = up_down_on_cpu(x, words, spill, w_up, w_down.t(), b_up, b_down, compression, activation.name)
    return y, l1, stats, None, None


@kept
def _pass(
    form: Form, route: str, tiles: bool, compression: int, activation: Activation, counted: bool
) -> tuple[Executable, tuple[Shape, ...]]:
    """What runs a sparse ``route``, and the shapes of its figures: operands behind y if ``counted``, else scratch.

    ``tiles``: whether "union" may run by small tiles, which know no unions.
    """
    p, (x, *weights, firing) = form.program()
    layer = Views(x.matrix(), *weights)
    (m, k), n, gated = layer.x.shape, layer.w_gate.shape[0], layer.w_up is not None
    spec = tuning.up_down_tile(x.dtype, m, k, n, gated, tuning.family(p.index)) if tiles and route == "union" else None
    shapes: tuple[Shape, ...]
    if route == SCREENED:
        shapes = screened_shapes(layer.x, layer.w_gate)
    elif route != "union":
        shapes = (x.dtype, m, k), (torch.float32, m), stats_shape(m, n)
    elif spec is None:
        shapes = union_shapes(layer.x, layer.w_gate)
    else:
        parts = (torch.float32, -(-m // geometry.SMALL_TILE), spec.cluster)
        shapes = (x.dtype, m, k), parts, stats_shape(m, n)
    place = p.operand if counted else p.scratch
    results: Any = p.operand(x.dtype, *x.shape).matrix(), *(place(*shape) for shape in shapes[1:])
    how = layer, results, compression, activation
    if route == SCREENED:
        screened_launches(p, layer, firing, quantize(p, layer.w_gate, True), *how[1:])
    elif route != "union":
        _by_row(p, *how, route)
    elif spec is None:
        union_launches(p, *how)
    else:
        by_small_tiles(p, *how, spec)
    return p.compiled(), shapes[1:]


def _by_row(
    p: Program, layer: Views, results: Sequence[View], compression: int, activation: Activation, name: str
) -> None:
    """Strategy "row" by a route of this name."""
    invariant, guarded = name == "row+invariant", name == GUARDED
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    y, l1, stats = results
    words, spill = scratch(p, x, x.shape[0], w_gate, compression)
    how = compression, activation
    counted = counters(p, x, w_up is not None, invariant, guarded)
    zeroed = pack(p, x, w_gate, b_gate, words, spill, stats, *how, invariant, counted)
    multiply(p, x, words, spill, w_up, w_down, b_up, b_down, y, l1, *how, zeroed, stats, guarded)


def inference_of(
    layer: Operands, compression: int, activation: Activation, route: Route
) -> Callable[..., Tensor | None] | None:
    """What computes y of calls like this one, w_down [K, N]; None if kernels read only copies, or more than these.

    It is a function of ``Operands``, which gives None, with nothing launched, for those of another form.
    """
    x = layer.x
    if not x.numel() or (route.screen and activation.threshold):
        return None
    if any(given is not own for given, own in zip(laid(layer), layer)):
        return None
    if route.screen:
        require(x.device, "ffn with screen=True")
    form = Form.of((*layer, layer.b_gate if route.screen else None))
    run, _ = _pass(form, route.name, True, compression, activation, False)
    place, screen = (tuple(x.shape), contiguous(x.shape), x.dtype), route.screen

    def inference(*operands: Any) -> Tensor | None:
        y, firing = allocate(operands[0], *place), operands[4] if screen else None
        return y if run.ran(*present((*operands, firing)), y) else None

    return inference


def _sparse_on_cuda(layer: Operands, compression: int, activation: Activation, route: Route, totals: bool) -> _Counted:
    x, firing = layer.x, None
    if not x.numel():
        stats = x.new_zeros((1, 1, 2), dtype=torch.int32)
        return x.new_empty(x.shape), x.new_zeros(1, dtype=torch.float32), stats, None, None
    if route.screen:
        require(x.device, "ffn with screen=True")
        firing = screened.firing_bias(layer.w_gate, layer.b_gate, activation)
    given = *laid(layer), firing
    counted = totals or route.measurement is not None
    run, shapes = _pass(Form.of(given), route.name, route.measurement is None, compression, activation, counted)
    y = allocate(x, tuple(x.shape), contiguous(x.shape), x.dtype)
    figures = new(x, shapes) if counted else []
    run(*present(given), y, *figures)
    return y, *figures, *[None] * (4 - len(figures))


def _dense(layer: Operands, activation: Activation, measurement: Measurement | None, totals: bool) -> _Totals:
    """The layer by PyTorch's own operators."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
        up: Tensor | None
        if _is_merged(x, w_gate, w_up, b_gate, b_up):
            # gate and up are halves of one product, as in engines
            merged = w_gate.as_strided((2 * w_gate.shape[0], w_gate.shape[1]), w_gate.stride())
            gate, up = F.linear(x, merged).chunk(2, -1)
        else:
            gate, up = F.linear(x, w_gate, b_gate), None if w_up is None else F.linear(x, w_up, b_up)
        if up is not None and pays(gate, gate.numel()):
            hidden = reglu_on_cuda(gate, up, activation, inplace=True)
        else:
            gate = activation.after(gate, inplace=True)
            hidden = activation.hidden(gate, up)
        # what is left of the gate, so that its memory may be that of y
        level = activation.level(gate.dtype)
        nonzeros = gate.numel() - (gate <= level).sum() if totals else None
        if measurement is not None:
            measurement.dense(gate, level, screened.wanted(measurement, layer, activation))
        del gate, up
        y = F.linear(hidden, w_down, b_down)
    return y, hidden.abs().sum(dtype=torch.float32) if totals else None, nonzeros


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


_CHOICES = "bool screen=False, bool invariant=False"
_ARGUMENTS = f"{LAYER}, int compression, str strategy, Tensor? site, {ACTIVATION}, {_CHOICES}"

ffn, ffn_aux = (
    register(schema, fake=fake, cpu=cpu, cuda=cuda)
    for schema, fake, cpu, cuda in zip(
        (f"ffn({_ARGUMENTS}) -> Tensor", f"ffn_aux({_ARGUMENTS}) -> (Tensor y, Tensor l1, Tensor nonzeros)"),
        *map(_operators, (None, lambda *call: _run(_sparse_on_cpu, *call), on_cuda)),
    )
)
