"""Benchmarks of one layer: ``TimedLayer`` is a workload, ``Forward`` and ``Training`` have its variants."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from profiling.bench import variants
from profiling.bench.protocol import Ceilings, Device
from profiling.bench.variants import Verdict, compared, verdict, whole
from twell import testing
from twell._activation import RELU, Activation
from twell._runtime import geometry
from twell.choose import plan, rates
from twell.commands.timing import Call
from twell.nn import SparseFFN, SparseGatedMLP, SparseMLP, set_down_layout
from twell.testing import FFN, Case, Comparison, Errors
from twell.testing.calls import caller, linear

TRAINING = ("train", "train_overflow")
OPS = ("ffn", "decode", *TRAINING)
STRATEGIES = plan.STRATEGIES
# what --screen and --invariant time, too, as ``testing.sparse_output`` names it
SCREENED, INVARIANT = rates.SCREENED, "row+invariant"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Bytes of a stored value.
ITEM = 2

# Tokens per gate GEMM in counting non-zeros.
_COUNTED = 16384

# Tokens after which recorded layers repeat, and tokens around their middle that decode is timed and checked on.
RECORDED = 4096
DECODED = 512
# Least calls of a recording of decode, to make it long beside the events that time it.
CALLS = 32

# Of the i-th copy of x, the leaves, x first, and y with its graph.
Pass = Callable[[int], tuple[tuple[Tensor, ...], Tensor]]


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
    memory: bool = False
    eager: bool = True
    seconds: float = 3.0
    energy_seconds: float = 5.0


@dataclass
class Variant(variants.Variant):
    """One call to time of a layer.

    figures: by strategy, ``executed`` operations, bytes ``moved`` from memory or ``gathered`` through L2, and the
    ``floor`` in seconds. baseline: the suffix after "dense eager" and "dense compiled" in the names of its baselines.
    forward: by strategy, the forward pass of a training step, with its graph.
    """

    flop: float = field(kw_only=True)
    figures: Callable[[str], dict[str, float]] = field(kw_only=True)
    baseline: str | None = None
    forward: Callable[[str], Pass] | None = None


def module_of(problem: FFN, strategy: Any = "auto", gated: bool = True, **settings: Any) -> SparseFFN:
    """The layer as a module, which has the memory of the problem's weights, so the down weight by rows.

    ``strategy``: also a name that only "auto" chooses.
    """
    of_up = (problem.w_gate, problem.b_gate), (problem.w_up, problem.b_up)
    linears = [linear(*each) for each in (*of_up[: 1 + gated], (problem.w_down.t(), problem.b_down))]
    cls: Any = SparseGatedMLP if gated else SparseMLP
    layer: SparseFFN = cls.from_linear(*linears, **settings)
    if isinstance(strategy, str) and "+" in strategy:
        layer._strategy = plan.route_of(strategy)  # type: ignore[assignment]
    else:
        layer.strategy = strategy
    # else eager calls without gradients look at what holds the weight
    set_down_layout(layer, "rows")
    return layer


class TimedLayer:
    """A workload: the problem, copies of its tokens, and counts of non-zeros."""

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

    def compiled_sparse(self) -> Callable[..., Tensor]:
        """``testing.sparse_output`` by "dense", through torch.compile."""
        function = torch.compile(testing.sparse_output, fullgraph=True, dynamic=False)
        return functools.partial(function, compression=self.options.compression, strategy="dense", **self.form)

    def module(self, strategy: Any, problem: FFN | None = None) -> SparseFFN:
        """The layer as users call it, by this strategy; also of a copy of the problem."""
        return module_of(problem or self.problem, strategy, compression=self.options.compression, **self.form)

    def dense(self) -> Iterator[tuple[str, Callable[..., Tensor]]]:
        """The dense functions, with their prefix in names of variants."""
        yield "dense eager", functools.partial(testing.dense_output, **self.form)
        if self.options.compiled is not None:
            yield "dense compiled", functools.partial(self.options.compiled, **self.form)

    def variants(self) -> list[Variant]:
        """Those of calls of all tokens."""
        ffn = Forward(self, [self.problem], self.x, 1, self.copies)
        return [*(ffn.variants("ffn") if "ffn" in self.options.ops else []), *Training(self).variants()]


class Forward:
    """The layer on ``m`` tokens per call: call ``i`` has the i-th of ``x`` and of ``weights``, in turn.

    ``parts`` of ``x`` differ. figures: those of a strategy.
    """

    def __init__(
        self, layer: TimedLayer, weights: Sequence[FFN], x: Sequence[Tensor], parts: int, calls: int, suffix: str = ""
    ) -> None:
        self.layer, self.weights, self.x, self.parts, self.calls, self.suffix = layer, weights, x, parts, calls, suffix
        self.m = len(x[0])
        self.product, self.token_bytes = 2.0 * self.m * layer.n * layer.k, ITEM * self.m * layer.k

    def variants(self, name: str) -> list[Variant]:
        """The variants, dense PyTorch first."""
        shared: dict[str, Any] = {"flop": 3 * self.product, "figures": self.figures}
        found = []
        for dense, function in self.layer.dense():
            by = functools.partial(self.dense, function)
            found.append(Variant(f"{dense}{self.suffix}", by, self.calls, "", self.verify, **shared))
        for requested in self.layer.options.strategies:
            one = Variant(name, self.sparse, self.calls, requested, self.verify, baseline=self.suffix, **shared)
            found.append(one)
        return found

    def dense(self, function: Callable[[FFN], Tensor], strategy: object = "") -> Call:
        x, weights = self.x, self.weights
        return lambda i: (function(weights[i % len(weights)]._replace(x=x[i % len(x)])),)

    def sparse(self, strategy: Any) -> Call:
        x, modules = self.x, [self.layer.module(strategy, each) for each in self.weights]
        return lambda i: (modules[i % len(modules)](x[i % len(x)]),)

    @functools.cached_property
    def answer(self) -> tuple[Tensor, Errors, float]:
        """y of all tokens in float64, the errors of dense PyTorch, and the number of roundings behind them."""
        problem, form = self.weights[0]._replace(x=torch.cat([*self.x[: self.parts]])), self.layer.form
        right = testing.float64_output(problem, **form)
        dense = whole(self.dense(functools.partial(testing.dense_output, **form)), self.parts)
        return right, testing.errors(dense, right), testing.count_roundings(problem, **form)

    def verify(self, strategy: str, call: Call, outputs: tuple[Tensor, ...]) -> Verdict:
        """Check y of all tokens against float64, and the bits of the last call with its copy of the operands."""
        y, first = whole(call, self.parts), (self.calls - 1) % self.parts * self.m
        found, red = verdict(compared(y, *self.answer))
        if not red and strategy and not torch.equal(outputs[0], y[first : first + self.m]):
            red = "other bits with a copy of the operands"
        return found, red

    def figures(self, strategy: str) -> dict[str, float]:
        """Operations and gathered bytes of a strategy, and its floor: gate_pack's and that of what follows it."""
        layer = self.layer
        if strategy in ("", "dense"):
            floor = layer.seconds(3 * self.product, 2 * layer.token_bytes + 3 * layer.weight_bytes)
            return {"executed": 3 * self.product, "floor": floor}
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
        copies = layer.device.copies_for(layer.weight_bytes)
        self.calls = copies * math.ceil(CALLS / copies)
        self.weights = [self.window, *(self.window.map(Tensor.clone) for _ in range(copies - 1))]

    def variants(self, m: int) -> list[Variant]:
        """The variants with ``m`` tokens per call."""
        parts = len(self.window.x) // m
        return _Few(self, self.window.x[: parts * m].split(m), parts).variants("decode")


