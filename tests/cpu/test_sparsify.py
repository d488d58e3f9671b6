"""sparsify_ on plain PyTorch modules: what it finds, that the function stays, and all that it refuses."""

from __future__ import annotations

import copy
import functools
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import twell
from twell import testing
from twell._runtime.log import warn_once
from twell._sparsify import DeferredUp, SparseDown, layers, sparsify_
from twell.nn import SparseGatedMLP, SparseMLP, set_down_layout

BF16 = torch.bfloat16
K, N = 32, 264


class Gated(nn.Module):
    def __init__(self, act: Any = None, k: int = K, n: int = N, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(k, n, bias)
        self.up_proj = nn.Linear(k, n, bias)
        self.down_proj = nn.Linear(n, k, bias)
        self.act_fn = nn.ReLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Plain(nn.Module):
    def __init__(self, act: Any = None, bias: bool = True) -> None:
        super().__init__()
        self.up_proj = nn.Linear(K, N, bias)
        self.down_proj = nn.Linear(N, K, bias)
        self.activation = nn.ReLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


class Nested(nn.Module):
    """fc2(act(fc1(x))) in one expression, with an activation that is an attribute."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(K, N), nn.Linear(N, K)
        self.act = nn.ReLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Literal(nn.Module):
    """The same with the activation in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class Block(nn.Module):
    """A block as OPT has it: the layers among its own children, dropout after them, a residual around."""

    def __init__(self, act: Any = None, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.activation_fn = nn.ReLU() if act is None else act
        self.fc1, self.fc2 = nn.Linear(K, N, bias), nn.Linear(N, K, bias)
        self.final = nn.LayerNorm(K)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.norm(x)
        # comments are no statements
        x = self.fc1(x)
        x = self.activation_fn(x)

        x = self.fc2(x)
        x = F.dropout(x, 0.5, self.training)
        return self.final(residual + x)


FORMS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "gated": (Gated, "1"),
    "gated-bias": (lambda: Gated(bias=True), "1"),
    "plain": (Plain, "1"),
    "nested": (Nested, "1.fc2"),
    "literal": (Literal, "1.fc2"),
    "block": (Block, "1.fc2"),
    "block-function": (lambda: Block(act=F.relu, bias=False), "1.fc2"),
}
EACH = pytest.mark.parametrize("form", FORMS)


def model(form: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, K), FORMS[form][0](), nn.Linear(K, K)).to(dtype).eval()


def tokens(dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return torch.randn(2, 7, K, generator=torch.Generator().manual_seed(1), dtype=dtype, **options)


def down(module: nn.Module) -> Tensor:
    (layer,) = layers(module).values()
    return layer.down_proj.weight


@EACH
def test_same_function_and_gradients(form: str) -> None:
    dense = model(form)
    sparse = copy.deepcopy(dense)
    # named, for on a CPU "auto" would be dense
    assert sparsify_(sparse, strategy="union") == [FORMS[form][1]] == list(layers(sparse))
    results = []
    for m in (dense, sparse):
        x = tokens(requires_grad=True)
        y = m(x)
        y.square().sum().backward()
        results.append({"y": y, "x": x.grad, **{name: p.grad for name, p in m.named_parameters()}})
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(sparse(tokens()), dense(tokens()))


@EACH
def test_16_bits_through_the_operators(form: str) -> None:
    dense = model(form, BF16)
    sparse = copy.deepcopy(dense)
    sparsify_(sparse, strategy="row", compression=4)
    (layer,) = layers(sparse).values()
    assert (layer.strategy, layer.compression) == ("row", 4)
    with torch.no_grad():
        exact = copy.deepcopy(dense).double()(tokens(BF16).double())
        ours, theirs = (testing.errors(m(tokens(BF16)).view(-1, K), exact.view(-1, K)) for m in (sparse, dense))
    # the layers around it round alike
    assert ours.within(theirs, 1.1), f"{ours} against {theirs}"


@EACH
def test_parameters_and_keys_stay(form: str) -> None:
    m = model(form)
    before, keys = dict(m.named_parameters()), list(m.state_dict())
    values = {name: t.clone() for name, t in before.items()}
    sparsify_(m)
    after = dict(m.named_parameters())
    assert list(m.state_dict()) == keys
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in before)
    assert down(m).stride() == (N, 1)


