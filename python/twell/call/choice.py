"""Layers without a gate of which PyTorch makes the pre-activations, and of those kernels take what is chosen here.

Thresholds that are trained, by a straight-through estimator (Rajamanoharan et al., 2024, arXiv 2407.14435). A gate g of
a neuron with threshold t is within the window if |g - t| < bandwidth / 2. With dh = dy . w_down + dl1 and dn, the
gradient of the number of non-zeros,

    dt = - sum over tokens of (t dh + dn) / bandwidth, of those within the window.

And BatchTopK (Bussmann et al., 2024, arXiv 2412.06410): of all tokens together the largest relu(g), of equal ones those
of the first tokens, and of a token the first neurons.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import ops
from twell.base.activation import BATCH_TOP_K, RELU, TOP_K, Activation
from twell.base.arguments import require_positive
from twell.call.autograd import first_order, gradients_of
from twell.choose.site import tokens_of
from twell.ops import hybrid
from twell.ops.library import unviewed
from twell.ops.operands import Layer, Mains
from twell.runtime import geometry, modes

# neurons whose windows are multiplied with dy together
_BLOCK = 8192


class Selection(NamedTuple):
    """What is kept of pre-activations: those above a ``threshold`` [N], or the ``most`` of all tokens together.

    ``least``, 0-d and infinite, becomes the least of the latter, if there is one.
    """

    threshold: Tensor | None = None
    bandwidth: float = 0.0
    most: int = 0
    least: Tensor | None = None

    def of_tokens(self, x: Tensor, w_up: Tensor, b_up: Tensor | None) -> Tensor:
        """The gate of x [M, K], 0 where it is not among the ``most``."""
        gate = F.linear(x, w_up, b_up)
        return gate.masked_fill_(~largest(gate, self.most, self.least), 0)

    def level(self, dtype: torch.dtype) -> Tensor:
        """The thresholds, as kernels have them."""
        assert self.threshold is not None
        return self.threshold.detach().clamp(min=0).to(dtype)


def choice_of(x: Any, activation: Any, threshold: Any, k: Any, bandwidth: Any) -> Selection | None:
    """What PyTorch chooses of the pre-activations of a call, if it does; raises for ``k`` or ``bandwidth`` amiss."""
    if k is None and activation in (TOP_K, BATCH_TOP_K):
        raise ValueError(f'k must be given with activation "{activation}", got None')
    if k is not None and activation not in (TOP_K, BATCH_TOP_K):
        raise ValueError(f'k must be None unless activation is "topk" or "batchtopk", got {k} with {activation!r}')
    if bandwidth is not None:
        require_positive("bandwidth", bandwidth)
        if activation != "fatrelu" or not isinstance(threshold, Tensor) or threshold.dim() != 1:
            got = f"{list(threshold.shape)}" if isinstance(threshold, Tensor) else threshold
            raise ValueError(f'bandwidth must be of "fatrelu" with a threshold [N], got {activation!r} with {got}')
        if modes.functorch() or modes.has_tangent(threshold):
            got = "a transform of torch.func or a forward-mode tangent"
            raise NotImplementedError(f"bandwidth: a trained threshold takes plain backward passes, got {got}")
        if threshold.requires_grad and torch.is_grad_enabled():
            return Selection(threshold, float(bandwidth))
    if k is not None and (isinstance(threshold, Tensor) or threshold != 0):
        raise ValueError(f'threshold must be 0 with activation "{activation}", got {threshold}')
    if activation != BATCH_TOP_K:
        return None
    require_positive("k", k)
    return Selection(most=int(k * tokens_of(x)))


def bounds(level: Tensor, bandwidth: float) -> tuple[Tensor, Tensor]:
    """The values of the same dtype between which gates are within the windows of thresholds [N]."""
    center = level.double()
    low, high = center - bandwidth / 2, center + bandwidth / 2
    # no gate lies between a bound and the next value outside
    below, above = low.to(level.dtype), high.to(level.dtype)
    below = torch.where(below.double() > low, _next(below, -1), below)
    return below, torch.where(above.double() < high, _next(above, 1), above)


def _next(values: Tensor, step: int) -> Tensor:
    """The values of the same dtype above (1) or below (-1) finite ones."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
    bits = values.view(integers)
    # of zero the least value with the sign of the step
    away = torch.where(values == 0, step, values.sign()) == step
    zero = torch.full_like(bits, 1 if step > 0 else torch.iinfo(integers).min + 1)
    return torch.where(values == 0, zero, torch.where(away, bits + 1, bits - 1)).view(values.dtype)


