"""``python -m profiling.bench float8``: a layer of e4m3 weights beside dense fp8 products of PyTorch.

Time a gated layer of e4m3 weights with a scale per row: twell.sparse_gated_ffn by "row", "union", "dense" and "auto",
the same layer in bfloat16, dense and sparse, and dense fp8: torch._scaled_mm with fused passes that quantise, those of
the package and others in Triton, gate and up in one product or in two. Weights of several layers are read in turn,
whose gates exceed L2, and each call of up to 256 tokens has others. A right result is as close to the formula in
float64 as dense fp8 is, or in bfloat16 to the layer in float64 as dense bfloat16 is.

us is the median of CUDA graphs, queued_us of eager calls in a row, over_dense and queued_over_dense the time of the
fastest dense fp8 over it, nonzeros of e4m3 gates, error relative to the formula in float64, and original to float64 of
the weights before they were quantised.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from profiling import harness
from profiling.bench.workloads import parse
from profiling.harness import Bench, Case, Row, Settled, Variant, Verdict, Way, verdict
from twell import testing
from twell.commands import tune
from twell.commands.request import RequestError, at_least
from twell.commands.timing import Call
from twell.ops import float8
from twell.testing import Comparison
from twell.testing.quantised import Quantised

# bytes of gates that calls go through before they read the same again
_BEYOND_L2 = 200 << 20
# Calls of a recording of up to so many tokens, and tokens that are checked.
CALLS, FEW, CHECKED = 32, 256, 1024
DENSE, BF16, BF16_DENSE = "dense fp8", "bfloat16", "bfloat16 dense"
WAYS = Way("graph", "us", "over_dense", 1e3), Way("queued", "queued_us", "queued_over_dense", 1e3, share=0.5)
SHOWN = ("workload", "variant", "strategy", "m", "k", "n", "nonzeros", "us", "over_dense", "error", "original")
OPTIONS = {
    "--workload": (str, ["topic29"], "as of profiling.bench, without biases"),
    "--m": (at_least(1), [16384], "tokens"),
    "--k": (at_least(16), 2048, "hidden size of drawn layers"),
    "--n": (at_least(16), 5632, "neurons of drawn layers"),
}
SECONDS = 1.0


class Weights(Quantised):
    def wide(self, x: Tensor, strategy: Any) -> Tensor:
        return testing.sparse_output(self.problem._replace(x=x), strategy=strategy)

    def wide_dense(self, x: Tensor, strategy: object) -> Tensor:
        return testing.dense_output(self.problem._replace(x=x))


def cases(bench: Bench) -> Iterator[Case]:
    given, on = bench.arguments, bench.device.torch_device

    def measure(name: str, layers: Sequence[Weights], m: int) -> Iterator[list[Row]]:
        measured = Measured(name, layers, m, on)
        yield bench.timed(measured.base, measured.variants(), WAYS)

    sources = parse(given.workload)
    bench.given["workload"] = [source.name for source in sources]
    for source in sources:
        # fewer tokens are the first of the most
        problem = source.load(max(given.m), given.k, given.n, device=on, dtype=torch.bfloat16)
        if problem.b_gate is not None:
            raise RequestError(f"--workload: expected layers without biases, got {source.name} with one")
        # layers whose gates together exceed L2
        count = max(1, min(8, _BEYOND_L2 // problem.w_gate.numel()))
        layers = [Weights(problem), *(Weights(problem.map(torch.clone)) for _ in range(count - 1))]
        for m in given.m:
            yield {"workload": source.name, "m": m}, functools.partial(measure, source.name, layers, m)


class Measured:
    """Variants of a layer on ``m`` tokens: call ``i`` has the i-th of ``layers``, and of few tokens others, in turn."""

    def __init__(self, name: str, layers: Sequence[Weights], m: int, on: torch.device) -> None:
        self.layers, self.on, self.m = layers, on, m
        first, problem = layers[0], layers[0].problem
        self.calls = len(layers) * math.ceil((CALLS if m <= FEW else 1) / len(layers))
        parts = min(self.calls, max(1, CHECKED // m), len(problem.x) // m) if m <= FEW else 1
        self.parts = problem.x[: parts * m].split(m)
        window = problem.x[: parts * m][:CHECKED]
        self.right = float8.formula(float8.quantize_tokens(window), first.gate, first.up, first.down)
        self.original = testing.float64_output(problem._replace(x=window))
        found = [tune.figures_of(first.rounded(x)) for x in self.parts]
        means: Any = [None if values[0] is None else sum(values) / parts for values in zip(*found)]
        n, k = problem.w_gate.shape
        self.base: Row = {"workload": name, "m": m, "k": k, "n": n}
        self.base |= dict(zip(("nonzeros", "union", "heaviest"), means))

    def whole(self, call: Call) -> Tensor:
        return harness.whole(call, len(self.parts))[:CHECKED]

    def by(self, function: Callable[[Weights, Tensor, Any], Tensor]) -> Callable[[Any], Call]:
        layers, parts = self.layers, self.parts
        return lambda strategy: lambda i: (function(layers[i % len(layers)], parts[i % len(parts)], strategy),)

    def variants(self) -> Iterator[Variant]:
        calls: dict[str, Any] = {}
        passes: dict[str, dict[str, Any]] = {"": {}}
        if self.on.type == "cuda" and importlib.util.find_spec("triton"):
            from profiling.bench.float8_triton import rows_in_float8

            passes[", Triton"] = {"quantise": rows_in_float8, "hidden": rows_in_float8}
        for said, own in passes.items():
            for merged, products in ((True, "one product"), (False, "two products")):
                calls[f"{DENSE}, {products}{said}"] = functools.partial(Weights.dense, merged=merged, **own)
        calls[BF16_DENSE] = Weights.wide_dense
        checks = []
        for dense, answer in ((Weights.dense, self.right), (Weights.wide_dense, self.original)):
            bar = testing.errors(self.whole(self.by(dense)("")), answer)
            checks.append(functools.partial(self.check, answer, bar))
        for name, call in calls.items():
            yield Variant(name, self.by(call), self.calls, "", checks[name == BF16_DENSE], self.note)
        for prefix, call, check in (("", Weights.sparse, checks[0]), (f"{BF16} ", Weights.wide, checks[1])):
            for strategy in ("row", "union", "auto") if prefix else ("row", "union", "dense", "auto"):
                yield Variant(f'{prefix}"{strategy}"', self.by(call), self.calls, strategy, check, self.note)

    def check(self, answer: Tensor, bar: Any, strategy: str, call: Call, outputs: tuple[Tensor, ...]) -> Verdict:
        """Check y of the first calls, and the last one on its copy of the layer."""
        first = (self.calls - 1) % len(self.parts) * self.m
        expected = answer[first : first + self.m]
        # the worst token of dense products is a matter of chance
        luck = 2.5 * testing.allowance(self.m / 16)
        ours, copy = testing.errors(self.whole(call), answer), testing.errors(outputs[0][: len(expected)], expected)
        named = {"y": (ours, testing.BUDGET), "a copy": (copy, luck)}
        return verdict({name: Comparison(e, bar, math.inf, budget, luck) for name, (e, budget) in named.items()})

    def note(self, row: Row, settled: Settled, errors: dict[str, Comparison]) -> None:
        row["original"] = testing.errors(self.whole(settled.now), self.original).frobenius
        row["error"] = None if row["variant"].startswith(BF16) else errors["y"].ours.frobenius
        if settled.variant.requested != "auto":
            # the published files name the choices of "auto" alone
            row["strategy"] = row["eager_strategy"] = ""
