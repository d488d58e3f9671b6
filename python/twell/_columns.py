"""Matrices of parts that lie side by side, and products of low rank beside them: what adapters put around the kernels.

In PyTorch's own operators the weights of a layer with adapters, its x with a few more columns, a slice of y, and their
gradients are a node of the graph for each small step, and more passes over all tokens; 16-bit values are copied one by
one. Here weights are one node, values are copied by eight bytes, and each product is added in the pass that makes it. A
compiler gets PyTorch's operators, which it fuses.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from twell import _modes
from twell._autograd import first_order
from twell.ops.library import has_rows, transpose


class Part(NamedTuple):
    """``scale`` times ``source``, or times its transpose.

    origin: of a source that was made for one call, what makes it, and of what.
    """

    source: Tensor
    scale: float = 1
    transposed: bool = False
    origin: tuple[Callable[[], Tensor], Tensor] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the part."""
        rows, columns = self.source.shape
        return (columns, rows) if self.transposed else (rows, columns)

    def fill(self, place: Tensor) -> None:
        """Write it there, in the dtype of ``place``."""
        source, scale, transposed, _ = self
        if scale != 1:
            torch.mul(source.t() if transposed else source, scale, out=place)
        elif transposed and source.dtype == place.dtype and has_rows(source) and has_rows(place):
            transpose(source, place)
        else:
            _copy(source.t() if transposed else source, place)


class Matrix(NamedTuple):
    """Parts and, where one is a number, as many columns (or rows) of zeros; along ``dim``: 1 side by side."""

    parts: Sequence[Part | int]
    dtype: torch.dtype
    dim: int = 1

    @property
    def present(self) -> list[Part]:
        """The parts that are not zeros."""
        return [part for part in self.parts if isinstance(part, Part)]

    def lengths(self) -> list[int]:
        """The columns, or rows, of each part."""
        return [part.shape[self.dim] if isinstance(part, Part) else part for part in self.parts]

    def is_source(self) -> bool:
        """Whether it is a tensor that there is already."""
        first, *rest = self.parts
        if rest or not isinstance(first, Part) or first.source.dtype != self.dtype:
            return False
        return first.scale == 1 and not first.transposed

    def made(self) -> Tensor:
        """The matrix, without a graph; the tensor itself where it is one."""
        if self.is_source():
            return self.present[0].source
        first, lengths = self.present[0], self.lengths()
        shape = [*first.shape]
        shape[self.dim] = sum(lengths)
        out, start = first.source.new_empty(shape, dtype=self.dtype, requires_grad=False), 0
        for part, length in zip(self.parts, lengths):
            place = out.narrow(self.dim, start, length)
            start += length
            if isinstance(part, Part):
                part.fill(place)
            elif length:
                place.zero_()
        return out

    def kept(self) -> tuple[Callable[[], Tensor], list[Tensor]]:
        """What makes it again, of the tensors of now, whatever modules hold then; and those tensors."""
        nothing: Any = None
        parts = [part._replace(source=nothing) if isinstance(part, Part) else part for part in self.parts]
        # their memory, of which `.data = other` takes the parameter away
        sources = [part.source.detach() if part.origin is None else part.origin[1] for part in self.present]

        def make() -> Tensor:
            now = iter(sources)
            filled: list[Part | int] = []
            for part in parts:
                if isinstance(part, Part):
                    source = next(now)
                    part = part._replace(source=source if part.origin is None else part.origin[0]())
                filled.append(part)
            return self._replace(parts=filled).made()

        return make, sources

    def by_torch(self) -> Tensor:
        """The matrix by operators that a compiler differentiates and fuses."""
        if self.is_source():
            return self.present[0].source
        first = self.present[0]
        found = []
        for part, length in zip(self.parts, self.lengths()):
            if isinstance(part, Part):
                source = part.source.t() if part.transposed else part.source
                found.append((source * part.scale if part.scale != 1 else source).to(self.dtype))
            elif length:
                shape = [*first.shape]
                shape[self.dim] = length
                found.append(first.source.new_zeros(shape, dtype=self.dtype))
        return torch.cat(found, self.dim)


def assembled(matrices: Sequence[Matrix]) -> list[Tensor]:
    """The matrices, differentiable with respect to their parts."""
    if _modes.compiling():
        return [matrix.by_torch() for matrix in matrices]
    new = [matrix for matrix in matrices if not matrix.is_source()]
    sources = [part.source for matrix in new for part in matrix.present]
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        made: Any = iter(_Assembled.apply(new, *sources))  # type: ignore[no-untyped-call]
    else:
        made = iter([matrix.made() for matrix in new])
    return [matrix.present[0].source if matrix.is_source() else next(made) for matrix in matrices]


