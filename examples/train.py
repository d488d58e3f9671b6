"""Train a language model with sparse ReLU feed-forward layers on your text: on the CPU, on a GPU or on several.

    python examples/train.py --config 125M --text ~/books --out runs/books
    torchrun --nproc-per-node 2 examples/train.py --config 0.5B --text ~/books --out runs/books --parallel fsdp

The same command again resumes where the last one stopped. The model is written to OUT/final, for from_pretrained.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from training import RequestError, checkpoint, model, options, parallel, report
from training.data import Sequences, Source, Tokens, prepare

import twell
from twell import recipe
from twell.testing import machine_line


class LostLoss(RequestError):
    """The loss is no number any more."""


class Training:
    """A model, its optimizer and its place in the text: what a step changes, and what a checkpoint keeps."""

    def __init__(self, choice: argparse.Namespace, tokens: Tokens, here: parallel.World) -> None:
        self.choice, self.tokens, self.here = choice, tokens, here
        self.text = Sequences("training", tokens.train, choice.sequence, choice.seed)
        self.held = Sequences("held-out", tokens.held, choice.sequence)
        self.sequences, self.accumulation = batches(choice, here)
        self.done, self.row = 0, 0  # steps, and sequences read

        self.dtype = getattr(torch, choice.dtype)
        self.shape = model.Shape(choice.layers, choice.hidden, choice.intermediate, choice.heads, choice.vocab)
        strategy = "dense" if choice.ffn == "dense" else choice.strategy
        self.model = model.build(
            self.shape, choice.sequence, tokens.end, strategy, here.device, choice.seed, choice.activation
        )
        self.tracker: recipe.SparsityTracker | None = None
        if model.is_sparse(self.model):
            # the hooks of both have to be there before anything is compiled
            recipe.record_aux(self.model)
            self.tracker = recipe.SparsityTracker(self.model, every=choice.observe_every)
        compiled = compiles(choice, here)
        model.prepare(self.model, self.dtype, compiled, choice.checkpoint_activations)
        self.module = parallel.spread(self.model, here, self.dtype)
        self.cross_entropy = torch.compile(model.cross_entropy) if compiled else model.cross_entropy

        self.parameters = list(self.model.parameters())
        self.size = sum(p.numel() for p in self.parameters)
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": choice.weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=choice.lr, betas=(0.9, 0.95), fused=True)
        # loss and cross-entropy, summed over the steps since they were read
        self.sums = torch.zeros(2, device=here.device)

    def step(self) -> None:
        """One optimizer step. Nothing in it waits for the device."""
        choice, here = self.choice, self.here
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        first = self.row + here.reader * choice.micro_batch
        for i in range(self.accumulation):
            parallel.reduce_gradients(self.module, here, now=i == self.accumulation - 1)
            inputs, targets = self.read(self.text, first + i * here.readers * choice.micro_batch)
            with self.watching(self.done):
                loss = cross_entropy = self.forward(inputs, targets)
            if self.tracker is not None:
                # whatever the coefficient: what layers record has to be read
                loss = cross_entropy + self.coefficient(self.done) * recipe.l1_term(self.model)
            (loss / self.accumulation).backward()
            self.sums += torch.stack((loss, cross_entropy)).detach() / self.accumulation
        self.norm = parallel.clip(self.parameters, choice.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.tracker is not None and choice.reinitialize:
            dead = self.tracker.dead()
            recipe.reinitialize_dead(self.model, dead, choice.reinitialize, step=self.done, seed=choice.seed)
        self.done += 1
        self.row += self.sequences

    def learning_rate(self) -> float:
        """Linear up to ``--lr``, then half a cosine down to ``--min-lr``, which the last step has."""
        choice = self.choice
        if self.done < choice.warmup:
            return float(choice.lr * (self.done + 1) / choice.warmup)
        passed = (self.done - choice.warmup) / max(1, choice.steps - 1 - choice.warmup)
        return float(choice.min_lr + (choice.lr - choice.min_lr) * (1 + math.cos(math.pi * passed)) / 2)

    def coefficient(self, step: int) -> float:
        """What the L1 term is multiplied by in ``step``."""
        return float(self.choice.l1 * recipe.l1_warmup(step, self.choice.l1_warmup))

    def watching(self, step: int) -> contextlib.AbstractContextManager[None]:
        """What to run a forward pass of ``step`` in, for its sparsity to be counted."""
        return contextlib.nullcontext() if self.tracker is None else self.tracker.watch(step)

    def read(self, text: Sequences, row: int) -> tuple[Tensor, Tensor]:
        """A micro-batch from ``row`` on, and for each token the one that follows: int64 [sequences, tokens]."""
        rows = text.rows(range(row, row + self.choice.micro_batch))
        if self.here.device.type == "cuda":
            rows = rows.pin_memory()
        rows = rows.to(self.here.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy, a mean over tokens."""
        # under FSDP the parameters themselves come in this dtype
        cast = self.dtype != torch.float32 and self.here.mode != "fsdp"
        with torch.autocast(self.here.device.type, self.dtype, enabled=cast):
            logits = self.module(input_ids=inputs, use_cache=False).logits
            loss: Tensor = self.cross_entropy(logits, targets)
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """The cross-entropy on the first sequences of the held-out text."""
        here, size = self.here, self.choice.micro_batch
        # as many micro-batches on each rank; where the text runs out, its beginning is read again
        count = math.ceil(min(self.choice.eval_sequences, len(self.held)) / (here.readers * size))
        total = torch.zeros((), device=here.device)
        self.model.eval()
        for i in range(count):
            total += self.forward(*self.read(self.held, (i * here.readers + here.reader) * size))
        self.model.train()
        return float(here.mean(total / count))

    def losses(self, steps: int) -> tuple[float, float]:
        """The mean loss and cross-entropy of the last ``steps`` steps, over all ranks; they begin anew.

        Waits for the device. LostLoss if they, or the last step's gradient, are no numbers any more.
        """
        loss, cross_entropy = self.here.mean(self.sums / steps).tolist()
        self.sums.zero_()
        for what, value in (("loss", loss), ("gradient", float(self.norm))):
            if not math.isfinite(value):
                raise LostLoss(f"the {what} became {value} by step {self.done}: try a lower --lr or a longer --warmup")
        return loss, cross_entropy

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on as if it had never stopped."""
        return {"text": self.tokens.fingerprint} | {name: getattr(self.choice, name) for name in options.IDENTITY}

    def save(self) -> Path:
        about = {"row": self.row, "epoch": self.row // len(self.text), "identity": self.identity()}
        state = {} if self.tracker is None else {"tracker": self.tracker.state_dict()}
        folder = self.choice.out / "checkpoints"
        return checkpoint.save(folder, self.done, self.model, self.optimizer, state, about, self.here, self.choice.keep)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint; RequestError if it is of another run."""
        about = checkpoint.manifest(path)
        assert about is not None
        theirs, mine = about["identity"], self.identity()
        if differing := [name for name in mine if mine[name] != theirs.get(name)]:
            changes = ", ".join(f"{name} ({theirs.get(name)} there, {mine[name]} here)" for name in differing)
            raise RequestError(
                f"--resume: {path} is of a run that differs in {changes}; repeat its options, or begin another --out"
            )
        state = checkpoint.load(path, self.model, self.optimizer, self.here)
        if self.tracker is not None:
            self.tracker.load_state_dict(state["tracker"])
        self.done, self.row = about["step"], about["row"]
        if self.here.size != about["ranks"]:
            self.here.say(
                f"saved by {about['ranks']} ranks, now {self.here.size}: sums are in another order from here on"
            )

    def export(self) -> Path:
        """Write the model where ``from_pretrained`` finds it: OUT/final, whole or not at all."""
        weights = checkpoint.whole_weights(self.model)
        final: Path = self.choice.out / "final"
        if self.here.first:
            partial = final.with_suffix(".tmp")
            shutil.rmtree(partial, ignore_errors=True)
            model.export(weights, self.shape, self.choice.sequence, self.tokens, partial, self.choice.activation)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        self.here.barrier()
        return final


