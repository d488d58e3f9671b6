"""``python -m profiling.bench parallel``: training steps on several GPUs by DDP, FSDP2 and tensor parallelism.

Time training steps of a model of `profiling.bench model --config`, with random weights and the sparsity of trained
ones, the same on all ranks, in processes of torchrun:

    python -m torch.distributed.run --nproc-per-node 2 -m profiling.bench parallel --out FILE

A step is forward, cross-entropy and L1, backward, clipping and AdamW of rate 0, which keeps the sparsity, in bfloat16
over fp32 weights. Each rank has --micro-batch sequences of its own; with tensor parallelism all ranks have the same, as
many as all ranks together have in the other modes.

Variants: dense and sparse, eager and with each decoder layer through torch.compile, which keeps what "auto" chose in
the eager steps before. Times are medians over steps of the slowest rank. Host time lasts until the step's last call
returned: as long as the step where GPUs wait for the hosts. Memory is the peak of torch's allocator on the rank with
most, weights and optimizer included. Loss and gradient norm of the first step must be those of dense eager, up to 1 and
5 percent, else a row is red.
"""

import copy
import functools
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from profiling.bench import models_random as drawn
from profiling.harness import SETTLING, Bench, Case, Row
from twell import recipe
from twell.commands.request import RequestError, at_least, number_above
from twell.commands.timing import FAILURES, reason, spread
from twell.integrations import sparsify
from twell.nn.distributed import tensor_parallel_plan
from twell.nn.models import set_down_layout
from twell.recipe._tracker import strategy_of

MODES = ("ddp", "fsdp", "tp")
VARIANTS = ("dense eager", "sparse eager", "dense compiled", "sparse compiled")
# What loss and gradient norm may differ from those of dense eager, as a share.
ALLOWED = {"loss": 0.01, "norm": 0.05}
FIELDS = ("ms", "p10_ms", "p90_ms", "host_ms", "tokens_per_ms", "speedup", "peak_bytes", "loss", "norm")
SHOWN = ("mode", "variant", "ms", "host_ms", "tokens_per_ms", "speedup", "peak_bytes", "strategies")
OPTIONS = {
    "--config": (drawn.parse_sizes, "1B", "size of the model"),
    "--nnz": (number_above(0), None, "mean non-zeros per token (the paper's)"),
    "--micro-batch": (at_least(1), 8, "sequences of a rank"),
    "--sequence": (at_least(2), 2048, "tokens of a sequence"),
    "--modes": (MODES, list(MODES), "of distribution"),
    "--rounds": (at_least(1), 10, "timed steps of each variant"),
    "--compile": (("inductor", "none"), None, "also compiled (inductor; none on a CPU)"),
}
SECONDS = 1.0


def distributed(model: Any, device: torch.device, mode: str) -> Any:
    """Distribute the parameters of ``model`` by the mode; return the module to call instead of it."""
    if mode != "fsdp":
        # the kernels read this layout in place; FSDP needs contiguous parameters
        set_down_layout(model, "rows")
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if mode == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    return parallelize_module(model, mesh, tensor_parallel_plan(model))


class Steps:
    def __init__(self, base: nn.Module, mode: str, variant: str, device: torch.device, ids: Tensor) -> None:
        self.mode, self.device = mode, device
        self.model: Any = copy.deepcopy(base).to(device)
        self.model.train()
        recipe.record_aux(self.model)
        self.layers = sparsify.layers(self.model)
        # "auto" is dense on a CPU
        sparse: Any = "auto" if device.type == "cuda" else "union"
        for layer in self.layers.values():
            layer.strategy = sparse if variant.startswith("sparse") else "dense"
        compiled = variant.endswith("compiled")
        if compiled and mode != "tp":
            drawn.compile_layers(self.model)
        self.module = distributed(self.model, device, mode)
        if compiled and mode == "tp":
            drawn.compile_layers(self.model)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=device.type == "cuda")
        passes = ids.to(device).chunk(dist.get_world_size())
        self.passes = passes if mode == "tp" else passes[dist.get_rank() :][:1]

    def step(self) -> tuple[Tensor, Tensor]:
        """Take one step; return the loss on this rank and the norm of all gradients."""
        total = torch.zeros((), device=self.device)
        for tokens in self.passes:
            # under FSDP the parameters themselves have this dtype
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mode != "fsdp"):
                logits = self.module(input_ids=tokens, use_cache=False).logits
            loss = drawn.loss_of(self.model, logits, tokens)
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


