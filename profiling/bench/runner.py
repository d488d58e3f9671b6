"""Checks variants, times those that are right, and makes their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from twell._runtime.log import logger
from twell.commands.bench.decode import Decode
from twell.commands.bench.layers import TRAINING, Inference, TimedLayer, Variant
from twell.commands.bench.protocol import FAILURES, Ceilings, Device, Recording, measure, reason, spread
from twell.commands.bench.report import Progress
from twell.commands.bench.rows import LayerRow, note_dense, note_errors, note_times
from twell.commands.bench.training import Training
from twell.commands.bench.workloads import Source

if TYPE_CHECKING:
    from twell.commands.bench.energy import EnergyMeter
    from twell.commands.bench.layers import Options

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
        try:
            yield from self._groups(job)
        except FAILURES as error:  # out of memory, or the late fault of an earlier kernel
            row = LayerRow(job.source.name, "any", 0, 0, reason(error), tokens=job.m, op=",".join(self._options.ops))
            row.m, row.k, row.n, row.dtype = job.m, job.k, job.n, job.dtype
            row.compression, row.checked = self._options.compression, self._options.check
            yield [row]

    def _groups(self, job: Job) -> Iterator[list[LayerRow]]:
        name, labels = job.source.name, steps(self._options, job)
        self._progress.step(labels[0])
        where = self._device.torch_device
        problem = job.source.load(job.m, job.k, job.n, device=where, dtype=DTYPES[job.dtype])
        layer = TimedLayer(problem, self._options, self._device, self._ceilings)

        def whole(variant: Variant) -> LayerRow:
            row = LayerRow(name, variant.name, layer.nonzeros / layer.m, float(layer.overflowing), tokens=layer.m)
            return self._with_request(row, variant, layer, job.dtype)

        variants = [*Inference(layer).variants(), *Training(layer).variants()]
        if variants:
            yield self._timed(layer, variants, whole)
        if "decode" not in self._options.ops:
            return
        decode = Decode(layer)
        for i, tokens in enumerate(self._options.decoded):
            if i or len(labels) > len(self._options.decoded):
                self._progress.step(labels[i - len(self._options.decoded)])

            def few(variant: Variant, tokens: int = tokens) -> LayerRow:
                row = LayerRow(name, variant.name, decode.nnz, decode.overflowing * tokens, tokens=tokens)
                return self._with_request(row, variant, layer, job.dtype)

            yield self._timed(layer, decode.variants(tokens), few)

    def _with_request(self, row: LayerRow, variant: Variant, layer: TimedLayer, dtype: str) -> LayerRow:
        row.op, row.requested, row.checked = variant.op, variant.requested, self._options.check
        row.m, row.k, row.n, row.dtype, row.compression = layer.m, layer.k, layer.n, dtype, self._options.compression
        return row

    def _timed(self, layer: TimedLayer, variants: list[Variant], row: Callable[[Variant], LayerRow]) -> list[LayerRow]:
        """Check every variant, then time the right ones in turn."""
        rows: dict[str, LayerRow] = {}
        recordings: dict[str, Recording] = {}
        for variant in variants:
            self._progress.note(f"{variant.key}: check and record")
            made = rows[variant.key] = row(variant)
            try:
                variant.settled()
                made.strategy = variant.strategy
                recording = self._checked(layer, variant, made)
            except FAILURES as error:
                made.red = reason(error)
                continue
            if recording is not None:
                recordings[variant.key] = recording
        self._progress.note(f"{len(recordings)} variants in turn")
        try:
            times = measure(recordings, self._options.seconds)
            for variant in variants:
                if variant.key in times:
                    self._fill(rows[variant.key], variant, layer, times)
        except FAILURES as error:
            # the culprit is unknown: none has a time
            rows |= {each.key: self._failed(row(each), error) for each in variants if not rows[each.key].red}
            return list(rows.values())
        if self._meter is not None:
            self._energies(self._meter, variants, recordings, rows)
        return list(rows.values())

    @staticmethod
    def _failed(row: LayerRow, error: Exception) -> LayerRow:
        row.red = reason(error)
        return row

    def _checked(self, layer: TimedLayer, variant: Variant, row: LayerRow) -> Recording | None:
        """A recording of the variant; None, with the reason in the row, if its result is wrong."""
        copies = variant.copies or layer.copies
        check = self._options.check and variant.verify is not None
        outputs: tuple[torch.Tensor, ...] = ()
        if check:
            self._device.poison()
            outputs = variant.now(copies - 1)
            assert variant.verify is not None
            compared, row.red = variant.verify(outputs)
            note_errors(row, compared)
            if row.red:
                return None
        elif self._options.check:
            self._note_dense_errors(layer, variant, row)
        if variant.forward is not None:
            row.kept_bytes = self._device.kept(variant.forward)
        if variant.forward is not None or self._options.memory:
            row.peak_bytes = self._device.peak(variant.now)
        recording = self._device.record(variant.call, copies, variant.eager)
        if check and not _same(variant, outputs, recording):
            row.red = "a replayed recording gives other bits"
            return None
        return recording

    def _note_dense_errors(self, layer: TimedLayer, variant: Variant, row: LayerRow) -> None:
        """Put dense PyTorch's own errors, the unit of all others, into its row for inference."""
        if variant.name.startswith("dense") and variant.op not in (*TRAINING, "decode"):
            dense = layer.answer(not variant.name.endswith("non-gated"))[1]
            row.dense_frobenius, row.dense_worst_row = dense.frobenius, dense.worst_row

    def _fill(self, row: LayerRow, variant: Variant, layer: TimedLayer, times: Mapping[str, list[float]]) -> None:
        """Put times and rates into a row."""
        # a CPU's ceilings are measured on sizes that its caches hold
        floor = variant.floor if self._device.torch_device.type == "cuda" else None
        ms = note_times(row, times[variant.key], variant.flop, floor)
        if ms:
            row.executed_tflops = None if variant.executed is None else variant.executed / ms / 1e9
            row.l2_gather_gbs = variant.gathered / ms / 1e6 if variant.gathered else None
            row.memory_gbs = None if variant.moved is None else variant.moved / ms / 1e6
        if variant.name == "gate_pack" and "gate GEMM" in times:
            row.over_gemm = ms / spread(times["gate GEMM"]).median
        if variant.baseline is not None:
            names = {name: f"dense {name}{variant.baseline}" for name in ("eager", "compiled")}
            note_dense(row, {name: spread(times[key]).median for name, key in names.items() if key in times})
        ours = variant.verify is not None and not variant.name.startswith("dense") and variant.strategy != "dense"
        if self._options.kernels and ours:
            row.kernels = self._device.kernel_times(variant.now, min(variant.copies or layer.copies, KERNEL_COPIES))

    def _energies(
        self,
        meter: EnergyMeter,
        variants: list[Variant],
        recordings: Mapping[str, Recording],
        rows: Mapping[str, LayerRow],
    ) -> None:
        """Put millijoules per token into the rows: each recording runs alone for some seconds."""
        for key, recording in recordings.items():
            self._progress.note(f"{key}: energy")

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


def steps(options: Options, job: Job) -> list[str]:
    """The progress labels of ``Runner.run``, one for each group of rows."""
    name = f"{job.source.name}, M = {job.m}"
    others = [name] if any(op != "decode" for op in options.ops) else []
    decoded = options.decoded if "decode" in options.ops else ()
    return [*others, *(f"{name}, decode of {tokens}" for tokens in decoded)]


def _same(variant: Variant, outputs: tuple[torch.Tensor, ...], recording: Recording) -> bool:
    """Whether a replay gives the same bits as the call on the last copy."""
    recording.spoil()
    recording.replay()
    recording.wait()
    # without gate_pack's spill, which is undefined where nothing spills and never read there
    defined = (0, 2) if variant.name == "gate_pack" else range(len(outputs))
    return all(torch.equal(outputs[i], recording.outputs[i]) for i in defined)
