"""Charts of one layer: speed-up by workload, non-zeros, tokens and layers of a model; memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from profiling.draw import style
from profiling.draw.common import (
    MARKERS,
    PATTERNS,
    SLOWEST,
    STRATEGIES,
    Chart,
    Results,
    Row,
    baseline,
    best,
    crossings,
    dense_ms,
    good,
    legend,
    line,
    log_axis,
    machine,
    of_line,
    patch,
    sizes,
    span,
    speed_axis,
)
from profiling.draw.style import SIZE, Theme

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

WORKLOADS = ("real3", "uniform29", "topic29", "skew29", "real6", "topic128", "dense911")
PAPER_TEXT = "the paper's code"
WORKLOADS_TEXT = (
    "real: layers of a trained model; uniform, topic, skew: drawn patterns; dense911: as trained without L1; "
    "non-zeros per token; dense: the faster of eager and compiled PyTorch"
)
# Two strategies whose times differ by less than this share do not cross: in another run the other may be ahead.
ALIKE = 0.01


def speedup(results: Results) -> Chart | None:
    """Forward and training step of the named workloads, and the paper's code, beside dense PyTorch (h200_auto)."""
    result, paper = results.get("h200_auto"), results.get("h100_paper_code")
    panels: dict[str, list[Row]] = {}
    for op, variant in (("forward", "ffn"), ("train", "train")):
        panels[op] = []
        for name in WORKLOADS:
            rows = good(result, workload=name)
            ours = next((row for row in rows if row["variant"] == variant and row["requested"] == "auto"), None)
            dense = dense_ms(rows, " train" if op == "train" else "")
            if ours is None or dense is None:
                continue
            bar = {"workload": name, "nnz": ours["nnz"], "speedup": dense / ours["ms"], "strategy": ours["strategy"]}
            theirs = [row for row in (paper or {"rows": []})["rows"] if (row["workload"], row["op"]) == (name, op)]
            for row in theirs:
                bar["paper"] = row["dense_ms"] / row["ms"] if row["ms"] else None
                bar["wrong"], bar["failed"] = row["wrong"], row["red"]
            panels[op].append(bar)
    if result is None or not any(panels.values()):
        return None
    gains = {op: [bar["speedup"] for bar in bars if bar["strategy"] != "dense"] for op, bars in panels.items()}
    said = {"forward": "forward pass", "train": "training step"}
    title = ", ".join(f"{said[op]} {span(gains[op])} times" for op in gains if gains[op])
    title = f"Layers that run sparse: {title} as fast as dense" if title else "No layer runs sparse"
    footer = f"{WORKLOADS_TEXT}\ntwell: {sizes(result)}{machine(result)}"
    if paper is not None:
        footer += f"\n{PAPER_TEXT}: {machine(paper)}; compared with dense on the same machine"
    return Chart(title, footer, panels, draw_speedup, (SIZE[0], 5.3))


def draw_speedup(figure: SubFigure, theme: Theme, data: dict[str, list[Row]]) -> None:
    titles = {"forward": "Forward pass of a layer", "train": "Training step of a layer"}
    panels = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
    for axes, (op, bars) in zip(panels, data.items()):
        for i, bar in enumerate(bars):
            axes.barh(i - 0.19, bar["speedup"], 0.36, color=theme.row)
            axes.text(bar["speedup"], i - 0.19, f" {bar['speedup']:.2f}x {bar['strategy']}", va="center", fontsize=8.5)
            if bar.get("failed"):
                axes.text(0, i + 0.19, " no result", va="center", fontsize=8.5, color=theme.paper)
            elif bar.get("paper"):
                wrong = bool(bar["wrong"])
                axes.barh(i + 0.19, bar["paper"], 0.36, color=theme.paper, hatch="////" if wrong else None)
                text = f" {bar['paper']:.2f}x{' wrong' if wrong else ''}"
                # over the line at 1
                box = {"facecolor": theme.ground, "edgecolor": "none", "pad": 0.4}
                axes.text(bar["paper"], i + 0.19, text, va="center", fontsize=8.5, color=theme.paper, bbox=box)
        baseline(axes, theme, vertical=True)
        axes.set_yticks(range(len(bars)), [f"{bar['workload']}\n{bar['nnz']:.0f} non-zeros" for bar in bars])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set(title=titles[op], xlabel="speed-up over dense PyTorch")
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.set_xlim(0, 1.3 * max([1.0, *(bar["speedup"] for bar in bars)]))
    panels[0].set_ylim(max(map(len, data.values())) - 0.45, -0.55)
    entries = [(patch(color=theme.row), "twell and its strategy")]
    if any("paper" in bar for bars in data.values() for bar in bars):
        entries.append((patch(color=theme.paper), PAPER_TEXT))
        entries.append(
            (patch(facecolor=theme.paper, edgecolor=theme.ground, hatch="////"), "the paper's code, wrong result")
        )
    entries.append((line(color=theme.muted, linewidth=1.2), "dense PyTorch = 1x"))
    legend(figure, entries)


