"""sparsify_ on the whole ReLU family, and on projections of other names: fused, in sequences, blocks and experts."""

from __future__ import annotations

import copy
import logging
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twell
from twell import testing
from twell._sparsify import FusedGatedMLP, NamedGatedMLP, NamedMLP, layers, sparsify_
from twell.distributed import SparseMLPParallel
from twell.nn import SparseGatedMLP

BF16 = torch.bfloat16
K, N = 32, 264


class FATReLU(nn.Module):
    def __init__(self, threshold: float = 0.25) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > self.threshold, x, 0.0)


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.square(F.relu(x))


class Gated(nn.Module):
    names = ("gate_proj", "up_proj", "down_proj")
    bias = False

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        for name, sizes in zip(self.names, ((K, N), (K, N), (N, K))):
            self.add_module(name, nn.Linear(*sizes, self.bias))
        self.act_fn = act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = map(self.get_submodule, self.names)
        return down(self.act_fn(gate(x)) * up(x))


class Meta(Gated):
    names = ("w1", "w3", "w2")

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


class Standard(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DoubleReLU(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))


class CodedDoubleReLU(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.gate_proj(x)) * F.relu(self.up_proj(x)))


class CodedSquare(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.gate_proj(x)) ** 2 * self.up_proj(x))


class CodedThreshold(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.act_fn
        self.scale, self.threshold = 1.0, 0.25

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.threshold(self.gate_proj(x), self.threshold, 0.0) * self.up_proj(x))


class Fused(nn.Module):
    def __init__(self, act: Any = None, bias: bool = True) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(K, 2 * N, bias), nn.Linear(N, K, bias)
        self.act = act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.act(gate))


class UpFirst(Fused):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.act(gate))


class Sliced(Fused):
    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        n = both.shape[-1] // 2
        return self.down_proj(self.act(both.narrow(-1, 0, n)) * both.narrow(-1, n, n))


class Wi(nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(K, N, False), nn.Linear(N, K, False)
        self.dropout, self.act = nn.Dropout(0.0), act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.act(self.wi(x)))
        if (
            isinstance(self.wo.weight, Tensor)
            and h.dtype != self.wo.weight.dtype
            and self.wo.weight.dtype != torch.int8
        ):
            h = h.to(self.wo.weight.dtype)
        return self.wo(h)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        if self.bias is None:
            return y
        return y + self.bias


