"""The chart of ``twell analyze``: shares of neurons and predicted times by layer."""

import math
from pathlib import Path
from typing import Any

from twell import _files
from twell._analyze.report import Analysis

_COLOURS = ("#1f4e79", "#c55a11", "#548235", "#7030a0", "#bf9000", "#9dc3e6", "#7f7f7f")
_MARKERS = {"row": "o", "union": "s", "union+screen": "^", "dense": "x"}


def require() -> None:
    """Raise ImportError, naming the extra, unless matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}. Charts need matplotlib: pip install 'twell[plots]'") from error


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
    lines: dict[str, list[Any]] = {
        "a token": [each.mean / each.n for each in found.layers],
        "128 tokens of a text": [each.union for each in found.layers],
        "128 tokens of a batch": [each.mixed for each in found.layers],
        "dead": [each.dead and each.dead / each.n for each in found.layers],
    }
    for (label, shares), colour in zip(lines.items(), _COLOURS):
        above.plot(numbers, [math.nan if y is None else 100 * y for y in shares], "o-", color=colour, label=label)
    above.set(ylabel="% of the neurons", title="Neurons that fire", ylim=(0, 100))
    for i, (call, of) in enumerate(zip(found.calls, zip(*found.predictions))):
        colour = _COLOURS[i % len(_COLOURS)]
        ratios = [math.nan if each.ratio is None else each.ratio for each in of]
        below.plot(numbers, ratios, color=colour, label=str(call))
        for number, ratio, each in zip(numbers, ratios, of):
            below.plot([number], [ratio], _MARKERS[each.route], color=colour, markersize=6)
    for route, marker in _MARKERS.items():
        below.plot([], [], marker, color=_COLOURS[-1], label=route)
    below.axhline(1, color=_COLOURS[-1], linewidth=1, linestyle=":")
    below.set(ylabel="of dense's time", title="Predicted time of the layer", xlabel="layer")
    below.set_ylim(bottom=0)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(found.title), fontsize=11)
    with matplotlib.rc_context({"svg.hashsalt": "twell"}), _files.replacing(path) as partial:
        figure.savefig(partial, dpi=110, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