def widened(x: Tensor, down: Tensor, width: int) -> Tensor:
    """``[x, x @ down^T, 0]`` [M, width] for x [M, K] and down [R, K]; differentiable."""
    if _modes.compiling():
        parts = [Part(x), Part(x @ down.t())]
        return Matrix([*parts, width - sum([part.shape[1] for part in parts])], x.dtype).by_torch()
    return cast(Tensor, _Widened.apply(x, down, width))  # type: ignore[no-untyped-call]


def narrowed(y: Tensor, up: Tensor) -> Tensor:
    """``y[:, :K] + y[:, K : K + R] @ up^T`` for y [M, K + R or more] and up [K, R], which may be 0; differentiable."""
    if _modes.compiling():
        k, rank = up.shape
        return torch.addmm(y[:, :k], y[:, k : k + rank], up.t())
    return cast(Tensor, _Narrowed.apply(y, up))  # type: ignore[no-untyped-call]


def _copy(source: Tensor, place: Tensor) -> None:
    """Fill ``place``; eight bytes at a time where rows are of whole ones."""
    if source.dtype == place.dtype and _is_wide(source) and _is_wide(place):
        source, place = source.view(torch.int64), place.view(torch.int64)
    place.copy_(source)


def _is_wide(matrix: Tensor) -> bool:
    """Whether its rows are of whole eight bytes, in memory as they are."""
    if matrix.is_neg() or _is_batched(matrix):
        return False
    each, (pitch, step) = 8 // matrix.element_size(), matrix.stride()
    return step == 1 and not (matrix.shape[1] % each or pitch % each or matrix.storage_offset() % each)


def _with_product(x: Tensor, other: Tensor, width: int) -> Tensor:
    """``[x, x @ other, 0]`` [M, width]."""
    (m, k), rank = x.shape, other.shape[1]
    if _is_batched(x):
        return Matrix([Part(x), Part(x @ other), width - k - rank], x.dtype).by_torch()
    out = x.new_empty((m, width))
    _copy(x, out[:, :k])
    torch.mm(x, other, out=out[:, k : k + rank])
    if k + rank < width:
        out[:, k + rank :].zero_()
    return out


# is_grads_batched=True makes batched tensors without a transform of torch.func
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that has no derivative, which is an error if one is asked for."""

    @functools.wraps(backward)
    def run(ctx: Any, *upstream: Tensor | None) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if torch.is_grad_enabled():
            gradients = first_order("a layer with adapters", gradients, (*upstream, *ctx.saved_tensors))
        return tuple(gradients)

    return run


class _Assembled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrices: Sequence[Matrix], *sources: Tensor) -> tuple[Tensor, ...]:
        # without the sources: dequantised weights must not live until backward
        ctx.places = []
        for index, matrix in enumerate(matrices):
            start = 0
            for part, length in zip(matrix.parts, matrix.lengths()):
                if isinstance(part, Part):
                    how = matrix.dim, start, length, part.scale, part.transposed, part.source.dtype
                    ctx.places.append((index, *how))
                start += length
        ctx.set_materialize_grads(False)
        return tuple([matrix.made() for matrix in matrices])

    @staticmethod
    @_once
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        found: list[Tensor | None] = []
        for (index, dim, start, length, scale, transposed, dtype), needed in zip(ctx.places, ctx.needs_input_grad[1:]):
            of = upstream[index]
            if not needed or of is None:
                found.append(None)
                continue
            of = of.narrow(dim, start, length)
            of = (of.t() if transposed else of).to(dtype)
            # a view would hold the gradient of the whole matrix
            found.append(of * scale if scale != 1 else of.contiguous())
        return None, *found


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, width: int) -> Tensor:
        # its memory, of which `.data = other` takes a parameter away
        ctx.save_for_backward(x, down.detach())
        return _with_product(x, down.t(), width)

    @staticmethod
    @_once
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, down = ctx.saved_tensors
        (rank, k), dx = down.shape, None
        low = upstream[:, k : k + rank]
        if ctx.needs_input_grad[0]:
            if _is_batched(upstream):
                dx = upstream[:, :k] + low @ down
            else:
                dx = torch.empty_like(x)
                _copy(upstream[:, :k], dx)
                dx.addmm_(low, down)
        return dx, low.t() @ x if ctx.needs_input_grad[1] else None, None


class _Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, up: Tensor) -> Tensor:
        k, rank = up.shape
        low, ctx.width = y[:, k : k + rank], y.shape[1]
        ctx.save_for_backward(low.contiguous() if ctx.needs_input_grad[1] else None, up)
        narrow = y.new_empty((len(y), k))
        _copy(y[:, :k], narrow)
        return narrow.addmm_(low, up.t()) if rank else narrow

    @staticmethod
    @_once
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (low, up), dy = ctx.saved_tensors, None
        if ctx.needs_input_grad[0]:
            dy = _with_product(upstream, up, ctx.width)
        return dy, upstream.t() @ low if ctx.needs_input_grad[1] else None
