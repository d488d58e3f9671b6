"""``python -m profiling.bench generate``: ``generate`` of transformers, stock and after README's ``sparsify``.

Time a drawn model of transformers with stock layers and with sparse ones, of the same weights, in bfloat16. "prompt" is
a forward pass on --prompts sequences of --prompt tokens without a cache. "eager" and "static" make --new tokens, the
likeliest, for each of some sequences, with the default cache, and with one whose steps transformers compiles and
replays as CUDA graphs.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profiling.engine import models
from profiling.harness import Bench, Case, Row, Variant, Way
from twell.commands.request import at_least, number_above
from twell.commands.timing import Call
from twell.integrations.transformers import sparsify
from twell.nn.models import explain

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
SHOWN = ("what", "sequences", "model", "tokens_per_s", "strategies")


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

    def measure(base: Row, tokens: int, call: Callable[[str], Call]) -> Iterator[list[Row]]:
        variants = [Variant(name, partial(lambda call, _: call, call(name)), 1) for name in both]
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
    yield base, partial(measure, base, prompts.numel(), prompt)
    for cache in given.caches:
        for count in given.sequences:
            base = {"what": cache, "sequences": count}
            call = partial(generate, heads[:count], CACHES[cache])
            yield base, partial(measure, base, count * given.new, call)


def ran(model: Any) -> dict[str, int]:
    """How many rows of ``twell.explain`` have each strategy, by tokens."""
    return dict(Counter(f"{each.tokens} {each.graph}".strip() + f": {each.strategy}" for each in explain(model)))
