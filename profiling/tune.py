"""Measure the cost of each strategy against dense PyTorch, and generate the table of "auto".

    python -m profiling.tune --out profiling/results/tune.json --write
    python -m profiling.tune --out profiling/results/tune_a.json --shapes 2048x5632 --kinds gated --budget-s 170
    python -m profiling.tune --from profiling/results/tune_a.json profiling/results/tune_b.json --write

The first two commands need a Hopper GPU, the last does not. Rows go to --out after each problem, so an interrupted run
loses nothing; --budget-s ends a run between problems. Several files are merged; the last row for a problem counts.

A problem is a synthetic layer (``PATTERNS``) with a number of tokens. Rotated copies of the weights exceed the L2
cache. The strategies and dense PyTorch are checked against dense PyTorch, captured in CUDA graphs and replayed in turn;
a time is a median. Dense is eager PyTorch or, for the numbers of tokens in --compile-m, torch.compile if that is
faster: each row says which.

For each layer, number of tokens and strategy the relative time is fitted by base + a * union + b * density, none
negative: least squares of relative errors, with less weight on slow times (``WEIGHT_POWER``). ``union`` and ``density``
are the shares of neurons that a tile of 128 tokens and a token fires (``twell.tuning.shares``).
"""

import argparse
import datetime
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twell import _files, testing, tuning
from twell._runtime import geometry
from twell.commands.bench.protocol import Graph, measure
from twell.testing import FFN, Workload
from twell.tuning import Figures, Problem

TABLE_FILE = Path(__file__).resolve().parents[1] / "python" / "twell" / "_tuning_table.py"

SHAPES = ((2048, 5632), (1024, 2816), (4096, 11008), (4096, 14336), (896, 4864))
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
# measured for the first shape only
MANY_TOKENS = 131072
# non-gated layers and training: the first shape, from this many tokens on
LEAST_TOKENS_OF_OTHERS = 1024
# where nearly all neurons fire, "row" is many times slower than dense, and slow to measure
MOST_TOKENS_OF_DENSE = 4096
KINDS = ("gated", "non-gated", "training", "non-gated training")

# Fields of a problem that vary; down weights are stored by rows.
SIZES = ("m", "k", "n", "gated", "training")

_UNEVEN: dict[str, Any] = {"neuron_sigma": 1.0, "token_sigma": 0.5}
# non-zeros as a share of the neurons, and their unevenness
PATTERNS: dict[str, tuple[float, dict[str, Any]]] = {
    "uniform": (1 / 190, {}),
    "skew": (1 / 190, {**_UNEVEN, "dead": 0.3}),
    "topic": (1 / 190, {**_UNEVEN, "dead": 0.3, "rho": 0.5}),
    "sparsest": (1 / 1400, {**_UNEVEN, "dead": 0.5, "rho": 0.5}),
    "sparser": (1 / 400, {**_UNEVEN, "dead": 0.5, "rho": 0.5}),
    "denser": (1 / 60, {**_UNEVEN, "dead": 0.2}),
    "wide topic": (1 / 44, {**_UNEVEN, "dead": 0.2, "rho": 0.5}),
    "wide": (1 / 19, {**_UNEVEN, "dead": 0.1, "rho": 0.3}),
    "dense": (1 / 6, {"neuron_sigma": 0.5, "token_sigma": 0.3}),
}

# The largest difference from dense PyTorch in the Frobenius norm. bf16 rounds to 0.2 %, and gates next to zero may fall
# on either side; gradients have more roundings.
MOST_ERROR = {False: 0.02, True: 0.05}

# Exponent of the weight of a relative error, the fastest time of the problem over its own time. The time of a strategy
# that is many times slower need not be exact, and times are not quite linear.
WEIGHT_POWER = 2

Key = tuple[bool, bool, int, int]
Table = dict[Key, dict[int, dict[str, tuple[float, float, float]]]]


# Measuring


def draw(pattern: str, m: int, k: int, n: int) -> FFN:
    """A layer with the pattern, and enough tokens to set its threshold."""
    share, unevenness = PATTERNS[pattern]
    testing.WORKLOADS["tune"] = Workload(share * n, **unevenness)
    return testing.make("tune", max(m, 4096), k, n)


