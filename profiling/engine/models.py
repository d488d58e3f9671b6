"""Models to serve, drawn or trained, as checkpoints of transformers."""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiling.bench import models_random
from profiling.bench.models_random import LlamaSizes
from twell import testing
from twell.commands import saved_model

LENGTH = 2304
# Correlated output weights would make a model repeat its last token.
_HEAD_SEED = 20
# Prompts by their number of tokens.
PROMPTS = {2048: 64, 128: 512}


# By name; the sizes of the paper's 1.5B model and of layers of Llama-3-8B.
DRAWN = {
    name: LlamaSizes(name, *sizes, vocab=32768, kv=4)
    for name, sizes in {
        "1.5B": (28, 2048, 5632, 16),
        "large": (16, 4096, 14336, 32),
        "tiny": (2, 2048, 5632, 16),
    }.items()
}
NAMES = f"{', '.join(DRAWN)}, LAYERSxHIDDENxNEURONS[xHEADS[xVOCAB]], or the folder of a saved model"


def sizes(name: str) -> LlamaSizes | None:
    """The sizes of a drawn model of this name, or LAYERSxHIDDENxNEURONS[xHEADS[xVOCAB]]; None for a folder."""
    if name in DRAWN or not re.fullmatch(r"\d+(x\d+){2,4}", name):
        return DRAWN.get(name)
    shape = models_random.parse_sizes(name)
    return dataclasses.replace(shape, kv=min(4, shape.heads))


def make(name: str, text: list[Path], device: str, nnz: float | None = None) -> tuple[Any, dict[int, Tensor]]:
    """A model in bfloat16, drawn or saved in the folder of this name, and ids of its prompts by their length."""
    drawn = sizes(name)
    return load(Path(name), text, device) if drawn is None else draw(drawn, device, nnz)


def draw(drawn: LlamaSizes, device: str, nnz: float | None = None) -> tuple[Any, dict[int, Tensor]]:
    """A model of random weights in bfloat16, and ids of its prompts by their length."""
    model = models_random.build(drawn, LENGTH, device)
    pattern = models_random.Pattern(nnz or 29 / testing.PAPER_NEURONS * drawn.neurons)
    models_random.draw(model, models_random.draw_ids(drawn, 64, 2048, pattern.topic, 0), pattern)
    embedding = model.get_input_embeddings().weight.detach()
    normal = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(_HEAD_SEED), device="cpu")
    model.lm_head.weight = torch.nn.Parameter(normal.to(embedding) * embedding.float().std().to(embedding.dtype))
    # other sequences than those of the thresholds
    return model, {
        length: models_random.draw_ids(drawn, count, length, pattern.topic, 3 + length)
        for length, count in PROMPTS.items()
    }


def load(folder: Path, text: list[Path], device: str) -> tuple[Any, dict[int, Tensor]]:
    """A saved model in bfloat16, and ids of prompts of the text."""
    longest, wanted = max(PROMPTS), sum(length * count for length, count in PROMPTS.items())
    options = argparse.Namespace(
        model=folder, text=text, tokens=wanted, sequence=longest, device=device, dtype="bfloat16", activation=None
    )
    loaded = saved_model.load(options)
    sequences = saved_model.read(loaded, options, least=wanted).sequences
    ids, prompts = torch.tensor([token for sequence in sequences for token in sequence], device="cpu"), {}
    for length, count in PROMPTS.items():
        prompts[length], ids = ids[: count * length].view(count, length), ids[count * length :]
    return loaded.model, prompts


@torch.no_grad()
def write(folder: Path, model: Any, prompts: dict[int, Tensor]) -> None:
    """Write ``folder``/relu and ``folder``/prompts.json."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    own, known = model.config.to_dict(), LlamaConfig().to_dict()
    values = {name: own[name] for name in known if name in own and name not in ("architectures", "model_type")}
    values |= {"max_position_embeddings": LENGTH, "tie_word_embeddings": False, "dtype": torch.bfloat16}
    config = LlamaConfig(**values | {"hidden_act": "relu"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "relu")
    # a weight that two parts share is written for each
    weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "relu" / "model.safetensors", metadata={"format": "pt"})
    (folder / "prompts.json").write_text(json.dumps({length: ids.tolist() for length, ids in prompts.items()}))


if __name__ == "__main__":
    target, name, nnz, *text = sys.argv[1:]
    write(Path(target), *make(name, [Path(path) for path in text], "cuda", float(nnz) if nnz else None))
