"""Time twell's kernels and layers beside dense PyTorch on the named workloads: one run, one machine, interleaved.

    python profiling/bench.py --real-layers FOLDER --out profiling/results/bench.json
    python profiling/bench.py --workload topic29 dense911 --ops ffn --strategy row,union,auto --compile none
    python profiling/bench.py --ops decode --m-decode 1 16 --real-layers FOLDER
    python profiling/bench.py --ops train,train_forward --real-layers FOLDER --out profiling/results/bench.json
    python profiling/bench.py --workload topic29 --ops train --compile none --kernels

Each variant is captured into a CUDA graph that calls it on several copies of the tokens, together larger than the L2
cache. The graphs of a workload are replayed in turn, so that clocks and temperature are the same for all; a time is the
median replay over the number of copies. Nothing is timed before it is right: an error against float64 of more than 1.1
times dense PyTorch's, in norm or in the worst row, or other bits on replay, gives a red row without speed and exit
status 1.

``ffn``, ``sparse_ffn`` (without gate), ``decode``, ``train`` and ``sparse_train`` have a row for each of --strategy.
"auto" is a ``twell.AutoStrategy`` that a few calls have settled before it is captured: the column tells on what.

``decode`` is the gated layer on each number of tokens of --m-decode, the nearest to the middle of those recorded. Here
there are copies of the weights, together larger than L2, which a replay visits in turn. Errors are those of up to 512
tokens, so many at a time.

``train`` is forward and backward of the gated layer, with the gradients of x and of all weights, for a given dy;
``train_forward`` its forward, which keeps what backward needs, ``train_backward`` the operators of its backward;
``sparse_train`` is the layer without gate. "row" and "union" are the same there. Where more is non-zero than the hybrid
format holds, the dense strategy is timed in their place, and the sparse path only by ``train_overflow``. Gradients are
checked on the same tokens, those that rounding would decide made zero (``testing.off_kinks``), with the L1 gradient
too; on the tokens themselves, all replays must give the same bits.

Columns:
  M, nnz        tokens of a call, non-zeros of a token
  strategy      what ran; after "auto" what it settled on
  time, p10-p90 median and spread of one call
  TFLOP/s       operations of the dense computation (2 M N K per product) over time
  executed      TFLOP/s of the operations executed: of the gate GEMM and of what follows it, 2 K a product for each
                non-zero or, by "union", 2 * 128 K for each neuron of each tile of 128 tokens
  TB/s          bytes of the weight rows gathered through L2 over time: 2 K a product for each non-zero or, by "union",
                for each neuron of each tile. Of decode bytes from memory: x, y, and the weights that its tokens need
  floor         share of the time that the larger of arithmetic, memory and gather needs at the measured ceilings; for a
                layer, the sum over gate_pack and what follows
  t/GEMM        time over that of cuBLAS's plain x w_gate^T, which does the same arithmetic as gate_pack
  eager/t, compiled/t   speed-up over the dense layer in eager PyTorch and through torch.compile
  dense/t       speed-up over the faster of these two, and which it is
  error, worst  relative error against float64 in the Frobenius norm and in the worst row, each over dense eager's own;
                of a training step those of the gradient that is worst by that measure
  kept MB       of a training step, what autograd keeps for backward beside x and the weights
  peak MB       of a training step, the most memory above that of its inputs
"""

import argparse
import csv
import dataclasses
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell import ops, testing
from twell._runtime import format, resolve
from twell.testing import FFN, Comparison, Errors

INFERENCE = ("gate_pack", "up_down", "up_down_union", "ffn", "down", "sparse_ffn")
TRAINING = ("train", "train_forward", "train_backward", "train_overflow", "sparse_train")
OPS = (*INFERENCE, "decode", *TRAINING)
STRATEGIES = ("row", "union", "dense", "auto")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ITEM = 2  # bytes of a stored value
TILE = format.TILE

# Weight rows read from L2 by all multiprocessors of an H200 (132, 1,980 MHz): 7.2 to 7.5 TB/s in a streaming read.
L2_TBS = 7.3

# The gradient of the sum of |h| with which a training step is checked, exact in bf16.
L1 = 0.25

# Eager calls before a graph of "auto" is captured. It measures calls 0, 1, 2, 4 and decides by them at 1, 2, 4, 8.
SETTLING = 9

# Tokens after which recorded layers repeat; decode takes those around the middle, and so many for its errors.
RECORDED = 4096
DECODED = 512

# Visits of each copy of the weights in a graph of decode, which else would be as short as the events that time it.
VISITS = 16

Call = Callable[[int], tuple[Tensor, ...]]
Verdict = tuple[dict[str, Comparison], str]


@dataclasses.dataclass
class Ceilings:
    """What the machine can do, measured in this run but for L2: flop/s and bytes/s."""

    flops: float
    memory: float
    l2: float


@dataclasses.dataclass
class Variant:
    """One thing to time: ``call(i)`` works on the i-th copy of the operands and returns its outputs, y first.

    ``eager`` is what runs outside of graphs, where that differs. ``verify`` gives the errors and, where they are too
    large, why it is wrong. ``baseline`` is what follows "dense eager" and "dense compiled" in the names of the variants
    that its time is compared with. ``forward`` is the part of a training step that leaves y and what backward needs.
    ``settle`` fixes what depends on the strategy; it may fail.
    """

    name: str
    call: Call
    flop: float
    floor: float = 0.0  # seconds
    gathered: float = 0.0  # bytes through L2
    verify: Callable[[tuple[Tensor, ...]], Verdict] | None = None
    baseline: str | None = None
    forward: Callable[[int], Tensor] | None = None
    eager: Call | None = None
    settle: Callable[[], None] | None = None
    requested: str = ""
    strategy: str = ""
    executed: float | None = None  # operations
    moved: float | None = None  # bytes from memory
    copies: int = 0  # calls in a graph

    @property
    def key(self) -> str:
        return f"{self.name} {self.requested}".rstrip()

    def now(self, i: int) -> tuple[Tensor, ...]:
        """A call outside of graphs."""
        return (self.eager or self.call)(i)


