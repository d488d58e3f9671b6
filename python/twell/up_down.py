"""``sparse_up_down``: the up and down projections at the non-zeros of a gate that the caller has computed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import _autograd, _execution, _modes, ops
from twell._activation import Activation, ActivationName, activation_of
from twell._admission import needing_grad, require_alike, sharded, strided
from twell._execution import Aux, Made, copies_down
from twell._plain import overridden
from twell._runtime import geometry
from twell._runtime.log import warn_once
from twell.functional import Strategy
from twell.ops import hybrid
from twell.ops.library import no_view, unviewed
from twell.ops.operands import Layer, Mains, Operands
from twell.strategy.plan import Facts, Route, route_of, routed
from twell.strategy.site import AutoStrategy, enroll, found, tokens_of, without_site
from twell.strategy.tables import imposed_on_call

_NAME = "sparse_up_down"


def sparse_up_down(
    x: Tensor | None,
    gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: ActivationName = "relu",
    threshold: float | Tensor = 0,
    strategy: Strategy | AutoStrategy = "auto",
    compression: int = 8,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Aux]:
    """``(relu(gate) * (x @ w_up^T + b_up)) @ w_down^T + b_down``, on the non-zeros of a gate that is given.

    It is ``twell.sparse_gated_ffn`` behind the gate projection, for gates that come from elsewhere: a projection with
    an adapter or with quantised weights, a product in fp8, or another layer.

    Args:
        x: tokens [..., K]; None without ``w_up``.
        gate: [..., N], before the activation, which the function applies. Without ``w_up`` what the activation makes of
            it is the hidden state: ``relu(gate) @ w_down^T + b_down``.
        w_up: [N, K], or None. w_down: [K, N], as in nn.Linear; sizes and layouts are those of
            ``twell.sparse_gated_ffn``.
        b_up: [N], with ``w_up`` alone. b_down: [K]. Optional.
        activation, threshold, compression: as in ``twell.sparse_gated_ffn``.
        strategy: "auto", "row", "union", "dense", or an ``AutoStrategy`` that is kept, as there. "auto" compares the
            whole layer's costs, in which the gate is about the same for all. The int8 screen has no part in it.
        return_aux: also return ``Aux(l1, l0)``.

    Returns y [..., K] of the dtype of gate (under autocast: of autocast). y and ``aux.l1`` are differentiable once,
    with respect to x, gate, weights and biases. The gradient of the gate [..., N] is zero wherever the activation of
    the gate is. For backward a call keeps its operands and the gate in the hybrid format.

    All operands are of one dtype and on one device, as in ``twell.sparse_gated_ffn``. Tensors that override PyTorch's
    operators, DTensors, transforms of torch.func and exports with gradients run dense by "auto"; a named strategy
    raises NotImplementedError in the latter two. Raises TypeError, ValueError or NotImplementedError naming what was
    got and expected.
    """
    kind = activation_of(activation, threshold, gated=w_up is not None)
    operands = {"x": x, "gate": gate, "w_up": w_up, "w_down": w_down, "b_up": b_up, "b_down": b_down}
    return run(operands, kind, strategy, compression, return_aux)


def run(
    operands: dict[str, Tensor | None],
    kind: Activation,
    strategy: Strategy | AutoStrategy,
    compression: int,
    return_aux: bool,
    made: Made | None = None,
) -> Tensor | tuple[Tensor, Aux]:
    """Run ``sparse_up_down``; ``made`` as in ``functional.run``."""
    t = _admit(operands)
    w_up, w_down = operands["w_up"], operands["w_down"]
    given = Layer(*(t.get(name) for name in Layer._fields))
    site = strategy if isinstance(strategy, AutoStrategy) else None
    asked = strategy if site is None else "auto"
    training = bool(needing_grad(t))
    route = _routed(given, t, asked, site, kind, compression, training)
    kind.level(given.gate.dtype)
    # the operators find the site by a weight that the caller holds
    first = None
    if site is not None and (route.strategy == "auto" or route.measurement is not None):
        first = w_down if w_up is None else w_up
        if made is not None and made.held is not None:
            first = made.held
        assert first is not None
        if not _modes.tracing(0) and type(first) in _modes.PLAIN_TENSORS and found(first) is not site:
            enroll(first, site)
    if route.strategy == "dense":
        y, l1, nonzeros = _dense(given, kind, route, return_aux, made)
    elif training:
        y, l1, nonzeros = _train(given, kind, compression, route, 0 if made is None else made.first_column)
    else:
        y, l1, nonzeros = _infer(given, kind, compression, route.strategy, first, return_aux)
    if route.holder is not None:
        # training keeps its choice until backward passes y
        route.holder.hold(y)
    return (y, _execution.per_token(l1, nonzeros, tokens_of(given.gate))) if return_aux else y


def _admit(operands: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Check the operands against each other; return those that are not None, cast as autocast asks."""
    t = strided(_NAME, operands, ("x", "w_up", "b_up", "b_down"))
    if ("x" in t) != ("w_up" in t):
        there, missing = ("x", "w_up") if "x" in t else ("w_up", "x")
        raise ValueError(f"{_NAME}: {missing} must be given with {there}, got None")
    if "b_up" in t and "w_up" not in t:
        raise ValueError(f"{_NAME}: b_up must be None without w_up, got a tensor")
    gate, w_down = t["gate"], t["w_down"]
    if not gate.is_floating_point():
        raise TypeError(f"{_NAME}: gate must have a floating dtype, got {gate.dtype}")
    if w_down.dim() != 2:
        raise ValueError(f"{_NAME}: w_down must be [K, N], got {list(w_down.shape)}")
    if gate.dim() == 0:
        raise ValueError(f"{_NAME}: gate must be [..., N], got a scalar")
    k, n = w_down.shape
    lead = list(gate.shape[:-1])
    shapes = {"gate": [*lead, n], "x": [*lead, k], "w_up": [n, k], "b_up": [n], "b_down": [k]}
    for name, expected in shapes.items():
        if name in t and list(t[name].shape) != expected:
            others = f"w_down has K = {k}, N = {n}"
            raise ValueError(f"{_NAME}: {name} must be {expected} ({others}), got {list(t[name].shape)}")
    require_alike(_NAME, t)
    return t


