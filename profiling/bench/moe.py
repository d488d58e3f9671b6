"""``python -m profiling.bench moe``: a layer of routed experts beside grouped products of PyTorch.

Time a layer of routed experts at some numbers of sequences that decode, one token each: twell.sparse_experts by
"row", "dense" and "auto", and torch's grouped products. Routes and zeros are drawn, at the share that fires. Each call
of a graph has other tokens and other routes, and the weights exceed L2. A right result is as close to float64 as dense
products are. With e4m3 weights the float64 answer is of what these stand for.

us is the median of CUDA graphs, over_grouped the time of grouped products over it, and over_copy that of two or three
dense products that read each weight that is touched once, at the rate of a copy. floor_us is to read what must be.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from profiling.harness import Bench, Case, Row, Settled, Variant, Way, near, ratio
from twell import testing
from twell.base.activation import activation_of
from twell.commands.request import at_least, number_from
from twell.commands.timing import Call
from twell.ops import float8
from twell.ops.float8 import Float8
from twell.testing import Comparison
from twell.testing.experts import FIRING, Mixture, dense_experts, draw_experts, float64_experts, hidden_of


class Shape(NamedTuple):
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
# Calls of a recording, each with routes of its own.
CALLS = 16
GROUPED = "grouped products"
GRAPH = Way("graph", "us", "over_grouped", 1e3)
SHOWN = (
    "shape", "variant", "sequences", "firing", "skew", "touched", "us", "over_grouped", "over_copy", "floor_us",
    "error",
)  # fmt: skip
OPTIONS = {
    "--shapes": (tuple(SHAPES), ["nano"], "sizes of layers"),
    "--sequences": (at_least(1), [1, 8, 32, 64, 128, 256, 1024], "that decode"),
    "--firing": (number_from(0.001, 0.999), [FIRING], "shares"),
    "--skew": (number_from(0), [0.0], "of routes: the r-th expert like r^-S"),
    "--gated": (bool, False, "experts have a gate"),
    "--activation": (("relu", "relu2"), "relu2", "of experts"),
    "--weights": (("bfloat16", "e4m3"), ["bfloat16"], "dtypes"),
    "--strategies": (("row", "dense", "auto"), ["row", "dense", "auto"], "of twell"),
}
SECONDS = 1.0


def firing(problem: Mixture) -> Iterator[Tensor]:
    """Of each expert that has tokens: which neurons these fire."""
    return (hidden_of(problem, e)[1] for e in problem.expert_ids.unique().tolist())


class Layer:
    def __init__(self, arguments: argparse.Namespace, shape: Shape, share: float, skew: float, device: Any) -> None:
        self.arguments, self.shape, self.skew = arguments, shape, skew
        self.form = activation_of(arguments.activation, 0, arguments.gated)
        # k, n, experts, top
        self.base = draw_experts(1, *shape, firing=share, skew=skew, gated=arguments.gated, device=device)
        self.products = 3 if arguments.gated else 2
        self.weight_bytes = 2 * shape.k * shape.n

    def problems(self, sequences: int) -> list[Mixture]:
        """Tokens and routes for each call, with the weights of one layer."""
        shape, on = self.shape._replace(n=8), self.base.x.device
        drawn = [draw_experts(sequences, *shape, skew=self.skew, seed=seed + 1, device=on) for seed in range(CALLS)]
        return [self.base._replace(x=each.x, expert_ids=each.expert_ids, weights=each.weights) for each in drawn]

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

    def variants(self, problems: Sequence[Mixture], bench: Bench, touched: float) -> Iterator[Variant]:
        once = touched * self.weight_bytes
        # of the neurons that any token fires, the rows behind the gate
        rows = sum(int(fires.any(0).sum()) for problem in problems for fires in firing(problem)) / len(problems)
        floors = {"dense": once * self.products, "row": once + rows * 2.0 * self.shape.k * (self.products - 1)}

        def floor(name: str, e4m3: bool = False) -> Row:
            moved = floors["dense" if name == "dense" else "row"] / (1 + e4m3)
            return {"floor_us": moved / bench.ceilings.memory * 1e6}

        if bench.device.torch_device.type == "cuda":
            calls = [self.grouped(problem) for problem in problems]
            yield Variant(GROUPED, lambda _: lambda i: (calls[i](),), len(problems), fields=floor("dense"))
        for weights in self.arguments.weights:
            e4m3 = weights == "e4m3"
            right, dense = self.bar(problems[-1], weights)
            given: list[Any] = [each._replace(**self.quantised) for each in problems] if e4m3 else [*problems]  # type: ignore[arg-type]
            check = near(right, dense, sum(int(fires.sum()) for fires in firing(problems[-1])))
            for strategy in self.arguments.strategies:
                by = functools.partial(self.sparse, given, strategy)
                name = f'{"e4m3 " * e4m3}"{strategy}"'
                yield Variant(name, by, len(problems), check=check, note=note_error, fields=floor(strategy, e4m3))

    def sparse(self, given: Sequence[Any], strategy: str, _: object) -> Call:
        options: Any = {"activation": self.arguments.activation, "strategy": strategy}
        return lambda i: (twell.sparse_experts(**given[i]._asdict(), **options),)


def note_error(row: Row, settled: Settled, errors: dict[str, Comparison]) -> None:
    row["error"] = ratio(errors["y"].ours.frobenius, errors["y"].dense.frobenius)


def cases(bench: Bench) -> Iterator[Case]:
    given = bench.arguments

    def measure(base: Row, layer: Layer) -> Iterator[list[Row]]:
        problems = layer.problems(base["sequences"])
        base["touched"] = sum(len(problem.expert_ids.unique()) for problem in problems) / len(problems)
        rows = bench.timed(base, layer.variants(problems, bench, base["touched"]), [GRAPH])
        copy = base["touched"] * layer.weight_bytes * layer.products / bench.ceilings.memory * 1e6
        for row in rows:
            row["over_copy"] = row["us"] and copy / row["us"]
        yield rows

    for name, share, skew in itertools.product(given.shapes, given.firing, given.skew):
        layer = Layer(given, SHAPES[name], share, skew, bench.device.torch_device)
        for sequences in given.sequences:
            base = {"shape": name, "sequences": sequences, "firing": share, "skew": skew}
            yield base, functools.partial(measure, base, layer)
