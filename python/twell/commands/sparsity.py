"""The sparsity of a model's feed-forward layers, and the strategy and speed that measured times predict for it."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell import _admission, _auto, _compaction, _files, _tables, tuning
from twell._activation import RELU, Activation
from twell._runtime import geometry, specs
from twell.commands import saved_model
from twell.commands.saved_model import Batch, WatchedLayer
from twell.ops import screened

UNIONS = (16, 64, 128, 256)
HOTTEST = (64, 256, 1024)

# A token with more non-zeros is heavy; so is one with more than N / HEAVY_SHARE, the average that the hybrid format of
# a training step holds.
HEAVY = 128
HEAVY_SHARE = 36

# The largest union needs this many tokens.
LEAST_TOKENS = UNIONS[-1]

# The int8 screen runs on so many tokens of each layer, on the CPU, where it takes as long as several dense layers.
SCREENED = 512

# A layer is far from the nearest measured one if its K or K * N differs by more than the first factor, and beyond
# prediction by more than the second.
FAR, TOO_FAR = 2.0, 8.0

# An eager call of so many tokens takes as long as the host's work for it, and the kernels' gain is lost. On one H200,
# K = 2,048, N = 5,632, one of 2,048 takes 1.1 times as long as dense, a training step 1.8; of 16,384 0.4 and 0.3.
HOST_BOUND = 2048

# (gated, K, N) of a layer
Shape = tuple[bool, int, int]

COLUMNS = {
    "layer": "number of the layer",
    "name": "its qualified name in the model",
    "kind": '"gated" or "non-gated"',
    "activation": "relu, relu2, drelu or fatrelu",
    "threshold": "of fatrelu, else 0",
    "k": "hidden size",
    "n": "neurons",
    "compression": "of the TwELL format; a tile of 256 neurons holds 256 / compression - 1 non-zeros",
    "tokens": "tokens that ran",
    "mean": "mean non-zeros per token after ReLU",
    "p50": "median of the non-zeros per token",
    "p99": "99th percentile of the non-zeros per token",
    "max": "most non-zeros of a token",
    "first_token": "mean non-zeros of the first token of a sequence",
    "heavy": f"share of tokens with more than {HEAVY} non-zeros",
    "heavy_share": f"share of tokens with more than n / {HEAVY_SHARE} non-zeros",
    "overflowing": "share of tiles (256 neurons of a token) with more non-zeros than fit",
    "dead": "neurons that fired in no token",
    **{f"union_{t}": f"mean share of n that {t} consecutive tokens fire" for t in UNIONS},
    "candidates": "mean share of n that the int8 screen lists for 128 tokens: union_128, and of the other neurons the "
    f"share that it lists in the first {SCREENED:,} tokens",
    **{f"hottest_{h}": f"share of all non-zeros in the {h} most active neurons" for h in HOTTEST},
    "strategy_CALL": "strategy for a call: CALL is m64 for inference on 64 tokens, train16384 for a training step",
    "speedup_CALL": "expected speed-up of the whole layer over dense",
    "measured_CALL": "K x N of the measured layer behind it",
    "why_CALL": "reason for the strategy",
}


class Call(NamedTuple):
    """A kind of call to predict: its tokens, and whether it is a training step."""

    tokens: int
    training: bool

    @property
    def key(self) -> str:
        return f"{'train' if self.training else 'm'}{self.tokens}"

    def __str__(self) -> str:
        return f"{'training on ' if self.training else ''}{saved_model.counted(self.tokens, 'token')}"


@dataclass(frozen=True)
class LayerSparsity:
    """The sparsity of one layer. Shares are from 0 to 1; ``COLUMNS`` explains the figures.

    unions: by number of tokens, up to the length of the text. hottest: by number of neurons. candidates: share of the
    neurons that the int8 screen lists for 128 tokens; None where no batch has so many.
    """

    name: str
    number: int
    gated: bool
    k: int
    n: int
    compression: int
    tokens: int
    mean: float
    p50: int
    p99: int
    most: int
    first: float
    heavy: float
    heavy_share: float
    overflowing: float
    dead: int
    unions: dict[int, float]
    hottest: dict[int, float]
    activation: Activation = RELU
    candidates: float | None = None

    @property
    def figures(self) -> tuning.Figures:
        """The figures behind the choice of a strategy."""
        return tuning.Figures(self.mean, self.unions.get(geometry.TOKEN_TILE), None, self.candidates)


class Tally:
    """Counts of the neurons of one layer that fired so far: sums on the device, of a size that tokens do not change."""

    def __init__(self, n: int, compression: int, device: torch.device) -> None:
        self._n, self._capacity = n, geometry.capacity(compression)
        self._device = device
        self._histogram = self._zeros(n + 1)
        self._fired = self._zeros(n)
        self._overflowing = self._zeros(1)
        # non-zeros of the first tokens of sequences, and how many these are
        self._first = self._zeros(2)
        self._unions = {tokens: self._zeros(1) for tokens in UNIONS}
        self._waiting = torch.empty(0, n, dtype=torch.bool, device=device)
        # in tiles of 128 tokens: candidates and neurons that fire, and how many tokens these are
        self._listed, self._firing, self._screened = 0, 0, 0

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.int64, device=self._device)

    def add(self, pattern: Tensor, first: Tensor) -> None:
        """Count ``pattern``, bool [tokens, N], true where a neuron fires; ``first``, bool [tokens], marks sequences."""
        tiles = F.pad(pattern, (0, -self._n % geometry.TILE)).view(len(pattern), -1, geometry.TILE).sum(2)
        counts = tiles.sum(1)
        self._histogram.index_add_(0, counts, torch.ones_like(counts))
        self._fired += pattern.sum(0)
        self._overflowing += (tiles > self._capacity).sum()
        self._first += torch.stack(((counts * first).sum(), first.sum()))
        # consecutive tokens form unions across calls
        block = torch.cat((self._waiting, pattern))
        whole = len(block) // UNIONS[-1] * UNIONS[-1]
        self._count_unions(block[:whole])
        self._waiting = block[whole:].clone()

    def screen(self, x: Tensor, linear: nn.Linear, activation: Activation) -> None:
        """Count the candidates of tokens x [M, K] in 16 bits, until ``SCREENED`` have been counted."""
        whole = min(len(x), SCREENED - self._screened) // geometry.TOKEN_TILE * geometry.TOKEN_TILE
        if not whole or x.shape[1] % 8 or x.shape[1] > specs.QUANTIZE_K_CLASSES[-1]:
            return
        dtype = x.dtype if x.dtype in _auto.PACKED_DTYPES else torch.bfloat16
        tokens, weight, *bias = (
            t.detach().to("cpu", dtype) for t in (x[:whole], linear.weight, linear.bias) if t is not None
        )
        listed = screened.count(tokens, weight, bias[0] if bias else None, activation)
        self._listed += 0 if listed is None else int(listed.sum())
        pattern = torch.cat([rows for _, rows in patterns(x[:whole], linear, activation)])
        self._firing += int(pattern.view(-1, geometry.TOKEN_TILE, self._n).any(1).sum())
        self._screened += whole

    def _count_unions(self, block: Tensor) -> None:
        for tokens, total in self._unions.items():
            whole = len(block) // tokens
            total += block[: whole * tokens].view(whole, tokens, self._n).any(1).sum()

    def _candidates(self, union: float) -> float | None:
        """The share of the neurons that the screen lists where ``union`` fires; None where it ran on no token."""
        if not self._screened:
            return None
        neurons = self._screened // geometry.TOKEN_TILE * self._n
        silent = neurons - self._firing
        return union + (1 - union) * max(self._listed - self._firing, 0) / silent if silent else 1.0

    def report(self, layer: WatchedLayer) -> LayerSparsity:
        """The figures of all tokens, at least one; ends the counting."""
        self._count_unions(self._waiting)
        n, histogram = self._n, self._histogram.cpu()
        tokens, nonzeros = int(histogram.sum()), int((histogram * torch.arange(n + 1, device="cpu")).sum())
        below = histogram.cumsum(0)

        def more_than(limit: int) -> float:
            return 1 - int(below[min(limit, n)]) / tokens

        unions = {t: int(v) / (tokens // t * n) for t, v in self._unions.items() if tokens >= t}
        hot = self._fired.sort(descending=True).values.cumsum(0).cpu()
        first, sequences = self._first.tolist()
        return LayerSparsity(
            name=layer.name,
            number=layer.number,
            gated=layer.gated,
            k=layer.linear.in_features,
            n=n,
            compression=layer.compression,
            tokens=tokens,
            mean=nonzeros / tokens,
            p50=int((below >= math.ceil(0.5 * tokens)).int().argmax()),
            p99=int((below >= math.ceil(0.99 * tokens)).int().argmax()),
            most=int(histogram.nonzero().max()),
            first=first / max(sequences, 1),
            heavy=more_than(HEAVY),
            # more than n / 36 is more than the integer below it
            heavy_share=more_than(n // HEAVY_SHARE),
            overflowing=int(self._overflowing) / (tokens * geometry.tiles(n)),
            dead=int((self._fired == 0).sum()),
            unions=unions,
            hottest={h: int(hot[min(h, n) - 1]) / max(nonzeros, 1) for h in HOTTEST},
            activation=layer.activation,
            candidates=self._candidates(unions.get(geometry.TOKEN_TILE, 0.0)),
        )


def patterns(x: Tensor, linear: nn.Linear, activation: Activation = RELU) -> Iterator[tuple[slice, Tensor]]:
    """The neurons that tokens x [M, K] fire, by plain PyTorch in their dtype: rows, and bool [rows, N]; NaN fires."""
    level = activation.level(x.dtype)
    step = max(1, _compaction.CHUNK_GATES // linear.out_features)
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        yield rows, ~(F.linear(x[rows], linear.weight, linear.bias) <= level)


def analyze(
    model: nn.Module,
    token_batches: Iterable[Batch],
    layers: Sequence[WatchedLayer] | None = None,
    done: Callable[[int], object] | None = None,
) -> list[LayerSparsity]:
    """Report the sparsity of ``layers``, by default all twell layers of ``model``, on the text of ``token_batches``.

    The model should be in evaluation mode and stays as it is. ``done`` is called with the number of tokens of each
    batch. Raises ValueError without layers or tokens, or if a layer's input is not finite.
    """
    watched = saved_model.layers(model) if layers is None else layers
    tallies = [Tally(layer.linear.out_features, layer.compression, layer.linear.weight.device) for layer in watched]

    def tally(i: int, x: Tensor, first: Tensor) -> None:
        tallies[i].screen(x, watched[i].linear, watched[i].activation)
        for rows, pattern in patterns(x, watched[i].linear, watched[i].activation):
            tallies[i].add(pattern, first[rows])

    seen = saved_model.observe(model, watched, token_batches, tally, done)
    if not watched or not seen:
        raise ValueError(f"analyze: expected layers and tokens, got {len(watched)} layers and {seen} tokens")
    return [tally.report(layer) for tally, layer in zip(tallies, watched, strict=True)]


@dataclass(frozen=True)
class Prediction:
    """The choice of "auto" for a kind of call once it has measured the layer.

    speedup: of ``strategy`` over the dense layer. measured: K and N of the measured layer behind it. far: whether that
    layer is very different.
    """

    call: Call
    strategy: str
    speedup: float
    reason: str
    measured: tuple[int, int]
    far: bool


def nearest(shape: Shape, call: Call, table: _tables.Table | None = None) -> tuple[tuple[int, int], bool]:
    """K and N of the measured layer nearest to a layer, and whether it is very different."""
    gated, k, n = shape
    _, gate, *measured = tuning.nearest(tuning.Problem(call.tokens, k, n, gated, call.training), table)
    found = measured[0], measured[1]
    return found, gate != gated or distance((k, n), found) > FAR


def _problem(shape: Shape, call: Call) -> tuning.Problem:
    """The sizes of a call. Layers lay their down weight out by rows in inference; in training it is the user's."""
    gated, k, n = shape
    return tuning.Problem(call.tokens, k, n, gated, call.training, down_copied=call.training)


