"""``top_k``: levels int32 [M, 2] by which ``pack`` keeps the k largest of each token's gates [M, N] after ReLU.

levels[m, 0] are the bits of the k-th largest value, 0 if fewer than k gates are positive; levels[m, 1] is the last
neuron that is kept of those with this value, -1 for none. Equal gates are taken by their neurons; NaN is the largest.

dense [M, N] is bfloat16 or float16, before its activation, of at most 65,536 neurons; k may be larger than N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell import tuning
from twell._runtime import geometry
from twell._runtime.program import Program, View
from twell.ops.library import check_matrix, register, rows
from twell.ops.operands import run


def outputs(gate: Tensor, k: int) -> Tensor:
    """Uninitialised levels."""
    check_matrix("gate", gate)
    n = gate.shape[1]
    if not 0 < n <= geometry.MAX_NEURONS:
        raise ValueError(f"gate must have between 1 and {geometry.MAX_NEURONS} neurons, got {n}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return gate.new_empty((len(gate), 2), dtype=torch.int32)


def _cpu(gate: Tensor, k: int) -> Tensor:
    levels = outputs(gate, k)
    if k > gate.shape[1]:
        levels[:, 0], levels[:, 1] = 0, -1
        return levels
    values, neurons = gate.relu().sort(dim=1, descending=True, stable=True)
    bits = values[:, k - 1].contiguous().view(torch.int16).int()
    levels[:, 0] = torch.where(values[:, k - 1].isnan(), 0x7FFF, bits)
    levels[:, 1] = torch.where(levels[:, 0] > 0, neurons[:, k - 1].int(), -1)
    return levels


def _cuda(gate: Tensor, k: int) -> Tensor:
    levels = outputs(gate, k)
    if len(gate):
        run(find, (rows(gate), levels), k)
    return levels


def find(p: Program, gate: View, levels: View, k: int) -> None:
    """Launch what fills ``levels``."""
    infinity = torch.tensor(torch.inf, dtype=gate.dtype, device="cpu").view(torch.int16)
    p.launch(tuning.top_k(gate.shape[1]), gate.cast(torch.int16), levels, k, int(infinity))


def kept(gate: Tensor, levels: Tensor) -> Tensor:
    """Which gates [M, N] are kept, on a CPU."""
    positive = gate.relu()
    bits = torch.where(positive.isnan(), 0x7FFF, positive.contiguous().view(torch.int16).int())
    level, last = levels[:, :1], levels[:, 1:]
    neurons = torch.arange(gate.shape[1], device=gate.device)
    return (bits > level) | ((bits == level) & (level > 0) & (neurons <= last))


top_k = register("top_k(Tensor gate, int k) -> Tensor levels", fake=outputs, cpu=_cpu, cuda=_cuda, instead="torch.topk")