class _Few(Forward):
    """Calls of decode with one number of tokens."""

    def __init__(self, decode: Decode, x: Sequence[Tensor], parts: int) -> None:
        super().__init__(decode.layer, decode.weights, x, parts, decode.calls, " decode")
        active = decode.active[: parts * self.m].view(parts, self.m, -1)
        # per call: non-zeros, neurons that fire, and neurons on the lists of its tiles
        self.nonzeros = float(active.sum()) / parts
        self.fired = float(active.any(1).sum()) / parts
        self.listed = float(tiles_of(active).any(1).sum()) / parts

    def figures(self, strategy: str) -> dict[str, float]:
        """Operations and bytes of a strategy, and its floor."""
        layer, dense = self.layer, strategy in ("", "dense")
        listed = self.listed * geometry.TOKEN_TILE
        pairs = {"union": listed, SCREENED: listed}.get(strategy, self.nonzeros)
        pairs, rows = (float(self.m * layer.n), layer.n) if dense else (pairs, self.fired)
        gate: float = layer.weight_bytes
        if strategy == SCREENED:
            # read, and written and read in int8, and at least the rows that fire
            gate = layer.weight_bytes * (1 + 2 / ITEM) + rows * layer.k * ITEM
        moved = 2 * self.token_bytes + gate + 2 * rows * layer.k * ITEM
        # memory traffic bounds the smallest batches
        floor = layer.seconds(3 * self.product if dense else self.product, moved)
        return {"executed": self.product + 2 * 2 * pairs * layer.k, "moved": moved, "floor": floor}


