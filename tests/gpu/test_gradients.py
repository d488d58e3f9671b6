"""Training on the GPU beside its Cases: the last pattern that fits, cut lists, last columns, memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.strategies import BF16, BIASES, BOTH, CUDA
from twell import ops, testing
from twell.ops import hybrid
from twell.runtime import geometry
from twell.testing import FFN

Gradients = dict[str, Tensor]


def exact(problem: FFN, gated: bool) -> Gradients:
    right = testing.exact_gradients(problem, testing.integer_upstream(problem), 1.0, gated=gated)
    return {name: t.float().to(problem.x.dtype) for name, t in right.items()}


def assert_equal(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        testing.assert_same(found[name], right, f"gradient of {name}")


@BOTH
def test_as_many_as_fit_and_one_more(gated: bool) -> None:
    """The last pattern that the format holds, and the first that it does not."""
    capacity = geometry.hybrid_capacity(300, 5632)
    generator = torch.Generator().manual_seed(0)
    active = torch.rand(300, 5632, generator=generator).argsort(1).argsort(1) < capacity // 300
    gates = torch.where(active, torch.randint(1, 4, active.shape, generator=generator), -1)
    for total in (capacity, capacity + 1):
        gates.view(-1)[(gates.view(-1) < 0).nonzero()[: total - int((gates > 0).sum()), 0]] = 1
        problem = testing.pattern_problem(gates, 304, device=CUDA)
        kept = ops.hybrid_forward(*(problem if gated else problem._replace(w_up=None)), 8)[3]
        assert int(hybrid.sizes(kept, 300)[-1]) == total
        dy = testing.integer_upstream(problem)
        found = testing.sparse_gradients(problem, dy, 1.0, gated=gated, strategy="union")
        assert_equal(found, exact(problem, gated))
        testing.assert_same(
            testing.sparse_output(problem, gated=gated, strategy="union"),
            testing.exact_output(problem, gated=gated, rounded=True),
        )


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


@BOTH
@pytest.mark.parametrize("density", [0.02, 0.6])
def test_gradients_of_the_last_columns_are_those_of_all(gated: bool, density: float) -> None:
    """As layers with adapters want them; also of batches with more non-zeros than the format holds."""
    problem = testing.integer_problem(700, 136, 1032, density=density, biases=BIASES, device=CUDA)
    dy, layer = testing.integer_upstream(problem), problem if gated else problem._replace(w_up=None, b_up=None)
    kept = ops.hybrid_forward(*layer, 8)[3]
    gate = F.linear(problem.x.float(), problem.w_gate.float(), problem.b_gate.float()).to(BF16)  # type: ignore[union-attr]
    x, w_up = (layer.x, layer.w_up) if gated else (None, None)
    of_gate = dy, None, x, None, w_up, layer.w_down, None, layer.b_up, kept, gated, True
    op, of_layer = ops.hybrid_backward, (dy, None, *layer[:6], kept, True, True)
    for arguments, given in ((of_layer, (None, False)), (of_gate, (gate, True))):
        last = testing.poisoned(lambda arguments=arguments, given=given: op(*arguments, "relu", 0.0, 104, *given))
        for own, other in zip(last, op(*arguments, "relu", 0.0, 0, *given), strict=True):
            if other.shape == problem.w_gate.shape:
                own, other = own[:, 104:], other[:, 104:]
            testing.assert_same(own, other)


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
