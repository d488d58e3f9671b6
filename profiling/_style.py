"""How charts look: two themes, one palette, and files that are the same bytes for the same data.

    def draw(figure: SubFigure, theme: Theme) -> None:
        axes = figure.subplots()
        axes.plot(steps, loss, color=theme.colours[0], label="sparse")
        axes.set(xlabel="step", ylabel="cross-entropy (nats)")
        axes.legend()

    save(draw, Path("charts/loss"), title="Sparse training follows dense", footer=machine)

writes ``loss-light.png``, ``loss-dark.png``, ``loss-light.svg`` and ``loss-dark.svg``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

# Inches. At 100 pixels an inch the width is that of a README's column; PNGs have more for dense screens.
SIZE = (8.3, 4.6)
DPI = 160
SUFFIXES = ("png", "svg")
# What names the data that a file shows, in its metadata.
KEY = "twell-data"


@dataclass(frozen=True)
class Theme:
    """Colours of a page. ``colours`` are told apart without red-green vision and stand out from ``ground``.

    ``row``, ``union``, ``auto``, ``dense`` and ``paper`` belong to these in every chart.
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
        """For series without a colour of their own, in order."""
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
    """Raise ImportError, naming the extra, unless matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}. Charts take matplotlib: pip install twell[plots]") from error


def outputs(stem: Path) -> list[Path]:
    """The files of a chart."""
    return [stem.with_name(f"{stem.name}-{theme.name}.{suffix}") for suffix in SUFFIXES for theme in THEMES]


def save(
    draw: Callable[[SubFigure, Theme], None],
    stem: Path,
    *,
    size: tuple[float, float] = SIZE,
    title: str = "",
    footer: str = "",
    data: str = "",
    suffixes: tuple[str, ...] = SUFFIXES,
) -> list[Path]:
    """Write the figure whose body ``draw`` fills, light and dark, and return the files.

    ``title`` states the finding; ``footer`` is small print below, the machine line of the data. ``data`` goes into the
    metadata of each file. The same call writes the same bytes with the same version of matplotlib. ImportError
    without matplotlib.
    """
    require()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    stem.parent.mkdir(parents=True, exist_ok=True)
    written = [path for path in outputs(stem) if path.suffix[1:] in suffixes]
    for theme in THEMES:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(theme.rc)
            figure, layout = Figure(figsize=size), ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.05)
            figure.set_layout_engine(layout)
            FigureCanvasAgg(figure)
            if title:
                wrapped = "\n".join(textwrap.wrap(title, int(9.6 * size[0])))
                figure.suptitle(wrapped, x=0.012, ha="left", fontsize=12, fontweight="bold")
            # a part of its own, so that a legend outside of the axes keeps clear of title and footer
            draw(figure.add_subfigure(figure.add_gridspec(1, 1)[0]), theme)
            if footer:
                wrapped = "\n".join(textwrap.fill(line, int(17.5 * size[0])) for line in footer.splitlines())
                figure.supxlabel(wrapped, x=0.012, ha="left", fontsize=7, color=theme.muted)
            # one layout for all formats: each drawing would begin where the one before left off
            layout.execute(figure)
            figure.set_layout_engine("none")
            for path in written:
                if path.stem.endswith(f"-{theme.name}"):
                    figure.savefig(path, dpi=DPI, metadata=metadata(path, data))
    return written


def metadata(path: Path, data: str) -> dict[str, str | None]:
    """What a file says of itself: no date, no name of a program, but the data that it shows."""
    if path.suffix == ".svg":
        return {"Date": None, "Creator": None, "Identifier": f"{KEY}:{data}" if data else None}
    return {"Software": None} | ({KEY: data} if data else {})


def data_of(path: Path) -> str:
    """``data`` as ``save`` was given it, empty if the file has none."""
    content = path.read_bytes()
    # of a PNG's text chunk the keyword, a zero byte, the text and four bytes of checksum; of an SVG an element's text
    start, stop = (f"{KEY}:".encode(), b"<") if path.suffix == ".svg" else (b"tEXt" + KEY.encode() + b"\0", None)
    place = content.find(start)
    if place < 0:
        return ""
    first = place + len(start)
    if stop is not None:
        return content[first : content.index(stop, first)].decode()
    length = int.from_bytes(content[place - 4 : place], "big")
    return content[first : place + 4 + length].decode("latin-1")
