"""Bits that must not change: in a thousand repeats, in first calls of threads, beside NaN.

Non-finite values. A token *fires* a neuron whose gate, after ReLU, is not zero; NaN is not. What holds for every
strategy, forward and backward, and is tested here:

- Nothing becomes non-finite that dense PyTorch leaves finite.
- A non-finite token, or gate weight or bias, shows in the tokens whose gates it spoils, as in dense PyTorch; all other
  tokens keep their bits.
- A non-finite row of the up weight, or up bias, shows in the tokens that fire the neuron, and in no others: dense
  PyTorch shows it in all.
- A non-finite row of the down weight shows in the tokens that fire the neuron and, by "union" and in training, in the
  columns where it is not finite, perhaps in others of the same 128, or of a call in one pass. Dense PyTorch shows it in
  all tokens.
- A non-finite down bias, or output gradient, shows in its column, or token, and in the gradients of what that fires.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.strategies import BF16, BIASES, BOTH, CUDA
from twell import testing
from twell.testing import FFN

T = TypeVar("T")
Outputs = dict[str, Tensor]


def assert_same(found: Outputs, expected: Outputs, what: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        testing.assert_same(found[name], right, f"{what} {name}")


def forward(problem: FFN, strategy: Any, gated: bool = True) -> Outputs:
    with torch.no_grad():
        y, aux = testing.sparse_layer(problem, gated=gated, strategy=strategy)
    return {"y": y, "l1": aux.l1}


def step(problem: FFN, dy: Tensor, gated: bool = True, **options: Any) -> Outputs:
    leaves = problem.map(lambda t: t.detach().requires_grad_())
    with torch.enable_grad():
        y, aux = testing.sparse_layer(leaves, gated=gated, **{"strategy": "union"} | options)
        present = leaves.present(gated)
        upstream = [dy, torch.full_like(aux.l1, 0.25 * len(dy))]
        gradients = torch.autograd.grad([y, aux.l1], tuple(present.values()), upstream, allow_unused=True)
    return {"y": y.detach()} | {n: g for n, g in zip(present, gradients, strict=True) if g is not None}


def with_biases(problem: FFN) -> FFN:
    generator = torch.Generator(CUDA).manual_seed(1)
    n, k = problem.w_gate.shape
    up, down = (torch.randn(size, generator=generator, device=CUDA).to(BF16) for size in (n, k))
    return problem._replace(b_gate=torch.zeros_like(up), b_up=up, b_down=down)


# A thousand runs


def assert_repeats(call: Callable[[], Outputs], runs: int, busy: bool) -> None:
    """All runs have the same bits. ``busy``: beside products on another stream, so that CTAs start unevenly."""
    first = list(call().values())
    different = torch.zeros(len(first), dtype=torch.int64, device=CUDA)
    other = torch.cuda.Stream()
    noise = torch.randn(1024, 1024, device=CUDA, dtype=BF16)
    torch.cuda.synchronize()

    def bits(t: Tensor) -> Tensor:
        return t.reshape(-1).view(torch.int16)

    for _ in range(runs):
        if busy:
            with torch.cuda.stream(other):
                torch.mm(noise, noise)
        different += torch.stack(
            [(bits(a) != bits(b)).any().long() for a, b in zip(call().values(), first, strict=True)]
        )
    assert different.tolist() == [0] * len(first)


# how a call runs, workload, m, and gated or not
CALLS = [
    *(("row", name, m, True) for name, m in (("topic29", 1), ("topic128", 8), ("skew29", 100), ("dense911", 300))),
    *(("union", name, m, True) for name, m in (("topic128", 700), ("skew29", 1000), ("topic128", 2048))),
    *(("training", "topic128", 1024, gated) for gated in (True, False)),
    *(("training", "skew29", 500, gated) for gated in (True, False)),
    *(("overflow", "dense911", 130, gated) for gated in (True, False)),
]


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "busy"])
@pytest.mark.parametrize(("how", "name", "m", "gated"), CALLS)
def test_a_thousand_calls_and_replays(how: str, name: str, m: int, gated: bool, busy: bool) -> None:
    """Eager calls and replays of a graph, in outputs that held NaN, have the bits of the first call."""
    problem = with_biases(testing.make(name, m, *((512, 1544) if how == "overflow" else (2048, 5632))))
    dy = testing.real_upstream(problem)

    def call() -> Outputs:
        return forward(problem, how, gated) if how in ("row", "union") else step(problem, dy, gated)

    def replay() -> Outputs:
        for output in outputs.values():
            output.fill_(math.nan)
        graph.replay()
        return {name: t.clone() for name, t in outputs.items()}

    expected = call()
    assert_repeats(call, 1000, busy)
    graph, outputs = testing.captured(call)
    assert_same(replay(), expected)
    assert_repeats(replay, 1000, busy)


# Threads


def test_first_calls_of_many_threads(same_family: str) -> None:
    """In a fresh process eight threads load all kernels at once, and each has the right answer."""
    program = """
