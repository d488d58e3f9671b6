"""Time the code that the paper's authors published beside twell and dense PyTorch, on the same layers in one run.

    python -m profiling.paper_code --package sparser-faster-llms --workload uniform29 skew29 topic29 \
        real:FOLDER/3 real:FOLDER/6 topic128 dense911 --out profiling/results/h100_paper_code.json

--package is a checkout of https://github.com/SakanaAI/sparser-faster-llms, which is no part of this repository and is
only imported: TwELLGatedMLP for the forward pass, torch.ops.sparse_ops.ff_forward_gated for training steps. It compiles
its kernels when it is loaded, for which it needs nvcc and ninja. On a machine without these take kernels from another:
--extension names the compiled module of its forward pass, its own variable SPARSE_OPS_PREBUILT the library of training.

Each variant is timed in these ways, the variants in turn, calls alternating between copies of the tokens:
  replayed  a replay of a CUDA graph; the published code launches on the default stream, which no graph captures
  queued    the GPU sleeps while the host queues some calls, so that no call waits for the host
  eager     some calls one after the other from Python, until the GPU is done with all
  waited    one call from Python, until the GPU is done with it
Steps are eager and waited for a second time in "one thread" (``torch.autograd.set_multithreading_enabled(False)``).
"dense" is the faster of eager and compiled PyTorch. Times are milliseconds per call, medians.

Results are compared with float64. "errors" and "worst_rows" have the largest error of each variant. Those of twell are
held to what twell bench allows. The published code may round more often than dense PyTorch: "wrong" says which of its
errors in norm are more than twice those of dense PyTorch. "red" is an error that left no result. After a fault of the
GPU nothing more can be measured in that process: the same command goes on behind it, as it skips what the file has.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.machinery
import importlib.util
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from twell import testing
from twell.commands.bench.layers import SETTLING
from twell.commands.bench.protocol import FAILURES, SLEEP_CYCLES, copies_for, reason
from twell.commands.bench.report import write_json
from twell.commands.bench.workloads import parse
from twell.commands.request import RequestError, at_least, exit_status
from twell.testing import FFN, Comparison

NAMED = ["uniform29", "skew29", "topic29"]
OPS = ("forward", "train")
MODES = ("replayed", "queued", "eager", "waited", "eager, one thread", "waited, one thread")
# Calls behind a sleep, or in a row.
CALLS = 4
# Errors of the published code that are called wrong, over those of dense PyTorch. More roundings explain smaller ones:
# where no tile overflows it errs by 1.2 in norm (H200, K = 2,048, N = 5,632).
WRONG = 2.0
# Faults of the GPU, after which its context is lost.
LOST = ("illegal memory access", "unspecified launch failure", "misaligned address", "device-side assert")

# Outputs of a forward pass or gradients, by their names.
Call = Callable[[Tensor], dict[str, Tensor]]


@dataclasses.dataclass
class Row:
    """One layer forward or in training. ``dense_ms``, ``ms`` (the paper's code), ``twell_ms``: queued; None if red.

    ``modes``: milliseconds by mode, then by variant. ``errors``: relative to float64 in the Frobenius norm, in training
    of the worst gradient, by variant; ``worst_rows``: of the worst row, as in ``testing.Errors``.
    """

    workload: str
    op: str
    m: int
    nnz: float
    dense_ms: float | None = None
    ms: float | None = None
    twell_ms: float | None = None
    strategy: str = ""
    wrong: str = ""
    red: str = ""
    twell_wrong: str = ""
    modes: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    worst_rows: dict[str, float] = dataclasses.field(default_factory=dict)


class Published:
    """The published code, loaded from a checkout."""

    def __init__(self, package: Path, extension: Path | None) -> None:
        modules = package / "custom_models"
        self._inference = loaded(modules / "twell_modules" / "twell.py", "published_inference")
        loaded(modules / "hybrid_modules" / "sparse_ops_loader.py", "published_training").load_sparse_ops()
        self._extension = None if extension is None else compiled_module(extension)
        # a layer that is collected takes what the extension knows of its number with it, even if another has it by then
        self._numbers = itertools.count()

    def forward(self, problem: FFN) -> Call:
        """The layer of a forward pass."""
        operands = {"GATE": problem.w_gate, "UP": problem.w_up, "DOWN": problem.w_down, "ext": self._extension}
        layer = self._inference.TwELLGatedMLP(layer_number=next(self._numbers), **operands)

        @torch.no_grad()
        def call(x: Tensor) -> dict[str, Tensor]:
            return {"y": layer(x)}

        return call

    def output(self, leaves: FFN) -> Tensor:
        """y with its graph."""
        # it reads the number of tokens from the first two sizes
        x = leaves.x[None]
        y: Tensor = torch.ops.sparse_ops.ff_forward_gated(x, leaves.w_gate, leaves.w_up, leaves.w_down)[0]
        return y[0]


def loaded(path: Path, name: str) -> ModuleType:
    """The module of a file. Raises RequestError if there is none."""
    if not path.is_file():
        raise RequestError(f"--package must be a checkout of sparser-faster-llms, got a folder without {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled_module(path: Path) -> ModuleType:
    """The extension module of a shared library. Raises RequestError if there is none."""
    if not path.is_file():
        raise RequestError(f"--extension must be a compiled module, got {path}")
    loader = importlib.machinery.ExtensionFileLoader(path.name.partition(".")[0], str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Clock:
    """Times calls on a device; a CPU neither sleeps nor replays."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def eager(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Milliseconds per call, one after the other."""
        self.wait()
        start = time.perf_counter()
        in_turn(calls)
        self.wait()
        return (time.perf_counter() - start) * 1e3 / len(calls)

    def queued(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Milliseconds per call behind a sleep of the GPU."""
        if not self.on_gpu:
            return self.eager(calls)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        in_turn(calls)
        end.record()
        self.wait()
        return float(start.elapsed_time(end)) / len(calls)


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status("profiling.paper_code", lambda: run(parser().parse_args(argv)))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--package", type=Path, required=True, help="checkout of the published code")
    top.add_argument(
        "--extension", type=Path, help="compiled module of its forward pass (default: it compiles its own)"
    )
    top.add_argument("--workload", nargs="+", default=NAMED, metavar="W", help="as of twell bench (%(default)s)")
    top.add_argument("-m", "--tokens", type=at_least(1), default=16384, metavar="M", help="tokens (%(default)s)")
    top.add_argument("-k", "--hidden", type=at_least(8), default=testing.PAPER_HIDDEN, help="hidden size (%(default)s)")
    top.add_argument("-n", "--neurons", type=at_least(8), default=testing.PAPER_NEURONS, help="neurons (%(default)s)")
    top.add_argument("--rounds", type=at_least(1), default=15, help="measurements of each mode (%(default)s)")
    top.add_argument("--device", default="cuda", help="cuda, or cpu, whose times mean nothing")
    top.add_argument("--out", type=Path, required=True, help="file of the results; its layers are skipped")
    return top


def run(arguments: argparse.Namespace) -> int:
    """Measure what the file lacks. Returns 1 after a fault of the GPU, or if a result of twell is wrong."""
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RequestError("--device cuda needs a GPU, got none")
    sources = parse(arguments.workload)
    published = Published(arguments.package, arguments.extension)
    rows = [Row(**row) for row in read(arguments.out)]
    machine = testing.machine_line(device)
    given = {name: getattr(arguments, name) for name in ("tokens", "hidden", "neurons", "rounds")}
    for source in sources:
        done = {row.op for row in rows if row.workload == source.name}
        problem = source.load(
            arguments.tokens, arguments.hidden, arguments.neurons, device=device, dtype=torch.bfloat16
        )
        for op in OPS:
            if op in done:
                continue
            row = measured(source.name, op, problem, published, arguments.rounds)
            rows.append(row)
            write_json(arguments.out, rows, machine=machine, arguments=given)
            print(line(row), flush=True)
            if any(fault in row.red for fault in LOST):
                print("profiling.paper_code: the GPU's context is lost: the same command goes on", file=sys.stderr)
                return 1
    print("\n".join(means([dataclasses.asdict(row) for row in rows])))
    return int(any(row.twell_wrong for row in rows))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none of a missing one. Raises RequestError if another program wrote it."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    if found and "modes" not in found[0]:
        raise RequestError(f"{path} is not of this program: expected a new file, or rows with modes")
    return found


def line(row: Row) -> str:
    """A row as a line of text."""
    queued = row.modes.get("queued", {})
    times = "  ".join(f"{name} {ms:.3f} ms" for name, ms in queued.items())
    return f"{row.workload:10} {row.op:8} {times}  {row.red or row.wrong or 'right'} {row.twell_wrong}".rstrip()


def means(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Speed-ups of twell by operation and mode: over dense, the geometric mean; over the paper's code, least and most.

    ``rows`` are those of the file, whose results of the paper's code may be wrong.
    """
    lines = []
    for op in OPS:
        for mode in MODES:
            found = [times for row in rows if row["op"] == op and (times := row["modes"].get(mode, {})).get("twell")]
            over_dense = [times["dense"] / times["twell"] for times in found if "dense" in times]
            over_paper = [times["paper"] / times["twell"] for times in found if "paper" in times]
            said = []
            if over_dense:
                mean = statistics.geometric_mean(over_dense)
                said.append(f"{mean:.2f} times as fast as dense (geometric mean of {len(over_dense)} layers)")
            if over_paper:
                said.append(f"{min(over_paper):.2f} to {max(over_paper):.2f} times as fast as the paper's code")
            if said:
                lines.append(f"{'training step' if op == 'train' else op}, {mode}: {', '.join(said)}")
    return lines


def measured(workload: str, op: str, problem: FFN, published: Published, rounds: int) -> Row:
    """Compare and time one layer forward or in training."""
    m = len(problem.x)
    row = Row(workload, op, m, int((F.linear(problem.x, problem.w_gate) > 0).sum()) / m)
    torch._dynamo.config.recompile_limit = 256
    compiled = torch.compile(testing.dense_output, fullgraph=True, dynamic=False)
    site = twell.AutoStrategy()
    functions: dict[str, Callable[[FFN], Tensor]] = {
        "dense eager": testing.dense_output,
        "dense compiled": compiled if problem.x.is_cuda else testing.dense_output,
        "twell": partial(testing.sparse_output, strategy=site),
    }
    # gradients are compared on tokens that no rounding decides
    clean = testing.off_kinks(problem) if op == "train" else problem
    dy = testing.real_upstream(problem) if op == "train" else None
    clock = Clock(problem.x.device)
    for _ in range(SETTLING):
        call_of(functions["twell"], clean, dy)(clean.x)
        clock.wait()
    row.strategy = next((choice.strategy for choice in site.explain() if not choice.graph), "dense")
    answers = Answers(clean, dy)
    answers.check(row, "dense eager", call_of(functions["dense eager"], clean, dy)(clean.x))
    row.twell_wrong = answers.check(row, "twell", call_of(functions["twell"], clean, dy)(clean.x))
    theirs: Callable[[FFN], Call] = published.forward if dy is None else partial(call_of, published.output, dy=dy)
    try:
        row.wrong = answers.check(row, "paper", theirs(clean)(clean.x), WRONG)
        clock.wait()
    except FAILURES as error:
        row.red = reason(error)
    calls = {name: call_of(function, problem, dy) for name, function in functions.items()}
    if any(fault in row.red for fault in LOST):
        return row
    if not row.red:
        calls["paper"] = theirs(problem)
    timed(row, calls, problem, clock, rounds)
    return row


def call_of(function: Callable[[FFN], Tensor], problem: FFN, dy: Tensor | None) -> Call:
    """``function`` on the weights of ``problem``: y, or the gradients of x and of all weights if there is ``dy``."""
    if dy is None:

        @torch.no_grad()
        def forward(x: Tensor) -> dict[str, Tensor]:
            return {"y": function(problem._replace(x=x))}

        return forward

    @torch.enable_grad()
    def step(x: Tensor) -> dict[str, Tensor]:
        leaves = problem._replace(x=x).map(lambda t: t.detach().requires_grad_())
        tensors = leaves.present(gated=True)
        return dict(zip(tensors, torch.autograd.grad(function(leaves), tuple(tensors.values()), dy)))

    return step


class Answers:
    """The results of a layer in float64, and the errors of dense PyTorch, which ``check`` gets first."""

    def __init__(self, problem: FFN, dy: Tensor | None) -> None:
        self._problem, self._dy = problem, dy

    def check(self, row: Row, name: str, found: dict[str, Tensor], limit: float | None = None) -> str:
        """Note the errors of a variant; return what is wrong, or "".

        Wrong is an error in norm of more than ``limit`` times that of dense PyTorch; without it what the suite allows.
        """
        if self._dy is None:
            compared = {"y": testing.compare(self._problem, found["y"])}
        else:
            compared = testing.compare_gradients(self._problem, self._dy, found)
        worst = max(compared.values(), key=lambda c: c.ours.frobenius)
        row.errors[name] = worst.ours.frobenius
        row.worst_rows[name] = max(c.ours.worst_row for c in compared.values())

        def right(c: Comparison) -> bool:
            return c.ok if limit is None else c.ours.frobenius <= limit * c.dense.frobenius

        return "; ".join(said(tensor, comparison) for tensor, comparison in compared.items() if not right(comparison))


def said(tensor: str, comparison: Comparison) -> str:
    """A wrong result in words."""
    ours, dense = comparison.ours, comparison.dense
    return (
        f"{tensor}: error {100 * ours.frobenius:.2g} %, worst row {100 * ours.worst_row:.2g} %, "
        f"dense {100 * dense.frobenius:.2g} % and {100 * dense.worst_row:.2g} %"
    )


def timed(row: Row, calls: dict[str, Call], problem: FFN, clock: Clock, rounds: int) -> None:
    """Time the variants in all modes, and put the times into the row."""
    copies = 2
    if clock.on_gpu:
        cache = torch.cuda.get_device_properties(problem.x.device).L2_cache_size
        copies = min(copies_for(problem.x.nbytes, cache), 8)
    tokens = [problem.x, *(problem.x.clone() for _ in range(copies - 1))]
    runs: dict[str, dict[str, Callable[[], float]]] = {mode: {} for mode in MODES}
    for name, call in calls.items():
        several = [partial(call, tokens[i % copies]) for i in range(max(CALLS, copies))]
        clock.eager(several)
        runs["queued"][name] = partial(clock.queued, several)
        runs["eager"][name] = partial(clock.eager, several)
        runs["waited"][name] = partial(clock.eager, several[:1])
        if row.op == "train":
            for mode in ("eager", "waited"):
                runs[f"{mode}, one thread"][name] = partial(in_one_thread, runs[mode][name])
        if clock.on_gpu and name != "paper":
            graph, _ = testing.captured(partial(in_turn, several))
            runs["replayed"][name] = partial(replayed, clock, graph, len(several))
    for mode, variants in runs.items():
        samples: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, sample in variants.items():
                samples[name].append(sample())
        medians = {name: statistics.median(each) for name, each in samples.items()}
        if medians:
            dense = min(medians.pop(name) for name in ("dense eager", "dense compiled"))
            row.modes[mode] = {"dense": dense, **medians}
    queued = row.modes["queued"]
    row.dense_ms, row.ms, row.twell_ms = queued["dense"], queued.get("paper"), queued["twell"]


def in_one_thread(sample: Callable[[], float]) -> float:
    """A time whose backward passes stay in the calling thread."""
    with torch.autograd.set_multithreading_enabled(False):
        return sample()


def in_turn(calls: Sequence[Callable[[], Any]]) -> None:
    """Call each."""
    for call in calls:
        call()


def replayed(clock: Clock, graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Milliseconds per call of a graph of ``calls``."""
    return clock.queued([graph.replay]) / calls


if __name__ == "__main__":
    raise SystemExit(main())
