"""Drawn models to serve, as checkpoints of transformers."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from profiling.bench import models_random
from profiling.bench.models_random import LlamaSizes
from twell import testing

LENGTH = 2304
# Correlated output weights would make a model repeat its last token.
_HEAD_SEED = 20
# Prompts by their number of tokens.
PROMPTS = {2048: 64, 128: 512}


# By name: the sizes of the paper's 1.5B model, and of layers of Llama-3-8B.
DRAWN = {
    "1.5B": LlamaSizes("1.5B", 28, 2048, 5632, 16, vocab=32768, kv=4),
    "large": LlamaSizes("large", 16, 4096, 14336, 32, vocab=32768, kv=4),
}


def draw(drawn: LlamaSizes, device: str, nnz: float | None = None) -> tuple[Any, dict[int, Tensor]]:
    """A Llama of random weights in bfloat16, and ids of its prompts by their length."""
    model = models_random.build(drawn, LENGTH, device)
    pattern = models_random.Pattern(nnz or 29 / testing.PAPER_NEURONS * drawn.neurons)
    models_random.draw(model, models_random.draw_ids(drawn, 64, 2048, pattern.topic, 0), pattern)
    embedding = model.get_input_embeddings().weight.detach()
    normal = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(_HEAD_SEED), device="cpu")
    model.lm_head.weight = nn.Parameter(normal.to(embedding) * embedding.float().std().to(embedding.dtype))
    # other sequences than those of the thresholds
    return model, {
        length: models_random.draw_ids(drawn, count, length, pattern.topic, 3 + length)
        for length, count in PROMPTS.items()
    }


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
    """Write ``folder``/relu and ``folder``/prompts.json."""
    llama, prompts = draw(DRAWN[name], device, nnz)
    stock(llama).save_pretrained(folder / "relu")
    (folder / "prompts.json").write_text(json.dumps({length: ids.tolist() for length, ids in prompts.items()}))


if __name__ == "__main__":
    target, model_name, wanted = sys.argv[1:]
    write(Path(target), model_name, float(wanted) if wanted else None)
