"""Calls on e4m3 weights without a GPU: the formula, what operands may be, the modules, and launches on a fake GPU."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn

import twell
from tests.cases.layouts import laid_out
from tests.cpu import fake_gpu
from twell.ops import float8
from twell.ops.ffn import direct
from twell.ops.float8 import E4M3, Float8
from twell.testing.bits import assert_same
from twell.testing.case import Case
from twell.testing.operands import build

BF16 = torch.bfloat16
M, K, N = 9, 48, 80
CASE = Case.of("layer m=9 k=48 n=80 exact=False biases=gate+up+down density=0.5 scales=row")


def problem(**change: Any) -> dict[str, Any]:
    case = CASE.replace(**change)
    return laid_out(case, build(case))


def weights() -> Any:
    return twell.quantize(torch.ones(N, K)), twell.quantize(torch.ones(N, K)), twell.quantize(torch.ones(K, N))


X = torch.ones(M, K, dtype=BF16)


def test_weights_with_blocks_are_refused() -> None:
    up, down = twell.quantize(torch.ones(272, K), "block"), twell.quantize(torch.ones(K, 272))
    with pytest.raises(NotImplementedError, match=r"w_up must have scales by row or tensor, got blocks: give it deq"):
        twell.sparse_ffn(X, up, down)


def test_hostile_tokens() -> None:
    """No token changes another; a broken one is NaN; tiny and huge ones keep their size."""
    torch.manual_seed(0)
    x = torch.randn(8, K).bfloat16()
    x[1, 3], x[2, 4], x[3] = torch.nan, torch.inf, 0
    x[4] = x[0] * 2.0**-100
    x[5] = x[0] * 2.0**100
    gate, up, down = (twell.quantize(torch.randn(shape) / 7) for shape in ((N, K), (N, K), (K, N)))
    for strategy in ("row", "union"):
        y = twell.sparse_ffn(x, up, down, strategy=strategy)  # type: ignore[arg-type]
        assert y[1:3].isnan().all()
        assert not y[3].any()
        assert y[[0, 4, 5, 6, 7]].isfinite().all()
        torch.testing.assert_close(y[4].double() * 2.0**100, y[0].double(), rtol=2**-6, atol=1e-3)
        torch.testing.assert_close(y[5].double() * 2.0**-100, y[0].double(), rtol=2**-6, atol=1e-3)
        alone = twell.sparse_gated_ffn(x[6:7], gate, up, down, strategy=strategy)  # type: ignore[arg-type]
        torch.testing.assert_close(alone, twell.sparse_gated_ffn(x, gate, up, down, strategy=strategy)[6:7])  # type: ignore[arg-type]


def model(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"dtype": BF16, "activation": "relu2", "compression": 4}
    return nn.Sequential(twell.nn.SparseGatedMLP(K, N, bias, **options), twell.nn.SparseMLP(K, N, bias, **options))  # type: ignore[arg-type]


def test_quantize_a_model() -> None:
    before = model()
    x, settings = torch.randn(5, K).bfloat16(), before[0].compression
    with torch.no_grad():
        right = before(x)
    after = copy.deepcopy(before)
    assert twell.quantize_(after, granularity="tensor") is after
    assert [type(layer).__name__ for layer in after] == ["Float8MLP"] * 2
    assert after[0].compression == settings
    with torch.no_grad():
        y = after(x)
        assert (y - right).float().norm() < 0.2 * right.float().norm()
    state = after.state_dict()
    assert state["0.down_proj.weight"].dtype == E4M3
    assert state["0.down_proj.weight_scale"].shape == (K, 1)
    assert state["0.down_proj.weight"].stride() == (1, K)
    other = twell.quantize_(copy.deepcopy(before))
    other.load_state_dict(state)
    assert other[0].down_proj.weight.stride() == (1, K)
    with torch.no_grad():
        assert_same(other(x), y)


def test_a_layer_with_two_places_is_quantised_once() -> None:
    layer = twell.nn.SparseMLP(K, N, dtype=BF16)
    both = nn.Sequential(layer, nn.Sequential(layer))
    assert twell.quantize_(both)[0] is both[1][0]
    assert isinstance(both[0], twell.nn.Float8MLP)


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(gated=False, biases="")
    fake_gpu.install(monkeypatch, "sm80")
    up, down = p["w_up"], p["w_down"]
    layer = p["x"], up.values, None, down.values.t(), None, None, None
    scales = None, up.by_rows(), None, down.by_rows()
    with pytest.raises(NotImplementedError, match="sparse kernels for sm_90a alone"):
        direct(*layer, 8, "row", None, "relu", 0.0, False, False, None, *scales, True)


def test_what_a_state_dict_may_hold() -> None:
    made = twell.quantize_(model())
    right, state = made(X), made.state_dict()
    key = "0.up_proj.weight"
    for name, wrong in (
        (key, state[key].view(torch.uint8)),
        (f"{key}_scale", -state[f"{key}_scale"]),
        (f"{key}_scale", state[f"{key}_scale"] * torch.inf),
    ):
        with pytest.raises(RuntimeError, match=rf"{name} must be"):
            made.load_state_dict({**state, name: wrong})
        assert_same(made(X), right)


def test_static_scales_of_layers() -> None:
    gate, up, down = weights()
    scale = torch.tensor(0.25)
    layer = twell.nn.Float8MLP(gate, up, down, input_scale=scale)
    scale.mul_(100)
    assert layer.input_scale.tolist() == [0.25]


def test_a_hook_that_does_not_run_is_told(caplog: pytest.LogCaptureFixture) -> None:
    made = twell.quantize_(model())
    right = made(X)
    assert not caplog.text
    made[0].down_proj.register_forward_hook(lambda module, given, y: 2 * y)
    assert_same(made(X), right)
    assert "hooks on projections in e4m3 do not run" in caplog.text


def test_a_quantised_layer_keeps_its_dtypes() -> None:
    made = twell.quantize_(model())
    right = made(X)
    for cast in (made.float, made.half, made.bfloat16):
        cast()
    assert_same(made(X), right)
    made[0].up_proj.weight = nn.Parameter(made[0].up_proj.weight.bfloat16(), requires_grad=False)
    with pytest.raises(TypeError, match=r"got torch.bfloat16 and torch.float32: a quantised layer has no others"):
        made(X)


def test_scales_of_files_are_those_of_rows() -> None:
    """They are [R, 1], which is no shape of blocks."""
    torch.manual_seed(1)
    gate, up, down = (twell.quantize(torch.randn(shape) / 7) for shape in ((N, K), (N, K), (K, N)))
    right = twell.sparse_gated_ffn(X, gate, up, down, strategy="row")
    columns = [Float8(record.values, record.scale[:, None].bfloat16()) for record in (gate, up, down)]
    assert_same(twell.sparse_gated_ffn(X, *columns, strategy="row"), right)
    assert_same(twell.nn.Float8MLP(*columns, strategy="row")(X), right)


def test_x_in_e4m3_of_any_shape() -> None:
    gate, up, down = weights()
    x = torch.randn(2, 3, K).bfloat16()
    flat = float8.quantize_tokens(x.view(-1, K))
    right = twell.sparse_gated_ffn(flat, gate, up, down, strategy="row").view(x.shape)
    for scale in (flat.scale.view(2, 3), flat.scale.view(2, 3, 1)):
        given = Float8(flat.values.view(x.shape), scale)
        assert_same(twell.sparse_gated_ffn(given, gate, up, down, strategy="row"), right)


def test_quantize_keeps_the_layout() -> None:
    rows = torch.randn(2, N, K)
    assert twell.quantize(rows[0].t()).values.stride() == (1, K)
    assert twell.quantize(rows.transpose(1, 2)).values.stride() == (N * K, 1, K)


def test_a_cpu_runs_a_call_that_would_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph that was made for a GPU; it counts nothing."""
    monkeypatch.setattr(sys.modules["twell.ops.ffn"], "imposed_on_call", lambda *device: "")
    gate, up, down = weights()
    x = X[:1].repeat(40, 1)
    chosen, *named = (
        twell.sparse_gated_ffn(x, gate, up, down, strategy=s) for s in (twell.AutoStrategy(), "row", "union")
    )
    assert any(torch.equal(chosen, y) for y in named)


def test_a_static_scale_of_experts_is_that_of_all_tokens() -> None:
    case = Case.of("experts m=9 k=48 n=80 experts=5 slots=2 exact=False gated=False density=0.5 scales=row")
    p = laid_out(case, build(case))
    scale, up, down, given = torch.tensor([0.03]), p["w_up"], p["w_down"], (p["expert_ids"], p["weights"])
    layer = p["x"], up.values, None, down.values.transpose(1, 2), *given
    how = 8, "row", "relu", 0.0, False, None, None
    found = torch.ops.twell.experts(*layer, *how, scale, up.by_rows(), None, down.by_rows())
    assert_same(found, twell.sparse_experts(float8.quantize_tokens(p["x"], scale), up, down, *given, strategy="row"))
