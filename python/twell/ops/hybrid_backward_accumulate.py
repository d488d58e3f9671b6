"""``hybrid_backward_accumulate``: ``hybrid_backward`` that adds the weights' gradients to float32 buffers.

main_gate, main_up and main_down are [N, K], of any layout: one that kernels cannot write in place costs a float32
[N, K] of scratch. The biases' gradients are returned, in x's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twell._runtime import nvtx
from twell.ops import hybrid
from twell.ops.hybrid import Gradients, Kept, Layer
from twell.ops.hybrid_backward import present, split
from twell.ops.library import check, has_rows, register

Outputs = tuple[Tensor, Tensor, Tensor]


def outputs(layer: Layer, input_grad: bool) -> Gradients:
    """Uninitialised dx [M, K], db_gate and db_up [N] of x's dtype. None for the weights and what nobody asks for."""
    x, _, _, _, b_gate, b_up = layer
    biases = (None if bias is None else x.new_empty(bias.shape) for bias in (b_gate, b_up))
    return Gradients(x.new_empty(x.shape) if input_grad else None, None, None, None, *biases)


def _check(dy: Tensor, dl1: Tensor, layer: Layer, kept: Kept, mains: Sequence[Tensor | None]) -> None:
    hybrid.check_backward(dy, dl1, layer, kept)
    for name, main in zip(("main_gate", "main_up", "main_down"), mains):
        if main is not None:
            check(name, main, layer.w_gate.shape, torch.float32)


def _returned(gradients: Gradients, like: Tensor) -> Outputs:
    dx, _, _, _, db_gate, db_up = present(gradients, like)
    return dx, db_gate, db_up


def _fake(*arguments: Any) -> Outputs:
    dy, dl1, layer, kept, (*mains, input_grad) = split(arguments)
    _check(dy, dl1, layer, kept, mains)
    return _returned(outputs(layer, input_grad), layer.x)


def _cpu(*arguments: Any) -> Outputs:
    dy, dl1, layer, kept, (*mains, input_grad) = split(arguments)
    _check(dy, dl1, layer, kept, mains)
    main_gate, main_up, main_down = mains
    gradients = outputs(layer, input_grad)
    targets = gradients._replace(w_gate=main_gate, w_up=main_up, w_down=main_down)
    hybrid.backward_cpu(dy, dl1, layer, kept, targets, accumulate=True)
    return _returned(gradients, layer.x)


def _cuda(*arguments: Any) -> Outputs:
    dy, dl1, layer, kept, (*mains, input_grad) = split(arguments)
    gradients = outputs(layer, input_grad)
    if not dy.shape[0]:
        return _returned(Gradients(*(None if g is None else g.zero_() for g in gradients)), layer.x)
    laid = [
        m if m is None or has_rows(m) else torch.zeros_like(m, memory_format=torch.contiguous_format) for m in mains
    ]
    targets = gradients._replace(w_gate=laid[0], w_up=laid[1], w_down=laid[2])
    hybrid.backward_cuda(dy, dl1, layer, kept, gradients.x, lambda: targets, accumulate=True)
    for main, added in zip(mains, laid):
        if added is not main:
            main.add_(added)
    return _returned(gradients, layer.x)


hybrid_backward_accumulate = register(
    "hybrid_backward_accumulate(Tensor dy, Tensor dl1, Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, "
    "Tensor? b_gate, Tensor? b_up, Tensor entries, Tensor neurons, Tensor chunks, Tensor sizes, "
    "Tensor popularity, Tensor(a!) main_gate, Tensor(b!)? main_up, Tensor(c!) main_down, bool input_grad) "
    "-> (Tensor dx, Tensor db_gate, Tensor db_up)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
    phase=nvtx.BACKWARD,
)
