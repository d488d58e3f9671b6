"""The command ``twell bench``: runs the request, prints the table and writes the data."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from twell import testing
from twell.commands.bench import DESCRIPTION, fp8, report, rows
from twell.commands.bench.energy import EnergyMeter, open_meter
from twell.commands.bench.parser import L2_TBS, BenchRequest, add_arguments, request
from twell.commands.bench.protocol import Ceilings, Cpu, Device, Gpu
from twell.commands.bench.report import Progress, Writer
from twell.commands.bench.rows import COLUMNS, LayerRow
from twell.commands.bench.runner import DTYPES, Runner, steps
from twell.commands.request import exit_status

COMMAND = "twell bench"

# Columns of --memory and --energy.
MEMORY, ENERGY = ("kept-MB", "peak-MB"), ("mJ/token", "net", "dense/mJ")


def repro(row: LayerRow, asked: BenchRequest) -> str:
    """The command that repeats a row and its baselines."""
    options = asked.options
    text = next((job.source.text for job in asked.jobs if job.source.name == row.workload), row.workload)
    words: list[object] = ["python", "-m", "twell", "bench", row.op]
    words += ["-m", row.m, "-k", row.k, "-n", row.n, "--workload", text]
    strategy, _, how = (row.requested or ",".join(options.strategies)).partition("+")
    words += ["--strategy", strategy, *([f"--{how}"] if how else [])]
    if "decode" in row.op.split(","):
        words += ["--m-decode", row.tokens if row.op == "decode" else ",".join(map(str, options.decoded))]
    words += ["--dtype", row.dtype, "--compression", row.compression]
    if options.activation.name != "relu":
        words += ["--activation", options.activation.name, "--threshold", options.activation.threshold]
    words += ["--device", asked.device, "--compile", asked.compile, "--seconds", f"{options.seconds:g}"]
    flags = {"--no-check": not options.check, "--memory": options.memory, "--kernels": options.kernels}
    flags |= {"--fp8": asked.fp8, "--energy": asked.energy}
    words += [flag for flag, given in flags.items() if given]
    return shlex.join(map(str, words))


@dataclass
class _Run:
    """The request and its results so far."""

    asked: BenchRequest
    ceilings: Ceilings
    machine: str
    meter: EnergyMeter | None
    found: list[LayerRow]
    writer: Writer
    complete: bool = False

    def write(self, final: bool) -> None:
        """Write the data so far; to stdout only at the end."""
        self.writer.save(final, self._write)

    def _write(self, path: Path) -> None:
        asked = self.asked
        if path == asked.csv:
            report.write_csv(path, self.found)
            return
        more: dict[str, Any] = {
            "ceilings": {
                "tflops": self.ceilings.flops / 1e12,
                "memory_tbs": self.ceilings.memory / 1e12,
                "l2_tbs_assumed": self.ceilings.l2 / 1e12,
            },
            "complete": self.complete,
        }
        if self.meter is not None:
            more |= {"energy_method": self.meter.method, "idle_watts": self.meter.idle}
        report.write_json(path, self.found, machine=self.machine, arguments=asked.arguments(), **more)


@torch.no_grad()
def run(arguments: argparse.Namespace) -> int:
    """Time the request. Return 0, 1 if a row is red, 2 if a file could not be written, 130 for Ctrl-C.

    The rows so far are printed and written, after Ctrl-C, too. Raises RequestError if the request cannot be met.
    """
    asked = request(arguments)
    with ExitStack() as stack:
        device: Device = Cpu()
        if asked.device != "cpu":
            stack.enter_context(torch.cuda.device(torch.device(asked.device)))
            device = Gpu(torch.device("cuda", torch.cuda.current_device()))
        meter = open_meter(device.torch_device) if asked.energy else None
        ceilings, machine = device.ceilings(DTYPES[asked.jobs[0].dtype], L2_TBS)
        this = _Run(asked, ceilings, machine, meter, [], Writer(asked.json, asked.csv, name=COMMAND))
        try:
            _measure(this, device)
        except KeyboardInterrupt:
            print(f"\n{COMMAND}: interrupted", file=sys.stderr)
    if this.found or this.complete:
        this.write(final=True)
    if asked.silent:
        print(machine, file=sys.stderr)
    else:
        _print(this)
    red = sum(bool(row.red) for row in this.found)
    if red:
        print(f"{red} of {len(this.found)} rows are red", file=sys.stderr)
    if this.complete and not this.found:
        print(f"{COMMAND}: nothing to time: these parts of training are for other patterns", file=sys.stderr)
    if not this.complete:
        return 130
    return 2 if this.writer.failure else int(red > 0)


def _measure(this: _Run, device: Device) -> None:
    """Run all jobs; write the data after each group of rows."""
    asked = this.asked
    options = replace(asked.options, compiled=_compiled(asked.compile))
    if asked.fp8:
        options = replace(options, fp8=_through_compile(fp8.output, asked.compile))
    with Progress(sum(len(steps(options, job)) for job in asked.jobs), name=COMMAND) as progress:
        runner = Runner(options, device, this.ceilings, progress, this.meter)
        for job in asked.jobs:
            for group in runner.run(job):
                this.found += group
                this.write(final=False)
    this.complete = True


def _compiled(mode: str) -> Callable[..., torch.Tensor] | None:
    """The dense layer through torch.compile."""
    return None if mode == "none" else _through_compile(testing.dense_output, mode)


def _through_compile(function: Callable[..., torch.Tensor], mode: str) -> Callable[..., torch.Tensor]:
    """``function`` through torch.compile; itself if the mode is "none"."""
    if mode == "none":
        return function
    # each number of tokens and each size of a recorded layer is compiled separately
    torch._dynamo.config.recompile_limit = 256
    compiled: Callable[..., torch.Tensor] = torch.compile(
        function, fullgraph=True, dynamic=False, mode=None if mode == "default" else mode
    )
    return compiled


def _print(this: _Run) -> None:
    """Print the table and the lines below it."""
    asked, found = this.asked, this.found
    kept = [*(MEMORY if asked.options.memory else ()), *(ENERGY if asked.energy else ())]
    columns, dropped = (list(COLUMNS), []) if asked.wide else rows.fitting(found, kept=kept)
    if found:
        report.print_table(columns, found)
    for row in found:
        if row.kernels is not None:
            _print_kernels(row)
    if asked.device == "cpu":
        # a recorded layer has sizes of its own
        ran = {"M": [row.m for row in found], "K": [row.k for row in found], "N": [row.n for row in found]}
        sizes = ", ".join(f"{name} = {', '.join(f'{size:,}' for size in sorted(set(ran[name])))}" for name in ran)
        print(f"{sizes}, on a CPU, whose times mean nothing; -m, -k and -n change the sizes")
    left_out = f"; left out: {', '.join(dropped)} (--wide)" if dropped else ""
    activation = asked.options.activation
    named = f", {activation.name}" if activation.name != "relu" else ""
    named += f" above {activation.threshold:g}" if activation.threshold else ""
    print(f"{asked.jobs[0].dtype}, compression {asked.options.compression}{named}; columns: {COMMAND} --help{left_out}")
    if not asked.options.check:
        print("UNCHECKED: no result was compared with float64 (--no-check)")
    ceilings = this.ceilings
    print(
        f"ceilings: {ceilings.flops / 1e12:.3g} TFLOP/s and {ceilings.memory / 1e12:.3g} TB/s of memory measured now, "
        f"{ceilings.l2 / 1e12:.3g} TB/s of L2 assumed"
    )
    if asked.options.memory and asked.device == "cpu":
        print("memory: not known on a CPU")
    if this.meter is not None:
        idle = "" if this.meter.idle is None else f"; idle {this.meter.idle:.0f} W"
        print(f"energy: of the whole board, by {this.meter.method.replace('_', ' ')}{idle}")
    print(this.machine)
    if asked.repro:
        for row in found:
            print(f"{row.workload}, {_tokens(row)}, {row.variant} {row.requested}".rstrip() + ":")
            print(f"  {repro(row, asked)}")


def _print_kernels(row: LayerRow) -> None:
    """Print the microseconds of each kernel in one call, the longest first."""
    assert row.kernels is not None
    total = sum(row.kernels.values()) * 1e3
    print(f"{row.workload}, {_tokens(row)}, {row.variant} ({rows.named(row)}): {total:.0f} us in a queued call")
    for symbol, ms in sorted(row.kernels.items(), key=lambda item: -item[1]):
        print(f"  {ms * 1e3:8.1f}  {symbol}")


def _tokens(row: LayerRow) -> str:
    return f"{row.tokens} token{'' if row.tokens == 1 else 's'}"


def parser() -> argparse.ArgumentParser:
    """The parser of all operations except for ``model``."""
    top = argparse.ArgumentParser(prog=COMMAND, description=DESCRIPTION)
    add_arguments(top)
    return top


def run_model(argv: Sequence[str]) -> int:
    """Run ``twell bench model``, which has its own arguments."""
    from twell.commands.bench import models

    top = argparse.ArgumentParser(prog=f"{COMMAND} model", description=models.DESCRIPTION)
    models.add_arguments(top)
    return models.run(top.parse_args(argv))


def main(argv: Sequence[str]) -> int:
    """Run ``twell bench``; see ``twell.commands.bench.main``."""
    if list(argv[:1]) == ["model"]:
        return exit_status(f"{COMMAND} model", lambda: run_model(argv[1:]))
    return exit_status(COMMAND, lambda: run(parser().parse_intermixed_args(argv)))