@dataclasses.dataclass
class Row:
    """One line of the table and of the data. Times are milliseconds; ``red`` says what is wrong, empty if nothing."""

    workload: str
    variant: str
    nnz: float
    overflowing_tiles: float
    red: str = ""
    ms: float | None = None
    min_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    samples: int = 0
    tflops: float | None = None
    l2_gather_gbs: float | None = None
    floor_ms: float | None = None
    floor_share: float | None = None
    over_gemm: float | None = None
    speedup_eager: float | None = None
    speedup_compiled: float | None = None
    frobenius: float | None = None
    worst_row: float | None = None
    dense_frobenius: float | None = None
    dense_worst_row: float | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    # of a training step: errors over dense's own (Frobenius, worst row) by gradient, milliseconds by kernel
    gradients: dict[str, tuple[float, float]] | None = None
    kernels: dict[str, float] | None = None
    tokens: int = 0
    # what was asked for and what ran; empty where there is no choice
    requested: str = ""
    strategy: str = ""
    executed_tflops: float | None = None
    memory_gbs: float | None = None
    # over the faster of eager and compiled dense PyTorch
    speedup_dense: float | None = None
    faster_dense: str = ""


# Timing


class Graph:
    """A captured graph of ``call`` on every copy; ``outputs`` are those of the last. ``warm`` is called before."""

    def __init__(self, call: Call, copies: int, warm: Call | None = None) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(copies):
                (warm or call)(i)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.copies = copies
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(copies):
                self.outputs = call(i)

    def replay(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        return start, end


def measure(graphs: dict[str, Graph], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of one call, by name: replays in turn for about ``seconds``, at least 10 rounds and at most 200."""

    def rounds(count: int) -> dict[str, list[float]]:
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
        order = list(graphs)
        for _ in range(count):
            for name in order:
                events[name].append(graphs[name].replay())
            order = order[1:] + order[:1]  # so that none always follows the same one
        torch.cuda.synchronize()
        return {
            name: [start.elapsed_time(end) / graphs[name].copies for start, end in pairs]
            for name, pairs in events.items()
        }

    rounds(2)
    once = sum(min(times) * graphs[name].copies for name, times in rounds(2).items()) / 1000
    return rounds(max(10, min(200, int(seconds / once))))


def copies_for(bytes_each: int) -> int:
    """How many copies of operands of ``bytes_each`` are at least twice the L2 cache, two or more."""
    return max(2, math.ceil(2 * torch.cuda.get_device_properties().L2_cache_size / bytes_each))


def measure_ceilings(dtype: torch.dtype, l2_tbs: float) -> tuple[Ceilings, str]:
    """Rates of a large matrix product and a large copy, and the machine line read while the GPU is busy."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    graphs = {"gemm": Graph(lambda i: (a @ b,), 2), "copy": Graph(lambda i: (target.copy_(source),), 1)}
    times = {name: statistics.median(samples) / 1000 for name, samples in measure(graphs, 0.5).items()}
    for _ in range(800):
        graphs["gemm"].replay()
    machine = testing.machine_line()
    torch.cuda.synchronize()
    return Ceilings(2 * size**3 / times["gemm"], 2 * source.numel() / times["copy"], l2_tbs * 1e12), machine


def kernel_times(call: Call, copies: int, rounds: int = 5) -> dict[str, float]:
    """Mean milliseconds of each kernel in one call, by symbol, and of all else on the GPU: "torch".

    Events surround every launch; the GPU sleeps until the host has queued the whole call, so they measure no gap.
    """
    original = resolve.resolve
    launches: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def timed(spec: Any) -> Callable[..., None]:
        kernel = original(spec)

        def launch(*arguments: Any) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            kernel(*arguments)
            end.record()
            launches.append((spec.symbol, start, end))

        return launch

    resolve.resolve = timed
    wholes = []
    try:
        for i in range(rounds * copies):
            torch.cuda._sleep(40_000_000)  # 20 ms
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call(i % copies)
            end.record()
            wholes.append((start, end))
            torch.cuda.synchronize()
    finally:
        resolve.resolve = original
    times: dict[str, float] = {}
    for symbol, start, end in launches:
        times[symbol] = times.get(symbol, 0.0) + start.elapsed_time(end) / len(wholes)
    times["torch"] = sum(start.elapsed_time(end) for start, end in wholes) / len(wholes) - sum(times.values())
    return times


def memory(variant: Variant) -> tuple[int, int]:
    """Bytes that the forward pass keeps beside its inputs and y, and the most that a step takes above its inputs."""
    assert variant.forward is not None

    def requested() -> int:
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

    torch.cuda.empty_cache()
    before = requested()
    y = variant.forward(0)
    kept = requested() - before - y.numel() * y.element_size()
    del y
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    variant.now(0)
    return kept, torch.cuda.max_memory_allocated() - before


# What is timed


def reason(error: Exception) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class Bench:
    """The variants of one workload, and how right they are."""

    def __init__(self, name: str, problem: FFN, arguments: argparse.Namespace, ceilings: Ceilings, dense: Any) -> None:
        self.name, self.problem, self.ceilings, self.compiled = name, problem, ceilings, dense
        self.ops, self.compression, self.kernels = arguments.ops, arguments.compression, arguments.kernels
        self.strategies, self.decoded = arguments.strategy, arguments.m_decode
        self.copies = copies_for(problem.x.numel() * ITEM)
        self.x = [problem.x, *(problem.x.clone() for _ in range(self.copies - 1))]
        gate = F.relu(F.linear(problem.x, problem.w_gate))
        right = testing.float64_gate(problem)
        self.gate_errors = testing.errors(gate, right)
        self.m, self.k = problem.x.shape
        self.n = problem.w_gate.shape[0]
        # operations of one product; bytes of x, of one weight
        self.sizes = 2.0 * self.m * self.n * self.k, ITEM * self.m * self.k, ITEM * self.n * self.k
        tiles = format.tiles(self.n)
        counts = F.pad(gate != 0, (0, tiles * TILE - self.n)).view(self.m, tiles, TILE).sum(2)
        self.nonzeros = int(counts.sum())
        self.fits = self.nonzeros <= format.hybrid_capacity(self.m, self.n)
        overflows = (counts > format.capacity(self.compression)).sum(1)
        self.overflowing = int(overflows.sum())
        self.words_bytes = self.m * tiles * format.words_per_tile(self.compression) * 4
        self.gate_answer: Tensor | None = right if "gate_pack" in self.ops else None
        self.answers: dict[bool, Tensor] = {}
        self.dense_errors: dict[bool, Errors] = {}
        if any(op in TRAINING for op in self.ops):
            upstream = testing.real_upstream(problem)
            self.dy = [upstream, *(upstream.clone() for _ in range(self.copies - 1))]
        # tokens around the middle, which of their neurons fire and how many tiles overflow
        tokens = min(DECODED, self.m)
        middle = max(0, (min(RECORDED, self.m) - tokens) // 2)
        self.window = problem.rows(middle, middle + tokens)
        self.window_active, self.window_overflowing = (t[middle : middle + tokens] for t in (gate != 0, overflows))
        self.weights: list[FFN] = []
        scored = ("up_down", "up_down_union", "ffn", "down", "sparse_ffn", "train_forward")
        of_output = [op for op in self.ops if op in scored]
        for gated in {op not in ("down", "sparse_ffn") for op in of_output}:
            self.answers[gated] = testing.float64_output(problem, gated=gated)
            self.dense_errors[gated] = testing.errors(testing.dense_output(problem, gated=gated), self.answers[gated])

    def seconds(self, flop: float, moved: float, gathered: float = 0.0) -> float:
        """The floor: the largest of what arithmetic, compulsory memory traffic and the gather take."""
        ceilings = self.ceilings
        return max(flop / ceilings.flops, moved / ceilings.memory, gathered / ceilings.l2)

    def variants(self) -> list[Variant]:
        m, n = self.m, self.n
        product, token_bytes, weight_bytes = self.sizes
        packed_bytes = self.words_bytes + self.overflowing * TILE * ITEM
        p, c, x = self.problem, self.compression, self.x
        chosen: list[Variant] = []

        inferred = {op not in ("down", "sparse_ffn") for op in self.ops if op in INFERENCE and op != "gate_pack"}
        for gated in sorted(inferred, reverse=True):
            products = 3 if gated else 2
            floor = self.seconds(products * product, 2 * token_bytes + products * weight_bytes)
            suffix = "" if gated else " non-gated"
            chosen.append(
                Variant(f"dense eager{suffix}", self.dense(testing.dense_output, gated), products * product, floor)
            )
            if self.compiled is not None:
                call = self.dense(self.compiled, gated)
                chosen.append(Variant(f"dense compiled{suffix}", call, products * product, floor))

        chosen += self.training()
        if not any(op in INFERENCE for op in self.ops):
            return chosen
        gemm_floor = self.seconds(product, token_bytes + weight_bytes + ITEM * m * n)
        chosen.append(Variant("gate GEMM", lambda i: (F.linear(x[i], p.w_gate),), product, gemm_floor))

        pack_floor = self.seconds(product, token_bytes + weight_bytes + packed_bytes)
        if "gate_pack" in self.ops:
            call = lambda i: ops.gate_pack(x[i], p.w_gate, None, c)  # noqa: E731
            chosen.append(Variant("gate_pack", call, product, pack_floor, 0, self.verify_packed))

        packed: list[tuple[Tensor, Tensor, Tensor]] = []
        if any(op in self.ops for op in ("up_down", "up_down_union", "down")):
            packed = [ops.gate_pack(x[i], p.w_gate, None, c) for i in range(self.copies)]
        for op, layer, gated in (("up_down", "ffn", True), ("down", "sparse_ffn", False)):
            projections, verify = 2 if gated else 1, self.verify_output(gated)
            flop = projections * product
            if op in self.ops:
                call = self.gated_reader(packed) if gated else self.reader(packed)
                figures = self.of_readers("row", gated)
                chosen.append(Variant(op, call, flop, verify=verify, **figures))
            if "up_down_union" in self.ops and (gated or "down" in self.ops):
                name = "up_down_union" if gated else "up_down_union non-gated"
                settle = functools.partial(self.of_readers, "union", gated)
                call = self.union_reader(packed, gated)
                chosen.append(settling(Variant(name, call, flop, verify=self.verify_union(gated)), settle))
            if layer in self.ops:
                chosen += [self.whole_layer(layer, requested, gated, pack_floor) for requested in self.strategies]
        return chosen

    @functools.cached_property
    def union_rows(self) -> int:
        """Neurons that some token of a tile of 128 fires, summed over all tiles, as the operator has them."""
        p, c = self.problem, self.compression
        packed = ops.gate_pack(p.x, p.w_gate, None, c)
        return int(ops.up_down_union(p.x, *packed[:2], None, p.w_down, None, None, c)[2].sum())

    def of_readers(self, strategy: str, gated: bool) -> dict[str, float]:
        """What a strategy executes and gathers after the gate is packed, and its floor."""
        projections = 2 if gated else 1
        rows = self.union_rows if strategy == "union" else self.nonzeros
        gathered = float(rows) * projections * self.k * ITEM
        executed = 2.0 * rows * self.k * projections * (format.TOKEN_TILE if strategy == "union" else 1)
        _, token_bytes, weight_bytes = self.sizes
        moved = self.words_bytes + self.overflowing * TILE * ITEM + projections * (token_bytes + weight_bytes)
        floor = self.seconds(executed if strategy == "union" else 0, moved, gathered)
        return {"executed": executed, "gathered": gathered, "floor": floor}

    def whole_layer(self, name: str, requested: str, gated: bool, pack_floor: float) -> Variant:
        """A layer's forward pass by one strategy."""
        product, token_bytes, weight_bytes = self.sizes
        products = 3 if gated else 2

        def figures(strategy: str) -> dict[str, float]:
            if strategy == "dense":
                floor = self.seconds(products * product, 2 * token_bytes + products * weight_bytes)
                return {"executed": products * product, "gathered": 0.0, "floor": floor}
            found = self.of_readers(strategy, gated)
            return found | {"executed": product + found["executed"], "floor": pack_floor + found["floor"]}

        variant = Variant(name, lambda i: (), products * product, verify=self.verify_output(gated))
        variant.baseline, variant.requested = "" if gated else " non-gated", requested
        return self.by_strategy(variant, lambda strategy, i: self.sparse(gated, strategy, i), figures)

    def by_strategy(
        self,
        variant: Variant,
        layer: Callable[[Any, int], tuple[Tensor, ...]],
        figures: Callable[[str], dict[str, Any]],
    ) -> Variant:
        """The variant as calls of ``layer(strategy, i)``; "auto" settles first. ``figures`` are those of a strategy."""

        def settle() -> dict[str, Any]:
            passed: Any = variant.requested
            if passed == "auto":
                passed = twell.AutoStrategy()
                for i in range(SETTLING):
                    layer(passed, i)
                    torch.cuda.synchronize()
                variant.strategy = next((choice.strategy for choice in passed.explain() if not choice.graph), "")
                if not variant.strategy:
                    raise RuntimeError('"auto" chooses nothing on this device')
            else:
                variant.strategy = passed
            variant.call = functools.partial(layer, passed)
            # outside of graphs "auto" may run another strategy to measure
            variant.eager = functools.partial(layer, variant.strategy)
            return figures(variant.strategy)

        return settling(variant, settle)

    # A few tokens

    def decoding(self, m: int) -> list[Variant]:
        """The gated layer on ``m`` tokens, with weights that are not in L2."""
        product, token_bytes, weight_bytes = (2.0 * m * self.n * self.k, ITEM * m * self.k, self.sizes[2])
        copies = copies_for(3 * weight_bytes)
        if not self.weights:
            self.weights = [self.window, *(self.window.map(Tensor.clone) for _ in range(copies - 1))]
        parts = len(self.window.x) // m
        active = self.window_active[: parts * m].view(parts, m, self.n)
        nonzeros, fired = float(active.sum()) / parts, float(active.any(1).sum()) / parts
        by_tile = F.pad(active, (0, 0, 0, -m % format.TOKEN_TILE)).view(-1, format.TOKEN_TILE, self.n)
        listed = float(by_tile.any(1).sum()) / parts
        answer = testing.float64_output(self.window)

        def whole(function: Callable[[FFN], Tensor]) -> Tensor:
            tokens = len(self.window.x)
            return torch.cat([function(self.window.rows(first, first + m)) for first in range(0, tokens, m)])

        dense_errors = testing.errors(whole(testing.dense_output), answer)

        def at(i: int) -> FFN:
            first = i % parts * m
            return self.weights[i % copies]._replace(x=self.window.x[first : first + m])

        def layer(strategy: Any, i: int) -> tuple[Tensor, ...]:
            return (testing.sparse_output(at(i), compression=self.compression, strategy=strategy),)

        def figures(strategy: str) -> dict[str, Any]:
            pairs = {"row": nonzeros, "union": listed * format.TOKEN_TILE, "dense": m * self.n}[strategy]
            executed = product + 2 * 2 * pairs * self.k
            rows = self.n if strategy == "dense" else fired
            moved = 2 * token_bytes + weight_bytes + 2 * rows * self.k * ITEM
            # the gate's product and the memory traffic, which the smallest batches are bound by
            floor = self.seconds(3 * product if strategy == "dense" else product, moved)
            return {"executed": executed, "moved": moved, "floor": floor, "verify": functools.partial(verify, strategy)}

        def verify(strategy: str, outputs: tuple[Tensor, ...]) -> Verdict:
            y = whole(self.layer(strategy))
            comparison = Comparison(testing.errors(y, answer), dense_errors)
            if not comparison.ok:
                return {"y": comparison}, str(comparison)
            first = (VISITS * copies - 1) % parts * m
            same = torch.equal(outputs[0], y[first : first + m])
            return {"y": comparison}, "" if same else "other bits with a copy of the weights"

        chosen = []
        for name, function in (("dense eager", testing.dense_output), ("dense compiled", self.compiled)):
            if function is not None:
                call = lambda i, function=function: (function(at(i), gated=True),)  # noqa: E731
                dense = figures("dense") | {"verify": None}
                chosen.append(Variant(f"{name} decode", call, 3 * product, **dense))
        for requested in self.strategies:
            variant = Variant("decode", lambda i: (), 3 * product, baseline=" decode", requested=requested)
            chosen.append(self.by_strategy(variant, layer, figures))
        for variant in chosen:
            variant.copies = VISITS * copies
        return chosen

    # Training

    def training(self) -> list[Variant]:
        """Steps and their parts, each after the dense ones that it is compared with."""
        chosen: list[Variant] = []
        for op, gated in (("train", True), ("train_overflow", True), ("sparse_train", False)):
            if op not in self.ops or (op == "train_overflow" and self.fits):
                continue
            baseline = " train" if gated else " train non-gated"
            if f"dense eager{baseline}" not in [variant.name for variant in chosen]:
                chosen.append(self.whole_step(f"dense eager{baseline}", testing.dense_output, gated))
                if self.compiled is not None:
                    chosen.append(self.whole_step(f"dense compiled{baseline}", self.compiled, gated))
            for requested in self.strategies_of_a_step(op):
                chosen += self.steps(op, requested, gated, baseline)
        if self.fits:
            chosen += self.parts_of_a_step()
        return chosen

    def strategies_of_a_step(self, op: str) -> list[str]:
        """Those asked for that differ; the sparse path is ``train_overflow``'s where the pattern does not fit."""
        if op == "train_overflow":
            return ["union"]
        sparse = "union" if self.fits else "dense"
        return list(dict.fromkeys(sparse if name in ("row", "union") else name for name in self.strategies))

    def steps(self, op: str, requested: str, gated: bool, baseline: str) -> list[Variant]:
        """A step by one strategy, and where that is the dense one also compiled."""
        projections = 3 if gated else 2

        def figures(strategy: str) -> dict[str, Any]:
            function = self.layer(strategy)
            return {
                "floor": self.floor_of_a_step(gated, sparse=strategy != "dense"),
                "verify": self.verify_step(gated, strategy),
                "forward": lambda i: self.forward(function, gated, i)[1],
            }

        variant = Variant(op, lambda i: (), 3 * projections * self.sizes[0], baseline=baseline, requested=requested)
        step = lambda strategy, i: self.step(self.layer(strategy), gated, i % self.copies)  # noqa: E731
        chosen = [self.by_strategy(variant, step, figures)]
        if requested == "dense" and self.compiled is not None:
            compiled = self.whole_step(f"{op} compiled", self.layer("dense", compiled=True), gated)
            compiled.baseline, compiled.verify = baseline, self.verify_step(gated, "dense")
            compiled.requested = compiled.strategy = "dense"
            chosen.append(compiled)
        return chosen

    def layer(self, strategy: Any, compiled: bool = False) -> Any:
        """``testing.sparse_output`` by this strategy."""
        function = torch.compile(testing.sparse_output, fullgraph=True, dynamic=False) if compiled else None
        return functools.partial(function or testing.sparse_output, compression=self.compression, strategy=strategy)

    def floor_of_a_step(self, gated: bool, sparse: bool) -> float:
        product, token_bytes, weight_bytes = self.sizes
        projections = 3 if gated else 2
        # x twice, dy, y and dx; weights twice, and their gradients. Of sparse arithmetic, the gate's product alone
        return self.seconds(
            product if sparse else 3 * projections * product, 5 * token_bytes + 3 * projections * weight_bytes
        )

    def whole_step(self, name: str, function: Any, gated: bool) -> Variant:
        """Forward and backward of dense PyTorch through ``function(problem, gated=)``."""
        return Variant(
            name,
            lambda i: self.step(function, gated, i),
            3 * (3 if gated else 2) * self.sizes[0],
            self.floor_of_a_step(gated, sparse=False),
            forward=lambda i: self.forward(function, gated, i)[1],
        )

    def parts_of_a_step(self) -> list[Variant]:
        """Forward and backward of the gated layer, each alone."""
        product, token_bytes, weight_bytes = self.sizes
        chosen: list[Variant] = []

        def forward(name: str, function: Any, flop: float, verify: Any = None, baseline: str | None = None) -> None:
            floor = self.seconds(flop, 2 * token_bytes + 3 * weight_bytes)
            call = lambda i: (self.forward(function, True, i)[1].detach(),)  # noqa: E731
            chosen.append(Variant(name, call, 3 * product, floor, verify=verify, baseline=baseline))

        if "train_forward" in self.ops:
            baseline = " train_forward"
            forward(f"dense eager{baseline}", testing.dense_output, 3 * product)
            if self.compiled is not None:
                forward(f"dense compiled{baseline}", self.compiled, 3 * product)
            forward("train_forward", self.layer("union"), product, self.verify_output(True), baseline)
        if "train_backward" in self.ops:
            layer = self.problem[1:]
            kept = [ops.hybrid_forward(x, *layer, self.compression)[3:] for x in self.x]
            dl1 = self.problem.x.new_zeros((), dtype=torch.float32)
            operator = ops.hybrid_backward
            call = lambda i: operator(self.dy[i], dl1, self.x[i], *layer[:5], *kept[i], True, True)  # noqa: E731
            floor = self.seconds(0, 3 * token_bytes + 6 * weight_bytes)
            chosen.append(Variant("train_backward", call, 6 * product, floor, verify=self.verify_step(True, "union")))
        return chosen

    @torch.enable_grad()
    def forward(self, function: Any, gated: bool, i: int) -> tuple[dict[str, Tensor], Tensor]:
        """The leaves by name, and y of ``function(problem, gated=)`` with what backward needs."""
        leaves = self.problem._replace(x=self.x[i]).map(lambda t: t.detach().requires_grad_())
        return leaves.present(gated), function(leaves, gated=gated)

    def step(self, function: Any, gated: bool, i: int) -> tuple[Tensor, ...]:
        """The gradients of x and of all weights."""
        tensors, y = self.forward(function, gated, i)
        return torch.autograd.grad(y, tuple(tensors.values()), self.dy[i])

    def dense(self, function: Any, gated: bool) -> Call:
        return lambda i: (function(self.problem._replace(x=self.x[i]), gated=gated),)

    def sparse(self, gated: bool, strategy: Any, i: int) -> tuple[Tensor, ...]:
        options = {"compression": self.compression, "strategy": strategy}
        return (testing.sparse_output(self.problem._replace(x=self.x[i % self.copies]), gated=gated, **options),)

    def gated_reader(self, packed: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Call:
        p, c = self.problem, self.compression
        return lambda i: ops.up_down(self.x[i], *packed[i][:2], p.w_up, p.w_down, None, None, c)

    def reader(self, packed: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Call:
        return lambda i: ops.down(*packed[i][:2], self.problem.w_down, None, self.compression)

    def union_reader(self, packed: Sequence[tuple[Tensor, Tensor, Tensor]], gated: bool) -> Call:
        p, c = self.problem, self.compression
        w_up = p.w_up if gated else None
        return lambda i: ops.up_down_union(self.x[i], *packed[i][:2], w_up, p.w_down, None, None, c)

    def verify_packed(self, outputs: tuple[Tensor, ...]) -> Verdict:
        words, spill, stats = outputs
        dense = ops.unpack(words, spill, self.n, self.compression)
        assert self.gate_answer is not None
        comparison = Comparison(testing.errors(dense, self.gate_answer), self.gate_errors)
        if not comparison.ok:
            return {"gate": comparison}, f"gate: {comparison}"
        figures = stats.sum((0, 1)).tolist()
        counts = words.view(self.m, -1, format.words_per_tile(self.compression))[:, :, 0]
        overflowing = counts > format.capacity(self.compression)
        true = [int((dense != 0).sum()), int(overflowing.sum())]
        why = "" if figures == true else f"statistics say {figures}, the packed gate has {true}"
        return {"gate": comparison}, why

    def verify_output(self, gated: bool) -> Callable[[tuple[Tensor, ...]], Verdict]:
        def verify(outputs: tuple[Tensor, ...]) -> Verdict:
            comparison = Comparison(testing.errors(outputs[0], self.answers[gated]), self.dense_errors[gated])
            return {"y": comparison}, "" if comparison.ok else str(comparison)

        return verify

    def verify_union(self, gated: bool) -> Callable[[tuple[Tensor, ...]], Verdict]:
        """y, and the sizes of the unions, which its other figures are made from."""

        def verify(outputs: tuple[Tensor, ...]) -> Verdict:
            found, why = self.verify_output(gated)(outputs)
            words, spill, _ = ops.gate_pack(self.problem.x, self.problem.w_gate, None, self.compression)
            active = ops.unpack(words, spill, self.n, self.compression) != 0
            tiles = F.pad(active, (0, 0, 0, -self.m % format.TOKEN_TILE)).view(-1, format.TOKEN_TILE, self.n)
            right = tiles.any(1).sum(1)
            return found, why or ("" if torch.equal(outputs[2].long(), right) else "the sizes of unions are wrong")

        return verify

    def verify_step(self, gated: bool, strategy: str) -> Callable[[tuple[Tensor, ...]], Verdict]:
        """Of all gradients, without and with that of the sum of |h|, on tokens that no rounding decides."""

        def verify(outputs: tuple[Tensor, ...]) -> Verdict:
            clean = testing.off_kinks(self.problem, gated=gated)
            found: dict[str, Comparison] = {}
            for dl1, suffix in ((0.0, ""), (L1, " with l1")):
                options = {"compression": self.compression, "strategy": strategy}
                gradients = testing.sparse_gradients(clean, self.dy[0], dl1, gated=gated, **options)
                compared = testing.compare_gradients(clean, self.dy[0], gradients, dl1, gated=gated)
                found |= {f"{name}{suffix}": comparison for name, comparison in compared.items()}
            wrong = [f"{name}: {comparison}" for name, comparison in found.items() if not comparison.ok]
            return found, "; ".join(wrong)

        return verify

    def row(self, variant: Variant, decoded: int) -> Row:
        if decoded:
            nnz = float(self.window_active.sum()) / len(self.window.x)
            overflowing = float(self.window_overflowing.sum()) * decoded / len(self.window.x)
            return Row(self.name, variant.name, nnz, overflowing, tokens=decoded, requested=variant.requested)
        row = Row(self.name, variant.name, self.nonzeros / self.m, float(self.overflowing), tokens=self.m)
        row.requested = variant.requested
        dense = self.gate_errors
        if variant.name != "gate GEMM" and variant.name != "gate_pack":
            dense = self.dense_errors.get(
                "non-gated" not in variant.name and variant.name not in ("down", "sparse_ffn")
            )
        if dense is not None and "train" not in variant.name:
            row.dense_frobenius, row.dense_worst_row = dense.frobenius, dense.worst_row
        return row

    def run(self, seconds: float) -> list[Row]:
        """Check every variant, then time those that are right; each number of decoded tokens after the others."""
        rows = self.timed(self.variants(), seconds)
        if "decode" in self.ops:
            for m in self.decoded:
                rows += self.timed(self.decoding(m), seconds, m)
        return rows

    def timed(self, variants: list[Variant], seconds: float, decoded: int = 0) -> list[Row]:
        rows: list[Row] = []
        graphs: dict[str, Graph] = {}
        for variant in variants:
            row = self.row(variant, decoded)
            rows.append(row)
            try:
                if variant.settle is not None:
                    variant.settle()
                row.strategy = variant.strategy
                graph = self.checked(variant, row)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                row.red = reason(error)
                continue
            if graph is not None:
                graphs[variant.key] = graph
        times = measure(graphs, seconds) if graphs else {}
        for variant, row in zip(variants, rows, strict=True):
            if variant.key in times:
                self.fill(row, variant, times)
        return rows

    def checked(self, variant: Variant, row: Row) -> Graph | None:
        """A graph that gives the right result, None (and the reason in the row) if it does not."""
        copies = variant.copies or self.copies
        testing.poison_memory()
        outputs = variant.now(copies - 1)
        if variant.verify is not None:
            compared, row.red = variant.verify(outputs)
            self.note(row, compared)
            if row.red:
                return None
        if variant.forward is not None:
            row.kept_bytes, row.peak_bytes = memory(variant)
        graph = Graph(variant.call, copies, variant.eager)
        if variant.verify is None:
            return graph
        for output in graph.outputs:
            output.view(torch.uint8).fill_(0xFF)
        graph.graph.replay()
        # of gate_pack's outputs the spill is undefined where nothing spills, which the reader of the others never sees
        defined = (0, 2) if variant.name == "gate_pack" else range(len(outputs))
        if not all(torch.equal(outputs[i], graph.outputs[i]) for i in defined):
            row.red = "a replayed CUDA graph gives other bits"
            return None
        return graph

    def note(self, row: Row, compared: dict[str, Comparison]) -> None:
        """The errors; of several tensors those that are largest beside dense's."""
        norm = max(compared.values(), key=lambda c: share(c.ours.frobenius, c.dense.frobenius))
        worst = max(compared.values(), key=lambda c: share(c.ours.worst_row, c.dense.worst_row))
        row.frobenius, row.dense_frobenius = norm.ours.frobenius, norm.dense.frobenius
        row.worst_row, row.dense_worst_row = worst.ours.worst_row, worst.dense.worst_row
        if len(compared) > 1:
            row.gradients = {
                name: (share(c.ours.frobenius, c.dense.frobenius), share(c.ours.worst_row, c.dense.worst_row))
                for name, c in compared.items()
            }

    def fill(self, row: Row, variant: Variant, times: dict[str, list[float]]) -> None:
        samples = sorted(times[variant.key])
        row.samples = len(samples)
        row.ms, row.min_ms = statistics.median(samples), samples[0]
        row.p10_ms, row.p90_ms = (samples[round(share * (len(samples) - 1))] for share in (0.1, 0.9))
        row.tflops = variant.flop / row.ms / 1e9
        row.floor_ms = variant.floor * 1e3
        row.floor_share = row.floor_ms / row.ms
        if variant.executed is not None:
            row.executed_tflops = variant.executed / row.ms / 1e9
        if variant.gathered:
            row.l2_gather_gbs = variant.gathered / row.ms / 1e6
        if variant.moved is not None:
            row.memory_gbs = variant.moved / row.ms / 1e6
        if variant.name == "gate_pack":
            row.over_gemm = row.ms / statistics.median(times["gate GEMM"])
        if variant.baseline is not None:
            compare_with_dense(row, variant.baseline, times)
        if self.kernels and variant.name in TRAINING and variant.strategy != "dense":
            row.kernels = kernel_times(variant.now, self.copies)


def settling(variant: Variant, figures: Callable[[], dict[str, Any]]) -> Variant:
    """The variant, whose fields become what ``figures`` returns before it is checked."""

    def settle() -> None:
        for field, value in figures().items():
            setattr(variant, field, value)

    variant.settle = settle
    return variant


def compare_with_dense(row: Row, baseline: str, times: dict[str, list[float]]) -> None:
    """Speed-up over either dense variant, and over the faster one."""
    assert row.ms is not None
    speedups = {}
    for name in ("eager", "compiled"):
        if f"dense {name}{baseline}" in times:
            speedups[name] = statistics.median(times[f"dense {name}{baseline}"]) / row.ms
    row.speedup_eager, row.speedup_compiled = speedups.get("eager"), speedups.get("compiled")
    if speedups:
        row.faster_dense = min(speedups, key=lambda name: speedups[name])
        row.speedup_dense = speedups[row.faster_dense]


# Output


HEADER = [
    *("workload", "M", "nnz", "variant", "strategy", "time", "p10-p90"),
    *("TFLOP/s", "executed", "TB/s", "floor", "t/GEMM", "eager/t", "compiled/t", "dense/t"),
    *("error", "worst", "kept MB", "peak MB"),
]
# names, to the left of their columns
NAMES = [HEADER.index(name) for name in ("workload", "variant", "strategy")]

# Times below are shown in microseconds.
SMALL_MS = 0.1


def share(value: float, base: float) -> float:
    """``value`` over ``base``; 1 where both are 0."""
    return 1.0 if value == base else value / base if base else math.inf


def over(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def named(row: Row) -> str:
    """The strategy of a row, after "auto" what it settled on."""
    settled = row.requested == "auto" and row.strategy
    return f"auto: {row.strategy}" if settled else row.strategy or row.requested or "-"


def cells(row: Row) -> list[str]:
    """One line of the table; of a red row only what is wrong."""
    start = [row.workload, str(row.tokens), f"{row.nnz:.1f}", row.variant, named(row)]
    if row.red or row.ms is None:
        return [*start, f"RED {row.red}"]

    def number(value: float | None, form: str = ".2f") -> str:
        return "-" if value is None else f"{value:{form}}"

    unit, scale, form = ("us", 1e3, ".1f") if row.ms < SMALL_MS else ("ms", 1.0, ".3f")
    low, high = ("-" if t is None else f"{t * scale:{form}}" for t in (row.p10_ms, row.p90_ms))
    gbs = row.l2_gather_gbs if row.memory_gbs is None else row.memory_gbs
    return [
        *start,
        f"{row.ms * scale:{'.1f' if unit == 'us' else '.4f'}} {unit}",
        f"{low}-{high}",
        *(number(t, ".1f" if t is not None and t < 10 else ".0f") for t in (row.tflops, row.executed_tflops)),
        number(None if gbs is None else gbs / 1000),
        number(row.floor_share, ".0%"),
        number(row.over_gemm, ".3f"),
        number(row.speedup_eager),
        number(row.speedup_compiled),
        "-" if row.speedup_dense is None else f"{row.speedup_dense:.2f} {row.faster_dense}",
        over(row.frobenius, row.dense_frobenius),
        over(row.worst_row, row.dense_worst_row),
        number(None if row.kept_bytes is None else row.kept_bytes / 1e6, ".1f"),
        number(None if row.peak_bytes is None else row.peak_bytes / 1e6, ".0f"),
    ]


def print_table(rows: list[Row]) -> None:
    """Aligned text; on a terminal a rich table where rich is installed."""
    lines = [cells(row) for row in rows]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(*HEADER)
            for line, row in zip(lines, rows, strict=True):
                table.add_row(*line, style="red" if row.red else "bold" if row.speedup_eager else None)
            Console().print(table)
            return
    full = [HEADER, *(line for line in lines if len(line) == len(HEADER))]
    widths = [max(len(line[i]) for line in full) for i in range(len(HEADER))]
    for line in [HEADER, *lines]:
        # names to the left, numbers to the right; the reason of a red row runs on
        aligned = [cell.ljust(w) if i in NAMES else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        print("  ".join(aligned).rstrip())


def print_kernels(rows: list[Row]) -> None:
    """Microseconds of each kernel in one call, the longest first."""
    for row in rows:
        if row.kernels is None:
            continue
        print(f"{row.workload} {row.variant} ({named(row)}): {sum(row.kernels.values()) * 1e3:.0f} us in a queued call")
        for symbol, ms in sorted(row.kernels.items(), key=lambda item: -item[1]):
            print(f"  {ms * 1e3:8.1f}  {symbol}")


def write(rows: list[Row], arguments: argparse.Namespace, machine: str, ceilings: Ceilings) -> None:
    """Data under --out (JSON) and --csv."""
    data = {
        "machine": machine,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "arguments": {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)},
        "ceilings": {
            "tflops": ceilings.flops / 1e12,
            "memory_tbs": ceilings.memory / 1e12,
            "l2_tbs_assumed": ceilings.l2 / 1e12,
        },
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(data, indent=1) + "\n")
    if arguments.csv is not None:
        arguments.csv.parent.mkdir(parents=True, exist_ok=True)
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
            writer.writeheader()
            writer.writerows(dataclasses.asdict(row) for row in rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workload", nargs="+", metavar="NAME", help="default: all, and the recorded layers of --real-layers")
    add("--real-layers", type=Path, metavar="FOLDER", help="folder of recorded layers (layer3.npz is real3)")
    add("--m", type=int, default=16384, help="tokens")
    add("--k", type=int, default=2048, help="hidden size; recorded layers have their own")
    add("--n", type=int, default=5632, help="neurons; recorded layers have their own")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--compression", type=int, choices=(2, 4, 8), default=8)
    add("--ops", default="gate_pack,up_down,ffn", help=f"comma-separated, out of {','.join(OPS)}")
    add("--strategy", default="auto", help=f"comma-separated, out of {','.join(STRATEGIES)}")
    add("--m-decode", nargs="+", type=int, default=[1, 8, 16, 64, 128, 256], metavar="M", help="tokens of decode")
    add("--compile", choices=("default", "max-autotune-no-cudagraphs", "none"), default="default")
    add("--kernels", action="store_true", help="also print the time of each kernel in a training step")
    add("--seconds", type=float, default=3.0, help="GPU time for the samples of one workload")
    add("--l2-tbs", type=float, default=L2_TBS, help="gather ceiling in TB/s (default: an H200's)")
    add("--out", type=Path, metavar="FILE", help="write JSON here")
    add("--csv", type=Path, metavar="FILE", help="write CSV here")
    arguments = parser.parse_args(argv)
    arguments.ops = arguments.ops.split(",")
    unknown = set(arguments.ops) - set(OPS)
    if unknown:
        parser.error(f"--ops takes {', '.join(OPS)}, got {', '.join(sorted(unknown))}")
    arguments.strategy = list(dict.fromkeys(arguments.strategy.split(",")))
    unknown = set(arguments.strategy) - set(STRATEGIES)
    if unknown:
        parser.error(f"--strategy takes {', '.join(STRATEGIES)}, got {', '.join(sorted(unknown))}")
    most = min(DECODED, arguments.m)
    if "decode" in arguments.ops and not all(0 < m <= most for m in arguments.m_decode):
        parser.error(f"--m-decode takes 1 to {most} tokens, got {', '.join(map(str, arguments.m_decode))}")
    real = testing.real_names(arguments.real_layers) if arguments.real_layers else []
    known = [*testing.WORKLOADS, *real]
    arguments.workload = arguments.workload or known
    missing = [name for name in arguments.workload if name not in known]
    if missing:
        parser.error(f"--workload takes {', '.join(known)}, got {', '.join(missing)}")
    return arguments


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if not torch.cuda.is_available():
        print("bench: needs a CUDA device", file=sys.stderr)
        return 2
    dtype = DTYPES[arguments.dtype]
    ceilings, machine = measure_ceilings(dtype, arguments.l2_tbs)
    dense = None
    if arguments.compile != "none":
        mode = None if arguments.compile == "default" else arguments.compile
        # each number of tokens is compiled for itself, and each size of a recorded layer
        torch._dynamo.config.recompile_limit = 256
        dense = torch.compile(testing.dense_output, fullgraph=True, dynamic=False, mode=mode)
    rows: list[Row] = []
    for name in arguments.workload:
        try:
            problem = testing.load(
                name, arguments.m, arguments.k, arguments.n, real_layers=arguments.real_layers, dtype=dtype
            )
            rows += Bench(name, problem, arguments, ceilings, dense).run(arguments.seconds)
        except RuntimeError as error:  # out of memory, or a fault of an earlier kernel that shows now
            rows.append(Row(name, "any", 0, 0, red=reason(error)))
        write(rows, arguments, machine, ceilings)
        print(f"bench: {name} done", file=sys.stderr, flush=True)
    print_table(rows)
    print_kernels(rows)
    print(f"M = {arguments.m}, {arguments.dtype}, compression {arguments.compression}; columns: see --help")
    print(
        f"ceilings: {ceilings.flops / 1e12:.0f} TFLOP/s and {ceilings.memory / 1e12:.2f} TB/s of memory measured now, "
        f"{ceilings.l2 / 1e12:.2f} TB/s of L2 assumed"
    )
    print(machine)
    red = sum(bool(row.red) for row in rows)
    if red:
        print(f"{red} of {len(rows)} rows are red")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
