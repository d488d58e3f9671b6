"""sparsify_ on plain PyTorch modules: the layers that it finds compute the same, with the same parameters."""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ffns import BF16, EACH, FORMS, Block, Gated, K, N, Plain, model, take, tokens
from torch import nn

import twell
from twell.integrations.sparsify import layers
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.nn.pairs import DeferredUp, SparseDown

# the forms that make different classes of layers
KINDS = pytest.mark.parametrize(
    "form",
    ["gated", "plain", "literal", "block", "drelu", "own fatrelu", "w1 w3 w2", "fused", "wi wo", "split", "sequence"],
)


def layer_of(m: nn.Module) -> Any:
    (layer,) = layers(m).values()
    return layer


@EACH
def test_same_function_gradients_and_parameters(form: str) -> None:
    dense = model(form)
    sparse = copy.deepcopy(dense)
    keys, parameters = list(sparse.state_dict()), dict(sparse.named_parameters())
    assert list(layers(take(sparse, strategy="union"))) == [FORMS[form].layer]
    layer = layer_of(sparse)
    assert (layer.activation, layer.threshold) == FORMS[form][2:]
    assert layer.down_proj.weight.stride() == (N, 1)
    assert list(sparse.state_dict()) == keys
    assert {name: id(p) for name, p in sparse.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert all(torch.equal(p, dense.get_parameter(name)) for name, p in parameters.items())
    results = []
    for m in (dense, sparse):
        x = tokens(requires_grad=True)
        y = m(x)
        (y * tokens().flip(0)).sum().backward()
        results.append({"y": y, "x": x.grad, **{name: p.grad for name, p in m.named_parameters()}})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        assert torch.equal(sparse(tokens()), dense(tokens()))


@KINDS
def test_figures_and_counts(form: str) -> None:
    stock = model(form, BF16)
    m = take(copy.deepcopy(stock), strategy="row", compression=4)
    name, layer = FORMS[form].layer, layer_of(m)
    assert (layer.strategy, layer.compression) == ("row", 4)
    assert {row.layer for row in twell.explain(m)} == {name}
    with torch.no_grad(), twell.count_firing(m) as counts:
        y = m(tokens(BF16))
        torch.testing.assert_close(y, stock(tokens(BF16)), rtol=2e-2, atol=2e-2)
        assert counts[name].tokens == 14
        assert 0 < int(counts[name].counts.sum()) < 14 * N
    layer.record_aux = True
    with torch.no_grad():
        for strategy in ("dense", "row"):
            layer.strategy = strategy
            again = m(tokens(BF16))
            assert round(float(layer.aux.l0) * 14, 3) == int(counts[name].counts.sum())
    assert torch.equal(again, y)


@pytest.mark.parametrize("form", ["gated", "block", "fused", "split"])
@pytest.mark.parametrize(("made", "called"), [("inside", "inside"), ("inside", "outside"), ("outside", "inside")])
def test_under_inference_mode(form: str, made: str, called: str) -> None:
    with torch.inference_mode(made == "inside"):
        m = model(form, BF16)
    with torch.inference_mode(), torch.no_grad():
        expected = m(tokens(BF16))
    with torch.inference_mode(called == "inside"):
        take(m, strategy="union")
    with torch.inference_mode():
        torch.testing.assert_close(m(tokens(BF16)), expected, rtol=2e-2, atol=2e-2)
    if made == "outside":
        m(tokens(BF16)).float().sum().backward()
        assert layer_of(m).down_proj.weight.grad is not None


def test_filter_takes_candidates_alone() -> None:
    m = nn.ModuleDict({"a": Gated(), "b": nn.Sequential(Block(), nn.Linear(K, K)), "c": Gated(nn.SiLU())})
    asked = []

    def accept(module: nn.Module, name: str) -> bool:
        asked.append((type(module), name))
        return name != "c"

    assert list(layers(take(m, accept))) == ["a", "b.0.fc2"]
    assert asked == [(Gated, "a"), (Block, "b.0"), (Gated, "c")]
    assert type(m["c"]) is Gated


@KINDS
def test_attributes_of_projections_stay(form: str) -> None:
    """As code sets them for initialisation or learning rates; and plain projections of layers stay the same objects."""
    m = model(form).train().requires_grad_(False)
    linears = {name: layer for name, layer in m.named_modules() if isinstance(layer, nn.Linear)}
    for name, linear in linears.items():
        linear.lr_mult, linear.strategy = name, "mine"
    state = torch.random.get_rng_state()
    take(m, strategy="union")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {module.training for module in m.modules()} == {True}
    assert not any(p.requires_grad for p in m.parameters())
    for name, linear in linears.items():
        now = m.get_submodule(name)
        assert now.lr_mult == name
        assert isinstance(now, nn.Linear)
        assert isinstance(now, (DeferredUp, SparseDown)) or now is linear or type(linear) is not nn.Linear
    assert layer_of(m).strategy == "union"


def test_a_module_in_two_places_becomes_one() -> None:
    shared = Gated()
    m = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": Gated()})
    m["c"].gate_proj = shared.gate_proj
    assert list(layers(take(m))) == ["a", "c"]
    assert m["a"] is m["b"][0]
    assert isinstance(m["a"], SparseGatedMLP)
    assert m["c"].gate_proj.weight is m["a"].gate_proj.weight


def test_layers_of_twell_are_left_alone() -> None:
    m = nn.ModuleDict({"a": Gated(), "b": SparseMLP(K, N), "c": Block()})
    assert list(layers(take(m))) == ["a", "b", "c.fc2"]
    with pytest.raises(ValueError, match="3 layers of twell are there already"):
        take(m)


ACTIVATIONS: dict[str, Any] = {"SiLU": nn.SiLU(), "gelu": F.gelu, "<lambda>": lambda x: F.relu(x).pow(3)}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("form", [Gated, Block])
def test_other_activations(form: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    m, relu = nn.Sequential(form(ACTIVATIONS[name])).eval(), nn.Sequential(form()).eval()
    with pytest.raises(ValueError, match=rf"must apply ReLU, got {name}\. "):
        take(m)
    relu.load_state_dict(m.state_dict())
    with caplog.at_level(logging.INFO, "twell"):
        assert len(layers(take(m, activation="relu"))) == 1
    assert f"ReLU replaces {name}; layers that need training before use: 1" in caplog.text
    with torch.no_grad():
        torch.testing.assert_close(m(tokens()), relu(tokens()))


@pytest.mark.parametrize(
    ("k", "n", "why"),
    [
        (32, 100, "N must be a positive multiple of 8 up to 65,536.*got 100"),
        pytest.param(16392, 8, "K must be .* got 16,392", marks=pytest.mark.nightly),
        (8, 65544, "N must be .* got 65,544"),
    ],
)
def test_sizes_beyond_the_kernels(k: int, n: int, why: str) -> None:
    with torch.device("meta"):
        m = nn.ModuleDict({"ok": Gated(), "odd": Gated(k=k, n=n)})
    with pytest.raises(ValueError, match=rf"odd \(Gated\): {why}"):
        take(m)
    assert list(layers(take(m, strategy="dense"))) == ["ok", "odd"]


def test_a_model_without_layers_is_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match=r"known by name or with their names in names=; got Linear without any$"):
        take(nn.Linear(K, K))
    with pytest.raises(ValueError, match="that filter_fn accepts; it left out 2, the first '0'"):
        take(nn.Sequential(Gated(), Block()), lambda *_: False)
    with pytest.raises(ValueError, match=r"0 \(Linear3\) is no layer: .*, got up_proj from 32 to 792, down"):
        take(nn.Sequential(type("Linear3", (Plain,), {"__init__": _three_times})()))
    with pytest.raises(
        ValueError, match="must go from K to N, the last one from N to K, got 0 from 32 to 64, 2 from 64 to 8"
    ):
        take(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
    with pytest.raises(TypeError, match=r"must be Python code, got a RecursiveScriptModule of torch\.jit"):
        take(torch.jit.script(nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K))))


def _three_times(self: Any) -> None:
    nn.Module.__init__(self)
    self.up_proj, self.down_proj = nn.Linear(K, 3 * N), nn.Linear(N, K)


def test_a_model_that_is_itself_a_layer() -> None:
    m: Any = Gated()
    expected = m(tokens())
    assert list(layers(take(m))) == [""]
    torch.testing.assert_close(m(tokens()), expected)
    assert isinstance(m, SparseGatedMLP)
    m = Block()
    assert list(layers(take(m))) == ["fc2"]
    assert isinstance(m.fc1, DeferredUp)
    assert isinstance(m.fc2, SparseDown)
    assert isinstance(m.activation_fn, nn.Identity)
