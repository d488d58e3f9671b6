"""How a call whose route is known is computed; ``functional`` checks operands and finds the route."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from twell import ops
from twell.base.activation import Activation
from twell.call import autograd
from twell.call import choice as _choice
from twell.call.autograd import gated_relu
from twell.call.choice import Selection
from twell.choose.plan import Route
from twell.choose.site import tokens_of
from twell.ops import calls, hybrid, screened
from twell.ops.calls import How, Run
from twell.ops.dense import as_torch, dense, fuses, in_inference
from twell.ops.ffn import inference_of
from twell.ops.ffn import on_cuda as ffn_on_cuda
from twell.ops.library import are_rows, unviewed
from twell.ops.operands import Form, Layer, Mains
from twell.runtime import geometry, modes


class Aux(NamedTuple):
    """Figures of one call, 0-d float32 tensors on its device; 0 where there are no tokens.

    l1: mean over tokens of the sum of |hidden state|; differentiable where the output is. float64 in dense calls of it.
    l0: mean over tokens of the number of non-zeros after ReLU; not differentiable.
    """

    l1: Tensor
    l0: Tensor


# so that exported programs that return it can be saved
pytree._register_namedtuple(Aux, serialized_type_name="twell.Aux")


class Made(NamedTuple):
    """What a caller says of weights that it made for one call.

    held: a weight that it holds, by which operators find the site. first_column: gradients of the weights are wanted
    from here on, as columns [N, K]. dense: computes y, the hidden state and the gate, before or after its activation,
    in place of PyTorch's operators on the weights. apply: of a call that needs gradients, see ``autograd.ffn``.
    """

    held: Tensor | None
    first_column: int
    dense: Callable[[], tuple[Tensor, Tensor, Tensor]] | None
    apply: Callable[..., Any] | None = None


class Extra(NamedTuple):
    """What only some callers ask: ``choice``, what PyTorch chooses of the pre-activations; ``counts`` of sparse_ffn."""

    made: Made | None = None
    choice: Selection | None = None
    counts: Tensor | None = None


NOTHING = Extra()


class Call(NamedTuple):
    """What is known of a call besides its operands.

    training: whether a gradient will be needed. plain: whether all operands are plain tensors in eager mode. direct:
    whether the code of operators may be called without the dispatcher, too.
    """

    name: str
    how: How
    extra: Extra
    return_aux: bool
    training: bool
    plain: bool
    direct: bool

    @property
    def activation(self) -> Activation:
        return self.how.activation


def run(call: Call, layer: Layer, route: Route, mains: Mains, site: Tensor | None) -> Tensor | tuple[Tensor, Aux]:
    """Compute ``layer`` as ``route`` says. The operators find the layer's ``AutoStrategy`` by ``site``, if given."""
    tokens = layer.tokens
    if route.strategy == "dense" and not layer.scaled:
        own = None if call.extra.made is None else call.extra.made.dense
        y, hidden, gate, nonzeros = _dense(call, layer, mains) if own is None else (*own(), None)
        if route.measurement is not None:
            candidates = screened.wanted(route.measurement, layer, call.activation) if layer.gate is None else None
            route.measurement.dense(gate, call.activation.level(gate.dtype), candidates)
        if route.holder is not None:
            # training keeps its choice until backward passes y
            route.holder.hold(y)
        if call.extra.counts is not None:
            fires = ~(gate <= call.activation.level(gate.dtype))
            call.extra.counts.add_(fires.reshape(-1, fires.shape[-1]).sum(0))
        return (y, dense_aux(hidden, gate, call.activation, nonzeros)) if call.return_aux else y

    y, l1, nonzeros = _sparse(call, layer, route, mains, site)
    if route.holder is not None:
        route.holder.hold(y)
    if y.dim() != tokens.dim():
        y = unviewed(y, torch.Size((*tokens.shape[:-1], y.shape[-1])))
    return (y, per_token(l1, nonzeros, tokens_of(tokens))) if call.return_aux else y


