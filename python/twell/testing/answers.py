"""Outputs and gradients of a problem: in float64, by plain PyTorch, and through twell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell._activation import ActivationName, activation_of
from twell._execution import Aux
from twell._runtime import geometry
from twell.strategy.plan import route_of
from twell.testing.operands import sums
from twell.testing.workloads import FFN

# Rows of one float64 chunk; at N = 5632 its three intermediates take 0.5 GB.
CHUNK_ROWS = 4096


def double(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


def float64_gate(problem: FFN, threshold: float = 0.0) -> Tensor:
    """relu(x Wg^T + bg), or what is above the ``threshold``, in float64 from the stored values, [M, N]."""
    gate = F.linear(problem.x.double(), problem.w_gate.double(), double(problem.b_gate))
    return torch.where(gate <= _rounded(threshold, problem.x.dtype), 0, gate)


def _rounded(threshold: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(threshold, dtype=dtype, device="cpu"))


class _Hidden(NamedTuple):
    """The hidden state of a float64 gate and up projection, which is 1 without one, and its derivatives by both."""

    value: Tensor
    by_gate: Tensor
    by_up: Tensor

    @classmethod
    def of(cls, gate: Tensor, up: Tensor | None, activation: ActivationName) -> _Hidden:
        activation_of(activation, gated=up is not None)
        up = torch.ones_like(gate) if up is None else up
        fires = torch.ones_like(up)
        if activation == "drelu":
            fires = (up > 0).double()
            up = up * fires
        factor, slope = (gate**2, 2 * gate) if activation == "relu2" else (gate, torch.ones_like(gate))
        return cls(factor * up, slope * up, factor * fires)


def chunks(m: int) -> Iterator[tuple[int, int]]:
    """The beginnings and ends of chunks of ``m`` rows."""
    return ((start, min(start + CHUNK_ROWS, m)) for start in range(0, m, CHUNK_ROWS))


@torch.no_grad()
def count_roundings(
    problem: FFN, *, gated: bool = True, activation: ActivationName = "relu", threshold: float = 0.0
) -> float:
    """The effective number of hidden values behind the layer's rounding error: (sum h^2)^2 / sum h^4, in float64.

    It is the number of non-zeros if all have one size, less if a few are large, and 0 if there are none.
    """
    energy = fourth = 0.0
    for start, stop in chunks(problem.x.shape[0]):
        part = problem.rows(start, stop)
        up = F.linear(part.x.double(), part.w_up.double(), double(part.b_up)) if gated else None
        squares = _Hidden.of(float64_gate(part, threshold), up, activation).value.square()
        energy += float(squares.sum())
        fourth += float(squares.square_().sum())
    return energy**2 / fourth if fourth else 0.0


@torch.no_grad()
def float64_output(
    problem: FFN,
    *,
    gated: bool = True,
    activation: ActivationName = "relu",
    threshold: float = 0.0,
    rounded: bool = False,
) -> Tensor:
    """(relu(x Wg^T + bg) * (x Wu^T + bu)) Wd + bd in float64 from the stored values, [M, K]; no up factor if not gated.

    If ``rounded``, the hidden state is rounded to the storage type. Computed in chunks of rows on the problem's own
    device.
    """
    weights = problem.rows(0, 0).map(Tensor.double)
    out = torch.empty_like(problem.x, dtype=torch.float64)
    for start, stop in chunks(problem.x.shape[0]):
        part = problem.rows(start, stop)
        up = F.linear(part.x.double(), weights.w_up, weights.b_up) if gated else None
        hidden = _Hidden.of(float64_gate(part, threshold), up, activation).value
        if rounded:
            hidden = hidden.float().to(problem.x.dtype).double()
        out[start:stop] = F.linear(hidden, weights.w_down.T, weights.b_down)
    return out


def dense_output(
    problem: FFN, *, gated: bool = True, activation: ActivationName = "relu", threshold: float = 0.0
) -> Tensor:
    """The same layer in plain PyTorch in the storage type, [M, K]: the baseline of every error and time."""
    hidden = _dense_hidden(problem, gated, activation, threshold)
    return F.linear(hidden, problem.w_down.T, problem.b_down)


def _dense_hidden(problem: FFN, gated: bool, activation: ActivationName, threshold: float) -> Tensor:
    activation_of(activation, threshold, gated)
    gate = F.linear(problem.x, problem.w_gate, problem.b_gate)
    hidden = F.threshold(gate, threshold, 0.0) if threshold else F.relu(gate)
    if activation == "relu2":
        hidden = hidden.square()
    if not gated:
        return hidden
    up = F.linear(problem.x, problem.w_up, problem.b_up)
    return hidden * (F.relu(up) if activation == "drelu" else up)


def sparse_output(problem: FFN, *, gated: bool = True, **options: Any) -> Tensor:
    """The same layer through ``twell.sparse_gated_ffn`` or ``twell.sparse_ffn``, [M, K].

    ``options`` are the function's. The default, strategy "row", does not round the hidden state: integers have one
    right answer. "union+screen" and "row+invariant" are strategies here, too.
    """
    y: Tensor = _sparse(problem, gated, **{"strategy": "row"} | options)
    return y


def sparse_layer(problem: FFN, *, gated: bool = True, **options: Any) -> tuple[Tensor, Aux]:
    """``sparse_output`` with ``Aux``; ``options`` (strategy, main_grads, activation, ...) are the function's."""
    outputs: tuple[Tensor, Aux] = _sparse(problem, gated, return_aux=True, **options)
    return outputs


