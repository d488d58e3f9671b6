"""The portable family of kernels beside Hopper's and dense PyTorch, on one Hopper GPU, in CUDA graphs.

    python -m profiling.portable --json profiling/results/portable.json

All run the same problems in turn, in one process. Times of whole calls are medians of replays; those of kernels are of
launches one by one, between events. "dense" is the faster of eager and compiled PyTorch. "product" is the time of
PyTorch's own kernels, in the portable family that of the gate. Calls of few tokens read weights outside of L2.
"""

import argparse
import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiling.bench import protocol, workloads
from profiling.bench.cli import L2_TBS
from twell import _files, ops, testing, tuning
from twell._runtime import program, specs
from twell.commands.timing import Call, measure, spread
from twell.testing import FFN

FAMILIES = {"hopper": specs.SM90, "portable": specs.PORTABLE}
TOKENS, FEW = 16384, (1, 8, 64)
# copies whose kernels are timed one by one
KERNEL_COPIES = 8


@contextlib.contextmanager
def kernels_of(family: str) -> Iterator[None]:
    """Let calls run the kernels of a family."""
    own = tuning.family
    tuning.family = lambda index: family
    program.forget()
    try:
        yield
    finally:
        tuning.family = own
        program.forget()


def layer(problems: list[FFN], output: Callable[[FFN], Tensor]) -> Call:
    """Inference of a layer."""
    return lambda i: (output(problems[i]),)


def step(problems: list[FFN], output: Callable[[FFN], Tensor]) -> Call:
    """Forward and backward of a layer."""
    dy = testing.real_upstream(problems[0])
    leaves = [problem.map(lambda t: t.detach().requires_grad_()) for problem in problems]

    @torch.enable_grad()
    def call(i: int) -> tuple[Tensor, ...]:
        y = output(leaves[i])
        return torch.autograd.grad(y, tuple(leaves[i].present(True).values()), dy)

    return call


def gate(problems: list[FFN], output: object) -> Call:
    """The gate, packed."""
    return lambda i: tuple(ops.gate_pack(problems[i].x, problems[i].w_gate, None, 8))


def product(problems: list[FFN]) -> Call:
    """The gate by PyTorch alone."""
    return lambda i: (torch.mm(problems[i].x, problems[i].w_gate.t()),)


@torch.no_grad()
def rows_of(gpu: protocol.Gpu, source: workloads.Source, sizes: tuple[int, int], seconds: float) -> Iterator[Any]:
    """A row for each call, with one for each of its kernels, on a workload."""
    by_row, by_union = (functools.partial(testing.sparse_output, strategy=name) for name in ("row", "union"))
    calls: dict[str, tuple[int, Callable[..., Call], Any]] = {
        "gate": (TOKENS, gate, None),
        "row": (TOKENS, layer, by_row),
        "union": (TOKENS, layer, by_union),
        "training": (TOKENS, step, by_union),
    }
    calls |= {f"{m} tokens": (m, layer, by_row) for m in FEW}
    calls |= {f"gate, {m} tokens": (m, gate, None) for m in FEW}
    # not compiled for any number of tokens
    compiled = torch.compile(testing.dense_output, dynamic=False)
    for name, (m, make, output) in calls.items():
        first = source.load(m, *sizes, device="cuda", dtype=torch.bfloat16)
        size = sum(t.numel() * t.element_size() for t in first if t is not None)
        copies = gpu.copies_for(size) if m < TOKENS else 1
        problems = [first, *(first.map(torch.clone) for _ in range(copies - 1))]
        call, recordings = make(problems, output), {}
        kernels: dict[str, dict[str, float]] = {}
        for family, chosen in FAMILIES.items():
            with kernels_of(chosen):
                recordings[family] = gpu.record(call, copies)
        if make is gate:
            recordings["product"] = gpu.record(product(problems), copies)
        else:
            for kind, dense in (("eager", testing.dense_output), ("compiled", compiled)):
                recordings[f"dense {kind}"] = gpu.record(make(problems, dense), copies)
        times = {family: spread(each).median * 1e3 for family, each in measure(recordings, seconds).items()}
        del recordings
        for family, chosen in FAMILIES.items():
            with kernels_of(chosen):
                found = gpu.kernel_times(call, min(copies, KERNEL_COPIES))
            for symbol, ms in found.items():
                kernel = "product" if symbol == "torch" else specs.spec_from_symbol(symbol).op
                kernels.setdefault(kernel, dict.fromkeys(FAMILIES, 0.0))[family] += ms * 1e3
        yield {"workload": source.name, "call": name, "us": times, "kernels": kernels}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=["topic29", "uniform29"])
    parser.add_argument("--seconds", type=float, default=0.5, help="of replays of each call (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs=2, default=[2048, 5632], metavar=("K", "N"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    gpu = protocol.Gpu(torch.device("cuda", 0))
    ceilings, machine = gpu.ceilings(torch.bfloat16, L2_TBS)
    rows = []
    for source in workloads.parse(arguments.workload):
        for row in rows_of(gpu, source, tuple(arguments.sizes), arguments.seconds):
            rows.append(row)
            us = row["us"]
            print(f"{row['workload']:10} {row['call']:16} {us['portable'] / us['hopper']:5.2f}", end="")
            print("".join(f"  {name} {value:.1f}" for name, value in us.items()))
            for kernel, times in row["kernels"].items():
                print(f"{'':30} {kernel:14}" + "".join(f" {times[family]:8.1f}" for family in FAMILIES))
    if arguments.json:
        found = {"machine": machine, "sizes": [TOKENS, *arguments.sizes], "ceilings": vars(ceilings), "rows": rows}
        _files.write_text(arguments.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
