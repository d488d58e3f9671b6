"""Random cases against float64 until the time is up: layers, pairs, experts, autoencoders, e4m3, adapters, formats.

    python -m tests.fuzz --budget-s 300 --seed 1 --ledger fuzz.jsonl
    python -m tests.fuzz --kinds experts given --portable
    python -m tests.fuzz --replay 1:357
    python -m tests.fuzz --replay "layer m=128 n=136 density=1.0 wants=all mains=True"
    python -m tests.fuzz --summary fuzz.jsonl more.jsonl --json fuzz.json

A case (``twell.testing.case``) is a function of seed, number, kinds, `--few`, the kind of device and its family of
kernels, and of nothing else. Half of the cases are integers whose every sum fp32 holds in any order: each result has
one right answer, float64's, rounded once, and bits must match. The others are real numbers, each held to bounds that
follow from where the strategies promise to round.

A line of the ledger is a case: its line, verdict, seconds, and errors as shares of the bounds. A mismatch prints its
line, which belongs into tests/cases/pinned.txt once it is understood, and the command that repeats it. Exit status 1
after mismatches, 3 after a hang.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# before CUDA starts: makes cuBLAS deterministic, for cases in which torch fills new memory with NaN
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from tests import family
from tests.cases.drawn import Limits, draw
from tests.cases.verdicts import attempt
from tests.fuzz.ledger import Record, header, print_summary, read, record_of, summary
from twell.choose import rates
from twell.testing.case import KINDS, Case

MOST_MISMATCHES = 10


class Watchdog:
    """A watchdog that ends the process if a case exceeds its time limit, for example if a kernel hangs."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.replay = ""
        self.deadline = math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def over(self, replay: str) -> Iterator[None]:
        self.replay, self.deadline = replay, time.monotonic() + self.limit_s
        try:
            yield
        finally:
            self.deadline = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(0.5)
            if time.monotonic() > self.deadline:
                print(f"HANGS for more than {self.limit_s:.0f} s: {self.replay}", flush=True)
                os._exit(3)


def usable(device: torch.device) -> bool:
    """Return whether the device still answers; after a kernel's fault it does not."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def give_back(device: torch.device) -> None:
    """Free torch's cached memory if it is half of the device's."""
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).total_memory // 2
        if torch.cuda.memory_reserved(device) > most:
            torch.cuda.empty_cache()


def prepare(device: torch.device, portable: bool, jit: bool = False) -> Limits:
    """Set what comparisons in this process need, and return the limits of its cases."""
    # a product of integers is exact only where partial sums are not rounded to 16 bits
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    if portable:
        family.run_portable()
    return Limits.of(device.type, jit, family.is_portable(device))


def replayed(text: str, limits: Limits, kinds: tuple[str, ...]) -> Case:
    seed, colon, number = text.partition(":")
    return draw(int(seed), int(number), limits, kinds) if colon and " " not in text else Case.of(text)


def summarize(ledgers: list[Path], out: Path | None) -> int:
    try:
        found = read(ledgers)
    except (OSError, EOFError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print_summary(found)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["mismatches"]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=60, help="seconds after which no case begins (%(default)s)")
    parser.add_argument("--cases", type=int, help="most cases; default: as many as there is time for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ledger", type=Path, help="file that each case is appended to, as a line of JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jit", action="store_true", help="hidden sizes as well that no packaged kernel has")
    parser.add_argument("--portable", action="store_true", help=family.HELP)
    parser.add_argument("--few", action="store_true", help="tokens of decoding alone, up to 64")
    parser.add_argument("--limit-s", type=float, default=120, help="seconds after which a case hangs (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="kinds to draw (all)")
    parser.add_argument("--replay", metavar="CASE", help="run this one case, SEED:NUMBER or a line")
    parser.add_argument("--summary", nargs="+", type=Path, metavar="LEDGER", help="print what these come to, run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --summary: write it as well")
    arguments = parser.parse_args(argv)
    if arguments.json and not arguments.summary:
        parser.error("--json needs --summary")
    if arguments.summary:
        return summarize(arguments.summary, arguments.json)
    for name, value in (
        ("--budget-s", arguments.budget_s),
        ("--cases", arguments.cases),
        ("--limit-s", arguments.limit_s),
    ):
        if value is not None and not value > 0:
            parser.error(f"{name} must be above 0, got {value:g}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device; --device cpu fuzzes the CPU operators")

    device = torch.device(arguments.device)
    # graphs are compared with eager calls, so both choose by the GPU's times alone
    if device.type == "cuda":
        rates.HOST.update({False: {}, True: {}})
    flags = f" --device {device.type}{' --jit' if arguments.jit else ''}{' --portable' if arguments.portable else ''}"
    limits = prepare(device, arguments.portable, arguments.jit)._replace(few=arguments.few)
    kinds = tuple(kind for kind in KINDS if kind in arguments.kinds)
    if arguments.replay:
        try:
            case = replayed(arguments.replay, limits, kinds)
        except (TypeError, ValueError) as error:
            parser.error(f"--replay must be SEED:NUMBER or the line of a case, got {arguments.replay!r}: {error}")
        print(case, flush=True)
        result = attempt(case, device)
        print(f"{result.verdict} ({result.seconds:.2f} s)", *(f"{k} {v:.3f}" for k, v in result.ratios.items()))
        return int(result.verdict != "ok")

    watchdog, records, found, start = Watchdog(arguments.limit_s), list[Record](), 0, time.monotonic()
    with open(arguments.ledger, "a") if arguments.ledger else contextlib.nullcontext() as ledger:

        def note(line: Record) -> None:
            if ledger is not None:
                print(json.dumps(line), file=ledger, flush=True)

        note(header(device, vars(arguments)))
        while len(records) != arguments.cases and time.monotonic() - start < arguments.budget_s:
            number = len(records)
            case = draw(arguments.seed, number, limits, kinds)
            again = f"python -m tests.fuzz --replay '{case}'{flags}"
            with watchdog.over(again):
                result = attempt(case, device)
            records.append(record_of(arguments.seed, number, case, result))
            note(records[-1])
            if result.verdict != "ok":
                found += 1
                print(f"WRONG {arguments.seed}:{number} {case}\n  {result.verdict}\n  {again}", flush=True)
                if found >= MOST_MISMATCHES or not usable(device):
                    print("stopping here", flush=True)
                    break
            give_back(device)
        seconds = round(time.monotonic() - start, 3)
        note({"ended_after": seconds})
    print_summary({"seconds": seconds, **summary(records)})
    return int(found > 0)
