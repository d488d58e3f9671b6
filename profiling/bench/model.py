"""``python -m profiling.bench model``: models of the paper's configurations, or of other sizes, with random weights.

Time a whole model with sparse feed-forward layers beside the same model with dense ones, in eager mode and through
torch.compile of each decoder layer, in turn. Variants share one set of weights. Dense is twell's strategy "dense",
which is never slower than the stock layer, sparse is "auto", which eager calls settle. Only right results have a time:
outputs, or the gradients of all weights, are compared with those in fp32, and an error of more than 1.1 times that of
dense eager is red. With few tokens more is allowed: 1.14 times for 8,192 tokens, 1.39 for 128.

--config  0.5B, 1B, 1.5B, 2B: sizes of the paper, with random weights. Thresholds give each layer non-zeros around the
          paper's mean: 39, 34 (interpolated), 29 and 24. LAYERSxHIDDENxNEURONS[xHEADS[xVOCAB]] is any other
forward   the decoder without its LM head on --batch sequences of --sequence tokens, bf16, as in the paper
logits    the same with the LM head
train     an optimizer step on --accumulate passes of --micro-batch sequences: forward, cross-entropy plus 2e-5 times
          L1, backward, in bf16 autocast over fp32 weights, and AdamW of rate 0, which keeps the sparsity
"""

import argparse
import copy
import functools
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from profiling.bench import models_random as drawn
from profiling.bench.models_random import PAPER, LlamaSizes, Pattern
from profiling.harness import SETTLING, Bench, Case, Row, Settled, Variant, Verdict, Way, ratio
from twell import recipe, testing
from twell.commands.request import RequestError, at_least, number_above, number_from
from twell.commands.timing import Call
from twell.integrations import sparsify
from twell.integrations.analyze import report
from twell.integrations.analyze.layers import found
from twell.nn.models import set_down_layout
from twell.recipe._tracker import strategy_of
from twell.testing import Errors

OPS = ("forward", "logits", "train")
KINDS = ("dense eager", "dense compiled", "sparse eager", "sparse compiled")
# Largest errors against fp32 over those of dense eager: of the whole, and of the worst token or weight. The latter
# finds faults in one place, as large as the values themselves; in trained models it varies. Both are for many tokens;
# with few, chance widens them: see ``testing.allowance``.
TOLERANCE, WORST_TOLERANCE = 1.1, 3.0
# Sequences whose outputs are compared, those for the layers' sparsity, and seconds of calls for their energy.
CHECKED, ANALYZED, ENERGY_S = 2, 16, 4.0
SHOWN = (
    "config", "op", "variant", "tokens", "micro_batch", "ms", "p10_ms", "p90_ms", "tokens_per_ms", "speedup",
    "mj_per_token", "peak_bytes", "peak_total_bytes", "frobenius", "error", "worst", "strategies",
)  # fmt: skip
OPTIONS = {
    "--config": (drawn.parse_sizes, [], f"{', '.join(PAPER)} or sizes: see above"),
    "--nnz": (number_above(0), None, "mean non-zeros per token of each --config (the paper's)"),
    "--topic": (number_from(0, 1), None, "correlation of a document's tokens; 0 is hardest (0.5)"),
    "--ops": (OPS, list(OPS), "operations"),
    "--batch": (at_least(1), 64, "sequences of a forward pass"),
    "--sequence": (at_least(2), 2048, "tokens of a sequence"),
    "--micro-batch": (at_least(1), 8, "sequences of a training pass"),
    "--accumulate": (at_least(1), 2, "passes of a training step"),
    "--compile": (("inductor", "eager", "none"), None, "backend of torch.compile (inductor; none on a CPU)"),
    "--rounds": (at_least(1), 5, "timed calls of each variant"),
    "--energy": (bool, False, "energy of the whole board per token, by NVML: each variant alone"),
}
SECONDS = 1e-3


