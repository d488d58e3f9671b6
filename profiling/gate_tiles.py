"""Time the gate GEMM with every size of its tiles beside cuBLAS's plain product, in CUDA graphs.

    python -m profiling.gate_tiles --out profiling/results/h200_gate_tiles.json    # on a GPU, a minute

The data behind ``twell.tuning.gate_pack``. Several copies of x and of the weight, larger than the L2 cache together,
take turns. ``cublas`` is F.linear without bias; ``few``: the kernel for few tokens; numbers: tokens of a tile.
Microseconds, medians of interleaved replays.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import testing, tuning
from twell._runtime import device, geometry, specs
from twell.commands.bench.protocol import Graph, measure
from twell.commands.bench.report import write_json
from twell.ops import library
from twell.ops.gate_pack import outputs

SHAPES = ((1024, 2816), (2048, 5632), (4096, 14336))
TOKENS = (1, 16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 16384)
COMPRESSION = 8
# bytes of all copies, more than twice the L2 cache of an H200
COPIED = 120e6
# threshold of the gates: one in 190 fires, as at 29 non-zeros of 5,632
THRESHOLD = 2.56


@dataclasses.dataclass
class Row:
    """Microseconds of a problem by kernel, and the kernel that ``tuning`` chooses."""

    m: int
    k: int
    n: int
    chosen: str
    us: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the data")
    parser.add_argument("--seconds", type=float, default=0.3, help="time per shape and number of tokens (0.3)")
    arguments = parser.parse_args(argv)
    rows: list[Row] = []
    for k, n in SHAPES:
        for m in TOKENS:
            rows.append(Row(m, k, n, chosen(m, n), measured(m, k, n, arguments.seconds)))
            times = "  ".join(f"{name} {us:.1f}" for name, us in rows[-1].us.items())
            print(f"{k:6} {n:6} {m:6}  {times}", flush=True)
            write_json(arguments.out, rows, machine=testing.machine_line(), arguments={"seconds": arguments.seconds})
    return 0


def chosen(m: int, n: int) -> str:
    """The name of the kernel that ``tuning`` chooses."""
    spec = tuning.gate_pack(torch.bfloat16, m, n, device.sm_count(0) // 2)
    return str(spec.tokens) if isinstance(spec, specs.GatePackSpec) else "few"


def last_arguments(m: int, like: Tensor, clusters: int) -> dict[str, tuple[specs.Spec, tuple[Any, ...]]]:
    """The kernels that can take m tokens, by name, and their arguments after those of the packed gate."""
    width = geometry.words_per_tile(COMPRESSION)
    kernels: dict[str, tuple[specs.Spec, tuple[Any, ...]]] = {
        str(tokens): (specs.GatePackSpec("bfloat16", tokens), (width, 0, clusters)) for tokens in specs.GATE_TOKENS
    }
    if m <= max(specs.FEW_TOKENS):
        tokens = next(t for t in specs.FEW_TOKENS if m <= t)
        no_arrivals = like.new_empty(0, dtype=torch.int32)
        kernels["few"] = specs.GatePackFewSpec("bfloat16", tokens), (no_arrivals, width, 0)
    return kernels


def measured(m: int, k: int, n: int, seconds: float) -> dict[str, float]:
    """Microseconds of each kernel."""
    copies = min(24, max(2, math.ceil(COPIED / (2 * (m + n) * k))))
    xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / math.sqrt(k) for _ in range(copies)]
    for x, weight in zip(xs, weights):
        x[:, :8], weight[:, :8] = 1.0, -THRESHOLD / 8
    calls: dict[str, Callable[[int], tuple[Tensor, ...]]] = {"cublas": lambda i: (F.linear(xs[i], weights[i]),)}
    no_bias = xs[0].new_empty(0)

    def call(spec: specs.Spec, last: tuple[Any, ...]) -> Callable[[int], tuple[Tensor, ...]]:
        packed: Any = outputs(xs[0], weights[0], COMPRESSION)

        def run(i: int) -> tuple[Tensor, ...]:
            library.launch(spec, xs[i], weights[i], no_bias, *packed, *last)
            return tuple(packed)

        return run

    kernels = last_arguments(m, no_bias, device.sm_count(0) // 2)
    calls |= {name: call(*kernel) for name, kernel in kernels.items()}
    times = measure({name: Graph(call, copies) for name, call in calls.items()}, seconds)
    return {name: round(1e3 * statistics.median(samples), 2) for name, samples in times.items()}


if __name__ == "__main__":
    raise SystemExit(main())
