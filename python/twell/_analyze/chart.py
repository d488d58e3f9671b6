"""The chart of ``twell analyze``: non-zeros, unions and predicted times by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twell import _files
from twell._analyze.report import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREY = "#7f7f7f"
_COLOURS = ("#1f4e79", "#c55a11", "#548235", "#7030a0", "#bf9000", "#9dc3e6")
_MARKERS = {"row": "o", "union": "s", "union+screen": "^", "dense": "x"}


def require() -> None:
    """Raise ImportError, naming the extra, unless matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}. Charts need matplotlib: pip install 'twell[plots]'") from error


def _figures(axes: Axes, numbers: Sequence[int], found: Analysis) -> None:
    nan = float("nan")
    lines = {
        "a token": [each.mean / each.n for each in found.layers],
        "128 tokens of a text": [nan if each.union is None else each.union for each in found.layers],
        "128 tokens of a batch": [nan if each.mixed is None else each.mixed for each in found.layers],
        "dead": [nan if each.dead is None else each.dead / each.n for each in found.layers],
    }
    for (label, shares), colour in zip(lines.items(), (*_COLOURS[:3], _GREY)):
        axes.plot(numbers, [100 * share for share in shares], "o-", color=colour, label=label)
    axes.set(ylabel="% of the neurons", title="Neurons that fire", ylim=(0, 100))


def _times(axes: Axes, numbers: Sequence[int], found: Analysis) -> None:
    for i, (call, of) in enumerate(zip(found.calls, zip(*found.predictions))):
        ratios = [float("nan") if each.ratio is None else each.ratio for each in of]
        axes.plot(numbers, ratios, color=_COLOURS[i % len(_COLOURS)], label=str(call))
        for number, ratio, each in zip(numbers, ratios, of):
            axes.plot([number], [ratio], _MARKERS[each.route], color=_COLOURS[i % len(_COLOURS)], markersize=6)
    for route, marker in _MARKERS.items():
        axes.plot([], [], marker, color=_GREY, label=route)
    axes.axhline(1, color=_GREY, linewidth=1, linestyle=":")
    axes.set(ylabel="of dense's time", title="Predicted time of the layer", xlabel="layer")
    axes.set_ylim(bottom=0)


def save(path: Path, found: Analysis) -> None:
    """Write the chart in the format of the path's suffix: the same bytes for the same figures."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    suffix = path.suffix.lower().removeprefix(".")
    numbers = [each.number for each in found.layers]
    figure = Figure(figsize=(max(10, min(22, 4 + 0.4 * len(numbers))), 9), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    _figures(above, numbers, found)
    _times(below, numbers, found)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(found.title), fontsize=11)
    with matplotlib.rc_context({"svg.hashsalt": "twell"}), _files.replacing(path) as partial:
        figure.savefig(partial, dpi=110, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
