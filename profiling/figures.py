"""What ``profiling.readme`` shows of layers and of whole models: tables and sentences from profiling/results/."""

import functools
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from profiling import everything
from profiling.everything import RESULTS
from twell.choose.rates import SCREENED
from twell.commands import fitting

Row = dict[str, Any]
LAYERS = ("real3", "topic29", "skew29", "uniform29", "real6", "topic128", "dense911")
# The file of layers in all tables, and that of the other GPU.
LAYER_FILE, OTHER_FILE = "auto", "auto_h100"
OPS = {"ffn": "forward", "train": "training"}
PASSES = {"forward": "forward, decoder", "logits": "forward, with LM head", "train": "training step"}
# Eager calls that are shown, and what of dense's time is slower.
HOST_TOKENS, HOST_LAYERS, SLOWER = (1, 16, 64, 256, 1024), ((2048, 5632), (4096, 14336)), 1.02


@functools.cache
def result(name: str) -> dict[str, Any]:
    """The content of a measurement's file of results. Raises OSError without one."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def good(name: str, time: str = "ms") -> list[Row]:
    """The rows of a file that were right and timed."""
    return [row for row in result(name)["rows"] if row[time] and not row["red"]]


def by_case(rows: Iterable[Row], *keys: str, each: str = "variant") -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows by what those of a case share, and by what tells these apart."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row[each]] = row
    return found


def gpu_of(name: str) -> str:
    return str(result(name)["machine"]).partition("NVIDIA ")[2].split(" ")[0]


def bold(ratio: float) -> str:
    return f"**{ratio:.2f}**"


def machine(found: Mapping[str, Any]) -> str:
    """The machine line of a file, without the parts that cannot change a figure."""
    line = re.sub(r" \(\d+ SMs, \d+ GiB\)", "", str(found["machine"]))
    line = re.sub(r"SM \d+ MHz now, (\d+) most, memory \d+ MHz, (\d+)\.\d+ W", r"SM up to \1 MHz, \2 W", line)
    return "; ".join(part for part in line.split("; ") if not part.startswith(("Python ", "driver ", "CuTe ")))


def markdown(header: Sequence[str], align: str, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; ``align`` has l or r for each column. ValueError if a line has more cells or fewer."""
    rule = ["--:" if side == "r" else "---" for side in align]
    for cells in (header, *rows):
        if len(cells) != len(align):
            raise ValueError(f"expected {len(align)} cells, got {len(cells)}: {cells}")
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])


def pivot(corner: str, cells: Mapping[tuple[str, str], str]) -> str:
    """A table of cells by line and column."""
    lines, columns = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    rows = [[line, *(cells.get((line, column), "") for column in columns)] for line in lines]
    return markdown([corner, *columns], "l" + "r" * len(columns), rows)


def where(name: str) -> str:
    """A paragraph with the machine line of a file, if it is not that of the layers."""
    line = machine(result(name))
    return "" if line == machine(result(LAYER_FILE)) else f"\n\n{line}"


def span(ratios: Sequence[float]) -> str:
    """The least and the most."""
    said = [f"{each:.2f}" for each in (min(ratios), max(ratios))]
    return " to ".join(dict.fromkeys(said))


def measured(workload: str, variant: str, name: str = LAYER_FILE) -> Row:
    """The row of a layer on 16,384 tokens."""
    wanted = workload, variant, 16384
    rows = result(name)["rows"]
    (found,) = (row for row in rows if (row["workload"], row["variant"], row["tokens"]) == wanted and row["ms"])
    return found


def both(row: Row) -> str:
    """Replays of graphs: ms of the faster dense and of the row, and their ratio."""
    return f"{row['ms'] * row['speedup_dense']:.2f} / {row['ms']:.2f}, {bold(row['speedup_dense'])}"


def layers() -> str:
    """The layers forward and in training, with the strategy that "auto" ran."""
    header, columns = ["workload", "non-zeros"], list[list[str]]()
    for op, said in OPS.items():
        rows = [measured(name, op) for name in LAYERS]
        header += [f"{said}, ms: dense / twell", "eager, queued", "eager, waited for"]
        columns.append([f"{both(row)} {row['strategy']}" for row in rows])
        for way in ("queued", "waited"):
            other = [row["eager_strategy"] not in ("", row["strategy"]) for row in rows]
            names = [f" ({row['eager_strategy']})" if differs else "" for row, differs in zip(rows, other)]
            columns.append([f"{row[f'{way}_speedup']:.2f}{name}" for row, name in zip(rows, names)])
    counts = [f"{measured(name, 'ffn')['nnz']:.0f}" for name in LAYERS]
    lines = list(zip([f"`{name}`" for name in LAYERS], counts, *columns, strict=True))
    return markdown(header, "lr" + "r" * len(columns), lines)


