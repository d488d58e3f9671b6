"""``unpack``: TwELL to dense. Spilled row-tiles come from the spill, all others from the words.

words and spill of n neurons, with the ``compression`` of their packing, become [M, n] of the spill's dtype. The format
stores whole tiles and not the number of neurons: a smaller n with the same number of tiles leaves out the rest.
"""

import torch
from torch import Tensor

from twell.choose import tuning
from twell.ops.library import STRIDE_MULTIPLE, check_matrix, check_rank, register
from twell.runtime import geometry
from twell.runtime.program import launch


def outputs(words: Tensor, spill: Tensor, n: int, compression: int) -> Tensor:
    """Uninitialised [M, n] of the spill's dtype; raises unless words and spill are those of n neurons."""
    check_rank("words", words)
    check_matrix("spill", spill)
    if n % STRIDE_MULTIPLE:
        raise ValueError(f"n must be a multiple of {STRIDE_MULTIPLE}, got {n}")
    m, tiles = words.shape[0], geometry.tiles(n)
    widths = {"words": tiles * geometry.words_per_tile(compression), "spill": tiles * geometry.TILE}
    for tensor, (name, width) in zip((words, spill), widths.items()):
        if tensor.shape != (m, width):
            what = f"[{m}, {width}] for {m} rows of {n} neurons at compression {compression}"
            raise ValueError(f"{name} must be {what}, got {list(tensor.shape)}")
    if words.dtype != torch.int32:
        raise TypeError(f"words must be torch.int32, got {words.dtype}")
    return spill.new_empty((m, n))


def _cpu(words: Tensor, spill: Tensor, n: int, compression: int) -> Tensor:
    out = outputs(words, spill, n, compression)
    m, tiles, width = words.shape[0], geometry.tiles(n), geometry.words_per_tile(compression)
    table = words.reshape(m, tiles, width)
    counts, entries = table[:, :, :1], table[:, :, 1:]
    spilled = counts > geometry.capacity(compression)

    dense = spill.reshape(m, tiles, geometry.TILE).masked_fill(~spilled, 0).view(spill.shape)
    row, tile, slot = ((torch.arange(width - 1, device="cpu") < counts) & ~spilled).nonzero(as_tuple=True)
    entry = entries[row, tile, slot]
    dense[row, (entry & 0xFFFF).long()] = (entry >> 16).to(torch.int16).view(spill.dtype)
    return out.copy_(dense[:, :n])


def _cuda(words: Tensor, spill: Tensor, n: int, compression: int) -> Tensor:
    out = outputs(words, spill, n, compression)
    if words.shape[0]:
        launch(tuning.unpack(spill.dtype), words, spill, out, geometry.words_per_tile(compression))
    return out


unpack = register(
    "unpack(Tensor words, Tensor spill, int n, int compression) -> Tensor", fake=outputs, cpu=_cpu, cuda=_cuda
)
