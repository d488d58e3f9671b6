"""``twell tune``: the rates of this GPU, fitted to measured times of each route; "auto" then predicts by them.

A step is a synthetic layer with a number of tokens, measured with several ``PATTERNS``. The sparse routes are checked
against "dense" and replayed in turn with it (``twell.commands.timing``). "dense" is captured once per step, since its
time does not depend on the pattern, and replayed with each, since clocks drift.
``twell.commands.fitting`` fits the rates.
"""

import argparse
import dataclasses
import datetime
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import testing
from twell.choose import cards, rates
from twell.choose.cards import Card
from twell.choose.rates import Figures, Problem
from twell.commands import fitting, timing
from twell.commands.fitting import Row
from twell.commands.request import RequestError, number_above, pick_device
from twell.ops import screened
from twell.runtime import cache, fingerprint, geometry
from twell.runtime import device as driver
from twell.testing import FFN, Workload
from twell.testing.quantised import Quantised

DESCRIPTION = """\
Measure the time of each route on this GPU, and write the rates by which "auto" then chooses on GPUs of this model. It
takes three minutes on an H200. With --shape rates fit the named layers, and others less. If --budget-s is too short,
nothing is written: the last line then says "incomplete", and the exit status is 1.
"""

Shape = tuple[int, int]

SHAPES: tuple[Shape, ...] = (
    *((896, 4864), (2048, 5632), (3072, 9216), (1024, 2816)),
    *((4096, 11008), (4096, 14336), (5120, 13824), (1536, 8960)),
)
# one pass over the weights computes so few, where the GPU has the kernel
FEW, _FEW_SHAPES = (1, 8, 32), ((2048, 5632), (4096, 14336), (4096, 16384))
_MANY = (33, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 12288)
# By kind of call: layers and numbers of tokens, of which neighbours take every second one. Inference has ``FEW``, too,
# in two layers of each kind. With 131,072 tokens the second layer takes within 9 % of the relative times at 16,384.
KINDS: dict[str, tuple[tuple[Shape, ...], tuple[int, ...]]] = {
    "gated": (SHAPES, _MANY),
    "non-gated": (
        ((2048, 5632), (4096, 16384), (4096, 11008), (2048, 8192), (768, 3072)),
        (33, 64, 128, 256, 512, 1024, 4096, 12288),
    ),
    "e4m3": (((2048, 5632), (4096, 14336)), (64, 128, 256, 1024, 4096, 16384)),
    "training": (
        ((896, 4864), (2048, 5632), (3072, 9216), (1024, 2816), (4096, 11008)),
        (48, 128, 256, 512, 1024, 2048, 4096, 12288),
    ),
    "non-gated training": (((2048, 8192), (2048, 5632)), (256, 1024, 4096, 12288)),
}

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
    "tenth": (1 / 10, {"neuron_sigma": 0.7, "token_sigma": 0.5}),
    "dense": (1 / 6, {"neuron_sigma": 0.5, "token_sigma": 0.3}),
}
# of independent tokens, whose union follows from their number
_FEW_PATTERNS = ("uniform", "dense")
# with more tokens sparse routes of the densest pattern lose, and are slow to measure
_MOST_TOKENS_OF_DENSE = {"gated": 64, "non-gated": 1024}

# The screen is measured from this many tokens on. It saves at most half of the gate GEMM, and copies w_gate in int8 at
# each call: with fewer tokens the one is no more than the other.
LEAST_SCREENED = 1024

# The largest difference from dense in the Frobenius norm. bf16 rounds to 0.2 %, and gates next to zero may fall on
# either side; gradients have more roundings. A hidden value in e4m3 rounds to 6 %, in dense alone.
MOST_ERROR, MOST_ERROR_E4M3 = {False: 0.02, True: 0.05}, 0.08

# A route that takes this many times as long as the fastest is not replayed again.
SLOW = 4.0
LEAST_ROUNDS = 6

# Seconds that a slow GPU takes. An estimate: an H200 takes three minutes.
LONG_S = 3600.0


