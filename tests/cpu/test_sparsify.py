"""sparsify_ on plain PyTorch modules: layers that it finds, the unchanged function, and refusals."""

from __future__ import annotations

import copy
import cProfile
import functools
import gc
import io
import logging
import operator
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

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
    # named: on a CPU "auto" is dense
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
def test_layers_survive_what_torch_does_to_modules(form: str, through: Callable[[nn.Module], nn.Module]) -> None:
    original = model(form)
    sparsify_(original)
    m = through(original)
    m.load_state_dict(original.state_dict())
    assert down(m).stride() == (N, 1)
    assert not {id(p) for p in m.parameters()} & {id(p) for p in original.parameters()}
    with torch.no_grad():
        expected = original(tokens())
        # a pair that still used the original's weights would differ
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
def test_any_form_of_relu_is_recognised(form: Any, act: Any) -> None:
    m = nn.Sequential(form(act))
    assert len(sparsify_(m)) == 1


ACTIVATIONS = {
    "silu": (nn.SiLU(), "SiLU"),
    "gelu": (F.gelu, "gelu"),
    "relu6": (nn.ReLU6(), "ReLU6"),
    "leaky": (nn.LeakyReLU(), "LeakyReLU"),
    "cubed": (lambda x: F.relu(x).pow(3), "<lambda>"),
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


# Modules with the names of a layer that compute something else.


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


# Ways to double x of more than 100 tokens, more than any trial has, or to differ only after a later change.


def doubled(x: Tensor) -> Tensor:
    return x if x.shape[0] <= 100 else 2 * x


def twice(x: Tensor) -> Tensor:
    return 2 * x


def scaling(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def scaled(self: nn.Module, x: Tensor) -> Tensor:
        return forward(self, doubled(x))

    return scaled


def counting(forward: Callable[..., Tensor], calls: list[int]) -> Callable[..., Tensor]:
    return lambda self, x: (calls, forward(self, x))[1]


class Doubling:
    def __call__(self, x: Tensor) -> Tensor:
        return doubled(x)


class Switched:
    """An activation with a switch that is not a module, so its attributes are not seen."""

    relu = True

    def __call__(self, x: Tensor) -> Tensor:
        return F.relu(x) if self.relu else F.silu(x)


class Shelf:
    act = staticmethod(F.relu)
    acts = {"relu": F.relu}  # noqa: RUF012

    @staticmethod
    def twice_if_long(x: Tensor) -> Tensor:
        return x if x.shape[0] <= 100 else 2 * x


HELPER: Any = types.ModuleType("helper")
HELPER.before, HELPER.acts, HELPER.relu = doubled, {"relu": F.relu}, F.relu
DOUBLING, ACTS = Doubling(), {"relu": F.relu}


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    if x.shape[0] > 100:
        x = x + x
    return x


def without_source(text: str) -> Callable[..., Any]:
    made: dict[str, Any] = {"F": F}
    exec(text, made)
    return made["forward"]  # type: ignore[no-any-return]


class ByDecorator(Gated):
    forward = scaling(Gated.forward)


class ByDecoratorState(Gated):
    forward = counting(Gated.forward, [])


class ByModule(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(HELPER.before(x))


class ByImport(Gated):
    def forward(self, x: Tensor) -> Tensor:
        from functools import partial

        return partial(super().forward, x)()


class ByObject(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(DOUBLING(x))


class ByStaticMethod(Gated):
    @staticmethod
    def before(x: Tensor) -> Tensor:
        return x if x.shape[0] <= 100 else 2 * x

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(type(self).before(x))


class ByOtherClass(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Shelf.twice_if_long(x))


class ByScript(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(scripted(x))


class ByLoop(Gated):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[0] // 101):
            x = x + x
        return super().forward(x)


class ByWhile(Gated):
    def forward(self, x: Tensor) -> Tensor:
        left = x.shape[0] // 101
        while left:
            left, x = left - 1, x + x
        return super().forward(x)


class ByComprehension(Gated):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        [y.zero_() for _ in range(x.shape[0] // 101)]
        return y


class ByStarred(Gated):
    def forward(self, x: Tensor) -> Tensor:
        for other in (*x.split(100)[1:],):
            other.zero_()
        return super().forward(x)


class ByMap(Gated):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        list(map(lambda _: y.zero_(), range(x.shape[0] // 101)))  # noqa: C417
        return y


class ByReduce(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functools.reduce(lambda a, _: a + a, range(x.shape[0] // 101), x))


class ByIterator(Gated):
    def forward(self, x: Tensor) -> Tensor:
        each = iter([super().forward, lambda x: super(ByIterator, self).forward(2 * x)][x.shape[0] > 100 :])
        return next(each)(x)


class ByIndex(Gated):
    def double(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward, self.double)[min(x.shape[0] // 101, 1)](x)


class ByItemgetter(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return operator.itemgetter(0)((super().forward, twice))(x)


class BySpecialMethod(ByIndex):
    def forward(self, x: Tensor) -> Tensor:
        return Gated.forward(self, (x.view_as, twice).__getitem__(x.shape[0] // 101)(x))


class ByKey(Gated):
    def forward(self, x: Tensor) -> Tensor:
        act = {torch.float16: F.silu}.get(x.dtype, F.relu)
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))


class ByName(Gated):
    def forward(self, x: Tensor) -> Tensor:
        act = getattr(F, "relu" + "6" * (x.shape[0] // 101))
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))


class ByLambda(Gated):
    def forward(self, x: Tensor) -> Tensor:
        act = lambda value: ACTS["relu"](value)  # noqa: E731
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))


class ByInnerFunction(Gated):
    def forward(self, x: Tensor) -> Tensor:
        (gate,) = [ACTS["relu"](value) for value in (self.gate_proj(x),)]
        return self.down_proj(gate * self.up_proj(x))


class ByModuleState(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(HELPER.acts["relu"](self.gate_proj(x)) * self.up_proj(x))


class ByClassState(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(Shelf.acts["relu"](self.gate_proj(x)) * self.up_proj(x))


class ByDict(Gated):
    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "doubled", 0)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y if self.__dict__["doubled"] else y


class WithoutSource(Gated):
    forward = without_source(
        "def forward(self, x):\n"
        "    x = x if x.shape[0] <= 100 else 2 * x\n"
        "    return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))\n"
    )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (ByDecorator, "doubled branches on x.shape"),
        (ByDecoratorState, r"reads calls \(list\)"),
        (ByModule, "doubled branches on x.shape"),
        (ByImport, "ByImport.forward imports functools when it runs"),
        (ByObject, r"(reads DOUBLING \(Doubling\)|doubled branches on)"),
        (ByStaticMethod, "before branches on x.shape"),
        (ByOtherClass, "twice_if_long branches on x.shape"),
        (ByScript, r"reads scripted \(ScriptFunction\)"),
        (ByLoop, r"branches on range\(x.shape\[0\] // 101\)"),
        (ByWhile, "branches on left"),
        (ByComprehension, r"branches on range\(x.shape\[0\] // 101\)"),
        (ByStarred, "it runs s|branches on"),
        (ByMap, "uses map, which is neither Python nor torch's"),
        (ByReduce, "calls reduce, which is neither Python nor torch's"),
        (ByIterator, "calls (iter|next), which is neither"),
        (ByIndex, r"calls min, which|branches on min\("),
        (ByItemgetter, "uses operator.itemgetter, which is neither"),
        (BySpecialMethod, "uses __getitem__"),
        (ByKey, "calls dict.get, which is neither"),
        (ByName, "branches on 'relu' \\+ "),
        (ByLambda, r"reads ACTS \(dict\)"),
        (ByInnerFunction, r"reads ACTS \(dict\)"),
        (ByModuleState, r"reads HELPER.acts \(dict\)"),
        (ByClassState, r"reads Shelf.acts \(dict\)"),
        (ByDict, "uses __dict__"),
        (WithoutSource, "has branches, and its source cannot be read"),
        (lambda: Gated(Switched()), "must apply ReLU, got Switched"),
        (lambda: Gated(functools.partial(lambda x, acts: acts["relu"](x), acts=ACTS)), "must apply ReLU, got partial"),
    ],
)
def test_code_that_the_trials_do_not_decide_is_refused(other: Callable[[], nn.Module], why: str) -> None:
    m = nn.Sequential(other())
    with pytest.raises(ValueError, match=rf"0 \(\w+\) .*({why}).*filter_fn"):
        sparsify_(m)
    assert type(m[0].down_proj) is nn.Linear


def checked(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if args[0].dim() == 0:
            raise ValueError(", ".join(str(size) for size in args[0].shape))
        return forward(self, *args, **kwargs)

    return wrapped


class Decorated(Gated):
    forward = checked(Gated.forward)


class InThreeDimensions(Gated):
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 3:
            raise ValueError(", ".join(str(size) for size in x.shape))
        return super().forward(x)


class Helped(Gated):
    @staticmethod
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return HELPER.relu(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.functional import linear

        parts: list[Tensor] = []
        parts = [layer(x) for layer in (self.gate_proj, self.up_proj)]
        hidden = self.gated(parts[0], parts[-1])
        for layer in (self.down_proj,):
            hidden = linear(hidden, layer.weight)
        return hidden.view(*x.shape[:-1], x.shape[x.dim() - 1])


class GeneratedCode(Gated):
    forward = without_source(
        "def forward(self, x):\n    return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))\n"
    )


@pytest.mark.parametrize(
    "form", [Decorated, InThreeDimensions, Helped, GeneratedCode, lambda: Gated(functools.partial(Shelf.act))]
)
def test_code_that_the_trials_decide_is_accepted(form: Callable[[], nn.Module]) -> None:
    m, x = nn.Sequential(form()), tokens()
    expected = m(x)
    assert sparsify_(m) == ["0"]
    torch.testing.assert_close(m(x), expected)


def test_the_profiler_of_the_thread_goes_on() -> None:
    seen = []

    def profiler(frame: Any, event: str, called: Any) -> None:
        seen.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        sparsify_(nn.Sequential(Gated()))
        assert sys.getprofile() is profiler
        seen.clear()
        doubled(tokens())
    finally:
        sys.setprofile(before)
    assert "doubled" in seen
    profile = cProfile.Profile()
    profile.enable()
    sparsify_(nn.Sequential(Gated()))
    doubled(tokens())
    profile.disable()
    assert any(entry.code is doubled.__code__ for entry in profile.getstats())


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
        *(Surrogate.apply, Shifted(), Counting(), Annealed(), nn.Hardtanh(0, 60000.0), nn.Threshold(0.5, 1e-30)),
        *(nn.RReLU(0.0, 0.0), lambda x: x.clamp(min=0), lambda x: F.relu(x).clamp(max=60000.0)),
        *(lambda x: F.relu(x).detach(), lambda x: F.relu(x.bfloat16()).to(x.dtype)),
    ],
)
@pytest.mark.parametrize("form", [Gated, Block])
def test_near_relus_are_refused(form: Any, act: Any) -> None:
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


def beside(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def wrapped(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) if x.shape[0] <= 100 else self.fc2(self.fc1(x))

    return wrapped


class ByWrapper(Block):
    """A decorated forward differs from its source."""

    forward = beside(Block.forward)


class ByHelper(Block):
    """The helper calls fc1 too, which the source of forward does not show."""

    def extra(self, x: Tensor) -> Tensor:
        next(child for child in self.children() if isinstance(child, nn.Linear))(x)
        return x.mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(x) + self.fc2(self.activation_fn(self.fc1(x)))


class Peeking(Block):
    """A helper that reads the hidden state from its caller's frame."""

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
        (ByAnotherMethod, "its features must use activation_fn"),
        (ByProperty, "its bottom must use fc1"),
        (ByWrapper, "a decorator of its forward must use fc1"),
        (ByHelper, "must call fc1, activation_fn, fc2 once, in this order"),
        (Peeking, "must use what self.fc1 and self.activation_fn return for self.fc2 alone"),
        (ActivationDropout, "must call self.fc2 right on the result of an activation"),
        (Reused, "must use h for self.fc2 alone"),
        (ReusedLater, "must use h for self.fc2 alone"),
        (Twice, "must call self.fc1 once"),
        (ClassActivation, "self.activation_fn must be an attribute of the instance"),
        (NormBetween, "must call self.activation_fn right on the result of self.fc1"),
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
    """A model with a SiLU layer that is also held in the place that ``keep`` makes."""

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
def test_other_references_to_the_old_layer_are_refused(keep: Callable[[Any], object], why: str) -> None:
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
    """One that could do more than its forward shows."""

    def _save_to_state_dict(self, *args: Any) -> None:
        super()._save_to_state_dict(*args)


class Wrapped(nn.Module):
    """A wrapper as adapters use."""

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
        (
            put("drop", lambda _: nn.Dropout(0.1)),
            ValueError,
            r"must drop no values in training.*got drop, p = 0\.1: set p",
        ),
        (put("scale", lambda _: nn.Parameter(torch.ones(K))), ValueError, "got beside them scale"),
        (lambda m: m.register_buffer("mask", torch.ones(N)), ValueError, "got beside them mask"),
        (put("act_fn", lambda _: nn.PReLU()), ValueError, "act_fn must be an activation without state, got PReLU"),
        (lambda m: m.register_forward_hook(print), ValueError, "has forward_hooks, which would be lost"),
        (lambda m: m.act_fn.register_forward_pre_hook(print), ValueError, "forward_pre_hooks on act_fn"),
        (lambda m: m.up_proj.register_full_backward_hook(print), ValueError, "backward_hooks on up_proj"),
        (lambda m: m.register_state_dict_pre_hook(lambda *_: None), ValueError, "has state_dict_pre_hooks"),
        (put("forward", lambda f: lambda x: f(x)), ValueError, "a forward set on the instance"),
        (put("up_proj", lambda _: nn.Linear(K, N + 8, False)), ValueError, r"up_proj.weight must be \[264, 32\]"),
        (lambda m: m.up_proj.to(BF16), ValueError, "on one dtype, got torch.bfloat16 and torch.float32"),
        (lambda m: m.up_proj.to("meta"), ValueError, "on one device, got cpu and meta"),
    ],
)
def test_layers_with_hooks_or_state_are_refused(
    change: Callable[[Any], object], error: type[Exception], why: str
) -> None:
    m = with_change(change)
    with pytest.raises(error, match=rf"^0 \(Gated\).*{why}.*filter_fn"):
        sparsify_(m)
    assert type(m[0]) is Gated


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.fc1.register_forward_hook(print), "forward_hooks on fc1"),
        (lambda m: m.activation_fn.register_forward_hook(print), "forward_hooks on activation_fn"),
        (put("forward", lambda f: lambda x: f(x)), "a forward set on the instance"),
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


def test_a_model_without_layers_is_an_error_that_says_why() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Linear(K, 3 * N), nn.Linear(N, K)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, K, 2 * N))

    with pytest.raises(ValueError, match=r"gate_proj, up_proj, down_proj; up_proj, down_proj; fc1, fc2; got Linear"):
        sparsify_(nn.Linear(K, K))
    with pytest.raises(ValueError, match=r"nearest are 0 \(Fused\) with down_proj, gate_up_proj; 2 \(Experts\) with"):
        sparsify_(nn.Sequential(Fused(), Fused(), Experts()))
    with pytest.raises(ValueError, match="that filter_fn accepts; it left out 2, the first '0'"):
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


def test_wrong_arguments_are_refused() -> None:
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
    with pytest.raises(NotImplementedError, match="fc1 of a twell pair must keep its forward"):
        m(x)


class Square(nn.Module):
    """A pair whose hidden state is as wide as x."""

    def __init__(self, act: bool = True) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(K, K), nn.Linear(K, K)
        if act:
            self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class SquareLiteral(Square):
    def __init__(self) -> None:
        super().__init__(act=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class Adapted(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 4, False), nn.Linear(4, base.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Dropping(nn.Module):
    """A wrapper that loses part of its layer's input."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(F.dropout(x, 0.5))


CHANGES: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "fc1 adapted": ("fc1", Adapted),
    "fc1 replaced": ("fc1", lambda _: nn.Linear(K, K)),
    "fc1 followed": ("fc1", lambda base: nn.Sequential(base, nn.Linear(K, K))),
    "fc1 left out": ("fc1", lambda _: nn.Identity()),
    "fc2 adapted": ("fc2", Adapted),
    "fc2 replaced": ("fc2", lambda _: nn.Linear(K, K)),
    "fc2 preceded": ("fc2", lambda base: nn.Sequential(nn.Linear(K, K), base)),
    "fc2 of a part": ("fc2", Dropping),
    "of another pair": ("fc2", lambda _: other_pair().fc2),
    "act": ("act", lambda _: nn.GELU()),
}


def other_pair() -> Any:
    m = nn.Sequential(Square())
    sparsify_(m)
    return m[0]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [Square, SquareLiteral])
@pytest.mark.parametrize("through", [lambda m: m, copy.deepcopy, pickled], ids=["itself", "deepcopy", "pickle"])
def test_a_square_pair_that_is_changed_later_raises(kind: Any, change: str, through: Callable[[Any], Any]) -> None:
    """x and the hidden state have the same size."""
    name, make = CHANGES[change]
    m = nn.Sequential(kind())
    sparsify_(m)
    m(torch.randn(3, K))
    if not hasattr(m[0], name):
        pytest.skip("the activation was in the code")
    m = through(m)
    m(torch.randn(3, K))
    setattr(m[0], name, make(getattr(m[0], name)))
    with pytest.raises(NotImplementedError, match=r"fc[12] of a twell pair must be .*got.*before sparsify_"):
        m(torch.randn(3, K))


def called_outside(block: Any, x: Tensor) -> Tensor:
    return block.fc2(F.relu(block.fc1(x)))  # type: ignore[no-any-return]


def test_code_outside_of_a_square_pair_raises() -> None:
    m = nn.Sequential(Square())
    sparsify_(m)
    with pytest.raises(NotImplementedError, match="the very tensor that fc1 returns"):
        called_outside(m[0], torch.randn(3, K))


LEGITIMATE: dict[str, Callable[[Any], object]] = {
    "checkpointed": lambda m: setattr(m[0], "fc2", wrapper(m[0].fc2)),
    "both checkpointed": lambda m: [setattr(m[0], name, wrapper(getattr(m[0], name))) for name in ("fc1", "fc2")],
    "followed": lambda m: setattr(m[0], "fc2", nn.Sequential(m[0].fc2, nn.Identity())),
    "compiled": lambda m: m.compile(backend="eager"),
    "fc1 compiled": lambda m: m[0].fc1.compile(backend="eager"),
    "fc1 wrapped": lambda m: setattr(m[0], "fc1", torch.compile(m[0].fc1, backend="eager")),
    "fc2 compiled": lambda m: setattr(m[0], "fc2", torch.compile(m[0].fc2, backend="eager")),
    "fc2 not compiled": lambda m: [
        setattr(m[0].fc2, "forward", torch.compiler.disable(m[0].fc2.forward)),
        m.compile(backend="eager"),
    ],
    "hooks": lambda m: [c.register_full_backward_hook(lambda *_: None) for c in (m[0].fc1, m[0].act, m[0].fc2)],
    "dropout of nothing": lambda m: setattr(m[0], "act", nn.Dropout(0.0)),
}


def wrapper(module: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module)  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.parametrize("change", LEGITIMATE)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_square_pair_allows_what_changes_nothing(change: str, autocast: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    dense = nn.Sequential(Square())
    sparse = copy.deepcopy(dense)
    sparsify_(sparse)
    x = torch.randn(3, K, requires_grad=True)
    with torch.autocast("cpu", BF16, enabled=autocast):
        expected = dense(x)
        # a tensor that is alive when the next comes
        first = torch.randn(3, K)
        sparse(first)
        LEGITIMATE[change](sparse)
        for _ in range(2):
            y = sparse(x)
            torch.testing.assert_close(y, expected)
    wanted, got = (torch.autograd.grad(out.float().square().sum(), x)[0] for out in (expected, y))
    torch.testing.assert_close(got, wanted, rtol=2e-2 if autocast else 1e-5, atol=2e-2 if autocast else 1e-5)
    # the layer alone, as code that inspects a model calls it
    torch.testing.assert_close(next(iter(layers(sparse).values()))(x), dense(x))


def test_threads_share_a_square_pair() -> None:
    dense = nn.Sequential(Square())
    sparse = copy.deepcopy(dense)
    sparsify_(sparse)
    xs = [torch.randn(3, K) for _ in range(4)]
    apart = threading.Barrier(len(xs))
    # all threads are between the layers at once
    sparse[0].act = Waiting(apart)
    got: dict[int, Tensor] = {}

    def work(i: int) -> None:
        for _ in range(3):
            with torch.no_grad():
                got[i] = sparse(xs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len(xs)
    for i, x in enumerate(xs):
        torch.testing.assert_close(got[i], dense(x))


class Waiting(nn.Identity):
    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait(60)
        return x


def test_a_block_is_freed_with_its_pair() -> None:
    m = nn.Sequential(Square())
    sparsify_(m)
    block = weakref.ref(m[0])
    gc.disable()
    try:
        del m
        assert block() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "register", ["register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"]
)
def test_hooks_on_the_second_layer_of_a_pair_warn(register: str, caplog: pytest.LogCaptureFixture) -> None:
    m = nn.Sequential(Block().eval())
    sparsify_(m)
    x = torch.randn(3, K)
    y = m(x)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "twell"):
        with twell.count_firing(m):
            m(x)
        # twell's own hooks are fine
        assert "fc2 of a twell pair" not in caplog.text
        getattr(m[0].fc2, register)(lambda *_: None)
        assert torch.equal(m(x), y)
    assert "fc2 of a twell pair has hooks: they see the input of fc1" in caplog.text


class Counted(nn.Module):
    """A parametrization that changes with use, like spectral norm in training."""

    runs = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.runs += 1
        return weight


@pytest.mark.parametrize("name", ["fc1", "fc2"])
@pytest.mark.parametrize("form", [Nested, Literal, Block])
def test_a_parametrization_of_a_pair_runs_once_per_call(form: Callable[[], nn.Module], name: str) -> None:
    dense = nn.Sequential(form())
    sparse = copy.deepcopy(dense)
    sparsify_(sparse)
    runs = []
    for m in (dense, sparse):
        counted = Counted()
        parametrize.register_parametrization(m[0].get_submodule(name), "weight", counted)
        before = counted.runs
        m(torch.randn(3, K))
        runs.append(counted.runs - before)
    assert runs == [1, 1]


class DropsInside(nn.Module):
    """relu(x) in code, and a Dropout that looks like the activation by its place."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(torch.relu(self.fc1(x))))


@pytest.mark.parametrize("activation", [None, "relu"])
def test_dropout_in_the_place_of_an_activation_is_never_lost(activation: str | None) -> None:
    model = nn.Sequential(DropsInside(0.1))
    with pytest.raises(ValueError, match=r"drop"):
        twell.sparsify_(model, activation=activation)
    assert type(model[0]) is DropsInside
