"""``sparse_up_down`` and ``sparse_up_down_aux``: ``ffn`` and ``ffn_aux`` behind a given gate [M, N].

y = h @ w_down + b_down with h = act(gate) * (x @ w_up^T + b_up), and without ``w_up``, x and ``b_up`` h = act(gate).
The gate is that before the activation, and the first operand, before x. Strategies and ``site`` are as in ``ffn``;
there is no int8 screen.

gate is [M, N]; x [M, K], w_up [N, K] and b_up [N], or none of them; w_down [N, K] and b_down [K]. y is [M, K], and
``sparse_up_down_aux`` also returns l1 and nonzeros, as ``ffn_aux``.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import _memory, _modes
from twell._activation import Activation, activation_of
from twell._runtime import geometry
from twell._runtime.program import Program
from twell.ops import union
from twell.ops.library import (
    ACTIVATION,
    STORED_DTYPES,
    WIDE_DTYPES,
    Implementation,
    Shape,
    are_rows,
    check,
    check_layer,
    check_matrix,
    check_rank,
    laid_bias,
    new,
    readable_down,
    register,
    rows,
)
from twell.ops.operands import run
from twell.ops.pack import pack_gate, shapes
from twell.ops.up_down import behind_on_cpu, counters, multiply
from twell.strategy.plan import Facts, Route, routed
from twell.strategy.site import site_of, without_site
from twell.strategy.tables import imposed_on_call

GIVEN = "Tensor gate, Tensor? x, Tensor? w_up, Tensor w_down, Tensor? b_up, Tensor? b_down"

_Totals = tuple[Tensor, Tensor | None, Tensor | None]
# y, parts of the sum of |h|, stats and, of "union", unions
_Counted = tuple[Tensor, Tensor, Tensor, Tensor | None]


class Given(NamedTuple):
    """A given gate [M, N] and the operands behind it: w_down [N, K]; without w_up neither x nor b_up."""

    gate: Any
    x: Any
    w_up: Any
    w_down: Any
    b_up: Any
    b_down: Any

    def tokens(self, k: int) -> Tensor:
        """x, or what has its shape [..., k]."""
        gate, x, *_ = self
        if x is None:
            x = gate[..., :1].expand(*gate.shape[:-1], k)
        return x  # type: ignore[no-any-return]


def check_given(given: Given, wide: bool = False) -> None:
    """Raise unless the operands fit each other."""
    gate, x, w_up, w_down, b_up, b_down = given
    check_rank("gate", gate)
    if w_up is None:
        for name, operand in (("x", x), ("b_up", b_up)):
            if operand is not None:
                raise ValueError(f"{name} must be None without w_up, got a tensor")
        check_matrix("w_down", w_down, WIDE_DTYPES if wide else STORED_DTYPES)
        if b_down is not None:
            check("b_down", b_down, w_down.shape[1:], w_down.dtype)
    else:
        if x is None:
            raise ValueError("x must be given with w_up, got None")
        check_layer(x, w_up=w_up, w_down=w_down, b_up=b_up, b_down=b_down, wide=wide)
    m = gate.shape[0] if x is None else x.shape[0]
    check("gate", gate, (m, w_down.shape[0]), w_down.dtype)


def _run(
    sparse: Callable[..., _Counted], given: Given, compression: int, activation: Activation, route: Route, totals: bool
) -> _Totals:
    """Compute the layer as ``route`` says; ``sparse`` is the sparse strategies of its device."""
    measurement = route.measurement
    if route.strategy == "dense":
        return _dense(given, activation, measurement, totals)
    y, l1, stats, unions = sparse(given, compression, activation, route.name, totals or measurement is not None)
    if not totals and measurement is None:
        return y, None, None
    counts = stats.select(2, 0)
    nonzeros = counts.sum()
    if measurement is not None:
        # a row of stats has 8 tokens
        measurement.counts(nonzeros, unions, heaviest=counts.sum(1).amax())
    return y, l1.sum() if totals else None, nonzeros


def _dense(given: Given, activation: Activation, measurement: Any, totals: bool) -> _Totals:
    gate, x, w_up, w_down, b_up, b_down = given
    kind, level = gate.device.type, activation.level(gate.dtype)
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
        up = None if w_up is None else F.linear(x, w_up, b_up)
        hidden = activation.hidden(activation.after(gate, inplace=False), up)
        if measurement is not None:
            measurement.dense(gate, level)
        y = F.linear(hidden, w_down.t(), b_down)
        if not totals:
            return y, None, None
        return y, hidden.abs().sum(dtype=torch.float32), gate.numel() - (gate <= level).sum()


def _route(given: Given, strategy: str, site: Tensor | None) -> Route:
    """The route of a call; that of "auto" by costs."""
    on = given.gate.device
    imposed = imposed_on_call(on.type, on.index) if strategy == "auto" else ""
    route = routed(Facts("sparse_up_down", strategy, imposed=imposed))
    if route.strategy == "auto":
        n, k = given.w_down.shape
        tokens, copied = given.tokens(k), not are_rows(given.w_down.shape, given.w_down.stride())
        choose = without_site if site is None else site_of(site, False).begin
        route = choose(tokens, n, given.w_up is not None, False, copied, one_pass=False)
        # a site that others share may know the screen
        route = route._replace(screen=False)
    return route


def _operators(compute: Callable[..., _Totals] | None) -> list[Implementation]:
    """Both operators as functions of the schema's arguments; those of fake tensors have nothing to compute."""

    def run(totals: bool, *arguments: Any) -> _Totals:
        given, (compression, strategy, site, name, threshold) = Given(*arguments[:6]), arguments[6:]
        activation = activation_of(name, threshold, given.w_up is not None)
        activation.level(given.gate.dtype)
        geometry.words_per_tile(compression)
        check_given(given)
        if compute is None:
            gate = given.gate
            y = gate.new_empty((gate.shape[0], given.w_down.shape[1]))
            return y, gate.new_empty((), dtype=torch.float32), gate.new_empty((), dtype=torch.int64)
        if _modes.capturing(given.w_down):
            _memory.note_capture(given.w_down)
        return compute(given, compression, activation, _route(given, strategy, site), totals)

    return [lambda *arguments: run(False, *arguments)[0], lambda *arguments: run(True, *arguments)]


