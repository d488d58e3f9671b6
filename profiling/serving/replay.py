"""Replay the steps of a server on a GPU, layer by layer in CUDA graphs, with dense and with sparse layers.

Two tables. "sizes": the FFNs of all layers, and the layers' other linear parts with them, at the numbers of tokens that
a server has, in each strategy. "traces": tokens per second of recorded traces, by phase: steps with prompts and steps
that only decode. Steps of one size share a time: those that only decode are padded to vLLM's sizes of CUDA graphs, and
those with prompts to a multiple of 256 tokens.

Each layer gets the hidden states that it had when the model ran: consecutive tokens of prompts, and for sequences that
decode the last token of as many others. "stock" is what engines do: gate and up in one product, one kernel for
relu(gate) * up, and the down weight as nn.Linear has it. "dense", "row", "union" and "auto" are strategies of
``torch.ops.twell.ffn``, on weights as the plug-in for vLLM lays them out; "auto" has measured some calls of the size
before its graph is captured. Ratios are to the faster of "stock" and "dense".

"layers" has norms, residuals and the products for query, key, value and output, too. Attention itself is timed by
itself, with PyTorch's own kernels: prompts of 2,048 tokens, by the faster of flash's and cuDNN's kernels, and for
decoding a cache of --context tokens or, in traces, of their mean. It is the same for all. Figures without it say so.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiling.bench.report import write_json
from profiling.serving import models, steps
from profiling.serving.models import Block
from twell import testing
from twell.commands.timing import Cpu, Device, Gpu, Recording, measure, spread
from twell.strategy import site as sites
from twell.strategy.explanation import Choice

DECODE, PREFILL = (1, 8, 32, 64, 128, 256, 512), (2048, 8192)
VARIANTS = ("stock", "dense", "row", "union", "auto")
DENSE, NAMED = ("stock", "dense"), ("stock", "dense", "row", "union")
TRACED = ("stock", "dense", "auto")
PROMPT = 2048
TRACES = Path(__file__).resolve().parents[1] / "traces" / "vllm_cpu.json"

# "auto" may lose this much to dense and to the best named strategy.
OVER_DENSE, OVER_BEST = 1.02, 1.03

# Calls before a capture, after which "auto" has measured its size.
SETTLING = 4
# Cycles of sleep while the host queues a graph for each layer.
SLEEP = 10_000_000


@dataclass
class Size:
    """All layers on ``prefill`` tokens of prompts and ``decode`` sequences; times are microseconds per layer.

    ffn_us, layers_us: medians by variant, without attention. attention_us: attention of one layer with ``context``
    cached tokens per decoding sequence. each_us: of each layer's FFN, by variant. strategies: what "auto" ran, by
    number of layers. figures: for each layer what "auto" has measured, non-zeros per token, the union of 128 tokens and
    the mean of the 8 heaviest, or none.
    """

    prefill: int
    decode: int
    context: int = 0
    ffn_us: dict[str, float] = field(default_factory=dict)
    layers_us: dict[str, float] = field(default_factory=dict)
    attention_us: float = 0.0
    each_us: dict[str, list[float]] = field(default_factory=dict)
    strategies: dict[str, int] = field(default_factory=dict)
    figures: list[tuple[float | None, ...]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.prefill + self.decode

    @property
    def dense(self) -> str:
        """The faster of the dense variants."""
        return min(DENSE, key=lambda name: self.ffn_us[name])

    @property
    def over_dense(self) -> float:
        """The time of "auto" over dense's."""
        return self.ffn_us["auto"] / self.ffn_us[self.dense]

    @property
    def over_best(self) -> float:
        """The time of "auto" over that of the best named strategy."""
        return self.ffn_us["auto"] / min(time for name, time in self.ffn_us.items() if name != "auto")


@dataclass
class Phase:
    """One phase of a trace: its steps and tokens, and seconds of all layers by variant.

    ffn_s, layers_s: without attention. attention_s: attention. missing: steps whose size the budget did not reach; the
    other figures leave them out.
    """

    trace: str
    phase: str
    steps: int = 0
    tokens: int = 0
    missing: int = 0
    ffn_s: dict[str, float] = field(default_factory=dict)
    layers_s: dict[str, float] = field(default_factory=dict)
    attention_s: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="JSON", help="file for the data")
    add("--decode", type=int, nargs="*", default=DECODE, metavar="M", help="sequences that decode")
    add("--prefill", type=int, nargs="*", default=PREFILL, metavar="M", help="tokens of prompts")
    add(
        "--context",
        type=int,
        default=1024,
        metavar="N",
        help="cached tokens of a sequence in the table of sizes (1024)",
    )
    add("--trace", type=Path, default=TRACES, metavar="JSON", help="recorded traces")
    add("--no-traces", action="store_true", help="measure the table of sizes alone")
    add("--seconds", type=float, default=0.3, help="seconds for the variants of a size (0.3)")
    add("--budget-s", type=float, default=165, help="begin no size of a trace after this many seconds (165)")


