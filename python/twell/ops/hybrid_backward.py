"""``hybrid_backward``: gradients of ``hybrid_forward`` from dy, the gradient of y, and dl1, that of the sum of |h|.

dh = dy @ w_down^T + dl1 * sign(h) is computed only at the non-zeros of the gate. d_gate = dh * up and d_up = dh * gate,
or d_gate = dh without an up projection. dx = d_gate @ w_gate + d_up @ w_up; dw_gate = d_gate^T @ x, dw_up = d_up^T @ x,
dw_down = h^T @ dy, and the biases' are sums over the tokens. h, d_gate and d_up are rounded, sums are fp32. This is
relu; ``base.activation`` has the others. Without dl1 it is zero. Of the weights' gradients the columns from ``first``
on are wanted: a layer with adapters has their weights there, behind frozen ones. The others are zero, or right.

x, w_gate, w_up, w_down, b_gate, b_up, kept and a given gate are those of the forward pass, dy is [M, K], and dl1 0-d.
input_grad requests dx [M, K]; weight_grad requests dw_gate, dw_up, dw_down [N, K], db_gate and db_up [N]. ``gate_grad``
requests the gradient [M, N] of a given gate, zero where its activation is; it stands at dw_gate. A gradient that is not
requested, or has no operand, is an empty [0].

``hybrid_backward_accumulate`` adds the weights' gradients to float32 tensors: main_gate, main_up and main_down are
[N, K], in any layout; with ``as_stored`` main_down is [K, N], as nn.Linear has it. A layout that kernels cannot write
in place costs a float32 [N, K] of scratch. The biases' gradients are returned, in x's dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from twell.base.activation import activation_of
from twell.ops import hybrid, hybrid_cpu
from twell.ops.hybrid import Backward
from twell.ops.library import ACTIVATION, STRIDE_MULTIPLE, aligned, check, check_matrix, has_rows, laid, register, rows
from twell.ops.operands import Gradients, Layer, Mains, run
from twell.ops.slices import Added, is_sliced
from twell.runtime import specs
from twell.runtime.program import Program, View

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def outputs(layer: Layer, wanted: Sequence[bool]) -> Gradients:
    """Uninitialised gradients of x's dtype of the first six operands: those that are ``wanted`` and there, or None."""
    gradients = (layer.w_down.new_empty(o.shape) if w and o is not None else None for w, o in zip(wanted, layer))
    found = Gradients(*gradients)
    # thresholds behind the biases have no gradient
    return found if found.b_gate is None else found._replace(b_gate=torch.zeros_like(found.b_gate))


def present(gradients: Gradients, like: Tensor) -> Outputs:
    """``gradients`` as an operator returns them: an empty [0] for each None."""
    own = gradients if gradients.gate is None else gradients._replace(w_gate=gradients.gate)
    dx, dw_gate, dw_up, dw_down, db_gate, db_up = (like.new_empty(0) if g is None else g for g in own[:6])
    return dx, dw_gate, dw_up, dw_down, db_gate, db_up


# the operands that both operators begin with; b_down's gradient is the sum of dy and needs neither
BACKWARD = (
    "Tensor dy, Tensor? dl1, Tensor? x, Tensor? w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, "
    "Tensor kept"
)


def _checked(operands: Sequence[Any], name: str, threshold: float, gate: Tensor | None = None) -> Backward:
    """The operands of ``BACKWARD``, and the activation; raises unless they fit each other."""
    dy, dl1, *own, kept = operands
    layer = Layer(*own)._replace(gate=gate)
    activation = activation_of(name, threshold, layer.w_up is not None, top_k=gate is None)
    activation.level(layer.w_down.dtype)
    given = Backward(dy, dl1, layer, kept, activation)
    hybrid.check_backward(given)
    return given


def _filling(implementation: Callable[[Backward, Gradients, int], None]) -> Callable[..., Any]:
    """What fills checked gradients as a function of the schema's arguments."""

    def filled(*arguments: Any) -> Outputs:
        input_grad, weight_grad, name, threshold, first, gate, gate_grad = arguments[9:]
        given = _checked(arguments[:9], name, threshold, gate)
        layer = given.layer
        columns = layer.w_down.shape[1]
        if first % STRIDE_MULTIPLE or not 0 <= first < max(columns, 1):
            raise ValueError(f"first must be a multiple of {STRIDE_MULTIPLE} below {columns} columns, got {first}")
        gradients = outputs(layer, (input_grad, *[weight_grad] * 5))
        if gate_grad and gate is not None:
            gradients = gradients._replace(gate=torch.zeros_like(gate, memory_format=torch.contiguous_format))
        by_slices(implementation, given, gradients, first)
        return present(gradients, layer.w_down)

    return filled


