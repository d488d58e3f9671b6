"""``python -m profiling.bench moe``: a layer of routed experts beside grouped products of PyTorch."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from profiling.bench import report
from profiling.bench.protocol import Device, Gpu
from profiling.bench.report import Column
from twell import float8, testing
from twell._activation import activation_of
from twell.commands import timing
from twell.commands.request import at_least, number_above, number_from, pick_device
from twell.float8 import Float8
from twell.testing.experts import FIRING, Mixture, dense_experts, draw_experts, float64_experts, hidden_of

NAME = "profiling.bench moe"
DESCRIPTION = """\
Time a layer of routed experts at some numbers of sequences that decode, one token each: twell.sparse_experts by
"row", "dense" and "auto", and torch's grouped products. Routes and zeros are drawn, at the share that fires. Each call
of a graph has other tokens and other routes, and the weights exceed L2. A right result is as close to float64 as dense
products are. With e4m3 weights the float64 answer is of what these stand for.
"""


class Shape(NamedTuple):
    """K, N, experts, and experts of a token."""

    k: int
    n: int
    experts: int
    top: int


SHAPES = {
    "nano": Shape(2688, 1856, 128, 6),
    "super": Shape(1024, 2688, 512, 22),
    "ultra": Shape(2048, 5120, 512, 22),
    "tiny": Shape(64, 72, 8, 2),
}
SEQUENCES = (1, 8, 32, 64, 128, 256, 1024)
# Calls of a recording, each with routes of its own.
CALLS = 16


@dataclasses.dataclass
class Row:
    """One variant at one number of sequences.

    us: of a call, by the median of CUDA graphs. over_grouped: the time of grouped products over this one. over_copy:
    that of two or three dense products that read each weight that is touched once, at the rate of a copy, over it.
    floor_us: the time to read what the variant must, at that rate.
    """

    shape: str
    sequences: int
    firing: float
    skew: float
    touched: float
    variant: str
    us: float = math.nan
    over_grouped: float = math.nan
    over_copy: float = math.nan
    floor_us: float = math.nan
    error: float = math.nan
    red: str = ""


COLUMNS = [
    Column("shape", lambda r: r.shape, left=True),
    Column("variant", lambda r: r.variant, left=True),
    Column("sequences", lambda r: str(r.sequences), left=True),
    Column("fires", lambda r: f"{r.firing:.1%}", left=True),
    Column("skew", lambda r: f"{r.skew:g}", left=True),
    Column("experts", lambda r: f"{r.touched:.0f}"),
    Column("us", lambda r: f"{r.us:.1f}"),
    Column("over grouped", lambda r: f"{r.over_grouped:.2f}"),
    Column("over copy", lambda r: f"{r.over_copy:.2f}"),
    Column("of floor", lambda r: f"{r.floor_us / r.us:.0%}"),
    Column("error", lambda r: f"{r.error:.2f}"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["nano"], help="(nano)")
    add("--sequences", type=at_least(1), nargs="+", default=list(SEQUENCES), metavar="N", help=f"{SEQUENCES}")
    add("--firing", type=number_from(0.001, 0.999), nargs="+", default=[FIRING], metavar="SHARE", help=f"({FIRING})")
    add("--skew", type=float, nargs="+", default=[0.0], metavar="S", help="of routes: the r-th expert like r^-S (0)")
    add("--gated", action="store_true", help="experts have a gate")
    add("--activation", choices=["relu", "relu2"], default="relu2", help="(relu2)")
    add("--weights", nargs="+", choices=("bfloat16", "e4m3"), default=["bfloat16"], help="(bfloat16)")
    add("--strategies", nargs="+", choices=("row", "dense", "auto"), default=["row", "dense", "auto"])
    add("--seconds", type=number_above(0), default=1.0, metavar="S", help="of timing for each number of sequences (1)")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if available")
    add("--json", type=Path, metavar="FILE", help="write the rows to a file")


class Layer:
    """A layer of one shape, and draws of its tokens and routes."""

    def __init__(self, arguments: argparse.Namespace, shape: Shape, firing: float, skew: float, device: Any) -> None:
        self.arguments, self.shape, self.skew = arguments, shape, skew
        self.form = activation_of(arguments.activation, 0, arguments.gated)
        self.draw = functools.partial(
            draw_experts, k=shape.k, n=shape.n, experts=shape.experts, top=shape.top, firing=firing, skew=skew,
            gated=arguments.gated, device=device,
        )  # fmt: skip
        self.base = self.draw(1)
        self.products = 3 if arguments.gated else 2
        self.weight_bytes = 2 * shape.k * shape.n

    def problems(self, sequences: int) -> list[Mixture]:
        """Tokens and routes for each call, with the weights of one layer."""
        found = []
        for seed in range(CALLS):
            small = draw_experts(
                sequences, self.shape.k, 8, self.shape.experts, self.shape.top, skew=self.skew, seed=seed + 1,
                device=self.base.x.device,
            )  # fmt: skip
            found.append(self.base._replace(x=small.x, expert_ids=small.expert_ids, weights=small.weights))
        return found

    @functools.cached_property
    def quantised(self) -> dict[str, Float8]:
        """The weights in e4m3, down weights by rows."""
        given = {name: getattr(self.base, name) for name in ("w_up", "w_down", "w_gate")}
        made = {name: twell.quantize(weight) for name, weight in given.items() if weight is not None}
        down = made["w_down"]
        made["w_down"] = Float8(down.values.transpose(1, 2).contiguous().transpose(1, 2), down.scale)
        return made

    def bar(self, problem: Mixture, weights: str) -> tuple[Tensor, Any]:
        """y of a problem in float64, and the errors of dense products of such weights."""
        name = self.arguments.activation
        if weights == "bfloat16":
            right = float64_experts(problem, name)
            return right, testing.errors(dense_experts(problem, name), right)
        wide = {name: record.dequantize(torch.float32) for name, record in self.quantised.items()}
        x = float8.quantize_tokens(problem.x).dequantize(torch.float32)
        right = float64_experts(problem._replace(x=x, **wide), name)
        given: Any = problem._replace(**self.quantised)  # type: ignore[arg-type]
        dense = twell.sparse_experts(**given._asdict(), activation=name, strategy="dense")
        return right, testing.errors(dense, right)

    def grouped(self, problem: Mixture) -> Callable[[], Tensor]:
        """The products and the activation alone, on tokens that are in the order of the experts."""
        owners = problem.expert_ids.flatten()
        order = owners.argsort(stable=True)
        rows = problem.x[order // problem.expert_ids.shape[1]].contiguous()
        ends = torch.bincount(owners, minlength=self.shape.experts).cumsum(0).int()
        down = problem.w_down.transpose(1, 2)
        product: Any = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))

        def run() -> Tensor:
            gate = self.form.after(product(rows, problem.first.transpose(1, 2), offs=ends), inplace=True)
            up = None if problem.w_gate is None else product(rows, problem.w_up.transpose(1, 2), offs=ends)
            y: Tensor = product(self.form.hidden(gate, up), down, offs=ends)
            return y

        return run

    def touched(self, problem: Mixture) -> int:
        return len(problem.expert_ids.unique())

    def fired_bytes(self, problem: Mixture) -> float:
        """Bytes of the rows behind the gate of neurons that any token fires."""
        rows = sum(int(hidden_of(problem, e)[1].any(0).sum()) for e in problem.expert_ids.unique().tolist())
        return rows * 2.0 * self.shape.k * (self.products - 1)


def run(arguments: argparse.Namespace) -> int:
    """Measure as asked; the exit status."""
    on = pick_device(arguments.device)
    device = Gpu(on) if on.type == "cuda" else Device()
    rows: list[Row] = []
    ceilings, machine = device.ceilings(torch.bfloat16, 0.0)
    for name in arguments.shapes:
        for firing in arguments.firing:
            for skew in arguments.skew:
                layer = Layer(arguments, SHAPES[name], firing, skew, on)
                for sequences in arguments.sequences:
                    rows += measured(arguments, layer, name, firing, sequences, device, ceilings.memory)
    report.print_table(COLUMNS, rows)
    print(machine)
    if arguments.json:
        report.write_json(arguments.json, rows, machine=machine, arguments=arguments, copy_tbs=ceilings.memory / 1e12)
    return 1 if any(row.red for row in rows) else 0


def measured(
    arguments: argparse.Namespace, layer: Layer, shape: str, firing: float, sequences: int, device: Any, rate: float
) -> list[Row]:
    """The rows of one number of sequences."""
    problems = layer.problems(sequences)
    touched = sum(map(layer.touched, problems)) / len(problems)
    once = touched * layer.weight_bytes
    floors = {"dense": once * layer.products, "row": once + sum(map(layer.fired_bytes, problems)) / len(problems)}
    make = functools.partial(Row, shape, sequences, firing, layer.skew, touched)
    found, recordings = [], {}
    if device.torch_device.type == "cuda":
        calls = [layer.grouped(problem) for problem in problems]
        recordings["grouped"] = device.record(lambda i: (calls[i](),), len(problems))
    rows: dict[str, Row] = {"grouped": make("grouped products")}
    for weights, strategy in itertools.product(arguments.weights, arguments.strategies):
        e4m3 = weights == "e4m3"
        if strategy == arguments.strategies[0]:
            right, dense = layer.bar(problems[-1], weights)
        given: list[Any] = [problem._replace(**layer.quantised) for problem in problems] if e4m3 else problems  # type: ignore[arg-type]
        key = f'{"e4m3 " * e4m3}"{strategy}"'
        row = rows[key] = make(key)
        options: Any = {"activation": arguments.activation, "strategy": strategy}
        try:
            recording = device.record(
                lambda i: (twell.sparse_experts(**given[i]._asdict(), **options),),  # noqa: B023
                len(problems),
            )
            recording.spoil()
            recording.replay()
            recording.wait()
            ours = testing.errors(recording.outputs[0], right)
            row.error = ours.frobenius / dense.frobenius if dense.frobenius else 0.0
            if not ours.within(dense, 1.1, 1.1 * testing.allowance(sequences)):
                row.red = f"error {ours}, dense {dense}"
                continue
            recordings[key] = recording
        except timing.FAILURES as error:
            row.red = timing.reason(error)
    with torch.inference_mode():
        times = timing.measure(recordings, arguments.seconds)
    for name, row in rows.items():
        if name in times:
            row.us = timing.spread(times[name]).median * 1e3
    for name, row in rows.items():
        if name not in recordings and not row.red:
            continue
        bytes_read = floors["dense" if "dense" in name or name == "grouped" else "row"]
        row.floor_us = bytes_read / (2 if "e4m3" in name else 1) / rate * 1e6
        row.over_copy = floors["dense"] / rate * 1e6 / row.us
        row.over_grouped = rows["grouped"].us / row.us
        found.append(row)
    return found
