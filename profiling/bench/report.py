"""Output of benchmarks: tables, JSON, CSV, progress. Rows are dataclasses; their ``red`` is empty if all is well."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from twell import _files
from twell.commands.request import RequestError

# Names of standard output, where no table may be printed between the data.
STDOUT = "-"
_ALSO_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")

# Between the columns of a table as text.
GAP = "  "


class Column(NamedTuple):
    """A column of a table: ``cell(row)`` is its text. Names are left-aligned, numbers right-aligned."""

    name: str
    cell: Callable[[Any], str]
    left: bool = False
    help: str = ""


def print_table(columns: Sequence[Column], rows: Sequence[Any], *, title: str = "") -> None:
    """Print a table: through rich on a terminal, if it is installed, as aligned text otherwise.

    A row whose ``red`` is not empty shows only the columns up to the last left-aligned one, and ``red``.
    """
    console = _console(sys.stdout)
    if console is None:
        print("\n".join(([title] if title else []) + _lines(columns, rows)))
    else:
        _print_rich(console, columns, rows, title)


def _naming(columns: Sequence[Column]) -> int:
    """The number of columns, from the first, that name a row."""
    return max((i + 1 for i, column in enumerate(columns) if column.left), default=0)


def _cells(columns: Sequence[Column], row: Any) -> list[str]:
    red = getattr(row, "red", "")
    if not red:
        return [column.cell(row) for column in columns]
    return [*(column.cell(row) for column in columns[: _naming(columns)]), f"RED {red}"]


def table_width(columns: Sequence[Column], rows: Sequence[Any]) -> int:
    """Characters of a line of the table as text, without the faults of red rows."""
    widths = _widths(columns, rows)
    return sum(widths) + len(GAP) * max(len(widths) - 1, 0)


def _widths(columns: Sequence[Column], rows: Sequence[Any]) -> list[int]:
    named = _naming(columns)
    widths = [len(column.name) for column in columns]
    for row in rows:
        cells = _cells(columns, row)
        # the fault of a red row is in no column
        for i, cell in enumerate(cells[:named] if getattr(row, "red", "") else cells):
            widths[i] = max(widths[i], len(cell))
    return widths


def _lines(columns: Sequence[Column], rows: Sequence[Any]) -> list[str]:
    """The table as text. The fault of a red row runs on to the right."""
    widths = _widths(columns, rows)

    def aligned(cells: Sequence[str]) -> list[str]:
        return [c.ljust(w) if column.left else c.rjust(w) for c, w, column in zip(cells, widths, columns, strict=False)]

    lines = [aligned([column.name for column in columns])]
    for row in rows:
        cells = _cells(columns, row)
        red = bool(getattr(row, "red", ""))
        lines.append([*aligned(cells[:-1]), cells[-1]] if red else aligned(cells))
    return [GAP.join(line).rstrip() for line in lines]


def _console(stream: Any) -> Any:
    """rich's console on ``stream`` if that is a terminal, None otherwise or without rich."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=stream, highlight=False)
    # rich assumes 80 columns for such a terminal and cuts figures off
    return None if console.is_dumb_terminal else console


