"""Results of profiling/quality.py: the rows of its file, tables and a chart, with the paper's figures beside them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiling import trained_runs
from profiling.draw import style
from profiling.draw.common import ResultError, log_ticks, markdown
from profiling.draw.style import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

# from arXiv 2603.23198, for 1.5 B parameters and 5,632 neurons per layer: coefficient, non-zeros, added cross-entropy
PAPER = ((0.0, 911, 0.0), (2e-5, 29, 0.019))
PAPER_NEURONS, PAPER_DEAD = 5632, 0.30
TITLE = "What sparsity costs: cross-entropy on held-out text by non-zeros"
SIZE = (8.3, 7.8)


def short(coefficient: float) -> str:
    """A coefficient as in 2e-5."""
    mantissa, exponent = f"{coefficient:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}" if coefficient else "0"


@dataclass(frozen=True)
class Run:
    """The choices of one run. ``ffn`` changes how the same function is computed."""

    coefficient: float = 0.0
    activation: str = "relu"
    reinitialize: float = 0.0
    seed: int = 0
    ffn: str = "dense"

    def options(self) -> list[str]:
        """Options for examples/train.py."""
        chosen = {"l1": self.coefficient, "activation": self.activation, "reinitialize": self.reinitialize}
        return [f"--{name}={value}" for name, value in {**chosen, "seed": self.seed, "ffn": self.ffn}.items()]

    def __str__(self) -> str:
        name = "SiLU" if self.activation == "silu" else f"L1 {short(self.coefficient)}"
        parts = [name, f"seed {self.seed}"]
        parts += [f"reinitialised {self.reinitialize:g}"] if self.reinitialize else []
        return ", ".join(parts + ([f"FFN {self.ffn}"] if self.ffn != "dense" else []))


@dataclass(frozen=True)
class Layer:
    """One layer on the held-out text: mean non-zeros and sum of ``|h|`` per token, neurons that never fired.

    ``union``: the share of neurons that any of 128 consecutive tokens fires.
    """

    neurons: int
    l0: float
    l1: float
    dead: int
    union: float | None
    strategy: str


@dataclass(frozen=True)
class Result(Run):
    """A run and its figures. ``red`` says why a run ended early; it then has no figures.

    ce, ce_error: mean cross-entropy per token on the held-out text, and its standard error. blocks: the cross-entropy
    of each micro-batch; all runs read the same ones, so differences between runs scatter far less than ``ce_error``.
    l0, dead: non-zeros and share of neurons that never fired on the held-out text, means over the layers; None for
    SiLU, which has no zeros. tokens_per_s: in the second half of the run. seconds: the whole run with compilation.
    """

    ce: float | None = None
    ce_error: float | None = None
    l0: float | None = None
    dead: float | None = None
    layers: list[Layer] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    curve: list[dict[str, float | None]] = field(default_factory=list)
    parameters: int = 0
    tokens_per_s: float | None = None
    peak_bytes: int = 0
    seconds: float = 0.0
    machine: str = ""
    red: str = ""

    @property
    def run(self) -> Run:
        return Run(**{each.name: getattr(self, each.name) for each in fields(Run)})


def load(path: Path) -> dict[str, Any]:
    """Read the file of a sweep. ResultError if it is another file."""
    return trained_runs.load(path, "a sweep", results)


def results(document: dict[str, Any]) -> list[Result]:
    return [Result(**{**row, "layers": [Layer(**layer) for layer in row["layers"]]}) for row in document["rows"]]


@dataclass(frozen=True)
class Point:
    """Mean of the results that differ only in their seed, and their cross-entropy over that of ReLU without L1.

    ``added`` is a share: the mean over seeds of the difference to the run without L1 of the same seed, which has the
    same initial weights and order of text. A seed without such a run is compared with seed 0. ``spread`` and
    ``added_spread`` are standard deviations of ``ce`` and ``added`` between seeds, None for one seed. ``added_error``
    is the part of the standard error of ``added`` that the choice of held-out text causes. ``layers`` are non-zeros by
    layer. For SiLU ``layers`` is empty, and l0 and dead are None.
    """

    coefficient: float
    activation: str
    reinitialize: float
    seeds: int
    ce: float
    spread: float | None
    added: float | None
    added_spread: float | None
    added_error: float | None
    l0: float | None
    dead: float | None
    neurons: int | None
    layers: list[float]

    @property
    def name(self) -> str:
        if self.activation == "silu":
            return "SiLU"
        return "ReLU, reinitialised" if self.reinitialize else "ReLU"


def points(document: dict[str, Any]) -> list[Point]:
    """ReLU by coefficient, then with reinitialisation, then SiLU; without red runs and runs with sparse kernels."""
    good = [result for result in results(document) if not result.red and result.ffn == "dense"]
    baseline = {result.seed: result for result in good if result.run == Run(seed=result.seed)}
    found: dict[Run, list[Result]] = {}
    for result in sorted(good, key=lambda r: (r.activation != "relu", r.reinitialize, r.coefficient, r.seed)):
        found.setdefault(Run(result.coefficient, result.activation, result.reinitialize), []).append(result)
    return [_point(run, each, baseline) for run, each in found.items()]


def _point(run: Run, alike: Sequence[Result], baseline: dict[int, Result]) -> Point:
    ce = [result.ce or math.nan for result in alike]
    added, errors = [], []
    for result in alike:
        base = baseline.get(result.seed) or baseline.get(0)
        if base is not None and base.ce is not None:
            share, error = trained_runs.added(result.blocks, base.blocks, base.ce)
            added.append(share)
            errors.append(error)

    def mean(name: str) -> float | None:
        values = [getattr(result, name) for result in alike]
        return None if None in values else statistics.fmean(values)

    return Point(
        coefficient=run.coefficient,
        activation=run.activation,
        reinitialize=run.reinitialize,
        seeds=len(alike),
        ce=statistics.fmean(ce),
        spread=trained_runs.spread(ce),
        added=trained_runs.mean(added),
        added_spread=trained_runs.spread(added),
        # all seeds read the same text, so more seeds do not lower it
        added_error=trained_runs.mean(errors),
        l0=mean("l0"),
        dead=mean("dead"),
        neurons=alike[0].layers[0].neurons if alike[0].layers else None,
        layers=[statistics.fmean(layer.l0 for layer in layers) for layers in zip(*(r.layers for r in alike))],
    )


def noise(found: Iterable[Point]) -> float | None:
    """Standard deviation of ``added`` between seeds, pooled over the points with several seeds; None without any."""
    # the baseline does not differ from itself
    several = [(p.seeds - 1, p.added_spread) for p in found if p.added_spread is not None and not is_baseline(p)]
    return math.sqrt(sum(n * s * s for n, s in several) / sum(n for n, _ in several)) if several else None


def is_baseline(point: Point) -> bool:
    return point.name == "ReLU" and point.coefficient == 0


# Text


def table(document: dict[str, Any]) -> str:
    """Markdown table of cross-entropy and sparsity by coefficient, with the paper's rows below."""
    header = ["", "L1", "seeds", "cross-entropy", "over ReLU without L1", "non-zeros", "of the neurons", "dead"]
    rows = []
    for point in points(document):
        sparse = point.l0 is not None and point.neurons is not None
        added = "" if point.added is None else f"{100 * point.added:+.2f} %"
        rows.append(
            [
                point.name,
                short(point.coefficient) if point.activation == "relu" else "",
                str(point.seeds),
                f"{point.ce:.4f}" + (f" ± {point.spread:.4f}" if point.spread is not None else ""),
                added + (f" ± {100 * point.added_spread:.2f}" if point.added_spread else ""),
                f"{point.l0:.1f}" if sparse else "all",
                f"{100 * (point.l0 or 0) / (point.neurons or 1):.1f} %" if sparse else "100 %",
                f"{100 * point.dead:.1f} %" if point.dead is not None else "",
            ]
        )
    for coefficient, l0, more in PAPER:
        paper = ["the paper's 1.5B", short(coefficient), "", "", f"{100 * more:+.1f} %" if more else "", str(l0)]
        dead = f"over {100 * PAPER_DEAD:.0f} %" if coefficient else ""
        rows.append([*paper, f"{100 * l0 / PAPER_NEURONS:.1f} %", dead])
    return markdown(header, "lrrrrrrr", rows)


