"""``profiling.bench`` on the CPU operators: what each bench times, and that only right results have a time."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from profiling import figures, harness, readme
from profiling.bench import firing, host, layers, main, others, sae
from profiling.bench.float8 import Weights
from profiling.bench.layers import OPS
from profiling.device import Ceilings, Device
from profiling.harness import Variant, Way
from tests.cpu.test_bench_workloads import write_layer
from twell import testing
from twell.commands import timing
from twell.commands.timing import Call
from twell.nn.layers import SparseFFN

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
TINY = ["-m", "64", "-k", "64", "-n", "264"]
WORKLOAD = "nnz=9,skew=0.5"
# words of each bench, small
BENCHES = {
    "ffn": ["ffn,train,decode", *TINY, "--workload", "topic29", "--m-decode", "1,8", "--memory"],
    "moe": ["moe", "--shapes", "tiny", "--sequences", "1", "9", "--weights", "bfloat16", "e4m3"],
    "float8": ["float8", "--m", "3", "130", "--k", "64", "--n", "160"],
    "sae": ["sae", "--hidden", "64", "--neurons", "256", "--tokens", "300", "--nonzeros", "8", "--top-k", "8"],
    "firing": ["firing", "--m", "1", "16"],
    "host": ["host"],
    "adapters": ["adapters", "--m", "64", "--k", "64", "--n", "264", "--workload", "nnz=9", "--compile", "none"],
    "portable": ["portable", "--m", "130", "--sizes", "64", "264", "--workload", "nnz=9"],
    "generate": [
        *("generate", "--model", "2x64x256x2x256", "--nnz", "8", "--prompts", "1", "--prompt", "128"),
        *("--new", "3", "--rounds", "1", "--sequences", "2", "--caches", "eager"),
    ],
}
# the variants of each bench, in order, of its first case
VARIANTS = {
    "ffn": ["dense eager", "ffn"],
    "moe": ['"row"', '"dense"', '"auto"', 'e4m3 "row"', 'e4m3 "dense"', 'e4m3 "auto"'],
    "float8": ["dense fp8, one product", "dense fp8, two products", "bfloat16 dense", '"row"', '"union"', '"dense"'],
    "sae": ["dense eager", '"row"', '"union"', '"auto"', '"union+screen"'],
    "host": ["dense", "auto", "row", "union", "function"],
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay as few times as possible, and make layers small."""
    monkeypatch.setattr(timing, "WARM_ROUNDS", 1)
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(layers, "CALLS", 2)
    monkeypatch.setattr(firing, "LAYERS", ((64, 256, False), (64, 256, True)))
    small: dict[str, Any] = {"HIDDEN": 64, "NEURONS": 264, "FEW": 8}
    small["HOST_CALLS"] = ((host.FORWARD, 16), (host.ONE_THREAD, 32), (host.STEP, 32))
    small["LAYERS"] = {True: (((64, 264),), (1, 8, 16)), False: (((32, 264),), (8,))}
    for name, value in small.items():
        monkeypatch.setattr(host, name, value)


