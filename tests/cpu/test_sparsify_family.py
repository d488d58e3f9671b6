"""Layers whose projections have other names or are fused, in sequences, encoders and experts, and other activations."""

import copy
import logging
import re
import types
from typing import Any

import pytest
import torch
from ffns import Adapter, Fused, Gated, K, Meta, N, Squared, Told, Wi, encoder_layer, model, take, tokens, written
from recipe_models import gate_l1
from torch import nn

import twell
from twell import recipe
from twell.integrations.sparsify import layers, sparsify_
from twell.nn.distributed import SparseMLPParallel


@pytest.mark.parametrize("form", ["fused, up first", "w1 w3 w2"])
def test_figures_of_the_gate_call_adapted_projections(form: str) -> None:
    m = take(model(form), strategy="union").train()
    ((name, layer),) = layers(m).items()
    first = layer._projections[0]
    adapter = Adapter(layer._modules[first])  # type: ignore[arg-type]
    setattr(layer, first, adapter)
    tracker = recipe.SparsityTracker(m, every=1)
    recipe.record_aux(m, inputs=True)
    x = tokens()
    with torch.autocast("cpu", torch.bfloat16), twell.count_firing(m) as counts, tracker.watch(0):
        m(x)
    with torch.autocast("cpu", torch.bfloat16):
        inner: Any = {}
        handle = layer.register_forward_pre_hook(lambda _, args: inner.update(x=args[0]))
        m.eval()(x)
        handle.remove()
        gate = layer._gate(inner["x"]).relu()
    fired = int((gate != 0).sum())
    assert int(counts[name].counts.sum()) == fired
    (row,) = tracker.read().layers
    assert row.dead == int((counts[name].counts == 0).sum())
    layer.aux = None
    assert gate_l1(m).item() == pytest.approx(gate.float().sum(-1).mean().item(), rel=2e-2)


@pytest.mark.parametrize(("form", "role"), [("fused", "gate_proj"), ("w1 w3 w2", "down_proj"), ("wi wo", "up_proj")])
def test_a_projection_cannot_be_set_by_another_name(form: str, role: str) -> None:
    (layer,) = layers(take(model(form), strategy="union")).values()
    setattr(layer, role, nn.Linear(K, N))
    with pytest.raises(AttributeError, match=f"{role} must be set by the child's own name"):
        layer(tokens())
    delattr(layer, role)
    layer(tokens())


def test_a_fused_layer_is_not_divided_among_ranks() -> None:
    (layer,) = layers(take(model("fused"), strategy="union")).values()
    mesh: Any = types.SimpleNamespace(ndim=1)
    with pytest.raises(
        ValueError, match="gate_proj must hold a weight and a bias as parameters of its own, got SharedLinear"
    ):
        SparseMLPParallel()._apply(layer, mesh)


def test_an_encoder_leaves_its_fast_path() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(encoder_layer(), 2).eval()
    dense = copy.deepcopy(encoder)
    assert list(layers(take(encoder, strategy="row"))) == ["layers.0.linear2", "layers.1.linear2"]
    called: list[nn.Module] = []
    for layer in layers(encoder).values():
        layer.record_aux = True
        called.append(layer)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 5:] = True
    with torch.no_grad():
        torch.testing.assert_close(encoder(tokens()), dense(tokens()), rtol=1e-4, atol=1e-5)
        ours, theirs = (m(tokens(), src_key_padding_mask=mask)[~mask] for m in (encoder, dense))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert all(layer.aux is not None for layer in called)


def test_a_decoder_layer_and_gelu() -> None:
    torch.manual_seed(0)
    m = nn.ModuleList([nn.TransformerDecoderLayer(K, 4, N, dropout=0.0)]).eval()
    x = tokens()
    expected = m[0](x, x)
    assert list(layers(take(m))) == ["0.linear2"]
    torch.testing.assert_close(m[0](x, x), expected)
    gelu = nn.Sequential(nn.TransformerEncoderLayer(K, 4, N, dropout=0.0, activation="gelu"))
    with pytest.raises(ValueError, match=r"must apply ReLU, got gelu.*FATReLU or ReLU first, as examples/relufy\.py"):
        take(gelu)
    assert list(layers(take(gelu, activation="relu"))) == ["0.linear2"]


