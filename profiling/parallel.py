"""Time training steps on several GPUs by DDP, FSDP2 and tensor parallelism: dense and sparse, speed and memory.

    python -m torch.distributed.run --nproc-per-node 2 -m profiling.parallel --out profiling/results/parallel.json

The model is one of those of ``profiling.bench model --config``, random weights with the sparsity of trained ones, the
same on all ranks. A step is forward, cross-entropy and L1, backward, clipping and AdamW of rate 0, which keeps the
sparsity, in bfloat16 over fp32 weights. Each rank has --micro-batch sequences of its own; with tensor parallelism all
ranks have the same, as many as all ranks together have in the other modes.

Variants: dense and sparse, eager and with each decoder layer through torch.compile, which keeps what "auto" chose in
the eager steps before. Times are medians over steps of the slowest rank. Host time lasts until the step's last call
returned: as long as the step where GPUs wait for the hosts. Memory is the peak of torch's allocator on the rank with
most, weights and optimizer included. Loss and gradient norm of the first step must be those of dense eager, up to 1 and
5 percent, else a row is red. The file is written after each mode. Exit status: 1 if a row is red.
"""

import argparse
import contextlib
import copy
import gc
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from profiling.bench.models_random import Pattern, build, cast, draw, draw_ids, paper_nnz, parse_sizes
from profiling.harness import SETTLING, Row, show, write_json
from twell import recipe, testing
from twell.commands.request import RequestError, at_least, exit_status
from twell.commands.timing import FAILURES, reason, spread
from twell.integrations import sparsify
from twell.nn.distributed import tensor_parallel_plan
from twell.nn.layers import set_down_layout
from twell.recipe._tracker import strategy_of

MODES = ("ddp", "fsdp", "tp")
VARIANTS = ("dense eager", "sparse eager", "dense compiled", "sparse compiled")
L1 = 2e-5
# What loss and gradient norm may differ from those of dense eager, as a share.
ALLOWED = {"loss": 0.01, "norm": 0.05}
FIELDS = ("ms", "p10_ms", "p90_ms", "host_ms", "tokens_per_ms", "speedup", "peak_bytes", "loss", "norm")
SHOWN = ("mode", "variant", "ms", "host_ms", "tokens_per_ms", "speedup", "peak_bytes", "strategies")


class World(NamedTuple):
    """This process among ``size``."""

    rank: int
    size: int
    device: torch.device

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def world(device: str | None) -> Iterator[World]:
    """The processes of ``torchrun``. Raises RequestError without several, or without a GPU for each."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        said = "python -m torch.distributed.run --nproc-per-node 2 ..."
        raise RequestError(f"expected several processes ({said}), got one")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if where.type == "cuda":
        count = torch.cuda.device_count()
        if (where.index or 0) >= count:
            raise RequestError(f"--device: expected one of {count} GPUs, got {where}; --device cpu needs none")
        torch.cuda.set_device(where)
    # gloo is for messages between hosts
    dist.init_process_group("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo")
    yield World(dist.get_rank(), dist.get_world_size(), where)
    # not after an error: other ranks may wait in a collective for it
    dist.destroy_process_group()


def distributed(model: Any, here: World, mode: str) -> Any:
    """Distribute the parameters of ``model`` by the mode; return the module to call instead of it."""
    if mode != "fsdp":
        # the kernels read this layout in place; FSDP needs contiguous parameters
        set_down_layout(model, "rows")
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh(here.device.type, (here.size,))
    if mode == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    try:
        return parallelize_module(model, mesh, tensor_parallel_plan(model))
    except ValueError as error:
        raise RequestError(f"--modes tp: {error}") from error


class Steps:
    """A model distributed over ranks, and its training steps."""

    def __init__(self, base: nn.Module, mode: str, variant: str, here: World, ids: Tensor, micro_batch: int) -> None:
        self.here, self.mode = here, mode
        self.model: Any = copy.deepcopy(base).to(here.device)
        self.model.train()
        recipe.record_aux(self.model)
        self.layers = sparsify.layers(self.model)
        # "auto" is dense on a CPU
        sparse: Any = "auto" if here.device.type == "cuda" else "union"
        for layer in self.layers.values():
            layer.strategy = sparse if variant.startswith("sparse") else "dense"
        compiled = variant.endswith("compiled")
        if compiled and mode != "tp":
            self.compile()
        self.module = distributed(self.model, here, mode)
        if compiled and mode == "tp":
            self.compile()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=here.device.type == "cuda")
        own = slice(None) if mode == "tp" else slice(here.rank * micro_batch, (here.rank + 1) * micro_batch)
        self.passes = torch.split(ids[own].to(here.device), micro_batch)

    def compile(self) -> None:
        """Let torch.compile compile each decoder layer."""
        torch._dynamo.config.recompile_limit = 64
        for layer in self.model.get_decoder().layers:
            layer.compile(dynamic=False)

    def step(self) -> tuple[Tensor, Tensor]:
        """Take one step; return the loss on this rank and the norm of all gradients."""
        total = torch.zeros((), device=self.here.device)
        for tokens in self.passes:
            # under FSDP the parameters themselves have this dtype
            with torch.autocast(self.here.device.type, torch.bfloat16, enabled=self.mode != "fsdp"):
                logits = self.module(input_ids=tokens, use_cache=False).logits
            labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + L1 * recipe.l1_term(self.model)
            (loss / len(self.passes)).backward()
            total += loss.detach() / len(self.passes)
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def over_ranks(value: float | Tensor, how: Any) -> float:
    """The sum or the largest over ranks, through their hosts, which it waits for."""
    whole = torch.tensor(float(value), dtype=torch.float64, device="cpu")
    dist.all_reduce(whole, how)
    return float(whole)


def measured(row: Row, steps: Steps, rounds: int) -> Row:
    """Settle, then time steps; the row with its figures."""
    here, on_gpu = steps.here, steps.here.device.type == "cuda"
    # "auto" settles in eager steps, and a graph keeps its choice
    with torch.compiler.set_stance("force_eager"):
        for _ in range(SETTLING if row["variant"] == "sparse compiled" else 0):
            steps.step()
            here.wait()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(here.device)
    loss, norm = (over_ranks(each, dist.ReduceOp.SUM) / here.size for each in steps.step())
    for _ in range(SETTLING):
        steps.step()
        here.wait()
    samples, returned = [], []
    for _ in range(rounds):
        over_ranks(0.0, dist.ReduceOp.SUM)
        start = time.perf_counter()
        steps.step()
        host = time.perf_counter()
        here.wait()
        samples.append(over_ranks((time.perf_counter() - start) * 1e3, dist.ReduceOp.MAX))
        returned.append(over_ranks((host - start) * 1e3, dist.ReduceOp.MAX))
    ms, _, p10, p90 = spread(samples)
    row |= {"ms": ms, "p10_ms": p10, "p90_ms": p90, "host_ms": spread(returned).median, "loss": loss, "norm": norm}
    row["tokens_per_ms"] = row["tokens"] / ms
    if on_gpu:
        row["peak_bytes"] = int(over_ranks(float(torch.cuda.max_memory_allocated(here.device)), dist.ReduceOp.MAX))
    return row | {"strategies": dict(Counter(map(strategy_of, steps.layers.values())))}


def compare(rows: Sequence[Row]) -> None:
    """Note speed-ups over the faster dense variant of a mode, and results that differ from dense eager's."""
    right = rows[0]
    for row in rows if right["ms"] is not None else ():
        for name, allowed in ALLOWED.items() if row["ms"] is not None else ():
            ours, theirs = row[name], right[name]
            # also if it is not a number
            if not abs(ours - theirs) <= allowed * abs(theirs):
                row["red"] = f"{name} {ours}, of dense eager {theirs}: more than {100 * allowed:.0f} % apart"
        if row["red"]:
            row |= dict.fromkeys(FIELDS[:6])
    dense = [row["ms"] for row in rows if row["variant"].startswith("dense") and row["ms"] is not None]
    for row in rows:
        row["speedup"] = min(dense) / row["ms"] if dense and row["ms"] is not None else None


