"""The kernels for more non-zeros than the hybrid format holds, launched alone on tensors."""

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


def _kept(sizes: Any, popularity: Any) -> hybrid.Kept:
    return hybrid.Kept(None, None, None, sizes, None, popularity)


def forward(
    layer: Operands,
    sizes: Tensor,
    popularity: Tensor,
    capacity: int,
    activation: Activation,
    y: Tensor,
    sums: Tensor,
    aside: Tensor,
) -> None:
    """``hybrid.overflow_forward`` of a layer with w_down [N, K]."""

    def launches(p: Program, *views: Any) -> None:
        own, (of_sizes, of_popularity, *others) = Views(*views[:7]), views[7:]
        hybrid.overflow_forward(p, own, own.w_down, _kept(of_sizes, of_popularity), capacity, activation, *others)

    run(launches, (*layer, sizes, popularity, y, sums, aside))


def backward(
    dy: Tensor,
    dl1: Tensor,
    layer: Operands,
    sizes: Tensor,
    capacity: int,
    activation: Activation,
    out: Gradients,
    accumulate: bool,
    aside: Tensor,
    counters: Tensor,
) -> None:
    """``hybrid.overflow_backward`` of a layer with w_down [N, K] and a gradient dl1 [1]."""

    def launches(p: Program, *views: Any) -> None:
        of_dy, of_dl1, *own_views, of_sizes = views[:9]
        own, gradients, last = Views(*[*own_views, None]), views[9:15], views[15:]
        given = hybrid.Backward(of_dy, of_dl1, own, None, activation)
        kept = _kept(of_sizes, None)
        hybrid.overflow_backward(p, given, own.w_down, kept, capacity, Gradients(*gradients), accumulate, *last)

    run(launches, (dy, dl1, *layer[:6], sizes, *out[:6], aside, counters))
