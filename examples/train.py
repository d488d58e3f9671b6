"""Train a language model with sparse ReLU feed-forward layers on your text: on the CPU, on a GPU or on several.

    python examples/train.py --config 125M --text ~/books --out runs/books
    torchrun --nproc-per-node 2 examples/train.py --config 0.5B --text ~/books --out runs/books --parallel fsdp

The same command resumes a run that stopped; with more --steps it extends a finished run. The model is written to
OUT/final, for from_pretrained.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# spinning threads would take cores from other work; torch reads this at import
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor
from training import RequestError, checkpoint, model, options, parallel, report
from training.data import Sequences, Source, Tokens, prepare
from training.optimizer import adamw, learning_rate, require_finite
from training.stop import Stop
from training.whole import manifest

import twell
from twell import _files, recipe
from twell.testing import machine_line


class Training:
    """A model, its optimizer and its place in the text: the state that a step changes and a checkpoint keeps."""

    def __init__(self, choice: argparse.Namespace, tokens: Tokens, here: parallel.World) -> None:
        self.choice, self.tokens, self.here = choice, tokens, here
        self.text = Sequences("training", tokens.train, choice.sequence, choice.seed)
        self.held = Sequences("held-out", tokens.held, choice.sequence)
        self.sequences, self.accumulation = batches(choice, here)
        self.done, self.row = 0, 0  # steps, and sequences read
        self.schedule = choice.steps  # the last step of the learning rate's cosine
        self.console = report.Console(here.say)

        self.dtype = getattr(torch, choice.dtype)
        self.shape = model.Shape(choice.layers, choice.hidden, choice.intermediate, choice.heads, choice.vocab)
        strategy = "dense" if choice.ffn == "dense" else choice.strategy
        self.model = model.build(
            self.shape, choice.sequence, tokens.end, strategy, here.device, choice.seed, choice.activation
        )
        self.tracker: recipe.SparsityTracker | None = None
        self.target: recipe.TargetSparsity | None = None
        if model.is_sparse(self.model):
            if choice.target_nnz is not None:
                self.target = recipe.TargetSparsity(choice.target_nnz, choice.steps)
            # both add hooks, which must be there before anything compiles
            recipe.record_aux(self.model)
            self.tracker = recipe.SparsityTracker(self.model, every=choice.observe_every)
        compiled = compiles(choice, here)
        model.prepare(self.model, self.dtype, compiled, choice.checkpoint_activations)
        self.module = parallel.spread(self.model, here, self.dtype)
        self.cross_entropy = torch.compile(model.cross_entropy) if compiled else model.cross_entropy

        self.parameters = list(self.model.parameters())
        self.size = sum(p.numel() for p in self.parameters)
        self.optimizer = adamw(self.parameters, choice.lr, choice.weight_decay)
        # loss and cross-entropy, summed over the steps since the last reading
        self.sums = torch.zeros(2, device=here.device)

    def step(self, stopping: Callable[[], bool]) -> bool:
        """Take one optimizer step, without waiting for the device.

        Returns False if ``stopping`` became true between micro-batches; then the step has changed nothing.
        """
        choice, here = self.choice, self.here
        before = self._volatile() if self.accumulation > 1 else None
        first = self.row + here.reader * choice.micro_batch
        for i in range(self.accumulation):
            if before is not None and i:
                if stopping():
                    self._restore(before)
                    return False
                self.console.progress(f"step {self.done + 1:6d}  micro-batch {i} of {self.accumulation}")
            parallel.reduce_gradients(self.module, here, now=i == self.accumulation - 1)
            row = first + i * here.readers * choice.micro_batch
            inputs, targets = self.text.batch(row, choice.micro_batch, here.device)
            with self.watching(self.done):
                loss = cross_entropy = self.forward(inputs, targets)
            if self.target is not None:
                loss = cross_entropy + self.target.term(self.model)
            elif self.tracker is not None:
                # with any coefficient, even 0: the recorded figures must be read
                loss = cross_entropy + self.coefficient(self.done) * recipe.l1_term(self.model)
            (loss / self.accumulation).backward()
            self.sums += torch.stack((loss, cross_entropy)).detach() / self.accumulation
        self.norm = parallel.clip(self.parameters, choice.clip)
        for group in self.optimizer.param_groups:
            # added steps of an extended run have --min-lr
            group["lr"] = learning_rate(self.done, self.schedule, choice.warmup, choice.lr, choice.min_lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.target is not None:
            self.target.update()
        if self.tracker is not None and choice.reinitialize:
            dead = self.tracker.dead()
            recipe.reinitialize_dead(self.model, dead, choice.reinitialize, step=self.done, seed=choice.seed)
        self.done += 1
        self.row += self.sequences
        return True

    def _volatile(self) -> tuple[Any, ...]:
        """The state that micro-batches change, besides gradients."""
        return checkpoint.random_state(self.here), self.sums.clone(), self._observed()

    def _restore(self, before: tuple[Any, ...]) -> None:
        random, sums, observed = before
        self.optimizer.zero_grad()
        checkpoint.set_random_state(random, self.here)
        self.sums.copy_(sums)
        self._set_observed(observed)

    def _observed(self) -> dict[str, Any]:
        """The states of the tracker and of the target."""
        parts = {"tracker": self.tracker, "target": self.target}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def _set_observed(self, state: dict[str, Any]) -> None:
        for name, part in (("tracker", self.tracker), ("target", self.target)):
            if part is not None:
                part.load_state_dict(state[name])

    def coefficient(self, step: int) -> float:
        """The factor of the L1 term in ``step``; with a target the next one, for which it waits."""
        if self.target is not None:
            return self.target.read()["coefficient"]
        return float(self.choice.l1 * recipe.l1_warmup(step, self.choice.l1_warmup))

    def watching(self, step: int) -> contextlib.AbstractContextManager[None]:
        """A context that counts the sparsity of a forward pass of ``step``."""
        return contextlib.nullcontext() if self.tracker is None else self.tracker.watch(step)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy per token."""
        # under FSDP the parameters themselves have this dtype
        cast = self.dtype != torch.float32 and self.here.mode != "fsdp"
        with torch.autocast(self.here.device.type, self.dtype, enabled=cast):
            logits = self.module(input_ids=inputs, use_cache=False).logits
            loss: Tensor = self.cross_entropy(logits, targets)
        return loss

    @torch.no_grad()
    def evaluate(self, stopping: Callable[[], bool]) -> float | None:
        """The cross-entropy on the first sequences of the held-out text; None if ``stopping`` became true."""
        here, size = self.here, self.choice.micro_batch
        # the same number of micro-batches on each rank; a short text is read again from the beginning
        count = math.ceil(min(self.choice.eval_sequences, len(self.held)) / (here.readers * size))
        total = torch.zeros((), device=here.device)
        self.model.eval()
        try:
            for i in range(count):
                if stopping():
                    return None
                self.console.progress(f"step {self.done:6d}  held-out micro-batch {i} of {count}")
                row = (i * here.readers + here.reader) * size
                total += self.forward(*self.held.batch(row, size, here.device))
        finally:
            self.model.train()
        return float(here.mean(total / count))

    def losses(self, steps: int) -> tuple[float, float]:
        """The mean loss and cross-entropy of the last ``steps`` steps over all ranks; resets the sums.

        Waits for the device. LostLoss if one of them, or the last step's gradient, is not finite.
        """
        loss, cross_entropy = self.here.mean(self.sums / steps).tolist()
        self.sums.zero_()
        advice = "a lower --lr or a longer --warmup"
        require_finite(self.done, advice, loss=loss, gradient=float(self.norm))
        return loss, cross_entropy

    def identity(self) -> dict[str, Any]:
        """The options and text that a resumed run must share with the saved one."""
        return {"text": self.tokens.fingerprint} | {name: getattr(self.choice, name) for name in options.IDENTITY}

    def save(self) -> Path:
        about = {"row": self.row, "epoch": self.row // len(self.text), "schedule": self.schedule}
        about["identity"] = self.identity()
        folder, keep = self.choice.out / "checkpoints", self.choice.keep
        return checkpoint.save(folder, self.done, self.model, self.optimizer, self._observed(), about, self.here, keep)

    def resume(self, path: Path) -> None:
        """Resume from a checkpoint; RequestError if it is from another run."""
        choice, about = self.choice, manifest(path)
        assert about is not None
        theirs = about["identity"]
        for name in choice.implied:
            setattr(choice, name, theirs.get(name))
        mine = self.identity()
        extended = mine["steps"] > theirs.get("steps", mine["steps"])
        differing = [name for name in mine if mine[name] != theirs.get(name) and not (extended and name == "steps")]
        if differing:
            changes = ", ".join(f"{name} ({theirs.get(name)} there, {mine[name]} here)" for name in differing)
            raise RequestError(
                f"--resume: {path} is of a run that differs in {changes}; repeat its options, of which --steps alone "
                "may grow, or begin another --out"
            )
        self.schedule = about.get("schedule", theirs["steps"])
        if extended:
            self.here.say(
                f"extended from {theirs['steps']} to {choice.steps} steps: those after {self.schedule}, where the "
                f"learning rate was to end, have --min-lr {choice.min_lr:g}"
            )
        state = checkpoint.load(path, self.model, self.optimizer, self.here)
        if self.target is not None:
            self.target.steps = self.schedule
        self._set_observed(state)
        self.done, self.row = about["step"], about["row"]
        if self.here.size != about["ranks"]:
            self.here.say(
                f"saved by {about['ranks']} ranks, now {self.here.size}: sums are in another order from here on"
            )

    def export(self) -> Path:
        """Write the model to OUT/final for ``from_pretrained``, whole or not at all."""
        weights = checkpoint.whole_weights(self.model)
        final: Path = self.choice.out / "final"
        if self.here.first:
            # leftovers of this run, when it was killed: no other run writes to OUT
            for left in _files.leftovers(final):
                shutil.rmtree(left)
            with _files.replacing(final) as partial:
                model.export(weights, self.shape, self.choice.sequence, self.tokens, partial, self.choice.activation)
        self.here.barrier()
        return final


def batches(choice: argparse.Namespace, here: parallel.World) -> tuple[int, int]:
    """Sequences per step, and micro-batches per step and rank."""
    least = choice.sequence * choice.micro_batch * here.readers
    if choice.tokens_per_step % least:
        raise RequestError(
            f"--tokens-per-step: expected a multiple of {least:,} (--sequence {choice.sequence} x --micro-batch "
            f"{choice.micro_batch} x {here.readers} ranks that read), got {choice.tokens_per_step:,}"
        )
    return choice.tokens_per_step // choice.sequence, choice.tokens_per_step // least


def compiles(choice: argparse.Namespace, here: parallel.World) -> bool:
    """Whether to use torch.compile: on a GPU, unless the model's activations are DTensors."""
    if choice.compile and here.mode == "tp":
        raise RequestError("--compile: expected another mode than --parallel tp, whose DTensors it cannot trace")
    return bool(here.device.type == "cuda" and here.mode != "tp" if choice.compile is None else choice.compile)


def train(choice: argparse.Namespace, here: parallel.World) -> int:
    """Train, save and export; return the exit status."""
    with checkpoint.alone(choice.out, here):
        return _train(choice, here)


def _train(choice: argparse.Namespace, here: parallel.World) -> int:
    began = time.perf_counter()
    tokens = prepare(Source.of(choice), choice.cache, choice.vocab, choice.held_out, here.first, here.say, here.barrier)
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
    with Stop(here.say) as stop:
        if not _steps(run, log, lambda: here.any(stop.signal is not None)):
            return 128 + (stop.signal or signal.SIGTERM)
    if choice.ffn == "sparse" and here.device.type == "cuda":
        here.say(f"\n{twell.explain(run.model)}\n")
    if run.target is not None:
        reached = run.target.read()["non_zeros"]
        if warning := report.missed_target(run.target.nnz, reached, choice.steps):
            here.say(warning)
    speed = f"; {log.speed():,.0f} tokens/s in the second half of the run" if log.speeds else ""
    here.say(f"wrote {run.export()}{speed}")
    return 0


def _steps(run: Training, log: Log, stopping: Callable[[], bool]) -> bool:
    """Train to the last step. If ``stopping`` becomes true, save and return False."""
    choice, saved = run.choice, run.done
    # a stopped run leaves its last evaluation to the next run
    ending = log.owes_evaluation() and not log.evaluation(stopping)
    while not ending and run.done < choice.steps:
        complete = run.step(stopping)
        ending = not complete or stopping()
        last = run.done == choice.steps
        evaluating = not ending and log.due(run.done)
        saving = ending or due(run.done, choice.checkpoint_every, last)
        # before each checkpoint, so that it holds no partial interval and no lost loss
        if run.done > log.since and (saving or evaluating or last or run.done % choice.log_every == 0):
            log.interval()
        if evaluating:
            ending = not log.evaluation(stopping)
        if (saving or ending) and run.done > saved:
            with log.clock.paused():
                run.save()
            saved = run.done
    if ending:
        where = f"saved up to step {saved}" if saved else "no step was complete"
        run.here.say(f"stopped; {where}; the same command goes on from there")
    return not ending


def due(step: int, every: int, last: bool = False) -> bool:
    return every > 0 and (last or step % every == 0)


def no_space(choice: argparse.Namespace) -> str:
    """The message for a full disk: where it is, and which files of the run are kept."""
    free, where = min((shutil.disk_usage(path).free, str(path)) for path in (choice.out, choice.cache) if path.exists())
    kept = [str(path) for path in checkpoint.complete(choice.out / "checkpoints")]
    kept += [str(path) for path in [choice.out / "final"] if path.exists()]
    after = "goes on from there" if len(kept) else "begins again"
    return (
        f"no space is left on the disk of {where} ({free / 1e6:,.1f} MB free); kept: {', '.join(kept) or 'nothing'}; "
        f"make room, and the same command {after}"
    )


class Log:
    """The log of a run: console, ``metrics.jsonl`` and ``sparsity.csv``."""

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
        """Log the steps since the last interval. Every rank must call it."""
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
            "l1": run.coefficient(run.done - 1) if self.choice.l1 or run.target is not None else 0.0,
            "non_zeros": means.get("l0"),
            "dead": means.get("dead"),
            "tokens_per_s": self.speeds[-1],
            "peak_bytes": report.peak_bytes(self.here.device),
        }
        self.metrics.write(**record)
        sparsity = "coefficient {l1:.2e}  non-zeros {non_zeros:7.1f}  ".format(**record) if means else ""
        self.run.console.say(
            "step {step:6d}  loss {loss:7.4f}  ce {ce:7.4f}  lr {lr:.2e}  {sparsity}"
            "{tokens_per_s:9,.0f} tokens/s  {gib:6.2f} GiB".format(
                **record, sparsity=sparsity, gib=record["peak_bytes"] / (1 << 30)
            )
        )

    def due(self, step: int) -> bool:
        """Whether to evaluate the held-out loss after ``step``."""
        return due(step, self.choice.eval_every) or step == self.choice.steps

    def owes_evaluation(self) -> bool:
        """Whether a resumed run must still evaluate the step that it resumed from."""
        done = self.run.done
        return self.here.any(self.here.first and done > 0 and self.due(done) and done not in self.metrics.evaluated)

    def evaluation(self, stopping: Callable[[], bool]) -> bool:
        """Log the held-out loss; False if ``stopping`` became true before."""
        with self.clock.paused():
            held_out = self.run.evaluate(stopping)
        if held_out is None:
            return False
        self.metrics.write(step=self.run.done, held_out_ce=held_out)
        self.run.console.say(f"step {self.run.done:6d}  held-out ce {held_out:.4f}")
        return True

    def speed(self) -> float:
        """The median tokens per second of the second half of the intervals."""
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
    except KeyboardInterrupt:
        print("train.py: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except torch.OutOfMemoryError as error:
        advice = "a smaller --micro-batch, --checkpoint-activations and --parallel fsdp take less memory"
        print(f"train.py: error: out of memory: {advice}. {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if not _files.is_full(error):
            raise
        print(f"train.py: error: {no_space(choice)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
