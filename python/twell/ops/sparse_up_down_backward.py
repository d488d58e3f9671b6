"""``sparse_up_down_backward``: gradients of ``sparse_up_down_forward`` from dy and dl1, as in ``hybrid_backward``.

d_gate [M, N] is zero where the activation of the gate is. Without ``w_up`` there are neither dx, dw_up nor db_up.
``first`` is as there.

gate, x, w_up, w_down, b_up and kept are those of the forward pass. input_grad, gate_grad and weight_grad say what is
wanted: dx, d_gate, or dw_up, dw_down and db_up; each is empty where it is not wanted or not there.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from twell._activation import activation_of
from twell._runtime import nvtx
from twell._runtime.program import Program
from twell.ops import hybrid
from twell.ops.hybrid import Backward
from twell.ops.hybrid_backward import zero_columns
from twell.ops.library import ACTIVATION, Implementation, check, flat, laid_bias, readable_down, register, rows
from twell.ops.operands import Gradients, Operands, Views, run
from twell.ops.sparse_up_down import Given, check_given

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def outputs(given: Given, input_grad: bool, gate_grad: bool, weight_grad: bool) -> tuple[Gradients, Tensor | None]:
    """Uninitialised gradients of the operands' shapes, and zeros for that of the gate; None where none is wanted."""
    gate, x, w_up, w_down, b_up, _ = given
    wanted = (x, input_grad), (w_up, weight_grad), (w_down, weight_grad), (b_up, weight_grad)
    dx, dw_up, dw_down, db_up = (t.new_empty(t.shape) if w and t is not None else None for t, w in wanted)
    d_gate = gate.new_zeros(gate.shape) if gate_grad else None
    return Gradients(dx, None, dw_up, dw_down, None, db_up), d_gate


def _filling(fill: Callable[[Backward, Gradients, Tensor | None, int], None]) -> Implementation:
    """What fills checked gradients as a function of the schema's arguments."""

    def filled(*arguments: Any) -> Outputs:
        dy, dl1, gate, x, w_up, w_down, b_up, kept, *wanted, name, threshold, first = arguments
        given = Given(gate, x, w_up, w_down, b_up, None)
        activation = activation_of(name, threshold, w_up is not None)
        activation.level(gate.dtype)
        check_given(given, wide=True)
        check("dy", dy, (gate.shape[0], w_down.shape[1]), gate.dtype)
        if dl1 is not None:
            check("dl1", dl1, (), hybrid.accumulator(gate.dtype))
        hybrid.check_kept_of_slice(gate, w_down.shape[0], w_up is not None, kept)
        hybrid.check_first(first, w_down.shape[1])
        out, d_gate = outputs(given, *wanted)
        layer = Operands(x, None, w_up, w_down, None, b_up)  # type: ignore[arg-type]
        fill(Backward(dy, dl1, layer, kept, activation, gate), out, d_gate, first)
        found = (out.x, d_gate, out.w_up, out.w_down, out.b_up)
        dx, d_gate, dw_up, dw_down, db_up = (gate.new_empty(0) if g is None else g for g in found)
        return dx, d_gate, dw_up, dw_down, db_up

    return filled


@_filling
def _cuda(given: Backward, out: Gradients, d_gate: Tensor | None, first: int) -> None:
    dy, dl1, layer, kept, activation, gate = given
    if not len(dy):
        for gradient in (*out, d_gate):
            if gradient is not None:
                gradient.zero_()
        return
    x, _, w_up, w_down, _, b_up, _ = layer
    up = (None, None, None) if w_up is None else (rows(x), rows(w_up), laid_bias(b_up))
    tensors = rows(dy), None if dl1 is None else flat(dl1)[0], rows(gate), *up[:2], readable_down(w_down.t()), up[2]
    gradients = out.x, d_gate, out.w_up, out.w_down, out.b_up
    zero_columns(out, first)
    if any(gradient is not None for gradient in gradients):
        run(_build, (*tensors, flat(kept), *gradients), activation, first)


def _build(p: Program, *views: Any) -> None:
    dy, dl1, gate, x, w_up, w_down, b_up, kept, dx, d_gate, dw_up, dw_down, db_up, activation, first = views
    layer = Views(x, None, w_up, w_down, None, b_up, None)
    given, out = Backward(dy, dl1, layer, kept, activation, gate), Gradients(dx, None, dw_up, dw_down, None, db_up)
    hybrid.launches(p, given, out, False, d_gate, first)


sparse_up_down_backward = register(
    "sparse_up_down_backward(Tensor dy, Tensor? dl1, Tensor gate, Tensor? x, Tensor? w_up, Tensor w_down, "
    f"Tensor? b_up, Tensor kept, bool input_grad, bool gate_grad, bool weight_grad, {ACTIVATION}, int first=0) "
    "-> (Tensor dx, Tensor d_gate, Tensor dw_up, Tensor dw_down, Tensor db_up)",
    fake=_filling(lambda *_: None),
    cpu=_filling(lambda given, out, d_gate, first: hybrid.backward_cpu(given, out, False, d_gate)),
    cuda=_cuda,
    instead="twell.sparse_up_down",
    phase=nvtx.BACKWARD,
)