def largest(gate: Tensor, most: int, least: Tensor | None = None) -> Tensor:
    """Which of the gates [M, N] are the ``most`` largest above zero, of equal ones the first; and all that are NaN."""
    values = gate.flatten().topk(min(most, gate.numel()), sorted=False).values
    if not len(values):
        return torch.zeros_like(gate, dtype=torch.bool)
    if least is not None:
        least.copy_(torch.where(values > 0, values, torch.inf).amin())
    level = values.masked_fill(values.isnan(), torch.inf).amin().clamp(min=0)
    # of the gates at the level those of the first tokens, in one token the first neurons
    equal = gate == level
    in_row = equal.sum(1)
    room = (most - (~(values <= level)).sum() - (in_row.cumsum(0) - in_row)).clamp(min=0)
    under = torch.where((room >= in_row) & (level > 0), _next(level, -1), level)
    chosen = ~(gate <= under[:, None])
    # at most one token has some of its gates at the level, and not all
    last = ((room > 0) & (room < in_row) & (level > 0)).to(torch.uint8).argmax().view(1)
    part = equal[last] & (equal[last].cumsum(1) <= room[last])
    return chosen.index_put_((last,), (part & (level > 0)) | chosen[last])


def hidden_of(gate: Tensor, choice: Selection) -> tuple[Tensor, Tensor]:
    """h [..., N] by PyTorch's operators, and the number of its non-zeros (0-d, float32), both with gradients."""
    if choice.threshold is not None:
        return _Jump.apply(gate, choice.threshold, choice.bandwidth)  # type: ignore[no-untyped-call, no-any-return]
    chosen = largest(gate.detach().reshape(-1, gate.shape[-1]), choice.most, choice.least).view(gate.shape)
    return torch.where(chosen, gate, 0), chosen.sum(dtype=torch.float32)


