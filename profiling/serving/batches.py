"""Serve requests with transformers' continuous batching (``generate_batch``), with stock layers and with ``sparsify``.

Prompts are drawn or text, of 64 to 192 tokens; all requests arrive at once and want --new tokens each, the likeliest.
The stock model and the sparse one have the same weights. A drawn model gets random output weights of its own: with
those of its embedding it would repeat the last token of the prompt, whatever its layers compute. Each model first
serves some tokens without CUDA graphs, untimed, in which "auto" measures its layers, and then all requests once,
untimed, in which it captures CUDA graphs, as a server has done when it is warm. Then both serve all requests --runs
times, in turn, as far as --budget-s allows: a time is from the first request's start to the last one's end, and the
median counts. Prompts share no pages. Without the package flash-attn transformers attends by masked products over the
cache of all requests, which take most of it.

Tokens: batches depend on timing and products on the size of a batch, so two runs of one model differ, too. For each
request whose tokens differ from those of the first stock run, the stock model's logits at the first difference say how
far apart the two tokens are, in roundings of a bfloat16 logit: up to --tie of them is a tie.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiling.bench.report import write_json
from profiling.serving import models
from twell import testing
from twell.commands.request import at_least
from twell.nn import explain, set_down_layout

PROMPT = (64, 192)
# Another seed than the embedding has, of whose weights these would be a shifted copy.
_HEAD_SEED = 20
# Sequences whose logits are computed at a time.
_PART = 32
# Most tokens of a batch; tokens of a page of the cache, and pages beside one for each request.
MOST_TOKENS, PAGE, SPARE = 8192, 256, 16


@dataclasses.dataclass
class Row:
    """One model with so many requests: seconds of its runs, tokens per second by their median.

    differing: requests whose tokens differ from those of the first stock run, by run. ties: how many of these differ
    first at a tie. worst: the largest distance at a first difference, in roundings. strategies: what "auto" ran.
    """

    model: str
    requests: int
    tokens: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    tokens_per_s: float = 0.0
    differing: list[int] = dataclasses.field(default_factory=list)
    ties: list[int] = dataclasses.field(default_factory=list)
    worst: float = 0.0
    strategies: dict[str, int] = dataclasses.field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="JSON", help="file for the data")
    add("--requests", type=int, nargs="+", default=[64, 256], metavar="N", help="requests at a time (64 256)")
    add("--new", type=int, default=64, metavar="N", help="tokens to generate for each (64)")
    add("--runs", type=at_least(1), default=5, metavar="N", help="times that each model serves all requests (5)")
    add("--budget-s", type=float, default=110, help="begin no further run after this many seconds (110)")
    add("--tie", type=float, default=4.0, metavar="N", help="roundings that a tie may be apart (4)")


def run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    most = max(arguments.requests)
    subject = models.subject(arguments, (4, 2048 if arguments.model is None else 512), (most, PROMPT[1]))
    if arguments.model is None:
        _draw_head(subject.model)
    stock, sparse = _stock(subject.model), subject.model
    set_down_layout(sparse, "rows")
    for layer in _layers(sparse):
        layer.strategy = "auto"
    draw = random.Random(0)
    prompts = [row[: draw.randint(*PROMPT)] for row in subject.heads.tolist()]
    print(f"{subject.name}: ready after {time.monotonic() - began:.0f} s", file=sys.stderr)
    rows: list[Row] = []
    for count in arguments.requests:
        if rows and time.monotonic() - began > arguments.budget_s:
            print(f"{count} requests: no time left", file=sys.stderr)
            break
        found = [Row(name, count, count * arguments.new) for name in ("stock", "sparse")]
        for model in (stock, sparse):
            _serve(model, prompts[:count], 8, graphs=False)
        graphs = subject.device.type == "cuda"
        for model in (stock, sparse):
            _serve(model, prompts[:count], arguments.new, graphs, keep=True)
        first: list[list[int]] = []
        for again in range(arguments.runs):
            if again and time.monotonic() - began > arguments.budget_s:
                break
            for row, model in zip(found, (stock, sparse)):
                answers, seconds = _serve(model, prompts[:count], arguments.new, graphs, keep=True)
                row.seconds.append(seconds)
                first = first or answers
                distances = _distances(stock, prompts, first, answers)
                row.differing.append(len(distances))
                row.ties.append(sum(distance <= arguments.tie for distance in distances))
                row.worst = max([row.worst, *distances])
        for model in (stock, sparse):
            model.destroy_cached_continuous_batching_manager()
        for row in found:
            row.tokens_per_s = row.tokens / statistics.median(row.seconds)
        for layer in _layers(sparse):
            for choice in explain(layer):
                key = f"{choice.tokens}{' ' if choice.graph else ''}{choice.graph}: {choice.strategy}"
                found[1].strategies[key] = found[1].strategies.get(key, 0) + 1
        rows += found
    for row in rows:
        print(
            f"{row.requests:4} requests, {row.model:6} {row.tokens_per_s:9,.0f} tokens per second "
            f"(runs {', '.join(f'{s:.2f} s' for s in row.seconds)}); other tokens than stock's first run: "
            f"{row.differing}, of these at ties {row.ties}, furthest {row.worst:.1f} roundings"
        )
    device = subject.device
    write_json(
        arguments.out,
        rows,
        machine=testing.machine_line(device),
        arguments={name: value for name, value in vars(arguments).items() if name != "config"},
        model=subject.name,
        attention=stock.config._attn_implementation,
        total_s=time.monotonic() - began,
    )
    return 0


def _layers(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.get_decoder().layers]


def _draw_head(model: Any) -> None:
    """Give the model output weights of its own, as large as those that it has."""
    embedding = model.get_input_embeddings().weight
    drawn = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(_HEAD_SEED), device="cpu")
    drawn *= embedding.float().std().item()
    model.config.tie_word_embeddings = False
    model.get_output_embeddings().weight = torch.nn.Parameter(drawn.to(embedding))


def _stock(model: Any) -> Any:
    """The model as transformers has it, with ReLU, and with down weights of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    content = model.config.to_dict()
    # SparseLlama and SparseQwen2 name their base in their model type
    kind = content.pop("model_type").removeprefix("sparse_")
    config = AutoConfig.for_model(kind, **content | {"hidden_act": "relu", "architectures": None})
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {name: t.clone() if "down_proj" in name else t for name, t in model.state_dict().items()}
    stock.load_state_dict(state, assign=True)
    stock.tie_weights()
    # meta tensors are not in a state
    stock.get_decoder().rotary_emb = model.get_decoder().rotary_emb
    return stock.eval()


