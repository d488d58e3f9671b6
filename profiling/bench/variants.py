"""Variants of a bench: each is settled and checked, the right ones are recorded and then timed in turn."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import twell
from profiling.bench import report
from profiling.bench.protocol import Ceilings, Device, Gpu
from twell import testing
from twell.commands import timing
from twell.commands.request import number_above, pick_device
from twell.commands.timing import Call, Recording
from twell.testing import Comparison

# Eager calls before "auto" is recorded. It measures calls 0, 1, 2, 4 and decides by them at 1, 2, 4, 8.
SETTLING = 9

# Errors by tensor, and the fault, "" if they are within the budget.
Verdict = tuple[dict[str, Comparison], str]


def verdict(compared: dict[str, Comparison]) -> Verdict:
    """The errors, and those that are beyond their budgets."""
    wrong = [f"{name}: {comparison}" for name, comparison in compared.items() if not comparison.ok]
    return compared, "; ".join(wrong)


def settle(call: Call, site: twell.AutoStrategy, device: Device) -> tuple[str, str]:
    """Let "auto" choose for a call; its choices in recordings and in eager calls."""
    for i in range(SETTLING):
        call(i)
        device.wait()
    # graphs are free of the host's time, which the choice of eager calls counts
    device.record(call, 1)
    chosen = {choice.graph: choice.strategy for choice in site.explain()}
    # no choice: a device on which "auto" is always dense
    eager = chosen.get("", "dense")
    return chosen.get("captured", eager), eager


@dataclass
class Variant:
    """One call to time.

    by: makes the call of a strategy, which works on the i-th copy of the operands and returns its outputs, y first.
    copies: calls of a recording. requested: the strategy; "" if there is no choice. check: of a strategy, its call and
    the outputs of the last copy.
    """

    name: str
    by: Callable[[Any], Call]
    copies: int
    requested: str = ""
    check: Callable[[str, Call, tuple[Tensor, ...]], Verdict] | None = None

    @property
    def key(self) -> str:
        return f"{self.name} {self.requested}".rstrip()


class Settled:
    """A variant whose strategy is chosen: ``strategy`` in recordings, ``eager`` in eager calls.

    call: what is timed. now: by the strategy of recordings; outside of them "auto" may run another, by its choice or to
    measure.
    """

    def __init__(self, variant: Variant, device: Device) -> None:
        self.variant, self.device = variant, device
        self.strategy = self.eager = variant.requested
        self.outputs: tuple[Tensor, ...] = ()
        if variant.requested == "auto":
            site = twell.AutoStrategy()
            self.call = variant.by(site)
            self.strategy, self.eager = settle(self.call, site, device)
            self.now = variant.by(self.strategy)
        else:
            self.call = self.now = variant.by(variant.requested)

    def checked(self) -> Verdict:
        """Check the call in memory of NaN, and what eager calls run in its place."""
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
        """A recording, and its fault: a replay must give the bits of the call that was checked.

        Libraries may choose other kernels in a graph: what PyTorch makes alone is checked again instead.
        """
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


def whole(call: Call, parts: int) -> Tensor:
    """y of the tokens of the first calls."""
    return torch.cat([call(i)[0] for i in range(parts)])


def compared(y: Tensor, right: Tensor, bar: testing.Errors, roundings: float) -> dict[str, Comparison]:
    """The errors of y beside ``bar``, those of dense PyTorch."""
    return {"y": Comparison(testing.errors(y, right), bar, roundings)}


class Ready(NamedTuple):
    """A variant whose results are right."""

    variant: Any
    settled: Settled
    recording: Recording


def ready(
    variants: Sequence[Variant],
    rows: Mapping[str, Any],
    device: Device,
    note: Callable[[Any, Any, Settled, dict[str, Comparison]], None],
) -> dict[str, Ready]:
    """Check and record each variant; the right ones by their keys, faults in the rows.

    ``note(row, variant, settled, errors)`` puts figures into a row before the recording.
    """
    found = {}
    for variant in variants:
        row = rows[variant.key]
        try:
            settled = Settled(variant, device)
            errors, row.red = settled.checked()
            note(row, variant, settled, errors)
            if not row.red:
                recording, row.red = settled.recorded()
            if not row.red:
                found[variant.key] = Ready(variant, settled, recording)
        except Exception as error:
            # those of compilers are of many kinds
            row.red = timing.reason(error)
    return found


def fill(
    rows: Mapping[str, Any], times: Mapping[str, list[float]], baseline: str, field: str, over: str, unit: float = 1.0
) -> None:
    """Put medians of milliseconds by ``unit`` into a field, and into another the time of the fastest baseline over it.

    Keys of baselines begin with ``baseline``.
    """
    medians = {key: timing.spread(samples).median * unit for key, samples in times.items()}
    fastest = min((time for key, time in medians.items() if key.startswith(baseline)), default=math.nan)
    for key, time in medians.items():
        setattr(rows[key], field, time)
        setattr(rows[key], over, fastest / time)


# Commands


def add_arguments(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Add the arguments of how it is measured."""
    add = parser.add_argument
    add("--seconds", type=number_above(0), default=seconds, metavar="S", help="of timing in turns (%(default)g)")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if available")
    add("--json", "--out", dest="json", type=Path, metavar="FILE", help="write the rows to a file")


class Session(report.Run):
    """A run on the device that is asked for, with its rows in a table at the end."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        super().__init__(name, arguments.json, self.facts)
        report.require_writable(arguments.json)
        self.arguments, self.progress = arguments, report.Progress(name)
        on = pick_device(arguments.device)
        self.device: Device = Gpu(on) if on.type == "cuda" else Device()
        self.ceilings: Ceilings
        self.ceilings, self.machine = self.device.ceilings(torch.bfloat16, 0.0)

    def facts(self) -> dict[str, Any]:
        """What the file holds besides rows."""
        rates = {"copy_tbs": self.ceilings.memory / 1e12, "tflops": self.ceilings.flops / 1e12}
        return {"machine": self.machine, "arguments": self.arguments, **rates}

    @torch.no_grad()
    def run(self, work: Callable[[], None], columns: Sequence[report.Column]) -> int:
        """Do the work and print; the exit status."""
        self.measure(work)
        report.print_table(columns, self.rows)
        print(self.machine)
        return self.status()
