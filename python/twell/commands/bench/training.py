"""Training steps of one layer: forward and backward, with the gradients of x and of all weights, and their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twell import ops, testing
from twell.commands.bench.layers import INVARIANT, TRAINING, TimedLayer, Variant, Verdict, Verify
from twell.testing import Comparison

# Upstream gradient of the sum of |h| in the check of a step, exact in bf16.
L1 = 0.25

# Ops that are whole steps, and whether the layer has a gate.
_STEPS = (("train", True), ("train_overflow", True), ("sparse_train", False))


class Training:
    """Steps of a layer for one upstream gradient."""

    def __init__(self, layer: TimedLayer) -> None:
        self.layer, self.problem = layer, layer.problem
        self.asked = [op for op in layer.options.ops if op in TRAINING]
        if self.asked:
            upstream = testing.real_upstream(layer.problem)
            self.dy = [upstream, *(upstream.clone() for _ in range(layer.copies - 1))]

    def variants(self) -> list[Variant]:
        """Steps and their parts, each after its dense baselines."""
        chosen: list[Variant] = []
        for op, gated in _STEPS:
            if op not in self.asked or (op == "train_overflow" and self.layer.fits):
                continue
            baseline = " train" if gated else " train non-gated"
            if f"dense eager{baseline}" not in [variant.name for variant in chosen]:
                chosen += [self._dense(f"{name}{baseline}", op, f, gated) for name, f in self.layer.dense()]
            for requested in self._strategies(op):
                chosen += self._steps(op, requested, gated, baseline)
        if self.layer.fits and "train_forward" in self.asked:
            chosen += self._forwards()
        if self.layer.fits and "train_backward" in self.asked:
            chosen.append(self._backward())
        return chosen

    def _strategies(self, op: str) -> list[str]:
        """The distinct strategies of training; if the pattern does not fit, the sparse path is ``train_overflow``'s."""
        if op == "train_overflow":
            return ["union"]
        sparse = "union" if self.layer.fits else "dense"
        names = [name for name in self.layer.options.strategies if name != INVARIANT]
        return list(dict.fromkeys(sparse if name in ("row", "union") else name for name in names))

    def _steps(self, op: str, requested: str, gated: bool, baseline: str) -> list[Variant]:
        """A step by one strategy; for "dense" also compiled."""
        layer = self.layer

        def figures(strategy: str) -> dict[str, Any]:
            function = layer.sparse(strategy)
            return {
                "floor": self._floor(gated, sparse=strategy != "dense"),
                "verify": self._verify(gated, strategy),
                "forward": lambda i: self._forward(function, gated, i)[1],
            }

        def step(strategy: Any, i: int) -> tuple[Tensor, ...]:
            return self._step(layer.sparse(strategy), gated, i % layer.copies)

        variant = Variant(op, op, lambda i: (), self._flop(gated), baseline=baseline, requested=requested)
        chosen = [layer.by_strategy(variant, step, figures)]
        if requested == "dense" and layer.options.compiled is not None:
            compiled = self._dense(f"{op} compiled", op, layer.sparse("dense", compiled=True), gated)
            compiled.baseline, compiled.verify = baseline, self._verify(gated, "dense")
            compiled.requested = compiled.strategy = "dense"
            chosen.append(compiled)
        return chosen

    def _flop(self, gated: bool) -> float:
        return 3 * (3 if gated else 2) * self.layer.product

    def _floor(self, gated: bool, sparse: bool) -> float:
        layer = self.layer
        # x twice, dy, y and dx; weights twice, and their gradients. Sparse arithmetic is the gate's product alone
        moved = 5 * layer.token_bytes + 3 * (3 if gated else 2) * layer.weight_bytes
        return layer.seconds(layer.product if sparse else self._flop(gated), moved)

    def _dense(self, name: str, op: str, function: Callable[..., Tensor], gated: bool) -> Variant:
        """Forward and backward through ``function(problem, gated=)``."""
        return Variant(
            name,
            op,
            lambda i: self._step(function, gated, i),
            self._flop(gated),
            self._floor(gated, sparse=False),
            forward=lambda i: self._forward(function, gated, i)[1],
        )

    def _forwards(self) -> list[Variant]:
        """The forward pass of the gated layer alone, with its saved tensors."""
        layer, suffix = self.layer, " train_forward"

        def variant(name: str, function: Callable[..., Tensor], products: int) -> Variant:
            flop = products * layer.product
            floor = layer.seconds(flop, 2 * layer.token_bytes + 3 * layer.weight_bytes)
            call = lambda i: (self._forward(function, True, i)[1].detach(),)  # noqa: E731
            return Variant(name, "train_forward", call, 3 * layer.product, floor)

        sparse = variant("train_forward", layer.sparse("union"), 1)
        sparse.verify, sparse.baseline = layer.verify_output(True), suffix
        return [*(variant(f"{name}{suffix}", function, 3) for name, function in layer.dense()), sparse]

    def _backward(self) -> Variant:
        """The operators of the gated layer's backward pass alone."""
        layer, weights = self.layer, self.problem[1:]
        dl1 = self.problem.x.new_zeros((), dtype=torch.float32)
        kept: list[Any] = []

        def call(i: int) -> tuple[Tensor, ...]:
            operands = (self.dy[i], dl1, layer.x[i], *weights[:5], *kept[i], True, True, *layer.options.activation)
            gradients: tuple[Tensor, ...] = ops.hybrid_backward(*operands)
            return gradients

        def settle() -> dict[str, Any]:
            last = (layer.options.compression, 0, *layer.options.activation)
            kept[:] = [ops.hybrid_forward(x, *weights, *last)[3:] for x in layer.x]
            return {}

        floor = layer.seconds(0, 3 * layer.token_bytes + 6 * layer.weight_bytes)
        name = "train_backward"
        return Variant(name, name, call, 6 * layer.product, floor, verify=self._verify(True, "union"), settle=settle)

    @torch.enable_grad()
    def _forward(self, function: Callable[..., Tensor], gated: bool, i: int) -> tuple[dict[str, Tensor], Tensor]:
        """The leaves by name, and y of ``function(problem, gated=)`` with its graph."""
        leaves = self.problem._replace(x=self.layer.x[i]).map(lambda t: t.detach().requires_grad_())
        return leaves.present(gated), function(leaves, gated=gated)

    def _step(self, function: Callable[..., Tensor], gated: bool, i: int) -> tuple[Tensor, ...]:
        """The gradients of x and of all weights."""
        tensors, y = self._forward(function, gated, i)
        return torch.autograd.grad(y, tuple(tensors.values()), self.dy[i])

    def _verify(self, gated: bool, strategy: str) -> Verify:
        """Check all gradients, without and with that of the sum of |h|, on tokens that no rounding decides."""

        def verify(outputs: tuple[Tensor, ...]) -> Verdict:
            form = self.layer.form
            clean = testing.off_kinks(self.problem, gated=gated, threshold=form["threshold"])
            found: dict[str, Comparison] = {}
            for dl1, suffix in ((0.0, ""), (L1, " with l1")):
                options = {"compression": self.layer.options.compression, "strategy": strategy, **form}
                gradients = testing.sparse_gradients(clean, self.dy[0], dl1, gated=gated, **options)
                compared = testing.compare_gradients(clean, self.dy[0], gradients, dl1, gated=gated, **form)
                found |= {f"{name}{suffix}": comparison for name, comparison in compared.items()}
            wrong = [f"{name}: {comparison}" for name, comparison in found.items() if not comparison.ok]
            return found, "; ".join(wrong)

        return verify