class Result(NamedTuple):
    code: int
    rows: list[dict[str, Any]]
    data: dict[str, Any]
    out: str
    err: str


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return a function that runs the command and reads its output. Later options win."""

    def run(*words: str) -> Result:
        path = tmp_path / "out.json"
        path.unlink(missing_ok=True)
        code = main([*words, "--device", "cpu", "--seconds", "0.001", "--out", str(path)])
        captured = capsys.readouterr()
        data = json.loads(path.read_text()) if path.exists() else {"rows": []}
        return Result(code, data["rows"], data, captured.out, captured.err)

    return run


def time_of(row: dict[str, Any]) -> Any:
    return row.get("ms") or row.get("us") or row.get("host_us") or row.get("queued_ms")


# the tables of each bench
TABLES: dict[str, Callable[[], str]] = {
    "moe": readme.experts,
    "sae": readme.autoencoders,
    "firing": figures.few_by_share,
    "host": figures.host_times,
    "adapters": readme.adapters,
    "portable": readme.portable_calls,
    "float8": lambda: readme.e4m3_speed("float8"),
    "generate": readme.generate,
}


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_has_checked_and_timed_rows(
    name: str, bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fields of files that were published are those of new ones: tables are made of them."""
    found = bench(*BENCHES[name])
    assert (found.code, [row["red"] for row in found.rows if row["red"]]) == (0, []), found.out
    assert found.data["machine"] == testing.machine_line("cpu")
    assert found.data["machine"] in found.out
    assert found.data["complete"] is True
    for row in found.rows:
        times = time_of(row)
        assert all(each > 0 for each in (times.values() if isinstance(times, dict) else [times]))
    if name in VARIANTS:
        names = [row.get("variant", row.get("layer")) for row in found.rows]
        assert names[: len(VARIANTS[name])] == VARIANTS[name]
    rows = found.rows
    if name == "moe":
        # grouped products need a GPU
        rows = [row | {"over_grouped": 1.0} for row in rows if not row["variant"].startswith("e4m3")]
        rows += [row | {"variant": "grouped products"} for row in rows if row["variant"] == '"auto"']
    if name == "sae":
        rows = [row | {"peak_bytes": 1} for row in rows]
        rows += [row | {"variant": "dense compiled"} for row in rows if row["variant"] == "dense eager"]
    for module in (figures, readme):
        monkeypatch.setattr(module, "result", lambda _: found.data | {"rows": rows})
    monkeypatch.setattr(figures, "HOST_LAYERS", ((64, 264),))
    if name in TABLES:
        # rows of a table, or a sentence with figures
        assert len(re.findall(r"(?m)^\| | \d+\.\d\d", TABLES[name]())) >= 2


def test_calls_for_a_profiler_have_no_times(bench: Callable[..., Result]) -> None:
    result = bench("ffn,train", *TINY, "--workload", WORKLOAD, "--strategy", "row", "--profile", "2")
    for row in result.rows:
        assert_no_speed(row)


