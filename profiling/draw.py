"""Draw profiling/charts/ from profiling/results/, and the dark diagrams of docs/figures/: ``python -m profiling.draw``.

Each picture is an SVG, light and, in other colours, dark. Light diagrams are kept by hand. ``--check`` writes nothing:
the exit status is 1 if a picture would be drawn otherwise now, by the matplotlib that drew it.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from profiling.figures import Row, by_case, good, machine, result
from twell.base import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

ROOT = Path(__file__).resolve().parents[1]
CHARTS, DIAGRAMS = ROOT / "profiling" / "charts", ROOT / "docs" / "figures"
# Inches. At 100 pixels per inch it is that of a README's column.
WIDTH = 8.3
# Of a light page, and of a dark one. Readers without red-green vision can tell them apart on the ground.
GROUND, TEXT, MUTED, GRID = "#ffffff", "#1f2328", "#59636e", "#e4e7eb"
ROW, UNION, AUTO, DENSE, PAPER, EXTRA = "#0a66b5", "#c64600", TEXT, "#7d8590", "#8e2f6b", "#12855f"
DARK = {GROUND: "#0d1117", TEXT: "#e6edf3", MUTED: "#9198a1", GRID: "#262c36", ROW: "#58a6ff", UNION: "#f28c28"}
DARK |= {DENSE: "#8b949e", PAPER: "#d58fd8", EXTRA: "#2fbf8f"}
# The line at the speed of dense.
BASELINE: dict[str, Any] = {"color": MUTED, "linewidth": 1.2}


class Chart(NamedTuple):
    """title: states the finding. footer: small print below, notes and the machine line. height: in inches."""

    title: str
    footer: str
    height: float
    draw: Callable[[SubFigure], None]


def svg(chart: Chart) -> str:
    """The picture: the same bytes for the same data by the same version of matplotlib, which it names."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    settings: dict[str, Any] = {"font.family": ["DejaVu Sans"], "svg.hashsalt": "twell", "svg.fonttype": "path"}
    settings |= {"font.size": 10, "axes.titlesize": 11, "axes.labelsize": 10, "axes.axisbelow": True, "axes.grid": True}
    settings |= dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9)
    settings |= {"lines.linewidth": 2.0, "lines.markersize": 5, "grid.linewidth": 0.8, "grid.color": GRID}
    settings |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "path.simplify"), False)
    settings |= dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), GROUND)
    settings |= dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color"), TEXT)
    settings |= dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), TEXT)
    settings |= dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        figure, layout = Figure(figsize=(WIDTH, chart.height)), ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.05)
        figure.set_layout_engine(layout)
        FigureCanvasAgg(figure)
        # no line break between a number and its percent sign
        wrapped = textwrap.fill(chart.title.replace(" %", "\xa0%"), int(9.6 * WIDTH)).replace("\xa0", " ")
        figure.suptitle(wrapped, x=0.012, ha="left", fontsize=12, fontweight="bold")
        # in a subfigure, so that a legend outside the axes keeps clear of title and footer
        chart.draw(figure.add_subfigure(figure.add_gridspec(1, 1)[0]))
        wrapped = "\n".join(filled(line, int(15.6 * WIDTH)) for line in chart.footer.splitlines())
        figure.supxlabel(wrapped, x=0.012, ha="left", fontsize=8, color=MUTED)
        layout.execute(figure)
        figure.set_layout_engine("none")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def filled(text: str, width: int) -> str:
    """Wrap text at ``width`` characters; short parts between semicolons stay whole."""
    parts = [part.replace(" ", "\xa0") if len(part) < width / 3 else part for part in text.split("; ")]
    return textwrap.fill("; ".join(parts), width, break_on_hyphens=False).replace("\xa0", " ")


def darkened(light: str) -> str:
    return re.sub("#[0-9a-f]{6}(?![0-9a-f])", lambda match: DARK[match[0]], light)


