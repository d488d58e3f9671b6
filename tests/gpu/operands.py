"""Operands that several GPU tests share: gates with a given pattern, and rows inside a wider buffer."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gates_with(counts: Tensor, n: int, seed: int = 0) -> Tensor:
    """Integers [M, n]: counts[m, t] positive ones at random places of tile t of row m, the rest at most zero."""
    m, tiles = counts.shape
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(m, tiles, 256, generator=generator)
    scores.view(m, -1)[:, n:] = 2
    active = scores.argsort(2).argsort(2) < counts[:, :, None]
    values = torch.randint(1, 9, active.shape, generator=generator)
    return torch.where(active, values, 1 - values).view(m, -1)[:, :n]


def padded(t: Tensor, left: int, right: int) -> Tensor:
    """The same values as rows of a wider buffer that is NaN elsewhere."""
    wide = torch.full((t.shape[0], left + t.shape[1] + right), math.nan, dtype=t.dtype, device=t.device)
    wide[:, left : left + t.shape[1]] = t
    return wide[:, left : left + t.shape[1]]
