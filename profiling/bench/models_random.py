"""Models of the paper's sizes with random weights and the sparsity of trained ones, and tokens for them.

Random weights do not fire as trained ones do, so how neurons, tokens and layers differ is drawn, as in
``twell.testing.WORKLOADS``:

- Only the embedding writes the first two features of the hidden state: a constant, which a column of each gate weight
  turns into a neuron's readiness to fire, and a token's own readiness. So the layers have no bias and no more
  parameters than the paper's, and dense and sparse layers compute the same function.
- ``SKEW`` spreads the readiness of neurons, the share ``DEAD`` never fires, and the common threshold is found by
  bisection, layer by layer, on the layer's inputs, for the wanted number of non-zeros per token.
- Documents of 512 tokens draw their ids from a part of the vocabulary, whose embeddings share a component: ``topic`` is
  the correlation of two of them. Within it ids follow Zipf's law.
  With K = 2,048 and N = 5,632 the union of 128 tokens that fire 35 neurons each is 15 % of all with topic 0.5, 17 %
  with 0.25 and 21 % with 0. A model trained for 700 steps had 10 % at 20 non-zeros, 17 % at 41 and, in its first
  layer, 19 % at 29.
- Attention and feed-forward outputs are scaled so that the hidden state has about the same size at any depth. With the
  usual initialisation attention would make all tokens of a sequence alike, and their neurons with them.
"""

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell import recipe, testing
from twell.commands.request import RequestError
from twell.integrations.analyze.layers import found, observe
from twell.testing.workloads import bisected


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a Llama; embedding and output share a weight of ``vocab`` rows. kv: heads of keys, 0: as many."""

    name: str
    layers: int
    hidden: int
    neurons: int
    heads: int
    vocab: int = 49152
    kv: int = 0


PAPER = {name: LlamaSizes(name, *sizes) for name, sizes in testing.PAPER_MODELS.items()}


@dataclass(frozen=True)
class Pattern:
    """Mean non-zeros per token over all layers, and correlation of the embeddings of two tokens of a document."""

    nnz: float
    topic: float = 0.5

    def __str__(self) -> str:
        return f"{self.nnz:g} non-zeros wanted, skew {SKEW:g}, dead {DEAD:g}, topic {self.topic:g}"


# Standard deviations of the readiness of neurons, as a multiple of that of their sums over tokens, and of tokens; share
# of neurons that never fire.
SKEW, TOKENS, DEAD = 1.0, 0.5, 0.3
# Parts of the vocabulary, one per topic, and tokens of a document.
TOPICS, DOCUMENT = 64, 512
# Sequences for finding thresholds.
CALIBRATION = 16
# Coefficient of the L1 term.
L1 = 2e-5
_CONSTANT = 4.0
# A dead neuron is this many standard deviations below its threshold.
_BELOW = 50.0
# Tokens for the scale of a layer's output.
_SCALED_BY = 1024
# The largest logit is about this, so that its rounding does not decide the loss.
_LOGIT = 4.0


def parse_sizes(text: str, known: Mapping[str, LlamaSizes] = PAPER) -> LlamaSizes:
    """An argparse type: a model that is known, those of the paper, or LAYERSxHIDDENxNEURONS[xHEADS[xVOCAB]]."""
    if text in known:
        return known[text]
    if not re.fullmatch(r"\d+(x\d+){2,4}", text):
        said = f"expected {', '.join(known)} or LAYERSxHIDDENxNEURONS[xHEADS[xVOCAB]], got {text!r}"
        raise argparse.ArgumentTypeError(said)
    layers, hidden, neurons, *rest = map(int, text.split("x"))
    heads = rest[0] if rest else max(hidden // 64, 1)
    shape = LlamaSizes(text, layers, hidden, neurons, heads, *rest[1:])
    if min(layers, hidden, neurons, heads, shape.vocab) < 1 or hidden % (2 * heads):
        raise argparse.ArgumentTypeError(f"expected sizes above 0 and an even size of each head, got {text}")
    return shape


def paper_nnz(shape: LlamaSizes) -> float:
    """Mean non-zeros per token in the paper's models: 39 with 8 layers, 29 with 28, 24 with 38.

    These three lie on a line, which gives 34 for the 18 layers of 1B. Other sizes have the 1.5B model's share.
    """
    if shape in PAPER.values():
        return 43 - shape.layers / 2
    return 29 / testing.PAPER_NEURONS * shape.neurons


def profile(layers: int, mean: float) -> list[float]:
    """Non-zeros per token by layer: as in the paper, the first layers are least active, the early-middle ones most.

    The curve, 0.4 + 1.2 t e^(1 - t) with t = 1 at 0.3 of the depth, is this project's: the paper gives no figures.
    """
    depths = [i / max(layers - 1, 1) / 0.3 for i in range(layers)]
    curve = [0.4 + 1.2 * t * math.exp(1 - t) for t in depths]
    return [mean * value * layers / sum(curve) for value in curve]


def build(shape: LlamaSizes, sequence: int, device: torch.device | str) -> Any:
    """A bfloat16 model of these sizes in evaluation mode, its FFNs dense, before ``draw``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from twell.integrations.transformers import sparsify

    config = LlamaConfig(
        hidden_act="relu",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.neurons,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv or shape.heads,
        max_position_embeddings=sequence,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        model = sparsify(LlamaForCausalLM(config), strategy="dense")
    return cast(model, torch.bfloat16).eval()


@torch.no_grad()
def draw(model: Any, ids: Tensor, pattern: Pattern, seed: int = 0) -> list[float]:
    """Draw weights for ``model`` that fire by ``pattern`` on tokens like ``ids`` [sequences, tokens].

    Returns the wanted non-zeros per token of each layer. Raises RequestError if there are too few neurons.
    """
    watched, _ = found(model)
    neurons = model.config.intermediate_size
    wanted = profile(len(watched), pattern.nnz)
    if max(wanted) >= (1 - DEAD) * neurons:
        said = f"expected fewer than {(1 - DEAD) * neurons:.0f}, the neurons that are not dead"
        got = f"{max(wanted):.0f} in the most active layer for a mean of {pattern.nnz:g}"
        raise RequestError(f"--nnz: {said}, got {got}")
    weight = model.get_input_embeddings().weight
    generator = torch.Generator(weight.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=weight.device)

    # each sublayer adds this much to a hidden state of size 1: half of its variance in the end
    share = 1 / math.sqrt(2 * len(watched))
    vocab, hidden = weight.shape
    topics = _topics(vocab, pattern.topic)
    parts = torch.arange(vocab, device=weight.device) // (vocab // topics)
    shared = normal(topics + 1, hidden)[parts]
    weight.copy_(math.sqrt(pattern.topic) * shared + math.sqrt(1 - pattern.topic) * normal(vocab, hidden))
    weight[:, 0], weight[:, 1] = _CONSTANT, TOKENS * normal(vocab)
    model.get_decoder().norm.weight.fill_(_LOGIT / hidden)
    for block in model.get_decoder().layers:
        attention, mlp = block.self_attn, block.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            linear.weight.copy_(normal(*linear.weight.shape) / math.sqrt(hidden))
        for linear, scale in ((attention.o_proj, share), (mlp.down_proj, 1.0)):
            linear.weight.copy_(normal(*linear.weight.shape) * (scale / math.sqrt(linear.in_features)))
            # only the embedding writes the first two features
            linear.weight[:2] = 0

    def draw_layer(i: int, x: Tensor, *_: Tensor) -> None:
        # before the layer runs, since the next layer's input depends on it
        mlp: Any = watched[i].module
        fate = torch.rand(neurons, generator=generator, device=x.device)
        _set_gate(mlp.gate_proj.weight, x, wanted[i], normal(neurons), fate)
        few = x[:_SCALED_BY]
        y = F.linear(F.relu(mlp.gate_proj(few)) * mlp.up_proj(few), mlp.down_proj.weight)
        mlp.down_proj.weight.mul_(share / y.float().square().mean().sqrt().clamp_min(1e-3))

    sample = ids[:: max(len(ids) // CALIBRATION, 1)][:CALIBRATION].cpu()
    observe(model, watched, [(sample,)], draw_layer, model.base_model)
    return wanted


def _set_gate(weight: Tensor, x: Tensor, nnz: float, drawn: Tensor, fate: Tensor) -> None:
    """Set the two columns of the gate so that a token of x [tokens, K] fires ``nnz`` neurons on average."""
    weight[:, :2] = 0
    sums = F.linear(x, weight).float()
    sigma, constant = float(sums.std()), x[:, :1].float()
    mean = float(constant.mean())
    # the norm before the layer divides both features alike
    weight[:, 1] = sigma * _CONSTANT / mean
    sums += x[:, 1:2].float() * weight[:, 1].float()
    # a neuron fires if sum + constant * column > 0, so if the sum over the constant exceeds its own threshold
    readiness = SKEW * sigma * drawn
    dead = fate < DEAD
    sums.div_(constant / mean).add_(readiness)
    sums[:, dead] = -math.inf
    threshold = bisected(sums, nnz, 20 * sigma)
    readiness = torch.where(dead, torch.full_like(readiness, -_BELOW * sigma), readiness - threshold)
    weight[:, 0] = readiness / mean


def _topics(vocab: int, topic: float) -> int:
    return min(TOPICS, vocab) if topic else 1


def draw_ids(shape: LlamaSizes, sequences: int, length: int, topic: float, seed: int = 0) -> Tensor:
    """Token ids int64 [sequences, length]: by Zipf's law, each document from its topic's part of the vocabulary."""
    topics = _topics(shape.vocab, topic)
    size = shape.vocab // topics
    generator = torch.Generator().manual_seed(seed)
    frequency = 1 / torch.arange(1, size + 1, dtype=torch.float64, device="cpu")
    ranks = torch.multinomial(frequency, sequences * length, replacement=True, generator=generator)
    drawn = torch.randint(topics, (sequences, math.ceil(length / DOCUMENT)), generator=generator, device="cpu")
    documents = drawn.repeat_interleave(DOCUMENT, 1)[:, :length]
    return ranks.view(sequences, length) + documents * size


def loss_of(model: nn.Module, logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy and the L1 term of a pass in training."""
    # the last token of a sequence has none to predict
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + L1 * recipe.l1_term(model)


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Let torch.compile compile each decoder layer, and each size separately: code for any size is slower."""
    torch._dynamo.config.recompile_limit = 256
    for layer in model.get_decoder().layers:
        layer.compile(backend=backend, dynamic=False)


def cast(model: Any, dtype: torch.dtype) -> Any:
    """The model, its parameters cast in place. Buffers stay: rotary embeddings must not have rounded frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
