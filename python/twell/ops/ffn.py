"""``ffn`` and ``ffn_aux``: a layer without gradients in one operator, which chooses its strategy when it runs.

"auto" chooses by the number of tokens and, with ``site``, by what calls of the layer have measured; such a call may
measure, too. ``site`` is the first weight as the caller holds it: the layer's ``AutoStrategy`` is found by its memory.
So one compiled or exported graph is for any number of tokens and for any layer of one kind, keeps choosing, and keeps
nothing of the process that made it. A CUDA graph keeps what ran when it was captured. ``ffn_aux`` also returns the sum
of |h| and the number of non-zeros.

With ``screen`` "union" computes gates only where an int8 product says that they may be non-zeros, and "auto" may choose
so. With ``invariant`` "row" gives a token the same bits whatever other tokens the call has.

x [M, K]; w_gate, w_up and w_down [N, K]; b_gate and b_up [N], b_down [K]. ``compression`` is 2, 4 or 8, ``strategy``
"auto", "dense", "row" or "union". ``screen`` goes with "union", and with "auto" for a ``site`` that is new;
``invariant`` goes with "auto" and "row". Without ``site`` "auto" keeps nothing, and on a CPU it is dense.
``activation`` and ``threshold`` are the layer's. y is [M, K]; of ``ffn_aux`` l1 is 0-d float32 and nonzeros 0-d int64,
both over all tokens.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from twell import _memory, _modes, tuning
from twell._activation import Activation, activation_of
from twell._runtime import geometry, nvtx, specs
from twell._runtime.program import Executable, Program, View, allocate, contiguous, kept
from twell.ops import decode, dense, screened, union
from twell.ops.gate_pack import gate_on_cpu, pack, scratch
from twell.ops.library import (
    ACTIVATION,
    LAYER,
    Implementation,
    Shape,
    are_rows,
    check_layer,
    has_rows,
    laid,
    new,
    register,
)
from twell.ops.operands import Form, Operands, Views, has_thresholds, opened, present
from twell.ops.pack import stats_shape
from twell.ops.slices import Added, is_sliced, require_sliceable
from twell.ops.up_down import behind_on_cpu, counters, multiply
from twell.strategy.known import Memory, Run, remember
from twell.strategy.plan import Facts, Route, routed
from twell.strategy.site import AutoStrategy, found, site_of, without_site
from twell.strategy.tables import SCREENED, imposed_on_call

_Totals = tuple[Tensor, Tensor | None, Tensor | None]
# y, parts of the sum of |h|, stats; for "union" the unions and, if it screens, the candidates, with more behind them
_Counted = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _run(
    sparse: Callable[..., _Counted],
    one_pass: Callable[..., Tensor | None],
    layer: Operands,
    compression: int,
    activation: Activation,
    route: Route,
    totals: bool,
) -> _Totals:
    """Compute the layer as ``route`` says; ``sparse`` and ``one_pass`` are the sparse strategies of its device."""
    if activation.k:
        # the screen chooses no gates
        route = route._replace(screen=False)
    if route.strategy == "dense":
        return dense.totalled(*opened(layer, activation), route.measurement, totals)
    own = one_pass(layer, activation, route)
    if own is not None and not totals:
        return own, None, None
    require_sliceable(len(layer.w_gate), activation)
    y, l1, stats, unions, candidates = _by_slices(sparse, layer, compression, activation, route, totals)
    # the same y, whether its figures are wanted or not
    y = y if own is None else own
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


def _takes_one_pass(layer: Operands, activation: Activation, route: Route, family: str) -> bool:
    """Whether a layer of few tokens runs in one pass over its weights (``ops.decode``), which counts nothing."""
    if activation.k or route.screen or route.invariant:
        return False
    x, kind = layer.x, "plain" if layer.w_up is None else "gated"
    return tuning.decode(x.dtype, math.prod(x.shape[:-1]), x.shape[-1], kind, family) is not None


def _one_pass_on_cpu(layer: Operands, activation: Activation, route: Route) -> Tensor | None:
    """The layer as a GPU computes it in one pass, w_down [K, N]; None of one that it does not."""
    if not _takes_one_pass(layer, activation, route, specs.SM90):
        return None
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    gate = gate_on_cpu(x, w_gate, b_gate, activation)
    return behind_on_cpu(gate, x, w_up, w_down.t(), b_up, b_down, activation, True)[0]


def _one_pass_on_cuda(layer: Operands, activation: Activation, route: Route) -> Tensor | None:
    """The layer of few tokens in one pass, w_down [K, N]; None of one that takes more."""
    if not _takes_one_pass(layer, activation, route, tuning.family(layer.x.device.index)):
        return None
    given = laid(layer)
    y = allocate(layer.x, tuple(layer.x.shape), contiguous(layer.x.shape), layer.x.dtype)
    _few(Form.of(given), activation)(*present((*given, y)))
    return y


@kept
def _few(form: Form, activation: Activation) -> Executable:
    """What runs a layer in one pass, into y."""
    p, (x, *weights) = form.program()
    decode.launch(p, Views(x.matrix(), *weights), p.operand(x.dtype, *x.shape).matrix(), activation)
    return p.compiled()


def _by_slices(sparse: Callable[..., _Counted], layer: Operands, *how: Any) -> _Counted:
    """``sparse`` for any number of neurons, w_down [K, N]."""
    if not is_sliced(n := len(layer.w_gate)):
        return sparse(layer, *how)
    y = torch.empty_like(layer.x, memory_format=torch.contiguous_format)
    added, figures = Added(y, layer.b_down), []
    for first, last in geometry.neuron_slices(n):
        found = sparse(layer.neurons(first, last, by_columns=True), *how)
        added.add(found[0])
        figures.append(found[1:])
    added.store()
    if figures[0][1] is None:
        # no figures were wanted
        return y, *figures[0]
    l1, stats, *lists = zip(*figures)
    tiles = geometry.token_tiles(layer.x.shape[:-1].numel())
    unions, candidates = (None if each[0] is None else sum(own[:tiles] for own in each) for each in lists)
    return y, torch.stack([own.sum() for own in l1]), torch.cat(stats, 1), unions, candidates


def _chosen(layer: Operands, activation: Activation, route: Route, site: Tensor | None) -> Route:
    """The route of a call of the operators, by costs where it is "auto"."""
    if route.strategy != "auto":
        return route
    if site is None:
        x, w_gate, w_up, w_down, *_ = layer
        copied = not are_rows(w_down.shape, w_down.stride())
        return without_site(x, w_gate.shape[0], w_up is not None, False, copied, not activation.k)
    return site_of(site, route.screen).begin(layer.x, *_asked_by(layer, activation))


def _asked_by(layer: Operands, activation: Activation) -> tuple[int, bool, bool, bool, bool, bool]:
    """What a site is asked by, after x: w_down is [N, K]."""
    _, w_gate, w_up, w_down, *_ = layer
    return (
        w_gate.shape[0],
        w_up is not None,
        False,
        not are_rows(w_down.shape, w_down.stride()),
        dense.is_merged(layer),
        not activation.k,
    )


@nvtx.marked(
    lambda layer, compression, *_: nvtx.range("ffn", **nvtx.sizes(layer._asdict() | {"compression": compression}))
)
def on_cuda(layer: Operands, compression: int, activation: Activation, route: Route, totals: bool) -> _Totals:
    """The operators on the current device, for a call with a route; l1 and nonzeros are for ``totals``.

    w_down is [K, N], and x may have any leading dimensions.
    """
    return _run(_sparse_on_cuda, _one_pass_on_cuda, layer, compression, activation, route, totals)


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
    activation = activation_of(name, threshold, gated, top_k=True)
    route = routed(Facts("ffn", strategy, invariant, screen=screen, imposed=imposed))
    activation.level(dtype)
    geometry.words_per_tile(compression)
    return activation, route


def _operators(compute: Callable[..., _Totals] | None, remembers: bool = False) -> list[Implementation]:
    """``ffn`` and ``ffn_aux`` as functions of the schema's arguments; those of fake tensors have nothing to compute.

    remembers: whether kinds of calls become known.
    """

    def run(totals: bool, *arguments: Any) -> _Totals:
        layer, (compression, strategy, site, *how) = Operands(*arguments[:7]), arguments[7:]
        on = layer.x.device
        imposed = imposed_on_call(on.type, on.index) if strategy == "auto" else ""
        activation, route = _asked(layer.w_up is not None, layer.x.dtype, compression, strategy, imposed, *how)
        check_layer(*layer)
        if compute is None:
            x = layer.x
            return x.new_empty(x.shape), x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.int64)
        if capturing := _modes.capturing(layer.w_down):
            _memory.note_capture(layer.w_down)
        route = _chosen(layer, activation, route, site)
        if remembers and not totals and not capturing:
            y = _settled(layer, arguments, activation, route)
            if y is not None:
                return y, None, None
        return compute(layer._replace(w_down=layer.w_down.t()), compression, activation, route, totals)

    def ffn(*arguments: Any) -> Tensor:
        y = _by_known(arguments) if remembers else None
        return run(False, *arguments)[0] if y is None else y

    def ffn_aux(*arguments: Any) -> _Totals:
        return run(True, *arguments)

    return [ffn, ffn_aux]


@kept
def _named() -> Memory:
    """Kinds of calls with a named strategy whose way is known."""
    return {}


def _kind(arguments: Sequence[Any], site: AutoStrategy | None) -> tuple[Memory, tuple[Any, ...]]:
    """Where calls with such arguments of the schema may be known, and as what."""
    x, w_gate, w_up, _, b_gate, b_up, b_down = arguments[:7]
    absent = w_up is None, b_gate is None, b_up is None, b_down is None
    kind = x.shape, x.dtype, x.device.index, w_gate.shape, absent, arguments[7:9], arguments[10:]
    # sites are of one layer, and have a memory each
    return _named() if site is None else site.known, kind


def _by_known(arguments: Sequence[Any]) -> Tensor | None:
    """y of a call whose kind is known; None, with nothing run, of any other."""
    x, weight = arguments[0], arguments[9]
    if _modes.stream_captures() or torch.is_autocast_enabled("cuda"):
        return None
    site = None
    if arguments[8] == "auto":
        site = None if weight is None else found(weight)
        if site is None:
            return None
    memory, kind = _kind(arguments, site)
    known = memory.get(kind)
    if known is None or not known.begins(x):
        return None
    _, w_gate, w_up, w_down, *biases = arguments[:7]
    y = known.run(x, w_gate, w_up, w_down.t(), *biases)
    if y is None:
        memory.pop(kind, None)
        known.undo()
    return y


def _settled(layer: Operands, arguments: Sequence[Any], activation: Activation, route: Route) -> Tensor | None:
    """y of a call by ``route``, whose kind is known then; None of one that cannot be."""
    weight, auto = arguments[9], arguments[8] == "auto"
    site = found(weight) if auto and weight is not None else None
    if nvtx.ON or route.measurement is not None or (auto and site is None) or torch.is_autocast_enabled("cuda"):
        return None
    turned = layer._replace(w_down=layer.w_down.t())
    run = inference_of(turned, arguments[7], activation, route, merged=True)
    y = None if run is None else run(*turned)
    if run is not None and y is not None:
        remember(*_kind(arguments, site), run, route, site, (layer.x.shape, *_asked_by(layer, activation)))
    return y


def _sparse_on_cpu(layer: Operands, compression: int, activation: Activation, route: Route, totals: bool) -> _Counted:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    gate = gate_on_cpu(x, w_gate, b_gate, activation)
    behind = x, w_up, w_down.t(), b_up, b_down, activation, route.strategy == "union"
    return *behind_on_cpu(gate, *behind), None


@kept
def _pass(
    form: Form, route: str, compression: int, activation: Activation, counted: bool
) -> tuple[Executable, tuple[Shape, ...]]:
    """What runs a sparse ``route``, and the shapes of its figures: operands behind y if ``counted``, else scratch."""
    p, (x, *weights, firing) = form.program()
    layer = Views(x.matrix(), *weights)
    (m, k), n = layer.x.shape, layer.w_gate.shape[0]
    shapes: tuple[Shape, ...]
    if route == SCREENED:
        shapes = screened.shapes(layer.x, n)
    elif route == "union":
        shapes = union.shapes(layer.x, n)
    else:
        shapes = (x.dtype, m, k), (torch.float32, m), stats_shape(m, n)
    place = p.operand if counted else p.scratch
    results: Any = p.operand(x.dtype, *x.shape).matrix(), *(place(*shape) for shape in shapes[1:])
    how = layer, results, compression, activation
    if route == SCREENED:
        screened.launches(p, layer, firing, *how[1:])
    elif route == "union":
        union.launches(p, *how)
    else:
        _by_row(p, *how, route == "row+invariant")
    return p.compiled(), shapes[1:]


def _by_row(
    p: Program, layer: Views, results: Sequence[View], compression: int, activation: Activation, invariant: bool
) -> None:
    """Strategy "row"."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    y, l1, stats = results
    words, spill = scratch(p, x, x.shape[0], w_gate, compression)
    how = compression, activation
    counted = counters(p, x, w_up is not None, invariant)
    zeroed = pack(p, x, w_gate, b_gate, words, spill, stats, *how, invariant, counted)
    multiply(p, x, words, spill, w_up, w_down, b_up, b_down, y, l1, *how, zeroed, stats)