def _sparse(problem: FFN, gated: bool, **options: Any) -> Any:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = problem
    strategy = options.get("strategy")
    if isinstance(strategy, str) and "+" in strategy:
        options["strategy"] = route_of(strategy)
    if gated:
        return twell.sparse_gated_ffn(x, w_gate, w_up, w_down.t(), b_gate=b_gate, b_up=b_up, b_down=b_down, **options)
    return twell.sparse_ffn(x, w_gate, w_down.t(), b_up=b_gate, b_down=b_down, **options)


@torch.no_grad()
def off_kinks(problem: FFN, *, gated: bool = True, threshold: float = 0.0) -> FFN:
    """Zero the tokens whose gradients depend on rounding, and return that problem.

    ReLU has a kink at 0, or a step at ``threshold``, and so has |h| where the up projection is 0. If an fp32 sum falls
    on the other side of it than the float64 sum, whole terms of the gradients differ, in dense PyTorch, too: a few of
    uniform29's 16,384 tokens do, and their errors hide all others. A token with a sum this near becomes zero.
    """
    # a gate is rounded before it is compared with a threshold
    level = _rounded(threshold, problem.x.dtype)
    tokens = problem.x.clone()
    for start, stop in chunks(len(tokens)):
        x = problem.x[start:stop]
        gate, reach = sums(x, problem.w_gate, problem.b_gate)
        kinks = (gate - level).abs() < reach + level * torch.finfo(x.dtype).eps
        if gated:
            up, reach = sums(x, problem.w_up, problem.b_up)
            kinks |= (up.abs() < reach) & (gate > 0)
        tokens[start:stop].masked_fill_(kinks.any(1, keepdim=True), 0)
    return problem._replace(x=tokens)


def _rare_neurons(active: Tensor) -> Tensor | None:
    """Mask [N] of rare neurons: by popularity, 64 with few non-zeros together; None if the non-zeros do not fit."""
    m, n = active.shape
    counts = active.sum(0)
    if int(counts.sum()) > geometry.hybrid_capacity(m, n):
        return None
    on_cpu = counts.tolist()
    order = sorted(range(n), key=lambda neuron: (-on_cpu[neuron], neuron))
    rare = torch.zeros(n, dtype=torch.bool, device=active.device)
    for first in range(0, n, geometry.NEURON_TILE):
        tile = order[first : first + geometry.NEURON_TILE]
        rare[tile] = bool(counts[tile].sum() <= geometry.RARE_ENTRIES)
    return rare