import json, threading, torch
from twell import testing
problems = [testing.integer_problem(m, k, 776, density=0.05, biases="gate up down", device="cuda", dtype=dtype)
            for m, k, dtype in ((300, 264, torch.bfloat16), (300, 1032, torch.float16), (5, 264, torch.bfloat16))]
ups = [testing.integer_upstream(p) for p in problems]
rights = [(testing.exact_output(p), testing.exact_gradients(p, dy)["w_up"].float().to(p.x.dtype))
          for p, dy in zip(problems, ups)]
torch.cuda.synchronize()
barrier, verdicts = threading.Barrier(8), []
def work(i):
    p, dy, (y, dw) = problems[i % 3], ups[i % 3], rights[i % 3]
    barrier.wait()
    with torch.cuda.stream(torch.cuda.Stream()):
        # which rounds the hidden state, and bf16 does not hold it
        strategy = "union" if i % 2 and p.x.dtype == torch.float16 else "row"
        verdicts.append(torch.equal(testing.sparse_output(p, strategy=strategy), y))
        verdicts.append(torch.equal(testing.sparse_gradients(p, dy, strategy="union")["w_up"], dw))
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
print(json.dumps(verdicts))
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-c", same_family + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [True] * 16


# Non-finite values

NEURON = 300
TILE = {"row": 1, "union": 128, "training": 128}


def pattern(m: int) -> FFN:
    """Nine neurons of each tile fire for each token, and neuron 300 for every third of the first 24 tokens."""
    generator = torch.Generator().manual_seed(7)
    active = torch.rand(m, 768, generator=generator).argsort(1).argsort(1) < 27
    gates = torch.where(active, torch.randint(1, 5, (m, 768), generator=generator), -1)
    token = torch.arange(m)
    gates[:, NEURON] = torch.where((token % 3 == 0) & (token < 24), 2, -1)
    return testing.pattern_problem(gates, 304, biases=BIASES, device=CUDA)


PLACES = ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")


def spoil(problem: FFN, place: str, value: float) -> FFN:
    """A copy with ``value`` in token 17, in neuron 300 or, of the down bias, in column 5."""
    copy = problem.map(Tensor.clone)
    tensor = getattr(copy, place)
    tensor[{"x": (17, 5), "b_down": (5,)}.get(place, (NEURON, 5)[: tensor.dim()])] = value
    return copy


def dense_step(problem: FFN, dy: Tensor, gated: bool) -> Outputs:
    found = testing.dense_gradients(problem, dy, 0.25, gated=gated)
    return {"y": testing.dense_output(problem, gated=gated)} | found