@pytest.mark.parametrize("name", ["quack", "paper"])
def test_layers_of_others_are_checked_and_timed(
    name: str, bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they can be imported: by stand-ins that have their entry points."""

    def mlp(x: Tensor, first: Tensor, second: Tensor, activation: str) -> Tensor:
        gate, up = (x @ first.t()).unflatten(-1, (-1, 2)).unbind(-1)
        assert activation == "reglu"
        return (gate.relu() * up) @ second.t()

    def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor]:
        return (((x @ gate.t()).relu() * (x @ up.t())) @ down,)

    class Published:
        def __init__(self, layer_number: int, GATE: Tensor, UP: Tensor, DOWN: Tensor, ext: None) -> None:
            self.weights = GATE, UP, DOWN

        def __call__(self, x: Tensor) -> Tensor:
            return gated(x[None], *self.weights)[0][0] * (1 if len(calls) else 1.5)

    calls = [1]
    modules = {
        "quack.mlp": SimpleNamespace(mlp_func=mlp),
        "custom_models": SimpleNamespace(),
        "custom_models.twell_modules.twell": SimpleNamespace(TwELLGatedMLP=Published),
        "custom_models.hybrid_modules.sparse_ops_loader": SimpleNamespace(load_sparse_ops=lambda: None),
    }
    monkeypatch.setattr(
        others, "imported", lambda one: modules[one] if one.startswith(name[:3].replace("pap", "cus")) else None
    )
    monkeypatch.setattr(torch.ops, "sparse_ops", SimpleNamespace(ff_forward_gated=gated), raising=False)
    words = ("ffn,train", *TINY, "--workload", WORKLOAD, "--strategy", "row")
    rows = {row["variant"]: row for row in bench(*words).rows}
    for variant in (name, f"{name} train"):
        assert rows[variant]["red"] == ""
        assert rows[variant]["queued_ms"] > 0
        # the published code launches on the default stream
        assert bool(rows[variant]["ms"]) == (name == "quack")
    if name == "paper":
        calls.clear()
        wrong = next(row for row in bench(*words).rows if row["variant"] == name)
        assert "differs from" in wrong["red"]
        assert_no_speed(wrong)


def test_layers_by_every_strategy(bench: Callable[..., Result]) -> None:
    words = ("--workload", WORKLOAD, "--strategy", "row,union,dense,auto,union+screen", "--m-decode", "1,8")
    result = bench(",".join(OPS), *TINY, *words)
    assert result.code == 0, result.out
    for row in result.rows:
        assert row["p10_ms"] <= row["ms"] <= row["p90_ms"]
        assert row["floor_ms"] > 0
        # eager calls of the whole layer alone, beside dense's
        assert [bool(row.get(f"{way}_ms")) for way in ("queued", "waited")] == ["decode" not in row["variant"]] * 2
        assert (row["k"], row["n"], row["m"], row["workload"]) == (64, 264, 64, WORKLOAD)
    ours = [row for row in result.rows if row["variant"] in OPS]
    for row in ours:
        assert row["frobenius"] <= 1.1 * row["dense_frobenius"]
        assert row["speedup_dense"] > 0
        assert row["faster_dense"].startswith("dense eager")
    ran = {(row["variant"], row["tokens"], row["requested"], row["strategy"]) for row in ours}
    named = {
        ("row", "row"),
        ("union", "union"),
        ("dense", "dense"),
        ("auto", "dense"),
        ("union+screen", "union+screen"),
    }
    # "row" and "union" train alike; the pattern fits, so nothing overflows
    steps = {("train", 64, *each) for each in named - {("row", "row")}}
    assert ran == {(op, m, *each) for op, m in (("ffn", 64), ("decode", 1), ("decode", 8)) for each in named} | steps
    assert (result.data["arguments"]["workload"], result.data["arguments"]["ops"]) == ([WORKLOAD], list(OPS))
    assert result.data["ceilings"].keys() == {"tflops", "memory_tbs"}


def test_a_recorded_layer_is_timed_with_its_own_sizes(bench: Callable[..., Result], tmp_path: Path) -> None:
    write_layer(tmp_path, 5)
    result = bench("ffn", "--workload", f"real:{tmp_path}", "--tokens", "16,130", "24")
    assert {(row["workload"], row["k"], row["n"]) for row in result.rows} == {("real5", 16, 24)}
    assert {row["tokens"] for row in result.rows} == {16, 130, 24}
    assert result.data["arguments"]["m"] == [16, 130, 24]


# Wrong results


def assert_no_speed(row: dict[str, Any]) -> None:
    names = ("ms", "us", "speedup_dense", "queued_ms", "waited_ms", "queued_speedup", "samples")
    assert {name: row[name] for name in names if row.get(name) is not None} == {}


def test_what_eager_calls_run_instead_is_checked(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls of few tokens count the host and may run dense, where a graph of the same call does not."""
    chosen = [SimpleNamespace(graph=graph, strategy=name) for graph, name in (("", "union"), ("captured", "row"))]
    monkeypatch.setattr("twell.AutoStrategy.explain", lambda site: chosen)
    forward, ran = SparseFFN.forward, []

    def wrong(layer: SparseFFN, x: Tensor) -> Any:
        ran.append(layer.strategy)
        return forward(layer, x) * (1 + 2 * (layer.strategy == "union"))

    monkeypatch.setattr(SparseFFN, "forward", wrong)
    (ours,) = (row for row in bench("ffn", *TINY, "--workload", WORKLOAD).rows if row["variant"] == "ffn")
    assert (ours["strategy"], ours["eager_strategy"]) == ("row", "union")
    assert {"row", "union"} <= {each for each in ran if isinstance(each, str)}
    assert ours["red"].endswith("times dense")
    assert_no_speed(ours)


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
    words = ("--workload", WORKLOAD, "--strategy", "row,union", "--m-decode", "4")
    result = bench("ffn,decode,train", *TINY, *words)
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
    assert len([line for line in result.out.splitlines() if "RED" in line]) == 3


def test_a_wrong_dense_layer_is_no_baseline(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense layer that torch.compile compiles is checked like the sparse ones."""
    dense = testing.dense_output
    monkeypatch.setattr(layers, "compiled", lambda mode: lambda p, **form: 1.05 * dense(p, **form))
    result = bench("ffn", *TINY, "--workload", WORKLOAD)
    assert result.code == 1
    assert {row["variant"] for row in result.rows if row["red"]} == {"dense compiled"}
    (ours,) = (row for row in result.rows if row["variant"] == "ffn")
    assert ours["faster_dense"] == "dense eager"


def test_a_replay_with_other_bits_is_red(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = SparseFFN.forward

    def drifting(layer: SparseFFN, x: Tensor) -> Any:
        calls.append(1)
        y = right(layer, x)
        y[0, 0] = torch.nextafter(y[0, 0], torch.tensor(9.0).to(y)) if len(calls) > 2 else y[0, 0]
        return y

    monkeypatch.setattr(SparseFFN, "forward", drifting)
    result = bench("ffn", *TINY, "--workload", WORKLOAD, "--strategy", "row")
    assert [row["red"] for row in result.rows] == ["", "a replayed recording gives other bits"]


def raising(error: BaseException) -> Callable[..., Any]:
    def fails(*operands: Any, **options: Any) -> Any:
        raise error

    return fails


def test_a_fault_while_timing_costs_all_times(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """The culprit is unknown, in the second kind of eager calls, too."""
    calls, measure = [], harness.measure

    def last(recordings: Any, *rest: Any) -> Any:
        calls.append(recordings)
        return measure(recordings, *rest) if len(calls) < 3 else raising(RuntimeError("an illegal memory access"))()

    monkeypatch.setattr(harness, "measure", last)
    result = bench("ffn", *TINY, "--workload", WORKLOAD, "--strategy", "row")
    assert [row["red"] for row in result.rows] == ["RuntimeError: an illegal memory access"] * 2
    for row in result.rows:
        assert_no_speed(row)


def test_an_error_is_red_and_the_others_go_on(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload that fails is one row, an operator that fails is that of its strategy."""
    make = testing.make

    def fails(workload: Any, *rest: Any, **options: Any) -> testing.FFN:
        if workload.nnz == 7:
            raise torch.OutOfMemoryError("out of memory")
        return make(workload, *rest, **options)

    monkeypatch.setattr(testing, "make", fails)
    monkeypatch.setattr(SparseFFN, "forward", raising(NotImplementedError("no\nsuch   kernel")))
    result = bench("ffn", *TINY, "--workload", "nnz=7", "nnz=8", "--strategy", "row,auto")
    assert result.code == 1
    first, *others = result.rows
    assert (first["workload"], first["variant"], first["tokens"]) == ("nnz=7", "any", 64)
    assert first["red"] == "OutOfMemoryError: out of memory"
    reds = {row["requested"]: row["red"] for row in others if row["red"]}
    assert reds == dict.fromkeys(("row", "auto"), "NotImplementedError: no such kernel")
    assert [bool(row["ms"]) for row in others] == [not row["red"] for row in others]


def test_ctrl_c_leaves_what_was_measured(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = testing.make

    def interrupted(workload: Any, *rest: Any, **options: Any) -> testing.FFN:
        if workload.nnz == 8:
            raise KeyboardInterrupt
        return make(workload, *rest, **options)

    monkeypatch.setattr(testing, "make", interrupted)
    result = bench("ffn", *TINY, "--workload", "nnz=7", "nnz=8", "nnz=9")
    assert result.code == 130
    assert {row["workload"] for row in result.rows} == {"nnz=7"}
    assert result.data["complete"] is False
    assert result.data["machine"] in result.out
    assert "profiling.bench: interrupted" in result.err
    # an interrupt before the first measurement leaves an older file alone
    path = tmp_path / "old.json"
    path.write_text("old")
    assert main(["ffn", "--workload", "nnz=8", *TINY, "--device", "cpu", "--json", str(path)]) == 130
    assert path.read_text() == "old"


def test_a_file_that_cannot_be_written_costs_no_measurement(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("twell.base.files.write_text", full)
    result = bench("ffn", *TINY, "--workload", "nnz=7", "nnz=9")
    assert result.code == 2
    # said once
    assert result.err.count("out.json cannot be written: no space left") == 1
    assert " nnz=9 " in result.out


def test_files_are_json(tmp_path: Path) -> None:
    harness.write_json(tmp_path / "x.json", [{"ms": math.inf, "us": {"a": math.nan}}], machine="m")
    text = (tmp_path / "x.json").read_text()
    rows = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["rows"]
    assert rows == [{"ms": None, "us": {"a": None}}]


# Memory, copies and eager calls


class Known(Device):
    def peak(self, call: Call) -> int | None:
        call(0)
        return 4096

    def kept(self, forward: Callable[[int], Tensor]) -> int | None:
        forward(0)
        return 1024


@pytest.mark.parametrize("memory", [False, True])
def test_memory_is_measured_for_training_and_on_request(
    memory: bool, bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "Device", Known)
    words = [*TINY, "--workload", WORKLOAD, "--m-decode", "2", *(["--memory"] if memory else [])]
    found = bench("ffn,decode,train", *words).rows
    steps = {"train", "dense eager train"}
    assert {row["variant"] for row in found if row.get("kept_bytes") == 1024} == steps
    peaks = {row["variant"] for row in found if row.get("peak_bytes") == 4096}
    assert peaks == ({row["variant"] for row in found} if memory else steps)


@torch.no_grad()
@pytest.mark.parametrize("cache", [0, 1_000_000])
def test_decode_leaves_no_gate_in_the_cache(monkeypatch: pytest.MonkeyPatch, cache: int) -> None:
    """A sparse call reads the gate's weight and a few rows of the others."""
    monkeypatch.setattr(layers, "CALLS", 32)

    class Cached(Device):
        def copies_for(self, bytes_each: int) -> int:
            return timing.copies_for(bytes_each, cache)

    stand_in: Any = SimpleNamespace(given={"memory": False}, device=Cached(), ceilings=Ceilings(1e12, 1e11))
    problem = testing.pattern_problem(torch.ones(64, 64, dtype=torch.int64), 64)
    ((_, forward),) = layers.few_tokens(layers.Layer(problem, stand_in, None), [8])
    gates = [weights.w_gate for weights in forward.weights]
    assert len({gate.data_ptr() for gate in gates}) == len(gates)
    assert sum(gate.numel() * gate.element_size() for gate in gates) >= 2 * cache
    for variant in forward.variants("decode", ["row"]):
        assert variant.copies >= 32
        # each copy is visited as often as the others
        assert variant.copies % len(gates) == 0


@pytest.mark.parametrize("what", [host.STEP, host.ONE_THREAD])
def test_a_step_has_all_gradients_and_leaves_none(
    what: str, bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In "one thread" autograd runs without its own."""
    threads, found = [], []
    plain = host.Dense.forward

    def watched(layer: host.Dense, x: Tensor) -> Any:
        if torch.is_grad_enabled():
            threads.append(torch.autograd.is_multithreading_enabled())
            for tensor in (x, *layer.parameters()):
                assert tensor.grad is None
                tensor.register_post_accumulate_grad_hook(lambda t: found.append(tuple(t.shape)))
        return plain(layer, x)

    monkeypatch.setattr(host.Dense, "forward", watched)
    monkeypatch.setattr(host, "HOST_CALLS", ((what, 16),))
    assert bench("host", "--parts", "host").code == 0
    assert set(threads) == {what == host.STEP}
    assert torch.autograd.is_multithreading_enabled()
    assert set(found) == {(16, 64), (264, 64), (64, 264)}


def test_a_ratio_is_the_median_of_those_of_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that becomes twice as slow in its last turns does not count as a slower layer."""
    times = {"dense": [1.0, 1.0, 2.0, 2.0, 2.0], "ours": [0.5, 0.5, 0.5, 1.0, 1.0]}
    monkeypatch.setattr(harness, "measure", lambda recordings, *rest: times)
    variants = [Variant(name, lambda _: lambda i: (torch.zeros(1),), 1) for name in times]
    _, ours = harness.timed({}, variants, [Way("queued", "ms", "over")], Device(), 1.0)
    assert (ours["ms"], ours["over"]) == (0.5, 2.0)


# e4m3 and autoencoders


def test_dense_products_copy_no_weight() -> None:
    """A copy at each call would make the baseline slow."""
    layer = Weights(testing.make("topic29", m=8, k=64, n=160, device=CPU))
    assert all(record.values.is_contiguous() for record in (layer.gate, layer.up, layer.stored))
    assert layer.both[0].is_contiguous()
    # as kernels read it
    assert layer.down.values.t().is_contiguous()


def test_a_wrong_layer_in_e4m3_has_no_time(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    right = Weights.sparse
    monkeypatch.setattr(Weights, "sparse", lambda self, x, strategy: right(self, x, strategy) * 1.2)
    monkeypatch.setattr(Weights, "wide", lambda self, x, strategy: 1 / 0)
    found = bench("float8", "--m", "16", "--k", "64", "--n", "160")
    assert found.code == 1
    rows = {row["variant"]: row for row in found.rows}
    assert_no_speed(rows['"row"'])
    assert rows['"row"']["red"].startswith("y: error 2")
    assert rows['bfloat16 "row"']["red"].startswith("ZeroDivisionError")
    assert rows["bfloat16 dense"]["us"] > 0


DRAWN = {"m": 600, "k": 64, "nonzeros": 8.0, "top_k": 8}


def test_autoencoders_fire_as_asked() -> None:
    counts = {}
    for pattern in sae.PATTERNS:
        o = sae.draw(pattern, 2048, CPU, **DRAWN)
        pre = ((o.x - o.b_dec) @ o.w_enc.t()).detach()
        assert float(pre.float().std()) == pytest.approx(1, abs=0.02)
        counts[pattern] = sae.codes(o).sum(0)
        assert float(counts[pattern].sum()) / 600 == pytest.approx(8, rel=0.1)
    # the busiest hundredth of the neurons
    share: Any = {name: float(c.sort(descending=True).values[:20].sum() / c.sum()) for name, c in counts.items()}
    assert share["even"] < 0.05 < 0.3 < share["skewed"]


@pytest.mark.parametrize("pattern", sae.PATTERNS)
def test_a_wrong_autoencoder_does_not_agree(
    pattern: str, bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In y and in training, and dense PyTorch's choice among equal codes is none."""
    right = sae.sparse
    monkeypatch.setattr(sae, "sparse", lambda *given, **named: right(*given, **named) * 1.1)
    rows = bench(*BENCHES["sae"], "--patterns", pattern, "--strategies", "union").rows
    assert [bool(row["red"]) for row in rows] == [False, True] * 2
    assert_no_speed(rows[1])


def test_a_wrong_or_undefined_output_does_not_agree() -> None:
    right = torch.ones(4, 4), torch.ones(8)
    check, call = harness.agrees(lambda i: right, False), lambda i: right
    assert not check("", call, right)[1]
    for wrong in (1.03, math.nan, 0.0):
        # the last of several
        assert "differs from dense" in check("", call, (right[0], right[1] * wrong))[1]
