"""Programs on a GPU: both runners, and many kinds of calls."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import twell
from tests.gpu.strategies import module
from twell import testing
from twell.choose.plan import Route
from twell.runtime import host, program

K, N = 1024, 2816


@pytest.fixture(autouse=True)
def programs() -> Iterator[None]:
    program.forget()
    yield
    program.forget()


def frozen(*how: Any, **options: Any) -> Any:
    return module(*how, **options).eval().requires_grad_(False)


def step(made: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = made.requires_grad_()(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *made.parameters()], dy)]


@pytest.mark.parametrize("layout", ["rows", "linear"])
@pytest.mark.parametrize("gated", [True, False])
def test_both_runners_give_the_same_bits(gated: bool, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if host.maker() is None:
        pytest.skip(f"there is one runner: {host.runner()}")
    results = []
    for maker in (host.maker(), None):
        monkeypatch.setattr(host, "maker", lambda maker=maker: maker)
        program.forget()
        of_one = []
        for m in (1, 8, 65, 300, 2048):
            problem = testing.make("topic29", m, K, N)
            routes = [Route("union", screen=True)] if m > 64 else []
            for strategy in ("row", "union", *routes):
                # a route is for functions, a name for modules, whose second call is known
                with torch.no_grad():
                    p = problem
                    function = twell.sparse_gated_ffn if gated else twell.sparse_ffn
                    weights = (p.w_gate, p.w_up, p.w_down.t()) if gated else (p.w_gate, p.w_down.t())
                    of_one.append(function(p.x, *weights, strategy=strategy))
                    if isinstance(strategy, str):
                        made = frozen(problem, gated, layout, strategy=strategy)
                        of_one += [made(problem.x), made(problem.x)]
            made, dy = frozen(problem, gated, layout, strategy="union"), torch.ones_like(problem.x)
            of_one += step(made, problem.x, dy) + step(made, problem.x, dy)
        results.append(of_one)
    for by_c, by_python in zip(*results, strict=True):
        testing.assert_same(by_c, by_python, "C and Python")


def test_more_kinds_of_calls_than_are_kept() -> None:
    problem = testing.make("topic29", 700, K, N)
    made, dense = (frozen(problem, strategy=name) for name in ("union", "dense"))
    sizes = [*range(1, 300), *range(1, 300, 7)]
    for m in sizes:
        y, expected = made(problem.x[:m]), dense(problem.x[:m])
        assert (y - expected).abs().max() <= 0.02 * expected.abs().max() + 1e-3, m
