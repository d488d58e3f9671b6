"""Whole models with sparse feed-forward layers beside the same with dense ones: what is run, checked and measured.

All variants share one set of weights and compute the same function, with ReLU; "compiled" is torch.compile of each
decoder layer. Dense is twell's own strategy "dense": cuBLAS products and, in eager mode, one kernel for
``relu(gate) * up``, so that it is never slower than the stock layer. Sparse is "auto", which calls in eager mode settle
before anything is timed or compiled.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell import _sparsify, recipe, testing
from twell._runtime import geometry
from twell._runtime.log import logger
from twell.commands import analyze, saved_model
from twell.commands.bench.energy import EnergyMeter
from twell.commands.bench.models_random import cast
from twell.commands.bench.protocol import spread
from twell.nn import set_down_layout

OPS = ("forward", "logits", "train")

# Errors against fp32, over those of dense eager: of all together, and of the worst token or weight. The latter is
# there for what is wrong in one place only, as large as the values themselves; that of trained models varies by itself.
# Both are for many tokens; where few are compared, luck widens them: see ``testing.allowance``.
TOLERANCE = 1.1
WORST_TOLERANCE = 3.0
L1 = 2e-5

# Calls before timing. "auto" measures calls 0, 1, 2, 4 and decides by them at 1, 2, 4, 8.
SETTLING = 9
# Sequences whose outputs are compared.
CHECKED = 2
# Sequences of which the layers' sparsity is taken.
ANALYZED = 16

# What makes a row red: a fault of a kernel is a RuntimeError.
FAILURES = (RuntimeError, NotImplementedError, ValueError, TypeError)


@dataclass
class Row:
    """One variant of one operation on one model. Times are milliseconds of a call, memory is bytes, energy millijoules.

    micro_batch: sequences of a pass, of which a call has as many as its tokens take. pattern: what random weights were
    drawn for; "" of a trained model. speedup: over the faster dense variant. mj_per_token: of the whole board, and less
    what it takes when idle. peak_bytes: the most above weights, optimizer state and tokens; peak_total_bytes: with the
    variant's own weights and states. kept_bytes: what a training pass keeps for backward but the weights, and in it
    copies of these in 16 bits, where they can be told; per token without them. frobenius: relative error against fp32,
    of train the geometric mean of those of all weights' gradients; error: that over dense eager's. worst: the largest
    error of a token's output over dense eager's largest; of train that of a weight's gradient over dense eager's, the
    largest. strategies: of how many layers. non_zeros, unions: by layer, of a token and, as a share of the neurons, of
    128 consecutive tokens. ready_s: seconds for settling, compiling and checking.
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
    energy_seconds: float | None = None
    energy_calls: int | None = None
    peak_bytes: int | None = None
    peak_total_bytes: int | None = None
    kept_bytes: int | None = None
    kept_weights_bytes: int | None = None
    kept_bytes_per_token: float | None = None
    error: float | None = None
    frobenius: float | None = None
    worst: float | None = None
    strategies: dict[str, int] = field(default_factory=dict)
    non_zeros: list[float] = field(default_factory=list)
    unions: list[float] = field(default_factory=list)
    ready_s: float | None = None
    note: str = ""
    red: str = ""


@dataclass(frozen=True)
class Settings:
    """How everything is measured. ``backend`` is torch.compile's, "" to leave compiled variants out."""

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
        """Kind, strategy and whether compiled, of all variants. Errors are over those of the first."""
        both = (("dense", "dense"), ("sparse", "auto"))
        return [(*kind, compiled) for kind in both for compiled in ((False, True) if self.backend else (False,))]


