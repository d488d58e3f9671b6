"""``ffn`` and ``ffn_aux``: a layer without gradients in one operator, which chooses its strategy when it runs.

"auto" chooses by the number of tokens and, with ``site``, by what calls of the layer have measured; such a call may
measure, too. ``site`` is the first weight as the caller holds it: the layer's ``AutoStrategy`` is found by its memory.
So one compiled or exported graph is for any number of tokens and for any layer of one kind, keeps choosing, and keeps
nothing of the process that made it. A CUDA graph keeps what ran when it was captured. ``ffn_aux`` also returns the sum
of |h| and the number of non-zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import _auto, tuning
from twell._runtime import geometry
from twell.ops.ffn_union import _cuda as union_on_cuda
from twell.ops.ffn_union import on_cpu as union_on_cpu
from twell.ops.gate_pack import on_cpu as pack_on_cpu
from twell.ops.gate_pack import outputs as packed_outputs
from twell.ops.gate_pack import pack
from twell.ops.library import LAYER, Implementation, check_alike, check_layer, has_row_strides, register
from twell.ops.operands import Operands, PackedOperands
from twell.ops.reglu import _cuda as reglu_on_cuda
from twell.ops.reglu import pays
from twell.ops.up_down import multiply
from twell.ops.up_down import on_cpu as up_down_on_cpu

Aux = tuple[Tensor, Tensor, Tensor]
# y, and functions for the sum of |h| and the number of non-zeros
_Result = tuple[Tensor, Callable[[], Tensor], Callable[[], Tensor]]
# y, parts of the sum of |h|, stats, and for "union" the unions
_Counted = tuple[Tensor, Tensor, Tensor, Tensor | None]
_Sparse = Mapping[str, Callable[[Operands, int], _Counted]]


def outputs(x: Tensor) -> Aux:
    """Uninitialised y [M, K], l1 float32 and nonzeros int64, both 0-d."""
    return x.new_empty(x.shape), x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.int64)


def _layer_first(implementation: Callable[[Operands, int, str, Tensor | None], Any]) -> Implementation:
    """``implementation(layer, compression, strategy, site)`` as a function of the schema's arguments."""
    return lambda *arguments: implementation(Operands(*arguments[:7]), *arguments[7:])


def _check(layer: Operands, compression: int, strategy: str) -> None:
    check_layer(*layer)
    geometry.words_per_tile(compression)
    tuning.require_strategy(strategy)


@_layer_first
def _fake(layer: Operands, compression: int, strategy: str, site: Tensor | None) -> Tensor:
    _check(layer, compression, strategy)
    return outputs(layer.x)[0]


@_layer_first
def _fake_aux(layer: Operands, compression: int, strategy: str, site: Tensor | None) -> Aux:
    _check(layer, compression, strategy)
    return outputs(layer.x)


def _implementations(sparse: _Sparse, checked: bool) -> tuple[Implementation, Implementation]:
    """``ffn`` and ``ffn_aux`` from the sparse strategies of a device; ``checked``: whether these check operands."""

    def run(layer: Operands, compression: int, strategy: str, site: Tensor | None) -> _Result:
        if not checked:
            check_layer(*layer)
        tuning.require_strategy(strategy)
        route = _choose(layer, site) if strategy == "auto" else _auto.Route(strategy)
        if route.strategy == "dense":
            return _dense(layer, route.measurement)
        y, l1, stats, unions = sparse[route.strategy](layer, compression)

        def nonzeros() -> Tensor:
            return stats.select(2, 0).sum()

        if route.measurement is not None:
            route.measurement.counts(nonzeros(), unions)
        return y, l1.sum, nonzeros

    @_layer_first
    def forward(*arguments: Any) -> Tensor:
        return run(*arguments)[0]

    @_layer_first
    def forward_aux(*arguments: Any) -> Aux:
        y, l1, nonzeros = run(*arguments)
        return y, l1(), nonzeros()

    return forward, forward_aux


def _choose(layer: Operands, site: Tensor | None) -> _auto.Route:
    """The route of a call of "auto"."""
    x, w_gate, w_up, w_down = layer[:4]
    if forced := _auto.forced(x.device.type, x.device.index):
        return _auto.Route(forced)
    n, gated, copied = w_gate.shape[0], w_up is not None, not has_row_strides(w_down)
    if site is None:
        return _auto.Route(_auto.fresh(x, n, gated, copied))
    return _auto.site_of(site).begin(x, n, gated, False, copied)


def _row_on_cpu(layer: Operands, compression: int) -> _Counted:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    words, spill, stats = pack_on_cpu(x, w_gate, b_gate, compression)
    return *up_down_on_cpu(x, words, spill, w_up, w_down, b_up, b_down, compression), stats, None


def _row_on_cuda(layer: Operands, compression: int) -> _Counted:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    check_alike(w_gate, w_up=w_up, w_down=w_down)
    words, spill, stats = packed = packed_outputs(x, w_gate, compression)
    pack(x, w_gate, b_gate, packed, compression)
    y, l1 = x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)
    multiply(PackedOperands(x, words, spill, w_up, w_down, b_up, b_down), y, l1, compression)
    return y, l1, stats, None


def _dense(layer: Operands, measurement: _auto.Measurement | None) -> _Result:
    """The layer by PyTorch's own operators."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    with _without_autocast(x):
        gate = F.linear(x, w_gate, b_gate)
        if w_up is None:
            hidden = gate = gate.relu_()
        elif pays(gate):
            hidden = reglu_on_cuda(gate, F.linear(x, w_up, b_up))
        else:
            gate = gate.relu_()
            hidden = gate * F.linear(x, w_up, b_up)
        y = F.linear(hidden, w_down.t(), b_down)
    if measurement is not None:
        measurement.dense(gate)
    return y, lambda: hidden.abs().sum(dtype=torch.float32), lambda: gate.numel() - (gate <= 0).sum()


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


_ON_CPU = {"row": _row_on_cpu, "union": lambda layer, compression: union_on_cpu(*layer, compression)}
_ON_CUDA = {"row": _row_on_cuda, "union": lambda layer, compression: union_on_cuda(*layer, compression)}
_cpu, _cpu_aux = _implementations(_ON_CPU, checked=False)
_cuda, _cuda_aux = _implementations(_ON_CUDA, checked=True)
_ARGUMENTS = f"{LAYER}, int compression, str strategy, Tensor? site"
_INSTEAD = "twell.sparse_gated_ffn or twell.sparse_ffn"

ffn = register(f"ffn({_ARGUMENTS}) -> Tensor", fake=_fake, cpu=_cpu, cuda=_cuda, instead=_INSTEAD)
ffn_aux = register(
    f"ffn_aux({_ARGUMENTS}) -> (Tensor y, Tensor l1, Tensor nonzeros)",
    fake=_fake_aux,
    cpu=_cpu_aux,
    cuda=_cuda_aux,
    instead=_INSTEAD,
)
