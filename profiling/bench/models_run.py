"""Runs, checks and times whole models with sparse feed-forward layers beside the same models with dense ones.

All variants share one set of weights and compute the same function, with ReLU; "compiled" is torch.compile of each
decoder layer. Dense is twell's own strategy "dense": cuBLAS products and, in eager mode, one kernel for
``relu(gate) * up``, so it is never slower than the stock layer. Sparse is "auto"; eager calls settle it before timing
and compiling.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from profiling.bench.energy import EnergyMeter, energy_of
from profiling.bench.models_random import cast
from profiling.bench.rows import ratio
from profiling.bench.variants import SETTLING
from twell import _sparsify, recipe, testing
from twell._analyze import report
from twell._analyze.layers import found
from twell.commands.timing import FAILURES, reason, spread
from twell.nn import set_down_layout
from twell.recipe._tracker import strategy_of
from twell.testing import Errors

OPS = ("forward", "logits", "train")

# Largest errors against fp32 over those of dense eager: of the whole, and of the worst token or weight. The latter
# finds faults in one place, as large as the values themselves; in trained models it varies. Both are for many tokens;
# with few, chance widens them: see ``testing.allowance``.
TOLERANCE = 1.1
WORST_TOLERANCE = 3.0
L1 = 2e-5

# Sequences whose outputs are compared.
CHECKED = 2
# Sequences for the layers' sparsity.
ANALYZED = 16


@dataclass
class ModelRow:
    """One variant of one operation on one model. Times are milliseconds of a call, memory is bytes, energy millijoules.

    micro_batch: sequences of a pass; a call has several passes. pattern: of random weights, "" for a trained model.
    speedup: over the faster dense variant. mj_per_token: of the whole board; idle_corrected: minus that of an idle
    board. peak_bytes: above weights, optimizer state and tokens; peak_total_bytes: with them. frobenius: relative error
    against fp32, for train the geometric mean over the weights' gradients; error: the same over dense eager's. worst:
    largest error of a token over dense eager's largest; for train the largest ratio of a weight's gradient. strategies:
    layers by strategy. non_zeros, unions: by layer, per token and, as a share of neurons, of 128 consecutive tokens.
    """

    op: str
    config: str
    variant: str
    tokens: int
    micro_batch: int
    pattern: str = ""
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    samples: int = 0
    tokens_per_ms: float | None = None
    speedup: float | None = None
    mj_per_token: float | None = None
    mj_per_token_idle_corrected: float | None = None
    peak_bytes: int | None = None
    peak_total_bytes: int | None = None
    error: float | None = None
    frobenius: float | None = None
    worst: float | None = None
    strategies: dict[str, int] = field(default_factory=dict)
    non_zeros: list[float] = field(default_factory=list)
    unions: list[float] = field(default_factory=list)
    red: str = ""


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement. ``backend`` is torch.compile's, "" for no compiled variants."""

    batch: int
    micro_batch: int
    accumulate: int
    rounds: int
    backend: str = "inductor"
    energy_seconds: float = 4.0

    def sequences(self, op: str) -> int:
        """Sequences of a call."""
        return self.micro_batch * self.accumulate if op == "train" else self.batch

    def kinds(self) -> list[tuple[str, str, bool]]:
        """(name, strategy, compiled) of all variants. Errors are relative to those of the first."""
        compiled = (False, True) if self.backend else (False,)
        return [(*kind, each) for kind in (("dense", "dense"), ("sparse", "auto")) for each in compiled]


