"""Tiny saved models with weights in e4m3, in the layouts that transformers reads, for tests of what becomes of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from twell.ops.float8 import Granularity, quantize

K, N, LAYERS, VOCABULARY = 128, 256, 2, 288
PROJECTIONS = {
    "llama": ("gate_proj", "up_proj", "down_proj"),
    "nemotron": ("up_proj", "down_proj"),
    "opt": ("fc1", "fc2"),
}
_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
_BY_TOKEN = {"strategy": "token", "dynamic": True}
_STATIC = {"strategy": "tensor", "dynamic": False}
_BY_GROUP = {"strategy": "group", "group_size": 128, "dynamic": True}


def compressed(strategy: str, inputs: dict[str, Any], **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": _E4M3 | {"strategy": strategy, "dynamic": False} | weights,
        "input_activations": _E4M3 | inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def fp8(block: list[int] | None = None, scheme: str = "dynamic") -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block}


# the granularity, the names and shapes of scales in files, and the configuration
LAYOUTS: dict[str, tuple[Granularity, str, list[int], str, dict[str, Any]]] = {
    "dynamic": ("row", "weight_scale", [-1, 1], "", compressed("channel", _BY_TOKEN)),
    "static": ("tensor", "weight_scale", [1], "input_scale", compressed("tensor", _STATIC)),
    "block": ("block", "weight_scale", [], "", compressed("block", _BY_GROUP, block_structure=[128, 128])),
    "fp8": ("tensor", "weight_scale_inv", [], "", fp8()),
    "fp8 static": ("tensor", "weight_scale_inv", [], "activation_scale", fp8(scheme="static")),
    "fp8 block": ("block", "weight_scale_inv", [], "", fp8([128, 128])),
    "modelopt": ("tensor", "weight_scale", [], "input_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
}


def build(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": K,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
    }
    if kind == "opt":
        sizes |= {"ffn_dim": N, "word_embed_proj_dim": K, "dropout": 0.0, "init_std": 0.1}
    else:
        sizes |= {"intermediate_size": N, "initializer_range": 0.1, "num_key_value_heads": 4}
        # phi3's is beyond the vocabulary
        sizes["pad_token_id"] = 0
        sizes["hidden_act"] = "relu2" if kind == "nemotron" else "relu"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def save(folder: Path, layout: str, kind: str = "llama", kept: Sequence[str] = ()) -> Path:
    """Write ``build``'s model with its linear layers in e4m3, except for those whose names end as one of ``kept``."""
    granularity, name_of_scale, shape, name_of_inputs, settings = LAYOUTS[layout]
    build(kind).save_pretrained(folder)
    file, written = folder / "model.safetensors", {}
    for place, (name, tensor) in enumerate(load_file(file).items()):
        module = name.removesuffix(".weight")
        written[name] = tensor
        linear = module.endswith(("_proj", "fc1", "fc2"))
        if name.endswith(".weight") and linear and not module.endswith(tuple(kept) or "-"):
            record = quantize(tensor, granularity)
            written[name] = record.values
            written[f"{module}.{name_of_scale}"] = record.scale.view(shape) if shape else record.scale
            if name_of_inputs:
                # squares are large
                inputs = 0.5 if module.endswith(("down_proj", "fc2")) else 2.0 ** -(5 + place % 2)
                written[f"{module}.{name_of_inputs}"] = torch.tensor(inputs).view(shape)
    save_file(written, file, metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    key = "modules_to_not_convert" if settings["quant_method"] == "fp8" else "ignore"
    names = [*settings.get(key, ()), *(f"re:.*{each}$" if key == "ignore" else each for each in kept)]
    content["quantization_config"] = settings | {key: ["lm_head", *names]}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def weights(kind: str) -> tuple[str, ...]:
    return tuple(f"{name}.weight" for name in PROJECTIONS[kind])


def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
