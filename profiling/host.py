"""Time eager calls of a layer as users make them, beside three nn.Linear with ReLU and product, and beside CUDA graphs.

    python -m profiling.host --out profiling/results/host.json    # on a GPU, four minutes

Three parts, each with its rows and its table; ``profiling.bench.protocol`` has the ways of timing:

host    what a call costs the host, of few tokens, so that nothing waits for the GPU
replay  at 16,384 tokens of each workload an eager call among many in a row, beside replays of its CUDA graph, which are
        also in a row, and an eager call that is waited for
few     at 1 to 1,024 tokens the forward pass of "auto" beside dense, in the layers of the shipped table of "auto"

"forward" needs no gradient; "step" is forward, backward and the gradients set to None again, of the tokens and of all
weights; "step, one thread" is the same with the backward pass in the calling thread
(``torch.autograd.set_multithreading_enabled(False)``). Layers are bfloat16 modules with down weights by rows. All
variants of a row of a table take turns, and a ratio is the median of those of each turn, since hosts wander.
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twell
from profiling.bench.layers import module_of
from profiling.bench.protocol import Device, Gpu
from profiling.bench.report import Progress, Run, require_writable
from profiling.bench.workloads import Source, parse
from profiling.draw.common import markdown
from twell import testing
from twell.commands import tune
from twell.commands.request import exit_status, number_above, pick_device
from twell.commands.timing import FAILURES, Call, Recording, measure, reason
from twell.nn import SparseFFN, SparseGatedMLP, explain

COMMAND = "profiling.host"
FORWARD, STEP, ONE_THREAD = "forward", "step", "step, one thread"
STRATEGIES = {FORWARD: ("auto", "row", "union"), STEP: ("auto", "union"), ONE_THREAD: ("auto", "union")}

# The layer of parts "host" and "replay", the pattern of "host", its calls and their tokens, and the tokens of "replay".
HIDDEN, NEURONS, WORKLOAD = testing.PAPER_HIDDEN, testing.PAPER_NEURONS, "topic29"
HOST_CALLS = ((FORWARD, 16), (FORWARD, 2048), (ONE_THREAD, 2048), (STEP, 2048))
MANY = 16384
# The layers of part "few" and their tokens, by gated or not, the most tokens, and the pattern.
LAYERS = {
    True: (tune.SHAPES, (1, 3, 8, 16, 32, 33, 64, 96, 128, 192, 256, 384, 512, 768, 1024)),
    False: (((2048, 5632), (4096, 11008)), (1, 8, 16, 32, 33, 64, 128, 256, 512, 1024)),
}
FEW, PATTERN = 1024, "topic"
# By part, calls in a row for each way of timing. Those of the host are few: the longest step has two dozen launches,
# and the GPU's queue takes a thousand.
CALLS = {
    "host": {"host": 20},
    "replay": {"queued": 16, "replay": 16, "waited": 2},
    "few": {"queued": 48, "waited": 8},
}
# By way of timing, the field of a row, and what makes its unit from milliseconds.
FIELDS = {
    "host": ("host_us", 1e3),
    "queued": ("queued_ms", 1),
    "replay": ("replay_queued_ms", 1),
    "waited": ("waited_ms", 1),
}
# More than this of dense's time is slower.
SLOWER = 1.02
# Calls before timing: past the first measurements of "auto", which take each 64th call from there on.
SETTLING = 72


@dataclasses.dataclass
class Row:
    """One layer in one kind of call; times are medians, None where they were not measured.

    ``layer``: "dense" or a strategy. ``chosen``: what "auto" ran. ``*_over_dense``: the time over dense's.
    ``queued_over_replay``: that of eager calls in a row over that of replays in a row.
    """

    part: str
    what: str
    workload: str
    layer: str
    m: int
    k: int
    n: int
    gated: bool = True
    chosen: str = ""
    host_us: float | None = None
    queued_ms: float | None = None
    waited_ms: float | None = None
    replay_queued_ms: float | None = None
    host_over_dense: float | None = None
    queued_over_dense: float | None = None
    waited_over_dense: float | None = None
    queued_over_replay: float | None = None
    red: str = ""


class Dense(nn.Module):
    """The layer as models write it, with a gate or without."""

    def __init__(self, like: SparseFFN) -> None:
        super().__init__()
        self.gate_proj = copied(like.gate_proj) if isinstance(like, SparseGatedMLP) else None
        self.up_proj, self.down_proj = copied(like.up_proj), copied(like.down_proj)

    def forward(self, x: Tensor) -> Any:
        if self.gate_proj is None:
            return self.down_proj(F.relu(self.up_proj(x)))
        return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))


class Function(nn.Module):
    """The function of a layer on its weights, with a site of its own."""

    def __init__(self, like: SparseFFN) -> None:
        super().__init__()
        self.weights = nn.ParameterList([child.weight for child in like.children()])
        self.function: Any = twell.sparse_gated_ffn if isinstance(like, SparseGatedMLP) else twell.sparse_ffn
        self.site = twell.AutoStrategy()

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.weights, strategy=self.site)


def copied(linear: nn.Linear) -> nn.Linear:
    """The same with a contiguous weight."""
    copy = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    copy.weight = nn.Parameter(linear.weight.detach().clone(memory_format=torch.contiguous_format))
    return copy


def call_of(what: str, layer: nn.Module, x: Tensor) -> Call:
    """A call of ``layer`` without gradients, or a training step."""
    if what == FORWARD:
        layer.requires_grad_(False)
        return lambda i: (layer(x),)
    leaf, dy, parameters = x.detach().clone().requires_grad_(), torch.randn_like(x), list(layer.parameters())

    def step(i: int) -> tuple[Tensor, ...]:
        layer(leaf).backward(dy)
        leaf.grad = None
        for parameter in parameters:
            parameter.grad = None
        return ()

    return step


def chosen(layer: nn.Module | twell.AutoStrategy) -> str:
    """What "auto" runs now in eager calls; "" for other layers."""
    if isinstance(layer, Function):
        layer = layer.site
    elif not isinstance(layer, SparseFFN) or layer.strategy != "auto":
        return ""
    rows = [row.strategy for row in explain(layer) if not row.graph]
    # a site has chosen nothing on a CPU
    return next((name for name in rows if name != "auto"), "dense")


def recorded(device: Device, way: str, call: Call, count: int) -> Recording:
    """The call ``count`` times for one of ``FIELDS``."""
    if way != "replay":
        return device.eager(way, call, count)
    if device.torch_device.type != "cuda":
        return device.eager("queued", call, count)
    graph, outputs = testing.captured(lambda: call(0))

    def replay(i: int) -> tuple[Tensor, ...]:
        graph.replay()
        return outputs

    return device.eager("queued", replay, count)


def measured(
    device: Device, base: Row, layers: Mapping[str, nn.Module], x: Tensor, ways: Mapping[str, int], seconds: float
) -> list[Row]:
    """A row for each of the layers, which has "dense": all in turn in all ``ways``, which has calls in a row."""
    with torch.no_grad():
        right = layers["dense"](x)
        for name, layer in layers.items():
            if not (error := tune.relative_error(layer(x), right)) <= tune.MOST_ERROR[False]:
                raise RuntimeError(f"{name} differs from dense by {error:.1%}")
    with torch.autograd.set_multithreading_enabled(base.what != ONE_THREAD):
        calls = {name: call_of(base.what, layer, x) for name, layer in layers.items()}
        for call in calls.values():
            for _ in range(SETTLING):
                call(0)
                device.wait()
        recordings = {
            f"{way} {name}": recorded(device, way, call, count)
            for way, count in ways.items()
            for name, call in calls.items()
        }
        times = measure(recordings, seconds)
    rows = []
    for name, layer in layers.items():
        row = dataclasses.replace(base, layer=name, chosen=chosen(layer))
        for way in ways:
            field, unit = FIELDS[way]
            setattr(row, field, statistics.median(times[f"{way} {name}"]) * unit)
            if way != "replay" and name != "dense":
                setattr(row, f"{way}_over_dense", ratio(times[f"{way} {name}"], times[f"{way} dense"]))
        if "replay" in ways:
            row.queued_over_replay = ratio(times[f"queued {name}"], times[f"replay {name}"])
        rows.append(row)
    return rows


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over all turns."""
    return statistics.median(own / other for own, other in zip(times, others, strict=True))


