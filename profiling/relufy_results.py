"""Results of profiling/relufy.py: the rows of its file, tables and a chart."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiling.draw import style
from profiling.draw.style import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

NAME = "h200_relufy"
SIZE = (8.3, 4.6)
NAMES = {"relu": "ReLU", "relu2": "ReLU²", "drelu": "dReLU"}


@dataclass(frozen=True)
class Run:
    """One training. ``share`` is its tokens over those of the base; a base, from new weights, has share 1.

    activation: "base" and "dense" are SiLU, the latter a base trained further. target: non-zeros per token.
    """

    activation: str
    seed: int = 0
    share: float = 1.0
    target: float = 0.0
    distill: float = 0.0
    sharing: float = 0.0

    @property
    def sparse(self) -> bool:
        return self.activation in NAMES

    @property
    def baseline(self) -> Run:
        """The dense model trained equally long."""
        return Run("dense", self.seed, self.share)

    @property
    def kind(self) -> str:
        """What is done, without the tokens and the seed."""
        if not self.sparse:
            return "SiLU"
        parts = [f"{NAMES[self.activation]} to {self.target:g}"]
        parts += [f"distilled {self.distill:g}"] if self.distill else []
        parts += [f"sharing {self.sharing:g}"] if self.sharing else []
        return ", ".join(parts)

    def __str__(self) -> str:
        where = "base" if self.activation == "base" else f"{self.kind}, {100 * self.share:g} % more tokens"
        return f"{where}, seed {self.seed}"


@dataclass(frozen=True)
class Result(Run):
    """A run and its figures on the held-out text, of which all runs read the same micro-batches, ``blocks``.

    first_ce: before training. layers: neurons, l0, l1, dead and union of each layer. fatrelu: the same figures, and
    threshold and tried, of the model with FATReLU, whose threshold other held-out text chose. cost: tokens counted as
    the time of dense ones. text: a digest of the text. red: why it ended early.
    """

    tokens: int = 0
    ce: float | None = None
    first_ce: float | None = None
    l0: float | None = None
    blocks: list[float] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    fatrelu: dict[str, Any] | None = None
    curve: list[dict[str, float]] = field(default_factory=list)
    parameters: int = 0
    tokens_per_s: float | None = None
    cost: float = 0.0
    seconds: float = 0.0
    text: str = ""
    machine: str = ""
    red: str = ""

    @property
    def run(self) -> Run:
        return Run(**{each.name: getattr(self, each.name) for each in fields(Run)})


class DataError(ValueError):
    """A file is not the result of this program, or lacks the data for a table or chart."""


def load(path: Path) -> dict[str, Any]:
    """Read a file of results. DataError if it is another file."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        results(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"expected the results of profiling.relufy, got {str(path)!r} ({error})") from error
    return found


def results(document: dict[str, Any]) -> list[Result]:
    return [Result(**row) for row in document["rows"]]


@dataclass(frozen=True)
class Point:
    """Mean of the runs that differ only in their seed, for one kind of run and one number of tokens.

    added: the cross-entropy over that of the dense model of the same seed trained equally long, a share; None without
    one. spread, added_spread: standard deviations between seeds, None for one seed. added_error: the part of the error
    of ``added`` that the choice of held-out text causes. l0, union, dead: means over the layers, None for SiLU.
    """

    kind: str
    share: float
    seeds: int
    tokens: int
    ce: float
    spread: float | None
    added: float | None
    added_spread: float | None
    added_error: float | None
    l0: float | None
    union: float | None
    dead: float | None
    layers: list[float]
    neurons: int | None
    threshold: float | None = None


def points(document: dict[str, Any]) -> list[Point]:
    """All kinds of runs by tokens: the base, then dense, then sparse ones; without red runs."""
    good = [result for result in results(document) if not result.red and result.ce is not None]
    by_run = {result.run: result for result in good}
    order = {"base": 0, "dense": 1}

    def key(r: Result) -> tuple[Any, ...]:
        return (order.get(r.activation, 2), r.activation, r.distill, r.sharing, -r.target, r.share, r.seed)

    groups: dict[Run, list[Result]] = {}
    for result in sorted(good, key=key):
        alike = Run(result.activation, 0, result.share, result.target, result.distill, result.sharing)
        groups.setdefault(alike, []).append(result)
    found = []
    for run, each in groups.items():
        found.append(_point(run.kind, [(r, {"blocks": r.blocks, "layers": r.layers}) for r in each], by_run))
        if fat := [(r, r.fatrelu) for r in each if r.fatrelu]:
            found.append(_point(f"{run.kind}, FATReLU", fat, by_run))
    return found