def pickled(m: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(m))  # type: ignore[no-any-return]


def saved(m: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def loaded(assign: bool) -> Callable[[nn.Module], nn.Module]:
    def load(m: nn.Module) -> nn.Module:
        other = copy.deepcopy(m)
        for p in other.parameters():
            nn.init.zeros_(p)
        other.load_state_dict({k: t.contiguous().clone() for k, t in m.state_dict().items()}, assign=assign)
        return other

    return load


@EACH
@pytest.mark.parametrize(
    "through",
    [
        copy.deepcopy,
        pickled,
        saved,
        loaded(False),
        loaded(True),
        lambda m: copy.deepcopy(m).double().float(),
        lambda m: copy.deepcopy(copy.deepcopy(m)).to("meta").to_empty(device="cpu"),
    ],
    ids=["deepcopy", "pickle", "save", "load", "assign", "cast", "empty"],
)
def test_survives(form: str, through: Callable[[nn.Module], nn.Module]) -> None:
    original = model(form)
    sparsify_(original)
    m = through(original)
    m.load_state_dict(original.state_dict())
    assert down(m).stride() == (N, 1)
    assert not {id(p) for p in m.parameters()} & {id(p) for p in original.parameters()}
    with torch.no_grad():
        expected = original(tokens())
        # a pair that still held on to the original's weights would show
        for p in original.parameters():
            p.zero_()
        assert torch.equal(m(tokens()), expected)


@EACH
def test_on_meta_then_loaded(form: str) -> None:
    full = model(form)
    with torch.device("meta"):
        m = nn.Sequential(nn.Linear(K, K), FORMS[form][0](), nn.Linear(K, K)).eval()
    sparsify_(m)
    assert all(p.is_meta for p in m.parameters())
    m.load_state_dict({k: t.clone() for k, t in full.state_dict().items()}, assign=True)
    assert down(m).stride() == (N, 1)
    with torch.no_grad():
        assert torch.equal(m(tokens()), full(tokens()))


@EACH
def test_figures_layout_and_counts(form: str) -> None:
    m = model(form, BF16)
    sparsify_(m)
    name, (layer,) = FORMS[form][1], layers(m).values()
    assert [row.layer for row in twell.explain(m)] == [name]
    with torch.no_grad(), twell.count_firing(m) as counts:
        y = m(tokens(BF16))
        assert counts[name].tokens == 14
        assert 0 < int(counts[name].counts.sum()) < 14 * N
    layer.record_aux = True
    with torch.no_grad():
        assert torch.equal(m(tokens(BF16)), y)
    assert layer.aux is not None
    assert round(float(layer.aux.l0) * 14, 3) == int(counts[name].counts.sum())
    assert copy.deepcopy(m) is not None
    for layout, strides in (("linear", (N, 1)), ("rows", (1, K))):
        set_down_layout(m, layout)  # type: ignore[arg-type]
        assert down(m).stride() == strides
        with torch.no_grad():
            assert torch.equal(m(tokens(BF16)), y)


@EACH
@pytest.mark.parametrize("training", [False, True])
def test_flags_stay(form: str, training: bool) -> None:
    m = model(form).train(training)
    for p in m.parameters():
        p.requires_grad_(False)
    state = torch.random.get_rng_state()
    sparsify_(m)
    assert {module.training for module in m.modules()} == {training}
    assert not any(p.requires_grad for p in m.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


@EACH
def test_compiles_in_one_graph(form: str) -> None:
    torch._dynamo.reset()
    m = model(form, BF16)
    sparsify_(m)
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(tokens(BF16)), m(tokens(BF16)))
    x = tokens(BF16, requires_grad=True)
    compiled(x).float().sum().backward()
    assert all(p.grad is not None for p in m.parameters())


@EACH
@pytest.mark.parametrize("made", ["inside", "outside"])
@pytest.mark.parametrize("called", ["inside", "outside"])
def test_under_inference_mode(form: str, made: str, called: str) -> None:
    with torch.inference_mode(made == "inside"):
        m = model(form, BF16)
    with torch.inference_mode(), torch.no_grad():
        expected = m(tokens(BF16))
    with torch.inference_mode(called == "inside"):
        sparsify_(m)
    with torch.inference_mode():
        torch.testing.assert_close(m(tokens(BF16)), expected, rtol=2e-2, atol=2e-2)
    if made == "outside":
        m(tokens(BF16)).float().sum().backward()
        assert down(m).grad is not None


def test_checkpointed_block_trains() -> None:
    dense, x = model("block"), tokens()
    sparse = copy.deepcopy(dense)
    sparsify_(sparse)
    for m, wrap in ((dense, False), (sparse, True)):
        y = torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False) if wrap else m(x)
        y.square().sum().backward()
    for p, q in zip(sparse.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def test_all_or_nothing() -> None:
    m = nn.ModuleDict({"a": Gated(), "b": Block(), "c": Gated(nn.SiLU())})
    with pytest.raises(ValueError, match=r"c \(Gated\) must apply ReLU, got SiLU.*2310\.04564.*activation=\"relu\""):
        sparsify_(m)
    assert [type(child) for child in m.values()] == [Gated, Block, Gated]
    assert type(m["b"].fc2) is nn.Linear
    assert m["a"].down_proj.weight.is_contiguous()
    assert isinstance(m["c"].act_fn, nn.SiLU)


def test_filter_takes_candidates_alone() -> None:
    m = nn.ModuleDict({"a": Gated(), "b": nn.Sequential(Block(), nn.Linear(K, K)), "c": Gated(nn.SiLU())})
    asked = []

    def take(module: nn.Module, name: str) -> bool:
        asked.append((type(module), name))
        return name != "c"

    assert sparsify_(m, take) == ["a", "b.0.fc2"]
    assert asked == [(Gated, "a"), (Block, "b.0"), (Gated, "c")]
    assert type(m["c"]) is Gated


def test_a_module_in_two_places_becomes_one() -> None:
    shared = Gated()
    m = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": Gated()})
    m["c"].gate_proj = shared.gate_proj
    assert sparsify_(m) == ["a", "c"]
    assert m["a"] is m["b"][0]
    assert isinstance(m["a"], SparseGatedMLP)
    assert m["c"].gate_proj.weight is m["a"].gate_proj.weight
    assert list(layers(m)) == ["a", "c"]


def test_layers_of_twell_are_left_alone() -> None:
    m = nn.ModuleDict({"a": Gated(), "b": SparseMLP(K, N), "c": Block()})
    assert sparsify_(m) == ["a", "c.fc2"]
    assert list(layers(m)) == ["a", "b", "c.fc2"]
    with pytest.raises(ValueError, match="3 layers of twell are there already"):
        sparsify_(m)


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU(inplace=True), F.relu, torch.relu, nn.Threshold(0, 0)])
@pytest.mark.parametrize("form", [Gated, Plain, Nested, Block])
def test_whatever_computes_relu_is_relu(form: Any, act: Any) -> None:
    m = nn.Sequential(form(act))
    assert len(sparsify_(m)) == 1