def _adding(implementation: Callable[[Backward, Mains, Gradients], None]) -> Callable[..., Any]:
    """The same of weights' gradients that are added to mains."""

    def added(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        main_gate, main_up, main_down, input_grad, name, threshold, as_stored = arguments[9:]
        given, mains = _checked(arguments[:9], name, threshold), Mains(main_gate, main_up, main_down)
        layer = given.layer
        if (main_up is None) != (layer.w_up is None):
            there, missing = ("w_up", "main_up") if main_up is None else ("main_up", "w_up")
            raise ValueError(f"{missing} must be given with {there}, got None")
        # in a graph a transposed view would not do: functionalization keeps the storage offset that it had in tracing
        mains = mains._replace(w_down=main_down.t()) if as_stored else mains
        for weight, main in mains._asdict().items():
            if main is not None:
                check(weight.replace("w_", "main_"), main, layer.w_gate.shape, torch.float32)
        gradients = outputs(layer, (input_grad, False, False, False, True, True))
        implementation(given, mains, gradients)
        dx, _, _, _, db_gate, db_up = present(gradients, layer.x)
        return dx, db_gate, db_up

    return added


def by_slices(implementation: Callable[..., None], given: Backward, gradients: Gradients, *how: Any) -> None:
    """Fill the gradients by an ``implementation`` for one slice of the neurons."""
    layer = given.layer
    if layer.gate is not None or not is_sliced(n := len(layer.w_gate)):
        implementation(given, gradients, *how)
        return
    dx = None if gradients.x is None else Added(gradients.x)
    for first, last, kept, _ in hybrid.split(given.kept, layer.x, n, layer.w_up is not None):
        of_x = None if gradients.x is None else torch.empty_like(gradients.x)
        own = Gradients(of_x, *(None if g is None else g[first:last] for g in gradients[1:6]))
        implementation(given._replace(layer=layer.neurons(first, last), kept=kept), own, *how)
        if dx is not None:
            dx.add(own.x)
    if dx is not None:
        dx.store()


@_filling
def _cuda(given: Backward, gradients: Gradients, first: int) -> None:
    if not given.dy.shape[0]:
        zero(gradients)
    elif any(gradient is not None for gradient in gradients):
        if first:
            zero([None if g is None else g[:, :first] for g in gradients[1:4]])
        fill(given, gradients, first=first)


@_adding
def _add_on_cpu(given: Backward, mains: Mains, gradients: Gradients) -> None:
    by_slices(hybrid_cpu.backward_cpu, given, gradients._replace(**mains._asdict()), True)


@_adding
def _add_on_cuda(given: Backward, mains: Mains, gradients: Gradients) -> None:
    if not given.dy.shape[0]:
        zero(gradients)
        return
    written = [
        m if m is None or has_rows(m) else torch.zeros_like(m, memory_format=torch.contiguous_format) for m in mains
    ]
    by_slices(fill, given, gradients._replace(w_gate=written[0], w_up=written[1], w_down=written[2]), True)
    for main, added in zip(mains, written):
        if main is not None and added is not None and added is not main:
            main.add_(added)


def zero(gradients: Sequence[Tensor | None]) -> None:
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()


def fill(given: Backward, gradients: Gradients, accumulate: bool = False, first: int = 0) -> None:
    """Launch what fills ``gradients``, of weights and biases all or none, or adds to those of weights."""
    dy, dl1, layer, kept, activation = given
    check_matrix("x", layer.tokens)
    own = laid(layer._replace(w_down=layer.w_down.t(), b_down=None))
    tensors = rows(dy), aligned(dl1), *own.unscaled, aligned(kept), *gradients
    run(build, tensors, activation, accumulate, first)


def build(p: Program, *given: Any) -> None:
    """Launch backward for dy, dl1, the layer, w_down [K, N], kept and gradients; dy, x and dx may be [..., K]."""
    (dy, dl1, x, *others), kept, (dx, *gradients) = given[:10], given[10], given[11:19]
    layer = Layer(None if x is None else x.matrix(), *others)
    out = Gradients(None if dx is None else dx.matrix(), *gradients)
    activation, accumulate, first = given[19:]
    hybrid.launches(p, Backward(dy.matrix(), dl1, layer, kept, activation), out, accumulate, first)


def transpose(p: Program, matrix: View, out: View) -> None:
    """Copy a matrix of 16-bit values into its transpose; apart from ``build``, whose scratch it would add to."""
    p.launch(specs.MatrixTransposeSpec(), matrix._replace(dtype=torch.int16), out._replace(dtype=torch.int16))


hybrid_backward = register(
    f"hybrid_backward({BACKWARD}, bool input_grad, bool weight_grad, {ACTIVATION}, int first=0, Tensor? gate=None, "
    "bool gate_grad=False) "
    "-> (Tensor dx, Tensor dw_gate, Tensor dw_up, Tensor dw_down, Tensor db_gate, Tensor db_up)",
    fake=_filling(lambda *_: None),
    cpu=_filling(lambda given, gradients, first: hybrid_cpu.backward_cpu(given, gradients, False)),
    cuda=_cuda,
)
hybrid_backward_accumulate = register(
    f"hybrid_backward_accumulate({BACKWARD}, Tensor(a!) main_gate, Tensor(b!)? main_up, Tensor(c!) main_down, "
    f"bool input_grad, {ACTIVATION}, bool as_stored=False) "
    "-> (Tensor dx, Tensor db_gate, Tensor db_up)",
    fake=_adding(lambda *_: None),
    cpu=_add_on_cpu,
    cuda=_add_on_cuda,
)
