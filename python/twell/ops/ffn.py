"""``ffn`` and ``ffn_aux``: a layer without gradients in one operator, which chooses its strategy when it runs.

"auto" chooses by the number of tokens and, with ``site``, by what calls of the layer have measured; such a call may
measure, too. ``site`` is the first weight as the caller holds it: the layer's ``AutoStrategy`` is found by its memory.
So one compiled or exported graph is for any number of tokens and for any layer of one kind, keeps choosing, and keeps
nothing of the process that made it. A CUDA graph keeps what ran when it was captured. ``ffn_aux`` also returns the sum
of |h| and the number of non-zeros.

With ``screen`` "union" computes gates only where an int8 product says that they may be non-zeros, and "auto" may choose
so. With ``invariant`` "row" gives a token the same bits whatever other tokens the call has.

x [M, K]; w_gate, w_up and w_down [N, K]; b_gate and b_up [N], b_down [K]. With a given ``gate`` [M, N], before its
activation, there is neither w_gate nor b_gate, and without w_up neither x nor b_up.

Weights in e4m3 have float32 scales: gate_scale and up_scale [N], down_scale [K]. Then x is e4m3 with x_scale [M], or
bfloat16, which is quantised per token or by a static x_scale [1]. K is a multiple of 16, biases and y are bfloat16, and
``fast_accum`` says whether tensor cores hold whole sums of the gate, as ``use_fast_accum`` of ``torch._scaled_mm``.

``compression`` is 2, 4 or 8, ``strategy`` "auto", "dense", "row" or "union". ``screen`` goes with "union", and with
"auto" for a ``site`` that is new; ``invariant`` goes with "auto" and "row". Without ``site`` "auto" keeps nothing, and
on a CPU it is dense. ``activation`` and ``threshold`` are the layer's. y is [M, K]; of ``ffn_aux`` l1 is 0-d float32
and nonzeros 0-d int64, both over all tokens.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from twell.base import memory
from twell.base.activation import Activation, activation_of
from twell.choose import tuning
from twell.choose.cards import imposed_on_call
from twell.choose.plan import Facts, Route, routed
from twell.choose.rates import SCREENED
from twell.choose.site import AutoStrategy, found, site_of, without_site
from twell.ops import calls, decode, dense, e4m3, library, screened, union
from twell.ops.calls import Run
from twell.ops.gate_pack import pack
from twell.ops.hybrid_cpu import gate_on_cpu
from twell.ops.library import check_operands
from twell.ops.operands import Form, Layer, Place, has_thresholds, opened, present
from twell.ops.pack import pack_gate, stats_shape
from twell.ops.pack import shapes as packed_shapes
from twell.ops.slices import Added, is_sliced, require_sliceable
from twell.ops.up_down import behind_on_cpu, counters, multiply
from twell.runtime import geometry, modes, specs
from twell.runtime.program import Executable, Program, View, allocate, contiguous, kept

_Totals = tuple[Tensor, Tensor | None, Tensor | None]
# y, parts of the sum of |h|, stats; for "union" the unions and, if it screens, the candidates, with more behind them
_Counted = tuple[Tensor, Any, Any, Tensor | None, Tensor | None]
# how few tokens run, whichever sparse strategy is asked for: see ``ops.decode``
_ONE_PASS = "one pass"


def _run(
    sparse: Callable[..., _Counted],
    family: str,
    layer: Layer,
    compression: int,
    activation: Activation,
    route: Route,
    totals: bool,
    fast: bool,
) -> _Totals:
    """Compute the layer, w_down [K, N], as ``route`` says, by ``sparse`` on its device and for its family."""
    measurement = route.measurement
    if activation.k:
        # the screen chooses no gates
        route = route._replace(screen=False)
    if route.strategy == "dense":
        if not layer.scaled:
            return dense.totalled(*opened(layer, activation), measurement, totals)
        y, gate = e4m3.dense(layer, activation, fast)
        if measurement is not None and gate is not None:
            measurement.dense(gate, activation.level(gate.dtype))
        return y, None, None
    own = None
    if _takes_one_pass(layer, activation, route, family, fast):
        own = sparse(layer, compression, activation, route._replace(strategy=_ONE_PASS), False, fast)[0]
        if not totals:
            return own, None, None
    require_sliceable(layer.w_down.shape[1], activation)
    found = _by_slices(sparse, layer, compression, activation, route, totals or measurement is not None, fast)
    y, l1, stats, unions, candidates = found
    # the same y, whether its figures are wanted or not
    y = y if own is None else own
    if stats is None or (not totals and measurement is None):
        # on a CPU nothing counts values in e4m3
        return y, None, None
    counts = stats.select(2, 0)
    nonzeros = counts.sum()
    if measurement is not None:
        if candidates is None and layer.plain:
            candidates = screened.wanted(measurement, layer, activation)
        # a row of stats has 8 tokens
        measurement.counts(nonzeros, unions, heaviest=counts.sum(1).amax(), candidates=candidates)
    return y, l1.sum() if totals else None, nonzeros


def _takes_one_pass(layer: Layer, activation: Activation, route: Route, family: str, fast: bool) -> bool:
    """Whether a layer of few tokens runs in one pass over its weights (``ops.decode``), which counts nothing."""
    if layer.gate is not None or activation.k or route.screen or route.invariant or not (fast or layer.plain):
        return False
    if not layer.x.numel() or is_sliced(layer.w_down.shape[1]):
        # a cluster's sums would be longer than slices are
        return False
    x, kind = layer.x, "plain" if layer.w_up is None else "gated"
    dtype = torch.float8_e4m3fn if layer.scaled else x.dtype
    return tuning.decode(dtype, math.prod(x.shape[:-1]), x.shape[-1], kind, family) is not None


def _place_of_y(layer: Layer) -> Place:
    shape = (len(layer.gate), len(layer.w_down)) if layer.x is None else tuple(layer.x.shape)
    return shape, contiguous(shape), torch.bfloat16 if layer.scaled else layer.w_down.dtype


def _laid(layer: Layer) -> Layer:
    """``layer``, w_down [K, N], with copies of the operands that kernels cannot read in place."""
    return e4m3.laid(layer) if layer.scaled else library.laid(layer)


def _program(form: Form, fast: bool) -> tuple[Program, Layer, View | None, View]:
    """A program, views of its layer and of the screen's bias, and y."""
    p, given = form.program()
    *operands, firing = given
    layer = Layer(*operands)
    if layer.scaled:
        views = e4m3.views(p, layer, fast)
    else:
        views = Layer(None if layer.x is None else layer.x.matrix(), *layer.unscaled[1:])
    shape = (layer.gate.shape[0], views.w_down.shape[0]) if layer.x is None else layer.x.shape
    return p, views, firing, p.operand(tuning.stored(views.w_down.dtype), *shape).matrix()


