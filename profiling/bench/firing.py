"""``python -m profiling.bench firing``: inference of few tokens by the share of neurons that fire.

Time a layer on few tokens by "auto" beside dense PyTorch, and quack if it can be imported, in CUDA graphs. Layers have
the sizes of models; x and weights are normal numbers, and each gate fires by chance. Copies of the weights, used in
turn, are larger than L2. A floor is the time to read the first projection, and of the others the rows that any token
fires, at the rate of a copy.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from profiling.bench import others
from profiling.harness import Bench, Case, Row, Settled, Variant, Way, beside, near
from twell import testing
from twell.commands.request import at_least
from twell.commands.timing import Call
from twell.testing import Comparison

# K, N, whether there is a gate
LAYERS = ((4096, 16384, False), (2048, 8192, False), (4096, 14336, True), (2048, 5632, True))
# Calls of a graph, whose launch takes the GPU microseconds.
CALLS = 16
SHARES = (0.01, 0.05, 0.1, 0.14, 0.5, 1.0)
SHOWN = ("k", "n", "gated", "share", "m", "fired", "us", "error", "floor_us")
OPTIONS = {"--m": (at_least(1), [1, 4, 8, 16, 32], "tokens")}
SECONDS = 0.03
# The first projection, up if there is a gate, and down.
Weights = tuple[Tensor, Tensor | None, Tensor]


def weights(k: int, n: int, gated: bool, share: float, on: torch.device) -> Weights:
    """Weights whose column 0 of the first projection makes that share of gates positive."""

    def drawn(scale: float) -> Tensor:
        return torch.randn(n, k, device=on, dtype=torch.bfloat16) * scale

    first = drawn(k**-0.5)
    first[:, 0] = 9.0 if share == 1 else NormalDist().inv_cdf(share)
    return first, drawn(k**-0.5) if gated else None, drawn(n**-0.5)


def dense(x: Tensor, first: Tensor, up: Tensor | None, down: Tensor, strategy: object = "") -> Tensor:
    gate = torch.relu(F.linear(x, first))
    return F.linear(gate * (gate if up is None else F.linear(x, up)), down.t())


def sparse(x: Tensor, first: Tensor, up: Tensor | None, down: Tensor, strategy: Any) -> Any:
    if up is not None:
        return twell.sparse_gated_ffn(x, first, up, down.t(), strategy=strategy)
    return twell.sparse_ffn(x, first, down.t(), activation="relu2", strategy=strategy)


def by(way: Callable[..., Tensor], x: Tensor, layers: list[Weights]) -> Callable[[Any], Call]:
    return lambda strategy: lambda i: (way(x, *layers[i % len(layers)], strategy=strategy),)


def note(row: Row, settled: Settled, errors: dict[str, Comparison]) -> None:
    row["errors"] = errors["y"].ours.frobenius


def cases(bench: Bench) -> Iterator[Case]:
    on = bench.device.torch_device

    def measure(k: int, n: int, gated: bool, share: float) -> Iterator[list[Row]]:
        copies = bench.device.copies_for(2 * k * n)
        layers = [weights(k, n, gated, share, on) for _ in range(copies)]
        fused = [others.quack(*layer, "relu" if gated else "relu2", False) for layer in layers]
        for m in bench.arguments.m:
            x = torch.randn(m, k, device=on)
            x[:, 0] = 1
            x = x.bfloat16()
            # of the last call, which is checked
            active = F.linear(x, layers[-1][0]) > 0
            fired = float(active.any(0).float().mean())
            wide: Any = [t if t is None else t.double() for t in (x, *layers[-1])]
            right = dense(*wide)
            check = near(right, testing.errors(dense(x, *layers[-1]), right), int(active.sum()))
            calls = copies * math.ceil(CALLS / copies)
            made = {"dense": (by(dense, x, layers), ""), "auto": (by(sparse, x, layers), "auto")}
            if None not in fused:
                made["quack"] = (lambda _: lambda i: (fused[i % copies][0](x),)), ""  # type: ignore[index]  # noqa: B023
            variants = [Variant(name, of, calls, asked, check, note) for name, (of, asked) in made.items()]
            floor = 2 * k * n * (1 + fired * (2 if gated else 1)) / bench.ceilings.memory * 1e6
            base = {"k": k, "n": n, "gated": gated, "share": share, "m": m, "fired": fired, "floor_us": floor}
            yield [beside(base, bench.timed(base, variants, [Way("graph", "us", unit=1e3)]), "us", "errors")]

    for layer, share in itertools.product(LAYERS, SHARES):
        yield dict(zip(("k", "n", "gated", "share"), (*layer, share))), partial(measure, *layer, share)