def nnz(results: Results) -> Chart | None:
    """Speed-up of each strategy by non-zeros per token, crossovers marked (h200_sweep_nnz)."""
    result = results.get("h200_sweep_nnz")
    panels: dict[str, dict[str, Any]] = {}
    for pattern in PATTERNS:
        lines: dict[str, list[list[float]]] = {}
        for row in good(result, pattern=pattern):
            name = {"ffn": row["requested"], "train": "train"}.get(row["variant"])
            ratio = best(row)
            # the training line ends where "auto" runs dense: sparse training was not measured there
            if name == "train" and row["strategy"] == "dense":
                continue
            if name and ratio and row["nnz"] > 0:
                lines.setdefault(name, []).append([row["nnz"], ratio])
        if lines:
            ordered = {name: sorted(lines[name]) for name in (*STRATEGIES, "train") if name in lines}
            panels[pattern] = {"lines": ordered, "marks": marks(ordered)}
    if result is None or not panels:
        return None
    limits = []
    for pattern, panel in panels.items():
        if crossed := crossings(*of_line(envelope(panel["lines"]))):
            limits.append(f"{count(crossed[-1])} ({pattern})")
    title = "Fewer non-zeros, more speed"
    if limits:
        title += f": the forward pass beats dense up to {' and '.join(limits)} non-zeros per token"
    slowest = min(y for panel in panels.values() for points in panel["lines"].values() for _, y in points)
    note = f"below {SLOWEST:g}x not shown; " if slowest < SLOWEST else ""
    if any("train" in panel["lines"] for panel in panels.values()):
        note += 'training ends where "auto" runs dense\n'
    return Chart(title, sizes(result) + note + machine(result), panels, draw_nnz, (SIZE[0], 4.8))


def marks(lines: dict[str, list[list[float]]]) -> list[Row]:
    """Crossovers of the strategies and dense. Two strategies cross where they differ by ``ALIKE`` on both sides."""
    found = []
    for name in ("row", "union", "train"):
        if name in lines:
            found += [{"what": f"{name} = dense", "x": x, "y": 1.0} for x in crossings(*of_line(lines[name]))]
    if "row" in lines and "union" in lines:
        row, union = ({point[0]: point[1] for point in lines[name]} for name in ("row", "union"))
        xs = sorted(x for x in set(row) & set(union) if abs(row[x] / union[x] - 1) > ALIKE)
        for x in crossings(xs, [row[at] / union[at] for at in xs]):
            i = max(j for j, at in enumerate(xs) if at <= x)
            x0, x1 = xs[i], xs[min(i + 1, len(xs) - 1)]
            t = math.log(x / x0) / math.log(x1 / x0) if x1 > x0 else 0.0
            found.append({"what": "row = union", "x": x, "y": row[x0] ** (1 - t) * row[x1] ** t})
    return found


