"""One way to measure: a bench has cases, and for each case variants, which take turns; a row is a dictionary.

A variant is a call to time, by a strategy or without one. It is settled ("auto" chooses), checked in memory of NaN
against a right answer, recorded, checked again in its recording, and then timed with all other right variants of the
case in turn, in each of the ``Way``s that are asked for. What is wrong has ``red`` and no time. Rows are in the file
after each case.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import twell
from profiling.device import Device, Gpu
from twell import testing
from twell.base import files
from twell.base.text import aligned
from twell.commands import tune
from twell.commands.request import RequestError, at_least, check_json, number_above, pick_device
from twell.commands.timing import FAILURES, Call, Recording, measure, reason, spread
from twell.testing import Comparison, Errors

Row = dict[str, Any]
# Errors by tensor, and the fault, "" if they are within the budget.
Verdict = tuple[dict[str, Comparison], str]
# Of a strategy, its call and the outputs of the last copy.
Check = Callable[[str, Call, tuple[Tensor, ...]], Verdict]
# A case of a bench: what its rows share, and the work that yields rows, some at a time.
Case = tuple[Row, Callable[[], Iterable[list[Row]]]]
# Of a table of options: a type, the names to choose from, or bool for a flag; the default, a list if there may be
# several; and what it is.
Option = tuple[Any, Any, str]
# Eager calls before "auto" is recorded. It measures calls 0, 1, 2, 4 and decides by them at 1, 2, 4, 8.
SETTLING = 9


class Way(NamedTuple):
    """A way of timing: "graph", or a way of ``device.Eager``.

    field: of the time in a row, ``unit`` times milliseconds. over: of the time of the fastest baseline over it. calls:
    in a row; 0: as many as a variant has copies. share: of the seconds of a case. least, warm: rounds that are timed,
    and before them.
    """

    how: str
    field: str
    over: str = ""
    unit: float = 1.0
    calls: int = 0
    share: float = 1.0
    least: int | None = None
    warm: int | None = None


@dataclass
class Variant:
    """One call to time.

    by: makes the call of a strategy, which works on the i-th copy of the operands and returns its outputs, y first.
    copies: calls of a recording. requested: the strategy; "" if there is no choice. note: puts more into the row.
    fields: of its row. within: a context of all of its calls before timing.
    """

    name: str
    by: Callable[[Any], Call]
    copies: int
    requested: str = ""
    check: Check | None = None
    note: Callable[[Row, "Settled", dict[str, Comparison]], None] | None = None
    fields: Row = field(default_factory=dict)
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    captured: bool = True

    @property
    def key(self) -> str:
        return f"{self.name} {self.requested}".rstrip()

    @property
    def is_dense(self) -> bool:
        return not self.requested and self.name.startswith(("dense", "grouped"))


class Settled:
    """A variant whose strategy is chosen: ``strategy`` in recordings, ``eager`` in eager calls.

    call: what is timed. now: by the strategy of recordings; outside of them "auto" may run another, by its choice or to
    measure.
    """

    def __init__(self, variant: Variant, device: Device, graphs: bool = True) -> None:
        self.variant, self.device = variant, device
        self.strategy = self.eager = variant.requested
        self.outputs: tuple[Tensor, ...] = ()
        self.call = self.now = variant.by(variant.requested)
        if variant.requested == "auto":
            site = twell.AutoStrategy()
            self.call = variant.by(site)
            self.strategy, self.eager = settle(self.call, site, device, graphs)
            self.now = variant.by(self.strategy)

    def checked(self) -> Verdict:
        check, last = self.variant.check, self.variant.copies - 1
        if check is None:
            return {}, ""
        self.device.poison()
        self.outputs = self.now(last)
        compared, red = check(self.strategy, self.now, self.outputs)
        if not red and self.eager != self.strategy:
            other = self.variant.by(self.eager)
            _, red = check(self.eager, other, other(last))
        return compared, red

    def recorded(self) -> tuple[Recording, str]:
        """A recording, and its fault: other bits than before; of libraries, which choose again, a wrong result."""
        recording, check = self.device.record(self.call, self.variant.copies, self.now), self.variant.check
        if check is None:
            return recording, ""
        recording.spoil()
        recording.replay()
        recording.wait()
        if not self.strategy:
            return recording, check("", self.now, recording.outputs)[1]
        same = all(map(torch.equal, self.outputs, recording.outputs))
        return recording, "" if same else "a replayed recording gives other bits"


def settle(call: Call, site: twell.AutoStrategy, device: Device, graphs: bool = True) -> tuple[str, str]:
    """Let "auto" choose for a call; its choices in recordings, if there are ``graphs``, and in eager calls."""
    for i in range(SETTLING):
        call(i)
        device.wait()
    if graphs:
        # free of the host's time, which the choice of eager calls counts
        device.record(call, 1)
    chosen = {choice.graph: choice.strategy for choice in site.explain()}
    # no choice: a device on which "auto" is always dense
    eager = chosen.get("", "dense")
    return chosen.get("captured", eager), eager


def verdict(compared: dict[str, Comparison]) -> Verdict:
    wrong = [f"{name}: {comparison}" for name, comparison in compared.items() if not comparison.ok]
    return compared, "; ".join(wrong)


def near(right: Tensor, dense: Errors, terms: int) -> Check:
    """A check of the last y, of so many hidden states that are not zero; few tokens are allowed more."""
    budgets = testing.BUDGET, testing.BUDGET * testing.allowance(len(right))

    def check(strategy: str, call: Call, outputs: tuple[Tensor, ...]) -> Verdict:
        return verdict({"y": Comparison(testing.errors(outputs[0], right), dense, terms, *budgets)})

    return check


def agrees(right: Call, training: bool) -> Check:
    """A check against a dense call, by the budgets of ``twell tune``."""
    most = tune.MOST_ERROR[training]

    def check(strategy: str, call: Call, outputs: tuple[Tensor, ...]) -> Verdict:
        error = max(map(tune.relative_error, outputs, right(0)))
        return {}, "" if error <= most else f"differs from dense by {error:.1%}"

    return check


def whole(call: Call, parts: int) -> Tensor:
    return torch.cat([call(i)[0] for i in range(parts)])


def ratio(value: float, base: float) -> float:
    """``value`` over ``base``; 1 if both are 0, NaN if either is."""
    return 1.0 if value == base else value / base if base else math.inf * value


def timed(
    base: Row, variants: Iterable[Variant], ways: Sequence[Way], device: Device, seconds: float, profiled: int = 0
) -> list[Row]:
    """The rows of a case; a fault while timing costs all times. ``profiled``: calls for a profiler instead."""
    variants = list(variants)
    blank: Row = {name: None for way in ways for name in (way.field, way.over) if name}
    blank |= {"requested": "", "strategy": "", "eager_strategy": "", "red": ""}

    def fresh(variant: Variant) -> Row:
        named = {"variant": variant.name, "requested": variant.requested}
        return {**base, **blank, **named, **variant.fields}

    rows = {each.key: fresh(each) for each in variants}
    found: dict[str, tuple[Settled, Recording | None]] = {}
    graphs = any(way.how == "graph" for way in ways)
    for variant in variants:
        row = rows[variant.key]
        try:
            with variant.within():
                settled, recording = Settled(variant, device, graphs), None
                errors, row["red"] = settled.checked()
                row |= {"strategy": settled.strategy, "eager_strategy": settled.eager}
                if variant.note is not None:
                    variant.note(row, settled, errors)
                if graphs and variant.captured and not row["red"]:
                    recording, row["red"] = settled.recorded()
            if not row["red"]:
                found[variant.key] = settled, recording
        except Exception as error:
            # those of compilers are of many kinds
            row["red"] = reason(error)
    dense = [each.key for each in variants if each.is_dense and each.key in found]
    if profiled:
        profile({key: settled.call for key, (settled, _) in found.items()}, profiled, device)
        return list(rows.values())
    try:
        for way in ways:
            recordings = {
                key: (recording if way.how == "graph" else None)
                or device.eager(way.how, settled.call, way.calls or settled.variant.copies)
                for key, (settled, recording) in found.items()
                if recording is not None or way.how != "graph"
            }
            times = measure(recordings, seconds * way.share, way.least, way.warm)
            for key, samples in times.items():
                fill(rows[key], way, samples, {each: times[each] for each in dense if each in times})
    except FAILURES as error:
        # the culprit is unknown: none has a time
        return [rows[each.key] if rows[each.key]["red"] else fresh(each) | {"red": reason(error)} for each in variants]
    return list(rows.values())


def profile(calls: Mapping[str, Call], times: int, device: Device) -> None:
    """Make each call ``times`` times in a range of its name, within one section of the profiler."""
    on_gpu = device.torch_device.type == "cuda"
    device.wait()
    with torch.cuda.profiler.profile() if on_gpu else nullcontext():
        for name, call in calls.items():
            with torch.cuda.nvtx.range(f"profile {name}") if on_gpu else nullcontext():
                for i in range(times):
                    call(i)
        device.wait()


def fill(row: Row, way: Way, samples: Sequence[float], dense: Mapping[str, Sequence[float]]) -> None:
    """Put the median into a row, of the first way with its spread, and that of its ratios to the baseline."""
    median, _, p10, p90 = spread(samples)
    row[way.field] = median * way.unit
    if "samples" not in row:
        row |= {"samples": len(samples), f"p10_{way.field}": p10 * way.unit, f"p90_{way.field}": p90 * way.unit}
    if way.over and dense and all(samples):
        # of each turn, since hosts wander
        faster = min(dense, key=lambda key: statistics.median(dense[key]))
        row[way.over] = statistics.median(other / own for own, other in zip(samples, dense[faster]))
        if way.how == "graph":
            row["faster_dense"] = faster


def beside(base: Row, rows: Sequence[Row], *fields: str) -> Row:
    """The rows of a case as one: each of ``fields`` is a dictionary by variant."""
    return {**base, **{name: {row["variant"]: row.get(name) for row in rows} for name in fields}, "red": reds(rows)}


def reds(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row['variant']}: {row['red']}" for row in rows if row["red"])


def show(rows: Sequence[Row], fields: Sequence[str]) -> None:
    """Print rows as a table of those ``fields`` that any has; a fault runs on to the right."""
    used = [name for name in fields if any(row.get(name) not in (None, "") for row in rows)]
    lines = aligned([used, *([cell(row.get(name)) for name in used] for row in rows)])
    faults = ["", *(f"  RED {row['red']}" if row.get("red") else "" for row in rows)]
    for line, fault in zip(lines, faults, strict=True):
        print(line + fault)


def cell(value: Any) -> str:
    """A value of a row as text: numbers with three digits, the parts of a dictionary one after another."""
    if value is None or value != value:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(each)}" for name, each in value.items())
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write_json(path: Path, rows: Sequence[Any], **facts: Any) -> None:
    """Write the facts with the date, and ``rows``, one a line, whole or not at all; infinity and NaN become null."""
    facts = {"machine": facts.pop("machine"), "date": tune.now(), **facts}
    lines = ",\n".join(json.dumps(_finite(row), allow_nan=False) for row in rows)
    text = json.dumps(_finite(facts), indent=1, allow_nan=False).removesuffix("\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, f'{text},\n "rows": [\n{lines}\n]}}\n')


def _finite(value: Any) -> Any:
    """``value`` with None for the numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def written(default: Any) -> str:
    """A default as one writes it on a command line."""
    return " ".join(map(written, default)) if isinstance(default, list) else str(default)


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, Option], seconds: float) -> None:
    """Add the options of a bench by their table, and those that every bench has."""
    add = parser.add_argument
    for flag, (kind, default, said) in options.items():
        how: dict[str, Any] = {"default": default, "help": f"{said} ({written(default)})" if default else said}
        if isinstance(default, list):
            how["nargs"] = "+"
        if kind is bool:
            add(*flag.split(), action="store_true", help=said)
        elif callable(kind):
            add(*flag.split(), type=kind, metavar=flag.split()[-1].strip("-")[0].upper(), **how)
        else:
            add(*flag.split(), choices=kind, **how)
    add("--seconds", type=number_above(0), default=seconds, metavar="S", help="of turns of a case (%(default)g)")
    add("--device", help="cuda, cuda:INDEX, or cpu, whose times mean nothing (default: cuda)")
    add("--out", "--json", dest="out", type=Path, metavar="FILE", help="file for the rows")
    profiled = "time nothing: run each call so often for a profiler, in its range (profiling/nsight)"
    add("--profile", type=at_least(1), default=0, metavar="N", help=profiled)


