"""Matrices that are read from weights and adapters, and the layer on them, whose backward pass reads them again.

In PyTorch's own graph the weights of a layer with adapters would live until backward, and each small step would pass
over all tokens. Here all is one node. A compiler gets the operators without it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.call import autograd
from twell.ops.library import has_rows, transpose
from twell.runtime import modes


class Part(NamedTuple):
    """So many columns, or rows, of a matrix: ``scale`` times the source of this number, or zeros.

    dequantise: makes a matrix of a source that is none, and has no gradient. wanted: whether its source gets one.
    """

    length: int
    source: int | None = None
    dequantise: Callable[[Any], Tensor] | None = None
    scale: float = 1

    def wanted(self, needs: Sequence[bool]) -> bool:
        return self.source is not None and self.dequantise is None and needs[self.source]


def part(sources: list[Tensor], source: Tensor, length: int, *how: Any) -> Part:
    """The part of ``source``, which goes to the end of ``sources``."""
    sources.append(source)
    return Part(length, len(sources) - 1, *how)


class Matrix(NamedTuple):
    """Parts along ``dim``: 1 side by side."""

    parts: Sequence[Part]
    dtype: torch.dtype
    dim: int = 1

    @property
    def lengths(self) -> list[int]:
        return [each.length for each in self.parts]

    def read(self, sources: Sequence[Any]) -> Any:
        """The matrix, or the source that it is; None without parts."""
        found: list[Tensor] = []
        for each in self.parts:
            if each.source is None:
                shape = [*found[0].shape]
                shape[self.dim] = each.length
                found.append(found[0].new_zeros(shape))
                continue
            value = sources[each.source]
            value = each.dequantise(value) if each.dequantise else value
            found.append((value if each.scale == 1 else value * each.scale).to(self.dtype))
        if len(found) < 2 or self.dim or modes.compiling():
            return torch.cat(found, self.dim) if len(found) > 1 else found[0] if found else None
        # by rows of neurons, as kernels read a down weight
        out = found[0].new_empty((found[0].shape[1], sum(self.lengths)))
        for value, place in zip(found, torch.split(out, self.lengths, 1)):
            if has_rows(place):
                transpose(value, place)
            else:
                place.copy_(value.t())
        return out.t()

    def wanted(self, needs: Sequence[bool]) -> bool:
        return True in [each.wanted(needs) for each in self.parts]

    def give(self, d: Any, sources: Sequence[Tensor], found: list[Any], needs: Sequence[bool]) -> None:
        """Put the gradients of its sources that need one into ``found``; ``d`` is that of the matrix."""
        for each, of in zip(self.parts, d.split(self.lengths, self.dim) if d is not None and self.parts else ()):
            if each.source is not None and each.wanted(needs):
                of = of.to(sources[each.source].dtype)
                of = of if each.scale == 1 else of * each.scale
                # a view would hold the gradient of the whole matrix
                found[each.source] = of if len(self.parts) == 1 else of.contiguous()


def beside(x: Tensor, other: Tensor | None, width: int) -> Tensor:
    """``[x, x @ other, 0]`` [M, width]; x if it is as wide."""
    if x.shape[1] == width:
        return x
    wide = x if other is None else torch.cat([x, x @ other], 1)
    return F.pad(wide, (0, width - wide.shape[1]))


def narrowed(y: Tensor, raising: Tensor | None, k: int) -> Tensor:
    """``y[:, :K] + y[:, K : K + r] @ raising^T`` for y [M, K + R]; y if it is no wider than K."""
    if y.shape[1] == k or raising is None:
        # a view of an output of a node may not change in place
        return y if y.shape[1] == k else y[:, :k].clone(memory_format=torch.contiguous_format)
    return torch.addmm(y[:, :k], y[:, k : k + raising.shape[1]], raising.t())


class ReadFFN(torch.autograd.Function):
    """A layer on weights that are read from sources, and in backward again, so that none of them lives until then.

    matrices: gate and up [N, K + R], down [K + R, N]; lowering, A [r, K] of the columns ``x @ A^T`` behind x; raising,
    s B [K, r] of those of y. Inputs: their sources; x [M, K], [M, K + R] if its columns are made elsewhere, or None
    without products with it; and the arguments of ``_FFN``, of which a given gate and biases have gradients.
    """

    @staticmethod
    def forward(ctx: Any, matrices: Sequence[Matrix], lowering: Any, raising: Any, *inputs: Any) -> Any:
        (*sources, x, call, _, _, _), (wide, *_, b_gate, b_up, _, gate) = inputs[:-8], inputs[-8:]
        found = autograd.forward_pass(call, *inputs[-8:])
        if found is None:
            return None
        (y, l1, nonzeros, kept), k, low = found, matrices[2].lengths[0], None
        if raising is not None and matrices[4].wanted(ctx.needs_input_grad[3:]):
            low = y[:, k : k + raising.shape[1]].contiguous()
        y = narrowed(y, raising, k)
        # an output, through which a second derivative meets this node
        anchor = l1 if call.totals else y.new_empty(0)
        given = lowering, raising, low, autograd.saveable(b_gate), autograd.saveable(b_up), *sources
        # their memory, of which `.data = other` takes a parameter away
        own = [None if t is None else t.detach() for t in given]
        ctx.save_for_backward(anchor, wide, gate, kept, *own)
        # a note may hold the operands
        ctx.call, ctx.matrices, ctx.columns = call._replace(note=None), matrices, 0 if x is None else x.shape[1]
        ctx.set_materialize_grads(False)
        if call.totals:
            ctx.mark_non_differentiable(nonzeros)
        return y, anchor, nonzeros if call.totals else None

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dl1: Tensor | None, _: None) -> Any:
        call, matrices, needs = ctx.call, ctx.matrices, ctx.needs_input_grad[3:]
        anchor, wide, gate, kept, lowering, raising, low, b_gate, b_up, *sources = autograd.saved_of(ctx)
        *of_biases, of_gate = needs[-4:]
        of_x, found = needs[len(sources)], [None] * len(sources)
        k, wanted = matrices[2].lengths[0], [matrix.wanted(needs) for matrix in matrices]
        with torch.no_grad(), torch.autocast(anchor.device.type, enabled=False):
            w_gate, w_up, w_down = (matrix.read(sources) for matrix in matrices[:3])
            upstream = None if dy is None else beside(dy, raising, len(w_down))
            asked = of_x or wanted[3], *wanted[:3], *of_biases, of_gate
            saved = wide, w_gate, w_up, w_down, b_gate, b_up, kept, gate
            dx, *of_weights, db_gate, db_up, d_gate = autograd.backward_pass(call, upstream, dl1, saved, asked)
            db_down = autograd.of_bias(upstream) if of_biases[2] and upstream is not None else None
            columns = None if dx is None or lowering is None else dx[:, k : k + len(lowering)]
            d_lowering = columns.t() @ wide[:, :k] if columns is not None and wanted[3] else None
            d_raising = None if dy is None or low is None else dy.t() @ low
            for matrix, d in zip(matrices, (*of_weights, d_lowering, d_raising)):
                matrix.give(d, sources, found, needs)
            dx = dx if of_x else None
            if dx is not None and ctx.columns < dx.shape[1]:
                dx = dx[:, : ctx.columns].contiguous()
            if dx is not None and columns is not None:
                dx = dx + columns @ lowering
        gradients = [*found, dx, *[None] * 8, db_gate, db_up, db_down, d_gate]
        if torch.is_grad_enabled():
            gradients = autograd.first_order(call.name, gradients, (dy, dl1, anchor))
        return None, None, None, *gradients
