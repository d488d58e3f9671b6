"""``profiling.bench`` on the CPU operators: what it times, what it refuses, what it prints and writes."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from profiling.bench import cli, main, report
from profiling.bench.energy import Energy
from profiling.bench.layers import OPS, Decode, Options, TimedLayer
from profiling.bench.protocol import Ceilings, Device
from profiling.bench.report import Progress
from profiling.bench.rows import LayerRow
from profiling.bench.runner import Job, Runner
from profiling.bench.workloads import parse
from tests.cpu.test_bench_workloads import write_layer
from twell import testing
from twell.commands import timing
from twell.commands.timing import Call, measure
from twell.nn import SparseFFN
from twell.testing.experts import draw_experts, hidden_of

TINY = ["-m", "64", "-k", "64", "-n", "264", "--device", "cpu", "--seconds", "0.001"]
WORKLOAD = "nnz=9,skew=0.5"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the workloads that a test draws, and replay as few times as possible."""
    for name in [name for name in testing.WORKLOADS if "=" in name]:
        monkeypatch.delitem(testing.WORKLOADS, name)
    monkeypatch.setattr(timing, "WARM_ROUNDS", 1)
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 2)
    monkeypatch.setattr("profiling.bench.layers.CALLS", 2)


class Result(NamedTuple):
    code: int
    rows: list[dict[str, Any]]
    data: dict[str, Any]
    out: str
    err: str


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return a function that runs the command and reads its output. Later options win."""

    def run(ops: str, *words: str) -> Result:
        path = tmp_path / "out.json"
        path.unlink(missing_ok=True)
        code = main([ops, *TINY, *words, "--json", str(path)])
        captured = capsys.readouterr()
        data = json.loads(path.read_text()) if path.exists() else {"rows": []}
        return Result(code, data["rows"], data, captured.out, captured.err)

    return run


def test_every_op_has_checked_and_timed_rows(bench: Callable[..., Result]) -> None:
    result = bench(",".join(OPS), "--workload", WORKLOAD, "--strategy", "row,union,dense,auto", "--m-decode", "1,8")
    assert result.code == 0, result.out
    for row in result.rows:
        assert row["p10_ms"] <= row["ms"] <= row["p90_ms"]
        assert row["tflops"] > 0
        # a CPU has no ceilings that mean anything: floors were 3,044 % of the time
        assert row["floor_ms"] is None
        assert row["red"] == ""
        # eager calls of the whole layer alone, beside dense's
        assert [bool(row[f"{way}_ms"]) for way in ("queued", "waited")] == ["decode" not in row["variant"]] * 2
        for way in ("queued", "waited"):
            assert bool(row[f"{way}_speedup"]) == (row["variant"] in ("ffn", "train"))
        assert (row["k"], row["n"], row["m"], row["dtype"], row["compression"]) == (64, 264, 64, "bf16", 8)
        assert row["workload"] == WORKLOAD
    ours = [row for row in result.rows if row["variant"] in OPS]
    for row in ours:
        assert row["frobenius"] <= 1.1 * row["dense_frobenius"]
        assert row["speedup_dense"] > 0
        assert row["faster_dense"] == "eager"
    ran = {(row["variant"], row["tokens"], row["requested"], row["strategy"]) for row in ours}
    named = {("row", "row"), ("union", "union"), ("dense", "dense"), ("auto", "dense")}
    # "row" and "union" train alike; the pattern fits, so nothing overflows
    steps = {("train", 64, *each) for each in named - {("row", "row")}}
    assert ran == {(op, m, *each) for op, m in (("ffn", 64), ("decode", 1), ("decode", 8)) for each in named} | steps
    assert result.data["machine"] == testing.machine_line("cpu")
    assert result.data["machine"] in result.out
    assert result.data["complete"] is True
    assert result.data["ceilings"].keys() == {"tflops", "memory_tbs", "l2_tbs_assumed"}
    assert (result.data["arguments"]["workload"], result.data["arguments"]["ops"]) == ([WORKLOAD], list(OPS))


def test_what_eager_calls_run_instead_is_checked(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls of few tokens count the host and may run dense, where a graph of the same call does not."""
    chosen = [SimpleNamespace(graph=graph, strategy=name) for graph, name in (("", "union"), ("captured", "row"))]
    monkeypatch.setattr("twell.AutoStrategy.explain", lambda site: chosen)
    forward, ran = SparseFFN.forward, []

    def wrong(layer: SparseFFN, x: Tensor) -> Any:
        ran.append(layer.strategy)
        return forward(layer, x) * (1 + 2 * (layer.strategy == "union"))

    monkeypatch.setattr(SparseFFN, "forward", wrong)
    (ours,) = (row for row in bench("ffn", "--workload", WORKLOAD).rows if row["variant"] == "ffn")
    assert (ours["strategy"], ours["eager_strategy"]) == ("row", "union")
    # checked by both strategies
    assert {"row", "union"} <= {each for each in ran if isinstance(each, str)}
    assert ours["red"].endswith("times dense")
    assert_no_speed(ours)


