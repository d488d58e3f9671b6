"""Time the portable family of kernels beside those of Hopper on one H200, kernel by kernel, with the floor of each.

    python -m profiling.portable --out profiling/results/h200_portable.json    # on an H200, half a minute
    python -m profiling.portable --out part.json --workload real3 real6 --recorded FOLDER

A call is a forward pass by "row" or "union", a training step, or the forward pass of a few tokens, whose gate weights
come from memory. Each is timed whole and kernel by kernel, by both families in turn, in CUDA graphs: medians. A row
without a kernel is the whole call. Floors are those of ``profiling.nsight.summarize``, by this machine's rates.

``modelled`` says what a GPU might see whose dense products run at the rate of the portable gate GEMM: a dense layer's
three products, nine in training, over the call's time here. It is a model, for no such GPU was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from profiling.nsight import profile_target, summarize
from twell import ops, testing, tuning
from twell._runtime import resolve, specs
from twell.commands.bench import protocol
from twell.commands.bench.parser import L2_TBS
from twell.commands.bench.report import write_json

Call = Callable[[int], tuple[Any, ...]]

M, K, N = 16384, testing.PAPER_HIDDEN, testing.PAPER_NEURONS
FEW = (1, 8, 64)
COMPRESSION = 8
# products of a dense layer
PRODUCTS = {"row": 3, "union": 3, "training": 9}


@dataclasses.dataclass
class Row:
    """Microseconds of a call, or of one kernel of it, by family; the floor, and what takes it."""

    workload: str
    call: str
    kernel: str
    hopper_us: float
    portable_us: float
    floor_us: float | None = None
    bound: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the data")
    parser.add_argument("--workload", nargs="+", default=["topic29", "uniform29"], help="default: %(default)s")
    parser.add_argument("--recorded", type=Path, help="folder of recorded layers: real3, real6")
    parser.add_argument("--seconds", type=float, default=0.05, help="time per call and kernel (%(default)s)")
    arguments = parser.parse_args(argv)
    device = protocol.Gpu(torch.device("cuda"))
    ceilings, machine = device.ceilings(torch.bfloat16, L2_TBS)
    rows: list[Row] = []
    modelled = {}
    for workload in arguments.workload:
        problem = testing.load(workload, M, K, N, real_layers=arguments.recorded)
        found = measured(workload, problem, vars(ceilings), arguments.seconds)
        rows += found
        for row in found:
            ratio = f"{row.hopper_us:9.2f} {row.portable_us:9.2f}  {row.portable_us / row.hopper_us:.3f}"
            print(f"{row.workload:10} {row.call:10} {row.kernel:24} {ratio}", flush=True)
        modelled[workload] = model(problem, found)
        print(workload, modelled[workload], flush=True)
    write_json(arguments.out, rows, machine=machine, arguments=arguments, ceilings=vars(ceilings), modelled=modelled)
    return 0


@torch.no_grad()
def measured(workload: str, p: testing.FFN, ceilings: dict[str, float], seconds: float) -> list[Row]:
    """All rows of a workload."""
    rows = []
    for name, call in calls(p).items():
        figures = profile_target.figures(p, COMPRESSION)
        rows.append(Row(workload, name, "", *times({family: (family, call) for family in specs.FAMILIES}, seconds)))
        found = {family: kernels(family, call) for family in specs.FAMILIES}
        for kernel in [kernel for kernel in found[specs.PORTABLE] if kernel in found[specs.SM90]]:
            spec, _ = found[specs.PORTABLE][kernel]
            work = summarize.work(spec.op, spec, figures)
            floor, bound = work.floor(ceilings) if work else (None, "")
            both = {family: (family, found[family][kernel][1]) for family in specs.FAMILIES}
            row = Row(workload, name, kernel, *times(both, seconds))
            rows.append(dataclasses.replace(row, floor_us=None if floor is None else 1e3 * floor, bound=bound))
    weights = [p.w_gate, *(p.w_gate.clone() for _ in range(3))]
    for m in FEW:
        for kernel, call in few(p, m, weights).items():
            # many calls, so that the launch of the graph does not count
            both = {family: (family, call) for family in specs.FAMILIES}
            rows.append(
                Row(workload, f"{m} token{'s' if m > 1 else ''}", kernel, *times(both, seconds, 4 * len(weights)))
            )
    return rows


def calls(p: testing.FFN) -> dict[str, Call]:
    """The calls on many tokens."""
    dy, zero = testing.real_upstream(p), p.x.new_zeros((), dtype=torch.float32)

    def forward(read: Callable[..., tuple[Any, ...]]) -> Call:
        def call(_: int) -> tuple[Any, ...]:
            words, spill, _ = ops.gate_pack(p.x, p.w_gate, None, COMPRESSION)
            return read(p.x, words, spill, p.w_up, p.w_down, None, None, COMPRESSION)

        return call

    def training(_: int) -> tuple[Any, ...]:
        weights = (p.w_gate, p.w_up, p.w_down, None, None)
        y, _, _, *kept = ops.hybrid_forward(p.x, *weights, None, COMPRESSION)
        return y, *ops.hybrid_backward(dy, zero, p.x, *weights, *kept, True, True)

    return {"row": forward(ops.up_down), "union": forward(ops.up_down_union), "training": training}


def few(p: testing.FFN, m: int, weights: list[torch.Tensor]) -> dict[str, Call]:
    """The layer on the first tokens, and its two operators."""
    words, spill, _ = ops.gate_pack(p.x[:m], p.w_gate, None, COMPRESSION)

    def gate(i: int) -> tuple[Any, ...]:
        return ops.gate_pack(p.x[:m], weights[i % len(weights)], None, COMPRESSION)

    def up_down(i: int, words: Any = words, spill: Any = spill) -> tuple[Any, ...]:
        return ops.up_down(p.x[:m], words, spill, p.w_up, p.w_down, None, None, COMPRESSION)

    return {"": lambda i: up_down(i, *gate(i)[:2]), "gate_pack": gate, "up_down": up_down}


def in_family(name: str) -> Any:
    """A context in which calls run the kernels of a family."""
    return mock.patch.object(tuning, "family", return_value=name)


def kernels(family: str, call: Call) -> dict[str, tuple[Any, Call]]:
    """The launches of a call by kernel: the spec, and the launch on the operands that this call made."""
    found: dict[str, tuple[Any, Call]] = {}
    resolved = resolve.resolve

    def recording(spec: Any, *arch: str) -> Callable[..., None]:
        kernel = resolved(spec, *arch)

        def run(*operands: Any) -> None:
            products = f", {spec.products} products" if getattr(spec, "products", 1) > 1 else ""

            def again(_: int) -> tuple[Any, ...]:
                kernel(*operands)
                return ()

            found[f"{spec.op}{products}"] = spec, again
            kernel(*operands)

        return run

    with in_family(family), mock.patch.object(resolve, "resolve", recording):
        call(0)
    torch.cuda.synchronize()
    return found


def times(both: dict[str, tuple[str, Call]], seconds: float, copies: int = 2) -> tuple[float, float]:
    """Microseconds of Hopper's and of the portable family's call."""
    recordings = {}
    for name, (family, call) in both.items():
        with in_family(family):
            recordings[name] = protocol.Graph(call, copies)
    found = protocol.measure(recordings, seconds)
    return tuple(1e3 * statistics.median(found[family]) for family in specs.FAMILIES)  # type: ignore[return-value]


def model(p: testing.FFN, rows: Sequence[Row]) -> dict[str, float]:
    """The gain over a dense layer whose products run at the rate of the portable gate GEMM, and this rate."""
    of = {(row.call, row.kernel): row.portable_us for row in rows}
    product = of["training", "gate_pack"]
    gains = {call: PRODUCTS[call] * product / of[call, ""] for call in PRODUCTS}
    return gains | {"tflops": 2e-6 * p.x.numel() * p.w_gate.shape[0] / product}


if __name__ == "__main__":
    raise SystemExit(main())
