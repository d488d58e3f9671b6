"""``down_layout="auto"`` on a GPU: by rows in inference, as nn.Linear's for torch and others, still under a graph."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from twell.nn.layers import SparseGatedMLP
from twell.nn.models import set_down_layout

BF16 = torch.bfloat16
K, N = 264, 776


def decode(model: nn.Module, m: int = 1) -> Tensor:
    torch.manual_seed(m)
    with torch.no_grad():
        y: Tensor = model(torch.randn(m, K, device="cuda", dtype=BF16))
    return y


@pytest.mark.parametrize("first", [True, False], ids=["rows", "linear"])
def test_a_captured_graph_keeps_the_memory(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    layer = SparseGatedMLP(K, N, device="cuda", strategy="row", dtype=BF16).eval()
    kept = None if first else layer.down_proj.weight
    x = torch.randn(4, K, device="cuda", dtype=BF16)
    with torch.no_grad():
        expected = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        del kept
        place = layer.down_proj.weight.data_ptr()
        list(layer.parameters())
        layer(x)
        assert layer.down_proj.weight.data_ptr() == place
        assert is_rows_of(layer) == first
        assert ("a CUDA graph reads it" in caplog.text) == first
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)


def is_rows_of(layer: SparseGatedMLP) -> bool:
    return layer.down_proj.weight.stride() == (1, K)


def test_threads_and_streams() -> None:
    layer = SparseGatedMLP(2048, 5632, device="cuda", strategy="row", dtype=BF16).eval()
    x = torch.randn(4, 2048, device="cuda", dtype=BF16)
    set_down_layout(layer, "linear")
    with torch.no_grad():
        expected = layer(x)
    set_down_layout(layer, "auto")
    torch.cuda.synchronize()

    def work(lists: bool) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(100):
                if lists:
                    sum(p.numel() for p in layer.parameters())
                    # what would reuse memory too early
                    torch.full((2048, 5632), torch.nan, device="cuda", dtype=BF16)
                else:
                    assert torch.equal(layer(x), expected)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, (True, False, False, False)))


def test_laying_beside_a_capture() -> None:
    """Another thread may capture a graph of something else meanwhile."""
    layer = SparseGatedMLP(K, N, device="cuda", strategy="row", dtype=BF16).eval()
    decode(layer)
    list(layer.parameters())
    # drawing belongs to the capture of its device, whichever thread draws
    token = torch.randn(1, K, device="cuda", dtype=BF16)

    def work() -> None:
        for _ in range(3):
            with torch.no_grad():
                layer(token)
            list(layer.parameters())

    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x.add_(1)
        with ThreadPoolExecutor(1) as thread:
            failed = thread.submit(work).exception()
    graph.replay()
    assert failed is None
    assert torch.equal(x, torch.ones_like(x))