class Subject:
    """A model with random weights, its tokens [sequences, tokens], and facts of it for files."""

    def __init__(self, arguments: argparse.Namespace, needed: int, shape: LlamaSizes, device: torch.device) -> None:
        topic = Pattern.topic if arguments.topic is None else arguments.topic
        pattern = Pattern(arguments.nnz or drawn.paper_nnz(shape), topic=topic)
        self.ids = drawn.draw_ids(shape, needed, arguments.sequence, topic)
        try:
            self._model = drawn.build(shape, arguments.sequence, device)
        except ValueError as error:
            raise RequestError(f"--config {shape.name}: {error}") from None
        drawn.draw(self._model, self.ids, pattern)
        ids = self.ids[:: max(needed // ANALYZED, 1)][:ANALYZED].cpu()
        narrow = self.cast(torch.bfloat16)
        counted, _ = report.count(narrow, torch.split(ids, 4), found(narrow)[0], run=narrow.base_model)
        self.facts: dict[str, Any] = {
            "config": shape.name,
            "layers": len(counted),
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "pattern": str(pattern),
            "non_zeros": [each.mean for each in counted],
            "unions": [each.union for each in counted],
            "candidates": [each.candidates for each in counted],
        }

    def cast(self, dtype: torch.dtype, copied: bool = False) -> Any:
        """The model in a dtype, or a copy of it."""
        return drawn.cast(copy.deepcopy(self._model) if copied else self._model, dtype)


class Operation:
    """One operation on one model, in passes of ``micro_batch`` sequences on two batches in turn."""

    def __init__(self, subject: Subject, op: str, bench: Bench) -> None:
        self.subject, self.op, self.bench, self.training = subject, op, bench, op == "train"
        given, device = bench.given, bench.device.torch_device
        sequences = given["micro_batch"] * given["accumulate"] if self.training else given["batch"]
        self.batches = [ids.to(device) for ids in subject.ids[: 2 * sequences].split(sequences)]
        self.micro_batch = given["micro_batch"] if self.training else sequences
        self.checked = self.batches[0][: self.micro_batch if self.training else min(CHECKED, sequences)]
        self.truth = self.results(subject.cast(torch.float32, copied=not self.training), None, self.checked, 1)
        bench.device.free()
        self.model = subject.cast(torch.float32 if self.training else torch.bfloat16)
        self.optimizer: Any = None
        if self.training:
            parameters, fused = self.model.parameters(), device.type == "cuda"
            self.optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=fused)
        self.first: list[Errors] = []
        # sites of the layers that chose in eager calls, by those that are compiled
        self.sites: dict[str, Any] = {}

    def base(self) -> Row:
        base = {"op": self.op, "tokens": self.batches[0].numel(), "micro_batch": self.micro_batch}
        return base | {name: self.subject.facts[name] for name in ("config", "pattern", "non_zeros", "unions")}

    def variants(self) -> Iterator[Variant]:
        backend = self.bench.given["compile"]
        for kind in KINDS:
            if backend != "none" or kind.endswith("eager"):
                yield Variant(kind, functools.partial(self.by, kind), 2, "", self.check, self.note)

    def by(self, kind: str, _: object) -> Call:
        """The call of a variant: a copy of the model that shares its parameters."""
        model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in self.model.parameters()})
        # the first variant does it for all
        set_down_layout(model, "rows")
        layers = sparsify.layers(model)
        for name, layer in layers.items():
            layer.strategy = "auto" if kind.startswith("sparse") else "dense"
            if name in self.sites and layer.strategy == "auto":
                # a copy would have no figures
                layer._auto = self.sites[name]
        if self.training:
            model.train()
            recipe.record_aux(model)
        if kind == "sparse eager":
            for i in range(SETTLING):
                self.one_pass(model, torch.bfloat16, self.batches[i % 2][: self.micro_batch])
                # the next call needs the figures of this one on the host
                self.bench.device.wait()
            self.sites = {name: layer._auto for name, layer in layers.items()}
            model.zero_grad()
        if kind.endswith("compiled"):
            drawn.compile_layers(model, self.bench.given["compile"])

        def call(i: int) -> tuple[Tensor, ...]:
            for part in torch.split(self.batches[i % 2], self.micro_batch):
                self.one_pass(model, torch.bfloat16, part)
            if self.training:
                self.optimizer.step()
                self.optimizer.zero_grad()
            return ()

        # what checks and notes look at
        call.model = model  # type: ignore[attr-defined]
        return call

    def one_pass(self, model: Any, dtype: torch.dtype | None, tokens: Tensor) -> Tensor:
        """Hidden states or logits; in training the loss, after its backward pass."""
        if not self.training:
            with torch.inference_mode():
                hidden: Tensor = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
                return model.lm_head(hidden) if self.op == "logits" else hidden
        with torch.enable_grad():
            with torch.autocast(tokens.device.type, dtype, enabled=dtype is not None):
                logits = model.lm_head(model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state)
            loss = drawn.loss_of(model, logits, tokens)
            loss.backward()
        return loss.detach()

    def results(self, model: Any, dtype: torch.dtype | None, tokens: Tensor, size: int) -> list[Tensor]:
        """What is compared, of passes of ``size`` sequences: the mean over equal parts is the mean of their means."""
        if not self.training:
            return [torch.cat([self.one_pass(model, dtype, part) for part in tokens.split(size)])]
        for layer in sparsify.layers(model).values():
            layer.strategy = "dense" if dtype is None else layer.strategy
        model.train()
        recipe.record_aux(model)
        parts = tokens.split(size)
        for part in parts:
            self.one_pass(model, dtype, part)
        gradients = [p.grad / len(parts) for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return gradients

    def check(self, _: str, call: Any, outputs: object) -> Verdict:
        """Compare with fp32; the errors of the first variant are the unit of the others."""
        ours = errors_of(self.results(call.model, torch.bfloat16, self.checked, len(self.checked)), self.truth)
        self.first = self.first or ours
        error, unit = geometric_mean(ours), geometric_mean(self.first)
        # of a weight, or of a token
        kind, where = ("frobenius", "a weight's gradient") if self.training else ("worst_row", "a token")
        worst = max(ratio(getattr(one, kind), getattr(dense, kind)) for one, dense in zip(ours, self.first))
        self.found = {"frobenius": error, "error": ratio(error, unit), "worst": worst}
        luck = testing.allowance(self.checked.numel())
        limits = ("error", self.found["error"], TOLERANCE), (f"error of {where}", worst, WORST_TOLERANCE)
        for what, value, most in limits:
            if not value <= most * luck:
                said = f"{what} against fp32 is {value:.2f} times that of dense eager, {unit:.2g}"
                return {}, f"{said}, expected at most {most * luck:.3g} times"
        return {}, ""

    def note(self, row: Row, settled: Settled, _: object) -> None:
        model, device = settled.call.model, self.bench.device  # type: ignore[attr-defined]
        row |= self.found
        kind = "training" if self.training else "inference"
        row["strategies"] = dict(Counter(strategy_of(each, kind) for each in sparsify.layers(model).values()))
        if row["red"]:
            return
        # the first step makes the optimizer's state
        settled.call(0)
        row["peak_bytes"] = device.peak(settled.call)
        if row["peak_bytes"] is not None:
            states = self.optimizer.state.values() if self.training else ()
            held = [*model.parameters(), *model.buffers(), *(t for state in states for t in state.values())]
            tensors = {id(t): t.nbytes for t in held if isinstance(t, Tensor)}
            row["peak_total_bytes"] = row["peak_bytes"] + sum(tensors.values())
        if self.bench.given["energy"]:
            row["mj_per_token"] = 1e3 * device.joules(settled.call, ENERGY_S) / row["tokens"]


def errors_of(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Errors]:
    """Errors of outputs, or of the gradients of matrices: of a norm's weight few elements hold most of the gradient."""
    pairs = ((a, b) for a, b in zip(ours, exact, strict=True) if b.dim() > 1)
    return [testing.errors(a.flatten(0, -2), b.flatten(0, -2).double()) for a, b in pairs]


def geometric_mean(errors: Sequence[Errors]) -> float:
    """Of errors in norm: all weights count the same, whatever the size of their gradients."""
    # an exact gradient counts as nearly exact
    return statistics.geometric_mean(max(each.frobenius, 1e-9) for each in errors)


def cases(bench: Bench) -> Iterator[Case]:
    arguments, device = bench.arguments, bench.device.torch_device
    if not arguments.config:
        raise RequestError("expected --config, got none")
    if arguments.energy and device.type == "cpu":
        raise RequestError("--energy needs a CUDA device, got cpu")
    step = arguments.micro_batch * arguments.accumulate
    # two batches of each operation, so that no two successive calls are the same
    needed = 2 * max(step if op == "train" else arguments.batch for op in arguments.ops)
    models = bench.facts["models"] = list[dict[str, Any]]()
    bench.given |= {"compile": arguments.compile or ("none" if device.type == "cpu" else "inductor")}
    bench.given["config"] = [shape.name for shape in arguments.config]
    way = Way("queued", "ms", "speedup", calls=2, least=-(-arguments.rounds // 2), warm=1)

    def measure(subject: Subject, op: str) -> Iterator[list[Row]]:
        try:
            operation = Operation(subject, op, bench)
            rows = bench.timed(operation.base(), operation.variants(), [way])
            for row in rows:
                row["tokens_per_ms"] = row["ms"] and row["tokens"] / row["ms"]
            yield rows
        finally:
            bench.device.free()

    for shape in arguments.config:
        name = shape.name
        bench.step(f"{name}: weights and tokens")
        subject = Subject(arguments, needed, shape, device)
        models.append(subject.facts)
        # train comes last: it casts the weights
        for op in (op for op in OPS if op in arguments.ops):
            yield {"op": op, "config": name, "variant": "any"}, functools.partial(measure, subject, op)
        counts = ", ".join(f"{value:.3g}" for value in subject.facts["non_zeros"])
        bench.step(f"{name}: {subject.facts['parameters']:,} parameters; non-zeros per token by layer: {counts}")
        del subject
        bench.device.free()
