"""Weights in e4m3 (torch.float8_e4m3fn) with float32 scales: their record, a quantiser, and the layer in formulas.

For inference. A layer takes bfloat16 tokens x [M, K] to e4m3 with a scale each, and computes

    gate = bf16(act(x_q . g_q  s_g[n]  s_x[m] + b))
    h    = gate * (x_q . u_q  s_u[n]  s_x[m] + b)
    y    = sum over the gate's non-zeros n of h d_q[k, n]  s_d[k] + b

with gate and up [N, K] and down [K, N], as models hold them. Products of two e4m3 values are exact in float32.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.activation import RELU, Activation
from twell.base.arguments import require, require_choice
from twell.runtime import modes

Granularity = Literal["tensor", "row", "block"]
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "row", "block")
Biases = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_BIASES: Biases = (None, None, None)

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
# rows and columns of a block with one scale
BLOCK = 128
_SMALLEST = torch.finfo(torch.float32).tiny
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
# elements that are float32 at a time
_CHUNK = 1 << 24


class Float8(NamedTuple):
    """A matrix ``values * scale``, or one for each of E experts; ``float8`` makes it of other scales, such as [R, 1].

    values: e4m3 [R, C], experts [E, R, C]. scale: float32, of a tensor [], experts [E]; of each row [R], experts
    [E, R]; or of each block of 128 x 128, [ceil(R / 128), ceil(C / 128)], experts [E, ceil(R / 128), ceil(C / 128)].
    """

    values: Tensor
    scale: Tensor

    @property
    def granularity(self) -> Granularity:
        return GRANULARITIES[self.scale.dim() - self.values.dim() + 2]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def by_rows(self) -> Tensor:
        """The scale of each row, float32 [R], experts [E, R]. Raises ValueError for blocks."""
        if self.granularity == "block":
            raise ValueError('granularity must be "row" or "tensor" for scales by rows, got "block"')
        scale = self.scale if self.granularity == "row" else self.scale[..., None]
        return scale.expand(self.shape[:-1]).contiguous()

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The values by their scales, rounded once to ``dtype``; exact in float64."""
        wide = torch.promote_types(dtype, torch.float32)
        found = torch.empty(self.shape, dtype=dtype, device=self.device)
        for matrix, rows in _chunks(self.shape):
            part = self.values[matrix][rows].to(wide)
            found[matrix][rows] = part * _spread(self.scale[matrix], rows, self.shape[-1])
        return found


def checked(name: str, record: Float8) -> Float8:
    """``record`` if its scale is as in ``Float8``; of another, and on a CPU, by ``float8``, whose errors name it."""
    values, scale = record
    shapes = scale.shape == values.shape[:-2], scale.shape == values.shape[:-1]
    if any(shapes) and values.dtype == E4M3 and scale.dtype == torch.float32 and scale.device.type != "cpu":
        return record
    try:
        return float8(values, scale)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def float8(values: Tensor, scale: Tensor, granularity: Granularity | None = None) -> Float8:
    """The record of e4m3 values [R, C], or [E, R, C] of experts, that are to be multiplied by ``scale``.

    Scales are float32, bfloat16, float16 or float8_e8m0fnu, of shapes as in ``Float8`` or with lengths of 1 behind
    them: [1], [1, 1], [R, 1]; blocks also [ceil(R / 128), 1, ceil(C / 128), 1]. ``granularity`` is the one that the
    scale must have. Without it the first that fits counts, of "tensor", "row" and "block": a matrix of a single block
    is "tensor".

    Raises TypeError for other types and dtypes, ValueError for other shapes and for two devices. On a CPU scales must
    be finite and above 0; elsewhere a look at them would be a wait.
    """
    require("values", values, Tensor, "a tensor")
    require("scale", scale, Tensor, "a tensor")
    if values.dtype != E4M3:
        view = f"of bytes of e4m3, pass values.view({E4M3})"
        advice = view if values.dtype == torch.uint8 else "quantize the real values, in bfloat16 or float32"
        raise TypeError(f"values must be {E4M3}, got {values.dtype}: {advice}")
    if scale.dtype not in _SCALES:
        raise TypeError(f"scale must be one of {', '.join(map(str, _SCALES))}, got {scale.dtype}")
    if values.dim() not in (2, 3):
        raise ValueError(f"values must be [R, C], or [E, R, C] of experts, got {list(values.shape)}")
    if scale.device != values.device:
        raise ValueError(f"scale must be on {values.device} as values are, got {scale.device}")
    shapes = _shapes(values.shape)
    kinds = {granularity: shapes[granularity]} if granularity else shapes
    fitting = next((found[0] for found in kinds.values() if list(scale.shape) in found), None)
    if fitting is None:
        wanted = ", or ".join(f"{found[0]} by {kind}" for kind, found in kinds.items())
        raise ValueError(f"scale must be {wanted} for values {list(values.shape)}, got {list(scale.shape)}")
    made = scale.detach().reshape(fitting).float().contiguous()
    if made.device.type == "cpu" and modes.eager([made]):
        wrong = made[~((made > 0) & (made < math.inf))]
        if len(wrong):
            raise ValueError(f"scale must be finite and above 0, got {float(wrong[0])} in {len(wrong)} of its places")
    return Float8(values.detach(), made)