def test_flags_time_the_screen_and_invariant_rows(bench: Callable[..., Result]) -> None:
    flags = ("--strategy", "row,union", "--screen", "--invariant", "--no-eager")
    result = bench("ffn,decode,train", "-m", "64", "--workload", WORKLOAD, *flags, "--m-decode", "1,32")
    assert result.code == 0, result.out
    assert all(row["queued_ms"] is row["waited_ms"] is None for row in result.rows)
    layers = {row["strategy"] for row in result.rows if row["variant"] == "ffn"}
    assert layers == {"row", "union", "union+screen", "row+invariant"}
    rows = {(row["strategy"], row["tokens"]): row for row in result.rows if row["variant"] == "decode"}
    assert all(row["red"] == "" for row in rows.values())
    assert {name for name, _ in rows} == {"row", "union", "union+screen", "row+invariant"}
    for m in (1, 32):
        moved, flop = (
            {name: rows[name, m][figure] * rows[name, m]["ms"] for name in ("row", "union", "union+screen")}
            for figure in ("memory_gbs", "executed_tflops")
        )
        # an int8 gate of 264 x 64 is written and read
        assert moved["union+screen"] > moved["union"] + 2 * 264 * 64 * 1e-6
        assert flop["union+screen"] == pytest.approx(flop["union"])
        assert flop["row"] < flop["union"]
    # training gives no invariant bits
    assert {row["strategy"] for row in result.rows if row["variant"] == "train"} == {"union", "union+screen"}


def test_a_recorded_layer_is_timed_with_its_own_sizes(bench: Callable[..., Result], tmp_path: Path) -> None:
    write_layer(tmp_path, 5)
    words = ("--tokens", "16,130", "24", "--dtype", "fp16", "--compression", "4")
    result = bench("ffn", "--workload", f"real:{tmp_path}", *words)
    sizes = {(row["workload"], row["k"], row["n"], row["dtype"], row["compression"]) for row in result.rows}
    assert sizes == {("real5", 16, 24, "fp16", 4)}
    assert {row["tokens"] for row in result.rows} == {16, 130, 24}
    assert result.data["arguments"]["m"] == [16, 130, 24]


# Wrong results


def assert_no_speed(row: dict[str, Any]) -> None:
    names = "ms p10_ms p90_ms tflops executed_tflops l2_gather_gbs memory_gbs floor_share"
    names += " speedup_dense energy_mj queued_ms waited_ms queued_speedup"
    assert {name: row[name] for name in names.split() if row[name] is not None} == {}
    assert row["samples"] == 0