def kinds(
    part: str, workloads: Sequence[Source], where: torch.device
) -> Iterator[tuple[Row, dict[str, nn.Module], Tensor]]:
    """The kinds of calls of a part: what their rows share, the layers and their tokens."""
    if part == "few":
        for gated, (shapes, tokens) in LAYERS.items():
            for k, n in shapes:
                problem = tune.draw(PATTERN, FEW, k, n, where)
                for m in (m for m in tokens if m <= FEW):
                    auto = module_of(problem, "auto", gated)
                    row = Row(part, FORWARD, PATTERN, "any", m, k, n, gated)
                    yield row, {"dense": Dense(auto), "auto": auto}, problem.x[:m]
        return
    calls = [(source, what, MANY) for source in workloads for what in (FORWARD, STEP)]
    if part == "host":
        calls = [(source, what, m) for source in parse([WORKLOAD]) for what, m in HOST_CALLS]
    for source, what, m in calls:
        problem = source.load(m, HIDDEN, NEURONS, device=where, dtype=torch.bfloat16)
        n, k = problem.w_gate.shape
        layers = {name: module_of(problem, name) for name in STRATEGIES[what]}
        own: dict[str, nn.Module] = {"dense": Dense(layers["auto"]), **layers}
        if part == "host":
            own["function"] = Function(module_of(problem, "auto"))
        yield Row(part, what, source.name, "any", m, k, n), own, problem.x