def run(arguments: argparse.Namespace, here: World) -> list[Row]:
    """Measure all modes; rank 0 writes the file."""
    shape, micro_batch = arguments.config, arguments.micro_batch
    pattern = Pattern(arguments.nnz or paper_nnz(shape))
    ids = draw_ids(shape, micro_batch * here.size, arguments.sequence, pattern.topic)
    base = build(shape, arguments.sequence, here.device)
    draw(base, ids, pattern)
    for parameter in base.parameters():
        dist.broadcast(parameter.data, 0)
    cast(base, torch.float32)
    base.cpu()
    machine = testing.machine_line(here.device)
    machine = f"{here.size} GPUs: {machine}" if here.device.type == "cuda" else machine
    given = {"config": shape.name, "micro_batch": micro_batch}
    given |= {"sequence": arguments.sequence, "rounds": arguments.rounds}
    rows: list[Row] = []
    kinds = [name for name in VARIANTS if arguments.compile or not name.endswith("compiled")]
    for mode in arguments.modes:
        for variant in kinds:
            row: Row = {"mode": mode, "variant": variant, "ranks": here.size, "tokens": ids.numel(), "red": ""}
            row |= dict.fromkeys(FIELDS)
            # compiled code and its model, and reference cycles
            torch._dynamo.reset()
            gc.collect()
            if here.device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                row = measured(row, Steps(base, mode, variant, here, ids, micro_batch), arguments.rounds)
            except FAILURES as error:
                row["red"] = reason(error)
            rows.append(row)
        compare(rows[-len(kinds) :])
        if here.rank == 0 and arguments.out is not None:
            complete = mode == arguments.modes[-1]
            write_json(arguments.out, rows, machine=machine, arguments=given, complete=complete)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--out", type=Path, metavar="FILE", help="file for the data")
    top.add_argument("--config", type=parse_sizes, default="1B", metavar="SIZE", help="of profiling.bench model (1B)")
    top.add_argument("--nnz", type=float, help="mean non-zeros per token (default: the paper's)")
    top.add_argument("--micro-batch", type=at_least(1), default=8, help="sequences of a rank (%(default)s)")
    top.add_argument("--sequence", type=at_least(2), default=2048, help="tokens of a sequence (%(default)s)")
    top.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    top.add_argument("--rounds", type=at_least(1), default=10, help="timed steps of each variant (%(default)s)")
    top.add_argument("--compile", action=argparse.BooleanOptionalAction, help="also compiled (default on a GPU)")
    top.add_argument("--device", choices=("cuda", "cpu"), help="cpu, whose times mean nothing (default: cuda)")
    arguments = top.parse_args(argv)
    if arguments.compile is None:
        arguments.compile = arguments.device != "cpu"

    def measure() -> int:
        with world(arguments.device) as here:
            rows = run(arguments, here)
            if here.rank == 0:
                show(rows, SHOWN)
            return int(any(row["red"] for row in rows))

    return exit_status("profiling.parallel", measure)


if __name__ == "__main__":
    raise SystemExit(main())
