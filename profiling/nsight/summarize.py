"""Print the measurements of Nsight Compute as a table, with the least time that each kernel's work needs.

    python -m profiling.nsight.summarize up_down.csv --floor up_down.json

FILE is the output of ``ncu --import REPORT --csv --page raw``. The table has medians over the launches of a kernel.
--floor is the file that profile_target.py --figures wrote for the same workload. profiling/nsight/ncu.sh makes both
files and runs this program.

Columns:
  kernel        operator, compiled variant and kernel, as far as the name tells
  launches      number of launches
  us            duration of one launch
  floor         the longest of arithmetic, memory traffic and gathered rows at the measured rates, and which it is
  share         the floor over the time of all kernels of the operator
  tensor, L2, DRAM, issue   use of the tensor pipe while active, throughput of L2 and memory, busy issue slots: percent
                of the peak
  stalls        the most frequent stall reasons, as a share of the time that warps are resident
  regs, smem    registers per thread, shared memory per CTA
  warps         resident warps, achieved and theoretical, percent of the maximum
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiling.bench import report
from twell._runtime import geometry, specs

# Bytes of a stored value.
ITEM = 2

# Names of each column in ncu. The first one present counts.
METRICS = {
    "time": ("gpu__time_duration.sum", "gpu__time_duration.avg"),
    "tensor": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "l2": (
        "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    ),
    "dram": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "issue": (
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "sm__inst_issued.avg.pct_of_peak_sustained_active",
    ),
    "registers": ("launch__registers_per_thread",),
    "static": ("launch__shared_mem_per_block_static",),
    "dynamic": ("launch__shared_mem_per_block_dynamic",),
    "driver": ("launch__shared_mem_per_block_driver",),
    "achieved": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "theoretical": ("sm__maximum_warps_per_active_cycle_pct",),
}

# Stall reasons. Those that end in _not_issued are a part of the others.
STALL = re.compile(
    r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)_per_(?:issue_active|warp_active)\.(?:ratio|pct)"
)
# The state of a warp that issues, which is no stall.
SELECTED = "selected"
STALLS_SHOWN = 3

# Factors to milliseconds and to bytes, by the first part of a unit.
TIME_UNITS = {
    "nsecond": 1e-6,
    "ns": 1e-6,
    "usecond": 1e-3,
    "us": 1e-3,
    "msecond": 1.0,
    "ms": 1.0,
    "second": 1e3,
    "s": 1e3,
}
BYTE_UNITS = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "kibyte": 1024.0, "mibyte": 1024.0**2}

# Kernel names from the compiler, and kernel names of this repository.
COMPILERS_NAME = re.compile(r"kernel_cutlass_([a-z_]+?)_\w*?cute_kernels([a-z_]+)([A-Z][A-Za-z]*)_object_at")
GIVEN_NAME = re.compile(r"twell_(\w+?)_\d+$")


@dataclass(frozen=True)
class Name:
    """The parts of a kernel's name: operator, spec if known, label to print."""

    op: str
    spec: Any
    label: str


def parse_name(name: str) -> Name:
    """Parse the name of a device kernel; a kernel of another library is its own operator."""
    if found := GIVEN_NAME.match(name):
        by_symbol = {spec.symbol: spec for spec in specs.all_specs()}
        parts = found[1].split("_")
        for count in range(len(parts), 0, -1):
            spec = by_symbol.get("_".join(parts[:count]))
            if spec is not None:
                return Name(spec.op, spec, " ".join((spec.symbol, *parts[count:])))
    if found := COMPILERS_NAME.match(name):
        kernel, op, cls = found.groups()
        variant = re.sub(r"(?<!^)([A-Z])", r" \1", cls).lower().replace(" ", "_").removeprefix(op).strip("_")
        own = "" if kernel in ("kernel", op) else kernel
        return Name(op, None, " ".join(part for part in (op, variant, own) if part))
    short = re.sub(r"\(.*|<.*", "", name).removeprefix("void ")
    return Name(name, None, short[:60])


