"""The kernel for more non-zeros than the hybrid format holds, launched alone on tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twell import tuning
from twell._activation import Activation
from twell._runtime import geometry
from twell._runtime.program import Program
from twell.ops import hybrid
from twell.ops.operands import Gradients, Operands, Views, run


def aside(x: Tensor, terms: int, ctas: int) -> Tensor:
    """``hybrid.room_aside`` full of NaN."""
    length = geometry.sums_aside(tuning.dtype_name(x.dtype), terms, ctas)
    return torch.full((length,), torch.nan, device=x.device)


def _kept(sizes: Any) -> hybrid.Kept:
    return hybrid.Kept(None, None, None, sizes, None, None)


def forward(
    layer: Operands,
    sizes: Tensor,
    counters: Tensor,
    capacity: int,
    activation: Activation,
    y: Tensor,
    sums: Tensor,
    aside: Tensor,
    gate: Tensor | None = None,
) -> None:
    """Forward of a layer with w_down [N, K]."""

    def launches(p: Program, *views: Any) -> None:
        own, (of_sizes, counters, of_y, of_sums, of_aside, of_gate) = Views(*views[:7]), views[7:]
        given = hybrid.Backward(None, None, own, _kept(of_sizes), activation, of_gate)
        hybrid.overflow(p, given, own.w_down, capacity, Gradients(of_y), of_aside, counters, sums=of_sums)

    run(launches, (*layer, sizes, counters, y, sums, aside, gate))


def backward(
    given: hybrid.Backward,
    sizes: Tensor,
    capacity: int,
    out: Gradients,
    accumulate: bool,
    aside: Tensor,
    counters: Tensor,
    of_gate: Tensor | None = None,
) -> None:
    """Backward of a layer with w_down [N, K] and a gradient dl1 [1]; ``sizes`` in place of what was kept."""

    def launches(p: Program, *views: Any) -> None:
        of_dy, of_dl1, *layer, of_sizes, gate = views[:10]
        own, gradients = Views(*layer, None), Gradients(*views[10:16])
        of_aside, of_counters, of_d_gate = views[16:]
        ours = hybrid.Backward(of_dy, of_dl1, own, _kept(of_sizes), given.activation, gate)
        last = (gradients, of_aside, of_counters)
        hybrid.overflow(p, ours, own.w_down, capacity, *last, accumulate=accumulate, of_gate=of_d_gate)

    dy, dl1, layer, _, _, gate = given
    run(launches, (dy, dl1, *layer[:6], sizes, gate, *out[:6], aside, counters, of_gate))
