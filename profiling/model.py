"""Time a whole model with sparse feed-forward layers beside the same model with dense ones: one run, interleaved.

    python profiling/model.py MODEL --text FOLDER --out profiling/results/model.json
    python profiling/model.py MODEL --text FOLDER --ops forward --batch 64 --sequence 2048

MODEL is a folder as save_pretrained writes it, its layers ReLU; on real text sparsity is what the model has. All
variants share one set of weights and compute the same function; "compiled" is torch.compile of each decoder layer.

``forward`` is the decoder without its LM head on --batch sequences of --sequence tokens, bf16, ``logits`` with it.
``train`` is an optimizer step on --accumulate micro-batches of --micro-batch sequences: forward, cross-entropy plus
2e-5 * L1, backward in bf16 autocast over fp32 weights, fused AdamW. Its learning rate is 0, so that every step has the
same sparsity.

Nothing is timed before it is right. Last hidden states, or the gradients of a micro-batch, all parameters together, are
compared with those of the model in fp32: an error of more than 1.1 times that of dense eager gives a red row without
speed, and exit status 1.

Sparse layers run "auto": calls in eager mode settle it, the last column counts the layers of each strategy.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twell
from twell import _model_text, _sparsify, recipe, testing

TOLERANCE = 1.1

# Name, strategy, whether compiled. Errors are over those of the first.
KINDS = (("dense", "dense", False), ("dense", "dense", True), ("sparse", "auto", False), ("sparse", "auto", True))

OPS = ("forward", "logits", "train")
L1 = 2e-5

# Calls before timing. "auto" measures calls 0, 1, 2, 4 and decides by them at 1, 2, 4, 8.
SETTLING = 9


@dataclass
class Row:
    """One variant of one operation. Times are milliseconds of a call, memory is bytes."""

    op: str
    variant: str
    tokens: int
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    samples: int = 0
    tokens_per_ms: float | None = None
    speedup: float | None = None  # over the faster dense variant
    peak_bytes: int | None = None  # above what model, optimizer and tokens hold
    error: float | None = None  # over that of dense eager
    strategies: dict[str, int] = field(default_factory=dict)
    red: str = ""


class Variant:
    """One way to run the model: a copy of it that shares the parameters."""

    def __init__(self, model: nn.Module, kind: str, strategy: str, compile: bool) -> None:
        self.name = f"{kind} {'compiled' if compile else 'eager'}"
        # parameters alone are shared: each copy counts and chooses for itself
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})
        self.layers = _sparsify.layers(self.model)
        for layer in self.layers.values():
            layer.strategy = strategy
        self.strategy, self.compile = strategy, compile

    def settle(self, tokens: Sequence[Tensor]) -> None:
        """Let "auto" choose, then compile."""
        if self.strategy == "auto":
            for i in range(SETTLING):
                self.check(tokens[i % len(tokens)])
        if self.compile:
            for layer in self.model.get_decoder().layers:
                layer.compile()

    def call(self, tokens: Tensor) -> None:
        raise NotImplementedError

    def check(self, tokens: Tensor) -> list[Tensor]:
        """What is to be right."""
        raise NotImplementedError

    def strategies(self, kind: str) -> dict[str, int]:
        """How many layers run which strategy."""
        chosen: Counter[str] = Counter()
        for layer in self.layers.values():
            rows = [row for row in twell.explain(layer) if row.kind in (kind, "any")]
            graphs = [row for row in rows if row.graph]
            chosen[max(graphs or rows, key=lambda row: row.calls).strategy] += 1
        return dict(chosen)


class Forward(Variant):
    """Hidden states without gradient, or logits."""

    head = False

    @torch.inference_mode()
    def call(self, tokens: Tensor) -> None:
        hidden = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        if self.head:
            self.model.lm_head(hidden)

    @torch.inference_mode()
    def check(self, tokens: Tensor) -> list[Tensor]:
        return [self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[:2]]


class Logits(Forward):
    head = True


class Training(Variant):
    """Optimizer steps of rate 0."""

    def __init__(self, model: nn.Module, kind: str, strategy: str, compile: bool, micro_batch: int) -> None:
        super().__init__(model, kind, strategy, compile)
        self.model.train()
        recipe.record_aux(self.model)
        self.micro_batch = micro_batch
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)

    def backward(self, tokens: Tensor, dtype: torch.dtype | None = torch.bfloat16) -> None:
        with torch.autocast(tokens.device.type, dtype, enabled=dtype is not None):
            hidden = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        # the last token of a sequence has none to predict
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        (loss + L1 * recipe.l1_term(self.model)).backward()

    def call(self, tokens: Tensor) -> None:
        for micro in tokens.split(self.micro_batch):
            self.backward(micro)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self, tokens: Tensor) -> list[Tensor]:
        self.backward(tokens[: self.micro_batch])
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return gradients


def relative(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Error of ``ours`` in the Frobenius norm over all tensors together."""
    pairs = list(zip(ours, exact, strict=True))
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return (difference / sum(float(b.double().square().sum()) for b in exact)) ** 0.5


