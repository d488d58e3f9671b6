"""``hybrid_backward_accumulate``: ``hybrid_backward`` that adds the weights' gradients to float32 buffers.

main_gate, main_up and main_down are [N, K], in any layout; with ``as_stored`` main_down is [K, N], as nn.Linear has it.
A layout that kernels cannot write in place costs a float32 [N, K] of scratch. The biases' gradients are returned, in
x's dtype.

All else is as in ``hybrid_backward``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twell._runtime import nvtx
from twell.ops import hybrid
from twell.ops.hybrid import Backward
from twell.ops.hybrid_backward import BACKWARD, backward_first, by_slices, fill, present, zero
from twell.ops.library import ACTIVATION, Implementation, check, has_rows, register
from twell.ops.operands import Gradients, Layer, Mains


def outputs(layer: Layer, mains: Mains, input_grad: bool) -> Gradients:
    """Uninitialised dx [M, K], db_gate and db_up [N] of x's dtype; None where none is wanted."""
    x = layer.x
    if (mains.w_up is None) != (layer.w_up is None):
        given, missing = ("w_up", "main_up") if mains.w_up is None else ("main_up", "w_up")
        raise ValueError(f"{missing} must be given with {given}, got None")
    db_gate, db_up = (None if bias is None else x.new_empty(bias.shape) for bias in (layer.b_gate, layer.b_up))
    # thresholds behind the biases have no gradient
    db_gate = None if db_gate is None else torch.zeros_like(db_gate)
    return Gradients(x.new_empty(x.shape) if input_grad else None, b_gate=db_gate, b_up=db_up)


def _filling(implementation: Callable[[Backward, Mains, Gradients], None]) -> Implementation:
    """What fills checked gradients as a function of the schema's arguments.

    ``as_stored``: in a graph a transposed view would not do, as functionalization keeps the storage offset that it had
    in tracing.
    """

    @backward_first
    def filled(given: Backward, main_gate: Tensor, main_up: Tensor | None, main_down: Tensor, input_grad: bool) -> Any:
        given.activation.level(given.layer.x.dtype)
        hybrid.check_backward(given)
        mains = Mains(main_gate, main_up, main_down)
        for name, main in mains._asdict().items():
            if main is not None:
                check(name.replace("w_", "main_"), main, given.layer.w_gate.shape, torch.float32)
        gradients = outputs(given.layer, mains, input_grad)
        implementation(given, mains, gradients)
        dx, _, _, _, db_gate, db_up = present(gradients, given.layer.x)
        return dx, db_gate, db_up

    def transposing(*arguments: Any) -> Any:
        *others, as_stored = arguments
        if as_stored:
            others[_MAIN_DOWN] = others[_MAIN_DOWN].t()
        return filled(*others)

    return transposing


# its place among the arguments
_MAIN_DOWN = 11


@_filling
def _cpu(given: Backward, mains: Mains, gradients: Gradients) -> None:
    by_slices(hybrid.backward_cpu, given, gradients._replace(**mains._asdict()), True)


@_filling
def _cuda(given: Backward, mains: Mains, gradients: Gradients) -> None:
    if not given.dy.shape[0]:
        zero(gradients)
        return
    laid = [
        m if m is None or has_rows(m) else torch.zeros_like(m, memory_format=torch.contiguous_format) for m in mains
    ]
    by_slices(fill, given, gradients._replace(w_gate=laid[0], w_up=laid[1], w_down=laid[2]), True)
    for main, added in zip(mains, laid):
        if main is not None and added is not None and added is not main:
            main.add_(added)


hybrid_backward_accumulate = register(
    f"hybrid_backward_accumulate({BACKWARD}, Tensor(a!) main_gate, Tensor(b!)? main_up, Tensor(c!) main_down, "
    f"bool input_grad, {ACTIVATION}, bool as_stored=False) "
    "-> (Tensor dx, Tensor db_gate, Tensor db_up)",
    fake=_filling(lambda *_: None),
    cpu=_cpu,
    cuda=_cuda,
    phase=nvtx.BACKWARD,
)
