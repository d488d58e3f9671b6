"""Measure what it costs to make a dense model sparse: train one with SiLU, then train it further in many ways.

    python -m profiling.relufy --list                                    # runs, tokens, predicted seconds
    python -m profiling.relufy --text FOLDER --out relufy.json --seeds 0 --budget-s 540       # on a GPU
    python -m profiling.relufy --text FOLDER --out relufy.json --seeds 1 --budget-s 540       # goes on, elsewhere too
    python -m profiling.relufy --table profiling/results/h200_relufy.json

A base is a Llama with SiLU that examples/train.py trains from new weights. From each base examples/relufy.py trains
SiLU models further, at each of several learning rates, and models with FATReLU and a target of non-zeros, all for a
tenth, a fifth and half of the base's tokens. A sparse model is compared with the best dense one. Runs of one seed have
the same text in the same order, which goes on where the base stopped, and learning rates that fall to 0 as the base's
does. Text is read four times at most.

The file is written after each run, and the same command continues with the missing runs; exit status 3 says that some
are left. --state keeps bases; without
its base a seed trains it again, so give each machine whole seeds, of which each has one text. The FATReLU model of the
first seed with the most tokens and the fewest non-zeros is kept there, too, in ``sparsest/final``, for twell bench
model. ``python -m profiling.draw relufy`` draws the file.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from profiling import relufy_results, trained_runs
from profiling.draw.common import ResultError
from profiling.relufy_results import Result, Run

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import relufy  # noqa: E402
import train  # noqa: E402
from training import RequestError, options, parallel, report  # noqa: E402
from training.data import Source, Tokens, prepare  # noqa: E402
from training.optimizer import LostLoss  # noqa: E402

from twell.commands.bench.report import write_json  # noqa: E402
from twell.testing import machine_line  # noqa: E402

# 59 M tokens. All runs of a seed read five times as many: five minutes of an H200, on which dense training of this size
# has run at 1.5 M tokens per second.
DEFAULTS = [
    *trained_runs.MODEL,
    *"--steps 1800 --warmup 90 --max-bytes 200M --held-out 0.04 --eval-sequences 1536 --log-every 100".split(),
]
# options of examples/train.py that this program sets
DECIDED = (
    *("--l1", "--seed", "--activation", "--ffn", "--strategy", "--parallel", "--target-nnz", "--sharing"),
    *("--reinitialize", "--resume", "--checkpoint-every", "--keep", "--eval-every", "--tensorboard"),
)
MOST_READS = 4
# Predicted seconds of a run besides its training: loading, compilation, evaluation.
OVERHEAD = 3.0
SAVED = "sparsest"


def plan(
    seeds: list[int], shares: list[float], targets: list[float], distill: float, sharing: float, rates: list[float]
) -> list[Run]:
    """All runs, seed by seed, each in an order that is useful even if it ends early.

    Sparse models have the first of the learning rates, and the sparsest with the most tokens has the others, too.
    Distillation and sharing are tried once, with the middle number of tokens.
    """
    longest, middle, low, rate = max(shares), sorted(shares)[len(shares) // 2], min(targets), rates[0]
    runs = []
    for seed in seeds:
        runs.append(Run("base", seed))
        for share in sorted(shares, reverse=True):
            runs += [Run("dense", seed, share, lr=each) for each in rates]
            runs += [Run("fatrelu", seed, share, target, lr=rate) for target in sorted(targets)]
        runs.append(Run("fatrelu", seed, middle, low, distill, lr=rate))
        runs.append(Run("fatrelu", seed, middle, low, sharing=sharing, lr=rate))
        runs += [Run("fatrelu", seed, longest, low, lr=each) for each in rates[1:]]
    return runs


def cost(run: Run, choice: argparse.Namespace) -> float:
    """Tokens, counted as the time that those of a dense model take."""
    tokens = steps_of(run, choice) * choice.tokens_per_step
    # the forward pass of the original is a third of a step; sparse runs took 1.2 to 1.7 times as long (H200)
    return float(tokens * (1 + (0.35 if run.sparse else 0) + (1 / 3 if run.distill else 0)))


def steps_of(run: Run, choice: argparse.Namespace) -> int:
    return max(2, round(run.share * choice.steps))


def parameters_of(choice: argparse.Namespace) -> int:
    attention_and_ffn = 4 * choice.hidden**2 + 3 * choice.hidden * choice.intermediate
    return int(choice.layers * attention_and_ffn + choice.vocab * choice.hidden)


def rate_of(choice: argparse.Namespace, tflops: float) -> float:
    """Tokens per second of a dense model at a speed of products."""
    return tflops * 1e12 / (6 * parameters_of(choice))


def predicted(run: Run, choice: argparse.Namespace, rate: float) -> float:
    """The seconds of a run, of which ``rate`` dense tokens take one."""
    return cost(run, choice) / rate + OVERHEAD


class Evidence:
    """The runs of one set of options on one text, and the file of their results."""

    def __init__(self, mine: argparse.Namespace, given: list[str], tokens: Tokens, here: parallel.World) -> None:
        self.mine, self.given, self.tokens, self.here = mine, given, tokens, here
        self.choice = options.parse("", [*given, "--out", str(mine.state), "--activation=silu", "--ffn=dense"])
        self.identity = trained_runs.identity(self.choice, options.IDENTITY, DECIDED)
        self.machine = machine_line(here.device)
        self.results: dict[Run, Result] = {}
        if mine.out.exists():
            found = relufy_results.load(mine.out)
            relufy.require_same(mine.out, found["arguments"], self.identity)
            self.results = {result.run: result for result in relufy_results.results(found)}
        # runs of a seed are compared with each other
        mixed = [r for r in self.results.values() if r.seed in mine.seeds and r.text != tokens.fingerprint]
        if mixed and self.missing():
            raise RequestError(
                f"--text: expected the text of the runs of seed {mixed[0].seed} in {mine.out}, got another"
            )
        most = max((run.share for run in mine.runs if run.activation != "base"), default=0.0)
        reads = (1 + most) * self.choice.steps * self.choice.tokens_per_step / tokens.train_tokens
        if reads > MOST_READS:
            raise RequestError(
                f"--steps: expected so few that text is read {MOST_READS} times at most, got {reads:.1f} times; more "
                "--max-bytes of text help, too"
            )

    def seconds(self, run: Run) -> float:
        """The predicted time of a run: by the slowest finished one on this machine, if there is one."""
        mine = (r for r in self.results.values() if r.machine == self.machine and r.tokens_per_s)
        rates = [(r.tokens_per_s or 0.0) * r.cost / r.tokens for r in mine]
        return predicted(run, self.choice, 0.9 * min(rates) if rates else rate_of(self.choice, self.mine.tflops))

    def base(self, seed: int) -> Path:
        """The folder of a saved base."""
        return Path(self.mine.state / f"base-{seed}" / "final")

    def missing(self) -> list[Run]:
        """The runs to make, with the base of each seed that has any, if it is not there."""
        runs: list[Run] = []
        for run in self.mine.runs:
            base = Run("base", run.seed)
            if run in self.results or run in runs:
                continue
            if base not in runs and not self.base(run.seed).exists():
                runs.append(base)
            if run != base:
                runs.append(run)
        return runs

    def execute(self, run: Run) -> Result:
        """Train and measure one model, then write the file."""
        began, device = time.perf_counter(), self.here.device
        report.peak_bytes(device)
        figures: dict[str, Any]
        try:
            figures = self._base(run) if run.activation == "base" else self._further(run)
        except LostLoss as error:
            figures = {"red": str(error)}
        # the next model needs the memory
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        tokens = steps_of(run, self.choice) * self.choice.tokens_per_step
        result = Result(
            **asdict(run),
            **figures,
            tokens=tokens,
            cost=cost(run, self.choice),
            seconds=round(time.perf_counter() - began, 1),
            text=self.tokens.fingerprint,
            machine=self.machine,
        )
        self.results[run] = result
        text = {name: getattr(self.tokens, name) for name in ("train_tokens", "held_tokens", "bytes")}
        write_json(self.mine.out, list(self.results.values()), machine=self.machine, arguments=self.identity, text=text)
        return result

    def _base(self, run: Run) -> dict[str, Any]:
        out = self.base(run.seed).parent
        arguments = [*self.given, "--out", str(out), "--activation=silu", "--ffn=dense", f"--seed={run.seed}"]
        training = train.Training(options.parse("", arguments), self.tokens, self.here)
        choice, clock, since = training.choice, report.Clock(self.here.device), 0
        curve: list[dict[str, float]] = []
        while training.done < choice.steps:
            training.step(lambda: False)
            if training.done % choice.log_every and training.done != choice.steps:
                continue
            steps, since = training.done - since, training.done
            _, cross_entropy = training.losses(steps)
            speed = steps * choice.tokens_per_step / clock.lap()
            curve.append({"step": since, "ce": relufy.short(cross_entropy), "tokens_per_s": round(speed)})
        training.export()
        size = training.size
        del training
        # measured as its descendants are
        saved = relufy.Further(self._choice(run), self.tokens, self.here, None)
        figures = relufy.measure(saved)
        return {**figures, "curve": curve, "parameters": size, "tokens_per_s": speed_of(curve)}

    def _choice(self, run: Run) -> argparse.Namespace:
        """The options for examples/relufy.py."""
        choice, steps = self.choice, steps_of(run, self.choice)
        arguments = {
            **{name: getattr(choice, name) for name in ("sequence", "tokens_per_step", "micro_batch", "dtype", "clip")},
            **{name: getattr(choice, name) for name in ("eval_sequences", "weight_decay", "log_every")},
            "steps": steps,
            "warmup": steps // 20,
            "lr": run.lr or choice.lr,
            "seed": run.seed,
            "target_nnz": run.target or 1,
            "distill": run.distill,
            "sharing": run.sharing,
            "activation": run.activation if run.sparse else "fatrelu",
            "attention": "causal",
        }
        given = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]
        given += ["--text", *map(str, choice.text), "--out", str(self.mine.state)]
        given += [f"--device={choice.device}"] if choice.device else []
        if choice.compile is not None:
            given.append("--compile" if choice.compile else "--no-compile")
        return relufy.parse([str(self.base(run.seed)), *given])

    def _further(self, run: Run) -> dict[str, Any]:
        choice = self._choice(run)
        # the text goes on where the base stopped
        first = self.choice.steps * self.choice.tokens_per_step // choice.sequence
        further = relufy.Further(choice, self.tokens, self.here, run.activation if run.sparse else None, first)
        before = relufy.measure(further)["ce"]
        curve = relufy.run_steps(further, lambda line: None, lambda: None, lambda: False)
        assert curve is not None
        figures = relufy.measure(further)
        figures |= {"threshold": further.settle(), "first_ce": before, "curve": curve, "tokens_per_s": speed_of(curve)}
        figures["parameters"] = sum(p.numel() for p in further.parameters)
        if run == self._saved():
            choice.out = self.mine.state / SAVED
            relufy.export(further.model, choice)
        return figures

    def _saved(self) -> Run:
        """The run whose model is kept: that with the most tokens and the fewest non-zeros, of the first seed."""
        sparse = [run for run in self.mine.runs if run.sparse and not (run.distill or run.sharing)]
        return min(sparse, key=lambda run: (run.seed, -run.share, run.target))


def speed_of(curve: list[dict[str, float]]) -> float:
    """The median tokens per second of the second half."""
    return statistics.median(point["tokens_per_s"] for point in curve[len(curve) // 2 :])


def say(result: Result) -> None:
    figures = [] if result.ce is None else [f"ce {result.ce:.4f}"]
    figures += [f"from {result.first_ce:.4f}"] if result.first_ce is not None else []
    figures += [f"{result.l0:.1f} non-zeros"] if result.l0 is not None else []
    figures += [f"threshold {result.threshold:.3g}"] if result.threshold is not None else []
    figures += [f"{result.tokens_per_s:,.0f} tokens/s"] if result.tokens_per_s else []
    print(f"{result.run}: {result.red or ', '.join(figures)}; {result.seconds:.1f} s", flush=True)


def predict(mine: argparse.Namespace, choice: argparse.Namespace) -> None:
    """Print the runs with their predicted seconds, and the sum of each seed."""
    rate = rate_of(choice, mine.tflops)
    print(f"{parameters_of(choice) / 1e6:.1f} M parameters, {rate:,.0f} tokens/s at {mine.tflops:g} TFLOP/s")
    for seed in mine.seeds:
        runs = [run for run in mine.runs if run.seed == seed]
        seconds = [predicted(run, choice, rate) for run in runs]
        for run, each in zip(runs, seconds):
            tokens = steps_of(run, choice) * choice.tokens_per_step
            print(f"{each:6.0f} s  {tokens / 1e6:6.1f} M tokens  {run}")
        print(f"{sum(seconds):6.0f} s  seed {seed}")


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Options of this program, and those for examples/train.py."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        "relufy.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="results, JSON")
    add("--state", type=Path, metavar="FOLDER", help="bases and tokens (default: in the system's temporary folder)")
    add("--budget-s", type=float, default=math.inf, metavar="S", help="begin no run that would end later")
    add("--tflops", type=float, default=260, metavar="N", help="predict times by this speed (default %(default)s)")
    add("--seeds", type=options.natural, nargs="+", default=[0], metavar="N", help="default 0")
    add("--shares", type=options.rate, nargs="+", default=[0.1, 0.2, 0.5], help="of the base's tokens (0.1 0.2 0.5)")
    add("--targets", type=options.rate, nargs="+", default=[30.0, 100.0], help="non-zeros per token (30 100)")
    add("--distill", type=options.rate, default=0.5, help="share of the loss, where runs distill (default 0.5)")
    add("--sharing", type=options.rate, default=0.5, help="share of L1, where neighbours are to share (default 0.5)")
    add(
        "--further-lr",
        type=options.rate,
        nargs="+",
        default=[2e-3, 1e-3],
        help="peak learning rates of further training; sparse models have the first (default 2e-3 1e-3)",
    )
    add("--list", action="store_true", help="print the runs and predicted times and end")
    add("--table", type=Path, metavar="FILE", help="print the results of FILE as Markdown and end")
    mine, rest = parser.parse_known_args(arguments)
    for name in DECIDED:
        if trained_runs.given(name, rest):
            parser.error(f"{name}: expected no such option, as each run sets it")
    if not (mine.out or mine.table or mine.list):
        parser.error("expected --out, --list or --table")
    if not all((*mine.shares, *mine.targets, *mine.further_lr)):
        parser.error("--shares, --targets, --further-lr: expected numbers above 0, got 0")
    if mine.state is None:
        mine.state = Path(tempfile.gettempdir()) / "twell-relufy"
    mine.runs = plan(mine.seeds, mine.shares, mine.targets, mine.distill, mine.sharing, mine.further_lr)
    return mine, rest


def measure(mine: argparse.Namespace, rest: list[str]) -> int:
    """Make the missing runs within the budget; return the exit status."""
    began = time.perf_counter()
    given = [*DEFAULTS, "--cache", str(mine.state / "cache"), *rest]
    choice = options.parse("", [*given, "--out", str(mine.state), "--activation=silu", "--ffn=dense"])
    # all runs share the code of one decoder layer, and each kind of run compiles two or three variants of it
    torch._dynamo.config.recompile_limit = 64
    with parallel.world(None, choice.device) as here:
        tokens = prepare(Source.of(choice), choice.cache, choice.vocab, choice.held_out, say=here.say)
        work = Evidence(mine, given, tokens, here)
        left = work.missing()
        here.say(f"{len(left)} runs, {tokens.train_tokens:,} tokens of text; {work.machine}")
        for done, run in enumerate(left):
            spent = time.perf_counter() - began
            needed = work.seconds(run)
            if spent + needed > mine.budget_s:
                here.say(f"{len(left) - done} runs are left after {spent:.0f} of {mine.budget_s:g} s; the next: {run}")
                return 3
            say(work.execute(run))
    return 0


def main(arguments: list[str] | None = None) -> int:
    mine, rest = parse(arguments)
    try:
        if mine.table:
            document = relufy_results.load(mine.table)
            parts: tuple[Callable[[dict[str, Any]], str], ...] = (relufy_results.table, relufy_results.layers)
            print("\n\n".join(part(document) for part in (*parts, relufy_results.notes)))
            return 0
        if mine.list:
            given = [*DEFAULTS, *rest, "--text", "-", "--out", "-", "--activation=silu", "--ffn=dense"]
            predict(mine, options.parse("", given))
            return 0
        return measure(mine, rest)
    except (RequestError, ResultError, ImportError) as error:
        print(f"relufy.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues with the missing runs", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
