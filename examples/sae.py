"""Train sparse autoencoders on what an FFN of a small model adds to the residual stream, and chart loss against L0.

    python examples/sae.py --out runs/sae
    python examples/sae.py --out runs/topk --activation topk --sparsity 8 16 32 64 --width 16384

The model is that of ``twell demo``: bytes of your --text, or of Python's standard library, in and out. One autoencoder
is trained for each value of --sparsity. The same command resumes a run that stopped. OUT/results.json has the figures
on held-back text, OUT/chart.png the chart, and OUT/sae-VALUE.pt each autoencoder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# spinning threads would take cores from other work; torch reads this at import
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor
from training import RequestError
from training.activations import SHAPE, Activations, load, options, save, trained_model
from training.optimizer import require_finite
from training.stop import Stop

from twell import _files
from twell.commands.demo.corpus import even_windows, read_corpus, windows
from twell.commands.request import RequestError as Refused
from twell.commands.request import at_least, number_above, pick_device
from twell.nn import SparseAutoencoder

# by activation: the coefficients of the L1 or L0 term, or k
SPARSITY = {
    "relu": [0.3, 1.0, 3.0, 10.0],
    "jumprelu": [0.1, 0.3, 1.0, 3.0],
    "topk": [8, 16, 32, 64],
    "batchtopk": [8, 16, 32, 64],
}
# the coefficient grows over this share of the steps, and the learning rate falls over the last
WARMUP, DECAY = 0.2, 0.2
# of the term that lets dead features learn what is missing (arXiv 2406.04093, appendix A.2)
AUXILIARY = 1 / 32
HELD_WINDOWS = 64
# the third of four FFNs
LAYER = 2
# options that a resumed run must share with the saved one
IDENTITY = ("text", "seed", "model_steps", "layer", "activation", "width", "batch", "lr", "steps", "dead_after")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "sae.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="OUT", help="folder of the run")
    add("--text", type=Path, metavar="DIR", help="text files (default: the standard library's source)")
    add("--model-steps", type=at_least(1), default=400, metavar="N", help="steps of the model (%(default)s)")
    add("--layer", type=int, choices=range(SHAPE.layers), default=LAYER, help="whose FFN is explained (%(default)s)")
    add("--activation", choices=SPARSITY, default="jumprelu", help="(%(default)s)")
    add("--sparsity", type=number_above(0), nargs="+", metavar="S", help=f"coefficients, or k ({SPARSITY})")
    add("--width", type=at_least(8), default=1024, metavar="N", help="features of an autoencoder (%(default)s)")
    add("--steps", type=at_least(1), default=500, metavar="N", help="of an autoencoder (%(default)s)")
    add("--batch", type=at_least(1), default=8, metavar="N", help=f"windows of {SHAPE.context} tokens (%(default)s)")
    add("--lr", type=number_above(0), default=3e-3, help="(%(default)s)")
    add("--dead-after", type=at_least(1), default=100_000, metavar="N", help="tokens without firing (%(default)s)")
    add("--strategy", choices=["auto", "dense", "row", "union"], default="auto", help="of twell (auto)")
    add("--checkpoint-every", type=at_least(1), default=100, metavar="N", help="steps (%(default)s)")
    add("--report-every", type=at_least(1), default=50, metavar="N", help="steps (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--device", help="cuda, cuda:INDEX or cpu (default: cuda if there is one)")
    choice = parser.parse_args(arguments)
    asked: Any = choice.sparsity or SPARSITY[choice.activation]
    choice.sparsity = list(dict.fromkeys(asked))
    if choice.activation == "topk" and any(k % 1 for k in choice.sparsity):
        raise RequestError(f"--sparsity: expected whole numbers for topk, got {choice.sparsity}")
    return choice


class Trial:
    """An autoencoder of one sparsity, its optimizer and its step: what a checkpoint keeps."""

    def __init__(self, choice: argparse.Namespace, sparsity: float, sample: Tensor) -> None:
        self.choice, self.sparsity = choice, sparsity
        self.path = choice.out / f"sae-{sparsity:g}.pt"
        self.by_k = choice.activation in ("topk", "batchtopk")
        torch.manual_seed(choice.seed)
        form: Any = {"activation": choice.activation, "strategy": choice.strategy, "device": sample.device}
        if choice.activation == "jumprelu":
            # where a sixth of the features fire at first: with L0 alone thresholds rise slowly
            form["threshold"] = 1.0
        if self.by_k:
            form["k"] = int(sparsity) if choice.activation == "topk" else sparsity
        self.sae = SparseAutoencoder(sample.shape[1], choice.width, **form)
        with torch.no_grad():
            self.sae.b_dec.copy_(sample.mean(0))
        self.optimizer = torch.optim.Adam(self.sae.parameters(), lr=choice.lr, betas=(0.9, 0.999))
        self.done = 0
        self.same = options(choice, IDENTITY)
        state = load(self.path, self.same)
        if state:
            self.sae.load_state_dict(state["sae"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.done = state["done"]

    def save(self) -> None:
        state = {"sae": self.sae.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}
        save(self.path, {"options": self.same, **state})

    def dead(self) -> Tensor:
        dead: Tensor = self.sae.dead(self.choice.dead_after)
        return dead

    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Take a step on x [tokens, d]; y and the loss."""
        share = self.done / self.choice.steps
        self.optimizer.param_groups[0]["lr"] = self.choice.lr * min(1.0, (1 - share) / DECAY)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
            y, aux = self.sae(x, return_aux=True)
            loss = (y.float() - x).square().sum(1).mean()
            if self.by_k:
                loss = loss + AUXILIARY * self.sae.auxiliary_loss(x, y, self.dead())
            else:
                penalty = aux.l0 if self.choice.activation == "jumprelu" else aux.l1
                loss = loss + self.sparsity * min(1.0, share / WARMUP) * penalty
        loss.backward()
        # rows of the decoder keep norm 1, or L1 would shrink codes and lengthen rows; that undoes any step along a row
        self.sae.remove_parallel_gradients_()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sae.normalize_decoder_()
        self.done += 1
        return y.detach(), loss.detach()


