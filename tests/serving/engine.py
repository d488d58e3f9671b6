"""Serves one model with vLLM in a process of its own: prints one JSON line with the tokens and what computed them.

Usage: python engine.py '{"model": FOLDER, "prompts": [[1, 2]], "tokens": 8, "engine": {...}}'

"repeat": how often the prompts are served, one time after the other; the last counts.
"chooses": let "auto" choose on the CPU, too, where figures arrive at once. "broken": let no kernel load.
"experts": let a CPU have experts without a gate. "then": folder of a second checkpoint, to which the engine changes and
serves the prompts again; "by": how, "reload_weights" or "load_weights", which is called for each tensor.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any


def describe(model: Any) -> dict[str, Any]:
    """The class of the model, its layers that twell runs, how down weights lie, and what "auto" did."""
    from twell.choose.site import found

    methods = {name: (layer, getattr(layer, "quant_method", None)) for name, layer in model.named_modules()}
    ours = {name: pair for name, pair in methods.items() if type(pair[1]).__name__ == "RunsFFN"}
    # those in e4m3 have the name of vLLM's class
    names = {"RunsExperts", "RunsFloat8Experts"}
    experts = {
        name: layer for name, (layer, how) in methods.items() if names & {kind.__name__ for kind in type(how).__mro__}
    }
    sites = [site for _, method in ours.values() if (site := found(method._first.weight)) is not None]
    choices = [
        [[row.tokens, row.calls, row.figures and row.figures.nonzeros] for row in site.explain()] for site in sites
    ]
    known = [
        [
            [1 << key[1], [bucket.figures.nonzeros, bucket.figures.union]]
            for key, bucket in site._buckets.items()
            if bucket.decision is None
        ]
        for site in sites
    ]
    return {
        "model": type(model).__name__,
        "layers": list(ours),
        "rows": [layer.weight.t().is_contiguous() for layer, _ in ours.values()],
        "strategies": [method.route.strategy for _, method in ours.values()],
        "experts": list(experts),
        "experts_rows": [layer.w2_weight.transpose(1, 2).is_contiguous() for layer in experts.values()],
        "choices": choices,
        "known": known,
    }


def let_auto_choose() -> None:
    """Let the CPU pass for a GPU where "auto" asks."""
    from twell.choose import cards, measurement

    cards.imposed = lambda *_: ""
    measurement.Transfer = lambda values: SimpleNamespace(arrived=lambda: True, read=values.tolist)  # type: ignore[misc]


def let_no_kernel_load() -> None:
    """Let the trial of kernels, which a CPU does not make, fail."""
    from twell.integrations import _vllm_kernels

    _vllm_kernels.trouble = lambda *_, **__: "its kernels cannot be loaded"


def let_experts_have_no_gate() -> None:
    """Let a CPU pass for a GPU where vLLM refuses them: where their configuration is complete."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    completed = FusedMoEConfig.__post_init__

    def complete(config: Any) -> None:
        with contextlib.suppress(NotImplementedError):
            completed(config)

    FusedMoEConfig.__post_init__ = complete


def load_each(model: Any, folder: str) -> None:
    """Load a checkpoint tensor by tensor, as trainers of reinforcement learning send them."""
    from safetensors.torch import load_file

    for name, tensor in load_file(f"{folder}/model.safetensors").items():
        model.load_weights([(name, tensor)])


def change(engine: Any, folder: str, by: str) -> None:
    """Let the engine serve a second checkpoint."""
    if by == "reload_weights":
        engine.collective_rpc(by, kwargs={"weights_path": folder})
    else:
        engine.apply_model(functools.partial(load_each, folder=folder))
    engine.reset_prefix_cache()


def lead(likely: Iterable[Any]) -> float:
    """How much more likely, in nats, the best token is than the next."""
    best, second, *_ = sorted((each.logprob for each in likely), reverse=True)
    return float(best - second)


def main() -> None:
    request = json.loads(sys.argv[1])
    if request.get("chooses"):
        let_auto_choose()
    if request.get("broken"):
        let_no_kernel_load()
    from vllm import LLM, SamplingParams

    engine = LLM(
        request["model"],
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        **request["engine"],
    )
    started = engine.apply_model(describe)[0]["choices"]
    for served in range(times := request.get("repeat", 1) + bool(request.get("then"))):
        if served == times - 1 and request.get("then"):
            change(engine, request["then"], request["by"])
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in request["prompts"]],
            SamplingParams(max_tokens=request["tokens"], temperature=0, ignore_eos=True, detokenize=False, logprobs=2),
            use_tqdm=False,
        )
    result = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "leads": [[lead(likely.values()) for likely in output.outputs[0].logprobs] for output in outputs],
        "started": started,
        "cached": [output.num_cached_tokens for output in outputs],
        **engine.apply_model(describe)[0],
    }
    print("RESULT", json.dumps(result))


# workers of several ranks import this file by another name
if __name__ in ("__main__", "__mp_main__") and json.loads(sys.argv[1]).get("experts"):
    let_experts_have_no_gate()
if __name__ == "__main__":
    main()
