"""``python -m profiling.bench ffn,decode,train``: one layer by strategies beside dense PyTorch, eager and compiled.

Time a gated layer in bfloat16 by each of --strategy beside dense PyTorch, eager and compiled, in CUDA graphs and in
eager calls, many in a row ("queued") or waited for. Only right results have a time: errors against float64 beside those
of dense PyTorch, and the bits of replays; for layers of others an error that `twell tune` would allow.

ffn             the forward pass of all tokens; all calls share the weights, so small weights stay in L2
decode          the same on each number of --m-decode, from the middle of the workload, with several copies of the
                weights in turn, whose gates exceed L2
train           forward and backward, with the gradients of x and of all weights; "row" and "union" are the same
model, moe, float8, sae, firing, host, adapters, portable, generate   others, which have a --help of their own

Layers of others are timed beside these if they can be imported: quack's fused ReGLU, and the paper's own code, from a
checkout of SakanaAI/sparser-faster-llms in PYTHONPATH, which CUDA graphs do not capture.

--workload: a name; nnz=29,skew=1, parameters of which nnz is required; or real:FOLDER, real:FOLDER/3, recorded layers
(python -m profiling.record), of their own sizes

columns of the table:
requested, strategy   of --strategy, and what "auto" ran of it in graphs; eager_strategy: what it ran in eager calls
ms, queued_ms         medians of graphs and of eager calls in a row; waited_ms: of eager calls that are waited for
speedup_dense         the time of the faster dense layer, faster_dense, over ms; *_speedup: the same of eager calls
floor_ms              the least time of the products and bytes that the strategy needs, by the GPU's measured rates
error, worst          in norm and of the worst row, over dense PyTorch's; in training of the furthest gradient
kept_bytes            that a training step keeps for backward; peak_bytes: the peak of a call
"""

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from profiling.bench import others
from profiling.bench.workloads import EXPLAINED, Source, parse
from profiling.harness import Bench, Case, Row, Settled, Variant, Verdict, Way, agrees, ratio, verdict, whole
from twell import testing
from twell.choose import plan, rates
from twell.commands import tune
from twell.commands.request import RequestError, at_least
from twell.commands.timing import Call
from twell.nn.layers import SparseFFN, SparseGatedMLP, SparseMLP
from twell.nn.models import set_down_layout
from twell.runtime import geometry
from twell.testing import FFN, WORKLOADS, Comparison
from twell.testing.calls import caller, linear

# Tokens, hidden size and neurons on a GPU and on a CPU, and tokens of decode.
SIZES, CPU_SIZES = (16384, testing.PAPER_HIDDEN, testing.PAPER_NEURONS), (512, 256, 1408)
FEW = (1, 8, 16, 64, 128, 256)
COMPILE = ("default", "max-autotune-no-cudagraphs", "none")
SCREENED = rates.SCREENED
# Weight rows read from L2 by all multiprocessors of an H200 (132, 1,980 MHz): 7.2 to 7.5 TB/s in a streaming read.
L2_TBS = 7.3
# Bytes of a value; tokens of a gate product that is counted; tokens of recorded layers before they repeat.
ITEM, COUNTED, RECORDED = 2, 16384, 4096
# Tokens that decode is timed and checked on, and least calls of its recording, beside whose time events are short.
DECODED, CALLS = 512, 32

GRAPH = Way("graph", "ms", "speedup_dense")
EAGER = [Way(how, f"{how}_ms", f"{how}_speedup", share=0.5) for how in ("queued", "waited")]
SHOWN = (
    "workload", "tokens", "nnz", "variant", "requested", "strategy", "ms", "floor_ms", "speedup_dense",
    "faster_dense", "queued_ms", "queued_speedup", "waited_ms", "waited_speedup", "eager_strategy", "error", "worst",
    "kept_bytes", "peak_bytes",
)  # fmt: skip


def module_of(problem: FFN, strategy: Any = "auto", gated: bool = True) -> SparseFFN:
    """The layer as a module of the problem's very weights, by any strategy, also by one that only "auto" chooses."""
    of_up = (problem.w_gate, problem.b_gate), (problem.w_up, problem.b_up)
    linears = [linear(*each) for each in (*of_up[: 1 + gated], (problem.w_down.t(), problem.b_down))]
    cls: Any = SparseGatedMLP if gated else SparseMLP
    layer: SparseFFN = cls.from_linear(*linears)
    if isinstance(strategy, str) and "+" in strategy:
        layer._strategy = plan.route_of(strategy)  # type: ignore[assignment]
    else:
        layer.strategy = strategy
    # else eager calls without gradients look at what holds the weight
    set_down_layout(layer, "rows")
    return layer


