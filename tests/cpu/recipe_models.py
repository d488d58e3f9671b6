"""A small model for the tests of ``twell.recipe``, and what it computes in plain PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from ffns import Pair
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.nn.pairs import pair_up
from twell.recipe import LayerStats, SparsityTracker, _terms
from twell.recipe._aux import mean_over_layers

K, N, B, S = 16, 40, 2, 8


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp, self.after = nn.LayerNorm(K), mlp, nn.LayerNorm(K)

    def forward(self, x: Tensor) -> Tensor:
        # later operators save tensors, so a checkpoint recomputes the layer to its end
        y: Tensor = self.after(x + self.mlp(self.norm(x))).square()
        return y


class Model(nn.Module):
    """Blocks over [B, S, K], perhaps checkpointed one by one."""

    reentrant: bool | None = None
    blocks: Any

    def __init__(self, *mlps: nn.Module) -> None:
        super().__init__()
        # named: on a CPU "auto" is dense
        mlps = mlps or (SparseGatedMLP(K, N, strategy="union"), SparseMLP(K, 2 * N, strategy="union"))
        self.blocks = nn.ModuleList(map(Block, mlps))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def inputs(count: int = 1, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(B, S, K, generator=generator).to(**options) for _ in range(count)]


def hidden(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gate after ReLU and the hidden state, computed densely."""
    if isinstance(mlp, SparseGatedMLP):
        gate = F.relu(mlp.gate_proj(x))
        return gate, gate * mlp.up_proj(x)
    gate = F.relu(mlp.up_proj(x))
    return gate, gate


def plain_pass(model: Model, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return output, gates and hidden states of the model in plain PyTorch."""
    gates, states = [], []
    for block in model.blocks:
        gate, h = hidden(block.mlp, block.norm(x))
        gates.append(gate)
        states.append(h)
        x = block.after(x + block.mlp.down_proj(h)).square()
    return x, gates, states


def plain_term(states: list[Tensor]) -> Tensor:
    return torch.stack([h.abs().sum(-1).mean() for h in states]).mean()


def gate_l1(model: nn.Module, most: int = 2048) -> Tensor:
    """The mean over layers and tokens of L1 of the gates, of inputs that the layers have kept."""
    gates = [_terms.gates(each, most) for each in _terms.read_inputs(model)]
    return mean_over_layers(model, [each.sum(-1).sum() / max(1, len(each)) for each in gates])


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.clone())
        parameter.grad = None
    return found


def assert_close(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def brute(gates: list[Tensor]) -> Tensor:
    """Count firings per neuron of gates [tokens, N]."""
    return (torch.cat([gate.reshape(-1, gate.shape[-1]) for gate in gates]) != 0).sum(0)


def tracked(model: nn.Module, x: Tensor, **options: Any) -> tuple[LayerStats, ...]:
    tracker = SparsityTracker(model, **options)
    with tracker.watch(0):
        model(x)
    found = tracker.read().layers
    tracker.close()
    return found


def pair() -> Any:
    block = Pair(n=N, k=K)
    pair_up(block, ("fc1", "fc2"), "act", (), {})
    return block


class Adapted(nn.Linear):
    """A projection with more than weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 0.3


class Waits(TorchDispatchMode):
    """A mode that fails where the host would wait for a GPU: reading values, and tensors made from host numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "bincount", "lift_fresh")
        assert func._schema.name.removeprefix("aten::") not in waits, func
        return func(*args, **(kwargs or {}))
