"""Modules in servers and other libraries: late weights, inference mode, copies, threads, hooks, adapters.

After each of these a layer must compute the result of its children (nn.Linear, ReLU, product), or raise.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import os
import pickle
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from twell._sparsify import layers, sparsify_
from twell.nn import SparseGatedMLP, SparseMLP, explain, set_down_layout

BF16 = torch.bfloat16
K, N = 32, 264
STRATEGIES = ("auto", "row", "union", "dense")
MODULES = pytest.mark.parametrize("cls", [SparseGatedMLP, SparseMLP])
Module = type[SparseGatedMLP] | type[SparseMLP]
CHILDREN = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tokens(dtype: torch.dtype = BF16, count: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(count, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_children(mlp: nn.Module, x: Tensor) -> Tensor:
    """Compute the children of ``mlp`` in dense PyTorch, whatever they are."""
    children = dict(mlp.named_children())
    hidden = F.relu(children.get("gate_proj", children["up_proj"])(x))
    if "gate_proj" in children:
        hidden = hidden * children["up_proj"](x)
    return children["down_proj"](hidden)


def child_of(mlp: nn.Module, name: str) -> Any:
    return mlp.get_submodule(name)


def close(y: Tensor, expected: Tensor) -> None:
    """Check equality up to 16-bit rounding, far below the effect of any change of weights."""
    assert y.shape == expected.shape
    assert y.dtype == expected.dtype
    assert (y.double() - expected.double()).norm() <= 2e-2 * expected.double().norm()


def agrees(mlp: nn.Module, x: Tensor | None = None) -> None:
    """Call ``mlp`` as servers do; it must agree with its children."""
    x = tokens() if x is None else x
    with torch.no_grad():
        close(mlp(x), by_children(mlp, x))


def new_state(mlp: nn.Module, seed: int = 7) -> dict[str, Tensor]:
    """Other weights, contiguous as in a file."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, Tensor] = {}
    state = {}
    for name, t in mlp.state_dict().items():
        # tied ones stay equal
        if t.data_ptr() not in made or t.is_meta:
            made[t.data_ptr()] = (torch.randn(t.shape, generator=generator) / t.shape[-1] ** 0.5).to(t.dtype)
        state[name] = made[t.data_ptr()]
    return state


