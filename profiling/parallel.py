"""Time training steps on several GPUs by DDP, FSDP2 and tensor parallelism: dense and sparse, speed and memory.

    python -m torch.distributed.run --nproc-per-node 2 -m profiling.parallel --out profiling/results/parallel.json

The model is one of those of ``profiling.bench model --config``, random weights with the sparsity of trained ones, the
same on all ranks; in mode "alone" no rank waits for another.
A step is forward, cross-entropy and L1, backward, clipping and AdamW of rate 0, which keeps the sparsity, in bfloat16
over fp32 weights. Each rank has --micro-batch sequences of its own; with tensor parallelism all ranks have the same, as
many as all ranks together have in the other modes.

Variants: dense and sparse, eager and with each decoder layer through torch.compile, which keeps what "auto" chose in
the eager steps before. Times are medians over steps of the slowest rank. Host time lasts until the step's last call
returned: as long as the step where GPUs wait for the hosts. Memory is the peak of torch's allocator on the rank with
most, weights and optimizer included. Loss and gradient norm of the first step must be those of dense eager, up to 1 and
5 percent, else a row is red. The file is written after each mode. Exit status: 1 if a row is red.
"""

import argparse
import contextlib
import copy
import dataclasses
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from profiling import ranks
from profiling.bench.models_random import Pattern, build, cast, draw, draw_ids, paper_nnz, parse_sizes
from profiling.harness import SETTLING, write_json
from twell import _sparsify, recipe, testing
from twell.commands.request import RequestError, at_least, exit_status
from twell.commands.timing import FAILURES, reason, spread
from twell.recipe._tracker import strategy_of

MODES = ("alone", "ddp", "fsdp", "tp")
VARIANTS = ("dense eager", "sparse eager", "dense compiled", "sparse compiled")
L1 = 2e-5
# What loss and gradient norm may differ from those of dense eager, as a share.
LOSS, NORM = 0.01, 0.05


@dataclasses.dataclass
class Row:
    """One variant in one mode. ``tokens``: of a step on all ranks together. None where unknown."""

    mode: str
    variant: str
    ranks: int
    tokens: int
    red: str = ""
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    # until the step's last call returned
    host_ms: float | None = None
    tokens_per_ms: float | None = None
    # over the faster of the dense variants in the same mode
    speedup: float | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    norm: float | None = None
    strategies: dict[str, int] = dataclasses.field(default_factory=dict)


class Steps:
    """A model distributed over ranks, and its training steps."""

    def __init__(self, base: nn.Module, variant: str, here: ranks.World, ids: Tensor, micro_batch: int) -> None:
        self.here, self.micro_batch = here, micro_batch
        self.model: Any = copy.deepcopy(base).to(here.device)
        self.model.train()
        recipe.record_aux(self.model)
        self.layers = _sparsify.layers(self.model)
        # "auto" is dense on a CPU
        sparse: Any = "auto" if here.device.type == "cuda" else "union"
        for layer in self.layers.values():
            layer.strategy = sparse if variant.startswith("sparse") else "dense"
        compiled = variant.endswith("compiled")
        if compiled and here.mode != "tp":
            self.compile()
        self.module = ranks.spread(self.model, here, torch.bfloat16)
        if compiled and here.mode == "tp":
            self.compile()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=here.device.type == "cuda")
        count = micro_batch * here.size
        own = slice(None) if here.mode == "tp" else slice(here.rank * micro_batch, (here.rank + 1) * micro_batch)
        self.tokens = ids[:count][own].to(here.device)
        self.passes = torch.split(self.tokens, micro_batch)

    def compile(self) -> None:
        """Let torch.compile compile each decoder layer."""
        torch._dynamo.config.recompile_limit = 64
        for layer in self.model.get_decoder().layers:
            layer.compile(dynamic=False)

    def step(self) -> tuple[Tensor, Tensor]:
        """Take one step; return the loss on this rank and the norm of all gradients."""
        total = torch.zeros((), device=self.here.device)
        for i, tokens in enumerate(self.passes):
            ranks.reduce_gradients(self.module, self.here, now=i == len(self.passes) - 1)
            # under FSDP the parameters themselves have this dtype
            cast = contextlib.nullcontext() if self.here.mode == "fsdp" else self.autocast()
            with cast:
                logits = self.module(input_ids=tokens, use_cache=False).logits
            labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + L1 * recipe.l1_term(self.model)
            (loss / len(self.passes)).backward()
            total += loss.detach() / len(self.passes)
        norm = ranks.clip(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.here.device.type, torch.bfloat16)


def mean(value: Tensor) -> float:
    """The mean over ranks."""
    whole = value.detach().float().clone()
    dist.all_reduce(whole)
    return float(whole) / dist.get_world_size()


def most(value: float) -> float:
    """The largest over ranks."""
    whole = torch.tensor(value, dtype=torch.float64, device="cpu")
    dist.all_reduce(whole, dist.ReduceOp.MAX)
    return float(whole)


def wait(here: ranks.World) -> None:
    if here.device.type == "cuda":
        torch.cuda.synchronize(here.device)