@pytest.mark.parametrize("m", [18, 30, 200, 300])
@pytest.mark.parametrize("strategy", ["row", "union", "training"])
@BOTH
def test_where_non_finite_values_show(m: int, strategy: str, gated: bool) -> None:
    """The rules of this module's docstring hold for every operand."""
    problem = pattern(m)
    dy = testing.integer_upstream(problem)

    def run(layer: FFN) -> Tensor:
        return step(layer, dy, gated)["y"] if strategy == "training" else forward(layer, strategy, gated)["y"]

    clean = run(problem)
    silenced = problem.map(Tensor.clone)
    assert silenced.b_gate is not None
    silenced.w_gate[NEURON], silenced.b_gate[NEURON] = 0, -1
    without = run(silenced)
    for place in PLACES if gated else [p for p in PLACES if p not in ("w_up", "b_up")]:
        for value in (math.nan, math.inf, -math.inf):
            layer = spoil(problem, place, value)
            y, dense = run(layer), testing.dense_output(layer, gated=gated)
            what = f"{place} = {value}"
            assert not bool((dense.isfinite() & ~y.isfinite()).any()), what
            # one pass takes all of its tokens together
            tile = 32 if m <= 32 else TILE[strategy]
            shows, spared, alone = where(layer, place, tile, testing.float64_gate(problem)[:, NEURON] > 0)
            assert bool((~y[shows].isfinite()).any(1).all()), what
            right = without if place in ("w_gate", "b_gate") else clean
            testing.assert_same(y[spared], right[spared], f"{what}, spared tokens")
            if alone:
                column = torch.arange(y.shape[1], device=CUDA) == 5
                testing.assert_same(y[:, ~column], clean[:, ~column], f"{what}, other columns")


def where(layer: FFN, place: str, tile: int, fires: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Tokens that show a value, tokens that do not, and whether it stays in its column. ``fires``: neuron 300 did."""
    m = len(fires)
    if place == "x":
        spoilt = torch.arange(m, device=CUDA) == 17
        return spoilt, ~spoilt, False
    if place in ("w_gate", "b_gate"):
        gate = F.relu(F.linear(layer.x, layer.w_gate, layer.b_gate))[:, NEURON]
        return ~gate.isfinite(), gate == 0, False
    if place in ("w_up", "b_up"):
        return fires, ~fires, False
    if place == "w_down":
        beside = F.pad(fires, (0, -m % tile)).view(-1, tile).any(1).repeat_interleave(tile)[:m]
        return fires, ~beside, True
    return torch.ones_like(fires), torch.zeros_like(fires), True


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("overflows", [False, True], ids=["fits", "overflows"])
@BOTH
def test_where_non_finite_values_show_in_gradients(overflows: bool, value: float, gated: bool) -> None:
    """Gradients that are finite in dense PyTorch stay finite; those of unrelated tokens keep their bits."""
    problem = pattern(300)
    if overflows:
        assert problem.b_gate is not None
        problem.b_gate[: 768 // 2] += 3
    dy = testing.integer_upstream(problem)
    clean = step(problem, dy, gated)
    gate = testing.float64_gate(problem) > 0
    token = torch.arange(300, device=CUDA)
    for place in ("dy", *(p for p in PLACES[:4] if gated or p != "w_up")):
        layer, upstream = (problem, dy.clone()) if place == "dy" else (spoil(problem, place, value), dy)
        if place == "dy":
            upstream[17, 5] = value
        found, dense = step(layer, upstream, gated), dense_step(layer, upstream, gated)
        for name, right in dense.items():
            lost = right.isfinite() & ~found[name].isfinite()
            assert not bool(lost.any()), f"{place}: {int(lost.sum())} elements of {name}"
        if place == "dy":
            testing.assert_same(found["x"][token != 17], clean["x"][token != 17], "x, other tokens")
            fired = gate[17]
            assert not bool(found["w_down"][fired, 5].isfinite().any())
            testing.assert_same(found["w_gate"][~fired], clean["w_gate"][~fired], "w_gate, other neurons")
        elif place == "x":
            testing.assert_same(found["x"][token != 17], clean["x"][token != 17], "x, other tokens")
            if gated and math.isnan(value):
                assert not bool(found["x"][17].isfinite().any())
        elif place == "w_down":
            fires = gate[:, NEURON]
            testing.assert_same(found["x"][~fires], clean["x"][~fires], "x, tokens that do not fire it")
