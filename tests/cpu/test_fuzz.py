"""The fuzzer and the sanitizer's driver: their coverage, and that they find faults."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import family, sanitize
from tests.cpu import fake_gpu
from tests.fuzz import answers, problems
from tests.fuzz import run as fuzz
from tests.fuzz.problems import Case, Limits
from twell import ops, testing, tuning
from twell._activation import Activation
from twell._runtime import device, geometry, kernel_module, program, specs
from twell.ops import hybrid
from twell.strategy import tables

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LIMITS = Limits.of("cpu", jit=False)


# Draws


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_cases_stay_within_their_limits_and_reach_everything(where: str) -> None:
    limits = Limits.of(where, jit=False)
    cases = [problems.draw(5, number, limits, graphs=where == "cuda") for number in range(3000)]
    for case in cases:
        assert case.k % 8 == case.n % 8 == 0
        # sums of very many terms are for GPUs
        assert 8 <= case.n <= limits.n or (where == "cuda" and case.n in problems.MANY_NEURONS)
        assert 0 <= case.m <= limits.m or (where == "cuda" and case.m in problems.MANY_TOKENS)
        assert case.m * case.n <= limits.gates
        assert case.m * case.n * case.k <= limits.work
        assert case.n * case.k <= max(limits.weights, 8 * case.k)
        assert case.training == (case.op in ("train", "overflow"))
        assert set(case.biases) <= set(problems.BIASES)
        assert case.gated or not {"w_up", "b_up"} & {*case.biases, *case.wanted}
        assert not (case.stream and case.x_layout == "expanded")
        assert (case.top > 0) == (case.activation == "topk")
        assert not case.top or case.training <= (case.top <= hybrid.most_of_each(case.n))
    for kind, names in (
        ("op", problems.OPS),
        ("strategy", problems.STRATEGIES),
        ("pattern", problems.PATTERNS),
        ("activation", problems.ACTIVATIONS),
        ("dtype", problems.DTYPES),
        ("x_layout", problems.X_LAYOUTS),
        ("weight_layout", problems.WEIGHT_LAYOUTS),
        ("down_layout", problems.DOWN_LAYOUTS),
        ("bias_layout", problems.BIAS_LAYOUTS),
        ("compression", (2, 4, 8)),
    ):
        assert {getattr(case, kind) for case in cases} == set(names), kind
    assert {next(largest for largest in limits.classes if case.k <= largest) for case in cases} == set(limits.classes)
    on_gpus = () if where == "cuda" else ("graph", "stream")
    for flag in ("exact", "gated", "training", *(flag for flag in problems.FLAGS if flag not in on_gpus)):
        assert {getattr(case, flag) for case in cases} == {True, False}, flag
    choices = {(case.training, case.exact, case.strategy in problems.SPARSE) for case in cases if case.top}
    assert choices == set(itertools.product((False, True), repeat=3))
    assert {case.m for case in cases} >= {m for m in problems.TOKENS if m <= limits.m}
    if where == "cuda":
        assert {case.m for case in cases} >= set(problems.MANY_TOKENS)
        assert {case.n for case in cases} >= set(problems.MANY_NEURONS)


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


def test_a_case_is_a_function_of_seed_and_number() -> None:
    first, again = (problems.draw(3, 7, LIMITS, False) for _ in range(2))
    assert first == again
    assert problems.draw(4, 7, LIMITS, False) != first
    for one, other in zip(problems.build(first, CPU), problems.build(again, CPU), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


RELU = {"activation": "relu", "threshold": 0.0, "top": 0}


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


# Bounds are as narrow as what is promised


CALL: dict[str, Any] = {"x_layout": "plain", "graph": False, "stream": False, "autocast": False, "filled": False}
PATTERN: dict[str, Any] = {"pattern": "uniform", "density": 0.2, "compression": 2, "wanted": (), "mains": False}
TRAINING: dict[str, Any] = {"op": "train", "strategy": "union", "wanted": problems.WEIGHTS, "mains": True}


def crafted(**changes: Any) -> Case:
    """A case with so many roundings that chance averages out, and an ordinary call."""
    sizes = {"m": 300, "k": 256, "n": 320, "dtype": "bf16", "exact": False, "gated": True, "biases": (), "l1": False}
    return dataclasses.replace(problems.draw(1, 0, LIMITS, False), **{**CALL, **PATTERN, **sizes, **RELU, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "forward", "strategy": "row"},
        {"op": "forward", "strategy": "union", "gated": False},
        {**TRAINING, "density": 0.1, "dtype": "fp16", "biases": ("b_gate",), "l1": True},
        {**TRAINING, "op": "overflow", "density": 0.5, "wanted": ("x", *problems.WEIGHTS), "mains": False},
    ],
    ids=["row", "union plain", "l1", "overflow"],
)
def test_errors_are_what_is_usual(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither larger nor smaller: one rounding more or fewer would show."""
    case = crafted(**changes)
    monkeypatch.setattr(answers, "LUCK", 0)
    monkeypatch.setattr(testing, "BUDGET", 1.05)
    result = fuzz.attempt(case, CPU)
    assert result.verdict == "ok"
    prefixes = {name: "main " if case.mains and name != "x" else "" for name in case.wanted}
    assert result.ratios.keys() == {"y", *(prefix + name for name, prefix in prefixes.items())}
    assert min(result.ratios.values()) > 0.85, result.ratios