def test_a_wrong_result_or_gradient_is_red_and_has_no_time(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = SparseFFN.forward

    def wrong_forward(layer: SparseFFN, x: Tensor) -> Any:
        wrong = layer.strategy == "union" and not torch.is_grad_enabled()
        y = forward(layer, x) * (1.05 if wrong else 1)
        if layer.record_aux:
            layer.aux = layer.aux._replace(l1=layer.aux.l1 * 1.2)
        return y

    monkeypatch.setattr(SparseFFN, "forward", wrong_forward)
    result = bench("ffn,decode,train", "--workload", WORKLOAD, "--strategy", "row,union", "--m-decode", "4")
    assert result.code == 1
    reds = {row["variant"]: row for row in result.rows if row["red"]}
    assert reds.keys() == {"ffn", "decode", "train"}
    assert " with l1: error" in reds["train"]["red"]
    for variant in ("ffn", "decode"):
        assert reds[variant]["requested"] == "union"
        assert reds[variant]["red"].endswith("times dense")
        assert reds[variant]["frobenius"] > 1.1 * reds[variant]["dense_frobenius"]
    for row in reds.values():
        assert_no_speed(row)
    assert all(row["ms"] for row in result.rows if not row["red"])
    assert f"3 of {len(result.rows)} rows are red" in result.err
    lines = [line for line in result.out.splitlines() if "RED" in line]
    assert len(lines) == 3
    assert all(" ms" not in line and " us" not in line for line in lines)


def test_a_wrong_dense_layer_is_no_baseline(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense layer that torch.compile compiles is checked like the sparse ones."""
    dense = testing.dense_output
    monkeypatch.setattr(cli, "_compiled", lambda mode: lambda p, **form: 1.05 * dense(p, **form))
    result = bench("ffn", "--workload", WORKLOAD)
    assert result.code == 1
    assert {row["variant"] for row in result.rows if row["red"]} == {"dense compiled"}
    (ours,) = (row for row in result.rows if row["variant"] == "ffn")
    assert ours["faster_dense"] == "eager"


def test_a_replay_with_other_bits_is_red(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = SparseFFN.forward

    def drifting(layer: SparseFFN, x: Tensor) -> Any:
        calls.append(1)
        y = right(layer, x)
        y[0, 0] = torch.nextafter(y[0, 0], torch.tensor(9.0).to(y)) if len(calls) > 2 else y[0, 0]
        return y

    monkeypatch.setattr(SparseFFN, "forward", drifting)
    result = bench("ffn", "--workload", WORKLOAD, "--strategy", "row")
    assert [row["red"] for row in result.rows] == ["", "a replayed recording gives other bits"]


def raising(error: BaseException) -> Callable[..., Any]:
    def fails(*operands: Any, **options: Any) -> Any:
        raise error

    return fails


def test_a_fault_while_timing_costs_all_times(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """The culprit is unknown, in the second kind of eager calls, too."""
    calls = []

    def last(*recordings: Any) -> Any:
        calls.append(recordings)
        return measure(*recordings) if len(calls) < 3 else raising(RuntimeError("an illegal memory access"))()

    monkeypatch.setattr("profiling.bench.runner.measure", last)
    result = bench("ffn", "--workload", WORKLOAD, "--strategy", "row")
    assert [row["red"] for row in result.rows] == ["RuntimeError: an illegal memory access"] * 2
    for row in result.rows:
        assert_no_speed(row)


def test_an_error_is_red_and_the_others_go_on(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload that fails is one row, an operator that fails is that of its strategy."""
    make = testing.make

    def fails(name: str, *rest: Any, **options: Any) -> testing.FFN:
        if name == "nnz=7":
            raise torch.OutOfMemoryError("out of memory")
        return make(name, *rest, **options)

    monkeypatch.setattr(testing, "make", fails)
    monkeypatch.setattr(SparseFFN, "forward", raising(NotImplementedError("no\nsuch   kernel")))
    result = bench("ffn", "--workload", "nnz=7", "nnz=8", "--strategy", "row,auto")
    assert result.code == 1
    first, *others = result.rows
    assert (first["workload"], first["variant"], first["tokens"]) == ("nnz=7", "any", 64)
    assert first["red"] == "OutOfMemoryError: out of memory"
    assert {row["workload"] for row in others} == {"nnz=8"}
    reds = {row["requested"]: row["red"] for row in others if row["red"]}
    assert reds == dict.fromkeys(("row", "auto"), "NotImplementedError: no such kernel")
    assert [bool(row["ms"]) for row in others] == [not row["red"] for row in others]
    assert not all(row["red"] for row in others)


def test_what_does_not_fit_trains_dense_and_by_overflow(bench: Callable[..., Result]) -> None:
    words = ("--workload", "nnz=200", "--strategy", "row,auto", "-k", "32", "-n", "256", "-m", "512")
    result = bench("train,train_overflow", *words)
    ran = [(row["variant"], row["requested"], row["strategy"]) for row in result.rows]
    assert ("train", "dense", "dense") in ran
    assert ("train_overflow", "union", "union") in ran
    assert not [row for row in result.rows if row["red"]]
    # and what fits has nothing that overflows
    assert bench("train_overflow", "--workload", WORKLOAD).out.startswith("nothing to time")


# torch.compile


def test_decode_has_the_compiled_dense_layer_by_the_mode_asked_for(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, called = [], []

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        modes.append((function, options["mode"]))
        return lambda *operands, **more: called.append(function) or function(*operands, **more)

    monkeypatch.setattr(torch, "compile", compiled)
    mode = "max-autotune-no-cudagraphs"
    words = ("--workload", WORKLOAD, "--m-decode", "4", "--strategy", "row", "--compile", mode)
    result = bench("decode", *words)
    assert result.code == 0
    assert modes == [(testing.dense_output, mode)]
    assert set(called) == {testing.dense_output}
    variants = [row["variant"] for row in result.rows]
    assert variants == ["dense eager decode", "dense compiled decode", "decode"]


# Ctrl-C, memory and energy


def test_ctrl_c_leaves_what_was_measured(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = testing.make

    def interrupted(name: str, *rest: Any, **options: Any) -> testing.FFN:
        if name == "nnz=8":
            raise KeyboardInterrupt
        return make(name, *rest, **options)

    monkeypatch.setattr(testing, "make", interrupted)
    result = bench("ffn", "--workload", "nnz=7", "nnz=8", "nnz=9")
    assert result.code == 130
    assert {row["workload"] for row in result.rows} == {"nnz=7"}
    assert result.data["complete"] is False
    assert result.data["machine"] in result.out
    assert "profiling.bench: interrupted" in result.err
    # an interrupt before the first measurement leaves an older file alone
    path = tmp_path / "old.json"
    path.write_text("old")
    assert main(["ffn", "--workload", "nnz=8", *TINY, "--json", str(path)]) == 130
    assert path.read_text() == "old"


class Known(Device):
    def peak(self, call: Call) -> int | None:
        call(0)
        return 4096

    def kept(self, forward: Callable[[int], Tensor]) -> int | None:
        forward(0)
        return 1024


class Meter:
    """Ten calls take a joule each, those of dense two; a tenth is idle power."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def measure(self, call: Callable[[], None], seconds: float) -> Energy:
        self.asked.append(seconds)
        for _ in range(10):
            call()
        joules = 20.0 if len(self.asked) == 1 else 10.0
        return Energy(joules, seconds, 10, 0.1 * joules)


@torch.no_grad()
def run(options: Options, meter: Any = None) -> list[LayerRow]:
    (source,) = parse([WORKLOAD])
    this = Runner(options, Known(), Ceilings(1e12, 1e11, 1e12), Progress("test"), meter)
    return [row for group in this.run(Job(source, 64, 64, 264, "bf16")) for row in group]


@pytest.mark.parametrize("memory", [False, True])
def test_memory_is_measured_for_training_and_on_request(memory: bool) -> None:
    found = run(Options(OPS, decoded=(2,), memory=memory, seconds=1e-3))
    steps = {"train", "dense eager train"}
    assert {row.variant for row in found if row.kept_bytes == 1024} == steps
    assert {row.variant for row in found if row.peak_bytes == 4096} == ({r.variant for r in found} if memory else steps)


def test_energy_is_of_a_token_beside_dense(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter()
    options = Options(("ffn",), seconds=1e-3, energy_seconds=2.5)
    dense, ours = run(options, meter)
    assert (dense.variant, ours.variant) == ("dense eager", "ffn")
    assert meter.asked == [2.5] * 2
    # ten replays of two copies of 64 tokens
    assert dense.energy_mj == pytest.approx(20e3 / (10 * 2 * 64))
    assert ours.energy_mj == pytest.approx(10e3 / (10 * 2 * 64))
    assert ours.idle_mj == pytest.approx(1e3 / (10 * 2 * 64))
    assert ours.energy_dense == pytest.approx(2.0)
    # times survive a meter that fails
    monkeypatch.setattr(Meter, "measure", raising(OSError("the driver went away")))
    dense, ours = run(options, meter)
    assert dense.ms
    assert ours.energy_mj is None
    assert "energy of dense eager cannot be measured: OSError: the driver went away" in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("cache", [0, 1_000_000])
def test_decode_leaves_no_gate_in_the_cache(monkeypatch: pytest.MonkeyPatch, cache: int) -> None:
    """A sparse call reads the gate's weight and a few rows of the others."""
    monkeypatch.setattr("profiling.bench.layers.CALLS", 32)

    class Cached(Device):
        def copies_for(self, bytes_each: int) -> int:
            return timing.copies_for(bytes_each, cache)

    problem = testing.pattern_problem(torch.ones(64, 64, dtype=torch.int64), 64)
    decode = Decode(TimedLayer(problem, Options(("decode",)), Cached(), Ceilings(1e12, 1e11, 1e12)))
    gates = [weights.w_gate for weights in decode.weights]
    assert len({gate.data_ptr() for gate in gates}) == len(gates)
    assert sum(gate.numel() * gate.element_size() for gate in gates) >= 2 * cache
    for variant in decode.variants(8):
        assert variant.copies >= 32
        # each copy is visited as often as the others
        assert variant.copies % len(gates) == 0


# Experts


def test_rows_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    sizes = ["--shapes", "tiny", "--sequences", "1", "9", "--skew", "0", "1.5", "--seconds", "0.01"]
    assert main(["moe", *sizes, "--device", "cpu", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [(row["variant"], row["sequences"], row["skew"]) for row in found["rows"]][:3] == [
        ('"row"', 1, 0.0),
        ('"dense"', 1, 0.0),
        ('"auto"', 1, 0.0),
    ]
    assert len(found["rows"]) == 12
    assert all(row["us"] > 0 and row["error"] < 1.5 for row in found["rows"])
    assert "over copy" in capsys.readouterr().out


def test_draws_of_experts_fire_and_route_as_asked() -> None:
    problem = draw_experts(400, 64, 256, 8, 2, firing=0.1, skew=1.0)
    shares = [float(hidden_of(problem, expert)[1].float().mean()) for expert in range(4)]
    assert all(0.07 < share < 0.13 for share in shares)
    counts = torch.bincount(problem.expert_ids.flatten(), minlength=8)
    assert counts[0] > 2 * counts[7]
    assert all(len(set(ids)) == 2 for ids in problem.expert_ids.tolist())


# Files


@dataclass
class Timed:
    name: str
    ms: float | None = None
    red: str = ""


def test_a_file_that_cannot_be_written_costs_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError("no space left")

    run = report.Run("bench", tmp_path / "x.json", lambda: {"machine": "m", "arguments": {}})
    with monkeypatch.context() as patched:
        patched.setattr("twell._files.write_text", full)
        run.add([Timed("a", 1.0)])
        run.measure(lambda: run.add([Timed("b", 2.0)]))
    # said once
    assert capsys.readouterr().err.count("x.json cannot be written: no space left") == 1
    assert run.status() == 2
    run.add([Timed("c", math.inf, red="wrong")])
    text = (tmp_path / "x.json").read_text()
    rows = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["rows"]
    assert (run.status(), len(rows), rows[-1]) == (1, 3, {"name": "c", "ms": None, "red": "wrong"})
