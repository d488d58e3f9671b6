"""The transposing copy of a matrix."""

import pytest
import torch

from twell import ops, testing
from twell.ops import library

SHAPES = [(8, 8), (8, 64), (64, 8), (72, 264), (136, 2056), (2048, 5632)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 8), (7, 9), (8, 12)])
def test_every_element_is_moved(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = shape
    # every value has different bits
    matrix = torch.arange(rows * columns, device="cuda").to(torch.int16).view(shape)
    matrix = matrix.float() if dtype == torch.float32 else matrix.view(dtype)
    (out,) = testing.poisoned(lambda: (ops.matrix_transpose(matrix),))
    assert out.is_contiguous()
    assert out.shape == (columns, rows)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(out.view(kind), matrix.t().contiguous().view(kind))


@pytest.mark.parametrize("shape", SHAPES)
def test_strides_and_addresses(shape: tuple[int, int]) -> None:
    rows, columns = shape
    wide = torch.randn(rows + 1, columns + 16, device="cuda").bfloat16()
    for matrix in (wide[1:, 8:-8], wide[1:, 3 : 3 + columns], wide[:-1, ::2][:, : columns // 16 * 8]):
        assert torch.equal(ops.matrix_transpose(matrix), matrix.t())
        assert torch.equal(library.rows(matrix.t()), matrix.t())
        assert library.has_rows(library.rows(matrix.t()))


def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[1] < 60e9:
        pytest.skip("needs a GPU with 60 GB")
    matrix = torch.randint(-(2**15), 2**15, (1 << 15, (1 << 16) + 64), dtype=torch.int16, device="cuda")
    out = ops.matrix_transpose(matrix)
    for start in range(0, matrix.shape[1], 8192):
        assert torch.equal(out[start : start + 8192], matrix[:, start : start + 8192].t())


def test_contract() -> None:
    torch.library.opcheck(ops.matrix_transpose, (torch.randn(64, 72, device="cuda").half(),))
