"""How the operands of a case lie in memory, and what surrounds its call."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.ops.float8 import E4M3, Float8
from twell.testing.case import BIASES, Case
from twell.testing.operands import Operands


@contextlib.contextmanager
def surroundings(case: Case, device: torch.device) -> Iterator[None]:
    """Enter the case's autocast, default device and NaN-filled new memory."""
    filled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(case.filled or filled)
    default = torch.device(device if device.type == "cuda" else "meta") if case.device_set else contextlib.nullcontext()
    try:
        with torch.autocast(device.type, case.torch_dtype, enabled=case.autocast), default:
            yield
    finally:
        torch.use_deterministic_algorithms(filled)


def padded(t: Tensor, left: int, right: int) -> Tensor:
    """The same rows in a wider buffer that is NaN elsewhere."""
    return F.pad(t, (left, right), value=math.nan)[:, left : left + t.shape[1]]


def alternate(t: Tensor) -> Tensor:
    """Every second row, or element, of a buffer that is NaN between."""
    return torch.stack((t, torch.full_like(t, math.nan)), 1).flatten(0, 1)[::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "padded": lambda t: padded(t, 8, 16),
    "odd": lambda t: padded(t, 3, 5),
    "columns": lambda t: t.t().contiguous().t(),
    "alternate": alternate,
    "expanded": lambda t: t[:1].expand(t.shape),
    "off": lambda t: padded(t[None], 1, 0)[0],
}
# a down weight, which calls take as [K, N]
LAYOUTS |= {"rows": LAYOUTS["plain"], "linear": LAYOUTS["columns"]}


def laid_out(case: Case, o: Operands) -> Operands:
    """The operands as the call gets them: strides, leading dimensions, fp32 under autocast."""
    found: Operands = {}
    for name, t in o.items():
        if name in ("dy", "expert_ids", "weights", "threshold") or name[-2:] in ("_a", "_b"):
            found[name] = t
            continue
        how = {"x": case.x_layout, "gate": case.x_layout, "w_down": case.down_layout}.get(name)
        how = how or (case.bias_layout if name in BIASES else case.weight_layout)
        if isinstance(t, Float8):
            found[name] = _laid_record(name, t, how)
            continue
        t = t.float() if case.autocast else t
        if t.dim() == 3:
            found[name] = t if name != "w_down" or how == "rows" else t.contiguous()
        else:
            found[name] = LAYOUTS[how](t.t()).t() if name == "w_down" else LAYOUTS[how](t)
    if case.merged:
        both = torch.cat((found["w_gate"], found["w_up"]), 1)
        found["w_gate"], found["w_up"] = both[:, : case.n], both[:, case.n :]
    for name in ("x", "gate", "expert_ids", "weights"):
        if name in found:
            found[name] = with_lead(case, found[name])
    return found


def _laid_record(name: str, t: Float8, how: str) -> Float8:
    """Down weights lie by rows [N, K] already; x may have bytes between its rows."""
    values = t.values.view(torch.uint8)
    if how == "padded":
        values = F.pad(values, (0, values.shape[1]), value=0x7F)[:, : values.shape[1]]
    elif name == "w_down" and how != "rows":
        values = values.contiguous()
    return Float8(values.view(E4M3), t.scale)


def with_lead(case: Case, x: Any) -> Any:
    """``x`` [M, ...] with other leading dimensions, without a copy; records have none."""
    m = x.shape[0]
    divisor = next((d for d in (4, 3, 2, 5, 7) if m % d == 0), 1)
    shape: tuple[int, ...] = ((m,), (1, m), (m, 1, 1), (divisor, m // divisor), ())[case.lead]
    if case.tokens == "e4m3":
        return x
    if shape == ():
        return x[0] if m == 1 else x
    return x.unflatten(0, shape) if m else x