def run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    traces = [] if arguments.no_traces else steps.read(arguments.trace)
    alike: dict[tuple[bool, int], list[steps.Step]] = {}
    for step in (step for trace in traces for step in trace.steps):
        alike.setdefault(step.size, []).append(step)
    wanted = [_mean(size, of_one) for size, of_one in sorted(alike.items(), key=lambda item: (-len(item[1]), item[0]))]
    most_prefill = max([*arguments.prefill, *(each.prefill for _, each in wanted), 1])
    most_decode = max([*arguments.decode, *(each.decode for _, each in wanted), 1])
    prompts = -(-most_prefill // PROMPT), min(PROMPT, most_prefill)
    subject = models.subject(arguments, prompts, (most_decode, 64))
    device: Device = Gpu(subject.device) if subject.device.type == "cuda" else Cpu()
    with torch.inference_mode():
        server = Server(subject, device, arguments.seconds)
        print(f"{subject.name}: ready after {time.monotonic() - began:.0f} s", file=sys.stderr)
        sizes = []
        for prefill, decode in [*((0, m) for m in arguments.decode), *((m, 0) for m in arguments.prefill)]:
            sizes.append(server.measure(prefill, decode, arguments.context, VARIANTS, each=True))
            print(_line(sizes[-1]), file=sys.stderr)
        measured = {}
        # those with most steps first
        for key, each in wanted:
            if time.monotonic() - began > arguments.budget_s:
                break
            measured[key] = server.measure(each.prefill, each.decode, each.context, TRACED, each=False)
    phases = [phase for trace in traces for phase in phases_of(trace, measured, len(server.blocks))]
    print(*_tables(sizes, phases, len(server.blocks)), sep="\n")
    write_json(
        arguments.out,
        sizes,
        machine=testing.machine_line(subject.device),
        arguments={name: value for name, value in vars(arguments).items() if name != "config"},
        model=subject.name,
        layers=len(server.blocks),
        traced=[asdict(size) for size in measured.values()],
        phases=[asdict(phase) for phase in phases],
        seconds=time.monotonic() - began,
    )
    return 0


class Server:
    """A model's layers on a device, ready to be timed."""

    def __init__(self, subject: models.Subject, device: Device, seconds: float) -> None:
        self.prefill, self.decode = models.inputs(subject)
        self.blocks = models.blocks(subject.model)
        self.device, self.seconds = device, seconds
        # one kernel for any number of tokens
        self.act = torch.compile(_act, dynamic=True) if device.torch_device.type == "cuda" else _act

    def ffn(self, block: Block, x: Tensor, variant: str) -> Tensor:
        """One FFN: "stock", or a strategy of the operator."""
        if variant == "stock":
            return F.linear(self.act(F.linear(x, block.merged)), block.down)
        y: Tensor = torch.ops.twell.ffn(
            *(x, block.w_gate, block.w_up, block.down_rows.t(), None, None, None, 8, variant, block.w_gate),
            screen=variant == "auto",
        )
        return y

    def layer(self, block: Block, x: Tensor, variant: str) -> Tensor:
        """A decoder layer without attention, whose FFN gets ``x``, the hidden states of the run."""
        hidden = F.rms_norm(x, x.shape[-1:], block.norms[0], block.eps)
        qkv = F.linear(hidden, block.qkv, block.b_qkv)
        hidden = x + F.linear(qkv[:, : block.out.shape[1]], block.out)
        F.rms_norm(hidden, x.shape[-1:], block.norms[1], block.eps)
        return hidden + self.ffn(block, x, variant)

    def measure(self, prefill: int, decode: int, context: int, variants: Sequence[str], each: bool) -> Size:
        """Time all layers on so many tokens."""
        size = Size(prefill, decode, context)
        xs = [torch.cat([many[:prefill], few[:decode]]) for many, few in zip(self.prefill, self.decode)]
        count = len(self.blocks)
        self._settle(xs)
        for block, x in zip(self.blocks, xs):
            self._check(block, x, variants)

        def calls(one: Callable[[Block, Tensor, str], Tensor], variant: str) -> Callable[[int], tuple[Tensor, ...]]:
            return lambda i: (one(self.blocks[i], xs[i], variant),)

        recordings: dict[str, Recording] = {}
        for variant in variants:
            recordings[f"ffn {variant}"] = self.device.record(calls(self.ffn, variant), count)
            recordings[f"layers {variant}"] = self.device.record(calls(self.layer, variant), count)
        for backend in self._backends if prefill else (None,):
            recordings[f"attention {backend}"] = self._attention(prefill, decode, context, backend)
        for name, samples in measure(recordings, self.seconds).items():
            kind, _, variant = name.partition(" ")
            microseconds = spread(samples).median * 1e3
            if kind == "attention":
                size.attention_us = min(size.attention_us or microseconds, microseconds)
            else:
                (size.ffn_us if kind == "ffn" else size.layers_us)[variant] = microseconds
        if self._is_gpu:
            captured = [_choice(block, size.tokens, "captured") for block in self.blocks]
            size.strategies = dict(Counter("" if choice is None else choice.strategy for choice in captured))
            size.figures = [_figures(block, size.tokens) for block in self.blocks]
        recordings.clear()
        if each:
            for variant in variants:
                alone = [self._alone(block, x, variant) for block, x in zip(self.blocks, xs)]
                size.each_us[variant] = self._one_by_one(alone)
        self._free()
        return size

    @property
    def _is_gpu(self) -> bool:
        return self.device.torch_device.type == "cuda"

    def _settle(self, xs: Sequence[Tensor]) -> None:
        """Let "auto" measure its layers at this size; a graph keeps what it has chosen by then."""
        for _ in range(SETTLING):
            for block, x in zip(self.blocks, xs):
                self.ffn(block, x, "auto")
            self.device.wait()

    def _check(self, block: Block, x: Tensor, variants: Sequence[str]) -> None:
        """Raise RuntimeError if a variant's result is not that of "stock", up to roundings."""
        expected = self.ffn(block, x, "stock").float()
        for variant in variants:
            error = float((self.ffn(block, x, variant).float() - expected).norm() / expected.norm().clamp_min(1e-6))
            # two roundings of bfloat16 in the hidden state; a NaN fails, too
            if not error < 2**-6:
                raise RuntimeError(f"{variant}: {len(x)} tokens must be as in stock's result, got an error of {error}")

    def _alone(self, block: Block, x: Tensor, variant: str) -> Recording:
        return self.device.record(lambda i: (self.ffn(block, x, variant),), 1)

    def _one_by_one(self, recordings: Sequence[Recording], rounds: int = 5) -> list[float]:
        """Median microseconds of each: one after the other, so that none finds its weights in the cache."""
        taken: list[list[float]] = [[] for _ in recordings]
        for i in range(rounds + 1):
            if self._is_gpu:
                torch.cuda._sleep(SLEEP)
            spans = [recording.replay() for recording in recordings]
            self.device.wait()
            for samples, span in zip(taken, spans):
                # the first round warms up
                samples += [span() * 1e3] if i else []
        return [statistics.median(samples) for samples in taken]

    @property
    def _backends(self) -> tuple[SDPBackend | None, ...]:
        """PyTorch's ways to attend within prompts; the faster one counts. None is its own choice."""
        return (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if self._is_gpu else (None,)

    def _attention(self, prefill: int, decode: int, context: int, backend: SDPBackend | None) -> Recording:
        """Attention of one layer: causal for each prompt, by ``backend``, and of one token for each that decodes."""
        heads, cached, width = self.blocks[0].heads
        device = self.device.torch_device

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device)

        whole, rest = divmod(prefill, PROMPT)
        parts = [*[PROMPT] * whole, *[rest] * bool(rest)]
        prompts = [
            (normal(1, heads, n, width), normal(1, cached, n, width), normal(1, cached, n, width)) for n in parts
        ]
        few = normal(decode, heads, 1, width)
        k, v = (normal(decode, cached, max(context, 1), width) for _ in range(2))
        grouped = cached != heads

        def call(_: int) -> tuple[Tensor, ...]:
            with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                ys = [F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=grouped) for qkv in prompts]
            if decode:
                ys.append(F.scaled_dot_product_attention(few, k, v, enable_gqa=grouped))
            return tuple(ys)

        return self.device.record(call, 1)

    def _free(self) -> None:
        gc.collect()
        if self._is_gpu:
            torch.cuda.empty_cache()


