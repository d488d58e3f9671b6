"""``twell tune``: the cost of each strategy against dense on this GPU, as a table that "auto" then uses.

A problem is a synthetic layer (``PATTERNS``) with a number of tokens. Rotated copies of the weights exceed the L2
cache. The sparse strategies are checked against "dense", captured in CUDA graphs and replayed in turn with it; a time
is a median. "dense" is captured once per layer and number of tokens, since its time does not depend on the pattern, and
replayed with each pattern, since clocks drift. A strategy that takes several times as long has few replays.

For each layer, number of tokens and strategy the relative time is fitted by base + a * union + b * density + c *
heaviest, none negative: least squares of relative errors, with less weight on slow times (``WEIGHT_POWER``). The
factors are the shares of neurons that a tile of 128 tokens, a token and a token of the heaviest group fire
(``twell.choose.rates.shares``); c is for few tokens (``costs.waits``). For the screen the last factor is the share of
candidates of a tile (``costs.factors``), which the screen counts.
"""

import argparse
import datetime
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import testing, tuning
from twell._runtime import cache, geometry, specs
from twell._runtime import device as driver
from twell.choose import rates
from twell.choose.rates import Figures, Problem
from twell.commands import timing
from twell.commands.request import RequestError, number_above, pick_device
from twell.ops import screened
from twell.testing import FFN, Workload

DESCRIPTION = """\
Measure what each strategy costs on this GPU, and write a table from which "auto" then chooses on GPUs of this model.
Without --shape it measures the layers of the shipped table, in three to five minutes on an H200; with it the named
ones, which join those measured before. If --budget-s is too short, some layers are left out: the last line then says
"incomplete", and the exit status is 1.
"""

Shape = tuple[int, int]

