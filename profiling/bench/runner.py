"""Checks variants, times those that are right, and makes their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from profiling.bench.decode import Decode
from profiling.bench.layers import Inference, TimedLayer, Variant
from profiling.bench.protocol import Ceilings, Device
from profiling.bench.report import Progress
from profiling.bench.rows import LayerRow, note_dense, note_eager, note_errors, note_times
from profiling.bench.training import Training
from profiling.bench.workloads import Source
from twell._runtime.log import logger
from twell.commands.timing import FAILURES, Recording, measure, reason, spread

if TYPE_CHECKING:
    from profiling.bench.energy import EnergyMeter
    from profiling.bench.layers import Options

# Dense PyTorch.
KINDS = ("eager", "compiled")

# Copies for timing single kernels: each call waits for a sleeping GPU.
KERNEL_COPIES = 8

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
        self,
        options: Options,
        device: Device,
        ceilings: Ceilings,
        progress: Progress,
        meter: EnergyMeter | None = None,
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
        variants = [*Inference(layer).variants(), *Training(layer).variants()]
        if variants:
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
        rows: dict[str, LayerRow] = {}
        recordings: dict[str, Recording] = {}
        for variant in variants:
            made = rows[variant.key] = replace(base, variant=variant.name, requested=variant.requested)
            try:
                variant.settled()
                made.strategy, made.eager_strategy = variant.strategy, variant.eager_strategy
                recording = self._checked(layer, variant, made)
            except FAILURES as error:
                made.red = reason(error)
                continue
            if recording is not None:
                recordings[variant.key] = recording
        try:
            times = measure(recordings, self._options.seconds)
            for variant in variants:
                if variant.key in times:
                    self._fill(rows[variant.key], variant, layer, times)
            if eager:
                self._eager([variant for variant in variants if variant.key in times], layer, rows)
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

    def _checked(self, layer: TimedLayer, variant: Variant, row: LayerRow) -> Recording | None:
        """A recording of the variant; None, with the reason in the row, if its result is wrong."""
        copies = variant.copies or layer.copies
        outputs: tuple[torch.Tensor, ...] = ()
        if variant.verify is not None:
            self._device.poison()
            outputs = variant.now(copies - 1)
            compared, row.red = variant.verify(outputs)
            note_errors(row, compared)
            if not row.red and variant.also is not None:
                call, check = variant.also
                _, row.red = check(call(copies - 1))
            if row.red:
                return None
        elif variant.name == "dense eager":
            # the unit of the other errors
            dense = layer.answer[1]
            row.dense_frobenius, row.dense_worst_row = dense.frobenius, dense.worst_row
        if variant.forward is not None:
            row.kept_bytes = self._device.kept(variant.forward)
        if variant.forward is not None or self._options.memory:
            row.peak_bytes = self._device.peak(variant.now)
        recording = self._device.record(variant.call, copies, variant.eager)
        if variant.verify is not None and not _same(outputs, recording):
            row.red = "a replayed recording gives other bits"
            return None
        return recording

    def _fill(self, row: LayerRow, variant: Variant, layer: TimedLayer, times: Mapping[str, list[float]]) -> None:
        """Put times and rates into a row."""
        # a CPU's ceilings are measured on sizes that its caches hold
        floor = variant.floor if self._device.torch_device.type == "cuda" else None
        ms = note_times(row, times[variant.key], variant.flop, floor)
        if ms:
            row.executed_tflops = None if variant.executed is None else variant.executed / ms / 1e9
            row.l2_gather_gbs = variant.gathered / ms / 1e6 if variant.gathered else None
            row.memory_gbs = None if variant.moved is None else variant.moved / ms / 1e6
        if variant.baseline is not None:
            names = {kind: f"dense {kind}{variant.baseline}" for kind in KINDS}
            note_dense(row, {name: spread(times[key]).median for name, key in names.items() if key in times})
        ours = variant.verify is not None and not variant.name.startswith("dense") and variant.strategy != "dense"
        if self._options.kernels and ours:
            row.kernels = self._device.kernel_times(variant.now, min(variant.copies or layer.copies, KERNEL_COPIES))

    def _eager(self, variants: Sequence[Variant], layer: TimedLayer, rows: Mapping[str, LayerRow]) -> None:
        """Put the times of eager calls into the rows, in one way after the other by all variants in turn."""
        copies = layer.copies
        for way in ("queued", "waited"):
            # as many calls in a row as graphs have: after more of them the power limit lowers the next one's clock
            recordings = {variant.key: self._device.eager(way, variant.call, copies) for variant in variants}
            times = measure(recordings, self._options.seconds / 2)
            medians = {key: spread(samples).median for key, samples in times.items()}
            for variant in variants:
                names = [] if variant.baseline is None else [f"dense {k}{variant.baseline}" for k in KINDS]
                dense = [medians[name] for name in names if name in medians]
                note_eager(rows[variant.key], way, medians[variant.key], dense)

    def _energies(
        self,
        meter: EnergyMeter,
        variants: Sequence[Variant],
        recordings: Mapping[str, Recording],
        rows: Mapping[str, LayerRow],
    ) -> None:
        """Put millijoules per token into the rows: each recording runs alone for some seconds."""
        for key, recording in recordings.items():

            def replay(recording: Recording = recording) -> None:
                recording.replay()

            try:
                energy = meter.measure(replay, self._options.energy_seconds)
            except Exception as error:
                # NVML's own errors, too: they do not spoil the times
                logger.warning("energy of %s cannot be measured: %s", key, reason(error))
                continue
            tokens = energy.calls * recording.copies * rows[key].tokens
            rows[key].energy_mj = energy.joules * 1e3 / tokens
            rows[key].idle_mj = energy.idle_joules * 1e3 / tokens
        for variant in variants:
            row = rows[variant.key]
            dense = rows.get(f"dense {row.faster_dense}{variant.baseline}")
            if row.energy_mj and dense is not None and dense.energy_mj is not None:
                row.energy_dense = dense.energy_mj / row.energy_mj


def _same(outputs: tuple[torch.Tensor, ...], recording: Recording) -> bool:
    """Whether a replay gives the same bits as the call on the last copy."""
    recording.spoil()
    recording.replay()
    recording.wait()
    return all(torch.equal(first, again) for first, again in zip(outputs, recording.outputs, strict=True))
