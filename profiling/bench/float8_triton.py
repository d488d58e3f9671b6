"""The passes between dense fp8 products in Triton, beside those of the package: rows in e4m3 with their scales."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(first, second, q, scale, columns, first_row, second_row, GATED: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = place < columns
    x = tl.load(first + row * first_row + place, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(second + row * second_row + place, mask=inside, other=0.0).to(tl.float32)
        x = (tl.maximum(x, 0.0) * up).to(tl.bfloat16).to(tl.float32)
    made = tl.maximum(tl.max(tl.abs(x), axis=0) / 448.0, 1.1754944e-38)
    values = tl.clamp(x * (1.0 / made), -448.0, 448.0)
    tl.store(q + row * columns + place, values.to(tl.float8e4nv), mask=inside)
    tl.store(scale + row, made)


def rows_in_float8(first: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows of ``first``, or of relu(first) * second, in e4m3, and their scales; one program for each row."""
    (m, columns), other = first.shape, first if second is None else second
    q = torch.empty(m, columns, dtype=torch.float8_e4m3fn, device=first.device)
    scale = torch.empty(m, dtype=torch.float32, device=first.device)
    width = triton.next_power_of_2(columns)
    numbers = columns, first.stride(0), other.stride(0), second is not None, width
    _quantise[(m,)](first, other, q, scale, *numbers, num_warps=max(4, min(16, width // 512)))
    return q, scale
