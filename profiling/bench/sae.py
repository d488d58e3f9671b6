"""``python -m profiling.bench sae``: a sparse autoencoder beside dense PyTorch, forward and in training."""

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
from profiling.bench.cli import COMPILE
from profiling.bench.layers import SCREENED, SETTLING
from profiling.bench.protocol import Device, Gpu
from profiling.bench.report import Column, Progress
from profiling.bench.sae_problem import PARAMETERS, PATTERNS, Answer, Autoencoder, dense, draw
from twell.commands import timing
from twell.commands.request import at_least, number_above, pick_device
from twell.strategy.plan import route_of

NAME = "profiling.bench sae"
DESCRIPTION = """\
Time a sparse autoencoder, y = a W_dec + b_dec of pre = (x - b_dec) W_enc + b_enc, by twell.sparse_ffn beside dense
PyTorch. "even" and "skewed" are JumpReLU: a is pre where it exceeds the threshold of its neuron. Each neuron fires
alike, or at a log-normal rate: ln(rate) has a standard deviation of 2, and no rate exceeds 0.5. "topk" is ReLU of the
largest of each token; dense PyTorch scatters torch.topk. A training step has the gradients of weights and biases, that
of b_dec through y alone, and not of x. A right result is as close to float64 as dense PyTorch is, on drawn tokens and
neurons whose choices no rounding decides.
"""
OPS = ("forward", "training")
STRATEGIES = ("row", "union", "auto", SCREENED)
# "topk" is for up to so many neurons
MOST_TOPK = 65_536
# Least rounds of eager calls, which are many in a row.
QUEUED_ROUNDS = 4


@dataclasses.dataclass
class Row:
    """One variant. ms: of a call, by the median of CUDA graphs. queued_ms: of an eager call among many in a row.

    over_dense, queued_over_dense: the time of the faster dense variant over this one. strategy, eager_strategy: what
    "auto" chose in graphs and in eager calls. peak_bytes: of a training step, with weights, gradients, x and dy.
    error: of y or the gradient that is furthest off, over that of dense PyTorch.
    """

    pattern: str
    op: str
    n: int
    nonzeros: float
    variant: str
    strategy: str = ""
    eager_strategy: str = ""
    ms: float = math.nan
    queued_ms: float = math.nan
    over_dense: float = math.nan
    queued_over_dense: float = math.nan
    peak_bytes: int | None = None
    error: float = math.nan
    red: str = ""