def batches(choice: argparse.Namespace, here: parallel.World) -> tuple[int, int]:
    """Sequences a step, and micro-batches that each rank makes of its share."""
    least = choice.sequence * choice.micro_batch * here.readers
    if choice.tokens_per_step % least:
        raise RequestError(
            f"--tokens-per-step: expected a multiple of {least:,} (--sequence {choice.sequence} x --micro-batch "
            f"{choice.micro_batch} x {here.readers} ranks that read), got {choice.tokens_per_step:,}"
        )
    return choice.tokens_per_step // choice.sequence, choice.tokens_per_step // least


def compiles(choice: argparse.Namespace, here: parallel.World) -> bool:
    """Whether torch.compile is used: on a GPU, unless the model's activations are DTensors."""
    if choice.compile and here.mode == "tp":
        raise RequestError("--compile: expected another mode than --parallel tp, whose DTensors it cannot trace")
    return bool(here.device.type == "cuda" and here.mode != "tp" if choice.compile is None else choice.compile)


class Stop:
    """Within it, ``signal`` remembers that SIGINT or SIGTERM asked the run to end. A second SIGINT ends it at once."""

    signal: int | None = None

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if number == signal.SIGINT:
            # torchrun sends SIGTERM after the terminal's SIGINT: that is no second request
            signal.signal(number, self._before[signal.SIGINT])

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(choice: argparse.Namespace, here: parallel.World) -> int:
    """Train, save and export; the exit status."""
    with checkpoint.alone(choice.out, here):
        return _train(choice, here)


