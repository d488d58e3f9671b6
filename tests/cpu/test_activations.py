"""The ReLU family in functions, operators and modules: formulas against float64 and integers, errors, graphs, state."""

import math
from typing import Any

import pytest
import torch
from activations import DTYPES, FAMILY, every_value, form
from torch import Tensor

import twell
from twell import ops, testing
from twell.base import activation as _activation
from twell.base.activation import Activation, activation_of
from twell.call import autograd
from twell.ops import hybrid
from twell.runtime import geometry

BF16, FP16 = torch.bfloat16, torch.float16


# Special values


@DTYPES
@pytest.mark.parametrize("strategy", ["row", "union", "dense"])
def test_nan_and_infinite_gates(dtype: torch.dtype, strategy: Any) -> None:
    """NaN passes every activation, infinity too, and what is at a threshold does not."""
    gates = torch.tensor([math.nan, math.inf, -math.inf, 3.0, 3.5, -1.0, 0.0, 2.0], dtype=dtype)
    x = torch.zeros(8, 8, dtype=dtype)
    x[:, 0] = 1
    w_gate, b_gate, w_down = torch.zeros(8, 8, dtype=dtype), gates, torch.eye(8, dtype=dtype)
    w_up, b_up = torch.zeros(8, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    expected = {
        "relu": [math.nan, math.inf, 0, 3, 3.5, 0, 0, 2],
        "relu2": [math.nan, math.inf, 0, 9, 12.25, 0, 0, 4],
        "drelu": [math.nan, math.inf, 0, 3, 3.5, 0, 0, 2],
        "fatrelu": [math.nan, math.inf, 0, 0, 3.5, 0, 0, 0],
    }
    for (name, threshold), right in zip(FAMILY.items(), expected.values(), strict=True):
        given = (x, w_gate, w_up, w_down)
        with torch.no_grad():
            y = twell.sparse_gated_ffn(*given, b_gate=b_gate, b_up=b_up, strategy=strategy, **form(name, threshold))
        # a product with a matrix spreads what is not finite
        finite = torch.tensor(right).isfinite()
        hidden = ops.reglu(b_gate, b_up, name, threshold)
        testing.assert_same(hidden, torch.tensor(right, dtype=dtype))
        assert not y[0].isfinite().any()
        b = torch.where(finite, gates, -1)
        with torch.no_grad():
            y = twell.sparse_gated_ffn(*given, b_gate=b, b_up=b_up, strategy=strategy, **form(name, threshold))
        testing.assert_same(y[0], torch.tensor(right, dtype=dtype).masked_fill(~finite, 0))


def test_squares_that_leave_the_range_of_fp16_have_right_gradients() -> None:
    """h = g^2 u is rounded once: a square of 2^18 times 2^-10 is 256; gradients come from the gate, not its square."""
    gate = torch.tensor([512.0, 2.0**-13, 300.0], dtype=FP16)
    up = torch.tensor([2.0**-10, 2.0**14, 1.0], dtype=FP16)
    assert ops.reglu(gate, up, "relu2").tolist() == [256.0, 2.0**-12, math.inf]
    d_gate, d_up = ops.reglu_backward(torch.ones(3, dtype=FP16), gate, up, "relu2")
    assert d_gate.tolist() == [1.0, 4.0, 600.0]
    assert d_up.tolist() == [math.inf, 0.0, math.inf]
    # the same layer through each strategy, an identity
    x = torch.zeros(3, 8, dtype=FP16)
    x[:, 0] = 1
    eye = torch.eye(8, dtype=FP16)
    b_gate, b_up = (torch.nn.functional.pad(t[:2], (0, 6)) for t in (gate, up))
    for strategy in ("row", "union", "dense"):
        leaf = x.clone().requires_grad_()
        b = b_gate.clone().requires_grad_()
        y = twell.sparse_gated_ffn(
            leaf, 0 * eye, 0 * eye, eye, b_gate=b, b_up=b_up, strategy=strategy, activation="relu2"
        )
        assert y[0, :2].tolist() == [256.0, 2.0**-12], strategy
        (gradient,) = torch.autograd.grad(y[0].sum(), b)
        assert gradient[:2].tolist() == [1.0, 4.0], strategy


def test_a_threshold_is_rounded_as_torch_rounds_it() -> None:
    values = [0.1, 1.3, 3.0, 1 / 3, 65504.0, 1e-7, 6e-8, 2.0**-25, 1e-40, 1.00390625, 1.001953125]
    for dtype in (BF16, FP16, torch.float32, torch.float64):
        for value in values:
            expected = torch.tensor(value, dtype=torch.float64).float().to(dtype) if dtype.itemsize == 2 else value
            expected = float(torch.as_tensor(expected, dtype=dtype))
            assert Activation("fatrelu", value).level(dtype) == expected, (dtype, value)
    for dtype in (BF16, FP16):
        for value in values:
            pair = _activation.threshold_pair(Activation("fatrelu", value), dtype)
            bits = int(torch.tensor(Activation("fatrelu", value).level(dtype), dtype=dtype).view(torch.int16))
            assert pair == bits * 0x10001
            assert 0 <= pair < 1 << 31
    with pytest.raises(ValueError, match=r"threshold must be finite in torch.float16, got 70000"):
        Activation("fatrelu", 70000.0).level(FP16)
    assert Activation("fatrelu", 70000.0).level(BF16) > 69000


# The formulas, and the activation of dense layers


@DTYPES
def test_relu2_of_dense_layers_rounds_once(dtype: torch.dtype) -> None:
    dh, gate, up = every_value(dtype)
    g, u, d = gate.float().relu(), up.float(), dh.float()
    testing.assert_same(ops.reglu(gate, up, "relu2"), (g * g * u).to(dtype))
    d_gate, d_up = ops.reglu_backward(dh, gate, up, "relu2")
    testing.assert_same(d_gate, (d * (2 * g) * u).masked_fill(g == 0, 0).to(dtype))
    testing.assert_same(d_up, (d * (g * g)).to(dtype))


@pytest.mark.parametrize("name", FAMILY)
def test_derivatives_of_dense_layers_to_any_order(name: Any) -> None:
    gate, up = (torch.randn(5, 9, dtype=torch.float64, requires_grad=True) for _ in range(2))
    activation = activation_of(name, 0.25 if name == "fatrelu" else 0.0)

    def fused(gate: Tensor, up: Tensor) -> Tensor:
        return autograd.gated_relu(gate, up, activation)

    assert torch.autograd.gradcheck(fused, (gate, up), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(fused, (gate, up))
    assert torch.autograd.gradgradcheck(fused, (gate, up.detach()))
    leaves = (torch.randn(3, 8, dtype=torch.float64), *torch.randn(3, 8, 8, dtype=torch.float64))
    leaves = tuple(t.requires_grad_() for t in leaves)
    assert torch.autograd.gradgradcheck(
        lambda *t: twell.sparse_gated_ffn(*t, strategy="dense", **activation.options()), leaves
    )


def test_thresholds_may_be_numbers_of_numpy() -> None:
    np = pytest.importorskip("numpy")
    for kind in (np.float16, np.float32, np.float64, np.int64):
        assert activation_of("fatrelu", kind(2)) == Activation("fatrelu", 2.0)
    with pytest.raises(TypeError, match="threshold must be a finite number of at least 0, got bool"):
        activation_of("fatrelu", np.bool_(True))


def test_codes_fit_the_kernels() -> None:
    assert set(_activation.NAMES) == set(FAMILY)
    assert {name: Activation(name).code() for name in FAMILY} == geometry.ACTIVATIONS
    assert hybrid.RELU.code() == 0