def compiled(mode: str, dense: Callable[..., Tensor] = testing.dense_output) -> Callable[..., Tensor] | None:
    """A dense layer through torch.compile; None if the mode is "none"."""
    if mode == "none":
        return None
    # each number of tokens and each size of a recorded layer is compiled separately
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(dense, fullgraph=True, dynamic=False, mode=None if mode == "default" else mode)


class Firing(NamedTuple):
    """Of a call: non-zeros, neurons of each tile of 128 tokens, summed over tiles, and neurons that any token fires."""

    nonzeros: float
    listed: float
    fired: float


def firing(active: Tensor) -> Firing:
    """Of bool [..., M, N]: the sums over all but the last two dimensions."""
    m, n = active.shape[-2:]
    tiles = F.pad(active, (0, 0, 0, -m % geometry.TOKEN_TILE)).view(-1, geometry.TOKEN_TILE, n)
    return Firing(*(float(each.sum()) for each in (active, tiles.any(1), active.any(-2))))


class Layer:
    def __init__(self, problem: FFN, bench: Bench, dense: Callable[..., Tensor] | None) -> None:
        self.problem, self.bench = problem, bench
        self.m, self.k = problem.x.shape
        self.n = problem.w_gate.shape[0]
        # others have no biases
        self.plain = not any(each is not None for each in (problem.b_gate, problem.b_up, problem.b_down))
        parts = [firing(self.fires(x)) for x in problem.x.split(COUNTED)]
        nonzeros, listed, fired = zip(*parts)
        self.firing = Firing(sum(nonzeros), sum(listed), max(fired))
        self.dense: dict[str, Callable[..., Tensor]] = {"dense eager": testing.dense_output}
        if dense is not None:
            self.dense["dense compiled"] = dense

    def fires(self, x: Tensor) -> Tensor:
        return F.linear(x, self.problem.w_gate, self.problem.b_gate) > 0

    def row(self, source: Source, tokens: int, nonzeros: float) -> Row:
        sizes = {"m": self.m, "k": self.k, "n": self.n}
        return {"workload": source.name, "tokens": tokens, **sizes, "nnz": nonzeros / tokens}

    def floor(self, flop: float, moved: float, gathered: float = 0.0) -> float:
        """Milliseconds: the largest of arithmetic, compulsory memory traffic and rows from L2."""
        ceilings = self.bench.ceilings
        return 1e3 * max(flop / ceilings.flops, moved / ceilings.memory, gathered / L2_TBS / 1e12)