def test_errors_that_two_products_share_are_counted() -> None:
    """The square's two gradients have the error of one gate, and weights that resemble each other add it up."""
    changes: dict[str, Any] = {"m": 20000, "k": 64, "n": 64, "pattern": "heavy neurons", "density": 0.12, "l1": True}
    changes |= {"strategy": "row", "activation": "relu2", "coherent": True, "wanted": ("x",), "mains": False}
    case = dataclasses.replace(crafted(op="train", **changes), seed=504, number=32944, down_layout="rows")
    result = fuzz.attempt(case, CPU)
    assert result.verdict == "ok"
    assert 0.8 < result.ratios["x"] < 0.95


@pytest.mark.parametrize("changes", [{"x_layout": "expanded"}, {"m": 0}, {"pattern": "none"}, {"pattern": "single"}])
def test_odd_cases_stay_within_their_bounds(changes: dict[str, Any]) -> None:
    """Equal tokens, no tokens, and tokens that fire almost nothing."""
    drawn = (problems.draw(8, number, LIMITS, False) for number in range(400))
    cases = [dataclasses.replace(case, **changes) for case in drawn if case.training and not case.exact][:25]
    found = {str(case): fuzz.attempt(case, CPU).verdict for case in cases}
    assert set(found.values()) == {"ok"}, {case: verdict for case, verdict in found.items() if verdict != "ok"}


# Faults

Op = Callable[..., Any]


Change = Callable[[Any, tuple[Any, ...]], object]


def changes(change: Change) -> Callable[[Op], Op]:
    """A fault that changes what an operator returns, in place; ``change`` gets that and the operator's arguments."""

    def fault(op: Op) -> Op:
        def faulty(*arguments: Any) -> Any:
            out = op(*arguments)
            change(out, arguments)
            return out

        return faulty

    return fault


