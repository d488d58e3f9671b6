"""``LayerRow``, one line of the table and of the data of a benchmark of layers, and the table's columns."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from profiling.bench.report import Column, number
from twell.commands.timing import spread
from twell.testing import Comparison

# Times below are shown in microseconds.
SMALL_MS = 0.1


@dataclasses.dataclass
class LayerRow:
    """One line of the table and of the data. Times are milliseconds; ``red`` is the fault, empty if there is none.

    ``ms`` and what is made from it are of replays of a CUDA graph, ``queued_ms`` and ``waited_ms`` of eager calls
    (``protocol.WAYS``), None where these were not timed. ``variant`` is the timed operation or a baseline of it.
    """

    workload: str
    variant: str
    nnz: float
    overflowing_tiles: float
    red: str = ""
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    samples: int = 0
    tflops: float | None = None
    l2_gather_gbs: float | None = None
    floor_ms: float | None = None
    floor_share: float | None = None
    frobenius: float | None = None
    worst_row: float | None = None
    dense_frobenius: float | None = None
    dense_worst_row: float | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    tokens: int = 0
    # the strategy requested and the one that ran; empty if there is no choice
    requested: str = ""
    strategy: str = ""
    executed_tflops: float | None = None
    memory_gbs: float | None = None
    # over the faster of eager and compiled dense PyTorch
    speedup_dense: float | None = None
    faster_dense: str = ""
    # tokens of the workload, of which decode takes a few; sizes of the layer
    m: int = 0
    k: int = 0
    n: int = 0
    dtype: str = ""
    compression: int = 0
    # millijoules per token: total, of an idle GPU in the same time; and dense's total over this row's
    energy_mj: float | None = None
    idle_mj: float | None = None
    energy_dense: float | None = None
    # eager calls, the speed-ups over the faster of eager and compiled dense PyTorch, called alike, and what "auto" ran
    queued_ms: float | None = None
    waited_ms: float | None = None
    queued_speedup: float | None = None
    waited_speedup: float | None = None
    eager_strategy: str = ""


def note_errors(row: LayerRow, compared: Mapping[str, Comparison]) -> None:
    """Put the errors into the row; of several tensors those largest relative to dense's."""
    norm = max(compared.values(), key=lambda c: ratio(c.ours.frobenius, c.dense.frobenius))
    worst = max(compared.values(), key=lambda c: ratio(c.ours.worst_row, c.dense.worst_row))
    row.frobenius, row.dense_frobenius = norm.ours.frobenius, norm.dense.frobenius
    row.worst_row, row.dense_worst_row = worst.ours.worst_row, worst.dense.worst_row


def note_times(row: LayerRow, samples: Sequence[float], dense: Mapping[str, float]) -> None:
    """Put the milliseconds of replays into the row, and the speed-up over the faster of the dense variants."""
    row.samples, (row.ms, _, row.p10_ms, row.p90_ms) = len(samples), spread(samples)
    if dense and row.ms:
        row.faster_dense = min(dense, key=lambda name: dense[name])
        row.speedup_dense = dense[row.faster_dense] / row.ms


def note_rates(row: LayerRow, flop: float, figures: Mapping[str, float], on_gpu: bool) -> None:
    """Put rates into a timed row, of ``flop`` dense operations and of a variant's ``figures``."""
    if not row.ms:
        return
    row.tflops = flop / row.ms / 1e9
    # a CPU's ceilings are measured on sizes that its caches hold
    if on_gpu:
        row.floor_ms, row.floor_share = figures["floor"] * 1e3, figures["floor"] * 1e3 / row.ms
    rates = (("executed_tflops", "executed", 1e9), ("l2_gather_gbs", "gathered", 1e6), ("memory_gbs", "moved", 1e6))
    for name, figure, unit in rates:
        if figure in figures:
            setattr(row, name, figures[figure] / row.ms / unit)


def note_eager(row: LayerRow, way: str, ms: float, dense: Sequence[float]) -> None:
    """Put the time of an eager call into the row, and the speed-up over the faster of the dense variants."""
    setattr(row, f"{way}_ms", ms)
    if dense and ms:
        setattr(row, f"{way}_speedup", min(dense) / ms)


def ratio(value: float, base: float) -> float:
    """``value`` over ``base``; 1 if both are 0, NaN if either is."""
    return 1.0 if value == base else value / base if base else math.inf * value


def named(row: LayerRow) -> str:
    """The strategy of a row; for "auto" also its choice."""
    settled = row.requested == "auto" and row.strategy
    return f"auto: {row.strategy}" if settled else row.strategy or row.requested or "-"


# Columns