# Reading


@dataclass
class Launch:
    """One launch: values and units by metric, as ncu gives them."""

    kernel: str
    values: dict[str, float] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def add(self, metric: str, unit: str, text: str) -> None:
        value = number(text)
        if value is not None:
            self.values[metric], self.units[metric] = value, unit

    def find(self, column: str) -> float | None:
        """The value of a column of ``METRICS``: milliseconds, bytes, percent or a count."""
        for metric in METRICS[column]:
            if metric in self.values:
                return self.values[metric] * factor(self.units[metric])
        return None

    def stalls(self) -> dict[str, float]:
        """Time of warps in each state, all in one unit."""
        found = {}
        for metric, value in self.values.items():
            match = STALL.fullmatch(metric)
            if match and not match[1].endswith("_not_issued"):
                found[match[1]] = value
        return found


def number(text: str) -> float | None:
    """Parse a number as ncu prints it, with or without commas; None for other text."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def factor(unit: str) -> float:
    """The factor of ``unit`` to milliseconds or bytes; 1 for other units."""
    unit = unit.partition("/")[0].lower()
    return TIME_UNITS.get(unit, BYTE_UNITS.get(unit, 1.0))


def read(lines: Iterable[str]) -> list[Launch]:
    """The launches in ncu's CSV, in order. ValueError for other text."""
    # output of the program and of ncu comes first
    rows = csv.reader(itertools.dropwhile(lambda line: not line.startswith('"ID"'), lines))
    header = next(rows, [])
    if "Kernel Name" not in header:
        raise ValueError('expected the CSV of ncu, with a header from "ID" on that has "Kernel Name"')
    at = {name: i for i, name in enumerate(header)}
    launches: dict[tuple[str, ...], Launch] = {}
    key = [at[name] for name in ("Process ID", "ID") if name in at]
    units: list[str] = [""] * len(header)
    for row in rows:
        if len(row) != len(header):
            continue
        if not row[at["ID"]]:
            units = row
        else:
            launch = launches[tuple(row[i] for i in key)] = Launch(row[at["Kernel Name"]])
            for metric, unit, text in zip(header, units, row):
                launch.add(metric, unit, text)
    return list(launches.values())


# Floors


@dataclass(frozen=True)
class Work:
    """The least work of a kernel: operations, bytes from and to memory, bytes of rows gathered through L2."""

    flop: float = 0.0
    memory: float = 0.0
    gathered: float = 0.0

    def floor(self, ceilings: Mapping[str, float]) -> tuple[float, str]:
        """The least time in milliseconds, and which of the three takes it."""
        return max(
            (self.flop / ceilings["flops"] * 1e3, "arithmetic"),
            (self.memory / ceilings["memory"] * 1e3, "memory"),
            (self.gathered / ceilings["l2"] * 1e3, "L2"),
        )


