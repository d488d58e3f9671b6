"""Modules compiled, the packaged library."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.gpu.strategies import BY_NAME
from twell import testing
from twell.call.functional import Strategy
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.runtime import packaged


@BY_NAME
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
def test_compiled_modules(cls: Any, mode: str | None, strategy: Strategy) -> None:
    """Compiled by inductor, and into CUDA graphs: the bits of eager for new data in each step, in training too."""
    torch.compiler.reset()
    torch.manual_seed(0)
    mlp = cls(264, 776, bias=True, device="cuda", dtype=torch.bfloat16, strategy=strategy)
    compiled = torch.compile(mlp, fullgraph=True, mode=mode)
    parameters = tuple(mlp.parameters())
    for _ in range(5):
        x, dy = (torch.randn(130, 264, device="cuda").bfloat16() for _ in range(2))
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            testing.assert_same(compiled(x), mlp(x))
        torch.compiler.cudagraph_mark_step_begin()
        found = [g.clone() for g in torch.autograd.grad(compiled(x), parameters, dy)]
        for ours, right in zip(found, torch.autograd.grad(mlp(x), parameters, dy), strict=True):
            testing.assert_same(ours, right)


# The packaged library


@pytest.mark.skipif(packaged.read_manifest(packaged.FOLDER) is None, reason="no packaged kernels here")
def test_packaged_kernels_run_without_cutlass(same_family: str) -> None:
    """A fresh process: both layers run without importing cutlass, so nothing compiles."""
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
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-c", same_family + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"right": True, "cutlass": []}
