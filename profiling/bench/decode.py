"""The gated layer on a few tokens, with weights that are not in L2: decode of generated text."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from profiling.bench.layers import ITEM, SCREENED, TimedLayer, Variant, Verdict, tiles_of
from twell import testing
from twell._runtime import geometry
from twell.commands.timing import Call
from twell.testing import FFN, Comparison, Errors

# Tokens after which recorded layers repeat, and tokens around their middle that are timed and checked.
RECORDED = 4096
DECODED = 512

# Least calls of a recording, to make it long beside the events that time it.
CALLS = 32


class Decode:
    """The tokens around the middle of a workload, and copies of its weights, whose gates exceed the L2 cache."""

    def __init__(self, layer: TimedLayer) -> None:
        self.layer = layer
        tokens = min(DECODED, layer.m)
        middle = max(0, (min(RECORDED, layer.m) - tokens) // 2)
        self.window = layer.problem.rows(middle, middle + tokens)
        self.active = layer.fires(self.window.x)
        # per token
        self.nnz = float(self.active.sum()) / tokens
        self.overflowing = float(layer.overflows[middle : middle + tokens].sum()) / tokens
        # a sparse call reads only some rows of the other two weights: the gates alone must exceed the cache
        self.copies = layer.device.copies_for(layer.weight_bytes)
        self.calls = self.copies * math.ceil(CALLS / self.copies)
        self.weights = [self.window, *(self.window.map(Tensor.clone) for _ in range(self.copies - 1))]

    def variants(self, m: int) -> list[Variant]:
        """The variants with ``m`` tokens per call: dense PyTorch first, then each strategy."""
        call = _Calls(self, m)
        options = self.layer.options
        chosen = [call.dense(name, function) for name, function in self.layer.dense()]
        chosen += [call.sparse(requested) for requested in options.strategies]
        for variant in chosen:
            variant.copies = self.calls
        return chosen


class _Calls:
    """The variants of one number of tokens."""

    def __init__(self, decode: Decode, m: int) -> None:
        self.decode, self.layer, self.m = decode, decode.layer, m
        n, k = self.layer.n, self.layer.k
        self.product, self.token_bytes = 2.0 * m * n * k, ITEM * m * k
        self.parts = len(decode.window.x) // m
        active = decode.active[: self.parts * m].view(self.parts, m, n)
        # per call: non-zeros, neurons that fire, and neurons on the lists of its tiles
        self.nonzeros = float(active.sum()) / self.parts
        self.fired = float(active.any(1).sum()) / self.parts
        self.listed = float(tiles_of(active).any(1).sum()) / self.parts

    @functools.cached_property
    def answer(self) -> tuple[Tensor, Errors, float]:
        """y of all tokens in float64, the errors of dense PyTorch with ``m`` tokens per call, and their roundings."""
        window, form = self.decode.window, self.layer.form
        right = testing.float64_output(window, **form)
        dense = testing.errors(self.whole(functools.partial(testing.dense_output, **form)), right)
        return right, dense, testing.count_roundings(window, **form)

    def whole(self, function: Callable[[FFN], Tensor]) -> Tensor:
        """y of all tokens, ``m`` per call."""
        window, m = self.decode.window, self.m
        return torch.cat([function(window.rows(first, first + m)) for first in range(0, len(window.x), m)])

    def at(self, i: int) -> FFN:
        """The problem of the i-th call."""
        first = i % self.parts * self.m
        weights = self.decode.weights[i % self.decode.copies]
        return weights._replace(x=self.decode.window.x[first : first + self.m])

    def figures(self, strategy: str) -> dict[str, Any]:
        """Operations and bytes of a strategy, and its floor."""
        layer = self.layer
        listed = self.listed * geometry.TOKEN_TILE
        pairs = {"dense": float(self.m * layer.n), "union": listed, SCREENED: listed}.get(strategy, self.nonzeros)
        rows = layer.n if strategy == "dense" else self.fired
        gate: float = layer.weight_bytes
        if strategy == SCREENED:
            # read, and written and read in int8, and at least the rows that fire
            gate = layer.weight_bytes * (1 + 2 / ITEM) + rows * layer.k * ITEM
        moved = 2 * self.token_bytes + gate + 2 * rows * layer.k * ITEM
        # memory traffic bounds the smallest batches
        floor = layer.seconds(3 * self.product if strategy == "dense" else self.product, moved)
        return {"executed": self.product + 2 * 2 * pairs * layer.k, "moved": moved, "floor": floor}

    def dense(self, name: str, function: Callable[..., Tensor]) -> Variant:
        call = lambda i: (function(self.at(i)),)  # noqa: E731
        return Variant(f"{name} decode", call, 3 * self.product, **self.figures("dense"))

    def sparse(self, requested: str) -> Variant:
        variant = Variant("decode", lambda i: (), 3 * self.product, baseline=" decode", requested=requested)

        def by(strategy: Any) -> Call:
            function = self.layer.sparse(strategy)
            return lambda i: (function(self.at(i)),)

        def figures(strategy: str) -> dict[str, Any]:
            return self.figures(strategy) | {"verify": functools.partial(self.verify, strategy)}

        return self.layer.by_strategy(variant, by, figures)

    def verify(self, strategy: str, outputs: tuple[Tensor, ...]) -> Verdict:
        """Check y of all tokens, and the bits of the last call with its copy of the weights."""
        right, dense, roundings = self.answer
        first = (self.decode.calls - 1) % self.parts * self.m
        last = slice(first, first + self.m)
        y = self.whole(self.layer.sparse(strategy))
        comparison = Comparison(testing.errors(y, right), dense, roundings)
        if not comparison.ok:
            return {"y": comparison}, str(comparison)
        same = torch.equal(outputs[0], y[last])
        return {"y": comparison}, "" if same else "other bits with a copy of the weights"