def work(op: str, spec: Any, f: Mapping[str, Any]) -> Work | None:
    """The work of all kernels of ``op`` in one call, from ``profile_target.figures``; None if unknown.

    A lower bound: it leaves out lists, statistics and the second pass over rare neurons. If the name of a kernel does
    not tell otherwise, the layer has a gate and the kernel computes one product.
    """
    m, k, n, nonzeros = (float(f[key]) for key in ("m", "k", "n", "nonzeros"))
    tokens, weight, row = ITEM * m * k, ITEM * n * k, ITEM * k
    words = 4 * m * geometry.tiles(f["n"]) * geometry.words_per_tile(f["compression"])
    packed = words + f["spilled_tiles"] * geometry.TILE * ITEM
    fired, listed = f["fired"] * row, float(f["union_rows"])
    entries = 4 * nonzeros
    by_list = 2 * geometry.TOKEN_TILE * k * listed
    products = max(1, getattr(spec, "products", 1))
    projections = 2 if getattr(spec, "gated", True) else 1
    known = {
        "gate_pack": Work(2 * m * n * k, tokens + weight + packed),
        "gate_pack_few": Work(2 * m * n * k, tokens + weight + packed),
        "up_down_token": Work(0, packed + projections * (tokens + fired), projections * nonzeros * row),
        "up_down_tile": Work(0, packed + projections * (tokens + fired)),
        "pack": Work(0, ITEM * m * n + packed),
        "top_k": Work(0, ITEM * m * n),
        # both gates, and a byte
        "window": Work(0, (2 * ITEM + 1) * m * n),
        "unpack": Work(0, packed + ITEM * m * n),
        "matrix_transpose": Work(0, 2 * ITEM * n * k),
        "reglu": Work(0, (5 if getattr(spec, "backward", False) else 3) * ITEM * m * n),
        # 16 bits in, 8 out
        "quantize_tokens": Work(0, 1.5 * tokens),
        # int8 at twice the rate of bf16
        "quantize_gate": Work(0, 1.5 * (tokens + weight)),
        "gate_screen": Work(m * n * k, (tokens + weight) / 2),
        # at least the union
        "list_candidates": Work(0, m / geometry.TOKEN_TILE * n / 8 + ITEM * listed),
        "sampled_gate": Work(by_list, tokens + fired + entries, listed * row),
        "compact": Work(0, packed + entries),
        "sampled_up": Work(by_list, tokens + fired + 2 * entries, listed * row),
        "gathered": Work(products * by_list, tokens + products * fired + entries, products * listed * row),
        # a rounded gradient and its remainder
        "sampled_grad": Work(by_list, tokens + fired + entries + (ITEM + 4) * projections * nonzeros, listed * row),
        # a sector of memory for each entry, which are far apart
        "scatter": Work(0, 2 * entries + 32 * nonzeros),
        # per entry: values, then words of 8 and 4 bytes
        "transpose": Work(0, entries + (ITEM + 4) * projections * nonzeros + 12 * nonzeros),
        "weight_grad": Work(
            (projections + 1) * 2 * geometry.NEURON_TILE * k * f["token_rows"],
            2 * tokens + (projections + 1) * weight + 12 * nonzeros,
            2.0 * f["token_rows"] * row,
        ),
    }
    return known.get(op)


# The table


@dataclass
class Row:
    """One kernel, in milliseconds, percent and bytes; None was not measured."""

    kernel: str
    launches: int
    ms: float | None
    tensor: float | None
    l2: float | None
    dram: float | None
    issue: float | None
    registers: float | None
    shared_bytes: float | None
    achieved: float | None
    theoretical: float | None
    stalls: dict[str, float]
    floor_ms: float | None = None
    floor_share: float | None = None
    bound: str = ""
    red: str = ""


