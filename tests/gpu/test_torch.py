"""Modules compiled, autocast, gradients of some operands, calls without the dispatcher, the packaged library."""

import copy
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twell
from twell import testing
from twell._runtime import packaged
from twell.functional import Strategy
from twell.testing import FFN

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def layer() -> FFN:
    return testing.integer_problem(130, 264, 776, density=0.1, biases="gate up down", device="cuda")


@pytest.mark.parametrize("strategy", ["row", "union"])
def test_calls_without_the_dispatcher_have_its_bits(layer: FFN, strategy: Strategy) -> None:
    """Under a profiler, which shows operators, plain calls go through the dispatcher."""
    dy = testing.integer_upstream(layer)

    def results() -> list[Tensor]:
        gradients = testing.sparse_gradients(layer, dy, strategy=strategy)
        return [testing.sparse_output(layer, strategy=strategy), *gradients.values()]

    plain = results()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        watched = results()
    seen = {event.key for event in profiler.key_averages()}
    assert {"twell::ffn", "twell::hybrid_forward", "twell::hybrid_backward"} <= seen
    for ours, theirs in zip(plain, watched, strict=True):
        testing.assert_same(ours, theirs)


# torch.compile


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()


def modules(problem: FFN, strategy: Strategy = "row") -> list[tuple[nn.Module, bool]]:
    """The two modules with the weights and biases of a problem, and whether each is gated."""
    n, k = problem.w_gate.shape
    bias = problem.b_gate is not None
    options: dict[str, Any] = {"strategy": strategy, "device": "cuda", "dtype": problem.x.dtype}
    gated, non_gated = (kind(k, n, bias, **options) for kind in (twell.nn.SparseGatedMLP, twell.nn.SparseMLP))
    state = {"gate_proj.weight": problem.w_gate, "up_proj.weight": problem.w_up, "down_proj.weight": problem.w_down.t()}
    if bias:
        state |= {f"{name}_proj.bias": getattr(problem, f"b_{name}") for name in ("gate", "up", "down")}
    gated.load_state_dict(state)
    non_gated_state = {name.replace("gate_proj", "up_proj"): t for name, t in state.items() if "up_proj" not in name}
    non_gated.load_state_dict(non_gated_state)
    return [(gated.requires_grad_(False), True), (non_gated.requires_grad_(False), False)]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("strategy", ["row", "union"])
def test_compiled_modules(layer: FFN, mode: str | None, strategy: Strategy) -> None:
    """The modules eager, compiled, and compiled into CUDA graphs, with new data in each call."""
    for module, gated in modules(layer, strategy):
        expected = testing.exact_output(layer, gated=gated, rounded=strategy == "union")
        testing.assert_same(module(layer.x), expected)
        compiled = torch.compile(copy.deepcopy(module), fullgraph=True, mode=mode)
        for shift in (0, 1, 2, 3):
            y = compiled(layer.x.roll(shift, 0))
            testing.assert_same(y, expected.roll(shift, 0))


# Autocast, gradients, figures


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_autocast(layer: FFN, dtype: torch.dtype) -> None:
    """fp32 operands are cast to autocast's dtype; the result has that dtype."""
    wide, narrow = layer.map(Tensor.float), layer.map(lambda t: t.to(dtype))
    for gated in (True, False):
        with torch.autocast("cuda", dtype):
            y = testing.sparse_output(wide, gated=gated)
        assert y.dtype == dtype
        testing.assert_same(y, testing.exact_output(narrow, gated=gated))
    for module, gated in modules(wide):
        with torch.autocast("cuda", dtype):
            y = module(wide.x)
        testing.assert_same(y, testing.exact_output(narrow, gated=gated))


# The packaged library


@pytest.mark.skipif(packaged.read_manifest(packaged.FOLDER) is None, reason="no packaged kernels here")
def test_packaged_kernels_run_without_cutlass(same_family: str) -> None:
    """A fresh process that must not compile: both layers run without importing cutlass."""
    program = """
import json, sys
from twell import testing
problem = testing.integer_problem(65, 264, 776, density=0.1, device="cuda")
right = all(
    bool((testing.sparse_output(problem, gated=gated) == testing.exact_output(problem, gated=gated)).all())
    for gated in (True, False)
)
print(json.dumps({"right": right, "cutlass": [name for name in sys.modules if name.split(".")[0] == "cutlass"]}))
"""
    environment = dict(os.environ, TWELL_JIT="off", PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-c", same_family + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"right": True, "cutlass": []}
