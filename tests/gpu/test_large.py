"""Tensors of more than 2^31 elements, where a 32-bit offset would wrap. Up to 40 GB of GPU memory."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from twell import ops, testing
from twell.testing import FFN

LIMIT = 1 << 31
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    if torch.cuda.mem_get_info()[1] < 60e9:
        pytest.skip("needs a GPU with 60 GB")
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def repeated(t: Tensor, block: Tensor) -> bool:
    """Whether t is ``block`` over and over along the rows, compared in parts."""
    rows = block.shape[0]
    parts = t.view(-1, rows, *block.shape[1:]).split(64)
    return all(bool((part == block).all()) for part in parts)


@pytest.mark.parametrize(("m", "compression"), [(32768 + 64, 8), (65536 + 64, 2)])
def test_packed_gate(m: int, compression: int) -> None:
    """N = 65,536 and so many tokens that the spill, at compression 2 the words as well, pass 2^31 elements."""
    block = testing.integer_problem(64, 64, 65536, density=0.11, device="cuda")
    x = block.x.repeat(m // 64, 1)
    words, spill, stats = ops.gate_pack(x, block.w_gate, None, compression)
    assert spill.numel() > LIMIT
    assert compression == 8 or words.numel() > LIMIT
    expected = ops.gate_pack(block.x, block.w_gate, None, compression)
    assert repeated(words, expected[0])
    assert repeated(stats, expected[2])
    assert bool(expected[2][:, :, 1].any()) == (compression == 8)  # overflow where tiles are short of words

    gate = testing.float64_gate(block).to(x.dtype)
    dense = ops.unpack(words, spill, 65536, compression)
    assert repeated(dense, gate)
    del dense
    y, _ = ops.up_down(x, words, spill, block.w_up, block.w_down, None, None, compression)
    assert repeated(y, testing.exact_output(block))
    y, _ = ops.up_down(None, words, spill, None, block.w_down, None, None, compression)
    assert repeated(y, testing.exact_output(block, gated=False))


def test_tokens() -> None:
    """x and y of more than 2^31 elements."""
    block = testing.integer_problem(64, 8192, 264, density=0.02, device="cuda")
    x = block.x.repeat(LIMIT // 8192 // 64 + 1, 1)
    assert x.numel() > LIMIT
    tall = block._replace(x=x)
    for gated in (True, False):
        assert repeated(testing.sparse_output(tall, gated=gated), testing.exact_output(block, gated=gated))


def test_row_stride_of_tokens() -> None:
    """Few tokens, so far apart that the last lie beyond 2^31 elements, with NaN between them."""
    problem = testing.integer_problem(257, 264, 776, density=0.1, device="cuda")
    stride = LIMIT // 256 + 8
    apart = torch.full((256 * stride + 264,), torch.nan, dtype=torch.bfloat16, device="cuda")
    x = apart.as_strided((257, 264), (stride, 1))
    x.copy_(problem.x)
    for gated in (True, False):
        y = testing.sparse_output(problem._replace(x=x), gated=gated)
        testing.assert_same(y, testing.exact_output(problem, gated=gated))


def test_row_stride_of_weights() -> None:
    """Weights of 65,536 neurons as columns of one buffer of more than 2^31 elements."""
    problem = testing.integer_problem(65, 64, 65536, density=0.05, device="cuda")
    stride = LIMIT // 65535 + 9
    stride -= stride % 8
    buffer = torch.full((65536, stride), torch.nan, dtype=torch.bfloat16, device="cuda")
    assert 65535 * stride > LIMIT
    strided: list[Tensor] = []
    for i, weight in enumerate(problem[1:4]):
        view = buffer[:, 128 * i : 128 * i + 64]
        view.copy_(weight)
        strided.append(view)
    wide = FFN(problem.x, *strided)
    for gated in (True, False):
        y = testing.sparse_output(wide, gated=gated)
        testing.assert_same(y, testing.exact_output(problem, gated=gated))
