"""The answer of a case in float64, and how far the promised roundings may lead from it at the worst.

One formula holds for all kinds: a layer is one expert of weight 1, e4m3 operands are values times scales, a given gate
is an operand. It runs twice, with autograd: as it is, and on absolute values with the true sizes of gate and up
projection, whose results, times the share that all roundings together may take, bound the error of each element.
Nothing here is the package's code.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.testing.case import Case
from twell.testing.operands import LORA_SCALE, in_e4m3, largest, level_of, rounds_hidden, rounds_weighted, wide

# Value of main gradients before a call adds to them.
MAIN = 3

# Worst error of fp32 sums, as a share of the sum of absolute terms; with e4m3 weights tensor cores keep 14 bits.
SUMMATION = 2.0**-16
FAST_SUMMATION = 2.0**-12


class Answer(NamedTuple):
    """A result in float64, and the largest error of each element."""

    value: Tensor
    off: Tensor


class _Signs(NamedTuple):
    """Of an expert: its gate; sizes of gate and up projection; which are kept, which of these count; and windows.

    doubtful: gates that roundings may lead to the other side of the threshold. may_fire: up projections likewise, of 0.
    """

    gate: Tensor
    sizes: tuple[Tensor, Tensor]
    active: Tensor
    fires: Tensor
    near: Tensor
    doubtful: Tensor
    may_fire: Tensor


class Results(NamedTuple):
    """y, the sum of |h|, the number of non-zeros, and the chosen gates of the last expert."""

    y: Tensor
    l1: Tensor
    l0: Tensor
    active: Tensor
    gate: Tensor


def roundings(case: Case) -> float:
    """The share of the sum of absolute terms that all roundings of a result may take together."""
    eps = torch.finfo(case.torch_dtype).eps / 2
    # the gate, its square, the up projection, h or a coefficient, and the result are rounded to 16 bits
    count = 5 + (case.activation == "relu2") + 3 * (not case.is_sparse) + 4 * bool(case.rank)
    # an autoencoder's input, the skip product, and parts of gradients that autograd adds up; parts of y beside others
    count += (case.kind == "autoencoder") * 4 + case.shared * 2
    quantised = 2.0**-3 if case.scales and not case.is_sparse else 0.0
    return count * eps + quantised + (FAST_SUMMATION if case.scales else SUMMATION)


def answers(case: Case, o: dict[str, Any]) -> dict[str, Answer]:
    """y, l1, l0 and the gradients that are wanted, by the names of operands."""
    own = dict(o)
    if case.scales:
        own["x"] = in_e4m3(case, o["x"])
    names, share, signs, found = case.wanted, roundings(case), list[_Signs](), list[dict[str, Tensor]]()
    runs = list[Results]()
    for size in (Tensor.clone, Tensor.abs):
        leaves = {
            name: t if name == "expert_ids" else size(wide(t)).requires_grad_(name in names) for name, t in own.items()
        }
        with torch.enable_grad():
            run = formula(case, leaves, signs, share)
            out = {"y": run.y.detach(), "l1": run.l1.detach() / max(case.m, 1), "l0": run.l0.detach() / max(case.m, 1)}
            if names:
                loss = (run.y * leaves["dy"]).sum() + case.dl1 * (run.l1 + (run.l0 if case.bandwidth else 0))
                given = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
                for name, t in zip(names, given):
                    main = MAIN * (case.mains and name in case.weights)
                    out[name] = main + (torch.zeros_like(leaves[name]) if t is None else t)
        runs.append(run)
        found.append(out)
    (right, absolute), figures = found, runs[0]
    if case.kind == "autoencoder" and case.train:
        fired = figures.active.any(0) if case.m else torch.zeros(case.n, dtype=torch.bool, device=right["y"].device)
        right["unfired"] = torch.where(fired, 0, case.m)
        absolute["unfired"] = signs[-1].doubtful.any(0) * case.m / share if case.m else 0 * right["unfired"]
        if case.activation == "batchtopk":
            kept = figures.gate[figures.active]
            right["moved"] = case.threshold + (0.01 * (kept.amin() - case.threshold) if len(kept) else kept.sum())
            absolute["moved"] = right["moved"].abs()
    return {name: Answer(t, share * absolute[name] + 2.0**-22) for name, t in right.items()}


def formula(case: Case, w: dict[str, Any], signs: list[_Signs], share: float) -> Results:
    """The formula; with what an earlier call left in ``signs``, that of absolute values. ``share``: ``roundings``."""
    absolute, dtype = bool(signs), case.torch_dtype
    # what integers are rounded to; the answer of real numbers is not
    narrow = _narrow(dtype) if case.exact and not absolute else lambda t: t
    x: Any = w.get("x")
    if case.kind == "autoencoder":
        # in the dtype of x
        x = x + w["b_down"] if absolute else _narrow(dtype)(x - w["b_down"])
    m, n, k = case.m, case.n, case.k
    y = w["dy"] * 0 + w.get("b_down", 0)
    l1, l0 = w["dy"].sum() * 0, w["dy"].sum() * 0
    for e in range(case.experts):
        tokens, weight, slots = torch.arange(m, device=y.device), torch.ones_like(y[:, :1]), torch.zeros_like(y[:, :1])
        if "expert_ids" in w:
            routed = w["expert_ids"] == e
            tokens, weight = routed.any(1).nonzero()[:, 0], w["weights"].where(routed, 0).sum(1, keepdim=True)
            slots = routed.sum(1, keepdim=True)

        def adapted(name: str, inputs: Tensor, size: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
            """What an adapter adds, of which the first product is rounded."""
            if not case.rank:
                return 0.0
            return LORA_SCALE * size(narrow(inputs @ w[f"w_{name}_a"].t())) @ size(w[f"w_{name}_b"]).t()

        def projected(name: str, e: int = e, tokens: Tensor = tokens) -> Tensor:
            own = x[tokens] @ w[f"w_{name}"].reshape(-1, n, k)[e].t() + w.get(f"b_{name}", 0)
            return own + adapted(name, x[tokens])  # type: ignore[no-any-return]

        gate = w["gate"] if "gate" in w else narrow(projected(case.first))
        up = projected("up") if case.first == "gate" and "w_up" in w else torch.ones_like(gate)
        # training keeps it for backward
        up = narrow(up) if case.wants else up
        if not absolute:

            def size_of(name: str, t: Tensor, e: int = e, tokens: Tensor = tokens) -> Tensor:
                """The size of a projection; terms that cancel leave errors of their own size."""
                size = t.detach().abs()
                if case.rank and f"w_{name}" in w:
                    size = size + adapted(name, x[tokens], Tensor.abs).detach()
                if not case.exact and f"w_{name}" in w:
                    terms = x[tokens].abs() @ w[f"w_{name}"].reshape(-1, n, k)[e].abs().t()
                    size = size + (FAST_SUMMATION if case.scales else SUMMATION) / share * terms.detach()
                return size

            sizes = [size_of(name, t) for name, t in ((case.first, gate), ("up", up))]
            signs.append(_chosen(case, gate.detach(), up.detach(), tuple(sizes), share))
        of = signs[e]
        if absolute:
            # true sizes, and derivatives of the absolute parts
            gate, up = (path + (size - path).detach() for size, path in zip(of.sizes, (gate, up)))
            # a doubtful one may be there or not, and so may its part of gradients
            gate = gate + of.doubtful * (of.gate.abs() + gate - gate.detach()) / share
        active = of.active | of.doubtful if absolute else of.active
        fires = of.fires | of.doubtful | of.may_fire if absolute else of.fires
        gate = gate.where(active, 0)
        hidden = (gate * gate if case.activation == "relu2" else gate) * up.where(fires, 0)
        if absolute:
            # steps of the smallest numbers of the dtype are no share; "dense" rounds what each slot of a token adds
            least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps / share
            hidden = hidden + fires * least
            y = y + least * (slots + weight)
        if rounds_hidden(case, y.device):
            hidden = narrow(hidden)
        l0 = l0 + of.active.sum()
        if "threshold" in w and case.bandwidth:
            # the straight-through estimator: no value, but a gradient within the windows
            near = of.near + _unsure(case, of) / share if absolute else -of.near
            step = near * (w["threshold"] - w["threshold"].detach()) / case.bandwidth
            hidden, l0 = hidden + level_of(case, y.device).double() * step, l0 + step.sum()
        l1 = l1 + hidden.abs().sum()
        down = w["w_down"].transpose(-1, -2).reshape(-1, n, k)[e]
        hidden = hidden * weight[tokens]
        hidden = narrow(hidden) if rounds_weighted(case, y.device) else hidden
        y = y.index_add(0, tokens, hidden @ down)
        y = narrow(y) + adapted("down", hidden) if case.rank else y
    if case.skip:
        y = narrow(y) + narrow(w["x"] @ w["w_skip"].t())
    return Results(y, l1, l0, of.active, of.gate)


def _chosen(case: Case, gate: Tensor, up: Tensor, sizes: Any, share: float) -> _Signs:
    """What the activation keeps of gates and up projections."""
    level = level_of(case, gate.device).double()
    rounded = gate.to(case.torch_dtype)
    if case.activation == "topk":
        active = largest(rounded, case.top)
    elif case.activation == "batchtopk" and case.train:
        most = int(case.top * case.m)
        order = rounded.flatten().argsort(descending=True, stable=True)
        active = torch.zeros_like(gate, dtype=torch.bool).flatten()
        active = (active.index_fill(0, order[:most], True)).view(gate.shape) & (gate > 0)
    else:
        active = gate > level
    fires = active & (up > 0) if case.activation == "drelu" else active
    distance = (gate - level).abs()
    # other operands keep their distance from what decides, see ``operands``
    eps = 2 * torch.finfo(case.torch_dtype).eps
    reach, up_reach = (share * (size - t.abs()) + eps * t.abs() for size, t in zip(sizes, (gate, up)))
    doubtful = may_fire = torch.zeros_like(active)
    if not case.exact and case.activation == "batchtopk" and case.train and active.any():
        doubtful = (gate - gate[active].amin()).abs() < reach
    elif not case.exact and case.scales:
        doubtful, may_fire = distance < reach, up.abs() < up_reach
    return _Signs(gate, sizes, active, fires, (distance < case.bandwidth / 2).double(), doubtful, may_fire)


def _unsure(case: Case, of: _Signs) -> Tensor:
    """Which gates are so near to the end of a window that their rounding decides."""
    if case.exact:
        return torch.zeros_like(of.gate)
    distance = (of.gate - level_of(case, of.gate.device).double()).abs() - case.bandwidth / 2
    return (distance.abs() < of.gate.abs() * torch.finfo(case.torch_dtype).eps + 2.0**-12).double()


def _narrow(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Rounding to ``dtype``, through which gradients pass."""
    return lambda t: t + (t.detach().to(dtype).double() - t.detach())