class Training:
    """Steps of a layer for one upstream gradient: forward and backward, with the gradients of x and of all weights."""

    def __init__(self, layer: TimedLayer) -> None:
        self.layer, self.problem = layer, layer.problem
        self.steps = [(op, name) for op in TRAINING if op in layer.options.ops for name in self._strategies(op)]
        if self.steps:
            upstream = testing.real_upstream(layer.problem)
            self.dy = [upstream, *(upstream.clone() for _ in range(layer.copies - 1))]

    def variants(self) -> list[Variant]:
        """Dense steps, then the sparse ones; "dense" is also compiled."""
        if not self.steps:
            return []
        found = [self._variant(f"{name} train", self._through(function)) for name, function in self.layer.dense()]
        for op, requested in self.steps:
            found.append(self._variant(op, self._by, requested, self._check))
            if requested == "dense" and self.layer.options.compiled is not None:
                compiled = self._through(self.layer.compiled_sparse())
                found.append(self._variant(f"{op} compiled", compiled, requested, self._check))
        return found

    def _strategies(self, op: str) -> list[str]:
        """The distinct strategies of training; if the pattern does not fit, the sparse path is ``train_overflow``'s."""
        if op == "train_overflow":
            return [] if self.layer.fits else ["union"]
        sparse = "union" if self.layer.fits else "dense"
        names = [name for name in self.layer.options.strategies if name != INVARIANT]
        return list(dict.fromkeys(sparse if name in ("row", "union") else name for name in names))

    def _variant(self, name: str, forward: Callable[[Any], Pass], requested: str = "", check: Any = None) -> Variant:
        copies = self.layer.copies

        def by(strategy: Any) -> Call:
            one = forward(strategy)

            def step(i: int) -> tuple[Tensor, ...]:
                leaves, y = one(i % copies)
                return torch.autograd.grad(y, leaves, self.dy[i % copies])

            return step

        flop, baseline = 9 * self.layer.product, " train" if requested else None
        return Variant(
            name, by, copies, requested, check, flop=flop, figures=self._figures, baseline=baseline, forward=forward
        )

    def _figures(self, strategy: str) -> dict[str, float]:
        layer = self.layer
        # x twice, dy, y and dx; weights twice, and their gradients. Sparse arithmetic is the gate's product alone
        moved = 5 * layer.token_bytes + 9 * layer.weight_bytes
        return {"floor": layer.seconds(layer.product * (9 if strategy in ("", "dense") else 1), moved)}

    def _through(self, function: Callable[[FFN], Tensor]) -> Callable[[Any], Pass]:
        @torch.enable_grad()
        def forward(i: int) -> tuple[tuple[Tensor, ...], Tensor]:
            leaves = self.problem._replace(x=self.layer.x[i]).map(lambda t: t.detach().requires_grad_())
            return tuple(leaves.present(gated=True).values()), function(leaves)

        return lambda strategy: forward

    def _by(self, strategy: Any) -> Pass:
        module = self.layer.module(strategy)
        parameters = tuple(module.parameters())

        @torch.enable_grad()
        def forward(i: int) -> tuple[tuple[Tensor, ...], Tensor]:
            x = self.layer.x[i].detach().requires_grad_()
            return (x, *parameters), module(x)

        return forward

    def _check(self, strategy: str, call: Call, outputs: tuple[Tensor, ...]) -> Verdict:
        """Check all gradients, without and with that of the sum of |h|, on tokens that no rounding decides."""
        layer, form, found = self.layer, self.layer.form, dict[str, Comparison]()
        clean = testing.off_kinks(self.problem, threshold=form["threshold"])
        operands = clean._replace(w_down=clean.w_down.t()).present(gated=True) | {"dy": self.dy[0]}
        plain = Case("layer", layer.m, layer.k, layer.n, exact=False, wants="all", strategy=strategy)
        dtype = next(name for name, each in DTYPES.items() if each == clean.x.dtype)
        # modules have no names that only "auto" chooses
        own = {"compression": layer.options.compression, "dtype": dtype, "module": "+" not in strategy}
        plain = plain.replace(**own, **form)
        for case in (plain, plain.replace(aux=True, l1=True)):
            made = caller(case, operands)()
            gradients = {name: made[name] for name in case.wanted} | {"w_down": made["w_down"].t()}
            each = testing.compare_gradients(clean, self.dy[0], gradients, case.dl1, **form)
            found |= {f"{name}{' with l1' * case.l1}": comparison for name, comparison in each.items()}
        return verdict(found)


def tiles_of(active: Tensor) -> Tensor:
    """[..., M, N] as tiles of 128 tokens, the last one padded with False: [tiles, 128, N]."""
    m, n = active.shape[-2:]
    return F.pad(active, (0, 0, 0, -m % geometry.TOKEN_TILE)).view(-1, geometry.TOKEN_TILE, n)
