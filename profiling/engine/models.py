"""Drawn models to serve, as checkpoints of transformers: Llamas, and a Nemotron-H with routed experts."""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import twell
from profiling.bench import models_random
from profiling.bench.models_random import LlamaSizes
from twell import testing
from twell.commands import analyze
from twell.testing.experts import FIRING

LENGTH = 2304
# Prompts by their number of tokens.
PROMPTS = {2048: 64, 128: 512}


# Of Mamba, of experts and of attention.
MAMBA, EXPERTS, ATTENTION = "linear_attention", "moe", "full_attention"
# Sizes of Nemotron 3 Nano, of fewer layers, with half of its experts and of its Mamba heads.
NEMOTRON: dict[str, Any] = {
    "layers_block_type": [MAMBA, EXPERTS, MAMBA, EXPERTS, ATTENTION, EXPERTS, MAMBA, EXPERTS, ATTENTION, EXPERTS],
    "hidden_size": 2688,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 32,
    "n_groups": 8,
    "vocab_size": 32768,
}
# By name: the sizes of the paper's 1.5B model, of layers of Llama-3-8B, and of a Nemotron-H with routed experts.
DRAWN: dict[str, LlamaSizes | dict[str, Any]] = {
    "1.5B": LlamaSizes("1.5B", 28, 2048, 5632, 16, vocab=32768, kv=4),
    "large": LlamaSizes("large", 16, 4096, 14336, 32, vocab=32768, kv=4),
    "nemotron": NEMOTRON,
}
# Column 0 of the residual, which no layer writes, beside others that begin with a deviation of 1. It is the bias of
# experts, whose squares are small where few neurons fire.
_CONSTANT, _DOWN = 4.0, 2.0
_SAMPLE = (4, 128)


def sizes(text: str) -> LlamaSizes:
    """An argparse type: the name of a Llama, or LAYERSxHIDDENxNEURONS[xHEADS[xVOCAB]]."""
    llamas = {name: drawn for name, drawn in DRAWN.items() if isinstance(drawn, LlamaSizes)}
    shape = models_random.parse_sizes(text, llamas)
    return dataclasses.replace(shape, kv=min(4, shape.heads))


def draw(drawn: LlamaSizes, device: str, nnz: float | None = None) -> tuple[Any, dict[int, Tensor]]:
    """A Llama of random weights in bfloat16, and ids of its prompts by their length."""
    model = models_random.build(drawn, LENGTH, device)
    pattern = models_random.Pattern(nnz or 29 / testing.PAPER_NEURONS * drawn.neurons)
    models_random.draw(model, models_random.draw_ids(drawn, 64, 2048, pattern.topic, 0), pattern)
    embedding = model.get_input_embeddings().weight.detach()
    # correlated output weights would make a model repeat its last token
    normal = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(20), device="cpu")
    model.lm_head.weight = nn.Parameter(normal.to(embedding) * embedding.float().std().to(embedding.dtype))
    # other sequences than those of the thresholds
    ids = partial(models_random.draw_ids, drawn, topic=pattern.topic)
    return model, {length: ids(count, length, seed=3 + length) for length, count in PROMPTS.items()}


def draw_mixed(sizes: dict[str, Any], device: str) -> tuple[Any, dict[int, Tensor]]:
    """A Nemotron-H of random weights whose experts fire for the share ``FIRING``, and ids of its prompts."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    fixed: dict[str, Any] = {"mamba_head_dim": 64, "routed_scaling_factor": 2.5, "max_position_embeddings": LENGTH}
    fixed |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = NemotronHConfig(**sizes, intermediate_size=sizes["moe_intermediate_size"], **fixed)
    with torch.device(device):
        model = NemotronHForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    generator = torch.Generator(device).manual_seed(0)
    _fill(model, generator)

    def ids(*shape: int) -> Tensor:
        return torch.randint(config.vocab_size, shape, generator=generator, device=device)

    _calibrate(model, ids(*_SAMPLE))
    return model, {length: ids(count, length) for length, count in PROMPTS.items()}


@torch.no_grad()
def _fill(model: nn.Module, generator: torch.Generator) -> None:
    """Draw all matrices; norms, and what Mamba has besides, stay."""
    for name, weight in model.named_parameters():
        part = name.removesuffix(".weight").rpartition(".")[2]
        if weight.dim() == 1:
            continue
        scale = {"embeddings": weight.shape[-1] ** 0.5, "down_proj": _DOWN}.get(part, 1.0)
        weight.normal_(std=scale * weight.shape[-1] ** -0.5, generator=generator)
        if part == "embeddings":
            weight[:, 0] = _CONSTANT
        elif part in ("gate", "lm_head"):
            # the constant prefers no expert and no token
            weight[:, 0] = 0
        elif part in ("o_proj", "out_proj", "down_proj"):
            weight[..., 0, :] = 0


@torch.no_grad()
def _calibrate(model: Any, ids: Tensor) -> None:
    """Let the share ``FIRING`` of the gates of each layer be positive for these ``ids``, by column 0 of up weights."""
    quantile = float(torch.special.ndtri(torch.tensor(FIRING, dtype=torch.float64, device="cpu")))

    def set_column(mixer: Any, given: tuple[Tensor, ...]) -> None:
        x = given[0].flatten(0, -2).float()
        for up in (mixer.experts.up_proj, mixer.shared_experts.up_proj.weight):
            # of a gate of independent weights with the deviation 1 / sqrt(hidden)
            deviation = x[:, 1:].norm(dim=1).mean() * up.shape[-1] ** -0.5
            up[..., 0] = quantile * deviation / x[:, 0].mean()

    hooks = [layer.register_forward_pre_hook(set_column) for layer in layers(model)]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()


def layers(model: Any) -> list[Any]:
    return [layer.mixer for layer in model.model.layers if hasattr(layer.mixer, "experts")]


def stock(model: Any) -> Any:
    """A drawn Llama as transformers has it, with ReLU, and with down weights of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    own, known = model.config.to_dict(), LlamaConfig().to_dict()
    content = {name: own[name] for name in known if name in own and name not in ("architectures", "model_type")}
    config = LlamaConfig(**content | {"hidden_act": "relu", "tie_word_embeddings": False})
    with torch.device("meta"):
        made = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    state = {name: t.clone() if "down_proj" in name else t for name, t in model.state_dict().items()}
    made.load_state_dict(state, assign=True)
    # meta tensors are not in a state
    made.get_decoder().rotary_emb = model.get_decoder().rotary_emb
    return made.eval()


def write(folder: Path, name: str, nnz: float | None, device: str = "cuda") -> None:
    drawn = DRAWN[name]
    if isinstance(drawn, dict):
        model, prompts = draw_mixed(drawn, device)
        model.save_pretrained(folder / "relu")
    else:
        llama, prompts = draw(drawn, device, nnz)
        model = stock(llama)
        model.save_pretrained(folder / "relu")
        analyze.save(folder / "relu", twell.analyze(model, prompts[2048][:8].split(2)).layers)
    (folder / "prompts.json").write_text(json.dumps({length: ids.tolist() for length, ids in prompts.items()}))


if __name__ == "__main__":
    target, model_name, wanted = sys.argv[1:]
    write(Path(target), model_name, float(wanted) if wanted else None)
