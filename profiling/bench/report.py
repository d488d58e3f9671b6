"""Output of measurements: tables, files, progress. Rows are dataclasses; their ``red`` is empty if all is well."""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from twell import _files
from twell.commands.request import RequestError

# Between the columns of a table.
GAP = "  "


class Column(NamedTuple):
    """A column of a table: ``cell(row)`` is its text. Names are left-aligned, numbers right-aligned."""

    name: str
    cell: Callable[[Any], str]
    left: bool = False
    help: str = ""


def number(field: str, form: str = ".2f", unit: float = 1.0) -> Callable[[Any], str]:
    """The cell of a field, in multiples of ``unit``; "-" where it is unknown."""

    def cell(row: Any) -> str:
        value = getattr(row, field)
        return "-" if value is None or value != value else f"{value if unit == 1 else value / unit:{form}}"

    return cell


def used(columns: Sequence[Column], rows: Sequence[Any]) -> list[Column]:
    """The columns in which some row without a fault has more than "-"; all if there is no such row."""
    good = [row for row in rows if not row.red]
    return [column for column in columns if not good or any(column.cell(row) != "-" for row in good)]


def print_table(columns: Sequence[Column], rows: Sequence[Any]) -> None:
    """Print a table. A row whose ``red`` is not empty shows only the columns up to the last left-aligned one."""
    named = max((i + 1 for i, column in enumerate(columns) if column.left), default=0)
    lines = [[column.name for column in columns]]
    for row in rows:
        red = getattr(row, "red", "")
        lines.append([column.cell(row) for column in (columns[:named] if red else columns)])
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(columns))]
    for line, row in zip(lines, [None, *rows], strict=True):
        cells = [c.ljust(w) if column.left else c.rjust(w) for c, w, column in zip(line, widths, columns, strict=False)]
        # a fault runs on to the right
        fault = [f"RED {row.red}"] if getattr(row, "red", "") else []
        print(GAP.join([*cells, *fault]).rstrip())


def write_json(
    path: Path, rows: Sequence[Any], *, machine: str, arguments: argparse.Namespace | Mapping[str, Any], **more: Any
) -> None:
    """Write ``{"machine", "date", "arguments", **more, "rows"}``; infinity and NaN become null. Paths are left out.

    The file is written whole or not at all, so that an interruption leaves the old one.
    """
    given = vars(arguments) if isinstance(arguments, argparse.Namespace) else arguments
    data = {
        "machine": machine,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "arguments": {name: value for name, value in given.items() if not _holds_path(value)},
        **more,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    _files.write_text(path, json.dumps(_finite(data), indent=1, allow_nan=False) + "\n")


def _holds_path(value: Any) -> bool:
    return isinstance(value, Path) or (isinstance(value, (list, tuple)) and any(map(_holds_path, value)))


def _finite(value: Any) -> Any:
    """``value`` with None for the numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def require_writable(path: Path | None) -> None:
    """Make the folder of the path; raise RequestError unless the file can be written."""
    if path is None:
        return
    if path.is_dir():
        raise RequestError(f"{path} is a folder: expected the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error}") from None


class Run:
    """The rows of a run, in its file after each part of it. ``facts`` gives the other content of the file.

    A file that cannot be written costs no measurement.
    """

    def __init__(self, name: str, path: Path | None, facts: Callable[[], dict[str, Any]]) -> None:
        self.rows: list[Any] = []
        self.complete = False
        self._name, self._path, self._facts = name, path, facts
        self._failed = False

    def add(self, rows: Sequence[Any]) -> None:
        """Add rows and write the file."""
        self.rows += rows
        self._write()

    def measure(self, work: Callable[[], None]) -> None:
        """Do the work; Ctrl-C ends it and leaves what was measured. Without rows an older file stays."""
        try:
            work()
            self.complete = True
        except KeyboardInterrupt:
            print(f"\n{self._name}: interrupted", file=sys.stderr)
        if self.rows or self.complete:
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_json(self._path, self.rows, **self._facts(), complete=self.complete)
            self._failed = False
        except OSError as error:
            if not self._failed:
                print(f"{self._name}: error: {self._path} cannot be written: {error}", file=sys.stderr, flush=True)
            self._failed = True

    def status(self) -> int:
        """Say how many rows are red; return 0, 1 if any is, 2 if the file could not be written, 130 after Ctrl-C."""
        red = sum(bool(row.red) for row in self.rows)
        if red:
            print(f"{red} of {len(self.rows)} rows are red", file=sys.stderr)
        if not self.complete:
            return 130
        return 2 if self._failed else int(red > 0)


class Progress:
    """Lines on stderr: ``step(text)`` begins the next of ``total`` steps."""

    def __init__(self, name: str, total: int | None = None) -> None:
        self._name, self._total, self._begun = name, total, 0

    def step(self, text: str) -> None:
        """Begin a step."""
        self._begun += 1
        count = f" {self._begun}/{self._total}" if self._total else ""
        print(f"{self._name}:{count} {text}", file=sys.stderr, flush=True)
