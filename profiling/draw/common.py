"""Shared by charts and pages: files of results, and tables."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twell.choose.rates import SCREENED

Row = dict[str, Any]


class ResultError(Exception):
    """A file of results is another, or lacks the data that a chart or table needs."""


def loads(text: str) -> Any:
    """The JSON of a file of results, with strategies by their names of today: results stay as they were recorded."""
    return json.loads(re.sub(r'"screened(_ms)?"', rf'"{SCREENED}\1"', text))


class Results:
    """The files of a folder by name, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019
    def get(self, name: str) -> dict[str, Any] | None:
        """The content of a file, or None if there is no such file."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            loaded: dict[str, Any] = loads(path.read_text())
        except ValueError as error:
            raise ResultError(f"{path} is not JSON: {error}") from error
        if "machine" not in loaded:
            raise ResultError(f"{path} does not name its machine")
        return loaded


def markdown(header: Sequence[str], align: str, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; ``align`` has l or r for each column. ValueError if a line has more cells or fewer."""
    rule = ["--:" if side == "r" else "---" for side in align]
    for cells in (header, *rows):
        if len(cells) != len(align):
            raise ValueError(f"expected {len(align)} cells, got {len(cells)}: {cells}")
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])


def pivot(corner: str, cells: Mapping[tuple[str, str], str]) -> str:
    """A table of cells by line and column."""
    lines, columns = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    rows = [[line, *(cells.get((line, column), "") for column in columns)] for line in lines]
    return markdown([corner, *columns], "l" + "r" * len(columns), rows)


def machine(result: dict[str, Any]) -> str:
    """The machine line of a file, without the parts that cannot change a figure."""
    line = re.sub(r" \(\d+ SMs, \d+ GiB\)", "", str(result["machine"]))
    line = re.sub(r"SM \d+ MHz now, (\d+) most, memory \d+ MHz, (\d+)\.\d+ W", r"SM up to \1 MHz, \2 W", line)
    return "; ".join(part for part in line.split("; ") if not part.startswith(("Python ", "driver ", "CuTe ")))