def _serve(
    model: Any, prompts: Sequence[list[int]], new: int, graphs: bool, keep: bool = False
) -> tuple[list[list[int]], float]:
    """Generate ``new`` tokens for each prompt; return them and the seconds from the first start to the last end.

    ``keep``: keep cache and CUDA graphs for the next call.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = len(prompts) * -(-(PROMPT[1] + new) // PAGE) + SPARE
    options = {"max_batch_tokens": MOST_TOKENS, "num_blocks": pages, "use_cuda_graph": graphs, "page_size": PAGE}
    options["allow_block_sharing"] = False
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    outputs = model.generate_batch(
        [list(prompt) for prompt in prompts],
        generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**{k: v for k, v in options.items() if k in known}),
        persistent_manager=keep,
    )
    answers = [output.generated_tokens for output in outputs.values()]
    if len(answers) != len(prompts) or any(len(answer) != new for answer in answers):
        lengths = sorted({len(answer) for answer in answers})
        raise RuntimeError(f"expected {len(prompts)} answers of {new} tokens, got {len(answers)} of {lengths}")
    spans = [output.lifespan for output in outputs.values()]
    return answers, max(end for _, end in spans) - min(start for start, _ in spans)


@torch.inference_mode()
def _distances(
    stock: Any, prompts: Sequence[list[int]], first: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[float]:
    """For each request whose answers differ, how many roundings apart the logits at the first difference are."""
    device = next(stock.parameters()).device
    different = []
    for prompt, a, b in zip(prompts, first, answers):
        if a != b:
            at = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
            different.append(([*prompt, *a[:at]], a[at], b[at]))
    found = []
    for start in range(0, len(different), _PART):
        part = different[start : start + _PART]
        # tokens behind a sequence do not change what attention, which is causal, makes of it
        ids = [torch.tensor(sequence, device=device) for sequence, _, _ in part]
        hidden = stock.get_decoder()(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), use_cache=False)[0]
        ends = torch.tensor([len(sequence) - 1 for sequence in ids], device=device)
        logits: Tensor = stock.get_output_embeddings()(hidden[torch.arange(len(part), device=device), ends]).float()
        for row, (_, one, other) in zip(logits.tolist(), part):
            # a bfloat16 has 8 bits
            rounding = 2.0 ** (math.frexp(max(abs(row[one]), abs(row[other])))[1] - 8)
            found.append(abs(row[one] - row[other]) / rounding)
    return found
