"""profiling/host.py on CPU operators; how eager calls are timed, with a GPU that records; the profiled program."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from profiling import host, parallel
from profiling.bench import protocol
from profiling.bench.layers import module_of
from profiling.bench.protocol import Device, Gpu
from profiling.draw.common import loads
from profiling.nsight import profile_target
from twell import testing
from twell.commands import timing
from twell.commands.timing import Call, Recording

K, N = 64, 264


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"HIDDEN": K, "NEURONS": N, "MANY": 64, "FEW": 8, "SETTLING": 1}
    small["HOST_CALLS"] = ((host.FORWARD, 16), (host.ONE_THREAD, 32), (host.STEP, 32))
    small["LAYERS"] = {True: (((K, N),), (1, 8, 16)), False: (((32, N),), (8,))}
    for name, value in small.items():
        monkeypatch.setattr(host, name, value)
    monkeypatch.setattr(timing, "WARM_ROUNDS", 1)
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 2)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """A function that runs the program on the CPU: its exit status, its file, what it printed."""

    def call(*words: str) -> tuple[int, dict[str, Any], str]:
        path = tmp_path / "out.json"
        status = host.main(["--out", str(path), "--device", "cpu", "--seconds", "0.001", *words])
        return status, json.loads(path.read_text()), capsys.readouterr().out

    return call


def test_every_part_has_its_rows_and_its_table(run: Callable[..., Any]) -> None:
    status, data, said = run("--workload", "topic29", "nnz=9")
    assert status == 0
    assert data["complete"] is True
    assert data["machine"] == testing.machine_line("cpu")
    rows = data["rows"]
    fields = {"host": {"host"}, "replay": {"queued", "waited"}, "few": {"queued", "waited"}}
    for row in rows:
        assert row["red"] == ""
        timed = {way for way, (field, _) in host.FIELDS.items() if row[field]} - {"replay"}
        assert timed == fields[row["part"]]
        ratios = {way for way in timed if row[f"{way}_over_dense"]}
        assert ratios == (timed if row["layer"] != "dense" else set())
        assert bool(row["queued_over_replay"]) == bool(row["replay_queued_ms"]) == (row["part"] == "replay")
        # on a CPU
        assert row["chosen"] == ("dense" if row["layer"] in ("auto", "function") else "")
    kinds = dict.fromkeys((row["part"], row["what"], row["workload"], row["m"], row["k"], row["gated"]) for row in rows)
    assert list(kinds) == [
        ("host", "forward", "topic29", 16, K, True),
        ("host", "step, one thread", "topic29", 32, K, True),
        ("host", "step", "topic29", 32, K, True),
        *(("replay", what, name, 64, K, True) for name in ("topic29", "nnz=9") for what in ("forward", "step")),
        *(("few", "forward", "topic", m, K, True) for m in (1, 8)),
        ("few", "forward", "topic", 8, 32, False),
    ]
    layers = {
        what: [row["layer"] for row in rows if row["part"] == "host" and row["what"] == what]
        for what in ("forward", "step")
    }
    of_step = ["dense", "auto", "union", "function"]
    assert layers == {"forward": ["dense", "auto", "row", "union", "function"], "step": of_step}
    assert [caption in said for caption in host.CAPTIONS.values()] == [True] * 3
    assert "Of 3 points these take over 1.02 of dense's time: " in said
    assert said.endswith(f"{data['machine']}\n")


def test_a_kind_of_call_that_fails_is_red(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    measured = host.measured

    def fails(device: Any, base: host.Row, *rest: Any) -> list[host.Row]:
        if base.what == host.STEP:
            raise RuntimeError("no kernel")
        return measured(device, base, *rest)

    monkeypatch.setattr(host, "measured", fails)
    status, data, said = run("--parts", "host")
    assert status == 1
    assert [(row["what"], row["red"]) for row in data["rows"] if row["red"]] == [("step", "RuntimeError: no kernel")]
    assert "RED host: step, topic29, 32 x 64 x 264: RuntimeError: no kernel" in said
    assert {row["what"] for row in data["rows"] if row["host_us"]} == {"forward", "step, one thread"}


def test_a_layer_with_another_result_is_not_timed() -> None:
    problem = testing.integer_problem(16, K, N)
    layer, row = module_of(problem, "row"), host.Row("host", host.FORWARD, "w", "", 16, K, N)
    layers = {"dense": host.Dense(layer), "row": host.Dense(layer)}
    with torch.no_grad():
        layers["row"].up_proj.weight *= 1.05
    with pytest.raises(RuntimeError, match=r"row differs from dense by 4\.7%"):
        host.measured(Device(), row, layers, problem.x, {"host": 1}, 1e-3)


@pytest.mark.parametrize("what", [host.STEP, host.ONE_THREAD])
def test_a_step_has_all_gradients_and_leaves_none(what: str) -> None:
    """In "one thread" autograd runs without its own."""
    problem, threads, found = testing.integer_problem(16, K, N), [], []

    class Watched(host.Dense):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                # its result is compared first
                return super().forward(x)  # type: ignore[no-any-return]
            threads.append(torch.autograd.is_multithreading_enabled())
            for tensor in (x, *self.parameters()):
                assert tensor.grad is None
                tensor.register_post_accumulate_grad_hook(lambda t: found.append(t.shape))
            y: Tensor = super().forward(x)
            return y

    layer = Watched(module_of(problem, "union"))
    host.measured(Device(), host.Row("host", what, "", "", 16, K, N), {"dense": layer}, problem.x, {"host": 1}, 1e-3)
    assert set(threads) == {what == host.STEP}
    assert torch.autograd.is_multithreading_enabled()
    assert set(found) == {(16, K), (N, K), (K, N)}
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_a_ratio_is_the_median_of_those_of_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that becomes twice as slow in its last turns does not count as a slower layer."""
    times = {"queued dense": [1.0, 1.0, 2.0, 2.0, 2.0], "queued auto": [0.5, 0.5, 0.5, 1.0, 1.0]}
    times |= {"replay dense": [1.0] * 5, "replay auto": [0.4, 0.5, 0.5, 1.0, 1.0]}
    monkeypatch.setattr(host, "measure", lambda recordings, seconds: times)
    problem = testing.integer_problem(16, K, N)
    layer, row = module_of(problem, "auto"), host.Row("replay", host.FORWARD, "w", "", 16, K, N)
    layers = {"dense": host.Dense(layer), "auto": layer}
    _, auto = host.measured(Device(), row, layers, problem.x, {"queued": 1, "replay": 1}, 1.0)
    assert (auto.queued_ms, auto.replay_queued_ms) == (0.5, 0.5)
    assert (auto.queued_over_dense, auto.queued_over_replay) == (0.5, 1.0)