def _train(choice: argparse.Namespace, here: parallel.World) -> int:
    began = time.perf_counter()
    tokens = prepare(source(choice), choice.cache, choice.vocab, choice.held_out, here.first, here.say)
    path = checkpoint.choose(choice.out / "checkpoints", choice.resume, check=here.first)
    run = Training(choice, tokens, here)
    if path is not None:
        run.resume(path)
        here.say(f"resumed from {path}")
    here.say(
        f"{run.size / 1e6:,.1f} M parameters, {tokens.train_tokens:,} tokens, {choice.steps} steps of "
        f"{choice.tokens_per_step:,}, {here.size} x {report.machine(here.device)}; ready in "
        f"{time.perf_counter() - began:.1f} s"
    )
    log = Log(run, resumed=path is not None)
    with Stop() as stop:
        while run.done < choice.steps:
            run.step()
            last, ending = run.done == choice.steps, here.any(stop.signal is not None)
            saving = ending or due(run.done, choice.checkpoint_every, last)
            # before each checkpoint, so that it holds no half of an interval, nor a loss that is no number
            if saving or last or run.done % choice.log_every == 0:
                log.interval()
            if last or due(run.done, choice.eval_every):
                log.evaluation()
            if saving:
                with log.clock.paused():
                    path = run.save()
            if ending:
                here.say(f"stopped; saved {path}; the same command goes on from there")
                return 128 + (stop.signal or signal.SIGTERM)
    if choice.ffn == "sparse" and here.device.type == "cuda":
        here.say(f"\n{twell.explain(run.model)}\n")
    speed = f"; {log.speed():,.0f} tokens/s in the second half of the run" if log.speeds else ""
    here.say(f"wrote {run.export()}{speed}")
    return 0


def source(choice: argparse.Namespace) -> Source:
    """The text that the options name."""
    return Source(
        text=tuple(choice.text),
        dataset=choice.dataset,
        column=choice.column,
        suffixes=tuple(choice.suffix),
        max_bytes=choice.max_bytes,
        without=(choice.out, choice.cache),
    )


def due(step: int, every: int, last: bool = False) -> bool:
    return every > 0 and (last or step % every == 0)


class Log:
    """Tells the console, ``metrics.jsonl`` and ``sparsity.csv`` how the run goes."""

    def __init__(self, run: Training, resumed: bool) -> None:
        self.run, self.choice, self.here = run, run.choice, run.here
        self.since, self.speeds = run.done, list[float]()
        path, step = self.choice.out / "metrics.jsonl", run.done if resumed else None
        self.metrics = report.Metrics(path if self.here.first else None, step)
        self.layers: recipe.StatsWriter | None = None
        if run.tracker is not None:
            self.layers = recipe.StatsWriter(
                path.with_name("sparsity.csv"), resume_step=step, tensorboard=self.choice.tensorboard
            )
        about = {"machine": machine_line(self.here.device), "ranks": self.here.size, "parameters": run.size}
        self.metrics.write(step=run.done, **about, options=vars(self.choice))
        self.clock = report.Clock(self.here.device)

    def interval(self) -> None:
        """The steps since the last one. Every rank must call it."""
        run, steps = self.run, self.run.done - self.since
        loss, cross_entropy = run.losses(steps)
        seconds = self.clock.lap()
        self.since = run.done
        self.speeds.append(steps * self.choice.tokens_per_step / seconds)
        means: dict[str, float] = {}
        if run.tracker is not None and self.layers is not None:
            stats = run.tracker.read()
            self.layers.write(run.done, stats)
            means = stats.summary()
        record = {
            "step": run.done,
            "loss": loss,
            "ce": cross_entropy,
            "gradient": float(run.norm),
            "lr": run.optimizer.param_groups[0]["lr"],
            "l1": self.choice.l1 and run.coefficient(run.done - 1),
            "non_zeros": means.get("l0"),
            "dead": means.get("dead"),
            "tokens_per_s": self.speeds[-1],
            "peak_bytes": report.peak_bytes(self.here.device),
        }
        self.metrics.write(**record)
        sparsity = "l1 {l1:.2e}  non-zeros {non_zeros:7.1f}  ".format(**record) if means else ""
        self.here.say(
            "step {step:6d}  loss {loss:7.4f}  ce {ce:7.4f}  lr {lr:.2e}  {sparsity}"
            "{tokens_per_s:9,.0f} tokens/s  {gib:6.2f} GiB".format(
                **record, sparsity=sparsity, gib=record["peak_bytes"] / (1 << 30)
            )
        )

    def evaluation(self) -> None:
        with self.clock.paused():
            held_out = self.run.evaluate()
        self.metrics.write(step=self.run.done, held_out_ce=held_out)
        self.here.say(f"step {self.run.done:6d}  held-out ce {held_out:.4f}")

    def speed(self) -> float:
        """Tokens a second in the second half of the intervals, the median."""
        return statistics.median(self.speeds[len(self.speeds) // 2 :])


def main(arguments: list[str] | None = None) -> int:
    assert __doc__ is not None
    choice = options.parse(__doc__, arguments)
    try:
        with parallel.world(choice.parallel, choice.device) as here:
            return train(choice, here)
    except (RequestError, ImportError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        advice = "a smaller --micro-batch, --checkpoint-activations and --parallel fsdp take less memory"
        print(f"train.py: error: out of memory: {advice}. {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
