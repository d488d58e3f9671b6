"""``python -m profiling.bench generate``: ``generate`` of transformers, stock and after README's ``sparsify``."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profiling.engine import models
from profiling.harness import Bench, Case, Row, Settled, Variant, Verdict, Way
from twell.commands.request import at_least, number_above
from twell.commands.timing import Call
from twell.integrations.transformers import sparsify
from twell.nn.layers import explain

NAME = "profiling.bench generate"
DESCRIPTION = """\
Time a drawn model of transformers with stock layers and with sparse ones, of the same weights, in bfloat16. "prompt" is
a forward pass on --prompts sequences of --prompt tokens without a cache. "eager" and "static" make --new tokens, the
likeliest, for each of some sequences, with the default cache, and with one whose steps transformers compiles and
replays as CUDA graphs. For each sequence in which the tokens of the two differ, the stock model's logits at the first
difference say how far apart the two tokens are, in roundings of a bfloat16 logit. Up to 4 of them is a tie.
"""
CACHES = {"eager": None, "static": "static"}
OPTIONS = {
    "--model": (models.sizes, "16x2048x5632", "1.5B, large or LAYERSxHIDDENxNEURONS[xHEADS[xVOCAB]]"),
    "--nnz": (number_above(0), None, "mean non-zeros per token (the paper's share)"),
    "--sequences": (at_least(1), [1, 16], "sequences at a time"),
    "--prompts": (at_least(1), 8, "sequences of the prompt pass"),
    "--prompt": (at_least(1), 2048, "their tokens; sequences begin with 64 of them"),
    "--new": (at_least(1), 128, "tokens to generate for each"),
    "--rounds": (at_least(1), 5, "least calls of each model that are timed"),
    "--caches": (tuple(CACHES), list(CACHES), "kinds of generation"),
}
SECONDS = 1e-3
SHOWN = ("what", "sequences", "model", "tokens_per_s", "strategies", "differing", "ties", "worst")
MODELS, TIE = ("stock", "sparse"), 4


def cases(bench: Bench) -> Iterator[Case]:
    given = bench.arguments
    bench.given["model"] = given.model.name
    drawn, ids = models.draw(given.model, str(bench.device.torch_device), given.nnz)
    stock = models.stock(drawn)
    both = {"stock": stock, "sparse": sparsify(models.stock(drawn))}
    bench.facts["attention"] = stock.config._attn_implementation
    prompts = ids[max(ids)][: given.prompts, : given.prompt].to(bench.device.torch_device)
    heads = ids[min(ids)][: max(given.sequences), :64].to(bench.device.torch_device)
    way = Way("waited", "ms", calls=1, least=given.rounds, warm=1)

    def measure(base: Row, tokens: int, call: Callable[[str], Call], given: Tensor | None) -> Iterator[list[Row]]:
        answers = Answers(stock, given)
        made = {name: call(name) for name in MODELS}
        variants = [
            Variant(name, partial(lambda call, _: call, made[name]), 1, "", answers.check, answers.note)
            for name in MODELS
        ]
        rows = bench.timed(base, variants, [way])
        for row in rows:
            row["model"] = row.pop("variant")
            row["tokens_per_s"] = row["ms"] and tokens / row["ms"] * 1e3
            row["strategies"] = ran(both[row["model"]])
        yield rows

    def prompt(name: str) -> Call:
        return lambda _: (both[name].get_decoder()(prompts, use_cache=False)[0],)

    def generate(ids: Tensor, cache: Any, name: str) -> Call:
        more: dict[str, Any] = {"max_new_tokens": given.new, "min_new_tokens": given.new, "do_sample": False}
        more |= {"attention_mask": torch.ones_like(ids), "cache_implementation": cache, "pad_token_id": 0}
        return lambda _: (both[name].generate(ids, **more)[:, ids.shape[1] :],)

    base: Row = {"what": "prompt", "sequences": given.prompts}
    yield base, partial(measure, base, prompts.numel(), prompt, None)
    for cache in given.caches:
        for count in given.sequences:
            base = {"what": cache, "sequences": count}
            call = partial(generate, heads[:count], CACHES[cache])
            yield base, partial(measure, base, count * given.new, call, heads[:count])


class Answers:
    """The tokens that both models make behind some prompts, if these are given: those of stock come first."""

    def __init__(self, stock: Any, prompts: Tensor | None) -> None:
        self.stock, self.prompts = stock, prompts
        self.first: Tensor | None = None
        self.found: list[float] = []

    def check(self, _: str, call: Call, outputs: tuple[Tensor, ...]) -> Verdict:
        """Other tokens are no fault."""
        if self.prompts is not None and self.first is not None:
            self.found = distances(self.stock, self.prompts.tolist(), self.first.tolist(), outputs[0].tolist())
        self.first = outputs[0]
        return {}, ""

    def note(self, row: Row, settled: Settled, _: object) -> None:
        row["differing"], row["worst"] = len(self.found), max(self.found, default=0.0)
        row["ties"] = sum(distance <= TIE for distance in self.found)


def ran(model: Any) -> dict[str, int]:
    """How many rows of ``twell.explain`` have each strategy, by tokens."""
    return dict(
        Counter(f"{choice.tokens} {choice.graph}".strip() + f": {choice.strategy}" for choice in explain(model))
    )


@torch.inference_mode()
def distances(
    stock: Any, prompts: Sequence[list[int]], first: Sequence[list[int]], second: Sequence[list[int]]
) -> list[float]:
    """For each prompt whose answers differ, how many roundings apart the logits at the first difference are."""
    device, found = next(stock.parameters()).device, []
    for prompt, ours, theirs in zip(prompts, first, second):
        at = next((i for i, (x, y) in enumerate(zip(ours, theirs)) if x != y), None)
        if at is not None:
            ids = torch.tensor([[*prompt, *ours[:at]]], device=device)
            logits = stock(ids, use_cache=False).logits[0, -1].float()
            one, other = float(logits[ours[at]]), float(logits[theirs[at]])
            # a bfloat16 has 8 bits
            found.append(abs(one - other) / 2.0 ** (math.frexp(max(abs(one), abs(other)))[1] - 8))
    return found
