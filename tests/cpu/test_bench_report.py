"""Tables, files and progress of benchmarks."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from twell.commands.bench import cli, report, rows
from twell.commands.bench.report import Column, Progress, print_table, write_csv, write_json
from twell.commands.bench.rows import COLUMNS, LayerRow, fitting
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_text_without_rich_is_the_same_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = printed(monkeypatch, io.StringIO(), COLUMNS_OF_RESULTS, RESULTS)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert printed(monkeypatch, Terminal(), COLUMNS_OF_RESULTS, RESULTS) == plain


def test_a_red_row_needs_no_column_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, io.StringIO(), COLUMNS_OF_RESULTS[1:], RESULTS)
    assert text.splitlines()[2:4] == [" 1.00    2.0", "RED wrong by far, which is longer than any column"]
    text = printed(monkeypatch, io.StringIO(), COLUMNS_OF_RESULTS[:1], RESULTS)
    assert text.splitlines()[3] == "long name  RED wrong by far, which is longer than any column"


@pytest.mark.parametrize("width", [20, 200])
def test_terminal_shows_every_figure(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(width))
    text = printed(monkeypatch, Terminal(), COLUMNS_OF_RESULTS, RESULTS)
    for part in ("what it is", "a [x]", "long name", "12.50", "25.0", "RED", RESULTS[1].red):
        assert part in text, text
    # and nothing of what a red row did not measure
    assert "None" not in text


@pytest.mark.parametrize("columns", [COLUMNS_OF_RESULTS[:1], COLUMNS_OF_RESULTS[1:]])
def test_terminal_takes_any_columns(monkeypatch: pytest.MonkeyPatch, columns: Sequence[Column]) -> None:
    pytest.importorskip("rich")
    assert RESULTS[1].red in printed(monkeypatch, Terminal(), columns, RESULTS)


def test_a_dumb_terminal_shows_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    wide = (*COLUMNS_OF_RESULTS, *(Column(f"column {i}", lambda row: "123456789") for i in range(20)))
    text = printed(monkeypatch, Terminal(), wide, RESULTS[:1])
    assert text.count("123456789") == 20


def test_width_is_that_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, io.StringIO(), COLUMNS_OF_RESULTS, [RESULTS[0], RESULTS[2]]).splitlines()
    assert report.table_width(COLUMNS_OF_RESULTS, [RESULTS[0], RESULTS[2]]) == max(map(len, lines[1:]))
    # a reason is as long as it is
    assert report.table_width(COLUMNS_OF_RESULTS, RESULTS) == len("long name  12.50  twice")


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    arguments = argparse.Namespace(m=[1, 2], out=path, several=[path], name="x")
    found = [Result("a", math.inf, parts={"x": math.nan, "y": 1.5})]
    write_json(path, found, machine="a machine", arguments=arguments, ceilings={"l2": 7.3})
    data = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data.pop("date").endswith("+00:00")
    assert list(data) == ["machine", "arguments", "ceilings", "rows"]
    assert data["machine"] == "a machine"
    assert data["ceilings"] == {"l2": 7.3}
    # the paths of a machine are its own
    assert data["arguments"] == {"m": [1, 2], "name": "x"}
    assert data["rows"] == [{"name": "a", "ms": None, "red": "", "parts": {"x": None, "y": 1.5}}]
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def test_json_takes_a_dictionary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(Path("-"), [], machine="m", arguments={"a": 1})
    assert json.loads(capsys.readouterr().out)["arguments"] == {"a": 1}


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


def test_a_link_leads_to_the_file_as_before(tmp_path: Path) -> None:
    path, link = tmp_path / "file.csv", tmp_path / "link.csv"
    link.symlink_to(path)
    write_csv(link, [Result("a")])
    assert link.is_symlink()
    assert "a" in path.read_text()


def test_a_pipe_stays_one_and_is_written_at_the_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    report.require_writable([pipe])
    writer = report.Writer(pipe, name="test")
    for name in ("a", "b"):
        writer.save(False, lambda path: write_csv(path, [Result("too early")]))
        assert not read, name
    writer.save(True, lambda path: write_csv(path, [Result("last")]))
    reader.join(10)
    assert "last" in read[0]
    assert "early" not in read[0]
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


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

    writer = report.Writer(tmp_path / "x.csv", None, name="twell bench")
    writer.save(False, full)
    writer.save(False, full)
    assert capsys.readouterr().err.count("x.csv cannot be written: no space left") == 1
    writer.save(True, lambda path: write_csv(path, [Result("a")]))
    assert writer.failure == ""


def test_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_progress_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2) as progress:
        progress.step("first")
        progress.note("not shown")
        progress.step("second")
    with Progress(name="other") as progress:
        progress.step("only")
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["twell bench: 1/2 first", "twell bench: 2/2 second", "other: only"]
    assert captured.out == ""


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(2) as progress:
        progress.step("first")
        progress.note("checks")
        progress.step("second")
    text = terminal.getvalue()
    assert all(part in text for part in ("first", "first: checks", "second"))
    assert capsys.readouterr().out == ""


def full_row(**fields: Any) -> LayerRow:
    """A row that has something in every column."""
    row = LayerRow("topic29", "gate_pack", 29.1, 3.0, tokens=16384, requested="auto", strategy="union")
    row.ms, row.p10_ms, row.p90_ms, row.tflops, row.executed_tflops = 1.2345, 1.2, 1.3, 900.0, 364.3
    row.l2_gather_gbs, row.floor_share, row.over_gemm = 7123.0, 0.91, 0.951
    row.speedup_eager, row.speedup_compiled, row.speedup_dense, row.faster_dense = 1.7, 1.6, 1.6, "compiled"
    row.frobenius, row.dense_frobenius, row.worst_row, row.dense_worst_row = 1e-3, 1.1e-3, 2e-3, 2e-3
    row.kept_bytes, row.peak_bytes, row.energy_mj, row.idle_mj, row.energy_dense = 17_000_000, 10**9, 0.04, 0.01, 1.5
    for name, value in fields.items():
        setattr(row, name, value)
    return row


def shown(row: LayerRow) -> dict[str, str]:
    return {column.name: column.cell(row) for column in COLUMNS}


def test_cells() -> None:
    cells = shown(full_row())
    assert " | ".join(cells.values()) == (
        "topic29 | 16384 | 29.1 | gate_pack | auto: union | 1.2345 ms | 1.200-1.300 | 900 | 364 | 7.12 | 91% | 0.951 | "
        "1.70 | 1.60 | 1.60 compiled | 0.91 | 1.00 | 17.0 | 1000.0 | 0.0400 | 0.0300 | 1.50"
    )
    few = shown(
        full_row(ms=0.0123, p10_ms=0.0121, p90_ms=0.0129, memory_gbs=4200.0, tflops=3.14, executed_tflops=0.021)
    )
    assert few["time"] == "12.3 us"
    assert few["p10-p90"] == "12.1-12.9"
    assert few["TB/s"] == "4.20"
    assert few["TFLOP/s"] == "3.1"
    assert few["executed"] == "0.021"


def test_what_is_not_known_is_a_dash() -> None:
    cells = shown(LayerRow("w", "v", 1.0, 0.0))
    assert {cells[name] for name in list(cells)[4:]} == {"-"}


def test_unchecked_rows_say_so() -> None:
    cells = shown(full_row(checked=False))
    assert cells["error"] == cells["worst"] == "unchecked"


def test_every_column_is_explained() -> None:
    assert all(column.help for column in COLUMNS)
    assert len({column.name.lower() for column in COLUMNS}) == len(COLUMNS)
    assert set(rows.EXPENDABLE) < {column.name for column in COLUMNS}


def test_a_table_fits() -> None:
    found = [
        full_row(),
        full_row(workload="nnz=29.5,skew=1,tokens=0.5,dead=0.3,topic=0.5", variant="dense eager train"),
    ]
    columns, dropped = fitting(found)
    assert report.table_width(columns, found) <= rows.TABLE_WIDTH
    assert dropped == list(rows.EXPENDABLE[: len(dropped)])
    assert dropped
    kept = [column.name for column in columns]
    # what a benchmark is about stays
    assert {"workload", "variant", "time", "executed", "TB/s", "floor", "eager/t", "compiled/t", "error"} <= set(kept)
    assert fitting(found, width=10_000) == (list(COLUMNS), [])


def test_what_was_asked_for_is_not_left_out() -> None:
    found = [full_row(workload="nnz=29.5,skew=1,tokens=0.5,dead=0.3,topic=0.5")]
    columns, dropped = fitting(found, kept=cli.MEMORY + cli.ENERGY)
    assert set(cli.MEMORY + cli.ENERGY) <= {column.name for column in columns}
    assert "p10-p90" in dropped


def test_columns_that_say_nothing_are_left_out() -> None:
    row = full_row(kept_bytes=None, peak_bytes=None, energy_mj=None, idle_mj=None, energy_dense=None, over_gemm=None)
    # red rows have figures of no column
    red = LayerRow("w", "v", 1.0, 0.0, red="why", kept_bytes=1)
    columns, dropped = fitting([row, red], width=10_000)
    assert not {"kept-MB", "peak-MB", "mJ/token", "net", "dense/mJ", "t/GEMM"} & {column.name for column in columns}
    assert dropped == []


def test_dense_is_the_faster_one() -> None:
    row = LayerRow("w", "ffn", 1.0, 0.0, ms=2.0)
    rows.note_dense(row, {"eager": 6.0, "compiled": 5.0})
    assert (row.speedup_eager, row.speedup_compiled, row.speedup_dense, row.faster_dense) == (3.0, 2.5, 2.5, "compiled")
    alone = LayerRow("w", "ffn", 1.0, 0.0, ms=2.0)
    rows.note_dense(alone, {})
    assert (alone.speedup_eager, alone.speedup_dense, alone.faster_dense) == (None, None, "")


def test_times_and_rates() -> None:
    row = LayerRow("w", "ffn", 1.0, 0.0)
    assert rows.note_times(row, [2.0, 1.0, 3.0], flop=4e9, floor=0.0005) == 2.0
    assert (row.ms, row.min_ms, row.p10_ms, row.p90_ms, row.samples) == (2.0, 1.0, 1.0, 3.0, 3)
    assert (row.tflops, row.floor_ms, row.floor_share) == (2.0, 0.5, 0.25)
