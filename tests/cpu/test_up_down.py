"""``twell.sparse_up_down`` on a CPU: it is ``sparse_gated_ffn`` behind the gate, forward and backward."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import twell
from tests.cpu import fake_gpu
from twell._runtime import specs

BF16 = torch.bfloat16
ACTIVATIONS = [("relu", 0.0), ("relu2", 0.0), ("drelu", 0.0), ("fatrelu", 1.0)]
Named = dict[str, Any]


def integers(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Integers so small that every sum is exact."""
    return torch.randint(-2, 3, shape).to(dtype)


def operands(m: int, n: int, k: int, gated: bool = True, bias: bool = True, dtype: torch.dtype = BF16) -> Named:
    """Operands of ``sparse_up_down`` by name."""
    found: Named = {"x": None, "gate": integers(m, n, dtype=dtype), "w_up": None, "w_down": integers(k, n, dtype=dtype)}
    if gated:
        found |= {"x": integers(m, k, dtype=dtype), "w_up": integers(n, k, dtype=dtype)}
    if bias:
        found |= {"b_down": integers(k, dtype=dtype)} | ({"b_up": integers(n, dtype=dtype)} if gated else {})
    return found


def formula(
    x: Any, gate: Tensor, w_up: Any, w_down: Tensor, b_up: Any = None, b_down: Any = None, **how: Any
) -> Tensor:
    """The definition, in the dtype of the operands."""
    name, threshold = how.get("activation", "relu"), how.get("threshold", 0.0)
    g = torch.where(gate > threshold, gate, torch.zeros_like(gate))
    g = g.square() if name == "relu2" else g
    up = 1.0 if w_up is None else F.linear(x, w_up, b_up)
    h = g * (up.relu() if name == "drelu" else up)
    return F.linear(h, w_down, b_down)


