"""``python -m profiling.bench host``: what eager calls of a layer cost the host, and eager calls of few tokens.

Time eager calls of a layer as users make them, beside three nn.Linear with ReLU and product. Two parts:

host    what a call costs the host, of few tokens, so that nothing waits for the GPU
few     at 1 to 1,024 tokens the forward pass of "auto" beside dense, in the layers of `twell tune`: calls in a row
        ("queued") and calls that are waited for

"forward" needs no gradient; "step" is forward, backward and the gradients set to None again, of the tokens and of all
weights; "step, one thread" is the same with the backward pass in the calling thread
(torch.autograd.set_multithreading_enabled(False)). Layers are bfloat16 modules with down weights by rows.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twell
from profiling.bench.layers import module_of
from profiling.harness import Bench, Case, Row, Variant, Way, agrees
from twell import testing
from twell.commands import tune
from twell.commands.timing import Call
from twell.nn.layers import SparseFFN, SparseGatedMLP
from twell.testing import FFN
from twell.testing.calls import linear

FORWARD, STEP, ONE_THREAD = "forward", "step", "step, one thread"
# The layer of part "host", its pattern, its calls and their tokens.
HIDDEN, NEURONS, WORKLOAD = testing.PAPER_HIDDEN, testing.PAPER_NEURONS, "topic29"
HOST_CALLS = ((FORWARD, 16), (FORWARD, 2048), (ONE_THREAD, 2048), (STEP, 2048))
# The layers of part "few" and their tokens, by gated or not, the most tokens, and the pattern.
LAYERS = {
    True: (tune.SHAPES, (1, 3, 8, 16, 32, 33, 64, 96, 128, 192, 256, 384, 512, 768, 1024)),
    False: (((2048, 5632), (4096, 11008)), (1, 8, 16, 32, 33, 64, 128, 256, 512, 1024)),
}
FEW, PATTERN = 1024, "topic"
# m, K, N, and whether there is a gate
Shape = tuple[int, int, int, bool]
# Calls in a row: of the host few, as the longest step has two dozen launches, and the GPU's queue takes a thousand; of
# few tokens so many that one in each 64 that measures counts.
WAYS = {
    "host": (Way("host", "host_us", "host", 1e3, calls=20),),
    "few": (Way("queued", "queued_ms", "queued", calls=48), Way("waited", "waited_ms", "waited", calls=8)),
}
SHOWN = (
    "part", "what", "m", "k", "n", "gated", "layer", "chosen", "host_us", "host_over_dense", "queued_ms",
    "queued_over_dense", "waited_ms", "waited_over_dense",
)  # fmt: skip
OPTIONS = {"--parts": (tuple(WAYS), list(WAYS), "what to time")}
SECONDS = 3.0


class Dense(nn.Module):
    """The layer as models write it, with a gate or without."""

    def __init__(self, like: SparseFFN) -> None:
        super().__init__()
        weights: Any = {name.removesuffix(".weight"): weight for name, weight in like.named_parameters()}
        own = {name: linear(w.clone(memory_format=torch.contiguous_format)) for name, w in weights.items()}
        self.gate_proj, self.up_proj, self.down_proj = own.get("gate_proj"), own["up_proj"], own["down_proj"]

    def forward(self, x: Tensor) -> Any:
        if self.gate_proj is None:
            return self.down_proj(F.relu(self.up_proj(x)))
        return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))


class Function(nn.Module):
    def __init__(self, like: SparseFFN, strategy: Any) -> None:
        super().__init__()
        self.weights = nn.ParameterList([child.weight for child in like.children()])
        self.function: Any = twell.sparse_gated_ffn if isinstance(like, SparseGatedMLP) else twell.sparse_ffn
        self.strategy = strategy

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.weights, strategy=self.strategy)


def call_of(what: str, layer: nn.Module, x: Tensor) -> Call:
    if what == FORWARD:
        layer.requires_grad_(False)
        return lambda i: (layer(x),)
    leaf, dy, parameters = x.detach().clone().requires_grad_(), torch.randn_like(x), list(layer.parameters())

    @torch.enable_grad()
    def step(i: int) -> tuple[Tensor, ...]:
        y = layer(leaf)
        y.backward(dy)
        leaf.grad = None
        for parameter in parameters:
            parameter.grad = None
        return (y.detach(),)

    return step


def variants(problem: FFN, what: str, m: int, gated: bool, names: Sequence[str]) -> Iterator[Variant]:
    """Dense, modules by strategies, and "function", which chooses by "auto"."""
    x, like = problem.x[:m], module_of(problem, "dense", gated)
    with torch.no_grad():
        right = Dense(like)(x)
    check = agrees(lambda i: (right,), False)

    def by(make: Callable[[Any], nn.Module]) -> Callable[[Any], Call]:
        return lambda strategy: call_of(what, make(strategy), x)

    yield Variant("dense", by(lambda _: Dense(like)), 1, "", check)
    function = by(lambda strategy: Function(module_of(problem, "row", gated), strategy))
    module = by(lambda strategy: module_of(problem, strategy, gated))
    for name in names:
        made, requested = (function, "auto") if name == "function" else (module, name)
        yield Variant(name, made, 1, requested, check)


def cases(bench: Bench) -> Iterator[Case]:
    on, parts = bench.device.torch_device, bench.arguments.parts

    def measure(base: Row, draw: Callable[[], FFN], names: Sequence[str]) -> Iterator[list[Row]]:
        part, what = base["part"], base["what"]
        with torch.autograd.set_multithreading_enabled(what != ONE_THREAD):
            made = variants(draw(), what, base["m"], base["gated"], names)
            rows = bench.timed(base, made, WAYS[part], 1 / 6 if part == "few" else 1.0)
        yield [finished(row) for row in rows]

    def case(part: str, what: str, workload: str, sizes: Shape, names: Sequence[str], draw: Callable[[], FFN]) -> Case:
        m, k, n, gated = sizes
        base = {"part": part, "what": what, "workload": workload, "m": m, "k": k, "n": n, "gated": gated}
        return base, functools.partial(measure, base, draw, names)

    for what, m in HOST_CALLS if "host" in parts else ():
        sizes = m, HIDDEN, NEURONS
        draw = functools.partial(testing.make, WORKLOAD, *sizes, device=on, dtype=torch.bfloat16)
        names = ("auto", "row", "union", "function") if what == FORWARD else ("auto", "union", "function")
        yield case("host", what, WORKLOAD, (*sizes, True), names, draw)
    for gated, (shapes, tokens) in LAYERS.items() if "few" in parts else ():
        for (k, n), m in itertools.product(shapes, (m for m in tokens if m <= FEW)):
            draw = functools.partial(tune.draw, PATTERN, FEW, k, n, on)
            yield case("few", FORWARD, PATTERN, (m, k, n, gated), ("auto",), draw)


def finished(row: Row) -> Row:
    """The row as files have it: times over dense's, and what "auto" ran."""
    row["layer"] = row.pop("variant")
    chooses = row.pop("requested", "") == "auto"
    row["chosen"] = row.pop("eager_strategy", "") if chooses else ""
    row.pop("strategy", None)
    for way in ("host", "queued", "waited"):
        gain = row.pop(way, None)
        row[f"{way}_over_dense"] = 1 / gain if gain and row["layer"] != "dense" else None
    return row
