"""Shared by charts and pages: files of results, and tables."""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]


@functools.cache
def result(name: str) -> dict[str, Any]:
    """The content of a measurement's file of results. Raises OSError without one."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def good(name: str, time: str = "ms") -> list[Row]:
    """The rows of a file that were right and timed."""
    return [row for row in result(name)["rows"] if row[time] and not row["red"]]


def by_case(rows: Iterable[Row], *keys: str, each: str = "variant") -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows by what those of a case share, and by what tells these apart."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row[each]] = row
    return found


def gpu_of(name: str) -> str:
    return str(result(name)["machine"]).partition("NVIDIA ")[2].split(" ")[0]


def bold(ratio: float) -> str:
    return f"**{ratio:.2f}**"


def machine(found: Mapping[str, Any]) -> str:
    """The machine line of a file, without the parts that cannot change a figure."""
    line = re.sub(r" \(\d+ SMs, \d+ GiB\)", "", str(found["machine"]))
    line = re.sub(r"SM \d+ MHz now, (\d+) most, memory \d+ MHz, (\d+)\.\d+ W", r"SM up to \1 MHz, \2 W", line)
    return "; ".join(part for part in line.split("; ") if not part.startswith(("Python ", "driver ", "CuTe ")))


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
