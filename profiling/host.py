"""Time what a call of a layer costs the host, beside three nn.Linear with ReLU and product.

    python -m profiling.host --out profiling/results/h100_host.json    # on a GPU, 40 seconds

host: microseconds of one call by ``time.perf_counter``, with nothing to wait for inside: a run is a few calls on an
idle GPU, so that its queue never fills; the median of interleaved runs. "forward" needs no gradient; "step" is forward,
backward and the gradients set to None again, of the tokens and of all weights; "step alone" is the same with the
backward pass in the calling thread (``torch.autograd.set_multithreading_enabled(False)``). waited: milliseconds from a
call until the GPU is done, and at many tokens of a replay of its CUDA graph. Workload topic29, bfloat16, down weights
by rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiling.bench.report import write_json
from twell import testing
from twell.nn import SparseFFN, SparseGatedMLP, SparseMLP, explain, set_down_layout

FEW, MANY = (16, 2048), 16384
STRATEGIES = ("auto", "row", "union", "dense")
WORKLOAD = "topic29"
# Calls of a run: the longest step has two dozen launches, and the queue takes a thousand.
CALLS = 20


@dataclasses.dataclass
class Row:
    """One layer at ``m`` tokens; None where it was not measured. ``chosen``: what "auto" ran."""

    what: str
    layer: str
    m: int
    chosen: str = ""
    host_us: float | None = None
    waited_ms: float | None = None
    replay_ms: float | None = None


class Dense(nn.Module):
    """The layer as models write it, with a gate or without."""

    def __init__(self, like: SparseFFN) -> None:
        super().__init__()
        self.gate_proj = copied(like.gate_proj) if isinstance(like, SparseGatedMLP) else None
        self.up_proj, self.down_proj = copied(like.up_proj), copied(like.down_proj)

    def forward(self, x: Tensor) -> Any:
        if self.gate_proj is None:
            return self.down_proj(F.relu(self.up_proj(x)))
        return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))


def copied(linear: nn.Linear) -> nn.Linear:
    """The same with a contiguous weight."""
    copy = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    copy.weight = nn.Parameter(linear.weight.detach().clone(memory_format=torch.contiguous_format))
    return copy


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the data")
    parser.add_argument("--runs", type=int, default=25, help="runs of each variant (25)")
    arguments = parser.parse_args(argv)
    rows: list[Row] = []
    for what in ("forward", "step", "step alone"):
        for m in (*FEW, MANY):
            rows += measured(what, m, arguments.runs)
    for row in rows:
        times = (f"{name} {value:.4g}" for name, value in dataclasses.asdict(row).items() if isinstance(value, float))
        print(f"{row.what:10} {row.m:6} {row.layer:6} {row.chosen:6} {'  '.join(times)}", flush=True)
    write_json(arguments.out, rows, machine=testing.machine_line(), arguments={"runs": arguments.runs})
    return 0


def measured(what: str, m: int, runs: int) -> list[Row]:
    """The rows of all layers: the host's times of few tokens, those of replays of many."""
    problem = testing.make(WORKLOAD, m)
    layers: dict[str, nn.Module] = {"dense": Dense(sparse(problem, "dense"))}
    # one strategy in training is both
    layers |= {f"twell {name}": sparse(problem, name) for name in STRATEGIES if what == "forward" or name != "row"}
    calls = {name: call_of(what, layer, problem.x) for name, layer in layers.items()}
    for call in calls.values():
        # past the first measurements of "auto", which take each 64th call from there on
        for _ in range(70):
            call()
            torch.cuda.synchronize()
    rows = [Row(what, name, m, chosen(layers[name], what)) for name in calls]
    if m in FEW:
        taken = interleaved([partial(per_call, call, count) for count in (CALLS, 1) for call in calls.values()], runs)
        for row, host, waited in zip(rows, taken, taken[len(rows) :]):
            row.host_us, row.waited_ms = host * 1e6, waited * 1e3
        return rows
    for row, call in zip(rows, calls.values()):
        graph, _ = testing.captured(call)
        waited, replay = interleaved([partial(per_call, call, 1), partial(per_call, graph.replay, 1)], 2 * runs)
        row.waited_ms, row.replay_ms = waited * 1e3, replay * 1e3
    return rows


def sparse(problem: testing.FFN, strategy: Any, gated: bool = True) -> SparseFFN:
    """The layer as a module of this package, down weight by rows."""
    n, k = problem.w_gate.shape
    kind = SparseGatedMLP if gated else SparseMLP
    layer = kind(k, n, strategy=strategy, device=problem.x.device, dtype=problem.x.dtype)
    set_down_layout(layer, "rows")
    first = layer.gate_proj if isinstance(layer, SparseGatedMLP) else layer.up_proj
    with torch.no_grad():
        layer.up_proj.weight.copy_(problem.w_up)
        first.weight.copy_(problem.w_gate)
        layer.down_proj.weight.copy_(problem.w_down.t())
    return layer


def call_of(what: str, layer: nn.Module, x: Tensor) -> Callable[[], Any]:
    """A call of ``layer`` without gradients, or a training step, with or without autograd's own thread."""
    if what == "forward":
        layer.requires_grad_(False)
        return lambda: layer(x)
    leaf, dy, parameters = x.detach().clone().requires_grad_(), torch.randn_like(x), list(layer.parameters())

    def step() -> None:
        with torch.autograd.set_multithreading_enabled(what == "step"):
            layer(leaf).backward(dy)
        leaf.grad = None
        for parameter in parameters:
            parameter.grad = None

    return step


def chosen(layer: nn.Module, what: str) -> str:
    """What "auto" runs now; "" for other layers."""
    if not isinstance(layer, SparseFFN) or layer.strategy != "auto":
        return ""
    return explain(layer).rows[0].strategy


def per_call(call: Callable[[], Any], calls: int) -> float:
    """Seconds per call of a run: of the host alone, or until the GPU is done if there is one call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if calls == 1:
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    return taken / calls


def interleaved(variants: Sequence[Callable[[], float]], runs: int) -> list[float]:
    """The median of each variant's runs, taken in turn."""
    taken = [[variant() for variant in variants] for _ in range(runs)]
    return [statistics.median(of_one) for of_one in zip(*taken)]


if __name__ == "__main__":
    raise SystemExit(main())
