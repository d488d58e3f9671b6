"""The demo's comparison: trained FFN layers through TwELL and through dense PyTorch, each against float64."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twell import testing
from twell._runtime import geometry
from twell._text import aligned
from twell.functional import pack, sparse_gated_ffn
from twell.nn import SparseGatedMLP
from twell.testing import Comparison, bounds

LOSS_TOLERANCE = 0.01  # nats per byte between the model run densely and through TwELL
TIMED_CALLS, WARM_CALLS = 50, 10


@dataclass(frozen=True)
class LayerComparison:
    """One FFN layer on held-back text, sparse and dense: tiles of 256 neurons of a token, times of the whole FFN."""

    layer: int
    neurons: int
    non_zeros: Tensor  # int64 [tokens], on the CPU
    never_fire: int
    overflowing: int
    row_tiles: int
    comparison: Comparison
    sparse_ms: float | None = None
    dense_ms: float | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def mean_non_zeros(self) -> float:
        return self.non_zeros.double().mean().item()

    @property
    def skipped(self) -> float:
        """Share of the (token, neuron) pairs whose rows of the up and down weights are not read."""
        return 1 - self.mean_non_zeros / self.neurons


def error_failures(comparison: Comparison) -> list[str]:
    """The errors that exceed the comparison's budget, as sentences. A NaN does."""
    sparse, dense = comparison.ours, comparison.dense
    figures = {
        "whole-tensor": (sparse.frobenius, dense.frobenius, comparison.factor),
        "worst-row": (sparse.worst_row, dense.worst_row, comparison.row_factor),
    }
    return [
        f"{name} error against float64: expected at most {factor:.3g} x dense's {bound:.3e}, got {got:.3e}"
        for name, (got, bound, factor) in figures.items()
        if not (got <= factor * bound and math.isfinite(bound))
    ]


def check_gate(gate: Tensor, x: Tensor, w_gate: Tensor) -> list[str]:
    """Check every element of gate [M, N] against float64: some fp32 summation order must round to it.

    The interval around x @ w_gate.T (bias-free) is a small fraction of one bf16 step, so nearly every element has
    exactly one admissible value, and a zero only zero.
    """
    wrong, example = 0, ""
    for start in range(0, x.shape[0], testing.CHUNK_ROWS):
        centre, radius, _ = bounds.summed(x[start : start + testing.CHUNK_ROWS], w_gate, None)
        low, high = (z.float().to(gate.dtype).relu() for z in (centre - radius, centre + radius))
        got = gate[start : start + testing.CHUNK_ROWS]
        bad = ~((low <= got) & (got <= high))  # a NaN is bad
        if count := int(bad.sum()):
            if not wrong:
                m, n = (int(i) for i in bad.nonzero()[0])
                example = (
                    f"; first: token {start + m}, neuron {n}, expected {float(low[m, n]):g} to {float(high[m, n]):g}, "
                    f"got {float(got[m, n]):g}"
                )
            wrong += count
    return [f"{wrong:,} unpacked gate values differ from relu(x Wg^T){example}"] if wrong else []


def interleaved_medians(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Median milliseconds of each call on `device`, by CUDA events, the calls in turn."""
    stream = torch.cuda.current_stream(device)
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(WARM_CALLS + TIMED_CALLS):
        events = []
        for call in calls:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record(stream)
            call()
            after.record(stream)
            events.append((before, after))
        torch.cuda.synchronize(device)
        if turn >= WARM_CALLS:
            for record, (before, after) in zip(times, events, strict=True):
                record.append(before.elapsed_time(after))
    return [statistics.median(record) for record in times]


@torch.no_grad()
def compare_layer(layer: int, x: Tensor, mlp: SparseGatedMLP, compression: int) -> LayerComparison:
    """Run one trained layer on x [M, K] (bf16) sparse and dense, and check both."""
    weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    problem = testing.FFN(x, weights[0], weights[1], weights[2].t())

    def sparse() -> Tensor:
        return sparse_gated_ffn(x, *weights, strategy="row", compression=compression)

    packed = pack(x, mlp.gate_proj.weight, compression=compression)
    gate = packed.unpack()
    comparison = testing.compare(problem, sparse())
    failures = check_gate(gate, x, mlp.gate_proj.weight) + error_failures(comparison)
    if (total := int(packed.nnz())) != (expected := int((gate != 0).sum())):
        failures.append(f"nnz(): expected {expected:,}, got {total:,}")
    sparse_ms, dense_ms = None, None
    if x.device.type == "cuda":
        sparse_ms, dense_ms = interleaved_medians([sparse, lambda: testing.dense_output(problem)], x.device)
    return LayerComparison(
        layer=layer,
        neurons=packed.n,
        non_zeros=(gate != 0).sum(1).cpu(),
        never_fire=int((gate == 0).all(0).sum()),
        overflowing=int(packed.stats[..., 1].sum()),
        row_tiles=len(x) * geometry.tiles(packed.n),
        comparison=comparison,
        sparse_ms=sparse_ms,
        dense_ms=dense_ms,
        failures=failures,
    )


def percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share < 0.1 else f"{100 * share:.1f} %"


def sparsity_table(reports: Sequence[LayerComparison]) -> list[str]:
    rows = [
        ["", "non-zeros", "most in", "neurons", "tiles", "up/down"],
        ["layer", "per token", "a token", "never fire", "overflowing", "skipped"],
    ]
    for r in reports:
        rows.append(
            [
                str(r.layer),
                f"{r.mean_non_zeros:.1f}",
                f"{int(r.non_zeros.max()):,}",
                percent(r.never_fire / r.neurons),
                percent(r.overflowing / r.row_tiles),
                percent(r.skipped),
            ]
        )
    lines = aligned(rows)
    return [*lines[:2], "-" * max(map(len, lines)), *lines[2:]]


def agreement_table(reports: Sequence[LayerComparison]) -> list[str]:
    rows = [
        ["", "worst row", "worst row", "all rows", "all rows"],
        ["layer", "TwELL", "dense", "TwELL", "dense"],
    ]
    timed = all(r.sparse_ms is not None for r in reports)
    if timed:
        rows[0] += ["time", "time", ""]
        rows[1] += ["TwELL", "dense", "speed-up"]
    rows[0].append("")
    rows[1].append("agrees")
    for r in reports:
        row = [str(r.layer)]
        sparse, dense = r.comparison.ours, r.comparison.dense
        row += [f"{e:.2e}" for e in (sparse.worst_row, dense.worst_row, sparse.frobenius, dense.frobenius)]
        if r.sparse_ms is not None and r.dense_ms is not None:
            row += [f"{r.sparse_ms:.3f} ms", f"{r.dense_ms:.3f} ms", f"{r.dense_ms / r.sparse_ms:.2f} x"]
        rows.append([*row, "NO" if r.failures else "yes"])
    lines = aligned(rows)
    return [*lines[:2], "-" * max(map(len, lines)), *lines[2:]]