def _act(merged: Tensor) -> Tensor:
    gate, up = merged.chunk(2, -1)
    return F.relu(gate) * up


def _choice(block: Block, tokens: int, graph: str) -> Choice | None:
    """What "auto" knows of a layer for so many tokens; in ``graph`` "captured", or in calls."""

    def covers(row: Choice) -> bool:
        ends = row.tokens.split()
        return row.graph == graph and int(ends[0]) <= tokens <= int(ends[-1])

    return next(filter(covers, sites.site_of(block.w_gate, True).explain()), None)


def _figures(block: Block, tokens: int) -> tuple[float | None, ...]:
    choice = _choice(block, tokens, "")
    return () if choice is None or choice.figures is None else tuple(choice.figures)


def _mean(size: tuple[bool, int], alike: Sequence[steps.Step]) -> tuple[tuple[bool, int], steps.Step]:
    """A size and the step to time for those that share it; ``context`` is that of one sequence."""
    with_prompts, tokens = size
    decode = round(statistics.mean(step.decode for step in alike)) if with_prompts else tokens
    context = sum(step.context for step in alike) / max(sum(step.decode for step in alike), 1)
    return size, steps.Step(tokens - decode, decode, round(context))


def phases_of(trace: steps.Trace, measured: dict[tuple[bool, int], Size], layers: int) -> Iterator[Phase]:
    """The two phases of a trace, by the times of its steps' sizes."""
    for name, with_prompts in (("prefill", True), ("decode", False)):
        phase = Phase(trace.name, name)
        for step in trace.steps:
            if bool(step.prefill) != with_prompts:
                continue
            size = measured.get(step.size)
            if size is None:
                phase.missing += 1
                continue
            phase.steps += 1
            phase.tokens += step.prefill + step.decode
            phase.attention_s += size.attention_us * layers * 1e-6
            for into, times in ((phase.ffn_s, size.ffn_us), (phase.layers_s, size.layers_us)):
                for variant, microseconds in times.items():
                    into[variant] = into.get(variant, 0.0) + microseconds * layers * 1e-6
        yield phase