def lines_of(theme: Theme) -> dict[str, dict[str, Any]]:
    """Style of each strategy and of the training step, in the order of the legend."""
    styles = {name: {"color": getattr(theme, name), "marker": MARKERS[name]} for name in STRATEGIES}
    # above the line of the chosen strategy
    styles["auto"] |= {"linestyle": "--", "linewidth": 1.2, "markersize": 3.5, "zorder": 3}
    styles["dense"] |= {"linewidth": 1.2}
    return styles | {"train": {"color": theme.extra, "marker": MARKERS["train"]}}


def legend_of_lines(figure: SubFigure, theme: Theme, panels: Iterable[Iterable[str]]) -> None:
    used = {name for names in panels for name in names}
    entries = [(name, look) for name, look in lines_of(theme).items() if name in used]
    named = {"train": 'training step, "auto"', "row": 'forward: "row"'}
    legend(figure, [(line(**look), named.get(name, f'"{name}"')) for name, look in entries])


def count(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def draw_nnz(figure: SubFigure, theme: Theme, data: dict[str, Any]) -> None:
    panels = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
    styles = lines_of(theme)
    everything = [y for panel in data.values() for points in panel["lines"].values() for _, y in points]
    for axes, (pattern, panel) in zip(panels, data.items()):
        for name, points in panel["lines"].items():
            axes.plot(*of_line(points), **styles[name])
        baseline(axes, theme)
        crossed = sorted(panel["marks"], key=lambda mark: float(mark["x"]))
        said = [("Crossovers, non-zeros per token:", theme.text)] if crossed else []
        for mark in crossed:
            axes.plot(mark["x"], mark["y"], "o", markersize=10, fillstyle="none", color=theme.text, zorder=5)
            said.append((f"{mark['what']} at {count(mark['x'])}", styles[mark["what"].split()[0]]["color"]))
        for i, (text, colour) in enumerate(reversed(said)):
            place = {"transform": axes.transAxes, "bbox": {"facecolor": theme.ground, "edgecolor": "none", "pad": 0.5}}
            axes.text(0.04, 0.04 + 0.06 * i, text, fontsize=9, color=colour, zorder=4, **place)
        axes.set(title=PATTERNS[pattern], xlabel="non-zeros per token (log)")
        log_axis(axes, "x", [x for points in panel["lines"].values() for x, _ in points], base=4)
        speed_axis(axes, everything)
    panels[0].set_ylabel("speed-up over dense (log)")
    legend_of_lines(figure, theme, [panel["lines"] for panel in data.values()])


def tokens(results: Results) -> Chart | None:
    """Speed-up of each strategy by M, the tokens per call (h200_sweep_m)."""
    result = results.get("h200_sweep_m")
    panels: dict[str, dict[str, list[list[float]]]] = {}
    for row in good(result):
        name = {"train": "train"}.get(row["variant"], row["requested"])
        ratio = best(row)
        if ratio and name and row["pattern"] in PATTERNS:
            panels.setdefault(row["pattern"], {}).setdefault(name, []).append([row["tokens"], ratio])
    if result is None or not panels:
        return None
    names = ("row", "union", "dense", "auto", "train")
    ordered = {
        pattern: {name: sorted(lines[name]) for name in names if name in lines} for pattern, lines in panels.items()
    }
    # "auto" is what users get; where it was not measured, the best strategy
    gains = {pattern: lines.get("auto") or envelope(lines) for pattern, lines in ordered.items()}
    slower, faster = sides(gains.values())
    title = "Speed-up by tokens per call"
    few, many = [m for m in faster if m < min(slower, default=0)], [m for m in faster if m > max(slower, default=0)]
    if few and many:
        title = f"Forward passes beat dense up to {few[-1]:,} and from {many[0]:,} tokens"
    elif faster and not slower:
        title = f"Forward passes beat dense with {faster[0]:,} to {faster[-1]:,} tokens"
    # a step has a line of its own
    slower, faster = sides(lines["train"] for lines in ordered.values() if "train" in lines)
    if many := [m for m in faster if m > max(slower, default=0)]:
        title += f", training steps from {many[0]:,}"
    rows = good(result)
    active = [f"{row['nnz']:.0f}" for row in rows if row.get("nnz")]
    note = sizes(result, tokens=False) + (
        f"{between(sorted(set(map(int, active))))} non-zeros per token; " if active else ""
    )
    note += "" if any(row.get("speedup_compiled") for row in rows) else "dense: eager PyTorch; "
    return Chart(title, note + machine(result), ordered, draw_tokens, (SIZE[0], 4.6))


def sides(lines: Iterable[Sequence[Sequence[float]]]) -> tuple[list[int], list[int]]:
    """The numbers of tokens with which some line loses, and those with which all that were measured gain."""
    points = [(int(m), ratio) for line in lines for m, ratio in line]
    slower = {m for m, ratio in points if ratio < 1}
    return sorted(slower), sorted({m for m, ratio in points if ratio > 1} - slower)


def between(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def envelope(lines: dict[str, list[list[float]]]) -> list[tuple[float, float]]:
    """Speed-up of the better sparse strategy at each x."""
    highest: dict[float, float] = {}
    for name, points in lines.items():
        if name in ("row", "union"):
            for x, y in points:
                highest[x] = max(y, highest.get(x, 0.0))
    return sorted(highest.items())


def draw_tokens(figure: SubFigure, theme: Theme, data: dict[str, Any]) -> None:
    panels = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
    everything = [y for lines in data.values() for points in lines.values() for _, y in points]
    for axes, (pattern, lines) in zip(panels, data.items()):
        for name, points in lines.items():
            axes.plot(*of_line(points), **lines_of(theme)[name])
        baseline(axes, theme)
        log_axis(axes, "x", [x for points in lines.values() for x, _ in points], base=8)
        speed_axis(axes, everything)
        axes.set(title=PATTERNS[pattern], xlabel="tokens per call (log)")
    panels[0].set_ylabel("speed-up over dense (log)")
    legend_of_lines(figure, theme, data.values())


# By layer

# Correlation of a layer's non-zeros with its speed-up, by the paper.
PAPER_CORRELATION = -0.996


def layers(results: Results) -> Chart | None:
    """Non-zeros, union and speed-up by layer, and their correlation (h200_sweep_layers)."""
    result = results.get("h200_sweep_layers")
    sources: dict[str, dict[str, list[Row]]] = {}
    unions: dict[tuple[str, int], float] = {}
    for row in good(result, requested="auto"):
        ratio = best(row)
        if ratio and row["variant"] in ("ffn", "train"):
            points = sources.setdefault(row["source"], {}).setdefault(row["variant"], [])
            named = {"layer": row["layer"], "nnz": row["nnz"], "strategy": row["strategy"], "speedup": ratio}
            points.append(named)
            if share := union_of(row):
                unions[row["source"], row["layer"]] = share
    if result is None or not sources:
        return None
    # the source with the most layers
    source = max(sources, key=lambda name: max(map(len, sources[name].values())))
    shown = {op: sorted(each, key=lambda point: int(point["layer"])) for op, each in sorted(sources[source].items())}
    for point in (point for each in shown.values() for point in each):
        point["union"] = unions.get((source, point["layer"]))
    fits = {op: {field: correlation(each, field) for field in AGAINST} for op, each in shown.items()}
    op, first = next(iter(fits.items()))
    title = "Speed-up by layer"
    if first["nnz"] is not None:
        title = "Forward: " if op == "ffn" else "Training: "
        title += "layers with fewer non-zeros gain more" if first["nnz"] < 0 else "speed-up does not follow non-zeros"
        title += f": correlation {first['nnz']:.3f}"
        title += f", {first['union']:.3f} with the union" if first["union"] is not None else ""
        title += f"; the paper's is {PAPER_CORRELATION}"
    # without the folder's name
    note = f"{source.partition(' in ')[0]}; {sizes(result)}union: the neurons that any of 128 consecutive tokens fires"
    if any(point["strategy"] == "dense" for each in shown.values() for point in each):
        note += '; hollow: "auto" runs dense'
    note += "\n"
    return Chart(title, note + machine(result), {"points": shown, "fits": fits}, draw_layers, (SIZE[0], 6.2))


# Fields that speed-up is drawn against.
AGAINST = {"nnz": "non-zeros per token", "union": "union, share of the neurons"}


def union_of(row: Row) -> float | None:
    """Mean share of a layer's neurons in the union of 128 tokens, from the bytes that strategy "union" gathers."""
    if row["variant"] != "ffn" or row["strategy"] != "union" or not row.get("l2_gather_gbs"):
        return None
    everything = math.ceil(row["m"] / 128) * row["n"] * 2 * row["k"] * 2
    return float(row["l2_gather_gbs"] * 1e6 * row["ms"] / everything)


def correlation(points: Sequence[Row], field: str) -> float | None:
    """Pearson's r of a field and the speed-up; None with fewer than three layers or an unknown value."""
    values, gains = [point[field] for point in points], [point["speedup"] for point in points]
    if len(points) < 3 or None in values or len(set(values)) < 2 or len(set(gains)) < 2:
        return None
    return statistics.correlation(values, gains)


def draw_layers(figure: SubFigure, theme: Theme, data: dict[str, Any]) -> None:
    points, fits = data["points"], data["fits"]
    styles: dict[str, tuple[str, dict[str, Any]]] = {
        "ffn": ("forward", {"color": theme.row, "marker": "o"}),
        "train": ("training step", {"color": theme.extra, "marker": "^"}),
    }
    first = next(iter(points.values()))
    fields = [field for field in AGAINST if all(point[field] is not None for point in first)]
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.1], squeeze=False)[0]
    *bars, gains = left.subplots(len(fields) + 1, 1, height_ratios=[*[1] * len(fields), 1.5])
    scatters = right.subplots(len(fields), 1, squeeze=False)[:, 0]
    numbers = [point["layer"] for point in first]
    percent: Callable[[float, int], str] = lambda share, _: f"{100 * share:g} %"  # noqa: E731
    for axes, field in zip(bars, fields):
        axes.bar(numbers, [point[field] for point in first], color=theme.dense)
        axes.set_title({"nnz": "Non-zeros per token", "union": "Union of 128 tokens"}[field], loc="left")
        if field == "union":
            axes.yaxis.set_major_formatter(percent)
    for op, each in points.items():
        name, look = styles[op]
        gains.plot([point["layer"] for point in each], [point["speedup"] for point in each], label=name, **look)
    for axes, field in zip(scatters, fields):
        for op, each in points.items():
            name, look = styles[op]
            text = name if fits[op][field] is None else f"{name}: r = {fits[op][field]:.3f}"
            # layers that "auto" ran densely are hollow
            for dense in (False, True):
                chosen = [p for p in each if (p["strategy"] == "dense") == dense and p[field] is not None]
                fill = {"mfc": theme.ground} if dense else {"label": text}
                xs, ys = [point[field] for point in chosen], [point["speedup"] for point in chosen]
                axes.plot(xs, ys, linestyle="none", **look, **fill)
                for x, y, point in zip(xs, ys, chosen) if len(each) <= 40 else ():
                    style.label(axes, x, y, f"{point['layer']}", color=look["color"])
        axes.set(xlabel=f"{AGAINST[field]} (number: layer)", ylabel="speed-up over dense")
        axes.set_xlim(left=0)
        if field == "union":
            axes.xaxis.set_major_formatter(percent)
        axes.legend(loc="upper right")
    top = 1.1 * max(point["speedup"] for each in points.values() for point in each)
    for axes in (gains, *scatters):
        baseline(axes, theme)
        axes.set_ylim(0, top)
        axes.yaxis.set_major_formatter("{x:g}x")
    gains.set_title("Speed-up over dense", loc="left")
    gains.set_xlabel("layer")
    gains.legend(loc="upper right")
    for axes in (*bars, gains):
        axes.set_xticks(numbers if len(numbers) <= 12 else numbers[:: math.ceil(len(numbers) / 10)])
        axes.grid(axis="x", visible=False)