class OfOwnLinears(nn.Module):
    def __init__(self, act: Any = None, kind: Any = OwnLinear) -> None:
        super().__init__()
        # without bias, whose sum under autocast is not that of nn.Linear
        self.dense_h_to_4h, self.dense_4h_to_h = kind(K, N, False), kind(N, K, False)
        self.act = act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class Intermediate(nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(K, N), act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return self.intermediate_act_fn(x)


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Linear(N, K), nn.LayerNorm(K), nn.Dropout(0.1)

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        hidden = self.dense(hidden)
        return self.norm(self.dropout(hidden) + x)


class Split(nn.Module):
    """A block as BERT has it."""

    def __init__(self, act: Any = None, output: Callable[[], nn.Module] = Output) -> None:
        super().__init__()
        self.intermediate, self.output = Intermediate(act), output()

    def chunk(self, x: Tensor) -> Tensor:
        hidden = self.intermediate(x)
        return self.output(hidden, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.chunk(x)


def sequence(act: Any = None) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(K), nn.Linear(K, N), act or nn.ReLU(), nn.Linear(N, K), nn.Dropout(0.1))


def encoder_layer(act: Any = None) -> nn.Module:
    return nn.TransformerEncoderLayer(K, 4, N, dropout=0.0, activation=act or F.relu, batch_first=True)


class Told(nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(K, N), nn.Linear(N, K), act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


# form, its layer's name, its activation and threshold
FORMS: dict[str, tuple[Callable[[], nn.Module], str, str, float]] = {
    "relu2": (lambda: Standard(Squared()), "1", "relu2", 0),
    "relu2 in code": (CodedSquare, "1", "relu2", 0),
    "drelu": (DoubleReLU, "1", "drelu", 0),
    "drelu in code": (CodedDoubleReLU, "1", "drelu", 0),
    "fatrelu": (lambda: Standard(nn.Threshold(0.1, 0.0)), "1", "fatrelu", 0.1),
    "own fatrelu": (lambda: Standard(FATReLU()), "1", "fatrelu", 0.25),
    "fatrelu in code": (CodedThreshold, "1", "fatrelu", 0.25),
    "w1 w3 w2": (Meta, "1", "relu", 0),
    "w1 w3 w2, relu2": (lambda: Meta(Squared()), "1", "relu2", 0),
    "fused": (Fused, "1", "relu", 0),
    "fused, up first": (UpFirst, "1", "relu", 0),
    "fused, sliced": (Sliced, "1", "relu", 0),
    "fused, relu2": (lambda: Fused(Squared(), bias=False), "1", "relu2", 0),
    "wi wo": (Wi, "1", "relu", 0),
    "wi wo, fatrelu": (lambda: Wi(FATReLU()), "1", "fatrelu", 0.25),
    "own linear": (lambda: OfOwnLinears(Squared()), "1", "relu2", 0),
    "split": (Split, "1.output.dense", "relu", 0),
    "split, relu2": (lambda: Split(Squared()), "1.output.dense", "relu2", 0),
    "sequence": (sequence, "1.3", "relu", 0),
    "sequence, relu2": (lambda: sequence(Squared()), "1.3", "relu2", 0),
    "encoder": (encoder_layer, "1.linear2", "relu", 0),
    "encoder, relu2": (lambda: encoder_layer(Squared()), "1.linear2", "relu2", 0),
    "told": (lambda: Told(Squared()), "1", "relu2", 0),
}
EACH = pytest.mark.parametrize("form", FORMS)


def model(form: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(K), FORMS[form][0](), nn.LayerNorm(K)).to(dtype).eval()


def tokens(dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return torch.randn(2, 7, K, generator=torch.Generator().manual_seed(1), dtype=dtype, **options)


def sparse_of(m: nn.Module, strategy: Any = "union") -> Any:
    # named: on a CPU "auto" is dense
    sparsify_(m, strategy=strategy, names=("a", "b"))
    return m


@EACH
def test_same_function_and_gradients(form: str) -> None:
    dense = model(form)
    sparse = copy.deepcopy(dense)
    keys, parameters = list(sparse.state_dict()), dict(sparse.named_parameters())
    assert sparsify_(sparse, strategy="union", names=("a", "b")) == [FORMS[form][1]] == list(layers(sparse))
    (layer,) = layers(sparse).values()
    assert (layer.activation, layer.threshold) == FORMS[form][2:]
    assert list(sparse.state_dict()) == keys
    assert all(p is parameters[name] for name, p in sparse.named_parameters())
    results = []
    for m in (dense, sparse):
        x = tokens(requires_grad=True)
        y = m(x)
        (y * tokens().flip(0)).sum().backward()
        results.append({"y": y, "x": x.grad, **{name: p.grad for name, p in m.named_parameters()}})
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(sparse(tokens()), dense(tokens()), rtol=1e-5, atol=1e-6)


@EACH
def test_16_bits_through_the_operators(form: str) -> None:
    dense = model(form, BF16)
    sparse = sparse_of(copy.deepcopy(dense), "row")
    with torch.no_grad():
        exact = copy.deepcopy(dense).double()(tokens(BF16).double())
        ours, theirs = (testing.errors(m(tokens(BF16)).view(-1, K), exact.view(-1, K)) for m in (sparse, dense))
    # everything except for the layers rounds alike; the worst of a few rows is chance
    assert ours.within(theirs, testing.BUDGET, 1.5), f"{ours} against {theirs}"


@EACH
def test_copies_and_pickles_compute_the_same(form: str) -> None:
    m = sparse_of(model(form))
    expected = m(tokens())
    copied = copy.deepcopy(m)
    for other in (copied, pickle.loads(pickle.dumps(m)), m.to(torch.float64).to(torch.float32)):
        assert torch.equal(other(tokens()), expected)
    for p in m.parameters():
        p.data.zero_()
    assert torch.equal(copied(tokens()), expected)


@pytest.mark.parametrize("form", ["relu2", "drelu", "own fatrelu", "w1 w3 w2", "fused", "wi wo", "split", "sequence"])
def test_compiles_in_one_graph(form: str) -> None:
    m = sparse_of(model(form))
    expected = m(tokens())
    torch._dynamo.reset()
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens()), expected)


@EACH
def test_figures_are_those_of_the_gate(form: str) -> None:
    m = sparse_of(model(form), "row")
    (layer,) = layers(m).values()
    layer.record_aux = True
    m(tokens())
    aux = layer.aux
    assert aux is not None
    # the same layer from its own projections, dense
    layer.strategy = "dense"
    m(tokens())
    assert layer.aux is not None
    torch.testing.assert_close(layer.aux.l0, aux.l0, rtol=1e-3, atol=0.2)
    assert 0 < float(aux.l0) < N


def test_layers_of_other_names_are_of_the_same_kinds() -> None:
    made = [next(iter(layers(sparse_of(model(form))).values())) for form in ("relu2", "w1 w3 w2", "fused", "wi wo")]
    assert [type(layer) for layer in made] == [SparseGatedMLP, NamedGatedMLP, FusedGatedMLP, NamedMLP]
    for layer in made:
        assert layer.up_proj.weight.shape == (N, K)
        assert layer.down_proj.weight.shape == (K, N)
        before = layer.down_proj.weight.detach().clone()
        layer.reset_parameters()
        assert not torch.equal(layer.down_proj.weight, before)
    twell.nn.set_down_layout(made[2], "rows")
    assert made[2].down_proj.weight.stride() == (1, K)


@pytest.mark.parametrize("form", ["fused", "fused, up first"])
def test_halves_of_a_fused_weight_are_views(form: str) -> None:
    (layer,) = layers(sparse_of(model(form))).values()
    weight = layer.gate_up_proj.weight
    places = {layer.gate_proj.weight.data_ptr(): "gate", layer.up_proj.weight.data_ptr(): "up"}
    first = "up" if "up first" in form else "gate"
    assert places[weight.data_ptr()] == first
    assert len(places) == 2


@pytest.mark.parametrize("form", ["fused", "fused, up first", "w1 w3 w2", "wi wo"])
def test_main_gradients_of_other_names(form: str) -> None:
    dense = model(form)
    sparse = sparse_of(copy.deepcopy(dense))
    (layer,) = layers(sparse).values()
    weights = {name: child.weight for name, child in layer.named_children() if isinstance(child, nn.Linear)}
    layer.accumulate_main_grad = True
    for weight in weights.values():
        weight.main_grad = torch.zeros_like(weight)
    for m in (sparse, dense):
        m(tokens()).square().sum().backward()
    for name, weight in weights.items():
        assert weight.grad is None
        expected = dense.get_parameter(f"1.{name}.weight").grad
        torch.testing.assert_close(weight.main_grad, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", ["fused", "w1 w3 w2", "wi wo"])
def test_hooks_on_projections_of_other_names_make_the_layer_dense(form: str) -> None:
    m = sparse_of(model(form))
    expected, seen = m(tokens()), []
    (layer,) = layers(m).values()
    for child in layer.children():
        child.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(m(tokens()), expected)
    assert len(seen) == len(list(layer.children()))


def test_a_fused_layer_is_not_divided_among_ranks() -> None:
    (layer,) = layers(sparse_of(model("fused"))).values()
    mesh: Any = types.SimpleNamespace(ndim=1)
    with pytest.raises(ValueError, match="a gate and an up projection of their own, which ranks divide, got one fused"):
        SparseMLPParallel()._apply(layer, mesh)


def test_an_encoder_leaves_its_fast_path() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(encoder_layer(), 2).eval()
    dense = copy.deepcopy(encoder)
    assert sparsify_(encoder, strategy="row") == ["layers.0.linear2", "layers.1.linear2"]
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
    assert sparsify_(m) == ["0.linear2"]
    torch.testing.assert_close(m[0](x, x), expected)
    gelu = nn.Sequential(nn.TransformerEncoderLayer(K, 4, N, dropout=0.0, activation="gelu"))
    with pytest.raises(ValueError, match="must apply ReLU, got gelu"):
        sparsify_(gelu)
    assert sparsify_(gelu, activation="relu") == ["0.linear2"]


def test_experts_that_are_modules_are_taken_and_stacked_ones_named(caplog: pytest.LogCaptureFixture) -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 2 * N, K))
            self.down_proj = nn.Parameter(torch.zeros(2, K, N))

    m = nn.ModuleDict({"experts": nn.ModuleList([Meta(), Meta()]), "stacked": Stacked(), "shared": Standard(Squared())})
    with caplog.at_level(logging.INFO, "twell"):
        assert sparsify_(m) == ["experts.0", "experts.1", "shared"]
    assert "experts whose weights are stacked in one tensor stay as they are" in caplog.text
    with pytest.raises(ValueError, match=r"0 \(Stacked\): experts whose weights are stacked in one tensor stay"):
        sparsify_(nn.Sequential(Stacked()))