ACTIVATIONS = {
    "silu": (nn.SiLU(), "SiLU"),
    "gelu": (F.gelu, "gelu"),
    "relu6": (nn.ReLU6(), "ReLU6"),
    "leaky": (nn.LeakyReLU(), "LeakyReLU"),
    "squared": (lambda x: F.relu(x).square(), "<lambda>"),
}


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("form", [Gated, Plain, Nested, Block])
def test_other_activations(form: Any, act: str, caplog: pytest.LogCaptureFixture) -> None:
    function, name = ACTIVATIONS[act]
    m, relu = nn.Sequential(form(function)).eval(), nn.Sequential(form()).eval()
    with pytest.raises(ValueError, match=rf"must apply ReLU, got {name}\. "):
        sparsify_(m)
    relu.load_state_dict(m.state_dict())
    with caplog.at_level(logging.INFO, "twell"):
        assert len(sparsify_(m, activation="relu")) == 1
    assert f"ReLU replaces {name}; layers that need training before use: 1" in caplog.text
    with torch.no_grad():
        torch.testing.assert_close(m(tokens()), relu(tokens()))


def test_an_activation_in_the_code_is_told() -> None:
    class Coded(Literal):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(F.silu(self.fc1(x)))

    with pytest.raises(ValueError, match="must apply ReLU, got SiLU"):
        sparsify_(nn.Sequential(Coded()))
    m, x = nn.Sequential(Coded()), tokens()
    sparsify_(m, activation="relu")
    with torch.no_grad():
        torch.testing.assert_close(m(x), m[0].fc2.forward(x))
        torch.testing.assert_close(
            m(x), F.linear(F.relu(F.linear(x, m[0].fc1.weight, m[0].fc1.bias)), m[0].fc2.weight, m[0].fc2.bias)
        )