def owner(mlp: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, leaf = name.rpartition(".")
    return mlp.get_submodule(prefix), leaf


# weights that come after construction


def copied(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in mlp.named_parameters():
            parameter.copy_(state[name])


def in_slices(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    # as in loaders of tensor-parallel shards
    for name, parameter in mlp.named_parameters():
        half = parameter.shape[0] // 2
        parameter.data[:half].copy_(state[name][:half])
        parameter.data.narrow(0, half, parameter.shape[0] - half).copy_(state[name][half:])


def as_data(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name, parameter in mlp.named_parameters():
        parameter.data = state[name]


def as_parameters(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name in list(dict(mlp.named_parameters())):
        module, leaf = owner(mlp, name)
        setattr(module, leaf, nn.Parameter(state[name], requires_grad=False))


def as_replaced_parameters(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    # past nn.Module.__setattr__, as in accelerate
    for name in list(dict(mlp.named_parameters())):
        module, leaf = owner(mlp, name)
        module._parameters[leaf] = nn.Parameter(state[name])


def through_state_dict(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name, tensor in mlp.state_dict().items():
        tensor.copy_(state[name])


def loaded(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    mlp.load_state_dict(state)


def assigned(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    mlp.load_state_dict(state, assign=True)


def assigned_by_child(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    for name, child in mlp.named_children():
        prefix = f"{name}."
        part = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
        child.load_state_dict(part, assign=True)


def assigned_in_odd_layouts(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    wide = {name: torch.stack((t, -t), -1)[..., 0] if t.dim() == 2 else t for name, t in state.items()}
    mlp.load_state_dict(wide, assign=True)


def swapped(mlp: nn.Module, state: dict[str, Tensor]) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        mlp.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


LOADERS = [
    *(copied, in_slices, as_data, as_parameters, as_replaced_parameters, through_state_dict),
    *(loaded, assigned, assigned_by_child, assigned_in_odd_layouts, swapped),
]


@MODULES
@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("layout", ["rows", "linear"])
def test_weights_that_come_after_a_call(cls: Module, load: Callable[..., None], layout: Any) -> None:
    mlp = cls(K, N, bias=True, dtype=BF16)
    set_down_layout(mlp, layout)
    state = new_state(mlp)
    expected = cls(K, N, bias=True, dtype=BF16)
    expected.load_state_dict(state)
    agrees(mlp)
    load(mlp, {name: tensor.clone() for name, tensor in state.items()})
    for name, tensor in mlp.state_dict().items():
        assert torch.equal(tensor, state[name])
    with torch.no_grad():
        assert torch.equal(mlp(tokens()), expected(tokens()))
    mlp.requires_grad_()
    mlp(tokens()).float().sum().backward()
    expected(tokens()).float().sum().backward()
    for one, other in zip(mlp.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@MODULES
def test_a_weight_of_the_other_layout_is_refused(cls: Module) -> None:
    """[intermediate, hidden] is a file's layout, which must not be mistaken for the transposed view."""
    mlp = cls(K, N, dtype=BF16)
    state = mlp.state_dict()
    rows = state | {"down_proj.weight": state["down_proj.weight"].t()}
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"size mismatch for down_proj\.weight"):
            mlp.load_state_dict(rows, assign=assign)
    mlp.down_proj.weight = nn.Parameter(rows["down_proj.weight"])
    with pytest.raises(ValueError, match=r"w_down must be \[32, 264\] .*, got \[264, 32\]"):
        mlp(tokens())


@MODULES
@pytest.mark.parametrize("assign", [False, True])
def test_a_compiled_module_follows_its_weights(cls: Module, assign: bool) -> None:
    torch.compiler.reset()
    mlp = cls(K, N, dtype=BF16)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        first = compiled(tokens())
        mlp.load_state_dict(new_state(mlp), assign=assign)
        second = compiled(tokens())
        assert torch.equal(second, mlp(tokens()))
        assert not torch.equal(first, second)
        as_data(mlp, new_state(mlp, 8))
        assert torch.equal(compiled(tokens()), mlp(tokens()))


# inference mode


@MODULES
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inference_mode_all_along(cls: Module, strategy: Any) -> None:
    with torch.inference_mode():
        mlp = cls(K, N, True, dtype=BF16, strategy=strategy)
        for load in LOADERS:
            if load is not swapped:  # torch refuses to swap there
                load(mlp, new_state(mlp))
            agrees(mlp)
        y, aux = mlp(tokens(), return_aux=True)
        assert y.is_inference()
        assert aux.l1.is_inference()
        linears = [nn.Linear(K, N, dtype=BF16) for _ in range(2 if cls is SparseGatedMLP else 1)]
        agrees(cls.from_linear(*linears, nn.Linear(N, K, dtype=BF16)))
        agrees(copy.deepcopy(mlp))
    # weights made there work anywhere for inference
    agrees(mlp)
    with torch.no_grad():
        assert torch.equal(mlp(tokens()), y)
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
        mlp(tokens().requires_grad_()).float().sum().backward()


@MODULES
def test_inference_between_training_steps(cls: Module) -> None:
    mlp, x = cls(K, N, dtype=BF16), tokens()
    for _ in range(2):
        with torch.inference_mode():
            agrees(mlp)
            loaded(mlp, new_state(mlp))
            agrees(mlp)
        mlp.zero_grad()
        mlp(x).float().sum().backward()
        got = [parameter.grad.clone() for parameter in mlp.parameters()]
        mlp.zero_grad()
        by_children(mlp, x).float().sum().backward()
        for one, parameter in zip(got, mlp.parameters(), strict=True):
            close(one, parameter.grad)


# construction without memory, devices and dtypes


@MODULES
@pytest.mark.parametrize("how", ["to_empty", "assign", "parameters"])
@pytest.mark.parametrize("copies", [False, True])
def test_meta_construction(cls: Module, how: str, copies: bool) -> None:
    with torch.device("meta"):
        mlp = cls(K, N, True, dtype=BF16)
    if copies:
        mlp = pickle.loads(pickle.dumps(copy.deepcopy(mlp)))
    state = new_state(cls(K, N, True, dtype=BF16))
    # a call before the weights are loaded is an error and leaves nothing behind
    with pytest.raises(ValueError, match="must be on cpu as x is, got meta"):
        mlp(tokens())
    if how == "to_empty":
        mlp.to_empty(device="cpu")
        mlp.load_state_dict(state)
    elif how == "assign":
        mlp.load_state_dict(state, assign=True)
    else:
        as_replaced_parameters(mlp, state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in mlp.state_dict().items())
    agrees(mlp)
    if how != "parameters":
        assert mlp.down_proj.weight.is_contiguous()


@MODULES
@pytest.mark.parametrize("swap", [False, True])
def test_dtypes_there_and_back(cls: Module, swap: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        mlp = cls(K, N, True)
        state = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
        agrees(mlp, tokens(torch.float32))
        for change, dtype in (
            (mlp.double, torch.float64),
            (mlp.float, torch.float32),
            (mlp.bfloat16, BF16),
            (mlp.half, torch.float16),
            (lambda: mlp.to("cpu", torch.float64, non_blocking=True), torch.float64),
            (lambda: mlp.to(tokens()), BF16),
        ):
            change()
            assert {parameter.dtype for parameter in mlp.parameters()} == {dtype}
            assert mlp.down_proj.weight.is_contiguous()
            agrees(mlp, tokens(dtype))
            with pytest.raises(TypeError, match=r"x must be .* as the others are, got"):
                mlp(tokens(torch.float32 if dtype != torch.float32 else BF16))
        close(mlp.up_proj.weight.double(), state["up_proj.weight"].double())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@MODULES
def test_default_dtype_and_device(cls: Module) -> None:
    torch.set_default_dtype(BF16)
    try:
        mlp = cls(K, N)
        assert mlp.up_proj.weight.dtype == BF16
        agrees(mlp)
        y, aux = mlp(tokens(), return_aux=True)
        assert (y.dtype, aux.l1.dtype, aux.l0.dtype) == (BF16, torch.float32, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)


# copies


def saved(mlp: Any) -> Any:
    file = io.BytesIO()
    torch.save(mlp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@MODULES
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved], ids=["deepcopy", "pickle", "save"]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_have_lives_of_their_own(cls: Module, duplicate: Callable[[Any], Any], strategy: Any) -> None:
    mlp = cls(K, N, True, dtype=BF16, strategy=strategy, compression=4)
    mlp.record_aux = mlp.accumulate_main_grad = True
    mlp.train(False).requires_grad_(False)
    set_down_layout(mlp, "linear")
    expected = mlp(tokens())
    other = duplicate(mlp)
    assert (other.strategy, other.compression, other.down_layout) == (strategy, 4, "linear")
    assert (other.record_aux, other.accumulate_main_grad, other.training) == (True, True, False)
    assert not any(parameter.requires_grad for parameter in other.parameters())
    assert torch.equal(other(tokens()), expected)
    loaded(other, new_state(other))
    set_down_layout(other, "rows")
    other.strategy, other.compression = "dense", 8
    agrees(other)
    assert mlp.down_proj.weight.is_contiguous()
    assert torch.equal(mlp(tokens()), expected)
    # hooks of the copy are the copy's
    assigned(other, new_state(other))
    assert other.down_proj.weight.t().is_contiguous()
    assert mlp.down_proj.weight.is_contiguous()


def test_copies_with_a_graph_and_figures() -> None:
    """Between forward and backward the module holds tensors of the graph."""
    mlp = SparseGatedMLP(K, N, dtype=BF16, strategy="row")
    mlp.record_aux = True
    y = mlp(tokens())
    for duplicate in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved):
        agrees(duplicate(nn.ModuleList([mlp]))[0])
    assert mlp.aux is not None
    (y.float().sum() + mlp.aux.l1).backward()
    assert mlp.gate_proj.weight.grad is not None


@MODULES
def test_shared_memory(cls: Module) -> None:
    mlp = cls(K, N, dtype=BF16).share_memory()
    assert all(parameter.is_shared() for parameter in mlp.parameters())
    agrees(mlp)
    # a second module on the same memory, as a worker process would have it
    other = pickle.loads(pickle.dumps(cls(K, N, dtype=BF16, device="meta")))
    as_replaced_parameters(other, {name: parameter.data for name, parameter in mlp.named_parameters()})
    through_state_dict(mlp, new_state(mlp))
    with torch.no_grad():
        assert torch.equal(other(tokens()), mlp(tokens()))


# several at a time


def test_many_models_in_one_process() -> None:
    kinds = list(itertools.product((SparseGatedMLP, SparseMLP), STRATEGIES, (2, 4, 8), (BF16, torch.float16)))
    models = [
        cls(K, N, bool(i % 2), strategy=strategy, compression=compression, dtype=dtype)
        for i, (cls, strategy, compression, dtype) in enumerate(kinds)
    ]
    xs = [tokens(dtype, seed=i) for i, (*_, dtype) in enumerate(kinds)]
    with torch.inference_mode():
        alone = [model(x) for model, x in zip(models, xs)]
        for model, x, y in reversed(list(zip(models, xs, alone))):
            assert torch.equal(model(x), y)
            agrees(model, x)


def test_nothing_outlives_a_model() -> None:
    mlp = SparseGatedMLP(K, N, dtype=BF16, strategy="row")
    mlp.record_aux = True
    mlp(tokens()).float().sum().backward()
    with torch.inference_mode():
        mlp(tokens())
    references = [weakref.ref(mlp), *(weakref.ref(parameter) for parameter in mlp.parameters())]
    del mlp
    gc.collect()
    assert not any(reference() is not None for reference in references)


@MODULES
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_threads_share_a_module(cls: Module, strategy: Any) -> None:
    mlp = cls(K, N, True, dtype=BF16, strategy=strategy)
    xs = [tokens(count=3 + i, seed=i) for i in range(6)]
    with torch.no_grad():
        alone = [mlp(x) for x in xs]
    gradients = []
    for x in xs:
        leaf = x.clone().requires_grad_()
        mlp(leaf).float().sum().backward()
        gradients.append(leaf.grad)
    mlp.zero_grad()
    failures: list[str] = []
    start = threading.Barrier(len(xs))

    def work(i: int) -> None:
        try:
            start.wait()
            for turn in range(8):
                if (i + turn) % 2:
                    with torch.inference_mode():
                        y, aux = mlp(xs[i], return_aux=True)
                        assert aux.l0.item() <= N
                    assert torch.equal(y, alone[i])
                else:
                    leaf = xs[i].clone().requires_grad_()
                    (gradient,) = torch.autograd.grad(mlp(leaf).float().sum(), leaf)
                    assert torch.equal(gradient, gradients[i])
        except Exception as error:
            failures.append(f"{i}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# requires_grad


@MODULES
@pytest.mark.parametrize("strategy", ["auto", "dense"])
def test_any_part_may_be_frozen(cls: Module, strategy: Any) -> None:
    mlp, x = cls(K, N, True, dtype=BF16, strategy=strategy), tokens()
    leaf = x.clone().requires_grad_()
    mlp(leaf).float().sum().backward()
    expected = {name: parameter.grad for name, parameter in mlp.named_parameters()}
    for frozen in itertools.chain.from_iterable(itertools.combinations(expected, r) for r in range(len(expected) + 1)):
        mlp.zero_grad()
        for name, parameter in mlp.named_parameters():
            parameter.requires_grad_(name not in frozen)
        again = x.clone().requires_grad_()
        mlp(again).float().sum().backward()
        close(again.grad, leaf.grad)
        for name, parameter in mlp.named_parameters():
            if name in frozen:
                assert parameter.grad is None
            else:
                close(parameter.grad, expected[name])
    # the choice of each call, not of the first
    mlp.requires_grad_(False)
    assert not mlp(x).requires_grad
    mlp.requires_grad_()
    assert mlp(x).requires_grad


@pytest.mark.parametrize("name", CHILDREN)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_changed_before_backward_are_noticed(name: str, strategy: Any) -> None:
    mlp = SparseGatedMLP(K, N, dtype=BF16, strategy=strategy)
    y = mlp(tokens().requires_grad_())
    with torch.no_grad():
        child_of(mlp, name).weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.float().sum().backward()


def test_projections_may_share_a_weight() -> None:
    mlp = SparseGatedMLP(K, N, dtype=BF16, strategy="row")
    mlp.up_proj.weight = mlp.gate_proj.weight
    agrees(mlp)
    mlp(tokens()).float().sum().backward()
    got = mlp.gate_proj.weight.grad
    mlp.zero_grad()
    by_children(mlp, tokens()).float().sum().backward()
    close(got, mlp.gate_proj.weight.grad)


# hooks and adapters of others


@MODULES
def test_hooks_of_the_layer_run(cls: Module) -> None:
    mlp, calls = cls(K, N, dtype=BF16), []
    mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    mlp.register_forward_hook(lambda module, args, y: calls.append(args[0].clone()) or y + 1)
    mlp.register_full_backward_hook(lambda module, grad_in, grad_out: calls.append(grad_out[0].clone()))
    y = mlp(tokens().requires_grad_())
    close(y, by_children(mlp, tokens() * 2) + 1)
    y.sum().backward()
    assert len(calls) == 2


def test_keys_may_be_renamed_by_hooks() -> None:
    model = nn.Sequential(SparseGatedMLP(K, N, dtype=BF16, strategy="row"), SparseMLP(K, N, dtype=BF16, strategy="row"))
    expected = new_state(model)

    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            state["model." + name] = state.pop(name)

    def undo(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        for name in list(state):
            state[name.removeprefix("model.")] = state.pop(name)

    model.register_state_dict_post_hook(rename)
    model.register_load_state_dict_pre_hook(undo)
    renamed = {f"model.{name}": tensor for name, tensor in expected.items()}
    for assign in (False, True):
        model.load_state_dict({name: tensor.clone() for name, tensor in renamed.items()}, assign=assign)
        assert model.state_dict().keys() == renamed.keys()
        assert all(torch.equal(tensor, renamed[name]) for name, tensor in model.state_dict().items())
        for layer in model:
            assert layer.down_proj.weight.is_contiguous()
            agrees(layer)


def test_weights_may_be_handed_over_for_a_call() -> None:
    mlp = SparseGatedMLP(K, N, True, dtype=BF16, strategy="row")
    state = new_state(mlp)
    with torch.no_grad():
        y = torch.func.functional_call(mlp, state, (tokens(),))
        loaded(mlp, state)
        assert torch.equal(y, mlp(tokens()))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.parametrize("name", CHILDREN)
def test_parametrized_weights(name: str) -> None:
    mlp, plain = (
        SparseGatedMLP(K, N, True, dtype=BF16, strategy="row"),
        SparseGatedMLP(K, N, True, dtype=BF16, strategy="row"),
    )
    plain.load_state_dict(mlp.state_dict())
    child = child_of(mlp, name)
    parametrize.register_parametrization(child, "weight", Doubled())
    with torch.no_grad():
        child_of(plain, name).weight.mul_(2)
    for _ in range(2):
        y, expected = mlp(tokens()), plain(tokens())
        assert torch.equal(y, expected)
        mlp.zero_grad()
        plain.zero_grad()
        y.float().sum().backward()
        expected.float().sum().backward()
        original = child.parametrizations.weight.original
        assert torch.equal(original.grad, 2 * child_of(plain, name).weight.grad)
        # its inputs change, and a state dict is loaded
        with torch.no_grad():
            original.add_(0.25)
            child_of(plain, name).weight.add_(0.5)
        mlp.load_state_dict({key: tensor.contiguous().clone() for key, tensor in mlp.state_dict().items()}, assign=True)
    parametrize.remove_parametrizations(child, "weight")
    agrees(mlp)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def weight_norm(mlp: nn.Module, name: str) -> None:
    with quiet():
        child: Any = torch.nn.utils.weight_norm(mlp.get_submodule(name))
    with torch.no_grad():
        child.weight_g.mul_(3)


def spectral_norm(mlp: nn.Module, name: str) -> None:
    with quiet():
        child: Any = torch.nn.utils.spectral_norm(mlp.get_submodule(name)).eval()
    with torch.no_grad():
        child.weight_orig.add_(1)


def new_weight_norm(mlp: nn.Module, name: str) -> None:
    child: Any = torch.nn.utils.parametrizations.weight_norm(mlp.get_submodule(name))
    with torch.no_grad():
        child.parametrizations.weight.original0.mul_(3)


def pruned(mlp: nn.Module, name: str) -> None:
    from torch.nn.utils import prune

    set_down_layout(mlp, "linear")
    child = prune.random_unstructured(mlp.get_submodule(name), "weight", 0.5)
    with torch.no_grad():
        child.weight_orig.mul_(3)


def hook(mlp: nn.Module, name: str) -> None:
    mlp.get_submodule(name).register_forward_hook(lambda module, args, y: 3 * y)


def pre_hook(mlp: nn.Module, name: str) -> None:
    mlp.get_submodule(name).register_forward_pre_hook(lambda module, args: (3 * args[0],))


def own_forward(mlp: nn.Module, name: str) -> None:
    child = child_of(mlp, name)
    forward = child.forward
    child.forward = lambda x: 3 * forward(x)


class Adapter(nn.Module):
    """A low-rank adapter that exposes the weight of its base, as in peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 4, False, dtype=base.weight.dtype)
        self.up = nn.Linear(4, base.out_features, False, dtype=base.weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 3 * self.up(self.down(x))


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def adapter(mlp: nn.Module, name: str) -> None:
    setattr(mlp, name, Adapter(getattr(mlp, name)))


def subclass(mlp: nn.Module, name: str) -> None:
    child = child_of(mlp, name)
    setattr(mlp, name, Scaled(child.in_features, child.out_features, dtype=BF16))


def wrapped(mlp: nn.Module, name: str) -> None:
    setattr(mlp, name, nn.Sequential(mlp.get_submodule(name), nn.Hardtanh(-0.1, 0.1)))


class Tripled(nn.Parameter):
    """A weight with its own product, like quantised ones."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return 3 * result if func is F.linear else result


def own_kind_of_weight(mlp: nn.Module, name: str) -> None:
    child = child_of(mlp, name)
    child.weight = Tripled(child.weight.detach())


CHANGES = [
    own_kind_of_weight,
    *(weight_norm, spectral_norm, new_weight_norm, pruned),
    *(hook, pre_hook, own_forward, adapter, subclass, wrapped),
]


@pytest.mark.parametrize("name", CHILDREN)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("strategy", ["auto", "row", "dense"])
def test_children_that_are_more_than_a_weight(name: str, change: Callable[..., None], strategy: Any) -> None:
    """Adapters, hooks that compute the weight, replaced forwards: all of them take effect, or the call raises."""
    mlp = SparseGatedMLP(K, N, True, dtype=BF16, strategy=strategy)
    with torch.no_grad():
        plain = mlp(tokens())
    change(mlp, name)
    mlp.record_aux = True
    y, aux = mlp(tokens(), return_aux=True)
    expected = by_children(mlp, tokens())
    close(y, expected)
    # the change is visible
    assert (y - plain).norm() > 0.1 * plain.norm()
    gate = mlp.get_submodule("gate_proj")(tokens())
    assert abs(aux.l0.item() - (gate > 0).sum().item() / len(gate)) <= 1
    assert mlp.aux is not None
    leaves = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
    got = torch.autograd.grad(y.float().sum(), leaves, allow_unused=True)
    wanted = torch.autograd.grad(expected.float().sum(), leaves, allow_unused=True)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            close(one, other)


@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
@pytest.mark.parametrize("change", [hook, adapter, wrapped, weight_norm])
def test_children_of_the_layer_without_a_gate(name: str, change: Callable[..., None]) -> None:
    mlp = SparseMLP(K, N, True, dtype=BF16, strategy="row")
    change(mlp, name)
    agrees(mlp)
    assert mlp(tokens(), return_aux=True)[1].l0 > 0


def doubled(module: nn.Module, value: Tensor) -> Tensor:
    return 2 * value if isinstance(module, nn.Linear) else value


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def hooked(register: Callable[..., Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


AROUND_ALL: dict[str, Callable[[], Any]] = {
    "forward hook": lambda: hooked(
        torch.nn.modules.module.register_module_forward_hook, lambda m, args, y: doubled(m, y)
    ),
    "forward pre-hook": lambda: hooked(
        torch.nn.modules.module.register_module_forward_pre_hook, lambda m, args: doubled(m, args[0])
    ),
    "backward hook": lambda: hooked(
        torch.nn.modules.module.register_module_full_backward_hook, lambda m, dx, dy: (doubled(m, dx[0]),)
    ),
    "backward pre-hook": lambda: hooked(
        torch.nn.modules.module.register_module_full_backward_pre_hook, lambda m, dy: (doubled(m, dy[0]),)
    ),
    "nn.Linear.forward": lambda: replaced(nn.Linear, "forward", lambda f: lambda m, x: 2 * f(m, x)),
    "nn.Linear.__call__": lambda: replaced(nn.Module, "__call__", lambda f: lambda m, *args: doubled(m, f(m, *args))),
    "F.linear": lambda: replaced(F, "linear", lambda f: lambda *args: 2 * f(*args)),
}


@pytest.mark.parametrize("around", AROUND_ALL)
@pytest.mark.parametrize("strategy", ["row", "dense"])
@MODULES
def test_global_hooks_take_effect(cls: Module, strategy: Any, around: str) -> None:
    mlp = cls(K, N, True, dtype=BF16, strategy=strategy)

    def results(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x = tokens().requires_grad_()
        y = call(x)
        return y, *torch.autograd.grad(y.float().sum(), [x, *mlp.parameters()])

    before = results(mlp)
    with AROUND_ALL[around]():
        got, expected = results(mlp), results(lambda x: by_children(mlp, x))
    assert not all(torch.equal(one, other) for one, other in zip(got, before, strict=True))
    for one, other in zip(got, expected, strict=True):
        close(one, other)
    assert all(torch.equal(one, other) for one, other in zip(results(mlp), before, strict=True))


@pytest.mark.parametrize("around", ["nn.Linear.forward", "F.linear"])
def test_code_put_around_linear_layers_counts_for_pairs(around: str) -> None:
    dense = nn.Sequential(Pair())
    sparse = copy.deepcopy(dense)
    sparsify_(sparse, strategy="row")
    x = torch.randn(3, K)
    with AROUND_ALL[around](), torch.no_grad():
        torch.testing.assert_close(sparse(x), dense(x))


SET_LATER: dict[str, Callable[[Any], Any]] = {
    "function": lambda child: lambda x: 3 * nn.Linear.forward(child, x),
    "partial": lambda child: functools.partial(lambda x: 3 * nn.Linear.forward(child, x)),
    "method": lambda child: types.MethodType(lambda self, x: 3 * nn.Linear.forward(self, x), child),
    "another's": lambda child: nn.Linear(child.in_features, child.out_features, dtype=BF16).forward,
}


@pytest.mark.parametrize("later", SET_LATER)
@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
@pytest.mark.parametrize("strategy", ["row", "dense"])
@MODULES
def test_compiled_layers_see_a_forward_that_is_set_later(cls: Module, strategy: Any, name: str, later: str) -> None:
    torch.compiler.reset()
    mlp, graphs = cls(K, N, True, dtype=BF16, strategy=strategy), []
    compiled = torch.compile(mlp, backend=lambda graph, _: graphs.append(graph.code) or graph.forward, fullgraph=True)
    child = child_of(mlp, name)
    with torch.no_grad():
        before = compiled(tokens())
        assert ("twell" in graphs[0]) == (strategy == "row")
        child.forward = SET_LATER[later](child)
        got = compiled(tokens())
        close(got, by_children(mlp, tokens()))
        assert (got - before).norm() > 0.1 * before.norm()
        del child.forward
        assert torch.equal(compiled(tokens()), before)
        assert len(graphs) == 2


def test_code_put_around_linear_layers_before_twell_is_imported_counts() -> None:
    code = """
import torch
from torch import nn
original = nn.Linear.forward
nn.Linear.forward = lambda self, x: 2 * original(self, x)
from twell.nn import SparseMLP
print(SparseMLP(8, 8)._is_plain())
"""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'python'}{os.pathsep}{root}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_weight_of_a_subclass_without_behaviour_is_plain() -> None:
    class Named(nn.Parameter):
        note = "of a framework that marks its weights"

    mlp = SparseMLP(K, N, dtype=BF16)
    mlp.up_proj.weight = Named(mlp.up_proj.weight.detach())
    assert mlp._is_plain()


@MODULES
def test_compiled_graphs_see_global_hooks(cls: Module) -> None:
    torch.compiler.reset()
    mlp, graphs = cls(K, N, dtype=BF16), []
    compiled = torch.compile(mlp, backend=lambda graph, _: graphs.append(1) or graph.forward, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            close(compiled(tokens()), mlp(tokens()))
        assert len(graphs) == 1
        with AROUND_ALL["nn.Linear.forward"]():
            close(compiled(tokens()), by_children(mlp, tokens()))
        assert torch.equal(compiled(tokens()), mlp(tokens()))


@MODULES
def test_changed_children_in_a_compiled_graph(cls: Module) -> None:
    torch.compiler.reset()
    mlp = cls(K, N, dtype=BF16)
    compiled = torch.compile(mlp, backend="aot_eager")
    with torch.no_grad():
        close(compiled(tokens()), by_children(mlp, tokens()))
        adapter(mlp, "up_proj")
        close(compiled(tokens()), by_children(mlp, tokens()))
        close(torch.compile(mlp, backend="aot_eager", fullgraph=True)(tokens()), by_children(mlp, tokens()))


def test_changed_children_are_seen_and_forgotten() -> None:
    mlp = SparseGatedMLP(K, N, dtype=BF16, strategy="row")
    with torch.no_grad():
        sparse = mlp(tokens())
        handle = mlp.down_proj.register_forward_hook(lambda module, args, y: 3 * y)
        assert not torch.equal(mlp(tokens()), sparse)
        (choice,) = explain(mlp).rows
        assert (choice.strategy, choice.reason) == ("dense", "a projection is more than a weight and a bias")
        handle.remove()
        assert torch.equal(mlp(tokens()), sparse)
    mlp.accumulate_main_grad = True
    adapter(mlp, "gate_proj")
    with pytest.raises(NotImplementedError, match=r"accumulate_main_grad: expected plain nn\.Linear projections"):
        mlp(tokens())


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("change", [hook, pre_hook, own_forward, weight_norm, subclass, adapter, wrapped])
def test_changed_linears_make_no_layer(index: int, change: Callable[..., None]) -> None:
    """Otherwise only the weight would be shared."""
    layers = SparseGatedMLP(K, N, dtype=BF16, strategy="row")
    change(layers, CHILDREN[index])
    with pytest.raises(
        TypeError, match=rf"{CHILDREN[index].removesuffix('_proj')} must be an? (plain )?nn.Linear, got"
    ):
        SparseGatedMLP.from_linear(*(layers.get_submodule(name) for name in CHILDREN))


def test_accelerate_places_and_offloads() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(SparseGatedMLP(K, N, dtype=BF16, strategy="row"), SparseMLP(K, N, dtype=BF16, strategy="row"))
    with torch.no_grad():
        expected = model(tokens())
    placed = accelerate.dispatch_model(copy.deepcopy(model), {"": "cpu"}, force_hooks=True)
    with torch.no_grad():
        # if every weight is on its device nothing changes, and the layers stay sparse
        assert torch.equal(placed(tokens()), expected)
        assert not any(choice.strategy == "dense" for choice in explain(placed).rows)
        offloaded = accelerate.cpu_offload(copy.deepcopy(model), torch.device("cpu"))
        close(offloaded(tokens()), expected)
    with accelerate.init_empty_weights():
        empty = nn.Sequential(
            SparseGatedMLP(K, N, dtype=BF16, strategy="row"), SparseMLP(K, N, dtype=BF16, strategy="row")
        )
    for name, tensor in model.state_dict().items():
        accelerate.utils.set_module_tensor_to_device(empty, name, "cpu", tensor.contiguous())
    with torch.no_grad():
        assert torch.equal(empty(tokens()), expected)


def test_dynamic_quantisation() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(SparseMLP(K, N), {nn.Linear})
        x = tokens(torch.float32)
        with torch.no_grad():
            close(quantised(x), by_children(quantised, x))


# models whose layers were replaced


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(K, N, False), nn.Linear(K, N, False)
        self.down_proj, self.act_fn = nn.Linear(N, K, False), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.relu(self.up_proj(x)))
        return y


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.act(self.fc1(x)))
        return y


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gated(), Plain(), Pair()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def torch_model() -> tuple[nn.Module, nn.Module, Tensor]:
    dense = Blocks().to(BF16)
    sparse = copy.deepcopy(dense)
    assert sparsify_(sparse) == ["layers.0", "layers.1", "layers.2.fc2"]
    return sparse, dense, tokens()


def hf_model(kind: str) -> tuple[nn.Module, nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    import twell.integrations.transformers as twell_hf

    sizes: dict[str, Any] = {"hidden_size": K, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    if kind == "opt":
        config = transformers.OPTConfig(**sizes, ffn_dim=N, word_embed_proj_dim=K, dropout=0.0)
    else:
        family = transformers.LlamaConfig if "llama" in kind else transformers.Qwen2Config
        config = family(**sizes, intermediate_size=N, num_key_value_heads=2, hidden_act="relu")
    dense = transformers.AutoModelForCausalLM.from_config(config).to(BF16).eval()
    if kind.startswith("sparse_"):
        own = {"llama": "SparseLlamaForCausalLM", "qwen2": "SparseQwen2ForCausalLM"}[kind.removeprefix("sparse_")]
        cls = getattr(twell_hf, own)
        sparse = cls(cls.config_class(**config.to_dict())).to(BF16).eval()
        sparse.load_state_dict(dense.state_dict())
    else:
        sparse = twell_hf.sparsify(copy.deepcopy(dense))
    return sparse, dense, torch.arange(12).view(2, 6)


KINDS = pytest.mark.parametrize("kind", ["torch", "llama", "qwen2", "opt", "sparse_llama", "sparse_qwen2"])


def model_of(kind: str) -> tuple[nn.Module, nn.Module, Tensor]:
    return torch_model() if kind == "torch" else hf_model(kind)


def out(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = model(x)
    return y if isinstance(y, Tensor) else y.logits


def matches(sparse: nn.Module, dense: nn.Module, x: Tensor) -> None:
    assert len(layers(sparse)) == (3 if isinstance(dense, Blocks) else 2)
    close(out(sparse, x), out(dense, x))


@KINDS
@pytest.mark.parametrize("load", [loaded, assigned, copied, as_data, as_replaced_parameters, through_state_dict])
def test_models_take_weights_after_construction(kind: str, load: Callable[..., None]) -> None:
    sparse, dense, x = model_of(kind)
    matches(sparse, dense, x)
    assert sparse.state_dict().keys() == dense.state_dict().keys()
    state = new_state(dense)
    dense.load_state_dict(state)
    before = out(sparse, x)
    load(sparse, {name: tensor.clone() for name, tensor in state.items()})
    if hasattr(sparse, "tie_weights"):
        sparse.tie_weights()
    matches(sparse, dense, x)
    assert not torch.equal(out(sparse, x), before)


@KINDS
def test_models_are_copied_moved_and_cast(kind: str) -> None:
    sparse, dense, x = model_of(kind)
    for duplicate in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved):
        other = duplicate(sparse)
        matches(other, dense, x)
        # its own weights, all of them
        loaded(other, {name: torch.zeros_like(tensor) for name, tensor in other.state_dict().items()})
        assert not torch.equal(out(other, x), out(sparse, x))
        matches(sparse, dense, x)
    for dtype in (torch.float32, torch.float16, BF16):
        dense.to(dtype)
        sparse.to(dtype)
        x = x.to(dtype) if x.is_floating_point() else x
        matches(sparse, dense, x)
    matches(sparse.share_memory(), dense, x)
    with torch.inference_mode():
        close(out(sparse, x), out(dense, x))
        loaded(sparse, dense.state_dict())
        close(out(copy.deepcopy(sparse), x), out(dense, x))
    meta = copy.deepcopy(sparse).to("meta")
    for rebuilt in (copy.deepcopy(meta), pickle.loads(pickle.dumps(meta))):
        rebuilt.load_state_dict(sparse.state_dict(), assign=True)
        assert all(layer.down_proj.weight.is_contiguous() for layer in layers(rebuilt).values())
        if kind == "torch":
            matches(rebuilt, dense, x)


@KINDS
def test_models_are_called_from_threads(kind: str) -> None:
    sparse, _, x = model_of(kind)
    expected = [out(sparse, x[i : i + 1]) for i in range(2)] * 3
    got: dict[int, Tensor] = {}

    def work(i: int) -> None:
        for _ in range(4):
            got[i] = out(sparse, x[i % 2 : i % 2 + 1])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6
    assert all(torch.equal(got[i], expected[i]) for i in got)


@KINDS
def test_models_train_what_requires_grad(kind: str) -> None:
    sparse, dense, x = model_of(kind)
    sparse.float()
    dense.float()
    x = x.float() if x.is_floating_point() else x

    def gradients(model: nn.Module) -> dict[str, Tensor | None]:
        model.zero_grad()
        y = model(x)
        (y if isinstance(y, Tensor) else y.logits).float().square().mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    for word in ("", "up_proj", "down_proj", "fc1", "fc2", "gate_proj"):
        for model in (sparse, dense):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not word or word not in name)
        got, expected = gradients(sparse), gradients(dense)
        assert got.keys() == expected.keys()
        for name, gradient in got.items():
            wanted = expected[name]
            assert (gradient is None) == (wanted is None)
            if gradient is not None and wanted is not None:
                assert (gradient - wanted).norm() <= 1e-4 * wanted.norm() + 1e-9, name


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *itertools.product(("fc1", "fc2"), (weight_norm, spectral_norm, new_weight_norm)),
        *(("fc1", pre_hook), ("fc2", hook), ("fc2", own_forward), ("fc2", wrapped)),
    ],
)
def test_children_of_a_pair_that_are_changed_later(name: str, change: Callable[..., None]) -> None:
    sparse, dense, x = torch_model()
    one, other = sparse.get_submodule("layers.2"), dense.get_submodule("layers.2")
    for pair in (one, other):
        torch.manual_seed(0)
        change(pair, name)
    close(out(one, x), out(other, x))


@pytest.mark.parametrize("name", ["fc1", "fc2"])
def test_adapters_of_a_pair_are_an_error(name: str) -> None:
    """They add to a layer's output, which for the first of a pair is its input."""
    sparse, _, x = torch_model()
    adapter(sparse.get_submodule("layers.2"), name)
    with pytest.raises((RuntimeError, ValueError)):
        out(sparse, x)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("kind", ["llama", "opt", "sparse_llama"])
def test_adapters_of_peft(kind: str, merge: bool) -> None:
    peft = pytest.importorskip("peft")
    sparse, dense, x = hf_model(kind)
    names = ["fc1", "fc2"] if kind == "opt" else ["gate_proj", "up_proj", "down_proj"]
    adapted = []
    for model in (sparse, dense):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=names, r=4, init_lora_weights=False)
        adapted.append(peft.get_peft_model(copy.deepcopy(model), config))
    if merge:
        adapted = [model.merge_and_unload() for model in adapted]
    try:
        y = out(adapted[0], x)
    except (TypeError, ValueError, RuntimeError):
        assert kind == "opt"
        return
    close(y, out(adapted[1], x))