def _by_slices(sparse: Callable[..., _Counted], layer: Layer, *how: Any) -> _Counted:
    """``sparse`` for any number of neurons, w_down [K, N]."""
    if not layer.plain or not is_sliced(n := len(layer.w_gate)):
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


def _chosen(layer: Layer, activation: Activation, route: Route, site: Tensor | None, fast: bool) -> Route:
    """The route of a call of the operators, by costs where it is "auto"; w_down is [N, K]."""
    if route.strategy != "auto":
        return route
    tokens = layer.x
    if tokens is None:
        # what has its shape
        tokens = layer.gate[:, :1].expand(len(layer.gate), layer.w_down.shape[1])
    n, gated = layer.w_down.shape[0], layer.w_up is not None
    copied = not layer.scaled and not library.are_rows(layer.w_down.shape, layer.w_down.stride())
    one_pass = layer.gate is None and not activation.k and (fast or layer.plain)
    if site is None:
        return without_site(tokens, n, gated, False, copied, one_pass, layer.scaled)
    merged = layer.plain and dense.is_merged(layer)
    found = site_of(site, route.screen).begin(tokens, n, gated, False, copied, merged, one_pass, layer.scaled)
    # a site that others share may know the screen
    return found if layer.plain else found._replace(screen=False)


def on_cuda(
    layer: Layer, compression: int, activation: Activation, route: Route, totals: bool, fast: bool = True
) -> _Totals:
    """The operators on the current device by a known route; w_down [K, N], x [..., K]; figures are for ``totals``."""
    family = tuning.family(layer.w_down.device.index)
    return _run(_sparse_on_cuda, family, layer, compression, activation, route, totals, fast)