def _point(kind: str, alike: Sequence[tuple[Result, dict[str, Any]]], by_run: dict[Run, Result]) -> Point:
    """The mean of runs by their figures."""
    ce, added, errors = [], [], []
    for result, figures in alike:
        blocks = figures["blocks"]
        ce.append(statistics.fmean(blocks))
        base = by_run.get(result.run.baseline) if result.sparse else None
        if base is not None and base.ce is not None:
            shares = [(mine - theirs) / base.ce for mine, theirs in zip(blocks, base.blocks, strict=True)]
            added.append(statistics.fmean(shares))
            errors.append(statistics.stdev(shares) / math.sqrt(len(shares)))
    first = alike[0][0]
    layers = [figures["layers"] for _, figures in alike if figures["layers"]]
    thresholds = [figures["threshold"] for _, figures in alike if "threshold" in figures]

    def over_layers(name: str) -> float | None:
        values = [layer[name] for each in layers for layer in each if layer[name] is not None]
        return statistics.fmean(values) if values else None

    dead = over_layers("dead")
    neurons = layers[0][0]["neurons"] if layers else None
    return Point(
        kind=kind,
        share=0.0 if first.activation == "base" else first.share,
        seeds=len(alike),
        tokens=first.tokens,
        ce=statistics.fmean(ce),
        spread=statistics.stdev(ce) if len(ce) > 1 else None,
        added=statistics.fmean(added) if added else None,
        added_spread=statistics.stdev(added) if len(added) > 1 else None,
        # all seeds read the same text, so more seeds do not lower it
        added_error=statistics.fmean(errors) if errors else None,
        l0=over_layers("l0"),
        union=over_layers("union"),
        dead=None if dead is None or neurons is None else dead / neurons,
        layers=[statistics.fmean(layer["l0"] for layer in same) for same in zip(*layers)],
        neurons=neurons,
        threshold=statistics.fmean(thresholds) if thresholds else None,
    )


# Text


def table(document: dict[str, Any]) -> str:
    """Markdown table of cross-entropy and sparsity by kind of run and tokens."""
    header = ["", "more tokens", "seeds", "cross-entropy", "over dense", "non-zeros", "union of 128", "dead"]
    rows = []
    for p in points(document):
        added = "" if p.added is None else f"{100 * p.added:+.2f} %"
        rows.append(
            [
                p.kind,
                f"{100 * p.share:g} %",
                str(p.seeds),
                f"{p.ce:.4f}" + (f" ± {p.spread:.4f}" if p.spread is not None else ""),
                added + (f" ± {100 * p.added_spread:.2f}" if p.added_spread is not None else ""),
                "all" if p.l0 is None else f"{p.l0:.1f}",
                "" if p.union is None else f"{100 * p.union:.0f} %",
                "" if p.dead is None else f"{100 * p.dead:.1f} %",
            ]
        )
    return _markdown(header, rows, "lrrrrrrr")


def layers(document: dict[str, Any]) -> str:
    """Markdown table of non-zeros by layer."""
    sparse = [point for point in points(document) if point.layers]
    count = max((len(point.layers) for point in sparse), default=0)
    rows = [[p.kind, f"{100 * p.share:g} %", *(f"{l0:.1f}" for l0 in p.layers)] for p in sparse]
    return _markdown(["", "more tokens", *(f"layer {i}" for i in range(count))], rows, "lr" + "r" * count)


def trained(document: dict[str, Any]) -> str:
    """Size of the models and of the training of the base."""
    arguments = document["arguments"]
    size = max((result.parameters for result in results(document)), default=0)
    tokens = arguments["steps"] * arguments["tokens_per_step"]
    return (
        f"{size / 1e6:.1f} M parameters, {arguments['layers']} layers of {arguments['intermediate']:,} neurons, "
        f"base of {tokens / 1e6:.1f} M tokens"
    )


