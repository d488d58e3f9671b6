"""Measure what sparsity costs: train one small model of examples/train.py with several L1 coefficients on one text.

    python -m profiling.quality --text FOLDER --out profiling/results/h200_quality.json --budget-s 360    # on a GPU
    python -m profiling.quality --table profiling/results/h200_quality.json

All runs have the same shape, schedule and tokens. Runs of one seed have the same initial weights and order of text.
They differ in the coefficient, the activation or the reinitialisation of dead neurons. Runs with other seeds show the
noise. Held-out figures are of the model after the last step, on the same sequences for all runs.

The file is written after each run, and the same command continues with the missing runs; exit status 3 says that some
are left. All other options go to
examples/train.py, for example --layers 4 --steps 200. ``python -m profiling.draw quality`` draws the file.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from profiling import quality_results, trained_runs
from profiling.draw.common import ResultError
from profiling.quality_results import Layer, Result, Run

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import train  # noqa: E402
from training import RequestError, options, parallel, report  # noqa: E402
from training.data import Source, Tokens, prepare  # noqa: E402
from training.optimizer import LostLoss  # noqa: E402

from twell import recipe  # noqa: E402
from twell.commands.bench.report import Progress, write_json  # noqa: E402
from twell.testing import machine_line  # noqa: E402

# 13 M tokens. With a final learning rate of 0 seeds differ less.
DEFAULTS = [
    *trained_runs.MODEL,
    *"--steps 400 --warmup 40 --max-bytes 100M --held-out 0.05 --eval-sequences 2048".split(),
    *"--log-every 20 --observe-every 20".split(),
]
# options that each run sets, and options that runs cannot use because they keep only figures
DECIDED = ("--l1", "--seed", "--activation", "--reinitialize", "--ffn", "--strategy", "--parallel")
UNUSED = ("--resume", "--checkpoint-every", "--keep", "--eval-every", "--tensorboard")


def plan(
    coefficients: Sequence[float],
    repeat_at: Sequence[float],
    seeds: int,
    reinitialize_at: Sequence[float],
    share: float,
    sparse_at: Sequence[float],
) -> list[Run]:
    """All runs, in an order that is useful even if the sweep ends early."""
    runs = [Run(each) for each in coefficients]
    runs.insert(4, Run(activation="silu"))
    runs += [Run(each, reinitialize=share) for each in reinitialize_at]
    runs += [Run(each, seed=seed) for seed in range(1, seeds) for each in repeat_at]
    runs += [Run(each, ffn="sparse") for each in sparse_at]
    return list(dict.fromkeys(runs))


class Sweep:
    """A sweep: runs with one set of options on one text, and the file of their results."""

    def __init__(self, choice: argparse.Namespace, given: list[str], tokens: Tokens, here: parallel.World) -> None:
        self.given, self.tokens, self.here, self.out = given, tokens, here, choice.out
        self.identity = trained_runs.identity(choice, options.IDENTITY, DECIDED)
        self.identity["text"] = tokens.fingerprint
        self.machine = machine_line(here.device)
        self.results: dict[Run, Result] = {}
        if choice.out.exists():
            self._adopt(choice.out)

    def _adopt(self, path: Path) -> None:
        found = quality_results.load(path)
        theirs = found["arguments"]
        if differing := [name for name, mine in self.identity.items() if theirs.get(name) != mine]:
            changes = ", ".join(f"{name} ({theirs.get(name)} there, {self.identity[name]} here)" for name in differing)
            raise RequestError(f"--out: {path} is of a sweep that differs in {changes}; repeat its options or move it")
        self.results = {result.run: result for result in quality_results.results(found)}

    def execute(self, run: Run) -> Result:
        """Train and measure one model, then write the file."""
        result = self._train(run)
        self.results[run] = result
        text = {name: getattr(self.tokens, name) for name in ("train_tokens", "held_tokens", "bytes")}
        rows = list(self.results.values())
        write_json(self.out, rows, machine=self.machine, arguments=self.identity, text=text)
        return result

    def _train(self, run: Run) -> Result:
        began, device = time.perf_counter(), self.here.device
        report.peak_bytes(device)
        training = train.Training(options.parse("", [*self.given, *run.options()]), self.tokens, self.here)
        curve: list[dict[str, float | None]] = []
        figures: dict[str, Any] = {"parameters": training.size, "machine": self.machine, "curve": curve}
        try:
            _steps(training, curve)
            speeds = [point["tokens_per_s"] or 0.0 for point in curve[len(curve) // 2 :]]
            figures |= {"tokens_per_s": statistics.median(speeds), "peak_bytes": report.peak_bytes(device)}
            figures |= held_out(training)
        except LostLoss as error:
            figures["red"] = str(error)
        finally:
            # the next model needs the memory
            del training
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return Result(**asdict(run), **figures, seconds=round(time.perf_counter() - began, 1))


def _steps(training: train.Training, curve: list[dict[str, float | None]]) -> None:
    """Train to the last step. A point of the curve has means since the last point, and dead neurons now."""
    choice, clock, since = training.choice, report.Clock(training.here.device), 0
    while training.done < choice.steps:
        training.step(lambda: False)
        if training.done % choice.log_every and training.done != choice.steps:
            continue
        steps, since = training.done - since, training.done
        _, cross_entropy = training.losses(steps)
        speed = steps * choice.tokens_per_step / clock.lap()
        means = training.tracker.read().summary() if training.tracker is not None else {}
        l0, dead = _short(means.get("l0")), _short(means.get("dead"))
        point = {"step": since, "ce": _short(cross_entropy), "l0": l0, "dead": dead, "tokens_per_s": round(speed)}
        curve.append(point)


@torch.no_grad()
def held_out(training: train.Training) -> dict[str, Any]:
    """The figures of ``Result`` on the held-out text, for a trained model."""
    choice = training.choice
    count = blocks_of(choice, len(training.held))
    # a later step, which the tracker observes
    step = (training.done // choice.observe_every + 1) * choice.observe_every
    losses = []
    for i in range(count):
        # in training mode, which computes the same: the tracker counts only there
        with training.watching(step):
            rows = training.held.batch(i * choice.micro_batch, choice.micro_batch, training.here.device)
            losses.append(training.forward(*rows))
        if training.tracker is not None:
            # a compiled layer would compile again for each further call with unread figures
            recipe.clear_aux(training.model)
    blocks = torch.stack(losses).tolist()
    figures: dict[str, Any] = {
        "ce": _short(statistics.fmean(blocks)),
        "ce_error": _short(trained_runs.standard_error(blocks)),
        "blocks": [_short(block) for block in blocks],
    }
    if training.tracker is not None:
        stats = training.tracker.read()
        means = stats.summary()
        figures |= {"l0": _short(means["l0"]), "dead": _short(means["dead"])}
        figures["layers"] = [
            Layer(row.neurons, _short(row.l0), _short(row.l1), row.dead or 0, _short(row.union), row.strategy)
            for row in stats.layers
        ]
    return figures


def blocks_of(choice: argparse.Namespace, sequences: int) -> int:
    """The number of held-out micro-batches. RequestError if there are too few for a standard error."""
    count: int = min(choice.eval_sequences, sequences) // choice.micro_batch
    if count < 2:
        raise RequestError(
            f"held-out text: expected at least two --micro-batch {choice.micro_batch} of sequences within "
            f"--eval-sequences, got {min(choice.eval_sequences, sequences)} sequences of {choice.sequence} tokens"
        )
    return count


def _short(number: float | None) -> Any:
    """Round to six digits."""
    return None if number is None else float(f"{number:.6g}")


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Options of this program, and those for examples/train.py."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        "quality.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument

    def coefficients(name: str, given: list[float], what: str) -> None:
        shown = " ".join(f"{each:g}" for each in given)
        add(name, type=options.rate, nargs="*", default=given, metavar="L1", help=f"{what} (default {shown})")

    add("--out", type=Path, metavar="FILE", help="results, JSON")
    add("--cache", type=Path, metavar="FOLDER", help="tokens (default: a folder in the system's temporary folder)")
    add("--budget-s", type=float, default=math.inf, metavar="S", help="begin no run that would end later")
    # the ends first
    coefficients(
        "--coefficients", [0, 2e-5, 1e-3, 1e-4, 3e-4, 3e-3, 5e-5, 1e-5], "coefficients of L1, in the order of runs"
    )
    coefficients("--repeat-at", [0, 2e-5, 1e-3], "coefficients to repeat with other seeds")
    add("--seeds", type=options.positive, default=3, metavar="N", help="number of seeds for these (default 3)")
    coefficients("--reinitialize-at", [2e-5, 1e-3], "coefficients to repeat with reinitialisation of dead neurons")
    add(
        "--share",
        type=options.rate,
        default=0.1,
        metavar="SHARE",
        help="share of noise in reinitialisation, the paper's l (default 0.1)",
    )
    coefficients("--sparse-at", [1e-3], "coefficients to repeat with sparse kernels")
    add("--list", action="store_true", help="print the runs and end")
    add("--table", type=Path, metavar="FILE", help="print the results of FILE as Markdown and end")
    mine, rest = parser.parse_known_args(arguments)
    for name in (*DECIDED, *UNUSED):
        if trained_runs.given(name, rest):
            why = "each run sets it" if name in DECIDED else "runs keep only figures"
            parser.error(f"{name}: expected no such option, as {why}")
    if 0 not in mine.coefficients:
        parser.error(f"--coefficients: expected 0 among them, to compare with, got {mine.coefficients}")
    if not (mine.out or mine.table or mine.list):
        parser.error("expected --out, --list or --table")
    return mine, rest


def sweep(mine: argparse.Namespace, rest: list[str], runs: list[Run]) -> int:
    """Execute the missing runs; return the exit status."""
    began = time.perf_counter()
    cache = mine.cache or Path(tempfile.gettempdir()) / "twell-quality"
    given = [*DEFAULTS, "--cache", str(cache), *rest, "--out", str(mine.out)]
    choice = options.parse("", [*given, *Run().options()])
    if not choice.observe_every:
        raise RequestError("--observe-every: expected 1 or more: dead neurons are counted in steps that are observed")
    # all runs share the code of one decoder layer, and each kind of run compiles two or three variants of it
    torch._dynamo.config.recompile_limit = 64
    with parallel.world(None, choice.device) as here:
        tokens = prepare(Source.of(choice), choice.cache, choice.vocab, choice.held_out, say=here.say)
        blocks_of(choice, (tokens.held_tokens - 1) // choice.sequence)
        work = Sweep(choice, given, tokens, here)
        left = [run for run in runs if run not in work.results]
        here.say(f"{len(left)} of {len(runs)} runs, {tokens.train_tokens:,} tokens of text; {work.machine}")
        with Progress(len(left), name="quality") as progress:
            for done, run in enumerate(left):
                speeds = [r.tokens_per_s for r in work.results.values() if r.tokens_per_s and r.machine == work.machine]
                needed = 1.2 * choice.steps * choice.tokens_per_step / min(speeds) if speeds else 0.0
                if time.perf_counter() - began + needed > mine.budget_s:
                    here.say(f"{len(left) - done} runs are left after {mine.budget_s:g} s: the same command continues")
                    return 3
                progress.step(str(run))
                say(run, work.execute(run))
    return 0


def say(run: Run, result: Result) -> None:
    figures = [f"ce {result.ce:.4f} ± {result.ce_error:.4f}"] if result.ce and result.ce_error else []
    if result.l0 is not None and result.dead is not None:
        figures.append(f"{result.l0:.1f} non-zeros, {100 * result.dead:.1f} % dead")
    if result.tokens_per_s:
        figures.append(f"{result.tokens_per_s:,.0f} tokens/s")
    print(f"{run}: {result.red or ', '.join(figures)}; {result.seconds:.1f} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    mine, rest = parse(arguments)
    runs = plan(mine.coefficients, mine.repeat_at, mine.seeds, mine.reinitialize_at, mine.share, mine.sparse_at)
    try:
        if mine.list:
            print("\n".join(map(str, runs)))
        elif mine.table:
            document = quality_results.load(mine.table)
            print(
                "\n\n".join(
                    part(document) for part in (quality_results.table, quality_results.layers, quality_results.notes)
                )
            )
        else:
            return sweep(mine, rest, runs)
    except (RequestError, ResultError, ImportError) as error:
        print(f"quality.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues with the missing runs", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