# Memory


def memory(results: Results) -> Chart | None:
    """Memory per token of a training step and a forward pass, dense and sparse (h200_sweep_memory)."""
    result = results.get("h200_sweep_memory")
    panels: dict[str, dict[str, list[list[float]]]] = {}
    for row in good(result):
        name = memory_name(row)
        if name is None or not row["tokens"] or not row["nnz"]:
            continue
        training = row["variant"].endswith("train")
        for panel, value in (
            ("kept" if training else "", row.get("kept_bytes")),
            ("peak" if training else "forward", row.get("peak_bytes")),
        ):
            if panel and value is not None:
                lines = panels.setdefault(panel, {})
                lines.setdefault(name, []).append([row["nnz"], value / row["tokens"] / 1000])
    sparse = {
        panel: {name: lines[name] for name in ('"row"', '"union"') if name in lines} for panel, lines in panels.items()
    }
    if result is None or not sparse.get("kept"):
        return None
    # dense does not depend on the non-zeros
    dense = {
        panel: {name: statistics.median(y for _, y in lines[name]) for name in MEMORY[:2] if name in lines}
        for panel, lines in panels.items()
    }
    kept = [y for points in sparse["kept"].values() for _, y in points]
    title = f"Training keeps {span(kept)} KB per token for backward"
    if dense["kept"]:
        title += f" instead of {min(dense['kept'].values()):.0f}"
    for panel, what in (("peak", "its peak is"), ("forward", "the peak of a forward pass")):
        if dense.get(panel) and sparse.get(panel):
            ratio = statistics.median(y for points in sparse[panel].values() for _, y in points) / min(
                dense[panel].values()
            )
            title += f", {what} {max(ratio, 1 / ratio):.1f} times {'lower' if ratio < 1 else 'higher'}"
    ordered = {
        panel: {
            "dense": dense[panel],
            "lines": {name: sorted(panels[panel][name]) for name in MEMORY[2:] if name in panels[panel]},
        }
        for panel in ("kept", "peak", "forward")
        if panel in panels
    }
    note = f"{sizes(result)}KB without x and the weights; dense does not depend on the non-zeros\n"
    return Chart(title, note + machine(result), ordered, draw_memory, (SIZE[0], 4.4))


