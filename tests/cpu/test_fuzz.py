"""The fuzzer, alone and in threads, and the sanitizer's driver: what they print and record, what they find."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import fuzz, sanitize
from tests.cpu import fake_gpu
from twell.runtime import kernel_module, program

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


# Results


def run(*arguments: str) -> int:
    return fuzz.main(["--device", "cpu", "--budget-s", "120", *arguments])


def test_runs_add_up_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "all.json"
    assert run("--cases", "40", "--seed", "3", "--json", str(out)) == 0
    assert "40 cases in" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert "CPU" in found["machine"]
    assert (found["cases"], found["mismatches"], sum(found["counts"]["numbers"].values())) == (40, [], 40)
    assert 0 < max(ratio for ratio, _ in found["worst"].values()) <= 1
    # one more, and one again
    for seed, cases in (("4", "2"), ("3", "5")):
        assert run("--cases", cases, "--seed", seed, "--json", str(out)) == 0
    found = json.loads(out.read_text())
    assert [(each["seed"], each["cases"]) for each in found["runs"]] == [(4, 2), (3, 5)]
    assert (found["cases"], sum(found["counts"]["kinds"].values())) == (7, 7)
    assert found["seconds"] >= found["case_seconds"] > 0


def test_a_mismatch_is_printed_with_what_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ffn = sys.modules["twell.ops.ffn"]
    gate_on_cpu = ffn.gate_on_cpu

    def wrong(*given: Any) -> Any:
        gate = gate_on_cpu(*given)
        gate[:, -1] = 0
        return gate

    monkeypatch.setattr(ffn, "gate_on_cpu", wrong)
    monkeypatch.setattr(fuzz, "MOST_MISMATCHES", 1)
    assert run("--cases", "150", "--kinds", "layer") == 1
    found = capsys.readouterr().out
    assert "WRONG 1:" in found
    assert "stopping here" in found
    (command,) = (line for line in found.splitlines() if "python -m tests.fuzz --replay" in line)
    assert fuzz.main(shlex.split(command)[3:]) == 1
    (number,) = re.findall(r"WRONG (1:\d+) layer ", found)
    capsys.readouterr()
    assert fuzz.main(["--device", "cpu", "--kinds", "layer", "--replay", number]) == 1
    assert capsys.readouterr().out.splitlines()[0] in found


def test_a_hang_ends_the_run_and_is_named(environment: dict[str, str]) -> None:
    script = """
import time
from tests import fuzz
fuzz.attempt = lambda case, device: time.sleep(60)
fuzz.main(["--device", "cpu", "--cases", "1", "--limit-s", "0.2"])
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "HANGS for more than 0 s: python -m tests.fuzz --replay '" in done.stdout


# Threads

# far more than is used
THREADS = ("--threads", "2", "--calls", "2", "--budget-s", "1000")


def test_a_result_that_changes_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*THREADS, "--cases", "4") == 0
    plain = fuzz.caller

    def drifting(*given: Any) -> Callable[[], dict[str, Tensor]]:
        call, calls = plain(*given), itertools.count(1)
        return lambda: {name: t + 1 if next(calls) == 3 else t for name, t in call().items()}

    monkeypatch.setattr(fuzz, "caller", drifting)
    assert run(*THREADS) == 1
    assert re.search(r"WRONG 1:\d+ .*\n  call \d has other bits in ", capsys.readouterr().out)


@pytest.mark.parametrize("where", ["GPU", "host"])
def test_memory_that_grows_is_found(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds, out = itertools.count(1), tmp_path / "out.json"
    monkeypatch.setattr(fuzz, "SETTLED", 1)
    monkeypatch.setattr(fuzz, "GROWTH_MB", {"GPU": 1500, "host": 1500})
    monkeypatch.setattr(fuzz, "megabytes", lambda device: {"GPU": 0, "host": 0, where: 1000 * next(rounds)})
    assert run(*THREADS, "--json", str(out)) == 1
    # 1 GB had settled; 2 GB are allowed, 3 are not
    assert f"WRONG memory of the {where} grew from 1000 to 3000 MB in 3 rounds\n" in capsys.readouterr().out
    (found,) = json.loads(out.read_text())["runs"]
    assert (found["cases"], found["memory_mb"]["most"][where]) == (6, 3000)


# The sanitizer's driver


def test_its_cases_launch_every_kernel_that_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both dtypes, with each option and without: as on a GPU of 132 SMs, with launches recorded."""
    calls = [call for op in sanitize.OPS for size in sanitize.SIZES for call, _ in sanitize.calls(op, size, "cpu")]
    gpu = fake_gpu.install(monkeypatch)
    with fake_gpu.dispatched():
        for call in calls:
            call()
    program.forget()
    shipped, launched = kernel_module("catalog").SHIPPED, {spec for spec, _ in gpu.launches}
    for choice in ("op", "dtype", "bias", "gated", "training", "backward"):
        known, seen = ({(spec.op, getattr(spec, choice, None)) for spec in specs} for specs in (shipped, launched))
        assert known <= seen, choice


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "has_gpu", lambda: True)
    monkeypatch.setattr(sanitize, "usable", lambda device: True)
    monkeypatch.setattr(sanitize, "moved_to", lambda device, t: t)


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_checks_agree_with_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["--case", "light", "overflow", "few, partial"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 3 * len(sanitize.OPS)
    assert all(line.endswith(" ok") for line in out.splitlines())


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_a_wrong_result_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain = sanitize.caller

    def wrong(case: Any, operands: Any) -> Any:
        call = plain(case, operands)
        return lambda: {name: t + 1 if name == "y" else t for name, t in call().items()}

    monkeypatch.setattr(sanitize, "caller", wrong)
    assert sanitize.main(["--case", "light", "--op", "row"]) == 1
    assert "WRONG y differs in " in capsys.readouterr().out