# Modules that have the names and compute something else.


class Dropout(Gated):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.p, self.training)


class Scaled(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return 1.001 * super().forward(x)


class Residual(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Swapped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Clamped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=6000) * self.up_proj(x))


class Tupled(Gated):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class TwoInputs(Gated):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return residual + super().forward(x)


class Adapter(nn.Module):
    """The names of an FFN on a bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj, self.up_proj = nn.Linear(64, 16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up_proj(F.relu(self.down_proj(x)))


class InTraining(Gated):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return 1.5 * y if self.training and torch.is_grad_enabled() else y


class OfOneToken(Gated):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return 2 * y if x.shape[:-1].numel() == 1 else y


class OfManyTokens(Gated):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if x.shape[-2] > 1000:
            y = y * 2
        return y


class OnGPU(Gated):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.relu() if x.is_cuda else y


class GuardedHalf(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.up_proj(x))
        if hidden.dtype == torch.float16:
            hidden = hidden.clamp(max=64504)
        return self.down_proj(hidden)


class Capped(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)).clamp(max=1e300))


class Wide(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(x).float())
        return self.down_proj((gate * self.up_proj(x).float()).to(x.dtype))


class Untouched(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))


class Weaker(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 0.1


class WeakerGradient(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Weaker.apply(x))


class Frozen(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(x))
        return F.linear(gate * self.up_proj(x), self.down_proj.weight.detach())


class ClippedGradient(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        if gate.requires_grad:
            gate.register_hook(lambda grad: grad.clamp(-1e20, 1e20))
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class ByFactor(Gated):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class ByFlag(Gated):
    doubled = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y if self.doubled else y


FLAG = False


class ByGlobal(Gated):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y if FLAG else y


class ByConfig(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.options = {"double": 0}

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for _ in range(self.options["double"]):
            y = y + y
        return y


class Recording(Gated):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(self.hidden)


class InPlace(Gated):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.add_(y)
        return y


class Casting(Gated):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class ByValue(Gated):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.isfinite().all() else y.nan_to_num()


@pytest.mark.parametrize(
    "other",
    [
        *(lambda: Dropout(0.1), Scaled, Residual, Swapped, Clamped, Tupled, TwoInputs, Adapter, InTraining, OfOneToken),
        *(
            OnGPU,
            OfManyTokens,
            GuardedHalf,
            lambda: GuardedHalf().half(),
            Capped,
            Wide,
            Untouched,
            WeakerGradient,
            Frozen,
        ),
        *(ClippedGradient, ByFactor, ByFlag, ByGlobal, ByConfig, Recording, InPlace, Casting, ByValue),
    ],
)
def test_another_function_is_refused(other: Callable[[], nn.Module]) -> None:
    m = nn.ModuleDict({"mlp": other()})
    for activation in (None, "relu"):
        with pytest.raises(ValueError, match=r"mlp \(\w+\) must compute down_proj\(act\(.*filter_fn"):
            sparsify_(m, activation=activation)  # type: ignore[arg-type]
    if "act_fn" in m["mlp"]._modules:
        assert type(m["mlp"].act_fn) is nn.ReLU
    assert all(module.training for module in m.modules())


class Surrogate(torch.autograd.Function):
    """ReLU with the gradient of SiLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x)))


