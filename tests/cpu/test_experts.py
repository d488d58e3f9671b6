"""``sparse_experts`` without a GPU: the formula, what its operands may be, and the launches on a fake GPU."""

import sys

import pytest
import torch
from torch import Tensor

import twell
from tests.cpu import fake_gpu

BF16 = torch.bfloat16
T, K, N, E, TOP = 13, 24, 40, 5, 3


def problem(
    t: int = T, k: int = K, n: int = N, count: int = E, top: int = TOP, dtype: torch.dtype = BF16, gated: bool = False
) -> dict[str, Tensor]:
    """Small integers whose sums are exact in fp32; some ids are -1, and some repeat."""
    torch.manual_seed(t + k + n)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape).to(dtype)

    x = integers(t, k) * (torch.rand(t, k) < 0.2)
    found = {
        "x": x.to(dtype),
        "w_up": integers(count, n, k),
        "w_down": integers(count, n, k).transpose(1, 2),
        "expert_ids": torch.randint(-1, count, (t, top)),
        "weights": 2.0 ** torch.randint(-1, 2, (t, top)),
    }
    return found | ({"w_gate": integers(count, n, k)} if gated else {})


def test_gradients_are_those_of_dense_products() -> None:
    p = problem(t=4, k=8, n=8, dtype=torch.float64, gated=True)
    floating = [name for name in p if name != "expert_ids"]
    given = [torch.randn_like(p[name], dtype=torch.float64).requires_grad_() for name in floating]

    def run(*operands: Tensor) -> Tensor:
        return twell.sparse_experts(expert_ids=p["expert_ids"], **dict(zip(floating, operands)))  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(run, given)
    p = problem()
    p["w_up"].requires_grad_()
    assert twell.sparse_experts(**p).requires_grad


@pytest.mark.parametrize("invariant", [False, True])
def test_launches_by_row(invariant: bool, gpu: fake_gpu.FakeGpu) -> None:
    p = problem(t=70, k=64, n=264, gated=True)
    given = p["x"], p["w_gate"], p["w_up"], p["w_down"].transpose(1, 2), p["expert_ids"], p["weights"]
    fake_gpu.on_cuda("experts", *given, 8, "row", "relu", 0.0, invariant)
    helpers, units = gpu.launches[-1][1][-4], gpu.launches[0][1][5]
    assert (helpers == 0) == invariant
    assert len(units) >= E + (70 * TOP - E) // gpu.launches[1][0].tokens or len(units) == 70 * TOP


def test_weights_of_slots_without_an_expert_may_be_nan() -> None:
    p = problem()
    p["expert_ids"][0, 1] = -1
    right = twell.sparse_experts(**p, strategy="row")
    p["weights"][0, 1] = torch.nan
    for strategy in ("row", "dense", "auto"):
        y = twell.sparse_experts(**p, strategy=strategy)
        assert not y.isnan().any()
        torch.testing.assert_close(y, right, rtol=0.02, atol=0.02 * right.float().abs().max().item())


def test_dense_takes_what_rows_do_not() -> None:
    p = problem(k=64, n=12)
    assert twell.sparse_experts(**p).shape == p["x"].shape
    assert twell.sparse_experts(**p, strategy="dense").shape == p["x"].shape
    with pytest.raises(ValueError, match=r'N must be a positive multiple of 8 .*, got 12; strategy="dense" takes it'):
        twell.sparse_experts(**p, strategy="row")
    with pytest.raises(ValueError, match=r"for the sparse kernels, got 12$"):
        twell.sparse_experts(**p, invariant=True)


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
def test_a_module_that_trains_is_compiled_and_exported(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    p = problem(dtype=dtype, gated=True)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("w_up", "w_down", "w_gate")
            self.up, self.down, self.gate = (torch.nn.Parameter(p[name].clone()) for name in names)

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return twell.sparse_experts(x, self.up, self.down, ids, weights, w_gate=self.gate)

    layer, given = Layer(), (p["x"], p["expert_ids"], p["weights"])
    right = layer(*given)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    many = [{0: torch.export.Dim("tokens", min=2, max=4096)}] * 3
    exported = torch.export.export(layer, given, dynamic_shapes=many, strict=False)
    torch.testing.assert_close(exported.module()(*(operand[:4] for operand in given)), right[:4])
    found = []
    for run in (layer, compiled):
        y = run(*given)
        torch.testing.assert_close(y, right)
        found.append(torch.autograd.grad(y.sum(), list(layer.parameters())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_grid_has_so_many_units(gpu: fake_gpu.FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(t=40, k=64, n=264, gated=True)
    given = p["x"], p["w_gate"], p["w_up"], p["w_down"].transpose(1, 2), p["expert_ids"], p["weights"]
    monkeypatch.setattr(sys.modules["twell.ops.pairs"], "_MOST_UNITS", 3)
    with pytest.raises(NotImplementedError, match="expected at most 3 units of"):
        fake_gpu.on_cuda("experts", *given, 8, "row", "relu", 0.0, False)
    assert not gpu.names()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_rank_without_tokens_has_gradients(dtype: torch.dtype) -> None:
    p = {name: t.to(dtype) if t.is_floating_point() else t for name, t in problem().items()}
    p["expert_ids"] = torch.full_like(p["expert_ids"], -1)
    p["w_up"] = p["w_up"].clone().requires_grad_()
    twell.sparse_experts(**p).sum().backward()
    assert not p["w_up"].grad.any()