def figures_of(problem: FFN) -> Figures:
    """The figures of a layer, from its gates."""
    nonzeros, union = 0, 0
    m, n = problem.x.shape[0], problem.w_gate.shape[0]
    whole = m // geometry.TOKEN_TILE * geometry.TOKEN_TILE
    for start in range(0, m, 16384):
        stop = min(m, start + 16384)
        active = F.relu(F.linear(problem.x[start:stop], problem.w_gate)) != 0
        nonzeros += int(active.sum())
        tiles = active[: max(min(whole, stop) - start, 0)]
        if len(tiles):
            union += int(tiles.view(-1, geometry.TOKEN_TILE, n).any(1).sum())
    return Figures(nonzeros / m, union * geometry.TOKEN_TILE / (whole * n) if whole else None)


class Layer:
    """Copies of a problem, with its strategies as calls on one copy."""

    def __init__(self, problem: FFN, gated: bool, training: bool, compiled: Any) -> None:
        self.gated, self.training, self.compiled = gated, training, compiled
        # with few tokens a sparse call reads little except for the gate weight
        few = problem.x.shape[0] < 1024 and not training
        read = [problem.w_gate] if few else list(problem.present(gated).values())
        size = sum(t.numel() * t.element_size() for t in read)
        cache = torch.cuda.get_device_properties().L2_cache_size
        copies = max(2, math.ceil(2 * cache / size))
        self.problems = [problem, *(problem.map(torch.clone) for _ in range(copies - 1))]
        if training:
            upstream = testing.real_upstream(problem)
            self.dy = [upstream, *(upstream.clone() for _ in range(copies - 1))]
        # with few tokens more calls, so that the launch of the graph does not count
        self.calls = copies * (8 if problem.x.shape[0] < 1024 else 1)

    def strategies(self) -> dict[str, Callable[[int], tuple[Tensor, ...]]]:
        names = ["union"] if self.training else ["row", "union"]
        calls = {name: self.call(testing.sparse_output, strategy=name) for name in names}
        calls["dense eager"] = self.call(testing.dense_output)
        if self.compiled is not None:
            calls["dense compiled"] = self.call(self.compiled)
        return calls

    def call(self, function: Any, **options: Any) -> Callable[[int], tuple[Tensor, ...]]:
        def infer(i: int) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (function(self.problems[i % len(self.problems)], gated=self.gated, **options),)

        def train(i: int) -> tuple[Tensor, ...]:
            i %= len(self.problems)
            with torch.enable_grad():
                leaves = self.problems[i].map(lambda t: t.detach().requires_grad_())
                y = function(leaves, gated=self.gated, **options)
                gradients = torch.autograd.grad(y, tuple(leaves.present(self.gated).values()), self.dy[i])
            return (y.detach(), *gradients)

        return train if self.training else infer

    def run(self, seconds: float) -> tuple[dict[str, list[float]], dict[str, float], dict[str, str]]:
        """Time all strategies: milliseconds and errors against dense by name, and reasons for strategies left out."""
        graphs: dict[str, Graph] = {}
        errors: dict[str, float] = {}
        red: dict[str, str] = {}
        calls = self.strategies()
        right = calls["dense eager"](0)
        for name, call in calls.items():
            try:
                if name != "dense eager":
                    errors[name] = max(map(relative_error, call(0), right))
                    if not errors[name] <= MOST_ERROR[self.training]:
                        red[name] = f"differs from dense by {errors[name]:.1%}"
                        continue
                graphs[name] = Graph(call, self.calls)
            except (RuntimeError, NotImplementedError) as error:
                red[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        del right
        return measure(graphs, seconds), errors, red


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))


