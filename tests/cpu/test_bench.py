"""``twell bench`` on the CPU operators: what it times, what it refuses, what it prints and writes."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from twell import testing
from twell._activation import activation_of
from twell.commands.bench import cli, fp8, main, parser, protocol
from twell.commands.bench.decode import Decode
from twell.commands.bench.layers import INFERENCE, OPS, TRAINING, Options, TimedLayer
from twell.commands.bench.protocol import Ceilings, Cpu
from twell.commands.bench.report import Progress
from twell.commands.bench.rows import LayerRow
from twell.commands.bench.runner import Job, Runner
from twell.commands.bench.workloads import parse

TINY = ["-m", "64", "-k", "64", "-n", "264", "--device", "cpu", "--seconds", "0.001"]
WORKLOAD = "nnz=9,skew=0.5"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the workloads that a test draws, and replay as few times as possible."""
    for name in [name for name in testing.WORKLOADS if "=" in name]:
        monkeypatch.delitem(testing.WORKLOADS, name)
    monkeypatch.setattr(protocol, "WARM_ROUNDS", 1)
    monkeypatch.setattr(protocol, "LEAST_ROUNDS", 2)
    monkeypatch.setattr("twell.commands.bench.decode.CALLS", 2)


class Result(NamedTuple):
    code: int
    rows: list[dict[str, Any]]
    data: dict[str, Any]
    out: str
    err: str


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return a function that runs the command and reads its output."""

    def run(*words: str, tiny: bool = True) -> Result:
        path = tmp_path / "out.json"
        path.unlink(missing_ok=True)
        code = main([*words, *(TINY if tiny else []), "--json", str(path)])
        captured = capsys.readouterr()
        data = json.loads(path.read_text()) if path.exists() else {"rows": []}
        return Result(code, data["rows"], data, captured.out, captured.err)

    return run


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return LayerRow(**row).key


def test_every_op_has_checked_and_timed_rows(bench: Callable[..., Result]) -> None:
    result = bench(",".join(OPS), "--workload", WORKLOAD, "--strategy", "row,union,dense,auto", "--m-decode", "1,8")
    assert result.code == 0, result.out
    # the pattern fits, so nothing overflows
    assert {row["variant"] for row in result.rows} >= set(OPS) - {"train_overflow"}
    assert len({key(row) for row in result.rows}) == len(result.rows)
    for row in result.rows:
        assert row["ms"] > 0
        assert row["p10_ms"] <= row["ms"] <= row["p90_ms"]
        assert row["tflops"] > 0
        # a CPU has no ceilings that mean anything: floors were 3,044 % of the time
        assert row["floor_ms"] is None
        assert row["red"] == ""
        assert row["checked"]
        assert (row["k"], row["n"], row["m"], row["dtype"], row["compression"]) == (64, 264, 64, "bf16", 8)
        assert row["workload"] == WORKLOAD
        assert set(row["op"].split(",")) <= set(OPS)
    ours = [row for row in result.rows if row["variant"] in OPS]
    for row in ours:
        assert row["frobenius"] <= 1.1 * row["dense_frobenius"]
    by_strategy = {(row["variant"], row["requested"], row["strategy"]) for row in ours if row["requested"]}
    for op in ("ffn", "sparse_ffn", "decode"):
        assert {(r, s) for v, r, s in by_strategy if v == op} == {(s, s) for s in ("row", "union", "dense")} | {
            ("auto", "dense")
        }
    for op in ("train", "sparse_train"):
        assert {r for v, r, _ in by_strategy if v == op} == {"union", "dense", "auto"}
    for row in ours:
        if row["variant"] in ("ffn", "sparse_ffn", "train", "sparse_train", "decode", "train_forward"):
            assert row["speedup_eager"] == row["speedup_dense"] > 0
            assert row["faster_dense"] == "eager"
    assert {row["tokens"] for row in ours if row["variant"] == "decode"} == {1, 8}
    assert {row["tokens"] for row in ours if row["variant"] != "decode"} == {64}
    gradients = next(row for row in ours if row["variant"] == "train")["gradients"]
    assert gradients.keys() == {f"{t}{s}" for t in ("x", "w_gate", "w_up", "w_down") for s in ("", " with l1")}


def test_flags_time_the_screen_and_invariant_rows(bench: Callable[..., Result]) -> None:
    flags = ("--strategy", "row,union", "--screen", "--invariant")
    result = bench("decode,train", "-m", "64", "--workload", WORKLOAD, *flags, "--m-decode", "1,32")
    assert result.code == 0, result.out
    rows = {(row["strategy"], row["tokens"]): row for row in result.rows if row["variant"] == "decode"}
    assert all(row["checked"] and row["red"] == "" for row in rows.values())
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


def test_sizes_dtype_and_compression_reach_the_rows(bench: Callable[..., Result]) -> None:
    result = bench(
        *("gate_pack", "down", "--tokens", "16,130", "24", "--hidden", "32", "--neurons", "200", "--workload", "nnz=5"),
        *("--dtype", "fp16", "--compression", "4", "--device", "cpu", "--seconds", "0.001"),
        tiny=False,
    )
    assert result.code == 0
    assert {(row["tokens"], row["k"], row["n"]) for row in result.rows} == {(m, 32, 200) for m in (16, 130, 24)}
    assert {(row["dtype"], row["compression"]) for row in result.rows} == {("fp16", 4)}
    assert {row["variant"] for row in result.rows} == {"dense eager non-gated", "gate GEMM", "gate_pack", "down"}
    assert result.data["arguments"]["m"] == [16, 130, 24]


def test_a_recorded_layer_is_timed(bench: Callable[..., Result], tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    np.savez(
        tmp_path / "layer5.npz",
        x=draw.integers(-9, 9, (32, 16), dtype=np.int8),
        x_scale=np.full((32, 1), 0.1, np.float32),
        w=draw.integers(-9, 9, (6, 16), dtype=np.int8),
        w_scale=np.full((6, 1), 0.1, np.float32),
        alive=np.arange(6),
        quiet=np.ones(16, np.float32) / 16,
        n=24,
    )
    result = bench("gate_pack", "--workload", f"real:{tmp_path}", "--repro")
    assert {(row["workload"], row["k"], row["n"], row["tokens"]) for row in result.rows} == {("real5", 16, 24, 64)}
    assert f"--workload real:{tmp_path}/5 " in result.out


# Wrong results


def test_a_wrong_result_is_red_and_has_no_time(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    right = testing.sparse_output

    def wrong(problem: testing.FFN, **options: Any) -> Tensor:
        y = right(problem, **options)
        return y * 1.05 if options.get("strategy") == "union" else y

    monkeypatch.setattr(testing, "sparse_output", wrong)
    result = bench("ffn,decode", "--workload", WORKLOAD, "--strategy", "row,union", "--m-decode", "4", "--wide")
    assert result.code == 1
    reds = [row for row in result.rows if row["red"]]
    assert {(row["variant"], row["requested"]) for row in reds} == {("ffn", "union"), ("decode", "union")}
    for row in reds:
        assert row["red"].endswith("times dense")
        assert row["frobenius"] > 1.1 * row["dense_frobenius"]
        assert_no_speed(row)
    assert all(row["ms"] for row in result.rows if not row["red"])
    assert "2 of 7 rows are red" in result.err
    lines = [line for line in result.out.splitlines() if "RED" in line]
    assert len(lines) == 2
    assert all(" ms" not in line and " us" not in line for line in lines)


def assert_no_speed(row: dict[str, Any]) -> None:
    """Check that no figure of the row is derived from a time."""
    names = "ms min_ms p10_ms p90_ms tflops executed_tflops l2_gather_gbs memory_gbs floor_share over_gemm kernels"
    names += " speedup_eager speedup_compiled speedup_dense energy_mj"
    assert {name: row[name] for name in names.split() if row[name] is not None} == {}
    assert row["samples"] == 0


def test_a_wrong_gradient_is_red(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    right = testing.sparse_gradients

    def wrong(problem: testing.FFN, dy: Tensor, dl1: float = 0.0, **options: Any) -> dict[str, Tensor]:
        found = right(problem, dy, dl1, **options)
        return {name: t * (1.2 if name == "w_up" and dl1 else 1) for name, t in found.items()}

    monkeypatch.setattr(testing, "sparse_gradients", wrong)
    result = bench("train", "--workload", WORKLOAD, "--strategy", "union")
    assert result.code == 1
    (row,) = (row for row in result.rows if row["red"])
    assert row["variant"] == "train"
    assert row["red"].startswith("w_up with l1: error")
    assert_no_speed(row)


def test_a_wrong_dense_layer_is_no_baseline(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense layer that torch.compile compiles is checked like the sparse ones."""
    dense = testing.dense_output

    def wrong(problem: testing.FFN, **options: Any) -> Tensor:
        return 1.05 * dense(problem, **options)

    monkeypatch.setattr(cli, "_compiled", lambda mode: wrong)
    result = bench("ffn,sparse_ffn", "--workload", WORKLOAD)
    red = {row["variant"] for row in result.rows if row["red"]}
    assert red == {"dense compiled", "dense compiled non-gated"}
    assert result.code == 1
    for row in result.rows:
        if row["variant"] in ("ffn", "sparse_ffn"):
            assert row["faster_dense"] == "eager"
            assert row["speedup_compiled"] is None


