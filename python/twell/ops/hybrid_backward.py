"""``hybrid_backward``: gradients of ``hybrid_forward`` from dy, the gradient of y, and dl1, that of the sum of |h|.

dh = dy @ w_down^T + dl1 * sign(h) is computed only at the non-zeros of the gate. d_gate = dh * up and d_up = dh * gate,
or d_gate = dh without an up projection. dx = d_gate @ w_gate + d_up @ w_up; dw_gate = d_gate^T @ x, dw_up = d_up^T @ x,
dw_down = h^T @ dy, and the biases' are sums over the tokens. h, d_gate and d_up are rounded, sums are fp32. This is
relu; ``twell._activation`` has the others. Without dl1 it is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from twell import tuning
from twell._activation import Activation
from twell._runtime import nvtx
from twell._runtime.program import Executable, Program, View
from twell.ops import hybrid
from twell.ops.hybrid import Backward
from twell.ops.library import ACTIVATION, PROGRAMS, Implementation, flat, laid, last_activation, register, rows
from twell.ops.operands import Form, Gradients, GradientViews, Operands, Views
from twell.ops.operands import present as given_ones

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def outputs(layer: Operands, input_grad: bool, weight_grad: bool) -> Gradients:
    """Uninitialised gradients of x's dtype: dx [M, K], weights [N, K], biases [N]; None where none is wanted."""
    gradients = (
        None if shape is None else layer.x.new_empty(shape) for shape in shapes(layer, input_grad, weight_grad)
    )
    return Gradients(*gradients)


def shapes(layer: Operands | Views, input_grad: bool, weight_grad: bool) -> list[tuple[int, ...] | None]:
    """Of each of them."""
    x, w_gate, w_up, _, b_gate, b_up, _ = layer
    wanted = (x if input_grad else None, *((w_gate, w_up, w_gate, b_gate, b_up) if weight_grad else [None] * 5))
    return [None if operand is None else tuple(operand.shape) for operand in wanted]


def present(gradients: Gradients, like: Tensor) -> Outputs:
    """``gradients`` as an operator returns them: an empty [0] for each None."""
    dx, dw_gate, dw_up, dw_down, db_gate, db_up = (like.new_empty(0) if g is None else g for g in gradients[:-1])
    return dx, dw_gate, dw_up, dw_down, db_gate, db_up


# the operands that both operators of backward begin with; b_down's gradient is the sum of dy and needs neither
BACKWARD = (
    "Tensor dy, Tensor? dl1, Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, "
    "Tensor kept"
)


def backward_first(others: int) -> Callable[[Implementation], Implementation]:
    """Make ``implementation(given, ...)`` a function of ``BACKWARD``, ``others`` arguments and ``ACTIVATION``."""

    def of(implementation: Implementation) -> Implementation:
        def ungrouped(*arguments: Any) -> Any:
            dy, dl1, *operands, kept = arguments[:9]
            rest, form = arguments[9 : 9 + others], arguments[9 + others :]
            layer = Operands(*operands)
            activation = last_activation(form, layer.w_up is not None)
            return implementation(Backward(dy, dl1, layer, kept, activation), *rest)

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
    gradients = outputs(given.layer, input_grad, weight_grad)
    if not given.dy.shape[0]:
        hybrid.check_backward(given)
        gradients = Gradients(*(None if g is None else g.zero_() for g in gradients))
    elif input_grad or weight_grad:
        operands = laid_backward(given)
        program = program_of(Form.of(operands), input_grad, weight_grad, given.activation)
        program(*given_ones(operands), *given_ones(gradients))
    return present(gradients, given.layer.x)


def laid_backward(given: Backward) -> list[Tensor | None]:
    """The operands of backward as programs take them, with copies of those that kernels cannot read in place."""
    dy, dl1, layer, kept, _ = given
    layer = laid(layer._replace(w_down=layer.w_down.t()))
    return [rows(dy), None if dl1 is None else flat(dl1)[0], *layer[:6], flat(kept)]


def backward_of(views: Sequence[Any], activation: Activation) -> Backward:
    """The same in a program of their form; x and dy [..., K] as matrices."""
    dy, dl1, x, w_gate, w_up, w_down, b_gate, b_up, kept = views
    layer = Views(_folded(x), w_gate, w_up, w_down, b_gate, b_up, None)
    return Backward(_folded(dy), dl1, layer, kept, activation)


@functools.lru_cache(PROGRAMS)
def program_of(form: Form, input_grad: bool, weight_grad: bool, activation: Activation) -> Executable:
    """The launches for operands of this form, those of ``laid_backward``, and the gradients that are wanted."""
    p, views = form.program()
    given = backward_of(views, activation)
    # dx is laid out as x, with its leading dimensions
    wanted = shapes(given.layer._replace(x=views[2]), input_grad, weight_grad)
    dx, *others = (None if shape is None else p.operand(views[2].dtype, *shape) for shape in wanted)
    hybrid.launches(p, given, GradientViews(None if dx is None else _folded(dx), *others), accumulate=False)
    return p.compiled()


def _folded(view: View) -> View:
    return view if len(view.shape) == 2 else view.matrix()


@functools.lru_cache(PROGRAMS)
def transposition(index: int, dtype: torch.dtype, n: int, k: int) -> Executable:
    """A matrix [N, K] as [K, N]. Not part of backward: memory for both is not needed beside its scratch."""
    p = Program(index)
    matrix, out = p.operand(dtype, n, k), p.operand(dtype, k, n)
    p.launch(tuning.matrix_transpose(), matrix.cast(torch.int16), out.cast(torch.int16))
    return p.compiled()


hybrid_backward = register(
    f"hybrid_backward({BACKWARD}, bool input_grad, bool weight_grad, {ACTIVATION}) "
    "-> (Tensor dx, Tensor dw_gate, Tensor dw_up, Tensor dw_down, Tensor db_gate, Tensor db_up)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
    phase=nvtx.BACKWARD,
)
