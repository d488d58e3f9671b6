"""Matrices side by side, and products of low rank beside them: what a layer with adapters makes around the kernels.

In PyTorch's own operators a layer's x with a few more columns, a slice of y, and their gradients are six more passes
over all tokens; 16-bit values are copied one by one. Here they are copied by eight bytes, and each product is added in
the pass that makes it. A compiler gets PyTorch's operators, which it fuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twell import _modes


def joined(parts: Sequence[Tensor], width: int) -> Tensor:
    """Matrices [R, ...] side by side, with zeros behind them up to ``width`` columns; differentiable."""
    if _modes.compiling():
        return torch.cat(_padded(parts, width), 1)
    return cast(Tensor, _Joined.apply(width, *parts))  # type: ignore[no-untyped-call]


def widened(x: Tensor, down: Tensor, width: int) -> Tensor:
    """``[x, x @ down^T, 0]`` [M, width] for x [M, K] and down [R, K]; differentiable."""
    if _modes.compiling():
        return joined([x, x @ down.t()], width)
    return cast(Tensor, _Widened.apply(x, down, width))  # type: ignore[no-untyped-call]


def narrowed(y: Tensor, up: Tensor) -> Tensor:
    """``y[:, :K] + y[:, K : K + R] @ up^T`` for y [M, K + R or more] and up [K, R], which may be 0; differentiable."""
    if _modes.compiling():
        k, rank = up.shape
        return torch.addmm(y[:, :k], y[:, k : k + rank], up.t())
    return cast(Tensor, _Narrowed.apply(y, up))  # type: ignore[no-untyped-call]


def _padded(parts: Sequence[Tensor], width: int) -> list[Tensor]:
    """The matrices, and one of zeros behind them where they have fewer than ``width`` columns."""
    rows, own = parts[0].shape[0], sum([part.shape[1] for part in parts])
    return [*parts, *([parts[0].new_zeros((rows, width - own))] if own < width else [])]


def _side_by_side(parts: Sequence[Tensor], width: int) -> Tensor:
    """Matrices side by side, and zeros behind them."""
    parts = _padded(parts, width)
    if not all(map(_is_wide, parts)):
        return torch.cat(parts, 1)
    return torch.cat([part.view(torch.int64) for part in parts], 1).view(parts[0].dtype)


def _copied(matrix: Tensor) -> Tensor:
    """A contiguous copy."""
    if not _is_wide(matrix):
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(torch.int64).clone(memory_format=torch.contiguous_format).view(matrix.dtype)


def _is_wide(matrix: Tensor) -> bool:
    """Whether its rows are of whole eight bytes."""
    each, (pitch, step) = 8 // matrix.element_size(), matrix.stride()
    return step == 1 and not (matrix.shape[1] % each or pitch % each or matrix.storage_offset() % each)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, width: int, *parts: Tensor) -> Tensor:
        ctx.widths = [part.shape[1] for part in parts]
        return _side_by_side(parts, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        starts = [0, *itertools.accumulate(ctx.widths)]
        places = zip(starts, ctx.widths, ctx.needs_input_grad[1:])
        return None, *(upstream[:, at : at + width] if needed else None for at, width, needed in places)


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(x, down)
        return _side_by_side([x, x @ down.t()], width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, down = ctx.saved_tensors
        (rank, k), dx = down.shape, None
        low = upstream[:, k : k + rank].contiguous()
        if ctx.needs_input_grad[0]:
            dx = _copied(upstream[:, :k]).addmm_(low, down)
        return dx, low.t() @ x if ctx.needs_input_grad[1] else None, None


class _Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, up: Tensor) -> Tensor:
        k, rank = up.shape
        low, ctx.width = y[:, k : k + rank].contiguous(), y.shape[1]
        ctx.save_for_backward(low, up)
        return _copied(y[:, :k]).addmm_(low, up.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (low, up), dy = ctx.saved_tensors, None
        if ctx.needs_input_grad[0]:
            dy = _side_by_side([upstream, upstream @ up], ctx.width)
        return dy, upstream.t() @ low if ctx.needs_input_grad[1] else None
