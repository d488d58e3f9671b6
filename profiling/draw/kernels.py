"""Charts of kernels: their shares of a step, and their distance from the roofs."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from profiling.draw.common import (
    MARKERS,
    Chart,
    Results,
    Row,
    dense_ms,
    good,
    legend,
    line,
    log_axis,
    machine,
    patch,
    powers,
    sizes,
)
from profiling.draw.style import SIZE, Theme

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

# Smaller shares, in percent, have no room for a figure in their bar.
LABELLED_SHARE = 7
# The part of a step that a kernel belongs to, by the beginning of its name; all others are "rest".
PARTS = {
    "gate_pack": "gate GEMM + pack",
    "quantize_gate": "int8 screen",
    "gate_screen": "int8 screen",
    "list_candidates": "int8 screen",
    "sampled_gate": "gate at candidates",
    "up_down": "up and down",
    "sampled_up": "up at non-zeros",
    "gathered*0": "y = h w_down",
    "gathered*1": "y = h w_down",
    "sampled_grad": "gradients at non-zeros",
    "gathered*2": "dx",
    "weight_grad": "weight gradients",
}
REST = "rest"


def part_of(symbol: str) -> str:
    """The part of a step that a kernel belongs to."""
    if symbol.startswith("gathered"):
        return PARTS[f"gathered*{symbol[-1]}"] if symbol[-1] in "012" else REST
    return next((part for name, part in PARTS.items() if symbol.startswith(name)), REST)


def kernels(results: Results) -> Chart | None:
    """Share of each kernel in a forward pass and a training step (h200_sweep_kernels)."""
    result = results.get("h200_sweep_kernels")
    rows = good(result)
    panels: dict[str, list[Row]] = {}
    for op, suffix in (("ffn", ""), ("train", " train")):
        for row in rows:
            known = [entry["workload"] for entry in panels.get(op, [])]
            if row["variant"] != op or not row.get("kernels") or row["workload"] in known:
                continue
            parts: dict[str, float] = {}
            for symbol, ms in row["kernels"].items():
                parts[part_of(symbol)] = parts.get(part_of(symbol), 0.0) + ms
            dense = dense_ms([each for each in rows if each["workload"] == row["workload"]], suffix)
            entry = {"workload": row["workload"], "nnz": row["nnz"], "parts": parts, "dense": dense}
            panels.setdefault(op, []).append(entry)
    shown = {op: sorted(rows, key=lambda row: row["nnz"]) for op, rows in panels.items() if rows}
    if result is None or not shown:
        return None
    op = "train" if "train" in shown else next(iter(shown))
    shares: dict[str, list[float]] = {}
    for entry in shown[op]:
        whole = sum(entry["parts"].values())
        for name, ms in entry["parts"].items():
            shares.setdefault(name, []).append(ms / whole)
    # a part that a workload lacks counts as 0
    means = {name: sum(each) / len(shown[op]) for name, each in shares.items()}
    order = sorted(means, key=lambda name: -means[name])
    what = "a training step" if op == "train" else "a forward pass"
    title = " and ".join(f"{name} ({100 * means[name]:.0f} %)" for name in order[:2])
    title += f" {'are the largest parts of' if len(order) > 1 else 'is all of'} {what}"
    title = title[0].upper() + title[1:]
    return Chart(title, sizes(result) + machine(result), shown, draw_kernels, (SIZE[0], 4.9))


def draw_kernels(figure: SubFigure, theme: Theme, data: dict[str, list[Row]]) -> None:
    titles = {"ffn": "Forward pass", "train": "Training step"}
    order = [*dict.fromkeys(PARTS.values()), REST]
    used = [name for name in order if any(name in row["parts"] for rows in data.values() for row in rows)]
    palette = (theme.row, theme.union, theme.extra, theme.paper, theme.auto, theme.dense)
    # more parts than colours: the second round is hatched
    styles = {
        name: {"facecolor": palette[i % len(palette)], "hatch": "" if i < len(palette) else "////"}
        for i, name in enumerate(name for name in used if name != REST)
    }
    styles[REST] = {"facecolor": theme.grid, "hatch": ""}
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    for axes, (op, rows) in zip(panels, data.items()):
        for i, row in enumerate(rows):
            whole, left = sum(row["parts"].values()), 0.0
            for name in used:
                share = 100 * row["parts"].get(name, 0.0) / whole
                axes.barh(i, share, 0.72, left=left, linewidth=0.8, **(styles[name] | {"edgecolor": theme.ground}))
                if share >= LABELLED_SHARE:
                    hatched = bool(styles[name]["hatch"])
                    place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5}
                    place["color"] = theme.text if hatched or name == REST else theme.ground
                    if hatched:
                        place["bbox"] = {"facecolor": theme.ground, "edgecolor": "none", "pad": 1}
                    axes.text(left + share / 2, i, f"{share:.0f}", **place)
                left += share
            times = f"{whole:.2f} ms"
            if row["dense"]:
                times += f"\ndense {row['dense']:.2f} ms"
            axes.text(102, i, times, va="center", fontsize=8)
        axes.set_yticks(
            range(len(rows)), [f"{row['workload']}\n{row['nnz']:.0f} non-zeros" for row in rows], fontsize=8
        )
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
        axes.set(title=titles[op], xlabel="share of the kernels' time (%)")
        axes.set_xlim(0, 144)
        axes.spines["bottom"].set_bounds(0, 100)
        axes.set_xticks(range(0, 101, 20))
    legend(figure, [(patch(**(styles[name] | {"edgecolor": theme.ground})), name) for name in used], columns=4)


def roofline(results: Results) -> Chart | None:
    """Executed TFLOP/s by arithmetic intensity, under the measured roofs (h200_strategies)."""
    result = results.get("h200_strategies")
    points: dict[str, list[Row]] = {"gather": [], "memory": []}
    for row in good(result):
        if not row.get("executed_tflops"):
            continue
        name = row["requested"] or "dense"
        for panel, field, variants in (("gather", "l2_gather_gbs", ("ffn",)), ("memory", "memory_gbs", ("decode",))):
            wanted = row["variant"] in variants or (panel == "memory" and row["variant"] == "dense compiled decode")
            if row.get(field) and wanted and name in ("row", "union", "dense"):
                intensity = row["executed_tflops"] * 1e3 / row[field]
                point = {"name": name, "workload": row["workload"], "tokens": row["tokens"]}
                points[panel].append(point | {"intensity": intensity, "tflops": row["executed_tflops"]})
    shown = {panel: each for panel, each in points.items() if each}
    if result is None or not shown:
        return None
    ceilings = result["ceilings"]
    data = {"points": shown, "tflops": ceilings["tflops"], "memory": ceilings["memory_tbs"]}
    data["gather"] = ceilings["l2_tbs_assumed"]
    title = "Under the roofs"
    shares = {
        name: [
            point["tflops"] / min(ceilings["tflops"], ceilings["l2_tbs_assumed"] * point["intensity"])
            for point in points["gather"]
            if point["name"] == name
        ]
        for name in ("union", "row")
    }
    if all(shares.values()):
        union, row = (100 * statistics.median(shares[name]) for name in ("union", "row"))
        title = f'Whole layers: "union" reaches {union:.0f} % of its roof in the median, "row" {row:.0f} %'
    note = (
        "Each point is a workload. A weight row that several of eight tokens need is read once and counted for each. "
    )
    note += "Roofs: a matrix product and a memory copy measured in the same run; the rate of L2 reads is assumed.\n"
    return Chart(title, note + sizes(result, tokens=False) + machine(result), data, draw_roofline, (SIZE[0], 4.8))


def draw_roofline(figure: SubFigure, theme: Theme, data: dict[str, Any]) -> None:
    titles = {
        "gather": ("Whole layers, 16,384 tokens", "operations per byte gathered through L2 (log)", "L2 reads"),
        "memory": ("Decode, 1 to 256 tokens", "operations per byte of memory (log)", "memory copies"),
    }
    panels = figure.subplots(1, len(data["points"]), squeeze=False)[0]
    for axes, (panel, points) in zip(panels, data["points"].items()):
        title, label, short = titles[panel]
        xs, ys = [point["intensity"] for point in points], [point["tflops"] for point in points]
        peak, rate = data["tflops"], data[panel]
        low, high = powers(min(xs), max(xs), 4)[0], powers(min(xs), max([*xs, 2 * peak / rate]), 4)[-1]
        axes.plot([low, peak / rate, high], [low * rate, peak, peak], color=theme.muted, linewidth=1.5)
        axes.text(high, peak * 1.06, f"{peak:.0f} TFLOP/s ", ha="right", va="bottom", fontsize=8.5)
        for name in ("row", "union", "dense"):
            chosen = [point for point in points if point["name"] == name]
            axes.plot(
                [point["intensity"] for point in chosen],
                [point["tflops"] for point in chosen],
                linestyle="none",
                marker=MARKERS[name],
                color=getattr(theme, name),
            )
        log_axis(axes, "x", [low, high], base=4)
        log_axis(axes, "y", [*ys, low * rate, 1.3 * peak], base=4)
        label_at = low * (peak / rate / low) ** 0.75
        axes.annotate(
            f"{rate:.2f} TB/s\n{short}",
            (label_at, rate * label_at),
            xytext=(-4, 6),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
        )
        axes.set(title=title, xlabel=label)
    panels[0].set_ylabel("TFLOP/s executed (log)")
    names = {point["name"] for points in data["points"].values() for point in points}
    entries = [
        (
            line(color=getattr(theme, name), marker=MARKERS[name], linestyle="none"),
            f'"{name}"' if name != "dense" else name,
        )
        for name in ("row", "union", "dense")
        if name in names
    ]
    legend(figure, [*entries, (line(color=theme.muted, linewidth=1.5), "roof")])