def figures(x: Tensor, y: Tensor, trial: Trial) -> dict[str, float]:
    """Share of the variance that y explains, and of dead features."""
    explained = 1 - float((x - y.float()).square().sum() / (x - x.mean(0)).square().sum())
    return {"explained": explained, "dead": float(trial.dead().float().mean())}


def fit(trial: Trial, read: Callable[[int], Tensor], stop: Stop) -> None:
    """Train to the last step or until a signal, and save."""
    choice, since = trial.choice, time.perf_counter()
    while trial.done < choice.steps and stop.signal is None:
        x = read(trial.done)
        y, loss = trial.step(x)
        if trial.done % choice.report_every == 0 or trial.done == choice.steps:
            require_finite(trial.done, "a smaller --lr", loss=float(loss))
            l0 = float((trial.sae.encode(x).detach() != 0).sum(1).float().mean())
            now, since = time.perf_counter() - since, time.perf_counter()
            print(
                "sparsity {s:g}  step {done:6,}/{steps:,}  loss {loss:8.3f}  L0 {l0:7.1f}  explained {explained:6.1%}  "
                "dead {dead:6.1%}  {speed:9,.0f} tokens/s".format(
                    s=trial.sparsity, done=trial.done, steps=choice.steps, loss=float(loss), l0=l0,
                    speed=choice.report_every * len(x) / now, **figures(x, y, trial),
                ),
                flush=True,
            )  # fmt: skip
        if trial.done % choice.checkpoint_every == 0:
            trial.save()
    trial.save()


@torch.no_grad()
def evaluate(trial: Trial, activations: Activations, held: Tensor) -> dict[str, float]:
    """Figures on held-back text, with the model's loss where the reconstruction replaces the activations."""
    x, sae = activations.of(held), trial.sae.eval()
    y, aux = sae(x, return_aux=True)
    losses = {"loss": activations.loss(held, sae), "loss_without": activations.loss(held)}
    return {"sparsity": trial.sparsity, "l0": float(aux.l0), **figures(x, y, trial), **losses}


def chart(rows: list[dict[str, float]], path: Path) -> None:
    """Unexplained variance and the rise of the model's loss against L0."""
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: row["l0"])
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    values = {
        "unexplained variance": [1 - row["explained"] for row in rows],
        "rise of the model's loss, nats per byte": [row["loss"] - row["loss_without"] for row in rows],
    }
    for axes, (name, ys) in zip(figure.subplots(1, 2), values.items(), strict=True):
        axes.plot([row["l0"] for row in rows], ys, marker="o")
        for row, y in zip(rows, ys, strict=True):
            axes.annotate(f"{row['sparsity']:g}", (row["l0"], y), xytext=(4, 4), textcoords="offset points")
        axes.set(xlabel="L0: features per token", ylabel=name)
    figure.savefig(path, dpi=150)


def run(choice: argparse.Namespace) -> int:
    device = pick_device(choice.device)
    choice.out.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus(choice.text, choice.seed, minimum=HELD_WINDOWS * (SHAPE.context + 1))
    model = trained_model(choice, corpus, device)
    if model is None:
        return 130
    text, length = corpus.train.to(device), SHAPE.context + 1
    sample, held = (even_windows(part.to(device), HELD_WINDOWS, length) for part in (text, corpus.held))
    activations = Activations(model, choice.layer, sample)

    def read(step: int) -> Tensor:
        """The activations of a step, which are the same in a resumed run."""
        generator = torch.Generator().manual_seed(choice.seed * 1_000_003 + step)
        starts = torch.randint(len(text) - length + 1, (choice.batch,), generator=generator, device="cpu")
        return activations.of(windows(text, starts.to(device), length))

    rows: list[dict[str, float]] = []
    with Stop(print) as stop:
        for sparsity in choice.sparsity:
            trial = Trial(choice, sparsity, activations.of(sample))
            fit(trial, read, stop)
            if stop.signal is not None:
                return 128 + stop.signal
            rows.append(evaluate(trial, activations, held))
            _files.write_text(choice.out / "results.json", json.dumps(rows, indent=1) + "\n")
            print("held-back text:", "  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    try:
        chart(rows, choice.out / "chart.png")
    except ImportError:
        print("no chart: it needs matplotlib, pip install 'twell[plots]'")
    return 0


def main(arguments: list[str] | None = None) -> int:
    try:
        return run(parse(arguments))
    except (RequestError, Refused, ImportError) as error:
        print(f"sae.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
