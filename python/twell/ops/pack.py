"""``pack``: a dense gate [M, N], before its activation, in TwELL. words, spill, stats = TwELL of relu(gate).

With a ``threshold`` values up to it are zero, too. A ``bias`` [2 N] has a threshold for each neuron in its second half;
the first is not read, as the gate has its biases. With ``levels`` int32 [M, 2] the gates that ``top_k`` chose are kept,
in place of those above a threshold. What comes out is what ``gate_pack`` makes of the same gate.

gate is bfloat16 or float16; ``compression``, words, spill and stats are as in ``gate_pack``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import tuning
from twell._activation import Activation, activation_of, threshold_pair
from twell._runtime import geometry
from twell._runtime.program import Program, View
from twell.ops.library import (
    STRIDE_MULTIPLE,
    Shape,
    bias_view,
    blocks,
    check,
    check_matrix,
    laid_bias,
    new,
    register,
    rows,
)
from twell.ops.operands import run
from twell.ops.top_k import kept

Packed = tuple[Tensor, Tensor, Tensor]


def shapes(dtype: torch.dtype, m: int, n: int, compression: int) -> tuple[Shape, Shape, Shape]:
    """Of words int32 [M, T*W], spill [M, T*256] of the gate's dtype and stats int32 [ceil(M/8), T, 2]."""
    tiles = geometry.tiles(n)
    words = torch.int32, m, tiles * geometry.words_per_tile(compression)
    return words, (dtype, m, tiles * geometry.TILE), stats_shape(m, n)


def stats_shape(m: int, n: int) -> Shape:
    """Of stats alone, which are the same at any compression."""
    return torch.int32, blocks(m, geometry.STATS_ROWS), geometry.tiles(n), 2


def outputs(
    gate: Tensor, compression: int, threshold: float = 0.0, bias: Tensor | None = None, levels: Tensor | None = None
) -> Packed:
    """Uninitialised words, spill and stats of a gate [M, N]; raises unless the format takes it."""
    check_matrix("gate", gate)
    activation_of("fatrelu", threshold).level(gate.dtype)
    m, n = gate.shape
    if not 0 < n <= geometry.MAX_NEURONS or n % STRIDE_MULTIPLE:
        most = geometry.MAX_NEURONS
        raise ValueError(f"gate must have a positive multiple of {STRIDE_MULTIPLE} neurons up to {most}, got {n}")
    if bias is not None:
        check("bias", bias, (2 * n,), gate.dtype)
    if levels is not None:
        check("levels", levels, (m, 2), torch.int32)
        if threshold or bias is not None:
            raise ValueError("levels must be given without thresholds, got both")
    words, spill, stats = new(gate, shapes(gate.dtype, m, n, compression))
    return words, spill, stats


def _cpu(
    gate: Tensor, compression: int, threshold: float = 0.0, bias: Tensor | None = None, levels: Tensor | None = None
) -> Packed:
    packed = outputs(gate, compression, threshold, bias, levels)
    if levels is not None:
        return fill_on_cpu(packed, torch.where(kept(gate, levels), gate.relu(), 0), compression)
    activation = Activation("fatrelu", threshold if bias is None else bias[gate.shape[1] :])
    return fill_on_cpu(packed, activation.after(gate, inplace=False), compression)


def fill_on_cpu(packed: Packed, gate: Tensor, compression: int) -> Packed:
    """Fill ``packed`` with ``gate`` [M, N] behind its activation, and return it."""
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


def _cuda(
    gate: Tensor, compression: int, threshold: float = 0.0, bias: Tensor | None = None, levels: Tensor | None = None
) -> Packed:
    packed = outputs(gate, compression, threshold, bias, levels)
    if len(gate):
        given = rows(gate), *packed, laid_bias(bias), None if levels is None else levels.contiguous()
        run(_build, given, compression, activation_of("fatrelu", threshold))
    return packed


def _build(p: Program, *given: Any) -> None:
    gate, words, spill, stats, bias, levels, compression, activation = given
    pack_gate(p, gate, words, spill, stats, compression, activation, 0, bias, levels)


def pack_gate(
    p: Program,
    gate: View,
    words: View,
    spill: View,
    stats: View,
    compression: int,
    activation: Activation,
    counters: int = 0,
    bias: View | None = None,
    levels: View | None = None,
) -> View | None:
    """Launch what fills words, spill and stats; ``gate`` may be the first columns of the spill.

    ``bias`` is one that has been added, with thresholds behind it or not. The kernel zeroes int32 [counters] for those
    of up_down, which are returned.
    """
    zeroed = p.scratch(torch.int32, counters)
    form = geometry.words_per_tile(compression), threshold_pair(activation, gate.dtype)
    levels = p.scratch(torch.int32, 0, 2) if levels is None else levels
    own = bias_view(p, bias, gate.dtype), levels
    p.launch(tuning.pack(gate.dtype), gate, words, spill, stats, zeroed, *own, *form)
    return zeroed if counters else None


pack = register(
    "pack(Tensor gate, int compression, float threshold=0.0, Tensor? bias=None, Tensor? levels=None) "
    "-> (Tensor words, Tensor spill, Tensor stats)",
    fake=outputs,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_up_down",
)
