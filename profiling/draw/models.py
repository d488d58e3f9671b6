"""Charts of whole models: speed, memory, energy, the paper's sizes, a training run."""

from __future__ import annotations

import itertools
import re
import statistics
from typing import TYPE_CHECKING, Any

from profiling.draw.common import Chart, Results, Row, good, legend, line, log_axis, machine, of_line, patch, span
from profiling.draw.style import SIZE, Theme

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

OPS = {"forward": "forward, decoder", "logits": "forward, with LM head", "train": "training step"}
# With more groups of bars than this the chart leaves out the eager variants.
EAGER_GROUPS = 6
VARIANTS = ("dense eager", "dense compiled", "sparse eager", "sparse compiled")


def models(results: Results) -> Chart | None:
    """Tokens/ms, peak memory and energy of whole models, dense and sparse (h200_model*)."""
    groups: list[Row] = []
    machines = []
    for result in results.matching("h200_model*").values():
        rows = [row for row in good(result) if row.get("op") in OPS and row.get("variant") in VARIANTS]
        by_group: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            by_group.setdefault((row.get("config") or str(result["arguments"]["model"]), row["op"]), []).append(row)
        sizes = {each["config"]: f"{each['parameters'] / 1e9:.1f}B" for each in result.get("models", [])}
        for (model, op), found in by_group.items():
            active = found[0].get("non_zeros") or result.get("non_zeros")
            bars = {
                row["variant"]: {
                    "rate": row["tokens_per_ms"],
                    "peak": None if row.get("peak_bytes") is None else row["peak_bytes"] / 1e9,
                    "energy": row.get("mj_per_token"),
                }
                for row in found
            }
            # the size alone; for a folder the size that was found in it
            drawn = re.match(r"[\d.]+B", model) is not None
            name = (model if drawn else sizes.get(model, model)).split(",")[0].split(" (")[0]
            kind = "trained" if not drawn else "hardest pattern" if result["arguments"].get("topic") == 0 else "drawn"
            group: Row = {"model": f"{name} {kind}", "op": op, "bars": bars}
            groups.append(group | {"nnz": statistics.fmean(active) if active else None})
        if rows:
            machines.append(machine(result))
    if len(groups) > EAGER_GROUPS:
        for group in groups:
            group["bars"] = {name: bar for name, bar in group["bars"].items() if "eager" not in name}
    if not groups:
        return None
    groups.sort(key=lambda group: list(OPS).index(group["op"]))
    gains = {
        kind: [
            group["bars"]["sparse compiled"]["rate"] / group["bars"]["dense compiled"]["rate"]
            for group in groups
            if (group["op"] == "train") == (kind == "train")
            and {"sparse compiled", "dense compiled"} <= set(group["bars"])
        ]
        for kind in ("forward", "train")
    }
    said = {"forward": "forward pass", "train": "training step"}
    parts = ", ".join(f"{said[kind]} {span(gains[kind], 2)} times" for kind in gains if gains[kind])
    title = f"Whole compiled models: {parts} as fast as dense" if parts else "Whole models"
    footer = "\n".join(dict.fromkeys(machines))
    used = {name for group in groups for name in group["bars"]}
    return Chart(title, footer, groups, draw_models, (SIZE[0], 1.9 + (0.22 + 0.14 * len(used)) * len(groups)))


def draw_models(figure: SubFigure, theme: Theme, data: list[Row]) -> None:
    colours = {"dense eager": theme.dense, "dense compiled": theme.dense, "sparse eager": theme.row}
    colours["sparse compiled"] = theme.row
    used = [name for name in VARIANTS if any(name in group["bars"] for group in data)]
    fields = {
        "rate": ("tokens/ms\n(more is better)", "{:.0f}"),
        "peak": ("peak GB above weights\n(less is better)", "{:.1f}"),
        "energy": ("mJ/token\n(less is better)", "{:.2f}"),
    }
    bars = [bar for group in data for bar in group["bars"].values()]
    shown = [field for field in fields if any(bar[field] is not None for bar in bars)]
    panels = figure.subplots(1, len(shown), sharey=True, width_ratios=[1.4, *[1] * (len(shown) - 1)], squeeze=False)[0]
    height = 0.8 / len(used)
    for axes, field in zip(panels, shown):
        title, form = fields[field]
        for i, group in enumerate(data):
            for j, name in enumerate(used):
                value = group["bars"].get(name, {}).get(field)
                if value is None:
                    continue
                place = i + (j - (len(used) - 1) / 2) * height
                hatch = "////" if "eager" in name else ""
                axes.barh(place, value, 0.92 * height, color=colours[name], hatch=hatch, edgecolor=theme.ground)
                text = " " + form.format(value)
                reference = group["bars"].get("dense compiled")
                if name == "sparse compiled" and reference and field == "rate":
                    text += f"  ({value / reference[field]:.2f}x)"
                axes.text(value, place, text, va="center", fontsize=8)
        axes.set_xlim(0, (1.36 if field == "rate" else 1.26) * max(bar[field] or 0.0 for bar in bars))
        axes.set_xlabel(title)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    names = [
        f"{OPS[group['op']]}\n{group['model']}" + ("" if group["nnz"] is None else f", {group['nnz']:.0f} non-zeros")
        for group in data
    ]
    panels[0].set_yticks(range(len(data)), names, fontsize=8)
    panels[0].invert_yaxis()
    legend(
        figure,
        [
            (patch(facecolor=colours[name], edgecolor=theme.ground, hatch="////" if "eager" in name else ""), name)
            for name in used
        ],
    )


