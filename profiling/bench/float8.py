"""``python -m profiling.bench float8``: a layer of e4m3 weights beside dense fp8 products of PyTorch."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import twell
from profiling.bench import report
from profiling.bench.protocol import Cpu, Gpu
from profiling.bench.report import Column
from twell import float8, testing
from twell.commands import timing
from twell.commands.request import at_least, number_above, pick_device
from twell.float8 import Float8
from twell.ops.ffn_float8 import hidden_in_float8, product, tokens_in_float8
from twell.testing import workloads

NAME = "profiling.bench float8"
DESCRIPTION = """\
Time a gated layer of e4m3 weights with a scale per row: twell.sparse_gated_ffn by "row", "union" and "auto", the same
layer in bfloat16 by "auto", and dense fp8: torch._scaled_mm with twell's fused passes that quantise, gate and up in one
product or in two, whichever is faster. All quantise x within the call. Several copies of the weights are read in turn
where the gates of one fit in L2. A right result is as close to the formula in float64 as dense fp8 is.
"""
# bytes of gates that calls go through before they read the same again
_BEYOND_L2 = 200 << 20


@dataclasses.dataclass
class Row:
    """One variant. us: of a call, by the median of CUDA graphs. over_dense: the time of dense fp8 over this one.

    error: relative to the formula in float64.
    """

    workload: str
    m: int
    k: int
    n: int
    nonzeros: float
    variant: str
    us: float = math.nan
    over_dense: float = math.nan
    error: float = math.nan
    red: str = ""


COLUMNS = [
    Column("workload", lambda r: r.workload, left=True),
    Column("variant", lambda r: r.variant, left=True),
    Column("tokens", lambda r: str(r.m), left=True),
    Column("K", lambda r: str(r.k)),
    Column("N", lambda r: str(r.n)),
    Column("non-zeros", lambda r: f"{r.nonzeros:.0f}"),
    Column("us", lambda r: f"{r.us:.1f}"),
    Column("over dense fp8", lambda r: f"{r.over_dense:.2f}"),
    Column("error", lambda r: f"{r.error:.4f}"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("--workload", nargs="+", default=["topic29"], metavar="NAME", help="drawn, or realN with --real-layers")
    add("--real-layers", type=Path, metavar="FOLDER", help="recorded layers, layerN.npz")
    add("--m", type=at_least(1), nargs="+", default=[16384], help="tokens (16384)")
    add("--k", type=at_least(16), default=2048, help="hidden size of drawn layers (2048)")
    add("--n", type=at_least(16), default=5632, help="neurons of drawn layers (5632)")
    add("--seconds", type=number_above(0), default=1.0, metavar="S", help="of timing for each layer (1)")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if available")
    add("--json", type=Path, metavar="FILE", help="write the rows to a file")


class Weights:
    """A layer in e4m3, as sparse calls and as dense products read it."""

    def __init__(self, problem: testing.FFN) -> None:
        self.problem = problem
        self.gate, self.up, down = map(twell.quantize, (problem.w_gate, problem.w_up, problem.w_down.t()))
        self.down = Float8(down.values.t().contiguous().t(), down.scale)
        self.stored = down.values
        both = torch.cat((self.gate.values.view(torch.uint8), self.up.values.view(torch.uint8)))
        self.both = both.view(float8.E4M3), torch.cat((self.gate.scale, self.up.scale))

    def dense(self, x: Tensor, merged: bool) -> Tensor:
        """y by products of ``torch._scaled_mm`` and fused passes."""
        tokens = tokens_in_float8(x)
        if merged:
            gate, up = product(*tokens, *self.both).chunk(2, 1)
        else:
            gate, up = (product(*tokens, w.values, w.scale) for w in (self.gate, self.up))
        return product(*hidden_in_float8(gate, up), self.stored, self.down.scale)

    def sparse(self, x: Tensor, strategy: Any) -> Tensor:
        y: Tensor = twell.sparse_gated_ffn(x, self.gate, self.up, self.down, strategy=strategy)
        return y

    def wide(self, x: Tensor, strategy: Any) -> Tensor:
        p = self.problem
        y: Tensor = twell.sparse_gated_ffn(x, p.w_gate, p.w_up, p.w_down.t(), strategy=strategy)
        return y


def copies(first: Weights) -> list[Weights]:
    """Layers whose gates together exceed L2: the first one, and others with their neurons in another order."""
    size = first.gate.values.numel()
    found = [first]
    for i in range(1, max(1, min(8, _BEYOND_L2 // size))):
        p = first.problem
        found.append(Weights(p._replace(**{w: getattr(p, w).roll(37 * i, 0) for w in ("w_gate", "w_up", "w_down")})))
    return found


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    """Measure as asked; the exit status."""
    on = pick_device(arguments.device)
    device = Gpu(on) if on.type == "cuda" else Cpu()
    rows: list[Row] = []
    _, machine = device.ceilings(torch.bfloat16, 0.0)
    for name in arguments.workload:
        for m in arguments.m:
            sizes = {"k": arguments.k, "n": arguments.n}
            problem = workloads.load(name, m=m, real_layers=arguments.real_layers, device=on, **sizes)
            rows += measured(name, problem, device, arguments.seconds)
    report.print_table(COLUMNS, rows)
    print(machine)
    if arguments.json:
        report.write_json(arguments.json, rows, machine=machine, arguments=arguments)
    return 1 if any(row.red for row in rows) else 0


def measured(name: str, problem: testing.FFN, device: Any, seconds: float) -> list[Row]:
    """The rows of one layer."""
    x, layers = problem.x, copies(Weights(problem))
    some, first = slice(0, min(len(x), 1024)), layers[0]
    tokens = float8.quantize_tokens(x[some])
    right = float8.formula(tokens, first.gate, first.up, first.down)
    bar = testing.errors(first.dense(x, False)[some], right)
    nonzeros = float((float8.gate_of(tokens, first.gate, None) > 0).sum()) / len(tokens.values)
    n, k = problem.w_gate.shape
    make = functools.partial(Row, name, len(x), k, n, nonzeros)
    sites = [[twell.AutoStrategy() for _ in layers] for _ in range(2)]
    calls: dict[str, Callable[[int], Tensor]] = {
        "dense fp8, one product": lambda i: layers[i].dense(x, True),
        "dense fp8, two products": lambda i: layers[i].dense(x, False),
        '"row"': lambda i: layers[i].sparse(x, "row"),
        '"union"': lambda i: layers[i].sparse(x, "union"),
        '"auto"': lambda i: layers[i].sparse(x, sites[0][i]),
        'bfloat16 "auto"': lambda i: layers[i].wide(x, sites[1][i]),
        'bfloat16 "row"': lambda i: layers[i].wide(x, "row"),
    }
    rows, recordings = {}, {}
    for variant, call in calls.items():
        row = rows[variant] = make(variant)
        try:
            for _ in range(4):
                for i in range(len(layers)):
                    call(i)
            recording = device.record(lambda i: (call(i),), len(layers))  # noqa: B023
            recording.spoil()
            recording.replay()
            recording.wait()
            if variant.startswith("bfloat16"):
                recordings[variant] = recording
                continue
            ours = testing.errors(call(0)[some], right)
            row.error = ours.frobenius
            if ours.within(bar, 1.1, 1.1 * testing.allowance(len(x) / 16)) and recording.outputs[0].isfinite().all():
                recordings[variant] = recording
            else:
                row.red = f"error {ours}, dense fp8 {bar}"
        except timing.FAILURES as error:
            row.red = timing.reason(error)
    times = timing.measure(recordings, seconds)
    for variant, row in rows.items():
        if variant in times:
            row.us = timing.spread(times[variant]).median * 1e3
    best = min(
        (row.us for variant, row in rows.items() if variant.startswith("dense") and row.us == row.us), default=math.nan
    )
    for row in rows.values():
        row.over_dense = best / row.us
    return list(rows.values())