def draw(pattern: str, m: int, k: int, n: int, device: torch.device) -> FFN:
    """A layer with the pattern, and enough tokens to set its threshold."""
    share, unevenness = PATTERNS[pattern]
    return testing.make(Workload(share * n, **unevenness), max(m, 4096), k, n, device=device)


def figures_of(problem: FFN, screen: bool = False) -> Figures:
    """The figures of a layer, from its gates; with ``screen`` its candidates, too."""
    m, n, tile = len(problem.x), len(problem.w_gate), geometry.TOKEN_TILE
    whole = m // tile * tile
    nonzeros, fired, heaviest = 0, 0, 0
    for x in torch.split(problem.x, 128 * tile):
        active = F.relu(F.linear(x, problem.w_gate, problem.b_gate)) != 0
        groups = F.pad(active.sum(1), (0, -len(active) % rates.HEAVY_GROUP)).view(-1, rates.HEAVY_GROUP).sum(1)
        nonzeros, heaviest = nonzeros + int(groups.sum()), max(heaviest, int(groups.max()))
        tiles = len(active) // tile
        fired += int(active[: tiles * tile].view(tiles, tile, n).any(1).sum())
    listed = screened.count(problem.x[:whole], problem.w_gate, None) if screen and whole else None
    union = fired * tile / (whole * n) if whole else None
    candidates = None if listed is None else int(listed.sum()) * tile / (whole * n)
    return Figures(nonzeros / m, union, heaviest / min(m, rates.HEAVY_GROUP), candidates)