def sizes(rows: Sequence[Row]) -> str:
    """M, K and N for the small print, as far as all rows share them."""
    values = {name: {row[name] for row in rows} for name in "mkn"}
    parts = [f"{name.upper()} = {value:,}" for name, own in values.items() if len(own) == 1 for value in own]
    return ", ".join(parts) + "; " if parts else ""


def legend(figure: SubFigure, entries: Mapping[str, Any]) -> None:
    handles, labels = [*entries.values()], [*entries]
    figure.legend(handles, labels, loc="outside upper left", ncols=6, columnspacing=1.6, handlelength=2.2)


# Speed-up by workload

KINDS = ("eager", "compiled")
WORKLOADS = ("real3", "uniform29", "topic29", "skew29", "real6", "topic128", "dense911")
EXPLAINED = (
    "real: layers of a trained model; uniform, topic, skew: drawn patterns; dense911: as trained without L1; "
    "non-zeros per token; dense: the faster of eager and compiled PyTorch"
)


class Bar(NamedTuple):
    """paper: the speed-up of the paper's code, 0 if its result was wrong."""

    label: str
    speedup: float
    strategy: str
    paper: float | None


def speedup() -> Chart:
    """Forward and training step of the named workloads, and the paper's code, beside dense PyTorch."""
    bars, spans = {"forward pass": [*bars_of("ffn", "")], "training step": [*bars_of("train", " train")]}, []
    for what, own in bars.items():
        gains = sorted(bar.speedup for bar in own if bar.strategy != "dense")
        span = " to ".join(dict.fromkeys(f"{gain:.1f}" for gain in (gains[0], gains[-1])))
        spans.append(f"{what} {span} times")
    footer = f"{EXPLAINED}\ntwell: {sizes(result('auto')['rows'])}{machine(result('auto'))}\nthe paper's code: "
    footer += f"{machine(result('paper_code'))}; compared with dense on the same machine"

    def draw(figure: SubFigure) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        panels = figure.subplots(1, 2, sharey=True)
        for axes, (what, own) in zip(panels, bars.items()):
            draw_bars(axes, own)
            axes.set(title=f"{what.capitalize()} of a layer", xlabel="speed-up over dense PyTorch")
            axes.xaxis.set_major_formatter("{x:g}x")
            axes.set_xlim(0, 1.3 * max([1.0, *(bar.speedup for bar in own)]))
        panels[0].set_ylim(max(map(len, bars.values())) - 0.45, -0.55)
        entries = {
            "twell and its strategy": Patch(color=ROW),
            "the paper's code, in eager calls, where its result was right": Patch(color=PAPER),
            "dense PyTorch = 1x": Line2D([], [], **BASELINE),
        }
        legend(figure, entries)

    return Chart(f"Layers that run sparse: {', '.join(spans)} as fast as dense", footer, 5.3, draw)


def bars_of(variant: str, suffix: str) -> Iterator[Bar]:
    """The workloads whose calls of "auto" and of dense PyTorch were right."""
    papers = by_case(result("paper_code")["rows"], "workload")
    for workload in WORKLOADS:
        rows = {row["variant"]: row for row in good("auto") if row["workload"] == workload}
        dense = [rows[name]["ms"] for kind in KINDS if (name := f"dense {kind}{suffix}") in rows]
        if not dense or variant not in rows:
            continue
        ours, other = rows[variant], papers.get((workload,), {})
        theirs = other.get(f"paper{suffix}")
        paper = 0.0 if theirs and theirs["red"] else None
        if paper is None and theirs and theirs["queued_ms"]:
            paper = min(other[f"dense {kind}{suffix}"]["queued_ms"] for kind in KINDS) / theirs["queued_ms"]
        label = f"{workload}\n{ours['nnz']:.0f} non-zeros"
        yield Bar(label, min(dense) / ours["ms"], ours["strategy"], paper)


def draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    for i, bar in enumerate(bars):
        axes.barh(i - 0.19, bar.speedup, 0.36, color=ROW)
        axes.text(bar.speedup, i - 0.19, f" {bar.speedup:.2f}x {bar.strategy}", va="center", fontsize=8.5)
        if bar.paper is not None:
            axes.barh(i + 0.19, bar.paper, 0.36, color=PAPER)
            text = f" {bar.paper:.2f}x" if bar.paper else " wrong result"
            # over the line at 1
            box = {"facecolor": GROUND, "edgecolor": "none", "pad": 0.4}
            axes.text(bar.paper, i + 0.19, text, va="center", fontsize=8.5, color=PAPER, bbox=box)
    axes.axvline(1, zorder=1.5, **BASELINE)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)


# Speed-up by non-zeros

PATTERNS = {"uniform": "Uniform: all neurons fire alike", "topic": "Topic: nearby tokens share neurons"}
# Ticks of speed-up, and the lowest that is shown.
SPEEDS, SLOWEST = (0.125, 0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16), 0.125
# Two strategies whose times differ by less than this share do not cross: in another run the other may be ahead.
ALIKE = 0.01
# speed-up by non-zeros, ascending
Line = dict[float, float]


def nnz() -> Chart:
    """Speed-up of each strategy by non-zeros per token, crossovers marked."""
    panels = {pattern: lines_of(pattern) for pattern in PATTERNS}
    limits = []
    for pattern, lines in panels.items():
        # of the better sparse strategy
        both = [lines["row"], lines["union"]]
        best = {x: max(own[x] for own in both if x in own) for x in sorted({x for own in both for x in own})}
        if crossed := crossings(best):
            limits.append(f"{count(crossed[-1])} ({pattern})")
    found = f": the forward pass beats dense up to {' and '.join(limits)} non-zeros per token" if limits else ""
    every = [y for lines in panels.values() for own in lines.values() for y in own.values()]
    note = f"below {SLOWEST:g}x not shown; " if min(every) < SLOWEST else ""
    note += 'training ends where "auto" runs dense\n'

    def draw(figure: SubFigure) -> None:
        from matplotlib.lines import Line2D

        looks = {"row": (ROW, "o"), "union": (UNION, "s"), "auto": (AUTO, "D"), "dense": (DENSE, "x")}
        looks["train"] = (EXTRA, "^")
        styles: dict[str, Any] = {name: {"color": colour, "marker": each} for name, (colour, each) in looks.items()}
        # above the line of the chosen strategy
        styles["auto"] |= {"linestyle": "--", "linewidth": 1.2, "markersize": 3.5, "zorder": 3}
        styles["dense"] |= {"linewidth": 1.2}
        axes_of = figure.subplots(1, len(panels), sharey=True)
        for axes, (pattern, lines) in zip(axes_of, panels.items()):
            draw_lines(axes, lines, styles)
            axes.set(title=PATTERNS[pattern], xlabel="non-zeros per token (log)")
            # ticks at powers of 4
            axes.set_xscale("log", base=4)
            values = [x for own in lines.values() for x in own]
            room = max(max(values) / min(values), 4) ** 0.04
            low, high = min(values) / room, max(values) * room
            ticks = [4.0**i for i in range(-9, 10) if low <= 4.0**i <= high]
            axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
            axes.set_xticks([], minor=True)
            axes.set_xlim(low, high)
            low, high = 0.93 * max(SLOWEST, min(1.0, *every)), 1.08 * max(1.0, *every)
            ticks = [tick for tick in SPEEDS if low <= tick <= high]
            axes.set_yscale("log")
            axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
            axes.set_yticks([], minor=True)
            axes.set_ylim(low, high)
        axes_of[0].set_ylabel("speed-up over dense (log)")
        named = {"train": 'training step, "auto"', "row": 'forward: "row"'}
        shown = [name for name in styles if any(name in lines for lines in panels.values())]
        legend(figure, {named.get(name, f'"{name}"'): Line2D([], [], **styles[name]) for name in shown})

    footer = sizes(result("sweep_nnz")["rows"]) + note + machine(result("sweep_nnz"))
    return Chart(f"Fewer non-zeros, more speed{found}", footer, 4.8, draw)


