"""The model: a Llama with the FFN ``down(relu(gate(x)) * up(x))``, its named sizes, and its compilation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from twell.integrations.transformers import sparsify
from twell.nn import SparseGatedMLP
from twell.testing import PAPER_MODELS

from .data import Tokens


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. Embedding and output share a weight of ``vocab`` rows."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int = 49152


# the last four are the paper's
SHAPES = {
    "20M": Shape(8, 256, 704, 4),
    "60M": Shape(10, 512, 1408, 8),
    "125M": Shape(12, 768, 2112, 12),
    "350M": Shape(24, 1024, 2816, 16),
    **{name: Shape(*sizes) for name, sizes in PAPER_MODELS.items()},
}


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention: [batch, heads, tokens, size] -> [batch, tokens, heads, size].

    Transformers makes no mask for a registered attention. For its own it reads the positions of each batch on the host,
    which waits for the GPU.
    """
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return y.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal", causal_attention)


def configuration(shape: Shape, sequence: int, end: int, activation: str = "relu") -> Any:
    """The configuration of Transformers; ``end`` is the end-of-document token.

    ``activation`` "relu" is that of the sparse model, "silu" of one that stays dense.
    """
    return LlamaConfig(
        hidden_act=activation,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=sequence,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
    )


def build(
    shape: Shape, sequence: int, end: int, strategy: str, device: torch.device, seed: int, activation: str = "relu"
) -> Any:
    """A float32 model with new weights, which depend on ``seed`` but not on strategy and activation."""
    config = configuration(shape, sequence, end, activation)
    config._attn_implementation = "causal"
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    if activation == "relu":
        sparsify(model, strategy=strategy)  # type: ignore[arg-type]
    return model.train()


def is_sparse(model: Any) -> bool:
    """Whether the FFNs are twell's, not those of a stock Llama."""
    return any(isinstance(module, SparseGatedMLP) for module in model.modules())


def prepare(model: Any, dtype: torch.dtype, compiled: bool, checkpointed: bool) -> None:
    """Compile each decoder layer if ``compiled``; recompute its activations in backward if ``checkpointed``.

    All decoder layers share the code compiled for the first. A dense FFN is compiled with its layer. A sparse FFN stays
    outside: a compiled graph keeps its strategy, but the FFN of a new model starts dense and changes as it becomes
    sparse. Its kernels also leave nothing to fuse.
    """
    around = torch.compile(_around_ffn) if compiled else _around_ffn
    for layer in model.model.layers:
        forward: Any
        if getattr(layer.mlp, "strategy", "dense") != "dense":
            forward = partial(_with_ffn_apart, layer, around, dtype)
        else:
            forward = torch.compile(layer.forward) if compiled else layer.forward
        layer.forward = partial(checkpoint, forward, use_reentrant=False) if checkpointed else forward


def _with_ffn_apart(layer: Any, around: Any, dtype: torch.dtype, hidden: Tensor, **attention: Any) -> Tensor:
    """A decoder layer of Llama, with its FFN outside the compiled part."""
    hidden, x = around(layer, dtype, hidden, attention)
    y: Tensor = layer.mlp(x)
    return hidden + y


def _around_ffn(layer: Any, dtype: torch.dtype, hidden: Tensor, attention: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The residual stream after attention, and the input of the FFN in its dtype."""
    hidden = hidden + layer.self_attn(hidden_states=layer.input_layernorm(hidden), **attention)[0]
    return hidden, layer.post_attention_layernorm(hidden).to(dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy per token, in float32: logits [..., vocab], targets [...]."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def export(
    weights: dict[str, Tensor], shape: Shape, sequence: int, tokens: Tokens, folder: Path, activation: str = "relu"
) -> None:
    """Write ``weights`` and the tokenizer to a folder for ``from_pretrained`` of Transformers."""
    with torch.device("meta"):
        model = LlamaForCausalLM(configuration(shape, sequence, tokens.end, activation))
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokens.tokenizer().save_pretrained(folder)