# The paper's configurations


def change(before: float, after: float) -> float:
    """The change in percent."""
    return 100 * (after / before - 1)


# From arXiv 2603.23198, sparse over dense on H100 PCIe, in percent. Memory at 2B is left out: unequal micro-batches.
PAPER: dict[tuple[str, str], dict[str, float]] = {
    ("forward", "rate"): {"0.5B": 17.0, "1B": 18.1, "1.5B": 18.8, "2B": 20.5},
    ("train", "rate"): {"0.5B": -1.5, "1B": 7.1, "1.5B": 11.6, "2B": 21.9},
    ("forward", "energy"): {
        "0.5B": change(1.63, 1.43),
        "1B": change(3.71, 3.17),
        "1.5B": change(5.73, 4.87),
        "2B": change(7.85, 6.51),
    },
    ("train", "peak"): {"0.5B": change(26.2, 21.2), "1B": change(44.5, 33.1), "1.5B": change(62.8, 45.1)},
}
CONFIGS = ("0.5B", "1B", "1.5B", "2B")
# The quantities compared: title, field of a row, whether more is better.
COMPARED = {
    "rate": ("Tokens per second", "tokens_per_ms", True),
    "energy": ("Energy per token", "mj_per_token", False),
    "peak": ("Peak memory", "peak_total_bytes", False),
}
# The title names the speed of all sizes, and energy and memory of one.
SPEED = {"forward": "faster forward", "train": "in training"}
SAID = "1.5B"
COST = {("forward", "energy"): "energy", ("train", "peak"): "training memory"}


def paper(results: Results) -> Chart | None:
    """Speed, energy and memory of models of the paper's sizes, and the paper's figures (h200_paper_configs*)."""
    latest: dict[tuple[str, str], tuple[list[Row], str]] = {}
    for result in results.matching("h200_paper_configs*").values():
        by_group: dict[tuple[str, str], list[Row]] = {}
        for row in good(result):
            if row["op"] in ("forward", "train"):
                by_group.setdefault((row["config"], row["op"]), []).append(row)
        for key, rows in by_group.items():
            if any(row["variant"] == "sparse compiled" for row in rows):
                latest[key] = rows, machine(result)
    bars: list[Row] = []
    machines: dict[str, None] = {}
    for config, op in itertools.product(CONFIGS, ("forward", "train")):
        rows, where = latest.get((config, op), ([], ""))
        dense = [row for row in rows if row["variant"].startswith("dense")]
        if not dense:
            continue
        fastest = max(dense, key=lambda row: float(row["tokens_per_ms"]))
        ours = next(row for row in rows if row["variant"] == "sparse compiled")
        bar = {"config": config, "op": op, "nnz": statistics.fmean(ours["non_zeros"])}
        bar["ours"] = {
            kind: change(fastest[field], ours[field])
            for kind, (_, field, _) in COMPARED.items()
            if fastest.get(field) and ours.get(field)
        }
        theirs = {kind: PAPER.get((op, kind), {}).get(config) for kind in COMPARED}
        bars.append(bar | {"paper": {kind: value for kind, value in theirs.items() if value is not None}})
        machines[where] = None
    if not bars:
        return None
    gains = {op: [bar["ours"]["rate"] for bar in bars if bar["op"] == op] for op in ("forward", "train")}
    said = [f"{span(gains[op], 0)} % {what}" for op, what in SPEED.items() if gains[op]]
    found = {(bar["op"], kind): bar["ours"][kind] for bar in bars for kind in bar["ours"] if bar["config"] == SAID}
    beside = [
        f"{what} {found[key]:+.0f} % (paper {PAPER[key][SAID]:+.0f} %)" for key, what in COST.items() if key in found
    ]
    title = f"Models of the paper's sizes: {', '.join(said)}" + (f"; at {SAID} {', '.join(beside)}" if beside else "")
    note = (
        "twell: sparse compiled against the faster dense variant; random weights with the paper's non-zeros per token; "
        "energy of the whole board; peaks with weights and optimizer state. The paper: H100 PCIe, against its own "
        "dense; it has no energy of training, and its peaks at 2B are of unequal micro-batches.\n"
    )
    return Chart(title, note + "\n".join(machines), bars, draw_paper, (SIZE[0], 6.1))