class Forward:
    """Calls with the i-th of ``x``, of which ``parts`` differ, and of ``weights``; ``fires`` are mean counts of one."""

    def __init__(
        self, layer: Layer, weights: Sequence[FFN], x: Sequence[Tensor], parts: int, calls: int, fires: Firing
    ) -> None:
        self.layer, self.weights, self.x, self.parts, self.calls, self.fires = layer, weights, x, parts, calls, fires
        self.m = len(x[0])

    def variants(self, name: str, strategies: Sequence[str], suffix: str = "") -> Iterator[Variant]:
        calls = {f"{dense}{suffix}": (self.of_dense(function), True) for dense, function in self.layer.dense.items()}
        for other, (make, captured) in others.ALL.items():
            made = [make(p.w_gate, p.w_up, p.w_down, "relu", False) for p in self.weights]
            if None not in made and self.layer.plain:
                calls[f"{other}{suffix}"] = self.in_turn([each[0] for each in made if each]), captured
        for said, (call, captured) in calls.items():
            by = functools.partial(lambda call, _: call, call)
            check = self.verify if said.startswith("dense") else self.near
            yield Variant(said, by, self.calls, "", check, self.note, captured=captured)
        for requested in strategies:
            yield Variant(name, self.of_sparse, self.calls, requested, self.verify, self.note)

    def of_dense(self, function: Callable[[FFN], Tensor]) -> Call:
        x, weights = self.x, self.weights
        return lambda i: (function(weights[i % len(weights)]._replace(x=x[i % len(x)])),)

    def in_turn(self, layers: Sequence[Callable[[Tensor], Tensor]]) -> Call:
        return lambda i: (layers[i % len(layers)](self.x[i % len(self.x)]),)

    def of_sparse(self, strategy: Any) -> Call:
        return self.in_turn([module_of(each, strategy) for each in self.weights])

    @functools.cached_property
    def answer(self) -> tuple[Tensor, testing.Errors, float]:
        """y of all tokens in float64, the errors of dense PyTorch, and the number of roundings behind them."""
        problem = self.weights[0]._replace(x=torch.cat([*self.x[: self.parts]]))
        right = testing.float64_output(problem)
        dense = whole(self.of_dense(testing.dense_output), self.parts)
        return right, testing.errors(dense, right), testing.count_roundings(problem)

    def verify(self, strategy: str, call: Call, outputs: tuple[Tensor, ...]) -> Verdict:
        """Check y of all tokens against float64, and the bits of the last call with its copy of the operands."""
        (right, bar, roundings), y = self.answer, whole(call, self.parts)
        found, red = verdict({"y": Comparison(testing.errors(y, right), bar, roundings)})
        first = (self.calls - 1) % self.parts * self.m
        if not red and strategy and not torch.equal(outputs[0], y[first : first + self.m]):
            red = "other bits with a copy of the operands"
        return found, red

    def near(self, strategy: str, call: Call, outputs: tuple[Tensor, ...]) -> Verdict:
        """Check a layer of others, which may round more than dense PyTorch, by the budget of ``twell tune``."""
        right, bar, roundings = self.answer
        found = Comparison(testing.errors(whole(call, self.parts), right), bar, roundings)
        error = found.ours.frobenius
        return {"y": found}, "" if error <= tune.MOST_ERROR[False] else f"differs from float64 by {error:.1%}"

    def note(self, row: Row, settled: Settled, errors: dict[str, Comparison]) -> None:
        note_errors(row, errors)
        row["floor_ms"] = self.floor(settled.strategy)
        if self.layer.bench.given["memory"] and not row["red"]:
            row["peak_bytes"] = self.layer.bench.device.peak(settled.now)

    def floor(self, strategy: str) -> float:
        """Milliseconds of the gate product and of what follows it; of dense, of all at once."""
        layer = self.layer
        product, tokens, weight = 2.0 * self.m * layer.n * layer.k, ITEM * self.m * layer.k, ITEM * layer.n * layer.k
        if strategy in ("", "dense"):
            return layer.floor(3 * product, 2 * tokens + 3 * weight)
        by_tiles = strategy in ("union", SCREENED)
        # products in int8 take half the time; candidates come on top
        gate = layer.floor(product, tokens + weight) / (2 if strategy == SCREENED else 1)
        rows = self.fires.listed if by_tiles else self.fires.nonzeros
        flop = 4.0 * rows * layer.k * geometry.TOKEN_TILE if by_tiles else 0.0
        return gate + layer.floor(flop, tokens + 2 * self.fires.fired * layer.k * ITEM, 2.0 * rows * layer.k * ITEM)