class Subject:
    """A model and its tokens [sequences, tokens]. ``pattern``: for which weights were drawn."""

    def __init__(self, name: str, model: Any, ids: Tensor, pattern: str = "") -> None:
        self.name, self.ids, self.pattern = name, ids, pattern
        self._model = model
        self._narrow: Any = None
        self.config: Any = model.config
        self.layers = len(_sparsify.layers(model))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.device: torch.device = next(model.parameters()).device
        self.non_zeros: list[float] = []
        self.unions: list[float] = []
        self.candidates: list[float | None] = []

    def for_inference(self) -> Any:
        """The model in bfloat16."""
        if next(self._model.parameters()).dtype == torch.bfloat16:
            return self._model
        if self._narrow is None:
            self._narrow = copy.deepcopy(self._model)
            cast(self._narrow, torch.bfloat16)
        return self._narrow

    def for_training(self) -> Any:
        """The model cast to float32; the bfloat16 model is gone."""
        self._narrow = None
        cast(self._model, torch.float32)
        return self._model

    def exact(self) -> Any:
        """A copy of the model in float32."""
        model = copy.deepcopy(self._model)
        cast(model, torch.float32)
        return model

    def analyze(self) -> None:
        """Measure the sparsity of the layers."""
        ids = self.ids[:: max(len(self.ids) // ANALYZED, 1)][:ANALYZED].cpu()
        model = self.for_inference()
        counted, _ = report.count(model, torch.split(ids, 4), found(model)[0], run=model.base_model)
        self.non_zeros = [each.mean for each in counted]
        self.unions = [math.nan if each.union is None else each.union for each in counted]
        self.candidates = [each.candidates for each in counted]

    def facts(self) -> dict[str, Any]:
        """The model's facts, for files."""
        names = ("layers", "parameters", "pattern", "non_zeros", "unions", "candidates")
        return {"config": self.name, **{name: getattr(self, name) for name in names}}


class Variant:
    """One way to run the model: a copy of it that shares the parameters, in passes of ``micro_batch`` sequences."""

    def __init__(self, model: Any, kind: tuple[str, str, bool], micro_batch: int) -> None:
        self.kind, strategy, self.compile = kind
        self.name = _name(kind)
        # only parameters are shared: each copy counts and chooses for itself
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})
        self.layers = _sparsify.layers(self.model)
        # the first variant does it for all
        set_down_layout(self.model, "rows")
        for layer in self.layers.values():
            layer.strategy = strategy  # type: ignore[assignment]
        self.strategy, self.micro_batch = strategy, micro_batch
        self.device = next(model.parameters()).device

    def take_choices(self, settled: Variant) -> None:
        """Take the choices of another variant."""
        for layer, other in zip(self.layers.values(), settled.layers.values(), strict=True):
            layer._auto = copy.deepcopy(other._auto)

    def settle(self, batches: Sequence[Tensor]) -> None:
        """Let "auto" choose."""
        for i in range(SETTLING):
            self.run_pass(batches[i % len(batches)][: self.micro_batch])
            # the next call needs the figures of this one on the host
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def compile_layers(self, backend: str) -> None:
        # each size separately: code for any size is slower
        torch._dynamo.config.recompile_limit = 256
        for layer in self.model.get_decoder().layers:
            layer.compile(backend=backend, dynamic=False)

    def run_pass(self, tokens: Tensor) -> object:
        """Run one pass and return its result, if any."""
        raise NotImplementedError

    def call(self, tokens: Tensor) -> None:
        """Run all passes: the timed call."""
        for part in torch.split(tokens, self.micro_batch):
            self.run_pass(part)

    def check(self, tokens: Tensor) -> list[Tensor]:
        """The results of the first pass, to compare."""
        raise NotImplementedError

    def held(self) -> int:
        """Bytes of weights and states."""
        tensors = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def strategies(self, training: bool) -> dict[str, int]:
        """The number of layers by strategy."""
        kind = "training" if training else "inference"
        return dict(Counter(strategy_of(layer, kind) for layer in self.layers.values()))