def median(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def summarize(launches: Sequence[Launch], figures: Mapping[str, Any] | None = None) -> list[Row]:
    """One row per kernel, in the order of first launches, with floors if ``figures`` are given."""
    kernels: dict[str, list[Launch]] = {}
    for launch in launches:
        kernels.setdefault(launch.kernel, []).append(launch)
    rows = {kernel: _row(parse_name(kernel).label, of_one) for kernel, of_one in kernels.items()}
    if figures is not None:
        operators: dict[tuple[str, Any], list[Row]] = {}
        for kernel, row in rows.items():
            name = parse_name(kernel)
            operators.setdefault((name.op, name.spec), []).append(row)
        for (op, spec), parts in operators.items():
            needed = work(op, spec, figures)
            times = [row.ms for row in parts if row.ms is not None]
            # rows with equal labels are variants, not parts of one operator
            if needed is None or not times or len({row.kernel for row in parts}) < len(parts):
                continue
            longest = max((row for row in parts if row.ms is not None), key=lambda row: row.ms or 0.0)
            longest.floor_ms, longest.bound = needed.floor(figures["ceilings"])
            longest.floor_share = longest.floor_ms / sum(times)
    return list(rows.values())


def _row(label: str, launches: Sequence[Launch]) -> Row:
    found = {column: median(launch.find(column) for launch in launches) for column in METRICS}
    shared = [found[part] for part in ("static", "dynamic", "driver")]
    states = [launch.stalls() for launch in launches]
    stalls = {
        state: median(each.get(state) for each in states) or 0.0 for state in {s for each in states for s in each}
    }
    whole = sum(stalls.values())
    return Row(
        kernel=label,
        launches=len(launches),
        ms=found["time"],
        tensor=found["tensor"],
        l2=found["l2"],
        dram=found["dram"],
        issue=found["issue"],
        registers=found["registers"],
        shared_bytes=sum(part for part in shared if part is not None) if shared != [None] * 3 else None,
        achieved=found["achieved"],
        theoretical=found["theoretical"],
        stalls={state: 100 * value / whole for state, value in sorted(stalls.items(), key=lambda s: -s[1]) if whole},
    )


def _shown(value: float | None, form: str = ".0f", scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:{form}}"


def _stalls(row: Row) -> str:
    waiting = [(state, share) for state, share in row.stalls.items() if state != SELECTED]
    return ", ".join(f"{state} {share:.0f}" for state, share in waiting[:STALLS_SHOWN]) or "-"


COLUMNS = [
    report.Column("kernel", lambda row: row.kernel, left=True),
    report.Column("launches", lambda row: str(row.launches)),
    report.Column("us", lambda row: _shown(row.ms, ".1f", 1e3)),
    report.Column("floor", lambda row: "-" if row.floor_ms is None else f"{row.floor_ms * 1e3:.1f} {row.bound}"),
    report.Column("share", lambda row: _shown(row.floor_share, ".0%")),
    report.Column("tensor", lambda row: _shown(row.tensor)),
    report.Column("L2", lambda row: _shown(row.l2)),
    report.Column("DRAM", lambda row: _shown(row.dram)),
    report.Column("issue", lambda row: _shown(row.issue)),
    report.Column("stalls (%)", _stalls, left=True),
    report.Column("regs", lambda row: _shown(row.registers)),
    report.Column("smem kB", lambda row: _shown(row.shared_bytes, ".1f", 1e-3)),
    report.Column("warps", lambda row: f"{_shown(row.achieved)}/{_shown(row.theoretical)}"),
]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE.csv", help="the CSV of ncu")
    parser.add_argument("--floor", type=Path, metavar="FIGURES.json", help="the file of profile_target.py --figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows, as profiling.bench does")
    arguments = parser.parse_args(argv)
    try:
        figures = None if arguments.floor is None else json.loads(arguments.floor.read_text())
        with arguments.file.open(newline="") as lines:
            rows = summarize(read(lines), figures)
    except (OSError, ValueError) as error:
        print(f"summarize: error: {arguments.file}: {error}", file=sys.stderr)
        return 2
    if not rows:
        print(f"summarize: error: {arguments.file}: no kernel was profiled", file=sys.stderr)
        return 2
    report.print_table(COLUMNS, rows)
    if figures is not None:
        sizes = ", ".join(f"{name} {figures[name]}" for name in ("workload", "m", "k", "n", "dtype", "compression"))
        print(f"{sizes}: {figures['nonzeros'] / figures['m']:.1f} non-zeros per token")
        rates = figures["ceilings"]
        flops, memory, l2 = (rates[name] / 1e12 for name in ("flops", "memory", "l2"))
        print(f"floors at {flops:.0f} TFLOP/s, {memory:.2f} TB/s of memory and {l2:.2f} TB/s of L2")
        print(figures["machine"])
    if arguments.json:
        machine = "" if figures is None else figures["machine"]
        report.write_json(arguments.json, rows, machine=machine, arguments=arguments, figures=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