def gpu_of(table: _tables.Table) -> str:
    """The name of the GPU that a table is of."""
    return table.machine.split("; ")[0].split(" (")[0]


def distance(size: tuple[int, int], measured: tuple[int, int]) -> float:
    """The factor between K, or K * N if that is larger, of two layers (K, N)."""
    return max(apart(size[0], measured[0]), apart(math.prod(size), math.prod(measured)))


def predict(report: LayerSparsity, call: Call, table: _tables.Table | None = None) -> Prediction:
    """Predict the strategy and speed of a call from a table of costs, by default the shipped one."""
    problem = _problem((report.gated, report.k, report.n), call)
    measured, far = nearest((report.gated, report.k, report.n), call, table)
    refusal = _refusal(report)
    if refusal:
        return Prediction(call, "dense", 1.0, refusal, measured, far)
    decision = tuning.decide(problem, report.figures, None, table)
    sparse = {name: cost for name, cost in decision.costs.items() if name != "dense"}
    reason = decision.reason
    if not sparse:
        reason = f"no sparse kernel was measured for {call}"
    elif decision.strategy == "dense" and min(sparse.values()) >= 1:
        reason = ", ".join(f"{name} would take {cost:.2f}" for name, cost in sparse.items()) + " of dense's time"
    return Prediction(call, decision.strategy, 1 / decision.costs[decision.strategy], reason, measured, far)