@pytest.mark.parametrize("strategy", ["row", "union", "dense", "auto"])
@pytest.mark.parametrize(("activation", "threshold"), ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_inference_is_the_formula(gated: bool, activation: str, threshold: float, strategy: str) -> None:
    if activation == "drelu" and not gated:
        with pytest.raises(ValueError, match="drelu"):
            twell.sparse_up_down(**operands(3, 8, 8, False), activation="drelu")
        return
    for m, n, k in ((130, 264, 16), (1, 8, 8), (0, 16, 8)):
        given = operands(m, n, k, gated)
        how: Named = {"activation": activation, "threshold": threshold}
        y, aux = twell.sparse_up_down(**given, **how, strategy=strategy, return_aux=True)  # type: ignore[misc]
        expected = formula(**{a: None if t is None else t.double() for a, t in given.items()}, **how)
        assert torch.equal(y, expected.to(BF16))
        assert torch.equal(y, twell.sparse_up_down(**given, **how, strategy=strategy))
        fired = (given["gate"] > threshold).sum() / max(m, 1)
        assert aux.l0 == pytest.approx(float(fired))


@pytest.mark.parametrize(("activation", "threshold"), ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_are_those_of_the_formula(gated: bool, activation: str, threshold: float) -> None:
    """In float64, which the sparse path of training takes on a CPU; the last shape has more non-zeros than it holds."""
    if activation == "drelu" and not gated:
        return
    for m, n, k in ((150, 72, 16), (3, 8, 8), (140, 600, 8)):
        given = operands(m, n, k, gated, dtype=torch.float64)
        if n < 600:
            given["gate"] = torch.where(torch.rand(m, n) < 0.2, given["gate"].abs() + 1, -given["gate"].abs())
        leaves = {a: None if t is None else t.requires_grad_() for a, t in given.items()}
        needed = [t for t in leaves.values() if t is not None]
        how: Named = {"activation": activation, "threshold": threshold}
        dy = integers(m, k, dtype=torch.float64)
        y, aux = twell.sparse_up_down(**leaves, **how, strategy="union", return_aux=True)  # type: ignore[misc]
        found = torch.autograd.grad([y, aux.l1], needed, [dy, torch.tensor(3.0, dtype=torch.float64)])
        expected_y = formula(**leaves, **how)  # type: ignore[arg-type]
        hidden = formula(**{**leaves, "w_down": torch.eye(n, dtype=torch.float64), "b_down": None}, **how)  # type: ignore[arg-type]
        expected = torch.autograd.grad([expected_y, hidden.abs().sum() / m], needed, [dy, torch.tensor(3.0).double()])
        for name, own, other in zip([a for a, t in leaves.items() if t is not None], found, expected):
            assert torch.allclose(own, other, rtol=1e-12, atol=1e-12), name


def test_it_is_the_layer_behind_its_gate() -> None:
    """The same bits as the whole layer by each strategy and in training, and gradients of any subset."""
    given = operands(200, 264, 16)
    w_gate = integers(264, 16)
    gate = F.linear(given["x"], w_gate)
    layer = {name: given[name] for name in ("x", "w_up", "w_down", "b_up", "b_down")}
    for strategy in ("row", "union"):
        whole = twell.sparse_gated_ffn(w_gate=w_gate, **layer, strategy=strategy)  # type: ignore[call-overload]
        assert torch.equal(twell.sparse_up_down(gate=gate, **layer, strategy=strategy), whole)  # type: ignore[arg-type]
    dy = integers(200, 16)
    for needing in (["gate"], ["x", "gate"], ["w_down"], ["x", "gate", "w_up", "w_down", "b_up", "b_down"]):
        leaves = {a: t.clone().requires_grad_(a in needing) for a, t in {**layer, "gate": gate}.items()}
        y = twell.sparse_up_down(**leaves, strategy="union")
        found = dict(zip(needing, torch.autograd.grad(y, [leaves[a] for a in needing], dy)))
        whole_leaves = {a: t.detach().requires_grad_() for a, t in {**layer, "w_gate": w_gate}.items()}
        z = twell.sparse_gated_ffn(**whole_leaves, strategy="union")
        for name in set(needing) - {"x", "gate"}:
            (other,) = torch.autograd.grad(z, whole_leaves[name], dy, retain_graph=True)
            assert torch.equal(found[name], other), name
        if "gate" in needing:
            # behind it, the gate's projection has the gradients of the whole layer
            (dw_gate,) = torch.autograd.grad(z, whole_leaves["w_gate"], dy, retain_graph=True)
            own = found["gate"].double().t() @ given["x"].double()
            assert torch.allclose(own, dw_gate.double(), rtol=2**-6, atol=2**-6 * float(own.abs().max()))
            assert not found["gate"][gate <= 0].any()


def test_auto_is_dense_on_a_cpu() -> None:
    """On a CPU "auto" is dense and measures nothing."""
    given = operands(260, 64, 16)
    site = twell.AutoStrategy()
    dense = twell.sparse_up_down(**given, strategy=site)
    assert torch.equal(dense, twell.sparse_up_down(**given, strategy="dense"))  # type: ignore[arg-type]
    assert not site.explain()


@pytest.mark.parametrize("family", specs.FAMILIES)
@pytest.mark.parametrize("gated", [True, False])
def test_launches(family: str, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate's product is nowhere; few tokens have one kernel behind the packing where there is one."""
    gpu = fake_gpu.install(monkeypatch, family)
    t = operands(700, 264, 64, gated)
    given = t["gate"], t["x"], t["w_up"], integers(264, 64), t.get("b_up"), t["b_down"]
    up = ["sampled_up"] if gated else []

    def names(op: str, *arguments: Any) -> list[str]:
        gpu.clear()
        fake_gpu.on_cuda(op, *arguments)
        return gpu.names()

    few = gated and family == specs.SM90
    union = ["compact", *up, "gathered"]
    assert names("sparse_up_down", *given, 8, "row", None) == ["pack", "up_down_token"]
    assert names("sparse_up_down", *given, 8, "union", None) == ["pack", *(["up_down_tile"] if few else union)]
    gpu.clear()
    sys.modules["twell.ops.sparse_up_down"]._on_cuda[1](*given, 8, "union", None, "relu", 0.0)
    assert gpu.names() == ["pack", *union]
    assert names("sparse_up_down_forward", *given, 8) == ["pack", "compact", *up, "gathered", "overflow"]
    kept = fake_gpu.on_cuda("sparse_up_down_forward", *given, 8)[3]
    backward = (integers(700, 64), None, *given[:5], kept)
    weights = ["rank", "transpose", "weight_grad", "overflow"]
    dx = ["gathered"] if gated else []
    assert names("sparse_up_down_backward", *backward, gated, True, True) == ["sampled_grad", "scatter", *dx, *weights]
    assert names("sparse_up_down_backward", *backward, False, True, False) == ["sampled_grad", "scatter", "overflow"]
    assert names("sparse_up_down_backward", *backward, False, False, True) == ["sampled_grad", *weights]
    assert names("pack", t["gate"], 8) == ["pack"]
