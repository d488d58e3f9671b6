"""The demo's picture: training curve, and non-zeros per layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from twell import _files
from twell.commands.demo.model import Reading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOSS, _COUNT, _MEAN = "#1f4e79", "#c55a11", "#222222"


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average over about a fiftieth of the run, corrected for its start."""
    keep = 1 - 1 / max(1.0, len(values) / 50)
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + 1 - keep
        out.append(total / weight)
    return out


def _plain_ticks(value: float, position: float | None) -> str:
    """Label 0 and 1, 2, 3, 5 and 7 of each decade of a logarithmic axis in plain digits."""
    return f"{value:g}" if f"{value:e}"[0] in "012357" else ""


def _training(axes: Axes, readings: Sequence[Reading], held_back_loss: float) -> None:
    steps = [r.step for r in readings]
    axes.plot(steps, [r.loss for r in readings], color=_LOSS, alpha=0.25, linewidth=0.8)
    marker = "." if len(steps) < 30 else None
    axes.plot(steps, _smooth([r.loss for r in readings]), color=_LOSS, linewidth=1.8, marker=marker)
    axes.axhline(held_back_loss, color=_LOSS, linewidth=1, linestyle=":")
    axes.annotate(
        f"held-back text: {held_back_loss:.2f}",
        (0.02, held_back_loss),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
        color=_LOSS,
        fontsize=9,
    )
    axes.set(xlabel="training step", title="Training")
    axes.set_ylabel("cross-entropy (nats per byte)", color=_LOSS)
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    right.plot(steps, [r.non_zeros for r in readings], color=_COUNT, linewidth=1.8, marker=marker)
    right.set_ylabel("non-zeros per token and layer", color=_COUNT)
    right.set_yscale("log")
    right.yaxis.set_major_formatter(_plain_ticks)
    right.yaxis.set_minor_formatter(_plain_ticks)
    right.spines["top"].set_visible(False)


def _distribution(axes: Axes, per_token: Sequence[Tensor], neurons: int) -> None:
    data = [counts.tolist() for counts in per_token]
    boxes = axes.boxplot(
        data,
        positions=range(len(data)),
        whis=(1, 99),
        widths=0.6,
        patch_artist=True,
        showmeans=True,
        flierprops={"marker": ".", "markersize": 2, "markeredgecolor": _COUNT, "alpha": 0.3},
        meanprops={"marker": "D", "markersize": 5, "markerfacecolor": "white", "markeredgecolor": _MEAN},
        medianprops={"color": _MEAN},
    )
    for box in boxes["boxes"]:
        box.set(facecolor="#f8cbad", edgecolor=_COUNT)
    axes.set_yscale("symlog", linthresh=1, linscale=0.4)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.axhline(neurons, color="grey", linewidth=1, linestyle=":")
    axes.annotate(
        f"all {neurons:,} neurons",
        (0.02, neurons),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
        color="grey",
        fontsize=9,
    )
    axes.set(
        xlabel="layer",
        ylabel="non-zeros per token",
        title="Non-zeros per token on held-back text\n(box: quartiles; whiskers: 1 to 99 %; diamond: mean)",
    )
    axes.set_ylim(0, neurons * 1.6)


def save(
    path: Path,
    readings: Sequence[Reading],
    held_back_loss: float,
    per_token: Sequence[Tensor],
    neurons: int,
    title: str,
) -> None:
    """Write the PNG. per_token: the layers' non-zeros, each int [tokens]. ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(16, 6), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
    FigureCanvasAgg(figure)
    training, distribution = figure.subplots(1, 2)
    _training(training, readings, held_back_loss)
    _distribution(distribution, per_token, neurons)
    for axes in (training, distribution):
        axes.spines["top"].set_visible(False)
    distribution.spines["right"].set_visible(False)
    figure.suptitle(title, fontsize=14)
    with _files.replacing(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
