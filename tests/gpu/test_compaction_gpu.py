"""Counting and compacting on the GPU: counts, exact bits, gradients, moves, no host sync, memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twell
from twell import _compaction, testing
from twell.nn import SparseGatedMLP, SparseMLP
from twell.testing import FFN

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
STRATEGIES = pytest.mark.parametrize("strategy", ["row", "union"])


def problem(m: int = 130, k: int = 264, n: int = 1032, density: float = 0.003, **options: Any) -> FFN:
    """A problem of few non-zeros, so most neurons never fire."""
    return testing.integer_problem(m, k, n, density=density, biases="gate up down", device=DEVICE, **options)


def layer_of(p: FFN, gated: bool, **options: Any) -> SparseGatedMLP | SparseMLP:
    """The module with the weights and biases of a problem; without gate, w_gate is its up projection."""
    n, k = p.w_gate.shape
    bias = p.b_gate is not None
    cls = SparseGatedMLP if gated else SparseMLP
    mlp = cls(k, n, bias, dtype=p.x.dtype, device=DEVICE, **options)
    state = {"gate_proj.weight": p.w_gate, "up_proj.weight": p.w_up, "down_proj.weight": p.w_down.t()}
    if bias:
        state |= {f"{name}_proj.bias": getattr(p, f"b_{name}") for name in ("gate", "up", "down")}
    if not gated:
        state = {name.replace("gate_proj", "up_proj"): t for name, t in state.items() if "up_proj" not in name}
    mlp.load_state_dict(state)
    return mlp


def counted(mlp: nn.Module, x: Tensor) -> twell.Firing:
    with twell.count_firing(mlp) as firing, torch.no_grad():
        mlp(x)
    return firing[""]


def fired(p: FFN) -> Tensor:
    """Return int64 [N]: how often each neuron fires, in float64."""
    return (testing.float64_gate(p) != 0).sum(0)


def same_parameters(a: nn.Module, b: nn.Module) -> None:
    for (name, one), (other_name, other) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert (name, one.device, one.stride()) == (other_name, other.device, other.stride())
        testing.assert_same(one.detach(), other.detach(), name)


@GATED
@pytest.mark.parametrize("strategy", ["row", "union", "auto", "dense"])
@pytest.mark.parametrize(("m", "dtype"), [(0, BF16), (1, FP16), (130, BF16)])
def test_counts_what_fires(gated: bool, strategy: Any, m: int, dtype: torch.dtype) -> None:
    p = problem(m, density=0.05, dtype=dtype)
    layer = counted(layer_of(p, gated, strategy=strategy), p.x)
    assert layer.counts.device.type == DEVICE
    assert layer.tokens == m
    assert torch.equal(layer.counts, fired(p))


def test_counts_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real numbers, some so near zero that the order of summation decides their sign; also in chunks."""
    p = testing.make("skew29", 4096, 1024, 2816, device=DEVICE)
    mlp = layer_of(p, True, strategy="row")
    expected = (twell.pack(p.x, p.w_gate, p.b_gate).unpack() != 0).sum(0)
    layer = counted(mlp, p.x)
    assert torch.equal(layer.counts, expected)
    with torch.no_grad():
        _, aux = mlp(p.x, return_aux=True)
    assert int(layer.counts.sum()) == round(float(aux.l0) * 4096)
    monkeypatch.setattr(_compaction, "CHUNK_GATES", 1 << 20)
    assert torch.equal(counted(mlp, p.x).counts, expected)


def test_counting_never_waits() -> None:
    p = problem()
    mlp = layer_of(p, True, strategy="row")
    x = p.x.clone().requires_grad_()
    counted(mlp, x)
    mlp(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with twell.count_firing(mlp) as firing:
            mlp(x).sum().backward()
            with torch.no_grad():
                mlp(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert firing[""].tokens == 260
    assert torch.equal(firing[""].counts, 2 * fired(p))


def test_a_graph_counts_at_every_replay() -> None:
    p = problem()
    mlp = layer_of(p, True, strategy="row").requires_grad_(False)
    counted(mlp, p.x)
    static = p.x.clone()
    with twell.count_firing(mlp) as firing:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            mlp(static)
        for _ in range(3):
            graph.replay()
    # capturing itself computes nothing
    assert firing[""].tokens == 390
    assert torch.equal(firing[""].counts, 3 * fired(p))


@GATED
@STRATEGIES
@pytest.mark.parametrize(("m", "dtype"), [(3, FP16), (130, BF16), (1000, BF16)])
def test_same_bits_where_no_removed_neuron_fires(gated: bool, strategy: Any, m: int, dtype: torch.dtype) -> None:
    p = problem(m, dtype=dtype)
    mlp = layer_of(p, gated, strategy=strategy)
    compacted, report = twell.compact(mlp, counted(mlp, p.x))
    (layer,) = report.layers
    assert 0 < layer.alive <= layer.kept < layer.neurons
    assert compacted.compaction.kept.device == p.x.device
    assert compacted.compaction.removed.device.type == "cpu"
    assert compacted.down_proj.weight.is_contiguous()
    with torch.no_grad():
        y, aux = compacted(p.x, return_aux=True)
        expected, expected_aux = mlp(p.x, return_aux=True)
    testing.assert_same(y, testing.exact_output(p, gated=gated))
    testing.assert_same(y, expected)
    assert aux == expected_aux
    same_parameters(twell.restore(compacted), mlp)


def test_moves_and_state_dicts() -> None:
    p = problem()
    mlp = layer_of(p, True)
    compacted, _ = twell.compact(mlp, counted(mlp, p.x))
    there = copy.deepcopy(compacted).cpu()
    assert there.compaction.kept.device.type == "cpu"
    with torch.no_grad():
        testing.assert_same(there(p.x.cpu()), testing.exact_output(p).cpu())
    state = compacted.state_dict()
    fresh, _ = twell.compact(SparseGatedMLP(264, 1032, True, dtype=BF16, device=DEVICE), state["compaction.kept"])
    fresh.load_state_dict(state)
    for module in (there.to(DEVICE), fresh):
        assert module.compaction.removed.device.type == "cpu"
        same_parameters(twell.restore(module), mlp)
        with torch.no_grad():
            testing.assert_same(module(p.x), testing.exact_output(p))


def test_frees_memory_in_place() -> None:
    k, n = 1024, 8192
    model = nn.Sequential(*(SparseGatedMLP(k, n, dtype=BF16, device=DEVICE) for _ in range(4)))
    masks = {str(i): torch.arange(n, device=DEVICE) < n // 2 for i in range(4)}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _, report = twell.compact(model, masks, inplace=True)
    assert report.bytes_saved == 4 * 3 * k * n // 2 * 2
    assert before - torch.cuda.memory_allocated() > 0.99 * report.bytes_saved
    # at most one and a half layers on top
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 3 * k * n * 2
