"""Layers of experts: drawn problems and their answers."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.activation import ActivationName, activation_of
from twell.testing.answers import dense_output
from twell.testing.workloads import FFN

# Of the routed experts of one checkpoint of Nemotron 3.5 Lightning, by a public log of August 2026.
FIRING = 0.0931


class Mixture(NamedTuple):
    """The operands of ``sparse_experts``, by its names."""

    x: Tensor
    w_up: Tensor
    w_down: Tensor
    expert_ids: Tensor
    weights: Tensor
    w_gate: Tensor | None = None

    @property
    def first(self) -> Tensor:
        """The weight whose product the activation takes."""
        return self.w_up if self.w_gate is None else self.w_gate


def draw_experts(
    tokens: int,
    k: int,
    n: int,
    experts: int,
    top: int,
    *,
    firing: float = FIRING,
    skew: float = 0.0,
    gated: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Mixture:
    """Draw a layer of experts whose neurons fire for the share ``firing`` of the tokens, independently of each other.

    x [tokens, k]; each token has ``top`` different experts, drawn evenly or, with ``skew``, the r-th expert with a
    probability like 1 / r^skew. Down weights lie by rows.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    x = normal(tokens, k)
    x[:, 0] = 1
    first = normal(experts, n, k, scale=k**-0.5)
    # the mean of a gate, whose deviation is 1, by the column that all tokens have
    first[:, :, 0] = float(torch.special.ndtri(torch.tensor(firing, dtype=torch.float64, device="cpu")))
    up = normal(experts, n, k, scale=k**-0.5) if gated else None
    down = normal(experts, n, k, scale=n**-0.5).transpose(1, 2)
    ranks = torch.arange(1, experts + 1, device=device).float()
    noise = torch.rand(tokens, experts, generator=generator, device=device).clamp(min=1e-9)
    keys = -(-noise.log()).log() - skew * ranks.log()
    weights = torch.rand(tokens, top, generator=generator, device=device) + 0.5
    ids = keys.topk(top).indices
    weights = weights / weights.sum(1, keepdim=True)
    return Mixture(x, first if up is None else up, down, ids, weights, None if up is None else first)


def float64_experts(problem: Mixture, activation: ActivationName = "relu", threshold: float = 0.0) -> Tensor:
    """y of a problem in float64; ids that are no expert's add nothing."""
    return _by_expert(problem, torch.float64, activation, threshold)


def dense_experts(problem: Mixture, activation: ActivationName = "relu", threshold: float = 0.0) -> Tensor:
    """y of a problem by PyTorch's operators on each expert in the dtype of x, added in float32."""
    return _by_expert(problem, problem.x.dtype, activation, threshold)


def _by_expert(problem: Mixture, dtype: torch.dtype, activation: ActivationName, threshold: float) -> Tensor:
    gated, wide = problem.w_gate is not None, torch.promote_types(dtype, torch.float32)
    level = float(activation_of(activation, threshold, gated).level(problem.x.dtype))
    y = torch.zeros(problem.x.shape, dtype=wide, device=problem.x.device)
    for e in range(len(problem.w_up)):
        tokens, slots = (problem.expert_ids == e).nonzero(as_tuple=True)
        layer = FFN(problem.x[tokens], problem.first[e], problem.w_up[e], problem.w_down[e].t())
        own = dense_output(layer.map(lambda t: t.to(dtype)), gated=gated, activation=activation, threshold=level)
        # a token has an expert once in each slot
        y.index_put_((tokens,), own.to(wide) * problem.weights[tokens, slots, None].to(wide), accumulate=True)
    return y.to(problem.x.dtype) if dtype != torch.float64 else y


def hidden_of(problem: Mixture, expert: int) -> tuple[Tensor, Tensor]:
    """Tokens of an expert, and which of its neurons fire for each, of gates that are above 0."""
    tokens = (problem.expert_ids == expert).any(1).nonzero()[:, 0]
    return tokens, F.linear(problem.x[tokens], problem.first[expert]) > 0