MEMORY = ("dense eager", "dense compiled", '"row"', '"union"', '"auto" runs dense')


def memory_name(row: Row) -> str | None:
    """The line of the chart that a row belongs to."""
    if row["variant"] in ("train", "ffn"):
        return MEMORY[-1] if row["strategy"] == "dense" else f'"{row["strategy"]}"'
    name = row["variant"].removesuffix(" train")
    return name if name in MEMORY else None


def draw_memory(figure: SubFigure, theme: Theme, data: dict[str, dict[str, Any]]) -> None:
    styles: dict[str, dict[str, Any]] = {
        "dense eager": {"color": theme.dense},
        "dense compiled": {"color": theme.auto, "linestyle": "--"},
        '"row"': {"color": theme.row, "marker": "o"},
        '"union"': {"color": theme.union, "marker": "s"},
        '"auto" runs dense': {"color": theme.auto, "marker": "D", "mfc": theme.ground, "linestyle": "none"},
    }
    titles = {"kept": "Kept for backward", "peak": "Peak of a training step", "forward": "Peak of a forward pass"}
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    for axes, (panel, shown) in zip(panels, data.items()):
        for name, level in shown["dense"].items():
            axes.axhline(level, **styles[name])
        for name, points in shown["lines"].items():
            axes.plot(*of_line(points), **styles[name])
        log_axis(axes, "x", [x for points in shown["lines"].values() for x, _ in points], base=4)
        levels = [*shown["dense"].values(), *(y for points in shown["lines"].values() for _, y in points)]
        axes.set_ylim(0, 1.1 * max(levels))
        axes.set(title=titles[panel], xlabel="non-zeros per token (log)")
    panels[0].set_ylabel("KB per token")
    used = [name for name in MEMORY if any(name in shown["dense"] | shown["lines"] for shown in data.values())]
    legend(figure, [(line(**styles[name]), name) for name in used])