def test_the_error_of_fp8_is_shown_and_not_judged(bench: Callable[..., Result]) -> None:
    words = ("--workload", WORKLOAD, "--m-decode", "1,8", "--fp8", "--repro")
    result = bench("ffn,decode", *words, *TINY, "-n", "272", tiny=False)
    assert result.code == 0
    found = {(row["variant"], row["tokens"]): row for row in result.rows}
    rows = [found["dense fp8", 64], found["dense fp8 decode", 1], found["dense fp8 decode", 8]]
    for row in rows:
        # e4m3 has four significant bits, and a gate near 0 may get another sign
        assert 10 * row["dense_frobenius"] < row["frobenius"] < 0.5
        assert row["ms"] > 0
    # one product has the error of one rounding alone, up to 2^-4 of each value
    x, weight = torch.randn(64, 64), torch.randn(272, 64)
    product = fp8._product(fp8.quantise(x), fp8.quantise(weight), None)
    assert 0.02 < testing.errors(product, x.double() @ weight.double().T).frobenius < 0.06
    # the baseline of speed-ups stays the layer with the same results
    assert {row["faster_dense"] for row in result.rows if row["variant"] in ("ffn", "decode")} == {"eager"}
    assert all("--fp8" in line for line in result.out.splitlines() if line.startswith("  python"))
    assert result.data["arguments"]["fp8"] is True


