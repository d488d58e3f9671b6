"""``invariant=True``: the bits of a token's y depend on the token and the weights alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from twell import testing
from twell.testing import FFN

# each number at which the other strategies change their kernels, its neighbours, and far beyond
COUNTS = (1, 2, 8, 9, 33, 64, 65, 128, 129, 257, 513, 641, 1025, 2049, 8192)


def layers() -> Iterator[FFN]:
    """Layers whose K belong to clusters of two and four, with tokens of few and of many non-zeros."""
    for k, n in ((136, 520), (2048, 5632), (4096, 1032), (6144, 1032), (8192, 264)):
        yield testing.make("topic29", COUNTS[-1], k, n)


def output(problem: FFN, x: Tensor, gated: bool = True) -> Tensor:
    return testing.poisoned(lambda: testing.sparse_output(problem._replace(x=x), gated=gated, strategy="row+invariant"))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_bits_do_not_depend_on_the_number_of_tokens(gated: bool) -> None:
    for problem in layers():
        whole = output(problem, problem.x, gated)
        for m in COUNTS[:-1]:
            for first in (0, COUNTS[-1] - m):
                part = slice(first, first + m)
                testing.assert_same(output(problem, problem.x[part], gated), whole[part], f"{m} tokens from {first}")


def test_bits_do_not_depend_on_neighbours() -> None:
    """The same tokens between others, among them tokens that fire all neurons, in another order, and repeated."""
    for problem in layers():
        x = problem.x[:512]
        expected = output(problem, x)
        # a token that fires much: the sum of all rows of the gate's weight
        loud = problem.w_gate.float().sum(0).to(x.dtype).expand(512, -1)
        for every in (2, 8, 32):
            mixed = torch.where((torch.arange(512, device=x.device) % every == 0)[:, None], loud, x)
            kept = torch.arange(512, device=x.device) % every != 0
            testing.assert_same(output(problem, mixed.contiguous())[kept], expected[kept], f"loud every {every}")
        order = torch.randperm(512, device=x.device)
        testing.assert_same(output(problem, x[order]), expected[order], "shuffled")
        testing.assert_same(output(problem, x[:1].repeat(300, 1)), expected[:1].expand(300, -1), "repeated")