class _Jump(torch.autograd.Function):
    """JumpReLU of dense gates, and the number of its non-zeros."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, threshold: Tensor, bandwidth: float) -> tuple[Tensor, Tensor]:
        choice = Selection(threshold, bandwidth)
        level = choice.level(gate.dtype)
        ctx.save_for_backward(gate, level, threshold)
        ctx.bandwidth = bandwidth
        silent = gate <= level
        return gate.masked_fill(silent, 0), (gate.numel() - silent.sum()).float()

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dn: Tensor) -> tuple[Tensor | None, ...]:
        gate, level, threshold = ctx.saved_tensors
        wide = torch.promote_types(gate.dtype, torch.float32)
        below, above = bounds(level, ctx.bandwidth)
        near = (gate > below) & (gate < above)
        # one token may have no other dimension, and a sum over none of them is one over all
        sums = torch.where(near, dh, 0).reshape(-1, len(level)).sum(0, dtype=wide)
        own = level.to(wide) * sums + dn * near.reshape(-1, len(level)).sum(0)
        return dh.masked_fill(gate <= level, 0), (-own / ctx.bandwidth).to(threshold.dtype), None


def ffn(layer: Layer, choice: Selection, compression: int, counts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """y, the sum of |h| and the number of non-zeros (float32) of a sparse layer, all with gradients."""
    x, w_up, _, w_down, b_up, _, b_down = layer[:7]
    matrix, n = x.reshape(-1, x.shape[-1]), len(w_up)
    if geometry.hybrid_capacity(len(matrix), n) < choice.most:
        most, got = hybrid.most_of_each(n), choice.most / max(len(matrix), 1)
        expected = f"at most {most} of {n} neurons in training"
        raise NotImplementedError(f'k must be {expected}, got {got:g}; "auto" is dense then')
    how = choice._replace(threshold=None), compression, counts
    y, l1, nonzeros = _Chosen.apply(how, matrix, w_up, w_down, b_up, b_down, choice.threshold)  # type: ignore[no-untyped-call]
    return (y if x.dim() == 2 else unviewed(y, x.shape)), l1, nonzeros


def inference(
    layer: Layer, choice: Selection, compression: int, strategy: str, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same without gradients, by a sparse strategy; the choice is one of ``most``."""
    x, w_up, _, w_down, b_up, _, b_down = layer[:7]
    gate = choice.of_tokens(x.reshape(-1, x.shape[-1]), w_up, b_up)
    if counts is not None:
        counts += (gate != 0).sum(0)
    operands = None, None, None, w_down.t(), None, None, b_down
    y, l1, nonzeros = ops.ffn_aux(*operands, compression, strategy, None, gate=gate)
    return (y if x.dim() == 2 else unviewed(y, x.shape)), l1, nonzeros


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: tuple[Selection, int, Tensor | None], *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, w_up, w_down, b_up, b_down, threshold = tensors
        choice, compression, firing = how
        choice = choice._replace(threshold=threshold)
        n, dtype = len(w_up), x.dtype
        level = None if threshold is None else choice.level(dtype)
        sliced = len(geometry.neuron_slices(n)) > 1
        kept = x.new_empty(hybrid.words(x, n, False), dtype=torch.int32)
        limits = () if level is None else (level, *bounds(level, choice.bandwidth))
        # of each slice, which gates are within their windows; and the counts of ``window``
        windows: list[Tensor] = []
        counts = x.new_zeros((3, n if limits else 0), dtype=torch.int32)
        y = torch.zeros_like(x, dtype=torch.float32 if sliced else dtype)
        if sliced and b_down is not None:
            y = y + b_down
        l1 = x.new_zeros((), dtype=torch.float32)
        nonzeros = x.new_zeros((), dtype=torch.float32)
        for first, last, own, room in hybrid.split(kept, x, n, False) if len(x) else ():
            if limits:
                gate = F.linear(x, w_up[first:last], None if b_up is None else b_up[first:last])
                near, counts[:, first:last] = ops.window(gate, *(limit[first:last] for limit in limits))
                windows.append(near)
            else:
                # one slice has all
                gate = choice.of_tokens(x, w_up, b_up)
            if firing is not None:
                firing[first:last] += counts[2, first:last] if limits else (~(gate <= 0)).sum(0)
            operands = None, None, None, w_down[:, first:last].t(), None, None, None if sliced else b_down
            found, of_l1, of_nonzeros, pattern = ops.hybrid_forward(*operands, compression, room, gate=gate)
            own.copy_(pattern)
            # not in place: a graph of torch 2.11 has no gradient for a result that is changed so
            l1, nonzeros = l1 + of_l1, nonzeros + of_nonzeros
            y = y + found if sliced else found
        ctx.save_for_backward(x, w_up, w_down, b_up, threshold, level, counts, kept, *windows)
        ctx.bandwidth = choice.bandwidth
        ctx.set_materialize_grads(False)
        # more than the most are chosen of NaN alone, for which the pattern may have no room
        ctx.broken = nonzeros > choice.most if level is None else None
        if level is None:
            ctx.mark_non_differentiable(nonzeros)
        return y.to(dtype), l1, nonzeros

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dl1: Tensor | None, dn: Tensor | None) -> tuple[Tensor | None, ...]:
        x, w_up, w_down, b_up, threshold, level, counts, kept, *windows = saved = ctx.saved_tensors
        of_x, of_up, of_down, of_b_up, of_b_down, of_threshold = ctx.needs_input_grad[1:]
        found: Sequence[Tensor | None] = (None,) * 7
        d_threshold = db_down = None
        with torch.no_grad():
            if ctx.broken is not None and dy is not None:
                dy = torch.where(ctx.broken, torch.nan, dy)
            if (of_x or of_up or of_down or of_b_up) and not (dy is None and dl1 is None):
                bias, activation = b_up, RELU
                if level is not None:
                    bias = torch.cat([torch.zeros_like(level) if b_up is None else b_up, level])
                    activation = Activation("fatrelu")
                needs = of_x, of_up, False, of_down, of_b_up, False, False, False
                pair = x, w_up, None, w_down, bias, None, kept, None
                found = gradients_of(dy, dl1, pair, needs, Mains(), activation)
            if of_threshold:
                d_threshold = _of_thresholds(ctx.bandwidth, windows, counts, level, w_down, dy, dl1, dn)
                d_threshold = d_threshold.to(threshold.dtype)
            if of_b_down and dy is not None:
                db_down = dy.sum(0, dtype=torch.float32).to(dy.dtype)
        dx, dw_up, _, dw_down, db_up, *_ = found
        gradients = [dx, dw_up, dw_down, db_up if db_up is None else db_up[: len(w_up)], db_down, d_threshold]
        if not modes.compiling() and torch.is_grad_enabled():
            gradients = first_order("sparse_ffn", gradients, (dy, dl1, dn, *saved))
        return None, *gradients


def _of_thresholds(
    bandwidth: float, windows: Sequence[Tensor], counts: Tensor, level: Tensor, w_down: Tensor, *upstream: Tensor | None
) -> Tensor:
    """The gradient of the thresholds, without a dh: their windows times dy, and rows of that times those of w_down."""
    dy, dl1, dn = upstream
    found, first = torch.zeros_like(level, dtype=torch.float32), 0
    parts: list[Tensor] = []
    if dy is not None:
        for near in [each[:, at : at + _BLOCK] for each in windows for at in range(0, each.shape[1], _BLOCK)]:
            rows = w_down[:, first : first + near.shape[1]].t()
            parts.append((_product(near, dy) * rows.float()).sum(1))
            first += near.shape[1]
        found = torch.cat(parts) if parts else found
    if dl1 is not None:
        # |h| has no slope at zero
        found = found + counts[1] * dl1
    found = found * level
    if dn is not None:
        found = found + counts[0] * dn
    return found / -bandwidth


def _product(near: Tensor, dy: Tensor) -> Tensor:
    """Flags [M, n] transposed times dy [M, K], not rounded to 16 bits: rows of a down weight may cancel most of it."""
    if dy.is_cuda:
        return torch.mm(near.to(dy.dtype).t(), dy, out_dtype=torch.float32)
    return near.float().t() @ dy.float()
