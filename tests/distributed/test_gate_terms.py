"""Terms of the loss that compute gates after forward, and what else reads a model's weights there, on several ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Run, in_turn
from test_data_parallel import make, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import twell
from twell import recipe
from twell.nn.distributed import tensor_parallel_plan
from twell.recipe import _terms


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    gates = [_terms.gates(each, 2048) for each in _terms.read_inputs(model)]
    return y.square().mean() + sum(each.square().mean() for each in gates) + 0.1 * recipe.l1_term(model)


def divided(model: Any, how: str) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    if how == "tp":
        parallelize_module(model, init_device_mesh("cpu", (world,)), tensor_parallel_plan(model))
        return 0
    mesh = init_device_mesh("cpu", (world,))
    if how != "fsdp":
        names = ("dp", "tp") if how == "both" else ("replicate", "shard")
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        mesh = whole
        if how == "both":
            parallelize_module(model, whole["tp"], tensor_parallel_plan(model))
            mesh, rank = whole["dp"], whole["dp"].get_local_rank()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return rank


def gradients(device: torch.device, how: str) -> None:
    expected, model = make(device), make(device)
    own = divided(model, how)
    readers = {"tp": 1, "both": 2}.get(how, dist.get_world_size())
    for each in (expected, model):
        recipe.record_aux(each, inputs=True)
    for reader in range(readers):
        (loss_of(expected, tokens(device, 0, 0, reader)) / readers).backward()
    loss_of(model, tokens(device, 0, 0, own)).backward()
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("how", "world"), [("tp", 2), ("fsdp", 2), ("both", 4), ("hybrid", 4)])
def test_gradients_of_gates(cpu_ranks: Run, how: str, world: int) -> None:
    """FSDP2 has divided the weights again when the term gathers them."""
    cpu_ranks(world, gradients, how)


def flat(device: torch.device) -> None:
    model = FullyShardedDataParallel(make(device), use_orig_params=True, device_id=device)
    recipe.record_aux(model, inputs=True)
    with pytest.raises(ValueError, match=r"the gate's weight must be \[32, 16\], got \[\d+\]: FSDP1 has flat parts"):
        loss_of(model, tokens(device, 0, 0, 0))


def firing(device: torch.device) -> None:
    whole, model = make(device), make(device)
    divided(model, "tp")
    counts = []
    for each in (whole, model):
        with twell.count_firing(each) as found:
            each(tokens(device, 0, 0, 0))
        counts.append(found["0.mlp"].counts)
    assert torch.equal(*counts)
    with pytest.raises(TypeError, match="gate_proj must have plain parameters, got DTensors"):
        twell.compact(model, found)


def adapters(device: torch.device) -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base

        weight = property(lambda self: self.base.weight)
        bias = property(lambda self: self.base.bias)

        def forward(self, x: Tensor) -> Any:
            return self.base(x)

    for name in ("gate_proj", "up_proj", "down_proj"):
        model = make(device)
        setattr(model[0].mlp, name, Adapter(getattr(model[0].mlp, name)))
        with pytest.raises(
            ValueError,
            match=f"{name} must hold a weight and a bias as parameters of its own, got Adapter: merge adapters",
        ):
            divided(model, "tp")
        assert not any(isinstance(p, DTensor) for p in model[0].mlp.parameters())


def test_flat_weights_counts_and_what_a_plan_cannot_divide(cpu_ranks: Run) -> None:
    cpu_ranks(2, in_turn, flat, firing, adapters)
