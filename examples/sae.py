"""Train sparse autoencoders on what a module of a language model returns, and chart loss against features per token.

    python examples/sae.py --model runs/books/final --text ~/books --output_dir runs/sae
    python examples/sae.py --model MODEL --text ~/books --output_dir runs/topk --activation topk --sparsity 16 32 64

MODEL is a folder or a Hub id of a causal model of transformers with its tokenizer. One autoencoder is trained for each
value of --sparsity: a coefficient of L1 or L0, or k. The same command resumes a run that stopped. OUT/VALUE/final has
the autoencoder, OUT/VALUE/chart.png the chart of its training, OUT/results.json and OUT/chart.png the figures of all on
held-out text.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from relufy import load
from runs import NON_ZEROS, Text, fit, parse, require, sequences
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import default_collate
from transformers import AutoTokenizer, TrainerCallback, set_seed

from twell.base import files
from twell.commands.request import RequestError, exit_status
from twell.nn.layers import SparseAutoencoder

# by activation: the coefficients of the L1 or L0 term, or k
SPARSITY = {"relu": [0.3, 1.0, 3.0, 10.0], "jumprelu": [0.1, 0.3, 1.0, 3.0]}
SPARSITY |= {name: [8.0, 16.0, 32.0, 64.0] for name in ("topk", "batchtopk")}
# the coefficient grows over this share of the steps, and the learning rate falls over the last
WARMUP, DECAY = 0.2, 0.2
# of the term that lets dead features learn what is missing (arXiv 2406.04093, appendix A.2)
AUXILIARY = 1 / 32
# sequences of the text by which activations are scaled and centred, and of held-out text
SAMPLE = 64


@dataclass
class Options(Text):
    """Options of the activations and of the autoencoders."""

    model: str = field(kw_only=True, metadata={"help": "a folder of save_pretrained with its tokenizer, or a Hub id"})
    module: str | None = field(default=None, metadata={"help": "name of the module (default: the FFN in the middle)"})
    activation: str = field(default="jumprelu", metadata={"help": "of the codes", "choices": list(SPARSITY)})
    sparsity: list[float] | None = field(default=None, metadata={"help": f"coefficients, or k; {SPARSITY}"})
    width: int = field(default=1024, metadata={"help": "features"})
    dead_after: int = field(default=100_000, metadata={"help": "tokens without firing after which a feature is dead"})
    strategy: str = field(
        default="auto", metadata={"help": "of the autoencoder", "choices": ["auto", "dense", "row", "union"]}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sparsity = list(dict.fromkeys(self.sparsity or SPARSITY[self.activation]))
        require("--sparsity", min(self.sparsity) > 0, "numbers above 0", self.sparsity)
        whole = self.activation != "topk" or all(k % 1 == 0 for k in self.sparsity)
        require("--sparsity", whole, "whole numbers for topk", self.sparsity)
        require("--width", self.width > 7, "8 or more", self.width)
        require("--dead_after", self.dead_after > 0, "1 or more", self.dead_after)


class Activations:
    """What a module of a model returns, [tokens, d], over ``scale``."""

    def __init__(self, model: Any, name: str | None) -> None:
        names = [each for each, _ in model.named_modules() if each.rpartition(".")[2] in ("mlp", "feed_forward")]
        self.model, self.scale, self.name = (
            model.eval().requires_grad_(False),
            1.0,
            name or "".join(names[len(names) // 2 :][:1]),
        )
        modules = dict(model.named_modules())
        require(
            "--module", self.name in modules and bool(self.name), f"a module's name, as {names[:3]}", repr(self.name)
        )
        modules[self.name].register_forward_hook(self._hook)
        self.seen = torch.empty(0, device="cpu")
        self._replace: Callable[[Tensor], Tensor] | None = None

    def _hook(self, module: Any, inputs: Any, output: Any) -> Any:
        y = output[0] if isinstance(output, tuple) else output
        self.seen = y.flatten(0, -2).float() / self.scale
        if self._replace is None:
            return None
        y = (self._replace(self.seen) * self.scale).view_as(y).to(y.dtype)
        return (y, *output[1:]) if isinstance(output, tuple) else y

    def of(self, ids: Tensor) -> Tensor:
        """The activations on tokens [rows, sequence]."""
        self.loss(ids)
        return self.seen

    @torch.no_grad()
    def loss(self, ids: Tensor, replace: Callable[[Tensor], Tensor] | None = None) -> float:
        """The model's cross-entropy in nats, with activations replaced."""
        self._replace, model = replace, self.model.to(ids.device)
        return float(model(input_ids=ids, labels=ids, use_cache=False).loss)


def _contiguous(sae: Any, state: dict[str, Tensor], *more: Any) -> None:
    state.update({name: value.contiguous() for name, value in state.items()})


