"""``python -m profiling.bench float8``: a layer of e4m3 weights beside dense fp8 products of PyTorch."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import twell
from profiling.bench import report
from profiling.bench.layers import SETTLING
from profiling.bench.protocol import Device, Gpu
from profiling.bench.report import Column, Progress
from twell import float8, testing
from twell.commands import timing, tune
from twell.commands.request import at_least, number_above, pick_device
from twell.float8 import Float8
from twell.ops.ffn_float8 import hidden_in_float8, product, tokens_in_float8
from twell.testing import workloads

NAME = "profiling.bench float8"
DESCRIPTION = """\
Time a gated layer of e4m3 weights with a scale per row: twell.sparse_gated_ffn by "row", "union", "dense" and "auto",
the same layer in bfloat16, dense and sparse, and dense fp8: torch._scaled_mm with fused passes that quantise, those of
the package and others in Triton, gate and up in one product or in two. Weights of several layers are read in turn,
whose gates exceed L2, and each call of up to 256 tokens has others. A right result is as close to the formula in
float64 as dense fp8 is, or in bfloat16 to the layer in float64 as dense bfloat16 is.
"""
# y of a layer by its number, on tokens
Variant = Callable[[int, Tensor], Tensor]
# bytes of gates that calls go through before they read the same again
_BEYOND_L2 = 200 << 20
# Calls of a recording of up to so many tokens, and tokens that are checked.
CALLS, FEW, CHECKED = 32, 256, 1024
DENSE, BF16, BF16_DENSE = "dense fp8", "bfloat16", "bfloat16 dense"


@dataclasses.dataclass
class Row:
    """One variant. us: of a call, by the median of CUDA graphs. over_dense: the time of the fastest dense fp8 over it.

    strategy: what "auto" chose. nonzeros, union, heaviest: figures of e4m3 gates, as in
    ``strategy.costs.Figures``. error: relative to the formula in float64. original: relative to float64 of the weights
    before they were quantised.
    """

    workload: str
    m: int
    k: int
    n: int
    nonzeros: float
    union: float | None
    heaviest: float | None
    variant: str
    strategy: str = ""
    us: float = math.nan
    over_dense: float = math.nan
    error: float = math.nan
    original: float = math.nan
    red: str = ""


COLUMNS = [
    Column("workload", lambda r: r.workload, left=True),
    Column("variant", lambda r: f"{r.variant}: {r.strategy}" if r.strategy else r.variant, left=True),
    Column("tokens", lambda r: str(r.m), left=True),
    Column("K", lambda r: str(r.k)),
    Column("N", lambda r: str(r.n)),
    Column("non-zeros", lambda r: f"{r.nonzeros:.0f}"),
    Column("us", lambda r: f"{r.us:.1f}"),
    Column("over dense fp8", lambda r: f"{r.over_dense:.2f}"),
    Column("error", lambda r: f"{r.error:.4f}"),
    Column("of original weights", lambda r: f"{r.original:.4f}"),
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
        # as torch._scaled_mm reads it: in another layout each call would copy it
        self.stored = Float8(down.values.contiguous(), down.scale)
        both = torch.cat((self.gate.values.view(torch.uint8), self.up.values.view(torch.uint8)))
        self.both = both.view(float8.E4M3), torch.cat((self.gate.scale, self.up.scale))

    def dense(self, x: Tensor, merged: bool = False, triton: bool = False) -> Tensor:
        """y by products of ``torch._scaled_mm`` and fused passes; on a CPU as ``twell.float8.dense`` computes it."""
        if x.device.type != "cuda":
            return float8.dense(x, self.gate, self.up, self.stored)
        quantise: Callable[..., tuple[Tensor, Tensor]] = tokens_in_float8
        hidden: Callable[..., tuple[Tensor, Tensor]] = hidden_in_float8
        if triton:
            from profiling.bench.float8_triton import rows_in_float8

            quantise = hidden = rows_in_float8
        tokens = quantise(x)
        if merged:
            gate, up = product(*tokens, *self.both).chunk(2, 1)
        else:
            gate, up = (product(*tokens, w.values, w.scale) for w in (self.gate, self.up))
        return product(*hidden(gate, up), *self.stored)

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


def run(arguments: argparse.Namespace) -> int:
    """Measure as asked; the exit status."""
    on = pick_device(arguments.device)
    device = Gpu(on) if on.type == "cuda" else Device()
    with torch.inference_mode():
        ceilings, machine = device.ceilings(torch.bfloat16, 0.0)
    facts = {"machine": machine, "arguments": arguments, "copy_tbs": ceilings.memory / 1e12}
    made, progress = report.Run(NAME, arguments.json, lambda: facts), Progress(NAME)

    def work() -> None:
        for name in arguments.workload:
            # fewer tokens are the first of the most
            sizes = {"m": max(arguments.m), "k": arguments.k, "n": arguments.n}
            problem = workloads.load(name, real_layers=arguments.real_layers, device=on, **sizes)
            layers = copies(Weights(problem))
            for m in arguments.m:
                progress.step(f"{name}, M = {m}")
                made.add(Measured(name, layers, m, device, arguments).rows())

    with torch.inference_mode():
        made.measure(work)
    report.print_table(COLUMNS, made.rows)
    print(machine)
    return made.status()


class Measured:
    """Variants of a layer on ``m`` tokens: call ``i`` has the i-th of ``layers``, and of few tokens others, in turn."""

    def __init__(
        self, name: str, layers: Sequence[Weights], m: int, device: Any, arguments: argparse.Namespace
    ) -> None:
        self.layers, self.device, self.arguments = layers, device, arguments
        first, problem = layers[0], layers[0].problem
        self.calls = len(layers) * math.ceil((CALLS if m <= FEW else 1) / len(layers))
        parts = min(self.calls, max(1, CHECKED // m), len(problem.x) // m) if m <= FEW else 1
        self.parts = problem.x[: parts * m].split(m)
        window = problem.x[: parts * m][:CHECKED]
        tokens = float8.quantize_tokens(window)
        self.right = float8.formula(tokens, first.gate, first.up, first.down)
        self.original = testing.float64_output(problem._replace(x=window))
        self.bar = testing.errors(self.whole(lambda i, x: first.dense(x)), self.right)
        self.wide_bar = testing.errors(self.whole(lambda i, x: wide_dense(problem, x)), self.original)
        self.sites, self.wide_sites = ([twell.AutoStrategy() for _ in layers] for _ in range(2))
        gate = first.gate.dequantize(torch.bfloat16)
        found = [
            tune.figures_of(problem._replace(x=float8.quantize_tokens(x).dequantize(torch.bfloat16), w_gate=gate))
            for x in self.parts
        ]
        means: Any = [None if values[0] is None else sum(values) / parts for values in zip(*found)]
        n, k = problem.w_gate.shape
        self.make: Any = functools.partial(Row, name, m, k, n, *means[:3])

    def whole(self, call: Variant) -> Tensor:
        """y of the tokens that are checked, by the first layer."""
        return torch.cat([call(0, x) for x in self.parts])[:CHECKED]

    def variants(self) -> dict[str, Variant]:
        """The calls by name."""
        layers, found = self.layers, {}
        on_gpu = self.device.torch_device.type == "cuda"
        for triton in [False, True] if on_gpu and importlib.util.find_spec("triton") else [False]:
            for merged in (True, False):
                said = f"{DENSE}, {'one product' if merged else 'two products'}{', Triton' if triton else ''}"
                found[said] = dense_fp8(layers, merged, triton)
        found[BF16_DENSE] = lambda i, x: wide_dense(layers[i].problem, x)
        for prefix, method, sites in (("", Weights.sparse, self.sites), (f"{BF16} ", Weights.wide, self.wide_sites)):
            for strategy in ("row", "union", "dense")[: 2 if prefix else 3]:
                found[f'{prefix}"{strategy}"'] = each_by(method, layers, [strategy] * len(layers))
            found[f'{prefix}"auto"'] = each_by(method, layers, sites)
        return found

    def rows(self) -> list[Row]:
        """Check every variant, then time the right ones in turn, in graphs."""
        rows: dict[str, Row] = {}
        recordings: dict[str, Any] = {}

        def at(call: Variant) -> timing.Call:
            return lambda i: (call(i % len(self.layers), self.parts[i % len(self.parts)]),)

        for variant, call in self.variants().items():
            row = rows[variant] = self.make(variant)
            try:
                recordings[variant] = self.checked(row, at(call), self.whole(call))
            except Exception as error:
                # those of Triton are of many kinds
                row.red = timing.reason(error)
            if row.red:
                recordings.pop(variant, None)
        for variant, samples in timing.measure(recordings, self.arguments.seconds).items():
            rows[variant].us = timing.spread(samples).median * 1e3
        dense = [row.us for variant, row in rows.items() if variant.startswith(DENSE) and row.us == row.us]
        for row in rows.values():
            row.over_dense = min(dense, default=math.nan) / row.us
        return list(rows.values())

    def checked(self, row: Row, call: timing.Call, y: Tensor) -> Any:
        """A recording of a variant, with errors, the choice of "auto" and any fault in the row."""
        wide = row.variant.startswith(BF16)
        answer, bar = (self.original, self.wide_bar) if wide else (self.right, self.bar)
        row.original = testing.errors(y, self.original).frobenius
        ours = testing.errors(y, answer)
        if not wide:
            row.error = ours.frobenius
        auto = row.variant.endswith('"auto"')
        for i in range(SETTLING * len(self.layers) if auto else 0):
            call(i)
            self.device.wait()
        recording = self.device.record(call, self.calls)
        if auto:
            site = (self.wide_sites if wide else self.sites)[0]
            chosen = {choice.graph: choice.strategy for choice in site.explain()}
            row.strategy = chosen.get("captured", chosen.get("", "dense"))
        recording.spoil()
        recording.replay()
        recording.wait()
        # neurons in another order have the same sums
        first = (self.calls - 1) % len(self.parts) * row.m
        expected = answer[first : first + row.m]
        again = testing.errors(recording.outputs[0][: len(expected)], expected)
        # the worst token of dense products is a matter of chance
        luck = 2.5 * testing.allowance(row.m / 16)
        for found, factor in ((ours, 1.1), (again, luck)):
            if not found.within(bar, factor, luck):
                row.red = f"error {found}, dense {bar}"
        return recording


def dense_fp8(layers: Sequence[Weights], merged: bool, triton: bool) -> Variant:
    return lambda i, x: layers[i].dense(x, merged, triton)


def each_by(method: Callable[..., Tensor], layers: Sequence[Weights], strategies: Sequence[Any]) -> Variant:
    return lambda i, x: method(layers[i], x, strategies[i])


def wide_dense(problem: testing.FFN, x: Tensor) -> Tensor:
    """The layer in bfloat16 by PyTorch."""
    return testing.dense_output(problem._replace(x=x))
