"""Train a Llama with sparse ReLU feed-forward layers on your text by transformers' Trainer and twell's callback.

    python examples/train.py --config 125M --text ~/books --output_dir runs/books
    torchrun --nproc-per-node 2 examples/train.py --config 0.5B --text ~/books --output_dir runs/web

The same command resumes a run that stopped, from its last checkpoint. OUT/chart.png shows losses and non-zeros while it
trains, OUT/log.jsonl has their figures, and OUT/final is the model, for from_pretrained.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from runs import Text, fit, parse, require, sequences
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import twell
from twell.commands.request import exit_status
from twell.integrations.transformers import SparsityCallback, sparsify
from twell.testing import PAPER_MODELS

# layers, hidden size, neurons, heads; the last four are the paper's
SIZES = {"20M": (8, 256, 704, 4), "60M": (10, 512, 1408, 8), "125M": (12, 768, 2112, 12), "350M": (24, 1024, 2816, 16)}
SIZES |= {name: sizes[:4] for name, sizes in PAPER_MODELS.items()}


@dataclass
class Options(Text):
    config: str = field(default="125M", metadata={"help": "size of the model", "choices": list(SIZES)})
    sizes: list[int] | None = field(default=None, metadata={"help": "layers, hidden size, neurons, heads instead"})
    vocab: int = field(default=49152, metadata={"help": "tokens of the tokenizer, which is trained on the text"})
    activation: str = field(default="relu", metadata={"help": "silu: a dense model", "choices": ["relu", "silu"]})
    strategy: str = field(
        default="auto", metadata={"help": "of the sparse layers", "choices": ["auto", "dense", "row", "union"]}
    )
    l1: float = field(default=2e-5, metadata={"help": "coefficient of the L1 term"})
    l1_warmup: int = field(default=0, metadata={"help": "steps in which the coefficient rises"})
    nnz: float | None = field(default=None, metadata={"help": "non-zeros per token to train to, in place of --l1"})
    reinitialize: float = field(default=0.0, metadata={"help": "fraction that dead neurons are drawn again by"})
    observe_every: int = field(default=100, metadata={"help": "steps between two counts of dead neurons"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes = self.sizes or list(SIZES[self.config])
        even = len(self.sizes) == 4 and min(self.sizes) > 0 and self.sizes[1] % (2 * self.sizes[3]) == 0
        require("--sizes", even, "layers, hidden size, neurons and heads, which divide it evenly", self.sizes)
        require("--sizes", self.sizes[2] % 8 == 0, "a multiple of 8 neurons, as the kernels need", self.sizes[2])
        require("--nnz", self.nnz is None or 0 < self.nnz < self.sizes[2], f"above 0, below {self.sizes[2]}", self.nnz)


def main(arguments: list[str] | None = None) -> int:
    return exit_status("train.py", lambda: run(arguments))


def run(arguments: list[str] | None) -> int:
    options, training = parse(
        "train.py", __doc__, Options, arguments, learning_rate=1e-3, gradient_accumulation_steps=16,
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs='{"min_lr_rate": 0.1}',
    )  # fmt: skip
    data = sequences(options, training, vocab=options.vocab)
    layers, hidden, neurons, heads = options.sizes
    config = LlamaConfig(
        hidden_act=options.activation,
        vocab_size=len(data[0]),
        hidden_size=hidden,
        intermediate_size=neurons,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=options.sequence,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=data[0].eos_token_id,
    )
    # the weights are the same whatever the layers run
    set_seed(training.seed)
    model, callbacks = LlamaForCausalLM(config), []
    if options.activation == "relu":
        sparsify(model, strategy=options.strategy)
        if options.strategy != "dense" and not training.fsdp:
            # the kernels read this layout in place
            twell.nn.set_down_layout(model, "rows")
        how = {"nnz": options.nnz} if options.nnz else {"coefficient": options.l1, "warmup_steps": options.l1_warmup}
        how |= {"reinitialize": options.reinitialize, "every": options.observe_every}
        callbacks = [SparsityCallback(**how)]
    found = fit(model, options, training, data, callbacks)
    fired = f", {found['sparsity_l0']:.1f} non-zeros of {neurons} in training" if callbacks else ""
    if training.process_index == 0:
        print(f"held-out loss {found['eval_loss']:.4f}{fired}; wrote {training.output_dir}/final")
    return 0


if __name__ == "__main__":
    sys.exit(main())
