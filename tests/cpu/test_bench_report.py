"""Tables, files and progress of benchmarks."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from profiling.bench import report
from profiling.bench.report import Column, print_table, write_csv, write_json
from twell.commands.request import RequestError


@dataclass
class Result:
    name: str
    ms: float | None = None
    red: str = ""
    parts: dict[str, float] = field(default_factory=dict)


COLUMNS_OF_RESULTS = (
    Column("name", lambda row: row.name, True),
    Column("ms", lambda row: f"{row.ms:.2f}"),
    Column("twice", lambda row: f"{2 * row.ms:.1f}"),
)
RESULTS = (
    Result("a [x]", 1.0),
    Result("long name", red="wrong by far, which is longer than any column"),
    Result("b", 12.5),
)


def printed(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, columns: Sequence[Column], found: Sequence[Any]
) -> str:
    monkeypatch.setattr(sys, "stdout", stream)
    print_table(columns, found, title="what it is")
    return stream.getvalue()


def test_text_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, io.StringIO(), COLUMNS_OF_RESULTS, RESULTS).splitlines() == [
        "what it is",
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
    assert data["machine"] == "a machine"
    assert data["ceilings"] == {"l2": 7.3}
    # paths of this machine are left out
    assert data["arguments"] == {"m": [1, 2], "name": "x"}
    assert data["rows"] == [{"name": "a", "ms": None, "red": "", "parts": {"x": None, "y": 1.5}}]
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    write_json(path, [Result("a")], machine="m", arguments={})
    before = path.read_text()

    def interrupted(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, [Result("b")], machine="m", arguments={})
    assert path.read_text() == before


def test_what_cannot_be_written_is_told_before_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    for path in (file / "x.csv", Path("/proc/twell/x.csv"), Path("/proc/x.csv"), tmp_path):
        with pytest.raises(RequestError, match=r"cannot be written|is a folder"):
            report.require_writable([path])
    with pytest.raises(RequestError, match="both write"):
        report.require_writable([file, None, file])
    report.require_writable([tmp_path / "new" / "x.csv", None, file, Path("-")])
    assert file.read_text() == "old"
    assert [path.name for path in (tmp_path / "new").iterdir()] == []


def test_a_failure_to_write_is_told_once_and_forgotten_when_it_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path) -> None:
        raise OSError("no space left")

    writer = report.Writer(tmp_path / "x.csv", None, name="profiling.bench")
    writer.save(False, full)
    writer.save(False, full)
    assert capsys.readouterr().err.count("x.csv cannot be written: no space left") == 1
    writer.save(True, lambda path: write_csv(path, [Result("a")]))
    assert writer.failure == ""


def test_csv_holds_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "file.csv"
    found = [Result("a, b", 1.5, parts={"x": 2.0}), Result("c", red='says "no"')]
    write_csv(path, found)
    with path.open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"name": "a, b", "ms": "1.5", "red": "", "parts": '{"x": 2.0}'},
            {"name": "c", "ms": "", "red": 'says "no"', "parts": "{}"},
        ]
    write_csv(Path("-"), found)
    assert capsys.readouterr().out == path.read_text()
    write_csv(path, [])
    assert path.read_text() == "\n"