def _line(size: Size) -> str:
    times = " ".join(f"{name} {size.ffn_us[name]:.1f}" for name in size.ffn_us)
    return f"{size.tokens} tokens: {times} us per FFN; auto ran {size.strategies}"


def _tables(sizes: Sequence[Size], phases: Sequence[Phase], layers: int) -> Iterator[str]:
    yield "FFN, microseconds per layer; auto over the faster dense and over the best; decoder layers with their FFN"
    for size in sizes:
        yield from size_lines(size, layers)
    if phases:
        yield "Traces: tokens per second of all layers, dense and auto"
    for phase in phases:
        yield from phase_lines(phase)


def size_lines(size: Size, layers: int) -> Iterator[str]:
    dense, auto, attention = size.layers_us[size.dense], size.layers_us["auto"], size.attention_us
    verdict = "" if size.over_dense <= OVER_DENSE and size.over_best <= OVER_BEST else "  MISSED"
    times = "  ".join(f"{name} {size.ffn_us[name]:8.1f}" for name in VARIANTS)
    yield (
        f"{size.tokens:6}  {times}  over dense {size.over_dense:.3f}  over best {size.over_best:.3f}  layers "
        f"{dense / auto:.3f}x  with attention {(dense + attention) / (auto + attention):.3f}x  "
        f"{size.strategies}{verdict}"
    )
    ours = size.each_us["auto"]
    theirs = [min(size.each_us[name][i] for name in DENSE) for i in range(layers)]
    worst = max(range(layers), key=lambda i: ours[i] / theirs[i])
    rates = ", ".join(
        f"{name} {size.tokens / max(each) * 1e6:,.0f} to {size.tokens / min(each) * 1e6:,.0f}"
        for name, each in (("dense", theirs), ("auto", ours))
    )
    yield f"        tokens per second of one FFN: {rates}; worst, {worst}: {theirs[worst]:.1f} and {ours[worst]:.1f} us"


def phase_lines(phase: Phase) -> Iterator[str]:
    yield f"{phase.trace}, {phase.phase}: {phase.steps} steps, {phase.tokens:,} tokens, {phase.missing} not measured"
    kinds = (
        ("FFNs", phase.ffn_s, 0.0),
        ("layers without attention", phase.layers_s, 0.0),
        ("with attention", phase.layers_s, phase.attention_s),
    )
    for kind, seconds, more in kinds if phase.steps else ():
        dense = phase.tokens / (min(seconds[name] for name in DENSE) + more)
        auto = phase.tokens / (seconds["auto"] + more)
        yield f"  {kind:26} {dense:12,.0f} {auto:12,.0f}  {auto / dense:.3f}x"
