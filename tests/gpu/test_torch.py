"""PyTorch's rules: opcheck, torch.compile, CUDA graphs, streams, devices, autocast, gradients, no host sync."""

import copy
import json
import os
import subprocess
import sys
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import twell
from twell import ops, testing
from twell._runtime import packaged
from twell.testing import FFN

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def layer() -> FFN:
    return testing.integer_problem(130, 264, 776, density=0.1, biases="gate up down", device="cuda")


def run(problem: FFN) -> Tensor:
    return testing.sparse_output(problem)


# opcheck

# Every gate is positive and the tiles are whole, so every row-tile is spilled and the whole spill is written. Elsewhere
# it is undefined by design, and opcheck, which compares all outputs of two runs, would compare what memory held before.
BIASES = ["", "gate up down"]


@pytest.fixture(params=BIASES, ids=["no-bias", "bias"])
def full(request: pytest.FixtureRequest) -> FFN:
    return testing.integer_problem(70, 72, 512, density=1, biases=request.param, device="cuda")


def test_opcheck_gate_pack(full: FFN) -> None:
    for compression in (2, 4, 8):
        torch.library.opcheck(ops.gate_pack, (full.x, full.w_gate, full.b_gate, compression))


def test_opcheck_readers(full: FFN) -> None:
    words, spill, _ = ops.gate_pack(full.x, full.w_gate, full.b_gate, 8)
    up_down = (full.x, words, spill, full.w_up, full.w_down, full.b_up, full.b_down, 8)
    torch.library.opcheck(ops.up_down, up_down)
    torch.library.opcheck(ops.up_down, (None, words, spill, None, full.w_down, None, full.b_down, 8))
    torch.library.opcheck(ops.unpack, (words, spill, 512, 8))


@pytest.mark.parametrize("strategy", ["row", "union"])
def test_calls_without_the_dispatcher_have_its_bits(layer: FFN, strategy: Literal["row", "union"]) -> None:
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


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_function(layer: FFN, gated: bool, backend: str) -> None:
    """fullgraph, with neighbours to fuse, for two numbers of tokens."""

    def block(problem: FFN) -> Tensor:
        doubled = problem._replace(x=problem.x * 2 - problem.x)
        # which does not round the hidden state
        return testing.sparse_output(doubled, gated=gated, strategy="row") + 1

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    with torch.no_grad():
        for problem in (layer, layer.rows(0, 77)):
            testing.assert_same(compiled(problem), testing.exact_output(problem, gated=gated) + 1)


def modules(problem: FFN) -> list[tuple[nn.Module, bool]]:
    """The two modules with the weights and biases of a problem, and whether each is gated."""
    n, k = problem.w_gate.shape
    bias = problem.b_gate is not None
    gated = twell.nn.SparseGatedMLP(k, n, bias, strategy="row", device="cuda", dtype=problem.x.dtype)
    non_gated = twell.nn.SparseMLP(k, n, bias, strategy="row", device="cuda", dtype=problem.x.dtype)
    state = {"gate_proj.weight": problem.w_gate, "up_proj.weight": problem.w_up, "down_proj.weight": problem.w_down.t()}
    if bias:
        state |= {f"{name}_proj.bias": getattr(problem, f"b_{name}") for name in ("gate", "up", "down")}
    gated.load_state_dict(state)
    non_gated_state = {name.replace("gate_proj", "up_proj"): t for name, t in state.items() if "up_proj" not in name}
    non_gated.load_state_dict(non_gated_state)
    return [(gated.requires_grad_(False), True), (non_gated.requires_grad_(False), False)]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_modules(layer: FFN, mode: str | None) -> None:
    """The modules eager, compiled, and compiled into CUDA graphs, with new data in each call."""
    for module, gated in modules(layer):
        expected = testing.exact_output(layer, gated=gated)
        testing.assert_same(module(layer.x), expected)
        compiled = torch.compile(copy.deepcopy(module), fullgraph=True, mode=mode)
        for shift in (0, 1, 2, 3):
            y = compiled(layer.x.roll(shift, 0))
            testing.assert_same(y, expected.roll(shift, 0))


# CUDA graphs and streams


def test_cuda_graph_follows_its_inputs(layer: FFN) -> None:
    """One graph, captured with sparse data, is replayed with no non-zeros, all positive gates and sparse data again."""
    static = layer.map(Tensor.clone)
    graph, outputs = testing.captured(
        lambda: (testing.sparse_output(static), testing.sparse_output(static, gated=False), packed_gate(static))
    )
    for density, seed in ((0.1, 0), (0, 1), (1, 2), (0.02, 3), (0.1, 0)):
        new = testing.integer_problem(130, 264, 776, density=density, biases="gate up down", seed=seed, device="cuda")
        for old, tensor in zip(static, new, strict=True):
            assert old is not None
            assert tensor is not None
            old.copy_(tensor)
        for output in outputs:
            output.view(torch.uint8).fill_(0xFF)
        graph.replay()
        testing.assert_same(outputs[0], testing.exact_output(new), f"gated, density {density}")
        testing.assert_same(outputs[1], testing.exact_output(new, gated=False), f"non-gated, density {density}")
        testing.assert_same(outputs[2], testing.float64_gate(new).to(BF16), f"unpacked, density {density}")


def packed_gate(problem: FFN) -> Tensor:
    return twell.pack(problem.x, problem.w_gate, problem.b_gate).unpack()


