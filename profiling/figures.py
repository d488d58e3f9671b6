"""What ``profiling.readme`` shows of layers and of whole models: tables and sentences from profiling/results/."""

import functools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from profiling.draw.common import ResultError, Results, machine, markdown, pivot
from twell.choose.rates import SCREENED
from twell.commands import tune

RESULTS = Path(__file__).resolve().parent / "results"
LAYERS = ("real3", "topic29", "skew29", "uniform29", "real6", "topic128", "dense911")
# The file of layers in all tables, and that of the other GPU.
LAYER_FILE, OTHER_FILE = "auto", "auto_h100"
OPS = {"ffn": "forward", "train": "training"}
Row = dict[str, Any]


@functools.cache
def result(name: str) -> dict[str, Any]:
    """The content of a measurement's file of results."""
    found = Results(RESULTS).get(name)
    if found is None:
        raise ResultError(f"expected results in {RESULTS / name}.json, got no such file")
    return found


def rows_of(name: str) -> list[Row]:
    """The good rows of a file."""
    return [row for row in result(name)["rows"] if row["ms"] and not row["red"]]


def gpu_of(name: str) -> str:
    """The GPU of a file, as "H200"."""
    return str(result(name)["machine"]).partition("NVIDIA ")[2].split(" ")[0]


def version_of(name: str) -> str:
    """The version of the package behind a file."""
    found = re.search(r"twell ([^;]+)", str(result(name)["machine"]))
    return found[1] if found else "unknown"


def where(name: str) -> str:
    """A paragraph that names the GPU of a file, if it is not that of the layers."""
    gpu = gpu_of(name)
    return "" if gpu == gpu_of(LAYER_FILE) else f"\n\nOn an {gpu}."


# Layers


def measured(workload: str, variant: str, tokens: int = 16384, name: str = LAYER_FILE) -> Row:
    found = [
        row
        for row in result(name)["rows"]
        if (row["workload"], row["variant"], row["tokens"]) == (workload, variant, tokens) and row["ms"]
    ]
    if len(found) != 1:
        raise LookupError(f"expected one row of {workload}, {variant}, {tokens} tokens, got {len(found)}")
    return found[0]


def both(row: Row, scale: float = 1, form: str = ".2f") -> str:
    """Replays of graphs: the time of the faster dense and the row's."""
    return f"{row['ms'] * row['speedup_dense'] * scale:{form}} / {row['ms'] * scale:{form}}"


def gain(row: Row) -> str:
    return f"**{row['speedup_dense']:.2f}**"


def eager(rows: Sequence[Row], *ways: str) -> dict[str, list[str]]:
    """Columns of speed-ups of eager calls ("queued", "waited"), if any row has them, with another strategy's name."""
    columns = {}
    for way in ways:
        cells = [f"{row[f'{way}_speedup']:.2f}" if row.get(f"{way}_speedup") else "" for row in rows]
        for place, row in enumerate(rows):
            if cells[place] and row["eager_strategy"] not in ("", row["strategy"]):
                cells[place] += f" ({row['eager_strategy']})"
        if any(cells):
            columns[f"eager, {way}" + " for" * (way == "waited")] = cells
    return columns


def layers() -> str:
    """The layers forward and in training, with the strategy that "auto" ran."""
    header, columns = ["workload", "non-zeros"], []
    for op, said in OPS.items():
        rows = [measured(name, op) for name in LAYERS]
        more = eager(rows, "queued", "waited")
        header += [f"{said}, ms: dense / twell", *more]
        columns += [[f"{both(row)}, {gain(row)} {row['strategy']}" for row in rows], *more.values()]
    counts = [f"{measured(name, 'ffn')['nnz']:.0f}" for name in LAYERS]
    lines = list(zip([f"`{name}`" for name in LAYERS], counts, *columns, strict=True))
    return markdown(header, "lr" + "r" * len(columns), lines)


def errors() -> str:
    """The range of errors over dense's."""
    said = []
    for kind in ("frobenius", "worst_row"):
        ratios = [row[kind] / row[f"dense_{kind}"] for op in OPS for row in (measured(name, op) for name in LAYERS)]
        said.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
    return f"Errors against float64 are {said[0]} times those of dense PyTorch in norm, and {said[1]} in the worst row."


