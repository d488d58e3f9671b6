"""Surroundings of a call: captures that fork, captures of other threads, devices."""

import subprocess
import sys

import pytest
import torch

from twell import testing

# Streams


@pytest.mark.parametrize("m", [8, 300, 2048])
def test_a_capture_that_forks_and_joins(m: int) -> None:
    p, q = testing.make("topic29", m), testing.make("skew29", m, seed=1)
    right = [testing.sparse_output(p, strategy="row"), *(testing.sparse_output(r, strategy="union") for r in (q, p))]
    main, side, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=main):
        a = testing.sparse_output(p, strategy="row")
        side.wait_stream(main)
        with torch.cuda.stream(side):
            b = testing.sparse_output(q, strategy="union")
        c = testing.sparse_output(p, strategy="union")
        main.wait_stream(side)
        d = b + c
    for _ in range(20):
        for y in (a, b, c, d):
            y.fill_(torch.nan)
        graph.replay()
        for y, answer in zip((a, b, c, d), (*right, right[1] + right[2]), strict=True):
            testing.assert_same(y, answer)


# Threads

# an invalidated capture leaves traces, so it gets its own process
BESIDE_A_CAPTURE = """
import sys, threading, torch, twell

cold, mlp = sys.argv[1] == "cold", twell.nn.SparseGatedMLP(1024, 2816, dtype=torch.bfloat16, device="cuda")
mlp.strategy = twell.AutoStrategy(period=1) if sys.argv[2] == "auto" else sys.argv[2]
mlp.requires_grad_(sys.argv[3] == "training")
x, a = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((4096, 1024), (512, 512)))
ready, go, done, errors = threading.Event(), threading.Event(), threading.Event(), []


def calls(count, stream):
    for _ in range(count):
        y = mlp(x)
        if y.requires_grad:
            y.sum().backward()
        if not go.is_set():
            stream.synchronize()


def other():
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            if cold:
                # memory that the calls will want, and none of their kernels
                [torch.empty(1 << size, device="cuda", dtype=torch.uint8) for size in (30, *[18] * 16)]
            else:
                calls(6, stream)
            ready.set()
            go.wait(60)
            calls(4, stream)
            twell.explain(mlp)
    except Exception as error:
        errors.append(error)
    finally:
        ready.set()
        done.set()


thread = threading.Thread(target=other)
thread.start()
ready.wait(60)
torch.cuda.synchronize()
stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
with torch.cuda.stream(stream):
    (a @ a) @ a
    stream.synchronize()
    graph.capture_begin(capture_error_mode="global")
    try:
        b = a @ a
        go.set()
        done.wait(60)
        c = b @ a
    finally:
        go.set()
        graph.capture_end()
graph.replay()
torch.cuda.synchronize()
thread.join()
assert not errors, errors
assert torch.equal(c, (a @ a) @ a)
"""


@pytest.mark.parametrize(
    "how",
    ["warm auto inference", "warm auto training", "warm row inference", "warm row training", "cold row inference"],
)
def test_calls_beside_a_capture_of_another_thread(how: str, same_family: str) -> None:
    command = [sys.executable, "-c", same_family + BESIDE_A_CAPTURE, *how.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


# Devices


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["row", "union", "training"])
def test_two_devices(strategy: str) -> None:
    """The tensors' device counts, in forward and in backward; the current one is left alone."""
    problem = testing.integer_problem(130, 264, 776, biases="gate up down", device="cuda:0", dtype=torch.float16)
    dy = testing.integer_upstream(problem)
    right = testing.exact_gradients(problem, dy) if strategy == "training" else {"y": testing.exact_output(problem)}
    for current in (0, 1):
        with torch.cuda.device(current):
            for device in ("cuda:1", "cuda:0"):
                own = problem.to(device)
                if strategy == "training":
                    found = testing.sparse_gradients(own, dy.to(device), strategy="union")
                else:
                    found = {"y": testing.sparse_output(own, strategy=strategy)}
                for name, t in found.items():
                    assert t.device == torch.device(device)
                    testing.assert_same(t.to("cuda:0"), right[name].to(t.dtype), name)
                assert torch.cuda.current_device() == current
    with pytest.raises(ValueError, match="cuda:1"):
        testing.sparse_output(problem._replace(w_up=problem.w_up.to("cuda:1")), strategy="row")
