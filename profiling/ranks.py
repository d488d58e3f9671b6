"""Ranks: the processes that torchrun started, and how a model is distributed over them."""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from twell.commands.request import RequestError
from twell.distributed import tensor_parallel_plan
from twell.nn import set_down_layout


@dataclass(frozen=True)
class World:
    """This process among ``size``; ``mode`` is "" for a single one, else "ddp", "fsdp" or "tp"."""

    rank: int
    size: int
    mode: str
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def say(self, line: str) -> None:
        if self.first:
            print(line, flush=True)

    def barrier(self) -> None:
        """Wait for the other hosts."""
        dist.all_reduce(torch.zeros((), device="cpu"))


@contextlib.contextmanager
def world(device: str | None) -> Iterator[World]:
    """The processes of ``torchrun``. Raises RequestError without a GPU for each."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if where.type == "cuda":
        count = torch.cuda.device_count()
        if (where.index or 0) >= count:
            raise RequestError(f"--device: expected one of {count} GPUs, got {where}; --device cpu needs none")
        torch.cuda.set_device(where)
    # gloo is for messages between hosts
    dist.init_process_group("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo")
    yield World(dist.get_rank(), dist.get_world_size(), "ddp", where)
    # not after an error: other ranks may wait in a collective for it
    dist.destroy_process_group()


def spread(model: Any, here: World, dtype: torch.dtype) -> Any:
    """Distribute the parameters of ``model`` by the mode; return the module to call instead of it."""
    if here.mode != "fsdp":
        # the kernels read this layout in place; FSDP needs contiguous parameters
        set_down_layout(model, "rows")
    if here.mode == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if here.mode == "fsdp":
        mesh = init_device_mesh(here.device.type, (here.size,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    if here.mode == "tp":
        mesh = init_device_mesh(here.device.type, (here.size,))
        try:
            return parallelize_module(model, mesh, tensor_parallel_plan(model))
        except ValueError as error:
            raise RequestError(f"--modes tp: {error}") from error
    return model


def reduce_gradients(module: Any, here: World, now: bool) -> None:
    """Set whether the next backward exchanges gradients between ranks; only the last of a step must."""
    if here.mode == "ddp":
        module.require_backward_grad_sync = now
    elif here.mode == "fsdp":
        module.set_requires_gradient_sync(now)


def clip(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients to a total norm of at most ``limit``, unless it is 0; return the norm before."""
    norm = nn.utils.clip_grad_norm_(parameters, limit or math.inf)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