def errors() -> str:
    rows = [measured(name, op) for op in OPS for name in LAYERS]
    said = [span([row[kind] / row[f"dense_{kind}"] for row in rows]) for kind in ("frobenius", "worst_row")]
    return f"Errors against float64 are {said[0]} times those of dense PyTorch in norm, and {said[1]} in the worst row."


def mean_speedups(name: str = LAYER_FILE, field: str = "speedup_dense") -> list[float]:
    """Geometric means over the first five layers, forward and in training."""
    return [statistics.geometric_mean(measured(each, op, name)[field] for each in LAYERS[:5]) for op in OPS]


def headline() -> str:
    """One number each for inference, training and whole models, and for layers on the other GPU."""
    forward, train, *queued = *mean_speedups(), *mean_speedups(field="queued_speedup")
    other, found = mean_speedups(OTHER_FILE), [*pairs()]
    gains = [theirs["ms"] / ours["ms"] for theirs, ours in found]
    names = [ours["config"] for _, ours in found]
    here, there = gpu_of(LAYER_FILE), gpu_of(OTHER_FILE)
    version = everything.named(RESULTS / f"{OTHER_FILE}.json", "twell")
    return (
        f"Speed-ups on an {here} over the faster of eager and compiled dense PyTorch:\n\n"
        f"- Layers with 14 to 33 non-zeros of 5,632 per token: **{forward:.1f}x forward and {train:.1f}x in training** "
        f"in CUDA graphs; {queued[0]:.1f}x and {queued[1]:.1f}x in eager calls, queued (geometric means of five)\n"
        f"- Models of {names[0]} to {names[-1]} with random weights and such sparsity, without graphs: "
        f"**{min(gains):.1f}x to {max(gains):.1f}x**\n"
        f"- [Layers on an {there}](docs/install.md#on-an-{there.lower()}), version {version}: "
        f"{other[0]:.1f}x forward and {other[1]:.1f}x in training"
    )


def layers_elsewhere() -> str:
    said = []
    for op, mean in zip(OPS, mean_speedups(OTHER_FILE), strict=True):
        gains = [measured(name, op, OTHER_FILE)["speedup_dense"] for name in LAYERS]
        said.append(f"{OPS[op]} {span(gains)}, {mean:.2f} in the geometric mean of the first five")
    return f'Speed-ups by "auto": {"; ".join(said)}. {machine(result(OTHER_FILE))}'


def memory() -> str:
    """Memory kept for backward and peaks of a layer with 29 non-zeros; they hardly depend on this number."""
    cells = []
    for said, kind in (("dense, eager", "dense eager "), ("dense, compiled", "dense compiled "), ('twell, "{}"', "")):
        step, inference = measured("topic29", f"{kind}train"), measured("topic29", kind.strip() or "ffn")
        sizes = step["kept_bytes"], step["peak_bytes"], inference["peak_bytes"]
        cells.append([said.format(step["strategy"]), *(f"{size / 16384 / 1e3:.1f}" for size in sizes)])
    header = ["KB per token", "kept for backward", "peak of a training step", "peak of a forward pass"]
    return markdown(header, "lrrr", cells)


def large_layer() -> str:
    """A larger layer by "auto" beside dense, in graphs and in eager calls."""
    cells = {}
    for row in good("large_layer"):
        if row["requested"] == "auto" and row["variant"] in OPS:
            eagerly = [f"{row[way]:.2f}" for way in ("queued_speedup", "waited_speedup")]
            cells[f"`{row['workload']}`", OPS[row["variant"]]] = ", ".join([both(row), *eagerly])
    return pivot("dense / twell, ms", cells) + where("large_layer")


def few_tokens() -> str:
    """The least and the most that layers by "auto" gain on few tokens."""
    rows = [row for row in good("few") if (row["variant"], row["requested"]) == ("ffn", "auto")]
    found = by_case(rows, "tokens", each="workload")
    gains = [f"{span([row['speedup_dense'] for row in of.values()])} with {m:,} tokens" for (m,), of in found.items()]
    return f"{', '.join(gains)}.{where('few')}"


