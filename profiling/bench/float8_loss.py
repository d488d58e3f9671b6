"""The loss of a model of ``twell demo`` on held-back text, its layers in bfloat16 and in e4m3, dense and sparse."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import twell
from profiling.bench import report
from profiling.bench.report import Column
from twell import testing
from twell.commands.demo import demo
from twell.commands.demo.compare import LOSS_TOLERANCE
from twell.commands.demo.corpus import even_windows, read_corpus
from twell.commands.demo.model import ByteModel, train
from twell.commands.request import pick_device
from twell.functional import Strategy

# Windows of held-back text.
WINDOWS = 512
STRATEGIES: tuple[Strategy, ...] = ("dense", "row", "union")


@dataclasses.dataclass
class Row:
    """The model with its layers in e4m3 or bfloat16 by one strategy.

    loss: nats per byte. change: of the loss, beside dense bfloat16; deviation: its standard error over windows of text.
    """

    layers: str
    strategy: str
    loss: float = math.nan
    perplexity: float = math.nan
    change: float = math.nan
    deviation: float = math.nan
    red: str = ""


COLUMNS = [
    Column("layers", lambda r: r.layers, left=True),
    Column("strategy", lambda r: r.strategy, left=True),
    Column("loss", lambda r: f"{r.loss:.4f}"),
    Column("perplexity", lambda r: f"{r.perplexity:.4f}"),
    Column("change", lambda r: f"{r.change:+.5f}"),
    Column("standard error", lambda r: f"{r.deviation:.5f}"),
]


def run(request: demo.DemoRequest, path: Path | None, windows: int = WINDOWS) -> int:
    """Train as ``twell demo`` does, evaluate, and print and write the rows; the exit status."""
    device = pick_device(request.device)
    preset = demo.pick_preset(device)
    shape, schedule = demo.pick_shape(request, preset), demo.schedule_of(request, preset)
    corpus = read_corpus(request.text, request.seed, minimum=8 * (shape.context + 1))
    torch.manual_seed(request.seed)
    trained = ByteModel(shape).to(device)
    with demo.progress() as show:
        told = train(
            trained, corpus.train, schedule, request.seed, lambda r: show(r.progress, demo.figures_of(r)), lambda: None
        )
    tokens = even_windows(corpus.held, windows, shape.context + 1).to(device)
    model = trained.to(torch.bfloat16)
    with torch.no_grad():
        fired = model(tokens[: demo.EVALUATION_BATCH, :-1]).l0.tolist()
    rows = evaluated(model, tokens)
    report.print_table(COLUMNS, rows)
    facts: dict[str, Any] = {
        "machine": testing.machine_line(device),
        "arguments": {"seconds": request.seconds, "steps": request.steps, "seed": request.seed},
        "model": dataclasses.asdict(shape),
        "trained": {"steps": told.steps, "bytes": told.tokens, "seconds": told.seconds},
        "held_bytes": tokens[:, 1:].numel(),
        "non_zeros": fired,
    }
    print(facts["machine"])
    if path is not None:
        report.write_json(path, rows, **facts)
    return 1 if any(row.red for row in rows) else 0


def evaluated(model: ByteModel, tokens: Tensor) -> list[Row]:
    """The rows of a bfloat16 model on windows of text. Sparse and dense of the same weights agree, or a row is red."""
    quantised = copy.deepcopy(model)
    twell.quantize_(quantised)
    for layer in quantised.mlps:
        answer_for_both(layer)
    rows: list[Row] = []
    first = None
    for name, each in (("bfloat16", model), ("e4m3", quantised)):
        dense = math.nan
        for strategy in STRATEGIES:
            row = Row(name, strategy)
            losses = demo.token_losses(each, tokens, strategy, 8).double().mean(1)
            first = losses if first is None else first
            moved = losses - first
            row.loss, row.change = float(losses.mean()), float(moved.mean())
            row.perplexity = math.exp(row.loss)
            row.deviation = float(moved.std()) / math.sqrt(len(moved)) if len(moved) > 1 else 0.0
            dense = row.loss if strategy == "dense" else dense
            if not abs(row.loss - dense) <= LOSS_TOLERANCE:
                row.red = f"loss {row.loss:.4f}, dense {dense:.4f}"
            rows.append(row)
    return rows


def answer_for_both(layer: Any) -> None:
    """Let a layer of e4m3 weights return sums of its hidden state beside y, as the model asks for: zeros."""
    zero = torch.zeros((), device=layer.up_proj.weight.device)
    none = SimpleNamespace(l1=zero, l0=zero)
    layer.register_forward_pre_hook(lambda module, x, more: (x, {}), with_kwargs=True)
    layer.register_forward_hook(lambda module, x, y: (y, none))