def geometric(ratios: Sequence[float]) -> float:
    return math.prod(ratios) ** (1 / len(ratios))


def mean_speedups(name: str = LAYER_FILE, field: str = "speedup_dense") -> list[float]:
    """Geometric means over the first five layers, forward and in training; none of fields that were not measured."""
    gains = [[measured(each, op, name=name).get(field) or 0.0 for each in LAYERS[:5]] for op in OPS]
    return [geometric(each) for each in gains] if all(map(all, gains)) else []


def headline() -> str:
    """One number each for inference, training and whole models, and for layers on the other GPU."""
    (forward, train), other = mean_speedups(), mean_speedups(OTHER_FILE)
    queued = mean_speedups(field="queued_speedup")
    eagerly = f"; {queued[0]:.1f}x and {queued[1]:.1f}x in eager calls, queued" if queued else ""
    found = [*pairs(timed(configurations()))]
    gains = [theirs["ms"] / ours["ms"] for theirs, ours in found]
    names = [ours["config"] for _, ours in found]
    here, there = gpu_of(LAYER_FILE), gpu_of(OTHER_FILE)
    return (
        f"Speed-ups on an {here} over the faster of eager and compiled dense PyTorch:\n\n"
        f"- Layers with 14 to 33 non-zeros of 5,632 per token: **{forward:.1f}x forward and {train:.1f}x in training** "
        f"in CUDA graphs{eagerly} (geometric means of five)\n"
        f"- Models of {names[0]} to {names[-1]} with random weights and such sparsity, without graphs: "
        f"**{min(gains):.1f}x to {max(gains):.1f}x**\n"
        f"- [Layers on an {there}](docs/install.md#on-an-{there.lower()}), version {version_of(OTHER_FILE)}: "
        f"{other[0]:.1f}x forward and {other[1]:.1f}x in training"
    )


def machines() -> str:
    """Where the layers and the models were measured."""
    parts = (machine(run).split("; ") for run in configurations())
    found = dict.fromkeys(", ".join([each[0], *each[-2:]]) for each in parts)
    return f"Layers: {machine(result(LAYER_FILE))}. Models: {'; '.join(found)}."


def layers_elsewhere() -> str:
    """Speed-ups of the layers on the other GPU."""
    said = []
    for op, mean in zip(OPS, mean_speedups(OTHER_FILE), strict=True):
        gains = [measured(name, op, name=OTHER_FILE)["speedup_dense"] for name in LAYERS]
        said.append(
            f"{OPS[op]} {min(gains):.2f} to {max(gains):.2f}, {mean:.2f} in the geometric mean of the first five"
        )
    return f'Speed-ups by "auto": {"; ".join(said)}. {machine(result(OTHER_FILE))}'


def memory() -> str:
    """Memory kept for backward and peaks of a layer with 29 non-zeros; they hardly depend on this number."""
    own = [row for row in result(LAYER_FILE)["rows"] if row["workload"] == "topic29" and row["tokens"] == 16384]
    found = {row["variant"]: row for row in own}
    cells = []
    for said, forward, train in (
        ("dense, eager", "dense eager", "dense eager train"),
        ("dense, compiled", "dense compiled", "dense compiled train"),
        (f'twell, "{found["train"]["strategy"]}"', "ffn", "train"),
    ):
        sizes = found[train]["kept_bytes"], found[train]["peak_bytes"], found[forward]["peak_bytes"]
        cells.append([said, *(f"{size / 16384 / 1e3:.1f}" for size in sizes)])
    header = ["KB per token", "kept for backward", "peak of a training step", "peak of a forward pass"]
    return markdown(header, "lrrr", cells)


def large_layer() -> str:
    """A larger layer by "auto" beside dense, with eager calls where they were timed."""
    calls = {("ffn", 16384): "forward", ("train", 16384): "training"}
    calls |= {("decode", tokens): f"{tokens} token{'s' if tokens > 1 else ''}" for tokens in (1, 16, 64)}

    cells = {}
    for row in rows_of("large_layer"):
        if row["requested"] == "auto" and (call := (row["variant"], row["tokens"])) in calls:
            eagerly = [f"{row[way]:.2f}" for way in ("queued_speedup", "waited_speedup") if row.get(way)]
            cells[f"`{row['workload']}`", calls[call]] = ", ".join([both(row, 1e3, ",.0f"), gain(row), *eagerly])
    return pivot("dense / twell, us", cells) + where("large_layer")