# Layers that are less than this much faster do not pay: GPUs of one model differ by more.
PAYS = 1.05
# Share of neurons beyond which nothing is promised: tables have patterns of up to a fifth.
MOST_SHARE = 1 / 4


def most_nonzeros(shape: Shape, call: Call, table: _tables.Table | None = None) -> int:
    """The most non-zeros per token with which a layer (gated, K, N) pays if tokens fire independently, or 0.

    At most ``MOST_SHARE`` of its neurons.
    """
    n, problem = shape[2], _problem(shape, call)

    def pays(nonzeros: int) -> bool:
        share = nonzeros / n
        decision = tuning.decide(problem, tuning.Figures(nonzeros, 1 - (1 - share) ** geometry.TOKEN_TILE), None, table)
        return decision.costs.get(decision.strategy, 1.0) * PAYS <= 1

    # from few to many in steps of 2 %, since a cost need not rise with them everywhere
    most, step = 0, 1
    while step <= n * MOST_SHARE and pays(step):
        most, step = step, max(step + 1, math.floor(step * 1.02))
    return most


def apart(a: int, b: int) -> float:
    """The factor between two sizes, at least 1."""
    return max(a / b, b / a)


def _refusal(report: LayerSparsity) -> str:
    """The reason why the sparse kernels refuse a layer of this size; "" if they do not."""
    operands = {
        "x": torch.empty(1, report.k, device="meta"),
        "w_up": torch.empty(report.n, report.k, device="meta"),
    }
    try:
        _admission.require_packable("sizes", operands, report.compression)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def speedup(reports: Sequence[LayerSparsity], predictions: Sequence[Prediction]) -> float:
    """Expected speed-up of all layers together over dense; each layer's time is proportional to its flops."""
    flops = [report.k * report.n * (3 if report.gated else 2) for report in reports]
    return sum(flops) / sum(flop / each.speedup for flop, each in zip(flops, predictions, strict=True))


