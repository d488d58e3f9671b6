""" "row" and "union" beside their Cases: ranges of 16 bits, lengths of lists, named workloads, memory, groups."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.strategies import BF16, BY_NAME, CUDA, FP16, exact
from twell import testing


@BY_NAME
@pytest.mark.parametrize("m", [1, 17, 130, 600, 2100])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shifts"), [(FP16, (-14, 14)), (FP16, (-24, 14)), (BF16, (60, -60)), (BF16, (-60, 60))]
)
def test_the_range_of_the_hidden_state(
    m: int, dtype: torch.dtype, shifts: tuple[int, int], mixed: bool, strategy: Any
) -> None:
    """Up and down weights times powers of two that cancel: "row" keeps h in fp32, "union" rounds it as dense does.

    ``mixed``: in every second neuron alone, so that large and small ones meet in one sum.
    """
    problem = testing.integer_problem(m, 264, 776, density=0.1, device=CUDA, dtype=dtype)
    up, down = (torch.full((776, 1), 2.0**shift, dtype=dtype, device=CUDA) for shift in shifts)
    if mixed:
        up[::2] = down[::2] = 1
    scaled = problem._replace(w_up=problem.w_up * up, w_down=problem.w_down * down)
    testing.assert_same(testing.sparse_output(scaled, strategy=strategy), exact(scaled, strategy))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 255, 256, 257, 511, 512, 513])
def test_union_sizes_around_tiles(size: int) -> None:
    """Lists that end just before, at and behind a chunk of 64 and 256 neurons; each token fires few of them."""
    generator = torch.Generator().manual_seed(size)
    neurons = torch.randperm(1544, generator=generator)[:size]
    gates = torch.full((256, 1544), -1)
    place = torch.arange(max(size, 128)) % size
    gates[torch.arange(len(place)) % 128, neurons[place]] = 3
    problem = testing.pattern_problem(gates, 264, device=CUDA)
    # by the kernel of few tokens, and by those of many
    for times in (1, 5):
        y = testing.sparse_output(problem._replace(x=problem.x.repeat(times, 1)), strategy="union")
        testing.assert_same(y, exact(problem, "union").repeat(times, 1))
    dy = testing.integer_upstream(problem)
    right = testing.exact_gradients(problem, dy)
    for name, gradient in testing.sparse_gradients(problem, dy, strategy="union").items():
        testing.assert_same(gradient, right[name].float().to(BF16), name)


@pytest.mark.parametrize(
    ("name", "m", "own"),
    [
        *(("row", 8, 1), ("row", 256, 1), ("row", 520, 8)),
        *(("union", 384, 128), ("union", 1152, 128), ("training", 384, 128)),
    ],
)
def test_bits_of_a_token_depend_on_its_own_group_alone(name: str, m: int, own: int) -> None:
    """Other tokens in the call do not change the first group's bits; nor does their number, beyond few tokens."""
    problem = testing.make("topic29", 2048)
    dy = testing.real_upstream(problem)

    def first(order: Tensor) -> Tensor:
        part = problem._replace(x=problem.x[order])
        if name == "training":
            return testing.sparse_gradients(part, dy[order], strategy="union")["x"][:own]
        return testing.sparse_output(part, strategy=name)[:own]  # type: ignore[arg-type]

    order = torch.arange(m, device=CUDA)
    expected = first(order)
    testing.assert_same(first(torch.cat([order[:own], order[own:].flip(0)])), expected)
    if name == "union" or m > 512:
        testing.assert_same(first(torch.arange(2048, device=CUDA)), expected)


@BY_NAME
@pytest.mark.parametrize(
    ("name", "m"), [("topic128", 1), ("dense911", 8), ("skew29", 64), ("topic128", 256), ("topic128", 2048)]
)
def test_cuda_graph_of_several_layers_replays_the_same_bits(name: str, m: int, strategy: Any) -> None:
    """Consecutive layers, as in a step of decoding: each waits for the one before."""
    problem = testing.make(name, m)

    def step() -> Tensor:
        x = problem.x
        for _ in range(4):
            y = testing.sparse_output(problem._replace(x=x), strategy=strategy)
            # the first two features are the neurons' and the tokens' biases: they stay
            x = torch.cat([problem.x[:, :2], (problem.x + y)[:, 2:]], 1)
        return x

    expected = step()
    graph, x = testing.captured(step)
    for _ in range(100):
        x.fill_(torch.nan)
        graph.replay()
        assert torch.equal(x, expected)