def inference_of(
    layer: Operands, compression: int, activation: Activation, route: Route, merged: bool = False
) -> Run | None:
    """What computes y of calls like this one, w_down [K, N]; None if kernels read only copies, or more than these.

    merged: whether a dense layer may compute gate and up in one product.
    """
    x = layer.x
    family = tuning.family(x.device.index)
    one_pass = route.strategy != "dense" and _takes_one_pass(layer, activation, route, family)
    if is_sliced(len(layer.w_gate)) and route.strategy != "dense" and not one_pass:
        return None
    if has_thresholds(layer.b_gate, len(layer.w_gate)) and (route.screen or route.strategy == "dense"):
        return None
    if route.strategy == "dense":
        return dense.inference_of(layer, activation, merged)
    if not x.numel() or (route.screen and activation.threshold):
        return None
    # a layer that copies the down weight may lay it by rows at its next call
    if any(given is not own for given, own in zip(laid(layer), layer)) or not has_rows(layer.w_down.t()):
        return None
    if route.screen:
        screened.require(x.device, "torch.ops.twell.ffn with screen=True")
    if one_pass:
        run = _few(Form.of(layer), activation)
    else:
        form = Form.of((*layer, layer.b_gate if route.screen else None))
        run, _ = _pass(form, route.name, compression, activation, False)
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
        screened.require(x.device, "torch.ops.twell.ffn with screen=True")
        firing = screened.firing_bias(layer.w_gate, layer.b_gate, activation)
    given = *laid(layer), firing
    counted = totals or route.measurement is not None
    run, shapes = _pass(Form.of(given), route.name, compression, activation, counted)
    y = allocate(x, tuple(x.shape), contiguous(x.shape), x.dtype)
    figures = new(x, shapes) if counted else []
    run(*present(given), y, *figures)
    return y, *figures, *[None] * (4 - len(figures))


_CHOICES = "bool screen=False, bool invariant=False"
_ARGUMENTS = f"{LAYER}, int compression, str strategy, Tensor? site, {ACTIVATION}, {_CHOICES}"

_on_cuda = _operators(on_cuda, remembers=True)
# ``ffn`` of plain tensors without gradients, for which ``library.is_direct`` holds, with all arguments of the schema
direct = _on_cuda[0]

ffn, ffn_aux = (
    register(schema, fake=fake, cpu=cpu, cuda=cuda)
    for schema, fake, cpu, cuda in zip(
        (f"ffn({_ARGUMENTS}) -> Tensor", f"ffn_aux({_ARGUMENTS}) -> (Tensor y, Tensor l1, Tensor nonzeros)"),
        _operators(None),
        _operators(lambda *call: _run(_sparse_on_cpu, _one_pass_on_cpu, *call)),
        _on_cuda,
    )
)
