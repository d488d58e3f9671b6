"""The chart of ``twell analyze``: non-zeros, unions and expected speed by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twell import _files
from twell.commands.prediction import Prediction
from twell.commands.sparsity import LayerSparsity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEAN, _RANGE, _LIGHT, _GREY = "#c55a11", "#f8cbad", "#9dc3e6", "#7f7f7f"
_BLUE = "#1f4e79"
_CALLS = (_BLUE, "#c55a11", "#548235", "#7030a0", "#bf9000", _GREY)
_MARKERS = {"row": "o", "union": "s", "union+screen": "^", "dense": "x"}


def require() -> None:
    """Raise ImportError, naming the extra, unless matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}. Charts need matplotlib: pip install 'twell[plots]'") from error


def _nonzeros(axes: Axes, layers: Sequence[int], reports: Sequence[LayerSparsity]) -> None:
    low, high = [report.p50 for report in reports], [report.p99 for report in reports]
    axes.bar(layers, [b - a for a, b in zip(low, high)], bottom=low, width=0.6, color=_RANGE, label="p50 to p99")
    axes.plot(layers, [report.mean for report in reports], "D-", color=_MEAN, markersize=5, label="mean")
    axes.plot(layers, [report.most for report in reports], "_", color=_GREY, markersize=12, label="max")
    axes.plot(layers, [report.n for report in reports], ":", color=_GREY, linewidth=1, label="all neurons")
    axes.set_yscale("symlog", linthresh=1, linscale=0.4)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set(ylabel="non-zeros per token", title="Non-zeros per token after ReLU")
    axes.set_ylim(bottom=0)


def _shares(axes: Axes, layers: Sequence[int], reports: Sequence[LayerSparsity]) -> None:
    axes.bar(layers, [100 * r.dead / r.n for r in reports], width=0.6, color="#d9d9d9", label="dead neurons")
    for tokens, colour in ((64, _LIGHT), (128, _BLUE)):
        shares = [100 * report.unions.get(tokens, float("nan")) for report in reports]
        axes.plot(layers, shares, "o-", color=colour, label=f"union of {tokens} tokens")
    axes.set(ylabel="% of the neurons", title="Neurons that neighbouring tokens fire, and dead neurons")
    axes.set_ylim(0, 100)


def _speed(axes: Axes, layers: Sequence[int], predictions: Sequence[Sequence[Prediction]]) -> None:
    for i, of_call in enumerate(zip(*predictions)):
        colour = _CALLS[i % len(_CALLS)]
        axes.plot(layers, [each.speedup for each in of_call], color=colour, label=str(of_call[0].call))
        for layer, each in zip(layers, of_call):
            axes.plot([layer], [each.speedup], _MARKERS[each.strategy], color=colour, markersize=6)
    for strategy, marker in _MARKERS.items():
        axes.plot([], [], marker, color=_GREY, label=strategy)
    axes.axhline(1, color=_GREY, linewidth=1, linestyle=":")
    axes.set(ylabel="times dense's speed", title="Expected speed of the layer with its best strategy")
    axes.set_ylim(0, 1.08 * max(each.speedup for row in predictions for each in row))


def save(path: Path, reports: Sequence[LayerSparsity], predictions: Sequence[Sequence[Prediction]], title: str) -> None:
    """Write the chart in the format of the path's suffix: the same bytes for the same figures."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    suffix = path.suffix.lower().removeprefix(".")
    layers = [report.number for report in reports]
    figure = Figure(figsize=(max(10, min(22, 4 + 0.4 * len(layers))), 12), layout=ConstrainedLayoutEngine(h_pad=0.1))
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True)
    _nonzeros(panels[0], layers, reports)
    _shares(panels[1], layers, reports)
    _speed(panels[2], layers, predictions)
    panels[2].set_xlabel("layer")
    panels[2].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels:
        axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    with matplotlib.rc_context({"svg.hashsalt": "twell"}), _files.replacing(path) as partial:
        figure.savefig(partial, dpi=110, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
