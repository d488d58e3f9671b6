"""Charts of one layer: speed-up by workload and by non-zeros."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiling.draw import style
from profiling.draw.common import Results, Row, machine
from profiling.draw.style import SIZE, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

PATTERNS = {"uniform": "Uniform: all neurons fire alike", "topic": "Topic: nearby tokens share neurons"}
MARKERS = {"row": "o", "union": "s", "auto": "D", "dense": "x", "train": "^"}
STRATEGIES = ("row", "union", "auto", "dense")
# Ticks of speed-up axes, and the lowest speed-up shown.
SPEEDS = (0.125, 0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)
SLOWEST = 0.125

WORKLOADS = ("real3", "uniform29", "topic29", "skew29", "real6", "topic128", "dense911")
PAPER_TEXT = "the paper's code"
WORKLOADS_TEXT = (
    "real: layers of a trained model; uniform, topic, skew: drawn patterns; dense911: as trained without L1; "
    "non-zeros per token; dense: the faster of eager and compiled PyTorch"
)
# Two strategies whose times differ by less than this share do not cross: in another run the other may be ahead.
ALIKE = 0.01


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart: ``draw(figure, theme, data)`` shows ``data`` and nothing else."""

    title: str
    machine: str
    data: Any
    draw: Callable[[SubFigure, Theme, Any], None]
    size: tuple[float, float] = SIZE

    def save(self, stem: Path) -> list[Path]:
        shown = {"size": self.size, "title": self.title, "footer": self.machine}
        return style.save(lambda figure, theme: self.draw(figure, theme, self.data), stem, **shown)  # type: ignore[arg-type]


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


def speedup(results: Results) -> Chart | None:
    """Forward and training step of the named workloads, and the paper's code, beside dense PyTorch (auto)."""
    result, paper = results.get("auto"), results.get("paper_code")
    panels: dict[str, list[Row]] = {}
    for op, variant in (("forward", "ffn"), ("train", "train")):
        panels[op] = []
        for name in WORKLOADS:
            rows = good(result, workload=name)
            ours = next((row for row in rows if row["variant"] == variant and row["requested"] == "auto"), None)
            dense = dense_ms(rows, " train" if op == "train" else "")
            if ours is None or dense is None:
                continue
            bar = {"workload": name, "nnz": ours["nnz"], "speedup": dense / ours["ms"], "strategy": ours["strategy"]}
            theirs = [row for row in (paper or {"rows": []})["rows"] if (row["workload"], row["op"]) == (name, op)]
            for row in theirs:
                times = row["ms"].get("queued", {})
                bar["paper"] = times["dense"] / times["paper"] if "paper" in times else None
                bar["wrong"], bar["failed"] = row["wrong"], row["red"]
            panels[op].append(bar)
    if result is None or not any(panels.values()):
        return None
    gains = {op: [bar["speedup"] for bar in bars if bar["strategy"] != "dense"] for op, bars in panels.items()}
    said = {"forward": "forward pass", "train": "training step"}
    title = ", ".join(f"{said[op]} {span(gains[op])} times" for op in gains if gains[op])
    title = f"Layers that run sparse: {title} as fast as dense" if title else "No layer runs sparse"
    footer = f"{WORKLOADS_TEXT}\ntwell: {sizes(result)}{machine(result)}"
    if paper is not None:
        footer += f"\n{PAPER_TEXT}: {machine(paper)}; compared with dense on the same machine"
    return Chart(title, footer, panels, draw_speedup, (SIZE[0], 5.3))


def draw_speedup(figure: SubFigure, theme: Theme, data: dict[str, list[Row]]) -> None:
    titles = {"forward": "Forward pass of a layer", "train": "Training step of a layer"}
    panels = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
    for axes, (op, bars) in zip(panels, data.items()):
        for i, bar in enumerate(bars):
            axes.barh(i - 0.19, bar["speedup"], 0.36, color=theme.row)
            axes.text(bar["speedup"], i - 0.19, f" {bar['speedup']:.2f}x {bar['strategy']}", va="center", fontsize=8.5)
            if bar.get("failed"):
                axes.text(0, i + 0.19, " no result", va="center", fontsize=8.5, color=theme.paper)
            elif bar.get("paper"):
                wrong = bool(bar["wrong"])
                axes.barh(i + 0.19, bar["paper"], 0.36, color=theme.paper, hatch="////" if wrong else None)
                text = f" {bar['paper']:.2f}x{' wrong' if wrong else ''}"
                # over the line at 1
                box = {"facecolor": theme.ground, "edgecolor": "none", "pad": 0.4}
                axes.text(bar["paper"], i + 0.19, text, va="center", fontsize=8.5, color=theme.paper, bbox=box)
        baseline(axes, theme, vertical=True)
        axes.set_yticks(range(len(bars)), [f"{bar['workload']}\n{bar['nnz']:.0f} non-zeros" for bar in bars])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set(title=titles[op], xlabel="speed-up over dense PyTorch")
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.set_xlim(0, 1.3 * max([1.0, *(bar["speedup"] for bar in bars)]))
    panels[0].set_ylim(max(map(len, data.values())) - 0.45, -0.55)
    entries = [(patch(color=theme.row), "twell and its strategy")]
    if any("paper" in bar for bars in data.values() for bar in bars):
        entries.append((patch(color=theme.paper), PAPER_TEXT))
        entries.append(
            (patch(facecolor=theme.paper, edgecolor=theme.ground, hatch="////"), "the paper's code, wrong result")
        )
    entries.append((line(color=theme.muted, linewidth=1.2), "dense PyTorch = 1x"))
    legend(figure, entries)


