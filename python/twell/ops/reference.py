"""Definitions of the choice among gates and of the screen, in few lines: slow, obvious, for tests and readers.

Tokens are [M, K], weights [N, K], bfloat16 or float16, without gradients. Layers have float64 answers instead, in
``twell.testing``.
"""

import math

import torch
from torch import Tensor

from twell.runtime import screen


def ranked(row: Tensor) -> list[int]:
    """The neurons of a token by their gates [N], the largest first: NaN is the largest, equal ones are by neuron."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (0, 0, i) if math.isnan(values[i]) else (1, -values[i], i))


def largest(values: Tensor, k: int) -> Tensor:
    """Gates [M, N] that are after ReLU, with 0 for all but the k largest of each token."""
    kept = torch.zeros_like(values)
    for row in range(len(values)):
        for neuron in ranked(values[row])[:k]:
            kept[row, neuron] = values[row, neuron]
    return kept


def top_k(dense: Tensor, k: int) -> Tensor:
    """levels int32 [M, 2] of gates [M, N] before ReLU: the bits of the k-th largest, and the last neuron with it kept.

    They are 0 and -1 where fewer than k are positive. The bits of NaN, the largest, are 0x7FFF.
    """
    levels = torch.zeros(len(dense), 2, dtype=torch.int32, device=dense.device)
    for row in range(len(dense)):
        at = ranked(dense[row])[k - 1] if k <= dense.shape[1] else None
        if at is None or dense[row, at] <= 0:
            levels[row, 1] = -1
            continue
        levels[row, 0] = 0x7FFF if dense[row, at].isnan() else int(dense[row, at].view(torch.int16))
        levels[row, 1] = at
    return levels


Quantized = tuple[Tensor, Tensor, Tensor, Tensor]


def rotate(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows [R, K] by the signed block Hadamard transform, not normalised, with sums of ``dtype`` level by level."""
    r, k = rows.shape
    places = [screen.sign_bits(column) for column in range(k)]
    words = screen.words(1 + max(line for line, _, _ in places), screen.SIGNS)
    signs = [1 - 2 * ((words[line] >> own ^ words[line] >> whole) & 1) for line, own, whole in places]
    values = rows.to(dtype) * torch.tensor(signs, dtype=dtype, device=rows.device)
    for level in screen.levels(k):
        low, high = values.view(r, k >> level + 1, 2, 1 << level).unbind(2)
        values = torch.stack((low + high, low - high), 2).view(r, k)
    return values


def dithers(k: int, weights: bool) -> tuple[Tensor, Tensor]:
    """The dithers of ``k`` columns without their mean of 1/2, and those of the other side: float64 [K].

    ``weights`` says whether the first are those of w_gate.
    """
    shifts = (screen.W_SHIFT, screen.X_SHIFT) if weights else (screen.X_SHIFT, screen.W_SHIFT)
    unit, words = 2.0 ** -(screen.FRACTION + 1), screen.words(k, screen.DITHERS)
    sides = [[screen.centred(word, shift) * unit for word in words] for shift in shifts]
    own, other = torch.tensor(sides, dtype=torch.float64, device="cpu")
    return own, other


def quantize_gate(rows: Tensor, weights: bool) -> Quantized:
    """q int8 [R, K], scale, spread and offset float32 [R] of rows [R, K] of x or w_gate.

    ``scale * (q - dither)`` is near rotate(rows), for dithers from -1/2 to 1/2 with mean 0, and ``offset`` is the
    product of q and the dithers of the other side. ``spread`` is at least |rotate(rows)| / scale. It is 0 for a row of
    zeros, and infinite for one that is not finite or of a magnitude that is not screened.
    """
    rotated, k = rotate(rows), rows.shape[1]
    largest = rotated.abs().amax(1)
    levels = torch.tensor(screen.LEVELS, dtype=torch.float32, device=rows.device) / largest
    own, other = (t.to(rows.device) for t in dithers(k, weights))
    screened = (largest >= screen.SMALLEST) & (largest <= screen.LARGEST)
    # the sum is rounded to fp32 before its floor is taken
    q = (rotated.double() * levels.double()[:, None] + (own + 0.5)).float().floor().where(screened[:, None], 0)
    scale = (largest * torch.tensor(1 / screen.LEVELS, dtype=torch.float32, device=rows.device)).where(screened, 1)
    norm = rows.double().norm(dim=1) * math.sqrt(screen.rotation_block(k))
    spread = norm / scale.double() * (1 + screen.SPREAD) + screen.grid_error(k)
    spread = spread.where(screened, torch.inf).where(largest != 0, 0)
    return q.char(), scale, spread.float(), (q.double() @ other).float()


