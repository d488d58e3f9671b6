"""Counts of the neurons that a layer fires, and the sparsity that they tell."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.activation import NAMES_OF_FAMILY, RELU, Activation
from twell.choose.plan import PACKED_DTYPES
from twell.integrations.analyze.layers import WatchedLayer, patterns
from twell.ops import screened
from twell.runtime import geometry, specs

TILE = geometry.TOKEN_TILE

# The int8 screen runs on so many tokens of each layer, on the CPU, where it takes as long as several dense layers.
SCREENED = 512
# Tokens of a call whose heaviest group is meant, and tokens of each call that are also counted in no order.
WINDOW = MIXED = 2048


@dataclass(frozen=True)
class LayerSparsity:
    """The sparsity of a layer. Shares are from 0 to 1.

    k, n: hidden size and neurons. float8: whether its weights are e4m3. tokens: of the text, 0 if the figures were not
    counted. mean: non-zeros per token. union, mixed: mean share of the neurons that 128 tokens fire that follow each
    other, and that come from many places of a batch; None if there were fewer tokens. most: non-zeros of the token that
    has most. dead: neurons that no token fired. heaviest: non-zeros per token of the heaviest 8 consecutive ones of
    2,048, in the mean. candidates: share of the neurons that the int8 screen lists for 128 tokens. reason: why it runs
    as without twell; "" if it need not.
    """

    name: str
    number: int
    gated: bool
    k: int
    n: int
    activation: Activation = RELU
    float8: bool = False
    tokens: int = 0
    mean: float = 0.0
    union: float | None = None
    mixed: float | None = None
    most: int | None = None
    dead: int | None = None
    heaviest: float | None = None
    candidates: float | None = None
    reason: str = ""

    @property
    def form(self) -> str:
        """Its activation in words."""
        name, level = NAMES_OF_FAMILY[self.activation.name], self.activation.threshold
        return f"{name} (threshold {level:g})" if not isinstance(level, Tensor) and level else name

    @property
    def work(self) -> int:
        """Weights of its projections."""
        return (2 + self.gated) * self.k * self.n


def labels(found: Sequence[LayerSparsity]) -> list[str]:
    """The number of each layer, or the name of each where the first number in one of them is another."""
    numbered = all(next(filter(str.isdecimal, at.name.split(".")), "") == str(at.number) for at in found)
    return [str(at.number) if numbered else at.name or "-" for at in found]


class Tally:
    """Counts of the neurons of one layer that fired so far: sums on the device, and four bytes for each 8 tokens."""

    def __init__(self, n: int, device: torch.device) -> None:
        self._n = n
        zeros = (torch.zeros(length, dtype=torch.int64, device=device) for length in (n + 1, n, 1, 1))
        self._histogram, self._fired, self._union, self._mixed = zeros
        self._waiting = torch.empty(0, n, dtype=torch.bool, device=device)
        self._groups: list[Tensor] = []
        self._tiles = self._tiles_mixed = 0
        # in tiles of 128 tokens: candidates and neurons that fire, and how many tokens these are
        self._listed = self._firing = self._screened = 0

    def add(self, pattern: Tensor) -> None:
        """Count ``pattern``, bool [tokens, N], true where a neuron fires; tokens follow those before."""
        counts = pattern.sum(1)
        self._histogram.index_add_(0, counts, torch.ones_like(counts))
        self._fired += pattern.sum(0)
        # consecutive tokens form tiles across calls
        block = torch.cat((self._waiting, pattern))
        tiles = len(block) // TILE
        self._union += self._fire_in_tiles(block)
        self._tiles += tiles
        groups = block[: tiles * TILE].sum(1).view(-1, geometry.STATS_ROWS).sum(1)
        self._groups.append(groups.to("cpu", torch.float32) / geometry.STATS_ROWS)
        self._waiting = block[tiles * TILE :].clone()

    def _fire_in_tiles(self, block: Tensor) -> Tensor:
        whole = len(block) // TILE
        return block[: whole * TILE].view(whole, TILE, self._n).any(1).sum()

    def watch(self, at: WatchedLayer, x: Tensor, y: Tensor) -> None:
        """Count a call on tokens x [M, K], of which the module made y or, before its call, x."""
        if not len(x):
            return
        self.screen(x, at)
        for pattern in patterns(at.activation, lambda rows: at.gates(x[rows], y[rows]), len(x), self._n):
            self.add(pattern)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0), device="cpu")[:MIXED].to(x.device)
        few, made = x[order], y[order]
        mixed = patterns(at.activation, lambda rows: at.gates(few[rows], made[rows]), len(few), self._n)
        self._mixed += self._fire_in_tiles(torch.cat(list(mixed)))
        self._tiles_mixed += len(few) // TILE

    def screen(self, x: Tensor, at: WatchedLayer) -> None:
        """Count the candidates of tokens x [M, K] in 16 bits, until ``SCREENED`` have been counted."""
        linear = at.linear
        whole = min(len(x), SCREENED - self._screened) // TILE * TILE
        if linear is None or not whole or x.shape[1] % 8 or x.shape[1] > specs.QUANTIZE_K_CLASSES[-1]:
            return
        dtype = x.dtype if x.dtype in PACKED_DTYPES else torch.bfloat16
        tokens, weight, *bias = (
            t.detach().to("cpu", dtype) for t in (x[:whole], linear.weight, linear.bias) if t is not None
        )
        listed = screened.count(tokens, weight, bias[0] if bias else None, at.activation)
        # of the same roundings
        fired = ~(F.linear(tokens, weight, *bias) <= at.activation.level(dtype))
        self._listed += int(listed.sum())
        self._firing += int(fired.view(-1, TILE, self._n).any(1).sum())
        self._screened += whole

    def _candidates(self, union: float) -> float | None:
        """The share of the neurons that the screen lists where ``union`` fires; None where it ran on no token."""
        if not self._screened:
            return None
        neurons = self._screened // TILE * self._n
        silent = neurons - self._firing
        return union + (1 - union) * max(self._listed - self._firing, 0) / silent if silent else 1.0

    def report(self, at: WatchedLayer) -> LayerSparsity | None:
        """The figures of all tokens; None without any."""
        n, histogram = self._n, self._histogram.cpu()
        tokens = int(histogram.sum())
        if not tokens:
            return None
        union = int(self._union) / (self._tiles * n) if self._tiles else None
        heaviest = None
        if self._tiles:
            groups = torch.cat(self._groups)
            size = min(WINDOW // geometry.STATS_ROWS, len(groups))
            heaviest = float(groups[: len(groups) // size * size].view(-1, size).amax(1).mean())
        return LayerSparsity(
            *(at.name, at.number, at.gated, at.k, n, at.activation, at.float8, tokens),
            mean=int((histogram * torch.arange(n + 1, device="cpu")).sum()) / tokens,
            union=union,
            mixed=int(self._mixed) / (self._tiles_mixed * n) if self._tiles_mixed else None,
            most=int(histogram.nonzero().max()),
            dead=int((self._fired == 0).sum()),
            heaviest=heaviest,
            candidates=self._candidates(union or 0.0),
        )
