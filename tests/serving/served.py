"""Checkpoints for the tests with a serving engine, tiny and random, and what an engine made of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# A small vocabulary, weights of this spread, and float16 instead of bfloat16: the best token is clearly the best, so
# that rounding does not choose it.
SPREAD = 0.1
# Nats of lead below which rounding to e4m3 and bfloat16 may choose another token, and by which it may change any lead.
# Stock vLLM's leads change by up to 0.25 from one rank to two.
UNCLEAR, SWAY = 0.126, 0.5
SIZES = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}

# Attention on a GPU has few sizes of heads, all of them in bfloat16.
HEADS = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
# kv_cache_memory_bytes: other programs may take and free memory of the GPU while an engine starts.
ON_GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_batched_tokens": 1024,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 28,
}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}

# What configurations call otherwise or have besides, by the kind of model.
OF_KIND: dict[str, dict[str, Any]] = {
    "OPT": {"ffn_dim": 704, "word_embed_proj_dim": 256, "init_std": SPREAD, "activation_function": "relu"},
    "NemotronH": {
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
        "head_dim": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 64,
        "chunk_size": 64,
    },
}


@dataclass(frozen=True)
class Served:
    """What an engine gave: the tokens of each prompt, the class of the model, and its log.

    leads: of each token, its log-likelihood over the next best's. cached: tokens of each prompt that were in the
    cache. layers: the down projections of FFNs that run through twell. rows: whether the weight of each lies by rows
    of neurons. experts, experts_rows: the same of layers of experts.
    strategies: of each FFN. choices: of each with "auto" [tokens, calls, non-zeros] by size of calls. known: of each
    with "auto" [tokens, [non-zeros, union]] of sizes without a call.
    started: the choices before the first request.
    """

    tokens: list[list[int]]
    leads: list[list[float]]
    cached: list[int]
    model: str
    layers: list[str]
    rows: list[bool]
    experts: list[str]
    experts_rows: list[bool]
    strategies: list[str]
    choices: list[list[tuple[str, int, float | None]]]
    known: list[list[tuple[int, list[float]]]]
    started: list[list[tuple[str, int, float | None]]]
    log: str


Serve = Callable[..., Served]

LAYERS = SIZES["num_hidden_layers"]
ROW, DENSE = {"sparsity_strategy": "row"}, {"sparsity_strategy": "dense"}
# Sizes of the calls that "auto" counts for the prompts of conftest.py: 128 tokens, 81 with the end of the long prompt,
# then each sequence has one in a step until it has eight.
COUNTED = [[["2", 1], ["3 to 4", 6], ["65 to 128", 2]]] * LAYERS


def counted(served: Served) -> list[list[list[Any]]]:
    """What "auto" counted of each FFN."""
    return [[list(row[:2]) for row in layer] for layer in served.choices]


def needs_gpus(count: int) -> None:
    """Skip a test where there are fewer."""
    import torch

    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def assert_alike(served: Served, right: Served, unclear: float = UNCLEAR) -> None:
    """Leads are near each other up to a token whose lead is so small that rounding chooses it; then texts differ."""
    alike = 0
    for i, (ours, theirs, leads) in enumerate(zip(served.tokens, right.tokens, right.leads, strict=True)):
        same = next((at for at, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), len(theirs))
        assert same == len(theirs) or leads[same] < unclear, (ours, theirs, leads)
        assert all(abs(own - lead) < SWAY for own, lead in zip(served.leads[i][:same], leads)), (served.leads[i], leads)
        alike += same
    assert alike >= sum(map(len, right.tokens)) / 2


def checkpoint(
    folder: Path,
    activation: str,
    rows: bool = False,
    kind: str = "Llama",
    sizes: dict[str, Any] | None = None,
    other_layers: bool = False,
    **config: Any,
) -> Path:
    """Write a model of random weights, for the same sizes the same; ``config`` changes its config.json.

    ``kind`` begins the names of its classes in transformers. With ``rows`` down weights are stored [intermediate,
    hidden]. With ``other_layers`` those of feed-forward layers are shuffled.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    options: dict[str, Any] = SIZES | {"hidden_act": activation, "tie_word_embeddings": False}
    options |= {"initializer_range": SPREAD, **OF_KIND.get(kind, {}), **(sizes or {})}
    stock = getattr(transformers, f"{kind}Config")(**options)
    getattr(transformers, f"{kind}ForCausalLM")(stock).to(torch.float16).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if other_layers:
        weights = load_file(folder / "model.safetensors")
        weights |= {
            name: w.flip(0).contiguous() for name, w in weights.items() if name.removesuffix(".weight").endswith(LINEAR)
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if rows:
        weights = load_file(folder / "model.safetensors")
        turned = {name: t.t().contiguous() if "down_proj" in name else t for name, t in weights.items()}
        save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_CT = {"num_bits": 8, "type": "float", "symmetric": True}


def _compressed(weights: str, inputs: str, dynamic: bool) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {**_CT, "strategy": weights, "dynamic": False},
        "input_activations": {**_CT, "strategy": inputs, "dynamic": dynamic},
    }
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


# Formats of e4m3 checkpoints: ``quantization_config``, granularity of weights, and whether inputs are static.
FLOAT8: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "channel": (_compressed("channel", "token", True), "row", False),
    "tensor": (_compressed("tensor", "tensor", False), "tensor", True),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "tensor", False),
    "fp8-static": ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor", True),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "tensor", True),
    "modelopt-channel": ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "row", False),
}
_LISTS = {"compressed-tensors": "ignore", "fp8": "modules_to_not_convert", "modelopt": "ignore"}
INPUT_SCALE = 0.02


LINEAR = ("gate_proj", "up_proj", "down_proj")


def in_float8(folder: Path, form: str, names: tuple[str, ...] = LINEAR) -> None:
    """Turn a checkpoint to bfloat16 and its linear layers of these names to e4m3, in a format of ``FLOAT8``."""
    import torch
    from safetensors.torch import load_file, save_file

    from twell.ops.float8 import quantize

    settings, granularity, static = FLOAT8[form]
    tensors, skipped = {}, []
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(names) and name != module:
            record = quantize(weight, granularity)
            scale = record.scale[:, None] if form == "channel" else record.scale
            tensors |= {name: record.values, f"{name}_scale": scale}
            if static:
                tensors[f"{module}.input_scale"] = torch.tensor(INPUT_SCALE)
        else:
            tensors[name] = weight.bfloat16()
            skipped += [module] * (name != module and weight.dim() == 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    lists = {_LISTS[settings["quant_method"]]: skipped}
    content = json.loads(path.read_text()) | {"quantization_config": settings | lists, "dtype": "bfloat16"}
    path.write_text(json.dumps(content))


def greedy(model: Path, prompts: list[list[int]], stock: bool = False) -> list[list[int]]:
    """Eight tokens of each prompt by the best one, without an engine; with ``stock`` without twell."""
    import torch
    import transformers

    from twell.integrations.transformers import load

    reader: Any = transformers.AutoModelForCausalLM.from_pretrained if stock else load
    loaded = reader(model, dtype=torch.float16)
    made = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        for _ in range(8):
            with torch.no_grad():
                best = loaded(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, best), 1)
        made.append(tokens[0, len(prompt) :].tolist())
    return made