def notes(document: dict[str, Any]) -> str:
    """A paragraph: the models, the text, the noise, the thresholds, the speed of training, the machine."""
    found, text = results(document), document["text"]
    most = max((r.share for r in found if r.activation != "base"), default=0.0)
    read = (1 + most) * document["arguments"]["steps"] * document["arguments"]["tokens_per_step"]
    lines = [
        f"{trained(document)}; {text['train_tokens'] / 1e6:.1f} M tokens of text, each read at most "
        f"{math.ceil(read / text['train_tokens'])} times. Learning rates fall to 0 in every run, and all runs of a "
        "seed read the same text in the same order. ± is the standard deviation between seeds."
    ]
    if errors := [point.added_error for point in points(document) if point.added_error]:
        lines.append(
            f"The choice of held-out text adds a standard error of up to {100 * max(errors):.2f} % to differences."
        )
    if thresholds := [p for p in points(document) if p.threshold is not None]:
        said = ", ".join(f"{p.kind} {p.threshold:.3g}" for p in thresholds)
        lines.append(f"Thresholds: {said}; other held-out text chose them.")
    lines += [f"{result.run}: {result.red}." for result in found if result.red]
    return " ".join([*lines, document["machine"]])


def finding(found: Sequence[Point]) -> str:
    """The cost of the sparsest plain ReLU model with the most tokens, in a sentence; "" without one."""
    plain = [p for p in found if p.kind.startswith("ReLU to ") and "," not in p.kind and p.added is not None]
    if not plain:
        return ""
    longest = max(p.share for p in plain)
    best = min((p for p in plain if p.share == longest), key=lambda p: p.l0 or 0)
    return (
        f"{best.l0:.0f} non-zeros of {best.neurons:,} with {100 * longest:g} % more tokens: "
        f"{100 * (best.added or 0):+.1f} % of the loss of SiLU trained as long"
    )


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    rule = ["--:" if side == "r" else "---" for side in align]
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])


# Chart


def shown(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The data for ``draw``. DataError if there is nothing to compare."""
    found = [p for p in points(document) if p.added is not None]
    if not finding(found):
        raise DataError("expected ReLU runs and dense runs trained as long, got none")
    return [
        {"kind": p.kind, "share": p.share, "added": p.added, "spread": p.added_spread, "l0": p.l0, "neurons": p.neurons}
        for p in found
    ]


def draw(figure: SubFigure, theme: Theme, data: Sequence[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_tokens(left, theme, data)
    _draw_non_zeros(right, theme, data)


def _lines(data: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for kind in dict.fromkeys(each["kind"] for each in data):
        yield kind, sorted((each for each in data if each["kind"] == kind), key=lambda each: each["share"])


def _draw_tokens(axes: Axes, theme: Theme, data: Sequence[dict[str, Any]]) -> None:
    """Kinds with several numbers of tokens."""
    several = [(kind, each) for kind, each in _lines(data) if len(each) > 1]
    for (kind, each), colour in zip(several, theme.colours):
        look: dict[str, Any] = {"color": colour, "marker": "o", "capsize": 3, "label": kind}
        look["linestyle"] = "--" if "distilled" in kind else "-"
        axes.errorbar(
            [100 * point["share"] for point in each],
            [100 * point["added"] for point in each],
            [100 * (point["spread"] or 0) for point in each],
            **look,
        )
    axes.axhline(0, color=theme.muted, linewidth=1.2, zorder=1.5)
    axes.set_xticks(sorted({100 * each["share"] for each in data}))
    axes.set(xlabel="more tokens, % of the base's", ylabel="cross-entropy over dense\ntrained as long (%)")
    axes.set_title("By tokens", loc="left")
    axes.legend(fontsize=8.5)


def _draw_non_zeros(axes: Axes, theme: Theme, data: Sequence[dict[str, Any]]) -> None:
    """All kinds at the largest number of tokens."""
    longest = max(each["share"] for each in data)
    for each in data:
        if each["share"] == longest:
            x, y = each["l0"], 100 * each["added"]
            colour = theme.extra if "FATReLU" in each["kind"] else theme.row
            axes.plot(x, y, "o", color=colour)
            style.label(axes, x, y, each["kind"], color=colour)
    axes.axhline(0, color=theme.muted, linewidth=1.2, zorder=1.5)
    axes.set_xscale("log")
    axes.margins(x=0.3, y=0.15)
    low, high = axes.get_xlim()
    ticks = [count for count in (2, 5, 10, 20, 30, 50, 100, 200, 500, 1000) if low <= count <= high]
    axes.set_xticks(ticks, [f"{count:g}" for count in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel=f"non-zeros per token of {data[0]['neurons']:,} (log)")
    axes.set_title(f"By non-zeros, with {100 * longest:g} % more tokens", loc="left")
