"""Layers of experts: drawn problems and their answers."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.activation import ActivationName
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


def draw_experts(
    tokens: int,
    k: int,
    n: int,
    experts: int,
    top: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Mixture:
    """Draw a layer of experts in bfloat16 whose neurons fire for the share ``FIRING`` of the tokens, independently.

    x [tokens, k]; each token has ``top`` different experts. Down weights lie by rows.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()

    x = normal(tokens, k)
    x[:, 0] = 1
    up = normal(experts, n, k, scale=k**-0.5)
    # the mean of a gate, whose deviation is 1, by the column that all tokens have
    up[:, :, 0] = float(torch.special.ndtri(torch.tensor(FIRING, dtype=torch.float64, device="cpu")))
    down = normal(experts, n, k, scale=n**-0.5).transpose(1, 2)
    ids = torch.rand(tokens, experts, generator=generator, device=device).topk(top).indices
    weights = torch.rand(tokens, top, generator=generator, device=device) + 0.5
    return Mixture(x, up, down, ids, weights / weights.sum(1, keepdim=True))


def float64_experts(problem: Mixture, activation: ActivationName = "relu") -> Tensor:
    """y of a problem in float64; ids that are no expert's add nothing."""
    return _by_expert(problem, torch.float64, activation)


def dense_experts(problem: Mixture, activation: ActivationName = "relu") -> Tensor:
    """y of a problem by PyTorch's operators on each expert in the dtype of x, added in float32."""
    return _by_expert(problem, problem.x.dtype, activation)


def _by_expert(problem: Mixture, dtype: torch.dtype, activation: ActivationName) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    y = torch.zeros(problem.x.shape, dtype=wide, device=problem.x.device)
    for e in range(len(problem.w_up)):
        tokens, slots = (problem.expert_ids == e).nonzero(as_tuple=True)
        layer = FFN(problem.x[tokens], problem.w_up[e], problem.w_up[e], problem.w_down[e].t())
        own = dense_output(layer.map(lambda t: t.to(dtype)), gated=False, activation=activation)
        # a token has an expert once in each slot
        y.index_put_((tokens,), own.to(wide) * problem.weights[tokens, slots, None].to(wide), accumulate=True)
    return y.to(problem.x.dtype) if dtype != torch.float64 else y


def hidden_of(problem: Mixture, expert: int) -> tuple[Tensor, Tensor]:
    """Tokens of an expert, and which of its neurons fire for each, of gates that are above 0."""
    tokens = (problem.expert_ids == expert).any(1).nonzero()[:, 0]
    return tokens, F.linear(problem.x[tokens], problem.w_up[expert]) > 0
