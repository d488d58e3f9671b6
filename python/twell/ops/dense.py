"""A layer by PyTorch's own operators, as models write it, and ``reglu`` where that pays.

In the operators gate and up of few tokens are one product, where the weights lie so, as in engines.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.activation import Activation
from twell.choose import rates, tuning
from twell.choose.measurement import Measurement
from twell.choose.site import tokens_of
from twell.ops import screened
from twell.ops.calls import Run
from twell.ops.library import no_view
from twell.ops.operands import Layer
from twell.ops.reglu import on_cuda as reglu_on_cuda
from twell.ops.reglu import pays
from twell.runtime import modes

# of the gate before its activation and up, None without one: h, and the gate before or after its activation
Between = Callable[[Tensor, "Tensor | None"], tuple[Tensor, Tensor]]


def dense(
    layer: Layer, between: Between, merged: bool = False, see: Callable[[Tensor, Tensor], None] | None = None
) -> Tensor:
    """y of a layer in 16 bits or wider, w_down [K, N]. ``see`` gets what ``between`` returns, before y is made."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, gate = layer.unscaled
    up: Any
    if merged:
        n, k = w_gate.shape
        gate, up = F.linear(x, w_gate.as_strided((2 * n, k), (k, 1))).chunk(2, -1)
    else:
        gate = F.linear(x, w_gate, b_gate) if gate is None else gate
        up = None if w_up is None else F.linear(x, w_up, b_up)
    hidden, gate = between(gate, up)
    if see is not None:
        see(hidden, gate)
    # its memory may be that of y
    del gate, up
    y = F.linear(hidden, w_down, b_down)
    return y if b_down is None else no_view(y)


def in_inference(layer: Layer, activation: Activation, seen: bool = True) -> Between:
    """What runs between the products in inference. It may overwrite up, and a gate neither given nor ``seen``."""
    inplace = layer.gate is None
    fused = inplace and fuses(layer, activation)

    def between(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
        if fused and up is not None:
            return reglu_on_cuda(gate, up, activation, inplace=True), gate
        if not seen and activation.name == "relu" and up is not None:
            return torch.relu_(gate).mul_(up), gate
        after = activation.after(gate, inplace)
        return activation.hidden(after, up), after

    return between


def totalled(
    layer: Layer, activation: Activation, measurement: Measurement | None, totals: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, and with ``totals`` the sum of |h| and the number of non-zeros; figures for ``measurement``."""
    l1: Tensor | None = None
    nonzeros: Any = None

    def see(hidden: Tensor, gate: Tensor) -> None:
        nonlocal l1, nonzeros
        level = activation.level(gate.dtype)
        if totals:
            nonzeros, l1 = gate.numel() - (gate <= level).sum(), hidden.abs().sum(dtype=torch.float32)
        if measurement is not None:
            candidates = None if layer.gate is not None else screened.wanted(measurement, layer, activation)
            measurement.dense(gate, level, candidates)

    kind = layer.w_down.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
        merged = layer.gate is None and is_merged(layer)
        y = dense(layer, in_inference(layer, activation), merged, see)
    return y, l1, nonzeros


def fuses(layer: Layer, activation: Activation, training: bool = False) -> bool:
    """Whether ``reglu`` is the activation: for a large gate, unless the host is the limit, which it costs more."""
    x, (n, k) = layer.x, layer.w_gate.shape
    if layer.w_up is None or isinstance(activation.threshold, Tensor) or not pays(x, (m := tokens_of(x)) * n):
        return False
    return not rates.waits_for_host(rates.Problem(m, k, n, True, training, eager=not modes.capturing(x)))


def as_torch(layer: Layer, between: Between, merged: bool = False) -> Run:
    """What computes y of plain tensors like these, w_down [K, N]; ``merged``: gate and up may be one product."""
    few, one = merged and _may_merge(layer), merged and is_merged(layer)
    inner, dtype, device = layer.w_gate.shape, layer.x.dtype, layer.x.device
    n, k = inner
    shapes = inner, inner, torch.Size((k, n)), torch.Size((n,)), torch.Size((n,)), torch.Size((k,))

    def run(*operands: Any) -> Tensor | None:
        _, w_gate, w_up, *_ = operands
        # no program compares these, and PyTorch would take some that do not fit
        for given, shape in zip(operands[1:], shapes):
            if given is not None and (given.shape != shape or given.dtype is not dtype or given.device != device):
                return None
        # another layer of these sizes, whose bits must not depend on which came first
        if few and w_up is not None and _are_one(w_gate, w_up) is not one:
            return None
        return dense(Layer(*operands), between, one)

    return run


def is_merged(layer: Layer) -> bool:
    """Whether gate and up are one product: few tokens, no bias, and w_up's memory right behind w_gate's."""
    _, w_gate, w_up, *_ = layer
    return _may_merge(layer) and w_up is not None and w_gate.shape == w_up.shape and _are_one(w_gate, w_up)


def _may_merge(layer: Layer) -> bool:
    """Whether ``is_merged`` depends on where the weights lie."""
    x, _, w_up, _, b_gate, b_up, *_ = layer
    return w_up is not None and tokens_of(x) <= tuning.MERGED_TOKENS and b_gate is b_up is None


def _are_one(w_gate: Tensor, w_up: Tensor) -> bool:
    """Whether both are contiguous, in one storage, and one behind the other."""
    if not (w_gate.is_contiguous() and w_up.is_contiguous() and w_up.data_ptr() == w_gate.data_ptr() + w_gate.nbytes):
        return False
    return bool(w_gate.untyped_storage()._cdata == w_up.untyped_storage()._cdata)
