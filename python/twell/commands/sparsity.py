"""The sparsity of a model's feed-forward layers on text: what ``twell analyze`` observes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell import _compaction
from twell._activation import RELU, Activation
from twell._runtime import geometry, specs
from twell.choose.plan import PACKED_DTYPES
from twell.choose.rates import Figures
from twell.commands import saved_model
from twell.commands.request import as_percent
from twell.commands.saved_model import Batch, Gate, Watched, WatchedLayer
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


@dataclass(frozen=True)
class LayerSparsity:
    """The sparsity of one layer. Shares are from 0 to 1; ``analyze.COLUMNS`` explains the figures.

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
    def figures(self) -> Figures:
        """The figures behind the choice of a strategy."""
        return Figures(self.mean, self.unions.get(geometry.TOKEN_TILE), None, self.candidates)


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
        dtype = x.dtype if x.dtype in PACKED_DTYPES else torch.bfloat16
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


def patterns(
    x: Tensor, linear: nn.Linear, activation: Activation = RELU, gate: Gate | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """The neurons that tokens x [M, K] fire, by plain PyTorch in their dtype: rows, and bool [rows, N]; NaN fires.

    gate: what makes their gates, where that is more than ``linear``.
    """
    level = activation.level(x.dtype)
    step = max(1, _compaction.CHUNK_GATES // linear.out_features)
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        gates = F.linear(x[rows], linear.weight, linear.bias) if gate is None else gate(x[rows])
        yield rows, ~(gates <= level)


def analyze(
    model: nn.Module,
    token_batches: Iterable[Batch],
    layers: Sequence[WatchedLayer] | None = None,
    done: Callable[[int], object] | None = None,
    others: Mapping[Watched, Callable[..., object]] = MappingProxyType({}),
) -> list[LayerSparsity]:
    """Report the sparsity of ``layers``, by default all twell layers of ``model``, on the text of ``token_batches``.

    The model should be in evaluation mode and stays as it is. ``done`` is called with the number of tokens of each
    batch, and the functions of ``others`` with the inputs of other modules, as by ``saved_model.observe``. Raises
    ValueError without layers or tokens, or if a layer's input is not finite.
    """
    layers = saved_model.layers(model) if layers is None else layers
    watched: list[Watched] = [*layers, *others]
    tallies = [Tally(layer.linear.out_features, layer.compression, layer.linear.weight.device) for layer in layers]

    def tally(i: int, x: Tensor, first: Tensor, *routes: Tensor) -> None:
        if i >= len(layers):
            others[watched[i]](x, first, *routes)
            return
        if layers[i].gate is None:
            tallies[i].screen(x, layers[i].linear, layers[i].activation)
        for rows, pattern in patterns(x, layers[i].linear, layers[i].activation, layers[i].gate):
            tallies[i].add(pattern, first[rows])

    seen = saved_model.observe(model, watched, token_batches, tally, done)
    if not watched or not seen:
        raise ValueError(f"analyze: expected layers and tokens, got {len(watched)} layers and {seen} tokens")
    return [tally.report(layer) for tally, layer in zip(tallies, layers, strict=True)]


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
