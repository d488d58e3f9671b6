"""Random cases against float64 until the time is up: layers, pairs, experts, autoencoders, e4m3, adapters, formats.

    python -m tests.fuzz --budget-s 300 --seed 1 --json fuzz.json
    python -m tests.fuzz --kinds experts given --portable
    python -m tests.fuzz --threads 4 --budget-s 540
    python -m tests.fuzz --device emulator
    python -m tests.fuzz --replay 1:357
    python -m tests.fuzz --replay "layer m=128 n=136 density=1.0 wants=all mains=True"

A case (``twell.testing.case``) is a function of seed, number, kinds, `--few`, the kind of device and its family of
kernels, and of nothing else. Half of the cases are integers whose every sum fp32 holds in any order: each result has
one right answer, float64's, rounded once, and bits must match. The others are real numbers, each held to bounds that
follow from where the strategies promise to round.

With several threads, each with a stream of its own, a round gives each a case, which it calls --calls + 1 times beside
the others: all have the bits of the first, which is checked. Nothing is captured, and no setting of the whole process
changes. Between rounds, when nothing runs, memory may not have grown by more than GROWTH_MB since it settled.

A mismatch prints its line, which belongs into tests/cases/pinned.txt once it is understood, and the command that
repeats it. --json adds the run to those of a file, in place of one of its seed: counts of cases, the largest errors as
shares of the bounds, mismatches. Exit status 1 after mismatches or where memory grows, 3 after a hang.
"""

import argparse
import atexit
import contextlib
import ctypes
import gc
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

# before CUDA starts: makes cuBLAS deterministic, for cases in which torch fills new memory with NaN
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from tests import family
from tests.cases.drawn import Limits, draw
from tests.cases.judged import Result
from tests.cases.layouts import laid_out
from tests.cases.verdicts import attempt, chooses_anew, judge, same_bits, spoil, tensors
from twell import testing
from twell.choose import rates
from twell.commands.request import RequestError, check_json
from twell.testing.calls import caller
from twell.testing.case import KINDS, Case
from twell.testing.operands import build

MOST_MISMATCHES = 10
# rounds of threads before memory counts, and what it may gain then
SETTLED = 8
GROWTH_MB = {"GPU": 256, "host": 2048}
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


