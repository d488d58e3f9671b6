"""Benchmarks of one layer without gradients: gate_pack, the operators that read packed gates, and whole layers.

``TimedLayer`` is a workload with its operands and counts, ``Variant`` one call to time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell import _auto, ops, testing, tuning
from twell._activation import RELU, Activation
from twell._runtime import geometry
from twell.commands.bench import fp8
from twell.commands.bench.protocol import Call, Ceilings, Device
from twell.testing import FFN, Comparison, Errors

INFERENCE = ("gate_pack", "up_down", "up_down_union", "ffn", "down", "sparse_ffn")
TRAINING = ("train", "train_forward", "train_backward", "train_overflow", "sparse_train")
OPS = (*INFERENCE, "decode", *TRAINING)
WITHOUT_GATE = ("down", "sparse_ffn", "sparse_train")
STRATEGIES = tuning.STRATEGIES
# what --screen and --invariant time, too, as ``testing.sparse_output`` names it
SCREENED, INVARIANT = tuning.SCREENED, "row+invariant"

# Bytes of a stored value.
ITEM = 2

# Eager calls before "auto" is recorded. It measures calls 0, 1, 2, 4 and decides by them at 1, 2, 4, 8.
SETTLING = 9

# Tokens per gate GEMM in counting non-zeros.
_COUNTED = 16384

Packed = tuple[Tensor, Tensor, Tensor]
Verdict = tuple[dict[str, Comparison], str]
Verify = Callable[[tuple[Tensor, ...]], Verdict]


@dataclass(frozen=True)
class Options:
    """The choices for each workload.

    ``compiled`` is ``testing.dense_output`` through torch.compile, or None; ``fp8`` is ``fp8.output``, itself or
    through torch.compile, or None.
    """

    ops: tuple[str, ...]
    strategies: tuple[str, ...] = ("auto",)
    compression: int = 8
    decoded: tuple[int, ...] = ()
    compiled: Callable[..., Tensor] | None = None
    fp8: Callable[..., Tensor] | None = None
    activation: Activation = RELU
    check: bool = True
    kernels: bool = False
    memory: bool = False
    seconds: float = 3.0
    energy_seconds: float = 5.0


@dataclass
class Variant:
    """One call to time: ``call(i)`` works on the i-th copy of the operands and returns its outputs, y first.

    ``op``: the operations it is timed for, separated by commas. ``eager``: replaces ``call`` outside of recordings.
    ``verify``: returns the errors and the fault, "" if they are within the budget. ``baseline``: the suffix after
    "dense eager" and "dense compiled" in the names of its baselines. ``forward``: the forward pass of a training step,
    with its graph. ``settle``: returns the fields that depend on the strategy; it may raise.
    """

    name: str
    op: str
    call: Call
    flop: float
    floor: float = 0.0  # seconds
    gathered: float = 0.0  # bytes through L2
    verify: Verify | None = None
    baseline: str | None = None
    forward: Callable[[int], Tensor] | None = None
    eager: Call | None = None
    settle: Callable[[], dict[str, Any]] | None = None
    requested: str = ""
    strategy: str = ""
    executed: float | None = None  # operations
    moved: float | None = None  # bytes from memory
    copies: int = 0  # calls of a recording; 0: one for each copy of x

    @property
    def key(self) -> str:
        return f"{self.name} {self.requested}".rstrip()

    def settled(self) -> None:
        """Set the fields that depend on the strategy."""
        if self.settle is not None:
            for field, value in self.settle().items():
                setattr(self, field, value)

    def now(self, i: int) -> tuple[Tensor, ...]:
        """A call outside of recordings."""
        return (self.eager or self.call)(i)


class TimedLayer:
    """A workload: the problem, copies of its tokens, counts of non-zeros, and dense PyTorch's errors."""

    def __init__(self, problem: FFN, options: Options, device: Device, ceilings: Ceilings) -> None:
        self.problem, self.options, self.device, self.ceilings = problem, options, device, ceilings
        self.m, self.k = problem.x.shape
        self.n = problem.w_gate.shape[0]
        # operations of one product; bytes of x, of one weight
        self.product = 2.0 * self.m * self.n * self.k
        self.token_bytes, self.weight_bytes = ITEM * self.m * self.k, ITEM * self.n * self.k
        self.copies = device.copies_for(self.token_bytes)
        self.x = [problem.x, *(problem.x.clone() for _ in range(self.copies - 1))]
        self.nonzeros, self.overflows = self._count()
        self.overflowing = int(self.overflows.sum())
        self.fits = self.nonzeros <= geometry.hybrid_capacity(self.m, self.n)
        self.packed_bytes = self.overflowing * geometry.TILE * ITEM
        self.packed_bytes += self.m * geometry.tiles(self.n) * geometry.words_per_tile(options.compression) * 4
        self._answers: dict[bool, tuple[Tensor, Errors, float]] = {}

    @property
    def form(self) -> dict[str, Any]:
        """The activation as arguments of functions."""
        return self.options.activation.options()

    def fires(self, x: Tensor) -> Tensor:
        """Which neurons these tokens fire."""
        return self.options.activation.after(F.linear(x, self.problem.w_gate)) != 0

    def _count(self) -> tuple[int, Tensor]:
        """The number of non-zeros, and of overflowing tiles by token."""
        nonzeros, overflows, tiles = 0, [], geometry.tiles(self.n)
        for start in range(0, self.m, _COUNTED):
            fires = self.fires(self.problem.x[start : start + _COUNTED])
            counts = F.pad(fires, (0, tiles * geometry.TILE - self.n)).view(-1, tiles, geometry.TILE).sum(2)
            nonzeros += int(counts.sum())
            overflows.append((counts > geometry.capacity(self.options.compression)).sum(1))
        return nonzeros, torch.cat(overflows)

    def seconds(self, flop: float, moved: float, gathered: float = 0.0) -> float:
        """The floor in seconds: the largest of arithmetic, compulsory memory traffic and the gather."""
        ceilings = self.ceilings
        return max(flop / ceilings.flops, moved / ceilings.memory, gathered / ceilings.l2)

    def answer(self, gated: bool) -> tuple[Tensor, Errors, float]:
        """The layer's y in float64, the errors of dense PyTorch, and the number of roundings behind them."""
        if gated not in self._answers:
            form = self.form
            right = testing.float64_output(self.problem, gated=gated, **form)
            errors = testing.errors(testing.dense_output(self.problem, gated=gated, **form), right)
            self._answers[gated] = right, errors, testing.count_roundings(self.problem, gated=gated, **form)
        return self._answers[gated]

    def verify_output(self, gated: bool) -> Verify:
        """Check y against float64."""

        def verify(outputs: tuple[Tensor, ...]) -> Verdict:
            right, dense, roundings = self.answer(gated)
            comparison = Comparison(testing.errors(outputs[0], right), dense, roundings)
            return {"y": comparison}, "" if comparison.ok else str(comparison)

        return verify

    def show_errors(self, outputs: tuple[Tensor, ...]) -> Verdict:
        """The errors of y against float64, which are no fault: fp8 has others than bf16."""
        return self.verify_output(True)(outputs)[0], ""

    def sparse(self, strategy: Any, compiled: bool = False) -> Callable[..., Tensor]:
        """``testing.sparse_output`` by this strategy."""
        function = torch.compile(testing.sparse_output, fullgraph=True, dynamic=False) if compiled else None
        options = {"compression": self.options.compression, "strategy": strategy, **self.form}
        return functools.partial(function or testing.sparse_output, **options)

    def dense(self) -> Iterator[tuple[str, Callable[..., Tensor]]]:
        """The dense functions, with their prefix in names of variants."""
        yield "dense eager", functools.partial(testing.dense_output, **self.form)
        if self.options.compiled is not None:
            yield "dense compiled", functools.partial(self.options.compiled, **self.form)

    def by_strategy(
        self,
        variant: Variant,
        layer: Callable[[Any, int], tuple[Tensor, ...]],
        figures: Callable[[str], dict[str, Any]],
    ) -> Variant:
        """Make the variant call ``layer(strategy, i)``; "auto" settles first. ``figures(strategy)``: its fields."""

        def settle() -> dict[str, Any]:
            passed: Any = variant.requested
            strategy = variant.requested
            if strategy == "auto":
                passed, strategy = self._auto(layer)
            # outside of recordings "auto" may run another strategy to measure
            calls = {"call": functools.partial(layer, passed), "eager": functools.partial(layer, strategy)}
            return {"strategy": strategy, **calls, **figures(strategy)}

        variant.settle = settle
        return variant

    def _auto(self, layer: Callable[[Any, int], tuple[Tensor, ...]]) -> tuple[twell.AutoStrategy, str]:
        """A site after some settling calls, and its choice."""
        site = twell.AutoStrategy()
        for i in range(SETTLING):
            layer(site, i)
            self.device.wait()
        where = self.device.torch_device
        strategy = next((choice.strategy for choice in site.explain() if not choice.graph), "")
        strategy = strategy or _auto.forced(where.type, where.index)
        if not strategy:
            raise RuntimeError('"auto" chooses nothing on this device')
        return site, strategy