def test_fp8_knows_every_activation_and_bias() -> None:
    problem = testing.FFN(*(torch.randn(size).bfloat16() for size in ((64, 64), (272, 64), (272, 64), (272, 64))))
    problem = problem._replace(b_gate=torch.randn(272).bfloat16(), b_down=torch.randn(64).bfloat16())
    for name, threshold in (("relu", 0.0), ("relu2", 0.0), ("drelu", 0.0), ("fatrelu", 2.0)):
        activation = activation_of(name, threshold)
        y = fp8.output(problem.x, fp8.Weights.of(problem), activation)
        assert testing.errors(y, testing.float64_output(problem, **activation.options())).frobenius < 0.1


def test_quantised_rows_reach_the_largest_value_and_zeros_stay() -> None:
    values, scales = fp8.quantise(torch.tensor([[1e-30, -3.0, 7.0], [0.0, 0.0, 0.0]]).bfloat16())
    assert values.float().tolist() == [[0, -192, 448], [0, 0, 0]]
    assert scales[0] == 7 / 448


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "--fp8 is for ffn and decode: expected one of them, got train"),
        (["ffn", "--dtype", "fp16"], "with --fp8 --dtype must be bf16, got fp16"),
        (["ffn"], "with --fp8 --neurons must be a multiple of 16, got 264"),
        (["decode", "-k", "72", "-n", "272"], "with --fp8 --hidden must be a multiple of 16, got 72"),
    ],
)
def test_what_fp8_cannot_do(bench: Callable[..., Result], words: list[str], said: str) -> None:
    options = words[1:]
    result = bench(words[0], "--workload", WORKLOAD, "--fp8", *TINY, *options, tiny=False)
    assert result.code == 2
    assert said in result.err


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(parser, "pick_device", lambda text: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert main(["ffn", "--workload", WORKLOAD, "--fp8"]) == 2
    assert "--fp8 needs a GPU with fp8: expected compute capability 8.9 or more, got 8.0" in capsys.readouterr().err


def test_decode_has_the_compiled_dense_layer_by_the_mode_asked_for(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, called = [], []

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        modes.append((function, options["mode"]))

        def run(*operands: Any, **more: Any) -> Any:
            called.append(function)
            return function(*operands, **more)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    mode = "max-autotune-no-cudagraphs"
    words = ("--workload", WORKLOAD, "--m-decode", "4", "--strategy", "row", "--fp8", "--compile", mode)
    result = bench("decode", *words, *TINY, "-n", "272", tiny=False)
    assert result.code == 0
    assert modes == [(testing.dense_output, mode), (fp8.output, mode)]
    assert set(called) == {testing.dense_output, fp8.output}
    variants = [row["variant"] for row in result.rows]
    assert variants == ["dense eager decode", "dense compiled decode", "dense fp8 decode", "decode"]


def test_an_error_is_red_and_the_others_go_on(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem: testing.FFN, **options: Any) -> Tensor:
        raise NotImplementedError("no\nsuch   kernel")

    monkeypatch.setattr(testing, "sparse_output", fails)
    result = bench("gate_pack,ffn", "--workload", WORKLOAD, "--strategy", "row,auto")
    assert result.code == 1
    reds = {row["requested"]: row["red"] for row in result.rows if row["red"]}
    assert reds == dict.fromkeys(("row", "auto"), "NotImplementedError: no such kernel")
    assert next(row for row in result.rows if row["variant"] == "gate_pack")["ms"] > 0


def test_other_bits_on_replay_are_red(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = testing.sparse_output, 0

    def drifts(problem: testing.FFN, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        y = right(problem, **options)
        y.view(-1)[0] += 2.0**-9 * calls
        return y

    monkeypatch.setattr(testing, "sparse_output", drifts)
    monkeypatch.setattr(testing, "errors", lambda *_: testing.Errors(1e-3, 1e-3))
    result = bench("ffn", "--workload", WORKLOAD, "--strategy", "row")
    assert result.code == 1
    assert [row["red"] for row in result.rows if row["variant"] == "ffn"] == ["a replayed recording gives other bits"]


def test_unchecked_rows_say_so(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "sparse_output", lambda problem, **_: torch.zeros_like(problem.x))
    monkeypatch.setattr(testing, "float64_output", lambda *_, **__: pytest.fail("compared all the same"))
    result = bench("ffn,decode", "--workload", WORKLOAD, "--no-check", "--m-decode", "4", "--repro")
    assert result.code == 0
    assert not any(row["checked"] or row["red"] or row["frobenius"] is not None for row in result.rows)
    assert all(row["ms"] for row in result.rows)
    assert result.out.count("unchecked") >= len(result.rows)
    assert "UNCHECKED" in result.out
    assert all("--no-check" in line for line in result.out.splitlines() if line.startswith("  python"))
    assert result.data["arguments"]["check"] is False


def test_a_workload_that_fails_is_red_and_the_next_is_timed(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = testing.make

    def fails(name: str, *rest: Any, **options: Any) -> testing.FFN:
        if name == "nnz=7":
            raise torch.OutOfMemoryError("out of memory")
        return make(name, *rest, **options)

    monkeypatch.setattr(testing, "make", fails)
    result = bench("gate_pack", "--workload", "nnz=7", "nnz=8", "--repro")
    assert result.code == 1
    first, *others = result.rows
    assert (first["workload"], first["variant"], first["tokens"]) == ("nnz=7", "any", 64)
    assert first["red"] == "OutOfMemoryError: out of memory"
    assert others
    assert all(row["workload"] == "nnz=8" and row["ms"] for row in others)
    assert "bench gate_pack -m 64 -k 64 -n 264 --workload nnz=7 " in result.out


def test_what_does_not_fit_trains_dense_and_by_overflow(bench: Callable[..., Result]) -> None:
    words = ("train,train_overflow,train_forward,train_backward", "--workload", "nnz=200", "--strategy", "row,auto")
    result = bench(*words, "-k", "32", "-n", "256", "-m", "512", "--device", "cpu", "--seconds", "0.001", tiny=False)
    ran = [(row["variant"], row["requested"], row["strategy"]) for row in result.rows]
    assert ("train", "dense", "dense") in ran
    assert ("train_overflow", "union", "union") in ran
    assert not {"train_forward", "train_backward"} & {name for name, *_ in ran}
    assert not [row for row in result.rows if row["red"]]


# Output


def test_json_and_csv_hold_the_same_rows(bench: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.csv"
    result = bench("gate_pack", "--workload", WORKLOAD, "--csv", str(path))
    assert result.data["machine"] == testing.machine_line("cpu")
    assert result.data["complete"] is True
    assert result.data["ceilings"].keys() == {"tflops", "memory_tbs", "l2_tbs_assumed"}
    assert result.data["arguments"]["workload"] == [WORKLOAD]
    assert result.data["arguments"]["ops"] == ["gate_pack"]
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["variant"] for line in lines] == [row["variant"] for row in result.rows]
    assert [float(line["ms"]) for line in lines] == [row["ms"] for row in result.rows]
    assert result.data["machine"] in result.out


@pytest.mark.parametrize("form", ["--json", "--csv"])
def test_stdout_takes_data_and_nothing_else(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate_pack", "--workload", "nnz=7", "nnz=9", *TINY, form, "-", "--repro"]) == 0
    captured = capsys.readouterr()
    if form == "--json":
        found = json.loads(captured.out)["rows"]
    else:
        found = list(csv.DictReader(io.StringIO(captured.out)))
    assert [row["variant"] for row in found] == ["gate GEMM", "gate_pack"] * 2
    assert testing.machine_line("cpu") in captured.err


REPEATED = (
    ("gate_pack,up_down,down,up_down_union", ()),
    ("ffn", ("--strategy", "row,auto", "--dtype", "fp16")),
    ("train,train_forward,train_backward", ("--strategy", "union,dense", "--compression", "4")),
    ("gate_pack,decode", ("--m-decode", "1,4", "--strategy", "row,union", "--memory")),
    ("gate_pack,up_down,ffn,decode,train", ("--m-decode", "1", "--activation", "relu2", "--strategy", "row,dense")),
    ("up_down,up_down_union,train,train_backward", ("--activation", "drelu", "--strategy", "union")),
    ("gate_pack,down,sparse_train", ("--activation", "fatrelu", "--threshold", "0.5", "--strategy", "union")),
)


@pytest.mark.parametrize(("ops", "options"), REPEATED, ids=[ops for ops, _ in REPEATED])
def test_repro_repeats_its_row(bench: Callable[..., Result], ops: str, options: tuple[str, ...]) -> None:
    workloads = (WORKLOAD, "nnz=4,topic=0.25") if ops == "ffn" else (WORKLOAD,)
    result = bench(ops, "--workload", *workloads, *options, "--repro")
    lines = [line.strip() for line in result.out.splitlines() if line.startswith("  python -m twell bench ")]
    assert len(lines) == len(result.rows)
    repeated: dict[str, set[tuple[Any, ...]]] = {}
    # one of the two workloads is enough to run again
    for row, line in zip(result.rows, lines, strict=True):
        asked = parser.request(cli.parser().parse_args(shlex.split(line)[4:]))
        assert [job.source.name for job in asked.jobs] == [row["workload"]]
        assert [(job.m, job.k, job.n, job.dtype) for job in asked.jobs] == [
            (row["m"], row["k"], row["n"], row["dtype"])
        ]
        assert ",".join(asked.options.ops) == row["op"]
        assert asked.options.seconds == 0.001
        assert asked.options.activation.name in ("relu", *options)
        assert (asked.options.activation.name == "relu") == ("--activation" not in options)
        assert asked.device == "cpu"
        if row["workload"] == WORKLOAD:
            if line not in repeated:
                again = bench(*shlex.split(line)[4:], tiny=False)
                repeated[line] = {key(other) for other in again.rows}
            assert key(row) in repeated[line]


def test_ctrl_c_leaves_what_was_measured(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make = testing.make

    def interrupted(name: str, *rest: Any, **options: Any) -> testing.FFN:
        if name == "nnz=8":
            raise KeyboardInterrupt
        return make(name, *rest, **options)

    monkeypatch.setattr(testing, "make", interrupted)
    result = bench("gate_pack", "--workload", "nnz=7", "nnz=8", "nnz=9")
    assert result.code == 130
    assert {row["workload"] for row in result.rows} == {"nnz=7"}
    assert result.data["complete"] is False
    assert "gate_pack" in result.out
    assert result.data["machine"] in result.out
    assert "twell bench: interrupted" in result.err
    # an interrupt before the first measurement leaves an older file alone
    path = tmp_path / "old.json"
    path.write_text("old")
    assert main(["gate_pack", "--workload", "nnz=8", *TINY, "--json", str(path)]) == 130
    assert path.read_text() == "old"
    assert "interrupted" in capsys.readouterr().err


# Memory and energy


class Known(Cpu):
    """A device that reports memory."""

    def peak(self, call: protocol.Call) -> int | None:
        call(0)
        return 4096

    def kept(self, forward: Callable[[int], Tensor]) -> int | None:
        forward(0)
        return 1024


class Joules(NamedTuple):
    joules: float
    seconds: float
    calls: int
    idle_joules: float


class Meter:
    """Ten calls take a joule each, those of dense two; a tenth is idle power."""

    method = "total_energy_counter"

    def __init__(self, broken: bool = False) -> None:
        self.asked: list[float] = []
        self.broken = broken

    def measure(self, call: Callable[[], None], seconds: float) -> Joules:
        self.asked.append(seconds)
        if self.broken:
            raise OSError("the driver went away")
        for _ in range(10):
            call()
        joules = 20.0 if len(self.asked) == 1 else 10.0
        return Joules(joules, seconds, 10, 0.1 * joules)


@torch.no_grad()
def run(options: Options, meter: Any = None, workload: str = WORKLOAD) -> list[LayerRow]:
    (source,) = parse([workload])
    with Progress() as progress:
        this = Runner(options, Known(), Ceilings(1e12, 1e11, 1e12), progress, meter)
        return [row for group in this.run(Job(source, 64, 64, 264, "bf16")) for row in group]


@pytest.mark.parametrize("memory", [False, True])
def test_memory_is_measured_for_training_and_on_request(memory: bool) -> None:
    found = run(Options((*INFERENCE, *TRAINING, "decode"), decoded=(2,), memory=memory, seconds=1e-3))
    steps = ("train", "sparse_train", "dense eager train", "dense eager train non-gated")
    assert {row.variant for row in found if row.kept_bytes == 1024} == set(steps)
    measured = {row.variant for row in found if row.peak_bytes == 4096}
    assert measured == ({row.variant for row in found} if memory else set(steps))


def test_energy_is_of_a_token_beside_dense() -> None:
    meter = Meter()
    found = {row.variant: row for row in run(Options(("ffn",), seconds=1e-3, energy_seconds=2.5), meter)}
    assert meter.asked == [2.5] * 3
    dense, ours = found["dense eager"], found["ffn"]
    # ten replays of two copies of 64 tokens
    assert dense.energy_mj == pytest.approx(20e3 / (10 * 2 * 64))
    assert ours.energy_mj == pytest.approx(10e3 / (10 * 2 * 64))
    assert ours.idle_mj == pytest.approx(1e3 / (10 * 2 * 64))
    assert ours.energy_dense == pytest.approx(2.0)
    assert dense.energy_dense is None


# Layers


@torch.no_grad()
@pytest.mark.parametrize("cache", [0, 100_000, 1_000_000])
def test_decode_leaves_no_gate_in_the_cache(monkeypatch: pytest.MonkeyPatch, cache: int) -> None:
    """A sparse call reads the gate's weight and a few rows of the others."""
    monkeypatch.setattr("twell.commands.bench.decode.CALLS", 32)

    class Cached(Cpu):
        def copies_for(self, bytes_each: int) -> int:
            return protocol.copies_for(bytes_each, cache)

    problem = testing.pattern_problem(torch.ones(64, 64, dtype=torch.int64), 64)
    layer = TimedLayer(problem, Options(("decode",)), Cached(), Ceilings(1e12, 1e11, 1e12))
    decode = Decode(layer)
    gates = [weights.w_gate for weights in decode.weights]
    assert len({gate.data_ptr() for gate in gates}) == len(gates)
    assert sum(gate.numel() * gate.element_size() for gate in gates) >= 2 * cache
    for variant in decode.variants(8):
        assert variant.copies >= 32
        # each copy is visited as often as the others
        assert variant.copies % len(gates) == 0


# The command line


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("words", [[], ["ffn"], ["ffn", "--device", "cuda"], ["ffn", "--device", "cuda:1"]], ids=str)
def test_without_a_gpu_the_device_must_be_cpu(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    got = words[-1] if "--device" in words else "cuda"
    reason = "--device: expected cpu, as torch can use no CUDA device"
    assert error == f"twell bench: error: {reason}, got {got!r}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ffn", "--workload", "topic30"], "--workload takes uniform29"),
        (["ffn", "--workload", "nnz=600", "-n", "264"], "nnz=600 has 600 non-zeros per token: expected at most 264"),
        (["ffn", "-n", "16"], "16 neurons are too few for the named workloads: expected --workload"),
        (["decode", "-m", "1024"], "--m-decode must be from 1 to 512 of 512 tokens, got 1024"),
        (
            ["ffn,train", "--m-decode", "8"],
            "--m-decode is for decode: expected it among the operations, got ffn, train",
        ),
        (["ffn,down", "--activation", "drelu"], 'activation "drelu" must have a gate and an up projection'),
        (["ffn", "--threshold", "1"], 'threshold must be 0 unless activation is "fatrelu", got 1.0'),
        (["ffn", "--device", "toaster"], "--device: expected cpu, cuda or cuda:INDEX, got 'toaster'"),
        (["ffn", "--json", "."], ". is a folder: expected the name of a file"),
        (["ffn", "--csv", "/dev/null/x.csv"], "/dev/null/x.csv cannot be written"),
    ],
)
def test_requests_that_cannot_be_met(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = words if "--device" in words else [*words, "--device", "cpu"]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith("twell bench: error: ")
    assert message in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dance"], "argument OP: expected one of gate_pack, up_down, up_down_union, ffn"),
        (
            ["ffn", "--strategy", "row,best"],
            "argument --strategy: expected one of auto, dense, row, union, got 'best'",
        ),
        (["ffn", "-m", "0"], "argument -m/--tokens: expected an integer of at least 1, got 0"),
        (["--device", "cpu", "-k", "65"], "argument -k/--hidden: expected a multiple of 8 up to 16384, got 65"),
        (["train", "-n", "12"], "argument -n/--neurons: expected a multiple of 8 up to 65536, got 12"),
        (["ffn", "--activation", "gelu"], "argument --activation: invalid choice: 'gelu'"),
        (["ffn", "--dtype", "fp32"], "argument --dtype: invalid choice: 'fp32'"),
        (["ffn", "--seconds", "0"], "argument --seconds: expected a number above 0, got '0'"),
    ],
)
def test_bad_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
