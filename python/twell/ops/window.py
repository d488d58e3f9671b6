"""``window``: which gates [M, n] lie between two bounds of their neurons; those up to a level become zero in place.

near uint8 [M, n] is 1 where below < gate < above, else 0. A gate fires unless it is at most the level: so NaN fires,
is not near and stays. counts int32 [3, n] are the numbers of tokens whose gate is near, is near and fires, and fires.

gate has at most 65,536 neurons; level, below and above [n] are of its dtype. In training the level is the threshold,
and below and above are the ends of its window.
"""

import torch
from torch import Tensor

from twell.choose import tuning
from twell.ops.library import aligned, check, check_matrix, register, rows
from twell.ops.operands import run
from twell.runtime import geometry
from twell.runtime.program import Program, View


def outputs(gate: Tensor, level: Tensor, below: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised near and counts; raises unless the operands fit."""
    check_matrix("gate", gate)
    m, n = gate.shape
    if not 0 < n <= geometry.MAX_NEURONS:
        raise ValueError(f"gate must have between 1 and {geometry.MAX_NEURONS} neurons, got {n}")
    for name, bound in (("level", level), ("below", below), ("above", above)):
        check(name, bound, (n,), gate.dtype)
    return gate.new_empty((m, n), dtype=torch.uint8), gate.new_empty((3, n), dtype=torch.int32)


def _cpu(gate: Tensor, level: Tensor, below: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    found, counts = outputs(gate, level, below, above)
    near, silent = (gate > below) & (gate < above), gate <= level
    for count, which in zip(counts, (near, near & ~silent, ~silent)):
        count.copy_(which.sum(0))
    gate.masked_fill_(silent, 0)
    return found.copy_(near), counts


def _cuda(gate: Tensor, level: Tensor, below: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    near, counts = outputs(gate, level, below, above)
    counts.zero_()
    if len(gate):
        laid = rows(gate)
        run(_build, (laid, *map(aligned, (level, below, above)), near, counts))
        if laid is not gate:
            gate.copy_(laid)
    return near, counts


def _build(p: Program, gate: View, *others: View) -> None:
    p.launch(tuning.window(gate.dtype), gate, *others)


window = register(
    "window(Tensor(a!) gate, Tensor level, Tensor below, Tensor above) -> (Tensor near, Tensor counts)",
    fake=outputs,
    cpu=_cpu,
    cuda=_cuda,
)
