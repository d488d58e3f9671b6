"""Checks variants, times those that are right, and makes their rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from profiling.bench.energy import EnergyMeter, energy_of
from profiling.bench.layers import DTYPES, Decode, Options, TimedLayer, Variant
from profiling.bench.protocol import Ceilings, Device
from profiling.bench.report import Progress
from profiling.bench.rows import LayerRow, note_eager, note_errors, note_rates, note_times
from profiling.bench.variants import Settled, ready
from profiling.bench.workloads import Source
from twell.commands.timing import FAILURES, Recording, measure, reason, spread
from twell.testing import Comparison

# Dense PyTorch.
KINDS = ("eager", "compiled")


class Job(NamedTuple):
    """A workload and the sizes of its layer."""

    source: Source
    m: int
    k: int
    n: int
    dtype: str


class Runner:
    """Runs ``options`` on one workload after another. Call it without gradients."""

    def __init__(
        self, options: Options, device: Device, ceilings: Ceilings, progress: Progress, meter: EnergyMeter | None = None
    ) -> None:
        self._options, self._device, self._ceilings = options, device, ceilings
        self._progress, self._meter = progress, meter

    def run(self, job: Job) -> Iterator[list[LayerRow]]:
        """Rows of a workload in groups timed in turn: the layer, then each number of tokens of decode."""
        compression = self._options.compression
        sizes = {"tokens": job.m, "m": job.m, "k": job.k, "n": job.n, "dtype": job.dtype, "compression": compression}
        row = LayerRow(job.source.name, "any", 0, 0, **sizes)  # type: ignore[arg-type]
        try:
            yield from self._groups(job, row)
        except FAILURES as error:  # out of memory, or the late fault of an earlier kernel
            yield [replace(row, red=reason(error))]

    def _groups(self, job: Job, row: LayerRow) -> Iterator[list[LayerRow]]:
        label = f"{job.source.name}, M = {job.m}"
        self._progress.step(label)
        where = self._device.torch_device
        problem = job.source.load(job.m, job.k, job.n, device=where, dtype=DTYPES[job.dtype])
        layer = TimedLayer(problem, self._options, self._device, self._ceilings)
        # a recorded layer has sizes of its own
        row = replace(row, tokens=layer.m, m=layer.m, k=layer.k, n=layer.n)
        if variants := layer.variants():
            nnz, overflowing = layer.nonzeros / layer.m, float(layer.overflowing)
            base = replace(row, nnz=nnz, overflowing_tiles=overflowing)
            yield self._timed(layer, variants, base, self._options.eager)
        if "decode" in self._options.ops:
            decode = Decode(layer)
            for tokens in self._options.decoded:
                self._progress.step(f"{label}, decode of {tokens}")
                of_few = replace(row, tokens=tokens, nnz=decode.nnz, overflowing_tiles=decode.overflowing * tokens)
                yield self._timed(layer, decode.variants(tokens), of_few)

    def _timed(
        self, layer: TimedLayer, variants: Sequence[Variant], base: LayerRow, eager: bool = False
    ) -> list[LayerRow]:
        """Check every variant, then time the right ones in turn, with ``eager`` also outside of graphs.

        ``base`` has what all rows share.
        """
        rows = {each.key: replace(base, variant=each.name, requested=each.requested) for each in variants}
        found = ready(variants, rows, self._device, self._note)
        recordings = {key: each.recording for key, each in found.items()}
        try:
            times = measure(recordings, self._options.seconds)
            for key, (variant, settled, _) in found.items():
                note_times(rows[key], times[key], _dense(variant, times))
                figures = variant.figures(settled.strategy)
                note_rates(rows[key], variant.flop, figures, self._device.torch_device.type == "cuda")
            for way in ("queued", "waited") if eager else ():
                # as many calls in a row as graphs have: after more of them the power limit lowers the next one's clock
                calls = {key: self._device.eager(way, each.settled.call, layer.copies) for key, each in found.items()}
                times = measure(calls, self._options.seconds / 2)
                for key, each in found.items():
                    note_eager(rows[key], way, spread(times[key]).median, [*_dense(each.variant, times).values()])
        except FAILURES as error:
            # the culprit is unknown: none has a time
            for variant in variants:
                if not rows[variant.key].red:
                    names = {"variant": variant.name, "requested": variant.requested}
                    rows[variant.key] = replace(base, red=reason(error), **names)  # type: ignore[arg-type]
            return list(rows.values())
        if self._meter is not None:
            self._energies(self._meter, variants, recordings, rows)
        return list(rows.values())

    def _note(self, row: LayerRow, variant: Variant, settled: Settled, errors: dict[str, Comparison]) -> None:
        """Put strategies, errors and memory into the row."""
        row.strategy, row.eager_strategy = settled.strategy, settled.eager
        if errors:
            note_errors(row, errors)
        if variant.forward is not None and not row.red:
            forward = variant.forward(settled.strategy)
            row.kept_bytes = self._device.kept(lambda i: forward(i)[1])
        if (variant.forward is not None or self._options.memory) and not row.red:
            row.peak_bytes = self._device.peak(settled.now)

    def _energies(
        self,
        meter: EnergyMeter,
        variants: Sequence[Variant],
        recordings: Mapping[str, Recording],
        rows: Mapping[str, LayerRow],
    ) -> None:
        """Put millijoules per token into the rows: each recording runs alone for some seconds."""
        for key, recording in recordings.items():
            if (energy := energy_of(meter, key, recording.replay, self._options.energy_seconds)) is None:
                continue
            tokens = energy.calls * recording.copies * rows[key].tokens
            rows[key].energy_mj = energy.joules * 1e3 / tokens
            rows[key].idle_mj = energy.idle_joules * 1e3 / tokens
        for variant in variants:
            row = rows[variant.key]
            dense = rows.get(f"dense {row.faster_dense}{variant.baseline}")
            if row.energy_mj and dense is not None and dense.energy_mj is not None:
                row.energy_dense = dense.energy_mj / row.energy_mj


def _dense(variant: Variant, times: Mapping[str, list[float]]) -> dict[str, float]:
    """Milliseconds of a variant's dense baselines."""
    names = {} if variant.baseline is None else {kind: f"dense {kind}{variant.baseline}" for kind in KINDS}
    return {kind: spread(times[key]).median for kind, key in names.items() if key in times}