def _print_rich(console: Any, columns: Sequence[Column], rows: Sequence[Any], title: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(escape(column.name), justify="left" if column.left else "right", no_wrap=True)
    reasons = []
    for row in rows:
        red = getattr(row, "red", "")
        cells = _cells(columns, row)
        if red:
            cells = [*cells[:-1], "RED"] if len(cells) <= len(columns) else cells[:-1]
            reasons.append(f"RED {' '.join(cells[: _naming(columns)])}: {red}")
        table.add_row(*map(escape, cells), style="red" if red else None)
    # wrap long lines rather than cut figures off
    width = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    console.width = max(console.width, width)
    console.print(table)
    for reason in reasons:
        console.print(reason, style="red", markup=False, soft_wrap=True)


def document(
    rows: Sequence[Any], *, machine: str, arguments: argparse.Namespace | Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """The content of a JSON file of ``rows``, without the paths among the arguments."""
    given = vars(arguments) if isinstance(arguments, argparse.Namespace) else arguments
    data = {
        "machine": machine,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "arguments": {name: value for name, value in given.items() if not _holds_path(value)},
        **more,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    finite: dict[str, Any] = _finite(data)
    return finite


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


def write_json(
    path: Path, rows: Sequence[Any], *, machine: str, arguments: argparse.Namespace | dict[str, Any], **more: Any
) -> None:
    """Write ``{"machine", "date", "arguments", **more, "rows"}``; infinity and NaN become null. "-" is stdout."""
    data = document(rows, machine=machine, arguments=arguments, **more)
    _write(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """Write the names of all fields, then a line for each row; lists and dictionaries are JSON. "-" is stdout."""
    names = list(dict.fromkeys(field.name for row in rows for field in dataclasses.fields(row)))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in dataclasses.asdict(row).items()})
    _write(path, text.getvalue())


def _cell(value: Any) -> Any:
    return json.dumps(_finite(value)) if isinstance(value, (dict, list, tuple)) else value


def output_path(text: str) -> Path:
    """An argparse type: the path of a file to write."""
    return Path(STDOUT if text in _ALSO_STDOUT else text)


def require_writable(paths: Sequence[Path | None]) -> None:
    """Make the folders of the paths; raise RequestError unless all can be written and differ."""
    found = [path for path in paths if path is not None]
    for path in found:
        if path.is_dir():
            raise RequestError(f"{path} is a folder: expected the name of a file")
        if not is_rewritable(path):
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error}") from None
    if len(set(found)) < len(found):
        raise RequestError(f"--json and --csv both write {found[0]}")


def is_rewritable(path: Path) -> bool:
    """Whether a file may be written repeatedly: not stdout, a pipe or a device."""
    return str(path) != STDOUT and (path.is_file() or not path.exists())


def _write(path: Path, text: str) -> None:
    """Write all or nothing, so that an interruption leaves the old file."""
    if str(path) == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    _files.write_text(path, text)


class Writer:
    """Writes the data of a run as it comes. A file that cannot be written costs no measurement: ``failure`` says why.

    ``save(final, write)`` calls ``write`` with each path; paths that can be written only once, such as stdout, only at
    the end.
    """

    def __init__(self, *paths: Path | None, name: str) -> None:
        self.failure = ""
        self._paths, self._name = [path for path in paths if path is not None], name

    def save(self, final: bool, write: Callable[[Path], None]) -> None:
        """Write the files."""
        failure = ""
        for path in self._paths:
            if not (final or is_rewritable(path)):
                continue
            try:
                write(path)
            except OSError as error:
                failure = f"{path} cannot be written: {error}"
        if failure and failure != self.failure:
            print(f"{self._name}: error: {failure}", file=sys.stderr, flush=True)
        self.failure = failure


class Progress:
    """Progress on stderr: a bar on a terminal, if rich is installed, a line for each step otherwise.

    ``with Progress(total) as progress``: each ``progress.step(text)`` begins the next of ``total`` steps.
    """

    def __init__(self, total: int | None = None, *, name: str = "twell bench") -> None:
        self._name, self._total, self._begun = name, total, 0
        self._text = ""
        self._bar: Any = None

    def __enter__(self) -> Progress:
        console = _console(sys.stderr)
        if console is not None:
            from rich import progress

            shown = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TimeElapsedColumn())
            # drawn by step alone: a drawing thread would delay launches and spoil times
            self._bar = progress.Progress(*shown, console=console, auto_refresh=False, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=self._total)
        return self

    def step(self, text: str) -> None:
        """Begin a step and end the one before."""
        self._begun += 1
        self._text = text
        if self._bar is not None:
            self._bar.update(self._task, completed=self._begun - 1, description=text, refresh=True)
            return
        count = f" {self._begun}/{self._total}" if self._total else ""
        print(f"{self._name}:{count} {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Show the current part of the step, on a terminal only."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._text}: {text}", refresh=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
