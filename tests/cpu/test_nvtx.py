"""Ranges that TWELL_NVTX=1 marks, recorded by a stand-in for torch's NVTX, and the operators in torch's profiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twell import testing
from twell.call import execution
from twell.runtime import nvtx, program

ROOT = Path(__file__).resolve().parents[2]

CALLS = """
import contextlib, json, sys, types, torch

events, depth = [], 0

def push(message):
    global depth
    events.append("> " * depth + message)
    depth += 1

def pop():
    global depth
    depth -= 1

torch._C._nvtx = torch.cuda.nvtx._nvtx = types.SimpleNamespace(rangePushA=push, rangePop=pop)

import twell
from twell import ops, testing
from twell.runtime import program, resolve, specs

problem = testing.integer_problem(16, 8, 264)
leaves = problem.map(lambda t: t.clone().requires_grad_())
found = {}

@contextlib.contextmanager
def noted(name):
    del events[:]
    yield
    found[name] = list(events)
    assert depth == 0, name

def gated(p, **options):
    return twell.sparse_gated_ffn(p.x, p.w_gate, p.w_up, p.w_down.t(), **options)

with noted("gated"):
    gated(problem, strategy="union", compression=4)
with noted("dense"):
    gated(problem, strategy="dense")
with noted("train"):
    gated(leaves, strategy="union").sum().backward()
# an error leaves no range open
with noted("refused"), contextlib.suppress(NotImplementedError):
    ops.gate_pack(leaves.x, leaves.w_gate, None, 8)
# tracing marks nothing; what runs afterwards are the operators
compiled = torch.compile(gated, fullgraph=True, backend="eager")
with noted("compiled"):
    compiled(problem, strategy="row")
step = torch.compile(gated, fullgraph=True, backend="aot_eager")
with noted("compiled step"):
    step(leaves, strategy="union").sum().backward()
# a launch, without a GPU
resolve.require_architecture = lambda index: "sm_90a"
torch.cuda.current_device = lambda: 0
resolve.resolve = lambda spec, arch: lambda *arguments: None
with noted("launch"):
    program.launch(specs.UpDownTokenSpec("bfloat16", 2048, 4, True))
print(json.dumps(found))
"""

SIZES = "m=16 k=8 n=264 dtype=bfloat16"
# what each call marks, ">" inside another range
EVENTS = {
    "gated": [f"sparse_gated_ffn {SIZES} strategy=union", "> ffn"],
    "dense": [f"sparse_gated_ffn {SIZES} strategy=dense"],
    "train": [
        *(f"sparse_gated_ffn {SIZES} strategy=union", "> hybrid_forward"),
        *("sparse_gated_ffn.backward", "> hybrid_backward"),
    ],
    "refused": ["gate_pack"],
    "compiled": ["ffn"],
    "compiled step": ["hybrid_forward", "hybrid_backward"],
    "launch": ["up_down_token_bf16_k2048_x4"],
}


def test_what_calls_mark() -> None:
    paths = os.pathsep.join((str(ROOT / "python"), str(ROOT)))
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TWELL_NVTX": "1"}
    command = [sys.executable, "-c", CALLS]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == EVENTS


@pytest.mark.skipif(nvtx.ON, reason="TWELL_NVTX=1")
def test_off_is_as_if_it_were_not_there() -> None:
    def function() -> None: ...

    assert nvtx.marked(lambda: nvtx.range("x"))(function) is function
    for marked in (program.launch, execution.run):
        assert not hasattr(marked, "__wrapped__")


def test_torchs_profiler_shows_operators_and_shapes() -> None:
    problem = testing.integer_problem(16, 8, 264)
    leaves = problem.map(lambda t: t.clone().requires_grad_())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        testing.sparse_output(problem, strategy="row")
        testing.sparse_layer(leaves, strategy="row")[0].sum().backward()
    shapes = {event.name: event.input_shapes for event in profile.events() if event.name.startswith("twell::")}
    assert shapes["twell::ffn"][:4] == [[16, 8], *[[264, 8]] * 3]
    assert shapes["twell::hybrid_forward"][:4] == [[16, 8], *[[264, 8]] * 3]
    assert shapes["twell::hybrid_backward"][0] == [16, 8]