def few_tokens(layer: Layer, tokens: Sequence[int]) -> Iterator[tuple[int, Forward]]:
    """Calls on the tokens around the middle of a workload, with copies of its weights, whose gates exceed L2."""
    count = min(DECODED, layer.m)
    middle = max(0, (min(RECORDED, layer.m) - count) // 2)
    window = layer.problem.rows(middle, middle + count)
    active = layer.fires(window.x)
    # a sparse call reads only some rows of the other two weights: the gates alone must exceed the cache
    copies = layer.bench.device.copies_for(ITEM * layer.n * layer.k)
    weights = [window, *(window.map(Tensor.clone) for _ in range(copies - 1))]
    for m in tokens:
        parts = count // m
        of = Firing(*(each / parts for each in firing(active[: parts * m].view(parts, m, -1))))
        yield m, Forward(layer, weights, window.x[: parts * m].split(m), parts, copies * math.ceil(CALLS / copies), of)


class Training:
    """Steps of a layer for one upstream gradient: forward and backward, with the gradients of x and of all weights."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.problem = layer, layer.problem
        self.copies = layer.bench.device.copies_for(ITEM * layer.m * layer.k)
        both = self.problem.x, testing.real_upstream(self.problem)
        self.x, self.dy = ([each, *(each.clone() for _ in range(self.copies - 1))] for each in both)

    def variants(self, op: str, strategies: Sequence[str]) -> Iterator[Variant]:
        for name, function in self.layer.dense.items():
            yield self.variant(f"{name} {op}", functools.partial(self.of_dense, function))
        p = self.problem
        right = self.step(self.of_dense(self.layer.dense["dense eager"], ""))
        # of the gradient of x: those of weights may be laid out otherwise
        check = agrees(lambda i: right(i)[:1], True)
        for name, (make, captured) in others.ALL.items():
            if self.layer.plain and (made := make(p.w_gate, p.w_up, p.w_down, "relu", True)):
                variant = self.variant(f"{name} {op}", functools.partial(self.forward, *made))
                yield dataclasses.replace(variant, captured=captured, check=check)
        for requested in dict.fromkeys("union" if name == "row" else name for name in strategies):
            yield self.variant(op, self.of_sparse, requested)

    def step(self, one: Callable[[int], tuple[tuple[Tensor, ...], Tensor]]) -> Call:

        def call(i: int) -> tuple[Tensor, ...]:
            leaves, y = one(i % self.copies)
            return torch.autograd.grad(y, leaves, self.dy[i % self.copies])

        return call

    def forward(self, call: Callable[[Tensor], Tensor], weights: Sequence[Tensor], _: object = None) -> Any:
        """Leaves and y of a pass on the i-th tokens."""

        @torch.enable_grad()
        def forward(i: int) -> tuple[tuple[Tensor, ...], Tensor]:
            x = self.x[i].detach().requires_grad_()
            return (x, *weights), call(x)

        return forward

    def variant(self, name: str, forward: Callable[[Any], Any], requested: str = "") -> Variant:
        def by(strategy: Any) -> Call:
            return self.step(forward(strategy))

        def note(row: Row, settled: Settled, errors: dict[str, Comparison]) -> None:
            note_errors(row, errors)
            layer, one = self.layer, forward(settled.strategy)
            # x twice, dy, y and dx; weights twice, and their gradients. Sparse arithmetic is the gate's product alone
            moved = ITEM * layer.k * (5 * layer.m + 9 * layer.n)
            products = 9 if settled.strategy in ("", "dense") else 1
            row["floor_ms"] = layer.floor(products * 2.0 * layer.m * layer.n * layer.k, moved)
            if not row["red"]:
                row["kept_bytes"] = layer.bench.device.kept(lambda i: one(i)[1])
                row["peak_bytes"] = layer.bench.device.peak(settled.now)

        return Variant(name, by, self.copies, requested, self.check if requested else None, note)

    def of_dense(self, function: Callable[[FFN], Tensor], strategy: object) -> Any:
        layer = self.problem.map(lambda t: t.detach().requires_grad_())
        _, *weights = layer.present(gated=True).values()
        return self.forward(lambda x: function(layer._replace(x=x)), weights)

    def of_sparse(self, strategy: Any) -> Any:
        module = module_of(self.problem, strategy)
        return self.forward(module, tuple(module.parameters()))

    def check(self, strategy: str, call: Call, outputs: tuple[Tensor, ...]) -> Verdict:
        """Check all gradients, without and with that of the sum of |h|, on tokens that no rounding decides."""
        layer, found = self.layer, dict[str, Comparison]()
        clean = testing.off_kinks(self.problem)
        operands = clean._replace(w_down=clean.w_down.t()).present(gated=True) | {"dy": self.dy[0]}
        plain = testing.Case("layer", layer.m, layer.k, layer.n, exact=False, wants="all", strategy=strategy)
        # modules have no names that only "auto" chooses
        plain = plain.replace(module="+" not in strategy)
        for case in (plain, plain.replace(aux=True, l1=True)):
            made = caller(case, operands)()
            gradients = {name: made[name] for name in case.wanted} | {"w_down": made["w_down"].t()}
            each = testing.compare_gradients(clean, self.dy[0], gradients, case.dl1)
            found |= {f"{name}{' with l1' * case.l1}": comparison for name, comparison in each.items()}
        return verdict(found)


def note_errors(row: Row, compared: dict[str, Comparison]) -> None:
    """Of several tensors those largest relative to dense's."""
    for kind, said in (("frobenius", "error"), ("worst_row", "worst")) if compared else ():
        over = [(ratio(getattr(c.ours, kind), getattr(c.dense, kind)), c) for c in compared.values()]
        row[said], most = max(over, key=lambda each: each[0])
        row |= {kind: getattr(most.ours, kind), f"dense_{kind}": getattr(most.dense, kind)}


def words(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated list of names."""

    def parse_words(text: str) -> list[str]:
        if wrong := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {wrong[0]!r}")
        return text.split(",")

    return parse_words


def counts(text: str) -> list[int]:
    """An argparse type: a comma-separated list of integers of at least 1."""
    return [at_least(1)(item) for item in text.split(",")]


OPS = ("ffn", "decode", "train")
STRATEGIES = (*plan.STRATEGIES, SCREENED)
OPTIONS = {
    "-m --tokens": (counts, [], f"numbers of tokens ({SIZES[0]}; {CPU_SIZES[0]} on a CPU)"),
    "-k --hidden": (at_least(8), None, f"hidden size ({SIZES[1]}; {CPU_SIZES[1]})"),
    "-n --neurons": (at_least(8), None, f"neurons ({SIZES[2]}; {CPU_SIZES[2]})"),
    "--workload": (str, [], f"{', '.join(WORKLOADS)} (all), {'=, '.join(EXPLAINED)}= or real: see above"),
    "--strategy": (words(STRATEGIES), [["auto"]], f"{', '.join(STRATEGIES)}"),
    "--m-decode": (counts, [], f"tokens of decode, whose -m is the same ({','.join(map(str, FEW))})"),
    "--compile": (COMPILE, None, "torch.compile's mode for the dense layer (default; none on a CPU)"),
    "--no-eager": (bool, False, "graphs alone, without eager calls of ffn and train"),
    "--memory": (bool, False, "peak memory of inference; training always measures it"),
}
SECONDS = 3.0


def cases(bench: Bench) -> Iterator[Case]:
    given = bench.arguments
    on_cpu, sources = bench.device.torch_device.type == "cpu", parse(given.workload)
    sizes = CPU_SIZES if on_cpu else SIZES
    k, n = given.hidden or sizes[1], given.neurons or sizes[2]
    # of lists of lists all items, each once
    several = given.tokens, given.m_decode, given.ops, given.strategy
    tokens, decoded, ops, strategies = (list(dict.fromkeys(itertools.chain(*each))) for each in several)
    if ops == ["decode"] and not decoded:
        tokens, decoded = [], tokens
    tokens = tokens or [sizes[0]]
    decoded = decoded or [m for m in FEW if m <= min(tokens)]
    if given.m_decode and "decode" not in ops:
        raise RequestError(f"--m-decode is for decode: expected it among the operations, got {', '.join(ops)}")
    if "decode" in ops and max(decoded) > (most := min(DECODED, *tokens)):
        raise RequestError(f"--m-decode must be from 1 to {most} of {min(tokens)} tokens, got {max(decoded)}")
    if not given.workload and not (sources := [source for source in sources if source.possible(n)]):
        raise RequestError(f"{n} neurons are too few for the named workloads: expected --workload")
    mode = given.compile or ("none" if on_cpu else "default")
    dense, ways = compiled(mode), [GRAPH, *(() if given.no_eager else EAGER)]
    names = [source.name for source in sources]
    bench.given |= {"workload": names, "m": tokens, "k": k, "n": n, "ops": ops, "compile": mode}

    def measure(source: Source, m: int) -> Iterator[list[Row]]:
        problem = source.load(m, k, n, device=bench.device.torch_device, dtype=torch.bfloat16)
        layer = Layer(problem, bench, dense)
        base = layer.row(source, layer.m, layer.firing.nonzeros)
        if "ffn" in ops:
            copies = bench.device.copies_for(ITEM * layer.m * layer.k)
            x = [problem.x, *(problem.x.clone() for _ in range(copies - 1))]
            forward = Forward(layer, [problem], x, 1, copies, layer.firing)
            yield bench.timed(base, forward.variants("ffn", strategies), ways)
            del forward, x
        if "train" in ops:
            yield bench.timed(base, Training(layer).variants("train", strategies), ways)
        for few, forward in few_tokens(layer, decoded) if "decode" in ops else ():
            row = layer.row(source, few, forward.fires.nonzeros)
            yield bench.timed(row, forward.variants("decode", strategies, " decode"), [GRAPH])

    for source in sources:
        for m in tokens:
            row = {"workload": source.name, "variant": "any", "tokens": m, "k": k, "n": n}
            yield row, functools.partial(measure, source, m)
