"""Random cases against float64 until the time is up: layers, pairs, experts, autoencoders, e4m3, adapters, formats.

    python -m tests.fuzz --budget-s 300 --seed 1 --json fuzz.json
    python -m tests.fuzz --kinds experts given --portable
    python -m tests.fuzz --replay 1:357
    python -m tests.fuzz --replay "layer m=128 n=136 density=1.0 wants=all mains=True"

A case (``twell.testing.case``) is a function of seed, number, kinds, `--few`, the kind of device and its family of
kernels, and of nothing else. Half of the cases are integers whose every sum fp32 holds in any order: each result has
one right answer, float64's, rounded once, and bits must match. The others are real numbers, each held to bounds that
follow from where the strategies promise to round.

A mismatch prints its line, which belongs into tests/cases/pinned.txt once it is understood, and the command that
repeats it. --json adds the run to those of a file, in place of one of its seed: counts of cases, the largest errors as
shares of the bounds, mismatches. Exit status 1 after mismatches, 3 after a hang.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# before CUDA starts: makes cuBLAS deterministic, for cases in which torch fills new memory with NaN
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from tests import family
from tests.cases.drawn import Limits, draw
from tests.cases.judged import Result
from tests.cases.verdicts import attempt
from twell import testing
from twell.choose import rates
from twell.testing.case import KINDS, Case

MOST_MISMATCHES = 10
Record = dict[str, Any]


def header(device: torch.device, arguments: dict[str, Any]) -> Record:
    """The machine, the time and the arguments of a run."""
    options = {name: str(value) for name, value in arguments.items() if value is not None}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"machine": testing.machine_line(device), "date": now, "arguments": options}


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


def counted(seed: int, done: Sequence[tuple[Case, Result]]) -> Record:
    """Counts of a run's cases, the largest errors with the number of the case of each, and the mismatches."""
    worst: dict[str, tuple[float, str]] = {}
    for number, (_, result) in enumerate(done):
        for name, ratio in result.ratios.items():
            name = f"{name}, of what is allowed"
            worst[name] = max(worst.get(name, (0.0, "")), (round(ratio, 4), f"{seed}:{number}"))
    exact = sum(case.exact for case, _ in done)
    return {
        "seed": seed,
        "cases": len(done),
        "case_seconds": round(sum(result.seconds for _, result in done), 3),
        "mismatches": [f"{seed}:{i} {each.verdict}" for i, (_, each) in enumerate(done) if each.verdict != "ok"],
        "counts": {
            "numbers": {"integers": exact, "reals": len(done) - exact},
            "kinds": dict(Counter(case.kind for case, _ in done)),
        },
        "worst": worst,
    }


def total(runs: Sequence[Record]) -> Record:
    """All runs together, and each."""
    counts: dict[str, Counter[str]] = {"numbers": Counter(), "kinds": Counter()}
    worst: dict[str, Any] = {}
    for run in runs:
        for name, own in run["counts"].items():
            counts[name].update(own)
        for name, largest in run["worst"].items():
            worst[name] = max(worst.get(name, (0.0, "")), tuple(largest))
    sums = {name: round(sum(run[name] for run in runs), 3) for name in ("cases", "seconds", "case_seconds")}
    wrong = [each for run in runs for each in run["mismatches"]]
    first = {name: runs[0][name] for name in ("machine", "date")}
    return {**first, "runs": runs, **sums, "mismatches": wrong, "counts": counts, "worst": dict(sorted(worst.items()))}


def add(path: Path, run: Record) -> None:
    """Write the runs of a file, with this one in place of one of its seed."""
    earlier = json.loads(path.read_text())["runs"] if path.exists() else []
    others = [each for each in earlier if each["seed"] != run["seed"]]
    path.write_text(json.dumps(total([*others, run]), indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=60, help="seconds after which no case begins (%(default)s)")
    parser.add_argument("--cases", type=int, help="most cases; default: as many as there is time for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jit", action="store_true", help="hidden sizes as well that no packaged kernel has")
    parser.add_argument("--portable", action="store_true", help=family.HELP)
    parser.add_argument("--few", action="store_true", help="tokens of decoding alone, up to 64")
    parser.add_argument("--limit-s", type=float, default=120, help="seconds after which a case hangs (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="kinds to draw (all)")
    parser.add_argument("--replay", metavar="CASE", help="run this one case, SEED:NUMBER or a line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to which the run is added")
    arguments = parser.parse_args(argv)
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

    watchdog, done, found, start = Watchdog(arguments.limit_s), list[tuple[Case, Result]](), 0, time.monotonic()
    while len(done) != arguments.cases and time.monotonic() - start < arguments.budget_s:
        number = len(done)
        case = draw(arguments.seed, number, limits, kinds)
        again = f"python -m tests.fuzz --replay '{case}'{flags}"
        with watchdog.over(again):
            result = attempt(case, device)
        done.append((case, result))
        if result.verdict != "ok":
            found += 1
            print(f"WRONG {arguments.seed}:{number} {case}\n  {result.verdict}\n  {again}", flush=True)
            if found >= MOST_MISMATCHES or not usable(device):
                print("stopping here", flush=True)
                break
        give_back(device)
    seconds = round(time.monotonic() - start, 3)
    run = {**header(device, vars(arguments)), "seconds": seconds, **counted(arguments.seed, done)}
    if arguments.json is not None:
        add(arguments.json, run)
    for name, (ratio, where) in sorted(run["worst"].items()):
        print(f"  {name:36} {ratio:7.3f}  {where}")
    print(f"{len(done)} cases in {seconds:.0f} s ({len(done) / max(seconds, 1e-9):.1f} a second)")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