def layers(document: dict[str, Any]) -> str:
    """Markdown table of non-zeros by layer."""
    sparse = [point for point in points(document) if point.layers]
    rows = [((point.name, short(point.coefficient)), point.layers) for point in sparse]
    return trained_runs.by_layer(["non-zeros", "L1"], rows)


def trained(document: dict[str, Any]) -> str:
    """Size of the models and of their training."""
    models = trained_runs.models(document, (result.parameters for result in results(document)))
    return f"{models}, {trained_runs.tokens(document) / 1e6:.1f} M tokens"


def notes(document: dict[str, Any]) -> str:
    """A paragraph: the models, the noise, the run with sparse kernels, the machine."""
    found = results(document)
    lines = [
        f"{trained(document)}; the coefficient multiplies a sum over a token's neurons. ± is the standard "
        "deviation between seeds."
    ]
    lines += trained_runs.note_of_errors(point.added_error for point in points(document))
    dense = {result.run: result for result in found if result.ffn == "dense" and not result.red}
    for result in found:
        alike = dense.get(Run(**{**asdict(result.run), "ffn": "dense"}))
        if result.red:
            lines.append(f"{result.run}: {result.red}.")
        elif result.ffn == "sparse" and alike is not None:
            lines.append(
                f'L1 {short(result.coefficient)} with sparse kernels and strategy "auto": '
                f"cross-entropy {result.ce:.4f} ({alike.ce:.4f} dense)."
            )
    return " ".join([*lines, document["machine"]])