def _routed(
    given: Layer,
    operands: dict[str, Tensor],
    asked: Any,
    site: AutoStrategy | None,
    activation: Activation,
    compression: int,
    training: bool,
) -> Route:
    """The route of a call. The choice of "auto" in inference is left to the operator."""
    gate, (k, n) = given.gate, given.w_down.shape
    m, device = tokens_of(gate), gate.device
    odd = overridden(operands) or ("DTensors" if sharded(operands) else "")
    facts = Facts(
        _NAME,
        asked,
        site=site is not None,
        n=n,
        k=k,
        compression=compression,
        dtype=gate.dtype,
        device=device.type,
        imposed=imposed_on_call(device.type, device.index) if asked == "auto" else "",
        training=training,
        needing=tuple(needing_grad(operands)),
        moving=activation.moves,
        transformed=_modes.transform_of(operands, training),
        overridden=odd,
        onnx=_modes.to_onnx(),
        exporting=_modes.exporting(),
        tracing=_modes.tracing(m),
    )
    route = routed(facts)
    if odd and asked != "dense" and not _modes.compiling():
        got = f"{odd} may make something else of PyTorch's operators than the sparse kernels do"
        warn_once(f"{_NAME} runs dense: {got}")
    if route.strategy != "auto" or not training:
        return route
    copied = copies_down(given.w_down)
    if site is not None and facts.tracing:
        route = route_of(site.trace(m, copied))
    else:
        # what has the shape of x
        tokens = gate[..., :1].expand(*gate.shape[:-1], k) if given.x is None else given.x
        how = n, given.w_up is not None, True, copied
        route = without_site(tokens, *how) if site is None else site.begin(tokens, *how)
    # a site that others share may know the screen
    return route._replace(screen=False)


def _dense(
    given: Layer, activation: Activation, route: Route, return_aux: bool, made: Made | None
) -> tuple[Tensor, Any, Any]:
    """The same by PyTorch's own operators."""
    x, _, w_up, w_down, _, b_up, b_down, gate, *_ = given
    if route.measurement is not None:
        route.measurement.dense(gate, activation.level(gate.dtype))
    if made is None or made.dense is None:
        packed = activation.after(gate, inplace=False)
        hidden = activation.hidden(packed, None if w_up is None else F.linear(x, w_up, b_up))
        y = no_view(F.linear(hidden, w_down, b_down))
    else:
        y, hidden, packed = made.dense()
    if not return_aux:
        return y, None, None
    l1 = hidden.abs().sum(dtype=hybrid.accumulator(hidden.dtype))
    # a gate that is NaN counts
    return y, l1, packed.numel() - (packed <= activation.level(gate.dtype)).sum()


def _flat(given: Layer) -> Any:
    """x, the gate, w_up, w_down [K, N] and the biases, of tokens [M]."""
    x, _, w_up, w_down, _, b_up, b_down, gate, *_ = given
    if gate.dim() != 2:
        gate = gate.reshape(-1, gate.shape[-1])
        x = None if x is None else x.reshape(-1, x.shape[-1])
    return x, gate, w_up, w_down, None, b_up, b_down


def _infer(
    given: Layer, activation: Activation, compression: int, strategy: str, site: Tensor | None, return_aux: bool
) -> tuple[Tensor, Any, Any]:
    x, gate, w_up, w_down, *biases = _flat(given)
    arguments = x, None, w_up, w_down.t(), *biases, compression, strategy, site, *activation, False, False, gate
    y, l1, nonzeros = ops.ffn_aux(*arguments) if return_aux else (ops.ffn(*arguments), None, None)
    return _as_given(y, given), l1, nonzeros


def _train(
    given: Layer, activation: Activation, compression: int, route: Route, first_column: int
) -> tuple[Tensor, Any, Any]:
    measurement, layer, note = route.measurement, Operands(*_flat(given)), None
    if measurement is not None:

        def note(nonzeros: Tensor, kept: Tensor) -> None:
            most = geometry.hybrid_capacity(measurement.problem.m, measurement.problem.n, route.held)
            measurement.counts(nonzeros, hybrid.sizes(kept, len(layer.w_gate))[:-1], most=most)

    call = _autograd.Call(_NAME, compression, route.held, activation, totals=True, note=note)
    y, l1, nonzeros = _autograd.ffn(call._replace(first=first_column, given=True), layer, Mains())
    return _as_given(y, given), l1, nonzeros


def _as_given(y: Tensor, given: Layer) -> Tensor:
    """y with the leading dimensions of the gate."""
    lead = given.gate.shape[:-1]
    return y if len(lead) == 1 else unviewed(y, torch.Size((*lead, y.shape[-1])))