class Inference:
    """The forward pass and its parts, with and without gate."""

    def __init__(self, layer: TimedLayer) -> None:
        self.layer, self.problem = layer, layer.problem
        self.asked = [op for op in layer.options.ops if op in INFERENCE]

    def variants(self) -> list[Variant]:
        """The variants, dense PyTorch first."""
        if not self.asked:
            return []
        chosen = [variant for gated in (True, False) for variant in self._dense(gated)]
        chosen.append(self._gemm())
        if "gate_pack" in self.asked:
            chosen.append(self._gate_pack())
        for op, whole, gated in (("up_down", "ffn", True), ("down", "sparse_ffn", False)):
            if op in self.asked:
                chosen.append(self._reader(op, gated))
            if "up_down_union" in self.asked and (gated or "down" in self.asked):
                chosen.append(self._union_reader(gated))
            if whole in self.asked:
                chosen += [self._whole(whole, requested, gated) for requested in self.layer.options.strategies]
        return chosen

    def _dense(self, gated: bool) -> list[Variant]:
        """The whole layer in dense PyTorch, if a requested op has the same y."""
        layer = self.layer
        asked = [op for op in self.asked if op != "gate_pack" and (op not in ("down", "sparse_ffn")) == gated]
        if not asked:
            return []
        flop, floor = self._dense_floor(gated)
        suffix = "" if gated else " non-gated"

        def variant(name: str, function: Callable[..., Tensor]) -> Variant:
            call: Call = lambda i: (function(self.problem._replace(x=layer.x[i]), gated=gated),)  # noqa: E731
            verify = layer.verify_output(gated) if name == "dense compiled" else None
            return Variant(f"{name}{suffix}", asked[0], call, flop, floor, verify=verify, executed=flop)

        chosen = [variant(name, function) for name, function in layer.dense()]
        return [*chosen, self._fp8()] if gated and "ffn" in asked and layer.options.fp8 is not None else chosen

    def _fp8(self) -> Variant:
        """The whole layer with fp8 products, whose error is shown and not judged."""
        layer, function, weights = self.layer, self.layer.options.fp8, fp8.Weights.of(self.problem)
        assert function is not None
        call: Call = lambda i: (function(layer.x[i], weights, layer.options.activation),)  # noqa: E731
        flop = 3 * layer.product
        floor = layer.seconds(flop / fp8.RATE, 2 * layer.token_bytes + 3 * layer.weight_bytes / ITEM)
        return Variant(fp8.NAME, "ffn", call, flop, floor, verify=layer.show_errors, executed=flop)

    def _dense_floor(self, gated: bool) -> tuple[float, float]:
        """Operations of the dense layer, and its floor in seconds."""
        layer, products = self.layer, 3 if gated else 2
        flop = products * layer.product
        return flop, layer.seconds(flop, 2 * layer.token_bytes + products * layer.weight_bytes)

    def _gemm(self) -> Variant:
        layer = self.layer
        floor = layer.seconds(layer.product, layer.token_bytes + layer.weight_bytes + ITEM * layer.m * layer.n)
        call: Call = lambda i: (F.linear(layer.x[i], self.problem.w_gate),)  # noqa: E731
        return Variant("gate GEMM", self.asked[0], call, layer.product, floor, executed=layer.product)

    @property
    def _pack_floor(self) -> float:
        layer = self.layer
        return layer.seconds(layer.product, layer.token_bytes + layer.weight_bytes + layer.packed_bytes)

    def _pack(self, i: int) -> Packed:
        x, compression = self.layer.x[i], self.layer.options.compression
        packed: Packed = ops.gate_pack(
            x, self.problem.w_gate, None, compression, self.layer.options.activation.threshold
        )
        return packed

    def _gate_pack(self) -> Variant:
        flop = self.layer.product
        return Variant(
            "gate_pack", "gate_pack", self._pack, flop, self._pack_floor, verify=self._verify_packed, executed=flop
        )

    def _verify_packed(self, outputs: tuple[Tensor, ...]) -> Verdict:
        words, spill, stats = outputs
        layer, compression = self.layer, self.layer.options.compression
        dense = ops.unpack(words, spill, layer.n, compression)
        activation = layer.options.activation
        right = testing.float64_gate(self.problem, activation.threshold)
        theirs = testing.errors(activation.after(F.linear(self.problem.x, self.problem.w_gate)), right)
        comparison = Comparison(testing.errors(dense, right), theirs, int(right.count_nonzero()))
        if not comparison.ok:
            return {"gate": comparison}, f"gate: {comparison}"
        figures = stats.sum((0, 1)).tolist()
        counts = words.view(layer.m, -1, geometry.words_per_tile(compression))[:, :, 0]
        true = [int((dense != 0).sum()), int((counts > geometry.capacity(compression)).sum())]
        why = "" if figures == true else f"statistics say {figures}, the packed gate has {true}"
        return {"gate": comparison}, why

    @functools.cached_property
    def _packed(self) -> list[Packed]:
        """The packed gate of each copy of the tokens."""
        return [self._pack(i) for i in range(self.layer.copies)]

    def _reader(self, op: str, gated: bool) -> Variant:
        """``up_down`` on packed gates; as "down" without an up projection."""
        flop = (2 if gated else 1) * self.layer.product
        call = functools.partial(self._on_packed, ops.up_down, gated=gated)
        variant = Variant(op, op, call, flop, verify=self.layer.verify_output(gated))
        variant.settle = lambda: self._after_packing("row", gated)
        return variant

    def _union_reader(self, gated: bool) -> Variant:
        """``up_down_union`` on packed gates."""
        name, op = ("up_down_union", "up_down_union") if gated else ("up_down_union non-gated", "up_down_union,down")
        flop = (2 if gated else 1) * self.layer.product
        call = functools.partial(self._on_packed, ops.up_down_union, gated=gated)
        variant = Variant(name, op, call, flop, verify=self._verify_union(gated))
        variant.settle = lambda: self._after_packing("union", gated)
        return variant

    def _after_packing(self, strategy: str, gated: bool) -> dict[str, float]:
        """Pack the gates, and return the figures of their reader."""
        assert len(self._packed) == self.layer.copies
        return self._of_readers(strategy, gated)

    def _on_packed(self, op: Callable[..., tuple[Tensor, ...]], i: int, gated: bool) -> tuple[Tensor, ...]:
        p, packed = self.problem, self._packed[i][:2]
        w_up = p.w_up if gated else None
        options = self.layer.options
        return op(self.layer.x[i], *packed, w_up, p.w_down, None, None, options.compression, options.activation.name)

    def _verify_union(self, gated: bool) -> Verify:
        """Check y, and the sizes of the unions, on which its other figures rest."""

        def verify(outputs: tuple[Tensor, ...]) -> Verdict:
            found, why = self.layer.verify_output(gated)(outputs)
            words, spill, _ = self._pack(0)
            active = ops.unpack(words, spill, self.layer.n, self.layer.options.compression) != 0
            right = tiles_of(active).any(1).sum(1)
            return found, why or ("" if torch.equal(outputs[2].long(), right) else "the sizes of unions are wrong")

        return verify

    @functools.cached_property
    def _union_rows(self) -> int:
        """Neurons that a tile of 128 tokens fires, summed over all tiles, by the operator's own count."""
        words, spill, _ = self._pack(0)
        p, c = self.problem, self.layer.options.compression
        return int(ops.up_down_union(p.x, words, spill, None, p.w_down, None, None, c)[2].sum())

    def _of_readers(self, strategy: str, gated: bool) -> dict[str, float]:
        """Operations and gathered bytes of a strategy after gate_pack, and its floor."""
        layer, projections = self.layer, 2 if gated else 1
        by_tiles = strategy in ("union", SCREENED)
        rows = self._union_rows if by_tiles else layer.nonzeros
        gathered = float(rows) * projections * layer.k * ITEM
        executed = 2.0 * rows * layer.k * projections * (geometry.TOKEN_TILE if by_tiles else 1)
        moved = layer.packed_bytes + projections * (layer.token_bytes + layer.weight_bytes)
        floor = layer.seconds(executed if by_tiles else 0, moved, gathered)
        return {"executed": executed, "gathered": gathered, "floor": floor}

    def _whole(self, name: str, requested: str, gated: bool) -> Variant:
        """A layer's forward pass by one strategy."""
        flop, dense_floor = self._dense_floor(gated)

        def figures(strategy: str) -> dict[str, float]:
            if strategy == "dense":
                return {"executed": flop, "gathered": 0.0, "floor": dense_floor}
            found = self._of_readers(strategy, gated)
            found["executed"] += self.layer.product
            # products in int8 take half the time; candidates come on top
            found["floor"] += self._pack_floor / 2 if strategy == SCREENED else self._pack_floor
            return found

        def call(strategy: Any, i: int) -> tuple[Tensor, ...]:
            problem = self.problem._replace(x=self.layer.x[i % self.layer.copies])
            return (self.layer.sparse(strategy)(problem, gated=gated),)

        variant = Variant(name, name, lambda i: (), flop, verify=self.layer.verify_output(gated))
        variant.baseline, variant.requested = "" if gated else " non-gated", requested
        return self.layer.by_strategy(variant, call, figures)


def tiles_of(active: Tensor) -> Tensor:
    """[..., M, N] as tiles of 128 tokens, the last one padded with False: [tiles, 128, N]."""
    m, n = active.shape[-2:]
    return F.pad(active, (0, 0, 0, -m % geometry.TOKEN_TILE)).view(-1, geometry.TOKEN_TILE, n)