class Bench:
    """A run: the device, the rows, in their file after each case, and ``facts``, more of what the file holds."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        check_json("--out", arguments.out)
        self.name, self.facts, self.arguments = name, dict[str, Any](), arguments
        self.given = {key: value for key, value in vars(arguments).items() if key != "out"}
        self.rows: list[Row] = []
        self.complete = self.failed = False
        # of torchrun each process has a GPU, and the first one speaks
        local, rank = os.environ.get("LOCAL_RANK"), int(os.environ.get("RANK", 0))
        where = pick_device(arguments.device or ("cuda" if local is None else f"cuda:{local}"))
        self.speaks = rank == 0
        self.out: Path | None = arguments.out if self.speaks else None
        self.device: Device = Device()
        if where.type == "cuda":
            torch.cuda.set_device(where.index or 0)
            self.device = Gpu(torch.device("cuda", where.index or 0))
        # the machine line is read while the GPU is busy
        self.ceilings, self.machine = self.device.ceilings(torch.bfloat16)

    def step(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def add(self, rows: Sequence[Row]) -> None:
        self.rows += rows
        if self.out is None:
            return
        rates = {"tflops": self.ceilings.flops / 1e12, "memory_tbs": self.ceilings.memory / 1e12}
        facts = {"machine": self.machine, "arguments": self.given, "ceilings": rates, **self.facts}
        try:
            write_json(self.out, self.rows, **facts, complete=self.complete)
            self.failed = False
        except OSError as error:
            # which costs no measurement
            if not self.failed:
                self.step(f"error: {self.out} cannot be written: {error}")
            self.failed = True

    def timed(self, base: Row, variants: Iterable[Variant], ways: Sequence[Way], share: float = 1.0) -> list[Row]:
        return timed(base, variants, ways, self.device, self.arguments.seconds * share, self.arguments.profile)

    @torch.no_grad()
    def run(self, cases: Iterator[Case], shown: Sequence[str]) -> int:
        """Measure the cases, print the rows and return 0, 1 if a row is red, 2 without a file, 130 after Ctrl-C."""
        try:
            for base, work in cases:
                self.step(", ".join(f"{name} {cell(value)}" for name, value in base.items()))
                try:
                    for rows in work():
                        self.add(rows)
                except RequestError:
                    raise
                except FAILURES as error:
                    # out of memory, or the late fault of an earlier kernel
                    self.add([{**base, "red": reason(error)}])
            self.complete = True
        except KeyboardInterrupt:
            self.step("interrupted")
        if self.rows or self.complete:
            self.add([])
        if self.speaks:
            show(self.rows, shown)
            print(self.machine)
        red = sum(bool(row.get("red")) for row in self.rows)
        if red:
            print(f"{red} of {len(self.rows)} rows are red", file=sys.stderr)
        return 130 if not self.complete else 2 if self.failed else int(red > 0)