class Layer:
    """Copies of a drawn layer, larger than the L2 cache together, with its routes as calls on one copy."""

    def __init__(self, drawn: FFN, problem: Problem, device: timing.Device) -> None:
        self.problem, self.device = problem, device
        gated, training, m = problem.gated, problem.training, problem.m
        # with few tokens a sparse call reads little except for the gate weight
        few = m <= 1024 and not training
        read = [drawn.w_gate] if few else list(drawn.present(gated).values())
        copies = device.copies_for(sum(t.numel() * t.element_size() for t in read) // (1 + problem.float8))
        self.copies = [drawn, *(drawn.map(torch.clone) for _ in range(copies - 1))]
        self.quantised = [Quantised(each) for each in self.copies] if problem.float8 else []
        if training:
            upstream = testing.real_upstream(drawn)
            self.dy = [upstream, *(upstream.clone() for _ in range(copies - 1))]
        # with few tokens at least so many calls, so that the launch of the graph does not count
        least = (24 if m <= 64 else 4) if few else 1
        self.calls = copies * -(-least // copies)

    def figures(self, screen: bool) -> Figures:
        drawn = self.copies[0]
        return figures_of(self.quantised[0].rounded(drawn.x) if self.quantised else drawn, screen)

    def call(self, route: str) -> timing.Call:
        def infer(i: int) -> tuple[Tensor, ...]:
            i %= len(self.copies)
            with torch.no_grad():
                if not self.quantised:
                    return (testing.sparse_output(self.copies[i], gated=self.problem.gated, strategy=route),)
                layer, x = self.quantised[i], self.copies[i].x
                return (layer.dense(x) if route == "dense" else layer.sparse(x, route),)

        def train(i: int) -> tuple[Tensor, ...]:
            i %= len(self.copies)
            with torch.enable_grad():
                leaves = self.copies[i].map(lambda t: t.detach().requires_grad_())
                y = testing.sparse_output(leaves, gated=self.problem.gated, strategy=route)
                gradients = torch.autograd.grad(y, tuple(leaves.present(self.problem.gated).values()), self.dy[i])
            return (y.detach(), *gradients)

        return train if self.problem.training else infer

    def record(self, route: str) -> timing.Recording:
        return self.device.record(self.call(route), self.calls)

    def check(self, routes: Iterable[str]) -> dict[str, str]:
        """Reasons for routes that are wrong, beside dense."""
        red: dict[str, str] = {}
        right = self.call("dense")(0)
        most = MOST_ERROR_E4M3 if self.quantised else MOST_ERROR[self.problem.training]
        for route in routes:
            try:
                error = max(map(relative_error, self.call(route)(0), right))
                if not error <= most:
                    red[route] = f"differs from dense by {error:.1%}"
            except (RuntimeError, NotImplementedError) as error:
                red[route] = timing.reason(error)
        return red


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Of ``actual`` as a whole; infinite with a NaN, which no order finds."""
    error = float((actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
    return math.inf if math.isnan(error) else error


def sparse_routes(problem: Problem, card: Card) -> tuple[str, ...]:
    """The sparse routes that differ on the GPU of the card: the screen where it has the kernels, of many tokens."""
    if rates.in_one_pass(problem, card):
        return ("row",)
    routes = ("union",) if problem.training else ("row", "union")
    screens = card.screens and not problem.float8 and problem.m >= LEAST_SCREENED
    return (*routes, rates.SCREENED) if screens else routes


def times_of(recordings: dict[str, timing.Recording], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of one call by route; a slow one has few samples."""
    times = timing.measure(recordings, 0, least=1)
    fastest = min(map(min, times.values()))
    near = {name: each for name, each in recordings.items() if name == "dense" or min(times[name]) <= SLOW * fastest}
    return times | timing.measure(near, seconds, LEAST_ROUNDS)


def row_of(
    layer: Layer, figures: Figures, pattern: Any, card: Card, seconds: float, dense: timing.Recording | None = None
) -> Row:
    """The row of a layer: sizes, figures, milliseconds by route and reasons for those that are wrong, ``red``."""
    routes = sparse_routes(layer.problem, card)
    red = layer.check(routes)
    recordings = {route: layer.record(route) for route in routes if route not in red}
    times = times_of({**recordings, "dense": dense or layer.record("dense")}, seconds)
    numbers = figures._asdict() | {f"{route}_ms": statistics.median(each) for route, each in times.items()}
    sizes = dict(zip(fitting.SIZES, layer.problem)) | ({"float8": True} if layer.problem.float8 else {})
    rounded = {name: number if number is None else float(f"{number:.4g}") for name, number in numbers.items()}
    return {**sizes, "pattern": pattern, **rounded, "red": red}


class Step(NamedTuple):
    """A call, measured with each of ``patterns``."""

    kind: str
    problem: Problem
    patterns: tuple[str, ...]

    def __str__(self) -> str:
        m, k, n, *_ = self.problem
        return f"{k:5} x {n:5} {self.kind:18} M = {m:6}"


def plan(card: Card, shapes: Sequence[Shape] | None = None) -> list[Step]:
    """All steps on the GPU of the card, layer by layer. ``shapes`` replace those of each kind."""
    steps = []
    for kind in (kind for kind in KINDS if kind != "e4m3" or card.screens):
        own, counts = KINDS[kind]
        gated, training, is_float8 = "non-gated" not in kind, "training" in kind, kind == "e4m3"
        for i, (k, n) in enumerate(shapes or own):
            few = FEW if not training and (shapes or (k, n) in _FEW_SHAPES) else ()
            for m in (*few, *(counts if shapes or is_float8 else counts[i % 2 :: 2])):
                problem = Problem(m, k, n, gated, training, merged=is_float8, float8=is_float8)
                most = len(PATTERNS) - (m > _MOST_TOKENS_OF_DENSE.get(kind, 0)) - training
                patterns = _FEW_PATTERNS if rates.in_one_pass(problem, card) else tuple(PATTERNS)[:most]
                steps.append(Step(kind, problem, patterns))
    return steps


def measure(
    steps: Sequence[Step], device: timing.Device, card: Card, *, budget_s: float, seconds: float = 0.05
) -> Iterator[list[Row]]:
    """Measure step by step, print a line for each and yield its rows; begin none after ``budget_s`` seconds."""
    started, done = time.monotonic(), 0
    for _, of_layer in itertools.groupby(steps, key=lambda step: (step.kind, *step.problem[1:3])):
        layer_steps = list(of_layer)
        sizes = max(step.problem for step in layer_steps)[:3]
        drawn: dict[str, FFN] = {}
        for step in layer_steps:
            if time.monotonic() - started > budget_s:
                print(f"out of time before {step}")
                return
            for pattern in step.patterns:
                if pattern not in drawn:
                    drawn[pattern] = draw(pattern, *sizes, device.torch_device)
            rows = measure_step(step, drawn, device, card, seconds)
            done += 1
            head = f"{time.monotonic() - started:4.0f} s  {done:3} of {len(steps)}"
            print(f"{head}  {step}  {_summary(rows)}", flush=True)
            yield rows


def measure_step(step: Step, drawn: dict[str, FFN], device: timing.Device, card: Card, seconds: float) -> list[Row]:
    rows, problem = [], step.problem
    # its recording reads the memory of the layer that it was made of
    first: tuple[Layer, timing.Recording] | None = None
    for pattern in step.patterns:
        layer = Layer(drawn[pattern].rows(0, problem.m), problem, device)
        figures = layer.figures(rates.SCREENED in sparse_routes(problem, card))
        if problem.training and figures.nonzeros * problem.m > geometry.hybrid_capacity(problem.m, problem.n):
            continue
        first = first or (layer, layer.record("dense"))
        rows.append(row_of(layer, figures, pattern, card, seconds, first[1]))
    return rows


def _summary(rows: Sequence[Row]) -> str:
    """The range of each route's times over dense, or the first failure."""
    for row in rows:
        for route, reason in row["red"].items():
            return f"RED {row['pattern']} {route} {reason}"
    times = [fitting.ms_of(row) for row in rows]
    over = {route: [ms[route] / ms["dense"] for ms in times if route in ms] for route in rates.ROUTES[1:]}
    return ", ".join(f"{route} {min(each):.2f} to {max(each):.2f}" for route, each in over.items() if each)


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
    add = parser.add_argument
    add("--shape", nargs="+", type=shape, metavar="KxN", help="hidden sizes and neurons of the layers to fit rates to")
    add("--device", help="cuda or cuda:INDEX (default: cuda)")
    said = "begin no measurement after this many seconds (%(default)g)"
    add("--budget-s", type=number_above(0), metavar="S", default=450.0, help=said)


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
    """Measure and write the rates. Return 1 if a route was wrong or not all was measured."""
    return tune(arguments, gpu(arguments.device))


def tune(
    arguments: argparse.Namespace,
    device: timing.Device,
    keep: Callable[[list[Row], Card, bool], None] = lambda rows, card, complete: None,
    write: Callable[[Card], Any] | None = cards.write,
) -> int:
    """``run`` on a device. ``keep`` gets all rows so far after each step, and whether they are all."""
    try:
        cache.open_folder(cards.FOLDER)
    except (OSError, cache.UnsafeCacheError, ValueError) as error:
        raise RequestError(f"the rates cannot be written: {error}") from error
    on, before = device.torch_device, cards.in_use(device.torch_device)
    sms = driver.sm_count(on.index or 0) if on.type == "cuda" else before.sms
    about: dict[str, Any] = {"machine": testing.machine_line(on), "kernels": fingerprint.source_hash()}
    card = dataclasses.replace(before, date=now(), sms=sms, file=None, **about)
    steps = plan(before, arguments.shape)
    rows: list[Row] = []
    done = 0
    for found in measure(steps, device, before, budget_s=arguments.budget_s):
        rows, done = rows + found, done + 1
        keep(rows, card, done == len(steps))
    if done < len(steps):
        enough = max(LONG_S, 2 * arguments.budget_s)
        print(f"incomplete: {done} of {len(steps)} steps; run again with --budget-s {enough:g}; no rates are written")
        return 1
    whole = fitting.usable(rows)
    card = fitting.fitted(whole, card)
    print(fitting.report(whole, card), card.machine, sep="\n")
    lacking = {fitting.part_of(step.problem) for step in steps} - {fitting.part_of(each.problem) for each in whole}
    if lacking:
        print(f"no rates are written: no route has right times of {', '.join(sorted(lacking))}")
    elif write is not None:
        print(f'wrote {write(card)}; "auto" uses it in processes that start now')
    return 1 if lacking or any(row["red"] for row in rows) else 0