COLUMNS = [
    Column("pattern", lambda r: r.pattern, left=True),
    Column("op", lambda r: r.op, left=True),
    Column("N", lambda r: str(r.n), left=True),
    Column("variant", lambda r: f"{r.variant}: {r.strategy}" if r.strategy else r.variant, left=True),
    Column("non-zeros", lambda r: f"{r.nonzeros:.1f}"),
    Column("ms", lambda r: f"{r.ms:.3f}"),
    Column("over dense", lambda r: f"{r.over_dense:.2f}"),
    Column("queued", lambda r: f"{r.queued_ms:.3f}"),
    Column("over dense", lambda r: f"{r.queued_over_dense:.2f}"),
    Column("peak GB", lambda r: "-" if r.peak_bytes is None else f"{r.peak_bytes / 1e9:.2f}"),
    Column("error", lambda r: "-" if math.isnan(r.error) else f"{r.error:.3f}"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("--neurons", type=at_least(8), nargs="+", default=[16_384, 65_536, 262_144], metavar="N", help="(%(default)s)")
    add("--hidden", type=at_least(8), default=2304, metavar="K", help="size of x (%(default)s)")
    add("--tokens", type=at_least(1), default=8192, metavar="M", help="(%(default)s)")
    add("--nonzeros", type=number_above(0), default=60.0, metavar="L0", help="per token (%(default)s)")
    add("--top-k", type=at_least(1), default=64, metavar="K", help='of "topk" (%(default)s)')
    add("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    add("--ops", nargs="+", choices=OPS, default=list(OPS))
    add("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    add("--compile", choices=COMPILE, help="torch.compile's mode for dense (default; none on a CPU)")
    add(
        "--seconds",
        type=number_above(0),
        default=2.0,
        metavar="S",
        help="of timing for each operation (2)",
    )
    add("--no-eager", action="store_true", help="graphs alone, without eager calls")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if available")
    add("--json", "--out", dest="json", type=Path, metavar="FILE", help="write the rows to a file")


class Measured:
    """The variants of one operation on one autoencoder: checked, then timed in turn."""

    def __init__(self, o: Autoencoder, answer: Answer, op: str, device: Device, arguments: argparse.Namespace) -> None:
        self.o, self.answer, self.op, self.device, self.arguments = o, answer, op, device, arguments
        self.copies = device.copies_for(o.x.numel() * o.x.element_size())
        self.x, self.dy = ([t, *(t.clone() for _ in range(self.copies - 1))] for t in (o.x, o.dy))

    def call(self, layer: Callable[[Tensor], Tensor]) -> timing.Call:
        """The operation on the i-th copy: y, and in training the gradients."""
        parameters = [getattr(self.o, name) for name in PARAMETERS]

        def forward(i: int) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (layer(self.x[i % self.copies]),)

        def step(i: int) -> tuple[Tensor, ...]:
            y = layer(self.x[i % self.copies])
            return y.detach(), *torch.autograd.grad(y, parameters, self.dy[i % self.copies])

        return forward if self.op == "forward" else step

    def variants(self) -> dict[str, tuple[timing.Call, twell.AutoStrategy | None]]:
        """Calls by name, with the site of "auto"."""
        o, mode = self.o, self.arguments.compile
        found: Any = {"dense eager": (self.call(functools.partial(dense, o=o)), None)}
        if mode != "none":
            options: Any = {"fullgraph": True, "dynamic": False, "mode": None if mode == "default" else mode}
            compiled = torch.compile(dense, **options)
            found["dense compiled"] = self.call(functools.partial(compiled, o=o)), None
        # in training they are the same; TopK chooses among whole gates, without the screen
        asked = ["union" if name == "row" and self.op == "training" else name for name in self.arguments.strategies]
        for name in dict.fromkeys(name for name in asked if name != SCREENED or o.thresholds is not None):
            site = twell.AutoStrategy() if name == "auto" else None
            how: Any = site or (route_of(name) if name == SCREENED else name)
            found[f'"{name}"'] = self.call(functools.partial(o.sparse, strategy=how)), site
        return found

    def rows(self, make: Callable[[str], Row]) -> list[Row]:
        rows, recordings, calls = {}, {}, {}
        for name, (call, site) in self.variants().items():
            row = rows[name] = make(name)
            try:
                recordings[name], calls[name] = self.checked(row, call, site), call
            except Exception as error:
                # those of torch.compile are of many kinds
                row.red = timing.reason(error)
        seconds = self.arguments.seconds
        self.fill(rows, timing.measure(recordings, seconds), "ms", "over_dense")
        if not self.arguments.no_eager:
            eager = {name: self.device.eager("queued", calls[name], self.copies) for name in recordings}
            times = timing.measure(eager, seconds / 2, QUEUED_ROUNDS)
            self.fill(rows, times, "queued_ms", "queued_over_dense")
        return list(rows.values())

    def fill(self, rows: dict[str, Row], times: dict[str, list[float]], field: str, ratio: str) -> None:
        """Put medians into a field of the rows, and the ratios to the faster dense variant into another."""
        medians = {name: timing.spread(samples).median for name, samples in times.items()}
        fastest = min((ms for name, ms in medians.items() if name.startswith("dense")), default=math.nan)
        for name, ms in medians.items():
            setattr(rows[name], field, ms)
            setattr(rows[name], ratio, fastest / ms)

    def checked(self, row: Row, call: timing.Call, site: twell.AutoStrategy | None) -> timing.Recording:
        """A recording of a variant that gives right results; its peak and the choice of "auto" go into the row."""
        for i in range(SETTLING if site is not None else 0):
            call(i)
            self.device.wait()
        peak = self.device.peak(call) if self.op == "training" else None
        if peak is not None:
            operands = [t for t in self.o if isinstance(t, Tensor)]
            row.peak_bytes = peak + sum(t.numel() * t.element_size() for t in operands)
        recording = self.device.record(call, self.copies)
        if site is not None:
            chosen = {choice.graph: choice.strategy for choice in site.explain()}
            row.eager_strategy = chosen.get("", "dense")
            row.strategy = chosen.get("captured", row.eager_strategy)
        # torch.topk keeps whichever of equal values it likes
        if self.o.thresholds is not None or not row.variant.startswith("dense"):
            recording.spoil()
            recording.replay()
            recording.wait()
            row.error = self.answer.check(*recording.outputs)
        return recording


def run(arguments: argparse.Namespace) -> int:
    """Measure as asked; the exit status."""
    on = pick_device(arguments.device)
    device: Device = Gpu(on) if on.type == "cuda" else Device()
    arguments.compile = arguments.compile or ("default" if on.type == "cuda" else "none")
    report.require_writable(arguments.json)
    torch._dynamo.config.recompile_limit = 256
    ceilings, machine = device.ceilings(torch.bfloat16, 0.0)
    facts = {"machine": machine, "arguments": arguments, "tflops": ceilings.flops / 1e12}
    this, progress = report.Run(NAME, arguments.json, lambda: facts), Progress(NAME)

    sizes = {"m": arguments.tokens, "k": arguments.hidden, "nonzeros": arguments.nonzeros, "top_k": arguments.top_k}

    def work() -> None:
        for n in arguments.neurons:
            for pattern in arguments.patterns:
                if pattern == "topk" and n > MOST_TOPK:
                    continue
                progress.step(f"{pattern}, N = {n}")
                o = draw(pattern, n, on, **sizes)
                answer = Answer(o)
                for op in arguments.ops:
                    progress.step(f"{pattern}, N = {n}, {op}")
                    make = lambda name: Row(pattern, op, n, answer.nonzeros, name)  # noqa: B023, E731
                    this.add(Measured(o, answer, op, device, arguments).rows(make))

    this.measure(work)
    report.print_table(COLUMNS, this.rows)
    print(machine)
    return this.status()
