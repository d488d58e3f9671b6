"""Shared by charts and pages: files of results, their rows, tables, axes and legends."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiling.draw import style
from profiling.draw.style import SIZE, Theme
from twell.commands import analyze_plots
from twell.strategy.tables import SCREENED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

PATTERNS = {"uniform": "Uniform: all neurons fire alike", "topic": "Topic: nearby tokens share neurons"}
MARKERS = {"row": "o", "union": "s", "auto": "D", "dense": "x", "train": "^"}
STRATEGIES = ("row", "union", "auto", "dense")
# Ticks of speed-up axes, and the lowest speed-up shown.
SPEEDS = (0.125, 0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)
SLOWEST = 0.125

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


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart: ``draw(figure, theme, data)`` shows ``data`` and nothing else."""

    title: str
    machine: str
    data: Any
    draw: Callable[[SubFigure, Theme, Any], None]
    size: tuple[float, float] = SIZE

    @property
    def digest(self) -> str:
        """Digest of all that is shown, with figures to six digits: another machine's libm makes no difference."""
        shown = json.dumps([self.title, self.machine, rounded(self.data)], sort_keys=True)
        return hashlib.sha256(shown.encode()).hexdigest()[:16]

    def save(self, stem: Path) -> list[Path]:
        written: list[Path] = style.save(
            lambda figure, theme: self.draw(figure, theme, self.data),
            stem,
            size=self.size,
            title=self.title,
            footer=self.machine,
            data=f"{self.digest} {matplotlib_version()}",
        )
        return written


def matplotlib_version() -> str:
    analyze_plots.require()
    import matplotlib

    return str(matplotlib.__version__)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def machine(result: dict[str, Any]) -> str:
    """The machine line of a file, without the parts that cannot change a figure."""
    line = re.sub(r" \(\d+ SMs, \d+ GiB\)", "", str(result["machine"]))
    line = re.sub(r"SM \d+ MHz now, (\d+) most, memory \d+ MHz, (\d+)\.\d+ W", r"SM up to \1 MHz, \2 W", line)
    return "; ".join(part for part in line.split("; ") if not part.startswith(("Python ", "driver ", "CuTe ")))


def good(result: dict[str, Any] | None, **fields: Any) -> list[Row]:
    """Rows that were right and timed, and have these values."""
    rows = result["rows"] if result else []
    return [
        row
        for row in rows
        if not row.get("red") and row.get("ms") and all(row.get(name) == value for name, value in fields.items())
    ]


def dense_ms(rows: Sequence[Row], suffix: str) -> float | None:
    """Milliseconds of the faster dense variant; ``suffix`` follows "dense eager" in the names of variants."""
    names = [f"dense {kind}{suffix}" for kind in ("eager", "compiled")]
    return min((row["ms"] for row in rows if row["variant"] in names), default=None)


def best(row: Row) -> float | None:
    """Speed-up over the faster dense variant."""
    if row.get("speedup_dense"):
        return float(row["speedup_dense"])
    known = [row[name] for name in ("speedup_eager", "speedup_compiled") if row.get(name)]
    return float(min(known)) if known else None


def crossings(xs: Sequence[float], ys: Sequence[float], level: float = 1.0) -> list[float]:
    """Every x where y crosses ``level``, by straight lines in log x and log y. ``xs`` are ascending."""
    found = []
    for (x0, y0), (x1, y1) in zip(zip(xs, ys), zip(xs[1:], ys[1:])):
        a, b = math.log(y0 / level), math.log(y1 / level)
        if a * b < 0 or (a != 0 and b == 0):
            found.append(math.exp(math.log(x0) + (math.log(x1) - math.log(x0)) * a / (a - b)))
    return found


def of_line(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Split points into xs and ys, sorted by x."""
    ordered = sorted(points, key=lambda point: point[0])
    return [point[0] for point in ordered], [point[1] for point in ordered]


def sizes(result: dict[str, Any]) -> str:
    """M, K and N of a result for the small print, as far as all rows share them."""
    asked = result.get("arguments") or {}
    parts = []
    for name in ("m", "k", "n"):
        values = {row[name] for row in result["rows"] if row.get(name)}
        value = values.pop() if len(values) == 1 else asked.get(name) if not values else None
        if isinstance(value, int):
            parts.append(f"{name.upper()} = {value:,}")
    return ", ".join(parts) + "; " if parts else ""


def span(values: Sequence[float], digits: int = 1) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def powers(low: float, high: float, base: float) -> list[float]:
    """Powers of ``base`` that enclose ``low`` and ``high``."""
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    return [base**i for i in range(first, last + 1)]


def log_axis(
    axes: Axes, which: str, values: Sequence[float], base: float = 2, label: Callable[[float], str] = "{:,g}".format
) -> None:
    """Make axis "x" or "y" logarithmic around ``values``, with at most ten ticks at powers of ``base``."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=base)
    ticks = powers(min(values), max(values), base)
    while len(ticks) > 10:
        ticks = ticks[::2]
    room = max(max(values) / min(values), base) ** 0.04
    low, high = min(values) / room, max(values) * room
    shown = [tick for tick in ticks if low <= tick <= high]
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(shown, labels=[label(tick) for tick in shown])
    axis.set_ticks([], minor=True)
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)


def speed_axis(axes: Axes, values: Sequence[float]) -> None:
    """Make a logarithmic y axis that shows 1, the speed of dense, and ``values`` from ``SLOWEST`` on."""
    low, high = 0.93 * max(SLOWEST, min(1.0, *values)), 1.08 * max(1.0, *values)
    ticks = [tick for tick in SPEEDS if low <= tick <= high]
    axes.set_yscale("log")
    axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(low, high)


def baseline(axes: Axes, theme: Theme, *, vertical: bool = False) -> None:
    """Draw the line at the speed of dense."""
    draw = axes.axvline if vertical else axes.axhline
    draw(1, color=theme.muted, linewidth=1.2, zorder=1.5)


def legend(figure: SubFigure, entries: Sequence[tuple[Any, str]], columns: int = 6) -> None:
    handles, labels = [entry[0] for entry in entries], [entry[1] for entry in entries]
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, columnspacing=1.6, handlelength=2.2)


def line(**style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def patch(**style: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(**style)
