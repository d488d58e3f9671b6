"""``python -m profiling.bench portable``: the portable family of kernels beside Hopper's, on one Hopper GPU.

Time whole calls by both families of kernels, and dense PyTorch, eager and compiled, in CUDA graphs: gates, layers by
"row" and "union", training steps, and few tokens, which read weights outside of L2.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from profiling.bench.workloads import Source, parse
from profiling.harness import Bench, Case, Row, Variant, Way, agrees, beside
from twell import ops, testing
from twell.choose import tuning
from twell.commands.request import RequestError, at_least
from twell.commands.timing import Call
from twell.runtime import program, specs
from twell.testing import FFN

FAMILIES = {"hopper": specs.SM90, "portable": specs.PORTABLE}
TOKENS, FEW = 16384, (1, 8, 64)
SHOWN = ("workload", "call", "us")


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
    return lambda i: (output(problems[i]),)


def step(problems: list[FFN], output: Callable[[FFN], Tensor]) -> Call:
    dy = testing.real_upstream(problems[0])
    leaves = [problem.map(lambda t: t.detach().requires_grad_()) for problem in problems]

    @torch.enable_grad()
    def call(i: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output(leaves[i]), tuple(leaves[i].present(True).values()), dy)

    return call


def gate(problems: list[FFN], output: object) -> Call:
    return lambda i: tuple(ops.gate_pack(problems[i].x, problems[i].w_gate, None, 8))


OPTIONS = {
    "--workload": (str, ["topic29", "uniform29"], "as of profiling.bench"),
    "--m": (at_least(1), TOKENS, "tokens of most calls"),
    "--sizes": (at_least(8), [2048, 5632], "K and N"),
}
SECONDS = 0.5


def cases(bench: Bench) -> Iterator[Case]:
    many, sizes = bench.arguments.m, bench.arguments.sizes
    if len(sizes) != 2:
        raise RequestError(f"--sizes: expected K and N, got {sizes}")
    by_row, by_union = (functools.partial(testing.sparse_output, strategy=name) for name in ("row", "union"))
    calls: dict[str, tuple[int, Callable[..., Call], Any]] = {
        "gate": (many, gate, None),
        "row": (many, layer, by_row),
        "union": (many, layer, by_union),
        "training": (many, step, by_union),
        **{f"{m} tokens": (m, layer, by_row) for m in FEW},
        **{f"gate, {m} tokens": (m, gate, None) for m in FEW},
    }

    def measure(base: Row, source: Source, m: int, make: Callable[..., Call], output: Any) -> Iterator[list[Row]]:
        first = source.load(m, *sizes, device=bench.device.torch_device, dtype=torch.bfloat16)
        size = sum(t.nbytes for t in first if t is not None)
        copies = bench.device.copies_for(size) if m < many else 1
        problems = [first, *(first.map(torch.clone) for _ in range(copies - 1))]
        own = make(problems, output)
        # the ops of a gate alone have tests of their own
        check = None if make is gate else agrees(make(problems, testing.dense_output), make is step)
        variants = [
            Variant(family, lambda _: own, copies, check=check, within=functools.partial(kernels_of, chosen))
            for family, chosen in FAMILIES.items()
        ]
        others: dict[str, Call] = {"product": lambda i: (torch.mm(problems[i].x, problems[i].w_gate.t()),)}
        if make is not gate:
            # not compiled for any number of tokens
            compiled = torch.compile(testing.dense_output, dynamic=False)
            others = {"dense eager": make(problems, testing.dense_output), "dense compiled": make(problems, compiled)}
        for said, call in others.items():
            variants.append(Variant(said, functools.partial(lambda made, _: made, call), copies))
        yield [beside(base, bench.timed(base, variants, [Way("graph", "us", unit=1e3)]), "us")]

    for source in parse(bench.arguments.workload):
        for name, how in calls.items():
            base = {"workload": source.name, "call": name}
            yield base, functools.partial(measure, base, source, *how)
