"""Serves one model with vLLM in a process of its own: prints one JSON line with the tokens and what computed them.

Usage: python engine.py '{"model": FOLDER, "prompts": [[1, 2]], "tokens": 8, "engine": {...}}'
"""

from __future__ import annotations

import json
import sys
from typing import Any


def describe(model: Any) -> dict[str, Any]:
    """The class of the model and those of its FFNs, and how their down weights lie in memory."""
    layers = [layer.mlp for layer in model.model.layers]
    rows = [
        child.weight.t().is_contiguous()
        for layer in layers
        for name, child in layer.named_children()
        if name == "down_proj" and hasattr(child, "weight")
    ]
    return {"model": type(model).__name__, "layers": [type(layer).__name__ for layer in layers], "rows": rows}


def main() -> None:
    request = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    engine = LLM(
        request["model"],
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        **request["engine"],
    )
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in request["prompts"]],
        SamplingParams(max_tokens=request["tokens"], temperature=0, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    described = engine.apply_model(describe)[0]
    print("RESULT", json.dumps({"tokens": [list(output.outputs[0].token_ids) for output in outputs], **described}))


if __name__ == "__main__":
    main()
