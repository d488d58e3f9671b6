"""Outputs and gradients of a problem: in float64, by plain PyTorch, and through twell."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell.base.activation import ActivationName, activation_of
from twell.call.execution import Aux
from twell.choose.plan import route_of
from twell.runtime import geometry
from twell.testing.bounds import rare
from twell.testing.operands import sums
from twell.testing.workloads import CHUNK_ROWS, FFN


def double(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


def float64_gate(problem: FFN, threshold: float = 0.0) -> Tensor:
    """relu(x Wg^T + bg), or what is above the ``threshold``, in float64 from the stored values, [M, N]."""
    gate = F.linear(problem.x.double(), problem.w_gate.double(), double(problem.b_gate))
    return torch.where(gate <= _rounded(threshold, problem.x.dtype), 0, gate)


def _rounded(threshold: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(threshold, dtype=dtype, device="cpu"))


def _hidden(gate: Tensor, up: Tensor | None, activation: ActivationName, threshold: float) -> Tensor:
    """The hidden state of a gate before the activation and an up projection, in their dtype."""
    activation_of(activation, threshold, up is not None)
    hidden = F.threshold(gate, threshold, 0.0) if threshold else F.relu(gate)
    if activation == "relu2":
        hidden = hidden.square()
    if up is None:
        return hidden
    return hidden * (F.relu(up) if activation == "drelu" else up)


def _projections(problem: FFN, gated: bool) -> tuple[Tensor, Tensor | None]:
    """The gate before the activation, and the up projection."""
    gate = F.linear(problem.x, problem.w_gate, problem.b_gate)
    return gate, F.linear(problem.x, problem.w_up, problem.b_up) if gated else None


def _layer_hidden(
    problem: FFN, gated: bool = True, activation: ActivationName = "relu", threshold: float = 0.0
) -> Tensor:
    """The hidden state [M, N] in the dtype of the problem."""
    return _hidden(*_projections(problem, gated), activation, threshold)


def _wide(problem: FFN, threshold: float = 0.0) -> Iterator[tuple[slice, FFN, float]]:
    """The problem in float64 by chunks of tokens, with their place and the threshold as the layer has it."""
    weights, level = problem.rows(0, 0).map(Tensor.double), _rounded(threshold, problem.x.dtype)
    for start in range(0, len(problem.x), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        yield rows, weights._replace(x=problem.x[rows].double()), level


@torch.no_grad()
def count_roundings(
    problem: FFN, *, gated: bool = True, activation: ActivationName = "relu", threshold: float = 0.0
) -> float:
    """The effective number of hidden values behind the layer's rounding error: (sum h^2)^2 / sum h^4, in float64.

    It is the number of non-zeros if all have one size, less if a few are large, and 0 if there are none.
    """
    energy = fourth = 0.0
    for _, part, level in _wide(problem, threshold):
        squares = _layer_hidden(part, gated, activation, level).square()
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
    out = torch.empty_like(problem.x, dtype=torch.float64)
    for rows, part, level in _wide(problem, threshold):
        hidden = _layer_hidden(part, gated, activation, level)
        if rounded:
            hidden = hidden.float().to(problem.x.dtype).double()
        out[rows] = F.linear(hidden, part.w_down.T, part.b_down)
    return out


def dense_output(
    problem: FFN, *, gated: bool = True, activation: ActivationName = "relu", threshold: float = 0.0
) -> Tensor:
    """The same layer in plain PyTorch in the storage type, [M, K]: the baseline of every error and time."""
    return F.linear(_layer_hidden(problem, gated, activation, threshold), problem.w_down.T, problem.b_down)


def sparse_output(problem: FFN, *, gated: bool = True, **options: Any) -> Tensor:
    """The same layer through ``twell.sparse_gated_ffn`` or ``twell.sparse_ffn``, [M, K].

    ``options`` are the function's. The default, strategy "row", does not round the hidden state: integers have one
    right answer. "union+screen" and "row+invariant" are strategies here, too.
    """
    return _sparse(problem, gated, **{"strategy": "row"} | options)  # type: ignore[no-any-return]


def sparse_layer(problem: FFN, *, gated: bool = True, **options: Any) -> tuple[Tensor, Aux]:
    """``sparse_output`` with ``Aux``; ``options`` (strategy, main_grads, activation, ...) are the function's."""
    return _sparse(problem, gated, return_aux=True, **options)  # type: ignore[no-any-return]


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
    for x, kept in zip(torch.split(problem.x, CHUNK_ROWS), torch.split(tokens, CHUNK_ROWS)):
        gate, reach = sums(x, problem.w_gate, problem.b_gate)
        kinks = (gate - level).abs() < reach + level * torch.finfo(x.dtype).eps
        if gated:
            up, reach = sums(x, problem.w_up, problem.b_up)
            kinks |= (up.abs() < reach) & (gate > 0)
        kept.masked_fill_(kinks.any(1, keepdim=True), 0)
    return problem._replace(x=tokens)


