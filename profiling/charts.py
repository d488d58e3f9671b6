"""Draw the charts of profiling/charts/ from the files of profiling/results/: ``python profiling/charts.py``.

    python profiling/charts.py                      # all charts whose data is there
    python profiling/charts.py nnz layers           # these; it is an error if their data is not there
    python profiling/charts.py --check              # exit status 1 if a chart shows other data than the files hold
    python profiling/charts.py --results build/sweeps --out build/charts

Each chart is a PNG and an SVG, light and dark, and carries a digest of what it shows. ``--check`` compares digests and,
where the same matplotlib drew them, the SVGs byte by byte.

Charts:
{charts}
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _quality
import _style
from _style import SIZE, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

RESULTS = Path(__file__).resolve().parent / "results"
CHARTS = Path(__file__).resolve().parent / "charts"
WORKLOADS = ("real3", "uniform29", "topic29", "skew29", "real6", "topic128", "dense911")
STRATEGIES = ("row", "union", "auto", "dense")
PATTERNS = {"uniform": "Uniform: all neurons alike", "topic": "Topics: neighbours share neurons"}
MARKERS = {"row": "o", "union": "s", "auto": "D", "dense": "x", "train": "^"}
# Shares below this, in percent, have no room for a figure in a bar.
LABELLED_SHARE = 7
# Correlation of a layer's non-zeros with its speed-up in the paper.
PAPER_CORRELATION = -0.996
PAPER_TEXT = "the paper's code"

Row = dict[str, Any]


class ResultError(Exception):
    """A file of results that does not hold what a chart needs."""


class Results:
    """The files of a folder by name, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019
    def get(self, name: str) -> dict[str, Any] | None:
        """The file of that name, None if there is none."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            loaded: dict[str, Any] = json.loads(path.read_text())
        except ValueError as error:
            raise ResultError(f"{path} is not JSON: {error}") from error
        if "machine" not in loaded:
            raise ResultError(f"{path} does not name its machine")
        return loaded

    def matching(self, pattern: str) -> dict[str, dict[str, Any]]:
        """The files whose names match, in the order of names."""
        found = {path.stem: self.get(path.stem) for path in sorted(self.folder.glob(f"{pattern}.json"))}
        return {name: result for name, result in found.items() if result is not None}


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture: ``draw(figure, theme, data)`` shows ``data`` and nothing else."""

    title: str
    machine: str
    data: Any
    draw: Callable[[SubFigure, Theme, Any], None]
    size: tuple[float, float] = SIZE

    @property
    def digest(self) -> str:
        """Of all that is shown, figures to six digits, so that another machine's libm makes no difference."""
        shown = json.dumps([self.title, self.machine, rounded(self.data)], sort_keys=True)
        return hashlib.sha256(shown.encode()).hexdigest()[:16]

    def save(self, stem: Path, suffixes: tuple[str, ...] = _style.SUFFIXES) -> list[Path]:
        written: list[Path] = _style.save(
            lambda figure, theme: self.draw(figure, theme, self.data),
            stem,
            size=self.size,
            title=self.title,
            footer=self.machine,
            data=f"{self.digest} {matplotlib_version()}",
            suffixes=suffixes,
        )
        return written


def matplotlib_version() -> str:
    _style.require()
    import matplotlib

    return str(matplotlib.__version__)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


# Rows


def good(result: dict[str, Any] | None, **fields: Any) -> list[Row]:
    """Rows that were right and timed, and have these fields."""
    rows = result["rows"] if result else []
    return [
        row
        for row in rows
        if not row.get("red") and row.get("ms") and all(row.get(name) == value for name, value in fields.items())
    ]


def dense_ms(rows: Sequence[Row], suffix: str) -> float | None:
    """Milliseconds of the faster dense variant of a workload's rows; ``suffix`` follows "dense eager" in its name."""
    names = [f"dense {kind}{suffix}" for kind in ("eager", "compiled")]
    return min((row["ms"] for row in rows if row["variant"] in names), default=None)


def best(row: Row) -> float | None:
    """Speed-up over the faster dense variant."""
    if row.get("speedup_dense"):
        return float(row["speedup_dense"])
    known = [row[name] for name in ("speedup_eager", "speedup_compiled") if row.get(name)]
    return float(min(known)) if known else None


def crossings(xs: Sequence[float], ys: Sequence[float], level: float = 1.0) -> list[float]:
    """Where y passes ``level``, between points along straight lines in log x and log y. xs are in order."""
    found = []
    for (x0, y0), (x1, y1) in zip(zip(xs, ys), zip(xs[1:], ys[1:])):
        a, b = math.log(y0 / level), math.log(y1 / level)
        if a * b < 0 or (a != 0 and b == 0):
            found.append(math.exp(math.log(x0) + (math.log(x1) - math.log(x0)) * a / (a - b)))
    return found