def rows_of(
    problem: Problem,
    pattern: str,
    figures: Figures,
    times: dict[str, list[float]],
    errors: dict[str, float],
    red: dict[str, str],
) -> list[dict[str, Any]]:
    """One row per strategy: its time over that of the faster dense variant."""
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    dense = min((name for name in medians if name.startswith("dense")), key=lambda name: medians[name])
    rows = []
    for name in dict.fromkeys((*medians, *red)):
        if name.startswith("dense") and name not in red:
            continue
        row = {**dict(zip(SIZES, problem)), "pattern": pattern, **figures._asdict(), "strategy": name}
        row |= {"red": red.get(name, ""), "error": errors.get(name), "dense": dense, "dense_ms": medians[dense]}
        if name in medians:
            samples = sorted(times[name])
            row["ms"], row["relative"] = medians[name], medians[name] / medians[dense]
            row["p10_ms"], row["p90_ms"] = (samples[round(s * (len(samples) - 1))] for s in (0.1, 0.9))
            row["samples"] = len(samples)
        rows.append(row)
    return rows


def tokens_of(kind: str, k: int, n: int, chosen: Sequence[int] | None) -> list[int]:
    """Numbers of tokens for a kind of call, or those of ``chosen`` that suit it."""
    first = (k, n) == SHAPES[0]
    if kind == "gated":
        tokens = [*TOKENS, MANY_TOKENS] if first else list(TOKENS)
    else:
        tokens = [m for m in TOKENS if m >= LEAST_TOKENS_OF_OTHERS] if first else []
    if chosen is None:
        return tokens
    return [m for m in chosen if kind == "gated" or m >= LEAST_TOKENS_OF_OTHERS]


def plan(arguments: argparse.Namespace) -> list[tuple[int, int, str, str, list[int]]]:
    """All (k, n, kind, pattern, tokens) to measure, in order."""
    steps = []
    for (k, n), kind, pattern in itertools.product(arguments.shapes, arguments.kinds, arguments.patterns):
        tokens = tokens_of(kind, k, n, arguments.m)
        if pattern == "dense":
            # training does not hold as many non-zeros
            tokens = [] if "training" in kind else [m for m in tokens if m <= MOST_TOKENS_OF_DENSE]
        if tokens:
            steps.append((k, n, kind, pattern, tokens))
    return steps


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all problems and return the data, which is also written to --out after each problem."""
    started = time.monotonic()
    data: dict[str, Any] = {
        "machine": testing.machine_line(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "arguments": {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)},
        "complete": False,
        "rows": [],
    }
    # one graph per size
    torch._dynamo.config.recompile_limit = 256
    compiled = torch.compile(testing.dense_output, fullgraph=True, dynamic=False) if arguments.compile_m else None
    for k, n, kind, pattern, tokens in plan(arguments):
        problem = None
        for m in tokens:
            if time.monotonic() - started > arguments.budget_s:
                print("tune: out of time", file=sys.stderr)
                return data
            if problem is None:
                problem = draw(pattern, max(tokens), k, n)
            rows, dense = problem.rows(0, m), compiled if m in arguments.compile_m else None
            call = Problem(m, k, n, "non-gated" not in kind, "training" in kind)
            figures = figures_of(rows)
            if call.training and figures.nonzeros * m > geometry.hybrid_capacity(m, n):
                continue
            layer = Layer(rows, call.gated, call.training, dense)
            found = rows_of(call, pattern, figures, *layer.run(arguments.seconds))
            del layer
            data["rows"] += found
            write_json(data, arguments.out)
            for row in found:
                print(line(row), flush=True)
    data["complete"] = True
    write_json(data, arguments.out)
    return data


def write_json(data: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _files.write_text(path, json.dumps(data, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    kind = f"{'gated' if row['gated'] else 'non-gated'}{' training' if row['training'] else ''}"
    union = "-" if row["union"] is None else f"{row['union']:.3f}"
    sparsity = f"{row['nonzeros']:8.1f} nnz, union {union:>5}"
    layer = f"{row['k']:5} x {row['n']:5} {kind:18} M = {row['m']:6}  {row['pattern']:10} {sparsity}"
    result = f"RED {row['red']}" if row["red"] else f"{row['ms']:9.4f} ms, {row['relative']:6.3f} of {row['dense']}"
    return f"{layer}  {row['strategy']:6} {result}"


# Fitting


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |matrix @ x - target|, by every set of columns; ties take the smaller set."""
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(target @ target)
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            solution = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            if (solution < 0).any():
                continue
            left = matrix[:, chosen] @ solution - target
            if float(left @ left) < least * (1 - 1e-9) - 1e-15:
                best, least = np.zeros(columns), float(left @ left)
                best[list(chosen)] = solution
    return best


