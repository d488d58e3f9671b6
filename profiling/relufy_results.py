"""Results of profiling/relufy.py: the rows of its file, tables and a chart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiling import trained_runs
from profiling.draw import style
from profiling.draw.common import ResultError, log_ticks, markdown
from profiling.draw.style import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

NAME = "h200_relufy"
SIZE = (8.3, 4.6)
NAMES = {"fatrelu": "FATReLU", "relu": "ReLU"}


@dataclass(frozen=True)
class Run:
    """One training. ``share`` is its tokens over those of the base; a base, from new weights, has share 1.

    activation: "base" and "dense" are SiLU, the latter a base trained further. target: non-zeros per token. lr: the
    peak learning rate of further training.
    """

    activation: str
    seed: int = 0
    share: float = 1.0
    target: float = 0.0
    distill: float = 0.0
    sharing: float = 0.0
    lr: float = 0.0

    @property
    def sparse(self) -> bool:
        return self.activation in NAMES

    @property
    def kind(self) -> str:
        """What is done, without the tokens, the learning rate and the seed."""
        if not self.sparse:
            return "SiLU"
        parts = [f"{NAMES[self.activation]} to {self.target:g}"]
        parts += [f"distilled {self.distill:g}"] if self.distill else []
        parts += [f"sharing {self.sharing:g}"] if self.sharing else []
        return ", ".join(parts)

    def __str__(self) -> str:
        where = f"{self.kind}, {100 * self.share:g} % more tokens at {self.lr:g}"
        where = "base" if self.activation == "base" else where
        return f"{where}, seed {self.seed}"


@dataclass(frozen=True)
class Result(Run):
    """A run and its figures on the held-out text, of which all runs read the same micro-batches, ``blocks``.

    first_ce: before training. layers: neurons, l0, l1, dead and union of each layer. threshold: of FATReLU. cost:
    tokens counted as the time of dense ones. text: a digest of the text. red: why it ended early.
    """

    tokens: int = 0
    ce: float | None = None
    first_ce: float | None = None
    l0: float | None = None
    blocks: list[float] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    threshold: float | None = None
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


def load(path: Path) -> dict[str, Any]:
    """Read a file of results. ResultError if it is another file."""
    return trained_runs.load(path, "profiling.relufy", results)


def results(document: dict[str, Any]) -> list[Result]:
    """The rows of a document.

    Those of the first runs have one learning rate, which is among the arguments, and figures of a threshold chosen
    after training, which are left out.
    """
    lr = document.get("arguments", {}).get("further_lr")
    rows = ({name: value for name, value in row.items() if name != "fatrelu"} for row in document["rows"])
    earlier = isinstance(lr, float)
    return [Result(**({"lr": 0.0 if row["activation"] == "base" else lr} if earlier else {}) | row) for row in rows]


@dataclass(frozen=True)
class Point:
    """Mean of the runs that differ only in their seed, for one kind of run, number of tokens and learning rate.

    added: the cross-entropy over that of the best dense model of the same seed trained equally long, a share; None
    without one. spread, added_spread: standard deviations between seeds, None for one seed. added_error: the part of
    the error of ``added`` that the choice of held-out text causes. l0, union, dead: means over the layers, None for
    SiLU.
    """

    kind: str
    share: float
    lr: float
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
    order = {"base": 0, "dense": 1}

    def key(r: Result) -> tuple[Any, ...]:
        return (order.get(r.activation, 2), r.activation, r.distill, r.sharing, -r.target, r.share, r.lr, r.seed)

    groups: dict[Run, list[Result]] = {}
    for result in sorted(good, key=key):
        groups.setdefault(replace(result.run, seed=0), []).append(result)
    return [_point(each, good) for each in groups.values()]


def baseline(run: Run, found: Iterable[Result]) -> Result | None:
    """The best of the dense models trained as long as ``run``, whatever their learning rates."""
    dense = (each for each in found if each.activation == "dense" and (each.seed, each.share) == (run.seed, run.share))
    return min(dense, key=lambda each: statistics.fmean(each.blocks), default=None)


def _point(alike: Sequence[Result], found: Sequence[Result]) -> Point:
    """The mean of runs that differ in their seed."""
    ce, added, errors = [], [], []
    for result in alike:
        ce.append(statistics.fmean(result.blocks))
        base = baseline(result, found) if result.sparse else None
        if base is not None and base.ce is not None:
            share, error = trained_runs.added(result.blocks, base.blocks, base.ce)
            added.append(share)
            errors.append(error)
    first = alike[0]
    layers = [result.layers for result in alike if result.layers]
    thresholds = [result.threshold for result in alike if result.threshold is not None]

    def over_layers(name: str) -> float | None:
        return trained_runs.mean([layer[name] for each in layers for layer in each if layer[name] is not None])

    dead = over_layers("dead")
    neurons = layers[0][0]["neurons"] if layers else None
    return Point(
        kind=first.kind,
        share=0.0 if first.activation == "base" else first.share,
        lr=first.lr,
        seeds=len(alike),
        tokens=first.tokens,
        ce=statistics.fmean(ce),
        spread=trained_runs.spread(ce),
        added=trained_runs.mean(added),
        added_spread=trained_runs.spread(added),
        # all seeds read the same text, so more seeds do not lower it
        added_error=trained_runs.mean(errors),
        l0=over_layers("l0"),
        union=over_layers("union"),
        dead=None if dead is None or neurons is None else dead / neurons,
        layers=[statistics.fmean(layer["l0"] for layer in same) for same in zip(*layers)],
        neurons=neurons,
        threshold=trained_runs.mean(thresholds),
    )


# Text


def table(document: dict[str, Any]) -> str:
    """Markdown table of cross-entropy and sparsity by kind of run, tokens and learning rate."""
    header = ["", "more tokens", "rate", "seeds", "cross-entropy", "over dense", "non-zeros", "union of 128", "dead"]
    rows = []
    for p in points(document):
        added = "" if p.added is None else f"{100 * p.added:+.2f} %"
        rows.append(
            [
                p.kind,
                f"{100 * p.share:g} %",
                f"{p.lr:g}" if p.lr else "",
                str(p.seeds),
                f"{p.ce:.4f}" + (f" ± {p.spread:.4f}" if p.spread is not None else ""),
                added + (f" ± {100 * p.added_spread:.2f}" if p.added_spread is not None else ""),
                "all" if p.l0 is None else f"{p.l0:.1f}",
                "" if p.union is None else f"{100 * p.union:.0f} %",
                "" if p.dead is None else f"{100 * p.dead:.1f} %",
            ]
        )
    return markdown(header, "lrrrrrrrr", rows)


def layers(document: dict[str, Any]) -> str:
    """Markdown table of non-zeros by layer."""
    sparse = [point for point in points(document) if point.layers]
    rows = [((p.kind, f"{100 * p.share:g} %", f"{p.lr:g}"), p.layers) for p in sparse]
    return trained_runs.by_layer(["", "more tokens", "rate"], rows)


def trained(document: dict[str, Any]) -> str:
    """Size of the models and of the training of the base."""
    models = trained_runs.models(document, (result.parameters for result in results(document)))
    return f"{models}, base of {trained_runs.tokens(document) / 1e6:.1f} M tokens"


def notes(document: dict[str, Any]) -> str:
    """A paragraph: the models, the text, the noise, the thresholds, the speed of training, the machine."""
    found, text = results(document), document["text"]
    most = max((r.share for r in found if r.activation != "base"), default=0.0)
    read = (1 + most) * trained_runs.tokens(document)
    lines = [
        f"{trained(document)}; {text['train_tokens'] / 1e6:.1f} M tokens of text, each read at most "
        f"{math.ceil(read / text['train_tokens'])} times. Learning rates fall to 0 in every run, and all runs of a "
        "seed read the same text in the same order; the rate is the peak."
    ]
    if any(point.spread is not None for point in points(document)):
        lines.append("± is the standard deviation between seeds.")
    lines += trained_runs.note_of_errors(point.added_error for point in points(document))
    if thresholds := [p for p in points(document) if p.threshold is not None]:
        low, high = min(p.threshold or 0 for p in thresholds), max(p.threshold or 0 for p in thresholds)
        lines.append(f"FATReLU's thresholds are {low:.2g} to {high:.2g}.")
    lines += [f"{result.run}: {result.red}." for result in found if result.red]
    return " ".join([*lines, document["machine"]])


def finding(found: Sequence[Point]) -> str:
    """The cost of the sparsest plain model with the most tokens, in a sentence; "" without one."""
    plain = [p for p in found if "," not in p.kind and p.added is not None]
    if not plain:
        return ""
    longest = max(p.share for p in plain)
    sparsest = min((p for p in plain if p.share == longest), key=lambda p: p.l0 or 0)
    alike = (p for p in plain if (p.kind, p.share) == (sparsest.kind, longest))
    best = min(alike, key=lambda p: p.added or 0)
    return (
        f"{best.l0:.0f} non-zeros of {best.neurons:,} with {100 * longest:g} % more tokens: "
        f"{100 * (best.added or 0):+.1f} % of the loss of SiLU trained as long"
    )


# Chart


def shown(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The data for ``draw``. ResultError if there is nothing to compare."""
    best: dict[tuple[str, float], Point] = {}
    for p in points(document):
        if p.added is not None:
            # of the learning rates, as of the dense models
            best[p.kind, p.share] = min(p, best.get((p.kind, p.share), p), key=lambda each: each.added or 0)
    found = list(best.values())
    if not finding(found):
        raise ResultError("expected sparse runs and dense runs trained as long, got none")
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
            colour = theme.extra if "," in each["kind"] else theme.row
            axes.plot(x, y, "o", color=colour)
            style.label(axes, x, y, each["kind"], color=colour)
    axes.axhline(0, color=theme.muted, linewidth=1.2, zorder=1.5)
    axes.set_xscale("log")
    axes.margins(x=0.3, y=0.15)
    log_ticks(axes, (2, 5, 10, 20, 30, 50, 100, 200, 500, 1000))
    axes.set(xlabel=f"non-zeros per token of {data[0]['neurons']:,} (log)")
    axes.set_title(f"By non-zeros, with {100 * longest:g} % more tokens", loc="left")
