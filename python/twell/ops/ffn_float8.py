"""``ffn_float8``: a layer of e4m3 weights with scales, without gradients, in one operator, as ``ffn`` is for 16 bits.

x is bfloat16 and quantised per token by the first kernel, or by the one scale of a static ``x_scale`` [1]; or it is
e4m3 with a scale for each token, ``x_scale`` [M]. Weights have scales by rows, those of w_down by its columns, since it
is [N, K] here. The formula is that of ``twell.float8``. "dense" is products of ``torch._scaled_mm``, with the hidden
state quantised per token between them.

``fast_accum``: whether tensor cores hold whole sums of the gate, as ``use_fast_accum`` of ``torch._scaled_mm`` says,
whose bits the gate has then and otherwise. Few tokens have other bits, unless without it.

x, w_gate, w_up and w_down have the shapes of ``ffn``, and K is a multiple of 16. Scales are float32: gate_scale and
up_scale [N], down_scale [K]. b_gate, b_up [N] and b_down [K] are bfloat16. All else is as in ``ffn``.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell import float8, tuning
from twell._activation import RELU, Activation, activation_of, threshold_pair
from twell._runtime import device, geometry, specs
from twell._runtime.log import warn_once
from twell._runtime.program import Executable, Program, View, allocate, contiguous, kept
from twell.float8 import E4M3, Float8
from twell.ops import decode, union
from twell.ops.gate_pack import pack, scratch
from twell.ops.library import ACTIVATION, Shape, check, check_rank, has_rows, laid_bias, new, register, transpose
from twell.ops.operands import Form, Scaled, Views, present, run
from twell.ops.pack import stats_shape
from twell.ops.up_down import counters, multiply
from twell.strategy.plan import Facts, Route, routed
from twell.strategy.site import site_of, without_site
from twell.strategy.tables import imposed_on_call

# What values of rows, and products of ``torch._scaled_mm``, are multiples of.
MULTIPLE = 16


class Layer(NamedTuple):
    """The operands: x [M, K], w_gate and w_up [N, K], w_down [N, K], with scales, b_gate and b_up [N], b_down [K].

    A layer without a gate has no w_up: its up projection stands at w_gate, with its bias at b_gate.
    """

    x: Tensor
    x_scale: Tensor | None
    w_gate: Tensor
    gate_scale: Tensor
    w_up: Tensor | None
    up_scale: Tensor | None
    w_down: Tensor
    down_scale: Tensor
    b_gate: Tensor | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None


def check_float8(layer: Layer) -> None:
    """Raise unless the operands fit each other."""
    for name, matrix in (("x", layer.x), ("w_gate", layer.w_gate), ("w_up", layer.w_up), ("w_down", layer.w_down)):
        if matrix is not None:
            check_rank(name, matrix)
    k, n = layer.x.shape[1], layer.w_gate.shape[0]
    if k % MULTIPLE or n % geometry.STATS_ROWS or not 0 < k <= specs.K_CLASSES[-1] or not 0 < n <= geometry.MAX_NEURONS:
        limits = f"K a multiple of 16 up to {specs.K_CLASSES[-1]}, N one of 8 up to {geometry.MAX_NEURONS}"
        raise ValueError(f"e4m3 weights must have {limits}, got K = {k}, N = {n}")
    check_scaled(layer)
    for name, bias, length in (("b_gate", layer.b_gate, n), ("b_up", layer.b_up, n), ("b_down", layer.b_down, k)):
        if bias is not None:
            check(name, bias, (length,), torch.bfloat16)


def check_scaled(layer: Any) -> None:
    """Raise unless x, the weights and their scales fit each other, of a ``Layer`` or of experts [E, ...]."""
    (m, k), (*lead, n, _) = layer.x.shape, layer.w_gate.shape
    if layer.x.dtype == E4M3:
        if layer.x_scale is None:
            raise ValueError("x_scale must be given with an e4m3 x, got None")
        check("x_scale", layer.x_scale, (m,), torch.float32)
    elif layer.x.dtype != torch.bfloat16:
        raise TypeError(f"x must be bfloat16, or e4m3 with scales, got {layer.x.dtype}")
    elif layer.x_scale is not None:
        check("x_scale", layer.x_scale, (1,), torch.float32)
    if (layer.w_up is None) != (layer.up_scale is None):
        raise ValueError("w_up and up_scale must be given together, got one of them")
    for name, weight, scale, length in (
        ("gate", layer.w_gate, layer.gate_scale, n),
        ("up", layer.w_up, layer.up_scale, n),
        ("down", layer.w_down, layer.down_scale, k),
    ):
        if weight is not None and scale is not None:
            check(f"w_{name}", weight, (*lead, n, k), E4M3)
            check(f"{name}_scale", scale, (*lead, length), torch.float32)


@functools.lru_cache(256)
def _asked(
    gated: bool, compression: int, strategy: str, imposed: str, name: str, threshold: float, invariant: bool
) -> tuple[Activation, Route]:
    """The activation and the route that a call's arguments ask for; ValueError if they contradict each other."""
    activation = activation_of(name, threshold, gated)
    route = routed(Facts("ffn_float8", strategy, invariant, imposed=imposed))
    activation.level(torch.bfloat16)
    geometry.words_per_tile(compression)
    return activation, route