def test_experts_that_are_modules_are_taken_and_stacked_ones_named(caplog: pytest.LogCaptureFixture) -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 2 * N, K))
            self.down_proj = nn.Parameter(torch.zeros(2, K, N))

    m = nn.ModuleDict({"experts": nn.ModuleList([Meta(), Meta()]), "stacked": Stacked(), "shared": Gated(Squared())})
    with caplog.at_level(logging.INFO, "twell"):
        assert list(layers(take(m))) == ["experts.0", "experts.1", "shared"]
    assert "experts whose weights are stacked in one tensor stay as they are" in caplog.text
    with pytest.raises(ValueError, match=r"0 \(Stacked\): experts whose weights are stacked in one tensor stay"):
        take(nn.Sequential(Stacked()))


@pytest.mark.parametrize(("target", "name"), [("relu", "ReLU"), ("relu2", "squared ReLU"), ("drelu", "dReLU")])
def test_another_activation_is_replaced_on_request(target: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    m = nn.Sequential(Gated(nn.SiLU()), Fused(nn.SiLU()), Gated(Squared()))
    with caplog.at_level(logging.INFO, "twell"):
        assert list(layers(take(m, activation=target))) == ["0", "1", "2"]
    assert [layer.activation for layer in layers(m).values()] == [target] * 3
    assert f"{name} replaces " in caplog.text
    assert f"before use: {2 if target == 'relu2' else 3}" in caplog.text
    with pytest.raises(ValueError, match='must have a gate for activation="drelu", got wi and wo'):
        take(nn.Sequential(Wi(nn.SiLU())), activation="drelu")


UP_IS_GATE = """
def forward(self, x):
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
"""


@pytest.mark.parametrize(
    ("form", "names", "why"),
    [
        (
            lambda: Gated(n=K),
            ("up_proj", "gate_proj", "down_proj"),
            r"compute down_proj\(act\(up_proj\(x\)\) \* gate_pr",
        ),
        (lambda: Told(), ("b", "a"), "no layer: its projections must go from K to N|must compute a|it must compute"),
        (
            lambda: written(UP_IS_GATE, Gated, {})(),
            ("up_proj", "gate_proj", "down_proj"),
            "up_proj must be the up_proj .* is its gate_proj: rename",
        ),
    ],
)
def test_an_order_of_names_that_is_not_computed_is_refused(form: Any, names: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        sparsify_(nn.Sequential(form()), names=names)


def test_names_are_told_and_checked(caplog: pytest.LogCaptureFixture) -> None:
    other: Any = nn.Sequential(Told(), Gated())
    with pytest.raises(
        ValueError, match=r"1, the first 1 \(Gated\); .*names=\(\"gate_proj\", \"up_proj\", \"down_proj\"\)"
    ):
        sparsify_(other)
    with caplog.at_level(logging.INFO, "twell"):
        assert sparsify_(other, names=[("a", "b"), ("a", "z")]) is other
    absent = "no module has the children a, z, which names= tells"
    assert (caplog.messages[:2], len(caplog.records)) == ([absent, "layers taken: 1, the first 0"], 3)
    assert re.search(
        r"1, the first 1 \(Gated\); .*\[\(\"a\", \"b\"\), .*\(\"gate_proj\", .*\] tries",
        caplog.text.replace(")]) ", ")] "),
    )
    for wrong in ("ab", [], ("a",), [("a", "b", "c", "d")], [("a", 1)], (None, "a", "b"), [("a", "b"), "c"], 5):
        with pytest.raises(ValueError, match="names must be the names of a layer's projections"):
            sparsify_(nn.Sequential(Told()), names=wrong)  # type: ignore[arg-type]