class Forward(Variant):
    """Hidden states, or logits, without gradient."""

    def __init__(self, model: Any, kind: tuple[str, str, bool], micro_batch: int, head: bool) -> None:
        super().__init__(model, kind, micro_batch)
        self.head = head

    @torch.inference_mode()
    def run_pass(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        return self.model.lm_head(hidden) if self.head else hidden

    def check(self, tokens: Tensor) -> list[Tensor]:
        return [self.run_pass(tokens[: self.micro_batch])[:CHECKED].clone()]


class Training(Variant):
    """Optimizer steps of rate 0, all with the same sparsity. All variants share the optimizer's state."""

    def __init__(
        self, model: Any, kind: tuple[str, str, bool], micro_batch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(model, kind, micro_batch)
        self.model.train()
        recipe.record_aux(self.model)
        self.optimizer = optimizer
        self.dtype: torch.dtype | None = torch.bfloat16

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross-entropy and L1 of a pass."""
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype is not None):
            hidden = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        # the last token of a sequence has none to predict
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return loss + L1 * recipe.l1_term(self.model)

    def run_pass(self, tokens: Tensor) -> None:
        self.loss(tokens).backward()

    def settle(self, batches: Sequence[Tensor]) -> None:
        super().settle(batches)
        self.optimizer.zero_grad()

    def call(self, tokens: Tensor) -> None:
        super().call(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> list[Tensor]:
        """Take the gradients from the parameters."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return gradients

    def check(self, tokens: Tensor) -> list[Tensor]:
        self.run_pass(tokens[: self.micro_batch])
        return self.gradients()

    def exact(self, tokens: Tensor) -> list[Tensor]:
        """``check`` in float32, a sequence at a time: the mean over equal parts is the mean of their means."""
        self.dtype = None
        for sequence in torch.split(tokens[: self.micro_batch], 1):
            (self.loss(sequence) / self.micro_batch).backward()
        return self.gradients()

    def held(self) -> int:
        states = (t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        return super().held() + sum(t.numel() * t.element_size() for t in states)


def errors_of(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Errors]:
    """Errors of outputs, or of the gradients of matrices.

    Vectors are left out: a few elements hold most of the gradient of a norm's weight, so its error says little.
    """
    pairs = ((a, b) for a, b in zip(ours, exact, strict=True) if b.dim() > 1)
    return [testing.errors(a.flatten(0, -2), b.flatten(0, -2).double()) for a, b in pairs]


def geometric_mean(errors: Sequence[Errors]) -> float:
    """Of errors in norm: all weights count the same, whatever the size of their gradients."""
    # an exact gradient counts as nearly exact
    return math.exp(statistics.fmean(math.log(max(each.frobenius, 1e-9)) for each in errors))


def run_op(
    subject: Subject,
    op: str,
    settings: Settings,
    meter: EnergyMeter | None = None,
    step: Callable[[str], object] = lambda text: None,
) -> list[ModelRow]:
    """Check all variants of one operation one after the other, time them in turn, and return their rows.

    If memory runs out, all rows are red. ``step`` gets a line at each step.
    """
    micro_batch = settings.micro_batch if op == "train" else settings.batch
    kinds = settings.kinds()
    facts = {"pattern": subject.pattern, "non_zeros": subject.non_zeros, "unions": subject.unions}
    blank = [ModelRow(op, subject.name, _name(kind), 0, micro_batch, **facts) for kind in kinds]  # type: ignore[arg-type]
    rows, failed = [replace(row) for row in blank], ""
    try:
        _Run(subject, op, settings, micro_batch, meter, step).measure(rows)
    except torch.OutOfMemoryError as error:
        failed = f"fewer sequences in a pass may fit in memory (--micro-batch, --batch): {reason(error)}"
    # after the except clause nothing holds the frames that held the memory
    _free(subject.device)
    return [replace(row, red=failed) for row in blank] if failed else rows


def _name(kind: tuple[str, str, bool]) -> str:
    return f"{kind[0]} {'compiled' if kind[2] else 'eager'}"


def _free(device: torch.device) -> None:
    """Free unused memory: modules and their hooks may refer to each other."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


class _Run:
    """One operation with passes of one size."""

    def __init__(
        self,
        subject: Subject,
        op: str,
        settings: Settings,
        micro_batch: int,
        meter: EnergyMeter | None,
        step: Callable[[str], object],
    ) -> None:
        self.subject, self.op, self.settings, self.micro_batch = subject, op, settings, micro_batch
        self.meter, self.step = meter, step
        self.device = subject.device
        sequences = settings.sequences(op)
        self.batches = [subject.ids[i * sequences : (i + 1) * sequences].to(self.device) for i in range(2)]
        self.training = op == "train"

    def measure(self, rows: list[ModelRow]) -> None:
        """Fill the rows."""
        ready = []
        for row, variant in zip(rows, self.checked(rows)):
            row.tokens = self.batches[0].numel()
            if variant is not None and not row.red:
                ready.append((row, variant))
        # a failure here is no row's fault
        for row, variant in ready:
            self.note_memory(row, variant)
        self.step(f"{self.subject.name} {self.op}: {len(ready)} variants in turn")
        samples: list[list[float]] = [[] for _ in ready]
        order = list(zip(ready, samples, strict=True))
        for i in range(self.settings.rounds):
            for (_, variant), each in order:
                # clocks depend on the call before: it is one of the same variant, for all
                variant.call(self.batches[(i + 1) % len(self.batches)])
                each.append(self.timed(variant, self.batches[i % len(self.batches)]))
            order = order[1:] + order[:1]  # none always follows the same one
        for (row, variant), each in zip(ready, samples, strict=True):
            note_times(row, each)
            # "auto" may have changed its choice since
            row.strategies = variant.strategies(self.training)
        dense = [row.ms for row, _ in ready if row.ms is not None and row.variant.startswith("dense")]
        for row, _ in ready:
            row.speedup = min(dense) / row.ms if dense and row.ms else None
        if self.meter is not None:
            for row, variant in ready:
                self.note_energy(row, variant, self.meter)

    def checked(self, rows: Sequence[ModelRow]) -> Iterator[Variant | None]:
        """Yield the variants, ready for timing unless their row is red; None for those that failed."""
        truth = self.truth()
        _free(self.device)
        make = self.maker()
        settled: dict[str, Variant] = {}
        base: list[Errors] | None = None
        for row, kind in zip(rows, self.settings.kinds(), strict=True):
            self.step(f"{self.subject.name} {self.op}: {row.variant}")
            try:
                variant = make(kind)
                if variant.strategy == "auto":
                    if variant.kind not in settled:
                        variant.settle(self.batches)
                        settled[variant.kind] = variant
                    else:
                        variant.take_choices(settled[variant.kind])
                if variant.compile:
                    variant.compile_layers(self.settings.backend)
                base = self.note_errors(row, variant, truth, base)
                row.strategies = variant.strategies(self.training)
            except torch.OutOfMemoryError:
                raise
            except FAILURES as error:
                row.red = reason(error)
                yield None
                continue
            yield variant

    def maker(self) -> Callable[[tuple[str, str, bool]], Variant]:
        if not self.training:
            model, head = self.subject.for_inference(), self.op == "logits"
            return lambda kind: Forward(model, kind, self.micro_batch, head)
        model = self.subject.for_training()
        fused = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=fused)
        return lambda kind: Training(model, kind, self.micro_batch, optimizer)

    def truth(self) -> list[Tensor]:
        """The results of ``check`` in fp32."""
        self.step(f"{self.subject.name} {self.op}: in fp32")
        kind = ("dense", "dense", False)
        if not self.training:
            checked = min(CHECKED, self.micro_batch)
            return Forward(self.subject.exact(), kind, checked, self.op == "logits").check(self.batches[0][:checked])
        model = self.subject.for_training()
        return Training(model, kind, self.micro_batch, torch.optim.SGD(model.parameters())).exact(self.batches[0])

    def note_errors(
        self, row: ModelRow, variant: Variant, truth: list[Tensor], base: list[Errors] | None
    ) -> list[Errors]:
        """Put errors into the row; return those of the first variant, the unit of the others."""
        found = errors_of(variant.check(self.batches[0]), truth)
        base = base or found
        row.frobenius, unit = geometric_mean(found), geometric_mean(base)
        row.error = ratio(row.frobenius, unit)
        # of a weight, or of a token
        kind = "frobenius" if self.training else "worst_row"
        row.worst = max(ratio(getattr(ours, kind), getattr(dense, kind)) for ours, dense in zip(found, base))
        sequences = self.micro_batch if self.training else min(CHECKED, self.micro_batch)
        luck = testing.allowance(self.batches[0][:sequences].numel())
        where = "a weight's gradient" if self.training else "a token"
        limits = ("error", row.error, TOLERANCE), (f"error of {where}", row.worst, WORST_TOLERANCE)
        for what, value, most in limits:
            if not row.red and not value <= most * luck:
                row.red = f"{what} against fp32 is {value:.2f} times that of dense eager, {unit:.2g}"
                row.red += f", expected at most {most * luck:.3g} times"
        return base

    def note_memory(self, row: ModelRow, variant: Variant) -> None:
        """Warm up, and put memory into the row."""
        _free(self.device)
        tokens = self.batches[0]
        # the first step makes the optimizer's state
        variant.call(tokens)
        if self.device.type != "cuda":
            return
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        variant.call(tokens)
        torch.cuda.synchronize(self.device)
        row.peak_bytes = torch.cuda.max_memory_allocated(self.device) - before
        row.peak_total_bytes = row.peak_bytes + variant.held()

    def timed(self, variant: Variant, tokens: Tensor) -> float:
        """Milliseconds of a call."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            variant.call(tokens)
            return (time.perf_counter() - begin) * 1e3
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        variant.call(tokens)
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop))

    def note_energy(self, row: ModelRow, variant: Variant, meter: EnergyMeter) -> None:
        self.step(f"{self.subject.name} {self.op}: {row.variant}, energy")
        turn = 0

        def call() -> None:
            nonlocal turn
            variant.call(self.batches[turn % len(self.batches)])
            turn += 1

        energy = energy_of(meter, row.variant, call, self.settings.energy_seconds)
        if energy is None:
            return
        tokens = energy.calls * row.tokens
        row.mj_per_token = energy.joules * 1e3 / tokens
        row.mj_per_token_idle_corrected = energy.net_joules * 1e3 / tokens


def note_times(row: ModelRow, samples: Sequence[float]) -> None:
    """Put the milliseconds of calls into the row."""
    found = spread(samples)
    row.ms, row.p10_ms, row.p90_ms, row.samples = found.median, found.p10, found.p90, len(samples)
    row.tokens_per_ms = row.tokens / row.ms


def fitting_micro_batch(config: Any, parameters: int, wanted: int, sequence: int, memory: int) -> int:
    """Sequences of a training pass that ``memory`` bytes easily hold: ``wanted`` or a half, a quarter, ... of it.

    ``config`` is transformers'. By the memory of dense eager PyTorch (measured with K = 2,048 and N = 5,632): 28 K +
    10 N bytes per token and layer, 14 bytes per logit, 18 per parameter. A third of the memory stays free for the
    allocator's fragments and for changing variants.
    """
    a_layer = 28 * config.hidden_size + 10 * config.intermediate_size
    a_token = config.num_hidden_layers * a_layer + 14 * config.vocab_size
    room = memory * 2 / 3 - 18 * parameters
    while wanted > 1 and wanted * sequence * a_token > room:
        wanted //= 2
    return wanted