# Tables


def test_the_published_file_has_a_table(root: Path) -> None:
    rows = loads((root / "profiling/results/host.json").read_text())["rows"]
    assert len(host.tables(rows).splitlines()) >= len([row for row in rows if row.get("part") != "few"])


# Timing on a GPU


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a GPU: each call takes it 3 ms, and the host's clock goes on by 1 ms when it is read."""
    found: list[str] = []

    class Event:
        def record(self) -> None:
            found.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return 3.0 * found.count("call 1")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: found.append("wait"))
    monkeypatch.setattr(protocol, "events", lambda: (Event(), Event()))
    return found


def recording(log: list[str], way: str) -> Recording:
    def call(i: int) -> tuple[Tensor, ...]:
        log.append(f"call {i}")
        return ()

    made = Gpu(torch.device("cuda")).eager(way, call, 2)
    # each copy once, to load and allocate
    assert log == ["call 0", "call 1"]
    log.clear()
    return made


@pytest.mark.parametrize(
    ("way", "asked"),
    [
        # the GPU has a call when the host begins with the first one that counts
        ("queued", ["wait", "call 0", "event", "call 0", "call 1", "event"]),
        ("waited", ["wait", "call 0", "wait", "wait", "call 1", "wait"]),
        ("host", ["wait", "call 0", "call 1"]),
    ],
)
def test_eager_calls_on_a_gpu(log: list[str], way: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = recording(log, way)
    ticks = iter(range(100))
    monkeypatch.setattr(made, "_clock", lambda: next(ticks) / 1e3)
    span = made.replay()
    assert log == asked
    made.wait()
    # of both copies: by events, by the host for each call, by the host for all
    assert span() == pytest.approx({"queued": 3.0, "waited": 2.0, "host": 1.0}[way])


def test_replays_are_queued_as_calls_are(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def replay(self) -> None:
            log.append("replay")

    monkeypatch.setattr(testing, "captured", lambda call: (Graph(), call()))
    call: Call = lambda i: (torch.zeros(1),)  # noqa: E731
    made = host.recorded(Gpu(torch.device("cuda")), "replay", call, 2)
    log.clear()
    made.replay()
    assert log == ["wait", "replay", "event", "replay", "replay", "event"]


# The profiled program, and steps of several GPUs

TINY = ["--device", "cpu", "--m", "130", "--k", "64", "--n", "264", "--workload", "nnz=10,skew=1"]


def test_every_operator_runs(capsys: pytest.CaptureFixture[str]) -> None:
    every = ",".join((*profile_target.OPS, *profile_target.KERNELS))
    assert profile_target.main([every, *TINY, "--calls", "1", "--warm-up", "1"]) == 0
    said = f"profile_target: 1 call of {every.replace(',', ', ')}: nnz=10,skew=1, 130 tokens\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("loss", "norm", "red"), [(2.01, 1.04, ""), (2.03, 1.0, "loss"), (2.0, 1.06, "norm"), (2.0, math.nan, "norm")]
)
def test_a_step_of_several_gpus_with_another_loss_or_norm_is_red(loss: float, norm: float, red: str) -> None:
    dense, sparse = rows = [
        parallel.Row("ddp", f"{kind} eager", 2, 64, ms=ms) for kind, ms in (("dense", 3.0), ("sparse", 2.0))
    ]
    dense.loss, dense.norm, sparse.loss, sparse.norm = 2.0, 1.0, loss, norm
    parallel.compare(rows)
    assert sparse.red.startswith(red)
    assert bool(sparse.red) == bool(red)
    assert (dense.speedup, sparse.speedup) == (1.0, None if red else 1.5)
