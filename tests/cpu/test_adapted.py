"""Layers with LoRA adapters of peft, or a gate that only a call computes, beside peft's own forward and float64."""

import contextlib
import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fake_gpu import Arrived, install
from ffns import BF16, Gated, K, Meta, N, Plain, UpFirst, take
from layer_checks import CHILDREN, MODULES, Module, close
from torch import Tensor, nn

import twell
from twell.call import functional
from twell.choose.plan import route_of
from twell.nn.columns import Matrix
from twell.nn.converted import FusedGatedMLP, NamedGatedMLP
from twell.nn.layers import SparseGatedMLP, SparseMLP
from twell.runtime import modes

peft = pytest.importorskip("peft")

# The largest error of any output or gradient, as a multiple of the error of peft's own call of the same bf16 tensors;
# 1.6 was seen of an adapter's B, 1.1 of others. Adapters and low-rank activations are rounded to bf16, sums of the base
# and a delta are not.
FACTOR = 2.0


class Holder(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x)


def fused(*_: Any, **options: Any) -> nn.Module:
    dtype = options.pop("dtype")
    linears = nn.Linear(K, 2 * N, dtype=dtype), nn.Linear(N, K, dtype=dtype)
    return FusedGatedMLP(("gate_up_proj", "down_proj"), linears, True, **options)


def named(*_: Any, **options: Any) -> nn.Module:
    dtype = options.pop("dtype")
    linears = nn.Linear(K, N, dtype=dtype), nn.Linear(K, N, dtype=dtype), nn.Linear(N, K, dtype=dtype)
    return NamedGatedMLP(("w1", "w3", "w2"), linears, **options)


def adapted(make: Any = SparseGatedMLP, dtype: torch.dtype = BF16, strategy: Any = "union", **config: Any) -> Any:
    """A PeftModel around a layer, with adapters that change what it computes."""
    torch.manual_seed(0)
    mlp = make(K, N, True, dtype=dtype, strategy=strategy)
    # no gate is so near to 0 that its rounding decides whether it fires
    first = next(iter(mlp._modules.values()))
    with torch.no_grad():
        if first.bias is None:
            first.bias = nn.Parameter(torch.empty(first.out_features, dtype=dtype))
        first.bias.copy_(torch.where(torch.rand(first.out_features) < 0.4, 5.0, -5.0))
    targets = [name for name, child in mlp._modules.items() if isinstance(child, nn.Linear)]
    defaults = {"target_modules": targets, "r": 3, "lora_alpha": 5, "init_lora_weights": False}
    return peft.get_peft_model(Holder(mlp), peft.LoraConfig(**(defaults | config)))


def layer_of(model: Any) -> Any:
    return model.get_base_model().mlp