def few_by_share() -> str:
    """Layers by "auto" on few tokens, by the share of neurons that fire."""
    cells = {}
    for row in result("decode")["rows"]:
        if row["share"] in (0.01, 0.14, 1):
            layer = f"{row['k']:,} / {row['n']:,}{', gate' if row['gated'] else ''}, {row['share']:.0%}"
            before, after = row["us"]["dense"], row["us"]["auto"]
            cells[layer, str(row["m"])] = f"{after:.0f}, {bold(before / after)}"
    return pivot("us, speed-up", cells) + where("decode")


def overfull() -> str:
    """What steps of the sparse path take with more non-zeros than fit."""
    rows = [row for row in good("overfull") if row["requested"] == "union" and row["speedup_dense"] < 1]
    counts, times = ([f"{row['nnz']:.0f}" for row in rows], [f"{1 / row['speedup_dense']:.2f}" for row in rows])
    return (
        f"Training steps with {' and '.join(counts)} non-zeros per token take {' and '.join(times)} times as long as "
        f"eager dense ones.{where('overfull')}"
    )


def screen() -> str:
    """The time of "union+screen" over that of "union", and which "auto" takes."""
    said = []
    found = by_case(good("screen"), "workload", "variant", each="requested")
    for workload in (name for name in LAYERS if (name, "ffn") in found):
        own = [found[workload, op] for op in OPS]
        ratios = " and ".join(f"{of[SCREENED]['ms'] / of['union']['ms']:.2f}" for of in own)
        taken = all(of["auto"]["strategy"] == SCREENED for of in own)
        said.append(f"`{workload}` {ratios}{'' if taken else ' (not taken)'}")
    return f"{', '.join(said)}.{where('screen')}"


def host_times() -> str:
    """Eager calls: their host time, and few tokens by "auto"."""
    rows, cells = [row for row in result("host")["rows"] if not row.get("red")], dict[tuple[str, str], str]()
    for row in rows:
        if row["part"] == "host" and row["layer"] in ("dense", "auto", "function"):
            more = [bold(row["host_over_dense"])] if row["host_over_dense"] else []
            more += [row["chosen"]] if row["chosen"] else []
            cells[row["layer"], f"{row['what']}, {row['m']:,} tokens"] = ", ".join([f"{row['host_us']:,.0f}", *more])
    few = [row for row in rows if row["part"] == "few" and row["layer"] == "auto"]
    times = {"queued": "queued_over_dense", "waited for": "waited_over_dense"}
    shown, said = {}, list[str]()
    for row in few:
        if (row["k"], row["n"]) in HOST_LAYERS and row["m"] in HOST_TOKENS:
            name = f"{row['k']:,} / {row['n']:,}{'' if row['gated'] else ', no gate'}"
            shown[name, f"{row['m']:,}"] = " / ".join(f"{row[time]:.2f}" for time in times.values())
    for way, time in times.items():
        each = [row[time] for row in few]
        said.append(f"{sum(value > SLOWER for value in each)} {way}, at most {max(each) - 1:+.1%}")
    return (
        f"What an eager call costs the host, in microseconds and over dense's:\n\n{pivot('', cells)}\n\n"
        'Forward, the time of an eager call by "auto" over dense\'s, queued / waited for, by number of tokens:\n\n'
        f"{pivot('K / N', shown)}\n\n"
        f"Of {len(few)} points these take over {SLOWER:g} of dense's time: {'; '.join(said)}.{where('host')}"
    )


def auto_losses() -> str:
    """What "auto" loses at the points outside of its table."""
    found, parts = result("held_out"), []
    losses = [row["loss"] for row in found["rows"]]
    for kind, training in (("forward", False), ("training", True)):
        own = [row["loss"] for row in found["rows"] if row["training"] == training]
        parts.append(f"{100 * statistics.mean(own):.2f} % over {len(own)} {kind} points")
    graphs = [(row["loss"], row["graph_loss"]) for row in found["rows"] if "graph_loss" in row]
    known, unknown = (100 * statistics.mean(own) for own in zip(*graphs))
    return (
        f'On {len(losses)} points "auto" loses {100 * statistics.mean(losses):.2f} % in the mean: '
        f"{' and '.join(parts)}; more than 6 % at {sum(loss > 0.06 for loss in losses)}, at most "
        f"{100 * max(losses):.1f} %. Graphs of 16 to 512 tokens lose {known:.1f} % at {len(graphs)} of the forward "
        f"points, and {unknown:.1f} % where they are captured before any figure. {machine(found)}"
    )