def draw_paper(figure: SubFigure, theme: Theme, data: list[Row]) -> None:
    names = {"forward": "forward, decoder", "train": "training step"}
    colours = {"forward": theme.row, "train": theme.extra}
    configs = list(dict.fromkeys(bar["config"] for bar in data))
    panels = figure.subplots(1, len(COMPARED), sharey=True)
    for axes, (kind, (title, _, more)) in zip(panels, COMPARED.items()):
        values = [0.0]
        for bar in data:
            place = configs.index(bar["config"]) + (-0.31 if bar["op"] == "forward" else 0.11)
            both = ((place, bar["ours"], colours[bar["op"]]), (place + 0.2, bar["paper"], theme.paper))
            for at, found, colour in both:
                if kind not in found:
                    continue
                better = found[kind] if more else -found[kind]
                values.append(better)
                axes.barh(at, better, 0.19, color=colour)
                axes.text(max(better, 0), at, f" {found[kind]:+.1f} %", va="center", fontsize=8, color=colour)
        axes.axvline(0, color=theme.muted, linewidth=1.2)
        axes.set_xlim(1.6 * min(values), 1.28 * max(1, *values))
        axes.xaxis.set_major_formatter(lambda x, _, sign=1 if more else -1: f"{sign * x:+g} %" if x else "0 %")
        axes.set(title=title, xlabel=f"sparse against dense\n({'more' if more else 'less'} is better)")
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    active = {bar["config"]: bar["nnz"] for bar in data}
    panels[0].set_yticks(range(len(configs)), [f"{config}\n{active[config]:.0f} non-zeros" for config in configs])
    panels[0].set_ylim(len(configs) - 0.5, -0.5)
    entries = [(patch(color=colours[op]), f"twell, {name}") for op, name in names.items()]
    legend(figure, [*entries, (patch(color=theme.paper), "the paper, for the bar above")])


def training(results: Results) -> Chart | None:
    """Loss and non-zeros of training runs by step (h200_training_run)."""
    result = results.get("h200_training_run")
    if result is None or not result.get("runs"):
        return None
    curves = {
        name: {
            "step": [row["step"] for row in run],
            "ce": [row["ce"] for row in run],
            "non_zeros": [row["non_zeros"] for row in run],
            "held_out": [[row["step"], row["held_out_ce"]] for row in run if row.get("held_out_ce")],
            "rate": statistics.median(row["tokens_per_s"] for row in run[len(run) // 2 :]),
        }
        for name, run in result["runs"].items()
    }
    final = {name: curve["held_out"][-1][1] for name, curve in curves.items() if curve["held_out"]}
    dense = [value for name, value in final.items() if name.startswith("dense")]
    title = "Sparse training follows dense training"
    if "sparse" in final and dense:
        ratio = curves["sparse"]["rate"] / max(curves[name]["rate"] for name in final if name.startswith("dense"))
        title += (
            f": held-out loss {final['sparse']:.2f}, dense {span(dense, 2)}, at {ratio:.2f} times the tokens per second"
        )
    options = result["options"]
    note = f"{options['config']}, {int(options['tokens_per_step']):,} tokens per step, "
    note += f"L1 {short(float(options['l1']))} unless named; "
    if any("again" in name for name in curves):
        note += '"dense again" rounds at other places, so its distance from dense is noise\n'
    return Chart(title, note + machine(result), curves, draw_training, (SIZE[0], 4.5))


def short(coefficient: float) -> str:
    """A coefficient as in 2e-5."""
    mantissa, exponent = f"{coefficient:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}" if coefficient else "0"


def draw_training(figure: SubFigure, theme: Theme, data: dict[str, Any]) -> None:
    base = next((curve for name, curve in data.items() if name.startswith("dense")), next(iter(data.values())))
    loss, over, active = figure.subplots(1, 3)
    palette = {"dense": theme.dense, "dense again": theme.auto, "sparse": theme.row}
    others = iter((theme.union, theme.extra, theme.paper) * len(data))
    entries = []
    for name, curve in data.items():
        look = {"color": palette.get(name) or next(others), "linestyle": "--" if "again" in name else "-"}
        loss.plot(curve["step"], curve["ce"], **look)
        if curve["step"] == base["step"]:
            over.plot(curve["step"], [ours - theirs for ours, theirs in zip(curve["ce"], base["ce"])], **look)
        if curve["held_out"]:
            loss.plot(*of_line(curve["held_out"]), "o", color=look["color"], markeredgecolor=theme.ground, zorder=4)
        active.plot(curve["step"], curve["non_zeros"], **look)
        entries.append((line(**look), name))
    entries.append((line(color=theme.muted, marker="o", linestyle="none"), "held out"))
    loss.set(xlabel="step", ylabel="nats per token", title="Cross-entropy")
    over.set(xlabel="step", ylabel="nats per token", title="Difference from dense")
    active.set(xlabel="step", title="Non-zeros")
    log_axis(active, "y", [value for curve in data.values() for value in curve["non_zeros"]])
    active.set_ylabel("non-zeros per token (log)")
    legend(figure, entries)