def _sparse_on_cpu(given: Given, compression: int, activation: Activation, route: str, counted: bool) -> _Counted:
    gate = activation.after(given.gate, inplace=False)
    return behind_on_cpu(gate, *given[1:], activation, route == "union")


def _sparse_on_cuda(given: Given, compression: int, activation: Activation, route: str, counted: bool) -> _Counted:
    gate, x, w_up, w_down, b_up, b_down = given
    y = gate.new_empty((gate.shape[0], w_down.shape[1]))
    if not len(gate):
        return y, gate.new_zeros(1, dtype=torch.float32), gate.new_zeros((1, 1, 2), dtype=torch.int32), None
    figures: list[Any] = new(gate, _figures(y, gate.shape[1], route)) if counted else [None] * 3
    up = (None, None, None) if w_up is None else (rows(x), rows(w_up), laid_bias(b_up))
    tensors = rows(gate), *up[:2], readable_down(w_down.t()), up[2], laid_bias(b_down), y, *figures
    run(_build, tensors, compression, activation, route)
    l1, stats, sizes = figures
    return y, l1, stats, sizes[:-1] if counted and route == "union" else None


def _figures(y: Any, n: int, route: str) -> tuple[Shape, Shape, Shape]:
    """Shapes of l1, stats and sizes, which "row" leaves alone."""
    _, parts, stats, sizes = union.shapes(y, n)
    return parts if route == "union" else (torch.float32, y.shape[0]), stats, sizes


def _build(p: Program, *views: Any) -> None:
    """Launch a layer behind its gate into y and, if they are given, l1, stats and sizes."""
    gate, x, w_up, w_down, b_up, b_down, y, *figures, compression, activation, route = views
    m, n = gate.shape
    if figures[0] is None:
        figures = [p.scratch(*shape) for shape in _figures(y, n, route)]
    l1, stats, sizes = figures
    if route == "union":

        def pack_slice(first: int, last: int, packed: union.Packed) -> None:
            pack_gate(p, gate.part(first, last), *packed, compression, activation)

        behind = y if x is None else x, w_up, w_down, b_up, b_down
        union.by_slices(p, behind, pack_slice, (y, l1, stats, sizes), compression, activation)
        return
    words, spill, _ = (p.scratch(*shape) for shape in shapes(gate.dtype, m, n, compression))
    counted = counters(p, y, w_up is not None, False)
    zeroed = pack_gate(p, gate, words, spill, stats, compression, activation, counted)
    multiply(p, x, words, spill, w_up, w_down, b_up, b_down, y, l1, compression, activation, zeroed, stats)


_on_cuda = _operators(lambda *call: _run(_sparse_on_cuda, *call))
_cuda = _on_cuda[0]
_ARGUMENTS = f"{GIVEN}, int compression, str strategy, Tensor? site, {ACTIVATION}"

sparse_up_down, sparse_up_down_aux = (
    register(schema, fake=fake, cpu=cpu, cuda=cuda, instead="twell.sparse_up_down")
    for schema, fake, cpu, cuda in zip(
        (
            f"sparse_up_down({_ARGUMENTS}) -> Tensor",
            f"sparse_up_down_aux({_ARGUMENTS}) -> (Tensor y, Tensor l1, Tensor nonzeros)",
        ),
        _operators(None),
        _operators(lambda *call: _run(_sparse_on_cpu, *call)),
        _on_cuda,
    )
)
