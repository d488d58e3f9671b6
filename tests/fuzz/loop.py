"""The command line of a fuzzer whose cases are frozen dataclasses with a ``seed`` and a ``number``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.ledger import header
from tests.fuzz.run import MOST_MISMATCHES, Watchdog


def fuzz(
    name: str,
    description: str,
    draw: Callable[[int, int, bool], Any],
    attempt: Callable[[Any, torch.device], str],
    argv: Sequence[str] | None = None,
) -> int:
    """Attempt cases until the time is up; the exit status.

    ``draw(seed, number, on_gpu)`` makes a case, ``attempt`` its verdict, "ok" or what is wrong.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=60, help="seconds after which no case begins (%(default)s)")
    parser.add_argument("--cases", type=int, help="most cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ledger", type=Path, help="file that each case is appended to, as a line of JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit-s", type=float, default=120, help="seconds after which a case hangs (%(default)s)")
    parser.add_argument("--replay", metavar="SEED:NUMBER", help="run this one case")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    if arguments.replay:
        case = draw(*map(int, arguments.replay.split(":")), device.type == "cuda")
        print(case, verdict := attempt(case, device), sep="\n")
        return int(verdict != "ok")
    watchdog, found, number, start = Watchdog(arguments.limit_s), 0, 0, time.monotonic()
    with open(arguments.ledger, "a") if arguments.ledger else contextlib.nullcontext() as ledger:
        if ledger is not None:
            print(json.dumps(header(device, vars(arguments))), file=ledger, flush=True)
        while number != arguments.cases and time.monotonic() - start < arguments.budget_s and found < MOST_MISMATCHES:
            case = draw(arguments.seed, number, device.type == "cuda")
            number += 1
            again = f"python -m tests.fuzz.{name} --device {device.type} --replay {case.seed}:{case.number}"
            with watchdog.over(again):
                try:
                    verdict = attempt(case, device)
                except Exception as error:
                    # any exception of a legal call is a mismatch
                    verdict = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            if ledger is not None:
                print(json.dumps(dataclasses.asdict(case) | {"verdict": verdict}), file=ledger, flush=True)
            if verdict != "ok":
                found += 1
                print(f"WRONG {case}\n  {verdict}\n  {again}", flush=True)
    print(f"{number} cases in {time.monotonic() - start:.0f} s, {found} mismatches")
    return int(found > 0)
