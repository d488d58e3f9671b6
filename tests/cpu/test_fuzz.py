"""The fuzzer and the sanitizer's driver: what they print and record, and that they find faults."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import family, sanitize
from tests.cpu import fake_gpu
from tests.fuzz import run as fuzz
from twell import ops, tuning
from twell._runtime import device, geometry, kernel_module, program, specs
from twell.strategy import tables

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_family_of_the_gpu_decides_what_is_drawn(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "capability", lambda index: capability)
    gpu = torch.device("cuda")
    assert family.is_portable(gpu) == (capability == (8, 0))
    assert not family.is_portable(CPU)
    monkeypatch.setattr(tuning, "family", tuning.family)
    monkeypatch.setattr(tables, "_on", lambda index: tables.SHIPPED)
    family.run_portable()
    assert family.is_portable(gpu)
    # "auto" never chooses what the family lacks
    assert not tables.in_use(gpu).screens
    assert tables.in_use(gpu).union_neurons == geometry.PORTABLE_UNION_NEURONS


# Results


def run(*arguments: str) -> int:
    return fuzz.main(["--device", "cpu", "--budget-s", "120", *arguments])


def test_cases_are_recorded_and_ledgers_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, more, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "all.json"
    assert run("--cases", "40", "--seed", "3", "--ledger", str(first)) == 0
    header, *cases, last = map(json.loads, first.read_text().splitlines())
    assert "CPU" in header["machine"]
    assert [record["number"] for record in cases] == list(range(40))
    assert {record["verdict"] for record in cases} == {"ok"}
    assert max(ratio for record in cases for ratio in record["ratios"].values()) <= 1
    assert last["ended_after"] > 0
    # a second run appends, and it is as if it had been killed, with a mismatch
    for _ in range(2):
        assert run("--cases", "2", "--seed", "3", "--ledger", str(more)) == 0
    lines = more.read_text().splitlines()
    assert len(lines) == 2 * (2 + 2)
    more.write_text("\n".join(lines[:2]).replace('"verdict": "ok"', '"verdict": "y differs"'))
    capsys.readouterr()
    assert fuzz.main(["--summary", str(first), str(more), "--json", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "seed 3: 40 cases in" in printed
    assert "s, which did not end, on" in printed
    assert "WRONG 3:0 y differs" in printed
    summary = json.loads(out.read_text())
    assert [(r["seed"], r["cases"], r["ended"]) for r in summary["runs"]] == [(3, 40, True), (3, 1, False)]
    assert (summary["cases"], len(summary["mismatches"])) == (41, 1)
    assert sum(summary["counts"]["numbers"].values()) == 41
    assert summary["seconds"] >= summary["case_seconds"] > 0
    for content, text in (
        ("", "no run in these ledgers"),
        ("no JSON", "b.jsonl:1 is no line of a ledger: 'no JSON'"),
        ('{"verdict": "ok"}', "begins without the line that names the machine"),
    ):
        more.write_text(content)
        assert fuzz.main(["--summary", str(more)]) == 2
        assert text in capsys.readouterr().err
    assert fuzz.main(["--summary", str(tmp_path / "none")]) == 2


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
from tests.fuzz import run as fuzz
fuzz.attempt = lambda case, device: time.sleep(60)
fuzz.main(["--device", "cpu", "--cases", "1", "--limit-s", "0.2"])
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "HANGS for more than 0 s: python -m tests.fuzz --replay '" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limit-s", "nan"], "--limit-s must be above 0, got nan"),
        (["--replay", "seven"], "--replay must be SEED:NUMBER or the line of a case, got 'seven': kind must be one of"),
        (["--kinds", "layers"], "argument --kinds: invalid choice: 'layers'"),
    ],
)
def test_a_run_of_nothing_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        fuzz.main(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


# The sanitizer's driver


def test_every_kernel_that_ships_is_run() -> None:
    shipped = {spec.op for spec in kernel_module("catalog").SHIPPED}
    assert {family for families in sanitize.OPS.values() for family in families} == shipped


@pytest.mark.parametrize("op", sanitize.OPS)
def test_operators_launch_the_kernels_that_the_driver_says(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each CUDA implementation runs on CPU tensors, as on a GPU of 132 SMs, with launches recorded."""
    gpu = fake_gpu.install(monkeypatch)
    if op != "matrix_transpose":
        # but other operators are those of a CPU
        monkeypatch.setattr(Tensor, "is_cuda", False)
    for case in sanitize.CASES:
        for call in sanitize.calls(op, case, case.problem()):
            if op == "experts":
                sanitize.by_expert_on_cuda(*call.arguments)
                continue
            module = sys.modules[f"twell.ops.{call.op._opname.removesuffix('_backward')}"] if op == "reglu" else None
            module = module or sys.modules[f"twell.ops.{'ffn' if call.op is ops.ffn_aux else op}"]
            backward = call.op is ops.reglu_backward
            own_code = vars(module).get("_cuda", vars(module).get("on_cuda", call.op))
            if call.op is ops.ffn_aux:
                own_code = module._operators(module.on_cuda)[1]
            if op == "sparse_up_down":
                own_code = module._on_cuda[1]
            left_out = [argument.default_value for argument in call.op._schema.arguments][len(call.arguments) :]
            (module._backward_cuda if backward else own_code)(*call.arguments, *left_out)
    program.forget()
    launched, own = {spec for spec, _ in gpu.launches}, set(sanitize.OPS[op])
    assert {spec.op for spec in launched} == own
    # both dtypes, with biases and without, if the spec has them
    dtypes = {specs.E4M3, "bfloat16"} if op.endswith("float8") else set(specs.DTYPES)
    assert {spec.dtype for spec in launched if hasattr(spec, "dtype")} in (set(), dtypes)
    for kind in own:
        for choice in ("bias", "gated", "training", "backward"):
            known = {getattr(spec, choice, None) for spec in kernel_module("catalog").SHIPPED if spec.op == kind}
            if known == {False, True} and not (kind in ("compact", "sampled_up") and choice == "training"):
                seen = {getattr(spec, choice) for spec in launched if spec.op == kind}
                # the largest are of layers without a gate
                absent = (kind, choice) == ("gathered", "bias") or (op, choice) == ("ffn_top_k", "gated")
                assert seen == known or absent, (kind, choice)


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_checks_agree_with_themselves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run all operators with the CPU in place of the GPU; then wrong ones, and one that raises."""
    plain = sanitize.Call.on
    monkeypatch.setattr(sanitize.Call, "on", lambda call, device: plain(call, "cpu"))
    for repeats in ((), ("--repeats", "2")):
        assert sanitize.main(["--case", "light", "overflow", "few, partial", *repeats]) == 0
        out = capsys.readouterr().out
        assert len(out.splitlines()) == 3 * len(sanitize.OPS)
        assert all(line.endswith(" ok") for line in out.splitlines())

    def wrong(call: sanitize.Call, device: str) -> sanitize.Call:
        moved = plain(call, "cpu")
        return moved._replace(op=lambda *a: [t + 1 for t in call.op(*a)]) if device == "cuda" else moved

    monkeypatch.setattr(sanitize.Call, "on", wrong)
    assert sanitize.main(["--case", "light", "--op", "up_down"]) == 1
    assert "WRONG output 0" in capsys.readouterr().out
    assert sanitize.main(["--op", "up_down", "--limit-s", "-1"]) == sanitize.LEFT
    assert capsys.readouterr().out.count("left out") == len(sanitize.CASES)

    def refused(*arguments: Any) -> Any:
        raise ValueError("strides of\n72")

    def raises(call: sanitize.Call, device: str) -> sanitize.Call:
        moved = plain(call, "cpu")
        return moved._replace(op=refused) if device == "cuda" and call.op is ops.unpack else moved

    monkeypatch.setattr(sanitize.Call, "on", raises)
    assert sanitize.main(["--op", "unpack", "up_down", "--case", "light"]) == 1
    first, other = capsys.readouterr().out.splitlines()
    assert first == "unpack                     light           WRONG ValueError: strides of 72"
    assert other.endswith(" ok")


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_runs_with_other_bits_are_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain = sanitize.Call.on

    def on(call: sanitize.Call, device: str) -> sanitize.Call:
        """A call whose fifth run has another bit in its first result."""
        runs = itertools.count(1)

        def drifting(*arguments: Any) -> tuple[Tensor, ...]:
            outputs = tuple(call.op(*arguments))
            if next(runs) == 5:
                outputs[0].view(-1)[0] += 1
            return outputs

        return plain(call, "cpu")._replace(op=drifting)

    monkeypatch.setattr(sanitize.Call, "on", on)
    assert sanitize.main(["--case", "light", "--op", "up_down", "--repeats", "3"]) == 0
    assert sanitize.main(["--case", "light", "--op", "up_down", "--repeats", "9"]) == 1
    said = capsys.readouterr().out
    assert "runs with other bits, by output: [1" in said, said
    with pytest.raises(SystemExit):
        sanitize.main(["--tool", "memcheck", "--repeats", "3"])
    assert "--repeats is without --tool" in capsys.readouterr().err


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "has_gpu", lambda: True)
    monkeypatch.setattr(sanitize, "usable", lambda: True)


FAKE = """#!/bin/sh
if [ "$1" = --help ]; then echo "--error-exitcode  --report-api-errors --print-limit"; exit 0; fi
echo "$@" >> {log}
echo "caching $PYTORCH_NO_CUDA_MEMORY_CACHING blocking $CUDA_LAUNCH_BLOCKING" >> {log}
exit {status}
"""


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_the_sanitizer_gets_the_options_that_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, program = tmp_path / "log", tmp_path / "compute-sanitizer"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    # of clean runs, of those that left cases out, and of those with reports
    for status, said in ((0, 0), (sanitize.LEFT, sanitize.LEFT), (99, 1)):
        program.write_text(FAKE.format(log=log, status=status))
        program.chmod(0o755)
        log.unlink(missing_ok=True)
        assert sanitize.main(["--tool", "memcheck", "--op", "up_down", "unpack", "--case", "light", "empty"]) == said
        asked, environment = log.read_text().splitlines()
        assert asked.startswith("--tool memcheck --report-api-errors no --error-exitcode 99 --print-limit 0 ")
        assert asked.endswith("sanitize.py --limit-s 60 --op up_down unpack --case light empty")
        assert environment == "caching 1 blocking 1"