class Own(threading.local):
    """The stream of a thread, always the same: cuBLAS keeps memory for each pair of them."""

    stream: Any = None

    def begin(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None


OWN = Own()


def repeat(case: Case, device: torch.device, result: Result, calls: int) -> None:
    """Call a case on this thread's stream, and so many times more; a measuring "auto" may change its choice."""
    with torch.cuda.stream(OWN.stream):
        o = build(case, device)
        operands = laid_out(case, o)
        call, keep = caller(case, operands), tensors(o) + tensors(operands)
        with torch.autocast(device.type, case.torch_dtype, enabled=case.autocast):
            outputs = {name: t.clone() for name, t in call().items()}
            for i in range(calls):
                again = call()
                if chooses_anew(case):
                    outputs = {name: t.clone() for name, t in again.items()}
                else:
                    same_bits(again, outputs, f"call {i + 2}")
                spoil(again, keep)
                del again
        judge(case, o, operands, outputs, result)
        if OWN.stream is not None:
            OWN.stream.synchronize()


def megabytes(device: torch.device) -> dict[str, float]:
    """Memory of torch on the GPU, and of the process without what its allocator keeps for later."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    on_gpu = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return {"GPU": on_gpu / 1e6, "host": pages * os.sysconf("SC_PAGE_SIZE") / 1e6}


class Memory:
    """Memory between rounds, in MB: when it had settled, and the most since then."""

    def __init__(self) -> None:
        self.rounds = 0
        self.settled: dict[str, float] = {}
        self.most: dict[str, float] = {}

    def grown(self, device: torch.device) -> list[str]:
        """Count a round; what grew by too much."""
        gc.collect()
        self.rounds, now = self.rounds + 1, megabytes(device)
        if self.rounds <= SETTLED:
            self.settled, self.most = now, now
        self.most = {name: max(self.most[name], now[name]) for name in now}
        return [
            f"memory of the {name} grew from {self.settled[name]:.0f} to {now[name]:.0f} MB in {self.rounds} rounds"
            for name, most in GROWTH_MB.items()
            if now[name] > self.settled[name] + most
        ]


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
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "emulator"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--jit", action="store_true", help="hidden sizes as well that no packaged kernel has")
    parser.add_argument("--portable", action="store_true", help=family.HELP)
    parser.add_argument("--few", action="store_true", help="tokens of decoding alone, up to 64")
    parser.add_argument("--threads", type=int, default=1, help="threads, each with a stream (%(default)s)")
    parser.add_argument("--calls", type=int, default=30, help="further calls of a case of a thread (%(default)s)")
    parser.add_argument("--limit-s", type=float, default=120, help="seconds after which a case hangs (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="kinds to draw (all)")
    parser.add_argument("--replay", metavar="CASE", help="run this one case, SEED:NUMBER or a line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to which the run is added")
    arguments = parser.parse_args(argv)
    for name, value in (
        ("--budget-s", arguments.budget_s),
        ("--cases", arguments.cases),
        ("--limit-s", arguments.limit_s),
        ("--threads", arguments.threads),
    ):
        if value is not None and not value > 0:
            parser.error(f"{name} must be above 0, got {value:g}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device; --device cpu fuzzes the CPU operators")

    try:
        check_json("--json", arguments.json)
    except RequestError as error:
        parser.error(str(error))
    device = torch.device(arguments.device.replace("emulator", "cpu"))
    # graphs are compared with eager calls, so both choose by the GPU's times alone
    if device.type == "cuda":
        rates.HOST.update({False: {}, True: {}})
    flags = (
        f" --device {arguments.device}{' --jit' if arguments.jit else ''}{' --portable' if arguments.portable else ''}"
    )
    limits = prepare(device, arguments.portable, arguments.jit)._replace(few=arguments.few)
    kinds, threads = tuple(kind for kind in KINDS if kind in arguments.kinds), arguments.threads
    limits = limits if threads == 1 else limits._replace(graphs=False)
    run_case, drawn = attempt, partial(draw, arguments.seed, limits=limits, kinds=kinds)
    if arguments.device == "emulator":
        from tests.emulator import cases, launch

        if reason := launch.missing():
            parser.error(f"--device emulator: {reason}")
        torch.set_num_threads(1)
        folder = tempfile.TemporaryDirectory()
        emulator = launch.Emulator(Path(folder.name))
        atexit.register(emulator.close)
        run_case, drawn = partial(attempt, run=partial(cases.fuzzed, emulator)), partial(cases.draw, arguments.seed)
    elif threads > 1:
        run_case = partial(attempt, run=partial(repeat, calls=arguments.calls))
    if arguments.replay:
        try:
            case = replayed(arguments.replay, limits, kinds)
        except (TypeError, ValueError) as error:
            parser.error(f"--replay must be SEED:NUMBER or the line of a case, got {arguments.replay!r}: {error}")
        print(case, flush=True)
        result = run_case(case, device)
        print(f"{result.verdict} ({result.seconds:.2f} s)", *(f"{k} {v:.3f}" for k, v in result.ratios.items()))
        return int(result.verdict != "ok")

    # the emulator's kernels are compiled first
    watchdog = Watchdog(arguments.limit_s * (10 if arguments.device == "emulator" else 1))
    done, found, start = list[tuple[Case, Result]](), 0, time.monotonic()
    memory = Memory()
    with ThreadPoolExecutor(threads, initializer=OWN.begin, initargs=(device,)) as pool:
        while len(done) < (arguments.cases or math.inf) and time.monotonic() - start < arguments.budget_s:
            taken = [drawn(len(done) + i) for i in range(threads)]
            again = [f"python -m tests.fuzz --replay '{case}'{flags}" for case in taken]
            with watchdog.over("; ".join(again)):
                # alone in the main thread, whose settings cases may change
                results = (
                    [run_case(taken[0], device)] if threads == 1 else [*pool.map(run_case, taken, [device] * threads)]
                )
            for case, result, command in zip(taken, results, again):
                if result.verdict != "ok":
                    found += 1
                    number = len(done)
                    print(f"WRONG {arguments.seed}:{number} {case}\n  {result.verdict}\n  {command}", flush=True)
                done.append((case, result))
            grown = memory.grown(device) if threads > 1 else []
            for said in grown:
                print(f"WRONG {said}", flush=True)
            found += len(grown)
            if found >= MOST_MISMATCHES or grown or (found and not usable(device)):
                print("stopping here", flush=True)
                break
            give_back(device)
    seconds = round(time.monotonic() - start, 3)
    run = {**header(device, vars(arguments)), "seconds": seconds, **counted(arguments.seed, done)}
    if threads > 1:
        run["memory_mb"] = {"settled": memory.settled, "most": memory.most}
    if arguments.json is not None:
        add(arguments.json, run)
    for name, (ratio, where) in sorted(run["worst"].items()):
        print(f"  {name:36} {ratio:7.3f}  {where}")
    print(f"{len(done)} cases in {seconds:.0f} s ({len(done) / max(seconds, 1e-9):.1f} a second)")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
