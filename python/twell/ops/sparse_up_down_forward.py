"""``sparse_up_down_forward``: ``hybrid_forward`` behind a given gate [M, N], before its activation.

Returns y, the sum of |h|, the number of non-zeros and the pattern, as ``hybrid_forward`` does for the gate that it
computes. Without ``w_up``, x and ``b_up`` h is the activation of the gate.

Operands are those of ``sparse_up_down`` and, as in ``hybrid_forward``, held, activation and threshold.
"""

from typing import Any

import torch
from torch import Tensor

from twell._activation import activation_of
from twell._runtime import geometry, nvtx
from twell._runtime.program import kept
from twell.ops import hybrid
from twell.ops.hybrid_forward import Forward
from twell.ops.library import ACTIVATION, laid_bias, readable_down, register, rows
from twell.ops.operands import Form, Operands
from twell.ops.sparse_up_down import GIVEN, Given, check_given

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def outputs(given: Given, compression: int, held: int, name: str, threshold: float) -> Outputs:
    """Uninitialised y [M, K], l1 (0-d), nonzeros (0-d, int64) and kept (int32); raises unless the operands fit."""
    gate, _, w_up, w_down, *_ = given
    activation_of(name, threshold, w_up is not None).level(gate.dtype)
    check_given(given, wide=True)
    geometry.words_per_tile(compression)
    if held < 0:
        raise ValueError(f"held must be non-zeros per token, or 0 for the most, got {held}")
    l1 = gate.new_empty((), dtype=hybrid.accumulator(gate.dtype))
    nonzeros = gate.new_empty((), dtype=torch.int64)
    pattern = gate.new_empty(hybrid.words_of_slice(gate, gate.shape[1], w_up is not None, held), dtype=torch.int32)
    return gate.new_empty((gate.shape[0], w_down.shape[1])), l1, nonzeros, pattern


def _fake(*arguments: Any) -> Outputs:
    return outputs(Given(*arguments[:6]), *arguments[6:])


def _cpu(*arguments: Any) -> Outputs:
    given, (_, _, name, threshold) = Given(*arguments[:6]), arguments[6:]
    y, l1, nonzeros, pattern = _fake(*arguments)
    gate, x, w_up, w_down, b_up, b_down = given
    hybrid.require_offsets(*gate.shape)
    activation = activation_of(name, threshold, w_up is not None)
    packed = activation.after(gate, inplace=False)
    up = None if w_up is None else hybrid.project(x, w_up, b_up)
    hidden = activation.hidden(packed.to(l1.dtype), up).masked_fill(packed == 0, 0)
    l1.copy_(hidden.abs().sum())
    nonzeros.copy_((packed != 0).sum())
    y.copy_(hybrid.project(hidden.to(gate.dtype), w_down.t(), b_down))
    hybrid.encode(packed, None if up is None else up.to(gate.dtype), pattern)
    return y, l1, nonzeros, pattern


def _cuda(*arguments: Any) -> Outputs:
    given, (compression, held, name, threshold) = Given(*arguments[:6]), arguments[6:]
    y, l1, nonzeros, pattern = _fake(*arguments)
    gate, x, w_up, w_down, b_up, b_down = given
    if not gate.shape[0]:
        return y, l1.zero_(), nonzeros.zero_(), pattern.zero_()
    up = (None, None, None) if w_up is None else (rows(x), rows(w_up), laid_bias(b_up))
    layer = Operands(up[0], rows(gate), up[1], readable_down(w_down.t()), None, up[2], laid_bias(b_down))  # type: ignore[arg-type]
    activation = activation_of(name, threshold, w_up is not None)
    found = _forward_of(Form.of(layer), compression, held, activation)(*layer)
    assert found is not None
    return found  # type: ignore[return-value]


@kept
def _forward_of(form: Form, compression: int, held: int, activation: Any) -> Forward:
    """The launches for operands of this form."""
    return Forward(form, compression, held, activation, False, True, given=True)


sparse_up_down_forward = register(
    f"sparse_up_down_forward({GIVEN}, int compression, int held=0, {ACTIVATION}) -> "
    "(Tensor y, Tensor l1, Tensor nonzeros, Tensor kept)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_up_down",
    phase=nvtx.FORWARD,
)