def measured(make: Callable[[], Steps], row: Row, here: ranks.World, rounds: int) -> None:
    """Settle, then time steps, and put the figures into the row."""
    on_gpu = here.device.type == "cuda"
    # compiled code and its model, and reference cycles
    torch._dynamo.reset()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    steps = make()
    # "auto" settles in eager steps, and a graph keeps its choice
    with torch.compiler.set_stance("force_eager"):
        for _ in range(SETTLING if row.variant == "sparse compiled" else 0):
            steps.step()
            wait(here)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(here.device)
    loss, norm = steps.step()
    row.loss, row.norm = mean(loss), mean(norm)
    for _ in range(SETTLING):
        steps.step()
        wait(here)
    samples, returned = [], []
    for _ in range(rounds):
        here.barrier()
        start = time.perf_counter()
        steps.step()
        host = time.perf_counter()
        wait(here)
        samples.append(most((time.perf_counter() - start) * 1e3))
        returned.append(most((host - start) * 1e3))
    found = spread(samples)
    row.host_ms = spread(returned).median
    row.ms, row.p10_ms, row.p90_ms = found.median, found.p10, found.p90
    row.tokens_per_ms = row.tokens / found.median
    row.peak_bytes = int(most(torch.cuda.max_memory_allocated(here.device))) if on_gpu else None
    row.strategies = dict(Counter(map(strategy_of, steps.layers.values())))


def compare(rows: Sequence[Row]) -> None:
    """Note speed-ups over the faster dense variant of a mode, and results that differ from dense eager's."""
    right = rows[0]
    for row in rows:
        if row.red or row.ms is None or right.loss is None or right.norm is None:
            continue
        for name, ours, theirs, allowed in (("loss", row.loss, right.loss, LOSS), ("norm", row.norm, right.norm, NORM)):
            # also if it is not a number
            if ours is None or not abs(ours - theirs) <= allowed * abs(theirs):
                row.red = f"{name} {ours}, of dense eager {theirs}: more than {100 * allowed:.0f} % apart"
        if row.red:
            row.ms = row.p10_ms = row.p90_ms = row.host_ms = row.tokens_per_ms = None
    dense = [row.ms for row in rows if row.variant.startswith("dense") and row.ms is not None]
    for row in rows:
        if dense and row.ms is not None:
            row.speedup = min(dense) / row.ms


def drawn(arguments: argparse.Namespace, here: ranks.World) -> tuple[nn.Module, Tensor]:
    """The model, in fp32 on the CPU, and its tokens; the same on all ranks."""
    shape = arguments.config
    pattern = Pattern(arguments.nnz or paper_nnz(shape))
    ids = draw_ids(shape, arguments.micro_batch * here.size, arguments.sequence, pattern.topic)
    model = build(shape, arguments.sequence, here.device)
    draw(model, ids, pattern)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    cast(model, torch.float32)
    return model.cpu(), ids


def run(arguments: argparse.Namespace, here: ranks.World, machine: str) -> list[Row]:
    """Measure all modes; rank 0 writes the file."""
    base, ids = drawn(arguments, here)
    rows: list[Row] = []
    kinds = [name for name in VARIANTS if arguments.compile or not name.endswith("compiled")]
    for mode in arguments.modes:
        own = dataclasses.replace(here, mode="" if mode == "alone" else mode)
        found = [Row(mode, variant, here.size, ids.numel()) for variant in kinds]
        for row in found:
            try:
                make = partial(Steps, base, row.variant, own, ids, arguments.micro_batch)
                measured(make, row, here, arguments.rounds)
            except FAILURES as error:
                row.red = reason(error)
            here.say(line(row))
        compare(found)
        rows += found
        if here.first and arguments.out is not None:
            given = {"config": arguments.config.name, "micro_batch": arguments.micro_batch}
            given |= {"sequence": arguments.sequence, "rounds": arguments.rounds}
            complete = mode == arguments.modes[-1]
            write_json(
                arguments.out,
                [dataclasses.asdict(row) for row in rows],
                machine=machine,
                arguments=given,
                complete=complete,
            )
    return rows


def line(row: Row) -> str:
    """A row as a line of text."""
    if row.red or row.ms is None:
        return f"{row.mode:6} {row.variant:15} RED {row.red}"
    peak = "" if row.peak_bytes is None else f"  peak {row.peak_bytes / 1e9:.1f} GB"
    ran = ", ".join(f"{count} {name}" for name, count in sorted(row.strategies.items()))
    return f"{row.mode:6} {row.variant:15} {row.ms:9.2f} ms  {row.tokens_per_ms:8.2f} tokens/ms{peak}  {ran}"


def parser() -> argparse.ArgumentParser:
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
    return top


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.compile is None:
        arguments.compile = arguments.device != "cpu"

    def measure() -> int:
        if int(os.environ.get("WORLD_SIZE", 1)) < 2:
            raise RequestError(
                "expected several processes (python -m torch.distributed.run --nproc-per-node 2 ...), got one"
            )
        with ranks.world(arguments.device) as here:
            machine = testing.machine_line(here.device)
            rows = run(arguments, here, f"{here.size} GPUs: {machine}" if here.device.type == "cuda" else machine)
            return int(any(row.red for row in rows))

    return exit_status("profiling.parallel", measure)


if __name__ == "__main__":
    raise SystemExit(main())