@functools.lru_cache(256)
def _asked(
    gated: bool,
    dtype: torch.dtype,
    plain: bool,
    compression: int,
    strategy: str,
    imposed: str,
    name: str,
    threshold: float,
    screen: bool,
    invariant: bool,
) -> tuple[Activation, Route]:
    """The activation and the route that a call's arguments ask for; ValueError if they contradict each other."""
    if screen and not plain:
        raise ValueError("screen must be False with a given gate or e4m3 weights, got True")
    activation = activation_of(name, threshold, gated, top_k=plain)
    route = routed(Facts("ffn", strategy, invariant, screen=screen, imposed=imposed))
    activation.level(dtype)
    geometry.words_per_tile(compression)
    return activation, route


def _check(layer: Layer, invariant: bool, totals: bool) -> None:
    """Raise unless the operands fit each other, w_down [N, K], and the operators compute what is asked of them."""
    if layer.scaled:
        if totals:
            raise NotImplementedError("ffn_aux takes weights of 16 bits, got scales of e4m3 ones")
        e4m3.check_layer(layer)
        return
    e4m3.require_no_scales(layer)
    if layer.gate is not None and invariant:
        raise NotImplementedError("invariant=True goes with a gate that the layer computes, got a given one")
    check_operands(layer)


def _operators(compute: Callable[..., _Totals] | None, remembers: bool = False) -> list[library.Implementation]:
    """``ffn`` and ``ffn_aux``, fake without ``compute``; ``remembers``: later calls of a kind go to its program."""

    def run(totals: bool, *arguments: Any) -> _Totals:
        compression, strategy, site, *how = arguments[7:14]
        layer, fast = Layer(*arguments[:7], *arguments[14:19]), arguments[19]
        on, plain = layer.w_down.device, layer.plain
        imposed = imposed_on_call(on.type, on.index) if strategy == "auto" else ""
        stored = torch.bfloat16 if layer.scaled else layer.w_down.dtype
        activation, route = _asked(layer.w_up is not None, stored, plain, compression, strategy, imposed, *how)
        _check(layer, how[3], totals)
        if compute is None:
            y = layer.w_down.new_empty(_place_of_y(layer._replace(w_down=layer.w_down.t()))[0], dtype=stored)
            return y, y.new_empty((), dtype=torch.float32), y.new_empty((), dtype=torch.int64)
        if capturing := modes.capturing(layer.w_down):
            memory.note_capture(layer.w_down)
        route = _chosen(layer, activation, route, site, fast)
        if remembers and plain and not totals and not capturing:
            y = _settled(layer, arguments, activation, route)
            if y is not None:
                return y, None, None
        return compute(layer._replace(w_down=layer.w_down.t()), compression, activation, route, totals, fast)

    def ffn(*arguments: Any) -> Tensor:
        y = None
        # neither a given gate nor a scale
        if remembers and all(t is None for t in arguments[14:19]) and not modes.stream_captures():
            x, w_gate, w_up, w_down, *biases = arguments[:7]
            y = calls.known((x, w_gate, w_up, w_down.t(), *biases), _how(arguments))
        return run(False, *arguments)[0] if y is None else y

    def ffn_aux(*arguments: Any) -> _Totals:
        return run(True, *arguments)

    return [ffn, ffn_aux]


