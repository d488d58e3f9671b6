"""A case of ``twell.testing`` on the emulator: public functions launch compiled kernels with CPU tensors."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases.judged import Result
from tests.cases.layouts import laid_out, surroundings
from tests.cases.verdicts import judge
from tests.cpu import fake_gpu
from tests.emulator.launch import Emulator, Schedule
from twell.runtime import device, geometry, resolve, specs
from twell.testing.calls import caller
from twell.testing.case import Case
from twell.testing.operands import build

CPU = torch.device("cpu")


def read(section: str) -> list[Any]:
    """The lines of a section of ``cases.txt``. Those whose reason is "nightly" have the mark."""
    text = Path(__file__).with_suffix(".txt").read_text()
    (found,) = re.findall(rf"(?m)^\[{section}\].*\n((?:[^\[].*\n)+)", text)
    lines = [line for line in found.splitlines() if line[0] != "#"]
    return [pytest.param(line, marks=pytest.mark.nightly) if "# nightly" in line else line for line in lines]


def numbered(line: str) -> tuple[int, str]:
    """The number in front of a case, and the case."""
    number, _, case = line.partition(" ")
    return int(number), case


def draw(seed: int, number: int) -> Case:
    generator = random.Random(f"{seed}:{number}")
    m, k, n = generator.randint(1, 300), 8 * generator.randint(2, 20), 8 * generator.randint(2, 70)
    density, biases = generator.choice((0.01, 0.05, 0.3, 1.0)), generator.choice(("up", "down", "gate+up+down"))
    how = generator.choice(("row", "union", "union+screen", "union wants=all"))
    line = f"layer m={m} k={k} n={n} biases={biases} density={density} strategy={how}"
    return Case.of(f"{line} seed={generator.randrange(1 << 30)}")


def fuzzed(emulator: Emulator, case: Case, device: torch.device, result: Result) -> None:
    """A drawn case by a schedule and on a number of multiprocessors that hang on its seed."""
    with emulator.stands_in(2 * (1 + case.seed % 4), Schedule.of(case.seed)):
        run(emulator, str(case), result)


def run(emulator: Emulator, line: str, result: Result | None = None) -> list[int]:
    """Check a case inside ``emulator.stands_in``; raises AssertionError or ``EmulatorError``.

    Over-full passes take 256 tokens at a time. Returns how many clusters computed in each of their launches.
    """
    case, teams, multiprocessors, clusters = Case.of(line), [], device.sm_count, device.clusters
    operands = build(case, CPU)
    laid = laid_out(case, operands)
    call = caller(case, laid)

    def kernel(spec: specs.Spec, arch: str) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            emulator.kernel(spec)(*arguments)
            if isinstance(spec, specs.OverflowSpec):
                # of its counters
                teams.append(int(arguments[-4][1]))

        return launch

    with pytest.MonkeyPatch.context() as patch, fake_gpu.dispatched():
        fake_gpu.install(patch)
        patch.setattr(device, "sm_count", multiprocessors)
        patch.setattr(device, "clusters", clusters)
        patch.setattr(resolve, "resolve", kernel)
        for name in ("OVERFLOW_FORWARD", "OVERFLOW_BACKWARD"):
            patch.setattr(geometry, name, 256)
        with surroundings(case, CPU):
            found = call()
    judge(case, operands, laid, found, result or Result())
    return teams