class Subject:
    """A model and its tokens [sequences, tokens]. ``wanted``: non-zeros by layer that its weights were drawn for."""

    def __init__(self, name: str, model: Any, ids: Tensor, pattern: str = "", wanted: Sequence[float] = ()) -> None:
        self.name, self.ids, self.pattern, self.wanted = name, ids, pattern, list(wanted)
        self._model = model
        self._narrow: Any = None
        self.config: Any = model.config
        self.layers = len(_sparsify.layers(model))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.device: torch.device = next(model.parameters()).device
        self.non_zeros: list[float] = []
        self.unions: list[float] = []
        self.dead: list[float] = []

    def for_inference(self) -> Any:
        """The model in bfloat16."""
        if next(self._model.parameters()).dtype == torch.bfloat16:
            return self._model
        if self._narrow is None:
            self._narrow = copy.deepcopy(self._model)
            cast(self._narrow, torch.bfloat16)
        return self._narrow

    def for_training(self) -> Any:
        """The model in float32, in the place of that in bfloat16."""
        self._narrow = None
        cast(self._model, torch.float32)
        return self._model

    def exact(self) -> Any:
        """A copy of the model in float32."""
        model = copy.deepcopy(self._model)
        cast(model, torch.float32)
        return model

    def analyze(self) -> None:
        """Find out how sparse the layers are."""
        ids = self.ids[:: max(len(self.ids) // ANALYZED, 1)][:ANALYZED].cpu()
        batches = [saved_model.Batch(part, torch.ones_like(part, dtype=torch.bool)) for part in torch.split(ids, 4)]
        for report in analyze.analyze(self.for_inference(), batches):
            self.non_zeros.append(report.mean)
            self.unions.append(report.unions.get(geometry.TOKEN_TILE, math.nan))
            self.dead.append(report.dead / report.n)

    def facts(self) -> dict[str, Any]:
        """What is known of the model, for files."""
        return {
            "config": self.name,
            "layers": self.layers,
            "parameters": self.parameters,
            "pattern": self.pattern,
            "wanted": self.wanted,
            "non_zeros": self.non_zeros,
            "unions": self.unions,
            "dead": self.dead,
        }


class Variant:
    """One way to run the model: a copy of it that shares the parameters, in passes of ``micro_batch`` sequences."""

    def __init__(self, model: Any, kind: tuple[str, str, bool], micro_batch: int) -> None:
        name, strategy, self.compile = kind
        self.name = f"{name} {'compiled' if self.compile else 'eager'}"
        # parameters alone are shared: each copy counts and chooses for itself
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})
        self.layers = _sparsify.layers(self.model)
        # parameters are shared, so that this is done once
        set_down_layout(self.model, "rows")
        for layer in self.layers.values():
            layer.strategy = strategy  # type: ignore[assignment]
        self.strategy, self.micro_batch = strategy, micro_batch
        self.device = next(model.parameters()).device

    def take_choices(self, settled: Variant) -> None:
        """Choose as another has."""
        for layer, other in zip(self.layers.values(), settled.layers.values(), strict=True):
            layer._auto = copy.deepcopy(other._auto)

    def settle(self, batches: Sequence[Tensor]) -> None:
        """Let "auto" choose."""
        for i in range(SETTLING):
            self.run_pass(batches[i % len(batches)][: self.micro_batch])
            # the figures of a call are on the host when the next one asks
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def compile_layers(self, backend: str) -> None:
        # each size for itself: code for any size is slower
        torch._dynamo.config.recompile_limit = 256
        for layer in self.model.get_decoder().layers:
            layer.compile(backend=backend, dynamic=False)

    def run_pass(self, tokens: Tensor) -> object:
        """One pass; its result, if there is one."""
        raise NotImplementedError

    def call(self, tokens: Tensor) -> None:
        """What is timed."""
        for part in torch.split(tokens, self.micro_batch):
            self.run_pass(part)

    def check(self, tokens: Tensor) -> list[Tensor]:
        """What is to be right, of the first pass."""
        raise NotImplementedError

    def kept(self, tokens: Tensor) -> tuple[int, int | None] | None:
        """Bytes kept for backward but the parameters, and in them copies of parameters; None where nothing is kept."""
        return None

    def held(self) -> int:
        """Bytes of weights and states."""
        tensors = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def strategies(self, kind: str) -> dict[str, int]:
        """How many layers run which strategy."""
        chosen: Counter[str] = Counter()
        for layer in self.layers.values():
            rows = [row for row in twell.explain(layer) if row.kind in (kind, "any")]
            graphs = [row for row in rows if row.graph]
            chosen[max(graphs or rows, key=lambda row: row.calls).strategy] += 1
        return dict(chosen)


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
    """Optimizer steps of rate 0, so that each has the same sparsity. All variants share the optimizer's state."""

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
        self.loss(tokens).backward()  # type: ignore[no-untyped-call]

    def settle(self, batches: Sequence[Tensor]) -> None:
        super().settle(batches)
        self.optimizer.zero_grad()

    def call(self, tokens: Tensor) -> None:
        super().call(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> list[Tensor]:
        """Those there are, which are then no longer the parameters'."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return gradients

    def check(self, tokens: Tensor) -> list[Tensor]:
        self.run_pass(tokens[: self.micro_batch])
        return self.gradients()

    def exact(self, tokens: Tensor) -> list[Tensor]:
        """What ``check`` gives in float32, a sequence at a time: means over equal parts are means of their means."""
        self.dtype = None
        for sequence in torch.split(tokens[: self.micro_batch], 1):
            (self.loss(sequence) / self.micro_batch).backward()  # type: ignore[no-untyped-call]
        return self.gradients()

    def kept(self, tokens: Tensor) -> tuple[int, int | None]:
        parameters = list(self.model.parameters())
        own = {p.untyped_storage().data_ptr() for p in parameters}
        shapes = {tuple(sorted(p.shape)) for p in parameters}
        # beside activations of so many tokens copies could not be told
        ambiguous = any(tokens[: self.micro_batch].numel() in p.shape for p in parameters)
        storages: dict[int, tuple[int, bool]] = {}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes(), tuple(sorted(t.shape)) in shapes
            # an output that its own graph saved as it is would never be freed
            return t.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            # what is kept lives as long as the loss
            loss = self.loss(tokens[: self.micro_batch])
        total = sum(size for size, _ in storages.values())
        copies = sum(size for size, is_copy in storages.values() if is_copy)
        del loss
        return total, None if ambiguous else copies

    def held(self) -> int:
        states = (t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        return super().held() + sum(t.numel() * t.element_size() for t in states)


def compare_tokens(ours: Tensor, exact: Tensor) -> tuple[float, list[float]]:
    """Relative errors of [..., K] in the Frobenius norm: of the whole, and of each token."""
    wrong, right = ((ours.float() - exact).double().square().sum(-1), exact.double().square().sum(-1))
    return float((wrong.sum() / right.sum()).sqrt()), (wrong / right).sqrt().flatten().tolist()


def compare_gradients(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, list[float]]:
    """Relative errors of the gradients of weights in the Frobenius norm: their geometric mean, and each.

    Each weight counts the same, however large its gradient or how much of it is rounding. Vectors are left out: few of
    a norm's elements hold most of its gradient, so that its error says little.
    """
    parts = []
    for a, b in zip(ours, exact, strict=True):
        if b.dim() > 1:
            wrong, right = (float(t.square().sum(dtype=torch.float64)) for t in (a.float() - b, b))
            parts.append(math.sqrt(wrong / right) if right else math.inf if wrong else 0.0)
    # an exact one counts as nearly exact
    return math.exp(sum(math.log(max(part, 1e-9)) if part == part else part for part in parts) / len(parts)), parts


def reason(error: Exception) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def run_op(
    subject: Subject,
    op: str,
    settings: Settings,
    meter: EnergyMeter | None = None,
    step: Callable[[str], object] = lambda text: None,
) -> list[Row]:
    """Rows of all variants of one operation, one after the other checked, then timed in turn.

    Where memory runs out all begin again with half the sequences in a pass, and as many passes more. ``step`` is told
    what begins.
    """
    micro_batch = settings.micro_batch if op == "train" else settings.batch
    wanted = micro_batch
    note = ""
    while True:
        rows = [
            Row(op, subject.name, _name(kind), 0, micro_batch, subject.pattern, note=note) for kind in settings.kinds()
        ]
        for row in rows:
            row.non_zeros, row.unions = subject.non_zeros, subject.unions
        try:
            _Run(subject, op, settings, micro_batch, meter, step).measure(rows)
            _free(subject.device)
            return rows
        except torch.OutOfMemoryError as error:
            message = reason(error)
        # beyond the except clause nothing holds the frames that held the memory
        _free(subject.device)
        if micro_batch == 1:
            for row in rows:
                row.red = f"one sequence in a pass runs out of memory: {message}"
            return rows
        micro_batch //= 2
        note = f"{wanted} sequences in a pass ran out of memory"
        step(f"{subject.name} {op}: {note}, again with {micro_batch}")


def _name(kind: tuple[str, str, bool]) -> str:
    return f"{kind[0]} {'compiled' if kind[2] else 'eager'}"


def _over(value: float, base: float) -> float:
    """``value`` over ``base``; 1 where both are 0, NaN where either is."""
    if value == base:
        return 1.0
    return value / base if base else math.inf * value


def _free(device: torch.device) -> None:
    """Give memory back that nothing uses: modules and their hooks may refer to each other."""
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

    def measure(self, rows: list[Row]) -> None:
        """Fill the rows."""
        ready = []
        for row, variant in zip(rows, self.checked(rows)):
            row.tokens = self.batches[0].numel()
            if variant is not None and not row.red:
                ready.append((row, variant))
        # one that fails here is no row's fault
        for row, variant in ready:
            self.note_memory(row, variant)
        self.step(f"{self.subject.name} {self.op}: {len(ready)} variants in turn")
        samples: list[list[float]] = [[] for _ in ready]
        order = list(zip(ready, samples, strict=True))
        for i in range(self.settings.rounds):
            for (_, variant), each in order:
                # the GPU's clocks follow what ran just before: a call of the same, for all
                variant.call(self.batches[(i + 1) % len(self.batches)])
                each.append(self.timed(variant, self.batches[i % len(self.batches)]))
            order = order[1:] + order[:1]  # so that none always follows the same one
        for (row, _), each in zip(ready, samples, strict=True):
            note_times(row, each)
        dense = [row.ms for row, _ in ready if row.ms is not None and row.variant.startswith("dense")]
        for row, _ in ready:
            row.speedup = min(dense) / row.ms if dense and row.ms else None
        if self.meter is not None:
            for row, variant in ready:
                self.note_energy(row, variant, self.meter)

    def checked(self, rows: Sequence[Row]) -> Iterator[Variant | None]:
        """The variants, ready to be timed where their row is not red; None where they failed."""
        truth = self.truth()
        _free(self.device)
        make = self.maker()
        settled: Variant | None = None
        base: tuple[float, list[float]] | None = None
        for row, kind in zip(rows, self.settings.kinds(), strict=True):
            self.step(f"{self.subject.name} {self.op}: {row.variant}")
            start = time.perf_counter()
            try:
                variant = make(kind)
                if variant.strategy == "auto":
                    if settled is None:
                        variant.settle(self.batches)
                        settled = variant
                    else:
                        variant.take_choices(settled)
                if variant.compile:
                    variant.compile_layers(self.settings.backend)
                base = self.note_errors(row, variant, truth, base)
                row.strategies = variant.strategies("training" if self.training else "inference")
            except torch.OutOfMemoryError:
                raise
            except FAILURES as error:
                row.red = reason(error)
                yield None
                continue
            row.ready_s = time.perf_counter() - start
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
        """What ``check`` gives in fp32."""
        self.step(f"{self.subject.name} {self.op}: in fp32")
        kind = ("dense", "dense", False)
        if not self.training:
            checked = min(CHECKED, self.micro_batch)
            return Forward(self.subject.exact(), kind, checked, self.op == "logits").check(self.batches[0][:checked])
        model = self.subject.for_training()
        return Training(model, kind, self.micro_batch, torch.optim.SGD(model.parameters())).exact(self.batches[0])

    def note_errors(
        self, row: Row, variant: Variant, truth: list[Tensor], base: tuple[float, list[float]] | None
    ) -> tuple[float, list[float]]:
        """Put errors into the row; those of the first variant, which the others' are measured by."""
        ours = variant.check(self.batches[0])
        found = compare_gradients(ours, truth) if self.training else compare_tokens(ours[0], truth[0])
        row.frobenius, parts = found
        base = base or (row.frobenius, parts)
        row.error = _over(row.frobenius, base[0])
        if self.training:
            row.worst = max(_over(error, dense) for error, dense in zip(parts, base[1], strict=True))
        else:
            row.worst = _over(max(parts), max(base[1]))
        sequences = self.micro_batch if self.training else min(CHECKED, self.micro_batch)
        luck = testing.allowance(self.batches[0][:sequences].numel())
        if not row.error <= TOLERANCE * luck:
            row.red = f"error against fp32 is {row.error:.2f} times that of dense eager, {base[0]:.2g}"
            row.red += f", expected at most {TOLERANCE * luck:.3g} times"
        elif not row.worst <= WORST_TOLERANCE * luck:
            where = "a weight's gradient" if self.training else "a token"
            row.red = f"error of {where} against fp32 is {row.worst:.2f} times that of dense eager"
            row.red += f", expected at most {WORST_TOLERANCE * luck:.3g} times"
        return base

    def note_memory(self, row: Row, variant: Variant) -> None:
        """Warm up, and put memory into the row."""
        _free(self.device)
        tokens = self.batches[0]
        # the first step makes the optimizer's state
        variant.call(tokens)
        kept = variant.kept(tokens)
        if kept is not None:
            row.kept_bytes, row.kept_weights_bytes = kept
            of_tokens = kept[0] - (kept[1] or 0)
            row.kept_bytes_per_token = of_tokens / tokens[: self.micro_batch].numel()
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
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        variant.call(tokens)
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop))

    def note_energy(self, row: Row, variant: Variant, meter: EnergyMeter) -> None:
        self.step(f"{self.subject.name} {self.op}: {row.variant}, energy")
        turn = 0

        def call() -> None:
            nonlocal turn
            variant.call(self.batches[turn % len(self.batches)])
            turn += 1

        try:
            energy = meter.measure(call, self.settings.energy_seconds)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # NVML's own included: the times are good whatever becomes of this
            logger.warning("energy of %s cannot be measured: %s", row.variant, reason(error))
            return
        tokens = energy.calls * row.tokens
        row.mj_per_token = energy.joules * 1e3 / tokens
        row.mj_per_token_idle_corrected = energy.net_joules * 1e3 / tokens
        row.energy_seconds, row.energy_calls = energy.seconds, energy.calls


def note_times(row: Row, samples: Sequence[float]) -> None:
    """Put the milliseconds of calls into the row."""
    found = spread(samples)
    row.ms, row.p10_ms, row.p90_ms, row.samples = found.median, found.p10, found.p90, len(samples)
    row.tokens_per_ms = row.tokens / row.ms


def fitting_micro_batch(config: Any, parameters: int, wanted: int, sequence: int, memory: int) -> int:
    """``wanted`` or a half, a quarter, ... of it: sequences of a training pass that ``memory`` bytes hold with ease.

    ``config`` is transformers'. By what dense eager PyTorch takes (measured with K = 2,048 and N = 5,632): 28 K + 10 N
    bytes a token and layer, 14 bytes of a token's logits, 18 of a parameter. A third of the memory is left: the
    allocator's pieces do not fit together, and variants take turns.
    """
    a_layer = 28 * config.hidden_size + 10 * config.intermediate_size
    a_token = config.num_hidden_layers * a_layer + 14 * config.vocab_size
    room = memory * 2 / 3 - 18 * parameters
    while wanted > 1 and wanted * sequence * a_token > room:
        wanted //= 2
    return wanted
