"""``quantize_gate``: rows of x, or of w_gate if ``weights``, in int8 for the screen of the gate.

Each row is rotated by a signed block Hadamard transform, scaled, and rounded with a dither from a generator with a
fixed seed. ``scale * (q - dither)`` is near the rotated row, for dithers from -1/2 to 1/2 with mean 0; ``offset`` is
the product of q and the dithers of the other side, those of w_gate for x. ``spread`` is at least the norm of the
rotated row by its scale. It is 0 for a row of zeros, and infinite for a row that is not screened: not finite, or of a
magnitude beyond 2^-50 to 2^54. These rows have an offset of 0.

rows [R, K] are bfloat16 or float16, with K at most 16,384. q is int8 [R, K], its rows a multiple of 16 bytes apart;
scale, spread and offset are float32 [R]. On a GPU the operators that take q raise ValueError for rows that are laid out
otherwise, as ``.contiguous()`` and ``.to()`` leave them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from twell import tuning
from twell._runtime import device, screen, specs
from twell._runtime.program import Program, View
from twell.ops.library import Shape, check_matrix, check_rank, new, register, rows
from twell.ops.operands import run

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]
QuantizedViews = tuple[View, View, View, View]
# TMA: bytes of which a row's stride is a multiple
_PITCH = 16


def outputs(matrix: Tensor) -> Quantized:
    """Uninitialised q int8 [R, K], with rows of a multiple of 16 bytes; scale, spread and offset float32 [R]."""
    q, scale, spread, offset = new(matrix, shapes(matrix))
    return q.narrow(1, 0, matrix.shape[1]), scale, spread, offset


def shapes(matrix: Tensor | View) -> tuple[Shape, Shape, Shape, Shape]:
    """Of the outputs, of q with whole rows."""
    r, k = matrix.shape
    return (torch.int8, r, -(-k // _PITCH) * _PITCH), (torch.float32, r), (torch.float32, r), (torch.float32, r)


def _fake(matrix: Tensor, weights: bool) -> Quantized:
    check_matrix("rows", matrix)
    return outputs(matrix)


def require(on: torch.device, op: str) -> None:
    """Raise NotImplementedError, which names ``op``, unless this GPU runs the kernels of the screen."""
    index = on.index or 0
    if tuning.family(index) != specs.SM90:
        got = "{}.{}".format(*device.capability(index))
        raise NotImplementedError(f"torch.ops.twell.{op} needs compute capability 9.0, got {got} on cuda:{index}")


def require_pitch(name: str, q: Tensor) -> None:
    """Raise ValueError unless ``q`` int8 [R, K] is laid out as in ``outputs``, which TMA needs."""
    check_rank(name, q)
    pitch, inner = q.stride()
    if inner != 1 or pitch % _PITCH or pitch < q.shape[1] or q.data_ptr() % _PITCH:
        raise ValueError(
            f"{name} must have aligned rows of unit stride, a multiple of {_PITCH} bytes apart, as quantize_gate makes "
            f"them, got strides {[pitch, inner]} at an address {q.data_ptr() % _PITCH} above a multiple of {_PITCH}"
        )


def random_words(count: int, stream: int) -> Tensor:
    """The first words of a stream of ``screen.words``, int64 on the CPU."""
    block = torch.arange(-(-count // 4), device="cpu")
    c0, c1, c2, c3 = block, torch.full_like(block, stream), torch.zeros_like(block), torch.zeros_like(block)
    half = 0xFFFFFFFF
    for i in range(screen.ROUNDS):
        k0, k1 = ((key + i * step) & half for key, step in zip(screen.KEY, screen.INCREMENTS))
        # products wrap, and their halves are right nevertheless
        product0, product1 = c0 * screen.MULTIPLIERS[0], c2 * screen.MULTIPLIERS[1]
        c0, c2 = (product1 >> 32 & half) ^ c1 ^ k0, (product0 >> 32 & half) ^ c3 ^ k1
        c1, c3 = product1 & half, product0 & half
    return torch.stack((c0, c1, c2, c3), 1).flatten()[:count]


def _cpu(matrix: Tensor, weights: bool) -> Quantized:
    q, scale, spread, offset = _fake(matrix, weights)
    r, k = matrix.shape
    tuning.quantize_gate(matrix.dtype, k)
    column = torch.arange(k, device="cpu")
    line, own, whole = screen.sign_bits(column)
    words = random_words(int(line.max()) + 1 if k else 0, screen.SIGNS)[line]
    values = matrix.float() * (1 - 2 * ((words >> own ^ words >> whole) & 1))
    for level in screen.levels(k):
        pairs = values.view(r, k >> level + 1, 2, 1 << level)
        values = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2)
    values = values.view(r, k)

    largest = values.abs().amax(1)
    screened = (largest >= screen.SMALLEST) & (largest <= screen.LARGEST)
    levels = torch.full_like(largest, screen.LEVELS) / largest
    words = random_words(k, screen.DITHERS)
    own, other = (screen.centred(words, shift).double() * 2.0 ** -(screen.FRACTION + 1) for shift in _shifts(weights))
    sums = (values.double() * levels.double()[:, None] + (own + 0.5)).float()
    q.copy_(sums.floor_().masked_fill_(~screened[:, None], 0))
    offset.copy_(q.double() @ other)
    scale.copy_(torch.where(screened, largest * torch.full_like(largest, 1 / screen.LEVELS), 1))
    norms = matrix.float().square().sum(1).sqrt() * math.sqrt(screen.rotation_block(k))
    wide = norms / scale * (1 + screen.SPREAD) + screen.grid_error(k)
    spread.copy_(torch.where(screened, wide, torch.where(largest == 0, 0, torch.inf)))
    return q, scale, spread, offset


def _shifts(weights: bool) -> tuple[int, int]:
    """Where the dither of these rows is in a column's word, and that of the other side."""
    return (screen.W_SHIFT, screen.X_SHIFT) if weights else (screen.X_SHIFT, screen.W_SHIFT)


def _cuda(matrix: Tensor, weights: bool) -> Quantized:
    require(matrix.device, "quantize_gate")
    found = _fake(matrix, weights)
    run(_launch, (rows(matrix), *found), weights)
    return found


def quantize(p: Program, matrix: View, weights: bool) -> QuantizedViews:
    """Launch the operator on a matrix, into scratch."""
    q, scale, spread, offset = (p.scratch(*shape) for shape in shapes(matrix))
    found = q._replace(shape=matrix.shape), scale, spread, offset
    _launch(p, matrix, *found, weights)
    return found


def _launch(p: Program, matrix: View, q: View, scale: View, spread: View, offset: View, weights: bool) -> None:
    r, k = matrix.shape
    if r:
        constants = (*_shifts(weights), screen.grid_error(k), p.multiprocessors)
        p.launch(tuning.quantize_gate(matrix.dtype, k), matrix, q, scale, spread, offset, *constants)


quantize_gate = register(
    "quantize_gate(Tensor rows, bool weights) -> (Tensor q, Tensor scale, Tensor spread, Tensor offset)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
)
