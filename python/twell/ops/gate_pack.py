"""``gate_pack``: the gate projection, packed. words, spill, stats = TwELL of relu(x @ w_gate^T + b_gate).

With a ``threshold`` values up to it are zero, too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import tuning
from twell._activation import Activation, activation_of, threshold_pair
from twell._runtime import device, geometry, specs
from twell.ops.library import bias_vector, blocks, check_layer, empty, launch, register, rows

Packed = tuple[Tensor, Tensor, Tensor]


def outputs(x: Tensor, w_gate: Tensor, compression: int) -> Packed:
    """Uninitialised words int32 [M, T*W], spill [M, T*256] of x's dtype, stats int32 [ceil(M/8), T, 2]."""
    return *room(x, x.shape[0], w_gate, compression), figures(x, w_gate)


def room(x: Tensor, m: int, w_gate: Tensor, compression: int) -> tuple[Tensor, Tensor]:
    """Uninitialised words and spill of ``m`` tokens."""
    tiles = geometry.tiles(w_gate.shape[0])
    words = empty(x, (m, tiles * geometry.words_per_tile(compression)), torch.int32)
    return words, empty(x, (m, tiles * geometry.TILE))


def figures(x: Tensor, w_gate: Tensor) -> Tensor:
    """Uninitialised stats."""
    return empty(x, (blocks(x.shape[0], geometry.STATS_ROWS), geometry.tiles(w_gate.shape[0]), 2), torch.int32)


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
    packed = outputs(x, w_gate, compression)
    pack(x, w_gate, b_gate, packed, compression, activation_of("fatrelu", threshold))
    return packed


def pack(
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor | None,
    packed: Packed,
    compression: int,
    activation: Activation,
    invariant: bool = False,
    arrivals: Tensor | None = None,
) -> None:
    """Launch what fills ``packed``; if ``invariant``, with bits that do not depend on the number of tokens.

    Zeroes ``arrivals``, the counters of up_down's clusters.
    """
    (m, _), n = x.shape, w_gate.shape[0]
    if m == 0:
        return
    operands = (rows(x), rows(w_gate), bias_vector("b_gate", b_gate, n, x), *packed)
    multiprocessors, family = device.sm_count(x.device.index), tuning.family(x.device.index)
    # a cluster is two CTAs, one per multiprocessor; the portable family has none
    clusters = multiprocessors // 2
    spec = tuning.gate_pack(x.dtype, m, n, clusters, invariant, family)
    form = geometry.words_per_tile(compression), threshold_pair(activation, x.dtype)
    if isinstance(spec, specs.GatePackSpec):
        if arrivals is not None:
            arrivals.zero_()
        launch(spec, *operands, *form, clusters if family == specs.SM90 else multiprocessors)
    else:
        launch(spec, *operands, empty(x, 0, torch.int32) if arrivals is None else arrivals, *form)


gate_pack = register(
    "gate_pack(Tensor x, Tensor w_gate, Tensor? b_gate, int compression, float threshold=0.0) "
    "-> (Tensor words, Tensor spill, Tensor stats)",
    fake=_fake,
    cpu=on_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
)