def test_sequences_hold_several_layers_and_other_things() -> None:
    parts = [nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K), nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)]
    parts += [nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 2 * K), nn.Linear(2 * K, N), nn.ReLU(), nn.Linear(N, 2 * K)]
    m = nn.Sequential(*parts)
    expected = m(tokens())
    assert sparsify_(m, activation="relu") == ["2", "11"]
    assert type(m[4]) is nn.GELU
    torch.testing.assert_close(m(tokens()), expected)
    with pytest.raises(ValueError, match=r"nearest are the model \(Sequential\) with GELU"):
        sparsify_(nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)))


@pytest.mark.parametrize(("target", "name"), [("relu", "ReLU"), ("relu2", "squared ReLU"), ("drelu", "dReLU")])
def test_another_activation_is_replaced_on_request(target: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    m = nn.Sequential(Standard(nn.SiLU()), Fused(nn.SiLU()), Standard(Squared()))
    with caplog.at_level(logging.INFO, "twell"):
        assert sparsify_(m, activation=target) == ["0", "1", "2"]
    assert [layer.activation for layer in layers(m).values()] == [target] * 3
    assert f"{name} replaces " in caplog.text
    assert f"before use: {2 if target == 'relu2' else 3}" in caplog.text
    with pytest.raises(ValueError, match='must have a gate for activation="drelu", got wi and wo'):
        sparsify_(nn.Sequential(Wi(nn.SiLU())), activation="drelu")


class Reused(Output):
    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.dense(hidden) + hidden[..., :K] + x)