def few_tokens() -> str:
    """Layers by "auto" on few tokens."""
    cells = {}
    for row in rows_of("few"):
        if row["variant"] == "ffn" and row["requested"] == "auto":
            cells[f"`{row['workload']}`", f"{row['tokens']:,}"] = (
                f"{both(row, 1e3, '.0f')}, {gain(row)} {row['strategy']}"
            )
    return pivot("dense / twell, us", cells) + where("few")


def few_by_share() -> str:
    """Layers by "auto" on few tokens, by the share of neurons that fire."""
    cells = {}
    for row in result("decode")["rows"]:
        if row["share"] not in (0.01, 0.14, 1):
            continue
        layer = f"{row['k']:,} / {row['n']:,}{', gate' if row['gated'] else ''}, {row['share']:.0%}"
        before, after = row["us"]["dense"], row["us"]["auto"]
        cells[layer, str(row["m"])] = f"{after:.0f}, **{before / after:.2f}**"
    return pivot("us, speed-up", cells) + where("decode")


def overfull() -> str:
    """What steps of the sparse path take with more non-zeros than fit."""
    rows = [row for row in rows_of("overfull") if row["requested"] == "union" and row["speedup_dense"] < 1]
    counts, times = ([f"{row['nnz']:.0f}" for row in rows], [f"{1 / row['speedup_dense']:.2f}" for row in rows])
    gpu = gpu_of("overfull")
    return (
        f"Training steps with {' and '.join(counts)} non-zeros per token take {' and '.join(times)} times as long as "
        f"eager dense ones on an {gpu}."
    )


SCREENED_LAYERS = ("real3", "topic29", "real6", "uniform29")


def screen() -> str:
    """Layers by "union" and by "union+screen", and where "auto" takes the screen."""
    calls: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows_of("screen"):
        if row["variant"] in OPS and row["workload"] in SCREENED_LAYERS:
            calls.setdefault((row["workload"], row["variant"]), {})[row["requested"]] = row
    cells = {}
    for (workload, variant), own in calls.items():
        if {"union", SCREENED, "auto"} <= own.keys():
            plain, ours, chosen = (own[name] for name in ("union", SCREENED, "auto"))
            taken = " screen" if chosen["strategy"] == SCREENED else ""
            times = f"{plain['ms']:.2f} / {ours['ms']:.2f}, **{ours['ms'] / plain['ms']:.2f}**{taken}"
            cells[f"`{workload}`", OPS[variant]] = times
    return pivot(f'"union" / "{SCREENED}", ms', cells) + where("screen")


# More than this of dense's time is slower.
SLOWER = 1.02
HOST_TOKENS = (1, 16, 64, 256, 1024)
HOST_LAYERS = ((2048, 5632), (4096, 14336))


def host_times() -> str:
    """Eager calls: their host time, and few tokens."""
    found = result("host")
    parts: dict[str, list[Row]] = {}
    for row in found["rows"]:
        if not row.get("red"):
            parts.setdefault(row.get("part", ""), []).append(row)

    def shown(row: Row) -> bool:
        return (row["k"], row["n"]) in HOST_LAYERS and row["m"] in HOST_TOKENS

    tables = [
        "What an eager call costs the host, in microseconds and over dense's:",
        host_table([row for row in parts["host"] if row["layer"] in ("dense", "auto", "function")]),
    ]
    caption = 'Forward, the time of an eager call by "auto" over dense\'s, queued / waited for, by number of tokens:'
    tables += [caption, few_table(parts["few"], shown)]
    return "\n\n".join(tables) + where("host")


def host_table(rows: Sequence[Row]) -> str:
    """A line for each layer, a column for each kind of call."""
    cells = {}
    for row in rows:
        more = [f"**{row['host_over_dense']:.2f}**"] if row["host_over_dense"] else []
        more += [row["chosen"]] if row["chosen"] else []
        cells[row["layer"], f"{row['what']}, {row['m']:,} tokens"] = ", ".join([f"{row['host_us']:,.0f}", *more])
    return pivot("", cells)


