"""Tables and files of benchmarks."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from profiling.bench import report
from profiling.bench.report import Column, print_table, write_json
from twell.commands.request import RequestError


@dataclass
class Result:
    name: str
    ms: float | None = None
    red: str = ""
    parts: dict[str, float] = field(default_factory=dict)


COLUMNS = (
    Column("name", lambda row: row.name, True),
    Column("ms", lambda row: "-" if row.ms is None else f"{row.ms:.2f}"),
    Column("empty", lambda row: "-"),
    Column("twice", lambda row: f"{2 * row.ms:.1f}"),
)
RESULTS = (
    Result("a [x]", 1.0),
    Result("long name", red="wrong by far, which is longer than any column"),
    Result("b", 12.5),
)


def test_tables_are_aligned_and_a_red_row_has_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(report.used(COLUMNS, RESULTS), RESULTS)
    assert capsys.readouterr().out.splitlines() == [
        "name          ms  twice",
        "a [x]       1.00    2.0",
        "long name  RED wrong by far, which is longer than any column",
        "b          12.50   25.0",
    ]


def test_json_holds_machine_arguments_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    arguments = argparse.Namespace(m=[1, 2], out=path, several=[path], name="x")
    found = [Result("a", math.inf, parts={"x": math.nan, "y": 1.5})]
    write_json(path, found, machine="a machine", arguments=arguments, ceilings={"l2": 7.3})
    data = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data.pop("date").endswith("+00:00")
    assert list(data) == ["machine", "arguments", "ceilings", "rows"]
    # paths of this machine are left out
    assert data["arguments"] == {"m": [1, 2], "name": "x"}
    assert data["rows"] == [{"name": "a", "ms": None, "red": "", "parts": {"x": None, "y": 1.5}}]
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def test_what_cannot_be_written_is_told_before_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    for path in (file / "x.json", Path("/proc/twell/x.json"), tmp_path):
        with pytest.raises(RequestError, match=r"cannot be written|is a folder"):
            report.require_writable(path)
    for good in (tmp_path / "new" / "x.json", None, file):
        report.require_writable(good)
    assert file.read_text() == "old"
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_that_cannot_be_written_costs_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError("no space left")

    run = report.Run("bench", tmp_path / "x.json", lambda: {"machine": "m", "arguments": {}})
    with monkeypatch.context() as patched:
        patched.setattr("twell._files.write_text", full)
        run.add([Result("a", 1.0)])
        run.measure(lambda: run.add([Result("b", 2.0)]))
    # said once
    assert capsys.readouterr().err.count("x.json cannot be written: no space left") == 1
    assert run.status() == 2
    run.add([Result("c", red="wrong")])
    assert (run.status(), len(json.loads((tmp_path / "x.json").read_text())["rows"])) == (1, 3)