def of_line(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """xs and ys, in the order of x."""
    ordered = sorted(points, key=lambda point: point[0])
    return [point[0] for point in ordered], [point[1] for point in ordered]


def sizes(result: dict[str, Any], *, tokens: bool = True) -> str:
    """The sizes that a result was measured with, for the small print; of a layer, as far as all rows share them."""
    asked = result.get("arguments") or {}
    parts = []
    for name in ("m", "k", "n") if tokens else ("k", "n"):
        values = {row[name] for row in result["rows"] if row.get(name)}
        value = values.pop() if len(values) == 1 else asked.get(name) if not values else None
        if isinstance(value, int):
            parts.append(f"{name.upper()} = {value:,}")
    return ", ".join(parts) + "; " if parts else ""


def span(values: Sequence[float], digits: int = 1) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# Axes


def powers(low: float, high: float, base: float) -> list[float]:
    """Powers of ``base`` from at most ``low`` to at least ``high``."""
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    return [base**i for i in range(first, last + 1)]


def log_axis(
    axes: Axes, which: str, values: Sequence[float], base: float = 2, label: Callable[[float], str] = "{:,g}".format
) -> None:
    """Make axis "x" or "y" logarithmic, around ``values``, with ticks at powers of ``base``, of many every other."""
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


def speed_axis(axes: Axes, values: Sequence[float], label: str = "speed-up over dense") -> None:
    """A logarithmic y axis with 1, the speed of dense, in it and marked."""
    log_axis(axes, "y", [1.0, *values], label=lambda tick: f"{tick:g}x" if tick >= 1 else f"1/{1 / tick:g}x")
    axes.set_ylabel(label)


def baseline(axes: Axes, theme: Theme, *, vertical: bool = False) -> None:
    """The line of dense's speed."""
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


# Speed-up by workload


def speedup(results: Results) -> Chart | None:
    """Forward and training step of the named workloads, and the paper's code, beside dense PyTorch (h200_auto)."""
    result, paper = results.get("h200_auto"), results.get("h200_paper_code")
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
                bar["paper"] = row["dense_ms"] / row["ms"] if row["ms"] else None
                bar["wrong"], bar["failed"] = row["wrong"], row["red"]
            panels[op].append(bar)
    if result is None or not any(panels.values()):
        return None
    gains = {op: [bar["speedup"] for bar in bars if bar["strategy"] != "dense"] for op, bars in panels.items()}
    said = {"forward": "its forward pass", "train": "its training step"}
    title = ", ".join(f"{said[op]} {span(gains[op])} times" for op in gains if gains[op])
    title = f"Where a layer runs sparse, {title} as fast as dense" if title else "No layer runs sparse"
    footer = f"twell: {sizes(result)}{result['machine']}"
    if paper is not None:
        footer += f"\n{PAPER_TEXT}: {paper['machine']}; beside dense on the same machine"
    return Chart(title, footer, panels, draw_speedup, (SIZE[0], 5.0))


def draw_speedup(figure: SubFigure, theme: Theme, data: dict[str, list[Row]]) -> None:
    titles = {"forward": "Forward pass of a layer", "train": "Training step of a layer"}
    panels = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
    for axes, (op, bars) in zip(panels, data.items()):
        for i, bar in enumerate(bars):
            axes.barh(i - 0.19, bar["speedup"], 0.36, color=theme.row)
            axes.text(bar["speedup"], i - 0.19, f" {bar['speedup']:.2f}  {bar['strategy']}", va="center", fontsize=8.5)
            if bar.get("failed"):
                axes.text(0, i + 0.19, " no result", va="center", fontsize=8.5, color=theme.paper)
            elif bar.get("paper"):
                wrong = bool(bar["wrong"])
                axes.barh(i + 0.19, bar["paper"], 0.36, color=theme.paper, hatch="////" if wrong else None)
                text = f" {bar['paper']:.2f}{'  wrong' if wrong else ''}"
                # over the line at 1
                box = {"facecolor": theme.ground, "edgecolor": "none", "pad": 0.4}
                axes.text(bar["paper"], i + 0.19, text, va="center", fontsize=8.5, color=theme.paper, bbox=box)
        baseline(axes, theme, vertical=True)
        axes.set_yticks(range(len(bars)), [f"{bar['workload']}\n{bar['nnz']:.0f} non-zeros" for bar in bars])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set(title=titles[op], xlabel="speed-up over dense PyTorch, eager or compiled")
        axes.set_xlim(0, 1.3 * max([1.0, *(bar["speedup"] for bar in bars)]))
    panels[0].set_ylim(max(map(len, data.values())) - 0.45, -0.55)
    entries = [(patch(color=theme.row), "twell (strategy auto)")]
    if any("paper" in bar for bars in data.values() for bar in bars):
        entries.append((patch(color=theme.paper), PAPER_TEXT))
        entries.append((patch(facecolor=theme.paper, edgecolor=theme.ground, hatch="////"), "the same, wrong result"))
    entries.append((line(color=theme.muted, linewidth=1.2), "dense = 1"))
    legend(figure, entries)


# Against non-zeros


def nnz(results: Results) -> Chart | None:
    """Speed-up against non-zeros a token for each strategy, crossovers marked (h200_sweep_nnz)."""
    result = results.get("h200_sweep_nnz")
    panels: dict[str, dict[str, Any]] = {}
    for pattern in PATTERNS:
        lines: dict[str, list[list[float]]] = {}
        for row in good(result, pattern=pattern):
            name = {"ffn": row["requested"], "train": "train"}.get(row["variant"])
            ratio = best(row)
            if name and ratio and row["nnz"] > 0:
                lines.setdefault(name, []).append([row["nnz"], ratio])
        if lines:
            ordered = {name: sorted(lines[name]) for name in (*STRATEGIES, "train") if name in lines}
            panels[pattern] = {"lines": ordered, "marks": marks(ordered)}
    if result is None or not panels:
        return None
    limits = [
        f"{mark['x']:,.0f} ({pattern})"
        for pattern, panel in panels.items()
        for mark in panel["marks"]
        if mark["what"] == "union = dense"
    ]
    title = "Fewer non-zeros, more speed"
    if limits:
        title += f": the forward pass beats dense up to {' and '.join(limits)} a token"
    return Chart(title, sizes(result) + result["machine"], panels, draw_nnz, (SIZE[0], 4.8))


def marks(lines: dict[str, list[list[float]]]) -> list[Row]:
    """Where strategies cross each other and dense."""
    found = []
    for name in ("row", "union", "train"):
        if name in lines:
            found += [{"what": f"{name} = dense", "x": x, "y": 1.0} for x in crossings(*of_line(lines[name]))]
    if "row" in lines and "union" in lines:
        row, union = ({point[0]: point[1] for point in lines[name]} for name in ("row", "union"))
        xs = sorted(set(row) & set(union))
        for x in crossings(xs, [row[at] / union[at] for at in xs]):
            i = max(j for j, at in enumerate(xs) if at <= x)
            x0, x1 = xs[i], xs[min(i + 1, len(xs) - 1)]
            t = math.log(x / x0) / math.log(x1 / x0) if x1 > x0 else 0.0
            found.append({"what": "row = union", "x": x, "y": row[x0] ** (1 - t) * row[x1] ** t})
    return found


def draw_nnz(figure: SubFigure, theme: Theme, data: dict[str, Any]) -> None:
    panels = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
    colours = {name: getattr(theme, name) for name in STRATEGIES} | {"train": theme.extra}
    styles = {
        name: {"color": colours[name], "marker": MARKERS[name]}
        | ({"linestyle": "--", "linewidth": 1.3, "markersize": 3.5} if name == "auto" else {})
        for name in colours
    }
    everything = [y for panel in data.values() for points in panel["lines"].values() for _, y in points]
    for axes, (pattern, panel) in zip(panels, data.items()):
        for name, points in panel["lines"].items():
            axes.plot(*of_line(points), **styles[name])
        baseline(axes, theme)
        crossed = sorted(panel["marks"], key=lambda mark: float(mark["x"]))
        for i, mark in enumerate(crossed):
            axes.plot(mark["x"], mark["y"], "o", markersize=10, fillstyle="none", color=theme.text, zorder=5)
            place = {"x": 0.04, "y": 0.04 + 0.07 * (len(crossed) - 1 - i), "transform": axes.transAxes, "fontsize": 9}
            axes.text(s=f"{mark['what']} at {mark['x']:,.0f}", color=colours[mark["what"].split()[0]], **place)
        if crossed:
            axes.text(
                0.04, 0.04 + 0.07 * len(crossed), "Circles, non-zeros a token:", transform=axes.transAxes, fontsize=9
            )
        axes.set(title=PATTERNS[pattern], xlabel="non-zeros a token (log)")
        log_axis(axes, "x", [x for points in panel["lines"].values() for x, _ in points], base=4)
        speed_axis(axes, everything, "")
    panels[0].set_ylabel("speed-up over dense (log)")
    names = {"train": "training step"}
    shown = [name for name in colours if any(name in panel["lines"] for panel in data.values())]
    legend(figure, [(line(**styles[name]), names.get(name, f'"{name}"')) for name in shown])


# Against the number of tokens


def tokens(results: Results) -> Chart | None:
    """Speed-up against M, the tokens of a call (h200_sweep_m, or h200_tuning until there is one)."""
    sweep, tuning = results.get("h200_sweep_m"), results.get("h200_tuning")
    panels: dict[str, dict[str, list[list[float]]]] = {}

    def add(pattern: str, name: str, m: int, ratio: float) -> None:
        panels.setdefault(pattern, {}).setdefault(name, []).append([m, ratio])

    for row in good(sweep):
        name = {"train": "train"}.get(row["variant"], row["requested"])
        ratio = best(row)
        if ratio and name and row["pattern"] in PATTERNS:
            add(row["pattern"], name, row["tokens"], ratio)
    if not panels and tuning is not None:
        for row in good(tuning, k=2048, n=5632, gated=True):
            if row["pattern"] in PATTERNS:
                add(row["pattern"], "train" if row["training"] else row["strategy"], row["m"], 1 / row["relative"])
    result = sweep if good(sweep) else tuning
    if result is None or not panels:
        return None
    names = ("row", "union", "dense", "auto", "train")
    ordered = {
        pattern: {name: sorted(lines[name]) for name in names if name in lines} for pattern, lines in panels.items()
    }
    gains = {pattern: envelope(lines) for pattern, lines in ordered.items()}
    slower = sorted({m for points in gains.values() for m, ratio in points if ratio < 1})
    faster = sorted({m for points in gains.values() for m, ratio in points if ratio > 1} - set(slower))
    title = "Speed-up by the tokens of a call"
    few, many = [m for m in faster if m < min(slower, default=0)], [m for m in faster if m > max(slower, default=0)]
    if few and many:
        title = f"Sparse beats dense up to {few[-1]:,} and from {many[0]:,} tokens a call"
    elif faster and not slower:
        title = "Sparse beats dense with any number of tokens a call"
    rows = good(result)
    note = "" if any(row.get("speedup_compiled") for row in rows) else "dense: eager PyTorch\n"
    if result is tuning:
        compiled = sorted({row["m"] for row in rows if row["dense"] == "dense compiled"})
        note = "K = 2,048, N = 5,632; dense: eager PyTorch, with "
        note += f"{between(compiled)} tokens the faster of eager and compiled\n"
    return Chart(title, note + result["machine"], ordered, draw_tokens, (SIZE[0], 4.6))


def between(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def envelope(lines: dict[str, list[list[float]]]) -> list[tuple[float, float]]:
    """The best forward pass at each x."""
    highest: dict[float, float] = {}
    for name, points in lines.items():
        if name in ("row", "union"):
            for x, y in points:
                highest[x] = max(y, highest.get(x, 0.0))
    return sorted(highest.items())


def draw_tokens(figure: SubFigure, theme: Theme, data: dict[str, Any]) -> None:
    panels = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
    colours = {name: getattr(theme, name) for name in STRATEGIES} | {"train": theme.extra}
    everything = [y for lines in data.values() for points in lines.values() for _, y in points]
    for axes, (pattern, lines) in zip(panels, data.items()):
        for name, points in lines.items():
            thin = {"linestyle": "--", "linewidth": 1.3} if name == "auto" else {}
            axes.plot(*of_line(points), color=colours[name], marker=MARKERS[name], **thin)
        baseline(axes, theme)
        log_axis(axes, "x", [x for points in lines.values() for x, _ in points], base=8)
        speed_axis(axes, everything, "")
        axes.set(title=PATTERNS[pattern], xlabel="tokens of a call (log)")
    panels[0].set_ylabel("speed-up over dense (log)")
    names = {"train": "training step"}
    shown = [name for name in colours if any(name in lines for lines in data.values())]
    legend(
        figure,
        [(line(color=colours[name], marker=MARKERS[name]), names.get(name, f'"{name}"')) for name in shown],
    )


# By layer


def layers(results: Results) -> Chart | None:
    """Non-zeros and speed-up layer by layer, and their correlation (h200_sweep_layers)."""
    result = results.get("h200_sweep_layers")
    sources: dict[str, dict[str, list[Row]]] = {}
    for row in good(result, requested="auto"):
        ratio = best(row)
        if ratio and row["variant"] in ("ffn", "train"):
            points = sources.setdefault(row["source"], {}).setdefault(row["variant"], [])
            points.append({"layer": row["layer"], "nnz": row["nnz"], "speedup": ratio})
    if result is None or not sources:
        return None
    # of several sources that with the most layers, of equals the first
    source = max(sources, key=lambda name: max(map(len, sources[name].values())))
    shown = {op: sorted(each, key=lambda point: int(point["layer"])) for op, each in sorted(sources[source].items())}
    fits = {op: correlations(each) for op, each in shown.items()}
    first = next(iter(fits.values()))
    title = "Speed-up by layer"
    if first is not None:
        title = "Layers with fewer non-zeros gain more" if first["plain"] < 0 else "Speed-up does not follow non-zeros"
        title += f": correlation {first['plain']:.3f}, the paper's {PAPER_CORRELATION}"
    return Chart(title, f"{source}\n{result['machine']}", {"points": shown, "fits": fits}, draw_layers, (SIZE[0], 4.8))


def correlations(points: Sequence[Row]) -> dict[str, float] | None:
    """Pearson's r of the speed-up with the non-zeros and with their logarithm; None of fewer than three layers."""
    counts, gains = [point["nnz"] for point in points], [point["speedup"] for point in points]
    if len(points) < 3 or len(set(counts)) < 2 or len(set(gains)) < 2:
        return None
    logs = [math.log(max(count, 1e-3)) for count in counts]
    return {"plain": statistics.correlation(counts, gains), "log": statistics.correlation(logs, gains)}


def draw_layers(figure: SubFigure, theme: Theme, data: dict[str, Any]) -> None:
    points, fits = data["points"], data["fits"]
    grid = figure.add_gridspec(2, 2, width_ratios=[1.15, 1])
    counts, gains = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    scatter = figure.add_subplot(grid[:, 1])
    styles: dict[str, tuple[str, dict[str, Any]]] = {
        "ffn": ("forward", {"color": theme.row, "marker": "o"}),
        "train": ("training step", {"color": theme.extra, "marker": "^"}),
    }
    first = next(iter(points.values()))
    numbers = [point["layer"] for point in first]
    counts.bar(numbers, [point["nnz"] for point in first], color=theme.dense)
    counts.set(ylabel="non-zeros a token", title="By layer")
    for op, each in points.items():
        name, style = styles[op]
        layer, count, gain = ([point[field] for point in each] for field in ("layer", "nnz", "speedup"))
        gains.plot(layer, gain, label=name, **style)
        fit = fits[op]
        label = name if fit is None else f"{name}: r = {fit['plain']:.3f}, with log {fit['log']:.3f}"
        scatter.plot(count, gain, linestyle="none", label=label, **style)
        if len(each) <= 40:
            for x, y, number in zip(count, gain, layer):
                scatter.annotate(f"{number}", (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7.5)
    top = 1.1 * max(point["speedup"] for each in points.values() for point in each)
    for axes in (gains, scatter):
        baseline(axes, theme)
        axes.set_ylim(0, top)
        axes.yaxis.set_major_formatter("{x:g}x")
    gains.set(xlabel="layer", ylabel="speed-up over dense")
    for axes in (counts, gains):
        axes.set_xticks(numbers if len(numbers) <= 12 else numbers[:: math.ceil(len(numbers) / 10)])
        axes.grid(axis="x", visible=False)
    scatter.set(xlabel="non-zeros a token", title="Against non-zeros (labels: layers)")
    scatter.set_xlim(left=0)
    scatter.legend(loc="lower left")


# Memory


def memory(results: Results) -> Chart | None:
    """Memory of a training step a token, dense beside sparse (h200_sweep_memory, or h200_auto until there is one)."""
    sweep = results.get("h200_sweep_memory")
    found = good(sweep) or good(results.get("h200_auto"))
    result = sweep if good(sweep) else results.get("h200_auto")
    panels: dict[str, dict[str, list[list[float]]]] = {}
    for row in found:
        name = memory_name(row)
        if name is None or not row["tokens"] or not row["nnz"]:
            continue
        training = row["variant"].endswith("train")
        for panel, value in (
            ("kept" if training else "", row.get("kept_bytes")),
            ("peak" if training else "forward", row.get("peak_bytes")),
        ):
            if panel and value is not None:
                lines = panels.setdefault(panel, {})
                lines.setdefault(name, []).append([row["nnz"], value / row["tokens"] / 1000])
    if result is None or "twell" not in panels.get("kept", {}):
        return None
    title = f"Training keeps {span([y for _, y in panels['kept']['twell']])} KB a token for backward"
    lowest = {
        panel: min(y for name, points in panels[panel].items() if name.startswith("dense") for _, y in points)
        for panel in ("kept", "peak")
        if any(name.startswith("dense") for name in panels.get(panel, {}))
    }
    if len(lowest) == 2:
        sparse = statistics.median(y for _, y in panels["peak"]["twell"])
        title += f" in place of {lowest['kept']:.0f}, and its peak is {lowest['peak'] / sparse:.1f} times lower"
    ordered = {
        panel: {name: sorted(panels[panel][name]) for name in MEMORY if name in panels[panel]}
        for panel in ("kept", "peak", "forward")
        if panel in panels
    }
    return Chart(title, sizes(result) + result["machine"], ordered, draw_memory, (SIZE[0], 4.2))


MEMORY = ("dense eager", "dense compiled", "twell", "twell, run densely")


def memory_name(row: Row) -> str | None:
    """Which line of the chart a row belongs to."""
    if row["variant"] in ("train", "ffn"):
        return "twell, run densely" if row["strategy"] == "dense" else "twell"
    name = row["variant"].removesuffix(" train")
    return name if name in MEMORY else None


def draw_memory(figure: SubFigure, theme: Theme, data: dict[str, dict[str, list[list[float]]]]) -> None:
    styles: dict[str, dict[str, Any]] = {
        "dense eager": {"color": theme.dense, "marker": "x"},
        "dense compiled": {"color": theme.auto, "marker": "+", "linestyle": "--"},
        "twell": {"color": theme.row, "marker": "o"},
        "twell, run densely": {"color": theme.union, "marker": "s", "linestyle": "none"},
    }
    titles = {"kept": "Kept for backward", "peak": "Peak of a training step", "forward": "Peak of a forward pass"}
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    for axes, (panel, lines) in zip(panels, data.items()):
        for name, points in lines.items():
            axes.plot(*of_line(points), **styles[name])
        log_axis(axes, "x", [x for points in lines.values() for x, _ in points], base=4)
        axes.set_ylim(0, 1.1 * max(y for points in lines.values() for _, y in points))
        axes.set(title=titles[panel], xlabel="non-zeros a token (log)")
    panels[0].set_ylabel("KB a token, beside the inputs")
    used = [name for name in MEMORY if any(name in lines for lines in data.values())]
    legend(figure, [(line(**styles[name]), name) for name in used])


# Kernels

# What each part of a step is, from the first letters of its kernels' names; others are "rest".
PARTS = {
    "gate_pack": "gate GEMM + pack",
    "up_down": "up and down",
    "down": "down",
    "sampled_up": "up at non-zeros",
    "gathered*1": "y = h W_down",
    "sampled_grad": "gradients at non-zeros",
    "gathered*2": "dx",
    "weight_grad": "weight gradients",
}
REST = "rest"


def part_of(symbol: str) -> str:
    """The part of a step that a kernel belongs to."""
    if symbol.startswith("gathered"):
        return PARTS[f"gathered*{symbol[-1]}"] if symbol[-1] in "12" else REST
    # of up_down and up_down_skinny the longer name that matches
    known = [name for name in PARTS if symbol.startswith(name)]
    return PARTS[max(known, key=len)] if known else REST


def kernels(results: Results) -> Chart | None:
    """Where the time of a forward pass and of a training step goes (h200_sweep_kernels, or h200_training)."""
    sweep, training = results.get("h200_sweep_kernels"), results.get("h200_training")
    result = sweep if good(sweep) else training
    rows = good(result)
    panels: dict[str, list[Row]] = {}
    for op, suffix in (("ffn", ""), ("train_forward", " train_forward"), ("train", " train")):
        for row in rows:
            known = [entry["workload"] for entry in panels.get(op, [])]
            if row["variant"] != op or not row.get("kernels") or row["workload"] in known:
                continue
            parts: dict[str, float] = {}
            for symbol, ms in row["kernels"].items():
                parts[part_of(symbol)] = parts.get(part_of(symbol), 0.0) + ms
            dense = dense_ms([each for each in rows if each["workload"] == row["workload"]], suffix)
            entry = {"workload": row["workload"], "nnz": row["nnz"], "parts": parts, "dense": dense}
            panels.setdefault(op, []).append(entry)
    # there is room for one forward pass
    if "ffn" in panels:
        panels.pop("train_forward", None)
    shown = {op: sorted(rows, key=lambda row: row["nnz"]) for op, rows in panels.items() if rows}
    if result is None or not shown:
        return None
    op = "train" if "train" in shown else next(iter(shown))
    shares: dict[str, list[float]] = {}
    for entry in shown[op]:
        whole = sum(entry["parts"].values())
        for name, ms in entry["parts"].items():
            shares.setdefault(name, []).append(ms / whole)
    # a part that a workload does not have is no time of it
    means = {name: sum(each) / len(shown[op]) for name, each in shares.items()}
    order = sorted(means, key=lambda name: -means[name])
    what = "a training step" if op == "train" else "a forward pass"
    title = " and ".join(f"{name} ({100 * means[name]:.0f} %)" for name in order[:2])
    title += f" {'lead' if len(order) > 1 else 'is all of'} {what}"
    title = title[0].upper() + title[1:]
    return Chart(title, sizes(result) + result["machine"], shown, draw_kernels, (SIZE[0], 4.9))


def draw_kernels(figure: SubFigure, theme: Theme, data: dict[str, list[Row]]) -> None:
    titles = {"ffn": "Forward pass", "train_forward": "Forward, keeping what backward needs"}
    titles["train"] = "Training step"
    order = [*dict.fromkeys(PARTS.values()), REST]
    used = [name for name in order if any(name in row["parts"] for rows in data.values() for row in rows)]
    palette = (theme.row, theme.union, theme.extra, theme.paper, theme.auto, theme.dense)
    # more parts than colours: the second round is hatched
    styles = {
        name: {"facecolor": palette[i % len(palette)], "hatch": "" if i < len(palette) else "////"}
        for i, name in enumerate(name for name in used if name != REST)
    }
    styles[REST] = {"facecolor": theme.grid, "hatch": ""}
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    for axes, (op, rows) in zip(panels, data.items()):
        for i, row in enumerate(rows):
            whole, left = sum(row["parts"].values()), 0.0
            for name in used:
                share = 100 * row["parts"].get(name, 0.0) / whole
                axes.barh(i, share, 0.72, left=left, linewidth=0.8, **(styles[name] | {"edgecolor": theme.ground}))
                if share >= LABELLED_SHARE:
                    hatched = bool(styles[name]["hatch"])
                    place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5}
                    place["color"] = theme.text if hatched or name == REST else theme.ground
                    if hatched:
                        place["bbox"] = {"facecolor": theme.ground, "edgecolor": "none", "pad": 1}
                    axes.text(left + share / 2, i, f"{share:.0f}", **place)
                left += share
            times = f"{whole:.2f} ms"
            if row["dense"]:
                times += f"\ndense {row['dense']:.2f}"
            axes.text(102, i, times, va="center", fontsize=8)
        axes.set_yticks(
            range(len(rows)), [f"{row['workload']}\n{row['nnz']:.0f} non-zeros" for row in rows], fontsize=8
        )
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
        axes.set(title=titles[op], xlabel="share of the kernels' time (%)")
        axes.set_xlim(0, 138)
        axes.set_xticks(range(0, 101, 20))
    legend(figure, [(patch(**(styles[name] | {"edgecolor": theme.ground})), name) for name in used], columns=4)


# Roofline


def roofline(results: Results) -> Chart | None:
    """Executed TFLOP/s against arithmetic intensity, under the ceilings of the file (h200_strategies)."""
    result = results.get("h200_strategies")
    points: dict[str, list[Row]] = {"gather": [], "memory": []}
    for row in good(result):
        if not row.get("executed_tflops"):
            continue
        name = row["requested"] or "dense"
        for panel, field, variants in (("gather", "l2_gather_gbs", ("ffn",)), ("memory", "memory_gbs", ("decode",))):
            wanted = row["variant"] in variants or (panel == "memory" and row["variant"] == "dense compiled decode")
            if row.get(field) and wanted and name in ("row", "union", "dense"):
                intensity = row["executed_tflops"] * 1e3 / row[field]
                point = {"name": name, "workload": row["workload"], "tokens": row["tokens"]}
                points[panel].append(point | {"intensity": intensity, "tflops": row["executed_tflops"]})
    shown = {panel: each for panel, each in points.items() if each}
    if result is None or not shown:
        return None
    ceilings = result["ceilings"]
    data = {"points": shown, "tflops": ceilings["tflops"], "memory": ceilings["memory_tbs"]}
    data["gather"] = ceilings["l2_tbs_assumed"]
    title = "Under the roofs"
    shares = {
        name: [
            point["tflops"] / min(ceilings["tflops"], ceilings["l2_tbs_assumed"] * point["intensity"])
            for point in points["gather"]
            if point["name"] == name
        ]
        for name in ("union", "row")
    }
    if all(shares.values()):
        union, row = (100 * statistics.median(shares[name]) for name in ("union", "row"))
        title = f'"union" runs at {union:.0f} % of its roof in the median, "row" at {row:.0f} %'
    note = "A weight row that several of a group of eight tokens need is read once and counted for each. Ceilings: "
    note += "product and copy measured in the same run, the gather ceiling a streaming read of L2.\n"
    return Chart(title, note + sizes(result, tokens=False) + result["machine"], data, draw_roofline, (SIZE[0], 4.8))


def draw_roofline(figure: SubFigure, theme: Theme, data: dict[str, Any]) -> None:
    titles = {
        "gather": ("Whole layers, 16,384 tokens", "operations a byte gathered through L2 (log)", "L2"),
        "memory": ("Decode, 1 to 256 tokens", "operations a byte from memory (log)", "memory"),
    }
    panels = figure.subplots(1, len(data["points"]), squeeze=False)[0]
    for axes, (panel, points) in zip(panels, data["points"].items()):
        title, label, short = titles[panel]
        xs, ys = [point["intensity"] for point in points], [point["tflops"] for point in points]
        peak, rate = data["tflops"], data[panel]
        low, high = powers(min(xs), max(xs), 4)[0], powers(min(xs), max([*xs, 2 * peak / rate]), 4)[-1]
        axes.plot([low, peak / rate, high], [low * rate, peak, peak], color=theme.muted, linewidth=1.5)
        axes.text(high, peak * 1.06, f"{peak:.0f} TFLOP/s ", ha="right", va="bottom", fontsize=8.5)
        for name in ("row", "union", "dense"):
            chosen = [point for point in points if point["name"] == name]
            axes.plot(
                [point["intensity"] for point in chosen],
                [point["tflops"] for point in chosen],
                linestyle="none",
                marker=MARKERS[name],
                color=getattr(theme, name),
            )
        log_axis(axes, "x", [low, high], base=4)
        log_axis(axes, "y", [*ys, low * rate, 1.3 * peak], base=4)
        label_at = low * (peak / rate / low) ** 0.75
        axes.annotate(
            f"{rate:.2f} TB/s of {short}",
            (label_at, rate * label_at),
            xytext=(-4, 6),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
        )
        axes.set(title=title, xlabel=label)
    panels[0].set_ylabel("TFLOP/s executed (log)")
    names = {point["name"] for points in data["points"].values() for point in points}
    entries = [
        (
            line(color=getattr(theme, name), marker=MARKERS[name], linestyle="none"),
            f'"{name}"' if name != "dense" else name,
        )
        for name in ("row", "union", "dense")
        if name in names
    ]
    legend(figure, [*entries, (line(color=theme.muted, linewidth=1.5), "roof")])


# Whole models

OPS = {"forward": "forward, decoder", "logits": "forward with LM head", "train": "training step"}
# Of more groups of bars than these, the eager variants are left to the table.
EAGER_GROUPS = 6
VARIANTS = ("dense eager", "dense compiled", "sparse eager", "sparse compiled")


def models(results: Results) -> Chart | None:
    """Tokens/ms and peak memory of whole models, dense beside sparse (h200_model*)."""
    groups: list[Row] = []
    machines = []
    for result in results.matching("h200_model*").values():
        rows = [row for row in good(result) if row.get("op") in OPS and row.get("variant") in VARIANTS]
        by_group: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            by_group.setdefault((row.get("config") or str(result["arguments"]["model"]), row["op"]), []).append(row)
        for (model, op), found in by_group.items():
            active = found[0].get("non_zeros") or result.get("non_zeros")
            bars = {
                row["variant"]: {
                    "rate": row["tokens_per_ms"],
                    "peak": None if row.get("peak_bytes") is None else row["peak_bytes"] / 1e9,
                    "energy": row.get("mj_per_token"),
                }
                for row in found
            }
            # its size, without what else is said of it
            group = {"model": model.split(",")[0].split(" (")[0], "op": op, "bars": bars}
            groups.append(group | {"nnz": statistics.fmean(active) if active else None})
        if rows:
            machines.append(result["machine"])
    if len(groups) > EAGER_GROUPS:
        for group in groups:
            group["bars"] = {name: bar for name, bar in group["bars"].items() if "eager" not in name}
    if not groups:
        return None
    groups.sort(key=lambda group: list(OPS).index(group["op"]))
    gains = {
        kind: [
            group["bars"]["sparse compiled"]["rate"] / group["bars"]["dense compiled"]["rate"]
            for group in groups
            if (group["op"] == "train") == (kind == "train")
            and {"sparse compiled", "dense compiled"} <= set(group["bars"])
        ]
        for kind in ("forward", "train")
    }
    said = {"forward": "forward pass", "train": "training step"}
    parts = ", ".join(f"{said[kind]} {span(gains[kind], 2)} times" for kind in gains if gains[kind])
    title = f"Whole compiled models: {parts} as fast as dense" if parts else "Whole models"
    footer = "\n".join(dict.fromkeys(machines))
    used = {name for group in groups for name in group["bars"]}
    return Chart(title, footer, groups, draw_models, (SIZE[0], 1.9 + (0.22 + 0.14 * len(used)) * len(groups)))


def draw_models(figure: SubFigure, theme: Theme, data: list[Row]) -> None:
    colours = {"dense eager": theme.dense, "dense compiled": theme.dense, "sparse eager": theme.row}
    colours["sparse compiled"] = theme.row
    used = [name for name in VARIANTS if any(name in group["bars"] for group in data)]
    fields = {
        "rate": ("Tokens/ms: more is better", "{:.0f}"),
        "peak": ("Peak GB: less is better", "{:.1f}"),
        "energy": ("mJ/token: less is better", "{:.2f}"),
    }
    bars = [bar for group in data for bar in group["bars"].values()]
    shown = [field for field in fields if any(bar[field] is not None for bar in bars)]
    panels = figure.subplots(1, len(shown), sharey=True, width_ratios=[1.4, *[1] * (len(shown) - 1)], squeeze=False)[0]
    height = 0.8 / len(used)
    for axes, field in zip(panels, shown):
        title, form = fields[field]
        for i, group in enumerate(data):
            for j, name in enumerate(used):
                value = group["bars"].get(name, {}).get(field)
                if value is None:
                    continue
                place = i + (j - (len(used) - 1) / 2) * height
                hatch = "////" if "eager" in name else ""
                axes.barh(place, value, 0.92 * height, color=colours[name], hatch=hatch, edgecolor=theme.ground)
                text = " " + form.format(value)
                reference = group["bars"].get("dense compiled")
                if name == "sparse compiled" and reference and field == "rate":
                    text += f"  ({value / reference[field]:.2f}x)"
                axes.text(value, place, text, va="center", fontsize=7.5)
        axes.set_xlim(0, (1.3 if field == "rate" else 1.22) * max(bar[field] or 0.0 for bar in bars))
        axes.set_xlabel(title)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    names = [
        f"{OPS[group['op']]}\n{group['model']}" + ("" if group["nnz"] is None else f", {group['nnz']:.0f} non-zeros")
        for group in data
    ]
    panels[0].set_yticks(range(len(data)), names, fontsize=8)
    panels[0].invert_yaxis()
    legend(
        figure,
        [
            (patch(facecolor=colours[name], edgecolor=theme.ground, hatch="////" if "eager" in name else ""), name)
            for name in used
        ],
    )


# Training runs


def training(results: Results) -> Chart | None:
    """Loss and non-zeros of training runs, step by step (h200_training_run)."""
    result = results.get("h200_training_run")
    if result is None or not result.get("runs"):
        return None
    curves = {
        name: {
            "step": [row["step"] for row in run],
            "ce": [row["ce"] for row in run],
            "non_zeros": [row["non_zeros"] for row in run],
            "held_out": [[row["step"], row["held_out_ce"]] for row in run if row.get("held_out_ce")],
            "rate": statistics.median(row["tokens_per_s"] for row in run[len(run) // 2 :]),
        }
        for name, run in result["runs"].items()
    }
    final = {name: curve["held_out"][-1][1] for name, curve in curves.items() if curve["held_out"]}
    dense = [value for name, value in final.items() if name.startswith("dense")]
    title = "Sparse training follows dense"
    if "sparse" in final and dense:
        ratio = curves["sparse"]["rate"] / max(curves[name]["rate"] for name in final if name.startswith("dense"))
        title += (
            f": held-out loss {final['sparse']:.2f}, dense {span(dense, 2)}, at {ratio:.2f} times the tokens a second"
        )
    options = result["options"]
    note = f"{options['config']}, {int(options['tokens_per_step']):,} tokens a step, L1 {float(options['l1']):g}; "
    return Chart(title, note + result["machine"], curves, draw_training, (SIZE[0], 4.5))


def draw_training(figure: SubFigure, theme: Theme, data: dict[str, Any]) -> None:
    loss, active = figure.subplots(1, 2)
    palette = {"dense": theme.dense, "dense again": theme.auto, "sparse": theme.row}
    others = iter((theme.union, theme.extra, theme.paper) * len(data))
    entries = []
    for name, curve in data.items():
        style = {"color": palette.get(name) or next(others), "linestyle": "--" if "again" in name else "-"}
        loss.plot(curve["step"], curve["ce"], **style)
        if curve["held_out"]:
            loss.plot(*of_line(curve["held_out"]), "o", color=style["color"], markeredgecolor=theme.ground, zorder=4)
        active.plot(curve["step"], curve["non_zeros"], **style)
        entries.append((line(**style), name))
    entries.append((line(color=theme.muted, marker="o", linestyle="none"), "held out"))
    loss.set(xlabel="step", ylabel="cross-entropy (nats a token)", title="Training loss")
    active.set(xlabel="step", title="Activity")
    log_axis(active, "y", [value for curve in data.values() for value in curve["non_zeros"]])
    active.set_ylabel("non-zeros a token and layer (log)")
    legend(figure, entries)


def quality(results: Results) -> Chart | None:
    """Cross-entropy, non-zeros by layer and dead neurons against the coefficient of L1."""
    result = results.get("h200_quality")
    return result and Chart(_quality.TITLE, result["machine"], _quality.shown(result), _quality.draw, _quality.SIZE)


ALL: dict[str, Callable[[Results], Chart | None]] = {
    "speedup": speedup,
    "nnz": nnz,
    "tokens": tokens,
    "layers": layers,
    "memory": memory,
    "kernels": kernels,
    "roofline": roofline,
    "models": models,
    "training": training,
    "quality": quality,
}


def check(chart: Chart | None, stem: Path) -> list[str]:
    """What is wrong with a chart's files."""
    files = _style.outputs(stem)
    if chart is None:
        return [f"{path.name}: there is no data for it" for path in files if path.exists()]
    wrong = []
    for path in files:
        if not path.exists():
            wrong.append(f"{path.name}: missing")
        elif _style.data_of(path).split(" ")[0] != chart.digest:
            wrong.append(f"{path.name}: shows other data")
    if wrong or any(_style.data_of(path) != f"{chart.digest} {matplotlib_version()}" for path in files):
        return wrong
    with tempfile.TemporaryDirectory() as folder:
        for drawn in chart.save(Path(folder) / stem.name, ("svg",)):
            if drawn.read_bytes() != (stem.parent / drawn.name).read_bytes():
                wrong.append(f"{drawn.name}: is drawn otherwise now")
    return wrong


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    described = "\n".join(f"  {name:<10} {(make.__doc__ or '').splitlines()[0]}" for name, make in ALL.items())
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__.format(charts=described), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("charts", nargs="*", metavar="CHART", help="default: all whose data is there")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="default: profiling/results")
    add("--out", type=Path, default=CHARTS, metavar="FOLDER", help="default: profiling/charts")
    add("--check", action="store_true", help="compare, write nothing")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.charts if name not in ALL]
    if unknown:
        parser.error(f"expected charts out of {', '.join(ALL)}, got {', '.join(unknown)}")
    if not arguments.results.is_dir():
        parser.error(f"expected a folder of results, got {arguments.results}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    results = Results(arguments.results)
    wrong: list[str] = []
    try:
        _style.require()
        for name in arguments.charts or ALL:
            chart = ALL[name](results)
            if chart is None and arguments.charts:
                raise ResultError(f"{arguments.results} has no data for {name}: {ALL[name].__doc__}")
            if arguments.check:
                wrong += check(chart, arguments.out / name)
            elif chart is not None:
                chart.save(arguments.out / name)
                print(f"{name}: {chart.title}")
    except (ResultError, ImportError) as error:
        print(f"charts: error: {error}", file=sys.stderr)
        return 2
    if wrong:
        print("\n".join(wrong), "python profiling/charts.py draws them anew", sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