def _eager(way: str) -> Callable[[LayerRow], str]:
    """The time of an eager call, with its speed-up, and the strategy if it is not that of the recording."""

    def cell(row: LayerRow) -> str:
        ms, speedup = getattr(row, f"{way}_ms"), getattr(row, f"{way}_speedup")
        if ms is None:
            return "-"
        other = f" {row.eager_strategy}" if row.eager_strategy != row.strategy else ""
        return f"{ms:.4f} ms" + ("" if speedup is None else f" ({speedup:.2f}{other})")

    return cell


def _time(row: LayerRow, *fields: str, digits: int = 1) -> str:
    """Times in microseconds if the median is small, else in milliseconds with three more digits."""
    times = [getattr(row, field) for field in fields]
    if row.ms is None or None in times:
        return "-"
    scale, form = (1e3, ".1f") if row.ms < SMALL_MS else (1.0, f".{digits}f")
    return "-".join(f"{ms * scale:{form}}" for ms in times)


def _median(row: LayerRow) -> str:
    return "-" if row.ms is None else f"{_time(row, 'ms', digits=4)} {'us' if row.ms < SMALL_MS else 'ms'}"


def _significant(value: float | None) -> str:
    return "-" if value is None else f"{value:{'.2g' if value < 1 else '.1f' if value < 10 else '.0f'}}"


def _bandwidth(row: LayerRow) -> str:
    gbs = row.l2_gather_gbs if row.memory_gbs is None else row.memory_gbs
    return "-" if gbs is None else f"{gbs / 1000:{'.2f' if gbs >= 100 else '.2g'}}"


def _dense(row: LayerRow) -> str:
    return "-" if row.speedup_dense is None else f"{row.speedup_dense:.2f} {row.faster_dense}"


def _error(field: str) -> Callable[[LayerRow], str]:
    def cell(row: LayerRow) -> str:
        value, base = getattr(row, field), getattr(row, f"dense_{field}")
        return "-" if value is None or base is None else f"{ratio(value, base):.2f}"

    return cell


def _net(row: LayerRow) -> str:
    return "-" if row.energy_mj is None or row.idle_mj is None else f"{row.energy_mj - row.idle_mj:.4f}"


COLUMNS = (
    Column("workload", lambda row: row.workload, True, "the pattern of activation: see --workload"),
    Column("M", lambda row: str(row.tokens), False, "tokens of a call"),
    Column("nnz", lambda row: f"{row.nnz:.1f}", False, "mean non-zeros per token"),
    Column("variant", lambda row: row.variant, True, "the operation or a baseline"),
    Column("strategy", named, True, 'the strategy that ran; for "auto" also its choice'),
    Column("time", _median, False, "median of one call in replays of a CUDA graph"),
    Column(
        "p10-p90",
        lambda row: _time(row, "p10_ms", "p90_ms", digits=3),
        False,
        "10th and 90th percentile of one call, in the unit of its time",
    ),
    Column(
        "executed",
        lambda row: _significant(row.executed_tflops),
        False,
        "TFLOP/s of the operations executed: the gate GEMM's and, after it, 2 K a product for each non-zero or, by "
        '"union", 2 * 128 K for each neuron of each tile of 128 tokens',
    ),
    Column(
        "TB/s",
        _bandwidth,
        False,
        'bytes of the weight rows gathered through L2 over time: 2 K a product for each non-zero or, by "union", for '
        "each neuron of each tile. For decode, bytes from memory: x, y, and the weights that its tokens need",
    ),
    Column(
        "floor",
        number("floor_share", ".0%"),
        False,
        "the roofline: time of the largest of arithmetic, memory and gather at the measured ceilings, as a share of "
        "the time; for a layer, the sum over gate_pack and the rest. For training only the gate GEMM's arithmetic and "
        "memory count, so 100 % is out of reach",
    ),
    Column("dense/t", _dense, False, "speed-up over the faster dense layer, and which it is"),
    Column(
        "queued",
        _eager("queued"),
        False,
        "an eager call among many in a row, after which the host waits once: the longer of the host's time and the "
        "GPU's; with the speed-up over the faster dense layer, called alike, and the strategy if it is another one",
    ),
    Column("waited for", _eager("waited"), False, "an eager call and the wait for it, with the same"),
    Column(
        "error",
        _error("frobenius"),
        False,
        "relative error against float64 in the Frobenius norm over dense eager's own; for a training step that of the "
        "worst gradient",
    ),
    Column("worst", _error("worst_row"), False, "the same for the worst row"),
    Column(
        "kept-MB",
        number("kept_bytes", ".1f", 1e6),
        False,
        "tensors that a training step saves for backward, without x and the weights",
    ),
    Column("peak-MB", number("peak_bytes", ".1f", 1e6), False, "peak memory of a call above that of its inputs"),
    Column("mJ/token", number("energy_mj", ".4f"), False, "energy of the GPU per token (--energy)"),
    Column("net", _net, False, "the same minus the energy of an idle GPU in that time"),
    Column("dense/mJ", number("energy_dense"), False, "energy of the faster dense variant over this one's"),
)