def _how(arguments: Sequence[Any]) -> calls.How:
    """What is asked by such arguments of the schema, as calls are known."""
    compression, strategy, weight, name, threshold, screen, invariant = arguments[7:14]
    if strategy == "auto" and weight is not None:
        strategy = found(weight)
    of = "screening" if screen else "ffn"
    return calls.How(Activation(name, threshold), strategy, invariant, compression, True, of)


def _settled(layer: Layer, arguments: Sequence[Any], activation: Activation, route: Route) -> Tensor | None:
    """y of a call by ``route``, whose kind is known then; None of one that cannot be."""
    if route.measurement is not None or torch.is_autocast_enabled("cuda"):
        return None
    turned = layer._replace(w_down=layer.w_down.t())
    run = inference_of(turned, arguments[7], activation, route, merged=True)
    y = None if run is None else run(*turned[:7])
    if run is not None and y is not None:
        how = _how(arguments)
        calls.note(turned[:7], how, False, run, route, isinstance(how.strategy, AutoStrategy))
    return y


def _sparse_on_cpu(layer: Layer, compression: int, activation: Activation, route: Route, *_: Any) -> tuple[Any, ...]:
    # all but "row" round h
    rounded = route.strategy != "row"
    if layer.scaled:
        return e4m3.on_cpu(layer, activation, rounded), None, None, None, None
    return *behind_on_cpu(gate_on_cpu(layer, activation), layer, activation, rounded), None


@kept
def _pass(
    form: Form, route: str, compression: int, activation: Activation, counted: bool, fast: bool
) -> tuple[Executable, tuple[library.Shape, ...]]:
    """What runs a sparse ``route``, and the shapes of its figures: operands behind y if ``counted``, else scratch."""
    p, layer, firing, y = _program(form, fast)
    m, n = y.shape[0], layer.w_down.shape[1]
    shapes: tuple[library.Shape, ...] = ()
    if route == _ONE_PASS:
        decode.launch(p, layer, y, activation)
        return p.compiled(), shapes
    if route == SCREENED:
        shapes = screened.shapes(y, n)[1:]
    elif route == "union":
        shapes = union.shapes(y, n)[1:]
    else:
        shapes = (torch.float32, m), stats_shape(m, n)
    place = p.operand if counted else p.scratch
    results: Any = y, *(place(*shape) for shape in shapes)
    if route == SCREENED:
        screened.launches(p, layer, firing, results, compression, activation)
    elif route == "union":
        union.launches(p, layer, results, compression, activation)
    else:
        _by_row(p, layer, results, compression, activation, route == "row+invariant")
    return p.compiled(), shapes


def _by_row(
    p: Program, layer: Layer, results: Sequence[View], compression: int, activation: Activation, invariant: bool
) -> None:
    x, w_gate, w_up, w_down, b_gate, _, _, gate = layer.unscaled
    y, l1, stats = results
    words, spill, _ = (p.scratch(*shape) for shape in packed_shapes(y.dtype, y.shape[0], w_down.shape[1], compression))
    counted, packed = counters(p, y if x is None else x, w_up is not None, invariant), (words, spill, stats)
    if gate is None:
        zeroed = pack(p, x, w_gate, b_gate, *packed, compression, activation, invariant, counted)
    else:
        zeroed = pack_gate(p, gate, *packed, compression, activation, counted)
    multiply(p, layer, packed, y, l1, compression, activation, zeroed)


