"""The code that the paper's authors published beside twell and dense PyTorch, on the same layers in one run.

    python -m profiling.paper_code --package sparser-faster-llms --real FOLDER --json paper_code.json

--package is a checkout of https://github.com/SakanaAI/sparser-faster-llms, which is no part of this repository and is
only imported: TwELLGatedMLP for the forward pass, torch.ops.sparse_ops.ff_forward_gated for training steps. It compiles
its kernels when it is loaded, for which it needs nvcc and ninja.

All variants are timed in turn, by eager calls on copies of the tokens, queued and waited for, as in
``profiling.bench``: the published code launches on the default stream, which no graph captures. "dense" is the faster
of eager and compiled PyTorch. Times are milliseconds, medians.

Results are compared with float64: "errors" are in norm, "worst_rows" of the worst row, in training those of the worst
gradient. "wrong" says which results of the published code have more than twice the error of dense PyTorch: more
roundings explain 1.2 times. "red" is its error instead of a result. After a fault of the GPU nothing more can be
measured in a process: the same command goes on behind it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from profiling.bench import protocol
from profiling.bench.layers import SETTLING, gradients_of, module_of
from profiling.bench.report import write_json
from profiling.bench.workloads import parse
from twell import testing
from twell.commands.timing import FAILURES, measure, reason, spread
from twell.nn import SparseFFN
from twell.testing import FFN

TOKENS, SIZES = 16384, (testing.PAPER_HIDDEN, testing.PAPER_NEURONS)
# Errors of the published code that are called wrong, over those of dense PyTorch.
WRONG = 2.0
# Faults of the GPU, after which its context is lost.
LOST = ("illegal memory access", "unspecified launch failure", "misaligned address", "device-side assert")

# y, or the gradients of x and the weights, by name, for tokens.
Call = Callable[[Tensor], dict[str, Tensor]]


@dataclasses.dataclass
class Row:
    """One layer, forward or in training. ``ms``: by way ("queued", "waited"), then by variant."""

    workload: str
    op: str
    m: int
    nnz: float
    strategy: str = ""
    wrong: str = ""
    red: str = ""
    twell_wrong: str = ""
    ms: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    worst_rows: dict[str, float] = dataclasses.field(default_factory=dict)

    def line(self) -> str:
        """The row as text."""
        times = "; ".join(
            " ".join([way, *(f"{name} {ms:.3f}" for name, ms in x.items())]) for way, x in self.ms.items()
        )
        return f"{self.workload} {self.op} {self.strategy}: {times} {self.red or self.wrong} {self.twell_wrong}".strip()


class Published:
    """The published code, loaded from a checkout."""

    def __init__(self, package: Path) -> None:
        modules = package / "custom_models"
        self._inference = _loaded(modules / "twell_modules" / "twell.py", "published_inference")
        _loaded(modules / "hybrid_modules" / "sparse_ops_loader.py", "published_training").load_sparse_ops()
        # a layer that is collected takes what the extension knows of its number with it, even if another has it by then
        self._numbers = itertools.count()

    def forward(self, problem: FFN) -> Call:
        """The layer of a forward pass."""
        operands = {"GATE": problem.w_gate, "UP": problem.w_up, "DOWN": problem.w_down, "ext": None}
        layer = self._inference.TwELLGatedMLP(layer_number=next(self._numbers), **operands)
        return torch.no_grad()(lambda x: {"y": layer(x)})

    def output(self, leaves: FFN) -> Tensor:
        """y with its graph. It reads the number of tokens from the first two sizes."""
        found = torch.ops.sparse_ops.ff_forward_gated(leaves.x[None], leaves.w_gate, leaves.w_up, leaves.w_down)
        y: Tensor = found[0][0]
        return y


def _loaded(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call_of(function: Callable[[FFN], Tensor], problem: FFN, dy: Tensor | None) -> Call:
    """``function`` on the weights of ``problem``: y, or the gradients of x and of all weights if there is ``dy``."""
    if dy is None:
        return torch.no_grad()(lambda x: {"y": function(problem._replace(x=x))})

    @torch.enable_grad()
    def step(x: Tensor) -> dict[str, Tensor]:
        leaves = problem._replace(x=x).map(lambda t: t.detach().requires_grad_())
        tensors = leaves.present(gated=True)
        return dict(zip(tensors, torch.autograd.grad(function(leaves), tuple(tensors.values()), dy)))

    return step


def call_of_module(layer: SparseFFN, dy: Tensor | None) -> Call:
    """A call of the gated layer, as in ``call_of``."""
    if dy is None:
        return torch.no_grad()(lambda x: {"y": layer(x)})
    return lambda x: gradients_of(layer, x, dy)


def check(row: Row, name: str, problem: FFN, dy: Tensor | None, found: dict[str, Tensor]) -> str:
    """Note the errors of a variant; return what is wrong with it, "" if nothing is."""
    if dy is None:
        compared = {"y": testing.compare(problem, found["y"])}
    else:
        compared = testing.compare_gradients(problem, dy, found)
    row.errors[name] = max(c.ours.frobenius for c in compared.values())
    row.worst_rows[name] = max(c.ours.worst_row for c in compared.values())
    published = name == "paper"
    wrong = (
        f"{tensor}: error {c.ours.frobenius:.2g}, dense {c.dense.frobenius:.2g}"
        for tensor, c in compared.items()
        if not (c.ours.frobenius <= WRONG * c.dense.frobenius if published else c.ok)
    )
    return "; ".join(wrong)


def measured(gpu: protocol.Gpu, name: str, op: str, problem: FFN, published: Published, seconds: float) -> Row:
    """Compare and time one layer forward or in training."""
    row = Row(name, op, len(problem.x), int((F.linear(problem.x, problem.w_gate) > 0).sum()) / len(problem.x))
    # gradients are compared on tokens that no rounding decides
    clean = testing.off_kinks(problem) if op == "train" else problem
    dy = testing.real_upstream(problem) if op == "train" else None
    layer = module_of(clean)
    ours = call_of_module(layer, dy)
    for _ in range(SETTLING):
        ours(clean.x)
        gpu.wait()
    row.strategy = next(choice.strategy for choice in twell.explain(layer) if not choice.graph)
    check(row, "dense", clean, dy, call_of(testing.dense_output, clean, dy)(clean.x))
    row.twell_wrong = check(row, "twell", clean, dy, ours(clean.x))
    theirs: Callable[[FFN], Call] = published.forward if dy is None else partial(call_of, published.output, dy=dy)
    try:
        row.wrong = check(row, "paper", clean, dy, theirs(clean)(clean.x))
        gpu.wait()
    except FAILURES as error:
        row.red = reason(error)
    if any(fault in row.red for fault in LOST):
        return row
    compiled = torch.compile(testing.dense_output, fullgraph=True, dynamic=False)
    dense = {"dense eager": testing.dense_output, "dense compiled": compiled}
    calls = {variant: call_of(function, problem, dy) for variant, function in dense.items()} | {"twell": ours}
    if not row.red:
        calls["paper"] = theirs(problem)
    copies = gpu.copies_for(problem.x.nbytes)
    tokens = [problem.x, *(problem.x.clone() for _ in range(copies - 1))]

    def on(call: Call) -> Callable[[int], tuple[Tensor, ...]]:
        return lambda i: tuple(call(tokens[i]).values())

    for way in ("queued", "waited"):
        recordings = {variant: gpu.eager(way, on(call), copies) for variant, call in calls.items()}
        times = {variant: spread(samples).median for variant, samples in measure(recordings, seconds).items()}
        fastest = min(times.pop("dense eager"), times.pop("dense compiled"))
        row.ms[way] = {"dense": fastest, **times}
    return row


def layers(arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], FFN]]]:
    """The names of the workloads, and what draws or loads each."""
    real = [f"real:{arguments.real / number}" for number in "36"] if arguments.real else []
    for source in parse([*arguments.workload, *real]):
        yield source.name, partial(source.load, TOKENS, *SIZES, device="cuda", dtype=torch.bfloat16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="checkout of the published code")
    parser.add_argument("--workload", nargs="+", default=["uniform29", "skew29", "topic29", "topic128", "dense911"])
    parser.add_argument("--real", type=Path, help="folder with recorded layers 3 and 6")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each way and layer (%(default)s)")
    parser.add_argument("--json", type=Path, required=True, help="file of the results; its layers are skipped")
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 256
    gpu = protocol.Gpu(torch.device("cuda"))
    published = Published(arguments.package)
    rows = [Row(**row) for row in json.loads(arguments.json.read_text())["rows"]] if arguments.json.exists() else []
    for name, load in layers(arguments):
        problem = load()
        for op in ("forward", "train"):
            if (name, op) in [(row.workload, row.op) for row in rows]:
                continue
            row = measured(gpu, name, op, problem, published, arguments.seconds)
            rows.append(row)
            machine = testing.machine_line(gpu.torch_device)
            write_json(arguments.json, rows, machine=machine, arguments={"tokens": TOKENS, "sizes": SIZES})
            print(row.line(), flush=True)
            if any(fault in row.red for fault in LOST):
                return 1
    return int(any(row.twell_wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