def usable(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The timed rows; the last one for each problem and strategy."""
    names = ("training", "gated", "k", "n", "m", "pattern", "strategy")
    latest = {tuple(row[name] for name in names): row for row in rows if not row["red"]}
    return [row for row in latest.values() if row["strategy"] in ("row", "union")]


def fit(rows: Iterable[dict[str, Any]]) -> Table:
    """The table: coefficients for each layer, number of tokens and strategy.

    A strategy needs at least two rows; with fewer it is left out.
    """
    groups: dict[tuple[Key, int, str], list[dict[str, Any]]] = {}
    fastest: dict[tuple[Any, ...], float] = {}
    for row in usable(rows):
        key = (row["training"], row["gated"], row["k"], row["n"])
        groups.setdefault((key, row["m"], row["strategy"]), []).append(row)
        fastest[place_of(row)] = min(fastest.get(place_of(row), 1.0), row["relative"])
    table: Table = {}
    for (key, m, strategy), group in sorted(groups.items()):
        if len(group) < 2:
            continue
        relative = np.array([row["relative"] for row in group])
        # for one token both shares are equal. Ties take the first column: density, because the coefficient of the union
        # would be far too large for a few more tokens
        terms = np.array([(1.0, density, union) for union, density in map(shares_of, group)])
        weights = (np.array([fastest[place_of(row)] for row in group]) / relative) ** WEIGHT_POWER
        base, per_density, per_union = non_negative_least_squares(terms * (weights / relative)[:, None], weights)
        coefficients = (round(float(base), 4), round(float(per_union), 4), round(float(per_density), 4))
        table.setdefault(key, {}).setdefault(m, {})[strategy] = coefficients
    return table


def problem_of(row: dict[str, Any]) -> Problem:
    return Problem(*(row[name] for name in SIZES))


def place_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Key of a problem, the same for all strategies."""
    return (*problem_of(row), row["pattern"])


def shares_of(row: dict[str, Any]) -> tuple[float, float]:
    return tuning.shares(problem_of(row), Figures(row["nonzeros"], row["union"]))


def predicted(table: Table, row: dict[str, Any]) -> float | None:
    """The relative time of a row by the table; None if the table lacks it."""
    by_tokens = table.get((row["training"], row["gated"], row["k"], row["n"]), {})
    coefficients = by_tokens.get(row["m"], {}).get(row["strategy"])
    if coefficients is None:
        return None
    union, density = shares_of(row)
    return coefficients[0] + coefficients[1] * union + coefficients[2] * density


def report(table: Table, rows: Iterable[dict[str, Any]]) -> str:
    """The errors of the table's predictions, and the loss of its choices against the fastest strategy."""
    errors: list[tuple[float, dict[str, Any]]] = []
    problems: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = {}
    for row in usable(rows):
        value = predicted(table, row)
        if value is None:
            continue
        errors.append((value / row["relative"] - 1, row))
        entry = problems.setdefault(place_of(row), {"dense": (1.0, 1.0)})
        entry[row["strategy"]] = (value, row["relative"])
    if not errors:
        return "nothing to fit"
    lost = {}
    for name, entry in problems.items():
        chosen = min(entry.values())
        lost[name] = chosen[1] / min(measured for _, measured in entry.values()) - 1
    worst_error, worst_row = max(errors, key=lambda each: abs(each[0]))
    worst_problem = max(lost, key=lambda name: lost[name])
    median = statistics.median(abs(error) for error, _ in errors)
    return (
        f"{len(errors)} times are predicted within {median:.1%} in the median; the worst is {worst_error:+.0%}: "
        f"{line(worst_row)}\n{len(lost)} choices lose {statistics.mean(lost.values()):.1%} on average to the fastest "
        f"strategy; the worst loses {lost[worst_problem]:.0%}: {worst_problem}"
    )


def table_text(table: Table, machine: str, date: str) -> str:
    """The source of ``twell._tuning_table``."""
    named = [f"MACHINE = {json.dumps(machine, ensure_ascii=False)}"]
    if len(named[0]) > 120:
        parts = [json.dumps(f"{part}; ", ensure_ascii=False) for part in machine.split("; ")]
        parts[-1] = f'{parts[-1][:-3]}"'
        named = ["MACHINE = (", *(f"    {part}" for part in parts), ")"]
    lines = [
        '"""What each strategy costs, in times of dense PyTorch: generated by profiling/tune.py from measurements."""',
        "",
        "from __future__ import annotations",
        "",
        *named,
        f'DATE = "{date}"',
        "",
        "# (training, gated, K, N) -> M -> strategy -> (base, per share of neurons in a union, per share of non-zeros)",
        "TABLE: dict[tuple[bool, bool, int, int], dict[int, dict[str, tuple[float, float, float]]]] = {",
    ]
    for key, by_tokens in sorted(table.items()):
        lines.append(f"    {key}: {{")
        for m, entry in sorted(by_tokens.items()):
            cells = ", ".join(f'"{name}": {tuple(map(float, entry[name]))}' for name in sorted(entry))
            lines.append(f"        {m}: {{{cells}}},")
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def read(path: Path) -> dict[str, Any]:
    """Read the file of an earlier run; ValueError if it is another file."""
    try:
        run = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"expected what --out wrote in {path}, got {error}") from error
    needed = {*SIZES, *Figures._fields, "pattern", "strategy", "relative", "red"}
    rows = run.get("rows") if isinstance(run, dict) else None
    if not isinstance(rows, list) or not {"machine", "date"} <= run.keys():
        raise ValueError(f"expected what --out wrote in {path}, got other JSON")
    for row in rows:
        if missing := needed - row.keys() - ({"relative"} if row.get("red") else set()):
            raise ValueError(f"expected what --out wrote in {path}, got a row without {', '.join(sorted(missing))}")
    return run


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """Merge runs on GPUs of one model: all rows, machine and date of the last run."""
    runs = [read(path) for path in paths]
    models = {run["machine"].split(" (")[0] for run in runs}
    if len(models) > 1:
        raise ValueError(f"a table is for one GPU, got measurements of {', '.join(sorted(models))}")
    return {**runs[-1], "rows": [row for run in runs for row in run["rows"]]}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def shape(text: str) -> tuple[int, int]:
        k, n = map(int, text.split("x"))
        return k, n

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", nargs="+", type=shape, metavar="KxN", default=list(SHAPES), help="default: all five")
    add("--m", nargs="+", type=int, metavar="TOKENS", help="any numbers of tokens (default: TOKENS)")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    add(
        "--compile-m",
        nargs="*",
        type=int,
        default=[4096, 16384, 131072],
        metavar="TOKENS",
        help="numbers of tokens for which dense also runs through torch.compile",
    )
    add("--seconds", type=float, default=0.25, help="GPU time for the samples of one problem (default: %(default)s)")
    add("--budget-s", type=float, default=360.0, help="start no problem after this many seconds (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    add(
        "--from",
        dest="sources",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing, use the rows of these files",
    )
    add("--write", action="store_true", help="generate the table")
    add(
        "--table",
        type=Path,
        default=TABLE_FILE,
        metavar="FILE",
        help="the table's file (default: that of the checkout)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.sources is not None:
        try:
            data = merged(arguments.sources)
        except ValueError as error:
            print(f"tune: error: {error}", file=sys.stderr)
            return 2
    elif not torch.cuda.is_available():
        print("tune: needs a CUDA device, or --from", file=sys.stderr)
        return 2
    else:
        data = measure_all(arguments)
    table = fit(data["rows"])
    print(report(table, data["rows"]))
    print(data["machine"])
    if arguments.write:
        if not table:
            print("tune: no rows to make a table of", file=sys.stderr)
            return 1
        _files.write_text(arguments.table, table_text(table, data["machine"], data["date"][:10]))
    return 1 if any(row["red"] for row in data["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
