"""Benchmarks of the forward pass of one layer.

``TimedLayer`` is a workload with its operands and counts, ``Variant`` one call to time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twell
from profiling.bench.protocol import Ceilings, Device
from twell import testing
from twell._activation import RELU, Activation
from twell._runtime import geometry
from twell.commands.timing import Call
from twell.nn import SparseFFN, SparseGatedMLP, SparseMLP, set_down_layout
from twell.strategy import plan, tables
from twell.testing import FFN, Comparison, Errors

TRAINING = ("train", "train_overflow")
OPS = ("ffn", "decode", *TRAINING)
STRATEGIES = plan.STRATEGIES
# what --screen and --invariant time, too, as ``testing.sparse_output`` names it
SCREENED, INVARIANT = tables.SCREENED, "row+invariant"

# Bytes of a stored value.
ITEM = 2

# Eager calls before "auto" is recorded. It measures calls 0, 1, 2, 4 and decides by them at 1, 2, 4, 8.
SETTLING = 9

# Tokens per gate GEMM in counting non-zeros.
_COUNTED = 16384

Verdict = tuple[dict[str, Comparison], str]
Verify = Callable[[tuple[Tensor, ...]], Verdict]


@dataclass(frozen=True)
class Options:
    """The choices for each workload.

    ``compiled`` is ``testing.dense_output`` through torch.compile, or None.
    """

    ops: tuple[str, ...]
    strategies: tuple[str, ...] = ("auto",)
    compression: int = 8
    decoded: tuple[int, ...] = ()
    compiled: Callable[..., Tensor] | None = None
    activation: Activation = RELU
    kernels: bool = False
    memory: bool = False
    eager: bool = True
    seconds: float = 3.0
    energy_seconds: float = 5.0


@dataclass
class Variant:
    """One call to time: ``call(i)`` works on the i-th copy of the operands and returns its outputs, y first.

    ``eager``: replaces ``call`` outside of recordings. ``verify``: returns the errors and the fault, "" if they are
    within the budget. ``also``: what timed eager calls run, if that is another strategy, and its check. ``baseline``:
    the suffix after "dense eager" and "dense compiled" in the names of its baselines.
    ``forward``: the forward pass of a training step, with its graph. ``settle``: returns the fields that depend on the
    strategy; it may raise.
    """

    name: str
    call: Call
    flop: float
    floor: float = 0.0  # seconds
    gathered: float = 0.0  # bytes through L2
    verify: Verify | None = None
    baseline: str | None = None
    forward: Callable[[int], Tensor] | None = None
    eager: Call | None = None
    also: tuple[Call, Verify] | None = None
    settle: Callable[[], dict[str, Any]] | None = None
    requested: str = ""
    strategy: str = ""
    eager_strategy: str = ""
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


def module_of(problem: FFN, strategy: Any = "auto", gated: bool = True, **settings: Any) -> SparseFFN:
    """The layer as a module, which has the memory of the problem's weights, so the down weight by rows.

    ``strategy``: also a name that only "auto" chooses.
    """
    n, k = problem.w_gate.shape
    layer = (SparseGatedMLP if gated else SparseMLP)(k, n, device="meta", dtype=problem.x.dtype, **settings)
    first, up = (problem.w_gate, problem.b_gate), (problem.w_up, problem.b_up)
    tensors = {"gate_proj": first, "up_proj": up} if gated else {"up_proj": first}
    for name, (weight, bias) in {**tensors, "down_proj": (problem.w_down.t(), problem.b_down)}.items():
        projection = getattr(layer, name)
        projection.weight = nn.Parameter(weight)
        projection.bias = None if bias is None else nn.Parameter(bias)
    # else eager calls without gradients look at what holds the weight
    set_down_layout(layer, "rows")
    if isinstance(strategy, str) and "+" in strategy:
        layer._strategy = plan.route_of(strategy)  # type: ignore[assignment]
    else:
        layer.strategy = strategy
    return layer


def gradients_of(layer: SparseFFN, x: Tensor, dy: Tensor, dl1: float = 0.0) -> dict[str, Tensor]:
    """The gradients of x and of all weights by the names of a problem; ``dl1``: that of the sum of |h|."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        if dl1:
            y, aux = layer(leaf, return_aux=True)
            # aux.l1 is a mean over tokens
            outputs, given = [y, aux.l1], [dy, torch.full_like(aux.l1, dl1 * len(dy))]
        else:
            outputs, given = [layer(leaf)], [dy]
    tensors = {"x": leaf}
    for kind in ("weight", "bias"):
        for name in ("gate", "up", "down"):
            parameter = getattr(layer.get_submodule(f"{name}_proj"), kind)
            if parameter is not None:
                tensors[f"{kind[0]}_{name}"] = parameter
    found = dict(zip(tensors, torch.autograd.grad(outputs, tuple(tensors.values()), given)))
    return found | {"w_down": found["w_down"].t()}


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
        self.nonzeros, self.union_rows, self.overflows = self._count()
        self.overflowing = int(self.overflows.sum())
        self.fits = self.nonzeros <= geometry.hybrid_capacity(self.m, self.n)
        self.packed_bytes = self.overflowing * geometry.TILE * ITEM
        self.packed_bytes += self.m * geometry.tiles(self.n) * geometry.words_per_tile(options.compression) * 4

    @property
    def form(self) -> dict[str, Any]:
        """The activation as arguments of functions."""
        return self.options.activation.options()

    def fires(self, x: Tensor) -> Tensor:
        """Which neurons these tokens fire."""
        return self.options.activation.after(F.linear(x, self.problem.w_gate)) != 0

    def _count(self) -> tuple[int, int, Tensor]:
        """Non-zeros, neurons that tiles of 128 tokens fire, summed over tiles, and overflowing tiles by token."""
        nonzeros, union_rows, overflows, tiles = 0, 0, [], geometry.tiles(self.n)
        for start in range(0, self.m, _COUNTED):
            fires = self.fires(self.problem.x[start : start + _COUNTED])
            counts = F.pad(fires, (0, tiles * geometry.TILE - self.n)).view(-1, tiles, geometry.TILE).sum(2)
            nonzeros += int(counts.sum())
            union_rows += int(tiles_of(fires).any(1).sum())
            overflows.append((counts > geometry.capacity(self.options.compression)).sum(1))
        return nonzeros, union_rows, torch.cat(overflows)

    def seconds(self, flop: float, moved: float, gathered: float = 0.0) -> float:
        """The floor in seconds: the largest of arithmetic, compulsory memory traffic and the gather."""
        ceilings = self.ceilings
        return max(flop / ceilings.flops, moved / ceilings.memory, gathered / ceilings.l2)

    @functools.cached_property
    def answer(self) -> tuple[Tensor, Errors, float]:
        """The layer's y in float64, the errors of dense PyTorch, and the number of roundings behind them."""
        right = testing.float64_output(self.problem, **self.form)
        errors = testing.errors(testing.dense_output(self.problem, **self.form), right)
        return right, errors, testing.count_roundings(self.problem, **self.form)

    def verify_output(self, outputs: tuple[Tensor, ...]) -> Verdict:
        """Check y against float64."""
        right, dense, roundings = self.answer
        found = Comparison(testing.errors(outputs[0], right), dense, roundings)
        return {"y": found}, "" if found.ok else str(found)

    def sparse(self, strategy: Any, compiled: bool = False) -> Callable[..., Tensor]:
        """``testing.sparse_output`` by this strategy."""
        function = torch.compile(testing.sparse_output, fullgraph=True, dynamic=False) if compiled else None
        options = {"compression": self.options.compression, "strategy": strategy, **self.form}
        return functools.partial(function or testing.sparse_output, **options)

    def module(self, strategy: Any) -> SparseFFN:
        """The layer as users call it, by this strategy."""
        return module_of(self.problem, strategy, compression=self.options.compression, **self.form)

    def dense(self) -> Iterator[tuple[str, Callable[..., Tensor]]]:
        """The dense functions, with their prefix in names of variants."""
        yield "dense eager", functools.partial(testing.dense_output, **self.form)
        if self.options.compiled is not None:
            yield "dense compiled", functools.partial(self.options.compiled, **self.form)

    def by_strategy(
        self,
        variant: Variant,
        by: Callable[[Any], Call],
        figures: Callable[[str], dict[str, Any]],
    ) -> Variant:
        """Make the variant the call ``by(strategy)``; "auto" settles first. ``figures(strategy)``: its fields."""

        def settle() -> dict[str, Any]:
            name = variant.requested
            if name == "auto":
                call, name, eager = self._auto(by)
                # outside of recordings "auto" may run another strategy, by its choice or to measure
                fields: dict[str, Any] = {"call": call, "eager": by(name), "eager_strategy": eager}
                if eager != name:
                    fields["also"] = by(eager), figures(eager).get("verify", variant.verify)
            else:
                fields = {"call": by(name), "eager_strategy": name}
            return {"strategy": name, **fields, **figures(name)}

        variant.settle = settle
        return variant

    def _auto(self, by: Callable[[Any], Call]) -> tuple[Call, str, str]:
        """The call after some that let "auto" settle, and its choices in recordings and in eager calls."""
        site = twell.AutoStrategy()
        call = by(site)
        for i in range(SETTLING):
            call(i)
            self.device.wait()
        # graphs are free of the host's time, which the choice of eager calls counts
        self.device.record(call, 1)
        chosen = {choice.graph: choice.strategy for choice in site.explain()}
        # no choice: a device on which "auto" is always dense
        eager = chosen.get("", "dense")
        return call, chosen.get("captured", eager), eager