def few_table(rows: Sequence[Row], shown: Callable[[Row], bool]) -> str:
    """A line for each layer, a column for each number of tokens, of rows ``shown``; how many of all lose to dense."""
    cells, ratios = {}, dict[str, list[float]]()
    for row in rows:
        if row["layer"] == "auto":
            name = f"{row['k']:,} / {row['n']:,}{'' if row['gated'] else ', no gate'}"
            queued, waited = row["queued_over_dense"], row["waited_over_dense"]
            if shown(row):
                cells[name, f"{row['m']:,}"] = f"{queued:.2f} / {waited:.2f}"
            for way, value in (("queued", queued), ("waited for", waited)):
                ratios.setdefault(way, []).append(value)
    said = [
        f"{sum(value > SLOWER for value in each)} {way}, at most {max(each) - 1:+.1%}" for way, each in ratios.items()
    ]
    points = sum(row["layer"] == "auto" for row in rows)
    return (
        f"{pivot('K / N', cells)}\n\nOf {points} points these take over {SLOWER:g} of dense's time: {'; '.join(said)}."
    )


def auto_losses() -> str:
    """What "auto" loses at the points outside of its table."""
    found = result("held_out")
    losses = [row["loss"] for row in found["rows"]]
    parts = []
    for kind, training in (("forward", False), ("training", True)):
        own = [row["loss"] for row in found["rows"] if row["training"] == training]
        parts.append(f"{100 * statistics.mean(own):.2f} % over {len(own)} {kind} points")
    said = f'On {len(losses)} points "auto" loses {100 * statistics.mean(losses):.2f} % in the mean'
    many = sum(loss > 0.06 for loss in losses)
    said = f"{said}: {' and '.join(parts)}; more than 6 % at {many}, at most {100 * max(losses):.1f} %."
    if graphs := [(row["loss"], row["graph_loss"]) for row in found["rows"] if "graph_loss" in row]:
        known, unknown = (100 * statistics.mean(own) for own in zip(*graphs))
        said += f" Graphs of 16 to 512 tokens lose {known:.1f} % at {len(graphs)} of the forward points, and "
        said += f"{unknown:.1f} % where they are captured before any figure."
    return f"{said} {machine(found)}"


SHAPES = ((1024, 2816), (2048, 5632), (4096, 14336))


def shapes() -> str:
    """Times of the best strategy over dense by layer, pattern and tokens."""
    best: dict[tuple[int, int, str, int], tuple[float, str]] = {}
    for row in result("tuning")["rows"]:
        if row["gated"] and not row["training"] and not row.get("float8"):
            times = {route: ms / row["dense_ms"] for route, ms in tune.ms_of(row).items() if route != "dense"}
            best[row["k"], row["n"], row["pattern"], row["m"]] = min(
                (time, route.rpartition("+")[2][0]) for route, time in times.items()
            )
    tokens = (64, 256, 1024, 4096, 12288)
    rows = []
    for k, n in SHAPES:
        for pattern in ("topic", "uniform", "denser"):
            cells = []
            for m in tokens:
                time, strategy = best.get((k, n, pattern, m), (math.nan, ""))
                cells.append("" if math.isnan(time) else f"{time:.2f} {strategy}" if time < 1 else f"{time:.2f}")
            rows.append([f"{k:,} / {n:,}", pattern, *cells])
    table = markdown(["K / N", "pattern", *(f"M = {m:,}" for m in tokens)], "ll" + "r" * len(tokens), rows)
    return f"{table}\n\n{machine(result('tuning'))}"


# Whole models

PASSES = {"forward": "forward, decoder", "logits": "forward, with LM head", "train": "training step"}


# Tokens per ms of dense models in arXiv 2603.23198 and the change of sparse ones, forward and in training.
PAPER = {
    "0.5B": {"forward": "410, +17.0 %", "train": "97.3, -1.5 %"},
    "1B": {"forward": "185, +18.1 %", "train": "48.6, +7.1 %"},
    "1.5B": {"forward": "119, +18.8 %", "train": "31.8, +11.6 %"},
}


def configurations() -> list[dict[str, Any]]:
    """Results of the models of the paper's sizes. LookupError if two files have the same row."""
    found = [result(path.stem) for path in sorted(RESULTS.glob("paper_configs*.json"))]
    counts = Counter((row["config"], row["op"], row["variant"]) for run in found for row in run["rows"])
    if twice := [" ".join(key) for key, count in counts.items() if count > 1]:
        raise LookupError(f"expected one row of each model, got more of {', '.join(twice)}")
    return found


