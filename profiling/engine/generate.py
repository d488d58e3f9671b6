"""Time transformers' ``generate``, eager and with a static cache, with stock layers and after README's ``sparsify``.

Both models have the same weights, in bfloat16. "prompt" is a forward pass on --prompts sequences of --prompt tokens
without a cache. "generate" makes --new tokens, the likeliest, for each of some sequences: "eager" with the default
cache, "static" with ``cache_implementation="static"``, whose steps transformers compiles and replays as CUDA graphs. A
model makes all tokens twice, untimed, before --runs timed runs, which the two take in turn; the median counts. Tokens
of the two are compared: for each sequence that differs, the stock model's logits at the first difference say how far
apart the two tokens are, in roundings of a bfloat16 logit. Up to 4 of them is a tie.

    python -m profiling.engine.generate --model 16x2048x5632 --out generate.json   # on a GPU, four minutes
"""

import argparse
import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiling.engine import models
from profiling.harness import write_json
from twell import testing
from twell.commands.request import at_least
from twell.integrations.transformers import sparsify
from twell.nn import explain

# Sequences whose logits are computed at a time.
_PART = 32
CACHES = {"eager": None, "static": "static"}


@dataclasses.dataclass
class Row:
    """One model: tokens per second by the median of ``seconds``. strategies: what its layers ran, by tokens."""

    what: str
    model: str
    sequences: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    tokens_per_s: float = 0.0
    differing: int = 0
    ties: int = 0
    worst: float = 0.0
    strategies: dict[str, int] = dataclasses.field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line for each row and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="16x2048x5632", metavar="M", help=f"{models.NAMES} (16x2048x5632)")
    add("--text", type=Path, nargs="+", default=[], metavar="PATH", help="text for a saved model")
    add("--nnz", type=float, help="mean non-zeros per token of a drawn model (default: the paper's)")
    add("--device", default="cuda", help="(cuda)")
    add("--out", type=Path, required=True, metavar="JSON", help="file for the data")
    add("--sequences", type=int, nargs="+", default=[1, 16], metavar="N", help="sequences at a time (1 16)")
    add("--prompts", type=int, default=8, metavar="N", help="sequences of the prompt pass (8)")
    add("--prompt", type=int, default=2048, metavar="N", help="their tokens; sequences begin with 64 of them (2048)")
    add("--new", type=int, default=128, metavar="N", help="tokens to generate for each (128)")
    add("--runs", type=at_least(1), default=5, metavar="N", help="timed runs of each model (5)")
    add("--caches", nargs="+", choices=CACHES, default=list(CACHES), help="(eager static)")
    arguments = parser.parse_args(argv)
    model, ids = models.make(arguments.model, arguments.text, arguments.device, arguments.nnz)
    device = next(iter(model.parameters())).device
    prompts = ids[max(ids)][: arguments.prompts, : arguments.prompt].to(device)
    heads = ids[min(ids)][: max(arguments.sequences), :64].to(device)
    stock = _stock(model)
    both = {"stock": stock, "sparse": sparsify(_stock(model))}
    rows: list[Row] = []

    def measure(what: str, sequences: int, tokens: int, calls: dict[str, Callable[[], Any]]) -> list[Row]:
        found = [Row(what, name, sequences) for name in calls]
        for call in calls.values():
            call(), call()
        for _ in range(arguments.runs):
            for row, call in zip(found, calls.values()):
                row.seconds.append(timed(call))
        for row in found:
            row.tokens_per_s = tokens / statistics.median(row.seconds)
            row.strategies = ran(both[row.model])
            print(
                f"{what:8} {sequences:4} {row.model:6} {row.tokens_per_s:10,.0f} tokens/s {row.strategies}", flush=True
            )
        rows.extend(found)
        return found

    def write() -> None:
        write_json(
            arguments.out,
            [dataclasses.asdict(row) for row in rows],
            machine=testing.machine_line(device),
            arguments={name: value for name, value in vars(arguments).items() if name not in ("text", "out")},
            attention=stock.config._attn_implementation,
        )

    def prompt(model: Any) -> Callable[[], Any]:
        return lambda: model.get_decoder()(prompts, use_cache=False)[0]

    with torch.inference_mode():
        calls = {name: prompt(model) for name, model in both.items()}
        measure("prompt", arguments.prompts, prompts.numel(), calls)
    for cache in arguments.caches:
        for count in arguments.sequences:
            answers: dict[str, Tensor] = {}

            def generate(name: str, ids: Tensor = heads[:count], cache: Any = CACHES[cache]) -> None:
                answers[name] = both[name].generate(  # noqa: B023
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=arguments.new,
                    min_new_tokens=arguments.new,
                    do_sample=False,
                    cache_implementation=cache,
                    pad_token_id=0,
                )[:, ids.shape[1] :]

            found = measure(cache, count, count * arguments.new, {name: partial(generate, name) for name in both})
            made = [answers[name].tolist() for name in both]
            distances = _distances(stock, heads[:count].tolist(), *made)
            found[1].differing, found[1].worst = len(distances), max(distances, default=0.0)
            found[1].ties = sum(distance <= 4 for distance in distances)
            # what is left may be stopped
            write()
    write()
    return 0


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call until the GPU is done."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ran(model: Any) -> dict[str, int]:
    """How many rows of ``twell.explain`` have each strategy, by tokens."""
    return dict(
        Counter(f"{choice.tokens} {choice.graph}".strip() + f": {choice.strategy}" for choice in explain(model))
    )


def _stock(model: Any) -> Any:
    """The model as transformers has it, with ReLU, and with down weights of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    content = model.config.to_dict()
    kind = content.pop("model_type")
    config = AutoConfig.for_model(
        kind, **content | {"hidden_act": "relu", "architectures": None, "tie_word_embeddings": False}
    )
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {name: t.clone() if "down_proj" in name else t for name, t in model.state_dict().items()}
    stock.load_state_dict(state, assign=True)
    # meta tensors are not in a state
    stock.get_decoder().rotary_emb = model.get_decoder().rotary_emb
    return stock.eval()


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


if __name__ == "__main__":
    raise SystemExit(main())
