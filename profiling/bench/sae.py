"""``python -m profiling.bench sae``: a sparse autoencoder beside dense PyTorch, forward and in training."""

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from profiling.bench import variants
from profiling.bench.cli import COMPILE
from profiling.bench.layers import SCREENED
from profiling.bench.report import Column
from profiling.bench.rows import ratio
from profiling.bench.sae_problem import PARAMETERS, PATTERNS, Answer, Autoencoder, dense, draw, sparse
from profiling.bench.variants import Session, Settled, Variant
from twell.choose.plan import route_of
from twell.commands import timing
from twell.commands.request import at_least, number_above
from twell.commands.timing import Call
from twell.testing import Comparison

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
    add("--no-eager", action="store_true", help="graphs alone, without eager calls")
    variants.add_arguments(parser, 2.0)


class Measured:
    """The variants of one operation on one autoencoder: checked, then timed in turn."""

    def __init__(self, o: Autoencoder, answer: Answer, op: str, this: Session) -> None:
        self.o, self.answer, self.op, self.device, self.arguments = o, answer, op, this.device, this.arguments
        self.copies = self.device.copies_for(o.x.numel() * o.x.element_size())
        self.x, self.dy = ([t, *(t.clone() for _ in range(self.copies - 1))] for t in (o.x, o.dy))

    def by(self, layer: Callable[..., Tensor]) -> Callable[[Any], Call]:
        """The operation on the i-th copy by a strategy: y, and in training the gradients."""
        parameters = [getattr(self.o, name) for name in PARAMETERS]

        def call(strategy: Any) -> Call:
            asked = {"strategy": route_of(strategy) if strategy == SCREENED else strategy} if strategy else {}

            def forward(i: int) -> tuple[Tensor, ...]:
                return (layer(self.x[i % self.copies], o=self.o, **asked),)

            @torch.enable_grad()
            def step(i: int) -> tuple[Tensor, ...]:
                (y,) = forward(i)
                return y.detach(), *torch.autograd.grad(y, parameters, self.dy[i % self.copies])

            return forward if self.op == "forward" else step

        return call

    def variants(self) -> Iterator[Variant]:
        """Dense PyTorch, then the strategies."""
        plain, mode = self.o.thresholds is not None, self.arguments.compile
        # torch.topk keeps whichever of equal values it likes
        check = self.answer.check if plain else None
        yield Variant("dense eager", self.by(dense), self.copies, "", check)
        if mode != "none":
            options: Any = {"fullgraph": True, "dynamic": False, "mode": None if mode == "default" else mode}
            yield Variant("dense compiled", self.by(torch.compile(dense, **options)), self.copies, "", check)
        # in training they are the same; TopK chooses among whole gates, without the screen
        asked = ["union" if name == "row" and self.op == "training" else name for name in self.arguments.strategies]
        for name in dict.fromkeys(name for name in asked if name != SCREENED or plain):
            yield Variant(f'"{name}"', self.by(sparse), self.copies, name, self.answer.check)

    def note(self, row: Row, variant: Variant, settled: Settled, errors: dict[str, Comparison]) -> None:
        if errors:
            row.error = max(ratio(c.ours.frobenius, c.dense.frobenius) for c in errors.values())
        if variant.requested == "auto":
            row.strategy, row.eager_strategy = settled.strategy, settled.eager
        peak = self.device.peak(settled.now) if self.op == "training" and not row.red else None
        if peak is not None:
            row.peak_bytes = peak + sum(t.numel() * t.element_size() for t in self.o if isinstance(t, Tensor))

    def rows(self, make: Callable[[str], Row]) -> list[Row]:
        chosen, seconds = list(self.variants()), self.arguments.seconds
        rows = {variant.key: make(variant.name) for variant in chosen}
        found = variants.ready(chosen, rows, self.device, self.note)
        times = timing.measure({key: each.recording for key, each in found.items()}, seconds)
        variants.fill(rows, times, "dense", "ms", "over_dense")
        if not self.arguments.no_eager:
            eager = {key: self.device.eager("queued", each.settled.call, self.copies) for key, each in found.items()}
            times = timing.measure(eager, seconds / 2, QUEUED_ROUNDS)
            variants.fill(rows, times, "dense", "queued_ms", "queued_over_dense")
        return list(rows.values())


def run(arguments: argparse.Namespace) -> int:
    """Measure as asked; the exit status."""
    this = Session(NAME, arguments)
    arguments.compile = arguments.compile or ("default" if this.device.torch_device.type == "cuda" else "none")
    torch._dynamo.config.recompile_limit = 256
    sizes = {"m": arguments.tokens, "k": arguments.hidden, "nonzeros": arguments.nonzeros, "top_k": arguments.top_k}

    def work() -> None:
        for n, pattern in itertools.product(arguments.neurons, arguments.patterns):
            if pattern == "topk" and n > MOST_TOPK:
                continue
            this.progress.step(f"{pattern}, N = {n}")
            o = draw(pattern, n, this.device.torch_device, **sizes)
            answer = Answer(o)
            for op in arguments.ops:
                this.progress.step(f"{pattern}, N = {n}, {op}")
                this.add(Measured(o, answer, op, this).rows(functools.partial(Row, pattern, op, n, answer.nonzeros)))

    return this.run(work, COLUMNS)
