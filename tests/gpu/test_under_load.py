"""Few tokens have the same bits while other processes and streams take the GPU's memory and its multiprocessors.

A call alone repeats its bits even where CTAs of a cluster hand memory over too early. Here several processes call a
layer from two streams each, with two inputs in turn, and fill memory beside: what arrives late is then of another call.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import twell
from tests.gpu.strategies import BF16, CUDA

PROCESSES, STREAMS, SECONDS = 6, 2, 4.0


def layer(kind: str) -> tuple[int, Callable[[Tensor], Tensor]]:
    """K, and a layer whose first column of x holds back nine gates in ten."""

    def weight(*shape: int, spread: float) -> Tensor:
        return (torch.randn(*shape, device=CUDA) * spread).to(BF16)

    experts = (16,) if kind == "experts" else ()
    k, n = {"gated": (2048, 5632), "plain": (2048, 8192), "experts": (2688, 1856), "e4m3": (2048, 5632)}[kind]
    first, up = (weight(*experts, n, k, spread=k**-0.5) for _ in range(2))
    down = weight(*experts, n, k, spread=n**-0.5)
    first[..., 0] = -1.28
    if kind == "experts":
        ids = torch.arange(4 * 6, device=CUDA, dtype=torch.int32).view(4, 6) % 16
        weights = torch.rand(4, 6, device=CUDA)
        return k, lambda x: twell.sparse_experts(x, first, down.mT, ids, weights, strategy="row")
    if kind == "plain":
        return k, lambda x: twell.sparse_ffn(x, first, down.t(), strategy="row")
    if kind == "e4m3":
        gate, wide, narrow = (twell.quantize(w) for w in (first, up, down.t()))
        # by rows, as kernels of few tokens read them
        narrow = narrow._replace(values=narrow.values.t().contiguous().t())
        return k, lambda x: twell.sparse_gated_ffn(x, gate, wide, narrow, strategy="row")
    return k, lambda x: twell.sparse_gated_ffn(x, first, up, down.t(), strategy="row")


@torch.no_grad()
def strain(kind: str) -> tuple[int, int]:
    """Call a layer of four tokens for some seconds; return the number of wrong results, and of calls."""
    k, call = layer(kind)
    inputs = [torch.randn(4, k, device=CUDA).to(BF16).index_fill_(1, torch.tensor([0], device=CUDA), 1) for _ in "ab"]
    right = [call(x) for x in inputs]
    torch.cuda.synchronize()
    end, wrong, calls = time.monotonic() + SECONDS, [0] * STREAMS, [0] * STREAMS

    @torch.no_grad()
    def repeat(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while time.monotonic() < end:
                which = calls[index] % 2
                wrong[index] += not torch.equal(call(inputs[which]), right[which])
                calls[index] += 1

    def fill() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while time.monotonic() < end:
                torch.full((2048, 5632), torch.nan, device=CUDA, dtype=BF16)
                torch.cuda.current_stream().synchronize()

    with ThreadPoolExecutor(STREAMS + 1) as threads:
        filling = threads.submit(fill)
        list(threads.map(repeat, range(STREAMS)))
        filling.result()
    return sum(wrong), sum(calls)


@pytest.mark.parametrize("kind", ["gated", "plain", "experts", "e4m3"])
def test_few_tokens_keep_their_bits(kind: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.test_under_load", kind]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    found = [tuple(map(int, child.communicate(timeout=120)[0].split())) for child in children]
    assert [child.returncode for child in children] == [0] * PROCESSES
    assert [wrong for wrong, _ in found] == [0] * PROCESSES
    assert all(calls > 100 for _, calls in found)


if __name__ == "__main__":
    print(*strain(sys.argv[1]))
