"""The demo's picture: training curve, non-zeros per layer, and one packed tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twell import _files
from twell._runtime import geometry
from twell.commands.demo.model import Reading
from twell.packed import PackedTwell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TILE_ROWS = 10  # tokens shown of the packed tile
TILE_SLOTS = 31  # non-zeros shown of each token
_LOSS, _COUNT, _MEAN = "#1f4e79", "#c55a11", "#222222"


@dataclass(frozen=True)
class TilePicture:
    """Some consecutive tokens of a tile, on the CPU: values [rows, 256], counts [rows], slot_* [rows, slots shown]."""

    layer: int
    tile: int
    first_token: int
    labels: list[str]
    values: Tensor
    counts: Tensor
    slot_values: Tensor
    slot_neurons: Tensor
    capacity: int


def packed_slots(packed: PackedTwell) -> tuple[Tensor, Tensor, Tensor]:
    """Split the words into counts [M, T], values [M, T, W - 1] and neurons [M, T, W - 1], as they are stored."""
    words = packed.words.view(packed.words.shape[0], -1, geometry.words_per_tile(packed.compression))
    slots = words[..., 1:]
    values = (slots >> 16).to(torch.int16).view(packed.spill.dtype)
    return words[..., 0], values, slots & 0xFFFF


def choose_tile(packed: PackedTwell, layer: int, text: Tensor) -> TilePicture:
    """Choose rows and a tile with many non-zeros (the 95th percentile), without overflow if there is such a tile.

    `text` int64 [M] holds the tokens' bytes, for the labels.
    """
    counts, values, neurons = packed_slots(packed)
    rows = min(TILE_ROWS, counts.shape[0])
    capacity = values.shape[-1]
    blocks = counts[: counts.shape[0] // rows * rows].reshape(-1, rows, counts.shape[1])
    full = blocks.sum(1) + (blocks.amax(1) > capacity) * (rows * geometry.TILE + 1)  # overflowing blocks sort last
    order = full.flatten().argsort(stable=True)
    fitting = int((blocks.amax(1) <= capacity).sum()) or order.numel()
    picked = int(order[min(fitting - 1, int(0.95 * fitting))])
    block, tile = divmod(picked, counts.shape[1])
    span = slice(block * rows, (block + 1) * rows)
    shown = min(capacity, TILE_SLOTS)
    gate = torch.nn.functional.pad(packed.unpack()[span], (0, -packed.n % geometry.TILE))
    return TilePicture(
        layer=layer,
        tile=tile,
        first_token=block * rows,
        labels=[repr(chr(b)) if 32 <= b < 127 else f"\\x{b:02x}" for b in text[span].tolist()],
        values=gate[:, tile * geometry.TILE : min((tile + 1) * geometry.TILE, packed.n)].float().cpu(),
        counts=counts[span, tile].cpu(),
        slot_values=values[span, tile, :shown].float().cpu(),
        slot_neurons=neurons[span, tile, :shown].cpu(),
        capacity=capacity,
    )


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


def _tile(dense: Axes, words: Axes, picture: TilePicture) -> None:
    import matplotlib
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    rows = len(picture.labels)
    blank = picture.values.masked_fill(picture.values == 0, float("nan"))
    top = float(picture.values.max()) or 1.0
    shades = matplotlib.colormaps["YlGnBu"]  # without its palest fifth, which looks white
    colours = ListedColormap([shades(0.2 + 0.8 * i / 255) for i in range(256)])
    low = picture.tile * geometry.TILE
    dense.imshow(
        blank.tolist(),
        aspect="auto",
        interpolation="none",
        cmap=colours,
        vmin=0,
        vmax=top,
        extent=(low - 0.5, low + picture.values.shape[1] - 0.5, rows - 0.5, -0.5),
    )
    dense.set(
        xlabel="neuron (white: zero)",
        ylabel="token (byte of the text)",
        title=(
            f"Layer {picture.layer}, tile {picture.tile}, tokens {picture.first_token} to "
            f"{picture.first_token + rows - 1}: gate values after ReLU, dense"
        ),
    )
    dense.set_yticks(range(rows), picture.labels, family="monospace", fontsize=8)
    dense.set_yticks([r + 0.5 for r in range(rows - 1)], minor=True)
    dense.grid(which="minor", axis="y", color="#dddddd", linewidth=0.6)
    dense.tick_params(which="minor", left=False)
    scale = dense.figure.colorbar(matplotlib.cm.ScalarMappable(cmap=colours), ax=[dense, words], pad=0.012, aspect=30)
    scale.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=[f"{top * t:.2g}" for t in (0, 0.25, 0.5, 0.75, 1)])
    scale.set_label("gate value")

    slots = picture.slot_values.shape[1]
    for row in range(rows):
        count = int(picture.counts[row])
        overflow = count > picture.capacity
        words.add_patch(Rectangle((-0.5, row - 0.5), 1, 1, facecolor="#dddddd", edgecolor="white"))
        words.text(0, row, str(count), ha="center", va="center", fontsize=8, weight="bold")
        for slot in range(slots):
            used = slot < count
            share = float(picture.slot_values[row, slot]) / top if used else 0.0
            words.add_patch(
                Rectangle(
                    (slot + 0.5, row - 0.5),
                    1,
                    1,
                    facecolor=colours(share) if used else "white",
                    edgecolor="white" if used else "#e8e8e8",
                    linewidth=0.8,
                )
            )
            if used:
                value = float(picture.slot_values[row, slot])
                label = f"{value:{'.2f' if value >= 0.005 else '.0e'}}\n{int(picture.slot_neurons[row, slot])}"
                colour = "white" if share > 0.5 else "black"
                words.text(slot + 1, row, label, ha="center", va="center", fontsize=6.3, color=colour, linespacing=1.05)
        if overflow:
            words.text(slots + 0.7, row, "+ spill", va="center", fontsize=7, clip_on=False)
    shown = f"all {slots}" if slots == picture.capacity else f"the first {slots} of {picture.capacity}"
    words.set(
        xlim=(-0.5, slots + 0.5),
        ylim=(rows - 0.5, -0.5),
        xlabel="word of the tile",
        ylabel="token (byte of the text)",
        title=f"The same tile packed: word 0 is the count, each other word a value and its neuron ({shown} slots)",
    )
    words.set_xticks(range(slots + 1), ["count", *map(str, range(1, slots + 1))], fontsize=8)
    words.set_yticks(range(rows), picture.labels, family="monospace", fontsize=8)
    words.tick_params(length=0)
    for side in words.spines.values():
        side.set_visible(False)


def save(
    path: Path,
    readings: Sequence[Reading],
    held_back_loss: float,
    per_token: Sequence[Tensor],
    neurons: int,
    picture: TilePicture,
    title: str,
) -> None:
    """Write the PNG. per_token: the layers' non-zeros, each int [tokens]. ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(16, 13), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
    FigureCanvasAgg(figure)
    (top,), (bottom,) = figure.subfigures(2, 1, squeeze=False, height_ratios=[4.4, 8])
    training, distribution = top.subplots(1, 2)
    _training(training, readings, held_back_loss)
    _distribution(distribution, per_token, neurons)
    for axes in (training, distribution):
        axes.spines["top"].set_visible(False)
    distribution.spines["right"].set_visible(False)
    dense, words = bottom.subplots(2, 1, height_ratios=[2.4, 5])
    _tile(dense, words, picture)
    figure.suptitle(title, fontsize=14)
    with _files.replacing(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
