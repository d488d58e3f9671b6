"""``gate_pack``: the gate projection, packed. words, spill, stats = TwELL of relu(x @ w_gate^T + b_gate).

With a ``threshold`` values up to it are zero, too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import tuning
from twell._activation import Activation, activation_of, threshold_pair
from twell._runtime import geometry, specs
from twell._runtime.program import Program, View
from twell.ops.library import Shape, bias_view, blocks, check_layer, laid_bias, new, register, rows
from twell.ops.operands import Scaled, launched, run

Packed = tuple[Tensor, Tensor, Tensor]


def outputs(x: Tensor, w_gate: Tensor, compression: int) -> Packed:
    """Uninitialised words int32 [M, T*W], spill [M, T*256] of x's dtype, stats int32 [ceil(M/8), T, 2]."""
    words, spill, stats = new(x, shapes(x, x.shape[0], w_gate, compression))
    return words, spill, stats


def shapes(
    x: Tensor | View | Scaled, m: int, w_gate: Tensor | View | Scaled, compression: int
) -> tuple[Shape, Shape, Shape]:
    """Of words, spill and stats of ``m`` tokens."""
    tiles = geometry.tiles(w_gate.shape[0])
    return (
        (torch.int32, m, tiles * geometry.words_per_tile(compression)),
        (tuning.stored(x.dtype), m, tiles * geometry.TILE),
        stats_shape(m, w_gate.shape[0]),
    )


def stats_shape(m: int, n: int) -> Shape:
    """Of stats alone, which are the same at any compression."""
    return torch.int32, blocks(m, geometry.STATS_ROWS), geometry.tiles(n), 2


def scratch(p: Program, x: View | Scaled, m: int, w_gate: View | Scaled, compression: int) -> tuple[View, View]:
    """words and spill for ``m`` tokens as scratch of a program."""
    words, spill, _ = shapes(x, m, w_gate, compression)
    return p.scratch(*words), p.scratch(*spill)


def _fake(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, compression: int, threshold: float = 0.0) -> Packed:
    check_layer(x, w_gate, b_gate=b_gate)
    activation_of("fatrelu", threshold).level(x.dtype)
    return outputs(x, w_gate, compression)


def on_cpu(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, compression: int, threshold: float = 0.0) -> Packed:
    packed = _fake(x, w_gate, b_gate, compression, threshold)
    return fill_on_cpu(packed, gate_on_cpu(x, w_gate, b_gate, threshold), compression)


def gate_on_cpu(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, threshold: float) -> Tensor:
    """The gate [M, N] of x's dtype."""
    accumulator = x.float() @ w_gate.float().t()
    if b_gate is not None:
        accumulator += b_gate.float()
    return activation_of("fatrelu", threshold).after(accumulator.to(x.dtype))


def fill_on_cpu(packed: Packed, gate: Tensor, compression: int) -> Packed:
    """Fill ``packed`` with ``gate`` [M, N], and return it."""
    words, spill, stats = packed
    gate = F.pad(gate, (0, spill.shape[1] - gate.shape[1]))

    m, tiles, _ = tiled = (gate.shape[0], stats.shape[1], geometry.TILE)
    nonzero = gate != 0
    counts = nonzero.view(tiled).sum(2, dtype=torch.int32)
    overflows = counts > geometry.capacity(compression)

    # Row-major order of `nonzero` is ascending neurons; a value's place is its rank within its row-tile.
    row, neuron = nonzero.nonzero(as_tuple=True)
    rowtile = row * tiles + neuron // geometry.TILE
    through = counts.view(-1).cumsum(0)
    place = 1 + torch.arange(row.numel(), device="cpu") - (through - counts.view(-1))[rowtile]
    kept = place <= geometry.capacity(compression)
    entries = gate.view(torch.int16)[row, neuron].int() << 16 | neuron.int()
    table = words.zero_().view(m * tiles, geometry.words_per_tile(compression))
    table[:, 0] = counts.view(-1)
    table[rowtile[kept], place[kept]] = entries[kept]

    spill.copy_(gate.view(tiled).masked_fill(~overflows[:, :, None], 0).view(spill.shape))
    padding = stats.shape[0] * geometry.STATS_ROWS - m
    for i, figure in enumerate((counts, overflows.int())):
        stats[:, :, i] = F.pad(figure, (0, 0, 0, padding)).view(-1, geometry.STATS_ROWS, tiles).sum(1)
    return packed


def _cuda(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, compression: int, threshold: float = 0.0) -> Packed:
    packed = _fake(x, w_gate, b_gate, compression, threshold)
    if len(x):
        given = rows(x), rows(w_gate), laid_bias(b_gate), *packed
        run(pack, given, compression, activation_of("fatrelu", threshold))
    return packed


def pack(
    p: Program,
    x: View | Scaled,
    w_gate: View | Scaled,
    b_gate: View | None,
    words: View,
    spill: View,
    stats: View,
    compression: int,
    activation: Activation,
    invariant: bool = False,
    counters: int = 0,
) -> View | None:
    """Launch what fills words, spill and stats; if ``invariant``, with bits that do not depend on the other tokens.

    The kernel zeroes int32 [counters] for those of up_down, which are returned.
    """
    family, ctas = tuning.family(p.index), p.multiprocessors
    # a cluster is two CTAs, one per multiprocessor
    fast = x.fast if isinstance(x, Scaled) else True
    spec = tuning.gate_pack(x.dtype, x.shape[0], w_gate.shape[0], ctas // 2, invariant, family, fast)
    operands = *launched(x), *launched(w_gate), bias_view(p, b_gate, spill.dtype), words, spill, stats
    form = geometry.words_per_tile(compression), threshold_pair(activation, spill.dtype)
    zeroed = p.scratch(torch.int32, counters)
    if isinstance(spec, specs.GatePackSpec):
        # the portable family has no clusters
        p.launch(spec, *operands, zeroed, *form, ctas // 2 if family == specs.SM90 else ctas)
    elif isinstance(x, Scaled):
        # behind a kernel of this program, which waits for all before it
        p.launch(spec, *operands, zeroed, *form, int(bool(p.launches)))
    else:
        p.launch(spec, *operands, zeroed, *form)
    return zeroed if counters else None


gate_pack = register(
    "gate_pack(Tensor x, Tensor w_gate, Tensor? b_gate, int compression, float threshold=0.0) "
    "-> (Tensor words, Tensor spill, Tensor stats)",
    fake=_fake,
    cpu=on_cpu,
    cuda=_cuda,
)