def nnz(results: Results) -> Chart | None:
    """Speed-up of each strategy by non-zeros per token, crossovers marked (sweep_nnz)."""
    result = results.get("sweep_nnz")
    panels: dict[str, dict[str, Any]] = {}
    for pattern in PATTERNS:
        lines: dict[str, list[list[float]]] = {}
        for row in good(result):
            if ("topic=" in row["workload"]) != (pattern == "topic"):
                continue
            name = {"ffn": row["requested"], "train": "train" * (row["requested"] == "auto")}.get(row["variant"])
            ratio = best(row)
            # the training line ends where "auto" runs dense: sparse training was not measured there
            if name == "train" and row["strategy"] == "dense":
                continue
            if name and ratio and row["nnz"] > 0:
                lines.setdefault(name, []).append([row["nnz"], ratio])
        if lines:
            ordered = {name: sorted(lines[name]) for name in (*STRATEGIES, "train") if name in lines}
            panels[pattern] = {"lines": ordered, "marks": marks(ordered)}
    if result is None or not panels:
        return None
    limits = []
    for pattern, panel in panels.items():
        if crossed := crossings(*of_line(envelope(panel["lines"]))):
            limits.append(f"{count(crossed[-1])} ({pattern})")
    title = "Fewer non-zeros, more speed"
    if limits:
        title += f": the forward pass beats dense up to {' and '.join(limits)} non-zeros per token"
    slowest = min(y for panel in panels.values() for points in panel["lines"].values() for _, y in points)
    note = f"below {SLOWEST:g}x not shown; " if slowest < SLOWEST else ""
    if any("train" in panel["lines"] for panel in panels.values()):
        note += 'training ends where "auto" runs dense\n'
    return Chart(title, sizes(result) + note + machine(result), panels, draw_nnz, (SIZE[0], 4.8))


def marks(lines: dict[str, list[list[float]]]) -> list[Row]:
    """Crossovers of the strategies and dense. Two strategies cross where they differ by ``ALIKE`` on both sides."""
    found = []
    for name in ("row", "union", "train"):
        if name in lines:
            found += [{"what": f"{name} = dense", "x": x, "y": 1.0} for x in crossings(*of_line(lines[name]))]
    if "row" in lines and "union" in lines:
        row, union = ({point[0]: point[1] for point in lines[name]} for name in ("row", "union"))
        xs = sorted(x for x in set(row) & set(union) if abs(row[x] / union[x] - 1) > ALIKE)
        for x in crossings(xs, [row[at] / union[at] for at in xs]):
            i = max(j for j, at in enumerate(xs) if at <= x)
            x0, x1 = xs[i], xs[min(i + 1, len(xs) - 1)]
            t = math.log(x / x0) / math.log(x1 / x0) if x1 > x0 else 0.0
            found.append({"what": "row = union", "x": x, "y": row[x0] ** (1 - t) * row[x1] ** t})
    return found


def lines_of(theme: Theme) -> dict[str, dict[str, Any]]:
    """Style of each strategy and of the training step, in the order of the legend."""
    styles = {name: {"color": getattr(theme, name), "marker": MARKERS[name]} for name in STRATEGIES}
    # above the line of the chosen strategy
    styles["auto"] |= {"linestyle": "--", "linewidth": 1.2, "markersize": 3.5, "zorder": 3}
    styles["dense"] |= {"linewidth": 1.2}
    return styles | {"train": {"color": theme.extra, "marker": MARKERS["train"]}}


def legend_of_lines(figure: SubFigure, theme: Theme, panels: Iterable[Iterable[str]]) -> None:
    used = {name for names in panels for name in names}
    entries = [(name, look) for name, look in lines_of(theme).items() if name in used]
    named = {"train": 'training step, "auto"', "row": 'forward: "row"'}
    legend(figure, [(line(**look), named.get(name, f'"{name}"')) for name, look in entries])


def count(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def draw_nnz(figure: SubFigure, theme: Theme, data: dict[str, Any]) -> None:
    panels = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
    styles = lines_of(theme)
    everything = [y for panel in data.values() for points in panel["lines"].values() for _, y in points]
    for axes, (pattern, panel) in zip(panels, data.items()):
        for name, points in panel["lines"].items():
            axes.plot(*of_line(points), **styles[name])
        baseline(axes, theme)
        crossed = sorted(panel["marks"], key=lambda mark: float(mark["x"]))
        said = [("Crossovers, non-zeros per token:", theme.text)] if crossed else []
        for mark in crossed:
            axes.plot(mark["x"], mark["y"], "o", markersize=10, fillstyle="none", color=theme.text, zorder=5)
            said.append((f"{mark['what']} at {count(mark['x'])}", styles[mark["what"].split()[0]]["color"]))
        for i, (text, colour) in enumerate(reversed(said)):
            place = {"transform": axes.transAxes, "bbox": {"facecolor": theme.ground, "edgecolor": "none", "pad": 0.5}}
            axes.text(0.04, 0.04 + 0.06 * i, text, fontsize=9, color=colour, zorder=4, **place)
        axes.set(title=PATTERNS[pattern], xlabel="non-zeros per token (log)")
        log_axis(axes, "x", [x for points in panel["lines"].values() for x, _ in points], base=4)
        speed_axis(axes, everything)
    panels[0].set_ylabel("speed-up over dense (log)")
    legend_of_lines(figure, theme, [panel["lines"] for panel in data.values()])


def envelope(lines: dict[str, list[list[float]]]) -> list[tuple[float, float]]:
    """Speed-up of the better sparse strategy at each x."""
    highest: dict[float, float] = {}
    for name, points in lines.items():
        if name in ("row", "union"):
            for x, y in points:
                highest[x] = max(y, highest.get(x, 0.0))
    return sorted(highest.items())