def quantize(weight: Tensor, granularity: Granularity = "row") -> Float8:
    """A floating weight [R, C], or [E, R, C] of experts, in e4m3; 448 is what the largest magnitude becomes.

    A scale is the largest magnitude of its row, tensor or block, by 448, rounded up to a value of bfloat16, since
    readers of files may round it; at least 2^-126, and 1 where all are 0. Values are divided by it in float32 and
    rounded to nearest even, and lie in memory as ``weight`` does. NaN becomes NaN (0x7F) and has no say in the scale.
    At a time 64 MB are in float32, and a GPU is waited for once. Raises TypeError for other dtypes, ValueError for
    other shapes, for an empty weight, and for one that is infinite in float32.
    """
    require("weight", weight, Tensor, "a tensor")
    require_choice("granularity", granularity, GRANULARITIES)
    if not weight.is_floating_point() or weight.itemsize < 2:
        raise TypeError(f"weight must be of a floating dtype of 16 bits or more, got {weight.dtype}")
    if weight.dim() not in (2, 3) or not weight.numel():
        raise ValueError(f"weight must be [R, C], or [E, R, C] of experts, and not empty, got {list(weight.shape)}")
    weight = weight.detach()
    columns = weight.shape[-1]
    largest = weight.new_zeros(_shapes(weight.shape)[granularity][0], dtype=torch.float32)
    for matrix, part in _chunks(weight.shape):
        size = weight[matrix][part].float().abs()
        size.masked_fill_(size.isnan(), 0)
        if granularity == "tensor":
            largest[matrix] = torch.maximum(largest[matrix], size.amax())
        elif granularity == "row":
            largest[matrix][part] = size.amax(1)
        else:
            whole = F.pad(size, (0, -columns % BLOCK, 0, -len(size) % BLOCK))
            own = largest[matrix][part.start // BLOCK : -(-part.stop // BLOCK)]
            own.copy_(whole.view(len(own), BLOCK, -1, BLOCK).amax((1, 3)))
    if bool(largest.isinf().any()):
        raise ValueError("weight must be finite in float32, or NaN, got infinity")
    # the lower half of its bits are zeros
    rounded = (_scale(largest, _SMALLEST).view(torch.int32) + 0xFFFF & -0x10000).view(torch.float32)
    scale = torch.where(largest == 0, 1, rounded)
    values = torch.empty_like(weight, dtype=E4M3)
    for matrix, part in _chunks(weight.shape):
        values[matrix][part] = _rounded(weight[matrix][part].float() / _spread(scale[matrix], part, columns))
    return Float8(values, scale)


def quantize_tokens(x: Tensor, given: Tensor | None = None) -> Float8:
    """Tokens [M, K] in e4m3, each with a scale, its largest magnitude by 448, at least 2^-126; or with ``given`` [1].

    Values are multiplied by the inverse of the scale in float32, rounded to nearest even and saturated. A token with
    NaN or infinity has NaN as its scale and its values, so all it leads to is NaN.
    """
    if given is None:
        largest = x.float().abs().amax(1)
        scale = torch.where(largest.isfinite(), _scale(largest, _SMALLEST), math.nan)
    else:
        scale = given.expand(len(x)).contiguous()
    return Float8(_rounded(x.float() * (1 / scale[:, None])), scale)


def formula(
    x: Float8,
    gate: Float8,
    up: Float8 | None,
    down: Float8,
    biases: Biases = NO_BIASES,
    activation: Activation = RELU,
    dtype: torch.dtype = torch.float64,
    rounded: bool = False,
) -> Tensor:
    """The layer's formula, y [M, K] of ``dtype``, in which all is computed but the gate, which is bfloat16. Slow.

    x: tokens with a scale each, or one for all. rounded: whether h is rounded to bfloat16, as "union" does. In float64
    sums over K are exact, except with blocks. A NaN in ``up`` or ``down`` reaches the tokens that fire its neuron.
    """
    b_gate, b_up, b_down = biases
    fired = activation.after(product(x, gate, b_gate, dtype).bfloat16())
    hidden = activation.hidden(fired.to(dtype), None if up is None else product(x, up, b_up, dtype))
    if rounded:
        hidden = hidden.bfloat16().to(dtype)
    rows = down.dequantize(dtype).t()
    y = torch.zeros(len(fired), rows.shape[1], dtype=dtype, device=x.device)
    for token, own in enumerate(fired != 0):
        y[token] = hidden[token, own] @ rows[own]
    return y if b_down is None else y + b_down.to(dtype)


def product(x: Float8, weight: Float8, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x @ weight^T + bias in ``dtype``: sums of products of e4m3, unless weights have blocks, then the scales."""
    if weight.granularity == "block":
        product = x.values.to(dtype) @ weight.dequantize(dtype).t()
    else:
        product = (x.values.to(dtype) @ weight.values.to(dtype).t()) * weight.by_rows().to(dtype)
    product = product * x.by_rows().to(dtype)[:, None]
    return product if bias is None else product + bias.to(dtype)


def _scale(largest: Tensor, least: float) -> Tensor:
    # torch on a GPU multiplies by the inverse of a number, but divides by a tensor
    return (largest / torch.full_like(largest, LARGEST)).clamp(min=least)


def _rounded(values: Tensor) -> Tensor:
    """float32 values in e4m3: to nearest even, saturated, every NaN as 0x7F."""
    return torch.where(values.isnan(), math.nan, values.clamp(-LARGEST, LARGEST)).to(E4M3)


def _shapes(shape: torch.Size) -> dict[Granularity, list[list[int]]]:
    """The shapes that scales may have, first the one of ``Float8``."""
    *lead, rows, columns = shape
    high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    return {
        "tensor": [lead, [*lead, 1], [*lead, 1, 1]],
        "row": [[*lead, rows], [*lead, rows, 1]],
        "block": [[*lead, high, wide], [*lead, high, 1, wide, 1]],
    }


def granularity_of(shape: Sequence[int], scale: Sequence[int]) -> Granularity | None:
    """The granularity of a scale of this shape, of a weight; None if it is no scale of it."""
    found = _shapes(torch.Size(shape)).items()
    return next((kind for kind, shapes in found if list(scale) in shapes), None)


def _chunks(shape: torch.Size) -> Iterator[tuple[tuple[int, ...], slice]]:
    """The matrices of a weight, each as rows that are whole blocks: the index of the matrix, and rows."""
    *lead, rows, columns = shape
    step = max(1, _CHUNK // (BLOCK * max(columns, 1))) * BLOCK
    for matrix in itertools.product(*map(range, lead)):
        for start in range(0, rows, step):
            yield matrix, slice(start, min(start + step, rows))


def _spread(scale: Tensor, rows: slice, columns: int) -> Tensor:
    """The scales of a matrix in the shape of some of its rows, or one that broadcasts to it."""
    if scale.dim() < 2:
        return scale[rows, None] if scale.dim() else scale
    blocks = scale[rows.start // BLOCK : -(-rows.stop // BLOCK)].repeat_interleave(BLOCK, 0)
    return blocks[: rows.stop - rows.start].repeat_interleave(BLOCK, 1)[:, :columns]
