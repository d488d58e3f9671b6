"""``hybrid_backward``: gradients of ``hybrid_forward`` from dy, the gradient of y, and dl1, that of the sum of |h|.

dh = dy @ w_down^T + dl1 * sign(h) is computed only at the non-zeros of the gate. d_gate = dh * up and d_up = dh * gate,
or d_gate = dh without an up projection. dx = d_gate @ w_gate + d_up @ w_up; dw_gate = d_gate^T @ x, dw_up = d_up^T @ x,
dw_down = h^T @ dy, and the biases' are sums over the tokens. h, d_gate and d_up are rounded, sums are fp32. This is
relu; ``twell._activation`` has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from twell._runtime import nvtx
from twell.ops import hybrid
from twell.ops.hybrid import Backward, Kept
from twell.ops.library import ACTIVATION, Implementation, empty, last_activation, register
from twell.ops.operands import Gradients, Operands

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def outputs(layer: Operands, input_grad: bool, weight_grad: bool) -> Gradients:
    """Uninitialised gradients of x's dtype: dx [M, K], weights [N, K], biases [N]; None where none is wanted."""
    wanted = (input_grad, *(weight_grad and operand is not None for operand in layer[1:]))
    gradients = (empty(layer.x, o.shape) if w and o is not None else None for w, o in zip(wanted, layer))
    return Gradients(*gradients)


def present(gradients: Gradients, like: Tensor) -> Outputs:
    """``gradients`` as an operator returns them: an empty [0] for each None."""
    dx, dw_gate, dw_up, dw_down, db_gate, db_up = (like.new_empty(0) if g is None else g for g in gradients[:-1])
    return dx, dw_gate, dw_up, dw_down, db_gate, db_up


# the operands that both operators of backward begin with; b_down's gradient is the sum of dy and needs neither
BACKWARD = (
    "Tensor dy, Tensor dl1, Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, "
    "Tensor entries, Tensor neurons, Tensor chunks, Tensor sizes, Tensor popularity"
)


def backward_first(others: int) -> Callable[[Implementation], Implementation]:
    """Make ``implementation(given, ...)`` a function of ``BACKWARD``, ``others`` arguments and ``ACTIVATION``."""

    def of(implementation: Implementation) -> Implementation:
        def ungrouped(*arguments: Any) -> Any:
            dy, dl1, *tensors = arguments[:13]
            rest, form = arguments[13 : 13 + others], arguments[13 + others :]
            layer = Operands(*tensors[:6])
            activation = last_activation(form, layer.w_up is not None)
            return implementation(Backward(dy, dl1, layer, Kept(*tensors[6:]), activation), *rest)

        return ungrouped

    return of


@backward_first(2)
def _fake(given: Backward, input_grad: bool, weight_grad: bool) -> Outputs:
    given.activation.level(given.layer.x.dtype)
    hybrid.check_backward(given)
    return present(outputs(given.layer, input_grad, weight_grad), given.layer.x)


@backward_first(2)
def _cpu(given: Backward, input_grad: bool, weight_grad: bool) -> Outputs:
    hybrid.check_backward(given)
    gradients = outputs(given.layer, input_grad, weight_grad)
    hybrid.backward_cpu(given, gradients, accumulate=False)
    return present(gradients, given.layer.x)


@backward_first(2)
def _cuda(given: Backward, input_grad: bool, weight_grad: bool) -> Outputs:
    return present(on_cuda(given, input_grad, weight_grad), given.layer.x)


@nvtx.marked(
    lambda given, *_: nvtx.range("hybrid_backward", category=nvtx.BACKWARD, **nvtx.sizes(given.layer._asdict()))
)
def on_cuda(given: Backward, input_grad: bool, weight_grad: bool) -> Gradients:
    """The operator on the current device; None for gradients that are not wanted."""
    layer = given.layer
    if not given.dy.shape[0]:
        gradients = outputs(layer, input_grad, weight_grad)
        return Gradients(*(None if g is None else g.zero_() for g in gradients))
    dx = empty(layer.x, layer.x.shape) if input_grad else None
    weights = (lambda: outputs(layer, False, True)) if weight_grad else None
    return hybrid.backward_cuda(given, dx, weights, accumulate=False)


hybrid_backward = register(
    f"hybrid_backward({BACKWARD}, bool input_grad, bool weight_grad, {ACTIVATION}) "
    "-> (Tensor dx, Tensor dw_gate, Tensor dw_up, Tensor dw_down, Tensor db_gate, Tensor db_up)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
    phase=nvtx.BACKWARD,
)