def timed(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """The timed rows of these runs, sorted by model and operation."""
    rows = [row for run in runs for row in run["rows"] if row["ms"] and not row["red"]]
    order = list(dict.fromkeys(row.get("config") for row in rows))
    return sorted(rows, key=lambda row: (order.index(row.get("config")), list(PASSES).index(row["op"])))


def pairs(rows: Sequence[Row], kind: str = "") -> Iterator[tuple[Row, Row]]:
    """The dense and the sparse row of each model and operation: of ``kind`` (eager, compiled), or the faster."""
    for key in dict.fromkeys((row.get("config"), row["op"]) for row in rows):
        sides = [
            [
                row
                for row in rows
                if (row.get("config"), row["op"]) == key and row["variant"].startswith(f"{what} {kind}")
            ]
            for what in ("dense", "sparse")
        ]
        if all(sides):
            theirs, ours = (min(found, key=lambda row: float(row["ms"])) for found in sides)
            yield theirs, ours


def change(before: float, now: float) -> str:
    # no minus sign before 0.0
    return f"{round(100 * (now / before - 1), 1) + 0.0:+.1f} %"


def models() -> str:
    """The faster dense and sparse variants of models of the paper's sizes, without LM head."""
    said = labels()
    rows = []
    for theirs, ours in pairs(timed(configurations())):
        if ours["op"] == "logits":
            continue
        cells = [said[ours["config"]], PASSES[ours["op"]]]
        cells += [f"{theirs['ms']:.0f} / {ours['ms']:.0f}", f"**{theirs['ms'] / ours['ms']:.2f}**"]
        for key, scale, form in (("mj_per_token", 1, ".2f"), ("peak_bytes", 1e9, ".1f")):
            # energy is not always measured
            both = [row[key] / scale for row in (theirs, ours) if row.get(key)]
            cells.append(" / ".join(f"{value:{form}}" for value in both))
        rows.append(cells)
    header = ["model (non-zeros)", "pass", "ms: dense / twell", "speed-up", "mJ per token", "peak GB"]
    return markdown(header, "llrrrr", rows)


def labels(non_zeros: bool = True) -> dict[str, str]:
    """What tables call each model: its size and its non-zeros."""
    said = {}
    for run in configurations():
        for each in run["models"]:
            counted = f" ({statistics.fmean(each['non_zeros']):.0f})" if non_zeros else ""
            said[each["config"]] = f"{each['config']}{counted}"
    return said


def beside_paper() -> str:
    """Tokens per ms of dense models, the paper's and eager ones here, and how they change when sparse."""
    cells: dict[tuple[str, str], str] = {}
    names = labels(non_zeros=False)
    for dense, sparse in pairs(timed(configurations()), "eager"):
        config, op = sparse["config"], sparse["op"]
        if op in PAPER.get(config, ()):
            said = {"forward": "forward", "train": "training"}[op]
            rates = dense["tokens_per_ms"], sparse["tokens_per_ms"]
            cells[names[config], f"{said}: paper"] = PAPER[config][op]
            cells[names[config], f"{said}: twell"] = f"{rates[0]:.0f}, {change(*rates)}"
    return pivot("eager models", cells)


def several_gpus() -> str:
    """Training steps of a model on two and on four GPUs: the faster dense and sparse variants."""
    cells = {}
    for count in (2, 4):
        rows = rows_of(f"parallel{count}")
        for mode in dict.fromkeys(row["mode"] for row in rows):
            said = {"ddp": "DDP", "fsdp": "FSDP2", "tp": "tensor parallelism"}[mode]
            for kind in ("compiled", "eager"):
                dense, ours = (
                    next(r for r in rows if (r["mode"], r["variant"]) == (mode, f"{side} {kind}"))
                    for side in ("dense", "sparse")
                )
                cells[said, f"{count} GPUs, {kind}"] = (
                    f"{dense['ms']:.0f} / {ours['ms']:.0f}, **{dense['ms'] / ours['ms']:.2f}**"
                )
    return f"{pivot('ms: dense / twell', cells)}\n\nEmpty: not measured. {machine(result('parallel2'))}"
