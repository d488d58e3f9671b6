"""Random layers in several threads, each with a stream of its own, for minutes: results, bits and memory are watched.

    python -m tests.soak --minutes 9 --json soak.json
    python -m tests.soak --minutes 9 --first 5120          # goes on behind the first 5,120 cases

Cases are those of ``tests.fuzz`` with this seed, from number --first on: kinds, sizes, patterns, strategies,
activations, dtypes, inference and training. In each round every thread takes one: it calls it --calls + 1 times, beside
the other threads, compares all bits with those of the first call, and checks that against float64. A measuring "auto"
may change its choice, so its last result alone is checked. Nothing is captured or exported, and no setting of the whole
process changes.

Between rounds nothing runs, and the memory of torch on the GPU and of the process is read. It may not exceed what it
was after the first --settle rounds by more than --grow-mb, or by --grow-host-mb on the host. Exit status: 1 for a wrong
result, an error, or memory that grows; 3 if a round hangs.
"""

import argparse
import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tests import family
from tests.cases.drawn import draw
from tests.cases.judged import Result
from tests.cases.verdicts import judge, same_bits, spoil, tensors
from tests.fuzz import Watchdog, give_back, header, prepare, usable
from twell.testing.calls import caller
from twell.testing.case import Case
from twell.testing.operands import build, laid_out

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Soak:
    """What happened so far. ``gpu_mb``, ``host_mb``: memory after the settling rounds, now, and the most between."""

    rounds: int = 0
    cases: int = 0
    calls: int = 0
    next: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    gpu_mb: dict[str, float] = field(default_factory=dict)
    host_mb: dict[str, float] = field(default_factory=dict)

    def watch(self, device: torch.device, settled: bool, grow_mb: float, grow_host_mb: float) -> None:
        gc.collect()
        for name, seen, now, most in (
            ("GPU", self.gpu_mb, gpu_bytes(device) / 1e6, grow_mb),
            ("host", self.host_mb, host_bytes() / 1e6, grow_host_mb),
        ):
            seen["now"] = round(now, 1)
            if not settled or "settled" not in seen:
                seen["settled"] = seen["now"]
            seen["most"] = max(seen.get("most", 0.0), seen["now"])
            if now > seen["settled"] + most:
                self.wrong.append(
                    f"memory of the {name} grew from {seen['settled']:.0f} to {now:.0f} MB in {self.rounds} rounds, "
                    f"by more than {most:.0f} MB"
                )


def gpu_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def host_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Own(threading.local):
    """The stream of a thread, always the same: cuBLAS keeps memory for each pair of them."""

    stream: Any = None

    def begin(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None


OWN = Own()


def soak(case: Case, device: torch.device, calls: int) -> str:
    """Repeat a case on this thread's stream and check it; return what is wrong, or ""."""
    try:
        with torch.cuda.stream(OWN.stream):
            repeat(case, device, calls)
            if OWN.stream is not None:
                OWN.stream.synchronize()
    except Exception as error:
        # any exception of a legal call is a fault
        return f"{case}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return ""


def repeat(case: Case, device: torch.device, calls: int) -> None:
    o = build(case, device)
    operands = laid_out(case, o)
    call, keep = caller(case, operands), tensors(o) + tensors(operands)
    with torch.autocast(device.type, case.torch_dtype, enabled=case.autocast):
        outputs = {name: t.clone() for name, t in call().items()}
        for i in range(calls):
            again = call()
            if case.strategy == "site":
                outputs = {name: t.clone() for name, t in again.items()}
            else:
                same_bits(again, outputs, f"call {i + 2}")
            spoil(again, keep)
            del again
    judge(case, o, operands, outputs, Result())


def run(arguments: argparse.Namespace, device: torch.device) -> Soak:
    found, began, last = Soak(next=arguments.first), time.monotonic(), 0.0
    limits = prepare(device, arguments.portable)._replace(graphs=False)
    drawn = ((number, draw(arguments.seed, number, limits)) for number in count(arguments.first))
    watchdog = Watchdog(arguments.limit_s)
    with ThreadPoolExecutor(arguments.threads, initializer=OWN.begin, initargs=(device,)) as pool:
        while time.monotonic() - began + last < 60 * arguments.minutes and not found.wrong:
            start = time.monotonic()
            numbers, taken = zip(*(next(drawn) for _ in range(arguments.threads)))
            with watchdog.over("; ".join(map(str, taken))):
                works = [pool.submit(soak, case, device, arguments.calls) for case in taken]
                found.wrong += [said for work in works if (said := work.result())]
            found.rounds += 1
            found.cases += len(taken)
            found.calls += len(taken) * (arguments.calls + 1)
            found.next = numbers[-1] + 1
            found.kinds.update(f"{case.kind} {case.strategy}" for case in taken)
            found.kinds.update(f"activation {case.activation}" for case in taken)
            if found.wrong and not usable(device):
                break
            give_back(device)
            settled = found.rounds > arguments.settle
            found.watch(device, settled, arguments.grow_mb, arguments.grow_host_mb)
            last = time.monotonic() - start
    found.seconds = round(time.monotonic() - began, 1)
    return found


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--minutes", type=float, default=9, help="minutes after which no round begins (%(default)s)")
    top.add_argument("--seed", type=int, default=1)
    top.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case (%(default)s)")
    top.add_argument("--threads", type=int, default=4, help="threads, each with a stream (%(default)s)")
    top.add_argument("--calls", type=int, default=30, help="further calls of each case (%(default)s)")
    top.add_argument("--settle", type=int, default=8, metavar="N", help="rounds before memory counts (%(default)s)")
    top.add_argument("--grow-mb", type=float, default=256, metavar="MB", help="that the GPU may gain (%(default)s)")
    top.add_argument("--grow-host-mb", type=float, default=2048, metavar="MB", help="the host (%(default)s)")
    top.add_argument("--limit-s", type=float, default=120, help="seconds after which a round hangs (%(default)s)")
    top.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    top.add_argument("--portable", action="store_true", help=family.HELP)
    top.add_argument("--json", type=Path, metavar="FILE", help="write what happened")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    for name in ("minutes", "threads", "calls", "limit_s"):
        if not getattr(arguments, name) > 0:
            parser().error(f"--{name.replace('_', '-')} must be above 0, got {getattr(arguments, name):g}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser().error("--device cuda needs a CUDA device")
    device = torch.device(arguments.device)
    found = run(arguments, device)
    print(line(found), flush=True)
    print(f"goes on with --seed {arguments.seed} --first {found.next}", flush=True)
    for said in found.wrong:
        print(f"WRONG {said}", file=sys.stderr, flush=True)
    if arguments.json is not None:
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        content = {**header(device, options), **vars(found)}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(found.wrong))


def line(found: Soak) -> str:
    memory = "; ".join(
        f"{name} memory {seen.get('settled', 0):.0f} MB settled, {seen.get('most', 0):.0f} at most"
        for name, seen in (("GPU", found.gpu_mb), ("host", found.host_mb))
    )
    return (
        f"{found.calls:,} calls of {found.cases:,} cases in {found.rounds:,} rounds, {found.seconds:.0f} s; {memory}; "
        f"wrong: {len(found.wrong)}"
    )


if __name__ == "__main__":
    sys.exit(main())
