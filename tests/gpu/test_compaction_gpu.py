"""Counting and compacting on a GPU: counts of the kernel, no waits, graphs, moves, memory."""

import pytest
import torch
from torch import Tensor, nn

import twell
from tests.gpu.strategies import BIASES, CUDA, assert_nothing_waits, module
from twell import testing
from twell.nn import compaction
from twell.testing import FFN


def problem() -> FFN:
    """Few non-zeros, so most neurons never fire."""
    return testing.integer_problem(130, 264, 1032, density=0.003, biases=BIASES, device=CUDA)


def counted(mlp: nn.Module, x: Tensor) -> twell.Firing:
    with twell.count_firing(mlp) as firing, torch.no_grad():
        mlp(x)
    return firing[""]


def fired(p: FFN) -> Tensor:
    return (testing.float64_gate(p) != 0).sum(0)


def test_counts_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real numbers, some so near zero that the order of summation decides their sign; also in chunks."""
    p = testing.make("skew29", 4096, 1024, 2816, device=CUDA)
    mlp = module(p, layout="auto", strategy="row")
    expected = (twell.pack(p.x, p.w_gate, p.b_gate).unpack() != 0).sum(0)
    layer = counted(mlp, p.x)
    assert torch.equal(layer.counts, expected)
    with torch.no_grad():
        _, aux = mlp(p.x, return_aux=True)
    assert int(layer.counts.sum()) == round(float(aux.l0) * 4096)
    monkeypatch.setattr(compaction, "CHUNK_GATES", 1 << 20)
    assert torch.equal(counted(mlp, p.x).counts, expected)


def test_counting_never_waits_and_graphs_count_at_every_replay() -> None:
    p = problem()
    mlp, x = module(p, layout="auto", strategy="row"), p.x.clone().requires_grad_()
    firing: dict[str, twell.Firing] = {}

    def calls() -> None:
        with twell.count_firing(mlp) as counts:
            mlp(x).sum().backward()
            with torch.no_grad():
                mlp(x)
        firing.update(counts)

    assert_nothing_waits(calls)
    assert firing[""].tokens == 260
    assert torch.equal(firing[""].counts, 2 * fired(p))
    mlp.requires_grad_(False)
    counted(mlp, p.x)
    graph = torch.cuda.CUDAGraph()
    with twell.count_firing(mlp) as counts:
        with torch.cuda.graph(graph):
            mlp(p.x)
        for _ in range(3):
            graph.replay()
    # capturing itself computes nothing
    assert counts[""].tokens == 390
    assert torch.equal(counts[""].counts, 3 * fired(p))
