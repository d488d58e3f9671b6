"""Training steps of one layer: forward and backward, with the gradients of x and of all weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from profiling.bench.layers import INVARIANT, TRAINING, TimedLayer, Variant, Verdict, Verify, gradients_of
from twell import testing
from twell.commands.timing import Call
from twell.testing import FFN, Comparison

# Upstream gradient of the sum of |h| in the check of a step, exact in bf16.
L1 = 0.25

BASELINE = " train"

# Of the i-th copy of x, the leaves, x first, and y with its graph.
Forward = Callable[[int], tuple[tuple[Tensor, ...], Tensor]]


class Training:
    """Steps of a layer for one upstream gradient."""

    def __init__(self, layer: TimedLayer) -> None:
        self.layer, self.problem = layer, layer.problem
        self.asked = [op for op in TRAINING if op in layer.options.ops]
        self.flop = 9 * layer.product
        if self.asked:
            upstream = testing.real_upstream(layer.problem)
            self.dy = [upstream, *(upstream.clone() for _ in range(layer.copies - 1))]

    def variants(self) -> list[Variant]:
        """Dense steps, then the sparse ones."""
        steps = [(op, requested) for op in self.asked for requested in self._strategies(op)]
        if not steps:
            return []
        chosen = [self._dense(f"{name}{BASELINE}", function) for name, function in self.layer.dense()]
        for op, requested in steps:
            chosen += self._steps(op, requested)
        return chosen

    def _strategies(self, op: str) -> list[str]:
        """The distinct strategies of training; if the pattern does not fit, the sparse path is ``train_overflow``'s."""
        if op == "train_overflow":
            return [] if self.layer.fits else ["union"]
        sparse = "union" if self.layer.fits else "dense"
        names = [name for name in self.layer.options.strategies if name != INVARIANT]
        return list(dict.fromkeys(sparse if name in ("row", "union") else name for name in names))

    def _steps(self, op: str, requested: str) -> list[Variant]:
        """A step by one strategy; for "dense" also compiled."""
        layer = self.layer

        def figures(strategy: str) -> dict[str, Any]:
            forward = self._by(strategy)
            return {
                "floor": self._floor(sparse=strategy != "dense"),
                "verify": self._verify(strategy),
                "forward": lambda i: forward(i)[1],
            }

        def by(strategy: Any) -> Call:
            forward = self._by(strategy)
            return lambda i: self._step(forward, i % layer.copies)

        variant = Variant(op, lambda i: (), self.flop, baseline=BASELINE, requested=requested)
        chosen = [layer.by_strategy(variant, by, figures)]
        if requested == "dense" and layer.options.compiled is not None:
            compiled = self._dense(f"{op} compiled", layer.sparse("dense", compiled=True))
            compiled.baseline, compiled.verify = BASELINE, self._verify("dense")
            compiled.requested = compiled.strategy = "dense"
            chosen.append(compiled)
        return chosen

    def _floor(self, sparse: bool) -> float:
        layer = self.layer
        # x twice, dy, y and dx; weights twice, and their gradients. Sparse arithmetic is the gate's product alone
        moved = 5 * layer.token_bytes + 9 * layer.weight_bytes
        return layer.seconds(layer.product if sparse else self.flop, moved)

    def _dense(self, name: str, function: Callable[[FFN], Tensor]) -> Variant:
        """Forward and backward through ``function(problem)``."""
        forward = self._through(function)
        step = lambda i: self._step(forward, i)  # noqa: E731
        return Variant(name, step, self.flop, self._floor(sparse=False), forward=lambda i: forward(i)[1])

    def _through(self, function: Callable[[FFN], Tensor]) -> Forward:
        @torch.enable_grad()
        def forward(i: int) -> tuple[tuple[Tensor, ...], Tensor]:
            leaves = self.problem._replace(x=self.layer.x[i]).map(lambda t: t.detach().requires_grad_())
            return tuple(leaves.present(gated=True).values()), function(leaves)

        return forward

    def _by(self, strategy: Any) -> Forward:
        module = self.layer.module(strategy)
        parameters = tuple(module.parameters())

        @torch.enable_grad()
        def forward(i: int) -> tuple[tuple[Tensor, ...], Tensor]:
            x = self.layer.x[i].detach().requires_grad_()
            return (x, *parameters), module(x)

        return forward

    def _step(self, forward: Forward, i: int) -> tuple[Tensor, ...]:
        """The gradients of x and of all weights."""
        leaves, y = forward(i)
        return torch.autograd.grad(y, leaves, self.dy[i])

    def _verify(self, strategy: str) -> Verify:
        """Check all gradients, without and with that of the sum of |h|, on tokens that no rounding decides."""

        def verify(outputs: tuple[Tensor, ...]) -> Verdict:
            form = self.layer.form
            clean = testing.off_kinks(self.problem, threshold=form["threshold"])
            found: dict[str, Comparison] = {}
            module = self.layer.module(strategy)
            for dl1, suffix in ((0.0, ""), (L1, " with l1")):
                gradients = gradients_of(module, clean.x, self.dy[0], dl1)
                compared = testing.compare_gradients(clean, self.dy[0], gradients, dl1, **form)
                found |= {f"{name}{suffix}": comparison for name, comparison in compared.items()}
            wrong = [f"{name}: {comparison}" for name, comparison in found.items() if not comparison.ok]
            return found, "; ".join(wrong)

        return verify
