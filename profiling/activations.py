"""Time layers of each activation on the same pattern of gates, beside dense, and compare both with float64.

    python -m profiling.activations --out profiling/results/h200_activations.json    # on a GPU, a minute and a half

Layers of 2,048 to 5,632 with 16,384 tokens, forward by each strategy and a training step; then one token with 12 % of
the neurons firing, as squared ReLU has them, in layers of 4,096 to 14,336 with a gate and to 16,384 without one, whose
copies of the weights are larger than L2. All calls of a layer and its operation take turns in one run.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiling.draw.common import markdown
from twell import testing
from twell._activation import NAMES
from twell._tables import SCREENED
from twell.commands.bench import workloads
from twell.commands.bench.protocol import Cpu, Device, Gpu, measure
from twell.commands.bench.report import write_json
from twell.testing.workloads import FFN

# fatrelu's threshold: the pattern is nearly that of relu
THRESHOLD = 1e-3
TOKENS, K, N = 16384, 2048, 5632
LAYERS = ("topic29", "uniform29")
# K, N, gated, non-zeros: 12 % of the neurons
ONE_TOKEN = ((4096, 14336, True, 1720), (4096, 16384, False, 1966))


@dataclass
class Row:
    """One way to run a layer. ``over_dense``: its time over that of the faster dense of the same activation.

    ``over_relu``: over that of relu by the same strategy. ``frobenius``, ``worst_row``: errors over those of dense, of
    a training step the largest over its gradients.
    """

    layer: str
    k: int
    n: int
    gated: bool
    tokens: int
    op: str
    activation: str
    strategy: str
    ms: float
    over_dense: float = math.nan
    over_relu: float = math.nan
    frobenius: float = math.nan
    worst_row: float = math.nan


Call = Callable[[int], tuple[Tensor, ...]]


def options_of(activation: str) -> dict[str, Any]:
    """The arguments of functions that name an activation."""
    return {"activation": activation, "threshold": THRESHOLD if activation == "fatrelu" else 0.0}


def copies_of(problem: FFN, copies: int) -> list[FFN]:
    """The problem, and others with copies of its weights."""
    own = problem._replace(x=problem.x[:0])
    return [problem, *(own.map(Tensor.clone)._replace(x=problem.x) for _ in range(copies - 1))]


def ratios(found: testing.Comparison) -> tuple[float, float]:
    """Both errors over those of dense."""
    return found.ours.frobenius / found.dense.frobenius, found.ours.worst_row / found.dense.worst_row


def timed(
    calls: dict[tuple[str, str], Call], copies: int, seconds: float, device: Device
) -> dict[tuple[str, str], float]:
    """Milliseconds by activation and strategy, interleaved."""
    found = measure({" ".join(key): device.record(call, copies) for key, call in calls.items()}, seconds)
    return {key: statistics.median(found[" ".join(key)]) for key in calls}


def rows_of(common: dict[str, Any], times: dict[tuple[str, str], float], errors: Any) -> Iterator[Row]:
    """The rows of the calls in ``times``; ``errors`` by the same keys, of sparse calls."""
    for (activation, strategy), ms in times.items():
        dense = min(value for key, value in times.items() if key[0] == activation and key[1].startswith("dense "))
        relu = times.get(("relu", strategy))
        row = Row(**common, activation=activation, strategy=strategy, ms=ms)
        row.over_dense, row.over_relu = ms / dense, ms / relu if relu else math.nan
        if (activation, strategy) in errors:
            row.frobenius, row.worst_row = errors[activation, strategy]
        yield row


def forward(
    problem: FFN, gated: bool, strategies: Sequence[str], copies: int, seconds: float, device: Device
) -> tuple[Any, Any]:
    """Times and errors of forward passes."""
    layers, calls, errors = copies_of(problem, copies), dict[tuple[str, str], Call](), dict[tuple[str, str], Any]()
    for activation in NAMES if gated else [name for name in NAMES if name != "drelu"]:
        options = options_of(activation) | {"gated": gated}
        compiled = torch.compile(functools.partial(testing.dense_output, **options), dynamic=False)
        calls[activation, "dense eager"] = lambda i, o=options: (testing.dense_output(layers[i], **o),)  # type: ignore[misc]
        calls[activation, "dense compiled"] = lambda i, f=compiled: (f(layers[i]),)  # type: ignore[misc]
        for strategy in strategies:
            asked = options | {"strategy": strategy}
            calls[activation, strategy] = lambda i, a=asked: (testing.sparse_output(layers[i], **a),)  # type: ignore[misc]
            found = testing.compare(problem, testing.sparse_output(problem, **asked), **options)
            errors[activation, strategy] = ratios(found)
    return timed(calls, copies, seconds, device), errors


def training(problem: FFN, seconds: float, device: Device) -> tuple[Any, Any]:
    """Times and errors of training steps."""
    calls, errors = dict[tuple[str, str], Call](), dict[tuple[str, str], Any]()
    for activation in NAMES:
        options = options_of(activation)
        smooth = testing.off_kinks(problem, threshold=options["threshold"])
        dy = testing.real_upstream(problem)

        def step(function: Any, i: int, own: Any = options, dy: Tensor = dy) -> tuple[Tensor, ...]:
            return tuple(function(problem, dy, **own).values())

        calls[activation, "dense eager"] = functools.partial(step, testing.dense_gradients)
        calls[activation, "union"] = functools.partial(
            step, functools.partial(testing.sparse_gradients, strategy="union")
        )
        gradients = testing.sparse_gradients(smooth, dy, strategy="union", **options)
        found = testing.compare_gradients(smooth, dy, gradients, **options).values()
        errors[activation, "union"] = tuple(map(max, zip(*map(ratios, found), strict=True)))
    return timed(calls, 1, seconds, device), errors


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Microseconds by activation, over those of relu and over dense's, and the largest error over dense's."""
    sparse = [row for row in rows if not row["strategy"].startswith("dense ")]
    keys = ("layer", "gated", "tokens", "op", "strategy")
    calls: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in sparse:
        calls.setdefault(tuple(row[key] for key in keys), {})[row["activation"]] = row
    lines = []
    for (layer, gated, tokens, op, strategy), own in calls.items():
        cells = [f"`{layer}`" if tokens > 1 else f"{layer}{'' if gated else ', no gate'}", f"{tokens:,}"]
        cells += ["training step" if op == "training" else op, strategy]
        for activation in NAMES:
            each = own.get(activation)
            cells.append(f"{each['ms'] * 1e3:.1f} / {each['over_relu']:.3f} / {each['over_dense']:.2f}" if each else "")
        lines.append([*cells, f"{max(row['frobenius'] for row in own.values()):.2f}"])
    header = ["layer", "tokens", "call", "strategy", *NAMES, "error over dense's"]
    return markdown(header, "lrll" + "r" * (len(NAMES) + 1), lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the data")
    parser.add_argument("--seconds", type=float, default=2.0, help="time of a layer and operation (2.0)")
    parser.add_argument("--device", default="cuda", help="cpu tries the program, with times that say nothing (cuda)")
    arguments = parser.parse_args(argv)
    device: Device = Cpu() if arguments.device == "cpu" else Gpu(torch.device(arguments.device))
    where = device.torch_device
    rows: list[Row] = []

    def note(common: dict[str, Any], op: str, found: tuple[Any, Any]) -> None:
        rows.extend(rows_of(common | {"op": op}, *found))
        write_json(arguments.out, rows, machine=testing.machine_line(where), arguments={"seconds": arguments.seconds})
        for row in rows[-len(found[0]) :]:
            print(
                f"{row.layer:12} {row.op:8} {row.tokens:6} {row.activation:8} {row.strategy:14} "
                f"{row.ms * 1e3:8.1f} us  over dense {row.over_dense:.3f}  "
                f"over relu {row.over_relu:.3f}  "
                f"errors {row.frobenius:.2f} {row.worst_row:.2f}",
                flush=True,
            )

    for name in LAYERS:
        problem = testing.make(name, TOKENS, K, N, device=where)
        common = {"layer": name, "k": K, "n": N, "gated": True, "tokens": TOKENS}
        with torch.inference_mode():
            found = forward(problem, True, ("row", "union", SCREENED), 1, arguments.seconds, device)
        note(common, "forward", found)
        note(common, "training", training(problem, arguments.seconds, device))
    for k, n, gated, nonzeros in ONE_TOKEN:
        (source,) = workloads.parse([f"nnz={nonzeros},skew=1"])
        problem = source.load(1, k, n, device=where, dtype=torch.bfloat16)
        # sparse calls read few rows of the other weights: the gates alone must exceed the cache
        copies = device.copies_for(2 * n * k)
        with torch.inference_mode():
            found = forward(problem, gated, ("row", "union"), copies, arguments.seconds / 2, device)
        note({"layer": f"{nonzeros} of {n}", "k": k, "n": n, "gated": gated, "tokens": 1}, "forward", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