class Explaining(SparseAutoencoder):
    """An autoencoder that Trainer trains on tokens: its loss is that on the activations there."""

    def __init__(self, options: Options, sparsity: float, read: Callable[[Tensor], Tensor], sample: Tensor) -> None:
        form: dict[str, Any] = {"activation": options.activation, "strategy": options.strategy}
        self.by_k = options.activation in ("topk", "batchtopk")
        if options.activation == "jumprelu":
            # where a sixth of the features fire at first: with L0 alone thresholds rise slowly
            form["threshold"] = 1.0
        if self.by_k:
            form["k"] = int(sparsity) if options.activation == "topk" else sparsity
        super().__init__(sample.shape[1], options.width, **form)
        with torch.no_grad():
            self.b_dec.copy_(sample.mean(0))
        self.options, self.sparsity, self.read, self.share = options, sparsity, read, 0.0
        self.figures: dict[str, Tensor] = {}
        # safetensors wants it
        self.register_state_dict_post_hook(_contiguous)  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        x = self.read(input_ids)
        y, aux = super().forward(x, return_aux=True)
        loss = (y.float() - x).square().sum(1).mean()
        dead = self.dead(self.options.dead_after)
        unexplained = (y.float() - x).square().sum() / (x - x.mean(0)).square().sum()
        self.figures = {NON_ZEROS: aux.l0.detach(), "explained": 1 - unexplained.detach(), "dead": dead.float().mean()}
        if self.by_k:
            loss = loss + AUXILIARY * self.auxiliary_loss(x, y, dead) if self.training else loss
        else:
            penalty = aux.l0 if self.options.activation == "jumprelu" else aux.l1
            loss = loss + self.sparsity * min(1.0, self.share / WARMUP) * penalty
        return {"loss": loss}


class Steps(TrainerCallback):  # type: ignore[misc]
    """What a step of an autoencoder has besides that of its optimizer."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """The coefficient of the step."""
        model.share = state.global_step / state.max_steps

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Rows of the decoder keep norm 1, or L1 would shrink codes; that undoes steps along a row."""
        model.remove_parallel_gradients_()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Rows of norm 1."""
        model.normalize_decoder_()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        """Figures of the last step in the log of training."""
        if "loss" in (logs or {}):
            found = {name: float(value) for name, value in model.figures.items()}
            logs.update(found)
            state.log_history[-1].update(found)


@torch.no_grad()
def evaluate(sae: Explaining, activations: Activations, ids: Tensor) -> dict[str, float]:
    """Figures on held-out text, with the model's loss where the reconstruction replaces the activations."""
    sae.eval()(ids)
    found = {"sparsity": sae.sparsity, **{name: float(value) for name, value in sae.figures.items()}}
    decoded: Callable[[Tensor], Tensor] = super(Explaining, sae).forward
    return found | {"loss": activations.loss(ids, decoded), "loss_without": activations.loss(ids)}


def chart(rows: list[dict[str, float]], path: Path) -> None:
    """Unexplained variance and the rise of the model's loss against features per token."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    rows = sorted(rows, key=lambda row: row[NON_ZEROS])
    figure, at = Figure(figsize=(9, 3.6), layout="constrained"), [row[NON_ZEROS] for row in rows]
    left, right = figure.subplots(1, 2)
    left.plot(at, [1 - row["explained"] for row in rows], marker="o")
    right.plot(at, [row["loss"] - row["loss_without"] for row in rows], marker="o")
    left.set(xlabel="features per token", ylabel="unexplained variance")
    right.set(xlabel="features per token", ylabel="rise of the model's loss, nats")
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    return exit_status("sae.py", lambda: run(arguments))


def run(arguments: list[str] | None) -> int:
    options, training = parse(
        "sae.py", __doc__, Options, arguments, learning_rate=3e-3, weight_decay=0.0, adam_beta2=0.999,
        max_grad_norm=0.0, lr_scheduler_type="warmup_stable_decay", prediction_loss_only=True,
    )  # fmt: skip
    training.lr_scheduler_kwargs = {"num_decay_steps": int(DECAY * training.max_steps)}
    options.files()
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = load(options.model)
    except (OSError, ValueError) as error:
        raise RequestError(f"--model: expected a causal model, got {' '.join(str(error).split())}") from error
    activations = Activations(model, options.module)
    data, out = sequences(options, training, tokenizer), Path(training.output_dir)
    sample, held = (
        default_collate([part[row] for row in range(min(SAMPLE, len(part)))])["input_ids"].to(training.device)
        for part in data[1:]
    )
    activations.scale = float(activations.of(sample).square().mean().sqrt())
    rows: list[dict[str, float]] = []
    for sparsity in options.sparsity:
        own = copy.copy(training)
        own.output_dir = str(out / f"{sparsity:g}")
        set_seed(training.seed)
        sae = Explaining(options, sparsity, activations.of, activations.of(sample))
        fit(sae, options, own, data, [Steps()])
        # one that has ended before was not trained again
        sae.load_state_dict(load_file(out / f"{sparsity:g}" / "final" / "model.safetensors"))
        rows.append(evaluate(sae, activations, held))
        files.write_text(out / "results.json", json.dumps(rows, indent=1) + "\n")
        print("held-out text:", "  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    chart(rows, out / "chart.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