def screen_bound(x_spread: Tensor, w_spread: Tensor, k: int, failure: float = screen.FAILURE) -> Tensor:
    """How far the product of q_x and q_w without dithers may be below (gate - bias), in units of the scales.

    float64 [M, N], for rows that are screened. The product is q_x . q_w - x_offset - w_offset + screen.dither_product.
    The gate is that of bf16 or fp16 products of ``k`` terms summed in fp32. A gate exceeds the bound with a
    probability of at most 2^-failure; docs/notes/screen.md derives it.
    """
    u, v, root = x_spread.double()[:, None], w_spread.double(), math.sqrt(k) / 2
    dithers = screen.dither_tail(failure) * (v**2 + (u + root) ** 2).sqrt()
    rounding = (2 * screen.ROTATION + screen.product_error(k)) * u * v + screen.grid_error(k) * (u + v)
    return dithers + rounding + screen.SLACK


def token_terms(
    scale: Tensor, spread: Tensor, offset: Tensor, k: int, failure: float = screen.FAILURE
) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and i [M]: ``a[m] + b[m] * w_spread[n]^2`` is at least ``screen_bound`` and corrections, ``i`` is 1 / scale.

    The corrections are ``screen.dither_product`` minus the offset. With the terms of a row of zeros the bias decides.
    """
    u, root = spread.double(), math.sqrt(k) / 2
    c, grid, p = screen.dither_tail(failure), screen.grid_error(k), u + root
    slope = c + (2 * screen.ROTATION + screen.product_error(k)) * u + grid
    # a square root is at most (its argument / r + r) / 2 for any r, and near to it if r is near to the root
    r = (screen.USUAL_SPREAD * k + c * p * p / slope).sqrt()
    a = (c * p * p / r + slope * r) / 2 + grid * u + screen.SLACK
    enlarged = 1 + screen.MARGIN
    a, b = a * enlarged - offset.double() + screen.dither_product(k), slope / (2 * r) * enlarged
    zero = u == 0
    return (
        a.masked_fill(zero, -screen.ABOVE_CORRECTIONS),
        b.masked_fill(zero, 0),
        (1 / scale.double()).masked_fill(zero, screen.LIFT),
    )


def neuron_terms(scale: Tensor, spread: Tensor, bias: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """spread^2 and the bias in units of 1 / scale, rounded up, [N]. The bias decides alone for a row of zeros."""
    b = torch.zeros_like(scale, dtype=torch.float64) if bias is None else bias.double()
    beta = b * screen.rotation_block(k) / scale.double()
    up, down = 1 + screen.BIAS_MARGIN, 1 - screen.BIAS_MARGIN
    beta = torch.where(b > 0, (beta * up).clamp(min=1 / screen.DECISIVE), beta * down)
    decisive = torch.where(b > 0, screen.DECISIVE, torch.where(b <= 0, -screen.DECISIVE, b))
    return spread.double() ** 2, torch.where(spread == 0, decisive, beta)


def gate_screen(x: Quantized, w_gate: Quantized, bias: Tensor | None) -> Tensor:
    """Which gates [M, N] may be positive or NaN, of rows from ``quantize_gate``: all others are 0 after ReLU."""
    (qx, x_scale, x_spread, x_offset), (qw, w_scale, w_spread, w_offset), k = x, w_gate, x[0].shape[1]
    a, b, i = token_terms(x_scale, x_spread, x_offset, k)
    v, beta = neuron_terms(w_scale, w_spread, bias, k)
    reach = i[:, None] * beta + (b[:, None] * v + a[:, None])
    # not a comparison that NaN fails
    return ~(qx.double() @ qw.double().t() - w_offset.double() <= -reach)
