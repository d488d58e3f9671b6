"""profiling/sweep.py: its requests to bench, its files, resuming, Ctrl-C and red rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

MACHINE = "NVIDIA H200 (made up); SM {} MHz now, 1980 most; torch 2.11.0; kernels 0123456789ab; commit {}"


@pytest.fixture
def sweep(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(root / "profiling"))
    import sweep

    # the default folder of files
    monkeypatch.setattr(sweep, "RESULTS", tmp_path / "default")
    return sweep


class Bench:
    """A stand-in for profiling.bench that writes the requested rows; ``before(self, calls so far)`` may interfere."""

    def __init__(self, before: Callable[[Bench, int], None] = lambda bench, count: None) -> None:
        self.calls: list[list[str]] = []
        self.before = before
        self.red: set[str] = set()
        self.silent: set[str] = set()
        self.machine = MACHINE.format(1500, "abc")
        self.status = 0

    def __call__(self, argv: Sequence[str]) -> int:
        parser = argparse.ArgumentParser()
        parser.add_argument("op")
        parser.add_argument("--workload", nargs="+")
        parser.add_argument("-m", nargs="+", type=int)
        parser.add_argument("--m-decode", nargs="+", type=int)
        parser.add_argument("--strategy")
        parser.add_argument("--json", type=Path)
        asked, _ = parser.parse_known_args(argv)
        self.calls.append(list(argv))
        rows: list[dict[str, Any]] = []
        try:
            self.before(self, len(self.calls))
            for workload in asked.workload:
                if workload in self.silent:
                    continue
                name = f"real{workload.rpartition('/')[2]}" if workload.startswith("real:") else workload
                for m in asked.m_decode or asked.m:
                    known = {"workload": name, "tokens": m, "nnz": 1.0, "ms": 1.0, "red": "", "strategy": ""}
                    rows.append(known | {"variant": "dense eager", "requested": ""})
                    for strategy in asked.strategy.split(","):
                        red = "wrong" if workload in self.red else ""
                        found = {"variant": asked.op, "requested": strategy, "strategy": strategy, "speedup_dense": 2.0}
                        rows.append(known | found | {"red": red, "ms": None if red else 1.0})
        finally:
            data = {"machine": self.machine, "ceilings": {"tflops": 780.0}, "rows": rows}
            asked.json.write_text(json.dumps(data))
        return self.status or int(any(row["red"] for row in rows))


def run(sweep: Any, bench: Any, *words: object) -> int:
    status: int = sweep.main([str(word) for word in words], bench)
    return status


def read(folder: Path, name: str = "memory") -> Any:
    return json.loads((folder / f"h200_sweep_{name}.json").read_text())


def test_every_sweep_asks_for_its_points(sweep: Any, root: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    for layer in (0, 3):
        (real / f"layer{layer}.npz").touch()
    bench = Bench()
    words = ("--out", tmp_path, "--real", real, "--budget-s", 1e6)
    assert run(sweep, bench, *sweep.SWEEPS, *words) == 0
    for name in sweep.SWEEPS:
        data = read(tmp_path, name)
        assert data["complete"]
        assert data["sweep"] == name
        assert data["machine"] == bench.machine
        assert data["ceilings"] == {"tflops": 780.0}
        assert data["arguments"] == {"bench": ["--seconds", "0.3", "--compile", "default"]}
        assert {row["point"] for row in data["rows"]} == set(data["points"])
    rows = read(tmp_path, "nnz")["rows"]
    assert {row["pattern"] for row in rows} == {"uniform", "topic"}
    assert {row["requested"] for row in rows if row["variant"] == "ffn"} == {"row", "union", "auto", "dense"}
    counts = {row["workload"].split(",")[0] for row in rows if row["variant"] == "ffn"}
    assert counts == {f"nnz={nnz}" for nnz in (1, 2, 4, 8, 16, 29, 64, 128, 256, 512, 911, 2816, 5632)}
    tokens = {(row["variant"], row["tokens"]) for row in read(tmp_path, "m")["rows"]}
    assert {m for op, m in tokens if op == "decode"} == {1, 4, 16, 64, 128, 256}
    assert max(m for op, m in tokens if op == "ffn") == 131072
    layers = read(tmp_path, "layers")["rows"]
    assert {(row["layer"], row["workload"], row["source"]) for row in layers} == {
        (layer, f"real{layer}", "layers recorded in real") for layer in (0, 3)
    }
    assert all("--kernels" in call for call in bench.calls[-4:])


def test_a_sweep_resumes_where_it_stopped(sweep: Any, tmp_path: Path) -> None:
    words = ("memory", "-n", 64, "--out", tmp_path)
    first = Bench()
    # the first call fits, the second would begin too late
    first.before = lambda bench, count: setattr(sweep.time, "monotonic", lambda: 1e9)
    original = sweep.time.monotonic
    try:
        assert run(sweep, first, *words, "--budget-s", 60) == 0
    finally:
        sweep.time.monotonic = original
    assert len(first.calls) == 1
    before = read(tmp_path)
    assert not before["complete"]
    assert {row["variant"] for row in before["rows"]} == {"dense eager", "train"}
    second = Bench()
    second.machine = MACHINE.format(1700, "def")
    assert run(sweep, second, *words, "--budget-s", 60) == 0
    assert [call[0] for call in second.calls] == ["ffn"]
    after = read(tmp_path)
    assert after["complete"]
    assert after["machine"] == before["machine"]
    assert after["rows"][: len(before["rows"])] == before["rows"]
    third = Bench()
    assert run(sweep, third, *words) == 0
    assert third.calls == []


def test_ctrl_c_keeps_what_was_measured(sweep: Any, tmp_path: Path) -> None:
    def stop(bench: Bench, count: int) -> None:
        if count == 2:
            raise KeyboardInterrupt

    words = ("memory", "-n", 64, "--out", tmp_path)
    assert run(sweep, Bench(stop), *words) == 130
    assert {row["variant"] for row in read(tmp_path)["rows"]} == {"dense eager", "train"}

    # bench itself writes what it has, and returns 130
    def half(bench: Bench, count: int) -> None:
        bench.silent, bench.status = {w for w in bench.calls[-1] if w.startswith("nnz=64")}, 130

    assert run(sweep, Bench(half), *words) == 130
    points = read(tmp_path)["points"]
    assert sum(key.startswith("ffn") for key in points) == 3
    last = Bench()
    assert run(sweep, last, *words) == 0
    assert [word for word in last.calls[0] if word.startswith("nnz=")] == ["nnz=64,skew=1,tokens=0.5,topic=0.5"]
    assert read(tmp_path)["complete"]


def test_red_rows_are_told_and_measured_again(sweep: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("memory", "-n", 64, "--out", tmp_path)
    bench = Bench()
    bench.red = {"nnz=8,skew=1,tokens=0.5,topic=0.5"}
    assert run(sweep, bench, *words) == 1
    assert "RED wrong" in capsys.readouterr().out
    assert read(tmp_path)["complete"]
    again = Bench()
    assert run(sweep, again, *words) == 0
    assert [[word for word in call if word.startswith("nnz=")] for call in again.calls] == [[*bench.red]] * 2
    rows = read(tmp_path)["rows"]
    assert len(rows) == 16
    assert not any(row["red"] for row in rows)


def test_a_call_that_fails_costs_only_its_points(
    sweep: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(bench: Bench, count: int) -> None:
        if count == 1:
            raise RuntimeError("out of memory")

    assert run(sweep, Bench(fail), "memory", "-n", 64, "--out", tmp_path) == 1
    reds = {row["point"] for row in read(tmp_path)["rows"] if row["red"]}
    assert all(point.startswith("train") for point in reds)
    assert len(reds) == 4
    assert "out of memory" in capsys.readouterr().out
    # another machine's points are not mixed with these
    other = Bench()
    other.machine = other.machine.replace("H200", "H100")
    assert run(sweep, other, "memory", "-n", 64, "--out", tmp_path) == 2
    assert "another machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("layers",), "layers takes --real FOLDER, got none"),
        (("nnz", "layers", "--real", "."), "--real takes a folder of recorded layers"),
        (("layers", "--real", "a/real", "b/real"), "twice"),
        (("memory", "--out", "other"), "expected 'memory'"),
        (("memory", "--out", "broken"), "is no file of a sweep"),
    ],
)
def test_requests_that_make_no_sense(
    sweep: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a/real", "b/real", "other", "broken"):
        Path(folder).mkdir(parents=True)
    for folder in ("a", "b"):
        Path(folder, "real", "layer1.npz").touch()
    Path("other/h200_sweep_memory.json").write_text(json.dumps({"sweep": "nnz", "points": {}, "rows": []}))
    Path("broken/h200_sweep_memory.json").write_text("[1]")
    bench = Bench()
    assert run(sweep, bench, *words) == 2
    assert said in capsys.readouterr().err
    assert bench.calls == []


def test_bench_itself_on_the_cpu(sweep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags are those of profiling.bench, and charts can be drawn of what comes out."""
    size = ("-m", 64, "-k", 32, "-n", 64, "--seconds", 0.001, "--compile", "none", "--device", "cpu")
    # the named workloads that fit so few neurons; "auto" is dense on a CPU, and dense layers have no kernels to show
    monkeypatch.setattr(sweep, "NAMED", ("uniform29",))
    monkeypatch.setattr(sweep, "AUTO", ("--strategy", "row"))
    assert sweep.main(["kernels", *map(str, size), "--out", str(tmp_path)]) == 0
    rows = read(tmp_path, "kernels")["rows"]
    assert {row["variant"] for row in rows} == {"dense eager", "dense eager train", "ffn", "train"}
    pytest.importorskip("matplotlib")
    from profiling.draw import charts

    assert set(charts.kernels(charts.Results(tmp_path)).data) == {"ffn", "train"}
