"""Training on the GPU beside its Cases: cut lists, passes that wait for each other, memory."""

import pytest
import torch
from torch import Tensor

from tests.gpu.strategies import BF16, BIASES, BOTH, CUDA
from twell import testing
from twell.runtime import geometry
from twell.testing import FFN

Gradients = dict[str, Tensor]


def assert_equal(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        testing.assert_same(found[name], right, f"gradient of {name}")


@BOTH
def test_cut_lists_have_the_same_bits_each_time(gated: bool) -> None:
    """Whichever warp is the last to store the sums of a piece: all that differs from run to run is the order."""
    torch.manual_seed(0)
    x, *weights = (torch.randn(rows, 512, device=CUDA, dtype=BF16) for rows in (12000, 256, 256, 256))
    problem = FFN(x + 0.5, weights[0] - 0.06, *weights[1:])
    dy = torch.randn_like(x)
    first = testing.sparse_gradients(problem, dy, gated=gated, strategy="union")
    for _ in range(100):
        assert_equal(testing.sparse_gradients(problem, dy, gated=gated, strategy="union"), first)


@BOTH
def test_batches_that_do_not_fit_in_two_streams(gated: bool) -> None:
    """CTAs of a pass wait for each other, and neither pass has all multiprocessors: none may wait for ever."""
    m = 4 * geometry.OVERFLOW_BACKWARD
    problem = testing.integer_problem(m, 136, 520, density=0.3, biases=BIASES, device=CUDA)
    dy, found = testing.integer_upstream(problem), list[Gradients]()
    expected = testing.sparse_gradients(problem, dy, 1.0, gated=gated, strategy="union")
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(testing.sparse_gradients(problem, dy, 1.0, gated=gated, strategy="union"))
    torch.cuda.synchronize()
    for gradients in found:
        assert_equal(gradients, expected)


@pytest.mark.parametrize("strategy", ["auto", "dense"])
def test_peak_memory(strategy: str) -> None:
    """Forward and backward of topic29 above inputs, dy among them: at most 500 MB; dense takes more."""
    problem = testing.make("topic29", device=CUDA).map(lambda t: t.requires_grad_())
    dy = testing.real_upstream(problem)

    def peak() -> float:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        testing.sparse_gradients(problem, dy, strategy=strategy)
        return torch.cuda.max_memory_allocated() - before

    peak()
    torch.cuda.empty_cache()
    assert (peak() <= 500e6) == (strategy == "auto")
