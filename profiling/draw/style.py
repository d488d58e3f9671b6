"""The look of the charts: two themes, one palette, and the same bytes for the same data.

    def draw(figure: SubFigure, theme: Theme) -> None:
        axes = figure.subplots()
        axes.plot(steps, loss, color=theme.row, label="sparse")
        axes.set(xlabel="step", ylabel="cross-entropy (nats)")
        axes.legend()

    save(draw, Path("charts/loss"), title="Sparse training follows dense", footer=machine)

writes ``loss-light.svg`` and ``loss-dark.svg``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

# Inches. At 100 pixels per inch the width is that of a README's column.
SIZE = (8.3, 4.6)


@dataclass(frozen=True)
class Theme:
    """Colours of a page. Readers without red-green vision can tell them apart on ``ground``.

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
) -> list[Path]:
    """Write the figure whose body ``draw`` fills, light and dark, and return the files.

    ``title`` states the finding. ``footer`` is small print below: notes and the machine line. The same call writes the
    same bytes with the same version of matplotlib, which each file names. ImportError without matplotlib.
    """
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
            figure.savefig(path, metadata={"Date": None})
    return written


def _fill(text: str, width: int) -> str:
    """Wrap text at ``width`` characters; short parts between semicolons stay whole."""
    parts = [part.replace(" ", "\xa0") if len(part) < width / 3 else part for part in text.split("; ")]
    return textwrap.fill("; ".join(parts), width, break_on_hyphens=False).replace("\xa0", " ")


def is_comparable(path: Path) -> bool:
    """Whether this version of matplotlib drew the file."""
    import matplotlib

    return f"Matplotlib v{matplotlib.__version__}," in path.read_text(encoding="utf-8")