# Chart


def shown(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The data for ``draw``. ResultError if there is nothing to compare."""
    found = points(document)
    relu = [point for point in found if point.name == "ReLU"]
    if len(relu) < 2 or any(point.added is None for point in found):
        names = [f"L1 {short(point.coefficient)}" for point in relu]
        raise ResultError(f"expected ReLU runs without L1 and with another coefficient, got {names or 'none'}")
    return [asdict(point) for point in found]


def draw(figure: SubFigure, theme: Theme, data: Sequence[dict[str, Any]]) -> None:
    found = [Point(**each) for each in data]
    top, below = figure.subfigures(2, 1, height_ratios=(1.3, 1), squeeze=False)[:, 0]
    _draw_quality(top.subplots(), theme, found)
    left, right = below.subplots(1, 2, width_ratios=(1.2, 1))
    _draw_layers(left, theme, [point for point in found if point.name == "ReLU"])
    _draw_dead(right, theme, [point for point in found if point.activation == "relu"])


def _kinds(theme: Theme, found: Sequence[Point]) -> Iterator[tuple[bool, str, list[Point]]]:
    """ReLU without and with reinitialisation: which of the two, its colour, its points."""
    for again, colour in ((False, theme.colours[0]), (True, theme.colours[1])):
        if chosen := [p for p in found if p.activation == "relu" and bool(p.reinitialize) == again]:
            yield again, colour, chosen


def finding(found: Sequence[Point]) -> str:
    """The sparsest ReLU model whose cross-entropy is not above that without L1, as a title."""
    limit = noise(found) or 0.0
    free = [p for p in found if p.name == "ReLU" and not is_baseline(p) and (p.added or 0) <= limit and p.l0]
    if not free:
        return "Every coefficient costs cross-entropy"
    sparsest = min(free, key=lambda point: point.l0 or 0)
    return f"No cost in cross-entropy down to {sparsest.l0:.0f} of {sparsest.neurons:,} non-zeros per token"


def _draw_quality(axes: Axes, theme: Theme, found: Sequence[Point]) -> None:
    spread = noise(found)
    for again, colour, chosen in _kinds(theme, found):
        shares = [100 * (point.l0 or 0) / (point.neurons or 1) for point in chosen]
        added = [100 * (point.added or 0) for point in chosen]
        bars = None if spread is None else [0 if is_baseline(point) else 100 * spread for point in chosen]
        look: dict[str, Any] = {"marker": "D", "linestyle": "none", "mfc": theme.ground} if again else {"marker": "o"}
        name = "ReLU, dead neurons reinitialised" if again else "ReLU, labels: L1 coefficient"
        name += f" (bars: noise between seeds, {100 * spread:.2f} %)" if spread is not None and not again else ""
        axes.errorbar(shares, added, bars, color=colour, capsize=3, elinewidth=1, label=name, **look)
        for point, x, y in zip(chosen, shares, added):
            style.label(axes, x, y, short(point.coefficient), color=colour)
    for point in found:
        if point.activation == "silu":
            axes.axhline(100 * (point.added or 0), color=theme.dense, linestyle="--", linewidth=1.5, label="SiLU")
    axes.axhline(0, color=theme.muted, linewidth=1.2, zorder=1.5)
    for coefficient, l0, more in PAPER:
        x, y = 100 * l0 / PAPER_NEURONS, 100 * more
        axes.plot(x, y, "s", color=theme.paper)
        style.label(axes, x, y, f"the paper's 1.5B, {short(coefficient)}", color=theme.paper)
    axes.set_xscale("log")
    axes.margins(x=0.07, y=0.1)
    log_ticks(axes, (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100), " %")
    axes.set(
        xlabel="share of a layer's neurons that fire per token (log)",
        ylabel="change in cross-entropy\nagainst L1 = 0 (%)",
    )
    axes.set_title(finding(found), loc="left")
    handles, labels = axes.get_legend_handles_labels()
    # first the entries with error bars
    order = sorted(range(len(labels)), key=lambda i: not hasattr(handles[i], "has_yerr"))
    axes.legend([handles[i] for i in order], [labels[i] for i in order], loc="lower left")


def _draw_layers(axes: Axes, theme: Theme, relu: Sequence[Point]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shade = LinearSegmentedColormap.from_list("coefficients", [theme.dense, theme.row, theme.extra])
    for i, point in enumerate(relu):
        # a logarithmic axis has no place for 0
        l0 = [max(mean, 0.1) for mean in point.layers]
        look: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.6}
        axes.plot(range(len(l0)), l0, color=shade(i / (len(relu) - 1)), label=short(point.coefficient), **look)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:,g}")
    axes.set_xticks(range(len(relu[0].layers)))
    axes.set(xlabel="layer", ylabel="non-zeros per token (log)")
    axes.set_title("Non-zeros by layer", loc="left")
    # from top to bottom in the order of the lines
    axes.legend(
        title="L1 coefficient",
        title_fontsize=8.5,
        fontsize=8.5,
        handlelength=1.2,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )


def _draw_dead(axes: Axes, theme: Theme, found: Sequence[Point]) -> None:
    coefficients = sorted({point.coefficient for point in found})
    pairs = {point.coefficient for point in found if point.reinitialize}
    for again, colour, chosen in _kinds(theme, found):
        places = [
            coefficients.index(p.coefficient) + 0.2 * (p.coefficient in pairs) * (1 if again else -1) for p in chosen
        ]
        heights = [100 * (point.dead or 0) for point in chosen]
        widths = [0.38 if point.coefficient in pairs else 0.6 for point in chosen]
        name = "reinitialised" if again else "left alone"
        axes.bar(places, heights, widths, color=colour, hatch="//" if again else None, label=name)
        for place, height in zip(places, heights):
            text = "0" if height < 0.05 else f"{height:.1f}"
            axes.annotate(
                text, (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=8, color=colour
            )
    if PAPER[1][0] in coefficients:
        place = coefficients.index(PAPER[1][0])
        axes.hlines(100 * PAPER_DEAD, place - 0.45, place + 0.45, color=theme.paper)
        text = f"the paper's 1.5B: over {100 * PAPER_DEAD:.0f} %"
        place_text: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": theme.paper}
        axes.annotate(text, (place + 0.45, 100 * PAPER_DEAD), (4, 0), va="center", **place_text)
    axes.set_xticks(range(len(coefficients)), [short(c) for c in coefficients], fontsize=8)
    axes.set(xlabel="L1 coefficient", ylabel="dead neurons (%)")
    axes.set_title("Neurons that never fired", loc="left")
    axes.legend(fontsize=8.5, loc="upper left", bbox_to_anchor=(0.28, 0.88))
