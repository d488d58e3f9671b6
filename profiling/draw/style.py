"""The look of the charts: two themes, one palette, and the same bytes for the same data.

    def draw(figure: SubFigure, theme: Theme) -> None:
        axes = figure.subplots()
        axes.plot(steps, loss, color=theme.colours[0], label="sparse")
        axes.set(xlabel="step", ylabel="cross-entropy (nats)")
        axes.legend()

    save(draw, Path("charts/loss"), title="Sparse training follows dense", footer=machine)

writes ``loss-light.svg`` and ``loss-dark.svg``.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.figure import Figure, SubFigure

# Inches. At 100 pixels per inch the width is that of a README's column.
SIZE = (8.3, 4.6)
# Key of the digest in a file's metadata.
KEY = "twell-data"
# Id of the texts that ``arrange`` moves.
MOVABLE = "movable"
# Places for such a text around its point, best first: steps to the right and up.
AROUND = ((1, 0), (0, 1), (1, 1), (-1, 1), (1, -1), (-1, -1), (0, -1), (-1, 0))
SIDES, HEIGHTS = {-1: "right", 0: "center", 1: "left"}, {-1: "top", 0: "center", 1: "bottom"}


@dataclass(frozen=True)
class Theme:
    """Colours of a page. Readers without red-green vision can tell ``colours`` apart on ``ground``.

    ``row``, ``union``, ``auto``, ``dense`` and ``paper`` mean the same in every chart.
    """

    name: str
    ground: str
    text: str
    muted: str
    grid: str
    row: str
    union: str
    auto: str
    dense: str
    paper: str
    extra: str

    @property
    def colours(self) -> tuple[str, ...]:
        """Colours for series without one of their own, in order."""
        return (self.row, self.union, self.extra, self.paper, self.auto, self.dense)

    @property
    def rc(self) -> dict[str, Any]:
        """Settings of matplotlib."""
        return {
            "font.family": ["DejaVu Sans"],
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.labelsize": 10,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "lines.linewidth": 2.0,
            "lines.markersize": 5,
            "figure.facecolor": self.ground,
            "savefig.facecolor": self.ground,
            "axes.facecolor": self.ground,
            "axes.edgecolor": self.muted,
            "axes.labelcolor": self.text,
            "axes.titlecolor": self.text,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": self.grid,
            "grid.linewidth": 0.8,
            "text.color": self.text,
            "xtick.color": self.muted,
            "ytick.color": self.muted,
            "xtick.labelcolor": self.text,
            "ytick.labelcolor": self.text,
            "hatch.color": self.ground,
            "hatch.linewidth": 1.2,
            "svg.fonttype": "path",
            "svg.hashsalt": "twell",
            "path.simplify": False,
        }


LIGHT = Theme(
    name="light",
    ground="#ffffff",
    text="#1f2328",
    muted="#59636e",
    grid="#e4e7eb",
    row="#0a66b5",
    union="#c64600",
    auto="#1f2328",
    dense="#7d8590",
    paper="#8e2f6b",
    extra="#12855f",
)
DARK = Theme(
    name="dark",
    ground="#0d1117",
    text="#e6edf3",
    muted="#9198a1",
    grid="#262c36",
    row="#58a6ff",
    union="#f28c28",
    auto="#e6edf3",
    dense="#8b949e",
    paper="#d58fd8",
    extra="#2fbf8f",
)
THEMES = (LIGHT, DARK)


def require() -> None:
    """Raise ImportError, which names the extra, unless matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}. Charts need matplotlib: pip install 'twell[plots]'") from error


def outputs(stem: Path) -> list[Path]:
    """The files of a chart, light and dark."""
    return [stem.with_name(f"{stem.name}-{theme.name}.svg") for theme in THEMES]


def save(
    draw: Callable[[SubFigure, Theme], None],
    stem: Path,
    *,
    size: tuple[float, float] = SIZE,
    title: str = "",
    footer: str = "",
    data: str = "",
) -> list[Path]:
    """Write the figure whose body ``draw`` fills, light and dark, and return the files.

    ``title`` states the finding. ``footer`` is small print below: notes and the machine line. ``data`` goes into the
    metadata of each file. The same call writes the same bytes with the same version of matplotlib. ImportError without
    matplotlib.
    """
    require()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    stem.parent.mkdir(parents=True, exist_ok=True)
    written = outputs(stem)
    for theme, path in zip(THEMES, written):
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(theme.rc)
            figure, layout = Figure(figsize=size), ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.05)
            figure.set_layout_engine(layout)
            FigureCanvasAgg(figure)
            if title:
                # no line break between a number and its percent sign
                wrapped = textwrap.fill(title.replace(" %", "\xa0%"), int(9.6 * size[0])).replace("\xa0", " ")
                figure.suptitle(wrapped, x=0.012, ha="left", fontsize=12, fontweight="bold")
            # in a subfigure, so that a legend outside the axes keeps clear of title and footer
            draw(figure.add_subfigure(figure.add_gridspec(1, 1)[0]), theme)
            if footer:
                wrapped = "\n".join(_fill(line, int(15.6 * size[0])) for line in footer.splitlines())
                figure.supxlabel(wrapped, x=0.012, ha="left", fontsize=8, color=theme.muted)
            layout.execute(figure)
            figure.set_layout_engine("none")
            arrange(figure)
            figure.savefig(path, metadata=metadata(data))
    return written