def as_percent(value: float | None) -> str:
    if value is None:
        return "-"
    if not value:
        return "0"
    percent = 100 * value
    return "< 0.01 %" if percent < 0.01 else f"{percent:.{2 if percent < 0.995 else 1 if percent < 99.95 else 0}f} %"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lay lines of cells out in columns, right-aligned, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def figures_header(compression: int) -> list[str]:
    """The header of ``figures_cells``."""
    return [
        *("layer", "non-zeros", "p50", "p99", "max", "first token", f"> {HEAVY}", f"> N/{HEAVY_SHARE}"),
        *(f"tiles > {geometry.capacity(compression)}", "dead"),
        *(f"{'union ' if t == UNIONS[0] else ''}{t}" for t in UNIONS),
        *(f"{'hottest ' if h == HOTTEST[0] else ''}{h}" for h in HOTTEST),
    ]


def figures_cells(report: LayerSparsity) -> list[str]:
    """One line of the table of activations: a layer's figures."""
    return [
        *(str(report.number), f"{report.mean:,.1f}", f"{report.p50:,}", f"{report.p99:,}", f"{report.most:,}"),
        f"{report.first:,.1f}",
        *(as_percent(share) for share in (report.heavy, report.heavy_share, report.overflowing)),
        as_percent(report.dead / report.n),
        *(as_percent(report.unions.get(t)) for t in UNIONS),
        *(as_percent(report.hottest[h]) for h in HOTTEST),
    ]


def rows(reports: Sequence[LayerSparsity], predictions: Sequence[Sequence[Prediction]]) -> list[dict[str, Any]]:
    """One row per layer, with the columns of ``COLUMNS``; None if the text was too short for a union."""
    return [
        {
            "layer": report.number,
            "name": report.name,
            "kind": "gated" if report.gated else "non-gated",
            "activation": report.activation.name,
            "threshold": report.activation.threshold,
            "k": report.k,
            "n": report.n,
            "compression": report.compression,
            "tokens": report.tokens,
            "mean": report.mean,
            "p50": report.p50,
            "p99": report.p99,
            "max": report.most,
            "first_token": report.first,
            "heavy": report.heavy,
            "heavy_share": report.heavy_share,
            "overflowing": report.overflowing,
            "dead": report.dead,
            **{f"union_{t}": report.unions.get(t) for t in UNIONS},
            "candidates": report.candidates,
            **{f"hottest_{h}": report.hottest[h] for h in HOTTEST},
            **{
                f"{name}_{each.call.key}": value
                for each in row
                for name, value in (
                    ("strategy", each.strategy),
                    ("speedup", each.speedup),
                    ("measured", "x".join(map(str, each.measured))),
                    ("why", each.reason),
                )
            },
        }
        for report, row in zip(reports, predictions, strict=True)
    ]


def write_csv(path: Path, table: Sequence[dict[str, Any]]) -> None:
    """Write rows of the same columns, at least one."""
    with _files.replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