class Shifted(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * x.abs()


class Counting(nn.ReLU):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Annealed(nn.ReLU):
    slope = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


@pytest.mark.parametrize(
    "act",
    [
        *(Surrogate.apply, Shifted(), Counting(), Annealed(), nn.Hardtanh(0, 60000.0), nn.Threshold(1e-30, 0.0)),
        *(nn.RReLU(0.0, 0.0), lambda x: x.clamp(min=0), lambda x: F.relu(x).clamp(max=60000.0)),
        *(lambda x: F.relu(x).detach(), lambda x: F.relu(x.bfloat16()).to(x.dtype)),
    ],
)
@pytest.mark.parametrize("form", [Gated, Block])
def test_what_is_not_quite_relu_is_refused(form: Any, act: Any) -> None:
    m = nn.Sequential(form(act))
    with pytest.raises(ValueError, match=r"0 \(\w+\) must apply ReLU, got "):
        sparsify_(m)
    assert type(m[0]) is form


class ByHand(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate = torch.relu(x @ self.gate_proj.weight.t())
        return torch.einsum("...n,kn->...k", self.up_proj(x) * gate, self.down_proj.weight)


class WithOptions(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.hidden_size, self.dropout, self.norm, self.act = K, 0.0, None, "relu"

    def gate(self, x: Tensor) -> Tensor:
        return getattr(F, self.act)(self.gate_proj(x))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.hidden_size:
            raise ValueError(x.shape)
        with torch.profiler.record_function("mlp"):
            hidden = self.gate(x).contiguous() * self.up_proj(x)
            if self.norm is not None:
                hidden = self.norm(hidden)
        y = self.down_proj(F.dropout(hidden, self.dropout, self.training))
        return y.unsqueeze(0).squeeze(0) if x.dim() == 1 else y


class OwnReLU(nn.ReLU):
    pass


@pytest.mark.parametrize("form", [ByHand, WithOptions, lambda: Gated(OwnReLU()), lambda: Gated(lambda x: x.relu())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_the_function_may_be_written_in_other_ways(form: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    m, x = nn.Sequential(form()).to(dtype), tokens(dtype)
    expected = m(x)
    assert sparsify_(m) == ["0"]
    torch.testing.assert_close(m(x), expected, rtol=2e-2, atol=2e-2)


def test_dropout_of_nothing_is_accepted() -> None:
    assert sparsify_(nn.Sequential(Dropout(0.0))) == ["0"]


def test_code_that_needs_its_hidden_size_or_casts_is_accepted() -> None:
    class Flat(Gated):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x.view(-1, K).to(self.gate_proj.weight.dtype))
            return y.view(x.shape)

    m, x = nn.Sequential(Flat()), tokens()
    expected = m(x)
    assert sparsify_(m) == ["0"]
    torch.testing.assert_close(m(x), expected)


class ActivationDropout(Block):
    """As BART has it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation_fn(self.fc1(x))
        h = F.dropout(h, 0.1, self.training)
        return x + self.fc2(h)


class Reused(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.activation_fn(self.fc1(x))
        return x + self.fc2(h) + h.mean()


class ReusedLater(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        a = self.activation_fn(h)
        y = self.fc2(a)
        return x + y + h.mean()


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(self.activation_fn(self.fc1(x)))
        return self.fc2(self.activation_fn(self.fc1(x)))


class ClassActivation(Block):
    """A method is found before a child of its name."""

    def __init__(self) -> None:
        super().__init__()
        del self.activation_fn

    def activation_fn(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.activation_fn(self.fc1(x)))


class NormBetween(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.final(self.fc1(x))))


class ByForward(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x))) + self.fc1.forward(x).mean()


class ByGetattr(Block):
    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, "fc1")(x).mean() + self.fc2(self.activation_fn(self.fc1(x)))  # noqa: B009


class ByChildren(Block):
    def forward(self, x: Tensor) -> Tensor:
        return dict(self.named_children())["fc1"](x).mean() + self.fc2(self.activation_fn(self.fc1(x)))


class ByAnotherMethod(Block):
    def features(self, x: Tensor) -> Tensor:
        return self.activation_fn(self.fc1(x))


class ByProperty(Block):
    @property
    def bottom(self) -> nn.Module:
        return self.fc1


class ByHelper(Block):
    """Nothing in the source of its forward says that the helper calls fc1, too."""

    def extra(self, x: Tensor) -> Tensor:
        next(child for child in self.children() if isinstance(child, nn.Linear))(x)
        return x.mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(x) + self.fc2(self.activation_fn(self.fc1(x)))


class Peeking(Block):
    """So does a helper that sees the hidden state from the frame that called it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        hidden = self.activation_fn(hidden)
        y = self.fc2(hidden)
        return y + locals()["hidden"].mean()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (ByForward, "must call self.fc1 once"),
        (ByGetattr, "must reach fc1, fc2 and activation_fn by these names alone, got getattr"),
        (ByChildren, "must reach fc1, fc2 and activation_fn by these names alone, got self.named_children"),
        (ByAnotherMethod, "its features must not use activation_fn"),
        (ByProperty, "its bottom must not use fc1"),
        (ByHelper, "must call fc1, activation_fn, fc2 once, one upon another"),
        (Peeking, "must use what self.fc1 and self.activation_fn return for self.fc2 alone"),
        (ActivationDropout, "must call self.fc2 on what an activation"),
        (Reused, "must not use h for anything else"),
        (ReusedLater, "must not use h for anything else"),
        (Twice, "must call self.fc1 once"),
        (ClassActivation, "self.activation_fn must be an attribute of the instance"),
        (NormBetween, "must call self.activation_fn on what self.fc1 has just returned"),
    ],
)
def test_another_block_is_refused(other: Callable[[], nn.Module], why: str) -> None:
    m = nn.Sequential(other())
    with pytest.raises(ValueError, match=rf"0 \(\w+\) cannot be run sparse: .*{why}.*filter_fn"):
        sparsify_(m)
    assert type(m[0].fc2) is nn.Linear


def test_a_block_that_needs_more_than_x_is_read_alone() -> None:
    class Masked(Block):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return x + mask * self.fc2(self.activation_fn(self.fc1(x)))

    block, x = Masked(), tokens()
    expected = block(x, x)
    assert sparsify_(nn.Sequential(block)) == ["0.fc2"]
    torch.testing.assert_close(block(x, x), expected)


class Held(nn.Module):
    """A model around a layer of SiLU, which it also has in another place that ``keep`` makes."""

    def __init__(self, keep: Callable[[Any], object]) -> None:
        super().__init__()
        self.mlp = Gated(nn.SiLU())
        kept = keep(self)
        self.mlp = self.mlp if kept is None else kept

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        (lambda m: torch.compile(m.mlp, backend="eager"), "was compiled"),
        (lambda m: m.mlp.compile(backend="eager"), "was compiled"),
        (lambda m: setattr(m, "also", nn.ModuleList([m.mlp])), ""),
        (lambda m: setattr(m, "also", lambda x: m.mlp(x)), ""),
        (lambda m: setattr(m, "also", [m.mlp]), "has it in also, too"),
        (lambda m: setattr(m, "also", {"a": (m.mlp,)}), "has it in also, too"),
        (lambda m: setattr(m, "also", m.mlp.forward), "has it in also, too"),
        (lambda m: setattr(m, "also", functools.partial(nn.Module.__call__, m.mlp)), "has it in also, too"),
        (lambda m: setattr(m, "also", lambda x, mlp=m.mlp: mlp(x)), "has it in also, too"),
        (lambda m: setattr(m, "also", (lambda mlp: lambda x: mlp(x))(m.mlp)), "has it in also, too"),
        (lambda m: object.__setattr__(m, "also", m.mlp), "has it in also, too"),
        (
            lambda m: setattr(m, "also", nn.Parameter(m.mlp.down_proj.weight.data.view(-1)[8:])),
            "shares memory with also",
        ),
    ],
)
def test_what_would_go_on_running_the_old_layer_is_refused(keep: Callable[[Any], object], why: str) -> None:
    m = Held(keep)
    if not why:
        assert len(sparsify_(m, activation="relu")) == 1
        return
    with pytest.raises(ValueError, match=why):
        sparsify_(m, activation="relu")
    assert not layers(m)


def test_layers_of_fsdp1_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        m = FullyShardedDataParallel(nn.Sequential(Gated()), use_orig_params=True, device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match="has its parameters in one buffer: call sparsify_ before"):
            sparsify_(m)
    finally:
        dist.destroy_process_group()


def test_a_compiled_block_notices_its_new_layers() -> None:
    torch._dynamo.reset()
    m = torch.compile(nn.Sequential(Gated(nn.SiLU()), Block(nn.SiLU())).eval(), backend="eager")
    m(tokens())
    assert len(sparsify_(m, activation="relu")) == 2
    torch.testing.assert_close(m(tokens()), m._orig_mod(tokens()))


def test_blocks_may_spread_the_calls_over_names() -> None:
    class Spread(Block):
        def forward(self, x: Tensor) -> Tensor:
            if self.fc1.weight.dtype == x.dtype:
                up: Tensor = self.fc1(self.norm(x))
                h = self.activation_fn(up)
                x = x + self.fc2(h)
            return self.final(x)

    m, x = nn.Sequential(Spread()), tokens()
    expected = m(x)
    assert sparsify_(m) == ["0.fc2"]
    torch.testing.assert_close(m(x), expected)


class MyLinear(nn.Linear):
    pass


class Wrapped(nn.Module):
    """As an adapter wraps a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)


def with_change(change: Callable[[Any], object], form: Callable[[], nn.Module] = Gated) -> nn.Module:
    m = form()
    change(m)
    return nn.Sequential(m)


def put(name: str, make: Callable[[Any], object]) -> Callable[[Any], None]:
    return lambda m: setattr(m, name, make(getattr(m, name, None)))


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (put("up_proj", Wrapped), TypeError, "up_proj must be an nn.Linear itself, got .*Wrapped.*adapters"),
        (put("gate_proj", lambda _: MyLinear(K, N, False)), TypeError, "gate_proj must be .* got .*MyLinear"),
        (
            lambda m: nn.utils.parametrizations.weight_norm(m.up_proj),
            TypeError,
            "up_proj must be an nn.Linear itself, got .*Parametrized",
        ),
        (
            lambda m: m.up_proj.register_parameter("scale", nn.Parameter(torch.ones(1))),
            TypeError,
            "up_proj must have a weight and a bias alone, got bias, scale, weight",
        ),
        (
            put("down_proj", lambda _: nn.LazyLinear(K)),
            TypeError,
            "down_proj must be an nn.Linear itself, got .*LazyLinear",
        ),
        (put("norm", lambda _: nn.LayerNorm(K)), ValueError, r"got beside them act_fn \(ReLU\), norm \(LayerNorm\)"),
        (put("drop", lambda _: nn.Dropout(0.1)), ValueError, r"got beside them act_fn \(ReLU\), drop \(Dropout\)"),
        (put("scale", lambda _: nn.Parameter(torch.ones(K))), ValueError, "got beside them scale"),
        (lambda m: m.register_buffer("mask", torch.ones(N)), ValueError, "got beside them mask"),
        (put("act_fn", lambda _: nn.PReLU()), ValueError, "act_fn must be an activation without state, got PReLU"),
        (lambda m: m.register_forward_hook(print), ValueError, "has forward_hooks, which replacing"),
        (lambda m: m.act_fn.register_forward_pre_hook(print), ValueError, "forward_pre_hooks on act_fn"),
        (lambda m: m.up_proj.register_full_backward_hook(print), ValueError, "backward_hooks on up_proj"),
        (lambda m: m.register_state_dict_pre_hook(lambda *_: None), ValueError, "has state_dict_pre_hooks"),
        (put("forward", lambda f: lambda x: f(x)), ValueError, "a forward of its own, set on the instance"),
        (put("up_proj", lambda _: nn.Linear(K, N + 8, False)), ValueError, r"up_proj.weight must be \[264, 32\]"),
        (lambda m: m.up_proj.to(BF16), ValueError, "on one dtype, got torch.bfloat16 and torch.float32"),
        (lambda m: m.up_proj.to("meta"), ValueError, "on one device, got cpu and meta"),
    ],
)
def test_what_would_be_lost_is_refused(change: Callable[[Any], object], error: type[Exception], why: str) -> None:
    m = with_change(change)
    with pytest.raises(error, match=rf"^0 \(Gated\).*{why}.*filter_fn"):
        sparsify_(m)
    assert type(m[0]) is Gated


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.fc1.register_forward_hook(print), "forward_hooks on fc1"),
        (lambda m: m.activation_fn.register_forward_hook(print), "forward_hooks on activation_fn"),
        (put("forward", lambda f: lambda x: f(x)), "a forward of its own"),
    ],
)
def test_blocks_with_hooks_on_the_layers_are_refused(change: Callable[[Any], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        sparsify_(with_change(change, Block))


def test_hooks_of_a_block_stay() -> None:
    block, calls = Block(), []
    block.register_forward_hook(lambda *_: calls.append(1))
    sparsify_(nn.Sequential(block))
    block(tokens())
    assert calls == [1]


def test_quantised_weights_are_refused() -> None:
    class Quantised(nn.Parameter):
        pass

    m = Gated()
    m.up_proj.weight = Quantised(m.up_proj.weight.data)
    with pytest.raises(
        TypeError, match=r"up_proj\.weight must be a plain nn\.Parameter, got Quantised: call sparsify_"
    ):
        sparsify_(nn.Sequential(m))


@pytest.mark.parametrize(
    ("k", "n", "why"),
    [
        (32, 100, "N must be a positive multiple of 8 up to 65,536.*got 100"),
        (36, 64, "K must be a positive multiple of 8 up to 16,384.*got 36"),
        (16392, 8, "K must be .* got 16,392"),
        (8, 65544, "N must be .* got 65,544"),
    ],
)
def test_sizes_beyond_the_kernels(k: int, n: int, why: str) -> None:
    with torch.device("meta"):
        m = nn.ModuleDict({"ok": Gated(), "odd": Gated(k=k, n=n)})
    with pytest.raises(ValueError, match=rf"odd \(Gated\): {why}"):
        sparsify_(m)
    assert sparsify_(m, strategy="dense") == ["ok", "odd"]


def test_nothing_found() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Linear(K, 2 * N), nn.Linear(N, K)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, K, 2 * N))

    with pytest.raises(ValueError, match=r"gate_proj, up_proj, down_proj; up_proj, down_proj; fc1, fc2; got Linear"):
        sparsify_(nn.Linear(K, K))
    with pytest.raises(ValueError, match=r"nearest are 0 \(Fused\) with down_proj, gate_up_proj; 2 \(Experts\) with"):
        sparsify_(nn.Sequential(Fused(), Fused(), Experts()))
    with pytest.raises(ValueError, match="that filter_fn takes; it left out 2, the first of them '0'"):
        sparsify_(nn.Sequential(Gated(), Block()), lambda *_: False)


def test_a_model_that_is_itself_a_layer() -> None:
    with pytest.raises(ValueError, match=r"is itself one.*got Gated; .*twell\.nn\.SparseGatedMLP\.from_linear"):
        sparsify_(Gated())
    with pytest.raises(ValueError, match=r"twell\.nn\.SparseMLP\.from_linear"):
        sparsify_(Plain())
    m = Block()
    assert sparsify_(m) == ["fc2"]
    assert isinstance(m.fc1, DeferredUp)
    assert isinstance(m.fc2, SparseDown)
    assert isinstance(m.activation_fn, nn.Identity)


def test_arguments() -> None:
    with pytest.raises(TypeError, match="got int"):
        sparsify_(3)  # type: ignore[arg-type]
    for wrong in ({"activation": "silu"}, {"strategy": "fast"}, {"compression": 3}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            sparsify_(nn.Sequential(Gated()), **wrong)  # type: ignore[arg-type]


def test_a_model_of_real_size_on_meta() -> None:
    with torch.device("meta"):
        m = nn.ModuleList(Gated(k=4096, n=14336) for _ in range(8))
    assert len(sparsify_(m)) == 8


def test_a_pair_whose_first_layer_is_changed_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    m = Block().eval()
    sparsify_(m)
    x = torch.randn(3, K)
    y = m(x)
    warn_once.cache_clear()
    m.fc1.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING, "twell"):
        assert torch.equal(m(x), y)
    assert "fc1 of a twell pair has hooks" in caplog.text
    m.fc1.forward = lambda x: 2 * x  # type: ignore[method-assign]
    with pytest.raises(NotImplementedError, match="fc1 of a twell pair has another forward"):
        m(x)