def inference_of(
    layer: Layer, compression: int, activation: Activation, route: Route, fast: bool = True, merged: bool = False
) -> Run | None:
    """What computes y of calls like this one, w_down [K, N]; None if kernels read only copies, or more than these.

    It takes the first seven operands, or the whole layer if that has scales. merged: whether a dense layer may compute
    gate and up in one product.
    """
    x, scaled, family = layer.x, layer.scaled, tuning.family(layer.w_down.device.index)
    if scaled and (route.strategy == "dense" or family != specs.SM90):
        return None
    if is_sliced(len(layer.w_gate)) and route.strategy != "dense":
        return None
    if has_thresholds(layer.b_gate, len(layer.w_gate)) and (route.screen or route.strategy == "dense"):
        return None
    if route.strategy == "dense":
        return dense.as_torch(layer, dense.in_inference(layer, activation, seen=False), merged)
    if not x.numel() or (route.screen and activation.threshold):
        return None
    # a layer that copies the down weight may lay it by rows at its next call
    given = _laid(layer)
    copied = [a is not None and (a.data_ptr(), a.shape) != (b.data_ptr(), b.shape) for a, b in zip(layer, given)]
    if any(copied) or not library.has_rows(layer.w_down.t()):
        return None
    if route.screen:
        screened.require(x.device, "torch.ops.twell.ffn with screen=True")
    form = Form.of((*given, layer.b_gate if route.screen else None))
    name = _ONE_PASS if _takes_one_pass(layer, activation, route, family, fast) else route.name
    run, _ = _pass(form, name, compression, activation, False, fast)
    place, screen = _place_of_y(layer), route.screen

    def inference(*operands: Any) -> Tensor | None:
        y, firing = allocate(operands[0], *place), operands[4] if screen else None
        if scaled:
            # kernels have no other dtype for values of e4m3
            operands = tuple(
                [t.view(torch.uint8) if t is not None and t.dtype is torch.float8_e4m3fn else t for t in operands]
            )
        return y if run.ran(*present((*operands, firing)), y) else None

    return inference


def _sparse_on_cuda(
    layer: Layer, compression: int, activation: Activation, route: Route, counted: bool, fast: bool
) -> _Counted:
    like, firing = layer.w_down, None
    if layer.scaled and tuning.family(like.device.index) != specs.SM90:
        raise NotImplementedError('e4m3 weights have sparse kernels for sm_90a alone; strategy="dense" runs everywhere')
    y = allocate(like, *_place_of_y(layer))
    if not y.numel():
        stats = like.new_zeros((1, 1, 2), dtype=torch.int32)
        return y, like.new_zeros(1, dtype=torch.float32), stats, None, None
    if route.screen:
        screened.require(like.device, "torch.ops.twell.ffn with screen=True")
        firing = screened.firing_bias(layer.w_gate, layer.b_gate, activation)
    given = *_laid(layer), firing
    run, shapes = _pass(Form.of(given), route.name, compression, activation, counted, fast)
    figures = library.new(like, shapes) if counted else []
    run(*present(given), y, *figures)
    return y, *figures, *[None] * (4 - len(figures))


_ARGUMENTS = (
    f"{library.LAYER}, int compression, str strategy, Tensor? site, {library.ACTIVATION}, bool screen=False, "
    "bool invariant=False, Tensor? gate=None, Tensor? x_scale=None, Tensor? gate_scale=None, Tensor? up_scale=None, "
    "Tensor? down_scale=None, bool fast_accum=True"
)

_on_cuda = _operators(on_cuda, remembers=True)
# ``ffn`` of plain tensors without gradients, for which ``library.is_direct`` holds, with all arguments of the schema
direct = _on_cuda[0]

ffn, ffn_aux = (
    library.register(schema, fake=fake, cpu=cpu, cuda=cuda)
    for schema, fake, cpu, cuda in zip(
        (f"ffn({_ARGUMENTS}) -> Tensor", f"ffn_aux({_ARGUMENTS}) -> (Tensor y, Tensor l1, Tensor nonzeros)"),
        _operators(None),
        _operators(lambda *call: _run(_sparse_on_cpu, specs.SM90, *call)),
        _on_cuda,
    )
)