class Peeked(Split):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.intermediate(x)
        return self.output(hidden, x) + hidden.mean()


class Normed(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * super().forward(x)


class HalfUsed(Fused):
    def forward(self, x: Tensor) -> Tensor:
        gate, _ = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(gate * self.act(gate))


class Truncated(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:100])


class ScaledThreshold(CodedThreshold):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class UpActivated(Standard):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * F.silu(self.up_proj(x)))


class Interleaved(Fused):
    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        return self.down_proj(self.act(both[..., ::2]) * both[..., 1::2])


class LeakyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 0.5


class ByDtype(Wi):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            x = x.clamp(-100, 100)
        return self.wo(self.act(self.wi(x)))


class ByOwnDtype(Wi):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.wi.weight.dtype:
            x = 2 * x
        return self.wo(self.act(self.wi(x)))


class Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).pow(3)


class AtLeast(nn.Module):
    """FATReLU that jumps to another value."""

    def forward(self, x: Tensor) -> Tensor:
        return F.threshold(x, 0.5, 0.0) - 0.25 * (x > 0.5).to(x.dtype)


class Settable(FATReLU):
    def forward(self, x: Tensor) -> Tensor:
        return F.threshold(x, self.threshold, 0.0) * self.scale

    scale = 1.0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Split(output=Reused), "the forward of its output must use hidden for self.dense alone"),
        (Peeked, "its class must use self.intermediate once"),
        (Normed, "differs for|it runs mul"),
        (HalfUsed, "differs for"),
        (Truncated, "it runs slice"),
        (lambda: OfOwnLinears(kind=LeakyLinear), "another function of x"),
        (ScaledThreshold, "another function of x"),
        (UpActivated, "another function of x"),
        (Interleaved, "differs for|it runs"),
        (ByDtype, "branches on x.dtype == torch.float16"),
        (ByOwnDtype, "differs for .* under autocast|it runs"),
        (lambda: Wi(Cubed()), "must apply ReLU, got Cubed"),
        (lambda: Wi(AtLeast()), "must apply ReLU, got AtLeast"),
        (lambda: Wi(Settable()), "must apply ReLU, got Settable"),
        (lambda: Standard(nn.Threshold(0.5, 0.125)), "must apply ReLU, got Threshold"),
        (lambda: nn.TransformerEncoderLayer(K, 4, N), r"must drop no values in training.*got dropout, p = 0\.1"),
        (lambda: DoubleReLU(nn.SiLU()), "another function of x"),
    ],
)
def test_what_only_looks_like_a_layer_is_refused(make: Callable[[], nn.Module], why: str) -> None:
    m = nn.Sequential(make())
    before = dict(m.named_modules())
    with pytest.raises(ValueError, match=why):
        sparsify_(m)
    assert dict(m.named_modules()) == before


class ToldBlock(Told):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.act(self.a(self.norm(x))))


class ToldFused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(K, 2 * N), nn.Linear(N, K), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.a(x).chunk(2, dim=-1)
        return self.b(self.act(gate) * up)


@pytest.mark.parametrize(("form", "layer"), [(Told, "0"), (ToldBlock, "0.b"), (ToldFused, "0")])
def test_told_names_are_of_any_form(form: Any, layer: str) -> None:
    m = nn.Sequential(form()).eval()
    expected = m(tokens())
    assert sparsify_(m, names=[("q", "r", "s"), ("a", "b")]) == [layer]
    torch.testing.assert_close(m(tokens()), expected)


def test_names_are_told_and_checked() -> None:
    other = nn.Sequential(Told())
    with pytest.raises(ValueError, match="without any"):
        sparsify_(other)
    assert sparsify_(other, names=["a", "b"]) == ["0"]
    for wrong in ("ab", [], ("a",), [("a", "b", "c", "d")], [("a", 1)]):
        with pytest.raises(ValueError, match="names must be the names of a layer's projections"):
            sparsify_(nn.Sequential(Told()), names=wrong)  # type: ignore[arg-type]