@torch.no_grad()
def gradients_by_terms(
    problem: FFN,
    dy: Tensor,
    dl1: float,
    gated: bool,
    dtype: torch.dtype | None = None,
    each: Callable[[Tensor], Tensor] = lambda factor: factor,
    activation: ActivationName = "relu",
    threshold: float = 0.0,
) -> dict[str, Tensor]:
    """Gradients in float64, by name. ``each`` is applied to both factors of every term.

    With ``dtype``, h, d_gate and d_up are rounded to it, except for the weights and biases of rare neurons, as
    ``twell.ops.hybrid_backward`` rounds them.
    """
    fires = [float64_gate(problem.rows(*rows), threshold) != 0 for rows in chunks(len(dy))]
    active = torch.cat(fires or [dy.new_zeros(0)])
    rare = _rare_neurons(active) if dtype is not None and len(dy) else None
    w = problem.rows(0, 0).map(Tensor.double)
    out = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in problem.present(gated).items()}

    def rounded(values: Tensor, weights: bool = False) -> Tensor:
        if dtype is not None:
            narrow = values.to(dtype).double()
            values = torch.where(rare, values, narrow) if weights and rare is not None else narrow
        return each(values)

    for start, stop in chunks(len(dy)):
        x, upstream = problem.x[start:stop].double(), dy[start:stop].double()
        gate = float64_gate(problem.rows(start, stop), threshold)
        up = F.linear(x, w.w_up, w.b_up) if gated else None
        hidden, by_gate, by_up = _Hidden.of(gate, up, activation)
        dh = (upstream @ w.w_down.T + dl1 * hidden.sign()).masked_fill_(gate == 0, 0)
        coefficients = {"gate": (dh * by_gate, w.w_gate)}
        if gated:
            coefficients["up"] = dh * by_up, w.w_up
        for name, (d, weight) in coefficients.items():
            out["x"][start:stop] += rounded(d) @ each(weight)
            out[f"w_{name}"] += rounded(d, weights=True).T @ each(x)
            if f"b_{name}" in out:
                out[f"b_{name}"] += rounded(d, weights=True).sum(0)
        out["w_down"] += rounded(hidden, weights=True).T @ each(upstream)
        if "b_down" in out:
            out["b_down"] += each(upstream).sum(0)
    return out


def float64_gradients(
    problem: FFN, dy: Tensor, dl1: float = 0.0, *, gated: bool = True, **options: Any
) -> dict[str, Tensor]:
    """Gradients of the layer in float64 from the stored values, for ``dy`` [M, K] and ``dl1``.

    ``dy`` is the gradient with respect to y, ``dl1`` that with respect to the sum of |h| over all tokens and neurons.
    ``options``: activation and threshold. Computed in chunks of rows on the problem's own device.
    """
    return gradients_by_terms(problem, dy, dl1, gated, **options)


def _derive(leaves: FFN, gated: bool, outputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> dict[str, Tensor]:
    tensors = leaves.present(gated)
    return dict(zip(tensors, torch.autograd.grad(outputs, tuple(tensors.values()), upstream), strict=True))


def _leaves(problem: FFN) -> FFN:
    return problem.map(lambda t: t.detach().requires_grad_())


@torch.enable_grad()
def dense_gradients(
    problem: FFN,
    dy: Tensor,
    dl1: float = 0.0,
    *,
    gated: bool = True,
    activation: ActivationName = "relu",
    threshold: float = 0.0,
) -> dict[str, Tensor]:
    """The same gradients by plain PyTorch in the storage type: the baseline of every error and time."""
    leaves = _leaves(problem)
    hidden = _dense_hidden(leaves, gated, activation, threshold)
    y = F.linear(hidden, leaves.w_down.T, leaves.b_down)
    if not dl1:
        return _derive(leaves, gated, [y], [dy])
    l1 = hidden.abs().sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
    return _derive(leaves, gated, [y, l1], [dy, torch.full_like(l1, dl1)])


@torch.enable_grad()
def sparse_gradients(
    problem: FFN, dy: Tensor, dl1: float = 0.0, *, gated: bool = True, **options: Any
) -> dict[str, Tensor]:
    """The same gradients through ``sparse_layer(problem, **options)``."""
    leaves = _leaves(problem)
    y, aux = sparse_layer(leaves, gated=gated, **options)
    if not dl1:
        return _derive(leaves, gated, [y], [dy])
    # aux.l1 is a mean over tokens
    return _derive(leaves, gated, [y, aux.l1], [dy, torch.full_like(aux.l1, dl1 * len(dy))])