def exact(model: nn.Module, tokens: Tensor, training: bool, micro_batch: int) -> list[Tensor]:
    """What ``check`` gives in fp32."""
    model = copy.deepcopy(model).float()
    if not training:
        return Forward(model, "dense", "dense", False).check(tokens[:2])
    variant = Training(model, "dense", "dense", False, micro_batch)
    variant.backward(tokens[:micro_batch], None)
    return [p.grad for p in model.parameters() if p.grad is not None]


def measure(op: str, variants: list[Variant], batches: list[Tensor], truth: list[Tensor], rounds: int) -> list[Row]:
    """Errors, memory, and times of the variants, one call of each in turn."""
    tokens, rows, baseline = batches[0].numel(), [], 0.0
    for variant in variants:
        variant.settle(batches)
        row = Row(op, variant.name, tokens)
        error = relative(variant.check(batches[0]), truth)
        baseline = baseline or error
        row.error = error / baseline
        if not row.error <= TOLERANCE:
            row.red = f"error is {row.error:.2f} times that of {variants[0].name}"
        for _ in range(2):
            variant.call(batches[0])
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        variant.call(batches[0])
        torch.cuda.synchronize()
        row.peak_bytes = torch.cuda.max_memory_allocated() - before
        row.strategies = variant.strategies("training" if op == "train" else "inference")
        rows.append(row)
        print(f"model: {op}, {variant.name} ready", file=sys.stderr)
    del truth

    times: list[list[float]] = [[] for _ in variants]
    for i in range(rounds):
        for variant, samples in zip(variants, times):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            variant.call(batches[i % len(batches)])
            stop.record()
            stop.synchronize()
            samples.append(start.elapsed_time(stop))
    for row, samples in zip(rows, times):
        if row.red:
            continue
        ordered = sorted(samples)
        row.ms, row.samples = statistics.median(ordered), len(ordered)
        row.p10_ms, row.p90_ms = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        row.tokens_per_ms = tokens / row.ms
    dense = min(row.ms for row in rows if row.ms is not None and row.variant.startswith("dense"))
    for row in rows:
        row.speedup = None if row.ms is None else dense / row.ms
    return rows


def non_zeros(model: nn.Module, tokens: Tensor) -> list[float]:
    """Mean non-zeros of a token in each layer."""
    variant = Forward(model, "dense", "dense", False)
    recipe.record_aux(variant.model)
    variant.call(tokens)
    return [float(layer.aux.l0) for layer in variant.layers.values()]


def table(rows: list[Row]) -> str:
    header = ["op", "variant", "tokens", "ms", "p10-p90", "tokens/ms", "over dense", "peak GB", "error", "layers run"]
    lines = [header]
    for row in rows:
        ran = ", ".join(f"{count} {name}" for name, count in sorted(row.strategies.items()))
        timed = ["-"] * 4
        if row.ms is not None:
            spread = f"{row.p10_ms:.1f}-{row.p90_ms:.1f}"
            timed = [f"{row.ms:.1f}", spread, f"{row.tokens_per_ms:.0f}", f"{row.speedup:.2f}"]
        peak = f"{(row.peak_bytes or 0) / 1e9:.1f}"
        lines.append([row.op, row.variant, f"{row.tokens:,}", *timed, peak, f"{row.error:.2f}", row.red or ran])
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a saved model with its tokenizer")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="PATH", help="text files or folders")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--batch", type=int, default=64, help="sequences of a forward pass (%(default)s)")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences of a training pass (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=4, help="training passes of a step (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="timed calls of each variant (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    training = max(arguments.micro_batch * arguments.accumulate, 1)
    sequences = 2 * max(arguments.batch, training)
    options = argparse.Namespace(
        model=arguments.model,
        text=arguments.text,
        tokens=sequences * arguments.sequence,
        sequence=arguments.sequence,
        device="cuda",
        dtype="float32",
        activation=None,
    )
    loaded = _model_text.load(options)
    text = _model_text.read(loaded, options, least=options.tokens)
    ids = torch.tensor(text.sequences, device="cuda")
    rows = []
    model = loaded.model
    narrow = copy.deepcopy(model).bfloat16()
    for op in arguments.ops:
        batches = list(ids.split(training if op == "train" else arguments.batch))[:2]
        truth = exact(model, batches[0], op == "train", arguments.micro_batch)
        if op == "train":
            variants: list[Variant] = [Training(model, *kind, arguments.micro_batch) for kind in KINDS]
        else:
            variants = [(Logits if op == "logits" else Forward)(narrow, *kind) for kind in KINDS]
        rows += measure(op, variants, batches, truth, arguments.rounds)
        del variants, truth
        torch.cuda.empty_cache()
    machine = testing.machine_line("cuda")
    active = non_zeros(narrow, ids[:4])
    print(table(rows))
    print(f"non-zeros a token by layer: {', '.join(f'{value:.1f}' for value in active)}")
    print(machine)
    if arguments.out is not None:
        given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        given.update(model=arguments.model.name, text=[path.name for path in arguments.text], out=None)
        report: dict[str, Any] = {
            "machine": machine,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "arguments": given,
            "layers": len(active),
            "non_zeros": active,
            "rows": [asdict(row) for row in rows],
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(row.red for row in rows))


if __name__ == "__main__":
    sys.exit(main())