def lines_of(pattern: str) -> dict[str, Line]:
    """The lines of a pattern by strategy, and "train", which ends where "auto" runs dense."""
    found: dict[str, Line] = {name: {} for name in ("row", "union", "auto", "dense", "train")}
    for row in good("sweep_nnz"):
        name = {"ffn": row["requested"], "train": "train" * (row["requested"] == "auto")}.get(row["variant"])
        dense = name == "train" and row["strategy"] == "dense"
        if ("topic=" in row["workload"]) == (pattern == "topic") and name and not dense and row["nnz"] > 0:
            found[name][row["nnz"]] = row["speedup_dense"]
    return {name: dict(sorted(own.items())) for name, own in found.items() if own}


def crossings(own: Mapping[float, float]) -> list[float]:
    """Every x where y crosses 1, by straight lines in log x and log y."""
    found, points = [], list(own.items())
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        a, b = math.log(y0), math.log(y1)
        if a * b < 0 or (a != 0 and b == 0):
            found.append(math.exp(math.log(x0) + (math.log(x1) - math.log(x0)) * a / (a - b)))
    return found


def marks(lines: Mapping[str, Line]) -> list[tuple[float, float, str]]:
    """Crossovers of the strategies and dense. Two strategies cross where they differ by ``ALIKE`` on both sides."""
    found = [(x, 1.0, f"{name} = dense") for name in ("row", "union", "train") for x in crossings(lines.get(name, {}))]
    row, union = lines["row"], lines["union"]
    apart = {x: row[x] / union[x] for x in row if x in union and abs(row[x] / union[x] - 1) > ALIKE}
    for x in crossings(apart):
        x0, x1 = max(at for at in apart if at <= x), min(at for at in apart if at > x)
        t = math.log(x / x0) / math.log(x1 / x0)
        found.append((x, row[x0] ** (1 - t) * row[x1] ** t, "row = union"))
    return sorted(found, key=lambda mark: mark[0])


def draw_lines(axes: Axes, lines: Mapping[str, Line], styles: Mapping[str, Any]) -> None:
    for name, own in lines.items():
        axes.plot([*own], [*own.values()], **styles[name])
    axes.axhline(1, zorder=1.5, **BASELINE)
    said = [("Crossovers, non-zeros per token:", TEXT)]
    for x, y, what in marks(lines):
        axes.plot(x, y, "o", markersize=10, fillstyle="none", color=TEXT, zorder=5)
        said.append((f"{what} at {count(x)}", styles[what.split()[0]]["color"]))
    box = {"facecolor": GROUND, "edgecolor": "none", "pad": 0.5}
    for i, (text, colour) in enumerate(reversed(said)):
        place = {"transform": axes.transAxes, "bbox": box, "fontsize": 9, "zorder": 4}
        axes.text(0.04, 0.04 + 0.06 * i, text, color=colour, **place)  # type: ignore[arg-type]


def count(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def drawn() -> Iterator[tuple[Path, str]]:
    """Each picture's file, and what it must hold."""
    light = {CHARTS / f"{make.__name__}-light.svg": svg(make()) for make in (speedup, nnz)}
    yield from light.items()
    for path in (*light, *sorted(DIAGRAMS.glob("*-light.svg"))):
        text = light.get(path) or path.read_text(encoding="utf-8")
        yield path.with_name(path.name.replace("-light", "-dark")), darkened(text)


def drawn_by(text: str) -> list[str]:
    """The version of matplotlib that drew a picture; none of a diagram."""
    return re.findall(r"Matplotlib v([\d.]+),", text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check, wrong = parser.parse_args(argv).check, []
    for path, text in drawn():
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if not check:
            files.write_text(path, text)
        elif before != text and drawn_by(before) in ([], drawn_by(text)):
            wrong.append(f"{path.name} is drawn otherwise now")
    if wrong:
        print(*wrong, "python -m profiling.draw draws them again", sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