def shapes() -> str:
    """Times of the best strategy over dense by layer, pattern and tokens."""
    best: dict[tuple[Any, ...], str] = {}
    for row in result("tuning")["rows"]:
        if row["gated"] and not row["training"] and not row.get("float8"):
            times = {route: ms / row["dense_ms"] for route, ms in fitting.ms_of(row).items() if route != "dense"}
            time, strategy = min((time, route.rpartition("+")[2][0]) for route, time in times.items())
            case = row["k"], row["n"], row["pattern"], row["m"]
            best[case] = f"{time:.2f} {strategy}" if time < 1 else f"{time:.2f}"
    tokens, rows = (64, 256, 1024, 4096, 12288), []
    for k, n in ((1024, 2816), (2048, 5632), (4096, 14336)):
        for pattern in ("topic", "uniform", "denser"):
            rows.append([f"{k:,} / {n:,}", pattern, *(best.get((k, n, pattern, m), "") for m in tokens)])
    table = markdown(["K / N", "pattern", *(f"M = {m:,}" for m in tokens)], "ll" + "r" * len(tokens), rows)
    return f"{table}\n\n{machine(result('tuning'))}"


def configurations() -> list[dict[str, Any]]:
    """Results of the models of the paper's sizes. LookupError if two files have the same row."""
    found = [result(path.stem) for path in sorted(RESULTS.glob("paper_configs*.json"))]
    counts = Counter((row["config"], row["op"], row["variant"]) for run in found for row in run["rows"])
    if twice := [" ".join(key) for key, count in counts.items() if count > 1]:
        raise LookupError(f"expected one row of each model, got more of {', '.join(twice)}")
    return found


def pairs() -> Iterator[tuple[Row, Row]]:
    """The faster dense and the faster sparse row of each model and operation, sorted by these."""
    rows = [row for run in configurations() for row in run["rows"] if row["ms"] and not row["red"]]
    order = list(dict.fromkeys(row["config"] for row in rows))
    rows.sort(key=lambda row: (order.index(row["config"]), list(PASSES).index(row["op"])))
    for own in by_case(rows, "config", "op").values():
        sides = [[row for name, row in own.items() if name.startswith(what)] for what in ("dense", "sparse")]
        if all(sides):
            theirs, ours = (min(found, key=lambda row: float(row["ms"])) for found in sides)
            yield theirs, ours


def models() -> str:
    """The faster dense and sparse variants of models of the paper's sizes, without LM head."""
    counts = {each["config"]: statistics.fmean(each["non_zeros"]) for run in configurations() for each in run["models"]}
    rows = []
    for theirs, ours in pairs():
        if ours["op"] == "logits":
            continue
        cells = [f"{ours['config']} ({counts[ours['config']]:.0f})", PASSES[ours["op"]]]
        cells += [f"{theirs['ms']:.0f} / {ours['ms']:.0f}", bold(theirs["ms"] / ours["ms"])]
        for key, scale, form in (("mj_per_token", 1, ".2f"), ("peak_bytes", 1e9, ".1f")):
            # energy is not always measured
            values = [row[key] / scale for row in (theirs, ours) if row.get(key)]
            cells.append(" / ".join(f"{value:{form}}" for value in values))
        rows.append(cells)
    header = ["model (non-zeros)", "pass", "ms: dense / twell", "speed-up", "mJ per token", "peak GB"]
    others = dict.fromkeys(where(path.stem) for path in sorted(RESULTS.glob("paper_configs*.json")))
    return markdown(header, "llrrrr", rows) + "".join(others)


def several_gpus() -> str:
    """Training steps of a model on two and on four GPUs: the faster dense and sparse variants."""
    cells = {}
    for count in (2, 4):
        for (mode,), own in by_case(good(f"parallel{count}"), "mode").items():
            said = {"ddp": "DDP", "fsdp": "FSDP2", "tp": "tensor parallelism"}[mode]
            for kind in ("compiled", "eager"):
                dense, ours = (own[f"{side} {kind}"]["ms"] for side in ("dense", "sparse"))
                cells[said, f"{count} GPUs, {kind}"] = f"{dense:.0f} / {ours:.0f}, {bold(dense / ours)}"
    return f"{pivot('ms: dense / twell', cells)}\n\n{machine(result('parallel2'))}"