def _operator(compute: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    """The operator as a function of the schema's arguments; that of fake tensors has nothing to compute."""

    def ffn_float8(*arguments: Any) -> Tensor:
        layer, (compression, strategy, site, name, threshold, fast, invariant) = Layer(*arguments[:11]), arguments[11:]
        on = layer.x.device
        imposed = imposed_on_call(on.type, on.index) if strategy == "auto" else ""
        activation, route = _asked(layer.w_up is not None, compression, strategy, imposed, name, threshold, invariant)
        check_float8(layer)
        if compute is None:
            return layer.x.new_empty(layer.x.shape, dtype=torch.bfloat16)
        if route.strategy == "auto":
            route = _chosen(layer, site)
        return compute(layer, compression, activation, route, fast)

    return ffn_float8


def _chosen(layer: Layer, site: Tensor | None) -> Route:
    """The route that costs choose."""
    x, n, gated = layer.x, layer.w_gate.shape[0], layer.w_up is not None
    if site is None:
        return without_site(x, n, gated, False, False, float8=True)
    return site_of(site, False).begin(x, n, gated, False, False, float8=True)


def _on_cpu(layer: Layer, compression: int, activation: Activation, route: Route, fast: bool) -> Tensor:
    tokens = tokens_of(layer.x, layer.x_scale)
    if route.strategy == "dense":
        return float8.dense(tokens, *_weights(layer), activation, use_fast_accum=fast)
    rounded = route.strategy == "union" or _in_one_pass(layer, route, fast)
    return float8.formula(tokens, *_weights(layer), activation, torch.float32, rounded).bfloat16()


def tokens_of(x: Tensor, scale: Tensor | None) -> Float8:
    """x in e4m3, by PyTorch's own operators: as it is, or quantised, by a static scale if one is given."""
    return Float8(x, scale) if x.dtype == E4M3 and scale is not None else float8.quantize_tokens(x, scale)


def _weights(layer: Layer) -> tuple[Float8, Float8 | None, Float8, float8.Biases]:
    """Gate, up and down [K, N] as records, and the biases."""
    up = None if layer.w_up is None or layer.up_scale is None else Float8(layer.w_up, layer.up_scale)
    down = Float8(layer.w_down.t(), layer.down_scale)
    return Float8(layer.w_gate, layer.gate_scale), up, down, (layer.b_gate, layer.b_up, layer.b_down)


def on_cuda(layer: Layer, compression: int, activation: Activation, route: Route, fast: bool) -> Tensor:
    """y of a call with a route, on the current device."""
    if not layer.x.numel():
        return layer.x.new_empty(layer.x.shape, dtype=torch.bfloat16)
    if route.strategy == "dense":
        y, gate = _dense_on_cuda(layer, activation, fast)
        if route.measurement is not None:
            route.measurement.dense(gate, activation.level(gate.dtype))
        return y
    if tuning.family(layer.x.device.index) != specs.SM90:
        raise NotImplementedError('e4m3 weights have sparse kernels for sm_90a alone; strategy="dense" runs everywhere')
    given = _laid(layer)
    if _in_one_pass(layer, route, fast):
        y = layer.x.new_empty(layer.x.shape, dtype=torch.bfloat16)
        _few(Form.of(given), activation)(*present(given), y)
        return y
    counted = route.measurement is not None
    run, shapes = _pass(Form.of(given), route.name, compression, activation, fast, counted)
    y = allocate(layer.x, tuple(layer.x.shape), contiguous(layer.x.shape), torch.bfloat16)
    figures = new(y, shapes) if counted else []
    run(*present(given), y, *figures)
    if route.measurement is not None:
        _, stats, *unions = figures
        counts = stats.select(2, 0)
        sizes = unions[0][:-1] if unions else None
        route.measurement.counts(counts.sum(), sizes, heaviest=counts.sum(1).amax())
    return y


def _laid(layer: Layer) -> list[Tensor | None]:
    """The operands as programs take them: e4m3 values as bytes, with rows that kernels read in place."""
    x, x_scale, w_gate, gate_scale, w_up, up_scale, w_down, down_scale, *biases = layer
    rows = _readable("x", x), x_scale, _readable("w_gate", w_gate), gate_scale
    more = None if w_up is None else _readable("w_up", w_up), up_scale, _readable("w_down", w_down), down_scale
    scales = (*rows, *more)
    return [*(t if t is None or t.dim() == 2 else laid_bias(t) for t in scales), *map(laid_bias, biases)]


def _readable(name: str, matrix: Tensor) -> Tensor:
    """A matrix with aligned rows, e4m3 values as bytes; a copy of one that lies otherwise."""
    if matrix.dtype == E4M3:
        matrix = matrix.view(torch.uint8)
    near = matrix.shape[0] * matrix.stride(0) <= _REACH
    if has_rows(matrix) and matrix.stride(0) * matrix.itemsize % MULTIPLE == 0 and near:
        return matrix
    if name == "w_down":
        warn_once(
            "the e4m3 down weight is copied at each call: expected the transposed view of contiguous rows [N, K], as "
            "twell.nn.Float8MLP stores it"
        )
    return matrix.clone(memory_format=torch.contiguous_format)


def _in_one_pass(layer: Layer, route: Route, fast: bool) -> bool:
    """Whether one kernel of sm_90a computes the layer of these tokens (``ops.decode``)."""
    kind = "plain" if layer.w_up is None else "gated"
    return fast and not route.invariant and tuning.decode(E4M3, *layer.x.shape, kind) is not None


@kept
def _few(form: Form, activation: Activation) -> Executable:
    """What runs the layer of few tokens, into y."""
    p, layer = _program(form, True)
    decode.launch(p, layer, p.operand(torch.bfloat16, *layer.x.shape), activation)
    return p.compiled()


def _program(form: Form, fast: bool) -> tuple[Program, Views]:
    """A program that begins with tokens in e4m3, and views of the layer, w_down [K, N]."""
    p, views = form.program()
    x, x_scale, w_gate, gate_scale, w_up, up_scale, w_down, down_scale, *biases = views
    if x.dtype == torch.uint8:
        tokens = Scaled(x, x_scale, fast)
    else:
        tokens = Scaled(p.scratch(torch.uint8, *x.shape), p.scratch(torch.float32, x.shape[0]), fast)
        quantise(p, x, x_scale, tokens.values, tokens.scale)
    up = None if w_up is None else Scaled(w_up, up_scale)
    return p, Views(tokens, Scaled(w_gate, gate_scale), up, Scaled(w_down, down_scale).t(), *biases)


@kept
def _pass(
    form: Form, route: str, compression: int, activation: Activation, fast: bool, counted: bool
) -> tuple[Executable, tuple[Shape, ...]]:
    """What runs a sparse ``route``, and the shapes of its figures: operands behind y if ``counted``, else scratch."""
    p, layer = _program(form, fast)
    (m, k), n = layer.x.shape, layer.w_gate.shape[0]
    shapes: tuple[Shape, ...]
    if route == "union":
        tiles = geometry.token_tiles(m)
        shapes = (torch.float32, tiles, geometry.sums_per_tile(n)), stats_shape(m, n), (torch.int32, tiles + 1)
    else:
        shapes = (torch.float32, m), stats_shape(m, n)
    place = p.operand if counted else p.scratch
    results = p.operand(torch.bfloat16, m, k), *(place(*shape) for shape in shapes)
    if route == "union":
        union.launches(p, layer, results, compression, activation)
    else:
        _by_row(p, layer, results, compression, activation, route == "row+invariant")
    return p.compiled(), shapes


def _by_row(
    p: Program, layer: Views, results: tuple[View, ...], compression: int, activation: Activation, invariant: bool
) -> None:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    y, l1, stats = results
    words, spill = scratch(p, x, x.shape[0], w_gate, compression)
    counted = counters(p, x, w_up is not None, invariant)
    zeroed = pack(p, x, w_gate, b_gate, words, spill, stats, compression, activation, invariant, counted)
    multiply(p, x, words, spill, w_up, w_down, b_up, b_down, y, l1, compression, activation, zeroed, stats)


# Bytes over which a matrix may be spread: kernels find rows by 32-bit offsets of 16 bytes.
_REACH = 16 << 32


# Dense products


def _dense_on_cuda(layer: Layer, activation: Activation, fast: bool) -> tuple[Tensor, Tensor]:
    """y, and the gate before its activation."""
    gate, up, down, biases = _weights(layer)
    n = len(layer.w_gate)
    if n % MULTIPLE or device.capability(layer.x.device.index) != device.SM_90:
        tokens = tokens_of(layer.x, layer.x_scale)
        with torch.autocast("cuda", enabled=False):
            made = float8.gate_of(tokens, gate, biases[0])
            return float8.dense(tokens, gate, up, down, biases, activation, use_fast_accum=fast), made
    x, scale = layer.x, None if layer.x_scale is None else laid_bias(layer.x_scale)
    if x.dtype != E4M3 or scale is None:
        x, scale = tokens_in_float8(layer.x, scale)
    else:
        x = _readable("x", x).view(E4M3)
    made = product(x, scale, layer.w_gate, layer.gate_scale, layer.b_gate, fast)
    projected = None
    if layer.w_up is not None and layer.up_scale is not None:
        projected = product(x, scale, layer.w_up, layer.up_scale, layer.b_up, fast)
    hidden = hidden_in_float8(made, projected, activation)
    # stored by rows of neurons, and read along neurons here
    w_down = layer.w_down.t()
    if not w_down.is_contiguous():
        w_down = transpose(layer.w_down, layer.w_down.new_empty(w_down.shape))
    return product(*hidden, w_down, layer.down_scale, layer.b_down, fast), made


def product(
    x: Tensor, x_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None, fast: bool = True
) -> Tensor:
    """x @ w^T + bias in bfloat16, of e4m3 values and the scales of their rows; the product is rounded before the bias.

    ``torch._scaled_mm`` takes no bias for some sizes.
    """
    matrices = x, w if w.is_contiguous() else w.contiguous()
    how: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
    made = torch._scaled_mm(matrices[0], matrices[1].t(), scale_a=x_scale[:, None], scale_b=scale[None], **how)
    return made if bias is None else made.add_(bias)


def hidden_in_float8(gate: Tensor, up: Tensor | None, activation: Activation = RELU) -> tuple[Tensor, Tensor]:
    """The hidden state of a dense layer in e4m3, and the scales of its rows, from a gate before its activation."""
    hidden, scale = gate.new_empty(gate.shape, dtype=E4M3), gate.new_empty(len(gate), dtype=torch.float32)
    run(_quantise_hidden, (gate, up, hidden.view(torch.uint8), scale), activation)
    return hidden, scale


def tokens_in_float8(x: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows of x in e4m3, and their scales; one that is ``given`` for all."""
    x = _readable("x", x)
    q, scale = x.new_empty(x.shape, dtype=E4M3), x.new_empty(len(x), dtype=torch.float32)
    run(quantise, (x, given, q.view(torch.uint8), scale))
    return q, scale


def quantise(p: Program, x: View, given: View | None, q: View, scale: View) -> None:
    given = p.scratch(torch.float32, 0) if given is None else given
    p.launch(tuning.quantize_tokens(x.dtype, "tokens"), x, given, q, scale)


def _quantise_hidden(p: Program, gate: View, up: View | None, q: View, scale: View, activation: Activation) -> None:
    spec = tuning.quantize_tokens(gate.dtype, "plain" if up is None else "gated")
    p.launch(spec, gate, up, q, scale, activation.code(), threshold_pair(activation, gate.dtype))


_SCALED = (
    "Tensor x, Tensor? x_scale, Tensor w_gate, Tensor gate_scale, Tensor? w_up, Tensor? up_scale, Tensor w_down, "
    "Tensor down_scale, Tensor? b_gate, Tensor? b_up, Tensor? b_down"
)

_cuda = _operator(on_cuda)
# ``ffn_float8`` of plain tensors for which ``library.is_direct`` holds, with all arguments of the schema
direct = _cuda

ffn_float8 = register(
    f"ffn_float8({_SCALED}, int compression, str strategy, Tensor? site, {ACTIVATION}, bool fast_accum=True, "
    "bool invariant=False) -> Tensor",
    fake=_operator(None),
    cpu=_operator(_on_cpu),
    cuda=_cuda,
)