# Showing

# Columns: the field of a row, a factor, a format. The last is of files from before there were parts.
COLUMNS = (
    ("host, us", "host_us", 1, ",.0f"),
    ("queued, us", "queued_ms", 1e3, ",.0f"),
    ("over dense's", "queued_over_dense", 1, ".2f"),
    ("replays queued", "replay_queued_ms", 1e3, ",.0f"),
    ("queued over replays", "queued_over_replay", 1, ".3f"),
    ("waited for", "waited_ms", 1e3, ",.0f"),
    ("over dense's", "waited_over_dense", 1, ".2f"),
    ("replayed", "replay_ms", 1e3, ",.0f"),
)
CAPTIONS = {
    "host": "What an eager call costs the host, in microseconds and over dense's:",
    "replay": "Eager calls among many in a row (queued), replays of their CUDA graphs among many, and eager calls that "
    "are waited for:",
    "few": 'Forward, the time of an eager call by "auto" over dense\'s, queued / waited for, by number of tokens:',
}


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of a file as Markdown: a table for each part."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not row.get("red"):
            parts.setdefault(row.get("part", ""), []).append(row)
    shown = []
    for part, own in parts.items():
        if part in CAPTIONS:
            shown.append(CAPTIONS[part])
        shown.append({"host": host_table, "few": few_table}.get(part, table)(own))
    return "\n\n".join(shown)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each row; columns without data are left out."""
    columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    several = len({row.get("workload") for row in rows}) > 1
    lines = []
    for row in rows:
        layer = f"{row['layer']} ({row['chosen']})" if row["chosen"] else row["layer"]
        cells = ["" if row.get(field) is None else f"{row[field] * unit:{form}}" for _, field, unit, form in columns]
        lines.append([*([f"`{row['workload']}`"] if several else []), row["what"], f"{row['m']:,}", layer, *cells])
    header = [*(["workload"] if several else []), "", "tokens", "layer", *(column[0] for column in columns)]
    return markdown(header, "l" * several + "lrl" + "r" * len(columns), lines)


def pivot(corner: str, cells: Mapping[tuple[str, str], str]) -> str:
    """A table of cells by line and column."""
    lines, columns = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    rows = [[line, *(cells.get((line, column), "") for column in columns)] for line in lines]
    return markdown([corner, *columns], "l" + "r" * len(columns), rows)


def host_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each layer, a column for each kind of call."""
    cells = {}
    for row in rows:
        more = [f"**{row['host_over_dense']:.2f}**"] if row["host_over_dense"] else []
        more += [row["chosen"]] if row["chosen"] else []
        cells[row["layer"], f"{row['what']}, {row['m']:,} tokens"] = ", ".join([f"{row['host_us']:,.0f}", *more])
    return pivot("", cells)


def few_table(rows: Sequence[dict[str, Any]], shown: Callable[[dict[str, Any]], bool] = lambda row: True) -> str:
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


# The command


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = top.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="file for the data")
    add("--parts", nargs="+", choices=tuple(CALLS), default=tuple(CALLS), help="default: all")
    add("--workload", nargs="+", metavar="W", help="of part replay, as in profiling.bench (default: all by name)")
    seconds = "time per kind of call, all variants; of few tokens a sixth of it (%(default)s)"
    add("--seconds", type=number_above(0), default=3.0, metavar="S", help=seconds)
    add(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cuda, or cpu, whose times mean nothing (%(default)s)"
    )
    return top


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Return 0, 1 if a kind of call failed, 2 if the file could not be written, 130 for Ctrl-C."""
    where = pick_device(arguments.device)
    require_writable(arguments.out)
    device: Device = Device() if where.type == "cpu" else Gpu(where)
    sources = parse(arguments.workload)
    # read after the first measurement, when the clocks are up
    machine = functools.cache(lambda: testing.machine_line(where))
    given = {"seconds": arguments.seconds, "parts": list(arguments.parts)}
    this = Run(COMMAND, arguments.out, lambda: {"machine": machine(), "arguments": given})
    progress = Progress(COMMAND)

    def work() -> None:
        for part in arguments.parts:
            seconds = arguments.seconds / (6 if part == "few" else 1)
            for base, layers, x in kinds(part, sources, where):
                progress.step(f"{part}: {base.what}, {base.workload}, {base.m} x {base.k} x {base.n}")
                try:
                    this.add(measured(device, base, layers, x, CALLS[part], seconds))
                except FAILURES as error:
                    this.add([dataclasses.replace(base, red=reason(error))])

    this.measure(work)
    print(tables([dataclasses.asdict(row) for row in this.rows]))
    for row in this.rows:
        if row.red:
            print(f"RED {row.part}: {row.what}, {row.workload}, {row.m} x {row.k} x {row.n}: {row.red}")
    print(f"\n{machine()}")
    return this.status()


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(COMMAND, lambda: run(parser().parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
