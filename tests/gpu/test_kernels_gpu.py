"""Kernels on a GPU, called directly with what Cases do not have: gates of any bits, bounds, transposes.

Gates have NaN and infinities among them, and are as on the CPU: packed, their largest, in windows.
"""

import math

import pytest
import torch
from torch import Tensor

from tests import programs
from tests.cases.layouts import LAYOUTS
from tests.gpu.strategies import CUDA, DTYPES
from twell import ops, testing
from twell.base.activation import Activation
from twell.call import choice
from twell.ops import reference


def gates(m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Rare and frequent non-zeros, tiles that overflow, zeros of both signs, NaN and infinities."""
    generator = torch.Generator().manual_seed(m + n)
    gate = torch.randn(m, n, generator=generator)
    gate -= torch.tensor([3.0, 1.0, 0.0, -1.0])[torch.randint(4, (m, 1), generator=generator)]
    odd = torch.tensor([0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-8])
    places = torch.rand(m, n, generator=generator) < 0.01
    gate = torch.where(places, odd[torch.randint(len(odd), (m, n), generator=generator)], gate)
    return gate.to(dtype)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("compression", [2, 4, 8])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (8, 5632), (33, 264), (130, 520), (700, 1032), (2049, 2056)])
@DTYPES
def test_packed(dtype: torch.dtype, m: int, n: int, compression: int, threshold: float) -> None:
    gate, activation = gates(m, n, dtype), Activation("fatrelu", threshold)
    right = programs.packed_on_cpu(activation.after(gate), compression)
    for own in (gate.cuda(), LAYOUTS["padded"](gate.cuda())):
        found = testing.poisoned(lambda own=own: programs.packed(own, compression, activation))
        testing.assert_packed_same(found, right, n, compression)


@DTYPES
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 3), (70, 520, 9), (9, 16384, 64), (5, 16392, 500), (3, 65536, 512)])
def test_levels_are_those_of_a_stable_sort(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    # few values, so that many are equal
    gate = torch.randint(-20, 21, (m, n), generator=generator).to(dtype)
    gate[0, :2], gate[-1, -1] = torch.nan, torch.inf
    (levels,) = testing.poisoned(lambda: (programs.levels(gate.to(CUDA), k),))
    testing.assert_same(levels.cpu(), reference.top_k(gate, k))
    words, spill, _ = programs.packed(gate.to(CUDA), levels=levels)
    testing.assert_same(ops.unpack(words, spill, n, 8).cpu(), reference.largest(gate.relu(), k))


@DTYPES
def test_largest_of_a_batch(dtype: torch.dtype) -> None:
    gate = torch.randint(-30, 12, (300, 1000), device=CUDA).to(dtype)
    gate[3, 5], gate[30, 1], gate[9] = torch.inf, torch.nan, -torch.inf
    for most in (0, 1, 900, 30000, 90000, 300000):
        assert torch.equal(choice.largest(gate, most).cpu(), choice.largest(gate.cpu(), most))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 8), (8, 64), (64, 8), (72, 264), (2048, 5632), (0, 8), (7, 9), (8, 12)])
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


def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[1] < 60e9:
        pytest.skip("needs a GPU with 60 GB")
    matrix = torch.randint(-(2**15), 2**15, (1 << 15, (1 << 16) + 64), dtype=torch.int16, device="cuda")
    out = ops.matrix_transpose(matrix)
    for start in range(0, matrix.shape[1], 8192):
        assert torch.equal(out[start : start + 8192], matrix[:, start : start + 8192].t())
