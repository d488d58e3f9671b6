"""Tensors of more than 2^31 elements, where a 32-bit offset would wrap. Up to 40 GB of GPU memory."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import twell
from tests.gpu.strategies import BY_NAME, exact
from twell import ops, testing
from twell.call.functional import Strategy
from twell.choose import tuning
from twell.runtime import specs

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
    del words, spill
    for gated in (True, False):
        y = testing.sparse_output(block._replace(x=x), gated=gated, compression=compression)
        assert repeated(y, testing.exact_output(block, gated=gated))


@BY_NAME
def test_tokens(strategy: Strategy) -> None:
    """x and y of more than 2^31 elements."""
    block = testing.integer_problem(128, 8192, 264, density=0.02, device="cuda")
    tall = block._replace(x=block.x.repeat(LIMIT // 8192 // 128 + 1, 1))
    assert tall.x.numel() > LIMIT
    for gated in (True, False):
        assert repeated(testing.sparse_output(tall, gated=gated, strategy=strategy), exact(block, strategy, gated))


def apart(matrix: Tensor) -> Tensor:
    """The same rows, so far apart that the last lie beyond 2^31 elements, with NaN between them."""
    rows, columns = matrix.shape
    stride = (LIMIT // (rows - 1) // 8 + 1) * 8
    spread = torch.full(((rows - 1) * stride + columns,), torch.nan, dtype=matrix.dtype, device="cuda")
    return spread.as_strided((rows, columns), (stride, 1)).copy_(matrix)


@BY_NAME
@pytest.mark.parametrize("m", [257, 1152])
@pytest.mark.parametrize("name", ["x", "w_gate", "w_up", "w_down"])
def test_rows_far_apart(name: str, m: int, strategy: Strategy) -> None:
    """Tokens, or neurons."""
    problem = testing.integer_problem(m, 264, 776, density=0.1, device="cuda")
    spread = problem._replace(**{name: apart(getattr(problem, name))})
    for gated in (True, False):
        expected = exact(problem, strategy, gated)
        testing.assert_same(testing.sparse_output(spread, gated=gated, strategy=strategy), expected)


@pytest.mark.parametrize("strategy", ["row", "union", "training"])
def test_weights_that_are_columns_of_a_buffer_beyond_64_gb(strategy: str) -> None:
    """Kernels that find rows by 32-bit offsets of 16 bytes would read other rows."""
    if torch.cuda.mem_get_info()[1] < 110e9:
        pytest.skip("needs a GPU with 110 GB")
    if strategy != "row" and tuning.family(0) == specs.PORTABLE:
        # the error of a call would hold the buffer
        pytest.skip("so many neurons need compute capability 9.0")
    n, k = 65_536, 64
    problem = testing.integer_problem(130, k, n, density=0.008, device="cuda")
    buffer = torch.empty(n, 600_000, dtype=torch.bfloat16, device="cuda")
    w_up, w_down = (
        buffer[:, column : column + k].copy_(weight) for column, weight in ((0, problem.w_up), (128, problem.w_down))
    )
    assert w_up.stride(0) * 2 * n > 64 << 30
    dy = testing.integer_upstream(problem)
    gate = problem.w_gate.clone().requires_grad_() if strategy == "training" else problem.w_gate
    name = "row" if strategy == "row" else "union"
    y = twell.sparse_gated_ffn(problem.x, gate, w_up, w_down.t(), strategy=name)
    testing.assert_same(y.detach(), testing.exact_output(problem, rounded=name == "union"))
    if strategy == "training":
        (found,) = torch.autograd.grad(y, gate, dy)
        testing.assert_same(found, testing.exact_gradients(problem, dy)["w_gate"].float().to(found.dtype))