def _fill(text: str, width: int) -> str:
    """Wrap text at ``width`` characters; short parts between semicolons stay whole."""
    parts = [part.replace(" ", "\xa0") if len(part) < width / 3 else part for part in text.split("; ")]
    return textwrap.fill("; ".join(parts), width, break_on_hyphens=False).replace("\xa0", " ")


def label(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Label a point. ``save`` puts the text beside it, clear of lines and other texts."""
    found = axes.annotate(text, (x, y), (0, 0), textcoords="offset points", **({"fontsize": 8} | style))
    found.set_gid(MOVABLE)
    found.set_in_layout(False)


def arrange(figure: Figure) -> None:
    """Place the texts of ``label``. The layout must be final."""
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for axes in figure.findobj(Axes):
        texts = [text for text in axes.texts if text.get_gid() == MOVABLE and isinstance(text, Annotation)]
        if not texts:
            continue
        spots, taken = _spots(axes), [t.get_window_extent(renderer) for t in axes.texts if t.get_gid() != MOVABLE]
        if (known := axes.get_legend()) is not None:
            taken.append(known.get_window_extent(renderer))
        for text in texts:
            _place(text, axes, renderer, spots, taken, figure.bbox.x1 - 3)


def _spots(axes: Axes) -> Any:
    """Points in pixels [n, 2] along the lines, markers and error bars of ``axes``, a few pixels apart."""
    import numpy
    from matplotlib.collections import LineCollection

    strokes: list[Any] = []
    for drawn in axes.lines:
        corners = drawn.get_transform().transform(drawn.get_xydata())
        if drawn.get_linestyle() != "None":
            strokes.append(corners)
        if drawn.get_marker() not in ("None", "", None):
            reach = 0.6 * drawn.get_markersize() * axes.figure.dpi / 72
            for x, y in corners:
                strokes += [((x - reach, y), (x + reach, y)), ((x, y - reach), (x, y + reach))]
    for bars in axes.collections:
        if isinstance(bars, LineCollection):
            strokes += [bars.get_transform().transform(segment) for segment in bars.get_segments()]
    pieces = [
        numpy.linspace(one, other, 2 + int(math.dist(one, other) / 3))
        for stroke in strokes
        for one, other in itertools.pairwise(stroke)
    ]
    return numpy.concatenate(pieces) if pieces else numpy.empty((0, 2))


def _place(text: Any, axes: Axes, renderer: RendererAgg, spots: Any, taken: list[Any], edge: float) -> None:
    """Put ``text`` at the place around its point where it hides least, and add that place to ``taken``.

    ``edge`` is the right edge of the page.
    """
    from matplotlib.transforms import Bbox

    # a text may stick out a little at the right end of the axes
    frame = Bbox.from_extents(*axes.bbox.min, min(axes.bbox.x1 + 25, edge), axes.bbox.y1)
    choices: list[tuple[float, int, dict[str, Any], Bbox]] = []
    for far, (across, up) in itertools.product((6, 10, 15), AROUND):
        near = far * (0.7 if across and up else 1)
        place = {"position": (across * near, up * near), "ha": SIDES[across], "va": HEIGHTS[up]}
        text.set(**place)
        box = text.get_window_extent(renderer)
        cost = float(((spots > box.min - 1) & (spots < box.max + 1)).all(1).sum())
        cost += 100 * sum(box.padded(3).overlaps(other) for other in taken)
        cost += 100 * (not (frame.contains(*box.min) and frame.contains(*box.max)))
        choices.append((cost, len(choices), place, box))
    _, _, place, box = min(choices, key=lambda choice: choice[:2])
    text.set(**place)
    taken.append(box)


def metadata(data: str) -> dict[str, str | None]:
    """Metadata of a file: the data that it shows, no date and no program."""
    return {"Date": None, "Creator": None, "Identifier": f"{KEY}:{data}" if data else None}


def data_of(path: Path) -> str:
    """The ``data`` that ``save`` was given, empty if the file has none."""
    _, found, rest = path.read_text(encoding="utf-8").partition(f"{KEY}:")
    return rest.partition("<")[0] if found else ""
