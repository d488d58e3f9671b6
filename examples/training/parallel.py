"""One process or many: ranks, distribution of the model, and communication between ranks."""

from __future__ import annotations

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

from twell.distributed import tensor_parallel_plan
from twell.nn import set_down_layout

from . import RequestError
from .model import is_sparse


@dataclass(frozen=True)
class World:
    """This process among ``size``; ``mode`` is "" for a single one, else "ddp", "fsdp" or "tp"."""

    rank: int
    size: int
    mode: str
    device: torch.device

    @property
    def readers(self) -> int:
        """The number of ranks that read different sequences. Under "tp" all ranks read the same ones."""
        return 1 if self.mode == "tp" else self.size

    @property
    def reader(self) -> int:
        return 0 if self.mode == "tp" else self.rank

    @property
    def first(self) -> bool:
        return self.rank == 0

    def say(self, line: str) -> None:
        if self.first:
            print(line, flush=True)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over ranks."""
        if self.readers > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def any(self, flag: bool) -> bool:
        """Whether any rank sets the flag. The hosts exchange it, without waiting for the GPUs."""
        if self.size == 1:
            return flag
        flags = torch.tensor(int(flag), device="cpu")
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def barrier(self) -> None:
        self.any(False)


@contextlib.contextmanager
def world(mode: str | None, device: str | None) -> Iterator[World]:
    """The processes that ``torchrun`` started, or this one alone."""
    size, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    if size == 1 and mode:
        raise RequestError(f"--parallel {mode}: expected several processes (torchrun --nproc-per-node 2 ...), got one")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if where.type == "cuda":
        count = torch.cuda.device_count()
        if (where.index or 0) >= count:
            raise RequestError(f"--device: expected one of {count} GPUs, got {where}; --device cpu needs none")
        torch.cuda.set_device(where)
    if size == 1:
        yield World(0, 1, "", where)
        return
    # gloo is for messages between hosts
    dist.init_process_group("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo")
    yield World(dist.get_rank(), size, mode or "ddp", where)
    # not after an error: other ranks may wait in a collective for it
    dist.destroy_process_group()


def spread(model: Any, here: World, dtype: torch.dtype) -> Any:
    """Distribute the parameters of ``model`` by the mode; return the module to call instead of it."""
    if is_sparse(model) and here.mode != "fsdp":
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
            raise RequestError(f"--parallel tp: {error}") from error
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
