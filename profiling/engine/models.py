"""Models to serve, written as checkpoints of transformers: drawn ones, with the same weights for ReLU and SiLU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from profiling.bench import models_random
from twell import testing

LENGTH = 2304
# Correlated output weights would make a model repeat its last token.
_HEAD_SEED = 20
# Prompts by their number of tokens.
PROMPTS = {2048: 64, 128: 512}


class Drawn(NamedTuple):
    """Sizes of a drawn model. heads are those of queries; keys and values have ``kv``."""

    layers: int
    hidden: int
    neurons: int
    heads: int
    kv: int = 4
    vocab: int = 32768


# By name; the sizes of the paper's 1.5B model and of layers of Llama-3-8B.
DRAWN = {"1.5B": Drawn(28, 2048, 5632, 16), "large": Drawn(16, 4096, 14336, 32), "tiny": Drawn(2, 2048, 5632, 16)}


@torch.no_grad()
def write(folder: Path, drawn: Drawn, nnz: float | None = None) -> None:
    """Write ``folder``/relu and ``folder``/silu, of the same weights, and ``folder``/prompts.json."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from twell.integrations.transformers import SparseLlamaConfig, SparseLlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": drawn.vocab,
        "hidden_size": drawn.hidden,
        "intermediate_size": drawn.neurons,
        "num_hidden_layers": drawn.layers,
        "num_attention_heads": drawn.heads,
        "num_key_value_heads": drawn.kv,
        "max_position_embeddings": LENGTH,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with torch.device("cuda"):
        model = SparseLlamaForCausalLM(SparseLlamaConfig(**sizes, tie_word_embeddings=True, sparsity_strategy="dense"))
    models_random.cast(model, torch.bfloat16)
    pattern = models_random.Pattern(nnz or 29 / testing.PAPER_NEURONS * drawn.neurons)
    shape = models_random.LlamaSizes("", *drawn[:4], drawn.vocab)
    models_random.draw(model.eval(), models_random.draw_ids(shape, 64, 2048, pattern.topic, 0), pattern)
    weights = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items() if "lm_head" not in name}
    embedding = weights["model.embed_tokens.weight"]
    normal = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(_HEAD_SEED), device="cpu")
    weights["lm_head.weight"] = (normal * embedding.float().std()).to(embedding.dtype)
    for kind in ("relu", "silu"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        config = LlamaConfig(**sizes, tie_word_embeddings=False, hidden_act=kind)
        config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
        config.save_pretrained(folder / kind)
    save_file(weights, folder / "relu" / "model.safetensors", metadata={"format": "pt"})
    os.link(folder / "relu" / "model.safetensors", folder / "silu" / "model.safetensors")
    # other sequences than those of the thresholds
    prompts = {
        length: models_random.draw_ids(shape, count, length, pattern.topic, 3 + length).tolist()
        for length, count in PROMPTS.items()
    }
    (folder / "prompts.json").write_text(json.dumps(prompts))


if __name__ == "__main__":
    write(Path(sys.argv[1]), DRAWN[sys.argv[2]])