def test_cuda_graph_replays_the_same_bits() -> None:
    problem = testing.make("topic128", 2048)
    expected = run(problem)
    graph, y = testing.captured(lambda: run(problem))
    for _ in range(100):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)


def test_side_stream(layer: FFN) -> None:
    """All launches are on the current stream: they wait for its earlier writes, and the host does not wait."""
    x = torch.full_like(layer.x, torch.nan)

    def calls() -> tuple[Tensor, Tensor]:
        return run(layer._replace(x=x)), testing.sparse_output(layer._replace(x=x), gated=False)

    calls()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # for 0.1 s a launch on another stream would read NaN
        x.copy_(layer.x)
        gated, non_gated = calls()
    assert not stream.query()
    stream.synchronize()
    testing.assert_same(gated, testing.exact_output(layer))
    testing.assert_same(non_gated, testing.exact_output(layer, gated=False))


@pytest.mark.parametrize("strategy", ["row", "union"])
def test_two_streams_at_once(strategy: Literal["row", "union"]) -> None:
    """Calls that overlap share no scratch memory."""
    problems = [testing.make(name, 4096, seed=i) for i, name in enumerate(("topic128", "skew29"))]
    expected = [testing.sparse_output(problem, strategy=strategy) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, problem in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                results.append(testing.sparse_output(problem, strategy=strategy))
        torch.cuda.synchronize()
        for y, right in zip(results, expected, strict=True):
            assert torch.equal(y, right)


def test_nothing_waits_for_the_gpu(layer: FFN) -> None:
    """Once kernels are loaded, no call makes the host wait."""

    def calls() -> None:
        run(layer)
        testing.sparse_output(layer, gated=False)
        packed = twell.pack(layer.x, layer.w_gate, layer.b_gate)
        packed.unpack()
        packed.nnz()
        twell.sparse_gated_ffn(layer.x, layer.w_gate, layer.w_up, layer.w_down.t(), return_aux=True)
        twell.sparse_ffn(layer.x, layer.w_gate, layer.w_down.t(), return_aux=True)

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            layer.x.sum().item()  # the mode detects a wait
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices(layer: FFN) -> None:
    """The tensors' device counts, not the current one, for both and in both orders; the current one is left alone."""
    expected = testing.exact_output(layer)
    for current in (0, 1):
        with torch.cuda.device(current):
            for device in ("cuda:1", "cuda:0"):
                y = run(layer.to(device))
                assert y.device == torch.device(device)
                testing.assert_same(y, expected.to(device))
                assert torch.cuda.current_device() == current
    with pytest.raises(ValueError, match="cuda:1"):
        run(layer._replace(w_up=layer.w_up.to("cuda:1")))


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


@pytest.mark.parametrize("name", ["x", "w_gate", "w_up", "w_down"])
def test_operands_that_require_grad_get_gradients(layer: FFN, name: str) -> None:
    """By either strategy; without grad mode the path of inference runs."""
    wanting = layer._replace(**{name: getattr(layer, name).clone().requires_grad_()})
    x, w_gate, w_up, w_down = wanting[:4]
    for strategy in ("auto", "dense"):
        y = twell.sparse_gated_ffn(x, w_gate, w_up, w_down.t(), strategy=strategy)
        y.float().sum().backward()
        assert getattr(wanting, name).grad.isfinite().all()
    with torch.no_grad():
        testing.assert_same(run(wanting), testing.exact_output(layer))


def test_operators_refuse_gradients(layer: FFN) -> None:
    wanting = layer.x.clone().requires_grad_()
    words, spill, _ = ops.gate_pack(layer.x, layer.w_gate, None, 8)
    weight = layer.w_down.clone().requires_grad_()
    for call in (
        lambda: ops.gate_pack(wanting, layer.w_gate, None, 8),
        lambda: ops.up_down(wanting, words, spill, layer.w_up, layer.w_down, None, None, 8),
        lambda: ops.up_down(None, words, spill, None, weight, None, None, 8),
    ):
        with pytest.raises(NotImplementedError, match=r"twell\.sparse"):
            call()
        with torch.no_grad():
            call()


@pytest.mark.parametrize("strategy", ["row", "union"])
def test_aux(layer: FFN, strategy: Literal["row", "union"]) -> None:
    """l1 and l0 against float64, gated and not."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    gate = testing.float64_gate(layer)
    assert b_up is not None
    hidden = gate * torch.nn.functional.linear(x.double(), w_up.double(), b_up.double())
    biases = {"b_gate": b_gate, "b_up": b_up, "b_down": b_down}
    _, aux = twell.sparse_gated_ffn(x, w_gate, w_up, w_down.t(), **biases, strategy=strategy, return_aux=True)
    assert float(aux.l1) == pytest.approx(float(hidden.abs().sum() / 130), rel=1e-6)
    assert float(aux.l0) == pytest.approx(float((gate > 0).sum()) / 130, rel=1e-6)
    _, aux = twell.sparse_ffn(x, w_gate, w_down.t(), b_up=b_gate, b_down=b_down, strategy=strategy, return_aux=True)
    assert float(aux.l1) == pytest.approx(float(gate.sum() / 130), rel=1e-6)
    assert float(aux.l0) == pytest.approx(float((gate > 0).sum()) / 130, rel=1e-6)
    _, aux = twell.sparse_gated_ffn(x[:0], w_gate, w_up, w_down.t(), strategy=strategy, return_aux=True)
    assert [float(aux.l1), float(aux.l0)] == [0, 0]


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
