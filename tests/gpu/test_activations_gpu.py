"""The ReLU family on the GPU with values that Cases do not have: against the CPU, bit by bit."""

import itertools
import math
from typing import Any

import pytest
import torch
from activations import DTYPES, EVERY, FAMILY
from torch import Tensor

from twell import ops, testing
from twell.testing import FFN

CUDA = torch.device("cuda")
FP16 = torch.float16


@DTYPES
@pytest.mark.parametrize("name", FAMILY)
def test_the_activation_of_dense_layers_for_every_gate(name: str, dtype: torch.dtype) -> None:
    """Beside special values, with ReLU beside any."""
    gate = torch.arange(1 << 16).to(torch.int16).view(dtype).expand(20, -1).contiguous()
    info = torch.finfo(dtype)
    special = [0.0, -0.0, 1.0, -3.0, math.inf, -math.inf, math.nan, info.tiny, -info.tiny / 4, info.max, 1 / 3, 1e-3]
    values, generator = torch.tensor(special).to(dtype), torch.Generator().manual_seed(0)
    some = [values[torch.randint(len(special), gate.shape, generator=generator)] for _ in range(2)]
    shuffled = [gate[:, torch.randperm(1 << 16, generator=generator)] for _ in range(2)]
    for threshold in (0.0, 1.3, float(info.tiny) / 2) if name == "fatrelu" else (0.0,):
        for dh, up in (some, shuffled)[: 1 + (name == "relu")]:
            ours = testing.poisoned(lambda t=threshold, up=up: (ops.reglu(gate.to(CUDA), up.to(CUDA), name, t),))[0]
            testing.assert_same(ours.cpu(), ops.reglu(gate, up, name, threshold), f"h, threshold {threshold}")
            found = ops.reglu_backward(dh.to(CUDA), gate.to(CUDA), up.to(CUDA), name, threshold)
            for key, a, b in zip(("d_gate", "d_up"), found, ops.reglu_backward(dh, gate, up, name, threshold)):
                testing.assert_same(a.cpu(), b, f"{key}, threshold {threshold}")


def layer_of(gates: Tensor, ups: Tensor, m: int) -> FFN:
    """A layer whose gates and up projections are these [N] for each token; y has a column per neuron, or its sum."""
    n, dtype = len(gates), gates.dtype
    zeros = torch.zeros(n, n, dtype=dtype, device=CUDA)
    x = torch.zeros(m, n, dtype=dtype, device=CUDA)
    return FFN(x, zeros, zeros, torch.eye(n, dtype=dtype, device=CUDA), gates.to(CUDA), ups.to(CUDA), None)


@DTYPES
@pytest.mark.parametrize("m", [1, 130, 2100])
def test_thresholds_of_special_gates(dtype: torch.dtype, m: int) -> None:
    """What is packed: NaN and infinity too, nothing at or below the threshold, subnormal numbers in their order."""
    info = torch.finfo(dtype)
    tiny = float(info.tiny)
    gates = [math.nan, math.inf, -math.inf, -math.nan, 1.3, 1.296875, 1.3046875, 0.0, -0.0, tiny, tiny / 2, tiny / 4]
    # more tiles than one, of which the smaller words spill
    some = torch.tensor([*gates, *[-1.0] * 4], dtype=dtype).repeat(17)
    problem = layer_of(some, torch.ones(len(some), dtype=dtype), m)
    thresholds = (0.0, 1.3, tiny / 2, tiny / 4, float(info.max))
    for threshold, compression in itertools.product(thresholds, (2, 4, 8)):
        arguments = (problem.x, problem.w_gate, problem.b_gate, compression, threshold)
        found = testing.poisoned(lambda a=arguments: ops.gate_pack(*a))
        expected = ops.gate_pack(*(a.cpu() if isinstance(a, Tensor) else a for a in arguments))
        testing.assert_packed_same(found, expected, len(some), compression)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("m", [1, 40, 130, 1500, 2100])
def test_squares_that_leave_the_range_of_fp16(gated: bool, m: int) -> None:
    """h = g^2 u is rounded once; gradients come from the stored gate, not from its square."""
    gates = torch.tensor([512.0, 2.0**-13, 3.0, 2.0**-20, *[-1.0] * 4], dtype=FP16)
    ups = torch.tensor([2.0**-10, 2.0**14, 1.0, 2.0**15, *[1.0] * 4], dtype=FP16)
    if not gated:
        gates[0] = 128.0
    # 2^-26 and 2^-40 are below half of the smallest number
    h = [256.0, 2.0**-12, 9.0, 0.0] if gated else [2.0**14, 0.0, 9.0, 0.0]
    problem = layer_of(gates, ups, m)
    right = torch.zeros(m, 8, device=CUDA)
    right[:, :4] = torch.tensor(h, device=CUDA)
    for strategy in ("row", "union", "row+invariant", "dense"):
        with torch.no_grad():
            y = testing.sparse_output(problem, gated=gated, strategy=strategy, activation="relu2")  # type: ignore[arg-type]
        testing.assert_same(y, right.to(FP16), strategy)
    if m > 200:
        return
    for strategy in ("union", "dense"):
        leaves = problem.map(lambda t: t.clone().requires_grad_())
        y, _ = testing.sparse_layer(leaves, gated=gated, strategy=strategy, activation="relu2")
        assert leaves.b_gate is not None
        (gradient,) = torch.autograd.grad(y[0].sum(), leaves.b_gate)
        slope = [1.0, 4.0, 6.0, 2.0**-4] if gated else [256.0, 2.0**-12, 6.0, 2.0**-19]
        assert gradient[:4].tolist() == slope, strategy


@EVERY
@DTYPES
def test_non_finite_values_as_on_the_cpu(name: Any, threshold: float, gated: bool, dtype: torch.dtype) -> None:
    """Non-finite gates and up projections of some neurons, finite ones of silent neurons beside them."""
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([math.nan, math.inf, -math.inf, 1.0, -1.0, 0.0, 4.0, 300.0])
    for m in (1, 130, 2100):
        for _ in range(3):
            gates = special[torch.randint(8, (64,), generator=generator)]
            ups = special[torch.randint(8, (64,), generator=generator)]
            # silent gates only, so that a result may be finite
            quiet = gates.where(gates.isfinite(), -1.0)
            for g, u in ((gates, ups), (quiet, ups.where((quiet <= threshold) | ups.isfinite(), 1.0))):
                problem = layer_of(g.to(dtype), u.to(dtype), m)
                layer = tuple(problem if gated else problem._replace(w_up=None, b_up=None))
                on_cpu = tuple(None if t is None else t.cpu() for t in layer)
                for strategy in ("row", "union"):
                    y = ops.ffn(*layer, 8, strategy, None, name, threshold)
                    expected = ops.ffn(*on_cpu, 8, strategy, None, name, threshold)
                    if bool(expected.isfinite().all()):
                        testing.assert_same(y.cpu(), expected, strategy)
                    else:
                        # an infinite h times a weight of zero is NaN, or skipped: all of y, or its columns
                        assert torch.equal(y.cpu().isfinite().all(1), expected.isfinite().all(1)), strategy