def loses_the_last_entry(out: Any, given: tuple[Any, ...]) -> None:
    out[0].view(-1, 256 // given[3])[:, -1] = 0


def writes_no_last_row(out: Any, given: tuple[Any, ...]) -> None:
    out[0][128:] = math.nan


def ignores_overflows(out: Any, given: tuple[Any, ...]) -> None:
    """Gradients stay zero for more non-zeros than the hybrid format holds."""
    if int(hybrid.sizes(given[8], len(given[2]))[-1]) > geometry.hybrid_capacity(len(given[2]), len(given[3])):
        for gradient in out:
            gradient.zero_()


def never_the_same(op: Op) -> Op:
    calls = itertools.count()

    def projected(*arguments: Any) -> Any:
        y, l1, *rest = op(*arguments)
        return y, l1 * (1 + 1e-7 * (next(calls) % 2)), *rest

    return projected


def writes_to_one_buffer(op: Op) -> Op:
    """Results of equal shape share memory."""
    buffers: dict[Any, Tensor] = {}

    def projected(*arguments: Any) -> Any:
        y, *rest = op(*arguments)
        return buffers.setdefault((y.shape, y.dtype), y).copy_(y), *rest

    return projected


# where ``ffn`` calls the code of operators
INSIDE = {
    "gate_pack": (("ffn", "pack_on_cpu"), ("ffn_union", "pack_on_cpu")),
    "up_down": (("ffn", "up_down_on_cpu"),),
    "up_down_union": (("ffn_union", "up_down_on_cpu"),),
}


def replace(monkeypatch: pytest.MonkeyPatch, name: str, op: Op) -> None:
    """Put ``op`` in the place of an operator, and of its code inside ``ffn``."""
    monkeypatch.setattr(ops, name, op)
    for module, code in INSIDE.get(name, ()):
        monkeypatch.setattr(sys.modules[f"twell.ops.{module}"], code, op)


@pytest.mark.parametrize(
    ("name", "fault", "text"),
    [
        ("gate_pack", changes(loses_the_last_entry), ""),
        ("up_down_union", changes(writes_no_last_row), "y differs"),
        ("hybrid_forward", never_the_same, "a second call has other bits"),
        ("hybrid_backward", changes(ignores_overflows), "differs"),
        ("hybrid_forward", changes(lambda out, given: out[2].add_(1)), "l0"),
        ("up_down", changes(lambda out, given: out[1].view(-1)[:1].add_(1)), "l1"),
        ("up_down_union", writes_to_one_buffer, "a second call writes to what the first returned"),
    ],
)
def test_a_fault_is_found(
    name: str, fault: Callable[[Op], Op], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fuzzer finds each within 150 cases, and the printed command repeats it."""
    replace(monkeypatch, name, fault(getattr(ops, name)))
    monkeypatch.setattr(fuzz, "MOST_MISMATCHES", 1)
    assert run("--cases", "150") == 1
    found = capsys.readouterr().out
    assert "WRONG 1:" in found
    assert text in found
    (command,) = (line for line in found.splitlines() if "python -m tests.fuzz --replay" in line)
    assert fuzz.main(command.split()[3:]) == 1
    assert "stopping here" in found


# Faults in real numbers


def rounds_h(op: Op) -> Op:
    """The hidden state is rounded, as "union" does and "row" does not."""

    def projected(*arguments: Any) -> Any:
        _, l1 = op(*arguments)
        return ops.up_down_union(*arguments)[0], l1

    return projected


def is_off_in_a_rare_neuron(op: Op) -> Op:
    """The gradient of the neuron with the fewest tokens is off by 1 %; the norm of all does not show it."""

    def backward(*arguments: Any) -> Any:
        popularity = hybrid.parts(arguments[8], len(arguments[2]), len(arguments[3])).popularity
        main_up = arguments[10]
        out = op(*arguments)
        rarest = popularity.masked_fill(popularity == 0, 1 << 30).argmin()
        main_up[rarest] += 0.01 * (main_up[rarest] - answers.MAIN)
        return out

    return backward


@pytest.mark.parametrize(
    ("name", "fault", "changes", "text"),
    [
        ("up_down", rounds_h, {"op": "forward", "strategy": "row"}, "y: the error is"),
        (
            "hybrid_backward_accumulate",
            is_off_in_a_rare_neuron,
            {**TRAINING, "pattern": "tokens"},
            "main w_up: a row is off",
        ),
    ],
    ids=["h", "rare neuron"],
)
def test_a_fault_in_real_numbers_is_found(
    name: str, fault: Callable[[Op], Op], changes: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = crafted(**changes)
    assert fuzz.attempt(case, CPU).verdict == "ok"
    replace(monkeypatch, name, fault(getattr(ops, name)))
    assert text in fuzz.attempt(case, CPU).verdict


def test_the_last_of_equal_gates_in_place_of_the_first_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Activation.after

    def from_the_end(own: Activation, gate: Tensor, inplace: bool = False) -> Tensor:
        return right(own, gate.flip(-1)).flip(-1) if own.k else right(own, gate, inplace)

    drawn = (problems.draw(1, number, LIMITS, False) for number in range(1200))
    cases = [case for case in drawn if case.top and case.top < case.n and case.m > 8]
    assert {fuzz.attempt(case, CPU).verdict for case in cases} == {"ok"}
    monkeypatch.setattr(Activation, "after", from_the_end)
    wrong = [case for case in cases if fuzz.attempt(case, CPU).verdict != "ok"]
    # of integers and of real numbers, in inference and in training
    assert len({(case.exact, case.training) for case in wrong}) == 4
    assert len(wrong) > len(cases) / 3


def test_a_hang_ends_the_run_and_is_named(environment: dict[str, str]) -> None:
    script = """
import time
from tests.fuzz import run as fuzz
fuzz.run = lambda case, device, result: time.sleep(60)
fuzz.main(["--device", "cpu", "--cases", "1", "--limit-s", "0.2"])
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "HANGS for more than 0 s: python -m tests.fuzz --replay 1:0 --device cpu" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limit-s", "nan"], "--limit-s must be above 0, got nan"),
        (["--replay", "seven"], "--replay must be SEED:NUMBER, got 'seven'"),
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
            module = module or sys.modules[f"twell.ops.{call.op._opname if op == 'top_k' else op.removesuffix('_row')}"]
            backward = call.op is ops.reglu_backward
            own_code = vars(module).get("_cuda", vars(module).get("on_cuda", call.op))
            if op in ("ffn", "ffn_row"):
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
                assert seen == known or (kind, choice) == ("gathered", "bias"), (kind, choice)


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