SHAPES: tuple[Shape, ...] = (
    *((2048, 5632), (1024, 2816), (4096, 11008), (5120, 13824)),
    *((896, 4864), (1536, 8960), (3072, 9216), (4096, 14336)),
)
# By kind of call: layers and numbers of tokens. Kernels change between 32 and 33 tokens; the time of each strategy,
# "dense" too, has steps in between. More than the most tokens cost as they do: with 131,072 tokens the first layer
# takes within 9 % of the relative times at 16,384.
_FEW, _SOME = (1, 3, 8, 16, 32), (33, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_MANY = (1025, 1536, 2048, 4096, 12288)
KINDS: dict[str, tuple[tuple[Shape, ...], tuple[int, ...]]] = {
    "gated": (SHAPES, (*_FEW, *_SOME, *_MANY)),
    "training": (SHAPES[:3], (256, 512, 1024, 2048, 4096, 12288)),
    "non-gated": (SHAPES[:3:2], (1, 8, 16, 32, 33, 64, 128, 256, 512, 1024, 2048, 4096, 12288)),
    "non-gated training": (SHAPES[:1], (256, 1024, 4096, 12288)),
}

# Fields of a problem that vary; down weights are stored by rows.
SIZES = ("m", "k", "n", "gated", "training")

_UNEVEN: dict[str, Any] = {"neuron_sigma": 1.0, "token_sigma": 0.5}
# few tokens have many times the mean
_HEAVY = {**_UNEVEN, "token_sigma": 1.0}
# non-zeros as a share of the neurons, and their unevenness
PATTERNS: dict[str, tuple[float, dict[str, Any]]] = {
    "topic": (1 / 190, {**_UNEVEN, "dead": 0.3, "rho": 0.5}),
    "uniform": (1 / 190, {}),
    "heavy": (1 / 190, {**_HEAVY, "dead": 0.3}),
    "sparsest": (1 / 1400, {**_UNEVEN, "dead": 0.5, "rho": 0.5}),
    "heavy topic": (1 / 500, {**_HEAVY, "dead": 0.3, "rho": 0.5}),
    "denser": (1 / 60, {}),
    "wide topic": (1 / 44, {**_UNEVEN, "dead": 0.2, "rho": 0.5}),
    "wide": (1 / 19, {**_UNEVEN, "dead": 0.1, "rho": 0.3}),
    "dense": (1 / 6, {"neuron_sigma": 0.5, "token_sigma": 0.3}),
    "tenth": (1 / 10, {"neuron_sigma": 0.7, "token_sigma": 0.5}),
}
# of which tables have no times
ASIDE = "tenth"
# where nearly all neurons fire, sparse strategies lose with more tokens, and are slow to measure
MOST_TOKENS_OF_DENSE = 64

# The screen is measured from this many tokens on. It saves at most half of the gate GEMM, and copies w_gate in int8 at
# each call: with fewer tokens the one is no more than the other.
LEAST_SCREENED = 1024

# The largest difference from dense in the Frobenius norm. bf16 rounds to 0.2 %, and gates next to zero may fall on
# either side; gradients have more roundings.
MOST_ERROR = {False: 0.02, True: 0.05}

# Seconds that measure the layers of the shipped table on a slow GPU. An estimate: an H200 takes three to five minutes.
LONG_S = 3600.0

# A strategy that takes this many times as long as the fastest is not replayed again.
SLOW = 4.0
LEAST_ROUNDS = 6

# Exponent of the weight of a relative error, the fastest time of the problem over its own time. The time of a strategy
# that is many times slower need not be exact, and times are not quite linear.
WEIGHT_POWER = 2


# Measuring


def draw(pattern: str, m: int, k: int, n: int, device: torch.device) -> FFN:
    """A layer with the pattern, and enough tokens to set its threshold."""
    share, unevenness = PATTERNS[pattern]
    return draw_workload(Workload(share * n, **unevenness), m, k, n, device)


def draw_workload(workload: Workload, m: int, k: int, n: int, device: torch.device, seed: int = 0) -> FFN:
    """A layer of the workload, and enough tokens to set its threshold."""
    testing.WORKLOADS["tune"] = workload
    try:
        return testing.make("tune", max(m, 4096), k, n, seed=seed, device=device)
    finally:
        del testing.WORKLOADS["tune"]


def figures_of(problem: FFN, screen: bool = False) -> Figures:
    """The figures of a layer, from its gates; with ``screen`` its candidates, too."""
    nonzeros, union, heaviest = 0, 0, 0
    m, n = problem.x.shape[0], problem.w_gate.shape[0]
    whole = m // geometry.TOKEN_TILE * geometry.TOKEN_TILE
    for start in range(0, m, 16384):
        stop = min(m, start + 16384)
        active = F.relu(F.linear(problem.x[start:stop], problem.w_gate)) != 0
        counts = F.pad(active.sum(1), (0, -len(active) % rates.HEAVY_GROUP)).view(-1, rates.HEAVY_GROUP).sum(1)
        nonzeros, heaviest = nonzeros + int(counts.sum()), max(heaviest, int(counts.max()))
        tiles = active[: max(min(whole, stop) - start, 0)]
        if len(tiles):
            union += int(tiles.view(-1, geometry.TOKEN_TILE, n).any(1).sum())
    share = union * geometry.TOKEN_TILE / (whole * n) if whole else None
    listed = screened.count(problem.x[:whole], problem.w_gate, None) if screen and whole else None
    candidates = None if listed is None else int(listed.sum()) * geometry.TOKEN_TILE / (whole * n)
    return Figures(nonzeros / m, share, heaviest / min(m, rates.HEAVY_GROUP), candidates)


def extremes_of(problem: FFN) -> dict[str, float]:
    """What a model of cost may need beside the figures.

    longest: the non-zeros of the token that has the most. unions: the mean share of the neurons that a tile of 128
    tokens fires, or the fewer tokens of the last one.
    """
    longest, fired, tiles, n = 0, 0, 0, len(problem.w_gate)
    for x in torch.split(problem.x, 16384):
        active = F.relu(F.linear(x, problem.w_gate)) != 0
        longest = max(longest, int(active.sum(1).max()))
        for tile in torch.split(active, geometry.TOKEN_TILE):
            fired, tiles = fired + int(tile.any(0).sum()), tiles + 1
    return {"longest": longest, "unions": fired / max(tiles * n, 1)}


class Layer:
    """Copies of a problem, larger than the L2 cache together, with its strategies as calls on one copy."""

    def __init__(self, problem: FFN, gated: bool, training: bool, device: timing.Device) -> None:
        self.gated, self.training, self.device = gated, training, device
        m = problem.x.shape[0]
        # with few tokens a sparse call reads little except for the gate weight
        few = m <= 1024 and not training
        read = [problem.w_gate] if few else list(problem.present(gated).values())
        copies = device.copies_for(sum(t.numel() * t.element_size() for t in read))
        self.problems = [problem, *(problem.map(torch.clone) for _ in range(copies - 1))]
        if training:
            upstream = testing.real_upstream(problem)
            self.dy = [upstream, *(upstream.clone() for _ in range(copies - 1))]
        # with few tokens at least so many calls, so that the launch of the graph does not count
        least = (24 if m <= 64 else 4) if few else 1
        self.calls = copies * -(-least // copies)

    def call(self, strategy: str) -> timing.Call:
        def infer(i: int) -> tuple[Tensor, ...]:
            problem = self.problems[i % len(self.problems)]
            with torch.no_grad():
                return (testing.sparse_output(problem, gated=self.gated, strategy=strategy),)

        def train(i: int) -> tuple[Tensor, ...]:
            i %= len(self.problems)
            with torch.enable_grad():
                leaves = self.problems[i].map(lambda t: t.detach().requires_grad_())
                y = testing.sparse_output(leaves, gated=self.gated, strategy=strategy)
                gradients = torch.autograd.grad(y, tuple(leaves.present(self.gated).values()), self.dy[i])
            return (y.detach(), *gradients)

        return train if self.training else infer

    def record(self, strategy: str) -> timing.Recording:
        return self.device.record(self.call(strategy), self.calls)

    def check(self, strategies: Iterable[str]) -> tuple[dict[str, float], dict[str, str]]:
        """Errors against dense by strategy, and reasons for strategies that are wrong."""
        errors: dict[str, float] = {}
        red: dict[str, str] = {}
        right = self.call("dense")(0)
        for name in strategies:
            try:
                errors[name] = max(map(relative_error, self.call(name)(0), right))
                if not errors[name] <= MOST_ERROR[self.training]:
                    red[name] = f"differs from dense by {errors[name]:.1%}"
            except (RuntimeError, NotImplementedError) as error:
                red[name] = timing.reason(error)
        return errors, red


def sparse_strategies(training: bool) -> tuple[str, ...]:
    """The sparse strategies that differ."""
    return ("union", rates.SCREENED) if training else ("row", "union", rates.SCREENED)


def measured_strategies(problem: Problem, device: timing.Device) -> tuple[str, ...]:
    """Those that are measured on a device: the screen where it has the kernels, and of many tokens."""
    on = device.torch_device
    screens = on.type != "cuda" or tuning.family(on.index or 0) == specs.SM90
    return tuple(
        name
        for name in sparse_strategies(problem.training)
        if name != rates.SCREENED or (screens and problem.m >= LEAST_SCREENED)
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))


def times_of(recordings: dict[str, timing.Recording], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of one call by strategy; a slow strategy has few samples."""
    times = timing.measure(recordings, 0, least=1)
    fastest = min(map(min, times.values()))
    near = {name: each for name, each in recordings.items() if name == "dense" or min(times[name]) <= SLOW * fastest}
    return times | timing.measure(near, seconds, LEAST_ROUNDS)


class Step(NamedTuple):
    """A layer and a number of tokens, measured with each of ``patterns``."""

    k: int
    n: int
    kind: str
    m: int
    patterns: tuple[str, ...]

    @property
    def problem(self) -> Problem:
        return Problem(self.m, self.k, self.n, "non-gated" not in self.kind, "training" in self.kind)

    def __str__(self) -> str:
        return f"{self.k:5} x {self.n:5} {self.kind:18} M = {self.m:6}"


def plan(
    shapes: Sequence[Shape] | None = None,
    kinds: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    patterns: Sequence[str] | None = None,
    table: tables.Table | None = None,
) -> list[Step]:
    """All steps, layer by layer. ``shapes`` and ``tokens`` replace those of each kind of call.

    Calls in one pass, on the GPU of ``table``, need no times.
    """
    steps = []
    for k, n in shapes or SHAPES:
        for kind in kinds or KINDS:
            own, counts = KINDS[kind]
            if shapes is None and (k, n) not in own:
                continue
            if tokens is not None:
                counts = tuple(tokens)
            for m in counts:
                most = MOST_TOKENS_OF_DENSE if "training" not in kind else 0
                named = patterns or [pattern for pattern in PATTERNS if pattern != ASIDE]
                chosen = tuple(pattern for pattern in named if pattern != "dense" or m <= most)
                step = Step(k, n, kind, m, chosen)
                if chosen and not rates.in_one_pass(step.problem, table):
                    steps.append(step)
    return steps


def measure(
    steps: Sequence[Step], device: timing.Device, *, budget_s: float, seconds: float = 0.05
) -> Iterator[list[dict[str, Any]]]:
    """Measure step by step, print a line for each and yield its rows; begin none after ``budget_s`` seconds.

    ``seconds`` is the GPU time for the samples of one problem.
    """
    started, done = time.monotonic(), 0
    for (k, n), of_layer in itertools.groupby(steps, key=lambda step: step[:2]):
        layer_steps = list(of_layer)
        drawn: dict[str, FFN] = {}
        for step in layer_steps:
            if time.monotonic() - started > budget_s:
                print(f"out of time before {step}")
                return
            for pattern in step.patterns:
                if pattern not in drawn:
                    most = max(each.m for each in layer_steps if pattern in each.patterns)
                    drawn[pattern] = draw(pattern, most, k, n, device.torch_device)
            problems = {pattern: drawn[pattern].rows(0, step.m) for pattern in step.patterns}
            rows = measure_step(step, problems, device, seconds)
            done += 1
            print(
                f"{time.monotonic() - started:4.0f} s  {done:3} of {len(steps)}  {step}  {_summary(rows)}", flush=True
            )
            yield rows


def measure_step(step: Step, problems: dict[str, FFN], device: timing.Device, seconds: float) -> list[dict[str, Any]]:
    """The rows of a step: one per pattern and sparse strategy."""
    rows, problem = [], step.problem
    # its recording reads the memory of the layer that it was made of
    first: Layer | None = None
    dense: timing.Recording | None = None
    for pattern, drawn in problems.items():
        strategies = measured_strategies(problem, device)
        figures = figures_of(drawn, rates.SCREENED in strategies)
        more = extremes_of(drawn)
        if problem.training and figures.nonzeros * step.m > geometry.hybrid_capacity(step.m, step.n):
            continue
        layer = Layer(drawn, problem.gated, problem.training, device)
        errors, red = layer.check(strategies)
        if first is None or dense is None:
            first, dense = layer, layer.record("dense")
        recordings = {name: layer.record(name) for name in errors if name not in red}
        times = times_of({**recordings, "dense": dense}, seconds)
        rows += [row | more for row in rows_of(problem, pattern, figures, times, errors, red)]
    return rows


def rows_of(
    problem: Problem,
    pattern: str,
    figures: Figures,
    times: dict[str, list[float]],
    errors: dict[str, float],
    red: dict[str, str],
) -> list[dict[str, Any]]:
    """One row per sparse strategy: its time over that of dense."""
    dense_ms = statistics.median(times["dense"])
    rows = []
    for name in (name for name in sparse_strategies(problem.training) if name in times or name in red):
        row = {**dict(zip(SIZES, problem)), "pattern": pattern, **figures._asdict(), "strategy": name}
        row |= {"red": red.get(name, ""), "error": errors.get(name), "dense_ms": dense_ms}
        if name in times:
            ms, _, p10, p90 = timing.spread(times[name])
            row |= {"ms": ms, "relative": ms / dense_ms, "p10_ms": p10, "p90_ms": p90, "samples": len(times[name])}
        rows.append(row)
    return rows


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    """The range of each strategy's relative times, or the first failure."""
    if failed := next((row for row in rows if row["red"]), None):
        return f"RED {failed['pattern']} {failed['strategy']} {failed['red']}"
    ranges = []
    for name in dict.fromkeys(row["strategy"] for row in rows):
        relative = [row["relative"] for row in rows if row["strategy"] == name]
        ranges.append(f"{name} {min(relative):.2f} to {max(relative):.2f}")
    return ", ".join(ranges) + " of dense" if ranges else "no pattern fits"


# Fitting


def non_negative_least_squares(matrix: Tensor, target: Tensor) -> Tensor:
    """The x >= 0 with the least |matrix @ x - target|, by every set of columns; ties take the smaller set."""
    columns = matrix.shape[1]
    best, least = torch.zeros_like(matrix[0]), float(target @ target)
    for count in range(1, columns + 1):
        for chosen in map(list, itertools.combinations(range(columns), count)):
            solution = torch.linalg.lstsq(matrix[:, chosen], target[:, None]).solution[:, 0]
            if bool((solution < 0).any()):
                continue
            left = matrix[:, chosen] @ solution - target
            if float(left @ left) < least * (1 - 1e-9) - 1e-15:
                best, least = torch.zeros_like(matrix[0]), float(left @ left)
                best[chosen] = solution
    return best


def usable(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The timed rows; the last one for each problem and strategy."""
    latest = {(place_of(row), row["strategy"]): row for row in rows if not row["red"]}
    for row in latest.values():
        sizes = [row[name] for name in ("m", "k", "n")]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"m, k and n must be positive integers, got {sizes}")
        if row["strategy"] not in sparse_strategies(row["training"]):
            named = ", ".join(sparse_strategies(row["training"]))
            raise ValueError(f"strategy must be one of {named}, got {row['strategy']!r}")
        if row["strategy"] == rates.SCREENED and row.get("candidates") is None:
            raise ValueError(f"candidates of {rates.SCREENED} must be a share of the neurons, got none")
        if type(row["relative"]) is not float or not 0 < row["relative"] < math.inf:
            raise ValueError(f"relative must be a positive time over dense's, got {row['relative']!r}")
    return list(latest.values())


def fit(rows: Iterable[dict[str, Any]]) -> tables.Costs:
    """The table: coefficients for each layer, number of tokens and strategy.

    A strategy needs at least two rows; with fewer it is left out.
    """
    groups: dict[tuple[tables.Key, int, str], list[dict[str, Any]]] = {}
    fastest: dict[tuple[Any, ...], float] = {}
    for row in usable(rows):
        key = (row["training"], row["gated"], row["k"], row["n"])
        groups.setdefault((key, row["m"], row["strategy"]), []).append(row)
        fastest[place_of(row)] = min(fastest.get(place_of(row), 1.0), row["relative"])
    table: tables.Costs = {}
    for (key, m, strategy), group in sorted(groups.items(), key=lambda item: item[0]):
        if len(group) < 2:
            continue
        relative = _vector(row["relative"] for row in group)
        # for one token the shares are equal. Ties take the first column: density, because the coefficient of the union
        # would be far too large for a few more tokens
        columns = 4 if strategy == rates.SCREENED or costs.waits(problem_of(group[0])) else 3
        factors = (costs.factors(problem_of(row), measured_figures(row), strategy) for row in group)
        terms = torch.stack([_vector((one, density, union, last)[:columns]) for one, union, density, last in factors])
        weights = (_vector(fastest[place_of(row)] for row in group) / relative) ** WEIGHT_POWER
        solution = non_negative_least_squares(terms * (weights / relative)[:, None], weights)
        base, per_density, per_union, *last = (round(float(term), 4) for term in solution)
        table.setdefault(key, {}).setdefault(m, {})[strategy] = base, per_union, per_density, sum(last, 0.0)
    return table


def key_of(step: Step) -> tables.Key:
    """Where a table has the costs of a step."""
    return step.problem.training, step.problem.gated, step.k, step.n


def whole(costs: tables.Costs, steps: Sequence[Step]) -> tables.Costs:
    """The layers for which no number of tokens is missing: few tokens would stand in for many."""
    wanted: dict[tables.Key, set[int]] = {}
    for step in steps:
        wanted.setdefault(key_of(step), set()).add(step.m)
    for key in [key for key in costs if max(costs[key]) < max(wanted[key])]:
        print(f"left out {key[2]} x {key[3]}: measured up to {max(costs[key])} of {max(wanted[key])} tokens")
    return {key: by_tokens for key, by_tokens in costs.items() if max(by_tokens) >= max(wanted[key])}


def _vector(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device="cpu")


def problem_of(row: dict[str, Any]) -> Problem:
    return Problem(*(row[name] for name in SIZES))


def place_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Key of a problem, the same for all strategies."""
    return (*problem_of(row), row["pattern"])


def measured_figures(row: dict[str, Any]) -> Figures:
    """The figures of a row. Files of earlier versions have neither the heaviest tokens nor candidates."""
    return Figures(row["nonzeros"], row["union"], row.get("heaviest"), row.get("candidates"))


def report(table: tables.Costs, rows: Iterable[dict[str, Any]]) -> str:
    """The errors of the table's predictions, and the loss of its choices against the fastest strategy."""
    fitted = tables.Table(table, "", "")
    errors: list[tuple[float, str]] = []
    problems: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = {}
    for row in usable(rows):
        predicted = costs.costs(problem_of(row), measured_figures(row), fitted) if table else {}
        if row["strategy"] not in predicted:
            continue
        value = predicted[row["strategy"]]
        errors.append((value / row["relative"] - 1, f"{place_of(row)} {row['strategy']}"))
        entry = problems.setdefault(place_of(row), {"dense": (1.0, 1.0)})
        entry[row["strategy"]] = (value, row["relative"])
    if not errors:
        return "nothing to fit"
    lost = {place: min(e.values())[1] / min(ms for _, ms in e.values()) - 1 for place, e in problems.items()}
    worst_error, worst_row = max(errors, key=lambda each: abs(each[0]))
    worst_problem = max(lost, key=lambda place: lost[place])
    median = statistics.median(abs(error) for error, _ in errors)
    return (
        f"{len(errors)} times are predicted within {median:.1%} in the median; the worst is {worst_error:+.0%}: "
        f"{worst_row}\n{len(lost)} choices lose {statistics.mean(lost.values()):.1%} on average to the fastest "
        f"strategy; the worst loses {lost[worst_problem]:.0%}: {worst_problem}"
    )


# The command


def now() -> str:
    """The time as ISO 8601, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def shape(text: str) -> Shape:
    """An argparse type: KxN."""
    try:
        k, n = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected KxN, as in 4096x14336, got {text!r}") from None
    if min(k, n) < 8 or k % 8 or n % 8:
        raise argparse.ArgumentTypeError(f"expected multiples of 8, got {text!r}")
    return k, n


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    add = parser.add_argument
    add("--shape", nargs="+", type=shape, metavar="KxN", help="hidden sizes and neurons (default: the shipped table's)")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of calls (all)")
    add("--device", help="cuda or cuda:INDEX (default: cuda)")
    add(
        "--budget-s",
        type=number_above(0),
        metavar="S",
        default=450.0,
        help="begin no measurement after this many seconds (%(default)g)",
    )


def gpu(name: str | None) -> timing.Gpu:
    """The device to measure. Raises RequestError if sparse kernels do not run there."""
    if not torch.cuda.is_available():
        raise RequestError(f"tuning needs a GPU of compute capability {driver.SUPPORTED}, and this torch can use none")
    device = pick_device(name or "cuda")
    index = device.index or 0
    if device.type != "cuda" or driver.architecture(index) is None:
        raise RequestError(f"--device: expected a GPU of compute capability {driver.SUPPORTED}, got {device}")
    torch.cuda.set_device(index)
    return timing.Gpu(torch.device("cuda", index))


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the table. Return 1 if a strategy failed or a layer was not measured to the end."""
    return tune(arguments, gpu(arguments.device))


def tune(arguments: argparse.Namespace, device: timing.Device) -> int:
    """``run`` on a device."""
    try:
        folder = cache.open_folder(rates.FOLDER)
    except (OSError, cache.UnsafeCacheError, ValueError) as error:
        raise RequestError(f"the table cannot be written: {error}") from error
    machine = testing.machine_line(device.torch_device)
    steps = plan(arguments.shape, arguments.kinds, table=rates.in_use(device.torch_device))
    measured = list(measure(steps, device, budget_s=arguments.budget_s))
    rows = list(itertools.chain(*measured))
    costs = whole(fit(rows), steps)
    print(report(costs, rows))
    print(machine)
    if not costs:
        print(f"no row to make a table of; {folder} stays as it is")
    else:
        path = rates.write(tables.Table(costs, machine, now()))
        print(f'wrote {path}; "auto" uses it in processes that start now')
    if len(measured) < len(steps):
        layers, enough = len({key_of(step) for step in steps}), max(LONG_S, 2 * arguments.budget_s)
        print(f"incomplete: {len(costs)} of {layers} layers; run again with --budget-s {enough:g}")
        return 1
    return 1 if not costs or any(row["red"] for row in rows) else 0