def tokens(dtype: torch.dtype = BF16, count: int = 6) -> Tensor:
    return torch.randn(2, count, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def results(model: Any, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """y and the gradients of what ``run``, or the model, makes of x."""
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    y = model(x) if run is None else run(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
    leaves = {"x": x, **{name: p for name, p in model.named_parameters() if p.requires_grad}}
    gradients = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    return {"y": y.detach()} | {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}


def by_peft(model: Any) -> Any:
    model = copy.deepcopy(model)
    layer_of(model).strategy = "dense"
    return model


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The sparse functions that ran, with the width of y as they compute it."""
    seen: list[tuple[str, int]] = []
    run = functional.run

    def record_run(function: Any, given: Any, *rest: Any, **options: Any) -> Any:
        seen.append((function.__name__, given.w_down.shape[0]))
        # "auto" decides and measures as in a layer without adapters
        assert not modes.checkpointed()
        return run(function, given, *rest, **options)

    monkeypatch.setattr(functional, "run", record_run)
    return seen


def second_adapter(model: Any) -> None:
    config = peft.LoraConfig(target_modules=["up_proj", "down_proj"], r=5, lora_alpha=2, init_lora_weights=False)
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])


def half_adapters(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(BF16)


def undropped(model: Any) -> None:
    """Of the hidden state nothing may be dropped."""
    *_, down = layer_of(model)._modules.values()
    down.lora_dropout.default = nn.Identity()


def dora(target: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        config = peft.LoraConfig(target_modules=[target], r=4, use_dora=True, init_lora_weights=False)
        model.add_adapter("dora", config)
        model.set_adapter("dora")

    return change


def hooked(place: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        layer_of(model).get_submodule(place).register_forward_hook(lambda module, args, y: 2 * y)

    return change


hooked_gate = hooked("gate_proj")


def other_gate(model: Any) -> None:
    layer_of(model).gate_proj = nn.Sequential(nn.Linear(K, 4), nn.Tanh(), nn.Linear(4, N)).to(BF16)


GATE_AND_UP = ["gate_proj", "up_proj"]
# what a call of a gate from anywhere leaves to twell
GIVEN: dict[str, Any] = {"target_modules": ["up_proj", "down_proj"], "ran": "sparse_up_down"}
PLAIN: dict[str, Any] = {"make": SparseMLP, "ran": "sparse_ffn"}
# the configuration; and what is made, what happens then, what runs, and the columns that x and y get
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "gate": {"target_modules": ["gate_proj"]},
    "up": {"target_modules": ["up_proj"]},
    "down": {"target_modules": ["down_proj"], "r": 11, "columns": 16},
    "gate and down": {"target_modules": ["gate_proj", "down_proj"]},
    "rsLoRA": {"use_rslora": True},
    "ranks": {"rank_pattern": {"up_proj": 7}, "alpha_pattern": {"gate_proj": 1}, "columns": 16},
    "biases of bases": {"bias": "lora_only"},
    "biases of adapters": {"lora_bias": True},
    "dropout": {"target_modules": GATE_AND_UP, "lora_dropout": 0.3},
    "two": {"then": second_adapter, "columns": 16},
    "disabled": {"then": lambda model: model.base_model.disable_adapter_layers(), "columns": 0},
    "merged": {"then": lambda model: model.merge_adapter(), "columns": 0},
    "adapters in bf16": {"then": half_adapters},
    "no gate": PLAIN,
    "fused": {"make": fused},
    "named": {"make": named},
    "no gate, dropout": PLAIN | {"lora_dropout": 0.3, "then": undropped},
    "fused, dropout": {"make": fused, "lora_dropout": 0.3, "then": undropped},
    "named, dropout": {"make": named, "lora_dropout": 0.3, "then": undropped},
    "DoRA of the gate": GIVEN | {"then": dora("gate_proj"), "columns": 0},
    "a hook of the gate": GIVEN | {"then": hooked_gate},
    "another gate": GIVEN | {"then": other_gate},
    # it is the gate of a layer without one
    "a hook of the up projection": {"make": SparseMLP, "then": hooked("up_proj"), "ran": "sparse_up_down"},
}


def made_of(case: str) -> Any:
    config = {"then": lambda model: None} | CASES[case]
    then = config.pop("then")
    model = adapted(**{name: value for name, value in config.items() if name not in ("ran", "columns")})
    then(model)
    return model


@pytest.mark.parametrize("case", CASES)
def test_errors_are_those_of_peft(case: str, runs: list[tuple[str, int]]) -> None:
    """Outputs and all gradients, in bf16 beside peft in bf16, and in float64 to the last digits."""
    ran, columns = CASES[case].get("ran", "sparse_gated_ffn"), CASES[case].get("columns", 8)
    model = made_of(case)
    exact = results(by_peft(model).double(), tokens().double())
    assert not runs
    ours = results(model, tokens())
    assert runs == [(ran, K + columns)]
    theirs = results(by_peft(model), tokens())
    wide = results(model.double(), tokens().double())
    assert ours["y"].is_contiguous()
    assert ours.keys() == theirs.keys() == exact.keys()
    for name, right in exact.items():
        assert ours[name].dtype == theirs[name].dtype
        assert ours[name].shape == theirs[name].shape
        assert error(ours[name], right) <= FACTOR * error(theirs[name], right) + 1e-6, name
        assert error(wide[name], right) <= 1e-13, name


def test_figures_are_of_the_hidden_state(runs: list[tuple[str, int]]) -> None:
    model = adapted()
    mlp = layer_of(model)
    mlp.record_aux = True
    y, aux = mlp(tokens(), return_aux=True)
    dense, expected = layer_of(by_peft(model))(tokens(), return_aux=True)
    close(y, dense)
    assert mlp.aux is aux
    assert abs(aux.l1 - expected.l1) <= 1e-2 * expected.l1
    assert abs(aux.l0 - expected.l0) <= 0.5
    assert len(runs) == 1


# What no columns tell


def test_a_gate_of_another_kind_is_as_in_dense_pytorch(runs: list[tuple[str, int]]) -> None:
    """It is called once, whatever it returns."""
    calls = []
    model = adapted(target_modules=["up_proj"])
    layer_of(model).gate_proj.register_forward_hook(lambda module, args, y: calls.append(1) or y[..., :1])
    assert torch.equal(model(tokens()), by_peft(model)(tokens()))
    assert len(calls) == 2
    assert not runs


def dropping_down(model: Any) -> None:
    layer_of(model).down_proj.lora_dropout.default = nn.Dropout(0.3)


def merged_and_disabled(model: Any) -> None:
    model.merge_adapter()
    model.base_model.disable_adapter_layers()


def transposed(model: Any) -> None:
    layer_of(model).up_proj.fan_in_fan_out = True


def plain_up(model: Any) -> None:
    layer_of(model).up_proj = nn.Sequential(layer_of(model).up_proj)


def saved_down(model: Any) -> None:
    down = layer_of(model).down_proj.base_layer
    layer_of(model).down_proj = peft.utils.other.ModulesToSaveWrapper(down, "default")


DENSE: dict[str, Callable[[Any], None]] = {
    "up_proj has an adapter that is a variant of LoRA (DoraLinearVariant)": dora("up_proj"),
    "up_proj has hooks or a replaced forward": hooked("up_proj"),
    "up_proj has an adapter with hooks, or of other modules than peft makes": hooked("up_proj.lora_B.default"),
    "down_proj has an adapter with dropout of the hidden state (lora_dropout)": dropping_down,
    "up_proj has merged adapters that are disabled": merged_and_disabled,
    "up_proj adapts a layer that has hooks or a replaced forward": hooked("up_proj.base_layer"),
    "up_proj is of a version of peft that is not known, or stores its weight transposed": transposed,
    "up_proj is a torch.nn.modules.container.Sequential": plain_up,
    "down_proj is a peft.utils.other.ModulesToSaveWrapper": saved_down,
}


@pytest.mark.parametrize("why", DENSE)
def test_what_cannot_be_read_is_called(why: str, runs: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(twell.nn.layers, "warn_once", warnings.append)
    model = adapted()
    DENSE[why](model)
    dense = by_peft(model)
    (row,) = twell.explain(model).rows
    assert row.strategy == "dense"
    assert row.reason.startswith(why)
    ours = results(model, tokens())
    assert not runs
    (warning,) = warnings
    assert warning.startswith(f"a twell layer calls its projections and runs dense: {why}")
    for name, expected in results(dense, tokens()).items():
        assert torch.equal(ours[name], expected), name


IA3 = {"target_modules": list(CHILDREN), "feedforward_modules": ["down_proj"], "init_ia3_weights": False}


def test_other_methods_of_peft_are_called(runs: list[tuple[str, int]]) -> None:
    for config in (peft.IA3Config(**IA3), peft.LoHaConfig(target_modules=list(CHILDREN), r=2, init_weights=False)):
        torch.manual_seed(0)
        model = peft.get_peft_model(Holder(SparseGatedMLP(K, N, dtype=BF16, strategy="row")), config)
        assert torch.equal(model(tokens()), by_peft(model)(tokens()))
        assert error(model(tokens()), layer_of(model)(tokens()).double()) == 0
        assert {row.strategy for row in twell.explain(model).rows} == {"dense"}
    assert not runs


def test_adapters_of_each_sample_are_pefts(runs: list[tuple[str, int]]) -> None:
    model = adapted().eval()
    second_adapter(model)
    model.base_model.set_adapter("default")
    names = ["second", "__base__"]
    with torch.no_grad():
        ours = model(tokens(), adapter_names=names)
        assert not runs
        assert torch.equal(ours, by_peft(model)(tokens(), adapter_names=names))
        model(tokens())
    assert len(runs) == 1


def test_auto_concatenates_for_many_tokens_alone(
    free_choice: None, monkeypatch: pytest.MonkeyPatch, runs: list[tuple[str, int]]
) -> None:
    monkeypatch.setattr(twell.choose.measurement, "Transfer", Arrived)
    model = adapted(strategy="auto")
    (row,) = twell.explain(model).rows
    assert row.strategy == "auto"
    assert "calls of fewer than 1,024 tokens call the projections" in row.reason
    with torch.no_grad():
        for count, expected in ((511, 0), (512, 1)):
            model(tokens(count=count))
            assert len(runs) == expected
        layer_of(model).strategy = "row"
        model(tokens(count=1))
        assert len(runs) == 2


@pytest.mark.parametrize("change", [None, hooked_gate], ids=["read", "called"])
def test_what_is_dense_calls_the_projections(
    change: Any, monkeypatch: pytest.MonkeyPatch, runs: list[tuple[str, int]]
) -> None:
    """Products with the wide weights would make gradients of all of their columns."""
    model, x = adapted(), tokens()
    if change is not None:
        change(model)
    monkeypatch.setattr(functional, "routed", lambda facts: route_of("dense"))
    expected, ours = results(by_peft(model), x), results(model, x)
    assert len(runs) == 1
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
    figures = [layer_of(each)(x, return_aux=True)[1] for each in (model, by_peft(model))]
    assert figures[0] == figures[1]


def test_kernels_take_the_concatenated_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; a kernel copies the down weight by rows where it is concatenated, once in each."""
    gpu = install(monkeypatch)
    model = adapted()
    model(tokens()).sum().backward()
    names = gpu.names()
    assert {"compact", "sampled_up", "gathered", "weight_grad"} <= set(names)
    assert names[0] == "matrix_transpose"
    assert names.count("matrix_transpose") == 2
    (grads,) = [arguments for spec, arguments in gpu.launches if spec.op == "weight_grad"]
    # the gradients are those of the adapters' columns alone
    assert {grads[i].shape[1] for i in (0, 1)} == {8}


def test_wide_layers_run_dense(runs: list[tuple[str, int]]) -> None:
    """K + R is limited as K is."""
    torch.manual_seed(0)
    mlp = SparseGatedMLP(16384, 8, dtype=BF16, strategy="row")
    config = peft.LoraConfig(target_modules=list(CHILDREN), r=2, init_lora_weights=False)
    model = peft.get_peft_model(Holder(mlp), config)
    x = torch.randn(3, 16384).to(BF16)
    assert torch.equal(model(x), by_peft(model)(x))
    assert not runs
    (row,) = twell.explain(model).rows
    assert (row.strategy, "at most 16384" in row.reason) == ("dense", True)


@MODULES
def test_what_has_no_dense_answer_raises(cls: Module) -> None:
    mlp = layer_of(adapted(cls))
    mlp.accumulate_main_grad = True
    with pytest.raises(NotImplementedError, match=r"accumulate_main_grad: expected plain nn\.Linear .*down_proj\)"):
        mlp(tokens())
    (row,) = twell.explain(mlp).rows
    assert row.strategy == "none"
    assert "calls raise: accumulate_main_grad" in row.reason
    mlp.accumulate_main_grad = False
    mlp.strategy, mlp.invariant = "row", True
    with pytest.raises(NotImplementedError, match=r"invariant: expected plain nn\.Linear projections"):
        mlp(tokens())


# sparsify_


@pytest.mark.parametrize(
    ("form", "targets"),
    [
        (Gated, ["gate_proj", "up_proj", "down_proj"]),
        (Gated, ["down_proj"]),
        (Meta, ["w1", "w2"]),
        (UpFirst, ["gate_up_proj"]),
        (Plain, ["up_proj", "down_proj"]),
    ],
)
def test_sparsify_takes_adapted_modules(form: Any, targets: list[str], runs: list[tuple[str, int]]) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=targets, r=3, init_lora_weights=False)
    stock = peft.get_peft_model(Holder(form()), config).double()
    model = copy.deepcopy(stock)
    children = {name: getattr(layer_of(model), name) for name in targets}
    mlp = layer_of(take(model, strategy="union"))
    runs.clear()
    assert isinstance(mlp, (SparseGatedMLP, SparseMLP))
    assert all(getattr(mlp, name) is child for name, child in children.items())
    assert model.state_dict().keys() == stock.state_dict().keys()
    expected, found = results(stock, tokens(torch.float64)), results(model, tokens(torch.float64))
    # wider values run dense
    assert not runs
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert error(found[name], value) <= 1e-13, name
    results(copy.deepcopy(model).bfloat16(), tokens(torch.bfloat16))
    assert len(runs) == 1
    assert model.merge_and_unload().mlp is mlp
    assert error(mlp(tokens(torch.float64)), expected["y"]) <= 1e-13


def test_sparsify_refuses_adapted_modules_that_are_something_else() -> None:
    def refused(change: Callable[[Any], Any], why: str, kind: type[Exception] = ValueError) -> None:
        model = adapted(lambda *_, **options: Gated().to(options["dtype"]))
        change(layer_of(model))
        before = dict(model.named_modules())
        with pytest.raises(kind, match=why):
            take(model)
        assert dict(model.named_modules()) == before

    refused(lambda mlp: mlp.up_proj.to("meta"), "must have its weights on one device")
    refused(lambda mlp: mlp.up_proj.float(), "must have its weights on one dtype")
    refused(lambda mlp: setattr(mlp, "act_fn", nn.SiLU()), "must apply ReLU, got SiLU")
    refused(lambda mlp: setattr(mlp.up_proj, "base_layer", nn.Bilinear(K, K, N)), "must be an nn.Linear", TypeError)


def replaced(model: Any) -> None:
    for linear in (layer_of(model).gate_proj.base_layer, layer_of(model).up_proj.lora_A.default):
        linear.weight = nn.Parameter(linear.weight.detach() * 2)


def assigned(model: Any) -> None:
    model.load_state_dict({name: t * 2 for name, t in model.state_dict().items()}, assign=True)


def other_memory(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


@pytest.mark.parametrize("given", [False, True], ids=["read", "called"])
@pytest.mark.parametrize("change", [replaced, assigned, other_memory])
def test_backward_is_of_the_parameters_of_forward(change: Callable[[Any], None], given: bool) -> None:
    found = []
    for changes in (False, True):
        model = adapted()
        if given:
            hooked_gate(model)
        x = tokens().requires_grad_()
        y = model(x)
        if changes:
            change(model)
        found.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*found)


def test_functional_calls_have_the_gradients_of_their_parameters() -> None:
    model, found = adapted(dtype=torch.float64), []
    for each in (model, by_peft(model)):
        other = {name: (p.detach() * 2).requires_grad_() for name, p in each.named_parameters() if p.requires_grad}
        y = torch.func.functional_call(each, other, (tokens(torch.float64),))
        found.append(torch.autograd.grad(y.sum(), list(other.values())))
    assert len(found[0]) == 6
    for ours, theirs in zip(*found):
        assert error(ours, theirs) <= 1e-13


SEVERAL = pytest.mark.parametrize("case", ["all", "two", "dropout", "fused", "no gate", "a hook of the gate"])


@SEVERAL
def test_no_copy_lives_until_backward(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights that are made none is kept by the graph or by hooks of others; x is kept once, with its columns."""
    made: list[Any] = []
    kept: list[Tensor] = []
    read = Matrix.read

    def record(own: Matrix, sources: Any) -> Any:
        found = read(own, sources)
        if found is not None and N in found.shape:
            made.append(weakref.ref(found.untyped_storage()))
        return found

    model = made_of(case)
    right = results(model, tokens())
    monkeypatch.setattr(Matrix, "read", record)

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t.clone()

    def run(x: Tensor, hooked: bool = False) -> Any:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with hooks if hooked else contextlib.nullcontext():
            y = model(x)
        assert len(made) == (2 if "gate" in case else 3)
        assert not any(ref() is not None for ref in made)
        return y

    for each in (run, partial(run, hooked=True)):
        found = results(model, tokens(), each)
        assert all(torch.equal(found[name], value) for name, value in right.items())
        made.clear()
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    others = [t for t in kept if t.dim() == 2 and t.untyped_storage().data_ptr() not in held]
    assert not any(N in t.shape and min(t.shape) >= K for t in others)
    assert sum(t.shape == (12, K + CASES[case].get("columns", 8)) for t in others) == 1