def measured(row: Row, steps: Steps, rounds: int, wait: Any) -> Row:
    """Settle, then time steps; the row with its figures."""
    on_gpu = steps.device.type == "cuda"
    # "auto" settles in eager steps, and a graph keeps its choice
    with torch.compiler.set_stance("force_eager"):
        for _ in range(SETTLING if row["variant"] == "sparse compiled" else 0):
            steps.step()
            wait()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(steps.device)
    loss, norm = (over_ranks(each, dist.ReduceOp.SUM) / row["ranks"] for each in steps.step())
    for _ in range(SETTLING):
        steps.step()
        wait()
    samples, returned = [], []
    for _ in range(rounds):
        over_ranks(0.0, dist.ReduceOp.SUM)
        start = time.perf_counter()
        steps.step()
        host = time.perf_counter()
        wait()
        samples.append(over_ranks((time.perf_counter() - start) * 1e3, dist.ReduceOp.MAX))
        returned.append(over_ranks((host - start) * 1e3, dist.ReduceOp.MAX))
    ms, _, p10, p90 = spread(samples)
    row |= {"ms": ms, "p10_ms": p10, "p90_ms": p90, "host_ms": spread(returned).median, "loss": loss, "norm": norm}
    row["tokens_per_ms"] = row["tokens"] / ms
    if on_gpu:
        row["peak_bytes"] = int(over_ranks(float(torch.cuda.max_memory_allocated(steps.device)), dist.ReduceOp.MAX))
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


def cases(bench: Bench) -> Iterator[Case]:
    given, device = bench.arguments, bench.device.torch_device
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        said = "python -m torch.distributed.run --nproc-per-node 2 ..."
        raise RequestError(f"expected several processes ({said}), got one")
    # gloo is for messages between hosts
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    ranks, compiled = dist.get_world_size(), given.compile or ("inductor" if device.type == "cuda" else "none")
    bench.given |= {"config": given.config.name, "compile": compiled}
    bench.machine = f"{ranks} GPUs: {bench.machine}" if device.type == "cuda" else bench.machine
    pattern = drawn.Pattern(given.nnz or drawn.paper_nnz(given.config))
    ids = drawn.draw_ids(given.config, given.micro_batch * ranks, given.sequence, pattern.topic)
    base = drawn.build(given.config, given.sequence, device)
    drawn.draw(base, ids, pattern)
    for parameter in base.parameters():
        dist.broadcast(parameter.data, 0)
    drawn.cast(base, torch.float32).cpu()

    @torch.enable_grad()
    def rows_of(mode: str) -> list[Row]:
        rows: list[Row] = []
        for variant in (name for name in VARIANTS if compiled != "none" or name.endswith("eager")):
            row: Row = {"mode": mode, "variant": variant, "ranks": ranks, "tokens": ids.numel(), "red": ""}
            row |= dict.fromkeys(FIELDS)
            torch._dynamo.reset()
            bench.device.free()
            try:
                row = measured(row, Steps(base, mode, variant, device, ids), given.rounds, bench.device.wait)
            except FAILURES as error:
                row["red"] = reason(error)
            rows.append(row)
        compare(rows)
        return rows

    for mode in given.modes:
        yield {"mode": mode}, functools.partial(lambda mode: [rows_of(mode)], mode)
    # not after an error: other ranks may wait in a collective for it
    dist.destroy_process_group()