class Inference:
    """The forward pass."""

    def __init__(self, layer: TimedLayer) -> None:
        self.layer, self.problem = layer, layer.problem
        self.flop = 3 * layer.product
        self.dense_floor = layer.seconds(self.flop, 2 * layer.token_bytes + 3 * layer.weight_bytes)

    def variants(self) -> list[Variant]:
        """The variants, dense PyTorch first."""
        layer = self.layer
        if "ffn" not in layer.options.ops:
            return []
        chosen = [self._dense(name, function) for name, function in layer.dense()]
        return chosen + [self._sparse(requested) for requested in layer.options.strategies]

    def _dense(self, name: str, function: Callable[..., Tensor]) -> Variant:
        """The whole layer in dense PyTorch; what torch.compile makes is checked, too."""
        call: Call = lambda i: (function(self.problem._replace(x=self.layer.x[i])),)  # noqa: E731
        verify = self.layer.verify_output if name == "dense compiled" else None
        return Variant(name, call, self.flop, self.dense_floor, verify=verify, executed=self.flop)

    def _sparse(self, requested: str) -> Variant:
        """The whole layer by one strategy."""
        layer = self.layer

        def by(strategy: Any) -> Call:
            module = layer.module(strategy)
            return lambda i: (module(layer.x[i % layer.copies]),)

        variant = Variant("ffn", lambda i: (), self.flop, verify=layer.verify_output)
        variant.baseline, variant.requested = "", requested
        return layer.by_strategy(variant, by, self._figures)

    def _figures(self, strategy: str) -> dict[str, float]:
        """Operations and gathered bytes of a strategy, and its floor: gate_pack's and that of what follows it."""
        layer = self.layer
        if strategy == "dense":
            return {"executed": self.flop, "gathered": 0.0, "floor": self.dense_floor}
        by_tiles = strategy in ("union", SCREENED)
        rows = layer.union_rows if by_tiles else layer.nonzeros
        gathered = 2.0 * rows * layer.k * ITEM
        executed = 4.0 * rows * layer.k * (geometry.TOKEN_TILE if by_tiles else 1)
        moved = layer.packed_bytes + 2 * (layer.token_bytes + layer.weight_bytes)
        gate = layer.seconds(layer.product, layer.token_bytes + layer.weight_bytes + layer.packed_bytes)
        # products in int8 take half the time; candidates come on top
        floor = gate / 2 if strategy == SCREENED else gate
        floor += layer.seconds(executed if by_tiles else 0, moved, gathered)
        return {"executed": executed + layer.product, "gathered": gathered, "floor": floor}


def tiles_of(active: Tensor) -> Tensor:
    """[..., M, N] as tiles of 128 tokens, the last one padded with False: [tiles, 128, N]."""
    m, n = active.shape[-2:]
    return F.pad(active, (0, 0, 0, -m % geometry.TOKEN_TILE)).view(-1, geometry.TOKEN_TILE, n)
