"""``python -m profiling.bench moe``: a layer of routed experts beside grouped products of PyTorch."""

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from profiling.bench import variants
from profiling.bench.report import Column
from profiling.bench.rows import ratio
from profiling.bench.variants import Session, Variant, Verdict, verdict
from twell import float8, testing
from twell._activation import activation_of
from twell.commands import timing
from twell.commands.request import at_least, number_from
from twell.commands.timing import Call
from twell.float8 import Float8
from twell.testing import Comparison, Errors
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
    "tiny": Shape(64, 512, 8, 2),
}
SEQUENCES = (1, 8, 32, 64, 128, 256, 1024)
# Calls of a recording, each with routes of its own.
CALLS = 16
GROUPED = "grouped products"


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
    variants.add_arguments(parser, 1.0)


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

    def fired_bytes(self, problem: Mixture) -> float:
        """Bytes of the rows behind the gate of neurons that any token fires."""
        rows = sum(int(hidden_of(problem, e)[1].any(0).sum()) for e in problem.expert_ids.unique().tolist())
        return rows * 2.0 * self.shape.k * (self.products - 1)

    def variants(self, problems: Sequence[Mixture], on_gpu: bool) -> Iterator[Variant]:
        """Grouped products, then calls with weights of each dtype by each strategy."""
        if on_gpu:
            calls = [self.grouped(problem) for problem in problems]
            yield Variant(GROUPED, lambda _: lambda i: (calls[i](),), len(problems))
        for weights in self.arguments.weights:
            e4m3 = weights == "e4m3"
            right, dense = self.bar(problems[-1], weights)
            given: list[Any] = [each._replace(**self.quantised) for each in problems] if e4m3 else [*problems]  # type: ignore[arg-type]
            check = functools.partial(self.check, right, dense, self.fired(problems[-1]))
            for strategy in self.arguments.strategies:
                by = functools.partial(self.sparse, given, strategy)
                yield Variant(f'{"e4m3 " * e4m3}"{strategy}"', by, len(problems), check=check)

    def sparse(self, given: Sequence[Any], strategy: str, _: object) -> Call:
        options: Any = {"activation": self.arguments.activation, "strategy": strategy}
        return lambda i: (twell.sparse_experts(**given[i]._asdict(), **options),)

    def check(
        self, right: Tensor, dense: Errors, fired: int, _: str, call: Call, outputs: tuple[Tensor, ...]
    ) -> Verdict:
        """Check y of the last call, of so many hidden states that are not zero."""
        budgets = testing.BUDGET, testing.BUDGET * testing.allowance(len(right))
        return verdict({"y": Comparison(testing.errors(outputs[0], right), dense, fired, *budgets)})

    def fired(self, problem: Mixture) -> int:
        """Hidden states that are not zero."""
        return sum(int(hidden_of(problem, e)[1].sum()) for e in problem.expert_ids.unique().tolist())


def run(arguments: argparse.Namespace) -> int:
    """Measure as asked; the exit status."""
    this = Session(NAME, arguments)

    def work() -> None:
        for name, firing, skew in itertools.product(arguments.shapes, arguments.firing, arguments.skew):
            layer = Layer(arguments, SHAPES[name], firing, skew, this.device.torch_device)
            for sequences in arguments.sequences:
                this.add(measured(layer, name, firing, sequences, this))

    return this.run(work, COLUMNS)


def measured(layer: Layer, shape: str, firing: float, sequences: int, this: Session) -> list[Row]:
    """The rows of one number of sequences."""
    problems, rate = layer.problems(sequences), this.ceilings.memory
    touched = sum(len(problem.expert_ids.unique()) for problem in problems) / len(problems)
    once = touched * layer.weight_bytes
    floors = {"dense": once * layer.products, "row": once + sum(map(layer.fired_bytes, problems)) / len(problems)}
    chosen = list(layer.variants(problems, this.device.torch_device.type == "cuda"))
    rows = {each.key: Row(shape, sequences, firing, layer.skew, touched, each.name) for each in chosen}

    def note(row: Row, variant: Variant, settled: object, errors: dict[str, Comparison]) -> None:
        if errors:
            row.error = ratio(errors["y"].ours.frobenius, errors["y"].dense.frobenius)

    found = variants.ready(chosen, rows, this.device, note)
    with torch.inference_mode():
        times = timing.measure({key: each.recording for key, each in found.items()}, layer.arguments.seconds)
    variants.fill(rows, times, GROUPED, "us", "over_grouped", 1e3)
    for name, row in rows.items():
        bytes_read = floors["dense" if "dense" in name or name == GROUPED else "row"]
        row.floor_us = bytes_read / (2 if "e4m3" in name else 1) / rate * 1e6
        row.over_copy = floors["dense"] / rate * 1e6 / row.us
    return list(rows.values())
