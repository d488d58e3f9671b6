"""``torch.distributed.checkpoint`` and state dicts: any kind of parallelism loads the checkpoints of any other."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import twell
from twell.nn.distributed import SparseMLPParallel

HIDDEN, NEURONS = 16, 32


def make(seed: int, where: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        twell.nn.SparseGatedMLP(HIDDEN, NEURONS, bias=True, strategy="union"),
        twell.nn.SparseMLP(HIDDEN, NEURONS, strategy="union"),
    ).to(where)


def one_process(model: nn.Module, device: torch.device) -> nn.Module:
    return model


def rows(model: nn.Module, device: torch.device) -> nn.Module:
    twell.nn.set_down_layout(model, "rows")
    return model


def fsdp(model: nn.Module, device: torch.device) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel(model: nn.Module, device: torch.device) -> nn.Module:
    style = SparseMLPParallel()
    return parallelize_module(model, init_device_mesh(device.type, (2,)), {"*": style})


def replicated(model: nn.Module, device: torch.device) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


WAYS = (one_process, rows, fsdp, tensor_parallel, replicated)


def parts(model: nn.Module, expected: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each parameter, and what it should be."""
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        p, q = p.detach(), q.detach()
        if isinstance(p, DTensor):
            p, q = p.to_local(), distribute_tensor(q, p.device_mesh, p.placements, src_data_rank=None).to_local()
        yield p, q


def same(model: nn.Module, expected: nn.Module) -> None:
    for p, q in parts(model, expected):
        assert torch.equal(p, q)


def laid_right(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, (twell.nn.SparseGatedMLP, twell.nn.SparseMLP)):
            weight = layer.down_proj.weight
            part = weight.to_local() if isinstance(weight, DTensor) else weight
            assert (part.t() if layer.down_layout == "rows" else part).is_contiguous()


def between_all_ways(device: torch.device, folder: Path) -> None:
    whole = make(0, device)
    for save in WAYS:
        stored = folder / save.__name__
        dcp.save({"model": get_model_state_dict(save(make(0, device), device))}, checkpoint_id=stored)
        for load in WAYS:
            model = load(make(1 + dist.get_rank(), device), device)
            state = {"model": get_model_state_dict(model)}
            dcp.load(state, checkpoint_id=stored)
            set_model_state_dict(model, state["model"])
            same(model, whole)
            laid_right(model)


def whole_state_dicts(device: torch.device) -> None:
    whole = make(0, device)
    for way in WAYS:
        # out: everything on rank 0
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(way(make(0, device), device), options=options)
        if dist.get_rank() == 0:
            assert state.keys() == whole.state_dict().keys()
            for name, value in whole.state_dict().items():
                assert torch.equal(state[name].to(device), value)
        # in: from rank 0 alone; what is broadcast must be contiguous, which torch does not check
        model = way(make(1 + dist.get_rank(), device), device)
        state = {name: t.contiguous() for name, t in whole.state_dict().items()} if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        same(model, whole)
        laid_right(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(0)).to(device)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def resumed(device: torch.device, folder: Path) -> None:
    """Model and optimizer, stored by one kind and loaded by another, take the same next step."""
    ways = (fsdp, tensor_parallel, one_process)
    whole = make(0, device)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    step(whole, optimizer, device)
    step(whole, optimizer, device)
    for save in ways:
        model = save(make(0, device), device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer, device)
        states = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states)), checkpoint_id=folder / save.__name__)
        for load in ways:
            model = load(make(1 + dist.get_rank(), device), device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.load(state, checkpoint_id=folder / save.__name__)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            step(model, optimizer, device)
            for p, q in parts(model, whole):
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_checkpoints_between_all_ways(two: Run, tmp_path: Path) -> None:
    two(between_all_ways, tmp_path)


def test_whole_state_dicts(two: Run) -> None:
    two(whole_state_dicts)


def test_resuming_in_another_way(cpu_ranks: Run, tmp_path: Path) -> None:
    cpu_ranks(2, resumed, tmp_path)