def _sparse(
    call: Call, layer: Layer, route: Route, mains: Mains, site: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y of the tokens [M, K], or of x's shape, and, where they are wanted, the sum of |h| and the non-zeros."""
    _, choice, counts = call.extra
    if choice is not None and call.training:
        found = _choice.ffn(layer, choice, call.how.compression, counts)
        if route.measurement is not None:
            route.measurement.counts(found[2].detach(), None)
        return found
    if choice is not None:
        return _choice.inference(layer, choice, call.how.compression, route.strategy, counts)
    if call.activation.by_neuron:
        # operators take thresholds of neurons behind the biases of the gate
        level = call.activation.level(layer.x.dtype)
        bias = torch.zeros_like(level) if layer.b_gate is None else layer.b_gate
        layer = layer._replace(b_gate=torch.cat([bias, level]))
        call = call._replace(how=call.how._replace(activation=Activation(call.activation.name)))
    if call.training and layer.gate is None:
        return _train(call, layer, route, mains)
    for name in ("x", "gate"):
        if (t := getattr(layer, name)) is not None and t.dim() != 2:
            layer = layer._replace(**{name: t.reshape(-1, t.shape[-1])})
    if call.training:
        return _train(call, layer, route, mains)
    if call.direct and counts is None:
        return ffn_on_cuda(layer, call.how.compression, call.activation, route, call.return_aux, call.how.fast)
    x, w_gate, w_up, w_down, *biases = layer[:7]
    operands = x, w_gate, w_up, w_down.t(), *biases
    if counts is not None:
        # what training keeps knows the neurons
        y, l1, nonzeros, kept = ops.hybrid_forward(*operands, call.how.compression, 0, *call.activation)
        counts += hybrid.firing(kept, x, len(w_gate), w_up is not None)
        return y, l1, nonzeros
    how = (*call.activation, route.screen, route.invariant, *layer[7:], call.how.fast)
    arguments = (*operands, call.how.compression, route.strategy, site, *how)
    return ops.ffn_aux(*arguments) if call.return_aux else (ops.ffn(*arguments), None, None)


def _train(call: Call, layer: Layer, route: Route, mains: Mains) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, the sum of |h| and the number of non-zeros of a sparse call that needs gradients."""
    note, measurement = None, route.measurement
    if measurement is not None or call.extra.counts is not None:

        def note(nonzeros: Tensor, kept: Tensor) -> None:
            tokens, n = layer.tokens, layer.w_down.shape[1]
            pattern = kept, tokens.detach().reshape(-1, tokens.shape[-1]), n, layer.w_up is not None
            if call.extra.counts is not None:
                call.extra.counts.add_(hybrid.firing(*pattern))
            if measurement is None:
                return
            unions = hybrid.unions(*pattern)
            most = geometry.hybrid_capacity(measurement.problem.m, measurement.problem.n, route.held)
            candidates = screened.wanted(measurement, layer, call.activation) if layer.gate is None else None
            measurement.counts(nonzeros, unions, most=most, candidates=candidates)

    totals = call.return_aux or measurement is not None or layer.gate is not None
    how = autograd.Call(call.name, call.how.compression, route.held, call.activation, route.screen, totals, note)
    first, apply = (0, None) if call.extra.made is None else (call.extra.made.first_column, call.extra.made.apply)
    return autograd.ffn(how._replace(first=first), layer, mains, call.direct, apply)


def _dense(call: Call, layer: Layer, mains: Mains) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """y, h, the gate before or after its activation, and the non-zeros if they have a gradient, by PyTorch."""
    activation, nonzeros = call.activation, None
    if any(main is not None for main in mains):
        given = {name: main for name, main in mains._asdict().items() if main is not None}
        into: Any = autograd.IntoMain.apply
        layer = layer._replace(**{name: into(getattr(layer, name), main) for name, main in given.items()})
    operands = () if call.plain else tuple(operand for operand in layer if operand is not None)

    def between(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
        nonlocal nonzeros
        if call.extra.choice is not None:
            gate, nonzeros = _choice.hidden_of(gate, call.extra.choice)
            return gate, gate
        if up is not None and layer.gate is None and autograd.fuses(gate, activation, operands):
            return autograd.gated_relu(gate, up, activation), gate
        inplace = up is None and layer.gate is None and not call.training and modes.eager(operands)
        gate = activation.after(gate, inplace)
        return activation.hidden(gate, up), gate

    seen: list[Tensor] = []
    alone = call.direct and not call.training and call.extra.choice is None
    how = in_inference(layer, activation) if alone else between
    y = dense(layer, how, see=lambda *found: seen.extend(found))
    return y, seen[0], seen[1], nonzeros


def dense_aux(hidden: Tensor, gate: Tensor, activation: Activation, nonzeros: Tensor | None = None) -> Aux:
    """``Aux`` of a dense hidden state and its gate, before or after its activation; ``nonzeros``, if it is known."""
    l1 = hidden.abs().sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
    if nonzeros is None:
        nonzeros = gate.numel() - (gate <= activation.level(gate.dtype)).sum()
    return per_token(l1, nonzeros, tokens_of(hidden))


def per_token(l1: Any, nonzeros: Any, tokens: int) -> Aux:
    # an exported graph has no guard for the case of no tokens, and takes max(tokens, 1) for tokens
    least: Any = torch.full_like(nonzeros, tokens).clamp(min=1) if modes.exporting() else max(tokens, 1)
    return Aux(l1 / least, nonzeros.float() / least)


def copies_down(w_down: Tensor) -> bool:
    """Whether sparse strategies copy ``w_down`` [K, N] by rows at each call."""
    return not are_rows(w_down.shape[::-1], w_down.stride()[::-1])


def settled(call: Call, layer: Layer, route: Route, chosen: bool) -> Tensor | None:
    """y of a plain call, whose kind is known then; None of a call that must not or cannot be."""
    if route.measurement is not None or modes.capturing(layer.x) or isinstance(call.activation.threshold, Tensor):
        return None
    if call.training and (modes.checkpointed() or modes.in_backward()):
        return None
    run: Run | None
    if call.training and route.strategy == "dense":
        run = _trained_by_torch(layer, call.activation)
    elif call.training:
        own = call.how.compression, route.held, call.activation, route.screen
        run = autograd.passes_of(Form.of(layer.unscaled), *own) if layer.x.numel() else None
    else:
        # a layer that copies the down weight may lay it by rows at its next call
        run = inference_of(layer, call.how.compression, call.activation, route, call.how.fast)
    operands = layer if layer.scaled else layer[:7]
    y = None if run is None else run(*operands)
    if run is not None and y is not None:
        calls.note(operands, call.how, call.training, run, route, chosen)
    return y


def _trained_by_torch(layer: Layer, activation: Activation) -> Run:
    """What computes y of plain tensors like these by PyTorch's own operators, for backward."""
    fused = fuses(layer, activation, training=True)

    def between(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
        if fused and up is not None:
            return gated_relu(gate, up, activation), gate
        return activation.hidden(activation.after(gate, inplace=False), up), gate

    return as_torch(layer, between)