@torch.no_grad()
def float64_gradients(
    problem: FFN,
    dy: Tensor,
    dl1: float = 0.0,
    *,
    gated: bool = True,
    activation: ActivationName = "relu",
    threshold: float = 0.0,
    dtype: torch.dtype | None = None,
    each: Callable[[Tensor], Tensor] = lambda factor: factor,
) -> dict[str, Tensor]:
    """Gradients of the layer in float64 from the stored values, by name, for ``dy`` [M, K] and ``dl1``.

    ``dy`` is the gradient with respect to y, ``dl1`` that with respect to the sum of |h| over all tokens and neurons.
    ``each`` is applied to both factors of every term. With ``dtype``, h, d_gate and d_up are rounded to it, except for
    the weights and biases of rare neurons, as ``twell.ops.hybrid_backward`` rounds them. Computed in chunks of rows on
    the problem's own device.
    """
    again: Tensor | None = None
    if dtype is not None and len(dy):
        active = float64_gate(problem, threshold) != 0
        again = rare(active) if int(active.sum()) <= geometry.hybrid_capacity(*active.shape) else None
    out = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in problem.present(gated).items()}

    def rounded(values: Tensor, weights: bool = False) -> Tensor:
        if dtype is not None:
            narrow = values.to(dtype).double()
            values = torch.where(again, values, narrow) if weights and again is not None else narrow
        return each(values)

    for rows, part, level in _wide(problem, threshold):
        upstream = dy[rows].double()
        leaves = [t.requires_grad_() for t in _projections(part, gated) if t is not None]
        with torch.enable_grad():
            hidden = _hidden(leaves[0], leaves[1] if gated else None, activation, level)
        dh = upstream @ part.w_down.T + dl1 * hidden.detach().sign()
        for name, d in zip(("gate", "up"), torch.autograd.grad(hidden, leaves, dh)):
            out["x"][rows] += rounded(d) @ each(getattr(part, f"w_{name}"))
            out[f"w_{name}"] += rounded(d, weights=True).T @ each(part.x)
            if f"b_{name}" in out:
                out[f"b_{name}"] += rounded(d, weights=True).sum(0)
        out["w_down"] += rounded(hidden.detach(), weights=True).T @ each(upstream)
        if "b_down" in out:
            out["b_down"] += each(upstream).sum(0)
    return out


@torch.enable_grad()
def _gradients(
    problem: FFN, dy: Tensor, dl1: float, gated: bool, layer: Callable[[FFN], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Gradients by autograd of what returns y and the sum of |h|."""
    leaves = problem.map(lambda t: t.detach().requires_grad_())
    y, l1 = layer(leaves)
    ends = ((y, l1), (dy, torch.full_like(l1, dl1))) if dl1 else ((y,), (dy,))
    tensors = leaves.present(gated)
    return dict(zip(tensors, torch.autograd.grad(ends[0], tuple(tensors.values()), ends[1]), strict=True))


def dense_gradients(
    problem: FFN, dy: Tensor, dl1: float = 0.0, *, gated: bool = True, **options: Any
) -> dict[str, Tensor]:
    """The same gradients by plain PyTorch in the storage type: the baseline of every error and time."""

    def layer(leaves: FFN) -> tuple[Tensor, Tensor]:
        hidden = _layer_hidden(leaves, gated, **options)
        l1 = hidden.abs().sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
        return F.linear(hidden, leaves.w_down.T, leaves.b_down), l1

    return _gradients(problem, dy, dl1, gated, layer)


def sparse_gradients(
    problem: FFN, dy: Tensor, dl1: float = 0.0, *, gated: bool = True, **options: Any
) -> dict[str, Tensor]:
    """The same gradients through ``sparse_layer(problem, **options)``."""

    def layer(leaves: FFN) -> tuple[Tensor, Tensor]:
        y, aux = sparse_layer(leaves, gated=gated, **options)
        # a mean over tokens
        return y, aux.l1 * len(dy)

    return _gradients(problem, dy, dl1, gated, layer)
